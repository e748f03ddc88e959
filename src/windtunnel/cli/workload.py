"""`windtunnel workload`: read any workload or trace, say what it holds, write a job in another simulator's format."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from windtunnel.cli.options import Verb, all_of, option
from windtunnel.errors import InputError

if TYPE_CHECKING:
    from windtunnel.interop.aicb import GeneratedFile
    from windtunnel.spec.training import TrainingJob, TrainingSetup

_READ, _WRITE = "What is read", "What is written"

workload_options = all_of(
    option("--device", section=_READ, metavar="NAME", help="What Megatron's or AICB's arguments run on."),
    option("--num-devices", section=_READ, type=int, metavar="N", help="Devices, where the arguments do not say."),
    option(
        "--stage", section=_READ, type=int, default=0, metavar="N", help="Pipeline device whose rank is shown.  [0]"
    ),
    option(
        "--set", "settings", section=_READ, multiple=True, metavar="PATH=VALUE", help="Set a field of a job's file."
    ),
    option(
        "--write",
        "target",
        section=_WRITE,
        type=click.Choice(["simai", "aicb", "chakra", "job"]),
        metavar="FORMAT",
        help="simai (a workload), aicb (a list), chakra (traces) or job (our own YAML).",
    ),
    option(
        "--compat",
        section=_WRITE,
        type=click.Choice(["aicb"]),
        metavar="aicb",
        help="Write AICB's own file, byte for byte, with its mistakes.",
    ),
    option("--times", section=_WRITE, type=click.Path(path_type=Path), metavar="FILE", help="AIOB times for --compat."),
    option(
        "--out",
        section=_WRITE,
        type=click.Path(path_type=Path),
        metavar="PATH",
        help="A file, a folder for AICB's own name, or the PREFIX of Chakra traces PREFIX.RANK.et.  [stdout]",
    ),
    option("--overwrite", section=_WRITE, is_flag=True, help="Replace a file that is there."),
    option("--json", "as_json", section="General", is_flag=True, help="Print JSON."),
)


@click.command(cls=Verb)
@click.argument("file", type=click.Path(path_type=Path))
@workload_options
def command(file: Path, target: str | None, compat: str | None, out: Path | None, **options: Any) -> None:
    """Read a training job, workload or trace, and write jobs for other simulators.

    FILE is a training job (YAML), a Megatron-LM command, script or log, an AICB command, a SimAI workload (.txt), an
    AICB list (.csv), AIOB times, a Chakra trace (.et), a Kineto or a PyTorch execution trace; also gzipped.

    \b
    windtunnel workload trace.json
    windtunnel workload pretrain_gpt.sh --device h100_sxm --write job --out job.yaml
    windtunnel workload job.yaml --write simai --out workload.txt
    windtunnel workload aicb_command.txt --compat aicb --out results/
    """
    from windtunnel.interop.workload_files import AICB_COMMAND, JOB, MEGATRON, job_contents, read_contents, recognise

    kind = recognise(file)
    if compat is not None and kind in (JOB, MEGATRON, AICB_COMMAND):
        _deliver(_as_aicb(file, kind, target, **options), out, options["overwrite"])
        return
    if kind not in (JOB, MEGATRON, AICB_COMMAND):
        if target or compat:
            raise InputError(f"{file} is a {kind}; only jobs and their arguments are written in other formats")
        _show(read_contents(file, kind), options["as_json"])
        return
    job = _job(file, kind, **options)
    if target is None:
        from windtunnel.spec.training import resolve

        _show(job_contents(resolve(job), options["stage"]), options["as_json"])
        return
    _write(job, target, out, options["stage"], options["overwrite"])


def _job(file: Path, kind: str, **options: Any) -> "TrainingJob":
    """The job that a file describes; what of its arguments was not read goes to stderr."""
    from windtunnel.cli.options import assignments
    from windtunnel.interop.text_file import read_text
    from windtunnel.interop.workload_files import JOB, MEGATRON
    from windtunnel.spec.training import load

    if kind == JOB:
        return load(file, assignments(options["settings"]))
    if options["settings"]:
        raise InputError("--set changes a job's file; these are arguments", "write them with --write job first")
    device = options["device"]
    if kind == MEGATRON:
        from windtunnel.interop.megatron_arguments import read_megatron_arguments

        if device is None:
            raise InputError("--device is missing: Megatron's arguments do not name one", "windtunnel catalog devices")
        found = read_megatron_arguments(read_text(file), device, options["num_devices"])
        if found.unread:
            shown = ", ".join(found.unread[:8]) + (
                f" and {len(found.unread) - 8} more" if len(found.unread) > 8 else ""
            )
            click.echo(f"without effect on a prediction, or not read: {shown}", err=True)
        return found.job
    return _aicb_job(read_text(file), device)


def _aicb_job(text: str, device: str | None) -> "TrainingJob":
    from windtunnel.interop.aicb_arguments import DEVICES, TrainingArguments, read_command
    from windtunnel.interop.aicb_job import job_of

    arguments = read_command(text).arguments
    if not isinstance(arguments, TrainingArguments):
        raise InputError("an inference workload is no training job", "write AICB's own file with --compat aicb")
    device = device or DEVICES.get(arguments.gpu_type or "")
    if device is None:
        raise InputError("--device is missing: the command names none", "windtunnel catalog devices")
    return job_of(arguments, device)


def _as_aicb(file: Path, kind: str, target: str | None, **options: Any) -> "GeneratedFile":
    """What AICB itself writes: for its own command, or for a job in AICB's arguments."""
    from windtunnel.interop.aicb import generate
    from windtunnel.interop.aicb_arguments import Command, read_command
    from windtunnel.interop.aicb_job import arguments_of
    from windtunnel.interop.text_file import read_text
    from windtunnel.interop.workload_files import AICB_COMMAND
    from windtunnel.spec.training import resolve

    if kind == AICB_COMMAND:
        return generate(read_command(read_text(file)), options["times"])
    arguments = arguments_of(resolve(_job(file, kind, **options)))
    generators = {
        "simai": "SimAI_training_workload_generator",
        "aicb": "generate_deepspeed_stage3_workload"
        if arguments.stage == 3
        else "generate_deepspeed_stage1_2_workload",
    }
    if target not in generators:
        raise InputError("--compat aicb needs to know which of AICB's files", "--write simai or --write aicb")
    if arguments.frame != "DeepSpeed":
        generators["aicb"] = "generate_megatron_workload"
    elif target == "simai":
        raise InputError("AICB has no SimAI workload for DeepSpeed or FSDP", "--write aicb, or leave --compat out")
    if options["times"] is not None:
        from dataclasses import replace

        arguments = replace(arguments, aiob_enable=True)
    return generate(Command(generators[target], arguments), options["times"])


