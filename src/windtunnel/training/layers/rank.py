"""One rank of a training job: its share of a micro-batch, its number formats, and the groups that it talks in."""

from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

from windtunnel.errors import InputError
from windtunnel.model import operators as ops
from windtunnel.model.feed_forward.dense import DenseFeedForward
from windtunnel.model.precision import ACTIVATION_BITS, Format
from windtunnel.training.figures import FIGURES
from windtunnel.training.job import GEMM_FORMATS
from windtunnel.training.setup import TrainingSetup

BF16_BYTES, FP32_BYTES = 2.0, 4.0
WIRE_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0}
NF4_BYTES = (4 + 8 / 64 + 32 / (64 * 256)) / 8
"""A weight, its share of the 8-bit scale of 64, and of the 32-bit scale of 256 such (arXiv:2305.14314, section 3)."""
PACKED_BYTES = {"nf4": NF4_BYTES, "int8": 1.0}
"""Format of frozen weights that products unpack -> bytes of one; int8's scales of rows are thousandths of that."""


class Group(StrEnum):
    """The ranks that a collective joins."""

    TENSOR = "tp"
    CONTEXT = "cp"
    EXPERTS = "ep"
    EXPERTS_TENSOR = "experts_tp"
    DATA = "dp"
    """`dp x cp` ranks, or the shard group inside them."""
    REPLICAS = "replicas"
    """Shard groups of one job (HSDP)."""
    EXPERTS_DATA = "experts_dp"
    PIPELINE = "pp"
    EMBEDDING = "embedding"
    """First and last stage, where they share the embedding."""
    HOST = "host"
    """A device and its host: copies, and what the host's processors do."""


