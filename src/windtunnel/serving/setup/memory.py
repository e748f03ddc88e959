"""Plan one device's memory for serving: weights, activations, reserves, and the KV blocks that are left."""

from bisect import bisect_left
from dataclasses import dataclass, replace
from math import ceil

from windtunnel.errors import InputError
from windtunnel.hardware import Device
from windtunnel.model import exchange
from windtunnel.model.feed_forward.experts import ExpertsFeedForward, is_exchanged
from windtunnel.model.launches.lora import lora_bytes
from windtunnel.model.memory import loaded_bytes, recurrent_state_bytes, token_bytes, value_bytes
from windtunnel.model.operators import FP32_BYTES
from windtunnel.model.shape import HIDDEN_STATES, Shard
from windtunnel.serving.deployment import EngineSettings
from windtunnel.serving.engines.contract import behaviour_of, scheduler_of
from windtunnel.serving.engines.defaults import profiling_of
from windtunnel.serving.engines.launches import graph_sizes, has_full_graphs
from windtunnel.units import KIB, MIB, format_bytes


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of one device, in bytes; blocks are those of one rank's KV block pool."""

    device_bytes: float
    weight_bytes: float
    """The loaded model: weights, and the tables and copies that engines add."""
    activation_bytes: float
    """Peak of the profiling run: a step of `max_num_batched_tokens`, workspaces, and the sampler after it."""
    reserved_bytes: float
    """What no PyTorch tensor holds: context, NCCL buffers, kernels' workspaces."""
    kv_cache_bytes: float = 0.0
    """All KV blocks."""
    kv_bytes_per_token: float = 0.0
    """KV of the layers that keep every token; where none does, of those with a window."""
    state_bytes_per_request: float = 0.0
    """Linear-attention state: fixed for each running request."""
    block_size: int = 0
    """Tokens of one block: the engine's, or a whole request's where no layer grows with the context."""
    num_blocks: int = 0
    blocks_per_request: int = 0
    """`state_bytes_per_request` in blocks."""
    window_tokens: int = 0
    """Sliding window of layers that do not keep every token; 0: all do."""
    num_groups: int = 1
    """Groups of layers: the blocks that one block of tokens takes."""
    num_window_groups: int = 0
    """Groups with the window: their blocks are freed once the window has passed them."""
    num_window_blocks: int = 0
    """Blocks of the windows' own pool; 0: they have none."""
    usable_bytes: float = 0.0
    """Memory that the driver grants to programs, of which engines take their shares."""
    sampler_bytes: float = 0.0
    """Logits and the sampler's temporaries in the profiling run, of which `activation_bytes` has the peak."""
    adapter_bytes: float = 0.0
    """Slots of LoRA adapters, allocated with the weights."""
    graph_bytes: float = 0.0
    """Set aside for CUDA graphs; 0: they are captured in what the engine's share leaves."""

    @property
    def kv_tokens(self) -> int:
        """Tokens that the blocks hold, none behind a window (vLLM logs it as "GPU KV cache size"); 0 for encoders."""
        if not self.kv_cache_bytes:
            return 0
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

    def most_tokens(self, limit: int, step_tokens: int | None) -> int:
        """Return the tokens of the longest request that the blocks hold, `limit` at most."""

        def is_too_long(tokens: int) -> bool:
            blocks, windows = self.most_blocks(tokens, step_tokens or tokens)
            return blocks > self.num_blocks or windows > self.num_window_blocks

        return bisect_left(range(1, limit + 1), True, key=is_too_long) if self.kv_cache_bytes else limit


MOST_GRAPH_BATCHES = 2
"""vLLM captures graphs of at most so many times `max_num_seqs` tokens (vllm/config/vllm.py, 0.10 to 0.24)."""
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
    sizes = [(num, attention, token_bytes(attention, shard)) for num, attention in shard.model.attentions]
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
    return sum(count * size for count, size in layers) * shard.stage_fraction


