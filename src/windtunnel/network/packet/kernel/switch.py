"""What a switch does to a packet: admit it into the buffer, pause who fills it, mark, choose the way, cut through."""

import numpy as np

from windtunnel.compiled.calendar import schedule
from windtunnel.compiled.jit import inner
from windtunnel.network.packet.kernel.queues import (
    SERVE,
    draw,
    enqueue,
    event,
    note_sender,
    overtake,
    sending_ps,
    take_packet,
)
from windtunnel.network.packet.kernel.state import (
    ADAPTIVE,
    DATA,
    ECMP,
    GPU,
    HPCC,
    NONE,
    PAUSE,
    RESUME,
    SWITCH,
)

PAUSE_FRAME_BYTES = 64
CUT_THROUGH_BYTES = 64
"""A switch that cuts through decides once it has so much; a pause frame (IEEE 802.1Q) is a minimal Ethernet frame."""


@inner
def forward(
    settings,
    links,
    nodes,
    flows,
    connections,
    packets,
    counters,
    path_links,
    reply_links,
    neighbor_start,
    neighbor_links,
    distances,
    clock,
    packet,
    over,
):
    """A packet on its way came over link `over`: into the node's buffer, and into the queue of its next link, which is
    returned; -1 if it is dropped.
    """
    link = links[over]
    if nodes[link.target].kind == SWITCH:
        num_bytes = packets[packet].bytes
        if not admit(settings, links, nodes, packets, counters, connections, clock, over, num_bytes):
            link.num_drops += 1
            return np.int64(NONE)
        packets[packet].ingress = over
    packets[packet].hop += 1
    is_data = packets[packet].kind == DATA
    if not is_data:
        onward = np.int64(reply_links[packets[packet].hop])
    elif settings.routing == ECMP:
        onward = np.int64(path_links[packets[packet].hop])
    else:
        row = flows[connections[packets[packet].connection].flow].target_row
        onward = choose_link(
            settings, links, counters, neighbor_start, neighbor_links, distances, link.target, row, over
        )
    packets[packet].link = onward
    if link.sender >= 0:
        note_sender(counters, links[onward], clock.calendar[0].now_ps, link.sender)
    if not is_data and settings.ack_first:
        overtake(packets, links[onward], packet)
    else:
        enqueue(packets, links[onward], packet)
    return onward


@inner
def pause_or_resume(links, kind, number, now_ps):
    """A pause frame or its end reaches the transmitter of link `number`, which is returned if it may go on, else -1."""
    link = links[number]
    if kind == PAUSE:
        link.is_paused = 1
        link.paused_since_ps = now_ps
        return np.int64(NONE)
    link.is_paused = 0
    link.paused_ps += now_ps - link.paused_since_ps
    return np.int64(number)


@inner
def pfc_threshold(settings, link, node):
    """What one ingress may take of the shared buffer: a fraction of what is left of it, or of all of it."""
    free_bytes = node.shared_limit_bytes - (node.shared_bytes if settings.dynamic_pfc else 0)
    return free_bytes >> link.pfc_shift


@inner
def pause_frame(links, packets, counters, connections, clock, number, kind):
    """Tell the transmitter of link `number` to stop or go on: a frame on the link's other direction."""
    packet = take_packet(packets, counters, connections, NONE, kind, PAUSE_FRAME_BYTES)
    packets[packet].link = number ^ 1
    back = links[number ^ 1]
    overtake(packets, back, packet)
    if not back.is_due:
        back.is_due = 1
        due_ps = max(clock.calendar[0].now_ps, back.free_ps)
        schedule(clock, due_ps, event(SERVE, number ^ 1))


@inner
def admit(settings, links, nodes, packets, counters, connections, clock, number, num_bytes):
    """Account for a packet that link `number` brought into a switch, and pause its sender; False if there is no room.

    Reserve, then a dynamic share of the common buffer, then headroom (Choudhury and Hahne, "Dynamic Queue Length
    Thresholds for Shared-Memory Packet Switches", 1998; IEEE 802.1Qbb), with the bookkeeping of the simulator of HPCC.
    """
    link = links[number]
    node = nodes[link.target]
    share = max(0, link.ingress_bytes - settings.reserve_bytes)
    threshold = pfc_threshold(settings, link, node)
    headroom_bytes = link.headroom_limit_bytes if settings.has_pfc else 0
    if num_bytes + link.headroom_bytes > headroom_bytes and num_bytes + share > threshold:
        return False
    after = link.ingress_bytes + num_bytes
    if after <= settings.reserve_bytes:
        link.ingress_bytes = after
    elif after - settings.reserve_bytes > threshold:
        link.headroom_bytes += num_bytes
    else:
        link.ingress_bytes = after
        node.shared_bytes += min(num_bytes, after - settings.reserve_bytes)
        if node.shared_bytes > node.most_shared_bytes:
            node.most_shared_bytes = node.shared_bytes
    if settings.has_pfc and not link.has_paused:
        share = max(0, link.ingress_bytes - settings.reserve_bytes)
        if link.headroom_bytes > 0 or share >= pfc_threshold(settings, link, node):
            link.has_paused = 1
            link.num_pauses += 1
            pause_frame(links, packets, counters, connections, clock, number, PAUSE)
    return True


