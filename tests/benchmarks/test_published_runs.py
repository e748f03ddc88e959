"""Published runs as scenarios, and how far some of them are predicted."""

import re
from pathlib import Path

import numpy as np
import pytest

from published_runs import Scored, inside_held_out, measured_of, rows_of, scenario_of, scored, spreads_of
from windtunnel.model.precision import Format
from windtunnel.serving.scenario import resolve
from windtunnel.workload.generate.requests import generate

DEVICES, CLIENTS = rows_of("other_devices"), rows_of("other_clients")


@pytest.mark.full
def test_every_row_is_a_scenario_with_something_measured(tmp_path: Path) -> None:
    for row in DEVICES:
        assert resolve(scenario_of(row, tmp_path)).parallelism.num_devices in (1, 4, 8)
    for row in [*DEVICES, *CLIENTS]:
        assert min(measured_of(row).values()) > 0


@pytest.mark.full
@pytest.mark.usefixtures("reference")
def test_rows_of_nvidia_are_scenarios_on_as_many_devices(tmp_path: Path) -> None:
    for row in CLIENTS:
        assert resolve(scenario_of(row, tmp_path)).parallelism.num_devices == int(row["num_devices"])


def test_a_row_has_the_settings_of_its_source(tmp_path: Path) -> None:
    row = next(row for row in DEVICES if row["set"] == "inferencex" and row["weights"] == "fp4" and row["version"])
    setup = resolve(scenario_of(row, tmp_path))
    assert (setup.device.name, setup.engine.name, setup.engine.version) == ("mi355x", "sglang", "0.5.9")
    assert (setup.precision.weights, setup.precision.attention) == (Format.MXFP4A4, Format.BF16)
    assert setup.precision.kv_cache is Format.FP8
    assert setup.engine.gpu_memory_utilization == 0.8


def test_engines_of_early_2025_have_their_defaults(tmp_path: Path) -> None:
    """vLLM's V0 runs prompts whole and first; TensorRT-LLM's PyTorch backend had no graphs and no overlap."""
    rows = {row["engine"]: row for row in CLIENTS if row["set"] == "dstack_online"}
    vllm, trtllm = (resolve(scenario_of(rows[name], tmp_path)).engine for name in ("vllm", "tensorrt-llm"))
    assert (vllm.scheduler, vllm.max_num_batched_tokens) == ("vllm_v0", 163840)
    assert (trtllm.backend, trtllm.max_cudagraph_capture_size, trtllm.async_scheduling) == ("pytorch", 0, False)


def test_a_chip_counts_once_however_many_cores_it_has(tmp_path: Path) -> None:
    row = next(row for row in DEVICES if row["set"] == "tpu_recipes" and row["model"] == "Qwen/Qwen3-32B")
    assert resolve(scenario_of(row, tmp_path)).parallelism.num_devices == 1


def test_requests_have_the_lengths_that_the_client_of_sglang_drew(tmp_path: Path) -> None:
    rows = [row for row in CLIENTS if row["set"] == "sgl_cookbook" and "mean lengths" in row["note"]]
    assert len(rows) > 30
    for row in rows:
        scenario = scenario_of(row, tmp_path)
        requests = generate(scenario.workload, scenario.seed)
        said = [float(number) for number in re.findall(r"mean lengths ([\d.]+) and ([\d.]+)", row["note"])[0]]
        means = [requests.input_tokens.mean(), requests.output_tokens.mean()]
        assert means[0] == pytest.approx(said[0], abs=1.001)
        assert means[1] == pytest.approx(said[1], rel=0.02)  # counted again by the client


def test_trtllm_bench_leaves_room_for_decoding_beside_a_prompt(tmp_path: Path) -> None:
    """Llama 3.3 70B in FP8 on two H100: 95% of the 101 GB beside the weights hold 64 requests of 160 KiB a token."""
    rows = [row for row in CLIENTS if row["set"] == "trtllm_overview" and row["device"] == "H100"]
    row = next(row for row in rows if "Llama-3.3" in row["model"] and row["input_tokens"] == "8192")
    engine = resolve(scenario_of(row, tmp_path)).engine
    assert (engine.max_num_seqs, engine.max_num_batched_tokens) == (64, 8192 + 64)
    gpt_oss = next(row for row in rows if "gpt-oss-20b" in row["model"] and row["input_tokens"] == "1024")
    engine = resolve(scenario_of(gpt_oss, tmp_path)).engine
    assert (engine.max_num_seqs, engine.max_num_batched_tokens) == (2048, 8192)


