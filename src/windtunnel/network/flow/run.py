"""Time flows at flow level: links shared max-min fairly, or as congestion control divides them where that acts."""

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from windtunnel.compiled.records import new_table
from windtunnel.errors import WindtunnelError
from windtunnel.network.fabric import Fabric, NodeKind
from windtunnel.network.flow import kernel as flow_kernel
from windtunnel.network.flow.control import Course, in_flight_at_once, may_act, run_controlled
from windtunnel.network.flows import Flows, children_of
from windtunnel.network.packet.tables import CONTROL_HEADER_BYTES, windows_of
from windtunnel.network.paths import (
    FlowTimes,
    Paths,
    data_bytes_per_s,
    find_paths,
    followers,
    reported_s,
    round_trip_seconds,
    send_delay_s,
    tail_seconds,
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
    packet = packets_of(settings)
    more_bytes = CONTROL_HEADER_BYTES.get(packet.congestion, 0)
    settings = msgspec.structs.replace(settings, header_bytes=settings.header_bytes + more_bytes)
    paths = paths or find_paths(fabric, flows, settings)
    course = Course(fabric, flows, settings, packet, paths, loads or paths)
    table = _flow_table(course, flows)
    rates = np.repeat(data_bytes_per_s(fabric, settings), 2)
    links = new_table(
        flow_kernel.FluidLink, len(rates), rate=rates if options.shared else np.inf, first=-1, last=-1, stamp=-1
    )
    path = _path_table(course, rates, by_chance=options.by_chance)
    state = _state(table, flows, path, course, links)
    watches, at_once = options.shared and options.watches_control, len(flows.parent) == 0
    if watches and at_once and may_act(course, table, in_flight_at_once(course, table, state)):
        controlled = run_controlled(course, state, table, options.draw)
        if controlled is not None:
            return _controlled_times(course, flows, *controlled)
    state, num_events = _run_shared(state, table, links)
    if watches and not at_once and may_act(course, table, state.links["most_in_flight"]):
        controlled = run_controlled(course, state, table, options.draw)
        if controlled is not None:
            return _controlled_times(course, flows, *controlled)
    rows: Table = state.flows
    used: Table = state.links
    total_s = float(rows.finish_s.max())
    return FlowTimes(rows.begin_s, rows.sent_s, rows.finish_s, used.bytes, used.stamp >= 0, num_events, total_s)


def _run_shared(state: flow_kernel.FluidState, table: Table, links: Table) -> tuple[flow_kernel.FluidState, int]:
    """Run flows that share links max-min fairly; return the state after it, and the number of events."""
    num_slots = min(len(table), 4096)
    while True:
        run = _with_slots(state._replace(flows=table.copy(), links=links.copy()), num_slots)
        done, num_events = flow_kernel.run_flows(run)
        if done >= 0:
            break
        num_slots = min(len(table), 8 * num_slots)
    if done < len(table):
        raise WindtunnelError(f"{len(table) - done} of {len(table)} flows wait for each other")
    return run, num_events


def _controlled_times(course: Course, flows: Flows, rows: Table, links: Table, num_events: int) -> FlowTimes:
    """Return the times of flows under control; as SimAI rank 0's, but for connections that stand for others."""
    total_s = float(rows.finish_s.max())
    if course.loads is course.paths:
        total_s = reported_s(flows, course.settings, rows.sent_s, rows.finish_s)
    was_full = links.most_queued_bytes > 0
    return FlowTimes(
        rows.begin_s, rows.sent_s, rows.finish_s, links.bytes, was_full, num_events, total_s, is_controlled=True
    )


def _state(table: Table, flows: Flows, path: Table, course: Course, links: Table) -> flow_kernel.FluidState:
    """Return the state of the kernel before the first event, with room for no flow to send."""
    child_ptr, child = children_of(flows.parent_ptr, flows.parent)
    return flow_kernel.FluidState(
        flows=table,
        child_ptr=child_ptr,
        child=child,
        paths=path,
        path_link=course.loads.link,
        path_share=course.loads.share,
        links=links,
        slots=new_table(flow_kernel.Slot, 0),
        hops=new_table(flow_kernel.FluidHop, 0),
        max_hops=int(path["count"].max(initial=1)),
        free=np.empty(0, np.int32),
        ends=np.empty(0, np.int32),
        ready_s=np.empty(len(flows)),
        ready=np.empty(len(flows), np.int64),
        members=np.empty(0, np.int32),
        touched=np.empty(len(links), np.int32),
        levels=np.empty(0),
        fillers=np.empty(0, np.int64),
        one_after_the_other=course.settings.compat is None,
    )


def _with_slots(state: flow_kernel.FluidState, num_slots: int) -> flow_kernel.FluidState:
    """Return the state with room for so many flows to send at once."""
    return state._replace(
        slots=new_table(flow_kernel.Slot, num_slots, stamp=-1),
        hops=new_table(flow_kernel.FluidHop, num_slots * state.max_hops),
        free=np.empty(num_slots, np.int32),
        ends=np.empty(num_slots, np.int32),
        members=np.empty(num_slots, np.int32),
        levels=np.empty(len(state.links) + num_slots),
        fillers=np.empty(len(state.links) + num_slots, np.int64),
    )


def _flow_table(course: Course, flows: Flows) -> Table:
    fabric, settings, paths = course.fabric, course.settings, course.paths
    last_bytes = ((flows.size_bytes - 1) % settings.payload_bytes + 1 + settings.header_bytes).astype(np.float64)
    packet_bytes = (np.minimum(flows.size_bytes, settings.payload_bytes) + settings.header_bytes).astype(np.float64)
    # The largest window of a fabric takes longer to find than most runs; no window matters that a flow fits into.
    packet = course.packet
    if packet.window == "fabric":
        packet = msgspec.structs.replace(packet, window="pair")
    base_rtt_s, window_bytes = windows_of(fabric, settings, packet, paths)
    if packet is not course.packet and flows.size_bytes.max(initial=0) > window_bytes.min(initial=np.inf):
        base_rtt_s, window_bytes = windows_of(fabric, settings, course.packet, paths)
    table = new_table(
        flow_kernel.FluidFlow,
        len(flows),
        size_bytes=wire_bytes(flows.size_bytes, settings),
        last_bytes=last_bytes,
        window_bytes=window_bytes[paths.of_flow],
        base_rtt_s=base_rtt_s[paths.of_flow],
        round_trip_s=round_trip_seconds(fabric, settings, paths)[paths.of_flow],
        tail_s=tail_seconds(fabric, settings, paths, packet_bytes),
        delay_s=flows.delay_s + send_delay_s(settings),
        waiting=np.diff(flows.parent_ptr),
        follower=followers(flows),
        path=paths.of_flow,
    )
    table.ready_s = flows.start_s + np.where(table.waiting == 0, table.delay_s, 0.0)
    table.waiting[table.follower[table.follower >= 0]] += 1
    return table


def _path_table(course: Course, rates: NDArray[np.float64], *, by_chance: bool) -> Table:
    fabric, paths, loads = course.fabric, course.paths, course.loads
    is_switch = fabric.kind == NodeKind.SWITCH
    leaves = np.repeat(is_switch[fabric.link_a] | is_switch[fabric.link_b], 2)[loads.link].astype(np.float64)
    limits = rates[loads.link] / (loads.share if len(loads.share) else 1.0)
    return new_table(
        flow_kernel.Path,
        len(loads.pointer) - 1,
        rate=np.minimum.reduceat(limits, loads.pointer[:-1]),
        line_rate=np.minimum.reduceat(rates[paths.link], paths.pointer[:-1]),
        chance=np.maximum.reduceat(leaves, loads.pointer[:-1]) if by_chance else 0.0,
        first=loads.pointer[:-1],
        count=np.diff(loads.pointer),
    )
