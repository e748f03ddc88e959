"""Evaluate the points of a space of training jobs: whether they are valid and fit into memory, and their step time."""

import copy
import hashlib
from dataclasses import dataclass, field
from typing import Any

import msgspec

from windtunnel.errors import InputError, check_known
from windtunnel.hardware import Device, Node
from windtunnel.metrics.summary import SECONDS_PER_HOUR
from windtunnel.model.shape import ModelSpec
from windtunnel.schema import decode, fields_of, set_path
from windtunnel.search.evaluation.evaluate import code_digest, files_digest
from windtunnel.search.evaluation.figures import Takes, check_budget
from windtunnel.search.evaluation.schema import Evaluation
from windtunnel.search.space.space import Space, point_at
from windtunnel.training.campaign import campaign
from windtunnel.training.costs import same_layers
from windtunnel.training.degrees import degrees
from windtunnel.training.job import TrainingJob
from windtunnel.training.pricing import TrainingPricer
from windtunnel.training.setup import TrainingSetup, check_virtual_stages, look_up, resolve, with_zero
from windtunnel.training.step import simulate_with, step_interval, training_prices
from windtunnel.units import parse_quantity

LIMITS = {"step": "step_s", "run": "run_s"}
"""Name in a space's `limits` -> the figure that it bounds."""
MEMORY = "memory"
ZERO = "zero"
MOST_DRAWN_UP, MOST_WORKS = 20_000, 200
"""Most jobs that are kept between their key and their evaluation, and most kinds of layers that are kept priced."""


