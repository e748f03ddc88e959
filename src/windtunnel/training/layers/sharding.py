"""Tasks of data-parallel ranks once a step, or once a layer where they share parameters: reduce, gather, update.

ZeRO's stages (arXiv:1910.02054): 0 all-reduces gradients; 1 and 2 scatter their sums and gather updated parameters; 3
also gathers parameters before each use. A shard group smaller than the data-parallel group leaves replicas, which
all-reduce what each rank owns (HSDP, arXiv:2304.11277).
"""

import math
from dataclasses import replace

from windtunnel.model import operators as ops
from windtunnel.model.attention.grouped_query import GroupedQueryAttention
from windtunnel.model.feed_forward.dense import DenseFeedForward
from windtunnel.model.feed_forward.experts import ExpertsFeedForward
from windtunnel.model.shape import LayerGroup
from windtunnel.training.figures import FIGURES
from windtunnel.training.layers.chunks import Parameters, copies_embedding, layer_parameters, trained
from windtunnel.training.layers.host import gradient_copies, offloads, parameter_copies, update_tasks
from windtunnel.training.layers.part import Task, collective
from windtunnel.training.layers.rank import NF4_BYTES, WIRE_BYTES, Group, Rank

STATE_BYTES = {"fp32": 4.0, "bf16": 2.0, "remainder": 2.0, "fp8": 1.0, "int8": 1.0 + 4.0 / 256}
"""int8: a value, and its share of the fp32 scale of 256 (bitsandbytes optim/optimizer.py, `blocksize`)."""


def owned(rank: Rank, held: Parameters) -> float:
    """Count the parameters of `held` whose optimizer state the rank keeps."""
    known = rank.setup.degrees
    if not rank.setup.job.sharding.zero:
        return held.total
    return held.dense / known.shard_group + held.experts / known.experts_dp


def reduce_tasks(rank: Rank, held: Parameters, beside: str | None = None) -> tuple[Task, ...]:
    """Return the collectives that sum the gradients of `held` over the ranks that hold the same parameters."""
    job, known, held = rank.setup.job, rank.setup.degrees, trained(rank, held)
    wire = WIRE_BYTES[job.precision.gradient_reduce or "fp32"]
    op = "reduce_scatter" if job.sharding.zero else "all_reduce"
    tasks = []
    if held.dense and known.shard_group > 1:
        tasks.append(collective(rank, f"gradient_{op}", Group.DATA, op, held.dense * wire, beside=beside))
    if held.dense and known.replicas > 1:
        owned_bytes = held.dense * wire / (known.shard_group if job.sharding.zero else 1)
        name = "gradient_replicas_all_reduce"
        tasks.append(collective(rank, name, Group.REPLICAS, "all_reduce", owned_bytes, beside=beside))
    if held.experts and known.experts_dp > 1:
        name = f"experts_gradient_{op}"
        tasks.append(collective(rank, name, Group.EXPERTS_DATA, op, held.experts * wire, beside=beside))
    return (*tasks, *gradient_copies(rank, owned(rank, held), beside))


def num_reductions(rank: Rank) -> int:
    """Count the times that a step reduces the gradients of a chunk.

    A rank that keeps its share of the gradients alone reduces them in every backward pass (DeepSpeed
    runtime/zero/stage_1_and_2.py, `reduce_ready_partitions_and_remove_grads`). With ZeRO-2, gradients of the one chunk
    whose micro-batches a device differentiates in a row are whole until it turns to another.
    """
    job, known = rank.setup.job, rank.setup.degrees
    in_a_row = {"interleaved": known.pp, "looped_bfs": known.num_microbatches}
    if job.sharding.zero == 2:
        return known.num_microbatches // in_a_row.get(job.schedule or "", 1)
    return known.num_microbatches if job.sharding.zero == 3 else 1


def gather_tasks(rank: Rank, held: Parameters, beside: str | None = None) -> tuple[Task, ...]:
    """Return the collectives that give every rank the parameters that others own: all by ZeRO-3, else those trained."""
    job, known = rank.setup.job, rank.setup.degrees
    if not job.sharding.zero:
        return ()
    held = held if job.sharding.zero == 3 else trained(rank, held)
    wire = WIRE_BYTES[job.precision.parameter_gather or "bf16"]
    if job.lora is not None and job.precision.frozen_weights == "nf4" and job.sharding.zero == 3:
        wire = NF4_BYTES
    tasks = list[Task]()
    if job.sharding.zero == 3:
        tasks += parameter_copies(rank, owned(rank, held), wire, beside)
    bucket = job.sharding.prefetch_bucket_elements if job.sharding.zero == 3 else job.sharding.gather_bucket_elements
    for name, group, elements, num_ranks in (
        ("parameter_all_gather", Group.DATA, held.dense, known.shard_group),
        ("experts_parameter_all_gather", Group.EXPERTS_DATA, held.experts, known.experts_dp),
    ):
        if elements and num_ranks > 1:
            pieces = max(math.ceil(elements / bucket), 1.0) if bucket else 1.0
            tasks.append(collective(rank, name, group, "all_gather", elements * wire / pieces, pieces, beside))
    return tuple(tasks)


