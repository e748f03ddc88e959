"""What a run's devices draw."""

from typing import Any

import pytest

import windtunnel as wt
from windtunnel.serving.priced_deployments import PricedDeployments
from windtunnel.serving.scenario import resolve


def power(**changes: Any) -> Any:
    scenario = wt.scenario(model="meta-llama/Llama-3.1-8B", device="h100_sxm", num_requests=64, seed=3, **changes)
    return wt.simulate(scenario).summary


def test_decode_draws_less_than_prompts_and_both_less_than_the_design_power() -> None:
    decode = power(concurrency=4, input_tokens=16, output_tokens=200).power.mean_w
    prompts = power(concurrency=4, input_tokens=4000, output_tokens=2).power.mean_w
    assert 0.4 * 700 < decode < 0.75 * 700
    assert 0.9 * 700 < prompts <= 700


def test_a_given_draw_holds_in_every_step() -> None:
    summary = power(rate_per_s=2, input_tokens=100, output_tokens=50, settings={"deployment.power.busy_w": 500})
    busy = summary.utilisation.busy_fraction
    assert busy < 0.9
    assert summary.power.mean_w == pytest.approx(75 + (500 - 75) * busy)


def test_a_power_limit_slows_what_arithmetic_bounds() -> None:
    """At 500 of 700 W arithmetic takes 1.27 times as long, and steps of few tokens as long as before."""
    free = power(concurrency=1, input_tokens=4000, output_tokens=50)
    limited = power(concurrency=1, input_tokens=4000, output_tokens=50, settings={"deployment.power.limit_w": 500})
    assert 1.16 < limited.ttft_s.mean / free.ttft_s.mean < 1.273
    assert 1.0 <= limited.tpot_s.mean / free.tpot_s.mean < 1.03
    assert limited.power.mean_w < free.power.mean_w


def test_prices_that_are_shared_know_the_power_limit() -> None:
    estimator = PricedDeployments().estimator
    common: dict[str, Any] = {
        "model": "meta-llama/Llama-3.1-8B",
        "device": "h100_sxm",
        "concurrency": 1,
        "num_requests": 1,
    }
    scenarios = [
        wt.scenario(**common, input_tokens=8, output_tokens=8, settings={"deployment.power.limit_w": limit_w})
        for limit_w in (None, 500, 600, None)
    ]
    estimators = [estimator(resolve(scenario)) for scenario in scenarios]
    assert estimators[0] is estimators[3]
    assert len({id(each) for each in estimators}) == 3
