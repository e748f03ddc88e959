"""A training job as AICB's communication list, which AICB's replayer and reports read.

The list is one pipeline device's step along the job's own schedule, forward and backward, with the loss, the
optimizer's collectives and every message between stages. Attention's core and memory-bound kernels are no matrix
product of two shapes: AICB's format has no line for them.
"""

from collections.abc import Iterator
from functools import cache

from windtunnel.errors import InputError
from windtunnel.formats.aicb.csv_records import Record, RecordList, Stretch
from windtunnel.formats.aicb.megatron import EPOCH_END
from windtunnel.model import operators as ops
from windtunnel.model.feed_forward.experts import Experts
from windtunnel.training.layers.part import Task
from windtunnel.training.layers.rank import Group, Rank
from windtunnel.training.program import Action, Exchange, device_program
from windtunnel.training.setup import TrainingSetup

GROUPS = {
    Group.TENSOR: "tp_group",
    Group.DATA: "dp_group",
    Group.EXPERTS: "ep_group",
    Group.EXPERTS_DATA: "ep_dp_group",
    Group.EMBEDDING: "embedding_group",
    Group.PIPELINE: "pp_group",
}


def training_records(setup: TrainingSetup, device: int = 0) -> RecordList:
    """Return the list of the ranks of one pipeline device.

    Raises:
        InputError: there is no such device, or the job sends over groups that AICB has no name for.
    """
    rank = Rank(setup)

    @cache
    def records_of(kind: str, tasks: tuple[Task, ...]) -> tuple[Record, ...]:
        return tuple(record for task in tasks for record in _records(rank, task, kind))

    stretches = []
    for action in device_program(setup, device):
        records = (*_message(action, action.receives), *records_of(action.kind, action.tasks))
        stretches.append(Stretch((*records, *_message(action, action.sends))))
    return RecordList((*stretches, Stretch((EPOCH_END,))))


def _message(action: Action, exchange: Exchange | None) -> Iterator[Record]:
    if exchange is not None:
        kind, verb = ("isend", "send") if exchange.is_send else ("irecv", "recv")
        direction = f"{verb}_{'next' if exchange.is_send != exchange.is_gradient else 'prev'}"
        size = round(exchange.size_bytes)
        yield Record(kind, "pp_group", 1, size, f"{action.kind}_step", additional=direction)


def _records(rank: Rank, task: Task, kind: str) -> Iterator[Record]:
    stage = f"{kind}.{task.name}"
    if task.group is None:
        for left, right in _products(rank, task.op):
            yield Record("computation", size=(left, right), stage=stage)
        return
    assert isinstance(task.op, ops.Collective)
    group = _group(rank, task, task.op)
    for _ in range(round(task.count)):
        yield Record(task.op.op, group, task.op.num_ranks, round(float(task.op.message_bytes)), stage)


def _group(rank: Rank, task: Task, op: ops.Collective) -> str:
    degrees = rank.setup.degrees
    if op.num_ranks == degrees.num_devices and rank.layout(task.group or Group.DATA)[0] != op.num_ranks:
        return "all"
    if task.group is Group.EXPERTS_TENSOR and degrees.experts_tp == degrees.tp:
        return "tp_group"
    if task.group not in GROUPS:
        raise InputError(f"AICB's lists have no name for the group {task.group}", "write a Chakra trace")
    return GROUPS[task.group]


def _products(rank: Rank, op: ops.Op) -> Iterator[tuple[tuple[int, ...], tuple[int, int]]]:
    """Yield shapes of two factors; experts are products of all tokens that this rank computes."""
    if isinstance(op, ops.Gemm):
        yield (round(float(op.m)), round(op.k)), (round(op.k), round(op.n))
    elif isinstance(op, Experts):
        rows = round(float(op.num_tokens) * op.experts_per_token / rank.setup.degrees.ep)
        width = op.intermediate_size // op.tp
        yield (rows, op.hidden_size), (op.hidden_size, width * (2 if op.gated else 1))
        yield (rows, width), (width, op.hidden_size)
