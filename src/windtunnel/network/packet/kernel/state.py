"""What the packet loop works on: record arrays for links, nodes, flows, connections and packets."""

from typing import NamedTuple

import numpy as np

NONE = -1

GPU, SCALE_UP_SWITCH, SWITCH = range(3)
"""`NODE.kind`. A scale-up switch forwards without pausing, marking or a limit to its buffer."""

DATA, ACK, NACK, PAUSE, RESUME = range(5)
"""`PACKET.kind`."""

UNCONTROLLED, DCQCN, HPCC, TIMELY, DCTCP = 0, 1, 3, 7, 8
"""`Settings.congestion`, with the numbers of SimAI's CC_MODE."""

NO_REDUCTION, EVERY, ALTERNATE = range(3)
"""`FLOW.reduction`."""

GO_BACK_N, SELECTIVE_REPEAT = range(2)
"""`Settings.recovery`."""

ECMP, SPRAY, ADAPTIVE = range(3)
"""`Settings.routing`: a path for each connection; a next hop at random for each packet; the shortest queue."""

IDLE, READY, WAITING = range(3)
"""`CONNECTION.state`: nothing may be sent; in its link's turn; sends again at `next_send_ps`."""


class Settings(NamedTuple):
    """How NICs and switches behave. Scalars; rates in bytes per second, times in picoseconds."""

    payload_bytes: int
    header_bytes: int
    ack_bytes: int
    window_follows_rate: int
    congestion: int
    recovery: int
    reordering_packets: int
    """Selective repeat: a gap counts as a loss when a packet so many later has arrived."""
    timeout_ps: int
    """A connection without progress for so long sends again; 0: never."""
    routing: int
    completes_on_ack: int
    """1: a flow is complete when its sender has the last acknowledgement; 0: when its last byte has arrived."""
    cut_through: int
    ack_interval_bytes: int
    ack_first: int
    """1: acknowledgements overtake data in switches."""
    has_pfc: int
    dynamic_pfc: int
    has_ecn: int
    reserve_bytes: int
    resume_offset_bytes: int
    min_rate: float
    rate_ai: float
    rate_hai: float
    ewma_gain: float
    alpha_interval_ps: int
    decrease_interval_ps: int
    increase_interval_ps: int
    fast_recovery_times: int
    clamp_target_rate: int
    dctcp_rate_ai: float
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
    """1, or 1000 to do as ns-3: sending times are cut to whole nanoseconds, and a link is busy until an event says that
    it is not, which decides between events of the same nanosecond.
    """
    most_children: int
    """Of any flow: so many events may be scheduled at once."""
    trace_interval_ps: int
    """0: queues are not traced."""
    seed: int


LINK = np.dtype(
    [
        ("ps_per_byte", "f8"),
        ("latency_ps", "i8"),
        ("free_ps", "i8"),  # when the packet being sent will have left
        ("source", "i4"),
        ("target", "i4"),
        ("control_first", "i4"),  # packets that overtake: pause frames
        ("control_last", "i4"),
        ("queue_first", "i4"),  # packets of others, and this node's acknowledgements
        ("queue_last", "i4"),
        ("turns", "i4"),  # root of the heap of connections that may send and have yet to in this round
        ("next_turns", "i4"),  # and of those that have
        ("is_due", "i4"),  # an event will serve it
        ("is_paused", "i4"),  # by the node at its far end
        ("has_paused", "i4"),  # the node at its far end has paused it
        ("name", "i4"),  # its number in the whole fabric: keys its random draws
        ("sender", "i4"),  # orders packets that arrive at once, before all else of that time; -1: as they were sent
        ("fed_by", "i4"),  # the sender of the message that came last into its queue
        ("fed_ps", "i8"),  # and when
        ("last_turn", "i8"),  # of the connection that sent last
        ("queue_bytes", "i8"),
        ("ingress_bytes", "i8"),  # that came over it and are in the buffer of the node at its far end
        ("headroom_bytes", "i8"),  # of these, in headroom
        ("headroom_limit_bytes", "i8"),
        ("pfc_shift", "i8"),
        ("ecn_min_bytes", "i8"),
        ("ecn_max_bytes", "i8"),
        ("ecn_max_probability", "f8"),
        ("error_fraction", "f8"),
        ("num_draws", "i8"),
        ("sent_bytes", "i8"),
        ("most_queued_bytes", "i8"),
        ("paused_ps", "i8"),
        ("paused_since_ps", "i8"),
        ("num_pauses", "i8"),
        ("num_marks", "i8"),
        ("num_drops", "i8"),
    ]
)
"""One record a direction of a link: its transmitter, and the ingress at its far end. Link `i ^ 1` is the other way."""

NODE = np.dtype(
    [
        ("kind", "i8"),
        ("shared_limit_bytes", "i8"),  # the buffer less reserves and headroom
        ("shared_bytes", "i8"),
        ("most_shared_bytes", "i8"),
        ("fed_ps", "i8"),  # when a message came last, and of which sender
        ("fed_by", "i8"),
    ]
)

