"""Flows over a fabric: routed, then timed at the depth that was asked for."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from windtunnel.errors import InputError, WindtunnelError
from windtunnel.kernels import flow as flow_kernel
from windtunnel.kernels import route as route_kernel
from windtunnel.ops.flows import Flows
from windtunnel.spec.fabric import Fabric
from windtunnel.spec.network import Backend, NetworkSettings

SIMAI_ACK_BYTES = 60
SIMAI_SEND_DELAY_S = 10e-9
"""Added by ASTRA-sim to every send."""
FIRST_PORT = 10000
"""Of the sender; SimAI's, as is the receiver's."""
RECEIVER_PORT = 100


@dataclass(frozen=True, eq=False)
class Graph:
    """A fabric's links seen from its nodes; node i's neighbours lie from `pointer[i]` to `pointer[i + 1]`, by id."""

    pointer: NDArray[np.int64]
    neighbor: NDArray[np.int32]
    direction: NDArray[np.int32]
    """The directed link there: 2 x link, or 2 x link + 1 from the second end to the first."""


@dataclass(frozen=True, eq=False)
class Paths:
    """Paths as directed links; path p's lie from `pointer[p]` to `pointer[p + 1]`."""

    of_flow: NDArray[np.int32]
    pointer: NDArray[np.int64]
    link: NDArray[np.int32]
    share: NDArray[np.float64]
    """What part of a flow each link carries; empty where every link carries all of it."""


@dataclass(frozen=True, eq=False)
class FlowTimes:
    """When every flow began, had sent its last byte and completed; and what the links carried."""

    begin_s: NDArray[np.float64]
    sent_s: NDArray[np.float64]
    finish_s: NDArray[np.float64]
    link_bytes: NDArray[np.float64]
    """(2 x num_links,) by directed link, headers included."""
    link_was_full: NDArray[np.bool_]
    """(2 x num_links,) whether more wanted to cross it at some time than it carries."""
    num_events: int
    total_s: float
    """From time zero to the last completion; at packet level as SimAI, to that of rank 0."""


def graph_of(fabric: Fabric) -> Graph:
    """The adjacency of a fabric."""
    ends = np.concatenate([fabric.link_a, fabric.link_b])
    others = np.concatenate([fabric.link_b, fabric.link_a])
    links = np.arange(fabric.num_links, dtype=np.int32)
    direction = np.concatenate([2 * links, 2 * links + 1])
    order = np.lexsort((others, ends))
    pointer = np.zeros(fabric.num_nodes + 1, np.int64)
    np.cumsum(np.bincount(ends, minlength=fabric.num_nodes), out=pointer[1:])
    return Graph(pointer, others[order], direction[order])


def ports_of(flows: Flows, settings: NetworkSettings) -> NDArray[np.int32]:
    """The source port of every flow, which decides its path under ECMP.

    NCCL keeps a connection (a queue pair, hence a port) for each channel and peer. SimAI opens one for every flow:
    10000 plus how many flows of the same pair came before.
    """
    if settings.compat != "simai":
        return (FIRST_PORT + flows.connection).astype(np.int32)
    order = np.lexsort((flows.channel, flows.step, flows.destination, flows.source))
    source, destination = flows.source[order], flows.destination[order]
    new_pair = np.concatenate([[True], (source[1:] != source[:-1]) | (destination[1:] != destination[:-1])])
    position = np.arange(len(flows))
    first = np.maximum.accumulate(np.where(new_pair, position, 0))
    ports = np.empty(len(flows), np.int32)
    ports[order] = FIRST_PORT + position - first
    return ports


