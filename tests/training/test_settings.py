"""Every setting of a training job changes its prediction, or is refused; none is read and forgotten."""

import json
from functools import cache
from typing import Any

import msgspec
import pytest

from windtunnel.errors import InputError
from windtunnel.hardware import Link
from windtunnel.schema import Schema, decode, encode, set_path
from windtunnel.training.campaign import campaign
from windtunnel.training.job import Lora, TrainingJob
from windtunnel.training.setup import resolve
from windtunnel.training.step import TrainingResult, simulate_training

MODEL = "TinyLlama/TinyLlama-1.1B-Chat-v1.0"
EXPERTS = "Qwen/Qwen1.5-MoE-A2.7B"
JOB: dict[str, Any] = {
    "model": MODEL,
    "device": "h100_sxm",
    "num_devices": 16,
    "sequence_tokens": 2048,
    "global_batch": 32,
    "parallelism": {"tp": 2},
}
WITH_EXPERTS = {"model": EXPERTS, "parallelism.ep": 4}
SHARDED = {"sharding.zero": 3}
SELECTIVE = {"recompute.granularity": "selective"}
DEEPSPEED = {"framework": "deepspeed", "parallelism.tp": 1}
RUN = {"total_tokens": 1e10, "faults.device_mtbf_s": 1e8, "faults.checkpoint_bytes_per_s": 1e9}

CHANGES: dict[str, tuple[Any, dict[str, Any]]] = {
    "model": ("Qwen/Qwen2.5-0.5B", {"parallelism.tp": 1}),
    "device": ("h200_sxm", {}),
    "sequence_tokens": (4096, {}),
    "global_batch": (64, {}),
    "node": ("hgx_h100", {"node": None}),
    "num_devices": (8, {}),
    "micro_batch": (2, {}),
    "optimizer": ("sgd", {}),
    "schedule": ("gpipe", {"parallelism.pp": 2}),
    "framework": ("fsdp2", {}),
    "dropout": (True, {}),
    "learned_positions": (True, {}),
    "mtp_layers": (1, {}),
    "document_tokens": (256, {}),
    "total_tokens": (1e9, {}),
    "price_usd_per_hour": (1.0, {"total_tokens": 1e9}),
    "lora": ({"rank": 8}, {}),
    "lora.rank": (64, {"lora": {"rank": 8}}),
    "lora.all_linear": (False, {"lora": {"rank": 8}}),
    "lora.target_modules": (["q_proj"], {"lora": {"rank": 8}}),
    "lora.dropout": (True, {"lora": {"rank": 8}}),
    "parallelism.tp": (4, {}),
    "parallelism.sequence_parallel": (False, {}),
    "parallelism.cp": (2, {}),
    "parallelism.cp_method": ("all_gather", {"parallelism.cp": 2}),
    "parallelism.pp": (2, {}),
    "parallelism.virtual_stages": (11, {"parallelism.pp": 2}),
    "parallelism.layers_per_stage": ([10, 12], {"parallelism.pp": 2}),
    "parallelism.ep": (2, {"model": EXPERTS}),
    "parallelism.experts_tp": (2, WITH_EXPERTS),
    "parallelism.experts_exchange": ("by_node", WITH_EXPERTS),
    "parallelism.experts_capacity": (1.5, WITH_EXPERTS),
    "sharding.zero": (0, {}),
    "sharding.group": (4, SHARDED),
    "sharding.reshard_after_forward": (False, SHARDED | {"overlap.parameter_gather": False}),
    "sharding.reduce_bucket_elements": (1_000_000, DEEPSPEED),
    "sharding.gather_bucket_elements": (1_000_000, DEEPSPEED | {"sharding.zero": 1}),
    "sharding.prefetch_bucket_elements": (1_000_000, DEEPSPEED),
    "sharding.persistence_threshold_elements": (0, DEEPSPEED),
    "sharding.max_live_elements": (1, DEEPSPEED),
    "precision.compute": ("fp8", {}),
    "precision.gradients": ("bf16", {}),
    "precision.gradient_reduce": ("bf16", {}),
    "sharding.offload": ("optimizer", {}),
    "sharding.host_parameters_per_s": (1e9, {"sharding.offload": "optimizer"}),
    "precision.parameter_gather": ("fp8", {}),
    "precision.master_weights": ("bf16", {}),
    "precision.moments": ("bf16", {}),
    "precision.experts_dispatch": ("fp8", WITH_EXPERTS),
    "precision.activation_input": ("fp8", {}),
    "precision.frozen_weights": ("fp8", {"lora": {"rank": 8}}),
    "recompute.granularity": ("full", {}),
    "recompute.modules": (["norms"], {"recompute.granularity": "selective"}),
    "recompute.num_layers": (4, {"recompute.granularity": "full"}),
    "recompute.distribute": (True, {"recompute.granularity": "full", "parallelism.sequence_parallel": False}),
    "recompute.offload_layers": (4, {}),
    "overlap.gradient_reduce": (False, {}),
    "overlap.parameter_gather": (False, SHARDED),
    "overlap.tensor_parallel": (True, {}),
    "overlap.tensor_gradient": (False, {}),
    "overlap.pipeline": (False, {"parallelism.pp": 2}),
    "overlap.experts": (True, WITH_EXPERTS),
    "kernels.attention": ("unfused", {}),
    "kernels.cross_entropy": ("eager", {"sequence_tokens": 16384}),
    "kernels.cuda_graphs": ("full", WITH_EXPERTS),
    "kernels.fused_experts": (True, WITH_EXPERTS),
    "kernels.fused": (False, {}),
    "faults.device_mtbf_s": (1e7, RUN),
    "faults.restart_s": (3600.0, RUN),
    "faults.checkpoint_interval_s": (60.0, RUN),
    "faults.checkpoint_bytes_per_s": (1e8, RUN),
    "faults.checkpoint_blocks": (False, RUN),
    "faults.straggler_fraction": (0.1, {}),
    "faults.jitter_by_doubling": (0.1, {}),
}
"""Setting -> another value of it, and what else the job says: on both sides of the comparison."""

