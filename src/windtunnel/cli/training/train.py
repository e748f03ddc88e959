"""`windtunnel train`: a training job from a file and options, one step of it, its summary."""

from pathlib import Path
from typing import TYPE_CHECKING

from windtunnel.cli.options import assignments
from windtunnel.cli.output import answer, remark, remark_left_out, remark_node
from windtunnel.cli.verbs import Options
from windtunnel.files import check_replaceable
from windtunnel.formats.job_files import JobRead, read_job_file
from windtunnel.formats.timeline.file import SUFFIXES
from windtunnel.formats.timeline.write import write_step_timeline
from windtunnel.report.render.json import version
from windtunnel.report.report import Report
from windtunnel.schema import encode
from windtunnel.serving.shorthand import JOB_PATHS
from windtunnel.training.job import TrainingJob, load
from windtunnel.training.setup import TrainingSetup, resolve
from windtunnel.units import format_count

if TYPE_CHECKING:
    from windtunnel.training.step import TrainingResult


def command(options: Options) -> None:
    """Predict a training step, or search the layouts of a job."""
    given = {JOB_PATHS[name]: value for name, value in options.given("job").items()} | assignments(options.settings)
    read = JobRead(load(None, given)) if options.job is None else read_job_file(Path(options.job), given)
    if options.search:
        _search(read, options)
        return
    setup = resolve(read.job, allow_download=options.hub)
    remark_left_out(setup.model)
    check_replaceable(options.timeline, options.overwrite, *SUFFIXES)
    _predict(setup, options, read)


def _predict(setup: TrainingSetup, options: Options, read: JobRead) -> None:
    """Simulate a step, write its files and print it. Loads the engine, which takes most of a second."""
    from windtunnel.report.training import training_document, training_report
    from windtunnel.training.campaign import campaign
    from windtunnel.training.costs import explain_tasks
    from windtunnel.training.fitting_changes import fitting_changes
    from windtunnel.training.layers.rank import Rank
    from windtunnel.training.step import simulate_with, training_prices

    remark_node(setup.device, setup.job.node)
    prices = training_prices(setup)
    result = simulate_with(setup, prices)
    tasks = explain_tasks(Rank(setup), prices) if options.explain else []
    run = campaign(result)
    if options.timeline is not None:
        _write_timeline(result, options)

    def report() -> Report:
        return training_report(result, run, [] if result.fits else fitting_changes(result, prices), tasks)

    answer(options, lambda: training_document(result, run, tasks), report, launch=read)


def _search(read: JobRead, options: Options) -> None:
    """Print the best layouts of a job, as `windtunnel search` with `vary: {layouts: all}` and no store.

    The best one is said in the words of the job's file, where its format has them.
    """
    from windtunnel.cli.serving.search import show_study
    from windtunnel.search.executors import usual_means
    from windtunnel.search.space.space import ALL, LAYOUTS, VARIED, space_from
    from windtunnel.search.store import Store

    # What is typed beside --search is meant: the layout varies in everything else.
    typed = options.given("job")
    space = space_from(
        {**encode(read.job), "vary": {LAYOUTS: ALL} | {name: [typed[name]] for name in typed if name in VARIED}}
    )
    for text in read.remarks:
        remark(text)
    evidence = show_study(options, space, Store(None, lambda text: remark(f"warning: {text}")), usual_means(space))
    best = evidence.winner(0)
    if read.kind is not None and read.kind.changed is not None and isinstance(best, TrainingJob):
        changed, dropped = read.kind.changed(resolve(read.job), resolve(best))
        without = f"; without {', '.join(dropped)}" if dropped else ""
        remark(f"change in {options.job}: {', '.join(changed) or 'nothing'}{without}")


def _write_timeline(result: "TrainingResult", options: Options) -> None:
    about: dict[str, str | float] = {
        "producer": f"windtunnel {version()}",
        "model": result.setup.model.name,
        "device": result.setup.device.name,
        "schedule": str(result.setup.job.schedule),
        "step_s": result.step_s,
    }
    line = result.timeline
    ends = line.closes_s, result.closing_s
    num_events = write_step_timeline(options.timeline, line.schedule, line.starts, line.ends, *ends, about)
    remark(f"wrote {options.timeline}: {format_count(num_events, 'event')}")
