"""A calibration that is learnt from recorded steps: what was put into them, and only where later steps agree."""

from pathlib import Path

import numpy as np
import pytest

import windtunnel as wt
from windtunnel.calibration.steps.price import price_run
from windtunnel.calibration.steps.read import StepRun, read_step_runs
from windtunnel.errors import InputError
from windtunnel.production.observe import Observation, observe_steps
from windtunnel.report.observation import observation_document, observation_report, verdict
from windtunnel.schema import save
from windtunnel.serving.setup.estimators import estimator_for

HEADER = "counter,prefill_tokens,prefill_requests,decode_requests,decode_kv_tokens,wall_time_ms"
OPTIONS = {"model": "qwen3-8b", "device": "h100_sxm", "calibration": "none"}
NUM_STEPS = 1200


def recorded(folder: Path, scale: float = 1.0, late_ms: float = 0.0, noise: float = 0.01) -> StepRun:
    """Return a run whose steps take `scale` times their price, and so many milliseconds longer."""
    path, random_ = folder / "steps.csv", np.random.default_rng(0)
    batches = random_.integers(16, 128, NUM_STEPS)
    prompts = np.where(np.arange(NUM_STEPS) % 6 == 0, random_.integers(64, 400, NUM_STEPS), 0)
    pairs = enumerate(zip(prompts, batches, strict=True))
    rows = [f"{number},{prompt},{int(prompt > 0)},{batch},{batch * 700}," for number, (prompt, batch) in pairs]

    def read(times_ms: list[float]) -> StepRun:
        path.write_text("\n".join([HEADER, *(f"{row}{ms}" for row, ms in zip(rows, times_ms, strict=True))]))
        (run,) = read_step_runs(path, {}, OPTIONS)
        return run

    priced = price_run(read([8.0] * NUM_STEPS), estimator_for)
    assert priced.kind.size == NUM_STEPS
    times_ms = (priced.predicted_s * 1e3 * scale + late_ms) * np.exp(noise * random_.standard_normal(NUM_STEPS))
    return read(times_ms.tolist())


def worst(observation: Observation) -> float:
    return max(scored.median for scored in observation.after.values())


def test_a_stall_in_every_step_is_learnt_as_the_hosts(tmp_path: Path) -> None:
    observation = observe_steps(recorded(tmp_path, late_ms=4.0))
    assert observation.learnt.startswith("the host")
    assert (observation.calibration.host.unhidden_step_s or 0.0) > 0.5e-3
    assert max(scored.median for scored in observation.before.values()) > 0.2
    assert worst(observation) < 0.08


def test_slow_operators_are_learnt_as_factors(tmp_path: Path) -> None:
    observation = observe_steps(recorded(tmp_path, scale=1.3))
    assert "operators" in observation.learnt
    assert observation.calibration.factors["gemm.memory"] == pytest.approx(1.3, rel=0.1)
    assert worst(observation) < 0.05


def test_nothing_is_learnt_from_steps_as_they_are_priced(tmp_path: Path) -> None:
    observation = observe_steps(recorded(tmp_path))
    assert observation.learnt == "nothing"
    assert verdict(observation).startswith("Nothing learnt")


def test_the_file_makes_simulations_as_slow_as_the_steps(tmp_path: Path) -> None:
    observation = observe_steps(recorded(tmp_path, scale=1.3))
    save(observation.calibration, tmp_path / "calibration.yaml")
    load = {"concurrency": 16, "input_tokens": 512, "output_tokens": 64, "num_requests": 64}

    def tpot_s(calibration: str) -> float:
        known = wt.simulate(wt.scenario(**{**OPTIONS, **load, "calibration": calibration})).summary.tpot_s
        assert known is not None
        return known.mean

    assert tpot_s(str(tmp_path / "calibration.yaml")) / tpot_s("none") == pytest.approx(1.3, rel=0.05)


def test_too_few_steps_are_refused(tmp_path: Path) -> None:
    run = recorded(tmp_path)
    with pytest.raises(InputError, match="of them to learn from"):
        observe_steps(run, learn=0.01)


def test_the_report_says_what_is_not_identified(tmp_path: Path) -> None:
    observation = observe_steps(recorded(tmp_path, late_ms=4.0))
    assert "experts" in observation.unidentified
    assert "collectives" in observation.unidentified
    document = observation_document(observation)
    assert document["steps"] == {"learnt_from": 240, "judged_on": 960}
    assert observation_report(observation).is_good
