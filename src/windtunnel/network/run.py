"""Run flows over a fabric with the network backend of that name."""

import numpy as np
from numpy.typing import NDArray

from windtunnel.network.fabric import Fabric
from windtunnel.network.flows import Flows, flows_of
from windtunnel.network.paths import FlowTimes
from windtunnel.network.settings import BACKENDS, NetworkSettings


def run_flows(fabric: Fabric, flows: Flows, settings: NetworkSettings, backend: str | None = None) -> FlowTimes:
    """Time flows with a backend, that of the settings where none is given.

    Raises:
        InputError: there is no such backend, ends are not connected, or the settings do not fit the fabric.
        WindtunnelError: flows wait for each other.
    """
    times: FlowTimes = BACKENDS.get(backend or settings.backend).run_flows(fabric, flows, settings)
    return times


def run_transfers(
    fabric: Fabric,
    source: NDArray[np.integer],
    destination: NDArray[np.integer],
    size_bytes: NDArray[np.integer],
    start_s: NDArray[np.float64] | float,
    backend: str = "flow",
    settings: NetworkSettings | None = None,
) -> FlowTimes:
    """Time transfers that share a fabric, each with its own start.

    Raises:
        InputError: ends are not connected.
    """
    flows = flows_of(source, destination, size_bytes, connection=np.arange(len(source)), start_s=start_s)
    return run_flows(fabric, flows, settings or NetworkSettings(), backend)
