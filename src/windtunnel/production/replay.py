"""Recorded requests, sent again to a deployment as it is described or with a fault."""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from windtunnel.compiled.arrays import Floats, Ints
from windtunnel.pricing.calibrated import factor, shares
from windtunnel.pricing.estimator import Estimator
from windtunnel.production.causes import LEAST_LOST, Change
from windtunnel.production.observed import Observed, sent_prefixes
from windtunnel.search.capacity.probe import serve_requests
from windtunnel.serving.deployment import Pool
from windtunnel.serving.prepared import Lower, PreparedDeployment, prepare
from windtunnel.serving.priced_deployments import REACHES, PricedDeployments
from windtunnel.serving.results import Result
from windtunnel.serving.scenario import Scenario, Setup, pool_scenario, resolve
from windtunnel.serving.setup import step_prices
from windtunnel.serving.simulate import serve_scenario
from windtunnel.workload.generate.prefixes import PrefixArrays
from windtunnel.workload.generate.requests import RequestArrays

SLOW = "slow"
"""Name of the pool of a slow replica, and mark of its setup."""


@dataclass
class Replay:
    """The recorded requests on the simulated deployment, with any fault."""

    scenario: Scenario
    requests: RequestArrays
    setups: Sequence[Setup]
    priced: PricedDeployments = field(default_factory=PricedDeployments)
    parts: dict[Any, tuple[tuple[int, ...], Mapping[str, step_prices.StepPrices]]] = field(default_factory=dict)
    """Steps priced part by part, and how far their grids reach."""
    versions: dict[str, Sequence[Setup]] = field(default_factory=dict)
    slow: dict[int, Estimator] = field(default_factory=dict)
    as_recorded: RequestArrays | None = None
    """The requests, finding in the prefix cache what the server says; None where it does not say."""
    hit_fraction: float | None = None
    """Share of the prompt tokens that were found there, as the server says."""
    drawn: PrefixArrays | None = None
    """Common beginnings as they were sent; others are made up, and which prompts share them is not known."""

    def healthy(self) -> Result:
        """Simulate the requests on the deployment as it is described."""
        return serve_scenario(self.scenario, self._prepared(Change(), self.requests), self.requests)

    def latencies(self, change: Change) -> dict[str, Floats]:
        """Return latency -> that of every request under a change, from its recorded arrival on; seconds. InputError
        where the deployment cannot serve the requests so."""
        requests = self.as_recorded if change.finds_as_recorded and self.as_recorded else self.requests
        arrival_s = requests.arrival_s
        waited_s = np.maximum(change.pause_s - arrival_s, 0.0)
        requests = replace(requests, arrival_s=arrival_s + waited_s)
        served = serve_requests(self._prepared(change, requests), requests, self.scenario.seed)
        assert served is not None
        latencies = {"ttft": served.ttft_s + waited_s, "tpot": served.tpot_s, "e2e": served.e2e_s + waited_s}
        if change.client_part_s:
            return received(latencies, arrival_s, requests.output_tokens, change.client_part_s)
        return latencies

    def _prepared(self, change: Change, requests: RequestArrays) -> PreparedDeployment:
        """Prepare the deployment with a fault."""
        scenario = self.scenario
        setups = [change.applied(setup) for setup in self._setups_of(change.version)]
        if change.missing_replicas:
            scenario = scenario.with_deployment(replicas=scenario.deployment.replicas - change.missing_replicas)
        if change.slow_replica > 1:
            others = max(scenario.deployment.replicas - 1, 1)
            pools = Pool(name="equal", replicas=others), Pool(name=SLOW, replicas=1)
            scenario = scenario.with_deployment(replicas=1, pools=pools)
            setups = [setups[0], replace(setups[0], calibration_name=SLOW)]
        is_priced_anew = change.factors or change.host_s or change.slow_replica > 1
        lower = self._lowering(change) if is_priced_anew else self.priced.lower
        prepared = prepare(scenario, requests, setups, estimator_of=self._estimator, lower=lower)
        if requests.prefixes is not None and requests.prefixes is not self.drawn:
            prepared = prepared.without_shared_reads()
        if change.transfer_share < 1 and prepared.handoff_rules is not None:
            prepared = prepared.with_transfers(prepared.handoff_rules.latency_s, change.transfer_share)
        return prepared

    def _setups_of(self, version: str) -> Sequence[Setup]:
        """Return the setups of the pools, with another version of the engine where one is given."""
        if version and version not in self.versions:
            engine = msgspec.structs.replace(self.scenario.deployment.engine, version=version)
            self.versions[version] = _resolved(self.scenario.with_deployment(engine=engine))
        return self.versions[version] if version else self.setups

    def _estimator(self, setup: Setup) -> Estimator:
        """Return the estimator of a setup; that of a slow replica is an object of its own."""
        if setup.calibration_name != SLOW:
            return self.priced.estimator(setup)
        estimator = self.priced.estimator(self.setups[0])
        return self.slow.setdefault(id(estimator), copy(estimator))

    def _lowering(self, change: Change) -> Lower:
        """Return a function that prices steps with a fault's factors: of parts that are priced once for all faults."""

        def lower(estimator: Estimator, deployed: step_prices.DeployedModel) -> step_prices.LoweredSteps:
            device, shard, engine = deployed[:3]
            if deployed.drafter is not None or engine.speculative is not None:
                return step_prices.lower_steps(change.estimator(estimator, device), deployed)
            reach = deployed.max_model_len, *(getattr(engine, name) or 0 for name in REACHES)
            reached, parts = self.parts.get((id(estimator), shard), ((), {}))
            if not parts or any(needed > far for needed, far in zip(reach, reached, strict=True)):
                reached, parts = reach, step_prices.priced_parts(estimator, deployed, lambda op: shares(op, device))
                self.parts[id(estimator), shard] = reached, parts
            slower = change.slow_replica if any(estimator is each for each in self.slow.values()) else 1.0
            weights = {name: factor(change.factors, name) * slower for name in parts}
            return replace(step_prices.combined(parts, weights), engine=engine).lowered()

        return lower


