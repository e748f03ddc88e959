"""Prepare a run: hops to the destinations of flows, and groups of flows that may influence each other."""

import numpy as np
from numpy.typing import NDArray

from windtunnel.compiled.jit import entry, inner
from windtunnel.compiled.records import Ints, Records, int64
from windtunnel.network.packet.kernel import codes
from windtunnel.network.packet.kernel.state import Channel, PacketFlow, RouteTables
from windtunnel.network.routing import RoutingGraph


@entry
def measure_distances(destinations: Ints, graph: RoutingGraph, reached: Ints, distances: NDArray[np.int16]) -> None:
    """Measure hops to each destination by breadth-first search; nodes that no path crosses keep their value.

    Args:
        destinations: (rows,) node ids.
        reached: (nodes,) scratch.
        distances: (rows, nodes) out; in: larger than any distance.
    """
    pointer, neighbor, _, kind, gpus_forward = graph
    for row in range(destinations.size):
        distances[row, destinations[row]] = 0
        reached[0] = destinations[row]
        first, last = 0, 1
        while first < last:
            node = reached[first]
            first += 1
            for position in range(pointer[node], pointer[node + 1]):
                other = neighbor[position]
                if distances[row, other] <= distances[row, node] + 1:
                    continue
                if kind[other] == codes.GPU and not gpus_forward:
                    continue
                distances[row, other] = distances[row, node] + 1
                reached[last] = other
                last += 1


@inner
def _root(group: NDArray[np.int64], item: int) -> int:
    while group[item] != item:
        group[item] = group[group[item]]
        item = group[item]
    return item


@inner
def _join(group: NDArray[np.int64], a: int, b: int) -> None:
    a, b = _root(group, a), _root(group, b)
    group[max(a, b)] = min(a, b)


@entry
def find_groups(
    flows: Records[PacketFlow],
    channels: Records[Channel],
    parent_ptr: Ints,
    parent: Ints,
    routes: RouteTables,
    num_queues: int,
    group: NDArray[np.int64],
) -> None:
    """Group flows that may influence each other: they share a link, a send queue, an ancestor or a rank that reduces,
    or one begins after the other.

    Args:
        group: (flows + links + channels + send queues,) out: the least flow that each is joined to.
    """
    first_queue = group.size - num_queues
    first_channel = first_queue - channels.size
    paths, path_links, replies, reply_links = routes.paths, routes.path_links, routes.replies, routes.reply_links
    for item in range(group.size):
        group[item] = item
    for flow in range(flows.size):
        _join(group, flow, first_queue + flows[flow].queue)
        if flows[flow].channel >= 0:
            _join(group, flow, first_channel + channels[flows[flow].channel].rank)
        if flows[flow].follower >= 0:
            _join(group, flow, int64(flows[flow].follower))
        for position in range(parent_ptr[flow], parent_ptr[flow + 1]):
            _join(group, flow, int64(parent[position]))
        for position in range(paths[flows[flow].path], paths[flows[flow].path + 1]):
            _join(group, flow, flows.size + (path_links[position] >> 1))
        for position in range(replies[flows[flow].reply], replies[flows[flow].reply + 1]):
            _join(group, flow, flows.size + (reply_links[position] >> 1))
    for item in range(group.size):
        group[item] = _root(group, item)
