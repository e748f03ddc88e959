"""Arrivals of requests: an open loop of a rate, bursts, a curve or a file, or a closed loop of clients."""

from functools import partial
from itertools import pairwise
from typing import Annotated, Literal

from windtunnel.schema import NonNegative, Positive, Schema, check_between, check_positive

MAX_REQUESTS = 100_000_000
MIN_CV, MAX_CV = 0.001, 1000
MIN_RATE_PER_S, MAX_RATE_PER_S = 1e-9, 10**9

Rate = Annotated[float, check_positive, partial(check_between, MIN_RATE_PER_S, MAX_RATE_PER_S)]
Cv = Annotated[float, partial(check_between, MIN_CV, MAX_CV)]
Count = Annotated[int, partial(check_between, 1, MAX_REQUESTS)]
"""A number of requests or clients."""


class Poisson(Schema, tag="poisson", tag_field="type"):
    """Open loop with independent exponential gaps, the first one before the first request.

    `vllm bench serve --request-rate` draws the same, then stretches all times so that the last is num_requests / rate.
    """

    rate_per_s: Rate


class Gamma(Schema, tag="gamma", tag_field="type"):
    """Open loop with independent gamma gaps: burstier than Poisson where cv > 1, smoother where cv < 1."""

    rate_per_s: Rate
    cv: Cv
    """Standard deviation of the gaps over their mean, 0.001 to 1000. vLLM's `--burstiness` is 1 / cv^2."""


class Static(Schema, tag="static", tag_field="type"):
    """Open loop with equal gaps, the first request at 0 s."""

    rate_per_s: Rate


class Burst(Schema, tag="burst", tag_field="type"):
    """Open loop with groups of requests at one time, the first at 0 s. By default all requests come at once."""

    num_per_burst: Count | None = None
    interval_s: Positive | None = None

    def __post_init__(self) -> None:
        if (self.num_per_burst is None) != (self.interval_s is None):
            raise ValueError("num_per_burst and interval_s must be given together")
        super().__post_init__()


class ClosedLoop(Schema, tag="closed_loop", tag_field="type"):
    """A benchmark client that keeps `concurrency` requests under way: when one completes, it sends the next.

    As in `vllm bench serve --max-concurrency`, a request is sent once it is released and a slot is free.
    Warm-up requests are not among `num_requests`; they are copies of the first one, pass through as many slots, and the
    measured requests are released when the last of them has finished.
    Source: https://github.com/vllm-project/vllm, `vllm/benchmarks/serve.py`, `benchmark`, at commit 009e6d4a.
    """

    concurrency: Count
    num_warmup_requests: Annotated[int, partial(check_between, 0, MAX_REQUESTS)] = 0
    rate_per_s: Rate | None = None
    """Release rate: an open loop in which `concurrency` caps the requests under way; None releases every request at
    0 s."""
    cv: float = 1
    """Coefficient of variation of the gaps between releases, as in `Gamma`: 1 is Poisson, 0 equal gaps."""

    def check(self) -> None:
        if self.rate_per_s is None and self.cv != 1:
            raise ValueError(f"cv is {self.cv}, but without rate_per_s all requests are released at 0 s")
        if self.cv != 0:
            check_between(MIN_CV, MAX_CV, cv=self.cv)


class RatePoint(Schema):
    """The arrival rate at one time of a `RateCurve`."""

    at_s: NonNegative
    rate_per_s: Annotated[float, partial(check_between, 0, MAX_RATE_PER_S)]


LEAST_RATE_PER_S = 1e-9
"""One request in 30 years; integrals of far smaller rates lose their digits."""


class RateCurve(Schema, tag="curve", tag_field="type"):
    """Open loop whose rate is linear between `points` and repeats after `period_s`, where one is given.

    A process of unit rate is warped in time, so that scaling or reshaping the curve moves the same requests: the k-th
    arrives when the integral of the rate reaches the k-th unit time. Without a period the first and the last rate hold
    before and after the points; with one the line continues from the last point to the first of the next period.
    Source: time rescaling of a point process, Cinlar, Introduction to Stochastic Processes (1975), section 4.7.
    """

    points: tuple[RatePoint, ...]
    period_s: Positive | None = None
    cv: Cv = 1.0
    """Coefficient of variation of the unit process's gamma gaps; 1 is Poisson."""
    scale: Positive = 1.0
    """Factor on every rate."""

    def check(self) -> None:
        if not self.points:
            raise ValueError("points is empty")
        times_s = [point.at_s for point in self.points]
        if any(after <= before for before, after in pairwise(times_s)):
            raise ValueError("the points of a rate curve must be in order of at_s, no two at the same time")
        if self.period_s is not None and times_s[-1] >= self.period_s:
            raise ValueError(f"the point at {times_s[-1]:g} s is not within the period of {self.period_s:g} s")
        rates = [point.rate_per_s for point in self.points]
        if max(rates) == 0 or (self.period_s is None and rates[-1] == 0):
            raise ValueError("the rate stays at 0, so that the requests never end: raise the last point's rate_per_s")
        if lost := [rate for rate in rates if 0 < rate < LEAST_RATE_PER_S]:
            raise ValueError(f"a rate of {lost[0]:g} a second is plainly 0: give 0, or at least {LEAST_RATE_PER_S:g}")


class Recorded(Schema, tag="recorded", tag_field="type"):
    """Arrival times of a file, independent of where lengths come from."""

    path: str
    """A requests file (see `Trace.path`)."""
    column: str | None = None
    """Column of times; None takes that of the file's layout."""
    unit: Literal["s", "ms", "us", "ns"] = "s"
    start_s: NonNegative = 0.0
    """Skip the arrivals before this time; it becomes 0 s."""
    time_scale: Positive = 1.0


Arrivals = Poisson | Gamma | Static | Burst | ClosedLoop | RateCurve | Recorded
