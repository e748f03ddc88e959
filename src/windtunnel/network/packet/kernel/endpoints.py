"""What the two ends of a connection do: windows, rates, losses, acknowledgements and timers."""

import numpy as np

from windtunnel.compiled.calendar import schedule
from windtunnel.compiled.jit import inner
from windtunnel.network.packet.kernel.congestion import (
    acknowledged,
    dcqcn_decrease,
    dcqcn_increase,
    dcqcn_mark,
)
from windtunnel.network.packet.kernel.flows import release, sent
from windtunnel.network.packet.kernel.queues import (
    DECREASE,
    INCREASE,
    SEND,
    TIMEOUT,
    enqueue,
    free_if_over,
    make_ready,
    note_sender,
    sending_ps,
    take_packet,
    take_turn,
    timer,
)
from windtunnel.network.packet.kernel.state import (
    ACK,
    DATA,
    DCQCN,
    GO_BACK_N,
    IDLE,
    NACK,
    NONE,
    SELECTIVE_REPEAT,
    WAITING,
)


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
def wake(settings, links, connections, sacks, clock, number):
    """Something changed for a connection: give it a turn, now or when its rate allows. Returns its link, or -1."""
    connection = connections[number]
    if connection.state != IDLE or not may_send(settings, sacks, connection, number):
        return np.int64(NONE)
    if connection.next_send_ps > max(clock.calendar[0].now_ps, links[connection.link].free_ps):
        connection.state = WAITING
        what = timer(SEND, number, connection.generation)
        schedule(clock, connection.next_send_ps, what)
        return np.int64(NONE)
    make_ready(connections, links[connection.link], number)
    return np.int64(connection.link)


@inner
def next_data_packet(settings, flows, send_queues, connections, packets, paths, sacks, counters, clock, link):
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
        free_ps = clock.calendar[0].now_ps + sending_ps(settings, link, num_bytes)
        if connection.next_byte > connection.highest_byte:
            connection.highest_byte = connection.next_byte
            if connection.next_byte == connection.size_bytes:
                sent(flows, send_queues, clock, connection.flow, free_ps)
        counters[0].num_data_packets += 1
        packet = take_packet(packets, counters, connections, number, DATA, num_bytes)
        packets[packet].byte = byte
        packets[packet].sent_ps = clock.calendar[0].now_ps
        packets[packet].link = connection.link
        packets[packet].hop = paths[flows[connection.flow].path]
        packets[packet].last_hop = paths[flows[connection.flow].path + 1] - 1
        if connection.rate < connection.max_rate:
            connection.next_send_ps = clock.calendar[0].now_ps + np.int64(num_bytes * 1e12 / connection.rate + 0.5)
        else:
            connection.next_send_ps = free_ps
        if may_send(settings, sacks, connection, number):
            if connection.next_send_ps > free_ps:
                connection.state = WAITING
                what = timer(SEND, number, connection.generation)
                schedule(clock, connection.next_send_ps, what)
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
def receive_answer(settings, connection, sacks, clock, number, byte, selected_byte, kind):
    """An acknowledgement up to `byte` that answers the packet at `selected_byte`."""
    if byte > connection.acked_byte:
        if settings.recovery == SELECTIVE_REPEAT:
            passed = connection.acked_byte
            while passed < byte:
                word, mask = bit_of(settings, sacks, passed)
                sacks[number, word] &= ~mask
                passed += settings.payload_bytes
        connection.acked_byte = byte
        connection.progress_ps = clock.calendar[0].now_ps
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


@inner
def start(
    settings,
    flows,
    channels,
    send_queues,
    links,
    paths,
    path_links,
    connections,
    sacks,
    counters,
    clock,
    flow,
):
    """A flow begins, and may let its follower go. Returns its connection; -1 if it has nothing to send or no way to go,
    and so is complete.
    """
    now_ps = clock.calendar[0].now_ps
    flows[flow].start_ps = now_ps
    follower = flows[flow].follower
    if follower >= 0:
        flows[follower].parents_left -= 1
        if flows[follower].parents_left == 0:
            release(flows, channels, send_queues, clock, follower)
    path = flows[flow].path
    if flows[flow].size_bytes == 0 or paths[path] == paths[path + 1]:
        sent(flows, send_queues, clock, flow, now_ps)
        return np.int64(NONE)
    owner = counters[0].free_connection
    connection = connections[owner]
    counters[0].free_connection = connection.next
    counters[0].num_free_connections -= 1
    begin(settings, connection, sacks, flows[flow], flow, owner, links[path_links[paths[path]]], now_ps)
    connection.turn = counters[0].num_started
    counters[0].num_started += 1
    connection.link = path_links[paths[path]]
    if settings.timeout_ps > 0:
        schedule(clock, now_ps + settings.timeout_ps, timer(TIMEOUT, owner, connection.generation))
    return np.int64(owner)


