"""Learn a calibration from what a server recorded or emitted, and check it on what came later.

A run's first steps, or intervals of time, are fitted, in two parts: candidates are learnt on the earlier one and judged
on the later one, and the best is fitted again on both. The result is a calibration file; what it says is then measured
on all others, by pricing them with that file and not with the factors of the fit.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from windtunnel.calibration.steps import fit
from windtunnel.calibration.steps.fit import Factors, scores_by_kind, terms
from windtunnel.calibration.steps.price import ATTENTION_DECODE, EXPERTS, GEMM, SMALL, PricedSteps, price_run
from windtunnel.calibration.steps.read import StepRun
from windtunnel.errors import InputError
from windtunnel.formats.telemetry.record import ServerRecord
from windtunnel.metrics.accuracy import Score
from windtunnel.metrics.uncertainty import Spread
from windtunnel.pricing.estimator import Estimator
from windtunnel.production.intervals import price_intervals
from windtunnel.production.workload import Load, load_of, unknown_of
from windtunnel.serving.calibration import Calibration, Provenance
from windtunnel.serving.priced_deployments import PricedDeployments
from windtunnel.serving.scenario import Setup
from windtunnel.units import format_count

FAMILIES: Mapping[str, Sequence[str]] = {
    GEMM: ("gemm.memory", "gemm.compute"),
    EXPERTS: ("experts.memory", "experts.compute"),
    fit.APART[GEMM]: ("gemm.compute",),
    fit.APART[EXPERTS]: ("experts.compute",),
    ATTENTION_DECODE: ("decode_attention",),
    "attention prefill": ("prefill_attention",),
    "collectives": ("collective",),
    SMALL: ("other",),
}
"""Family of operators -> its factors in a calibration; several add up."""
HOST_TERMS = (fit.DECODE_STEP, fit.REQUEST, fit.LAUNCH)
CANDIDATES: Mapping[str, Sequence[str]] = {
    "nothing": (),
    "the host": HOST_TERMS,
    "the operators": tuple(FAMILIES),
    "the host and the operators": (*HOST_TERMS, *FAMILIES),
}
"""What is learnt -> its terms, the fewest first."""
EARLIER = 0.7
"""Share of the learning steps that candidates are fitted on; the others judge them."""
LEAST_STEPS, LEAST_INTERVALS = 50, 8
LEAST_SHARE, LEAST_SHOWN = 0.01, 0.1
"""What has to show of a change in the steps' durations: of an operator's time, as a share of all, and of the device's
in the mean step. The host's launches hide the rest."""
MOST_HARM = 0.03
"""Error that a candidate may add to one kind of step for the sake of the others."""
NEVER_FROM_INTERVALS = ("launches of steps with prompts", "unequal contexts", "single slow steps")
LEAST_GAIN = 0.02
"""Error that a candidate with more terms must save, as a share."""


@dataclass(frozen=True)
class Observation:
    """What was learnt from a run's first steps."""

    run: str
    calibration: Calibration
    learnt: str
    """A key of `CANDIDATES`."""
    unit: str
    """What was learnt from: `step` or `interval`."""
    num_learnt: int
    num_judged: int
    before: Mapping[str, Score]
    """Kind of step -> errors of the other steps with the calibration that was there before."""
    after: Mapping[str, Score]
    """The same with the one that was learnt."""
    unidentified: Sequence[str]
    """Operators of which the durations tell nothing, so that nothing was learnt, and what such records never tell."""
    refused: Mapping[str, float]
    """Candidate -> error that it had on the judging part, as a share; those that were not taken."""
    load: Load | None = None
    """What the server was asked for; None for recorded steps."""


Price = Callable[[StepRun, Callable[[Setup], Estimator]], PricedSteps]
"""Prices what is learnt from."""


def observe_steps(run: StepRun, learn: float = 0.2, priced: PricedDeployments | None = None) -> Observation:
    """Learn a calibration from the first steps of a run. InputError where the deployment is not known, or too few steps
    can be priced.

    Args:
        learn: share of the steps that are learnt from.
        priced: shares prices between runs.
    """
    return _observe(run, price_run, learn, ("step", LEAST_STEPS), priced)


