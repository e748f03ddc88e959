"""Run the compiled packet loop, and enlarge its tables when they are full.

Flows that cannot influence each other run part by part, and one of equivalent parts for all.
"""

import hashlib
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from windtunnel.compiled.arrays import Ints
from windtunnel.compiled.calendar import new_clock
from windtunnel.compiled.records import new_table
from windtunnel.network.flows import children_of, gathered
from windtunnel.network.packet.kernel import codes, groups, loop, state
from windtunnel.network.packet.tables import PacketTables, Table, places

WHEEL_PS = 2**23
"""One turn of the calendar: 8 us, more than a hop or a launch takes."""
MOST_BUCKETS = 2**20


@dataclass(frozen=True, eq=False)
class PacketOutcome:
    """The tables after a run."""

    links: Table
    nodes: Table
    flows: Table
    counters: Table
    """One record of `state.Counters`."""


def run_tables(tables: PacketTables, *, once: bool = False) -> PacketOutcome:
    """Run the compiled loop to its end; where a table is full, enlarge it and continue.

    `once`: the tables serve for this run alone, which writes into their flows and needs no copy of them.
    """
    run = _state(tables if once else replace(tables, flows=tables.flows.copy()))
    while (lack := loop.run(run)) != loop.DONE:
        run = _more(lack, run)
    return PacketOutcome(run.links, run.nodes, run.flows, run.counters[0])


def _state(tables: PacketTables) -> state.PacketState:
    """Return the loop's state before the first event; its free tables are large enough for small runs."""
    flows = tables.flows
    children_start, children = children_of(tables.parent_ptr, tables.parent)
    settings = tables.settings._replace(most_children=int(np.diff(children_start).max(initial=0)))
    num_connections, num_packets = min(len(flows), 256) + 1, 512
    free = {"num_free_connections": num_connections, "num_free_packets": num_packets}
    fresh = {"alpha": 1.0, "utilisation": 1.0, "first_mark_ps": -1, "refused_byte": -1}
    is_hpcc = settings.congestion == codes.HPCC
    hops = int(np.diff(tables.routes.paths).max(initial=1)) if is_hpcc else 1
    num_buckets = min(MOST_BUCKETS, 1 << max(12, int(np.ceil(np.log2(4 * len(tables.links))))))
    shift = max(0, int(np.log2(WHEEL_PS / num_buckets)))
    return state.PacketState(
        settings=settings,
        links=tables.links.copy(),
        nodes=tables.nodes.copy(),
        flows=flows,
        channels=tables.channels.copy(),
        send_queues=new_table(state.SendQueue, int(flows.queue.max(initial=0)) + 1, first=codes.NONE),
        first_flows=tables.first,
        children_start=children_start,
        children=children,
        routes=tables.routes,
        connections=new_table(state.Connection, num_connections, next=np.arange(1, num_connections + 1)),
        fresh_connection=new_table(state.Connection, 1, **fresh),
        packets=new_table(state.Packet, num_packets, next=np.arange(1, num_packets + 1)),
        counters=new_table(state.Counters, 1, **free),
        stamps=new_table(state.Stamp, (num_packets if is_hpcc else 1, hops)),
        seen=new_table(state.Stamp, (num_connections if is_hpcc else 1, hops)),
        sacks=np.zeros((2 * num_connections, _sack_words(tables)), np.uint64),
        clock=new_clock(len(tables.first) + settings.most_children + 512, num_buckets, shift=shift),
    )


def _more(lack: int, run: state.PacketState) -> state.PacketState:
    """Double the events, packets or connections, whichever the loop lacks, and the tables that go with them."""
    is_hpcc = run.settings.congestion == codes.HPCC
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
    if tables.settings.recovery != codes.SELECTIVE_REPEAT:
        return 1
    most_packets = int(tables.routes.window_bytes.max(initial=1)) // tables.settings.payload_bytes + 2
    return most_packets // 64 + 1


