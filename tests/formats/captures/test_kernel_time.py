"""Sums, gaps and overlap of captures, against counting by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.formats.captures.capture import CLASSES, Capture, capture_table, innermost_ranges
from windtunnel.formats.captures.kernel_time import device_time, kernel_table, statistics


def capture_of(spans: list[tuple[int, int, bool]]) -> Capture:
    """(start, duration, communicates) in microseconds."""
    codes = [CLASSES.index("communication" if talks else "gemm") for *_, talks in spans]
    columns = {
        "name": [int(talks) for *_, talks in spans],
        "activity": np.zeros(len(spans)),
        "kernel_class": codes,
        "start_s": np.array([start for start, *_ in spans]) * 1e-6,
        "duration_s": np.array([took for _, took, _ in spans]) * 1e-6,
        "device": np.zeros(len(spans)),
    }
    kernels = capture_table("kernels", len(spans), columns)
    empty = capture_table("calls", 0, {}), capture_table("ranges", 0, {})
    return Capture("test", ("compute", "talk"), kernels, *empty, {})


@pytest.mark.full
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20), st.booleans()), min_size=1, max_size=30))
def test_a_device_s_time_is_what_counting_microseconds_gives(spans: list[tuple[int, int, bool]]) -> None:
    (use,) = device_time(capture_of(spans)).values()
    working, talking = (
        {time_us for start, took, talks in spans if talks == which for time_us in range(start, start + took)}
        for which in (False, True)
    )
    busy = working | talking
    assert use.busy_s == pytest.approx(len(busy) * 1e-6)
    assert use.span_s == pytest.approx((max(busy) + 1 - min(busy)) * 1e-6)
    assert use.communication_s == pytest.approx(len(talking) * 1e-6, abs=1e-15)
    assert use.overlapped_s == pytest.approx(len(working & talking) * 1e-6, abs=1e-12)
    starts = sorted(time_us for time_us in busy if time_us - 1 not in busy)
    assert len(use.gaps_s) == len(starts) - 1
    assert use.gaps_s.sum() == pytest.approx(use.idle_s, abs=1e-12)


@given(st.lists(st.tuples(st.integers(0, 4), st.floats(1e-9, 1.0)), min_size=1, max_size=50))
def test_statistics_are_numpy_s(rows: list[tuple[int, float]]) -> None:
    names, values = np.array([name for name, _ in rows]), np.array([value for _, value in rows])
    by_name = statistics(names, values)
    assert by_name["count"].sum() == len(rows)
    assert (np.diff(by_name["total"]) <= 0).all()
    for place, name in enumerate(by_name["name"]):
        mine = values[names == name]
        ours = [by_name[what][place] for what in ("total", "mean", "median", "least", "most")]
        assert ours == pytest.approx([mine.sum(), mine.mean(), np.median(mine), mine.min(), mine.max()])
        if len(mine) > 1:
            assert by_name["deviation"][place] == pytest.approx(mine.std(ddof=1), abs=1e-12)


def test_rates_count_only_kernels_whose_work_is_known() -> None:
    capture = capture_of([(0, 10, False), (10, 30, False)])
    flops = np.array([4e6, np.nan])
    kernels = capture.kernels.replaced(flops=flops)
    table = kernel_table(Capture("test", capture.names, kernels, capture.calls, capture.ranges, {}))
    assert table["flops_per_s"][0] == pytest.approx(4e6 / 10e-6)
    assert np.isnan(table["bytes_per_s"][0])


def test_the_innermost_range_is_found_on_the_same_thread_only() -> None:
    starts = [(0.0, 10.0, 1), (2.0, 3.0, 1), (2.0, 1.0, 1), (0.0, 10.0, 2)]
    columns = {name: [row[place] for row in starts] for place, name in enumerate(("start_s", "duration_s", "thread"))}
    ranges = capture_table("ranges", len(starts), columns)
    calls = capture_table("calls", 5, {"start_s": [1.0, 2.5, 4.0, 6.0, 6.0], "thread": [1, 1, 1, 1, 3]})
    assert innermost_ranges(calls, ranges).tolist() == [0, 2, 1, 0, -1]
