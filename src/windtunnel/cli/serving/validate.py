"""`windtunnel validate`: predict measured runs, and show the errors."""

from collections.abc import Sequence

import click

from windtunnel.calibration.measured_runs import METRICS
from windtunnel.calibration.steps.fit import scores_by_kind, validate_steps
from windtunnel.calibration.steps.price import KINDS
from windtunnel.calibration.steps.read import read_step_runs
from windtunnel.calibration.validate import RunPrediction, predict_runs, with_odd_runs
from windtunnel.cli.options import launched
from windtunnel.cli.output import answer, counted, remark
from windtunnel.cli.serving.measured_runs import measurements_of, with_id
from windtunnel.cli.verbs import Options
from windtunnel.errors import InputError, check_known
from windtunnel.metrics.accuracy import score
from windtunnel.metrics.limits import share_of
from windtunnel.report.calibration import validation
from windtunnel.report.calibration.steps import steps_document, steps_report
from windtunnel.serving.calibration import NONE, load_calibration
from windtunnel.units import format_count


def command(options: Options) -> None:
    """Predict measured runs or recorded steps, print their errors, and exit with 1 where a limit is exceeded."""
    failures = _validate_runs(options) if options.steps is None else _validate_steps(options)
    for line in failures:
        remark(line)
    if failures:
        click.get_current_context().exit(1)


def _validate_runs(options: Options) -> list[str]:
    """Predict measured runs; return the errors above their limits."""
    calibration = options.calibration
    limits = error_limits(options.max_error, METRICS)

    if calibration not in (None, NONE):
        load_calibration(calibration)
    launch = launched(options)
    given = options.of("deployment") | {"calibration": None}
    measurements, left_out = measurements_of(options, given, launch.raw)
    with counted("predicting", "runs") as progress:
        predictions = with_odd_runs(predict_runs(measurements, calibration, options.processes or 1, progress))
    if not limits and all(prediction.refused for prediction in predictions):
        reasons = "; ".join(f"{why} ({count:,})" for why, count in validation.refusals(predictions).items())
        hint = "docs/guides/validate-and-calibrate.md lists the columns of a table"
        raise InputError(f"no run could be predicted: {reasons}", hint)
    source = ", ".join(path.name for path in options.runs)
    shown = predictions, left_out, source
    document = validation.validation_document
    answer(options, lambda *_: document(*shown[:2]), validation.validation_report, *shown, launch=launch)
    return exceeded(predictions, limits)


def _validate_steps(options: Options) -> list[str]:
    """Predict recorded steps; return the errors above their limits."""
    limits = error_limits(options.max_error, KINDS)
    launch = launched(options)
    runs = read_step_runs(options.steps, launch.raw, options.of("deployment"))
    recorded = with_id(runs, options.only, lambda run: run.name)
    with counted("pricing", "runs") as progress:
        priced = validate_steps(recorded, progress)
    if not priced.priced:
        reasons = "; ".join(dict.fromkeys(run.refused for run in priced.refused))
        raise InputError(f"no run's steps could be priced: {reasons}")
    answer(options, steps_document, steps_report, priced, launch=launch)
    return [
        f"{kind}: median error {scored.median:.1%} is above {limits[kind]:.1%} ({scored.num_runs:,} steps)"
        for kind, scored in scores_by_kind(priced.priced).items()
        if scored.median > limits.get(kind, float("inf"))
    ]


def error_limits(text: str | None, metrics: Sequence[str]) -> dict[str, float]:
    """Parse `tpot=10%,ttft=0.25` as {"tpot": 0.1, "ttft": 0.25}; a limit without a name is for all of `metrics`.
    InputError for a metric that does not exist, or no number."""
    limits: dict[str, float] = {}
    for part in text.replace(",", " ").split() if text else []:
        name, separator, value = part.rpartition("=")
        if separator:
            check_known(name, metrics, f"--max-error: there is no metric {name!r}")
        limit = share_of(value)
        if not 0 < limit < float("inf"):
            raise InputError(f"--max-error: {part!r} is no limit", f"for instance --max-error {metrics[0]}=10%")
        limits |= dict.fromkeys([name] if separator else metrics, limit)
    return limits


def exceeded(predictions: Sequence[RunPrediction], limits: dict[str, float]) -> list[str]:
    """Return a line for every metric whose median error is above its limit, and one where nothing could be predicted.

    Runs whose share of accepted draft tokens was fitted are not judged, unless there are no others.
    """
    lines = []
    if limits and all(prediction.refused for prediction in predictions):
        lines.append("no run could be predicted")
    predicted, drafting = validation.predicted_runs(predictions)
    for name, limit in limits.items():
        errors = score([prediction.error(name) for prediction in predicted or drafting])
        if errors is not None and errors.median > limit:
            num_runs = format_count(errors.num_runs, "run")
            lines.append(f"{name}: median error {errors.median:.1%} is above {limit:.1%} ({num_runs})")
    return lines
