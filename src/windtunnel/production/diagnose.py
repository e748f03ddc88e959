"""Why a server is slow: its own traffic simulated as it should have been served, and with each known fault.

The requests that a client recorded are sent again to the simulated deployment: their latencies are what the server
should have done. Then every cause is tried at several severities. A cause explains the run where the simulated
latencies agree with the recorded ones request by request, and not only on average: an eager server is slow where few
requests decode, a small KV cache where many do, a slow tokenizer for long prompts. Causes are added while they explain
more; each has as its share what vanishes with it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from windtunnel.compiled.arrays import Floats
from windtunnel.errors import InputError
from windtunnel.metrics.uncertainty import SURE
from windtunnel.notebook import Shown
from windtunnel.production.causes import CAUSES, OF_CLIENT, Cause, Change, Served
from windtunnel.production.gate import NUM_INDEPENDENT
from windtunnel.production.observed import Observed
from windtunnel.production.replay import Replay, replay_of
from windtunnel.serving.engines.defaults import engine_defaults
from windtunnel.serving.results import Result
from windtunnel.serving.run import Progress
from windtunnel.serving.scenario import Scenario, Setup
from windtunnel.serving.setup.fleet_plan import has_fleet
from windtunnel.units import version_key

LATENCIES = ("ttft", "tpot", "e2e")
NOISE: Mapping[str, float] = {"ttft": 0.1, "tpot": 0.03, "e2e": 0.04}
"""Relative deviation of a request's latency that no cause explains: a real server repeats itself no better."""
LEAST_GAIN = 12.0
"""Log-likelihood that a cause must gain."""
LEAST_SHARE = 0.03
"""Share of a gap below which a cause is not worth a line."""
FAR = 5.0
"""Standard deviations from which a mean's deviation counts in proportion: a fault may take a server to batches at which
its prediction is off otherwise than in the healthy run."""
RUNNING_NOISE = 0.1
"""Relative noise of the number of requests that run at once."""
CHOICE = 2.0
"""Log-likelihood that the choice of a severity costs: of two causes that explain the same, the one without counts."""
MOST_CAUSES = 3
LEAST_GAP = 0.03
"""Least width of an interval: smaller gaps are not looked at, however sure the prediction is."""
LONG_WAIT, SLOWER = 0.3, 0.05
"""Share of waiting from which replicas are missing, and how much slower fewer replicas may be."""
NUM_VERSIONS = 5
"""Other versions that are tried, beside an earlier run: without one they explain too much."""


@dataclass(frozen=True)
class Finding:
    """A cause that explains a part of the gap."""

    name: str
    severity: float
    gain: float
    """Log-likelihood that it adds."""
    shares: Mapping[str, float]
    """Latency (`ttft`, `tpot`, `e2e`) -> its share of the gap between the recorded mean and the healthy one."""
    without_s: Mapping[str, float]
    """Latency -> the mean that the run would have had without it."""
    change: Change


