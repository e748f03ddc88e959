"""What one device's memory is used for: weights, activations, reserves, and the KV blocks that are left."""

from windtunnel.model.forward import Shard
from windtunnel.model.parameters import (
    attention_parameters,
    dense_parameters,
    expert_parameters,
    indexer_parameters,
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
    """Bytes of the weights that one device holds.

    Matrices are split `tp` ways (routed experts over all ranks of the group), layers evenly over stages. Every rank
    keeps the whole router, the down-projections of latent attention and at least one key/value head. Norms are left
    out (under 0.01%). Of several pipeline stages it is the first or the last, whichever has the larger table beside
    its layers.
    """
    model, precision, parallelism = shard.model, shard.precision, shard.parallelism
    layer_bits = 0.0
    for group in model.layers:
        bits = _attention_values(shard, group.attention) * BITS[precision.attention_format]
        if isinstance(group.feed_forward, DenseFeedForward):
            bits += dense_parameters(group.feed_forward, model.hidden_size) * BITS[precision.weights] / shard.tp
        else:
            bits += _experts_bits(shard, group.feed_forward)
        layer_bits += bits * group.num_layers
    tables = model.vocab_size * model.hidden_size * BF16_BYTES
    head = 0.0 if model.tie_word_embeddings else tables * BITS[precision.lm_head] / 16
    ends = max(tables, head) if parallelism.pp > 1 else tables + head
    positions = model.learned_positions * model.hidden_size * BF16_BYTES
    return layer_bits / 8 * shard.stage_fraction + ends / shard.tp + positions


def _attention_values(shard: Shard, attention: Attention) -> float:
    """Parameters of one attention layer on one rank, those that ranks repeat included (vLLM `ReplicatedLinear`)."""
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
    routed = feed_forward.num_experts * expert_parameters(feed_forward, width)
    shared = shared_expert_parameters(feed_forward, width)
    return (
        routed * BITS[precision.experts_format] / shard.num_group_ranks
        + shared * BITS[precision.weights] / shard.tp
        + router_parameters(feed_forward, width) * 16
    )


def kv_bytes_per_token(shard: Shard, max_model_len: int) -> float:
    """Bytes that one token's keys and values take on one device, in layers whose cache grows to `max_model_len`
    tokens.
    """
    growing = [group for group in shard.model.layers if not _is_bounded(group.attention, max_model_len)]
    values = sum(group.num_layers * _token_values(shard, group.attention) for group in growing)
    of_indexers = sum(group.num_layers * _index_bytes(group.attention) for group in growing)
    return (values * BITS[shard.precision.kv_cache] / 8 + of_indexers) * shard.stage_fraction


def state_bytes_per_request(shard: Shard, max_model_len: int) -> float:
    """Bytes that a request takes on one device whatever its length: linear-attention state, and sliding windows
    shorter than `max_model_len`, as full ones.
    """
    total = linear_state_bytes(shard)
    for group in shard.model.layers:
        attention = group.attention
        if isinstance(attention, GroupedQueryAttention) and _is_bounded(attention, max_model_len):
            values = (attention.window_tokens or 0) * _token_values(shard, attention)
            total += group.num_layers * values * BITS[shard.precision.kv_cache] / 8 * shard.stage_fraction
    return total


def linear_state_bytes(shard: Shard) -> float:
    """Bytes that the states of a request's linear-attention layers take on one device."""
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


def _sum_bytes(shard: Shard, layers: list[tuple[int, float]]) -> float:
    return sum(count * size for count, size in layers) * shard.stage_fraction


def _layer_bytes(shard: Shard, attention: Attention) -> float:
    """Bytes of one token in one layer on one device."""
    return _token_values(shard, attention) * BITS[shard.precision.kv_cache] / 8 + _index_bytes(attention)


def _is_bounded(attention: Attention, max_model_len: int) -> bool:
    if isinstance(attention, GroupedQueryAttention):
        return attention.window_tokens is not None and attention.window_tokens < max_model_len
    return isinstance(attention, GatedDeltaAttention)


def _token_values(shard: Shard, attention: Attention) -> int:
    """Numbers cached for one token in one layer on one device; the latent vector is not split over `tp`."""
    if isinstance(attention, LatentAttention):
        return attention.kv_lora_rank + attention.qk_rope_head_dim
    if isinstance(attention, GroupedQueryAttention):
        return 2 * max(attention.num_kv_heads // shard.tp, 1) * attention.head_dim
    return 0


def _index_bytes(attention: Attention) -> int:
    """One token's key of the indexer in fp8 with its fp32 scale (vLLM 0.24 `DeepseekV32IndexerCache`)."""
    indexer = attention.indexer if isinstance(attention, LatentAttention) else None
    return indexer.head_dim + 4 if indexer else 0
