"""Flows that share links max-min fairly, event by event.

A flow starts when its parents have completed and its delay has passed, sends at the rate that max-min fairness gives
it, and completes a fixed time after its last byte has left: the latency of its path. Rates change only when flows start
or end, and only those of flows that a binding link connects with them. A link binds if its flows could together send
more than it carries; all others are never looked at. That is exact: what cannot be a bottleneck does not change the
allocation (Bertsekas and Gallager, "Data Networks", 2nd ed., section 6.5.2).
"""

import numpy as np

from windtunnel.compiled.heap import pop, push
from windtunnel.compiled.jit import entry, inner

FLOW = np.dtype(
    [
        ("size_bytes", "f8"),  # on the wire, headers included
        ("tail_s", "f8"),  # from the last byte's departure to completion
        ("last_bytes", "f8"),  # of its last packet
        ("delay_s", "f8"),  # from the last parent's completion to the first byte
        ("ready_s", "f8"),  # in: earliest start; grows as parents complete
        ("begin_s", "f8"),  # out
        ("sent_s", "f8"),  # out: its last byte has left
        ("finish_s", "f8"),  # out
        ("path", "i4"),
        ("waiting", "i4"),  # parents that have not completed, and the flow before on the same connection
        ("follower", "i4"),  # the next flow of the same connection, -1 for none
    ]
)

SLOT = np.dtype(
    [
        ("left_bytes", "f8"),
        ("rate", "f8"),  # bytes/s
        ("since_s", "f8"),  # when left_bytes was true
        ("end_s", "f8"),
        ("flow", "i4"),
        ("place", "i4"),  # in the heap of ends
        ("stamp", "i4"),
        ("frozen", "i4"),
    ]
)
"""A flow that is sending."""

HOP = np.dtype([("next", "i4"), ("before", "i4"), ("link", "i4"), ("slot", "i4"), ("share", "f8")])
"""A sending flow's place in the list of one link's flows; slot s owns `max_hops` of them, from s * max_hops on."""

LINK = np.dtype(
    [
        ("rate", "f8"),  # bytes/s it carries
        ("wanted", "f8"),  # what its flows could send together
        ("left", "f8"),
        ("weight", "f8"),
        ("bytes", "f8"),  # out: carried in all
        ("first", "i4"),  # hop
        ("stamp", "i4"),
    ]
)
"""One direction of a link."""

PATH = np.dtype([("rate", "f8"), ("line_rate", "f8"), ("first", "i8"), ("count", "i4")])
"""A path: the most that one flow can send over it, the rate of its slowest link, and its links."""

TOGETHER_S = 1e-12
"""Events nearer than a picosecond are one: only rounding separates them."""


@inner
def _swap(ends, slots, a, b):
    ends[a], ends[b] = ends[b], ends[a]
    slots[ends[a]].place = a
    slots[ends[b]].place = b


