"""`windtunnel workload`: read any workload or trace, say what it holds, write a job in another simulator's format."""

from pathlib import Path

import click
import yaml

from windtunnel.cli.options import assignments
from windtunnel.cli.output import answer, remark
from windtunnel.cli.verbs import Options
from windtunnel.errors import InputError
from windtunnel.files import check_replaceable, read_text, write_text
from windtunnel.formats.aicb import COMMAND
from windtunnel.formats.aicb.arguments import read_command
from windtunnel.formats.aicb.csv_records import records_text
from windtunnel.formats.aicb.job import training_records
from windtunnel.formats.aicb.write import generate
from windtunnel.formats.chakra.training import write_training_traces
from windtunnel.formats.job_files import JobLaunch, job_contents, read_any_job
from windtunnel.formats.recognise import find_format
from windtunnel.formats.simai.training import left_out, training_workload
from windtunnel.formats.simai.workload import workload_text
from windtunnel.report.workload import contents_document, contents_report
from windtunnel.schema import encode
from windtunnel.training.job import TrainingJob
from windtunnel.training.setup import resolve

MAX_TRACES = 1024
"""Most trace files that are written without `--ranks`."""


def command(options: Options) -> None:
    """Show what a file holds, or write the job that it describes in another format."""
    file, target, compat = options.file, options.target, options.compat
    kind = find_format(file, "workload or trace", "training job")
    _refuse_idle(kind.use == "training job", options)
    if kind.use != "training job":
        if target or compat:
            raise InputError(f"{file} is a {kind.name}; only jobs and their arguments are written in other formats")
        answer(options, contents_document, contents_report, kind.read(file))
        return
    launch = JobLaunch(options.device, options.num_devices, assignments(options.settings))
    if compat is not None:
        if kind.name != COMMAND:
            raise InputError(f"--compat aicb is for AICB's commands; {file} is a {kind.name}", "leave it out")
        made = generate(read_command(read_text(file)), options.times)
        for text in made.remarks:
            remark(f"note: {text}")
        path = Path(options.out) if options.out else None
        if path is not None and (path.is_dir() or options.out.endswith("/")):
            path /= made.name
        _put(made.text, path, options.overwrite)
        return
    read = read_any_job(kind, file, launch)
    if target is None:
        answer(options, contents_document, contents_report, job_contents(resolve(read.job), options.stage), launch=read)
        return
    for text in read.remarks:
        remark(text)
    _write(read.job, options)


def _refuse_idle(is_job: bool, options: Options) -> None:
    """Raise InputError for an option that is given and does nothing beside the others."""
    target, is_written = options.target, bool(options.target or options.compat)
    idle = (
        ("--device", options.device, not is_job, "is for training jobs"),
        ("--num-devices", options.num_devices, not is_job, "is for training jobs"),
        ("--set", options.settings, not is_job, "is for training jobs"),
        ("--stage", options.stage, not is_job, "is for training jobs"),
        ("--stage", options.stage, target in ("job", "chakra"), "is for what is shown, and for --write simai or aicb"),
        ("--ranks", options.ranks, target != "chakra" or options.compat, "goes with --write chakra"),
        ("--out", options.out, is_job and not is_written, "goes with --write"),
    )
    for flag, value, is_idle, why in idle:
        if value and is_idle:
            raise InputError(f"{flag} {why}", "leave it out")


def _write(job: TrainingJob, options: Options) -> None:
    target, stage, out = options.target, options.stage, Path(options.out) if options.out else None
    if target == "job":
        _put(yaml.safe_dump(encode(job), sort_keys=False, width=120), out, options.overwrite)
        return
    setup = resolve(job)
    if target == "aicb":
        _put(records_text([training_records(setup, stage)]), out, options.overwrite)
        return
    from windtunnel.training.pricing import pricer
    from windtunnel.training.step import training_estimator

    prices = pricer(training_estimator(setup), setup.device, setup.node)
    seconds = lambda task: prices.task(task).seconds  # noqa: E731
    if target == "simai":
        _put(workload_text(training_workload(setup, seconds, stage)), out, options.overwrite)
        for what in left_out(setup):
            remark(f"note: SimAI has no group for {what}; it is left out")
        return
    if out is None:
        raise InputError("Chakra traces are one file a rank", "name their beginning: --out traces/job")
    check_replaceable(out.with_name(f"{out.name}.groups.json"), options.overwrite)
    chosen = _chosen(options.ranks, setup.degrees.num_devices)
    written = write_training_traces(setup, seconds, out, chosen)
    remark(f"wrote {written[0]} and {len(written) - 2} more traces, {written[-1].name} with their groups")


def _chosen(ranks: str | None, num_ranks: int) -> range:
    """Read `0-7` as a range; without it, return all ranks, up to `MAX_TRACES`."""
    if ranks is None:
        if num_ranks > MAX_TRACES:
            raise InputError(
                f"the job has {num_ranks:,} ranks, and as many traces", "write some of them with --ranks, such as 0-63"
            )
        return range(num_ranks)
    first, dash, last = ranks.partition("-")
    if not first.isdecimal() or (dash and not last.isdecimal()) or int(last or first) < int(first):
        raise InputError(f"--ranks is {ranks!r}; it is one rank or two with a dash, such as 0-63")
    return range(int(first), int(last or first) + 1)


def _put(text: str, out: Path | None, overwrite: bool) -> None:
    """Write `text` to a file, all or nothing, or to stdout."""
    if out is None:
        click.echo(text, nl=False)
        return
    check_replaceable(out, overwrite)
    write_text(out, text)
    remark(f"wrote {out}")
