from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.hardware import Device
from windtunnel.model.memory import kv_bytes_per_token
from windtunnel.model.parallelism import Parallelism
from windtunnel.schema import encode
from windtunnel.serving.deployment import EngineSettings, HostOverheads, Speculative
from windtunnel.serving.engines import defaults
from windtunnel.serving.engines.contract import schedulers
from windtunnel.serving.engines.defaults import (
    OTHER_SCHEDULERS,
    SCHEDULERS,
    engine_defaults,
    for_architecture,
    newer_than_known,
    with_defaults,
)
from windtunnel.serving.scenario import resolve
from windtunnel.serving.setup.estimators import shard_of
from windtunnel.serving.shorthand import scenario
from windtunnel.units import version_key

H100, A10 = catalog.device("h100_sxm"), catalog.device("a10")

VLLMS_OWN = {
    "scheduler_reserve_full_isl",
    "fused_all_reduce_bytes",
    "max_num_encoder_input_tokens",
    "encoder_cache_tokens",
}
SGLANGS_OWN = {
    *("max_prefill_tokens", "schedule_conservativeness", "receive_interval_steps"),
    *("encoder_cache_bytes", "encoder_cache_unit", "single_batch_overlap"),
}
TENSORRTS_OWN = {
    "batch_wait_timeout_iters",
    "batch_wait_max_tokens_ratio",
    "attention_dp_timeout_iters",
    "attention_dp_batching_wait_iters",
    "piecewise_sizes",
}
OTHER_SCHEDULERS_OWN = {"watermark_fraction", "max_waiting_steps"}
UNSET = {
    *(
        "max_model_len",
        "num_gpu_blocks",
        "max_kv_tokens",
        "kv_cache_memory_bytes",
        "cudagraph_sizes",
        "moe_backend",
        "kv_tiers",
        "speculative",
        "lora",
    ),
    *("window_pool_ratio", "backend", "attention_backend"),
    *("two_batch_overlap", "overlap_decode_tokens", "overlap_prefill_tokens"),  # vLLM's and SGLang's
    *VLLMS_OWN,
    *SGLANGS_OWN,
    *TENSORRTS_OWN,
    *OTHER_SCHEDULERS_OWN,
}
"""What an engine may leave open."""


@pytest.mark.parametrize("name", catalog.names("engines"))
@pytest.mark.parametrize("device", [H100, A10], ids=["80 GB", "24 GB"])
def test_nothing_that_decides_a_run_stays_open(name: str, device: Device) -> None:
    settings = with_defaults(EngineSettings(name=name), device)
    open_fields = {field for field in settings.__struct_fields__ if getattr(settings, field) is None}
    assert open_fields <= UNSET
    assert settings.version == engine_defaults(name).default_version
    assert settings.scheduler in SCHEDULERS
    assert None not in msgspec.structs.astuple(settings.host)


def test_engines_that_tensorrt_built_are_launched_by_cpp_whatever_was_learnt_of_pytorch() -> None:
    """Of an 8B model with a prompt of 500 tokens, PyTorch's launches take 14.6 ms of the host, C++'s 1.3."""
    learnt = EngineSettings(name="trtllm", host=HostOverheads(launch_s=60e-6, step_s=2e-3))
    for version, given, backend in (
        ("0.20.0", None, "tensorrt"),
        ("0.20.0", "pytorch", "pytorch"),
        ("1.0.0", None, "pytorch"),
        ("1.2.0", "tensorrt", "tensorrt"),
    ):
        found = with_defaults(EngineSettings(name="trtllm", version=version, backend=given), H100, learnt)
        is_built = backend == "tensorrt"
        assert found.backend == backend
        assert (found.host.launch_s, found.host.step_s) == ((4e-6, 1e-3) if is_built else (60e-6, 2e-3))
        assert found.max_cudagraph_capture_size == (0 if is_built or version == "0.20.0" else 128)
        assert found.async_scheduling != is_built
    with pytest.raises(InputError, match="backend is 'onnx', which is not known"):
        scenario(
            model="llama-3.1-8b", device="h100_sxm", engine="trtllm", settings={"deployment.engine.backend": "onnx"}
        )


