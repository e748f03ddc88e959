"""Correct the prices of steps by a few factors, say which operators explain what is missing, and score both.

A ridge regression of the seconds that are missing, measured less predicted, on the seconds of each family of operators,
on a constant and on the requests. Errors count relative to the measured time, kinds of steps count equally, and steps
that no factor explains lose weight (Geman and McClure, 1985).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from windtunnel.calibration.measured_runs import reason_of
from windtunnel.calibration.steps.price import ATTENTION_DECODE, EXPERTS, GEMM, HOST, KINDS, PricedSteps, price_run
from windtunnel.calibration.steps.read import StepRun
from windtunnel.compiled.arrays import Floats
from windtunnel.errors import InputError
from windtunnel.metrics.accuracy import Score, score
from windtunnel.serving.priced_deployments import PricedDeployments
from windtunnel.serving.run import Progress

UNEQUAL, DECODE_STEP, PREFILL_STEP, REQUEST = "unequal contexts", "a decode step", "a step with prompts", "a request"
APART = {GEMM: "GEMM of prompts", EXPERTS: "experts of prompts"}
"""Family that reads weights in decode and computes in prefill -> the term of what its steps with prompts miss beyond
its factor."""
UNITS_S = {DECODE_STEP: 1e-3, PREFILL_STEP: 1e-3, REQUEST: 1e-4}
PRIOR, LOOSE_PRIOR, APART_PRIOR = 0.2, 0.5, 0.1
"""Standard deviations: of a family's factor around what is priced; of what no table holds, the attention over unequal
contexts and the constants in their units; and of what tells prompts from decode steps in a family of `APART`."""
NOISE = 0.05
"""Relative residual that counts as one standard deviation."""
NUM_INDEPENDENT = 100
"""All steps of a fit count as so many, as their errors are shared."""
LOWEST = -0.3
"""A family costs no less than its price by so much; constants are not negative."""
NUM_ROUNDS, NUM_SWEEPS = 6, 200
FLOORS, FLOOR_PRIOR = np.geomspace(1 / 8, 8.0, 97), 2.0
"""Multiples that are tried for the host's time to launch a step with prompts, and the weight of a Cauchy prior of their
logarithm, as wide as `PRIOR`: floors hardly differ from 1 where the device explains the steps as well."""
LAUNCH = "launches"
"""The host's launches of steps with prompts, beside the terms of the regression."""
FIRST_FRACTION = 0.05
"""Share of a run's steps, its first ones, that its factors are fitted on."""


@dataclass(frozen=True)
class Factors:
    """Corrections of prices: of a step's time on the device, and of the host's time to launch it."""

    missing: Mapping[str, float]
    """Seconds that are missing for each second, or unit, of a term."""
    floors: tuple[float, float] = (1.0, 1.0)
    """Multiples of the host's time to launch a step with prompts: of steps in pieces, and of larger ones."""

    def missing_s(self, priced: PricedSteps) -> dict[str, Floats]:
        """Return term -> the seconds that it adds to the device's time of every step."""
        return {name: self.missing.get(name, 0.0) * column for name, column in terms(priced).items()}

    def device_s(self, priced: PricedSteps) -> Floats:
        return np.maximum(priced.device_s + sum(self.missing_s(priced).values()), 0.1 * priced.device_s)

    def host_s(self, priced: PricedSteps) -> Floats:
        """Return the host's corrected time to launch a step with prompts."""
        return priced.launch_s * np.where(priced.is_in_pieces, *self.floors)

    def applied(self, priced: PricedSteps) -> PricedSteps:
        return replace(priced, predicted_s=_launched_s(self.device_s(priced), self.host_s(priced)) + priced.unhidden_s)

    def shown(self, priced: PricedSteps) -> Floats:
        """Return the share of a change of each step's time on the device that shows in its duration."""
        return shown_share(self.device_s(priced), self.host_s(priced))


def _launched_s(device_s: Floats, launch_s: Floats) -> Floats:
    """Return durations of steps, as `step_cost.launched_s` does."""
    return np.asarray(np.where(launch_s > 0, (device_s**8 + launch_s**8) ** (1 / 8), device_s))


def shown_share(device_s: Floats, launch_s: Floats) -> Floats:
    """Return the derivative of a step's duration by the device's time, near 0 where launches take longer."""
    return np.asarray((device_s / _launched_s(device_s, launch_s)) ** 7)


