"""Lower fabric, flows and settings to the record arrays of the packet loop.

Events of one time come in the order of SimAI's ns-3. It runs on the UNISON kernel (Bai et al., "Unison: A
Parallel-Efficient and User-Transparent Network Simulation Kernel", EuroSys 2024), with one thread too. That cuts the
network into partitions, which send each other messages (`MtpInterface::AutoPartition`). In an all-to-all, where all
ranks begin at once, their order decides who meets whom.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from windtunnel.compiled.arrays import Floats, Ints
from windtunnel.compiled.calendar import MOST_SENDERS
from windtunnel.compiled.records import new_table
from windtunnel.errors import InputError
from windtunnel.network.fabric import Fabric, NodeKind, connected_groups, with_links
from windtunnel.network.flows import Flows, flows_of
from windtunnel.network.packet.kernel import codes, groups, state
from windtunnel.network.paths import Paths, find_paths, find_ways, followers, graph_of, send_delays_s
from windtunnel.network.settings import GBPS, NetworkSettings, PacketSettings

INSERTION_SORTED = 16
"""Up to this many elements, libstdc++'s `std::sort` sorts by insertion, which keeps the order of equal ones
(`_S_threshold`)."""


def partitions(fabric: Fabric) -> Ints:
    """Return (num_nodes,) partitions: nodes joined by links of less than median latency; a server, or a switch."""
    quick = with_links(fabric, fabric.latency_s < np.median(fabric.latency_s))
    return np.unique(connected_groups(quick), return_inverse=True)[1]


def begin_order(partition: Ints, flows: Flows, first: Ints) -> Ints:
    """Return the flows `first`, which wait for no other, in the order in which they begin.

    A partition gets them as messages of one time and sender, written rank by rank and channel by channel. It sorts
    them with `std::sort`, which leaves equal elements in an order of its own, and takes them from the back
    (`LogicalProcess::ReceiveMessages`).
    """
    receiver = partition[flows.source[first]]
    written = np.lexsort((first, flows.channel[first], flows.source[first], receiver))
    starts = np.flatnonzero(np.diff(receiver[written], prepend=-1))
    mailboxes = np.split(first[written], starts[1:])
    return np.concatenate([mailbox[order_of_equals(len(mailbox))[::-1]] for mailbox in mailboxes])


@lru_cache(maxsize=64)
def order_of_equals(count: int) -> Ints:
    """Return the order in which `std::sort` leaves `count` equal elements: introsort halves and reverses stretches."""
    order = np.arange(count)
    stretches = [(0, count)]
    while stretches:
        first, last = stretches.pop()
        if last - first <= INSERTION_SORTED:
            continue
        middle = first + (last - first) // 2
        order[[first, middle]] = order[[middle, first]]
        order[first + 1 : last] = order[first + 1 : last][::-1].copy()
        cut = first + 1 + (last - first - 1) // 2
        stretches += [(first, cut), (cut, last)]
    return order


def senders(partition: Ints, source: NDArray[np.int32], target: NDArray[np.int32]) -> Ints:
    """Return (num_links,) the place of a directed link's sender among those of its target; -1 inside a partition.

    A partition takes its mailboxes in the order of their senders.
    """
    sender = np.full(len(source), -1)
    between = np.flatnonzero(partition[source] != partition[target])
    sender[between] = places(target[between], partition[source[between]])
    return sender


def places(owner: NDArray[np.integer], value: NDArray[np.integer]) -> Ints:
    """Return each value's place among the different values of its owner."""
    num_values = int(value.max(initial=0)) + 1
    different, which = np.unique(owner.astype(np.int64) * num_values + value, return_inverse=True)
    owners = different // num_values
    return (np.arange(len(different)) - np.searchsorted(owners, owners))[which]


Table = Any
"""A record array of one of the layouts in `network.packet.kernel.state`."""
PS_PER_S = 1e12
SIMAI_HEADER_BYTES = 50
"""Ethernet 14, IPv4 20, UDP 8, sequence and class 8: with it the runs of one flow a NIC agree to the nanosecond."""
CONTROL_HEADER_BYTES = {"hpcc": 42, "timely": 8}
"""In-band telemetry of five hops of 8 bytes, and a count (HPCC's simulator); a time stamp."""


