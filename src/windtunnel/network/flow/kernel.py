"""Flows that share links max-min fairly, event by event.

A flow starts when its parents have completed and its delay has passed, sends at the rate that max-min fairness gives
it, and completes a fixed time after its last byte has left: the latency of its path. Rates change only when flows start
or end. A link binds if its flows could together send more than it carries; only those can be bottlenecks.

An allocation is max-min fair if and only if every flow has a bottleneck: a full link on which no flow is faster, or its
own maximum (Bertsekas and Gallager, "Data Networks", 2nd ed., section 6.5.2). So a flow keeps its rate for as long as
it has one, and an event sets only the rates of those that lost theirs, and of those that are faster than what a link
now has for each (`_fill`).
"""

from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from windtunnel.compiled.heap import pop, push
from windtunnel.compiled.jit import entry, inner
from windtunnel.compiled.linked_list import append, remove
from windtunnel.compiled.records import F8, I4, I8, Ints, Records, int64
from windtunnel.network.routing import scramble


class FluidFlow(Protocol):
    """A flow; its times are results."""

    size_bytes: F8  # on the wire, headers included
    last_bytes: F8  # of its last packet
    delay_s: F8  # from the last parent's completion to the first byte
    ready_s: F8  # in: earliest start; grows as parents complete; out: its beginning
    sent_s: F8  # out: its last byte has left
    finish_s: F8  # out
    path: I4
    waiting: I4  # incomplete parents, plus 1 until the flow before it on the same connection lets it go
    follower: I4  # the next flow of the same connection, -1 for none


class Slot(Protocol):
    """A flow that is sending."""

    left_bytes: F8
    rate: F8  # bytes/s
    since_s: F8  # when `left_bytes` was true
    end_s: F8
    flow: I4
    place: I4  # in the heap of ends
    stamp: I4  # the event at which it last gave up its rate
    frozen: I4  # 1: its rate is set again in that event


class FluidHop(Protocol):
    """A sending flow's place in the list of one link's flows."""

    before: I4
    after: I4
    link: I4
    slot: I4
    share: F8


class FluidLink(Protocol):
    """One direction of a link."""

    rate: F8  # bytes/s it carries
    demand: F8  # bytes/s that its flows could send together
    left: F8  # bytes/s not given away
    weight: F8  # shares of its flows without a rate
    level: F8  # bytes/s of the flows whose bottleneck it is; infinite if it is none
    due: F8  # level at which the filling looks at it next; infinite for none
    bytes: F8  # out: carried in all
    in_flight: F8  # bytes that the windows of its flows let be under way
    most_in_flight: F8  # out: the most while it was full
    first: I4  # hop of the flow that has been on it longest
    last: I4
    stamp: I4  # the event at which it was last touched


class Path(Protocol):
    """A path: the most that one flow can send over it, the rate of its slowest link, and its links."""

    rate: F8
    line_rate: F8
    window_bytes: F8  # of a flow in flight at most; 0: no limit
    base_rtt_s: F8  # round trip that HPCC reckons with
    round_trip_s: F8  # of a full packet and its acknowledgement, without queues
    tail_s: F8  # from the last byte's departure to completion, but for
    tail_s_per_byte: F8  # forwarding a flow's largest packet
    packet_bytes: F8  # of a full packet
    chance: F8  # 1: where in a turn a flow's last packet leaves is drawn; 0: it leaves in the middle
    first: I8
    count: I4


class SendingState(Protocol):
    """What every run of flows has: its flows, those that send by the end of that, and those that are ready by time."""

    @property
    def flows(self) -> Records[FluidFlow]: ...
    @property
    def slots(self) -> Records[Any]: ...
    @property
    def ends(self) -> NDArray[np.int32]: ...
    @property
    def ends_s(self) -> NDArray[np.float64]: ...
    @property
    def ready_s(self) -> NDArray[np.float64]: ...
    @property
    def ready(self) -> NDArray[np.int64]: ...


