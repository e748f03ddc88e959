"""Command lines of servers, read and written."""

import re
from pathlib import Path

import pytest
import yaml

from windtunnel.errors import InputError
from windtunnel.formats.launch.read import name_options, other_options, read_launch_command, servers
from windtunnel.formats.launch.scripts import kubernetes_manifests, launch_script, shown_script, write_launch_command
from windtunnel.model.parallelism import Parallelism
from windtunnel.schema import decode
from windtunnel.serving.deployment import EngineSettings
from windtunnel.serving.engines.trtllm.command_line import write_file
from windtunnel.serving.scenario import resolve, scenario_from

COMMANDS = [
    (
        (
            "vllm serve meta-llama/Llama-3.1-70B -tp 4 --max-num-seqs 256 --max-model-len 32k --enforce-eager \\\n"
            "--gpu-memory-utilization=0.92 --no-enable-prefix-caching --kv-cache-dtype fp8"
        ),
        {
            "deployment": {
                "parallelism": {"tp": 4},
                "engine": {
                    "name": "vllm",
                    "max_num_seqs": 256,
                    "max_model_len": 32000,
                    "gpu_memory_utilization": 0.92,
                    "enable_prefix_caching": False,
                    "max_cudagraph_capture_size": 0,
                },
            },
            "precision": {"kv_cache": "fp8"},
        },
    ),
    (
        # Data parallelism of a model with experts shares them; with expert parallelism every rank holds some.
        "docker run --gpus all vllm/vllm-openai:latest --model Qwen/Qwen3-30B-A3B -dp 4 --enable-expert-parallel",
        {"deployment": {"parallelism": {"tp": 1, "attention_dp": 4, "ep": 4}, "engine": {"name": "vllm"}}},
    ),
    (
        # Of a dense model it is copies.
        "vllm serve meta-llama/Llama-3.1-8B --data-parallel-size 2",
        {"deployment": {"parallelism": {"tp": 1}, "replicas": 2, "engine": {"name": "vllm"}}},
    ),
    (
        # SGLang's tp counts all ranks; dp of them have attention of their own.
        (
            "X=1 python3 -m sglang.launch_server --model-path deepseek-ai/DeepSeek-V3 --tp 8 --dp 4 "
            "--enable-dp-attention --ep-size 8 --disable-radix-cache --chunked-prefill-size 4096 "
            "--disable-piecewise-cuda-graph"
        ),
        {
            "deployment": {
                "parallelism": {"tp": 2, "attention_dp": 4, "ep": 8},
                "engine": {
                    "name": "sglang",
                    "enable_prefix_caching": False,
                    "enable_chunked_prefill": True,
                    "max_num_batched_tokens": 4096,
                    "piecewise_cudagraphs": False,
                },
            }
        },
    ),
    (
        "trtllm-serve meta-llama/Llama-3.1-8B --tp_size 2 --max_batch_size 512 --max_num_tokens 4096",
        {
            "deployment": {
                "parallelism": {"tp": 2},
                "engine": {"name": "trtllm", "max_num_seqs": 512, "max_num_batched_tokens": 4096},
            }
        },
    ),
]


MODEL = "meta-llama/Llama-3.1-70B"
EXPERTS = "deepseek-ai/DeepSeek-V3"
OPTIONS = [
    ("--served-model-name llama llama-3.1-8b", {}, ["without effect on time: --served-model-name"]),
    ("--lora-modules sql=/x chat=/y --max-num-seqs 8", {"max_num_seqs": 8}, ["not modelled: --lora-modules"]),
    ("--cuda-graph-sizes 64", {"max_cudagraph_capture_size": 64}, []),
    ("--cuda-graph-sizes 1 2 64", {"cudagraph_sizes": [1, 2, 64]}, []),
    ("--max-model-len auto", {}, []),
    ("--max-model-len -1", {}, []),
    (
        """--enable-eplb --eplb-config '{"num_redundant_experts":16, "window_size": 100}'""",
        {"enable_eplb": True, "num_redundant_experts": 16},
        ["not modelled: --eplb-config.window-size"],
    ),
    ("""--attention-config '{"use_trtllm_attention": true}'""", {"attention_backend": "trtllm"}, []),
    ("""--attention-config '{"use_trtllm_attention": false}'""", {"attention_backend": "flashinfer"}, []),
    (
        """--speculative-config '{"method":"qwen3_next_mtp","num_speculative_tokens":2,"acceptance_fraction":0.8}'""",
        {"speculative": {"method": "mtp", "num_draft_tokens": 2, "acceptance_fraction": 0.8}},
        [],
    ),
    (
        """--speculative-config '{"method":"suffix","acceptance_fraction":0.8}'""",
        {},
        ["not modelled: --speculative-config (suffix is not modelled so)"],
    ),
]


@pytest.mark.parametrize(("text", "engine", "remarks"), OPTIONS, ids=[text[:40] for text, _, _ in OPTIONS])
def test_vllms_options_are_taken_as_vllm_takes_them(text: str, engine: dict[str, object], remarks: list[str]) -> None:
    command = read_launch_command(f"vllm serve {MODEL} -tp 4 {text}")
    assert command.raw["model"] == MODEL
    assert command.raw["deployment"]["engine"] == {"name": "vllm", **engine}
    assert command.remarks == remarks


def test_sglangs_adapters_are_several_words() -> None:
    command = read_launch_command(f"python -m sglang.launch_server --model-path {MODEL} --lora-paths a=x b=y --tp 2")
    assert command.raw["model"] == MODEL
    assert command.raw["deployment"]["parallelism"] == {"tp": 2}


WRONG = {
    "llama-3.1-8b": f"the command names two models: {MODEL} and llama-3.1-8b",
    "--eplb-config '{\"num_redundant_experts\":'": "--eplb-config is no JSON object",
    "--speculative-config '[1]'": "a JSON object is needed",
    """--speculative-config '{"method":"mtp","num_speculative_tokens":[],"acceptance_fraction":1}'""": "has no numbers",
    """--speculative-config '{"method":"mtp","acceptance_fraction":"often"}'""": "has no numbers",
    "--max-model-len -2": "a whole number is needed",
}


