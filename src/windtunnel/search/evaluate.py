"""Points of a space put to the test: can it be, what load does it sustain, and what does it give at that load."""

import hashlib
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from windtunnel.engine.pools import Fleet
from windtunnel.engine.serving import Server, power_model
from windtunnel.errors import InputError
from windtunnel.kernels import state
from windtunnel.metrics.summary import SECONDS_PER_HOUR, itl_distribution
from windtunnel.search.bench import Bench
from windtunnel.search.capacity import TOLERANCE, Capacity, capacity
from windtunnel.search.files import files_digest
from windtunnel.search.limits import limits_from
from windtunnel.search.load import Stream, is_closed, stream_of
from windtunnel.search.probe import Served, probe
from windtunnel.search.space import Budget, Point, Space, point_at, scenario_at
from windtunnel.spec import catalog
from windtunnel.spec.deployment import EngineSettings
from windtunnel.spec.engine_defaults import overlay
from windtunnel.spec.noun import Noun, decode
from windtunnel.spec.scenario import Scenario, Setup, pool_scenario, resolve


class Evaluation(Noun):
    """What was found of one point under one workload."""

    load: float = 0.0
    """Sustained, or given; 0: the limits are held at no load."""
    limited_by: str = ""
    """The limit that the next higher load breaks; with a given load, the one that is broken, or nearest."""
    figures: dict[str, float] = {}
    """At that load, by the names in `FIGURES`; empty where no load is sustained."""
    holds: bool = False
    """Whether the limits are held at `load`."""
    num_runs: int = 0
    num_requests: int = 0
    """Simulated in all runs together."""
    refused: str = ""
    """Why the point cannot be; nothing was simulated then."""


class Question(Noun):
    """What is asked of every point."""

    num_requests: int | None = None
    """Of the workload, the first so many; None: all."""
    seed: int = 0
    """Which stream of requests; of all points the same."""
    tolerance: float = TOLERANCE


FIGURES = {
    "devices": "devices of the deployment",
    "usd_per_hour": "of all devices, at list price",
    "requests_per_s": "answered",
    "requests_per_usd": "queries per second for a dollar an hour, times 3600",
    "usd_per_million_output_tokens": "dollars",
    "output_tokens_per_s": "of the deployment",
    "output_tokens_per_s_per_device": "of one device",
    "output_tokens_per_s_per_user": "mean over requests of 1 / TPOT",
    "output_token_j": "energy of all devices over output tokens",
    "mean_w": "power of all devices",
    "busy_fraction": "of the span, in which a replica ran a step",
    "kv_peak_fraction": "of the KV pool",
    "num_preemptions": "in the whole run",
    "stream_over_e2e": "time that arrivals last over the mean end-to-end time; of an open loop",
    "ttft_mean": "seconds; also p50, p90, p99, and so for tpot, itl, e2e and queueing",
}
"""Name -> meaning. What needs a price or a power that nobody knows is absent."""

BOUNDS = ("max_num_seqs", "max_num_batched_tokens", "max_prefill_tokens", "gpu_memory_utilization", "num_gpu_blocks")
"""Engine settings that bound what a scheduler may do; where neither of two bounds is met, they make no difference."""


@dataclass(frozen=True, eq=False)
class Deployed:
    """A point as it would be deployed."""

    scenario: Scenario
    setup: Setup | None
    """None where the deployment has pools."""
    takes: "Takes"


@dataclass(frozen=True)
class Takes:
    """What a deployment takes; None where nobody says."""

    devices: int
    usd_per_hour: float | None
    busy_w: float | None
    """All devices busy."""


@dataclass(frozen=True, eq=False)
class _Done:
    """An evaluation with what decides whether it is another point's too."""

    engine: EngineSettings
    settings: state.Settings
    running: int
    """Most requests at a time, at the load sustained and at the next, which fails; so the other two."""
    step_tokens: int
    blocks: int
    used_blocks: int
    """At the load sustained alone."""
    evaluation: Evaluation


class _Knobs(Noun):
    """Only so that errors name the path."""

    engine: EngineSettings


