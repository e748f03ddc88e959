"""A layer's feed-forward as parts of training: dense, or experts with their router and exchange of tokens."""

from collections.abc import Iterator
from dataclasses import replace

from windtunnel.model import operators as ops
from windtunnel.model.feed_forward.dense import DenseFeedForward
from windtunnel.model.feed_forward.experts import ExpertsFeedForward
from windtunnel.model.precision import Format
from windtunnel.model.shape import LayerGroup
from windtunnel.training.layers.part import (
    Part,
    Task,
    activation,
    collective,
    enter_tensor_parallel,
    leave_tensor_parallel,
    linear,
    pointwise,
    products,
)
from windtunnel.training.layers.rank import BF16_BYTES, WIRE_BYTES, Group, Rank


def feed_forward_parts(rank: Rank, group: LayerGroup) -> Iterator[Part]:
    """Return a layer's feed-forward, dense or of experts, in the order of the forward pass."""
    feed_forward = group.feed_forward
    match feed_forward:
        case DenseFeedForward():
            yield from _dense_parts(rank, "", feed_forward.intermediate_size, feed_forward.gated)
        case ExpertsFeedForward():
            yield from _experts_parts(rank, feed_forward)
        case _:
            raise NotImplementedError(f"no training of {feed_forward}; `training.setup` refuses it")


def _dense_parts(rank: Rank, prefix: str, intermediate_size: int, gated: bool) -> Iterator[Part]:
    inner = intermediate_size // rank.tp
    up = 2 * inner if gated else inner
    first = f"{prefix}gate_up_proj" if gated else f"{prefix}up_proj"
    yield from enter_tensor_parallel(rank, first, rank.width)
    input_bytes = rank.rows * rank.width * rank.kept_input_bytes
    act = activation(rank, f"{prefix}activation", rank.tokens, up, inner)
    entry = linear(rank, first, rank.tokens, up, rank.width, kept_bytes=input_bytes, module="feed_forward")
    yield replace(entry, dropped_bytes=act.kept_bytes)
    yield act
    down = linear(rank, f"{prefix}down_proj", rank.tokens, rank.width, inner, module="feed_forward")
    yield replace(down, dropped_bytes=0.0)
    yield from leave_tensor_parallel(rank, f"{prefix}down_proj", rank.width)


def _experts_parts(rank: Rank, feed_forward: ExpertsFeedForward) -> Iterator[Part]:
    """Yield router, exchange, experts and exchange back; the load of ranks is balanced."""
    known, rows, width = rank.setup.degrees, rank.rows, rank.width
    per_token = feed_forward.experts_per_token
    yield linear(rank, "router", rows, feed_forward.num_experts, width, Format.BF16, kept_bytes=0.0)
    if feed_forward.latent_size:
        width = feed_forward.latent_size
        yield linear(rank, "experts_latent_down", rows, width, rank.width)
    top_k = 3 * 4.0 * feed_forward.num_experts * rank.passes("router")
    yield pointwise("top_k", rows, top_k, top_k, rows * feed_forward.num_experts * 4.0)
    # Tokens of the ranks that shard an expert meet in each of them.
    pairs = rows * per_token * known.experts_tp
    copied = 2 * width * BF16_BYTES
    # An all-to-all takes tokens in the order of ranks, one copy for each expert. Kernels that send a token once to a
    # rank leave copies to the rank that received it (Megatron-Core token_dispatcher.py, `MoEFlexTokenDispatcher`).
    exchange = rank.setup.job.parallelism.experts_exchange
    copies_first = known.ep == 1 or exchange == "all_to_all"
    is_sorted = known.ep == 1 or exchange == "hybrid"
    if copies_first:
        yield pointwise("permute", rows * per_token, copied, copied)
    yield from _exchange(rank, "dispatch", rows * per_token * width, True, per_token)
    held = feed_forward.num_experts // known.ep
    inner = feed_forward.intermediate_size // known.experts_tp
    up = 2 * inner if feed_forward.gated else inner
    # What arrives is ordered by sender, and grouped GEMMs need it by expert (`sort_chunks_by_idxs` in that file); on
    # the way back likewise.
    if not is_sorted:
        yield pointwise("sort_by_expert", pairs, copied, copied)
    act = activation(rank, "experts_activation", pairs, up, inner)
    if rank.setup.job.kernels.fused_experts:
        act = replace(act, forward=(), backward_input=())
    yield replace(_grouped_linear(rank, "experts_up_proj", pairs, held, up, width), dropped_bytes=act.kept_bytes)
    yield act
    yield replace(_grouped_linear(rank, "experts_down_proj", pairs, held, width, inner), dropped_bytes=0.0)
    if not is_sorted:
        yield pointwise("sort_by_sender", pairs, copied, copied)
    yield from _exchange(rank, "combine", rows * per_token * width, False, per_token)
    if copies_first:
        yield pointwise("unpermute", rows * per_token, copied, copied)
    if feed_forward.latent_size:
        yield linear(rank, "experts_latent_up", rows, rank.width, width)
    if feed_forward.shared_intermediate_size:
        yield from _dense_parts(rank, "shared_", feed_forward.shared_intermediate_size, feed_forward.gated)


