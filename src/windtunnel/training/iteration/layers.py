"""A training iteration layer by layer: what each computes and sends, and its run on a fabric at any depth."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from windtunnel.errors import InputError
from windtunnel.network.collectives.run import groups_seconds
from windtunnel.network.fabric import Fabric
from windtunnel.network.settings import NetworkSettings

SIMAI_LEAST_BYTES = 4096


class RankGroup(StrEnum):
    """Kinds of groups of ranks that run a collective."""

    TP = "tp"
    DP = "dp"
    EP = "ep"
    DP_EP = "dp_ep"
    """Ranks that hold the same experts."""


@dataclass(frozen=True)
class Communication:
    """A collective of `size_bytes`: the whole tensor, as NCCL counts (the output of an all-gather, the input of a
    reduce-scatter, what one rank holds in an all-to-all).
    """

    op: str
    group: RankGroup
    size_bytes: int


@dataclass(frozen=True)
class LayerPhase:
    """Computation and the collective after it, if there is one."""

    compute_s: float
    communication: Communication | None = None


@dataclass(frozen=True)
class IterationLayer:
    """One line of a workload."""

    name: str
    forward: LayerPhase
    input_gradient: LayerPhase
    weight_gradient: LayerPhase


@dataclass(frozen=True)
class LayerWorkload:
    """A training iteration in layers, in forward order; micro-batches are unrolled."""

    name: str
    tp: int
    ep: int
    pp: int
    vpp: int
    """Virtual pipeline stages of a rank."""
    num_micro_batches: int
    num_gpus: int
    pp_bytes: int
    """Sent between pipeline stages for each micro-batch."""
    layers: tuple[IterationLayer, ...]

    def __post_init__(self) -> None:
        for name in ("tp", "ep", "pp", "vpp", "num_micro_batches", "num_gpus"):
            if getattr(self, name) < 1:
                raise InputError(f"{self.name}: {name} is {getattr(self, name)}; at least 1 is needed")
        if self.num_gpus % (self.tp * self.pp):
            raise InputError(f"{self.name}: tp x pp = {self.tp * self.pp} does not divide {self.num_gpus} GPUs")
        if self.dp % self.ep:
            raise InputError(f"{self.name}: ep = {self.ep} does not divide dp = {self.dp}")

    @property
    def dp(self) -> int:
        return self.num_gpus // (self.tp * self.pp)

    def group_size(self, group: RankGroup) -> int:
        """Return the number of ranks in one group of a kind."""
        return {
            RankGroup.TP: self.tp,
            RankGroup.DP: self.dp,
            RankGroup.EP: self.ep,
            RankGroup.DP_EP: self.dp // self.ep,
        }[group]


@dataclass(frozen=True)
class PhaseTimes:
    """Nanoseconds of one phase of a layer."""

    compute_ns: int
    total_ns: int
    """Of its collective."""
    exposed_ns: int
    """The part of it that computation does not hide."""


@dataclass(frozen=True)
class LayerTimes:
    """A layer and its three phases."""

    layer: IterationLayer
    forward: PhaseTimes
    weight_gradient: PhaseTimes
    input_gradient: PhaseTimes

    @property
    def phases(self) -> tuple[tuple[LayerPhase, PhaseTimes], ...]:
        """Forward, gradient of the weights, gradient of the input: what each does, and its times."""
        return (
            (self.layer.forward, self.forward),
            (self.layer.weight_gradient, self.weight_gradient),
            (self.layer.input_gradient, self.input_gradient),
        )

    @property
    def compute_ns(self) -> int:
        return sum(times.compute_ns for _, times in self.phases)


@dataclass(frozen=True)
class Iteration:
    """One iteration: its layers, and nanoseconds of exposed communication, idle pipeline and computation."""

    workload: LayerWorkload
    layers: tuple[LayerTimes, ...]
    exposed_ns: dict[RankGroup, float]
    pp_ns: float
    """Transfers between pipeline stages."""
    bubble_ns: float
    """Idle while the pipeline fills and drains."""

    @property
    def compute_ns(self) -> int:
        return sum(layer.compute_ns for layer in self.layers)

    @property
    def communication_ns(self) -> float:
        return sum(self.exposed_ns.values())

    @property
    def total_ns(self) -> float:
        return self.compute_ns + self.communication_ns + self.pp_ns + self.bubble_ns


def exposed_by_group(layers: tuple[LayerTimes, ...]) -> dict[RankGroup, float]:
    """Return the exposed nanoseconds of every kind of group."""
    exposed_ns = dict.fromkeys(RankGroup, 0.0)
    for row in layers:
        for phase, times in row.phases:
            if phase.communication is not None:
                exposed_ns[phase.communication.group] += times.exposed_ns
    return exposed_ns


def bubble_ns(workload: LayerWorkload, layers: tuple[LayerTimes, ...]) -> float:
    """Return the idle time of an interleaved 1F1B pipeline: work x (stages - 1) / (micro-batches x virtual stages).

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC
    2021, section 2.2; like SimAI, the embedding is left out.
    """
    busy = sum(
        row.compute_ns + row.forward.total_ns + row.input_gradient.total_ns
        for row in layers
        if row.layer.name != "embedding_layer"
    )
    return busy * (workload.pp - 1) / (workload.num_micro_batches * workload.vpp)


def run_layers(workload: LayerWorkload, fabric: Fabric, settings: NetworkSettings) -> Iteration:
    """Return an iteration on a fabric: every kind of collective is timed once, with all its groups at work.

    Forward and input-gradient collectives block; weight-gradient collectives queue behind each other and are hidden by
    what is computed meanwhile. Transfers between pipeline stages block. InputError where the workload does not fit the
    fabric.
    """
    if workload.num_gpus != fabric.num_gpus:
        raise InputError(
            f"{workload.name} is for {workload.num_gpus} GPUs; {fabric.name} has {fabric.num_gpus}",
            "all_gpus of the workload and the GPUs of the topology must be equal",
        )
    known: dict[Communication, int] = {}
    simai = settings.compat == "simai"

    def nanoseconds(call: Communication) -> int:
        if call not in known:
            size_bytes = max(call.size_bytes, SIMAI_LEAST_BYTES) if simai else call.size_bytes
            groups = groups_of(workload, call.group)
            known[call] = round(groups_seconds(fabric, call.op, size_bytes, groups, settings) * 1e9)
        return known[call]

    layers = _timeline(workload, nanoseconds)
    return Iteration(
        workload,
        layers,
        exposed_by_group(layers),
        pp_ns=0.0 if simai else _pipeline_ns(workload, fabric, settings),
        bubble_ns=0.0 if simai else bubble_ns(workload, layers),
    )


def groups_of(workload: LayerWorkload, group: RankGroup) -> NDArray[np.int32]:
    """Return (num_groups, size) the ranks of a kind's groups, in Megatron's order: tp, ep, other dp, pp outermost."""
    tp, ep, dp, pp = workload.tp, workload.ep, workload.dp, workload.pp
    ids = np.arange(workload.num_gpus, dtype=np.int32).reshape(pp, dp // ep, ep, tp)
    match group:
        case RankGroup.TP:
            return ids.reshape(-1, tp)
        case RankGroup.DP:
            return ids.reshape(pp, dp, tp).swapaxes(1, 2).reshape(-1, dp)
        case RankGroup.EP:
            return ids.transpose(0, 1, 3, 2).reshape(-1, ep)
        case RankGroup.DP_EP:
            return ids.transpose(0, 2, 3, 1).reshape(-1, dp // ep)


def _pipeline_ns(workload: LayerWorkload, fabric: Fabric, settings: NetworkSettings) -> float:
    """Time a stage's sends and receives: one each way for every micro-batch and virtual stage."""
    if workload.pp == 1 or workload.pp_bytes == 0:
        return 0.0
    ends = (0, workload.num_gpus // workload.pp)
    pair = np.array([ends], np.int32)
    send_s = groups_seconds(fabric, "send_recv", workload.pp_bytes, pair, settings)
    return 2 * workload.num_micro_batches * workload.vpp * send_s * 1e9


def _timeline(workload: LayerWorkload, nanoseconds: Callable[[Communication], int]) -> tuple[LayerTimes, ...]:
    """Time every layer forward, then backward in reverse; gradients queue and are sent beside the computation."""

    def blocking(phase: LayerPhase) -> PhaseTimes:
        total_ns = nanoseconds(phase.communication) if phase.communication else 0
        return PhaseTimes(round(phase.compute_s * 1e9), total_ns, total_ns)

    forward = [blocking(layer.forward) for layer in workload.layers]
    inputs = [blocking(layer.input_gradient) for layer in workload.layers]
    now = sum(times.compute_ns + times.total_ns for times in forward)
    free = 0
    sent: list[tuple[int, int]] = []
    weights = []
    for layer, times in zip(reversed(workload.layers), reversed(inputs), strict=True):
        weight = blocking(layer.weight_gradient)
        now += times.compute_ns + times.total_ns + weight.compute_ns
        begin = max(now, free)
        free = begin + weight.total_ns
        sent.append((begin, free))
        weights.append(weight)
    shown = [
        replace(weight, exposed_ns=max(0, end - max(begin, now)))
        for weight, (begin, end) in zip(weights, sent, strict=True)
    ]
    rows = zip(workload.layers, forward, reversed(shown), inputs, strict=True)
    return tuple(LayerTimes(*row) for row in rows)
