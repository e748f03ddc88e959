"""Plan one device's memory for serving: weights, activations, reserves, and the KV blocks that are left."""

from dataclasses import dataclass

from windtunnel.errors import InputError
from windtunnel.hardware import Device
from windtunnel.model.memory import recurrent_state_bytes, weight_bytes
from windtunnel.model.operators import BF16_BYTES, FP32_BYTES
from windtunnel.model.shape import Shard
from windtunnel.serving.deployment import EngineSettings
from windtunnel.serving.engines.contract import scheduler_of
from windtunnel.units import format_bytes


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of one device, in bytes; blocks are those of one rank's KV block pool."""

    device_bytes: float
    weight_bytes: float
    activation_bytes: float
    """Peak of a step of `max_num_batched_tokens`."""
    reserved_bytes: float
    kv_cache_bytes: float
    """All KV blocks."""
    kv_bytes_per_token: float
    """KV of the layers that keep every token; where none does, of those with a window."""
    state_bytes_per_request: float
    """Linear-attention state: fixed for each running request."""
    block_size: int
    """Tokens of one block: the engine's, or a whole request's where no layer grows with the context."""
    num_blocks: int
    blocks_per_request: int
    """`state_bytes_per_request` in blocks."""
    window_tokens: int = 0
    """Sliding window of layers that do not keep every token; 0: all do."""
    num_groups: int = 1
    """Groups of layers: the blocks that one block of tokens takes."""
    num_window_groups: int = 0
    """Groups with the window: their blocks are freed once the window has passed them."""
    num_window_blocks: int = 0
    """Blocks of the windows' own pool; 0: they have none."""

    @property
    def kv_tokens(self) -> int:
        """Tokens that the blocks hold, none behind a window (vLLM logs it as "GPU KV cache size")."""
        return self.num_blocks // self.num_groups * self.block_size

    @property
    def num_full_groups(self) -> int:
        """Groups that keep every token; the prefix caches can count one."""
        return self.num_groups - self.num_window_groups

    def most_blocks(self, num_tokens: int, step_tokens: int) -> tuple[int, int]:
        """Return the most blocks that a request of `num_tokens` takes, of all layers and of the windows' own pool.

        A step computes `step_tokens` of it; a window's groups hold the window and a step (vLLM `SlidingWindowSpec`,
        0.9.1 to 0.24).
        """
        blocks = windows = -(-num_tokens // self.block_size)
        if self.window_tokens:
            windows = min(blocks, -(-(self.window_tokens - 1 + step_tokens) // self.block_size) + 1)
        shared = self.num_full_groups * blocks + self.num_window_groups * windows
        return shared + self.blocks_per_request, windows if self.num_window_blocks else 0


SIMILAR_COUNTS = 1.5
"""Ratio of layers of two kinds below which vLLM makes groups of the larger count."""


@dataclass(frozen=True)
class LayerGroups:
    """Layout of a model's layers in blocks; bytes on one device."""

    bytes_per_token: float
    """KV of all layers that keep every token; where none does, of those with a window."""
    block_bytes_per_token: float
    """Bytes of one block, divided by its tokens."""
    window_tokens: int = 0
    num_groups: int = 1
    num_window_groups: int = 0
    window_bytes_per_token: float = 0.0
    """Bytes of one block of the windows' own pool, divided by its tokens."""
    pool_ratio: float = 0.0
    """Blocks of the windows' own pool for each of the other blocks."""


def group_layers(shard: Shard, engine: EngineSettings, max_model_len: int) -> LayerGroups:
    """Divide the layers into groups whose blocks have equal bytes.

    `shared_pool` is vLLM's (`_get_kv_cache_groups_uniform_page_size`, vllm/v1/core/kv_cache_utils.py, 0.9.1 to 0.24):
    groups have as many layers as the rarer kind has, or as the other where that has less than half as many again, so
    that every block has the same bytes; the last group is padded. `own_pool` gives the windows a pool of
    `window_pool_ratio` tokens for each of the other's (SGLang `set_num_token_hybrid`, model_runner.py, 0.5.8 to
    0.5.14), or shares memory in proportion to window and bytes (TensorRT-LLM
    `BlockManager::calculateWindowSizeToShare`, 1.0 to 1.3). Windows of several lengths count as the longest of them.
    """
    sizes = [(num, attention, attention.bytes_per_token(shard)) for num, attention in shard.model.attentions]
    sizes = [(num, attention, size) for num, attention, size in sizes if size]
    every = [(num, size) for num, _, size in sizes]
    windows = [attention for _, attention, _ in sizes if attention.is_bounded(max_model_len)]
    if engine.window_kv in (None, "full") or not windows:
        total = _sum_bytes(shard, every)
        return LayerGroups(total, total)
    window_tokens = max(attention.window_tokens or 0 for attention in windows)
    sliding = [(num, size) for num, attention, size in sizes if attention in windows]
    growing = [(num, size) for num, attention, size in sizes if attention not in windows]
    if not growing:
        total = _sum_bytes(shard, sliding)
        return LayerGroups(total, total, window_tokens, 1, 1)
    total = _sum_bytes(shard, growing)
    if engine.window_kv == "own_pool":
        ratio = engine.window_pool_ratio or min(window_tokens / max_model_len, 1.0)
        return LayerGroups(total, total, window_tokens, 1, 0, _sum_bytes(shard, sliding), ratio)
    num_growing, num_sliding = (sum(count for count, _ in layers) for layers in (growing, sliding))
    group_size, larger = sorted((num_growing, num_sliding))
    if larger < SIMILAR_COUNTS * group_size:
        group_size = larger
    block = group_size * max(size for _, size in every) * shard.stage_fraction
    num_window_groups = -(-num_sliding // group_size)
    return LayerGroups(
        total, block, window_tokens, -(-num_growing // group_size) + num_window_groups, num_window_groups
    )


def _sum_bytes(shard: Shard, layers: list[tuple[int, float]]) -> float:
    """Return the bytes of one token on one device, in layers given as (number, bytes of each)."""
    return sum(count * size for count, size in layers) * shard.stage_fraction


def activation_bytes(
    shard: Shard, max_num_batched_tokens: int, max_num_seqs: int, sampler_bytes: float | None = None
) -> float:
    """Return the peak of a step at full token budget, as an engine's profiling run finds it.

    The widest point of a layer is the feed-forward (hidden states, residual, gate-up and its product) or, with
    experts, the permuted inputs and outputs of every token's experts; then the logits of all sequences beside the
    hidden states: `sampler_bytes` of each on every rank, by default a rank's own share in bf16 and twice in fp32.
    """
    width = shard.model.hidden_size
    widest = 0.0
    for _, feed_forward in shard.model.feed_forwards:
        widest = max(widest, feed_forward.peak_values(shard))
    each = (BF16_BYTES + 2 * FP32_BYTES) / shard.tp if sampler_bytes is None else sampler_bytes
    logits = max_num_seqs * shard.model.vocab_size * each
    return max(max_num_batched_tokens * widest * BF16_BYTES, logits + max_num_batched_tokens * width * BF16_BYTES)


def plan_memory(shard: Shard, device: Device, engine: EngineSettings, max_model_len: int) -> MemoryPlan:
    """Divide one device's memory as `engine` does and count the KV blocks that are left.

    Args:
        shard: the deployed model.
        device: the model runs on it.
        engine: resolved settings.
        max_model_len: tokens of the longest request accepted.

    Raises:
        InputError: the weights do not fit, or what is left holds no request.
    """
    assert engine.max_num_batched_tokens is not None
    assert engine.max_num_seqs is not None
    assert engine.block_size is not None
    weights = weight_bytes(shard)
    sampler_bytes = scheduler_of(engine).sampler_bytes
    activations = activation_bytes(shard, engine.max_num_batched_tokens, engine.max_num_seqs, sampler_bytes)
    reserve = float(engine.reserved_bytes or 0)
    pool_bytes = _pool_bytes(device, engine, weights, activations, reserve)
    groups = group_layers(shard, engine, max_model_len)
    state_bytes = recurrent_state_bytes(shard)
    # A model of recurrences only has no per-token cost; a block then is one request with its state.
    block_size = engine.block_size if groups.block_bytes_per_token else max_model_len
    block_bytes = groups.block_bytes_per_token * block_size or state_bytes
    whole_bytes = block_bytes + groups.pool_ratio * groups.window_bytes_per_token * block_size
    num_blocks = engine.num_gpu_blocks if engine.num_gpu_blocks is not None else int(pool_bytes // whole_bytes)
    num_window_blocks = int(num_blocks * groups.pool_ratio)
    if num_blocks < 1 or (groups.pool_ratio and num_window_blocks < 1) or weights > device.memory_bytes:
        model = f"{shard.model.name} in {shard.precision.weights} over tp = {shard.tp}, pp = {shard.parallelism.pp}"
        raise InputError(
            f"{model} does not fit {device.title}: weights {format_bytes(weights)}, activations "
            f"{format_bytes(activations)}, reserve {format_bytes(reserve)} of {format_bytes(device.memory_bytes)}",
            "use more devices (tp, pp), a smaller format, or fewer max_num_batched_tokens",
        )
    return MemoryPlan(
        device_bytes=device.memory_bytes,
        weight_bytes=weights,
        activation_bytes=activations,
        reserved_bytes=reserve,
        kv_cache_bytes=num_blocks * block_bytes + num_window_blocks * block_size * groups.window_bytes_per_token,
        kv_bytes_per_token=groups.bytes_per_token,
        state_bytes_per_request=state_bytes,
        block_size=block_size,
        num_blocks=num_blocks,
        blocks_per_request=-int(-state_bytes // block_bytes) if groups.block_bytes_per_token else 0,
        window_tokens=groups.window_tokens,
        num_groups=groups.num_groups,
        num_window_groups=groups.num_window_groups,
        num_window_blocks=num_window_blocks,
    )


def _pool_bytes(device: Device, engine: EngineSettings, weights: float, activations: float, reserve: float) -> float:
    """Return the bytes that `engine` gives to its KV blocks.

    vLLM gives them `gpu_memory_utilization` x memory - weights - activations - reserve; SGLang's static share holds
    weights and blocks and leaves activations to the rest; TensorRT-LLM gives them a share of what is free after
    loading.
    """
    assert engine.gpu_memory_utilization is not None
    if engine.memory_fraction_of_free:
        return (device.memory_bytes - weights - activations - reserve) * engine.gpu_memory_utilization
    counted = activations if scheduler_of(engine).share_has_activations else 0.0
    return device.memory_bytes * engine.gpu_memory_utilization - weights - counted - reserve