@dataclass(frozen=True)
class Rank:
    """One rank of a job, as the operators of its layers need to know it."""

    setup: TrainingSetup
    works: dict[object, Any] = field(default_factory=dict, compare=False, repr=False)
    """What its layers and ends do and hold, which many chunks share (`parts.layer_work`)."""

    @property
    def width(self) -> int:
        return self.setup.model.hidden_size

    @property
    def tp(self) -> int:
        return self.setup.degrees.tp

    @property
    def tokens(self) -> float:
        """Of one micro-batch on one rank, after context parallelism."""
        job = self.setup.job
        return job.micro_batch * job.sequence_tokens / self.setup.degrees.cp

    @property
    def documents(self) -> tuple[float, int]:
        """Documents of one micro-batch on one rank, after context parallelism, and the tokens of each."""
        job = self.setup.job
        length = min(job.document_tokens or job.sequence_tokens, job.sequence_tokens)
        return self.tokens / length, length

    @property
    def split(self) -> bool:
        """Whether norms and residuals are split along the sequence."""
        return bool(self.setup.job.parallelism.sequence_parallel) and self.tp > 1

    @property
    def rows(self) -> float:
        """Tokens of the parts that sequence parallelism splits."""
        return self.tokens / self.tp if self.split else self.tokens

    @property
    def format(self) -> Format:
        return GEMM_FORMATS[self.setup.job.precision.compute]

    @property
    def kept_input_bytes(self) -> float:
        """Bytes of one value of a linear layer's kept input; torchao keeps 16 bit, and casts them again for the
        weights' gradient (float8_linear.py, `save_for_backward`).
        """
        return BF16_BYTES if self.setup.job.framework == "fsdp2" else ACTIVATION_BITS[self.format] / 8

    @property
    def kept_norm_bytes(self) -> float:
        """Bytes that a norm keeps of each value: its input, and in eager PyTorch what an RMSNorm scales, in fp32.

        Models with plain feed-forward layers have LayerNorms, which are one kernel in eager PyTorch too.
        """
        return BF16_BYTES if self.setup.job.kernels.fused or self.has_plain_layers else BF16_BYTES + FP32_BYTES

    @property
    def has_plain_layers(self) -> bool:
        """Whether feed-forward layers have no gate: such models have LayerNorms and GeLUs."""
        return any(
            isinstance(group.feed_forward, DenseFeedForward) and not group.feed_forward.gated
            for group in self.setup.model.layers
        )

    def passes(self, kernel: str, phase: str = "forward") -> float:
        """Times that a value moves in an unfused chain of kernels against a fused one (`FIGURES.eager_passes`).

        A LayerNorm and a plain activation are one kernel in eager PyTorch too.
        """
        is_one = kernel in ("norm", "activation") and self.has_plain_layers
        return 1.0 if self.setup.job.kernels.fused or is_one else FIGURES.eager_passes[kernel][phase]

    @property
    def tensor_pieces(self) -> int:
        """Pieces in which tensor-parallel products and their collectives are cut."""
        return self.tp if self.setup.job.overlap.tensor_parallel else 1

    @property
    def sums_in_gemms(self) -> bool:
        """Whether GEMMs of weights' gradients add to the sums of earlier micro-batches themselves (Megatron-Core's
        `gradient_accumulation_fusion`).
        """
        job = self.setup.job
        is_fused = job.framework in ("megatron", "deepseek") and bool(job.overlap.tensor_gradient)
        return is_fused and job.sharding.zero != 3 and job.lora is None

    def spread(self, num_ranks: int, stride: int) -> int:
        """Nodes over which `num_ranks` ranks that lie `stride` apart are spread."""
        per_node = max(self.setup.node.num_devices // stride, 1)
        return -(-num_ranks // per_node)

    def collective(self, group: Group, op: str, message_bytes: float) -> ops.Collective:
        """A collective over one of the job's groups; ranks are numbered tp, cp, ep, dp, pp, the first fastest."""
        num_ranks, stride = self.layout(group)
        return ops.Collective(op, message_bytes, num_ranks, self.spread(num_ranks, stride))

    def layout(self, group: Group) -> tuple[int, int]:
        """Ranks of a group, and how far apart neighbours are."""
        return self._layouts[group]

    @cached_property
    def _layouts(self) -> dict[Group, tuple[int, int]]:
        known = self.setup.degrees
        experts = known.experts_tp * known.ep
        return {
            Group.TENSOR: (known.tp, 1),
            Group.CONTEXT: (known.cp, known.tp),
            Group.EXPERTS: (known.ep, known.experts_tp),
            Group.EXPERTS_TENSOR: (known.experts_tp, 1),
            Group.DATA: (known.shard_group, known.tp),
            Group.REPLICAS: (known.replicas, known.tp * known.shard_group),
            Group.EXPERTS_DATA: (known.experts_dp, experts),
            Group.PIPELINE: (2, known.num_devices // known.pp),
            Group.HOST: (1, 1),
            Group.EMBEDDING: (2, max(known.pp - 1, 1) * known.num_devices // known.pp),
        }


def group_ranks(rank: Rank, group: Group, number: int) -> tuple[int, ...]:
    """Return the ranks of the `group` that the global rank `number` belongs to, in the group's order.

    Ranks are numbered as Megatron-Core numbers them (`core/parallel_state.py`, order `tp-cp-ep-dp-pp`): in a pipeline
    stage tensor-parallel neighbours come first, then context-parallel ones, then data-parallel ones; experts see the
    same ranks as `experts_tp x ep x experts_dp`; stages follow each other. InputError where the job has no such rank.
    """
    known = rank.setup.degrees
    if not 0 <= number < known.num_devices:
        raise InputError(f"the job has ranks 0 to {known.num_devices - 1}; there is no rank {number}")
    per_stage = known.num_devices // known.pp
    stage, local = divmod(number, per_stage)
    if group is Group.PIPELINE:
        return tuple(range(local, known.num_devices, per_stage))
    if group is Group.EMBEDDING:
        return tuple(sorted({local, local + (known.pp - 1) * per_stage}))
    num_ranks, stride = rank.layout(group)
    first = stage * per_stage + local - (local // stride) % num_ranks * stride
    return tuple(range(first, first + num_ranks * stride, stride))


def stage_of_rank(rank: Rank, number: int) -> int:
    """Return the pipeline stage of a global rank."""
    known = rank.setup.degrees
    return number // (known.num_devices // known.pp)
