"""The tables of the packet loop: record arrays for links, nodes, flows, connections and packets, and their bundles."""

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from windtunnel.compiled.calendar import Clock
from windtunnel.compiled.records import F8, I2, I4, I8, Ints, RecordGrid, Records


class PacketKernelSettings(NamedTuple):
    """How NICs and switches behave. Scalars; rates in bytes per second, times in picoseconds."""

    payload_bytes: int
    header_bytes: int
    ack_bytes: int
    window_follows_rate: int
    congestion: int
    recovery: int
    reordering_packets: int
    """Selective repeat: a gap is a loss once a packet that many positions later has arrived."""
    timeout_ps: int
    """Retransmission timeout of a connection without progress; 0: none."""
    routing: int
    completes_on_ack: int
    """1: a flow is complete when its sender has the last acknowledgement; 0: when its last byte has arrived."""
    cut_through: int
    ack_interval_bytes: int
    acks_first: int
    """1: acknowledgements overtake data in switches."""
    pfc: int
    dynamic_pfc: int
    ecn: int
    reserve_bytes: int
    resume_offset_bytes: int
    min_rate_bytes_per_s: float
    rate_ai_bytes_per_s: float
    rate_hai_bytes_per_s: float
    ewma_gain: float
    alpha_interval_ps: int
    decrease_interval_ps: int
    increase_interval_ps: int
    fast_recovery_times: int
    clamp_target_rate: int
    dctcp_rate_ai_bytes_per_s: float
    target_utilisation: float
    most_increases: int
    """HPCC: additive increases in a row before a multiplicative one."""
    fast_react: int
    timely_alpha: float
    timely_beta: float
    timely_low_ps: int
    timely_high_ps: int
    timely_min_rtt_ps: int
    tick_ps: int
    """1, or 1000 to follow ns-3: sending times are cut to whole nanoseconds, and a link stays busy until an event frees
    it, which orders events of the same nanosecond.
    """
    most_children: int
    """The most flows that wait for one flow: its completion schedules one event for each."""
    seed: int


class PacketLink(Protocol):
    """One direction of a link: its transmitter, and the ingress at its far end. Link `i ^ 1` is the other direction."""

    ps_per_byte: F8
    latency_ps: I8
    free_ps: I8  # when the transmitter has sent its current packet
    source: I4
    target: I4
    control_first: I4  # queue of packets that overtake, as pause frames do
    control_last: I4
    queue_first: I4  # queue of forwarded packets and this node's acknowledgements
    queue_last: I4
    turns: I4  # root of the heap of connections that have yet to send in this round
    next_turns: I4  # root of the heap of connections that have sent in this round
    is_due: I4  # 1: an event to serve it is scheduled
    is_paused: I4  # 1: paused by the node at its far end (PFC)
    has_paused: I4  # 1: the node at its far end has sent it a pause frame
    name: I4  # its number in the complete fabric: keys its random draws
    sender: I4  # orders packets that arrive at one time, before other events; -1: as sent
    fed_by: I4  # the sender of the latest message in its queue
    fed_ps: I8  # when that message came
    last_turn: I8  # turn of the connection that sent last
    queue_bytes: I8
    ingress_bytes: I8  # that came over it and are in the buffer of the node at its far end
    headroom_bytes: I8  # part of `ingress_bytes` accounted to headroom
    headroom_limit_bytes: I8
    pfc_shift: I8
    ecn_min_bytes: I8
    ecn_max_bytes: I8
    ecn_max_probability: F8
    error_fraction: F8
    num_draws: I8
    sent_bytes: I8
    most_queued_bytes: I8
    paused_ps: I8
    paused_since_ps: I8
    num_pauses: I8
    num_marks: I8
    num_drops: I8


class PacketNode(Protocol):
    """A GPU or a switch: the shared buffer of a switch."""

    kind: I8
    shared_limit_bytes: I8  # the buffer less reserves and headroom
    shared_bytes: I8
    most_shared_bytes: I8
    fed_ps: I8  # when the latest message came
    fed_by: I8  # the sender of that message


class PacketFlow(Protocol):
    """One flow: what it sends, what it waits for, and its times."""

    size_bytes: I8
    delay_ps: I8
    start_ps: I8  # in: earliest start; out: actual start
    sent_ps: I8  # when its last byte has left
    ready_ps: I8  # when its parents were complete
    finish_ps: I8  # -1 until it is complete
    parents_left: I4  # incomplete parents, plus 1 until the flow that it follows begins
    follower: I4  # the flow that may not begin before this one; -1: none
    target_row: I4  # row of the distances to its destination, where packets choose their way
    path: I4
    reply: I4
    queue: I4  # its send queue
    next: I4  # next flow in that queue
    channel: I4  # channel of its sender, if that reduces; -1: it does not
    reduction: I4


class Channel(Protocol):
    """A channel of a rank, where ranks reduce as SimAI's do."""

    num_released: I8
    cycle: I8  # chunks in one round of reductions
    rank: I8  # the channel whose record holds the state that the rank's channels share
    is_reducing: I8  # shared by the channels of a rank


