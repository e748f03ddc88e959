"""Factors of steps: recovered from made-up steps, applied to others."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from engine_steps import held_out_by_tp
from windtunnel.calibration.steps.fit import (
    APART,
    DECODE_STEP,
    UNEQUAL,
    after_first_steps,
    fit_factors,
    residual_shares,
    scores_by_kind,
)
from windtunnel.calibration.steps.price import ATTENTION_DECODE, HOST, PricedSteps
from windtunnel.calibration.steps.read import StepRun
from windtunnel.serving.scenario import resolve
from windtunnel.serving.shorthand import scenario


def launched(device_s: NDArray[np.float64], launch_s: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(launch_s > 0, (device_s**8 + launch_s**8) ** (1 / 8), device_s)


def made_up(tp: int = 1, seed: int = 0, floor: float = 1.0) -> PricedSteps:
    """Steps that take 0.5 ms, 10% of the GEMMs and 40% of unequal attention more, and `floor` times the launches."""
    draw = np.random.default_rng(seed)
    size = 2000
    kind = draw.permutation(np.repeat([0, 2], size // 2))
    gemm_s, attention_s = draw.uniform(2e-3, 8e-3, size), draw.uniform(0.1e-3, 4e-3, size)
    variation = draw.uniform(0.0, 1.2, size)
    device_s, launch_s = gemm_s + attention_s, np.where(kind == 2, 8e-3, 0.0)
    real_s = device_s + 0.1 * gemm_s + 0.4 * variation * attention_s + 0.5e-3 * (kind == 0)
    predicted_s = launched(device_s, launch_s)
    setup = resolve(
        scenario(model="qwen3-32b", device="h100_sxm", tp=tp, concurrency=1, input_tokens=1, output_tokens=1)
    )
    return PricedSteps(
        run=StepRun(f"tp{tp}", "qwen3-32b", np.zeros(0), setup),
        kind=kind,
        measured_s=launched(real_s, floor * launch_s) * draw.normal(1.0, 0.005, size),
        predicted_s=predicted_s,
        device_s=device_s,
        launch_s=launch_s,
        is_in_pieces=np.zeros(size, np.bool_),
        families_s={"GEMM": gemm_s, ATTENTION_DECODE: attention_s, HOST: predicted_s - device_s},
        num_requests=np.ones(size),
        context_variation=variation,
        decode_share=(kind == 0).astype(np.float64),
        others_s=np.zeros(size),
        left_out={},
    )


def worst_median(steps: PricedSteps) -> float:
    return max(scored.median for scored in scores_by_kind([steps]).values())


@pytest.mark.parametrize("floor", [0.5, 1.0, 1.3])
def test_known_factors_are_recovered(floor: float) -> None:
    steps = made_up(floor=floor)
    factors = fit_factors([steps])
    assert worst_median(steps) > 0.04
    assert worst_median(factors.applied(steps)) < 0.015
    assert factors.missing[UNEQUAL] == pytest.approx(0.4, abs=0.1)
    assert factors.missing["GEMM"] == pytest.approx(0.1, abs=0.05)
    assert factors.missing[DECODE_STEP] == pytest.approx(0.5, abs=0.2)
    if floor > 0.5:
        assert factors.floors[1] == pytest.approx(floor, rel=0.05)


def test_what_other_ranks_may_add_teaches_nothing() -> None:
    """Of three in four steps with prompts, which last up to 10 ms longer than this rank alone explains."""
    steps = made_up()
    others_s = np.where(steps.kind == 2, 10e-3, 0.0)
    late_s = others_s * (np.arange(steps.kind.size) % 4 > 0)
    factors = fit_factors([replace(steps, measured_s=steps.measured_s + late_s, others_s=others_s)])
    assert worst_median(factors.applied(steps)) < 0.025
    assert worst_median(fit_factors([replace(steps, measured_s=steps.measured_s + late_s)]).applied(steps)) > 0.1


def test_products_of_prompts_leave_those_of_decode_steps_alone() -> None:
    steps = made_up()
    slow_s = steps.measured_s + np.where(steps.kind == 2, 0.25 * steps.families_s["GEMM"], 0.0)
    factors = fit_factors([replace(steps, measured_s=slow_s)])
    assert factors.missing["GEMM"] == pytest.approx(0.1, abs=0.07)
    assert factors.missing[APART["GEMM"]] > 0.1


def test_the_first_steps_teach_the_others() -> None:
    steps = made_up()
    others = after_first_steps(steps)
    assert others.kind.size == 1900
    assert worst_median(others) < 0.02


def test_narrow_runs_teach_wide_ones_of_their_model_alone() -> None:
    narrow, wide = made_up(tp=1), made_up(tp=4, seed=1)
    other = replace(wide, run=replace(wide.run, name="other", model="another"))
    (predicted,) = held_out_by_tp([narrow, wide, other])
    assert predicted.run.name == "tp4"
    assert worst_median(predicted) < 0.02


def test_parts_of_the_residual_add_up_to_what_is_explained() -> None:
    shares = residual_shares(made_up(floor=1.3))
    assert sum(shares.values()) == pytest.approx(1.0, abs=0.05)
    assert {UNEQUAL, HOST} <= set(list(shares)[:3])


def test_a_run_that_is_priced_right_needs_nothing() -> None:
    steps = made_up()
    right = replace(steps, measured_s=steps.predicted_s)
    factors = fit_factors([right])
    assert factors.applied(right).predicted_s == pytest.approx(right.predicted_s, rel=0.03)
    assert all(value == pytest.approx(0.0, abs=0.02) for value in factors.missing.values())
