"""An iteration of a training job as a list of layers: what each computes and sends, and how long it takes."""

from dataclasses import dataclass
from enum import StrEnum

from windtunnel.errors import InputError


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
