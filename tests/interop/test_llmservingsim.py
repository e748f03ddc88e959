"""LLMServingSim's layer profiles price steps; its vLLM runs on the same machines are met by profile and trace alone."""

import csv
import gzip
from pathlib import Path

import numpy as np
import pytest

from windtunnel.engine.estimators import shard_of
from windtunnel.engine.frontend import streams
from windtunnel.engine.kernel_settings import kernel_settings
from windtunnel.engine.loop import run_loop
from windtunnel.engine.prefix_cache import prefix_cache
from windtunnel.engine.server import with_model_len
from windtunnel.engine.workload import generate
from windtunnel.errors import InputError
from windtunnel.interop.llmservingsim import layer_steps, read_layer_profile
from windtunnel.ops.memory import plan_memory
from windtunnel.ops.op import BF16_BYTES
from windtunnel.spec.scenario import resolve, scenario_from

DENSE = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "layernorm")


def write(path: Path, lines: list[str]) -> None:
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")


def write_profile(folder: Path, time_us: str = "10") -> None:
    write(
        folder / "v1_dense.csv.gz",
        ["gpu,model,dtype,tp,layer,tokens,time_us"]
        + [f"G,M,bf16,1,{layer},{tokens},{time_us}" for layer in DENSE for tokens in (1, 64)],
    )
    write(
        folder / "v1_per_sequence.csv.gz",
        ["gpu,model,dtype,tp,layer,sequences,time_us", "G,M,bf16,1,lm_head,1,100", "G,M,bf16,1,lm_head,64,163"],
    )
    write(
        folder / "v1_attention.csv.gz",
        ["gpu,model,dtype,tp,prefill_chunk,kv_prefill,n_decode,kv_decode,time_us"]
        + [f"G,M,bf16,1,0,0,{n},{keys},{n * keys / 100}" for n in (1, 64) for keys in (100, 200)]
        + [f"G,M,bf16,1,{chunk},{before},0,0,{chunk + before}" for chunk in (16, 64) for before in (0, 128)]
        + [f"G,M,bf16,1,{chunk},0,{n},100,{chunk + 2 * n}" for chunk in (16, 64) for n in (1, 64)],
    )


def test_a_profile_becomes_the_cost_of_steps(tmp_path: Path) -> None:
    write_profile(tmp_path)
    raw = {
        "model": "llama-3.1-8b",
        "deployment": {
            "device": "h100_sxm",
            "engine": {"name": "vllm", "max_num_seqs": 64, "max_num_batched_tokens": 64},
        },
        "workload": {"arrivals": {"type": "burst"}, "input_tokens": 8, "output_tokens": 8, "num_requests": 1},
    }
    setup = resolve(scenario_from(raw))
    cost = layer_steps(read_layer_profile(tmp_path, "G", "M", 1), shard_of(setup), setup.engine, 4096)
    host = setup.engine.host
    assert host.unhidden_step_s is not None
    assert host.unhidden_request_s is not None
    # 32 layers of four products and two norms, 10 us each; the head of one sequence takes 100 us, of two 101.
    assert cost.mixed_token_s[5] == pytest.approx(32 * 6 * 10e-6)
    unhidden_s = host.unhidden_step_s + 2 * host.unhidden_request_s
    assert cost.decode_token_s[2] == pytest.approx(32 * 60e-6 + 101e-6 + unhidden_s)
    assert cost.decode_attention_s[0].tolist() == [0.0, 0.0]
    assert cost.decode_attention_s[2] == pytest.approx([32 * 2e-6, 32 * 4e-6])
    # Beside a prompt each request adds 2 us, whatever the keys.
    assert cost.mixed_decode_attention_s[2] == pytest.approx([32 * 4e-6, 32 * 4e-6])
    # A chunk of 64 tokens after 96 has the effective length 256.
    at = cost.length_nodes.tolist().index(256.0)
    assert cost.prefill_attention_s[1, at] == pytest.approx(32 * (64 + 96) * 1e-6)


@pytest.mark.parametrize("model", ["M", "other"])
def test_what_cannot_be_read_is_refused(tmp_path: Path, model: str) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_layer_profile(tmp_path, "G", model, 1)
    write_profile(tmp_path, time_us="fast")
    message = "time_us is 'fast'" if model == "M" else "has no qkv_proj of other on G with tp = 1"
    with pytest.raises(InputError, match=message):
        read_layer_profile(tmp_path, "G", model, 1)


