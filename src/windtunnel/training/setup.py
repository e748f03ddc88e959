"""A training job made ready to run: names looked up, the framework's defaults filled in, all of it checked together.

A setting that its other settings turn off is refused where a person gives it, so that nobody relies on what has no
effect, and left out where a framework's defaults do. Settings that only a degree of 1 turns off are allowed: a search
passes through it.
"""

from collections.abc import Container
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import msgspec

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.hardware import Device, Node, check_node, check_reach
from windtunnel.model.attention.gated_delta import GatedDeltaAttention
from windtunnel.model.attention.grouped_query import GroupedQueryAttention
from windtunnel.model.attention.kimi_delta import KimiDeltaAttention
from windtunnel.model.attention.latent import LatentAttention
from windtunnel.model.attention.mamba2 import Mamba2
from windtunnel.model.feed_forward.dense import DenseFeedForward
from windtunnel.model.feed_forward.experts import ExpertsFeedForward
from windtunnel.model.shape import LayerGroup, ModelSpec
from windtunnel.schema import Schema, encode, read_yaml
from windtunnel.training.degrees import Degrees, degrees
from windtunnel.training.job import (
    CHUNKED_SCHEDULES,
    GEMM_FORMATS,
    UNITS,
    V_SCHEDULES,
    Framework,
    Offload,
    ScheduleName,
    TrainingJob,
)
from windtunnel.units import format_count


@dataclass(frozen=True)
class TrainingSetup:
    """A job with its names looked up, its framework's defaults filled in and its degrees known."""

    given: TrainingJob
    """As a person wrote it."""
    job: TrainingJob
    """Nothing in it that has a default is None."""
    model: ModelSpec
    device: Device
    node: Node
    degrees: Degrees
    layers_per_chunk: tuple[int, ...]
    """In the order of the forward pass; chunk c is on stage c % pp, or folded back in V-shaped schedules."""


def resolve(job: TrainingJob, allow_download: bool = False) -> TrainingSetup:
    """Look up the job's names, fill in its framework's defaults and check that its parts go together.

    Raises:
        InputError: an unknown name, or degrees, a split or a schedule that this model and these devices cannot have.
    """
    given = job
    model, device, node = look_up(job, allow_download)
    job = with_uneven_stages(with_framework_defaults(job, model), model)
    check_node(node, device)
    if model.is_encoder:
        raise InputError(f"{model.name} is an encoder; training jobs are of decoders", "take one that writes text")
    known = degrees(job)
    check_model(job, known, model)
    check_schedule(job, known)
    check_offload(job)
    unit = UNITS.get(job.precision.compute)
    if unit is not None and unit not in device.peak_flops_per_s:
        formats = [name for name in GEMM_FORMATS if UNITS.get(name, "bf16") in device.peak_flops_per_s]
        also = "" if unit in job.precision.compute else ", whose units have it"
        raise InputError(
            f"{device.name} has no matrix units for {job.precision.compute}: it publishes no rate of {unit}{also}",
            f"set precision.compute to one of {', '.join(formats)}",
        )
    check_reach(node, known.num_devices, "the job")
    return TrainingSetup(given, job, model, device, node, known, layers_per_chunk(job, known, model))


def look_up(job: TrainingJob, allow_download: bool = False) -> tuple[ModelSpec, Device, Node]:
    """Look up the job's model, device and node; without a node, the device's usual one. InputError for an unknown name,
    or a rate or count that no hardware has."""
    catalog.check_hardware({"device": job.device, "node": job.node}, "job")
    model = catalog.model(job.model, allow_download)
    device = job.device if isinstance(job.device, Device) else catalog.device(job.device)
    node = job.node if isinstance(job.node, Node) else None
    return model, device, node or (catalog.node(str(job.node)) if job.node else catalog.default_node(device))