def test_vllm_serves_more_on_devices_of_70_gib() -> None:
    """vllm/engine/arg_utils.py, `_get_batch_defaults`."""
    large, small = (with_defaults(EngineSettings(), device) for device in (H100, A10))
    assert (large.max_num_seqs, large.max_num_batched_tokens) == (1024, 8192)
    assert (small.max_num_seqs, small.max_num_batched_tokens) == (256, 2048)


def test_settings_given_win_one_by_one() -> None:
    given = EngineSettings(max_num_seqs=7, async_scheduling=False, host=HostOverheads(step_s=0.0))
    settings = with_defaults(given, H100)
    default = with_defaults(EngineSettings(), H100)
    assert (settings.max_num_seqs, settings.async_scheduling, settings.host.step_s) == (7, False, 0.0)
    assert settings.host.request_s == default.host.request_s
    assert settings.max_num_batched_tokens == default.max_num_batched_tokens


def test_a_version_gets_the_settings_of_its_time() -> None:
    assert with_defaults(EngineSettings(version="0.13.0"), H100).async_scheduling is False
    assert with_defaults(EngineSettings(version="0.14.0"), H100).async_scheduling is True


@pytest.mark.parametrize(
    ("device", "version", "shape", "is_fused", "limit_mib"),
    [
        ("h100_sxm", "0.16.0", Parallelism(tp=8), False, 0.5),
        ("h100_sxm", "0.17.0", Parallelism(tp=8), True, 0.5),
        ("h100_sxm", "0.17.0", Parallelism(tp=4, pp=2), False, 2),
        ("h200_sxm", "0.21.0", Parallelism(tp=4, pp=2), True, 2),
        ("b200_sxm", "0.20.1", Parallelism(tp=2, attention_dp=2), False, 64),
        ("b200_sxm", "0.24.0", Parallelism(tp=4), True, 32),
        ("b300_sxm", "0.18.0", Parallelism(tp=8), False, 1),
        ("b300_sxm", "0.20.1", Parallelism(tp=8), True, 2),
        ("gb300", "0.33.0", Parallelism(tp=8), True, 4),
        ("rtx_pro_6000_server", "0.33.0", Parallelism(tp=2), False, 64),
        ("h100_sxm", "0.24.0", Parallelism(tp=6), False, None),
        ("a100_sxm", "0.24.0", Parallelism(tp=8), False, None),
        ("h100_sxm", "0.24.0", Parallelism(), False, None),
    ],
)
def test_vllm_fuses_all_reduces_by_device_split_and_version(
    device: str, version: str, shape: Parallelism, is_fused: bool, limit_mib: float | None
) -> None:
    """`enable_allreduce_rms_fusion` and `FI_ALLREDUCE_FUSION_MAX_SIZE_MB` of 0.16 to 0.33."""
    found = with_defaults(EngineSettings(version=version), catalog.device(device), shape=shape)
    assert found.fused_all_reduce is is_fused
    assert found.fused_all_reduce_bytes == (None if limit_mib is None else limit_mib * 2**20)
    eager = EngineSettings(version=version, max_cudagraph_capture_size=0)
    assert with_defaults(eager, catalog.device(device), shape=shape).fused_all_reduce is False


@pytest.mark.parametrize(("model", "is_fused"), [("qwen3", True), ("gemma3", False), ("qwen3_5_moe", False)])
def test_vllm_fuses_no_all_reduce_with_a_norm_that_it_does_not_match(model: str, is_fused: bool) -> None:
    """`GemmaRMSNorm` is none of the patterns of 0.20 `allreduce_rms_fusion.py`, whatever the flag says."""
    for given in (EngineSettings(version="0.20.1"), EngineSettings(version="0.20.1", fused_all_reduce=True)):
        resolved = with_defaults(given, H100, shape=Parallelism(tp=2))
        assert for_architecture(given, resolved, model).fused_all_reduce is is_fused


def test_vllm_admits_whole_prompts_and_takes_more_on_large_devices_with_its_versions() -> None:
    b200 = catalog.device("b200_sxm")
    old, new = (with_defaults(EngineSettings(version=version), b200) for version in ("0.27.0", "0.28.0"))
    assert (old.max_num_batched_tokens, old.max_cudagraph_capture_size) == (8192, 512)
    assert (new.max_num_batched_tokens, new.max_cudagraph_capture_size) == (16384, 1024)
    assert with_defaults(EngineSettings(version="0.33.0"), catalog.device("mi300x")).max_cudagraph_capture_size == 512
    reserves = [with_defaults(EngineSettings(version=v), H100).scheduler_reserve_full_isl for v in ("0.18.1", "0.19")]
    assert reserves == [False, True]


