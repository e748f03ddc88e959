"""A training job: model, batch, how it spreads over devices, number formats, recomputation, overlap and schedule.

Degrees follow Megatron-Core (`core/parallel_state.py`): `tp x cp x pp x dp = num_devices`; experts see the same devices
as `experts_tp x ep x experts_dp x pp`. `dp` is the dense degree; data-parallel groups of dense weights span `dp x cp`.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
import yaml

from windtunnel.errors import InputError
from windtunnel.spec import catalog
from windtunnel.spec.hardware import Device, Node
from windtunnel.spec.model import (
    DenseFeedForward,
    ExpertsFeedForward,
    GatedDeltaAttention,
    GroupedQueryAttention,
    LatentAttention,
    ModelSpec,
)
from windtunnel.spec.network import ClusterNetwork
from windtunnel.spec.noun import Noun, decode, encode, read_yaml
from windtunnel.spec.precision import Format
from windtunnel.spec.scenario import ANY_DEVICE, set_path

Framework = Literal["megatron", "deepspeed", "fsdp2", "deepseek"]

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "looped_bfs", "zb_h1", "zb_h2", "zb_v", "dualpipe", "dualpipe_v"]
SCHEDULES: tuple[str, ...] = get_args(ScheduleName)
V_SCHEDULES = ("zb_v", "dualpipe_v")
"""Schedules that fold a pipeline of `2 x pp` chunks into a V: device i has chunks i and 2 pp - 1 - i.

