"""Flows under congestion control: queues as fluids, and rates that follow every round trip's acknowledgements.

A flow sends at its control's rate, at most a window a round trip. It looks at its path once a round trip, or once a
packet where that takes longer: it adds its rate to the links, reads their queues, and gives its control the
acknowledgements of that time, by the functions that the packet level runs. A queue grows by what arrives above the
link's rate. So an event costs a flow's path and packets, however many flows it meets.

Sources: windows against queues of fluids, Misra, Gong and Towsley, "Fluid-based Analysis of a Network of AQM Routers
Supporting TCP Flows", SIGCOMM 2000; rates, Zhu et al., "ECN or Delay: Lessons Learnt from Analysis of DCQCN and
TIMELY", CoNEXT 2016.
"""

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from windtunnel.compiled.heap import pop, push
from windtunnel.compiled.jit import entry, inner
from windtunnel.compiled.linked_list import append, remove
from windtunnel.compiled.records import F8, I4, I8, Ints, RecordGrid, Records, int64
from windtunnel.network.flow.kernel import TOGETHER_S, FluidFlow, Path, place, release, tail_s, take_first, turn_s
from windtunnel.network.packet.kernel import codes
from windtunnel.network.packet.kernel.congestion import (
    dcqcn_decrease,
    dcqcn_increase,
    dcqcn_mark,
    dctcp_acknowledged,
    hpcc_acknowledged,
    timely_acknowledged,
)
from windtunnel.network.packet.kernel.state import Connection, PacketKernelSettings, Stamp
from windtunnel.network.routing import scramble

BURST, IDLE, ROUND = range(3)
"""`Sender.phase`: a first window that nothing limits, then waiting for its acknowledgements, then round after round."""
PS = 1e12


class Sender(Protocol):
    """A flow that is sending; its control's state is the connection of the same number."""

    flow: I4
    phase: I4
    link: I4  # its GPU's own; its senders are a list
    before: I4
    after: I4
    place: I4  # in the heap of ends
    end_s: F8  # when its round ends
    rate: F8  # bytes/s
    at_s: F8  # when `left_bytes` and `round_bytes` were true
    left_bytes: F8  # of the wire, to be sent
    round_bytes: F8  # of the wire, sent until its next event
    since_s: F8  # beginning of the round
    rtt_s: F8  # seen when the round began
    asked_s: F8  # when the packet left whose acknowledgement is the next to be looked at
    answer_s: F8  # when it comes
    asked_byte: I8  # sent before that packet
    answered_byte: I8  # acknowledged when it left
    wanted: F8  # bytes/s that its control and its window allow
    share: F8  # of its own link: the flows that it stands for
    turn_s: F8  # of its last packet's turn, what it does not wait for
    back_s: F8  # what acknowledgements wait on their way, as the latest was asked for
    decrease_ps: I8  # DCQCN's cut, if one is due
    num_draws: I8
    num_cuts: I8  # out: rounds of all its flows that a control held below the line's rate


class RoundLink(Protocol):
    """One direction of a link."""

    rate: F8  # bytes/s
    is_own: I4  # a GPU sends on it, which serves its flows in turn
    first: I4  # of its senders
    last: I4
    level: F8  # bytes/s that each of its senders may have
    is_switch: I4  # a switch sends on it, which marks and stamps
    direct: F8  # bytes/s that GPUs bring
    first_feed: I4  # of the links that bring others; -1 for none
    through: F8  # bytes/s that its flows bring, as they know; divides what it sends among the links behind it
    queue_bytes: F8
    at_s: F8  # when `queue_bytes` was true
    sent_bytes: F8
    ecn_min_bytes: F8
    ecn_max_bytes: F8
    ecn_max_probability: F8
    bytes: F8  # out: carried in all
    most_queued_bytes: F8  # out


class Feed(Protocol):
    """A link from which flows come to another."""

    link: I4
    next: I4  # feed of the same link; -1 for none
    through: F8  # bytes/s of the flows that come that way, as they know


