"""AICB, the workload generator of SimAI (https://github.com/aliyun/aicb at 23eec3c, which SimAI 1.7 pins).

Read: its commands and scripts (`read`), communication lists (`csv_records`), AIOB times (`aiob_times`). Written: its
own files, byte for byte (`write`), and a right list of a training job (`training`).

Refused: commands on which AICB fails, groups that its lists cannot name.
docs/reference/aicb-differences.md lists where its workloads differ from what the frameworks do.
"""

import re
from pathlib import Path

from windtunnel.errors import InputError
from windtunnel.files import read_text
from windtunnel.formats.aicb.aiob_times import read_aiob_times
from windtunnel.formats.aicb.arguments import WORDS, TrainingArguments, read_command
from windtunnel.formats.aicb.csv_records import COLUMNS, read_records
from windtunnel.formats.aicb.job import job_of
from windtunnel.formats.collective_calls import CollectiveCall, Contents, totals
from windtunnel.formats.job_files import JobLaunch
from windtunnel.formats.recognise import FileFormat
from windtunnel.training.job import TrainingJob

LIST, AIOB, COMMAND = "AICB list", "AIOB times", "AICB command"

_AIOB_STARTS = ("train_iter:", "inference_term:")
_GROUPS = {"ep_dp_group": "dp_ep", "all": "all"}
_KINDS = {"isend": "send", "irecv": "receive"}
_RUN = re.compile(
    r"workload_generator\.|^[^#\n]*\b(?:ba)?sh\s+\S*?(?:_workload_with_aiob|megatron_gpt|deepspeed_llama)\.sh\b", re.M
)
"""What runs one of AICB's generators or scripts."""


def read_list(path: Path) -> Contents:
    """Read a list and sum up its computation and communication."""
    lists = read_records(path)
    facts = [("lists", str(len(lists))), ("lines", f"{sum(part.num_records for part in lists):,}")]
    facts += [("ranks", part.title) for part in lists if part.title]
    records = [record for part in lists for record in part.records()]
    products = [record for record in records if record.kind == "computation"]
    if products:
        facts.append(("products", f"{len(products):,} of matrices"))
    timed = [record.elapsed_ms for record in products if record.elapsed_ms is not None]
    calls = (
        CollectiveCall(
            _KINDS.get(record.kind, record.kind),
            _GROUPS.get(record.group or "", (record.group or "").removesuffix("_group")),
            record.group_size,
            round(record.size) if not isinstance(record.size, tuple) else None,
            record.num_calls,
            record.elapsed_ms * 1e-3 if record.elapsed_ms is not None else None,
        )
        for record in records
        if record.kind not in ("computation", "epoch_end")
    )
    return Contents(LIST, tuple(facts), tuple(totals(calls)), sum(timed) * 1e-3 if timed else None)


def read_times(path: Path) -> Contents:
    """Read AIOB times as the time of each module."""
    times = read_aiob_times(path)
    modules = {name: module.mean_us * 1e-6 for name, module in times.modules.items()}
    return Contents(AIOB, (("run", times.title),), (), sum(modules.values()), modules)


def read_job(path: Path, launch: JobLaunch) -> tuple[TrainingJob, tuple[str, ...]]:
    """Read a command as a training job. InputError where the command is wrong, of inference, or leaves a value open
    that `launch` does not give."""
    arguments = read_command(read_text(path)).arguments
    if not isinstance(arguments, TrainingArguments):
        raise InputError("an inference workload is no training job", "write AICB's own file with --compat aicb")
    device = launch.device_or(WORDS["devices"].get(arguments.gpu_type or ""), "the command names none")
    job = job_of(arguments, device)
    if launch.num_devices not in (None, job.num_devices):
        problem = f"--num-devices is {launch.num_devices}; the command runs on {job.num_devices}"
        raise InputError(problem, "leave it out")
    return job, ()


FORMATS = (
    FileFormat(LIST, "workload or trace", lambda file: COLUMNS in file.text[:100_000], read_list),
    FileFormat(AIOB, "workload or trace", lambda file: file.first_word.startswith(_AIOB_STARTS), read_times),
    FileFormat(COMMAND, "training job", lambda file: not file.is_json and _RUN.search(file.text) is not None, read_job),
)
