"""Clocks that time the operators inside a running forward, and what is kept of repeated times."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from windtunnel.errors import InputError

Floats = NDArray[np.float64]

CLOCKS = ("cpu_time", "wall", "cuda_event")
"""`cpu_time` counts this process alone: at a load of one other task per core, the spread of a forward on the wall
clock is 17% to 75%, on the CPU-time clock 1% to 9%. It means seconds only where one thread computes."""

CLOCKS_OF_HOST: Mapping[str, Callable[[], float]] = {"cpu_time": time.process_time, "wall": time.perf_counter}

QUEUE_AHEAD_CYCLES = 20_000_000
"""A GPU waits so long (about 10 ms) before a timed forward, while the host queues its kernels."""


class Stopwatch(Protocol):
    """Times the stretches between marks."""

    def mark(self, name: str) -> None:
        """End a stretch called `name`; an empty name drops it."""
        ...

    def durations(self) -> dict[str, list[float]]:
        """Name -> seconds of each of its stretches, in order."""
        ...


@dataclass
class HostStopwatch:
    """Marks read a clock of the host; right where operators run on the host."""

    now: Callable[[], float]
    names: list[str] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)

    def mark(self, name: str) -> None:
        self.names.append(name)
        self.times_s.append(self.now())

    def durations(self) -> dict[str, list[float]]:
        return _stretches(self.names, np.diff(self.times_s).tolist())


@dataclass
class CudaStopwatch:
    """Marks are events in the stream; they are read when the GPU has done its work."""

    names: list[str] = field(default_factory=list)
    events: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        import torch

        torch.cuda._sleep(QUEUE_AHEAD_CYCLES)

    def mark(self, name: str) -> None:
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.names.append(name)
        self.events.append(event)

    def durations(self) -> dict[str, list[float]]:
        self.events[-1].synchronize()
        pairs = zip(self.events, self.events[1:], strict=False)
        return _stretches(self.names, [before.elapsed_time(after) / 1e3 for before, after in pairs])


def _stretches(names: Sequence[str], seconds: Sequence[float]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for name, spent_s in zip(names[1:], seconds, strict=True):
        if name:
            found.setdefault(name, []).append(spent_s)
    return found


def stopwatch(clock: str) -> Stopwatch:
    """A fresh stopwatch on one of `CLOCKS`."""
    return CudaStopwatch() if clock == "cuda_event" else HostStopwatch(CLOCKS_OF_HOST[clock])


def clock_for(device: str, num_threads: int, wanted: str | None = None) -> str:
    """The clock to use on `device`: the one wanted, else the one that other processes disturb least.

    Raises:
        InputError: there is no such clock, or it cannot measure there.
    """
    if wanted is None:
        return "cuda_event" if device == "cuda" else "cpu_time" if num_threads == 1 else "wall"
    if wanted not in CLOCKS:
        raise InputError(f"there is no clock {wanted!r}", f"known: {', '.join(CLOCKS)}")
    if (wanted == "cuda_event") != (device == "cuda"):
        raise InputError(f"the clock {wanted} cannot time operators on {device}")
    if wanted == "cpu_time" and num_threads > 1:
        raise InputError(f"the clock cpu_time adds up {num_threads} threads", "take wall, or set OMP_NUM_THREADS=1")
    return wanted


@dataclass(frozen=True)
class Statistics:
    """What is kept of repeated times of one operator."""

    median_s: float
    mean_s: float
    min_s: float
    max_s: float
    std_s: float
    num_samples: int
    num_outliers: int


OUTLIER_SPREAD = 5.0
"""Samples further above the median than so many interquartile ranges were interrupted: they are counted, not used."""


def statistics_of(seconds: Sequence[float]) -> Statistics:
    """The statistics of some samples without outliers; the median counts the outliers too, which hardly move it."""
    samples = np.asarray(seconds, np.float64)
    low, median, high = np.percentile(samples, [25, 50, 75])
    limit = median + OUTLIER_SPREAD * max(high - low, 0.02 * median)
    kept = samples[samples <= limit]
    return Statistics(
        median_s=float(median),
        mean_s=float(kept.mean()),
        min_s=float(kept.min()),
        max_s=float(kept.max()),
        std_s=float(kept.std()),
        num_samples=samples.size,
        num_outliers=samples.size - kept.size,
    )


def cpu_pressure() -> float | None:
    """Seconds since start-up in which some task of the machine waited for a CPU (Linux PSI); None where unknown."""
    try:
        with open("/proc/pressure/cpu", encoding="ascii") as file:  # noqa: PTH123
            return int(file.readline().rsplit("total=", 1)[1]) / 1e6
    except (OSError, IndexError, ValueError):
        return None
