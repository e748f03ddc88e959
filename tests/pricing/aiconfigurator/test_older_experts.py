"""Experts of older versions: DeepGEMM's padded blocks, and the Triton kernel in its former tiles."""

from importlib.util import find_spec
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from windtunnel import catalog
from windtunnel.model.feed_forward.experts import Experts
from windtunnel.model.precision import Format
from windtunnel.pricing.aiconfigurator.collection import POWER_LAW, TEXT, KernelChoices
from windtunnel.pricing.aiconfigurator.estimator import PACKAGE, measured_estimator, systems_folder

pytestmark = pytest.mark.skipif(find_spec(PACKAGE) is None, reason=f"{PACKAGE} has no wheel for this platform")

DEEPSEEK: dict[str, Any] = {"hidden_size": 7168, "intermediate_size": 2048, "num_experts": 256, "experts_per_token": 8}
MINIMAX: dict[str, Any] = {"hidden_size": 3072, "intermediate_size": 1536, "num_experts": 256, "experts_per_token": 8}
QWEN: dict[str, Any] = {"hidden_size": 4096, "intermediate_size": 1536, "num_experts": 128, "experts_per_token": 8}


def priced_ms(
    version: str, op: Experts, system: str = "h100_sxm", backend: str | None = None, spread: str = TEXT
) -> Any:
    device, kernels = catalog.device(system), KernelChoices(moe_backend=backend, expert_distribution=spread)
    estimator = measured_estimator(device, None, "vllm", version, kernels=kernels)
    return np.asarray(estimator.estimate(op).seconds) * 1e3


def measured_ms(table: str, tokens: list[int], **words: str | int) -> Any:
    rows = pq.read_table(systems_folder() / table, filters=[(name, "=", word) for name, word in words.items()])
    latency = dict(zip(rows["num_tokens"].to_pylist(), rows["latency"].to_pylist(), strict=True))
    return np.array([latency[count] for count in tokens])


@pytest.mark.full
@pytest.mark.parametrize("system", ["h100_sxm", "h200_sxm", "b200_sxm"])
@pytest.mark.parametrize(("ep", "tokens"), [(2, [64, 128, 256, 512, 1024]), (4, [64, 128]), (16, [256])])
def test_padded_blocks_take_what_the_same_kernels_were_measured_to_take(
    system: str, ep: int, tokens: list[int]
) -> None:
    """Under SGLang experts were timed with prompts in the same layout, with its host until their first product."""
    measured = measured_ms(
        f"{system}/moe/sglang/0.5.10/wideep_context_moe_perf.parquet",
        tokens,
        distribution="power_law_1.01",
        moe_ep_size=ep,
    )
    op = Experts(np.array(tokens, float), **DEEPSEEK, ep=ep, format=Format.FP8_BLOCK)
    errors = priced_ms("0.12.0", op, system) / measured - 1
    assert errors.min() > -0.17
    assert errors.max() < 0.09


@pytest.mark.full
def test_padding_costs_what_a_published_pair_of_runs_shows() -> None:
    """MiniMax-M2, four H100, 10 clients: 32.2 ms a token with DeepGEMM, 16.4 without (vllm-project/recipes, 112)."""
    op = Experts(np.array([16.0]), **MINIMAX, tp=4, format=Format.FP8_BLOCK)
    lost = priced_ms("0.12.0", op) - priced_ms("0.12.0", op, backend="triton")
    assert lost[0] * 62 == pytest.approx(32.2 - 16.4, rel=0.02)


@pytest.mark.parametrize(
    ("version", "changes", "is_padded"),
    [
        ("0.11.0", {}, False),
        ("0.11.1", {}, True),
        ("0.15.1", {}, True),
        ("0.16.0", {}, False),
        ("0.12.0", {"ep": 1, "tp": 4}, True),
        ("0.12.0", {"ep": 1, "tp": 8}, False),
        ("0.12.0", {"format": Format.FP8}, False),
    ],
)
def test_few_tokens_fill_blocks_in_the_versions_that_pad(
    version: str, changes: dict[str, Any], is_padded: bool
) -> None:
    """A block of 128 rows for each expert costs one token nearly what it costs 16; elsewhere tokens choose experts."""
    one, some = priced_ms(
        version, Experts(np.array([1.0, 16.0]), **QWEN, **{"ep": 4, "format": Format.FP8_BLOCK, **changes})
    )
    assert (some / one < 1.4) == is_padded


@pytest.mark.full
def test_a_named_backend_keeps_its_kernels() -> None:
    op = Experts(np.array([8.0]), **QWEN, ep=4, format=Format.FP8_BLOCK)
    assert priced_ms("0.12.0", op, backend="triton") < 0.8 * priced_ms("0.12.0", op)


def test_untuned_tiles_cost_what_they_cost_the_engine_that_kept_them() -> None:
    """SGLang 0.5.10 has the tiles that vLLM had before 0.17; few tokens for the rank's experts lose nothing."""
    tokens = [4, 32, 64, 128]
    shape = {"hidden_size": 4096, "inter_size": 1536, "num_experts": 128, "moe_ep_size": 8, "moe_tp_size": 1}
    words = {**shape, "moe_dtype": "bfloat16", "distribution": POWER_LAW}
    former = measured_ms("h100_sxm/moe/sglang/0.5.10/moe_perf.parquet", tokens, **words)
    since = measured_ms("h100_sxm/moe/vllm/0.24.0/moe_perf.parquet", tokens, **words)
    op = Experts(np.array(tokens, float), **QWEN, ep=8)
    assert priced_ms("0.16.0", op, spread=POWER_LAW) == pytest.approx(np.maximum(former, since), rel=1e-6)
    assert priced_ms("0.17.0", op, spread=POWER_LAW) == pytest.approx(since, rel=1e-6)
    assert (former / since > [1.0, 1.2, 1.2, 1.2]).all()


def test_tiles_of_several_ranks_lose_what_they_lose_on_one_where_all_choices_were_timed_on_a_rank() -> None:
    """With 512 tokens SGLang's rank of eight computed 256 rows an expert, where 32 are its share."""
    op = Experts(np.array([512.0]), **QWEN, ep=8)
    lost = priced_ms("0.16.0", op) / priced_ms("0.17.0", op)
    one_rank = Experts(np.array([512.0]), **QWEN)
    assert lost == pytest.approx(priced_ms("0.16.0", one_rank) / priced_ms("0.17.0", one_rank), rel=1e-6)
    assert 1.3 < lost < 1.6


def test_tuned_shapes_lose_nothing() -> None:
    op = Experts(np.array([32.0, 128.0, 512.0]), **QWEN, tp=2)
    assert priced_ms("0.16.0", op) == pytest.approx(priced_ms("0.17.0", op), rel=0.03)


def test_other_devices_lose_the_same_share() -> None:
    op = Experts(np.array([32.0, 128.0]), **QWEN, ep=8)
    lost = priced_ms("0.16.0", op) / priced_ms("0.17.0", op)
    assert priced_ms("0.16.0", op, "b200_sxm") / priced_ms("0.18.0", op, "b200_sxm") == pytest.approx(lost, rel=1e-6)
