"""Deployments as things to start: what is written, read again, is the same deployment, and manifests are valid."""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from windtunnel.formats.launch.read import read_launch_command
from windtunnel.formats.launch.scripts import (
    changed_options,
    helm_chart,
    kubernetes_manifests,
    launch_script,
    start_remark,
    write_launch_command,
)
from windtunnel.model.precision import Format
from windtunnel.schema import encode
from windtunnel.serving.engines.command_line import Unmodelled
from windtunnel.serving.engines.trtllm.command_line import write_file
from windtunnel.serving.scenario import Scenario, Setup, resolve, scenario_from

VERSIONS = {"vllm": "0.24.0", "sglang": "0.5.14", "trtllm": "1.3.0"}
SETTINGS: dict[str, dict[str, Any]] = {
    "vllm": {"num_gpu_blocks": 90_000, "long_prefill_token_threshold": 1000, "scheduling_policy": "priority"}
    | {"attention_backend": "flashinfer"},
    "sglang": {
        "attention_backend": "trtllm",
        "max_prefill_tokens": 9000,
        "max_kv_tokens": 20_000,
        "schedule_conservativeness": 0.5,
        "receive_interval_steps": 4,
        "encoder_cache_bytes": 4 << 30,
        "scheduling_policy": "lpm",
        "moe_backend": "trtllm",
        "cudagraph_padding": False,
        "piecewise_cudagraphs": False,
    },
    "trtllm": {
        "batch_wait_timeout_iters": 10,
        "batch_wait_max_tokens_ratio": 0.5,
        "cudagraph_padding": True,
        "piecewise_cudagraphs": True,
        "attention_dp_timeout_iters": 50,
        "moe_backend": "cutlass",
    },
}
SHARED: dict[str, list[Any]] = {
    "max_num_seqs": [64],
    "max_num_batched_tokens": [4096],
    "max_model_len": [16384],
    "gpu_memory_utilization": [0.83],
    "block_size": [32],
    "enable_prefix_caching": [True, False],
    "enable_chunked_prefill": [True, False],
    "async_scheduling": [True, False],
    "max_cudagraph_capture_size": [0, 100],
    "cudagraph_sizes": [[1, 2, 4]],
}
SPLITS = [{"tp": 4}, {"tp": 2, "pp": 2}, {"tp": 2, "attention_dp": 4, "ep": 8}, {"attention_dp": 8}]


def scenario_with(engine: dict[str, Any], model: str = "Qwen/Qwen3-30B-A3B", **deployment: Any) -> Scenario:
    precision = deployment.pop("precision", None)
    return scenario_from(
        {
            "model": model,
            "deployment": {"device": "h100_sxm", "engine": engine, **deployment},
            "workload": {"arrivals": {"type": "burst"}, "input_tokens": 8, "output_tokens": 8, "num_requests": 1},
            **({"precision": precision} if precision else {}),
        }
    )


