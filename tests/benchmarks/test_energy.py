"""The power of a few of ML.ENERGY's runs, whose rows are among those that the curves are fitted to."""

from pathlib import Path

import pytest

from energy import PoweredRow, fitted, powered
from mlenergy import read_rows
from windtunnel.metrics.power import PowerCurve, curve_of
from windtunnel.serving.priced_deployments import PricedDeployments


@pytest.mark.full
def test_measured_power_is_predicted_and_its_curve_found_again(reference: Path) -> None:
    rows, histograms = read_rows(reference)
    estimator_of = PricedDeployments().estimator
    model = "meta-llama/Llama-3.1-8B-Instruct"
    chosen = [row for row in rows if row["model_id"] == model and row["gpu_model"] == "H100"]
    found = [powered(row, histograms, estimator_of) for row in chosen[:6]]
    runs = [run for run in found if isinstance(run, PoweredRow)]
    assert len(runs) == 6
    for run in runs:
        assert run.fraction(curve_of("hopper"), run.slower) == pytest.approx(run.measured_fraction, rel=0.25)
    refit = fitted(runs)
    errors = [run.fraction(refit, run.slower) / run.measured_fraction - 1 for run in runs]
    assert max(map(abs, errors)) < 0.06
    flat = PowerCurve(steps=1.0, memory=0.0, compute=0.0)
    assert [run.fraction(flat) for run in runs] == [1.0] * 6