class RoundState(NamedTuple):
    """Everything that a run reads and writes."""

    settings: PacketKernelSettings
    flows: Records[FluidFlow]
    child_ptr: Ints
    child: Ints
    paths: Records[Path]
    path_ptr: Ints
    path_link: Ints
    path_share: NDArray[np.float64]
    path_feed: Ints
    """The feed of each link of a path by the link before it; -1 where that is a GPU, or links have no order."""
    reply: Ints
    """(flows,) the path of each flow's acknowledgements."""
    reply_ptr: Ints
    """(replies + 1,) where the links of switches that they cross start in `reply_link`."""
    reply_link: Ints
    feeds: Records[Feed]
    links: Records[RoundLink]
    slots: Records[Sender]
    connections: Records[Connection]
    fresh_connection: Records[Connection]
    hop_rate: NDArray[np.float64]
    """(senders, hops) bytes/s of a flow that arrive at each link of its path."""
    stamps: Records[Stamp]
    seen: RecordGrid[Stamp]
    ends: NDArray[np.int32]
    """(senders,) heap of those that send, by `end_s`, which `ends_s` has in the same order."""
    ends_s: NDArray[np.float64]
    ready_s: NDArray[np.float64]
    """Heap of the times of flows that wait for nothing but their time; `ready` is which."""
    ready: NDArray[np.int64]
    free: NDArray[np.int32]
    one_after_the_other: bool


@inner
def settle(state: RoundState, number: int, now_s: float) -> None:
    """Let a link's queue grow or drain until now, at the rate at which other links send to it now."""
    link = state.links[number]
    passed_s = now_s - link.at_s
    if passed_s <= 0.0:
        return
    arrival = link.direct
    feed = int64(link.first_feed)
    while feed >= 0:
        record = state.feeds[feed]
        source = state.links[record.link]
        arrival += record.through * min(1.0, source.rate / max(source.through, 1.0))
        feed = int64(record.next)
    before = link.queue_bytes
    link.queue_bytes = max(0.0, before + (arrival - link.rate) * passed_s)
    link.sent_bytes += before + arrival * passed_s - link.queue_bytes
    link.at_s = now_s
    link.most_queued_bytes = max(link.most_queued_bytes, link.queue_bytes)


@inner
def waiting_s(state: RoundState, pointer: Ints, link: Ints, path: int, now_s: float) -> float:
    """Return how long packets wait in the queues of a path, of data or of acknowledgements."""
    total_s = 0.0
    for k in range(pointer[path], pointer[path + 1]):
        settle(state, int64(link[k]), now_s)
        record = state.links[link[k]]
        wait_s = record.queue_bytes / record.rate
        total_s = total_s + wait_s if len(state.path_share) == 0 else max(total_s, wait_s)
    return total_s


@inner
def set_level(state: RoundState, number: int) -> None:
    """Set the rate that a GPU's own link, served in turn, has for each sender that wants as much: max-min fairness."""
    link, slots = state.links[number], state.slots
    link.level = np.inf
    level = 0.0
    while True:
        left, shares = link.rate, 0.0
        slot = int64(link.first)
        while slot >= 0:
            if slots[slot].wanted <= level:
                left -= slots[slot].wanted * slots[slot].share
            else:
                shares += slots[slot].share
            slot = int64(slots[slot].after)
        if shares == 0.0:
            return
        if left / shares <= level * (1.0 + 1e-9):
            link.level = level
            return
        level = left / shares


