"""NCCL's collectives in closed form: latency and bandwidth of every algorithm and protocol, and which NCCL takes.

Latencies are those of NCCL 2.27 (src/graph/tuning.cc). Bandwidths follow from the links that a rank has, times the
share of them that each algorithm was measured to reach.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import log2

from windtunnel.errors import InputError, did_you_mean
from windtunnel.units import US

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")

LAUNCH_S = 16 * US
"""What a call costs the host outside a CUDA graph. Measured: the median over seven published nccl-tests and torch runs
on eight A100, H100, H200 and B200 (32 to 256 KiB) of their time less that of the same size in a graph."""

_BASE_US = {
    ("tree", "ll"): 6.8,
    ("tree", "ll128"): 14.0,
    ("tree", "simple"): 8.4,
    ("ring", "ll"): 6.6,
    ("ring", "ll128"): 14.0,
    ("ring", "simple"): 8.4,
    ("nvls", "simple"): 0.0,
    ("nvls_tree", "simple"): 0.0,
    ("collnet", "simple"): 0.0,
    ("pat", "simple"): 8.0,
}
"""(algorithm, protocol) -> `baseLatencies`."""

_SCALE_UP_US = {
    ("tree", "ll"): 0.6,
    ("tree", "ll128"): 1.25,
    ("tree", "simple"): 4.0,
    ("ring", "ll"): 0.6,
    ("ring", "ll128"): 1.9,
    ("ring", "simple"): 3.4,
    ("nvls", "simple"): 25.0,
    ("nvls_tree", "simple"): 25.0,
    ("collnet", "simple"): 3.7,
    ("pat", "simple"): 4.0,
}
_NETWORK_US = {
    ("tree", "ll"): 5.0,
    ("tree", "ll128"): 8.5,
    ("tree", "simple"): 14.0,
    ("ring", "ll"): 2.7,
    ("ring", "ll128"): 4.0,
    ("ring", "simple"): 14.0,
    ("nvls", "simple"): 18.0,
    ("nvls_tree", "simple"): 20.9,
    ("collnet", "simple"): 31.0,
    ("pat", "simple"): 14.0,
}
"""(algorithm, protocol) -> `hwLatencies` of one step over NVLink, and over the network."""

PROTOCOL_SHARE = {"ll": 0.5, "ll128": 120 / 128, "simple": 1.0}
"""Data in what is sent: LL has a flag for each 4 bytes, LL128 8 bytes in each line of 128."""
_LOW_LATENCY_BYTES_PER_S = {"ll": 60e9, "ll128": 280e9}
"""Most that the protocols reach on Hopper over NVLink (busBw limits of tuning.cc, 8 GPUs)."""

RING_SHARE = 0.81
"""Of NVLink, in a ring: 365 of 450 GB/s on H100 and H200, 234 of 300 on A100, 680 of 900 on B200 (nccl-tests)."""
NVLS_SHARE = 0.93
"""Of NVLink, when NVSwitches add: 840 of 900 GB/s on eight B200 and on NVL72 (nccl-tests); H100 reaches 480 of 450."""
NVLS_HALF_BYTES = 3e6
"""Bytes of a rank at which NVLS reaches half of that: 2.7 to 3.2 MB on eight H100 between 64 and 256 MiB."""
NETWORK_SHARE = 0.967
"""Of the NICs: 387 of 400 GB/s on eight servers of H100 (nccl-tests, InfiniBand NDR)."""


@dataclass(frozen=True)
class Ranks:
    """Where the ranks of a collective are, and the links that each has."""

    num_ranks: int
    num_servers: int
    scale_up_bytes_per_s: float
    """Of one rank inside its server or NVLink domain; 0 where a server holds one rank."""
    network_bytes_per_s: float
    """Of one rank to other servers, all its NIC ports together; 0 where there are none."""
    nvls: bool = True
    """Whether switches inside the server can add (NVSwitch since Hopper)."""
    in_network: bool = False
    """Whether switches between servers can (SHARP)."""

    @property
    def per_server(self) -> int:
        return self.num_ranks // self.num_servers


@dataclass(frozen=True)
class CollectiveEstimate:
    """How long a collective takes, by which algorithm, and how that is known."""

    seconds: float
    algorithm: str
    protocol: str
    source: str


def bus_factor(op: str, num_ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth, as nccl-tests defines them (doc/PERFORMANCE.md)."""
    share = (num_ranks - 1) / num_ranks
    factors = {"all_reduce": 2 * share, "broadcast": 1.0, "send_recv": 1.0}
    return factors.get(op, share)


def check_op(op: str) -> None:
    """Raise InputError where there is no such collective."""
    if op not in OPS:
        raise InputError(f"there is no collective {op!r}", did_you_mean(op, OPS, f"known: {', '.join(OPS)}"))


def closed_form(
    op: str, size_bytes: float, ranks: Ranks, algorithm: str = "auto", protocol: str = "auto"
) -> CollectiveEstimate:
    """Return the time of the algorithm and protocol that NCCL would take: those that its model finds fastest.

    Args:
        op: one of `OPS`.
        size_bytes: as nccl-tests counts: the whole buffer; of an all-to-all, what one rank holds.
        ranks: where they are.
        algorithm: only this one, as NCCL_ALGO has it; `protocol` likewise, as NCCL_PROTO.

    Raises:
        InputError: the ranks have no link that it needs, or NCCL has no such algorithm or protocol there.
    """
    check_op(op)
    _check_links(op, ranks)
    if ranks.num_ranks == 1:
        return CollectiveEstimate(0.0, "none", "none", "one rank sends nothing")
    possible = [choice for choice in _BASE_US if _applies(choice[0], op, ranks)]
    wanted = [(a, p) for a, p in possible if algorithm in ("auto", a) and protocol in ("auto", p)]
    if not wanted:
        raise InputError(
            f"{op} over {ranks.num_ranks} ranks in {ranks.num_servers} servers has no {algorithm} with {protocol}",
            f"it has {', '.join(f'{a} with {p}' for a, p in possible)}",
        )
    times = {choice: _seconds(choice, op, size_bytes, ranks) for choice in wanted}
    best = min(times, key=lambda choice: times[choice])
    return CollectiveEstimate(times[best], *best, "closed form")


