"""Time flows at flow level: links shared max-min fairly."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.compiled.records import new_table
from windtunnel.errors import WindtunnelError
from windtunnel.network.fabric import Fabric
from windtunnel.network.flow import kernel as flow_kernel
from windtunnel.network.flows import Flows, children_of
from windtunnel.network.paths import (
    FlowTimes,
    Paths,
    data_bytes_per_s,
    find_paths,
    followers,
    send_delay_s,
    tail_seconds,
    wire_bytes,
)
from windtunnel.network.settings import NetworkSettings

Table = Any
"""A record array of one of the layouts in `network.flow.kernel`."""


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
        paths: their paths; shortest paths where left out.
        loads: each flow's load on links where that is not its path: a flow that represents its equivalence class.
        shared: whether flows that cross a link share it; else each has all of it.

    Raises:
        InputError: ends are not connected.
        WindtunnelError: flows wait for each other.
    """
    paths = paths or find_paths(fabric, flows, settings)
    table = _flow_table(fabric, flows, settings, paths)
    rates = np.repeat(data_bytes_per_s(fabric, settings), 2)
    links = new_table(flow_kernel.FluidLink, len(rates), rate=rates if shared else np.inf, first=-1, last=-1, stamp=-1)
    loads = loads or paths
    path = _path_table(rates, paths, loads)
    num_slots = min(len(flows), 4096)
    while True:
        state = _state(table.copy(), flows, path, loads, links.copy(), num_slots, settings.compat is None)
        done, num_events = flow_kernel.run_flows(state)
        if done >= 0:
            break
        num_slots = min(len(flows), 8 * num_slots)
    if done < len(flows):
        raise WindtunnelError(f"{len(flows) - done} of {len(flows)} flows wait for each other")
    rows: Table = state.flows
    used: Table = state.links
    total_s = float(rows.finish_s.max())
    return FlowTimes(rows.begin_s, rows.sent_s, rows.finish_s, used.bytes, used.stamp >= 0, num_events, total_s)


def _state(
    table: Table, flows: Flows, path: Table, loads: Paths, links: Table, num_slots: int, one_after_the_other: bool
) -> flow_kernel.FluidState:
    """Return the state of the kernel before the first event, with new scratch arrays."""
    child_ptr, child = children_of(flows.parent_ptr, flows.parent)
    max_hops = int(path["count"].max(initial=1))
    return flow_kernel.FluidState(
        flows=table,
        child_ptr=child_ptr,
        child=child,
        paths=path,
        path_link=loads.link,
        path_share=loads.share,
        links=links,
        slots=new_table(flow_kernel.Slot, num_slots, stamp=-1),
        hops=new_table(flow_kernel.FluidHop, num_slots * max_hops),
        max_hops=max_hops,
        free=np.empty(num_slots, np.int32),
        ends=np.empty(num_slots, np.int32),
        ready_s=np.empty(len(flows)),
        ready=np.empty(len(flows), np.int64),
        members=np.empty(num_slots, np.int32),
        touched=np.empty(len(links), np.int32),
        levels=np.empty(len(links) + num_slots),
        fillers=np.empty(len(links) + num_slots, np.int64),
        one_after_the_other=one_after_the_other,
    )


def _flow_table(fabric: Fabric, flows: Flows, settings: NetworkSettings, paths: Paths) -> Table:
    last_bytes = ((flows.size_bytes - 1) % settings.payload_bytes + 1 + settings.header_bytes).astype(np.float64)
    table = new_table(
        flow_kernel.FluidFlow,
        len(flows),
        size_bytes=wire_bytes(flows.size_bytes, settings),
        last_bytes=last_bytes,
        tail_s=tail_seconds(fabric, settings, paths, last_bytes),
        delay_s=flows.delay_s + send_delay_s(settings),
        waiting=np.diff(flows.parent_ptr),
        follower=followers(flows),
        path=paths.of_flow,
    )
    table.ready_s = flows.start_s + np.where(table.waiting == 0, table.delay_s, 0.0)
    table.waiting[table.follower[table.follower >= 0]] += 1
    return table


def _path_table(rates: NDArray[np.float64], paths: Paths, loads: Paths) -> Table:
    limits = rates[loads.link] / (loads.share if len(loads.share) else 1.0)
    return new_table(
        flow_kernel.Path,
        len(loads.pointer) - 1,
        rate=np.minimum.reduceat(limits, loads.pointer[:-1]),
        line_rate=np.minimum.reduceat(rates[paths.link], paths.pointer[:-1]),
        first=loads.pointer[:-1],
        count=np.diff(loads.pointer),
    )
