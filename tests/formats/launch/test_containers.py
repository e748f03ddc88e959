"""Servers in containers: `docker run`, Kubernetes manifests, Helm values and compose files as people keep them."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from windtunnel.errors import InputError
from windtunnel.formats.launch.containers import commands_of
from windtunnel.formats.launch.read import read_launch_command

DEPLOYMENT = """
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: weights}
spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 200Gi}}}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: chat-70b, labels: {app: chat-70b}}
spec:
  replicas: 3
  selector: {matchLabels: {app: chat-70b}}
  template:
    metadata: {labels: {app: chat-70b}}
    spec:
      initContainers:
        - {name: fetch, image: "vllm/vllm-openai:v0.11.0", command: [huggingface-cli, download, x/y]}
      containers:
        - name: metrics
          image: prom/statsd-exporter:v0.26.1
          args: [--statsd.listen-udp=:9125]
        - name: server
          image: vllm/vllm-openai:v0.11.0
          command: [/bin/sh, -c]
          args:
            - |
              set -e
              export LENGTH=8192   # longest chat
              vllm serve meta-llama/Llama-3.1-70B-Instruct \\
                --tensor-parallel-size 4 --max-model-len $LENGTH \\
                --max-num-seqs $(SEQS) --port 8000
          env:
            - {name: SEQS, value: "128"}
            - {name: HF_TOKEN, valueFrom: {secretKeyRef: {name: hf, key: token}}}
            - {name: VLLM_USE_DEEP_GEMM, value: "1"}
          resources: {limits: {nvidia.com/gpu: "8"}, requests: {cpu: 16}}
---
apiVersion: v1
kind: Service
metadata: {name: chat-70b}
spec: {selector: {app: chat-70b}, ports: [{port: 80, targetPort: 8000}]}
"""
STATEFUL_SET = """
apiVersion: apps/v1
kind: StatefulSet
metadata: {name: qwen}
spec:
  serviceName: qwen
  template:
    spec:
      containers:
        - image: docker.io/lmsysorg/sglang:v0.5.5-cu129
          command: [python3, -m, sglang.launch_server]
          args: [--model-path, Qwen/Qwen3-30B-A3B, --tp, 2, --ep-size, 2, --host, 0.0.0.0]
          resources: {limits: {nvidia.com/gpu: 2}}
"""
GROUP = """
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
metadata: {name: big}
spec:
  replicas: 2
  leaderWorkerTemplate:
    size: 2
    leaderTemplate:
      spec:
        containers:
          - name: leader
            image: vllm/vllm-openai:latest
            command: [sh, -c, "bash /vllm-workspace/ray.sh leader --ray_cluster_size=$(LWS_GROUP_SIZE);
              python3 -m vllm.entrypoints.openai.api_server --model meta-llama/Llama-3.1-405B
              --tensor-parallel-size 8 --pipeline_parallel_size 2"]
            resources: {limits: {nvidia.com/gpu: "8"}}
    workerTemplate:
      spec:
        containers:
          - name: worker
            image: vllm/vllm-openai:latest
            command: [sh, -c, "bash /vllm-workspace/ray.sh worker --ray_address=$(LWS_LEADER_ADDRESS)"]
            resources: {limits: {nvidia.com/gpu: "8"}}
"""
POD = """
{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "trt"}, "spec": {"containers": [{
  "image": "nvcr.io/nvidia/tensorrt-llm/release:1.1.0",
  "args": ["trtllm-serve", "meta-llama/Llama-3.1-8B", "--tp_size", "2", "--max_batch_size", "256"]}]}}
"""
STACK = """
servingEngineSpec:
  runtimeClassName: nvidia
  modelSpec:
    - name: llama3
      repository: vllm/vllm-openai
      tag: v0.11.0
      modelURL: meta-llama/Llama-3.1-8B-Instruct
      replicaCount: 4
      requestCPU: 8
      requestGPU: 2
      vllmConfig:
        enableChunkedPrefill: true
        enablePrefixCaching: false
        maxModelLen: 16384
        tensorParallelSize: 2
        extraArgs: [--disable-log-requests, --max-num-seqs, "64"]
routerSpec: {repository: lmcache/lmstack-router, tag: latest, replicaCount: 1}
"""
BESIDE = STACK.replace(
    "      vllmConfig:", "      lmcacheConfig: {enabled: true}\n      enableLoRA: true\n      vllmConfig:"
).replace("replicaCount: 1}", "replicaCount: 1, routingLogic: session}")
STACK_ENGINE = {
    "name": "vllm",
    "version": "0.11.0",
    "enable_chunked_prefill": True,
    "enable_prefix_caching": False,
    "max_model_len": 16384,
    "max_num_seqs": 64,
}
VALUES = """
replicaCount: 2
image: {repository: registry.example/mirror/vllm/vllm-openai, tag: v0.10.2}
args: [--model, meta-llama/Llama-3.1-8B, --max-num-batched-tokens, "4096"]
env: {VLLM_ATTENTION_BACKEND: FLASH_ATTN}
resources: {limits: {nvidia.com/gpu: 1}}
autoscaling: {enabled: false}
"""
COMPOSE = """
services:
  gateway:
    image: nginx:1.27
    ports: ["80:80"]
  chat:
    image: vllm/vllm-openai:${VLLM_TAG:-v0.11.0}
    command: >
      --model ${MODEL} --tensor-parallel-size 2
      --gpu-memory-utilization 0.92
    environment: [MODEL=meta-llama/Llama-3.1-8B, "HUGGING_FACE_HUB_TOKEN=${HF_TOKEN}"]
    deploy:
      replicas: 2
      resources: {reservations: {devices: [{driver: nvidia, device_ids: ["0", "1"], capabilities: [gpu]}]}}