@inner
def leave_buffer(settings, links, nodes, packets, counters, connections, clock, number, num_bytes):
    """A packet that came over link `number` leaves the switch; its sender may go on once enough have."""
    link = links[number]
    node = nodes[link.target]
    from_headroom = min(link.headroom_bytes, num_bytes)
    share = max(0, link.ingress_bytes - settings.reserve_bytes)
    node.shared_bytes -= min(num_bytes - from_headroom, share)
    link.headroom_bytes -= from_headroom
    link.ingress_bytes -= num_bytes - from_headroom
    if link.has_paused and link.headroom_bytes == 0:
        share = max(0, link.ingress_bytes - settings.reserve_bytes)
        if share == 0 or share + settings.resume_offset_bytes <= pfc_threshold(settings, link, node):
            link.has_paused = 0
            pause_frame(links, packets, counters, connections, clock, number, RESUME)


@inner
def is_congested(settings, counters, link):
    """Whether a packet that leaves gets a mark, by the queue that it leaves behind (random early detection)."""
    if link.queue_bytes > link.ecn_max_bytes:
        return True
    if link.queue_bytes <= link.ecn_min_bytes:
        return False
    over = (link.queue_bytes - link.ecn_min_bytes) / (link.ecn_max_bytes - link.ecn_min_bytes)
    return draw(settings, counters, link) < over * link.ecn_max_probability


@inner
def leave_switch(settings, links, nodes, packets, counters, connections, stamps, clock, link, packet):
    """A forwarded packet begins to leave over `link`: buffers, marks, telemetry."""
    ingress = packets[packet].ingress
    if ingress < 0:
        return
    packets[packet].ingress = NONE
    num_bytes = packets[packet].bytes
    leave_buffer(settings, links, nodes, packets, counters, connections, clock, ingress, num_bytes)
    if packets[packet].kind == DATA:
        if settings.has_ecn and not packets[packet].is_marked and is_congested(settings, counters, link):
            packets[packet].is_marked = 1
            link.num_marks += 1
        if settings.congestion == HPCC and packets[packet].num_stamps < stamps.shape[1]:
            stamp = stamps[packet, packets[packet].num_stamps]
            stamp.time_ps = clock.calendar[0].now_ps
            stamp.sent_bytes = link.sent_bytes
            stamp.queue_bytes = link.queue_bytes
            stamp.bytes_per_s = 1e12 / link.ps_per_byte
            packets[packet].num_stamps += 1


@inner
def head_start_ps(settings, links, nodes, packets, way, packet, link, busy_ps):
    """How much before its last byte a packet may go on, at a switch that cuts through.

    The next link must not run dry: a faster one has to wait for the difference.
    """
    hop = packets[packet].hop
    if not settings.cut_through or packets[packet].kind >= PAUSE or hop == packets[packet].last_hop:
        return np.int64(0)
    if nodes[link.target].kind == GPU:
        return np.int64(0)
    onward_ps = busy_ps
    if settings.routing == ECMP or packets[packet].kind != DATA:
        onward_ps = sending_ps(settings, links[way[hop + 1]], packets[packet].bytes)
    wait_ps = max(sending_ps(settings, link, min(CUT_THROUGH_BYTES, packets[packet].bytes)), busy_ps - onward_ps)
    return busy_ps - wait_ps


@inner
def choose_link(settings, links, counters, neighbor_start, neighbor_links, distances, node, row, came_over):
    """The next link of a packet that chooses its way at `node`: among those on a shortest path to its destination, any
    one (spraying) or the one with the shortest queue (adaptive), ties broken at random.
    """
    best = np.int64(NONE)
    best_bytes = np.int64(2**62)
    num_best = 0
    here = distances[row, node]
    for position in range(neighbor_start[node], neighbor_start[node + 1]):
        number = np.int64(neighbor_links[position])
        if distances[row, links[number].target] != here - 1:
            continue
        queued = links[number].queue_bytes if settings.routing == ADAPTIVE else np.int64(0)
        if queued < best_bytes:
            best, best_bytes, num_best = number, queued, 1
        elif queued == best_bytes:
            num_best += 1
            if draw(settings, counters, links[came_over]) * num_best < 1.0:
                best = number
    return best