def find_paths(fabric: Fabric, flows: Flows, settings: NetworkSettings, *, answers: bool = False) -> Paths:
    """The path of every flow, or of its acknowledgements; flows with the same ends and port share one.

    Raises:
        InputError: two ends are not connected, or are no nodes of the fabric.
    """
    n = fabric.num_nodes
    for ends in (flows.source, flows.destination):
        if len(ends) and not 0 <= ends.min() <= ends.max() < n:
            raise InputError(f"a flow ends at node {ends.max()}; {fabric.name} has nodes 0 to {n - 1}")
    spray = settings.routing == "spray"
    ports = np.zeros(len(flows), np.int32) if spray else ports_of(flows, settings)
    key = (flows.source.astype(np.int64) * n + flows.destination) * (1 << 24) + ports
    _, first, of_flow = np.unique(key, return_index=True, return_inverse=True)
    graph = graph_of(fabric)
    source, destination, port = flows.source[first], flows.destination[first], ports[first].astype(np.int64)
    both_ports = port | RECEIVER_PORT << 16
    if answers:
        source, destination, both_ports = destination, source, RECEIVER_PORT | port << 16
    pointer = np.zeros(len(first) + 1, np.int64)
    capacity = 8 * len(first) + 64
    while True:
        link = np.empty(capacity, np.int32)
        share = np.empty(capacity if spray else 0)
        far = np.full(n, route_kernel.UNKNOWN, np.int8)
        scratch = [np.empty(n + 1, np.int32) for _ in range(5)]
        written = route_kernel.trace_paths(
            source,
            destination,
            both_ports,
            np.arange(len(first)),
            settings.seed,
            graph.pointer,
            graph.neighbor,
            graph.direction,
            fabric.kind,
            fabric.gpus_forward,
            spray,
            far,
            far.copy(),
            *scratch,
            np.zeros(n),
            pointer,
            link,
            share,
        )
        if written != -1:
            break
        capacity *= 4
    if written < 0:
        lost = -2 - written
        raise InputError(f"{fabric.name}: there is no path from node {source[lost]} to node {destination[lost]}")
    return Paths(of_flow.astype(np.int32), pointer, link[:written], share[:written])


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
            from windtunnel.engine.packet import simulate_packets

            return simulate_packets(fabric, flows, settings)


def run_flow_level(
    fabric: Fabric,
    flows: Flows,
    settings: NetworkSettings,
    paths: Paths | None = None,
    loads: Paths | None = None,
    *,
    shared: bool = True,
) -> FlowTimes:
    """Time flows by max-min fair sharing of every link.

    Args:
        fabric: where they run.
        flows: what runs.
        settings: packet sizes, latencies and routing.
        paths: where they go; found where left out.
        loads: what each flow puts on links, where that is not its path: a flow that stands for many like it.
        shared: whether flows that cross a link share it; else each has all of it.

    Raises:
        InputError: ends are not connected.
        WindtunnelError: flows wait for each other.
    """
    paths = paths or find_paths(fabric, flows, settings)
    table = _flow_table(fabric, flows, settings, paths)
    links = np.zeros(2 * fabric.num_links, flow_kernel.LINK).view(np.recarray)
    links.rate = np.repeat(data_bytes_per_s(fabric, settings), 2)
    links.first = -1
    links.stamp = -1
    loads = loads or paths
    path = _path_table(links.rate, paths, loads)
    if not shared:
        links.rate = np.inf
    child_ptr, child = _children(flows)
    num_slots = min(len(flows), 4096)
    while True:
        rows, used = table.copy(), links.copy()
        done, num_events, _ = _run(rows, child_ptr, child, path, loads, used, num_slots, settings.compat is None)
        if done >= 0:
            break
        num_slots = min(len(flows), 8 * num_slots)
    if done < len(flows):
        raise WindtunnelError(f"{len(flows) - done} of {len(flows)} flows wait for each other")
    total_s = float(rows.finish_s.max())
    return FlowTimes(rows.begin_s, rows.sent_s, rows.finish_s, used.bytes, used.stamp >= 0, num_events, total_s)


def _run(
    table: np.recarray,
    child_ptr: NDArray[np.int64],
    child: NDArray[np.int32],
    path: np.recarray,
    loads: Paths,
    links: np.recarray,
    num_slots: int,
    one_after_the_other: bool,
) -> tuple[int, int, int]:
    """The kernel with its scratch arrays."""
    most_hops = int(path["count"].max(initial=1))
    slots = np.zeros(num_slots, flow_kernel.SLOT).view(np.recarray)
    slots.stamp = -1
    counts: tuple[int, int, int] = flow_kernel.run_flows(
        table,
        child_ptr,
        child,
        path,
        loads.link,
        loads.share,
        links,
        slots,
        np.zeros(num_slots * most_hops, flow_kernel.HOP).view(np.recarray),
        most_hops,
        *(np.empty(num_slots, np.int32) for _ in range(3)),
        np.empty(len(links), np.int32),
        np.empty(len(table)),
        np.empty(len(table), np.int64),
        np.empty(len(links) + num_slots),
        np.empty(len(links) + num_slots, np.int64),
        one_after_the_other,
    )
    return counts