def test_vllm_captures_twice_the_requests_that_run() -> None:
    drafts = Speculative(method="mtp", num_draft_tokens=3, acceptance_fraction=0.5)
    for given, largest in (
        (EngineSettings(max_num_seqs=16), 32),
        (EngineSettings(max_num_seqs=16, speculative=drafts), 128),
        (EngineSettings(max_num_seqs=1024), 512),
        (EngineSettings(max_num_seqs=16, max_cudagraph_capture_size=300), 300),
        (EngineSettings(max_num_seqs=16, max_cudagraph_capture_size=0), 0),
    ):
        assert with_defaults(given, H100).max_cudagraph_capture_size == largest


@pytest.mark.parametrize(
    ("version", "architecture", "captured"),
    [
        ("0.10.2", "gpt_oss", 1024),
        ("0.11.0", "gpt_oss", 992),
        ("0.11.1", "gpt_oss", 1024),
        ("0.20", "gpt_oss", 1024),
        ("0.11.1", "qwen3", 512),
    ],
)
def test_vllm_captures_larger_graphs_of_gpt_oss(version: str, architecture: str, captured: int) -> None:
    given = EngineSettings(version=version)
    assert for_architecture(given, with_defaults(given, H100), architecture).max_cudagraph_capture_size == captured
    few = EngineSettings(version=version, max_num_batched_tokens=256)
    assert for_architecture(few, with_defaults(few, H100), architecture).max_cudagraph_capture_size == 256
    asked = EngineSettings(version=version, max_cudagraph_capture_size=128)
    assert for_architecture(asked, with_defaults(asked, H100), architecture).max_cudagraph_capture_size == 128


@pytest.mark.parametrize(("method", "since"), [("mtp", "0.14.0"), ("draft_model", "0.28.0"), ("ngram", "0.33.0")])
def test_vllm_waits_for_the_step_with_drafts_of_some_methods(method: Any, since: str) -> None:
    drafts = Speculative(
        method=method,
        num_draft_tokens=2,
        acceptance_fraction=0.5,
        draft_model="llama-3.2-1b" if method == "draft_model" else None,
    )
    for version in ("0.13.0", "0.14.0", "0.24.0", "0.28.0", "0.33.0"):
        found = with_defaults(EngineSettings(version=version, speculative=drafts), H100)
        assert found.async_scheduling is (version_key(version) >= version_key(since)), version
    given = EngineSettings(version="0.24.0", speculative=drafts, async_scheduling=True)
    assert with_defaults(given, H100).async_scheduling is True


@pytest.mark.parametrize(
    ("engine", "version", "given", "caches"),
    [
        ("vllm", "0.24.0", None, False),
        ("vllm", "0.24.0", True, True),
        ("vllm", "0.28.0", None, True),
        ("sglang", "0.5.14", None, True),
    ],
)
def test_vllm_cached_no_prefixes_of_models_with_recurrences_before_0_28(
    engine: str, version: str, given: bool | None, caches: bool
) -> None:
    """`is_prefix_caching_supported` of 0.24; every model without such layers has them cached."""
    settings = {"deployment.engine.enable_prefix_caching": given} if given is not None else {}
    for model, expected in (("Qwen/Qwen3.5-35B-A3B", caches), ("llama-3.1-8b", True)):
        load = {"concurrency": 1, "input_tokens": 1, "output_tokens": 1}
        served = scenario(
            model=model, device="b200_sxm", engine=engine, engine_version=version, settings=settings, **load
        )
        assert resolve(served).engine.enable_prefix_caching is expected


