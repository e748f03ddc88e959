"""Divide devices between the rollouts and the training of a reinforcement-learning job.

An iteration samples answers to a batch of prompts (the rollouts), computes their log probabilities and trains on them.
The serving loop says how long the rollouts take, the training simulator how long the rest does.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import ceil, lcm
from typing import Any, Literal

import numpy as np
from msgspec.structs import replace

from windtunnel.errors import InputError
from windtunnel.model.memory import weight_bytes
from windtunnel.schema import encode
from windtunnel.search.answers import job_of
from windtunnel.search.executors import HERE, Means
from windtunnel.search.space.space import ALL, LAYOUTS, space_from
from windtunnel.search.store import Store
from windtunnel.search.study import search
from windtunnel.serving.results import Result
from windtunnel.serving.scenario import Scenario, Setup, resolve
from windtunnel.serving.setup.estimators import shard_of
from windtunnel.serving.simulate import simulate
from windtunnel.training.job import TrainingJob, load
from windtunnel.training.step import TrainingResult, simulate_training
from windtunnel.units import format_count
from windtunnel.workload.arrivals import Burst, ClosedLoop
from windtunnel.workload.generate.requests import generate

Way = Literal["colocated", "one_step_off", "asynchronous"]
"""How rollouts and training run: in turn on the same devices; at the same time on their own, training on the answers of
the iteration before; or so, and rollouts never wait for the longest answer of a batch."""
WAYS: tuple[Way, ...] = ("colocated", "one_step_off", "asynchronous")
MOST_DIVISIONS = 8
"""Divisions of the devices that are tried, evenly spaced; whole nodes where there are four or more."""
LEAST_NODES = 4
SEQUENCE_MULTIPLE = 128
"""Tokens to whose multiple a packed sequence is rounded up."""
DERIVED = ("device", "node", "num_devices", "sequence_tokens", "global_batch", "document_tokens")
"""Keys of a training job that follow from the rollouts."""

Doing = Callable[[int, int], None]
"""Called with (simulations done, simulations in all)."""


@dataclass(frozen=True)
class AnswerBatch:
    """Lengths of the sequences of one iteration, prompts and answers together."""

    num_sequences: int
    num_tokens: int
    longest_tokens: int
    document_tokens: int
    """Sum of squared lengths over the sum of lengths: equal documents of this length have as many tokens and as much
    attention."""


@dataclass(frozen=True)
class Rollouts:
    """The rollouts of one iteration on some replicas."""

    num_devices: int
    makespan_s: float
    """From the first request to the last token."""
    p90_s: float
    """Until 90% of the answers are done."""
    endless_s: float
    """Time in which replicas that always have a whole batch under way give as many tokens."""
    longest_s: float
    """Time that the longest answer is then under way."""
    update_s: float
    """New weights reach every device, each its shard_of(own) at the rate of its link."""


@dataclass(frozen=True)
class Training:
    """What an iteration computes beside the rollouts."""

    num_devices: int
    forward_s: float
    """All forward passes for log probabilities."""
    step_s: float
    result: TrainingResult

    @property
    def seconds(self) -> float:
        return self.forward_s + self.step_s


@dataclass(frozen=True)
class Iteration:
    """One way of running an iteration on one division of the devices."""

    way: Way
    rollouts: Rollouts
    training: Training

    @property
    def seconds(self) -> float:
        """Time from one iteration to the next."""
        rollouts, training = self.rollouts, self.training
        match self.way:
            case "colocated":
                return rollouts.makespan_s + training.seconds + rollouts.update_s
            case "one_step_off":
                return max(rollouts.makespan_s, training.seconds) + rollouts.update_s
            case "asynchronous":
                return max(rollouts.endless_s + rollouts.update_s, training.seconds)

    @property
    def num_versions_behind(self) -> int:
        """How many updates old the weights may be that an answer was begun with, when it is trained on."""
        match self.way:
            case "colocated":
                return 0
            case "one_step_off":
                return 1
            case "asynchronous":
                return ceil(self.rollouts.longest_s / self.seconds)

    @property
    def waits(self) -> str:
        """Which of the two waits for the other, as `training` or `rollouts`; empty where they take turns."""
        if self.way == "colocated":
            return ""
        rollouts_s = self.rollouts.makespan_s if self.way == "one_step_off" else self.rollouts.endless_s
        return "training" if rollouts_s > self.training.seconds else "rollouts"


@dataclass(frozen=True, eq=False)
class Division:
    """Every way of running the iterations, on every division of the devices that can run it."""

    scenario: Scenario
    num_devices: int
    batch: AnswerBatch
    iterations: tuple[Iteration, ...]
    refused: Mapping[int, str]
    """Devices of training -> why no layout of it runs."""

    @cached_property
    def usd_per_hour(self) -> float | None:
        """Price of all devices; None where it is not known."""
        given, device = self.scenario.deployment.price_usd_per_hour, resolve(self.scenario).device
        price = device.price_usd_per_hour if given is None else given
        return None if price is None else price * self.num_devices

    def best_of(self, way: Way) -> Iteration | None:
        """Return the fastest iteration of a way."""
        return min((each for each in self.iterations if each.way == way), key=lambda each: each.seconds, default=None)

    @cached_property
    def best(self) -> Iteration:
        """The fastest of all; of equal ones the one whose answers are the least stale."""
        return min(self.iterations, key=lambda each: each.seconds)


def divide(
    scenario: Scenario,
    num_devices: int,
    job: Mapping[str, Any],
    forward_passes: int = 2,
    store: Store | None = None,
    means: Means = HERE,
    doing: Doing = lambda *_: None,
) -> Division:
    """Try every division of `num_devices` devices between rollouts and training. InputError where the scenario is no
    batch, the job names what follows from it, or no division can run.

    Args:
        scenario: one batch of rollouts that are sent at once, on replicas of one kind; their number is what is tried.
        job: keys of a training job beside those that follow from the rollouts (`DERIVED`). With `parallelism` the
            layout is fixed but for data parallelism, without it every layout is tried.
        forward_passes: passes over the answers for log probabilities: of the policy before the step, and of a reference
            model.
        store: keeps the answers of the search for layouts; None: none.
    """
    _check(scenario, job, num_devices)
    own, batch = resolve(scenario), _batch_of(scenario)
    _job(scenario, job, num_devices, batch)  # what no number of devices mends is said at once
    size, store = own.parallelism.num_devices, store or Store(None, lambda _: None)
    # Multiples of a replica, of whole nodes where there are many.
    step = lcm(size, own.node.num_devices) if num_devices >= LEAST_NODES * own.node.num_devices else size
    step *= ceil(num_devices / step / MOST_DIVISIONS)
    numbers = [(number, num_devices - number) for number in range(step, num_devices, step)]
    numbers.append((num_devices, num_devices))
    rollouts: dict[int, Rollouts] = {}
    training: dict[int, Training] = {}
    refused: dict[int, str] = {}
    for done, (first, second) in enumerate(numbers):
        rollouts[first] = _rollouts(scenario, first, first // size, _update_s(own, num_devices))
        doing(2 * done + 1, 2 * len(numbers))
        try:
            training[second] = _training(scenario, job, second, batch, forward_passes, store, means)
        except InputError as error:
            refused[second] = error.message
        doing(2 * done + 2, 2 * len(numbers))
    iterations = tuple(
        Iteration(way, rollouts[first], training[second])
        for way in WAYS
        for first, second in (numbers[-1:] if way == WAYS[0] else numbers[:-1])
        if second in training
    )
    if not iterations:
        what = f"no division of {format_count(num_devices, 'device')} can train the model"
        raise InputError(f"{what}: {'; '.join(sorted(set(refused.values())))}", "give it more devices")
    return Division(scenario, num_devices, batch, iterations, refused)


def _batch_of(scenario: Scenario) -> AnswerBatch:
    requests = generate(scenario.workload, scenario.seed)
    lengths = requests.input_tokens + requests.output_tokens
    squares = float((lengths.astype(np.float64) ** 2).sum())
    return AnswerBatch(lengths.size, int(lengths.sum()), int(lengths.max()), round(squares / lengths.sum()))


def _update_s(setup: Setup, num_devices: int) -> float:
    node = setup.node
    link = node.scale_out if num_devices > node.num_devices and node.scale_out else node.scale_up
    return weight_bytes(shard_of(setup)) / link.bytes_per_s + link.latency_s


def _check(scenario: Scenario, job: Mapping[str, Any], num_devices: int) -> None:
    arrivals, deployment = scenario.workload.arrivals, scenario.deployment
    if not isinstance(arrivals, Burst) or arrivals.interval_s is not None or scenario.workload.num_requests is None:
        raise InputError("rollouts are a batch that is sent at once", "give arrivals: {type: burst} and num_requests")
    if scenario.workload.is_pooling:
        raise InputError(f"task is {scenario.workload.task!r}, whose requests have no answers to train on")
    if deployment.pools or deployment.autoscaling is not None or deployment.faults is not None:
        raise InputError("rollouts are divided over equal replicas", "leave out pools, autoscaling and faults")
    if given := [name for name in DERIVED if job.get(name) is not None]:
        raise InputError(f"the rollouts decide {', '.join(given)} of the training job", "leave that out")
    size = resolve(scenario).parallelism.num_devices
    if num_devices < 2 * size:
        raise InputError(
            f"{format_count(num_devices, 'device')} cannot be divided: a replica has {size}",
            f"give {2 * size} or more, or a smaller tp",
        )


def _rollouts(scenario: Scenario, num_devices: int, replicas: int, update_s: float) -> Rollouts:
    requests = _on_replicas(scenario, replicas).requests
    ends_s = np.sort(requests["finish_s"]) - requests["arrival_s"].min()
    workload, count = scenario.workload, ends_s.size
    trace = workload.trace and replace(workload.trace, order="resampled")
    endless = replace(workload, arrivals=ClosedLoop(concurrency=count), num_requests=3 * count, trace=trace)
    steady = _on_replicas(replace(scenario, workload=endless), replicas).requests
    finishes_s = np.sort(steady["finish_s"])
    begin_s, end_s = finishes_s[count - 1], finishes_s[2 * count - 1]
    first_s, last_s = steady["first_token_s"], steady["finish_s"]
    inside_s = np.maximum(np.minimum(last_s, end_s) - np.maximum(first_s, begin_s), 0.0)
    is_inside = (first_s > begin_s) & (last_s <= end_s)
    fraction = np.where(last_s > first_s, inside_s / np.where(last_s > first_s, last_s - first_s, 1.0), is_inside)
    rate = float((steady["output_tokens"] * fraction).sum()) / (end_s - begin_s)
    return Rollouts(
        num_devices=num_devices,
        makespan_s=float(ends_s[-1]),
        p90_s=float(ends_s[int(0.9 * (count - 1))]),
        endless_s=float(requests["output_tokens"].sum() / rate),
        longest_s=float((steady["finish_s"] - steady["arrival_s"]).max()),
        update_s=update_s,
    )


def _on_replicas(scenario: Scenario, replicas: int) -> Result:
    return simulate(scenario.with_deployment(replicas=replicas))


def _job(scenario: Scenario, given: Mapping[str, Any], num_devices: int, batch: AnswerBatch) -> TrainingJob:
    """Return the training job on so many devices.

    The answers are packed into as many sequences as are about the longest one's length, a multiple of the devices, so
    that every layout divides them.
    """
    num_packed = max(round(batch.num_tokens / batch.longest_tokens / num_devices), 1) * num_devices
    tokens = ceil(batch.num_tokens / num_packed / SEQUENCE_MULTIPLE) * SEQUENCE_MULTIPLE
    raw = {
        "model": encode(scenario.model),
        **given,
        "device": encode(scenario.deployment.device),
        "node": encode(scenario.deployment.node),
        "num_devices": num_devices,
        "sequence_tokens": tokens,
        "global_batch": num_packed,
        "document_tokens": min(batch.document_tokens, tokens),
    }
    return load(None, raw)


def _training(
    scenario: Scenario,
    given: Mapping[str, Any],
    num_devices: int,
    batch: AnswerBatch,
    passes: int,
    store: Store,
    means: Means,
) -> Training:
    """Return the fastest training step on so many devices."""
    job = _job(scenario, given, num_devices, batch)
    if given.get("parallelism") is None:
        study = search(space_from({**encode(job), "vary": {LAYOUTS: ALL}}), store, means)
        ranking = study.outcomes[0].ranking
        if not ranking:
            raise InputError("no layout fits the devices' memory")
        job = job_of(study, ranking[0])
    result = simulate_training(job)
    if not result.fits:
        raise InputError("the layout does not fit the devices' memory")
    # A forward pass takes its share of the passes' time, in a pipeline as full.
    forward, *backward = (sum(cost.passes[kind].seconds for cost in result.costs) for kind in range(3))
    forward_s = float(result.timeline.spans_s.max()) * forward / (forward + sum(backward))
    return Training(num_devices, passes * forward_s, result.step_s, result)