def _check_links(op: str, ranks: Ranks) -> None:
    if ranks.num_ranks % ranks.num_servers:
        raise InputError(f"{ranks.num_ranks} ranks do not spread evenly over {ranks.num_servers} servers")
    if ranks.per_server > 1 and ranks.scale_up_bytes_per_s <= 0:
        raise InputError(f"{op} over {ranks.per_server} ranks of a server needs a link between them")
    if ranks.num_servers > 1 and ranks.network_bytes_per_s <= 0:
        raise InputError(f"{op} over {ranks.num_servers} servers needs a link between servers")


def _applies(algorithm: str, op: str, ranks: Ranks) -> bool:
    """Which algorithms NCCL has for an operation, by where the ranks are."""
    many, several = ranks.num_servers > 1, ranks.per_server > 1
    conditions: dict[str, Callable[[], bool]] = {
        "ring": lambda: True,
        "tree": lambda: op == "all_reduce" and many,
        "nvls": lambda: op == "all_reduce" and not many and ranks.nvls and ranks.num_ranks > 4,
        "nvls_tree": lambda: op == "all_reduce" and many and ranks.nvls and ranks.per_server > 4,
        "collnet": lambda: op == "all_reduce" and many and ranks.in_network,
        "pat": lambda: op in ("all_gather", "reduce_scatter") and many and not several,
    }
    return conditions[algorithm]()


def _seconds(choice: tuple[str, str], op: str, size_bytes: float, ranks: Ranks) -> float:
    if op == "all_to_all":
        return _all_to_all_seconds(choice, size_bytes, ranks)
    rate = _bus_bytes_per_s(choice, size_bytes, ranks)
    return _latency_s(choice, op, ranks) + size_bytes * bus_factor(op, ranks.num_ranks) / rate


def _bus_bytes_per_s(choice: tuple[str, str], size_bytes: float, ranks: Ranks) -> float:
    algorithm, protocol = choice
    network = ranks.network_bytes_per_s * NETWORK_SHARE * ranks.per_server
    inside = ranks.scale_up_bytes_per_s * RING_SHARE
    if algorithm in ("nvls", "nvls_tree"):
        each = size_bytes / ranks.num_ranks
        inside = ranks.scale_up_bytes_per_s * NVLS_SHARE * each / (each + NVLS_HALF_BYTES)
    if protocol in _LOW_LATENCY_BYTES_PER_S:
        inside = min(inside * PROTOCOL_SHARE[protocol], _LOW_LATENCY_BYTES_PER_S[protocol])
    if ranks.num_servers == 1:
        return inside
    if algorithm == "collnet":
        # The switches add: a byte leaves a server once, not 2 (n - 1) / n times.
        network *= bus_factor("all_reduce", ranks.num_ranks)
    network *= PROTOCOL_SHARE[protocol]
    return min(inside, network) if ranks.per_server > 1 else network


def _latency_s(choice: tuple[str, str], op: str, ranks: Ranks) -> float:
    """Steps that wait for each other, as `ncclTopoTuneModel` counts them."""
    algorithm, _ = choice
    n, servers = ranks.num_ranks, ranks.num_servers
    near, far = _SCALE_UP_US[choice] if ranks.per_server > 1 else 0.0, _NETWORK_US[choice]
    rounds = 2 if op == "all_reduce" else 1
    match algorithm:
        case "ring" if op == "send_recv":
            steps = far if servers > 1 else near
        case "ring":
            between = rounds * (servers - 1) if servers > 1 else 0
            steps = (rounds * (n - 1) - between) * near + between * far
        case "tree":
            steps = 2 * ((ranks.per_server - 1) * near + log2(servers) * far)
        case "nvls":
            steps = near
        case "nvls_tree":
            steps = near + 2 * log2(servers) * far
        case "collnet":
            steps = 2 * near + far
        case _:
            steps = (ranks.per_server - 1) * near + log2(servers) * far
    return (_BASE_US[choice] + steps) * US


def _all_to_all_seconds(choice: tuple[str, str], size_bytes: float, ranks: Ranks) -> float:
    """Every rank sends to all others at once: what stays in the server and what leaves it go in parallel."""
    protocol = choice[1]
    each = size_bytes / ranks.num_ranks
    inside = each * (ranks.per_server - 1) / (ranks.scale_up_bytes_per_s * RING_SHARE) if ranks.per_server > 1 else 0.0
    outside = 0.0
    if ranks.num_servers > 1:
        outside = each * (ranks.num_ranks - ranks.per_server) / (ranks.network_bytes_per_s * NETWORK_SHARE)
    step = _NETWORK_US[choice] if ranks.num_servers > 1 else _SCALE_UP_US[choice]
    return (_BASE_US[choice] + step) * US + max(inside, outside) / PROTOCOL_SHARE[protocol]
