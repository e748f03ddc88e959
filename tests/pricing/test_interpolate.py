import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.pricing.interpolate import Curve, Floats, Point, Surface, bend, corner_sites, gaps, nearest_sites

GRID = np.array([1.0, 4.0, 16.0, 64.0])
SECONDS = np.array([2e-6, 2.5e-6, 7e-6, 30e-6])


def linear(axes: object) -> Floats:
    """A reference that grows with the axis."""
    (positions,) = axes.values()  # type: ignore[attr-defined]
    return np.asarray(positions * 1e-6)


def product(axes: object) -> Floats:
    sole, other = axes.values()  # type: ignore[attr-defined]
    return np.asarray(sole * other * 1e-6)


def curve() -> Curve:
    return Curve.of("m", GRID, SECONDS, linear)


def test_measured_points_come_back_exactly() -> None:
    predicted = curve().predict(GRID, linear)
    np.testing.assert_allclose(predicted.seconds, SECONDS, rtol=1e-12)
    assert predicted.exact.all()
    assert predicted.inside.all()


@given(st.floats(1.0, 64.0))
def test_between_two_points_seconds_stay_between_theirs(positions: float) -> None:
    predicted = curve().predict(np.array([positions]), linear)
    right = max(np.searchsorted(GRID, positions), 1)
    assert SECONDS[right - 1] * (1 - 1e-12) <= predicted.seconds[0] <= SECONDS[right] * (1 + 1e-12)


def test_monotone_measurements_give_monotone_seconds_between() -> None:
    positions = np.geomspace(1, 64, 500)
    assert np.all(np.diff(curve().predict(positions, linear).seconds) >= 0)


def test_beyond_the_grid_the_utilisation_at_its_edge_is_kept() -> None:
    predicted = curve().predict(np.array([640.0, 0.1]), linear)
    np.testing.assert_allclose(predicted.seconds, [300e-6, 0.2e-6])
    assert not predicted.inside.any()


def test_no_step_at_the_edge_of_the_grid() -> None:
    below, above = curve().predict(np.array([64 * (1 - 1e-9), 64 * (1 + 1e-9)]), linear).seconds
    assert above == pytest.approx(below, rel=1e-6)


def test_what_follows_the_reference_is_exact_between_points() -> None:
    positions = np.array([3.0, 30.0])
    follows = Curve.of("m", GRID, GRID * 5e-6, linear)
    np.testing.assert_allclose(follows.predict(positions, linear).seconds, positions * 5e-6)


def test_a_straight_curve_is_a_power_law_between_points_and_follows_the_reference_beyond() -> None:
    straight = Curve.of("m", GRID, SECONDS, linear, straight=True)
    predicted = straight.predict(np.array([8.0, 128.0]), linear)
    np.testing.assert_allclose(predicted.seconds, [np.sqrt(2.5e-6 * 7e-6), 60e-6])


def test_nothing_is_interpolated_across_a_step() -> None:
    """From 16 on another kernel runs: before it the first kernel goes on at its last utilisation."""
    steps = Curve.of("m", GRID, SECONDS, linear, steps=(16.0,))
    positions = np.array([4.0, 8.0, 15.0, 16.0, 40.0, 640.0])
    predicted = steps.predict(positions, linear)
    np.testing.assert_allclose(predicted.seconds[:2], [2.5e-6, 5e-6])
    assert predicted.seconds[2] == pytest.approx(7e-6), "no more than the first point of the next kernel"
    np.testing.assert_allclose(predicted.seconds[3:], curve().predict(positions[3:], linear).seconds)
    assert predicted.exact.tolist() == [True, False, False, True, False, False]
    assert predicted.inside.tolist() == [True] * 5 + [False]


@given(st.floats(1.0, 64.0), st.floats(1.0, 80.0))
def test_a_step_leaves_seconds_between_those_of_the_points_around(positions: float, step: float) -> None:
    predicted = (
        Curve.of("m", GRID, SECONDS, linear, steps=(step,)).predict(np.array([positions, *GRID]), linear).seconds
    )
    right = max(np.searchsorted(GRID, positions), 1)
    assert SECONDS[right - 1] * (1 - 1e-12) <= predicted[0] <= SECONDS[right] * (1 + 1e-12)
    np.testing.assert_allclose(predicted[1:], SECONDS)


