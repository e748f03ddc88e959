"""Collectives on a torus as XLA runs them on TPUs: rings along every dimension at once, each in both directions.

The buffer is cut into a part for each dimension and direction. A part is scattered along its own dimension first, then
along the next ones, ever smaller, and gathered in the opposite order: at any time parts are on different dimensions, so
that all links carry data (Jain and Sabharwal, "Optimal bucket algorithms for large MPI collectives on torus
interconnects", ICS 2010). That XLA's collectives take the rate of all dimensions and both directions:
jax-ml.github.io/scaling-book/sharding, section 4.
"""

from math import prod

import numpy as np
from numpy.typing import NDArray

from windtunnel.errors import InputError
from windtunnel.limits import check_size
from windtunnel.network.collectives.call import CollectiveCall
from windtunnel.network.fabric import Fabric
from windtunnel.network.flows import Flows, Ids, flows_of, in_channels, parents_from

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter")


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
    """Return the flows of all steps.

    Raises:
        InputError: the ranks are not whole rings of a torus, or there are too many flows.
    """
    ranks = rings_of(call.fabric, call.gpus)
    if ranks is None:
        raise InputError(
            f"torus needs ranks that fill whole rings of a torus, as {call.fabric.name} has none", "use ring"
        )
    num_steps = sum(length - 1 for length in ranks.shape) * (2 if call.op == "all_reduce" else 1)
    # A dimension of two has one link, so that no part turns back there.
    starts = [(axis, turn) for axis, length in enumerate(ranks.shape) for turn in ((1,) if length == 2 else (1, -1))]
    check_size(flows=len(starts) * num_steps * ranks.size)
    return in_channels([_part(call.op, ranks, axis, turn, call.size_bytes // len(starts)) for axis, turn in starts])


def _part(op: str, ranks: NDArray[np.int32], first: int, turn: int, part_bytes: int) -> Flows:
    """Return the flows of one part: along the dimension `first`, the next ones, and back; a flow a rank in each step.

    A rank sends on what it received in the step before.
    """
    axes = [(first + k) % ranks.ndim for k in range(ranks.ndim)]
    shares = np.cumprod([ranks.shape[axis] for axis in axes])
    scattered = list(zip(axes, shares.tolist(), strict=True))
    phases = {"all_reduce": scattered + scattered[::-1], "reduce_scatter": scattered, "all_gather": scattered[::-1]}[op]
    steps = [(axis, max(part_bytes // share, 1)) for axis, share in phases for _ in range(ranks.shape[axis] - 1)]
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
