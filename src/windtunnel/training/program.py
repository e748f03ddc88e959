"""One device's whole step in order: every pass of every micro-batch, its messages, and the end of the step.

It is the graph of `training/layers/parts.py` written out along a pipeline schedule. Every export to another format
and every run on real devices is derived from it. Equal passes share their tuples: a step of 512 micro-batches takes as
much memory as a step of one.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from windtunnel.errors import InputError
from windtunnel.model.shape import LayerGroup
from windtunnel.training.layers import sharding
from windtunnel.training.layers.chunks import LayerChunk, Parameters, chunk_parameters, chunks, layer_parameters
from windtunnel.training.layers.part import Part, Task
from windtunnel.training.layers.parts import embedding_parts, head_parts, layer_parts, layer_work
from windtunnel.training.layers.rank import BF16_BYTES, Rank
from windtunnel.training.layers.sharding import gather_tasks, gathered_layer, reduce_tasks
from windtunnel.training.pipeline.actions import BACKWARD, FORWARD, PAIRED, WEIGHT
from windtunnel.training.pipeline.schedules import schedule
from windtunnel.training.setup import TrainingSetup

BESIDE_STEP = "optimizer"
"""`Task.beside` of tasks that only the optimizer waits for."""


@dataclass(frozen=True)
class Exchange:
    """Hidden states, or their gradients, between this device and another one of the pipeline."""

    is_send: bool
    peer: int
    """The other device."""
    boundary: int
    """The chunk whose output it is, in the order of the forward pass."""
    microbatch: int
    is_gradient: bool
    size_bytes: float
    """Of one rank's part."""


@dataclass(frozen=True)
class Action:
    """One pass of one micro-batch through one chunk, or the end of the step."""

    kind: str
    """`forward`, `backward`, `weights` or `end`."""
    chunk: int
    microbatch: int
    receives: Exchange | None
    tasks: tuple[Task, ...]
    sends: Exchange | None


@dataclass(frozen=True)
class _Passes:
    """Tasks of one layer or chunk."""

    forward: tuple[Task, ...]
    backward: tuple[Task, ...]
    weights: tuple[Task, ...] = ()
    """Where the schedule splits them off."""


def device_program(setup: TrainingSetup, device: int) -> Iterator[Action]:
    """Return the actions of one pipeline device, the same for all of its ranks. InputError where the pipeline has no
    such device."""
    check_device(setup, device)
    rank = Rank(setup)
    known = setup.degrees
    paired = bool(setup.job.overlap.experts)
    plan = schedule(str(setup.job.schedule), known.pp, known.num_microbatches, known.virtual_stages, paired)
    layer_chunks = chunks(setup)
    owner = [int(place) for place in plan.device_of_chunk]
    following = [int(place) for place in plan.next_chunk]
    before = {after: chunk for chunk, after in enumerate(following) if after >= 0}
    num_bytes = rank.tokens * rank.width * BF16_BYTES / (rank.tp if rank.split else 1)

    @cache
    def passes(chunk: int, closes: bool) -> _Passes:
        return _chunk_passes(rank, layer_chunks[chunk % len(layer_chunks)], plan.is_split, closes)

    def exchange(is_send: bool, boundary: int, other: int, microbatch: int, is_gradient: bool) -> Exchange | None:
        if boundary < 0 or other < 0 or owner[other] == device:
            return None
        return Exchange(is_send, owner[other], boundary, microbatch, is_gradient, num_bytes)

    last_kind = WEIGHT if plan.is_split else BACKWARD
    actions = plan.of_device(device).tolist()
    closing = _closing([chunk if kind % PAIRED == last_kind else -1 for kind, chunk, _ in actions], rank)
    for position, (raw_kind, chunk, microbatch) in enumerate(actions):
        kind = raw_kind % PAIRED
        previous, after = before.get(chunk, -1), following[chunk]
        tasks = passes(chunk, position in closing)
        if kind == FORWARD:
            receives = exchange(False, previous, previous, microbatch, False)
            sends = exchange(True, chunk, after, microbatch, False)
            yield Action("forward", chunk, microbatch, receives, tasks.forward, sends)
        elif kind == BACKWARD:
            receives = exchange(False, chunk, after, microbatch, True)
            sends = exchange(True, previous, previous, microbatch, True)
            yield Action("backward", chunk, microbatch, receives, tasks.backward, sends)
        else:
            yield Action("weights", chunk, microbatch, None, tasks.weights, None)
    held = [layer_chunks[chunk % len(layer_chunks)] for chunk in range(plan.num_chunks) if owner[chunk] == device]
    yield Action("end", -1, -1, None, tuple(_end_of_step(rank, held)), None)


def _closing(chunks: list[int], rank: Rank) -> set[int]:
    """Return the places of the passes that close gradients, in a list of the chunks that passes differentiate or -1."""
    together = rank.setup.degrees.num_microbatches // sharding.num_reductions(rank)
    places = {chunk: [place for place, each in enumerate(chunks) if each == chunk] for chunk in set(chunks) - {-1}}
    return {place for of_chunk in places.values() for place in of_chunk[::-together]}


def check_device(setup: TrainingSetup, device: int) -> None:
    """Raise InputError where the pipeline has no such device."""
    if not 0 <= device < setup.degrees.pp:
        raise InputError(f"the pipeline has devices 0 to {setup.degrees.pp - 1}; there is no device {device}")


