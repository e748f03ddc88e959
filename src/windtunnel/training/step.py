"""Simulate one step of a training job: price the operators of each chunk, then replay the pipeline schedule."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np

from windtunnel import catalog
from windtunnel.arguments import checked
from windtunnel.compiled.arrays import Floats, Ints
from windtunnel.metrics.uncertainty import Interval, Spread, interval
from windtunnel.model.parameters import count_parameters
from windtunnel.model.precision import Format
from windtunnel.network.cluster import network_of
from windtunnel.notebook import Shown
from windtunnel.pricing.aiconfigurator.estimator import measured_estimator
from windtunnel.pricing.estimator import Coverage, Estimator, users_estimator
from windtunnel.pricing.roofline import machine
from windtunnel.schema import Schema, decode, read_yaml
from windtunnel.training import pricing
from windtunnel.training.costs import ChunkCost, chunk_costs, message_seconds
from windtunnel.training.figures import FIGURES
from windtunnel.training.job import GEMM_FORMATS, TrainingJob
from windtunnel.training.layers.chunks import Parameters, num_adapter_parameters
from windtunnel.training.layers.host import offloads
from windtunnel.training.layers.rank import Group, Rank
from windtunnel.training.layers.sharding import finish_tasks, optimizer_tasks
from windtunnel.training.memory import HeldMemory, StageMemory, held_memory, stage_memory
from windtunnel.training.pipeline import kernel as pipeline
from windtunnel.training.pipeline.actions import BACKWARD, FORWARD, WEIGHT
from windtunnel.training.pipeline.schedules import Schedule, schedule
from windtunnel.training.setup import TrainingSetup, resolve
from windtunnel.units import format_seconds

KERNELS_OF = (("vllm", "0.24.0"), ("trtllm", "1.3.0"))
"""Engines whose measured tables price training, the faster of the two at each operator: vLLM's bf16 GEMMs and
attention are cuBLAS and FlashAttention, TensorRT-LLM's fp8 GEMMs are cuBLAS, as in Transformer Engine."""

SPREADS_FILE = catalog.shipped("training_spreads.yaml")
"""Written by `benchmarks/training_accuracy.py --write`."""
LEAST_RUNS = 10
"""Runs of a class of jobs below which its own errors say too little: it is then a dense job outside what was learnt."""


@dataclass(frozen=True)
class Timeline:
    """When every action of every pipeline device runs, in seconds from the start of the step."""

    schedule: Schedule
    starts: Floats
    ends: Floats
    communicated: Floats
    """When each device's data-parallel communication is done."""

    @property
    def device_of_action(self) -> Ints:
        return np.repeat(np.arange(self.schedule.num_devices), np.diff(self.schedule.offsets))

    @property
    def busy_s(self) -> Floats:
        """Return the seconds for which each device computes (or waits inside an action)."""
        return np.bincount(self.device_of_action, weights=self.ends - self.starts).astype(np.float64)

    @property
    def last_s(self) -> Floats:
        """When each device's last action ends."""
        return np.maximum.reduceat(self.ends, self.schedule.offsets[:-1])

    @property
    def spans_s(self) -> Floats:
        """Return the seconds from each device's first action to the end of its pipeline."""
        begins = np.minimum.reduceat(self.starts, self.schedule.offsets[:-1]) if self.is_staggered else 0.0
        return self.closes_s - begins

    @property
    def is_staggered(self) -> bool:
        """Whether devices step their optimizer apart from each other, so that steps follow each other as staggered."""
        return self.schedule.name in ("zb_h2", "zb_v")

    @property
    def closes_s(self) -> Floats:
        """When each device goes on to the end of its step: with the whole pipeline, unless it is staggered."""
        return self.last_s if self.is_staggered else np.full(self.schedule.num_devices, float(np.max(self.last_s)))


REDUCTION, REDUCTION_AND_COPIES = "exposed gradient reduction", "exposed gradient reduction and copies to the host"
HOST_COPIES = "copies between device and host in the optimizer's step"
END_OF_STEP = (
    *(REDUCTION, REDUCTION_AND_COPIES, "end of step", "optimizer", "optimizer on the host", HOST_COPIES),
    *("exposed parameter gather", "stragglers"),
)
"""Parts of a step after its pipeline."""


