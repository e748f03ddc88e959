"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): one compressed KV vector per token; a choice of keys.

Prefill expands the compressed keys and values, cached ones too (`kv_b_proj`); decode and sparse attention
absorb that product.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from windtunnel.errors import InputError
from windtunnel.model import operators as ops
from windtunnel.model.config_reader import ConfigReader
from windtunnel.model.operators import BF16_BYTES, FP32_BYTES, Batch, DecodeBatch, Launch, Op, PrefillBatch, Size
from windtunnel.model.precision import BITS, Format
from windtunnel.model.quantization import Names
from windtunnel.model.shape import Attention, Shard
from windtunnel.schema import Schema, fields_of

SCALED = 128
"""Values of a compressed vector that share a scale where an fp8 KV cache has scales (FlashMLA's README)."""


@dataclass(frozen=True)
class LatentPrefillAttention(PrefillBatch):
    """The core of multi-head latent attention in prefill, keys and values expanded; without its projections.

    Heads compute with `qk_head_dim` (nope + rope) and `v_head_dim`.
    """

    kind: ClassVar[str] = "latent_prefill_attention"
    shares_batch: ClassVar[str | None] = "num_heads"
    shown: ClassVar[str] = "{batch_text}, {num_heads} x {qk_head_dim}/{v_head_dim} {kv_format}"
    num_heads: int
    qk_head_dim: int
    v_head_dim: int
    kv_format: Format = Format.BF16

    @property
    def flops(self) -> Size:
        return self.batch * self.num_tokens**2 * self.num_heads * (self.qk_head_dim + self.v_head_dim)

    @property
    def num_bytes(self) -> Size:
        width = (self.qk_head_dim + self.v_head_dim) * self.num_heads * BF16_BYTES
        return (self.batch * self.num_tokens + self.context_tokens) * width


@dataclass(frozen=True)
class LatentDecodeAttention(DecodeBatch):
    """The core of multi-head latent attention in decode, absorbed: queries meet the compressed cache. Without its
    projections.

    The two per-head products that absorb the up-projections (`[nope x lora]` and `[lora x v]`) belong to it.
    """

    kind: ClassVar[str] = "latent_decode_attention"
    num_heads: int
    kv_lora_rank: int
    rope_head_dim: int
    qk_nope_head_dim: int = 128
    v_head_dim: int = 128
    kv_format: Format = Format.BF16

    @property
    def flops(self) -> Size:
        core = 2.0 * self.context_tokens * (2 * self.kv_lora_rank + self.rope_head_dim)
        absorb = 2.0 * self.kv_lora_rank * (self.qk_nope_head_dim + self.v_head_dim)
        return self.batch * self.num_heads * (core + absorb)

    @property
    def num_bytes(self) -> Size:
        width = self.kv_lora_rank + self.rope_head_dim
        absorb = self.num_heads * self.kv_lora_rank * (self.qk_nope_head_dim + self.v_head_dim) * BF16_BYTES
        cached = self.context_tokens * width * BITS[self.kv_format] / 8
        return absorb + self.batch * (cached + self.num_heads * (width + self.kv_lora_rank) * BF16_BYTES)

    @property
    def text(self) -> str:
        return f"{self.batch_text}, {self.num_heads} x {self.kv_lora_rank + self.rope_head_dim} {self.kv_format}"


