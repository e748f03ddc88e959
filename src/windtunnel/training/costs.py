"""Costs of one micro-batch on every chunk of a pipeline, and of a chunk's parameters once a step."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from windtunnel.model import operators as ops
from windtunnel.model.attention.grouped_query import GroupedQueryAttention
from windtunnel.model.feed_forward.experts import ExpertsFeedForward
from windtunnel.training.figures import FIGURES
from windtunnel.training.job import Sharding
from windtunnel.training.layers.chunks import LayerChunk, Parameters, chunk_parameters, chunks, layer_parameters
from windtunnel.training.layers.part import Task, collective
from windtunnel.training.layers.parts import Work
from windtunnel.training.layers.rank import Group, Rank
from windtunnel.training.layers.sharding import gather_tasks, gathered_layer, num_reductions, reduce_tasks
from windtunnel.training.memory import chunk_work, kept_bytes
from windtunnel.training.pipeline.schedules import SPLIT_SCHEDULES
from windtunnel.training.pricing import PassCost, TrainingPricer
from windtunnel.training.setup import TrainingSetup

LAUNCHES = "waiting for kernel launches"
"""Class of the seconds in which a device waits for the host."""


@dataclass(frozen=True)
class ChunkCost:
    """Cost of one micro-batch through one chunk, and of its parameters once a step."""

    chunk: LayerChunk
    parameters: Parameters
    passes: tuple[PassCost, PassCost, PassCost]
    """Of the forward pass, of the gradients of inputs, and of the gradients of weights."""
    kept_bytes: float
    model_flops: float
    """Forward and backward, without recomputation by layers or inside of kernels."""
    hardware_flops: float
    """With both."""
    product_flops: float
    """Of these, what is in the job's own format: the layers' matrix products."""
    gather_s: float
    reduce_s: float
    num_buckets: float


def chunk_costs(rank: Rank, prices: TrainingPricer) -> tuple[ChunkCost, ...]:
    """Return the costs of every chunk; equal chunks are priced once."""
    known: dict[tuple[object, ...], ChunkCost] = {}
    costs = []
    for chunk in chunks(rank.setup):
        if chunk.shape not in known:
            known[chunk.shape] = _chunk_cost(rank, prices, chunk)
        costs.append(ChunkCost(**{**vars(known[chunk.shape]), "chunk": chunk}))
    return tuple(costs)


def _chunk_cost(rank: Rank, prices: TrainingPricer, chunk: LayerChunk) -> ChunkCost:
    held = chunk_parameters(rank, chunk)
    forward, backward_input, backward_weight = PassCost(), PassCost(), PassCost()
    model_flops = hardware_flops = product_flops = 0.0
    # Where every expert takes as many tokens, no kernel waits for their number and the host launches ahead.
    waits = rank.setup.job.parallelism.experts_capacity is None
    launches = FIGURES.experts_launch_s[rank.setup.job.kernels.cuda_graphs or "none"] if waits else 0.0
    num_waiting = sum(count for group, count in chunk.layers if isinstance(group.feed_forward, ExpertsFeedForward))
    if num_waiting and launches:
        forward.compute_s[LAUNCHES] += launches * num_waiting / 3
        backward_input.compute_s[LAUNCHES] += launches * num_waiting * 2 / 3
    is_split = rank.setup.job.schedule in SPLIT_SCHEDULES
    for work, count in chunk_work(rank, chunk):
        cost = _work_cost(rank, prices, work)
        for whole, part in zip((forward, backward_input, backward_weight), cost.passes, strict=True):
            whole.add(part, count)
        model_flops += cost.model_flops * count
        hardware_flops += cost.hardware_flops * count
        product_flops += cost.product_flops * count
    is_sharded = rank.setup.job.sharding.zero == 3
    if is_sharded or num_reductions(rank) > 1:
        _shard(rank, prices, chunk, forward, backward_weight if is_split and not is_sharded else backward_input)
    gather_s = 0.0 if is_sharded else prices.seconds(gather_tasks(rank, held))
    reduce_s = 0.0 if is_sharded else prices.seconds(reduce_tasks(rank, held))
    late_s = host_seconds(rank, chunk) - sum(part.seconds for part in (forward, backward_input, backward_weight))
    if late_s > 0:
        forward.compute_s[LAUNCHES] += late_s / 3
        backward_input.compute_s[LAUNCHES] += late_s * 2 / 3
    return ChunkCost(
        chunk=chunk,
        parameters=held,
        passes=(forward, backward_input, backward_weight),
        kept_bytes=kept_bytes(rank, chunk),
        model_flops=model_flops,
        hardware_flops=hardware_flops,
        product_flops=product_flops,
        gather_s=gather_s,
        reduce_s=reduce_s,
        num_buckets=_num_buckets(rank, chunk, held),
    )


def same_layers(setup: TrainingSetup) -> bytes:
    """Return a key of jobs of one model on one node whose layers do and cost the same: all that a layer depends on.

    Data and pipeline parallelism, and what is divided over data-parallel ranks, change what surrounds layers, but for
    ZeRO-3, whose ranks keep no sum of gradients.
    """
    job = setup.job
    replace_fields = msgspec.structs.replace
    shared = replace_fields(
        job,
        model="",
        device="",
        node=None,
        num_devices=None,
        global_batch=1,
        num_microbatches=None,
        parallelism=replace_fields(
            job.parallelism, pp=1, virtual_stages=1, layers_per_stage=None, dp=None, experts_dp=None
        ),
        sharding=Sharding(zero=3 if job.sharding.zero == 3 else 0),
        schedule="zb_h1" if job.schedule in SPLIT_SCHEDULES else "1f1b",
        precision=replace_fields(job.precision, parameter_gather=None),
        overlap=replace_fields(job.overlap, parameter_gather=None),
    )
    return msgspec.json.encode(shared)


@dataclass(frozen=True)
class _WorkCost:
    """A layer's, or the ends', share of a chunk's cost."""

    passes: tuple[PassCost, PassCost, PassCost]
    model_flops: float
    hardware_flops: float
    product_flops: float


