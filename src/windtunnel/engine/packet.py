"""Run flows packet by packet: fabric, flows and settings to tables, the compiled loop, and back to times."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from windtunnel.engine.network import FlowTimes, Paths, find_paths, followers, graph_of, send_delay_s
from windtunnel.errors import InputError, WindtunnelError
from windtunnel.kernels import packet as loop
from windtunnel.kernels import packet_state as state
from windtunnel.kernels.calendar import new_calendar
from windtunnel.ops.flows import Flows, flows_of
from windtunnel.spec.fabric import Fabric, NodeKind
from windtunnel.spec.network import NetworkSettings
from windtunnel.spec.packet import GBPS, SIMAI_PACKETS, PacketSettings

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Table = Any
"""A record array of one of the layouts in `kernels.packet_state`."""

PS_PER_S = 1e12
SIMAI_HEADER_BYTES = 50
"""Ethernet 14, IPv4 20, UDP 8, sequence and class 8: with it the runs of one flow a NIC agree to the nanosecond."""
HPCC_HEADER_BYTES = 42
"""In-band telemetry of five hops of 8 bytes, and a count (HPCC's simulator)."""
TIMELY_HEADER_BYTES = 8
"""A time stamp."""
WHEEL_PS = 2**23
"""One turn of the calendar: 8 us, more than a hop or a launch takes."""


@dataclass(frozen=True, eq=False)
class LinkStatistics:
    """What happened on each directed link: `2 x link` from its first end, `2 x link + 1` back."""

    busy_fraction: Floats
    """Of the time until the last completion."""
    most_queued_bytes: Ints
    paused_s: Floats
    num_pauses: Ints
    """Sent by the node at its far end."""
    num_marks: Ints
    num_drops: Ints


@dataclass(frozen=True, eq=False)
class QueueTrace:
    """What was queued on some directed links at regular times."""

    links: NDArray[np.int32]
    time_s: Floats
    queued_bytes: Ints
    """(num_times, num_links)"""


@dataclass(frozen=True, eq=False)
class PacketTimes(FlowTimes):
    """Times of flows, and what only packets show."""

    links: LinkStatistics
    trace: QueueTrace
    num_packets: int
    """Data packets sent, repetitions included."""
    num_repeated_packets: int


@dataclass(frozen=True, eq=False)
class Tables:
    """What the loop runs. Every array but the record arrays of links, nodes and flows is only read."""

    settings: state.Settings
    links: Table
    nodes: Table
    flows: Table
    parent_ptr: Ints
    parent: NDArray[np.int32]
    paths: Ints
    path_links: NDArray[np.int32]
    replies: Ints
    reply_links: NDArray[np.int32]
    neighbor_start: Ints
    neighbor_links: NDArray[np.int32]
    distances: NDArray[np.int16]
    """(destinations, nodes) hops; empty where paths are fixed."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """The tables after a run."""

    links: Table
    nodes: Table
    flows: Table
    trace: Ints
    num_events: int
    num_packets: int
    num_repeated_packets: int
    num_draws: int


def simulate_packets(
    fabric: Fabric,
    flows: Flows,
    settings: NetworkSettings,
    packet: PacketSettings | None = None,
    traced: Sequence[int] = (),
) -> PacketTimes:
    """Time flows packet by packet.

    Args:
        fabric: where they run.
        flows: what runs.
        settings: packet sizes, latencies and routing.
        packet: transport, congestion control and buffers; `settings.packet` where left out.
        traced: directed links whose queues are looked at every `packet.trace_interval_s`.

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
        with_timer = tables.settings._replace(timeout_ps=_ps(packet.timeout_s))
        outcome = run_tables(replace(tables, settings=with_timer), traced_links)
        unfinished = int(np.count_nonzero(outcome.flows.finish_ps < 0))
    if unfinished:
        raise WindtunnelError(
            f"{unfinished} of {len(flows)} flows never finish",
            "they wait for each other" if not outcome.links.num_pauses.any() else "pause frames wait for each other",
        )
    return _times(outcome, traced_links)


def default_packets(settings: NetworkSettings) -> PacketSettings:
    """The packet settings of a network that gives none; sprayed packets overtake each other, and need a transport that
    does not take that for a loss.
    """
    packet = SIMAI_PACKETS if settings.compat == "simai" else PacketSettings()
    if settings.routing == "spray":
        return msgspec.structs.replace(packet, recovery="selective_repeat", reordering_packets=1000)
    return packet


def run_tables(tables: Tables, traced: NDArray[np.int32] | None = None) -> Outcome:
    """Run the compiled loop to its end, with larger tables whenever it asks for them."""
    children_start, children = _children(tables.parent_ptr, tables.parent)
    most_children = int(np.diff(children_start).max(initial=0))
    settings = tables.settings._replace(most_children=most_children)
    links, nodes, flows = tables.links.copy(), tables.nodes.copy(), tables.flows.copy()
    num_roots = int(np.count_nonzero(flows.parents_left == 0))
    num_buckets = 1 << min(20, max(12, int(np.ceil(np.log2(4 * len(links))))))
    shift = max(0, int(np.log2(WHEEL_PS / num_buckets)))
    events, heaps, buckets, calendar = new_calendar(num_roots + most_children + 512, num_buckets, shift)
    send_queues = np.zeros(int(flows.queue.max(initial=0)) + 1, state.SEND_QUEUE).view(np.recarray)
    send_queues.first = state.NONE
    connections = _free_list(state.CONNECTION, min(len(flows), 256) + 1)
    packets = _free_list(state.PACKET, 512)
    is_hpcc = settings.congestion == state.HPCC
    hops = int(np.diff(tables.paths).max(initial=1)) if is_hpcc else 1
    stamps = np.zeros((len(packets) if is_hpcc else 1, hops), state.STAMP).view(np.recarray)
    seen = np.zeros((len(connections) if is_hpcc else 1, hops), state.STAMP).view(np.recarray)
    sacks = np.zeros((2 * len(connections), _sack_words(tables)), np.uint64)
    traced = np.zeros(0, np.int32) if traced is None else traced
    trace = np.zeros((4096 if settings.trace_interval_ps else 1, 1 + len(traced)), np.int64)
    counters = np.zeros(1, state.COUNTERS).view(np.recarray)
    counters.num_free_connections, counters.num_free_packets = len(connections), len(packets)
    traces = []
    while True:
        outcome = loop.run(
            settings,
            links,
            nodes,
            flows,
            send_queues,
            children_start,
            children,
            tables.paths,
            tables.path_links,
            tables.replies,
            tables.reply_links,
            tables.neighbor_start,
            tables.neighbor_links,
            tables.distances,
            connections,
            packets,
            stamps,
            seen,
            sacks,
            traced,
            trace,
            counters,
            events,
            heaps,
            buckets,
            calendar,
        )
        if outcome == loop.DONE:
            break
        if outcome == loop.MORE_EVENTS:
            events = _grown(events, calendar, "free", "num_free")
            heaps = _longer(heaps, len(events))
        elif outcome == loop.MORE_PACKETS:
            packets = _grown(packets, counters, "free_packet", "num_free_packets")
            stamps = _longer(stamps, len(packets)) if is_hpcc else stamps
        elif outcome == loop.MORE_CONNECTIONS:
            connections = _grown(connections, counters, "free_connection", "num_free_connections")
            seen = _longer(seen, len(connections)) if is_hpcc else seen
            senders, receivers = np.split(sacks, 2)
            sacks = np.concatenate([_longer(senders, len(connections)), _longer(receivers, len(connections))])
        else:
            traces.append(trace.copy())
            counters.num_trace_rows = 0
    traces.append(trace[: counters[0].num_trace_rows])
    return Outcome(
        links,
        nodes,
        flows,
        np.concatenate(traces),
        int(counters[0].num_events),
        int(counters[0].num_data_packets),
        int(counters[0].num_repeated_packets),
        int(counters[0].num_draws),
    )


def _free_list(layout: np.dtype[Any], size: int) -> Table:
    table = np.zeros(size, layout).view(np.recarray)
    table["next"] = np.arange(1, size + 1)
    return table


def _longer(table: Table, size: int) -> Table:
    larger = np.zeros((size, *table.shape[1:]), table.dtype)
    larger[: len(table)] = table
    return larger.view(np.recarray) if table.dtype.names else larger


def _grown(table: Table, registers: Table, first: str, count: str) -> Table:
    """Twice as many records; the new ones are at the head of the free list."""
    size = len(table)
    larger = _longer(table, 2 * size)
    larger["next"][size:] = np.arange(size + 1, 2 * size + 1)
    larger["next"][-1] = registers[0][first]
    registers[first] = size
    registers[count] += size
    return larger


def _children(parent_ptr: Ints, parent: NDArray[np.int32]) -> tuple[Ints, NDArray[np.int32]]:
    """The flows that wait for each flow: the inverse of the parents."""
    num_flows = len(parent_ptr) - 1
    child = np.repeat(np.arange(num_flows, dtype=np.int32), np.diff(parent_ptr))
    start = np.zeros(num_flows + 1, np.int64)
    np.cumsum(np.bincount(parent, minlength=num_flows), out=start[1:])
    return start, child[np.argsort(parent, kind="stable")]


def _sack_words(tables: Tables) -> int:
    if tables.settings.recovery != state.SELECTIVE_REPEAT:
        return 1
    most_packets = int(tables.flows.window_bytes.max(initial=1)) // tables.settings.payload_bytes + 2
    return most_packets // 64 + 1


def _times(outcome: Outcome, traced: NDArray[np.int32]) -> PacketTimes:
    flows, links = outcome.flows, outcome.links
    end_ps = max(1, int(flows.finish_ps.max(initial=0)))
    return PacketTimes(
        begin_s=flows.start_ps / PS_PER_S,
        sent_s=flows.sent_ps / PS_PER_S,
        finish_s=flows.finish_ps / PS_PER_S,
        link_bytes=links.sent_bytes.astype(np.float64),
        link_was_full=links.most_queued_bytes > 0,
        num_events=outcome.num_events,
        links=LinkStatistics(
            busy_fraction=links.sent_bytes * links.ps_per_byte / end_ps,
            most_queued_bytes=links.most_queued_bytes.copy(),
            paused_s=links.paused_ps / PS_PER_S,
            num_pauses=links.num_pauses.copy(),
            num_marks=links.num_marks.copy(),
            num_drops=links.num_drops.copy(),
        ),
        trace=QueueTrace(traced, outcome.trace[:, 0] / PS_PER_S, outcome.trace[:, 1:]),
        num_packets=outcome.num_packets,
        num_repeated_packets=outcome.num_repeated_packets,
    )


# ---------------------------------------------------------------------------------------------------------------- parts


@dataclass(frozen=True, eq=False)
class Part:
    """Flows that no other flow shares a link with, and their numbers in the whole."""

    tables: Tables
    flows: Ints
    links: Ints
    nodes: Ints

    @property
    def likeness(self) -> bytes:
        """Equal for parts that differ in nothing but names."""
        tables, links = self.tables, self.tables.links.copy()
        links.name = 0
        arrays = (links, tables.nodes, tables.flows, tables.parent_ptr, tables.parent)
        routes = (tables.paths, tables.path_links, tables.replies, tables.reply_links)
        return hashlib.sha256(b"".join(array.tobytes() for array in (*arrays, *routes))).digest()


def run_in_parts(tables: Tables) -> Outcome:
    """As `run_tables`, part by part, and parts that are alike only once, where that changes nothing.

    It changes nothing if parts have no link, send queue or parent in common, if those that stand for others drew no
    random number, and if no switch that several parts cross comes near to pausing or dropping: if all of their largest
    buffers together still left every port a share larger than any of them.
    """
    parts = split(tables)
    if len(parts) == 1:
        return run_tables(tables)
    outcomes: list[Outcome] = []
    alike: dict[bytes, Outcome] = {}
    num_events = 0
    for part in parts:
        likeness = part.likeness
        outcome = alike.get(likeness)
        if outcome is None:
            outcome = run_tables(part.tables)
            num_events += outcome.num_events
            if outcome.num_draws == 0:
                alike[likeness] = outcome
        outcomes.append(outcome)
    if not _is_roomy(tables, parts, outcomes):
        return run_tables(tables)
    return _joined(tables, parts, outcomes, num_events)


def split(tables: Tables) -> list[Part]:
    """The parts of some tables; only one where packets choose their way."""
    num_flows, num_links = len(tables.flows), len(tables.links) // 2
    if tables.settings.routing != state.ECMP or num_flows == 0:
        return [Part(tables, np.arange(num_flows), np.arange(2 * num_links), np.arange(len(tables.nodes)))]
    num_queues = int(tables.flows.queue.max()) + 1
    group = np.empty(num_flows + num_links + num_queues, np.int64)
    routes = (tables.paths, tables.path_links, tables.replies, tables.reply_links)
    loop.find_groups(tables.flows, tables.parent_ptr, tables.parent, *routes, num_queues, group)
    of_flow = group[:num_flows]
    order = np.argsort(of_flow, kind="stable")
    first = np.flatnonzero(np.diff(of_flow[order], prepend=-1))
    if len(first) == 1:
        return [Part(tables, np.arange(num_flows), np.arange(2 * num_links), np.arange(len(tables.nodes)))]
    return [_part(tables, flows) for flows in np.split(order, first[1:])]


def _part(tables: Tables, flows: Ints) -> Part:
    """Some flows with the links, nodes and paths that they use, numbered as they first appear."""
    records = tables.flows[flows].copy()
    paths, path_links, records.path = _routes(tables.paths, tables.path_links, records.path)
    replies, reply_links, records.reply = _routes(tables.replies, tables.reply_links, records.reply)
    records.queue = _renumbered(records.queue)[1]
    records.follower = np.where(records.follower < 0, -1, np.searchsorted(flows, records.follower))
    pairs, position = _renumbered(np.concatenate([path_links, reply_links]) >> 1)
    links = (2 * pairs[:, None] + np.arange(2)).ravel()
    used = tables.links[links].copy()
    nodes, ends = _renumbered(np.concatenate([used.source, used.target]))
    used.source, used.target = np.split(ends, 2)
    path_links = 2 * position[: len(path_links)] + (path_links & 1)
    reply_links = 2 * position[len(path_links) :] + (reply_links & 1)
    num_parents = tables.parent_ptr[flows + 1] - tables.parent_ptr[flows]
    parent_ptr = np.concatenate([[0], np.cumsum(num_parents)])
    parents = np.repeat(tables.parent_ptr[flows] - parent_ptr[:-1], num_parents) + np.arange(parent_ptr[-1])
    part = replace(
        tables,
        links=used,
        nodes=tables.nodes[nodes].copy(),
        flows=records,
        parent_ptr=parent_ptr,
        parent=np.searchsorted(flows, tables.parent[parents]).astype(np.int32),
        paths=paths,
        path_links=path_links.astype(np.int32),
        replies=replies,
        reply_links=reply_links.astype(np.int32),
    )
    return Part(part, flows, links, nodes)


def _renumbered(values: NDArray[np.integer]) -> tuple[Ints, Ints]:
    """The distinct values in the order of their first appearance, and each value's position among them."""
    distinct, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    return distinct[order].astype(np.int64), rank[inverse]


def _routes(pointer: Ints, links: NDArray[np.int32], used: NDArray[np.int32]) -> tuple[Ints, Ints, Ints]:
    """The used paths alone: pointers, links, and which each flow has."""
    kept, which = _renumbered(used)
    lengths = pointer[kept + 1] - pointer[kept]
    start = np.concatenate([[0], np.cumsum(lengths)])
    positions = np.repeat(pointer[kept] - start[:-1], lengths) + np.arange(start[-1])
    return start, links[positions].astype(np.int64), which


def _is_roomy(tables: Tables, parts: list[Part], outcomes: list[Outcome]) -> bool:
    """Whether buffers that several parts share could never have paused or dropped."""
    num_parts = np.zeros(len(tables.nodes), np.int64)
    total, largest = np.zeros_like(num_parts), np.zeros_like(num_parts)
    for part, outcome in zip(parts, outcomes, strict=True):
        num_parts[part.nodes] += 1
        total[part.nodes] += outcome.nodes.most_shared_bytes
        largest[part.nodes] = np.maximum(largest[part.nodes], outcome.nodes.most_shared_bytes)
    packet_bytes = tables.settings.payload_bytes + tables.settings.header_bytes
    shift = int(tables.links.pfc_shift.max(initial=0))
    shared = (num_parts > 1) & (tables.nodes.kind == state.SWITCH)
    share = (tables.nodes.shared_limit_bytes - total) >> shift
    return bool((largest[shared] + packet_bytes < share[shared]).all())


def _joined(tables: Tables, parts: list[Part], outcomes: list[Outcome], num_events: int) -> Outcome:
    links, nodes, flows = tables.links.copy(), tables.nodes.copy(), tables.flows.copy()
    kept = ("name", "source", "target")
    for part, outcome in zip(parts, outcomes, strict=True):
        for name in links.dtype.names:
            if name not in kept:
                links[name][part.links] = outcome.links[name]
        for name in ("start_ps", "sent_ps", "finish_ps"):
            flows[name][part.flows] = outcome.flows[name]
        nodes.most_shared_bytes[part.nodes] += outcome.nodes.most_shared_bytes
    return Outcome(
        links,
        nodes,
        flows,
        np.zeros((0, 1), np.int64),
        num_events,
        sum(outcome.num_packets for outcome in outcomes),
        sum(outcome.num_repeated_packets for outcome in outcomes),
        sum(outcome.num_draws for outcome in outcomes),
    )


# --------------------------------------------------------------------------------------------------------------- tables


def tables_of(fabric: Fabric, flows: Flows, settings: NetworkSettings, packet: PacketSettings) -> Tables:
    """Everything that the loop runs on.

    Raises:
        InputError: ends are not connected, or the settings do not fit the fabric.
    """
    paths = find_paths(fabric, flows, _fixed_routing(settings))
    replies = find_paths(fabric, flows, _fixed_routing(settings), answers=True)
    links = _links(fabric, packet, paths)
    is_lossy = bool(fabric.error_fraction.any()) or not packet.pfc
    graph = graph_of(fabric)
    rows, distances = _distances(fabric, flows) if settings.routing == "spray" else (None, np.zeros((1, 1), np.int16))
    return Tables(
        settings=_kernel_settings(settings, packet, is_lossy),
        links=links,
        nodes=_nodes(fabric, packet, links),
        flows=_flow_table(fabric, flows, settings, packet, paths, replies, rows),
        parent_ptr=flows.parent_ptr,
        parent=flows.parent,
        paths=paths.pointer,
        path_links=paths.link,
        replies=replies.pointer,
        reply_links=replies.link,
        neighbor_start=graph.pointer,
        neighbor_links=graph.direction,
        distances=distances,
    )


def _fixed_routing(settings: NetworkSettings) -> NetworkSettings:
    """The settings with one path a connection: packets that are sprayed leave it at the first switch."""
    return msgspec.structs.replace(settings, routing="ecmp")


def _kernel_settings(settings: NetworkSettings, packet: PacketSettings, is_lossy: bool) -> state.Settings:
    is_simai = settings.compat == "simai"
    congestion = {
        "none": state.UNCONTROLLED,
        "dcqcn": state.DCQCN,
        "hpcc": state.HPCC,
        "timely": state.TIMELY,
        "dctcp": state.DCTCP,
    }[packet.congestion]
    header_bytes = SIMAI_HEADER_BYTES if is_simai else settings.header_bytes
    header_bytes += {"hpcc": HPCC_HEADER_BYTES, "timely": TIMELY_HEADER_BYTES}.get(packet.congestion, 0)
    routing = state.ECMP
    if settings.routing == "spray":
        routing = state.ADAPTIVE if packet.spray == "shortest_queue" else state.SPRAY
    return state.Settings(
        payload_bytes=settings.payload_bytes,
        header_bytes=header_bytes,
        ack_bytes=packet.ack_bytes,
        window_follows_rate=packet.window_follows_rate,
        congestion=congestion,
        recovery=state.SELECTIVE_REPEAT if packet.recovery == "selective_repeat" else state.GO_BACK_N,
        reordering_packets=packet.reordering_packets,
        timeout_ps=_ps(packet.timeout_s) if is_lossy else 0,
        routing=routing,
        completes_on_ack=is_simai,
        cut_through=packet.cut_through,
        ack_interval_bytes=packet.ack_interval_bytes,
        ack_first=packet.acks_first,
        has_pfc=packet.pfc,
        dynamic_pfc=packet.dynamic_pfc,
        has_ecn=packet.ecn,
        reserve_bytes=packet.reserve_bytes,
        resume_offset_bytes=packet.resume_offset_bytes,
        min_rate=packet.min_rate_bytes_per_s,
        rate_ai=packet.rate_ai_bytes_per_s,
        rate_hai=packet.rate_hai_bytes_per_s,
        ewma_gain=packet.ewma_gain,
        alpha_interval_ps=_ps(packet.alpha_interval_s),
        decrease_interval_ps=_ps(packet.decrease_interval_s),
        increase_interval_ps=_ps(packet.increase_interval_s),
        fast_recovery_times=packet.fast_recovery_times,
        clamp_target_rate=packet.clamp_target_rate,
        dctcp_rate_ai=packet.dctcp_rate_ai_bytes_per_s,
        target_utilisation=packet.target_utilisation,
        most_increases=packet.most_increases,
        fast_react=packet.fast_react,
        timely_alpha=packet.timely_alpha,
        timely_beta=packet.timely_beta,
        timely_low_ps=_ps(packet.timely_low_s),
        timely_high_ps=_ps(packet.timely_high_s),
        timely_min_rtt_ps=_ps(packet.timely_min_rtt_s),
        tick_ps=1000 if is_simai else 1,
        most_children=0,
        trace_interval_ps=_ps(packet.trace_interval_s),
        seed=settings.seed,
    )


def _ps(seconds: float) -> int:
    return round(seconds * PS_PER_S)


def _links(fabric: Fabric, packet: PacketSettings, paths: Paths) -> Table:
    links = np.zeros(2 * fabric.num_links, state.LINK).view(np.recarray)
    rate = np.repeat(fabric.bandwidth_bytes_per_s, 2)
    links.ps_per_byte = PS_PER_S / rate
    links.latency_ps = np.rint(np.repeat(fabric.latency_s, 2) * PS_PER_S)
    links.source[::2], links.source[1::2] = fabric.link_a, fabric.link_b
    links.target[::2], links.target[1::2] = fabric.link_b, fabric.link_a
    for name in ("control_first", "control_last", "queue_first", "queue_last", "turns", "next_turns"):
        links[name] = state.NONE
    links.last_turn = state.NONE
    links.name = np.arange(len(links))
    links.error_fraction = np.repeat(fabric.error_fraction, 2)
    links.pfc_shift = packet.pfc_shift
    # What may still arrive after a pause: a round trip's worth, and a packet at both ends.
    links.headroom_limit_bytes = 3 * rate * np.repeat(fabric.latency_s, 2) if packet.pfc else 0
    _set_marking(links, rate, fabric, packet, paths)
    return links


def _set_marking(links: Table, rate: Floats, fabric: Fabric, packet: PacketSettings, paths: Paths) -> None:
    if not packet.ecn_thresholds:
        links.ecn_min_bytes, links.ecn_max_bytes = rate * (100e3 / (25 * GBPS)), rate * (400e3 / (25 * GBPS))
        links.ecn_max_probability = 0.2
        return
    known = np.zeros(len(links), bool)
    for threshold in packet.ecn_thresholds:
        alike = np.isclose(rate, threshold.bytes_per_s, rtol=1e-6)
        known |= alike
        links.ecn_min_bytes[alike], links.ecn_max_bytes[alike] = threshold.min_bytes, threshold.max_bytes
        links.ecn_max_probability[alike] = threshold.max_probability
    used = np.zeros(len(links), bool)
    used[paths.link] = True
    missing = used & ~known & (fabric.kind[links.source] == NodeKind.SWITCH) & packet.ecn
    if missing.any():
        found = rate[np.flatnonzero(missing)[0]] / GBPS
        listed = ", ".join(f"{threshold.bytes_per_s / GBPS:g}" for threshold in packet.ecn_thresholds)
        raise InputError(
            f"{fabric.name} has switch ports of {found:g} Gb/s, for which no ECN threshold is given",
            f"there are thresholds for {listed} Gb/s; without any, they follow from the rate",
        )


def _nodes(fabric: Fabric, packet: PacketSettings, links: Table) -> Table:
    nodes = np.zeros(fabric.num_nodes, state.NODE).view(np.recarray)
    nodes.kind = fabric.kind
    taken = links.headroom_limit_bytes + packet.reserve_bytes
    nodes.shared_limit_bytes = packet.buffer_bytes - np.bincount(links.target, taken, fabric.num_nodes)
    small = np.flatnonzero((fabric.kind == NodeKind.SWITCH) & (nodes.shared_limit_bytes <= 0))
    if len(small):
        ports = int(np.count_nonzero(links.target == small[0]))
        raise InputError(
            f"buffer_bytes = {packet.buffer_bytes} is less than switch {small[0]} needs for the reserve and headroom"
            f" of its {ports} ports"
        )
    return nodes


def _flow_table(
    fabric: Fabric,
    flows: Flows,
    settings: NetworkSettings,
    packet: PacketSettings,
    paths: Paths,
    replies: Paths,
    rows: NDArray[np.int32] | None,
) -> Table:
    table = np.zeros(len(flows), state.FLOW).view(np.recarray)
    table.size_bytes = flows.size_bytes
    table.start_ps = np.rint(flows.start_s * PS_PER_S)
    table.delay_ps = np.rint((flows.delay_s + send_delay_s(settings)) * PS_PER_S)
    table.finish_ps = -1
    table.parents_left = np.diff(flows.parent_ptr)
    table.follower = followers(flows) if settings.compat == "simai" else -1
    table.parents_left[table.follower[table.follower >= 0]] += 1
    table.path, table.reply = paths.of_flow, replies.of_flow
    table.target_row = 0 if rows is None else rows
    round_trip_s, window_bytes = _windows(fabric, settings, paths)
    if packet.window == "fabric":
        every = find_paths(fabric, _sample_pairs(fabric), _fixed_routing(settings))
        longest_s, widest_bytes = _windows(fabric, settings, every)
        round_trip_s[:], window_bytes[:] = longest_s.max(initial=0), widest_bytes.max(initial=0)
    table.base_rtt_ps = np.maximum(1, np.rint(round_trip_s * PS_PER_S))[paths.of_flow]
    # Without windows the bits of selective repeat and HPCC's utilisation still need a bound: far more than any queue.
    table.window_bytes = np.maximum(1, window_bytes)[paths.of_flow]
    if packet.window == "none":
        unbounded = packet.recovery == "go_back_n" and packet.congestion != "hpcc"
        table.window_bytes = 0 if unbounded else 64 * table.window_bytes
    table.queue = _send_queues(flows, settings)
    return table


def _windows(fabric: Fabric, settings: NetworkSettings, paths: Paths) -> tuple[Floats, Floats]:
    """Each path's round trip of a full packet and its bandwidth-delay product, as SimAI's `CalculateRoute` has them."""
    if len(paths.link) == 0:
        return np.zeros(len(paths.pointer) - 1), np.zeros(len(paths.pointer) - 1)
    lengths = np.diff(paths.pointer)
    starts = np.minimum(paths.pointer[:-1], len(paths.link) - 1)
    rate = fabric.bandwidth_bytes_per_s[paths.link >> 1]
    hop_s = 2 * fabric.latency_s[paths.link >> 1] + settings.payload_bytes / rate
    round_trip_s = np.where(lengths, np.add.reduceat(hop_s, starts), 0.0)
    slowest = np.minimum.reduceat(rate, starts)
    return round_trip_s, np.floor(round_trip_s * slowest + 1e-6)


def _sample_pairs(fabric: Fabric) -> Flows:
    """From at most 16 GPUs, evenly spaced, to every other: where fabrics repeat, these see every kind of path."""
    gpus = fabric.nodes_of(NodeKind.GPU)
    sources = gpus[:: -(-len(gpus) // 16)]
    source, destination = (ends.ravel() for ends in np.meshgrid(sources, gpus, indexing="ij"))
    apart = source != destination
    return flows_of(source[apart], destination[apart], 1)


def _send_queues(flows: Flows, settings: NetworkSettings) -> NDArray[np.int64]:
    """Flows of one connection go one after the other; in SimAI each is a connection of its own."""
    if settings.compat == "simai":
        return np.arange(len(flows))
    queue = np.zeros(len(flows), np.int64)
    for column in (flows.group, flows.connection, flows.source, flows.destination):
        _, queue = np.unique(queue * (int(column.max(initial=0)) + 1) + column, return_inverse=True)
    return queue


def _distances(fabric: Fabric, flows: Flows) -> tuple[NDArray[np.int32], NDArray[np.int16]]:
    """Each flow's row, and for each row the hops from every node to its destination."""
    destinations, rows = np.unique(flows.destination, return_inverse=True)
    graph = graph_of(fabric)
    distances = np.full((len(destinations), fabric.num_nodes), np.iinfo(np.int16).max, np.int16)
    loop.measure_distances(
        destinations.astype(np.int64),
        graph.pointer,
        graph.neighbor,
        fabric.kind,
        fabric.gpus_forward,
        np.zeros(fabric.num_nodes, np.int64),
        distances,
    )
    return rows.astype(np.int32), distances
