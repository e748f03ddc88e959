"""Flows that wait for each other, for their turn in a send queue, and for a rank of SimAI that reduces."""

import numpy as np

from windtunnel.compiled.calendar import schedule
from windtunnel.compiled.jit import inner
from windtunnel.network.packet.kernel.queues import START, event
from windtunnel.network.packet.kernel.state import EVERY, NONE

REDUCING_PS = 30_000


@inner
def start_when_free(flows, clock, flow, free_ps):
    """Let a flow whose parents are complete start once its send queue is free, at `free_ps`."""
    due_ps = max(flows[flow].ready_ps + flows[flow].delay_ps, flows[flow].start_ps, free_ps, clock.calendar[0].now_ps)
    schedule(clock, due_ps, event(START, flow))


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
def release(flows, channels, send_queues, clock, flow):
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
    start_when_free(flows, clock, flow, queue.free_ps)


@inner
def sent(flows, send_queues, clock, flow, free_ps):
    """The last byte of a flow has left at `free_ps`: the next one of its send queue may."""
    flows[flow].sent_ps = free_ps
    queue = send_queues[flows[flow].queue]
    queue.free_ps = free_ps
    if queue.first < 0:
        queue.is_busy = 0
        return
    follower = queue.first
    queue.first = flows[follower].next
    start_when_free(flows, clock, follower, free_ps)


@inner
def complete(flows, channels, send_queues, children_start, children, counters, clock, flow):
    """A flow is complete: note it, and release what waited for it."""
    flows[flow].finish_ps = clock.calendar[0].now_ps
    counters[0].num_finished += 1
    for position in range(children_start[flow], children_start[flow + 1]):
        child = children[position]
        flows[child].ready_ps = clock.calendar[0].now_ps
        flows[child].parents_left -= 1
        if flows[child].parents_left == 0:
            release(flows, channels, send_queues, clock, child)
