"""Bytes that one device holds of a model: weights, keys and values of tokens, states of requests."""

from collections.abc import Iterator

from windtunnel.errors import InputError, is_number
from windtunnel.model.feed_forward.experts import Experts
from windtunnel.model.launches.forward import token_launches
from windtunnel.model.operators import BF16_BYTES, FP32_BYTES, Gemm
from windtunnel.model.precision import BITS
from windtunnel.model.shape import OUTPUT_PROJECTIONS, Attention, Shard

VOCABULARY_MULTIPLE = 64
"""Rows to whose multiple vLLM and SGLang pad the tables of tokens (`vocab_parallel_embedding.py`)."""
LEAST_OWN_SEGMENT_BYTES, SEGMENT_MULTIPLE_BYTES, MOST_KEPT_BYTES = 10 * 2**20, 2 * 2**20, 2**20
"""PyTorch's allocator (c10/cuda/CUDACachingAllocator.cpp, 2.4 to 2.10: `kMinLargeAlloc`, `kRoundLarge`, `kSmallSize`)
gives a tensor from the first size on a segment of multiples of the second; a rest up to the third stays with it."""


def weight_bytes(shard: Shard) -> float:
    """Return the bytes of the weights that one device holds.

    Matrices are split `tp` ways (routed experts over all ranks of the group), layers evenly over stages. Every rank
    keeps the whole router, the down-projections of latent attention and at least one key/value head. Norms are left
    out (under 0.01%). With pipeline stages the device is of the first or the last stage, whichever has the larger
    table beside its layers.
    """
    model, parallelism = shard.model, shard.parallelism
    layer_bits = 0.0
    for group in model.layers:
        bits = 0.0
        if group.attention is not None:
            parameters = group.attention.rank_parameters(model.hidden_size, shard.tp)
            bits += parameters * shard.bits("attention_format") + _output_bits(shard, group.attention)
        if group.feed_forward is not None:
            bits += group.feed_forward.weight_bits(shard)
        layer_bits += bits * group.num_layers
    tables = model.vocab_size * model.hidden_size * value_bytes(shard)
    head = 0.0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size * head_bits(shard) / 8
    ends = max(tables, head) if parallelism.pp > 1 else tables + head
    positions = model.learned_positions * model.hidden_size * value_bytes(shard)
    score = model.head_parameters * value_bytes(shard) if model.head == "score" else 0.0
    if inputs := model.layer_inputs:
        table, split, whole = inputs.parameters(model.hidden_size, model.num_layers)
        layer_bits += (whole + split / shard.tp) * shard.bits("weights")
        ends += table * value_bytes(shard)
    if ngrams := model.ngram_tables:
        layer_bits += ngrams.parameters(model) * shard.bits("weights")
        positions += 0.0 if shard.ngrams_on_host else ngrams.num_rows * ngrams.row_bytes / shard.num_group_ranks
    return layer_bits / 8 * shard.stage_fraction + ends / shard.tp + positions + score


def _output_bits(shard: Shard, attention: Attention) -> float:
    """Return the bits that output projections in a format of their own take beside what the others' format would."""
    each = shard.bits("attention_output_format") - shard.bits("attention_format")
    launches = attention.projections(shard, 1.0) if each else ()
    outputs = [launch.op for launch in launches if launch.name in OUTPUT_PROJECTIONS]
    return sum(each * op.n * op.k for op in outputs if isinstance(op, Gemm))


def value_bytes(shard: Shard) -> float:
    """Return the bytes of a value that no format quantises: embeddings, hidden states, logits."""
    return FP32_BYTES if BITS[shard.precision.weights] == 8 * FP32_BYTES else BF16_BYTES


def head_bits(shard: Shard) -> float:
    """Return the bits of a weight of the output layer."""
    bits = shard.precision.bits(shard.precision.lm_head)
    return max(bits, 32.0) if value_bytes(shard) == FP32_BYTES else bits