class FluidState(NamedTuple):
    """Everything that a run reads and writes."""

    flows: Records[FluidFlow]
    child_ptr: Ints
    """(num_flows + 1,) where the flows that wait for each flow start in `child`."""
    child: Ints
    paths: Records[Path]
    path_link: Ints
    """The directed links of all paths."""
    path_share: NDArray[np.float64]
    """Fraction of a flow on each link of a path; empty where every link carries all of it."""
    links: Records[FluidLink]
    """(2 x num_links,) directed links."""
    slots: Records[Slot]
    """As many as flows may send at once."""
    hops: Records[FluidHop]
    """Slot s owns `max_hops` of them, from s * max_hops on."""
    max_hops: int
    free: NDArray[np.int32]
    """(slots,) stack of free slots."""
    ends: NDArray[np.int32]
    """(slots,) heap of the slots that send, by `end_s`, which `ends_s` has in the same order."""
    ends_s: NDArray[np.float64]
    ready_s: NDArray[np.float64]
    """Heap of the times of flows that wait for nothing but their time; `ready` is which."""
    ready: NDArray[np.int64]
    entered: NDArray[np.int32]
    """(slots,) scratch: the slots that begin to send."""
    touched: NDArray[np.int32]
    """(2 x num_links,) scratch: binding links whose flows changed."""
    levels: NDArray[np.float64]
    """(links + slots x (max_hops + 1),) scratch: heap of rates at which a link may be full, or a flow at its maximum;
    `fillers` is which: links, and after their numbers the slots."""
    fillers: NDArray[np.int64]
    one_after_the_other: bool
    """Whether a follower may begin when the flow before it is sent, or when that one begins."""


TOGETHER_S = 1e-12
"""Events closer than a picosecond happen together: only rounding separates them."""
ROUNDING = 1e-12
"""Rates that differ by no more than this fraction are equal."""
ALMOST = 1e-9
"""Fraction by which a sum that is kept up to date may be off where a closer look follows."""
NO_WEIGHT = 1e-12
"""Shares of no flow, but for rounding."""


@inner
def place(state: SendingState, size: int, position: int) -> None:
    """Restore the heap of ends after the end of the slot at `position` has changed."""
    slots, ends, ends_s = state.slots, state.ends, state.ends_s
    slot = ends[position]
    end_s = slots[slot].end_s
    while position > 0:
        parent = (position - 1) // 2
        if ends_s[parent] <= end_s:
            break
        ends[position], ends_s[position] = ends[parent], ends_s[parent]
        slots[ends[position]].place = position
        position = parent
    while True:
        child = 2 * position + 1
        if child >= size:
            break
        if child + 1 < size and ends_s[child + 1] < ends_s[child]:
            child += 1
        if end_s <= ends_s[child]:
            break
        ends[position], ends_s[position] = ends[child], ends_s[child]
        slots[ends[position]].place = position
        position = child
    ends[position], ends_s[position] = slot, end_s
    slots[slot].place = position


@inner
def take_first(state: SendingState, num_sending: int) -> int:
    """Take the slot that ends first off the heap of ends; return how many are left."""
    num_sending -= 1
    if num_sending > 0:
        state.ends[0] = state.ends[num_sending]
        place(state, num_sending, 0)
    return num_sending


@inner
def _binds(link: FluidLink) -> bool:
    """Whether a link's flows could together send more than it carries."""
    return link.demand > link.rate * (1 + 1e-9)


@inner
def _touch(state: FluidState, number: int, num_touched: int, stamp: int) -> int:
    """Add a link to the touched ones if it binds and is not among them; return their number."""
    link = state.links[number]
    if link.stamp != stamp and _binds(link):
        link.stamp = stamp
        state.touched[num_touched] = number
        num_touched += 1
    return num_touched


