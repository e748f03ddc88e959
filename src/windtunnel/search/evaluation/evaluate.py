"""Evaluate the points of a space: whether they can be deployed, the load that they sustain, and their figures."""

import hashlib
import importlib.util
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from windtunnel.errors import InputError
from windtunnel.metrics.limits import limits_from
from windtunnel.schema import Schema, decode
from windtunnel.search.capacity import load
from windtunnel.search.capacity.capacity import Capacity, capacity
from windtunnel.search.capacity.probe import probe
from windtunnel.search.evaluation.duplicates import BOUNDS, Neighbours
from windtunnel.search.evaluation.figures import Deployed, check_budget, figures, load_worth, taken_by
from windtunnel.search.evaluation.schema import Evaluation, Question
from windtunnel.search.space.space import ENGINE_PREFIX, Point, Space, point_at, scenario_at
from windtunnel.serving.deployment import EngineSettings
from windtunnel.serving.engines.defaults import overlay
from windtunnel.serving.prepared import PreparedDeployment
from windtunnel.serving.priced_deployments import PricedDeployments
from windtunnel.serving.scenario import Scenario, pool_scenario, resolve
from windtunnel.serving.setup.fleet_plan import comes_and_goes

BOUND_PATHS = frozenset(f"{ENGINE_PREFIX}{name}" for name in BOUNDS)


class _Knobs(Schema):
    """A wrapper that gives errors the path of the setting."""

    engine: EngineSettings


