"""Rows of a grid that lie on one line, and times that rise along every line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]

_MOST_PASSES = 20


def grouped(keys: Sequence[NDArray[Any]], along: Sequence[Floats] = ()) -> list[Ints]:
    """Return the rows of each group with equal `keys`, sorted by `along`; groups and columns in lexical order."""
    order = np.lexsort([*keys, *along][::-1])
    sorted_keys = np.column_stack([key[order] for key in keys])
    starts = np.flatnonzero(np.any(sorted_keys[1:] != sorted_keys[:-1], axis=1)) + 1
    return np.split(order, starts) if len(order) else []


def rising(axes: Sequence[Floats], seconds: Floats) -> Floats:
    """Return the seconds [n] nearest to those at points of a grid that never fall along an axis (columns [n]).

    More tokens are not less work: a measured curve falls by noise, or where padding would reach the faster kernel too.
    Near is by the squares of logarithms. Surfaces are pooled along one axis after the other until both rise.
    """
    lines = [_lines(axes, axis) for axis in range(len(axes))]
    values = np.log(seconds)
    for _ in range(_MOST_PASSES):
        before = values.copy()
        for rows in (rows for along in lines for rows in along):
            values[rows] = pooled(values[rows])
        if np.array_equal(before, values):
            break
    else:
        for rows in (rows for along in lines for rows in along):  # what pooling in turn has not settled is lifted
            values[rows] = np.maximum.accumulate(values[rows])
    return np.exp(values)


def _lines(axes: Sequence[Floats], axis: int) -> list[Ints]:
    """Return the rows of every line along `axis`, sorted: all other coordinates are equal."""
    others = [column for index, column in enumerate(axes) if index != axis]
    if not others:
        return [np.argsort(axes[axis], kind="stable")]
    return [rows for rows in grouped(others, [axes[axis]]) if len(rows) > 1]


def pooled(values: Floats) -> Floats:
    """Return the rising sequence [n] nearest to `values` in squares (pool adjacent violators; Ayer et al. 1955)."""
    blocks: list[tuple[float, int]] = []
    for value in values.tolist():
        total, count = value, 1
        while blocks and blocks[-1][0] * count > total * blocks[-1][1]:
            before, length = blocks.pop()
            total, count = total + before, count + length
        blocks.append((total, count))
    counts = [count for _, count in blocks]
    return np.repeat([total / count for total, count in blocks], counts)