"""

CASES: dict[str, tuple[str, str, dict[str, Any], list[str]]] = {
    "deployment": (
        DEPLOYMENT,
        "meta-llama/Llama-3.1-70B-Instruct",
        {
            "parallelism": {"tp": 4},
            "engine": {"name": "vllm", "version": "0.11.0", "max_num_seqs": 128, "max_model_len": 8192},
            "replicas": 3,
        },
        [
            "not modelled: VLLM_USE_DEEP_GEMM of the environment",
            "without effect on time: --port",
            "the container has 8 GPUs, and its command takes 4",
        ],
    ),
    "stateful set": (
        STATEFUL_SET,
        "Qwen/Qwen3-30B-A3B",
        {"parallelism": {"tp": 2, "ep": 2}, "engine": {"name": "sglang", "version": "0.5.5"}},
        ["without effect on time: --host"],
    ),
    "group of hosts": (
        GROUP,
        "meta-llama/Llama-3.1-405B",
        {"parallelism": {"tp": 8, "pp": 2}, "engine": {"name": "vllm"}, "replicas": 2},
        ["the image vllm/vllm-openai:latest names no version of vllm: --engine-version gives one"],
    ),
    "pod": (
        POD,
        "meta-llama/Llama-3.1-8B",
        {"parallelism": {"tp": 2}, "engine": {"name": "trtllm", "version": "1.1.0", "max_num_seqs": 256}},
        [],
    ),
    "production stack": (
        STACK,
        "meta-llama/Llama-3.1-8B-Instruct",
        {"parallelism": {"tp": 2}, "engine": STACK_ENGINE, "replicas": 4},
        ["without effect on time: --disable-log-requests"],
    ),
    "production stack with more": (
        BESIDE,
        "meta-llama/Llama-3.1-8B-Instruct",
        {"parallelism": {"tp": 2}, "engine": {**STACK_ENGINE, "lora": {}}, "replicas": 4},
        [
            "not modelled: --kv-transfer-config",
            "without effect on time: --disable-log-requests",
            "the router's logic session is not taken: --set deployment.router=... gives one",
        ],
    ),
    "values": (
        VALUES,
        "meta-llama/Llama-3.1-8B",
        {
            "parallelism": {"tp": 1},
            "engine": {
                "name": "vllm",
                "version": "0.10.2",
                "attention_backend": "flash_attention",
                "max_num_batched_tokens": 4096,
            },
            "replicas": 2,
        },
        [],
    ),
    "compose": (
        COMPOSE,
        "meta-llama/Llama-3.1-8B",
        {
            "parallelism": {"tp": 2},
            "engine": {"name": "vllm", "version": "0.11.0", "gpu_memory_utilization": 0.92},
            "replicas": 2,
        },
        [],
    ),
}


@pytest.mark.parametrize("is_file", [True, False], ids=["file", "text"])
@pytest.mark.parametrize("name", list(CASES))
def test_a_container_is_read(name: str, is_file: bool, tmp_path: Path) -> None:
    text, model, deployment, remarks = CASES[name]
    (tmp_path / "served.yaml").write_text(text)
    reading = read_launch_command(str(tmp_path / "served.yaml") if is_file else text)
    assert reading.raw == {"model": model, "deployment": deployment}
    assert reading.remarks == remarks


@pytest.mark.parametrize(
    ("text", "engine", "remarks"),
    [
        (
            (
                "docker run -d --rm --gpus '\"device=0,1\"' --ipc=host -p8000:8000 -e HF_TOKEN=x -eVLLM_USE_V1=1 "
                "-v ~/.cache:/root/.cache vllm/vllm-openai:v0.11.0 --model meta-llama/Llama-3.1-8B -tp 2 > log 2>&1"
            ),
            {"name": "vllm", "version": "0.11.0"},
            [],
        ),
        (
            "docker run --gpus all -e VLLM_USE_V1=0 vllm/vllm-openai:v0.10.0 --model meta-llama/Llama-3.1-8B",
            {"name": "vllm", "version": "0.10.0"},
            ["not modelled: VLLM_USE_V1 of the environment"],
        ),
        (
            "sudo podman run --gpus 1 --entrypoint vllm --name s vllm/vllm-openai:v0.11.0@sha256:ab serve llama-3.1-8b",
            {"name": "vllm", "version": "0.11.0"},
            [],
        ),
        (
            (
                "docker run --gpus all lmsysorg/sglang:v0.5.5.post1 python3 -m sglang.launch_server "
                "--model-path meta-llama/Llama-3.1-8B"
            ),
            {"name": "sglang", "version": "0.5.5.post1"},
            [],
        ),
        (
            "docker run nvcr.io/nvidia/tensorrt-llm/release:1.2.0rc3 bash -lc 'date && trtllm-serve llama-3.1-8b'",
            {"name": "trtllm", "version": "1.2.0rc3"},
            [],
        ),
        (
            "docker run --gpus all localhost:5000/vllm vllm serve meta-llama/Llama-3.1-8B",
            {"name": "vllm"},
            ["the image localhost:5000/vllm names no version of vllm: --engine-version gives one"],
        ),
        (
            "CUDA_VISIBLE_DEVICES=0,1,2,3 vllm serve llama-3.1-8b -tp 2 | tee log",
            {"name": "vllm"},
            ["the container has 4 GPUs, and its command takes 2"],
        ),
    ],
    ids=["docker", "old scheduler", "podman", "sglang", "shell", "registry", "variables"],
)
def test_docker_run_is_read(text: str, engine: dict[str, str], remarks: list[str]) -> None:
    reading = read_launch_command(text)
    assert reading.raw["deployment"]["engine"] == engine
    assert reading.remarks == remarks


def test_a_script_is_read_command_by_command(tmp_path: Path) -> None:
    script = tmp_path / "serve.sh"
    script.write_text(
        "#!/bin/bash\n# one server\nMODEL=meta-llama/Llama-3.1-8B\nnvidia-smi\n"
        'vllm serve "$MODEL"\n  --max-num-seqs 32\n  --hf-overrides \'{"a":\n 1}\'\necho done\n'
    )
    reading = read_launch_command(str(script))
    assert reading.raw["model"] == "meta-llama/Llama-3.1-8B"
    assert reading.raw["deployment"]["engine"]["max_num_seqs"] == 32
    assert [command.words[0] for command in commands_of(script.read_text())] == ["nvidia-smi", "vllm", "echo"]


TWO = DEPLOYMENT + "---\n" + DEPLOYMENT.replace("chat-70b", "chat-8b").replace("3.1-70B", "3.1-8B")


@pytest.mark.parametrize(
    ("command", "engine", "says"),
    [
        ("docker run --gpus all me/vllm-custom:tag --model Qwen/Qwen3-8B --tensor-parallel-size 8", "vllm", "name"),
        ("docker run me.io:5000/tensorrt-llm:x Qwen/Qwen3-8B --tp_size 8", "trtllm", "name"),
        ("docker run me/llm:7 --model-path Qwen/Qwen3-8B --tp 8", "sglang", "options"),
        (DEPLOYMENT.replace("vllm serve", "/start.sh --model").replace("vllm/vllm-openai", "me/x"), "vllm", "options"),
    ],
    ids=["vllm", "trtllm", "sglang", "manifest"],
)
def test_an_unknown_image_has_the_engine_that_its_name_or_its_options_say(
    command: str, engine: str, says: str, tmp_path: Path
) -> None:
    (tmp_path / "served.yaml").write_text(command)
    reading = read_launch_command(command if command.startswith("docker") else str(tmp_path / "served.yaml"))
    assert reading.engine["name"] == engine
    assert "version" not in reading.engine
    said = f" is not known: {engine} is assumed, by its {says}; --engine-version gives its version"
    assert any(line.startswith("the image me") and line.endswith(said) for line in reading.remarks)


TGI = "ghcr.io/huggingface/text-generation-inference:3.0 --model-id Qwen/Qwen3-8B --num-shard 2"


@pytest.mark.parametrize(
    "command", ["nginx:1", "me/x Qwen/Qwen3-8B", "me/vllm-proxy --port 80", "me/vllm tgi Qwen/Q", TGI]
)
def test_an_image_that_says_no_engine_is_refused_by_its_name(command: str) -> None:
    with pytest.raises(InputError, match=f"the image {command.partition(' ')[0]} starts no server that is known"):
        read_launch_command(f"docker run {command}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TWO, "starts 2 servers: chat-70b/server, chat-8b/server"),
        (
            STACK.replace(
                "routerSpec:",
                "    - {name: qwen, repository: vllm/vllm-openai, tag: v0.11.0, modelURL: Qwen/Qwen3-8B}\nrouterSpec:",
            ),
            "2 servers: llama3, qwen",
        ),
        ("vllm serve a & vllm serve b", "starts 2 servers"),
        (DEPLOYMENT.replace("vllm serve", "tgi serve"), "starts no server that is known"),
        ("kind: Deployment\nspec: {replicas: {a: b", "not valid YAML"),
        ("image: {{ .Values.image }}\nargs:\n{{- toYaml .Values.args }}", "not valid YAML"),
        (DEPLOYMENT.replace("replicas: 3", "replicas: many"), "replicas is 'many'; a whole number is needed"),
        ("image: vllm/vllm-openai:v0.11.0\nargs: [--port, 8000]", "the command names no model"),
        ("image: 3\nargs: {a: [1]}\nenv: 5\nresources: x\nspec: [1, {image: null}]", "starts no server that is known"),
    ],
    ids=["two", "two models", "two commands", "no engine", "cut off", "template", "no number", "no model", "shapes"],
)
def test_wrong_manifests_are_refused_in_a_sentence(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "served.yaml").write_text(text)
    with pytest.raises(InputError) as caught:
        read_launch_command(str(tmp_path / "served.yaml") if ":" in text else text)
    assert message in caught.value.message
    assert "\n" not in caught.value.message


SCRIPTS = {
    "variable of several options": """
