"""Write a training job as Chakra execution traces, one for each rank, as ASTRA-sim 2 reads them.

Nodes wait for their inputs: a computation for the previous one and for the collectives whose results it uses, a
collective beside a computation for the nodes before that computation. ASTRA-sim counts an all-gather by one rank's
contribution; the other sizes are those of the whole tensor (astra-sim, system/collective/Ring.cc; attributes:
astra-sim/chakra, src/feeder_v3). Durations are whole microseconds; the rest of rounding is carried on to the next node,
and `exact_ns` has the exact duration.
"""

import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from windtunnel.errors import InputError
from windtunnel.files import write_bytes, write_text
from windtunnel.formats.chakra.trace import VERSION, ChakraCollective, ChakraKind, ChakraTrace, messages, trace_bytes
from windtunnel.model import operators as ops
from windtunnel.training.layers.part import Task
from windtunnel.training.layers.rank import Group, Rank, group_ranks, stage_of_rank
from windtunnel.training.program import BESIDE_STEP, Action, Exchange, device_program
from windtunnel.training.setup import TrainingSetup

Seconds = Callable[[Task], float]
Attribute = dict[str, Any]
"""Fields of the message of an attribute."""

GroupNames = dict[tuple[int, ...], str]
"""Ranks of a group -> its number, as `--comm-group-configuration` lists it; "0" is all ranks."""


def training_traces(
    setup: TrainingSetup, seconds: Seconds, names: GroupNames | None = None, ranks: Collection[int] | None = None
) -> Iterator[tuple[int, ChakraTrace]]:
    """Yield (rank, trace) of every rank, or of `ranks`; `seconds` prices a task, and `names` collects the groups."""
    rank, num_devices = Rank(setup), setup.degrees.num_devices
    names = {} if names is None else names
    names[tuple(range(num_devices))] = "0"
    for device in range(setup.degrees.pp):
        program = list(device_program(setup, device))
        for number in range(num_devices):
            if stage_of_rank(rank, number) == device and (ranks is None or number in ranks):
                yield number, _RankTrace(rank, number, names, seconds).trace(program)


def write_training_traces(
    setup: TrainingSetup, seconds: Seconds, prefix: Path, ranks: Collection[int] | None = None
) -> list[Path]:
    """Write `PREFIX.RANK.et` for every rank, or for `ranks`, and `PREFIX.groups.json`; return the written paths.
    InputError where the job has no such rank, or a file cannot be written."""
    num_devices = setup.degrees.num_devices
    unknown = next((number for number in ranks or () if not 0 <= number < num_devices), None)
    if unknown is not None:
        raise InputError(f"the job has ranks 0 to {num_devices - 1}; there is no rank {unknown}")
    names: GroupNames = {}
    written = []
    for number, trace in training_traces(setup, seconds, names, ranks):
        path = prefix.with_name(f"{prefix.name}.{number}.et")
        write_bytes(path, trace_bytes(trace))
        written.append(path)
    groups = prefix.with_name(f"{prefix.name}.groups.json")
    listed = {name: list(ranks) for ranks, name in names.items() if name != "0"}
    write_text(groups, json.dumps(listed, indent=1) + "\n")
    return [*written, groups]


