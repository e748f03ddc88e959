"""Predictions against measurements: scores overall and by group, the largest errors, every run.

All but the document is written from the document of `validation_document`, which a dashboard reads from a file.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from windtunnel.calibration.validate import RunPrediction
from windtunnel.metrics.accuracy import score
from windtunnel.report.chart import Axis, Chart, Series, equality_chart, histogram
from windtunnel.report.render.json import version
from windtunnel.report.report import Block, Facts, Figures, OnPage, OnTerminal, Report, Section, Table
from windtunnel.schema import fields_of
from windtunnel.units import format_count, format_seconds

LATENCIES = {"tpot": "TPOT", "ttft": "TTFT", "e2e": "end to end", "step": "step time"}
RATES = {"throughput": ("tokens/s", 1.0), "power": ("W", 1.0), "rate": ("TFLOP/s", 1e-12)}
"""Metric that is not a time -> its unit, and how many of that are one of ours."""
NAMES = {**LATENCIES, "throughput": "throughput", "power": "power", "rate": "rate of a device"}
GROUPS = (
    *("mode", "engine", "framework", "device", "devices", "model", "format", "parallelism"),
    *("concurrency", "prompt", "source"),
)
NUM_WORST = 10
NUM_LISTED = 8
"""Up to this many runs are shown with every metric; of more, only the largest errors."""
NUM_SHOWN = 3
"""Metrics that a terminal shows side by side; pages and documents have all."""
DRAFTING = "speculative decoding"

_ERROR_EDGES = [step * 0.05 for step in range(-20, 21)]
DEFINITION = "Error: predicted / measured - 1. Median and p90 are of its absolute value, bias is its median."
_WHAT = (
    "Every run was simulated from its recorded settings and compared with what was measured. "
    "Lines mark equality and errors of 20%."
)
_ODD_LAST = "The largest error of each run. Runs flagged as odd in the source are listed last."

Run = Mapping[str, Any]
"""A row of the document."""


def validation_document(
    predictions: Sequence[RunPrediction], left_out: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """Document the scores overall and by group, and every run."""
    done, drafting = predicted_runs(predictions)
    metrics = [name for name in NAMES if any(name in run.predicted for run in done + drafting)]
    return {
        "windtunnel": version(),
        "runs": len(predictions),
        "predicted": len(done) + len(drafting),
        "refused": refusals(predictions),
        "taken": _taken(predictions),
        "inferred": sorted({said for run in predictions if (said := run.measurement.labels.get("inferred"))}),
        "left_out": dict(left_out or {}),
        "scores": {name: _score_document(done, name) for name in metrics},
        "scores_of_acceptance_fitted": {name: _score_document(drafting, name) for name in metrics if drafting},
        "interval_coverage": {
            name: sum(inside) / len(inside) for name in metrics if (inside := _within_intervals(done, name))
        },
        "by": {
            group: {
                label: {name: _score_document(members, name) for name in metrics}
                for label, members in _by_label(done, group).items()
            }
            for group in GROUPS
        },
        "rows": [_run_document(run) for run in predictions],
    }


def _score_document(members: Sequence[RunPrediction], metric: str) -> dict[str, float] | None:
    errors = score([run.error(metric) for run in members])
    return None if errors is None else {"runs": errors.num_runs, **fields_of(errors, "median", "p90", "bias")}


def _run_document(run: RunPrediction) -> dict[str, Any]:
    return {
        **fields_of(run.measurement, "id", "use"),
        **{name: value for name, value in run.measurement.labels.items() if value and name != "inferred"},
        "refused": run.refused or None,
        "calibration": run.calibration or None,
        "measured": dict(run.measurement.measured),
        "predicted": run.predicted,
        "error": {name: run.error(name) for name in run.predicted},
        "interval": {
            name: [interval.low, interval.high] for name, interval in run.intervals.items() if name in run.predicted
        },
        "reason": run.reason if not run.refused else None,
        **({"odd": run.odd} if run.odd else {}),
        **({"waited": True} if run.facts.get("slow_w") else {}),
    }


def predicted_runs(predictions: Sequence[RunPrediction]) -> tuple[list[RunPrediction], list[RunPrediction]]:
    """Return the predicted runs, and apart from them those whose accepted share of draft tokens was fitted."""
    done = [run for run in predictions if not run.refused]
    apart = [run for run in done if run.measurement.lacks_acceptance]
    return [run for run in done if not run.measurement.lacks_acceptance], apart


def _by_label(done: Sequence[RunPrediction], name: str) -> dict[str, list[RunPrediction]]:
    """Return label -> its runs, with numeric labels in ascending order."""
    runs: dict[str, list[RunPrediction]] = {}
    for run in done:
        label = run.measurement.labels.get(name, "")
        if label:
            runs.setdefault(label, []).append(run)
    numbers = {label: float(label) for label in runs if label.replace(".", "", 1).isdigit()}
    ordered = [*sorted(numbers, key=lambda label: numbers[label]), *sorted(runs.keys() - numbers)]
    return {label: runs[label] for label in ordered}


def _within_intervals(done: Sequence[RunPrediction], metric: str) -> list[bool]:
    return [
        run.intervals[metric].low <= run.measurement.measured[metric] <= run.intervals[metric].high
        for run in done
        if metric in run.intervals and metric in run.predicted
    ]


def refusals(predictions: Sequence[RunPrediction]) -> dict[str, int]:
    """Return reason -> number of refused runs, the most frequent first."""
    return dict(Counter(run.refused for run in predictions if run.refused).most_common())


def _taken(predictions: Sequence[RunPrediction]) -> dict[str, int]:
    """Return what was taken as usual where a record is silent -> number of runs, the most frequent first."""
    said = (run.measurement.labels.get("assumed", "") for run in predictions if not run.refused)
    return dict(Counter(part for text in said for part in text.split(", ") if part).most_common())


def validation_report(
    predictions: Sequence[RunPrediction], left_out: Mapping[str, int] | None = None, source: str = ""
) -> Report:
    """Return the report of a validation.

    Args:
        left_out: use -> number of runs that were not to be predicted.
        source: names of the files, for a page.
    """
    document = validation_document(predictions, left_out)
    apart = [place for place, run in enumerate(predictions) if run.measurement.lacks_acceptance]
    lead = [f"left out by their use: {', '.join(f'{count:,} {name}' for name, count in (left_out or {}).items())}"]
    names = sorted({run.calibration or "none" for run in predictions if not run.refused})
    failed = {run.measurement.id: run.measurement.num_failed for run in predictions if run.measurement.num_failed}
    told = [f"of {run}, {format_count(count, 'request')} failed and are not simulated" for run, count in failed.items()]
    how = [*(lead if left_out else []), *told, *document["inferred"], f"calibration: {', '.join(names)}", DEFINITION]
    title = f"{document['predicted']:,} of {format_count(document['runs'], 'run')} predicted"
    about: list[Block] = [OnPage(lambda: [f"{source}: predicted against measured."])] if source else []
    return Report(title, [*about, *how], validation_sections(document, apart), verdict=verdict_of(document))


SHOWN_WAITED = 3
"""Runs whose devices waited that the first sentence names."""


def verdict_of(document: Mapping[str, Any]) -> str:
    """Return the median errors in a sentence, and the runs whose power shows that their devices waited; empty where no
    run was predicted."""
    medians = [f"{NAMES[name]} {errors['median']:.1%}" for name, errors in document["scores"].items() if errors]
    waited = [run["id"] for run in document["rows"] if run.get("waited")]
    more = f" and {len(waited) - SHOWN_WAITED} more" if len(waited) > SHOWN_WAITED else ""
    names = f"{', '.join(waited[:SHOWN_WAITED])}{more}"
    cause = f" Devices waited for their host or the client in {names}." if waited else ""
    return f"Median error: {', '.join(medians)}.{cause}" if medians else ""


def validation_sections(document: Mapping[str, Any], apart: Collection[int] = ()) -> list[Section]:
    """Return the sections of a document; the draft tokens accepted in runs at the positions `apart` were fitted."""
    done = [run for place, run in enumerate(document["rows"]) if not run["refused"] and place not in apart]
    drafting = [run for place, run in enumerate(document["rows"]) if not run["refused"] and place in apart]
    metrics = [name for name in NAMES if name in document["scores"]]
    refused = [(reason, str(count)) for reason, count in document["refused"].items()]
    taken = [(setting, str(count)) for setting, count in document["taken"].items()]
    coverage = [(NAMES[name], f"{share:.0%}") for name, share in document["interval_coverage"].items()]
    return [
        Section("", [OnTerminal(lambda: [_score_table(document, done, drafting)])]),
        Section("Predicted against measured", [OnPage(lambda: [Figures(_scatters(done, metrics)), _WHAT])]),
        Section("Errors", [OnPage(lambda: [Figures([_distribution(done, name) for name in metrics])])]),
        Section("Errors by group", [OnPage(lambda: [_wide_scores(document, len(drafting))])]),
        *([Section("Share of measured values within the 80% interval", [Facts(coverage)])] if coverage else []),
        *_run_sections([*done, *drafting], metrics),
        *([Section("Not recorded, taken as usual", [Table(("setting", "runs"), taken)])] if taken else []),
        *([Section("Refused", [Table(("reason", "runs"), refused)])] if refused else []),
    ]


def _score_table(document: Mapping[str, Any], done: Sequence[Run], drafting: Sequence[Run]) -> Table:
    """Return the scores of all runs and by group; each cell holds median, p90 and bias."""
    shown = [name for name in NAMES if name in document["scores"]][:NUM_SHOWN]
    headers = ("error, %", "runs", *(f"{NAMES[name]}\n{'median':>6}{'p90':>6}{'bias':>6}" for name in shown))

    def row(name: str, count: int | str = "", scores: Mapping[str, Any] = {}) -> list[str]:
        known = [scores.get(metric) for metric in shown]
        return [name, str(count), *(_short_score(errors) if errors else "" for errors in known)]

    rows = [row("all", len(done), document["scores"])]
    for group, members in document["by"].items():
        if len(members) > 1:
            rows += [row(""), row(group)]
            rows += [
                row(f"  {label}", sum(run.get(group) == label for run in done), scores)
                for label, scores in members.items()
            ]
    if drafting:
        rows += [row(""), row(DRAFTING, len(drafting), document["scores_of_acceptance_fitted"])]
    return Table(headers, rows)


def _short_score(errors: Mapping[str, float]) -> str:
    """Return a score in whole percents but for the median."""
    return f"{errors['median'] * 100:6.1f}{errors['p90'] * 100:6.0f}{_signed_percent(errors['bias']):>6}"


def _signed_percent(error: float, decimals: int = 0) -> str:
    """Return an error in percent with its sign: `+4`, `-12`; zero has none."""
    shown = f"{error * 100:+.{decimals}f}"
    return shown.lstrip("+-") if float(shown) == 0 else shown


def _run_sections(done: Sequence[Run], metrics: Sequence[str]) -> list[Section]:
    """Return every metric of a few runs, or the largest errors of many; a page has both."""

    heads, are_few = ("run", "metric", "measured", "predicted", "error", "what is known"), len(done) <= NUM_LISTED
    ranked = []
    for run in done:
        sizes = [(abs(math.log1p(run["error"][name])), name) for name in metrics if name in run["error"]]
        if sizes:
            ranked.append((*max(sizes), run))
    ranked.sort(key=lambda item: (bool(item[2].get("odd")), -item[0]))
    rows: list[tuple[str, ...]] = []
    for _, name, run in ranked[:NUM_WORST]:
        unit = f" {RATES[name][0]}" if name in RATES else ""
        _, measured, predicted, error, _ = _run_cells(run, name)
        rows.append((run["id"], NAMES[name], measured + unit, predicted + unit, error, run["reason"] or ""))
    worst = Table(heads, rows, left=2, right=1)
    return [
        Section("Largest errors", [OnTerminal(lambda: [] if are_few else [worst]), OnPage(lambda: [_ODD_LAST, worst])]),
        Section("Measured and predicted", [OnTerminal(lambda: [_listed(done)] if are_few else [])]),
        Section("All runs", [OnPage(lambda: [_listed(done, is_on_page=True)])]),
    ]


def _listed(done: Sequence[Run], is_on_page: bool = False) -> Table:
    """Return a row for every metric of every run; on a page with the labels in which runs differ."""
    labels = [group for group in GROUPS if is_on_page and len({run[group] for run in done if group in run}) > 1]
    rows: list[list[str]] = []
    reasons: dict[str, list[str]] = {}
    for run in done:
        known = [name for name in NAMES if name in run["predicted"]]
        for name in known:
            first = run["id"] if is_on_page or name == known[0] else ""
            rows.append([first, *(run.get(group, "") for group in labels), *_run_cells(run, name)])
        reasons.setdefault(run["reason"] or "", []).append(run["id"])
    why = [f"{', '.join(runs)}: {reason}" for reason, runs in reasons.items() if reason and not is_on_page]
    heads = ("run", *labels, "metric", "measured", "predicted", "error", "80% interval")
    return Table(heads, rows, left=2 + len(labels), notes=why)


def _run_cells(run: Run, metric: str) -> tuple[str, str, str, str, str]:
    (unit, scale), interval = RATES.get(metric, ("", 0.0)), run["interval"].get(metric)

    def shown(value: float) -> str:
        return f"{value * scale:,.0f}" if unit else format_seconds(value)

    return (
        unit or NAMES[metric],
        shown(run["measured"][metric]),
        shown(run["predicted"][metric]),
        f"{_signed_percent(run['error'][metric])}%",
        " to ".join(map(shown, interval)) if interval else "",
    )


def _scatters(done: Sequence[Run], metrics: Sequence[str]) -> list[tuple[Chart, str]]:
    engines = sorted({_engine(run) for run in done})
    dots = {name: [_dots(done, engine, name) for engine in engines] for name in metrics if name in LATENCIES}
    return [
        (
            equality_chart(series, f"measured {NAMES[name]}", f"predicted {NAMES[name]}"),
            f"{NAMES[name]}: one point a run; dashed: errors of 20%",
        )
        for name, series in dots.items()
    ]


def _engine(run: Run) -> str:
    return str(run.get("engine", run.get("framework", "")))


def _dots(done: Sequence[Run], engine: str, metric: str) -> Series:
    runs = [run for run in done if _engine(run) == engine and metric in run["error"]]
    labels = [", ".join(run[group] for group in GROUPS if group in run) for run in runs]
    tooltips = [f"{run['id']}: {run['error'][metric]:+z.1%} ({text})" for run, text in zip(runs, labels, strict=True)]
    measured, predicted = ([run[which][metric] for run in runs] for which in ("measured", "predicted"))
    return Series(engine, measured, predicted, tooltips=tooltips)


def _distribution(done: Sequence[Run], metric: str) -> tuple[Chart, str]:
    errors = [run["error"][metric] for run in done if metric in run["error"]]
    drawn = histogram(errors, _ERROR_EDGES, Axis(f"error in {NAMES[metric]}", "share", low=-1.0, high=1.0), "runs")
    return drawn, f"{NAMES[metric]}: runs by error; the last bar holds all beyond 95%"


def _wide_scores(document: Mapping[str, Any], num_drafting: int) -> Table:
    """Return the scores of every group of runs that differ in a label, and of those with speculative decoding."""
    metrics = list(document["scores"])
    groups = {
        (name, label): scores for name, by in document["by"].items() if len(by) > 1 for label, scores in by.items()
    }
    if num_drafting:
        groups["apart", DRAFTING] = document["scores_of_acceptance_fitted"]
    rows = []
    for (group, label), scores in groups.items():
        known = [scores.get(name) for name in metrics]
        count = max((errors["runs"] for errors in known if errors is not None), default=0)
        rows.append([group, label, str(count), *(cell for errors in known for cell in score_cells(errors))])
    heads = (f"{NAMES[name]} {what}" for name in metrics for what in ("median", "p90", "bias"))
    return Table(("label", "value", "runs", *heads), rows, left=2)


def score_cells(errors: Mapping[str, float] | None) -> list[str]:
    """Return median, 90th percentile and bias as percentages; empty where there is no run."""
    if errors is None:
        return ["", "", ""]
    return [f"{errors['median']:.1%}", f"{errors['p90']:.1%}", f"{_signed_percent(errors['bias'], 1)}%"]