def plan_memory(shard: Shard, device: Device, engine: EngineSettings, max_model_len: int) -> MemoryPlan:
    """Divide one device's memory as `engine` does and count the KV blocks that are left.

    With pipeline stages the device is of the last one, which samples and therefore has the fewest blocks; every stage
    takes its number. InputError where the weights do not fit, or what is left holds no request.
    """
    assert engine.block_size is not None
    part = profiled_memory(shard, device, engine, max_model_len)
    given_bytes = engine.kv_cache_memory_bytes
    pool_bytes = _pool_bytes(engine, part) if given_bytes is None else float(given_bytes)
    groups = group_layers(shard, engine, max_model_len)
    state_bytes = recurrent_state_bytes(shard)
    if engine.max_kv_tokens is not None:
        pool_bytes = min(pool_bytes, _capped_bytes(engine, groups, state_bytes))
    # A model of recurrences only has no per-token cost; a block then is one request with its state.
    block_size = engine.block_size if groups.block_bytes_per_token else max_model_len
    block_bytes = groups.block_bytes_per_token * block_size or state_bytes
    if not block_bytes:
        return _without_cache(shard, device, engine, replace(part, block_size=block_size))
    whole_bytes = block_bytes + groups.pool_ratio * groups.window_bytes_per_token * block_size
    num_blocks = engine.num_gpu_blocks if engine.num_gpu_blocks is not None else int(pool_bytes // whole_bytes)
    num_window_blocks = int(num_blocks * groups.pool_ratio)
    if num_blocks < 1 or (groups.pool_ratio and num_window_blocks < 1) or part.weight_bytes > device.memory_bytes:
        raise _does_not_fit(shard, device, engine, part)
    return replace(
        part,
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


def _capped_bytes(engine: EngineSettings, groups: LayerGroups, state_bytes: float) -> float:
    """Return the bytes of `max_kv_tokens`, in the layers of a model and in its recurrent states, which have memory of
    their own.

    The cap counts tokens as if all layers kept them: a pool of the windows' own makes the other's tokens more (SGLang
    `init_memory_pool` and `set_num_token_hybrid`, model_runner.py, 0.5.8 to 0.5.14).
    """
    assert engine.max_kv_tokens is not None
    of_windows = groups.window_bytes_per_token if groups.pool_ratio else 0.0
    token_bytes = groups.num_groups * groups.block_bytes_per_token + of_windows
    return engine.max_kv_tokens * token_bytes + state_bytes * (engine.max_num_seqs or 0)


def _without_cache(shard: Shard, device: Device, engine: EngineSettings, part: MemoryPlan) -> MemoryPlan:
    """Return the plan of an encoder, which keeps nothing of a token: blocks without bytes bound no request."""
    if _pool_bytes(engine, part) < 0 or part.weight_bytes > device.memory_bytes:
        raise _does_not_fit(shard, device, engine, part)
    assert engine.max_num_seqs is not None
    return replace(part, num_blocks=engine.max_num_seqs)


def profiled_memory(
    shard: Shard, device: Device, engine: EngineSettings, max_model_len: int, last_stage: bool = True
) -> MemoryPlan:
    """Return a plan without KV blocks: what `engine` finds in use, and sets aside, on a device of a pipeline stage."""
    profiled = activations(shard, device, engine, max_model_len, last_stage)
    sizes = graph_sizes(engine)
    if engine.cudagraph_sizes is None and engine.max_num_seqs is not None:
        sizes = sizes[sizes <= MOST_GRAPH_BATCHES * engine.max_num_seqs]
    full_sizes = int((sizes <= (engine.max_num_seqs or 0)).sum()) * has_full_graphs(shard, engine)
    return MemoryPlan(
        device_bytes=device.memory_bytes,
        weight_bytes=loaded_bytes(shard),
        activation_bytes=profiled.peak_bytes,
        reserved_bytes=float(engine.reserved_bytes or 0) + _exchange_bytes(shard, engine),
        usable_bytes=device.memory_bytes if device.usable_bytes is None else device.usable_bytes,
        sampler_bytes=profiled.sampler_bytes,
        adapter_bytes=0.0 if shard.lora is None else adapter_slots(engine) * lora_bytes(shard),
        graph_bytes=graph_bytes(engine, sizes.size if engine.piecewise_cudagraphs else 0, full_sizes),
    )


def _exchange_bytes(shard: Shard, engine: EngineSettings) -> float:
    """Return the memory of buffers for tokens: of DeepEP's low-latency kernels, of its normal ones, or of both; or of
    Mega MoE's for the tokens of the largest step."""
    known, kernels, total = behaviour_of(engine.name), shard.all2all_backend, 0.0
    if not is_exchanged(shard):
        return total
    width, ranks = shard.model.hidden_size, shard.num_group_ranks
    _, experts = max(shard.model.feed_forwards, key=lambda group: group[1].num_experts)
    num_placed = experts.num_experts + shard.redundant_experts
    if kernels == exchange.MEGA_MOE:
        assert isinstance(experts, ExpertsFeedForward)
        most = -(-(engine.max_num_batched_tokens or 1) // shard.tp)
        latent = experts.latent_size or width
        return exchange.mega_moe_buffer_bytes(most, latent, num_placed, experts.experts_per_token, ranks)
    if not known.low_latency_tokens or kernels not in exchange.DEEPEP:
        return total
    if kernels != exchange.DEEPEP_NORMAL:
        total = exchange.low_latency_buffer_bytes(known.low_latency_tokens, width, num_placed)
    if kernels != exchange.DEEPEP_LOW_LATENCY:
        kinds_of_links = min(-(-ranks // shard.devices_per_node), 2)
        total += kinds_of_links * (known.normal_buffer_bytes or 0) or exchange.normal_buffer_bytes(width, ranks)
    return total


def adapter_slots(engine: EngineSettings) -> int:
    """Return the slots for LoRA adapters in a device's memory."""
    assert engine.lora is not None
    assert engine.lora.max_loras is not None
    return engine.lora.max_loras


def _does_not_fit(shard: Shard, device: Device, engine: EngineSettings, part: MemoryPlan) -> InputError:
    model = f"{shard.model.name} in {shard.precision.weights} over tp = {shard.tp}, pp = {shard.parallelism.pp}"
    parts = shard.tp * shard.parallelism.pp
    least = ceil(part.weight_bytes * parts / part.usable_bytes)
    degrees = f"tp x pp of {least} or more for the weights alone" if least > parts else "tp, pp"
    further = " or a smaller format" if least > parts else ", a smaller format, or a smaller max_num_batched_tokens"
    hint = f"use more devices ({degrees}){further}"
    needed = part.weight_bytes + part.activation_bytes + part.reserved_bytes
    of = f"of {format_bytes(part.usable_bytes)}"
    if needed < part.usable_bytes:
        of += f", of which gpu_memory_utilization is {engine.gpu_memory_utilization:.3g}"
        hint = f"set a larger gpu_memory_utilization, or {hint}"
    return InputError(
        f"{model} does not fit {device.title}: weights {format_bytes(part.weight_bytes)}, activations "
        f"{format_bytes(part.activation_bytes)}, reserve {format_bytes(part.reserved_bytes)} {of}",
        hint,
    )


def _pool_bytes(engine: EngineSettings, part: MemoryPlan) -> float:
    """Return the bytes that `engine` gives to its KV blocks.

    vLLM gives them `gpu_memory_utilization` x usable memory - weights - activations - reserve - graphs; SGLang's static
    share is of what is free before the weights and leaves activations to the rest; TensorRT-LLM gives them a share of
    what is free after its profiling run.
    """
    share, weight_bytes = engine.gpu_memory_utilization, part.weight_bytes + part.adapter_bytes
    assert share is not None
    if engine.memory_fraction_of_free:
        return share * (part.usable_bytes - weight_bytes - part.activation_bytes - part.reserved_bytes)
    if not scheduler_of(engine).share_has_activations:
        return share * (part.usable_bytes - part.reserved_bytes) - weight_bytes
    used = weight_bytes + part.activation_bytes + part.reserved_bytes + part.graph_bytes
    return share * part.usable_bytes - used


CUBLAS_BYTES = {"hopper": 32 * MIB, "blackwell": 32 * MIB}
OTHER_CUBLAS_BYTES = 8320 * KIB
"""cuBLAS's workspace by architecture (PyTorch, aten/src/ATen/cuda/CublasHandlePool.cpp, 2.4 to 2.10)."""
STAGE_STATES = 2
"""Hidden states and residual, in buffers that go from one pipeline stage to the next."""
MOST_EXPERTS_TOKENS = 16384
"""Tokens of all ranks that experts' workspace is made for (vLLM 0.12 to 0.17: VLLM_FUSED_MOE_CHUNK_SIZE)."""


@dataclass(frozen=True)
class Activations:
    """Memory of a profiling run, in bytes of one device."""

    forward_bytes: float
    """Widest point of the layers."""
    sampler_bytes: float
    """Logits and the sampler's temporaries, which come after the layers."""
    kept_bytes: float
    """Workspaces that stay allocated: cuBLAS's, experts', images' embeddings, buffers between pipeline stages."""

    @property
    def peak_bytes(self) -> float:
        """Peak of the run ("peak activation" of vLLM)."""
        return self.kept_bytes + max(self.forward_bytes, self.sampler_bytes)


def activations(
    shard: Shard, device: Device, engine: EngineSettings, max_model_len: int, last_stage: bool = True
) -> Activations:
    """Return the memory of the run in which `engine` profiles a stage of the pipeline; the last one samples."""
    assert engine.max_num_batched_tokens is not None
    model, tokens, each = shard.model, engine.max_num_batched_tokens, value_bytes(shard)
    keeps = profiling_of(engine).keeps_experts_workspace
    widest = workspace = 0.0
    for _, part in model.feed_forwards:
        kept = part.workspace_values(shard) if keeps else 0.0
        widest = max(widest, HIDDEN_STATES * model.hidden_size if kept else part.peak_values(shard))
        workspace = max(workspace, kept / shard.parallelism.attention_dp)
    gathered = min(tokens * shard.parallelism.attention_dp, max(MOST_EXPERTS_TOKENS, tokens))
    kept_values = gathered * workspace
    kept_values += tokens * model.hidden_size * (STAGE_STATES if shard.parallelism.pp > 1 else 0)
    kept_values += tokens * model.hidden_size if model.tower_parameters else 0.0
    return Activations(
        forward_bytes=tokens * widest * each,
        sampler_bytes=sampler_bytes(shard, device, engine, max_model_len) if last_stage else 0.0,
        kept_bytes=kept_values * each + CUBLAS_BYTES.get(device.architecture, OTHER_CUBLAS_BYTES),
    )


def sampler_bytes(shard: Shard, device: Device, engine: EngineSettings, max_model_len: int) -> float:
    """Return the peak while the profiling run samples: every rank has gathered the logits of the whole vocabulary.

    vLLM samples `max_num_seqs` dummy requests with a top-k and a top-p, whatever is served later
    (`GPUModelRunner._dummy_sampler_run`): the logits, their fp32 copy and what the sampler makes of it; beside them the
    step's hidden states, and two copies of the rows that are sampled.
    """
    assert engine.max_num_batched_tokens is not None
    assert engine.max_num_seqs is not None
    model, profiling, tokens = shard.model, profiling_of(engine), engine.max_num_batched_tokens
    if model.is_pooled:
        return 0.0
    rows = min(engine.max_num_seqs, tokens)
    if profiling.samples_prompts:
        rows = -(-tokens // max_model_len)
    logits = rows * model.vocab_size * (value_bytes(shard) + profiling.sampler_bytes)
    buffers = (device.num_sms or 0) * model.vocab_size * FP32_BYTES if profiling.sampler_rows_by_sm else 0.0
    return logits + buffers + (tokens + 2 * rows) * model.hidden_size * value_bytes(shard)


def graph_bytes(engine: EngineSettings, sizes: int, full_sizes: int) -> float:
    """Return the memory that an engine sets aside for CUDA graphs of so many sizes; 0 where it does not.

    vLLM from 0.20 on captures the two largest graphs of each kind and extrapolates (`profile_cudagraph_memory`).
    """
    profiling = profiling_of(engine)
    return profiling.first_graph_bytes + profiling.graph_bytes * (sizes + full_sizes) if sizes else 0.0
