"""The draw of a device by what its steps read and compute, and what that is at the meter."""

import numpy as np
import pytest

from windtunnel.errors import InputError
from windtunnel.metrics.power import PowerCurve, PowerModel, PowerTerms, curve_of, power_of


def test_a_step_draws_by_its_use_and_at_most_the_limit() -> None:
    curve = PowerCurve(steps=0.25, memory=0.5, compute=1.0)
    fractions = curve.fraction(np.array([0.0, 0.5, 0.5, 1.0]), np.array([0.0, 0.0, 0.04, 0.81]))
    assert fractions.tolist() == pytest.approx([0.25, 0.5, 0.7, 1.0])


def test_an_architecture_that_was_not_measured_takes_the_curve_of_all_that_were() -> None:
    assert curve_of("hopper") != curve_of("blackwell")
    assert curve_of("rubin") == curve_of("cdna3")


def test_hosts_and_the_data_centre_are_on_the_meter() -> None:
    model = PowerModel(idle_w=100.0, busy_w=500.0, terms=PowerTerms(host_w=200.0, pue=1.5))
    assert model.at(0.0) == pytest.approx(450.0)
    assert model.at(0.5) == pytest.approx(750.0)


def test_energy_of_tokens_requests_and_the_grid() -> None:
    power = power_of(3600.0, 10.0, 5, 100, PowerTerms(carbon_g_per_kwh=400.0))
    assert power is not None
    assert (power.energy_j, power.output_token_j, power.request_j) == (36000.0, 360.0, 7200.0)
    assert power.carbon_g == pytest.approx(4.0)
    without = power_of(3600.0, 10.0, 5, 100, PowerTerms())
    assert without is not None
    assert without.carbon_g is None
    assert power_of(None, 10.0, 5, 100, PowerTerms()) is None


def test_arithmetic_slows_by_the_root_of_the_limit() -> None:
    """The RTX 3090's prompts ran at 0.94 and 0.85 of their rate with 300 and 250 of 350 W."""
    for limit_w, rate in ((300.0, 0.943), (250.0, 0.853)):
        assert 1 / PowerTerms(limit_w=limit_w).slower(350.0) == pytest.approx(rate, rel=0.02)
    assert PowerTerms().slower(None) == 1.0


@pytest.mark.parametrize(("limit_w", "design_w"), [(200.0, 350.0), (351.0, 350.0), (300.0, None)])
def test_limits_beyond_the_law_are_refused(limit_w: float, design_w: float | None) -> None:
    with pytest.raises(InputError, match=r"power\.limit_w"):
        PowerTerms(limit_w=limit_w).slower(design_w)
