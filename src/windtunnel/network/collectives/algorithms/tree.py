"""NCCL's double binary tree as flows."""

from math import log2

import numpy as np
from numpy.typing import NDArray

from windtunnel.errors import InputError
from windtunnel.network.collectives.call import CollectiveCall, Ranks
from windtunnel.network.collectives.closed_forms import (
    TREE_SHARE,
    ClosedForm,
    Latency,
    ring_bytes_per_s,
    tree_network_gain,
)
from windtunnel.network.collectives.rings import CHUNK_BYTES, by_server, num_chunks_of
from windtunnel.network.fabric import MEASURED
from windtunnel.network.flows import Flows, Hop, Ids, flows_of, in_channels, parents_from

OPERATIONS = ("all_reduce",)
NCCL_CODE = 0
MOST_CHUNKS = 64
MOST_FLOWS = 2_000_000
"""Chunks are made larger where there would be more."""
_LL_CHUNK_BYTES = 64 * 1024
"""Of data and flags of the protocol LL: 8 lines of 16 bytes for each of 512 threads (NCCL src/include/device.h)."""


_LL128_CHUNK_BYTES = 120 * 640 * 8 * 15 // 16
"""Of data of LL128: 120 elements of 8 bytes for each of 640 threads, of which a sixteenth are flags (likewise)."""
_CORRECTIONS: dict[str, list[float]] = MEASURED["tree_corrections"]


def _correction(protocol: str, size_bytes: float) -> float:
    """Return by how much NCCL takes trees to be slower at medium sizes."""
    power = int(log2(max(size_bytes / 64, 1.0)))
    return _CORRECTIONS[protocol][power] if power < len(_CORRECTIONS[protocol]) else 1.0


def chunk_bytes(protocol: str, ranks: Ranks, share_bytes: float) -> int:
    """Return the bytes of the chunks in which NCCL sends a tree's share of a channel.

    Chunks are smaller where they fill too few steps. Source: NCCL src/enqueue.cc, `ncclPatternTreeUpDown` of the
    protocol simple, and LL128.
    """
    if protocol == "ll":
        return _LL_CHUNK_BYTES
    size, nodes = ranks.per_server, ranks.num_servers
    if nodes == 1:
        size, nodes = 1, ranks.num_ranks
    steps, depth = 1 + int(log2(nodes)) + 0.1 * size, size - 1 + int(log2(nodes))
    limits: list[tuple[float, int]] = [(depth * 8, 131072), (depth * 4, 65536), (depth, 32768)]
    if protocol == "ll128":
        limits = [(steps * 64 / size, 131072), (steps * 16 / size, 32768)]
    chunk = _LL128_CHUNK_BYTES if protocol == "ll128" else CHUNK_BYTES
    for least_chunks, least_bytes in limits:
        while share_bytes // chunk < least_chunks and chunk > least_bytes:
            chunk //= 2
    return chunk


def fill_bytes(protocol: str, ranks: Ranks, size_bytes: float, rate_over_inside: float) -> float:
    """Return the bytes of the chunks on the way from the last rank to the root and back: one of every channel on each
    hop, which takes less time inside a server where that is faster. Lines of LL pass as they come."""
    if protocol == "ll":
        return 0.0
    num_channels = 2 * ranks.per_server
    share_bytes = size_bytes / num_channels
    num_hops = 2 * ((ranks.per_server - 1) * rate_over_inside + log2(ranks.num_servers))
    return num_hops * num_channels * min(chunk_bytes(protocol, ranks, share_bytes), share_bytes)


CLOSED_FORM = ClosedForm(
    latencies={"ll": Latency(6.8, 0.6, 5.0), "ll128": Latency(14.0, 1.25, 8.5), "simple": Latency(8.4, 4.0, 14.0)},
    applies=lambda op, ranks: op == "all_reduce" and ranks.num_servers > 1,
    steps_us=lambda _op, ranks, near, far: 2 * ((ranks.per_server - 1) * near + log2(ranks.num_servers) * far),
    scale_up_bytes_per_s=lambda ranks: ring_bytes_per_s(ranks) * TREE_SHARE,
    # Its kernel reaches less of the network than an NVLS tree's (NCCL src/graph/tuning.cc has the share for it alone).
    network_gain=lambda ranks: tree_network_gain(ranks) * (TREE_SHARE if ranks.num_servers > 2 else 1.0),
    efa_ll128_share=0.7,  # on four to 32 p5, 32 to 256 MiB (benchmarks/collective_accuracy.py)
    fill_bytes=fill_bytes,
    correction=_correction,
)