@dataclass(frozen=True, eq=False)
class PacketTables:
    """Input of the loop. Every array but the record arrays of links, nodes, flows and channels is only read."""

    settings: state.PacketKernelSettings
    links: Table
    nodes: Table
    flows: Table
    channels: Table
    first: Ints
    """Flows that wait for no other, in the order in which they begin if they begin at once."""
    parent_ptr: Ints
    parent: NDArray[np.int32]
    routes: state.RouteTables


def tables_of(
    fabric: Fabric,
    flows: Flows,
    settings: NetworkSettings,
    packet: PacketSettings,
    routes: tuple[Paths, Paths] | None = None,
) -> PacketTables:
    """Return the input of the loop. InputError where ends are not connected, or the settings do not fit the fabric.

    Args:
        routes: paths of the flows and of their acknowledgements; shortest paths where left out.
    """
    channel, channels = _channels(fabric, flows, settings)
    paths, replies = routes or find_ways(fabric, flows, _fixed_routing(settings))
    links = links_of(fabric, packet, paths)
    is_lossy = bool(fabric.error_fraction.any()) or not packet.pfc
    graph = graph_of(fabric)
    rows, distances = _distances(fabric, flows) if settings.routing == "spray" else (0, np.zeros((1, 1), np.int16))
    records = _flow_table(fabric, flows, settings, paths, replies, rows)
    round_trip_s, window_bytes = windows_of(fabric, settings, packet, paths)
    records.channel = channel
    first = np.flatnonzero(records.parents_left == 0)
    if settings.compat == "simai" and len(flows):
        partition = partitions(fabric)
        first = begin_order(partition, flows, first)
        links.sender = np.minimum(senders(partition, links.source, links.target), MOST_SENDERS - 1)
    return PacketTables(
        settings=kernel_settings(settings, packet, is_lossy),
        links=links,
        nodes=_nodes(fabric, packet, links),
        flows=records,
        channels=channels,
        first=first,
        parent_ptr=flows.parent_ptr,
        parent=flows.parent,
        routes=state.RouteTables(
            paths.pointer,
            paths.link,
            replies.pointer,
            replies.link,
            window_bytes.astype(np.int64),
            np.maximum(1, np.rint(round_trip_s * PS_PER_S)).astype(np.int64),
            graph.pointer,
            graph.direction,
            distances,
        ),
    )


def _fixed_routing(settings: NetworkSettings) -> NetworkSettings:
    """Return the settings with one path for each connection: sprayed packets leave it at the first switch."""
    return msgspec.structs.replace(settings, routing="ecmp")


def kernel_settings(
    settings: NetworkSettings, packet: PacketSettings, is_lossy: bool = False
) -> state.PacketKernelSettings:
    """Return the loop's settings; those with the name of a field of `packet` take its value, times in picoseconds."""
    is_simai = settings.compat == "simai"
    header_bytes = SIMAI_HEADER_BYTES if is_simai else settings.header_bytes
    header_bytes += CONTROL_HEADER_BYTES.get(packet.congestion, 0)
    routing = codes.ECMP
    if settings.routing == "spray":
        routing = codes.ADAPTIVE if packet.spray == "shortest_queue" else codes.SPRAY
    names = state.PacketKernelSettings._fields
    same = {name: getattr(packet, name) for name in packet.__struct_fields__ if name in names}
    times = {f"{name[:-2]}_ps": name for name in packet.__struct_fields__ if f"{name[:-2]}_ps" in names}
    fields: dict[str, Any] = same | {name: picoseconds(getattr(packet, field)) for name, field in times.items()}
    if not is_lossy:
        fields["timeout_ps"] = 0
    fields |= {
        "payload_bytes": settings.payload_bytes,
        "header_bytes": header_bytes,
        "congestion": codes.UNCONTROLLED if packet.congestion == "none" else getattr(codes, packet.congestion.upper()),
        "recovery": getattr(codes, packet.recovery.upper()),
        "routing": routing,
        "completes_on_ack": is_simai,
        "tick_ps": 1000 if is_simai else 1,
        "most_children": 0,
        "seed": settings.seed,
    }
    return state.PacketKernelSettings(**fields)


def picoseconds(seconds: float) -> int:
    """Return whole picoseconds, the loop's unit of time."""
    return round(seconds * PS_PER_S)