@inner
def flight_bytes(record: FluidFlow, path: Path) -> float:
    """Return the most that a flow can have under way."""
    return min(record.size_bytes, path.window_bytes) if path.window_bytes > 0.0 else record.size_bytes


@inner
def tail_s(record: FluidFlow, path: Path) -> float:
    """Return the time from a flow's last byte to its completion, without queues."""
    return path.tail_s + path.tail_s_per_byte * min(record.size_bytes, path.packet_bytes)


@inner
def _enter(state: FluidState, slot: int, flow: int, num_touched: int, stamp: int) -> int:
    """Put a flow on its links; return the number of `touched` links, to which those that bind are added."""
    slots, hops, links = state.slots, state.hops, state.links
    path = state.paths[state.flows[flow].path]
    slots[slot].flow = flow
    slots[slot].left_bytes = state.flows[flow].size_bytes
    slots[slot].rate = path.rate
    for k in range(path.count):
        hop = slot * state.max_hops + k
        number = state.path_link[path.first + k]
        share = state.path_share[path.first + k] if len(state.path_share) > 0 else 1.0
        hops[hop].link, hops[hop].slot, hops[hop].share = number, slot, share
        append(hops, links[number], hop)
        links[number].demand += path.rate * share
        links[number].weight += share
        links[number].in_flight += flight_bytes(state.flows[flow], path) * share
        if _binds(links[number]):
            links[number].most_in_flight = max(links[number].most_in_flight, links[number].in_flight)
        num_touched = _touch(state, number, num_touched, stamp)
    return num_touched


@inner
def _leave(state: FluidState, slot: int, num_touched: int, stamp: int) -> int:
    """Take a flow off its links; return the number of `touched` links, to which those that did bind are added."""
    hops, links = state.hops, state.links
    flow = state.slots[slot].flow
    path = state.paths[state.flows[flow].path]
    for k in range(path.count):
        hop = slot * state.max_hops + k
        number, share = hops[hop].link, hops[hop].share
        num_touched = _touch(state, number, num_touched, stamp)
        remove(hops, links[number], hop)
        links[number].demand -= path.rate * share
        links[number].left += state.slots[slot].rate * share
        links[number].in_flight -= flight_bytes(state.flows[flow], path) * share
        if links[number].first < 0:
            links[number].demand = links[number].in_flight = links[number].weight = 0.0
            links[number].left = links[number].rate
        links[number].bytes += state.flows[flow].size_bytes * share
    return num_touched


@inner
def _set_rate(state: FluidState, now_s: float, slot: int, rate: float, num_sending: int) -> None:
    slots = state.slots
    if abs(rate - slots[slot].rate) <= ROUNDING * rate and slots[slot].end_s < np.inf:
        return
    slots[slot].left_bytes -= slots[slot].rate * (now_s - slots[slot].since_s)
    if slots[slot].left_bytes < 0:
        slots[slot].left_bytes = 0.0
    slots[slot].since_s = now_s
    slots[slot].rate = rate
    slots[slot].end_s = now_s + slots[slot].left_bytes / rate
    place(state, num_sending, slots[slot].place)


@inner
def _bound(link: FluidLink) -> float:
    """Return a lower bound of the level at which a link is full or reaches the level that it had.

    Flows that have kept their rates may turn out to want more than it, so the link may be full later; one that is too
    full, because others rose, takes from these in any case.
    """
    if not _binds(link):
        return link.level
    if link.weight > NO_WEIGHT:
        return min(link.level, link.left / link.weight * (1 - ALMOST))
    return link.level if link.left >= -ROUNDING * link.rate else 0.0


@inner
def _queue(state: FluidState, number: int, level: float, waiting: int) -> int:
    """Look at a link when the filling, now at `level`, reaches its bound; returns the size of the heap."""
    link = state.links[number]
    due = max(_bound(link), level)
    if due < link.due:
        link.due = due
        waiting = push(state.levels, state.fillers, waiting, due, number)
    return waiting


