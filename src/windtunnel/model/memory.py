"""Bytes that one device holds of a model: weights, keys and values of tokens, states of requests."""

from windtunnel.model.forward import Shard
from windtunnel.model.parameters import (
    attention_parameters,
    indexer_parameters,
    matrix_parameters,
    router_parameters,
    shared_expert_parameters,
)
from windtunnel.model.precision import BITS
from windtunnel.model.shape import (
    Attention,
    DenseFeedForward,
    ExpertsFeedForward,
    GatedDeltaAttention,
    GroupedQueryAttention,
    LatentAttention,
)

FP32_BYTES = 4.0
BF16_BYTES = 2.0


def weight_bytes(shard: Shard) -> float:
    """Return the bytes of the weights that one device holds.

    Matrices are split `tp` ways (routed experts over all ranks of the group), layers evenly over stages. Every rank
    keeps the whole router, the down-projections of latent attention and at least one key/value head. Norms are left
    out (under 0.01%). With pipeline stages the device is of the first or the last stage, whichever has the larger
    table beside its layers.
    """
    model, precision, parallelism = shard.model, shard.precision, shard.parallelism
    layer_bits = 0.0
    for group in model.layers:
        bits = _attention_values(shard, group.attention) * BITS[precision.attention_format]
        if isinstance(group.feed_forward, DenseFeedForward):
            bits += matrix_parameters(group.feed_forward, model.hidden_size) * BITS[precision.weights] / shard.tp
        else:
            bits += _experts_bits(shard, group.feed_forward)
        layer_bits += bits * group.num_layers
    tables = model.vocab_size * model.hidden_size * BF16_BYTES
    head = 0.0 if model.tie_word_embeddings else tables * BITS[precision.lm_head] / 16
    ends = max(tables, head) if parallelism.pp > 1 else tables + head
    positions = model.learned_positions * model.hidden_size * BF16_BYTES
    return layer_bits / 8 * shard.stage_fraction + ends / shard.tp + positions


def _attention_values(shard: Shard, attention: Attention) -> float:
    """Return the parameters of one attention layer on one rank, repeated ones included (vLLM `ReplicatedLinear`)."""
    width, total = shard.model.hidden_size, attention_parameters(attention, shard.model.hidden_size)
    repeated, copies = 0, 1.0
    if isinstance(attention, LatentAttention):
        repeated = width * ((attention.q_lora_rank or 0) + attention.kv_lora_rank + attention.qk_rope_head_dim)
        repeated += indexer_parameters(attention, width)
        copies = shard.tp
    elif isinstance(attention, GroupedQueryAttention):
        repeated, copies = 2 * width * attention.kv_size, max(shard.tp / attention.num_kv_heads, 1.0)
    return (total - repeated + repeated * copies) / shard.tp


def _experts_bits(shard: Shard, feed_forward: ExpertsFeedForward) -> float:
    width, precision = shard.model.hidden_size, shard.precision
    routed = feed_forward.num_experts * matrix_parameters(feed_forward, width)
    shared = shared_expert_parameters(feed_forward, width)
    return (
        routed * BITS[precision.experts_format] / shard.num_group_ranks
        + shared * BITS[precision.weights] / shard.tp
        + router_parameters(feed_forward, width) * 16
    )


def kv_bytes_per_token(shard: Shard, max_model_len: int) -> float:
    """Return the bytes of one token's keys and values on one device, in layers whose cache grows to `max_model_len`."""
    growing = [group for group in shard.model.layers if not is_bounded(group.attention, max_model_len)]
    values = sum(group.num_layers * _token_values(shard, group.attention) for group in growing)
    index_bytes = sum(group.num_layers * _index_bytes(group.attention) for group in growing)
    return (values * BITS[shard.precision.kv_cache] / 8 + index_bytes) * shard.stage_fraction


def state_bytes_per_request(shard: Shard, max_model_len: int) -> float:
    """Return the bytes of a request on one device that do not depend on its length.

    These are linear-attention state, and sliding windows shorter than `max_model_len`, which count as full.
    """
    total = linear_state_bytes(shard)
    for group in shard.model.layers:
        attention = group.attention
        if isinstance(attention, GroupedQueryAttention) and is_bounded(attention, max_model_len):
            values = (attention.window_tokens or 0) * _token_values(shard, attention)
            total += group.num_layers * values * BITS[shard.precision.kv_cache] / 8 * shard.stage_fraction
    return total


def linear_state_bytes(shard: Shard) -> float:
    """Return the bytes of a request's linear-attention states on one device."""
    total = 0.0
    for group in shard.model.layers:
        attention = group.attention
        if isinstance(attention, GatedDeltaAttention):
            width = 2 * attention.num_key_heads * attention.key_head_dim
            width += attention.num_value_heads * attention.value_head_dim
            state = attention.num_value_heads * attention.key_head_dim * attention.value_head_dim * FP32_BYTES
            convolution = width * (attention.conv_kernel_size - 1) * BF16_BYTES
            total += group.num_layers * (state + convolution) / shard.tp
    return total * shard.stage_fraction


def layer_bytes(shard: Shard, attention: Attention) -> float:
    """Return the bytes of one token in one layer on one device."""
    return _token_values(shard, attention) * BITS[shard.precision.kv_cache] / 8 + _index_bytes(attention)


def is_bounded(attention: Attention, max_model_len: int) -> bool:
    """Whether a layer's cache stops growing before `max_model_len` tokens."""
    if isinstance(attention, GroupedQueryAttention):
        return attention.window_tokens is not None and attention.window_tokens < max_model_len
    return isinstance(attention, GatedDeltaAttention)


def _token_values(shard: Shard, attention: Attention) -> int:
    """Return the numbers cached for one token in one layer on one device; the latent vector is not split over `tp`."""
    if isinstance(attention, LatentAttention):
        return attention.kv_lora_rank + attention.qk_rope_head_dim
    if isinstance(attention, GroupedQueryAttention):
        return 2 * max(attention.num_kv_heads // shard.tp, 1) * attention.head_dim
    return 0


def _index_bytes(attention: Attention) -> int:
    """Return the bytes of a token's indexer key, fp8 with its fp32 scale (vLLM 0.24 `DeepseekV32IndexerCache`)."""
    indexer = attention.indexer if isinstance(attention, LatentAttention) else None
    return indexer.head_dim + 4 if indexer else 0