def terms(priced: PricedSteps) -> dict[str, Floats]:
    """Return the columns of the regression: seconds by family, of unequal contexts, and of a unit of each constant.

    Attention over unequal contexts is taken to be slower by a share of their coefficient of variation.
    """
    decodes = priced.decode_share
    families = {name: seconds for name, seconds in priced.families_s.items() if name != HOST}
    apart = {name: (1 - decodes) * families[family] for family, name in APART.items() if family in families}
    counts = {DECODE_STEP: decodes, PREFILL_STEP: 1 - decodes, REQUEST: priced.num_requests}
    return {
        **families,
        **apart,
        UNEQUAL: families.get(ATTENTION_DECODE, 0.0) * priced.context_variation,
        **{name: unit_s * counts[name] for name, unit_s in UNITS_S.items()},
    }


def fit_factors(runs: Sequence[PricedSteps], only: Collection[str] | None = None) -> Factors:
    """Fit factors on the steps of some runs together: in turn those of the device, and the host's floors.

    With `only`, factors of these terms alone; with `LAUNCH` among them, one floor for steps in pieces and others.
    """
    names = list(dict.fromkeys(name for run in runs for name in terms(run) if only is None or name in only))
    factors = Factors(dict.fromkeys(names, 0.0))
    for _ in range(NUM_ROUNDS):
        alone = [_without_others(factors, run) for run in runs]
        if only is None:
            factors = replace(factors, floors=(_floor(factors, alone, True), _floor(factors, alone, False)))
        elif LAUNCH in only:
            factors = replace(factors, floors=(_floor(factors, alone),) * 2)
        bound = [run.taken(factors.host_s(run) < factors.device_s(run)) for run in alone]
        if any(run.kind.size for run in bound):
            factors = replace(factors, missing=_missing(factors, [run for run in bound if run.kind.size]))
    return factors


def _without_others(factors: Factors, run: PricedSteps) -> PricedSteps:
    """Return the run without what other ranks' prompts may have lengthened its steps by."""
    late_s = run.measured_s - factors.applied(run).predicted_s
    return replace(run, measured_s=run.measured_s - np.clip(late_s, 0.0, run.others_s))


def _missing(factors: Factors, runs: Sequence[PricedSteps]) -> dict[str, float]:
    """Return the terms' factors, by a ridge regression with bounds (coordinate descent) that starts at `factors`."""
    names, values = list(factors.missing), np.array(list(factors.missing.values()))
    columns = [np.stack([terms(run).get(name, np.zeros(run.kind.size)) for name in names], axis=1) for run in runs]
    x = np.concatenate([part / run.measured_s[:, None] for part, run in zip(columns, runs, strict=True)])
    y = np.concatenate([(_measured_device_s(factors, run) - run.device_s) / run.measured_s for run in runs])
    residual = y - x @ values
    # Geman and McClure's weights, their scale three times the median residual.
    scale = max(3 * float(np.median(np.abs(residual))), 1e-9)
    weight = np.concatenate([_kind_weights(run) for run in runs]) * (1 / (1 + (residual / scale) ** 2) ** 2)
    weight *= min(NUM_INDEPENDENT, y.size) / weight.sum()
    products, target = (x * weight[:, None]).T @ x, (x * weight[:, None]).T @ y
    is_loose = [name in UNITS_S or name == UNEQUAL for name in names]
    is_apart = [name in APART.values() for name in names]
    ridge = (NOISE / np.where(is_loose, LOOSE_PRIOR, np.where(is_apart, APART_PRIOR, PRIOR))) ** 2
    lowest = np.where(is_loose, 0.0, LOWEST)
    for _ in range(NUM_SWEEPS):
        for j, value in enumerate(values):
            rest = target[j] - products[j] @ values + products[j, j] * value
            values[j] = max(rest / (products[j, j] + ridge[j]), lowest[j])
    return dict(zip(names, values.tolist(), strict=True))


def _measured_device_s(factors: Factors, run: PricedSteps) -> Floats:
    """Return the device's time in the measured one, which the host's launches lengthen; half of it at least."""
    busy_s = np.maximum(run.measured_s - run.unhidden_s, run.measured_s / 2)
    rest = np.maximum(busy_s**8 - factors.host_s(run) ** 8, (busy_s / 2) ** 8)
    return np.where(run.launch_s > 0, rest ** (1 / 8), busy_s)


