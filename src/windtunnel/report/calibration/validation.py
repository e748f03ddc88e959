"""Predictions against measurements: tables for the terminal, a JSON document, a page."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import RenderableType

from windtunnel.calibration.validate import RunPrediction
from windtunnel.metrics.accuracy import Score, kendall_tau, score
from windtunnel.report.render.html import Section, cards, figures, page, paragraph, table
from windtunnel.report.render.plots import Axis, Series, equality_figure, histogram
from windtunnel.report.render.tables import columns, grid, title
from windtunnel.report.version import version
from windtunnel.units import format_count, format_seconds

LATENCIES = {"tpot": "TPOT", "ttft": "TTFT", "e2e": "end to end"}
NAMES = {**LATENCIES, "throughput": "throughput"}
_SHORT = {**NAMES, "e2e": "E2E"}
"""Headings of wide tables."""
GROUPS = ("mode", "engine", "device", "model", "format", "parallelism", "concurrency", "prompt", "source")
NUM_WORST = 10
NUM_LISTED = 8
"""Up to this many runs are shown with every metric; of more, only the largest errors."""
NUM_SHOWN = 3
"""Metrics that a terminal shows side by side; pages and documents have all."""

_ERROR_EDGES = [step / 20 for step in range(-20, 21)]


def validation_report(
    predictions: Sequence[RunPrediction], left_out: Mapping[str, int] | None = None
) -> list[RenderableType]:
    """Return overall errors, errors by group, the worst runs with their explanations, and refused runs.

    `left_out`: use -> number of runs that were not to be predicted.
    """
    done, drafting = predicted_runs(predictions)
    num_done = len(done) + len(drafting)
    parts: list[RenderableType] = [title(f"{num_done:,} of {format_count(len(predictions), 'run')} predicted")]
    parts += [_left_out(left_out)] if left_out else []
    parts += [_how(done + drafting), _DEFINITION, ""]
    metrics = measured_metrics(done + drafting)
    shown = metrics[:NUM_SHOWN]
    headers = ("error, %", "runs", *(f"{NAMES[name]}\n{'median':>6}{'p90':>6}{'bias':>6}" for name in shown))
    rows = [_short_row("all", done, shown)]
    for group in GROUPS:
        members_by_label = by_label(done, group)
        if len(members_by_label) > 1:
            rows += [("", "", *("" for _ in shown)), (group, "", *("" for _ in shown))]
            rows += [_short_row(f"  {name}", members, shown) for name, members in members_by_label.items()]
    if drafting:
        rows += [("", "", *("" for _ in shown)), _short_row(DRAFTING, drafting, shown)]
    parts.append(columns(headers, rows))
    if shares := [(NAMES[name], f"{covered(done, name):.0%}") for name in metrics if _intervals(done, name)]:
        parts += ["", title("Share of measured values within the 80% interval"), grid(shares)]
    parts += ["", *_runs_parts(done + drafting, metrics)]
    refused = refusals(predictions)
    if refused:
        parts += ["", title("Refused"), columns(("reason", "runs"), [(why, str(n)) for why, n in refused.items()])]
    return parts


def _short_row(name: str, members: Sequence[RunPrediction], metrics: Sequence[str]) -> tuple[str, ...]:
    """Return a row with one cell per metric, in whole percents but for the median."""
    scores = [score([run.error(metric) for run in members]) for metric in metrics]
    return (name, str(len(members)), *("" if run is None else _short_score(run) for run in scores))


def _short_score(errors: Score) -> str:
    return f"{errors.median * 100:6.1f}{errors.p90 * 100:6.0f}{_signed_percent(errors.bias):>6}"


def _signed_percent(error: float, decimals: int = 0) -> str:
    """Return an error in percent with its sign: `+4`, `-12`; zero has none."""
    shown = f"{error * 100:+.{decimals}f}"
    return shown.lstrip("+-") if float(shown) == 0 else shown


def _runs_parts(done: Sequence[RunPrediction], metrics: Sequence[str]) -> list[RenderableType]:
    """Return every metric of a few runs, or the largest errors of many."""
    if len(done) > NUM_LISTED:
        worst = columns(("run", *_WORST_HEADERS), _worst_rows(done, metrics), left=2, right=1)
        return [title("Largest errors"), worst]
    rows: list[tuple[str, ...]] = []
    reasons: dict[str, list[str]] = {}
    for run in done:
        known = [name for name in metrics if name in run.predicted]
        rows += [("" if name != known[0] else run.measurement.id, *_run_cells(run, name)) for name in known]
        reasons.setdefault(run.reason, []).append(run.measurement.id)
    table = columns(("run", "metric", "measured", "predicted", "error", "80% interval"), rows, left=2)
    why = [f"{', '.join(runs)}: {reason}" for reason, runs in reasons.items() if reason]
    return [title("Measured and predicted"), table, *why]


def _run_cells(run: RunPrediction, metric: str) -> tuple[str, str, str, str, str]:
    is_rate, interval = metric == "throughput", run.intervals.get(metric)

    def shown(value: float) -> str:
        return f"{value:,.0f}" if is_rate else format_seconds(value)

    return (
        "tokens/s" if is_rate else NAMES[metric],
        shown(run.measurement.measured[metric]),
        shown(run.predicted[metric]),
        f"{_signed_percent(run.error(metric))}%",
        f"{shown(interval.low)} to {shown(interval.high)}" if interval else "",
    )


_WORST_HEADERS = ("metric", "measured", "predicted", "error", "what is known")


def predicted_runs(predictions: Sequence[RunPrediction]) -> tuple[list[RunPrediction], list[RunPrediction]]:
    """Return the predicted runs, and apart from them those whose accepted share of draft tokens was fitted."""
    done = [run for run in predictions if not run.refused]
    apart = [run for run in done if run.measurement.lacks_acceptance]
    return [run for run in done if not run.measurement.lacks_acceptance], apart


DRAFTING = "speculative decoding"


def _left_out(left_out: Mapping[str, int]) -> str:
    return f"left out by their use: {', '.join(f'{count:,} {name}' for name, count in left_out.items())}"


def _how(done: Sequence[RunPrediction]) -> str:
    names = sorted({run.calibration or "none" for run in done})
    return f"calibration: {', '.join(names)}"


def validation_document(
    predictions: Sequence[RunPrediction], left_out: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """Document the scores overall and by group, and every run."""
    done, drafting = predicted_runs(predictions)
    metrics = measured_metrics(done + drafting)
    return {
        "windtunnel": version(),
        "runs": len(predictions),
        "predicted": len(done) + len(drafting),
        "refused": refusals(predictions),
        "left_out": dict(left_out or {}),
        "scores": {name: _score_document(done, name) for name in metrics},
        "scores_of_acceptance_fitted": {name: _score_document(drafting, name) for name in metrics if drafting},
        "interval_coverage": {name: covered(done, name) for name in metrics if _intervals(done, name)},
        "by": {
            group: {
                label: {name: _score_document(members, name) for name in metrics}
                for label, members in by_label(done, group).items()
            }
            for group in GROUPS
        },
        "rows": [_run_document(run) for run in predictions],
    }


def _score_document(members: Sequence[RunPrediction], metric: str) -> dict[str, float] | None:
    errors = score([run.error(metric) for run in members])
    if errors is None:
        return None
    return {"runs": errors.num_runs, "median": errors.median, "p90": errors.p90, "bias": errors.bias}


def _run_document(run: RunPrediction) -> dict[str, Any]:
    return {
        "id": run.measurement.id,
        "use": run.measurement.use,
        **{name: value for name, value in run.measurement.labels.items() if value},
        "refused": run.refused or None,
        "calibration": run.calibration or None,
        "measured": dict(run.measurement.measured),
        "predicted": run.predicted,
        "error": {name: run.error(name) for name in run.predicted},
        "interval": {
            name: [interval.low, interval.high] for name, interval in run.intervals.items() if name in run.predicted
        },
        "reason": run.reason if not run.refused else None,
    }


def validation_page(
    predictions: Sequence[RunPrediction], source: str, left_out: Mapping[str, int] | None = None
) -> str:
    """Return a self-contained HTML page."""
    done, drafting = predicted_runs(predictions)
    metrics = measured_metrics(done + drafting)
    overall = [(name, score([run.error(name) for run in done])) for name in metrics]
    facts = [(f"{len(done) + len(drafting):,} of {len(predictions):,}", "runs predicted")]
    facts += [(f"{summary.median:.1%}", f"median error, {NAMES[name]}") for name, summary in overall if summary]
    facts += [(f"{covered(done, n):.0%}", f"within 80% interval, {NAMES[n]}") for n in metrics if _intervals(done, n)]
    sections = [
        Section("Predicted against measured", figures(_scatter(done, name) for name in metrics if name in LATENCIES)),
        Section("Errors", figures(_distribution(done, name) for name in metrics)),
        *(
            Section(f"By {group}", _group_table(members, metrics))
            for group in GROUPS
            if len(members := by_label(done, group)) > 1
        ),
        *([Section("Apart", _group_table({DRAFTING: drafting}, metrics))] if drafting else []),
        Section(
            "Largest errors",
            paragraph(_ODD_LAST) + table(("run", *_WORST_HEADERS), _worst_rows(done, metrics, 40), left=2, right=1),
        ),
        Section("All runs", _runs_table(done + drafting, metrics)),
    ]
    refused = refusals(predictions)
    if refused:
        rows = [(why, str(count)) for why, count in refused.items()]
        sections.append(Section("Refused", table(("reason", "runs"), rows)))
    omitted = f"; {_left_out(left_out)}" if left_out else ""
    how = _how(done + drafting) + omitted
    lead = f"{source}; {how}. {_DEFINITION}"
    first = Section("At a glance", cards(facts) + paragraph(_WHAT))
    return page("Predicted against measured", lead, [first, *sections])


_DEFINITION = "An error is predicted over measured, less one; median and p90 are of its size, bias is its own median."
_WHAT = (
    "Every run was simulated from its recorded settings and compared with what its client reported. "
    "Lines mark equality and errors of 20%."
)
_ODD_LAST = "One line a run, its largest error. Runs that their own record calls odd come behind all others."


def _scatter(done: Sequence[RunPrediction], metric: str) -> tuple[str, str]:
    series = [
        Series(
            engine,
            [run.measurement.measured.get(metric, math.nan) * 1e3 for run in members],
            [run.predicted.get(metric, math.nan) * 1e3 for run in members],
            tooltips=[_tooltip(run, metric) for run in members],
        )
        for engine, members in by_label(done, "engine").items()
    ]
    return equality_figure(series, NAMES[metric], 520, 420), f"{NAMES[metric]}: one point a run"


def _distribution(done: Sequence[RunPrediction], metric: str) -> tuple[str, str]:
    errors = [run.error(metric) * 100 for run in done]
    edges = [edge * 100 for edge in _ERROR_EDGES]
    drawn = histogram("", errors, edges, Axis(f"error in {NAMES[metric]}, %"), "runs", width=520, height=240)
    return drawn, f"{NAMES[metric]}: runs by error; the last bar holds all beyond 95%"


def _group_table(groups: Mapping[str, Sequence[RunPrediction]], metrics: Sequence[str]) -> str:
    headers = ("", "runs", *(f"{_SHORT[name]} {what}" for name in metrics for what in ("median", "p90", "bias")))
    rows = [
        [
            name,
            str(len(members)),
            *(cell for metric in metrics for cell in score_cells(score([run.error(metric) for run in members]))),
        ]
        for name, members in groups.items()
    ]
    return table(headers, rows)


def _runs_table(done: Sequence[RunPrediction], metrics: Sequence[str]) -> str:
    shown = [group for group in GROUPS if len(by_label(done, group)) > 1]
    kinds = ("measured", "predicted", "error, %")
    headers = ("run", *shown, *(f"{_SHORT[name]} {what}" for name in metrics for what in kinds))
    rows = []
    for run in done:
        cells = [run.measurement.id, *(run.measurement.labels.get(group, "") for group in shown)]
        for name in metrics:
            cells += [_value(name, run.measurement.measured.get(name)), _value(name, run.predicted.get(name))]
            cells.append(_signed_percent(run.error(name), 1) if math.isfinite(run.error(name)) else "")
        rows.append(cells)
    return table(headers, rows, left=1 + len(shown))


def score_cells(errors: Score | None) -> list[str]:
    """Return median, 90th percentile and bias as percentages; empty where there is no run."""
    if errors is None:
        return ["", "", ""]
    return [f"{errors.median:.1%}", f"{errors.p90:.1%}", f"{_signed_percent(errors.bias, 1)}%"]


def _worst_rows(done: Sequence[RunPrediction], metrics: Sequence[str], count: int = NUM_WORST) -> list[tuple[str, ...]]:
    """Return the largest errors by |log(predicted / measured)|, one row per run; runs flagged as odd come last."""
    ranked = []
    for run in done:
        sizes = [(abs(math.log1p(run.error(name))), name) for name in metrics if math.isfinite(run.error(name))]
        if sizes:
            ranked.append((*max(sizes), run))
    ranked.sort(key=lambda item: (bool(item[2].measurement.labels.get("odd")), -item[0]))
    return [
        (
            run.measurement.id,
            NAMES[name],
            _value(name, run.measurement.measured[name]),
            _value(name, run.predicted[name]),
            f"{_signed_percent(run.error(name))}%",
            run.reason,
        )
        for _, name, run in ranked[:count]
    ]


def _value(metric: str, value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f} tokens/s" if metric == "throughput" else format_seconds(value)


def _tooltip(run: RunPrediction, metric: str) -> str:
    labels = ", ".join(value for value in run.measurement.labels.values() if value)
    return f"{run.measurement.id}: {run.error(metric):+.1%} ({labels})"


def measured_metrics(done: Sequence[RunPrediction]) -> list[str]:
    """Return the metrics that any run measured, in order."""
    return [name for name in NAMES if any(name in run.predicted for run in done)]


def by_label(done: Sequence[RunPrediction], name: str) -> dict[str, list[RunPrediction]]:
    """Return label -> its runs, with numeric labels in ascending order."""
    runs: dict[str, list[RunPrediction]] = {}
    for run in done:
        label = run.measurement.labels.get(name, "")
        if label:
            runs.setdefault(label, []).append(run)
    order: Callable[[str], Any] = lambda label: (0, float(label), "") if _is_number(label) else (1, 0.0, label)  # noqa: E731
    return {label: runs[label] for label in sorted(runs, key=order)}


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdigit()


def _intervals(done: Sequence[RunPrediction], metric: str) -> list[bool]:
    return [
        run.intervals[metric].low <= run.measurement.measured[metric] <= run.intervals[metric].high
        for run in done
        if metric in run.intervals and metric in run.predicted
    ]


def covered(done: Sequence[RunPrediction], metric: str) -> float:
    """Return the share of measured values inside their intervals."""
    inside = _intervals(done, metric)
    return sum(inside) / len(inside) if inside else math.nan


def refusals(predictions: Sequence[RunPrediction]) -> dict[str, int]:
    """Return reason -> number of refused runs, the most frequent first."""
    counts: dict[str, int] = {}
    for run in predictions:
        if run.refused:
            counts[run.refused] = counts.get(run.refused, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def ranking(done: Sequence[RunPrediction]) -> list[float]:
    """Return Kendall's tau between predicted and measured throughput per device, one for each model, device and pair of
    lengths with at least three deployments or loads; a closed loop's throughput is C / E2E requests a second.
    """
    groups: dict[tuple[str, ...], list[RunPrediction]] = {}
    for run in done:
        labels = run.measurement.labels
        if labels.get("concurrency") and "e2e" in run.predicted:
            key = tuple(labels.get(name, "") for name in ("model", "device", "prompt", "output"))
            groups.setdefault(key, []).append(run)
    taus = []
    for members in groups.values():
        if len(members) >= 3:
            measured = [_rate(run, run.measurement.measured["e2e"]) for run in members]
            predicted = [_rate(run, run.predicted["e2e"]) for run in members]
            taus.append(kendall_tau(measured, predicted))
    return [tau for tau in taus if math.isfinite(tau)]


def _rate(run: RunPrediction, e2e_s: float) -> float:
    scenario = run.measurement.scenario
    assert scenario is not None
    return float(run.measurement.labels["concurrency"]) / e2e_s / scenario.deployment.num_devices