@dataclass(frozen=True)
class SparseLatent(Batch):
    """Sparse latent attention: an indexer with its projections, which scores every earlier token in fp8, and absorbed
    attention to the `top_k` best tokens (DeepSeek-V3.2, arXiv:2512.02556).
    """

    shown: ClassVar[str] = "{batch_text}, {num_heads} of the best {top_k} {kv_format}"
    num_heads: int
    kv_lora_rank: int
    rope_head_dim: int
    qk_nope_head_dim: int
    v_head_dim: int
    hidden_size: int
    q_lora_rank: int
    index_num_heads: int
    index_head_dim: int
    top_k: int
    kv_format: Format = Format.BF16
    index_pool: int = 1
    """Tokens whose keys the indexer pools into one."""

    @property
    def kept_pairs(self) -> Size:
        """Query-key pairs that attention computes."""
        return self.pairs_within(self.top_k)

    @property
    def scored_pairs(self) -> Size:
        """Query-key pairs that the indexer scores."""
        return self.pairs_within(0) / self.index_pool

    @property
    def flops(self) -> Size:
        """FLOPs of attention to the kept pairs, of absorbing products and projections, and half the FLOPs of the scores
        of all pairs (fp8 runs at twice the rate)."""
        scores = self.scored_pairs * (2.0 * self.index_num_heads * self.index_head_dim) / 2
        return self.kept_pairs * self.flops_per_kept_pair + scores + self.num_queries * (2.0 * self.num_weights)

    @property
    def num_weights(self) -> float:
        """Parameters of the up-projections that queries and outputs absorb, and of the indexer's projections."""
        absorb = self.num_heads * self.kv_lora_rank * (self.qk_nope_head_dim + self.v_head_dim)
        queries = self.q_lora_rank * self.index_num_heads * self.index_head_dim
        keys = self.index_head_dim * (1 + (self.index_pool > 1))
        return absorb + queries + self.hidden_size * (keys + self.index_num_heads)

    @property
    def flops_per_kept_pair(self) -> float:
        return 2.0 * self.num_heads * (2 * self.kv_lora_rank + self.rope_head_dim)

    @property
    def weight_bytes(self) -> float:
        return self.num_weights * BF16_BYTES

    @property
    def bytes_per_query(self) -> float:
        """Bytes of one token's compressed queries and outputs."""
        return self.num_heads * (2 * self.kv_lora_rank + self.rope_head_dim) * BF16_BYTES

    @property
    def kept_bytes(self) -> float:
        """Bytes of one cached token as attention reads it."""
        return (self.kv_lora_rank + self.rope_head_dim) * BITS[self.kv_format] / 8

    @property
    def scored_bytes(self) -> float:
        """Bytes of one cached token as the indexer reads it: a key in fp8 and its scale."""
        return (self.index_head_dim + 4.0) / self.index_pool if self.index_num_heads else 0.0


@dataclass(frozen=True)
class SparseLatentPrefill(SparseLatent, PrefillBatch):
    """Prefill of sparse latent attention.

    Every query reads its own `top_k` keys; neighbouring queries mostly read the same keys, which stay in the cache.
    """

    kind: ClassVar[str] = "sparse_latent_prefill"

    @property
    def num_bytes(self) -> Size:
        moved = self.batch * self.num_tokens * self.bytes_per_query
        return self.weight_bytes + moved + self.context_tokens * (self.kept_bytes + self.scored_bytes)


@dataclass(frozen=True)
class SparseLatentDecode(SparseLatent, DecodeBatch):
    """Decode of sparse latent attention."""

    kind: ClassVar[str] = "sparse_latent_decode"

    @property
    def num_bytes(self) -> Size:
        kept = np.minimum(self.context_tokens, self.top_k) * self.kept_bytes
        cached = kept + self.context_tokens * self.scored_bytes
        return self.weight_bytes + self.batch * (cached + self.bytes_per_query)


class Indexer(Schema):
    """Choice of the keys that a query attends to: small heads score every earlier token and the best `top_k` are kept
    (DeepSeek-V3.2, arXiv:2512.02556, section 2.1). Its keys are cached in fp8 beside the compressed vectors."""

    num_heads: int
    head_dim: int
    top_k: int
    pool: int = 1
    """Tokens whose keys are pooled into one, by gates; whole pools are kept (GLM-5.3-Flash)."""
    from_hidden: bool = False
    """Whether its queries are projected from hidden states, and not from compressed queries (Mistral Large 4)."""
    is_shared: bool = False
    """Whether the choice is that of an earlier layer, so that this one has no weights and keys for it (GLM-5.2)."""


