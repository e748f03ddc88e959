"""Route flows over a fabric and run them: paths, bytes on the wire, rates of links, and the times of a run of flows."""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.compiled.records import Ints
from windtunnel.errors import InputError
from windtunnel.network import routing
from windtunnel.network.fabric import Fabric
from windtunnel.network.flows import Flows
from windtunnel.network.settings import BACKENDS, NetworkSettings

SIMAI_ACK_BYTES = 60
SIMAI_SEND_DELAY_S = 10e-9
"""Added by ASTRA-sim to every send."""
FIRST_PORT, RECEIVER_PORT = 10000, 100
"""SimAI's port of a sender's first flow, and of every receiver."""


@dataclass(frozen=True, eq=False)
class Paths:
    """Paths as directed links; path p's lie from `pointer[p]` to `pointer[p + 1]`."""

    of_flow: NDArray[np.int32]
    pointer: NDArray[np.int64]
    link: NDArray[np.int32]
    share: NDArray[np.float64]
    """Fraction of a flow on each link; empty where every link carries all of it."""

    def crossings(self) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.float64]]:
        """Return a row for each flow and link that it crosses: the flow, the link, the fraction of the flow on it."""
        count = np.diff(self.pointer)[self.of_flow]
        flow = np.repeat(np.arange(len(count)), count)
        row = np.repeat(self.pointer[self.of_flow] - np.cumsum(count) + count, count) + np.arange(len(flow))
        return flow, self.link[row], self.share[row] if len(self.share) else np.ones(len(row))

    def fold(self, *of_link: NDArray[np.float64], by_share: bool = True) -> NDArray[np.float64]:
        """Return (numbers, 3, paths) the sum, the largest and the least of numbers of links over every path.

        Args:
            of_link: (num_links,) each.
            by_share: whether the numbers count by the share of a flow on the link, see `routing.fold_paths`.
        """
        folded = np.empty((len(of_link), 3, len(self.pointer) - 1))
        share = self.share if by_share else self.share[:0]
        routing.fold_paths(self.pointer, self.link, share, np.repeat(of_link, 2, axis=1), folded)
        return folded


@dataclass(frozen=True, eq=False)
class FlowTimes:
    """When every flow began, sent its last byte and completed, and what the links carried."""

    begin_s: NDArray[np.float64]
    sent_s: NDArray[np.float64]
    finish_s: NDArray[np.float64]
    link_bytes: NDArray[np.float64]
    """(2 x num_links,) by directed link, headers included."""
    link_was_full: NDArray[np.bool_]
    """(2 x num_links,) whether the demand on it ever exceeded what it carries."""
    num_events: int
    total_s: float
    """From time zero to the last completion; as SimAI, at packet level and where a control acts, to that of rank 0."""
    is_controlled: bool = field(default=False, kw_only=True)
    """Flow level: whether congestion control held a flow below its link's rate."""


@lru_cache(maxsize=8)
def graph_of(fabric: Fabric) -> routing.RoutingGraph:
    """Return the adjacency of a fabric; neighbours are in the order of their ids."""
    source, target = fabric.directions
    direction = np.lexsort((target, source)).astype(np.int32)
    pointer = np.zeros(fabric.num_nodes + 1, np.int64)
    np.cumsum(np.bincount(source, minlength=fabric.num_nodes), out=pointer[1:])
    return routing.RoutingGraph(pointer, target[direction], direction, fabric.kind, fabric.gpus_forward)


def simai_pairs(flows: Flows) -> "Pairs":
    """Return the ends and ports of flows as in SimAI, which opens a queue pair for every flow.

    Its port is 10000 plus how many flows of the same pair came before.
    """
    order = sorted_by(flows.source, flows.destination, flows.step, flows.channel)
    source, destination = flows.source[order], flows.destination[order]
    position = np.arange(len(flows), dtype=np.int32)
    is_other = (source[1:] != source[:-1]) | (destination[1:] != destination[:-1])
    first = np.maximum.accumulate(np.concatenate([position[:1], position[1:] * is_other]))
    of_flow = np.empty_like(position)
    of_flow[order] = position
    return Pairs(source, destination, (FIRST_PORT + position - first).astype(np.int64), of_flow)


def sorted_by(*columns: NDArray[np.int32]) -> Ints:
    """Return the order of rows by non-negative columns, the first of which counts most; equal rows keep theirs."""
    key, num_values = np.zeros(len(columns[0]), np.int64), 1
    for column in columns:
        size = int(column.max(initial=0)) + 1
        num_values *= size
        key *= size
        key += column
    if num_values * len(key) >= 2**63:
        return np.lexsort(columns[::-1])
    # Sorting numbers that hold their own places takes a tenth of the time of `argsort`.
    key *= len(key)
    key += np.arange(len(key))
    key.sort()
    key %= max(len(key), 1)
    return key


