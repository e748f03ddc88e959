"""Collectives on a torus as XLA runs them on TPUs: rings along every dimension at once, each in both directions.

The buffer is cut into a part for each dimension and direction. A part is scattered along its own dimension first, then
along the next ones, ever smaller, and gathered in the opposite order: at any time parts are on different dimensions, so
that all links carry data (Jain and Sabharwal, "Optimal bucket algorithms for large MPI collectives on torus
interconnects", ICS 2010). That XLA's collectives take the rate of all dimensions and both directions:
jax-ml.github.io/scaling-book/sharding, section 4.
"""

from collections import Counter
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.errors import InputError
from windtunnel.limits import check_size
from windtunnel.network.collectives.call import CollectiveCall
from windtunnel.network.fabric import Fabric
from windtunnel.network.flows import Flows, Ids, flows_of, in_channels, parents_from
from windtunnel.network.paths import wire_bytes

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter")

_SAME_MOMENT_S = 1e-15
"""Ends that are no further apart are one event."""


class Step(NamedTuple):
    """A step of one rank in one part."""

    link: tuple[int, int]
    """Dimension and direction."""
    bytes_per_s: float
    delay_s: float
    """After the step before, until the link carries data."""
    size_bytes: int
    """On the wire."""


def lengths_of(fabric: Fabric) -> tuple[int, ...]:
    """Return the lengths of a torus whose GPUs are numbered row by row, the last dimension first; () of no torus."""
    joined = set(zip(*(ends.tolist() for ends in fabric.directions), strict=True))
    lengths: list[int] = []
    stride = 1
    while stride < fabric.num_nodes and (0, stride) in joined:
        length = 2
        while ((length - 1) * stride, length * stride) in joined:
            length += 1
        lengths.insert(0, length)
        stride *= length
    if stride != fabric.num_nodes or fabric.num_nodes != fabric.num_gpus:
        return ()
    ids = np.arange(stride).reshape(lengths)
    rings = (np.roll(ids, turn, axis).ravel().tolist() for axis in range(len(lengths)) for turn in (-1, 1))
    expected = {pair for ring in rings for pair in zip(ids.ravel().tolist(), ring, strict=True)}
    return tuple(lengths) if joined == expected else ()


def rings_of(fabric: Fabric, gpus: Ids) -> NDArray[np.int32] | None:
    """Return the ranks by their place in whole rings of a torus, one dimension for each; None where they fill none."""
    lengths = lengths_of(fabric)
    if not lengths:
        return None
    places = [np.unique(axis) for axis in np.unravel_index(gpus, lengths)]
    sizes = [len(axis) for axis in places]
    if prod(sizes) != len(gpus) or any(size not in (1, length) for size, length in zip(sizes, lengths, strict=True)):
        return None
    return np.sort(gpus).reshape([size for size in sizes if size > 1])


def flows(call: CollectiveCall) -> Flows:
    """Return the flows of all steps. InputError where the ranks are not whole rings of a torus, or there are too many
    flows."""
    ranks = rings_of(call.fabric, call.gpus)
    if ranks is None:
        raise InputError(
            f"torus needs ranks that fill whole rings of a torus, as {call.fabric.name} has none", "use ring"
        )
    num_steps = sum(length - 1 for length in ranks.shape) * (2 if call.op == "all_reduce" else 1)
    parts = _parts(ranks.shape)
    check_size(flows=len(parts) * num_steps * ranks.size)
    part_bytes = call.size_bytes // len(parts)
    return in_channels([_part_flows(call.op, ranks, axis, turn, part_bytes) for axis, turn in parts])


