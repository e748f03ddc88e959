"""Simulates one step of a training job: operators of each chunk, priced, then replayed by its pipeline schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.estimate.estimator import Coverage, Estimator
from windtunnel.estimate.roofline import machine
from windtunnel.estimate.training import FastestEstimator, PassCost, TrainingPricer, pricer
from windtunnel.interop.aiconfigurator import measured_estimator
from windtunnel.kernels import pipeline
from windtunnel.ops.parameters import count_parameters
from windtunnel.ops.schedules import BACKWARD, FORWARD, WEIGHT, Schedule, schedule
from windtunnel.ops.sharding import finish_tasks, gather_tasks, optimizer_tasks, reduce_tasks
from windtunnel.ops.training import (
    Chunk,
    Group,
    Parameters,
    Rank,
    Task,
    chunk_parameters,
    chunks,
    layer_parameters,
    trained,
)
from windtunnel.ops.training_memory import StageMemory, chunk_work, kept_bytes, stage_memory
from windtunnel.spec.training import GEMM_FORMATS, TrainingJob, TrainingSetup, resolve

KERNELS_OF = (("vllm", "0.24.0"), ("trtllm", "1.3.0"))
"""Whose measured tables price training, the faster at each operator: vLLM's bf16 GEMMs and attention are cuBLAS and
FlashAttention, TensorRT-LLM's fp8 GEMMs are cuBLAS, as in Transformer Engine."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ChunkCost:
    """One micro-batch through one chunk, and what its parameters cost once a step."""

    chunk: Chunk
    parameters: Parameters
    forward: PassCost
    backward_input: PassCost
    backward_weight: PassCost
    kept_bytes: float
    model_flops: float
    """Forward and backward, without recomputation."""
    hardware_flops: float
    """With recomputation."""
    gather_s: float
    reduce_s: float
    num_buckets: float


@dataclass(frozen=True)
class Timeline:
    """When every action of every pipeline device runs, in seconds from the start of the step."""

    schedule: Schedule
    starts: Floats
    ends: Floats
    communicated: Floats
    """When each device's data-parallel communication is done."""


@dataclass(frozen=True)
class TrainingResult:
    """One step of a job, predicted."""

    setup: TrainingSetup
    step_s: float
    breakdown_s: dict[str, float]
    """Parts of the busiest device's step; they add up to `step_s`."""
    bubble_fraction: float
    """Of the pipeline's time, mean over devices, in which a device waits for others."""
    model_flops: float
    """Of one step on one device, forward and backward, causal attention counted as computed."""
    hardware_flops: float
    memory: tuple[StageMemory, ...]
    costs: tuple[ChunkCost, ...]
    timeline: Timeline
    by_coverage: dict[Coverage, float]
    """Seconds of tasks by how their time was found."""
    relative_error: float
    """Expected error of the step's estimates, were they all wrong the same way."""
    num_parameters: float

    @property
    def tokens_per_s(self) -> float:
        job = self.setup.job
        return job.global_batch * job.sequence_tokens / self.step_s

    @property
    def tokens_per_s_per_device(self) -> float:
        return self.tokens_per_s / self.setup.degrees.num_devices

    @property
    def peak_flops_per_s(self) -> float:
        return compute_peak(self.setup)

    @property
    def mfu(self) -> float:
        return self.model_flops / self.step_s / self.peak_flops_per_s

    @property
    def hfu(self) -> float:
        return self.hardware_flops / self.step_s / self.peak_flops_per_s

    @property
    def flops_per_s_per_device(self) -> float:
        return self.model_flops / self.step_s

    @property
    def worst_memory(self) -> StageMemory:
        return max(self.memory, key=lambda stage: stage.total_bytes)

    @property
    def fits(self) -> bool:
        return self.worst_memory.total_bytes <= self.setup.device.memory_bytes


def simulate_training(
    job: TrainingJob | TrainingSetup, estimator: Estimator | None = None, allow_download: bool = False
) -> TrainingResult:
    """One step of `job`, from its operators.

    Args:
        job: a job, or one that is resolved.
        estimator: prices operators; None reads the tables measured on the job's device, or its calibrated roofline.
        allow_download: fetch a model's config.json that the catalog does not have.

    Raises:
        InputError: a name, split or schedule that cannot be.
    """
    setup = job if isinstance(job, TrainingSetup) else resolve(job, allow_download)
    return simulate_with(setup, pricer(estimator or training_estimator(setup), setup.device, setup.node))


def training_estimator(setup: TrainingSetup) -> Estimator:
    """The estimator that knows most about the job's device."""
    measured = (measured_estimator(setup.device, setup.node, *engine) for engine in KERNELS_OF)
    return FastestEstimator(tuple(measured))


