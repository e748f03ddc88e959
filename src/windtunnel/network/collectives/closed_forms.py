"""NCCL's collectives in closed form: the time of every algorithm and protocol, and the pair that NCCL takes.

Latencies are those of NCCL 2.27 (src/graph/tuning.cc). Bandwidths follow from the links that a rank has, times the
share of them that each algorithm was measured to reach.

Beside them: where the ranks of a collective are, and the bandwidths among them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel import catalog
from windtunnel.errors import InputError, check_number
from windtunnel.hardware import Device
from windtunnel.network.collectives.call import ALGORITHMS, Ranks, bus_factor, check_operation
from windtunnel.network.fabric import MEASURED, NETWORK_SHARES, Fabric, NodeKind
from windtunnel.units import US

LAUNCH_S = 19.5 * US
"""What the host's launch adds to a call that waits for it: of PyTorch on an idle device, or of one process for all GPUs
of a server. A call in a CUDA graph, or queued ahead by a process for each GPU, has none. Measured: the median over six
published nccl-tests and torch runs on eight A100, H100, H200 and B200 (32 to 256 KiB) of their time less that of the
same size in a graph, 11 to 23 us; a seventh, with a process for each GPU, takes 1 us more than in a graph."""

PROTOCOL_SHARE = {"ll": 0.5, "ll128": 120 / 128, "simple": 1.0}
"""Data in what is sent: LL has a flag for each 4 bytes, LL128 8 bytes in each line of 128."""

RING_SHARE = 0.81
"""Of NVLink, in a ring: 365 of 450 GB/s on H100 and H200, 234 of 300 on A100, 680 of 900 on B200 (nccl-tests)."""
NVLINK_BYTES_PER_S = 150e9
"""Slower links of a rank inside its server are PCIe or bridges: their switches do not add, NCCL relays nothing over
them, and network cards share them."""
NETWORK_RINGS = 9
"""Most NICs by which trees and rings of an NVLink domain leave it: 406 GB/s of 50 GB/s each on twenty GB200 NVL72."""
TREE_SHARE = 0.92
"""Rate of a tree over that of a ring (NCCL src/graph/tuning.cc, `ncclTopoTuneModel`)."""
CLOSE = 1.05
"""Times in NCCL's model this near to the least may each be its choice, as its constants change from release to release:
of them the fastest is taken."""
PEERS_AT_ONCE = 8
"""Peers with which a rank exchanges messages at a time (NCCL src/include/device.h, NCCL_MAX_DEV_WORK_P2P_PER_BATCH)."""
_MOST_LL_BYTES = 16384
"""Of a message between two ranks that NCCL sends by LL (src/enqueue.cc, NCCL_P2P_LL_THRESHOLD)."""


class Latency(NamedTuple):
    """Microseconds of an algorithm with one protocol."""

    base: float
    """Of the call: `baseLatencies`."""
    scale_up: float
    """Of one step over NVLink, and of one over the network: `hwLatencies`."""
    network: float


def tree_network_gain(ranks: Ranks) -> float:
    """Return the factor of a tree's bus bandwidth between servers: of two, each sends and receives a buffer only once.

    NCCL's model (src/graph/tuning.cc) divides the rate of its trees by two from three servers on. Sixteen H100 reach
    478 GB/s at 8 GiB over network cards of 400 (crazyguitar/aws-gpu-communication-benchmark, p5), and 339 over 200
    (lessizzmore/create-a3mega-ztan-fork).
    """
    return bus_factor("all_reduce", ranks.num_ranks) if ranks.num_servers == 2 else TREE_SHARE


def ring_bytes_per_s(ranks: Ranks) -> float:
    """Return the rate of a rank inside its server in a ring."""
    return ranks.scale_up_bytes_per_s * RING_SHARE


@dataclass(frozen=True)
class ClosedForm:
    """Latency and bandwidth of an algorithm, as `ncclTopoTuneModel` has them."""

    latencies: Mapping[str, Latency]
    """Protocol -> latency."""
    applies: Callable[[str, Ranks], bool]
    """Whether NCCL has the algorithm for an operation, where the ranks are."""
    steps_us: Callable[[str, Ranks, float, float], float]
    """Time of the steps that wait for each other, from operation, ranks, and the latency of one step inside a server
    (0 where it holds one rank) and between servers."""
    scale_up_bytes_per_s: Callable[[Ranks], float] = ring_bytes_per_s
    """Rate of a rank inside its server."""
    fill_bytes: Callable[[str, Ranks, float, float], float] = lambda *_: 0.0
    """Bytes of the buffer in whose time its pipeline fills, beside the latency of steps: from protocol, ranks, size and
    the rate of the whole over that inside a server."""
    correction: Callable[[str, float], float] = lambda _protocol, _size_bytes: 1.0
    """Factor on the rate, from protocol and size, by which NCCL's choice knows that pipelines fill."""
    plateau: float = 1.0
    """Factor on the latency of all-reduces over several servers with the protocol simple."""
    network_gain: Callable[[Ranks], float] = lambda ranks: 1.0  # noqa: ARG005
    """Factor on the bus bandwidth between servers."""
    efa_ll128_share: float = 1.0
    """Rate over EFA with LL128 against what the network's share and the flags leave."""
    on_request: bool = False
    """Whether NCCL takes it on request only, since no fabric says whether its switches can do it."""


