"""Attention as parts of a training layer: projections, the core by its kernel, and what context parallelism sends.

Sources: arXiv:2310.01889 for ring attention, arXiv:2407.21783 for gathered keys, arXiv:2309.14509 for Ulysses.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from windtunnel.model import operators as ops
from windtunnel.model.attention.gated_delta import GatedDeltaAttention
from windtunnel.model.attention.grouped_query import GroupedQueryAttention, PrefillAttention
from windtunnel.model.attention.kimi_delta import KimiDelta, KimiDeltaAttention
from windtunnel.model.attention.latent import LatentAttention, LatentPrefillAttention, SparseLatentPrefill
from windtunnel.model.attention.mamba2 import CausalConvolution, Mamba2
from windtunnel.model.precision import Format
from windtunnel.model.shape import LayerGroup
from windtunnel.training.figures import FIGURES
from windtunnel.training.layers.part import (
    Part,
    Task,
    accumulated,
    collective,
    enter_tensor_parallel,
    leave_tensor_parallel,
    linear,
    pointwise,
)
from windtunnel.training.layers.rank import BF16_BYTES, Group, Rank


def attention_parts(rank: Rank, group: LayerGroup) -> Iterator[Part]:
    """Return a layer's attention, whichever it is, in the order of the forward pass."""
    attention = group.attention
    match attention:
        case GroupedQueryAttention():
            yield from _grouped_query_parts(rank, attention)
        case LatentAttention():
            yield from _latent_parts(rank, attention)
        case GatedDeltaAttention():
            yield from _gated_delta_parts(rank, attention)
        case KimiDeltaAttention():
            yield from _kimi_delta_parts(rank, attention)
        case Mamba2():
            yield from _mamba_parts(rank, attention)
        case _:
            raise NotImplementedError(f"no training of {attention}; `training.setup` refuses it")


