"""Tasks of data-parallel ranks once a step, or once a layer where they share parameters: reduce, gather, update.

ZeRO's stages (arXiv:1910.02054): 0 all-reduces gradients; 1 and 2 scatter their sums and gather updated parameters; 3
also gathers parameters before each use. A shard group smaller than the data-parallel group leaves replicas, which
all-reduce what each rank owns (HSDP, arXiv:2304.11277).
"""

import math

from windtunnel.model import operators as ops
from windtunnel.model.attention.grouped_query import GroupedQueryAttention
from windtunnel.model.feed_forward.dense import DenseFeedForward
from windtunnel.model.feed_forward.experts import ExpertsFeedForward
from windtunnel.model.shape import LayerGroup
from windtunnel.training.layers.chunks import Parameters, layer_parameters
from windtunnel.training.layers.part import Task
from windtunnel.training.layers.rank import WIRE_BYTES, Group, Rank

STATE_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0}

NUM_MOMENTS = {"adam": 2.0, "sgd_momentum": 1.0, "sgd": 0.0, "adafactor": 0.1, "muon": 1.0}
"""States that an optimizer keeps for each parameter; Adafactor's are a row and a column (arXiv:1804.04235)."""


def owned(rank: Rank, held: Parameters) -> float:
    """Count the parameters of `held` whose optimizer state the rank keeps."""
    known = rank.setup.degrees
    if not rank.setup.job.sharding.zero:
        return held.total
    return held.dense / known.shard_group + held.experts / known.experts_dp


def reduce_tasks(rank: Rank, held: Parameters, beside: str | None = None) -> tuple[Task, ...]:
    """Return the collectives that sum the gradients of `held` over the ranks that hold the same parameters."""
    job, known = rank.setup.job, rank.setup.degrees
    wire = WIRE_BYTES[job.precision.gradient_reduce or "fp32"]
    op = "reduce_scatter" if job.sharding.zero else "all_reduce"
    tasks = []
    if held.dense and known.shard_group > 1:
        reduce = rank.collective(Group.DATA, op, held.dense * wire)
        tasks.append(Task(f"gradient_{op}", reduce, 1.0, Group.DATA, beside))
    if held.dense and known.replicas > 1:
        share = known.shard_group if job.sharding.zero else 1
        reduce = rank.collective(Group.REPLICAS, "all_reduce", held.dense * wire / share)
        tasks.append(Task("gradient_replicas_all_reduce", reduce, 1.0, Group.REPLICAS, beside))
    if held.experts and known.experts_dp > 1:
        reduce = rank.collective(Group.EXPERTS_DATA, op, held.experts * wire)
        tasks.append(Task(f"experts_gradient_{op}", reduce, 1.0, Group.EXPERTS_DATA, beside))
    return tuple(tasks)


def gather_tasks(rank: Rank, held: Parameters, beside: str | None = None) -> tuple[Task, ...]:
    """Return the collectives that give every rank the parameters that others own."""
    job, known = rank.setup.job, rank.setup.degrees
    if not job.sharding.zero:
        return ()
    wire = WIRE_BYTES[job.precision.parameter_gather or "bf16"]
    bucket = job.sharding.prefetch_bucket_elements if job.sharding.zero == 3 else job.sharding.gather_bucket_elements
    tasks = []
    if held.dense and known.shard_group > 1:
        pieces = _pieces(held.dense, bucket)
        gather = rank.collective(Group.DATA, "all_gather", held.dense * wire / pieces)
        tasks.append(Task("parameter_all_gather", gather, pieces, Group.DATA, beside))
    if held.experts and known.experts_dp > 1:
        pieces = _pieces(held.experts, bucket)
        gather = rank.collective(Group.EXPERTS_DATA, "all_gather", held.experts * wire / pieces)
        tasks.append(Task("experts_parameter_all_gather", gather, pieces, Group.EXPERTS_DATA, beside))
    return tuple(tasks)


def _pieces(num_elements: float, bucket_elements: int | None) -> float:
    """Return the number of collectives that gather `num_elements`, in buckets where there are any."""
    return max(math.ceil(num_elements / bucket_elements), 1.0) if bucket_elements else 1.0


def gathered_layer(rank: Rank, group: LayerGroup) -> Parameters:
    """Count the parameters of one layer that ZeRO-3 shards and gathers: DeepSpeed keeps small ones whole on every rank
    (`stage3_param_persistence_threshold`).
    """
    held = layer_parameters(rank, group)
    threshold = rank.setup.job.sharding.persistence_threshold_elements or 0
    unsharded = sum(size for size in small_tensors(rank, group) if size <= threshold)
    return Parameters(max(held.dense - unsharded, 0.0), held.experts)


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
    """Return the update: gradients are read for their norm and again for the step, state and parameters are read and
    written, gradients are cleared.
    """
    job = rank.setup.job
    precision = job.precision
    num_bytes = 2 * STATE_BYTES[precision.gradients or "fp32"]
    num_bytes += 2 * NUM_MOMENTS[job.optimizer] * STATE_BYTES[precision.moments]
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
        norms = (
            2 * model.hidden_size * (2 if model.norm_bias else 1) * max(setup.layers_per_chunk) * known.virtual_stages
        )
        reduce = rank.collective(Group.TENSOR, "all_reduce", norms * wire)
        tasks.append(Task("norm_gradient_all_reduce", reduce, 1.0, Group.TENSOR))
    if model.tie_word_embeddings and known.pp > 1:
        table = model.vocab_size * model.hidden_size / known.tp
        reduce = rank.collective(Group.EMBEDDING, "all_reduce", table * wire)
        tasks.append(Task("embedding_gradient_all_reduce", reduce, 1.0, Group.EMBEDDING))
    if known.num_devices > 1:
        every = ops.Collective("all_reduce", 8.0, known.num_devices, rank.spread(known.num_devices, 1))
        tasks.append(Task("gradient_norm_all_reduce", every, 1.0, Group.DATA))
    return tuple(tasks)