def with_framework_defaults(job: TrainingJob, model: ModelSpec) -> TrainingJob:
    """Return `job`, of `model`, with the defaults of its framework in place of None.

    Frameworks are `catalog/frameworks/*.yaml`: tables of the job's own fields, and the stages of ZeRO that they have.
    InputError where the job has a setting that its other settings or its model turn off.
    """
    framework = framework_of(job.framework)
    filled: TrainingJob = _filled(job, framework["defaults"], framework["file"])
    if filled.parallelism.sequence_parallel and filled.parallelism.tp == 1:
        parallelism = msgspec.structs.replace(filled.parallelism, sequence_parallel=False)
        filled = msgspec.structs.replace(filled, parallelism=parallelism)
    if job.framework == "deepspeed" and job.precision.gradients is None and filled.sharding.zero == 0:
        precision = msgspec.structs.replace(filled.precision, gradients="fp32")
        filled = msgspec.structs.replace(filled, precision=precision)
    if filled.schedule is None:
        chosen: ScheduleName = "interleaved" if filled.parallelism.virtual_stages > 1 else "1f1b"
        filled = msgspec.structs.replace(filled, schedule=chosen)
    if filled.recompute.granularity == "selective" and filled.recompute.modules is None:
        recompute = msgspec.structs.replace(filled.recompute, modules=("core_attention",))
        filled = msgspec.structs.replace(filled, recompute=recompute)
    return without_idle_settings(job, filled, model)


def framework_of(name: str) -> dict[str, Any]:
    """Return a framework's file of the catalog: its `defaults`, its stages of ZeRO, and the name of the `file`."""
    return _framework_file(name, tuple(catalog.search_path()))


@cache
def _framework_file(name: str, _: tuple[Path, ...]) -> dict[str, Any]:
    """Read a framework's file, once per search path: a search resolves thousands of jobs."""
    path = catalog.find("frameworks", name)
    return {**read_yaml(path), "file": path.name}


def _filled(schema: Any, defaults: dict[str, Any], where: str) -> Any:
    changes: dict[str, Any] = {}
    for name, default in defaults.items():
        if name not in schema.__struct_fields__:
            raise InputError(f"{where}: a training job has no {name!r}")
        value = getattr(schema, name)
        if isinstance(default, dict):
            changes[name] = _filled(value, default, where)
        elif value is None:
            changes[name] = default
    return msgspec.structs.replace(schema, **changes)


class Condition(Schema):
    """The condition under which settings have an effect; `effects.yaml` describes the fields."""

    settings: tuple[str, ...]
    when: tuple[dict[str, list[Any] | Literal["given"]], ...]
    needs: str

    def holds(self, job: TrainingJob, model: ModelSpec | None) -> bool:
        """Whether the settings have an effect in a job with its framework's defaults."""
        return any(all(_is_allowed(job, model, *item) for item in alternative.items()) for alternative in self.when)


def _is_allowed(job: TrainingJob, model: ModelSpec | None, path: str, allowed: list[Any] | Literal["given"]) -> bool:
    value = attrgetter(path.removeprefix("model."))(model if path.startswith("model.") else job)
    return value is not None if allowed == "given" else value in allowed


@cache
def conditions() -> tuple[Condition, ...]:
    """Return the conditions, in the order in which they are checked."""
    return msgspec.convert(read_yaml(Path(__file__).with_name("effects.yaml")), tuple[Condition, ...])


def without_idle_settings(given: TrainingJob, filled: TrainingJob, model: ModelSpec) -> TrainingJob:
    """Return `filled`, which is `given` with its framework's defaults, without the defaults that change nothing.
    InputError where `given` itself has a setting that changes nothing."""
    for condition, path in ((each, path) for each in conditions() for path in each.settings):
        if condition.holds(filled, model):
            continue
        section, name = path.split(".")
        schema: Any = getattr(filled, section)
        unset = _default(schema.__class__, name)
        off = False if isinstance(getattr(schema, name), bool) and unset is None else unset
        value = getattr(schema, name)
        if getattr(getattr(given, section), name) not in (unset, off):
            shown = f"[{', '.join(map(str, value))}]" if isinstance(value, tuple) else str(value).lower()
            idle = f"{path} = {shown} changes nothing here: it needs {condition.needs}"
            raise InputError(idle, f"leave {path} out; over a file that has it: --set {path}=null")
        if value != off:
            filled = msgspec.structs.replace(filled, **{section: msgspec.structs.replace(schema, **{name: off})})
    return filled


