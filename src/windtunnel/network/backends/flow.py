"""Flows that share links max-min fairly; of equivalent connections only one is simulated."""

import numpy as np

from windtunnel.compiled.arrays import Floats
from windtunnel.network.collectives.ring_classes import (
    Classes,
    ring_classes,
    ring_connections,
    run_classes,
    together_seconds,
)
from windtunnel.network.collectives.ring_classes import ring_seconds as equivalent_ring_seconds
from windtunnel.network.collectives.rings import Rings
from windtunnel.network.fabric import Fabric, NodeKind, between_switches
from windtunnel.network.flow.run import FlowOptions, lower, run_flow_level, run_lowered
from windtunnel.network.flows import Flows, flows_of
from windtunnel.network.paths import FlowTimes, Paths, data_bytes_per_s, find_paths, pairs_of, path_seconds
from windtunnel.network.settings import NetworkSettings, packets_of

SIMAI_HASHES = 8
"""Where rings meet, single hashes are 25 % below to 45 % above four recorded runs of SimAI, the mean of eight is 4 % to
9 % above (`benchmarks/ns3_runs.py`)."""
HASHES_ERROR = 0.005
"""From three hashes or draws on, no more are run once the standard error of their mean is at most this fraction of it:
a choice, a tenth of the 5% that recorded times are compared within."""
SIMAI_DRAWS = 4
"""Where packets are marked, single draws of the recorded all-to-all under DCQCN take 338 to 407 us; SimAI took 355."""


run_flows = run_flow_level


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
    """Return when all flows are complete; for SimAI's rings that meet, the mean of `SIMAI_HASHES`, or of fewer.

    SimAI hashes every flow anew. Flows of a ring that meet decide which meet later, so that one hash says little; for
    flows that all start at once it says what SimAI's does, but not which packets are marked. Where rings queue up at
    their NICs alone, chance decides which flow is first. Equal flows that wait for nothing run by equivalence class.
    """
    if settings.compat is None and len(flows.parent) == 0 and np.ptp(flows.size_bytes) == 0:
        return together_seconds(fabric, flows, settings)
    lowered = lower(fabric, flows, settings, pairs_of(fabric, flows, settings))
    times = run_lowered(lowered, settings.seed)
    if settings.compat != "simai" or not _full_between_servers(fabric, times):
        return times.total_s
    totals_s, seed = [times.total_s], settings.seed
    if len(flows.parent) == 0:
        is_drawn = times.is_controlled and packets_of(settings).congestion in ("dcqcn", "dctcp")
        while is_drawn and len(totals_s) < SIMAI_DRAWS and not _is_precise(totals_s):
            totals_s.append(run_lowered(lowered, seed, FlowOptions(draw=len(totals_s))).total_s)
    elif not full_between_switches(fabric, times):
        return run_lowered(lowered, seed, FlowOptions(by_chance=True)).total_s
    else:
        options = FlowOptions(watches_control=times.is_controlled)
        while len(totals_s) < SIMAI_HASHES and not _is_precise(totals_s):
            totals_s.append(run_lowered(lowered, seed + len(totals_s), options).total_s)
    return float(np.mean(totals_s))


def _is_precise(totals_s: list[float]) -> bool:
    """Whether the mean of at least three times is known well enough."""
    error_s = np.std(totals_s, ddof=1) / len(totals_s) ** 0.5 if len(totals_s) > 2 else np.inf
    return bool(error_s <= HASHES_ERROR * np.mean(totals_s))


def full_between_switches(fabric: Fabric, times: FlowTimes) -> bool:
    """Whether a link from switch to switch, where hashes choose, was full."""
    return bool(times.link_was_full[between_switches(fabric)].any())


def _full_between_servers(fabric: Fabric, times: FlowTimes) -> bool:
    of_switch = (fabric.kind[fabric.link_a] == NodeKind.SWITCH) | (fabric.kind[fabric.link_b] == NodeKind.SWITCH)
    return bool(times.link_was_full[np.repeat(of_switch, 2)].any())