def started(scenario: Scenario, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Setup:
    """What the script's last command starts, as the readers of command lines understand it."""
    monkeypatch.chdir(folder)
    Path("launch.sh").write_text(launch_script(scenario, VERSIONS))
    Path("served.yaml").write_text(kubernetes_manifests(scenario, VERSIONS))
    found = read_launch_command("launch.sh")
    in_cluster = read_launch_command("served.yaml")
    del in_cluster.raw["deployment"]["engine"]["version"]  # its image's
    assert in_cluster.raw["deployment"].pop("device") == "h100_sxm"  # its nodes'
    assert in_cluster.raw == found.raw
    assert found.unknown == []
    assert found.not_modelled == []
    raw = found.raw
    raw["deployment"]["device"] = "h100_sxm"
    raw["workload"] = {"arrivals": {"type": "burst"}, "input_tokens": 8, "output_tokens": 8, "num_requests": 1}
    return resolve(scenario_from(raw))


CASES = [
    *((engine, {name: value}) for engine in VERSIONS for name, values in SHARED.items() for value in values),
    *((engine, {name: value}) for engine, settings in SETTINGS.items() for name, value in settings.items()),
]


@pytest.mark.parametrize(("engine", "settings"), CASES, ids=str)
def test_what_is_written_is_read_as_the_same_settings(
    engine: str, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = scenario_with({"name": engine, **settings})
    expected, restarted = resolve(scenario), started(scenario, tmp_path, monkeypatch)
    for name in expected.engine.__struct_fields__:
        own, again = getattr(expected.engine, name), getattr(restarted.engine, name)
        # TensorRT-LLM's file says the second of two settings that go together; none is zero.
        assert (own or 0) == (again or 0) if name == "attention_dp_batching_wait_iters" else own == again, name


@pytest.mark.parametrize(
    ("engine", "option"),
    [("vllm", "--trust-remote-code"), ("sglang", "--trust-remote-code"), ("trtllm", "--trust_remote_code")],
)
def test_the_code_of_a_checkpoint_is_trusted_where_engines_need_it(engine: str, option: str) -> None:
    from_its_files = scenario_with({"name": engine}, model="XiaomiMiMo/MiMo-7B-Base")
    assert launch_script(from_its_files, VERSIONS).count(option) == 1
    given = {"server": Unmodelled(words=(option,))}
    assert launch_script(from_its_files, VERSIONS, given).count(option) == 1
    assert option not in launch_script(scenario_with({"name": engine}), VERSIONS)


def test_a_setting_without_an_option_is_a_variable_of_the_environment() -> None:
    scenario = scenario_with({"name": "sglang", "encoder_cache_bytes": 4 << 30})
    assert "\nSGLANG_VLM_CACHE_SIZE_MB=4096 python -m sglang.launch_server " in launch_script(scenario, VERSIONS)
    assert "name: SGLANG_VLM_CACHE_SIZE_MB\n          value: '4096'" in kubernetes_manifests(scenario, VERSIONS)
    assert changed_options(scenario_with({"name": "sglang"}), scenario) == "Add SGLANG_VLM_CACHE_SIZE_MB 4096"


@pytest.mark.parametrize(
    ("engine", "words"), [("vllm", "--mamba-ssm-cache-dtype float32"), ("sglang", "--mamba-ssm-dtype")]
)
def test_the_format_of_recurrent_states_is_written_and_read(
    engine: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hybrid = "nvidia/NVIDIA-Nemotron-Nano-12B-v2"
    scenario = scenario_with({"name": engine}, hybrid, precision={"recurrent_state": "fp32"})
    assert words in launch_script(scenario, VERSIONS)
    assert started(scenario, tmp_path, monkeypatch).precision.recurrent_state is Format.FP32


@pytest.mark.parametrize("engine", list(VERSIONS))
@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("kv_cache", ["bf16", "fp8"])
def test_what_is_written_is_read_as_the_same_split_and_format(
    engine: str, split: dict[str, int], kv_cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = scenario_with({"name": engine}, parallelism=split, precision={"kv_cache": kv_cache})
    restarted = started(scenario, tmp_path, monkeypatch)
    assert str(restarted.precision.kv_cache) == kv_cache
    if engine == "trtllm" and split.get("tp", 1) > 1 and "attention_dp" in split:
        assert "# TensorRT-LLM cannot split attention over tp = 2" in launch_script(scenario, VERSIONS)
    else:
        assert restarted.parallelism == resolve(scenario).parallelism


def on_a10(**engine: object) -> Scenario:
    workload = {"arrivals": {"type": "poisson", "rate_per_s": 1}, "input_tokens": 1024, "output_tokens": 64}
    return scenario_from(
        {
            "model": "meta-llama/Llama-3.1-8B",
            "deployment": {"device": "a10", "engine": {"max_num_batched_tokens": 512, **engine}},
            "workload": {**workload, "num_requests": 10},
        },
        "",
    )


def test_a_server_whose_cache_is_too_small_gets_a_length_with_which_it_starts() -> None:
    """vLLM stops where its KV cache cannot hold one request of the 131,072 tokens that the model takes."""
    assert "--max-model-len 32768" in launch_script(on_a10(), VERSIONS)
    assert '"32768"' in helm_chart(on_a10(), VERSIONS)["values.yaml"].replace("'", '"')
    assert "--max-model-len 4096" in launch_script(on_a10(max_model_len=4096), VERSIONS)
    roomy = scenario_from(encode(on_a10()) | {"deployment": {"device": "h100_sxm"}}, "")
    assert "--max-model-len" not in launch_script(roomy, VERSIONS)
    long = scenario_from(encode(on_a10()) | {"workload": encode(on_a10().workload) | {"input_tokens": 33_000}}, "")
    assert "--max-model-len 33" in launch_script(long, VERSIONS)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("", r"vllm would not start: a request of 131,072 tokens .* give --max-model-len \d{5} at most"),
        ("--max-model-len 100000", "a request of 100,000 tokens"),
        ("--max-model-len 8192", "^$"),
        ("--max-model-len auto", "^$"),
    ],
)
def test_a_command_that_does_not_start_is_noted(options: str, says: str) -> None:
    reading = read_launch_command(f"vllm serve meta-llama/Llama-3.1-8B --max-num-batched-tokens 512 {options}")
    scenario = on_a10(**reading.raw["deployment"]["engine"])
    assert re.search(says, start_remark(scenario, reading))


LONG = "would not start: --{} is 200,000, and Qwen/Qwen3-8B takes 40,960 tokens; give 40960 at most, or override"


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("vllm serve Qwen/Qwen3-8B --max-model-len 200000", f"vllm {LONG.format('max-model-len')}"),
        ("VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 vllm serve Qwen/Qwen3-8B --max-model-len 200000", ""),
        ("vllm serve Qwen/Qwen3-8B --max-model-len 200000 --hf-overrides '{\"a\": 1}'", ""),
        ("vllm serve Qwen/Qwen3-8B --max-model-len 40960", ""),
        ("sglang serve --model-path Qwen/Qwen3-8B --context-length 200000", f"sglang {LONG.format('context-length')}"),
        ("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 sglang serve --model Qwen/Qwen3-8B --context-length 99999", ""),
        ("trtllm-serve Qwen/Qwen3-8B --max_seq_len 200000", ""),
    ],
)
def test_a_length_beyond_the_models_own_does_not_start_unless_it_is_allowed(command: str, says: str) -> None:
    reading = read_launch_command(command)
    raw = encode(on_a10()) | reading.raw
    raw["deployment"]["device"] = "h100_sxm"
    remark = start_remark(scenario_from(raw, ""), reading)
    assert remark.startswith(says) if says else not remark