def closed_form(
    op: str, size_bytes: float, ranks: Ranks, algorithm: str = "auto", protocol: str = "auto"
) -> tuple[float, str, str]:
    """Return seconds, algorithm and protocol that NCCL would take: those that its model finds fastest. InputError where
    the ranks have no link that it needs, or NCCL has no such algorithm or protocol there.

    Args:
        size_bytes: as nccl-tests counts: the whole buffer; of an all-to-all, what one rank holds.
        algorithm: only this one, as NCCL_ALGO has it; `protocol` likewise, as NCCL_PROTO.
    """
    check_operation(op)
    if ranks.per_server > 1 and ranks.scale_up_bytes_per_s <= 0:
        lacks = f"{op} over {ranks.per_server} ranks of a server needs a link between them"
        raise InputError(lacks, "give other ranks, or --backend flow, which goes by way of others that pass data on")
    if ranks.num_servers > 1 and ranks.network_bytes_per_s <= 0:
        raise InputError(f"{op} over {ranks.num_servers} servers needs a link between servers")
    possible = list(_possible(op, ranks, algorithm))
    chosen = [row for row in possible if algorithm in ("auto", row[0]) and protocol in ("auto", row[1])]
    if algorithm == protocol == "auto" and (tuned := _of_tuner(op, size_bytes, ranks)):
        chosen = [row for row in chosen if row[0] in tuned and (row[1] == "simple") == ("nvls_tree" in tuned)]
    if protocol == "auto" and ranks.num_servers > 1:
        left = MEASURED["networks"][ranks.network].get("protocols", {}).get(ranks.device, PROTOCOL_SHARE)
        chosen = [row for row in chosen if row[1] in left]
    if not chosen:
        request = " with ".join(word for word in (algorithm, protocol) if word != "auto")
        raise InputError(
            f"NCCL has no {request} for {op} over {ranks.num_ranks} ranks in {ranks.num_servers} servers",
            f"it has {', '.join(f'{name} with {protocol}' for name, protocol, _ in possible)}; others: --backend flow",
        )
    message = {"all_to_all": size_bytes / ranks.num_ranks, "send_recv": size_bytes}.get(op, 0.0)
    if protocol == "auto" and message > _MOST_LL_BYTES:
        chosen = [row for row in chosen if row[1] != "ll"]
    times = [(*_seconds(form, protocol, op, size_bytes, ranks), name, protocol) for name, protocol, form in chosen]
    least_s = min(row[0] for row in times)
    return min((row[1:] for row in times if row[0] <= CLOSE * least_s), key=lambda row: row[0])


def _of_tuner(op: str, size_bytes: float, ranks: Ranks) -> tuple[str, ...]:
    """Return the algorithms among which the tuner of AWS's plugin leaves NCCL the choice, or none: with the protocol
    simple if an NVLS tree is one of them, else with another."""
    limits = MEASURED["efa_tuner"].get(ranks.device) if ranks.network == "efa" and ranks.num_servers > 2 else None
    if op != "all_reduce" or limits is None or ranks.per_server != 8:
        return ()
    for name, most_ranks in (("tree", np.inf), ("ring", 128)):
        known, mib = np.log2([*limits[name].items()]).T
        if ranks.num_ranks <= most_ranks and size_bytes <= 2 ** (20 + np.interp(np.log2(ranks.num_ranks), known, mib)):
            return (name,)
    return "ring", "nvls_tree"


