"""Replays a pipeline schedule: when every action starts and ends, given how long each takes.

Devices run their actions in order; an action waits for its device, for the chunk before it in its own micro-batch and
for the message between them.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.compiled.jit import entry, inner
from windtunnel.training.pipeline.actions import BACKWARD, FORWARD, PAIRED, WEIGHT, ScheduleTables

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

UNKNOWN = -1.0
"""Time of what has not run yet."""


class ChunkTimes(NamedTuple):
    """Seconds of every chunk, (num_chunks,) where no shape is given."""

    actions_s: Floats  # (3, num_chunks) one action, by kind
    hidden_s: Floats  # saved by each of two paired passes: one's communication runs beside the other's computation
    message_s: Floats  # a message to the next chunk, or back
    gather_s: Floats  # gathering parameters, before a chunk's first forward pass
    reduce_s: Floats  # reducing gradients, after a chunk's last backward pass
    num_buckets: Floats  # pieces of both


class OverlapSettings(NamedTuple):
    """How communication and computation of one device affect each other."""

    is_blocking: bool  # whether a device is busy while it sends
    slowdown_fraction: float  # how much longer computation takes beside data-parallel communication


class ReplayState(NamedTuple):
    """Input, results and scratch of a replay."""

    schedule: ScheduleTables
    times: ChunkTimes
    overlap: OverlapSettings
    starts_s: Floats  # (num_actions,) out; `ends_s` too
    ends_s: Floats
    wire_free_s: Floats  # (num_devices,) out: when data-parallel communication ends
    free_s: Floats  # (num_devices,) when the device is idle again
    cursor: Ints  # (num_devices,) the next action
    forward_end_s: Floats  # (num_chunks, num_microbatches) UNKNOWN: has not run; `backward_end_s` too
    backward_end_s: Floats
    previous_chunk: Ints  # (num_chunks,) -1: first
    num_left: Ints  # (num_chunks,) actions that still add to a chunk's gradients
    gathered_s: Floats  # (num_chunks,) when parameters are there


@inner
def prepare(state: ReplayState, last_kind: int) -> None:
    """Set up the tables; parameters arrive in the order of their first use, from the start of the step."""
    schedule, times = state.schedule, state.times
    actions, offsets = schedule.actions, schedule.offsets
    for chunk in range(len(schedule.next_chunk)):
        state.num_left[chunk] = 0
        state.gathered_s[chunk] = 0.0
        state.previous_chunk[chunk] = -1
        for microbatch in range(schedule.num_microbatches):
            state.forward_end_s[chunk, microbatch] = UNKNOWN
            state.backward_end_s[chunk, microbatch] = UNKNOWN
    for chunk in range(len(schedule.next_chunk)):
        if schedule.next_chunk[chunk] >= 0:
            state.previous_chunk[schedule.next_chunk[chunk]] = chunk
    for i in range(len(actions)):
        if actions[i, 0] == last_kind:
            state.num_left[actions[i, 1]] += 1
    for device in range(len(offsets) - 1):
        state.cursor[device] = offsets[device]
        state.free_s[device] = 0.0
        wire_free_s = 0.0
        for i in range(offsets[device], offsets[device + 1]):
            chunk = actions[i, 1]
            is_forward = actions[i, 0] % PAIRED == FORWARD
            if is_forward and state.gathered_s[chunk] == 0.0 and times.gather_s[chunk] > 0.0:
                wire_free_s += times.gather_s[chunk]
                state.gathered_s[chunk] = wire_free_s
        state.wire_free_s[device] = wire_free_s


@inner
def ready_s(state: ReplayState, index: int) -> float:
    """Return when an action's inputs are on its device; UNKNOWN while they depend on what has not run."""
    schedule, message_s, actions = state.schedule, state.times.message_s, state.schedule.actions
    kind, chunk, microbatch = actions[index, 0] % PAIRED, actions[index, 1], actions[index, 2]
    device = schedule.device_of_chunk[chunk]
    if kind == FORWARD:
        before = state.previous_chunk[chunk]
        if before < 0:
            return 0.0
        done_s = float(state.forward_end_s[before, microbatch])
        crosses = schedule.device_of_chunk[before] != device
        return done_s + float(message_s[before]) if done_s >= 0.0 and crosses else done_s
    if kind == BACKWARD:
        after = schedule.next_chunk[chunk]
        if after < 0:
            return float(state.forward_end_s[chunk, microbatch])
        done_s = float(state.backward_end_s[after, microbatch])
        crosses = schedule.device_of_chunk[after] != device
        return done_s + float(message_s[chunk]) if done_s >= 0.0 and crosses else done_s
    return float(state.backward_end_s[chunk, microbatch])