@dataclass(frozen=True)
class TrainingResult(Shown):
    """One step of a job, predicted."""

    REPORT = "training:result_report"

    setup: TrainingSetup
    step_s: float
    breakdown_s: dict[str, float]
    """Parts of the busiest device's step; they add up to `step_s`."""
    bubble_fraction: float
    """Fraction of the pipeline's time for which a device waits, mean over devices: in the schedule's bubbles, and for
    stages that take longer."""
    model_flops: float
    """FLOPs of one step on one device: forward, and twice as many backward. Causal attention counts the pairs that it
    computes, half of all (PaLM counts all: arXiv:2204.02311, appendix B). Frozen weights have one product backward."""
    hardware_flops: float
    memory: tuple[StageMemory, ...]
    costs: tuple[ChunkCost, ...]
    timeline: Timeline = field(compare=False)
    """Follows from the setup and the costs; arrays do not compare as one."""
    by_coverage: dict[Coverage, float]
    """Seconds of tasks by the coverage of their estimates."""
    relative_error: float
    """Expected error of the step's estimates, were they all wrong the same way."""
    num_parameters: float
    num_trained: float
    """All of them, or those of adapters."""
    collectives: tuple[pricing.NetworkCollective, ...] = ()
    """Those that ran on the job's network."""

    def __repr__(self) -> str:
        """Return a summary for notebooks: the costs and the timeline alone would be thousands of numbers."""
        setup, unfit = self.setup, "" if self.fits else "does not fit; "
        return (
            f"TrainingResult({setup.model.name} on {setup.degrees.num_devices:,} x {setup.device.name}: "
            f"{unfit}step {format_seconds(self.step_s)}, {self.tokens_per_s:,.0f} tokens/s, MFU {self.mfu:.1%}; "
            f"see .breakdown_s, .memory, .timeline)"
        )

    @property
    def closing_s(self) -> dict[str, float]:
        """Return the parts of `breakdown_s` that follow the pipeline, in their order."""
        return {name: seconds for name, seconds in self.breakdown_s.items() if name in END_OF_STEP}

    @property
    def tokens_per_s(self) -> float:
        job = self.setup.job
        return job.global_batch * job.sequence_tokens / self.step_s

    @property
    def tokens_per_s_per_device(self) -> float:
        return self.tokens_per_s / self.setup.degrees.num_devices

    @property
    def peak_flops_per_s(self) -> float:
        """A device's dense peak rate in the format of the job's matrix products.

        Attention and the head compute in 16 bit; where that is faster (fp32), they count at its rate.
        """
        formats = (GEMM_FORMATS[self.setup.job.precision.compute], Format.BF16)
        own, other = (machine(self.setup.device, each).flops_per_s for each in formats)
        if other <= own:
            return own
        share = sum(cost.product_flops for cost in self.costs) / sum(cost.hardware_flops for cost in self.costs)
        return 1.0 / (share / own + (1.0 - share) / other)

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
        return max(self.memory, key=lambda stage: stage.needed_bytes)

    @property
    def host_s(self) -> float:
        """Return the seconds of a step that wait for the host and for copies between it and the device."""
        return sum(seconds for name, seconds in self.breakdown_s.items() if "host" in name)

    @property
    def host_bytes(self) -> float:
        """Return the offloaded bytes in the memory of the fullest host."""
        ranks_of_host = min(self.setup.node.num_devices, self.setup.degrees.num_devices)
        return max(stage.host_bytes for stage in self.memory) * ranks_of_host

    @property
    def fits_hosts(self) -> bool:
        """Whether what is offloaded is no more than the host's memory; it is where that is not known."""
        limit = self.setup.node.host_memory_bytes
        return limit is None or self.host_bytes <= limit

    @property
    def fits_devices(self) -> bool:
        """Whether the fullest device keeps within what jobs were measured to fill (`FIGURES.usable_fraction`)."""
        return self.worst_memory.needed_bytes <= FIGURES.usable_fraction * self.setup.device.memory_bytes

    @property
    def fits(self) -> bool:
        """Whether devices and hosts have the memory that the job needs."""
        return self.fits_devices and self.fits_hosts