@inner
def _open(state: FluidState, slot: int, level: float, stamp: int, waiting: int) -> int:
    """Let a flow give up its rate for this event; returns the size of the heap."""
    slots, hops, links = state.slots, state.hops, state.links
    path = state.paths[state.flows[slots[slot].flow].path]
    slots[slot].stamp, slots[slot].frozen = stamp, 0
    waiting = push(state.levels, state.fillers, waiting, path.rate, int64(len(links) + slot))
    for hop in range(slot * state.max_hops, slot * state.max_hops + path.count):
        link = links[hops[hop].link]
        link.left += slots[slot].rate * hops[hop].share
        link.weight += hops[hop].share
        waiting = _queue(state, int64(hops[hop].link), level, waiting)
    return waiting


@inner
def _level_of(state: FluidState, number: int, level: float, stamp: int) -> float:
    """Return the level at which a link is full: what each of its flows may send that wants more.

    A flow that has kept its rate wants no more than that, unless the link itself holds it there. The level rises from
    a lower bound, as flows turn out to want less.
    """
    slots, hops, link = state.slots, state.hops, state.links[number]
    if not _binds(link):
        return np.inf
    if link.weight > NO_WEIGHT:
        level = max(level, link.left / link.weight * (1 - ALMOST))
    while True:
        left, weight, slowest = link.rate, 0.0, np.inf
        hop = int64(link.last)
        while hop >= 0:
            slot, share = slots[hops[hop].slot], hops[hop].share
            is_frozen = slot.stamp == stamp and slot.frozen == 1
            if not is_frozen and (slot.stamp == stamp or slot.rate >= link.level * (1 - 10 * ROUNDING)):
                weight += share
            elif not is_frozen and slot.rate > level:
                weight += share
                slowest = min(slowest, slot.rate)
            else:
                left -= slot.rate * share
            hop = int64(hops[hop].before)
        if weight <= NO_WEIGHT:
            return np.inf
        level = max(level, left / weight)
        if slowest >= level:
            return level


@inner
def _take(state: FluidState, slot: int) -> None:
    """Take what a flow sends from its links, and the flow off those without a rate."""
    slots, hops, links = state.slots, state.hops, state.links
    path = state.paths[state.flows[slots[slot].flow].path]
    for hop in range(slot * state.max_hops, slot * state.max_hops + path.count):
        links[hops[hop].link].left -= slots[slot].rate * hops[hop].share
        links[hops[hop].link].weight -= hops[hop].share


@inner
def _freeze(state: FluidState, now_s: float, slot: int, level: float, num_sending: int) -> None:
    """Give a flow the rate `level`."""
    state.slots[slot].frozen = 1
    _set_rate(state, now_s, slot, level, num_sending)
    _take(state, slot)


@inner
def _loosen(state: FluidState, number: int, stamp: int, waiting: int) -> int:
    """Let the flows give up their rates whose bottleneck a link no longer is; returns the size of the heap."""
    slots, hops, link = state.slots, state.hops, state.links[number]
    former, link.level = link.level, np.inf
    hop = int64(link.last)
    while hop >= 0:
        slot = int64(hops[hop].slot)
        if slots[slot].stamp != stamp and slots[slot].rate >= former * (1 - 10 * ROUNDING):
            waiting = _open(state, slot, former, stamp, waiting)
        hop = int64(hops[hop].before)
    return waiting


@inner
def _saturate(
    state: FluidState, now_s: float, number: int, level: float, stamp: int, num_sending: int, waiting: int
) -> int:
    """Make a link the bottleneck of its flows without a rate and of those above `level`; returns the heap's size."""
    slots, hops, link = state.slots, state.hops, state.links[number]
    if not abs(level - link.level) <= ROUNDING * level:
        link.level = level
    left = link.rate
    hop = int64(link.last)
    while hop >= 0:
        slot = int64(hops[hop].slot)
        if slots[slot].stamp != stamp and slots[slot].rate > level * (1 + ROUNDING):
            waiting = _open(state, slot, level, stamp, waiting)
        if slots[slot].stamp == stamp and slots[slot].frozen == 0:
            _freeze(state, now_s, slot, level, num_sending)
        left -= slots[slot].rate * hops[hop].share
        hop = int64(hops[hop].before)
    link.left = left
    return waiting