def _write(job: "TrainingJob", target: str, out: Path | None, stage: int, overwrite: bool) -> None:
    from windtunnel.spec.training import resolve

    if target == "job":
        import yaml

        from windtunnel.spec.noun import encode

        _put(yaml.safe_dump(encode(job), sort_keys=False, width=120), out, overwrite)
        return
    setup = resolve(job)
    if target == "aicb":
        from windtunnel.interop.aicb_csv import records_text
        from windtunnel.interop.aicb_training import training_records

        _put(records_text([training_records(setup, stage)]), out, overwrite)
        return
    seconds = _prices(setup)
    if target == "simai":
        from windtunnel.interop.simai_training import left_out, training_workload
        from windtunnel.interop.simai_workload import workload_text

        _put(workload_text(training_workload(setup, seconds, stage)), out, overwrite)
        for what in left_out(setup):
            click.echo(f"note: SimAI has no group for {what}; it is left out", err=True)
        return
    if out is None:
        raise InputError("Chakra traces are one file a rank", "name their beginning: --out traces/job")
    from windtunnel.interop.chakra_training import write_training_traces

    if not overwrite and out.with_name(f"{out.name}.0.et").exists():
        raise InputError(f"{out}.0.et is there already", "replace the traces with --overwrite")
    written = write_training_traces(setup, seconds, out)
    click.echo(f"wrote {written[0]} and {len(written) - 2} more traces, {written[-1].name} with their groups", err=True)


def _prices(setup: "TrainingSetup") -> Any:
    """Seconds of each task, as `windtunnel train` prices it."""
    from windtunnel.engine.training import training_estimator
    from windtunnel.estimate.training import pricer

    prices = pricer(training_estimator(setup), setup.device, setup.node)
    return lambda task: prices.task(task).seconds


def _deliver(made: "GeneratedFile", out: Path | None, overwrite: bool) -> None:
    for remark in made.remarks:
        click.echo(f"note: {remark}", err=True)
    if out is not None and (out.is_dir() or str(out).endswith("/")):
        out = out / made.name
    _put(made.text, out, overwrite)


def _put(text: str, out: Path | None, overwrite: bool) -> None:
    """To a file, all or nothing, or to stdout."""
    from windtunnel.interop.text_file import write_text

    if out is None:
        click.echo(text, nl=False)
        return
    if out.exists() and not overwrite:
        raise InputError(f"{out} is there already", "choose another name, or replace it with --overwrite")
    write_text(out, text)
    click.echo(f"wrote {out}", err=True)


def _show(contents: Any, as_json: bool) -> None:
    from windtunnel.report.documents import as_text
    from windtunnel.report.tables import show
    from windtunnel.report.workload import contents_document, contents_report

    if as_json:
        click.echo(as_text(contents_document(contents)))
    else:
        show(*contents_report(contents))
