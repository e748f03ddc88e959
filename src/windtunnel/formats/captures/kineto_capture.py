"""A Kineto trace as a capture: kernels with the operators that launched them, or without a device the operators.

The work of matrix products and attention is known where the trace was recorded with shapes (`record_shapes=True`).
"""

from collections.abc import Callable, Mapping, Sequence
from math import nan, prod
from pathlib import Path
from typing import Any

import numpy as np

from windtunnel.errors import InputError
from windtunnel.formats.captures.capture import (
    CALL_COLUMNS,
    CLASSES,
    COPY,
    KERNEL,
    KERNEL_COLUMNS,
    MEMSET,
    OPERATOR,
    RANGE_COLUMNS,
    Capture,
    Names,
    capture_table,
    innermost_ranges,
)
from windtunnel.formats.captures.kernel_names import call_name, kernel_class
from windtunnel.formats.captures.kineto import KinetoEvent, KinetoTrace, read_kineto
from windtunnel.metrics.records import Table

GRAPHS = "{number:,} kernels were launched by CUDA graphs: the trace does not say by which operators"
NO_DEVICE = "no device was traced: the rows are the outermost operators of the CPU, with what they call"

_ACTIVITY = {"kernel": KERNEL, "gpu_memcpy": COPY, "gpu_memset": MEMSET}
_CALL_CATEGORIES = ("cuda_runtime", "cuda_driver", "hip_runtime", "xpu_runtime")
_BYTES = {
    "float": 4,
    "double": 8,
    "c10::BFloat16": 2,
    "c10::Half": 2,
    "long int": 8,
    "int": 4,
    "short int": 2,
    "signed char": 1,
    "unsigned char": 1,
    "bool": 1,
    "c10::Float8_e4m3fn": 1,
    "c10::Float8_e5m2": 1,
}


def read_kineto_capture(path: Path) -> Capture:
    """The capture in a trace of `torch.profiler`, plain or gzipped.

    Raises:
        InputError: as `read_kineto`; or it holds neither kernels nor operators.
    """
    trace = read_kineto(path)
    if not trace.of_category("cpu_op", *_ACTIVITY):
        raise InputError(f"{path} holds neither operators nor kernels", "record with torch.profiler")
    return kineto_capture(trace)


def kineto_capture(trace: KinetoTrace) -> Capture:
    """A trace as a capture."""
    names = Names()
    timed = trace.of_category("cpu_op", "user_annotation", *_CALL_CATEGORIES, *_ACTIVITY)
    start_us = min((event.start_us for event in timed), default=0.0)
    of_device = sorted(trace.of_category(*_ACTIVITY), key=lambda event: event.start_us)
    threads = _numbered(event.tid for event in timed)
    ranges = _ranges(trace, names, start_us, threads)
    operators = trace.of_category("cpu_op")
    notes = []
    if of_device:
        calls, rows = _calls(trace.of_category(*_CALL_CATEGORIES), names, start_us, threads)
        kernels = _kernels(of_device, operators, names, start_us, rows)
        inner = innermost_ranges(calls, ranges) if len(calls) else np.empty(0, np.int64)
        call = kernels["call"]
        if len(calls):
            kernels = kernels.replaced(range=np.where(call >= 0, inner[call], -1))
        num_graphed = _num_graphed(of_device)
        notes += [GRAPHS.format(number=num_graphed)] if num_graphed else []
    else:
        calls = capture_table(CALL_COLUMNS, 0, {})
        kernels = _host_operators(operators, names, start_us, threads, ranges)
        notes.append(NO_DEVICE)
    devices = {
        number if isinstance(number := one.get("id"), int) else place: str(one.get("name", ""))
        for place, one in enumerate(trace.devices)
    }
    return Capture("torch.profiler", names.texts(), kernels, calls, ranges, devices, tuple(notes))


def _numbered(threads: Any) -> dict[int | str, int]:
    """Threads as whole numbers: their own where they have one."""
    different = sorted(set(threads), key=str)
    return {thread: thread if isinstance(thread, int) else place for place, thread in enumerate(different)}