FOLLOWS = {"num_microbatches", "parallelism.dp", "parallelism.experts_dp"}
"""Settings that can only say what follows from others; anything else is refused."""


def job(settings: dict[str, Any]) -> TrainingJob:
    raw = msgspec.to_builtins(JOB)
    for path, value in msgspec.to_builtins(settings).items():
        set_path(raw, path, value)
    return decode(raw, TrainingJob)


def outcome(settings: dict[str, Any]) -> Any:
    """What a person sees of a job: its step, its memory and its run."""
    return _outcome(json.dumps(settings, sort_keys=True))


@cache
def _outcome(settings: str) -> Any:
    result: TrainingResult = simulate_training(job(json.loads(settings)))
    memory = [stage.total_bytes for stage in result.memory]
    run = campaign(result)
    return result.step_s, result.mfu, memory, run and msgspec.to_builtins(vars(run))


def settings_of(schema: type[Schema], prefix: str = "") -> set[str]:
    """Every path that a job file can set, sections opened."""
    found = set()
    for field in msgspec.structs.fields(schema):
        default = field.default
        is_section = isinstance(default, Schema)
        found |= settings_of(type(default), f"{field.name}.") if is_section else {prefix + field.name}
    return found


def test_the_table_has_every_setting() -> None:
    every = settings_of(TrainingJob) | {f"lora.{name}" for name in Lora.__struct_fields__}
    assert set(CHANGES) | FOLLOWS | {"network"} == every


@pytest.mark.full
@pytest.mark.parametrize("path", CHANGES)
def test_a_setting_changes_what_is_predicted(path: str) -> None:
    value, others = CHANGES[path]
    if path == "node":
        own = encode(resolve(job({})).node)
        own["scale_up"] = encode(Link(name="slow", bytes_per_s=1e10, latency_s=1e-6))
        value = own
    assert outcome(others | {path: value}) != outcome(others)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"recompute.modules": ["norms"]}, "recompute.modules = [norms]"),
        ({"recompute.granularity": "full", "recompute.modules": ["norms"]}, "recompute.modules"),
        ({"recompute.num_layers": 2}, "recompute.num_layers = 2"),
        ({"recompute.granularity": "full", "recompute.distribute": True}, "recompute.distribute"),
        ({"sharding.reshard_after_forward": False}, "sharding.reshard_after_forward"),
        ({"sharding.gather_bucket_elements": 5}, "sharding.gather_bucket_elements"),
        ({"sharding.prefetch_bucket_elements": 5}, "sharding.prefetch_bucket_elements"),
        (SHARDED | {"sharding.max_live_elements": 5}, "sharding.max_live_elements"),
        (SHARDED | {"sharding.reduce_bucket_elements": 5}, "sharding.reduce_bucket_elements"),
        ({"sharding.zero": 0, "precision.parameter_gather": "bf16"}, "precision.parameter_gather"),
        ({"sharding.zero": 0, "overlap.parameter_gather": True}, "overlap.parameter_gather"),
        (WITH_EXPERTS | {"parallelism.pp": 2, "overlap.experts": True}, "overlap.experts"),
        ({"parallelism.experts_exchange": "by_node"}, "parallelism.experts_exchange = by_node"),
        ({"parallelism.experts_tp": 2}, "parallelism.experts_tp = 2"),
        ({"optimizer": "sgd", "precision.moments": "int8"}, "precision.moments = int8"),
        ({"precision.experts_dispatch": "fp8"}, "precision.experts_dispatch = fp8"),
        ({"overlap.experts": True}, "overlap.experts = true"),
        ({"kernels.fused_experts": True}, "kernels.fused_experts = true"),
        (SELECTIVE | {"recompute.modules": ["experts"]}, "recompute.modules has experts"),
        (SELECTIVE | {"recompute.modules": ["norms", "latent_up_projection"]}, "has latent_up_projection"),
        ({"faults.device_mtbf_s": 1e6}, "faults.device_mtbf_s"),
        ({"total_tokens": 1e9, "faults.restart_s": 60.0}, "faults.restart_s"),
        ({"total_tokens": 1e9, "faults.checkpoint_blocks": False}, "faults.checkpoint_blocks"),
        ({"num_microbatches": 7}, "num_microbatches = 7"),
        ({"parallelism.experts_dp": 3}, "experts_dp = 3"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_setting_that_changes_nothing_is_refused(settings: dict[str, Any], names: str) -> None:
    with pytest.raises(InputError) as caught:
        resolve(job(settings))
    assert names in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("framework", ["megatron", "deepspeed", "fsdp2", "deepseek"])
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_a_resolved_job_resolves_again_to_itself(framework: str, zero: int) -> None:
    others = {"parallelism.pp": 2} if framework == "deepseek" else {}
    setup = resolve(job({"framework": framework, "sharding.zero": zero, "parallelism.tp": 1} | others))
    assert resolve(setup.job).job == setup.job