ARGS="--tensor-parallel-size 2"
ARGS+=" --max-num-seqs 64"
vllm serve Qwen/Qwen3-8B $ARGS
""",
    "array": """
#!/bin/bash
args=(
  --model Qwen/Qwen3-8B   # the chat model
  --tensor-parallel-size 2
)
args+=(--max-num-seqs 64)
python -m vllm.entrypoints.openai.api_server "${args[@]}"
""",
    "file that the script writes": """
cat > /tmp/served.yaml <<EOF
model: Qwen/Qwen3-8B
tensor-parallel-size: ${TP:-2}
EOF
vllm serve --config /tmp/served.yaml --max-num-seqs 64
""",
    "unit of systemd": """
[Service]
ExecStart=/opt/vllm/bin/vllm serve Qwen/Qwen3-8B -tp 2 \\
  --max-num-seqs 64
Restart=always
""",
    "manifest in a script": """
cat <<EOF | kubectl apply -f -
apiVersion: v1
kind: Pod
metadata: {name: chat}
spec:
  containers:
    - {name: server, image: "vllm/vllm-openai", args: [--model, Qwen/Qwen3-8B, -tp, "2", --max-num-seqs, "64"]}
EOF
""",
    "Dynamo": """
kind: DynamoGraphDeployment
metadata: {name: chat}
spec:
  services:
    Frontend: {replicas: 1, extraPodSpec: {mainContainer: {image: "vllm-runtime:0.7.0"}}}
    Worker:
      extraPodSpec:
        mainContainer:
          image: vllm-runtime:0.7.0
          command: [/bin/sh, -c]
          args: ["python3 -m dynamo.vllm --model Qwen/Qwen3-8B -tp 2 --max-num-seqs 64"]
