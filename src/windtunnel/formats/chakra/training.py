"""A training job as Chakra execution traces, one for each rank, as ASTRA-sim 2 reads them.

Computation and communication wait for what they need: computation for the one before it and for the collectives whose
results it uses, a collective that runs beside a computation for what came before that. ASTRA-sim counts an all-gather
by what one rank gives; the other sizes are those of the whole tensor (astra-sim, system/collective/Ring.cc; attributes:
astra-sim/chakra, src/feeder_v3). Durations are whole microseconds; what rounding leaves over is carried on to the next
node, and `exact_ns` has the true one.
"""

import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from windtunnel.errors import InputError
from windtunnel.files import write_text
from windtunnel.formats.chakra.schema import Attribute, ChakraTrace, Collective, Node, NodeKind
from windtunnel.formats.chakra.write import write_trace
from windtunnel.model import operators as ops
from windtunnel.training.layers.part import Task
from windtunnel.training.layers.rank import Group, Rank
from windtunnel.training.layers.rank_groups import group_ranks, stage_of_rank
from windtunnel.training.program import BESIDE_STEP, Action, Exchange, device_program
from windtunnel.training.setup import TrainingSetup

Seconds = Callable[[Task], float]

COLLECTIVES = {
    "all_reduce": Collective.ALL_REDUCE,
    "all_gather": Collective.ALL_GATHER,
    "reduce_scatter": Collective.REDUCE_SCATTER,
    "all_to_all": Collective.ALL_TO_ALL,
}


@dataclass
class GroupNames:
    """Numbers of the groups of all ranks, as `--comm-group-configuration` lists them; "0" is all ranks."""

    world: tuple[int, ...]
    names: dict[tuple[int, ...], str] = field(default_factory=dict)

    def name(self, ranks: tuple[int, ...]) -> str:
        """The number of a group, given at its first use."""
        if ranks == self.world:
            return "0"
        return self.names.setdefault(ranks, str(len(self.names) + 1))

    def as_json(self) -> str:
        """The file that ASTRA-sim reads."""
        return json.dumps({name: list(ranks) for ranks, name in self.names.items()}, indent=1) + "\n"


def training_traces(
    setup: TrainingSetup, seconds: Seconds, names: GroupNames | None = None, ranks: Collection[int] | None = None
) -> Iterator[tuple[int, ChakraTrace]]:
    """(rank, trace) of every rank; `names` collects the groups.

    Args:
        setup: a resolved job.
        seconds: of a task, such as `TrainingPricer`'s.
        names: where the groups' numbers are kept.
        ranks: only these; None: all.
    """
    rank = Rank(setup)
    known = setup.degrees
    names = names or GroupNames(tuple(range(known.num_devices)))
    for device in range(known.pp):
        program = list(device_program(setup, device))
        for number in range(known.num_devices):
            if stage_of_rank(rank, number) == device and (ranks is None or number in ranks):
                yield number, _RankTrace(rank, number, names, seconds).trace(program)