@inner
def set_rate(state: RoundState, slot: int, now_s: float, rate: float) -> None:
    """Send at `rate`; behind a queue a flow arrives at its part of the link's rate."""
    hop_rate = state.hop_rate
    state.slots[slot].rate = rate
    path = state.paths[state.flows[state.slots[slot].flow].path]
    for k in range(path.count):
        settle(state, int64(state.path_link[path.first + k]), now_s)
    for k in range(path.count):
        number, feed = int64(state.path_link[path.first + k]), int64(state.path_feed[path.first + k])
        link = state.links[number]
        share = state.path_share[path.first + k] if len(state.path_share) > 0 else 1.0
        more = (rate - hop_rate[slot, k]) * share
        hop_rate[slot, k] = rate
        link.through = max(0.0, link.through + more)
        if feed >= 0:
            state.feeds[feed].through = max(0.0, state.feeds[feed].through + more)
        else:
            link.direct = max(0.0, link.direct + more)
        if len(state.path_share) == 0 and link.through > link.rate:
            rate *= link.rate / link.through


@inner
def share_out(state: RoundState, number: int, now_s: float, num_sending: int) -> None:
    """Divide a GPU's own link anew among the flows that send on it."""
    slots = state.slots
    set_level(state, number)
    slot = int64(state.links[number].first)
    while slot >= 0:
        sender = slots[slot]
        rate = min(sender.wanted, state.links[number].level)
        if sender.rate > 0.0 and sender.end_s > now_s + TOGETHER_S and abs(rate - sender.rate) > 1e-9 * rate:
            advance(sender, now_s)
            set_rate(state, slot, now_s, rate)
            sender.end_s = round_end_s(state, slot, now_s)
            place(state, num_sending, int64(sender.place))
        slot = int64(sender.after)


@inner
def advance(sender: Sender, now_s: float) -> None:
    """Take off what a flow has sent since it was last looked at."""
    sent = min(sender.round_bytes, sender.rate * (now_s - sender.at_s))
    sender.left_bytes -= sent
    sender.round_bytes -= sent
    sender.at_s = now_s


@inner
def mark_fraction(state: RoundState, slot: int) -> float:
    """Return the fraction of packets that the switches of a path mark at their present queues."""
    path = state.paths[state.flows[state.slots[slot].flow].path]
    unmarked = 1.0
    for k in range(path.first, path.first + path.count):
        link = state.links[state.path_link[k]]
        if link.is_switch and link.queue_bytes > link.ecn_min_bytes:
            over = (link.queue_bytes - link.ecn_min_bytes) / (link.ecn_max_bytes - link.ecn_min_bytes)
            unmarked *= 0.0 if over > 1.0 else 1.0 - over * link.ecn_max_probability
    return 1.0 - unmarked if state.settings.ecn else 0.0


@inner
def draw(state: RoundState, slot: int) -> float:
    """Draw a flow's next uniform number."""
    sender = state.slots[slot]
    sender.num_draws += 1
    word = scramble(int64(state.settings.seed) & 0xFFFFFFFF) ^ int64(sender.flow)
    return scramble(scramble(word) ^ int64(sender.num_draws)) * (1.0 / 4294967296.0)


@inner
def run_timers(settings: PacketKernelSettings, sender: Sender, connection: Connection, until_ps: int) -> None:
    """Cut and raise a rate by DCQCN's timers up to a moment."""
    while True:
        decreases = connection.is_decrease_due and sender.decrease_ps <= until_ps
        increases = connection.is_increase_due and connection.increase_ps <= until_ps
        if decreases and not (increases and connection.increase_ps < sender.decrease_ps):
            dcqcn_decrease(settings, connection, sender.decrease_ps)
            connection.is_increase_due = 1
        elif increases and connection.rate < connection.max_rate:
            dcqcn_increase(settings, connection, connection.increase_ps)
        elif increases:
            connection.increase_ps = until_ps + settings.increase_interval_ps
        else:
            return


