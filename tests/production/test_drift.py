"""A lasting change of a server's steps is noticed, single slow steps and changes of the batch are not."""

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from production.recorded_steps import OPTIONS, recorded
from windtunnel.calibration.steps.read import StepRun, read_step_runs, run_without_steps
from windtunnel.errors import InputError
from windtunnel.formats.telemetry.record import INTERVAL, ServerRecord
from windtunnel.production.drift import COUNTS, Drift, Watch, watch, watch_record, watch_steps
from windtunnel.production.observe import observe_steps, with_calibration
from windtunnel.report.drift import drift_document, drift_report, verdict

STEPS = COUNTS["step"]
NUM_STEPS = 3000


def residuals(begin: int = NUM_STEPS, change: float = 0.0, seed: int = 0) -> np.ndarray:
    noise = np.random.default_rng(seed).normal(0, 0.008, NUM_STEPS)
    return noise + np.where(np.arange(NUM_STEPS) >= begin, np.log1p(change), 0.0)


def states() -> np.ndarray:
    return np.full(NUM_STEPS, 8)


@pytest.mark.full
@pytest.mark.parametrize("change", [0.05, -0.05])
def test_five_percent_is_noticed_within_200_steps(change: float) -> None:
    for seed in range(10):
        (drift,) = watch(residuals(1500, change, seed), states(), STEPS).drifts
        assert 1500 <= drift.noticed < 1700
        assert abs(drift.begins - 1500) < 20
        assert drift.change == pytest.approx(change, abs=0.01)


def test_a_change_may_be_noticed_in_the_last_step() -> None:
    values = residuals(1500, 0.05)
    (drift,) = watch(values, states(), STEPS).drifts
    upto = drift.noticed + 1
    assert watch(values[:upto], states()[:upto], STEPS).drifts == [drift]


@pytest.mark.full
def test_nothing_is_noticed_where_nothing_changes() -> None:
    for seed in range(10):
        values = residuals(seed=seed)
        values[::50] += 1.0  # single slow steps
        values += np.linspace(0, 0.06, NUM_STEPS)  # contexts grow
        assert not watch(values, states(), STEPS).drifts


def test_another_graph_size_has_a_level_of_its_own() -> None:
    sizes = np.where(np.arange(NUM_STEPS) // 500 % 2, 16, 8)
    values = residuals() + np.where(sizes == 16, 0.05, 0.0)
    assert not watch(values, sizes, STEPS).drifts
    values[2600:] += np.log(1.05)
    assert len(watch(values, sizes, STEPS).drifts) == 1


@pytest.mark.parametrize("change", [0.08, -0.08])
def test_a_change_that_comes_with_another_graph_size_is_noticed(change: float) -> None:
    sizes = np.where(np.arange(NUM_STEPS) < 1500, 8, 16)
    (drift,) = watch(residuals(1500, change), sizes, STEPS).drifts
    assert 1500 <= drift.noticed < 1700
    assert np.sign(drift.change) == np.sign(change)


def watched(folder: Path, later: float) -> Watch:
    """Watch a run by the calibration that it gave, `later` times as slow as then."""
    made = observe_steps(recorded(folder, 1200, scale=1.2, noise=0.01))
    return watch_steps(with_calibration(recorded(folder, 1200, scale=1.2 * later, noise=0.01), made.calibration))


@pytest.mark.full
def test_a_server_as_calibrated_is_said_to_be(tmp_path: Path) -> None:
    seen = watched(tmp_path, 1.0)
    assert not seen.has_drifted
    assert seen.rows_between_false_alarms is not None
    assert seen.rows_between_false_alarms > 1e4
    assert verdict(seen) == "As calibrated: no lasting change in 1,000 steps."
    assert drift_report(seen).is_good


@pytest.mark.full
def test_a_server_that_was_slow_from_the_start_is_off(tmp_path: Path) -> None:
    seen = watched(tmp_path, 1.1)
    assert seen.is_off
    assert not seen.drifts
    assert seen.level == pytest.approx(0.1, abs=0.03)
    assert drift_document(seen)["has_drifted"]
    assert "Off its calibration" in verdict(seen)


@pytest.mark.full
def test_one_of_several_ranks_tells_of_large_changes_alone(tmp_path: Path) -> None:
    """Steps of a rank wait for the others, which may have become busier."""
    made = observe_steps(recorded(tmp_path, 1200, scale=1.2, noise=0.01))
    run = with_calibration(recorded(tmp_path, 1200, scale=1.2, noise=0.01), made.calibration)
    assert run.setup is not None
    ranks = msgspec.structs.replace(run.setup.parallelism, tp=2, attention_dp=2)
    part = replace(run, setup=replace(run.setup, parallelism=ranks))
    assert watch_steps(part).is_partial
    seen = watch_steps(run)
    assert not seen.is_partial
    for change, is_told in ((0.08, False), (0.2, True)):
        drifted = replace(seen, drifts=(Drift(300, 345, change),))
        assert drifted.has_drifted
        assert replace(drifted, is_partial=True).has_drifted == is_told
    unclear = replace(seen, drifts=(Drift(300, 345, 0.08),), is_partial=True)
    assert verdict(unclear).endswith("times are 8.0% longer, but ranks that are not recorded may be busier.")
    assert drift_report(unclear).is_good is None


def intervals(slow_from: int, count: int = 60) -> ServerRecord:
    rows = np.zeros(count, INTERVAL)
    random_ = np.random.default_rng(1)
    rows["start_s"], rows["duration_s"], rows["context_tokens"] = np.arange(count), 1.0, 500.0
    rows["gaps"], rows["steps"] = 16 * 100.0, 100.0
    rows["gaps_s"] = 16 * 0.9 * random_.normal(1, 0.005, count) * np.where(np.arange(count) < slow_from, 1.0, 1.06)
    return ServerRecord("metrics", rows)


def server() -> StepRun:
    return run_without_steps("metrics", {}, {**OPTIONS, "calibration": "vllm"})


def test_intervals_are_watched_too() -> None:
    assert not watch_record(server(), intervals(60)).drifts
    (drift,) = watch_record(server(), intervals(30)).drifts
    assert 30 <= drift.noticed < 45
    assert drift.change == pytest.approx(0.06, abs=0.015)


def test_too_few_intervals_are_refused() -> None:
    with pytest.raises(InputError, match="15 intervals that can be watched"):
        watch_record(server(), intervals(60, 15))


@pytest.mark.full
def test_times_that_vary_by_as_much_are_no_drift() -> None:
    """vLLM on an H200 under nine loads: its steps are off by 7% and more as the load changes."""
    folder = Path(__file__).parents[2] / "benchmarks" / "measured" / "h200"
    runs = read_step_runs(folder, {}, {"device": "h200_sxm"})
    found = watch_steps(next(run for run in runs if run.name == "llama-8b"))
    assert found.drifts
    assert found.rows_between_false_alarms is not None
    assert found.rows_between_false_alarms < 100
    assert not found.has_drifted or found.is_off
    assert verdict(replace(found, is_off=False)).startswith("Unclear: from step")
