"""A broadcast along chains of ranks that pass chunks on, as NCCL's rings do it: a chain for each channel."""

import numpy as np

from windtunnel.network.collectives.algorithms.ring import rings_of
from windtunnel.network.collectives.call import CollectiveCall
from windtunnel.network.collectives.rings import num_chunks_of
from windtunnel.network.flows import Flows, Ids, flows_of, in_channels, parents_from

OPERATIONS = ("broadcast",)
NCCL_CODE = 1


def flows(call: CollectiveCall) -> Flows:
    """Return the flows of a broadcast from the first rank: every channel passes its share along its ring."""
    rings = rings_of(call)
    each = max(call.size_bytes // rings.num_channels, 1)
    return in_channels([_chain(np.roll(order, -np.argmax(order == call.gpus[0])), each) for order in rings.order])


def _chain(order: Ids, size_bytes: int) -> Flows:
    """Lay out a chain in which every rank passes chunks on as they arrive."""
    hops, num_chunks = len(order) - 1, num_chunks_of(size_bytes)
    flow = np.arange(num_chunks * hops).reshape(num_chunks, hops)
    parents = np.full((num_chunks, hops, 2), -1)
    parents[1:, :, 0] = flow[:-1]
    parents[:, 1:, 1] = flow[:, :-1]
    return flows_of(
        np.tile(order[:-1], num_chunks),
        np.tile(order[1:], num_chunks),
        size_bytes // num_chunks,
        parents=parents_from(parents.reshape(-1, 2)),
        step=np.repeat(np.arange(num_chunks), hops),
    )
