"""What would make a training job fit its devices' memory: changes tried one by one, then in pairs."""

from collections.abc import Iterable, Iterator

import msgspec

from windtunnel.errors import InputError
from windtunnel.training.job import Recompute, TrainingJob
from windtunnel.training.pricing import TrainingPricer
from windtunnel.training.setup import resolve
from windtunnel.training.step import TrainingResult, simulate_with


def fitting_changes(result: TrainingResult, prices: TrainingPricer, most: int = 4) -> list[tuple[str, TrainingResult]]:
    """Changes after which the job fits, the fastest first: what to set, and the step that it gives.

    Single changes, and pairs of them where none does alone.
    """
    job = result.setup.job
    singles = list(_changes(job))
    found = list(_that_fit(singles, prices))
    if not found:
        pairs = ((f"{name}, {other}", both) for name, changed in singles for other, both in _changes(changed))
        found = list(_that_fit(pairs, prices))
    return sorted(found, key=lambda pair: pair[1].step_s)[:most]


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


def _changes(job: TrainingJob) -> Iterator[tuple[str, TrainingJob]]:
    replace = msgspec.structs.replace
    at, recompute = job.parallelism, job.recompute
    if recompute.granularity == "none":
        modules = ("core_attention", "norms", "activation")
        selective = replace(recompute, granularity="selective", modules=modules)
        yield (
            "recompute={granularity: selective, modules: [core_attention, norms, activation]}",
            replace(job, recompute=selective),
        )
    if recompute.granularity != "full":
        yield "recompute={granularity: full}", replace(job, recompute=Recompute(granularity="full"))
    if job.micro_batch > 1:
        yield f"micro_batch={job.micro_batch // 2}", _again(job, micro_batch=job.micro_batch // 2)
    zero = job.sharding.zero or 0
    for stage in (1, 2, 3):
        if stage > zero and (at.pp == 1 or stage == 1):
            yield f"sharding.zero={stage}", replace(job, sharding=replace(job.sharding, zero=stage))
    yield f"parallelism.tp={at.tp * 2}", _again(job, parallelism=replace(at, tp=at.tp * 2, dp=None, experts_dp=None))
    deeper = replace(at, pp=at.pp * 2, dp=None, experts_dp=None, layers_per_stage=None)
    yield f"parallelism.pp={at.pp * 2}", _again(job, parallelism=deeper)
    wider = replace(at, cp=at.cp * 2, dp=None, experts_dp=None)
    yield f"parallelism.cp={at.cp * 2}", _again(job, parallelism=wider)


def _again(job: TrainingJob, **changes: object) -> TrainingJob:
    """The job with other degrees: what followed from the old ones follows anew."""
    return msgspec.structs.replace(job, num_microbatches=None, **changes)
