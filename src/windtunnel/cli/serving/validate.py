"""`windtunnel validate`: predict measured runs, and show the errors."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from windtunnel.cli.options import PATH, Verb, launched, options_in, options_of
from windtunnel.cli.output import answer, remark, write_page
from windtunnel.cli.progress import counted
from windtunnel.cli.serving.measured_runs import RunChoice
from windtunnel.errors import InputError, check_known
from windtunnel.units import format_count

HELD_OUT = ("tp",)


class StepOptions(NamedTuple):
    """Options of recorded steps."""

    file: Path | None
    holdout: str | None
    from_command: str | None


class ValidationOptions(NamedTuple):
    """Options of `windtunnel validate`."""

    runs: RunChoice
    steps: StepOptions
    processes: int | None
    html: Path | None
    as_json: bool
    max_error: str | None


@click.command(cls=Verb)
@click.argument("runs", nargs=-1, type=PATH, metavar="RUNS...")
@options_of(ValidationOptions)
@options_in("deployment")
def command(options: ValidationOptions, runs: tuple[Path, ...], calibration: str | None, **deployment: Any) -> None:
    """Predict measured runs and show how far off the predictions are.

    RUNS are CSV or Parquet tables (a run a row), or result files of a benchmark client: vLLM's and SGLang's bench
    serving, AIPerf, GenAI-Perf, guidellm. A client's file does not say what served it: give --model, --device, ...
    Or give --steps, what an engine recorded of every forward pass.

    \b
    windtunnel validate runs.csv --html report.html --max-error tpot=10%,ttft=25%
    windtunnel validate vllm-result.json --model llama-3.1-8b --device h100_sxm --tp 1
    windtunnel validate --steps steps.jsonl --from-command "vllm serve qwen3-32b" --device b300_sxm
    """
    if options.steps.file is not None:
        _validate_steps(options, runs, {**deployment, "calibration": calibration})
        return
    from windtunnel.calibration.measured_runs import METRICS
    from windtunnel.calibration.odd_runs import with_odd_runs
    from windtunnel.calibration.validate import predict_runs
    from windtunnel.report.calibration import validation
    from windtunnel.serving.calibration import NONE, load_calibration

    for name in ("holdout", "from_command"):
        if getattr(options.steps, name) is not None:
            raise InputError(f"--{name.replace('_', '-')} is for recorded steps", "name their table with --steps")
    limits = error_limits(options.max_error, METRICS)
    if options.processes is not None and options.processes < 1:
        raise InputError(f"--processes is {options.processes}; at least 1 is needed")
    if calibration not in (None, NONE):
        load_calibration(calibration)
    measurements, left_out = options.runs.measurements(runs, deployment)
    with counted("predicting", "runs") as progress:
        predictions = with_odd_runs(predict_runs(measurements, calibration, options.processes or 1, progress))
    if not limits and all(prediction.refused for prediction in predictions):
        reasons = "; ".join(f"{why} ({count:,})" for why, count in validation.refusals(predictions).items())
        hint = "docs/guides/validate-and-calibrate.md lists the columns of a table"
        raise InputError(f"no run could be predicted: {reasons}", hint)
    source = ", ".join(path.name for path in runs)
    write_page(options.html, validation.validation_report, predictions, left_out, source)
    answer(options.as_json, validation.validation_document, validation.validation_report, predictions, left_out)
    _exit(exceeded(predictions, limits))


def _exit(failures: list[str]) -> None:
    """Name the errors above their limits, and exit with 1 where there are any."""
    for line in failures:
        remark(line)
    if failures:
        click.get_current_context().exit(1)


def _validate_steps(options: ValidationOptions, runs: tuple[Path, ...], deployment: dict[str, Any]) -> None:
    """Predict recorded steps."""
    from windtunnel.calibration.steps.price import KINDS
    from windtunnel.calibration.steps.runs import read_step_runs
    from windtunnel.calibration.steps.validate import scores_by_kind, validate_steps
    from windtunnel.report.calibration.steps import steps_document, steps_report

    assert options.steps.file is not None
    if runs:
        raise InputError(f"RUNS and --steps exclude each other: {runs[0]} is given as well", "validate one of them")
    for name, value in (("--use", options.runs.use), ("--processes", options.processes)):
        if value is not None:
            raise InputError(f"{name} is for measured runs, and --steps gives recorded steps", "leave it out")
    if options.steps.holdout is not None:
        check_known(options.steps.holdout, HELD_OUT, f"--holdout: {options.steps.holdout!r} cannot be held out")
    limits = error_limits(options.max_error, KINDS)
    base = launched(options.steps.from_command) or {}
    recorded = options.runs.with_id(read_step_runs(options.steps.file, base, deployment), lambda run: run.name)
    with counted("pricing", "runs") as progress:
        validation = validate_steps(recorded, options.steps.holdout is not None, progress)
    if not validation.priced:
        reasons = "; ".join(dict.fromkeys(run.refused for run in validation.refused))
        raise InputError(f"no run's steps could be priced: {reasons}")
    write_page(options.html, steps_report, validation)
    answer(options.as_json, steps_document, steps_report, validation)
    _exit(
        [
            f"{kind}: median error {scored.median:.1%} is above {limits[kind]:.1%} ({scored.num_runs:,} steps)"
            for kind, scored in scores_by_kind(validation.priced).items()
            if scored.median > limits.get(kind, float("inf"))
        ]
    )


def error_limits(text: str | None, metrics: Sequence[str]) -> dict[str, float]:
    """Parse `tpot=10%,ttft=0.25` as {"tpot": 0.1, "ttft": 0.25}; a limit without a name is for all of `metrics`.

    Raises:
        InputError: a metric that does not exist, or no number.
    """
    limits: dict[str, float] = {}
    for part in text.replace(",", " ").split() if text else []:
        name, separator, value = part.rpartition("=")
        if separator:
            check_known(name, metrics, f"--max-error: there is no metric {name!r}")
        try:
            limit = float(value.removesuffix("%")) / (100 if value.endswith("%") else 1)
        except ValueError:
            limit = -1.0
        if not 0 < limit < float("inf"):
            raise InputError(f"--max-error: {part!r} is no limit", f"for instance --max-error {metrics[0]}=10%")
        limits |= dict.fromkeys([name] if separator else metrics, limit)
    return limits


def exceeded(predictions: Any, limits: dict[str, float]) -> list[str]:
    """Return a line for every metric whose median error is above its limit, and one where nothing could be predicted.

    Runs whose share of accepted draft tokens was fitted are not judged, unless there are no others.
    """
    from windtunnel.metrics.accuracy import score
    from windtunnel.report.calibration.validation import predicted_runs

    lines = []
    if limits and all(prediction.refused for prediction in predictions):
        lines.append("no run could be predicted")
    predicted, drafting = predicted_runs(predictions)
    for name, limit in limits.items():
        errors = score([prediction.error(name) for prediction in predicted or drafting])
        if errors is not None and errors.median > limit:
            num_runs = format_count(errors.num_runs, "run")
            lines.append(f"{name}: median error {errors.median:.1%} is above {limit:.1%} ({num_runs})")
    return lines
