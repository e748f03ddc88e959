"""Megatron-LM command lines (NVIDIA/Megatron-LM core_v0.13, megatron/training/arguments.py).

`read` turns a launch script, a command, or the arguments that a run's log prints into a training job; `write` does the
reverse. Refused: missing arguments, wrong values, variables that are not assigned. Arguments that change nothing that
is predicted (data, learning rates, logging) are ignored and listed.
"""

from pathlib import Path

from windtunnel.files import read_text
from windtunnel.formats.job_files import JobLaunch
from windtunnel.formats.megatron.read import MegatronJob, read_megatron_arguments
from windtunnel.formats.megatron.write import changed_arguments
from windtunnel.formats.recognise import FileContent, FileFormat


def _is_arguments(file: FileContent) -> bool:
    return not file.is_json and ("--num-layers" in file.text or "num_layers ..." in file.text)


def _read_job(path: Path, launch: JobLaunch) -> MegatronJob:
    """Read the job that a script, command or log describes, and the arguments that were ignored."""
    device = launch.device_or(None, "Megatron's arguments do not name one")
    return read_megatron_arguments(read_text(path), device, launch.num_devices, launch.overrides.get("model"))


FORMATS = (
    FileFormat("Megatron arguments", "training job", _is_arguments, _read_job, changed_arguments, is_certain=False),
)
