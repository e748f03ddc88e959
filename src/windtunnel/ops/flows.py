"""Collectives as point-to-point flows: who sends how much to whom, and after which other flows.

Every function returns `Flows`. The rings, PXN hops, NVLS and all-to-all of `SIMAI` layouts are those of SimAI 1.6's
`MockNcclGroup.cc`, which mocks NCCL 2.20; the tables that both write are equal. NCCL layouts differ where NCCL does:
rings enter and leave a server on the same rail.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.errors import InputError

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


@dataclass(frozen=True, eq=False)
class Rings:
    """One ring a channel: `order[c]` are node ids in the order in which data passes them."""

    order: Ids
    """(num_channels, num_ranks)"""
    via: Ids
    """(num_channels, num_ranks) for each hop from `order[c, k]` to the next, the GPU of the same server that sends it
    on over its own NIC; -1 where the sender does that itself."""

    @property
    def num_channels(self) -> int:
        return len(self.order)

    @property
    def num_ranks(self) -> int:
        return int(self.order.shape[1])


def simai_rings(ranks: Ids, num_servers: int, pxn: bool = False) -> Rings:
    """SimAI's rings: in channel c every server is entered at local rank c and left at c - 1, hence onto another rail.

    With `pxn` the last rank of a server hands over to the one on the rail of the entry (NCCL's PXN) first.
    """
    local = _by_server(ranks, num_servers)
    size = local.shape[1]
    shift = (np.arange(size)[:, None] + np.arange(size)) % size
    order = local[:, shift].transpose(1, 0, 2).reshape(size, -1)
    via = np.full_like(order, -1)
    if pxn and num_servers > 1 and size > 1:
        via[:, size - 1 :: size] = order[:, ::size]
    return Rings(order, via)


def nccl_rings(ranks: Ids, num_servers: int) -> Rings:
    """Rings that stay on their rail between servers: even servers pass data upwards, odd ones back.

    This is what NCCL finds with `NCCL_CROSS_NIC=2` on servers with a NIC for each GPU (src/graph/search.cc, 2.20: rings
    of even and odd nodes swap their first and last NIC). An odd number of servers leaves one hop across rails.
    """
    local = _by_server(ranks, num_servers)
    size = local.shape[1]
    shift = (np.arange(size)[:, None] + np.arange(size)) % size
    order = local[:, shift].transpose(1, 0, 2)
    order[:, 1::2] = order[:, 1::2, ::-1]
    order = order.reshape(size, -1)
    return Rings(order, np.full_like(order, -1))


def _by_server(ranks: Ids, num_servers: int) -> Ids:
    if num_servers < 1 or len(ranks) % num_servers:
        raise InputError(f"{len(ranks)} ranks do not spread evenly over {num_servers} servers")
    return np.asarray(ranks, np.int32).reshape(num_servers, -1)


def ring(rings: Rings, chunk_bytes: int, num_steps: int, reduction: Reduction = Reduction.NONE) -> Flows:
    """`num_steps` times, every rank sends a chunk to the next as soon as the one before has arrived.

    An all-reduce has 2 (n - 1) steps, an all-gather or a reduce-scatter n - 1 (Thakur, Rabenseifner and Gropp,
    "Optimization of Collective Communication Operations in MPICH", 2005). Flows are numbered by channel, step and rank.
    """
    if num_steps < 1 or chunk_bytes < 1:
        raise InputError(
            f"{chunk_bytes} bytes a chunk in {num_steps} steps is nothing to send",
            "give at least as many bytes as ranks x channels, and two ranks",
        )
    tables = [_hops(rings.order[c], rings.via[c]) for c in range(rings.num_channels)]
    per_step = [len(table[0]) for table in tables]
    pieces = []
    first = 0
    for channel, (source, destination, hop, after, before) in enumerate(tables):
        hops = per_step[channel]
        steps = np.arange(num_steps)[:, None]
        # A flow inside a hop follows its first half in the same step, any other what arrived in the step before.
        parent = np.where(after >= 0, first + steps * hops + after, first + (steps - 1) * hops + before)
        parent[0, after < 0] = -1
        pieces.append((np.tile(source, num_steps), np.tile(destination, num_steps), np.tile(hop, num_steps), parent))
        first += num_steps * hops
    parent = np.concatenate([piece[3].ravel() for piece in pieces])
    counts = np.array(per_step) * num_steps
    return flows_of(
        np.concatenate([piece[0] for piece in pieces]),
        np.concatenate([piece[1] for piece in pieces]),
        chunk_bytes,
        parents=(np.concatenate([[0], np.cumsum(parent >= 0)]), parent[parent >= 0]),
        channel=np.repeat(np.arange(len(counts)), counts),
        step=np.concatenate([np.repeat(np.arange(num_steps), hops) for hops in per_step]),
        num_steps=num_steps,
        hop=np.concatenate([piece[2] for piece in pieces]),
        connection=np.repeat(np.arange(len(counts)), counts),
        reduction=reduction,
    )


def _hops(order: Ids, via: Ids) -> tuple[Ids, Ids, NDArray[np.int8], NDArray[np.int64], NDArray[np.int64]]:
    """One step of a ring, by sending rank: ends, kind, and the flows that come before in this step and the last.

    Returns:
        (source, destination, hop, after, before): `after` is a position in the step or -1; `before` is the position of
        the flow that delivers to this source.
    """
    by_rank = np.argsort(order, kind="stable")
    following = np.roll(order, -1)
    has_via = via >= 0
    rows = []
    for k in by_rank:
        if has_via[k]:
            rows.append((order[k], via[k], Hop.RING, -1))
            rows.append((via[k], following[k], Hop.PXN_INIT, len(rows) - 1))
        else:
            rows.append((order[k], following[k], Hop.RING, -1))
    source, destination, hop, after = (np.array(column) for column in zip(*rows, strict=True))
    handed_over = set(after[after >= 0].tolist())
    delivers = {int(destination[i]): i for i in range(len(rows)) if i not in handed_over}
    before = np.array([delivers[int(s)] for s in source])
    return source.astype(np.int32), destination.astype(np.int32), hop.astype(np.int8), after, before


def all_to_all(ranks: Ids, size_bytes: int | NDArray[np.integer]) -> Flows:
    """Every rank sends to every other at once; `size_bytes` is what one rank holds, or a matrix [from, to]."""
    ranks = np.asarray(ranks, np.int32)
    n = len(ranks)
    one, other = np.nonzero(~np.eye(n, dtype=bool))
    if np.ndim(size_bytes) == 2:
        matrix = np.asarray(size_bytes, np.int64)
        if matrix.shape != (n, n) or (matrix < 0).any():
            raise InputError(
                f"the traffic matrix is {matrix.shape}; {n} x {n} numbers of bytes, none negative, are needed"
            )
        each: NDArray[np.integer] | int = matrix[one, other]
        keep = matrix[one, other] > 0
        one, other, each = one[keep], other[keep], matrix[one, other][keep]
    else:
        each = int(size_bytes) // n
    if len(one) == 0 or np.min(each) < 1:
        raise InputError(f"an all-to-all of {np.max(size_bytes)} bytes over {n} ranks has nothing to send")
    return flows_of(ranks[one], ranks[other], each, connection=np.zeros(len(one), np.int32))


def all_to_all_by_rail(
    ranks: Ids,
    num_servers: int,
    sent_bytes: NDArray[np.int64],
    forwarded_bytes: NDArray[np.int64],
    num_chunks: int = 1,
) -> Flows:
    """An all-to-all in two hops: over the own rail to the server of the receiver, then inside it (DeepEP's).

    Args:
        ranks: (n,) node ids, server after server.
        num_servers: how many servers they fill.
        sent_bytes: (n, num_servers) what each rank sends to each server; a token that two GPUs of a server need travels
            once (DeepSeek-V3 technical report, section 3.2.2).
        forwarded_bytes: (n, n) what each rank sends to each other in all; the rank of the receiver's server on the same
            rail forwards it. Inside the own server it goes directly.
        num_chunks: a chunk is forwarded when it has arrived, while the next is on its way.
    """
    local = _by_server(ranks, num_servers)
    size = local.shape[1]
    rows: list[tuple[int, int, int, int, int, int]] = []

    def add(source: int, destination: int, total: int, chunk: int, rank: int, parent: int) -> int:
        """A chunk's flow, if it has bytes; its number, or -1."""
        part = total * (chunk + 1) // num_chunks - total * chunk // num_chunks
        if part == 0 or source == destination:
            return -1
        rows.append((source, destination, part, parent, 2 * chunk + (parent >= 0), rank))
        return len(rows) - 1

    for rank, other, chunk in np.ndindex(len(ranks), num_servers, num_chunks):
        server, k = divmod(rank, size)
        landing = add(local[server, k], local[other, k], int(sent_bytes[rank, other]), chunk, rank, -1)
        for j in range(size):
            add(local[other, k], local[other, j], int(forwarded_bytes[rank, other * size + j]), chunk, rank, landing)
    if not rows:
        raise InputError("the all-to-all has nothing to send")
    source, destination, each, parent, step, connection = (
        np.array(column, np.int64) for column in zip(*rows, strict=True)
    )
    ptr = np.concatenate([[0], np.cumsum(parent >= 0)])
    return flows_of(
        source,
        destination,
        each,
        parents=(ptr, parent[parent >= 0]),
        num_steps=2 * num_chunks,
        step=step,
        connection=connection,
    )


def nvls(ranks: Ids, switch: int, size_bytes: int, num_chunks: int = 4) -> Flows:
    """An all-reduce in the NVSwitch: every GPU sends its chunk up, the switch adds them and sends the sum to all.

    A chunk follows the one before on the same pair.
    """
    n = len(ranks)
    each = size_bytes // num_chunks
    if each < 1:
        raise InputError(f"{size_bytes} bytes do not fill {num_chunks} chunks")
    gpus = np.asarray(ranks, np.int64)
    up = np.full(n, switch, np.int64)
    ptr = [0]
    parents: list[int] = []
    for chunk in range(num_chunks):
        first = chunk * 2 * n
        for k in range(2 * n):
            if k >= n:
                parents.extend(range(first, first + n))
            if chunk > 0:
                parents.append(first + k - 2 * n)
            ptr.append(len(parents))
    return flows_of(
        np.tile(np.concatenate([gpus, up]), num_chunks),
        np.tile(np.concatenate([up, gpus]), num_chunks),
        each,
        parents=(np.array(ptr), np.array(parents)),
        step=np.repeat(np.arange(num_chunks), 2 * n),
        num_steps=num_chunks,
        hop=Hop.NVLS,
    )


def send_recv(source: int, destination: int, size_bytes: int, num_channels: int = 1) -> Flows:
    """One transfer, cut over `num_channels` connections."""
    if size_bytes < 1 or source == destination:
        raise InputError(f"a transfer of {size_bytes} bytes from {source} to {destination} moves nothing")
    cut = np.arange(num_channels + 1) * size_bytes // num_channels
    each = np.diff(cut)
    each = each[each > 0]
    n = len(each)
    return flows_of(np.full(n, source), np.full(n, destination), each, channel=np.arange(n), connection=np.arange(n))


def pipeline(order: Ids, size_bytes: int, num_chunks: int) -> Flows:
    """A broadcast along a chain: `order[0]` has the data, every rank passes chunks on as they arrive."""
    n, hops = len(order), len(order) - 1
    if n < 2 or size_bytes < num_chunks:
        raise InputError(f"a broadcast of {size_bytes} bytes over {n} ranks in {num_chunks} chunks has nothing to send")
    flow = np.arange(num_chunks * hops).reshape(num_chunks, hops)
    parents = np.full((num_chunks, hops, 2), -1)
    parents[1:, :, 0] = flow[:-1]
    parents[:, 1:, 1] = flow[:, :-1]
    keep = parents.reshape(-1, 2) >= 0
    return flows_of(
        np.tile(order[:-1], num_chunks),
        np.tile(order[1:], num_chunks),
        size_bytes // num_chunks,
        parents=(np.concatenate([[0], np.cumsum(keep.sum(1))]), parents.reshape(-1, 2)[keep]),
        step=np.repeat(np.arange(num_chunks), hops),
        num_steps=num_chunks,
    )


def double_binary_tree(ranks: Ids, num_servers: int, size_bytes: int, num_chunks: int) -> Flows:
    """An all-reduce over pairs of binary trees of servers, one pair a channel, with chains inside the servers.

    Channel c enters every server at local rank c, whence a chain goes on; the two trees of a pair have half of the
    channel's data each. Every inner server of one tree is a leaf of the other, so that each link carries the data once
    each way (Sanders, Speck and Traff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009;
    NCCL from 2.4 on). In one server the ranks themselves are the trees' nodes.
    """
    local = _by_server(ranks, num_servers)
    if num_servers == 1:
        local = local.T
    nodes, size = local.shape
    each = size_bytes // (2 * size) // num_chunks
    if len(ranks) < 2 or each < 1:
        raise InputError(f"a tree all-reduce of {size_bytes} bytes over {len(ranks)} ranks sends nothing")
    tables = []
    for channel in range(size):
        order = np.roll(local, -channel, axis=1)
        for tree in range(2):
            # The second tree mirrors the first, shifted by one where their number is odd (NCCL src/graph/trees.cc).
            names = np.arange(nodes)
            if tree == 1:
                names = names[::-1] if nodes % 2 == 0 else (names + 1) % nodes
            tables.append(_tree(order[names].ravel(), _with_chains(_binary_tree(nodes), size), each, num_chunks))
    every = together(tables)
    return replace(every, channel=every.group, connection=every.group, group=np.zeros(len(every), np.int32))


def _with_chains(up: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """(nodes x size,) parents where each node of a tree is the head of a chain of `size` ranks."""
    ranks = np.arange(len(up) * size)
    heads = np.where(up < 0, -1, up * size)
    return np.where(ranks % size == 0, heads[ranks // size], ranks - 1)


def _binary_tree(n: int) -> NDArray[np.int64]:
    """(n,) the parent of each rank in a binary tree in symmetric order, -1 for the root (NCCL `ncclGetBtree`)."""
    up = np.full(n, -1)
    for rank in range(n):
        bit = 1
        while bit < n and not rank & bit:
            bit <<= 1
        if rank == 0:
            continue
        parent = (rank ^ bit) | (bit << 1)
        up[rank] = parent if parent < n else rank ^ bit
    return up


def _tree(ranks: Ids, up: NDArray[np.int64], chunk_bytes: int, num_chunks: int) -> Flows:
    """Chunks up a tree and down again: flow k of a chunk is that of the k-th rank that has a parent."""
    inner = np.flatnonzero(up >= 0)
    count = len(inner)
    position = np.full(len(up), -1)
    position[inner] = np.arange(count)
    from_children: list[list[int]] = [[] for _ in up]
    for rank in inner.tolist():
        from_children[up[rank]].append(int(position[rank]))
    above = [int(up[rank]) for rank in inner]
    downward = [from_children[rank] if up[rank] < 0 else [count + int(position[rank])] for rank in above]
    parents = [*(from_children[rank] for rank in inner.tolist()), *downward]
    # From the second chunk on, a flow also follows that of the chunk before on the same pair.
    later = [[*each, k - 2 * count] for k, each in enumerate(parents)]
    flat = np.concatenate([np.array([p for each in table for p in each], np.int64) for table in (parents, later)])
    first, rest = (np.array([len(each) for each in table]) for table in (parents, later))
    head, tail = flat[: first.sum()], flat[first.sum() :]
    offsets = 2 * count * np.arange(1, num_chunks)
    lengths = np.concatenate([first, np.tile(rest, num_chunks - 1)])
    source = np.concatenate([ranks[inner], ranks[up[inner]]])
    destination = np.concatenate([ranks[up[inner]], ranks[inner]])
    return flows_of(
        np.tile(source, num_chunks),
        np.tile(destination, num_chunks),
        chunk_bytes,
        parents=(
            np.concatenate([[0], np.cumsum(lengths)]),
            np.concatenate([head, (tail + offsets[:, None]).ravel()]),
        ),
        step=np.repeat(np.arange(num_chunks), 2 * count),
        num_steps=num_chunks,
        hop=Hop.TREE,
    )


def pat(ranks: Ids, chunk_bytes: int) -> Flows:
    """An all-gather in log2(n) rounds: in round k a rank sends the 2^k chunks that it has to the rank 2^k after it.

    Source: Jeaugey, "PAT: a new algorithm for all-gather and reduce-scatter operations at scale", 2025; Bruck et al.,
    1997. A reduce-scatter runs the same flows backwards, in the same time.
    """
    n = len(ranks)
    if n < 2 or chunk_bytes < 1:
        raise InputError(f"an all-gather of {chunk_bytes} bytes a rank over {n} ranks sends nothing")
    rounds = (n - 1).bit_length()
    k = np.arange(rounds)[:, None]
    rank = np.arange(n)
    parent = (k - 1) * n + (rank - 2 ** np.maximum(k - 1, 0)) % n
    parent[0] = -1
    parent = parent.ravel()
    sizes = np.minimum(2**k, n - 2**k) * chunk_bytes
    return flows_of(
        np.tile(ranks, rounds),
        np.asarray(ranks)[((rank + 2**k) % n).ravel()],
        np.broadcast_to(sizes, (rounds, n)).ravel(),
        parents=(np.concatenate([[0], np.cumsum(parent >= 0)]), parent[parent >= 0]),
        step=np.repeat(np.arange(rounds), n),
        num_steps=rounds,
        hop=Hop.PAT,
    )
