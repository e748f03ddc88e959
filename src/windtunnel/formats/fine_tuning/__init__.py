"""Fine-tuning jobs of the tools around Hugging Face's Trainer; `words.yaml` has their words and the sources.

Read: commands of accelerate, torchrun, deepspeed, TRL and ms-swift with TrainingArguments; YAML of LLaMA-Factory,
Axolotl and TRL; the files of DeepSpeed and accelerate that they name. `sources` finds the keys, `job` says what they
mean. Refused: what a training job has no words for, such as state on NVMe, a part of the state in the host's
memory, and training from preferences.
"""

import re
from collections.abc import Callable
from pathlib import Path

from windtunnel.formats.fine_tuning.job import FineTuning
from windtunnel.formats.fine_tuning.sources import TRAINS, Source, read_command, read_keys
from windtunnel.formats.job_files import JobLaunch
from windtunnel.formats.recognise import FileContent, FileFormat
from windtunnel.training.job import TrainingJob

_KEYS = re.compile(r'(?:^|[{,])\s*"?(?:model_name_or_path|base_model)"?\s*:', re.M)


def _has_keys(file: FileContent) -> bool:
    return _KEYS.search(file.text) is not None


def _is_command(file: FileContent) -> bool:
    """Whether a text that is no file of keys starts a training."""
    return not _has_keys(file) and TRAINS.search(re.sub(r"(?m)(^|\s)#.*$", "", file.text)) is not None


def _reader(read: Callable[[Path], Source]) -> Callable[[Path, JobLaunch], tuple[TrainingJob, tuple[str, ...]]]:
    return lambda path, launch: FineTuning(read(path), launch).read()


FORMATS = (
    FileFormat("fine-tuning command", "training job", _is_command, _reader(read_command)),
    FileFormat("LLaMA-Factory, Axolotl or TRL job", "training job", _has_keys, _reader(read_keys)),
)