def wire_bytes(size_bytes: NDArray[np.int64], settings: NetworkSettings) -> NDArray[np.int64]:
    """Bytes on the wire: those of the flow and a header for each packet."""
    packets = -(-size_bytes // settings.payload_bytes)
    return size_bytes + packets * settings.header_bytes


def data_bytes_per_s(fabric: Fabric, settings: NetworkSettings) -> NDArray[np.float64]:
    """What each link carries of data and its headers.

    SimAI's ns-3 cuts the time of a packet to whole nanoseconds, and every data packet is answered by an acknowledgement
    on the other direction of its links, which rings and all-to-alls load with data too.
    """
    if settings.compat != "simai":
        return fabric.bandwidth_bytes_per_s
    packet_bytes = settings.payload_bytes + settings.header_bytes
    data_ns = np.floor(packet_bytes / fabric.bandwidth_bytes_per_s * 1e9 + 1e-6)
    answer_ns = np.floor(SIMAI_ACK_BYTES / fabric.bandwidth_bytes_per_s * 1e9 + 1e-6)
    return np.asarray(packet_bytes / np.maximum(data_ns + answer_ns, 1) * 1e9)


def _flow_table(fabric: Fabric, flows: Flows, settings: NetworkSettings, paths: Paths) -> np.recarray:
    table = np.zeros(len(flows), flow_kernel.FLOW).view(np.recarray)
    table.size_bytes = wire_bytes(flows.size_bytes, settings)
    last_bytes = ((flows.size_bytes - 1) % settings.payload_bytes + 1 + settings.header_bytes).astype(np.float64)
    table.last_bytes = last_bytes
    table.tail_s = tail_seconds(fabric, settings, paths, last_bytes)
    table.delay_s = flows.delay_s + send_delay_s(settings)
    table.waiting = np.diff(flows.parent_ptr)
    table.ready_s = flows.start_s + np.where(table.waiting == 0, table.delay_s, 0.0)
    follower = followers(flows)
    table.follower = follower
    table.waiting[follower[follower >= 0]] += 1
    table.path = paths.of_flow
    return table


def send_delay_s(settings: NetworkSettings) -> float:
    """From data being there to its first byte on the wire."""
    return settings.send_latency_s + (SIMAI_SEND_DELAY_S if settings.compat == "simai" else 0.0)


def tail_seconds(
    fabric: Fabric, settings: NetworkSettings, paths: Paths, last_bytes: NDArray[np.float64]
) -> NDArray[np.float64]:
    """From a flow's last byte leaving to its completion: propagation, and its last packet stored and forwarded.

    SimAI completes a flow when its sender has the last acknowledgement, which takes the way back too.
    """
    hop_path = np.repeat(np.arange(len(paths.pointer) - 1), np.diff(paths.pointer))
    link = paths.link // 2
    weight = paths.share if len(paths.share) else np.ones(len(link))
    latency = np.bincount(hop_path, fabric.latency_s[link] * weight, len(paths.pointer) - 1)
    slowness = weight / fabric.bandwidth_bytes_per_s[link]
    all_hops = np.bincount(hop_path, slowness, len(paths.pointer) - 1)
    first_hop = np.bincount(hop_path[paths.pointer[:-1]], slowness[paths.pointer[:-1]], len(paths.pointer) - 1)
    tail = latency[paths.of_flow] + last_bytes * (all_hops - first_hop)[paths.of_flow]
    if settings.compat == "simai":
        tail += latency[paths.of_flow] + SIMAI_ACK_BYTES * all_hops[paths.of_flow]
    return np.asarray(tail)


def followers(flows: Flows) -> NDArray[np.int32]:
    """The next flow of the same connection, -1 for none.

    A queue pair sends one message after the other. SimAI opens a queue pair for every flow, so there all of them may be
    on the way together; but a rank posts the receive of a step when it begins to send that step
    (`NcclTreeFlowModel::ready`), so that no step begins before the one before.
    """
    order = np.lexsort((flows.step, flows.destination, flows.source, flows.connection, flows.group))
    same = np.ones(len(order) - 1, bool)
    for column in (flows.group, flows.connection, flows.source, flows.destination):
        same &= column[order[1:]] == column[order[:-1]]
    follower = np.full(len(order), -1, np.int32)
    follower[order[:-1][same]] = order[1:][same]
    return follower


def _path_table(rates: NDArray[np.float64], paths: Paths, loads: Paths) -> np.recarray:
    table = np.zeros(len(loads.pointer) - 1, flow_kernel.PATH).view(np.recarray)
    table["first"], table["count"] = loads.pointer[:-1], np.diff(loads.pointer)
    most = rates[loads.link] / (loads.share if len(loads.share) else 1.0)
    table["rate"] = np.minimum.reduceat(most, loads.pointer[:-1])
    table["line_rate"] = np.minimum.reduceat(rates[paths.link], paths.pointer[:-1])
    return table


def _children(flows: Flows) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """The flows that wait for each flow: the inverse of its parents."""
    n = len(flows)
    waiting = np.repeat(np.arange(n, dtype=np.int32), np.diff(flows.parent_ptr))
    pointer = np.zeros(n + 1, np.int64)
    np.cumsum(np.bincount(flows.parent, minlength=n), out=pointer[1:])
    return pointer, waiting[np.argsort(flows.parent, kind="stable")]