@pytest.mark.parametrize(("text", "says"), WRONG.items(), ids=[text[:40] for text in WRONG])
def test_what_vllm_refuses_is_refused(text: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        read_launch_command(f"vllm serve {MODEL} {text}")


@pytest.mark.parametrize(("text", "expected"), COMMANDS, ids=[text.split(" --")[0] for text, _ in COMMANDS])
def test_commands_are_read_and_written_back(text: str, expected: dict[str, dict[str, object]]) -> None:
    command = read_launch_command(text)
    raw = {name: value for name, value in command.raw.items() if name != "model"}
    assert raw == expected
    assert not command.unknown
    deployment = raw["deployment"]
    if "replicas" in deployment:
        return
    again = write_launch_command(
        command.raw["model"],
        decode(deployment["parallelism"], Parallelism),
        decode(deployment["engine"], EngineSettings),
        None,
        raw.get("precision", {}).get("kv_cache"),
    )
    if "--enforce-eager" in text:
        assert "--enforce-eager" in again
    assert read_launch_command(" ".join(again)).raw == command.raw


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "engine.plan").write_bytes(b"\xd5\x00vllm serve")
    with pytest.raises(InputError, match=r"engine\.plan is not a text file"):
        read_launch_command(str(tmp_path / "engine.plan"))


def test_trtllms_file_is_read_and_written(tmp_path: Path) -> None:
    content = {
        "enable_attention_dp": True,
        "kv_cache_config": {"free_gpu_memory_fraction": 0.8, "enable_block_reuse": False, "dtype": "fp8"}
        | {"max_tokens": 8000},
        "cuda_graph_config": {"batch_sizes": [1, 8, 16], "enable_padding": True},
        "attention_dp_config": {"enable_balance": True, "timeout_iters": 60},
        "torch_compile_config": {"enable_piecewise_cuda_graph": True, "capture_num_tokens": [256, 1152]},
        "moe_config": {"backend": "CUTLASS"},
        "disable_overlap_scheduler": True,
    }
    path = tmp_path / "options.yaml"
    path.write_text(yaml.safe_dump(content))
    command = read_launch_command(f"trtllm-serve deepseek-ai/DeepSeek-V3 --tp_size 8 --extra_llm_api_options {path}")
    engine = command.raw["deployment"]["engine"]
    assert command.raw["deployment"]["parallelism"] == {"tp": 1, "attention_dp": 8}
    assert engine == {
        "name": "trtllm",
        "gpu_memory_utilization": 0.8,
        "max_kv_tokens": 8000,
        "enable_prefix_caching": False,
        "cudagraph_sizes": [1, 8, 16],
        "cudagraph_padding": True,
        "attention_dp_timeout_iters": 60,
        "attention_dp_batching_wait_iters": 10,
        "piecewise_cudagraphs": True,
        "piecewise_sizes": [256, 1152],
        "moe_backend": "cutlass",
        "async_scheduling": False,
    }
    written = write_file(decode(engine, EngineSettings), decode({"attention_dp": 8}, Parallelism), "fp8")
    assert written["kv_cache_config"] == {"enable_block_reuse": False, "dtype": "fp8", "max_tokens": 8000}
    assert written["enable_attention_dp"] is True
    assert written["cuda_graph_config"] == {"batch_sizes": [1, 8, 16], "enable_padding": True}
    assert written["disable_overlap_scheduler"] is True
    assert written["attention_dp_config"] == {"enable_balance": True, "timeout_iters": 60, "batching_wait_iters": 10}
    assert written["torch_compile_config"] == content["torch_compile_config"]


@pytest.mark.parametrize(
    ("model", "windows", "kept"),
    [
        ("openai/gpt-oss-20b", [128, 131072], "own_pool"),
        ("openai/gpt-oss-20b", [131072], "full"),
        ("openai/gpt-oss-20b", [256, 131072], None),
        ("meta-llama/Llama-3.1-8B", [4096], None),
    ],
    ids=["the model's", "none", "wider ones", "of a model without"],
)
def test_tensorrts_windows_are_the_models_or_not_modelled(
    tmp_path: Path, model: str, windows: list[int], kept: str | None
) -> None:
    path = tmp_path / "options.yaml"
    path.write_text(yaml.safe_dump({"kv_cache_config": {"max_attention_window": windows}}))
    command = read_launch_command(f"trtllm-serve {model} --extra_llm_api_options {path}")
    assert command.raw["deployment"]["engine"].get("window_kv") == kept
    assert bool(command.not_modelled) == (kept is None)
    assert ("--max-attention-window" in command.taken) == (kept is not None)


def test_every_option_is_one_of_four() -> None:
    """No option is both taken and named as left out."""
    other = other_options()
    assert not other.without_effect & other.not_modelled
    for server in servers().values():
        assert not server.flags.keys() & other.without_effect
    command = read_launch_command("vllm serve llama-3.1-8b --port 1 --cpu-offload-gb 4 --what --seed 3")
    assert command.without_effect == ["--port", "--seed"]
    assert command.not_modelled == ["--cpu-offload-gb (every step waits for weights over the host's link)"]
    assert other.effects.keys() <= other.not_modelled
    assert command.unknown == ["--what"]


