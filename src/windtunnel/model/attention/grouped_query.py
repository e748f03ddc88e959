"""Softmax attention with key/value heads that query heads share, over everything or a sliding window."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from windtunnel.model.config_reader import ConfigReader
from windtunnel.model.operators import BF16_BYTES, Batch, DecodeBatch, Launch, Op, PrefillBatch, Size
from windtunnel.model.precision import BITS, Format
from windtunnel.model.quantization import Names
from windtunnel.model.shape import Attention, Shard
from windtunnel.schema import Schema

SQUARES_BYTES = 8.0
"""Bytes of one token's sums of squares on a rank, of the query and of the key, in fp32."""


_KEYS = {
    "num_attention_heads": ("num_attention_heads", "swa_num_attention_heads"),
    "num_kv_heads": ("num_global_key_value_heads", "swa_num_key_value_heads"),
    "head_dim": ("global_head_dim", "swa_head_dim"),
    "value_head_dim": ("v_head_dim", "swa_v_head_dim"),
    "sinks": ("add_full_attention_sink_bias", "add_swa_attention_sink_bias"),
}
"""Keys of what layers that attend to everything (Gemma 4), and to a window (MiMo-V2), have of their own."""


@dataclass(frozen=True)
class GroupedQueryHeads(Batch):
    """Heads of softmax attention, of which `num_heads / num_kv_heads` share a key and a value."""

    shown: ClassVar[str] = "{batch_text}, {num_heads}/{num_kv_heads} x {head_dim} {kv_format}{window_text}"
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window_tokens: int = 0
    """Sliding window; 0: none."""
    kv_format: Format = Format.BF16

    @property
    def window_text(self) -> str:
        return f", window {self.window_tokens}" if self.window_tokens else ""

    @property
    def num_pairs(self) -> Size:
        """Query-key pairs."""
        return self.pairs_within(self.window_tokens)

    @property
    def flops(self) -> Size:
        return 4.0 * self.num_pairs * self.num_heads * self.head_dim


@dataclass(frozen=True)
class PrefillAttention(GroupedQueryHeads, PrefillBatch):
    """Causal attention in prefill."""

    kind: ClassVar[str] = "prefill_attention"
    shares_batch: ClassVar[str | None] = "num_heads"

    @property
    def num_bytes(self) -> Size:
        query_and_output = 2 * self.num_heads * self.head_dim * BF16_BYTES
        key_and_value = 2 * self.num_kv_heads * self.head_dim * BITS[self.kv_format] / 8
        return self.batch * self.num_tokens * query_and_output + self.context_tokens * key_and_value


@dataclass(frozen=True)
class EncoderAttention(Batch):
    """Attention in an encoder: `batch` sequences of `num_tokens` that all see one another."""

    kind: ClassVar[str] = "encoder_attention"
    axes: ClassVar[tuple[str, ...]] = ("batch", "num_tokens")
    shares_batch: ClassVar[str | None] = "num_heads"
    shown: ClassVar[str] = "{batch_text}, {num_heads} x {head_dim}"
    num_tokens: Size
    num_heads: int
    head_dim: int

    @property
    def num_queries(self) -> Size:
        return self.batch * self.num_tokens

    def pairs_within(self, window_tokens: int) -> Size:
        seen = np.minimum(self.num_tokens, window_tokens) if window_tokens else self.num_tokens
        return self.num_queries * seen

    @property
    def flops(self) -> Size:
        return 4.0 * self.pairs_within(0) * self.num_heads * self.head_dim

    @property
    def num_bytes(self) -> Size:
        return 4 * self.num_queries * self.num_heads * self.head_dim * BF16_BYTES

    @property
    def as_prompts(self) -> PrefillAttention:
        """Causal prompts with as many pairs: two for each sequence."""
        fields = {"num_tokens": self.num_tokens, "num_heads": self.num_heads, "head_dim": self.head_dim}
        return PrefillAttention(batch=2.0 * self.batch, num_kv_heads=self.num_heads, **fields)  # type: ignore[arg-type]


@dataclass(frozen=True)
class DecodeAttention(GroupedQueryHeads, DecodeBatch):
    """Attention in decode."""

    kind: ClassVar[str] = "decode_attention"
    shares_batch: ClassVar[str | None] = "num_kv_heads"

    @property
    def seen_tokens(self) -> Size:
        return np.minimum(self.context_tokens, self.window_tokens) if self.window_tokens else self.context_tokens

    @property
    def num_bytes(self) -> Size:
        cached = 2 * self.seen_tokens * self.num_kv_heads * self.head_dim * BITS[self.kv_format] / 8
        return self.batch * (cached + 2 * self.num_heads * self.head_dim * BF16_BYTES)


