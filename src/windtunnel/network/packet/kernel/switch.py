"""What a switch does to a packet: admit it to the buffer, pause its sender (PFC), mark it (ECN), forward it."""

from windtunnel.compiled.calendar import schedule
from windtunnel.compiled.jit import inner
from windtunnel.compiled.records import int64
from windtunnel.network.packet.kernel import codes
from windtunnel.network.packet.kernel.queues import draw, enqueue, event, note_sender, overtake, sending_ps, take_packet
from windtunnel.network.packet.kernel.state import PacketKernelSettings, PacketLink, PacketNode, PacketState

PAUSE_FRAME_BYTES = 64
"""A pause frame (IEEE 802.1Q) is a minimal Ethernet frame."""
CUT_THROUGH_BYTES = 64
"""What a switch that cuts through reads of a packet before it forwards the packet."""


@inner
def forward(state: PacketState, packet: int, over: int) -> int:
    """Put a packet that came over link `over` into the node's buffer and the queue of its next link.

    Returns that link; -1 if the packet is dropped.
    """
    links, packets, routes, settings = state.links, state.packets, state.routes, state.settings
    link = links[over]
    if state.nodes[link.target].kind == codes.SWITCH:
        if not admit(state, over, packets[packet].bytes):
            link.num_drops += 1
            return int64(codes.NONE)
        packets[packet].ingress = over
    packets[packet].hop += 1
    is_data = packets[packet].kind == codes.DATA
    if not is_data:
        onward = int64(routes.reply_links[packets[packet].hop])
    elif settings.routing == codes.ECMP:
        onward = int64(routes.path_links[packets[packet].hop])
    else:
        row = state.flows[state.connections[packets[packet].connection].flow].target_row
        onward = choose_link(state, link.target, row, over)
    packets[packet].link = onward
    if link.sender >= 0:
        note_sender(state, links[onward], link.sender)
    if not is_data and settings.acks_first:
        overtake(packets, links[onward], packet)
    else:
        enqueue(packets, links[onward], packet)
    return onward


@inner
def pause_or_resume(state: PacketState, kind: int, number: int) -> int:
    """Pause or resume the transmitter of link `number`; return the link if it may send, else -1."""
    now_ps = state.clock.calendar[0].now_ps
    link = state.links[number]
    if kind == codes.PAUSE:
        link.is_paused = 1
        link.paused_since_ps = now_ps
        return int64(codes.NONE)
    link.is_paused = 0
    link.paused_ps += now_ps - link.paused_since_ps
    return int64(number)


@inner
def pfc_threshold(settings: PacketKernelSettings, link: PacketLink, node: PacketNode) -> int:
    """Return the PFC threshold of an ingress in bytes: free (dynamic) or total (static) shared buffer / 2 ** shift."""
    free_bytes = node.shared_limit_bytes - (node.shared_bytes if settings.dynamic_pfc else 0)
    return free_bytes >> link.pfc_shift


@inner
def send_pause_frame(state: PacketState, number: int, kind: int) -> None:
    """Tell the transmitter of link `number` to pause or resume, by a frame on the link's other direction."""
    packet = take_packet(state, codes.NONE, kind, PAUSE_FRAME_BYTES)
    state.packets[packet].link = number ^ 1
    back = state.links[number ^ 1]
    overtake(state.packets, back, packet)
    if not back.is_due:
        back.is_due = 1
        due_ps = max(state.clock.calendar[0].now_ps, back.free_ps)
        schedule(state.clock, due_ps, event(codes.SERVE, number ^ 1))


@inner
def admit(state: PacketState, number: int, num_bytes: int) -> bool:
    """Account for a packet that link `number` brought into a switch, and pause its sender; False if there is no room.

    Reserve, then a dynamic share of the common buffer, then headroom (Choudhury and Hahne, "Dynamic Queue Length
    Thresholds for Shared-Memory Packet Switches", 1998; IEEE 802.1Qbb), with the bookkeeping of the simulator of HPCC.
    """
    settings, link = state.settings, state.links[number]
    node = state.nodes[link.target]
    share = max(0, link.ingress_bytes - settings.reserve_bytes)
    threshold = pfc_threshold(settings, link, node)
    headroom_bytes = link.headroom_limit_bytes if settings.pfc else 0
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
    if settings.pfc and not link.has_paused:
        share = max(0, link.ingress_bytes - settings.reserve_bytes)
        if link.headroom_bytes > 0 or share >= pfc_threshold(settings, link, node):
            link.has_paused = 1
            link.num_pauses += 1
            send_pause_frame(state, number, codes.PAUSE)
    return True