@dataclass(frozen=True, eq=False)
class TrainingEvaluator:
    """Evaluates the points of a space of training jobs; keeps what they share: names looked up, prices.

    Its methods take the same arguments as those of `Evaluator`; workloads, questions and neighbours do not matter here.
    """

    space: Space
    names: dict[bytes, tuple[ModelSpec, Device, Node]] = field(default_factory=dict)
    prices: dict[Any, TrainingPricer] = field(default_factory=dict)
    works: dict[Any, dict[object, Any]] = field(default_factory=dict)
    """Model, hardware and `same_layers` of jobs -> what their layers do and cost; of the last points alone."""
    drawn_up: dict[int, TrainingSetup] = field(default_factory=dict)
    """Points that were asked for a key and not yet evaluated."""
    last: dict[int, TrainingJob | InputError] = field(default_factory=dict)
    """The last point's job without its stage of ZeRO, or why there is none; points that follow may share it."""

    def job(self, index: int) -> TrainingJob:
        """Return the job of a point; InputError where it is no job."""
        raw, settings = copy.deepcopy(self.space.job), point_at(self.space, index).settings
        for path, value in settings.items():
            set_path(raw, path, copy.deepcopy(value))
        job = decode(raw, TrainingJob, "")
        return with_zero(job, job.sharding.zero or 0, settings) if "sharding.zero" in settings else job

    def check(self, index: int, *_: object) -> None:
        """Raise InputError where the point is no possible job."""
        self._setup(index)

    def num_requests(self, *_: object) -> int:
        """Raise InputError: a job has no stream of requests to take the first ones of."""
        raise InputError("a training step has no requests to begin with: halving needs them", "take exhaustive or tpe")

    def family(self, *_: object) -> bytes:
        """Return one key for all points: they share everything that is kept."""
        return b""

    def key(self, index: int, *_: object) -> str:
        """Digest all that decides a point's answer: the job with its framework's defaults, the catalog's entries and
        the files that it names, the limits, and the code. InputError where the point is no possible job."""
        setup = self._setup(index)
        if len(self.drawn_up) < MOST_DRAWN_UP:
            self.drawn_up[index] = setup
        plain = msgspec.json.encode((setup.job, job_limits(self.space.limits)))
        parts = (code_digest(), plain, files_digest(msgspec.to_builtins(setup.job.network)))
        return hashlib.sha256(b"\0".join(parts)).hexdigest()

    def evaluate(self, index: int, *_: object) -> Evaluation:
        """Evaluate one point; a refusal is an answer too."""
        try:
            setup = self.drawn_up.pop(index, None) or self._setup(index)
            result = simulate_with(setup, self._prices(setup), self._works(setup))
        except InputError as error:
            return Evaluation(refused=error.message)
        memory, interval, takes = result.worst_memory.needed_bytes, step_interval(result), _takes(result.setup)
        exposed = sum(seconds for name, seconds in result.breakdown_s.items() if name.startswith("exposed"))
        figures = {
            "devices": float(takes.devices),
            "step_s": result.step_s,
            "step_low_s": interval.low,
            "step_high_s": interval.high,
            **fields_of(result, "tokens_per_s", "tokens_per_s_per_device", "mfu", "hfu", "bubble_fraction"),
            "exposed_fraction": exposed / result.step_s,
            "memory_bytes": memory,
            "memory_fraction": memory / result.setup.device.memory_bytes,
        }
        if takes.usd_per_hour is not None:
            figures["usd_per_hour"] = takes.usd_per_hour
            figures["tokens_per_usd"] = result.tokens_per_s * SECONDS_PER_HOUR / takes.usd_per_hour
        if takes.busy_w is not None:
            figures["token_j"] = takes.busy_w / result.tokens_per_s
        run = campaign(result)
        if run is not None:
            run_figures = {"run_s": run.elapsed_s, "run_usd": run.usd, "run_j": run.energy_j}
            figures |= {name: value for name, value in run_figures.items() if value is not None}
        limits = job_limits(self.space.limits).items()
        broken = next((name for name, limit in limits if figures[LIMITS[name]] > limit), "")
        limited_by = broken if result.fits else MEMORY
        return Evaluation(limited_by=limited_by, figures=figures, holds=not limited_by, num_runs=1)

    def _setup(self, index: int) -> TrainingSetup:
        job = self._job_of(index)
        key = msgspec.json.encode((job.model, job.device, job.node))
        if key not in self.names:
            self.names[key] = look_up(job)
        model, device, node = self.names[key]
        setup = resolve(msgspec.structs.replace(job, model=model, device=device, node=node))
        check_budget(_takes(setup), self.space.budget)
        return setup

    def _job_of(self, index: int) -> TrainingJob:
        """Return the job of a point; points that differ in the last setting alone, where that is the stage of ZeRO,
        share all that does not depend on it.
        """
        name, values = next(reversed(self.space.vary.items()), ("", []))
        if name != ZERO or not isinstance(values, list):
            job = self.job(index)
            self._check(job)
            return job
        first, stage = divmod(index, len(values))
        if first not in self.last:
            self.last.clear()
            try:
                self.last[first] = job = self.job(index)
                self._check(job)
            except InputError as error:
                self.last[first] = error
        shared = self.last[first]
        if isinstance(shared, InputError):
            raise shared
        return with_zero(shared, values[stage])

    def _check(self, job: TrainingJob) -> None:
        """Raise InputError where a job is impossible for a reason that is seen in its degrees or its limits."""
        check_virtual_stages(job)
        if "run" in self.space.limits and job.total_tokens is None:
            raise InputError("a limit on the run needs total_tokens", "give the number of tokens to train on")
        degrees(job)

    def _works(self, setup: TrainingSetup) -> dict[object, Any]:
        """Return what the layers of jobs do that differ in data and pipeline parallelism alone."""
        if setup.job.network is not None:
            return {}
        # By their values: a space may vary the model, and two files of devices may have one name.
        key = (setup.model, msgspec.json.encode((setup.device, setup.node)), same_layers(setup))
        if len(self.works) > MOST_WORKS and key not in self.works:
            self.works.clear()
        return self.works.setdefault(key, {})

    def _prices(self, setup: TrainingSetup) -> TrainingPricer:
        network = setup.job.network
        hardware = msgspec.json.encode((setup.device, setup.node))
        key = (hardware, network, None if network is None else setup.degrees.num_devices)
        if key not in self.prices:
            self.prices[key] = training_prices(setup)
        return self.prices[key]


def job_limits(limits: dict[str, float | str]) -> dict[str, float]:
    """Convert `{step: 12s, run: 30d}` to seconds; InputError for another limit, or what is no positive time."""
    seconds = {}
    for name, value in limits.items():
        hint = f"a training job has {', '.join(LIMITS)}"
        check_known(name, LIMITS, f"there is no limit {name!r} of a training job", hint)
        seconds[name] = parse_quantity(f"{name}_s", str(value))
        if seconds[name] <= 0:
            raise InputError(f"limits.{name} is {value}; more than 0 is needed")
    return seconds


def _takes(setup: TrainingSetup) -> Takes:
    num_devices, device = setup.degrees.num_devices, setup.device
    price = setup.job.price_usd_per_hour if setup.job.price_usd_per_hour is not None else device.price_usd_per_hour
    return Takes(
        devices=num_devices,
        usd_per_hour=None if price is None else price * num_devices,
        busy_w=None if device.tdp_w is None else device.tdp_w * num_devices,
    )
