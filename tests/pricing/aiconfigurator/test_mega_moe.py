"""Experts and the exchange of their tokens in one kernel: published times, launches, memory, command lines."""

from typing import Any

import numpy as np
import pytest

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.formats.launch.read import read_launch_command
from windtunnel.formats.launch.scripts import launch_script
from windtunnel.model.exchange import mega_moe_buffer_bytes
from windtunnel.model.feed_forward.experts import MegaMoe
from windtunnel.model.launches.forward import token_launches
from windtunnel.model.precision import Format
from windtunnel.pricing.aiconfigurator.collection import BALANCED, TEXT, KernelChoices
from windtunnel.pricing.aiconfigurator.estimator import measured_estimator
from windtunnel.pricing.estimator import Coverage, Estimate
from windtunnel.pricing.roofline import Roofline
from windtunnel.schema import decode
from windtunnel.serving.scenario import Scenario, resolve
from windtunnel.serving.setup.estimators import shard_of
from windtunnel.serving.setup.memory import plan_memory

TOKENS = np.array([8.0, 64.0, 512.0, 2048.0])
PUBLISHED_S = np.array([260.1, 327.7, 376.9, 899.1]) * 1e-6
"""DeepSeek-V4-Pro over eight ranks, by the tokens of each (vllm-project/vllm, pull request 49636, `dg`)."""


def _experts(num_tokens: Any) -> MegaMoe:
    return MegaMoe(num_tokens, 7168, 3072, 384, 6, 1, 8, Format.MXFP4, True, 8)


def _estimate(device: str, distribution: str = TEXT, num_tokens: Any = TOKENS * 8) -> Estimate:
    found = catalog.device(device)
    kernels = KernelChoices(expert_distribution=distribution)
    estimator = measured_estimator(found, catalog.default_node(found), "sglang", "0.5.16", kernels=kernels)
    return estimator.estimate(_experts(num_tokens))


@pytest.mark.parametrize("device", ["gb300", "gb200", "b200_sxm", "b300_sxm"])
def test_published_times_are_within_an_eighth(device: str) -> None:
    estimate = _estimate(device)
    assert estimate.coverage is Coverage.MEASURED
    assert np.abs(np.asarray(estimate.seconds) / PUBLISHED_S - 1).max() < 0.125


def test_a_measured_point_is_the_table_s_time() -> None:
    estimate = _estimate("gb300", BALANCED, 512.0 * 8)  # files have the tokens of one rank
    assert estimate.seconds == pytest.approx(389e-6, rel=0.01)


def test_tables_of_the_same_device_count_up_to_one_server() -> None:
    assert "gb300/moe" in _estimate("b300_sxm").source
    device = catalog.device("b300_sxm")
    estimator = measured_estimator(device, catalog.default_node(device), "sglang", "0.5.16")
    wide = MegaMoe(512.0 * 32, 7168, 3072, 384, 6, 1, 32, Format.MXFP4, True, 8)
    assert estimator.estimate(wide).coverage is Coverage.SCALED


def test_the_closed_form_is_the_longest_of_three() -> None:
    """Eight ranks of a Hopper: a single token waits for weights, many for arithmetic; slow links for neither."""
    device = catalog.device("h200_sxm")
    roofline = Roofline(device, catalog.default_node(device))
    few, many = (np.asarray(roofline.seconds(_experts(num))) for num in (8.0, 8192.0 * 8))
    assert few > 30e-6
    op = _experts(8192.0 * 8)
    assert many == pytest.approx(30e-6 + op.flops / (device.peak_flops_per_s["fp8"] * 0.51), rel=1e-6)
    apart = MegaMoe(8192.0 * 64, 7168, 3072, 384, 6, 1, 64, Format.MXFP4, True, 8)
    assert roofline.seconds(apart) > 2 * many  # tokens cross the network


def _scenario(**changes: Any) -> dict[str, Any]:
    raw: dict[str, Any] = {
        "model": "deepseek-ai/DeepSeek-V4-Pro",
        "deployment": {
            "device": "b300_sxm",
            "parallelism": {"attention_dp": 8, "ep": 8},
            "engine": {"name": "sglang", "all2all_backend": "mega_moe", "max_num_batched_tokens": 4096},
        },
        "workload": {
            "arrivals": {"type": "closed_loop", "concurrency": 8},
            "input_tokens": 8,
            "output_tokens": 8,
            "num_requests": 8,
        },
    }
    raw["deployment"] |= changes
    return raw


def test_one_launch_stands_for_dispatch_experts_and_combine() -> None:
    setup = resolve(decode(_scenario(), Scenario))
    launches = {launch.name: launch.op for launch in token_launches(shard_of(setup), 16.0)}
    assert isinstance(launches["experts"], MegaMoe)
    assert launches["experts"].num_tokens == 16 * 8
    assert not {"dispatch", "combine", "dispatch_all_gather", "combine_reduce_scatter"} & set(launches)
    plan = plan_memory(shard_of(setup), setup.device, setup.engine, 4096)
    buffer = mega_moe_buffer_bytes(4096, 7168, 384, 6, 8)
    assert plan.reserved_bytes - float(setup.engine.reserved_bytes or 0) == buffer
    assert buffer == pytest.approx(5760 * (6 * (14336 + 12) + 7168 * 33 / 32 + 4 * 384 + 12 * 8 * 6))


def test_tensor_parallel_ranks_exchange_their_shares() -> None:
    setup = resolve(decode(_scenario(parallelism={"tp": 8, "ep": 8}), Scenario))
    launches = {launch.name: launch.op for launch in token_launches(shard_of(setup), 16.0)}
    assert isinstance(launches["experts"], MegaMoe)
    assert launches["experts"].num_tokens == 16
    assert "experts_all_reduce" not in launches
    assert "tokens_all_gather" in launches


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parallelism": {"tp": 8}}, "for ranks that hold different experts whole, and there are none"),
        ({"parallelism": {"tp": 1}}, "for ranks that hold different experts whole, and there are none"),
        ({"device": "mi355x"}, "no kernel for experts in mxfp4 on AMD Instinct MI355X"),
        ({"precision": {"weights": "bf16"}}, "no kernel for experts in bf16 on NVIDIA B300"),
    ],
)
def test_what_has_no_such_kernel_is_refused(change: dict[str, Any], message: str) -> None:
    raw = _scenario() | ({"precision": change["precision"]} if "precision" in change else {})
    raw["deployment"] |= {name: value for name, value in change.items() if name != "precision"}
    with pytest.raises(InputError, match=message) as refused:
        resolve(decode(raw, Scenario))
    assert "leave engine.all2all_backend out" in str(refused.value.hint)
    assert "parallelism.ep to 1" not in str(refused.value.hint)


V4 = "deepseek-ai/DeepSeek-V4-Pro"


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (f"vllm serve {V4} -dp 8 --enable-expert-parallel --moe-backend deep_gemm_mega_moe", "deep_gemm_mega_moe"),
        (f"sglang serve --model-path {V4} --tp 8 --dp 8 --enable-dp-attention --moe-a2a-backend megamoe", "megamoe"),
    ],
)
def test_command_lines_say_it(command: str, option: str) -> None:
    reading = read_launch_command(command)
    assert reading.engine["all2all_backend"] == "mega_moe"
    assert reading.raw["deployment"]["parallelism"] == {"tp": 1, "attention_dp": 8, "ep": 8}
    raw = _scenario()
    raw["deployment"]["engine"] = {"name": command.split(maxsplit=1)[0], "all2all_backend": "mega_moe"}
    assert option in launch_script(decode(raw, Scenario), {raw["deployment"]["engine"]["name"]: "1"})