def _span(events: Sequence[KinetoEvent], start_us: float) -> dict[str, Any]:
    return {
        "start_s": np.array([event.start_us - start_us for event in events]) * 1e-6,
        "duration_s": np.array([event.duration_us for event in events]) * 1e-6,
    }


def _ranges(trace: KinetoTrace, names: Names, start_us: float, threads: Mapping[int | str, int]) -> Table:
    events = sorted(trace.of_category("user_annotation"), key=lambda event: (event.start_us, -event.duration_us))
    return capture_table(
        RANGE_COLUMNS,
        len(events),
        {
            "name": names.codes([event.name for event in events]),
            **_span(events, start_us),
            "thread": [threads[event.tid] for event in events],
            "is_nested": [1] * len(events),
        },
    )


def _calls(
    events: Sequence[KinetoEvent], names: Names, start_us: float, threads: Mapping[int | str, int]
) -> tuple[Table, dict[int, int]]:
    events = sorted(events, key=lambda event: event.start_us)
    table = capture_table(
        CALL_COLUMNS,
        len(events),
        {
            "name": names.codes([call_name(event.name) for event in events]),
            **_span(events, start_us),
            "thread": [threads[event.tid] for event in events],
        },
    )
    rows = {correlation: row for row, event in enumerate(events) if (correlation := _int(event, "correlation")) > 0}
    return table, rows


def _int(event: KinetoEvent, *keys: str) -> int:
    """The first of the arguments that is a whole number; -1 where none is."""
    found = (event.args.get(key) for key in keys)
    return next((value for value in found if isinstance(value, int) and not isinstance(value, bool)), -1)


def _float(event: KinetoEvent, key: str) -> float:
    value = event.args.get(key)
    return float(value) if isinstance(value, int | float) else nan


def _kernels(
    events: Sequence[KinetoEvent],
    operators: Sequence[KinetoEvent],
    names: Names,
    start_us: float,
    calls: Mapping[int, int],
) -> Table:
    by_id = {event.external_id: event for event in operators if event.external_id is not None}
    launched_by = [by_id.get(event.external_id or -1) if event.cat == "kernel" else None for event in events]
    classes = [kernel_class(event.name) if event.cat == "kernel" else CLASSES.index("copy") for event in events]
    work = _work_of_kernels(events, launched_by, classes)
    grids = [_three(event.args.get("grid")) for event in events]
    blocks = [_three(event.args.get("block")) for event in events]
    occupancy = np.array([_float(event, "est. achieved occupancy %") for event in events]) / 100
    columns: dict[str, Any] = {
        "name": names.codes([event.name for event in events]),
        "activity": [_ACTIVITY[event.cat] for event in events],
        "kernel_class": classes,
        **_span(events, start_us),
        "device": [_int(event, "device") for event in events],
        "stream": [_int(event, "stream") for event in events],
        "call": [calls.get(_int(event, "correlation"), -1) for event in events],
        "operator": [-1 if operator is None else names.code(operator.name) for operator in launched_by],
        "registers": [_int(event, "registers per thread") for event in events],
        "shared_bytes": [_int(event, "shared memory") for event in events],
        "occupancy_fraction": occupancy,
        "flops": [flops for flops, _ in work],
        "num_bytes": [
            _float(event, "bytes") if event.cat != "kernel" else moved
            for event, (_, moved) in zip(events, work, strict=True)
        ],
    }
    for place, axis in enumerate("xyz"):
        columns[f"grid_{axis}"] = [grid[place] for grid in grids]
        columns[f"block_{axis}"] = [block[place] for block in blocks]
    return capture_table(KERNEL_COLUMNS, len(events), columns)


def _three(value: Any) -> tuple[int, int, int]:
    return (value[0], value[1], value[2]) if isinstance(value, list) and len(value) == 3 else (-1, -1, -1)


def _work_of_kernels(
    events: Sequence[KinetoEvent], operators: Sequence[KinetoEvent | None], classes: Sequence[int]
) -> list[tuple[float, float]]:
    """FLOPs and bytes of the kernels that alone do the work of an operator; unknown of all others."""
    doing: dict[int | None, list[int]] = {}
    for place, (operator, code) in enumerate(zip(operators, classes, strict=True)):
        if operator is not None and CLASSES[code] in ("gemm", "attention"):
            doing.setdefault(operator.external_id, []).append(place)
    work = [(nan, nan)] * len(events)
    for places in doing.values():
        operator = operators[places[0]]
        if len(places) == 1 and operator is not None:
            work[places[0]] = operator_work(operator)
    return work