def _chunk_passes(rank: Rank, chunk: LayerChunk, is_split: bool, closes: bool) -> _Passes:
    """Return a chunk's layers in order, between its embedding and its head; `closes`: its gradients are reduced."""
    job, units = rank.setup.job, [(_passes_of(unit, is_split), unit) for unit in chunk_units(rank, chunk)]
    behind, is_sharded = units[::-1], job.sharding.zero == 3
    closes = closes and not is_sharded and (bool(job.overlap.gradient_reduce) or sharding.num_reductions(rank) > 1)
    gathers_again = is_sharded and job.sharding.reshard_after_forward
    reduces = is_sharded or (closes and not is_split)
    return _Passes(
        tuple(_with_collectives(rank, [(passes.forward, unit) for passes, unit in units], is_sharded, False)),
        tuple(_with_collectives(rank, [(passes.backward, unit) for passes, unit in behind], gathers_again, reduces)),
        tuple(_with_collectives(rank, [(passes.weights, unit) for passes, unit in behind], False, closes and is_split)),
    )


@dataclass(frozen=True)
class Unit:
    """A layer, the embedding or the head."""

    parts: tuple[Part, ...]
    again: tuple[Task, ...]
    """Tasks that its backward pass repeats first."""
    held: Parameters
    """Its parameters on this rank; in a chunk with both ends, the head's unit holds the embedding's too."""
    gathered: Parameters
    """The part of them that ZeRO-3 shards and gathers."""


def chunk_units(rank: Rank, chunk: LayerChunk) -> list[Unit]:
    """Return a chunk's units in the order of the forward pass."""
    units = [
        Unit(layer_parts(rank, group), again, layer_parameters(rank, group), gathered_layer(rank, group))
        for group, again in _layers(rank, chunk)
    ]
    ends = chunk_parameters(rank, chunk) + sum((unit.held for unit in units), Parameters()) * -1.0
    if chunk.has_embedding:
        first = Parameters() if chunk.has_head else ends
        units.insert(0, Unit(embedding_parts(rank), (), first, first))
    if chunk.has_head:
        units.append(Unit(head_parts(rank), (), ends, ends))
    return units


def _layers(rank: Rank, chunk: LayerChunk) -> Iterator[tuple[LayerGroup, tuple[Task, ...]]]:
    """Yield every layer of a chunk in order, with the tasks that its backward pass repeats.

    Groups whose counts are fractions of a chunk's layers (hybrids that alternate) are spread evenly.
    """
    recompute = rank.setup.job.recompute
    total = round(chunk.num_layers)
    covered = total if recompute.num_layers is None else min(recompute.num_layers, total)
    given = [0.0] * len(chunk.layers)
    for position in range(total):
        # Groups with whole counts come one after the other, as the model lists them.
        is_whole = all(count == int(count) for _, count in chunk.layers)
        shares = [count * (position + 1) / total - taken for (_, count), taken in zip(chunk.layers, given, strict=True)]
        choice = (
            next(i for i, (_, count) in enumerate(chunk.layers) if given[i] < count)
            if is_whole
            else max(range(len(shares)), key=shares.__getitem__)
        )
        given[choice] += 1
        group = chunk.layers[choice][0]
        granularity = "none" if recompute.granularity == "full" and position >= covered else None
        yield group, layer_work(rank, group, granularity).recomputed


def _passes_of(unit: Unit, is_split: bool) -> _Passes:
    forward = [task for part in unit.parts for task in part.forward]
    backward, weights = list(unit.again), list[Task]()
    for part in reversed(unit.parts):
        backward += part.backward_input
        (weights if is_split else backward).extend(part.backward_weight)
    return _Passes(*map(_in_order, (forward, backward, weights)))


def _in_order(tasks: list[Task]) -> tuple[Task, ...]:
    """Move collectives that run beside a complete computation to just before it; leave out what is there no times."""
    tasks = [task for task in tasks if task.count > 0]
    computations = {task.name for task in tasks if task.group is None}
    moved = [task for task in tasks if task.group and task.pieces == 1 and task.beside in computations]
    ordered: list[Task] = []
    for task in tasks:
        if any(task is other for other in moved):
            continue
        if task.group is None:
            ordered += [other for other in moved if other.beside == task.name]
        ordered.append(task if task.group is None or task.beside in computations else replace(task, beside=None))
    return tuple(ordered)


def _with_collectives(
    rank: Rank, units: list[tuple[tuple[Task, ...], Unit]], gather: bool, reduce: bool
) -> Iterator[Task]:
    """Yield the tasks of units; gather each one's parameters before it (ZeRO-3), one unit ahead where that is
    overlapped, and reduce its gradients as soon as they are computed.
    """
    overlap = rank.setup.job.overlap
    for position, (tasks, unit) in enumerate(units):
        is_ahead = bool(overlap.parameter_gather)
        if gather and (position == 0 or not is_ahead):
            yield from gather_tasks(rank, unit.gathered)
        if gather and is_ahead and position + 1 < len(units):
            last = next((task.name for task in reversed(tasks) if task.group is None), None)
            yield from gather_tasks(rank, units[position + 1][1].gathered, last)
        yield from tasks
        if reduce:
            yield from reduce_tasks(rank, unit.held, BESIDE_STEP if overlap.gradient_reduce else None)


def _end_of_step(rank: Rank, held: list[LayerChunk]) -> Iterator[Task]:
    """Yield reductions that did not overlap, small collectives, the optimizer, and gathers for the next step."""
    job = rank.setup.job
    parameters = [chunk_parameters(rank, chunk) for chunk in held]
    if not job.overlap.gradient_reduce and job.sharding.zero != 3 and sharding.num_reductions(rank) == 1:
        for each in parameters:
            yield from reduce_tasks(rank, each)
    yield from sharding.finish_tasks(rank)
    yield from sharding.optimizer_tasks(rank, sum(parameters, Parameters()))
    if job.sharding.zero != 3:
        for each in parameters:
            yield from gather_tasks(rank, each)