class Pairs(NamedTuple):
    """Different ends and ports of flows."""

    source: Ints
    destination: Ints
    port: Ints
    of_flow: NDArray[np.int32]


def find_paths(fabric: Fabric, flows: Flows, settings: NetworkSettings) -> Paths:
    """Return the path of every flow; flows with the same ends and port share one. InputError where two ends are not
    connected, or are no nodes of the fabric."""
    return trace(fabric, pairs_of(fabric, flows, settings), settings)


def find_ways(fabric: Fabric, flows: Flows, settings: NetworkSettings) -> tuple[Paths, Paths]:
    """Return the path of every flow, and that of its acknowledgements; errors as `find_paths`."""
    pairs = pairs_of(fabric, flows, settings)
    return trace(fabric, pairs, settings), trace(fabric, pairs, settings, answers=True)


def pairs_of(fabric: Fabric, flows: Flows, settings: NetworkSettings) -> Pairs:
    """Return the different ends and ports of flows, sorted; errors as `find_paths`."""
    n = fabric.num_nodes
    for ends in (flows.source, flows.destination):
        if len(ends) and not 0 <= ends.min() <= ends.max() < n:
            raise InputError(f"a flow ends at node {ends.max()}; {fabric.name} has nodes 0 to {n - 1}")
    if settings.compat == "simai" and settings.routing != "spray":
        return simai_pairs(flows)
    # NCCL keeps a connection (a queue pair, hence a port) for each channel and peer.
    ports = np.zeros(len(flows), np.int32) if settings.routing == "spray" else FIRST_PORT + flows.connection
    key = (flows.source.astype(np.int64) * n + flows.destination) * (1 << 24) + ports
    _, first, of_flow = np.unique(key, return_index=True, return_inverse=True)
    return Pairs(flows.source[first], flows.destination[first], ports[first].astype(np.int64), of_flow.astype(np.int32))


def trace(fabric: Fabric, pairs: Pairs, settings: NetworkSettings, *, answers: bool = False) -> Paths:
    """Return the path of every pair, or that of its acknowledgements; equal ones are one. InputError where two ends are
    not connected."""
    source, destination, both_ports = pairs.source, pairs.destination, pairs.port | RECEIVER_PORT << 16
    if answers:
        source, destination, both_ports = destination, source, RECEIVER_PORT | pairs.port << 16
    spray = settings.routing == "spray"
    state = _tracing(graph_of(fabric), source, destination, both_ports, settings)
    while True:
        num_paths, written = routing.trace_paths(state)
        if written != -1:
            break
        capacity = 4 * len(state.link)
        state = state._replace(link=np.empty(capacity, np.int32), share=np.empty(capacity if spray else 0))
    if written < 0:
        lost = -2 - written
        raise InputError(f"{fabric.name}: there is no path from node {source[lost]} to node {destination[lost]}")
    pointer, link, share = state.pointer[: num_paths + 1], state.link[:written], state.share[:written]
    return Paths(state.of_pair[pairs.of_flow], pointer.copy(), link.copy(), share.copy())


def _tracing(
    graph: routing.RoutingGraph, source: Ints, destination: Ints, ports: Ints, settings: NetworkSettings
) -> routing.TracingState:
    """Return the state of a search for paths, before the first."""
    num_pairs, num_nodes, spray = len(source), len(graph.kind), settings.routing == "spray"
    capacity = 8 * num_pairs + 64
    far = np.full(num_nodes, routing.UNKNOWN, np.int8)
    scratch = ("forward_nodes", "backward_nodes", "marked", "levels", "stack")
    return routing.TracingState(
        source=source,
        destination=destination,
        ports=ports,
        seed=settings.seed,
        spray=spray,
        graph=graph,
        of_pair=np.empty(num_pairs, np.int32),
        pointer=np.empty(num_pairs + 1, np.int64),
        link=np.empty(capacity, np.int32),
        share=np.empty(capacity if spray else 0),
        ahead=far,
        behind=far.copy(),
        **{name: np.empty(num_nodes + 1, np.int32) for name in scratch},
        inflow=np.zeros(num_nodes),
    )


