"""Price a training pass: every task by the serving estimators, then the effects of long runs and overlap.

A few figures are global; none belongs to a model, a framework or a run. `benchmarks/training_accuracy.py` prints what
they give on measured runs, each data set also with figures fitted without it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from windtunnel.hardware import HOST_BYTES_PER_S, Device, Node
from windtunnel.model import operators as ops
from windtunnel.model.feed_forward.experts import Experts
from windtunnel.network.cluster import FABRIC_ERROR, Network, between_nodes
from windtunnel.pricing.estimator import Coverage, Estimate, Estimator
from windtunnel.training.figures import FIGURES
from windtunnel.training.job import GEMM_FORMATS
from windtunnel.training.layers.host import HostCopy, HostUpdate
from windtunnel.training.layers.part import Task
from windtunnel.training.layers.rank import Group, Rank


@dataclass(frozen=True)
class TaskCost:
    """One task's time and how it was found."""

    task: Task
    seconds: float
    coverage: Coverage
    source: str
    relative_error: float


@dataclass(frozen=True)
class NetworkCollective:
    """A collective of a kind of group on the network between nodes."""

    group: Group
    op: str
    message_bytes: float
    """As NCCL counts."""
    num_ranks: int
    seconds: float
    choice: str
    """The algorithm and protocol that ran, as NCCL would choose."""


_sums = partial(defaultdict[Any, float], float)


@dataclass
class PassCost:
    """Seconds of one micro-batch's pass through some layers; exposed and hidden add up to all communication."""

    compute_s: dict[str, float] = field(default_factory=_sums)
    """By class of operator."""
    exposed_s: dict[Group, float] = field(default_factory=_sums)
    hidden_s: dict[Group, float] = field(default_factory=_sums)
    pairable_s: float = 0.0
    """The exposed communication that another micro-batch's pass beside this one would hide (DualPipe)."""
    slowdown_s: float = 0.0
    """Seconds that computation loses to the communication beside it."""
    error_s: float = 0.0
    """Expected error of the estimates, in seconds, were they all wrong the same way."""
    by_coverage: dict[Coverage, float] = field(default_factory=_sums)

    @property
    def computing_s(self) -> float:
        return sum(self.compute_s.values()) + self.slowdown_s

    @property
    def seconds(self) -> float:
        return self.computing_s + sum(self.exposed_s.values())

    def add(self, other: PassCost, times: float = 1.0) -> None:
        """Add `times` of another pass to this one."""
        for mine, others in (
            (self.compute_s, other.compute_s),
            (self.exposed_s, other.exposed_s),
            (self.hidden_s, other.hidden_s),
            (self.by_coverage, other.by_coverage),
        ):
            for name, seconds in others.items():
                mine[name] += seconds * times  # type: ignore[index]
        self.pairable_s += other.pairable_s * times
        self.slowdown_s += other.slowdown_s * times
        self.error_s += other.error_s * times


@dataclass(frozen=True)
class FastestEstimator:
    """The fastest of several estimates.

    Training frameworks tune their libraries, so the best kernel measured for an operator is the one that runs.
    """

    estimators: tuple[Estimator, ...]

    def estimate(self, op: ops.Op) -> Estimate:
        """Return the estimate with the fewest seconds."""
        return min((each.estimate(op) for each in self.estimators), key=lambda estimate: float(estimate.seconds))


@dataclass(frozen=True)
class JobNetwork:
    """The network that a training job's servers share, and the layout of its groups on it."""

    network: Network
    rank: Rank

    def estimate(self, op: ops.Collective, group: Group) -> Estimate:
        """Return the seconds of a collective in every group of a kind at once; over all ranks there is one group."""
        num_ranks, stride = self.rank.layout(group)
        run = self.network.run(op, float(op.message_bytes), stride if op.num_ranks == num_ranks else 1)
        return Estimate(run.seconds, Coverage.ROOFLINE, f"{self.network.source}: {run}", FABRIC_ERROR)


