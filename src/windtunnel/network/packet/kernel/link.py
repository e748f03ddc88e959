"""Serve a link's transmitter: send the next packet by precedence, and schedule its arrival."""

from windtunnel.compiled.calendar import schedule, schedule_message
from windtunnel.compiled.jit import inner
from windtunnel.compiled.records import Records, int64
from windtunnel.network.packet.kernel.endpoints import next_data_packet
from windtunnel.network.packet.kernel.queues import ARRIVE, SERVE, event, sending_ps
from windtunnel.network.packet.kernel.state import NONE, Packet, PacketLink, PacketState
from windtunnel.network.packet.kernel.switch import head_start_ps, leave_switch


@inner
def serve(state: PacketState, number: int) -> None:
    """Send what waits for link `number`: now if the link is idle, else once it is free."""
    packets, clock, link = state.packets, state.clock, state.links[number]
    now_ps = clock.calendar[0].now_ps
    if link.is_due:
        return
    if link.free_ps > now_ps:
        link.is_due = 1
        schedule(clock, link.free_ps, event(SERVE, number))
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
        schedule(clock, link.free_ps, event(SERVE, number))
    if link.sender < 0:
        schedule(clock, due_ps, event(ARRIVE, packet))
    else:
        schedule_message(clock, due_ps, event(ARRIVE, packet), link.sender)


@inner
def take_waiting(packets: Records[Packet], link: PacketLink) -> int:
    """Take the next packet that waits for a link: packets that overtake, then, unless the link is paused, its queue.

    Returns -1 if none waits.
    """
    packet = int64(NONE)
    if link.control_first >= 0:
        packet = int64(link.control_first)
        link.control_first = packets[packet].next
    elif not link.is_paused and link.queue_first >= 0:
        packet = int64(link.queue_first)
        link.queue_first = packets[packet].next
        link.queue_bytes -= packets[packet].bytes
    return packet
