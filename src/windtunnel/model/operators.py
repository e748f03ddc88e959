"""Operators, shared by profilers, estimators and reports: shapes that know their arithmetic and bytes.

Every dimension may be a number or a numpy array; arrays broadcast, so one `Op` can stand for a family of shapes (a
GEMM at every token count) and an estimator prices the family in one call. An `Op` is one execution on one rank;
`Launch.count` says how often a step runs it.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from windtunnel.model.precision import ACTIVATION_BITS, BITS, Format

Size = int | float | NDArray[np.float64]
"""A dimension: one number, or an array of them."""

BF16_BYTES = 2.0

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")


@dataclass(frozen=True)
class Gemm:
    """`[m, k] x [k, n]` with weights in `format`; bf16 output."""

    kind: ClassVar[str] = "gemm"
    axes: ClassVar[tuple[str, ...]] = ("m",)
    m: Size
    n: int
    k: int
    format: Format = Format.BF16

    @property
    def flops(self) -> Size:
        return 2.0 * self.m * self.n * self.k

    @property
    def num_bytes(self) -> Size:
        weight_bytes = self.n * self.k * BITS[self.format] / 8
        return weight_bytes + self.m * self.k * ACTIVATION_BITS[self.format] / 8 + self.m * self.n * BF16_BYTES


def prefill_context_tokens(batch: Size, num_tokens: Size) -> Size:
    """Return the keys that prefill chunks see in all, with `batch` and `num_tokens` as in `PrefillBatch`.

    Whole prompts see their own tokens. A batch b below one is a chunk of c tokens after p cached ones: its length is
    s = 2 p + c and b = c / s, so p + c = s (1 + b) / 2.
    """
    return num_tokens * np.where(np.asarray(batch) < 1, (1 + batch) / 2, batch)


@dataclass(frozen=True)
class PrefillBatch:
    """A batch of `batch` prompts of `num_tokens` tokens each, without earlier context.

    A batch of chunks that differ, or that have context already cached, is expressed by the two sums that decide its
    cost: with C tokens and W query-key pairs in all, `num_tokens = 2 W / C` and `batch = C / num_tokens` (both may be
    fractions). Equal prompts are then exact, and a chunk of c tokens after p cached ones has W = c (p + c / 2).
    """

    axes: ClassVar[tuple[str, ...]] = ("batch", "num_tokens")
    batch: Size
    num_tokens: Size

    @property
    def context_tokens(self) -> Size:
        """Keys that all chunks see together."""
        return prefill_context_tokens(self.batch, self.num_tokens)

    def pairs_within(self, window_tokens: int) -> Size:
        """Return the query-key pairs: s^2 / 2, or s w - w^2 / 2 in a window of w < s."""
        seen = np.minimum(self.num_tokens, window_tokens) if window_tokens else self.num_tokens
        return self.batch * (self.num_tokens * seen - seen * seen / 2)


@dataclass(frozen=True)
class DecodeBatch:
    """One query token for each of `batch` requests that have `context_tokens` keys and values cached (their mean)."""

    axes: ClassVar[tuple[str, ...]] = ("batch", "context_tokens")
    batch: Size
    context_tokens: Size


@dataclass(frozen=True)
class GroupedQueryHeads:
    """Heads of softmax attention, of which `num_heads / num_kv_heads` share a key and a value."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window_tokens: int = 0
    """Sliding window; 0: none."""
    kv_format: Format = Format.BF16


@dataclass(frozen=True)
class PrefillAttention(GroupedQueryHeads, PrefillBatch):
    """Causal attention in prefill."""

    kind: ClassVar[str] = "prefill_attention"

    @property
    def num_pairs(self) -> Size:
        """Query-key pairs."""
        return self.pairs_within(self.window_tokens)

    @property
    def flops(self) -> Size:
        return 4.0 * self.num_pairs * self.num_heads * self.head_dim

    @property
    def num_bytes(self) -> Size:
        query_and_output = 2 * self.num_heads * self.head_dim * BF16_BYTES
        key_and_value = 2 * self.num_kv_heads * self.head_dim * BITS[self.kv_format] / 8
        return self.batch * self.num_tokens * query_and_output + self.context_tokens * key_and_value


@dataclass(frozen=True)
class DecodeAttention(GroupedQueryHeads, DecodeBatch):
    """Attention in decode."""

    kind: ClassVar[str] = "decode_attention"

    @property
    def seen_tokens(self) -> Size:
        return np.minimum(self.context_tokens, self.window_tokens) if self.window_tokens else self.context_tokens

    @property
    def flops(self) -> Size:
        return 4.0 * self.batch * self.seen_tokens * self.num_heads * self.head_dim

    @property
    def num_bytes(self) -> Size:
        cached = 2 * self.seen_tokens * self.num_kv_heads * self.head_dim * BITS[self.kv_format] / 8
        return self.batch * (cached + 2 * self.num_heads * self.head_dim * BF16_BYTES)


