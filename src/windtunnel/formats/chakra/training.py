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

from windtunnel.errors import InputError
from windtunnel.files import write_text
from windtunnel.formats.chakra.schema import Attribute, ChakraCollective, ChakraKind, ChakraNode, ChakraTrace
from windtunnel.formats.chakra.write import write_trace
from windtunnel.model import operators as ops
from windtunnel.training.layers.part import Task
from windtunnel.training.layers.rank import Group, Rank, group_ranks, stage_of_rank
from windtunnel.training.program import BESIDE_STEP, Action, Exchange, device_program
from windtunnel.training.setup import TrainingSetup

Seconds = Callable[[Task], float]


@dataclass
class GroupNames:
    """Numbers of the ranks' groups, as `--comm-group-configuration` lists them; "0" is all ranks."""

    world: tuple[int, ...]
    names: dict[tuple[int, ...], str] = field(default_factory=dict)

    def name(self, ranks: tuple[int, ...]) -> str:
        """Return the number of a group, given at its first use."""
        if ranks == self.world:
            return "0"
        return self.names.setdefault(ranks, str(len(self.names) + 1))

    def as_json(self) -> str:
        """Return the file that ASTRA-sim reads."""
        return json.dumps({name: list(ranks) for ranks, name in self.names.items()}, indent=1) + "\n"


def training_traces(
    setup: TrainingSetup, seconds: Seconds, names: GroupNames | None = None, ranks: Collection[int] | None = None
) -> Iterator[tuple[int, ChakraTrace]]:
    """Yield (rank, trace) of every rank; `names` collects the groups.

    Args:
        setup: a resolved job.
        seconds: prices a task, such as `TrainingPricer` does.
        names: collects the groups' numbers.
        ranks: only these ranks; None: all.
    """
    rank, num_devices = Rank(setup), setup.degrees.num_devices
    names = names or GroupNames(tuple(range(num_devices)))
    for device in range(setup.degrees.pp):
        program = list(device_program(setup, device))
        for number in range(num_devices):
            if stage_of_rank(rank, number) == device and (ranks is None or number in ranks):
                yield number, _RankTrace(rank, number, names, seconds).trace(program)


def write_training_traces(
    setup: TrainingSetup, seconds: Seconds, prefix: Path, ranks: Collection[int] | None = None
) -> list[Path]:
    """Write `PREFIX.RANK.et` for every rank, or for `ranks`, and `PREFIX.groups.json`; return the written paths.

    Raises:
        InputError: the job has no such rank, or a file cannot be written.
    """
    num_devices = setup.degrees.num_devices
    unknown = next((number for number in ranks or () if not 0 <= number < num_devices), None)
    if unknown is not None:
        raise InputError(f"the job has ranks 0 to {num_devices - 1}; there is no rank {unknown}")
    names = GroupNames(tuple(range(num_devices)))
    written = []
    for number, trace in training_traces(setup, seconds, names, ranks):
        path = prefix.with_name(f"{prefix.name}.{number}.et")
        write_trace(path, trace)
        written.append(path)
    groups = prefix.with_name(f"{prefix.name}.groups.json")
    write_text(groups, names.as_json())
    return [*written, groups]


@dataclass
class _RankTrace:
    """The growing trace of one rank."""

    rank: Rank
    number: int
    names: GroupNames
    seconds: Seconds
    nodes: list[ChakraNode] = field(default_factory=list)
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
        about = Attribute("all_gather_size", "string", "what one rank gives")
        return ChakraTrace(tuple(self.nodes), attributes=(about,))

    def _add(self, name: str, kind: ChakraKind, waits: list[int], *attributes: Attribute, duration_us: int = 0) -> int:
        number, depends = len(self.nodes) + 1, tuple(sorted(set(waits)))
        attributes = (Attribute("is_cpu_op", "bool", value=False), *attributes)
        self.nodes.append(
            ChakraNode(number, name, kind, data_dependencies=depends, duration_us=duration_us, attributes=attributes)
        )
        return number

    def _waits(self) -> list[int]:
        return [*self.needed, *([self.last] if self.last else [])]

    def _where(self, action: Action) -> tuple[Attribute, ...]:
        return (
            Attribute("phase", "string", action.kind),
            Attribute("chunk", "int32", action.chunk),
            Attribute("microbatch", "int32", action.microbatch),
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
            Attribute("num_ops", "int64", round(task.flops)),
            Attribute("tensor_size", "uint64", max(round(float(task.op.num_bytes) * task.count), 1)),
            Attribute("exact_ns", "int64", round(exact_us * 1000)),
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
                nodes = self._ring(task, op, waits)
            else:
                nodes = [self._collective(task, op, action, waits)]
            if is_beside:
                self.beside += [(str(task.beside), node) for node in nodes]
            else:
                self.needed += nodes
            waits = [*waits, *nodes]

    def _collective(self, task: Task, op: ops.Collective, action: Action, waits: list[int]) -> int:
        ranks = self._ranks(task.group or Group.DATA, op.num_ranks)
        share = len(ranks) if op.op == "all_gather" else 1
        return self._add(
            task.name,
            ChakraKind.COLLECTIVE,
            waits,
            Attribute("comm_type", "int64", int(ChakraCollective[op.op.upper()])),
            Attribute("comm_size", "int64", round(float(op.message_bytes) / share)),
            Attribute("pg_name", "string", self.names.name(ranks)),
            *self._where(action),
        )

    def _ranks(self, group: Group, num_ranks: int) -> tuple[int, ...]:
        ranks = group_ranks(self.rank, group, self.number)
        return ranks if len(ranks) == num_ranks else self.names.world

    def _ring(self, task: Task, op: ops.Collective, waits: list[int]) -> list[int]:
        """Send this rank's block to the next rank and receive the block of the previous one."""
        ranks = group_ranks(self.rank, task.group or Group.CONTEXT, self.number)
        position = ranks.index(self.number)
        size, tag = round(float(op.message_bytes)), len(self.nodes) & 0x7FFF_FFFF
        to, source = ranks[(position + 1) % len(ranks)], ranks[position - 1]
        sent = self._message(task.name, ChakraKind.SEND, to, size, tag, waits)
        return [sent, self._message(task.name, ChakraKind.RECEIVE, source, size, tag, waits)]

    def _message(self, name: str, kind: ChakraKind, peer: int, size: int, tag: int, waits: list[int]) -> int:
        source, to = (self.number, peer) if kind is ChakraKind.SEND else (peer, self.number)
        return self._add(
            name,
            kind,
            waits,
            Attribute("comm_src", "int32", source),
            Attribute("comm_dst", "int32", to),
            Attribute("comm_size", "int64", size),
            Attribute("comm_tag", "int32", tag),
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