@dataclass(frozen=True, eq=False)
class Evaluator:
    """Evaluates the points of a space; keeps what they share: requests, operators, prices, names looked up."""

    space: Space
    priced: PricedDeployments = field(default_factory=PricedDeployments)
    streams: dict[Any, load.Stream] = field(default_factory=dict)
    families: dict[Any, Deployed | InputError] = field(default_factory=dict)
    digests: dict[Any, bytes] = field(default_factory=dict)

    def deployed(self, point: Point, workload: str | None = None) -> Deployed:
        """Look up the point's names, fill in defaults; InputError where it cannot be deployed, or is over budget."""
        family = self._family(point, workload)
        knobs = {name: value for name, value in point.knobs.items() if value is not None}
        if family.setup is None or not knobs:
            return family
        settings = settings_of(msgspec.json.encode(knobs))
        given = with_settings(family.scenario.deployment.engine, settings)
        scenario = family.scenario.with_deployment(engine=given)
        setup = replace(family.setup, engine=with_settings(family.setup.engine, settings))
        return replace(family, scenario=scenario, setup=setup)

    def _family(self, point: Point, workload: str | None) -> Deployed:
        key = (workload, msgspec.json.encode(point.others))
        if key not in self.families:
            try:
                self.families[key] = self._looked_up(point.others, workload)
            except InputError as error:
                self.families[key] = error
        family = self.families[key]
        if isinstance(family, Deployed) and family.setup is None and point.knobs:
            family = self._looked_up(point.settings, workload)
        if isinstance(family, InputError):
            raise family
        return family

    def _looked_up(self, settings: dict[str, Any], workload: str | None) -> Deployed:
        scenario = scenario_at(self.space, settings, workload)
        if self.space.load == "capacity":
            load.check_keeps_time(scenario)
        takes = taken_by(scenario)
        check_budget(takes, self.space.budget)
        return Deployed(scenario, None if scenario.deployment.pools else resolve(scenario), takes)

    def check(self, index: int, workload: str | None) -> None:
        """Raise InputError where the point cannot be deployed, or its requests cannot be read."""
        deployed = self.deployed(point_at(self.space, index), workload)
        self.priced.server(deployed.scenario, self.stream(deployed.scenario, 0, None).unit, deployed.setup)

    def num_requests(self, workload: str | None) -> int:
        """Count the requests of a workload, by the first point that can be deployed."""
        for index in range(self.space.num_points):
            try:
                deployed = self.deployed(point_at(self.space, index), workload)
            except InputError:
                continue
            return self.stream(deployed.scenario, 0, None).unit.num_requests
        return 1

    def family(self, index: int) -> bytes:
        """Return a key that is equal for points that differ in knobs and in bounds of the scheduler only."""
        settings = point_at(self.space, index).others
        return msgspec.json.encode({path: settings[path] for path in settings if path not in BOUND_PATHS})

    def stream(self, scenario: Scenario, seed: int, num_requests: int | None) -> load.Stream:
        """Return the requests of a point; points of one workload share them."""
        key = (msgspec.json.encode(scenario.workload), seed, num_requests)
        if key not in self.streams:
            self.streams[key] = load.stream_of(
                scenario.workload, self.space.seed + seed, num_requests, is_fixed=self.space.load == "given"
            )
        return self.streams[key]

    def evaluate(
        self,
        index: int,
        workload: str | None,
        question: Question,
        neighbours: Neighbours | None = None,
        near: float | None = None,
    ) -> Evaluation:
        """Evaluate one point; a refusal is an answer too.

        A stream that is too short to show a steady load is lengthened, where it is all of a drawn one: a burst, and for
        a question that `lengthens` any whose load would be another with more requests.

        Args:
            workload: name of a workload; None is the scenario's own.
            neighbours: answers of points that differ in knobs only; this one is added to them.
            near: a load to begin at, such as the one that the point sustained with fewer requests.
        """
        ask = partial(self._answer, index, workload, neighbours or Neighbours())
        whole, change = ask(question, near), None
        while question.num_requests is None and whole.figures and whole.stream_requests:
            times = whole.figures.get("stream_over_e2e", math.inf)
            is_enough = times >= load.AMPLE_STREAM
            if question.lengthens:
                is_enough = load.is_steady(whole.stream_requests, times, limits_from(self.space.limits), change)
            if is_enough:
                return msgspec.structs.replace(whole, is_lengthened=question.lengthens)
            given = self.deployed(point_at(self.space, index), workload).scenario.workload
            most = load.MOST_REQUESTS if times < load.AMPLE_STREAM else load.MOST_OF_MANY
            num_requests = load.lengthened(given, whole.stream_requests, most)
            answer = None
            while answer is None and num_requests is not None and num_requests > whole.stream_requests:
                longer = ask(msgspec.structs.replace(question, num_requests=num_requests), whole.load)
                answer = None if longer.refused else longer
                num_requests //= 2  # for a trace that has fewer
            if answer is None:
                break
            work = {name: getattr(whole, name) + getattr(answer, name) for name in ("num_runs", "num_requests")}
            change = answer.load / whole.load - 1
            whole = msgspec.structs.replace(answer, **work)
        drift = change if question.lengthens and change is not None else 0.0
        return msgspec.structs.replace(whole, is_lengthened=question.lengthens, drift=drift)

    def _answer(
        self, index: int, workload: str | None, neighbours: Neighbours, question: Question, near: float | None
    ) -> Evaluation:
        """Evaluate one point with one stream of requests."""
        try:
            deployed = self.deployed(point_at(self.space, index), workload)
            stream = self.stream(deployed.scenario, question.seed, question.num_requests)
            server = self.priced.server(deployed.scenario, stream.unit, deployed.setup)
        except InputError as error:
            return Evaluation(refused=error.message)
        known = neighbours.answer(server, stream)
        if known is not None:
            return known
        answer = self._at_own_load if self.space.load == "given" else self._at_capacity
        sustained, evaluation = answer(deployed, server, stream, question, near or neighbours.near)
        neighbours.add(server, stream, sustained, evaluation)
        return evaluation

    def _at_own_load(
        self, deployed: Deployed, server: PreparedDeployment, stream: load.Stream, *_: object
    ) -> tuple[Capacity, Evaluation]:
        limits = limits_from(self.space.limits)
        tried = probe(server, stream, stream.usual_load, limits, is_patient=True)
        assert tried.served is not None, "a patient run is not given up"
        is_batch = load.are_sent_at_once(stream.workload)
        is_sustained = tried.passes and not is_batch and not stream.is_closed
        sustained = stream.usual_load * stream.requests_per_arrival if is_sustained else None
        values = figures(deployed, server, tried.served, sustained, limits)
        evaluation = Evaluation(
            load=values["requests_per_s"] if is_batch else stream.usual_load,
            limited_by=tried.limited_by,
            figures=values,
            holds=tried.passes,
            num_runs=1,
            num_requests=tried.served.arrival_s.size,
        )
        return Capacity(stream.usual_load, tried, None, 1), evaluation

    def _at_capacity(
        self,
        deployed: Deployed,
        server: PreparedDeployment,
        stream: load.Stream,
        question: Question,
        near: float | None,
    ) -> tuple[Capacity, Evaluation]:
        worth = None
        is_fixed = not comes_and_goes(deployed.scenario.deployment)  # its cost is known before it runs
        if question.worth is not None and not stream.is_closed and is_fixed:
            mean_output = float(stream.unit.output_tokens[stream.unit.num_warmup :].mean())
            worth = load_worth(self.space.objective, question.worth, deployed.takes, mean_output)
            worth = worth and worth / stream.requests_per_arrival
        limits = limits_from(self.space.limits)
        sustained = capacity(server, stream, limits, question.tolerance, near, worth=worth)
        served = sustained.passing.served if sustained.passing else None
        requests_per_s = None if stream.is_closed else sustained.load * stream.requests_per_arrival
        evaluation = Evaluation(
            load=sustained.load,
            limited_by=sustained.beyond.limited_by if sustained.beyond else "",
            figures={} if served is None else figures(deployed, server, served, requests_per_s, limits),
            holds=sustained.load > 0,
            reached_s=sustained.reached_s(limits),
            beaten_by=sustained.beyond.excess if sustained.beyond and worth is not None and not sustained.load else 0.0,
            num_runs=sustained.num_runs,
            num_requests=sustained.num_runs * stream.unit.num_requests,
            stream_requests=stream.workload.num_requests or stream.unit.num_requests,
        )
        return sustained, evaluation

    def key(self, index: int, workload: str | None, question: Question) -> str:
        """Digest all that decides a point's answer, equal for equal ones; InputError where it cannot be deployed."""
        point = point_at(self.space, index)
        deployed = self.deployed(point, workload)
        deployment = deployed.scenario.deployment
        engine = deployment.engine if deployed.setup is None else deployed.setup.engine
        names = (workload, msgspec.json.encode(point.others))
        if deployed.setup is None or names not in self.digests:
            self.digests[names] = names_digest(deployed)
        requests = (msgspec.json.encode(deployed.scenario.workload), question)
        if requests not in self.digests:
            stream = self.stream(deployed.scenario, question.seed, question.num_requests)
            unit = stream.unit
            digest = hashlib.sha256(msgspec.json.encode((stream.workload, stream.seed, stream.usual_load)))
            for column in (unit.arrival_s, unit.input_tokens, unit.output_tokens, unit.priority):
                digest.update(column.tobytes())
            self.digests[requests] = digest.digest()
        limits = [(limit.name, limit.most_s) for limit in limits_from(self.space.limits)]
        plain = msgspec.json.encode((deployment, engine, limits, self.space.load, question))
        parts = (code_digest(), self.digests[names], self.digests[requests], plain)
        return hashlib.sha256(b"\0".join(parts)).hexdigest()


