"""All-to-all in two hops, as DeepEP does it: over the sender's rail to the receiver's server, then inside it."""

import numpy as np
from numpy.typing import NDArray

from windtunnel.errors import InputError
from windtunnel.network.collectives.call import CollectiveCall
from windtunnel.network.collectives.rings import by_server, num_chunks_of
from windtunnel.network.flows import Flows, Ids, flows_of, parents_from

OPERATIONS = ("all_to_all",)
MOST_CHUNKS = 8


def flows(call: CollectiveCall) -> Flows:
    """Return the flows of an all-to-all, balanced unless the call has its own traffic."""
    n, traffic_bytes = len(call.gpus), call.traffic_bytes
    if traffic_bytes is None:
        traffic_bytes = np.full((n, n), call.size_bytes // n)
        np.fill_diagonal(traffic_bytes, 0)
    num_servers = call.ranks.num_servers
    to_servers = traffic_bytes.reshape(n, num_servers, -1).sum(axis=2)
    chunks = num_chunks_of(int(to_servers.max()), MOST_CHUNKS)
    return all_to_all_by_rail(call.gpus, num_servers, to_servers, traffic_bytes, chunks)


def all_to_all_by_rail(
    ranks: Ids, num_servers: int, sent_bytes: NDArray[np.int64], forwarded_bytes: NDArray[np.int64], num_chunks: int = 1
) -> Flows:
    """Lay out an all-to-all in two hops: over the sender's rail to the server of the receiver, then inside it (DeepEP).
    InputError where nothing moves.

    Args:
        ranks: (n,) node ids, server after server.
        num_servers: servers that they fill.
        sent_bytes: (n, num_servers) bytes from each rank to each server; a token that two GPUs of a server need is sent
            once (DeepSeek-V3 technical report, section 3.2.2).
        forwarded_bytes: (n, n) bytes from each rank to each other in all, forwarded by the rank on the same rail in the
            receiver's server; inside the sender's server they go directly.
        num_chunks: a chunk is forwarded when it has arrived, while the next one is sent.
    """
    rows = _rail_rows(by_server(ranks, num_servers), sent_bytes, forwarded_bytes, num_chunks)
    if not rows:
        raise InputError("the all-to-all has nothing to send")
    source, destination, size_bytes, parent, step, connection = (
        np.array(column, np.int64) for column in zip(*rows, strict=True)
    )
    return flows_of(source, destination, size_bytes, parents=parents_from(parent), step=step, connection=connection)


def _rail_rows(
    local: Ids, sent_bytes: NDArray[np.int64], forwarded_bytes: NDArray[np.int64], num_chunks: int
) -> list[tuple[int, int, int, int, int, int]]:
    """Return (source, destination, bytes, parent, step, connection) of every flow, chunk by chunk."""
    num_servers, size = local.shape
    rows: list[tuple[int, int, int, int, int, int]] = []

    def add(source: int, destination: int, total_bytes: int, chunk: int, rank: int, parent: int) -> int:
        """Add a chunk's flow if it has bytes; return its number, or -1."""
        chunk_bytes = total_bytes * (chunk + 1) // num_chunks - total_bytes * chunk // num_chunks
        if chunk_bytes == 0 or source == destination:
            return -1
        rows.append((source, destination, chunk_bytes, parent, 2 * chunk + (parent >= 0), rank))
        return len(rows) - 1

    for rank, other, chunk in np.ndindex(local.size, num_servers, num_chunks):
        server, k = divmod(rank, size)
        landing = add(local[server, k], local[other, k], int(sent_bytes[rank, other]), chunk, rank, -1)
        for j in range(size):
            add(local[other, k], local[other, j], int(forwarded_bytes[rank, other * size + j]), chunk, rank, landing)
    return rows
