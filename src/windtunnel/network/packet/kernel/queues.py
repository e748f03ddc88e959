"""Events, link queues, turns of connections, random draws and free lists of the packet loop."""

from windtunnel.compiled.heap import meld
from windtunnel.compiled.jit import inner
from windtunnel.compiled.records import Records, int64
from windtunnel.network.packet.kernel import codes
from windtunnel.network.packet.kernel.state import (
    ConnectionTable,
    Packet,
    PacketKernelSettings,
    PacketLink,
    PacketNode,
    PacketState,
)
from windtunnel.network.routing import scramble


@inner
def event(kind: int, number: int) -> int:
    """Encode an event for the calendar."""
    return int64(kind) | (int64(number) << codes.KIND_BITS)


@inner
def timer(kind: int, number: int, generation: int) -> int:
    """Encode a connection's timer, which is ignored once another flow has taken the connection's record."""
    return event(kind, number) | (int64(generation) << (codes.KIND_BITS + codes.NUMBER_BITS))


@inner
def draw(state: PacketState, link: PacketLink) -> float:
    """Draw a link's next uniform number: a hash of seed, link and count, so that it depends on no other link."""
    state.counters[0].num_draws += 1
    link.num_draws += 1
    word = scramble(int64(state.settings.seed) & 0xFFFFFFFF) ^ int64(link.name)
    return scramble(scramble(word) ^ int64(link.num_draws)) * (1.0 / 4294967296.0)


@inner
def sending_ps(settings: PacketKernelSettings, link: PacketLink, num_bytes: int) -> int:
    """Return how long a transmitter is busy with `num_bytes`."""
    if settings.tick_ps == 1:
        return int64(num_bytes * link.ps_per_byte + 0.5)
    return int64(num_bytes * link.ps_per_byte / settings.tick_ps) * settings.tick_ps


@inner
def enqueue(packets: Records[Packet], link: PacketLink, packet: int) -> None:
    """Put a packet at the end of a link's queue."""
    packets[packet].next = codes.NONE
    if link.queue_first < 0:
        link.queue_first = packet
    else:
        packets[link.queue_last].next = packet
    link.queue_last = packet
    link.queue_bytes += packets[packet].bytes
    if link.queue_bytes > link.most_queued_bytes:
        link.most_queued_bytes = link.queue_bytes


@inner
def overtake(packets: Records[Packet], link: PacketLink, packet: int) -> None:
    """Put a packet behind the packets that overtake a link's queue."""
    packets[packet].next = codes.NONE
    if link.control_first < 0:
        link.control_first = packet
    else:
        packets[link.control_last].next = packet
    link.control_last = packet


@inner
def note_sender(state: PacketState, place: PacketLink | PacketNode, sender: int) -> None:
    """Count a message at a link's queue or a GPU as a tie if one of another sender came at the same time."""
    now_ps = state.clock.calendar[0].now_ps
    if place.fed_ps == now_ps and place.fed_by != sender:
        state.counters[0].num_ties += 1
    place.fed_ps = now_ps
    place.fed_by = sender


@inner
def make_ready(connections: ConnectionTable, link: PacketLink, number: int) -> None:
    """Give a connection a turn on its link: in this round, or in the next if its turn has passed."""
    connections[number].state = codes.READY
    connections[number].left = codes.NONE
    connections[number].right = codes.NONE
    if connections[number].turn > link.last_turn:
        link.turns = meld(connections.turn, connections.left, connections.right, link.turns, number)
    else:
        link.next_turns = meld(connections.turn, connections.left, connections.right, link.next_turns, number)


@inner
def take_turn(connections: ConnectionTable, link: PacketLink) -> int:
    """Take the connection whose turn it is on a link, -1 if none may send.

    Rounds follow the order of starts: a new connection has its turn at the end of the round, as in HPCC's simulator.
    """
    if link.turns < 0:
        link.turns = link.next_turns
        link.next_turns = codes.NONE
    number = int64(link.turns)
    if number >= 0:
        connection = connections[number]
        link.turns = meld(
            connections.turn, connections.left, connections.right, int64(connection.left), int64(connection.right)
        )
        link.last_turn = connection.turn
        connection.state = codes.IDLE
    return number


@inner
def take_packet(state: PacketState, number: int, kind: int, num_bytes: int) -> int:
    """Take a free packet for connection `number` (-1: none); the loop ensures that there is one."""
    packets, counters = state.packets, state.counters
    packet = counters[0].free_packet
    counters[0].free_packet = packets[packet].next
    counters[0].num_free_packets -= 1
    packets[packet].connection = number
    packets[packet].kind = kind
    packets[packet].bytes = num_bytes
    packets[packet].is_marked = 0
    packets[packet].num_stamps = 0
    packets[packet].ingress = codes.NONE
    if number >= 0:
        state.connections[number].num_packets += 1
    return packet


@inner
def free_packet(state: PacketState, packet: int) -> None:
    """Free a packet, and with its last packet a connection whose flow is complete."""
    packets, counters = state.packets, state.counters
    number = packets[packet].connection
    packets[packet].next = counters[0].free_packet
    counters[0].free_packet = packet
    counters[0].num_free_packets += 1
    if number >= 0:
        state.connections[number].num_packets -= 1
        free_if_complete(state, number)


@inner
def free_if_complete(state: PacketState, number: int) -> None:
    """Free a connection whose flow is complete, once no packet and no heap refers to it."""
    connection, counters = state.connections[number], state.counters
    is_complete = connection.acked_byte >= connection.size_bytes
    if is_complete and connection.num_packets == 0 and connection.state != codes.READY:
        connection.generation += 1
        connection.next = counters[0].free_connection
        counters[0].free_connection = number
        counters[0].num_free_connections += 1
