"""Where the profiler measures next."""

import itertools
import math

import pytest

from windtunnel.lab.profile.compute import Point, Refinement, octaves


def refined(seconds_of, axes, tolerance: float, limit: int = 200) -> tuple[Refinement, int]:
    grid = Refinement(axes, lambda _: True)
    grid.start({point: seconds_of(point) for point in grid.coarse()})
    measured = 0
    while grid.worst() > tolerance and measured < limit:
        following = grid.next_point()
        if following is None:
            break
        interval, middle = following
        grid.learn(interval, middle, seconds_of(middle))
        measured += 1
    return grid, measured


def test_octaves_end_at_the_largest() -> None:
    assert octaves(64, 4) == [1, 4, 16, 64]
    assert octaves(100, 4) == [1, 4, 16, 64, 100]
    assert octaves(1) == [1]


def test_a_power_law_needs_one_look_at_each_interval() -> None:
    grid, measured = refined(lambda p: p[0] ** 0.7 * p[1] ** 1.1, ([1.0, 16.0, 256.0], [16.0, 1024.0]), 0.05)
    assert grid.worst() < 1e-9
    assert measured == 2 * 2 + 3  # two intervals on each of two lines, and one on each of three


def test_a_kink_draws_the_points() -> None:
    def flat_then_linear(point: Point) -> float:
        return max(point[0], 40.0) * point[1]

    grid, _ = refined(flat_then_linear, ([1.0, 4.0, 16.0, 64.0, 256.0, 1024.0], [16.0]), 0.02)
    new = sorted(p[0] for p in grid.seconds if p[0] not in (1, 4, 16, 64, 256, 1024))
    near = [x for x in new if 16 < x < 64]
    assert len(near) > len(new) / 2
    # What straight lines between the points then say is within the tolerance everywhere.
    position = sorted(p[0] for p in grid.seconds)
    for low, high in itertools.pairwise(position):
        middle = math.sqrt(low * high)
        line = math.sqrt(flat_then_linear((low, 16.0)) * flat_then_linear((high, 16.0)))
        assert line == pytest.approx(flat_then_linear((middle, 16.0)), rel=0.06)


def test_points_that_cannot_be_measured_are_left_out() -> None:
    grid = Refinement(([1.0, 4.0, 16.0], [16.0, 256.0]), lambda point: point[0] * point[1] <= 1024)
    assert (16.0, 256.0) not in set(grid.coarse())
    grid.start(dict.fromkeys(grid.coarse(), 1.0))
    while (found := grid.next_point()) is not None:
        assert found[1][0] * found[1][1] <= 1024
        grid.learn(*found, 1.0)
