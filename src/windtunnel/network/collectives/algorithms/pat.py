"""NCCL's PAT (parallel aggregated trees) as flows."""

from math import log2

import numpy as np

from windtunnel.errors import InputError
from windtunnel.network.collectives.call import CollectiveCall
from windtunnel.network.collectives.closed_forms import ClosedForm, Latency
from windtunnel.network.flows import Flows, Hop, flows_of, parents_from

OPERATIONS = ("all_gather", "reduce_scatter")
NCCL_CODE = 6
CLOSED_FORM = ClosedForm(
    latencies={"simple": Latency(8.0, 4.0, 14.0)},
    applies=lambda op, ranks: op in OPERATIONS and ranks.num_servers > 1 and ranks.per_server == 1,
    # NCCL src/graph/tuning.cc: a part that grows with the ranks, and three quarters of the bandwidth of rings.
    steps_us=lambda _op, ranks, _near, far: log2(ranks.num_servers) * far / 3.5 + ranks.num_ranks * 2.8,
    network_gain=lambda _ranks: 0.75,
)


def flows(call: CollectiveCall) -> Flows:
    """Return the flows of an all-gather in log2(n) rounds: in round k a rank sends its 2^k chunks to the rank 2^k after
    it.

    Source: Jeaugey, "PAT: a new algorithm for all-gather and reduce-scatter operations at scale", 2025; Bruck et al.,
    1997. A reduce-scatter runs the same flows backwards, in the same time.
    """
    ranks, n = call.gpus, len(call.gpus)
    if n < 2:
        raise InputError(f"an all-gather over {n} ranks sends nothing")
    rounds = (n - 1).bit_length()
    k = np.arange(rounds)[:, None]
    rank = np.arange(n)
    parent = (k - 1) * n + (rank - 2 ** np.maximum(k - 1, 0)) % n
    parent[0] = -1
    sizes = np.minimum(2**k, n - 2**k) * max(call.size_bytes // n, 1)
    return flows_of(
        np.tile(ranks, rounds),
        ranks[((rank + 2**k) % n).ravel()],
        np.broadcast_to(sizes, (rounds, n)).ravel(),
        parents=parents_from(parent.ravel()),
        step=np.repeat(np.arange(rounds), n),
        hop=Hop.PAT,
    )
