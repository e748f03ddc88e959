"""Every setting of an engine changes its prediction, or is refused; none is read and forgotten."""

import json
from functools import cache
from typing import Any

import msgspec
import pytest

from windtunnel.errors import InputError
from windtunnel.schema import Schema, decode, set_path
from windtunnel.serving.deployment import EngineSettings
from windtunnel.serving.engines.defaults import ENGINE_SCHEDULERS, OTHER_SCHEDULERS, read_by
from windtunnel.serving.scenario import Scenario, resolve
from windtunnel.serving.simulate import simulate

ENGINES = {"vllm_v1": "vllm", "sglang": "sglang", "trtllm": "trtllm", "trtllm_max_utilization": "trtllm"}
SCENARIO: dict[str, Any] = {
    "model": "Qwen/Qwen2.5-0.5B",
    "deployment": {
        "device": "a40",
        "calibration": "none",
        "engine": {"max_num_seqs": 8, "max_num_batched_tokens": 2048, "num_gpu_blocks": 2000, "block_size": 16},
    },
    "workload": {
        "arrivals": {"type": "poisson", "rate_per_s": 60},
        "input_tokens": {"type": "uniform", "min_tokens": 100, "max_tokens": 1500},
        "output_tokens": {"type": "uniform", "min_tokens": 20, "max_tokens": 120},
        "num_requests": 80,
    },
}
"""On a device that nothing was measured on, so that no tables are read."""
ENGINE = "deployment.engine."
BUSY = {"workload.arrivals.rate_per_s": 1000, ENGINE + "max_num_seqs": 512}
FEW, FEWER = "few", "fewer"
SHARES = {FEW: {"vllm": 0.36, "sglang": 0.33, "trtllm": 0.05}, FEWER: {"vllm": 0.354, "sglang": 0.32, "trtllm": 0.03}}
"""Of memory, so that KV blocks are few; TensorRT-LLM's is of what is free."""
PLANNED = BUSY | {"model": "gpt-oss-20b", ENGINE + "num_gpu_blocks": None, ENGINE + "gpu_memory_utilization": FEW}
TIGHT = {ENGINE + "num_gpu_blocks": 220, ENGINE + "max_num_seqs": 64}
SHARED = {"workload.shared_prompts": {"tokens": 400, "count": 8}}
RANKS = {"model": "Qwen/Qwen1.5-MoE-A2.7B", "deployment.parallelism": {"attention_dp": 2, "ep": 2}}
GRAPHS = {ENGINE + "max_cudagraph_capture_size": 512}
"""As with more running requests: of 8, vLLM captures 16 tokens."""
TABLES = {"deployment.device": "h100_sxm"}
LONG = {"workload.input_tokens": 3000, ENGINE + "max_num_batched_tokens": 4096}
SYNCHRONOUS, ASYNCHRONOUS = {ENGINE + "async_scheduling": False}, {ENGINE + "async_scheduling": True}
TIERS = [{"capacity_bytes": 10_000_000_000, "bandwidth_bytes_per_s": 1e9}]

OTHER = "the other one"
"""Not the value that the engine takes by itself."""

