"""Pipeline schedules as data: the actions of every device of a pipeline in order, without times.

gpipe        arXiv:1811.06965     all forward passes, then all backward passes
1f1b         arXiv:2104.04473     as few micro-batches in flight as there are stages behind
interleaved  arXiv:2104.04473     1f1b over several chunks on each device, `pp` micro-batches of a chunk in turn
looped_bfs   arXiv:2211.05953     all micro-batches of a chunk in turn
zb_h1, zb_h2 arXiv:2401.10241     weights' gradients fill bubbles; h2 keeps twice the activations
zb_v         arXiv:2405.15362     two chunks on each device, the pipeline folded into a V
dualpipe     arXiv:2412.19437     from both ends at once; every stage held twice (deepseek-ai/DualPipe, dualpipe.py)
dualpipe_v   deepseek-ai/DualPipe dualpipev.py: DualPipe cut in half, folded into a V
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial

import numpy as np

from windtunnel.compiled.arrays import Floats, Ints
from windtunnel.errors import InputError
from windtunnel.training.pipeline.actions import BACKWARD, FORWARD, PAIRED, WEIGHT, ScheduleTables

Action = tuple[int, int, int]
"""Kind, chunk, micro-batch; a kind of `FORWARD + PAIRED` is one piece with the backward pass after it."""


@dataclass(frozen=True)
class Schedule:
    """Actions of all devices, device by device, each in its order of execution."""

    name: str
    actions: Ints
    """`[num_actions, 3]`: kind (`PAIRED` or not), chunk, micro-batch."""
    offsets: Ints
    """Where each device's actions begin; one more entry for the end."""
    device_of_chunk: Ints
    next_chunk: Ints
    """The chunk that a forward pass goes on with; -1: it ends."""
    num_microbatches: int

    @property
    def num_devices(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_chunks(self) -> int:
        return len(self.device_of_chunk)

    @property
    def is_split(self) -> bool:
        """Whether weights' gradients are actions of their own."""
        return bool((self.actions[:, 0] == WEIGHT).any())

    @property
    def tables(self) -> ScheduleTables:
        """Return the schedule as the replay reads it."""
        return ScheduleTables(
            self.actions, self.offsets, self.device_of_chunk, self.next_chunk, self.num_microbatches, self.is_split
        )

    def peaks(self, kept: Floats, for_weights: Floats) -> Floats:
        """Return (num_devices,) the most that each device keeps at once, of `kept` (num_chunks,) a micro-batch from its
        forward pass on.

        `for_weights` is the part of it that the weight gradient needs, where that is its own action.
        """
        kind, chunk = self.actions[:, 0] % PAIRED, self.actions[:, 1]
        freed = kept - for_weights if self.is_split else kept
        changes = np.choose(kind, [kept[chunk], -freed[chunk], -for_weights[chunk]])
        return np.array([np.cumsum(each).max(initial=0.0) for each in np.split(changes, self.offsets[1:-1])])

    def of_device(self, device: int) -> Ints:
        """Return one device's actions."""
        return self.actions[self.offsets[device] : self.offsets[device + 1]]


@cache
def schedule(name: str, pp: int, num_microbatches: int, virtual_stages: int = 1, paired: bool = False) -> Schedule:
    """Return the schedule `name` for a pipeline of `pp` devices.

    Chunks are numbered in the order of the forward pass; DualPipe's second direction has chunks `pp` to `2 pp - 1`.
    InputError where there is no such schedule.

    Args:
        virtual_stages: chunks of each device, for the schedules that take any number.
        paired: a steady forward pass and the backward pass after it, of another micro-batch, run as one piece; DualPipe
            does so anyhow.
    """
    devices: Iterable[int] = [c if c < pp else 2 * pp - 1 - c for c in range(2 * pp)]
    if name in _WRITERS:
        written = (list(_WRITERS[name](pp, num_microbatches, device)) for device in range(pp))
        lists = [np.array(actions, np.int64).reshape(-1, 3) for actions in written]
        devices = range(pp) if name in ("zb_h1", "zb_h2") else devices
    elif name in ("gpipe", "1f1b", "interleaved", "looped_bfs"):
        lists = [_looped(name, pp, num_microbatches, virtual_stages, device, paired) for device in range(pp)]
        devices = (chunk % pp for chunk in range(pp * virtual_stages))
    else:
        raise InputError(f"there is no pipeline schedule {name!r}")
    device_of_chunk = np.array(list(devices), dtype=np.int64)
    following = np.arange(1, len(device_of_chunk) + 1, dtype=np.int64)
    following[[-1, pp - 1] if name == "dualpipe" else -1] = -1
    offsets = np.cumsum([0, *(len(actions) for actions in lists)]).astype(np.int64)
    return Schedule(name, np.concatenate(lists), offsets, device_of_chunk, following, num_microbatches)


def _looped(name: str, pp: int, num_microbatches: int, chunks: int, device: int, paired: bool) -> Ints:
    """Alternate one forward and one backward pass after a warm-up, whose length depends on the schedule.

    Where the two are one piece, the warm-up is longer by one, so that they are of different micro-batches on the last
    device too (Megatron-Core combined_1f1b.py).
    """
    total = num_microbatches * chunks
    if name in ("gpipe", "looped_bfs"):
        warm_up = total
    elif chunks == 1:
        warm_up = min(pp - device - 1, total)
    else:
        # Megatron-Core schedules.py, get_pp_rank_microbatches.
        warm_up = min((pp - device - 1) * 2 + (chunks - 1) * pp, total)
    if paired:
        warm_up = min(warm_up + 1, total)
    group = pp if name == "interleaved" else num_microbatches
    step = np.arange(total)
    turn = step // group
    microbatch = (turn // chunks) * group + step % group
    chunk = turn % chunks * pp + device
    forward = np.stack([np.full(total, FORWARD), chunk, microbatch], axis=1)
    backward = np.stack([np.full(total, BACKWARD), (chunks - 1 - turn % chunks) * pp + device, microbatch], axis=1)
    if name == "gpipe":
        return np.concatenate([forward, backward[::-1]])
    steady = total - warm_up
    alternate = np.empty((2 * steady, 3), dtype=np.int64)
    alternate[0::2] = forward[warm_up:]
    alternate[0::2, 0] += PAIRED if paired else 0
    alternate[1::2] = backward[:steady]
    return np.concatenate([forward[:warm_up], alternate, backward[steady:]])


def _zero_bubble(pp: int, num_microbatches: int, device: int, memory: int) -> Iterator[Action]:
    """Yield ZB-H1 (`memory` 1) or ZB-H2 (2) of arXiv:2401.10241, section 2: 1F1B with delayed weight gradients.

    They lag by `memory` micro-batches a stage, so that all devices hold as many activations as the first one does.
    """
    warm_up = min(memory * (pp - 1 - device), num_microbatches)
    lag = memory * device
    for microbatch in range(warm_up):
        yield FORWARD, device, microbatch
    for microbatch in range(num_microbatches):
        if microbatch + warm_up < num_microbatches:
            yield FORWARD, device, microbatch + warm_up
        yield BACKWARD, device, microbatch
        if microbatch >= lag:
            yield WEIGHT, device, microbatch - lag
    for microbatch in range(max(num_microbatches - lag, 0), num_microbatches):
        yield WEIGHT, device, microbatch


class _Counter:
    """Numbers the micro-batches of each kind and chunk in the order of the calls."""

    def __init__(self) -> None:
        self.counts: dict[tuple[int, int], int] = {}

    def __call__(self, kind: int, chunk: int) -> Action:
        microbatch = self.counts.get((kind, chunk), 0)
        self.counts[kind, chunk] = microbatch + 1
        return kind, chunk, microbatch


def _zero_bubble_v(pp: int, num_microbatches: int, device: int) -> Iterator[Action]:
    """Yield ZB-V of arXiv:2405.15362, in the order of PyTorch 2.6's `ScheduleZBVZeroBubble`."""
    down, up = device, 2 * pp - 1 - device
    counter = _Counter()

    def both(chunk: int) -> Iterator[Action]:
        yield counter(BACKWARD, chunk)
        yield counter(WEIGHT, chunk)

    for _ in range(2 * (pp - device) - 1):
        yield counter(FORWARD, down)
    for _ in range(device):
        yield counter(FORWARD, up)
        yield counter(FORWARD, down)
    for _ in range(pp - device):
        yield counter(FORWARD, up)
        yield from both(up)
    while counter.counts[FORWARD, up] < num_microbatches:
        if counter.counts[FORWARD, down] < num_microbatches:
            yield counter(FORWARD, down)
        yield from both(down)
        yield counter(FORWARD, up)
        yield from both(up)
    for _ in range(device):
        yield counter(BACKWARD, down)
        yield counter(BACKWARD, up)
    for _ in range(pp - device):
        yield from both(down)
    for chunk in (up, down):
        while counter.counts.get((WEIGHT, chunk), 0) < num_microbatches:
            yield counter(WEIGHT, chunk)


def _dualpipe(pp: int, num_microbatches: int, device: int) -> Iterator[Action]:
    """Yield `step` of deepseek-ai/DualPipe, dualpipe.py: each direction has half of the micro-batches."""
    half = pp // 2
    from_end = min(device, pp - 1 - device)
    directions = (device, 2 * pp - 1 - device)
    near, far = directions if device < half else directions[::-1]
    main = num_microbatches // 2 - pp + from_end + 1
    yield from _bidirectional(near, far, half - from_end - 1, from_end, main)


def _dualpipe_v(pp: int, num_microbatches: int, device: int) -> Iterator[Action]:
    """Yield `step` of deepseek-ai/DualPipe, dualpipev.py."""
    main = num_microbatches - 2 * pp + device + 1
    yield from _bidirectional(device, 2 * pp - 1 - device, pp - device - 1, device, main)


def _bidirectional(near: int, far: int, inner: int, from_end: int, main: int) -> Iterator[Action]:
    """Yield the eight steps that DualPipe and DualPipeV share; `near` and `far` are the device's two chunks."""
    counter = _Counter()
    waiting: list[Action] = []

    def backward(chunk: int, split: bool) -> Iterator[Action]:
        _, _, microbatch = action = counter(BACKWARD, chunk)
        yield action
        weight = (WEIGHT, chunk, microbatch)
        if split:
            waiting.append(weight)
        else:
            yield weight

    def paired(chunk: int) -> Action:
        kind, _, microbatch = counter(FORWARD, chunk)
        return kind + PAIRED, chunk, microbatch

    for _ in range(2 * inner):
        yield counter(FORWARD, near)
    for _ in range(from_end + 1):
        yield counter(FORWARD, near)
        yield counter(FORWARD, far)
    for _ in range(inner):
        yield from backward(far, True)
        yield waiting.pop(0)
        yield counter(FORWARD, far)
    for index in range(main):
        # The innermost device's two passes wait for each other at first.
        alone = index == 0 and inner == 0
        yield counter(FORWARD, near) if alone else paired(near)
        yield from backward(far, False)
        yield paired(far)
        yield from backward(near, False)
    for _ in range(inner):
        yield from backward(far, False)
        yield paired(far)
        yield from backward(near, False)
    split = False
    for index in range(from_end + 1):
        middle = index == (from_end + 1) // 2
        split = split or (middle and from_end % 2 == 1)
        yield from backward(far, split)
        split = split or (middle and from_end % 2 == 0)
        yield from backward(near, split)
    for _ in range(inner):
        yield waiting.pop(0)
        yield from backward(near, True)
    yield from waiting


_WRITERS: dict[str, Callable[[int, int, int], Iterator[Action]]] = {
    "zb_h1": partial(_zero_bubble, memory=1),
    "zb_h2": partial(_zero_bubble, memory=2),
    "zb_v": _zero_bubble_v,
    "dualpipe": _dualpipe,
    "dualpipe_v": _dualpipe_v,
}
"""Schedules whose actions a device yields one by one, from the stages, the micro-batches and the device."""
SPLIT_SCHEDULES = tuple(_WRITERS)
"""Schedules that run weights' gradients as actions of their own."""