@inner
def take_answers(state: RoundState, slot: int, now_s: float) -> None:
    """Give a flow's control the acknowledgements of the round that ends now."""
    settings, sender, connection = state.settings, state.slots[slot], state.connections[slot]
    flow = state.flows[sender.flow]
    packet = float(settings.payload_bytes)
    scale = packet / (packet + settings.header_bytes)
    connection.next_byte = int64((flow.size_bytes - sender.left_bytes) * scale)
    before = int64(connection.acked_byte)
    is_answered = now_s >= sender.answer_s - TOGETHER_S
    if is_answered:
        acked = max(sender.asked_byte + packet, connection.next_byte - sender.rate * scale * sender.rtt_s)
    else:
        part = (now_s - sender.asked_s) / (sender.answer_s - sender.asked_s)
        acked = sender.answered_byte + part * (sender.asked_byte - sender.answered_byte)
    connection.acked_byte = max(before, int64(min(acked, float(connection.next_byte))))
    if settings.congestion == codes.TIMELY:
        if is_answered:
            rtt_ps = int64((sender.answer_s - sender.asked_s) * PS)
            timely_acknowledged(settings, connection, max(connection.acked_byte, connection.update_byte + 1), rtt_ps)
        return
    if settings.congestion == codes.HPCC:
        stamp_path(state, slot, now_s)
        return
    marked = mark_fraction(state, slot)
    num_answers = max(1, int64((connection.acked_byte - before) / packet + 0.5))
    for i in range(num_answers):
        at_s = sender.since_s + (now_s - sender.since_s) * (i + 1) / num_answers
        is_marked = marked > 0.0 and draw(state, slot) < marked
        if settings.congestion == codes.DCTCP:
            byte = int64(before + (i + 1) * (connection.acked_byte - before) / num_answers)
            dctcp_acknowledged(settings, connection, byte, int64(is_marked))
        elif settings.congestion == codes.DCQCN:
            run_timers(settings, sender, connection, int64(at_s * PS))
            if is_marked:
                due_ps = dcqcn_mark(settings, connection, int64(at_s * PS))
                if due_ps >= 0:
                    sender.decrease_ps = due_ps


@inner
def stamp_path(state: RoundState, slot: int, now_s: float) -> None:
    """Give HPCC the telemetry of a path's switches."""
    connection, stamps = state.connections[slot], state.stamps
    path = state.paths[state.flows[state.slots[slot].flow].path]
    num_stamps = int64(0)
    for k in range(path.first, path.first + path.count):
        link = state.links[state.path_link[k]]
        if link.is_switch:
            stamps[num_stamps].time_ps = int64(now_s * PS)
            stamps[num_stamps].sent_bytes = int64(link.sent_bytes)
            stamps[num_stamps].queue_bytes = int64(link.queue_bytes)
            stamps[num_stamps].bytes_per_s = link.rate
            num_stamps += 1
    hpcc_acknowledged(state.settings, connection, int64(connection.acked_byte), stamps, state.seen[slot], num_stamps)


@inner
def window_on_wire(state: RoundState, slot: int) -> float:
    """Return the bytes that a flow may have in flight: whole packets, for the last may exceed the window."""
    settings, connection = state.settings, state.connections[slot]
    if connection.window_bytes == 0:
        return np.inf
    window = float(connection.window_bytes)
    if settings.window_follows_rate and connection.rate < connection.max_rate:
        window = max(1.0, window * connection.rate / connection.max_rate)
    return np.ceil(window / settings.payload_bytes) * (settings.payload_bytes + settings.header_bytes)


