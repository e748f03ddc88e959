"""`windtunnel train`: a training job from a file and options, one step of it, its summary."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from windtunnel.cli.options import WRITTEN_FILE, Verb, all_of, option
from windtunnel.units import format_count

if TYPE_CHECKING:
    from windtunnel.training.job import TrainingJob
    from windtunnel.training.step import TrainingResult

_WHAT, _SPLIT, _OUTPUT = "What is trained, on what", "How it is split", "Result"

job_options = all_of(
    option("--model", section=_WHAT, metavar="NAME", help="A model of the catalog, or a config.json."),
    option("--device", section=_WHAT, metavar="NAME", help="A device of the catalog, or a YAML file."),
    option("--node", section=_WHAT, metavar="NAME", help="A node of the catalog.  [the device's usual one]"),
    option("--num-devices", section=_WHAT, type=int, metavar="N", help="Devices in all.  [tp x cp x pp]"),
    option("--sequence-tokens", section=_WHAT, type=int, metavar="N", help="Tokens of a sequence.  [needed]"),
    option("--global-batch", section=_WHAT, type=int, metavar="N", help="Sequences of one step.  [needed]"),
    option("--micro-batch", section=_WHAT, type=int, metavar="N", help="Sequences that a rank computes at once.  [1]"),
    option(
        "--precision",
        section=_WHAT,
        metavar="FORMAT",
        help="bf16, fp8, fp8_current, mxfp8, nvfp4, ...  [bf16]",
    ),
    option("--topology", section=_WHAT, metavar="NAME", help="Between nodes: a file, a type, or a node's rails."),
    option("--backend", section=_WHAT, metavar="NAME", help="Collectives between nodes: analytic, flow or packet."),
    option("--total-tokens", section=_WHAT, type=float, metavar="X", help="Tokens of the whole run, as 15e12."),
    option("--framework", section=_SPLIT, metavar="NAME", help="megatron, deepspeed, fsdp2 or deepseek.  [megatron]"),
    option("--tp", "-tp", section=_SPLIT, type=int, metavar="N", help="Tensor parallelism.  [1]"),
    option("--cp", "-cp", section=_SPLIT, type=int, metavar="N", help="Context parallelism.  [1]"),
    option("--pp", "-pp", section=_SPLIT, type=int, metavar="N", help="Pipeline stages.  [1]"),
    option("--vpp", "-vpp", section=_SPLIT, type=int, metavar="N", help="Chunks of layers on each device.  [1]"),
    option("--ep", "-ep", section=_SPLIT, type=int, metavar="N", help="Expert parallelism.  [1]"),
    option("--zero", section=_SPLIT, type=int, metavar="0-3", help="ZeRO stage; 3 is FSDP.  [the framework's]"),
    option(
        "--schedule",
        section=_SPLIT,
        metavar="NAME",
        help="1f1b, interleaved, zb_h1, dualpipe, ...  [1f1b; interleaved with --vpp]",
    ),
    option("--recompute", section=_SPLIT, metavar="HOW", help="none, selective or full.  [none]"),
    option("--search", section=_OUTPUT, is_flag=True, help="Try every layout of the devices; show the fastest."),
    option("--explain", section=_OUTPUT, is_flag=True, help="Show one micro-batch task by task too."),
    option("--html", section=_OUTPUT, type=WRITTEN_FILE, metavar="FILE", help="Write a page."),
    option(
        "--timeline",
        section=_OUTPUT,
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Write the step's pipeline for ui.perfetto.dev: .json or .json.gz.",
    ),
    option("--overwrite", section=_OUTPUT, is_flag=True, help="Replace that file."),
    option(
        "--set",
        "settings",
        section="General",
        multiple=True,
        metavar="PATH=VALUE",
        help="Set any field of the job, as overlap.tensor_parallel=true. May be repeated.",
    ),
    option("--hub", section="General", is_flag=True, help="Look unknown models up on huggingface.co."),
    option("--json", "as_json", section="General", is_flag=True, help="Print JSON."),
)


@click.command(cls=Verb, epilog="Options override the file.")
@click.argument("job", required=False, type=click.Path(path_type=Path), metavar="[JOB.yaml]")
@job_options
def command(
    job: Path | None,
    search: bool,
    explain: bool,
    html: Path | None,
    timeline: Path | None,
    overwrite: bool,
    settings: tuple[str, ...],
    hub: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Predict a training step: its time and what it is made of, memory, and what a whole run takes.

    \b
    windtunnel train --model llama-3.1-70b --device h100_sxm --num-devices 64 --tp 4 --pp 4 --cp 2 \\
        --vpp 5 --sequence-tokens 8192 --global-batch 128
    windtunnel train job.yaml --set overlap.tensor_parallel=true --timeline step.json
    windtunnel train job.yaml --search
    """
    from windtunnel.cli.options import assignments
    from windtunnel.formats.timeline.file import check_file
    from windtunnel.serving.shorthand import JOB_PATHS
    from windtunnel.training.job import job_of
    from windtunnel.training.setup import resolve

    given = {JOB_PATHS[name]: value for name, value in options.items() if value is not None}
    asked = job_of(job, given | assignments(settings))
    if search:
        _search(asked, as_json)
        return
    setup = resolve(asked, allow_download=hub)
    if timeline is not None:
        check_file(timeline, overwrite)

    # Loading the engine takes most of a second; wrong input is answered before.
    from windtunnel.files import write_text
    from windtunnel.report.documents import as_text
    from windtunnel.report.render.tables import show
    from windtunnel.report.training.document import training_document
    from windtunnel.report.training.page import training_page
    from windtunnel.report.training.step import tasks_report, training_report
    from windtunnel.training.campaign import campaign
    from windtunnel.training.costs import explain_tasks
    from windtunnel.training.fitting_changes import fitting_changes
    from windtunnel.training.layers.rank import Rank
    from windtunnel.training.step import simulate_with, training_prices

    prices = training_prices(setup)
    result = simulate_with(setup, prices)
    tasks = explain_tasks(Rank(setup), prices) if explain else []
    run = campaign(result)
    if timeline is not None:
        _write_timeline(result, timeline)
    if html is not None:
        write_text(html, training_page(result, run))
        click.echo(f"wrote {html}", err=True)
    if as_json:
        click.echo(as_text(training_document(result, run, tasks)))
        return
    changes = [] if result.fits else fitting_changes(result, prices)
    show(*training_report(result, run, changes), *tasks_report(tasks))


def _search(job: "TrainingJob", as_json: bool) -> None:
    """Print the best layouts of a job: `windtunnel search` with `vary: {layouts: all}`, and nothing kept."""
    from windtunnel.cli.serving.search import show_study
    from windtunnel.schema import encode
    from windtunnel.search.space.space import ALL, LAYOUTS, space_from
    from windtunnel.search.store import Store
    from windtunnel.search.study import HERE

    space = space_from({**encode(job), "vary": {LAYOUTS: ALL}})
    show_study(space, Store(None, lambda text: click.echo(f"warning: {text}", err=True)), HERE, 10, as_json)


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
    click.echo(f"wrote {file}: {format_count(num_events, 'event')}", err=True)
