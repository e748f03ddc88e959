"""Series of runs whose steps are late by a constant are flagged; slow models, noise and single runs are not."""

from collections.abc import Callable

import pytest

from windtunnel.calibration.measured_runs import Measurement
from windtunnel.calibration.validate import RunPrediction, with_odd_runs
from windtunnel.serving.scenario import scenario_from

LOADS = (8, 16, 32, 64, 128)
EXPECTED_S = {8: 0.005, 16: 0.006, 32: 0.007, 64: 0.009, 128: 0.013}


def run(
    prompt: int, load: int, late_s: float, device: str = "b200_sxm", model: str = "qwen3-14b", queue: int = 0
) -> RunPrediction:
    """Return a run with so many clients, or so many places for those clients and others that wait."""
    raw = {
        "model": model,
        "deployment": {"device": device, "engine": {"max_num_seqs": load}},
        "workload": {
            "arrivals": {"type": "closed_loop", "concurrency": load + queue},
            "input_tokens": prompt,
            "output_tokens": 100,
            "num_requests": load,
        },
    }
    labels = {"device": device, "model": model, "parallelism": "tp1", "prompt": str(prompt)}
    expected_s = EXPECTED_S[load]
    measurement = Measurement("", scenario_from(raw), "", {"tpot": expected_s + late_s}, labels)
    return RunPrediction(measurement, "", {"tpot": expected_s}, {}, "", {})


def crowd(prompt: int, late_s: Callable[[int], float]) -> list[RunPrediction]:
    """Return a series of servers with places for fewer requests than wait for them."""
    return [run(prompt, load, late_s(load), queue=1024 - load) for load in LOADS]


def flagged(runs: list[RunPrediction]) -> set[str]:
    return {one.measurement.labels["prompt"] for one in with_odd_runs(runs) if one.odd}


def series(prompt: int, late_s: Callable[[int], float], **where: str) -> list[RunPrediction]:
    return [run(prompt, load, late_s(load), **where) for load in LOADS]


def test_a_series_late_by_a_constant_is_flagged() -> None:
    runs = series(100, lambda _: 0.0005) + series(250, lambda load: 0.025 + 1e-5 * load)
    assert flagged(runs) == {"250"}
    late = with_odd_runs(runs)[-1]
    assert "its steps are 24.8 ms longer than in sibling runs at any load" in late.reason


def test_places_and_not_clients_are_the_load_where_requests_wait() -> None:
    assert flagged(crowd(100, lambda load: 1e-4 * load) + crowd(250, lambda load: 0.025 + 1e-4 * load)) == {"250"}


def test_siblings_on_another_device_do_where_there_are_none_here() -> None:
    assert flagged(series(100, lambda _: 0.0, device="h100_sxm") + series(250, lambda _: 0.025)) == {"250"}


@pytest.mark.parametrize(
    "runs",
    [
        series(100, lambda _: 0.025) + series(250, lambda _: 0.025),
        series(100, lambda _: 0.0) + series(250, lambda load: 0.0002 * load),
        series(100, lambda _: 0.0) + series(250, lambda _: 0.001),
        series(250, lambda _: 0.025),
        series(100, lambda _: 0.0, model="qwen3-8b") + series(250, lambda _: 0.025),
        [*series(100, lambda _: 0.0), run(250, 8, 0.025)],
        crowd(100, lambda load: 0.0002 * load) + crowd(250, lambda load: 0.02 + 0.0002 * load),
    ],
    ids=["all equal", "grows with the load", "small", "no siblings", "another model", "a single run", "scattered"],
)
def test_others_are_not(runs: list[RunPrediction]) -> None:
    assert not flagged(runs)
