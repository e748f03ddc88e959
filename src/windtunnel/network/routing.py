"""Shortest paths through a fabric, one of the equal ones chosen by hash as switches do.

A link has two directions: 2 * link from its first end to its second, 2 * link + 1 back. GPUs pass nothing on unless the
fabric says so. Where a next hop is a scale-up switch, only such are used, as in SimAI 1.6's ns-3 (`CalculateRoute`).
"""

import numpy as np

from windtunnel.compiled.jit import entry, inner

UNKNOWN = 127
"""Distance of a node that no search has reached."""


WORD = 0xFFFFFFFF
HOST_SEED = 0x8BADF00D
"""Hosts with several NICs choose by the same hash, seeded as ns-3 seeds its `Hash32` (`RdmaQueuePair::GetHash`)."""


@inner
def _multiply(word, factor):
    """The low 32 bits of a product, in halves so that no step overflows 64 bits."""
    return (word * (factor & 0xFFFF) + (((word * (factor >> 16)) & 0xFFFF) << 16)) & WORD


@inner
def _rotate(word, bits):
    return ((word << bits) | (word >> (32 - bits))) & WORD


@inner
def _mix(state, word):
    word = _multiply(_rotate(_multiply(word, 0xCC9E2D51), 15), 0x1B873593)
    return (_multiply(_rotate(state ^ word, 13), 5) + 0xE6546B64) & WORD


@inner
def ecmp_hash(source, destination, ports, seed):
    """MurmurHash3 (32 bits) of source address, destination address and ports, seeded with the switch.

    Source: Appleby's MurmurHash3_x86_32; words, addresses and ports as `SwitchNode::EcmpHash` in SimAI's ns-3 has them.
    """
    state = _mix(np.int64(seed), _address(np.int64(source)))
    state = _mix(state, _address(np.int64(destination)))
    state = _mix(state, np.int64(ports)) ^ 12
    state = _multiply(state ^ (state >> 16), 0x85EBCA6B)
    state = _multiply(state ^ (state >> 13), 0xC2B2AE35)
    return state ^ (state >> 16)


