"""Step an engine by hand in this process, and measure the host's share of its steps."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

FIRST_TOKEN_ID = 3
"""First token id of random prompts: smaller ones often mean begin, end and padding."""

WARM_UP_STEPS = 2
OVERHEAD_TOKENS = 512
"""Most tokens of a step where the host alone is measured."""


@dataclass
class EngineStep:
    """The record of one engine step, which hooks inside the engine may fill in."""

    scheduled: Mapping[str, int] = field(default_factory=dict)
    """Request -> tokens in the step."""
    step_s: float = 0.0
    schedule_s: float = 0.0
    forward_s: float = 0.0
    """Time of the model, the head and sampling."""
    process_s: float = 0.0
    """Time in which the scheduler takes in the sampled tokens."""
    progressed: Mapping[str, int] = field(default_factory=dict)
    """Request -> its output tokens so far."""

    @property
    def host_s(self) -> float:
        """Time of the host outside the forward."""
        return self.schedule_s + self.prepare_s + self.process_s

    @property
    def prepare_s(self) -> float:
        """Time to prepare inputs and hand outputs on: the rest of the host's time."""
        return self.step_s - self.forward_s - self.schedule_s - self.process_s


class SteppedEngine(Protocol):
    """An engine that is stepped by hand."""

    now: Callable[[], float]

    def add(self, name: str, prompt: Sequence[int], output_tokens: int) -> None:
        """Queue a request that ends after exactly `output_tokens`."""

    def step(self) -> EngineStep:
        """Schedule, compute and process one batch."""

    def drop(self, names: Sequence[str]) -> None:
        """Abort requests."""

    def close(self) -> None:
        """End the engine, so that another can start in this process."""


def decode_steps(
    engine: SteppedEngine, batches: Sequence[int], prompt_tokens: int, vocabulary: int, num_steps: int = 32
) -> list[EngineStep]:
    """Run decode steps, to measure the host's work in them.

    Args:
        engine: an idle engine that takes at least as many requests as the largest batch.
        prompt_tokens: tokens of each prompt, at most what the engine computes in a step.
        num_steps: measured steps of each batch, after two that are not counted.

    """
    rng = np.random.default_rng(0)
    measured: list[EngineStep] = []
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
        measured += steps[WARM_UP_STEPS:]
        engine.drop(names)
    return measured
