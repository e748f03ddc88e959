"""Clocks that time the operators inside a running forward."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

from windtunnel.errors import InputError, check_known

CLOCKS = ("cpu_time", "wall", "cuda_event", "cuda_graph")
"""`cpu_time` counts this process alone: at a load of one other task per core, the spread of a forward on the wall
clock is 17% to 75%, on the CPU-time clock 1% to 9%. It means seconds only where one thread computes.

`cuda_event` times between events in the stream, `cuda_graph` the same inside a replayed graph, as engines decode."""

CLOCKS_OF_HOST: Mapping[str, Callable[[], float]] = {"cpu_time": time.process_time, "wall": time.perf_counter}

QUEUE_AHEAD_S, MOST_AHEAD_S = 0.01, 0.2
"""Time that a GPU waits before a timed forward, while the host queues its kernels; longer where the host needs more."""
CYCLES_PER_S = 2e9
"""Clock rate that `torch.cuda._sleep` counts: H100 SXM 1.98 GHz, A100 1.41, others up to 2.6 (data sheets)."""
EMPTY_MARKS = 200


@dataclass
class Stopwatch:
    """A stopwatch: `mark` ends a span by name, which an empty name drops.

    Args:
        read: reads a clock of the host, right where operators run on it, or leaves a mark in a GPU's stream.
        spans_s: turns what was read at the marks into the seconds between them.
        mark_s: cost of a mark itself, which is subtracted from every span.
    """

    read: Callable[[], Any]
    spans_s: Callable[[list[Any]], Iterable[float]] = np.diff
    mark_s: float = 0.0
    names: list[str] = field(default_factory=list)
    marks: list[Any] = field(default_factory=list)

    def mark(self, name: str) -> None:
        self.names.append(name)
        self.marks.append(self.read())

    def durations(self) -> dict[str, list[float]]:
        """Return the seconds of the spans of each name."""
        by_name: dict[str, list[float]] = {}
        for name, span_s in zip(self.names[1:], self.spans_s(self.marks), strict=True):
            if name:
                by_name.setdefault(name, []).append(max(float(span_s) - self.mark_s, 0.0))
        return by_name


def cuda_stopwatch(in_graph: bool = False, mark_s: float = 0.0) -> Stopwatch:
    """Return a stopwatch whose marks are events in the stream; they are read when the GPU has done its work.

    Args:
        in_graph: marks are made while a graph is captured, and read after each of its replays.
        mark_s: time that an event itself takes in the stream.
    """
    import torch

    def record() -> Any:
        # Events of a graph keep their times only where they are external to it.
        event = torch.cuda.Event(enable_timing=True, **({"external": True} if in_graph else {}))
        event.record()
        return event

    def spans_s(events: list[Any]) -> list[float]:
        torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in pairwise(events)]

    return Stopwatch(record, spans_s, mark_s)


def stopwatch(clock: str, launch_s: float = 0.0) -> Stopwatch:
    """Return a stopwatch on one of `CLOCKS`, for work that the host queues to a GPU in `launch_s` (0: not known)."""
    if clock in CLOCKS_OF_HOST:
        return Stopwatch(CLOCKS_OF_HOST[clock], mark_s=mark_cost_s(clock))
    watch = cuda_stopwatch(mark_s=event_cost_s(in_graph=False))
    queue_ahead(launch_s)
    return watch


def queue_ahead(launch_s: float = 0.0) -> None:
    """Let the GPU wait while the host queues the timed work, twice as long as queueing takes."""
    import torch

    torch.cuda._sleep(int(min(max(QUEUE_AHEAD_S, 2 * launch_s), MOST_AHEAD_S) * CYCLES_PER_S))


def captured(run: Callable[[], object]) -> Callable[[], object] | None:
    """Return a function that replays `run` as a CUDA graph; None where `run` waits for the GPU."""
    import torch

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    replay: Callable[[], object] = graph.replay
    return replay


@cache
def mark_cost_s(clock: str) -> float:
    """Cost of a mark on a clock of the host: the median of many in a row."""
    watch = Stopwatch(CLOCKS_OF_HOST[clock])
    for _ in range(1000):
        watch.mark("empty")
    return float(np.median(watch.durations()["empty"]))


@cache
def event_cost_s(in_graph: bool) -> float:
    """Cost of an event in the stream, or in a replayed graph: the median between many with nothing between them.

    A forward without events does not pay it, and small kernels take no longer.
    """
    watch = cuda_stopwatch(in_graph)

    def marks() -> None:
        for _ in range(EMPTY_MARKS):
            watch.mark("empty")

    if in_graph:
        replay = captured(marks)
        if replay is None:
            return 0.0
        replay()
    else:
        queue_ahead()
        marks()
    return float(np.median(watch.durations()["empty"]))


def clock_for(device: str, num_threads: int, clock: str | None = None) -> str:
    """Return the clock to use on `device`: the given one, else the one that other processes disturb least. InputError
    where there is no such clock, or it cannot measure there."""
    if clock is None:
        return "cuda_event" if device == "cuda" else "cpu_time" if num_threads == 1 else "wall"
    check_known(clock, CLOCKS, f"there is no clock {clock!r}")
    if (clock not in CLOCKS_OF_HOST) != (device == "cuda"):
        raise InputError(f"the clock {clock} cannot time operators on {device}")
    if clock == "cpu_time" and num_threads > 1:
        raise InputError(f"the clock cpu_time adds up {num_threads} threads", "take wall, or set OMP_NUM_THREADS=1")
    return clock


def cpu_pressure() -> float | None:
    """Return the seconds since start-up in which some task waited for a CPU (Linux PSI); None where unknown."""
    try:
        with open("/proc/pressure/cpu", encoding="ascii") as file:  # noqa: PTH123
            return int(file.readline().rsplit("total=", 1)[1]) / 1e6
    except (OSError, IndexError, ValueError):
        return None


def measure_pressure() -> Callable[[], float | None]:
    """Return a function that gives the fraction of the time since this call in which some task waited for a CPU.

    It returns None where the kernel does not say.
    """
    started_s, before_s = time.monotonic(), cpu_pressure()

    def fraction() -> float | None:
        now_s = cpu_pressure()
        if before_s is None or now_s is None:
            return None
        return (now_s - before_s) / max(time.monotonic() - started_s, 1e-9)

    return fraction
