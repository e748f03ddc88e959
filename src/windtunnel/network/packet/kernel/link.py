"""What a link's transmitter does: the next packet in order of precedence, and when it will have arrived."""

import numpy as np

from windtunnel.compiled.calendar import schedule, schedule_message
from windtunnel.compiled.jit import inner
from windtunnel.network.packet.kernel.endpoints import next_data_packet
from windtunnel.network.packet.kernel.queues import (
    ARRIVE,
    SERVE,
    event,
    sending_ps,
)
from windtunnel.network.packet.kernel.state import DATA, NONE
from windtunnel.network.packet.kernel.switch import head_start_ps, leave_switch


@inner
def serve(
    settings,
    links,
    nodes,
    flows,
    send_queues,
    connections,
    packets,
    stamps,
    sacks,
    paths,
    path_links,
    reply_links,
    counters,
    clock,
    number,
):
    """Send what waits for link `number`: now if it is idle, or when it is free."""
    link = links[number]
    now_ps = clock.calendar[0].now_ps
    if link.is_due:
        return
    if link.free_ps > now_ps:
        link.is_due = 1
        schedule(clock, link.free_ps, event(SERVE, number))
        return
    packet = take_waiting(packets, link)
    if packet < 0 and not link.is_paused:
        packet = next_data_packet(
            settings, flows, send_queues, connections, packets, paths, sacks, counters, clock, link
        )
    if packet < 0:
        return
    leave_switch(settings, links, nodes, packets, counters, connections, stamps, clock, link, packet)
    busy_ps = sending_ps(settings, link, packets[packet].bytes)
    link.free_ps = now_ps + busy_ps
    link.sent_bytes += packets[packet].bytes
    due_ps = link.free_ps + link.latency_ps
    if settings.cut_through:
        way = path_links if packets[packet].kind == DATA else reply_links
        due_ps -= head_start_ps(settings, links, nodes, packets, way, packet, link, busy_ps)
    has_more = not link.is_paused and (link.queue_first >= 0 or link.turns >= 0 or link.next_turns >= 0)
    if has_more or link.control_first >= 0 or settings.tick_ps > 1:
        link.is_due = 1
        schedule(clock, link.free_ps, event(SERVE, number))
    if link.sender < 0:
        schedule(clock, due_ps, event(ARRIVE, packet))
    else:
        schedule_message(clock, due_ps, event(ARRIVE, packet), link.sender)


@inner
def take_waiting(packets, link):
    """The next packet that waits for a link: pause frames and others that overtake, then, if it is not paused, the
    queue; -1 if none does.
    """
    packet = np.int64(NONE)
    if link.control_first >= 0:
        packet = np.int64(link.control_first)
        link.control_first = packets[packet].next
    elif not link.is_paused and link.queue_first >= 0:
        packet = np.int64(link.queue_first)
        link.queue_first = packets[packet].next
        link.queue_bytes -= packets[packet].bytes
    return packet
