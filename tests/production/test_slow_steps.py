"""Recorded steps with compilation and stalls, and series of runs that are late by a constant."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from production.recorded_steps import recorded
from windtunnel.calibration.measured_runs import Measurement
from windtunnel.calibration.validate import RunPrediction
from windtunnel.production.slow_steps import diagnose_runs, diagnose_steps
from windtunnel.report.slow_steps import steps_document, verdict

NUM_STEPS = 200


def test_the_first_steps_that_take_seconds_are_compilation_and_later_ones_stalls(tmp_path: Path) -> None:
    diagnosis = diagnose_steps([recorded(tmp_path, NUM_STEPS, slow_ms={0: 1612.0, 3: 803.0, 120: 400.0})])
    found = {finding.cause: finding for finding in diagnosis.findings}
    assert set(found) == {"compilation", "stall"}
    assert "2 steps of up to 1,612 ms" in found["compilation"].evidence
    assert found["compilation"].lost_s == pytest.approx(2.4, rel=0.02)
    assert sum(finding.share for finding in diagnosis.findings) < 1
    assert verdict(diagnosis).startswith("Compilation")


def test_decode_steps_that_may_wait_for_prompts_of_unrecorded_ranks_are_no_stalls(tmp_path: Path) -> None:
    """Decode steps nearly as long as those with prompts are stalls where every rank is recorded."""
    ranks = {"model": "Qwen/Qwen1.5-MoE-A2.7B", "attention_dp": 2, "ep": 2}
    prompts_ms = dict.fromkeys(range(0, NUM_STEPS, 6), 100.0)
    waits_ms = dict.fromkeys(range(52, NUM_STEPS, 24), 95.0)

    def found(slow_ms: dict[int, float], **options: Any) -> list[str]:
        run = recorded(tmp_path, NUM_STEPS, slow_ms=prompts_ms | slow_ms, **options)
        return [f"{finding.cause}: {finding.evidence}" for finding in diagnose_steps([run]).findings]

    assert any("stall: 7 steps" in text for text in found(waits_ms))
    assert not any("stall: " in text for text in found(waits_ms, **ranks))
    assert any("stall: 1 step of up to 900 ms" in text for text in found(waits_ms | {70: 900.0}, **ranks))


def test_steps_as_priced_raise_no_alarm(tmp_path: Path) -> None:
    diagnosis = diagnose_steps([recorded(tmp_path, NUM_STEPS, scale=1.4)])
    assert not diagnosis.findings
    assert verdict(diagnosis).startswith("Healthy: no step")


def test_steps_that_are_all_late_by_a_constant_are_the_hosts(tmp_path: Path) -> None:
    diagnosis = diagnose_steps([recorded(tmp_path, NUM_STEPS, late_ms=20.0, model="qwen2.5-0.5b")])
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
