"""The packet loop: every packet on every link, with queues, pauses, marks, windows, rates and losses.

What makes it fast: a link that is idle sends a packet the moment that it arrives, without an event; an event serves a
link only while something waits there. A NIC takes its connections in turn from a list of those that may send, so that
the thousands that wait cost nothing. A data packet becomes its own acknowledgement. The calendar costs the same however
much lies on it.

Time is in whole picoseconds and equal times go in the order of scheduling, so that a run can be repeated to the byte.
"""

import numpy as np

from windtunnel.kernels.calendar import NO_EVENT, is_empty, schedule, take_next
from windtunnel.kernels.congestion import acknowledged, dcqcn_decrease, dcqcn_increase, dcqcn_mark
from windtunnel.kernels.heap import meld
from windtunnel.kernels.jit import entry, inner
from windtunnel.kernels.packet_state import (
    ACK,
    ADAPTIVE,
    DATA,
    DCQCN,
    ECMP,
    GO_BACK_N,
    GPU,
    HPCC,
    IDLE,
    NACK,
    NONE,
    PAUSE,
    READY,
    RESUME,
    SELECTIVE_REPEAT,
    SWITCH,
    WAITING,
)

ARRIVE, SERVE, START, SEND, DECREASE, INCREASE, TIMEOUT, TRACE = range(8)
"""Kinds of events: a packet reaches the end of its link; a link has work and is free; a flow starts; a connection's
rate lets it send again; DCQCN's two timers; the retransmission timer; a look at the queues.
"""
KIND_BITS = 3
NUMBER_BITS = 28

DONE, MORE_EVENTS, MORE_PACKETS, MORE_CONNECTIONS, MORE_TRACE = range(5)
"""What `run` returns: nothing is left to happen; or a table is full: call again with a larger one."""

PAUSE_FRAME_BYTES = 64
CUT_THROUGH_BYTES = 64
"""A switch that cuts through decides once it has so much; a pause frame (IEEE 802.1Q) is a minimal Ethernet frame."""


@inner
def event(kind, number):
    """What to put on the calendar."""
    return np.int64(kind) | (np.int64(number) << KIND_BITS)


@inner
def timer(kind, number, generation):
    """An event of a connection that means nothing once another flow has taken the connection's record."""
    return event(kind, number) | (np.int64(generation) << (KIND_BITS + NUMBER_BITS))


@inner
def scramble(word):
    """MurmurHash3's 32-bit finaliser (Appleby); products in halves: nothing overflows without a compiler either."""
    for factor in (0x85EBCA6B, 0xC2B2AE35):
        word ^= word >> (16 if factor == 0x85EBCA6B else 13)
        word = (word * (factor & 0xFFFF) + (((word * (factor >> 16)) & 0xFFFF) << 16)) & 0xFFFFFFFF
    return word ^ (word >> 16)


@inner
def draw(settings, counters, link):
    """The next uniform number of a link: a hash of seed, link and count, so that it depends on no other link."""
    counters[0].num_draws += 1
    link.num_draws += 1
    word = scramble(np.int64(settings.seed) & 0xFFFFFFFF) ^ np.int64(link.name)
    return scramble(scramble(word) ^ np.int64(link.num_draws)) * (1.0 / 4294967296.0)


@inner
def sending_ps(settings, link, num_bytes):
    """How long a transmitter is busy with `num_bytes`."""
    if settings.tick_ps == 1:
        return np.int64(num_bytes * link.ps_per_byte + 0.5)
    return np.int64(num_bytes * link.ps_per_byte / settings.tick_ps) * settings.tick_ps


@inner
def enqueue(packets, link, packet):
    """Put a packet at the end of a link's queue."""
    packets[packet].next = NONE
    if link.queue_first < 0:
        link.queue_first = packet
    else:
        packets[link.queue_last].next = packet
    link.queue_last = packet
    link.queue_bytes += packets[packet].bytes
    if link.queue_bytes > link.most_queued_bytes:
        link.most_queued_bytes = link.queue_bytes


@inner
def overtake(packets, link, packet):
    """Put a packet at the end of those that overtake a link's queue."""
    packets[packet].next = NONE
    if link.control_first < 0:
        link.control_first = packet
    else:
        packets[link.control_last].next = packet
    link.control_last = packet