@dataclass(frozen=True, repr=False)
class Diagnosis(Shown):
    """What a server should have done under its own traffic, what it did, and why."""

    REPORT = "diagnosis:diagnosis_report"

    healthy: Result
    """The simulation of the recorded requests on the deployment as it is described."""
    recorded_s: Mapping[str, float]
    """Latency -> mean over the recorded requests, in seconds."""
    healthy_s: Mapping[str, float]
    widths: Mapping[str, float]
    """Latency -> relative half width of the 99% interval of its healthy mean."""
    findings: Sequence[Finding]
    """The causes found, largest share first."""
    others: Sequence[Finding]
    """Causes that alone explain no more, best first."""
    late: Sequence[str]
    """Latencies beyond the 99% interval of the prediction, the furthest first; without any, nothing is found."""
    num_requests: int
    usd_per_hour: float | None
    late_s: float
    """Mean time by which the client sent later than planned."""
    waiting: float
    """Share of the predicted end-to-end time that requests wait before they are scheduled."""
    enough_replicas: int | None
    """Fewest of several replicas that would serve the requests within `SLOWER` as fast; None where all are needed."""
    hits: tuple[float, float] | None = None
    """Share of the prompt tokens that were in the prefix cache, recorded and predicted; None where nothing is known."""
    num_before: int = 0
    """Earlier healthy runs that it is compared with."""
    num_failed: int = 0
    """Requests besides that were not answered."""

    @property
    def is_underprovisioned(self) -> bool:
        """Whether requests wait long even on a healthy server."""
        return self.waiting > LONG_WAIT

    @property
    def gaps(self) -> dict[str, float]:
        """Return latency -> recorded mean over the healthy one, less one."""
        return {name: self.recorded_s[name] / self.healthy_s[name] - 1 for name in self.recorded_s}

    @property
    def lost_usd_per_hour(self) -> float | None:
        """What of the price pays for the time lost: the gap as a share of the recorded end-to-end time."""
        if self.usd_per_hour is None:
            return None
        return self.usd_per_hour * max(1 - self.healthy_s["e2e"] / self.recorded_s["e2e"], 0.0)


def _hits(replay: Replay, healthy: Result) -> tuple[float, float] | None:
    """Return the share of the prompt tokens in the prefix cache, recorded and predicted, where it is known."""
    if replay.hit_fraction is None:
        return None
    columns = (healthy.requests[name].sum() for name in ("cached_tokens", "input_tokens"))
    cached, prompts = map(float, columns)
    return replay.hit_fraction, cached / max(prompts, 1.0)