def test_sglang_fuses_all_reduces_of_some_models() -> None:
    """`_flashinfer_allreduce_fusion_auto_enable`, and `server_args.py` before."""
    b200 = catalog.device("b200_sxm")
    for version, device, model, split, is_fused in (
        ("0.5.4", b200, "deepseek_v3", {}, False),
        ("0.5.5", b200, "deepseek_v3", {}, True),
        ("0.5.5", H100, "deepseek_v3", {}, False),
        ("0.5.7", H100, "deepseek_v3", {}, True),
        ("0.5.7", b200, "llama", {}, False),
        ("0.5.10", b200, "qwen3_next", {}, False),
        ("0.5.23", b200, "qwen3_next", {"pp": 2}, True),
        ("0.5.23", b200, "qwen3_next", {"attention_dp": 2, "ep": 4}, False),
    ):
        given = EngineSettings(name="sglang", version=version)
        resolved = with_defaults(given, device, shape=Parallelism(tp=2, **split))
        assert for_architecture(given, resolved, model).fused_all_reduce is is_fused, (version, device.name, model)
    asked = EngineSettings(name="sglang", fused_all_reduce=True)
    assert for_architecture(asked, with_defaults(asked, H100), "llama").fused_all_reduce is True


def test_sglang_captures_no_more_than_the_requests_that_run() -> None:
    for version, largest in (("0.5.21", 256), ("0.5.22", 64)):
        found = with_defaults(EngineSettings(name="sglang", version=version, max_num_seqs=64), H100)
        assert found.max_cudagraph_capture_size == largest
    small = [with_defaults(EngineSettings(name="sglang", version=v), A10) for v in ("0.5.19", "0.5.20")]
    assert [settings.max_cudagraph_capture_size for settings in small] == [24, 48]


def test_a_version_beyond_the_known_ones_is_announced_and_gets_the_newest() -> None:
    newer = EngineSettings(version="0.34.0")
    assert newer_than_known(newer).startswith("vLLM 0.34.0 is newer than 0.33.0")
    newest = with_defaults(EngineSettings(version="0.33.0"), H100)
    assert with_defaults(newer, H100) == msgspec.structs.replace(newest, version="0.34.0")
    for known in (EngineSettings(), EngineSettings(version="0.33.0"), EngineSettings(name="sglang", version="0.4")):
        assert newer_than_known(known) == ""


@pytest.mark.parametrize(
    ("device", "shape", "chunk", "graphs", "share"),
    [
        ("h100_sxm", Parallelism(), 8192, 256, (81559 - 512 - 12288 - 512 - 128 - 58 * 8) / 81559),
        ("h100_sxm", Parallelism(tp=8), 8192, 512, (81559 - 512 - 12288 - 1024 - 1024 - 58 * 8) / 81559),
        ("b200_sxm", Parallelism(tp=8), 16384, 512, (183359 - 512 - 24576 - 1024 - 1024 - 74 * 8) / 183359),
        ("l40s", Parallelism(tp=4), 4096, 160, (46068 - 512 - 6144 - 320 - 512 - 50 * 8) / 46068),
        ("h200_sxm", Parallelism(attention_dp=8, ep=8), 1024, 512, (143771 - 14848 - 512 * 8 * 4.5) / 143771),
        ("a10", Parallelism(), 2048, 24, None),
    ],
)
def test_sglang_goes_by_memory_and_width(
    device: str, shape: Parallelism, chunk: int, graphs: int, share: float | None
) -> None:
    """The figures are those of SGLang's own heuristics (server_args.py, 0.5.3 and later), worked out by hand in MiB."""
    found = with_defaults(EngineSettings(name="sglang"), catalog.device(device), shape=shape)
    assert (found.max_num_batched_tokens, found.max_cudagraph_capture_size) == (chunk, graphs)
    if share is not None:
        assert found.gpu_memory_utilization == round(share, 3)
    assert found.schedule_conservativeness == (0.3 if shape.attention_dp > 1 else 1.0)
    told = with_defaults(EngineSettings(name="sglang", gpu_memory_utilization=0.5), catalog.device(device), shape=shape)
    assert told.gpu_memory_utilization == 0.5
    older = with_defaults(EngineSettings(name="sglang", version="0.5.2"), catalog.device(device), shape=shape)
    assert older.gpu_memory_utilization == 0.88


