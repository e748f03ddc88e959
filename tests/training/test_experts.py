"""Experts and multi-token prediction: kernels, launches, capacity, and the layers that predict further tokens."""

from dataclasses import replace
from typing import Any

import pytest

from windtunnel.errors import InputError
from windtunnel.model.precision import Format
from windtunnel.pricing.estimator import RooflineEstimator
from windtunnel.pricing.roofline import Roofline
from windtunnel.schema import decode
from windtunnel.training.costs import LAUNCHES
from windtunnel.training.job import TrainingJob
from windtunnel.training.layers.chunks import chunk_parameters, chunks, layer_parameters
from windtunnel.training.layers.part import products
from windtunnel.training.layers.parts import layer_parts
from windtunnel.training.layers.rank import Rank
from windtunnel.training.setup import resolve
from windtunnel.training.step import TrainingResult, simulate_training, training_prices

JOB: dict[str, Any] = {
    "model": "Qwen/Qwen3-30B-A3B",
    "device": "h100_sxm",
    "num_devices": 8,
    "sequence_tokens": 4096,
    "global_batch": 8,
}


def step(**changes: Any) -> TrainingResult:
    setup = resolve(decode({**JOB, **changes}, TrainingJob))
    return simulate_training(setup, RooflineEstimator(Roofline(setup.device, setup.node)))


def test_whatever_sends_tokens_leaves_a_kernel_that_sorts_them_by_expert() -> None:
    """Megatron-LM docs/discussions/deepseek-v3-gb200-optimization, sections 2.1.1 and 2.5: HybridEP too."""
    plain, by_node, hybrid = (
        step(kernels={"cuda_graphs": "full"}, parallelism={"ep": 8, "experts_exchange": how}).breakdown_s[
            "memory-bound kernels"
        ]
        for how in ("all_to_all", "by_node", "hybrid")
    )
    assert plain > by_node == hybrid


def test_grouped_products_of_transformer_engine_take_what_dense_ones_of_each_expert_do() -> None:
    """Its 64 experts of 512 rows, 7,168 x 2,048: 0.43 of 2,250 TFLOP/s forward in bf16 on a B200 (SimuMax's table)."""
    job = {**JOB, "model": "deepseek-ai/DeepSeek-V3", "device": "b200_sxm", "parallelism": {"ep": 8}, "num_devices": 8}
    rank = Rank(resolve(decode(job, TrainingJob)))
    forward, _, _ = products(rank, "experts_down_proj", 64 * 512.0, (7168, 2048), Format.BF16, 64)
    assert forward[-1].count == 64
    prices = replace(training_prices(rank.setup), sustained_fraction=1.0, format_rates={})
    assert forward[-1].flops / prices.task(forward[-1]).seconds == pytest.approx(0.43 * 2250e12, rel=0.15)


def test_experts_of_a_fixed_capacity_wait_for_no_count_of_tokens() -> None:
    dropless, padded, wide = (
        step(parallelism={"ep": 8, "experts_capacity": each}).breakdown_s for each in (None, 1.0, 1.5)
    )
    assert LAUNCHES in dropless
    assert LAUNCHES not in padded
    assert padded["matrix products"] == pytest.approx(dropless["matrix products"])
    assert wide["matrix products"] > 1.1 * padded["matrix products"]
    with pytest.raises(InputError, match=r"experts_capacity = 1\.0 changes nothing here: it needs .* all_to_all"):
        step(parallelism={"ep": 8, "experts_capacity": 1.0, "experts_exchange": "by_node"})


def test_biases_of_experts_are_added_by_kernels_of_their_own() -> None:
    """`_apply_bias` of Megatron-Core's experts moves 64 bytes a value."""
    rank = Rank(resolve(decode({**JOB, "model": "openai/gpt-oss-120b"}, TrainingJob)))
    part = next(each for each in layer_parts(rank, rank.setup.model.layers[0]) if each.name == "experts_bias")
    assert sum(float(task.op.num_bytes) for task in (*part.forward, *part.backward_input)) == rank.rows * 4 * 2880 * 64


@pytest.mark.full
def test_a_layer_that_predicts_further_tokens_is_a_layer_and_a_head_more() -> None:
    """NVIDIA's count of DeepSeek-V3 with it and without it is 260.0 and 249.4 GFLOP a token (Megatron-Bridge 25.11)."""
    layers = {"recompute": {"granularity": "full"}}
    split = {"pp": 16, "ep": 8}
    job = {**JOB, **layers, "model": "deepseek-ai/DeepSeek-V3", "device": "b200_sxm", "num_devices": 256}
    job |= {"sequence_tokens": 4096, "global_batch": 2048}
    without, mtp = (
        simulate_training(resolve(decode({**job, "parallelism": split, "mtp_layers": each}, TrainingJob)))
        for each in (0, 1)
    )
    assert mtp.setup.layers_per_chunk == (*[4] * 15, 1)
    assert mtp.model_flops / without.model_flops == pytest.approx(260.0 / 249.4, rel=0.005)
    ends = [chunks(each.setup)[-1] for each in (without, mtp)]
    added = [chunk_parameters(Rank(each.setup), end).dense for each, end in zip((without, mtp), ends, strict=True)]
    layer = layer_parameters(Rank(mtp.setup), mtp.setup.model.layers[-1]).dense
    table, joined = 129280 * 7168, 2 * 7168**2 + 3 * 7168
    assert added[1] - added[0] == table + joined + (2 - without.setup.layers_per_chunk[-1]) * layer
    with pytest.raises(InputError, match="do not split evenly over pp x virtual_stages = 12 x 1"):
        resolve(
            decode(
                {
                    **job,
                    "model": "deepseek-ai/DeepSeek-V2-Lite",
                    "mtp_layers": 1,
                    "num_devices": 96,
                    "global_batch": 96,
                    "parallelism": {"pp": 12},
                },
                TrainingJob,
            )
        )
    for changed in ({"lora": {}}, {"model": "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"}):
        with pytest.raises(InputError, match="mtp_layers = 1 is not modelled"):
            resolve(decode({**JOB, "model": "Qwen/Qwen3-8B", "mtp_layers": 1, **changed}, TrainingJob))
