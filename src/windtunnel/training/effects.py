"""Find settings of a training job that its other settings turn off.

A setting that a person gives is refused, so that nobody relies on what has no effect; a setting from a framework's
defaults is left out. Settings that only a degree of 1 turns off are allowed: a search passes through it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from windtunnel.errors import InputError
from windtunnel.training.job import TrainingJob


@dataclass(frozen=True)
class Condition:
    """The condition under which a setting has an effect."""

    path: str
    holds: Callable[[TrainingJob], bool]
    """Takes a job with its framework's defaults."""
    needs: str


def _is_deepspeed(job: TrainingJob, *stages: int) -> bool:
    return job.framework == "deepspeed" and job.sharding.zero in stages


def _pairs_passes(job: TrainingJob) -> bool:
    """Whether the schedule runs a forward pass and the backward pass of another micro-batch as one piece.

    Plain 1F1B over several stages cannot: the two would wait for each other from stage to stage (Megatron-Core asks for
    virtual stages, `overlap_moe_expert_parallel_comm`).
    """
    return job.schedule in ("interleaved", "dualpipe", "dualpipe_v") or (
        job.schedule == "1f1b" and job.parallelism.pp == 1
    )


CONDITIONS: tuple[Condition, ...] = (
    Condition("recompute.modules", lambda job: job.recompute.granularity == "selective", "granularity: selective"),
    Condition("recompute.num_layers", lambda job: job.recompute.granularity == "full", "granularity: full"),
    Condition(
        "recompute.distribute",
        lambda job: job.recompute.granularity == "full" and not job.parallelism.sequence_parallel,
        "granularity: full, and parallelism.sequence_parallel: false",
    ),
    Condition("sharding.reshard_after_forward", lambda job: job.sharding.zero == 3, "zero: 3"),
    Condition(
        "sharding.reduce_bucket_elements",
        lambda job: job.sharding.zero != 3 or job.framework == "deepspeed",
        "zero below 3, or framework: deepspeed",
    ),
    Condition("sharding.gather_bucket_elements", lambda job: _is_deepspeed(job, 1, 2), "zero 1 or 2 of deepspeed"),
    *(
        Condition(f"sharding.{name}_elements", lambda job: _is_deepspeed(job, 3), "zero: 3 of deepspeed")
        for name in ("prefetch_bucket", "persistence_threshold", "max_live")
    ),
    Condition("precision.parameter_gather", lambda job: bool(job.sharding.zero), "zero of at least 1"),
    Condition("overlap.parameter_gather", lambda job: bool(job.sharding.zero), "zero of at least 1"),
    Condition(
        "overlap.experts",
        _pairs_passes,
        "the schedule interleaved, dualpipe or dualpipe_v, or a pipeline of one stage",
    ),
    *(
        Condition(f"faults.{name}", lambda job: job.total_tokens is not None, "total_tokens")
        for name in ("device_mtbf_s", "checkpoint_interval_s", "checkpoint_bytes_per_s")
    ),
    Condition("faults.restart_s", lambda job: job.faults.device_mtbf_s is not None, "device_mtbf_s"),
    Condition(
        "faults.checkpoint_blocks", lambda job: job.faults.checkpoint_bytes_per_s is not None, "checkpoint_bytes_per_s"
    ),
)


def without_idle_settings(given: TrainingJob, filled: TrainingJob) -> TrainingJob:
    """Return `filled`, which is `given` with its framework's defaults, without the defaults that change nothing.

    Raises:
        InputError: `given` itself has a setting that changes nothing.
    """
    for condition in CONDITIONS:
        if condition.holds(filled):
            continue
        section, name = condition.path.split(".")
        schema: Any = getattr(filled, section)
        unset = next(field.default for field in msgspec.structs.fields(schema) if field.name == name)
        off = False if isinstance(getattr(schema, name), bool) and unset is None else unset
        if getattr(getattr(given, section), name) not in (unset, off):
            raise InputError(
                f"{condition.path} = {_shown(getattr(schema, name))} changes nothing here: it needs {condition.needs}",
                f"leave {condition.path} out",
            )
        if getattr(schema, name) != off:
            filled = msgspec.structs.replace(filled, **{section: msgspec.structs.replace(schema, **{name: off})})
    return filled


def _shown(value: Any) -> str:
    return f"[{', '.join(map(str, value))}]" if isinstance(value, tuple) else str(value).lower()
