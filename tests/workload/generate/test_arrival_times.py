from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from windtunnel.errors import InputError
from windtunnel.schema import decode
from windtunnel.workload.arrivals import RateCurve
from windtunnel.workload.generate.arrival_times import _times_at, _units_at
from windtunnel.workload.generate.requests import generate
from windtunnel.workload.schema import Workload

DAY: dict[str, Any] = {
    "type": "curve",
    "period_s": "24h",
    "points": [{"at_s": "4h", "rate_per_s": 2}, {"at_s": "14h", "rate_per_s": 12}],
}


def times(arrivals: dict[str, Any], **ends: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    raw = {"arrivals": arrivals, "input_tokens": 1, "output_tokens": 1, **ends}
    return generate(decode(raw, Workload), 3).arrival_s


def test_a_day_has_the_rate_of_its_curve() -> None:
    arrival_s = times(DAY, duration_s="48h")
    counts, _ = np.histogram(arrival_s, np.arange(0, 49) * 3600.0)
    middle = (np.arange(48) + 0.5) % 24
    # Up from 2 at 4 h to 12 at 14 h, down again to 2 at 28 h.
    since_top = (middle - 14) % 24
    rate = np.where((middle >= 4) & (middle < 14), 2 + (middle - 4), 12 - since_top / 14 * 10)
    assert np.abs(counts - rate * 3600).max() < 5 * np.sqrt(12 * 3600)


def test_a_constant_curve_is_poisson() -> None:
    curve = {"type": "curve", "points": [{"at_s": 0, "rate_per_s": 5}]}
    assert np.allclose(times(curve, num_requests=1000), times({"type": "poisson", "rate_per_s": 5}, num_requests=1000))


def test_scaling_a_curve_without_a_change_only_stretches() -> None:
    curve = {"type": "curve", "points": [{"at_s": 0, "rate_per_s": 5}], "cv": 2}
    assert np.allclose(times({**curve, "scale": 2}, num_requests=500) * 2, times(curve, num_requests=500))


def test_a_rate_of_zero_lets_nothing_through() -> None:
    points = [{"at_s": 0, "rate_per_s": 4}, {"at_s": 99.99, "rate_per_s": 4}, {"at_s": 100, "rate_per_s": 0}]
    points += [{"at_s": 199.99, "rate_per_s": 0}, {"at_s": 200, "rate_per_s": 4}]
    arrival_s = times({"type": "curve", "points": points}, num_requests=2000)
    assert not np.any((arrival_s > 100) & (arrival_s < 199.99))
    assert np.all(np.diff(arrival_s) >= 0)
    assert arrival_s[-1] == pytest.approx(2000 / 4 + 100, rel=0.1)


@given(
    rates=st.lists(st.just(0.0) | st.floats(1e-9, 100), min_size=1, max_size=5),
    gaps=st.lists(st.floats(0.5, 50), min_size=5, max_size=5),
    first_s=st.floats(0, 20),
    periodic=st.booleans(),
    units=st.lists(st.floats(0, 1e4), min_size=1, max_size=20),
)
@example(rates=[0.0, 1.0], gaps=[5.0] * 5, first_s=0.0, periodic=False, units=[5e-324])
def test_times_and_units_are_inverse(
    rates: list[float], gaps: list[float], first_s: float, periodic: bool, units: list[float]
) -> None:
    rates[-1] = max(rates[-1], 1.0)
    times_s = first_s + np.concatenate([[0.0], np.cumsum(gaps)])[: len(rates)]
    points = [{"at_s": float(t), "rate_per_s": float(r)} for t, r in zip(times_s, rates, strict=True)]
    raw: dict[str, Any] = {"points": points}
    if periodic:
        raw["period_s"] = float(times_s[-1] + gaps[-1])
    curve = decode(raw, RateCurve)
    unit = np.array(sorted(units))
    time_s = _times_at(curve, unit)
    assert np.all(np.diff(time_s) >= -1e-9 * max(float(time_s[-1]), 1.0))
    assert np.allclose(_units_at(curve, time_s), unit, rtol=1e-6, atol=1e-5)


def test_recorded_times_under_drawn_lengths(tmp_path: Path) -> None:
    path = tmp_path / "times.csv"
    path.write_text("when,what\n100,a\n250,b\n400,c\n")
    arrivals = {"type": "recorded", "path": str(path), "column": "when", "unit": "ms", "time_scale": 2}
    assert list(times(arrivals)) == pytest.approx([0.2, 0.5, 0.8])
    assert list(times({**arrivals, "start_s": "0.2s"})) == pytest.approx([0.1, 0.4])
    with pytest.raises(InputError, match=r"asks for 9 requests, but .* has 3 arrivals"):
        times(arrivals, num_requests=9)