@inner
def make_ready(connections, link, number):
    """Give a connection a turn on its link: in this round, or in the next if its turn has passed."""
    connections[number].state = READY
    connections[number].left = NONE
    connections[number].right = NONE
    if connections[number].turn > link.last_turn:
        link.turns = meld(connections.turn, connections.left, connections.right, link.turns, number)
    else:
        link.next_turns = meld(connections.turn, connections.left, connections.right, link.next_turns, number)


@inner
def take_turn(connections, link):
    """The connection whose turn it is on a link, -1 if none may send. Rounds follow the order of starts, so that a new
    connection has its turn at the end of the round, as in the simulator of HPCC.
    """
    if link.turns < 0:
        link.turns = link.next_turns
        link.next_turns = NONE
    number = np.int64(link.turns)
    if number >= 0:
        connection = connections[number]
        link.turns = meld(
            connections.turn, connections.left, connections.right, np.int64(connection.left), np.int64(connection.right)
        )
        link.last_turn = connection.turn
        connection.state = IDLE
    return number


@inner
def take_packet(packets, counters, connections, number, kind, num_bytes):
    """A free packet, for connection `number` (or none); the loop sees to it that there is one."""
    packet = counters[0].free_packet
    counters[0].free_packet = packets[packet].next
    counters[0].num_free_packets -= 1
    packets[packet].connection = number
    packets[packet].kind = kind
    packets[packet].bytes = num_bytes
    packets[packet].is_marked = 0
    packets[packet].num_stamps = 0
    packets[packet].ingress = NONE
    if number >= 0:
        connections[number].num_packets += 1
    return packet


@inner
def free_packet(packets, counters, connections, packet):
    """Forget a packet, and its connection with the last of them."""
    number = packets[packet].connection
    packets[packet].next = counters[0].free_packet
    counters[0].free_packet = packet
    counters[0].num_free_packets += 1
    if number >= 0:
        connections[number].num_packets -= 1
        free_if_over(counters, connections, number)


@inner
def free_if_over(counters, connections, number):
    """Free a connection whose flow is complete, once nothing refers to it."""
    connection = connections[number]
    is_complete = connection.acked_byte >= connection.size_bytes
    if is_complete and connection.num_packets == 0 and connection.state != READY:
        connection.generation += 1
        connection.next = counters[0].free_connection
        counters[0].free_connection = number
        counters[0].num_free_connections += 1


# ------------------------------------------------------------------------------------------------------ buffers, pauses


@inner
def pfc_threshold(settings, link, node):
    """What one ingress may take of the shared buffer: a fraction of what is left of it, or of all of it."""
    free_bytes = node.shared_limit_bytes - (node.shared_bytes if settings.dynamic_pfc else 0)
    return free_bytes >> link.pfc_shift


@inner
def pause_frame(links, packets, counters, connections, events, heaps, buckets, calendar, number, kind):
    """Tell the transmitter of link `number` to stop or go on: a frame on the link's other direction."""
    packet = take_packet(packets, counters, connections, NONE, kind, PAUSE_FRAME_BYTES)
    packets[packet].link = number ^ 1
    back = links[number ^ 1]
    overtake(packets, back, packet)
    if not back.is_due:
        back.is_due = 1
        due_ps = max(calendar[0].now_ps, back.free_ps)
        schedule(events, heaps, buckets, calendar, due_ps, event(SERVE, number ^ 1))


@inner
def admit(settings, links, nodes, packets, counters, connections, events, heaps, buckets, calendar, number, num_bytes):
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
            pause_frame(links, packets, counters, connections, events, heaps, buckets, calendar, number, PAUSE)
    return True


@inner
def leave_buffer(
    settings, links, nodes, packets, counters, connections, events, heaps, buckets, calendar, number, num_bytes
):
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
            pause_frame(links, packets, counters, connections, events, heaps, buckets, calendar, number, RESUME)


