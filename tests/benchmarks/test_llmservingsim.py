"""LLMServingSim's layer profiles price steps; its vLLM runs on the same machines are met by profile and trace alone."""

import csv
import gzip
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from readers.llmservingsim import layer_steps, read_layer_profile
from serving.pool_of_one import run_pool
from windtunnel.errors import InputError
from windtunnel.model.operators import BF16_BYTES
from windtunnel.serving.prepared import with_model_len
from windtunnel.serving.scenario import Scenario, resolve, scenario_from
from windtunnel.serving.setup.estimators import shard_of
from windtunnel.serving.setup.frontend import streams
from windtunnel.serving.setup.kernel_settings import kernel_settings
from windtunnel.serving.setup.memory import plan_memory
from windtunnel.serving.setup.prefix_cache import prefix_cache
from windtunnel.workload.generate.requests import generate

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
    unhidden_s = 2 * host.unhidden_request_s
    assert cost.unhidden_step_s == host.unhidden_step_s
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
    # Two ranks with half of the experts each: tokens of both choose half as many of a rank's, and cross the link.
    raw["deployment"] |= {"parallelism": {"attention_dp": 2, "ep": 2}}
    setup = resolve(scenario_from(raw))
    profile, exchange_s = read_layer_profile(tmp_path, "G", "M", 1), np.arange(2 * (64 + 64) + 1) * 1e-6
    both = layer_steps(profile, shard_of(setup), setup.engine, 4096, exchange_s=exchange_s)
    assert both.group_token_s[64] == pytest.approx(cost.mixed_token_s[64] / 2 + 48 * 64e-6)
    assert both.mixed_token_s[64] == 0
    beside_s = both.decode_token_s[32] - cost.decode_token_s[32] + cost.mixed_token_s[32]
    assert beside_s == pytest.approx(both.group_token_s[64])


TARGETS = {"tpot": 0.05, "e2e": 0.05, "ttft": 0.15}
"""What the errors of the means must stay within, on every run."""

MEANS = {"tpot": "tpot_mean_ms", "e2e": "lat_mean_ms", "ttft": "ttft_mean_ms"}

EXPERTS_RUN = {
    "gpu": "RTXPRO6000",
    "model": "Qwen3-30B-A3B-Instruct-2507",
    "vllm_version": "0.19.0",
    "tp": "1",
    "dp": "2",
    "max_num_seqs": "128",
    "max_num_batched_tokens": "2048",
    "num_gpu_blocks": "",
    "tpot_mean_ms": "47.3",
    "lat_mean_ms": "32344.6",
    "ttft_mean_ms": "1086.0",
}
"""Of this run the means are known and the state of every second, not the requests. Its requests are those of Qwen3-32B,
whose tokenizer it has. Source: LLMServingSim's repository, bench/examples/RTXPRO6000/Qwen3-30B-A3B-Instruct-2507,
`validation/summary.txt` at 030c1bc and `vllm/meta.json`: two ranks of attention data parallelism that share experts."""

CASES = ("RTX4090/Llama-3.1-8B", "RTXPRO6000/Llama-3.1-8B", "RTXPRO6000/Qwen3-32B", "RTXPRO6000/Qwen3-30B-A3B")

MODELS = {
    "Llama-3.1-8B": ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B", "llama-3.1-8b"),
    "Qwen3-32B": ("Qwen/Qwen3-32B", "Qwen/Qwen3-32B", "qwen3-32b"),
    "Qwen3-30B-A3B-Instruct-2507": ("Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-32b"),
}
"""Model of a run -> in the catalog, in the profile, in the trace's name."""

LINK_BYTES_PER_S, LINK_LATENCY_S = 16e9, 20e-6
"""Between the two cards of the last two cases: `link_bw` and `link_latency` of that machine in LLMServingSim's
bench/examples/configs/Qwen3-32B.json (9692a58) and Qwen3-30B-A3B-Instruct-2507.json (32efe53); the layer profile holds
no collectives."""

LOGIT_BYTES = 4
"""The router's logits are gathered with the hidden states."""


