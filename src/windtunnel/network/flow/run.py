"""Time flows at flow level: links shared max-min fairly, or as congestion control divides them where that acts."""

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from windtunnel.compiled.arrays import Floats
from windtunnel.compiled.records import new_table
from windtunnel.errors import WindtunnelError
from windtunnel.network.fabric import Fabric, NodeKind
from windtunnel.network.flow import kernel as flow_kernel
from windtunnel.network.flow.control import Course, Lowered, in_flight_at_once, may_act, run_controlled
from windtunnel.network.flows import Flows, children_of
from windtunnel.network.packet.tables import CONTROL_HEADER_BYTES, windows_of
from windtunnel.network.paths import (
    FlowTimes,
    Pairs,
    Paths,
    data_bytes_per_s,
    followers,
    pairs_of,
    path_seconds,
    reported_s,
    send_delays_s,
    trace,
    wire_bytes,
)
from windtunnel.network.settings import NetworkSettings, packets_of

Table = Any
"""A record array of one of the layouts in `network.flow.kernel`."""


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
    paths: Paths | None = None,
    loads: Paths | None = None,
    options: FlowOptions = FlowOptions(),
) -> FlowTimes:
    """Time flows by max-min fair sharing of every link, and where a congestion control acts, round by round.

    Args:
        paths: their paths; shortest paths where left out.
        loads: each flow's load on links where that is not its path: a flow that represents its equivalence class.

    Raises:
        InputError: ends are not connected.
        WindtunnelError: flows wait for each other.
    """
    if paths is None:
        return run_lowered(lower(fabric, flows, settings, pairs_of(fabric, flows, settings)), settings.seed, options)
    return _run_course(Course(**vars(lower(fabric, flows, settings, None)), paths=paths, loads=loads or paths), options)


def run_lowered(lowered: Lowered, seed: int, options: FlowOptions = FlowOptions()) -> FlowTimes:
    """Time flows as `run_flow_level`, whose errors this has, on the paths that hashes of this seed choose.

    The times are columns of `lowered.table`, which the next run overwrites.
    """
    assert lowered.pairs is not None
    settings = msgspec.structs.replace(lowered.settings, seed=seed)
    paths = trace(lowered.fabric, lowered.pairs, settings)
    return _run_course(Course(**vars(lowered) | {"settings": settings}, paths=paths, loads=paths), options)


def _run_course(course: Course, options: FlowOptions) -> FlowTimes:
    course.table.path = course.paths.of_flow
    rates = data_bytes_per_s(course.fabric, course.settings)
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
    return FlowTimes(*times_s, used.bytes, used.stamp >= 0, num_events, float(rows.finish_s.max()))


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


def _controlled_times(course: Course, rows: Table, links: Table, num_events: int) -> FlowTimes:
    """Return the times of flows under control; as SimAI rank 0's, but for connections that stand for others."""
    total_s = float(rows.finish_s.max())
    if course.loads is course.paths:
        total_s = reported_s(course.flows, course.settings, rows.sent_s, rows.finish_s)
    was_full = links.most_queued_bytes > 0
    return FlowTimes(
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


def lower(fabric: Fabric, flows: Flows, settings: NetworkSettings, pairs: Pairs | None) -> Lowered:
    """Lower flows to records, as far as that needs no path; `pairs` are their ends, unless paths are given."""
    packet = packets_of(settings)
    header_bytes = settings.header_bytes + CONTROL_HEADER_BYTES.get(packet.congestion, 0)
    settings = msgspec.structs.replace(settings, header_bytes=header_bytes)
    waiting, delay_s, follower = np.diff(flows.parent_ptr), send_delays_s(fabric, flows, settings), followers(flows)
    ready_s = flows.start_s + np.where(waiting == 0, delay_s, 0.0)
    waiting[follower[follower >= 0]] += 1
    table = new_table(
        flow_kernel.FluidFlow,
        len(flows),
        size_bytes=wire_bytes(flows.size_bytes, settings),
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
        **path_seconds(fabric, settings, course.paths)._asdict(),
        packet_bytes=settings.payload_bytes + settings.header_bytes,
        chance=(leaves > 0) & by_chance,
        first=loads.pointer[:-1],
        count=np.diff(loads.pointer),
    )
