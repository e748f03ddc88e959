"""All-to-all as flows: every pair directly, or along rails."""

import numpy as np
from numpy.typing import NDArray

from windtunnel.errors import InputError
from windtunnel.network.collectives.rings import by_server
from windtunnel.network.flows import Flows, Ids, flows_of


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
    local = by_server(ranks, num_servers)
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