`dualpipe` has `pp` chunks and every device holds two of them, i and pp - 1 - i: parameters are there twice.
"""
CHUNKED_SCHEDULES = ("interleaved", "looped_bfs")
"""Schedules that give every device `virtual_stages` chunks of layers."""

ComputeFormat = Literal["fp32", "fp16", "bf16", "fp8", "fp8_block", "mxfp8", "nvfp4"]

GEMM_FORMATS: dict[str, Format] = {
    "fp32": Format.FP32,
    "fp16": Format.BF16,
    "bf16": Format.BF16,
    "fp8": Format.FP8,
    "fp8_block": Format.FP8_BLOCK,
    "mxfp8": Format.FP8,
    "nvfp4": Format.NVFP4,
}
"""Format of a training recipe -> the format whose GEMMs cost the same; fp16 and bf16 share rates and bytes."""

UNITS = {"fp8": "fp8", "fp8_block": "fp8", "mxfp8": "fp4", "nvfp4": "fp4"}
"""Format of a training recipe -> the rate that devices with its matrix units publish: those that take a scale for each
32 values (mxfp8) are the ones that have fp4."""


class TrainingParallelism(Noun):
    """How a job spreads over its devices; `None` follows from the others."""

    tp: int = 1
    sequence_parallel: bool | None = None
    """Norms, dropouts and residuals split along the sequence over `tp`; None: as the framework does."""
    cp: int = 1
    cp_method: Literal["ring", "all_gather", "ulysses"] = "ring"
    """How context-parallel ranks meet each other's keys: passed round, gathered first, or heads exchanged."""
    pp: int = 1
    virtual_stages: int = 1
    """Chunks of layers on each device (VPP)."""
    layers_per_stage: tuple[int, ...] | None = None
    """Layers of each chunk in the order of the forward pass, `pp x virtual_stages` of them; None splits evenly."""
    dp: int | None = None
    ep: int = 1
    experts_tp: int | None = None
    """Ways that each expert is sharded (expert-TP); None takes 1, or `tp` where `ep` is 1."""
    experts_dp: int | None = None
    experts_exchange: Literal["all_to_all", "by_node"] | None = None
    """How tokens reach experts: each on its own, or once for each node and copied there (DeepEP). None: as the
    framework does."""

    def __post_init__(self) -> None:
        for name in ("tp", "cp", "pp", "virtual_stages", "dp", "ep", "experts_tp", "experts_dp"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; at least 1 is needed")
        stages = self.layers_per_stage
        if stages is not None and min(stages, default=-1) < 0:
            raise ValueError(f"layers_per_stage is {list(stages)}; no stage has fewer than 0 layers")
        num_chunks = self.pp * self.virtual_stages
        if stages is not None and len(stages) != num_chunks:
            raise ValueError(
                f"layers_per_stage has {len(stages)} entries; pp x virtual_stages = {self.pp} x {self.virtual_stages} "
                f"= {num_chunks} are needed"
            )


class Sharding(Noun):
    """What data-parallel ranks divide among themselves, ZeRO's stages (arXiv:1910.02054), and in which pieces.

    `None` takes the framework's. Sizes count elements, as DeepSpeed's options of these names do.
    """

    zero: Literal[0, 1, 2, 3] | None = None
    """1: optimizer state (Megatron's distributed optimizer), 2: gradients too, 3: parameters too (FSDP)."""
    group: int | None = None
    """Ranks that share one copy; between groups gradients are all-reduced (HSDP). None: all of them."""
    reshard_after_forward: bool = True
    """ZeRO-3: parameters are gathered again for the backward pass."""
    reduce_bucket_elements: int | None = None
    gather_bucket_elements: int | None = None
    prefetch_bucket_elements: int | None = None
    """ZeRO-3: parameters gathered together."""
    persistence_threshold_elements: int | None = None
    """ZeRO-3: smaller parameters are never sharded."""
    max_live_elements: int | None = None
    """ZeRO-3: gathered parameters held at once."""

    def __post_init__(self) -> None:
        for name in ("group", "reduce_bucket_elements", "gather_bucket_elements", "prefetch_bucket_elements"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; at least 1 is needed")


class TrainingPrecision(Noun):
    """Number formats. `None` takes the framework's."""

    compute: ComputeFormat = "bf16"
    """GEMMs of the layers; the head, attention's core and norms stay in 16 bit."""
    gradients: Literal["fp32", "bf16"] | None = None
    """In which micro-batches are summed."""
    gradient_reduce: Literal["fp32", "bf16"] | None = None
    """On the wire between data-parallel ranks."""
    parameter_gather: Literal["fp32", "bf16", "fp8"] | None = None
    """Parameters on the wire."""
    master_weights: Literal["fp32", "bf16"] | None = None
    """The optimizer's own copy; bf16: it updates the parameters themselves."""
    moments: Literal["fp32", "bf16", "fp8"] = "fp32"
    """The optimizer's state, per moment."""
    experts_dispatch: Literal["bf16", "fp8"] | None = None
    """Tokens on their way to experts in the forward pass."""


RecomputedModule = Literal[
    "core_attention", "norms", "activation", "latent_up_projection", "feed_forward", "experts", "every_second_product"
]
"""What selective recomputation can drop; `every_second_product` is what torchtitan calls selective checkpointing."""


class Recompute(Noun):
    """What the backward pass computes again so as not to keep it (arXiv:2205.05198, section 5)."""

    granularity: Literal["none", "selective", "full"] = "none"
    modules: tuple[RecomputedModule, ...] = ("core_attention",)
    """Of selective recomputation. Flash attention recomputes its scores anyhow; naming it then costs nothing more
    than its forward pass."""
    num_layers: int | None = None
    """Layers of each chunk that are fully recomputed; None: all."""
    distribute: bool = False
    """Full: kept layer inputs are split over tensor-parallel ranks and gathered again."""

    def __post_init__(self) -> None:
        if self.num_layers is not None and self.num_layers < 0:
            raise ValueError(f"num_layers is {self.num_layers}; at least 0 is needed")


class Overlap(Noun):
    """What runs beside computation. `None` takes the framework's."""

    gradient_reduce: bool | None = None
    parameter_gather: bool | None = None
    tensor_parallel: bool | None = None
    """GEMMs cut into pieces that travel while others compute (Transformer Engine's userbuffers, async TP)."""
    tensor_gradient: bool | None = None
    """Tensor-parallel collectives of the backward pass beside the weights' gradients (Megatron-LM from 2022 on)."""
    pipeline: bool | None = None
    experts: bool | None = None
    """Dispatch and combine beside another micro-batch's computation (DualPipe, Megatron's 1F1B A2A overlap)."""


class Kernels(Noun):
    """Which kernels compute what is not a GEMM. `None` takes the framework's."""

    attention: Literal["flash", "flash2", "unfused"] | None = None
    """`flash`: the kernels that were measured on the device (cuDNN's, FlashAttention-3). `flash2`: FlashAttention-2,
    which PyTorch calls itself and which is slower on Hopper. `unfused` keeps the scores in memory (before 2022)."""
    fused: bool | None = None
    """Norms, activations, rope, residuals, loss each in one pass (Transformer Engine, torch.compile); else one kernel
    for each operation, as eager PyTorch."""
    cuda_graphs: bool = False


class Lora(Noun):
    """Adapters beside frozen linear layers (arXiv:2106.09685)."""

    rank: int = 16
    all_linear: bool = True
    """Adapters at every linear layer; else at those of attention only."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank is {self.rank}; at least 1 is needed")


class Faults(Noun):
    """What interrupts a run, and what an interruption costs; the goodput follows (Young 1974, Daly 2006)."""

    device_mtbf_s: float | None = None
    """Mean time between failures of one device with its share of host and network; None: nothing fails."""
    restart_s: float = 600.0
    """From a failure to the first new step, without the lost work."""
    checkpoint_interval_s: float | None = None
    """None takes Young's optimum."""
    checkpoint_bytes_per_s: float | None = None
    """Storage bandwidth of the whole job; None: checkpoints cost nothing."""
    checkpoint_blocks: bool = True
    """False: written beside training; only failures lose work."""
    straggler_fraction: float = 0.0
    """Standard deviation of devices' speed, relative; every step waits for the slowest."""

    def __post_init__(self) -> None:
        for name in ("device_mtbf_s", "checkpoint_interval_s", "checkpoint_bytes_per_s"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} is {value}; more than 0 is needed")
        if self.restart_s < 0 or not 0 <= self.straggler_fraction < 1:
            raise ValueError("restart_s is at least 0 and straggler_fraction from 0 to below 1")


class TrainingJob(Noun):
    """One training run, as a person writes it down."""

    model: str | ModelSpec
    """A catalog name, the path of a config.json, or a model written out."""
    device: str | Device
    """A catalog name, a YAML file, or a device written out; the node likewise."""
    sequence_tokens: int
    global_batch: int
    """Sequences of one optimizer step."""
    node: str | Node | None = None
    """None takes the usual node of the device."""
    num_devices: int | None = None
    """None: tp x cp x pp x dp."""
    micro_batch: int = 1
    """Sequences that a rank computes at once."""
    num_microbatches: int | None = None
    """Gradient accumulation: micro-batches of one rank in a step; None follows from the batch."""
    parallelism: TrainingParallelism = TrainingParallelism()
    sharding: Sharding = Sharding()
    precision: TrainingPrecision = TrainingPrecision()
    recompute: Recompute = Recompute()
    lora: Lora | None = None
    """Low-rank adapters are trained and nothing else."""
    optimizer: Literal["adam", "sgd_momentum", "sgd", "adafactor", "muon"] = "adam"
    overlap: Overlap = Overlap()
    kernels: Kernels = Kernels()
    schedule: ScheduleName | None = None
    """None: `1f1b`, or `interleaved` with virtual stages."""
    framework: Framework = "megatron"
    dropout: bool = False
    """Masks are kept; GPT-3 and its contemporaries."""
    learned_positions: bool = False
    """A position embedding of `sequence_tokens` rows (GPT-2, GPT-3)."""
    total_tokens: float | None = None
    """Of the whole run; gives its duration, energy and price."""
    faults: Faults = Faults()
    network: ClusterNetwork | None = None
    """Between the nodes; None takes closed forms over their published links."""
    price_usd_per_hour: float | None = None
    """Of one device; None takes the catalog's list price."""

    def __post_init__(self) -> None:
        for name in ("num_devices", "sequence_tokens", "global_batch", "micro_batch", "num_microbatches"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; at least 1 is needed")
        if self.total_tokens is not None and self.total_tokens <= 0:
            raise ValueError(f"total_tokens is {self.total_tokens}; more than 0 is needed")


@dataclass(frozen=True)
class Degrees:
    """Every degree of a job, checked: what divides what, exactly."""

    num_devices: int
    tp: int
    cp: int
    pp: int
    virtual_stages: int
    dp: int
    ep: int
    experts_tp: int
    experts_dp: int
    shard_group: int
    """Ranks over which one copy of dense weights or their optimizer state is divided."""
    micro_batch: int
    num_microbatches: int

    @property
    def num_chunks(self) -> int:
        """Chunks of layers in the whole pipeline."""
        return self.pp * self.virtual_stages

    @property
    def dense_dp(self) -> int:
        """Ranks that hold the same dense weights: `dp x cp`."""
        return self.dp * self.cp

    @property
    def replicas(self) -> int:
        """Copies of the sharded state (HSDP); 1 where all data-parallel ranks share one."""
        return self.dense_dp // self.shard_group


@dataclass(frozen=True)
class TrainingSetup:
    """A job with its names looked up, its framework's defaults filled in and its degrees known."""

    job: TrainingJob
    """Nothing in it that has a default is None."""
    model: ModelSpec
    device: Device
    node: Node
    degrees: Degrees
    layers_per_chunk: tuple[int, ...]
    """In the order of the forward pass; chunk c is on stage c % pp, or folded back in V-shaped schedules."""


def load(path: Path | str, overrides: dict[str, Any] | None = None) -> TrainingJob:
    """The job in a YAML or JSON file; `overrides` as `--set` gives them: dotted path -> value.

    Raises:
        InputError: the file is missing or wrong, or an override names no field.
    """
    return job_of(Path(path), overrides or {})


def job_of(path: Path | None, overrides: dict[str, Any]) -> TrainingJob:
    """The job in a file, if there is one, with every override over it.

    Raises:
        InputError: the file is missing or wrong, or what a job needs is given by neither.
    """
    raw = read_yaml(path) if path is not None else {}
    if not isinstance(raw, dict):
        raise InputError(f"{path} is not a training job: it holds {type(raw).__name__}, not keys and values")
    for dotted, value in overrides.items():
        set_path(raw, dotted, value)
    for name, what in _NEEDED.items():
        if raw.get(name) is None:
            raise InputError(f"{name} is missing: {what}", f"give --{name.replace('_', '-')}, or a job file")
    return decode(raw, TrainingJob, str(path) if path is not None else "")


_NEEDED = {
    "model": "a model of the catalog (`windtunnel catalog models`)",
    "device": "a device of the catalog (`windtunnel catalog devices`)",
    "sequence_tokens": "tokens of one sequence",
    "global_batch": "sequences of one optimizer step",
}


def save(job: TrainingJob, path: Path | str) -> None:
    """Write `job` as YAML; loading it gives an equal one."""
    text = yaml.safe_dump(encode(job), sort_keys=False, width=120)
    Path(path).write_text(text, encoding="utf-8")


def degrees(job: TrainingJob) -> Degrees:
    """Every degree of `job`, from those that it gives.

    The relations that must hold exactly:
        num_devices = tp x cp x pp x dp
        num_devices / pp = experts_tp x ep x experts_dp
        global_batch = dp x micro_batch x num_microbatches
        the shard group divides dp x cp.

    Raises:
        InputError: names the relation that is violated and both of its sides.
    """
    at = job.parallelism
    model_ranks = at.tp * at.cp * at.pp
    dp = at.dp or (_divide("num_devices = tp x cp x pp x dp", job.num_devices, model_ranks) if job.num_devices else 1)
    num_devices = model_ranks * dp
    if job.num_devices not in (None, num_devices):
        raise InputError(
            f"num_devices = {job.num_devices}, but tp x cp x pp x dp = {at.tp} x {at.cp} x {at.pp} x {dp} "
            f"= {num_devices}",
            "leave dp out: it follows from num_devices",
        )
    num_microbatches = _divide(
        "global_batch = dp x micro_batch x num_microbatches", job.global_batch, dp * job.micro_batch
    )
    if job.num_microbatches not in (None, num_microbatches):
        raise InputError(
            f"num_microbatches = {job.num_microbatches}, but global_batch / (dp x micro_batch) = {job.global_batch} / "
            f"({dp} x {job.micro_batch}) = {num_microbatches}",
            "leave num_microbatches out: it follows",
        )
    experts_tp = at.experts_tp or (at.tp if at.ep == 1 else 1)
    per_stage = num_devices // at.pp
    experts_dp = _divide("num_devices / pp = experts_tp x ep x experts_dp", per_stage, experts_tp * at.ep)
    if at.experts_dp not in (None, experts_dp):
        raise InputError(
            f"experts_dp = {at.experts_dp}, but num_devices / (pp x experts_tp x ep) = {num_devices} / "
            f"({at.pp} x {experts_tp} x {at.ep}) = {experts_dp}",
            "leave experts_dp out: it follows",
        )
    shard_group = job.sharding.group or dp * at.cp
    _divide("dp x cp = shard group x replicas", dp * at.cp, shard_group)
    return Degrees(
        num_devices=num_devices,
        tp=at.tp,
        cp=at.cp,
        pp=at.pp,
        virtual_stages=2 if job.schedule in V_SCHEDULES else at.virtual_stages,
        dp=dp,
        ep=at.ep,
        experts_tp=experts_tp,
        experts_dp=experts_dp,
        shard_group=shard_group,
        micro_batch=job.micro_batch,
        num_microbatches=num_microbatches,
    )


def dense_dp_of(world: int, pp: int, ep: int, tp: int, experts_dp: int) -> int:
    """The dense data-parallel degree where a job is described as `world = experts_dp x pp x ep x tp`.

    That convention puts expert parallelism outside data parallelism; ours inside: `dp = experts_dp x ep`.

    Raises:
        InputError: the product is not `world`.
    """
    if experts_dp * pp * ep * tp != world:
        raise InputError(
            f"world = {world}, but experts_dp x pp x ep x tp = {experts_dp} x {pp} x {ep} x {tp} "
            f"= {experts_dp * pp * ep * tp}"
        )
    return experts_dp * ep


def _divide(relation: str, whole: int, part: int) -> int:
    """`whole / part` where it is a whole number; `relation` names what it would violate."""
    quotient, rest = divmod(whole, part)
    if rest or quotient == 0:
        raise InputError(f"{relation} does not hold: {whole} is not a multiple of {part}")
    return quotient


def resolve(job: TrainingJob, allow_download: bool = False) -> TrainingSetup:
    """Look up the job's names, fill in its framework's defaults and check that its parts go together.

    Raises:
        InputError: an unknown name, or degrees, a split or a schedule that this model and these devices cannot have.
    """
    job = with_framework_defaults(job)
    model, device, node = look_up(job, allow_download)
    if node.device not in (device.name, ANY_DEVICE):
        raise InputError(
            f"{node.title} holds {node.device}, not {device.name}", "leave node out, or take the node's own device"
        )
    known = degrees(job)
    check_model(job, known, model)
    check_schedule(job, known)
    unit = UNITS.get(job.precision.compute)
    if unit is not None and unit not in device.peak_flops_per_s:
        formats = [name for name in GEMM_FORMATS if UNITS.get(name, "bf16") in device.peak_flops_per_s]
        raise InputError(
            f"{device.name} has no matrix units for {job.precision.compute}: it publishes no rate of {unit}",
            f"set precision.compute to one of {', '.join(formats)}",
        )
    if known.num_devices > node.num_devices and node.scale_out is None:
        raise InputError(
            f"the job needs {known.num_devices} devices; {node.name} has {node.num_devices} and no link to others",
            "use fewer, or a node with scale_out",
        )
    return TrainingSetup(job, model, device, node, known, layers_per_chunk(job, known, model))


def look_up(job: TrainingJob, allow_download: bool = False) -> tuple[ModelSpec, Device, Node]:
    """What the job's names mean; without a node it is the usual one of the device.

    Raises:
        InputError: an unknown name.
    """
    model = job.model if isinstance(job.model, ModelSpec) else catalog.model(job.model, allow_download)
    device = job.device if isinstance(job.device, Device) else catalog.device(job.device)
    node = job.node if isinstance(job.node, Node) else None
    return model, device, node or (catalog.node(str(job.node)) if job.node else catalog.default_node(device))


def with_framework_defaults(job: TrainingJob) -> TrainingJob:
    """`job` with every `None` that its framework decides replaced by what the framework does.

    Frameworks are `catalog/frameworks/*.yaml`: tables of the job's own fields.
    """
    where, defaults = _framework_defaults(job.framework, tuple(catalog.search_path()))
    filled: TrainingJob = _filled(job, defaults, where)
    if filled.parallelism.sequence_parallel and filled.parallelism.tp == 1:
        parallelism = msgspec.structs.replace(filled.parallelism, sequence_parallel=False)
        filled = msgspec.structs.replace(filled, parallelism=parallelism)
    if filled.schedule is None:
        chosen: ScheduleName = "interleaved" if filled.parallelism.virtual_stages > 1 else "1f1b"
        filled = msgspec.structs.replace(filled, schedule=chosen)
    return filled


@cache
def _framework_defaults(framework: str, _: tuple[Path, ...]) -> tuple[str, dict[str, Any]]:
    """A framework's file and what it says, read once for each search path: a search resolves thousands of jobs."""
    path = catalog.find("frameworks", framework)
    return path.name, read_yaml(path)["defaults"]


def _filled(noun: Any, defaults: dict[str, Any], where: str) -> Any:
    changes: dict[str, Any] = {}
    for name, default in defaults.items():
        if name not in noun.__struct_fields__:
            raise InputError(f"{where}: a training job has no {name!r}")
        value = getattr(noun, name)
        if isinstance(default, dict):
            changes[name] = _filled(value, default, where)
        elif value is None:
            changes[name] = default
    return msgspec.structs.replace(noun, **changes)


def layers_per_chunk(job: TrainingJob, known: Degrees, model: ModelSpec) -> tuple[int, ...]:
    """Layers of each chunk of the pipeline, in the order of the forward pass.

    Raises:
        InputError: they do not add up to the model's, or cannot be split evenly and no split is given.
    """
    given = job.parallelism.layers_per_stage
    if given is not None:
        if len(given) != known.num_chunks:
            raise InputError(
                f"layers_per_stage has {len(given)} entries; the schedule {job.schedule} needs {known.num_chunks}"
            )
        if sum(given) != model.num_layers:
            raise InputError(f"layers_per_stage adds up to {sum(given)}; {model.name} has {model.num_layers} layers")
        return given
    share, rest = divmod(model.num_layers, known.num_chunks)
    if rest or not share:
        even = [share + (1 if index < rest else 0) for index in range(known.num_chunks)]
        raise InputError(
            f"{model.num_layers} layers of {model.name} do not split evenly over pp x virtual_stages = {known.pp} x "
            f"{known.virtual_stages} = {known.num_chunks} chunks",
            f"give parallelism.layers_per_stage, for example {even}" if share else "use fewer stages",
        )
    return (share,) * known.num_chunks


def check_model(job: TrainingJob, known: Degrees, model: ModelSpec) -> None:
    """Raise InputError where `model` or its sequences cannot be split that way."""
    if any(isinstance(group.attention, LatentAttention) and group.attention.indexer for group in model.layers):
        raise InputError(f"training {model.name} cannot be modelled: its sparse attention has an indexer")
    tp, cp = known.tp, known.cp
    for group in model.layers:
        attention = group.attention
        heads = attention.num_key_heads if isinstance(attention, GatedDeltaAttention) else attention.num_heads
        if heads % tp:
            raise InputError(f"tp = {tp} does not divide the {heads} attention heads of {model.name}")
        if job.parallelism.cp_method == "ulysses" and (heads // tp) % cp:
            raise InputError(f"cp = {cp} by ulysses does not divide the {heads // tp} heads of a tensor-parallel rank")
        if isinstance(attention, GroupedQueryAttention):
            kv = attention.num_kv_heads
            if kv % tp and tp % kv:
                raise InputError(
                    f"tp = {tp} neither divides the {kv} key/value heads of {model.name} nor is a multiple"
                )
        feed_forward = group.feed_forward
        if isinstance(feed_forward, DenseFeedForward):
            if feed_forward.intermediate_size % tp:
                raise InputError(f"tp = {tp} does not divide the feed-forward width {feed_forward.intermediate_size}")
        else:
            _check_experts(feed_forward, known, model)
    if known.ep > 1 and not any(isinstance(group.feed_forward, ExpertsFeedForward) for group in model.layers):
        raise InputError(f"ep = {known.ep}, but {model.name} has no experts", "leave ep out")
    # Causal attention is balanced by giving each context-parallel rank two chunks, one early and one late.
    pieces = (2 * cp if cp > 1 else 1) * (tp if job.parallelism.sequence_parallel else 1)
    if job.sequence_tokens % pieces:
        raise InputError(
            f"sequence_tokens = {job.sequence_tokens} does not split into {pieces} pieces "
            f"({'2 x cp' if cp > 1 else ''}{' x ' if cp > 1 and job.parallelism.sequence_parallel else ''}"
            f"{'tp' if job.parallelism.sequence_parallel else ''})"
        )


def _check_experts(feed_forward: ExpertsFeedForward, known: Degrees, model: ModelSpec) -> None:
    if feed_forward.num_experts % known.ep:
        raise InputError(
            f"n_experts % ep = 0 does not hold: {feed_forward.num_experts} experts of {model.name}, ep = {known.ep}"
        )
    if feed_forward.intermediate_size % known.experts_tp:
        raise InputError(
            f"experts_tp = {known.experts_tp} does not divide an expert's width {feed_forward.intermediate_size}"
        )


def check_schedule(job: TrainingJob, known: Degrees) -> None:
    """Raise InputError where the pipeline schedule cannot run with these degrees."""
    name, pp, num_microbatches = job.schedule, known.pp, known.num_microbatches
    if name in V_SCHEDULES and job.parallelism.virtual_stages > 2:
        raise InputError(
            f"{name} gives each device two chunks; virtual_stages = {job.parallelism.virtual_stages} is not possible"
        )
    if job.parallelism.virtual_stages > 1 and name not in (*CHUNKED_SCHEDULES, *V_SCHEDULES):
        raise InputError(
            f"virtual_stages = {job.parallelism.virtual_stages}, but {name} has one chunk on each device",
            f"schedules with chunks: {', '.join((*CHUNKED_SCHEDULES, *V_SCHEDULES))}",
        )
    if name == "interleaved" and pp > 1 and num_microbatches % pp:
        raise InputError(
            f"the interleaved schedule needs micro-batches in multiples of pp: {num_microbatches} % {pp} is not 0",
            "change global_batch, micro_batch or pp",
        )
    if name == "dualpipe" and pp % 2:
        raise InputError(f"dualpipe needs an even pp; it is {pp}")
    least = {"dualpipe": 2 * pp, "dualpipe_v": 2 * pp, "zb_v": pp}.get(name or "", 1)
    if num_microbatches < least or (name == "dualpipe" and num_microbatches % 2):
        even = "an even number of " if name == "dualpipe" else ""
        raise InputError(
            f"{name} with pp = {pp} needs {even}at least {least} micro-batches; there are {num_microbatches}"
        )
