"""What data-parallel ranks do once a step, or once a layer where they share parameters: reduce, gather, update.

ZeRO's stages (arXiv:1910.02054): 0 all-reduces gradients; 1 and 2 scatter their sums and gather updated parameters; 3
also gathers parameters before each use. A shard group smaller than the data-parallel group leaves replicas, which
all-reduce what each rank owns (HSDP, arXiv:2304.11277).
"""

from windtunnel.ops import op as ops
from windtunnel.ops.training_chunks import Parameters
from windtunnel.ops.training_part import Task
from windtunnel.ops.training_rank import WIRE_BYTES, Group, Rank

STATE_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0}

NUM_MOMENTS = {"adam": 2.0, "sgd_momentum": 1.0, "sgd": 0.0, "adafactor": 0.1, "muon": 1.0}
"""States that an optimizer keeps for each parameter; Adafactor's are a row and a column (arXiv:1804.04235)."""


def owned(rank: Rank, held: Parameters) -> float:
    """Of the parameters that a rank holds, those whose optimizer state is its own."""
    known = rank.setup.degrees
    if not rank.setup.job.sharding.zero:
        return held.total
    return held.dense / known.shard_group + held.experts / known.experts_dp


def reduce_tasks(rank: Rank, held: Parameters, beside: str | None = None) -> tuple[Task, ...]:
    """Collectives that sum the gradients of `held` over the ranks that hold the same parameters."""
    job, known = rank.setup.job, rank.setup.degrees
    wire = WIRE_BYTES[job.precision.gradient_reduce or "fp32"]
    op = "reduce_scatter" if job.sharding.zero else "all_reduce"
    found = []
    if held.dense and known.shard_group > 1:
        reduce = rank.collective(Group.DATA, op, held.dense * wire)
        found.append(Task(f"gradient_{op}", reduce, 1.0, Group.DATA, beside))
    if held.dense and known.replicas > 1:
        share = known.shard_group if job.sharding.zero else 1
        reduce = rank.collective(Group.REPLICAS, "all_reduce", held.dense * wire / share)
        found.append(Task("gradient_replicas_all_reduce", reduce, 1.0, Group.REPLICAS, beside))
    if held.experts and known.experts_dp > 1:
        reduce = rank.collective(Group.EXPERTS_DATA, op, held.experts * wire)
        found.append(Task(f"experts_gradient_{op}", reduce, 1.0, Group.EXPERTS_DATA, beside))
    return tuple(found)


def gather_tasks(rank: Rank, held: Parameters, beside: str | None = None) -> tuple[Task, ...]:
    """Collectives that give every rank the parameters that others own."""
    job, known = rank.setup.job, rank.setup.degrees
    if not job.sharding.zero:
        return ()
    wire = WIRE_BYTES[job.precision.parameter_gather or "bf16"]
    found = []
    if held.dense and known.shard_group > 1:
        gather = rank.collective(Group.DATA, "all_gather", held.dense * wire)
        found.append(Task("parameter_all_gather", gather, 1.0, Group.DATA, beside))
    if held.experts and known.experts_dp > 1:
        gather = rank.collective(Group.EXPERTS_DATA, "all_gather", held.experts * wire)
        found.append(Task("experts_parameter_all_gather", gather, 1.0, Group.EXPERTS_DATA, beside))
    return tuple(found)


def optimizer_tasks(rank: Rank, held: Parameters) -> tuple[Task, ...]:
    """The update: gradients are read for their norm and again for the step, state is read and written, parameters too;
    gradients are cleared.
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
    """Small collectives at the end of a step: gradients of what tensor ranks repeat, a tied embedding, the norm."""
    setup, job = rank.setup, rank.setup.job
    known, model = setup.degrees, setup.model
    wire = WIRE_BYTES[job.precision.gradient_reduce or "fp32"]
    found = []
    if rank.split:
        norms = (
            2 * model.hidden_size * (2 if model.norm_bias else 1) * max(setup.layers_per_chunk) * known.virtual_stages
        )
        reduce = rank.collective(Group.TENSOR, "all_reduce", norms * wire)
        found.append(Task("norm_gradient_all_reduce", reduce, 1.0, Group.TENSOR))
    if model.tie_word_embeddings and known.pp > 1:
        table = model.vocab_size * model.hidden_size / known.tp
        reduce = rank.collective(Group.EMBEDDING, "all_reduce", table * wire)
        found.append(Task("embedding_gradient_all_reduce", reduce, 1.0, Group.EMBEDDING))
    if known.num_devices > 1:
        every = ops.Collective("all_reduce", 8.0, known.num_devices, rank.spread(known.num_devices, 1))
        found.append(Task("gradient_norm_all_reduce", every, 1.0, Group.DATA))
    return tuple(found)
