"""Kimi delta attention (arXiv:2510.26692) as in Kimi-Linear and Kimi-K3: a delta rule that forgets channel by channel.

Sources: vLLM 0.33 `models/kimi_k3/nvidia/kda.py`, `MambaStateShapeCalculator.kda_state_shape`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from windtunnel.model.attention.gated_delta import GatedDelta
from windtunnel.model.attention.mamba2 import CausalConvolution
from windtunnel.model.config_reader import ConfigReader
from windtunnel.model.operators import BF16_BYTES, FP32_BYTES, Launch, Op, Size
from windtunnel.model.quantization import Names
from windtunnel.model.shape import Recurrence, Shard
from windtunnel.schema import Schema


@dataclass(frozen=True)
class KimiDelta(GatedDelta):
    """The core of Kimi delta attention; in decode with the short convolution."""

    kind: ClassVar[str] = "kimi_delta"

    @property
    def num_bytes(self) -> Size:
        """As of Gated DeltaNet, and a rate of forgetting for each channel of a key."""
        rates = self.num_key_heads * self.key_head_dim * BF16_BYTES
        return super().num_bytes + self.batch * self.num_tokens * rates


class KimiDeltaAttention(Schema, Recurrence, tag="kimi_delta", tag_field="type"):
    """Kimi delta attention; keys and values have the same heads."""

    operators: ClassVar[tuple[type[Op], ...]] = (KimiDelta,)
    modules: ClassVar[tuple[Names, ...]] = (("self_attn.q_proj",), ("self_attn.o_proj",))
    text = "KDA"
    num_heads: int
    head_dim: int
    conv_kernel_size: int
    full_rates: bool = False
    """Whether the rates are one product (Ling 3), or two of rank `head_dim`."""
    full_gate: bool = False
    """Whether the output's gate is one matrix (Kimi-K3), or two of rank `head_dim` (Kimi-Linear)."""

    @classmethod
    def reads(cls, reader: ConfigReader, index: int) -> bool:
        described = reader.raw.get("linear_attn_config") or reader.raw.get("linear_num_heads")
        if described and reader.layer_type(index):
            return reader.layer_type(index) == "linear_attention"
        if _in_groups(reader):
            return (index + 1) % reader.count("layer_group_size") > 0
        return bool(described) and index + 1 in reader.inner("linear_attn_config").numbers("kda_layers")

    @classmethod
    def read(cls, reader: ConfigReader, index: int, layer_type: str) -> "KimiDeltaAttention":
        """Return the attention of a layer, from an object of its own or, in transformers 5, from keys of the model."""
        keys, linear = ("num_heads", "head_dim", "short_conv_kernel_size"), reader
        if reader.raw.get("linear_attn_config"):
            linear = reader.inner("linear_attn_config")
        elif reader.raw.get("linear_num_heads") is not None:
            keys = ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
        return cls(
            num_heads=linear.count(keys[0], "num_attention_heads"),
            head_dim=linear.count(keys[1]),
            conv_kernel_size=linear.count(keys[2]),
            full_rates=_in_groups(reader),
            full_gate=linear.flag("use_full_rank_gate", default=_in_groups(reader)),
        )

    @property
    def width(self) -> int:
        """Values of all heads."""
        return self.num_heads * self.head_dim

    @property
    def num_full(self) -> int:
        """Projections to all heads: queries, keys, values, and gates that are one matrix."""
        return 3 + self.full_gate + self.full_rates

    @property
    def num_low_rank(self) -> int:
        """Products of two matrices of rank `head_dim`: of the rates, and of a gate that is not one matrix."""
        return 2 - self.full_gate - self.full_rates

    def num_parameters(self, hidden_size: int) -> int:
        """Projections, low-rank products, short convolutions; biases of the rates, and a decay of each head."""
        down = self.num_full * self.width + self.num_low_rank * self.head_dim + self.num_heads
        up = self.num_low_rank * self.head_dim * self.width
        small = 3 * self.width * self.conv_kernel_size + self.width + self.num_heads
        return hidden_size * (down + self.width) + up + small

    def norm_parameters(self) -> int:
        return self.head_dim

    def repeated_parameters(self, hidden_size: int, tp: int) -> tuple[int, float]:
        """Every rank keeps the first matrices of low-rank products."""
        return hidden_size * self.num_low_rank * self.head_dim, tp

    def projections(self, shard: Shard, num_tokens: Size) -> Iterator[Launch]:
        hidden, values = shard.model.hidden_size, self.width // shard.tp
        down = self.num_full * values + self.num_low_rank * self.head_dim + self.num_heads // shard.tp
        yield shard.attention_gemm("qkv_gates_proj", num_tokens, down, hidden)
        if self.num_low_rank:
            up = shard.attention_gemm("gates_b_proj", num_tokens, values, self.head_dim)
            yield Launch(up.name, up.op, self.num_low_rank)
        yield shard.elementwise("gated_norm", num_tokens, 3 * values * BF16_BYTES)
        yield shard.attention_gemm("o_proj", num_tokens, hidden, values)

    def core_launches(self, shard: Shard, batch: Size, num_tokens: Size, phase: str) -> Iterator[Launch]:
        heads, width, kernel_size = self.num_heads // shard.tp, self.head_dim, self.conv_kernel_size
        if phase == "prefill":
            convolution = CausalConvolution(batch, num_tokens, 3 * self.width // shard.tp, kernel_size)
            yield Launch("kimi_convolution_prefill", convolution)
        core = KimiDelta(batch, num_tokens, heads, heads, width, width, kernel_size, phase == "decode")
        yield Launch(f"kimi_delta_{phase}", core)

    def state_bytes(self, shard: Shard) -> float:
        """The recurrent state in fp32, and the inputs that the convolutions look back on."""
        convolution = 3 * (self.conv_kernel_size - 1) * BF16_BYTES
        return self.width * (self.head_dim * FP32_BYTES + convolution) / shard.tp


def _in_groups(reader: ConfigReader) -> bool:
    """Whether layers come in groups of which the last one attends to everything (`modular_bailing_hybrid.py`)."""
    return "kda_lower_bound" in reader.raw


KIND = KimiDeltaAttention
