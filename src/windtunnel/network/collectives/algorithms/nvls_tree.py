"""NCCL's NVLS inside servers and a tree between them, in closed form."""

from math import log2

from windtunnel.network.collectives.algorithms.nvls import nvls_bytes_per_s
from windtunnel.network.collectives.closed_forms import ClosedForm, Latency

OPERATIONS = ()
CLOSED_FORM = ClosedForm(
    latencies={"simple": Latency(0.0, 25.0, 20.9)},
    applies=lambda op, ranks: op == "all_reduce" and ranks.num_servers > 1 and ranks.nvls and ranks.per_server > 4,
    steps_us=lambda _op, ranks, near, far: near + 2 * log2(ranks.num_servers) * far,
    scale_up_bytes_per_s=nvls_bytes_per_s,
)
