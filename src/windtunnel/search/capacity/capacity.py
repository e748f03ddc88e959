"""Find the greatest load that a deployment sustains within its limits."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from windtunnel.errors import InputError
from windtunnel.metrics.limits import Limit, check_limited
from windtunnel.notebook import Shown
from windtunnel.search.capacity.load import (
    Stream,
    burst_of,
    check_has_one_load,
    check_keeps_time,
    is_steady,
    lengthened,
    stream_of,
)
from windtunnel.search.capacity.probe import Probe, probe, serve_requests
from windtunnel.search.confidence import MOST_SEEDS, lower_bound
from windtunnel.serving.prepared import PreparedDeployment
from windtunnel.serving.priced_deployments import PricedDeployments
from windtunnel.serving.scenario import Scenario, Setup, pool_scenario, resolve
from windtunnel.workload.arrivals import MAX_RATE_PER_S

TOLERANCE = 0.01
"""Relative distance of neighbouring loads on a fixed grid: the answer does not depend on where the search began, and
deployments of equal capacity get equal answers."""
CHECKS = 12
"""Loads below the answer that `capacities` checks, 4% to 8% apart; a search over many deployments checks none."""
LEAST_SHARE = 1e-3
"""Lowest load, as a share of the throughput with all requests there at once: below it, no load holds the limits."""
FIRST_SHARE = 0.85
LEAP = 0.28
"""Growth of a stride, in the logarithm of the load, for each unit of log(figure / limit): about the distance of the
limit on vLLM's scheduler, where the median deployment holds it by a factor e."""
MOST_EXCESS = 10.0
"""Excesses above it leap no further."""


@dataclass(frozen=True, eq=False)
class Capacity:
    """Capacity of a deployment under one stream of requests."""

    load: float
    """Requests or sessions a second, or clients of a closed loop; 0: the limits are broken at every load."""
    passing: Probe | None
    """Probe at that load; None: at no load."""
    beyond: Probe | None
    """Probe at the next load of the grid, which fails; None: all that the stream can send is sustained."""
    num_runs: int

    def reached_s(self, limits: Sequence[Limit]) -> float:
        """Return the latency in seconds of the limit that every load breaks, at the least one; 0 where none is."""
        served = self.beyond.served if self.beyond is not None and self.load == 0 else None
        broken = next((limit for limit in limits if self.beyond and limit.name == self.beyond.limited_by), None)
        return 0.0 if served is None or broken is None else served.statistic(broken)


def capacity(
    server: PreparedDeployment,
    stream: Stream,
    limits: Sequence[Limit],
    tolerance: float = TOLERANCE,
    near: float | None = None,
    checks: int = 0,
    worth: float | None = None,
) -> Capacity:
    """Find the greatest load of the grid at which `server` holds the limits and its queue does not grow.

    One run with all requests there at once bounds what it can serve. From a share of that, strides that grow with the
    excess over the limits find a load that passes and one that fails; between them the next is where the
    excess would be nothing if it grew evenly, kept off the ends (the Illinois method), until they are neighbours.

    Args:
        tolerance: relative distance of neighbouring loads.
        near: a load to begin at, as a neighbour's capacity; None bounds it first.
        checks: how many loads between half of the answer and it must pass too. A percentile that few requests decide
            may fail at a load and pass again at a greater one; the first such load is then the answer's end.
        worth: a load that must be exceeded. Where the next one of the grid fails, that is the whole answer: a load of
            0, and that one `beyond`.

    Raises:
        InputError: the stream has two loads.
    """
    check_has_one_load(stream.workload)
    search = _Search(lambda load: probe(server, stream, load, limits), tolerance, stream.is_closed, checks)
    if worth is not None:
        first = search.position(worth) + 1
        if not search.at(first).passes:
            return Capacity(0.0, None, search.tried[first], search.num_runs)
        near = max(near or 0.0, search.load(first))
    if stream.is_closed:
        return search.run(near or min(8.0, stream.unit.num_requests), 1.0, float(stream.unit.num_requests))
    found = None if near is None else search.run(near, LEAST_SHARE * near, math.inf)
    if found is not None and found.load:
        return found
    most_per_s, search.num_runs = served_at_once(server, stream) / stream.requests_per_arrival, search.num_runs + 1
    return search.run(FIRST_SHARE * most_per_s, LEAST_SHARE * most_per_s, math.inf)


def served_at_once(server: PreparedDeployment, stream: Stream) -> float:
    """Measure the requests a second that are served when all are there at once."""
    served = serve_requests(server, stream.at_once(), stream.seed)
    assert served is not None, "nothing gives this run up"
    return served.arrival_s.size / float((served.arrival_s + served.e2e_s).max())


