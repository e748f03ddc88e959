"""Score the prices of recorded steps, by run and kind of step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from windtunnel.calibration.measured_runs import reason_of
from windtunnel.calibration.steps.fit import after_first_steps, held_out_by_tp, residual_shares
from windtunnel.calibration.steps.price import KINDS, PricedSteps, price_run
from windtunnel.calibration.steps.runs import StepRun
from windtunnel.errors import InputError
from windtunnel.metrics.accuracy import Score, score
from windtunnel.serving.priced_deployments import PricedDeployments
from windtunnel.serving.run import Progress


@dataclass(frozen=True)
class StepValidation:
    """Runs whose steps were priced, and the corrected prices of some of their steps."""

    priced: Sequence[PricedSteps]
    """Nothing fitted."""
    refused: Sequence[StepRun]
    after_first: Mapping[str, PricedSteps]
    """Run -> its steps behind the first ones, which its factors were fitted on."""
    by_tp: Mapping[str, PricedSteps]
    """Run -> its steps, priced with factors that narrower runs of its model taught; empty where nobody asked."""
    shares: Mapping[str, Mapping[str, float]]
    """Run -> term -> part of the residual that it explains."""


def validate_steps(
    runs: Sequence[StepRun], holds_out_tp: bool = False, progress: Progress | None = None
) -> StepValidation:
    """Price the steps of all runs, and fit factors on some of them to predict others.

    Args:
        runs: those without a setup, and those whose steps cannot be priced, are refused.
        holds_out_tp: predict wide runs with what narrow ones teach, too.
        progress: called with the runs priced so far and the runs in all.
    """
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
    by_tp = held_out_by_tp(priced) if holds_out_tp else []
    return StepValidation(
        priced=priced,
        refused=refused,
        after_first={steps.run.name: after_first_steps(steps) for steps in priced},
        by_tp={steps.run.name: steps for steps in by_tp},
        shares={steps.run.name: residual_shares(steps) for steps in priced},
    )


def scores_by_kind(runs: Sequence[PricedSteps]) -> dict[str, Score]:
    """Return kind -> score of its steps in all runs together; kinds without steps are left out."""
    errors = {
        kind: [error for run in runs for error in run.errors[run.kind == place].tolist()]
        for place, kind in enumerate(KINDS)
    }
    return {kind: scored for kind, values in errors.items() if (scored := score(values)) is not None}