def observe_record(
    run: StepRun, record: ServerRecord, learn: float = 0.5, priced: PricedDeployments | None = None
) -> Observation:
    """Learn a calibration from the first intervals of what a server emitted. InputError where the deployment is not
    known, or too few intervals can be priced.

    Args:
        run: the deployment; its steps are not looked at.
        learn: share of the intervals that are learnt from.
        priced: shares prices between runs.
    """

    def price(run: StepRun, estimator_of: Callable[[Setup], Estimator]) -> PricedSteps:
        return price_intervals(run, record, estimator_of)

    made = _observe(run, price, learn, ("interval", LEAST_INTERVALS), priced)
    unknown = [*made.unidentified, *NEVER_FROM_INTERVALS, *unknown_of(record)]
    return replace(made, unidentified=unknown, load=load_of(record))


def _observe(
    run: StepRun, price: Price, learn: float, unit: tuple[str, int], priced: PricedDeployments | None
) -> Observation:
    """Learn from the first rows that `price` returns; `unit` names a row and says how many are needed on each side."""
    if run.setup is None:
        raise InputError(f"{run.name}: {run.refused}")
    shared = priced or PricedDeployments()
    steps, (what, least) = price(run, shared.estimator), unit
    place = np.arange(steps.kind.size)
    end = int(learn * steps.kind.size + 1e-9)
    if end < least or steps.kind.size - end < least:
        hint = f"{least} to learn from and as many to judge are needed"
        priceable = format_count(steps.kind.size, what)
        raise InputError(f"{run.name} has {priceable} that can be priced, {end} of them to learn from", hint)
    earlier, later = steps.taken(place < EARLIER * end), steps.taken((place >= EARLIER * end) & (place < end))
    judged = {name: _fitted(earlier, names).applied(later) for name, names in CANDIDATES.items()}
    errors, by_kind = {name: _error(steps) for name, steps in judged.items()}, scores_by_kind([judged["nothing"]])
    chosen = "nothing"
    for name, error in errors.items():
        kinds = scores_by_kind([judged[name]])
        harms = any(kinds[kind].median > known.median + MOST_HARM for kind, known in by_kind.items())
        is_closer = what == "step" or _is_mostly_closer(judged[name], judged[chosen])
        if error < errors[chosen] * (1 - LEAST_GAIN) and not harms and is_closer:
            chosen = name
    learning, others = steps.taken(place < end), place >= end
    factors = _fitted(learning, CANDIDATES[chosen])
    fitted_on = f"{run.name}: the first {learning.kind.size} of {place.size} recorded {what}s"
    calibration = _calibration(fitted_on, run.setup, factors)
    repriced = price(with_calibration(run, calibration), PricedDeployments().estimator)
    rest = repriced.taken(np.arange(repriced.kind.size) >= end)
    calibration = msgspec.structs.replace(calibration, spread=_spreads(rest, 2 * least))
    return Observation(
        run=run.label,
        calibration=calibration,
        learnt=chosen,
        unit=what,
        num_learnt=learning.kind.size,
        num_judged=rest.kind.size,
        before=scores_by_kind([steps.taken(others)]),
        after=scores_by_kind([rest]),
        unidentified=_unidentified(learning, CANDIDATES[chosen]),
        refused={name: error for name, error in errors.items() if name != chosen},
    )


def _unidentified(steps: PricedSteps, names: Sequence[str]) -> list[str]:
    """Return the operators of the steps that these do not tell of, with the host learnt as far as `names` have it.

    A change of theirs hardly changes the steps' durations; what reads weights is told by decode steps alone.
    """
    columns, shown = terms(steps), _host_factors(steps, names).shown(steps)
    shown *= shown.mean() >= LEAST_SHOWN
    columns = {name: columns[name] for name in FAMILIES if name in columns and columns[name].any()}
    counted = {name: steps.decode_share * column if name in fit.APART else column for name, column in columns.items()}
    return [name for name, s in counted.items() if (shown * s).sum() < LEAST_SHARE * steps.predicted_s.sum()]