@inner
def _address(node):
    return (0x0B000001 + ((node // 256) << 16) + ((node % 256) << 8)) & WORD


@inner
def _forwards(node, source, destination, kind, gpus_forward):
    return kind[node] != 0 or gpus_forward or node in (source, destination)


@inner
def _search(
    source, destination, pointer, neighbor, kind, gpus_forward, ahead, behind, forward_nodes, backward_nodes, levels
):
    """Breadth-first from both ends until they meet.

    `ahead` is left with the distance from the source where the forward search went, `behind` with that from the
    destination where the backward one went; `levels[k]` counts the forward nodes within distance k.

    Returns:
        (distance or -1, nodes reached forward, levels of the forward search, nodes reached backward)
    """
    ahead[source], behind[destination] = 0, 0
    forward_nodes[0], backward_nodes[0] = source, destination
    num_forward, num_backward = 1, 1
    first_forward, first_backward = 0, 0
    far_forward, far_backward = 0, 0
    levels[0] = 1
    if source == destination:
        return 0, 1, 0, 1
    while True:
        work_forward, work_backward = 0, 0
        for i in range(first_forward, num_forward):
            work_forward += pointer[forward_nodes[i] + 1] - pointer[forward_nodes[i]]
        for i in range(first_backward, num_backward):
            work_backward += pointer[backward_nodes[i] + 1] - pointer[backward_nodes[i]]
        if work_forward == 0 or work_backward == 0:
            return -1, num_forward, far_forward, num_backward
        met = False
        if work_forward <= work_backward:
            last = num_forward
            for i in range(first_forward, last):
                node = forward_nodes[i]
                for e in range(pointer[node], pointer[node + 1]):
                    other = neighbor[e]
                    if ahead[other] == UNKNOWN and _forwards(other, source, destination, kind, gpus_forward):
                        ahead[other] = far_forward + 1
                        forward_nodes[num_forward] = other
                        num_forward += 1
                        if behind[other] != UNKNOWN:
                            met = True
            first_forward = last
            far_forward += 1
            levels[far_forward] = num_forward
        else:
            last = num_backward
            for i in range(first_backward, last):
                node = backward_nodes[i]
                for e in range(pointer[node], pointer[node + 1]):
                    other = neighbor[e]
                    if behind[other] == UNKNOWN and _forwards(other, source, destination, kind, gpus_forward):
                        behind[other] = far_backward + 1
                        backward_nodes[num_backward] = other
                        num_backward += 1
                        if ahead[other] != UNKNOWN:
                            met = True
            first_backward = last
            far_backward += 1
        if met:
            return far_forward + far_backward, num_forward, far_forward, num_backward


@inner
def _mark_shortest(distance, far_forward, pointer, neighbor, behind, forward_nodes, levels, marked):
    """Give the forward nodes that lie on a shortest path their distance to the destination; returns how many."""
    num_marked = 0
    for level in range(far_forward, -1, -1):
        begin = levels[level - 1] if level > 0 else 0
        for i in range(begin, levels[level]):
            node = forward_nodes[i]
            if behind[node] != UNKNOWN:
                continue
            for e in range(pointer[node], pointer[node + 1]):
                if behind[neighbor[e]] == distance - level - 1:
                    behind[node] = distance - level
                    marked[num_marked] = node
                    num_marked += 1
                    break
    return num_marked


@entry
def trace_paths(
    source,
    destination,
    ports,
    order,
    seed,
    pointer,
    neighbor,
    direction,
    kind,
    gpus_forward,
    spray,
    ahead,
    behind,
    forward_nodes,
    backward_nodes,
    marked,
    levels,
    stack,
    inflow,
    path_ptr,
    path_link,
    path_share,
):
    """The path of every flow, as directed links with the share of its bytes that each carries.

    Args:
        source: (n,) nodes; likewise `destination` and `ports`, which feed the hash: the source's in the low 16 bits.
        order: (n,) flows in an order that keeps equal (source, destination) together.
        seed: added to the switch's id as the seed of its hash.
        pointer: (num_nodes + 1,) with `neighbor` and `direction`, the links of every node.
        kind: (num_nodes,) 0 for GPUs, 1 for scale-up switches.
        gpus_forward: whether GPUs pass on traffic of others.
        spray: 1 spreads a flow evenly over all shortest paths, 0 takes one by hash.
        ahead: (num_nodes,) UNKNOWN everywhere, as is `behind`; they are left so. `inflow` is 0 everywhere and left so;
            what lies between is scratch of that length.
        path_ptr: (n + 1,) out, in the order of `order`: position k's links lie from path_ptr[k] on.
        path_link: (capacity,) out.
        path_share: (capacity,) out; not written where `spray` is 0.

    Returns:
        Links written; -1 where `capacity` did not suffice; -2 - k where flow k's ends are not connected.
    """
    written = 0
    capacity = len(path_link)
    n = len(order)
    i = 0
    status = 0
    while i < n and status == 0:
        begin, end = source[order[i]], destination[order[i]]
        distance, num_forward, far_forward, num_backward = _search(
            begin,
            end,
            pointer,
            neighbor,
            kind,
            gpus_forward,
            ahead,
            behind,
            forward_nodes,
            backward_nodes,
            levels,
        )
        num_marked = 0
        if distance < 0:
            status = -2 - order[i]
        else:
            num_marked = _mark_shortest(distance, far_forward, pointer, neighbor, behind, forward_nodes, levels, marked)
        while status == 0 and i < n and source[order[i]] == begin and destination[order[i]] == end:
            path_ptr[i] = written
            if spray:
                count = _spread(
                    begin,
                    end,
                    distance,
                    pointer,
                    neighbor,
                    direction,
                    kind,
                    behind,
                    stack,
                    inflow,
                    path_link,
                    path_share,
                    written,
                )
            else:
                count = _walk(
                    begin,
                    end,
                    distance,
                    ports[order[i]],
                    seed,
                    pointer,
                    neighbor,
                    direction,
                    kind,
                    behind,
                    path_link,
                    written,
                )
            if count < 0 or written + count > capacity:
                status = -1
            else:
                written += count
                i += 1
        for k in range(num_marked):
            behind[marked[k]] = UNKNOWN
        for k in range(num_forward):
            ahead[forward_nodes[k]] = UNKNOWN
        for k in range(num_backward):
            behind[backward_nodes[k]] = UNKNOWN
    if status < 0:
        return status
    path_ptr[n] = written
    return written


@inner
def _next_hops(node, closer, pointer, neighbor, kind, behind):
    """How many neighbours lie on a shortest path, and whether only scale-up switches among them count."""
    count, scale_up = 0, 0
    for e in range(pointer[node], pointer[node + 1]):
        if behind[neighbor[e]] == closer:
            count += 1
            if kind[neighbor[e]] == 1:
                scale_up += 1
    return (scale_up, True) if scale_up > 0 else (count, False)


@inner
def _walk(begin, end, distance, ports, seed, pointer, neighbor, direction, kind, behind, path_link, written):
    node = begin
    for left in range(distance, 0, -1):
        count, only_scale_up = _next_hops(node, left - 1, pointer, neighbor, kind, behind)
        salt = HOST_SEED if kind[node] == 0 else node
        chosen = np.int64(ecmp_hash(begin, end, ports, salt + seed)) % count if count > 1 else 0
        for e in range(pointer[node], pointer[node + 1]):
            other = neighbor[e]
            if behind[other] == left - 1 and (kind[other] == 1 or not only_scale_up):
                if chosen == 0:
                    if written + distance - left >= len(path_link):
                        return -1
                    path_link[written + distance - left] = direction[e]
                    node = other
                    break
                chosen -= 1
    return distance


@inner
def _spread(
    begin, end, distance, pointer, neighbor, direction, kind, behind, stack, inflow, path_link, path_share, written
):
    """All links of the shortest paths, each node dividing what reaches it evenly over its next hops."""
    stack[0] = begin
    inflow[begin] = 1.0
    first, last, count = 0, 1, 0
    for left in range(distance, 0, -1):
        level_end = last
        for at in range(first, level_end):
            node = stack[at]
            hops, only_scale_up = _next_hops(node, left - 1, pointer, neighbor, kind, behind)
            share = inflow[node] / hops
            inflow[node] = 0.0
            for e in range(pointer[node], pointer[node + 1]):
                other = neighbor[e]
                if behind[other] == left - 1 and (kind[other] == 1 or not only_scale_up):
                    if inflow[other] == 0.0:
                        stack[last] = other
                        last += 1
                    inflow[other] += share
                    if written + count < len(path_link):
                        path_link[written + count] = direction[e]
                        path_share[written + count] = share
                    count += 1
        first = level_end
    inflow[end] = 0.0
    return count if written + count <= len(path_link) else -1