""",
    "InferenceService": """
kind: InferenceService
metadata: {name: chat}
spec:
  predictor:
    model:
      modelFormat: {name: huggingface}
      args: [--model_name=chat, --model_id=Qwen/Qwen3-8B, --tensor-parallel-size=2, --max-num-seqs=64]
""",
    "InferenceService with a URI": """
kind: InferenceService
metadata: {name: chat}
spec:
  predictor:
    model:
      modelFormat: {name: vLLM}
      storageUri: hf://Qwen/Qwen3-8B
      args: [--tensor-parallel-size=2, --max-num-seqs=64]
""",
    "LLMInferenceService": """
kind: LLMInferenceService
metadata: {name: chat}
spec:
  model: {uri: "hf://Qwen/Qwen3-8B", name: chat}
  parallelism: {tensor: 2}
  template:
    containers:
      - {name: main, image: "vllm/vllm-openai", env: [{name: VLLM_ADDITIONAL_ARGS, value: --max-num-seqs 64}]}
""",
    "VLLMRuntime": """
apiVersion: production-stack.vllm.ai/v1alpha1
kind: VLLMRuntime
metadata: {name: chat}
spec:
  model: {modelURL: Qwen/Qwen3-8B, enableTool: false, toolCallParser: "", maxNumSeqs: 64, hfTokenName: token}
  vllmConfig: {tensorParallelSize: 2, v1: true, port: 8000, env: [{name: HF_HOME, value: /data}]}
  deploymentConfig:
    resources: {cpu: "5", gpu: "2"}
    image: {registry: docker.io, name: "vllm/vllm-openai:v0.9.2"}
# containers: none
""",
    "llm-d": """
modelArtifacts: {uri: "hf://Qwen/Qwen3-8B"}
decode:
  parallelism: {tensor: 2}
  containers:
    - {name: vllm, image: "ghcr.io/llm-d/llm-d-cuda", modelCommand: vllmServe, args: [--max-num-seqs=64]}
prefill:
  create: false
  containers:
    - {name: vllm, image: "ghcr.io/llm-d/llm-d-cuda", modelCommand: vllmServe}
""",
}


@pytest.mark.parametrize("name", list(SCRIPTS))
def test_one_server_is_read_however_it_is_written(name: str, tmp_path: Path) -> None:
    file = tmp_path / ("served.yaml" if "containers:" in SCRIPTS[name] and "<<" not in SCRIPTS[name] else "served.sh")
    file.write_text(SCRIPTS[name])
    reading = read_launch_command(str(file))
    assert reading.raw["model"] == "Qwen/Qwen3-8B"
    assert reading.raw["deployment"]["parallelism"] == {"tp": 2}
    assert reading.raw["deployment"]["engine"]["max_num_seqs"] == 64
    assert not reading.unknown
    assert not reading.not_modelled


SIDES = """
kind: LLMInferenceService
metadata: {name: chat}
spec:
  model: {uri: "hf://Qwen/Qwen3-30B-A3B", name: chat}
  replicas: 2
  parallelism: {data: 16, dataLocal: 8, expert: true}
  template:
    containers:
      - {name: main, image: "vllm/vllm-openai:v0.19.0", resources: {limits: {nvidia.com/gpu: "8"}}}
      - {name: metrics, image: "prom/statsd-exporter"}
  worker: {containers: [{name: main, image: "vllm/vllm-openai:v0.19.0"}]}
  prefill:
    parallelism: {tensor: 2}
