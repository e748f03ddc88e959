"""Servers that prefill and servers that decode, read as the pools of one deployment."""

from pathlib import Path

import pytest

from windtunnel.errors import InputError
from windtunnel.formats.launch.read import read_launch_command
from windtunnel.serving.scenario import scenario_from

WORKLOAD = {"arrivals": {"type": "poisson", "rate_per_s": 1}, "input_tokens": 64, "output_tokens": 8, "num_requests": 4}

SGLANG = """#!/bin/bash
sglang serve --model-path llama-3.1-70b --tp 4 --disaggregation-mode prefill --chunked-prefill-size 8192 &
sglang serve --model-path llama-3.1-70b --tp 8 --disaggregation-mode=decode --max-running-requests 128 &
python -m sglang_router.launch_router --pd-disaggregation --prefill http://a:30000 --decode http://a:30001
"""
DYNAMO = """apiVersion: nvidia.com/v1alpha1
kind: DynamoGraphDeployment
metadata: {name: chat}
spec:
  services:
    VllmDecodeWorker:
      replicas: 2
      extraPodSpec:
        mainContainer:
          image: nvcr.io/nvidia/ai-dynamo/vllm-runtime:0.7.0
          command: [python3, -m, dynamo.vllm]
          args: [--model, qwen3-8b, --max-num-seqs, "128"]
    VllmPrefillWorker:
      replicas: 1
      extraPodSpec:
        mainContainer:
          image: nvcr.io/nvidia/ai-dynamo/vllm-runtime:0.7.0
          command: [python3, -m, dynamo.vllm]
          args: [--model, qwen3-8b, --is-prefill-worker]
"""
LLM_D = """modelArtifacts: {uri: "hf://Qwen/Qwen3-8B"}
decode:
  replicas: 2
  parallelism: {tensor: 2}
  containers:
    - {name: vllm, image: "ghcr.io/llm-d/llm-d-cuda", modelCommand: vllmServe, args: [--max-num-seqs=64]}
prefill:
  replicas: 3
  containers:
    - {name: vllm, image: "ghcr.io/llm-d/llm-d-cuda", modelCommand: vllmServe}
"""
ROLE = """--kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_%s"}'"""
VLLM = f"vllm serve qwen3-8b {ROLE % 'producer'} & vllm serve qwen3-8b {ROLE % 'consumer'}"


@pytest.mark.parametrize(
    ("text", "engine", "pools"),
    [
        (
            SGLANG,
            "sglang",
            [
                {"name": "prefill", "role": "prefill", "parallelism": {"tp": 4}}
                | {"engine": {"max_num_batched_tokens": 8192, "enable_chunked_prefill": True}},
                {"name": "decode", "role": "decode", "parallelism": {"tp": 8}, "engine": {"max_num_seqs": 128}},
            ],
        ),
        (
            DYNAMO,
            "vllm",
            [
                {"name": "decode", "role": "decode", "parallelism": {"tp": 1}, "replicas": 2}
                | {"engine": {"max_num_seqs": 128}},
                {"name": "prefill", "role": "prefill", "parallelism": {"tp": 1}},
            ],
        ),
        (
            LLM_D,
            "vllm",
            [
                {"name": "decode", "role": "decode", "parallelism": {"tp": 2}, "replicas": 2}
                | {"engine": {"max_num_seqs": 64}},
                {"name": "prefill", "role": "prefill", "parallelism": {"tp": 1}, "replicas": 3},
            ],
        ),
        (
            VLLM,
            "vllm",
            [
                {"name": "prefill", "role": "prefill", "parallelism": {"tp": 1}},
                {"name": "decode", "role": "decode", "parallelism": {"tp": 1}},
            ],
        ),
    ],
    ids=["sglang", "dynamo", "llm-d", "vllm"],
)
def test_both_sides_are_pools(text: str, engine: str, pools: list[dict[str, object]], tmp_path: Path) -> None:
    file = tmp_path / ("served.sh" if text.startswith("#!") else "served.yaml")
    file.write_text(text)
    reading = read_launch_command(text if text is VLLM else str(file))
    assert reading.raw["deployment"]["pools"] == pools
    assert reading.raw["deployment"]["engine"]["name"] == engine
    assert not [line for line in reading.remarks if "disaggregation" in line or "kv-transfer" in line]
    raw = reading.raw | {"workload": WORKLOAD}
    raw["deployment"]["device"] = "h100_sxm"
    assert [pool.role for pool in scenario_from(raw).deployment.groups] == [pool["role"] for pool in pools]


def test_sides_of_several_servers_have_names_of_their_own() -> None:
    prefill = "sglang serve --model-path qwen3-8b --disaggregation-mode prefill"
    decode = prefill.replace("prefill", "decode")
    names = [
        pool["name"] for pool in read_launch_command(" & ".join((prefill, prefill, decode))).raw["deployment"]["pools"]
    ]
    assert names == ["prefill", "prefill-2", "decode"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("vllm serve qwen3-8b & vllm serve qwen3-8b", "starts 2 servers"),
        (VLLM.replace("kv_consumer", "kv_producer"), "starts 2 servers"),
        (VLLM.replace("qwen3-8b", "qwen3-4b", 1), "have one model, and these have qwen3-4b and qwen3-8b"),
        (VLLM.replace("qwen3-8b", "qwen3-8b --kv-cache-dtype fp8", 1), "have one precision"),
        (
            "vllm serve qwen3-8b --is-prefill-worker & sglang serve --model-path qwen3-8b --disaggregation-mode decode",
            "have one engine, and these have vllm and sglang",
        ),
    ],
)
def test_what_is_no_deployment_of_two_sides_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_launch_command(text)
