"""Every packet on every link."""

from windtunnel.network.packet.simulate import simulate_packets as run_flows
from windtunnel.network.packet.simulate import trace_fullest_queues as trace_queues

__all__ = ["run_flows", "trace_queues"]