@dataclass(frozen=True, eq=False)
class Steady:
    """Capacities of some streams that were lengthened until their mean was steady, as far as they can be."""

    streams: list[Stream]
    found: list[Capacity]
    """With the runs of all lengths."""
    change: float | None
    """Relative change of the mean when the streams were last lengthened; None: they were not."""
    is_steady: bool


def steady(
    find: Callable[[Stream, float | None], Capacity], streams: Sequence[Stream], limits: Sequence[Limit]
) -> Steady:
    """Find the capacity of each stream, and lengthen all of them until the mean is steady.

    A longer stream is searched from the load that the shorter one sustains.

    Args:
        find: returns the capacity for a stream, from a load to begin at.
    """
    found: list[Capacity] = []
    for stream in streams:
        found.append(find(stream, found[0].load or None if found else None))
    answer = Steady(list(streams), found, None, False)
    while True:
        served = [each.passing.served for each in answer.found if each.passing is not None and each.passing.served]
        if len(served) < len(streams):
            return answer
        size, times = served[0].arrival_s.size, min(each.stream_over_e2e for each in served)
        answer = replace(answer, is_steady=is_steady(size, times, limits, answer.change))
        is_endless = not limits and streams[0].is_closed  # as many clients as there are requests
        further = None if answer.is_steady or is_endless else _lengthened(answer.streams)
        if further is None:
            return answer
        num_runs = [each.num_runs for each in answer.found]
        loads = [each.load for each in answer.found]
        try:
            found = [find(stream, load) for stream, load in zip(further, loads, strict=True)]
        except InputError:  # more than may be computed
            return answer
        change = sum(each.load for each in found) / sum(loads) - 1
        found = [replace(each, num_runs=each.num_runs + runs) for each, runs in zip(found, num_runs, strict=True)]
        answer = Steady(further, found, change, False)


def _lengthened(streams: Sequence[Stream]) -> list[Stream] | None:
    """Return streams four times as long, or twice where a trace has too few lengths for that; None: there are none."""
    first = streams[0]
    num_requests = lengthened(first.workload, first.workload.num_requests or 0)
    while num_requests is not None and num_requests > (first.workload.num_requests or 0):
        try:
            return [stream_of(stream.workload, stream.seed, num_requests) for stream in streams]
        except InputError:
            num_requests //= 2
    return None


class _Search:
    """A search on the grid of loads for the position where probes stop passing."""

    def __init__(self, try_load: Callable[[float], Probe], tolerance: float, is_closed: bool, checks: int) -> None:
        self.try_load = try_load
        self.checks = checks
        self.step = math.log1p(tolerance)
        self.is_closed = is_closed
        self.num_runs = 0
        self.tried: dict[int, Probe] = {}

    def run(self, near: float, lowest_load: float, highest_load: float) -> Capacity:
        """Search from `near`, between `lowest_load` and `highest_load`."""
        lowest, highest = self.position(lowest_load), self.position(min(highest_load, MAX_RATE_PER_S))
        return self.between(min(max(self.position(near), lowest), highest), lowest, highest)

    def between(self, start: int, lowest: int, highest: int) -> Capacity:
        low, high = self.bracket(start, lowest, highest)
        if low is None:
            return Capacity(0.0, None, self.tried[lowest], self.num_runs)
        if high is None:
            return Capacity(self.load(low), self.tried[low], None, self.num_runs)
        low, high = self.narrow(low, high)
        shares = [0.5 + 0.5 * check / self.checks for check in range(self.checks)]
        below = sorted({max(self.position(self.load(low) * share), lowest) for share in shares})
        broken = next((position for position in below if not self.at(position).passes), None)
        if broken is not None:
            return self.between(broken, lowest, broken)
        return Capacity(self.load(low), self.tried[low], self.tried[high], self.num_runs)

    def position(self, load: float) -> int:
        """Return the grid's position at or below `load`; for clients the number itself."""
        return math.floor(load) if self.is_closed else math.floor(math.log(load) / self.step)

    def load(self, position: int) -> float:
        return float(position) if self.is_closed else math.exp(position * self.step)

    def leap(self, position: int, excess: float) -> int:
        """Return the number of positions to skip at this excess, which is infinite where nothing limits the load."""
        excess = min(excess, MOST_EXCESS)
        return round(position * math.expm1(LEAP * excess)) if self.is_closed else round(LEAP * excess / self.step)

    def at(self, position: int) -> Probe:
        if position not in self.tried:
            self.tried[position] = self.try_load(self.load(position))
            self.num_runs += 1
        return self.tried[position]

    def bracket(self, start: int, lowest: int, highest: int) -> tuple[int | None, int | None]:
        """Return the bracket (passing, failing) around the answer; None for an end that does not exist."""
        passing, failing = None, None
        position, least = start, 1
        while True:
            trial = self.at(position)
            stride = max(least, self.leap(position, abs(trial.excess)))
            least *= 2
            if trial.passes:
                passing = position
                if failing is not None or position >= highest:
                    return passing, failing
                position = min(position + stride, highest)
            else:
                failing = position
                if passing is not None or position <= lowest:
                    return passing, failing
                position = max(position - stride, lowest)

    def narrow(self, low: int, high: int) -> tuple[int, int]:
        """Return neighbours between `low`, which passes, and `high`, which fails."""
        below, above = self.at(low).excess, self.at(high).excess
        while high - low > 1:
            share = below / (below - above) if math.isfinite(below) and above > below else 0.5
            middle = min(max(low + round(share * (high - low)), low + 1), high - 1)
            trial = self.at(middle)
            if trial.passes:
                low, below, above = middle, trial.excess, above / 2
            else:
                high, above, below = middle, trial.excess, below / 2
        return low, high