def _possible(op: str, ranks: Ranks, requested: str) -> Iterator[tuple[str, str, ClosedForm]]:
    """Yield (algorithm, protocol, closed form) of all that NCCL has for an operation, where the ranks are."""
    for name, algorithm in ALGORITHMS.every(str).items():
        form: ClosedForm | None = getattr(algorithm, "CLOSED_FORM", None)
        if not isinstance(form, ClosedForm | None):
            raise InputError(f"CLOSED_FORM of the collective algorithm {name!r} is {form!r:.60}, not a ClosedForm")
        if form is not None and form.applies(op, ranks) and (name == requested or not form.on_request):
            yield from ((name, protocol, form) for protocol in form.latencies)


def _seconds(form: ClosedForm, protocol: str, op: str, size_bytes: float, ranks: Ranks) -> tuple[float, float]:
    """Return the seconds that NCCL's model has for its choice, and those with the pipeline's fill."""
    latency = form.latencies[protocol]
    if op == "all_to_all":
        each = size_bytes / ranks.num_ranks
        up = ranks.scale_up_bytes_per_s * RING_SHARE
        inside = each * (ranks.per_server - 1) / up if ranks.per_server > 1 else 0.0
        outside, peers = 0.0, ranks.num_ranks - ranks.per_server
        if ranks.num_servers > 1:
            # Messages of several chunks fill the network again for every next peers, with a chunk that NCCL makes
            # smaller for small messages (src/enqueue.cc, `addP2pToPlan`).
            most: int = MEASURED["networks"][ranks.network].get("chunk_bytes", 2**17)
            chunk = most / (4 if each < most else 2 if each < 8 * most else 1)
            rate = ranks.network_bytes_per_s * NETWORK_SHARES[ranks.network]
            outside = peers * (each + (chunk if each > chunk and protocol == "simple" else 0.0)) / rate
        far = latency.network + ranks.network_latency_us
        # Messages to peers beyond those at once wait for theirs.
        later = peers / PEERS_AT_ONCE if protocol == "simple" else 0.0
        step = far * (1 + later) if ranks.num_servers > 1 else latency.scale_up
        on_pcie = each * (ranks.num_ranks - 1) / up if is_pcie(ranks) else 0.0
        seconds = (latency.base + step) * US + max(inside, outside, on_pcie) / PROTOCOL_SHARE[protocol]
        return seconds, seconds
    rate, inside = _bus_bytes_per_s(form, protocol, op, ranks)
    # NCCL does not know how a protocol fares on a network.
    slower = NETWORK_SHARES[ranks.network] / network_share(form, protocol, ranks) if rate != inside else 1.0
    far = latency.network + ranks.network_latency_us
    steps = form.steps_us(op, ranks, latency.scale_up if ranks.per_server > 1 else 0.0, far)
    plateau = form.plateau if op == "all_reduce" and protocol == "simple" and ranks.num_servers > 1 else 1.0
    check_number(steps, "steps_us of a closed form")
    latency_s, factor = (latency.base + steps) * plateau * US, bus_factor(op, ranks.num_ranks) / rate
    sent_bytes = size_bytes + form.fill_bytes(protocol, ranks, size_bytes, rate / inside if inside else 1.0)
    chosen_s = latency_s + size_bytes * factor / form.correction(protocol, size_bytes)
    return chosen_s, latency_s + sent_bytes * factor * slower


def network_share(form: ClosedForm | None, protocol: str, ranks: Ranks) -> float:
    """Return the share of the network's rate that an algorithm reaches with a protocol, its flags included."""
    is_slow = form is not None and protocol == "ll128" and ranks.network == "efa"
    return NETWORK_SHARES[ranks.network] * (form.efa_ll128_share if form and is_slow else 1.0)


