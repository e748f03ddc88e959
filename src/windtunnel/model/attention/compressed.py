"""Compressed attention (DeepSeek-V4): a sliding window, and beside it tokens that are compressed several into one.

Layers differ in their ratio. With 4, an indexer chooses the `top_k` compressed tokens that a query attends to
(compressed sparse attention); with 128, every query attends to all of them (heavily compressed attention); with 0 a
layer has its window alone. One vector per token is key and value of all heads. The output's projection is of low rank,
in groups of heads (vLLM 0.24 `models/deepseek_v4/attention.py`, `compressor.py`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from windtunnel.errors import InputError
from windtunnel.model.config_reader import ConfigReader
from windtunnel.model.operators import BF16_BYTES, FP32_BYTES, Batch, DecodeBatch, Launch, Op, PrefillBatch, Size
from windtunnel.model.precision import BITS, Format
from windtunnel.model.quantization import Names
from windtunnel.model.shape import Attention, Shard
from windtunnel.schema import Schema, fields_of

CHOSEN_RATIO, FEWEST_RATIO = 4, 128
"""Ratio of the layers with an indexer, and of the layers with the fewest compressed tokens."""

_RATIOS = {
    "sliding_attention": 0,
    "compressed_sparse_attention": CHOSEN_RATIO,
    "heavily_compressed_attention": FEWEST_RATIO,
}
"""Ratio of layers by their names in transformers 5, where `compress_rates` gives no other (`DeepseekV4Config`)."""

_SCALED = 64
"""Values of a cached key that share a scale of one byte (vLLM 0.24 `DeepseekCompressor`, `_quant_block`)."""


@dataclass(frozen=True)
class CompressedCore(Batch):
    """What one rank's compressed attention takes above its four large projections: compressors, indexer, attention,
    norms and rotation.
    """

    shown: ClassVar[str] = "{batch_text}, {num_heads} x {head_dim}, 1 of {compress_ratio} {kv_format}"
    num_heads: int
    head_dim: int
    hidden_size: int
    q_lora_rank: int
    o_lora_rank: int
    num_groups: int
    window_tokens: int
    index_num_heads: int
    index_head_dim: int
    top_k: int
    compress_ratio: int
    kv_format: Format = Format.FP8
    compresses: bool = True
    """Whether it compresses tokens, for itself and for layers that share them."""
    chooses: bool = False
    """Whether an indexer scores the compressed tokens."""

    @staticmethod
    def projections(site: Mapping[str, float]) -> Iterator[tuple[float, float]]:
        """Yield (n, k) of the four large projections on one rank."""
        width = site["num_heads"] * site["head_dim"]
        yield site["q_lora_rank"] + site["head_dim"], site["hidden_size"]
        yield width, site["q_lora_rank"]
        yield site["num_groups"] * site["o_lora_rank"], width / site["num_groups"]
        yield site["hidden_size"], site["num_groups"] * site["o_lora_rank"]

    @property
    def read_tokens(self) -> Size:
        """Cached tokens, compressed or not, and keys of the indexer that are read from memory."""
        last = self.top_k * self.compress_ratio if self.is_chosen else 0
        keys = self.read_within(0) * self.index_head_dim / self.head_dim if self.chooses else 0.0
        return self.read_within(self.window_tokens) + (self.read_within(last) + keys) / self.compress_ratio

    @property
    def is_chosen(self) -> bool:
        """Whether queries attend to chosen compressed tokens alone."""
        return self.compress_ratio <= CHOSEN_RATIO

    @property
    def kept_pairs(self) -> Size:
        """Pairs of queries and tokens that attention computes: the window's, and compressed ones."""
        last = self.top_k * self.compress_ratio if self.is_chosen else 0
        return self.pairs_within(self.window_tokens) + self.pairs_within(last) / self.compress_ratio

    @property
    def flops_per_kept_pair(self) -> float:
        return 4.0 * self.num_heads * self.head_dim

    @property
    def scored_pairs(self) -> Size:
        """Pairs of queries and compressed tokens that the indexer scores."""
        return self.pairs_within(0) / self.compress_ratio if self.chooses else 0.0

    @property
    def flops(self) -> Size:
        """FLOPs of attention, of scores at half their number (fp8 runs at twice the rate), and of the compressors' and
        the indexer's products."""
        scores = self.scored_pairs * self.index_num_heads * self.index_head_dim
        return self.kept_pairs * self.flops_per_kept_pair + scores + 2.0 * self.num_queries * self.num_weights

    @property
    def num_bytes(self) -> Size:
        """Weights, queries and outputs, and what is read of the cache."""
        queries = self.num_queries * (2 * self.num_heads + 1) * self.head_dim * BF16_BYTES
        return self.num_weights * BF16_BYTES + queries + self.read_tokens * self.head_dim * BITS[self.kv_format] / 8

    @property
    def num_weights(self) -> float:
        """Parameters of the compressors and of the indexer, which every rank has whole."""
        return whole_parameters(self, self.hidden_size)


