"""Clocks and what is kept of samples."""

import pytest

from windtunnel.errors import InputError
from windtunnel.lab.profile.samples import statistics_of
from windtunnel.lab.timing import Stopwatch, clock_for


def test_stretches_between_marks_add_up() -> None:
    times = iter([0.0, 1.0, 1.5, 4.0, 4.25])
    watch = Stopwatch(lambda: next(times))
    for name in ("", "norm", "gemm", "", "norm"):
        watch.mark(name)
    assert watch.durations() == {"norm": [1.0, 0.25], "gemm": [0.5]}  # the stretch of 2.5 has no name


def test_an_interrupted_sample_is_counted_and_not_used() -> None:
    statistics = statistics_of([1.0, 1.01, 0.99, 1.02, 0.98, 9.0])
    assert statistics.num_outliers == 1
    assert statistics.num_samples == 6
    assert statistics.max_s == 1.02
    assert statistics.mean_s == pytest.approx(1.0)
    assert statistics_of([1.0, 1.1]).num_outliers == 0


@pytest.mark.parametrize(
    ("device", "threads", "wanted", "message"),
    [
        ("cpu", 1, "sundial", "there is no clock 'sundial'"),
        ("cpu", 1, "cuda_event", "cannot time operators on cpu"),
        ("cuda", 1, "wall", "cannot time operators on cuda"),
        ("cpu", 4, "cpu_time", "adds up 4 threads"),
    ],
)
def test_clocks_that_cannot_measure_are_refused(device: str, threads: int, wanted: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        clock_for(device, threads, wanted)


def test_the_usual_clock() -> None:
    assert clock_for("cpu", 1) == "cpu_time"
    assert clock_for("cpu", 2) == "wall"
    assert clock_for("cuda", 8) == "cuda_event"
