"""Pipeline schedules: complete, free of deadlock, with their papers' bubbles, equal to a brute-force scheduler."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.training.pipeline import kernel as pipeline
from windtunnel.training.pipeline.actions import BACKWARD, FORWARD, PAIRED, WEIGHT
from windtunnel.training.pipeline.schedules import Schedule, schedule

NAMES = ("gpipe", "1f1b", "interleaved", "looped_bfs", "zb_h1", "zb_h2", "zb_v", "dualpipe", "dualpipe_v")

FREE = pipeline.OverlapSettings(is_blocking=False, slowdown_fraction=0.0)
"""Sending and data-parallel communication cost a device nothing."""


def replay(
    plan: Schedule, forward_s: float, input_s: float, weight_s: float, message_s: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Starts and ends of a schedule whose devices take these seconds for one micro-batch in all their chunks."""
    chunks = plan.num_chunks
    per_device = 1 if plan.name == "dualpipe" else chunks // plan.num_devices
    seconds = np.zeros((3, chunks))
    seconds[FORWARD] = forward_s / per_device
    seconds[BACKWARD] = (input_s if plan.is_split else input_s + weight_s) / per_device
    seconds[WEIGHT] = weight_s / per_device
    zeros = np.zeros(chunks)
    times = pipeline.ChunkTimes(seconds, zeros, zeros + message_s, zeros, zeros, zeros + 1)
    starts, ends, _ = pipeline.run(plan.tables, times, FREE)
    return starts, ends


def bubble_s(plan: Schedule, starts: np.ndarray, ends: np.ndarray) -> float:
    """Longest idle time of a device between its own first and last action, or the whole pipeline's."""
    idle = []
    for device in range(plan.num_devices):
        own = slice(plan.offsets[device], plan.offsets[device + 1])
        busy = float((ends[own] - starts[own]).sum())
        staggered = plan.name in ("zb_h2", "zb_v")
        span = float(ends[own].max() - starts[own].min()) if staggered else float(ends.max())
        idle.append(span - busy)
    return max(idle)


def ideal_bubble_s(
    name: str, pp: int, forward_s: float, backward_s: float, weight_s: float, virtual_stages: int = 1
) -> float:
    """Return the seconds for which a device idles in one step, by the formula of the schedule's paper.

    Args:
        name: the schedule.
        pp: devices of the pipeline.
        forward_s: a device's whole forward pass of one micro-batch, all its chunks (of DualPipe: one of its two).
        backward_s: its gradients of inputs and of weights.
        weight_s: of those, the gradients of weights.
        virtual_stages: chunks of each device, for the schedules that take any number.

    Sources: GPipe and 1F1B (p-1)(F+B), interleaved divided by v (arXiv:2104.04473, section 2.2); looped BFS likewise
    (arXiv:2211.05953, section 4); ZB-H1 (p-1)(F+B-2W) and ZB-H2 (p-1)(F+B-3W) with B whole (arXiv:2401.10241, table 1);
    ZB-V 0 where F = B_input = W (arXiv:2405.15362); DualPipe (p/2-1)(F&B + B - 3W), F&B = F + B unless communication
    hides behind it (arXiv:2412.19437, table 2), DualPipeV (p-1) of half as long chunks.
    """
    both = forward_s + backward_s
    input_s = backward_s - weight_s
    return {
        "gpipe": (pp - 1) * both,
        "1f1b": (pp - 1) * both,
        "interleaved": (pp - 1) * both / virtual_stages,
        "looped_bfs": (pp - 1) * both / virtual_stages,
        "zb_h1": (pp - 1) * max(forward_s + input_s - weight_s, 0.0),
        "zb_h2": (pp - 1) * max(forward_s + input_s - 2 * weight_s, 0.0),
        "zb_v": 0.0,
        "dualpipe": max(pp // 2 - 1, 0) * max(both + backward_s - 3 * weight_s, 0.0),
        "dualpipe_v": (pp - 1) * max(both + backward_s - 3 * weight_s, 0.0) / 2,
    }[name]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("pp", "num_microbatches"), [(2, 8), (4, 8), (4, 16), (8, 32)])