def surface() -> Surface:
    """Ragged: batch 8 was measured up to 64 tokens, batch 1 up to 256."""
    batch = np.array([1.0, 1.0, 1.0, 8.0, 8.0])
    tokens = np.array([16.0, 64.0, 256.0, 16.0, 64.0])
    return Surface.of({"batch": batch, "tokens": tokens}, batch * tokens * 2e-6, product)


def test_a_surface_is_exact_at_its_points_and_follows_the_reference_elsewhere() -> None:
    axes = {
        "batch": np.array([1.0, 8.0, 3.0, 8.0, 32.0, 0.5]),
        "tokens": np.array([64.0, 16.0, 40.0, 256.0, 64.0, 64.0]),
    }
    predicted = surface().predict(axes, product)
    np.testing.assert_allclose(predicted.seconds, axes["batch"] * axes["tokens"] * 2e-6)
    assert predicted.exact.tolist() == [True, True, False, False, False, False]
    assert predicted.inside.tolist() == [True, True, True, False, False, False]


@pytest.mark.full
@given(st.lists(st.tuples(st.floats(0.2, 64), st.floats(1, 1000)), min_size=2, max_size=6))
def test_arrays_give_what_single_points_give(points: list[tuple[float, float]]) -> None:
    batch, tokens = np.array(points).T
    together = surface().predict({"batch": batch, "tokens": tokens}, product)
    alone = [
        surface().predict({"batch": batch[[i]], "tokens": tokens[[i]]}, product).seconds[0] for i in range(len(batch))
    ]
    np.testing.assert_allclose(together.seconds, alone)


def test_a_filled_point_is_followed_but_is_not_called_exact() -> None:
    filled = Curve.of("m", GRID, SECONDS, linear, measured=np.array([True, True, False, True]))
    predicted = filled.predict(GRID, linear)
    np.testing.assert_allclose(predicted.seconds, SECONDS, rtol=1e-12)
    assert predicted.exact.tolist() == [True, True, False, True]
    assert predicted.inside.all()


def test_gaps_are_levels_between_two_points_of_one_curve() -> None:
    points = np.array([[1.0, 16], [1.0, 256], [8.0, 64], [8.0, 128]])
    levels = np.array([8.0, 16, 64, 100, 128, 256, 512])
    assert gaps(points, levels) == [(0, 64.0), (0, 100.0), (0, 128.0), (2, 100.0)]
    assert gaps(np.column_stack([levels]), levels) == []


def test_a_power_law_has_no_bend_and_a_step_has_its_own_height() -> None:
    low, positions, high = (1.0, 16.0), (1.0, 32.0), (1.0, 256.0)
    power_law: dict[Point, float] = {point: 0.7 * np.log(point[-1]) for point in (low, positions, high)}
    assert bend(power_law, low, positions, high) == pytest.approx(0.0)
    assert bend({**power_law, positions: power_law[positions] + 0.3}, low, positions, high) == pytest.approx(0.3)
    assert bend({low: 0.0, high: 1.0}, low, positions, high) is None


def test_corners_of_a_cell_weigh_by_position_in_log_space() -> None:
    sites = np.array([(n, k) for n in (16.0, 64.0) for k in (100.0, 400.0)])
    rows, weights = corner_sites(sites, np.array([32.0, 200.0]))
    assert sorted(sites[rows].tolist()) == sites.tolist()
    np.testing.assert_allclose(weights, 0.25)
    rows, weights = corner_sites(sites, np.array([16.0, 100.0 * 4**0.25]))
    assert {tuple(sites[row]): round(float(weight), 6) for row, weight in zip(rows, weights, strict=True)} == {
        (16.0, 100.0): 0.75,
        (16.0, 400.0): 0.25,
    }


def test_a_corner_that_was_not_measured_leaves_its_weight_to_the_others() -> None:
    sites = np.array([(16.0, 100.0), (16.0, 400.0), (64.0, 100.0)])
    rows, weights = corner_sites(sites, np.array([32.0, 200.0]))
    assert len(rows) == 3
    np.testing.assert_allclose(weights, 1 / 3)


def test_the_nearest_site_weighs_most() -> None:
    sites = np.array([(8.0, 1.0), (16.0, 1.0), (64.0, 1.0)])
    rows, weights = nearest_sites(sites, np.array([15.0, 1.0]), 2)
    assert rows.tolist() == [1, 0]
    assert weights[0] > 0.9
