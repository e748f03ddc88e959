"""Scores and intervals."""

import math

import pytest

from windtunnel.metrics.accuracy import score
from windtunnel.metrics.uncertainty import Spread, interval

SPREAD = Spread(p10=0.9, p50=1.0, p90=1.2, num_runs=50)


def test_a_score_takes_sizes_for_the_median_and_signs_for_the_bias() -> None:
    scored = score([0.1, -0.3, -0.2, float("nan")])
    assert scored is not None
    assert (scored.num_runs, scored.median, scored.bias) == (3, pytest.approx(0.2), pytest.approx(-0.2))
    assert scored.p90 == pytest.approx(0.28)
    assert score([math.nan]) is None


def test_an_interval_is_the_spread_where_all_was_measured() -> None:
    scored = interval(10.0, SPREAD, 0, {"measured": 1.0})
    assert (scored.low, scored.high) == (pytest.approx(9.0), pytest.approx(12.0))


def test_what_is_less_sure_widens_the_interval() -> None:
    inside = interval(10.0, SPREAD, 0, {"measured": 1.0})
    outside = interval(10.0, SPREAD, 1, {"measured": 1.0})
    guessed = interval(10.0, SPREAD, 0, {"measured": 0.5, "roofline": 0.5})
    noisy = interval(10.0, SPREAD, 0, {"measured": 1.0}, sampling_error=0.2)
    for wider in (outside, guessed, noisy):
        assert wider.low < inside.low
        assert wider.high > inside.high


def test_an_interval_holds_its_prediction_where_measured_values_lie_on_one_side() -> None:
    slower = Spread(p10=1.7, p50=2.7, p90=9.0, num_runs=40)
    scored = interval(10.0, slower, 0, {"measured": 1.0})
    assert (scored.low, scored.high) == (pytest.approx(10.0), pytest.approx(90.0))
    faster = interval(10.0, Spread(p10=0.5, p50=0.6, p90=0.8, num_runs=40), 0, {"measured": 1.0})
    assert (faster.low, faster.high) == (pytest.approx(5.0), pytest.approx(10.0))