def flows(call: CollectiveCall) -> Flows:
    """Return the flows of an all-reduce over pairs of binary trees of servers, one pair a channel, with chains inside
    the servers, in chunks as NCCL pipelines them.

    Channel c enters every server at local rank c, whence a chain continues; each of a pair's two trees has half of
    the channel's data. Every inner server of one tree is a leaf of the other, so that each link carries the data once
    each way (Sanders, Speck and Traff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009;
    NCCL from 2.4 on). In one server the ranks themselves are the trees' nodes.
    """
    num_ranks, local = len(call.gpus), by_server(call.gpus, call.ranks.num_servers)
    if call.ranks.num_servers == 1:
        local = local.T
    nodes, size = local.shape
    share_bytes = call.size_bytes // (2 * size)
    most_chunks = max(1, min(MOST_CHUNKS, MOST_FLOWS // (4 * size * num_ranks * call.num_together)))
    chunks = _chunks(share_bytes, most_chunks, call)
    if num_ranks < 2 or share_bytes < 1:
        raise InputError(f"a tree all-reduce of {call.size_bytes} bytes over {num_ranks} ranks sends nothing")
    tables = []
    for channel in range(size):
        order = np.roll(local, -channel, axis=1)
        for tree in range(2):
            # The second tree mirrors the first, shifted by one where their number is odd (NCCL src/graph/trees.cc).
            names = np.arange(nodes)
            if tree == 1:
                names = names[::-1] if nodes % 2 == 0 else (names + 1) % nodes
            up = _with_chains(_binary_tree(nodes), size)
            in_turn = call.settings.compat == "simai"
            tables.append(_tree(order[names].ravel(), up, chunks, in_turn=in_turn))
    return in_channels(tables)


def _chunks(share_bytes: int, most_chunks: int, call: CollectiveCall) -> NDArray[np.int64]:
    """Return the bytes of all chunks of a tree's share of a channel; the last one is what is left."""
    if call.settings.compat == "simai":
        num_chunks = min(num_chunks_of(share_bytes), most_chunks)
        return np.full(num_chunks, share_bytes // num_chunks)
    chunk = max(chunk_bytes(call.choices.protocol, call.ranks, share_bytes), -(-share_bytes // most_chunks), 1)
    full, rest = divmod(share_bytes, chunk)
    return np.array([chunk] * full + [rest] * (rest > 0))


def _with_chains(up: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Return (nodes x size,) parents where each node of a tree is the head of a chain of `size` ranks."""
    ranks = np.arange(len(up) * size)
    heads = np.where(up < 0, -1, up * size)
    return np.where(ranks % size == 0, heads[ranks // size], ranks - 1)


def _binary_tree(n: int) -> NDArray[np.int64]:
    """Return (n,) parents of ranks in a binary tree in symmetric order, -1 for the root (NCCL `ncclGetBtree`)."""
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


def _tree(ranks: Ids, up: NDArray[np.int64], chunks: NDArray[np.int64], *, in_turn: bool) -> Flows:
    """Send chunks up a tree and down again: flow k of a chunk is that of the k-th rank that has a parent.

    A connection sends one chunk after the other; `in_turn`, as in SimAI, once the chunk before has arrived.
    """
    inner, num_chunks = np.flatnonzero(up >= 0), len(chunks)
    count = len(inner)
    position = np.full(len(up), -1)
    position[inner] = np.arange(count)
    from_children: list[list[int]] = [[] for _ in up]
    for rank in inner.tolist():
        from_children[up[rank]].append(int(position[rank]))
    above = [int(up[rank]) for rank in inner]
    downward = [from_children[rank] if up[rank] < 0 else [count + int(position[rank])] for rank in above]
    parents = [*(from_children[rank] for rank in inner.tolist()), *downward]
    rows = np.full((2 * count, max(map(len, parents))), -1)
    for flow, each in enumerate(parents):
        rows[flow, : len(each)] = each
    first = 2 * count * np.arange(num_chunks)[:, None, None]
    table = np.where(rows >= 0, first + rows, -1)
    if in_turn:
        before = np.where(first > 0, first - 2 * count + np.arange(2 * count)[:, None], -1)
        table = np.concatenate([table, before], axis=2)
    source = np.concatenate([ranks[inner], ranks[up[inner]]])
    destination = np.concatenate([ranks[up[inner]], ranks[inner]])
    return flows_of(
        np.tile(source, num_chunks),
        np.tile(destination, num_chunks),
        np.repeat(chunks, 2 * count),
        parents=parents_from(table.reshape(-1, table.shape[2])),
        step=np.repeat(np.arange(num_chunks), 2 * count),
        hop=Hop.TREE,
    )
