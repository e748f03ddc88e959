"""The packet loop: every packet on every link, with queues, pauses, marks, windows, rates and losses.

What makes it fast: an idle link sends a packet the moment that it arrives, without an event; an event serves a link
only while packets wait there. A NIC takes its connections in turn from a heap of those that may send, so that the
thousands that wait cost nothing. A data packet becomes its own acknowledgement. The calendar's cost does not grow with
the number of events on it.

Time is in whole picoseconds and equal times go in the order of scheduling, so that a run can be repeated to the byte.
"""

from windtunnel.compiled.calendar import NO_EVENT, schedule, schedule_message, take_next
from windtunnel.compiled.jit import entry, inner
from windtunnel.compiled.records import Records, int64
from windtunnel.network.packet.kernel import codes
from windtunnel.network.packet.kernel.endpoints import answer, next_data_packet, on_timer, start, take_answer, wake
from windtunnel.network.packet.kernel.flows import complete, release
from windtunnel.network.packet.kernel.queues import draw, event, free_packet, note_sender, sending_ps
from windtunnel.network.packet.kernel.state import Packet, PacketLink, PacketState
from windtunnel.network.packet.kernel.switch import forward, head_start_ps, leave_switch, pause_or_resume

DONE, MORE_EVENTS, MORE_PACKETS, MORE_CONNECTIONS = range(4)
"""Return values of `run`: nothing is left to happen; or a table is full: call again with a larger one."""


@entry
def run(state: PacketState) -> int:
    """Simulate until nothing is left to happen or a table is full (`DONE` or `MORE_...`); then call again.

    Times are in picoseconds, sizes in bytes. Results are the fields of links, nodes and flows, and the counters.
    """
    links, packets, counters, clock = state.links, state.packets, state.counters, state.clock
    if not counters[0].has_begun:
        counters[0].has_begun = 1
        for flow in state.first_flows:
            release(state, flow)
    while True:
        lack = full_table(state)
        if lack != DONE:
            return lack
        what = take_next(clock)
        if what == NO_EVENT:
            return DONE
        counters[0].num_events += 1
        kind = what & ((1 << codes.KIND_BITS) - 1)
        number = (what >> codes.KIND_BITS) & ((1 << codes.NUMBER_BITS) - 1)
        generation = what >> (codes.KIND_BITS + codes.NUMBER_BITS)
        served_link = int64(codes.NONE)  # it has new work
        complete_flow = int64(codes.NONE)
        awake_connection = int64(codes.NONE)  # it may send now
        freed_packet = int64(codes.NONE)

        if kind == codes.SERVE:
            links[number].is_due = 0
            served_link = number

        elif kind == codes.ARRIVE:
            over = int64(packets[number].link)
            link = links[over]
            if packets[number].kind >= codes.PAUSE:
                served_link = pause_or_resume(state, packets[number].kind, over ^ 1)
                freed_packet = number
            elif link.error_fraction > 0.0 and draw(state, link) < link.error_fraction:
                link.num_drops += 1
                freed_packet = number
            elif packets[number].hop < packets[number].last_hop:
                served_link = forward(state, number, over)
                freed_packet = number if served_link < 0 else freed_packet
            else:
                if link.sender >= 0:
                    note_sender(state, state.nodes[link.target], link.sender)
                if packets[number].kind == codes.DATA:
                    served_link, complete_flow = answer(state, number)
                    freed_packet = number if served_link < 0 else freed_packet
                else:
                    awake_connection, complete_flow = take_answer(state, number)
                    freed_packet = number

        elif kind == codes.START:
            awake_connection = start(state, number)
            complete_flow = number if awake_connection < 0 else complete_flow

        elif state.connections[number].generation == generation:
            on_timer(state, kind, number)
            awake_connection = number

        if freed_packet >= 0:
            free_packet(state, freed_packet)
        if complete_flow >= 0:
            complete(state, complete_flow)
        if awake_connection >= 0:
            served_link = wake(state, awake_connection)
        if served_link >= 0:
            serve(state, served_link)


@inner
def full_table(state: PacketState) -> int:
    """Return which table may not suffice for the next event; `DONE` if all do."""
    settings, counters = state.settings, state.counters
    if state.clock.calendar[0].num_free < settings.most_children + 8:
        return MORE_EVENTS
    if counters[0].num_free_packets < 4:
        return MORE_PACKETS
    if counters[0].num_free_connections < 1:
        return MORE_CONNECTIONS
    return DONE


@inner
def serve(state: PacketState, number: int) -> None:
    """Send what waits for link `number`: now if the link is idle, else once it is free."""
    packets, clock, link = state.packets, state.clock, state.links[number]
    now_ps = clock.calendar[0].now_ps
    if link.is_due:
        return
    if link.free_ps > now_ps:
        link.is_due = 1
        schedule(clock, link.free_ps, event(codes.SERVE, number))
        return
    packet = take_waiting(packets, link)
    if packet < 0 and not link.is_paused:
        packet = next_data_packet(state, link)
    if packet < 0:
        return
    leave_switch(state, link, packet)
    busy_ps = sending_ps(state.settings, link, packets[packet].bytes)
    link.free_ps = now_ps + busy_ps
    link.sent_bytes += packets[packet].bytes
    due_ps = link.free_ps + link.latency_ps
    if state.settings.cut_through:
        due_ps -= head_start_ps(state, packet, link, busy_ps)
    has_more = not link.is_paused and (link.queue_first >= 0 or link.turns >= 0 or link.next_turns >= 0)
    if has_more or link.control_first >= 0 or state.settings.tick_ps > 1:
        link.is_due = 1
        schedule(clock, link.free_ps, event(codes.SERVE, number))
    if link.sender < 0:
        schedule(clock, due_ps, event(codes.ARRIVE, packet))
    else:
        schedule_message(clock, due_ps, event(codes.ARRIVE, packet), link.sender)


@inner
def take_waiting(packets: Records[Packet], link: PacketLink) -> int:
    """Take the next packet that waits for a link: packets that overtake, then, unless the link is paused, its queue.

    Returns -1 if none waits.
    """
    packet = int64(codes.NONE)
    if link.control_first >= 0:
        packet = int64(link.control_first)
        link.control_first = packets[packet].next
    elif not link.is_paused and link.queue_first >= 0:
        packet = int64(link.queue_first)
        link.queue_first = packets[packet].next
        link.queue_bytes -= packets[packet].bytes
    return packet
