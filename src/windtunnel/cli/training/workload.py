"""`windtunnel workload`: read any workload or trace, say what it holds, write a job in another simulator's format."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from windtunnel.cli.options import PATH, Verb, assignments, options_in
from windtunnel.cli.output import answer, check_replaceable, remark
from windtunnel.errors import InputError

if TYPE_CHECKING:
    from windtunnel.formats.aicb.write import GeneratedFile
    from windtunnel.training.job import TrainingJob
    from windtunnel.training.setup import TrainingSetup

MAX_TRACES = 1024
"""Most trace files that are written without `--ranks`."""


@click.command(cls=Verb)
@click.argument("file", type=PATH)
@options_in("workload", "json")
def command(file: Path, target: str | None, compat: str | None, out: str | None, **options: Any) -> None:
    """Read a training job, workload or trace, and write jobs for other simulators.

    FILE is a training job (YAML), a Megatron-LM command, script or log, an AICB command, a SimAI workload (.txt), an
    AICB list (.csv), AIOB times, a Chakra trace (.et), a Kineto or a PyTorch execution trace; also gzipped.

    \b
    windtunnel workload trace.json
    windtunnel workload pretrain_gpt.sh --device h100_sxm --write job --out job.yaml
    windtunnel workload job.yaml --write simai --out workload.txt
    windtunnel workload aicb_command.txt --compat aicb --out results/
    """
    from windtunnel.files import read_text
    from windtunnel.formats.aicb.contents import COMMAND, file_of_job
    from windtunnel.formats.aicb.read import read_command
    from windtunnel.formats.aicb.write import generate
    from windtunnel.formats.job_files import JobLaunch, job_contents
    from windtunnel.formats.recognise import find_format
    from windtunnel.training.setup import resolve

    kind = find_format(file, "workload or trace", "training job")
    _refuse_idle(kind.use == "training job", target, compat, out=out, **options)
    if kind.use != "training job":
        if target or compat:
            raise InputError(f"{file} is a {kind.name}; only jobs and their arguments are written in other formats")
        _show(kind.read(file), options["as_json"])
        return
    launch = JobLaunch(options["device"], options["num_devices"], assignments(options["settings"]))
    if compat is not None and kind.name == COMMAND:
        _deliver(generate(read_command(read_text(file)), options["times"]), out, options["overwrite"])
        return
    job, unread = kind.read(file, launch)
    if compat is not None:
        _deliver(file_of_job(job, target, options["times"]), out, options["overwrite"])
        return
    if unread:
        more = f" and {len(unread) - 8} more" if len(unread) > 8 else ""
        remark(f"without effect on a prediction, or not read: {', '.join(unread[:8])}{more}")
    if target is None:
        _show(job_contents(resolve(job), options["stage"]), options["as_json"])
    else:
        _write(job, target, Path(out) if out else None, **options)


def _refuse_idle(is_job: bool, target: str | None, compat: str | None, **options: Any) -> None:
    """Raise InputError for an option that is given and does nothing beside the others."""
    is_written = bool(target or compat)
    job, rank = "is for training jobs", "is for what is shown, and for --write simai or aicb"
    idle = {
        "--device": ("device", not is_job, job),
        "--num-devices": ("num_devices", not is_job, job),
        "--set": ("settings", not is_job, job),
        "--stage": ("stage", not is_job or target in ("job", "chakra"), rank if is_job else job),
        "--times": ("times", compat is None, "goes with --compat"),
        "--ranks": ("ranks", target != "chakra" or compat is not None, "goes with --write chakra"),
        "--out": ("out", is_job and not is_written, "goes with --write"),
        "--overwrite": ("overwrite", options["out"] is None, "goes with --out"),
        "--json": ("as_json", is_written, "shows a file, and --write and --compat do not show it"),
    }
    for flag, (name, is_idle, why) in idle.items():
        if options[name] and is_idle:
            raise InputError(f"{flag} {why}", "leave it out")


def _write(
    job: "TrainingJob", target: str, out: Path | None, stage: int, overwrite: bool, ranks: str | None, **_: Any
) -> None:
    from windtunnel.training.setup import resolve

    if target == "job":
        import yaml

        from windtunnel.schema import encode

        _put(yaml.safe_dump(encode(job), sort_keys=False, width=120), out, overwrite)
        return
    setup = resolve(job)
    if target == "aicb":
        from windtunnel.formats.aicb.csv_records import records_text
        from windtunnel.formats.aicb.training import training_records

        _put(records_text([training_records(setup, stage)]), out, overwrite)
        return
    seconds = _prices(setup)
    if target == "simai":
        from windtunnel.formats.simai.training import left_out, training_workload
        from windtunnel.formats.simai.write import workload_text

        _put(workload_text(training_workload(setup, seconds, stage)), out, overwrite)
        for what in left_out(setup):
            remark(f"note: SimAI has no group for {what}; it is left out")
        return
    if out is None:
        raise InputError("Chakra traces are one file a rank", "name their beginning: --out traces/job")
    from windtunnel.formats.chakra.training import write_training_traces

    if not overwrite and out.with_name(f"{out.name}.groups.json").exists():
        raise InputError(f"{out}.groups.json is there already", "replace the traces with --overwrite")
    chosen = _chosen(ranks, setup.degrees.num_devices)
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


def _prices(setup: "TrainingSetup") -> Any:
    """Return the function that prices a task in seconds, as `windtunnel train` does."""
    from windtunnel.training.pricing import pricer
    from windtunnel.training.step import training_estimator

    prices = pricer(training_estimator(setup), setup.device, setup.node)
    return lambda task: prices.task(task).seconds


def _deliver(made: "GeneratedFile", out: str | None, overwrite: bool) -> None:
    for text in made.remarks:
        remark(f"note: {text}")
    path = Path(out) if out else None
    if path is not None and (path.is_dir() or str(out).endswith("/")):
        path /= made.name
    _put(made.text, path, overwrite)


def _put(text: str, out: Path | None, overwrite: bool) -> None:
    """Write `text` to a file, all or nothing, or to stdout."""
    from windtunnel.files import write_text

    if out is None:
        click.echo(text, nl=False)
        return
    check_replaceable(out, overwrite)
    write_text(out, text)
    remark(f"wrote {out}")


def _show(contents: Any, as_json: bool) -> None:
    from windtunnel.report.workload import contents_document, contents_report

    answer(as_json, contents_document, contents_report, contents)