@cache
def settings_of(knobs: bytes) -> EngineSettings:
    """Decode knobs, given as JSON, as settings; every family has the same ones."""
    return decode({"engine": msgspec.json.decode(knobs)}, _Knobs, "deployment").engine


@cache
def with_settings(engine: EngineSettings, settings: EngineSettings) -> EngineSettings:
    """Merge two settings: `settings` win, and `engine` fills the gaps."""
    merged = {name: getattr(engine, name) for name in engine.__struct_fields__}
    overlay(merged, msgspec.structs.replace(settings, name=engine.name))
    return EngineSettings(**merged)


def names_digest(deployed: Deployed) -> bytes:
    """Digest the catalog's entries for a point's models, devices and so on, and the files that its deployment names."""
    pools = [resolve(pool_scenario(deployed.scenario, pool)) for pool in deployed.scenario.deployment.pools]
    setups = [deployed.setup] if deployed.setup is not None else pools
    resolved = [
        (setup.model, setup.precision, setup.device, setup.node, setup.calibration, setup.max_model_len, setup.network)
        for setup in setups
    ]
    files = files_digest(msgspec.to_builtins(deployed.scenario.deployment))
    return hashlib.sha256(msgspec.json.encode((resolved, [setup.engine for setup in pools])) + files).digest()


def files_digest(raw: Any) -> bytes:
    """Digest the content of all files, `folder`s and `module:function`s that `raw` (builtins of a schema) names."""
    digest = hashlib.sha256()
    for path in _files_of(raw, ""):
        digest.update(f"{path}\0".encode())
        digest.update(path.read_bytes())
    return digest.digest()


def _files_of(raw: Any, name: str) -> Iterator[Path]:
    if isinstance(raw, dict):
        for key, value in raw.items():
            yield from _files_of(value, str(key))
    elif isinstance(raw, list | tuple):
        for value in raw:
            yield from _files_of(value, name)
    elif isinstance(raw, str) and raw:
        path = Path(raw)
        if name == "folder" and path.is_dir():
            yield from sorted(file for file in path.rglob("*") if file.is_file())
        elif path.is_file():
            yield path
        elif ":" in raw:
            yield from _module_file(raw.partition(":")[0])


def _module_file(name: str) -> Iterator[Path]:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return
    if spec is not None and spec.origin is not None and Path(spec.origin).is_file():
        yield Path(spec.origin)


@cache
def code_digest() -> bytes:
    """Digest the code, its tables and the measured ones, so that answers of another version are not reused."""
    folder = Path(__file__).resolve().parents[2]
    digest = hashlib.sha256(metadata.version("aiconfigurator-core").encode())
    for path in sorted([*folder.rglob("*.py"), *folder.rglob("*.yaml")]):
        if path.relative_to(folder).parts[0] not in ("cli", "dashboard", "report", "lab"):
            digest.update(path.read_bytes())
    return digest.digest()
