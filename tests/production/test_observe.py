"""A calibration that is learnt from recorded steps: what was put into them, and only where later steps agree."""

from dataclasses import replace
from pathlib import Path

import pytest

import windtunnel as wt
from production.recorded_steps import OPTIONS, recorded
from windtunnel.calibration.steps.read import StepRun
from windtunnel.errors import InputError
from windtunnel.production.observe import Observation, observe_steps
from windtunnel.report.observation import observation_document, observation_report, verdict
from windtunnel.schema import save

NUM_STEPS = 1200


def run_of(folder: Path, scale: float = 1.0, late_ms: float = 0.0) -> StepRun:
    return recorded(folder, NUM_STEPS, scale, late_ms, noise=0.01)


def worst(observation: Observation) -> float:
    return max(scored.median for scored in observation.after.values())


def test_a_stall_in_every_step_is_learnt_as_the_hosts(tmp_path: Path) -> None:
    observation = observe_steps(run_of(tmp_path, late_ms=4.0))
    assert observation.learnt.startswith("the host")
    assert (observation.calibration.host.unhidden_step_s or 0.0) > 0.5e-3
    assert max(scored.median for scored in observation.before.values()) > 0.2
    assert observation.after["decode"].median < 0.03
    # The price of a step that is launched in parts takes the stall as part of its time on the device, and not on top.
    assert worst(observation) < 0.1


def test_slow_operators_are_learnt_as_factors(tmp_path: Path) -> None:
    observation = observe_steps(run_of(tmp_path, scale=1.3))
    assert "operators" in observation.learnt
    assert observation.calibration.factors["gemm.memory"] == pytest.approx(1.3, rel=0.1)
    assert worst(observation) < 0.05


def test_nothing_is_learnt_from_steps_as_they_are_priced(tmp_path: Path) -> None:
    observation = observe_steps(run_of(tmp_path))
    assert observation.learnt == "nothing"
    assert verdict(observation).startswith("Nothing learnt")


def test_a_record_of_something_else_is_not_said_to_be_as_calibrated(tmp_path: Path) -> None:
    observation = observe_steps(run_of(tmp_path))
    far = {kind: replace(scored, median=0.998) for kind, scored in observation.after.items()}
    text = verdict(replace(observation, before=far, after=far))
    assert text.startswith("Nothing learnt: 960 later steps are far from their prices (decode 99.8% -> 99.8%")
    assert text.endswith("and the unit of times those of this server?")


@pytest.mark.full
def test_the_file_makes_simulations_as_slow_as_the_steps(tmp_path: Path) -> None:
    observation = observe_steps(run_of(tmp_path, scale=1.3))
    save(observation.calibration, tmp_path / "calibration.yaml")
    load = {"concurrency": 16, "input_tokens": 512, "output_tokens": 64, "num_requests": 64}

    def tpot_s(calibration: str) -> float:
        known = wt.simulate(wt.scenario(**{**OPTIONS, **load, "calibration": calibration})).summary.tpot_s
        assert known is not None
        return known.mean

    assert tpot_s(str(tmp_path / "calibration.yaml")) / tpot_s("none") == pytest.approx(1.3, rel=0.05)


def test_too_few_steps_are_refused(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    with pytest.raises(InputError, match="of them to learn from"):
        observe_steps(run, learn=0.01)


@pytest.mark.full
def test_the_report_says_what_is_not_identified(tmp_path: Path) -> None:
    observation = observe_steps(run_of(tmp_path, late_ms=4.0))
    assert list(observation.unidentified) == ["attention prefill"]  # a dense model has no experts
    assert "predicts later decode" in verdict(observation)
    document = observation_document(observation)
    assert document["steps"] == {"learnt_from": 240, "judged_on": 960}
    assert observation_report(observation).is_good
    swapped = replace(observation, before=observation.after, after=observation.before)
    assert "predicts later decode and mixed steps worse" in verdict(swapped)
    assert observation_report(swapped).is_good is None