def test_drafts_need_to_be_told_how_often_they_are_right() -> None:
    config = '{"method": "ngram", "num_speculative_tokens": 3}'
    assert (
        "acceptance" in read_launch_command(f"vllm serve llama-3.1-8b --speculative-config '{config}'").not_modelled[0]
    )
    said = config[:-1] + ', "acceptance_fraction": 0.6}'
    engine = read_launch_command(f"vllm serve llama-3.1-8b --speculative-config '{said}'").raw["deployment"]["engine"]
    assert engine["speculative"] == {"method": "ngram", "num_draft_tokens": 3, "acceptance_fraction": 0.6}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("python serve.py", "starts no server"),
        ("vllm serve", "names no model"),
        ("vllm serve m --max-num-seqs many", "--max-num-seqs is many"),
        ("vllm serve m --max-num-seqs", "--max-num-seqs has no value"),
        ("vllm serve m --kv-cache-dtype int3", "--kv-cache-dtype is int3"),
        ("vllm serve 'm", "in the command line"),
        ("vllm serve m --config none.yaml", "there is no file"),
        ("cat > a.yaml <<END\nx: [1\nEND\nvllm serve m --config a.yaml", "a.yaml is not valid YAML"),
        (
            "sglang serve --model qwen3-8b --tp 8 --dp 0 --enable-dp-attention",
            "--dp-size 0 does not divide --tp-size 8",
        ),
    ],
)
def test_wrong_commands_are_named(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_launch_command(text)


VLLM, SGLANG = "vllm serve", "python -m sglang.launch_server --model-path"


@pytest.mark.parametrize(
    ("text", "task"),
    [
        (f"{VLLM} Qwen/Qwen3-0.6B", None),
        (f"{VLLM} Qwen/Qwen3-0.6B --runner auto --convert none", None),
        (f"{VLLM} Qwen/Qwen3-0.6B --task generate", None),
        (f"{VLLM} Qwen/Qwen3-0.6B --runner pooling", "embed"),
        (f"{VLLM} Qwen/Qwen3-0.6B --task embed --runner pooling", "embed"),
        (f"{VLLM} Qwen/Qwen3-0.6B --runner pooling --convert classify", "rerank"),
        (f"{VLLM} Qwen/Qwen3-0.6B --task score", "rerank"),
        (f"{VLLM} bge-m3", "embed"),
        (f"{SGLANG} Qwen/Qwen3-0.6B", None),
        (f"{SGLANG} Qwen/Qwen3-0.6B --is-embedding", "embed"),
        (f"{SGLANG} bge-m3", "embed"),
        (f"{VLLM} of-nobody/known --runner pooling", "embed"),
    ],
)
def test_servers_of_embeddings_and_scores_set_the_task(text: str, task: str | None) -> None:
    command = read_launch_command(text)
    assert command.raw.get("workload") == (None if task is None else {"task": task})
    assert command.remarks == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Qwen/Qwen3-0.6B --runner generate --task embed", "--task embed and --runner generate do not go together"),
        ("Qwen/Qwen3-0.6B --runner pooling --task generate", "do not go together"),
        ("Qwen/Qwen3-0.6B --convert embed --task score", "--task score and --convert embed do not go together"),
        ("bge-m3 --runner generate", "bge-m3 is an encoder, which makes no text"),
        ("Qwen/Qwen3-0.6B --task reward", "--task is reward; known: auto, generate, embed"),
        ("Qwen/Qwen3-0.6B --runner draft", "--runner is draft; known"),
    ],
)
def test_what_a_server_cannot_pool_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_launch_command(f"{VLLM} {text}")


def test_a_pooling_server_takes_no_outputs() -> None:
    raw = read_launch_command(f"{VLLM} bge-m3").raw
    raw["deployment"]["device"] = "h100_sxm"
    load = {"arrivals": {"type": "burst"}, "input_tokens": 8, "num_requests": 1}
    assert resolve(scenario_from({**raw, "workload": raw["workload"] | load})).model.is_pooled
    with pytest.raises(InputError, match="whose requests have no output"):
        scenario_from({**raw, "workload": raw["workload"] | load | {"output_tokens": 4}})


def test_experts_placed_by_load_are_read_and_written(tmp_path: Path) -> None:
    split = "Qwen/Qwen3-30B-A3B -dp 4 --enable-expert-parallel"
    engine = read_launch_command(f"{VLLM} {split} --enable-eplb").raw["deployment"]["engine"]
    assert engine == {"name": "vllm", "enable_eplb": True}
    copied = f"{VLLM} {split} --enable-eplb --eplb-config.num_redundant_experts 8"
    engine = read_launch_command(copied).raw["deployment"]["engine"]
    assert engine == {"name": "vllm", "enable_eplb": True, "num_redundant_experts": 8}
    words = write_launch_command("m", Parallelism(), EngineSettings(name="vllm", num_redundant_experts=8))
    assert "--enable-eplb" in words
    with pytest.raises(InputError, match="without --enable-eplb"):
        read_launch_command(copied.replace("--enable-eplb ", ""))
    file = tmp_path / "options.yaml"
    file.write_text("moe_config: {load_balancer: {num_slots: 144}}\nenable_attention_dp: true\n")
    trtllm = f"trtllm-serve Qwen/Qwen3-30B-A3B --tp_size 8 --ep_size 8 --extra_llm_api_options {file}"
    read = read_launch_command(trtllm)
    assert read.raw["deployment"]["engine"] == {"name": "trtllm", "enable_eplb": True, "num_redundant_experts": 16}
    assert read.unknown == read.not_modelled == []
    file.write_text("moe_config: {load_balancer: {num_slots: 100}}\n")
    with pytest.raises(InputError, match=r"num_slots is 100; .* has 128 experts"):
        read_launch_command(trtllm)