SPREAD = TABLES | {"model": "gpt-oss-20b", "deployment.parallelism": {"attention_dp": 2, "ep": 2}}
DEEPEP = SPREAD | {ENGINE + "all2all_backend": "deepep_low_latency"}
PICTURES = {
    "model": "Qwen/Qwen3-VL-8B-Instruct",
    "workload.images": {"count": 2, "width": 448, "height": 448, "distinct": 8},
}
"""Images that come again, so that there is an encoder cache."""
TAILS = {
    "model": "deepseek-ai/DeepSeek-V4.1-Flash",
    "deployment.device": "b200_sxm",
    "deployment.parallelism": {"tp": 2, "ep": 2},
    ENGINE + "num_gpu_blocks": None,
    ENGINE + "ngram_tables_on_host": True,
}
CHANGES: dict[str, tuple[Any, dict[str, Any]]] = {
    "version": ("0.1", {}),
    "scheduler": ("sarathi", {ENGINE + "enable_prefix_caching": False}),
    "max_num_seqs": (4, {}),
    "max_num_batched_tokens": (1024, {ENGINE + "enable_chunked_prefill": True}),
    "max_prefill_tokens": (1600, BUSY),
    "long_prefill_token_threshold": (128, {ENGINE + "enable_chunked_prefill": True}),
    "enable_chunked_prefill": (OTHER, LONG),
    "scheduler_reserve_full_isl": (
        OTHER,
        TIGHT | {ENGINE + "max_num_batched_tokens": 256, ENGINE + "enable_chunked_prefill": True},
    ),
    "enable_prefix_caching": (False, SHARED),
    "kv_tiers": (TIERS, SHARED | TIGHT),
    "kv_load_overlaps": (OTHER, SHARED | TIGHT | {ENGINE + "kv_tiers": TIERS}),
    "scheduling_policy": ("shortest", {}),
    "max_model_len": (800, {}),
    "block_size": (256, TIGHT),
    "num_gpu_blocks": (110, TIGHT),
    "kv_cache_memory_bytes": (20_000_000, BUSY | {ENGINE + "num_gpu_blocks": None}),
    "max_kv_tokens": (1800, BUSY | {ENGINE + "num_gpu_blocks": None}),
    "window_kv": (OTHER, PLANNED),
    "window_pool_ratio": (0.3, PLANNED | {ENGINE + "window_kv": "own_pool"}),
    "gpu_memory_utilization": (FEWER, PLANNED),
    "memory_fraction_of_free": (OTHER, PLANNED),
    "reserved_bytes": (2_500_000_000, PLANNED),
    "max_cudagraph_capture_size": (16, {ENGINE + "max_num_seqs": 64, "model": "llama-3.2-3b"} | BUSY),
    "cudagraph_sizes": ([512], BUSY | {"model": "llama-3.2-3b"}),
    "cudagraph_padding": (OTHER, BUSY | {"model": "llama-3.2-3b"}),
    "piecewise_cudagraphs": (OTHER, GRAPHS | {"model": "llama-3.2-1b", ENGINE + "host": {"launch_s": 0.001}}),
    "full_cudagraphs": (
        False,
        GRAPHS
        | {"model": "llama-3.2-1b", ENGINE + "host": {"launch_s": 0.001}}
        | {ENGINE + "piecewise_cudagraphs": True, ENGINE + "max_cudagraph_capture_size": 512},
    ),
    "piecewise_sizes": (
        [1],
        GRAPHS
        | {"model": "llama-3.2-1b", ENGINE + "host": {"launch_s": 0.001}}
        | {ENGINE + "piecewise_cudagraphs": True, ENGINE + "max_cudagraph_capture_size": 512},
    ),
    "async_scheduling": (OTHER, {}),
    "schedule_conservativeness": (0.1, TIGHT),
    "sampler": ("triton", {"workload.sampling": {"temperature": 1.0, "top_p": 0.9}}),
    "receive_interval_steps": (30, {}),
    "batch_wait_timeout_iters": (20, {ENGINE + "batch_wait_max_tokens_ratio": 0.9}),
    "batch_wait_max_tokens_ratio": (0.9, {ENGINE + "batch_wait_timeout_iters": 20}),
    "attention_dp_timeout_iters": (50, RANKS),
    "attention_dp_batching_wait_iters": (10, RANKS | {ENGINE + "attention_dp_timeout_iters": 50}),
    "watermark_fraction": (0.3, TIGHT),
    "max_waiting_steps": (30, {}),
    "backend": ("tensorrt", GRAPHS | {"model": "llama-3.2-1b"}),
    "attention_backend": ("triton", TABLES | GRAPHS),
    "moe_backend": ("marlin", TABLES | {"model": "gpt-oss-20b", ENGINE + "piecewise_cudagraphs": False}),
    "fused_all_reduce": (
        OTHER,
        {"deployment.device": "b200_sxm", "model": "llama-3.1-8b", "deployment.parallelism": {"tp": 8}},
    ),
    "fused_all_reduce_bytes": (
        1024,
        {
            "deployment.device": "b200_sxm",
            "model": "llama-3.1-8b",
            "deployment.parallelism": {"tp": 8},
            ENGINE + "fused_all_reduce": True,
        },
    ),
    "shared_experts_beside_tokens": (4, {"model": "Qwen/Qwen1.5-MoE-A2.7B"}),
    "all2all_backend": ("deepep_low_latency", SPREAD),
    "num_redundant_experts": (2, SPREAD),
    "enable_eplb": (True, SPREAD),
    "two_batch_overlap": (True, DEEPEP | {ENGINE + "overlap_decode_tokens": 1}),
    "single_batch_overlap": (True, DEEPEP | {"model": "Qwen/Qwen1.5-MoE-A2.7B"}),
    "overlap_decode_tokens": (1, DEEPEP | {ENGINE + "two_batch_overlap": True}),
    "overlap_prefill_tokens": (100_000, DEEPEP | {ENGINE + "two_batch_overlap": True}),
    "max_num_encoder_input_tokens": (1, PICTURES),
    "encoder_cache_tokens": (400, PICTURES),
    "encoder_cache_bytes": (0, PICTURES),
    "encoder_cache_unit": ("request", PICTURES),
    "tf32": (
        True,
        {"deployment.device": "h200_sxm", "model": "MiniMaxAI/MiniMax-M2.5", "deployment.parallelism": {"tp": 4}},
    ),
    "scaled_sparse_kv": (
        OTHER,
        BUSY
        | {"model": "deepseek-v3.2", "deployment.device": "h200_sxm", "deployment.parallelism": {"tp": 8}}
        | {"precision": {"weights": "fp8_block", "kv_cache": "fp8"}}
        | {ENGINE + "num_gpu_blocks": None, ENGINE + "kv_cache_memory_bytes": 200_000_000},
    ),
    "compresses_in_one_block": (
        OTHER,
        {
            "model": "deepseek-ai/DeepSeek-V4-Flash",
            "deployment.device": "h200_sxm",
            "deployment.parallelism": {"tp": 4, "ep": 4},
            ENGINE + "num_gpu_blocks": 50_000,
        },
    ),
    "swa_bounded_replay": (OTHER, TAILS),
    # With their share of the tables two devices cannot hold the model.
    "ngram_tables_on_host": (False, TAILS),
    "lora": ({"rank": 256}, PLANNED),
    "speculative": ({"method": "ngram", "num_draft_tokens": 2, "acceptance_fraction": 0.5}, {}),
    "host.step_s": (0.1, SYNCHRONOUS),
    "host.request_s": (0.01, SYNCHRONOUS),
    "host.first_token_s": (0.1, {}),
    "host.stream_s": (0.01, {}),
    "host.prompt_token_s": (0.001, {}),
    "host.chat_s": (0.01, {"workload.client": "vllm-chat"}),
    "host.launch_s": (0.01, {}),
    "host.unhidden_step_s": (0.01, ASYNCHRONOUS),
    "host.unhidden_request_s": (0.001, ASYNCHRONOUS),
    "host.kernel_gap_s": (1e-4, ASYNCHRONOUS),
}
"""Setting -> another value of it, and what else the scenario says: on both sides of the comparison."""