def test_tensorrt_llm_lowers_a_length_beyond_the_models_own() -> None:
    reading = read_launch_command("trtllm-serve Qwen/Qwen3-8B --max_seq_len 200000")
    assert reading.engine["max_model_len"] == 40_960
    assert reading.remarks == ["trtllm-serve lowers --max_seq_len 200,000 to the 40,960 of the model"]


def test_experts_in_parts_of_blocks_are_noted() -> None:
    for options, says in (("", "vllm would not start: TP 8 leaves 192 columns"), ("--enable-expert-parallel", "^$")):
        reading = read_launch_command(f"vllm serve Qwen/Qwen3-235B-A22B-FP8 -tp 8 --max-model-len 4096 {options}")
        raw = encode(on_a10()) | reading.raw
        raw["deployment"]["device"] = "h100_sxm"
        assert re.search(says, start_remark(scenario_from(raw, ""), reading))


@pytest.mark.parametrize(
    ("engine", "drafts", "words"),
    [
        ("vllm", {"method": "ngram"}, """--speculative-config '{"method": "ngram", "num_speculative_tokens": 3}'"""),
        (
            "vllm",
            {"method": "draft_model", "draft_model": "llama-3.2-1b"},
            (
                '--speculative-config \'{"method": "draft_model", "num_speculative_tokens": 3, '
                '"model": "meta-llama/Llama-3.2-1B"}\''
            ),
        ),
        (
            "sglang",
            {"method": "draft_model", "draft_model": "llama-3.2-1b"},
            (
                "--speculative-algorithm STANDALONE --speculative-draft-model-path meta-llama/Llama-3.2-1B "
                "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
            ),
        ),
        ("sglang", {"method": "ngram"}, "# add speculative decoding: ngram, 3 draft tokens a step"),
        ("trtllm", {"method": "ngram"}, "speculative_config:\n  decoding_type: NGram\n  max_draft_len: 3\n"),
    ],
    ids=["vllm-ngram", "vllm-model", "sglang-model", "sglang-ngram", "trtllm-ngram"],
)
def test_drafts_are_written_as_the_engine_takes_them(engine: str, drafts: dict[str, Any], words: str) -> None:
    """The engines' own examples of these options, in their documentation."""
    speculative = {**drafts, "num_draft_tokens": 3, "acceptance_fraction": 0.7}
    scenario = scenario_with({"name": engine, "speculative": speculative}, model="llama-3.1-8b")
    assert words in launch_script(scenario, VERSIONS)


