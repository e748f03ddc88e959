"""Our own training jobs as files, beside other tools' descriptions of jobs; the messages of a job."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from windtunnel.catalog import check_is_file
from windtunnel.errors import InputError
from windtunnel.formats.collective_calls import CollectiveCall, Contents, totals
from windtunnel.formats.recognise import FileContent, FileFormat, find_format
from windtunnel.model import operators as ops
from windtunnel.schema import encode
from windtunnel.training.job import TrainingJob, load
from windtunnel.training.layers.rank import Rank
from windtunnel.training.program import device_program
from windtunnel.training.setup import TrainingSetup, with_zero
from windtunnel.units import format_count


@dataclass(frozen=True)
class JobLaunch:
    """Values that arguments leave open."""

    device: str | None = None
    num_devices: int | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the job: dotted path -> value."""

    def device_or(self, device: str | None, missing: str) -> str:
        """Return the device, or else the file's own; InputError says why there is none: `missing`."""
        if (self.device or device) is None:
            raise InputError(f"--device is missing: {missing}", "windtunnel catalog devices")
        return str(self.device or device)


def read_job(path: Path, launch: JobLaunch) -> tuple[TrainingJob, tuple[str, ...]]:
    """Read our own YAML or JSON of a job; none of it is ignored."""
    given = {"device": launch.device, "num_devices": launch.num_devices, **launch.overrides}
    return load(path, {name: value for name, value in given.items() if value is not None}), ()


@dataclass(frozen=True)
class JobRead:
    """A job, and what of its file is not in a prediction."""

    job: TrainingJob
    kind: FileFormat | None = None
    """Format of the file; None without one."""
    ignored: tuple[str, ...] = ()
    not_modelled: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    """Of these three the last two are known of some formats alone."""

    @property
    def remarks(self) -> list[str]:
        """Sentences that name what was ignored."""
        apart = {"without effect on a prediction, or not read": self.ignored, "not modelled": self.not_modelled}
        apart["not known as an argument of the tool"] = self.unknown
        return [f"{what}: {', '.join(names)}" for what, names in apart.items() if names]

    @property
    def document(self) -> dict[str, Any]:
        """The same, option by option."""
        apart = {name: list(names) for name in ("not_modelled", "unknown") if (names := getattr(self, name))}
        return {"job_file": {"format": self.kind.name, "ignored": list(self.ignored), **apart}} if self.kind else {}


def read_any_job(kind: FileFormat, path: Path, launch: JobLaunch) -> JobRead:
    """Read a job of any format, with the overrides, and what was ignored. InputError as the format's reader does, or an
    override names no field."""
    if kind.read is read_job:
        return JobRead(read_job(path, launch)[0])
    job, *apart = kind.read(path, launch)
    if isinstance(stage := launch.overrides.get("sharding.zero"), int):
        job = with_zero(job, stage, launch.overrides)
    return JobRead(load(encode(job), dict(launch.overrides)) if launch.overrides else job, kind, *map(tuple, apart))


def read_job_file(path: Path, given: Mapping[str, Any]) -> JobRead:
    """Read a job's file of any format, with the fields of the job that are given over it, by dotted path. InputError
    where there is no such file, or as `find_format` and `read_any_job`."""
    check_is_file(path)
    rest = {name: value for name, value in given.items() if name not in ("device", "num_devices")}
    launch = JobLaunch(given.get("device"), given.get("num_devices"), rest)
    return read_any_job(find_format(path, "training job"), path, launch)


def _is_job(file: FileContent) -> bool:
    text = file.text.lstrip()
    is_json = text.startswith("{") and any(f'"{name}"' in text for name in ("model", "device", "global_batch"))
    return is_json or "sequence_tokens" in text or (bool(text) and file.path.suffix in (".yaml", ".yml"))


FORMATS = (FileFormat("training job", "training job", _is_job, read_job, is_certain=False),)


def job_contents(setup: TrainingSetup, device: int) -> Contents:
    """Return the messages of one rank of a pipeline device in a step of a job."""
    degrees, names = setup.degrees, ("tp", "cp", "pp", "dp", "ep")
    ranks = ", ".join(f"{name} {getattr(degrees, name)}" for name in names)
    microbatches = f"{degrees.num_microbatches} of {degrees.micro_batch} x {setup.job.sequence_tokens:,} tokens"
    facts = (
        ("model", f"{setup.model.name}, {format_count(setup.model.num_layers, 'layer')}"),
        ("ranks", f"{degrees.num_devices:,}: {ranks}"),
        ("microbatches", microbatches),
        ("shown", f"one rank of pipeline device {device}, one step"),
    )
    return Contents("training job", facts, tuple(totals(_job_calls(setup, device))))


def _job_calls(setup: TrainingSetup, device: int) -> Iterator[CollectiveCall]:
    rank = Rank(setup)
    for action in device_program(setup, device):
        for message in (action.receives, action.sends):
            if message:
                kind = "send" if message.is_send else "receive"
                yield CollectiveCall(kind, "pp", 2, round(message.size_bytes))
        for task in action.tasks:
            if isinstance(task.op, ops.Collective) and task.group:
                size, num_ranks = round(float(task.op.message_bytes)), task.op.num_ranks
                is_world = num_ranks == setup.degrees.num_devices != rank.layout(task.group)[0]
                group = "all" if is_world else str(task.group)
                yield CollectiveCall(task.op.op, group, num_ranks, size, round(task.count))
