"""Ring collectives packet by packet: the connections of one stretch of the ring stand for those of all others.

If every connection can be moved along its ring by the same number of ranks, onto a connection over equal links, and
ranks of a server stay together and in order, then what is moved does the same at the same time. One stretch of that
many ranks, closed to a ring of its own, is simulated for all.

Links from switch to switch are left out of the comparison, for hashes choose among them: each connection has such links
for itself. So only rings are run this way whose data does not meet there. What is left out then is that data meets the
acknowledgements of other connections there.
"""

from dataclasses import dataclass, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from windtunnel.limits import check_size
from windtunnel.network.collectives.ring_classes import ALL_FLOWS, Classes, class_flows, last_end, ring_connections
from windtunnel.network.collectives.rings import Rings
from windtunnel.network.fabric import Fabric, NodeKind, between_switches
from windtunnel.network.flows import with_columns
from windtunnel.network.packet.runner import PacketOutcome, run_in_parts
from windtunnel.network.packet.tables import PS_PER_S, PacketTables, reduction_cycle, tables_of
from windtunnel.network.paths import Paths, find_ways, send_delays_s
from windtunnel.network.settings import NetworkSettings, PacketSettings

Ids = NDArray[np.int64]

MOST_PACKETS = 1_000_000
"""Up to this many data packets, every step is simulated; beyond, three rounds at least."""


@dataclass(frozen=True, eq=False)
class _Crossed:
    """Directed links that the connections of rings cross, data first, then acknowledgements."""

    links: Ids
    """(channels, ranks, hops); -1 behind the last hop."""
    num_data_hops: int
    own: NDArray[np.bool_]
    """(channels, ranks, hops) whether this is a link that the comparison includes."""


@dataclass(frozen=True, eq=False)
class _Stretch:
    """The connections of one stretch, on a fabric that has a copy of every link between switches for each of them."""

    fabric: Fabric
    classes: Classes
    replies: Paths
    """Paths of the acknowledgements."""
    delay_s: NDArray[np.float64]
    """(classes,) from the data being there to its first byte on the wire, of the connection on the whole fabric."""
    num_copies: int
    """Most stretches whose packets a switch may hold at once."""