def simulate_with(setup: TrainingSetup, prices: TrainingPricer) -> TrainingResult:
    """`simulate_training` with prices that may be shared by many jobs on one device and node."""
    rank = Rank(setup)
    costs = chunk_costs(rank, prices)
    plan = schedule(
        str(setup.job.schedule), setup.degrees.pp, setup.degrees.num_microbatches, setup.degrees.virtual_stages
    )
    timeline = replay(rank, prices, plan, costs)
    memory = memory_by_stage(rank, plan, costs)
    return _result(rank, prices, plan, costs, timeline, memory)


def chunk_costs(rank: Rank, prices: TrainingPricer) -> tuple[ChunkCost, ...]:
    """Every chunk's costs; equal chunks are priced once."""
    known: dict[tuple[object, ...], ChunkCost] = {}
    found = []
    for chunk in chunks(rank.setup):
        if chunk.shape not in known:
            known[chunk.shape] = _chunk_cost(rank, prices, chunk)
        cost = known[chunk.shape]
        found.append(ChunkCost(**{**vars(cost), "chunk": chunk}))
    return tuple(found)


def _chunk_cost(rank: Rank, prices: TrainingPricer, chunk: Chunk) -> ChunkCost:
    held = chunk_parameters(rank, chunk)
    forward, backward_input, backward_weight = PassCost(), PassCost(), PassCost()
    model_flops = hardware_flops = 0.0
    for work, count in chunk_work(rank, chunk):
        forward.add(prices.of_pass(work.forward), count)
        # Where weights' gradients are not split off, collectives may run beside them: both are one pass.
        if _is_split(rank):
            backward_input.add(prices.of_pass(work.backward_input), count)
            backward_weight.add(prices.of_pass(work.backward_weight), count)
        else:
            backward_input.add(prices.of_pass(work.backward_input + work.backward_weight), count)
        again = sum(task.flops for task in work.recomputed)
        flops = sum(task.flops for task in work.forward + work.backward_input + work.backward_weight)
        model_flops += (flops - again) * count
        hardware_flops += flops * count
    if rank.setup.job.sharding.zero == 3:
        _shard(rank, prices, chunk, forward, backward_input)
        gather_s = reduce_s = 0.0
    else:
        gather_s = prices.seconds(gather_tasks(rank, trained(rank, held)))
        reduce_s = prices.seconds(reduce_tasks(rank, trained(rank, held)))
    bucket = rank.setup.job.sharding.reduce_bucket_elements or 0
    # Megatron-Core distributed_data_parallel.py: buckets grow with the number of ranks.
    bucket = max(bucket, 1_000_000 * rank.setup.degrees.dp) if rank.setup.job.framework == "megatron" else bucket
    num_buckets = max(held.total / bucket, 1.0) if bucket else max(chunk.num_layers, 1.0)
    return ChunkCost(
        chunk,
        held,
        forward,
        backward_input,
        backward_weight,
        kept_bytes(rank, chunk),
        model_flops,
        hardware_flops,
        gather_s,
        reduce_s,
        num_buckets,
    )


def _is_split(rank: Rank) -> bool:
    return rank.setup.job.schedule in ("zb_h1", "zb_h2", "zb_v", "dualpipe", "dualpipe_v")


def _shard(rank: Rank, prices: TrainingPricer, chunk: Chunk, forward: PassCost, backward: PassCost) -> None:
    """Adds ZeRO-3's gathers and reductions, layer by layer, one layer ahead of computation.

    n layers of c seconds with g seconds of communication each take g + (n - 1) max(c, g) + c where it is prefetched.
    The embedding and head are one unit with nothing to hide behind.
    """
    job = rank.setup.job
    num_layers = chunk.num_layers
    per_layer = Parameters()
    for group, count in chunk.layers:
        per_layer = per_layer + layer_parameters(rank, group) * (count / num_layers)
    ends = chunk_parameters(rank, chunk)
    ends = Parameters(max(ends.dense - per_layer.dense * num_layers, 0.0), 0.0)
    gather = prices.seconds(gather_tasks(rank, per_layer))
    reduce = prices.seconds(reduce_tasks(rank, trained(rank, per_layer)))
    again = gather if job.sharding.reshard_after_forward else 0.0
    overlaps = bool(job.overlap.parameter_gather)
    for cost, communication in ((forward, gather), (backward, again + reduce)):
        each = cost.seconds / num_layers
        hidden = min(communication, each) * (num_layers - 1) if overlaps else 0.0
        cost.slowdown_s += hidden * prices.overlap_slowdown
        cost.hidden_s[Group.DATA] = cost.hidden_s.get(Group.DATA, 0.0) + hidden
        exposed = communication * num_layers - hidden
        cost.exposed_s[Group.DATA] = cost.exposed_s.get(Group.DATA, 0.0) + exposed
    for cost, tasks in ((forward, gather_tasks(rank, ends)), (backward, reduce_tasks(rank, trained(rank, ends)))):
        if ends.dense:
            cost.exposed_s[Group.DATA] += prices.seconds(tasks)


