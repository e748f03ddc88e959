"""Run flows over a fabric with the network backend of that name."""

from windtunnel.network.fabric import Fabric
from windtunnel.network.flows import Flows
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
