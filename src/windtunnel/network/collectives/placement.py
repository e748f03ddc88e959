"""Where the ranks of a collective are: GPUs, servers, and the bandwidths among them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.hardware import Device
from windtunnel.network.collectives.call import Ranks
from windtunnel.network.collectives.closed_forms import NVLINK_BYTES_PER_S, RING_SHARE
from windtunnel.network.fabric import MEASURED, Fabric, NodeKind
from windtunnel.units import US

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
    """Return how the ranks lie over servers, and the slowest bandwidths among them.

    Raises:
        InputError: servers hold different numbers of them.
    """
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