def seconds_by_links(call: CollectiveCall) -> float | None:
    """Return when all parts are complete, from the links of one rank: every rank does the same at the same time.

    A step waits for the send latency and its link's, then shares the link evenly with the other parts that are on it;
    every packet has its header, as at flow level.
    The slowest link of a dimension stands for all of one direction, as a ring waits for it.

    Returns:
        Seconds; None where the ranks are not whole rings of a torus.
    """
    ranks = rings_of(call.fabric, call.gpus)
    if ranks is None:
        return None
    parts = _parts(ranks.shape)
    part_bytes = call.size_bytes // len(parts)
    sources, targets = call.fabric.directions
    link_of = {ends: k // 2 for k, ends in enumerate(zip(sources.tolist(), targets.tolist(), strict=True))}
    links: dict[tuple[int, int], tuple[tuple[int, int], float, float]] = {}
    for axis, turn in parts:
        pairs = zip(ranks.ravel().tolist(), np.roll(ranks, -turn, axis).ravel().tolist(), strict=True)
        ids = [link_of[pair] for pair in pairs]
        delay_s = call.settings.send_latency_s + float(call.fabric.latency_s[ids].max())
        links[axis, turn] = (axis, turn), float(call.fabric.bandwidth_bytes_per_s[ids].min()), delay_s
    steps = []
    for first, turn in parts:
        axes, sizes = zip(*_steps(call.op, ranks.shape, first, part_bytes), strict=True)
        sent = wire_bytes(np.array(sizes, np.int64), call.settings).tolist()
        # A dimension of two has one link, which both directions of the others take.
        ways = [links.get((axis, turn), links[axis, 1]) for axis in axes]
        steps.append([Step(*way, size_bytes) for way, size_bytes in zip(ways, sent, strict=True)])
    return _last_end_s(steps)


def _last_end_s(parts: list[list[Step]]) -> float:
    """Return when the last part ends: its steps follow each other, and parts on one link share its rate evenly."""
    now_s = 0.0
    remaining = [iter(steps) for steps in parts]
    current = dict(enumerate(next(steps) for steps in remaining))
    left_bytes = {part: float(step.size_bytes) for part, step in current.items()}
    start_s = {part: step.delay_s for part, step in current.items()}
    while current:
        sending = [part for part in current if start_s[part] <= now_s]
        sharers = Counter(current[part].link for part in sending)
        rates = {part: current[part].bytes_per_s / sharers[current[part].link] for part in sending}
        end_s = {part: now_s + left_bytes[part] / rates[part] for part in sending}
        next_s = min([*end_s.values(), *(start_s[part] for part in current if part not in rates)])
        for part in sending:
            left_bytes[part] -= rates[part] * (next_s - now_s)
            if end_s[part] > next_s + _SAME_MOMENT_S:
                continue
            step = next(remaining[part], None)
            if step is None:
                del current[part]
            else:
                current[part], left_bytes[part], start_s[part] = step, float(step.size_bytes), next_s + step.delay_s
        now_s = next_s
    return now_s


def _parts(lengths: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return (dimension that it begins with, direction) of each part; one of two has one link, no way back."""
    return [(axis, turn) for axis, length in enumerate(lengths) for turn in ((1,) if length == 2 else (1, -1))]


def _steps(op: str, lengths: tuple[int, ...], first: int, part_bytes: int) -> list[tuple[int, int]]:
    """Return (dimension, bytes a rank sends) of each step of a part that begins with the dimension `first`."""
    axes = [(first + k) % len(lengths) for k in range(len(lengths))]
    shares = np.cumprod([lengths[axis] for axis in axes])
    scattered = list(zip(axes, shares.tolist(), strict=True))
    phases = {"all_reduce": scattered + scattered[::-1], "reduce_scatter": scattered, "all_gather": scattered[::-1]}[op]
    return [(axis, max(part_bytes // share, 1)) for axis, share in phases for _ in range(lengths[axis] - 1)]


def _part_flows(op: str, ranks: NDArray[np.int32], first: int, turn: int, part_bytes: int) -> Flows:
    """Return the flows of one part: along the dimension `first`, the next ones, and back; a flow a rank in each step.

    A rank sends on what it received in the step before.
    """
    steps = _steps(op, ranks.shape, first, part_bytes)
    place = np.arange(ranks.size).reshape(ranks.shape)
    from_before = np.array([np.roll(place, turn, axis).ravel() for axis, _ in steps])
    parent = np.full((len(steps), ranks.size), -1)
    # What arrived at a rank in a step was sent by the rank before it along that step's dimension.
    parent[1:] = np.arange(len(steps) - 1)[:, None] * ranks.size + from_before[:-1]
    return flows_of(
        np.tile(ranks.ravel(), len(steps)),
        np.concatenate([np.roll(ranks, -turn, axis).ravel() for axis, _ in steps]),
        np.repeat([size_bytes for _, size_bytes in steps], ranks.size),
        parents=parents_from(parent.ravel()),
        step=np.repeat(np.arange(len(steps)), ranks.size),
    )
