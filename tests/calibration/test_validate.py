"""What is said about a run whose prediction is off: what is known, the surest first."""

from __future__ import annotations

import pytest

from windtunnel.calibration.measured_runs import Measurement
from windtunnel.calibration.validate import RunPrediction
from windtunnel.serving.scenario import scenario_from


def prediction(
    labels: dict[str, str], facts: dict[str, float], settings_assumed: bool = False, remarks: tuple[str, ...] = ()
) -> RunPrediction:
    raw = {
        "model": "llama-3.1-8b",
        "deployment": {"device": "h100_sxm", "settings_assumed": settings_assumed},
        "workload": {
            "arrivals": {"type": "poisson", "rate_per_s": 1.0},
            "input_tokens": 8,
            "output_tokens": 8,
            "num_requests": 1,
        },
    }
    measurement = Measurement("run", scenario_from(raw, "run"), "", {"tpot": 1.0}, labels)
    return RunPrediction(measurement, "", {"tpot": 2.0}, {}, "", facts, remarks)


@pytest.mark.parametrize(
    ("labels", "facts", "settings_assumed", "expected"),
    [
        ({"odd": "debug_run", "unmodelled": "dllm 4"}, {"scaled": 0.9}, True, "the record calls it odd: debug run"),
        ({"unmodelled": "dllm 4"}, {"scaled": 0.9, "preemptions": 1}, True, "settings of server and client were not"),
        ({"unmodelled": "dllm 4"}, {"scaled": 0.9, "host": 0.5}, False, "90% of device time beyond measured shapes"),
        ({"unmodelled": "dllm 4"}, {"host": 0.5}, False, "50% of the time is the host's"),
        (
            {"unmodelled": "dllm 4"},
            {"host": 0.1},
            False,
            "recorded, not simulated: dllm 4; outside the calibration: version 9 was",
        ),
        ({}, {"host": 0.1}, False, "outside the calibration: version 9 was not among the runs"),
    ],
)
def test_a_reason_says_the_surest_of_what_is_known(
    labels: dict[str, str], facts: dict[str, float], settings_assumed: bool, expected: str
) -> None:
    one = prediction(labels, facts, settings_assumed, remarks=("version 9 was not among the runs",))
    assert one.reason.startswith(expected)


def test_nothing_known_is_no_reason() -> None:
    assert prediction({}, {"host": 0.1, "kv_peak": 0.5}).reason == ""
