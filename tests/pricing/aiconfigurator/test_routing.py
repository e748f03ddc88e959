"""Experts that real text chooses on the busiest of several ranks."""

from functools import cache
from importlib.util import find_spec

import numpy as np
import pytest

from windtunnel import catalog
from windtunnel.model.feed_forward.experts import Experts
from windtunnel.model.precision import Format
from windtunnel.pricing.aiconfigurator.collection import (
    BALANCED,
    MOE_POINT,
    POWER_LAW,
    RANDOM,
    TEXT,
    KernelChoices,
    Place,
    Rows,
)
from windtunnel.pricing.aiconfigurator.estimator import PACKAGE, measured_estimator
from windtunnel.pricing.aiconfigurator.experts import as_sharded, without_stubs
from windtunnel.pricing.aiconfigurator.routing import GINI, GINI_OF_RANDOM, as_text, busiest_active, busiest_load
from windtunnel.pricing.table import Floats


@cache
def chosen(num_tokens: int, num_experts: int, topk: int, gini: float) -> np.ndarray:
    """Return [draw, expert] how many tokens choose each expert, at random."""
    random = np.random.default_rng(1)
    choices = []
    for _ in range(400):
        popularity = np.maximum(random.normal(1.0, gini * np.sqrt(np.pi), num_experts), 1e-3)
        keys = np.log(popularity) + random.gumbel(size=(num_tokens, num_experts))
        best = np.argpartition(keys, -topk, axis=1)[:, -topk:]
        choices.append(np.bincount(best.ravel(), minlength=num_experts))
    return np.array(choices)


def drawn(num_tokens: int, num_experts: int, topk: int, ep: int, gini: float) -> tuple[float, float]:
    """Return the most active experts of a rank and the choices on the busiest over the mean, of random choices."""
    by_rank = chosen(num_tokens, num_experts, topk, gini).reshape(400, ep, -1)
    active, load = (by_rank > 0).sum(axis=2).max(axis=1), by_rank.sum(axis=2).max(axis=1)
    return float(np.mean(active)), float(np.mean(load)) * ep / (num_tokens * topk)


@pytest.mark.parametrize("gini", [GINI, GINI_OF_RANDOM])
@pytest.mark.parametrize("ep", [1, 2, 4, 8])
@pytest.mark.parametrize("num_tokens", [4, 32, 256])
@pytest.mark.parametrize(("num_experts", "topk"), [(128, 8), (256, 8)])
def test_the_busiest_rank_is_that_of_random_choices(
    num_experts: int, topk: int, num_tokens: int, ep: int, gini: float
) -> None:
    point = [np.array([float(number)]) for number in (num_tokens, num_experts, topk, ep)]
    active, load = drawn(num_tokens, num_experts, topk, ep, gini)
    assert busiest_active(*point, gini) == pytest.approx(active, rel=0.06)
    assert busiest_load(*point, gini=gini) == pytest.approx(load, rel=0.06)


def rows_of(tokens: Floats, latency: Floats, ep: float) -> Rows:
    shape = {"hidden_size": 4096.0, "inter_size": 1536.0, "num_experts": 128.0, "topk": 8.0, "moe_tp_size": 1.0}
    columns = {name: np.full(len(tokens), value) for name, value in {**shape, "moe_ep_size": ep}.items()}
    columns |= {"num_tokens": tokens, "latency": latency, "kernel": np.zeros(len(tokens), int)}
    assert set(MOE_POINT) < set(columns)
    return Rows(columns, {}, np.array(["kernel"]), Place.__new__(Place))


def test_text_reads_as_many_experts_as_the_busiest_rank_has_active_ones() -> None:
    """Where a token costs a microsecond up to every expert, and nothing beyond, the active experts are the time."""
    tokens = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 64.0, 1024.0, 2048.0])
    rows = rows_of(tokens, np.minimum(tokens, 16.0), 8.0)
    text = as_text(rows, rows.where(tokens < 1))
    expected = busiest_active(tokens, np.array(128.0), np.array(8.0), np.full(8, 8.0))
    assert text.latency[:-1] == pytest.approx(expected[:-1], rel=0.03)
    assert text.latency[0] > 2.0


def test_text_computes_the_tokens_of_the_busiest_rank() -> None:
    """Where every token costs the same, the busiest rank's share of them is the time."""
    tokens = np.array([1.0, 16.0, 256.0, 4096.0])
    even, skewed = rows_of(tokens, tokens, 8.0), rows_of(tokens, 1.05 * tokens, 8.0)
    load = busiest_load(tokens, np.array(128.0), np.array(8.0), np.full(4, 8.0))
    assert as_text(even, skewed.where(tokens < 1)).latency[2:] == pytest.approx((tokens * load)[2:], rel=1e-6)
    assert load[2] > 1.05
    assert as_text(even, skewed).latency[2:] == pytest.approx(1.05 * tokens[2:], rel=1e-6)