"""


def pools_of(tmp_path: Path, text: str) -> tuple[list[dict[str, Any]], list[str]]:
    (tmp_path / "served.yaml").write_text(text)
    reading = read_launch_command(str(tmp_path / "served.yaml"))
    return reading.raw["deployment"]["pools"], reading.remarks


def test_kserve_says_which_side_prefills_and_spreads_experts(tmp_path: Path) -> None:
    pools, remarks = pools_of(tmp_path, SIDES)
    decode = {"tp": 1, "attention_dp": 16, "ep": 16}
    assert pools == [
        {"name": "prefill", "role": "prefill", "parallelism": {"tp": 2}},
        {"name": "decode", "role": "decode", "parallelism": decode, "replicas": 2},
    ]
    assert remarks == []  # 16 GPUs: a group of two hosts
    own = "    template: {containers: [{name: main, image: 'vllm/vllm-openai:v0.19.0', args: [--max-num-seqs=8]}]}\n"
    pools, _ = pools_of(tmp_path, f"{SIDES}{own}    replicas: 4\n")
    assert pools[0]["engine"] == {"max_num_seqs": 8}
    assert pools[0]["replicas"] == 4


def test_fields_that_extend_a_compose_file_are_no_services(tmp_path: Path) -> None:
    text = """
x-common: &common {image: "vllm/vllm-openai:v0.19.1", ipc: host}
services:
  chat: {<<: *common, command: [--model=Qwen/Qwen3-14B, --tensor-parallel-size=2]}
  nginx: {image: "nginx:latest", command: nginx}
