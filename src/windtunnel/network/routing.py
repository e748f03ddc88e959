"""Find shortest paths through a fabric; among equal ones, the path that switches choose by hash (ECMP).

A link has two directions: 2 * link from its first end to its second, 2 * link + 1 back. GPUs forward nothing unless the
fabric says so. Where a next hop is a scale-up switch, only such are used, as in SimAI 1.6's ns-3 (`CalculateRoute`).
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.compiled.jit import entry, inner
from windtunnel.compiled.records import Ints, int64

UNKNOWN = 127
"""Distance of a node that no search has reached."""
MOST_COMPARED = 256
"""So many of the paths between two ends are looked through for one that is equal: a choice, above the usual number of
spines; paths beyond may be stored twice."""

WORD = 0xFFFFFFFF
HOST_SEED = 0x8BADF00D
"""Hosts with several NICs choose by the same hash, seeded as ns-3 seeds its `Hash32` (`RdmaQueuePair::GetHash`)."""


class RoutingGraph(NamedTuple):
    """A fabric's links seen from its nodes."""

    pointer: NDArray[np.int64]
    """(num_nodes + 1,) where the links of each node start in `neighbor` and `direction`."""
    neighbor: NDArray[np.int32]
    direction: NDArray[np.int32]
    """The directed link to that neighbour."""
    kind: NDArray[np.int8]
    """(num_nodes,) 0 for GPUs, 1 for scale-up switches, 2 for other switches."""
    gpus_forward: bool
    """Whether GPUs forward the traffic of others."""


class TracingState(NamedTuple):
    """Pairs of ends to connect, the fabric, the paths found, and the scratch of one search."""

    source: Ints
    """(n,) ends of the pairs; equal pairs are neighbours."""
    destination: Ints
    ports: Ints
    """(n,) input of the hash: the source's port in the low 16 bits, the destination's above."""
    seed: int
    """Added to the switch's id as the seed of its hash."""
    spray: bool
    """Whether a flow spreads evenly over all shortest paths, or takes one by hash."""
    graph: RoutingGraph
    of_pair: NDArray[np.int32]
    """(n,) out: the path of each pair; pairs of the same ends share one where the switches choose the same."""
    pointer: NDArray[np.int64]
    """(n + 1,) out: path p's directed links lie from `pointer[p]` to `pointer[p + 1]` in `link`."""
    link: NDArray[np.int32]
    share: NDArray[np.float64]
    """Out: fraction of a flow on each link; written only where flows are sprayed."""
    ahead: NDArray[np.int8]
    """(num_nodes,) distance from the source, UNKNOWN between searches; `behind` likewise to the destination."""
    behind: NDArray[np.int8]
    forward_nodes: NDArray[np.int32]
    backward_nodes: NDArray[np.int32]
    marked: NDArray[np.int32]
    levels: NDArray[np.int32]
    """`levels[k]` counts the forward nodes within distance k."""
    stack: NDArray[np.int32]
    inflow: NDArray[np.float64]
    """(num_nodes,) fraction of a sprayed flow that reaches each node; 0 between searches."""


@inner
def _multiply(word: int, factor: int) -> int:
    """Return the low 32 bits of a product, in halves so that no step overflows 64 bits."""
    return (word * (factor & 0xFFFF) + (((word * (factor >> 16)) & 0xFFFF) << 16)) & WORD


@inner
def _rotate(word: int, bits: int) -> int:
    return ((word << bits) | (word >> (32 - bits))) & WORD


@inner
def _mix(state: int, word: int) -> int:
    word = _multiply(_rotate(_multiply(word, 0xCC9E2D51), 15), 0x1B873593)
    return (_multiply(_rotate(state ^ word, 13), 5) + 0xE6546B64) & WORD


@inner
def ecmp_hash(source: int, destination: int, ports: int, seed: int) -> int:
    """Hash source address, destination address and ports by MurmurHash3 (32 bits), seeded with the switch.

    Source: Appleby's MurmurHash3_x86_32; words, addresses and ports as `SwitchNode::EcmpHash` in SimAI's ns-3 has them.
    """
    state = _mix(int64(seed), _address(int64(source)))
    state = _mix(state, _address(int64(destination)))
    return scramble(_mix(state, int64(ports)) ^ 12)


@inner
def scramble(word: int) -> int:
    """Scramble a word by MurmurHash3's 32-bit finaliser (Appleby)."""
    word = _multiply(word ^ (word >> 16), 0x85EBCA6B)
    word = _multiply(word ^ (word >> 13), 0xC2B2AE35)
    return word ^ (word >> 16)


