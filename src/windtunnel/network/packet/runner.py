"""Run the compiled packet loop, and enlarge its tables when they are full."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.compiled.calendar import new_clock
from windtunnel.network.flows import children_of
from windtunnel.network.packet.kernel import loop, state
from windtunnel.network.packet.tables import Ints, PacketTables, Table

WHEEL_PS = 2**23
"""One turn of the calendar: 8 us, more than a hop or a launch takes."""
MOST_BUCKETS = 2**20
TRACE_ROWS = 4096


@dataclass(frozen=True, eq=False)
class PacketOutcome:
    """The tables after a run."""

    links: Table
    nodes: Table
    flows: Table
    trace: Ints
    num_events: int
    num_data_packets: int
    num_repeated_packets: int
    num_draws: int
    num_ties: int
    """Packets that met a packet of another sender at the same time, where senders have an order."""


COUNTED = ("num_events", "num_data_packets", "num_repeated_packets", "num_draws", "num_ties")
"""Counters of the loop that an outcome keeps."""


def run_tables(tables: PacketTables, traced: NDArray[np.int32] | None = None) -> PacketOutcome:
    """Run the compiled loop to its end; where a table is full, enlarge it and continue."""
    run = _state(tables, np.zeros(0, np.int32) if traced is None else traced)
    traces = []
    while True:
        lack = loop.run(run)
        if lack == loop.DONE:
            break
        if lack == loop.MORE_TRACE:
            traces.append(run.traced.rows.copy())
            run.counters[0].num_trace_rows = 0
        else:
            run = _more(lack, run)
    counters = run.counters[0]
    traces.append(run.traced.rows[: counters.num_trace_rows])
    counts = {name: int(getattr(counters, name)) for name in COUNTED}
    return PacketOutcome(run.links, run.nodes, run.flows, np.concatenate(traces), **counts)


def _state(tables: PacketTables, traced: NDArray[np.int32]) -> state.PacketState:
    """Return the loop's state before the first event; its free tables are large enough for small runs."""
    flows: Table = tables.flows.copy()
    queues: Table = np.zeros(int(flows.queue.max(initial=0)) + 1, state.SEND_QUEUE).view(np.recarray)
    queues.first = state.NONE
    children_start, children = children_of(tables.parent_ptr, tables.parent)
    settings = tables.settings._replace(most_children=int(np.diff(children_start).max(initial=0)))
    connections = _free_list(state.CONNECTION, min(len(flows), 256) + 1)
    packets = _free_list(state.PACKET, 512)
    fresh: Table = np.zeros(1, state.CONNECTION).view(np.recarray)
    fresh.alpha = fresh.utilisation = 1.0
    fresh.first_mark_ps = fresh.refused_byte = -1
    counters: Table = np.zeros(1, state.COUNTERS).view(np.recarray)
    counters.num_free_connections, counters.num_free_packets = len(connections), len(packets)
    is_hpcc = settings.congestion == state.HPCC
    hops = int(np.diff(tables.routes.paths).max(initial=1)) if is_hpcc else 1
    num_rows = TRACE_ROWS if settings.trace_interval_ps else 1
    num_buckets = min(MOST_BUCKETS, 1 << max(12, int(np.ceil(np.log2(4 * len(tables.links))))))
    shift = max(0, int(np.log2(WHEEL_PS / num_buckets)))
    return state.PacketState(
        settings=settings,
        links=tables.links.copy(),
        nodes=tables.nodes.copy(),
        flows=flows,
        channels=tables.channels.copy(),
        send_queues=queues,
        first_flows=tables.first,
        children_start=children_start,
        children=children,
        routes=tables.routes,
        connections=connections,
        fresh_connection=fresh,
        packets=packets,
        counters=counters,
        stamps=np.zeros((len(packets) if is_hpcc else 1, hops), state.STAMP).view(np.recarray),
        seen=np.zeros((len(connections) if is_hpcc else 1, hops), state.STAMP).view(np.recarray),
        sacks=np.zeros((2 * len(connections), _sack_words(tables)), np.uint64),
        traced=state.TracedQueues(traced, np.zeros((num_rows, 1 + len(traced)), np.int64)),
        clock=new_clock(len(tables.first) + settings.most_children + 512, num_buckets, shift=shift),
    )


def _more(lack: int, run: state.PacketState) -> state.PacketState:
    """Double the events, packets or connections, whichever the loop lacks, and the tables that go with them."""
    is_hpcc = run.settings.congestion == state.HPCC
    if lack == loop.MORE_EVENTS:
        events = _grown(run.clock.events, run.clock.calendar, "free", "num_free")
        return run._replace(clock=run.clock._replace(events=events, heaps=_longer(run.clock.heaps, len(events))))
    if lack == loop.MORE_PACKETS:
        packets = _grown(run.packets, run.counters, "free_packet", "num_free_packets")
        return run._replace(packets=packets, stamps=_longer(run.stamps, len(packets)) if is_hpcc else run.stamps)
    connections = _grown(run.connections, run.counters, "free_connection", "num_free_connections")
    seen = _longer(run.seen, len(connections)) if is_hpcc else run.seen
    sacks = np.concatenate([_longer(half, len(connections)) for half in np.split(run.sacks, 2)])
    return run._replace(connections=connections, seen=seen, sacks=sacks)


def _free_list(record: np.dtype[Any], size: int) -> Table:
    table = np.zeros(size, record).view(np.recarray)
    table["next"] = np.arange(1, size + 1)
    return table


def _longer(table: Table, size: int) -> Table:
    larger = np.zeros((size, *table.shape[1:]), table.dtype)
    larger[: len(table)] = table
    return larger.view(np.recarray) if table.dtype.names else larger


def _grown(table: Table, registers: Table, first: str, count: str) -> Table:
    """Double the records; the new ones are at the head of the free list."""
    size = len(table)
    larger = _longer(table, 2 * size)
    larger["next"][size:] = np.arange(size + 1, 2 * size + 1)
    larger["next"][-1] = registers[0][first]
    registers[first] = size
    registers[count] += size
    return larger


def _sack_words(tables: PacketTables) -> int:
    if tables.settings.recovery != state.SELECTIVE_REPEAT:
        return 1
    most_packets = int(tables.flows.window_bytes.max(initial=1)) // tables.settings.payload_bytes + 2
    return most_packets // 64 + 1