@pytest.mark.parametrize(
    ("model", "device", "backend"),
    [("Qwen3-30B", "GB200", "cutlass"), ("gpt-oss-20b", "B200", "cutlass"), ("gpt-oss-20b", "H200", "triton")],
)
def test_experts_of_nvidias_page_have_the_backend_of_its_commands(
    model: str, device: str, backend: str, tmp_path: Path
) -> None:
    rows = (row for row in CLIENTS if row["set"] == "trtllm_overview" and row["device"] == device)
    row = next(row for row in rows if model in row["model"])
    assert resolve(scenario_of(row, tmp_path)).engine.moe_backend == backend


def test_stages_of_a_pipeline_are_taken_from_the_devices(tmp_path: Path) -> None:
    row = next(row for row in CLIENTS if "pipeline parallelism 2" in row["note"] and row["num_devices"] == "4")
    parallelism = resolve(scenario_of(row, tmp_path)).parallelism
    assert (parallelism.tp, parallelism.pp, parallelism.attention_dp, parallelism.ep) == (1, 2, 2, 2)


def test_requests_come_from_the_client_that_was_used(tmp_path: Path) -> None:
    """GPUStack's asks for chats; prompts of conversations are text, others what the client makes them of."""
    wanted = {
        "vultr": ("vllm", True),
        "gpustack": ("vllm-chat", True),
        "sgl_cookbook": ("sglang", False),
        "nim": ("aiperf", False),
        "trtllm_overview": ("trtllm-bench", True),
    }
    for name, (client, is_random) in wanted.items():
        setup = resolve(scenario_of(next(row for row in CLIENTS if row["set"] == name), tmp_path))
        assert (setup.client_name, setup.random_tokens) == (client, is_random)
        assert bool(setup.client.asks_for_chats) == (client in ("vllm-chat", "aiperf"))


def test_the_spread_of_published_runs_leaves_the_source_out_that_it_judges() -> None:
    def run(source: str, ratio: float) -> Scored:
        row = {"set": source, **dict.fromkeys(("device", "engine", "version", "model", "tp"), "")}
        measured = dict.fromkeys(("tpot", "ttft", "throughput"), ratio)
        return Scored({**row, "model": str(ratio)}, measured, dict.fromkeys(measured, 1.0), {}, 1.0)

    fast = [run("fast_page", ratio) for ratio in np.linspace(0.5, 0.8, 40)]
    slow = [run("slow_page", ratio) for ratio in np.linspace(3.0, 4.0, 40)]
    both = spreads_of([*fast, *slow])["ttft"]
    assert (both.p10 < 0.6, both.p90 > 3.5) == (True, True)
    assert spreads_of(fast)["ttft"].p90 < 1.0
    _, _, *lines = inside_held_out([*fast, *slow]).splitlines()
    assert [line.split("|")[1:3] for line in lines] == [
        [" all ", " 0% of 80 "],
        [" fast ", " 0% of 40 "],
        [" slow ", " 0% of 40 "],
    ]


@pytest.mark.compiled
def test_dense_models_on_mi300x_are_predicted() -> None:
    """Every fourth row of Llama 3.1 with vLLM 0.10.0; nothing is fitted to them."""
    rows = [row for row in DEVICES if row["set"] == "rocm_latency" and row["version"] == "0.10.0"][::4]
    done = [row for row in scored(rows) if isinstance(row, Scored)]
    errors = np.array([abs(row.error("batch")) for row in done])
    assert len(done) == 8
    assert np.median(errors) < 0.1
    assert all(row.is_inside("batch") for row in done)


@pytest.mark.full
@pytest.mark.compiled
def test_the_throughput_of_tensorrt_llm_is_predicted() -> None:
    """NVIDIA's own rows of Llama 3.3 70B; nothing is fitted to them."""
    rows = [row for row in CLIENTS if row["set"] == "trtllm_overview" and "Llama-3.3" in row["model"]]
    rows = [row for row in rows if row["input_tokens"] == "8192"]
    done = [row for row in scored(rows) if isinstance(row, Scored)]
    errors = np.array([abs(row.error("throughput")) for row in done])
    assert len(done) == 6
    assert np.median(errors) < 0.08