def test_pools_are_written_as_servers_of_their_own() -> None:
    scenario = scenario_from(
        {
            "model": "meta-llama/Llama-3.1-8B",
            "deployment": {
                "device": "h100_sxm",
                "pools": [
                    {"name": "p", "role": "prefill", "replicas": 2},
                    {"name": "d", "role": "decode", "parallelism": {"tp": 2}},
                ],
            },
            "workload": {"arrivals": {"type": "burst"}, "input_tokens": 8, "output_tokens": 8, "num_requests": 1},
        }
    )
    script = launch_script(scenario, {"vllm": "0.24.0"})
    assert script.count("vllm serve meta-llama/Llama-3.1-8B") == 2
    assert [pool["role"] for pool in read_launch_command(script).raw["deployment"]["pools"]] == ["prefill", "decode"]
    assert "--tensor-parallel-size 2" in script
    documents = list(yaml.safe_load_all(kubernetes_manifests(scenario, {"vllm": "0.24.0"})))
    deployments = [document for document in documents if document["kind"] == "Deployment"]
    assert [document["spec"]["replicas"] for document in deployments] == [2, 1]
    limits = [document["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"] for document in deployments]
    assert limits == [{"nvidia.com/gpu": 1}, {"nvidia.com/gpu": 2}]


PUBLISHED = [
    # docs.vllm.ai, speculators: serve_vllm
    (
        'vllm serve Qwen/Qwen3-8B -tp 1 --speculative-config \'{"model": "RedHatAI/Qwen3-8B-speculator.eagle3", '
        '"num_speculative_tokens": 3, "method": "eagle3"}\''
    ),
    # huggingface.co/zai-org/GLM-4.7
    (
        "vllm serve zai-org/GLM-4.7-FP8 --tensor-parallel-size 4 --speculative-config.method mtp "
        "--speculative-config.num_speculative_tokens 1 --tool-call-parser glm47 --reasoning-parser glm45 "
        "--enable-auto-tool-choice --served-model-name glm-4.7-fp8"
    ),
    # vLLM, serving/cli-usage
    (
        "vllm serve meta-llama/Llama-3.2-1B-Instruct --data-parallel-size 4 --data-parallel-size-local 2 "
        "--data-parallel-address 10.99.48.128 --data-parallel-rpc-port 13345"
    ),
    # github.com/sgl-project/sglang, DeepSeek-V4.1 on four devices, and a list of optimisation options
    (
        "python -m sglang.launch_server --model-path deepseek-ai/DeepSeek-V3 --tp 4 --ep-size 1 --trust-remote-code "
        "--moe-a2a-backend none --moe-runner-backend flashinfer_mxfp4 --mem-fraction-static 0.80 "
        "--max-total-tokens 33554432 --chunked-prefill-size 4096 --cuda-graph-bs-decode 1 2 4 8 16 32 64 "
        "--max-running-requests 128 --skip-server-warmup --reasoning-parser deepseek-v41 --random-seed 42 "
        "--decode-log-interval 10 --host 127.0.0.1 --port 30021"
    ),
    (
        "python3 -m sglang.launch_server --model-path Qwen/QwQ-32B --dtype half --tp 4 --max-running-requests 6 "
        "--max-prefill-tokens 16384 --schedule-policy lpm --attention-backend flashinfer --stream-output --device cuda "
        "--kv-cache-dtype auto --stream-interval 2 --disable-cuda-graph-padding --enable-metrics --warmups 3 "
        "--triton-attention-num-kv-splits 4 --reasoning-parser deepseek-r1"
    ),
    # docs.sglang.io, speculative decoding, and large-scale expert parallelism
    (
        "python3 -m sglang.launch_server --model meta-llama/Llama-2-7b-chat-hf --speculative-algorithm EAGLE "
        "--speculative-draft-model-path lmsys/sglang-EAGLE-llama2-chat-7B --speculative-num-steps 3 "
        "--speculative-eagle-topk 4 --speculative-num-draft-tokens 16 --cuda-graph-max-bs 8"
    ),
    (
        "python -m sglang.launch_server --model-path deepseek-ai/DeepSeek-V3 --disaggregation-mode prefill "
        "--disaggregation-ib-device mlx5_0 --tp-size 8 --enable-two-batch-overlap --moe-dense-tp-size 1 --page-size 64"
    ),
    # nvidia.github.io/TensorRT-LLM, deployment guide of gpt-oss, and commands/trtllm-serve
    (
        "trtllm-serve serve openai/gpt-oss-120b --tp_size 8 --ep_size 8 --max_batch_size 640 --trust_remote_code "
        "--max_seq_len 2048 --kv_cache_free_gpu_memory_fraction 0.9 --max_num_tokens 20000"
    ),
    (
        "trtllm-serve nvidia/Llama-3.3-70B-Instruct-FP8 --backend pytorch --tp_size 4 --free_gpu_memory_fraction 0.85 "
        "--max_beam_width 1 --num_postprocess_workers 4"
    ),
]


@pytest.mark.parametrize("text", PUBLISHED, ids=lambda text: " ".join(text.split()[:6]))
def test_every_option_of_published_commands_is_known(text: str) -> None:
    command = read_launch_command(text)
    assert command.unknown == []
    num_options = sum(word.startswith("-") for word in text.split()) - text.startswith("python")
    named = len(command.taken) - 1 + len(command.without_effect) + len(command.not_modelled)
    is_named = "--model" in text.replace("--model-path", "--model")
    fields = text.count("--speculative-config.")  # are one remark
    assert named + is_named == num_options - max(fields - 1, 0)


def test_drafts_are_read_field_by_field() -> None:
    text = "vllm serve llama-3.1-70b --speculative-config.method ngram --speculative-config.num_speculative_tokens 4"
    command = read_launch_command(f"{text} --speculative-config.acceptance_fraction 0.6")
    drafts = {"method": "ngram", "num_draft_tokens": 4, "acceptance_fraction": 0.6}
    assert command.raw["deployment"]["engine"]["speculative"] == drafts
    assert command.not_modelled == []


def test_names_of_options_are_whole() -> None:
    known = other_options()
    for names in (known.without_effect, known.not_modelled, known.switches):
        assert not [name for name in names if " " in name or name.endswith("-")]