def loaded_bytes(shard: Shard) -> float:
    """Return the memory that an engine's loaded model takes on one device ("Model loading took" of vLLM).

    Beside `weight_bytes` that is what checkpoints do not have: the rotary tables, the second copy of latent attention's
    up-projection, the padding of the vocabulary and of PyTorch's allocator, and a vision tower, split `tp` ways.
    """
    model, each = shard.model, value_bytes(shard)
    copies = sum(num_layers * part.absorbed_parameters(shard.tp) for num_layers, part in model.attentions)
    padded = (-model.vocab_size % VOCABULARY_MULTIPLE) * model.hidden_size / shard.tp
    padded *= 1 if model.tie_word_embeddings or shard.parallelism.pp > 1 else 2
    values = copies * shard.stage_fraction + padded + model.rotary_values + model.tower_parameters / shard.tp
    padding = sum(count * _padding_bytes(num_bytes) for count, num_bytes in _tensors(shard))
    return weight_bytes(shard) + values * each + padding


def _tensors(shard: Shard) -> Iterator[tuple[float, float]]:
    """Yield the (number, bytes) of equal tensors of weights on one device, the tables last."""
    model = shard.model
    for launch in token_launches(shard, 1.0):
        count, op = launch.count * shard.stage_fraction, launch.op
        if isinstance(op, Gemm):
            yield count, op.n * op.k * shard.precision.bits(op.format) / 8
        elif isinstance(op, Experts):
            values = op.num_experts / op.ep * op.hidden_size * op.intermediate_size / op.tp
            matrix = values * shard.precision.bits(op.format) / 8
            yield count, (op.num_matrices - 1) * matrix
            yield count, matrix
    rows = (model.vocab_size + -model.vocab_size % VOCABULARY_MULTIPLE) / shard.tp
    num_tables = 1 if model.tie_word_embeddings or shard.parallelism.pp > 1 else 2
    yield num_tables, rows * model.hidden_size * value_bytes(shard)


def _padding_bytes(num_bytes: float) -> float:
    """Return the bytes that PyTorch's allocator adds to a tensor."""
    rest = -num_bytes % SEGMENT_MULTIPLE_BYTES if num_bytes >= LEAST_OWN_SEGMENT_BYTES else 0.0
    return rest if rest <= MOST_KEPT_BYTES else 0.0


def kv_bytes_per_token(shard: Shard, max_model_len: int) -> float:
    """Return the bytes of one token's keys and values on one device, in layers whose cache grows to `max_model_len`."""
    growing = ((num, kind) for num, kind in shard.model.attentions if not kind.is_bounded(max_model_len))
    return sum(num * token_bytes(attention, shard) for num, attention in growing) * shard.stage_fraction


def token_bytes(attention: Attention, shard: Shard) -> float:
    """Return the bytes that a token keeps in one layer; raises InputError where a kind counts what no cache has."""
    num_bytes = attention.bytes_per_token(shard)
    if not is_number(num_bytes):
        raise InputError(f"the kind of attention {type(attention).__name__} keeps {num_bytes} bytes of a token")
    return num_bytes


def state_bytes_per_request(shard: Shard, max_model_len: int) -> float:
    """Return the bytes of a request on one device that do not depend on its length.

    These are the states of recurrences, and sliding windows shorter than `max_model_len`, which count as full.
    """
    total = recurrent_state_bytes(shard)
    for num_layers, attention in shard.model.attentions:
        if attention.window_tokens is not None and attention.is_bounded(max_model_len):
            window_bytes = attention.window_tokens * token_bytes(attention, shard)
            total += num_layers * window_bytes * shard.stage_fraction
    return total


def recurrent_state_bytes(shard: Shard) -> float:
    """Return the bytes of a request's recurrent states on one device."""
    states = sum(num_layers * attention.state_bytes(shard) for num_layers, attention in shard.model.attentions)
    return states * shard.stage_fraction
