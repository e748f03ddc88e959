"""Job files of torchtitan (pytorch/torchtitan 0.1 and 0.2, TOML), read as training jobs."""

from windtunnel.formats.recognise import FileContent, FileFormat
from windtunnel.formats.torchtitan.read import changed_keys, read_job


def _is_job(file: FileContent) -> bool:
    return "[training]" in file.text and "[model]" in file.text and "flavor" in file.text


FORMATS = (FileFormat("torchtitan job", "training job", _is_job, read_job, changed_keys),)
