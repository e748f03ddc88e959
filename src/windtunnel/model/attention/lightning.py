"""Lightning attention (arXiv:2401.04658, arXiv:2501.08313) as in MiniMax-Text-01 and M1: linear attention whose state
decays at a fixed rate for each head.

A layer projects its input to queries, keys and values, which SiLU activates in fp32; after the recurrence a norm over
all heads and a gate follow (`modeling_minimax.py`; vLLM 0.12 `minimax_text_01.py`, `MiniMaxText01LinearAttention`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from windtunnel.model.config_reader import ConfigReader
from windtunnel.model.operators import BF16_BYTES, FP32_BYTES, Launch, Op, PrefillBatch, Size
from windtunnel.model.quantization import Names
from windtunnel.model.shape import Recurrence, Shard
from windtunnel.schema import Schema

BLOCK_TOKENS = 256
"""Tokens that prefill computes as one block (vLLM 0.33 `lightning_attn.py`)."""


@dataclass(frozen=True)
class LightningCore(PrefillBatch):
    """The recurrence S = exp(-rate) S + k v^T, o = q S of each head, in fp32; in decode `num_tokens` is 1."""

    kind: ClassVar[str] = "lightning_attention"
    shares_batch: ClassVar[str | None] = "num_heads"
    shown: ClassVar[str] = "{batch_text}, {num_heads} x {head_dim} x {head_dim}"
    num_heads: int
    head_dim: int
    decode: bool = False

    @property
    def flops(self) -> Size:
        """Of a token alone, the decay, the outer product and the product with q. In a block of Q tokens each meets the
        Q / 2 before it as attention does, and the state before and after the block."""
        state = self.num_heads * self.head_dim**2
        per_token = 5.0 * state if self.decode else 2.0 * BLOCK_TOKENS * self.num_heads * self.head_dim + 4.0 * state
        return self.batch * self.num_tokens * per_token

    @property
    def num_bytes(self) -> Size:
        """q, k, v and the output; every request's state, read and written; in prefill the states of blocks, which one
        kernel writes, another adds up and a third reads."""
        inner = self.num_heads * self.head_dim
        per_token = (4 * inner + (0 if self.decode else 4 * inner * self.head_dim / BLOCK_TOKENS)) * FP32_BYTES
        return self.batch * (2 * inner * self.head_dim * BF16_BYTES + self.num_tokens * per_token)

    @property
    def num_kernels(self) -> int:
        """In prefill the diagonal blocks, states of blocks, their sums, and the other blocks."""
        return 1 if self.decode else 4


class LightningAttention(Schema, Recurrence, tag="lightning", tag_field="type"):
    """Lightning attention: `num_heads` heads, each with a state of `head_dim` x `head_dim`."""

    operators: ClassVar[tuple[type[Op], ...]] = (LightningCore,)
    modules: ClassVar[tuple[Names, ...]] = (("self_attn.qkv_proj",), ("self_attn.out_proj",))
    text = "lightning"
    num_heads: int
    head_dim: int

    @classmethod
    def reads(cls, reader: ConfigReader, index: int) -> bool:
        """Whether `attn_type_list` has a 0 for the layer, or transformers 5 names it linear."""
        types = reader.numbers("attn_type_list") if reader.architecture.lightning else []
        if types:
            return not reader.per_layer("attn_type_list", types)[index]
        return reader.architecture.lightning and reader.layer_type(index) == "linear_attention"

    @classmethod
    def read(cls, reader: ConfigReader, index: int, layer_type: str) -> "LightningAttention":
        """Return the linear attention of a layer, whose heads are the query heads of the others."""
        num_heads, hidden_size = reader.count("num_attention_heads"), reader.count("hidden_size")
        head_dim = reader.count("head_dim", default=hidden_size // num_heads)
        return cls(num_heads=num_heads, head_dim=head_dim)

    @property
    def width(self) -> int:
        """Values of all heads."""
        return self.num_heads * self.head_dim

    def num_parameters(self, hidden_size: int) -> int:
        """Queries, keys, values, the gate and the output."""
        return 5 * hidden_size * self.width

    def norm_parameters(self) -> int:
        return self.width

    def projections(self, shard: Shard, num_tokens: Size) -> Iterator[Launch]:
        hidden, values = shard.model.hidden_size, self.width // shard.tp
        yield shard.attention_gemm("qkv_proj", num_tokens, 3 * values, hidden)
        yield shard.elementwise("qkv_activation", num_tokens, 3 * values * (BF16_BYTES + FP32_BYTES))
        if shard.tp > 1:
            # Ranks add up the squares of their heads (`MiniMaxText01RMSNormTP`).
            yield Launch("norm_all_reduce", shard.collective("all_reduce", num_tokens * FP32_BYTES, shard.tp))
        yield shard.attention_gemm("attention_gate_proj", num_tokens, values, hidden)
        yield shard.elementwise("gated_norm", num_tokens, values * (FP32_BYTES + 2 * BF16_BYTES))
        yield shard.attention_gemm("o_proj", num_tokens, hidden, values)

    def core_launches(self, shard: Shard, batch: Size, num_tokens: Size, phase: str) -> Iterator[Launch]:
        core = LightningCore(batch, num_tokens, self.num_heads // shard.tp, self.head_dim, phase == "decode")
        yield Launch(f"lightning_attention_{phase}", core)

    def state_bytes(self, shard: Shard) -> float:
        """The state, in the format of activations (vLLM 0.33 `mamba_utils.py`, `linear_attention_state_dtype`)."""
        return self.width * self.head_dim * BF16_BYTES / shard.tp


KIND = LightningAttention
