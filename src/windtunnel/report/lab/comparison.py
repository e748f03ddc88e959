"""A real run beside its simulation: request by request, and each kind of step operator by operator."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.errors import InputError
from windtunnel.formats.captures.capture import Capture
from windtunnel.formats.captures.step_operators import OTHER, ROWS, MatchedStep, measured_steps, row_of_launch
from windtunnel.lab.experiments.schema import REQUESTS
from windtunnel.pricing.table import numeric_column, read_parquet, require_columns
from windtunnel.report.lab.experiment import capture_of, finished_summary
from windtunnel.report.numbers import percent
from windtunnel.report.render.json import fields_of
from windtunnel.report.render.plots import Series, equality_figure
from windtunnel.report.report import Block, Cards, Facts, Figures, OnPage, Report, Section, Table
from windtunnel.serving.explain import Explanation, explain_step
from windtunnel.serving.scenario import Setup
from windtunnel.serving.setup.estimators import estimator_for, shard_of
from windtunnel.units import format_seconds

Floats = NDArray[np.float64]

METRICS = ("ttft_s", "tpot_s", "e2e_s")
HOST, SUM = "between operators", "step"


@dataclass(frozen=True)
class MetricComparison:
    """One latency of the same requests, measured and simulated."""

    name: str
    measured: Floats
    simulated: Floats

    @property
    def mean_error(self) -> float:
        """Relative error of the mean: simulated over measured, less one."""
        return _error(float(np.nanmean(self.simulated)), float(np.nanmean(self.measured)))

    @property
    def median_error(self) -> float:
        """Relative error of the median."""
        return _error(float(np.nanmedian(self.simulated)), float(np.nanmedian(self.measured)))

    @property
    def per_request(self) -> float:
        """Median over requests of the absolute error."""
        return float(np.nanmedian(np.abs(self.simulated / self.measured - 1)))

    @property
    def is_known(self) -> bool:
        """Whether any request has it, measured and simulated."""
        return bool(np.isfinite(self.measured).any() and np.isfinite(self.simulated).any())


@dataclass(frozen=True)
class OperatorComparison:
    """One operator in one kind of step: mean seconds per step."""

    name: str
    measured_s: float | None
    """None: the profile has no kernel of it."""
    simulated_s: float | None
    """None: the simulator has no operator of it."""

    @property
    def error(self) -> float:
        """Simulated over measured, less one; NaN where either is missing."""
        if self.measured_s is None or self.simulated_s is None:
            return math.nan
        return _error(self.simulated_s, self.measured_s)


@dataclass(frozen=True)
class StepComparison:
    """Steps of one kind: those that only decode, or those with prompts."""

    name: str
    num_steps: int
    operators: tuple[OperatorComparison, ...]
    unmatched_fraction: float
    """Share of the kernels' time that belongs to no operator of the model."""


@dataclass(frozen=True)
class Comparison:
    """A run beside its simulation."""

    run: str
    setup: Setup
    requests: tuple[MetricComparison, ...]
    """Latencies that both know."""
    steps: tuple[StepComparison, ...]
    notes: tuple[str, ...]


def _error(simulated: float, measured: float) -> float:
    return simulated / measured - 1 if measured else math.nan


def compare_run(run: Path, simulated: Mapping[str, Floats], setup: Setup) -> Comparison:
    """Compare a run's requests with the simulated ones, and its captured steps with the same steps explained.

    Args:
        run: a folder of `windtunnel lab run`, or of `windtunnel bench`.
        simulated: columns of the simulation's requests, in the order of sending.
        setup: what was simulated; its model must be the one that ran.

    Raises:
        InputError: no such run, no requests in common, or requests of other lengths.
    """
    measured = request_columns(run / REQUESTS)
    _check_same(measured, simulated)
    notes: list[str] = []
    steps: tuple[StepComparison, ...] = ()
    capture = _capture(run)
    if capture is None:
        notes.append("the run was not profiled: operators are compared of runs with --mode torch or nsys")
    else:
        notes.append("the run was profiled, which slows it: compare latencies with a run of mode inference_only")
        steps, more = compare_steps(capture, setup)
        notes += more
    metrics = (MetricComparison(name, measured[name], simulated[name]) for name in METRICS)
    known = tuple(metric for metric in metrics if metric.is_known)
    return Comparison(run.resolve().name, setup, known, steps, tuple(notes))


def request_columns(path: Path) -> dict[str, Floats]:
    """Read the columns of a request table that are compared, without the requests of the warm-up.

    Raises:
        InputError: no such file, or a column is missing.
    """
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


def _capture(run: Path) -> Capture | None:
    """Return the profile of a lab run; other folders of requests have none."""
    try:
        mode = str(finished_summary(run)["mode"])
    except InputError:
        return None
    return capture_of(run, mode)


