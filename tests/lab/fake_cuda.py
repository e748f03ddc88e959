"""torch.cuda as far as the stopwatches use it: a host that takes time to launch, a stream, events and graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

LAUNCH_S = 10e-6
"""The host takes so long to launch a kernel."""
CYCLES_PER_S = 2e9


@dataclass
class FakeCuda:
    """Kernels run when the host has launched them and the stream is free."""

    host_s: float = 0.0
    stream_s: float = 0.0
    event_s: float = 0.0
    """An event takes so long in the stream."""
    capturing: list[Callable[[], None]] | None = None

    def kernel(self, seconds: float) -> None:
        """Launch one, or put it into the graph that is being captured."""
        if self.capturing is not None:
            self.capturing.append(lambda: self._execute(seconds))
            return
        self.host_s += LAUNCH_S
        self.stream_s = max(self.stream_s, self.host_s)
        self._execute(seconds)

    def read_back(self) -> None:
        """What `.item()` does: the host waits, which no graph can hold."""
        if self.capturing is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.synchronize()

    def _execute(self, seconds: float) -> None:
        self.stream_s += seconds

    def synchronize(self) -> None:
        self.host_s = max(self.host_s, self.stream_s)

    def module(self) -> SimpleNamespace:
        """To stand in for torch."""
        return SimpleNamespace(
            cuda=SimpleNamespace(
                Event=lambda enable_timing=False, external=False: FakeEvent(self, enable_timing, external),
                CUDAGraph=lambda: FakeGraph(self),
                graph=self.graph,
                synchronize=self.synchronize,
                _sleep=self.sleep,
            )
        )

    def sleep(self, cycles: int) -> None:
        self.stream_s = max(self.stream_s, self.host_s) + cycles / CYCLES_PER_S

    @contextmanager
    def graph(self, graph: FakeGraph) -> Iterator[None]:
        self.capturing = graph.nodes
        try:
            yield
        finally:
            self.capturing = None


@dataclass
class FakeGraph:
    cuda: FakeCuda
    nodes: list[Callable[[], None]] = field(default_factory=list)

    def replay(self) -> None:
        self.cuda.host_s += LAUNCH_S
        self.cuda.stream_s = max(self.cuda.stream_s, self.cuda.host_s)
        for node in self.nodes:
            node()


@dataclass
class FakeEvent:
    cuda: FakeCuda
    enable_timing: bool
    external: bool
    at_s: float | None = None

    def record(self) -> None:
        if self.cuda.capturing is not None:
            if self.external:
                self.cuda.capturing.append(self._take)
            return  # an event inside a graph orders streams and has no time
        self._take()

    def _take(self) -> None:
        self.cuda.stream_s += self.cuda.event_s
        self.at_s = self.cuda.stream_s

    def synchronize(self) -> None:
        self.cuda.synchronize()

    def elapsed_time(self, later: FakeEvent) -> float:
        """Milliseconds, as torch's."""
        if not (self.enable_timing and later.enable_timing):
            raise RuntimeError("both events must be created with enable_timing")
        if self.at_s is None or later.at_s is None:
            raise RuntimeError("the event has not been recorded")
        if later.at_s > self.cuda.host_s:
            raise RuntimeError("device not ready")
        return (later.at_s - self.at_s) * 1e3
