"""The times of a training iteration, layer by layer."""

from dataclasses import dataclass

from windtunnel.training.iteration.layers import IterationLayer, LayerWorkload, RankGroup


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
    def compute_ns(self) -> int:
        return self.forward.compute_ns + self.weight_gradient.compute_ns + self.input_gradient.compute_ns


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
        for phase, times in (
            (row.layer.forward, row.forward),
            (row.layer.weight_gradient, row.weight_gradient),
            (row.layer.input_gradient, row.input_gradient),
        ):
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
