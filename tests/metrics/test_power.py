"""The draw of a device by what its steps read and compute, and what that is at the meter."""

import numpy as np
import pytest

from windtunnel.errors import InputError
from windtunnel.metrics.power import PowerCurve, PowerModel, PowerTerms, clock_share, curve_of, power_of, waited


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


def test_the_clock_follows_the_power_above_what_a_step_always_draws() -> None:
    """MLPerf Inference 4.1, GPT-J in samples a second of a device: H200 has 36.4 and, at half its power, 23.7. What
    arithmetic that leaves of the time gives H100 NVL's 25.6 and H100 PCIe's 23.8 from H100 SXM's 35.8."""
    arithmetic = (36.4 / 23.7 - 1) / (1 / clock_share(0.5, "hopper") - 1)
    assert 0.6 < arithmetic < 0.8
    for watts, num_sms, rate in ((400, 132, 25.6), (350, 114, 23.8)):
        share = clock_share(watts / num_sms / (700 / 132), "hopper") * num_sms / 132
        assert 35.8 / (1 - arithmetic + arithmetic / share) == pytest.approx(rate, rel=0.03)
    assert clock_share(1.0, "hopper") == clock_share(1.4, "hopper") == 1.0
    with pytest.raises(InputError, match="clock"):
        clock_share(0.4, "hopper")


def test_arithmetic_slows_as_the_clock_at_the_limit() -> None:
    """Prompts on RTX 3090 ran at 0.60 of their rate with 200 of 350 W."""
    assert 1 / PowerTerms(limit_w=200.0).slower(350.0, 1.0, "ampere") == pytest.approx(0.60, rel=0.02)
    assert PowerTerms().slower(None, 1.0, "ampere") == 1.0
    slower = PowerTerms(limit_w=500.0).slower(700.0, 1.0, "hopper")
    assert slower == pytest.approx(1 / clock_share(5 / 7, "hopper"))
    card = PowerTerms(limit_w=360.0).slower(400.0, 4 / 7, "hopper")
    assert card == pytest.approx(clock_share(4 / 7, "hopper") / clock_share(3.6 / 7, "hopper"))
    assert PowerTerms(limit_w=400.0).slower(400.0, 4 / 7, "hopper") == 1.0


@pytest.mark.parametrize(
    ("limit_w", "design_w", "power_share"),
    [(150.0, 350.0, 1.0), (351.0, 350.0, 1.0), (300.0, None, 1.0), (340.0, 400.0, 4 / 7)],
)
def test_limits_beyond_the_law_are_refused(limit_w: float, design_w: float | None, power_share: float) -> None:
    with pytest.raises(InputError, match=r"power\.limit_w"):
        PowerTerms(limit_w=limit_w).slower(design_w, power_share, "hopper")


def test_devices_that_waited_are_told_from_slow_ones() -> None:
    """Llama 3.1 8B on one B200 of ML.ENERGY, 128 clients: 2.9 times as slow as priced at 866 W, and 449 W measured."""
    assert waited(449.0, slow_w=536.0, predicted_w=866.0, idle_w=150.0, slower=2.86)  # idle meanwhile: 400 W
    assert not waited(530.0, slow_w=536.0, predicted_w=866.0, idle_w=150.0, slower=2.86)
    assert not waited(684.0, slow_w=488.0, predicted_w=600.0, idle_w=150.0, slower=1.74)  # DeepSeek-V3.1, 8 x B200