def test_experts_are_priced_by_how_many_a_step_chooses(tmp_path: Path) -> None:
    """Qwen3-30B-A3B: 8 of 128 experts a token, 48 layers; to choose n experts takes n us here, whatever the tokens."""
    write_profile(tmp_path)
    lines = [f"G,M,bf16,1,{layer},{tokens},0" for layer in ("qkv_proj", "o_proj", "layernorm") for tokens in (1, 64)]
    write(tmp_path / "v1_dense.csv.gz", ["gpu,model,dtype,tp,layer,tokens,time_us", *lines])
    moe = [f"G,M,bf16,1,{tokens},{chosen},{chosen}" for tokens in (1, 64) for chosen in (8, 64, 128)]
    write(tmp_path / "v1_moe.csv.gz", ["gpu,model,dtype,tp,tokens,activated_experts,time_us", *moe])
    raw = {
        "model": "Qwen/Qwen3-30B-A3B",
        "deployment": {
            "device": "h200_sxm",
            "engine": {"name": "vllm", "max_num_seqs": 64, "max_num_batched_tokens": 64},
        },
        "workload": {"arrivals": {"type": "burst"}, "input_tokens": 8, "output_tokens": 8, "num_requests": 1},
    }
    setup = resolve(scenario_from(raw))
    cost = layer_steps(read_layer_profile(tmp_path, "G", "M", 1), shard_of(setup), setup.engine, 4096)
    assert cost.mixed_token_s[1] == pytest.approx(48 * 8e-6)
    assert cost.mixed_token_s[64] == pytest.approx(48 * 128e-6 * (1 - (15 / 16) ** 64))


TARGETS = {"tpot": 0.05, "e2e": 0.05, "ttft": 0.15}
"""What the errors of the means must stay within, on every run."""

CASES = ("RTX4090/Llama-3.1-8B", "RTXPRO6000/Llama-3.1-8B", "RTXPRO6000/Qwen3-32B")

LINK_BYTES_PER_S, LINK_LATENCY_S = 16e9, 20e-6
"""Between the two cards of the last case: `link_bw` and `link_latency` of that machine in LLMServingSim's
bench/examples/configs/Qwen3-32B.json (9692a58); the layer profile holds no all-reduce."""


@pytest.mark.parametrize("case", CASES)
def test_recorded_runs_are_met_from_profile_and_trace(reference: Path, case: str, tmp_path: Path) -> None:
    folder = reference / "serving"
    with (folder / "llmservingsim_vllm.csv").open(encoding="utf-8", newline="") as file:
        (row,) = (one for one in csv.DictReader(file) if one["case"] == case)
    name = row["model"].lower()
    trace = reference / "traces" / f"llmservingsim_sharegpt_{name}_300_sps10.csv.gz"
    with gzip.open(trace, "rt", encoding="utf-8", newline="") as file:
        lines = [
            f"{int(one['arrival_ns']) * 1e-9},{one['input_toks']},{one['output_toks']}" for one in csv.DictReader(file)
        ]
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(["arrival_s,input_tokens,output_tokens", *lines]) + "\n", encoding="utf-8")
    tp = int(row["tp"])
    engine = {"name": "vllm", "version": row["vllm_version"], "max_num_seqs": int(row["max_num_seqs"])}
    engine["max_num_batched_tokens"] = int(row["max_num_batched_tokens"])
    if row["num_gpu_blocks"]:
        engine["num_gpu_blocks"] = int(float(row["num_gpu_blocks"]))
    device = {"RTX4090": "rtx_4090", "RTXPRO6000": "rtx_pro_6000_server"}[row["gpu"]]
    hub = {"llama-3.1-8b": "meta-llama/Llama-3.1-8B", "qwen3-32b": "Qwen/Qwen3-32B"}[name]
    deployment = {"device": device, "engine": engine, "parallelism": {"tp": tp}, "calibration": "none"}
    made = scenario_from({"model": hub, "deployment": deployment, "workload": {"trace": {"path": str(path)}}})
    requests = generate(made.workload, made.seed)
    setup = with_model_len(resolve(made), requests)
    shard = shard_of(setup)
    all_reduce_s = None
    if tp > 1:
        most = setup.engine.max_num_batched_tokens + setup.engine.max_num_seqs  # type: ignore[operator]
        sent_bytes = np.arange(most + 1.0) * shard.model.hidden_size * BF16_BYTES / tp
        all_reduce_s = 2 * (tp - 1) * (LINK_LATENCY_S + sent_bytes / LINK_BYTES_PER_S)  # a ring's steps
    profile = read_layer_profile(folder / "llmservingsim_profiles", row["gpu"], hub, tp)
    cost = layer_steps(profile, shard, setup.engine, setup.max_model_len, all_reduce_s)
    memory = plan_memory(shard, setup.device, setup.engine, setup.max_model_len)
    settings = kernel_settings(setup, memory, 1, requests)
    # Prefix caching is on, as it was: preempted requests find what is left of their blocks.
    records, _, _ = run_loop(settings, cost, requests, cache=prefix_cache(settings, requests))
    seen_s = setup.engine.host.frontend_s(requests.input_tokens, streams(records, records["rank"], 1))
    decode_s = records["finish_s"] - records["first_token_s"]
    ttft_s = records["first_token_s"] - records["arrival_s"] + seen_s
    found_s = {
        "tpot": (decode_s / np.maximum(records["output_tokens"] - 1, 1)).mean(),
        "e2e": (ttft_s + decode_s).mean(),
        "ttft": ttft_s.mean(),
    }
    for metric, column in {"tpot": "tpot_mean_ms", "e2e": "lat_mean_ms", "ttft": "ttft_mean_ms"}.items():
        assert found_s[metric] == pytest.approx(float(row[column]) * 1e-3, rel=TARGETS[metric]), metric
