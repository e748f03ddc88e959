"""Events, queues and free lists of the packet loop: what waits where, and whose turn it is."""

import numpy as np

from windtunnel.compiled.heap import meld
from windtunnel.compiled.jit import inner
from windtunnel.network.packet.kernel.state import IDLE, NONE, READY

ARRIVE, SERVE, START, SEND, DECREASE, INCREASE, TIMEOUT, TRACE = range(8)
"""Kinds of events: a packet reaches the end of its link; a link has work and is free; a flow starts; a connection's
rate lets it send again; DCQCN's two timers; the retransmission timer; a look at the queues.
"""
KIND_BITS = 3
NUMBER_BITS = 28


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
def note_sender(counters, place, now_ps, sender):
    """A message reaches a queue or a GPU: count it if it meets one of another sender, where their order may matter."""
    if place.fed_ps == now_ps and place.fed_by != sender:
        counters[0].num_ties += 1
    place.fed_ps = now_ps
    place.fed_by = sender


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