@dataclass(frozen=True, eq=False, repr=False)
class Capacities(Shown):
    """The capacity of one scenario's deployment over several streams of requests."""

    REPORT = "search.capacity:capacity_report"

    scenario: Scenario
    setup: Setup
    """The first pool's setup, where the deployment has pools."""
    limits: Sequence[Limit]
    steady: Steady
    tolerance: float

    @property
    def streams(self) -> list[Capacity]:
        """Capacity of each stream; the first has the scenario's seed."""
        return self.steady.found

    @property
    def is_closed(self) -> bool:
        """Whether the load is a number of clients."""
        return self.steady.streams[0].is_closed

    @property
    def num_requests(self) -> int:
        """Requests of each stream that the answer rests on; where a duration ends it, those at its capacity."""
        first, found = self.steady.streams[0], self.streams[0].passing
        is_timed = first.workload.num_requests is None and found is not None and found.served is not None
        return found.served.arrival_s.size if is_timed else first.unit.num_requests  # type: ignore[union-attr]

    @property
    def drift(self) -> float | None:
        """Relative change of the load when the streams were last lengthened, where it is not steady yet; else None."""
        return None if self.steady.is_steady or not self.load else self.steady.change

    @property
    def load(self) -> float:
        """Mean load over the streams."""
        return statistics.fmean(stream.load for stream in self.streams)

    @property
    def requests_per_s(self) -> float | None:
        """Requests a second at the mean load; None for a number of clients."""
        return None if self.is_closed else self.load * self.steady.streams[0].requests_per_arrival

    @property
    def burst(self) -> tuple[int, int] | None:
        """What `burst_of` returns for the first stream that is over too soon."""
        runs = [each.passing.served for each in self.streams if each.passing is not None and each.passing.served]
        bursts = (burst_of(run.arrival_s.size, run.stream_over_e2e) for run in runs)
        return None if self.is_closed else next(filter(None, bursts), None)

    @property
    def at_least(self) -> float | None:
        """Lower bound of the mean over all streams; None for a single one, and for a burst."""
        bound = lower_bound([stream.load for stream in self.streams])
        return None if bound is None or self.burst else max(bound, 0.0)


def capacities(
    scenario: Scenario,
    limits: Sequence[Limit],
    num_seeds: int = 3,
    tolerance: float = TOLERANCE,
    allow_download: bool = False,
) -> Capacities:
    """Find the greatest load that a scenario's deployment sustains, for `num_seeds` streams of its requests.

    A workload of which nothing is drawn, such as a replayed trace, has one stream. InputError where the deployment is
    impossible, its workload has no load to change, or too many streams.
    """
    if not 1 <= num_seeds <= MOST_SEEDS:
        raise InputError(f"seeds is {num_seeds:,}; 1 to {MOST_SEEDS:,} streams of requests can be asked for")
    check_limited(scenario.workload.task, [limit.metric for limit in limits])
    check_keeps_time(scenario)
    priced = PricedDeployments()
    pools = scenario.deployment.pools
    setup = resolve(pool_scenario(scenario, scenario.deployment.groups[0]), allow_download)

    first = stream_of(scenario.workload, scenario.seed)

    def of_stream(stream: Stream, near: float | None) -> Capacity:
        checks = CHECKS if stream.workload == first.workload else 0
        server = priced.server(scenario, stream.unit, None if pools else setup)
        return capacity(server, stream, limits, tolerance, near, checks)

    streams = [first]
    for seed in range(1, num_seeds):
        stream = stream_of(scenario.workload, scenario.seed + seed)
        if stream.has_requests_of(first):
            break
        streams.append(stream)
    return Capacities(scenario, setup, limits, steady(of_stream, streams, limits), tolerance)
