"""Values to vary for a search over every way to spread a training job over its devices."""

from typing import Any

import msgspec

from windtunnel.errors import InputError
from windtunnel.model.shape import ModelSpec
from windtunnel.schema import decode, set_path
from windtunnel.serving.shorthand import JOB_PATHS
from windtunnel.training.job import CHUNKED_SCHEDULES, TrainingJob
from windtunnel.training.setup import look_up

MICRO_BATCHES = (1, 2, 4)
VIRTUAL_STAGES = (1, 2, 3, 4, 5, 6, 8)
MOST_STAGES, MOST_CONTEXT, MOST_RANKS = 64, 8, 1024
LONG_SEQUENCE_TOKENS = 8192
"""Shortest sequences that are split among devices too."""
CHEAP_MODULES = ("core_attention", "norms", "activation")
"""Modules that selective recomputation drops: much memory, little time; Megatron-Core drops activations of experts."""
FOLLOWING = ("dp", "experts_dp", "experts_tp", "layers_per_stage")
"""Fields of a job's parallelism that follow from the degrees that vary."""


def vary_layouts(raw: dict[str, Any], varied: dict[str, Any], source: str) -> dict[str, Any]:
    """Return the values of a search over every layout: tensor, context, pipeline and expert parallelism, virtual
    stages, micro-batch and recomputation. Tensor parallelism stays within a node.

    Args:
        raw: the job as in a file; degrees that only one value suits are set there, those that follow are taken out.
        varied: values of further settings by short name; a name in it is not varied here.
        source: named in errors.

    Raises:
        InputError: the job is wrong, or says nothing of the number of devices.
    """
    job = _with_first_values(raw, varied, source)
    if job.num_devices is None:
        raise InputError("a search over layouts needs num_devices", "give the number of devices in all")
    counts = [n for n in varied.get("num_devices", ()) if isinstance(n, int)] or [job.num_devices]
    for name in FOLLOWING:
        raw.get("parallelism", {}).pop(name, None)
    raw.pop("num_microbatches", None)
    model, _, node = look_up(job)
    divisors = [n for n in range(1, min(max(counts), MOST_RANKS) + 1) if any(count % n == 0 for count in counts)]
    num_heads = [getattr(group.attention, "num_heads", 0) for group in model.layers]
    long = job.sequence_tokens >= LONG_SEQUENCE_TOKENS
    chunked = job.schedule in (None, *CHUNKED_SCHEDULES)
    values: dict[str, Any] = {
        "tp": [n for n in divisors if n <= min(node.num_devices, 16) and all(heads % n == 0 for heads in num_heads)],
        "cp": [n for n in divisors if n <= MOST_CONTEXT and n & (n - 1) == 0] if long else [1],
        "pp": [n for n in divisors if n <= min(MOST_STAGES, model.num_layers)],
        "vpp": [n for n in VIRTUAL_STAGES if 2 * n <= model.num_layers] if chunked else [1],
        "ep": [n for n in divisors if _divides_experts(model, n)],
        "micro_batch": [n for n in MICRO_BATCHES if job.global_batch % n == 0],
        "recompute": _recompute(job, model),
    }
    axes = dict(varied)
    for name, choices in values.items():
        if name not in varied and len(choices) == 1:
            set_path(raw, JOB_PATHS[name], choices[0])
        elif name not in varied:
            axes[name] = choices
    return axes


def _with_first_values(raw: dict[str, Any], varied: dict[str, Any], source: str) -> TrainingJob:
    """Return the job with the first value of everything else that varies, to look its names up."""
    filled: dict[str, Any] = msgspec.to_builtins(raw)
    for name, values in varied.items():
        if isinstance(values, list) and values:
            set_path(filled, JOB_PATHS.get(name, name), values[0])
    return decode(filled, TrainingJob, source)


def _recompute(job: TrainingJob, model: ModelSpec) -> dict[str, dict[str, Any]]:
    has_experts = model.has_experts
    can_drop_activation = has_experts or job.framework != "megatron"
    modules = [name for name in CHEAP_MODULES if name != "activation" or can_drop_activation]
    only_full = {"recompute.num_layers": None, "recompute.distribute": False}
    return {
        "none": {"recompute.granularity": "none", "recompute.modules": None, **only_full},
        "selective": {"recompute.granularity": "selective", "recompute.modules": modules, **only_full},
        "full": {"recompute.granularity": "full", "recompute.modules": None},
    }


def _divides_experts(model: ModelSpec, ep: int) -> bool:
    """Whether so many devices can hold different experts; of a model without any, only one."""
    counts = [part.num_experts for _, part in model.feed_forwards if part.num_experts]
    return ep == 1 or (bool(counts) and all(count % ep == 0 for count in counts))
