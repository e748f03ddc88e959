"""Operators of a torch.profiler trace as measured tables: its matrix products, whose shapes the trace tells."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from windtunnel.estimate.table import MeasurementTable
from windtunnel.interop.kineto import KinetoEvent, KinetoTrace, kernels_with_operators

FORMATS = {"c10::BFloat16": "bf16", "float": "fp32"}
"""Torch's name of a tensor's type -> ours."""

PRODUCTS = {"aten::mm": (0, 1), "aten::addmm": (1, 2)}
"""Operator -> which of its inputs are the two factors, `[m, k]` and `[k, n]`."""


def gemm_tables(trace: KinetoTrace, source: str) -> list[MeasurementTable]:
    """The matrix products of a trace, one table a format; the device's time where it has kernels, else the host's.

    Args:
        trace: recorded with shapes; products whose shapes or types are unknown are left out.
        source: a name for people.
    """
    rows: dict[str, list[tuple[int, int, int, float]]] = {}
    for event, seconds in _timed(trace):
        found = _product(event)
        if found is not None and seconds > 0:
            wanted, m, n, k = found
            rows.setdefault(wanted, []).append((m, n, k, seconds))
    return [_table(wanted, found, source) for wanted, found in sorted(rows.items())]


def _timed(trace: KinetoTrace) -> Iterator[tuple[KinetoEvent, float]]:
    """Each operator with the seconds of the kernels that it launched, or of itself in a trace without a device."""
    kernels: dict[int, list[Any]] = {}
    for kernel, operator in kernels_with_operators(trace):
        if operator is not None and operator.external_id is not None:
            kernels.setdefault(operator.external_id, [operator, 0.0])[1] += kernel.duration_us * 1e-6
    if kernels:
        yield from ((operator, seconds) for operator, seconds in kernels.values())
    else:
        yield from ((event, event.duration_us * 1e-6) for event in trace.of_category("cpu_op"))


def _product(event: KinetoEvent) -> tuple[str, int, int, int] | None:
    if event.name not in PRODUCTS:
        return None
    left, right = PRODUCTS[event.name]
    shapes, formats = event.input_shapes, event.input_formats
    if max(left, right) >= min(len(shapes), len(formats)) or formats[left] not in FORMATS:
        return None
    if len(shapes[left]) != 2 or len(shapes[right]) != 2 or shapes[left][1] != shapes[right][0]:
        return None
    return FORMATS[formats[left]], shapes[left][0], shapes[right][1], shapes[left][1]


def _table(wanted: str, rows: list[tuple[int, int, int, float]], source: str) -> MeasurementTable:
    m, n, k, seconds = (np.array(column, np.float64) for column in zip(*rows, strict=True))
    return MeasurementTable("gemm", {"n": n, "k": k}, {"m": m}, seconds, source, {"format": wanted})
