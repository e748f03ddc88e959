"""A workload at any load: the same requests, sent faster or slower."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from windtunnel.errors import InputError
from windtunnel.metrics.limits import Limit
from windtunnel.serving.scenario import Scenario
from windtunnel.serving.setup.fleet_plan import comes_and_goes
from windtunnel.workload.arrivals import Arrivals, Burst, ClosedLoop, Gamma, Poisson, RateCurve, Recorded, Static
from windtunnel.workload.generate.requests import RequestArrays, generate
from windtunnel.workload.schema import Workload


def own_load(workload: Workload, seed: int = 0) -> float:
    """Return the mean request rate of a workload, or its sessions a second, or the concurrency of a closed loop.
    InputError where it has no load: all requests are sent at once."""
    match workload.arrivals:
        case ClosedLoop(concurrency=concurrency):
            return float(concurrency)
        case Poisson(rate_per_s=rate_per_s) | Gamma(rate_per_s=rate_per_s) | Static(rate_per_s=rate_per_s):
            if not workload.tenants:
                return rate_per_s  # of sessions, where each arrival begins one
    requests = generate(workload, seed)
    span_s = float(requests.arrival_s[-1] - min(0.0, requests.arrival_s[0]))
    if span_s <= 0:
        raise InputError(
            "all requests of the workload are sent at once: there is no rate to change",
            "give arrivals with a rate, as workload.arrivals: {type: poisson, rate_per_s: 1}; simulate, whatif and "
            "search with load: given say how long the batch takes",
        )
    return requests.num_requests / span_s


LEAST_STREAM = 3.0
"""Shortest span of a stream in mean end-to-end times: in less, a deployment that takes all requests in at once does not
appear to fall behind."""
AMPLE_STREAM = 8.0
"""Span of a stream, in mean end-to-end times, from which the answer hardly depends on it: that of 3 is up to 10% above
the load sustained for hours, that of 8 up to 4%."""
MOST_REQUESTS = 32_768
"""Requests that a stream is lengthened to at most."""
STEADY = 0.02
"""Relative change of a load with more requests up to which it counts as steady."""
LEAST_TAIL = 100
"""Requests beyond a limited percentile from which its tail counts as filled: their number then varies by 10%."""
MOST_OF_MANY = 16_000
"""Requests that a stream is lengthened to at most for each of many deployments, unless it would still be a burst: twice
as many change a load by 1% and take twice the time."""
SETTLED_REQUESTS = 10_000
"""Requests from which a stream that was given is not lengthened only to see whether the load changes."""


def is_drawn(workload: Workload) -> bool:
    """Whether requests are drawn one by one, so that there may be more of them."""
    drawn = Poisson | Gamma | Static | ClosedLoop
    return isinstance(workload.arrivals, drawn) and workload.num_requests is not None


def lengthened(workload: Workload, num_requests: int, most: int = MOST_REQUESTS) -> int | None:
    """Return the requests of a stream four times as long, `most` of them; None where there can be no more."""
    if not is_drawn(workload) or num_requests >= most:
        return None
    return min(4 * num_requests, most)


def is_steady(num_requests: int, times: float, limits: Sequence[Limit], change: float | None) -> bool:
    """Whether a load would hardly be another with more requests.

    Args:
        times: span of the stream, in mean end-to-end times.
        limits: a limited percentile needs `LEAST_TAIL` requests beyond it; those between tokens fill sooner.
        change: relative change of the load when the stream was last lengthened; None: it never was.
    """
    tails = [1 - limit.quantile for limit in limits if limit.metric != "itl" and 0 < limit.quantile < 1]
    fewest = min(LEAST_TAIL / min(tails, default=1.0), MOST_REQUESTS)
    settled = num_requests >= SETTLED_REQUESTS if change is None else abs(change) <= STEADY
    return settled and times >= AMPLE_STREAM and num_requests >= round(fewest)


def burst_of(num_requests: int, times: float) -> tuple[int, int] | None:
    """Return the requests of a stream that is over too soon, in so many end-to-end times, and how many, in two digits,
    would show a steady load; None where it lasts long enough."""
    if times >= LEAST_STREAM or not num_requests:
        return None
    needed = num_requests * AMPLE_STREAM / max(times, 0.01)
    digit = 10 ** max(math.floor(math.log10(needed)) - 1, 0)
    return num_requests, math.ceil(needed / digit) * digit


def are_sent_at_once(workload: Workload) -> bool:
    """Whether the workload is one batch: all requests are sent at 0 s."""
    is_burst = isinstance(workload.arrivals, Burst) and workload.arrivals.interval_s is None
    return is_burst and not workload.tenants and workload.clients is None


def is_closed(workload: Workload) -> bool:
    """Whether the load is a number of clients that wait for their answers."""
    return isinstance(workload.arrivals, ClosedLoop)


def check_has_one_load(workload: Workload) -> None:
    """Raise InputError where requests arrive at a rate and their concurrency is capped too."""
    if isinstance(workload.arrivals, ClosedLoop) and workload.arrivals.rate_per_s is not None:
        raise InputError(
            "the workload has a rate and a concurrency, and its load could be either",
            "leave out the concurrency to seek the greatest rate, or the rate to seek the most clients",
        )


def check_keeps_time(scenario: Scenario) -> None:
    """Raise InputError where replicas come and go by the clock, and a greater load would end before they do."""
    workload = scenario.workload
    is_timed = isinstance(workload.arrivals, Poisson | Gamma | Static | RateCurve) and not workload.tenants
    is_endless = workload.num_requests is None and (workload.trace is None or workload.trace.order == "resampled")
    if comes_and_goes(scenario.deployment) and not (is_timed and is_endless and workload.duration_s is not None):
        raise InputError(
            "replicas come and go by the clock, and the greater the load, the sooner these requests are over",
            "for a capacity give workload.duration_s in place of num_requests; at the load as it is, ask windtunnel "
            "whatif, or search with load: given",
        )


def at_load(workload: Workload, load: float, usual_load: float) -> Workload:
    """Return `workload` at a load, in the unit of `own_load`, in place of its usual one."""
    change = msgspec.structs.replace
    if workload.clients is not None:
        return change(workload, clients=change(workload.clients, rate_per_s=load))
    factor = load / usual_load
    changed: dict[str, Any] = {}
    if workload.arrivals is not None:
        changed["arrivals"] = _faster(workload.arrivals, factor, None if workload.tenants else load)
    elif workload.trace is not None:
        changed["trace"] = change(workload.trace, time_scale=workload.trace.time_scale / factor)
    changed["tenants"] = tuple(_faster_tenant(tenant, factor) for tenant in workload.tenants)
    return change(workload, **changed)


def _faster_tenant(tenant: Any, factor: float) -> Any:
    if tenant.arrivals is not None:
        return msgspec.structs.replace(tenant, arrivals=_faster(tenant.arrivals, factor, None))
    if tenant.trace is not None and tenant.share is None:
        trace = msgspec.structs.replace(tenant.trace, time_scale=tenant.trace.time_scale / factor)
        return msgspec.structs.replace(tenant, trace=trace)
    return tenant


def _faster(arrivals: Arrivals, factor: float, load: float | None) -> Arrivals:
    """Return arrivals `factor` times as fast, or of the rate `load`."""
    change = msgspec.structs.replace
    if isinstance(arrivals, ClosedLoop):
        return change(arrivals, concurrency=max(round(arrivals.concurrency * factor), 1))
    if isinstance(arrivals, RateCurve):
        return change(arrivals, scale=arrivals.scale * factor)
    if isinstance(arrivals, Recorded):
        return change(arrivals, time_scale=arrivals.time_scale / factor)
    if isinstance(arrivals, Burst):
        return change(arrivals, interval_s=(arrivals.interval_s or 0.0) / factor or None)
    return change(arrivals, rate_per_s=arrivals.rate_per_s * factor if load is None else load)


@dataclass(frozen=True, eq=False)
class Stream:
    """The requests of one workload and seed, at any load: common random numbers.

    Lengths, and gaps but for their scale, are the same at every load and for every deployment.
    """

    workload: Workload
    seed: int
    usual_load: float
    """The workload's own load."""
    unit: RequestArrays
    """The requests at a load of 1."""
    stretches: bool
    """Whether a load only stretches the times of `unit`."""

    @property
    def is_closed(self) -> bool:
        return is_closed(self.workload)

    @property
    def requests_per_arrival(self) -> float:
        """Requests that one arrival brings: those of a session where the load counts sessions, else 1."""
        drawn = isinstance(self.workload.arrivals, Poisson | Gamma | Static) and not self.workload.tenants
        if not drawn or self.workload.sessions is None or self.unit.session is None:
            return 1.0
        return self.unit.num_requests / np.unique(self.unit.session[self.unit.num_warmup :]).size

    def has_requests_of(self, other: "Stream") -> bool:
        """Whether another stream has the same requests: nothing in the workload is drawn by a seed."""
        columns: list[list[Any]] = [[], []]
        for stream, known in zip((self, other), columns, strict=True):
            stream.unit.mapped(lambda _, column, known=known: known.append(column) or column)  # type: ignore[misc]
        return all(map(np.array_equal, *columns))

    def at(self, load: float) -> RequestArrays:
        """Return the requests at `load`, the same bytes as those of the workload that `at_load` gives."""
        if self.is_closed:
            return replace(self.unit, concurrency=round(load))
        if self.stretches:
            return replace(self.unit, arrival_s=self.unit.arrival_s / load)
        return generate(at_load(self.workload, load, self.usual_load), self.seed)

    def at_once(self) -> RequestArrays:
        """Return the requests, all sent at 0 s."""
        return replace(self.unit, arrival_s=np.zeros_like(self.unit.arrival_s), concurrency=0)


def stream_of(workload: Workload, seed: int, num_requests: int | None = None, is_fixed: bool = False) -> Stream:
    """Build the stream of a workload, or of its first `num_requests`.

    Args:
        is_fixed: the load stays the workload's own, so that it may be a batch, whose `usual_load` is 1.
    """
    usual_load = 1.0 if is_fixed and are_sent_at_once(workload) else own_load(workload, seed)
    if num_requests is not None:
        workload = msgspec.structs.replace(workload, num_requests=num_requests)
    simple = isinstance(workload.arrivals, Poisson | Gamma | Static) and not workload.tenants
    stretches = simple and workload.sessions is None and workload.duration_s is None
    unit = generate(workload if is_closed(workload) else at_load(workload, 1.0, usual_load), seed)
    return Stream(workload, seed, usual_load, unit, stretches)
