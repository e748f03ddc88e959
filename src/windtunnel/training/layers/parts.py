"""A training step as operators: what one rank of every pipeline chunk computes and sends, forward and backward.

A layer is a list of parts in the order of the forward pass (`part.Part`). Everything else follows from them:
step time, recomputation, bytes on each link, activation memory. A chunk is described once, whatever the number of
micro-batches or ranks.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from windtunnel.model import operators as ops
from windtunnel.model.feed_forward.dense import DenseFeedForward
from windtunnel.model.feed_forward.experts import ExpertsFeedForward
from windtunnel.model.precision import Format
from windtunnel.model.shape import LayerGroup
from windtunnel.training.figures import FIGURES
from windtunnel.training.layers.attention import attention_parts
from windtunnel.training.layers.part import (
    Part,
    Task,
    activation,
    adapted,
    collective,
    enter_tensor_parallel,
    leave_tensor_parallel,
    linear,
    norm,
    pointwise,
    products,
    residual,
)
from windtunnel.training.layers.rank import BF16_BYTES, WIRE_BYTES, Group, Rank


@dataclass(frozen=True)
class Work:
    """One micro-batch through one chunk of one rank."""

    forward: tuple[Task, ...]
    backward_input: tuple[Task, ...]
    """Recomputation included, at its head."""
    backward_weight: tuple[Task, ...]
    recomputed: tuple[Task, ...]
    kept_bytes: float
    """Of one micro-batch, between its forward and its backward pass."""
    transient_bytes: float
    """Beside that while one layer is recomputed and differentiated."""


def layer_parts(rank: Rank, group: LayerGroup) -> tuple[Part, ...]:
    """Return one layer, part by part, in the order of the forward pass."""
    parts: list[Part] = []
    if group.attention is not None:
        parts += [norm(rank, "input_norm"), *attention_parts(rank, group), residual(rank, "attention_residual")]
    num_norms = group.num_norms - (1 if parts else 0)
    if num_norms:
        parts.append(norm(rank, "post_attention_norm", num_norms))
    if group.feed_forward is not None:
        parts += [*feed_forward_parts(rank, group), residual(rank, "feed_forward_residual")]
    return tuple(parts)


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
    first, outputs = (f"{prefix}gate_up_proj", (inner, inner)) if gated else (f"{prefix}up_proj", (inner,))
    yield from enter_tensor_parallel(rank, first, rank.width)
    input_bytes = rank.rows * rank.width * rank.kept_input_bytes
    act = activation(rank, f"{prefix}activation", rank.tokens, up, inner)
    entry = linear(rank, first, rank.tokens, outputs, rank.width, kept_bytes=input_bytes, module="feed_forward")
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
    sent = rows * per_token * (rank.setup.job.parallelism.experts_capacity or 1.0)
    pairs = sent * known.experts_tp
    copied = 2 * width * BF16_BYTES * FIGURES.permute_slowdown
    spread = (1 + 1 / per_token) * width * BF16_BYTES * FIGURES.permute_slowdown
    # An all-to-all takes tokens in the order of ranks, one copy for each expert. Kernels that send a token once to a
    # rank leave copies to the rank that received it (Megatron-Core token_dispatcher.py, `MoEFlexTokenDispatcher`).
    copies_first = known.ep == 1 or rank.setup.job.parallelism.experts_exchange == "all_to_all"
    if copies_first:
        yield pointwise("permute", sent, spread, spread)
    yield from _exchange(rank, "dispatch", sent * width, True, per_token)
    held = feed_forward.num_experts // known.ep
    inner = feed_forward.intermediate_size // known.experts_tp
    up = 2 * inner if feed_forward.gated else inner
    # What arrives is ordered by sender, and grouped GEMMs need it by expert (`sort_chunks_by_idxs` in that file); on
    # the way back likewise. HybridEP's copy out of its buffer is that kernel (Megatron-LM docs/discussions/
    # deepseek-v3-gb200-optimization, section 2.5).
    if known.ep > 1:
        yield pointwise("sort_by_expert", pairs, copied, copied)
    act = activation(rank, "experts_activation", pairs, up, inner)
    if rank.setup.job.kernels.fused_experts:
        act = replace(act, forward=(), backward_input=())
    outputs = (inner, inner) if feed_forward.gated else (inner,)
    entry = _grouped_linear(rank, "experts_up_proj", pairs, held, outputs, width)
    yield replace(entry, dropped_bytes=act.kept_bytes)
    yield act
    yield replace(_grouped_linear(rank, "experts_down_proj", pairs, held, (width,), inner), dropped_bytes=0.0)
    if feed_forward.bias and not rank.setup.job.kernels.fused_experts:
        moved = FIGURES.experts_bias_bytes
        yield pointwise("experts_bias", pairs, width * moved["forward"], width * moved["backward"])
    if known.ep > 1:
        yield pointwise("sort_by_sender", pairs, copied, copied)
    yield from _exchange(rank, "combine", sent * width, False, per_token)
    if copies_first:
        yield pointwise("unpermute", sent, spread, spread)
    if feed_forward.latent_size:
        yield linear(rank, "experts_latent_up", rows, rank.width, width)
    if feed_forward.shared_intermediate_size:
        yield from _dense_parts(rank, "shared_", feed_forward.shared_intermediate_size, feed_forward.gated)


def _grouped_linear(
    rank: Rank, name: str, pairs: float, num_groups: int, outputs: tuple[int, ...], num_inputs: int
) -> Part:
    """Return the same linear layer for each of a rank's experts, tokens evenly spread."""
    tasks = products(rank, name, pairs, (sum(outputs), num_inputs), rank.format, num_groups)
    part = Part(name, *tasks, pairs * num_inputs * rank.kept_input_bytes, "experts")
    return part if rank.setup.job.lora is None else adapted(rank, part, pairs, outputs, num_inputs, num_groups)


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
    if known.ep > 1 and job.parallelism.experts_exchange == "all_gather":
        message, ops_of = num_values / per_token * known.ep * BF16_BYTES, ("all_gather", "reduce_scatter")
        ends = ops_of if is_dispatch else ops_of[::-1]
        tasks = [collective(rank, f"{name}_{op}", Group.EXPERTS, op, message, beside=beside) for op in ends]
        yield Part(name, (tasks[0],), (tasks[1],))
    elif known.ep > 1:
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


