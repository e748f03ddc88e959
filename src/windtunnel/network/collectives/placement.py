"""Where the ranks of a collective are: GPUs, servers, and the bandwidths among them."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.hardware import Device
from windtunnel.network.collectives.call import Ranks
from windtunnel.network.collectives.closed_forms import RING_SHARE
from windtunnel.network.fabric import Fabric, NodeKind

_NVLS_BYTES_PER_S = 150e9
"""Slower scale-up links are PCIe or bridges, whose switches do not add."""


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
            f"servers hold {per_server.min()} to {per_server.max()} of the ranks; equal numbers are needed"
        )
    inside, outside = _bandwidths(fabric)
    device = device_of(fabric)
    hopper_on = device is not None and device.architecture in ("hopper", "blackwell")
    up = float(inside[gpus].min())
    # Topology files often give the rate that a ring reaches in place of the data sheet's.
    published = device.scale_up_bytes_per_s if device else None
    return Ranks(
        num_ranks=len(gpus),
        num_servers=len(per_server),
        scale_up_bytes_per_s=min(published, up / RING_SHARE) if published else up,
        network_bytes_per_s=float(outside[gpus].min()),
        nvls=hopper_on and up >= _NVLS_BYTES_PER_S,
    )


def _bandwidths(fabric: Fabric) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return (num_nodes,) bandwidths of each GPU inside its server, and to the network."""
    inside, outside = np.zeros(fabric.num_nodes), np.zeros(fabric.num_nodes)
    source, target = fabric.directions
    rate = np.repeat(fabric.bandwidth_bytes_per_s, 2)
    near = (fabric.kind[target] == NodeKind.SCALE_UP_SWITCH) | (fabric.server[source] == fabric.server[target])
    np.add.at(inside, source[near], rate[near])
    np.add.at(outside, source[~near], rate[~near])
    return inside, outside


def device_of(fabric: Fabric) -> Device | None:
    """Return the catalog's device of a fabric's GPU type (`H100`, `h100_sxm`), None where it has none."""
    known, gpu_type = catalog.names("devices"), fabric.gpu_type.lower()
    name = next((name for name in (gpu_type, f"{gpu_type}_sxm") if name in known), None)
    return catalog.device(name) if name else None
