"""Kineto traces: what `torch.profiler` writes, as JSON in the Trace Event Format, also gzipped.

Times are microseconds with fractions. Beyond the format, Kineto links events by arguments: `External id` is shared by
an operator and its launches, `correlation` by a launch and its kernel, `Record function id` leads to the same
operator's node in an execution trace (pytorch/kineto, libkineto/src/output_json.cpp; torch/csrc/profiler).

A capture has the kernels with the operators that launched them, or without a device the outermost operators. The work
of matrix products and attention is known where the trace was recorded with shapes (`record_shapes=True`).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import nan, prod
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from windtunnel.errors import InputError
from windtunnel.files import decode_json
from windtunnel.formats.captures import capture as profile
from windtunnel.formats.collective_calls import CollectiveCall, Contents, element_bytes, torch_call, totals
from windtunnel.formats.recognise import FileContent
from windtunnel.metrics.records import Table

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

    def inputs(self, what: str) -> list[Any]:
        """Return a list of the arguments with an entry for each input of an operator; empty where none was recorded.

        `Input Dims` are shapes; `Input type` are formats, `float`, `c10::BFloat16`, `Scalar`, ...
        """
        entries = self.args.get(what)
        return entries if isinstance(entries, list) else []


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
    """Read a trace; InputError where it is missing, cut off or none, or an event ends before it starts."""
    trace = decode_json(path, KinetoTrace, "a Kineto trace", "torch.profiler writes one")
    wrong = next((event for event in trace.events if not event.duration_us >= 0), None)
    if wrong is not None:
        raise InputError(f"{path.name}: {wrong.name:.80} takes {wrong.duration_us:g} us", "record the trace again")
    return trace


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


def collective_calls(trace: KinetoTrace) -> Iterator[CollectiveCall]:
    """Yield the collectives that ran: NCCL's kernels with their metadata, or without a device the calls of gloo.

    A gloo call tells its shape, not its group.
    """
    for event in trace.of_category("kernel", "user_annotation"):
        name, duration_s = str(event.args.get("Collective name", "")), event.duration_us * 1e-6
        if event.cat == "kernel":
            call = torch_call(name, event.args, _CALL_KEYS, duration_s)
        elif event.name.startswith(("gloo:", "mpi:")):
            call = torch_call(event.name.partition(":")[2], _from_shape(event), _CALL_KEYS, duration_s)
        else:
            continue
        if call is not None:
            yield call


def _from_shape(event: KinetoEvent) -> dict[str, Any]:
    shape, formats = next(iter(event.inputs("Input Dims")), None), event.inputs("Input type")
    if not isinstance(shape, list) or not all(isinstance(length, int) for length in shape) or not formats:
        return {}
    elements = prod(shape)
    return {"In msg nelems": elements, "Out msg nelems": elements, "dtype": formats[0]}


GRAPHS = "{number:,} kernels were launched by CUDA graphs: the trace does not say by which operators"
NO_DEVICE = "no device was traced: the rows are the outermost operators of the CPU, with what they call"

_ACTIVITY = {"kernel": profile.KERNEL, "gpu_memcpy": profile.COPY, "gpu_memset": profile.MEMSET}
_CALL_CATEGORIES = ("cuda_runtime", "cuda_driver", "hip_runtime", "xpu_runtime")


def read_kineto_capture(path: Path) -> profile.Capture:
    """Read a trace of `torch.profiler` as a capture; InputError as `read_kineto`, or without kernels and operators."""
    trace = read_kineto(path)
    if not trace.of_category("cpu_op", *_ACTIVITY):
        raise InputError(f"{path} holds neither operators nor kernels", "record with torch.profiler")
    reading = _KinetoReading(trace)
    ranges = reading.ranges()
    of_device = sorted(trace.of_category(*_ACTIVITY), key=lambda event: event.start_us)
    notes = []
    if of_device:
        calls, rows = reading.calls()
        kernels = reading.kernels(of_device, rows)
        if len(calls):
            call = kernels["call"]
            kernels = kernels.replaced(range=np.where(call >= 0, profile.innermost_ranges(calls, ranges)[call], -1))
        # The launch of a CUDA graph is that of several kernels.
        launches = Counter(_int(event, "correlation") for event in of_device if event.cat == "kernel")
        num_graphed = sum(number for launch, number in launches.items() if launch > 0 and number > 1)
        notes += [GRAPHS.format(number=num_graphed)] if num_graphed else []
    else:
        calls = profile.capture_table("calls")
        kernels = reading.host_operators(ranges)
        notes.append(NO_DEVICE)
    devices = {
        number if isinstance(number := device.get("id"), int) else position: str(device.get("name", ""))
        for position, device in enumerate(trace.device_properties)
    }
    return profile.Capture("torch.profiler", tuple(reading.names), kernels, calls, ranges, devices, tuple(notes))


class _KinetoReading:
    """A trace with the numbers of its threads, the start of its clock and the texts met so far."""

    def __init__(self, trace: KinetoTrace) -> None:
        self.trace = trace
        self.operators = trace.of_category("cpu_op")
        self.names = profile.Names()
        timed = trace.of_category("cpu_op", "user_annotation", *_CALL_CATEGORIES, *_ACTIVITY)
        self.start_us = min((event.start_us for event in timed), default=0.0)
        threads = sorted({event.tid for event in timed}, key=str)
        # Threads keep their numbers where they have one.
        self.threads = {tid: tid if isinstance(tid, int) else position for position, tid in enumerate(threads)}

    def table(self, kind: profile.TableKind, events: Sequence[KinetoEvent], values: Mapping[str, Any]) -> Table:
        common = {
            "start_s": np.array([event.start_us - self.start_us for event in events]) * 1e-6,
            "duration_s": np.array([event.duration_us for event in events]) * 1e-6,
            "thread": [self.threads[event.tid] for event in events],
        }
        return profile.capture_table(kind, len(events), {**common, **values})

    def ranges(self) -> Table:
        events = self.trace.of_category("user_annotation")
        events.sort(key=lambda event: (event.start_us, -event.duration_us))
        names = self.names.codes([event.name for event in events])
        return self.table("ranges", events, {"name": names, "is_nested": 1})

    def calls(self) -> tuple[Table, dict[int, int]]:
        """Return the API calls, and correlation -> row of the call that launched."""
        events = sorted(self.trace.of_category(*_CALL_CATEGORIES), key=lambda event: event.start_us)
        names = self.names.codes([profile.call_name(event.name) for event in events])
        rows = {number: row for row, event in enumerate(events) if (number := _int(event, "correlation")) > 0}
        return self.table("calls", events, {"name": names}), rows

    def kernels(self, events: Sequence[KinetoEvent], calls: Mapping[int, int]) -> Table:
        """Return the kernel table of a device's events; `calls` maps a correlation to a row of the call table."""
        by_id = {event.external_id: event for event in self.operators if event.external_id is not None}
        launched_by = [by_id.get(event.external_id or -1) if event.cat == "kernel" else None for event in events]
        classes = [
            profile.kernel_class(event.name) if event.cat == "kernel" else profile.CLASSES.index("copy")
            for event in events
        ]
        work = _work_of_kernels(events, launched_by, classes)
        columns: dict[str, Any] = {
            "name": self.names.codes([event.name for event in events]),
            "activity": [_ACTIVITY[event.cat] for event in events],
            "kernel_class": classes,
            "device": [_int(event, "device") for event in events],
            "stream": [_int(event, "stream") for event in events],
            "call": [calls.get(_int(event, "correlation"), -1) for event in events],
            "operator": [-1 if operator is None else self.names[operator.name] for operator in launched_by],
            "registers": [_int(event, "registers per thread") for event in events],
            "shared_bytes": [_int(event, "shared memory") for event in events],
            "occupancy_fraction": np.array([_float(event, "est. achieved occupancy %") for event in events]) / 100,
            "flops": [flops for flops, _ in work],
            "num_bytes": [
                _float(event, "bytes") if event.cat != "kernel" else moved
                for event, (_, moved) in zip(events, work, strict=True)
            ],
        }
        for shape in ("grid", "block"):
            sizes = (event.args.get(shape) for event in events)
            columns |= profile.shape_columns(shape, (size if isinstance(size, list) else None for size in sizes))
        return self.table("kernels", events, columns)

    def host_operators(self, ranges: Table) -> Table:
        """Return a kernel table of the outermost operators of the CPU."""
        events = outermost(self.operators)
        work = [operator_work(event) for event in events]
        codes = self.names.codes([event.name for event in events])
        calls = self.table("calls", events, {"name": codes})
        columns = {
            "name": codes,
            "activity": profile.OPERATOR,
            "kernel_class": [profile.kernel_class(event.name) for event in events],
            "stream": calls["thread"],
            "range": profile.innermost_ranges(calls, ranges),
            "operator": codes,
            "flops": [flops for flops, _ in work],
            "num_bytes": [moved for _, moved in work],
        }
        return self.table("kernels", events, columns)


