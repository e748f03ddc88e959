"""Find changes that make a training job fit its devices' memory: one by one, then in pairs."""

from collections.abc import Iterable, Iterator
from itertools import product

import msgspec

from windtunnel.errors import InputError
from windtunnel.training.job import Recompute, TrainingJob
from windtunnel.training.pricing import TrainingPricer
from windtunnel.training.setup import resolve
from windtunnel.training.step import TrainingResult, simulate_with


def fitting_changes(result: TrainingResult, prices: TrainingPricer) -> list[tuple[str, TrainingResult]]:
    """Return up to four changes that make the job fit, fastest first, with their steps; pairs where none does alone."""
    job = result.setup.job
    changes = list(_that_fit(_changes(job, (2, 4, 8)), prices))
    if not changes:
        pairs = ((f"{name}, {other}", both) for name, changed in _changes(job) for other, both in _changes(changed))
        changes = list(_that_fit(pairs, prices))
    return sorted(changes, key=lambda change: change[1].step_s)[:4]


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


def _changes(job: TrainingJob, factors: tuple[int, ...] = (2,)) -> Iterator[tuple[str, TrainingJob]]:
    """Yield single changes; degrees become larger by each of the factors."""
    replace = msgspec.structs.replace
    parallelism, recompute = job.parallelism, job.recompute
    if recompute.granularity == "none":
        modules = ("core_attention", "norms", "activation")
        selective = replace(recompute, granularity="selective", modules=modules)
        words = "recompute={granularity: selective, modules: [core_attention, norms, activation]}"
        yield words, replace(job, recompute=selective)
    if recompute.granularity != "full":
        yield "recompute={granularity: full}", replace(job, recompute=Recompute(granularity="full"))
    if job.micro_batch > 1:
        yield f"micro_batch={job.micro_batch // 2}", _again(job, micro_batch=job.micro_batch // 2)
    zero = job.sharding.zero or 0
    for stage in (1, 2, 3):
        if stage > zero and (parallelism.pp == 1 or stage == 1):
            yield f"sharding.zero={stage}", replace(job, sharding=replace(job.sharding, zero=stage))
    if job.sharding.group:
        yield "sharding.group=null", replace(job, sharding=replace(job.sharding, group=None))
    free = replace(parallelism, dp=None, experts_dp=None)
    for name, factor in product(("tp", "pp", "cp", "ep"), factors):
        split = {name: getattr(free, name) * factor} | ({"layers_per_stage": None} if name == "pp" else {})
        yield f"parallelism.{name}={split[name]}", _again(job, parallelism=replace(free, **split))


def _again(job: TrainingJob, **changes: object) -> TrainingJob:
    """Return the job with other degrees, without the number of micro-batches that followed from the old ones."""
    return msgspec.structs.replace(job, num_microbatches=None, **changes)
