"""Drive requests through an engine in this process, on a virtual clock that advances by the time of each step.

Idle time is jumped over and never slept through. On a clock of CPU time the run does not depend on what else the
machine does, so that a real engine can be compared with a simulated one on a busy machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from windtunnel.formats.engine_run import RawRun, RecordedRequest, RecordedStep
from windtunnel.lab.timing import Pressure

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

FIRST_TOKEN_ID = 3
"""First token id of random prompts: smaller ones often mean begin, end and padding."""

WARM_UP_STEPS = 2


@dataclass(frozen=True)
class EngineStep:
    """The record of one engine step."""

    scheduled: Mapping[str, int]
    """Request -> tokens in the step."""
    step_s: float
    schedule_s: float
    forward_s: float
    """Time of the model, the head and sampling."""
    process_s: float
    """Time in which the scheduler takes in the sampled tokens."""
    finished: tuple[str, ...]
    progressed: Mapping[str, int]
    """Request -> its output tokens so far."""

    @property
    def host_sample(self) -> HostSample:
        """The host's part of the step."""
        rest_s = self.step_s - self.forward_s - self.schedule_s - self.process_s
        return HostSample(len(self.scheduled), self.schedule_s, rest_s, self.process_s)


class SteppedEngine(Protocol):
    """An engine that is stepped by hand."""

    now: Callable[[], float]

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished."""

    def add(self, name: str, prompt: Sequence[int], output_tokens: int) -> None:
        """Queue a request that ends after exactly `output_tokens`."""

    def step(self) -> EngineStep:
        """Schedule, compute and process one batch."""

    def drop(self, names: Sequence[str]) -> None:
        """Abort requests."""

    def close(self) -> None:
        """End the engine, so that another can start in this process."""


def drive(
    engine: SteppedEngine, arrival_s: Floats, input_tokens: Ints, output_tokens: Ints, vocabulary: int, seed: int = 0
) -> RawRun:
    """Serve requests as they arrive; times are those of the engine's own clock.

    Args:
        engine: idle.
        arrival_s: ascending.
        input_tokens, output_tokens: of each request; prompts are random.
        vocabulary: token ids to draw from.
        seed: of the prompts.

    Returns:
        Requests, steps and the time of every output token, as `formats.engine_run` keeps them.
    """
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(FIRST_TOKEN_ID, vocabulary, n).tolist() for n in input_tokens]
    token_times: dict[str, list[float]] = {str(i): [] for i in range(arrival_s.size)}
    steps: list[RecordedStep] = []
    now_s, sent = 0.0, 0
    pressure = Pressure.start()
    while sent < arrival_s.size or engine.has_work:
        if not engine.has_work:
            now_s = max(now_s, float(arrival_s[sent]))
        before_s = engine.now()
        while sent < arrival_s.size and arrival_s[sent] <= now_s:
            engine.add(str(sent), prompts[sent], int(output_tokens[sent]))
            sent += 1
        step = engine.step()
        spent_s = engine.now() - before_s
        now_s += spent_s
        for name, count in step.progressed.items():
            times = token_times[name]
            times += [now_s] * (count - len(times))
        scheduled = tuple((int(name), count) for name, count in step.scheduled.items())
        steps.append(RecordedStep(cpu_s=spent_s, wall_s=spent_s, scheduled=scheduled))
    requests = tuple(
        RecordedRequest(float(sent_s), int(n), int(m))
        for sent_s, n, m in zip(arrival_s, input_tokens, output_tokens, strict=True)
    )
    by_request = {name: tuple(times_s) for name, times_s in token_times.items()}
    return RawRun(requests, tuple(steps), by_request, cpu_pressure=pressure.fraction() or 0.0)


def host_samples(
    engine: SteppedEngine, batches: Sequence[int], prompt_tokens: int, vocabulary: int, num_steps: int = 32
) -> list[HostSample]:
    """Measure the host's work in decode steps.

    Args:
        engine: idle, of at least as many requests as the largest batch.
        batches: numbers of decoding requests.
        prompt_tokens: of each, no more than the engine computes in a step.
        vocabulary: token ids to draw from.
        num_steps: of each batch, after two that are not counted.

    Returns:
        One sample a step.
    """
    rng = np.random.default_rng(0)
    samples: list[HostSample] = []
    for batch in batches:
        names = [f"batch{batch}x{number}" for number in range(batch)]
        for name in names:
            prompt = rng.integers(FIRST_TOKEN_ID, vocabulary, prompt_tokens).tolist()
            # The first decode while the others' prompts are computed, a step each at the most.
            engine.add(name, prompt, batch + WARM_UP_STEPS + num_steps + 1)
        decoding: set[str] = set()
        while len(decoding) < batch:
            decoding.update(name for name, count in engine.step().progressed.items() if count)
        steps = [engine.step() for _ in range(WARM_UP_STEPS + num_steps)]
        samples += [step.host_sample for step in steps[WARM_UP_STEPS:]]
        engine.drop(names)
    return samples


@dataclass(frozen=True)
class HostSample:
    """Host time of one step, outside the forward."""

    num_requests: int
    schedule_s: float
    prepare_s: float
    """Time to prepare inputs and hand outputs on: the rest of the host's time."""
    process_s: float
    """Time in which the scheduler takes in the sampled tokens."""

    @property
    def total_s(self) -> float:
        return self.schedule_s + self.prepare_s + self.process_s