FLOW = np.dtype(
    [
        ("size_bytes", "i8"),
        ("delay_ps", "i8"),
        ("start_ps", "i8"),  # in: not before; out: when it started
        ("sent_ps", "i8"),  # when its last byte has left
        ("ready_ps", "i8"),  # when its parents were complete
        ("finish_ps", "i8"),  # -1 until it is complete
        ("window_bytes", "i8"),  # in flight at line rate; 0: no limit
        ("base_rtt_ps", "i8"),  # HPCC
        ("parents_left", "i4"),  # that are not complete, and the flow that must begin before
        ("follower", "i4"),  # the flow that may not begin before this one; -1: none
        ("target_row", "i4"),  # of the distances, where packets choose their way
        ("path", "i4"),
        ("reply", "i4"),
        ("queue", "i4"),  # of sends, that it goes through
        ("next", "i4"),  # in that queue
        ("channel", "i4"),  # of its sender, if that reduces; -1: it does not
        ("reduction", "i4"),
    ]
)

CHANNEL = np.dtype(
    [
        ("num_released", "i8"),
        ("cycle", "i8"),  # so many chunks make one round of reductions
        ("rank", "i8"),  # the channel whose record holds what all of its rank share
        ("is_reducing", "i8"),  # shared
    ]
)
"""One record a channel of a rank, where ranks reduce as SimAI's do."""

SEND_QUEUE = np.dtype([("first", "i4"), ("last", "i4"), ("is_busy", "i8"), ("free_ps", "i8")])
"""Flows that are sent one after the other, in the order in which their parents complete: one queue pair's work."""

CONNECTION = np.dtype(
    [
        ("flow", "i4"),
        ("link", "i4"),  # that it sends on
        ("state", "i4"),
        ("next", "i4"),  # in the list of free connections
        ("left", "i4"),  # in its link's heap
        ("right", "i4"),
        ("turn", "i8"),  # connections take turns in the order of their starts
        ("num_packets", "i4"),  # on their way, both directions
        ("generation", "i4"),
        ("is_complete", "i4"),
        ("is_decrease_due", "i4"),
        ("size_bytes", "i8"),
        ("window_bytes", "i8"),
        ("base_rtt_ps", "i8"),
        ("next_byte", "i8"),
        ("acked_byte", "i8"),
        ("expected_byte", "i8"),  # the receiver's
        ("reported_byte", "i8"),  # the receiver's latest acknowledgement
        ("refused_byte", "i8"),  # the receiver's latest refusal of what came after a gap
        ("retry_byte", "i8"),  # selective repeat: gaps below are sent again already
        ("retry_end_byte", "i8"),  # and gaps up to here are lost
        ("highest_byte", "i8"),  # acknowledged out of order
        ("progress_ps", "i8"),
        ("next_send_ps", "i8"),
        ("max_rate", "f8"),
        ("rate", "f8"),
        ("target_rate", "f8"),  # DCQCN: target; HPCC and TIMELY: the rate of the last full update
        ("alpha", "f8"),
        ("utilisation", "f8"),  # HPCC
        ("rtt_difference_ps", "f8"),  # TIMELY
        ("last_rtt_ps", "i8"),
        ("update_byte", "i8"),  # a round trip is over when this is acknowledged
        ("congested_byte", "i8"),  # DCTCP: no second decrease before this is acknowledged
        ("num_marks", "i8"),
        ("num_batch", "i8"),
        ("stage", "i8"),
        ("first_mark_ps", "i8"),
        ("num_alpha_updates", "i8"),
        ("is_marked_for_alpha", "i4"),
        ("is_marked_for_rate", "i4"),
        ("increase_ps", "i8"),
        ("is_increase_due", "i8"),
    ]
)
"""One record a flow under way, both ends of its queue pair; taken again by later flows."""

PACKET = np.dtype(
    [
        ("connection", "i4"),
        ("link", "i4"),  # that it is on, or queued for
        ("ingress", "i4"),  # whose buffer account at this node it is on; -1: none
        ("next", "i4"),
        ("bytes", "i4"),
        ("kind", "i2"),
        ("is_marked", "i2"),
        ("hop", "i8"),  # position in the paths (or replies)
        ("last_hop", "i8"),
        ("byte", "i8"),  # data: its first; acknowledgement: the first that the receiver lacks
        ("selected_byte", "i8"),  # acknowledgement: the data packet that it answers
        ("sent_ps", "i8"),
        ("num_stamps", "i8"),
    ]
)

STAMP = np.dtype([("time_ps", "i8"), ("sent_bytes", "i8"), ("queue_bytes", "i8"), ("bytes_per_s", "f8")])
"""HPCC's in-band telemetry of one hop."""

COUNTERS = np.dtype(
    [
        ("has_begun", "i8"),
        ("free_packet", "i8"),
        ("num_free_packets", "i8"),
        ("free_connection", "i8"),
        ("num_free_connections", "i8"),
        ("num_started", "i8"),
        ("num_finished", "i8"),
        ("num_events", "i8"),
        ("num_data_packets", "i8"),
        ("num_repeated_packets", "i8"),
        ("num_draws", "i8"),
        ("num_ties", "i8"),
        ("num_trace_rows", "i8"),
    ]
)