"""
    (tmp_path / "compose.yaml").write_text(text)
    reading = read_launch_command(str(tmp_path / "compose.yaml"))
    assert reading.raw["deployment"]["parallelism"] == {"tp": 2}
    assert reading.engine["version"] == "0.19.1"


@pytest.mark.parametrize(
    ("limits", "replicas", "says"),
    [
        ("minReplicas: 0, maxReplicas: 6", None, "minReplicas 0, maxReplicas 6: 1 replica taken; --set deployment.rep"),
        ("minReplicas: 2, maxReplicas: 6", 2, "minReplicas 2, maxReplicas 6: 2 replicas taken; --set deployment.rep"),
        ("minReplicas: 0", None, "minReplicas 0: 1 replica taken; --set deployment.replicas=... gives another number"),
        ("minReplicas: 3", 3, ""),
    ],
)
def test_what_an_autoscaler_may_do_is_said(limits: str, replicas: int | None, says: str, tmp_path: Path) -> None:
    model = "model: {modelFormat: {name: vLLM}, storageUri: 'hf://Qwen/Qwen3-8B'}"
    (tmp_path / "served.yaml").write_text(f"kind: InferenceService\nspec: {{predictor: {{{limits}, {model}}}}}")
    reading = read_launch_command(str(tmp_path / "served.yaml"))
    assert reading.raw["deployment"].get("replicas") == replicas
    assert [line[: len(says)] for line in reading.remarks] == ([says] if says else [])


@pytest.mark.parametrize(
    ("kind", "bounds", "says"),
    [
        (
            "HorizontalPodAutoscaler",
            "minReplicas: 2, maxReplicas: 6",
            "minReplicas 2, maxReplicas 6: 2 replicas taken;",
        ),
        ("ScaledObject", "minReplicaCount: 3, maxReplicaCount: 9", "minReplicas 3, maxReplicas 9: 3 replicas taken;"),
    ],
)
def test_an_autoscaler_beside_a_deployment_bounds_its_replicas(
    kind: str, bounds: str, says: str, tmp_path: Path
) -> None:
    """A Deployment that leaves its replicas to an autoscaler was taken as one replica, and nothing was said."""
    pod = "containers: [{image: 'vllm/vllm-openai:v0.19.1', args: [--model, Qwen/Qwen3-8B]}]"
    server = f"kind: Deployment\nmetadata: {{name: chat}}\nspec: {{template: {{spec: {{{pod}}}}}}}"
    scaler = f"kind: {kind}\nspec: {{scaleTargetRef: {{name: chat}}, {bounds}}}"
    (tmp_path / "served.yaml").write_text(f"{server}\n---\n{scaler}\n")
    reading = read_launch_command(str(tmp_path / "served.yaml"))
    assert reading.raw["deployment"]["replicas"] == int(says[len("minReplicas ")])
    assert [line[: len(says)] for line in reading.remarks] == [says]


@pytest.mark.parametrize(
    ("scaler", "replicas"),
    [
        ("autoscaling: {enabled: true, minReplicas: 3, maxReplicas: 5}", 3),
        ("keda: {enabled: true, minReplicaCount: 1, maxReplicaCount: 5}", 2),
        ("autoscaling: {enabled: false, minReplicas: 3, maxReplicas: 5}", 2),
    ],
)
def test_an_autoscaler_of_a_charts_values_bounds_its_replicas(scaler: str, replicas: int, tmp_path: Path) -> None:
    image = "image: vllm/vllm-openai:v0.11.0\nargs: [--model, Qwen/Qwen3-8B]\n"
    reading = read_launch_command(chart(tmp_path, f"replicaCount: 2\n{image}{scaler}\n"))
    assert reading.raw["deployment"]["replicas"] == replicas
    assert any("maxReplicas 5" in remark for remark in reading.remarks) == ("true" in scaler)


def test_a_missing_manifest_is_named() -> None:
    with pytest.raises(InputError, match=r"there is no file nowhere\.yaml"):
        read_launch_command("nowhere.yaml")


def chart(folder: Path, values: str) -> str:
    (folder / "templates").mkdir()
    (folder / "templates" / "server.yaml").write_text("image: {{ .Values.image }}\n")
    (folder / "Chart.yaml").write_text("apiVersion: v2\nname: chat\nversion: 0.1.0\n")
    (folder / "values.yaml").write_text(values)
    return str(folder)


def test_the_folder_of_a_chart_is_read_by_its_values(tmp_path: Path) -> None:
    folder = chart(tmp_path, "replicas: 2\nimage: vllm/vllm-openai:v0.11.0\nargs: [--model, org/name, -tp, '4']\n")
    reading = read_launch_command(folder)
    assert reading.raw["model"] == "org/name"
    assert reading.raw["deployment"]["replicas"] == 2
    assert reading.remarks == [f"read {tmp_path / 'values.yaml'}; the templates of the chart are not rendered"]


def test_a_chart_whose_templates_name_the_server_is_to_be_rendered(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"values\.yaml of the chart starts no server") as error:
        read_launch_command(chart(tmp_path, "modelName: org/name\ntensorParallel: 2\n"))
    assert "helm template" in str(error.value.hint)


def test_a_folder_without_a_chart_lists_its_files(tmp_path: Path) -> None:
    (tmp_path / "launch.sh").write_text("vllm serve org/name\n")
    with pytest.raises(InputError, match="is a folder without a Helm chart") as error:
        read_launch_command(str(tmp_path))
    assert error.value.hint == "name one of its files: launch.sh"
    with pytest.raises(InputError, match="starts no server"):
        read_launch_command("")


def test_the_nodes_that_a_pod_selects_say_its_device() -> None:
    def read(product: str) -> Any:
        pod = f"nodeSelector: {{nvidia.com/gpu.product: {product}}}\n      initContainers:"
        return read_launch_command(DEPLOYMENT.replace("initContainers:", pod))

    assert read("NVIDIA-H100-80GB-HBM3").raw["deployment"]["device"] == "h100_sxm"
    unknown = read("NVIDIA-Z9")
    assert "device" not in unknown.raw["deployment"]
    assert any("the GPU NVIDIA-Z9 of nodeSelector is not known" in remark for remark in unknown.container)


@pytest.mark.parametrize(
    ("words", "model", "says"),
    [
        ("/model-cache/deepseek-r1-fp4", "nvidia/DeepSeek-R1-FP4", "its path says"),
        (
            "/models/current --served-model-name openai/gpt-oss-120b mine",
            "openai/gpt-oss-120b",
            "--served-model-name says",
        ),
        ("/root/hub/models--Qwen--Qwen3-8B/snapshots/9c925d64", "Qwen/Qwen3-8B", "its path says"),
    ],
)
def test_a_path_of_another_machine_says_which_model_it_is(words: str, model: str, says: str) -> None:
    reading = read_launch_command(f"vllm serve {words}")
    assert reading.raw["model"] == model
    path = words.split(maxsplit=1)[0]
    assert f"{path} is not on this machine: {says} {model}" in reading.remarks


def test_a_path_that_says_nothing_stays_as_it_is(tmp_path: Path) -> None:
    assert read_launch_command("vllm serve /models/current").raw["model"] == "/models/current"
    here = tmp_path / "deepseek-r1"
    here.mkdir()
    assert read_launch_command(f"vllm serve {here}").raw["model"] == str(here)


@pytest.mark.parametrize(
    ("image", "version"),
    [
        ("nvcr.io/nvidia/ai-dynamo/vllm-runtime:0.8.1", "0.12.0"),
        ("nvcr.io/nvidia/ai-dynamo/vllm-runtime:0.8.99", None),
        ("nvcr.io/nvidia/ai-dynamo/sglang-runtime:0.8.1", None),
        ("mine/other-runtime:0.8.1", None),
    ],
)
def test_dynamos_images_have_the_engines_of_their_release(image: str, version: str | None) -> None:
    reading = read_launch_command(f"docker run {image} python3 -m dynamo.vllm --model qwen3-8b")
    assert reading.engine.get("version") == version
    said = f"has vllm {version}" if version else "names no version of vllm"
    assert said in reading.remarks[-1]


def test_arrays_stand_in_arrays() -> None:
    script = "ARGS=(--tp 4)\nARGS+=(\n  --max-running-requests 64\n)\nCMD=(\n  python3 -m sglang.launch_server\n"
    script += '  --model-path qwen3-8b\n  # more\n  "${ARGS[@]}"\n)\n"${CMD[@]}" >> log 2>&1 &\n'
    reading = read_launch_command(script)
    assert reading.raw["deployment"]["parallelism"] == {"tp": 4}
    assert reading.engine == {"name": "sglang", "max_num_seqs": 64}


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        *(
            ("A * B", "16"),
            ("${A}+3*B-1", "25"),
            ("A", "2"),
            ("(A + 1) * B", "24"),
            ("(B + 1) / A", "4"),
            ("-B % 5", "2"),
        ),
        *(("A > B ? A : B", "8"), ("A < B ? A : B", "2")),
        *(("A * UNKNOWN", None), ("A ** B", None), ("A / 0", None), ("A <", None), ("A > B > 1", None)),
    ],
)
def test_arithmetic_of_a_script_is_computed(expression: str, value: str | None) -> None:
    (command,) = [each for each in commands_of(f"A=2\nB=8\nserve --size $(({expression}))") if each.words[0] == "serve"]
    assert command.words[-1] == (value or command.words[-1])
    assert command.words[-1].isdecimal() == (value is not None)


def test_a_group_of_hosts_says_its_size(tmp_path: Path) -> None:
    """LeaderWorkerSet sets the number of hosts, by which scripts multiply the ranks of one."""
    file = tmp_path / "group.yaml"
    file.write_text(
        """kind: LeaderWorkerSet