def _grouped_query_parts(rank: Rank, attention: GroupedQueryAttention) -> Iterator[Part]:
    tp, tokens = rank.tp, rank.tokens
    query = attention.query_size // tp
    kv_heads, value = attention.rank_kv_heads(tp), attention.value_head_dim or attention.head_dim
    kv = kv_heads * attention.head_dim
    gate = attention.gate_size // tp
    columns = (query + gate, kv, 0 if attention.values_are_keys else kv_heads * value)
    input_bytes = rank.rows * rank.width * rank.kept_input_bytes
    yield from enter_tensor_parallel(rank, "qkv_proj", rank.width)
    yield linear(rank, "qkv_proj", tokens, columns, rank.width, kept_bytes=input_bytes)
    if attention.qk_norm:
        moved = (query + kv) * BF16_BYTES
        there, back = 2 * moved * rank.passes("norm"), 3 * moved * rank.passes("norm", "backward")
        yield pointwise("qk_norm", tokens, there, back, tokens * (query + kv) * rank.kept_norm_bytes, "norms")
    if not rank.setup.job.learned_positions:
        rotated = 2 * (query + kv) * BF16_BYTES
        back = rotated * rank.passes("rope", "backward")
        yield pointwise("rope", tokens, rotated * rank.passes("rope"), back)
    yield from _core_parts(rank, attention)
    if gate:
        yield pointwise("attention_gate", tokens, 3 * query * BF16_BYTES, 5 * query * BF16_BYTES)
    yield linear(rank, "o_proj", tokens, rank.width, attention.num_heads // tp * value)
    yield from leave_tensor_parallel(rank, "o_proj", rank.width)


def _core_parts(rank: Rank, attention: GroupedQueryAttention) -> Iterator[Part]:
    """Yield attention's core and what context parallelism sends around it.

    Two products of different widths, of keys and of values, are priced as two of their mean: 2 (k + v) FLOPs a pair
    and head. Attention within chunks is that of documents as long as a chunk.
    """
    heads, kv_heads = attention.num_heads // rank.tp, attention.rank_kv_heads(rank.tp)
    key, value = attention.head_dim, attention.value_head_dim or attention.head_dim
    kept = rank.tokens * (heads * key + kv_heads * (key + value)) * BF16_BYTES
    yield from _context_parts(rank, kv_heads * (key + value), heads * key)
    if rank.setup.job.kernels.attention == "unfused":
        yield from _unfused_core(rank, heads, (key, value), kept)
        return
    num_documents, length = rank.documents
    window = attention.window_tokens or length
    if attention.is_chunked and window < length:
        num_documents, length = num_documents * length / window, window
    core = PrefillAttention(
        num_documents, length, heads, kv_heads, (key + value) // 2, window if window < length else 0
    )
    yield _flash_part(rank, core, kept + rank.tokens * heads * 4.0)


def _flash_part(rank: Rank, core: PrefillAttention | LatentPrefillAttention, kept_bytes: float) -> Part:
    kernels, architecture = rank.setup.job.kernels.attention, rank.setup.device.architecture
    by_size = FIGURES.flash2_slowdown.get(architecture, {}) if kernels in ("flash2", "triton") else {}
    size = core.head_dim if isinstance(core, PrefillAttention) else max(by_size, default=0)
    slower = next((slower for most, slower in sorted(by_size.items()) if size <= most), 1.0)
    if isinstance(core, LatentPrefillAttention):
        slower *= FIGURES.latent_slowdown.get(architecture, 1.0)
    triton = FIGURES.triton_slowdown if kernels == "triton" else {}
    slower_backward = (
        slower * triton.get("backward", 1.0) * FIGURES.attention_backward_flops / FIGURES.attention_backward_efficiency
    )
    again = FIGURES.attention_backward_flops - 2.0
    backward = Task("attention_gradient", core, slower_backward, flops_factor=2.0 + again, repeated_factor=again)
    forward = Task("attention", core, slower * triton.get("forward", 1.0))
    return Part("attention", (forward,), (backward,), kept_bytes=kept_bytes, module="core_attention")


def _unfused_core(rank: Rank, heads: int, widths: tuple[int, int], qkv_bytes: float) -> Iterator[Part]:
    """Yield scores, softmax, dropout and the weighted sum as kernels of their own, without skipping masked pairs.

    Each head's product is priced as one tall GEMM of the same FLOPs and output.
    """
    job, cp = rank.setup.job, rank.setup.degrees.cp
    keys = job.sequence_tokens
    rows = job.micro_batch * heads * keys / cp
    masks = 1.0 if job.dropout else 0.0
    scores, values = ops.Gemm(rows, keys, widths[0]), ops.Gemm(rows, widths[1], keys)
    slower = FIGURES.unaligned_heads_slowdown if widths[0] % 8 else 1.0
    forward = Task("attention_scores", scores, slower)
    backward = Task("attention_scores_gradient", values, 2.0 * slower, flops_factor=2.0)
    yield Part("attention_scores", (forward,), (backward,), kept_bytes=qkv_bytes)
    # Scale, mask and softmax in one kernel; dropout reads, writes and keeps a mask (arXiv:2205.05198, section 4.1:
    # 5 a s bytes for each token).
    yield pointwise(
        "softmax",
        rows,
        keys * (2 * BF16_BYTES + masks * (2 * BF16_BYTES + 1)),
        keys * (3 * BF16_BYTES + masks * (2 * BF16_BYTES + 1)),
        rows * keys * (BF16_BYTES + masks * (1 + BF16_BYTES)),
        "core_attention",
    )
    gradients = (Task("attention_values_gradient", scores, slower), Task("attention_keys_gradient", values, slower))
    yield Part("attention_values", (Task("attention_values", values, slower),), gradients, module="core_attention")


def _context_parts(rank: Rank, kv_width: int, query_width: int) -> Iterator[Part]:
    """Yield what context-parallel ranks send each other around attention's core.

    ring: keys and values pass round beside the core (arXiv:2310.01889), with their gradients on the way back; gather:
    all keys first (Llama 3, arXiv:2407.21783, section 3.3.2); ulysses: heads for sequence, four times
    (arXiv:2309.14509).
    """
    cp = rank.setup.degrees.cp
    if cp == 1:
        return
    held = rank.tokens * kv_width * BF16_BYTES
    context = partial(collective, rank, group=Group.CONTEXT)
    method = rank.setup.job.parallelism.cp_method
    if method == "ring":
        send = partial(context, op="send_recv", num_bytes=held)
        forward = send("context_send_recv", count=cp - 1.0, beside="attention")
        backward = send("context_send_recv_gradient", count=2 * (cp - 1.0), beside="attention_gradient")
        yield Part("context_ring", (forward,), (backward,))
    elif method == "all_gather":
        gather = context("context_all_gather", op="all_gather", num_bytes=held * cp)
        scatter = context("context_reduce_scatter", op="reduce_scatter", num_bytes=held * cp)
        yield Part("context_gather", (gather,), (gather, scatter))
    else:
        query_bytes = rank.tokens * query_width * BF16_BYTES
        there = context("context_all_to_all", op="all_to_all", num_bytes=held + query_bytes)
        back = context("context_all_to_all_back", op="all_to_all", num_bytes=query_bytes)
        # Queries, keys and values are kept as they left, beside those that arrived (Transformer Engine
        # context_parallel.py, `AttnFuncWithCPAndQKVOA2A`).
        yield Part("context_exchange", (there, back), (there, back), kept_bytes=held + query_bytes)


def _latent_parts(rank: Rank, attention: LatentAttention) -> Iterator[Part]:
    tp, tokens, width = rank.tp, rank.tokens, rank.width
    heads = attention.num_heads // tp
    query_head = attention.qk_nope_head_dim + attention.qk_rope_head_dim
    latent = attention.kv_lora_rank + attention.qk_rope_head_dim
    rank_q = attention.q_lora_rank
    input_bytes = rank.rows * width * rank.kept_input_bytes
    # The down-projections are whole on every tensor-parallel rank and work on its part of the sequence.
    if rank_q is None:
        yield from enter_tensor_parallel(rank, "q_proj", width)
        yield linear(rank, "q_proj", tokens, heads * query_head, width, kept_bytes=input_bytes)
        yield linear(rank, "kv_a_proj", rank.rows, latent, width, kept_bytes=0.0)
        normed = attention.kv_lora_rank
    else:
        yield linear(rank, "q_kv_a_proj", rank.rows, (rank_q, latent), width, kept_bytes=input_bytes)
        normed = rank_q + attention.kv_lora_rank
    there, back = (
        passes * normed * BF16_BYTES for passes in (2 * rank.passes("norm"), 3 * rank.passes("norm", "backward"))
    )
    yield pointwise("latent_norm", rank.rows, there, back, rank.rows * normed * BF16_BYTES, "norms")
    outputs = heads * attention.v_head_dim
    if gate := attention.gate_size // tp:
        yield linear(rank, "attention_gate_proj", tokens, gate, width, kept_bytes=0.0)
    if rank_q is not None:
        yield from enter_tensor_parallel(rank, "q_b_proj", rank_q)
        yield _latent_up(rank, "q_b_proj", heads * query_head, rank_q, heads * query_head)
    yield from enter_tensor_parallel(rank, "kv_b_proj", latent)
    yield from _sparse_core(rank, attention) if attention.indexer else _expanded_core(rank, attention)
    if attention.output_gate:
        yield pointwise("attention_gate", tokens, 3 * outputs * BF16_BYTES, 5 * outputs * BF16_BYTES)
    yield linear(rank, "o_proj", tokens, width, outputs)
    yield from leave_tensor_parallel(rank, "o_proj", width)


def _expanded_core(rank: Rank, attention: LatentAttention) -> Iterator[Part]:
    """Yield latent attention whose keys and values are expanded for every head."""
    tokens, heads = rank.tokens, attention.num_heads // rank.tp
    query_head = attention.qk_nope_head_dim + attention.qk_rope_head_dim
    up = heads * (attention.qk_nope_head_dim + attention.v_head_dim)
    yield _latent_up(rank, "kv_b_proj", up, attention.kv_lora_rank, heads * (query_head + attention.v_head_dim))
    # Rotated halves are concatenated with the others, for queries and keys of every head.
    rotated = (2 if attention.rotary else 1) * 2 * heads * query_head * BF16_BYTES
    yield pointwise("rope", tokens, rotated, rotated)
    kept = tokens * heads * (2 * query_head + attention.v_head_dim) * BF16_BYTES
    yield from _context_parts(rank, heads * (query_head + attention.v_head_dim), heads * query_head)
    core = LatentPrefillAttention(*rank.documents, heads, query_head, attention.v_head_dim)
    yield _flash_part(rank, core, kept + tokens * heads * 4.0)


def _sparse_core(rank: Rank, attention: LatentAttention) -> Iterator[Part]:
    """Yield sparse latent attention as its second stage of training runs it (arXiv:2512.02556, section 2.1.1).

    Queries meet the latent vectors of the `top_k` keys that the indexer chose. The indexer learns from the distribution
    of attention over these keys alone, and its gradient does not leave it. FLOPs backward, with K kept pairs: five
    products of attention for two forward; K 2 h (l + r) for the scores of `h` heads that are its target; K 4 i d for
    the indexer's queries and keys; 4 a token and weight of absorbed and the indexer's products.
    """
    tokens = rank.tokens
    core = SparseLatentPrefill(*rank.documents, **attention.fields_of_rank(rank.width, rank.tp))
    kept_pairs, per_pair = float(core.kept_pairs), core.flops_per_kept_pair
    scored = 2.0 * core.num_heads * (core.kv_lora_rank + core.rope_head_dim)
    scored += 4.0 * core.index_num_heads * core.index_head_dim
    attended = kept_pairs * (per_pair * FIGURES.attention_backward_flops + scored)
    backward = (attended + 4.0 * float(core.num_queries) * core.num_weights) / float(core.flops)
    # Queries, latents and the indexer's inputs; recomputation frees absorbed queries and outputs and the choice.
    per_head = attention.qk_nope_head_dim + attention.qk_rope_head_dim
    indexed = core.index_num_heads * (core.index_head_dim + 1) + core.index_head_dim
    inputs = (core.num_heads * per_head + attention.latent_size + indexed) * BF16_BYTES
    own = core.num_heads * (2 * core.kv_lora_rank * BF16_BYTES + 4.0) + 4.0 * min(core.top_k, rank.documents[1])
    yield from _context_parts(rank, attention.latent_size + core.index_head_dim, 0)
    slower = backward / FIGURES.attention_backward_efficiency
    again = kept_pairs * per_pair * (FIGURES.attention_backward_flops - 2.0) / float(core.flops)
    gradient = Task("sparse_attention_gradient", core, slower, flops_factor=backward, repeated_factor=again)
    yield Part(
        "sparse_attention",
        (Task("sparse_attention", core),),
        (gradient,),
        accumulated(rank, "sparse_attention", core.num_weights),
        tokens * (inputs + own),
        "core_attention",
        dropped_bytes=tokens * own,
    )


def _latent_up(rank: Rank, name: str, num_outputs: int, num_inputs: int, core_width: int) -> Part:
    """Return an up-projection of latents; recomputing it frees what the core keeps of it: `core_width` a token."""
    part = linear(rank, name, rank.tokens, num_outputs, num_inputs, module="latent_up_projection")
    return replace(part, dropped_bytes=rank.tokens * core_width * BF16_BYTES)


def _gated_delta_parts(rank: Rank, attention: GatedDeltaAttention) -> Iterator[Part]:
    tp, tokens, width = rank.tp, rank.tokens, rank.width
    keys = attention.num_key_heads * attention.key_head_dim // tp
    heads = attention.num_value_heads // tp
    values = heads * attention.value_head_dim
    projected = 2 * keys + 2 * values
    yield from _recurrence_input(rank, "qkvz_proj", projected)
    yield linear(rank, "ba_proj", tokens, 2 * heads, width, Format.BF16, kept_bytes=0.0)
    core = attention.core(tp, rank.setup.job.micro_batch / rank.setup.degrees.cp, rank.setup.job.sequence_tokens)
    forward, backward = Task("gated_delta", core), Task("gated_delta_gradient", core, 2.0, flops_factor=2.0)
    kept = tokens * projected * BF16_BYTES
    yield Part("gated_delta", (forward,), (backward,), kept_bytes=kept, module="core_attention")
    yield from _recurrence_output(rank, "o_proj", values, 2 * tokens * values * BF16_BYTES)


def _recurrence_input(rank: Rank, name: str, num_outputs: int) -> Iterator[Part]:
    yield from enter_tensor_parallel(rank, name, rank.width)
    input_bytes = rank.rows * rank.width * rank.kept_input_bytes
    yield linear(rank, name, rank.tokens, num_outputs, rank.width, kept_bytes=input_bytes)


def _recurrence_output(rank: Rank, name: str, num_inputs: int, kept_bytes: float) -> Iterator[Part]:
    """Yield the gated norm behind a recurrence, which keeps `kept_bytes`, and the projection."""
    moved = num_inputs * BF16_BYTES
    yield pointwise("gated_norm", rank.tokens, 3 * moved, 5 * moved, kept_bytes, "norms")
    yield linear(rank, name, rank.tokens, rank.width, num_inputs)
    yield from leave_tensor_parallel(rank, name, rank.width)


def _kimi_delta_parts(rank: Rank, attention: KimiDeltaAttention) -> Iterator[Part]:
    """Yield Kimi delta attention: its backward pass computes the states of chunks again, and two gradients.

    Kept for it: keys, queries and values before and after the convolution, the sums of rates in fp32, and two matrices
    of 64 x 64 tokens for each head and chunk (flash-linear-attention 0.4 `ops/kda/chunk.py`).
    """
    tp, tokens = rank.tp, rank.tokens
    heads, values = attention.num_heads // tp, attention.width // tp
    low_rank = attention.num_low_rank * attention.head_dim
    projected = attention.num_full * values + low_rank + heads
    yield from _recurrence_input(rank, "qkv_gates_proj", projected)
    for number in range(attention.num_low_rank):
        yield linear(rank, f"gates_b_proj_{number}", tokens, values, attention.head_dim)
    batch, length = rank.setup.job.micro_batch / rank.setup.degrees.cp, rank.setup.job.sequence_tokens
    convolution = CausalConvolution(batch, length, 3 * values, attention.conv_kernel_size)
    core = KimiDelta(batch, length, heads, heads, attention.head_dim, attention.head_dim, attention.conv_kernel_size)
    mixed = 3 * values * BF16_BYTES
    kept = (tokens * mixed, tokens * (mixed + 4.0 * values + 2 * 64 * heads * BF16_BYTES))
    for name, op, times, each in zip(("convolution", "kimi_delta"), (convolution, core), (2.0, 3.0), kept, strict=True):
        backward = Task(f"{name}_gradient", op, times, flops_factor=times, repeated_factor=times - 2.0)
        dropped = 0.0 if op is convolution else each
        forward = (Task(name, op),)
        yield Part(name, forward, (backward,), kept_bytes=each, module="core_attention", dropped_bytes=dropped)
    yield from _recurrence_output(rank, "o_proj", values, 2 * tokens * values * BF16_BYTES)


def _mamba_parts(rank: Rank, attention: Mamba2) -> Iterator[Part]:
    """Yield a Mamba-2 layer: the backward scan computes its chunks' products again (mamba 2.2 `ssd_combined.py`)."""
    tp, tokens = rank.tp, rank.tokens
    inner, channels = attention.inner_size // tp, attention.rank_channels(tp)
    projected = inner + channels + attention.num_heads // tp
    yield from _recurrence_input(rank, "in_proj", projected)
    cores = attention.cores(tp, rank.setup.job.micro_batch / rank.setup.degrees.cp, rank.setup.job.sequence_tokens)
    kept = (tokens * projected * BF16_BYTES, tokens * (channels + inner) * BF16_BYTES)
    slower = (1.0, FIGURES.scan_slowdown)
    for name, core, times, each, count in zip(("convolution", "scan"), cores, (2.0, 3.0), kept, slower, strict=True):
        forward = Task(name, core, count)
        backward = Task(f"{name}_gradient", core, count * times, flops_factor=times, repeated_factor=times - 2.0)
        yield Part(name, (forward,), (backward,), kept_bytes=each, module="core_attention")
    yield from _recurrence_output(rank, "out_proj", inner, tokens * inner * BF16_BYTES)
