"""Recorded steps against their prices: scores by run and kind, what is missing, and what a few factors mend."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from windtunnel.calibration.steps.fit import FIRST_FRACTION, StepValidation, scores_by_kind
from windtunnel.calibration.steps.price import KINDS, PricedSteps
from windtunnel.report.calibration.validation import DEFINITION, score_cells
from windtunnel.report.chart import Chart, Series, equality_chart
from windtunnel.report.render.json import version
from windtunnel.report.report import Figures, OnPage, Report, Section, Table
from windtunnel.units import format_count

NUM_TERMS = 5
NUM_DRAWN = 400
"""Points of a run in a figure."""
LEAST_SHARE = 0.02


def steps_document(validation: StepValidation) -> dict[str, Any]:
    """Document the scores of all steps, of every run and kind (worst first), and the parts of the residuals."""
    stages = {"nothing_fitted": {run.run.name: run for run in validation.priced}, "after_first": validation.after_first}
    by_run = {stage: {name: _scores([run]) for name, run in of_run.items()} for stage, of_run in stages.items()}
    groups = [
        {
            "run": run.run.name,
            "label": run.run.label,
            "kind": kind,
            **{stage: scores.get(run.run.name, {}).get(kind) for stage, scores in by_run.items()},
        }
        for run in validation.priced
        for kind in scores_by_kind([run])
    ]
    return {
        "windtunnel": version(),
        "runs": len(validation.priced) + len(validation.refused),
        "steps": sum(run.kind.size for run in validation.priced),
        "scores": {stage: _scores(list(of_run.values())) for stage, of_run in stages.items() if of_run},
        "groups": sorted(groups, key=lambda group: -group["nothing_fitted"]["median"]),
        "residual_shares": validation.shares,
        "left_out": {run.run.name: dict(run.left_out) for run in validation.priced if run.left_out},
        "refused": _by_text((run.name, [run.refused]) for run in validation.refused),
        "remarks": _by_text((run.run.name, run.run.remarks) for run in validation.priced),
    }


def _scores(runs: Sequence[PricedSteps]) -> dict[str, dict[str, float]]:
    return {kind: vars(scored) for kind, scored in scores_by_kind(runs).items()}


def _by_text(runs: Iterable[tuple[str, Sequence[str]]]) -> dict[str, list[str]]:
    """Return sentence -> the runs that it is about."""
    sentences: dict[str, list[str]] = {}
    for run, texts in runs:
        for text in texts:
            sentences.setdefault(text, []).append(run)
    return sentences


def steps_report(validation: StepValidation) -> Report:
    """Return the report: the median errors, the worst groups, and what is missing."""
    document = steps_document(validation)
    num_priced = format_count(len(validation.priced), "run")
    scores = document["scores"]["nothing_fitted"].items()
    medians = [f"{kind} steps {errors['median']:.1%}" for kind, errors in scores]
    verdict = f"Median error: {', '.join(medians)}."
    left_out = [
        (run, f"{count:,}", reason)
        for run, reasons in document["left_out"].items()
        for reason, count in reasons.items()
    ]
    refused = [(", ".join(runs), reason) for reason, runs in document["refused"].items()]
    remarks = [f"{', '.join(runs)}: {text}" for text, runs in document["remarks"].items()]
    rows = []
    for group in document["groups"]:
        plain, fitted = group["nothing_fitted"], group["after_first"]
        median = "" if fitted is None else f"{fitted['median']:.1%}"
        rows.append([group["label"], group["kind"], f"{plain['num_runs']:,}", *score_cells(plain), median])
    heads = ("run", "kind", "steps", "median", "p90", "bias", f"after the first {FIRST_FRACTION:.0%}\nmedian")
    return Report(
        f"{document['steps']:,} recorded steps priced, of {num_priced}",
        [DEFINITION],
        [
            Section("Errors by run and kind of step, worst first", [Table(heads, rows, left=2)]),
            Section("Parts of what is missing", [_shares(document["residual_shares"])]),
            Section("Predicted against measured", [OnPage(lambda: [Figures(_scatters(validation))])]),
            *([Section("Left out", [Table(("run", "rows", "reason"), left_out, right=1)])] if left_out else []),
            *([Section("Refused", [Table(("runs", "reason"), refused, right=1)])] if refused else []),
        ],
        remarks,
        verdict,
    )


def _shares(shares: Mapping[str, Mapping[str, float]]) -> Table:
    """Return a row for every run: the terms that explain most of measured less predicted seconds, and their sum."""
    rows = []
    for run, parts in shares.items():
        large = [f"{name} {share:.0%}" for name, share in parts.items() if abs(share) >= LEAST_SHARE][:NUM_TERMS]
        rows.append([run, f"{sum(parts.values()):.0%}", ", ".join(large)])
    return Table(("run", "explained", "by the seconds of"), rows, right=1)


def _scatters(validation: StepValidation) -> list[tuple[Chart, str]]:
    figures = []
    for place, kind in enumerate(KINDS):
        points = []
        for run in validation.priced:
            measured_s, predicted_s = (values[run.kind == place] for values in (run.measured_s, run.predicted_s))
            every = -(-measured_s.size // NUM_DRAWN) or 1
            points.append(Series(run.run.name, measured_s[::every].tolist(), predicted_s[::every].tolist()))
        drawn = equality_chart(points, "measured", "predicted")
        figures.append((drawn, f"{kind} steps; dashed: errors of 20%".capitalize()))
    return figures
