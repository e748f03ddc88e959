"""Steps of a run: their batches, their names for profilers, and their times."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field

from windtunnel.formats.captures.step_names import step_name


@dataclass(frozen=True)
class Batch:
    """The batch of a step: tokens of each request, prompts first, and the keys that the last of them sees."""

    computed: list[int]
    seen: list[int]
    num_prefills: int
    sampled: list[int]
    """Numbers of the requests that get a token."""

    @property
    def name(self) -> str:
        return step_name(self.computed, self.seen, self.num_prefills)

    @property
    def prefill_pairs(self) -> float:
        prompts = zip(self.computed[: self.num_prefills], self.seen[: self.num_prefills], strict=True)
        return sum(tokens * (keys - tokens / 2) for tokens, keys in prompts)


@dataclass
class StepClock:
    """A clock that times the steps of one run, and names them for a profiler if there is one."""

    synchronise: Callable[[], None]
    annotate: Callable[[str], AbstractContextManager[object]] = lambda _: nullcontext()
    end_step: Callable[[], None] = lambda: None
    """Called after each step."""
    batches: list[Batch] = field(default_factory=list)
    times: list[tuple[float, float, float]] = field(default_factory=list)
    """Start, duration and processor time of each step."""
    named: ExitStack = field(default_factory=ExitStack)

    def begin(self, batch: Batch) -> None:
        """Name the current step, as soon as its batch is known."""
        self.batches.append(batch)
        self.named.enter_context(self.annotate(batch.name))

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time one step; `begin` is called within the block."""
        self.synchronise()
        began_s, cpu_s = time.perf_counter(), time.process_time()
        yield
        self.synchronise()
        self.named.close()
        self.times.append((began_s, time.perf_counter() - began_s, time.process_time() - cpu_s))
        self.end_step()