@inner
def _begin(state: FluidState, num_entered: int, stamp: int) -> int:
    """Let the flows without a rate that have begun on a touched link wait for one; returns the size of the heap."""
    slots, hops, waiting = state.slots, state.hops, 0
    for i in range(num_entered):
        slot = state.entered[i]
        path = state.paths[state.flows[slots[slot].flow].path]
        for hop in range(slot * state.max_hops, slot * state.max_hops + path.count):
            if state.links[hops[hop].link].stamp == stamp and slots[slot].stamp != stamp:
                slots[slot].stamp, slots[slot].frozen = stamp, 0
                waiting = push(state.levels, state.fillers, waiting, path.rate, int64(len(state.links) + slot))
    return waiting


@inner
def _fill(state: FluidState, now_s: float, num_touched: int, num_entered: int, num_sending: int, stamp: int) -> None:
    """Set the rates that an event changes by progressive filling: the fullest link sets the rate of its flows, then
    the next.

    The filling rises past whatever stays as it was. Flows that begin have no rate. A link that reaches the level it
    had, and is not full there, lets its flows give up their rates; a full one takes from flows that are faster. The
    links of all flows that change are looked at again, at this level or above it, until every flow has a bottleneck.
    `levels` and `fillers` are a heap of what is to be looked at.
    """
    slots, links, levels, fillers = state.slots, state.links, state.levels, state.fillers
    waiting, level = _begin(state, num_entered, stamp), 0.0
    for i in range(num_touched):
        waiting = _queue(state, int64(state.touched[i]), level, waiting)
    while waiting > 0:
        due, filler = levels[0], fillers[0]
        waiting = pop(levels, fillers, waiting)
        if filler >= len(links):
            if slots[filler - len(links)].frozen == 0:
                # What is full at the same level up to rounding gives the same rate.
                level = due if due > level * (1 + ROUNDING) else level
                _freeze(state, now_s, filler - len(links), level, num_sending)
            continue
        link = links[filler]
        if due != link.due:
            continue
        bound, full = _bound(link), np.inf
        if waiting == 0 or bound <= levels[0]:
            full = _level_of(state, filler, level, stamp)
            bound = min(full, link.level)
        if waiting > 0 and bound > levels[0]:
            link.due = bound
            if bound < np.inf:
                waiting = push(levels, fillers, waiting, bound, filler)
        elif full > link.level * (1 + ROUNDING):
            link.due = 0.0
            waiting = _loosen(state, filler, stamp, waiting)
            link.due = np.inf
            waiting = _queue(state, filler, level, waiting)
        elif full < np.inf:
            link.due = 0.0
            level = full if full > level * (1 + ROUNDING) else level
            waiting = _saturate(state, now_s, filler, level, stamp, num_sending, waiting)
            link.due = np.inf
        else:
            link.due = np.inf


@inner
def release(state: SendingState, flow: int, ready_s: float, num_ready: int) -> int:
    """Let a flow wait for one flow less, and not begin before `ready_s`; returns how many are ready."""
    flows = state.flows
    flows[flow].ready_s = max(flows[flow].ready_s, ready_s)
    flows[flow].waiting -= 1
    if flows[flow].waiting == 0:
        num_ready = push(state.ready_s, state.ready, num_ready, flows[flow].ready_s, flow)
    return num_ready