def scenario(scheduler: str, settings: dict[str, Any]) -> Scenario:
    raw = msgspec.to_builtins(SCENARIO)
    raw["deployment"]["engine"]["name"] = ENGINES.get(scheduler, "vllm")
    if scheduler not in ("vllm_v1", "sglang", "trtllm"):
        raw["deployment"]["engine"]["scheduler"] = scheduler
    for path, value in msgspec.to_builtins(settings).items():
        set_path(raw, path, SHARES[value][ENGINES[scheduler]] if value in (FEW, FEWER) else value)
    return decode(raw, Scenario)


def outcome(scheduler: str, settings: dict[str, Any]) -> Any:
    """What a person sees: the latencies, or why there are none."""
    return _outcome(scheduler, json.dumps(settings, sort_keys=True))


@cache
def _outcome(scheduler: str, settings: str) -> Any:
    try:
        found = simulate(scenario(scheduler, json.loads(settings))).summary
    except InputError as error:
        return error.message
    return found.ttft_s, found.tpot_s, found.e2e_s


def another(scheduler: str, name: str, value: Any, others: dict[str, Any]) -> Any:
    if value != OTHER:
        return value
    taken = getattr(resolve(scenario(scheduler, others)).engine, name)
    if name != "window_kv":
        return not taken
    return "full" if taken != "full" else "shared_pool" if scheduler == "vllm_v1" else "own_pool"