@inner
def is_congested(settings, counters, link):
    """Whether a packet that leaves gets a mark, by the queue that it leaves behind (random early detection)."""
    if link.queue_bytes > link.ecn_max_bytes:
        return True
    if link.queue_bytes <= link.ecn_min_bytes:
        return False
    over = (link.queue_bytes - link.ecn_min_bytes) / (link.ecn_max_bytes - link.ecn_min_bytes)
    return draw(settings, counters, link) < over * link.ecn_max_probability


# -------------------------------------------------------------------------------------------------------------- sending


@inner
def window_bytes(settings, connection):
    """What may be in flight: in proportion to the rate, as HPCC's authors do it, or fixed."""
    window = connection.window_bytes
    if window == 0:
        return np.int64(2**62)
    if settings.window_follows_rate and connection.rate < connection.max_rate:
        window = max(1, np.int64(window * connection.rate / connection.max_rate))
    return np.int64(window)


@inner
def bit_of(settings, sacks, byte):
    """Word and mask of the packet that begins at `byte`, in a connection's ring of bits."""
    position = (byte // settings.payload_bytes) % (sacks.shape[1] * 64)
    return position >> 6, np.uint64(1) << np.uint64(position & 63)


@inner
def next_gap(settings, sacks, connection, number):
    """Selective repeat: the first byte to send again, or -1."""
    byte = max(connection.retry_byte, connection.acked_byte)
    while byte < connection.retry_end_byte:
        word, mask = bit_of(settings, sacks, byte)
        if sacks[number, word] & mask == 0:
            connection.retry_byte = byte
            return byte
        byte += settings.payload_bytes
    connection.retry_byte = byte
    return np.int64(-1)


@inner
def may_send(settings, sacks, connection, number):
    """Whether a connection has something to send and its window is open."""
    if settings.recovery == SELECTIVE_REPEAT and next_gap(settings, sacks, connection, number) >= 0:
        return True
    if connection.next_byte >= connection.size_bytes:
        return False
    return connection.next_byte - connection.acked_byte < window_bytes(settings, connection)


@inner
def wake(settings, links, connections, sacks, events, heaps, buckets, calendar, number):
    """Something changed for a connection: give it a turn, now or when its rate allows. Returns its link, or -1."""
    connection = connections[number]
    if connection.state != IDLE or not may_send(settings, sacks, connection, number):
        return np.int64(NONE)
    if connection.next_send_ps > max(calendar[0].now_ps, links[connection.link].free_ps):
        connection.state = WAITING
        what = timer(SEND, number, connection.generation)
        schedule(events, heaps, buckets, calendar, connection.next_send_ps, what)
        return np.int64(NONE)
    make_ready(connections, links[connection.link], number)
    return np.int64(connection.link)


@inner
def next_data_packet(
    settings, flows, send_queues, connections, packets, paths, sacks, counters, events, heaps, buckets, calendar, link
):
    """The next packet of the connections that may send on `link`, which take turns; -1 if none has one."""
    while True:
        number = take_turn(connections, link)
        if number < 0:
            return number
        connection = connections[number]
        if not may_send(settings, sacks, connection, number):
            free_if_over(counters, connections, number)
            continue
        byte = np.int64(-1)
        if settings.recovery == SELECTIVE_REPEAT:
            byte = next_gap(settings, sacks, connection, number)
        if byte >= 0:
            connection.retry_byte = byte + settings.payload_bytes
            counters[0].num_repeated_packets += 1
        else:
            byte = connection.next_byte
            if byte < connection.highest_byte:
                counters[0].num_repeated_packets += 1
            connection.next_byte = min(byte + settings.payload_bytes, connection.size_bytes)
        num_bytes = min(settings.payload_bytes, connection.size_bytes - byte) + settings.header_bytes
        free_ps = calendar[0].now_ps + sending_ps(settings, link, num_bytes)
        if connection.next_byte > connection.highest_byte:
            connection.highest_byte = connection.next_byte
            if connection.next_byte == connection.size_bytes:
                sent(flows, send_queues, events, heaps, buckets, calendar, connection.flow, free_ps)
        counters[0].num_data_packets += 1
        packet = take_packet(packets, counters, connections, number, DATA, num_bytes)
        packets[packet].byte = byte
        packets[packet].sent_ps = calendar[0].now_ps
        packets[packet].link = connection.link
        packets[packet].hop = paths[flows[connection.flow].path]
        packets[packet].last_hop = paths[flows[connection.flow].path + 1] - 1
        if connection.rate < connection.max_rate:
            connection.next_send_ps = calendar[0].now_ps + np.int64(num_bytes * 1e12 / connection.rate + 0.5)
        else:
            connection.next_send_ps = free_ps
        if may_send(settings, sacks, connection, number):
            if connection.next_send_ps > free_ps:
                connection.state = WAITING
                what = timer(SEND, number, connection.generation)
                schedule(events, heaps, buckets, calendar, connection.next_send_ps, what)
            else:
                make_ready(connections, link, number)
        return np.int64(packet)


@inner
def leave_switch(
    settings, links, nodes, packets, counters, connections, stamps, events, heaps, buckets, calendar, link, packet
):
    """A forwarded packet begins to leave over `link`: buffers, marks, telemetry."""
    ingress = packets[packet].ingress
    if ingress < 0:
        return
    packets[packet].ingress = NONE
    num_bytes = packets[packet].bytes
    leave_buffer(
        settings, links, nodes, packets, counters, connections, events, heaps, buckets, calendar, ingress, num_bytes
    )
    if packets[packet].kind == DATA:
        if settings.has_ecn and not packets[packet].is_marked and is_congested(settings, counters, link):
            packets[packet].is_marked = 1
            link.num_marks += 1
        if settings.congestion == HPCC and packets[packet].num_stamps < stamps.shape[1]:
            stamp = stamps[packet, packets[packet].num_stamps]
            stamp.time_ps = calendar[0].now_ps
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


# ------------------------------------------------------------------------------------------------------------ receiving


@inner
def receive_data(settings, connections, packets, sacks, packet):
    """A data packet at its destination. Returns the kind of its answer, or -1 for none."""
    number = packets[packet].connection
    connection = connections[number]
    byte = packets[packet].byte
    packets[packet].selected_byte = byte
    end = min(byte + settings.payload_bytes, connection.size_bytes)
    answer = ACK
    if byte == connection.expected_byte:
        connection.expected_byte = end
        if settings.recovery == SELECTIVE_REPEAT:
            collect_arrived(settings, connection, sacks, number)
        unreported = connection.expected_byte - connection.reported_byte
        is_last = connection.expected_byte >= connection.size_bytes
        if unreported < settings.ack_interval_bytes and not is_last and not packets[packet].is_marked:
            return NONE
    elif byte > connection.expected_byte:
        if settings.recovery == SELECTIVE_REPEAT:
            word, mask = bit_of(settings, sacks, byte)
            sacks[number + sacks.shape[0] // 2, word] |= mask
        else:
            if connection.refused_byte == connection.expected_byte:
                return NONE
            connection.refused_byte = connection.expected_byte
            answer = NACK
    packets[packet].byte = connection.expected_byte
    connection.reported_byte = connection.expected_byte
    return answer


@inner
def collect_arrived(settings, connection, sacks, number):
    """Selective repeat: pass over what came before its turn."""
    row = number + sacks.shape[0] // 2
    while connection.expected_byte < connection.size_bytes:
        word, mask = bit_of(settings, sacks, connection.expected_byte)
        if sacks[row, word] & mask == 0:
            return
        sacks[row, word] &= ~mask
        connection.expected_byte = min(connection.expected_byte + settings.payload_bytes, connection.size_bytes)


@inner
def receive_answer(settings, connection, sacks, calendar, number, byte, selected_byte, kind):
    """An acknowledgement up to `byte` that answers the packet at `selected_byte`."""
    if byte > connection.acked_byte:
        if settings.recovery == SELECTIVE_REPEAT:
            passed = connection.acked_byte
            while passed < byte:
                word, mask = bit_of(settings, sacks, passed)
                sacks[number, word] &= ~mask
                passed += settings.payload_bytes
        connection.acked_byte = byte
        connection.progress_ps = calendar[0].now_ps
        if connection.next_byte < byte:
            connection.next_byte = byte
    if settings.recovery == GO_BACK_N:
        if kind == NACK:
            connection.next_byte = connection.acked_byte
    elif selected_byte >= connection.acked_byte and selected_byte < connection.size_bytes:
        word, mask = bit_of(settings, sacks, selected_byte)
        sacks[number, word] |= mask
        lost_end = selected_byte - settings.reordering_packets * settings.payload_bytes
        connection.retry_end_byte = max(connection.retry_end_byte, lost_end)


@inner
def start_when_free(flows, events, heaps, buckets, calendar, flow, free_ps):
    """Let a flow whose parents are complete start once its send queue is free, at `free_ps`."""
    due_ps = max(flows[flow].ready_ps + flows[flow].delay_ps, flows[flow].start_ps, free_ps, calendar[0].now_ps)
    schedule(events, heaps, buckets, calendar, due_ps, event(START, flow))


@inner
def release(flows, send_queues, events, heaps, buckets, calendar, flow):
    """A flow waits for no other any more: it takes its turn in its send queue."""
    queue = send_queues[flows[flow].queue]
    if queue.is_busy:
        flows[flow].next = NONE
        if queue.first < 0:
            queue.first = flow
        else:
            flows[queue.last].next = flow
        queue.last = flow
        return
    queue.is_busy = 1
    start_when_free(flows, events, heaps, buckets, calendar, flow, queue.free_ps)


@inner
def sent(flows, send_queues, events, heaps, buckets, calendar, flow, free_ps):
    """The last byte of a flow has left at `free_ps`: the next one of its send queue may."""
    flows[flow].sent_ps = free_ps
    queue = send_queues[flows[flow].queue]
    queue.free_ps = free_ps
    if queue.first < 0:
        queue.is_busy = 0
        return
    follower = queue.first
    queue.first = flows[follower].next
    start_when_free(flows, events, heaps, buckets, calendar, follower, free_ps)


@inner
def complete(flows, send_queues, children_start, children, counters, events, heaps, buckets, calendar, flow):
    """A flow is complete: note it, and release what waited for it."""
    flows[flow].finish_ps = calendar[0].now_ps
    counters[0].num_finished += 1
    for position in range(children_start[flow], children_start[flow + 1]):
        child = children[position]
        flows[child].ready_ps = calendar[0].now_ps
        flows[child].parents_left -= 1
        if flows[child].parents_left == 0:
            release(flows, send_queues, events, heaps, buckets, calendar, child)


# -------------------------------------------------------------------------------------------------------------- routing


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


@entry
def measure_distances(destinations, pointer, neighbor, kind, gpus_forward, reached, distances):
    """Hops to each of `destinations` from every node that may be on the way; others keep what they have."""
    for row in range(destinations.size):
        distances[row, destinations[row]] = 0
        reached[0] = destinations[row]
        first, last = 0, 1
        while first < last:
            node = reached[first]
            first += 1
            for position in range(pointer[node], pointer[node + 1]):
                other = neighbor[position]
                if distances[row, other] <= distances[row, node] + 1:
                    continue
                if kind[other] == GPU and not gpus_forward:
                    continue
                distances[row, other] = distances[row, node] + 1
                reached[last] = other
                last += 1


@inner
def _root(group, item):
    while group[item] != item:
        group[item] = group[group[item]]
        item = group[item]
    return item


@inner
def _join(group, a, b):
    a, b = _root(group, a), _root(group, b)
    group[max(a, b)] = min(a, b)


@entry
def find_groups(flows, parent_ptr, parent, paths, path_links, replies, reply_links, num_queues, group):
    """Which flows may influence each other: those that share a link, a send queue or an ancestor, or begin in turn.

    Args:
        group: (flows + links + send queues,) left with the least flow that each is joined to.
    """
    first_queue = group.size - num_queues
    for item in range(group.size):
        group[item] = item
    for flow in range(flows.size):
        _join(group, flow, first_queue + flows[flow].queue)
        if flows[flow].follower >= 0:
            _join(group, flow, np.int64(flows[flow].follower))
        for position in range(parent_ptr[flow], parent_ptr[flow + 1]):
            _join(group, flow, np.int64(parent[position]))
        for position in range(paths[flows[flow].path], paths[flows[flow].path + 1]):
            _join(group, flow, flows.size + (path_links[position] >> 1))
        for position in range(replies[flows[flow].reply], replies[flows[flow].reply + 1]):
            _join(group, flow, flows.size + (reply_links[position] >> 1))
    for item in range(group.size):
        group[item] = _root(group, item)


# ----------------------------------------------------------------------------------------------------------------- loop


@entry
def run(
    settings,
    links,
    nodes,
    flows,
    send_queues,
    children_start,
    children,
    paths,
    path_links,
    replies,
    reply_links,
    neighbor_start,
    neighbor_links,
    distances,
    connections,
    packets,
    stamps,
    seen,
    sacks,
    traced,
    trace,
    counters,
    events,
    heaps,
    buckets,
    calendar,
):
    """Simulate until nothing is left to happen, or a table is full; then call again.

    Args:
        paths, path_links: where each path begins, and its links, first to last; `replies` those of acknowledgements.
        neighbor_start, neighbor_links: each node's outgoing links; `distances[row, node]` the hops to a destination.
            Read where packets choose their way.
        stamps, seen: (packets, hops), (connections, hops) `STAMP`, for HPCC.
        sacks: (2 x connections, words) rings of bits, senders' then receivers', for selective repeat.
        traced, trace: links whose queues are looked at; (rows, 1 + links) time in picoseconds, then bytes.
    """
    if not counters[0].has_begun:
        counters[0].has_begun = 1
        for flow in range(flows.size):
            if flows[flow].parents_left == 0:
                release(flows, send_queues, events, heaps, buckets, calendar, flow)
        if settings.trace_interval_ps > 0:
            schedule(events, heaps, buckets, calendar, 0, event(TRACE, 0))
    while True:
        if calendar[0].num_free < settings.most_children + 8:
            return MORE_EVENTS
        if counters[0].num_free_packets < 4:
            return MORE_PACKETS
        if counters[0].num_free_connections < 1:
            return MORE_CONNECTIONS
        if settings.trace_interval_ps > 0 and counters[0].num_trace_rows == trace.shape[0]:
            return MORE_TRACE
        what = take_next(events, heaps, buckets, calendar)
        if what == NO_EVENT:
            return DONE
        now_ps = calendar[0].now_ps
        counters[0].num_events += 1
        kind = what & ((1 << KIND_BITS) - 1)
        number = (what >> KIND_BITS) & ((1 << NUMBER_BITS) - 1)
        generation = what >> (KIND_BITS + NUMBER_BITS)
        served = np.int64(NONE)
        completed = np.int64(NONE)
        awake = np.int64(NONE)
        freed = np.int64(NONE)

        if kind == SERVE:
            links[number].is_due = 0
            served = number

        elif kind == ARRIVE:
            packet = number
            over = np.int64(packets[packet].link)
            link = links[over]
            packet_kind = packets[packet].kind
            if packet_kind >= PAUSE:
                held = links[over ^ 1]
                if packet_kind == PAUSE:
                    held.is_paused = 1
                    held.paused_since_ps = now_ps
                else:
                    held.is_paused = 0
                    held.paused_ps += now_ps - held.paused_since_ps
                    served = over ^ 1
                freed = packet
            elif link.error_fraction > 0.0 and draw(settings, counters, link) < link.error_fraction:
                link.num_drops += 1
                freed = packet
            elif packets[packet].hop < packets[packet].last_hop:
                # On the way: into the buffer of the node, and onward.
                is_admitted = True
                if nodes[link.target].kind == SWITCH:
                    num_bytes = packets[packet].bytes
                    is_admitted = admit(
                        settings,
                        links,
                        nodes,
                        packets,
                        counters,
                        connections,
                        events,
                        heaps,
                        buckets,
                        calendar,
                        over,
                        num_bytes,
                    )
                    packets[packet].ingress = over
                if not is_admitted:
                    link.num_drops += 1
                    freed = packet
                else:
                    packets[packet].hop += 1
                    if packet_kind != DATA:
                        served = np.int64(reply_links[packets[packet].hop])
                    elif settings.routing == ECMP:
                        served = np.int64(path_links[packets[packet].hop])
                    else:
                        row = flows[connections[packets[packet].connection].flow].target_row
                        served = choose_link(
                            settings, links, counters, neighbor_start, neighbor_links, distances, link.target, row, over
                        )
                    packets[packet].link = served
                    if packet_kind != DATA and settings.ack_first:
                        overtake(packets, links[served], packet)
                    else:
                        enqueue(packets, links[served], packet)
            elif packet_kind == DATA:
                # At the destination: the packet turns into its answer.
                owner = packets[packet].connection
                flow = connections[owner].flow
                answer = receive_data(settings, connections, packets, sacks, packet)
                if not settings.completes_on_ack and not connections[owner].is_complete:
                    if connections[owner].expected_byte >= connections[owner].size_bytes:
                        connections[owner].is_complete = 1
                        completed = np.int64(flow)
                if answer < 0:
                    freed = packet
                else:
                    packets[packet].kind = answer
                    packets[packet].bytes = settings.ack_bytes
                    packets[packet].ingress = NONE
                    reply = flows[flow].reply
                    packets[packet].hop = replies[reply]
                    packets[packet].last_hop = replies[reply + 1] - 1
                    served = np.int64(reply_links[replies[reply]])
                    packets[packet].link = served
                    enqueue(packets, links[served], packet)
            else:
                # An answer at the sender.
                owner = np.int64(packets[packet].connection)
                connection = connections[owner]
                flow = connection.flow
                if connection.acked_byte < connection.size_bytes:
                    byte = packets[packet].byte
                    selected = packets[packet].selected_byte
                    receive_answer(settings, connection, sacks, calendar, owner, byte, selected, packet_kind)
                    if connection.acked_byte >= connection.size_bytes:
                        if not connection.is_complete:
                            connection.is_complete = 1
                            completed = np.int64(flow)
                    elif settings.congestion == DCQCN:
                        if packets[packet].is_marked:
                            due_ps = dcqcn_mark(settings, connection, now_ps)
                            if due_ps >= 0:
                                what = timer(DECREASE, owner, connection.generation)
                                schedule(events, heaps, buckets, calendar, due_ps, what)
                    else:
                        acknowledged(
                            settings,
                            connection,
                            byte,
                            packets[packet].is_marked,
                            now_ps - packets[packet].sent_ps,
                            stamps,
                            packet,
                            packets[packet].num_stamps,
                            seen,
                            owner,
                        )
                    awake = np.int64(owner)
                freed = packet

        elif kind == START:
            flow = number
            flows[flow].start_ps = now_ps
            follower = flows[flow].follower
            if follower >= 0:
                flows[follower].parents_left -= 1
                if flows[follower].parents_left == 0:
                    release(flows, send_queues, events, heaps, buckets, calendar, follower)
            path = flows[flow].path
            if flows[flow].size_bytes == 0 or paths[path] == paths[path + 1]:
                sent(flows, send_queues, events, heaps, buckets, calendar, flow, now_ps)
                completed = np.int64(flow)
            else:
                owner = counters[0].free_connection
                connection = connections[owner]
                counters[0].free_connection = connection.next
                counters[0].num_free_connections -= 1
                link = links[path_links[paths[path]]]
                begin(settings, connection, sacks, flows[flow], flow, owner, link, now_ps)
                connection.turn = counters[0].num_started
                counters[0].num_started += 1
                connection.link = path_links[paths[path]]
                if settings.timeout_ps > 0:
                    what = timer(TIMEOUT, owner, connection.generation)
                    schedule(events, heaps, buckets, calendar, now_ps + settings.timeout_ps, what)
                awake = np.int64(owner)

        elif kind == TRACE:
            row = counters[0].num_trace_rows
            trace[row, 0] = now_ps
            for position in range(traced.size):
                trace[row, 1 + position] = links[traced[position]].queue_bytes
            counters[0].num_trace_rows = row + 1
            if not is_empty(calendar):
                schedule(events, heaps, buckets, calendar, now_ps + settings.trace_interval_ps, event(TRACE, 0))

        elif connections[number].generation == generation:
            connection = connections[number]
            if kind == SEND:
                connection.state = IDLE
            elif kind == DECREASE:
                dcqcn_decrease(settings, connection, now_ps)
                if not connection.is_increase_due:
                    connection.is_increase_due = 1
                    what = timer(INCREASE, number, generation)
                    schedule(events, heaps, buckets, calendar, connection.increase_ps, what)
            elif kind == INCREASE:
                if now_ps >= connection.increase_ps:
                    dcqcn_increase(settings, connection, now_ps)
                schedule(events, heaps, buckets, calendar, connection.increase_ps, timer(INCREASE, number, generation))
            elif kind == TIMEOUT:
                is_stuck = now_ps - connection.progress_ps >= settings.timeout_ps
                if is_stuck and connection.next_byte > connection.acked_byte:
                    if settings.recovery == GO_BACK_N:
                        connection.next_byte = connection.acked_byte
                    else:
                        connection.retry_byte = connection.acked_byte
                        connection.retry_end_byte = connection.next_byte
                    connection.progress_ps = now_ps
                elif is_stuck:
                    connection.progress_ps = now_ps
                due_ps = connection.progress_ps + settings.timeout_ps
                schedule(events, heaps, buckets, calendar, due_ps, timer(TIMEOUT, number, generation))
            awake = np.int64(number)

        if freed >= 0:
            free_packet(packets, counters, connections, freed)
        if completed >= 0:
            complete(
                flows, send_queues, children_start, children, counters, events, heaps, buckets, calendar, completed
            )
        if awake >= 0:
            served = wake(settings, links, connections, sacks, events, heaps, buckets, calendar, awake)

        # At most one link has new work: it sends now if it is idle, or when it is free.
        if served < 0 or links[served].is_due:
            continue
        link = links[served]
        if link.free_ps > now_ps:
            link.is_due = 1
            schedule(events, heaps, buckets, calendar, link.free_ps, event(SERVE, served))
            continue
        if link.control_first >= 0:
            packet = np.int64(link.control_first)
            link.control_first = packets[packet].next
        elif link.is_paused:
            continue
        elif link.queue_first >= 0:
            packet = np.int64(link.queue_first)
            link.queue_first = packets[packet].next
            link.queue_bytes -= packets[packet].bytes
        else:
            packet = next_data_packet(
                settings,
                flows,
                send_queues,
                connections,
                packets,
                paths,
                sacks,
                counters,
                events,
                heaps,
                buckets,
                calendar,
                link,
            )
            if packet < 0:
                continue
        leave_switch(
            settings,
            links,
            nodes,
            packets,
            counters,
            connections,
            stamps,
            events,
            heaps,
            buckets,
            calendar,
            link,
            packet,
        )
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
            schedule(events, heaps, buckets, calendar, link.free_ps, event(SERVE, served))
        schedule(events, heaps, buckets, calendar, due_ps, event(ARRIVE, packet))


@inner
def begin(settings, connection, sacks, record, flow, number, link, now_ps):
    """Make a free connection that of `flow`."""
    connection.flow = flow
    connection.state = IDLE
    connection.num_packets = 0
    connection.is_complete = 0
    connection.is_decrease_due = 0
    connection.size_bytes = record.size_bytes
    connection.window_bytes = record.window_bytes
    connection.base_rtt_ps = record.base_rtt_ps
    connection.next_byte = 0
    connection.acked_byte = 0
    connection.expected_byte = 0
    connection.reported_byte = 0
    connection.refused_byte = -1
    connection.retry_byte = 0
    connection.retry_end_byte = 0
    connection.highest_byte = 0
    connection.progress_ps = now_ps
    connection.next_send_ps = now_ps
    connection.max_rate = 1e12 / link.ps_per_byte
    connection.rate = connection.max_rate
    connection.target_rate = connection.max_rate
    connection.alpha = 1.0
    connection.utilisation = 1.0
    connection.rtt_difference_ps = 0.0
    connection.last_rtt_ps = 0
    connection.update_byte = 0
    connection.congested_byte = 0
    connection.num_marks = 0
    connection.num_batch = 0
    connection.stage = 0
    connection.first_mark_ps = -1
    connection.num_alpha_updates = 0
    connection.is_marked_for_alpha = 0
    connection.is_marked_for_rate = 0
    connection.increase_ps = 0
    connection.is_increase_due = 0
    if settings.recovery == SELECTIVE_REPEAT:
        half = sacks.shape[0] // 2
        for word in range(sacks.shape[1]):
            sacks[number, word] = 0
            sacks[number + half, word] = 0
