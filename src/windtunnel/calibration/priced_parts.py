"""Prices of steps part by part: every operator's time split over named parts, which add up to the whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from windtunnel.model import operators as ops
from windtunnel.model.shape import Shard
from windtunnel.pricing.estimator import Estimate, Estimator
from windtunnel.serving.scenario import Setup
from windtunnel.serving.setup.step_prices import StepPrices, price_steps

Split = Callable[[ops.Op], Mapping[str, NDArray[np.float64]]]
"""Operator -> name of a part -> its share of the operator's time, at every point of its axes; shares sum to 1."""


def priced_parts(estimator: Estimator, setup: Setup, shard: Shard, split: Split) -> dict[str, StepPrices]:
    """Price every step that the engine can form, part by part.

    Args:
        estimator: prices each operator once.
        setup: device, engine and longest request.
        shard: the deployed model.
        split: divides the time of an operator among the parts.
    """
    recorder = _Recorder(estimator, split)
    price_steps(recorder, setup.device, shard, setup.engine, setup.max_model_len)
    return {
        name: price_steps(_Player(recorder, name), setup.device, shard, setup.engine, setup.max_model_len)
        for name in recorder.names()
    }


class _Recorder:
    """An estimator that records its estimates and their shares by part, in order."""

    def __init__(self, estimator: Estimator, split: Split) -> None:
        self.estimator = estimator
        self.split = split
        self.answers: list[tuple[Estimate, Mapping[str, NDArray[np.float64]]]] = []

    def estimate(self, op: ops.Op) -> Estimate:
        estimate = self.estimator.estimate(op)
        self.answers.append((estimate, self.split(op)))
        return estimate

    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for _, parts in self.answers for name in parts))


class _Player:
    """An estimator that replays a recorder's estimates with one part's share of the seconds."""

    def __init__(self, recorder: _Recorder, name: str) -> None:
        self.answers = iter(recorder.answers)
        self.name = name

    def estimate(self, op: ops.Op) -> Estimate:  # noqa: ARG002
        estimate, parts = next(self.answers)
        return replace(estimate, seconds=np.asarray(estimate.seconds) * parts.get(self.name, np.asarray(0.0)))