@inner
def turn_s(record: FluidFlow, path: Path, flow: int, rate: float) -> float:
    """Return how long before the end of its fluid a flow's last packet leaves.

    Senders and switches serve packets in turn: the last packet takes the link's full rate, somewhere in the turn that
    fluid rates spread it over: on average in the middle, or by chance, where the flow's number draws the place.
    """
    place_in_turn = 0.5 + path.chance * (scramble(int64(flow)) * (1.0 / 4294967296.0) - 0.5)
    return place_in_turn * (record.last_bytes / rate - record.last_bytes / path.line_rate)


@inner
def _complete(state: FluidState, slot: Slot, num_ready: int) -> int:
    """Note the times of a flow whose last byte has left, and release the flows after it; returns how many are ready."""
    flows, child_ptr, child = state.flows, state.child_ptr, state.child
    flow = slot.flow
    flows[flow].sent_s = slot.end_s
    path = state.paths[flows[flow].path]
    finish_s = slot.end_s + tail_s(flows[flow], path) - turn_s(flows[flow], path, flow, slot.rate)
    flows[flow].finish_s = finish_s
    follower = flows[flow].follower
    if follower >= 0 and state.one_after_the_other:
        num_ready = release(state, follower, flows[flow].sent_s, num_ready)
    for e in range(child_ptr[flow], child_ptr[flow + 1]):
        num_ready = release(state, child[e], finish_s + flows[child[e]].delay_s, num_ready)
    return num_ready


@entry
def run_flows(state: FluidState) -> tuple[int, int]:
    """Run all flows to completion; their times are written into `state.flows`.

    Returns:
        (flows completed, events); fewer flows than there are where some wait for each other; -1 where `slots` did not
        suffice.
    """
    flows, slots, ends = state.flows, state.slots, state.ends
    num_ready, num_sending, done, events = 0, 0, 0, 0
    stamp = 0
    num_free = len(slots)
    for i in range(num_free):
        state.free[i] = num_free - 1 - i
    for i in range(len(flows)):
        if flows[i].waiting == 0:
            num_ready = push(state.ready_s, state.ready, num_ready, flows[i].ready_s, i)
    while num_ready > 0 or num_sending > 0:
        now_s = np.inf
        if num_ready > 0:
            now_s = state.ready_s[0]
        if num_sending > 0:
            now_s = min(now_s, slots[ends[0]].end_s)
        stamp += 1
        num_touched, num_entered = 0, 0
        while num_sending > 0 and slots[ends[0]].end_s <= now_s + TOGETHER_S:
            slot = ends[0]
            num_sending = take_first(state, num_sending)
            num_touched = _leave(state, slot, num_touched, stamp)
            state.free[num_free] = slot
            num_free += 1
            num_ready = _complete(state, slots[slot], num_ready)
            done += 1
            events += 1
        while num_ready > 0 and state.ready_s[0] <= now_s + TOGETHER_S:
            flow = state.ready[0]
            num_ready = pop(state.ready_s, state.ready, num_ready)
            if num_free == 0:
                return -1, events
            num_free -= 1
            slot = state.free[num_free]
            begin_s = flows[flow].ready_s
            follower = flows[flow].follower
            if follower >= 0 and not state.one_after_the_other:
                num_ready = release(state, follower, begin_s, num_ready)
            num_touched = _enter(state, slot, flow, num_touched, stamp)
            slots[slot].since_s = begin_s
            # It finds its place in the heap when its rate is known.
            slots[slot].end_s = np.inf
            slots[slot].place = num_sending
            ends[num_sending] = state.entered[num_entered] = slot
            state.ends_s[num_sending] = np.inf
            num_sending += 1
            num_entered += 1
            events += 1
        if num_touched > 0:
            _fill(state, now_s, num_touched, num_entered, num_sending, stamp)
        for i in range(num_entered):
            slot = state.entered[i]
            if slots[slot].stamp != stamp:
                _take(state, slot)
                slots[slot].end_s = slots[slot].since_s + slots[slot].left_bytes / slots[slot].rate
                place(state, num_sending, slots[slot].place)
    return done, events
