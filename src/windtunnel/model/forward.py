"""A forward step as operators: the launches of one rank of every pipeline stage, from model, parallelism and formats.

The launches of pipeline stages follow one another, so that their sum is a batch's time through the pipeline. A step
has four parts, by what they depend on: `token_launches` on the tokens of the step, `head_launches`
on the positions sampled, `decode_launches` and `prefill_launches` (attention cores) on the context. Batch dimensions
may be arrays, so the same functions price one step for `explain` and a whole grid for the simulator.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from windtunnel.model.operators import (
    BF16_BYTES,
    Collective,
    DecodeAttention,
    Elementwise,
    Experts,
    GatedDelta,
    Gemm,
    LatentDecodeAttention,
    LatentPrefillAttention,
    Launch,
    PrefillAttention,
    Size,
    SparseLatentDecode,
    SparseLatentPrefill,
    prefill_context_tokens,
)
from windtunnel.model.parallelism import Parallelism
from windtunnel.model.precision import ACTIVATION_BITS, BITS, Format, Precision
from windtunnel.model.shape import (
    Attention,
    DenseFeedForward,
    ExpertsFeedForward,
    GatedDeltaAttention,
    GroupedQueryAttention,
    Indexer,
    LatentAttention,
    LayerGroup,
    ModelSpec,
)

GROUP_LAUNCHES = frozenset({"dispatch_all_gather", "experts", "combine_reduce_scatter"})
"""Launches whose cost follows the tokens of all ranks of an attention data-parallel group."""

SQUARES_BYTES = 8.0
"""Bytes of one token's sums of squares on a rank, of the query and of the key, in fp32."""