@dataclass(frozen=True)
class LatentPrefillAttention(PrefillBatch):
    """The core of multi-head latent attention in prefill, keys and values expanded; without its projections.

    Heads compute with `qk_head_dim` (nope + rope) and `v_head_dim`.
    """

    kind: ClassVar[str] = "latent_prefill_attention"
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


@dataclass(frozen=True)
class SparseLatent(ABC):
    """Sparse latent attention: an indexer with its projections, which scores every earlier token in fp8, and absorbed
    attention to the `top_k` best tokens (DeepSeek-V3.2, arXiv:2512.02556).
    """

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

    @property
    @abstractmethod
    def num_queries(self) -> Size:
        """Tokens that are computed."""

    @property
    @abstractmethod
    def kept_pairs(self) -> Size:
        """Query-key pairs that attention computes."""

    @property
    @abstractmethod
    def scored_pairs(self) -> Size:
        """Query-key pairs that the indexer scores."""

    @property
    @abstractmethod
    def num_bytes(self) -> Size:
        """Weights, queries and outputs, and the cached tokens that are read."""

    @property
    def flops(self) -> Size:
        """FLOPs of attention to the kept pairs, of absorbing products and projections, and half the FLOPs of the scores
        (fp8 runs at twice the rate)."""
        scores = self.scored_pairs * (2.0 * self.index_num_heads * self.index_head_dim) / 2
        return self.kept_pairs * self.flops_per_kept_pair + scores + self.num_queries * (2.0 * self.num_weights)

    @property
    def num_weights(self) -> float:
        """Parameters of the up-projections that queries and outputs absorb, and of the indexer's projections."""
        absorb = self.num_heads * self.kv_lora_rank * (self.qk_nope_head_dim + self.v_head_dim)
        queries = self.q_lora_rank * self.index_num_heads * self.index_head_dim
        return absorb + queries + self.hidden_size * (self.index_head_dim + self.index_num_heads)

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
        return self.index_head_dim + 4.0


@dataclass(frozen=True)
class SparseLatentPrefill(SparseLatent, PrefillBatch):
    """Prefill of sparse latent attention.

    Every query reads its own `top_k` keys; neighbouring queries mostly read the same keys, which stay in the cache.
    """

    kind: ClassVar[str] = "sparse_latent_prefill"

    @property
    def num_queries(self) -> Size:
        return self.batch * self.num_tokens

    @property
    def kept_pairs(self) -> Size:
        return self.pairs_within(self.top_k)

    @property
    def scored_pairs(self) -> Size:
        return self.batch * self.num_tokens**2 / 2

    @property
    def num_bytes(self) -> Size:
        moved = self.batch * self.num_tokens * self.bytes_per_query
        return self.weight_bytes + moved + self.context_tokens * (self.kept_bytes + self.scored_bytes)


@dataclass(frozen=True)
class SparseLatentDecode(SparseLatent, DecodeBatch):
    """Decode of sparse latent attention."""

    kind: ClassVar[str] = "sparse_latent_decode"

    @property
    def num_queries(self) -> Size:
        return self.batch

    @property
    def kept_pairs(self) -> Size:
        return self.batch * np.minimum(self.context_tokens, self.top_k)

    @property
    def scored_pairs(self) -> Size:
        return self.batch * self.context_tokens

    @property
    def num_bytes(self) -> Size:
        kept = np.minimum(self.context_tokens, self.top_k) * self.kept_bytes
        cached = kept + self.context_tokens * self.scored_bytes
        return self.weight_bytes + self.batch * (cached + self.bytes_per_query)


@dataclass(frozen=True)
class GatedDelta(PrefillBatch):
    """The core of Gated DeltaNet (short convolution and delta rule); in decode `num_tokens` is 1.

    A request's state, `num_value_heads x key_head_dim x value_head_dim` in fp32, is read and written.
    """

    kind: ClassVar[str] = "gated_delta"
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel_size: int
    hidden_size: int
    decode: bool = False

    @property
    def state_bytes(self) -> float:
        return self.num_value_heads * self.key_head_dim * self.value_head_dim * 4.0

    @property
    def flops(self) -> Size:
        per_token = 6.0 * self.num_value_heads * self.key_head_dim * self.value_head_dim
        return self.batch * self.num_tokens * per_token

    @property
    def num_bytes(self) -> Size:
        width = 2 * self.num_key_heads * self.key_head_dim + 2 * self.num_value_heads * self.value_head_dim
        return self.batch * (2 * self.state_bytes + self.num_tokens * 2 * width * BF16_BYTES)


