"""The two ends of a connection: windows, rates, losses, acknowledgements and timers."""

import numpy as np
from numpy.typing import NDArray

from windtunnel.compiled.calendar import Clock, schedule
from windtunnel.compiled.jit import inner
from windtunnel.compiled.records import Records, int64
from windtunnel.network.packet.kernel.congestion import (
    acknowledged,
    begin_rate,
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
    free_if_complete,
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
    Connection,
    ConnectionTable,
    Counters,
    FabricTables,
    FeedbackTables,
    PacketFlow,
    PacketFlowTables,
    PacketKernelSettings,
    PacketLink,
    RouteTables,
    TrafficTables,
)


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
def bit_of(settings: PacketKernelSettings, sacks: NDArray[np.uint64], byte: int) -> tuple[int, np.uint64]:
    """Return word and mask of the packet that begins at `byte`, in a connection's ring of bits."""
    position = (byte // settings.payload_bytes) % (sacks.shape[1] * 64)
    return position >> 6, np.uint64(1) << np.uint64(position & 63)


@inner
def next_gap(settings: PacketKernelSettings, sacks: NDArray[np.uint64], connection: Connection, number: int) -> int:
    """Return the first byte that selective repeat sends again, or -1."""
    byte = max(connection.retry_byte, connection.acked_byte)
    while byte < connection.retry_end_byte:
        word, mask = bit_of(settings, sacks, byte)
        if sacks[number, word] & mask == 0:
            connection.retry_byte = byte
            return byte
        byte += settings.payload_bytes
    connection.retry_byte = byte
    return int64(-1)


@inner
def may_send(settings: PacketKernelSettings, sacks: NDArray[np.uint64], connection: Connection, number: int) -> bool:
    """Return whether a connection has something to send and its window is open."""
    if settings.recovery == SELECTIVE_REPEAT and next_gap(settings, sacks, connection, number) >= 0:
        return True
    if connection.next_byte >= connection.size_bytes:
        return False
    return connection.next_byte - connection.acked_byte < window_bytes(settings, connection)


@inner
def wake(
    settings: PacketKernelSettings,
    links: Records[PacketLink],
    connections: ConnectionTable,
    sacks: NDArray[np.uint64],
    clock: Clock,
    number: int,
) -> int:
    """Give a connection whose state changed a turn, now or when its rate allows. Returns its link if now, else -1."""
    connection = connections[number]
    if connection.state != IDLE or not may_send(settings, sacks, connection, number):
        return int64(NONE)
    if connection.next_send_ps > max(clock.calendar[0].now_ps, links[connection.link].free_ps):
        connection.state = WAITING
        what = timer(SEND, number, connection.generation)
        schedule(clock, connection.next_send_ps, what)
        return int64(NONE)
    make_ready(connections, links[connection.link], number)
    return int64(connection.link)


@inner
def take_bytes(
    settings: PacketKernelSettings,
    sacks: NDArray[np.uint64],
    connection: Connection,
    number: int,
    counters: Records[Counters],
) -> int:
    """Advance a connection by one packet, sent again or new; return the packet's first byte."""
    byte = int64(-1)
    if settings.recovery == SELECTIVE_REPEAT:
        byte = next_gap(settings, sacks, connection, number)
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
def next_data_packet(
    settings: PacketKernelSettings,
    flows: PacketFlowTables,
    routes: RouteTables,
    traffic: TrafficTables,
    sacks: NDArray[np.uint64],
    clock: Clock,
    link: PacketLink,
) -> int:
    """Make the next data packet of the connections that take turns on `link`; -1 if none may send."""
    connections, packets, counters = traffic
    while True:
        number = take_turn(connections, link)
        if number < 0:
            return number
        connection = connections[number]
        if not may_send(settings, sacks, connection, number):
            free_if_complete(counters, connections, number)
            continue
        byte = take_bytes(settings, sacks, connection, number, counters)
        num_bytes = min(settings.payload_bytes, connection.size_bytes - byte) + settings.header_bytes
        free_ps = clock.calendar[0].now_ps + sending_ps(settings, link, num_bytes)
        if connection.next_byte > connection.highest_byte:
            connection.highest_byte = connection.next_byte
            if connection.next_byte == connection.size_bytes:
                sent(flows, clock, connection.flow, free_ps)
        counters[0].num_data_packets += 1
        packet = take_packet(traffic, number, DATA, num_bytes)
        packets[packet].byte = byte
        packets[packet].sent_ps = clock.calendar[0].now_ps
        packets[packet].link = connection.link
        path = flows.flows[connection.flow].path
        packets[packet].hop = routes.paths[path]
        packets[packet].last_hop = routes.paths[path + 1] - 1
        if connection.rate < connection.max_rate:
            connection.next_send_ps = clock.calendar[0].now_ps + int64(num_bytes * 1e12 / connection.rate + 0.5)
        else:
            connection.next_send_ps = free_ps
        if may_send(settings, sacks, connection, number):
            if connection.next_send_ps > free_ps:
                connection.state = WAITING
                what = timer(SEND, number, connection.generation)
                schedule(clock, connection.next_send_ps, what)
            else:
                make_ready(connections, link, number)
        return int64(packet)


@inner
def receive_data(settings: PacketKernelSettings, traffic: TrafficTables, sacks: NDArray[np.uint64], packet: int) -> int:
    """Receive a data packet at its destination. Returns the kind of its answer, or -1 for none."""
    connections, packets, _ = traffic
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
def collect_arrived(
    settings: PacketKernelSettings, connection: Connection, sacks: NDArray[np.uint64], number: int
) -> None:
    """Advance a selective-repeat receiver over packets that arrived out of order."""
    row = number + sacks.shape[0] // 2
    while connection.expected_byte < connection.size_bytes:
        word, mask = bit_of(settings, sacks, connection.expected_byte)
        if sacks[row, word] & mask == 0:
            return
        sacks[row, word] &= ~mask
        connection.expected_byte = min(connection.expected_byte + settings.payload_bytes, connection.size_bytes)


@inner
def receive_answer(
    settings: PacketKernelSettings, traffic: TrafficTables, sacks: NDArray[np.uint64], clock: Clock, packet: int
) -> None:
    """Take note of the bytes that an acknowledgement (or NACK) reports."""
    record = traffic.packets[packet]
    number, byte, selected_byte, kind = record.connection, record.byte, record.selected_byte, record.kind
    connection = traffic.connections[number]
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
def begin(
    settings: PacketKernelSettings,
    connection: Connection,
    sacks: NDArray[np.uint64],
    flows: Records[PacketFlow],
    flow: int,
    number: int,
    link: PacketLink,
    now_ps: int,
) -> None:
    """Give a free connection, record `number`, to `flow`, which sends on `link`."""
    record = flows[flow]
    connection.flow = flow
    connection.state = IDLE
    connection.num_packets = 0
    connection.is_complete = 0
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
    begin_rate(connection, 1e12 / link.ps_per_byte)
    if settings.recovery == SELECTIVE_REPEAT:
        half = sacks.shape[0] // 2
        for word in range(sacks.shape[1]):
            sacks[number, word] = 0
            sacks[number + half, word] = 0


@inner
def start(
    settings: PacketKernelSettings,
    flows: PacketFlowTables,
    links: Records[PacketLink],
    routes: RouteTables,
    traffic: TrafficTables,
    sacks: NDArray[np.uint64],
    clock: Clock,
    flow: int,
) -> int:
    """Start a flow, and release its follower if that waits for nothing else.

    Returns its connection; -1 if it has no bytes or no links to cross, and so is complete.
    """
    records = flows.flows
    now_ps = clock.calendar[0].now_ps
    records[flow].start_ps = now_ps
    follower = records[flow].follower
    if follower >= 0:
        records[follower].parents_left -= 1
        if records[follower].parents_left == 0:
            release(flows, clock, follower)
    path = records[flow].path
    if records[flow].size_bytes == 0 or routes.paths[path] == routes.paths[path + 1]:
        sent(flows, clock, flow, now_ps)
        return int64(NONE)
    connections, _, counters = traffic
    owner = counters[0].free_connection
    connection = connections[owner]
    counters[0].free_connection = connection.next
    counters[0].num_free_connections -= 1
    begin(settings, connection, sacks, records, flow, owner, links[routes.path_links[routes.paths[path]]], now_ps)
    connection.turn = counters[0].num_started
    counters[0].num_started += 1
    connection.link = routes.path_links[routes.paths[path]]
    if settings.timeout_ps > 0:
        schedule(clock, now_ps + settings.timeout_ps, timer(TIMEOUT, owner, connection.generation))
    return int64(owner)


@inner
def answer(
    settings: PacketKernelSettings,
    fabric: FabricTables,
    flows: Records[PacketFlow],
    routes: RouteTables,
    traffic: TrafficTables,
    sacks: NDArray[np.uint64],
    clock: Clock,
    packet: int,
) -> tuple[int, int]:
    """Turn a data packet at its destination into its answer.

    Returns:
        The link that the answer waits for, -1 if there is none; the flow if this completes it, else -1.
    """
    connections, packets, counters = traffic
    over = fabric.links[packets[packet].link]
    if over.sender >= 0:
        note_sender(counters, fabric.nodes[over.target], clock.calendar[0].now_ps, over.sender)
    connection = connections[packets[packet].connection]
    flow = connection.flow
    kind = receive_data(settings, traffic, sacks, packet)
    completed = int64(NONE)
    if not settings.completes_on_ack and not connection.is_complete:
        if connection.expected_byte >= connection.size_bytes:
            connection.is_complete = 1
            completed = int64(flow)
    if kind < 0:
        return int64(NONE), completed
    packets[packet].kind = kind
    packets[packet].bytes = settings.ack_bytes
    packets[packet].ingress = NONE
    reply = flows[flow].reply
    packets[packet].hop = routes.replies[reply]
    packets[packet].last_hop = routes.replies[reply + 1] - 1
    back = int64(routes.reply_links[routes.replies[reply]])
    packets[packet].link = back
    enqueue(packets, fabric.links[back], packet)
    return back, completed


@inner
def take_answer(
    settings: PacketKernelSettings,
    fabric: FabricTables,
    traffic: TrafficTables,
    feedback: FeedbackTables,
    clock: Clock,
    packet: int,
) -> tuple[int, int]:
    """Take an answer at the sender: acknowledge bytes, and adjust the rate to its mark, delay or telemetry.

    Returns:
        The connection if it may now send, else -1; the flow if this completes it, else -1.
    """
    connections, packets, counters = traffic
    now_ps = clock.calendar[0].now_ps
    over = fabric.links[packets[packet].link]
    if over.sender >= 0:
        note_sender(counters, fabric.nodes[over.target], now_ps, over.sender)
    owner = int64(packets[packet].connection)
    connection = connections[owner]
    if connection.acked_byte >= connection.size_bytes:
        return int64(NONE), int64(NONE)
    receive_answer(settings, traffic, feedback.sacks, clock, packet)
    if connection.acked_byte >= connection.size_bytes:
        if connection.is_complete:
            return owner, int64(NONE)
        connection.is_complete = 1
        return owner, int64(connection.flow)
    if settings.congestion != DCQCN:
        acknowledged(settings, traffic, feedback, packet, now_ps - packets[packet].sent_ps)
    elif packets[packet].is_marked:
        due_ps = dcqcn_mark(settings, connection, now_ps)
        if due_ps >= 0:
            schedule(clock, due_ps, timer(DECREASE, owner, connection.generation))
    return owner, int64(NONE)


@inner
def on_timer(
    settings: PacketKernelSettings, connections: Records[Connection], clock: Clock, kind: int, number: int
) -> None:
    """Handle a connection's timer: its rate lets it send, DCQCN cuts or raises the rate, or retransmission is due."""
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
def send_again(settings: PacketKernelSettings, connection: Connection) -> None:
    """Treat every unacknowledged packet as lost."""
    if connection.next_byte <= connection.acked_byte:
        return
    if settings.recovery == GO_BACK_N:
        connection.next_byte = connection.acked_byte
    else:
        connection.retry_byte = connection.acked_byte
        connection.retry_end_byte = connection.next_byte
