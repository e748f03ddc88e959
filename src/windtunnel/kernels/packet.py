"""The packet loop: every packet on every link, with queues, pauses, marks, windows, rates and losses.

What makes it fast: a link that is idle sends a packet the moment that it arrives, without an event; an event serves a
link only while something waits there. A NIC takes its connections in turn from a list of those that may send, so that
the thousands that wait cost nothing. A data packet becomes its own acknowledgement. The calendar costs the same however
much lies on it.

Time is in whole picoseconds and equal times go in the order of scheduling, so that a run can be repeated to the byte.
"""

import numpy as np

from windtunnel.kernels.calendar import NO_EVENT, is_empty, schedule, schedule_message, take_next
from windtunnel.kernels.congestion import acknowledged, dcqcn_decrease, dcqcn_increase, dcqcn_mark
from windtunnel.kernels.jit import entry
from windtunnel.kernels.packet_ends import (
    begin,
    complete,
    next_data_packet,
    receive_answer,
    receive_data,
    release,
    sent,
    wake,
)
from windtunnel.kernels.packet_queues import (
    ARRIVE,
    DECREASE,
    INCREASE,
    KIND_BITS,
    NUMBER_BITS,
    SEND,
    SERVE,
    START,
    TIMEOUT,
    TRACE,
    draw,
    enqueue,
    event,
    free_packet,
    note_sender,
    overtake,
    sending_ps,
    timer,
)
from windtunnel.kernels.packet_state import DATA, DCQCN, ECMP, GO_BACK_N, IDLE, NONE, PAUSE, SWITCH
from windtunnel.kernels.packet_switch import admit, choose_link, head_start_ps, leave_switch

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
    events,
    heaps,
    buckets,
    calendar,
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
            release(flows, channels, send_queues, events, heaps, buckets, calendar, flow)
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
                    if link.sender >= 0:
                        note_sender(counters, links[served], now_ps, link.sender)
                    if packet_kind != DATA and settings.ack_first:
                        overtake(packets, links[served], packet)
                    else:
                        enqueue(packets, links[served], packet)
            elif packet_kind == DATA:
                # At the destination: the packet turns into its answer.
                if link.sender >= 0:
                    note_sender(counters, nodes[link.target], now_ps, link.sender)
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
                if link.sender >= 0:
                    note_sender(counters, nodes[link.target], now_ps, link.sender)
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
                    release(flows, channels, send_queues, events, heaps, buckets, calendar, follower)
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
                flows,
                channels,
                send_queues,
                children_start,
                children,
                counters,
                events,
                heaps,
                buckets,
                calendar,
                completed,
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
        if link.sender < 0:
            schedule(events, heaps, buckets, calendar, due_ps, event(ARRIVE, packet))
        else:
            schedule_message(events, heaps, buckets, calendar, due_ps, event(ARRIVE, packet), link.sender)
