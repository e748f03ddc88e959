"""Time collectives between real processes: gloo on CPUs, NCCL on GPUs; on one host, or on several through Ray.

Sizes and bus bandwidths are those of nccl-tests (`doc/PERFORMANCE.md`): a collective's size is its whole buffer, and
bus bandwidth is size / time x the share of the buffer that a rank must send, `ops.Collective.num_bytes`.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from windtunnel.errors import InputError, WindtunnelError, check_known, import_extra
from windtunnel.lab.processes import execute, process_group, spawn
from windtunnel.lab.profile.compute import operator_tables
from windtunnel.lab.profile.samples import TimeStatistics, statistics_of
from windtunnel.lab.timing import captured
from windtunnel.model.operators import COLLECTIVES, Collective
from windtunnel.pricing.table import MeasurementTable

WARM_UPS = 3
SAMPLES = 9
SAMPLE_S = 0.02
"""Duration of a sample: executions in a row, without a barrier between them, that take about this long."""
MOST_IN_A_ROW = 200
ELEMENT_BYTES = 2
TIMES = "times.json"


@dataclass(frozen=True)
class CollectivesPlan:
    """The collectives, workers and sizes to time."""

    ops: tuple[str, ...]
    num_workers: tuple[int, ...]
    sizes_bytes: tuple[int, ...]
    backend: str
    workers_per_node: int

    def __post_init__(self) -> None:
        for name in self.ops:
            check_known(name, COLLECTIVES, f"there is no collective {name!r}", ", ".join(COLLECTIVES))
        if min(self.num_workers) < 1:
            raise InputError(f"--num-workers: {min(self.num_workers)} is not a number of workers")


@dataclass(frozen=True)
class TimedCollective:
    """A timed collective: one size over some workers."""

    op: str
    num_workers: int
    span_nodes: int
    size_bytes: int
    statistics: TimeStatistics

    @property
    def algorithm_bytes_per_s(self) -> float:
        """Size over time."""
        return self.size_bytes / self.statistics.median_s

    @property
    def bus_bytes_per_s(self) -> float:
        """Rate at which each rank's link must carry data, by nccl-tests' factors."""
        op = Collective(self.op, float(self.size_bytes), self.num_workers)
        return float(np.asarray(op.num_bytes)) / self.statistics.median_s


def usual_backend() -> str:
    """Return NCCL where torch finds GPUs, else gloo; MissingExtraError where torch is not installed."""
    return "nccl" if import_extra("torch", "profile").cuda.is_available() else "gloo"


def sizes_between(smallest_bytes: int, largest_bytes: int) -> tuple[int, ...]:
    """Return powers of two from smallest to largest, both included; InputError where not above zero or ordered."""
    if not 0 < smallest_bytes <= largest_bytes:
        raise InputError(f"there are no sizes from {smallest_bytes} to {largest_bytes} bytes")
    sizes = [smallest_bytes]
    while sizes[-1] * 2 < largest_bytes:
        sizes.append(sizes[-1] * 2)
    return tuple(dict.fromkeys([*sizes, largest_bytes]))


def time_collectives(plan: CollectivesPlan, notify: Callable[[str], None]) -> list[TimedCollective]:
    """Time the plan's collectives between processes of this host.

    Raises:
        MissingExtraError: torch is not installed.
        InputError: the backend is not available, or has fewer devices than workers.
        WindtunnelError: a worker died.
    """
    _check_backend(plan)
    timed: list[TimedCollective] = []
    for workers in plan.num_workers:
        notify(f"{workers} workers")
        with tempfile.TemporaryDirectory(prefix="windtunnel-collectives-") as folder:
            if reason := spawn(_run_worker, (plan, workers, folder), workers):
                raise WindtunnelError(f"a worker of {workers} died: {reason.strip().splitlines()[-1]}")
            timed += msgspec.json.decode((Path(folder) / TIMES).read_bytes(), type=list[TimedCollective])
    return timed


def time_collectives_on_ray(plan: CollectivesPlan, notify: Callable[[str], None]) -> list[TimedCollective]:
    """Time the plan's collectives on a running Ray cluster (`ray start`), with `workers_per_node` on each node.
    MissingExtraError where ray is not installed; InputError where no cluster is running here, or it is too small."""
    ray = import_extra("ray", "ray")
    _check_backend(plan, one_host=False)
    try:
        ray.init(address="auto", log_to_driver=False)
    except ConnectionError:
        raise InputError("no Ray cluster is running here", "start one with `ray start --head`") from None
    timed: list[TimedCollective] = []
    try:
        for workers in plan.num_workers:
            notify(f"{workers} workers")
            timed += _on_ray(ray, plan, workers)
    finally:
        ray.shutdown()
    return timed


def _on_ray(ray: Any, plan: CollectivesPlan, workers: int) -> list[TimedCollective]:
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    nodes = -(-workers // plan.workers_per_node)
    resource = "GPU" if plan.backend == "nccl" else "CPU"
    bundles = [{resource: min(plan.workers_per_node, workers - n * plan.workers_per_node)} for n in range(nodes)]
    group = placement_group(bundles, strategy="STRICT_SPREAD" if nodes > 1 else "PACK")
    if not group.wait(60):
        remove_placement_group(group)
        raise InputError(f"the Ray cluster has no room for {workers} workers on {nodes} nodes")
    remote = ray.remote(num_cpus=int(resource == "CPU"), num_gpus=int(resource == "GPU"))(_timed_here)
    meeting = f"tcp://{ray.util.get_node_ip_address()}:{29400 + workers}"
    try:
        tasks = [
            remote.options(
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=number // plan.workers_per_node
                )
            ).remote(number, plan, workers, meeting, 0)
            for number in range(workers)
        ]
        timed: list[TimedCollective] = ray.get(tasks)[0]
        return timed
    finally:
        remove_placement_group(group)


def _check_backend(plan: CollectivesPlan, one_host: bool = True) -> None:
    """Raise InputError where torch lacks the backend, or this host lacks a GPU for each worker."""
    torch = import_extra("torch", "profile")
    if plan.backend not in ("gloo", "nccl"):
        raise InputError(f"there is no backend {plan.backend!r}", "gloo for CPUs, nccl for GPUs")
    if plan.backend == "nccl" and not (torch.cuda.is_available() and torch.distributed.is_nccl_available()):
        raise InputError("NCCL needs CUDA devices, and torch finds none here", "take --backend gloo")
    if plan.backend == "nccl" and one_host and max(plan.num_workers) > torch.cuda.device_count():
        raise InputError(
            f"{max(plan.num_workers)} workers need as many GPUs; this host has {torch.cuda.device_count()}"
        )


def _run_worker(number: int, plan: CollectivesPlan, workers: int, folder: str) -> None:
    """Time the collectives as one process of this host; rank 0 writes the times."""
    times = _timed_here(number, plan, workers, f"file://{folder}/meeting", number)
    if number == 0:
        (Path(folder) / TIMES).write_bytes(msgspec.json.encode(times))


def _timed_here(number: int, plan: CollectivesPlan, workers: int, meeting: str, local: int) -> list[TimedCollective]:
    """Time the collectives as one worker, whose GPU is number `local` of those that it sees."""
    import torch

    device = torch.device("cpu")
    if plan.backend == "nccl":
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    with process_group(plan.backend, meeting, number, workers, device if plan.backend == "nccl" else None):
        return [
            TimedCollective(
                op,
                workers,
                -(-workers // plan.workers_per_node),
                size,
                _timed(_executor(op, size, number, workers, device), device),
            )
            for op in plan.ops
            if op != "send_recv" or workers == 2
            for size in plan.sizes_bytes
        ]


def _executor(op: str, size_bytes: int, number: int, workers: int, device: Any) -> Callable[[], object]:
    """Return a function that executes a collective once, with a buffer of about `size_bytes` in whole shares."""
    import torch
    from torch import distributed

    share = max(size_bytes // ELEMENT_BYTES // workers, 1)

    def zeros(num_shares: int = workers) -> Any:
        return torch.zeros(share * num_shares, dtype=torch.bfloat16, device=device)

    buffer = zeros()
    if op == "send_recv":
        return (lambda: distributed.send(buffer, 1)) if number == 0 else (lambda: distributed.recv(buffer, 0))
    sent = zeros(1) if op == "all_gather" else zeros()
    received = zeros(1) if op == "reduce_scatter" else buffer
    return lambda: execute(op, received, sent)


def _timed(run: Callable[[], object], device: Any) -> TimeStatistics:
    """Time samples of executions in a row; the slowest rank's time counts, as in nccl-tests' report of each size."""
    import torch
    from torch import distributed

    def in_a_row(count: int) -> None:
        for _ in range(count):
            run()

    def spent_s(execution: Callable[[], object]) -> float:
        distributed.barrier()
        started_s = time.perf_counter()
        execution()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        spent = torch.tensor([time.perf_counter() - started_s], dtype=torch.float64, device=device)
        distributed.all_reduce(spent, op=distributed.ReduceOp.MAX)
        return float(spent.item())

    spent_s(partial(in_a_row, WARM_UPS))  # connects the ranks
    execution_s = spent_s(partial(in_a_row, WARM_UPS)) / WARM_UPS
    count = int(np.clip(SAMPLE_S / execution_s, 1, MOST_IN_A_ROW))
    row: Callable[[], object] = partial(in_a_row, count)
    if device.type == "cuda":
        # Engines replay graphs; launched one by one, small ones would wait for the host.
        row = captured(row) or row
    return statistics_of([spent_s(row) / count for _ in range(SAMPLES)])


def collective_tables(timed: Sequence[TimedCollective], source: str) -> list[MeasurementTable]:
    """Return timed collectives as tables, one per collective; a single worker sends nothing and has no row."""
    rows = (
        (Collective(row.op, float(row.size_bytes), row.num_workers, row.span_nodes), row.statistics)
        for row in timed
        if row.num_workers > 1
    )
    return operator_tables(rows, source)