@checked
def simulate_training(
    job: TrainingJob | TrainingSetup, estimator: Estimator | None = None, allow_download: bool = False
) -> TrainingResult:
    """Predict one step of `job` from its operators.

    Args:
        estimator: prices operators; None reads the tables measured on the job's device, or its calibrated roofline.
        allow_download: fetch a model's config.json that the catalog does not have.

    Raises:
        InputError: an unknown name, or an impossible split or schedule.
    """
    setup = job if isinstance(job, TrainingSetup) else resolve(job, allow_download)
    return simulate_with(setup, training_prices(setup, estimator and users_estimator(estimator)))


def training_prices(setup: TrainingSetup, estimator: Estimator | None = None) -> pricing.TrainingPricer:
    """Return the prices on the job's device, node and network; jobs with the same three may share them. InputError
    where the network's topology does not suit the job."""
    network = None
    if setup.job.network is not None:
        network = pricing.JobNetwork(network_of(setup.job.network, setup.node, setup.degrees.num_devices), Rank(setup))
    return pricing.pricer(estimator or training_estimator(setup), setup.device, setup.node, network)


def training_estimator(setup: TrainingSetup) -> Estimator:
    """Return the estimator that knows most about the job's device, with times as they were measured.

    Sustained rates were fitted to them, also on cards with slower memory (torchtitan's H100 of 2.4 TB/s).
    """
    measured = (measured_estimator(setup.device, setup.node, *engine, scales=False) for engine in KERNELS_OF)
    return pricing.FastestEstimator(tuple(measured))


def simulate_with(
    setup: TrainingSetup, prices: pricing.TrainingPricer, works: dict[object, Any] | None = None
) -> TrainingResult:
    """Predict one step with prices that many jobs on one device and node may share.

    Args:
        works: `Rank.works` of jobs whose layers do the same (`same_layers`), filled here; None: no other's.
    """
    rank = Rank(setup, {} if works is None else works)
    prices = prices.of_job(rank)
    costs = chunk_costs(rank, prices)
    plan = schedule(
        str(setup.job.schedule),
        setup.degrees.pp,
        setup.degrees.num_microbatches,
        setup.degrees.virtual_stages,
        bool(setup.job.overlap.experts),
    )
    timeline = replay(rank, prices, plan, costs)
    memory = memory_by_stage(rank, plan, costs)
    return _result(rank, prices, plan, costs, timeline, memory)


def replay(rank: Rank, prices: pricing.TrainingPricer, plan: Schedule, costs: tuple[ChunkCost, ...]) -> Timeline:
    """Run the schedule with these costs."""
    both = _by_chunk(plan, costs)
    seconds = np.zeros((3, plan.num_chunks))
    seconds[[FORWARD, BACKWARD, WEIGHT]] = np.transpose([[part.seconds for part in cost.passes] for cost in both])
    # A forward and a backward pass together hide the exchange of tokens of one beside the computation of the other.
    paired = [[sum(p.pairable_s for p in cost.passes), sum(p.computing_s for p in cost.passes)] for cost in both]
    hidden = np.min(paired, axis=1) * (1.0 - prices.overlap_slowdown) / 2
    overlap = rank.setup.job.overlap
    zeros = np.zeros(plan.num_chunks)
    times = pipeline.ChunkTimes(
        actions_s=seconds,
        hidden_s=hidden,
        message_s=zeros + message_seconds(rank, prices),
        gather_s=np.array([cost.gather_s for cost in both]) if overlap.parameter_gather else zeros,
        reduce_s=np.array([cost.reduce_s for cost in both]) if overlap.gradient_reduce else zeros,
        num_buckets=np.array([cost.num_buckets for cost in both]),
    )
    settings = pipeline.OverlapSettings(not overlap.pipeline, prices.overlap_slowdown)
    return Timeline(plan, *pipeline.run(plan.tables, times, settings))


def _by_chunk(plan: Schedule, costs: tuple[ChunkCost, ...]) -> list[ChunkCost]:
    """Return the cost of every chunk of a schedule; DualPipe's second direction runs the same chunks again."""
    return [costs[index % len(costs)] for index in range(plan.num_chunks)]