def hashed_ring_seconds(
    fabric: Fabric, rings: Rings, chunk_bytes: int, num_steps: int, settings: NetworkSettings
) -> float | None:
    """Return when the last step of a ring collective is complete, equal to `run_flow_level` for all of its flows.

    SimAI's flows take another path in every step, so that no two connections cross the same links throughout. But a
    link that never fills changes nothing: the other links decide the allocation. So classes are formed by these alone,
    one connection of each is run, and then a check makes sure that no link between switches ever had more load than it
    carries. None where a link between servers fills, paths have several lengths or few connections are equivalent.
    InputError where ranks are not connected.
    """
    classes = ring_classes(fabric, rings, settings, between_switches(fabric))
    if 2 * len(classes.before) > rings.order.size:
        return None
    times = run_classes(fabric, classes, chunk_bytes, num_steps, settings)
    if _full_between_servers(fabric, times) or not _is_apart(
        fabric, rings, classes, times, chunk_bytes, num_steps, settings
    ):
        return None
    return times.total_s


def _is_apart(
    fabric: Fabric,
    rings: Rings,
    classes: Classes,
    times: FlowTimes,
    chunk_bytes: int,
    num_steps: int,
    settings: NetworkSettings,
) -> bool:
    """Whether flows between switches, each on its own path, have one length and never fill a link there."""
    crosses = np.logical_or.reduceat(between_switches(fabric)[classes.paths.link], classes.paths.pointer[:-1])
    leaving = np.flatnonzero(crosses[classes.of_connection])
    if len(leaving) == 0:
        return True
    connections = ring_connections(rings)
    source, destination, channel = (
        np.tile(column[leaving], num_steps)
        for column in (connections.source, connections.destination, connections.channel)
    )
    step = np.repeat(np.arange(num_steps), len(leaving))
    flows = flows_of(source, destination, chunk_bytes, connection=channel, channel=channel, step=step)
    paths = find_paths(fabric, flows, settings)
    row = np.repeat(np.arange(num_steps), len(leaving)) * len(classes.before)
    row += np.tile(classes.of_connection[leaving], num_steps)
    for expected, tail in zip(
        path_seconds(fabric, settings, classes.paths), path_seconds(fabric, settings, paths), strict=True
    ):
        of_leaving = tail[paths.of_flow].reshape(num_steps, -1)
        if not np.allclose(of_leaving, expected[classes.of_connection[leaving]], rtol=1e-12, atol=0):
            return False
    return not _fills(fabric, settings, paths, times.begin_s[row], times.sent_s[row])


def _fills(fabric: Fabric, settings: NetworkSettings, paths: Paths, begin_s: Floats, sent_s: Floats) -> bool:
    """Whether flows that send at the same time ever load a link between switches with more than it carries."""
    rate = np.repeat(data_bytes_per_s(fabric, settings), 2)
    limit = np.rint(np.minimum.reduceat(rate[paths.link], paths.pointer[:-1])).astype(np.int64)
    flow, links, _ = paths.crossings()
    kept = between_switches(fabric)[links]
    flow, links = flow[kept], links[kept].astype(np.int64)
    rates = limit[paths.of_flow[flow]]
    # One key to sort by: the link, then the moment; at one moment, flows end before others begin.
    tick_s = max(1e-12, float(sent_s.max()) / 2**40)
    moments = np.rint(np.concatenate([sent_s[flow], begin_s[flow]]) / tick_s).astype(np.int64)
    moments = 2 * moments + np.repeat([0, 1], len(flow))
    links = np.concatenate([links, links])
    order = np.argsort(links * (moments.max() + 1) + moments)
    load = np.cumsum(np.concatenate([-rates, rates])[order])
    return bool((load > rate[links[order]] * (1 + 1e-9) + 1).any())
