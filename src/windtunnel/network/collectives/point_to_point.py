"""Send and receive, and a chain of ranks that pass chunks on, as flows."""

import numpy as np

from windtunnel.errors import InputError
from windtunnel.network.flows import Flows, Ids, flows_of


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