def _int(event: KinetoEvent, key: str) -> int:
    value = event.args.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else -1


def _float(event: KinetoEvent, key: str) -> float:
    value = event.args.get(key)
    return float(value) if isinstance(value, int | float) else nan


def _work_of_kernels(
    events: Sequence[KinetoEvent], operators: Sequence[KinetoEvent | None], classes: Sequence[int]
) -> list[tuple[float, float]]:
    """Return FLOPs and bytes of the kernels that alone do the work of an operator; NaN for all others."""
    doing: dict[int | None, list[int]] = {}
    for i, (operator, code) in enumerate(zip(operators, classes, strict=True)):
        if operator is not None and profile.CLASSES[code] in ("gemm", "attention"):
            doing.setdefault(operator.external_id, []).append(i)
    work = [(nan, nan)] * len(events)
    for kernels in doing.values():
        operator = operators[kernels[0]]
        if len(kernels) == 1 and operator is not None:
            work[kernels[0]] = operator_work(operator)
    return work


def outermost(operators: Sequence[KinetoEvent]) -> list[KinetoEvent]:
    """Return the operators that lie within no other operator of their thread, in the order of their start."""
    outer, ends = [], dict[int | str, float]()
    for event in sorted(operators, key=lambda event: (event.start_us, -event.duration_us)):
        if event.start_us >= ends.get(event.tid, -np.inf):
            outer.append(event)
            ends[event.tid] = event.start_us + event.duration_us
    return outer