@inner
def begin_round(state: RoundState, slot: int, now_s: float) -> None:
    """Set what a flow sends next, and at what rate."""
    settings, sender, connection = state.settings, state.slots[slot], state.connections[slot]
    flow = state.flows[sender.flow]
    packet = float(settings.payload_bytes + settings.header_bytes)
    window = window_on_wire(state, slot)
    sender.since_s = now_s
    is_answered = sender.answer_s <= now_s + TOGETHER_S
    if is_answered:
        sender.back_s = waiting_s(state, state.reply_ptr, state.reply_link, int64(state.reply[sender.flow]), now_s)
    there_s = waiting_s(state, state.path_ptr, state.path_link, int64(flow.path), now_s)
    sender.rtt_s = state.paths[flow.path].round_trip_s + there_s + sender.back_s
    if is_answered:
        sender.asked_s, sender.answer_s = now_s, now_s + sender.rtt_s
        sender.asked_byte, sender.answered_byte = connection.next_byte, connection.acked_byte
    limit = min(connection.rate, state.paths[flow.path].rate)
    sender.wanted = limit if sender.phase == BURST else min(limit, window / sender.rtt_s)
    if sender.link >= 0:
        set_level(state, int64(sender.link))
    rate = min(sender.wanted, state.links[sender.link].level if sender.link >= 0 else np.inf)
    set_rate(state, slot, now_s, rate)
    span_s = sender.answer_s - now_s
    room = np.inf
    if sender.phase == BURST:
        room = max(packet, window - (flow.size_bytes - sender.left_bytes))
    elif is_busy(state, slot):
        span_s = min(span_s, state.paths[flow.path].round_trip_s)
    sender.round_bytes = min(sender.left_bytes, room, max(packet, rate * span_s))
    sender.end_s = round_end_s(state, slot, now_s)


@inner
def round_end_s(state: RoundState, slot: int, now_s: float) -> float:
    """Return when what a round has left is sent at the present rate."""
    sender, flow = state.slots[slot], state.flows[state.slots[slot].flow]
    sender.turn_s = 0.0
    if sender.round_bytes < sender.left_bytes:
        return now_s + sender.round_bytes / sender.rate
    last = min(sender.round_bytes, flow.last_bytes)
    alone_s = last / state.paths[flow.path].line_rate
    if sender.rate < state.connections[slot].rate:
        sender.turn_s = turn_s(flow, state.paths[flow.path], int64(sender.flow), sender.rate)
        return now_s + sender.round_bytes / sender.rate
    # It does not wait until the rate would allow the next.
    return now_s + (sender.round_bytes - last) / sender.rate + alone_s


@inner
def is_busy(state: RoundState, slot: int) -> bool:
    """Return whether a control is acting, so that a flow must look at its path more often than it is answered."""
    connection = state.connections[slot]
    return bool(connection.rate < connection.max_rate or mark_fraction(state, slot) > 0.0)


@inner
def start(state: RoundState, flow: int, slot: int) -> None:
    """Give a free sender to a flow."""
    sender, connection, record = state.slots[slot], state.connections[slot], state.flows[flow]
    path = state.paths[record.path]
    state.connections[slot] = state.fresh_connection[0]
    connection.window_bytes = int64(path.window_bytes)
    connection.base_rtt_ps = int64(path.base_rtt_s * PS)
    connection.max_rate = path.line_rate
    connection.rate = connection.max_rate
    connection.target_rate = connection.max_rate
    sender.flow, sender.phase, sender.num_draws, sender.link = flow, BURST, 0, -1
    sender.left_bytes, sender.round_bytes, sender.rate = record.size_bytes, 0.0, 0.0
    sender.wanted, sender.share = path.rate, 1.0
    sender.answer_s = -1.0
    # Flows that begin together are all there before any of them is given its rate.
    sender.at_s = sender.since_s = record.ready_s
    sender.end_s = record.ready_s + TOGETHER_S
    for k in range(path.count):
        state.hop_rate[slot, k] = 0.0
        number = int64(state.path_link[path.first + k])
        if state.links[number].is_own and sender.link < 0:
            sender.link = number
            sender.share = state.path_share[path.first + k] if len(state.path_share) > 0 else 1.0
            append(state.slots, state.links[number], slot)


