"""Run one deployment at one load, and compare the result with the limits."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from windtunnel.compiled.arrays import Floats, Ints
from windtunnel.metrics.fleet import mean_replicas
from windtunnel.metrics.limits import Limit
from windtunnel.metrics.records import REQUEST_COLUMNS, Table, time_per_output_token_s
from windtunnel.metrics.summary import itl_distribution, queue_growth
from windtunnel.search.capacity.load import Stream
from windtunnel.serving.prepared import PreparedDeployment, users_router
from windtunnel.serving.run import GiveUp, Watch, replicas_of
from windtunnel.serving.setup.fleet_plan import FleetRun, comes_and_goes, phase_table
from windtunnel.serving.setup.frontend import client_delay_s
from windtunnel.serving.state import records as state
from windtunnel.workload.generate.requests import RequestArrays

MOST_GROWTH = 0.02
"""Largest sustainable growth of the queueing delay, seconds per second of arrivals. A queue whose arrivals are x times
its service rate grows by x - 1: a sustainable load overloads by 2% at most, the noise of a thousand requests."""
STABILITY = "queueing grows"
"""Value of `Probe.limited_by` for a load at which requests wait longer and longer."""
PATIENT_REQUESTS = 5_000
"""Shortest run that is checked for giving up; a shorter one is over before a check would pay."""


@dataclass(frozen=True, eq=False)
class Served:
    """Latencies of a run's requests, one entry per request, without the warm-up."""

    arrival_s: Floats
    queueing_s: Floats
    ttft_s: Floats
    tpot_s: Floats
    """Time per output token; NaN for a single token."""
    e2e_s: Floats
    output_tokens: Ints
    num_preemptions: int
    steps: Table
    replicas: Sequence[float]
    """Replicas of each pool that serves tokens that hold their devices, averaged over the span."""

    @property
    def stream_over_e2e(self) -> float:
        """Span of the arrivals in mean end-to-end times; a span of a few is too short for a steady load."""
        return float(np.ptp(self.arrival_s) / self.e2e_s.mean())

    def values(self, metric: str) -> Floats:
        """Return the known times of one latency."""
        times: Floats = getattr(self, f"{metric}_s")
        return times[~np.isnan(times)] if metric == "tpot" else times

    def percentiles(self, points: Sequence[int]) -> dict[str, dict[str, float]]:
        """Return latency -> percentile, such as `p90` -> seconds, for the latencies that requests have."""
        known = {name: self.values(name) for name in ("ttft", "tpot", "e2e", "queueing")}
        return {
            name: {f"p{point}": float(np.percentile(values, point)) for point in points}
            for name, values in known.items()
            if values.size
        }

    def statistic(self, limit: Limit) -> float:
        """Return the figure that `limit` bounds; 0 where there is no such time."""
        if limit.metric == "itl":
            distribution = itl_distribution(self.steps)
            return 0.0 if distribution is None else float(getattr(distribution, limit.statistic))
        values = self.values(limit.metric)
        if not values.size:
            return 0.0
        return float(values.mean()) if limit.statistic == "mean" else quantile(values, limit.quantile)


@dataclass(frozen=True, eq=False)
class Probe:
    """A load that was tried."""

    load: float
    excess: float
    """Logarithm of figure over limit, for the limit that is nearest or furthest exceeded: 0 and less passes."""
    limited_by: str
    """That limit, such as `ttft_p90`, or `STABILITY`."""
    served: Served | None
    """The run; None where it was given up."""

    @property
    def passes(self) -> bool:
        return self.excess <= 0


