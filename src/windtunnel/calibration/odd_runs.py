"""Find series of measured runs whose server was slow: every step late by much the same time, unlike in sibling runs."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from windtunnel import catalog
from windtunnel.calibration.validate import RunPrediction
from windtunnel.units import format_seconds
from windtunnel.workload.arrivals import ClosedLoop

LEAST_RUNS = 3
"""Runs of a series, and of its siblings, that a judgement needs."""
MOST_SPREAD = 0.75
"""Interquartile range of the excess over its median up to which a series counts as late by a constant."""
LEAST_SHARE = 0.5
"""Median excess, as a share of the median predicted time per output token, from which it counts as slow."""
LEAST_RATIO = 2.5
"""Median excess over the interquartile range of those siblings' residuals from which it lies far outside them."""

Series = tuple[Hashable, ...]


def with_odd_runs(predictions: Sequence[RunPrediction]) -> list[RunPrediction]:
    """Return the predictions, with `odd` set in those of a series whose steps are late.

    A series has one deployment and one kind of prompts, at several loads. Its residual in time per output token, at
    each load, is compared with that of its siblings: runs of a model of the same shape and format on the same device
    with the same engine and version, or else on other devices.
    """
    series: dict[Series, list[int]] = {}
    for index, prediction in enumerate(predictions):
        if _load(prediction) and math.isfinite(_residual_s(prediction)):
            series.setdefault(_series(prediction), []).append(index)
    flagged = list(predictions)
    for key, members in series.items():
        siblings = _siblings(series, key)
        excess_s = _excess_s([predictions[i] for i in members], [predictions[i] for i in siblings])
        if excess_s is not None:
            text = f"its steps are {format_seconds(excess_s)} longer than in sibling runs at any load; a slow server?"
            for index in members:
                flagged[index] = replace(predictions[index], odd=text)
    return flagged


def _residual_s(prediction: RunPrediction) -> float:
    """Return measured less predicted seconds per output token; NaN where either is missing."""
    measured, predicted = prediction.measurement.measured.get("tpot"), prediction.predicted.get("tpot")
    return math.nan if measured is None or predicted is None else measured - predicted


def _load(prediction: RunPrediction) -> int:
    """Return the requests that run at once: the clients of a closed loop, or its server's limit; 0 of another load."""
    scenario = prediction.measurement.scenario
    arrivals = None if scenario is None else scenario.workload.arrivals
    if scenario is None or not isinstance(arrivals, ClosedLoop):
        return 0
    return min(arrivals.concurrency, scenario.deployment.engine.max_num_seqs or arrivals.concurrency)


def _shape(prediction: RunPrediction) -> Series:
    """Return what siblings share: the model's shape and format, the engine and its version."""
    scenario, labels = prediction.measurement.scenario, prediction.measurement.labels
    assert scenario is not None
    model = catalog.model(scenario.model)
    names = ("format", "engine", "version")
    return ((model.hidden_size, model.vocab_size, model.layers), *(labels.get(name, "") for name in names))


def _series(prediction: RunPrediction) -> Series:
    labels = prediction.measurement.labels
    own = (labels.get(name, "") for name in ("device", "model", "parallelism", "prompt"))
    return (*_shape(prediction), *own)


_NUM_SHARED = 4
"""Entries of a series' key that are those of `_shape`; the device follows."""


def _siblings(series: Mapping[Series, Sequence[int]], key: Series) -> list[int]:
    """Return the runs of sibling series: on the same device where there are some, else on others."""
    others = {
        other: runs for other, runs in series.items() if other != key and other[:_NUM_SHARED] == key[:_NUM_SHARED]
    }
    here = [index for other, runs in others.items() if other[_NUM_SHARED] == key[_NUM_SHARED] for index in runs]
    return here or [index for runs in others.values() for index in runs]


def _excess_s(members: Sequence[RunPrediction], siblings: Sequence[RunPrediction]) -> float | None:
    """Return the median excess of a slow series, s; None where it is not slow.

    The excess of a run is its residual less the median residual of the siblings nearest to it in load.
    """
    if len(members) < LEAST_RUNS or len(siblings) < LEAST_RUNS:
        return None
    loads = np.log([_load(run) for run in siblings])
    residuals_s = np.array([_residual_s(run) for run in siblings])
    nearest_s = []
    for run in members:
        distance = np.abs(loads - np.log(_load(run)))
        nearest_s.append(np.median(residuals_s[distance <= distance.min() + 1e-9]))
    excess = np.array([_residual_s(run) for run in members]) - nearest_s
    low, middle, high = np.percentile(excess, [25, 50, 75])
    expected_s = np.median([run.predicted["tpot"] for run in members])
    spread_s = np.subtract(*np.percentile(nearest_s, [75, 25]))
    is_constant = excess.min() > 0 and high - low <= MOST_SPREAD * middle
    is_far = middle >= LEAST_SHARE * expected_s and middle >= LEAST_RATIO * spread_s
    return float(middle) if is_constant and is_far else None