def embedding_parts(rank: Rank) -> tuple[Part, ...]:
    """Return the look-up of the (vocabulary-parallel) embedding table."""
    look_up = ops.Elementwise("embedding", rank.tokens, 2 * rank.width * BF16_BYTES)
    scatter = ops.Elementwise("embedding_gradient", rank.tokens, 3 * rank.width * BF16_BYTES)
    masked = rank.rows * rank.width * (1.0 if rank.setup.job.dropout else 0.0)
    table = Part(
        "embedding", (Task("embedding", look_up),), (), (Task("embedding_gradient", scatter),), kept_bytes=masked
    )
    return (table, *leave_tensor_parallel(rank, "embedding", rank.width))


def head_parts(rank: Rank) -> tuple[Part, ...]:
    """Return final norm, head in 16 bit and cross entropy over a split vocabulary."""
    if "head" not in rank.works:
        rank.works["head"] = _head_parts(rank)
    parts: tuple[Part, ...] = rank.works["head"]
    return parts


def _head_parts(rank: Rank) -> tuple[Part, ...]:
    model = rank.setup.model
    vocabulary = -(-model.vocab_size // rank.tp)
    kernel = rank.setup.job.kernels.cross_entropy or "in_place"
    kept, moved = FIGURES.logit_bytes[kernel], FIGURES.logit_moved_bytes[kernel]
    loss = ops.Elementwise("cross_entropy", rank.tokens, vocabulary * moved["forward"])
    gradient = ops.Elementwise("cross_entropy_gradient", rank.tokens, vocabulary * moved["backward"])
    reductions: tuple[Task, ...] = ()
    if rank.tp > 1:
        name = "cross_entropy_all_reduce"
        reductions = (collective(rank, name, Group.TENSOR, "all_reduce", rank.tokens * 4.0, count=3.0),)
    entropy = Part(
        "cross_entropy",
        (Task("cross_entropy", loss), *reductions),
        (Task("cross_entropy_gradient", gradient),),
        kept_bytes=rank.tokens * vocabulary * kept,
    )
    head = (
        norm(rank, "final_norm"),
        *enter_tensor_parallel(rank, "lm_head", rank.width),
        linear(rank, "lm_head", rank.tokens, vocabulary, rank.width, Format.BF16, rank.rows * rank.width * BF16_BYTES),
        entropy,
    )
    return (*_prediction_parts(rank, head), *head)


def _prediction_parts(rank: Rank, head: tuple[Part, ...]) -> Iterator[Part]:
    """Yield what layers of multi-token prediction have beside a layer: the next token's embedding, a norm of it and of
    the hidden states, the product that joins both, and the head again.
    """
    for index in range(rank.setup.job.mtp_layers):
        product = linear(rank, "joined_proj", rank.tokens, rank.width // rank.tp, 2 * rank.width)
        for part in (*embedding_parts(rank), norm(rank, "joined_norm", 2), product, *head):
            phases = (part.forward, part.backward_input, part.backward_weight)
            forward, backward, weight = (_prefixed(tasks, f"mtp_{index}") for tasks in phases)
            yield replace(part, forward=forward, backward_input=backward, backward_weight=weight)


def layer_work(rank: Rank, group: LayerGroup, recompute: str | None = None) -> Work:
    """Return one micro-batch through a layer, with what is recomputed; `recompute` overrides the job's granularity."""
    key = (id(group), recompute)  # the rank's model keeps its groups
    if key not in rank.works:
        rank.works[key] = _layer_work(rank, group, recompute or rank.setup.job.recompute.granularity)
    work: Work = rank.works[key]
    return work


def _layer_work(rank: Rank, group: LayerGroup, granularity: str) -> Work:
    job = rank.setup.job
    parts = layer_parts(rank, group)
    every_kept = sum(part.kept_bytes for part in parts)
    gradients = max(part.gradient_bytes for part in parts)
    if granularity == "full":
        again = [task for part in _needed_again(rank, parts) for task in part.forward]
        split = rank.tp if job.recompute.distribute and not rank.split else 1
        kept = rank.rows * rank.width * BF16_BYTES / split
        return _work(parts, _prefixed(again, "recompute"), kept, every_kept + gradients)
    if granularity == "selective":
        modules = job.recompute.modules or ()
        dropped = [part for part in _needed_again(rank, parts) if _modules_of(part) & set(modules)]
        again = [task for part in dropped for task in part.forward]
        # Flash attention's inputs are not the core's own: they stay.
        lost = sum(
            part.kept_bytes if part.dropped_bytes is None else part.dropped_bytes
            for part in dropped
            if part.name != "attention"
        )
        if "every_second_product" in modules:
            products = [part for part in parts if part.backward_weight and part not in dropped]
            again += [
                replace(task, count=task.count / 2, flops_factor=task.flops_factor / 2)
                for part in products
                for task in part.forward
            ]
            lost += sum(part.kept_bytes for part in products) / 2
        return _work(parts, _prefixed(again, "recompute"), every_kept - lost, lost + gradients)
    return _work(parts, (), every_kept, gradients)


def _needed_again(rank: Rank, parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """Return the parts that recomputing a layer runs again: those before the last kept input, where it stops there.

    The output of a layer's last product is the next layer's kept input. `torch.utils.checkpoint` stops once it has
    every tensor that the backward pass needs (`set_checkpoint_early_stop`), XLA removes what nothing reads;
    Megatron-Core's and DeepSpeed's own functions run the whole layer.
    """
    if rank.setup.job.framework not in ("fsdp2", "maxtext"):
        return parts
    last = max((place for place, part in enumerate(parts) if part.kept_bytes), default=-1)
    return parts[: last if parts[last].backward_weight else last + 1]


def _modules_of(part: Part) -> set[str | None]:
    """Return the modules whose recomputation runs a part again: that of a feed-forward includes its activation."""
    if part.module != "activation":
        return {part.module}
    return {"activation", "experts" if part.name.startswith("experts") else "feed_forward"}


def ends_work(rank: Rank, has_embedding: bool, has_head: bool) -> Work:
    """Return the embedding and the head, where a chunk has them."""
    key = (has_embedding, has_head)
    if key not in rank.works:
        parts = (embedding_parts(rank) if has_embedding else ()) + (head_parts(rank) if has_head else ())
        rank.works[key] = _work(parts, (), sum(part.kept_bytes for part in parts), 0.0)
    work: Work = rank.works[key]
    return work


def _work(parts: Iterable[Part], recomputed: tuple[Task, ...], kept_bytes: float, transient_bytes: float) -> Work:
    backward = tuple(reversed(tuple(parts)))
    return Work(
        tuple(task for part in reversed(backward) for task in part.forward),
        recomputed + tuple(task for part in backward for task in part.backward_input),
        tuple(task for part in backward for task in part.backward_weight),
        recomputed,
        kept_bytes,
        transient_bytes,
    )


def _prefixed(tasks: Iterable[Task], prefix: str) -> tuple[Task, ...]:
    """Return tasks that run once more, by a name of their own."""
    return tuple(
        replace(task, name=f"{prefix}_{task.name}", beside=f"{prefix}_{task.beside}" if task.beside else None)
        for task in tasks
    )
