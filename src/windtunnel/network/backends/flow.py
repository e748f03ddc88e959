"""Flows that share links max-min fairly; of equivalent connections only one is simulated."""

import msgspec
import numpy as np

from windtunnel.network.collectives.hashed_rings import between_switches, hashed_ring_seconds
from windtunnel.network.collectives.ring_classes import ring_seconds as equivalent_ring_seconds
from windtunnel.network.collectives.ring_classes import together_seconds
from windtunnel.network.collectives.rings import Rings
from windtunnel.network.fabric import Fabric
from windtunnel.network.flow.run import run_flow_level
from windtunnel.network.flows import Flows
from windtunnel.network.paths import FlowTimes
from windtunnel.network.settings import NetworkSettings

SIMAI_HASHES = 8
"""Where rings meet, single hashes are 25 % below to 45 % above four recorded runs of SimAI, the mean of eight is 4 % to
9 % above (`benchmarks/ns3_runs.py`)."""


def run_flows(fabric: Fabric, flows: Flows, settings: NetworkSettings) -> FlowTimes:
    """Time flows by max-min fair sharing of every link."""
    return run_flow_level(fabric, flows, settings)


def ring_seconds(
    fabric: Fabric, rings: Rings, chunk_bytes: int, num_steps: int, settings: NetworkSettings
) -> float | None:
    """Time rings, one connection per equivalence class; None where SimAI's hashes leave no class."""
    if settings.compat is None:
        return equivalent_ring_seconds(fabric, rings, chunk_bytes, num_steps, settings)
    if settings.routing != "ecmp":
        return None
    return hashed_ring_seconds(fabric, rings, chunk_bytes, num_steps, settings)


def total_seconds(fabric: Fabric, flows: Flows, settings: NetworkSettings) -> float:
    """Return when all flows are complete; for SimAI's rings that meet, the mean of `SIMAI_HASHES`.

    SimAI hashes every flow anew. Flows of a ring that meet decide which meet later, so that one hash says little; for
    flows that all start at once it says what SimAI's does. Equal flows that wait for nothing run by equivalence class.
    """
    if settings.compat is None and len(flows.parent) == 0 and np.ptp(flows.size_bytes) == 0:
        return together_seconds(fabric, flows, settings)
    times = run_flows(fabric, flows, settings)
    is_chain = settings.compat == "simai" and len(flows.parent) > 0
    if not is_chain or not full_between_switches(fabric, times):
        return times.total_s
    others = [msgspec.structs.replace(settings, seed=settings.seed + k) for k in range(1, SIMAI_HASHES)]
    return float(np.mean([times.total_s, *(run_flows(fabric, flows, other).total_s for other in others)]))


def full_between_switches(fabric: Fabric, times: FlowTimes) -> bool:
    """Whether a link from switch to switch, where hashes choose, was full."""
    return bool(times.link_was_full[between_switches(fabric)].any())
