"""Find changes that make a training job fit its devices' memory: one by one, then in pairs."""

from collections.abc import Iterable, Iterator
from itertools import product

import msgspec

from windtunnel.errors import InputError
from windtunnel.model.attention.latent import LatentAttention
from windtunnel.model.shape import ModelSpec
from windtunnel.training.job import Recompute, RecomputedModule, TrainingJob
from windtunnel.training.pricing import TrainingPricer
from windtunnel.training.setup import OFFLOADS, framework_of, resolve, with_framework_defaults
from windtunnel.training.step import TrainingResult, simulate_with


def fitting_changes(result: TrainingResult, prices: TrainingPricer) -> list[tuple[str, TrainingResult]]:
    """Return up to six changes that make the job fit, fastest first, with their steps; pairs where none does alone.

    Names are options of `--set`. They change the job as it was written, so that the framework's defaults follow them.
    """
    setup, given = result.setup, result.setup.given
    if given.num_devices is None and given.parallelism.dp is None:
        # Larger degrees would else be more devices.
        given = msgspec.structs.replace(given, num_devices=setup.degrees.num_devices)
    changes = list(_that_fit(_changes(given, setup.model, (2, 4, 8)), prices))
    if not changes:
        pairs = (
            (f"{name}, {other}", both)
            for name, changed in _changes(given, setup.model)
            for other, both in _changes(changed, setup.model)
        )
        changes = list(_that_fit(pairs, prices))
    return sorted(changes, key=lambda change: change[1].step_s)[:6]


def _that_fit(
    changes: Iterable[tuple[str, TrainingJob]], prices: TrainingPricer
) -> Iterator[tuple[str, TrainingResult]]:
    # A device written out holds tables, and so has no hash.
    tried: list[TrainingJob] = []
    for name, job in changes:
        if job in tried:
            continue
        tried.append(job)
        try:
            changed = simulate_with(resolve(job), prices)
        except InputError:
            continue
        if changed.fits:
            yield name, changed


def _changes(job: TrainingJob, model: ModelSpec, factors: tuple[int, ...] = (2,)) -> Iterator[tuple[str, TrainingJob]]:
    """Yield single changes; degrees become larger by each of the factors."""
    replace = msgspec.structs.replace
    try:
        filled = with_framework_defaults(job, model)
    except InputError:
        return
    parallelism, recompute = job.parallelism, job.recompute
    if recompute.granularity != "full":
        # Flash attention keeps no scores that recomputing it would save.
        scores: tuple[RecomputedModule, ...] = ("core_attention",) if filled.kernels.attention == "unfused" else ()
        light: tuple[RecomputedModule, ...] = (*(recompute.modules or scores), "norms", "activation")
        is_latent = any(isinstance(attention, LatentAttention) for _, attention in model.attentions)
        for more in (light, (*light, "latent_up_projection")) if is_latent else (light,):
            modules = tuple(dict.fromkeys(more))
            selective = replace(recompute, granularity="selective", modules=modules)
            words = f"recompute={{granularity: selective, modules: [{', '.join(modules)}]}}"
            yield words, replace(job, recompute=selective)
        yield "recompute={granularity: full}", replace(job, recompute=Recompute(granularity="full"))
    if filled.kernels.cross_entropy in ("eager", "fp32", "separate"):
        yield "kernels.cross_entropy=chunked", replace(job, kernels=replace(job.kernels, cross_entropy="chunked"))
    if job.micro_batch > 1:
        yield _named(job, {"micro_batch": job.micro_batch // 2})
    yield from _less_state(job, filled)
    if job.sharding.group:
        yield "sharding.group=null", replace(job, sharding=replace(job.sharding, group=None))
    for name, factor in product(("tp", "pp", "cp", "ep"), factors):
        split: dict[str, object] = {name: getattr(parallelism, name) * factor}
        if parallelism.dp and name != "ep":
            if parallelism.dp % factor:
                continue
            split["dp"] = parallelism.dp // factor
        idle = ("experts_dp", *(("layers_per_stage",) if name == "pp" else ()))
        split |= {other: None for other in idle if getattr(parallelism, other) is not None}
        yield _named(job, {f"parallelism.{key}": value for key, value in split.items()})


def _less_state(job: TrainingJob, filled: TrainingJob) -> Iterator[tuple[str, TrainingJob]]:
    """Yield changes to what each device keeps of the state: another stage of ZeRO, fewer bits, the host's memory."""
    replace = msgspec.structs.replace
    sharding, precision, zero = job.sharding, job.precision, filled.sharding.zero or 0
    framework = framework_of(job.framework)
    stages = framework["zero_stages" if job.parallelism.pp == 1 else "zero_stages_of_pipelines"]
    # Megatron's FSDP shards more than its distributed optimizer.
    for stage in sorted({*stages, *((2, 3) if job.parallelism.pp == 1 else ())}):
        if stage > zero:
            yield f"sharding.zero={stage}", replace(job, sharding=replace(sharding, zero=stage))
    if job.lora is not None and precision.frozen_weights in ("bf16", "fp8"):
        yield "precision.frozen_weights=nf4", replace(job, precision=replace(precision, frozen_weights="nf4"))
    if job.lora is None and zero == 0 and precision.master_weights is None and precision.gradients is None:
        pure = replace(precision, gradients="bf16", master_weights="bf16")
        yield "precision.gradients=bf16, precision.master_weights=bf16", replace(job, precision=pure)
    if sharding.offload == "none":
        for (name, offload), with_stages in OFFLOADS.items():
            if name == job.framework and zero in with_stages:
                yield f"sharding.offload={offload}", replace(job, sharding=replace(sharding, offload=offload))
        if precision.moments == "fp32" and job.optimizer == "adam" and job.lora is None:
            yield "precision.moments=int8", replace(job, precision=replace(precision, moments="int8"))


def _named(job: TrainingJob, changes: dict[str, object]) -> tuple[str, TrainingJob]:
    """Return changes as options of `--set`, and the job with them; its micro-batches follow from its new degrees."""
    if job.num_microbatches is not None:
        changes["num_microbatches"] = None
    own = {name: value for name, value in changes.items() if "." not in name}
    split = {name.removeprefix("parallelism."): value for name, value in changes.items() if "." in name}
    words = ", ".join(f"{name}={'null' if value is None else value}" for name, value in changes.items())
    parallelism = msgspec.structs.replace(job.parallelism, **split)
    return words, msgspec.structs.replace(job, parallelism=parallelism, **own)
