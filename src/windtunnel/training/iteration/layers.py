"""An iteration of a training job as a list of layers: what each computes and sends, forward and backward."""

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
