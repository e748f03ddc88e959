"""Run a small job's communication for real: a process for each rank, gloo between them, no GPU.

Every rank goes through its device's program (`training/program.py`) and carries out each collective and message
with data whose result it knows: that groups have the members and sizes that everyone expects, and that the order of a
schedule comes to its end, is then shown and not assumed. Computation is left out. Times are those of this machine's
loopback and say nothing about a GPU.
"""

import json
import tempfile
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from windtunnel.errors import InputError, WindtunnelError, import_extra
from windtunnel.formats.collective_calls import CollectiveCall, totals
from windtunnel.lab.processes import execute, process_group, spawn
from windtunnel.model import operators as ops
from windtunnel.training.layers.part import Task
from windtunnel.training.layers.rank import Group, Rank, group_ranks, stage_of_rank
from windtunnel.training.program import Exchange, device_program
from windtunnel.training.setup import TrainingSetup

MAX_RANKS = 16
"""Most processes on one machine."""


@dataclass(frozen=True)
class CommunicationReplay:
    """The result of a replay."""

    num_ranks: int
    calls: tuple[CollectiveCall, ...]
    """Calls of rank 0: sizes as the job has them, with the time they took here."""
    num_checked: int
    """Results that were checked against their known values, over all ranks."""
    largest_bytes: int
    """Size above which only a part of a message was sent."""


def replay(setup: TrainingSetup, largest_bytes: int = 1 << 20) -> CommunicationReplay:
    """Carry out one step's communication of `setup` between processes of this machine.

    Args:
        setup: a resolved job of at most 16 ranks.
        largest_bytes: longer messages are cut to this, in whole shares of their group.

    Raises:
        MissingExtraError: torch is not installed.
        InputError: the job has more ranks than that.
        WindtunnelError: a rank died, hung, or received what it should not have.
    """
    num_ranks = setup.degrees.num_devices
    import_extra("torch", "replay")
    if num_ranks > MAX_RANKS:
        raise InputError(
            f"the job has {num_ranks} ranks; a replay takes at most {MAX_RANKS}, each a process of this machine",
            "replay it with smaller degrees: they form the same groups",
        )
    if largest_bytes < num_ranks:
        raise InputError(f"messages of {largest_bytes} bytes cannot be shared by {num_ranks} ranks")
    with tempfile.TemporaryDirectory(prefix="windtunnel-replay-") as folder:
        if reason := spawn(_run_rank, (setup, largest_bytes, folder), num_ranks):
            raise WindtunnelError(_first_failure(Path(folder)) or f"a rank of the replay died: {reason}")
        results = [json.loads((Path(folder) / f"{number}.done").read_text()) for number in range(num_ranks)]
    calls = tuple(CollectiveCall(*call) for call in results[0]["calls"])
    return CommunicationReplay(num_ranks, calls, sum(result["num_checked"] for result in results), largest_bytes)


def _run_rank(number: int, setup: TrainingSetup, largest_bytes: int, folder: str) -> None:
    with process_group("gloo", f"file://{folder}/meeting", number, setup.degrees.num_devices):
        try:
            runner = _RankRunner(setup, number, largest_bytes, _new_groups(setup))
            runner.run()
            done = {"calls": [*totals(runner.calls)], "num_checked": runner.num_checked}
            (Path(folder) / f"{number}.done").write_text(json.dumps(done))
        except Exception as error:
            (Path(folder) / f"{number}.failed").write_text(f"rank {number}: {error}\n{traceback.format_exc()}")
            raise


def _first_failure(folder: Path) -> str | None:
    """Return the error of the rank that failed first for a reason of its own; the others then miss it."""
    texts = sorted(path.read_text().splitlines()[0] for path in folder.glob("*.failed"))
    causes = [text for text in texts if "expected" in text]
    return next(iter([*causes, *texts]), None)


def _new_groups(setup: TrainingSetup) -> dict[tuple[int, ...], Any]:
    """Create every group of every rank, in the same order on all ranks, as torch.distributed demands."""
    from torch import distributed

    rank = Rank(setup)
    every = {group_ranks(rank, group, number) for group in Group for number in range(setup.degrees.num_devices)}
    return {ranks: distributed.new_group(list(ranks)) for ranks in sorted(every) if len(ranks) > 1}