def write_training_traces(
    setup: TrainingSetup, seconds: Seconds, prefix: Path, ranks: Collection[int] | None = None
) -> list[Path]:
    """Write `PREFIX.RANK.et` for every rank, or for `ranks`, and `PREFIX.groups.json`; the paths that were written.

    Raises:
        InputError: the job has no such rank.
        InputError: a file cannot be written.
    """
    unknown = next((number for number in ranks or () if not 0 <= number < setup.degrees.num_devices), None)
    if unknown is not None:
        raise InputError(f"the job has ranks 0 to {setup.degrees.num_devices - 1}; there is no rank {unknown}")
    names = GroupNames(tuple(range(setup.degrees.num_devices)))
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
    nodes: list[Node] = field(default_factory=list)
    last: int | None = None
    """The computation that the next node waits for."""
    needed: list[int] = field(default_factory=list)
    """Communication that the next computation waits for."""
    beside: list[tuple[str, int]] = field(default_factory=list)
    """Communication that runs next to a computation still to come, by that computation's name."""
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

    def _add(self, name: str, kind: NodeKind, waits: list[int], duration_us: int, *attributes: Attribute) -> int:
        is_cpu = Attribute("is_cpu_op", "bool", value=False)
        number = len(self.nodes) + 1
        depends = tuple(sorted(set(waits)))
        self.nodes.append(
            Node(
                number, name, kind, data_dependencies=depends, duration_us=duration_us, attributes=(is_cpu, *attributes)
            )
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
            NodeKind.COMPUTE,
            self._waits(),
            duration_us,
            Attribute("num_ops", "int64", round(task.flops)),
            Attribute("tensor_size", "uint64", max(round(float(task.op.num_bytes) * task.count), 1)),
            Attribute("exact_ns", "int64", round(exact_us * 1000)),
            *self._where(action),
        )
        self.needed = [node for name, node in self.beside if name == task.name]
        self.beside = [(name, node) for name, node in self.beside if name != task.name]

    def _communicate(self, task: Task, action: Action) -> None:
        assert isinstance(task.op, ops.Collective)
        waits = self._waits()
        is_beside = task.beside is not None and task.pieces == 1
        for _ in range(round(task.count)):
            nodes = self._ring(task, waits) if task.op.op == "send_recv" else [self._collective(task, action, waits)]
            if is_beside:
                self.beside += [(str(task.beside), node) for node in nodes]
            else:
                self.needed += nodes
            waits = [*waits, *nodes]

    def _collective(self, task: Task, action: Action, waits: list[int]) -> int:
        op = task.op
        assert isinstance(op, ops.Collective)
        ranks = self._ranks(task.group or Group.DATA, op.num_ranks)
        share = len(ranks) if op.op == "all_gather" else 1
        return self._add(
            task.name,
            NodeKind.COLLECTIVE,
            waits,
            0,
            Attribute("comm_type", "int64", int(COLLECTIVES[op.op])),
            Attribute("comm_size", "int64", round(float(op.message_bytes) / share)),
            Attribute("pg_name", "string", self.names.name(ranks)),
            *self._where(action),
        )

    def _ranks(self, group: Group, num_ranks: int) -> tuple[int, ...]:
        found = group_ranks(self.rank, group, self.number)
        return found if len(found) == num_ranks else self.names.world

    def _ring(self, task: Task, waits: list[int]) -> list[int]:
        """Every rank gives its block to the next one and takes that of the one before."""
        op = task.op
        assert isinstance(op, ops.Collective)
        ranks = group_ranks(self.rank, task.group or Group.CONTEXT, self.number)
        place = ranks.index(self.number)
        size, tag = round(float(op.message_bytes)), len(self.nodes) & 0x7FFF_FFFF
        to, source = ranks[(place + 1) % len(ranks)], ranks[place - 1]
        sent = self._message(task.name, NodeKind.SEND, self.number, to, size, tag, waits)
        return [sent, self._message(task.name, NodeKind.RECEIVE, source, self.number, size, tag, waits)]

    def _message(self, name: str, kind: NodeKind, source: int, to: int, size: int, tag: int, waits: list[int]) -> int:
        return self._add(
            name,
            kind,
            waits,
            0,
            Attribute("comm_src", "int32", source),
            Attribute("comm_dst", "int32", to),
            Attribute("comm_size", "int64", size),
            Attribute("comm_tag", "int32", tag),
        )

    def _exchange(self, found: Exchange) -> None:
        """Between stages: what arrives is waited for, what leaves is not."""
        per_stage = self.rank.setup.degrees.num_devices // self.rank.setup.degrees.pp
        peer = found.peer * per_stage + self.number % per_stage
        size = round(found.size_bytes)
        tag = found.microbatch << 9 | found.boundary << 1 | int(found.is_gradient)
        if found.is_send:
            self._message("pipeline_send", NodeKind.SEND, self.number, peer, size, tag, self._waits())
        else:
            node = self._message("pipeline_receive", NodeKind.RECEIVE, peer, self.number, size, tag, [])
            self.needed.append(node)
