"""Why steps are slow: recorded steps beside their prices, and series of measured runs beside their siblings.

Single steps that take many times as long as others of their kind are compilation where a run begins, and stalls later.
What the other steps miss is shared out among the operators, a constant and the requests (`calibration.steps.fit`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from windtunnel.calibration.steps import fit
from windtunnel.calibration.steps.price import EXPERTS, HEAD, HOST, PricedSteps
from windtunnel.calibration.steps.read import StepRun
from windtunnel.calibration.validate import RunPrediction
from windtunnel.serving.run import Progress
from windtunnel.units import format_count

CAUSES = {
    "collectives": "all_reduce",
    EXPERTS: "experts",
    fit.APART[EXPERTS]: "experts",
    fit.DECODE_STEP: "host_stall",
    fit.PREFILL_STEP: "host_stall",
    HOST: "host_stall",
    fit.REQUEST: "sampler",
    HEAD: "sampler",
}
"""Term of what steps miss -> its cause; other operators are the device's (`slow_rank`)."""
LEAST_SHARE = 0.05
"""Share of a run's time from which a cause is named."""
LEAST_SINGLE = 0.02
"""The same, of single steps."""
LEAST_GAP = 1.0
"""What all steps of a run must take beyond their prices, as a share of these: prices that no run corrected were off by
up to half in healthy runs of models that are new to a device."""


@dataclass(frozen=True)
class SlowSteps:
    """A cause of slow steps in one run, or series of runs."""

    run: str
    cause: str
    """A key of `causes.yaml`."""
    lost_s: float
    """Time lost over all its steps; of a series, in every step."""
    share: float
    """Of the run's time; of a series, of a step."""
    evidence: str


@dataclass(frozen=True)
class StepDiagnosis:
    """What was found in recorded steps or measured runs."""

    findings: Sequence[SlowSteps]
    """Largest share first."""
    num_runs: int
    num_steps: int
    """0 for measured runs."""
    refused: Sequence[tuple[str, str]]
    """Run and reason."""


def diagnose_steps(runs: Sequence[StepRun], progress: Progress | None = None) -> StepDiagnosis:
    """Find compilation, stalls, and what makes all steps of a run slow."""
    validation = fit.validate_steps(runs, progress=progress)
    findings = [finding for run in validation.priced for finding in (*_single(run), *_common(run))]
    return StepDiagnosis(
        sorted(findings, key=lambda finding: -finding.share),
        len(validation.priced),
        sum(run.kind.size for run in validation.priced),
        [(run.name, run.refused) for run in validation.refused],
    )


def _single(run: PricedSteps) -> list[SlowSteps]:
    """Name the single steps that take far longer than others of their kind.

    Where ranks that step together were not recorded, a step that lasts no longer than the longest one with prompts may
    have waited for theirs.
    """
    total_s = float(run.measured_s.sum() + run.slow["measured_s"].sum())
    num_steps, findings = run.kind.size + run.slow.size, []
    others_s = float(run.measured_s[run.decode_share < 1].max()) if run.others_s.any() else 0.0
    is_first = run.slow["place"] < max(fit.FIRST_FRACTION * num_steps, 1)
    for cause, which in (("compilation", is_first), ("stall", ~is_first)):
        slow = run.slow[which & (run.slow["measured_s"] > others_s)]
        lost_s = float((slow["measured_s"] - slow["predicted_s"]).sum())
        if lost_s > LEAST_SINGLE * total_s:
            longest, usual = float(slow["measured_s"].max()) * 1e3, float(np.median(slow["predicted_s"])) * 1e3
            text = f"{format_count(slow.size, 'step')} of up to {longest:,.0f} ms where {usual:,.0f} are usual"
            findings.append(SlowSteps(run.run.label, cause, lost_s, lost_s / total_s, text))
    return findings


def _common(run: PricedSteps) -> list[SlowSteps]:
    """Name what makes the other steps slow, where they are slower than their prices leave open."""
    measured_s, predicted_s = float(run.measured_s.sum()), float(run.predicted_s.sum())
    missing_s = measured_s - predicted_s
    if missing_s < LEAST_GAP * predicted_s:
        return []
    shares: dict[str, float] = {}
    for term, share in fit.residual_shares(run).items():
        cause = CAUSES.get(term, "slow_rank")
        shares[cause] = shares.get(cause, 0.0) + share
    text = f"its steps take {measured_s / predicted_s:.2g} times their price"
    return [
        SlowSteps(run.run.label, cause, share * missing_s, share * missing_s / measured_s, text)
        for cause, share in shares.items()
        if share * missing_s > LEAST_SHARE * measured_s
    ]


def diagnose_runs(predictions: Sequence[RunPrediction]) -> StepDiagnosis:
    """Name the series of measured runs whose every step is late by much the same time, unlike their siblings'."""
    series: dict[tuple[str, str], list[RunPrediction]] = {}
    for prediction in predictions:
        if prediction.odd:
            series.setdefault((prediction.measurement.configuration, prediction.odd), []).append(prediction)
    findings = []
    for (configuration, text), members in series.items():
        measured_s = float(np.median([member.measurement.measured["tpot"] for member in members]))
        lost_s = measured_s - float(np.median([member.predicted["tpot"] for member in members]))
        runs = f"{len(members)} runs: {text.removesuffix('; a slow server?')}"
        findings.append(SlowSteps(configuration, "host_stall", lost_s, lost_s / measured_s, runs))
    refused = [(run.measurement.id, run.refused) for run in predictions if run.refused]
    return StepDiagnosis(findings, len(predictions) - len(refused), 0, refused)
