"""NCCL's NVLS inside servers and a tree between them, in closed form."""

from math import log2

from windtunnel.network.collectives.algorithms.nvls import MOST_HEADS, nvls_bytes_per_s
from windtunnel.network.collectives.call import Ranks
from windtunnel.network.collectives.closed_forms import ClosedForm, Latency, tree_network_gain

OPERATIONS = ()
FLOWS_LIKE = "tree"
"""Its data crosses the network on the same trees."""
_CHUNKS = ((32, 512), (16, 256), (4, 128), (1, 64))
"""(Rounds, KiB): a chunk is no smaller where the buffer fills that many rounds of such chunks, else 32 KiB (NCCL
src/enqueue.cc, `NCCL_ALGO_NVLS_TREE`). From four servers on, 64 KiB at most, with AWS's plugin 512 (aws-ofi-nccl 1.9,
`NCCL_NVLSTREE_MAX_CHUNKSIZE`)."""


def fill_bytes(_protocol: str, ranks: Ranks, size_bytes: float, _rate_over_inside: float) -> float:
    """Return the bytes of the rounds that pass before the first chunk is back from the root: every level of the tree
    holds a round, a chunk of every channel and head, on the way up and on the way down."""
    at_once = ranks.nvls_channels * min(ranks.per_server, MOST_HEADS)
    chunk = next((kib * 1024 for rounds, kib in _CHUNKS if size_bytes >= rounds * at_once * kib * 1024), 32 * 1024)
    if ranks.num_servers >= 4:
        chunk = min(chunk, (512 if ranks.network == "efa" else 64) * 1024)
    return 2 * log2(ranks.num_servers) * min(at_once * chunk, size_bytes)


CLOSED_FORM = ClosedForm(
    latencies={"simple": Latency(0.0, 25.0, 20.9)},
    applies=lambda op, ranks: op == "all_reduce" and ranks.num_servers > 1 and ranks.nvls and ranks.per_server > 4,
    steps_us=lambda _op, ranks, near, far: near + 2 * log2(ranks.num_servers) * far,
    scale_up_bytes_per_s=nvls_bytes_per_s,
    network_gain=tree_network_gain,
    fill_bytes=fill_bytes,
)