def _bus_bytes_per_s(form: ClosedForm, protocol: str, op: str, ranks: Ranks) -> tuple[float, float]:
    """Return the bus bandwidth, and what it would be inside a server alone."""
    inside = form.scale_up_bytes_per_s(ranks) * PROTOCOL_SHARE[protocol]
    if protocol == "ll":
        inside = min(inside, ranks.ll_bytes_per_s)
    if ranks.num_servers == 1:
        return inside, inside
    num_nics = 1 if op == "send_recv" else min(ranks.per_server, NETWORK_RINGS)  # one sender has one NIC
    network = ranks.network_bytes_per_s * NETWORK_SHARES[ranks.network] * num_nics
    network *= form.network_gain(ranks) * PROTOCOL_SHARE[protocol]
    return min(inside, network) if ranks.per_server > 1 or is_pcie(ranks) else network, inside


def protocol_share(op: str, protocol: str, ranks: Ranks) -> float:
    """Return the rate at which a protocol's data and flags leave a rank inside its server, over that of a ring."""
    if op == "all_to_all" or protocol != "ll" or ranks.per_server == 1:
        return 1.0
    return min(1.0, ranks.ll_bytes_per_s / PROTOCOL_SHARE[protocol] / (ranks.scale_up_bytes_per_s * RING_SHARE))


def is_pcie(ranks: Ranks) -> bool:
    """Return whether all that a rank sends leaves by PCIe, to its server and, by a network card, to others."""
    return ranks.switched and 0 < ranks.scale_up_bytes_per_s < NVLINK_BYTES_PER_S


USUAL_LATENCY_S, MOST_USUAL_LATENCY_S = 0.5e-6, 2e-6
"""Link latencies up to this are part of the network steps that closed forms have; EFA's are beyond."""


def chosen_gpus(fabric: Fabric, ranks: int | Sequence[int]) -> NDArray[np.int32]:
    """Return the GPU ids of `ranks`: a number of GPUs, from the first on, or the ids themselves."""
    gpus = np.arange(ranks) if isinstance(ranks, int) else np.asarray(ranks)
    if len(gpus) < 2:
        raise InputError(f"a collective needs two ranks; {len(gpus)} given")
    if len(np.unique(gpus)) < len(gpus):
        raise InputError("a rank is given twice")
    if gpus.min() < 0 or gpus.max() >= fabric.num_gpus:
        raise InputError(f"rank {gpus.max()} is asked for; {fabric.name} has GPUs 0 to {fabric.num_gpus - 1}")
    return gpus.astype(np.int32)


def place_of(fabric: Fabric, gpus: NDArray[np.int32]) -> Ranks:
    """Return how the ranks lie over servers, and the slowest bandwidths among them. InputError where servers hold
    different numbers of them."""
    _, per_server = np.unique(fabric.server[gpus], return_counts=True)
    if len(np.unique(per_server)) > 1:
        raise InputError(
            f"servers hold {per_server.min()} to {per_server.max()} of the {len(gpus)} ranks; equal numbers are needed",
            f"for instance {per_server.max() * len(per_server)} ranks",
        )
    device = device_of(fabric)
    architecture = device.architecture if device else ""
    link_bytes_per_s, is_direct = _scale_up(fabric, gpus, int(per_server[0]))
    up = link_bytes_per_s
    if is_direct:
        up = direct_rate(up, architecture, int(per_server[0]), len(per_server))
    else:
        # Topology files often give the rate that a ring reaches in place of the data sheet's.
        published = device.scale_up_bytes_per_s if device else None
        up = max(up, min(published, up / RING_SHARE)) if published else up
    scale_up_share = 1.0
    if link_bytes_per_s:
        scale_up_share = _link_share(architecture) if is_direct else min(up * RING_SHARE / link_bytes_per_s, 1.0)
    out, late_s = _scale_out(fabric, gpus)
    of_ll = MEASURED["ll_gbytes_per_s"]
    return Ranks(
        num_ranks=len(gpus),
        num_servers=len(per_server),
        scale_up_bytes_per_s=up,
        network_bytes_per_s=out,
        switched=not is_direct,
        network_latency_us=late_s / US,
        **switch_sums(device, up, is_direct=is_direct),
        ll_bytes_per_s=1e9 * of_ll.get(architecture, of_ll["ampere"])[min(len(per_server), 3) - 1],
        network=fabric.network,
        device=device.name if device else "",
        scale_up_share=scale_up_share,
    )


