"""Read a file of Megatron-LM's arguments as a training job."""

from pathlib import Path

from windtunnel.files import read_text
from windtunnel.formats.job_files import JobLaunch
from windtunnel.formats.megatron.read import read_megatron_arguments
from windtunnel.formats.recognise import FileContent
from windtunnel.training.job import TrainingJob


def is_arguments(file: FileContent) -> bool:
    """Whether a text has Megatron's arguments, as a command or as a log prints them."""
    return not file.is_json and ("--num-layers" in file.text or "num_layers ..." in file.text)


def read_job(path: Path, launch: JobLaunch) -> tuple[TrainingJob, tuple[str, ...]]:
    """Read the job that a script, command or log describes, and the arguments that were ignored.

    Raises:
        InputError: an argument is missing or wrong, or `launch` does not name the device.
    """
    device = launch.device_or(None, "Megatron's arguments do not name one")
    read = read_megatron_arguments(read_text(path), device, launch.num_devices)
    return read.job, read.unread