@dataclass(eq=False)
class Neighbours:
    """What has been found of points that differ in knobs only: where to begin, and what need not be run again."""

    near: float | None = None
    done: list[_Done] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Evaluator:
    """Evaluates the points of a space; keeps what they share: requests, operators, prices, names looked up."""

    space: Space
    bench: Bench = field(default_factory=Bench)
    streams: dict[Any, Stream] = field(default_factory=dict)
    families: dict[Any, Deployed | InputError] = field(default_factory=dict)
    knobs: dict[bytes, EngineSettings] = field(default_factory=dict)
    digests: dict[Any, bytes] = field(default_factory=dict)

    def deployed(self, point: Point, workload: str | None = None) -> Deployed:
        """The point's names looked up and its defaults filled in.

        Raises:
            InputError: the point cannot be, or is beyond the budget.
        """
        family = self._family(point, workload)
        knobs = {name: value for name, value in point.knobs.items() if value is not None}
        if family.setup is None or not knobs:
            return family
        asked = self._asked(knobs)
        given = with_settings(family.scenario.deployment.engine, asked)
        deployment = msgspec.structs.replace(family.scenario.deployment, engine=given)
        scenario = msgspec.structs.replace(family.scenario, deployment=deployment)
        return replace(
            family, scenario=scenario, setup=replace(family.setup, engine=with_settings(family.setup.engine, asked))
        )

    def _asked(self, knobs: dict[str, Any]) -> EngineSettings:
        """Knobs as settings; every family has the same ones."""
        key = msgspec.json.encode(knobs)
        if key not in self.knobs:
            self.knobs[key] = decode({"engine": knobs}, _Knobs, "deployment").engine
        return self.knobs[key]

    def _family(self, point: Point, workload: str | None) -> Deployed:
        key = (workload, msgspec.json.encode(point.others))
        if key not in self.families:
            try:
                self.families[key] = self._looked_up(point.others, workload)
            except InputError as error:
                self.families[key] = error
        found = self.families[key]
        if isinstance(found, Deployed) and found.setup is None and point.knobs:
            found = self._looked_up(point.settings, workload)
        if isinstance(found, InputError):
            raise found
        return found

    def _looked_up(self, settings: dict[str, Any], workload: str | None) -> Deployed:
        scenario = scenario_at(self.space, settings, workload)
        takes = taken_by(scenario)
        check_budget(takes, self.space.budget)
        return Deployed(scenario, None if scenario.deployment.pools else resolve(scenario), takes)

    def check(self, index: int, workload: str | None) -> None:
        """Raise InputError where the point cannot be."""
        self.deployed(point_at(self.space, index), workload)

    def num_requests(self, workload: str | None) -> int:
        """Of the whole workload: the first point's that can be."""
        for index in range(self.space.num_points):
            try:
                deployed = self.deployed(point_at(self.space, index), workload)
            except InputError:
                continue
            return self.stream(deployed.scenario, 0, None).unit.num_requests
        return 1

    def family(self, index: int) -> bytes:
        """Equal for points that differ in knobs only."""
        return msgspec.json.encode(point_at(self.space, index).others)

    def stream(self, scenario: Scenario, seed: int, num_requests: int | None) -> Stream:
        """The requests of a point; points of one workload share them."""
        key = (scenario.workload, seed, num_requests)
        if key not in self.streams:
            self.streams[key] = stream_of(scenario.workload, self.space.seed + seed, num_requests)
        return self.streams[key]

    def evaluate(
        self, index: int, workload: str | None, question: Question, neighbours: Neighbours | None = None
    ) -> Evaluation:
        """The answer of one point, refusal included.

        Args:
            index: of the point.
            workload: by name; None is the scenario's own.
            question: what is asked.
            neighbours: of points that differ in knobs; this one is added to them.
        """
        neighbours = neighbours or Neighbours()
        try:
            deployed = self.deployed(point_at(self.space, index), workload)
            stream = self.stream(deployed.scenario, question.seed, question.num_requests)
            server = self.bench.server(deployed.scenario, stream.unit, deployed.setup)
        except InputError as error:
            return Evaluation(refused=error.message)
        if isinstance(server, Server):
            known = next((done for done in neighbours.done if _same(done, server, stream)), None)
            if known is not None:
                kv_peak = {"kv_peak_fraction": known.used_blocks / _num_blocks(server)} if known.used_blocks else {}
                found = known.evaluation
                return msgspec.structs.replace(found, num_runs=0, num_requests=0, figures=found.figures | kv_peak)
        return self._run(deployed, server, stream, question, neighbours)

    def _run(
        self, deployed: Deployed, server: Server | Fleet, stream: Stream, question: Question, neighbours: Neighbours
    ) -> Evaluation:
        limits = limits_from(self.space.limits)
        size = stream.unit.arrival_s.size
        if self.space.load == "given":
            tried = probe(server, stream, stream.own, limits, is_patient=True)
            assert tried.served is not None, "a patient run is not given up"
            return Evaluation(
                load=stream.own,
                limited_by=tried.limited_by,
                figures=figures(deployed, server, tried.served, stream.own if tried.passes else None),
                holds=tried.passes,
                num_runs=1,
                num_requests=size,
            )
        found = capacity(server, stream, limits, question.tolerance, neighbours.near)
        served = found.at.served if found.at is not None else None
        evaluation = Evaluation(
            load=found.load,
            limited_by=found.beyond.limited_by if found.beyond is not None else "",
            figures={} if served is None else figures(deployed, server, served, found.load),
            holds=found.load > 0,
            num_runs=found.num_runs,
            num_requests=found.num_runs * size,
        )
        neighbours.near = found.load or neighbours.near
        if isinstance(server, Server) and isinstance(server.settings, state.Settings):
            neighbours.done.append(_done(server, found, evaluation))
        return evaluation

    def key(self, index: int, workload: str | None, question: Question) -> str:
        """What decides a point's answer, digested: equal for points that are deployed and asked alike.

        Raises:
            InputError: the point cannot be.
        """
        point = point_at(self.space, index)
        deployed = self.deployed(point, workload)
        deployment = deployed.scenario.deployment
        engine = deployment.engine if deployed.setup is None else deployed.setup.engine
        names = (workload, msgspec.json.encode(point.others))
        if deployed.setup is None or names not in self.digests:
            self.digests[names] = names_digest(deployed)
        requests = (deployed.scenario.workload, question)
        if requests not in self.digests:
            stream = self.stream(deployed.scenario, question.seed, question.num_requests)
            self.digests[requests] = stream_digest(stream)
        limits = [(limit.name, limit.most_s) for limit in limits_from(self.space.limits)]
        plain = msgspec.json.encode((deployment, engine, limits, self.space.load, question))
        parts = (code_digest(), self.digests[names], self.digests[requests], plain)
        return hashlib.sha256(b"\0".join(parts)).hexdigest()