@pytest.mark.parametrize(
    ("engine", "remark"),
    [
        ({"name": "vllm", "scheduler": "sarathi"}, "# scheduler sarathi is simulated; no option of vllm sets it"),
        ({"name": "vllm", "scheduling_policy": "shortest"}, "# scheduling_policy shortest is simulated; no option"),
        ({"name": "trtllm", "scheduling_policy": "priority"}, "# scheduling_policy priority is simulated; no option"),
        (
            {"name": "vllm", "kv_tiers": [{"name": "disk", "capacity_bytes": 10**12, "bandwidth_bytes_per_s": 1e9}]},
            "# let the engine keep KV blocks below its devices (disk)",
        ),
        ({"name": "trtllm", "attention_backend": "flashinfer"}, "# set attn_backend"),
        ({"name": "trtllm", "window_kv": "own_pool"}, "# set attn_backend and kv_cache_config.max_attention_window"),
    ],
    ids=["scheduler", "order", "priority", "tiers", "attention", "windows"],
)
def test_what_no_option_says_is_left_to_the_reader(engine: dict[str, Any], remark: str) -> None:
    assert remark in launch_script(scenario_with(engine, "llama-3.1-8b"), VERSIONS)


@pytest.mark.parametrize(
    ("engine", "model", "task", "words"),
    [
        ("vllm", "Qwen/Qwen3-0.6B", "embed", "--runner pooling"),
        ("vllm", "Qwen/Qwen3-0.6B", "rerank", "--runner pooling --convert classify"),
        ("vllm", "bge-m3", "embed", "--runner pooling"),
        ("sglang", "Qwen/Qwen3-0.6B", "embed", "--is-embedding"),
        ("sglang", "bge-reranker-v2-m3", "rerank", "--is-embedding"),
        ("sglang", "Qwen/Qwen3-0.6B", "rerank", ""),
    ],
)
def test_a_server_of_embeddings_is_started_as_one(engine: str, model: str, task: str, words: str) -> None:
    load = {"arrivals": {"type": "burst"}, "input_tokens": 8, "num_requests": 1, "task": task}
    deployment = {"device": "h100_sxm", "engine": {"name": engine}}
    script = launch_script(scenario_from({"model": model, "deployment": deployment, "workload": load}), VERSIONS)
    command = next(line for line in script.splitlines() if re.match(r"vllm|python", line))
    assert words in command
    assert "--convert" in words or "--convert" not in command
    read = read_launch_command(command).raw.get("workload", {}).get("task", "generate")
    assert read == {"--is-embedding": "embed", "": "generate"}.get(words, task)


def test_an_engine_is_told_the_name_that_it_can_load() -> None:
    assert "vllm serve meta-llama/Llama-3.1-8B " in launch_script(
        scenario_with({"name": "vllm"}, "llama-3.1-8b"), VERSIONS
    )


DEPLOYMENTS: dict[str, dict[str, Any]] = {
    "vllm": {"engine": {"name": "vllm", "max_num_seqs": 64}, "replicas": 3},
    "sglang": {"engine": {"name": "sglang"}, "parallelism": {"tp": 2}},
    "trtllm": {"engine": {"name": "trtllm", "enable_prefix_caching": False}},
    "pools": {
        "engine": {"name": "vllm"},
        "pools": [{"name": "pre-fill", "role": "prefill"}, {"name": "decode", "role": "decode", "replicas": 3}],
    },
}


@pytest.fixture(params=list(DEPLOYMENTS))
def deployed(request: pytest.FixtureRequest) -> Scenario:
    return scenario_with(**DEPLOYMENTS[request.param], model="llama-3.1-8b")


def test_the_chart_says_what_the_manifests_say(deployed: Scenario) -> None:
    """Filled in as Helm does (a Go template whose only function is toJson), it is the same documents."""
    chart = helm_chart(deployed, VERSIONS)
    values = yaml.safe_load(chart["values.yaml"])

    def filled(match: re.Match[str]) -> str:
        return json.dumps(values[match[1]][match[2]])

    template = chart["templates/servers.yaml"]
    text = re.sub(r"\{\{ \.Values\.(\w+)\.(\w+) \| toJson \}\}", filled, template)
    assert "{{" in template
    assert "{{" not in text
    assert list(yaml.safe_load_all(text)) == list(yaml.safe_load_all(kubernetes_manifests(deployed, VERSIONS)))
    assert yaml.safe_load(chart["Chart.yaml"])["apiVersion"] == "v2"


