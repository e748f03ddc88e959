"""What is known of flows before any packet moves: hops to their destinations, and which cannot influence each other."""

import numpy as np

from windtunnel.compiled.jit import entry, inner
from windtunnel.network.packet.kernel.state import GPU


@entry
def measure_distances(destinations, pointer, neighbor, kind, gpus_forward, reached, distances):
    """Hops to each of `destinations` from every node that may be on the way; others keep what they have."""
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
                if kind[other] == GPU and not gpus_forward:
                    continue
                distances[row, other] = distances[row, node] + 1
                reached[last] = other
                last += 1


@inner
def _root(group, item):
    while group[item] != item:
        group[item] = group[group[item]]
        item = group[item]
    return item


@inner
def _join(group, a, b):
    a, b = _root(group, a), _root(group, b)
    group[max(a, b)] = min(a, b)


@entry
def find_groups(flows, channels, parent_ptr, parent, paths, path_links, replies, reply_links, num_queues, group):
    """Which flows may influence each other: those that share a link, a send queue, an ancestor or a rank that reduces,
    or begin in turn.

    Args:
        group: (flows + links + channels + send queues,) left with the least flow that each is joined to.
    """
    first_queue = group.size - num_queues
    first_channel = first_queue - channels.size
    for item in range(group.size):
        group[item] = item
    for flow in range(flows.size):
        _join(group, flow, first_queue + flows[flow].queue)
        if flows[flow].channel >= 0:
            _join(group, flow, first_channel + channels[flows[flow].channel].rank)
        if flows[flow].follower >= 0:
            _join(group, flow, np.int64(flows[flow].follower))
        for position in range(parent_ptr[flow], parent_ptr[flow + 1]):
            _join(group, flow, np.int64(parent[position]))
        for position in range(paths[flows[flow].path], paths[flows[flow].path + 1]):
            _join(group, flow, flows.size + (path_links[position] >> 1))
        for position in range(replies[flows[flow].reply], replies[flows[flow].reply + 1]):
            _join(group, flow, flows.size + (reply_links[position] >> 1))
    for item in range(group.size):
        group[item] = _root(group, item)
