"""Write a training job as a workload that SimAI runs, with correct sizes, groups and times.

A layer's communication stands between two pieces of computation. Forward it belongs to the line before it; backward,
where SimAI goes through the lines in reverse and computes before it communicates, to the line after it. SimAI waits for
every collective of the forward pass and of the inputs' gradients, also for those that Megatron hides: bytes are right,
their overlap is not SimAI's to show. Gradients that are reduced beside the backward pass stand at the first
micro-batch, which SimAI runs last.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest

from windtunnel.errors import InputError
from windtunnel.formats.simai.workload import OPERATIONS, Block, FilePhase, Header, SimaiWorkload, WorkloadLayer
from windtunnel.model import operators as ops
from windtunnel.schema import fields_of
from windtunnel.training.layers import sharding
from windtunnel.training.layers.chunks import LayerChunk, Parameters, chunk_parameters, chunks
from windtunnel.training.layers.part import Part, Task
from windtunnel.training.layers.rank import BF16_BYTES, Group, Rank
from windtunnel.training.program import Unit, check_device, chunk_units
from windtunnel.training.setup import TrainingSetup

Seconds = Callable[[Task], float]

WORDS = {operation: word for word, operation in OPERATIONS.items() if operation != "broadcast"}
LAYER_SUFFIXES = {Group.TENSOR: "", Group.EXPERTS: "_EP", Group.EXPERTS_DATA: "_DP_EP"}
"""Group -> suffix in the forward pass and for gradients of inputs."""
STEP_SUFFIXES = {Group.DATA: "", Group.EXPERTS_DATA: "_DP_EP"}
"""Group -> suffix for gradients of weights."""

PASSES = ("forward", "backward_input", "backward_weight")
NOTHING = (FilePhase(), FilePhase(), FilePhase())


@dataclass(frozen=True)
class _Piece:
    """Computation and the communication after it."""

    name: str
    compute: tuple[Part, ...]
    sent: tuple[Task, ...]
    """Messages of the forward pass."""
    sent_back: tuple[Task, ...]
    """Messages of the backward pass, in its order."""


def training_workload(setup: TrainingSetup, seconds: Seconds, device: int = 0) -> SimaiWorkload:
    """Return the workload of the ranks of one pipeline device; `seconds` prices a task. InputError where there is no
    such device, or the job sends over groups that SimAI's format has no word for."""
    _check(setup, device)
    rank, degrees = Rank(setup), setup.degrees
    writer = _Writer(setup, rank, seconds)
    on_device = [chunk for chunk in chunks(setup) if chunk.stage == device]
    first = [line for chunk in on_device for line in writer.chunk_lines(chunk, closes=True)]
    others = [line for chunk in on_device for line in writer.chunk_lines(chunk, closes=False)]
    between = rank.tokens * rank.width * BF16_BYTES / (rank.tp if rank.split else 1)
    header = Header(
        **fields_of(degrees, "tp", "ep", "pp", "num_microbatches", "num_devices"),
        vpp=degrees.virtual_stages,
        pp_comm_bytes=round(between) if degrees.pp > 1 else 0,
    )
    head = Block(tuple(writer.step_lines(on_device)))
    count = sharding.num_reductions(rank)
    rest = Block(tuple(others), degrees.num_microbatches - count)
    return SimaiWorkload(header, (head, Block(tuple(first), count), rest))


def left_out(setup: TrainingSetup) -> tuple[str, ...]:
    """Name the messages of a job's step for which SimAI's format has no group."""
    return tuple(
        f"{task.name}, {round(float(task.op.message_bytes)):,} bytes over {task.op.num_ranks} ranks"
        for task in sharding.finish_tasks(Rank(setup))
        if isinstance(task.op, ops.Collective) and task.group is not Group.TENSOR
    )


def _check(setup: TrainingSetup, device: int) -> None:
    degrees, job = setup.degrees, setup.job
    check_device(setup, device)
    chakra, split = "write a Chakra trace", degrees.experts_tp
    refusals = (
        (degrees.cp > 1, "have no group for context parallelism", chakra),
        (
            job.sharding.zero == 3,
            "have no word for parameters that are gathered in the forward pass (ZeRO-3)",
            f"{chakra}, or train with sharding.zero 1 or 2",
        ),
        (job.schedule == "dualpipe", "go through a device's layers one way, DualPipe both", chakra),
        (degrees.replicas > 1, "have no group for replicas (HSDP)", chakra),
        (
            split not in (1, degrees.tp),
            f"have no group for experts_tp = {split} beside tp = {degrees.tp}",
            "take experts_tp 1, or equal to tp",
        ),
    )
    for is_refused, reason, hint in refusals:
        if is_refused:
            raise InputError(f"SimAI's workloads {reason}", hint)


