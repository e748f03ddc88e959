"""Draws of arrival times: renewal processes, rates that change, bursts, recorded times."""

import math
from collections.abc import Callable

import numpy as np

from windtunnel.errors import InputError
from windtunnel.limits import check_size
from windtunnel.workload import arrivals as schema
from windtunnel.workload.generate.draws import Seconds
from windtunnel.workload.schema import Trace, TraceColumns
from windtunnel.workload.traces.requests import read_requests

BLOCK = 1 << 20
"""Number of times warped at once, so that tens of millions of them need no temporary arrays of that length."""


def draw_times(
    arrivals: schema.Arrivals, limit: int | None, duration_s: float | None, rng: np.random.Generator
) -> Seconds:
    """Draw the arrival times of `limit` requests, or at least of all those before `duration_s`.

    One of the two limits is given; a closed loop and a single burst have `limit` (`Workload` checks both).
    """
    match arrivals:
        case schema.Static(rate_per_s=rate_per_s) | schema.ClosedLoop(rate_per_s=float() | int() as rate_per_s, cv=0):
            return np.arange(_enough(limit, duration_s, rate_per_s)) / rate_per_s
        case schema.Burst(num_per_burst=int(num_per_burst), interval_s=interval_s) if interval_s is not None:
            enough = _enough(limit, duration_s, num_per_burst / interval_s, num_per_burst)
            return np.asarray(np.arange(enough) // num_per_burst * interval_s, np.float64)
        case schema.Poisson(rate_per_s=rate_per_s):
            return _renewals(rng.standard_exponential, rate_per_s, limit, duration_s)
        case (
            schema.Gamma(rate_per_s=rate_per_s, cv=cv)
            | schema.ClosedLoop(rate_per_s=float() | int() as rate_per_s, cv=cv)
        ):
            return _renewals(gamma_gaps(rng, cv), rate_per_s, limit, duration_s)
        case schema.RateCurve():
            # Unit-rate times, warped by the inverse of L(t), the rate's integral: if u_k is a Poisson process of
            # rate 1, L^-1(u_k) is one of rate L'(t) (Cinlar, 1975, section 4.7).
            end_units = None if duration_s is None else float(_units_at(arrivals, np.array([duration_s]))[0])
            times = _renewals(gamma_gaps(rng, arrivals.cv), 1.0, limit, end_units)
            for first in range(0, times.size, BLOCK):
                block = slice(first, first + BLOCK)
                times[block] = _times_at(arrivals, times[block])
            return times
        case schema.Recorded():
            return _recorded_times(arrivals, limit)
        case _:
            assert limit is not None, "Workload checks that requests released at once are counted"
            return np.zeros(limit)


def gamma_gaps(rng: np.random.Generator, cv: float) -> Callable[[int], Seconds]:
    """Return a function that draws gaps of mean 1 and standard deviation `cv`."""
    if cv == 1:
        return rng.standard_exponential
    shape = 1 / cv**2
    return lambda size: rng.standard_gamma(shape, size) / shape


def _recorded_times(arrivals: schema.Recorded, limit: int | None) -> Seconds:
    columns = TraceColumns(arrival=arrivals.column, arrival_unit=arrivals.unit)
    arrival_s = read_requests(Trace(path=arrivals.path, columns=columns), ("arrival",), with_media=False).arrival_s
    assert arrival_s is not None, "the arrivals are read"
    arrival_s = (arrival_s[np.searchsorted(arrival_s, arrivals.start_s) :] - arrivals.start_s) * arrivals.time_scale
    if limit is not None and limit > len(arrival_s):
        raise InputError(f"the workload asks for {limit} requests, but {arrivals.path} has {len(arrival_s)} arrivals")
    return arrival_s[:limit]


def _knots(curve: schema.RateCurve) -> tuple[Seconds, Seconds, Seconds]:
    """Return times, rates and integral of one period (or of all points) from 0 s on; the last time ends it."""
    times = np.array([point.at_s for point in curve.points])
    rates = np.array([point.rate_per_s for point in curve.points]) * curve.scale
    if curve.period_s is not None:
        to_first = (curve.period_s - times[-1]) / (curve.period_s - times[-1] + times[0])
        at_zero = rates[0] if times[0] == 0 else rates[-1] + (rates[0] - rates[-1]) * to_first
        times, rates = np.append(times, curve.period_s), np.append(rates, at_zero)
    if times[0] > 0:
        before = at_zero if curve.period_s is not None else rates[0]
        times, rates = np.concatenate([[0.0], times]), np.concatenate([[before], rates])
    units = np.concatenate([[0.0], np.cumsum(np.diff(times) * (rates[1:] + rates[:-1]) / 2)])
    return times, rates, units


def _units_at(curve: schema.RateCurve, time_s: Seconds) -> Seconds:
    """Return L(t): the requests expected before each time."""
    times, rates, units = _knots(curve)
    periods = np.floor(time_s / curve.period_s) if curve.period_s is not None else np.zeros(time_s.size)
    rest_s = time_s - periods * (curve.period_s or 0.0)
    piece = np.clip(np.searchsorted(times, rest_s, side="right") - 1, 0, times.size - 1)
    within_s = rest_s - times[piece]
    slope = np.append(np.diff(rates) / np.diff(times), 0.0)
    return np.asarray(periods * units[-1] + units[piece] + (rates[piece] + slope[piece] * within_s / 2) * within_s)


def _times_at(curve: schema.RateCurve, unit: Seconds) -> Seconds:
    """Invert L: within a piece, the root of L + r t + s t^2 / 2 = u, in the form that allows s = 0."""
    times, rates, units = _knots(curve)
    periods = np.floor(unit / units[-1]) if curve.period_s is not None else np.zeros(unit.size)
    rest = unit - periods * (units[-1] if curve.period_s is not None else 0.0)
    piece = np.clip(np.searchsorted(units, rest, side="right") - 1, 0, units.size - 1)
    if curve.period_s is not None:
        piece = np.minimum(piece, units.size - 2)
    slope = np.append(np.diff(rates) / np.diff(times), 0.0)[piece]
    over = np.maximum(rest - units[piece], 0.0)
    rate_sum = rates[piece] + np.sqrt(np.maximum(rates[piece] ** 2 + 2 * slope * over, 0.0))
    return np.asarray(
        periods * (curve.period_s or 0.0)
        + times[piece]
        + np.divide(2 * over, rate_sum, out=np.zeros_like(over), where=rate_sum > 0)
    )


def _renewals(
    draw_gaps: Callable[[int], Seconds], rate_per_s: float, limit: int | None, duration_s: float | None
) -> Seconds:
    """Return running sums of independent gaps; `draw_gaps` gives gaps of mean 1, which the rate scales.

    Gaps are drawn until they pass the end: the count before a fixed time is then unbiased, whatever the first guess.
    """
    enough = _enough(limit, duration_s, rate_per_s)
    gaps = draw_gaps(enough)
    while duration_s is not None and (limit is None or len(gaps) < limit) and gaps.sum() < duration_s * rate_per_s:
        gaps = np.concatenate([gaps, draw_gaps(max(1024, enough // 8))])
    return np.cumsum(gaps[:limit]) / rate_per_s


def _enough(limit: int | None, duration_s: float | None, rate_per_s: float, num_per_burst: int = 1) -> int:
    """Return the number of requests that reach `limit`, or on average `duration_s`."""
    if duration_s is None:
        assert limit is not None, "Workload checks that it ends"
        return limit
    expected = duration_s * rate_per_s + num_per_burst + 1
    if limit is None and expected > schema.MAX_REQUESTS:
        raise InputError(
            f"the workload has about {expected:.3g} requests, but at most {schema.MAX_REQUESTS} can be simulated"
        )
    check_size(requests_drawn=expected if limit is None else min(limit, expected))
    return math.ceil(expected) if limit is None else math.ceil(min(limit, expected))
