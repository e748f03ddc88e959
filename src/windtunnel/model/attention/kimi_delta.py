"""Kimi delta attention (arXiv:2510.26692) as in Kimi-Linear and Kimi-K3: a delta rule that forgets channel by channel.

Sources: vLLM 0.33 `models/kimi_k3/nvidia/kda.py`, `MambaStateShapeCalculator.kda_state_shape`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from windtunnel.model.attention.gated_delta import GatedDelta, delta_rule_table
from windtunnel.model.attention.mamba2 import CausalConvolution
from windtunnel.model.config_reader import ConfigReader
from windtunnel.model.operators import (
    BF16_BYTES,
    FP32_BYTES,
    Elementwise,
    Launch,
    MeasuredTable,
    Op,
    Size,
    without_context,
)
from windtunnel.model.quantization import Names
from windtunnel.model.shape import Attention, Shard
from windtunnel.schema import Schema

_MEASURED = delta_rule_table(
    "kda",
    "kda_perf",
    (
        ("flashkda_fwd",),
        ("chunk_kda",),
        ("chunk_kda_with_fused_gate",),
        ("fused_kda_decode",),
        ("kda_fused_decode",),
        ("causal_conv1d_update", "fused_recurrent_kda_packed_decode"),
    ),
)
"""The convolution of prefill is left out: a build of vLLM waits for the host (0.42 ms for one token on B200, where
0.27.0 takes 2.8 us on GB300)."""


@dataclass(frozen=True)
class KimiDelta(GatedDelta):
    """The core of Kimi delta attention; in decode with the short convolution."""

    kind: ClassVar[str] = "kimi_delta"

    @property
    def measured(self) -> MeasuredTable:
        return _MEASURED

    @property
    def num_bytes(self) -> Size:
        """As of Gated DeltaNet, and a rate of forgetting for each channel of a key."""
        rates = self.num_key_heads * self.key_head_dim * BF16_BYTES
        return super().num_bytes + self.batch * self.num_tokens * rates


class KimiDeltaAttention(Schema, Attention, tag="kimi_delta", tag_field="type"):
    """Kimi delta attention; keys and values have the same heads."""

    is_recurrent: ClassVar[bool] = True
    operators: ClassVar[tuple[type[Op], ...]] = (KimiDelta,)
    modules: ClassVar[tuple[Names, ...]] = (("self_attn.q_proj",), ("self_attn.o_proj",))
    num_heads: int
    head_dim: int
    conv_kernel_size: int
    full_gate: bool = False
    """Whether the output's gate is one matrix (Kimi-K3), or two of rank `head_dim` (Kimi-Linear)."""

    @classmethod
    def reads(cls, reader: ConfigReader, index: int) -> bool:
        if not reader.raw.get("linear_attn_config"):
            return False
        return index + 1 in reader.inner("linear_attn_config").numbers("kda_layers")

    @classmethod
    def read(cls, reader: ConfigReader, index: int, layer_type: str) -> "KimiDeltaAttention":
        """Return the attention of a layer."""
        linear = reader.inner("linear_attn_config")
        return cls(
            num_heads=linear.count("num_heads"),
            head_dim=linear.count("head_dim"),
            conv_kernel_size=linear.count("short_conv_kernel_size"),
            full_gate=linear.flag("use_full_rank_gate"),
        )

    @property
    def widest_tp(self) -> int:
        return self.num_heads

    @property
    def text(self) -> str:
        return "KDA"

    @property
    def width(self) -> int:
        """Values of all heads."""
        return self.num_heads * self.head_dim

    @property
    def _num_low_rank(self) -> int:
        """Products of two matrices of rank `head_dim`: of the rates, and of a gate that is not one matrix."""
        return 1 if self.full_gate else 2

    def num_parameters(self, hidden_size: int) -> int:
        """Projections, low-rank products, short convolutions; biases of the rates, and a decay of each head."""
        down = (4 if self.full_gate else 3) * self.width + self._num_low_rank * self.head_dim + self.num_heads
        up = self._num_low_rank * self.head_dim * self.width
        small = 3 * self.width * self.conv_kernel_size + self.width + self.num_heads
        return hidden_size * (down + self.width) + up + small

    def norm_parameters(self) -> int:
        return self.head_dim

    def repeated_parameters(self, hidden_size: int, tp: int) -> tuple[int, float]:
        """Every rank keeps the first matrices of low-rank products."""
        return hidden_size * self._num_low_rank * self.head_dim, tp

    def projections(self, shard: Shard, num_tokens: Size) -> Iterator[Launch]:
        hidden, values = shard.model.hidden_size, self.width // shard.tp
        gate, rank = values if self.full_gate else 0, self._num_low_rank * self.head_dim
        down = 3 * values + gate + rank + self.num_heads // shard.tp
        yield shard.attention_gemm("qkv_gates_proj", num_tokens, down, hidden)
        up = shard.attention_gemm("gates_b_proj", num_tokens, values, self.head_dim)
        yield Launch(up.name, up.op, self._num_low_rank)
        yield Launch("gated_norm", Elementwise("gated_norm", num_tokens, 3 * values * BF16_BYTES))
        yield shard.attention_gemm("o_proj", num_tokens, hidden, values)

    def decode_launches(self, shard: Shard, batch: Size, context_tokens: Size) -> Iterator[Launch]:
        # One token for each request, at every context.
        yield Launch("kimi_delta_decode", self._core(shard.tp, batch, 1.0 + 0.0 * context_tokens, decode=True))

    def prefill_launches(self, shard: Shard, batch: Size, num_tokens: Size) -> Iterator[Launch]:
        chunks = without_context(batch, num_tokens)
        convolution = CausalConvolution(*chunks, 3 * self.width // shard.tp, self.conv_kernel_size)
        yield Launch("kimi_convolution_prefill", convolution)
        yield Launch("kimi_delta_prefill", self._core(shard.tp, *chunks))

    def _core(self, tp: int, batch: Size, num_tokens: Size, decode: bool = False) -> KimiDelta:
        heads = self.num_heads // tp
        return KimiDelta(
            batch, num_tokens, heads, heads, self.head_dim, self.head_dim, self.conv_kernel_size, decode=decode
        )

    def state_bytes(self, shard: Shard) -> float:
        """The recurrent state in fp32, and the inputs that the convolutions look back on."""
        convolution = 3 * (self.conv_kernel_size - 1) * BF16_BYTES
        return self.width * (self.head_dim * FP32_BYTES + convolution) / shard.tp


KIND = KimiDeltaAttention