def direct_rate(link_bytes_per_s: float, architecture: str, per_server: int, num_servers: int) -> float:
    """Return the rate of a rank by its links to the others of its server, over `RING_SHARE`.

    A ring over several servers passes each on a path: a full mesh has as many paths that share no link as ranks, one
    more than links of a rank (`rings.link_rings`).
    """
    paths = per_server / (per_server - 1) if num_servers > 1 else 1.0
    return link_bytes_per_s * paths * _link_share(architecture) / RING_SHARE


def _link_share(architecture: str) -> float:
    share: float = MEASURED["link_shares"].get(architecture, MEASURED["link_shares"]["other"])
    return share


def switch_sums(device: Device | None, scale_up_bytes_per_s: float, *, is_direct: bool) -> dict[str, Any]:
    """Return whether the switches of a server add, by how many channels, and the share that they reach (`Ranks`)."""
    adds = device is not None and not is_direct and scale_up_bytes_per_s >= NVLINK_BYTES_PER_S
    channels, share = MEASURED["nvls"].get(device.architecture, (0, 0.0)) if adds and device else (0, 0.0)
    return {"nvls": channels > 0, "nvls_channels": channels, "nvls_share": share}


def _scale_up(fabric: Fabric, gpus: NDArray[np.int32], per_server: int) -> tuple[float, bool]:
    """Return the slowest rate of a rank to the others of its server, and whether it is that of links between ranks.

    Ranks that all have links of their own to each other use these; where some have none, all meet at the switch, and
    without one the links to neighbours carry a ring.
    """
    source, target = fabric.directions
    rate = np.repeat(fabric.bandwidth_bytes_per_s, 2)
    is_rank = np.isin(np.arange(fabric.num_nodes), gpus)
    to_switch = fabric.kind[target] == NodeKind.SCALE_UP_SWITCH
    to_rank = is_rank[source] & is_rank[target] & (fabric.server[source] == fabric.server[target])
    switched = np.bincount(source[to_switch], rate[to_switch], fabric.num_nodes)[gpus]
    direct = np.bincount(source[to_rank], rate[to_rank], fabric.num_nodes)[gpus]
    num_met = np.bincount(source[to_rank], minlength=fabric.num_nodes)[gpus]
    is_direct = per_server > 1 and bool(switched.min() == 0 or num_met.min() == per_server - 1)
    return float((direct if is_direct else switched).min()), is_direct


def _scale_out(fabric: Fabric, gpus: NDArray[np.int32]) -> tuple[float, float]:
    """Return the slowest rate of a rank to the network, and what two of its links take longer than usual ones."""
    source, target = fabric.directions
    rate, latency = np.repeat(fabric.bandwidth_bytes_per_s, 2), np.repeat(fabric.latency_s, 2)
    leaves = (fabric.kind[target] != NodeKind.SCALE_UP_SWITCH) & (fabric.server[source] != fabric.server[target])
    leaves &= np.isin(source, gpus)
    if not leaves.any():
        return 0.0, 0.0
    link_s = float(latency[leaves].max())
    late_s = 2 * (link_s - USUAL_LATENCY_S) if link_s > MOST_USUAL_LATENCY_S else 0.0
    return float(np.bincount(source[leaves], rate[leaves], fabric.num_nodes)[gpus].min()), late_s


def path_latencies_s(fabric: Fabric, gpus: NDArray[np.int32]) -> tuple[float, float]:
    """Return the most that data travels between two ranks of a server, and between two through one switch outside."""
    source, target = fabric.directions
    inside = fabric.server[source] == fabric.server[target]
    hops = np.where(inside & (fabric.kind[target] == NodeKind.GPU), 1, 2) * np.repeat(fabric.latency_s, 2)
    of_ranks = np.isin(source, gpus)
    near, far = (float(hops[of_ranks & where].max(initial=0.0)) for where in (inside, ~inside))
    return near, far


def device_of(fabric: Fabric) -> Device | None:
    """Return the catalog's device of a fabric's GPU type (`H100`, `h100_sxm`), None where it has none."""
    known, gpu_type = catalog.names("devices"), fabric.gpu_type.lower()
    name = next((name for name in (gpu_type, f"{gpu_type}_sxm") if name in known), None)
    return catalog.device(name) if name else None
