"""Kineto traces: what `torch.profiler` writes, as JSON in the Trace Event Format, also gzipped.

Times are microseconds with fractions. Beyond the format, Kineto links events by arguments: `External id` is shared by
an operator and its launches, `correlation` by a launch and its kernel, `Record function id` leads to the same
operator's node in an execution trace (pytorch/kineto, libkineto/src/output_json.cpp; torch/csrc/profiler).
"""

from math import prod
from pathlib import Path
from typing import Any

import msgspec

from windtunnel.formats.collective_calls import CollectiveCall, Contents, torch_call, totals
from windtunnel.formats.parsing import decode_json
from windtunnel.formats.recognise import FileContent

TRACE = "Kineto trace"
_CALL_KEYS = ("In msg nelems", "Out msg nelems", "dtype", "Process Group Description", "Group size")


class KinetoEvent(msgspec.Struct, frozen=True):
    """One event of the file; its other keys are ignored."""

    ph: str
    """`X` with a duration, `M` metadata, `i` an instant, `s` and `f` the ends of an arrow."""
    name: str = ""
    cat: str = ""
    """`cpu_op`, `user_annotation`, `cuda_runtime`, `kernel`, ..."""
    start_us: float = msgspec.field(default=0.0, name="ts")
    duration_us: float = msgspec.field(default=0.0, name="dur")
    pid: int | str = 0
    tid: int | str = 0
    id: int | str | None = None
    args: dict[str, Any] = {}

    @property
    def external_id(self) -> int | None:
        """Number shared by an operator and the kernels that it launched."""
        number = self.args.get("External id")
        return number if isinstance(number, int) else None

    @property
    def input_shapes(self) -> list[Any]:
        """Shapes of an operator's inputs; empty where they were not recorded."""
        shapes = self.args.get("Input Dims")
        return shapes if isinstance(shapes, list) else []

    @property
    def input_formats(self) -> list[str]:
        """Formats of an operator's inputs, `float`, `c10::BFloat16`, `Scalar`, ..."""
        formats = self.args.get("Input type")
        return formats if isinstance(formats, list) else []


class DistributedInfo(msgspec.Struct, frozen=True):
    """The rank that wrote the trace."""

    backend: str = ""
    rank: int = 0
    world_size: int = 1


class KinetoTrace(msgspec.Struct, frozen=True, rename="camel"):
    """A whole file."""

    events: tuple[KinetoEvent, ...] = msgspec.field(name="traceEvents")
    device_properties: tuple[dict[str, Any], ...] = ()
    """Name, memory and multiprocessors of each device that the process saw."""
    distributed_info: DistributedInfo | None = None

    def of_category(self, *categories: str) -> list[KinetoEvent]:
        """Return the events with a duration of these categories, in the file's order."""
        return [event for event in self.events if event.ph == "X" and event.cat in categories]


def is_kineto(file: FileContent) -> bool:
    """Whether a JSON file holds trace events."""
    return file.is_json and '"traceEvents"' in file.text


def read_kineto(path: Path) -> KinetoTrace:
    """Read a trace.

    Raises:
        InputError: the file is missing, cut off, not JSON, or no trace.
    """
    return decode_json(path, KinetoTrace, "a Kineto trace", "torch.profiler writes one")


def read_contents(path: Path) -> Contents:
    """Read a trace and sum up its computation and communication."""
    trace = read_kineto(path)
    facts = [("events", f"{len(trace.events):,}"), ("operators", f"{len(trace.of_category('cpu_op')):,}")]
    kernels = trace.of_category("kernel")
    if kernels:
        facts.append(("kernels", f"{len(kernels):,}"))
    if (job := trace.distributed_info) is not None:
        facts.append(("rank", f"{job.rank} of {job.world_size}, {job.backend}"))
    compute_us = sum(kernel.duration_us for kernel in kernels if "ChakraCollective name" not in kernel.args)
    calls = tuple(totals(collective_calls(trace)))
    return Contents(TRACE, tuple(facts), calls, compute_us * 1e-6 if kernels else None)


def collective_calls(trace: KinetoTrace) -> list[CollectiveCall]:
    """Return the collectives that ran: NCCL's kernels with their metadata, or without a device the calls of gloo.

    A gloo call tells its shape, not its group.
    """
    calls = []
    for event in trace.of_category("kernel", "user_annotation"):
        name, duration_s = str(event.args.get("Collective name", "")), event.duration_us * 1e-6
        if event.cat == "kernel":
            call = torch_call(name, event.args, _CALL_KEYS, duration_s)
        elif event.name.startswith(("gloo:", "mpi:")):
            call = torch_call(event.name.partition(":")[2], _from_shape(event), _CALL_KEYS, duration_s)
        else:
            continue
        if call is not None:
            calls.append(call)
    return calls


def _from_shape(event: KinetoEvent) -> dict[str, Any]:
    shape = event.input_shapes[0] if event.input_shapes else None
    formats = event.input_formats
    if not isinstance(shape, list) or not all(isinstance(length, int) for length in shape) or not formats:
        return {}
    elements = prod(shape)
    return {"In msg nelems": elements, "Out msg nelems": elements, "dtype": formats[0]}
