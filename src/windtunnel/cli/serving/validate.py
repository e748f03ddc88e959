"""`windtunnel validate`: predict measured runs, and show the errors."""

from pathlib import Path
from typing import Any, NamedTuple

import click

from windtunnel.cli.options import PATH, WRITTEN_FILE, HelpSection, Verb, deployment_options, options_of
from windtunnel.cli.output import answer, remark, write_page
from windtunnel.cli.progress import counted
from windtunnel.cli.serving.measured_runs import RUNS, RunChoice
from windtunnel.errors import InputError, check_known
from windtunnel.units import format_count

_OUTPUT = HelpSection("Output")


class ValidationOptions(NamedTuple):
    """Options of `windtunnel validate`."""

    runs: RunChoice = RunChoice()
    processes: int | None = RUNS("--processes", help="Processes to simulate in.  [1]")
    html: Path | None = _OUTPUT("--html", type=WRITTEN_FILE, help="Write a page.")
    as_json: bool = _OUTPUT("--json", help="Print JSON.")
    max_error: str | None = _OUTPUT(
        "--max-error",
        metavar="LIMITS",
        help="Exit with 1 where a median error is above: tpot=10%,ttft=25%, or one limit for all.",
    )


@click.command(cls=Verb)
@click.argument("runs", nargs=-1, type=PATH, metavar="RUNS...")
@options_of(ValidationOptions)
@deployment_options
def command(options: ValidationOptions, runs: tuple[Path, ...], calibration: str | None, **deployment: Any) -> None:
    """Predict measured runs and show how far off the predictions are.

    RUNS are CSV or Parquet tables (a run a row), or result files of a benchmark client: vLLM's and SGLang's bench
    serving, AIPerf, GenAI-Perf, guidellm. A client's file does not say what served it: give --model, --device, ...

    \b
    windtunnel validate runs.csv --html report.html --max-error tpot=10%,ttft=25%
    windtunnel validate vllm-result.json --model llama-3.1-8b --device h100_sxm --tp 1
    """
    from windtunnel.calibration.odd_runs import with_odd_runs
    from windtunnel.calibration.validate import predict_runs
    from windtunnel.report.calibration import validation
    from windtunnel.serving.calibration import NONE, load_calibration

    limits = error_limits(options.max_error)
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
    failures = exceeded(predictions, limits)
    for line in failures:
        remark(line)
    if failures:
        click.get_current_context().exit(1)


def error_limits(text: str | None) -> dict[str, float]:
    """Parse `tpot=10%,ttft=0.25` as {"tpot": 0.1, "ttft": 0.25}; a limit without a name is for every metric.

    Raises:
        InputError: a metric that does not exist, or no number.
    """
    from windtunnel.calibration.measured_runs import METRICS

    limits: dict[str, float] = {}
    for part in text.replace(",", " ").split() if text else []:
        name, separator, value = part.rpartition("=")
        if separator:
            check_known(name, METRICS, f"--max-error: there is no metric {name!r}")
        try:
            limit = float(value.removesuffix("%")) / (100 if value.endswith("%") else 1)
        except ValueError:
            limit = -1.0
        if not 0 < limit < float("inf"):
            raise InputError(f"--max-error: {part!r} is no limit", "for instance --max-error tpot=10%,ttft=25%")
        limits |= dict.fromkeys([name] if separator else METRICS, limit)
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
