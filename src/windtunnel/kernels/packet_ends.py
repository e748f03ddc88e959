"""What the two ends of a connection do: windows, losses and acknowledgements; and flows waiting for each other."""

import numpy as np

from windtunnel.kernels.calendar import schedule
from windtunnel.kernels.jit import inner
from windtunnel.kernels.packet_queues import (
    SEND,
    START,
    event,
    free_if_over,
    make_ready,
    sending_ps,
    take_packet,
    take_turn,
    timer,
)
from windtunnel.kernels.packet_state import ACK, DATA, EVERY, GO_BACK_N, IDLE, NACK, NONE, SELECTIVE_REPEAT, WAITING

REDUCING_PS = 30_000


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
def reducing_ps(flows, channels, flow):
    """How long SimAI's sender reduces what it has received before it sends: a write and two reads of 10 ns each.

    Source: `NcclTreeFlowModel::insert_packets` and `PacketBundle::call` of SimAI 1.6, a flag for all channels of a rank
    included.
    """
    channel = channels[flows[flow].channel]
    rank = channels[channel.rank]
    place = channel.num_released % channel.cycle
    channel.num_released += 1
    if place == 0:
        rank.is_reducing = 1 - rank.is_reducing
        return np.int64(0)
    reduces = flows[flow].reduction == EVERY or rank.is_reducing == 1
    return np.int64(REDUCING_PS) if reduces else np.int64(0)


@inner
def release(flows, channels, send_queues, events, heaps, buckets, calendar, flow):
    """A flow waits for no other any more: it takes its turn in its send queue."""
    if flows[flow].channel >= 0:
        flows[flow].delay_ps += reducing_ps(flows, channels, flow)
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
def complete(flows, channels, send_queues, children_start, children, counters, events, heaps, buckets, calendar, flow):
    """A flow is complete: note it, and release what waited for it."""
    flows[flow].finish_ps = calendar[0].now_ps
    counters[0].num_finished += 1
    for position in range(children_start[flow], children_start[flow + 1]):
        child = children[position]
        flows[child].ready_ps = calendar[0].now_ps
        flows[child].parents_left -= 1
        if flows[child].parents_left == 0:
            release(flows, channels, send_queues, events, heaps, buckets, calendar, child)


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