@inner
def leave_buffer(state: PacketState, number: int, num_bytes: int) -> None:
    """Take a packet that came over link `number` out of the buffer; resume its sender once enough have left."""
    settings, link = state.settings, state.links[number]
    node = state.nodes[link.target]
    from_headroom = min(link.headroom_bytes, num_bytes)
    share = max(0, link.ingress_bytes - settings.reserve_bytes)
    node.shared_bytes -= min(num_bytes - from_headroom, share)
    link.headroom_bytes -= from_headroom
    link.ingress_bytes -= num_bytes - from_headroom
    if link.has_paused and link.headroom_bytes == 0:
        share = max(0, link.ingress_bytes - settings.reserve_bytes)
        if share == 0 or share + settings.resume_offset_bytes <= pfc_threshold(settings, link, node):
            link.has_paused = 0
            send_pause_frame(state, number, codes.RESUME)


@inner
def is_congested(state: PacketState, link: PacketLink) -> bool:
    """Return whether a departing packet gets a mark, by the queue behind it (random early detection)."""
    if link.queue_bytes > link.ecn_max_bytes:
        return True
    if link.queue_bytes <= link.ecn_min_bytes:
        return False
    over = (link.queue_bytes - link.ecn_min_bytes) / (link.ecn_max_bytes - link.ecn_min_bytes)
    return draw(state, link) < over * link.ecn_max_probability


@inner
def leave_switch(state: PacketState, link: PacketLink, packet: int) -> None:
    """Send a forwarded packet over `link`: free its buffer, mark it, stamp it with telemetry."""
    settings, packets, stamps = state.settings, state.packets, state.stamps
    ingress = packets[packet].ingress
    if ingress < 0:
        return
    packets[packet].ingress = codes.NONE
    leave_buffer(state, ingress, packets[packet].bytes)
    if packets[packet].kind == codes.DATA:
        if settings.ecn and not packets[packet].is_marked and is_congested(state, link):
            packets[packet].is_marked = 1
            link.num_marks += 1
        if settings.congestion == codes.HPCC and packets[packet].num_stamps < stamps.shape[1]:
            stamp = stamps[packet, packets[packet].num_stamps]
            stamp.time_ps = state.clock.calendar[0].now_ps
            stamp.sent_bytes = link.sent_bytes
            stamp.queue_bytes = link.queue_bytes
            stamp.bytes_per_s = 1e12 / link.ps_per_byte
            packets[packet].num_stamps += 1


@inner
def head_start_ps(state: PacketState, packet: int, link: PacketLink, busy_ps: int) -> int:
    """Return how long before its last byte a packet may leave a switch that cuts through.

    The next link must not run dry: a faster one waits for the difference.
    """
    settings, packets, routes = state.settings, state.packets, state.routes
    hop = packets[packet].hop
    if not settings.cut_through or packets[packet].kind >= codes.PAUSE or hop == packets[packet].last_hop:
        return int64(0)
    if state.nodes[link.target].kind == codes.GPU:
        return int64(0)
    onward_ps = busy_ps
    if settings.routing == codes.ECMP or packets[packet].kind != codes.DATA:
        way = routes.path_links if packets[packet].kind == codes.DATA else routes.reply_links
        onward_ps = sending_ps(settings, state.links[way[hop + 1]], packets[packet].bytes)
    wait_ps = max(sending_ps(settings, link, min(CUT_THROUGH_BYTES, packets[packet].bytes)), busy_ps - onward_ps)
    return busy_ps - wait_ps


@inner
def choose_link(state: PacketState, node: int, row: int, came_over: int) -> int:
    """Choose the next link of a packet at `node` among the links on a shortest path to its destination.

    Any of them (spraying) or the one with the shortest queue (adaptive); ties are broken at random. `row` is the
    destination's row of the distances.
    """
    links, routes, distances = state.links, state.routes, state.routes.distances
    best = int64(codes.NONE)
    best_bytes = int64(2**62)
    num_best = 0
    here = distances[row, node]
    for position in range(routes.neighbor_start[node], routes.neighbor_start[node + 1]):
        number = int64(routes.neighbor_links[position])
        if distances[row, links[number].target] != here - 1:
            continue
        queued = links[number].queue_bytes if state.settings.routing == codes.ADAPTIVE else int64(0)
        if queued < best_bytes:
            best, best_bytes, num_best = number, queued, 1
        elif queued == best_bytes:
            num_best += 1
            if draw(state, links[came_over]) * num_best < 1.0:
                best = number
    return best
