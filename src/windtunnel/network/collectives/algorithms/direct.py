"""All-to-all and send-receive, which NCCL sends without an algorithm: every pair of ranks directly."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from windtunnel.errors import InputError
from windtunnel.network.collectives.algorithms import ring
from windtunnel.network.collectives.call import CollectiveCall
from windtunnel.network.flows import Flows, Ids, flows_of

OPERATIONS = ("all_to_all", "send_recv")
NCCL_CODE = 1
"""SimCCL writes an all-to-all as a ring."""
CLOSED_FORM = replace(
    ring.CLOSED_FORM,
    applies=lambda op, _ranks: op in OPERATIONS,
    steps_us=lambda _op, ranks, near, far: far if ranks.num_servers > 1 else near,
)


def flows(call: CollectiveCall) -> Flows:
    """Return the flows of all pairs, or of the first rank to the last."""
    if call.op == "send_recv":
        return flows_of(call.gpus[:1], call.gpus[-1:], call.size_bytes)
    return all_to_all(call.gpus, call.size_bytes if call.traffic_bytes is None else call.traffic_bytes)


def all_to_all(ranks: Ids, size_bytes: int | NDArray[np.integer]) -> Flows:
    """Lay out an exchange of every rank with every other at once.

    Args:
        ranks: (n,) node ids.
        size_bytes: buffer of one rank, split evenly; or (n, n) bytes from each rank to each other.

    Raises:
        InputError: nothing moves.
    """
    ranks = np.asarray(ranks, np.int32)
    n = len(ranks)
    source, target = np.nonzero(~np.eye(n, dtype=bool))
    if np.ndim(size_bytes) == 2:
        matrix = np.asarray(size_bytes, np.int64)
        keep = matrix[source, target] > 0
        source, target = source[keep], target[keep]
        each: NDArray[np.integer] | int = matrix[source, target]
    else:
        each = int(size_bytes) // n
    if len(source) == 0 or np.min(each) < 1:
        raise InputError(f"an all-to-all of {np.max(size_bytes)} bytes over {n} ranks has nothing to send")
    return flows_of(ranks[source], ranks[target], each)