@pytest.mark.parametrize(
    ("text", "engine"),
    [
        (
            """vllm serve m -cc '{"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 8]}'""",
            {"piecewise_cudagraphs": False, "full_cudagraphs": True, "cudagraph_sizes": [1, 2, 8]},
        ),
        ("vllm serve m --compilation-config.cudagraph_mode=NONE", {"max_cudagraph_capture_size": 0}),
        (
            """vllm serve m --compilation-config '{"pass_config": {"fuse_allreduce_rms": true}}'""",
            {"fused_all_reduce": True},
        ),
        (
            """vllm serve m --compilation-config '{"pass_config": {"fuse_allreduce_rms": false}}'""",
            {"fused_all_reduce": False},
        ),
        ("VLLM_ALL2ALL_BACKEND=deepep_low_latency vllm serve m", {"all2all_backend": "deepep_low_latency"}),
        ("vllm serve m --kv-cache-memory-bytes 17179869184", {"kv_cache_memory_bytes": 2**34}),
        ("vllm serve m --kv-offloading-size 64", {"kv_tiers": [{"capacity_bytes": 64 * 2**30}]}),
        ("sglang serve --model m --enable-hierarchical-cache", {"kv_tiers": [{"capacity_ratio": 2.0}]}),
        (
            "sglang serve --model m --tp 4 --enable-hierarchical-cache --hicache-size 30 --hicache-ratio 3",
            {"kv_tiers": [{"capacity_bytes": 120_000_000_000}]},
        ),
        ("sglang serve --model m --max-total-tokens 65536 --enable-dp-lm-head", {"max_kv_tokens": 65536}),
        ("sglang serve --model m --moe-runner-backend flashinfer_mxfp4", {"moe_backend": "trtllm"}),
        ("sglang serve --model m --tp 2 --moe-a2a-backend flashinfer", {"all2all_backend": "nvlink_one_sided"}),
    ],
)
def test_options_of_published_recipes_are_settings(text: str, engine: dict[str, object]) -> None:
    command = read_launch_command(text.replace(" m", f" {MODEL}", 1))
    assert command.engine == engine | {"name": "sglang" if "sglang" in text else "vllm"}
    assert command.remarks == []


def test_expert_parallelism_of_older_sglang() -> None:
    text = (
        "python3 -m sglang.launch_server --model-path deepseek-ai/DeepSeek-V3 --tp 8 --dp-size 8 --enable-dp-attention"
    )
    split = read_launch_command(f"{text} --enable-ep-moe").raw["deployment"]["parallelism"]
    assert split == {"tp": 1, "attention_dp": 8, "ep": 8}


DRAFTING = [
    (
        "sglang serve --model m --speculative-algo EAGLE --speculative-num-steps 3 --speculative-eagle-topk 1",
        "eagle",
        3,
    ),
    (
        """vllm serve m --speculative-config '{"method": "eagle3", "model": "a/b", "num_speculative_tokens": 2}'""",
        "eagle",
        2,
    ),
    ("trtllm-serve m --config file.yaml", "mtp", 1),
]


@pytest.mark.parametrize(("text", "method", "number"), DRAFTING, ids=[text[:12] for text, _, _ in DRAFTING])
def test_the_acceptance_of_drafts_may_be_given_beside_the_command(
    text: str, method: str, number: int, tmp_path: Path
) -> None:
    file = tmp_path / "file.yaml"
    file.write_text("speculative_config: {decoding_type: MTP, num_nextn_predict_layers: 1}\n")
    text = text.replace(" m ", f" {MODEL} ", 1).replace("file.yaml", str(file))
    command = read_launch_command(text, 0.8)
    drafts = {"method": method, "num_draft_tokens": number, "acceptance_fraction": 0.8}
    assert command.engine["speculative"] == drafts
    assert command.not_modelled == []
    assert read_launch_command(f"{text} --acceptance-fraction 0.8").engine["speculative"] == drafts
    without = read_launch_command(text)
    assert "speculative" not in without.engine
    assert "say how often drafts are right: --acceptance-fraction 0.7" in without.not_modelled[-1]


@pytest.mark.parametrize(
    ("text", "is_read_as"), [("60%", 0.6), ("0.8, 60%", (0.8, 0.6)), ("0.8 0.6", (0.8, 0.6)), ("[0.8,0.6]", (0.8, 0.6))]
)
def test_acceptance_is_a_share_a_percentage_or_one_for_each_position(text: str, is_read_as: object) -> None:
    config = '{"method": "ngram", "num_speculative_tokens": 2}'
    command = read_launch_command(f"vllm serve {MODEL} --speculative-config '{config}'", text)
    assert command.engine["speculative"]["acceptance_fraction"] == is_read_as
    said = config[:-1] + ', "acceptance_fraction": [0.8, 0.6]}'
    within = read_launch_command(f"vllm serve {MODEL} --speculative-config '{said}'")
    assert within.engine["speculative"]["acceptance_fraction"] == (0.8, 0.6)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("often", "shares from 0 to 1 are needed"),
        ("60", "shares from 0 to 1 are needed"),
        ("", "shares from 0 to 1 are needed"),
        ("nan", "shares from 0 to 1 are needed"),
        ("0.8,0.6,0.4", "has 3 shares, and the server drafts 2 tokens a step"),
    ],
)
def test_an_acceptance_that_is_none_is_refused(text: str, says: str) -> None:
    config = '{"method": "ngram", "num_speculative_tokens": 2}'
    with pytest.raises(InputError, match=f"--acceptance-fraction .*{says}"):
        read_launch_command(f"vllm serve {MODEL} --speculative-config '{config}'", text)