def memory_by_stage(rank: Rank, plan: Schedule, costs: tuple[ChunkCost, ...]) -> tuple[StageMemory, ...]:
    """Return the peak memory of a rank of every stage."""
    both = _by_chunk(plan, costs)
    kept = np.array([cost.kept_bytes for cost in both])
    ones = 1.0 / np.bincount(plan.device_of_chunk)[plan.device_of_chunk]
    # Where the weights' gradient comes later, linear layers' inputs stay until then: about half of what is kept.
    peaks, counts = plan.peaks(kept, kept / 2), plan.peaks(ones, ones / 2)
    known: dict[tuple[int, ...], HeldMemory] = {}
    stages = []
    for device in range(plan.num_devices):
        held = [both[index] for index in np.flatnonzero(plan.device_of_chunk == device)]
        # Equal chunks share their passes.
        key = tuple(id(cost.passes) for cost in held)
        if key not in known:
            known[key] = held_memory(rank, [cost.chunk for cost in held])
        stages.append(stage_memory(rank, device, known[key], float(peaks[device]), float(counts[device])))
    return tuple(stages)


def _result(
    rank: Rank,
    prices: pricing.TrainingPricer,
    plan: Schedule,
    costs: tuple[ChunkCost, ...],
    timeline: Timeline,
    memory: tuple[StageMemory, ...],
) -> TrainingResult:
    setup, busy = rank.setup, timeline.busy_s
    pipeline_s = float(np.max(timeline.spans_s))
    ends = _ends_of_step(rank, prices, plan, costs, timeline)
    step = pipeline_s + sum(ends.values())
    ends["stragglers"] = (straggling(setup) - 1.0) * step
    worst = int(np.argmax(busy))
    breakdown = _passes(plan, costs, worst)
    rest = float(busy[worst]) - sum(breakdown.values())
    exchange = f"exposed communication ({Group.EXPERTS})"
    if rest < 0 and exchange in breakdown:
        # Passes of two micro-batches that run interleaved hide the exchange of tokens behind each other's computation.
        rest, breakdown[exchange] = 0.0, breakdown[exchange] + rest
    breakdown["waiting for parameters, hidden communication"] = max(rest, 0.0)
    breakdown["pipeline bubble"] = pipeline_s - float(busy[worst])
    breakdown |= ends
    all_passes = pricing.PassCost()
    for cost in costs:
        for part in cost.passes:
            all_passes.add(part)
    per_device = setup.degrees.num_microbatches / setup.degrees.pp
    total = sum(all_passes.by_coverage.values())
    return TrainingResult(
        setup=setup,
        step_s=step + ends["stragglers"],
        breakdown_s={name: seconds for name, seconds in breakdown.items() if seconds > 1e-9 * step},
        bubble_fraction=float(np.mean(1.0 - busy / pipeline_s)),
        model_flops=sum(cost.model_flops for cost in costs) * per_device,
        hardware_flops=sum(cost.hardware_flops for cost in costs) * per_device,
        memory=memory,
        costs=costs,
        timeline=timeline,
        by_coverage=all_passes.by_coverage,
        relative_error=all_passes.error_s / total if total else 0.0,
        num_parameters=(num_parameters := float(count_parameters(setup.model).total)),
        num_trained=num_parameters if setup.job.lora is None else num_adapter_parameters(setup),
        collectives=tuple(prices.collectives),
    )


def _passes(plan: Schedule, costs: tuple[ChunkCost, ...], device: int) -> dict[str, float]:
    """Return the seconds of a device's passes in a step, by class of operator and group of exposed communication."""
    # Of DualPipe's two directions each has half of the micro-batches.
    num_passes = plan.num_microbatches * len(costs) / plan.num_chunks
    seconds_of: dict[str, float] = {}
    for index in np.flatnonzero(plan.device_of_chunk == device):
        for part in costs[index % len(costs)].passes:
            named = {f"exposed communication ({group})": seconds for group, seconds in part.exposed_s.items()}
            for name, seconds in {**part.compute_s, "slowdown by overlap": part.slowdown_s, **named}.items():
                seconds_of[name] = seconds_of.get(name, 0.0) + seconds * num_passes
    return seconds_of