def links_of(fabric: Fabric, packet: PacketSettings, paths: Paths) -> Table:
    """Return a record for each directed link: its rate, latency, ends, marking and headroom."""
    rate, latency_s = np.repeat(fabric.bandwidth_bytes_per_s, 2), np.repeat(fabric.latency_s, 2)
    source, target = fabric.directions
    nobody = (
        "control_first",
        "control_last",
        "queue_first",
        "queue_last",
        "turns",
        "next_turns",
        "last_turn",
        "sender",
    )
    links = new_table(
        state.PacketLink,
        len(rate),
        **dict.fromkeys(nobody, codes.NONE),
        ps_per_byte=PS_PER_S / rate,
        latency_ps=np.rint(latency_s * PS_PER_S),
        source=source,
        target=target,
        name=np.arange(len(rate)),
        error_fraction=np.repeat(fabric.error_fraction, 2),
        pfc_shift=packet.pfc_shift,
        # Bytes that may still arrive after a pause: a round trip's worth, and a packet at both ends.
        headroom_limit_bytes=3 * rate * latency_s if packet.pfc else 0,
    )
    _set_marking(links, rate, fabric, packet, paths)
    return links


def _set_marking(links: Table, rate: Floats, fabric: Fabric, packet: PacketSettings, paths: Paths) -> None:
    if not packet.ecn_thresholds:
        links.ecn_min_bytes, links.ecn_max_bytes = rate * (100e3 / (25 * GBPS)), rate * (400e3 / (25 * GBPS))
        links.ecn_max_probability = 0.2
        return
    known = np.zeros(len(links), bool)
    for threshold in packet.ecn_thresholds:
        marks = np.isclose(rate, threshold.bytes_per_s, rtol=1e-6)
        known |= marks
        links.ecn_min_bytes[marks], links.ecn_max_bytes[marks] = threshold.min_bytes, threshold.max_bytes
        links.ecn_max_probability[marks] = threshold.max_probability
    used = np.zeros(len(links), bool)
    used[paths.link] = True
    missing = used & ~known & (fabric.kind[links.source] == NodeKind.SWITCH) & packet.ecn
    if missing.any():
        port_gbps = rate[np.flatnonzero(missing)[0]] / GBPS
        listed = ", ".join(f"{threshold.bytes_per_s / GBPS:g}" for threshold in packet.ecn_thresholds)
        raise InputError(
            f"{fabric.name} has switch ports of {port_gbps:g} Gb/s, for which no ECN threshold is given",
            f"there are thresholds for {listed} Gb/s; without any, they follow from the rate",
        )


def _nodes(fabric: Fabric, packet: PacketSettings, links: Table) -> Table:
    nodes = new_table(state.PacketNode, fabric.num_nodes, kind=fabric.kind)
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
    fabric: Fabric, flows: Flows, settings: NetworkSettings, paths: Paths, replies: Paths, rows: NDArray[np.int32] | int
) -> Table:
    after = followers(flows) if settings.compat == "simai" else np.full(len(flows), -1, np.int32)
    table = new_table(
        state.PacketFlow,
        len(flows),
        size_bytes=flows.size_bytes,
        finish_ps=-1,
        follower=after,
        path=paths.of_flow,
        reply=replies.of_flow,
        reduction=flows.reduction,
        target_row=rows,
    )
    # One after the other: with a row for each flow, what is still to be copied counts.
    table.start_ps = np.rint(flows.start_s * PS_PER_S)
    table.delay_ps = np.rint(send_delays_s(fabric, flows, settings) * PS_PER_S)
    table.queue = _send_queues(flows, settings)
    table.parents_left = np.diff(flows.parent_ptr)
    table.parents_left[after[after >= 0]] += 1
    return table