def probe(
    server: PreparedDeployment, stream: Stream, load: float, limits: Sequence[Limit], is_patient: bool = False
) -> Probe:
    """Serve `stream` at `load`, and compare the result with `limits` and with the growth of the queue.

    A long run is given up once it can no longer hold a limit, unless `is_patient` or its requests wait for clients:
    these are not late before they are sent.
    """
    requests = stream.at(load)
    is_short = requests.num_requests <= PATIENT_REQUESTS
    # A long run can be given up by a limit on the wait for a first token.
    waits = (limit for limit in limits if limit.metric in ("ttft", "e2e", "queueing") and limit.quantile > 0)
    patience = None if is_patient or is_short or stream.is_closed else next(waits, None)
    give_up = None if patience is None else _hopeless(patience, requests)
    served = serve_requests(server, requests, stream.seed, give_up)
    if served is None:
        assert patience is not None, "only a limit gives a run up"
        return Probe(load, math.log(2.0), patience.name, None)
    excesses = [(math.log(max(served.statistic(limit), 1e-9) / limit.most_s), limit.name) for limit in limits]
    if not stream.is_closed:
        excesses.append((math.log(max(growth(served), 1e-6) / MOST_GROWTH), STABILITY))
    excess, name = max(excesses, key=lambda pair: pair[0], default=(-math.inf, ""))
    return Probe(load, excess, name, served)


def quantile(values: Floats, share: float) -> float:
    """Return `np.percentile` but for rounding, in a fifth of its time: a run takes half a millisecond."""
    position = share * (values.size - 1)
    below = int(position)
    above = min(below + 1, values.size - 1)
    parted = np.partition(values, (below, above))
    return float(parted[below] + (parted[above] - parted[below]) * (position - below))


def growth(served: Served) -> float:
    """Return the seconds of queueing delay that each second of arrivals adds."""
    return queue_growth(served.arrival_s, served.queueing_s)


def serve_requests(
    server: PreparedDeployment, requests: RequestArrays, seed: int, give_up: GiveUp | None = None
) -> Served | None:
    """Serve requests of the lengths that `server` was prepared for; None where the run was given up.

    Random faults follow the `seed` of the stream.
    """
    fleet, router = server.start_fleet(requests.arrival_s.size, seed), users_router(server.scenario.deployment)
    run = server.for_clients(requests).serve(requests, fleet, router, Watch(give_up=give_up))
    records = run.requests
    if fleet is not None:
        records["arrival_s"] = fleet.fleet.sent_s
    if np.isnan(records["finish_s"]).any():
        return None
    _, replica, num_replicas = replicas_of(run)
    at_client_s = client_delay_s(server.pools[0].setup.frontend, requests, records, replica, num_replicas)
    arrival_s, first_s, finish_s = records["arrival_s"], records["first_token_s"], records["finish_s"]
    rows = slice(requests.num_warmup, None)
    span = Table({"arrival_s": arrival_s[rows], "finish_s": (finish_s + at_client_s)[rows]}, REQUEST_COLUMNS)
    return Served(
        arrival_s=arrival_s[rows],
        queueing_s=(records["scheduled_s"] - arrival_s)[rows],
        ttft_s=(first_s - arrival_s + at_client_s)[rows],
        tpot_s=time_per_output_token_s(first_s, finish_s, records["output_tokens"])[rows],
        e2e_s=(finish_s - arrival_s + at_client_s)[rows],
        output_tokens=records["output_tokens"][rows],
        num_preemptions=int(records["num_preemptions"].sum()),
        steps=run.steps,
        replicas=_replicas_held(server, fleet, span),
    )


def _replicas_held(server: PreparedDeployment, fleet: FleetRun | None, span: Table) -> list[float]:
    """Return the mean number of replicas of each pool that hold their devices."""
    sizes = [pool.settings.num_replicas for pool in server.pools]
    if fleet is None or not comes_and_goes(server.scenario.deployment):
        return [float(size) for size in sizes]
    phases, ends = phase_table(fleet), list(accumulate(sizes))
    return [mean_replicas(phases, span, end - size, end) for size, end in zip(sizes, ends, strict=True)]


def _hopeless(limit: Limit, requests: RequestArrays) -> GiveUp:
    """Return a check of a run under way: too many requests have waited for longer than the limit already."""
    most_late = (1 - limit.quantile) * requests.num_requests + 1

    def give_up(records: state.Table, now_s: float) -> bool:
        arrival_s = records["arrival_s"][requests.num_warmup :]
        in_time = records["first_token_s"][requests.num_warmup :] - arrival_s <= limit.most_s  # NaN: still waits
        return bool(np.count_nonzero(~in_time & (arrival_s < now_s - limit.most_s)) > most_late)

    return give_up
