"""LoRA adapters: the products that they add to projections, and the bytes of their weights.

An adapter adds B A x to a projection W x, with `rank` rows of A (Hu et al., arXiv:2106.09685). The tokens of a step are
sorted by adapter, and two kernels compute all adapters of a projection together: one shrinks hidden states to the rank,
one expands them (SGMV: Chen et al., Punica, arXiv:2310.18547, section 4; S-LoRA, arXiv:2311.03285; vLLM 0.8 to 0.33
`lora/ops/triton_ops/lora_shrink_op.py` and `lora_expand_op.py`). Nobody has published tables of them for these devices:
they are priced by a plain roofline.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from windtunnel.errors import InputError
from windtunnel.model.launches.forward import token_launches
from windtunnel.model.operators import BF16_BYTES, FP32_BYTES, Gemm, Launch, Op, Size
from windtunnel.model.shape import Shard

COLUMN_PARALLEL = {"qkv_proj": 3, "gate_up_proj": 2, "up_proj": 1}
"""Projections split by their outputs over tensor-parallel ranks, with the matrices that each packs together."""
ROW_PARALLEL = {"o_proj": 1, "down_proj": 1}
"""Projections split by their inputs."""
TARGETS = (*COLUMN_PARALLEL, *ROW_PARALLEL)


@dataclass(frozen=True)
class LoraProduct(Op):
    """`tokens` rows times the matrix A (`shrink`) or B (`expand`) of the adapter of each, of `adapters` different ones.

    `shrink` writes fp32 sums, which `expand` reads and adds to the projection's bf16 output.
    """

    kind: ClassVar[str] = "lora"
    axes: ClassVar[tuple[str, ...]] = ("tokens", "adapters")
    shown: ClassVar[str] = "{tokens} x {num_outputs} x {num_inputs}, {adapters} adapters"
    op: str
    tokens: Size
    adapters: Size
    num_inputs: int
    num_outputs: int
    packed: int = 1
    """Matrices of a packed projection: `num_inputs` of `expand` are of one of them, `num_outputs` of all."""

    @property
    def flops(self) -> Size:
        return 2.0 * self.tokens * self.num_inputs * self.num_outputs

    @property
    def num_bytes(self) -> Size:
        weights = self.adapters * self.num_inputs * self.num_outputs * BF16_BYTES
        if self.op == "shrink":
            return weights + self.tokens * (self.num_inputs * BF16_BYTES + self.num_outputs * FP32_BYTES)
        read = self.packed * self.num_inputs * FP32_BYTES
        return weights + self.tokens * (read + 2 * self.num_outputs * BF16_BYTES)

    @property
    def num_kernels(self) -> int:
        """Kernels: `shrink` adds up parts of its sums, so that another kernel clears the buffer first."""
        return 2 if self.op == "shrink" else 1


@dataclass(frozen=True)
class LoraSite:
    """A projection with adapters, on one tensor-parallel rank: how often a step runs it, and its sizes."""

    name: str
    count: float
    num_inputs: int
    num_outputs: int
    packed: int
    shrunk: int
    """Rows of A on the rank, of all packed matrices."""
    expanded: int
    """Outputs of B on the rank."""


def lora_sites(shard: Shard) -> list[LoraSite]:
    """Return the projections that have adapters.

    Every rank keeps A of a projection split by outputs and B of one split by inputs, unless they are fully sharded.
    InputError where the model has none of the projections.
    """
    lora, tp = shard.lora, shard.tp
    assert lora is not None
    sites = []
    for launch in token_launches(shard, 1.0):
        if launch.name not in (lora.target_modules or TARGETS) or not isinstance(launch.op, Gemm):
            continue
        op, is_column = launch.op, launch.name in COLUMN_PARALLEL
        packed = COLUMN_PARALLEL.get(launch.name, 1)
        share = tp if lora.fully_sharded else 1
        shrunk = packed * (-(-lora.rank // share) if is_column else lora.rank)
        expanded = op.n if is_column else -(-op.n // share)
        sites.append(LoraSite(launch.name, launch.count, op.k, op.n, packed, shrunk, expanded))
    if missing := set(lora.target_modules or ()) - {site.name for site in sites}:
        raise InputError(
            f"{shard.model.name} has no projection {', '.join(sorted(missing))} for LoRA adapters",
            f"engine.lora.target_modules takes {', '.join(TARGETS)}, as far as the model has them",
        )
    if not sites:
        raise InputError(
            f"{shard.model.name} has none of the projections that adapters change: {', '.join(TARGETS)}",
            "leave workload.adapters and engine.lora out",
        )
    return sites


def lora_bytes(shard: Shard) -> float:
    """Return the bytes of one adapter on one device, of the fullest pipeline stage."""
    assert shard.lora is not None
    values = sum(
        site.count * (site.shrunk * site.num_inputs + shard.lora.rank * site.expanded) for site in lora_sites(shard)
    )
    return values * BF16_BYTES * shard.stage_fraction


def lora_launches(shard: Shard, num_tokens: Size, num_adapters: Size) -> Iterator[Launch]:
    """Yield what `num_adapters` adapters add to a step in which requests with adapters compute `num_tokens` tokens."""
    lora = shard.lora
    assert lora is not None
    adapters = np.minimum(num_adapters, num_tokens)
    for site in lora_sites(shard):
        is_column = site.name in COLUMN_PARALLEL
        yield Launch(
            f"{site.name}_lora_shrink",
            LoraProduct("shrink", num_tokens, adapters, site.num_inputs, site.shrunk),
            site.count,
        )
        if lora.fully_sharded and shard.tp > 1:
            message = num_tokens * site.packed * lora.rank * FP32_BYTES
            collective = shard.collective("all_gather" if is_column else "all_reduce", message, shard.tp)
            yield Launch(f"{site.name}_lora_{collective.op}", collective, site.count)
        expand = LoraProduct("expand", num_tokens, adapters, lora.rank, site.expanded, site.packed)
        yield Launch(f"{site.name}_lora_expand", expand, site.count)