@inner
def _address(node: int) -> int:
    return (0x0B000001 + ((node // 256) << 16) + ((node % 256) << 8)) & WORD


@inner
def _may_cross(node: int, source: int, destination: int, graph: RoutingGraph) -> bool:
    return graph.kind[node] != 0 or graph.gpus_forward or node in (source, destination)


@inner
def _expand(
    state: TracingState, nodes: NDArray[np.int32], first: int, last: int, source: int, destination: int
) -> tuple[int, bool]:
    """Reach the neighbours of the outermost nodes of a search, `nodes[first:last]`; append them to `nodes`.

    Returns:
        (number of `nodes`, whether the search that faces this one has reached any of them)
    """
    graph = state.graph
    is_forward = nodes[0] == source
    reached, facing = (state.ahead, state.behind) if is_forward else (state.behind, state.ahead)
    level = reached[nodes[first]] + 1
    num_nodes, met = last, False
    for i in range(first, last):
        node = nodes[i]
        for e in range(graph.pointer[node], graph.pointer[node + 1]):
            other = graph.neighbor[e]
            if reached[other] == UNKNOWN and _may_cross(other, source, destination, graph):
                reached[other] = level
                nodes[num_nodes] = other
                num_nodes += 1
                if facing[other] != UNKNOWN:
                    met = True
    return num_nodes, met


@inner
def _num_links(graph: RoutingGraph, nodes: NDArray[np.int32], first: int, last: int) -> int:
    """Return how many links the nodes `nodes[first:last]` have."""
    total = 0
    for i in range(first, last):
        total += graph.pointer[nodes[i] + 1] - graph.pointer[nodes[i]]
    return total


@inner
def _search(state: TracingState, source: int, destination: int) -> tuple[int, int, int, int]:
    """Search breadth-first from both ends until the searches meet.

    `ahead` and `behind` are left with the distances of the nodes that the forward and the backward search reached.

    Returns:
        (distance or -1, nodes reached forward, levels of the forward search, nodes reached backward)
    """
    forward_nodes, backward_nodes = state.forward_nodes, state.backward_nodes
    state.ahead[source], state.behind[destination] = 0, 0
    forward_nodes[0], backward_nodes[0] = source, destination
    num_forward, num_backward = 1, 1
    first_forward, first_backward = 0, 0
    far_forward, far_backward = 0, 0
    state.levels[0] = 1
    if source == destination:
        return 0, 1, 0, 1
    while True:
        work_forward = _num_links(state.graph, forward_nodes, first_forward, num_forward)
        work_backward = _num_links(state.graph, backward_nodes, first_backward, num_backward)
        if work_forward == 0 or work_backward == 0:
            return -1, num_forward, far_forward, num_backward
        if work_forward <= work_backward:
            last = num_forward
            num_forward, met = _expand(state, forward_nodes, first_forward, last, source, destination)
            first_forward = last
            far_forward += 1
            state.levels[far_forward] = num_forward
        else:
            last = num_backward
            num_backward, met = _expand(state, backward_nodes, first_backward, last, source, destination)
            first_backward = last
            far_backward += 1
        if met:
            return far_forward + far_backward, num_forward, far_forward, num_backward


@inner
def _mark_shortest(state: TracingState, distance: int, far_forward: int) -> int:
    """Give the forward nodes that lie on a shortest path their distance to the destination; return how many."""
    pointer, neighbor, behind, levels = state.graph.pointer, state.graph.neighbor, state.behind, state.levels
    num_marked = 0
    for level in range(far_forward, -1, -1):
        begin = levels[level - 1] if level > 0 else 0
        for i in range(begin, levels[level]):
            node = state.forward_nodes[i]
            if behind[node] != UNKNOWN:
                continue
            for e in range(pointer[node], pointer[node + 1]):
                if behind[neighbor[e]] == distance - level - 1:
                    behind[node] = distance - level
                    state.marked[num_marked] = node
                    num_marked += 1
                    break
    return num_marked


@inner
def _forget(state: TracingState, num_marked: int, num_forward: int, num_backward: int) -> None:
    """Make all nodes unknown again."""
    for k in range(num_marked):
        state.behind[state.marked[k]] = UNKNOWN
    for k in range(num_forward):
        state.ahead[state.forward_nodes[k]] = UNKNOWN
    for k in range(num_backward):
        state.behind[state.backward_nodes[k]] = UNKNOWN


@inner
def _known_path(state: TracingState, first: int, num_paths: int, written: int, count: int) -> int:
    """Return which of the latest paths from `first` on has the links that were just written; `num_paths` for none."""
    for path in range(num_paths - 1, max(first, num_paths - MOST_COMPARED) - 1, -1):
        begin = state.pointer[path]
        k = 0
        while k < count and state.link[begin + k] == state.link[written + k]:
            k += 1
        if k == count:
            return path
    return num_paths


@entry
def trace_paths(state: TracingState) -> tuple[int, int]:
    """Trace the path of every pair, as directed links with the share of its bytes that each carries.

    Returns:
        (paths, links) written; instead of links -1 where `state.link` was too short, and -2 - k where the ends of pair
        k are not connected.
    """
    source, destination = state.source, state.destination
    written, num_paths = 0, 0
    n = len(source)
    i = 0
    status = 0
    while i < n and status == 0:
        begin, end = source[i], destination[i]
        distance, num_forward, far_forward, num_backward = _search(state, begin, end)
        num_marked = 0
        if distance < 0:
            status = -2 - i
        else:
            num_marked = _mark_shortest(state, distance, far_forward)
        first, num_choices = num_paths, int64(1)
        while status == 0 and i < n and source[i] == begin and destination[i] == end:
            path = num_paths - 1
            if num_choices > 0:
                state.pointer[num_paths] = written
                if state.spray:
                    count = _spread(state, begin, end, distance, written)
                    num_choices = min(count, 1)
                else:
                    count, num_choices = distance, int64(_write_path(state, i, distance, written))
                if num_choices < 0 or written + count > len(state.link):
                    status = -1
                    break
                path = _known_path(state, first, num_paths, written, count)
                if path == num_paths:
                    num_paths += 1
                    written += count
            state.of_pair[i] = path
            i += 1
        _forget(state, num_marked, num_forward, num_backward)
    state.pointer[num_paths] = written
    return num_paths, status if status < 0 else written


@entry
def fold_paths(
    pointer: Ints,
    link: NDArray[np.int32],
    share: NDArray[np.float64],
    of_link: NDArray[np.float64],
    folded: NDArray[np.float64],
) -> None:
    """Fold numbers of each directed link over every path, whose links lie between its `pointer` and the next.

    `of_link` is (numbers, 2 x num_links). Out: `folded`, (numbers, 3, paths): the sum and the largest of a number times
    the share of a flow on the link, and the least of it divided by that; 0, 0 and infinity for a path without links.
    Without `share` every share is 1.
    """
    for number in range(len(of_link)):
        for path in range(len(pointer) - 1):
            total, largest, least = 0.0, 0.0, np.inf
            for k in range(pointer[path], pointer[path + 1]):
                weight = share[k] if len(share) > 0 else 1.0
                value = of_link[number, link[k]]
                total += value * weight
                largest = max(largest, value * weight)
                least = min(least, value / weight)
            folded[number, 0, path], folded[number, 1, path], folded[number, 2, path] = total, largest, least


@inner
def _next_hops(node: int, closer: int, graph: RoutingGraph, behind: NDArray[np.int8]) -> tuple[int, bool]:
    """Count the neighbours on a shortest path; whether only scale-up switches among them count."""
    count, scale_up = 0, 0
    for e in range(graph.pointer[node], graph.pointer[node + 1]):
        if behind[graph.neighbor[e]] == closer:
            count += 1
            if graph.kind[graph.neighbor[e]] == 1:
                scale_up += 1
    return (scale_up, True) if scale_up > 0 else (count, False)


@inner
def _write_path(state: TracingState, pair: int, distance: int, written: int) -> int:
    """Write one shortest path, chosen by hash at every node; return how many had a choice, -1 if there is no room."""
    pointer, neighbor, direction, kind, _ = state.graph
    begin, end, behind = state.source[pair], state.destination[pair], state.behind
    node = begin
    num_choices = 0
    for left in range(distance, 0, -1):
        count, only_scale_up = _next_hops(node, left - 1, state.graph, behind)
        num_choices += int64(count > 1)
        salt = HOST_SEED if kind[node] == 0 else node
        chosen = int64(ecmp_hash(begin, end, state.ports[pair], salt + state.seed)) % count if count > 1 else 0
        for e in range(pointer[node], pointer[node + 1]):
            other = neighbor[e]
            if behind[other] == left - 1 and (kind[other] == 1 or not only_scale_up):
                if chosen == 0:
                    if written + distance - left >= len(state.link):
                        return -1
                    state.link[written + distance - left] = direction[e]
                    node = other
                    break
                chosen -= 1
    return num_choices


@inner
def _spread(state: TracingState, begin: int, end: int, distance: int, written: int) -> int:
    """Write all links of the shortest paths, each node dividing what reaches it evenly over its next hops."""
    pointer, neighbor, direction, kind, _ = state.graph
    behind, stack, inflow = state.behind, state.stack, state.inflow
    stack[0] = begin
    inflow[begin] = 1.0
    first, last, count = 0, 1, 0
    for left in range(distance, 0, -1):
        level_end = last
        for position in range(first, level_end):
            node = stack[position]
            hops, only_scale_up = _next_hops(node, left - 1, state.graph, behind)
            share = inflow[node] / hops
            inflow[node] = 0.0
            for e in range(pointer[node], pointer[node + 1]):
                other = neighbor[e]
                if behind[other] == left - 1 and (kind[other] == 1 or not only_scale_up):
                    if inflow[other] == 0.0:
                        stack[last] = other
                        last += 1
                    inflow[other] += share
                    if written + count < len(state.link):
                        state.link[written + count] = direction[e]
                        state.share[written + count] = share
                    count += 1
        first = level_end
    inflow[end] = 0.0
    return count if written + count <= len(state.link) else -1