@inner
def complete(state: RoundState, slot: int, now_s: float, num_ready: int) -> int:
    """Take a flow off its links, note its times, and release the flows after it; return how many are ready."""
    sender, child_ptr = state.slots[slot], state.child_ptr
    flow = int64(sender.flow)
    record = state.flows[flow]
    record.sent_s = now_s
    set_rate(state, slot, now_s, 0.0)
    there_s = waiting_s(state, state.path_ptr, state.path_link, int64(record.path), now_s)
    record.finish_s = now_s + tail_s(record, state.paths[record.path]) + there_s - sender.turn_s
    if state.settings.completes_on_ack:
        record.finish_s += waiting_s(state, state.reply_ptr, state.reply_link, int64(state.reply[flow]), now_s)
    path = state.paths[record.path]
    for k in range(path.first, path.first + path.count):
        share = state.path_share[k] if len(state.path_share) > 0 else 1.0
        state.links[state.path_link[k]].bytes += record.size_bytes * share
    if record.follower >= 0 and state.one_after_the_other:
        num_ready = release(state, int64(record.follower), now_s, num_ready)
    for e in range(child_ptr[flow], child_ptr[flow + 1]):
        child = int64(state.child[e])
        num_ready = release(state, child, record.finish_s + state.flows[child].delay_s, num_ready)
    return num_ready


@inner
def end_round(state: RoundState, slot: int, now_s: float) -> None:
    """End a round of a flow that has more to send, and begin the next, or wait for the first acknowledgement."""
    sender, connection = state.slots[slot], state.connections[slot]
    if sender.phase == BURST and sender.rate > 0.0 and now_s < sender.answer_s - TOGETHER_S:
        sent = state.flows[sender.flow].size_bytes - sender.left_bytes
        if sent + 0.5 < window_on_wire(state, slot):
            begin_round(state, slot, now_s)
            return
        set_rate(state, slot, now_s, 0.0)
        sender.phase, sender.wanted, sender.end_s = IDLE, 0.0, sender.answer_s
        return
    if sender.phase == IDLE or sender.rate > 0.0:
        sender.phase = ROUND
    if sender.phase == ROUND:
        take_answers(state, slot, now_s)
        sender.num_cuts += int64(connection.rate < connection.max_rate)
    begin_round(state, slot, now_s)


@entry
def run_rounds(state: RoundState) -> tuple[int, int]:
    """Run all flows to completion; their times are written into `state.flows`.

    Returns:
        (flows completed, events); -1 where the senders did not suffice.
    """
    flows, slots, ends = state.flows, state.slots, state.ends
    num_free, num_ready, num_sending, done, events = len(slots), 0, 0, 0, 0
    for i in range(num_free):
        state.free[i] = num_free - 1 - i
    for i in range(len(flows)):
        if flows[i].waiting == 0:
            num_ready = push(state.ready_s, state.ready, num_ready, flows[i].ready_s, i)
    while num_ready > 0 or num_sending > 0:
        events += 1
        if num_ready > 0 and (num_sending == 0 or state.ready_s[0] <= slots[ends[0]].end_s):
            flow = state.ready[0]
            num_ready = pop(state.ready_s, state.ready, num_ready)
            if num_free == 0:
                return -1, events
            num_free -= 1
            slot = int64(state.free[num_free])
            start(state, flow, slot)
            slots[slot].place = num_sending
            ends[num_sending] = slot
            num_sending += 1
            place(state, num_sending, num_sending - 1)
            if flows[flow].follower >= 0 and not state.one_after_the_other:
                num_ready = release(state, int64(flows[flow].follower), flows[flow].ready_s, num_ready)
            continue
        slot = int64(ends[0])
        now_s = slots[slot].end_s
        number = int64(slots[slot].link)
        is_new = slots[slot].phase == BURST and slots[slot].rate == 0.0
        slots[slot].left_bytes -= slots[slot].round_bytes
        slots[slot].round_bytes = 0.0
        slots[slot].at_s = now_s
        if slots[slot].left_bytes > 0.5:
            end_round(state, slot, now_s)
            place(state, num_sending, 0)
            if is_new and number >= 0:
                share_out(state, number, now_s, num_sending)
            continue
        num_sending = take_first(state, num_sending)
        num_ready = complete(state, slot, now_s, num_ready)
        if number >= 0:
            remove(slots, state.links[number], slot)
            share_out(state, number, now_s, num_sending)
        state.free[num_free] = slot
        num_free += 1
        done += 1
    return done, events