def operator_work(operator: KinetoEvent) -> tuple[float, float]:
    """Return FLOPs and bytes of an operator by the shapes of its inputs; NaN where they are unknown."""
    shape = gemm_shape(operator)
    if shape is not None:
        batch, m, n, k = shape
        item_bytes = element_bytes(next(iter(operator.inputs("Input type")), "")) or nan
        return 2.0 * batch * m * n * k, batch * (m * k + k * n + m * n) * item_bytes
    if operator.name.startswith("aten::") and "scaled_dot_product" in operator.name:
        return _attention_flops(operator), nan
    return nan, nan


def gemm_shape(operator: KinetoEvent) -> tuple[int, int, int, int] | None:
    """Return (batch, m, n, k) of a matrix product with recorded shapes; None for any other operator."""
    shape_of = _GEMM_SHAPES.get(operator.name)
    tensors = [shape for shape in operator.inputs("Input Dims") if _is_shape(shape)]
    if shape_of is None or len(tensors) < 2:
        return None
    try:
        return shape_of(tensors)
    except (IndexError, ValueError):
        return None


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, list) and len(shape) > 0 and all(isinstance(length, int) for length in shape)


def _product(tensors: list[list[int]]) -> tuple[int, int, int, int]:
    """Return the shape of `[m, k] x [k, n]`, with any number of equal batch dimensions before."""
    a, b = tensors[0], tensors[1]
    if len(b) <= 2:
        return 1, prod(a[:-1]), b[-1], a[-1]
    return prod(a[:-2]), a[-2], b[-1], a[-1]


_GEMM_SHAPES: Mapping[str, Callable[[list[list[int]]], tuple[int, int, int, int]]] = {
    "aten::mm": _product,
    "aten::matmul": _product,
    "aten::bmm": _product,
    "aten::addmm": lambda tensors: _product(tensors[-2:]),
    "aten::baddbmm": lambda tensors: _product(tensors[-2:]),
    "aten::_scaled_mm": _product,
    # The weight is stored transposed.
    "aten::linear": lambda tensors: (1, prod(tensors[0][:-1]), tensors[1][0], tensors[1][1]),
    # vLLM on CPUs: output [m, n], input [m, k], packed weight
    "_C::onednn_mm": lambda tensors: (1, tensors[0][0], tensors[0][1], tensors[1][1]),
}
"""Operator -> the shape of its product from the shapes of its tensors (PyTorch's native_functions.yaml)."""


def _attention_flops(operator: KinetoEvent) -> float:
    """Return 4 x pairs x width: two products; under a causal mask a query of a whole prompt sees half of the keys."""
    tensors = [shape for shape in operator.inputs("Input Dims") if _is_shape(shape) and len(shape) == 4]
    if len(tensors) < 2:
        return nan
    batch, heads, queries, width = map(float, tensors[0])
    keys = float(tensors[1][2])
    is_causal = "True" in operator.inputs("Concrete Inputs")[4:6]
    pairs = queries * keys - queries * queries / 2 if is_causal else queries * keys
    return 4.0 * batch * heads * pairs * width