def test_helm_renders_the_manifests(deployed: Scenario, tmp_path: Path) -> None:
    """Helm itself, where it is installed; it was with 3.8.1."""
    helm = shutil.which("helm")
    if helm is None:
        pytest.skip("helm is not installed")
    for path, text in helm_chart(deployed, VERSIONS).items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    subprocess.run([helm, "lint", "--strict", tmp_path], check=True, capture_output=True)
    rendered = subprocess.run([helm, "template", "name", tmp_path], check=True, capture_output=True, text=True)
    expected = yaml.safe_load_all(kubernetes_manifests(deployed, VERSIONS))
    assert sorted(map(str, yaml.safe_load_all(rendered.stdout))) == sorted(map(str, expected))


def test_the_manifests_are_kubernetes(deployed: Scenario) -> None:
    """Against the schemas of Kubernetes itself, unknown fields refused."""
    validator = pytest.importorskip("kubernetes_validate")
    for document in yaml.safe_load_all(kubernetes_manifests(deployed, VERSIONS)):
        validator.validate(document, "1.30", strict=True)


def documents_of(scenario: Scenario) -> dict[tuple[str, str], dict[str, Any]]:
    """(Kind, name) -> document."""
    documents = yaml.safe_load_all(kubernetes_manifests(scenario, VERSIONS))
    return {(document["kind"], document["metadata"]["name"]): document for document in documents}