@dataclass(frozen=True)
class _Writer:
    """The job, its rank and its prices, which every line needs."""

    setup: TrainingSetup
    rank: Rank
    seconds: Seconds

    def step_lines(self, on_device: list[LayerChunk]) -> Iterator[WorkloadLayer]:
        """Yield the lines of the step itself: SimAI runs these lines last in its backward pass."""
        setup, rank = self.setup, self.rank
        held = sum((chunk_parameters(rank, chunk) for chunk in on_device), Parameters())
        for task in sharding.gather_tasks(rank, held):
            yield WorkloadLayer(task.name, weight_gradient=self._phase(task, STEP_SUFFIXES))
        compute = self._compute(sharding.optimizer_tasks(rank, held))
        yield WorkloadLayer("optimizer", input_gradient=compute)
        for task in sharding.finish_tasks(rank):
            if task.group is Group.TENSOR:
                yield WorkloadLayer(task.name, input_gradient=self._phase(task, LAYER_SUFFIXES))
        if not setup.job.overlap.gradient_reduce and sharding.num_reductions(rank) == 1:
            for task in sharding.reduce_tasks(rank, held):
                yield WorkloadLayer(task.name, weight_gradient=self._phase(task, STEP_SUFFIXES))

    def chunk_lines(self, chunk: LayerChunk, closes: bool) -> Iterator[WorkloadLayer]:
        """Yield the lines of one micro-batch through one chunk; `closes` where its gradients are reduced."""
        rank = self.rank
        arriving: tuple[Task, ...] = ()
        for unit in chunk_units(rank, chunk):
            reduces = closes and (self.setup.job.overlap.gradient_reduce or sharding.num_reductions(rank) > 1)
            lines, arriving = self._unit_lines(unit, arriving)
            reductions = sharding.reduce_tasks(rank, unit.held) if reduces else ()
            for line, task in zip_longest(lines, reductions):
                gradient = self._phase(task, STEP_SUFFIXES) if task else FilePhase()
                if line is None:
                    yield WorkloadLayer(task.name, weight_gradient=gradient)
                else:
                    merged = gradient._replace(compute_ns=line.weight_gradient.compute_ns)
                    yield line._replace(weight_gradient=merged) if task else line
        for task in reversed(arriving):
            yield self._line(task.name, NOTHING, None, task)

    def _unit_lines(self, unit: Unit, arriving: tuple[Task, ...]) -> tuple[list[WorkloadLayer], tuple[Task, ...]]:
        """Return the lines of a layer, and the messages of its last piece in the backward pass."""
        lines = []
        for piece in _pieces(unit.parts):
            compute = tuple(
                self._compute(task for part in piece.compute for task in getattr(part, name)) for name in PASSES
            )
            # Further collectives at a boundary take lines without computation. SimAI goes back through the lines in
            # reverse: it meets the lines before this one after it.
            lines += [self._line(piece.name, NOTHING, None, task) for task in arriving[:0:-1]]
            lines.append(self._line(piece.name, compute, next(iter(piece.sent), None), next(iter(arriving), None)))
            lines += [self._line(piece.name, NOTHING, task, None) for task in piece.sent[1:]]
            arriving = piece.sent_back
        lines += reversed([*self._repeated(unit.again)])
        return lines, arriving

    def _repeated(self, again: tuple[Task, ...]) -> Iterator[WorkloadLayer]:
        """Yield the lines of recomputation, cut where it communicates."""
        waiting: list[Task] = []
        for task in (*again, None):
            if task is not None and task.group is None:
                waiting.append(task)
            elif task or waiting:
                yield self._line("recompute", (FilePhase(), self._compute(waiting), FilePhase()), None, task)
                waiting = []

    def _line(
        self, name: str, compute: tuple[FilePhase, ...], sent: Task | None, sent_back: Task | None
    ) -> WorkloadLayer:
        forward, inputs, weights = compute
        if sent:
            forward = self._phase(sent, LAYER_SUFFIXES)._replace(compute_ns=forward.compute_ns)
        if sent_back:
            inputs = self._phase(sent_back, LAYER_SUFFIXES)._replace(compute_ns=inputs.compute_ns)
        return WorkloadLayer(name, forward, inputs, weights)

    def _compute(self, tasks: Iterable[Task]) -> FilePhase:
        return FilePhase(round(sum(self.seconds(task) for task in tasks if task.group is None) * 1e9))

    def _phase(self, task: Task, suffixes: dict[Group, str]) -> FilePhase:
        assert isinstance(task.op, ops.Collective)
        group = Group.TENSOR if task.group is Group.EXPERTS_TENSOR else task.group
        if group not in suffixes or task.op.op not in WORDS:
            raise InputError(f"SimAI's workloads have no word for {task.op.op} over the group {task.group}")
        size = round(float(task.op.message_bytes) * task.count)
        return FilePhase(0, f"{WORDS[task.op.op]}{suffixes[group]}", size)


def _pieces(parts: Iterable[Part]) -> Iterator[_Piece]:
    """Group neighbouring computation, cut at every part that communicates."""
    compute: list[Part] = []
    for part in parts:
        sent, sent_back = _collectives(part.forward), _collectives(part.backward_input)
        if any(task.group is None for task in (*part.forward, *part.backward_input, *part.backward_weight)):
            compute.append(part)
        if sent or sent_back:
            yield _Piece(compute[0].name if compute else part.name, tuple(compute), sent, sent_back)
            compute = []
    if compute:
        yield _Piece(compute[0].name, tuple(compute), (), ())


def _collectives(tasks: Iterable[Task]) -> tuple[Task, ...]:
    """Return the tasks that communicate, each as often as it is done."""
    return tuple(replace(task, count=1.0) for task in tasks if task.group for _ in range(round(task.count)))