@inner
def run_actions(state: ReplayState, first: int, size: int, start_s: float, device: int) -> float:
    """Run the actions of one piece back to back; return when the last one ends.

    Where parameters or gradients are on the wire, computation is slower; a chunk's last bucket of parameters holds up
    the layers that it belongs to, and its first bucket of gradients leaves once its layers are done.
    """
    actions, times, slowdown_fraction = state.schedule.actions, state.times, state.overlap.slowdown_fraction
    last_kind = WEIGHT if state.schedule.is_split else BACKWARD
    end_s = start_s
    for i in range(first, first + size):
        kind, chunk = actions[i, 0] % PAIRED, actions[i, 1]
        took_s = times.actions_s[kind, chunk]
        if size > 1 and kind != WEIGHT:
            took_s = max(took_s - times.hidden_s[chunk], 0.0)
        state.starts_s[i] = end_s
        gathered_s = state.gathered_s[chunk]
        if kind == FORWARD and end_s < gathered_s:
            beside_s = min(took_s, gathered_s - end_s)
            last_bucket_s = took_s / times.num_buckets[chunk]
            took_s = max(took_s + slowdown_fraction * beside_s, gathered_s - end_s + last_bucket_s)
        if kind == last_kind:
            state.num_left[chunk] -= 1
            if state.num_left[chunk] == 0 and times.reduce_s[chunk] > 0.0:
                reduce_s, num_buckets = times.reduce_s[chunk], times.num_buckets[chunk]
                wire_s = max(state.wire_free_s[device], end_s + took_s / num_buckets)
                beside_s = max(min(end_s + took_s, wire_s + reduce_s) - wire_s, 0.0)
                took_s += slowdown_fraction * beside_s
                state.wire_free_s[device] = max(wire_s + reduce_s, end_s + took_s + reduce_s / num_buckets)
        end_s += took_s
        state.ends_s[i] = end_s
    return end_s


@inner
def finish(state: ReplayState, index: int, end_s: float) -> tuple[int, int]:
    """Note an action's end; return the chunk that its message goes to, -1 for none, and the earlier one of the two."""
    actions = state.schedule.actions
    kind, chunk, microbatch = actions[index, 0] % PAIRED, actions[index, 1], actions[index, 2]
    if kind == FORWARD:
        state.forward_end_s[chunk, microbatch] = end_s
        return state.schedule.next_chunk[chunk], chunk
    if kind == BACKWARD:
        state.backward_end_s[chunk, microbatch] = end_s
        return state.previous_chunk[chunk], state.previous_chunk[chunk]
    return -1, -1


@entry
def replay(state: ReplayState) -> int:
    """Run all actions; return how many have run: fewer than all of them means a deadlock.

    Results are `starts_s`, `ends_s` and `wire_free_s` of `state`.
    """
    schedule, overlap, cursor = state.schedule, state.overlap, state.cursor
    actions, offsets = schedule.actions, schedule.offsets
    pair_size = 3 if schedule.is_split else 2
    prepare(state, WEIGHT if schedule.is_split else BACKWARD)
    num_devices, num_run = len(offsets) - 1, 0
    has_moved = True
    while has_moved:
        has_moved = False
        for device in range(num_devices):
            while cursor[device] < offsets[device + 1]:
                first = cursor[device]
                size = pair_size if actions[first, 0] >= PAIRED else 1
                start_s = state.free_s[device]
                is_known = True
                for i in range(first, first + min(size, 2)):
                    input_s = ready_s(state, i)
                    is_known = is_known and input_s >= 0.0
                    start_s = max(start_s, input_s)
                if not is_known:
                    break
                end_s = run_actions(state, first, size, start_s, device)
                state.free_s[device] = end_s
                for i in range(first, first + size):
                    target, sender = finish(state, i, end_s)
                    if overlap.is_blocking and target >= 0 and schedule.device_of_chunk[target] != device:
                        state.free_s[device] += state.times.message_s[sender]
                cursor[device] += size
                num_run += size
                has_moved = True
    for device in range(num_devices):
        state.wire_free_s[device] = max(state.wire_free_s[device], state.free_s[device])
    return num_run


def run(schedule: ScheduleTables, times: ChunkTimes, overlap: OverlapSettings) -> tuple[Floats, Floats, Floats]:
    """Replay a schedule; return starts, ends and when each device's data-parallel communication is done."""
    num_actions, num_devices = len(schedule.actions), len(schedule.offsets) - 1
    num_chunks, num_microbatches = len(schedule.device_of_chunk), schedule.num_microbatches
    state = ReplayState(
        schedule=schedule,
        times=times,
        overlap=overlap,
        starts_s=np.empty(num_actions),
        ends_s=np.empty(num_actions),
        wire_free_s=np.empty(num_devices),
        free_s=np.empty(num_devices),
        cursor=np.empty(num_devices, dtype=np.int64),
        forward_end_s=np.empty((num_chunks, num_microbatches)),
        backward_end_s=np.empty((num_chunks, num_microbatches)),
        previous_chunk=np.empty(num_chunks, dtype=np.int64),
        num_left=np.empty(num_chunks, dtype=np.int64),
        gathered_s=np.empty(num_chunks),
    )
    num_run = replay(state)
    assert num_run == num_actions, "a schedule whose actions wait for each other"
    return state.starts_s, state.ends_s, state.wire_free_s