def with_settings(engine: EngineSettings, asked: EngineSettings) -> EngineSettings:
    """`engine` with what `asked` says in place of its own."""
    merged = {name: getattr(engine, name) for name in engine.__struct_fields__}
    overlay(merged, msgspec.structs.replace(asked, name=engine.name))
    return EngineSettings(**merged)


def check_budget(takes: Takes, budget: Budget) -> None:
    """Raise InputError where a deployment takes more than `budget` allows."""
    if budget.devices is not None and takes.devices > budget.devices:
        raise InputError(f"{takes.devices} devices; the budget is {budget.devices}")
    if budget.usd_per_hour is not None and (takes.usd_per_hour or 0.0) > budget.usd_per_hour:
        raise InputError(f"${takes.usd_per_hour:,.2f} an hour; the budget is ${budget.usd_per_hour:,.2f}")
    if budget.power_w is not None and (takes.busy_w or 0.0) > budget.power_w:
        raise InputError(f"{takes.busy_w:,.0f} W; the budget is {budget.power_w:,.0f} W")


def taken_by(scenario: Scenario) -> Takes:
    """What the deployment of `scenario` takes."""
    deployment = scenario.deployment
    parts = [pool_scenario(scenario, pool).deployment for pool in deployment.pools] or [deployment]
    prices = [pool.price_usd_per_hour for pool in deployment.pools] or [deployment.price_usd_per_hour]
    usd_per_hour: float | None = 0.0
    power_w: float | None = 0.0
    for part, own in zip(parts, prices, strict=True):
        device = catalog.device(part.device)
        price = own if own is not None else device.price_usd_per_hour
        watts = deployment.busy_w or device.tdp_w
        usd_per_hour = None if price is None or usd_per_hour is None else usd_per_hour + price * part.num_devices
        power_w = None if watts is None or power_w is None else power_w + watts * part.num_devices
    return Takes(deployment.num_devices, usd_per_hour, power_w)


