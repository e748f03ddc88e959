"""Time flows at flow level: links shared max-min fairly, or as congestion control divides them where that acts."""

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from windtunnel.compiled.arrays import Floats, Ints
from windtunnel.compiled.records import new_table
from windtunnel.errors import WindtunnelError
from windtunnel.network import paths as network_paths
from windtunnel.network.fabric import Fabric, NodeKind
from windtunnel.network.flow import kernel as flow_kernel
from windtunnel.network.flow import rounds
from windtunnel.network.flow.kernel import FluidState
from windtunnel.network.flows import Flows, children_of
from windtunnel.network.packet.kernel.state import Connection, Stamp
from windtunnel.network.packet.tables import CONTROL_HEADER_BYTES, kernel_settings, links_of, windows_of
from windtunnel.network.settings import NetworkSettings, PacketSettings, packets_of

Table = Any
"""A record array of one of the layouts in `network.flow.kernel` and `network.flow.rounds`."""


@dataclass(frozen=True, eq=False)
class Lowered:
    """Flows before they have paths: the same for every seed of the hashes and every draw."""

    fabric: Fabric
    settings: NetworkSettings
    packet: PacketSettings
    flows: Flows
    pairs: network_paths.Pairs | None
    """Ends and ports of the flows; None where flows represent their equivalence classes."""
    table: Table
    """Records of all flows, which every run writes into."""
    child_ptr: Ints
    child: NDArray[np.int32]
    ready_s: Floats
    waiting: NDArray[np.int32]
    """What the columns of these names are before a run."""

    def reset(self) -> None:
        """Make the records of the flows what they are before a run."""
        self.table.ready_s, self.table.waiting = self.ready_s, self.waiting


@dataclass(frozen=True, eq=False)
class Course(Lowered):
    """Flows with paths, and their loads on links."""

    paths: network_paths.Paths
    loads: network_paths.Paths


@dataclass(frozen=True)
class FlowOptions:
    """How a run of flows differs from the usual one."""

    shared: bool = True
    """Whether flows that cross a link share it; else each has all of it."""
    by_chance: bool = False
    """Whether flows that leave a server draw their last packet's place in the turn, which is else the middle.

    Rings that queue up at their NICs would else keep a lockstep that no network keeps.
    """
    watches_control: bool = True
    """Whether congestion control may act."""
    draw: int = 0
    """Number of the draw of ECN marks."""


def run_flow_level(
    fabric: Fabric,
    flows: Flows,
    settings: NetworkSettings,
    paths: network_paths.Paths | None = None,
    loads: network_paths.Paths | None = None,
    options: FlowOptions = FlowOptions(),
) -> network_paths.FlowTimes:
    """Time flows by max-min fair sharing of every link, and where a congestion control acts, round by round. InputError
    where ends are not connected; WindtunnelError where flows wait for each other.

    Args:
        paths: their paths; shortest paths where left out.
        loads: each flow's load on links where that is not its path: a flow that represents its equivalence class.
    """
    if paths is None:
        return run_lowered(
            lower(fabric, flows, settings, network_paths.pairs_of(fabric, flows, settings)), settings.seed, options
        )
    return _run_course(Course(**vars(lower(fabric, flows, settings, None)), paths=paths, loads=loads or paths), options)


def run_lowered(lowered: Lowered, seed: int, options: FlowOptions = FlowOptions()) -> network_paths.FlowTimes:
    """Time flows as `run_flow_level`, whose errors this has, on the paths that hashes of this seed choose.

    The times are columns of `lowered.table`, which the next run overwrites.
    """
    assert lowered.pairs is not None
    settings = msgspec.structs.replace(lowered.settings, seed=seed)
    paths = network_paths.trace(lowered.fabric, lowered.pairs, settings)
    return _run_course(Course(**vars(lowered) | {"settings": settings}, paths=paths, loads=paths), options)