def _channels(fabric: Fabric, flows: Flows, settings: NetworkSettings) -> tuple[NDArray[np.int32], Table]:
    """Return the channel of every flow's sender, -1 where it does not reduce; and the records of the channels."""
    of_flow = np.full(len(flows), -1, np.int32)
    reduces = np.flatnonzero(flows.reduction) if settings.compat == "simai" else np.zeros(0, np.int64)
    if len(reduces) == 0:
        return of_flow, new_table(state.Channel, 1)
    num_channels, num_nodes = int(flows.channel.max()) + 1, int(flows.source.max()) + 1
    rank = flows.group[reduces].astype(np.int64) * num_nodes + flows.source[reduces]
    rank *= num_channels
    rank += flows.channel[reduces]
    known = np.unique(rank)
    of_flow[reduces] = np.searchsorted(known, rank)
    ranks, first, which = np.unique(known // num_channels, return_index=True, return_inverse=True)
    channels = new_table(state.Channel, len(known), rank=first[which])
    group, lowest, size = np.unique(ranks // num_nodes, return_index=True, return_counts=True)
    stride = np.where(size > 1, ranks[np.minimum(lowest + 1, len(ranks) - 1)] - ranks[lowest], 1)
    cycle = np.array([reduction_cycle(fabric, *each) for each in zip(stride.tolist(), size.tolist(), strict=True)])
    channels.cycle = cycle[np.searchsorted(group, known // num_channels // num_nodes)]
    return of_flow, channels


def reduction_cycle(fabric: Fabric, stride: int, num_ranks: int) -> int:
    """Return how many chunks a round of reductions has: as many as SimAI counts ranks.

    In a group of neighbours these are its ranks; where ranks are `stride` apart, all of the fabric's GPUs and scale-up
    switches divided by the stride (`Sys::break_dimension`).
    """
    if stride == 1:
        return num_ranks
    num_switches = int((fabric.kind == NodeKind.SCALE_UP_SWITCH).sum())
    return max(1, (fabric.num_gpus + num_switches) // stride)


def windows_of(
    fabric: Fabric, settings: NetworkSettings, packet: PacketSettings, paths: Paths
) -> tuple[Floats, Floats]:
    """Return each path's round trip, as its window and HPCC reckon with it, and its window in bytes; 0 is no limit."""
    if packet.window == "fabric":
        largest = _largest_window(fabric, msgspec.structs.replace(_fixed_routing(settings), seed=0, packet=None))
        round_trip_s, window_bytes = (np.full(len(paths.pointer) - 1, each) for each in largest)
    else:
        round_trip_s, window_bytes = _windows(fabric, settings, paths)
    # Without windows the bits of selective repeat and HPCC's utilisation still need a bound: far more than any queue.
    window_bytes = np.maximum(1, window_bytes)
    if packet.window == "none":
        unbounded = packet.recovery == "go_back_n" and packet.congestion != "hpcc"
        window_bytes = np.zeros_like(window_bytes) if unbounded else 64 * window_bytes
    return round_trip_s, window_bytes


@lru_cache(maxsize=8)
def _largest_window(fabric: Fabric, settings: NetworkSettings) -> tuple[float, float]:
    """Return the longest round trip of a fabric, and its largest bandwidth-delay product."""
    gpus = fabric.nodes_of(NodeKind.GPU)
    sources = gpus[:: -(-len(gpus) // 16)]
    source, destination = (ends.ravel() for ends in np.meshgrid(sources, gpus, indexing="ij"))
    apart = source != destination
    every = find_paths(fabric, flows_of(source[apart], destination[apart], 1), settings)
    round_trip_s, window_bytes = _windows(fabric, settings, every)
    return float(round_trip_s.max(initial=0.0)), float(window_bytes.max(initial=0.0))


def _windows(fabric: Fabric, settings: NetworkSettings, paths: Paths) -> tuple[Floats, Floats]:
    """Return each path's round trip of a full packet and bandwidth-delay product, as SimAI's `CalculateRoute` does."""
    rate = fabric.bandwidth_bytes_per_s
    (round_trip_s, *_), (*_, slowest) = paths.fold(
        2 * fabric.latency_s + settings.payload_bytes / rate, rate, by_share=False
    )
    return round_trip_s, np.floor(round_trip_s * np.minimum(slowest, rate.max(initial=0.0)) + 1e-6)


def _send_queues(flows: Flows, settings: NetworkSettings) -> Ints:
    """Return each flow's send queue: its connection, whose flows are sent in turn; in SimAI every flow has its own."""
    if settings.compat == "simai":
        return np.arange(len(flows))
    queue = np.zeros(len(flows), np.int64)
    for column in (flows.group, flows.connection, flows.source, flows.destination):
        _, queue = np.unique(queue * (int(column.max(initial=0)) + 1) + column, return_inverse=True)
    return queue


def _distances(fabric: Fabric, flows: Flows) -> tuple[NDArray[np.int32], NDArray[np.int16]]:
    """Return each flow's row, and for each row the hops from every node to its destination."""
    destinations, rows = np.unique(flows.destination, return_inverse=True)
    distances = np.full((len(destinations), fabric.num_nodes), np.iinfo(np.int16).max, np.int16)
    reached = np.zeros(fabric.num_nodes, np.int64)
    groups.measure_distances(destinations.astype(np.int64), graph_of(fabric), reached, distances)
    return rows.astype(np.int32), distances