def _grouped_linear(rank: Rank, name: str, pairs: float, num_groups: int, num_outputs: int, num_inputs: int) -> Part:
    """Return the same linear layer for each of a rank's experts, tokens evenly spread."""
    forward, backward, weights = products(rank, name, pairs, (num_outputs, num_inputs), rank.format, num_groups)
    if rank.setup.job.lora is not None:
        return Part(name, forward, backward, module="experts")
    return Part(name, forward, backward, weights, pairs * num_inputs * rank.kept_input_bytes, "experts")


def _exchange_op(rank: Rank, message_bytes: float, per_token: int) -> ops.Collective:
    """Return the all-to-all of tokens with their experts' ranks.

    By node (DeepEP, DeepSeek-V3 section 3.2.2): a token crosses to each node once, and inside a node goes to each rank
    once, however many of its experts are there; k experts on n nodes or ranks meet n (1 - (1 - 1/n)^k) of them. What
    goes on inside a node overlaps what crosses.
    """
    plain = rank.collective(Group.EXPERTS, "all_to_all", message_bytes)
    if rank.setup.job.parallelism.experts_exchange == "all_to_all":
        return plain
    places = plain.span_nodes if plain.span_nodes > 1 else plain.num_ranks
    met = places * (1 - (1 - 1 / places) ** per_token)
    return ops.Collective("all_to_all", message_bytes * met / per_token, plain.num_ranks, plain.span_nodes)


def _exchange(rank: Rank, name: str, num_values: float, is_dispatch: bool, per_token: int) -> Iterator[Part]:
    """Yield the all-to-all between expert-parallel ranks, and the gather or sum between ranks that share an expert."""
    known, job = rank.setup.degrees, rank.setup.job
    beside = "experts_beside" if job.overlap.experts else None
    if known.ep > 1:
        sent = WIRE_BYTES[job.precision.experts_dispatch or "bf16"] if is_dispatch else BF16_BYTES
        there = _exchange_op(rank, num_values * sent, per_token)
        back = _exchange_op(rank, num_values * BF16_BYTES, per_token)
        forward = Task(f"{name}_all_to_all", there, 1.0, Group.EXPERTS, beside)
        backward = Task(f"{name}_all_to_all_gradient", back, 1.0, Group.EXPERTS, beside)
        yield Part(name, (forward,), (backward,))
    if known.experts_tp > 1:
        message = num_values * BF16_BYTES * known.experts_tp
        op, inverse = ("all_gather", "reduce_scatter") if is_dispatch else ("reduce_scatter", "all_gather")
        forward = collective(rank, f"{name}_{op}", Group.EXPERTS_TENSOR, op, message)
        backward = collective(rank, f"{name}_{inverse}_gradient", Group.EXPERTS_TENSOR, inverse, message)
        yield Part(f"{name}_shards", (forward,), (backward,))