def test_the_bubble_is_that_of_the_paper(name: str, pp: int, num_microbatches: int) -> None:
    chunks = 4 if name in ("interleaved", "looped_bfs") else 1
    plan = schedule(name, pp, num_microbatches, chunks)
    found = bubble_s(plan, *replay(plan, 1.0, 1.0, 1.0))
    assert found == pytest.approx(ideal_bubble_s(name, pp, 1.0, 2.0, 1.0, chunks), abs=1e-9)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "looped_bfs", "zb_h1", "zb_h2"])
def test_the_bubble_follows_unequal_passes_too(name: str) -> None:
    chunks = 2 if name in ("interleaved", "looped_bfs") else 1
    plan = schedule(name, 4, 16, chunks)
    found = bubble_s(plan, *replay(plan, 1.0, 1.3, 0.7))
    assert found == pytest.approx(ideal_bubble_s(name, 4, 1.0, 2.0, 0.7, chunks), abs=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_every_pass_runs_once_on_its_own_device(name: str) -> None:
    chunks = 3 if name in ("interleaved", "looped_bfs") else 1
    plan = schedule(name, 4, 8, chunks)
    actions = plan.actions.copy()
    actions[:, 0] %= PAIRED
    kinds = (FORWARD, BACKWARD, WEIGHT) if plan.is_split else (FORWARD, BACKWARD)
    each = range(4) if name == "dualpipe" else range(8)
    wanted = set(itertools.product(kinds, range(plan.num_chunks), each))
    assert {tuple(action) for action in actions.tolist()} == wanted
    assert len(actions) == len(wanted)
    for device in range(plan.num_devices):
        assert {int(plan.device_of_chunk[chunk]) for chunk in plan.of_device(device)[:, 1]} == {device}


def brute_force(plan: Schedule, seconds: dict[int, float], message_s: float) -> list[tuple[float, float]]:
    """The same semantics by repeated passes over all actions until nothing changes: starts only ever grow."""
    previous = {int(after): chunk for chunk, after in enumerate(plan.next_chunk) if after >= 0}
    actions = [tuple(int(value) for value in action) for action in plan.actions]
    device_of = [d for d in range(plan.num_devices) for _ in range(int(plan.offsets[d + 1] - plan.offsets[d]))]
    starts = [0.0] * len(actions)
    where = {(kind % PAIRED, chunk, microbatch): i for i, (kind, chunk, microbatch) in enumerate(actions)}
    for _ in range(4 * len(actions)):
        before = list(starts)
        for i, (kind, chunk, microbatch) in enumerate(actions):
            assert kind < PAIRED
            ready = starts[i]
            if i and device_of[i - 1] == device_of[i]:
                ready = max(ready, starts[i - 1] + seconds[actions[i - 1][0]])
            needs = None
            if kind == FORWARD and chunk in previous:
                needs = (FORWARD, previous[chunk], microbatch)
            elif kind == BACKWARD and plan.next_chunk[chunk] >= 0:
                needs = (BACKWARD, int(plan.next_chunk[chunk]), microbatch)
            elif kind == BACKWARD:
                needs = (FORWARD, chunk, microbatch)
            elif kind == WEIGHT:
                needs = (BACKWARD, chunk, microbatch)
            if needs is not None:
                source = where[needs]
                sent = message_s if device_of[source] != device_of[i] else 0.0
                ready = max(ready, starts[source] + seconds[needs[0]] + sent)
            starts[i] = ready
        if starts == before:
            break
    return [(start, start + seconds[action[0]]) for start, action in zip(starts, actions, strict=True)]


@given(
    name=st.sampled_from(["gpipe", "1f1b", "interleaved", "looped_bfs", "zb_h1", "zb_h2", "zb_v"]),
    pp=st.integers(1, 4),
    rounds=st.integers(2, 3),
    forward_s=st.floats(0.1, 2),
    input_s=st.floats(0.1, 2),
    weight_s=st.floats(0.1, 2),
    message_s=st.floats(0, 0.5),
)
def test_the_kernel_equals_a_brute_force_list_scheduler(
    name: str, pp: int, rounds: int, forward_s: float, input_s: float, weight_s: float, message_s: float
) -> None:
    """Invariant 24."""
    chunks = 2 if name in ("interleaved", "looped_bfs") else 1
    plan = schedule(name, pp, rounds * pp, chunks)
    per_device = plan.num_chunks // pp
    backward_s = input_s if plan.is_split else input_s + weight_s
    seconds = {FORWARD: forward_s / per_device, BACKWARD: backward_s / per_device, WEIGHT: weight_s / per_device}
    starts, ends = replay(plan, forward_s, input_s, weight_s, message_s)
    expected = np.array(brute_force(plan, seconds, message_s))
    np.testing.assert_allclose(np.stack([starts, ends], axis=1), expected, atol=1e-9)


def test_activations_in_flight_are_as_the_papers_say() -> None:
    # 1F1B holds pp - i micro-batches on device i, GPipe all of them (arXiv:2104.04473, section 2.2).
    for name, wanted in (("1f1b", [4, 3, 2, 1]), ("gpipe", [8, 8, 8, 8])):
        plan = schedule(name, 4, 8)
        assert plan.peaks(np.ones(4), np.ones(4)).tolist() == wanted


def test_a_blocking_sender_takes_longer() -> None:
    plan = schedule("1f1b", 4, 8)
    zeros = np.zeros(4)
    times = pipeline.ChunkTimes(np.ones((3, 4)), zeros, zeros + 0.1, zeros, zeros, zeros + 1)
    steps = [
        float(pipeline.run(plan.tables, times, FREE._replace(is_blocking=is_blocking))[1].max())
        for is_blocking in (False, True)
    ]
    assert steps[1] > steps[0]


def test_gradients_hide_behind_the_last_backward_pass() -> None:
    plan = schedule("1f1b", 1, 2)
    zeros = np.zeros(1)
    times = pipeline.ChunkTimes(np.ones((3, 1)), zeros, zeros, zeros, zeros + 0.5, zeros + 10)
    _, ends, done = pipeline.run(plan.tables, times, FREE)
    # Ten buckets: the first leaves after a tenth of the pass, the last a twentieth of a second after it.
    assert done[0] - ends.max() == pytest.approx(0.05)


@pytest.mark.parametrize(("name", "pp", "chunks"), [("1f1b", 1, 1), ("interleaved", 2, 2), ("interleaved", 4, 3)])
def test_paired_passes_hide_what_they_may(name: str, pp: int, chunks: int) -> None:
    num_microbatches = 8 * pp
    plan = schedule(name, pp, num_microbatches, chunks, paired=True)
    actions = plan.actions.copy()
    actions[:, 0] %= PAIRED
    alone = schedule(name, pp, num_microbatches, chunks)
    assert sorted(map(tuple, actions.tolist())) == sorted(map(tuple, alone.actions.tolist()))
    zeros = np.zeros(plan.num_chunks)
    times = pipeline.ChunkTimes(np.ones((3, plan.num_chunks)), zeros, zeros, zeros, zeros, zeros + 1)
    taken = [
        float(pipeline.run(plan.tables, times._replace(hidden_s=zeros + hidden_s), FREE)[1].max())
        for hidden_s in (0.0, 0.25)
    ]
    # Two passes of a pair save a quarter of a second each; warm-up and cool-down save nothing.
    num_pairs = num_microbatches * chunks - ((pp - 1) * 2 + (chunks - 1) * pp if chunks > 1 else 0) - 1
    assert taken[0] - taken[1] == pytest.approx(0.5 * num_pairs, rel=0.1)