@dataclass(frozen=True)
class CompressedPrefill(CompressedCore, PrefillBatch):
    """Compressed attention in prefill."""

    kind: ClassVar[str] = "compressed_prefill"


@dataclass(frozen=True)
class CompressedDecode(CompressedCore, DecodeBatch):
    """Compressed attention in decode."""

    kind: ClassVar[str] = "compressed_decode"


@dataclass(frozen=True)
class Compression(Op):
    """Compressing `num_tokens` tokens into one in one block of threads, for each of `rows` requests side by side."""

    kind: ClassVar[str] = "compression"
    axes: ClassVar[tuple[str, ...]] = ("rows",)
    shown: ClassVar[str] = "{rows} x {num_tokens} x {head_dim}"
    rows: Size
    num_tokens: int
    head_dim: int

    @property
    def flops(self) -> Size:
        """A weight and a product for each value."""
        return 4.0 * self.rows * self.num_tokens * self.head_dim

    @property
    def num_bytes(self) -> Size:
        """Values and their weights in fp32."""
        return self.rows * self.num_tokens * 2 * self.head_dim * FP32_BYTES


def _overlap(compress_ratio: int) -> int:
    """Return the compressed tokens that a token is part of: those that are chosen from overlap."""
    return 2 if compress_ratio == CHOSEN_RATIO else 1


def whole_parameters(part: "CompressedCore | CompressedAttention", hidden_size: int) -> int:
    """Count the parameters that every rank has whole beside the down-projection: of compressors, which compute a value
    and its weight for each token and add a weight for its place, and of the indexer, in DeepSeek-V4 with a compressor
    of its own."""
    count, ratio = 0, part.compress_ratio
    if part.compresses and ratio:
        compressor = 2 * _overlap(ratio) * hidden_size + _overlap(ratio) * ratio
        count = compressor * (part.head_dim + (part.index_head_dim if part.chooses else 0))
    if part.chooses:
        count += (part.q_lora_rank * part.index_head_dim + hidden_size) * part.index_num_heads
    return count


