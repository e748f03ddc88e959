"""Replays a pipeline schedule: when every action starts and ends, given how long each takes.

Devices run their actions in order; an action waits for its device, for the chunk before it in its own micro-batch and
for the message between them. Everything is a number or an array; shapes are in the names' comments.
"""

import numpy as np
from numpy.typing import NDArray

from windtunnel.compiled.jit import entry, inner

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

FORWARD, BACKWARD, WEIGHT = 0, 1, 2
PAIRED = 4
"""Added to the kind of a forward pass that runs interleaved with the backward pass after it."""


@inner
def ready_at(
    kind, chunk, microbatch, device_of_chunk, next_chunk, previous_chunk, message_s, forward_end, backward_end
):
    """When an action's inputs are on its device; -1: not yet known."""
    if kind == FORWARD:
        before = previous_chunk[chunk]
        if before < 0:
            return 0.0
        done = forward_end[before, microbatch]
        crosses = device_of_chunk[before] != device_of_chunk[chunk]
        return done + message_s[before] if done >= 0.0 and crosses else done
    if kind == BACKWARD:
        after = next_chunk[chunk]
        if after < 0:
            return forward_end[chunk, microbatch]
        done = backward_end[after, microbatch]
        crosses = device_of_chunk[after] != device_of_chunk[chunk]
        return done + message_s[chunk] if done >= 0.0 and crosses else done
    return backward_end[chunk, microbatch]


@entry
def replay(
    actions,  # [num_actions, 3] kind, chunk, micro-batch; device after device
    offsets,  # [num_devices + 1]
    device_of_chunk,  # [num_chunks]
    next_chunk,  # [num_chunks] -1: last
    seconds,  # [3, num_chunks] of one action
    hidden_s,  # [num_chunks] that pairing saves: communication of one half beside computation of the other
    message_s,  # [num_chunks] from a chunk to the next, either way
    blocking,  # a device is busy while it sends
    gather_s,  # [num_chunks] parameters, before a chunk's first forward pass
    reduce_s,  # [num_chunks] gradients, after its last backward pass
    num_buckets,  # [num_chunks] pieces of both
    slowdown,  # of computation beside communication, relative
    is_split,  # weights' gradients are actions of their own
    starts,  # [num_actions] out
    ends,  # [num_actions] out
    forward_end,  # [num_chunks, num_microbatches] work
    backward_end,  # [num_chunks, num_microbatches] work
    previous_chunk,  # [num_chunks] work
    left,  # [num_chunks] work: actions that still add to a chunk's gradients
    cursor,  # [num_devices] work
    free,  # [num_devices] work
    wire_free,  # [num_devices] out: when data-parallel communication ends
    gathered,  # [num_chunks] work: when parameters are there
):
    """Fill `starts` and `ends`; returns the number of actions run: fewer than all of them means a deadlock."""
    num_devices = len(offsets) - 1
    num_chunks = len(device_of_chunk)
    for chunk in range(num_chunks):
        left[chunk] = 0
        gathered[chunk] = 0.0
        previous_chunk[chunk] = -1
        for microbatch in range(forward_end.shape[1]):
            forward_end[chunk, microbatch] = -1.0
            backward_end[chunk, microbatch] = -1.0
    for chunk in range(num_chunks):
        if next_chunk[chunk] >= 0:
            previous_chunk[next_chunk[chunk]] = chunk
    last_kind = WEIGHT if is_split else BACKWARD
    pair_size = 3 if is_split else 2
    for i in range(len(actions)):
        if actions[i, 0] == last_kind:
            left[actions[i, 1]] += 1
    # Parameters arrive in the order of their first use, from the start of the step.
    for device in range(num_devices):
        cursor[device] = offsets[device]
        free[device] = 0.0
        wire_free[device] = 0.0
        for i in range(offsets[device], offsets[device + 1]):
            chunk = actions[i, 1]
            if actions[i, 0] % PAIRED == FORWARD and gathered[chunk] == 0.0 and gather_s[chunk] > 0.0:
                wire_free[device] += gather_s[chunk]
                gathered[chunk] = wire_free[device]

    num_run = 0
    moved = True
    while moved:
        moved = False
        for device in range(num_devices):
            while cursor[device] < offsets[device + 1]:
                first = cursor[device]
                size = pair_size if actions[first, 0] >= PAIRED else 1
                start = free[device]
                known = True
                for i in range(first, min(first + size, first + 2)):
                    ready = ready_at(
                        actions[i, 0] % PAIRED,
                        actions[i, 1],
                        actions[i, 2],
                        device_of_chunk,
                        next_chunk,
                        previous_chunk,
                        message_s,
                        forward_end,
                        backward_end,
                    )
                    known = known and ready >= 0.0
                    start = max(start, ready)
                if not known:
                    break
                end = start
                for i in range(first, first + size):
                    kind, chunk = actions[i, 0] % PAIRED, actions[i, 1]
                    took = seconds[kind, chunk]
                    if size > 1 and kind != WEIGHT:
                        took = max(took - hidden_s[chunk], 0.0)
                    starts[i] = end
                    if kind == FORWARD and end < gathered[chunk]:
                        # The first layers' parameters come first; the last bucket's layers run after it has arrived.
                        beside = min(took, gathered[chunk] - end)
                        took = max(took + slowdown * beside, gathered[chunk] - end + took / num_buckets[chunk])
                    if kind == last_kind:
                        left[chunk] -= 1
                        if left[chunk] == 0 and reduce_s[chunk] > 0.0:
                            wire = max(wire_free[device], end + took / num_buckets[chunk])
                            beside = max(min(end + took, wire + reduce_s[chunk]) - wire, 0.0)
                            took += slowdown * beside
                            last_bucket = end + took + reduce_s[chunk] / num_buckets[chunk]
                            wire_free[device] = max(wire + reduce_s[chunk], last_bucket)
                    end += took
                    ends[i] = end
                free[device] = end
                for i in range(first, first + size):
                    kind, chunk, microbatch = actions[i, 0] % PAIRED, actions[i, 1], actions[i, 2]
                    target = -1
                    if kind == FORWARD:
                        forward_end[chunk, microbatch] = end
                        target = next_chunk[chunk]
                    elif kind == BACKWARD:
                        backward_end[chunk, microbatch] = end
                        target = previous_chunk[chunk]
                    if blocking and target >= 0 and device_of_chunk[target] != device:
                        free[device] += message_s[chunk if kind == FORWARD else target]
                cursor[device] += size
                num_run += size
                moved = True
    for device in range(num_devices):
        wire_free[device] = max(wire_free[device], free[device])
    return num_run


