"""Recipes of srt-slurm: servers of a Slurm cluster in one file."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from windtunnel.errors import InputError
from windtunnel.formats.launch.read import read_launch_command

SGLANG: dict[str, Any] = yaml.safe_load("""
model: {path: qwen3.5-nvfp4, container: "lmsysorg/sglang:v0.5.14", precision: nvfp4}
resources: {gpu_type: gb200, gpus_per_node: 4, prefill_nodes: 3, prefill_workers: 3, decode_nodes: 4, decode_workers: 1}
backend:
  prefill_environment: {NCCL_MNNVL_ENABLE: "1"}
  sglang_config:
    prefill:
      served-model-name: nvidia/Qwen3.5-397B-A17B-NVFP4
      model-path: /model/
      quantization: modelopt_fp4
      chunked-prefill-size: 65536
      disable-radix-cache: true
      tensor-parallel-size: 4
      data-parallel-size: 4
      expert-parallel-size: 4
      enable-dp-attention: true
    decode:
      served-model-name: nvidia/Qwen3.5-397B-A17B-NVFP4
      model-path: /model/
      tensor_parallel_size: 16
      max-running-requests: 512
      skip-server-warmup: false
""")
TRTLLM: dict[str, Any] = yaml.safe_load("""
model: {path: "hf:deepseek-ai/DeepSeek-R1", precision: fp4}
resources:
  {gpu_type: h100, gpus_per_node: 8, prefill_nodes: 1, prefill_workers: 2, gpus_per_prefill: 4, decode_nodes: 1,
   decode_workers: 1}
backend:
  type: trtllm
  trtllm_config:
    prefill: {tensor_parallel_size: 4, max_num_tokens: 8192, cuda_graph_config: null, kv_cache_config: {dtype: fp8}}
    decode:
      tensor_parallel_size: 8
      moe_expert_parallel_size: 8
      enable_attention_dp: true
      kv_cache_config: {dtype: fp8}
      cuda_graph_config: {enable_padding: true}
""")
VLLM: dict[str, Any] = yaml.safe_load("""
model: {path: Qwen/Qwen3-8B}
resources: {gpu_type: h200, gpus_per_node: 8, agg_nodes: 1, agg_workers: 4}
backend:
  type: vllm
  vllm_config:
    aggregated:
      tensor-parallel-size: 2
      no-enable-prefix-caching: true
      compilation-config: {cudagraph_mode: FULL_DECODE_ONLY}
""")


def read(recipe: dict[str, Any], folder: Path) -> Any:
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe))
    return read_launch_command(str(file))


def test_servers_on_both_sides_are_pools(tmp_path: Path) -> None:
    reading = read(SGLANG, tmp_path)
    deployment = reading.raw["deployment"]
    assert reading.raw["model"] == "nvidia/Qwen3.5-397B-A17B-NVFP4"
    assert "precision" not in reading.raw  # modelopt_fp4 names what the experts have
    assert (deployment["device"], deployment["engine"]) == ("gb200", {"name": "sglang", "version": "0.5.14"})
    prefill, decode = deployment["pools"]
    assert prefill["parallelism"] == {"tp": 1, "attention_dp": 4, "ep": 4}
    assert (prefill["replicas"], prefill["engine"]["max_num_batched_tokens"]) == (3, 65536)
    assert prefill["engine"]["enable_prefix_caching"] is False
    assert decode == {"name": "decode", "role": "decode", "parallelism": {"tp": 16}, "engine": {"max_num_seqs": 512}}
    assert reading.not_modelled == ["NCCL_MNNVL_ENABLE of the environment"]
    assert reading.container == []


def test_the_format_of_a_recipe_chooses_the_checkpoint(tmp_path: Path) -> None:
    reading = read(TRTLLM, tmp_path)
    assert reading.raw["model"] == "nvidia/DeepSeek-R1-FP4"
    assert reading.raw["deployment"]["device"] == "h100_sxm"
    prefill, decode = reading.raw["deployment"]["pools"]
    assert (prefill["replicas"], prefill["parallelism"]) == (2, {"tp": 4})
    assert prefill["engine"] == {"max_num_batched_tokens": 8192, "max_cudagraph_capture_size": 0}
    assert decode["parallelism"] == {"tp": 1, "attention_dp": 8, "ep": 8}
    assert decode["engine"] == {"cudagraph_padding": True}
    assert reading.raw["precision"] == {"kv_cache": "fp8"}


def test_servers_that_do_both_are_replicas(tmp_path: Path) -> None:
    reading = read(VLLM, tmp_path)
    deployment = reading.raw["deployment"]
    assert (deployment["device"], deployment["replicas"], deployment["parallelism"]) == ("h200_sxm", 4, {"tp": 2})
    assert deployment["engine"]["enable_prefix_caching"] is False
    assert deployment["engine"]["piecewise_cudagraphs"] is False
    assert reading.container == []


def test_gpus_that_the_options_do_not_take_are_named(tmp_path: Path) -> None:
    recipe = VLLM | {"resources": VLLM["resources"] | {"agg_workers": 2}}
    assert read(recipe, tmp_path).container == ["the container has 4 GPUs, and its command takes 2"]


@pytest.mark.parametrize("gpus", [{"gpus_per_agg": 2, "gpus_per_node": 1}, {"agg_nodes": 0}])
def test_gpus_that_are_said_or_shared_are_not_counted_from_nodes(gpus: dict[str, int], tmp_path: Path) -> None:
    assert read(VLLM | {"resources": VLLM["resources"] | gpus}, tmp_path).container == []


@pytest.mark.parametrize(
    ("resources", "message"),
    [
        ({"agg_workers": "many"}, "resources.agg_workers is 'many'; a number is needed"),
        ({"gpus_per_node": -1}, "resources.gpus_per_node is -1; a number is needed"),
        ({"agg_workers": 0, "agg_nodes": 0}, "starts no server that is known"),
    ],
)
def test_resources_that_are_none_are_refused(resources: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        read(VLLM | {"resources": VLLM["resources"] | resources}, tmp_path)
