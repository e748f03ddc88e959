"""Bytes that one device holds of a model: weights, keys and values of tokens, states of requests."""

from windtunnel.model.operators import BF16_BYTES
from windtunnel.model.precision import BITS
from windtunnel.model.shape import Shard


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
        bits = 0.0
        if group.attention is not None:
            parameters = group.attention.rank_parameters(model.hidden_size, shard.tp)
            bits += parameters * BITS[precision.attention_format]
        if group.feed_forward is not None:
            bits += group.feed_forward.weight_bits(shard)
        layer_bits += bits * group.num_layers
    tables = model.vocab_size * model.hidden_size * BF16_BYTES
    head = 0.0 if model.tie_word_embeddings else tables * BITS[precision.lm_head] / 16
    ends = max(tables, head) if parallelism.pp > 1 else tables + head
    positions = model.learned_positions * model.hidden_size * BF16_BYTES
    return layer_bits / 8 * shard.stage_fraction + ends / shard.tp + positions


def kv_bytes_per_token(shard: Shard, max_model_len: int) -> float:
    """Return the bytes of one token's keys and values on one device, in layers whose cache grows to `max_model_len`."""
    growing = ((num, kind) for num, kind in shard.model.attentions if not kind.is_bounded(max_model_len))
    return sum(num * attention.bytes_per_token(shard) for num, attention in growing) * shard.stage_fraction


def state_bytes_per_request(shard: Shard, max_model_len: int) -> float:
    """Return the bytes of a request on one device that do not depend on its length.

    These are the states of recurrences, and sliding windows shorter than `max_model_len`, which count as full.
    """
    total = recurrent_state_bytes(shard)
    for num_layers, attention in shard.model.attentions:
        if attention.window_tokens is not None and attention.is_bounded(max_model_len):
            window_bytes = attention.window_tokens * attention.bytes_per_token(shard)
            total += num_layers * window_bytes * shard.stage_fraction
    return total


def recurrent_state_bytes(shard: Shard) -> float:
    """Return the bytes of a request's recurrent states on one device."""
    states = sum(num_layers * attention.state_bytes(shard) for num_layers, attention in shard.model.attentions)
    return states * shard.stage_fraction
