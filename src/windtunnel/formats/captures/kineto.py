"""Kineto traces: what `torch.profiler` writes, as JSON in the Trace Event Format, also gzipped.

Times are microseconds with fractions. Beyond the format, Kineto links events by arguments: `External id` is shared by
an operator and what it launched, `correlation` by a launch and its kernel, `Record function id` leads to the same
operator's node in an execution trace (pytorch/kineto, libkineto/src/output_json.cpp; torch/csrc/profiler).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from windtunnel.errors import InputError
from windtunnel.files import read_bytes
from windtunnel.formats.collective_calls import CollectiveCall, torch_call

DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of what a device did."""

_CALL_KEYS = ("In msg nelems", "Out msg nelems", "dtype", "Process Group Description", "Group size")


class KinetoEvent(msgspec.Struct, frozen=True):
    """One event as it stands in the file; other keys of it are passed over."""

    ph: str
    """`X` with a duration, `M` metadata, `i` an instant, `s` and `f` the ends of an arrow."""
    name: str = ""
    cat: str = ""
    """`cpu_op`, `user_annotation`, `cuda_runtime`, `kernel`, ..."""
    ts: float = 0.0
    dur: float = 0.0
    pid: int | str = 0
    tid: int | str = 0
    id: int | str | None = None
    args: dict[str, Any] = {}

    @property
    def start_us(self) -> float:
        return self.ts

    @property
    def duration_us(self) -> float:
        return self.dur

    @property
    def external_id(self) -> int | None:
        """Shared by an operator and the kernels that it launched."""
        found = self.args.get("External id")
        return found if isinstance(found, int) else None

    @property
    def input_shapes(self) -> list[Any]:
        """Shapes of an operator's inputs; empty where they were not recorded."""
        found = self.args.get("Input Dims")
        return found if isinstance(found, list) else []

    @property
    def input_formats(self) -> list[str]:
        """Formats of an operator's inputs, `float`, `c10::BFloat16`, `Scalar`, ..."""
        found = self.args.get("Input type")
        return found if isinstance(found, list) else []


class DistributedInfo(msgspec.Struct, frozen=True):
    """Which of the job's ranks wrote the trace."""

    backend: str = ""
    rank: int = 0
    world_size: int = 1
    pg_config: list[dict[str, Any]] = []
    """The process groups: `pg_name`, `pg_desc`, `pg_size`, `ranks`."""


class _File(msgspec.Struct, frozen=True):
    traceEvents: list[KinetoEvent]  # noqa: N815
    schemaVersion: int | None = None  # noqa: N815
    deviceProperties: list[dict[str, Any]] = []  # noqa: N815
    distributedInfo: DistributedInfo | None = None  # noqa: N815
    baseTimeNanoseconds: int = 0  # noqa: N815


@dataclass(frozen=True)
class KinetoTrace:
    """A whole file."""

    events: tuple[KinetoEvent, ...]
    devices: tuple[dict[str, Any], ...]
    """Name, memory and multiprocessors of each device that the process saw."""
    distributed: DistributedInfo | None
    base_time_ns: int
    """Added to an event's time it gives the time since 1970."""

    def of_category(self, *categories: str) -> list[KinetoEvent]:
        """The events with a duration of these categories, in the file's order."""
        return [event for event in self.events if event.ph == "X" and event.cat in categories]


def read_kineto(path: Path) -> KinetoTrace:
    """The trace in a file.

    Raises:
        InputError: the file is missing, cut off, not JSON, or no trace.
    """
    content = read_bytes(path)
    try:
        found = msgspec.json.decode(content, type=_File)
    except msgspec.ValidationError as error:
        raise InputError(f"{path} is no Kineto trace: {error}", "torch.profiler writes one") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as JSON: {error}", "is the file cut off?") from None
    return KinetoTrace(
        tuple(found.traceEvents), tuple(found.deviceProperties), found.distributedInfo, found.baseTimeNanoseconds
    )


def kernels_with_operators(trace: KinetoTrace) -> Iterator[tuple[KinetoEvent, KinetoEvent | None]]:
    """Every kernel, with the operator that launched it where the trace tells."""
    operators = {event.external_id: event for event in trace.of_category("cpu_op") if event.external_id is not None}
    for kernel in trace.of_category("kernel"):
        yield kernel, operators.get(kernel.external_id) if kernel.external_id is not None else None


def collective_calls(trace: KinetoTrace) -> list[CollectiveCall]:
    """The collectives that ran: NCCL's kernels with their metadata, or without a device the calls of gloo.

    A gloo call tells its shape, not its group.
    """
    found = []
    for event in trace.of_category("kernel", "user_annotation"):
        name, duration_s = str(event.args.get("Collective name", "")), event.duration_us * 1e-6
        if event.cat == "kernel":
            call = torch_call(name, event.args, _CALL_KEYS, duration_s)
        elif event.name.startswith(("gloo:", "mpi:")):
            call = torch_call(event.name.partition(":")[2], _from_shape(event), _CALL_KEYS, duration_s)
        else:
            continue
        if call is not None:
            found.append(call)
    return found


def _from_shape(event: KinetoEvent) -> dict[str, Any]:
    shape = event.input_shapes[0] if event.input_shapes else None
    formats = event.input_formats
    if not isinstance(shape, list) or not all(isinstance(length, int) for length in shape) or not formats:
        return {}
    elements = 1
    for length in shape:
        elements *= length
    return {"In msg nelems": elements, "Out msg nelems": elements, "dtype": formats[0]}
