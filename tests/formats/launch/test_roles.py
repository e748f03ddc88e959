"""Servers that prefill and servers that decode, read as the pools of one deployment."""

from pathlib import Path

import pytest
import yaml

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


def test_equal_servers_of_a_side_are_replicas_and_others_have_names_of_their_own() -> None:
    prefill = "sglang serve --model-path qwen3-8b --disaggregation-mode prefill"
    decode = prefill.replace("prefill", "decode")
    pools = read_launch_command(" & ".join((prefill, prefill, decode, f"{decode} --tp 2"))).raw["deployment"]["pools"]
    assert [(pool["name"], pool.get("replicas", 1)) for pool in pools] == [
        *(("prefill", 2), ("decode", 1), ("decode-2", 1))
    ]


PROXIED = """CUDA_VISIBLE_DEVICES=0 vllm serve qwen3-8b --port 8100 &
CUDA_VISIBLE_DEVICES=1 vllm serve qwen3-8b --port 8200 --max-num-seqs 64 &
"""


@pytest.mark.parametrize(("prefill", "decode"), [(8100, 8200), (8200, 8100)])
@pytest.mark.parametrize(
    "proxy",
    [
        "proxy.py --port 8192 --prefiller-hosts a --prefiller-ports {} --decoder-hosts b --decoder-ports {}",
        "vllm-router --prefill http://127.0.0.1:{} --decode http://127.0.0.1:{} --port 8192",
        "python3 proxy.py --prefill localhost:{} --decode=localhost:{}",
    ],
)
def test_the_ports_that_a_proxy_names_say_the_roles(proxy: str, prefill: int, decode: int) -> None:
    pools = read_launch_command(PROXIED + proxy.format(prefill, decode)).raw["deployment"]["pools"]
    roles = {pool["role"]: pool.get("engine") for pool in pools}
    assert roles[("prefill", "decode")[decode == 8200]] == {"max_num_seqs": 64}
    assert set(roles) == {"prefill", "decode"}


def test_a_server_without_a_port_listens_where_its_engine_does() -> None:
    servers = "sglang serve --model-path qwen3-8b --port 30001 & sglang serve --model-path qwen3-8b --tp 2 & "
    proxy = "python -m sglang_router.launch_router --prefill http://a:30001 --decode http://b:30000"
    prefill, decode = read_launch_command(servers + proxy).raw["deployment"]["pools"]
    assert (prefill["role"], decode["role"], decode["parallelism"]) == ("prefill", "decode", {"tp": 2})


def test_ports_that_no_proxy_names_say_nothing() -> None:
    with pytest.raises(InputError, match="starts 2 servers"):
        read_launch_command(PROXIED + "python proxy.py --prefill localhost:9100 --decode localhost:9200")


TRTLLM = """hostname: localhost
port: 8000
model: qwen3-8b
context_servers:
  num_instances: 2
  max_num_tokens: 4096
  urls: [localhost:8001, localhost:8002]
generation_servers:
  num_instances: 1
  tensor_parallel_size: 2
  max_batch_size: 64
  urls: [localhost:8003]
"""


def test_the_file_of_tensorrt_llm_s_proxy_describes_its_servers(tmp_path: Path) -> None:
    file = tmp_path / "both.yaml"
    file.write_text(TRTLLM)
    command = f"trtllm-serve disaggregated -c {file}"
    reading = read_launch_command(command)
    assert reading.raw["model"] == "qwen3-8b"
    assert reading.raw["deployment"]["pools"] == [
        {"name": "prefill", "role": "prefill", "parallelism": {"tp": 1}, "replicas": 2}
        | {"engine": {"max_num_batched_tokens": 4096}},
        {"name": "decode", "role": "decode", "parallelism": {"tp": 2}, "engine": {"max_num_seqs": 64}},
    ]
    assert reading.remarks == []
    file.write_text(TRTLLM.replace("num_instances: 2", "num_instances: two"))
    with pytest.raises(InputError, match=r"context_servers\.num_instances is 'two'; a number above zero is needed"):
        read_launch_command(command)
    file.write_text(TRTLLM.partition("generation_servers")[0])
    with pytest.raises(InputError, match=r"has no file \(-c\) that describes generation_servers"):
        read_launch_command(command)


def test_servers_behind_tensorrt_llm_s_proxy_have_its_roles() -> None:
    servers = "".join(
        f"trtllm-serve qwen3-8b --port 800{n} --config {'ctx' if n < 3 else 'gen'}.yml &\n" for n in (1, 2, 3)
    )
    files = 'echo -e "max_num_tokens: 2048\\nmax_batch_size: 8" > ctx.yml\necho "max_batch_size: 32" > gen.yml\n'
    script = f"{files}{servers}cat > both.yaml <<EOF\n{TRTLLM}EOF\ntrtllm-serve disaggregated -c both.yaml\n"
    assert read_launch_command(script).raw["deployment"]["pools"] == [
        {"name": "prefill", "role": "prefill", "parallelism": {"tp": 1}, "replicas": 2}
        | {"engine": {"max_num_seqs": 8, "max_num_batched_tokens": 2048}},
        {"name": "decode", "role": "decode", "parallelism": {"tp": 1}, "engine": {"max_num_seqs": 32}},
    ]


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


COMPONENT = """
    - name: {name}
      replicas: {replicas}
      podTemplate:
        spec:
          containers:
            - {{name: main, image: "{image}", command: [python3, -m, dynamo.sglang], args: [--config, /c/{file}.yaml]}}
"""


@pytest.mark.parametrize(
    ("names", "mode"), [(("PrefillWorker", "DecodeWorker"), ""), (("a", "b"), "disaggregation-mode: ")]
)
def test_components_of_dynamo_have_roles_by_name_or_by_their_files(names: tuple[str, str], mode: str) -> None:
    image = "nvcr.io/nvidia/ai-dynamo/sglang-runtime:1.2.0"
    files = {f"{role}.yaml": f"model-path: llama-3.1-8b\n{mode and mode + role}\n" for role in ("prefill", "decode")}
    workers = [
        COMPONENT.format(name=name, replicas=replicas, image=image, file=file)
        for name, replicas, file in zip(names, (3, 2), ("prefill", "decode"), strict=True)
    ]
    text = yaml.safe_dump({"kind": "ConfigMap", "metadata": {"name": "files"}, "data": files})
    text += "---\nmetadata: {name: prefill-and-decode}\nspec:\n  components:" + "".join(workers)
    pools = read_launch_command(text).raw["deployment"]["pools"]
    assert [(pool["role"], pool["replicas"]) for pool in pools] == [("prefill", 3), ("decode", 2)]


def test_the_kv_cache_in_host_memory_of_a_pool_is_announced() -> None:
    offloads = '{"kv_connector": "MultiConnector", "connectors": ["OffloadingConnector"], "kv_role": "kv_%s"}'
    text = "\n".join(
        f"vllm serve qwen3-8b --kv-transfer-config '{offloads % role}'" for role in ("producer", "consumer")
    )
    assert read_launch_command(text).not_modelled == ["--kv-transfer-config (KV cache in host memory)"]
