"""Training jobs from our YAML, Megatron-LM's or AICB's arguments; and AICB's own files for a job."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from windtunnel.errors import InputError
from windtunnel.files import read_text
from windtunnel.formats.aicb.arguments import DEVICES, Command, TrainingArguments
from windtunnel.formats.aicb.job import arguments_of, job_of
from windtunnel.formats.aicb.read import read_command
from windtunnel.formats.aicb.write import GeneratedFile, generate
from windtunnel.formats.megatron.read import read_megatron_arguments
from windtunnel.formats.workload_files import AICB_COMMAND, JOB, MEGATRON
from windtunnel.training.job import TrainingJob, load
from windtunnel.training.setup import resolve

DESCRIPTIONS = (JOB, MEGATRON, AICB_COMMAND)
"""Kinds of files that describe a job."""


@dataclass(frozen=True)
class JobLaunch:
    """Values that arguments leave open."""

    device: str | None = None
    num_devices: int | None = None
    overrides: Mapping[str, Any] | None = None
    """Overrides of a job's file: dotted path -> value."""


def read_job(path: Path, kind: str, launch: JobLaunch) -> tuple[TrainingJob, tuple[str, ...]]:
    """Read the job that a file of one of `DESCRIPTIONS` describes, and the arguments in it that were ignored.

    Raises:
        InputError: the file is wrong, or leaves a value open that `launch` does not give.
    """
    if kind == JOB:
        return load(path, dict(launch.overrides or {})), ()
    if launch.overrides:
        raise InputError("--set changes a job's file; these are arguments", "write them with --write job first")
    if kind == MEGATRON:
        if launch.device is None:
            raise InputError("--device is missing: Megatron's arguments do not name one", "windtunnel catalog devices")
        read = read_megatron_arguments(read_text(path), launch.device, launch.num_devices)
        return read.job, read.unread
    arguments = read_command(read_text(path)).arguments
    if not isinstance(arguments, TrainingArguments):
        raise InputError("an inference workload is no training job", "write AICB's own file with --compat aicb")
    device = launch.device or DEVICES.get(arguments.gpu_type or "")
    if device is None:
        raise InputError("--device is missing: the command names none", "windtunnel catalog devices")
    return job_of(arguments, device), ()


def aicb_file(path: Path, kind: str, launch: JobLaunch, target: str | None, times: Path | None) -> GeneratedFile:
    """Return the file that AICB itself writes: for its own command, or for another job in AICB's arguments.

    Args:
        path: a file of one of `DESCRIPTIONS`.
        kind: its kind.
        launch: values that its arguments leave open.
        target: `simai` or `aicb`, where the file is not a command of AICB.
        times: an AIOB file.

    Raises:
        InputError: AICB would fail, or has no argument for a part of the job.
    """
    if kind == AICB_COMMAND:
        return generate(read_command(read_text(path)), times)
    job, _ = read_job(path, kind, launch)
    arguments = arguments_of(resolve(job))
    if target not in ("simai", "aicb"):
        raise InputError("--compat aicb needs to know which of AICB's files", "--write simai or --write aicb")
    if times is not None:
        arguments = replace(arguments, aiob_enable=True)
    return generate(Command(_generator(arguments, target), arguments), times)


def _generator(arguments: TrainingArguments, target: str) -> str:
    is_deepspeed = arguments.frame == "DeepSpeed"
    if target == "simai":
        if is_deepspeed:
            raise InputError("AICB has no SimAI workload for DeepSpeed or FSDP", "--write aicb, or leave --compat out")
        return "SimAI_training_workload_generator"
    if not is_deepspeed:
        return "generate_megatron_workload"
    stages = "stage3" if arguments.stage == 3 else "stage1_2"
    return f"generate_deepspeed_{stages}_workload"