def _ends_of_step(
    rank: Rank, prices: pricing.TrainingPricer, plan: Schedule, costs: tuple[ChunkCost, ...], timeline: Timeline
) -> dict[str, float]:
    """Return the seconds after the pipeline: late gradients, small collectives, the optimizer, parameters."""
    overlap = rank.setup.job.overlap
    held = [Parameters() for _ in range(plan.num_devices)]
    gather, reduce = np.zeros(plan.num_devices), np.zeros(plan.num_devices)
    for index, device in enumerate(plan.device_of_chunk):
        cost = costs[index % len(costs)]
        held[device] = held[device] + cost.parameters
        gather[device] += 0.0 if overlap.parameter_gather else cost.gather_s
        reduce[device] += 0.0 if overlap.gradient_reduce else cost.reduce_s
    reduced = np.maximum(timeline.communicated, timeline.last_s) + reduce
    steps = max((optimizer_tasks(rank, parameters) for parameters in held), key=prices.seconds)
    copies = prices.seconds(task for task in steps if task.group is Group.HOST)
    return {
        REDUCTION_AND_COPIES if offloads(rank) else REDUCTION: float(np.max(reduced) - np.max(timeline.last_s)),
        "end of step": prices.seconds(finish_tasks(rank)),
        "optimizer on the host" if offloads(rank) else "optimizer": prices.seconds(steps) - copies,
        HOST_COPIES: copies,
        "exposed parameter gather": float(np.max(gather)),
    }


def straggling(setup: TrainingSetup) -> float:
    """Return the factor by which a step takes longer because it waits for its slowest device.

    Jitter of devices, hosts and networks grows with every doubling of the devices beyond a node. Devices whose speeds
    differ by sigma add the expected largest of N normal deviations, sigma sqrt(2 ln N).
    """
    num_devices = setup.degrees.num_devices
    sigma = setup.job.faults.straggler_fraction
    by_doubling = setup.job.faults.jitter_by_doubling
    by_doubling = FIGURES.jitter_by_doubling if by_doubling is None else by_doubling
    jitter = by_doubling * math.log2(max(num_devices / 8, 1.0))
    return 1.0 + jitter + sigma * math.sqrt(2.0 * math.log(num_devices))


def kind_of_job(setup: TrainingSetup) -> str:
    """Return the class of jobs with equal errors: `experts`, `lora` or `dense`."""
    if setup.job.lora is not None:
        return "lora"
    return "experts" if setup.model.has_experts else "dense"


class LearntSpread(Schema):
    """Errors of published runs of one class of jobs, and what these runs were."""

    spread: Spread
    """Measured over predicted step time; a data set weighs the root of its runs, and intervals hold 80% of them."""
    architectures: tuple[str, ...]
    formats: tuple[str, ...]
    frameworks: tuple[str, ...]

    def distance(self, setup: TrainingSetup) -> int:
        """Count what of a job none of the runs had: its architecture, format, framework, offloading."""
        found = (
            setup.device.architecture in self.architectures,
            setup.job.precision.compute in self.formats,
            setup.job.framework in self.frameworks,
            setup.job.sharding.offload == "none",
        )
        return found.count(False)


@cache
def spreads() -> Mapping[str, LearntSpread]:
    """Return what published runs teach of errors, by class of jobs."""
    return {kind: decode(raw, LearntSpread) for kind, raw in read_yaml(SPREADS_FILE).items()}


def step_interval(result: TrainingResult, known: Mapping[str, LearntSpread] | None = None) -> Interval:
    """Return the 80% interval of a step's seconds; `known` replaces the shipped spreads."""
    known = known or spreads()
    total = sum(result.by_coverage.values())
    coverage = {how.value: seconds / total for how, seconds in result.by_coverage.items()} if total else {}
    learnt = known.get(kind_of_job(result.setup))
    is_known = learnt is not None and learnt.spread.num_runs >= LEAST_RUNS
    learnt = learnt if learnt is not None and is_known else known["dense"]
    num_outside = learnt.distance(result.setup) + int(not is_known)
    known_interval = interval(result.step_s, learnt.spread, num_outside, coverage)
    slower_s = result.host_s * (FIGURES.host_offload["slowest"] - 1.0)
    return replace(known_interval, high=known_interval.high + slower_s)
