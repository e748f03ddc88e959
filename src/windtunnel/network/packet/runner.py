"""The compiled packet loop with its tables, which grow when it asks."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.compiled.calendar import new_clock
from windtunnel.network.packet.kernel import loop, state
from windtunnel.network.packet.tables import Ints, Table, Tables

WHEEL_PS = 2**23
"""One turn of the calendar: 8 us, more than a hop or a launch takes."""


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
    num_ties: int
    """Packets that met one of another sender at the same time, where senders have an order."""


def run_tables(tables: Tables, traced: NDArray[np.int32] | None = None) -> Outcome:
    """Run the compiled loop to its end, with larger tables whenever it asks for them."""
    children_start, children = _children(tables.parent_ptr, tables.parent)
    most_children = int(np.diff(children_start).max(initial=0))
    settings = tables.settings._replace(most_children=most_children)
    links, nodes, flows = tables.links.copy(), tables.nodes.copy(), tables.flows.copy()
    channels = tables.channels.copy()
    num_buckets = 1 << min(20, max(12, int(np.ceil(np.log2(4 * len(links))))))
    shift = max(0, int(np.log2(WHEEL_PS / num_buckets)))
    clock = new_clock(len(tables.first) + most_children + 512, num_buckets, shift)
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
            channels,
            send_queues,
            tables.first,
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
            clock,
        )
        if outcome == loop.DONE:
            break
        if outcome == loop.MORE_EVENTS:
            events = _grown(clock.events, clock.calendar, "free", "num_free")
            clock = clock._replace(events=events, heaps=_longer(clock.heaps, len(events)))
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
        int(counters[0].num_ties),
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
