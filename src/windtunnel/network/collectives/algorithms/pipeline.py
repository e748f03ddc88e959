"""A broadcast along a chain of ranks that pass chunks on, as NCCL's rings do it."""

import numpy as np

from windtunnel.errors import InputError
from windtunnel.network.collectives.call import CollectiveCall
from windtunnel.network.collectives.rings import num_chunks_of
from windtunnel.network.flows import Flows, flows_of, parents_from

OPERATIONS = ("broadcast",)
NCCL_CODE = 1


def flows(call: CollectiveCall) -> Flows:
    """Return the flows of a broadcast from the first rank: every rank passes chunks on as they arrive."""
    order, hops, num_chunks = call.gpus, len(call.gpus) - 1, num_chunks_of(call.size_bytes)
    if hops < 1 or call.size_bytes < num_chunks:
        raise InputError(f"a broadcast of {call.size_bytes} bytes over {hops + 1} ranks has nothing to send")
    flow = np.arange(num_chunks * hops).reshape(num_chunks, hops)
    parents = np.full((num_chunks, hops, 2), -1)
    parents[1:, :, 0] = flow[:-1]
    parents[:, 1:, 1] = flow[:, :-1]
    return flows_of(
        np.tile(order[:-1], num_chunks),
        np.tile(order[1:], num_chunks),
        call.size_bytes // num_chunks,
        parents=parents_from(parents.reshape(-1, 2)),
        step=np.repeat(np.arange(num_chunks), hops),
    )
