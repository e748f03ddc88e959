"""A real run beside its simulation: request by request, and each kind of step operator by operator."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from windtunnel.compiled.arrays import Floats
from windtunnel.errors import InputError
from windtunnel.formats.captures.capture import Capture
from windtunnel.formats.captures.step_operators import OTHER, ROWS, MatchedStep, measured_steps, row_of_launch
from windtunnel.lab.experiments.schema import REQUESTS
from windtunnel.pricing.table import numeric_column, read_parquet, require_columns
from windtunnel.report.chart import Chart, Series, equality_chart
from windtunnel.report.lab.experiment import capture_of, finished_summary
from windtunnel.report.layout import layouts_beside, table_of
from windtunnel.report.report import Block, Facts, Figures, OnPage, Report, Section
from windtunnel.serving.explain import Explanation, explain_step
from windtunnel.serving.scenario import Setup
from windtunnel.serving.setup.estimators import estimator_for, shard_of

LAYOUT = layouts_beside(__file__)
METRICS = ("ttft_s", "tpot_s", "e2e_s")
HOST, SUM = "between operators", "step"


@dataclass(frozen=True)
class Comparison:
    """A run beside its simulation."""

    document: dict[str, Any]
    """Errors of each latency that both know, and of each kind of step operator by operator; None where unknown."""
    requests: dict[str, tuple[Floats, Floats]]
    """Latency -> that of every request, measured and simulated, in seconds."""
    device: str
    """Title of the simulated device."""


def compare_run(run: Path, simulated: Mapping[str, Floats], setup: Setup) -> Comparison:
    """Compare a run's requests with the simulated ones, and its captured steps with the same steps explained.
    InputError for no such run, no requests in common, or requests of other lengths.

    Args:
        run: a folder of `windtunnel lab run`, or of `windtunnel bench`.
        simulated: columns of the simulation's requests, in the order of sending.
        setup: what was simulated; its model must be the one that ran.
    """
    measured = request_columns(run / REQUESTS)
    _check_same(measured, simulated)
    steps: list[dict[str, Any]] = []
    try:
        capture = capture_of(run, str(finished_summary(run)["mode"]))
    except InputError:
        capture = None  # only runs of the lab are profiled
    if capture is None:
        notes = ["the run was not profiled: operators are compared of runs with --mode torch or nsys"]
    else:
        steps, skipped = compare_steps(capture, setup)
        notes = ["the run was profiled, which slows it: compare latencies with a run of mode inference_only", *skipped]
    pairs = {name: (measured[name], simulated[name]) for name in METRICS}
    known = {name: pair for name, pair in pairs.items() if all(np.isfinite(values).any() for values in pair)}
    document = {
        "run": run.resolve().name,
        "model": setup.model.name,
        "device": setup.device.name,
        "requests": {name: _latency_errors(*pair) for name, pair in known.items()},
        "steps": steps,
        "notes": notes,
    }
    return Comparison(document, known, setup.device.title)


def _latency_errors(measured: Floats, simulated: Floats) -> dict[str, float | None]:
    """Return the means of a latency and its relative errors: simulated over measured, less one."""
    means = float(np.nanmean(measured)), float(np.nanmean(simulated))
    by_request = float(np.nanmedian(np.abs(simulated / measured - 1)))
    return {
        "measured_mean": _known(means[0]),
        "simulated_mean": _known(means[1]),
        "mean_error": _error(*means),
        "median_error": _error(float(np.nanmedian(measured)), float(np.nanmedian(simulated))),
        "median_absolute_error_by_request": _known(by_request),
    }


def _error(measured: float | None, simulated: float | None) -> float | None:
    return _known(simulated / measured - 1) if measured and simulated is not None else None


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def request_columns(path: Path) -> dict[str, Floats]:
    """Read the compared columns of a request table without its warm-up; InputError where the file or one is missing."""
    rows = read_parquet(path)
    names = ("arrival_s", "input_tokens", "output_tokens", *METRICS)
    require_columns(path, rows.column_names, names)
    columns = {name: numeric_column(rows, name, path) for name in names}
    if "is_warmup" in rows.column_names:
        keep = ~np.array(rows["is_warmup"].to_pylist(), bool)
        columns = {name: column[keep] for name, column in columns.items()}
    return columns


def _check_same(measured: Mapping[str, Floats], simulated: Mapping[str, Floats]) -> None:
    numbers = len(measured["arrival_s"]), len(simulated["arrival_s"])
    if numbers[0] != numbers[1]:
        raise InputError(
            f"the run has {numbers[0]:,} requests and the simulation {numbers[1]:,}",
            "simulate the workload that ran, without warm-up requests",
        )
    for name in ("input_tokens", "output_tokens"):
        different = np.flatnonzero(measured[name] != simulated[name])
        if len(different):
            first = int(different[0])
            raise InputError(
                f"request {first} has {measured[name][first]:,.0f} {name.replace('_', ' ')} in the run and "
                f"{simulated[name][first]:,.0f} in the simulation",
                "simulate the workload that ran: the same requests in the same order",
            )


def compare_steps(capture: Capture, setup: Setup) -> tuple[list[dict[str, Any]], list[str]]:
    """Compare the captured steps, operator by operator, with the simulator's prices of the same batches. InputError
    where no step of the capture can be told.

    Returns:
        A document for each kind of step, and notes on steps that the simulator refuses.
    """
    shard = shard_of(setup)
    estimator = estimator_for(setup)
    groups: dict[str, list[tuple[MatchedStep, Explanation]]] = {}
    skipped: dict[str, int] = {}
    for measured in measured_steps(capture, shard):
        kind = "Steps with prompts" if measured.step.batch.prefill_tokens else "Decode steps"
        try:
            explained = explain_step(setup, measured.step.batch, estimator)
        except InputError as error:
            skipped[error.message] = skipped.get(error.message, 0) + 1
        else:
            groups.setdefault(kind, []).append((measured, explained))
    notes = [f"{number} steps are left out: {reason}" for reason, number in skipped.items()]
    return [_step_document(name, pairs) for name, pairs in groups.items()], notes


def _step_document(name: str, pairs: Sequence[tuple[MatchedStep, Explanation]]) -> dict[str, Any]:
    """Document the steps of one kind: mean seconds of each operator, measured and simulated."""
    measured: dict[str, float] = {}
    simulated: dict[str, float] = {}
    for step, explained in pairs:
        for row, seconds in step.seconds.items():
            measured[row] = measured.get(row, 0.0) + seconds / len(pairs)
        for launch in explained.launches:
            row = row_of_launch(launch.name)
            simulated[row] = simulated.get(row, 0.0) + launch.total_s / len(pairs)
    operators: dict[str, tuple[float | None, float | None]] = {
        row: (measured.get(row), simulated.get(row)) for row in ROWS if row in measured or row in simulated
    }
    host_s = float(np.mean([step.between_s for step, _ in pairs]))
    step_s = float(np.mean([max(step.step.host_s, sum(step.seconds.values())) for step, _ in pairs]))
    explained_s = float(np.mean([explained.step_s for _, explained in pairs]))
    operators[HOST] = (host_s, max(explained_s - sum(simulated.values()), 0.0))
    operators[SUM] = (step_s, explained_s)
    return {
        "name": name,
        "num_steps": len(pairs),
        # The share of the kernels' time that belongs to no operator of the model.
        "unmatched_fraction": measured.get(OTHER, 0.0) / (sum(measured.values()) or 1.0),
        "operators": [
            {"name": row, "measured_s": times[0], "simulated_s": times[1], "error": _error(*times)}
            for row, times in operators.items()
        ],
    }


def comparison_report(comparison: Comparison) -> Report:
    """Return the report of a comparison: latencies, then the operators of each kind of step."""
    document = comparison.document
    rows = [{"title": _title(name), **errors} for name, errors in document["requests"].items()]
    requests: list[Block] = [
        table_of(rows, LAYOUT["requests"]),
        OnPage(lambda: [Figures([_request_figure(*item) for item in comparison.requests.items()])]),
    ]
    sections = [Section("", requests, "Requests"), *map(_step_section, document["steps"])]
    simulated = Facts([("simulated", f"{document['model']} on {comparison.device}")])
    words = {True: "{} {:.1%} longer", False: "{} {:.1%} shorter"}
    known = [(row["title"], row["mean_error"]) for row in rows if row["mean_error"] is not None]
    parts = [words[error > 0].format(name, abs(error)) if error else f"{name} the same" for name, error in known]
    headline = f"Simulated beside measured, on average: {', '.join(parts)}." if parts else ""
    title = f"{document['run']}: measured beside simulated"
    return Report(title, [simulated], sections, document["notes"], verdict=headline)


def _title(latency: str) -> str:
    return latency.removesuffix("_s").upper()


def _step_section(step: Mapping[str, Any]) -> Section:
    unmatched = f"{step['unmatched_fraction']:.1%} of the kernels' time belongs to no operator of the model."
    step_s = next(row["measured_s"] for row in step["operators"] if row["name"] == SUM)
    shares = ({"share_fraction": row["measured_s"] and row["measured_s"] / step_s} for row in step["operators"])
    rows = [row | share for row, share in zip(step["operators"], shares, strict=True)]
    table = table_of(rows, LAYOUT["operators"])
    return Section(
        f"{step['name']}: mean of {step['num_steps']:,}", [table, OnPage(lambda: [unmatched, _operator_figure(rows)])]
    )


def _operator_figure(rows: Sequence[Mapping[str, Any]]) -> Figures:
    known = [row for row in rows if row["measured_s"] and row["simulated_s"] and row["name"] != SUM]
    measured, simulated = ([row[name] for row in known] for name in ("measured_s", "simulated_s"))
    tooltips = [f"{row['name']}: {row['error']:+z.1%}" for row in known]
    points = Series("operators", measured, simulated, tooltips=tooltips)
    chart = equality_chart([points], "measured", "simulated")
    return Figures([(chart, "Operators of one step; on the line both agree")])


def _request_figure(latency: str, pair: tuple[Floats, Floats]) -> tuple[Chart, str]:
    points = [Series("", pair[0].tolist(), pair[1].tolist())]
    return equality_chart(points, "measured", "simulated"), f"{_title(latency)} of every request"