def test_newer_settings_replace_older_ones_of_large_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "engines").mkdir()
    (tmp_path / "engines" / "mine.yaml").write_text(
        """
title: Mine
default_version: "2.0"
versions:
  - since: "1.0"
    settings:
      {scheduler: vllm_v1, max_num_seqs: 8, max_num_batched_tokens: 512, block_size: 16, gpu_memory_utilization: 0.9}
    by_memory: [{from_bytes: 70GiB, settings: {max_num_seqs: 16}}]
  - {since: "2.0", settings: {max_num_seqs: 32}}
"""
    )
    monkeypatch.setenv(catalog.SEARCH_PATH_VARIABLE, str(tmp_path))
    found = [with_defaults(EngineSettings(name="mine", version=v), H100).max_num_seqs for v in ("1.0", "1.5", "2.0")]
    assert found == [16, 16, 32]


def test_an_engine_without_needed_settings_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended in an AssertionError."""
    (tmp_path / "engines").mkdir()
    settings = "{since: '1.0', settings: {scheduler: vllm_v1, max_num_seqs: 8}}"
    (tmp_path / "engines" / "thin.yaml").write_text(f"{{title: Thin, default_version: '1.0', versions: [{settings}]}}")
    monkeypatch.setenv(catalog.SEARCH_PATH_VARIABLE, str(tmp_path))
    with pytest.raises(InputError, match="lack max_num_batched_tokens, block_size, gpu_memory_uti"):
        with_defaults(EngineSettings(name="thin"), H100)


def test_what_does_not_exist_is_refused() -> None:
    with pytest.raises(InputError, match="there is no engine 'vlm'") as caught:
        with_defaults(EngineSettings(name="vlm"), H100)
    assert caught.value.hint == "did you mean vllm?"
    with pytest.raises(InputError, match=r"vLLM 0.2.0 is older than 0.8"):
        with_defaults(EngineSettings(version="0.2.0"), H100)
    with pytest.raises(InputError, match="there is no scheduler 'vllm_v2'") as caught:
        with_defaults(EngineSettings(scheduler="vllm_v2"), H100)
    assert caught.value.hint == "did you mean vllm_v1 or vllm_v0?"


def test_an_engine_of_one_vendor_is_refused_on_devices_of_others() -> None:
    of_amd = catalog.device("mi300x")
    with pytest.raises(InputError, match="TensorRT-LLM does not run on AMD Instinct MI300X") as refused:
        with_defaults(EngineSettings(name="trtllm"), of_amd)
    assert refused.value.hint == "it runs on devices of nvidia; other engines run on this one"
    assert with_defaults(EngineSettings(name="sglang"), of_amd).scheduler == "sglang"


def test_an_engine_is_resolved_by_the_name_that_its_behaviour_goes_by() -> None:
    """Letter case does not matter in the catalog, so it may not in memory, launches or tables either."""
    assert with_defaults(EngineSettings(name="SGLang"), H100) == with_defaults(EngineSettings(name="sglang"), H100)
    assert "name" not in encode(with_defaults(EngineSettings(), H100))


def test_versions_in_order() -> None:
    before = ["0.9", "0.19.0", "0.24", "1.0.0.dev3", "1.0.0a1", "1.0.0rc5", "1.0.0rc12"]
    keys = [version_key(version) for version in [*before, "1.0.0", "1.0.0.post1", "1.0.1"]]
    assert all(older < newer for older, newer in pairwise(keys))
    assert version_key("v0.19") == version_key("0.19.0")
    assert version_key("main") > version_key("99.0")


@pytest.mark.parametrize("name", OTHER_SCHEDULERS)
def test_another_scheduler_brings_its_own_settings(name: str) -> None:
    """They replace the engine's; what the user says replaces both."""
    settings = with_defaults(EngineSettings(scheduler=name), H100)
    own = schedulers()[name].settings
    for field in own.__struct_fields__:
        if (value := getattr(own, field)) is not None and field not in ("name", "host"):
            assert getattr(settings, field) == value
    assert with_defaults(EngineSettings(scheduler=name, max_num_seqs=7), H100).max_num_seqs == 7


def test_a_default_of_running_requests_yields_to_the_token_budget() -> None:
    """As `vllm serve --max-num-batched-tokens 512` runs 512 requests at most on an H100, not 1,024."""
    resolved = with_defaults(EngineSettings(max_num_batched_tokens=512), H100)
    assert (resolved.max_num_seqs, resolved.max_num_batched_tokens) == (512, 512)


