"""Point-to-point flows: who sends how many bytes to whom, and after which other flows."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
    """Of n chunks of a channel all but the first: a reduce-scatter's."""
    ALTERNATE = 2
    """The same, but a rank changes its mind whenever one of its channels begins its next n: an all-reduce's."""


@dataclass(frozen=True, eq=False)
class Flows:
    """Flows and what each waits for; all arrays but `parent` and `parent_ptr` are (num_flows,)."""

    source: Ids
    destination: Ids
    """Node ids of the fabric."""
    size_bytes: NDArray[np.int64]
    channel: Ids
    step: Ids
    """Position in the channel's sequence of chunks."""
    num_steps: int
    hop: NDArray[np.int8]
    connection: Ids
    """Flows with the same number travel through the same connection, hence on the same path."""
    group: Ids
    """Which collective of several a flow belongs to."""
    parent_ptr: NDArray[np.int64]
    """(num_flows + 1,) where each flow's parents start in `parent`."""
    parent: Ids
    """Flows that must complete before."""
    start_s: NDArray[np.float64]
    """Earliest start."""
    delay_s: NDArray[np.float64]
    """Between the completion of the last parent and the first byte."""
    reduction: NDArray[np.int8]
    """`Reduction`: what SimAI's sender does first."""

    def __len__(self) -> int:
        return len(self.source)

    @property
    def total_bytes(self) -> int:
        return int(self.size_bytes.sum())

    def parents_of(self, flow: int) -> Ids:
        return self.parent[self.parent_ptr[flow] : self.parent_ptr[flow + 1]]


def flows_of(
    source: NDArray[np.integer],
    destination: NDArray[np.integer],
    size_bytes: NDArray[np.integer] | int,
    *,
    parents: tuple[NDArray[np.int64], NDArray[np.integer]] | None = None,
    channel: NDArray[np.integer] | int = 0,
    step: NDArray[np.integer] | int = 0,
    num_steps: int = 1,
    hop: NDArray[np.integer] | int = Hop.RING,
    connection: NDArray[np.integer] | int = 0,
    group: int = 0,
    start_s: NDArray[np.float64] | float = 0.0,
    delay_s: NDArray[np.float64] | float = 0.0,
    reduction: Reduction = Reduction.NONE,
) -> Flows:
    """`Flows` from arrays and scalars; `parents` is `(parent_ptr, parent)`, none where it is left out."""
    n = len(source)

    def full(values: Any, kind: type) -> NDArray[Any]:
        return np.ascontiguousarray(np.broadcast_to(np.asarray(values, kind), n))

    ptr, parent = parents if parents is not None else (np.zeros(n + 1, np.int64), np.zeros(0, np.int32))
    return Flows(
        source=np.ascontiguousarray(source, np.int32),
        destination=np.ascontiguousarray(destination, np.int32),
        size_bytes=full(size_bytes, np.int64),
        channel=full(channel, np.int32),
        step=full(step, np.int32),
        num_steps=num_steps,
        hop=full(hop, np.int8),
        connection=full(connection, np.int32),
        group=full(group, np.int32),
        parent_ptr=np.ascontiguousarray(ptr, np.int64),
        parent=np.ascontiguousarray(parent, np.int32),
        start_s=full(start_s, np.float64),
        delay_s=full(delay_s, np.float64),
        reduction=full(reduction, np.int8),
    )


def together(tables: Sequence[Flows]) -> Flows:
    """Several collectives that run at the same time, numbered in order as `group`."""
    offsets = np.cumsum([0, *(len(table) for table in tables)])
    edges = np.cumsum([0, *(len(table.parent) for table in tables)])
    columns = {
        name: np.concatenate([getattr(table, name) for table in tables])
        for name in (
            "source",
            "destination",
            "size_bytes",
            "channel",
            "step",
            "hop",
            "connection",
            "start_s",
            "delay_s",
            "reduction",
        )
    }
    return Flows(
        **columns,
        num_steps=max(table.num_steps for table in tables),
        group=np.repeat(np.arange(len(tables), dtype=np.int32), [len(table) for table in tables]),
        parent_ptr=np.concatenate(
            [np.zeros(1, np.int64), *(table.parent_ptr[1:] + edge for table, edge in zip(tables, edges, strict=False))]
        ),
        parent=np.concatenate(
            [table.parent + np.int32(offset) for table, offset in zip(tables, offsets, strict=False)]
        ).astype(np.int32),
    )


def with_times(flows: Flows, start_s: float = 0.0, delay_s: float | NDArray[np.float64] = 0.0) -> Flows:
    """The same flows with another earliest start and delay."""
    n = len(flows)
    return replace(
        flows,
        start_s=np.full(n, start_s),
        delay_s=np.ascontiguousarray(np.broadcast_to(np.asarray(delay_s, np.float64), n)),
    )