class LatentAttention(Schema, Attention, tag="latent", tag_field="type"):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): one compressed KV vector per token."""

    operators: ClassVar[tuple[type[Op], ...]] = (
        LatentPrefillAttention,
        LatentDecodeAttention,
        SparseLatentPrefill,
        SparseLatentDecode,
    )
    modules: ClassVar[tuple[Names, ...]] = (
        ("self_attn.q_a_proj", "self_attn.q_b_proj", "self_attn.q_proj"),
        ("self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj"),
        ("self_attn.o_proj",),
    )
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    indexer: Indexer | None = None
    """None: every query attends to all keys."""
    rotary: bool = True
    """Whether a part of queries and keys is rotated by their position (Kimi-Linear's is not)."""
    output_gate: bool = False
    """A gate as wide as the values is computed beside the queries (Kimi-K3)."""
    head_gate: bool = False
    """A gate of one value for each head is (Ling 3)."""
    gated_queries: bool = False
    """Queries and a gate as wide as the values come from one projection, of compressed queries before and after their
    norm (A.X-K2)."""
    shares_kv: bool = False
    """The compressed vectors are those that an earlier layer cached (Mistral Large 4)."""

    @classmethod
    def reads(cls, reader: ConfigReader, index: int) -> bool:
        return reader.raw.get("kv_lora_rank") is not None and reader.flag("use_mla", default=True)

    @classmethod
    def read(cls, reader: ConfigReader, index: int, layer_type: str) -> "LatentAttention":
        num_heads = reader.count("num_attention_heads")
        width = reader.count("hidden_size") // num_heads if reader.architecture.split_values else None
        nope, rope = reader.count("qk_nope_head_dim"), reader.count("qk_rope_head_dim", minimum=0)
        rotated, sources = (reader.numbers(key) for key in ("no_rope_layers", "kv_source_layers"))
        if rotated and not reader.per_layer("no_rope_layers", rotated)[index]:
            nope, rope = nope + rope, 0
        return cls(
            num_heads=num_heads,
            q_lora_rank=reader.count("q_lora_rank", default=0) or None,
            kv_lora_rank=reader.count("kv_lora_rank"),
            qk_nope_head_dim=nope,
            qk_rope_head_dim=rope,
            v_head_dim=reader.count("v_head_dim", default=width),
            indexer=None if reader.raw.get("index_topk") is None else _indexer(reader, index),
            rotary=not reader.flag("mla_use_nope"),
            output_gate=reader.flag("mla_use_output_gate"),
            head_gate=reader.flag("use_head_wise_attn_gate"),
            gated_queries=reader.architecture.gated_queries,
            shares_kv=bool(sources) and reader.per_layer("kv_source_layers", sources)[index] != index,
        )

    @property
    def text(self) -> str:
        return "MLA" if self.indexer is None else "DSA, shared" if self.indexer.is_shared else "DSA"

    @property
    def latent_size(self) -> int:
        """Numbers cached for a token: the compressed vector and the rotated key that all heads share."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def own_latent_size(self) -> int:
        """Numbers that the layer itself computes and caches for a token."""
        return 0 if self.shares_kv else self.latent_size

    @property
    def rotary_size(self) -> int:
        return self.qk_rope_head_dim if self.rotary else 0

    @property
    def gate_size(self) -> int:
        return self.num_heads * (self.v_head_dim if self.output_gate or self.gated_queries else self.head_gate)

    def absorbed_parameters(self, tp: int) -> int:
        """The up-projection is kept whole for prefill and in two parts for decode (vLLM 0.19 `mla_attention.py`,
        `process_weights_after_loading`: `W_UV`, `W_UK_T`; SGLang `w_kc`, `w_vc`)."""
        return self.num_heads // tp * self.kv_lora_rank * (self.qk_nope_head_dim + self.v_head_dim)

    def num_parameters(self, hidden_size: int) -> int:
        query = self.num_heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        query_rank = self.q_lora_rank
        query_projection = hidden_size * query if query_rank is None else query_rank * (hidden_size + query)
        if self.gated_queries:
            query_projection += (query_rank or 0) * (query + 2 * self.gate_size)
        down = hidden_size * self.own_latent_size
        up = self.kv_lora_rank * self.num_heads * (self.qk_nope_head_dim + self.v_head_dim)
        outputs = self.num_heads * self.v_head_dim + self.gate_size * (not self.gated_queries)
        core = query_projection + down + up + outputs * hidden_size
        return core + self._indexer_parameters(hidden_size)

    def _indexer_parameters(self, hidden_size: int) -> int:
        """Count the parameters of one layer's indexer, without its norm; every rank holds the whole indexer."""
        if self.indexer is None or self.indexer.is_shared:
            return 0
        queries = self._index_inputs(hidden_size) * self.indexer.num_heads * self.indexer.head_dim
        queries += 2 * hidden_size * self.indexer.from_hidden  # their norm
        pooling = (hidden_size + self.indexer.pool) * self.indexer.head_dim if self.indexer.pool > 1 else 0
        return queries + pooling + hidden_size * (self.indexer.head_dim + self.indexer.num_heads)

    def _index_inputs(self, hidden_size: int) -> int:
        return hidden_size if self.indexer and self.indexer.from_hidden else self.q_lora_rank or 0

    def norm_parameters(self) -> int:
        index_norm = 2 * self.indexer.head_dim if self.indexer and not self.indexer.is_shared else 0
        return (self.q_lora_rank or 0) + self.kv_lora_rank * (not self.shares_kv) + index_norm

    def repeated_parameters(self, hidden_size: int, tp: int) -> tuple[int, float]:
        """Every rank keeps the down-projections and the indexer."""
        down = hidden_size * ((self.q_lora_rank or 0) + self.own_latent_size)
        return down + self._indexer_parameters(hidden_size), tp

    def projections(self, shard: Shard, num_tokens: Size) -> Iterator[Launch]:
        width = shard.model.hidden_size
        heads = self.num_heads // shard.tp
        query = heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        gate = self.gate_size // shard.tp
        output = shard.attention_gemm("o_proj", num_tokens, width, heads * self.v_head_dim)
        if self.q_lora_rank is None:
            yield shard.attention_gemm("q_kv_a_proj", num_tokens, query + gate + self.own_latent_size, width)
        else:
            down = self.q_lora_rank + gate * (not self.gated_queries) + self.own_latent_size
            yield shard.attention_gemm("q_kv_a_proj", num_tokens, down, width)
            if self.gated_queries:
                yield shard.elementwise("query_concat", num_tokens, 4 * self.q_lora_rank * BF16_BYTES)
                yield shard.attention_gemm("q_b_proj", num_tokens, query + gate, 2 * self.q_lora_rank)
            else:
                yield shard.attention_gemm("q_b_proj", num_tokens, query, self.q_lora_rank)
        if gate:
            gated = 2 * heads * self.v_head_dim + gate
            yield shard.elementwise("attention_gate", num_tokens, gated * BF16_BYTES)
        if self.indexer:
            # Norms, rotation and the cache's write were measured as one with the indexer.
            yield output
            return
        normed = (self.q_lora_rank or 0) + self.kv_lora_rank
        yield shard.elementwise("latent_norm", num_tokens, 2 * normed * BF16_BYTES)
        if self.rotary:
            rotated = 2 * (heads + 1) * self.qk_rope_head_dim * BF16_BYTES
            yield shard.elementwise("rope", num_tokens, rotated)
        cached = self.own_latent_size * (BF16_BYTES + BITS[shard.precision.kv_cache] / 8)
        yield shard.elementwise("kv_cache_write", num_tokens, cached)
        yield output

    def decode_launches(self, shard: Shard, batch: Size, context_tokens: Size) -> Iterator[Launch]:
        kind: Any = SparseLatentDecode if self.indexer else LatentDecodeAttention
        core = kind(**self.core_fields(shard), batch=batch, context_tokens=context_tokens)
        yield Launch(f"{self.core_name}_decode", core)

    def prefill_launches(self, shard: Shard, batch: Size, num_tokens: Size) -> Iterator[Launch]:
        if self.indexer:
            sparse = SparseLatentPrefill(**self.core_fields(shard), batch=batch, num_tokens=num_tokens)
            yield Launch(f"{self.core_name}_prefill", sparse)
            return
        heads = self.num_heads // shard.tp
        keys = ops.prefill_context_tokens(batch, num_tokens)
        up = heads * (self.qk_nope_head_dim + self.v_head_dim)
        yield shard.attention_gemm("kv_b_proj", keys, up, self.kv_lora_rank)
        core = LatentPrefillAttention(
            batch=batch,
            num_tokens=num_tokens,
            num_heads=heads,
            qk_head_dim=self.qk_nope_head_dim + self.qk_rope_head_dim,
            v_head_dim=self.v_head_dim,
            kv_format=shard.precision.kv_cache,
        )
        yield Launch(f"{self.core_name}_prefill", core)

    @property
    def core_name(self) -> str:
        return "sparse_latent_attention" if self.indexer else "latent_attention"

    def core_fields(self, shard: Shard) -> dict[str, Any]:
        """Return the dimensions of attention whose queries meet the compressed cache, on one rank; an indexer is not
        split over `tp`."""
        return self.fields_of_rank(shard.model.hidden_size, shard.tp) | {"kv_format": shard.precision.kv_cache}

    def fields_of_rank(self, hidden_size: int, tp: int) -> dict[str, Any]:
        """Return the dimensions of that attention on one of `tp` ranks, in training too."""
        absorbed = {
            **fields_of(self, "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"),
            "num_heads": self.num_heads // tp,
            "rope_head_dim": self.qk_rope_head_dim,
        }
        if self.indexer is None:
            return absorbed
        return absorbed | {
            "hidden_size": hidden_size,
            "q_lora_rank": self._index_inputs(hidden_size),
            "index_num_heads": 0 if self.indexer.is_shared else self.indexer.num_heads,
            "index_head_dim": 0 if self.indexer.is_shared else self.indexer.head_dim,
            "top_k": self.indexer.top_k,
            "index_pool": self.indexer.pool,
        }

    def bytes_per_token(self, shard: Shard) -> float:
        """The latent vector, not split over `tp`, and the indexer's key, fp8 with its fp32 scale (vLLM 0.24
        `DeepseekV32IndexerCache`)."""
        has_keys = self.indexer is not None and not self.indexer.is_shared
        index_bytes = (self.indexer.head_dim + 4) / self.indexer.pool if self.indexer and has_keys else 0
        latent_bytes = self.own_latent_size * BITS[shard.precision.kv_cache] / 8
        if latent_bytes and self.indexer and shard.scaled_sparse_kv and shard.precision.kv_cache is Format.FP8:
            latent_bytes = self.kv_lora_rank * (1 + FP32_BYTES / SCALED) + self.qk_rope_head_dim * BF16_BYTES
        return (latent_bytes + index_bytes) / shard.parallelism.dcp

    @property
    def divided_widths(self) -> tuple[int, int] | None:
        return None if self.indexer else (self.latent_size, self.kv_lora_rank)


def _indexer(reader: ConfigReader, index: int) -> Indexer:
    from_hidden = reader.architecture.index_from_hidden
    if reader.count("q_lora_rank", default=0, minimum=0) == 0 and not from_hidden:
        raise InputError(f"{reader.name}: an indexer without compressed queries (q_lora_rank) cannot be modelled")
    types = reader.named_layers("indexer_types", ("full", "shared"))
    if types and types[0] == "shared":
        raise InputError(f"{reader.name}: indexer_types begins with 'shared', and no layer is before it")
    return Indexer(
        num_heads=reader.count("index_n_heads"),
        head_dim=reader.count("index_head_dim"),
        top_k=reader.count("index_topk"),
        pool=reader.count("index_kpool", default=1),
        from_hidden=from_hidden,
        is_shared=bool(types) and types[index] == "shared",
    )


KIND = LatentAttention