def compare_steps(capture: Capture, setup: Setup) -> tuple[tuple[StepComparison, ...], list[str]]:
    """Compare the captured steps, operator by operator, with the simulator's prices of the same batches.

    Returns:
        Comparisons by kind of step, and notes on steps that the simulator refuses.

    Raises:
        InputError: no step of the capture can be told.
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
    return tuple(_step_comparison(name, pairs) for name, pairs in groups.items()), notes


def _step_comparison(name: str, pairs: Sequence[tuple[MatchedStep, Explanation]]) -> StepComparison:
    measured: dict[str, float] = {}
    simulated: dict[str, float] = {}
    for step, explained in pairs:
        for row, seconds in step.seconds.items():
            measured[row] = measured.get(row, 0.0) + seconds / len(pairs)
        for launch in explained.launches:
            row = row_of_launch(launch.name)
            simulated[row] = simulated.get(row, 0.0) + launch.total_s / len(pairs)
    rows = [
        OperatorComparison(row, measured.get(row), simulated.get(row))
        for row in ROWS
        if row in measured or row in simulated
    ]
    host_s = float(np.mean([step.between_s for step, _ in pairs]))
    step_s = float(np.mean([max(step.step.host_s, sum(step.seconds.values())) for step, _ in pairs]))
    explained_s = float(np.mean([explained.step_s for _, explained in pairs]))
    rows.append(OperatorComparison(HOST, host_s, max(explained_s - sum(simulated.values()), 0.0)))
    rows.append(OperatorComparison(SUM, step_s, explained_s))
    unmatched = measured.get(OTHER, 0.0) / (sum(measured.values()) or 1.0)
    return StepComparison(name, len(pairs), tuple(rows), unmatched)


# ------------------------------------------------------------------------------------------------------------ output


def comparison_report(comparison: Comparison) -> Report:
    """Return the report of a comparison: latencies, then the operators of each kind of step."""
    simulated = ("simulated", f"{comparison.setup.model.name} on {comparison.setup.device.title}")
    rows = _request_rows(comparison)
    requests: list[Block] = [
        Cards([(row[3], f"{row[0]}, mean off") for row in rows]),
        Table(REQUEST_HEADS, rows),
        OnPage(lambda: [Figures(_request_figures(comparison))]),
    ]
    sections = [Section("", requests, "Requests"), *map(_step_section, comparison.steps)]
    notes = [f"note: {note}" for note in comparison.notes]
    return Report(f"{comparison.run}: measured beside simulated", [Facts([simulated])], sections, notes)


def _step_section(step: StepComparison) -> Section:
    unmatched = f"{step.unmatched_fraction:.1%} of the kernels' time belongs to no operator of the model."
    table = Table(OPERATOR_HEADS, _operator_rows(step))
    return Section(_step_title(step), [table, OnPage(lambda: [unmatched, _operator_figure(step)])])


def _step_title(step: StepComparison) -> str:
    return f"{step.name}: mean of {step.num_steps:,}"


REQUEST_HEADS = ("requests", "measured", "simulated", "mean off", "median off", "each off")
OPERATOR_HEADS = ("operator", "measured", "simulated", "off", "share")


def _request_rows(comparison: Comparison) -> list[list[str]]:
    return [
        [
            metric.name.removesuffix("_s").upper(),
            _seconds(float(np.nanmean(metric.measured))),
            _seconds(float(np.nanmean(metric.simulated))),
            _signed(metric.mean_error),
            _signed(metric.median_error),
            f"{metric.per_request:.1%}",
        ]
        for metric in comparison.requests
    ]


def _operator_rows(step: StepComparison) -> list[list[str]]:
    step_s = next(row.measured_s for row in step.operators if row.name == SUM) or math.nan
    return [
        [
            row.name,
            _seconds(row.measured_s),
            _seconds(row.simulated_s),
            _signed(row.error),
            "" if row.measured_s is None else percent(row.measured_s / step_s),
        ]
        for row in step.operators
    ]


def _seconds(value: float | None) -> str:
    return "" if value is None or not math.isfinite(value) else format_seconds(value)


def _signed(value: float) -> str:
    return f"{value:+.1%}" if math.isfinite(value) else ""


def comparison_document(comparison: Comparison) -> dict[str, Any]:
    """Document the comparison."""
    return {
        "run": comparison.run,
        "model": comparison.setup.model.name,
        "device": comparison.setup.device.name,
        "requests": {
            metric.name: {
                "measured_mean": _known(float(np.nanmean(metric.measured))),
                "simulated_mean": _known(float(np.nanmean(metric.simulated))),
                "mean_error": _known(metric.mean_error),
                "median_error": _known(metric.median_error),
                "median_absolute_error_by_request": _known(metric.per_request),
            }
            for metric in comparison.requests
        },
        "steps": [
            {
                **fields_of(step, "name", "num_steps", "unmatched_fraction"),
                "operators": [
                    {**fields_of(row, "name", "measured_s", "simulated_s"), "error": _known(row.error)}
                    for row in step.operators
                ],
            }
            for step in comparison.steps
        ],
        "notes": list(comparison.notes),
    }


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _operator_figure(step: StepComparison) -> Figures:
    rows = [row for row in step.operators if row.measured_s and row.simulated_s and row.name != SUM]
    points = Series(
        "operators",
        [row.measured_s or 0.0 for row in rows],
        [row.simulated_s or 0.0 for row in rows],
        tooltips=[f"{row.name}: {_signed(row.error)}" for row in rows],
    )
    return Figures([(_equality([points]), "Operators of one step; on the line both agree.")])


def _request_figures(comparison: Comparison) -> list[tuple[str, str]]:
    points = [Series("", metric.measured.tolist(), metric.simulated.tolist()) for metric in comparison.requests]
    names = [metric.name.removesuffix("_s").upper() for metric in comparison.requests]
    return [(_equality([series]), f"{name} of every request") for series, name in zip(points, names, strict=True)]


_equality = partial(equality_figure, x="measured (s)", y="simulated (s)", width=420, height=400)
