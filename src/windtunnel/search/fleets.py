"""Copies of a deployment that take a load: counted by what one sustains alone, then simulated behind their router."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

import msgspec

from windtunnel.errors import InputError
from windtunnel.metrics.limits import limits_from
from windtunnel.search.answers import idle_changes, scenario_of
from windtunnel.search.capacity.capacity import capacity
from windtunnel.search.capacity.load import MOST_REQUESTS, Stream, at_load, burst_of, is_drawn, own_load, stream_of
from windtunnel.search.capacity.probe import probe
from windtunnel.search.confidence import lower_bound
from windtunnel.search.evaluation.evaluate import Evaluator
from windtunnel.search.evaluation.schema import Question
from windtunnel.search.recommend import DEPLOYMENT
from windtunnel.search.study import SearchOutcome, Study
from windtunnel.serving.prepared import PreparedDeployment
from windtunnel.serving.priced_deployments import PricedDeployments
from windtunnel.serving.scenario import Scenario


@dataclass(frozen=True)
class FleetSize:
    """Copies of a deployment that together sustain a load."""

    index: int
    copies: int
    devices: int
    usd_per_hour: float | None
    headroom_fraction: float
    """Fraction of the copies' total load that is left."""
    load: float
    """Requests a second that the copies sustain: the mean over the streams of requests."""
    load_at_least: float | None = None
    """Lower bound of that mean; None for a single stream, and for a burst."""
    num_requests: int | None = None
    """Requests of each stream that the copies served together; None: the copies are counted, not simulated together."""


def fleets(outcome: SearchOutcome, load: float, limit: int, is_sure: bool = False) -> list[FleetSize]:
    """Return the cheapest ways to take `load` with copies of one point each, least money (or fewest devices) first.

    Copies share the load evenly, each at no more than it sustains alone, which is an estimate: copies of few requests
    gain by sharing a queue, and of copies near their limit the unlucky ones break it for all. What a point sustains is
    the mean over the streams of requests that it met; where the answer `is_sure`, the lower bound of that mean, of
    points that have one.
    """
    options = []
    for index in outcome.ranking:
        one = alone(outcome, index)
        held = (one.load_at_least or 0.0) if is_sure else one.load
        if held > 0:
            options.append(_times(one, math.ceil(load / held * (1 - 1e-9)), load))
    return cheapest(options)[:limit]


def ways(study: Study, outcome: SearchOutcome, load: float, limit: int) -> list[FleetSize]:
    """Return the cheapest ways to take `load`, once for each deployment; changes that make no difference are none."""
    best: dict[str | int, FleetSize] = {}
    idle = idle_changes(study, outcome)
    for way in fleets(outcome, load, len(outcome.ranking)):
        if way.index not in idle:
            best.setdefault(deployment_of(study, way.index), way)
    return list(best.values())[:limit]


def deployment_of(study: Study, index: int) -> str | int:
    """Return the name of a point's whole deployment, without its token budget; the point where it has none."""
    return str(study.point(index).choice[DEPLOYMENT]) if DEPLOYMENT in study.space.vary else index


def lengthened(study: Study, outcome: SearchOutcome, load: float, limit: int) -> SearchOutcome:
    """Lengthen the streams of the points that `ways` names, where other points' were."""
    evaluations, evaluator, question = outcome.evaluations, Evaluator(study.space), Question(lengthens=True)
    if not any(answer.is_lengthened for answer in evaluations.values()):
        return outcome
    while True:
        named = [way.index for way in ways(study, outcome, load, limit)]
        short = {index: evaluations[index].load for index in named if not evaluations[index].is_lengthened}
        if not short:
            return outcome
        for index, near in short.items():
            evaluations = evaluations | {index: evaluator.evaluate(index, outcome.workload, question, near=near)}
        ranking = [index for index in outcome.ranking if evaluations[index].holds]
        outcome = replace(outcome, evaluations=evaluations, ranking=ranking)


def alone(outcome: SearchOutcome, index: int) -> FleetSize:
    """Return a single copy of a point."""
    mean = outcome.mean(index)
    price, devices = mean.figures.get("usd_per_hour"), round(mean.figures["devices"])
    return FleetSize(index, 1, devices, price, 0.0, mean.load, outcome.at_least(index))


def surest(outcome: SearchOutcome, load: float, best: FleetSize) -> FleetSize | None:
    """Return the least money that is sure of the load, counted; None where the best way is."""
    if best.load_at_least is None or not 0 < best.load_at_least < load:
        return None
    return next(iter(fleets(outcome, load, 1, is_sure=True)), None)


def cheapest(options: Sequence[FleetSize]) -> list[FleetSize]:
    """Sort by money, then by devices."""
    return sorted(
        options, key=lambda fleet: (math.inf if fleet.usd_per_hour is None else fleet.usd_per_hour, fleet.devices)
    )


def _times(one: FleetSize, copies: int, load: float) -> FleetSize:
    """Count copies of one: each sustains what it does alone."""
    return replace(
        one,
        copies=copies,
        devices=copies * one.devices,
        usd_per_hour=None if one.usd_per_hour is None else copies * one.usd_per_hour,
        headroom_fraction=1 - load / (copies * one.load),
        load=copies * one.load,
        load_at_least=None if one.load_at_least is None else max(copies * one.load_at_least, 0.0),
    )