LOAD = {"arrivals": {"type": "poisson", "rate_per_s": 1}, "input_tokens": 8, "output_tokens": 8, "num_requests": 2}
KEPT = {
    f"vllm serve {MODEL} -tp 2 --dtype bfloat16 --kv-cache-dtype auto": "--dtype bfloat16",
    f"vllm serve {MODEL} -tp 2 --port 9000 --host=0.0.0.0 --trust-remote-code --served-model-name a b -O3 --new 1": (
        "--port 9000 --host 0.0.0.0 --trust-remote-code --served-model-name a b -O3 --new 1"
    ),
    f"docker run -p 9000:9000 vllm/vllm-openai:v0.11.0 --model {MODEL} --seed -1 --speculative-config "
    """'{"method":"ngram","num_speculative_tokens":3}'""": (
        """--seed -1 --speculative-config '{"method":"ngram","num_speculative_tokens":3}'"""
    ),
    f"python -m sglang.launch_server --model-path {MODEL} --tp 2 --port 9000 --enable-metrics": (
        "--port 9000 --enable-metrics"
    ),
    f"trtllm-serve {MODEL} --tp_size 2 --log_level info": "--log_level info",
    f"python3 -m dynamo.vllm --model {MODEL} --dyn-tool-call-parser hermes --port 9000": "--port 9000",
    "compose.yaml": "--port 9000 --trust-remote-code",
    "deployment.yaml": "--port 9000 --trust-remote-code",
    "values.yaml": "--port 9000 --trust-remote-code",
    f"vllm serve {MODEL} --config options.yaml": "--port 9000 --trust-remote-code",
}
ARGUMENTS = f"[--model, {MODEL}, --max-num-seqs, '8', --port, '9000', --trust-remote-code]"
CONTAINER = f"{{name: server, image: 'vllm/vllm-openai:v0.11.0', args: {ARGUMENTS}}}"
FILES = {
    "compose.yaml": f"services: {{vllm: {{image: 'vllm/vllm-openai:v0.11.0', command: {ARGUMENTS}}}}}",
    "deployment.yaml": "{apiVersion: apps/v1, kind: Deployment, metadata: {name: m}, "
    f"spec: {{template: {{spec: {{containers: [{CONTAINER}]}}}}}}}}",
    "values.yaml": f"image: {{repository: vllm/vllm-openai, tag: v0.11.0, command: {ARGUMENTS}}}",
    "options.yaml": "{max-num-seqs: 8, port: 9000, trust-remote-code: true}",
}


@pytest.mark.parametrize(("text", "words"), KEPT.items(), ids=[text[:24] for text in KEPT])
def test_options_that_decide_nothing_stay_in_a_changed_command(text: str, words: str, tmp_path: Path) -> None:
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
        text = text.replace(name, str(tmp_path / name))
    reading = read_launch_command(text)
    reading.raw["deployment"]["device"] = "h100_sxm"
    scenario = scenario_from({**reading.raw, "workload": LOAD})
    version = {reading.engine["name"]: "1.0"}
    script = launch_script(scenario, version, reading.others)
    assert f" {words}\n" in script
    shown = "\n".join(shown_script(script, 40))
    assert " \\\n  " in shown
    assert shown.replace(" \\\n  ", " ").splitlines() == script.splitlines()[2:]
    again = read_launch_command(script)
    again.raw["deployment"]["device"] = "h100_sxm"
    without_image = re.sub(r"# (image|left out).*\n", "", script)
    assert launch_script(scenario_from({**again.raw, "workload": LOAD}), version, again.others) == without_image
    documents = list(yaml.safe_load_all(kubernetes_manifests(scenario, version, reading.others)))
    services = [document["spec"]["ports"] for document in documents if document["kind"] == "Service"]
    assert all(port["port"] == 9000 for ports in services for port in ports) == ("--port" in words)


def test_pools_keep_the_options_of_each_server() -> None:
    server = 'vllm serve {} --port 8{} --kv-transfer-config \'{{"kv_connector":"X","kv_role":"kv_{}"}}\'\n'
    lines = (server.format(MODEL, number, side) for number, side in ((100, "producer"), (200, "consumer")))
    reading = read_launch_command("".join(lines))
    assert {name: rest.words[:2] for name, rest in reading.others.items()} == {
        "prefill": ("--port", "8100"),
        "decode": ("--port", "8200"),
    }
    reading.raw["deployment"]["device"] = "h100_sxm"
    script = launch_script(scenario_from({**reading.raw, "workload": LOAD}), {"vllm": "0.24.0"}, reading.others)
    assert script.count("--kv-transfer-config") == 2
    assert "NixlConnector" not in script


CONTAINED = (
    f"docker run --gpus all -e NCCL_DEBUG=WARN -e 'SECOND=a b' -e HF_TOKEN=hf_1 -e CUDA_VISIBLE_DEVICES=0 "
    f"registry.example/team/vllm-openai:v0.19.0 --model {MODEL} --dyn-tool-call-parser hermes"
)


def test_a_changed_server_keeps_its_image_and_variables_but_no_secret() -> None:
    reading = read_launch_command(CONTAINED)
    reading.raw["deployment"]["device"] = "h100_sxm"
    scenario, version = scenario_from({**reading.raw, "workload": LOAD}), {"vllm": "0.19.0"}
    script = launch_script(scenario, version, reading.others)
    assert "# image: registry.example/team/vllm-openai:v0.19.0\n" in script
    assert "NCCL_DEBUG=WARN SECOND='a b' vllm serve" in script
    assert "# set in the environment, as before: HF_TOKEN\n" in script
    assert "# left out, of Dynamo's workers only: --dyn-tool-call-parser\n" in script
    assert "hf_1" not in script
    assert "CUDA_VISIBLE_DEVICES" not in script
    assert read_launch_command(script).others["server"].variables == {"NCCL_DEBUG": "WARN", "SECOND": "a b"}
    manifests = kubernetes_manifests(scenario, version, reading.others)
    assert "image: registry.example/team/vllm-openai:v0.19.0" in manifests
    assert "value: a b" in manifests
    assert "hf_1" not in manifests