MOST_PARTS = 200_000
"""Parts that a client is followed through one by one; of more, several go together."""


def received(
    latencies: Mapping[str, Floats], arrival_s: Floats, output_tokens: Ints, part_s: float
) -> dict[str, Floats]:
    """Return latencies as a client sees them that handles parts one after the other, in the order in which they come.

    The tokens of an answer come at equal distances. Of parts that come at t_k and take c each, the k-th is handled at
    max over j <= k of t_j + (k - j + 1) c (Lindley, The theory of queues with a single server, 1952).
    """
    together = -(-int(output_tokens.sum()) // MOST_PARTS)
    counts = -(-output_tokens // together)
    last = np.cumsum(counts) - 1
    first = last - counts + 1
    place = (np.arange(counts.sum()) - np.repeat(first, counts)) / np.repeat(np.maximum(counts - 1, 1), counts)
    begins_s, lasts_s = arrival_s + latencies["ttft"], latencies["e2e"] - latencies["ttft"]
    came_s = np.repeat(begins_s, counts) + place * np.repeat(lasts_s, counts)
    order = np.argsort(came_s, kind="stable")
    busy_s = part_s * together * np.arange(1, came_s.size + 1)
    handled_s = np.empty(came_s.size)
    handled_s[order] = busy_s + np.maximum.accumulate(came_s[order] - busy_s) + part_s * together
    ttft_s, e2e_s = handled_s[first] - arrival_s, handled_s[last] - arrival_s
    with np.errstate(divide="ignore", invalid="ignore"):
        tpot_s = np.where(output_tokens > 1, (e2e_s - ttft_s) / (output_tokens - 1), np.nan)
    return {"ttft": ttft_s, "tpot": tpot_s, "e2e": e2e_s}


def replay_of(scenario: Scenario, recorded: Observed, before: Sequence[Observed] = ()) -> Replay:
    """Return the recorded requests, sent again to a scenario's deployment as they were sent.

    Their common beginnings are those of the client, or of the scenario's workload where that makes requests of the same
    lengths. Elsewhere they find in the prefix cache what the server says, or the same share of each prompt as on
    average in the runs `before` if that is more. InputError where the deployment cannot serve them.
    """
    nothing = np.zeros(recorded.arrival_s.size, np.int64)
    requests = RequestArrays(recorded.arrival_s, recorded.input_tokens, recorded.output_tokens, nothing)
    prefixes = recorded.prefixes or sent_prefixes(scenario, recorded)
    requests = replace(requests, prefixes=prefixes)
    found, hits = recorded.cached_tokens, recorded.cache_hit_fraction
    replay = Replay(scenario, requests, _resolved(scenario), hit_fraction=hits, drawn=requests.prefixes)
    if found is None or hits is None:
        return replay
    if requests.prefixes is None:
        known = [run.cache_hit_fraction for run in before if run.cache_hit_fraction is not None]
        hits_before = sum(known) / max(len(known), 1)
        is_less = hits < hits_before * (1 - LEAST_LOST)
        expected = (recorded.input_tokens * hits_before).astype(np.int64) if is_less else found
        requests = replace(requests, prefixes=beginnings_of(expected))
    return replace(replay, requests=requests, as_recorded=replace(requests, prefixes=beginnings_of(found)))


def beginnings_of(cached_tokens: Ints) -> PrefixArrays | None:
    """Return beginnings by which each prompt finds so many tokens in the prefix cache, once another had as many.

    All begin with the same tokens, each as far as it finds them: which prompts share what is not known.
    """
    depths = np.unique(cached_tokens[cached_tokens > 0])
    if not depths.size:
        return None
    last = np.where(cached_tokens > 0, np.searchsorted(depths, cached_tokens), -1)
    nobody = np.full(cached_tokens.size, -1)
    return PrefixArrays(np.arange(depths.size) - 1, np.diff(depths, prepend=0), last, nobody)


def _resolved(scenario: Scenario) -> list[Setup]:
    return [resolve(pool_scenario(scenario, pool)) for pool in scenario.deployment.groups]