def message_seconds(rank: Rank, prices: TrainingPricer) -> float:
    """Seconds of hidden states from one stage to the next.

    Each tensor rank sends its part; where sequences are not split, the parts are gathered again on arrival
    (arXiv:2104.04473, section 4.1).
    """
    if rank.setup.degrees.pp == 1:
        return 0.0
    num_bytes = rank.tokens * rank.width * 2.0
    tasks = [Task("send_recv", rank.collective(Group.PIPELINE, "send_recv", num_bytes / rank.tp), 1.0, Group.PIPELINE)]
    if rank.tp > 1 and not rank.split:
        tasks.append(Task("gather", rank.collective(Group.TENSOR, "all_gather", num_bytes), 1.0, Group.TENSOR))
    return prices.seconds(tasks)


def replay(rank: Rank, prices: TrainingPricer, plan: Schedule, costs: tuple[ChunkCost, ...]) -> Timeline:
    """Run the schedule with these costs."""
    # DualPipe's second direction runs the same chunks again.
    both = [costs[index % len(costs)] for index in range(plan.num_chunks)]
    seconds = np.zeros((3, plan.num_chunks))
    seconds[FORWARD] = [cost.forward.seconds for cost in both]
    seconds[BACKWARD] = [cost.backward_input.seconds for cost in both]
    seconds[WEIGHT] = [cost.backward_weight.seconds for cost in both]
    hidden = np.array([(cost.forward.pairable_s + cost.backward_input.pairable_s) / 2 for cost in both])
    overlap = rank.setup.job.overlap
    zeros = np.zeros(plan.num_chunks)
    starts, ends, communicated = pipeline.run(
        (plan.actions, plan.offsets, plan.device_of_chunk, plan.next_chunk, plan.num_microbatches),
        seconds,
        hidden,
        zeros + message_seconds(rank, prices),
        not overlap.pipeline,
        np.array([cost.gather_s for cost in both]) if overlap.parameter_gather else zeros,
        np.array([cost.reduce_s for cost in both]) if overlap.gradient_reduce else zeros,
        np.array([cost.num_buckets for cost in both]),
        prices.overlap_slowdown,
        plan.is_split,
    )
    return Timeline(plan, starts, ends, communicated)


def memory_by_stage(rank: Rank, plan: Schedule, costs: tuple[ChunkCost, ...]) -> tuple[StageMemory, ...]:
    """Peak memory of a rank of every stage."""
    both = [costs[index % len(costs)] for index in range(plan.num_chunks)]
    kept = np.array([cost.kept_bytes for cost in both])
    ones = np.array([1.0 / sum(1 for d in plan.device_of_chunk if d == device) for device in plan.device_of_chunk])
    peaks, counts = np.zeros(plan.num_devices), np.zeros(plan.num_devices)
    # Where the weights' gradient comes later, linear layers' inputs stay until then: about half of what is kept.
    pipeline.peak_bytes(plan.actions, plan.offsets, kept, kept / 2, plan.is_split, peaks)
    pipeline.peak_bytes(plan.actions, plan.offsets, ones, ones / 2, plan.is_split, counts)
    return tuple(
        stage_memory(
            rank,
            device,
            [both[index].chunk for index in np.flatnonzero(plan.device_of_chunk == device)],
            float(peaks[device]),
            float(counts[device]),
        )
        for device in range(plan.num_devices)
    )