def served_by(
    replay: Replay, healthy: Result, latencies: Mapping[str, Floats], may_be_another_version: bool = False
) -> Served:
    """Return what is known of a healthy server; `latencies` say how many of the requests are under way at once."""
    deployment, requests, hits = replay.scenario.deployment, replay.requests, _hits(replay, healthy)
    begins, ends = np.sort(requests.arrival_s), np.sort(requests.arrival_s + latencies["e2e"])
    under_way = int((np.arange(1, begins.size + 1) - np.searchsorted(ends, begins, side="right")).max())
    return Served(
        setup=healthy.setup,
        num_blocks=healthy.memory.num_blocks,
        most_running=max(-(-under_way // deployment.most_replicas), 1),
        longest_tokens=int((requests.input_tokens + requests.output_tokens).max()),
        shares_prefixes=requests.prefixes is not None,
        hands_over=any(pool.role == "prefill" for pool in deployment.pools),
        tokens_per_s=float(requests.output_tokens.sum() / max(ends[-1], 1e-9)),
        num_replicas=1 if deployment.pools or has_fleet(deployment) else deployment.replicas,
        other_versions=_other_versions(healthy.setup) if may_be_another_version else (),
        hits_lost=None if hits is None else max(1 - hits[0] / hits[1], 0.0) if hits[1] else 0.0,
    )


def _other_versions(setup: Setup) -> tuple[str, ...]:
    """Return some of the versions of the engine at which defaults have changed, from the oldest to the newest."""
    assert setup.engine.version is not None
    own = version_key(setup.engine.version)
    every = [entry.since for entry in engine_defaults(setup.engine.name).versions]
    now = max((since for since in every if version_key(since) <= own), key=version_key, default="")
    others = [since for since in every if since != now]
    chosen = np.linspace(0, len(others) - 1, min(NUM_VERSIONS, len(others))).round().astype(int)
    return tuple(others[place] for place in chosen)


def diagnose(
    scenario: Scenario, recorded: Observed, before: Observed | Sequence[Observed] = (), progress: Progress | None = None
) -> Diagnosis:
    """Explain the latencies of recorded requests.

    Args:
        scenario: the deployment as it is described; its workload counts only for common beginnings of prompts.
        recorded: what was measured.
        before: earlier runs of the same deployment that were healthy: what they are off by is taken off, and smaller
            differences are found; the more they differ among themselves, the larger one must be.
        progress: called with the causes tried so far and those in all.

    Raises:
        InputError: the deployment cannot serve the recorded requests, or their times are in milliseconds.
    """
    before = (before,) if isinstance(before, Observed) else before or ()
    replay = replay_of(scenario, recorded, before)
    healthy = replay.healthy()
    bias, widths = _bias(scenario, healthy, before)
    search = _Search(replay, recorded, bias, widths, healthy, bool(before))
    means = search.means(Change())
    if all(500 < recorded_s / means[name] < 2000 for name, recorded_s in search.recorded_means.items()):
        hint = "milliseconds belong in ttft_ms and e2e_ms"
        raise InputError("all recorded times are about 1,000 times as long as predicted", hint)
    found, others = search.findings(progress)
    usd = healthy.summary.cost
    return Diagnosis(
        healthy=healthy,
        recorded_s=search.recorded_means,
        healthy_s=means,
        widths={name: math.expm1(width) for name, width in widths.items()},
        findings=found,
        others=others,
        late=search.late(),
        num_requests=recorded.arrival_s.size,
        usd_per_hour=None if usd is None else usd.usd_per_hour,
        late_s=float(recorded.sent_late_s.mean()),
        waiting=float(healthy.requests["queueing_s"].mean() / healthy.requests["e2e_s"].mean()),
        enough_replicas=_enough_replicas(search, served_by(replay, healthy, replay.latencies(Change())).num_replicas),
        hits=_hits(replay, healthy),
        num_before=len(before),
        num_failed=recorded.num_failed,
    )


def _enough_replicas(search: "_Search", num_replicas: int) -> int | None:
    """Return the fewest replicas, of several, without which the mean end-to-end time rises by no more than `SLOWER`."""
    enough, most_s = num_replicas, search.means(Change())["e2e"] * (1 + SLOWER)
    while enough > 1:
        fewer = Change(missing_replicas=num_replicas - enough + 1)
        if search.latencies(fewer) is None or search.means(fewer)["e2e"] > most_s:
            break
        enough -= 1
    return enough if enough < num_replicas else None


BEFORE_WIDTH: Mapping[str, float] = {"ttft": 0.12, "tpot": 0.025, "e2e": 0.03}
"""Relative half widths where one healthy run of the same deployment is known: repeated runs differ by no more."""
PRIOR_RUNS = 4
"""How many further runs the deviation behind `BEFORE_WIDTH` counts for, beside those that are known."""
UNSURE_WIDTH = 0.7
"""Logarithm of the half width where a prediction has no interval."""


def _bias(scenario: Scenario, healthy: Result, before: Sequence[Observed]) -> tuple[dict[str, float], dict[str, float]]:
    """Return latency -> the logarithm of what healthy runs are over their predictions, and its half width (99%)."""
    if not before:
        return dict.fromkeys(LATENCIES, 0.0), widths_of(healthy)
    simulated = [replay_of(scenario, run).latencies(Change()) for run in before]
    offs = {
        name: np.array([np.nanmedian(_logs(run, times, name)) for run, times in zip(before, simulated, strict=True)])
        for name in LATENCIES
    }
    widths = {name: _width(off, math.log1p(BEFORE_WIDTH[name])) for name, off in offs.items()}
    return {name: float(off.mean()) for name, off in offs.items()}, widths


def _width(offs: Floats, of_one: float) -> float:
    """Return the half width of the 99% interval of one more healthy run around the mean of those known, `of_one` where
    one is: Student's, as `PRIOR_RUNS` runs of a known deviation and these are drawn from one normal distribution
    (Gelman et al., Bayesian Data Analysis, 3.3).
    """
    from scipy.stats import t

    def quantile(freedom: int) -> float:
        return float(t.ppf(0.995, freedom))

    variance = (of_one / quantile(PRIOR_RUNS)) ** 2 / 2
    freedom = PRIOR_RUNS + offs.size - 1
    variance = (PRIOR_RUNS * variance + float(((offs - offs.mean()) ** 2).sum())) / freedom
    return quantile(freedom) * math.sqrt(variance * (1 + 1 / offs.size))


def widths_of(healthy: Result) -> dict[str, float]:
    """Return latency -> logarithm of the half width of a prediction's 99% interval."""
    widths = {}
    for name in LATENCIES:
        interval, values = healthy.intervals.get(name), getattr(healthy.summary, f"{name}_s")
        widths[name] = UNSURE_WIDTH
        if interval is not None and values is not None:
            widths[name] = SURE * max(math.log(interval.high / values.mean), math.log(1 + LEAST_GAP))
    return widths


def _logs(recorded: Observed, simulated: Mapping[str, Floats], name: str) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(getattr(recorded, f"{name}_s") / simulated[name])
    return np.asarray(np.where(np.isfinite(logs), logs, np.nan))


def _running(arrival_s: Floats, latencies: Mapping[str, Floats]) -> tuple[float, float]:
    """Return the most requests that are at once between their first and last token, and their mean over that time."""
    begins_s, ends_s = arrival_s + latencies["ttft"], arrival_s + latencies["e2e"]
    known = np.isfinite(begins_s) & np.isfinite(ends_s)
    times_s = np.concatenate([ends_s[known], begins_s[known]])  # at a tie, one ends before another begins
    order = np.argsort(times_s, kind="stable")
    running = np.cumsum(np.repeat([-1, 1], known.sum())[order])
    spans_s = np.diff(times_s[order], append=times_s[order][-1])
    busy = running > 0
    mean = float(np.average(running[busy], weights=spans_s[busy])) if spans_s[busy].sum() > 0 else 1.0
    return max(float(running.max()), 1.0), max(mean, 1.0)


@dataclass
class _Search:
    """The search for causes of one run."""

    replay: Replay
    recorded: Observed
    bias: Mapping[str, float]
    widths: Mapping[str, float]
    healthy: Result
    has_before: bool
    known: dict[Any, dict[str, Floats] | None] = field(default_factory=dict)

    @property
    def recorded_means(self) -> dict[str, float]:
        """Latency -> mean over the recorded requests."""
        values = {name: getattr(self.recorded, f"{name}_s") for name in LATENCIES}
        return {name: float(np.nanmean(each)) for name, each in values.items() if np.isfinite(each).any()}

    def latencies(self, change: Change) -> dict[str, Floats] | None:
        """Return the simulated latencies under a change; None where the deployment cannot serve the requests so."""
        key = repr(change)
        if key not in self.known:
            try:
                self.known[key] = self.replay.latencies(change)
            except InputError:
                self.known[key] = None
        return self.known[key]

    def means(self, change: Change) -> dict[str, float]:
        """Return latency -> simulated mean, with what healthy runs are off by."""
        simulated = self.latencies(change)
        assert simulated is not None
        return {name: float(np.nanmean(simulated[name])) * math.exp(self.bias[name]) for name in self.recorded_means}

    def loss(self, change: Change) -> float:
        """Return the negative log-likelihood of the recorded latencies under a change.

        A latency's deviations have a middle, which is within what the prediction leaves open, and a spread around it.
        """
        simulated = self.latencies(change)
        if simulated is None:
            return math.inf
        total = 0.0
        for name in self.recorded_means:
            logs = _logs(self.recorded, simulated, name) - self.bias[name]
            logs = logs[~np.isnan(logs)]
            middle = float(np.median(logs))
            spread = float(np.mean(np.minimum(np.abs(logs - middle), 1.0))) * math.sqrt(math.pi / 2)
            count = min(logs.size, NUM_INDEPENDENT)
            total += count * math.log(math.hypot(spread, NOISE[name]) / NOISE[name])
            far = abs(middle) / (self.widths[name] / 2.5758)
            total += 0.5 * far**2 if far < FAR else FAR * (far - FAR / 2)
        return total + self._running_loss(simulated)

    def _running_loss(self, simulated: Mapping[str, Floats]) -> float:
        """Return the loss of how many requests run at once: a limit shows in it, whatever a step takes."""
        recorded = {name: getattr(self.recorded, f"{name}_s") for name in ("ttft", "e2e")}
        pairs = zip(*(_running(self.recorded.arrival_s, each) for each in (recorded, simulated)), strict=True)
        count = min(self.recorded.arrival_s.size, NUM_INDEPENDENT)
        return count * sum(math.log(math.hypot(math.log(a / b), RUNNING_NOISE) / RUNNING_NOISE) for a, b in pairs)

    def findings(self, progress: Progress | None) -> tuple[list[Finding], list[Finding]]:
        """Return the causes that explain the run, and the next best ones."""
        loss = self.loss(Change())
        served = served_by(self.replay, self.healthy, {"e2e": self.recorded.e2e_s}, self.has_before)
        first_token_s = float((self.recorded.arrival_s + self.recorded.ttft_s).min())
        served = replace(served, launch_slowness=self._launch_slowness(served, loss), first_token_s=first_token_s)
        tried = self._round({}, served)
        alone = {name: pair for name, pair in tried.items() if loss - pair[0] > LEAST_GAIN}
        certain = self._certain(served) if self.late() else {}
        chosen = dict(certain)
        if certain:
            loss, tried = self.loss(self._joined(chosen, served)), self._round(chosen, served)
        for round_ in range(MOST_CAUSES):
            if chosen and not self.late(self._joined(chosen, served)):
                break  # what is left is within what the prediction leaves open
            tried = self._round(chosen, served) if round_ else tried
            if progress is not None:
                progress(round_ + 1, MOST_CAUSES)
            best = min(tried, key=lambda name: tried[name][0], default="")
            if not best or not self.late() or loss - tried[best][0] < LEAST_GAIN:
                break
            loss, chosen[best] = tried[best]
            loss = self._exchanged(chosen, certain, loss, served)
        late = self.late() or ["e2e"]
        found = [self._finding(name, chosen, served) for name in chosen]
        found = [finding for finding in found if finding.shares[late[0]] > LEAST_SHARE]
        ranked = sorted((name for name in alone if name not in chosen), key=lambda name: alone[name][0])
        others = [self._finding(name, {name: alone[name][1]}, served) for name in ranked[:3]]
        found.sort(key=lambda finding: -finding.shares[late[0]])
        if found and found[0].name in OF_CLIENT:
            found = [finding for finding in found if finding.name in OF_CLIENT]
        return found, others

    def _launch_slowness(self, served: Served, loss: float) -> float:
        """Return how slow the host launches kernels where the run looks as if it launched all of them, else 1."""
        eager_loss, severity = min(self._tried(CAUSES["eager"], Change(), served), default=(math.inf, 1.0))
        return severity if loss - eager_loss > LEAST_GAIN else 1.0

    def _round(self, chosen: Mapping[str, float], served: Served) -> dict[str, tuple[float, float]]:
        """Return cause -> (loss, severity) on top of chosen ones, of those that bring the latencies nearer."""
        base, tried = self._joined(chosen, served), {}
        for name, cause in CAUSES.items():
            if name not in chosen and not (chosen and cause.is_first):
                loss, severity = min(self._tried(cause, base, served), default=(math.inf, 0.0))
                loss += CHOICE if len(cause.severities(served)) > 1 else 0.0
                if self._helps(name, severity, base, served):
                    tried[name] = loss, severity
        return tried

    def _certain(self, served: Served) -> dict[str, float]:
        """Return what the server itself says: that its cache found too little, where this made the run slower."""
        name = "prefix_cache_cold"
        told = CAUSES[name].severities(served) if served.hits_lost is not None else ()
        return dict.fromkeys([name], told[0]) if told and self._helps(name, told[0], Change(), served) else {}

    def _exchanged(self, chosen: dict[str, float], certain: Mapping[str, float], loss: float, served: Served) -> float:
        """Exchange each of several chosen causes that are not certain for one that explains more beside the others, and
        return the loss. A client's stays: what is found beside it rests on that client's times.
        """
        kept = {*certain, *OF_CLIENT}
        for name in [name for name in chosen if name not in kept] if len(chosen) > 1 else ():
            rest = {other: severity for other, severity in chosen.items() if other != name}
            tried = self._round(rest, served)
            best = min(tried, key=lambda other: tried[other][0], default=name)
            if tried and tried[best][0] < loss - 1:
                del chosen[name]
                loss, chosen[best] = tried[best]
        return loss

    def late(self, change: Change | None = None) -> list[str]:
        """Return the latencies that are beyond what the prediction under a change leaves open, the furthest first."""
        means = self.means(change or Change())
        excess = {name: math.log(self.recorded_means[name] / means[name]) / self.widths[name] for name in means}
        return sorted((name for name in excess if excess[name] > 1), key=lambda name: -excess[name])

    def _helps(self, name: str, severity: float, base: Change, served: Served) -> bool:
        """Whether a cause brings the means of the late latencies nearer to the recorded ones."""
        late = self.late() or list(self.recorded_means)

        def distance(change: Change) -> float:
            means = self.means(change)
            return sum(abs(math.log(self.recorded_means[each] / means[each])) for each in late)

        change = base.joined(CAUSES[name].change(severity, served)) if severity else None
        return change is not None and self.latencies(change) is not None and distance(change) < distance(base)

    def _tried(self, cause: Cause, base: Change, served: Served) -> Iterator[tuple[float, float]]:
        """Yield (loss, severity) of a cause on top of others, refined around the best where that makes sense."""
        severities = list(cause.severities(served))
        losses = [self.loss(base.joined(cause.change(severity, served))) for severity in severities]
        yield from zip(losses, severities, strict=True)
        if not cause.is_continuous or not losses:
            return
        at = int(np.argmin(losses))
        low, high = sorted((severities[max(at - 1, 0)], severities[min(at + 1, len(severities) - 1)]))

        def loss_at(logarithm: float) -> float:
            return self.loss(base.joined(cause.change(math.exp(logarithm), served)))

        if low < high:
            from scipy.optimize import minimize_scalar

            bounds = math.log(low), math.log(high)
            nearer = minimize_scalar(loss_at, bounds=bounds, method="bounded", options={"maxiter": 12, "xatol": 2e-3})
            yield float(nearer.fun), math.exp(nearer.x)

    @staticmethod
    def _joined(chosen: Mapping[str, float], served: Served) -> Change:
        change = Change()
        for name, severity in chosen.items():
            change = change.joined(CAUSES[name].change(severity, served))
        return change

    def _finding(self, name: str, chosen: Mapping[str, float], served: Served) -> Finding:
        """Return a cause with its share: what vanishes of the gap when it alone is mended.

        Where all causes together explain the recorded mean within the noise of its prediction, the gap is what they
        explain: the rest is nobody's.
        """
        rest = {other: severity for other, severity in chosen.items() if other != name}
        full, without = (self._joined(names, served) for names in (chosen, rest))
        with_it, mended, healthy = self.means(full), self.means(without), self.means(Change())
        shares = {}
        for latency, mean in self.recorded_means.items():
            is_explained = abs(math.log(mean / with_it[latency])) < self.widths[latency]
            gap = (with_it[latency] if is_explained else mean) - healthy[latency]
            shares[latency] = (with_it[latency] - mended[latency]) / gap if abs(gap) > 1e-12 else 0.0
        without_s = {
            latency: mean * mended[latency] / with_it[latency] for latency, mean in self.recorded_means.items()
        }
        gain = self.loss(without) - self.loss(full)
        return Finding(name, chosen[name], gain, shares, without_s, CAUSES[name].change(chosen[name], served))