def _work_cost(rank: Rank, prices: TrainingPricer, work: Work) -> _WorkCost:
    """Price work once for all chunks that share it."""
    key = (prices.identity, id(work))
    if key not in rank.works:
        tasks = work.forward + work.backward_input + work.backward_weight
        flops = sum(task.flops for task in tasks)
        products = sum(task.flops for task in tasks if getattr(task.op, "format", None) == rank.format)
        # Where weights' gradients are not split off, collectives may run beside them: both are one pass.
        backward = (work.backward_input, work.backward_weight)
        if rank.setup.job.schedule not in SPLIT_SCHEDULES:
            backward = (work.backward_input + work.backward_weight, ())
        passes = (prices.of_pass(work.forward), prices.of_pass(backward[0]), prices.of_pass(backward[1]))
        again = sum(task.flops for task in work.recomputed) + sum(task.repeated_flops for task in work.backward_input)
        # Both are kept, so that no other object takes their identity.
        rank.works[key] = (_WorkCost(passes, flops - again, flops, products), prices, work)
    cost: _WorkCost = rank.works[key][0]
    return cost


def host_seconds(rank: Rank, chunk: LayerChunk) -> float:
    """Return the seconds that a host takes to launch one micro-batch's passes through a chunk by PyTorch and FSDP2.

    It launches ahead of the device, which waits where it computes for less than that. Other frameworks' hosts are not
    known; those of experts are `FIGURES.experts_launch_s`.
    """
    job, host = rank.setup.job, FIGURES.host
    if job.framework != "fsdp2" or job.kernels.cuda_graphs == "full":
        return 0.0
    again = 4 / 3 if job.recompute.granularity == "full" else 1.0
    units = host["unit_s"] if job.sharding.zero == 3 else 0.0
    seconds = 0.0
    for group, count in chunk.layers:
        attention = group.attention
        norms = group.num_norms + (2 if isinstance(attention, GroupedQueryAttention) and attention.qk_norm else 0)
        operators = host["fused_operators"]
        if not job.kernels.fused:
            operators = host["layer_operators"] + host["norm_operators"] * (0 if rank.has_plain_layers else norms)
        seconds += count * (units + operators * again * host["operator_s"])
    return seconds


def _num_buckets(rank: Rank, chunk: LayerChunk, held: Parameters) -> float:
    """Return the buckets in which a chunk's gradients are reduced.

    Megatron-Core's buckets grow with the number of ranks (distributed_data_parallel.py).
    """
    bucket = rank.setup.job.sharding.reduce_bucket_elements
    if not bucket:
        return max(chunk.num_layers, 1.0)
    least = 1_000_000 * rank.setup.degrees.dp if rank.setup.job.framework == "megatron" else 0
    return max(held.total / max(bucket, least), 1.0)