def test_more_running_requests_than_tokens_in_a_step_are_refused() -> None:
    with pytest.raises(InputError, match="max_num_seqs is 64, more than max_num_batched_tokens, which is 63"):
        with_defaults(EngineSettings(max_num_seqs=64, max_num_batched_tokens=63), H100)
    assert with_defaults(EngineSettings(max_num_seqs=64, max_num_batched_tokens=64), H100).max_num_seqs == 64
    # Other schedulers have no such rule.
    for other in (EngineSettings(scheduler="sarathi"), EngineSettings(name="sglang")):
        given = msgspec.structs.replace(other, max_num_seqs=64, max_num_batched_tokens=32)
        assert with_defaults(given, H100).max_num_seqs == 64


def test_what_is_calibrated_replaces_defaults_and_not_what_is_given() -> None:
    learnt = EngineSettings(gpu_memory_utilization=0.7, max_num_seqs=64)
    for name in ("vllm", "sglang", "trtllm"):
        found = with_defaults(EngineSettings(name=name, max_num_seqs=8), H100, learnt)
        assert (found.name, found.gpu_memory_utilization, found.max_num_seqs) == (name, 0.7, 8)


@pytest.mark.parametrize(
    ("engine", "version", "device", "each_bytes"),
    [
        ("vllm", "0.24.0", "h200_sxm", 512 + 4 * 4 + 2 * 64),
        ("vllm", "0.18.0", "b200_sxm", 512 + 4 * 4 + 2 * 64),
        ("vllm", "0.24.0", "b200_sxm", 512 + 64),
        ("vllm", "0.24.0", "rtx_pro_6000_server", 512 + 4 * 4 + 2 * 64),
        ("vllm", "0.24.0", "mi300x", 512 + 64),
        ("sglang", "0.5.9", "b200_sxm", 512 + 4 * 4 + 2 * 64),
        ("sglang", "0.5.14", "b200_sxm", 512 + 64),
        ("sglang", "0.5.14", "h200_sxm", 512 + 4 * 4 + 2 * 64),
        ("trtllm", "1.2.0", "h200_sxm", 512 + 64),
    ],
)
def test_an_fp8_cache_of_sparse_latent_attention_may_have_scales(
    engine: str, version: str, device: str, each_bytes: int
) -> None:
    """FlashMLA's layout is 656 bytes; the indexer keeps 128 values and a scale beside it, in each of 61 layers."""
    raw = {"model": "deepseek-v3.2", "device": device, "kv_cache_dtype": "fp8", "concurrency": 1}
    setup = resolve(scenario(**raw, engine=engine, engine_version=version, tp=8, input_tokens=1, output_tokens=1))
    assert kv_bytes_per_token(shard_of(setup), 4096) == 61 * (each_bytes + 128 + 4)
    dense = replace(shard_of(setup), model=catalog.model("deepseek-v3"))
    assert kv_bytes_per_token(dense, 4096) == 61 * (512 + 64)


def test_the_catalogs_settings_are_merged_once_and_never_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    device, calls = catalog.device("h100_sxm"), []
    first = with_defaults(EngineSettings(name="vllm"), device)
    changed = with_defaults(EngineSettings(name="vllm", max_num_seqs=7), device)
    merged = defaults.overlay
    monkeypatch.setattr(defaults, "overlay", lambda into, layer: (calls.append(layer), merged(into, layer)))
    assert with_defaults(EngineSettings(name="vllm"), device) == first != changed
    assert len(calls) == 2  # what a calibration says, and what was given
    assert with_defaults(EngineSettings(name="vllm"), catalog.device("l40s")) != first


@pytest.mark.parametrize(
    ("version", "architecture", "kept"),
    [
        ("0.10.0", "llama4", "shared_pool"),
        ("0.11.1", "llama4", "full"),  # pull request 21761
        ("0.11.1", "gpt_oss", "shared_pool"),
        ("0.24.0", "llama4", "shared_pool"),
    ],
)
def test_vllm_kept_all_of_attention_in_chunks_for_a_while(version: str, architecture: str, kept: str) -> None:
    given = EngineSettings(version=version)
    assert for_architecture(given, with_defaults(given, H100), architecture).window_kv == kept
