"""How ranks lie on rings, NCCL's and SimAI's, and in how many chunks data passes."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from windtunnel.errors import InputError
from windtunnel.network.fabric import Fabric, NodeKind
from windtunnel.network.flows import Ids, Reduction

CHUNK_BYTES = 512 * 1024
"""A pipelined chunk: NCCL's buffer of 4 MiB in 8 steps (NCCL_BUFFSIZE, NCCL_STEPS)."""


@dataclass(frozen=True, eq=False)
class Rings:
    """One ring a channel: `order[c]` are node ids in the order in which data passes them."""

    order: Ids
    """(num_channels, num_ranks)"""
    via: Ids
    """(num_channels, num_ranks) for each hop from `order[c, k]` to the next, the GPU of the same server whose NIC
    sends it; -1 where it is the sender's own."""
    reduction: Reduction = Reduction.NONE
    """What SimAI's ranks add up before they pass it on."""
    num_groups: int = 1
    """Collectives at once; each has as many channels, those of one after those of the other."""

    @property
    def num_channels(self) -> int:
        return len(self.order)

    @property
    def num_ranks(self) -> int:
        return int(self.order.shape[1])


def simai_rings(ranks: Ids, num_servers: int, pxn: bool = False) -> Rings:
    """Return SimAI's rings: channel c enters every server at local rank c and leaves it at c - 1, onto another rail.

    With `pxn` the last rank of a server hands off to the one on the rail of the entry (NCCL's PXN) first.
    """
    order = _shifted(ranks, num_servers)
    size = len(order)
    order = order.reshape(size, -1)
    via = np.full_like(order, -1)
    if pxn and num_servers > 1 and size > 1:
        via[:, size - 1 :: size] = order[:, ::size]
    return Rings(order, via)


def nccl_rings(ranks: Ids, num_servers: int) -> Rings:
    """Return rings that stay on their rail between servers: even servers pass data upwards, odd ones back.

    This is what NCCL finds with `NCCL_CROSS_NIC=2` on servers with a NIC for each GPU (src/graph/search.cc, 2.20: rings
    of even and odd nodes swap their first and last NIC). An odd number of servers leaves one hop across rails.
    """
    order = _shifted(ranks, num_servers)
    order[:, 1::2] = order[:, 1::2, ::-1]
    order = order.reshape(len(order), -1)
    return Rings(order, np.full_like(order, -1))


def link_rings(fabric: Fabric, ranks: Ids, num_servers: int) -> Rings | None:
    """Return rings over the links between the ranks of a server that no switch joins; None where they do not suffice.

    A full mesh is cut into rings that use all links evenly (Walecki's zigzags, Alspach 2008): (n - 1) / 2 cycles each
    way that share no link, for an even n n - 1 of which two share each; n paths between servers. In two rows one ring
    runs each way.
    """
    local = by_server(ranks, num_servers)
    size = local.shape[1]
    if size == 1 or (fabric.kind == NodeKind.SCALE_UP_SWITCH).any():
        return None
    joined = _joined(fabric, local[0])
    if joined.all():
        paths = _mesh_cycles(size) if num_servers == 1 else _zigzags(size, size)
    else:
        place = np.arange(size)
        paths = np.where(place < size // 2, place, size - 1 - place + size // 2)[None]
        if not joined[paths[0], np.roll(paths[0], -1)].all():
            return None
    if num_servers == 1 and size > 2:
        paths = np.concatenate([paths, paths[:, ::-1]])
    order = local[:, paths].transpose(1, 0, 2)
    order[:, 1::2] = order[:, 1::2, ::-1]
    order = order.reshape(len(order), -1)
    return Rings(order, np.full_like(order, -1))


def _joined(fabric: Fabric, gpus: Ids) -> NDArray[np.bool_]:
    """Return (n, n) whether two GPUs have a link to each other; each has one to itself."""
    source, target = fabric.directions
    place = np.full(fabric.num_nodes, -1)
    place[gpus] = np.arange(len(gpus))
    inside = (place[source] >= 0) & (place[target] >= 0)
    joined = np.eye(len(gpus), dtype=bool)
    joined[place[source[inside]], place[target[inside]]] = True
    return joined


def _zigzags(size: int, num_paths: int) -> Ids:
    """Return (num_paths, size) the path i, i + 1, i - 1, i + 2, ... modulo `size`, for i from 0."""
    step = np.arange(size)
    offset = np.where(step % 2, (step + 1) // 2, -(step // 2))
    return ((np.arange(num_paths)[:, None] + offset) % size).astype(np.int32)


def _mesh_cycles(size: int) -> Ids:
    """Return (num_cycles, size) Hamiltonian cycles of a full mesh: one over each link, two where the size is even."""
    if size == 2:
        return np.array([[0, 1]], np.int32)
    around = _zigzags(size - 1, (size - 1) // 2 if size % 2 else size - 1)
    return np.concatenate([np.full((len(around), 1), size - 1, np.int32), around], axis=1)


def _shifted(ranks: Ids, num_servers: int) -> Ids:
    """Return (channels, servers, ranks of a server): channel c passes each server's ranks from local rank c on."""
    local = by_server(ranks, num_servers)
    size = local.shape[1]
    shift = (np.arange(size)[:, None] + np.arange(size)) % size
    return local[:, shift].transpose(1, 0, 2)


def by_server(ranks: Ids, num_servers: int) -> Ids:
    """Reshape `ranks` to (num_servers, ranks_per_server). InputError where the ranks do not spread evenly over the
    servers."""
    if num_servers < 1 or len(ranks) % num_servers:
        raise InputError(f"{len(ranks)} ranks do not spread evenly over {num_servers} servers")
    return np.asarray(ranks, np.int32).reshape(num_servers, -1)


def num_chunks_of(size_bytes: int, limit: int = 64) -> int:
    """Return in how many chunks NCCL pipelines a number of bytes."""
    return min(max(size_bytes // CHUNK_BYTES, 1), limit)