def _shard(rank: Rank, prices: TrainingPricer, chunk: LayerChunk, forward: PassCost, backward: PassCost) -> None:
    """Add ZeRO-3's gathers, one layer ahead of computation, and the reductions of ZeRO-2 and 3, layer by layer.

    n layers of c seconds with g seconds of communication each take g + (n - 1) max(c, g) + c where it is prefetched.
    The embedding and head are one unit with nothing to hide behind. ZeRO-2's last reduction of a step is
    `ChunkCost.reduce_s`; of those before, each belongs to the passes that share it, and hides behind the next pass too
    where a pipeline goes on.
    """
    job, num_layers, is_sharded = rank.setup.job, chunk.num_layers, rank.setup.job.sharding.zero == 3
    num_behind = num_layers - (1.0 if is_sharded or rank.setup.degrees.pp == 1 else 0.0)
    by_pass = num_reductions(rank) / rank.setup.degrees.num_microbatches
    share = 1.0 if is_sharded else 1.0 - 1.0 / num_reductions(rank)
    per_layer, sharded = Parameters(), Parameters()
    for group, count in chunk.layers:
        per_layer = per_layer + layer_parameters(rank, group) * (count / num_layers)
        sharded = sharded + gathered_layer(rank, group) * (count / num_layers)
    ends = chunk_parameters(rank, chunk)
    ends = Parameters(max(ends.dense - per_layer.dense * num_layers, 0.0), 0.0)
    gathering, reducing = gather_tasks(rank, sharded) if is_sharded else (), reduce_tasks(rank, per_layer)
    gather, reduce = prices.seconds(gathering), prices.seconds(reducing) * by_pass
    copies = tuple(
        prices.seconds(task for task in tasks if task.group is Group.HOST) for tasks in (gathering, reducing)
    )
    again = gather if job.sharding.reshard_after_forward else 0.0
    # Where no more than a layer may be live, the next one is gathered when it is needed.
    limit = job.sharding.max_live_elements
    prefetches = bool(job.overlap.parameter_gather) and (limit is None or limit > per_layer.total)
    reduces_beside = bool(job.overlap.gradient_reduce)
    for cost, gathers, reduces in ((forward, gather, 0.0), (backward, again, reduce)):
        each = cost.seconds / max(num_layers, 1.0)
        communication = gathers + reduces
        # Copies to and from the host leave the multiprocessors alone.
        copied = (copies[0] if gathers else 0.0) + (copies[1] * by_pass if reduces else 0.0)
        of_host = copied / communication if communication else 0.0
        beside = (gathers if prefetches else 0.0) + (reduces if reduces_beside else 0.0)
        hidden = min(beside, each) * num_behind * share
        cost.slowdown_s += hidden * (1.0 - of_host) * prices.overlap_slowdown
        exposed = communication * num_layers * share - hidden
        for group, part in ((Group.DATA, 1.0 - of_host), *(((Group.HOST, of_host),) if of_host else ())):
            cost.hidden_s[group] += hidden * part
            cost.exposed_s[group] += exposed * part
    if ends.dense:
        for kind in (Group.DATA, Group.HOST):
            gathered_s = prices.seconds(_of_host(gather_tasks(rank, ends), kind)) if is_sharded else 0.0
            reduced_s = prices.seconds(_of_host(reduce_tasks(rank, ends), kind)) * by_pass * share
            if kind is Group.DATA or gathered_s or reduced_s:
                forward.exposed_s[kind] += gathered_s
                backward.exposed_s[kind] += reduced_s


def _of_host(tasks: Iterable[Task], group: Group) -> list[Task]:
    """Return the tasks that a report counts under the host, or under data-parallel ranks."""
    return [task for task in tasks if (task.group is Group.HOST) == (group is Group.HOST)]


def message_seconds(rank: Rank, prices: TrainingPricer) -> float:
    """Return the seconds that hidden states take from one stage to the next, mean over stages in one node and in two.

    Each tensor rank sends its part; where sequences are not split, the parts are gathered again on arrival
    (arXiv:2104.04473, section 4.1).
    """
    pp = rank.setup.degrees.pp
    if pp == 1:
        return 0.0
    num_bytes = rank.tokens * rank.width * 2.0
    num_crossing = rank.spread(pp, rank.layout(Group.PIPELINE)[1]) - 1
    tasks = [
        Task("send_recv", ops.Collective("send_recv", num_bytes / rank.tp, 2, nodes), hops / (pp - 1), Group.PIPELINE)
        for nodes, hops in ((1, pp - 1 - num_crossing), (2, num_crossing))
        if hops
    ]
    if rank.tp > 1 and not rank.split:
        tasks.append(collective(rank, "gather", Group.TENSOR, "all_gather", num_bytes))
    return prices.seconds(tasks)


PHASES = ("forward", "backward", "weights' gradients")


def explain_tasks(rank: Rank, prices: TrainingPricer) -> list[dict[str, Any]]:
    """Return every task of one micro-batch in the pipeline's first, middle and last chunk, equal layers once.

    `where` is a layer or the ends of the model, `times` its count in one chunk, and `num_bytes` are those that a
    computation moves or a collective sends.
    """
    every = chunks(rank.setup)
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    for chunk in (every[0], every[len(every) // 2], every[-1]):
        for work, count in chunk_work(rank, chunk):
            where = (
                "layer" if work.transient_bytes or count > 1 or not (chunk.has_embedding or chunk.has_head) else "ends"
            )
            for phase, tasks in zip(PHASES, (work.forward, work.backward_input, work.backward_weight), strict=True):
                for task in tasks:
                    cost = prices.task(task)
                    rows[phase, where, task.name] = {
                        "phase": phase,
                        "where": where,
                        "name": task.name,
                        "group": None if task.group is None else task.group.value,
                        "times": count,
                        "seconds": cost.seconds,
                        "flops": task.flops,
                        "num_bytes": task.wire_bytes if task.group else float(task.op.num_bytes) * task.count,
                        "coverage": cost.coverage.value,
                        "source": cost.source,
                        "beside": task.beside,
                    }
    return list(rows.values())
