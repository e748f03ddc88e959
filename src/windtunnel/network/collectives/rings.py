"""Ring collectives as flows: NCCL's rings and SimAI's."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from windtunnel.errors import InputError
from windtunnel.network.flows import Flows, Hop, Ids, Reduction, Steps, flows_of, parents_from, with_columns


@dataclass(frozen=True, eq=False)
class Rings:
    """One ring a channel: `order[c]` are node ids in the order in which data passes them."""

    order: Ids
    """(num_channels, num_ranks)"""
    via: Ids
    """(num_channels, num_ranks) for each hop from `order[c, k]` to the next, the GPU of the same server whose NIC
    sends it; -1 where it is the sender's own."""

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
    local = by_server(ranks, num_servers)
    size = local.shape[1]
    shift = (np.arange(size)[:, None] + np.arange(size)) % size
    order = local[:, shift].transpose(1, 0, 2).reshape(size, -1)
    via = np.full_like(order, -1)
    if pxn and num_servers > 1 and size > 1:
        via[:, size - 1 :: size] = order[:, ::size]
    return Rings(order, via)


def nccl_rings(ranks: Ids, num_servers: int) -> Rings:
    """Return rings that stay on their rail between servers: even servers pass data upwards, odd ones back.

    This is what NCCL finds with `NCCL_CROSS_NIC=2` on servers with a NIC for each GPU (src/graph/search.cc, 2.20: rings
    of even and odd nodes swap their first and last NIC). An odd number of servers leaves one hop across rails.
    """
    local = by_server(ranks, num_servers)
    size = local.shape[1]
    shift = (np.arange(size)[:, None] + np.arange(size)) % size
    order = local[:, shift].transpose(1, 0, 2)
    order[:, 1::2] = order[:, 1::2, ::-1]
    order = order.reshape(size, -1)
    return Rings(order, np.full_like(order, -1))


def by_server(ranks: Ids, num_servers: int) -> Ids:
    """Reshape `ranks` to (num_servers, ranks_per_server).

    Raises:
        InputError: the ranks do not spread evenly over the servers.
    """
    if num_servers < 1 or len(ranks) % num_servers:
        raise InputError(f"{len(ranks)} ranks do not spread evenly over {num_servers} servers")
    return np.asarray(ranks, np.int32).reshape(num_servers, -1)


def ring(rings: Rings, chunk_bytes: int, num_steps: int, reduction: Reduction = Reduction.NONE) -> Flows:
    """Lay out `num_steps` steps in which every rank sends a chunk to the next once the one before has arrived.

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
    steps = np.concatenate([np.repeat(np.arange(num_steps), hops) for hops in per_step])
    channels = np.repeat(np.arange(len(counts)), counts)
    flows = flows_of(
        np.concatenate([piece[0] for piece in pieces]),
        np.concatenate([piece[1] for piece in pieces]),
        chunk_bytes,
        parents=parents_from(parent),
        steps=Steps(steps, num_steps),
        hop=np.concatenate([piece[2] for piece in pieces]),
        connection=channels,
    )
    return with_columns(flows, channel=channels, reduction=reduction)


def _hops(order: Ids, via: Ids) -> tuple[Ids, Ids, NDArray[np.int8], NDArray[np.int64], NDArray[np.int64]]:
    """Return one step of a ring, by sending rank: ends, kind, and the flows before it in this step and the last.

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
    first_halves = set(after[after >= 0].tolist())
    delivers = {int(destination[i]): i for i in range(len(rows)) if i not in first_halves}
    before = np.array([delivers[int(s)] for s in source])
    return source.astype(np.int32), destination.astype(np.int32), hop.astype(np.int8), after, before
