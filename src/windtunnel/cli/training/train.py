"""`windtunnel train`: a training job from a file and options, one step of it, its summary."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from windtunnel.cli.options import PATH, Verb, assignments, options_in, options_of
from windtunnel.cli.output import answer, remark, remark_left_out, remark_node, write_page
from windtunnel.units import format_count

if TYPE_CHECKING:
    from windtunnel.report.report import Report
    from windtunnel.training.job import TrainingJob
    from windtunnel.training.setup import TrainingSetup
    from windtunnel.training.step import TrainingResult


class StepOutput(NamedTuple):
    """Options that say what `windtunnel train` shows and writes."""

    search: bool
    explain: bool
    html: Path | None
    timeline: Path | None
    overwrite: bool


@click.command(cls=Verb, epilog="Options override the file.")
@click.argument("job", required=False, type=PATH, metavar="[JOB.yaml]")
@options_in("job")
@options_of(StepOutput)
@options_in("train", "hub", "json")
def command(
    output: StepOutput, job: Path | None, settings: tuple[str, ...], hub: bool, as_json: bool, **options: Any
) -> None:
    """Predict a training step: its time and what it is made of, memory, and what a whole run takes.

    \b
    windtunnel train --model llama-3.1-70b --device h100_sxm --num-devices 64 --tp 4 --pp 4 --cp 2 \\
        --vpp 5 --sequence-tokens 8192 --global-batch 128
    windtunnel train job.yaml --set overlap.tensor_parallel=true --timeline step.json
    windtunnel train job.yaml --search
    """
    from windtunnel.formats.timeline.file import check_file
    from windtunnel.serving.shorthand import JOB_PATHS
    from windtunnel.training.job import load
    from windtunnel.training.setup import resolve

    given = {JOB_PATHS[name]: value for name, value in options.items() if value is not None}
    described = load(job, given | assignments(settings))
    if output.search:
        _search(described, as_json)
        return
    setup = resolve(described, allow_download=hub)
    remark_left_out(setup.model)
    if output.timeline is not None:
        check_file(output.timeline, output.overwrite)
    _predict(setup, output, as_json)


def _predict(setup: "TrainingSetup", output: StepOutput, as_json: bool) -> None:
    """Simulate a step, write its files and print it. Loads the engine, which takes most of a second."""
    from windtunnel.report.training import training_document, training_report
    from windtunnel.training.campaign import campaign
    from windtunnel.training.costs import explain_tasks
    from windtunnel.training.fitting_changes import fitting_changes
    from windtunnel.training.layers.rank import Rank
    from windtunnel.training.step import simulate_with, training_prices

    remark_node(setup.device.name, setup.job.node)
    prices = training_prices(setup)
    result = simulate_with(setup, prices)
    tasks = explain_tasks(Rank(setup), prices) if output.explain else []
    run = campaign(result)
    if output.timeline is not None:
        _write_timeline(result, output.timeline)

    def report() -> "Report":
        return training_report(result, run, [] if result.fits else fitting_changes(result, prices), tasks)

    write_page(output.html, report)
    answer(as_json, lambda: training_document(result, run, tasks), report)


def _search(job: "TrainingJob", as_json: bool) -> None:
    """Print the best layouts of a job, as `windtunnel search` with `vary: {layouts: all}` and no store."""
    from windtunnel.cli.serving.search import show_study
    from windtunnel.schema import encode
    from windtunnel.search.executors import HERE
    from windtunnel.search.space.space import ALL, LAYOUTS, space_from
    from windtunnel.search.store import Store

    space = space_from({**encode(job), "vary": {LAYOUTS: ALL}})
    show_study(space, Store(None, lambda text: remark(f"warning: {text}")), HERE, 10, as_json)


def _write_timeline(result: "TrainingResult", file: Path) -> None:
    from windtunnel.formats.timeline.training import write_step_timeline
    from windtunnel.report.version import version

    about: dict[str, str | float] = {
        "producer": f"windtunnel {version()}",
        "model": result.setup.model.name,
        "device": result.setup.device.name,
        "schedule": str(result.setup.job.schedule),
        "step_s": result.step_s,
    }
    line = result.timeline
    num_events = write_step_timeline(file, line.schedule, line.starts, line.ends, line.communicated, about)
    remark(f"wrote {file}: {format_count(num_events, 'event')}")
