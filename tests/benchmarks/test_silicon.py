"""Rows of measured serving runs as scenarios: what each column means, and what is refused or malformed."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from readers.silicon.rows import at_load, image_version
from readers.silicon.runs import MeasuredRun, measurement_of, read_measurements, read_runs, scenario_of
from windtunnel.errors import InputError
from windtunnel.model.parallelism import Parallelism
from windtunnel.model.precision import Format, Precision
from windtunnel.serving.deployment import Speculative
from windtunnel.serving.scenario import resolve
from windtunnel.workload.arrivals import ClosedLoop
from windtunnel.workload.lengths import Uniform

MEASURED = {
    "id": "row",
    "backend": "trtllm",
    "backend_version": "",
    "model_path": "deepseek-ai/DeepSeek-R1",
    "system": "b200_sxm",
    "precision": "fp4",
    "isl": "1024",
    "osl": "8192",
    "gemm_quant_mode": "nvfp4",
    "tp_size": "64",
    "pp_size": "1",
    "moe_tp_size": "1",
    "moe_ep_size": "8",
    "silicon_ttft_ms": "250.0",
    "silicon_tpot_ms": "20.0",
    "use": "secondary",
}
RECOVERED = {
    "id": "row",
    "source": "ix0406",
    "settings_id": "S1",
    "true_mode": "agg",
    "speculative": "none",
    "true_tp": "8.0",
    "true_ep": "8.0",
    "dp_attention": "True",
    "concurrency": "256.0",
    "num_prompts": "2560.0",
    "warmup": "2*CONC identical requests (prompt 0)",
    "max_num_seqs": "not set (default 2048)",
    "max_batched_tokens": "1344",
    "cuda_graph_max_bs": "512",
    "scheduler": "no batch wait",
    "flags": "",
}
SERVER = {
    "settings_id": "S1",
    "hf_model": "nvidia/DeepSeek-R1-0528-FP4-V2",
    "engine_image": "nvcr.io/nvidia/tensorrt-llm/release:1.1.0rc2.post2",
    "max_prefill_tokens": "",
    "gpu_mem_util_or_mem_fraction_static_or_kv_free_fraction": "0.8",
    "kv_cache_dtype": "fp8",
    "prefix_caching": "off (enable_block_reuse false)",
    "async_or_overlap_scheduling": "on (default)",
    "block_size": "",
    "client_random_range_ratio": "0.8",
    "client_request_rate": "inf",
    "moe_backend": "TRTLLM",
    "cuda_graph": "padding on",
    "attention_dp_config": "",
    "gemm_and_allreduce_fusion": "",
    "speculative": "none",
    "prefill_pool": "",
    "decode_pool": "",
}


def write(path: Path, *rows: dict[str, str]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def run_of(folder: Path, **changes: str) -> MeasuredRun:
    """The one row of a folder of three files, with other values in whichever file has the column."""
    write(folder / "dev.csv", {key: changes.get(key, value) for key, value in MEASURED.items()})
    write(folder / "row_settings.csv", {key: changes.get(key, value) for key, value in RECOVERED.items()})
    server = {key: changes.get(key, value) for key, value in SERVER.items()}
    write(folder / "engine_settings.csv", server | {"settings_id": "S1"})
    (run,) = read_runs(folder / "dev.csv")
    return run


def test_recovered_settings_replace_the_recorded_ones(tmp_path: Path) -> None:
    scenario = scenario_of(run_of(tmp_path))
    engine = scenario.deployment.engine
    assert scenario.deployment.parallelism == Parallelism(tp=1, ep=8, attention_dp=8)
    assert (engine.name, engine.version, engine.max_num_seqs) == ("trtllm", "1.1.0rc2.post2", None)
    assert (engine.max_num_batched_tokens, engine.max_cudagraph_capture_size) == (1344, 512)
    assert engine.gpu_memory_utilization == 0.8
    assert scenario.precision == Precision(
        weights=Format.NVFP4, attention=Format.BF16, attention_output=Format.NVFP4, kv_cache=Format.FP8
    )


def test_the_client_is_a_closed_loop_over_a_range_of_lengths(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    workload = scenario_of(run).workload
    assert workload.arrivals == ClosedLoop(concurrency=256, num_warmup_requests=512)
    assert workload.input_tokens == Uniform(min_tokens=819, max_tokens=1024)
    assert workload.num_requests == 2560
    assert run.mean_output_tokens == pytest.approx(0.9 * 8192)
    assert run.e2e_s == pytest.approx(0.25 + 0.02 * (0.9 * 8192 - 1))


def test_without_attention_dp_the_devices_shard_attention(tmp_path: Path) -> None:
    run = run_of(tmp_path, dp_attention="False", true_ep="1")
    assert run.parallelism == Parallelism(tp=8)


def test_a_row_without_recovered_settings_takes_its_own_columns_and_engine_defaults(tmp_path: Path) -> None:
    run = run_of(tmp_path, settings_id="", true_tp="", tp_size="2", moe_tp_size="1", moe_ep_size="4", num_prompts="",
                 warmup="", concurrency="5", backend_version="1.0.0rc3")  # fmt: skip
    assert run.parallelism == Parallelism(tp=2, ep=4, attention_dp=2)
    workload = scenario_of(run).workload
    assert workload.input_tokens == Uniform(min_tokens=922, max_tokens=1126)
    assert workload.output_tokens == Uniform(min_tokens=7373, max_tokens=9011)
    assert workload.num_requests == 50
    assert scenario_of(replace(run, system="h100_sxm")).workload.num_requests == 100
    assert run.mean_output_tokens == 8192
    assert run.engine.version == "1.0.0rc3"
    assert run.engine.max_num_batched_tokens is None


def test_sglang_settings_are_read_from_their_words(tmp_path: Path) -> None:
    run = run_of(tmp_path, backend="sglang", scheduler="scheduler-recv-interval 30", max_prefill_tokens="default 16384",
                 kv_cache_dtype="auto (bf16)", max_num_seqs="128")  # fmt: skip
    assert run.engine.receive_interval_steps == 30
    assert run.engine.max_prefill_tokens == 16384
    assert run.engine.max_num_seqs == 128
    assert scenario_of(run).precision == Precision(
        weights=Format.NVFP4, attention=Format.BF16, attention_output=Format.NVFP4, kv_cache=Format.BF16
    )


@pytest.mark.parametrize(
    ("recorded", "backend"),
    [
        ("CUTLASS", "cutlass"),
        ("flashinfer_trtllm", "trtllm"),
        ("Marlin (VLLM_MXFP4_USE_MARLIN=1)", "marlin"),
        ("FlashInfer FP8 MoE off, DeepGEMM MoE off (Triton)", "triton"),
        ("FlashInfer INT4 (VLLM_USE_FLASHINFER_MOE_INT4=1)", "flashinfer"),
        ("default", None),
        ("", None),
    ],
)
def test_the_backend_of_the_experts_is_read_from_its_words(tmp_path: Path, recorded: str, backend: str | None) -> None:
    assert run_of(tmp_path, moe_backend=recorded).engine.moe_backend == backend


def test_a_cache_of_prefixes_that_no_prompts_share_is_not_noted(tmp_path: Path) -> None:
    assert run_of(tmp_path, prefix_caching="ON (engine default)").unmodelled == ()


def test_the_batch_wait_and_the_overlap_are_read_from_their_words(tmp_path: Path) -> None:
    words = "batch_wait_timeout_iters 40, batch_wait_max_tokens_ratio 0.8"
    engine = run_of(tmp_path, scheduler=words, async_or_overlap_scheduling="off").engine
    assert (engine.batch_wait_timeout_iters, engine.batch_wait_max_tokens_ratio) == (40, 0.8)
    assert engine.async_scheduling is False
    without = run_of(tmp_path, scheduler="no batch wait", async_or_overlap_scheduling="engine default")
    assert without.engine.batch_wait_timeout_iters is None
    assert without.engine.async_scheduling is None


def test_a_format_made_on_loading_is_the_recorded_one(tmp_path: Path) -> None:
    run = run_of(tmp_path, hf_model="meta-llama/Llama-3.1-8B-Instruct", precision="fp8", gemm_quant_mode="fp8_block")
    precision = scenario_of(run).precision
    assert precision is not None
    assert precision.weights == Format.FP8_BLOCK


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"speculative": "mtp"}, "decodes speculatively"),
        ({"concurrency": ""}, "concurrency was not recorded"),
        ({"hf_model": "zai-org/GLM-99"}, "no model 'zai-org/GLM-99'"),
        ({"precision": "fp8"}, "run in fp8, and nvidia/DeepSeek-R1-0528-NVFP4-v2 is a checkpoint in fp4"),
        ({"hf_model": "", "model_path": "Qwen/Qwen3-8B"}, "run in fp4.*is a checkpoint in bf16"),
    ],
)
def test_a_row_that_leaves_open_what_was_run_is_refused(tmp_path: Path, changes: dict[str, str], reason: str) -> None:
    run = run_of(tmp_path, **changes)
    with pytest.raises(InputError, match=reason):
        scenario_of(run)


@pytest.mark.parametrize(
    ("words", "fused"),
    [
        ("FlashInfer all-reduce fusion on (threshold MB tp2:32 tp4:32 tp8:8), attn fusion on", True),
        ("fuse_allreduce_rms, eliminate_noops", True),
        ("FlashInfer GEMM; DeepGEMM JIT off; all-reduce fusion off", False),
        ("symmetric memory on", None),
    ],
)
def test_whether_all_reduces_are_fused_is_read_from_its_words(tmp_path: Path, words: str, fused: bool | None) -> None:
    assert run_of(tmp_path, gemm_and_allreduce_fusion=words).engine.fused_all_reduce is fused


def test_tf32_is_read_from_the_recorded_environment(tmp_path: Path) -> None:
    assert run_of(tmp_path, gemm_and_allreduce_fusion="VLLM_FLOAT32_MATMUL_PRECISION=high").engine.tf32
    assert run_of(tmp_path, gemm_and_allreduce_fusion="fuse_allreduce_rms").engine.tf32 is None


def test_a_speculative_run_is_a_scenario_once_an_acceptance_is_given(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    assert run.num_draft_tokens is None
    for words, drafts in (("EAGLE(MTP) steps 2, topk 1, draft tokens 3", 2), ("MTP num_nextn_predict_layers=1", 1)):
        run = replace(run_of(tmp_path, speculative=words), speculative="mtp")
        speculative = scenario_of(run, acceptance_fraction=0.8).deployment.engine.speculative
        assert speculative == Speculative(method="mtp", num_draft_tokens=drafts, acceptance_fraction=0.8)
        with pytest.raises(InputError, match="decodes speculatively"):
            scenario_of(run)


def test_a_speculative_run_waits_for_an_acceptance(tmp_path: Path) -> None:
    run = replace(run_of(tmp_path, speculative="MTP num_nextn_predict_layers=1"), speculative="mtp")
    measurement = measurement_of(run)
    assert measurement.lacks_acceptance
    told = measurement.accepting(0.7)
    assert not told.lacks_acceptance
    assert told.scenario == scenario_of(run, acceptance_fraction=0.7)


@pytest.mark.parametrize(
    ("words", "piecewise", "full"),
    [
        ("FULL_AND_PIECEWISE", True, True),
        ("PIECEWISE", True, False),
        ("FULL_DECODE_ONLY, splitting_ops=[]", False, True),
        ("engine default (FULL_AND_PIECEWISE)", True, True),
        ("engine default", None, None),
        ("padding on; piecewise on", True, None),
        ("c4-8: padding on; piecewise off; c64-256: padding on; piecewise on", True, None),
        ("c4-256: padding on; piecewise off; c512: padding on; piecewise on", False, None),
    ],
)
def test_which_steps_run_in_graphs_is_read_from_its_words(
    tmp_path: Path, words: str, piecewise: bool | None, full: bool | None
) -> None:
    engine = run_of(tmp_path, cuda_graph=words).engine
    assert (engine.piecewise_cudagraphs, engine.full_cudagraphs) == (piecewise, full)


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        ("batching_wait_iters 0, enable_balance true, timeout_iters 60", (60, 0)),
        ("enable_balance true", (50, 10)),
        ("", (None, None)),
    ],
)
def test_the_balance_of_ranks_is_read_from_its_words(
    tmp_path: Path, words: str, steps: tuple[int | None, int | None]
) -> None:
    engine = run_of(tmp_path, attention_dp_config=words).engine
    assert (engine.attention_dp_timeout_iters, engine.attention_dp_batching_wait_iters) == steps


def test_runs_of_a_known_generator_take_its_settings_and_its_client(tmp_path: Path) -> None:
    run = run_of(tmp_path, source="autogap", system="h100_sxm", settings_id="", true_tp="", tp_size="4",
                 moe_ep_size="4", num_prompts="", warmup="", concurrency="16", backend_version="1.0.0rc3")  # fmt: skip
    engine = run.engine
    assert (engine.max_num_seqs, engine.max_num_batched_tokens) == (16, 2040)  # 16 + 1,024 + 1,000
    assert (engine.gpu_memory_utilization, engine.enable_prefix_caching) == (0.8, False)
    workload = scenario_of(run).workload
    assert (workload.input_tokens, workload.output_tokens, workload.num_requests) == (1024, 8192, 320)
    assert workload.arrivals == ClosedLoop(concurrency=16, num_warmup_requests=32)


def test_an_unknown_system_is_refused_when_the_scenario_is_resolved(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no device 'b900_sxm'"):
        resolve(scenario_of(run_of(tmp_path, system="b900_sxm")))


def test_rows_of_separate_pools_are_left_out(tmp_path: Path) -> None:
    run_of(tmp_path)
    write(tmp_path / "row_settings.csv", RECOVERED | {"true_mode": "disagg", "true_tp": "4 and 8"})
    assert read_runs(tmp_path / "dev.csv") == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"silicon_tpot_ms": "fast"}, "dev.csv line 2: silicon_tpot_ms is 'fast'; a number above zero is needed"),
        ({"silicon_ttft_ms": "nan"}, "dev.csv line 2: silicon_ttft_ms is 'nan'"),
        ({"isl": "-5"}, "dev.csv line 2: isl is '-5'"),
        ({"backend": "lmdeploy"}, "dev.csv line 2: backend is 'lmdeploy'; known: vllm, sglang, trtllm"),
        ({"true_tp": "2.5"}, "row_settings.csv line 2: true_tp is '2.5'; a whole number is needed"),
        ({"true_ep": "3"}, "row_settings.csv line 2: ep = 3 does not divide"),
        ({"dp_attention": "maybe"}, "row_settings.csv line 2: dp_attention is 'maybe'"),
        ({"max_num_seqs": "many"}, "row_settings.csv line 2: max_num_seqs is 'many'"),
        ({"kv_cache_dtype": "fp3"}, "engine_settings.csv line 2: kv_cache_dtype is 'fp3'"),
        ({"true_tp": "", "moe_tp_size": "3"}, "dev.csv line 2: moe_tp_size x moe_ep_size = 24 is no multiple of"),
    ],
)
def test_a_malformed_value_is_named_by_file_line_and_column(
    tmp_path: Path, changes: dict[str, str], message: str
) -> None:
    with pytest.raises(InputError) as caught:
        run_of(tmp_path, **changes)
    assert caught.value.message.startswith(message)


def test_a_row_that_cannot_be_read_is_refused_alone(tmp_path: Path) -> None:
    run_of(tmp_path)
    rows = [MEASURED, MEASURED | {"id": "odd", "backend": "lmdeploy"}, MEASURED | {"id": "pools"}]
    rows.append(MEASURED | {"id": "unknown"})
    write(tmp_path / "dev.csv", *rows)
    write(tmp_path / "row_settings.csv", RECOVERED, RECOVERED | {"id": "odd"},
          RECOVERED | {"id": "pools", "true_mode": "disagg", "true_tp": ""})  # fmt: skip
    one, odd, pools, unknown = read_measurements(tmp_path / "dev.csv")
    assert one.scenario is not None
    assert odd.scenario is pools.scenario is unknown.scenario is None
    assert odd.refused == "dev.csv line 3: backend is 'lmdeploy'; known: vllm, sglang, trtllm"
    assert pools.refused == "how many servers prefill and how was not recorded"
    assert unknown.refused == "dev.csv line 5: row_settings.csv has no row of id 'unknown'"
    assert odd.labels == {"engine": "lmdeploy", "version": "", "device": "b200_sxm", "model": "DeepSeek-R1"}
    assert (odd.id, odd.use) == ("odd", "secondary")


@pytest.mark.parametrize(
    ("text", "concurrency", "part"),
    [
        ("c4-8: 0.85; c16-64: padding on; piecewise on", 4, "0.85"),
        ("c4-8: 0.85; c16-64: padding on; piecewise on", 64, "padding on; piecewise on"),
        ("c4-8: 0.85; c16-64: padding on; piecewise on", 12, ""),
        ("c4: 4; c128: 128", 128, "128"),
        ("padding on; piecewise on", 4, "padding on; piecewise on"),
    ],
)
def test_what_goes_by_the_load_is_read_for_the_runs_own(text: str, concurrency: int, part: str) -> None:
    assert at_load(text, concurrency) == part


def test_settings_by_load_are_those_of_the_row(tmp_path: Path) -> None:
    words = {"gpu_mem_util_or_mem_fraction_static_or_kv_free_fraction": "c4-128: 0.7; c256: 0.8",
             "moe_backend": "c4-8: CUTLASS; c16-256: TRTLLM"}  # fmt: skip
    engine = run_of(tmp_path, **words).engine
    assert (engine.gpu_memory_utilization, engine.moe_backend) == (0.8, "trtllm")
    engine = run_of(tmp_path, **words, concurrency="8").engine
    assert (engine.gpu_memory_utilization, engine.moe_backend) == (0.7, "cutlass")


@pytest.mark.parametrize("words", ["not set (default 0.9)", "engine default", "auto", ""])
def test_an_engines_own_share_of_memory_is_left_to_it(tmp_path: Path, words: str) -> None:
    column = "gpu_mem_util_or_mem_fraction_static_or_kv_free_fraction"
    assert run_of(tmp_path, **{column: words}).engine.gpu_memory_utilization is None
    assert run_of(tmp_path, **{column: "0.85 (default)"}).engine.gpu_memory_utilization == 0.85


@pytest.mark.parametrize(
    ("words", "kept"),
    [("fp8_e5m2", "fp8"), ("FP8", "fp8"), ("auto (fp8)", "fp8"), ("bfloat16", "bf16"), ("auto", None), ("", None)],
)
def test_formats_of_the_cache_go_by_their_bits(tmp_path: Path, words: str, kept: str | None) -> None:
    assert run_of(tmp_path, kv_cache_dtype=words).kv_cache == kept


@pytest.mark.parametrize(("words", "limit"), [("off", 0), ("0", 0), ("64", 64), ("engine default", None), ("", None)])
def test_graphs_that_are_off_are_not_the_engines_default(tmp_path: Path, words: str, limit: int | None) -> None:
    assert run_of(tmp_path, cuda_graph_max_bs=words).engine.max_cudagraph_capture_size == limit


@pytest.mark.parametrize(("words", "rate"), [("300.0", 300.0), ("inf", None), ("", None)])
def test_a_client_may_release_its_requests_at_a_rate(tmp_path: Path, words: str, rate: float | None) -> None:
    run = run_of(tmp_path, client_request_rate=words)
    assert scenario_of(run).workload.arrivals == ClosedLoop(concurrency=256, num_warmup_requests=512, rate_per_s=rate)


@pytest.mark.parametrize(("words", "shortest"), [("0", 1), ("0.5", 512), ("1", 1024), ("", 922)])
def test_a_range_of_lengths_may_start_anywhere(tmp_path: Path, words: str, shortest: int) -> None:
    lengths = scenario_of(run_of(tmp_path, client_random_range_ratio=words)).workload.input_tokens
    assert (lengths if isinstance(lengths, int) else lengths.min_tokens) == shortest  # type: ignore[union-attr]


def test_a_range_beyond_the_longest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="from 0 to 1 is needed"):
        run_of(tmp_path, client_random_range_ratio="1.2")


def test_an_image_without_a_release_leaves_the_version_to_the_measurement(tmp_path: Path) -> None:
    image = "lmsysorg/sglang:glm5-hopper"
    assert run_of(tmp_path, engine_image=image, backend_version="0.5.9").engine.version == "0.5.9"
    assert run_of(tmp_path, engine_image=image, backend_version="nightly-5b8c30d").engine.version is None


def test_unknown_words_of_a_scheduler_are_noted(tmp_path: Path) -> None:
    run = run_of(tmp_path, scheduler="schedule-conservativeness 0.3; scheduler-recv-interval 20; dllm 4")
    assert (run.engine.schedule_conservativeness, run.engine.receive_interval_steps) == (0.3, 20)
    assert run.unmodelled == ("dllm 4",)
    words = "no batch wait; batch_wait_max_tokens_ratio 0.9, batch_wait_timeout_iters 20; default"
    assert run_of(tmp_path, scheduler=words).unmodelled == ()


@pytest.mark.parametrize(
    ("model", "checkpoint"),
    [
        ("Qwen/Qwen3.5-397B-A17B", "nvidia/Qwen3.5-397B-A17B-NVFP4"),
        ("meta-llama/Llama-3.1-405B", "nvidia/Llama-3.1-405B-Instruct-FP4"),
        ("Qwen/Qwen3-235B-A22B", "nvidia/Qwen3-235B-A22B-NVFP4"),
    ],
)
def test_the_one_published_checkpoint_of_a_format_is_the_one_that_ran(
    tmp_path: Path, model: str, checkpoint: str
) -> None:
    assert scenario_of(run_of(tmp_path, hf_model="", model_path=model)).model == checkpoint


def test_only_what_makes_a_run_odd_explains_its_error(tmp_path: Path) -> None:
    flags = "ep_column_wrong cold_start_no_warmup"
    assert measurement_of(run_of(tmp_path, flags=flags)).labels["odd"] == "cold_start_no_warmup"
    assert measurement_of(run_of(tmp_path, flags="ep_column_wrong wip")).labels["odd"] == ""


def test_broken_joins_and_files_are_named(tmp_path: Path) -> None:
    run_of(tmp_path)
    write(tmp_path / "engine_settings.csv", SERVER | {"settings_id": "S2"})
    with pytest.raises(InputError, match=r"engine_settings\.csv has no row of settings_id 'S1'"):
        read_runs(tmp_path / "dev.csv")
    write(tmp_path / "row_settings.csv", RECOVERED | {"id": "other"})
    with pytest.raises(InputError, match=r"row_settings\.csv has no row of id 'row'"):
        read_runs(tmp_path / "dev.csv")
    (tmp_path / "row_settings.csv").write_text("id,source\nrow\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"row_settings\.csv line 2 has 1 value for 2 columns"):
        read_runs(tmp_path / "dev.csv")
    (tmp_path / "row_settings.csv").unlink()
    with pytest.raises(InputError, match="there is no file"):
        read_runs(tmp_path / "dev.csv")


@pytest.mark.parametrize(
    ("image", "version"),
    [
        ("vllm/vllm-openai:v0.19.0-cu130", "0.19.0"),
        ("vllm/vllm-openai:v0.11.2 (v0.11.0 if run before 2025-12-05T21:49Z)", "0.11.2"),
        ("lmsysorg/sglang:v0.5.3rc1-cu129-b200", "0.5.3rc1"),
        ("lmsysorg/sglang:v0.5.10.post1-cu130", "0.5.10.post1"),
        ("nvcr.io/nvidia/tensorrt-llm/release:1.2.0rc6.post2", "1.2.0rc6.post2"),
        ("lmsysorg/sglang:nightly-dev-20260402-d7256eb6", None),
        ("vllm/vllm-openai:nightly-5b8c30d62b754b575e043ce2fc0dcbf8a64f6306", None),
    ],
)
def test_the_release_is_read_from_the_image(image: str, version: str | None) -> None:
    assert image_version(image) == version


@pytest.mark.full
def test_nearly_every_scored_row_of_the_public_table_is_a_scenario(reference: Path) -> None:
    """All but speculative runs and a handful that do not say what they were; those that are refused say why."""
    scored = [run for run in read_runs(reference / "silicon" / "dev.csv") if run.use in ("primary", "secondary")]
    refused = []
    for run in scored:
        try:
            scenario_of(run)
        except InputError as error:
            refused.append(error.message)
    speculative = sum(run.speculative == "mtp" for run in scored)
    assert sum("speculatively" in reason for reason in refused) == speculative
    assert len(refused) - speculative < 0.02 * len(scored)
    assert len(refused) < 0.1 * len(scored)
