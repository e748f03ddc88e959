"""What one device's memory is used for: weights, activations, reserves, and the KV blocks that are left."""

from dataclasses import dataclass

from windtunnel.errors import InputError
from windtunnel.ops.forward import Shard
from windtunnel.ops.parameters import (
    attention_parameters,
    dense_parameters,
    expert_parameters,
    indexer_parameters,
    router_parameters,
    shared_expert_parameters,
)
from windtunnel.spec.deployment import EngineSettings
from windtunnel.spec.hardware import Device
from windtunnel.spec.model import (
    Attention,
    DenseFeedForward,
    ExpertsFeedForward,
    GatedDeltaAttention,
    GroupedQueryAttention,
    LatentAttention,
)
from windtunnel.spec.precision import BITS
from windtunnel.units import format_bytes

FP32_BYTES = 4.0
BF16_BYTES = 2.0


@dataclass(frozen=True)
class MemoryPlan:
    """One device's memory. Bytes; blocks are those of one rank's KV pool."""

    device_bytes: float
    weight_bytes: float
    activation_bytes: float
    """Peak of a step of `max_num_batched_tokens`."""
    reserved_bytes: float
    kv_cache_bytes: float
    """The pool."""
    kv_bytes_per_token: float
    state_bytes_per_request: float
    """Sliding windows and linear-attention state: fixed for each running request."""
    block_size: int
    """Tokens of one block: the engine's, or a whole request's where no layer grows with the context."""
    num_blocks: int
    blocks_per_request: int
    """`state_bytes_per_request` in blocks."""

    @property
    def kv_tokens(self) -> int:
        """Tokens that the pool holds."""
        return self.num_blocks * self.block_size


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
    total = 0.0
    for group in shard.model.layers:
        attention = group.attention
        if isinstance(attention, GatedDeltaAttention):
            width = 2 * attention.num_key_heads * attention.key_head_dim
            width += attention.num_value_heads * attention.value_head_dim
            state = attention.num_value_heads * attention.key_head_dim * attention.value_head_dim * FP32_BYTES
            convolution = width * (attention.conv_kernel_size - 1) * BF16_BYTES
            total += group.num_layers * (state + convolution) / shard.tp
        elif isinstance(attention, GroupedQueryAttention) and _is_bounded(attention, max_model_len):
            values = (attention.window_tokens or 0) * _token_values(shard, attention)
            total += group.num_layers * values * BITS[shard.precision.kv_cache] / 8
    return total * shard.stage_fraction


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


VLLM_SAMPLER_BYTES = 30.0
"""Of one logit while vLLM's profiling run samples with a top-p (0.8 to 0.24 `_dummy_sampler_run`, `apply_top_k_top_p`):
2 of the model and 4 in fp32, then sorted, 4 and an index of 8, both with a second buffer. Every rank has gathered all
of the vocabulary (`LogitsProcessor._gather_logits`)."""


def activation_bytes(
    shard: Shard, max_num_batched_tokens: int, max_num_seqs: int, sampler_bytes: float | None = None
) -> float:
    """Peak of a step at full token budget, as an engine's profiling run finds it.

    The widest point of a layer is the feed-forward (hidden states, residual, gate-up and its product) or, with
    experts, the permuted inputs and outputs of every token's experts; then the logits of all sequences beside the
    hidden states: `sampler_bytes` of each on every rank, by default a rank's own share in bf16 and twice in fp32.
    """
    width = shard.model.hidden_size
    widest = 0.0
    for group in shard.model.layers:
        feed_forward = group.feed_forward
        inner = feed_forward.intermediate_size / shard.tp
        rows = 1.0
        if isinstance(feed_forward, ExpertsFeedForward):
            inner = feed_forward.intermediate_size / shard.parallelism.experts_tp
            rows = feed_forward.experts_per_token * shard.parallelism.attention_dp / shard.parallelism.ep
        widest = max(widest, rows * (3 * inner + width) + 2 * width)
    each = (BF16_BYTES + 2 * FP32_BYTES) / shard.tp if sampler_bytes is None else sampler_bytes
    logits = max_num_seqs * shard.model.vocab_size * each
    return max(max_num_batched_tokens * widest * BF16_BYTES, logits + max_num_batched_tokens * width * BF16_BYTES)


def plan_memory(shard: Shard, device: Device, engine: EngineSettings, max_model_len: int) -> MemoryPlan:
    """Divide one device's memory as `engine` does and count the KV blocks that are left.

    vLLM gives the pool `gpu_memory_utilization` x memory - weights - activations - reserve; SGLang's static share holds
    weights and pool and leaves activations to the rest; TensorRT-LLM gives the pool a share of what is free after
    loading.

    Args:
        shard: the deployed model.
        device: where it runs.
        engine: resolved settings.
        max_model_len: tokens of the longest request accepted.

    Raises:
        InputError: the weights do not fit, or what is left holds no request.
    """
    assert engine.gpu_memory_utilization is not None
    assert engine.max_num_batched_tokens is not None
    assert engine.max_num_seqs is not None
    assert engine.block_size is not None
    weights = weight_bytes(shard)
    sampler_bytes = VLLM_SAMPLER_BYTES if engine.scheduler == "vllm_v1" else None
    activations = activation_bytes(shard, engine.max_num_batched_tokens, engine.max_num_seqs, sampler_bytes)
    reserve = float(engine.reserved_bytes or 0)
    if engine.memory_fraction_of_free:
        pool = (device.memory_bytes - weights - activations - reserve) * engine.gpu_memory_utilization
    elif engine.scheduler == "sglang":
        pool = device.memory_bytes * engine.gpu_memory_utilization - weights - reserve
    else:
        pool = device.memory_bytes * engine.gpu_memory_utilization - weights - activations - reserve
    token_bytes = kv_bytes_per_token(shard, max_model_len)
    state_bytes = state_bytes_per_request(shard, max_model_len)
    # A model of bounded layers only has no per-token cost; a block then is one request with its state.
    block_size = engine.block_size if token_bytes else max_model_len
    block_bytes = token_bytes * block_size or state_bytes
    num_blocks = engine.num_gpu_blocks if engine.num_gpu_blocks is not None else int(pool // block_bytes)
    if num_blocks < 1 or weights > device.memory_bytes:
        asked = f"{shard.model.name} in {shard.precision.weights} over tp = {shard.tp}, pp = {shard.parallelism.pp}"
        raise InputError(
            f"{asked} does not fit {device.title}: weights {format_bytes(weights)}, activations "
            f"{format_bytes(activations)}, reserve {format_bytes(reserve)} of {format_bytes(device.memory_bytes)}",
            "use more devices (tp, pp), a smaller format, or fewer max_num_batched_tokens",
        )
    return MemoryPlan(
        device_bytes=device.memory_bytes,
        weight_bytes=weights,
        activation_bytes=activations,
        reserved_bytes=reserve,
        kv_cache_bytes=num_blocks * block_bytes,
        kv_bytes_per_token=token_bytes,
        state_bytes_per_request=state_bytes,
        block_size=block_size,
        num_blocks=num_blocks,
        blocks_per_request=-int(-state_bytes // block_bytes) if token_bytes else 0,
    )
