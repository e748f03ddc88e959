"""Gated DeltaNet (arXiv:2412.06464) as in Qwen3-Next and Qwen3.5: linear attention with a fixed state per request.

Sources: `transformers/models/qwen3_next`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from windtunnel.model.config_reader import ConfigReader
from windtunnel.model.operators import BF16_BYTES, FP32_BYTES, Gemm, Launch, Op, PrefillBatch, Size
from windtunnel.model.precision import Format
from windtunnel.model.quantization import Names
from windtunnel.model.shape import Recurrence, Shard
from windtunnel.schema import Schema, fields_of


@dataclass(frozen=True)
class GatedDelta(PrefillBatch):
    """The core of Gated DeltaNet (short convolution and delta rule); in decode `num_tokens` is 1.

    A request's state, `num_value_heads x key_head_dim x value_head_dim` in fp32, is read and written.
    """

    kind: ClassVar[str] = "gated_delta"
    shares_batch: ClassVar[str | None] = "num_value_heads"
    shown: ClassVar[str] = "{batch_text}, {num_value_heads} x {key_head_dim} x {value_head_dim}"
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel_size: int
    decode: bool = False

    @property
    def state_bytes(self) -> float:
        return self.num_value_heads * self.key_head_dim * self.value_head_dim * FP32_BYTES

    @property
    def flops(self) -> Size:
        per_token = 6.0 * self.num_value_heads * self.key_head_dim * self.value_head_dim
        return self.batch * self.num_tokens * per_token

    @property
    def num_bytes(self) -> Size:
        width = 2 * self.num_key_heads * self.key_head_dim + 2 * self.num_value_heads * self.value_head_dim
        return self.batch * (2 * self.state_bytes + self.num_tokens * 2 * width * BF16_BYTES)

    @property
    def num_kernels(self) -> int:
        """The convolution, two norms, gating, and the six of `chunk_gated_delta_rule_fwd` (flash-linear-attention 0.3,
        which vLLM and SGLang carry)."""
        return 10


class GatedDeltaAttention(Schema, Recurrence, tag="gated_delta", tag_field="type"):
    """Gated DeltaNet linear attention (arXiv:2412.06464) as in Qwen3-Next and Qwen3.5: a fixed state per request."""

    operators: ClassVar[tuple[type[Op], ...]] = (GatedDelta,)
    layer_types: ClassVar[tuple[str, ...]] = ("linear_attention",)
    text = "DeltaNet"
    divided_by_tp = "key heads"
    modules: ClassVar[tuple[Names, ...]] = (
        ("linear_attn.in_proj_qkvz", "linear_attn.in_proj_qkv"),
        ("linear_attn.out_proj",),
    )
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel_size: int

    @classmethod
    def read(cls, reader: ConfigReader, index: int, layer_type: str) -> "GatedDeltaAttention":
        num_key_heads = reader.count("linear_num_key_heads")
        num_value_heads = reader.count("linear_num_value_heads")
        reader.check_multiple("linear_num_value_heads", num_value_heads, "linear_num_key_heads", num_key_heads)
        return cls(
            num_key_heads=num_key_heads,
            num_value_heads=num_value_heads,
            key_head_dim=reader.count("linear_key_head_dim"),
            value_head_dim=reader.count("linear_value_head_dim"),
            conv_kernel_size=reader.count("linear_conv_kernel_dim"),
        )

    @property
    def widest_tp(self) -> int:
        return self.num_key_heads

    @property
    def key_size(self) -> int:
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        return self.num_value_heads * self.value_head_dim

    def num_parameters(self, hidden_size: int) -> int:
        """Projections, the short convolution and decay rates."""
        projected = 2 * self.key_size + 2 * self.value_size + 2 * self.num_value_heads
        projections = hidden_size * projected + self.value_size * hidden_size
        convolution = (2 * self.key_size + self.value_size) * self.conv_kernel_size
        return projections + convolution + 2 * self.num_value_heads

    def norm_parameters(self) -> int:
        return self.value_head_dim

    def projections(self, shard: Shard, num_tokens: Size) -> Iterator[Launch]:
        width = shard.model.hidden_size
        keys = self.key_size // shard.tp
        heads = self.num_value_heads // shard.tp
        values = heads * self.value_head_dim
        yield shard.attention_gemm("qkvz_proj", num_tokens, 2 * keys + 2 * values, width)
        yield Launch("ba_proj", Gemm(num_tokens, 2 * heads, width, Format.BF16))
        yield shard.elementwise("gated_norm", num_tokens, 3 * values * BF16_BYTES)
        yield shard.attention_gemm("o_proj", num_tokens, width, values)

    def core_launches(self, shard: Shard, batch: Size, num_tokens: Size, phase: str) -> Iterator[Launch]:
        yield Launch(f"gated_delta_{phase}", self.core(shard.tp, batch, num_tokens, phase == "decode"))

    def core(self, tp: int, batch: Size, num_tokens: Size, decode: bool = False) -> GatedDelta:
        """Return the core on one of `tp` ranks."""
        return GatedDelta(
            batch=batch,
            num_tokens=num_tokens,
            num_key_heads=max(self.num_key_heads // tp, 1),
            num_value_heads=max(self.num_value_heads // tp, 1),
            **fields_of(self, "key_head_dim", "value_head_dim", "conv_kernel_size"),
            decode=decode,
        )

    def state_bytes(self, shard: Shard) -> float:
        """The recurrent state in fp32, and the inputs that the convolution looks back on."""
        state = self.num_value_heads * self.key_head_dim * self.value_head_dim * FP32_BYTES
        convolution = (2 * self.key_size + self.value_size) * (self.conv_kernel_size - 1) * BF16_BYTES
        return (state + convolution) / shard.tp


KIND = GatedDeltaAttention
