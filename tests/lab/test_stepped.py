"""Requests driven through an engine on its own clock, against one whose every step takes a known time."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from windtunnel.lab.stepped import EngineStep, decode_steps


@dataclass
class OneTokenAStep:
    """Prompts first, one a step, 0.5 s; else a token of everybody in 0.1 s, 0.04 s of it the forward."""

    clock_s: float = 100.0
    waiting: list[tuple[str, int, int]] = field(default_factory=list)
    left: dict[str, int] = field(default_factory=dict)
    given: dict[str, int] = field(default_factory=dict)
    num_dropped: int = 0

    def now(self) -> float:
        return self.clock_s

    def add(self, name: str, prompt: Sequence[int], output_tokens: int) -> None:
        self.waiting.append((name, len(prompt), output_tokens))

    def step(self) -> EngineStep:
        if self.waiting:
            name, tokens, self.left[name] = self.waiting.pop(0)
            scheduled, step_s = {name: tokens}, 0.5
            self.given[name] = 0
        else:
            scheduled, step_s = dict.fromkeys(self.left, 1), 0.1
        for name in scheduled:
            self.given[name] += 1
            self.left[name] -= 1
            if not self.left[name]:
                del self.left[name]
        self.clock_s += step_s
        return EngineStep(scheduled, step_s, 0.02, 0.04, 0.01, {name: self.given[name] for name in scheduled})

    def drop(self, names: Sequence[str]) -> None:
        self.num_dropped += len(names)
        for name in names:
            del self.left[name]

    def close(self) -> None:
        """Nothing to end."""


def test_the_hosts_share_is_what_is_not_the_forward_in_steps_that_all_decode() -> None:
    engine = OneTokenAStep()
    samples = decode_steps(engine, [1, 3], prompt_tokens=8, vocabulary=100, num_steps=5)
    assert [len(step.scheduled) for step in samples] == [1] * 5 + [3] * 5
    np.testing.assert_allclose([step.host_s for step in samples], 0.1 - 0.04)
    assert engine.num_dropped == 4