class CompressedAttention(Schema, Attention, tag="compressed", tag_field="type"):
    """Compressed attention; `num_heads` heads share one key and value of `head_dim` for each token."""

    operators: ClassVar[tuple[type[Op], ...]] = (CompressedPrefill, CompressedDecode, Compression)
    modules: ClassVar[tuple[Names, ...]] = (("attn.wq_a", "attn.wq_b"), ("attn.wkv",), ("attn.wo_a", "attn.wo_b"))
    divided_by_tp = "groups of attention heads"
    num_heads: int
    head_dim: int
    rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    num_groups: int
    """Groups of heads whose outputs are projected apart."""
    sliding_window: int
    compress_ratio: int
    """Tokens in a compressed one; 0: the layer has its window alone."""
    index_num_heads: int
    index_head_dim: int
    top_k: int
    compresses: bool = True
    """Whether it compresses tokens."""

    @classmethod
    def reads(cls, reader: ConfigReader, index: int) -> bool:
        if reader.raw.get("kv_source_layer_ids") is not None:
            return False  # layers share what they compress
        return reader.raw.get("compress_ratios") is not None or reader.raw.get("o_lora_rank") is not None

    @classmethod
    def read(cls, reader: ConfigReader, index: int, layer_type: str) -> "CompressedAttention":
        """Return the attention of layer `index`; the ratios of draft layers follow those of the layers."""
        ratios = reader.numbers("compress_ratios")
        if not ratios:
            rates = reader.inner("compress_rates") if reader.raw.get("compress_rates") else reader.of({})
            names = reader.named_layers("layer_types", tuple(_RATIOS))
            ratios = [rates.count(name, default=_RATIOS[name], minimum=0) for name in names]
        if len(ratios) < reader.num_layers or set(ratios) - {0, CHOSEN_RATIO, FEWEST_RATIO}:
            raise InputError(
                f"{reader.name}: compress_ratios is {ratios!r}; 0, {CHOSEN_RATIO} or {FEWEST_RATIO} for each of the "
                f"{reader.num_layers} layers is needed"
            )
        return cls(**cls.sizes(reader), compress_ratio=ratios[index])

    @classmethod
    def sizes(cls, reader: ConfigReader) -> dict[str, Any]:
        """Return the fields that all layers of a model share."""
        num_heads, num_groups = reader.count("num_attention_heads"), reader.count("o_groups")
        same = ("head_dim", "q_lora_rank", "o_lora_rank", "sliding_window", "index_head_dim")
        reader.check_multiple("num_attention_heads", num_heads, "o_groups", num_groups)
        return {
            "num_heads": num_heads,
            "num_groups": num_groups,
            "rope_head_dim": reader.count("qk_rope_head_dim"),
            "index_num_heads": reader.count("index_n_heads"),
            "top_k": reader.count("index_topk"),
            **{name: reader.count(name) for name in same},
        }

    @property
    def widest_tp(self) -> int:
        return self.num_groups

    @property
    def window_tokens(self) -> int | None:
        return None if self.compress_ratio else self.sliding_window

    @property
    def text(self) -> str:
        return "CSA" if self.chooses else "HCA" if self.compress_ratio else "SWA"

    @property
    def chooses(self) -> bool:
        """Whether an indexer chooses compressed tokens."""
        return self.compress_ratio == CHOSEN_RATIO

    @property
    def rotary_size(self) -> int:
        return self.rope_head_dim

    def num_parameters(self, hidden_size: int) -> int:
        """The projections, a sink of each head, compressors with the weights of positions, and the indexer."""
        heads, outputs = self.num_heads * self.head_dim, self.num_groups * self.o_lora_rank
        down = hidden_size * (self.q_lora_rank + self.head_dim)
        up = self.q_lora_rank * heads
        output = heads // self.num_groups * outputs + outputs * hidden_size
        return down + up + output + self.num_heads + self.whole_parameters(hidden_size)

    def whole_parameters(self, hidden_size: int) -> int:
        """Count the parameters that every rank has whole beside the down-projection."""
        return whole_parameters(self, hidden_size)

    def norm_parameters(self) -> int:
        compressed = (self.head_dim if self.compress_ratio else 0) + (self.index_head_dim if self.chooses else 0)
        return self.q_lora_rank + self.head_dim + compressed

    def repeated_parameters(self, hidden_size: int, tp: int) -> tuple[int, float]:
        """Every rank keeps the down-projection, compressors and indexer."""
        down = hidden_size * (self.q_lora_rank + self.head_dim)
        return down + self.whole_parameters(hidden_size), tp

    def projections(self, shard: Shard, num_tokens: Size) -> Iterator[Launch]:
        names = ("q_kv_a_proj", "q_b_proj", "o_a_proj", "o_proj")
        for name, (outputs, inputs) in zip(names, CompressedCore.projections(self.core_fields(shard)), strict=True):
            yield shard.attention_gemm(name, num_tokens, int(outputs), int(inputs))

    def decode_launches(self, shard: Shard, batch: Size, context_tokens: Size) -> Iterator[Launch]:
        """Yield the core, and with the chance that a request of any rank completes a compressed token its kernel."""
        yield from super().decode_launches(shard, batch, context_tokens)
        ranks = shard.parallelism.attention_dp
        yield from self._compression(shard, 1 - (1 - 1 / FEWEST_RATIO) ** (batch * ranks))

    def prefill_launches(self, shard: Shard, batch: Size, num_tokens: Size) -> Iterator[Launch]:
        """Yield the core, and the compression's kernel where chunks are long enough to complete a compressed token."""
        yield from super().prefill_launches(shard, batch, num_tokens)
        yield from self._compression(shard, np.minimum(num_tokens * np.minimum(batch, 1.0) / FEWEST_RATIO, 1.0))

    def _compression(self, shard: Shard, share: Size) -> Iterator[Launch]:
        if shard.compresses_in_one_block and self.compress_ratio == FEWEST_RATIO:
            yield Launch("compression", Compression(1.0, FEWEST_RATIO, self.head_dim), adds=share)

    @property
    def core_name(self) -> str:
        is_chosen = 0 < self.compress_ratio <= CHOSEN_RATIO
        return "compressed_sparse_attention" if is_chosen else "heavily_compressed_attention"

    def core_fields(self, shard: Shard) -> dict[str, Any]:
        """Return the dimensions of one rank. A window alone is priced with the fewest compressed tokens beside it,
        which no engine was measured without."""
        widths = ("head_dim", "q_lora_rank", "o_lora_rank", "index_num_heads", "index_head_dim", "top_k", "compresses")
        return {
            **fields_of(self, *widths),
            "num_heads": self.num_heads // shard.tp,
            "hidden_size": shard.model.hidden_size,
            "num_groups": self.num_groups // shard.tp,
            "window_tokens": self.sliding_window,
            "compress_ratio": self.compress_ratio or FEWEST_RATIO,
            "chooses": self.chooses,
            "kv_format": shard.precision.kv_cache,
        }

    def _key_bytes(self, shard: Shard) -> float:
        """Return the bytes of a cached key: in fp8 with scales, the rotated values in bf16 (584 in vLLM 0.24
        `MLAAttentionSpec.real_page_size_bytes`)."""
        if shard.precision.kv_cache is Format.BF16:
            return self.head_dim * BF16_BYTES
        plain = self.head_dim - self.rope_head_dim
        return plain * BITS[shard.precision.kv_cache] / 8 + self.rope_head_dim * BF16_BYTES + plain // _SCALED + 1

    def bytes_per_token(self, shard: Shard) -> float:
        """Return the bytes of a token's part of a compressed key, and of the indexer's key in fp8 with its scale in
        fp32; of a key where the layer has its window alone."""
        indexed = self.index_head_dim + FP32_BYTES if self.chooses else 0.0
        return (self._key_bytes(shard) + indexed) / max(self.compress_ratio, 1)

    def state_bytes(self, shard: Shard) -> float:
        """Return the bytes of the window, and of values and weights in fp32 of the tokens that are still to be
        compressed (vLLM 0.24 `CompressorStateCache`)."""
        if not self.compress_ratio:
            return 0.0
        overlap = _overlap(self.compress_ratio)
        width = self.head_dim + (self.index_head_dim if self.chooses else 0)
        pending = overlap * self.compress_ratio * 2 * overlap * width * FP32_BYTES
        return self.sliding_window * self._key_bytes(shard) + pending


KIND = CompressedAttention
