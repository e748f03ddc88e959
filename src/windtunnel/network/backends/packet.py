"""Every packet on every link: lower flows to tables, run the compiled loop, read the times."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from windtunnel.errors import WindtunnelError
from windtunnel.limits import check_size
from windtunnel.network.collectives.equal_stretches import ring_seconds as equal_stretches_seconds
from windtunnel.network.collectives.rings import Rings
from windtunnel.network.fabric import Fabric
from windtunnel.network.flows import Flows, with_columns
from windtunnel.network.packet.runner import PacketOutcome, run_in_parts, run_tables
from windtunnel.network.packet.tables import PS_PER_S, Table, picoseconds, tables_of
from windtunnel.network.paths import FlowTimes, reported_s
from windtunnel.network.settings import NetworkSettings, PacketSettings, packets_of

ROUND_PACKETS = 168
"""Flows that take turns repeat what they do after some packets; this is a multiple of 1 to 8 flows' turns, but of 5."""
SHORT_ROUNDS = (3, 4, 5)
"""Rounds of the messages that are simulated instead: several round trips (a window at 400 Gb/s is about 120 packets).
"""
LONG_PACKETS = 3072
"""Messages of fewer packets are simulated as they are."""
_PS_PER_S = 1e12


def long_seconds(seconds: Callable[[int], float | None], size_bytes: int, payload_bytes: int) -> float | None:
    """Return `seconds(size_bytes)`, for a long message from three shorter ones if one more round adds the same twice.

    Where it does not, because rates or queues still change, all of the message is simulated.

    Args:
        seconds: when flows of a number of bytes are complete; None, which is passed on, where that cannot be told.
    """
    num_packets = -(-size_bytes // payload_bytes)
    if num_packets < LONG_PACKETS:
        return seconds(size_bytes)
    num_rounds, ends_ps = num_packets // ROUND_PACKETS, []
    for rounds in SHORT_ROUNDS:
        end_s = seconds(size_bytes - (num_rounds - rounds) * ROUND_PACKETS * payload_bytes)
        if end_s is None:
            return None
        ends_ps.append(round(end_s * _PS_PER_S))
    round_ps, former_ps = ends_ps[2] - ends_ps[1], ends_ps[1] - ends_ps[0]
    if round_ps != former_ps:
        return seconds(size_bytes)
    return (ends_ps[2] + (num_rounds - SHORT_ROUNDS[2]) * round_ps) / _PS_PER_S


@dataclass(frozen=True, eq=False)
class PacketTimes(FlowTimes):
    """Times of flows, with the statistics that only packets give."""

    links: Table
    """(2 x num_links,) records of `packet.kernel.state.PacketLink`: pauses, marks, drops, the largest queue."""
    num_packets: int
    """Data packets sent, with repetitions."""
    num_repeated_packets: int


def simulate_packets(
    fabric: Fabric, flows: Flows, settings: NetworkSettings, packet: PacketSettings | None = None
) -> PacketTimes:
    """Time flows packet by packet. InputError where ends are not connected, the settings do not fit the fabric, or the
    run exceeds a limit of time; WindtunnelError where flows wait for each other, or pauses do.

    Args:
        packet: transport, congestion control and buffers; `settings.packet` where left out.
    """
    check_size(flows=len(flows), packets=float(flows.size_bytes.sum(dtype=np.float64)) / settings.payload_bytes)
    packet = packet or packets_of(settings)
    tables = tables_of(fabric, flows, settings, packet)
    outcome = run_tables(tables, once=True) if packet.every_flow else run_in_parts(tables)
    unfinished = int(np.count_nonzero(outcome.flows.finish_ps < 0))
    if unfinished and outcome.links.num_drops.any() and tables.settings.timeout_ps == 0:
        tables = tables_of(fabric, flows, settings, packet)
        with_timer = tables.settings._replace(timeout_ps=picoseconds(packet.timeout_s))
        outcome = run_tables(replace(tables, settings=with_timer), once=True)
        unfinished = int(np.count_nonzero(outcome.flows.finish_ps < 0))
    if unfinished:
        raise WindtunnelError(
            f"{unfinished} of {len(flows)} flows never finish",
            "they wait for each other" if not outcome.links.num_pauses.any() else "pause frames wait for each other",
        )
    return _times(outcome, flows, settings)


def ring_seconds(
    fabric: Fabric, rings: Rings, chunk_bytes: int, num_steps: int, settings: NetworkSettings
) -> float | None:
    """Return when a ring collective is complete, from one stretch of the ring; None where that stands for no other."""
    packet = packets_of(settings)

    def seconds(size_bytes: int) -> float | None:
        return equal_stretches_seconds(fabric, rings, size_bytes, num_steps, settings, packet)

    return seconds(chunk_bytes) if packet.every_flow else long_seconds(seconds, chunk_bytes, settings.payload_bytes)


def total_seconds(fabric: Fabric, flows: Flows, settings: NetworkSettings) -> float:
    """Return when all flows are complete; long ones of equal size from shorter ones."""
    packet = packets_of(settings)

    def seconds(size_bytes: int) -> float:
        return simulate_packets(fabric, with_columns(flows, size_bytes=size_bytes), settings, packet).total_s

    if packet.every_flow or len(flows) == 0 or np.ptp(flows.size_bytes) > 0:
        return simulate_packets(fabric, flows, settings, packet).total_s
    total_s = long_seconds(seconds, int(flows.size_bytes[0]), settings.payload_bytes)
    assert total_s is not None
    return total_s


def _times(outcome: PacketOutcome, flows: Flows, settings: NetworkSettings) -> PacketTimes:
    links, counters = outcome.links, outcome.counters
    sent_s, finish_s = outcome.flows.sent_ps / PS_PER_S, outcome.flows.finish_ps / PS_PER_S
    return PacketTimes(
        begin_s=outcome.flows.start_ps / PS_PER_S,
        sent_s=sent_s,
        finish_s=finish_s,
        total_s=reported_s(flows, settings, sent_s, finish_s),
        link_bytes=links.sent_bytes.astype(np.float64),
        link_was_full=links.most_queued_bytes > 0,
        num_events=int(counters.num_events),
        links=links,
        num_packets=int(counters.num_data_packets),
        num_repeated_packets=int(counters.num_repeated_packets),
    )


run_flows = simulate_packets