def _run_course(course: Course, options: FlowOptions) -> network_paths.FlowTimes:
    course.table.path = course.paths.of_flow
    rates = network_paths.data_bytes_per_s(course.fabric, course.settings)
    links = new_table(
        flow_kernel.FluidLink, 2 * len(rates), rate=np.inf, first=-1, last=-1, stamp=-1, level=np.inf, due=np.inf
    )
    if options.shared:
        links.rate = np.repeat(rates, 2)
    links.left = links.rate
    state = _state(course, _path_table(course, rates, by_chance=options.by_chance), links, 0)
    watches, at_once = options.shared and options.watches_control, len(course.child) == 0
    if watches and at_once and may_act(course, state, in_flight_at_once(course, state)):
        controlled = run_controlled(course, state, options.draw)
        if controlled is not None:
            return _controlled_times(course, *controlled)
    used, num_events = _run_shared(course, state)
    rows = course.table
    if watches and not at_once and may_act(course, state, used["most_in_flight"]):
        rows = rows.copy()
        controlled = run_controlled(course, state, options.draw)
        if controlled is not None:
            return _controlled_times(course, *controlled)
    times_s = rows.ready_s, rows.sent_s, rows.finish_s
    return network_paths.FlowTimes(*times_s, used.bytes, used.stamp >= 0, num_events, float(rows.finish_s.max()))


def _run_shared(course: Course, state: flow_kernel.FluidState) -> tuple[Table, int]:
    """Run flows that share links max-min fairly; return the links after it, and the number of events."""
    num_flows, num_slots, done = len(course.table), 512, -1
    while done < 0:
        num_slots, links = min(num_flows, 8 * num_slots), state.links.copy()
        course.reset()
        done, num_events = flow_kernel.run_flows(_state(course, state.paths, links, num_slots))
    if done < num_flows:
        raise WindtunnelError(f"{num_flows - done} of {num_flows} flows wait for each other")
    return links, num_events


def _controlled_times(course: Course, rows: Table, links: Table, num_events: int) -> network_paths.FlowTimes:
    """Return the times of flows under control; as SimAI rank 0's, but for connections that stand for others."""
    total_s = float(rows.finish_s.max())
    if course.loads is course.paths:
        total_s = network_paths.reported_s(course.flows, course.settings, rows.sent_s, rows.finish_s)
    was_full = links.most_queued_bytes > 0
    return network_paths.FlowTimes(
        rows.ready_s, rows.sent_s, rows.finish_s, links.bytes, was_full, num_events, total_s, is_controlled=True
    )


def _state(course: Course, path: Table, links: Table, num_slots: int) -> flow_kernel.FluidState:
    """Return the state of the kernel before the first event, with room for so many flows to send at once."""
    num_flows, max_hops = len(course.table), int(path["count"].max(initial=1))
    most_levels = 2 * len(links) + num_slots * (max_hops + 1)
    return flow_kernel.FluidState(
        flows=course.table,
        child_ptr=course.child_ptr,
        child=course.child,
        paths=path,
        path_link=course.loads.link,
        path_share=course.loads.share,
        links=links,
        slots=new_table(flow_kernel.Slot, num_slots, stamp=-1),
        hops=new_table(flow_kernel.FluidHop, num_slots * max_hops),
        max_hops=max_hops,
        free=np.empty(num_slots, np.int32),
        ends=np.empty(num_slots, np.int32),
        ends_s=np.empty(num_slots),
        ready_s=np.empty(num_flows),
        ready=np.empty(num_flows, np.int64),
        entered=np.empty(num_slots, np.int32),
        touched=np.empty(len(links), np.int32),
        levels=np.empty(most_levels),
        fillers=np.empty(most_levels, np.int64),
        one_after_the_other=course.settings.compat is None,
    )


def lower(fabric: Fabric, flows: Flows, settings: NetworkSettings, pairs: network_paths.Pairs | None) -> Lowered:
    """Lower flows to records, as far as that needs no path; `pairs` are their ends, unless paths are given."""
    packet = packets_of(settings)
    header_bytes = settings.header_bytes + CONTROL_HEADER_BYTES.get(packet.congestion, 0)
    settings = msgspec.structs.replace(settings, header_bytes=header_bytes)
    waiting, delay_s, follower = (
        np.diff(flows.parent_ptr),
        network_paths.send_delays_s(fabric, flows, settings),
        network_paths.followers(flows),
    )
    ready_s = flows.start_s + np.where(waiting == 0, delay_s, 0.0)
    waiting[follower[follower >= 0]] += 1
    table = new_table(
        flow_kernel.FluidFlow,
        len(flows),
        size_bytes=network_paths.wire_bytes(flows.size_bytes, settings),
        last_bytes=(flows.size_bytes - 1) % settings.payload_bytes + 1 + settings.header_bytes,
        delay_s=delay_s,
        follower=follower,
    )
    children = children_of(flows.parent_ptr, flows.parent)
    return Lowered(fabric, settings, packet, flows, pairs, table, *children, ready_s, waiting.astype(np.int32))