spec:
  leaderWorkerTemplate:
    size: 2
    workerTemplate:
      spec:
        containers:
          - name: vllm
            image: vllm/vllm-openai:v0.11.0
            command: [/bin/bash, -c]
            args:
              - |-
                exec vllm serve deepseek-ai/DeepSeek-R1 --enable-expert-parallel --max-num-seqs=${UNSET-} \\
                  --data-parallel-size $((LWS_GROUP_SIZE * LOCAL))
            env: [{name: LOCAL, value: "8"}]
            resources: {limits: {nvidia.com/gpu: "8"}}
"""
    )
    reading = read_launch_command(str(file))
    assert reading.raw["deployment"]["parallelism"] == {"tp": 1, "attention_dp": 16, "ep": 16}
    assert "max_num_seqs" not in reading.engine
    assert reading.remarks == []


@pytest.mark.parametrize(
    ("script", "named"),
    [
        ("VLLM_A=1\nvllm serve qwen3-8b", []),
        ("export VLLM_A=1\nvllm serve qwen3-8b", ["VLLM_A of the environment"]),
        ("VLLM_A=1\nexport VLLM_A\nvllm serve qwen3-8b", ["VLLM_A of the environment"]),
        ("VLLM_A=1 vllm serve qwen3-8b", ["VLLM_A of the environment"]),
        ("export VLLM_A=1\nVLLM_A=2\nvllm serve qwen3-8b", ["VLLM_A of the environment"]),
    ],
)
def test_a_variable_of_a_script_is_none_of_the_server_unless_exported(script: str, named: list[str]) -> None:
    assert read_launch_command(script).not_modelled == named


@pytest.mark.parametrize("terms", [3, [{"matchExpressions": 2}], [{"matchExpressions": [{"values": 1}]}]])
def test_an_affinity_that_is_none_selects_no_device(terms: Any, tmp_path: Path) -> None:
    needed = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    container = {"image": "vllm/vllm-openai:v0.11.0", "args": ["--model", "qwen3-8b"]}
    file = tmp_path / "pod.yaml"
    file.write_text(yaml.safe_dump({"spec": {"affinity": {"nodeAffinity": needed}, "containers": [container]}}))
    assert "device" not in read_launch_command(str(file)).raw["deployment"]


NODES = """
apiVersion: apps/v1
kind: StatefulSet
metadata: {name: two-nodes}
spec:
  replicas: 4
  template:
    spec:
      containers:
        - name: server
          image: lmsysorg/sglang:v0.5.9
          command: [python3, -m, sglang.launch_server, --model-path, llama-3.1-70b, --tp, "16", --nnodes, "2"]
          args: [--node-rank, $(RANK), --dist-init-addr, "two-nodes-0:5000"]
          resources: {limits: {nvidia.com/gpu: "8"}}
"""


def test_replicas_that_are_nodes_of_one_server_are_one() -> None:
    reading = read_launch_command(NODES)
    assert reading.raw["deployment"]["replicas"] == 2
    assert reading.container == ["4 replicas are nodes: 2 make a server"]


@pytest.mark.parametrize(
    "text",
    [
        "# first\n{} --nnodes 2 --node-rank 0\n# second\n{} --nnodes 2 --node-rank 1",
        "{} -dp 4 -dpl 2\n{} --headless -dp 4 -dpl 2 --data-parallel-start-rank 2",
        "{} -dp 2 -dpn 0 &\n{} -dp 2 -dpn 1",
    ],
)
def test_the_commands_of_the_nodes_of_a_server_are_one_server(text: str) -> None:
    split = read_launch_command(text.replace("{}", "vllm serve llama-3.1-8b -tp 8")).raw["deployment"]["parallelism"]
    assert split["tp"] == 8


SCRIPTED = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: chat}
spec:
  template:
    spec:
      containers:
        - {name: server, image: "vllm/vllm-openai:v0.18.0", command: [/bin/sh, /scripts/start.sh]}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: scripts}
data:
  start.sh: |
    set -e
    exec vllm serve llama-3.1-8b --max-num-seqs ${MOST:-128}
"""


def test_a_script_of_a_config_map_is_read() -> None:
    deployment = read_launch_command(SCRIPTED).raw["deployment"]
    assert deployment["engine"] == {"name": "vllm", "max_num_seqs": 128, "version": "0.18.0"}


def test_a_container_whose_image_stands_elsewhere_is_read() -> None:
    patch = {"containers": [{"name": "server", "command": ["vllm", "serve"], "args": ["llama-3.1-8b", "-tp", "4"]}]}
    text = yaml.safe_dump({"kind": "Deployment", "spec": {"replicas": 4, "template": {"spec": patch}}})
    deployment = read_launch_command(text).raw["deployment"]
    assert (deployment["parallelism"], deployment["replicas"]) == ({"tp": 4}, 4)


RAY = """
applications:
  - name: llms
    import_path: ray.serve.llm:build_openai_app
    args:
      llm_configs:
        - model_loading_config: {model_id: mine, model_source: meta-llama/Llama-3.1-8B}
          accelerator_type: L40S
          deployment_config: {autoscaling_config: {min_replicas: 2, max_replicas: 4}}
          engine_kwargs:
            tensor_parallel_size: 2
            max_model_len: 8192
            speculative_config: {method: ngram, num_speculative_tokens: 3}
"""