def _host_factors(steps: PricedSteps, names: Sequence[str]) -> Factors:
    """Return the factors of the host's terms among `names`."""
    host = [name for name in names if name in HOST_TERMS]
    return fit.fit_factors([steps], host) if host else Factors({})


def _fitted(steps: PricedSteps, names: Sequence[str]) -> Factors:
    """Return the factors of the terms that the steps tell; all others stay as they are priced."""
    unknown = _unidentified(steps, names)
    told = [name for name in names if name not in unknown]
    return fit.fit_factors([steps], told) if set(told) - set(HOST_TERMS) else _host_factors(steps, told)


def _is_mostly_closer(steps: PricedSteps, others: PricedSteps) -> bool:
    """Whether most rows are closer to their prices than in `others`, kinds counted equally; medians of few scatter."""
    closer = np.abs(steps.errors) < np.abs(others.errors)
    return bool(np.mean([closer[steps.kind == kind].mean() for kind in np.unique(steps.kind)]) > 0.5)


def _error(steps: PricedSteps) -> float:
    """Return the mean over the kinds of the median error."""
    errors = [np.median(np.abs(steps.errors[steps.kind == kind])) for kind in np.unique(steps.kind)]
    return float(np.mean(errors))


def _calibration(fitted_on: str, setup: Setup, factors: Factors) -> Calibration:
    """Return the calibration in force with what was learnt over it."""
    known = setup.calibration
    learnt = dict(known.factors) if known is not None else {}
    for name in dict.fromkeys(name for names in FAMILIES.values() for name in names):
        missing = (factors.missing.get(family, 0.0) for family, names in FAMILIES.items() if name in names)
        learnt[name] = learnt.get(name, 1.0) * (1.0 + sum(missing))
    host = setup.engine.host
    extra_s = {
        "unhidden_step_s": factors.missing.get(fit.DECODE_STEP, 0.0) * fit.UNITS_S[fit.DECODE_STEP],
        "unhidden_request_s": factors.missing.get(fit.REQUEST, 0.0) * fit.UNITS_S[fit.REQUEST],
    }
    launch_s = (host.launch_s or 0.0) * factors.floors[0]
    overheads = {name: (getattr(host, name) or 0.0) + seconds for name, seconds in extra_s.items()}
    assert setup.engine.version is not None
    provenance = Provenance(
        fitted_on=fitted_on,
        num_runs=1,
        num_configurations=1,
        models=(setup.model.name,),
        versions=(setup.engine.version,),
        devices=(setup.device.name,),
    )
    return Calibration(
        engine=setup.engine.name,
        provenance=provenance,
        device=setup.device.name,
        host=msgspec.structs.replace(host, launch_s=launch_s, **overheads),
        factors={name: round(value, 4) for name, value in learnt.items() if abs(value - 1) > 1e-4},
    )


def with_calibration(run: StepRun, calibration: Calibration) -> StepRun:
    """Return a run on its deployment as a scenario with this calibration resolves."""
    assert run.setup is not None
    engine = msgspec.structs.replace(run.setup.engine, host=calibration.host)
    setup = replace(run.setup, calibration=calibration, calibration_name=f"observed {run.name}", engine=engine)
    return replace(run, setup=setup)


def _spreads(steps: PricedSteps, stretch: int) -> dict[str, Spread]:
    """Return the spread of the median over stretches of so many rows, as that of TPOT and of what follows from it."""
    rest = np.log(steps.measured_s / steps.predicted_s)
    stretches = [float(np.median(part)) for part in np.array_split(rest, max(rest.size // stretch, 1))]
    low, middle, high = (float(np.exp(value)) for value in np.percentile(stretches, [10, 50, 90]))
    spread = Spread(p10=min(low, 0.99), p50=min(max(middle, low), high), p90=max(high, 1.01), num_runs=len(stretches))
    inverse = Spread(p10=1 / spread.p90, p50=1 / spread.p50, p90=1 / spread.p10, num_runs=len(stretches))
    return {"tpot": spread, "e2e": spread, "throughput": inverse}