def test_a_changed_server_takes_variables_that_the_text_does_not_set_from_its_environment() -> None:
    container = {
        "image": "vllm/vllm-openai:v0.19.0",
        "command": ["sh", "-c"],
        "args": [f'vllm serve {MODEL} --api-key $KEY --served-model-name "${{NAME}}" --chat-template \'a `b` "c"$D\''],
        "env": [{"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "own"}}}],
    }
    reading = read_launch_command(yaml.safe_dump({"containers": [container]}))
    reading.raw["deployment"]["device"] = "h100_sxm"
    scenario, version = scenario_from({**reading.raw, "workload": LOAD}), {"vllm": "0.19.0"}
    script = launch_script(scenario, version, reading.others)
    words = """--api-key "${KEY}" --served-model-name "${NAME}" --chat-template 'a `b` "c"'"$D\""""
    assert words in script
    assert words in " ".join(line.strip(" \\") for line in shown_script(script))
    assert "# set in the environment, as before: KEY, NAME, D\n" in script
    assert read_launch_command(script).others["server"].words[-6:] == reading.others["server"].words
    documents = list(yaml.safe_load_all(kubernetes_manifests(scenario, version, reading.others)))
    command = documents[-1] if "spec" not in documents[0] else documents[0]
    command = command["spec"]["template"]["spec"]["containers"][0]["command"]
    assert {"$(KEY)", "$(NAME)", 'a `b` "c"$(D)'} <= set(command)


def test_the_name_that_kserve_serves_is_written_as_the_engines_option() -> None:
    model = {"modelFormat": {"name": "huggingface"}, "storageUri": f"hf://{MODEL}", "args": ["--model_name=chat"]}
    reading = read_launch_command(yaml.safe_dump({"spec": {"predictor": {"model": model}}}))
    assert reading.others["server"].words == ("--served-model-name", "chat")


def test_a_number_that_only_the_cluster_knows_is_refused() -> None:
    env = [{"name": "TP", "valueFrom": {"configMapKeyRef": {"name": "sizes", "key": "tp"}}}]
    container = {"image": "vllm/vllm-openai:v0.19.0", "env": env}
    container["args"] = ["--model", MODEL, "--tensor-parallel-size", "$(TP)"]
    with pytest.raises(InputError, match=r"the text does not set \$TP"):
        read_launch_command(yaml.safe_dump({"containers": [container]}))


def test_a_changed_server_keeps_the_keys_of_its_file(tmp_path: Path) -> None:
    content = {
        "kv_cache_config": {"free_gpu_memory_fraction": 0.8, "event_buffer_max_size": 7},
        "my_key": [1, {"a": 2}],
    }
    (tmp_path / "more.yaml").write_text(yaml.safe_dump(content))
    reading = read_launch_command(f"trtllm-serve {MODEL} --extra_llm_api_options {tmp_path / 'more.yaml'}")
    reading.raw["deployment"]["device"] = "h100_sxm"
    scenario = scenario_from({**reading.raw, "workload": LOAD})
    script = launch_script(scenario, {"trtllm": "1.3.0"}, reading.others)
    written = yaml.safe_load(script.partition("<<'END'\n")[2].partition("\nEND\n")[0])
    assert written["my_key"] == content["my_key"]
    assert written["kv_cache_config"]["event_buffer_max_size"] == 7
    again = read_launch_command(script)
    again.raw["deployment"]["device"] = "h100_sxm"
    assert launch_script(scenario_from({**again.raw, "workload": LOAD}), {"trtllm": "1.3.0"}, again.others) == script


REFUSED_SETTINGS = [
    (
        "vllm serve m -tp 8 --moe-backend deep_gemm_mega_moe",
        "engine.all2all_backend is mega_moe",
        "set parallelism.ep to 8, or leave engine.all2all_backend out",
        "engine.all2all_backend (--moe-backend) is mega_moe",
        "set parallelism.ep (--enable-expert-parallel) to 8, or leave engine.all2all_backend (--moe-backend) out",
    ),
    (
        "sglang serve --model m --moe-a2a-backend megamoe",
        "engine.all2all_backend is mega_moe",
        "set parallelism.ep to 8",
        "engine.all2all_backend (--moe-a2a-backend) is mega_moe",
        "set parallelism.ep (--ep-size) to 8",
    ),
    (
        "trtllm-serve m --config file.yaml",
        "$.deployment.engine.all2all_backend is mega_moe",
        "set parallelism.tp and parallelism.ep",
        "$.deployment.engine.all2all_backend (moe_config.backend) is mega_moe",
        "set parallelism.tp (--tp_size) and parallelism.ep (--ep_size)",
    ),
    (
        "vllm serve m --no-enable-chunked-prefill",
        "of which gpu_memory_utilization is 0.9",
        "a larger gpu_memory_utilization, or set engine.enable_chunked_prefill",
        "of which --gpu-memory-utilization is 0.9",
        "a larger --gpu-memory-utilization, or leave --no-enable-chunked-prefill out",
    ),
    (
        "sglang serve --model m",
        "it does not fit",
        "a smaller max_num_batched_tokens",
        "it does not fit",
        "a smaller --chunked-prefill-size",
    ),
    ("vllm serve m -tp 0", "tp is 0 at $.deployment.parallelism", None, "--tensor-parallel-size is 0", None),
    ("vllm serve m -tp 3", "tp = 3 does not divide", None, "--tensor-parallel-size 3 does not divide", None),
    ("vllm serve", "no engine.max_num_seqs", "mend it", "no engine.max_num_seqs", "mend it"),
]


@pytest.mark.parametrize(("text", "message", "hint", "named", "named_hint"), REFUSED_SETTINGS)
def test_an_error_about_a_setting_names_the_option_that_decides_it(
    text: str, message: str, hint: str | None, named: str, named_hint: str | None, tmp_path: Path
) -> None:
    file = tmp_path / "file.yaml"
    file.write_text("moe_config: {backend: MEGAMOE_DEEPGEMM}\n")
    error = InputError(message, hint)
    name_options(error, text.replace(" m", f" {EXPERTS}", 1).replace("file.yaml", str(file)))
    assert (error.message, error.hint) == (named, named_hint)


def test_drafts_in_a_tree_are_not_modelled() -> None:
    text = f"sglang serve --model {MODEL} --speculative-algorithm EAGLE --speculative-num-steps 5"
    command = read_launch_command(f"{text} --speculative-eagle-topk 8", 0.8)
    assert "speculative" not in command.engine
    assert command.not_modelled[-1] == "--speculative-eagle-topk (EAGLE with a tree of drafts is not modelled so)"


def test_acceptance_without_drafts_is_refused() -> None:
    with pytest.raises(InputError, match="how often draft tokens are right, and the server makes none"):
        read_launch_command(f"vllm serve {MODEL}", 0.8)


def test_the_size_of_sglangs_cache_is_a_variable_of_the_environment() -> None:
    command = "docker run -e SGLANG_VLM_CACHE_SIZE_MB={} lmsysorg/sglang:v0.5.14 sglang serve Qwen/Qwen3-0.6B"
    reading = read_launch_command(command.format(512))
    assert reading.engine["encoder_cache_bytes"] == 512 << 20
    assert reading.remarks == []
    assert read_launch_command(command.format(0)).engine["encoder_cache_bytes"] == 0
    with pytest.raises(InputError, match="--from-command: SGLANG_VLM_CACHE_SIZE_MB is -3; a whole number is needed"):
        read_launch_command(command.format(-3))
    reading = read_launch_command("sglang serve Qwen/Qwen3-0.6B --SGLANG_VLM_CACHE_SIZE_MB 5")
    assert "encoder_cache_bytes" not in reading.engine
    assert len(reading.unknown) == 1


def test_variables_that_the_text_does_not_set_are_named_together() -> None:
    with pytest.raises(InputError, match=r"the text does not set \$MODEL, \$TP") as refused:
        read_launch_command('A=1\nvllm serve "$MODEL" -tp $TP --max-num-seqs $A --served-model-name $NAME')
    assert refused.value.hint == "write before the command: MODEL=... TP=..."


@pytest.mark.parametrize(
    ("option", "near"),
    [("--tensor-paralel-size", "--tensor-parallel-size"), ("--tensor-parallel", "--tensor-parallel-size")],
)
def test_an_unknown_option_is_told_from_one_that_is_misspelt(option: str, near: str) -> None:
    read = read_launch_command(f"vllm serve qwen3-32b {option} 2 --frobnicate")
    assert read.unknown == [f"{option} (did you mean {near}?)", "--frobnicate"]


@pytest.mark.parametrize(
    ("options", "engine"),
    [
        ("-cc.cudagraph_mode=FULL_DECODE_ONLY", {"piecewise_cudagraphs": False, "full_cudagraphs": True}),
        ("-cc.cudagraph_mode=PIECEWISE", {"piecewise_cudagraphs": True, "full_cudagraphs": False}),
        ("-O.cudagraph_mode=NONE", {"max_cudagraph_capture_size": 0}),
        ("-ac.backend FLASH_ATTN", {"attention_backend": "flash_attention"}),
        (
            "-sc.method ngram -sc.num_speculative_tokens 3",
            {"speculative": {"method": "ngram", "num_draft_tokens": 3, "acceptance_fraction": 0.5}},
        ),
        (
            (
                '--kv-transfer-config \'{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", '
                '"kv_connector_extra_config": {"cpu_bytes_to_use": 1073741824}}\''
            ),
            {"kv_tiers": [{"capacity_bytes": 2**30}]},
        ),
    ],
)
def test_vllms_short_names_and_json_decide_what_their_long_names_do(options: str, engine: dict[str, object]) -> None:
    acceptance = 0.5 if "-sc" in options else None
    reading = read_launch_command(f"vllm serve llama-3.1-8b {options}", acceptance)
    assert reading.engine == {"name": "vllm"} | engine
    assert (reading.unknown, reading.not_modelled) == ([], [])


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        (
            '"cpu_bytes_to_use": 8, "secondary_tiers": [{"type": "fs"}]',
            "--kv-transfer-config (KV cache in host memory)",
        ),
        ('"num_cpu_blocks": 41000', "--kv-transfer-config (KV cache in host memory)"),
    ],
)
def test_a_kv_cache_in_host_memory_that_is_not_taken_is_announced(extra: str, says: str) -> None:
    config = f'{{"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {{{extra}}}}}'
    reading = read_launch_command(f"vllm serve llama-3.1-8b --kv-transfer-config '{config}'")
    assert "kv_tiers" not in reading.engine
    assert reading.not_modelled == [says]


