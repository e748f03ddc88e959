"""Time collectives between real processes: gloo on CPUs, NCCL on GPUs; on one host, or on several through Ray.

Sizes and bus bandwidths are those of nccl-tests (`doc/PERFORMANCE.md`): a collective's size is its whole buffer, and
bus bandwidth is size / time x the share of the buffer that a rank must send, `ops.Collective.num_bytes`.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from windtunnel.errors import InputError, MissingExtraError, WindtunnelError, did_you_mean
from windtunnel.lab.profile.compute import operator_tables
from windtunnel.lab.profile.samples import TimeStatistics, statistics_of
from windtunnel.lab.replay import newest
from windtunnel.lab.timing import captured
from windtunnel.model.operators import COLLECTIVES, Collective
from windtunnel.pricing.table import MeasurementTable

WARM_UPS = 3
SAMPLES = 9
SAMPLE_S = 0.02
"""Duration of a sample: executions in a row, without a barrier between them, that take about this long."""
MOST_IN_A_ROW = 200
ELEMENT_BYTES = 2
TIMEOUT_S = 120.0


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
            if name not in COLLECTIVES:
                raise InputError(
                    f"there is no collective {name!r}", did_you_mean(name, COLLECTIVES, ", ".join(COLLECTIVES))
                )
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
    """Return NCCL where torch finds GPUs, else gloo.

    Raises:
        MissingExtraError: torch is not installed.
    """
    try:
        import torch
    except ImportError:
        raise MissingExtraError("torch", "profile") from None
    return "nccl" if torch.cuda.is_available() else "gloo"


def sizes_between(smallest_bytes: int, largest_bytes: int) -> tuple[int, ...]:
    """Return powers of two from the smallest to the largest size, both included.

    Raises:
        InputError: they are in the wrong order, or not above zero.
    """
    if not 0 < smallest_bytes <= largest_bytes:
        raise InputError(f"there are no sizes from {smallest_bytes} to {largest_bytes} bytes")
    sizes = [smallest_bytes]
    while sizes[-1] * 2 < largest_bytes:
        sizes.append(sizes[-1] * 2)
    return tuple(dict.fromkeys([*sizes, largest_bytes]))


def time_collectives(
    plan: CollectivesPlan, notify: Callable[[str], None] = lambda _text: None
) -> list[TimedCollective]:
    """Time the plan's collectives between processes of this host.

    Args:
        plan: what to time.
        notify: told before every number of workers.

    Raises:
        MissingExtraError: torch is not installed.
        InputError: the backend is not available, or has fewer devices than workers.
        WindtunnelError: a worker died.
    """
    _check_backend(plan)
    import torch.multiprocessing as processes

    timed: list[TimedCollective] = []
    for workers in plan.num_workers:
        notify(f"{workers} workers")
        with tempfile.TemporaryDirectory(prefix="windtunnel-collectives-") as folder:
            meeting = f"file://{folder}/meeting"
            try:
                processes.spawn(_run_worker, (plan, workers, meeting, folder), nprocs=workers)
            except (processes.ProcessRaisedException, processes.ProcessExitedException) as error:
                reason = str(error).strip().splitlines()[-1]
                raise WindtunnelError(f"a worker of {workers} died: {reason}") from None
            timed += _read(json.loads((Path(folder) / "times.json").read_text(encoding="utf-8")))
    return timed


def time_collectives_on_ray(
    plan: CollectivesPlan, notify: Callable[[str], None] = lambda _text: None
) -> list[TimedCollective]:
    """Time the plan's collectives between workers of a running Ray cluster (`ray start`), `workers_per_node` on each
    node.

    Raises:
        MissingExtraError: ray is not installed.
        InputError: no cluster is running here, or it is too small.
    """
    try:
        import ray
    except ImportError:
        raise MissingExtraError("ray", "ray") from None
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
    remote = ray.remote(num_cpus=int(resource == "CPU"), num_gpus=int(resource == "GPU"))(_ray_worker)
    meeting = f"tcp://{ray.util.get_node_ip_address()}:{29400 + workers}"
    try:
        tasks = [
            remote.options(
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=number // plan.workers_per_node
                )
            ).remote(number, plan, workers, meeting)
            for number in range(workers)
        ]
        return _read(ray.get(tasks)[0])
    finally:
        remove_placement_group(group)


def _ray_worker(number: int, plan: CollectivesPlan, workers: int, meeting: str) -> list[dict[str, Any]]:
    return _timed_here(number, plan, workers, meeting, local=0)


def _check_backend(plan: CollectivesPlan, one_host: bool = True) -> None:
    try:
        import torch
        from torch import distributed
    except ImportError:
        raise MissingExtraError("torch", "profile") from None
    if plan.backend not in ("gloo", "nccl"):
        raise InputError(f"there is no backend {plan.backend!r}", "gloo for CPUs, nccl for GPUs")
    if plan.backend == "nccl" and not (torch.cuda.is_available() and distributed.is_nccl_available()):
        raise InputError("NCCL needs CUDA devices, and torch finds none here", "take --backend gloo")
    if plan.backend == "nccl" and one_host and max(plan.num_workers) > torch.cuda.device_count():
        raise InputError(
            f"{max(plan.num_workers)} workers need as many GPUs; this host has {torch.cuda.device_count()}"
        )


def _run_worker(number: int, plan: CollectivesPlan, workers: int, meeting: str, folder: str) -> None:
    """Time the collectives as one process of this host; rank 0 writes the times."""
    times = _timed_here(number, plan, workers, meeting, local=number)
    if number == 0:
        (Path(folder) / "times.json").write_text(json.dumps(times), encoding="utf-8")


def _timed_here(number: int, plan: CollectivesPlan, workers: int, meeting: str, local: int) -> list[dict[str, Any]]:
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    device = torch.device("cpu")
    if plan.backend == "nccl":
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    distributed.init_process_group(
        plan.backend,
        init_method=meeting,
        rank=number,
        world_size=workers,
        timeout=timedelta(seconds=TIMEOUT_S),
        # NCCL would guess it from the rank, which is wrong where a rank sees one device alone.
        device_id=device if plan.backend == "nccl" else None,
    )
    try:
        return [
            {"op": op, "num_workers": workers, "span_nodes": -(-workers // plan.workers_per_node), "size_bytes": size}
            | {"statistics": asdict(_timed(_executor(op, size, number, workers, device), device))}
            for op in plan.ops
            if op != "send_recv" or workers == 2
            for size in plan.sizes_bytes
        ]
    finally:
        distributed.destroy_process_group()


def _executor(op: str, size_bytes: int, number: int, workers: int, device: Any) -> Callable[[], object]:
    """Return a function that executes a collective once; its buffer has about `size_bytes`, in whole shares of the
    ranks.
    """
    import torch
    from torch import distributed

    share = max(size_bytes // ELEMENT_BYTES // workers, 1)
    buffer = torch.zeros(share * workers, dtype=torch.bfloat16, device=device)
    part = torch.zeros(share, dtype=torch.bfloat16, device=device)
    if op == "all_reduce":
        return lambda: distributed.all_reduce(buffer)
    if op == "all_gather":
        return lambda: newest("all_gather_single", "all_gather_into_tensor")(buffer, part)
    if op == "reduce_scatter":
        return lambda: newest("reduce_scatter_single", "reduce_scatter_tensor")(part, buffer)
    if op == "all_to_all":
        arrived = torch.empty_like(buffer)
        return lambda: distributed.all_to_all_single(arrived, buffer)
    if number == 0:
        return lambda: distributed.send(buffer, 1)
    return lambda: distributed.recv(buffer, 0)


def _timed(execute: Callable[[], object], device: Any) -> TimeStatistics:
    """Time samples of executions in a row; the slowest rank's time counts, as in nccl-tests' report of each size."""
    import torch
    from torch import distributed

    def spent_s(run: Callable[[], object]) -> float:
        distributed.barrier()
        started_s = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        spent = torch.tensor([time.perf_counter() - started_s], dtype=torch.float64, device=device)
        distributed.all_reduce(spent, op=distributed.ReduceOp.MAX)
        return float(spent.item())

    spent_s(_in_a_row(execute, WARM_UPS))  # connects the ranks
    one_s = spent_s(_in_a_row(execute, WARM_UPS)) / WARM_UPS
    count = int(np.clip(SAMPLE_S / one_s, 1, MOST_IN_A_ROW))
    row = _in_a_row(execute, count)
    if device.type == "cuda":
        # Engines replay graphs; launched one by one, small ones would wait for the host.
        row = captured(row) or row
    return statistics_of([spent_s(row) / count for _ in range(SAMPLES)])


def _in_a_row(execute: Callable[[], object], count: int) -> Callable[[], object]:
    def run() -> None:
        for _ in range(count):
            execute()

    return run


def _read(times: Sequence[dict[str, Any]]) -> list[TimedCollective]:
    return [TimedCollective(**{**row, "statistics": TimeStatistics(**row["statistics"])}) for row in times]


def collective_tables(timed: Sequence[TimedCollective], source: str) -> list[MeasurementTable]:
    """Return timed collectives as tables, one per collective; a single worker sends nothing and has no row."""
    rows = (
        (Collective(row.op, float(row.size_bytes), row.num_workers, row.span_nodes), row.statistics)
        for row in timed
        if row.num_workers > 1
    )
    return operator_tables(rows, source)
