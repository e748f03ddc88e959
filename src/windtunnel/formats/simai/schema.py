"""A SimAI workload in memory: a header and blocks of layers. Equal blocks are kept once, with their number."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

TRANSFORMER = "HYBRID_TRANSFORMER_FWD_IN_BCKWD"
"""The policy of AICB's files: the backward pass repeats the forward layers in reverse."""
MICRO = "MICRO"
POLICIES = (
    *(TRANSFORMER, MICRO, "HYBRID_TRANSFORMER", "DATA", "MODEL", "HYBRID_DATA_MODEL", "HYBRID_MODEL_DATA"),
    *("HYBRID_DLRM", "HYBRID_DLRM_ENHANCED", "HYBRID_CUSTOMIZED", "DISTRIBUTED_INFERENCE"),
)
OPERATIONS = {
    "ALLREDUCE": "all_reduce",
    "ALLGATHER": "all_gather",
    "REDUCESCATTER": "reduce_scatter",
    "ALLTOALL": "all_to_all",
    "BROADCAST": "broadcast",
}
"""Word in the file -> operation. SimAI itself ignores BROADCAST, which only files of 2024 hold."""
GROUPS = {"_DP_EP": "dp_ep", "_EP": "ep"}
"""Suffix -> group: the same experts' data parallel ranks, and the ranks that share out the experts."""


class FilePhase(NamedTuple):
    """One phase of a layer: computation, then communication."""

    compute_ns: int = 0
    collective: str = "NONE"
    """The file's word: NONE, ALLREDUCE, ALLGATHER_DP_EP, ...; see `meaning`."""
    size_bytes: int = 0


class WorkloadLayer(NamedTuple):
    """One line."""

    name: str
    forward: FilePhase = FilePhase()
    input_gradient: FilePhase = FilePhase()
    weight_gradient: FilePhase = FilePhase()
    update_ns: int = 100
    """Time of the update, which SimAI adds to the end of every collective."""


class Block(NamedTuple):
    """Lines that are repeated `repeats` times."""

    layers: tuple[WorkloadLayer, ...]
    repeats: int = 1


@dataclass(frozen=True)
class Header:
    """The first line; None for missing settings, as in files of 2024."""

    tp: int | None = None
    ep: int | None = None
    pp: int | None = None
    vpp: int | None = None
    """Chunks of layers on each stage. AICB writes its layers per stage here."""
    num_microbatches: int | None = None
    num_devices: int | None = None
    pp_comm_bytes: int | float | None = None
    """Bytes between two stages for each micro-batch and direction."""
    inference: bool = False


HEADER_KEYS = {
    "model_parallel_NPU_group": "tp",
    "ep": "ep",
    "expert_parallel_npu_group": "ep",
    "pp": "pp",
    "vpp": "vpp",
    "ga": "num_microbatches",
    "all_gpus": "num_devices",
    "pp_comm": "pp_comm_bytes",
    "mode": "inference",
    "checkpoints": "",
    "checkpoint_initiates": "",
}
"""Key in the file -> field. Checkpoints are lists of layers that no file of AICB fills."""


@dataclass(frozen=True)
class SimaiWorkload:
    """A whole file."""

    header: Header
    blocks: tuple[Block, ...]
    policy: str = TRANSFORMER

    @property
    def num_layers(self) -> int:
        """Number of lines, repeats counted."""
        return sum(len(block.layers) * block.repeats for block in self.blocks)

    def layers(self) -> Iterator[WorkloadLayer]:
        """Yield every line in order, repeats written out."""
        for block in self.blocks:
            for _ in range(block.repeats):
                yield from block.layers


def meaning(collective: str, is_weight_gradient: bool) -> tuple[str, str] | None:
    """Return (operation, group) of a file's word, or None for NONE.

    Operations are `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all` and `broadcast`; groups `tp`, `dp`, `ep`
    and `dp_ep`. Without a suffix the group is data-parallel for gradients of weights, else tensor-parallel.

    Raises:
        KeyError: an unknown word.
    """
    if collective == "NONE":
        return None
    for suffix, group in GROUPS.items():
        if collective.endswith(suffix):
            return OPERATIONS[collective.removesuffix(suffix)], group
    return OPERATIONS[collective], "dp" if is_weight_gradient else "tp"