@dataclass
class _RankRunner:
    """A rank on its way through the program."""

    setup: TrainingSetup
    number: int
    largest_bytes: int
    groups: dict[tuple[int, ...], Any]
    calls: list[CollectiveCall] = field(default_factory=list)
    num_checked: int = 0
    leaving: list[tuple[Any, Any]] = field(default_factory=list)
    """Messages on their way, with the data that must live until then."""

    def run(self) -> None:
        rank = Rank(self.setup)
        for action in device_program(self.setup, stage_of_rank(rank, self.number)):
            if action.receives:
                self._receive(action.receives)
            for task in action.tasks:
                if task.group is not None:
                    self._communicate(rank, task, task.group)
            if action.sends:
                self._send(action.sends)
        for work, _ in self.leaving:
            work.wait()

    def _communicate(self, rank: Rank, task: Task, group: Group) -> None:
        op = task.op
        assert isinstance(op, ops.Collective)
        ranks = group_ranks(rank, group, self.number)
        if len(ranks) != op.num_ranks:
            ranks = tuple(range(self.setup.degrees.num_devices))
        if len(ranks) != op.num_ranks:
            raise WindtunnelError(f"{task.name}: expected a group of {op.num_ranks} ranks, it has {len(ranks)}")
        size = round(float(op.message_bytes))
        # A rank's share is padded as a framework does, or cut by the limit.
        share = -(-min(size, self.largest_bytes) // len(ranks))
        for _ in range(round(task.count)):
            start = time.perf_counter()
            received, sent, expected = self._data(op.op, ranks, share)
            if op.op == "send_recv":
                from torch import distributed

                place, tag = ranks.index(self.number), len(self.calls)
                work = distributed.isend(sent, ranks[(place + 1) % len(ranks)], tag=tag)
                distributed.recv(received, ranks[place - 1], tag=tag)
                work.wait()
            else:
                execute(op.op, received, sent, self.groups.get(ranks))
            self._check(task.name, received, expected)
            elapsed_s = time.perf_counter() - start
            self.calls.append(CollectiveCall(op.op, str(group), len(ranks), size, duration_s=elapsed_s))

    def _data(self, op: str, ranks: tuple[int, ...], share: int) -> tuple[Any, Any, Any]:
        """Return the buffers in which a collective receives and sends, and what must be received."""
        import torch

        def filled(value: int, num_shares: int = len(ranks)) -> Any:
            return torch.full((share * num_shares,), value, dtype=torch.uint8)

        def numbered(values: Iterable[int]) -> Any:
            return torch.tensor([*values], dtype=torch.uint8).repeat_interleave(share)

        place = ranks.index(self.number)
        match op:
            case "all_reduce":
                return filled(1), None, filled(len(ranks))
            case "all_gather":
                return filled(0), filled(self.number, 1), numbered(ranks)
            case "reduce_scatter":
                # Every rank gives the share of rank r the value of r's place; their sum is that times the ranks.
                return filled(0, 1), numbered(range(len(ranks))), filled(place * len(ranks), 1)
            case "all_to_all":
                return filled(0), filled(self.number), numbered(ranks)
            case _:
                return filled(0), filled(self.number), filled(ranks[place - 1])

    def _check(self, name: str, received: Any, expected: Any) -> None:
        import torch

        if not torch.equal(received, expected):
            raise WindtunnelError(f"{name}: expected {expected[:4].tolist()}..., received {received[:4].tolist()}...")
        self.num_checked += 1

    def _message(self, exchange: Exchange) -> tuple[int, int, int]:
        """Return (peer, tag, bytes) of a message; both ends compute the same tag."""
        per_stage = self.setup.degrees.num_devices // self.setup.degrees.pp
        tag = 1 << 30 | exchange.microbatch << 9 | exchange.boundary << 1 | int(exchange.is_gradient)
        peer = exchange.peer * per_stage + self.number % per_stage
        return peer, tag, min(round(exchange.size_bytes), self.largest_bytes)

    def _send(self, exchange: Exchange) -> None:
        import torch
        from torch import distributed

        peer, tag, size = self._message(exchange)
        data = torch.full((size,), exchange.microbatch % 251, dtype=torch.uint8)
        self.leaving.append((distributed.isend(data, peer, tag=tag), data))
        self.calls.append(CollectiveCall("send", "pp", 2, round(exchange.size_bytes), duration_s=0.0))

    def _receive(self, exchange: Exchange) -> None:
        import torch
        from torch import distributed

        peer, tag, size = self._message(exchange)
        data = torch.empty(size, dtype=torch.uint8)
        start = time.perf_counter()
        distributed.recv(data, peer, tag=tag)
        elapsed_s = time.perf_counter() - start
        self._check("pipeline message", data, torch.full_like(data, exchange.microbatch % 251))
        self.calls.append(CollectiveCall("receive", "pp", 2, round(exchange.size_bytes), duration_s=elapsed_s))