@dataclass(frozen=True, eq=False)
class PacketPart:
    """Flows that share no link with others, and the numbers of flows, links and nodes in the complete tables."""

    tables: PacketTables
    flows: Ints
    links: Ints
    nodes: Ints

    def likeness(self, *, of_senders: bool) -> bytes:
        """Return a digest: equal for parts that differ only in names, and if not `of_senders`, in order of senders."""
        tables, links = self.tables, self.tables.links.copy()
        links.name = 0
        if not of_senders:
            links.sender = 0
        arrays = (links, tables.nodes, tables.flows, tables.channels, tables.first, tables.parent_ptr, tables.parent)
        routes = tables.routes[:6]
        return hashlib.sha256(b"".join(array.tobytes() for array in (*arrays, *routes))).digest()


def run_in_parts(tables: PacketTables) -> PacketOutcome:
    """Return the outcome of `run_tables`, part by part, and run one of equivalent parts, where that changes nothing.

    The tables serve for this run alone. It changes nothing if parts have no link, send queue or parent in common; if
    parts that stand for others drew no random number, and take the packets of several senders in the same order, should
    any meet; and if no switch that several parts cross comes near to pausing or dropping: all of their largest buffers
    together still left every port a share larger than any of them.
    """
    parts = split(tables)
    if len(parts) == 1:
        return run_tables(tables, once=True)
    outcomes: list[PacketOutcome] = []
    outcome_of: dict[bytes, PacketOutcome] = {}
    num_events = 0
    for part in parts:
        equal, similar = part.likeness(of_senders=True), part.likeness(of_senders=False)
        outcome = outcome_of.get(equal) or outcome_of.get(similar)
        if outcome is None:
            outcome = run_tables(part.tables, once=True)
            num_events += outcome.counters.num_events
            if outcome.counters.num_draws == 0:
                outcome_of[equal if outcome.counters.num_ties else similar] = outcome
        outcomes.append(outcome)
    if not _is_roomy(tables, parts, outcomes):
        return run_tables(tables)
    return _joined(tables, parts, outcomes, num_events)


def split(tables: PacketTables) -> list[PacketPart]:
    """Return the parts of the tables; only one where packets choose their way."""
    num_flows, num_links = len(tables.flows), len(tables.links) // 2
    whole = [PacketPart(tables, np.arange(num_flows), np.arange(2 * num_links), np.arange(len(tables.nodes)))]
    if tables.settings.routing != codes.ECMP or num_flows == 0:
        return whole
    num_queues = int(tables.flows.queue.max()) + 1
    group = np.empty(num_flows + num_links + len(tables.channels) + num_queues, np.int64)
    groups.find_groups(
        tables.flows, tables.channels, tables.parent_ptr, tables.parent, tables.routes, num_queues, group
    )
    of_flow = group[:num_flows]
    if np.ptp(of_flow) == 0:
        return whole
    order = np.argsort(of_flow, kind="stable")
    first = np.flatnonzero(np.diff(of_flow[order], prepend=-1))
    return [_part(tables, flows) for flows in np.split(order, first[1:])]


