"""Run packets part by part: flows that cannot influence each other apart, and one of equivalent parts for all."""

import hashlib
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from windtunnel.network.packet.kernel import groups, state
from windtunnel.network.packet.runner import COUNTED, PacketOutcome, run_tables
from windtunnel.network.packet.tables import Ints, PacketTables
from windtunnel.network.packet.tie_breaking import places


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
        routes = tables.routes[:4]
        return hashlib.sha256(b"".join(array.tobytes() for array in (*arrays, *routes))).digest()


def run_in_parts(tables: PacketTables) -> PacketOutcome:
    """Return the outcome of `run_tables`, part by part, and run one of equivalent parts, where that changes nothing.

    It changes nothing if parts have no link, send queue or parent in common; if parts that stand for others drew no
    random number, and take the packets of several senders in the same order, should any meet; and if no switch that
    several parts cross comes near to pausing or dropping: all of their largest buffers together still left every port
    a share larger than any of them.
    """
    parts = split(tables)
    if len(parts) == 1:
        return run_tables(tables)
    outcomes: list[PacketOutcome] = []
    outcome_of: dict[bytes, PacketOutcome] = {}
    num_events = 0
    for part in parts:
        equal, similar = part.likeness(of_senders=True), part.likeness(of_senders=False)
        outcome = outcome_of.get(equal) or outcome_of.get(similar)
        if outcome is None:
            outcome = run_tables(part.tables)
            num_events += outcome.num_events
            if outcome.num_draws == 0:
                outcome_of[equal if outcome.num_ties else similar] = outcome
        outcomes.append(outcome)
    if not _is_roomy(tables, parts, outcomes):
        return run_tables(tables)
    return _joined(tables, parts, outcomes, num_events)


def split(tables: PacketTables) -> list[PacketPart]:
    """Return the parts of the tables; only one where packets choose their way."""
    num_flows, num_links = len(tables.flows), len(tables.links) // 2
    if tables.settings.routing != state.ECMP or num_flows == 0:
        return [PacketPart(tables, np.arange(num_flows), np.arange(2 * num_links), np.arange(len(tables.nodes)))]
    num_queues = int(tables.flows.queue.max()) + 1
    group = np.empty(num_flows + num_links + len(tables.channels) + num_queues, np.int64)
    groups.find_groups(
        tables.flows, tables.channels, tables.parent_ptr, tables.parent, tables.routes, num_queues, group
    )
    of_flow = group[:num_flows]
    order = np.argsort(of_flow, kind="stable")
    first = np.flatnonzero(np.diff(of_flow[order], prepend=-1))
    if len(first) == 1:
        return [PacketPart(tables, np.arange(num_flows), np.arange(2 * num_links), np.arange(len(tables.nodes)))]
    return [_part(tables, flows) for flows in np.split(order, first[1:])]


def _part(tables: PacketTables, flows: Ints) -> PacketPart:
    """Return some flows with the links, nodes and paths that they use, numbered as they first appear."""
    records = tables.flows[flows].copy()
    paths, path_links, records.path = _routes(tables.routes.paths, tables.routes.path_links, records.path)
    replies, reply_links, records.reply = _routes(tables.routes.replies, tables.routes.reply_links, records.reply)
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
    num_parents = tables.parent_ptr[flows + 1] - tables.parent_ptr[flows]
    parent_ptr = np.concatenate([[0], np.cumsum(num_parents)])
    parents = np.repeat(tables.parent_ptr[flows] - parent_ptr[:-1], num_parents) + np.arange(parent_ptr[-1])
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
) -> tuple[Ints, Ints, Ints]:
    """Return the used paths alone: pointers, links, and the path of each flow."""
    kept, which = _renumbered(used)
    lengths = pointer[kept + 1] - pointer[kept]
    start = np.concatenate([[0], np.cumsum(lengths)])
    positions = np.repeat(pointer[kept] - start[:-1], lengths) + np.arange(start[-1])
    return start, links[positions].astype(np.int64), which


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
    shared = (num_parts > 1) & (tables.nodes.kind == state.SWITCH)
    share = (tables.nodes.shared_limit_bytes - total) >> shift
    return bool((largest[shared] + packet_bytes < share[shared]).all())


def _joined(
    tables: PacketTables, parts: list[PacketPart], outcomes: list[PacketOutcome], num_events: int
) -> PacketOutcome:
    links, nodes, flows = tables.links.copy(), tables.nodes.copy(), tables.flows.copy()
    kept = ("name", "source", "target")
    for part, outcome in zip(parts, outcomes, strict=True):
        for name in links.dtype.names:
            if name not in kept:
                links[name][part.links] = outcome.links[name]
        for name in ("start_ps", "sent_ps", "finish_ps"):
            flows[name][part.flows] = outcome.flows[name]
        nodes.most_shared_bytes[part.nodes] += outcome.nodes.most_shared_bytes
    counts = {name: sum(getattr(outcome, name) for outcome in outcomes) for name in COUNTED}
    counts["num_events"] = num_events
    return PacketOutcome(links, nodes, flows, np.zeros((0, 1), np.int64), **counts)
