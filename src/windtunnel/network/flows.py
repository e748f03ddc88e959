"""Point-to-point flows: sender, receiver, bytes, and the flows that must complete first."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.compiled.arrays import Floats, Ints

Ids = NDArray[np.int32]


class Hop(IntEnum):
    """Why a flow exists, as SimCCL's `conn_type` says."""

    RING = 0
    PXN_INIT = 1
    """The network half of a hop whose other half went over NVLink to the GPU on the right rail."""
    NVLS = 2
    TREE = 3
    PAT = 4


class Reduction(IntEnum):
    """Which chunks SimAI's ranks add up before they pass them on (`NcclTreeFlowModel::insert_packets`)."""

    NONE = 0
    EVERY = 1
    """All of a channel's n chunks but the first: a reduce-scatter's."""
    ALTERNATE = 2
    """The same, switched on and off whenever one of the rank's channels begins its next n: an all-reduce's."""


@dataclass(frozen=True, eq=False)
class Flows:
    """Flows and their parents; all arrays but `parent` and `parent_ptr` are (num_flows,)."""

    source: Ids
    destination: Ids
    """Node ids of the fabric."""
    size_bytes: Ints
    channel: Ids
    step: Ids
    """Position in the channel's sequence of chunks."""
    hop: NDArray[np.int8]
    connection: Ids
    """Flows with the same number use the same connection, hence the same path."""
    group: Ids
    """Number of the flow's collective, where several run at once."""
    parent_ptr: Ints
    """(num_flows + 1,) where each flow's parents start in `parent`."""
    parent: Ids
    """Flows that must complete first."""
    start_s: Floats
    """Earliest start."""
    delay_s: Floats
    """Between the completion of the last parent and the first byte."""
    reduction: NDArray[np.int8]
    """`Reduction` that SimAI's sender does first."""

    def __len__(self) -> int:
        return len(self.source)

    def parents_of(self, flow: int) -> Ids:
        """Return the flows that must complete before `flow`."""
        return self.parent[self.parent_ptr[flow] : self.parent_ptr[flow + 1]]


_COLUMNS = {
    **dict.fromkeys(("source", "destination", "channel", "step", "connection", "group"), np.int32),
    **dict.fromkeys(("hop", "reduction"), np.int8),
    **dict.fromkeys(("start_s", "delay_s"), np.float64),
    "size_bytes": np.int64,
}
"""Column with a row for each flow -> its type."""

Parents = tuple[NDArray[np.integer], NDArray[np.integer]]
"""(pointer, parent): the flows that flow f waits for are `parent[pointer[f] : pointer[f + 1]]`."""


def parents_from(parent: NDArray[np.integer]) -> Parents:
    """Return the parents given as one row for each flow, (num_flows,) or (num_flows, most_parents); -1 is none."""
    rows = parent.reshape(len(parent), -1)
    is_parent = rows >= 0
    return np.concatenate([[0], np.cumsum(is_parent.sum(axis=1))]), rows[is_parent]


def flows_of(
    source: NDArray[np.integer],
    destination: NDArray[np.integer],
    size_bytes: NDArray[np.integer] | int,
    *,
    parents: Parents | None = None,
    **columns: NDArray[Any] | float,
) -> Flows:
    """Make flows from the columns of `Flows`; those that are not given are 0: one collective on one channel.

    A scalar fills its column. Without `parents` no flow waits.
    """
    n = len(source)
    pointer, parent = parents if parents is not None else (np.zeros(n + 1), np.zeros(0))
    given = columns | {"source": source, "destination": destination, "size_bytes": size_bytes}
    filled: dict[str, Any] = given | {name: _column(n, given.get(name, 0), kind) for name, kind in _COLUMNS.items()}
    return Flows(
        **filled, parent_ptr=np.ascontiguousarray(pointer, np.int64), parent=np.ascontiguousarray(parent, np.int32)
    )


def with_columns(flows: Flows, **columns: NDArray[Any] | float) -> Flows:
    """Return the same flows with other values in the columns that are given; a scalar fills its column."""
    typed: dict[str, Any] = {name: _column(len(flows), values, _COLUMNS[name]) for name, values in columns.items()}
    return replace(flows, **typed)


def in_channels(tables: Sequence[Flows]) -> Flows:
    """Join the flows of one collective's channels, numbered in order, each on a connection of its own."""
    flows = together(tables)
    return replace(flows, channel=flows.group, connection=flows.group, group=_column(len(flows), 0, np.int32))


def children_of(parent_ptr: Ints, parent: Ids) -> tuple[Ints, Ids]:
    """Return the flows that wait for each flow, the inverse of its parents, as (pointer, child)."""
    num_flows = len(parent_ptr) - 1
    child = np.repeat(np.arange(num_flows, dtype=np.int32), np.diff(parent_ptr))
    pointer = np.zeros(num_flows + 1, np.int64)
    np.cumsum(np.bincount(parent, minlength=num_flows), out=pointer[1:])
    # Pairs as numbers: they sort in a tenth of the time of `argsort`, and children stay in order.
    pairs = parent.astype(np.int64) << 32
    pairs |= child
    pairs.sort()
    return pointer, (pairs & 0xFFFFFFFF).astype(np.int32)


def gathered(pointer: NDArray[np.integer], rows: NDArray[np.integer]) -> tuple[Ints, Ints]:
    """Return where the items of some rows start, taken alone, and the positions of these among the items of all."""
    lengths = pointer[rows + 1] - pointer[rows]
    start = np.concatenate([[0], np.cumsum(lengths)])
    return start, np.repeat(pointer[rows] - start[:-1], lengths) + np.arange(start[-1])


def _column(num_flows: int, values: Any, kind: Any) -> NDArray[Any]:
    """Return a column; a scalar fills it, and takes the memory of one row."""
    return np.broadcast_to(np.asarray(values, kind), num_flows)


def _concatenated(columns: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Join columns one below the other; those that one scalar fills stay so."""
    if all(len(column) and column.strides == (0,) for column in columns) and len({column[0] for column in columns}) < 2:
        return _column(sum(map(len, columns)), columns[0][0], columns[0].dtype)
    return np.concatenate(columns)


def together(tables: Sequence[Flows]) -> Flows:
    """Join the flows of several collectives that run at the same time, numbered in order as `group`."""
    offsets = np.cumsum([0, *(len(table) for table in tables)])
    edges = np.cumsum([0, *(len(table.parent) for table in tables)])
    columns = {name: _concatenated([getattr(table, name) for table in tables]) for name in _COLUMNS if name != "group"}
    return Flows(
        **columns,
        group=np.repeat(np.arange(len(tables), dtype=np.int32), [len(table) for table in tables]),
        parent_ptr=np.concatenate(
            [np.zeros(1, np.int64), *(table.parent_ptr[1:] + edge for table, edge in zip(tables, edges, strict=False))]
        ),
        parent=np.concatenate(
            [table.parent + np.int32(offset) for table, offset in zip(tables, offsets, strict=False)]
        ).astype(np.int32),
    )