@inner
def _place(ends, slots, size, at):
    """Restore the heap of ends after the end of the slot at position `at` has changed."""
    while at > 0 and slots[ends[at]].end_s < slots[ends[(at - 1) // 2]].end_s:
        _swap(ends, slots, at, (at - 1) // 2)
        at = (at - 1) // 2
    while True:
        child = 2 * at + 1
        if child >= size:
            return
        if child + 1 < size and slots[ends[child + 1]].end_s < slots[ends[child]].end_s:
            child += 1
        if slots[ends[at]].end_s <= slots[ends[child]].end_s:
            return
        _swap(ends, slots, at, child)
        at = child


@inner
def _binds(link):
    return link.wanted > link.rate * (1 + 1e-9)


@inner
def _enter(slot, slots, hops, max_hops, flow, flows, paths, path_link, path_share, links, touched, num_touched, stamp):
    """Put a flow on its links; those that bind are added to `touched`."""
    path = paths[flows[flow].path]
    slots[slot].flow = flow
    slots[slot].left_bytes = flows[flow].size_bytes
    slots[slot].rate = path.rate
    for k in range(path.count):
        hop = slot * max_hops + k
        number = path_link[path.first + k]
        share = path_share[path.first + k] if len(path_share) > 0 else 1.0
        hops[hop].link, hops[hop].slot, hops[hop].share = number, slot, share
        hops[hop].before, hops[hop].next = -1, links[number].first
        if links[number].first >= 0:
            hops[links[number].first].before = hop
        links[number].first = hop
        links[number].wanted += path.rate * share
        if links[number].stamp != stamp and _binds(links[number]):
            links[number].stamp = stamp
            touched[num_touched] = number
            num_touched += 1
    return num_touched


@inner
def _leave(slot, slots, hops, max_hops, flows, paths, links, touched, num_touched, stamp):
    """Take a flow off its links; those that did bind are added to `touched`."""
    flow = slots[slot].flow
    path = paths[flows[flow].path]
    for k in range(path.count):
        hop = slot * max_hops + k
        number, share = hops[hop].link, hops[hop].share
        if links[number].stamp != stamp and _binds(links[number]):
            links[number].stamp = stamp
            touched[num_touched] = number
            num_touched += 1
        before, after = hops[hop].before, hops[hop].next
        if before >= 0:
            hops[before].next = after
        else:
            links[number].first = after
        if after >= 0:
            hops[after].before = before
        links[number].wanted -= path.rate * share
        if links[number].first < 0:
            links[number].wanted = 0.0
        links[number].bytes += flows[flow].size_bytes * share
    return num_touched


@inner
def _collect(slots, hops, max_hops, flows, paths, links, touched, num_touched, stamp, members):
    """The flows that binding links connect with the touched ones, in `members`; `touched` grows by their links."""
    num_members = 0
    at = 0
    while at < num_touched:
        number = touched[at]
        at += 1
        links[number].left = links[number].rate
        links[number].weight = 0.0
        hop = links[number].first
        while hop >= 0:
            slot = hops[hop].slot
            links[number].weight += hops[hop].share
            if slots[slot].stamp != stamp:
                slots[slot].stamp = stamp
                slots[slot].frozen = 0
                members[num_members] = slot
                num_members += 1
                for k in range(paths[flows[slots[slot].flow].path].count):
                    other = hops[slot * max_hops + k].link
                    if links[other].stamp != stamp and _binds(links[other]):
                        links[other].stamp = stamp
                        touched[num_touched] = other
                        num_touched += 1
            hop = hops[hop].next
    return num_members, num_touched


@inner
def _set_rate(now_s, slot, rate, slots, ends, num_sending):
    if abs(rate - slots[slot].rate) <= 1e-12 * rate and slots[slot].end_s > 0:
        return
    slots[slot].left_bytes -= slots[slot].rate * (now_s - slots[slot].since_s)
    if slots[slot].left_bytes < 0:
        slots[slot].left_bytes = 0.0
    slots[slot].since_s = now_s
    slots[slot].rate = rate
    slots[slot].end_s = now_s + slots[slot].left_bytes / rate
    _place(ends, slots, num_sending, slots[slot].place)


@inner
def _fill(
    now_s,
    slots,
    hops,
    max_hops,
    flows,
    paths,
    links,
    touched,
    num_touched,
    members,
    num_members,
    ends,
    sending,
    levels,
    fillers,
):
    """Progressive filling of the collected flows: the fullest link sets the rate of its flows, then the next.

    `levels` and `fillers` are a heap of what may be full next: links, and after their numbers the flows, each of which
    has a most of its own. A link's level only rises as its flows freeze below it, so that a stale one is seen when it
    is taken, and put back.
    """
    waiting = 0
    for i in range(num_touched):
        link = links[touched[i]]
        if link.weight > 1e-12:
            waiting = push(levels, fillers, waiting, link.left / link.weight, np.int64(touched[i]))
    for i in range(num_members):
        most = paths[flows[slots[members[i]].flow].path].rate
        waiting = push(levels, fillers, waiting, most, np.int64(len(links) + members[i]))
    frozen, level = 0, 0.0
    while frozen < num_members:
        found, filler = levels[0], fillers[0]
        waiting = pop(levels, fillers, waiting)
        if filler < len(links):
            if links[filler].weight <= 1e-12:
                continue
            current = links[filler].left / links[filler].weight
            if current > found * (1 + 1e-12):
                waiting = push(levels, fillers, waiting, current, filler)
                continue
            # What is full at the same level up to rounding gives the same rate.
            if current > level * (1 + 1e-12):
                level = current
            hop = links[filler].first
            while hop >= 0:
                slot = hops[hop].slot
                if slots[slot].frozen == 0:
                    frozen += _freeze(now_s, slot, level, slots, hops, max_hops, flows, paths, links, ends, sending)
                hop = hops[hop].next
        elif slots[filler - len(links)].frozen == 0:
            if found > level * (1 + 1e-12):
                level = found
            slot = filler - len(links)
            frozen += _freeze(now_s, slot, level, slots, hops, max_hops, flows, paths, links, ends, sending)


@inner
def _freeze(now_s, slot, level, slots, hops, max_hops, flows, paths, links, ends, sending):
    slots[slot].frozen = 1
    for k in range(paths[flows[slots[slot].flow].path].count):
        hop = slot * max_hops + k
        number = hops[hop].link
        links[number].left -= level * hops[hop].share
        links[number].weight -= hops[hop].share
    _set_rate(now_s, slot, level, slots, ends, sending)
    return 1


@inner
def _release(flows, flow, ready_s, ready_keys, ready_flows, num_ready):
    """A flow waits for one less, and not before `ready_s`; returns how many are ready."""
    flows[flow].ready_s = max(flows[flow].ready_s, ready_s)
    flows[flow].waiting -= 1
    if flows[flow].waiting == 0:
        num_ready = push(ready_keys, ready_flows, num_ready, flows[flow].ready_s, flow)
    return num_ready


@entry
def run_flows(
    flows,
    child_ptr,
    child,
    paths,
    path_link,
    path_share,
    links,
    slots,
    hops,
    max_hops,
    free,
    ends,
    members,
    touched,
    ready_keys,
    ready_flows,
    levels,
    fillers,
    one_after_the_other,
):
    """Run all flows to completion.

    Args:
        flows: (n,) FLOW; the times are written into it.
        child_ptr: (n + 1,) with `child`, the flows that wait for each.
        paths: PATH, with `path_link` the directed links and `path_share` what part of a flow each carries (empty: all).
        links: (2 x num_links,) LINK.
        slots: (most flows that send at once,) SLOT; `hops` has `max_hops` for each.
        free: as long as `slots`; so are `ends` and `members`.
        touched: as long as `links`.
        ready_keys: (n,) scratch, likewise `ready_flows`.
        levels: as long as `links` and `slots` together, likewise `fillers`.
        one_after_the_other: whether a follower may begin when the flow before it is sent, or when that one begins.

    Returns:
        (flows completed, events, rate changes); fewer flows than n where some wait for each other. -1 flows where
        `slots` did not suffice.
    """
    num_flows = len(flows)
    num_ready, num_sending, done, events, changes = 0, 0, 0, 0, 0
    stamp = 0
    num_free = len(slots)
    for i in range(num_free):
        free[i] = num_free - 1 - i
    for i in range(num_flows):
        if flows[i].waiting == 0:
            num_ready = push(ready_keys, ready_flows, num_ready, flows[i].ready_s, i)
    while num_ready > 0 or num_sending > 0:
        now_s = np.inf
        if num_ready > 0:
            now_s = ready_keys[0]
        if num_sending > 0:
            now_s = min(now_s, slots[ends[0]].end_s)
        stamp += 1
        num_touched = 0
        while num_sending > 0 and slots[ends[0]].end_s <= now_s + TOGETHER_S:
            slot = ends[0]
            num_sending -= 1
            if num_sending > 0:
                _swap(ends, slots, 0, num_sending)
                _place(ends, slots, num_sending, 0)
            num_touched = _leave(slot, slots, hops, max_hops, flows, paths, links, touched, num_touched, stamp)
            free[num_free] = slot
            num_free += 1
            flow = slots[slot].flow
            flows[flow].sent_s = slots[slot].end_s
            # Senders and switches serve packets in turn: the last packet takes the link's full rate, somewhere in the
            # turn that fluid rates spread it over, on average in the middle.
            turn_s = flows[flow].last_bytes / slots[slot].rate
            alone_s = flows[flow].last_bytes / paths[flows[flow].path].line_rate
            finish_s = slots[slot].end_s + flows[flow].tail_s - 0.5 * (turn_s - alone_s)
            flows[flow].finish_s = finish_s
            done += 1
            events += 1
            later = flows[flow].follower
            if later >= 0 and one_after_the_other:
                num_ready = _release(flows, later, flows[flow].sent_s, ready_keys, ready_flows, num_ready)
            for e in range(child_ptr[flow], child_ptr[flow + 1]):
                later = child[e]
                ready_s = finish_s + flows[later].delay_s
                num_ready = _release(flows, later, ready_s, ready_keys, ready_flows, num_ready)
        while num_ready > 0 and ready_keys[0] <= now_s + TOGETHER_S:
            flow = ready_flows[0]
            num_ready = pop(ready_keys, ready_flows, num_ready)
            if num_free == 0:
                return -1, events, changes
            num_free -= 1
            slot = free[num_free]
            begin_s = flows[flow].ready_s
            flows[flow].begin_s = begin_s
            later = flows[flow].follower
            if later >= 0 and not one_after_the_other:
                num_ready = _release(flows, later, begin_s, ready_keys, ready_flows, num_ready)
            num_touched = _enter(
                slot,
                slots,
                hops,
                max_hops,
                flow,
                flows,
                paths,
                path_link,
                path_share,
                links,
                touched,
                num_touched,
                stamp,
            )
            slots[slot].since_s = begin_s
            slots[slot].end_s = begin_s + slots[slot].left_bytes / slots[slot].rate
            slots[slot].place = num_sending
            ends[num_sending] = slot
            num_sending += 1
            _place(ends, slots, num_sending, num_sending - 1)
            events += 1
        if num_touched > 0:
            num_members, num_touched = _collect(
                slots, hops, max_hops, flows, paths, links, touched, num_touched, stamp, members
            )
            changes += num_members
            _fill(
                now_s,
                slots,
                hops,
                max_hops,
                flows,
                paths,
                links,
                touched,
                num_touched,
                members,
                num_members,
                ends,
                num_sending,
                levels,
                fillers,
            )
    return done, events, changes
