"""The packet loop: every packet on every link, with queues, pauses, marks, windows, rates and losses.

What makes it fast: a link that is idle sends a packet the moment that it arrives, without an event; an event serves a
link only while something waits there. A NIC takes its connections in turn from a list of those that may send, so that
the thousands that wait cost nothing. A data packet becomes its own acknowledgement. The calendar costs the same however
much lies on it.

Time is in whole picoseconds and equal times go in the order of scheduling, so that a run can be repeated to the byte.
"""

import numpy as np

from windtunnel.compiled.calendar import (
    NO_EVENT,
    is_empty,
    schedule,
    take_next,
)
from windtunnel.compiled.jit import entry, inner
from windtunnel.network.packet.kernel.endpoints import (
    answer,
    on_timer,
    start,
    take_answer,
    wake,
)
from windtunnel.network.packet.kernel.flows import complete, release
from windtunnel.network.packet.kernel.link import serve
from windtunnel.network.packet.kernel.queues import (
    ARRIVE,
    KIND_BITS,
    NUMBER_BITS,
    SERVE,
    START,
    TRACE,
    draw,
    event,
    free_packet,
)
from windtunnel.network.packet.kernel.state import DATA, NONE, PAUSE
from windtunnel.network.packet.kernel.switch import forward, pause_or_resume

DONE, MORE_EVENTS, MORE_PACKETS, MORE_CONNECTIONS, MORE_TRACE = range(5)
"""What `run` returns: nothing is left to happen; or a table is full: call again with a larger one."""


@entry
def run(
    settings,
    links,
    nodes,
    flows,
    channels,
    send_queues,
    first_flows,
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
    clock,
):
    """Simulate until nothing is left to happen, or a table is full; then call again.

    Args:
        channels: of ranks that reduce as SimAI's do; one that is not read else.
        first_flows: those that wait for no other, in the order in which they begin.
        paths, path_links: where each path begins, and its links, first to last; `replies` those of acknowledgements.
        neighbor_start, neighbor_links: each node's outgoing links; `distances[row, node]` the hops to a destination.
            Read where packets choose their way.
        stamps, seen: (packets, hops), (connections, hops) `STAMP`, for HPCC.
        sacks: (2 x connections, words) rings of bits, senders' then receivers', for selective repeat.
        traced, trace: links whose queues are looked at; (rows, 1 + links) time in picoseconds, then bytes.
    """
    if not counters[0].has_begun:
        counters[0].has_begun = 1
        for flow in first_flows:
            release(flows, channels, send_queues, clock, flow)
        if settings.trace_interval_ps > 0:
            schedule(clock, 0, event(TRACE, 0))
    while True:
        lack = full_table(settings, counters, clock, trace)
        if lack != DONE:
            return lack
        what = take_next(clock)
        if what == NO_EVENT:
            return DONE
        now_ps = clock.calendar[0].now_ps
        counters[0].num_events += 1
        kind = what & ((1 << KIND_BITS) - 1)
        number = (what >> KIND_BITS) & ((1 << NUMBER_BITS) - 1)
        generation = what >> (KIND_BITS + NUMBER_BITS)
        served = np.int64(NONE)  # the link that has new work
        completed = np.int64(NONE)  # a flow
        awake = np.int64(NONE)  # the connection that may send now
        freed = np.int64(NONE)  # a packet

        if kind == SERVE:
            links[number].is_due = 0
            served = number

        elif kind == ARRIVE:
            over = np.int64(packets[number].link)
            link = links[over]
            if packets[number].kind >= PAUSE:
                served = pause_or_resume(links, packets[number].kind, over ^ 1, now_ps)
                freed = number
            elif link.error_fraction > 0.0 and draw(settings, counters, link) < link.error_fraction:
                link.num_drops += 1
                freed = number
            elif packets[number].hop < packets[number].last_hop:
                served = forward(
                    settings,
                    links,
                    nodes,
                    flows,
                    connections,
                    packets,
                    counters,
                    path_links,
                    reply_links,
                    neighbor_start,
                    neighbor_links,
                    distances,
                    clock,
                    number,
                    over,
                )
                freed = number if served < 0 else freed
            elif packets[number].kind == DATA:
                served, completed = answer(
                    settings,
                    links,
                    nodes,
                    flows,
                    connections,
                    packets,
                    replies,
                    reply_links,
                    sacks,
                    counters,
                    clock,
                    number,
                )
                freed = number if served < 0 else freed
            else:
                awake, completed = take_answer(
                    settings, links, nodes, connections, packets, stamps, seen, sacks, counters, clock, number
                )
                freed = number

        elif kind == START:
            awake = start(
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
                number,
            )
            completed = number if awake < 0 else completed

        elif kind == TRACE:
            look_at_queues(links, traced, trace, counters, now_ps)
            if not is_empty(clock):
                schedule(clock, now_ps + settings.trace_interval_ps, event(TRACE, 0))

        elif connections[number].generation == generation:
            on_timer(settings, connections, clock, kind, number)
            awake = number

        if freed >= 0:
            free_packet(packets, counters, connections, freed)
        if completed >= 0:
            complete(flows, channels, send_queues, children_start, children, counters, clock, completed)
        if awake >= 0:
            served = wake(settings, links, connections, sacks, clock, awake)
        if served >= 0:
            serve(
                settings,
                links,
                nodes,
                flows,
                send_queues,
                connections,
                packets,
                stamps,
                sacks,
                paths,
                path_links,
                reply_links,
                counters,
                clock,
                served,
            )


@inner
def full_table(settings, counters, clock, trace):
    """Which table may not suffice for the next event; `DONE` if all do."""
    if clock.calendar[0].num_free < settings.most_children + 8:
        return MORE_EVENTS
    if counters[0].num_free_packets < 4:
        return MORE_PACKETS
    if counters[0].num_free_connections < 1:
        return MORE_CONNECTIONS
    if settings.trace_interval_ps > 0 and counters[0].num_trace_rows == trace.shape[0]:
        return MORE_TRACE
    return DONE


@inner
def look_at_queues(links, traced, trace, counters, now_ps):
    """Note what is queued on the links that are traced."""
    row = counters[0].num_trace_rows
    trace[row, 0] = now_ps
    for position in range(traced.size):
        trace[row, 1 + position] = links[traced[position]].queue_bytes
    counters[0].num_trace_rows = row + 1