def test_a_power_law_says_nothing_of_the_busiest_rank_before_every_expert_has_a_token() -> None:
    tokens = np.array([1.0, 4.0, 16.0, 64.0])
    even = rows_of(tokens, tokens, 8.0)
    without, slow = as_text(even, even.where(tokens < 1)), as_text(even, rows_of(tokens, 100 * tokens, 8.0))
    assert slow.latency[:2] == pytest.approx(without.latency[:2])
    assert slow.latency[2:] == pytest.approx(100 * tokens[2:])


def test_whole_experts_with_few_tokens_take_no_longer_than_slices_of_them() -> None:
    """Of eight choices on eight ranks: 45 us whole and 20 in slices, 24 and 22 where they are level, and 900 and 300
    with more choices than there are experts."""
    tokens = np.array([1.0, 2.0, 64.0])
    whole, slices = (
        rows_of(tokens, np.array([45.0, 24.0, 900.0]), 8.0),
        rows_of(tokens, np.array([20.0, 22.0, 300.0]), 1.0),
    )
    both = whole.joined(slices.replaced(moe_tp_size=np.full(3, 8.0)))
    assert as_sharded(both).tolist() == [20.0, 24.0, 900.0, 20.0, 22.0, 300.0]


@pytest.mark.full
@pytest.mark.skipif(find_spec(PACKAGE) is None, reason=f"{PACKAGE} has no wheel for this platform")
def test_text_reaches_more_experts_than_random_tokens_and_those_more_than_the_power_law() -> None:
    def priced(spread: str, ep: int) -> Floats:
        kernels = KernelChoices(expert_distribution=spread)
        estimator = measured_estimator(catalog.device("h100_sxm"), None, "vllm", "0.24.0", kernels=kernels)
        op = Experts(np.array([16.0, 4096.0]), 4096, 1536, 128, 8, ep=ep, format=Format.BF16)
        return np.asarray(estimator.estimate(op).seconds)

    assert priced(RANDOM, 1) == pytest.approx(priced(POWER_LAW, 1))
    assert priced(TEXT, 1)[0] > 1.02 * priced(POWER_LAW, 1)[0]
    power_law, random, text = (priced(spread, 4)[0] for spread in (POWER_LAW, RANDOM, TEXT))
    assert power_law < random < text < priced(BALANCED, 4)[0]


def test_a_curve_that_broke_off_is_left_out_where_another_spread_has_more_of_it() -> None:
    tokens = np.array([1.0, 2.0, 4.0, 64.0])
    even, skewed = rows_of(tokens, tokens, 8.0), rows_of(tokens[:3], tokens[:3], 8.0)
    assert len(without_stubs(even.where(tokens == 1.0), skewed)) == 0
    assert len(without_stubs(even.where(tokens < 4.0), even)) == 2
    alone = even.where(tokens == 1.0).replaced(moe_ep_size=np.ones(1))
    assert len(without_stubs(alone, skewed)) == 1, "nothing else has this shape"


@pytest.mark.skipif(find_spec(PACKAGE) is None, reason=f"{PACKAGE} has no wheel for this platform")
def test_experts_behind_deepep_in_another_format_are_those_of_fp8_by_their_work() -> None:
    """A rank computes the tokens that it was sent: as many of them on 32 ranks as on 64 take as long."""

    def priced(form: Format, ep: int) -> float:
        kernels = KernelChoices(deepep="deepep_low_latency", num_redundant_experts=0)
        estimator = measured_estimator(catalog.device("gb200"), None, "sglang", "0.5.14", kernels=kernels)
        estimate = estimator.estimate(Experts(1024.0 * ep, 7168, 2048, 256, 8, ep=ep, format=form))
        assert form is Format.FP8_BLOCK or f"whose fp8_block stands in for {form}" in estimate.source
        return float(np.asarray(estimate.seconds))

    for ep in (32, 64):
        assert 0.5 < priced(Format.NVFP4, ep) / priced(Format.FP8_BLOCK, ep) < 0.75
        assert 1.1 < priced(Format.BF16, ep) / priced(Format.FP8_BLOCK, ep) < 2.0
    assert priced(Format.NVFP4, 64) == pytest.approx(priced(Format.NVFP4, 32), rel=0.1)
