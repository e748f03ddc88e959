"""Start and complete flows: parents, send queues, and ranks of SimAI that reduce."""

from windtunnel.compiled.calendar import Clock, schedule
from windtunnel.compiled.jit import inner
from windtunnel.compiled.records import Records, int64
from windtunnel.network.packet.kernel.queues import START, event
from windtunnel.network.packet.kernel.state import EVERY, NONE, Counters, PacketFlow, PacketFlowTables

REDUCING_PS = 30_000


@inner
def start_when_free(flows: Records[PacketFlow], clock: Clock, flow: int, free_ps: int) -> None:
    """Schedule the start of a flow whose parents are complete; its send queue is free at `free_ps`."""
    due_ps = max(flows[flow].ready_ps + flows[flow].delay_ps, flows[flow].start_ps, free_ps, clock.calendar[0].now_ps)
    schedule(clock, due_ps, event(START, flow))


@inner
def reducing_ps(flows: PacketFlowTables, flow: int) -> int:
    """Return how long SimAI's sender reduces received data before it sends: one write and two reads of 10 ns each.

    Source: `NcclTreeFlowModel::insert_packets` and `PacketBundle::call` of SimAI 1.6, including its one flag for all
    channels of a rank.
    """
    channel = flows.channels[flows.flows[flow].channel]
    rank = flows.channels[channel.rank]
    place = channel.num_released % channel.cycle
    channel.num_released += 1
    if place == 0:
        rank.is_reducing = 1 - rank.is_reducing
        return int64(0)
    reduces = flows.flows[flow].reduction == EVERY or rank.is_reducing == 1
    return int64(REDUCING_PS) if reduces else int64(0)


@inner
def release(flows: PacketFlowTables, clock: Clock, flow: int) -> None:
    """Let a flow without incomplete parents take its turn in its send queue."""
    records = flows.flows
    if records[flow].channel >= 0:
        records[flow].delay_ps += reducing_ps(flows, flow)
    queue = flows.send_queues[records[flow].queue]
    if queue.is_busy:
        records[flow].next = NONE
        if queue.first < 0:
            queue.first = flow
        else:
            records[queue.last].next = flow
        queue.last = flow
        return
    queue.is_busy = 1
    start_when_free(records, clock, flow, queue.free_ps)


@inner
def sent(flows: PacketFlowTables, clock: Clock, flow: int, free_ps: int) -> None:
    """Note that the last byte of a flow leaves at `free_ps`; start the next flow of its send queue."""
    records = flows.flows
    records[flow].sent_ps = free_ps
    queue = flows.send_queues[records[flow].queue]
    queue.free_ps = free_ps
    if queue.first < 0:
        queue.is_busy = 0
        return
    follower = queue.first
    queue.first = records[follower].next
    start_when_free(records, clock, follower, free_ps)


@inner
def complete(flows: PacketFlowTables, counters: Records[Counters], clock: Clock, flow: int) -> None:
    """Note that a flow is complete, and release the flows that waited only for it."""
    records = flows.flows
    records[flow].finish_ps = clock.calendar[0].now_ps
    counters[0].num_finished += 1
    for position in range(flows.children_start[flow], flows.children_start[flow + 1]):
        child = flows.children[position]
        records[child].ready_ps = clock.calendar[0].now_ps
        records[child].parents_left -= 1
        if records[child].parents_left == 0:
            release(flows, clock, child)
