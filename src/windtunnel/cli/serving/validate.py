"""`windtunnel validate`: measured runs in, predictions beside them out."""

from pathlib import Path
from typing import Any

import click

from windtunnel.cli.options import WRITTEN_FILE, Verb, all_of, deployment_options, option
from windtunnel.cli.progress import counted
from windtunnel.cli.serving.measured_runs import chosen_measurements
from windtunnel.errors import InputError
from windtunnel.units import format_count

_RUNS, _OUTPUT = "Runs", "Output"

validation_options = all_of(
    option("--use", section=_RUNS, metavar="NAMES", help="Only runs of these uses.  [primary,secondary]"),
    option("--only", section=_RUNS, metavar="TEXT", help="Only runs whose id contains it."),
    option("--processes", section=_RUNS, type=int, metavar="N", help="Processes to simulate in.  [1]"),
    option("--html", section=_OUTPUT, type=WRITTEN_FILE, metavar="FILE", help="Write a page."),
    option("--json", "as_json", section=_OUTPUT, is_flag=True, help="Print JSON."),
    option(
        "--max-error",
        section=_OUTPUT,
        metavar="LIMITS",
        help="Exit with 1 where a median error is above: tpot=10%,ttft=25%, or one limit for all.",
    ),
)


@click.command(cls=Verb)
@click.argument("runs", nargs=-1, type=click.Path(path_type=Path), metavar="RUNS...")
@validation_options
@deployment_options
def command(
    runs: tuple[Path, ...],
    use: str | None,
    only: str | None,
    calibration: str | None,
    processes: int | None,
    html: Path | None,
    as_json: bool,
    max_error: str | None,
    **options: Any,
) -> None:
    """Predict measured runs and show how far off the predictions are.

    RUNS are CSV or Parquet tables (a run a row), or result files of a benchmark client: vLLM's and SGLang's bench
    serving, AIPerf, GenAI-Perf, guidellm. A client's file does not say what served it: give --model, --device, ...

    \b
    windtunnel validate runs.csv --html report.html --max-error tpot=10%,ttft=25%
    windtunnel validate vllm-result.json --model llama-3.1-8b --device h100_sxm --tp 1
    """
    from windtunnel.calibration.validate import predict_runs
    from windtunnel.files import write_text
    from windtunnel.report.calibration.validation import (
        refusals,
        validation_document,
        validation_page,
        validation_report,
    )
    from windtunnel.report.documents import as_text
    from windtunnel.report.render.tables import show
    from windtunnel.serving.calibration import NONE, load_calibration

    limits = error_limits(max_error)
    if processes is not None and processes < 1:
        raise InputError(f"--processes is {processes}; at least 1 is needed")
    if calibration not in (None, NONE):
        load_calibration(calibration)
    found, left_out = chosen_measurements(runs, options, use, only)
    with counted("predicting", "runs") as progress:
        predictions = predict_runs(found, calibration, processes or 1, progress)
    if not limits and all(one.refused for one in predictions):
        raise _none_predicted(refusals(predictions))
    if html is not None:
        write_text(html, validation_page(predictions, ", ".join(path.name for path in runs), left_out))
    if as_json:
        click.echo(as_text(validation_document(predictions, left_out)))
    else:
        show(*validation_report(predictions, left_out=left_out))
    above = exceeded(predictions, limits)
    for line in above:
        click.echo(line, err=True)
    if above:
        click.get_current_context().exit(1)


def _none_predicted(reasons: dict[str, int]) -> InputError:
    """All reasons, the most frequent first."""
    return InputError(
        f"no run could be predicted: {'; '.join(f'{why} ({count:,})' for why, count in reasons.items())}",
        "what a table holds is said in docs/guides/validate-and-calibrate.md",
    )


def error_limits(text: str | None) -> dict[str, float]:
    """`tpot=10%,ttft=0.25` as {"tpot": 0.1, "ttft": 0.25}; a limit without a name is of every metric.

    Raises:
        InputError: a metric that does not exist, or no number.
    """
    from windtunnel.calibration.measured_runs import METRICS
    from windtunnel.errors import did_you_mean

    limits: dict[str, float] = {}
    for part in text.replace(",", " ").split() if text else []:
        name, separator, value = part.rpartition("=")
        if separator and name not in METRICS:
            hint = did_you_mean(name, METRICS, f"known: {', '.join(METRICS)}")
            raise InputError(f"--max-error: there is no metric {name!r}", hint)
        try:
            limit = float(value.removesuffix("%")) / (100 if value.endswith("%") else 1)
        except ValueError:
            limit = -1.0
        if not 0 < limit < float("inf"):
            raise InputError(f"--max-error: {part!r} is no limit", "for instance --max-error tpot=10%,ttft=25%")
        limits |= dict.fromkeys([name] if separator else METRICS, limit)
    return limits


def exceeded(predictions: Any, limits: dict[str, float]) -> list[str]:
    """A line for every metric whose median error is above its limit, and one where nothing could be predicted.

    Runs whose share of accepted draft tokens was fitted are not judged, unless there are no others.
    """
    from windtunnel.metrics.accuracy import score
    from windtunnel.report.calibration.validation import predicted_runs

    lines = []
    if limits and all(one.refused for one in predictions):
        lines.append("no run could be predicted")
    done, drafting = predicted_runs(predictions)
    for name, limit in limits.items():
        found = score([one.error(name) for one in done or drafting])
        if found is not None and found.median > limit:
            lines.append(
                f"{name}: median error {found.median:.1%} is above {limit:.1%} ({format_count(found.num_runs, 'run')})"
            )
    return lines