@entry
def peak_bytes(
    actions,  # [num_actions, 3]
    offsets,  # [num_devices + 1]
    kept_bytes,  # [num_chunks] of one micro-batch, from its forward pass
    weight_bytes,  # [num_chunks] of those, until the weights' gradient where that is an action of its own
    is_split,
    peaks,  # [num_devices] out
):
    """Most bytes of activations that each device holds at once."""
    for device in range(len(offsets) - 1):
        held = 0.0
        peak = 0.0
        for i in range(offsets[device], offsets[device + 1]):
            kind, chunk = actions[i, 0] % PAIRED, actions[i, 1]
            if kind == FORWARD:
                held += kept_bytes[chunk]
            elif kind == BACKWARD:
                held -= kept_bytes[chunk] - weight_bytes[chunk] if is_split else kept_bytes[chunk]
            else:
                held -= weight_bytes[chunk]
            peak = max(peak, held)
        peaks[device] = peak
    return 0


def run(
    schedule_arrays: tuple[Ints, Ints, Ints, Ints, int],
    seconds: Floats,
    hidden_s: Floats,
    message_s: Floats,
    blocking: bool,
    gather_s: Floats,
    reduce_s: Floats,
    num_buckets: Floats,
    slowdown: float,
    is_split: bool,
) -> tuple[Floats, Floats, Floats]:
    """`replay` with its working arrays made; returns starts, ends and when each device's communication is done.

    Args:
        schedule_arrays: actions, offsets, device_of_chunk, next_chunk, number of micro-batches.
        seconds: `[3, num_chunks]`; see `replay` for the others.
    """
    actions, offsets, device_of_chunk, next_chunk, num_microbatches = schedule_arrays
    num_devices, num_chunks = len(offsets) - 1, len(device_of_chunk)
    starts, ends = np.empty(len(actions)), np.empty(len(actions))
    wire_free = np.empty(num_devices)
    num_run = replay(
        actions,
        offsets,
        device_of_chunk,
        next_chunk,
        seconds,
        hidden_s,
        message_s,
        blocking,
        gather_s,
        reduce_s,
        num_buckets,
        slowdown,
        is_split,
        starts,
        ends,
        np.empty((num_chunks, num_microbatches)),
        np.empty((num_chunks, num_microbatches)),
        np.empty(num_chunks, dtype=np.int64),
        np.empty(num_chunks, dtype=np.int64),
        np.empty(num_devices, dtype=np.int64),
        np.empty(num_devices),
        wire_free,
        np.empty(num_chunks),
    )
    assert num_run == len(actions), "a schedule whose actions wait for each other"
    return starts, ends, wire_free
