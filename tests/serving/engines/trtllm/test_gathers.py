"""What TensorRT-LLM's attention data-parallel ranks gather before experts."""

import pytest

from windtunnel.model.launches.forward import token_launches
from windtunnel.model.operators import Collective
from windtunnel.serving.scenario import resolve, scenario_from
from windtunnel.serving.setup.estimators import shard_of


@pytest.mark.parametrize(
    ("engine", "model", "bits"),
    [
        ("trtllm", "nvidia/DeepSeek-R1-0528-NVFP4-v2", 4.5),
        ("trtllm", "deepseek-ai/DeepSeek-R1-0528", 16),
        ("sglang", "nvidia/DeepSeek-R1-0528-NVFP4-v2", 16),
    ],
)
def test_tokens_are_gathered_in_nvfp4_and_else_in_bf16(engine: str, model: str, bits: float) -> None:
    deployment = {
        "device": "b200_sxm",
        "calibration": "none",
        "engine": {"name": engine},
        "parallelism": {"attention_dp": 8, "ep": 8},
    }
    workload = {"arrivals": {"type": "closed_loop", "concurrency": 8}, "input_tokens": 64, "output_tokens": 8}
    scenario = scenario_from({"model": model, "deployment": deployment, "workload": workload | {"num_requests": 8}})
    launches = {launch.name: launch.op for launch in token_launches(shard_of(resolve(scenario)), 10)}
    gather = launches["dispatch_all_gather"]
    assert isinstance(gather, Collective)
    assert gather.message_bytes == 8 * 10 * 7168 * bits / 8