class SharedHeads(Schema, Attention):
    """What kinds of softmax attention with `num_kv_heads` shared key/value heads have in common."""

    modules: ClassVar[tuple[Names, ...]] = (("self_attn.q_proj", "self_attn.qkv_proj"), ("self_attn.o_proj",))
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window_tokens: int | None = None
    """Sliding window; None attends to everything."""
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    qk_norm_over_heads: bool = False
    """The norm is over all heads together, so that tensor-parallel ranks add up its squares (MiniMax-M2)."""
    output_gate: bool = False
    """A gate as wide as the query is computed beside it (Qwen3.5)."""
    head_gate: bool = False
    """A gate of one value for each head is computed beside the query (Step-3.5)."""
    sinks: bool = False
    """One learned sink logit per head (gpt-oss)."""
    rotary: bool = True
    """Queries and keys are rotated by their position (Nemotron-H's are not)."""
    value_head_dim: int | None = None
    """Width of a value; None: that of a key (MiMo-V2's are narrower)."""
    values_are_keys: bool = False
    """Values have no weights of their own; engines load the keys' twice (Gemma 4; vLLM 0.33 `gemma4.py`)."""
    shares_kv: bool = False
    """Keys and values are those that an earlier layer cached (Gemma 3n, Hunyuan-Large): it has no weights for them."""
    is_chunked: bool = False
    """The window is a chunk, to whose beginning a token looks back (Llama 4); served, it counts as a sliding window."""

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def gate_size(self) -> int:
        return self.query_size if self.output_gate else self.num_heads * self.head_gate

    @classmethod
    def read(cls, reader: ConfigReader, index: int, layer_type: str, **others: Any) -> Self:
        """Return the attention of a layer; `others` are further fields of a kind."""
        if reader.raw.get("attention_other_setting"):
            # Heads of one type of layers (Step-3.5).
            other = reader.inner("attention_other_setting")
            keys = ("num_attention_heads", "num_key_value_heads", "head_dim")
            if other.raw.get("attention_type", "sliding_attention") == layer_type:
                heads = {key: other.count(key) for key in keys if other.first(key)[1] is not None}
                reader = reader.of({**reader.raw, **heads})
        architecture, is_window = reader.architecture, layer_type == "sliding_attention"
        own = {name: keys[is_window] for name, keys in _KEYS.items()}
        num_heads = reader.count(own["num_attention_heads"], "num_attention_heads")
        # Falcon's newer blocks group queries although they say multi_query.
        shares_one = reader.flag("multi_query") and not reader.flag("new_decoder_architecture")
        shares_one |= reader.raw.get("attn_type") == "multiquery_attention"
        default = None if reader.raw.get("attn_type") == "grouped_query_attention" else num_heads
        num_kv_heads = 1 if shares_one else reader.count(own["num_kv_heads"], "num_key_value_heads", default=default)
        reader.check_multiple("num_attention_heads", num_heads, "num_key_value_heads", num_kv_heads)
        window_tokens = _window(reader, index, layer_type)
        return cls(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=reader.count(own["head_dim"], "head_dim", default=0) or _head_dim(reader, num_heads),
            window_tokens=window_tokens,
            is_chunked=window_tokens is not None and "attention_chunk_size" in reader.raw,
            qkv_bias=reader.rule(architecture.qkv_bias),
            output_bias=reader.rule(architecture.output_bias),
            qk_norm=reader.rule(architecture.qk_norm),
            qk_norm_over_heads=reader.raw.get("qk_norm_type") == "per_layer",
            output_gate=reader.rule(architecture.output_gate),
            sinks=architecture.sinks or reader.flag(own["sinks"]),
            head_gate=reader.flag("use_head_wise_attn_gate"),
            rotary=reader.rule(architecture.rotary)
            and not reader.flag("alibi")
            and reader.raw.get("position_embedding_type") not in ("nope", "alibi"),
            value_head_dim=reader.count(own["value_head_dim"], "v_head_dim", default=0, minimum=0) or None,
            values_are_keys=reader.flag("attention_k_eq_v") and not is_window,
            shares_kv=reader.shares_kv(index),
            **others,
        )

    @property
    def shared_kv_heads(self) -> int | None:
        return self.num_kv_heads

    @property
    def rotary_size(self) -> int:
        return self.head_dim if self.rotary else 0

    @property
    def text(self) -> str:
        kind = ("MHA" if self.num_kv_heads == self.num_heads else "GQA") + (" to shared KV" if self.shares_kv else "")
        return f"{kind} {self.window_tokens}" if self.window_tokens else kind

    @property
    def _value_width(self) -> int:
        return self.value_head_dim or self.head_dim

    @property
    def _kv_columns(self) -> int:
        width = self.head_dim + (0 if self.values_are_keys else self._value_width)
        return 0 if self.shares_kv else self.num_kv_heads * width

    def num_parameters(self, hidden_size: int) -> int:
        qkv = self.query_size + self.gate_size + self._kv_columns
        biases = (qkv if self.qkv_bias else 0) + (hidden_size if self.output_bias else 0)
        outputs = self.num_heads * self._value_width
        return hidden_size * (qkv + outputs) + biases + (self.num_heads if self.sinks else 0)

    def norm_parameters(self) -> int:
        if self.qk_norm_over_heads:
            return self.query_size + self.kv_size
        return (1 if self.shares_kv else 2) * self.head_dim if self.qk_norm else 0

    def repeated_parameters(self, hidden_size: int, tp: int) -> tuple[int, float]:
        """Every rank keeps at least one key/value head."""
        return hidden_size * self._kv_columns, max(tp / self.num_kv_heads, 1.0)

    def projections(self, shard: Shard, num_tokens: Size) -> Iterator[Launch]:
        width = shard.model.hidden_size
        query = self.query_size // shard.tp
        kv_heads = 0 if self.shares_kv else self.rank_kv_heads(shard.tp)
        kv = kv_heads * self.head_dim
        kv_and_values = kv + kv_heads * self._value_width
        gate = self.gate_size // shard.tp
        columns = query + kv_and_values + (0 if self.head_gate else gate)
        yield shard.attention_gemm("qkv_proj", num_tokens, columns, width)
        if self.qk_norm_over_heads and shard.tp > 1:
            # One kernel before the sum over ranks and one after it (vLLM 0.16 `MiniMaxText01RMSNormTP.forward_qk`).
            yield shard.elementwise("qk_squares", num_tokens, (query + kv) * BF16_BYTES)
            yield Launch("qk_norm_all_reduce", shard.collective("all_reduce", num_tokens * SQUARES_BYTES, shard.tp))
        if self.qk_norm:
            yield shard.elementwise("qk_norm", num_tokens, 2 * (query + kv) * BF16_BYTES)
        if self.rotary:
            yield shard.elementwise("rope", num_tokens, 2 * (query + kv) * BF16_BYTES)
        cached = kv_and_values * (BF16_BYTES + BITS[shard.precision.kv_cache] / 8)
        if cached:
            yield shard.elementwise("kv_cache_write", num_tokens, cached)
        if self.head_gate:
            yield shard.attention_gemm("attention_gate_proj", num_tokens, gate, width)
        if gate:
            yield shard.elementwise("attention_gate", num_tokens, (2 * query + gate) * BF16_BYTES)
        yield shard.attention_gemm("o_proj", num_tokens, width, self.num_heads // shard.tp * self._value_width)

    def rank_kv_heads(self, tp: int) -> int:
        return max(self.num_kv_heads // tp, 1)

    @property
    def core_name(self) -> str:
        return "window_attention" if self.window_tokens else "attention"

    def core_fields(self, shard: Shard) -> dict[str, Any]:
        return {
            "num_heads": self.num_heads // shard.tp,
            "num_kv_heads": self.rank_kv_heads(shard.tp),
            "head_dim": self.head_dim,
            "window_tokens": self.window_tokens or 0,
            "kv_format": shard.precision.kv_cache,
        }

    def bytes_per_token(self, shard: Shard) -> float:
        width = 0 if self.shares_kv else self.head_dim + self._value_width
        return self.rank_kv_heads(shard.tp) * width * BITS[shard.precision.kv_cache] / 8 / shard.parallelism.dcp


class GroupedQueryAttention(SharedHeads, tag="grouped_query", tag_field="type"):
    """Softmax attention with `num_kv_heads` shared key/value heads (multi-head where they equal `num_heads`)."""

    operators: ClassVar[tuple[type[Op], ...]] = (PrefillAttention, DecodeAttention, EncoderAttention)
    layer_types: ClassVar[tuple[str, ...]] = ("full_attention", "sliding_attention", "chunked_attention", "attention")

    @property
    def divided_widths(self) -> tuple[int, int] | None:
        return None if self.window_tokens else (self.head_dim, self._value_width)


def _head_dim(reader: ConfigReader, num_heads: int) -> int:
    hidden_size = reader.count("hidden_size")
    reader.check_multiple("without head_dim, hidden_size", hidden_size, "num_attention_heads", num_heads)
    return hidden_size // num_heads


def _window(reader: ConfigReader, index: int, layer_type: str) -> int | None:
    """Return the sliding window of layer `index` in tokens; None where it attends to everything."""
    window = reader.count("sliding_window", default=0, minimum=0)
    if not window or window >= reader.max_positions or not reader.flag("use_sliding_window", default=True):
        return None
    if reader.raw.keys() & {"layer_types", "attention_layers", "hybrid_layer_pattern"}:
        return window if layer_type in ("sliding_attention", "chunked_attention") else None
    if reader.flag("use_sliding_window"):
        return window if index >= reader.count("max_window_layers", default=0, minimum=0) else None
    every = reader.count(
        "sliding_window_pattern", "global_attn_every_n_layers", default=reader.architecture.full_attention_every or 0
    )
    return None if every and (index + 1) % every == 0 else window


KIND = GroupedQueryAttention