@dataclass(frozen=True)
class Experts:
    """The grouped GEMMs of a mixture of experts on one rank, gate/up and down, for `num_tokens` tokens of the whole
    expert-parallel group; `tp` shards every expert's width, `ep` spreads the experts.
    """

    kind: ClassVar[str] = "experts"
    axes: ClassVar[tuple[str, ...]] = ("num_tokens",)
    num_tokens: Size
    hidden_size: int
    intermediate_size: int
    """Width of one expert, before sharding."""
    num_experts: int
    experts_per_token: int
    tp: int = 1
    ep: int = 1
    format: Format = Format.BF16
    gated: bool = True

    @property
    def num_matrices(self) -> int:
        return 3 if self.gated else 2

    @property
    def pairs_per_rank(self) -> Size:
        """Token-expert pairs that this rank computes when the load is balanced."""
        return self.num_tokens * self.experts_per_token / self.ep

    @property
    def active_experts(self) -> Size:
        """Expected number of this rank's experts that a token chose, with random routing."""
        miss = 1.0 - self.experts_per_token / self.num_experts
        return self.num_experts / self.ep * (1.0 - miss**self.num_tokens)

    @property
    def flops(self) -> Size:
        return 2.0 * self.pairs_per_rank * self.num_matrices * self.hidden_size * self.intermediate_size / self.tp

    @property
    def num_bytes(self) -> Size:
        width = self.intermediate_size / self.tp
        weights = self.active_experts * self.num_matrices * self.hidden_size * width * BITS[self.format] / 8
        return weights + self.pairs_per_rank * 2 * (self.hidden_size + width) * BF16_BYTES


@dataclass(frozen=True)
class Elementwise:
    """A kernel that only moves data: a norm, rope, an activation, a cache write, an embedding lookup, sampling."""

    kind: ClassVar[str] = "elementwise"
    axes: ClassVar[tuple[str, ...]] = ("rows",)
    name: str
    rows: Size
    bytes_per_row: float

    @property
    def flops(self) -> Size:
        return 0.0 * self.rows

    @property
    def num_bytes(self) -> Size:
        return self.rows * self.bytes_per_row


@dataclass(frozen=True)
class Collective:
    """A collective over `num_ranks`; `message_bytes` as nccl-tests defines a collective's size.

    all_reduce: the buffer; all_gather and reduce_scatter: the whole (gathered) buffer; all_to_all: one rank's send
    buffer; send_recv: the message. `span_nodes` is the number of nodes that hold the ranks.
    """

    kind: ClassVar[str] = "collective"
    axes: ClassVar[tuple[str, ...]] = ("message_bytes",)
    op: str
    message_bytes: Size
    num_ranks: int
    span_nodes: int = 1

    def __post_init__(self) -> None:
        if self.op not in COLLECTIVES:
            raise ValueError(f"there is no collective {self.op!r}; known: {', '.join(COLLECTIVES)}")

    @property
    def flops(self) -> Size:
        return 0.0 * self.message_bytes

    @property
    def num_bytes(self) -> Size:
        """Bytes that one rank sends over the link (the bus-bandwidth convention of nccl-tests)."""
        share = (self.num_ranks - 1) / self.num_ranks
        factor = {"all_reduce": 2 * share, "send_recv": 1.0}.get(self.op, share)
        return self.message_bytes * factor


Op = (
    Gemm
    | PrefillAttention
    | DecodeAttention
    | LatentPrefillAttention
    | LatentDecodeAttention
    | SparseLatentPrefill
    | SparseLatentDecode
    | GatedDelta
    | Experts
    | Elementwise
    | Collective
)


@dataclass(frozen=True)
class Launch:
    """An operator at its place in a step: the name that people know, and how many times the step runs it."""

    name: str
    op: Op
    count: float = 1.0
    adds: Size = 1.0
    """Share of the operator's time that lengthens the step: 0 where it runs beside something that takes longer."""


def site(op: Op) -> tuple[tuple[str, Any], ...]:
    """Return the dimensions of `op` that are not interpolated: with its kind, the identity of a measured curve."""
    return tuple((name, value) for name, value in vars(op).items() if name not in op.axes)


def axis_values(op: Op) -> Mapping[str, Size]:
    """Return the dimensions of `op` along which measurements are interpolated."""
    return {name: getattr(op, name) for name in op.axes}