def wire_bytes(size_bytes: NDArray[np.int64], settings: NetworkSettings) -> NDArray[np.int64]:
    """Return the bytes on the wire: those of each flow, and a header for each of its packets."""
    packets = -(-size_bytes // settings.payload_bytes)
    return size_bytes + packets * settings.header_bytes


def data_bytes_per_s(fabric: Fabric, settings: NetworkSettings) -> NDArray[np.float64]:
    """Return (num_links,) bytes per second of data and headers that each link carries.

    SimAI's ns-3 cuts the time of a packet to whole nanoseconds, and every data packet is answered by an acknowledgement
    on the other direction of its links, which rings and all-to-alls load with data too.
    """
    if settings.compat != "simai":
        return fabric.bandwidth_bytes_per_s
    packet_bytes = settings.payload_bytes + settings.header_bytes
    data_ns = np.floor(packet_bytes / fabric.bandwidth_bytes_per_s * 1e9 + 1e-6)
    answer_ns = np.floor(SIMAI_ACK_BYTES / fabric.bandwidth_bytes_per_s * 1e9 + 1e-6)
    return np.asarray(packet_bytes / np.maximum(data_ns + answer_ns, 1) * 1e9)


def send_delays_s(fabric: Fabric, flows: Flows, settings: NetworkSettings) -> NDArray[np.float64]:
    """Return (num_flows,) seconds from the data of a flow being there to its first byte on the wire."""
    near_s, far_s = settings.send_latency_s, settings.network_send_latency_s
    if settings.compat == "simai":
        near_s += SIMAI_SEND_DELAY_S
    if far_s is None:
        return flows.delay_s + near_s
    leaves = fabric.server[flows.source] != fabric.server[flows.destination]
    return flows.delay_s + np.where(leaves, far_s, near_s)


class PathSeconds(NamedTuple):
    """(paths,) times of each path without queues.

    A flow completes some time after its last byte has left: propagation, and forwarding of its largest packet, for a
    smaller last packet catches up with the packet before it, and waits for that at every further hop. SimAI completes
    a flow when its sender has the last acknowledgement, which takes the way back too.
    """

    tail_s: NDArray[np.float64]
    tail_s_per_byte: NDArray[np.float64]
    """For each byte of the largest packet."""
    round_trip_s: NDArray[np.float64]
    """Of a full packet and its acknowledgement."""


def path_seconds(fabric: Fabric, settings: NetworkSettings, paths: Paths) -> PathSeconds:
    """Return the times of paths."""
    (latency, *_), (all_hops, slowest_hop, _) = paths.fold(fabric.latency_s, 1 / fabric.bandwidth_bytes_per_s)
    round_trip_s = 2 * latency + (settings.payload_bytes + settings.header_bytes + SIMAI_ACK_BYTES) * all_hops
    tail_s = latency if settings.compat != "simai" else 2 * latency + SIMAI_ACK_BYTES * all_hops
    return PathSeconds(tail_s, all_hops - slowest_hop, round_trip_s)


def reported_s(
    flows: Flows, settings: NetworkSettings, sent_s: NDArray[np.float64], finish_s: NDArray[np.float64]
) -> float:
    """Return when the last flow is complete; as SimAI, when the lowest rank has received and sent all its flows.

    SimAI reports rank 0 alone (`Workload::report`); where flows share links, the last rank is up to 15 % later.
    """
    if settings.compat != "simai" or len(flows) == 0:
        return float(finish_s.max(initial=0.0))
    first = min(flows.source.min(), flows.destination.min())
    received, sent = finish_s[flows.destination == first], sent_s[flows.source == first]
    return float(max(received.max(initial=0.0), sent.max(initial=0.0)))


def followers(flows: Flows) -> NDArray[np.int32]:
    """Return the next flow of the same connection, -1 for none.

    A queue pair sends one message after the other. SimAI opens a queue pair for every flow, so there all of them may be
    on the way together; but a rank posts the receive of a step when it begins to send that step
    (`NcclTreeFlowModel::ready`), so that no step begins before the one before.
    """
    order = sorted_by(flows.group, flows.connection, flows.source, flows.destination, flows.step)
    same = np.ones(len(order) - 1, bool)
    for column in (flows.group, flows.connection, flows.source, flows.destination):
        same &= column[order[1:]] == column[order[:-1]]
    follower = np.full(len(order), -1, np.int32)
    follower[order[:-1][same]] = order[1:][same]
    return follower


def run_flows(fabric: Fabric, flows: Flows, settings: NetworkSettings, backend: str | None = None) -> FlowTimes:
    """Time flows with a backend, that of the settings where none is given. InputError where there is no such backend,
    ends are not connected, or the settings do not fit the fabric; WindtunnelError where flows wait for each other."""
    name = backend or settings.backend
    times: FlowTimes = BACKENDS.call(name, "run_flows", FlowTimes, fabric, flows, settings)
    is_of_each = len(times.begin_s) == len(times.finish_s) == len(flows)
    if not is_of_each or not (times.finish_s >= times.begin_s).all() or not times.total_s >= 0:
        raise InputError(
            f"the network backend {name!r} returned times that no flows have", "each ends at its beginning or later"
        )
    return times