def copied(scenario: Scenario, fleet: FleetSize | None, load: float | None) -> Scenario:
    """Return copies of a deployment under a load that they share; `scenario` without one, or of pools."""
    if fleet is None or load is None or scenario.deployment.pools:
        return scenario
    replicas = fleet.copies * scenario.deployment.replicas
    workload = at_load(scenario.workload, load, own_load(scenario.workload, scenario.seed))
    if fleet.num_requests is not None and workload.num_requests is not None:
        workload = msgspec.structs.replace(workload, num_requests=fleet.num_requests)
    deployment = msgspec.structs.replace(scenario.deployment, replicas=replicas)
    return msgspec.structs.replace(scenario, deployment=deployment, workload=workload)


@dataclass(frozen=True, eq=False)
class FleetSimulator:
    """Finds the fewest copies that take a load together; keeps prices, requests and what was tried."""

    study: Study
    outcome: SearchOutcome
    load: float
    priced: PricedDeployments = field(default_factory=PricedDeployments)

    def fewest(self, counted: FleetSize) -> FleetSize:
        """Return the fewest copies that hold the limits under every stream of requests, with what they sustain.

        From the counted number, steps that double lead to one that fails, or that holds where the counted one fails;
        the answer is found between the two by halving. One copy fails, as more are counted. All numbers serve the same
        requests. Returned is `counted` where a single copy takes the load, where pools or a batch have no copies to
        simulate, and where the requests are over too soon to show a steady load.
        """
        streams = self._streams(counted)
        if not streams:
            return counted
        fails, step = 1, 1
        if self._holds(counted, counted.copies, streams):
            holds = counted.copies
            while (fewer := holds - step) > 1 and self._holds(counted, fewer, streams):
                holds, step = fewer, 2 * step
            fails = max(fewer, 1)
        else:
            fails = counted.copies
            while not self._holds(counted, fails + step, streams):
                fails, step = fails + step, 2 * step
                if fails > 2 * counted.copies:
                    return counted
            holds = fails + step
        while holds - fails > 1:
            middle = (holds + fails) // 2
            if self._holds(counted, middle, streams):
                holds = middle
            else:
                fails = middle
        return self.sustained(counted, holds, streams)

    def surely(self, best: FleetSize) -> FleetSize | None:
        """Return the least money that is sure of the load: more of the best copies, simulated, or what is counted;
        None where the best way is sure."""
        sure = surest(self.outcome, self.load, best)
        if sure is None or best.num_requests is None:
            return sure
        more, streams = best, self._streams(best)
        while (more.load_at_least or 0.0) < self.load:
            more = self.sustained(best, more.copies + 1, streams)
            if more.copies > 2 * best.copies or cheapest([sure, more])[0] is sure:
                return sure
        return more

    def sustained(self, counted: FleetSize, copies: int, streams: Sequence[Stream]) -> FleetSize:
        """Find what copies of a deployment sustain together."""
        limits, server = limits_from(self.study.space.limits), self._server(counted, copies, streams[0])
        loads = [capacity(server, stream, limits, near=self.load).load for stream in streams]
        price = None if counted.usd_per_hour is None else counted.usd_per_hour / counted.copies * copies
        held = fmean(loads)
        return FleetSize(
            counted.index,
            copies,
            counted.devices // counted.copies * copies,
            price,
            max(1 - self.load / held, 0.0) if held else 0.0,
            max(held, self.load),
            lower_bound(loads),
            streams[0].unit.num_requests,
        )

    def _streams(self, counted: FleetSize) -> list[Stream]:
        """Return the streams that the finalists met, as long for the copies together as they were for one; empty where
        they are over too soon, and where nothing is to be simulated."""
        space, evaluation = self.study.space, self.outcome.evaluations[counted.index]
        workload = self._scenario(counted.index).workload
        is_one = counted.copies == 1 or space.load == "given" or self._scenario(counted.index).deployment.pools
        if is_one or not is_drawn(workload):
            return []
        num_requests = min(counted.copies * evaluation.stream_requests, MOST_REQUESTS)
        e2e_s = evaluation.stream_requests / evaluation.load / evaluation.figures.get("stream_over_e2e", math.inf)
        while not burst_of(num_requests, num_requests / self.load / e2e_s if e2e_s else math.inf):
            try:
                return [
                    stream_of(workload, space.seed + seed, num_requests) for seed in range(self.outcome.num_streams)
                ]
            except InputError:  # the trace has fewer
                num_requests //= 2
        return []

    def _holds(self, counted: FleetSize, copies: int, streams: Sequence[Stream]) -> bool:
        limits, server = limits_from(self.study.space.limits), self._server(counted, copies, streams[0])
        return all(probe(server, stream, self.load, limits).passes for stream in streams)

    def _server(self, counted: FleetSize, copies: int, stream: Stream) -> PreparedDeployment:
        fleet = replace(counted, copies=copies)
        return self.priced.server(copied(self._scenario(counted.index), fleet, self.load), stream.unit)

    def _scenario(self, index: int) -> Scenario:
        return scenario_of(self.study, self.outcome, index)