def _num_graphed(events: Sequence[KinetoEvent]) -> int:
    """Kernels whose launch launched others too, as that of a CUDA graph does."""
    correlations = np.array([_int(event, "correlation") for event in events if event.cat == "kernel"], np.int64)
    different, counts = np.unique(correlations[correlations > 0], return_counts=True)
    return int(counts[counts > 1].sum()) if len(different) else 0


def outermost(operators: Sequence[KinetoEvent]) -> list[KinetoEvent]:
    """The operators that no other operator of their thread holds, in the order of their start."""
    found, ends = [], dict[int | str, float]()
    for event in sorted(operators, key=lambda event: (event.start_us, -event.duration_us)):
        if event.start_us >= ends.get(event.tid, -np.inf):
            found.append(event)
            ends[event.tid] = event.start_us + event.duration_us
    return found


def _host_operators(
    operators: Sequence[KinetoEvent],
    names: Names,
    start_us: float,
    threads: Mapping[int | str, int],
    ranges: Table,
) -> Table:
    events = outermost(operators)
    work = [operator_work(event) for event in events]
    span = _span(events, start_us)
    thread = [threads[event.tid] for event in events]
    codes = names.codes([event.name for event in events])
    inside = capture_table(CALL_COLUMNS, len(events), {"name": codes, **span, "thread": thread})
    columns = {
        "name": codes,
        "activity": [OPERATOR] * len(events),
        "kernel_class": [kernel_class(event.name) for event in events],
        **span,
        "device": [-1] * len(events),
        "stream": thread,
        "range": innermost_ranges(inside, ranges) if len(ranges) else None,
        "operator": codes,
        "flops": [flops for flops, _ in work],
        "num_bytes": [moved for _, moved in work],
    }
    return capture_table(KERNEL_COLUMNS, len(events), columns)


# --------------------------------------------------------------------------------------------------- work by shapes


def operator_work(operator: KinetoEvent) -> tuple[float, float]:
    """FLOPs and bytes of an operator by the shapes of its inputs; NaN where they are unknown."""
    shape = gemm_shape(operator)
    if shape is not None:
        batch, m, n, k = shape
        item_bytes = _BYTES.get(next(iter(operator.input_formats), ""), nan)
        return 2.0 * batch * m * n * k, batch * (m * k + k * n + m * n) * item_bytes
    if operator.name.startswith("aten::") and "scaled_dot_product" in operator.name:
        return _attention_flops(operator), nan
    return nan, nan


def gemm_shape(operator: KinetoEvent) -> tuple[int, int, int, int] | None:
    """(batch, m, n, k) of a matrix product with recorded shapes; None of any other operator."""
    of = _GEMM_SHAPES.get(operator.name)
    tensors = [shape for shape in operator.input_shapes if _is_shape(shape)]
    if of is None or len(tensors) < 2:
        return None
    try:
        return of(tensors)
    except (IndexError, ValueError):
        return None


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, list) and len(shape) > 0 and all(isinstance(length, int) for length in shape)


def _product(tensors: list[list[int]]) -> tuple[int, int, int, int]:
    """`[m, k] x [k, n]`, with any number of equal batch dimensions before."""
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
    """4 x pairs x width: two products; where the mask is causal, a query of a whole prompt sees half of the keys."""
    tensors = [shape for shape in operator.input_shapes if _is_shape(shape) and len(shape) == 4]
    if len(tensors) < 2:
        return nan
    batch, heads, queries, width = map(float, tensors[0])
    keys = float(tensors[1][2])
    concrete = operator.args.get("Concrete Inputs")
    is_causal = isinstance(concrete, list) and "True" in concrete[4:6]
    pairs = queries * keys - queries * queries / 2 if is_causal else queries * keys
    return 4.0 * batch * heads * pairs * width