def _floor(factors: Factors, runs: Sequence[PricedSteps], in_pieces: bool | None = None) -> float:
    """Return the multiple of the host's launches that explains the steps with prompts best: those in pieces, those that
    are not, or all.
    """
    chosen = [run.taken((run.launch_s > 0) & ((run.is_in_pieces == in_pieces) | (in_pieces is None))) for run in runs]
    device_s, launch_s, measured_s = (
        np.concatenate(parts)
        for parts in zip(
            *((factors.device_s(run), run.launch_s, run.measured_s - run.unhidden_s) for run in chosen), strict=True
        )
    )
    errors = _launched_s(device_s, FLOORS[:, None] * launch_s) / measured_s - 1
    losses = (errors**2 / (errors**2 + NOISE)).sum(axis=1) + FLOOR_PRIOR * np.log1p((np.log(FLOORS) / PRIOR) ** 2)
    return float(FLOORS[np.argmin(losses)])


def _kind_weights(run: PricedSteps) -> Floats:
    """Return weights with which each kind of step in a run counts as the mean kind does."""
    counts = np.bincount(run.kind, minlength=len(KINDS))
    return np.asarray(run.kind.size / np.count_nonzero(counts) / counts[run.kind], np.float64)


def after_first_steps(run: PricedSteps) -> PricedSteps:
    """Fit factors on a run's first steps, and return the others with corrected predictions."""
    first = np.arange(run.kind.size) < FIRST_FRACTION * run.kind.size
    return fit_factors([run.taken(first)]).applied(run.taken(~first))


def residual_shares(run: PricedSteps) -> dict[str, float]:
    """Return term -> its part of the residual, measured less predicted seconds, over all steps; largest first.

    The parts add up to what the fitted factors explain. The host's floor has all of the steps that it decides.
    """
    factors = fit_factors([run])
    corrected_s, device_s = factors.applied(run).predicted_s, factors.device_s(run)
    is_host = device_s < factors.host_s(run)
    parts = {name: float(seconds[~is_host].sum()) for name, seconds in factors.missing_s(run).items()}
    rest_s = corrected_s - run.predicted_s
    parts[HOST] = float(rest_s.sum()) - sum(parts.values())
    total_s = float((run.measured_s - run.predicted_s).sum()) or math.inf
    return {name: part_s / total_s for name, part_s in sorted(parts.items(), key=lambda item: -abs(item[1]))}


@dataclass(frozen=True)
class StepValidation:
    """Runs whose steps were priced, and the corrected prices of some of their steps."""

    priced: Sequence[PricedSteps]
    """Nothing fitted."""
    refused: Sequence[StepRun]
    after_first: Mapping[str, PricedSteps]
    """Run -> its steps behind the first ones, which its factors were fitted on."""
    shares: Mapping[str, Mapping[str, float]]
    """Run -> term -> part of the residual that it explains."""


def validate_steps(runs: Sequence[StepRun], progress: Progress | None = None) -> StepValidation:
    """Price the steps of all runs, and fit factors on some to predict others; runs without prices are refused."""
    estimator_of = PricedDeployments().estimator
    priced, refused = [], []
    for number, run in enumerate(runs, 1):
        try:
            if run.setup is None:
                raise InputError(run.refused)
            priced.append(price_run(run, estimator_of))
        except InputError as error:
            refused.append(replace(run, refused=reason_of(error)))
        if progress is not None:
            progress(number, len(runs))
    return StepValidation(
        priced=priced,
        refused=refused,
        after_first={steps.run.name: after_first_steps(steps) for steps in priced},
        shares={steps.run.name: residual_shares(steps) for steps in priced},
    )


def scores_by_kind(runs: Sequence[PricedSteps]) -> dict[str, Score]:
    """Return kind -> score of its steps in all runs together; kinds without steps are left out."""
    errors = {
        kind: [error for run in runs for error in run.errors[run.kind == place].tolist()]
        for place, kind in enumerate(KINDS)
    }
    return {kind: scored for kind, values in errors.items() if (scored := score(values)) is not None}
