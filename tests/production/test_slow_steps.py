"""Recorded steps with compilation and stalls, and series of runs that are late by a constant."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from windtunnel.calibration.measured_runs import Measurement
from windtunnel.calibration.steps.price import price_run
from windtunnel.calibration.steps.read import StepRun, read_step_runs
from windtunnel.calibration.validate import RunPrediction
from windtunnel.production.slow_steps import diagnose_runs, diagnose_steps
from windtunnel.report.slow_steps import steps_document, verdict
from windtunnel.serving.setup.estimators import estimator_for

HEADER = "counter,prefill_tokens,prefill_requests,decode_requests,decode_kv_tokens,wall_time_ms"
OPTIONS = {"model": "qwen2.5-0.5b", "device": "h100_sxm", "calibration": "none"}
NUM_STEPS = 200


def recorded(folder: Path, scale: float = 1.0, late_ms: float = 0.0, slow: dict[int, float] | None = None) -> StepRun:
    """Return a run of decode and prefill steps that take `scale` times their price, and some that take far longer."""
    path = folder / "steps.csv"
    random_ = np.random.default_rng(0)
    batches = random_.integers(1, 64, NUM_STEPS)
    prompts = np.where(np.arange(NUM_STEPS) % 5 == 0, random_.integers(64, 2048, NUM_STEPS), 0)
    pairs = enumerate(zip(prompts, batches, strict=True))
    rows = [f"{number},{prompt},{int(prompt > 0)},{batch},{batch * 500}," for number, (prompt, batch) in pairs]

    def read(times_ms: list[float]) -> StepRun:
        path.write_text("\n".join([HEADER, *(f"{row}{ms}" for row, ms in zip(rows, times_ms, strict=True))]))
        (run,) = read_step_runs(path, {}, OPTIONS)
        return run

    priced = price_run(read([5.0] * NUM_STEPS), estimator_for)
    assert priced.kind.size == NUM_STEPS
    times_ms = priced.predicted_s * 1e3 * scale + late_ms
    for place, ms in (slow or {}).items():
        times_ms[place] = ms
    return read(times_ms.tolist())


def test_the_first_steps_that_take_seconds_are_compilation_and_later_ones_stalls(tmp_path: Path) -> None:
    diagnosis = diagnose_steps([recorded(tmp_path, slow={0: 1612.0, 3: 803.0, 120: 400.0})])
    found = {finding.cause: finding for finding in diagnosis.findings}
    assert set(found) == {"compilation", "stall"}
    assert "1,612, 803 ms" in found["compilation"].evidence
    assert found["compilation"].lost_s == pytest.approx(2.4, rel=0.02)
    assert sum(finding.share for finding in diagnosis.findings) < 1
    assert verdict(diagnosis).startswith("Compilation")


def test_steps_as_priced_raise_no_alarm(tmp_path: Path) -> None:
    diagnosis = diagnose_steps([recorded(tmp_path, scale=1.4)])
    assert not diagnosis.findings
    assert verdict(diagnosis).startswith("Healthy: no step")


def test_steps_that_are_all_late_by_a_constant_are_the_hosts(tmp_path: Path) -> None:
    diagnosis = diagnose_steps([recorded(tmp_path, late_ms=20.0)])
    assert diagnosis.findings[0].cause == "host_stall"
    assert diagnosis.findings[0].share > 0.4


def test_a_series_that_is_late_at_every_load_is_named_with_its_milliseconds() -> None:
    odd = "its steps are 27 ms longer than in sibling runs at any load; a slow server?"
    measured = [Measurement(str(load), None, "", {"tpot": 0.037}, {"model": "qwen3-14b"}) for load in (8, 16, 32)]
    runs = [RunPrediction(each, "", {"tpot": 0.01}, {}, "", {}, (), odd) for each in measured]
    healthy = replace(runs[0], odd="")
    diagnosis = diagnose_runs([*runs, healthy])
    (finding,) = diagnosis.findings
    assert finding.evidence == "3 runs: its steps are 27 ms longer than in sibling runs at any load"
    assert finding.lost_s == pytest.approx(0.027)
    assert steps_document(diagnosis)["causes"][0]["cause"] == "host_stall"