def settings_of(schema: type[Schema], prefix: str = "") -> set[str]:
    found = set()
    for field in msgspec.structs.fields(schema):
        is_section = isinstance(field.default, Schema)
        found |= settings_of(type(field.default), f"{field.name}.") if is_section else {prefix + field.name}
    return found


def test_the_table_has_every_setting() -> None:
    assert set(CHANGES) | {"name"} == settings_of(EngineSettings)


OWN_FORMS = [
    *(
        (name, "sglang")
        for name in (
            "max_num_encoder_input_tokens",
            "encoder_cache_tokens",
            "encoder_cache_bytes",
            "encoder_cache_unit",
            "speculative",
        )
    ),
    *(
        (name, scheduler)
        for name in ("attention_dp_timeout_iters", "attention_dp_batching_wait_iters")
        for scheduler in ("trtllm", "trtllm_max_utilization")
    ),
]
"""Settings of engines for which the loop would be compiled once more, 4 to 5 s each."""
PAIRS = [(name, scheduler) for name in CHANGES for scheduler in ENGINE_SCHEDULERS if (name, scheduler) not in OWN_FORMS]


@pytest.mark.interpreted
@pytest.mark.parametrize(("name", "scheduler"), OWN_FORMS)
def test_a_setting_of_an_own_form_changes_what_is_predicted(name: str, scheduler: str) -> None:
    check_change(name, scheduler)


@pytest.mark.parametrize(("name", "scheduler"), PAIRS)
def test_a_setting_changes_what_is_predicted_or_is_refused(name: str, scheduler: str) -> None:
    check_change(name, scheduler)


def check_change(name: str, scheduler: str) -> None:
    value, others = CHANGES[name]
    others = {
        path: other
        for path, other in others.items()
        if scheduler in read_by().get(path.removeprefix(ENGINE), (scheduler,))
    }
    if name == "window_pool_ratio" and scheduler == "vllm_v1":
        others = PLANNED
    before = outcome(scheduler, others)
    after = outcome(scheduler, others | {ENGINE + name: another(scheduler, name, value, others)})
    assert not isinstance(before, str), before
    assert after != before
    is_idle = scheduler not in read_by().get(name, (scheduler,))
    assert (isinstance(after, str) and f"engine.{name} = " in after and "changes nothing" in after) or not is_idle


@pytest.mark.parametrize("scheduler", OTHER_SCHEDULERS)
@pytest.mark.parametrize("name", read_by())
def test_other_schedulers_refuse_what_they_do_not_read(scheduler: str, name: str) -> None:
    flags = {
        "enable_chunked_prefill": scheduler != "sarathi",
        "fused_all_reduce": False,
        "scheduler_reserve_full_isl": False,
    }
    value = flags.get(name, CHANGES[name][0])
    settings = {ENGINE + "max_num_batched_tokens": None, ENGINE + name: value}
    if scheduler in read_by()[name]:
        assert getattr(resolve(scenario(scheduler, settings)).engine, name) == value
        return
    with pytest.raises(InputError, match=f"engine.{name} = .* changes nothing: the scheduler {scheduler}"):
        resolve(scenario(scheduler, settings))


def test_a_setting_that_says_nothing_new_is_no_error() -> None:
    resolve(scenario("vllm_v1", {ENGINE + "receive_interval_steps": 1, ENGINE + "batch_wait_timeout_iters": 0}))
    settings = {ENGINE + "enable_chunked_prefill": False, ENGINE + "max_num_batched_tokens": None}
    resolve(scenario("orca", settings))


def test_what_only_lower_tiers_make_matter_needs_them() -> None:
    with pytest.raises(InputError, match=r"kv_load_overlaps = true changes nothing: it needs engine\.kv_tiers"):
        resolve(scenario("vllm_v1", {ENGINE + "kv_load_overlaps": True}))