def _result(
    rank: Rank,
    prices: TrainingPricer,
    plan: Schedule,
    costs: tuple[ChunkCost, ...],
    timeline: Timeline,
    memory: tuple[StageMemory, ...],
) -> TrainingResult:
    setup, overlap = rank.setup, rank.setup.job.overlap
    device_of_action = np.repeat(np.arange(plan.num_devices), np.diff(plan.offsets))
    busy = np.bincount(device_of_action, weights=timeline.ends - timeline.starts)
    first = np.minimum.reduceat(timeline.starts, plan.offsets[:-1])
    last = np.maximum.reduceat(timeline.ends, plan.offsets[:-1])
    # ZB-H2 and ZB-V let devices step their optimizer apart from each other: the next step starts as staggered.
    staggered = plan.name in ("zb_h2", "zb_v")
    pipeline_s = float(np.max(last - first)) if staggered else float(np.max(last))
    worst = int(np.argmax(busy))
    held = [Parameters() for _ in range(plan.num_devices)]
    late_gather, late_reduce = np.zeros(plan.num_devices), np.zeros(plan.num_devices)
    for index, device in enumerate(plan.device_of_chunk):
        cost = costs[index % len(costs)]
        held[device] = held[device] + cost.parameters
        late_gather[device] += 0.0 if overlap.parameter_gather else cost.gather_s
        late_reduce[device] += 0.0 if overlap.gradient_reduce else cost.reduce_s
    reduced = np.maximum(timeline.communicated - last, 0.0) + late_reduce
    exposed_reduce = float(np.max(reduced + last)) - float(np.max(last))
    optimizer = max(prices.seconds(optimizer_tasks(rank, trained(rank, parameters))) for parameters in held)
    finish = prices.seconds(finish_tasks(rank))
    step = pipeline_s + exposed_reduce + finish + optimizer + float(np.max(late_gather))
    straggler = (straggling(setup) - 1.0) * step
    num = setup.degrees.num_microbatches
    per_device = [
        cost
        for index, cost in enumerate(costs * (plan.num_chunks // len(costs)))
        if plan.device_of_chunk[index] == worst
    ]
    share = num / (2 if plan.name == "dualpipe" else 1)
    breakdown: dict[str, float] = {}
    for cost in per_device:
        for part in (cost.forward, cost.backward_input, cost.backward_weight):
            for kind, seconds in part.compute_s.items():
                breakdown[kind] = breakdown.get(kind, 0.0) + seconds * share
            breakdown["slowdown by overlap"] = breakdown.get("slowdown by overlap", 0.0) + part.slowdown_s * share
            for group, seconds in part.exposed_s.items():
                name = f"exposed communication ({group})"
                breakdown[name] = breakdown.get(name, 0.0) + seconds * share
    shown = sum(breakdown.values())
    breakdown["waiting for parameters, hidden communication"] = float(busy[worst]) - shown
    breakdown["pipeline bubble"] = pipeline_s - float(busy[worst])
    breakdown["exposed gradient reduction"] = exposed_reduce
    breakdown["exposed parameter gather"] = float(np.max(late_gather))
    breakdown["end of step"] = finish
    breakdown["optimizer"] = optimizer
    breakdown["stragglers"] = straggler
    whole = PassCost()
    for cost in costs:
        for part in (cost.forward, cost.backward_input, cost.backward_weight):
            whole.add(part)
    total = sum(whole.by_coverage.values())
    flops = num / setup.degrees.pp
    return TrainingResult(
        setup=setup,
        step_s=step + straggler,
        breakdown_s={name: seconds for name, seconds in breakdown.items() if seconds > 1e-9 * step},
        bubble_fraction=float(np.mean(1.0 - busy / pipeline_s)),
        model_flops=sum(cost.model_flops for cost in costs) * flops,
        hardware_flops=sum(cost.hardware_flops for cost in costs) * flops,
        memory=memory,
        costs=costs,
        timeline=timeline,
        by_coverage=whole.by_coverage,
        relative_error=whole.error_s / total if total else 0.0,
        num_parameters=float(count_parameters(setup.model).total),
    )


def straggling(setup: TrainingSetup) -> float:
    """How much longer a step takes because it waits for the slowest of its devices.

    The expected largest of N normal deviations, sigma sqrt(2 ln N), for devices whose speeds differ by sigma.
    """
    num_devices = setup.degrees.num_devices
    sigma = setup.job.faults.straggler_fraction
    return 1.0 + sigma * math.sqrt(2.0 * math.log(num_devices)) if num_devices > 1 else 1.0


def compute_peak(setup: TrainingSetup) -> float:
    """The device's dense peak rate in the format of the job's matrix products."""
    return machine(setup.device, GEMM_FORMATS[setup.job.precision.compute]).flops_per_s


def as_dict(result: TrainingResult) -> dict[str, Any]:
    """The figures of a result as builtins, SI units."""
    return {
        "step_s": result.step_s,
        "tokens_per_s": result.tokens_per_s,
        "tokens_per_s_per_device": result.tokens_per_s_per_device,
        "flops_per_s_per_device": result.flops_per_s_per_device,
        "mfu": result.mfu,
        "hfu": result.hfu,
        "bubble_fraction": result.bubble_fraction,
        "breakdown_s": result.breakdown_s,
        "fits": result.fits,
    }