def ring_s(num_ranks: int, sent_bytes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Seconds in which each of the ranks passes on so many bytes to the next, `num_ranks` - 1 times."""
    return np.asarray((num_ranks - 1) * (LINK_LATENCY_S + sent_bytes / LINK_BYTES_PER_S))


def run_of(folder: Path, case: str) -> dict[str, str]:
    if case not in CASES[:3]:
        return EXPERTS_RUN
    with (folder / "llmservingsim_vllm.csv").open(encoding="utf-8", newline="") as file:
        (row,) = (one for one in csv.DictReader(file) if one["case"] == case)
    return row


def scenario_of(row: dict[str, str], traces: Path, tmp_path: Path) -> Scenario:
    hub, _, trace = MODELS[row["model"]]
    with gzip.open(traces / f"llmservingsim_sharegpt_{trace}_300_sps10.csv.gz", "rt", newline="") as file:
        lines = [
            f"{int(one['arrival_ns']) * 1e-9},{one['input_toks']},{one['output_toks']}" for one in csv.DictReader(file)
        ]
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(["arrival_s,input_tokens,output_tokens", *lines]) + "\n", encoding="utf-8")
    engine = {"name": "vllm", "version": row["vllm_version"], "max_num_seqs": int(row["max_num_seqs"])}
    engine["max_num_batched_tokens"] = int(row["max_num_batched_tokens"])
    if row["num_gpu_blocks"]:
        engine["num_gpu_blocks"] = int(float(row["num_gpu_blocks"]))
    ranks = int(row["dp"])
    deployment = {
        "device": {"RTX4090": "rtx_4090", "RTXPRO6000": "rtx_pro_6000_server"}[row["gpu"]],
        "engine": engine,
        "parallelism": {"tp": int(row["tp"]), "attention_dp": ranks, "ep": ranks},
        "calibration": "none",
    }
    return scenario_from({"model": hub, "deployment": deployment, "workload": {"trace": {"path": str(path)}}})


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_recorded_runs_are_met_from_profile_and_trace(reference: Path, case: str, tmp_path: Path) -> None:
    row = run_of(reference / "serving", case)
    made = scenario_of(row, reference / "traces", tmp_path)
    requests = generate(made.workload, made.seed)
    setup = with_model_len(resolve(made), requests)
    shard = shard_of(setup)
    tp, ranks = shard.parallelism.tp, shard.parallelism.attention_dp
    most = setup.engine.max_num_batched_tokens + setup.engine.max_num_seqs  # type: ignore[operator]
    token_bytes = shard.model.hidden_size * BF16_BYTES
    all_reduce_s = 2 * ring_s(tp, np.arange(most + 1.0) * token_bytes / tp) if tp > 1 else None
    exchange_s = None
    if ranks > 1:
        share = np.arange(ranks * most + 1.0) / ranks
        exchange_s = ring_s(ranks, share * (token_bytes + 128 * LOGIT_BYTES)) + ring_s(ranks, share * token_bytes)
    profile = read_layer_profile(
        reference / "serving" / "llmservingsim_profiles", row["gpu"], MODELS[row["model"]][1], tp
    )
    cost = layer_steps(profile, shard, setup.engine, setup.max_model_len, all_reduce_s, exchange_s)
    memory = plan_memory(shard, setup.device, setup.engine, setup.max_model_len)
    settings = kernel_settings(setup, memory, 1, requests)
    # Prefix caching is on, as it was: preempted requests find what is left of their blocks.
    records, _ = run_pool(settings, cost, requests, cache=prefix_cache(settings, requests))
    seen_s = setup.frontend.ttft_s(requests.input_tokens, streams(records, records["rank"], 1))
    decode_s = records["finish_s"] - records["first_token_s"]
    ttft_s = records["first_token_s"] - records["arrival_s"] + seen_s
    found_s = {
        "tpot": (decode_s / np.maximum(records["output_tokens"] - 1, 1)).mean(),
        "e2e": (ttft_s + decode_s).mean(),
        "ttft": ttft_s.mean(),
    }
    for metric, column in MEANS.items():
        assert found_s[metric] == pytest.approx(float(row[column]) * 1e-3, rel=TARGETS[metric]), metric


def test_the_means_of_the_run_with_experts_are_those_of_its_recorded_seconds(reference: Path) -> None:
    """Requests that run or wait, summed over the seconds of the run, are the time that all spend there (Little)."""
    with gzip.open(reference / "serving/per_request/llmservingsim_vllm_timeseries.csv.gz", "rt", newline="") as file:
        rows = [one for one in csv.DictReader(file) if one["case"] == f"RTXPRO6000/{EXPERTS_RUN['model']}"]
    present_s = sum(int(one["running"]) + int(one["waiting"]) for one in rows)
    assert present_s / 300 == pytest.approx(float(EXPERTS_RUN["lat_mean_ms"]) * 1e-3, rel=0.01)
