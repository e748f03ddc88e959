"""The best way to spread a training job over its devices: every layout that is possible, simulated."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import msgspec

from windtunnel.engine.training import TrainingResult, simulate_with, training_prices
from windtunnel.errors import InputError
from windtunnel.spec.model import ExpertsFeedForward
from windtunnel.spec.training import CHUNKED_SCHEDULES, TrainingJob, TrainingSetup, resolve

RECOMPUTE = ("none", "selective", "full")
CHEAP_MODULES = ("core_attention", "norms", "activation")
"""What selective recomputation drops in a search: much memory for little time."""


@dataclass(frozen=True)
class Layouts:
    """What a search found."""

    best: tuple[TrainingResult, ...]
    """Layouts that fit, the fastest first."""
    num_tried: int
    num_fitting: int


def best_layouts(job: TrainingJob, most: int = 10, micro_batches: tuple[int, ...] = (1, 2, 4)) -> Layouts:
    """The fastest layouts of `job` on its devices, among all that its model, batch and devices allow and that fit.

    Varied: tensor, context, pipeline and expert parallelism, virtual stages, micro-batch and recomputation; tensor
    parallelism stays within a node. What else the job says is kept.

    Raises:
        InputError: the job has no `num_devices`, or no layout is possible.
    """
    if job.num_devices is None:
        raise InputError("a search over layouts needs num_devices", "give the number of devices in all")
    setup = _any_layout(job)
    prices = training_prices(setup)
    tried, fitting = 0, []
    for layout in layouts(job, setup, micro_batches):
        try:
            result = simulate_with(resolve(layout), prices)
        except InputError:
            continue
        tried += 1
        if result.fits:
            fitting.append(result)
    if not tried:
        raise InputError(
            f"no layout of {setup.model.name} on {job.num_devices} devices suits {job.global_batch} sequences",
            "change num_devices or global_batch",
        )
    ordered = sorted(fitting, key=lambda result: result.step_s)
    return Layouts(tuple(ordered[:most]), tried, len(fitting))


def layouts(job: TrainingJob, setup: TrainingSetup, micro_batches: tuple[int, ...]) -> Iterator[TrainingJob]:
    """Candidates, possible or not."""
    replace = msgspec.structs.replace
    num_devices = setup.degrees.num_devices
    powers = [2**n for n in range(15) if num_devices % 2**n == 0]
    long = job.sequence_tokens >= 8192
    experts = [1]
    for group in setup.model.layers:
        if isinstance(group.feed_forward, ExpertsFeedForward):
            experts = [n for n in powers if group.feed_forward.num_experts % n == 0]
    within = [n for n in powers if n <= min(setup.node.num_devices, 16)]
    for tp, cp, pp, ep in product(within, powers[:4] if long else (1,), [n for n in powers if n <= 64], experts):
        if tp * cp * pp > num_devices or ep > num_devices // pp:
            continue
        for chunks in _virtual_stages(job, setup.model.num_layers, pp):
            for micro_batch, granularity in product(micro_batches, RECOMPUTE):
                split = replace(
                    job.parallelism,
                    tp=tp,
                    cp=cp,
                    pp=pp,
                    ep=ep,
                    virtual_stages=chunks,
                    dp=None,
                    experts_dp=None,
                    experts_tp=1 if ep > 1 else None,
                    layers_per_stage=None,
                )
                modules = CHEAP_MODULES if granularity == "selective" else job.recompute.modules
                recompute = replace(job.recompute, granularity=granularity, modules=modules)
                yield replace(
                    job, parallelism=split, micro_batch=micro_batch, recompute=recompute, num_microbatches=None
                )


def _virtual_stages(job: TrainingJob, num_layers: int, pp: int) -> list[int]:
    if pp == 1 or job.schedule not in (None, *CHUNKED_SCHEDULES):
        return [1]
    return [n for n in (1, 2, 3, 4, 5, 6, 8) if num_layers % (pp * n) == 0][:4]


def _any_layout(job: TrainingJob) -> TrainingSetup:
    """The job's names looked up, with a layout that only serves to do so."""
    split = msgspec.structs.replace(
        job.parallelism, tp=1, cp=1, pp=1, ep=1, virtual_stages=1, dp=None, experts_dp=None, layers_per_stage=None
    )
    return resolve(
        msgspec.structs.replace(
            job,
            parallelism=split,
            micro_batch=1,
            num_microbatches=None,
            global_batch=job.num_devices or 1,
            schedule=None,
        )
    )