def with_zero(job: TrainingJob, stage: int, kept: Container[str] = ()) -> TrainingJob:
    """Return `job` with another stage of ZeRO, without the settings, but those in `kept`, that the stage turns off."""
    job = msgspec.structs.replace(job, sharding=msgspec.structs.replace(job.sharding, zero=stage))
    for condition in conditions():
        if not any("sharding.zero" in each for each in condition.when) or condition.holds(job, None):
            continue
        for section, name in (path.split(".") for path in condition.settings if path not in kept):
            schema: Any = getattr(job, section)
            unset = msgspec.structs.replace(schema, **{name: _default(schema.__class__, name)})
            job = msgspec.structs.replace(job, **{section: unset})
    return job


@cache
def _default(schema: Any, name: str) -> Any:
    return next(field.default for field in msgspec.structs.fields(schema) if field.name == name)


def with_uneven_stages(job: TrainingJob, model: ModelSpec) -> TrainingJob:
    """Return `job` with fewer layers on the first and last chunk of its pipeline, where layers do not split evenly.

    The ends also hold the embedding and the head. With one chunk on each device both ends give layers up as evenly as
    they can (Megatron's `--decoder-first-pipeline-num-layers` and `--decoder-last-pipeline-num-layers`); with several
    they give up one each, as Llama 3 405B did (arXiv:2407.21783, section 3.3.2): 0, 126 x 1, 0; or embedding and head
    count as a layer each (Megatron's `--pipeline-model-parallel-layout`). Beside multi-token prediction the last chunk
    has what others leave, as in Megatron-Bridge's layouts of DeepSeek-V3. Else nothing changes.
    """
    degrees = job.parallelism
    num_chunks = degrees.pp * degrees.virtual_stages
    is_given = degrees.layers_per_stage is not None or job.schedule in V_SCHEDULES
    if is_given or num_chunks == 1 or model.num_layers % num_chunks == 0:
        return job
    inner = -(-model.num_layers // num_chunks)
    ends = model.num_layers - inner * (num_chunks - 2)
    last = max(ends - inner, 0) if job.mtp_layers else ends // 2
    first = ends - last
    if degrees.virtual_stages > 1 and not job.mtp_layers and not first == last == inner - 1:
        if model.num_layers + 2 < num_chunks:
            return job
        layers = tuple(uneven_layers(model.num_layers, num_chunks))
    elif first > inner or min(first, last) < (1 if degrees.virtual_stages == 1 and not job.mtp_layers else 0):
        return job
    else:
        layers = (first, *[inner] * (num_chunks - 2), last)
    return msgspec.structs.replace(job, parallelism=msgspec.structs.replace(degrees, layers_per_stage=layers))


def uneven_layers(num_layers: int, num_chunks: int) -> list[int]:
    """Return layers by chunk where embedding and head count as a layer each (Megatron-Core's
    `account_for_embedding_in_pipeline_split` and `account_for_loss_in_pipeline_split`). InputError where there are more
    chunks than layers."""
    share, rest = divmod(num_layers + 2, num_chunks)
    layers = [share + (1 if 0 < index <= rest else 0) for index in range(num_chunks)]
    layers[0] -= 1
    layers[-1] -= 1
    if min(layers) < 0:
        raise InputError(f"{num_layers} layers do not spread over {num_chunks} chunks")
    return layers


def layers_per_chunk(job: TrainingJob, known: Degrees, model: ModelSpec) -> tuple[int, ...]:
    """Return the layers of each chunk of the pipeline, in the order of the forward pass. InputError where they do not
    add up to the model's, or cannot be split evenly and no split is given."""
    given = job.parallelism.layers_per_stage
    if given is not None:
        if len(given) != known.num_chunks:
            raise InputError(
                f"layers_per_stage has {format_count(len(given), 'entry', 'entries')}; "
                f"the schedule {job.schedule} needs {known.num_chunks}"
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
            f"give parallelism.layers_per_stage, for example {even}" if share else "make parallelism.pp smaller",
        )
    return (share,) * known.num_chunks


def check_model(job: TrainingJob, known: Degrees, model: ModelSpec) -> None:
    """Raise InputError where `model` or its sequences cannot be split that way."""
    for group in model.layers:
        _check_kinds(group, model)
    tp, cp, method = known.tp, known.cp, job.parallelism.cp_method
    for _, attention in model.attentions:
        heads = attention.widest_tp
        if heads % tp:
            raise InputError(f"tp = {tp} does not divide the {heads} {attention.divided_by_tp} of {model.name}")
        if method == "ulysses" and (heads // tp) % cp:
            raise InputError(f"cp = {cp} by ulysses does not divide the {heads // tp} heads of a tensor-parallel rank")
        if cp > 1 and isinstance(attention, LatentAttention) and attention.indexer and method != "all_gather":
            raise InputError(
                f"cp = {cp} by {method}, but the indexer of {model.name} chooses among all keys",
                "parallelism.cp_method: all_gather",
            )
        kv = attention.shared_kv_heads
        if kv is not None and kv % tp and tp % kv:
            raise InputError(f"tp = {tp} neither divides the {kv} key/value heads of {model.name} nor is a multiple")
    for _, feed_forward in model.feed_forwards:
        match feed_forward:
            case DenseFeedForward():
                if feed_forward.intermediate_size % tp:
                    width = feed_forward.intermediate_size
                    raise InputError(f"tp = {tp} does not divide the feed-forward width {width}")
            case ExpertsFeedForward():
                _check_experts(feed_forward, known, model)
    if job.mtp_layers and (job.lora is not None or not has_whole_layers(model)):
        what = "with LoRA" if job.lora is not None else f"for layers of one part, as {model.name} has them"
        raise InputError(f"mtp_layers = {job.mtp_layers} is not modelled {what}", "leave mtp_layers out")
    is_latent = any(isinstance(attention, LatentAttention) for _, attention in model.attentions)
    for module, is_there in (("experts", model.has_experts), ("latent_up_projection", is_latent)):
        if module in (job.recompute.modules or ()) and not is_there:
            raise InputError(f"recompute.modules has {module}, which {model.name} does not have", "leave it out")
    if known.ep > 1 and not model.has_experts:
        raise InputError(f"ep = {known.ep}, but {model.name} has no experts", "leave ep out")
    # Causal attention is balanced by giving each context-parallel rank two chunks, one early and one late.
    pieces = (2 * cp if cp > 1 else 1) * (tp if job.parallelism.sequence_parallel else 1)
    if job.sequence_tokens % pieces:
        raise InputError(
            f"sequence_tokens = {job.sequence_tokens} does not split into {pieces} pieces "
            f"({'2 x cp' if cp > 1 else ''}{' x ' if cp > 1 and job.parallelism.sequence_parallel else ''}"
            f"{'tp' if job.parallelism.sequence_parallel else ''})"
        )


_TRAINED = (
    "layers that can be trained: grouped-query, sliding-window and chunked attention, latent attention, dense or "
    "sparse, Gated DeltaNet, Kimi delta attention and Mamba-2, with one residual"
)


def has_whole_layers(model: ModelSpec) -> bool:
    """Whether every layer has attention and a feed-forward, as layers of multi-token prediction are taken to have."""
    return all(group.attention and group.feed_forward for group in model.layers)


def _check_kinds(group: LayerGroup, model: ModelSpec) -> None:
    """Raise InputError for a layer whose training cannot be modelled."""
    attention, feed_forward = group.attention, group.feed_forward
    known = (GroupedQueryAttention, LatentAttention, GatedDeltaAttention, KimiDeltaAttention, Mamba2)
    if attention is not None and type(attention) not in known:
        name = f"{encode(attention)['type']} attention ({attention.text})".replace("_", " ")
        raise InputError(f"training {model.name} cannot be modelled: {name} has no backward pass here", _TRAINED)
    if model.layer_inputs or getattr(attention, "shares_kv", False):
        what = "inputs of every layer" if model.layer_inputs else "layers without keys of their own"
        raise InputError(f"training {model.name} cannot be modelled: it has {what}", _TRAINED)
    if model.residual_streams > 1 or model.earlier_blocks:
        raise InputError(
            f"training {model.name} cannot be modelled: its residual has several streams or blocks", _TRAINED
        )
    if model.norm_gate_rank:
        raise InputError(f"training {model.name} cannot be modelled: its norms have gates", _TRAINED)
    if feed_forward is not None and not isinstance(feed_forward, DenseFeedForward | ExpertsFeedForward):
        raise InputError(f"training {model.name} cannot be modelled: {type(feed_forward).__name__} is not known")


def _check_experts(feed_forward: ExpertsFeedForward, known: Degrees, model: ModelSpec) -> None:
    if feed_forward.num_experts % known.ep:
        raise InputError(
            f"n_experts % ep = 0 does not hold: {feed_forward.num_experts} experts of {model.name}, ep = {known.ep}"
        )
    if feed_forward.intermediate_size % known.experts_tp:
        raise InputError(
            f"experts_tp = {known.experts_tp} does not divide an expert's width {feed_forward.intermediate_size}"
        )


OFFLOADS: dict[tuple[Framework, Offload], tuple[int, ...]] = {
    ("deepspeed", "optimizer"): (1, 2, 3),
    ("deepspeed", "parameters"): (3,),
    ("megatron", "optimizer"): (1,),
    ("fsdp2", "parameters"): (3,),
}
"""Framework and what it offloads -> stages of ZeRO that can. FSDP2 keeps gradients and state where parameters are."""


def check_offload(job: TrainingJob) -> None:
    """Raise InputError where nothing is known of a job's offloading."""
    offload, zero, precision = job.sharding.offload, job.sharding.zero, job.precision
    if precision.frozen_weights == "int8" and zero == 3:
        raise InputError(
            "frozen_weights = int8 cannot be sharded: bitsandbytes' 8-bit layers are whole on every rank",
            "set sharding.zero to 0, 1 or 2, or precision.frozen_weights to nf4",
        )
    if offload == "none":
        return
    stages = OFFLOADS.get((job.framework, offload))
    if stages is None:
        known = [what for framework, what in OFFLOADS if framework == job.framework]
        allowed = f"it can be {' or '.join(known)}" if known else "megatron, deepspeed and fsdp2 offload"
        raise InputError(f"sharding.offload = {offload} is not modelled for {job.framework}", allowed)
    if zero not in stages:
        wanted = " or ".join(map(str, stages))
        raise InputError(
            f"sharding.offload = {offload} of {job.framework} needs sharding.zero = {wanted}; it is {zero}",
            f"set sharding.zero to {stages[-1]}",
        )
    if job.optimizer != "adam" or precision.moments != "fp32" or precision.master_weights != "fp32":
        raise InputError(
            f"sharding.offload = {offload} is modelled for Adam with its state in fp32, which hosts were measured with",
            "take adam with moments and master_weights in fp32, or sharding.offload: none",
        )


def check_virtual_stages(job: TrainingJob) -> None:
    """Raise InputError where a device has several chunks and no pipeline."""
    if job.parallelism.virtual_stages > 1 and job.parallelism.pp == 1:
        raise InputError("virtual stages need a pipeline: pp = 1", "give 1 virtual stage (--vpp 1) or pp above 1")


def check_schedule(job: TrainingJob, known: Degrees) -> None:
    """Raise InputError where the pipeline schedule cannot run with these degrees."""
    check_virtual_stages(job)
    name, pp, num_microbatches = job.schedule, known.pp, known.num_microbatches
    framework = framework_of(job.framework)
    stages, of_pipelines = framework["zero_stages"], framework["zero_stages_of_pipelines"]
    if pp > 1 and job.sharding.zero in stages and job.sharding.zero not in of_pipelines:
        allowed = " or ".join(map(str, of_pipelines))
        raise InputError(
            f"{framework['title']} has no pipeline with ZeRO-{job.sharding.zero}: pp = {pp}",
            f"set sharding.zero to {allowed}, or parallelism.pp to 1",
        )
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
            f"the interleaved schedule needs microbatches in multiples of pp: {num_microbatches} % {pp} is not 0",
            "change global_batch, micro_batch or parallelism.pp",
        )
    if name == "dualpipe" and pp % 2:
        raise InputError(f"dualpipe needs an even pp; it is {pp}")
    least = {"dualpipe": 2 * pp, "dualpipe_v": 2 * pp, "zb_v": pp}.get(name or "", 1)
    if num_microbatches < least or (name == "dualpipe" and num_microbatches % 2):
        even = "an even number of " if name == "dualpipe" else ""
        raise InputError(
            f"{name} with pp = {pp} needs {even}at least {least} microbatches; there are {num_microbatches}"
        )