def _part(tables: PacketTables, flows: Ints) -> PacketPart:
    """Return some flows with the links, nodes and paths that they use, numbered as they first appear."""
    records = tables.flows[flows]
    used_paths, paths, path_links, records.path = _routes(tables.routes.paths, tables.routes.path_links, records.path)
    _, replies, reply_links, records.reply = _routes(tables.routes.replies, tables.routes.reply_links, records.reply)
    records.queue = _renumbered(records.queue)[1]
    records.follower = np.where(records.follower < 0, -1, np.searchsorted(flows, records.follower))
    channels, reduces = tables.channels, records.channel >= 0
    if reduces.any():
        used_channels, records.channel[reduces] = np.unique(records.channel[reduces], return_inverse=True)
        channels = channels[used_channels].copy()
        channels.rank = np.searchsorted(used_channels, channels.rank)
    pairs, position = _renumbered(np.concatenate([path_links, reply_links]) >> 1)
    links = (2 * pairs[:, None] + np.arange(2)).ravel()
    used = tables.links[links].copy()
    nodes, ends = _renumbered(np.concatenate([used.source, used.target]))
    used.source, used.target = np.split(ends, 2)
    between = used.sender >= 0
    used.sender[between] = places(used.target[between], used.sender[between])
    path_links = 2 * position[: len(path_links)] + (path_links & 1)
    reply_links = 2 * position[len(path_links) :] + (reply_links & 1)
    parent_ptr, parents = gathered(tables.parent_ptr, flows)
    part = replace(
        tables,
        links=used,
        nodes=tables.nodes[nodes].copy(),
        flows=records,
        channels=channels,
        first=np.searchsorted(flows, tables.first[np.isin(tables.first, flows)]),
        parent_ptr=parent_ptr,
        parent=np.searchsorted(flows, tables.parent[parents]).astype(np.int32),
        routes=tables.routes._replace(
            paths=paths,
            path_links=path_links.astype(np.int32),
            replies=replies,
            reply_links=reply_links.astype(np.int32),
            window_bytes=tables.routes.window_bytes[used_paths],
            base_rtt_ps=tables.routes.base_rtt_ps[used_paths],
        ),
    )
    return PacketPart(part, flows, links, nodes)


def _renumbered(values: NDArray[np.integer]) -> tuple[Ints, Ints]:
    """Return the distinct values in the order of their first appearance, and each value's position among them."""
    distinct, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    return distinct[order].astype(np.int64), rank[inverse]


def _routes(
    pointer: NDArray[np.integer], links: NDArray[np.integer], used: NDArray[np.int32]
) -> tuple[Ints, Ints, Ints, Ints]:
    """Return the used paths alone: which they are, pointers, links, and the path of each flow."""
    kept, which = _renumbered(used)
    start, positions = gathered(pointer, kept)
    return kept, start, links[positions].astype(np.int64), which


def _is_roomy(tables: PacketTables, parts: list[PacketPart], outcomes: list[PacketOutcome]) -> bool:
    """Whether buffers that several parts share could never have paused or dropped."""
    num_parts = np.zeros(len(tables.nodes), np.int64)
    total, largest = np.zeros_like(num_parts), np.zeros_like(num_parts)
    for part, outcome in zip(parts, outcomes, strict=True):
        num_parts[part.nodes] += 1
        total[part.nodes] += outcome.nodes.most_shared_bytes
        largest[part.nodes] = np.maximum(largest[part.nodes], outcome.nodes.most_shared_bytes)
    packet_bytes = tables.settings.payload_bytes + tables.settings.header_bytes
    shift = int(tables.links.pfc_shift.max(initial=0))
    shared = (num_parts > 1) & (tables.nodes.kind == codes.SWITCH)
    share = (tables.nodes.shared_limit_bytes - total) >> shift
    return bool((largest[shared] + packet_bytes < share[shared]).all())


def _joined(
    tables: PacketTables, parts: list[PacketPart], outcomes: list[PacketOutcome], num_events: int
) -> PacketOutcome:
    links, nodes, flows = tables.links.copy(), tables.nodes.copy(), tables.flows.copy()
    counters: Table = new_table(state.Counters, 1, num_events=num_events)[0]
    for name in ("num_data_packets", "num_repeated_packets", "num_draws", "num_ties"):
        counters[name] = sum(outcome.counters[name] for outcome in outcomes)
    kept = ("name", "source", "target")
    for part, outcome in zip(parts, outcomes, strict=True):
        for name in links.dtype.names:
            if name not in kept:
                links[name][part.links] = outcome.links[name]
        for name in ("start_ps", "sent_ps", "finish_ps"):
            flows[name][part.flows] = outcome.flows[name]
        nodes.most_shared_bytes[part.nodes] += outcome.nodes.most_shared_bytes
    return PacketOutcome(links, nodes, flows, counters)