def test_pods_select_the_nodes_with_their_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the label of the only name of the device, by any of several, or by what a remark says is to be filled in."""

    def pod(device: str) -> tuple[dict[str, Any], str]:
        scenario = scenario_with({"name": "vllm"}, "llama-3.1-8b", device=device)
        (deployment,) = (each for (kind, _), each in documents_of(scenario).items() if kind == "Deployment")
        return deployment["spec"]["template"]["spec"], deployment["metadata"]["annotations"]["windtunnel/to-do"]

    one, notes = pod("h100_sxm")
    assert one["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    assert "affinity" not in one
    assert "nodeSelector" not in notes
    unknown, notes = pod("mi300x")
    assert unknown["nodeSelector"] == {}
    assert "fill in nodeSelector: the label of the nodes with AMD " in notes
    (tmp_path / "devices").mkdir()
    (tmp_path / "devices" / "aliases.yaml").write_text("NVIDIA A100-SXM-80GB: a100_sxm\nbig: a100_sxm\n")
    monkeypatch.setenv("WINDTUNNEL_CATALOG", str(tmp_path))
    several, notes = pod("a100_sxm")
    assert several["nodeSelector"] == {}
    assert "nodeSelector" not in notes
    (term,) = several["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    (expression,) = term["matchExpressions"]
    names = {"NVIDIA-A100-SXM4-80GB", "NVIDIA-A100-SXM-80GB"}
    assert (expression["key"], expression["operator"]) == ("nvidia.com/gpu.product", "In")
    assert set(expression["values"]) == names
    scenario = scenario_with({"name": "vllm"}, "llama-3.1-8b", device="a100_sxm")
    (tmp_path / "served.yaml").write_text(kubernetes_manifests(scenario, VERSIONS))
    assert read_launch_command(str(tmp_path / "served.yaml")).raw["deployment"]["device"] == "a100_sxm"
    values = yaml.safe_load(helm_chart(scenario, VERSIONS)["values.yaml"])
    assert values["server"]["affinity"] == several["affinity"]


def test_several_replicas_stand_behind_a_router() -> None:
    deployment = {"engine": {"name": "vllm"}, "replicas": 3, "router": "least_outstanding"}
    documents = documents_of(scenario_with(**deployment, model="llama-3.1-8b"))
    app = "llama-3-1-8b-server"
    assert set(documents) == {
        *(("Deployment", app), ("Deployment", f"{app}-router"), ("ConfigMap", f"{app}-router")),
        *(("Service", app), ("Service", f"{app}-replicas")),
        *(("PersistentVolumeClaim", f"{app}-cache"), ("HorizontalPodAutoscaler", app)),
    }
    assert documents["Service", app]["spec"]["selector"] == {"app": f"{app}-router"}
    assert documents["Service", f"{app}-replicas"]["spec"]["clusterIP"] == "None"
    config = documents["ConfigMap", f"{app}-router"]["data"]["default.conf.template"]
    assert "least_conn;" in config
    assert f"server {app}-replicas.${{NAMESPACE}}.svc.cluster.local:8000 resolve;" in config
    scaler = documents["HorizontalPodAutoscaler", app]["spec"]
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (3, 6)
    assert scaler["scaleTargetRef"]["name"] == app


def test_a_router_that_nginx_lacks_is_left_to_the_reader() -> None:
    deployment = {"engine": {"name": "vllm"}, "replicas": 2, "router": "least_kv"}
    documents = documents_of(scenario_with(**deployment, model="llama-3.1-8b"))
    notes = documents["Deployment", "llama-3-1-8b-server"]["metadata"]["annotations"]["windtunnel/to-do"]
    assert "nginx cannot route as least_kv does" in notes


@pytest.mark.parametrize("engine", list(VERSIONS))
def test_a_server_finds_its_token_its_checkpoint_and_its_time_to_start(engine: str) -> None:
    documents = documents_of(scenario_with({"name": engine}, model="llama-3.1-8b", parallelism={"tp": 2}))
    app = "llama-3-1-8b-server"
    pod = documents["Deployment", app]["spec"]["template"]["spec"]
    (server,) = pod["containers"]
    token, home = server["env"]
    assert token["valueFrom"]["secretKeyRef"] == {"name": "hf-token", "key": "token", "optional": True}
    mounts = {mount["name"]: mount["mountPath"] for mount in server["volumeMounts"]}
    assert mounts["cache"] == home["value"]
    claims = [
        volume["persistentVolumeClaim"]["claimName"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume
    ]
    assert claims == [f"{app}-cache"]
    assert documents["PersistentVolumeClaim", f"{app}-cache"]["spec"]["resources"]["requests"]["storage"] == "160Gi"
    startup = server["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 1800
    assert {"readinessProbe", "livenessProbe"} <= server.keys()
    assert ("HorizontalPodAutoscaler", app) in documents or engine == "trtllm"
    assert documents["Service", app]["spec"]["selector"] == {"app": app}


@pytest.mark.parametrize(
    ("engine", "model", "weights", "words"),
    [
        ("vllm", "llama-3.1-8b", "fp8", "vllm serve nvidia/Llama-3.1-8B-Instruct-FP8 "),
        ("sglang", "llama-3.1-70b", "fp8", "--model-path nvidia/Llama-3.1-70B-Instruct-FP8 "),
        ("trtllm", "llama-3.1-70b", "int4", "# name a checkpoint with int4 weights"),
    ],
)
def test_the_checkpoint_that_has_the_format_is_loaded(engine: str, model: str, weights: str, words: str) -> None:
    scenario = scenario_with({"name": engine}, model=model, precision={"weights": weights})
    script = launch_script(scenario, VERSIONS)
    assert words in script
    assert "--quantization" not in script


def test_trtllms_file_without_graphs_says_so() -> None:
    engine = scenario_with({"name": "trtllm", "max_cudagraph_capture_size": 0}).deployment
    assert write_file(engine.engine, engine.parallelism, None) == {"cuda_graph_config": None}
    words = write_launch_command("m", engine.parallelism, engine.engine)
    assert shlex.join(words) == "trtllm-serve m --tp_size 1"


def test_vllms_kv_cache_in_host_memory_is_written() -> None:
    disk = {"name": "disk", "capacity_bytes": 10**12, "bandwidth_bytes_per_s": 1e9}
    scenario = scenario_with({"name": "vllm", "kv_tiers": [{"capacity_bytes": 20 << 30}, disk]})
    script = launch_script(scenario, VERSIONS)
    assert "--kv-offloading-size 20" in script
    assert "KV blocks below its devices (disk): the command does not say so" in script
    tiers = read_launch_command(script).engine["kv_tiers"]
    assert tiers == [{"capacity_bytes": 20 << 30}]


@pytest.mark.parametrize(("engine", "option"), [("vllm", "--cudagraph-capture-sizes"), ("sglang", "--cuda-graph-bs")])
def test_sizes_are_words_of_their_own(engine: str, option: str) -> None:
    """Parsers of both servers take them one by one (`nargs="+"`)."""
    script = launch_script(scenario_with({"name": engine, "cudagraph_sizes": [1, 2, 4]}), VERSIONS)
    words = shlex.split(script.splitlines()[-1])
    assert words[words.index(option) + 1 :][:3] == ["1", "2", "4"]
