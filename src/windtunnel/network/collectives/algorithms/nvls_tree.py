"""NCCL's NVLS inside servers and a tree between them, in closed form."""

from math import log2

from windtunnel.network.collectives.call import Ranks
from windtunnel.network.collectives.closed_forms import ClosedForm, Latency, tree_network_gain

OPERATIONS = ()
NVLS_HALF_BYTES = 3e6
"""Bytes of a rank at which it reaches half of that: 2.7 to 3.2 MB on eight H100, 64 to 256 MiB (nccl-tests)."""


def nvls_tree_bytes_per_s(ranks: Ranks, rank_bytes: float) -> float:
    """Return the rate of a rank inside its server, whose switches add."""
    return ranks.scale_up_bytes_per_s * ranks.nvls_share * rank_bytes / (rank_bytes + NVLS_HALF_BYTES)


CLOSED_FORM = ClosedForm(
    latencies={"simple": Latency(0.0, 25.0, 20.9)},
    applies=lambda op, ranks: op == "all_reduce" and ranks.num_servers > 1 and ranks.nvls and ranks.per_server > 4,
    steps_us=lambda _op, ranks, near, far: near + 2 * log2(ranks.num_servers) * far,
    scale_up_bytes_per_s=nvls_tree_bytes_per_s,
    network_gain=tree_network_gain,
)