def gathered_layer(rank: Rank, group: LayerGroup) -> Parameters:
    """Count the parameters of one layer that ZeRO-3 shards and gathers: DeepSpeed keeps small ones whole on every rank
    (`stage3_param_persistence_threshold`).
    """
    held = layer_parameters(rank, group)
    threshold = rank.setup.job.sharding.persistence_threshold_elements or 0
    unsharded = sum(size for size in small_tensors(rank, group) if size <= threshold)
    return replace(held, dense=max(held.dense - unsharded, 0.0))


def small_tensors(rank: Rank, group: LayerGroup) -> list[float]:
    """List the elements of a layer's tensors that a threshold may keep whole: norms, biases and the router.

    Matrices of a width that anybody trains are far above any threshold.
    """
    model, tp = rank.setup.model, rank.tp
    norms = [float(model.hidden_size)] * (group.num_norms * (2 if model.norm_bias else 1))
    attention, feed_forward = group.attention, group.feed_forward
    biases = []
    if isinstance(attention, GroupedQueryAttention):
        kv_size = attention.rank_kv_heads(tp) * attention.head_dim
        biases += [attention.query_size / tp, kv_size, kv_size] if attention.qkv_bias else []
        biases += [float(model.hidden_size)] if attention.output_bias else []
    if isinstance(feed_forward, ExpertsFeedForward):
        return [*norms, *biases, float(model.hidden_size * feed_forward.num_experts)]
    if isinstance(feed_forward, DenseFeedForward) and feed_forward.bias:
        up = 2 if feed_forward.gated else 1
        return [*norms, *biases, feed_forward.intermediate_size * up / tp, float(model.hidden_size)]
    return [*norms, *biases]


def optimizer_tasks(rank: Rank, held: Parameters) -> tuple[Task, ...]:
    """Return the update: gradients are read for their norm, clipped and read for the step, state and parameters are
    read and written, gradients are cleared. An offloaded one is the host's.
    """
    job, held = rank.setup.job, trained(rank, held)
    if offloads(rank):
        return tuple(update_tasks(rank, owned(rank, held)))
    precision = job.precision
    num_bytes = 4 * STATE_BYTES[precision.gradients or "fp32"]
    num_bytes += 2 * FIGURES.num_moments[job.optimizer] * STATE_BYTES[precision.moments]
    num_bytes += 2 * STATE_BYTES[precision.master_weights or "fp32"] + 2.0
    cleared = ops.Elementwise("clear_gradients", max(held.total, 1.0), STATE_BYTES[precision.gradients or "fp32"])
    return (
        Task("optimizer", ops.Elementwise("optimizer", max(owned(rank, held), 1.0), num_bytes)),
        Task("clear_gradients", cleared),
    )


def finish_tasks(rank: Rank) -> tuple[Task, ...]:
    """Return a step's last, small collectives: gradients of what tensor ranks repeat, a tied embedding, the norm."""
    setup, job = rank.setup, rank.setup.job
    known, model = setup.degrees, setup.model
    wire = WIRE_BYTES[job.precision.gradient_reduce or "fp32"]
    tasks = []
    if rank.split:
        of_layer = 2 * model.hidden_size * (2 if model.norm_bias else 1)
        norms = of_layer * max(setup.layers_per_chunk) * known.virtual_stages
        tasks.append(collective(rank, "norm_gradient_all_reduce", Group.TENSOR, "all_reduce", norms * wire))
    if copies_embedding(rank):
        table = model.vocab_size * model.hidden_size / known.tp
        tasks.append(collective(rank, "embedding_gradient_all_reduce", Group.EMBEDDING, "all_reduce", table * wire))
    if known.num_devices > 1:
        every = ops.Collective("all_reduce", 8.0, known.num_devices, rank.spread(known.num_devices, 1))
        tasks.append(Task("gradient_norm_all_reduce", every, 1.0, Group.DATA))
    return tuple(tasks)
