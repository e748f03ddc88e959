"""A training step as operators: what one rank of every pipeline chunk computes and sends, forward and backward.

A layer is a list of parts in the order of the forward pass (`part.Part`). Everything else follows from them:
step time, recomputation, bytes on each link, activation memory. A chunk is described once, whatever the number of
micro-batches or ranks.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from windtunnel.model import operators as ops
from windtunnel.model.precision import Format
from windtunnel.model.shape import LayerGroup
from windtunnel.training.figures import FIGURES
from windtunnel.training.layers.attention import attention_parts
from windtunnel.training.layers.chunks import LayerChunk
from windtunnel.training.layers.feed_forward import feed_forward_parts
from windtunnel.training.layers.part import (
    Part,
    Task,
    collective,
    enter_tensor_parallel,
    leave_tensor_parallel,
    linear,
    norm,
    residual,
)
from windtunnel.training.layers.rank import BF16_BYTES, Group, Rank


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
    return (
        norm(rank, "final_norm"),
        *enter_tensor_parallel(rank, "lm_head", rank.width),
        linear(rank, "lm_head", rank.tokens, vocabulary, rank.width, Format.BF16, rank.rows * rank.width * BF16_BYTES),
        entropy,
    )


def layer_work(rank: Rank, group: LayerGroup, recompute: str | None = None) -> Work:
    """Return one micro-batch through a layer, with what is recomputed; `recompute` overrides the job's granularity."""
    job = rank.setup.job
    parts = layer_parts(rank, group)
    granularity = recompute or job.recompute.granularity
    every_kept = sum(part.kept_bytes for part in parts)
    gradients = max(part.gradient_bytes for part in parts)
    if granularity == "full":
        again = [task for part in _needed_again(rank, parts) for task in part.forward]
        split = rank.tp if job.recompute.distribute and not rank.split else 1
        kept = rank.rows * rank.width * BF16_BYTES / split
        return _work(parts, tuple(_renamed(again)), kept, every_kept + gradients)
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
        return _work(parts, tuple(_renamed(again)), every_kept - lost, lost + gradients)
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


def ends_work(rank: Rank, chunk: LayerChunk) -> Work:
    """Return the embedding and the head, where a chunk has them."""
    parts = (embedding_parts(rank) if chunk.has_embedding else ()) + (head_parts(rank) if chunk.has_head else ())
    return _work(parts, (), sum(part.kept_bytes for part in parts), 0.0)


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


def _renamed(tasks: Iterable[Task]) -> Iterator[Task]:
    """Yield forward tasks as they run again in the backward pass."""
    for task in tasks:
        beside = f"recompute_{task.beside}" if task.beside else None
        yield replace(task, name=f"recompute_{task.name}", beside=beside)