def _path_windows(course: Course) -> tuple[Floats, Floats]:
    """Return the round trip and the window of each path, as `windows_of` does; of windows only those that matter."""
    fabric, settings, paths, packet = course.fabric, course.settings, course.paths, course.packet
    # The largest window of a fabric takes longer to find than most runs; no window matters that a flow fits into.
    if packet.window == "fabric":
        packet = msgspec.structs.replace(packet, window="pair")
    base_rtt_s, window_bytes = windows_of(fabric, settings, packet, paths)
    if packet is not course.packet and course.flows.size_bytes.max(initial=0) > window_bytes.min(initial=np.inf):
        return windows_of(fabric, settings, course.packet, paths)
    return base_rtt_s, window_bytes


def _path_table(course: Course, rates: Floats, *, by_chance: bool) -> Table:
    """Return the records of paths, given the (num_links,) rates of links."""
    fabric, settings, loads = course.fabric, course.settings, course.loads
    of_switch = np.maximum(*(fabric.kind[ends] == NodeKind.SWITCH for ends in (fabric.link_a, fabric.link_b)))
    (*_, rate), (_, leaves, _) = loads.fold(rates, of_switch)
    is_own = loads is course.paths and len(loads.share) == 0
    base_rtt_s, window_bytes = _path_windows(course)
    return new_table(
        flow_kernel.Path,
        len(loads.pointer) - 1,
        rate=rate,
        line_rate=rate if is_own else course.paths.fold(rates, by_share=False)[0, 2],
        window_bytes=window_bytes,
        base_rtt_s=base_rtt_s,
        **network_paths.path_seconds(fabric, settings, course.paths)._asdict(),
        packet_bytes=settings.payload_bytes + settings.header_bytes,
        chance=(leaves > 0) & by_chance,
        first=loads.pointer[:-1],
        count=np.diff(loads.pointer),
    )


def in_flight_at_once(course: Course, state: FluidState) -> Floats:
    """Return (links,) the bytes that windows let be under way on each link that all flows together fill; else 0."""
    flows, (flow, link, share) = course.table, course.loads.crossings()
    windows = state.paths["window_bytes"]
    limit = np.where(windows > 0, windows, np.inf)[flows.path]
    rates: Floats = state.links["rate"]
    demand = np.bincount(link, state.paths["rate"][flows.path[flow]] * share, len(rates))
    flight = np.bincount(link, np.minimum(flows.size_bytes, limit)[flow] * share, len(rates))
    return np.where(demand > rates, flight, 0.0)


def may_act(course: Course, state: FluidState, in_flight_bytes: Floats) -> bool:
    """Whether a control could change a rate, given (links,) what windows let be under way on links that are full.

    HPCC holds every flow below its target. ECN marks what queues above a threshold, TIMELY sees a round trip above its
    lower limit. Without that all keep the rate of the link, and share it as windows do.
    """
    fabric, packet = course.fabric, course.packet
    from_switch = fabric.kind[fabric.directions[0]] == NodeKind.SWITCH
    if packet.congestion == "none" or not from_switch[course.loads.link].any():
        return False
    if packet.congestion == "hpcc":
        return True
    if packet.congestion == "timely":
        least_s = packet.timely_low_s - float(state.paths["round_trip_s"].min())
        least_s /= 1 if packet.acks_first else 2  # what a packet waits, its acknowledgement may wait again
        rate = np.repeat(fabric.bandwidth_bytes_per_s, 2)
        return bool((in_flight_bytes > rate * least_s)[from_switch].any())
    marking = links_of(fabric, packet, course.paths).ecn_min_bytes
    return packet.ecn and bool((in_flight_bytes > marking)[from_switch].any())


