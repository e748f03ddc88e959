"""Send and receive, and a chain of ranks that pass chunks on, as flows."""

import numpy as np

from windtunnel.errors import InputError
from windtunnel.network.flows import Flows, Ids, flows_of, parents_from, steps_of


def send_recv(source: int, destination: int, size_bytes: int) -> Flows:
    """Return one transfer."""
    if size_bytes < 1 or source == destination:
        raise InputError(f"a transfer of {size_bytes} bytes from {source} to {destination} moves nothing")
    return flows_of(np.array([source]), np.array([destination]), size_bytes)


def pipeline(order: Ids, size_bytes: int, num_chunks: int) -> Flows:
    """Lay out a broadcast along a chain: `order[0]` has the data, every rank passes chunks on as they arrive."""
    n, hops = len(order), len(order) - 1
    if n < 2 or size_bytes < num_chunks:
        raise InputError(f"a broadcast of {size_bytes} bytes over {n} ranks in {num_chunks} chunks has nothing to send")
    flow = np.arange(num_chunks * hops).reshape(num_chunks, hops)
    parents = np.full((num_chunks, hops, 2), -1)
    parents[1:, :, 0] = flow[:-1]
    parents[:, 1:, 1] = flow[:, :-1]
    return flows_of(
        np.tile(order[:-1], num_chunks),
        np.tile(order[1:], num_chunks),
        size_bytes // num_chunks,
        parents=parents_from(parents.reshape(-1, 2)),
        steps=steps_of(num_chunks, hops),
    )
