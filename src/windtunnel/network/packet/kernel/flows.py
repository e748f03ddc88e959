"""Start and complete flows: parents, send queues, and ranks of SimAI that reduce."""

from windtunnel.compiled.calendar import schedule
from windtunnel.compiled.jit import inner
from windtunnel.compiled.records import int64
from windtunnel.network.packet.kernel import codes
from windtunnel.network.packet.kernel.queues import event
from windtunnel.network.packet.kernel.state import PacketState

REDUCING_PS = 30_000


@inner
def start_when_free(state: PacketState, flow: int, free_ps: int) -> None:
    """Schedule the start of a flow whose parents are complete; its send queue is free at `free_ps`."""
    record, now_ps = state.flows[flow], state.clock.calendar[0].now_ps
    due_ps = max(record.ready_ps + record.delay_ps, record.start_ps, free_ps, now_ps)
    schedule(state.clock, due_ps, event(codes.START, flow))


@inner
def reducing_ps(state: PacketState, flow: int) -> int:
    """Return how long SimAI's sender reduces received data before it sends: one write and two reads of 10 ns each.

    Source: `NcclTreeFlowModel::insert_packets` and `PacketBundle::call` of SimAI 1.6, including its one flag for all
    channels of a rank.
    """
    channel = state.channels[state.flows[flow].channel]
    rank = state.channels[channel.rank]
    place = channel.num_released % channel.cycle
    channel.num_released += 1
    if place == 0:
        rank.is_reducing = 1 - rank.is_reducing
        return int64(0)
    reduces = state.flows[flow].reduction == codes.EVERY or rank.is_reducing == 1
    return int64(REDUCING_PS) if reduces else int64(0)


@inner
def release(state: PacketState, flow: int) -> None:
    """Let a flow without incomplete parents take its turn in its send queue."""
    records = state.flows
    if records[flow].channel >= 0:
        records[flow].delay_ps += reducing_ps(state, flow)
    queue = state.send_queues[records[flow].queue]
    if queue.is_busy:
        records[flow].next = codes.NONE
        if queue.first < 0:
            queue.first = flow
        else:
            records[queue.last].next = flow
        queue.last = flow
        return
    queue.is_busy = 1
    start_when_free(state, flow, queue.free_ps)


@inner
def sent(state: PacketState, flow: int, free_ps: int) -> None:
    """Note that the last byte of a flow leaves at `free_ps`; start the next flow of its send queue."""
    records = state.flows
    records[flow].sent_ps = free_ps
    queue = state.send_queues[records[flow].queue]
    queue.free_ps = free_ps
    if queue.first < 0:
        queue.is_busy = 0
        return
    follower = queue.first
    queue.first = records[follower].next
    start_when_free(state, follower, free_ps)


@inner
def complete(state: PacketState, flow: int) -> None:
    """Note that a flow is complete, and release the flows that waited only for it."""
    now_ps = state.clock.calendar[0].now_ps
    records = state.flows
    records[flow].finish_ps = now_ps
    state.counters[0].num_finished += 1
    for position in range(state.children_start[flow], state.children_start[flow + 1]):
        child = state.children[position]
        records[child].ready_ps = now_ps
        records[child].parents_left -= 1
        if records[child].parents_left == 0:
            release(state, child)