def run_controlled(course: Course, state: FluidState, draw: int = 0) -> tuple[Table, Table, int] | None:
    """Run flows round by round; return their records, those of links, and the number of events.

    None where the control never held a flow below its link's rate: all controls then share as max-min fairness does.
    """
    settings, packet, flows = course.settings, course.packet, course.table
    paths = state.paths.copy()
    paths["base_rtt_s"], paths["window_bytes"] = windows_of(course.fabric, settings, packet, course.paths)
    links, feeds, path_feed = _links(course, state)
    reply, reply_ptr, reply_link = _reply_links(course)
    num_slots, hops = min(len(flows), 4096), int(paths["count"].max(initial=1))
    while True:
        course.reset()
        run = rounds.RoundState(
            settings=kernel_settings(settings, packet)._replace(seed=settings.seed + (draw << 16)),
            flows=flows,
            child_ptr=state.child_ptr,
            child=state.child,
            paths=paths,
            path_ptr=course.loads.pointer,
            path_link=state.path_link,
            path_share=state.path_share,
            path_feed=path_feed,
            reply=reply,
            reply_ptr=reply_ptr,
            reply_link=reply_link,
            feeds=feeds.copy(),
            links=links.copy(),
            slots=new_table(rounds.Sender, num_slots),
            connections=new_table(Connection, num_slots),
            fresh_connection=new_table(Connection, 1, alpha=1.0, utilisation=1.0, first_mark_ps=-1),
            hop_rate=np.zeros((num_slots, hops)),
            stamps=new_table(Stamp, hops),
            seen=new_table(Stamp, (num_slots if packet.congestion == "hpcc" else 1, hops)),
            ends=np.empty(num_slots, np.int32),
            ends_s=np.empty(num_slots),
            ready_s=state.ready_s,
            ready=state.ready,
            free=np.empty(num_slots, np.int32),
            one_after_the_other=state.one_after_the_other,
        )
        done, num_events = rounds.run_rounds(run)
        if done >= 0:
            return (flows, run.links, num_events) if run.slots["num_cuts"].any() else None
        num_slots = min(len(flows), 4 * num_slots)


def _reply_links(course: Course) -> tuple[NDArray[np.int32], Ints, NDArray[np.int32]]:
    """Return each flow's way back, and the links on these where acknowledgements queue behind data.

    Those are links of switches, unless acknowledgements go first.

    A GPU sends acknowledgements first. Flows that represent their classes have none, for the ways back may differ.
    """
    if course.pairs is None or course.packet.acks_first:
        return np.zeros(len(course.table), np.int32), np.zeros(2, np.int64), np.zeros(0, np.int32)
    replies = network_paths.trace(course.fabric, course.pairs, course.settings, answers=True)
    queues = course.fabric.kind[course.fabric.directions[0]][replies.link] == NodeKind.SWITCH
    return replies.of_flow, np.concatenate([[0], np.cumsum(queues)])[replies.pointer], replies.link[queues]


def _links(course: Course, state: FluidState) -> tuple[Table, Table, Ints]:
    """Return the links, the feeds between them, and the feed of each link of a path."""
    fabric, packet, paths = course.fabric, course.packet, course.loads
    marking = links_of(fabric, packet, course.paths)
    source = fabric.kind[fabric.directions[0]]
    rates: Floats = state.links["rate"]
    links = new_table(
        rounds.RoundLink,
        len(rates),
        rate=rates,
        is_own=source == NodeKind.GPU,
        is_switch=source == NodeKind.SWITCH,
        **{name: marking[name] for name in ("ecn_min_bytes", "ecn_max_bytes", "ecn_max_probability")},
        **dict.fromkeys(("first", "last", "first_feed"), -1),
    )
    path_feed = np.full(len(paths.link), -1)
    follows = np.ones(len(paths.link), bool)
    follows[paths.pointer[:-1]] = False
    if len(paths.share) or not follows.any():
        return links, new_table(rounds.Feed, 1), path_feed
    pair = paths.link[1:].astype(np.int64) * len(rates) + paths.link[:-1]
    pairs, path_feed[follows] = np.unique(pair[follows[1:]], return_inverse=True)
    target, first = np.unique(pairs // len(rates), return_index=True)
    links.first_feed[target] = first
    following = np.arange(1, len(pairs) + 1)
    following[np.append(first[1:], len(pairs)) - 1] = -1
    return links, new_table(rounds.Feed, len(pairs), link=pairs % len(rates), next=following), path_feed
