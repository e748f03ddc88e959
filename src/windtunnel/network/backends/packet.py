"""Every packet on every link: lower flows to tables, run the compiled loop, read the times."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from windtunnel.errors import WindtunnelError
from windtunnel.network.fabric import Fabric
from windtunnel.network.flows import Flows
from windtunnel.network.packet.runner import PacketOutcome, run_in_parts, run_tables
from windtunnel.network.packet.tables import PS_PER_S, Floats, Ints, Table, picoseconds, tables_of
from windtunnel.network.paths import FlowTimes
from windtunnel.network.settings import SIMAI_PACKETS, NetworkSettings, PacketSettings


@dataclass(frozen=True, eq=False)
class QueueTrace:
    """Queues of some directed links at regular times."""

    links: NDArray[np.int32]
    time_s: Floats
    queued_bytes: Ints
    """(num_times, num_links)"""


@dataclass(frozen=True, eq=False)
class PacketTimes(FlowTimes):
    """Times of flows, with the statistics that only packets give."""

    links: Table
    """(2 x num_links,) records of `packet.kernel.state.PacketLink`: pauses, marks, drops, the largest queue."""
    trace: QueueTrace
    num_packets: int
    """Data packets sent, with repetitions."""
    num_repeated_packets: int


def simulate_packets(
    fabric: Fabric,
    flows: Flows,
    settings: NetworkSettings,
    packet: PacketSettings | None = None,
    traced: Sequence[int] = (),
) -> PacketTimes:
    """Time flows packet by packet.

    Args:
        packet: transport, congestion control and buffers; `settings.packet` where left out.
        traced: directed links whose queues are recorded every `packet.trace_interval_s`.

    Raises:
        InputError: ends are not connected, or the settings do not fit the fabric.
        WindtunnelError: flows wait for each other, or pauses do.
    """
    packet = packet or settings.packet or default_packets(settings)
    tables = tables_of(fabric, flows, settings, packet)
    traced_links = np.asarray(traced, np.int32)
    outcome = run_in_parts(tables) if len(traced_links) == 0 else run_tables(tables, traced_links)
    unfinished = int(np.count_nonzero(outcome.flows.finish_ps < 0))
    if unfinished and outcome.links.num_drops.any() and tables.settings.timeout_ps == 0:
        with_timer = tables.settings._replace(timeout_ps=picoseconds(packet.timeout_s))
        outcome = run_tables(replace(tables, settings=with_timer), traced_links)
        unfinished = int(np.count_nonzero(outcome.flows.finish_ps < 0))
    if unfinished:
        raise WindtunnelError(
            f"{unfinished} of {len(flows)} flows never finish",
            "they wait for each other" if not outcome.links.num_pauses.any() else "pause frames wait for each other",
        )
    return _times(outcome, traced_links, flows, settings)


MOST_TRACED = 16
NUM_TRACES = 256
"""Times at which queues are recorded, unless the settings give an interval."""


def trace_fullest_queues(fabric: Fabric, flows: Flows, settings: NetworkSettings, times: PacketTimes) -> QueueTrace:
    """Repeat a run and record its largest queues over time.

    Args:
        settings: of the run; a `packet.trace_interval_s` of 0 records 256 times.
    """
    queued_bytes = times.links.most_queued_bytes
    fullest = np.argsort(-queued_bytes, kind="stable")[: min(MOST_TRACED, np.count_nonzero(queued_bytes))]
    packet = settings.packet or default_packets(settings)
    if packet.trace_interval_s == 0:
        interval_s = max(float(times.finish_s.max(initial=0.0)) / NUM_TRACES, 1e-9)
        packet = msgspec.structs.replace(packet, trace_interval_s=interval_s)
    return simulate_packets(fabric, flows, settings, packet, traced=np.sort(fullest).tolist()).trace


def default_packets(settings: NetworkSettings) -> PacketSettings:
    """Return the packet settings of a network that gives none.

    Sprayed packets overtake each other, and need a transport that does not take that for a loss.
    """
    packet = SIMAI_PACKETS if settings.compat == "simai" else PacketSettings()
    if settings.routing == "spray":
        return msgspec.structs.replace(packet, recovery="selective_repeat", reordering_packets=1000)
    return packet


def _times(outcome: PacketOutcome, traced: NDArray[np.int32], flows: Flows, settings: NetworkSettings) -> PacketTimes:
    links, counters = outcome.links, outcome.counters
    sent_s, finish_s = outcome.flows.sent_ps / PS_PER_S, outcome.flows.finish_ps / PS_PER_S
    return PacketTimes(
        begin_s=outcome.flows.start_ps / PS_PER_S,
        sent_s=sent_s,
        finish_s=finish_s,
        total_s=_total_s(flows, settings, sent_s, finish_s),
        link_bytes=links.sent_bytes.astype(np.float64),
        link_was_full=links.most_queued_bytes > 0,
        num_events=int(counters.num_events),
        links=links,
        trace=QueueTrace(traced, outcome.trace[:, 0] / PS_PER_S, outcome.trace[:, 1:]),
        num_packets=int(counters.num_data_packets),
        num_repeated_packets=int(counters.num_repeated_packets),
    )


def _total_s(flows: Flows, settings: NetworkSettings, sent_s: Floats, finish_s: Floats) -> float:
    """Return when the last flow is complete; as SimAI, when the lowest rank has received and sent all its flows.

    SimAI reports rank 0 alone (`Workload::report`); where flows share links, the last rank is up to 15 % later.
    """
    if settings.compat != "simai" or len(flows) == 0:
        return float(finish_s.max(initial=0.0))
    first = min(flows.source.min(), flows.destination.min())
    received, sent = finish_s[flows.destination == first], sent_s[flows.source == first]
    return float(max(received.max(initial=0.0), sent.max(initial=0.0)))


run_flows, trace_queues = simulate_packets, trace_fullest_queues