@pytest.mark.parametrize("is_service", [False, True])
def test_a_configuration_of_ray_serve_is_read(is_service: bool) -> None:
    service = yaml.safe_dump({"kind": "RayService", "spec": {"serveConfigV2": RAY}})
    reading = read_launch_command(service if is_service else RAY, acceptance_fraction=0.5)
    deployment = reading.raw["deployment"]
    assert reading.raw["model"] == "meta-llama/Llama-3.1-8B"
    assert (deployment["device"], deployment["parallelism"], deployment["replicas"]) == ("l40s", {"tp": 2}, 2)
    assert deployment["engine"]["max_model_len"] == 8192
    assert deployment["engine"]["speculative"]["num_draft_tokens"] == 3


LLM_SERVICE = """
kind: LLMInferenceService
metadata: {name: chat}
spec:
  model: {uri: "pvc://weights", name: meta-llama/Llama-3.1-8B}
  speculator: {config: {method: ngram, num_speculative_tokens: "3"}}
  kvCacheOffloading: {cpu: {size: 10Gi}}
  router: {scheduler: {template: {containers: [{name: main, image: "llm-d/scheduler", args: [--pool-name, p]}]}}}
  template: {containers: [{name: main, image: "ghcr.io/llm-d/llm-d-cuda"}]}
  prefill: {template: {containers: [{name: main}]}}
"""


def test_what_kserve_describes_beside_its_containers_is_read() -> None:
    reading = read_launch_command(LLM_SERVICE, acceptance_fraction=0.5)
    prefill, decode = reading.raw["deployment"]["pools"]
    assert reading.raw["model"] == "meta-llama/Llama-3.1-8B"
    assert "engine" not in prefill
    assert decode["engine"]["speculative"]["num_draft_tokens"] == 3
    assert decode["engine"]["kv_tiers"] == [{"capacity_bytes": 10 * 2**30}]


def test_the_proxy_of_llm_d_is_no_server() -> None:
    values = {
        "modelArtifacts": {"uri": "hf://Qwen/Qwen3-8B"},
        "routing": {"proxy": {"image": "ghcr.io/llm-d/llm-d-routing-sidecar:v0.4.0"}},
        "decode": {"replicas": 2, "containers": [{"name": "vllm", "image": "ghcr.io/llm-d/llm-d-cuda"}]},
    }
    assert read_launch_command(yaml.safe_dump(values)).raw["deployment"]["replicas"] == 2


def test_options_in_a_variable_with_unbalanced_quotes_are_refused() -> None:
    with pytest.raises(InputError, match="No closing quotation"):
        read_launch_command("""MORE="--hf-overrides '{" ; vllm serve llama-3.1-8b $MORE""")


SERVER = """
apiVersion: apps/v1
kind: Deployment
metadata: {{name: {name}}}
spec:
  replicas: {replicas}
  template:
    spec:
      containers:
        - {{name: server, image: "{image}", args: [--model, Qwen/Qwen3-8B, --max-num-seqs, "{seqs}"]}}
"""


def manifests(tmp_path: Path, *documents: str) -> Path:
    file = tmp_path / "served.yaml"
    file.write_text("---".join(documents))
    return file


def deployment(name: str = "a", replicas: int = 1, image: str = "vllm/vllm-openai:v0.10.2", seqs: int = 64) -> str:
    return SERVER.format(name=name, replicas=replicas, image=image, seqs=seqs)


def test_equal_servers_are_replicas(tmp_path: Path) -> None:
    file = manifests(tmp_path, deployment("a", 2), deployment("b"))
    assert read_launch_command(str(file)).raw["deployment"]["replicas"] == 3


def test_servers_that_differ_are_refused(tmp_path: Path) -> None:
    file = manifests(tmp_path, deployment("a"), deployment("b", seqs=32))
    with pytest.raises(InputError, match="starts 2 servers: a/server, b/server"):
        read_launch_command(str(file))


@pytest.mark.parametrize(
    ("image", "version"),
    [
        ("vllm/vllm-openai:v0.10.2", "0.10.2"),
        ("registry.example.com/team/vllm-openai:v0.9.2-cu128-nixl-v0.4.1", "0.9.2"),
        ("lmcache/vllm-openai:v0.3.9", None),  # a release of LMCache
        ("registry.example.com/team/vllm-openai:nightly", None),
        ("registry.example.com/team/my-vllm-openai:v0.9.2", None),
    ],
)
def test_a_copy_of_an_image_has_the_version_of_its_tag(tmp_path: Path, image: str, version: str | None) -> None:
    reading = read_launch_command(str(manifests(tmp_path, deployment(image=image))))
    assert reading.engine.get("version") == version
    assert any(image in line for line in reading.container) is (image != "vllm/vllm-openai:v0.10.2")


def test_documents_of_unknown_kinds_are_named(tmp_path: Path) -> None:
    others = (
        "\napiVersion: example.com/v1\nkind: Scaler\nmetadata: {name: b}\nspec: {max: 9}\n",
        "\napiVersion: v1\nkind: Service\nmetadata: {name: c}\n",
        "\napiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\nmetadata: {name: d}\n",
    )
    reading = read_launch_command(str(manifests(tmp_path, deployment(), *others)))
    assert "not read, of unknown kinds: Scaler b" in reading.container