def ring_seconds(
    fabric: Fabric, rings: Rings, chunk_bytes: int, num_steps: int, settings: NetworkSettings, packet: PacketSettings
) -> float | None:
    """Return when a ring collective is complete; None where no stretch can stand for all others. InputError where the
    stretch has more packets than a limit of time allows."""
    is_in_server = np.ptp(fabric.server[rings.order[0]]) == 0
    if settings.routing != "ecmp" or packet.every_flow or is_in_server or _chooses_nic(fabric, rings):
        return None
    crossed, is_hashed_anew = _crossed(fabric, rings, settings), settings.compat == "simai"
    is_small = rings.order.size * num_steps <= ALL_FLOWS
    if _may_meet(crossed, is_hashed_anew=is_hashed_anew, answers=is_small):
        return None
    shift = _least_shift(fabric, rings, crossed)
    if shift == rings.num_ranks:
        return None
    stretch = _stretch(fabric, rings, crossed, shift, settings)
    first = rings.order.min() if settings.compat == "simai" else None

    num_packets = len(stretch.classes.before) * -(-chunk_bytes // settings.payload_bytes)

    def ends_s(steps: int) -> NDArray[np.float64] | None:
        check_size(packets=float(num_packets) * steps)
        tables = _tables(stretch, rings, chunk_bytes, steps, settings, packet)
        outcome = run_in_parts(tables)
        if not _stands_for_all(tables, outcome, stretch.num_copies):
            return None
        sent_s, finish_s = (outcome.flows[name].reshape(steps, -1) / PS_PER_S for name in ("sent_ps", "finish_ps"))
        if first is not None:
            receives = np.unique(stretch.classes.of_connection[np.roll(rings.order, -1, axis=1).ravel() == first])
            sends = np.unique(stretch.classes.of_connection[rings.order.ravel() == first])
            finish_s = np.concatenate([finish_s[:, receives], sent_s[:, sends]], axis=1)
        return np.maximum.accumulate(finish_s.max(axis=1))

    return last_end(ends_s, num_steps, shift, MOST_PACKETS // num_packets)


def _chooses_nic(fabric: Fabric, rings: Rings) -> bool:
    """Whether a rank has several links to switches of the network, among which a hash chooses for each flow."""
    is_switch, is_rank = fabric.kind == NodeKind.SWITCH, np.zeros(fabric.num_nodes, bool)
    is_rank[rings.order] = True
    source, target = fabric.directions
    nics = np.bincount(source[is_rank[source] & is_switch[target]], minlength=fabric.num_nodes)
    return bool(nics.max() > 1)


def _crossed(fabric: Fabric, rings: Rings, settings: NetworkSettings) -> _Crossed:
    connections = ring_connections(rings)
    number = connections.channel % (rings.num_channels // rings.num_groups)
    connections = with_columns(connections, connection=number)
    tables = []
    for ways in find_ways(fabric, connections, settings):
        connection, link, _ = ways.crossings()
        first = np.flatnonzero(np.diff(connection, prepend=-1))
        hop = np.arange(len(connection)) - np.repeat(first, np.diff(np.append(first, len(connection))))
        table = np.full((len(connections), int(hop.max(initial=0)) + 1), -1, np.int64)
        table[connection, hop] = link
        tables.append(table.reshape(*rings.order.shape, -1))
    links = np.concatenate(tables, axis=2)
    return _Crossed(links, tables[0].shape[2], (links >= 0) & ~between_switches(fabric)[links])


def _least_shift(fabric: Fabric, rings: Rings, crossed: _Crossed) -> int:
    """Return the fewest ranks by which all connections can be moved along their rings onto equal ones."""
    links, own, num_ranks = crossed.links, crossed.own, rings.num_ranks
    columns = [own] + [
        np.where(links >= 0, column[links >> 1], -1.0)
        for column in (fabric.bandwidth_bytes_per_s, fabric.latency_s, fabric.error_fraction)
    ]
    for shift in range(1, num_ranks):
        if num_ranks % shift or not all(np.array_equal(each, np.roll(each, -shift, axis=1)) for each in columns):
            continue
        nodes = _moved(rings.order.ravel(), np.roll(rings.order, -shift, axis=1).ravel(), fabric.num_nodes)
        if nodes is None or not _keeps_servers(fabric, np.unique(rings.order), nodes):
            continue
        if _moved(links[own], np.roll(links, -shift, axis=1)[own], 2 * fabric.num_links) is not None:
            return shift
    return num_ranks


def _moved(items: NDArray[np.integer], onto: NDArray[np.integer], count: int) -> Ids | None:
    """Return (count,) the item that each is moved onto, itself where it is not given; None unless one to one."""
    forward, back = np.arange(count), np.arange(count)
    forward[items], back[onto] = onto, items
    return forward if (forward[items] == onto).all() and (back[onto] == items).all() else None


def _keeps_servers(fabric: Fabric, ranks: NDArray[np.int32], moved: Ids) -> bool:
    """Whether ranks of one server are moved to one server, in the same order; it decides who sends first."""
    together = np.diff(fabric.server[ranks]) == 0
    after = moved[ranks]
    return bool((np.diff(fabric.server[after])[together] == 0).all() and (np.diff(after)[together] > 0).all())


def _least(moved: Ids) -> Ids:
    """Return the least item onto which each comes by moving it again and again."""
    least, reach = np.arange(len(moved)), moved
    while True:
        smaller = np.minimum(least, least[reach])
        if np.array_equal(smaller, least):
            return least
        least, reach = smaller, reach[reach]


def _stretch(fabric: Fabric, rings: Rings, crossed: _Crossed, shift: int, settings: NetworkSettings) -> _Stretch:
    num_channels, num_ranks = rings.order.shape
    links, own = crossed.links, crossed.own
    nodes, of_link = (
        _least(_moved(items.ravel(), onto.ravel(), count))  # type: ignore[arg-type]
        for items, onto, count in (
            (rings.order, np.roll(rings.order, -shift, axis=1), fabric.num_nodes),
            (links[own], np.roll(links, -shift, axis=1)[own], 2 * fabric.num_links),
        )
    )
    # Classes by channel and rank, the order in which flows begin.
    source = nodes[rings.order[:, :shift]]
    order = np.argsort(source, axis=1)
    channel = np.arange(num_channels)[:, None]
    place = np.empty_like(order)
    place[channel, order] = np.arange(shift)
    of_connection = shift * channel + np.tile(place, num_ranks // shift)
    chosen = links[channel, order].reshape(num_channels * shift, -1)
    is_own = own[channel, order].reshape(chosen.shape)
    is_copied = (chosen >= 0) & ~is_own
    used = np.where(is_own, of_link[chosen], chosen)
    used[is_copied] = 2 * (fabric.num_links + np.arange(np.count_nonzero(is_copied)))
    paths, replies = _paths(used[:, : crossed.num_data_hops]), _paths(used[:, crossed.num_data_hops :])
    classes = Classes(
        source=source[channel, order].ravel().astype(np.int32),
        destination=nodes[np.roll(rings.order, -1, axis=1)][channel, order].ravel().astype(np.int32),
        before=(shift * channel + place[channel, order - 1]).ravel(),
        of_connection=of_connection.ravel(),
        paths=paths,
        loads=paths,
    )
    target = fabric.directions[1]
    entered, entered_here = (
        np.bincount(target[np.unique(each[each >= 0])], minlength=fabric.num_nodes) for each in (links, chosen)
    )
    num_copies = -(-int(entered.max()) // max(1, int(entered_here[entered_here > 0].min())))
    delay_s = send_delays_s(fabric, ring_connections(rings), settings).reshape(rings.order.shape)[channel, order]
    return _Stretch(_with_copies(fabric, chosen[is_copied]), classes, replies, delay_s.ravel(), num_copies)


def _paths(links: Ids) -> Paths:
    """Return one path for each row of links; -1 is none."""
    pointer = np.concatenate([[0], np.cumsum((links >= 0).sum(axis=1))])
    return Paths(np.arange(len(links), dtype=np.int32), pointer, links[links >= 0].astype(np.int32), np.zeros(0))


def _with_copies(fabric: Fabric, links: Ids) -> Fabric:
    """Return the fabric with one more link for each of these directed ones, from the same node to the same."""
    source, target = (ends[links] for ends in fabric.directions)
    rate, latency_s, error_fraction = (
        np.append(column, column[links >> 1])
        for column in (fabric.bandwidth_bytes_per_s, fabric.latency_s, fabric.error_fraction)
    )
    return replace(
        fabric,
        link_a=np.append(fabric.link_a, source),
        link_b=np.append(fabric.link_b, target),
        bandwidth_bytes_per_s=rate,
        latency_s=latency_s,
        error_fraction=error_fraction,
    )


def _may_meet(crossed: _Crossed, *, is_hashed_anew: bool, answers: bool) -> bool:
    """Whether two connections may send over one link between switches: data, or `answers` (acknowledgements) too.

    Where every flow is hashed anew, none may need such links, nor share others with data of its own server: SimAI's
    order of events of one time differs between servers.
    """
    num_hops = crossed.links.shape[2] if answers else crossed.num_data_hops
    links, own = (each[:, :, :num_hops] for each in (crossed.links, crossed.own))
    between, data = links[(links >= 0) & ~own], links[:, :, : crossed.num_data_hops]
    if not is_hashed_anew:
        return len(np.unique(between)) < len(between)
    return len(between) > 0 or len(np.unique(data[data >= 0])) < int((data >= 0).sum())


def _tables(
    stretch: _Stretch, rings: Rings, chunk_bytes: int, num_steps: int, settings: NetworkSettings, packet: PacketSettings
) -> PacketTables:
    classes = stretch.classes
    shift = len(classes.before) // rings.num_channels
    channel = np.tile(np.repeat(np.arange(rings.num_channels), shift), num_steps)
    flows = with_columns(class_flows(classes, chunk_bytes, num_steps), channel=channel, reduction=rings.reduction)
    of_flow = np.tile(classes.paths.of_flow, num_steps)
    routes = replace(classes.paths, of_flow=of_flow), replace(stretch.replies, of_flow=of_flow)
    if settings.network_send_latency_s is not None:
        flows = with_columns(flows, delay_s=np.tile(stretch.delay_s, num_steps))
        settings = msgspec.structs.replace(settings, send_latency_s=0.0, network_send_latency_s=None)
    tables = tables_of(stretch.fabric, flows, settings, packet, routes)
    ranks = np.sort(rings.order[0])
    tables.channels.cycle = reduction_cycle(stretch.fabric, int(ranks[1] - ranks[0]), len(ranks))
    return tables


def _stands_for_all(tables: PacketTables, outcome: PacketOutcome, num_copies: int) -> bool:
    """Whether nothing happened that other stretches would change: random draws, ties, or pauses of a shared switch."""
    if outcome.counters.num_draws or outcome.counters.num_ties:
        return False
    switches = tables.nodes.kind == NodeKind.SWITCH
    most = int(outcome.nodes.most_shared_bytes[switches].max(initial=0))
    packet_bytes = tables.settings.payload_bytes + tables.settings.header_bytes
    room = int(tables.nodes.shared_limit_bytes[switches].min(initial=2**62)) - num_copies * most
    return most + packet_bytes < room >> int(tables.links.pfc_shift.max(initial=0))