@dataclass
class _RankTrace:
    """The growing trace of one rank."""

    rank: Rank
    number: int
    names: GroupNames
    seconds: Seconds
    nodes: list[Any] = field(default_factory=list)
    last: int | None = None
    """Computation that the next node waits for."""
    needed: list[int] = field(default_factory=list)
    """Communication that the next computation waits for."""
    beside: list[tuple[str, int]] = field(default_factory=list)
    """Communication beside a coming computation, as (name of that computation, node)."""
    carried_us: float = 0.0

    def trace(self, program: list[Action]) -> ChakraTrace:
        for action in program:
            if action.receives:
                self._exchange(action.receives)
            for task in action.tasks:
                if task.group is None:
                    self._compute(task, action)
                else:
                    self._communicate(task, action)
            if action.sends:
                self._exchange(action.sends)
        about = {"name": "all_gather_size", "string": "what one rank gives"}
        return ChakraTrace(messages().metadata(version=VERSION, attributes=[about]), self.nodes)

    def _add(self, name: str, kind: ChakraKind, waits: list[int], *attributes: Attribute, duration_us: int = 0) -> int:
        node = messages().node(
            id=len(self.nodes) + 1,
            name=name,
            kind=kind,
            data_dependencies=sorted(set(waits)),
            duration_us=duration_us,
            attributes=[{"name": "is_cpu_op", "bool": False}, *attributes],
        )
        self.nodes.append(node)
        return len(self.nodes)

    def _waits(self) -> list[int]:
        return [*self.needed, *([self.last] if self.last else [])]

    def _where(self, action: Action) -> tuple[Attribute, ...]:
        return (
            {"name": "phase", "string": action.kind},
            {"name": "chunk", "int32": action.chunk},
            {"name": "microbatch", "int32": action.microbatch},
        )

    def _compute(self, task: Task, action: Action) -> None:
        if task.name == BESIDE_STEP:
            self.needed += [node for _, node in self.beside]
            self.beside = []
        exact_us = self.seconds(task) * 1e6
        self.carried_us += exact_us
        duration_us = max(int(self.carried_us), 0)
        self.carried_us -= duration_us
        self.last = self._add(
            task.name,
            ChakraKind.COMPUTE,
            self._waits(),
            {"name": "num_ops", "int64": round(task.flops)},
            {"name": "tensor_size", "uint64": max(round(float(task.op.num_bytes) * task.count), 1)},
            {"name": "exact_ns", "int64": round(exact_us * 1000)},
            *self._where(action),
            duration_us=duration_us,
        )
        self.needed = [node for name, node in self.beside if name == task.name]
        self.beside = [(name, node) for name, node in self.beside if name != task.name]

    def _communicate(self, task: Task, action: Action) -> None:
        op = task.op
        assert isinstance(op, ops.Collective)
        waits = self._waits()
        is_beside = task.beside is not None and task.pieces == 1
        for _ in range(round(task.count)):
            if op.op == "send_recv":
                ranks = group_ranks(self.rank, task.group or Group.CONTEXT, self.number)
                position = ranks.index(self.number)
                size, tag = round(float(op.message_bytes)), len(self.nodes) & 0x7FFF_FFFF
                to, source = ranks[(position + 1) % len(ranks)], ranks[position - 1]
                sent = self._message(task.name, ChakraKind.SEND, to, size, tag, waits)
                nodes = [sent, self._message(task.name, ChakraKind.RECEIVE, source, size, tag, waits)]
            else:
                nodes = [self._collective(task, op, action, waits)]
            if is_beside:
                self.beside += [(str(task.beside), node) for node in nodes]
            else:
                self.needed += nodes
            waits = [*waits, *nodes]

    def _collective(self, task: Task, op: ops.Collective, action: Action, waits: list[int]) -> int:
        ranks = group_ranks(self.rank, task.group or Group.DATA, self.number)
        if len(ranks) != op.num_ranks:
            ranks = tuple(range(self.rank.setup.degrees.num_devices))
        share = len(ranks) if op.op == "all_gather" else 1
        return self._add(
            task.name,
            ChakraKind.COLLECTIVE,
            waits,
            {"name": "comm_type", "int64": int(ChakraCollective[op.op.upper()])},
            {"name": "comm_size", "int64": round(float(op.message_bytes) / share)},
            {"name": "pg_name", "string": self.names.setdefault(ranks, str(len(self.names)))},
            *self._where(action),
        )

    def _message(self, name: str, kind: ChakraKind, peer: int, size: int, tag: int, waits: list[int]) -> int:
        source, to = (self.number, peer) if kind is ChakraKind.SEND else (peer, self.number)
        return self._add(
            name,
            kind,
            waits,
            {"name": "comm_src", "int32": source},
            {"name": "comm_dst", "int32": to},
            {"name": "comm_size", "int64": size},
            {"name": "comm_tag", "int32": tag},
        )

    def _exchange(self, exchange: Exchange) -> None:
        """Add a message between stages: later nodes wait for what arrives, not for what leaves."""
        per_stage = self.rank.setup.degrees.num_devices // self.rank.setup.degrees.pp
        peer = exchange.peer * per_stage + self.number % per_stage
        size = round(exchange.size_bytes)
        tag = exchange.microbatch << 9 | exchange.boundary << 1 | int(exchange.is_gradient)
        if exchange.is_send:
            self._message("pipeline_send", ChakraKind.SEND, peer, size, tag, self._waits())
        else:
            self.needed.append(self._message("pipeline_receive", ChakraKind.RECEIVE, peer, size, tag, []))
