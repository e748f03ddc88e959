"""Rows of measured tables that no engine would show again, which pricing leaves out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.pricing.aiconfigurator.collection import Rows
from windtunnel.pricing.table import Floats

SLOW_CURVE = 2.5
"""A curve is suspect that lies this many times as far above the bound as the median curve of its format and spread, and
as the same shape of the same kernel in another format or spread of the file.

TensorRT-LLM 1.3.0rc20's experts on H100 and H200 that are left out take 2.5 to 5.6 times the roofline's time in bf16
or per-tensor fp8, in one spread of tokens or two, and 0.9 to 1.5 times in the others: the autotuner had not found its
kernel. What all formats and spreads share, such as untuned Triton kernels of 512 experts, is no such fault."""


_SAMPLES = 7
"""Levels of the axis at which curves are compared with the bound: they are evenly spread over those of the file."""


def slow_curves(
    rows: Rows,
    curve: tuple[str, ...],
    axis: str,
    formats: NDArray[np.intp],
    bound_s: Callable[[NDArray[np.intp]], Floats],
) -> NDArray[np.bool_]:
    """Return a mask of the rows of `SLOW_CURVE`s.

    Args:
        rows: every row of a file.
        curve: columns that tell one curve from another within a format.
        axis: column along which a curve runs.
        formats: format and spread of each row.
        bound_s: gives the least seconds of some rows' work on the device.
    """
    levels = np.unique(rows.columns[axis])
    few = levels[np.linspace(0, len(levels) - 1, _SAMPLES).astype(np.intp)]
    sample = np.flatnonzero(np.isin(rows.columns[axis], few))
    shapes = _keys([*(rows.columns[name] for name in curve), rows.kernel_codes])
    keys = shapes * (int(formats.max()) + 1) + formats
    curves, first, codes = np.unique(keys[sample], return_index=True, return_inverse=True)
    log_ratio = np.log(rows.seconds[sample] / bound_s(sample))
    excess = np.bincount(codes, log_ratio) / np.bincount(codes)
    of_format = formats[sample][first]
    for form in np.unique(of_format):
        excess[of_format == form] -= np.median(excess[of_format == form])
    _, shape = np.unique(shapes[sample][first], return_inverse=True)
    least = np.full(int(shape.max()) + 1, np.inf)
    np.minimum.at(least, shape, excess)
    slow = excess - np.maximum(least[shape], 0.0) > np.log(SLOW_CURVE)
    return np.isin(keys, curves[slow]) if slow.any() else np.zeros(len(rows), dtype=bool)


def _keys(columns: Sequence[NDArray[Any]]) -> NDArray[np.int64]:
    """Return a number for each combination of whole numbers, equal where they are; int64 wraps around on purpose."""
    keys = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        keys = keys * 1_000_003 + column.astype(np.int64)
    return keys