class SendQueue(Protocol):
    """Flows that are sent one after the other, in the order in which their parents complete: one queue pair's work."""

    first: I4
    last: I4
    is_busy: I8
    free_ps: I8


class Connection(Protocol):
    """A flow under way, both ends of its queue pair; a free record is taken again by later flows."""

    flow: I4
    link: I4  # the link that it sends on
    state: I4
    next: I4  # next free connection
    left: I4  # children in its link's heap
    right: I4
    turn: I8  # connections take turns in the order of their starts
    num_packets: I4  # packets under way, both directions
    generation: I4
    is_complete: I4
    is_decrease_due: I4
    size_bytes: I8
    window_bytes: I8
    base_rtt_ps: I8
    next_byte: I8
    acked_byte: I8
    expected_byte: I8  # receiver: the first byte that it lacks
    reported_byte: I8  # receiver: its latest acknowledgement
    refused_byte: I8  # receiver: the gap that its latest NACK reported
    retry_byte: I8  # selective repeat: gaps below are already sent again
    retry_end_byte: I8  # selective repeat: gaps up to here are lost
    highest_byte: I8  # the end of what was ever sent
    progress_ps: I8
    next_send_ps: I8
    max_rate: F8
    rate: F8
    target_rate: F8  # DCQCN: target; HPCC and TIMELY: the rate of the last full update
    alpha: F8
    utilisation: F8  # HPCC
    rtt_difference_ps: F8  # TIMELY
    last_rtt_ps: I8
    update_byte: I8  # a round trip is over when this is acknowledged
    congested_byte: I8  # DCTCP: no second decrease before this is acknowledged
    num_marks: I8
    num_batch: I8
    stage: I8
    first_mark_ps: I8
    num_alpha_updates: I8
    is_marked_for_alpha: I4
    increase_ps: I8
    is_increase_due: I8


class ConnectionTable(Records[Connection], Protocol):
    """All connections; links keep those that may send in heaps over these columns."""

    turn: NDArray[np.int64]
    left: NDArray[np.int32]
    right: NDArray[np.int32]


class Packet(Protocol):
    """One packet on a link or in a queue."""

    connection: I4
    link: I4  # the link that it is on or queued for
    ingress: I4  # the link whose buffer account at this node holds it; -1: none
    next: I4
    bytes: I4
    kind: I2
    is_marked: I2
    hop: I8  # position in `path_links` (or `reply_links`)
    last_hop: I8
    byte: I8  # data: its first byte; acknowledgement: the first byte that the receiver lacks
    selected_byte: I8  # acknowledgement: the data packet that it answers
    sent_ps: I8
    num_stamps: I8


class Stamp(Protocol):
    """HPCC's in-band telemetry of one hop."""

    time_ps: I8
    sent_bytes: I8
    queue_bytes: I8
    bytes_per_s: F8


class Counters(Protocol):
    """One record: heads of the free lists, and what happened so far."""

    has_begun: I8
    free_packet: I8
    num_free_packets: I8
    free_connection: I8
    num_free_connections: I8
    num_started: I8
    num_finished: I8
    num_events: I8
    num_data_packets: I8
    num_repeated_packets: I8
    num_draws: I8
    num_ties: I8  # messages that met one of another sender, where senders have an order


class RouteTables(NamedTuple):
    """Paths of data and acknowledgements, and the neighbours among which sprayed packets choose."""

    paths: Ints
    """(paths + 1,) where the directed links of each path start in `path_links`, first to last."""
    path_links: Ints
    replies: Ints
    """The same for acknowledgements, with `reply_links`."""
    reply_links: Ints
    window_bytes: Ints
    """(paths,) in flight at line rate; 0: no limit."""
    base_rtt_ps: Ints
    """(paths,) that HPCC reckons with."""
    neighbor_start: Ints
    """(nodes + 1,) where the outgoing links of each node start in `neighbor_links`."""
    neighbor_links: Ints
    distances: NDArray[np.int16]
    """(destinations, nodes) hops to each destination; read only where packets choose their way."""


class PacketState(NamedTuple):
    """Everything that the loop reads and writes."""

    settings: PacketKernelSettings
    links: Records[PacketLink]
    nodes: Records[PacketNode]
    flows: Records[PacketFlow]
    channels: Records[Channel]
    """Channels of ranks that reduce as SimAI's do; else one record that is never read."""
    send_queues: Records[SendQueue]
    first_flows: Ints
    """Flows that wait for no other, in the order in which they begin."""
    children_start: Ints
    """(flows + 1,) where the children of each flow start in `children`: the flows that wait for it."""
    children: Ints
    routes: RouteTables
    connections: ConnectionTable
    fresh_connection: Records[Connection]
    """(1,) what a connection is before its flow begins: without marks, delays, telemetry and acknowledgements."""
    packets: Records[Packet]
    counters: Records[Counters]
    stamps: RecordGrid[Stamp]
    """(packets, hops) telemetry of each packet, for HPCC."""
    seen: RecordGrid[Stamp]
    """(connections, hops) telemetry of each connection's latest acknowledgement, for HPCC."""
    sacks: NDArray[np.uint64]
    """(2 x connections, words) rings of bits, senders' then receivers', for selective repeat."""
    clock: Clock