@dataclass(frozen=True)
class Shard:
    """A model as it is deployed: what the operators of a step are computed from."""

    model: ModelSpec
    precision: Precision
    parallelism: Parallelism
    devices_per_node: int = 8
    tf32: bool = False
    """Whether tensor cores multiply what is left in fp32."""
    beside_tokens: int = 0
    """Most tokens at which shared experts run on a stream of their own beside the routed experts."""

    @property
    def tp(self) -> int:
        return self.parallelism.tp

    @property
    def num_group_ranks(self) -> int:
        """Ranks that share the experts."""
        return self.parallelism.tp * self.parallelism.attention_dp

    @property
    def stage_fraction(self) -> float:
        """Share of the layers that the fullest pipeline stage holds."""
        return -(-self.model.num_layers // self.parallelism.pp) / self.model.num_layers

    def span_nodes(self, num_ranks: int) -> int:
        """Return the number of nodes that hold `num_ranks` neighbouring ranks."""
        return -(-num_ranks // self.devices_per_node)


def token_launches(shard: Shard, num_tokens: Size) -> list[Launch]:
    """Return what depends on the tokens of a step alone: all but the cores of attention and the head.

    Args:
        shard: the deployed model.
        num_tokens: tokens that one attention data-parallel rank computes.
    """
    launches = [*_embedding(shard, num_tokens)]
    for group in shard.model.layers:
        count = group.num_layers
        layer = _layer(shard, group, num_tokens)
        launches += [replace(launch, count=launch.count * count) for launch in layer]
    launches.append(_norm(shard, "final_norm", num_tokens, shard.precision.lm_head))
    if shard.parallelism.pp > 1:
        # Hidden states and residual go to the next stage; a rank sends its share of them.
        message = num_tokens * shard.model.hidden_size * 2 * BF16_BYTES / shard.tp
        num_sends = shard.parallelism.pp - 1
        between_nodes = min(shard.span_nodes(shard.parallelism.num_devices) - 1, num_sends)
        within_node = num_sends - between_nodes
        for count, span_nodes in ((within_node, 1), (between_nodes, 2)):
            if count > 0:
                send = Collective("send_recv", message, 2, span_nodes)
                launches.append(Launch("pipeline_send_recv", send, count))
    return launches


def head_launches(shard: Shard, num_sampled: Size) -> list[Launch]:
    """Return the LM head over the sampled positions only, the gathering of its shards, and greedy sampling."""
    model, tp = shard.model, shard.tp
    vocabulary = -(-model.vocab_size // tp)
    launches = [Launch("lm_head", Gemm(num_sampled, vocabulary, model.hidden_size, shard.precision.lm_head))]
    if tp > 1:
        message = num_sampled * model.vocab_size * BF16_BYTES
        launches.append(Launch("logits_all_gather", _collective(shard, "all_gather", message, tp)))
    # bf16 logits are read and written as fp32, which arg-max reads again.
    launches.append(Launch("sample", Elementwise("sample", num_sampled, model.vocab_size * (2.0 + 4.0 + 4.0))))
    return launches


def decode_launches(shard: Shard, batch: Size, context_tokens: Size) -> list[Launch]:
    """Return the attention cores of `batch` decoding requests with `context_tokens` keys each, the new one included."""
    return [
        Launch(
            f"{_core_name(group.attention)}_decode",
            _decode_core(shard, group.attention, batch, context_tokens),
            group.num_layers,
        )
        for group in shard.model.layers
    ]


def prefill_launches(shard: Shard, batch: Size, num_tokens: Size) -> list[Launch]:
    """Return the attention cores of prefill chunks, `batch` and `num_tokens` as in `operators.PrefillBatch`.

    Latent attention also expands the compressed keys and values, cached ones too (`kv_b_proj`); decode and sparse
    attention absorb that product.
    """
    launches = []
    for group in shard.model.layers:
        attention, count = group.attention, group.num_layers
        if isinstance(attention, LatentAttention) and attention.indexer is None:
            width = attention.num_heads // shard.tp * (attention.qk_nope_head_dim + attention.v_head_dim)
            keys = prefill_context_tokens(batch, num_tokens)
            expand = Gemm(keys, width, attention.kv_lora_rank, shard.precision.attention_format)
            launches.append(Launch("kv_b_proj", expand, count))
        core = _prefill_core(shard, attention, batch, num_tokens)
        launches.append(Launch(f"{_core_name(attention)}_prefill", core, count))
    return launches


@dataclass(frozen=True)
class StepBatch:
    """Tokens that one attention data-parallel rank computes in a step."""

    decode_requests: int = 0
    decode_context_tokens: float = 0.0
    """Mean context of the decoding requests, the token being computed included."""
    prefill_tokens: int = 0
    prefill_pairs: float = 0.0
    """Query-key pairs of the prefill chunks: a chunk of c tokens after p has c (p + c / 2)."""
    sampled: int = 0
    """Decoding requests and prompts that end in this step."""

    @property
    def num_tokens(self) -> int:
        return self.decode_requests + self.prefill_tokens


def forward_launches(shard: Shard, batch: StepBatch) -> list[Launch]:
    """Return a whole step, in the order of execution of its first layer."""
    tokens, head = token_launches(shard, batch.num_tokens), head_launches(shard, batch.sampled)
    return tokens + attention_launches(shard, batch) + head


def attention_launches(shard: Shard, batch: StepBatch) -> list[Launch]:
    """Return the attention cores of a step, those of its prefill chunks first."""
    launches = []
    if batch.prefill_tokens:
        length = 2 * batch.prefill_pairs / batch.prefill_tokens
        launches += prefill_launches(shard, batch.prefill_tokens / length, length)
    if batch.decode_requests:
        launches += decode_launches(shard, batch.decode_requests, batch.decode_context_tokens)
    return launches


def _embedding(shard: Shard, num_tokens: Size) -> Iterator[Launch]:
    width = shard.model.hidden_size
    yield Launch("embedding", Elementwise("embedding", num_tokens, 2 * width * BF16_BYTES))
    yield from _all_reduce(shard, "embedding_all_reduce", num_tokens)


def _all_reduce(shard: Shard, name: str, num_tokens: Size) -> Iterator[Launch]:
    """Yield the sum of hidden states over tensor-parallel ranks, where there are several."""
    if shard.tp > 1:
        message = num_tokens * shard.model.hidden_size * BF16_BYTES
        yield Launch(name, _collective(shard, "all_reduce", message, shard.tp))


def _layer(shard: Shard, group: LayerGroup, num_tokens: Size) -> Iterator[Launch]:
    yield _norm(shard, "input_norm", num_tokens, shard.precision.attention_format)
    yield from _attention_projections(shard, group.attention, num_tokens)
    yield from _all_reduce(shard, "attention_all_reduce", num_tokens)
    if group.num_norms > 1:
        is_dense = isinstance(group.feed_forward, DenseFeedForward)
        output = shard.precision.weights if is_dense else Format.BF16
        yield _norm(shard, "post_attention_norm", num_tokens, output, group.num_norms - 1)
    if isinstance(group.feed_forward, DenseFeedForward):
        yield from _dense_feed_forward(shard, group.feed_forward, num_tokens)
    else:
        yield from _experts_feed_forward(shard, group.feed_forward, num_tokens)


def _norm(shard: Shard, name: str, num_tokens: Size, output: Format, count: int = 1) -> Launch:
    """Return residual add and norm in one kernel, which reads two streams and writes residual and normed activation."""
    width = shard.model.hidden_size
    num_bytes = width * (3 * BF16_BYTES + ACTIVATION_BITS[output] / 8)
    return Launch(name, Elementwise("norm", num_tokens, num_bytes), count)


def _attention_projections(shard: Shard, attention: Attention, num_tokens: Size) -> Iterator[Launch]:
    if isinstance(attention, GroupedQueryAttention):
        yield from _grouped_query_projections(shard, attention, num_tokens)
    elif isinstance(attention, LatentAttention):
        yield from _latent_projections(shard, attention, num_tokens)
    else:
        yield from _gated_delta_projections(shard, attention, num_tokens)


def _grouped_query_projections(shard: Shard, attention: GroupedQueryAttention, num_tokens: Size) -> Iterator[Launch]:
    width, weights = shard.model.hidden_size, shard.precision.attention_format
    query = attention.query_size // shard.tp
    kv = max(attention.num_kv_heads // shard.tp, 1) * attention.head_dim
    gate = query if attention.output_gate else 0
    yield Launch("qkv_proj", Gemm(num_tokens, query + gate + 2 * kv, width, weights))
    if attention.qk_norm_over_heads and shard.tp > 1:
        # One kernel before the sum over ranks and one after it (vLLM 0.16 `MiniMaxText01RMSNormTP.forward_qk`).
        yield Launch("qk_squares", Elementwise("qk_squares", num_tokens, (query + kv) * BF16_BYTES))
        yield Launch("qk_norm_all_reduce", _collective(shard, "all_reduce", num_tokens * SQUARES_BYTES, shard.tp))
    if attention.qk_norm:
        yield Launch("qk_norm", Elementwise("qk_norm", num_tokens, 2 * (query + kv) * BF16_BYTES))
    yield Launch("rope", Elementwise("rope", num_tokens, 2 * (query + kv) * BF16_BYTES))
    cached = 2 * kv * (BF16_BYTES + BITS[shard.precision.kv_cache] / 8)
    yield Launch("kv_cache_write", Elementwise("kv_cache_write", num_tokens, cached))
    if gate:
        yield Launch("attention_gate", Elementwise("attention_gate", num_tokens, 3 * query * BF16_BYTES))
    yield Launch("o_proj", Gemm(num_tokens, width, query, weights))


def _latent_projections(shard: Shard, attention: LatentAttention, num_tokens: Size) -> Iterator[Launch]:
    width, weights = shard.model.hidden_size, shard.precision.attention_format
    heads = attention.num_heads // shard.tp
    query = heads * (attention.qk_nope_head_dim + attention.qk_rope_head_dim)
    latent = attention.kv_lora_rank + attention.qk_rope_head_dim
    if attention.q_lora_rank is None:
        yield Launch("q_kv_a_proj", Gemm(num_tokens, query + latent, width, weights))
        normed = attention.kv_lora_rank
    else:
        yield Launch("q_kv_a_proj", Gemm(num_tokens, attention.q_lora_rank + latent, width, weights))
        yield Launch("q_b_proj", Gemm(num_tokens, query, attention.q_lora_rank, weights))
        normed = attention.q_lora_rank + attention.kv_lora_rank
    if attention.indexer:
        # Norms, rotation and the cache's write were measured as one with the indexer.
        yield Launch("o_proj", Gemm(num_tokens, width, heads * attention.v_head_dim, weights))
        return
    yield Launch("latent_norm", Elementwise("latent_norm", num_tokens, 2 * normed * BF16_BYTES))
    rotated = 2 * (heads + 1) * attention.qk_rope_head_dim * BF16_BYTES
    yield Launch("rope", Elementwise("rope", num_tokens, rotated))
    cached = latent * (BF16_BYTES + BITS[shard.precision.kv_cache] / 8)
    yield Launch("kv_cache_write", Elementwise("kv_cache_write", num_tokens, cached))
    yield Launch("o_proj", Gemm(num_tokens, width, heads * attention.v_head_dim, weights))


def _gated_delta_projections(shard: Shard, attention: GatedDeltaAttention, num_tokens: Size) -> Iterator[Launch]:
    width, weights = shard.model.hidden_size, shard.precision.attention_format
    keys = attention.num_key_heads * attention.key_head_dim // shard.tp
    heads = attention.num_value_heads // shard.tp
    values = heads * attention.value_head_dim
    yield Launch("qkvz_proj", Gemm(num_tokens, 2 * keys + 2 * values, width, weights))
    yield Launch("ba_proj", Gemm(num_tokens, 2 * heads, width, Format.BF16))
    yield Launch("gated_norm", Elementwise("gated_norm", num_tokens, 3 * values * BF16_BYTES))
    yield Launch("o_proj", Gemm(num_tokens, width, values, weights))


def _dense_feed_forward(shard: Shard, feed_forward: DenseFeedForward, num_tokens: Size) -> Iterator[Launch]:
    yield from _matrices(shard, "", num_tokens, feed_forward.intermediate_size, feed_forward.gated)
    yield from _all_reduce(shard, "feed_forward_all_reduce", num_tokens)


def _matrices(shard: Shard, prefix: str, num_tokens: Size, intermediate_size: int, gated: bool) -> Iterator[Launch]:
    """Yield the matrix products of a dense feed-forward or of shared experts, and the activation between them."""
    width, weights = shard.model.hidden_size, shard.precision.weights
    inner = -(-intermediate_size // shard.tp)
    up = 2 * inner if gated else inner
    yield Launch(f"{prefix}gate_up_proj" if gated else f"{prefix}up_proj", Gemm(num_tokens, up, width, weights))
    written = inner * ACTIVATION_BITS[weights] / 8
    yield Launch(f"{prefix}activation", Elementwise("activation", num_tokens, up * BF16_BYTES + written))
    yield Launch(f"{prefix}down_proj", Gemm(num_tokens, width, inner, weights))


def _experts_feed_forward(shard: Shard, feed_forward: ExpertsFeedForward, num_tokens: Size) -> Iterator[Launch]:
    width = shard.model.hidden_size
    ranks = shard.num_group_ranks
    all_tokens = num_tokens * shard.parallelism.attention_dp
    message = all_tokens * width * BF16_BYTES
    yield from _router(shard, feed_forward, num_tokens)
    yield Launch("top_k", Elementwise("top_k", num_tokens, 3 * 4.0 * feed_forward.num_experts))
    if shard.parallelism.attention_dp > 1:
        yield Launch("dispatch_all_gather", _collective(shard, "all_gather", message, ranks))
    yield Launch(
        "experts",
        Experts(
            num_tokens=all_tokens,
            hidden_size=width,
            intermediate_size=feed_forward.intermediate_size,
            num_experts=feed_forward.num_experts,
            experts_per_token=feed_forward.experts_per_token,
            tp=shard.parallelism.experts_tp,
            ep=shard.parallelism.ep,
            format=shard.precision.experts_format,
            gated=feed_forward.gated,
        ),
    )
    if feed_forward.shared_intermediate_size:
        adds = np.where(np.asarray(num_tokens) <= shard.beside_tokens, 0.0, 1.0)
        shared = feed_forward.shared_intermediate_size
        for launch in _matrices(shard, "shared_", num_tokens, shared, feed_forward.gated):
            yield replace(launch, adds=adds)
    if shard.parallelism.attention_dp > 1:
        yield Launch("combine_reduce_scatter", _collective(shard, "reduce_scatter", message, ranks))
    elif ranks > 1:
        yield Launch("experts_all_reduce", _collective(shard, "all_reduce", message, ranks))


def _router(shard: Shard, feed_forward: ExpertsFeedForward, num_tokens: Size) -> Iterator[Launch]:
    """Yield the router; one in fp32 converts its input first (vLLM 0.18 `MiniMaxM2MoE.forward`)."""
    width, computed = shard.model.hidden_size, Format.BF16
    if feed_forward.fp32_router:
        yield Launch("router_input", Elementwise("router_input", num_tokens, width * (BF16_BYTES + 4.0)))
        computed = Format.TF32 if shard.tf32 else Format.FP32
    yield Launch("router", Gemm(num_tokens, feed_forward.num_experts, width, computed))


def _collective(shard: Shard, op: str, message_bytes: Size, num_ranks: int) -> Collective:
    return Collective(op, message_bytes, num_ranks, shard.span_nodes(num_ranks))


def _core_name(attention: Attention) -> str:
    if isinstance(attention, LatentAttention):
        return "sparse_latent_attention" if attention.indexer else "latent_attention"
    if isinstance(attention, GatedDeltaAttention):
        return "gated_delta"
    return "window_attention" if attention.window_tokens else "attention"


def _decode_core(
    shard: Shard, attention: Attention, batch: Size, context_tokens: Size
) -> DecodeAttention | LatentDecodeAttention | SparseLatentDecode | GatedDelta:
    if isinstance(attention, LatentAttention):
        if attention.indexer:
            sparse = _sparse_latent(shard, attention, attention.indexer)
            return SparseLatentDecode(**sparse, batch=batch, context_tokens=context_tokens)
        return LatentDecodeAttention(
            batch=batch,
            context_tokens=context_tokens,
            num_heads=attention.num_heads // shard.tp,
            kv_lora_rank=attention.kv_lora_rank,
            rope_head_dim=attention.qk_rope_head_dim,
            qk_nope_head_dim=attention.qk_nope_head_dim,
            v_head_dim=attention.v_head_dim,
            kv_format=shard.precision.kv_cache,
        )
    if isinstance(attention, GatedDeltaAttention):
        return _gated_delta(shard, attention, batch, 1.0 + 0.0 * np.asarray(context_tokens), decode=True)
    return DecodeAttention(batch=batch, context_tokens=context_tokens, **_grouped_query_heads(shard, attention))


def _prefill_core(
    shard: Shard, attention: Attention, batch: Size, num_tokens: Size
) -> PrefillAttention | LatentPrefillAttention | SparseLatentPrefill | GatedDelta:
    if isinstance(attention, LatentAttention):
        if attention.indexer:
            sparse = _sparse_latent(shard, attention, attention.indexer)
            return SparseLatentPrefill(**sparse, batch=batch, num_tokens=num_tokens)
        return LatentPrefillAttention(
            batch=batch,
            num_tokens=num_tokens,
            num_heads=attention.num_heads // shard.tp,
            qk_head_dim=attention.qk_nope_head_dim + attention.qk_rope_head_dim,
            v_head_dim=attention.v_head_dim,
            kv_format=shard.precision.kv_cache,
        )
    if isinstance(attention, GatedDeltaAttention):
        return _gated_delta(shard, attention, batch, num_tokens, decode=False)
    return PrefillAttention(batch=batch, num_tokens=num_tokens, **_grouped_query_heads(shard, attention))


def _grouped_query_heads(shard: Shard, attention: GroupedQueryAttention) -> dict[str, Any]:
    """Return the heads of one rank, the same in prefill and decode."""
    return {
        "num_heads": attention.num_heads // shard.tp,
        "num_kv_heads": max(attention.num_kv_heads // shard.tp, 1),
        "head_dim": attention.head_dim,
        "window_tokens": attention.window_tokens or 0,
        "kv_format": shard.precision.kv_cache,
    }


def _sparse_latent(shard: Shard, attention: LatentAttention, indexer: Indexer) -> dict[str, Any]:
    """Return the dimensions that prefill and decode share; the indexer is not split over `tp`."""
    return {
        "num_heads": attention.num_heads // shard.tp,
        "kv_lora_rank": attention.kv_lora_rank,
        "rope_head_dim": attention.qk_rope_head_dim,
        "qk_nope_head_dim": attention.qk_nope_head_dim,
        "v_head_dim": attention.v_head_dim,
        "hidden_size": shard.model.hidden_size,
        "q_lora_rank": attention.q_lora_rank or 0,
        "index_num_heads": indexer.num_heads,
        "index_head_dim": indexer.head_dim,
        "top_k": indexer.top_k,
        "kv_format": shard.precision.kv_cache,
    }


def _gated_delta(
    shard: Shard, attention: GatedDeltaAttention, batch: Size, num_tokens: Size, decode: bool
) -> GatedDelta:
    return GatedDelta(
        batch=batch,
        num_tokens=num_tokens,
        num_key_heads=max(attention.num_key_heads // shard.tp, 1),
        num_value_heads=max(attention.num_value_heads // shard.tp, 1),
        key_head_dim=attention.key_head_dim,
        value_head_dim=attention.value_head_dim,
        conv_kernel_size=attention.conv_kernel_size,
        hidden_size=shard.model.hidden_size,
        decode=decode,
    )
