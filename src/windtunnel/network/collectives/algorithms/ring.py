"""Rings as flows, and in closed form: NCCL's, or SimAI's."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.errors import InputError
from windtunnel.limits import check_size
from windtunnel.network.collectives.call import CollectiveCall, Ranks
from windtunnel.network.collectives.closed_forms import ClosedForm, Latency
from windtunnel.network.collectives.rings import Rings, link_rings, nccl_rings, simai_rings
from windtunnel.network.flows import Flows, Hop, Ids, Reduction, flows_of, in_channels, parents_from, with_columns

ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
"""Operation -> rounds around the ring."""
OPERATIONS = tuple(ROUNDS)
NCCL_CODE = 1
_REDUCTIONS = {"all_reduce": Reduction.ALTERNATE, "reduce_scatter": Reduction.EVERY}


def _steps_us(op: str, ranks: Ranks, near: float, far: float) -> float:
    rounds = 2 if op == "all_reduce" else 1
    between = rounds * (ranks.num_servers - 1) if ranks.num_servers > 1 else 0
    return (rounds * (ranks.num_ranks - 1) - between) * near + between * far


CLOSED_FORM = ClosedForm(
    latencies={"ll": Latency(6.6, 0.6, 2.7), "ll128": Latency(14.0, 1.9, 4.0), "simple": Latency(8.4, 3.4, 14.0)},
    applies=lambda op, _ranks: op not in ("all_to_all", "send_recv"),
    steps_us=_steps_us,
    efa_ll128_share=0.83,  # 280 of 337 GB/s on four to sixteen p5, 512 MiB to 2 GiB (benchmarks/collective_accuracy.py)
    plateau=1.4,  # NCCL src/graph/tuning.cc, `ncclTopoGetAlgoTime`, since Ampere
)


def rings_of(*calls: CollectiveCall) -> Rings:
    """Return the rings through the ranks of calls that run at once."""
    rings = [_rings(call) for call in calls]
    order, via = (np.concatenate([getattr(each, name) for each in rings]) for name in ("order", "via"))
    return Rings(order, via, _REDUCTIONS.get(calls[0].op, Reduction.NONE), len(calls))


def _rings(call: CollectiveCall) -> Rings:
    if call.settings.compat == "simai":
        return simai_rings(call.gpus, call.ranks.num_servers, call.choices.pxn)
    servers = call.ranks.num_servers
    return link_rings(call.fabric, call.gpus, servers) or nccl_rings(call.gpus, servers)


def flows(call: CollectiveCall) -> Flows:
    """Return the flows of all steps. InputError where there are too many, or none."""
    rings = rings_of(call)
    steps = ROUNDS[call.op] * (rings.num_ranks - 1)
    check_size(flows=rings.order.size * steps)
    return ring(rings, _chunk_bytes(call, rings), steps, rings.reduction)


def seconds(calls: Sequence[CollectiveCall], backend: Any) -> float | None:
    """Return when calls of one kind, at once, are complete; None where the backend does not run rings by class."""
    first = calls[0]
    if first.choices.pxn or not hasattr(backend, "ring_seconds"):
        return None
    steps = ROUNDS[first.op] * (len(first.gpus) - 1)
    chunk_bytes = _chunk_bytes(first, _rings(first))
    answer: float | None = backend.ring_seconds(first.fabric, rings_of(*calls), chunk_bytes, steps, first.settings)
    return answer


def _chunk_bytes(call: CollectiveCall, rings: Rings) -> int:
    """Return the bytes that one rank sends in one step of one channel; a remainder is dropped, as in SimAI."""
    return max(call.size_bytes // len(call.gpus) // rings.num_channels, 1)


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
    tables = []
    for order, via in zip(rings.order, rings.via, strict=True):
        source, destination, hop, after, before = _hops(order, via)
        # A flow inside a hop follows its first half in the same step, any other what arrived in the step before.
        begin = np.arange(num_steps)[:, None] * len(source)
        parent = np.where(after >= 0, begin + after, begin - len(source) + before)
        parent[0, after < 0] = -1
        ends = np.tile(source, num_steps), np.tile(destination, num_steps)
        parents, step = parents_from(parent.ravel()), np.repeat(np.arange(num_steps), len(source))
        tables.append(flows_of(*ends, chunk_bytes, parents=parents, step=step, hop=np.tile(hop, num_steps)))
    return with_columns(in_channels(tables), reduction=reduction)


def _hops(order: Ids, via: Ids) -> tuple[Ids, Ids, NDArray[np.int8], NDArray[np.int64], NDArray[np.int64]]:
    """Return one step of a ring, by sending rank: ends, kind, and the flows before it in this step and the last.

    Returns:
        (source, destination, hop, after, before): `after` is a position in the step or -1; `before` is the position of
        the flow that delivers to this source. A hop by way of another GPU is two flows, one after the other.
    """
    by_rank = np.argsort(order, kind="stable")
    place = np.repeat(by_rank, np.where(via[by_rank] >= 0, 2, 1))
    is_second = np.diff(place, prepend=-1) == 0
    is_first = np.append(is_second[1:], False)
    source = np.where(is_second, via[place], order[place])
    destination = np.where(is_first, via[place], np.roll(order, -1)[place])
    hop = np.where(is_second, Hop.PXN_INIT, Hop.RING).astype(np.int8)
    after = np.where(is_second, np.arange(len(place)) - 1, -1)
    delivers = np.zeros(order.max() + 1, np.int64)
    delivers[destination[~is_first]] = np.flatnonzero(~is_first)
    return source, destination, hop, after, delivers[source]