@dataclass(frozen=True)
class TrainingPricer:
    """Prices of tasks, each operator priced once."""

    estimator: Estimator
    node: Node
    network: JobNetwork | None
    """None: only the links between nodes are known."""
    sustained_fraction: float
    format_rates: Mapping[str, float] = field(default_factory=dict)
    """Format -> rate of its matrix products against what the sustained fraction leaves, where it is another."""
    job_rate: tuple[str, float] = ("", 1.0)
    """Format of the job's matrix products, and the same for a step that has no others."""
    collective_launch_s: float = FIGURES.collective_launch_s
    """Beside a collective's own time; 0 where a whole step is one graph."""
    exchanges_by_kernel: bool = False
    """Whether kernels of their own send tokens to experts (DeepEP, HybridEP), not NCCL."""
    overlap_slowdown: float = FIGURES.overlap_slowdown
    _known: dict[tuple[ops.Op, Group | None, bool, tuple[str, float]], Estimate] = field(default_factory=dict)

    def of_job(self, rank: Rank) -> TrainingPricer:
        """Return the prices for another job on as many of the same devices, which may lay its groups out otherwise."""
        job = rank.setup.job
        by_kernel = job.parallelism.experts_exchange in ("by_node", "hybrid")
        launch = 0.0 if job.kernels.cuda_graphs == "full" else self.collective_launch_s
        whole = FIGURES.whole_step_rates.get(rank.setup.device.architecture, {})
        of_products = GEMM_FORMATS[job.precision.compute].value
        known = replace(
            self,
            exchanges_by_kernel=by_kernel,
            collective_launch_s=launch,
            job_rate=(of_products, whole.get(of_products, 1.0)),
        )
        if known.network is None or known.network.rank.setup is rank.setup:
            return known
        return replace(known, network=replace(known.network, rank=rank), _known={})

    @property
    def identity(self) -> tuple[object, ...]:
        """Key of prices that are the same for any task."""
        return id(self._known), self.exchanges_by_kernel, self.collective_launch_s, self.job_rate

    @property
    def collectives(self) -> list[NetworkCollective]:
        """Every collective that ran on the network, from the shortest to the longest of each group."""
        if self.network is None:
            return []
        rows = [
            NetworkCollective(group, op.op, float(op.message_bytes), op.num_ranks, float(price.seconds), choice)
            for (op, group, *_), price in self._known.items()
            if group is not None and isinstance(op, ops.Collective) and op.span_nodes > 1
            for choice in [price.source.removeprefix(f"{self.network.network.source}: ")]
        ]
        return sorted(dict.fromkeys(rows), key=lambda row: (row.group, row.op, row.message_bytes))

    def task(self, task: Task) -> TaskCost:
        """Return the cost of one task."""
        key = (task.op, task.group, self.exchanges_by_kernel, self.job_rate)
        if key not in self._known:
            self._known[key] = self._price(task.op, task.group)
        price = self._known[key]
        launch = self.collective_launch_s if task.group is not None else 0.0
        seconds = (float(price.seconds) + launch) * task.count
        return TaskCost(task, seconds, price.coverage, price.source, price.relative_error)

    def _price(self, op: ops.Op, group: Group | None) -> Estimate:
        if isinstance(op, HostCopy | HostUpdate):
            return self._on_host(op)
        if (
            isinstance(op, ops.Collective)
            and group is Group.EXPERTS
            and op.span_nodes == 1
            and self.exchanges_by_kernel
        ):
            link = self.node.scale_up
            seconds = link.latency_s + float(op.num_bytes) / (link.bytes_per_s * FIGURES.exchange_efficiency)
            return Estimate(seconds, Coverage.ROOFLINE, "links in a node", FIGURES.network_error)
        if not isinstance(op, ops.Collective) or group is None or op.span_nodes == 1:
            estimate = self._inside_node(op)
        elif self.network is not None:
            return self.network.estimate(op, group)
        else:
            return between_nodes(op, self.node, FIGURES.network_efficiency)
        seconds = float(estimate.seconds)
        if not isinstance(op, ops.Elementwise | ops.Collective):
            rate = self.format_rates.get(op.format.value, 1.0) if isinstance(op, ops.Gemm) else 1.0
            job_format, job_rate = self.job_rate
            is_jobs = isinstance(op, ops.Gemm) and op.format.value == job_format
            seconds /= self.sustained_fraction * (rate * job_rate if is_jobs else rate)
        if isinstance(op, ops.Gemm) and any(
            size > FIGURES.aligned_values and size % FIGURES.aligned_values for size in (op.n, op.k)
        ):
            seconds *= FIGURES.unaligned_slowdown
        return replace(estimate, seconds=seconds)

    def _on_host(self, op: HostCopy | HostUpdate) -> Estimate:
        """Return the estimate of a copy over the link to the host, or of an update by the host's processors."""
        figures = FIGURES.host_offload
        if isinstance(op, HostCopy):
            link, rate = self.node.host, HOST_BYTES_PER_S
            if link is not None:
                rate = link.bytes_per_s * figures["link_efficiency"]
            return Estimate(op.size_bytes / rate, Coverage.ROOFLINE, "link to the host", figures["copy_error"])
        rate = op.parameters_per_s or figures["parameters_per_s"]
        if op.parameters_per_s is None and self.node.host_memory_bytes_per_s:
            rate *= self.node.host_memory_bytes_per_s / figures["memory_bytes_per_s"]
        return Estimate(op.num_parameters / rate, Coverage.ROOFLINE, "CPU Adam on the host", figures["update_error"])

    def _inside_node(self, op: ops.Op) -> Estimate:
        """Return the estimate of a computation or of a collective inside a node.

        How fast cards reach each other over PCIe is a server's own: those that were measured passed the host's memory
        (4.7 of 32 GB/s between L40S). Links that switches join are taken where they are faster.
        """
        estimate, link = self.estimator.estimate(op), self.node.scale_up
        if not isinstance(op, ops.Collective) or not link.name.startswith("pcie"):
            return estimate
        linked_s = link.latency_s * op.num_ranks
        linked_s += float(op.num_bytes) / (link.bytes_per_s * FIGURES.pcie_efficiency)
        if linked_s >= float(estimate.seconds):
            return estimate
        return Estimate(linked_s, Coverage.ROOFLINE, "links in a node", FIGURES.network_error)

    def seconds(self, tasks: Iterable[Task]) -> float:
        """Return the seconds of tasks one after the other."""
        return sum(self.task(task).seconds for task in tasks)

    def of_pass(self, tasks: Iterable[Task]) -> PassCost:
        """Return the cost of a pass whose collectives run beside the computations that they name, or alone."""
        total = PassCost()
        costs = [self.task(task) for task in tasks]
        for cost in costs:
            total.by_coverage[cost.coverage] += cost.seconds
            total.error_s += cost.seconds * cost.relative_error
            if cost.task.group is None:
                total.compute_s[class_of(cost.task)] += cost.seconds
        room = {cost.task.name: cost.seconds for cost in costs if cost.task.group is None}
        for cost in costs:
            if cost.task.group is not None:
                self._communicate(total, cost, cost.task.group, room)
        return total

    def _communicate(self, total: PassCost, cost: TaskCost, group: Group, room: dict[str, float]) -> None:
        task, hidden = cost.task, 0.0
        if task.beside == "experts_beside":
            total.pairable_s += cost.seconds
        elif task.beside in room:
            hidden = min(cost.seconds, room[task.beside])
            if task.pieces > 1:
                hidden *= 1.0 - 1.0 / task.pieces
            room[task.beside] -= hidden
            total.slowdown_s += hidden * self.overlap_slowdown
        total.hidden_s[group] += hidden
        total.exposed_s[group] = total.exposed_s[group] + cost.seconds - hidden


