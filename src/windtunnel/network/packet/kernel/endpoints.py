"""The two ends of a connection: windows, rates, losses, acknowledgements and timers."""

import numpy as np

from windtunnel.compiled.calendar import schedule
from windtunnel.compiled.jit import inner
from windtunnel.compiled.records import int64
from windtunnel.network.packet.kernel import codes
from windtunnel.network.packet.kernel.congestion import acknowledged, dcqcn_decrease, dcqcn_increase, dcqcn_mark
from windtunnel.network.packet.kernel.flows import release, sent
from windtunnel.network.packet.kernel.queues import (
    enqueue,
    free_if_complete,
    make_ready,
    sending_ps,
    take_packet,
    take_turn,
    timer,
)
from windtunnel.network.packet.kernel.state import Connection, PacketKernelSettings, PacketLink, PacketState


@inner
def window_bytes(settings: PacketKernelSettings, connection: Connection) -> int:
    """Return the limit of bytes in flight: fixed, or in proportion to the rate, as HPCC's authors do it."""
    window = connection.window_bytes
    if window == 0:
        return int64(2**62)
    if settings.window_follows_rate and connection.rate < connection.max_rate:
        window = max(1, int64(window * connection.rate / connection.max_rate))
    return int64(window)


@inner
def bit_of(state: PacketState, byte: int) -> tuple[int, np.uint64]:
    """Return word and mask of the packet that begins at `byte`, in a connection's ring of bits."""
    position = (byte // state.settings.payload_bytes) % (state.sacks.shape[1] * 64)
    return position >> 6, np.uint64(1) << np.uint64(position & 63)


@inner
def next_gap(state: PacketState, number: int) -> int:
    """Return the first byte that selective repeat sends again, or -1."""
    connection = state.connections[number]
    byte = max(connection.retry_byte, connection.acked_byte)
    while byte < connection.retry_end_byte:
        word, mask = bit_of(state, byte)
        if state.sacks[number, word] & mask == 0:
            connection.retry_byte = byte
            return byte
        byte += state.settings.payload_bytes
    connection.retry_byte = byte
    return int64(-1)


@inner
def may_send(state: PacketState, number: int) -> bool:
    """Return whether a connection has something to send and its window is open."""
    settings, connection = state.settings, state.connections[number]
    if settings.recovery == codes.SELECTIVE_REPEAT and next_gap(state, number) >= 0:
        return True
    if connection.next_byte >= connection.size_bytes:
        return False
    return connection.next_byte - connection.acked_byte < window_bytes(settings, connection)


@inner
def wake(state: PacketState, number: int) -> int:
    """Give a connection whose state changed a turn, now or when its rate allows. Returns its link if now, else -1."""
    connection, link = state.connections[number], state.links[state.connections[number].link]
    if connection.state != codes.IDLE or not may_send(state, number):
        return int64(codes.NONE)
    if connection.next_send_ps > max(state.clock.calendar[0].now_ps, link.free_ps):
        connection.state = codes.WAITING
        schedule(state.clock, connection.next_send_ps, timer(codes.SEND, number, connection.generation))
        return int64(codes.NONE)
    make_ready(state.connections, link, number)
    return int64(connection.link)


@inner
def take_bytes(state: PacketState, number: int) -> int:
    """Advance a connection by one packet, sent again or new; return the packet's first byte."""
    settings, connection, counters = state.settings, state.connections[number], state.counters
    byte = int64(-1)
    if settings.recovery == codes.SELECTIVE_REPEAT:
        byte = next_gap(state, number)
    if byte >= 0:
        connection.retry_byte = byte + settings.payload_bytes
        counters[0].num_repeated_packets += 1
        return byte
    byte = int64(connection.next_byte)
    if byte < connection.highest_byte:
        counters[0].num_repeated_packets += 1
    connection.next_byte = min(byte + settings.payload_bytes, connection.size_bytes)
    return byte


@inner
def next_data_packet(state: PacketState, link: PacketLink) -> int:
    """Make the next data packet of the connections that take turns on `link`; -1 if none may send."""
    settings, connections, packets, clock = state.settings, state.connections, state.packets, state.clock
    routed = state.routes.paths
    while True:
        number = take_turn(connections, link)
        if number < 0:
            return number
        connection = connections[number]
        if not may_send(state, number):
            free_if_complete(state, number)
            continue
        byte = take_bytes(state, number)
        num_bytes = min(settings.payload_bytes, connection.size_bytes - byte) + settings.header_bytes
        free_ps = clock.calendar[0].now_ps + sending_ps(settings, link, num_bytes)
        if connection.next_byte > connection.highest_byte:
            connection.highest_byte = connection.next_byte
            if connection.next_byte == connection.size_bytes:
                sent(state, connection.flow, free_ps)
        state.counters[0].num_data_packets += 1
        packet = take_packet(state, number, codes.DATA, num_bytes)
        packets[packet].byte = byte
        packets[packet].sent_ps = clock.calendar[0].now_ps
        packets[packet].link = connection.link
        path = state.flows[connection.flow].path
        packets[packet].hop = routed[path]
        packets[packet].last_hop = routed[path + 1] - 1
        if connection.rate < connection.max_rate:
            connection.next_send_ps = clock.calendar[0].now_ps + int64(num_bytes * 1e12 / connection.rate + 0.5)
        else:
            connection.next_send_ps = free_ps
        if may_send(state, number):
            if connection.next_send_ps > free_ps:
                connection.state = codes.WAITING
                schedule(clock, connection.next_send_ps, timer(codes.SEND, number, connection.generation))
            else:
                make_ready(connections, link, number)
        return int64(packet)


@inner
def receive_data(state: PacketState, packet: int) -> int:
    """Receive a data packet at its destination. Returns the kind of its answer, or -1 for none."""
    settings, packets = state.settings, state.packets
    number = packets[packet].connection
    connection = state.connections[number]
    byte = packets[packet].byte
    packets[packet].selected_byte = byte
    end = min(byte + settings.payload_bytes, connection.size_bytes)
    answer = codes.ACK
    if byte == connection.expected_byte:
        connection.expected_byte = end
        if settings.recovery == codes.SELECTIVE_REPEAT:
            collect_arrived(state, number)
        unreported = connection.expected_byte - connection.reported_byte
        is_last = connection.expected_byte >= connection.size_bytes
        if unreported < settings.ack_interval_bytes and not is_last and not packets[packet].is_marked:
            return codes.NONE
    elif byte > connection.expected_byte:
        if settings.recovery == codes.SELECTIVE_REPEAT:
            word, mask = bit_of(state, byte)
            state.sacks[number + state.sacks.shape[0] // 2, word] |= mask
        else:
            if connection.refused_byte == connection.expected_byte:
                return codes.NONE
            connection.refused_byte = connection.expected_byte
            answer = codes.NACK
    packets[packet].byte = connection.expected_byte
    connection.reported_byte = connection.expected_byte
    return answer


@inner
def collect_arrived(state: PacketState, number: int) -> None:
    """Advance a selective-repeat receiver over packets that arrived out of order."""
    sacks, connection, payload_bytes = state.sacks, state.connections[number], state.settings.payload_bytes
    row = number + sacks.shape[0] // 2
    while connection.expected_byte < connection.size_bytes:
        word, mask = bit_of(state, connection.expected_byte)
        if sacks[row, word] & mask == 0:
            return
        sacks[row, word] &= ~mask
        connection.expected_byte = min(connection.expected_byte + payload_bytes, connection.size_bytes)


@inner
def receive_answer(state: PacketState, packet: int) -> None:
    """Take note of the bytes that an acknowledgement (or NACK) reports."""
    settings, sacks, record = state.settings, state.sacks, state.packets[packet]
    number, byte, selected_byte, kind = record.connection, record.byte, record.selected_byte, record.kind
    connection = state.connections[number]
    if byte > connection.acked_byte:
        if settings.recovery == codes.SELECTIVE_REPEAT:
            passed = connection.acked_byte
            while passed < byte:
                word, mask = bit_of(state, passed)
                sacks[number, word] &= ~mask
                passed += settings.payload_bytes
        connection.acked_byte = byte
        connection.progress_ps = state.clock.calendar[0].now_ps
        if connection.next_byte < byte:
            connection.next_byte = byte
    if settings.recovery == codes.GO_BACK_N:
        if kind == codes.NACK:
            connection.next_byte = connection.acked_byte
    elif selected_byte >= connection.acked_byte and selected_byte < connection.size_bytes:
        word, mask = bit_of(state, selected_byte)
        sacks[number, word] |= mask
        lost_end = selected_byte - settings.reordering_packets * settings.payload_bytes
        connection.retry_end_byte = max(connection.retry_end_byte, lost_end)


@inner
def begin(state: PacketState, flow: int, number: int) -> None:
    """Give a free connection, record `number`, to `flow`, which sends on the first link of its path."""
    connection, record, sacks = state.connections[number], state.flows[flow], state.sacks
    now_ps = state.clock.calendar[0].now_ps
    generation = connection.generation
    state.connections[number] = state.fresh_connection[0]
    connection.generation = generation
    connection.flow = flow
    connection.link = state.routes.path_links[state.routes.paths[record.path]]
    connection.size_bytes = record.size_bytes
    connection.window_bytes = state.routes.window_bytes[record.path]
    connection.base_rtt_ps = state.routes.base_rtt_ps[record.path]
    connection.progress_ps = now_ps
    connection.next_send_ps = now_ps
    connection.max_rate = 1e12 / state.links[connection.link].ps_per_byte
    connection.rate = connection.max_rate
    connection.target_rate = connection.max_rate
    if state.settings.recovery == codes.SELECTIVE_REPEAT:
        half = sacks.shape[0] // 2
        for word in range(sacks.shape[1]):
            sacks[number, word] = 0
            sacks[number + half, word] = 0


@inner
def start(state: PacketState, flow: int) -> int:
    """Start a flow, and release its follower if that waits for nothing else.

    Returns its connection; -1 if it has no bytes or no links to cross, and so is complete.
    """
    records, routes, counters = state.flows, state.routes, state.counters
    now_ps = state.clock.calendar[0].now_ps
    records[flow].start_ps = now_ps
    follower = records[flow].follower
    if follower >= 0:
        records[follower].parents_left -= 1
        if records[follower].parents_left == 0:
            release(state, follower)
    path = records[flow].path
    if records[flow].size_bytes == 0 or routes.paths[path] == routes.paths[path + 1]:
        sent(state, flow, now_ps)
        return int64(codes.NONE)
    owner = counters[0].free_connection
    connection = state.connections[owner]
    counters[0].free_connection = connection.next
    counters[0].num_free_connections -= 1
    begin(state, flow, owner)
    connection.turn = counters[0].num_started
    counters[0].num_started += 1
    if state.settings.timeout_ps > 0:
        schedule(state.clock, now_ps + state.settings.timeout_ps, timer(codes.TIMEOUT, owner, connection.generation))
    return int64(owner)


@inner
def answer(state: PacketState, packet: int) -> tuple[int, int]:
    """Turn a data packet at its destination into its answer.

    Returns:
        The link that the answer waits for, -1 if there is none; the flow if this completes it, else -1.
    """
    settings, packets, routes = state.settings, state.packets, state.routes
    connection = state.connections[packets[packet].connection]
    flow = connection.flow
    kind = receive_data(state, packet)
    completed = int64(codes.NONE)
    if not settings.completes_on_ack and not connection.is_complete:
        if connection.expected_byte >= connection.size_bytes:
            connection.is_complete = 1
            completed = int64(flow)
    if kind < 0:
        return int64(codes.NONE), completed
    packets[packet].kind = kind
    packets[packet].bytes = settings.ack_bytes
    packets[packet].ingress = codes.NONE
    reply = state.flows[flow].reply
    packets[packet].hop = routes.replies[reply]
    packets[packet].last_hop = routes.replies[reply + 1] - 1
    back = int64(routes.reply_links[routes.replies[reply]])
    packets[packet].link = back
    enqueue(packets, state.links[back], packet)
    return back, completed


@inner
def take_answer(state: PacketState, packet: int) -> tuple[int, int]:
    """Take an answer at the sender: acknowledge bytes, and adjust the rate to its mark, delay or telemetry.

    Returns:
        The connection if it may now send, else -1; the flow if this completes it, else -1.
    """
    packets, now_ps = state.packets, state.clock.calendar[0].now_ps
    owner = int64(packets[packet].connection)
    connection = state.connections[owner]
    if connection.acked_byte >= connection.size_bytes:
        return int64(codes.NONE), int64(codes.NONE)
    receive_answer(state, packet)
    if connection.acked_byte >= connection.size_bytes:
        if connection.is_complete:
            return owner, int64(codes.NONE)
        connection.is_complete = 1
        return owner, int64(connection.flow)
    if state.settings.congestion != codes.DCQCN:
        acknowledged(state, packet, now_ps - packets[packet].sent_ps)
    elif packets[packet].is_marked:
        due_ps = dcqcn_mark(state.settings, connection, now_ps)
        if due_ps >= 0:
            schedule(state.clock, due_ps, timer(codes.DECREASE, owner, connection.generation))
    return owner, int64(codes.NONE)


@inner
def on_timer(state: PacketState, kind: int, number: int) -> None:
    """Handle a connection's timer: its rate lets it send, DCQCN cuts or raises the rate, or retransmission is due."""
    settings, clock = state.settings, state.clock
    now_ps = clock.calendar[0].now_ps
    connection = state.connections[number]
    if kind == codes.SEND:
        connection.state = codes.IDLE
    elif kind == codes.DECREASE:
        dcqcn_decrease(settings, connection, now_ps)
        if not connection.is_increase_due:
            connection.is_increase_due = 1
            schedule(clock, connection.increase_ps, timer(codes.INCREASE, number, connection.generation))
    elif kind == codes.INCREASE:
        if now_ps >= connection.increase_ps:
            dcqcn_increase(settings, connection, now_ps)
        schedule(clock, connection.increase_ps, timer(codes.INCREASE, number, connection.generation))
    elif kind == codes.TIMEOUT:
        if now_ps - connection.progress_ps >= settings.timeout_ps:
            send_again(settings, connection)
            connection.progress_ps = now_ps
        due_ps = connection.progress_ps + settings.timeout_ps
        schedule(clock, due_ps, timer(codes.TIMEOUT, number, connection.generation))


@inner
def send_again(settings: PacketKernelSettings, connection: Connection) -> None:
    """Treat every unacknowledged packet as lost."""
    if connection.next_byte <= connection.acked_byte:
        return
    if settings.recovery == codes.GO_BACK_N:
        connection.next_byte = connection.acked_byte
    else:
        connection.retry_byte = connection.acked_byte
        connection.retry_end_byte = connection.next_byte