@inner
def answer(settings, links, nodes, flows, connections, packets, replies, reply_links, sacks, counters, clock, packet):
    """A data packet at its destination turns into its answer.

    Returns:
        The link that the answer waits for, -1 if there is none; the flow if this completes it, else -1.
    """
    over = links[packets[packet].link]
    if over.sender >= 0:
        note_sender(counters, nodes[over.target], clock.calendar[0].now_ps, over.sender)
    connection = connections[packets[packet].connection]
    flow = connection.flow
    kind = receive_data(settings, connections, packets, sacks, packet)
    completed = np.int64(NONE)
    if not settings.completes_on_ack and not connection.is_complete:
        if connection.expected_byte >= connection.size_bytes:
            connection.is_complete = 1
            completed = np.int64(flow)
    if kind < 0:
        return np.int64(NONE), completed
    packets[packet].kind = kind
    packets[packet].bytes = settings.ack_bytes
    packets[packet].ingress = NONE
    reply = flows[flow].reply
    packets[packet].hop = replies[reply]
    packets[packet].last_hop = replies[reply + 1] - 1
    back = np.int64(reply_links[replies[reply]])
    packets[packet].link = back
    enqueue(packets, links[back], packet)
    return back, completed


@inner
def take_answer(settings, links, nodes, connections, packets, stamps, seen, sacks, counters, clock, packet):
    """An answer at the sender: bytes acknowledged, and what its mark, delay or telemetry does to the rate.

    Returns:
        The connection if it may now send, else -1; the flow if this completes it, else -1.
    """
    now_ps = clock.calendar[0].now_ps
    over = links[packets[packet].link]
    if over.sender >= 0:
        note_sender(counters, nodes[over.target], now_ps, over.sender)
    owner = np.int64(packets[packet].connection)
    connection = connections[owner]
    if connection.acked_byte >= connection.size_bytes:
        return np.int64(NONE), np.int64(NONE)
    byte, is_marked = packets[packet].byte, packets[packet].is_marked
    receive_answer(settings, connection, sacks, clock, owner, byte, packets[packet].selected_byte, packets[packet].kind)
    if connection.acked_byte >= connection.size_bytes:
        if connection.is_complete:
            return owner, np.int64(NONE)
        connection.is_complete = 1
        return owner, np.int64(connection.flow)
    if settings.congestion != DCQCN:
        rtt_ps, num_stamps = now_ps - packets[packet].sent_ps, packets[packet].num_stamps
        acknowledged(settings, connection, byte, is_marked, rtt_ps, stamps, packet, num_stamps, seen, owner)
    elif is_marked:
        due_ps = dcqcn_mark(settings, connection, now_ps)
        if due_ps >= 0:
            schedule(clock, due_ps, timer(DECREASE, owner, connection.generation))
    return owner, np.int64(NONE)


@inner
def on_timer(settings, connections, clock, kind, number):
    """A connection's timer: its rate lets it send, DCQCN cuts or raises the rate, or nothing has come for long."""
    now_ps = clock.calendar[0].now_ps
    connection = connections[number]
    if kind == SEND:
        connection.state = IDLE
    elif kind == DECREASE:
        dcqcn_decrease(settings, connection, now_ps)
        if not connection.is_increase_due:
            connection.is_increase_due = 1
            schedule(clock, connection.increase_ps, timer(INCREASE, number, connection.generation))
    elif kind == INCREASE:
        if now_ps >= connection.increase_ps:
            dcqcn_increase(settings, connection, now_ps)
        schedule(clock, connection.increase_ps, timer(INCREASE, number, connection.generation))
    elif kind == TIMEOUT:
        if now_ps - connection.progress_ps >= settings.timeout_ps:
            send_again(settings, connection)
            connection.progress_ps = now_ps
        due_ps = connection.progress_ps + settings.timeout_ps
        schedule(clock, due_ps, timer(TIMEOUT, number, connection.generation))


@inner
def send_again(settings, connection):
    """Take all that is on its way for lost."""
    if connection.next_byte <= connection.acked_byte:
        return
    if settings.recovery == GO_BACK_N:
        connection.next_byte = connection.acked_byte
    else:
        connection.retry_byte = connection.acked_byte
        connection.retry_end_byte = connection.next_byte
