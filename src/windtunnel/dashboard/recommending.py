"""Recommendations that a form asks for: one search at a time, in a thread, with the best so far while it runs."""

import shlex
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from windtunnel import catalog
from windtunnel.dashboard.results import NotThereError
from windtunnel.dashboard.trial import MOST_SWEPT_REQUESTS, positive
from windtunnel.errors import InputError
from windtunnel.metrics.limits import parse_limits
from windtunnel.report.layout import layouts_beside
from windtunnel.report.search.study import SearchEvidence, evidence_of
from windtunnel.schema import encode
from windtunnel.search.executors import HERE
from windtunnel.search.prices import asked_prices
from windtunnel.search.recommend import deployments_space
from windtunnel.search.space.space import Space
from windtunnel.search.store import Store, default_path
from windtunnel.search.study import Watched, search
from windtunnel.serving.scenario import scenario_from
from windtunnel.serving.shorthand import parse_lengths, raw_scenario

MOST_S = 600.0
"""A longer search is stopped, with the best so far: it belongs in a terminal."""
MOST_DEVICES, TOP, KEPT = 8, 5, 20
"""Kinds of devices of one search, best points that are shown, and finished recommendations that are remembered."""
FORM: Mapping[str, Any] = layouts_beside(__file__)


State = Literal["running", "done", "stopped", "failed"]


class StoppedError(Exception):
    """The search was stopped."""


@dataclass(eq=False)
class Recommendation:
    """A search that says what to serve a model on, under way or ended."""

    number: int
    space: Space
    load: float | None
    """Requests/s of all replicas; None: the least money for a request wins."""
    command: str
    """The same on the command line."""
    stop: threading.Event = field(default_factory=threading.Event)
    state: State = "running"
    evidence: SearchEvidence | None = None
    """Once it has ended."""
    problem: str = ""
    """Why it failed, or ended early."""

    def __post_init__(self) -> None:
        self.store, self.end_s = Store(default_path(), lambda _: None), time.monotonic() + MOST_S

    @cached_property
    def watched(self) -> Watched:
        """The keys of the answers, by which the best so far is found."""
        return Watched(self.space)

    def shown(self) -> SearchEvidence:
        if self.evidence is not None:
            return self.evidence
        study = self.watched.study_of(self.store.known)
        return SearchEvidence(study, TOP, load=self.load, recommends=bool(study.outcomes[0].ranking))

    def run(self) -> None:
        """Search to the end, until it is stopped, or until `MOST_S` have passed."""
        try:
            self.evidence, self.state = self._searched()
        except Exception as error:  # noqa: BLE001 whatever it is, the page says why there is no answer
            self.problem, self.state = ". ".join(filter(None, (str(error), getattr(error, "hint", None)))), "failed"
        self.store.close()

    def _searched(self) -> tuple[SearchEvidence, State]:
        state: State = "done"
        try:
            study = search(self.space, self.store, replace(HERE, progress=self._check))
        except StoppedError:
            study, state = self.watched.study_of(self.store.known), "stopped"
        return evidence_of(study, self.store, TOP, self.load, recommends=bool(study.outcomes[0].evaluations)), state

    def _check(self, _finished: int, _total: int) -> None:
        if time.monotonic() > self.end_s:
            self.problem = f"It was stopped after {MOST_S:g} s; in a terminal it goes on to the end."
            self.stop.set()
        if self.stop.is_set():
            raise StoppedError


class Recommendations:
    """The recommendations of one dashboard, by number; safe for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_number: dict[int, Recommendation] = {}

    def start(self, query: Mapping[str, str]) -> Recommendation:
        """Start the search that a form describes; InputError where a field is wrong, or a search is under way."""
        space, load = space_of(query)
        with self._lock:
            running = next((each.number for each in self._by_number.values() if each.state == "running"), None)
            if running is not None:
                raise InputError(f"recommendation {running} is still under way", "stop it, or wait for its end")
            number = max(self._by_number, default=0) + 1
            started = self._by_number[number] = Recommendation(number, space, load, command_of(query))
            for old in list(self._by_number)[:-KEPT]:
                del self._by_number[old]
        threading.Thread(target=started.run, daemon=True).start()
        return started

    def get(self, number: str) -> Recommendation:
        """Return the recommendation of a number; NotThereError where there is none."""
        with self._lock:
            known = self._by_number.get(int(number)) if number.isdecimal() and len(number) < 10 else None
        if known is None:
            raise NotThereError(f"there is no recommendation {number!r}")
        return known

    def all(self) -> list[Recommendation]:
        """Return all that are remembered, the last first."""
        with self._lock:
            return list(reversed(self._by_number.values()))


def space_of(query: Mapping[str, str]) -> tuple[Space, float | None]:
    """Return the space that a form describes, and the load in requests/s where it gives one.

    Names are those of the catalog: nothing that is typed leads to a file. InputError names the field that is wrong.
    """
    given = _given(query)
    for name in ("model", "devices", "slo"):
        if not given.get(name, "").strip(" ,"):
            raise InputError(f"{FORM['fields'][name]['label']} is missing", FORM["first"][name])
    devices = [catalog.known_name("devices", name.strip()) for name in given["devices"].split(",") if name.strip()]
    if len(devices) > MOST_DEVICES:
        raise InputError(f"{len(devices)} devices are too many to try here", f"take {MOST_DEVICES} at most")
    rate, trace = _number("rate", given), None
    if "trace" in given:
        trace = catalog.known_name("traces", given["trace"])
    options: dict[str, Any] = {"model": catalog.known_name("models", given["model"]), "device": devices[0]}
    options["num_requests"] = round(_number("num_requests", given) or float(FORM["first"]["num_requests"]))
    if options["num_requests"] > MOST_SWEPT_REQUESTS:
        raise InputError(f"{options['num_requests']:,} requests are too many", f"take {MOST_SWEPT_REQUESTS:,} at most")
    for stream in ("input_tokens", "output_tokens"):
        if stream in given and trace is None:
            options[stream] = parse_lengths(FORM["fields"][stream]["label"], given[stream])
    shared = encode(scenario_from(raw_scenario({}, options, rate or (None if trace else 1.0), trace=trace)))
    most = _number("max_devices", given)
    budget = {"devices": most and round(most), "usd_per_hour": _number("max_usd_per_hour", given)}
    if "=" not in given.get("prices", "="):
        raise InputError(f"prices: {given['prices']!r} is no DEVICE=USD", "for instance gb200=10.50,mi300x=2.50")
    prices = asked_prices(given.get("prices"), given.get("provider"), None, devices)
    usd = {name: price.usd_per_hour for name, price in prices.items()}
    return deployments_space(shared, devices, parse_limits(given["slo"]), budget, usd), rate


def command_of(query: Mapping[str, str]) -> str:
    """Return the command that a form stands for."""
    given = _given(query)
    if "trace" in given:
        given = {name: text for name, text in given.items() if name not in ("input_tokens", "output_tokens")}
    options = [word for name in given if name != "model" for word in (f"--{name.replace('_', '-')}", given[name])]
    return shlex.join(["windtunnel", "recommend", given["model"], *options])


def _given(query: Mapping[str, str]) -> dict[str, str]:
    return {name: query[name].strip() for name in FORM["fields"] if query.get(name, "").strip()}


def _number(name: str, given: Mapping[str, str]) -> float | None:
    return positive(given[name], FORM["fields"][name]["label"]) if name in given else None
