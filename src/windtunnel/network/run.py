"""Flows over a fabric: routed, then timed at the depth that was asked for."""

from windtunnel.network.fabric import Fabric
from windtunnel.network.flow.run import run_flow_level
from windtunnel.network.flows import Flows
from windtunnel.network.paths import FlowTimes
from windtunnel.network.settings import Backend, NetworkSettings


def run_flows(fabric: Fabric, flows: Flows, settings: NetworkSettings, backend: Backend | None = None) -> FlowTimes:
    """Flows at the depth that was asked for; the analytic one lets every flow have its path to itself.

    Raises:
        InputError: ends are not connected, or the packet level's settings do not fit the fabric.
        WindtunnelError: flows wait for each other.
    """
    match backend or settings.backend:
        case "flow":
            return run_flow_level(fabric, flows, settings)
        case "analytic":
            return run_flow_level(fabric, flows, settings, shared=False)
        case "packet":
            from windtunnel.network.packet.simulate import simulate_packets

            return simulate_packets(fabric, flows, settings)