def _num_blocks(server: Server) -> int:
    """KV blocks of one replica."""
    return server.memory.num_blocks * server.settings.ranks_per_replica


def _done(server: Server, found: Capacity, evaluation: Evaluation) -> _Done:
    assert isinstance(server.settings, state.Settings)
    steps = [one.served.steps for one in (found.at, found.beyond) if one is not None and one.served is not None]
    used = int(found.at.served.steps["used_blocks"].max()) if found.at is not None and found.at.served else 0
    return _Done(
        engine=server.setup.engine,
        settings=server.settings,
        running=max(int(table["num_running"].max()) for table in steps),
        step_tokens=max(int((table["prefill_tokens"] + table["decode_tokens"]).max()) for table in steps),
        blocks=max(int(table["used_blocks"].max()) for table in steps),
        used_blocks=used,
        evaluation=evaluation,
    )


def _same(done: _Done, server: Server, stream: Stream) -> bool:
    """Whether a deployment serves both loads that decided `done` step by step as that one did.

    It does where they differ in bounds only that neither met: requests at a time, tokens of a step, KV blocks with room
    to spare for the longest request and for a block of each running one. SGLang admits by what is free and what is to
    come, so there all must be equal but the bound on requests.
    """
    settings = server.settings
    if not isinstance(settings, state.Settings):
        return False
    ours, theirs = settings, done.settings
    is_sglang = ours.scheduler == state.SGLANG
    if _unbounded(ours, is_sglang) != _unbounded(theirs, is_sglang):
        return False
    if _unbounded_engine(server.setup.engine) != _unbounded_engine(done.engine):
        return False
    if ours.max_num_seqs != theirs.max_num_seqs and done.running >= min(ours.max_num_seqs, theirs.max_num_seqs):
        return False
    budgets = ours.max_num_batched_tokens, theirs.max_num_batched_tokens
    if budgets[0] != budgets[1] and done.step_tokens >= min(budgets):
        return False
    if ours.num_blocks == theirs.num_blocks:
        return True
    if server.setup.engine.enable_prefix_caching and stream.unit.prefixes is not None:
        return False
    if ours.window_tokens:
        return False
    whole = stream.unit.input_tokens + stream.unit.output_tokens
    longest = -(-int(whole.max()) // ours.block_size) + ours.blocks_per_request
    return done.blocks + longest + done.running < min(ours.num_blocks, theirs.num_blocks)


def _unbounded(settings: state.Settings, is_sglang: bool) -> state.Settings:
    if is_sglang:
        return settings._replace(max_num_seqs=0)
    return settings._replace(max_num_seqs=0, max_num_batched_tokens=0, max_prefill_tokens=0, num_blocks=0)


def _unbounded_engine(engine: EngineSettings) -> EngineSettings:
    return msgspec.structs.replace(engine, **dict.fromkeys(BOUNDS))


def figures(deployed: Deployed, server: Server | Fleet, served: Served, sustained: float | None) -> dict[str, float]:
    """The names and values of `FIGURES` that are known.

    Args:
        deployed, server: what served.
        served: the run.
        sustained: the load that the deployment keeps up with. In an open loop rates follow from it and not from the
            run's span, which ends with a tail that a service does not have.
    """
    num_devices, usd_per_hour = deployed.takes.devices, deployed.takes.usd_per_hour
    span_s = float((served.arrival_s + served.e2e_s).max() - served.arrival_s.min())
    requests_per_s = served.arrival_s.size / span_s
    if sustained is not None and not is_closed(deployed.scenario.workload):
        requests_per_s = sustained
    output_per_s = float(served.output_tokens.mean()) * requests_per_s
    found = {
        "devices": float(num_devices),
        "requests_per_s": requests_per_s,
        "output_tokens_per_s": output_per_s,
        "output_tokens_per_s_per_device": output_per_s / num_devices,
        "num_preemptions": float(served.num_preemptions),
    }
    if not is_closed(deployed.scenario.workload):
        found["stream_over_e2e"] = served.stream_over_e2e
    tpot_s = served.values("tpot")
    if tpot_s.size:
        found["output_tokens_per_s_per_user"] = float((1.0 / tpot_s[tpot_s > 0]).mean())
    if usd_per_hour:
        found["usd_per_hour"] = usd_per_hour
        found["requests_per_usd"] = requests_per_s * SECONDS_PER_HOUR / usd_per_hour
        found["usd_per_million_output_tokens"] = usd_per_hour / SECONDS_PER_HOUR / output_per_s * 1e6
    found |= _use(deployed, server, served, span_s)
    if "mean_w" in found:
        found["output_token_j"] = found["mean_w"] / output_per_s
    for metric in ("ttft", "tpot", "e2e", "queueing"):
        values = served.values(metric)
        if values.size:
            found[f"{metric}_mean"] = float(values.mean())
            for name, value in zip(STATISTICS, np.percentile(values, STATISTIC_PERCENTS), strict=True):
                found[f"{metric}_{name}"] = float(value)
    itl = itl_distribution(served.steps)
    if itl is not None:
        found |= {f"itl_{name}": float(getattr(itl, name)) for name in ("mean", *STATISTICS)}
    return found


STATISTICS, STATISTIC_PERCENTS = ("p50", "p90", "p99"), (50, 90, 99)


def _use(deployed: Deployed, server: Server | Fleet, served: Served, span_s: float) -> dict[str, float]:
    """How busy, how full and how warm the devices were."""
    steps, scenario = served.steps, deployed.scenario
    if isinstance(server, Server):
        parts = [(scenario, server.setup, server.memory, server.settings.ranks_per_replica)]
    else:
        parts = [
            (pool_scenario(scenario, one.pool), one.setup, one.memory, one.settings.ranks_per_replica)
            for one in server.parts
        ]
    first, busy_s, slots, mean_w, peaks = 0, 0.0, 0, 0.0, [0.0]
    for own, setup, memory, ranks in parts:
        replicas = own.deployment.replicas
        mine = (steps["replica"] >= first) & (steps["replica"] < first + replicas)
        part_busy_s = float(steps["duration_s"][mine].sum())
        part_slots = replicas * setup.parallelism.pp
        power = power_model(own, setup)
        if power is None:
            mean_w = np.nan
        else:
            mean_w += power.at(min(part_busy_s / span_s / part_slots, 1.0)) * own.deployment.num_devices
        if mine.any():
            peaks.append(float(steps["used_blocks"][mine].max()) / memory.num_blocks / ranks)
        busy_s, slots, first = busy_s + part_busy_s, slots + part_slots, first + replicas
    found = {"busy_fraction": min(busy_s / span_s / slots, 1.0), "kv_peak_fraction": max(peaks)}
    return found if np.isnan(mean_w) else found | {"mean_w": float(mean_w)}


def names_digest(deployed: Deployed) -> bytes:
    """Of all that the catalog says of a point's models, devices, nodes and calibrations, and of the files that its
    deployment names."""
    pools = [resolve(pool_scenario(deployed.scenario, pool)) for pool in deployed.scenario.deployment.pools]
    setups = [deployed.setup] if deployed.setup is not None else pools
    nouns = [
        (one.model, one.precision, one.device, one.node, one.calibration, one.max_model_len, one.network)
        for one in setups
    ]
    files = files_digest(msgspec.to_builtins(deployed.scenario.deployment))
    return hashlib.sha256(msgspec.json.encode((nouns, [one.engine for one in pools])) + files).digest()


def stream_digest(stream: Stream) -> bytes:
    """Of the requests themselves, whatever file or distribution they come from."""
    unit = stream.unit
    digest = hashlib.sha256(msgspec.json.encode((stream.workload, stream.seed, stream.own)))
    for column in (unit.arrival_s, unit.input_tokens, unit.output_tokens, unit.priority):
        digest.update(column.tobytes())
    return digest.digest()


@cache
def code_digest() -> bytes:
    """Of the code and the measured tables that answers come from: another version's are not taken for this one's."""
    folder = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256(metadata.version("aiconfigurator-core").encode())
    for path in sorted(folder.rglob("*.py")):
        if path.relative_to(folder).parts[0] not in ("cli", "report", "lab", "web"):
            digest.update(path.read_bytes())
    return digest.digest()
