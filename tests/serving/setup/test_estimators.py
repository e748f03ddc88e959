"""Kernels of engine versions that the estimator of a setup counts with."""

import pytest

from windtunnel.model.feed_forward.experts import Experts
from windtunnel.model.launches.forward import token_launches
from windtunnel.model.operators import Gemm
from windtunnel.model.precision import Format
from windtunnel.serving.scenario import Setup, resolve, scenario_from
from windtunnel.serving.setup.estimators import estimator_for, shard_of


def setup(version: str, device: str = "mi300x", model: str = "deepseek-ai/DeepSeek-R1-0528") -> Setup:
    return resolve(
        scenario_from(
            {
                "model": model,
                "deployment": {
                    "device": device,
                    "engine": {"name": "sglang", "version": version},
                    "parallelism": {"tp": 8},
                },
                "workload": {
                    "input_tokens": 1024,
                    "output_tokens": 128,
                    "arrivals": {"type": "burst"},
                    "num_requests": 1,
                },
            }
        )
    )


@pytest.mark.parametrize(
    ("version", "device", "is_serial"),
    [
        ("0.5.5", "mi300x", False),
        ("0.5.6", "mi300x", True),
        ("0.5.9", "mi325x", True),
        ("0.5.9", "mi355x", False),
        ("0.5.10", "mi300x", False),
    ],
)
def test_versions_of_sglang_whose_block_scaled_products_are_not_split_on_cdna3(
    version: str, device: str, is_serial: bool
) -> None:
    op = Gemm(4.0, 2112, 7168, Format.FP8_BLOCK)
    assert (float(estimator_for(setup(version, device)).estimate(op).seconds) > 100e-6) == is_serial


def test_sglang_routes_the_shared_expert_of_deepseek_on_amd() -> None:
    for version, device, is_routed in (("0.5.5", "mi300x", 0), ("0.5.9", "mi300x", 1), ("0.5.9", "h200_sxm", 0)):
        shard = shard_of(setup(version, device))
        launches = {launch.name: launch.op for launch in token_launches(shard, 4.0)}
        experts = launches["experts"]
        assert isinstance(experts, Experts)
        assert (experts.num_experts, experts.experts_per_token) == (256 + is_routed, 8 + is_routed)
        assert ("shared_down_proj" in launches) == (not is_routed)