def pricer(estimator: Estimator, device: Device, node: Node, network: JobNetwork | None = None) -> TrainingPricer:
    """Return a pricer with the shipped figures of the device's architecture."""
    usual = FIGURES.sustained_fraction.get(device.architecture, FIGURES.other_sustained_fraction)
    sustained = FIGURES.sustained_fraction.get(device.name, usual)
    rated_w = FIGURES.rated_w.get(device.architecture)
    if rated_w and device.tdp_w and device.tdp_w < rated_w:
        sustained *= (device.tdp_w / rated_w) ** FIGURES.clock_by_power
    rates = dict(FIGURES.format_rates.get(device.architecture, {}))
    if rated_w and device.tdp_w and "bf16" in rates:
        rates["bf16"] = min(rates["bf16"] * max(device.tdp_w / rated_w, 1.0) ** FIGURES.clock_by_power, 1.0)
    return TrainingPricer(estimator, node, network, sustained, rates)


def class_of(task: Task) -> str:
    """Return the class under which a report counts a computation."""
    if task.name.startswith("recompute_"):
        return "recomputation"
    if isinstance(task.op, ops.Gemm):
        return "matrix products"
    if isinstance(task.op, Experts):
        return "experts"
    return "memory-bound kernels" if isinstance(task.op, ops.Elementwise) else "attention"