def test_a_format_that_is_not_modelled_may_be_left_out() -> None:
    with pytest.raises(InputError, match="--kv-cache-dtype is nvfp4") as raised:
        read_launch_command("vllm serve llama-3.1-8b --kv-cache-dtype nvfp4")
    assert "leave it out" in str(raised.value.hint)


@pytest.mark.parametrize(
    ("program", "model"),
    [("python -m vllm.entrypoints.api_server", "--model"), ("python -m sglang_router.launch_server", "--model-path")],
)
def test_other_programs_that_start_a_server(program: str, model: str) -> None:
    assert read_launch_command(f"{program} {model} llama-3.1-8b").raw["model"] == "llama-3.1-8b"


@pytest.mark.parametrize(
    ("engine", "kept"), [("vllm", ()), ("trtllm", ()), ("sglang", ("--disaggregation-mode", "prefill"))]
)
def test_options_of_dynamos_workers_are_not_written_for_the_engines_server(engine: str, kept: tuple[str, ...]) -> None:
    reading = read_launch_command(
        f"python -m dynamo.{engine} --model llama-3.1-8b --disaggregation-mode prefill --request-plane nats "
        "--publish-events-and-metrics --dyn-enable-structural-tag"
    )
    assert reading.unknown == []
    assert reading.others["server"].words == kept
