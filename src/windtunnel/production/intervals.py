"""Price intervals of time of a running server by the steps that it must have taken in them.

An interval is taken as equal decode steps, and equal steps with prompts among them: their number follows from the
tokens between which a time passed, the requests that decoded, and the prompts. What is compared is the mean time
between tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from windtunnel.calibration.measured_runs import check_model
from windtunnel.calibration.steps.fit import shown_share
from windtunnel.calibration.steps.price import HOST, KINDS, OUTLIER, PricedSteps, price_every_step, without_outliers
from windtunnel.calibration.steps.read import COLUMNS, StepRun
from windtunnel.compiled.arrays import Bools, Floats, Ints
from windtunnel.errors import InputError
from windtunnel.formats.telemetry.prometheus import DECLARED
from windtunnel.formats.telemetry.record import ServerRecord
from windtunnel.pricing.estimator import Estimator
from windtunnel.serving.scenario import Setup

USUAL_PROMPT = 1024.0
"""Tokens of a prompt where nothing tells."""
TOKEN_TIMES = [DECLARED[engine]["itl"]["name"] for engine in ("vllm", "sglang")]
LEAST_GAPS = 10
"""Tokens below which an interval tells nothing."""
MOST_SLOW = 0.02
"""Share of an interval's time that may be of gaps `OUTLIER` times its longest step."""
MIXED = 0.1
"""Share of an interval's steps, by time, that prompts are part of, from which it counts as mixed."""


@dataclass(frozen=True)
class IntervalSteps:
    """The steps of intervals: those that only decode, and those with prompts."""

    steps: NDArray[Any]
    """Rows as of a table of recorded steps."""
    interval: Ints
    """Place of each row's interval."""
    share: Floats
    """Steps that each row stands for over the interval's steps that decode."""
    measured_s: Floats
    """[intervals] Mean time between tokens."""
    kept: Bools
    """Which intervals of the record these are."""


def steps_of(record: ServerRecord, max_num_batched_tokens: int) -> IntervalSteps:
    """Return the steps that a server's engines, taken as equally busy, took in each interval.

    With g gaps between tokens that lasted s seconds in all, in an interval of d seconds, g / n requests decode in each
    of n steps; where n is not exported, s / d do, as each second of a request that decodes is in one gap.
    """
    keep = (record.intervals["gaps"] >= LEAST_GAPS) & (record.intervals["gaps_s"] > 0)
    if not keep.any():
        hint = f"was the server idle, or are {' or '.join(TOKEN_TIMES)} missing?"
        raise InputError(f"{record.source}: no interval has {LEAST_GAPS} tokens behind others", hint)
    rows, engines = record.intervals[keep], record.num_engines
    gaps, counted = rows["gaps"] / engines, rows["steps"] / engines
    by_time = rows["gaps_s"] / engines / rows["duration_s"]
    decoding = np.maximum(np.divide(gaps, counted, out=by_time, where=counted > 0), 1.0)
    num_steps = gaps / decoding
    prompts = _prompts_of(rows, engines, record)
    budget = np.maximum(max_num_batched_tokens - decoding, 1.0)
    with_prompts = _steps_with_prompts(prompts, num_steps, budget)
    if record.step_tokens is not None:
        bounds, counts = record.step_tokens
        with_prompts = _by_size(with_prompts, prompts, decoding, budget, (bounds, counts[keep] / engines))
    mixed = np.bincount(with_prompts["interval"], with_prompts["count"], gaps.size)
    scale = np.minimum(1.0, num_steps / np.maximum(mixed, 1e-9))[with_prompts["interval"]]
    with_prompts["count"] *= scale
    mixed = np.minimum(mixed, num_steps)
    interval = np.concatenate([np.arange(gaps.size), with_prompts["interval"]])
    decode_only = num_steps if record.prompts_apart else num_steps - mixed
    share = np.concatenate([decode_only, with_prompts["count"]]) / num_steps[interval]
    context, variance = _contexts(rows, record)
    steps = np.zeros(interval.size, [(name, "U1" if column.is_text else float) for name, column in COLUMNS.items()])
    steps["counter"], steps["wall_s"] = np.arange(interval.size), 1.0
    steps["decode_requests"] = np.round(decoding)[interval]
    steps["decode_kv_tokens"] = np.round(context[interval] * steps["decode_requests"])
    steps["decode_kv_variance"] = variance[interval]
    if record.prompts_apart:
        for name in ("decode_requests", "decode_kv_tokens", "decode_kv_variance"):
            steps[name][gaps.size :] = 0
    for name in ("prefill_tokens", "prefill_requests", "prefill_kv_tokens"):
        steps[name][gaps.size :] = np.maximum(np.round(with_prompts[name]), name != "prefill_kv_tokens")
    return IntervalSteps(steps, interval, share, rows["gaps_s"] / rows["gaps"], keep)


PROMPTS = np.dtype([("count", float), ("tokens", float), ("cached", float)])
"""Of an interval: prompts, tokens of one that were computed, and that the prefix cache had."""
WITH_PROMPTS = np.dtype([
    ("interval", np.int64),
    *((name, float) for name in ("count", "prefill_tokens", "prefill_requests", "prefill_kv_tokens")),
])  # fmt: skip
"""Steps with prompts: how many, and what is in one."""


def _prompts_of(rows: NDArray[Any], engines: int, record: ServerRecord) -> NDArray[Any]:
    """Return the prompts of each interval on one engine; without a count, of the mean length."""
    computed = np.maximum(rows["prompt_tokens"] - rows["cached_tokens"], 0.0) / engines
    usual = record.lengths["input_tokens"].mean if "input_tokens" in record.lengths else USUAL_PROMPT
    counted = np.where(np.isnan(rows["prompts"]), rows["prompt_tokens"] / usual, rows["prompts"])
    prompts = np.zeros(rows.size, PROMPTS)
    prompts["count"] = np.where(computed > 0, np.maximum(counted / engines, 1e-9), 0.0)
    for name, tokens in (("tokens", computed), ("cached", rows["cached_tokens"] / engines)):
        np.divide(tokens, prompts["count"], out=prompts[name], where=prompts["count"] > 0)
    return prompts


def _steps_with_prompts(prompts: NDArray[Any], num_steps: Floats, budget: Floats) -> NDArray[Any]:
    """Return equal steps with the prompts of each interval.

    Q prompts of p tokens, in chunks of the token budget, make c = Q ceil(p / budget) chunks, which meet in
    n (1 - exp(-c / n)) of n steps if they come at random.
    """
    place = np.flatnonzero(prompts["count"] > 0)
    each, n = prompts[place], num_steps[place]
    chunks = np.maximum(np.ceil(each["tokens"] / budget[place]), 1.0)
    meeting = n * -np.expm1(-each["count"] * chunks / n)
    found = np.zeros(place.size, WITH_PROMPTS)
    found["interval"] = place
    found["count"] = np.minimum(np.maximum(meeting, each["count"] * each["tokens"] / budget[place]), n)
    found["prefill_tokens"] = each["count"] * each["tokens"] / found["count"]
    found["prefill_requests"] = each["count"] * chunks / found["count"]
    # A chunk is computed behind half of the prompt's other tokens, in the mean.
    behind = each["cached"] + each["tokens"] * (1 - 1 / chunks) / 2
    found["prefill_kv_tokens"] = behind * np.maximum(found["prefill_requests"], 1.0)
    return found


def _by_size(
    equal: NDArray[Any], prompts: NDArray[Any], decoding: Floats, budget: Floats, sizes: tuple[Floats, Floats]
) -> NDArray[Any]:
    """Return steps with prompts by the histogram of a step's tokens, where it shows them apart from others.

    Buckets above the one of the decoding requests hold them; a larger step than the budget's is that of a prompt's last
    chunk, with the tokens of all of its chunks.
    """
    bounds, counts = sizes
    low = np.concatenate([[0.0], bounds[:-1]])
    middle = np.where(np.isfinite(bounds), np.sqrt(np.maximum(low, 1.0) * bounds), 1.5 * low)
    found = [equal]
    for row in equal:
        place = row["interval"]
        above = (low >= decoding[place]) & (counts[place] > 0)
        total = row["count"] * row["prefill_tokens"]
        tokens = np.maximum(middle[above] - decoding[place], 1.0)
        guessed = float((counts[place][above] * tokens).sum())
        if not guessed or not 0.5 < total / guessed < 2.0:
            continue
        tokens *= total / guessed
        chunks = np.maximum(np.ceil(tokens / budget[place]), 1.0)
        apart = np.zeros(tokens.size, WITH_PROMPTS)
        apart["interval"], apart["count"] = place, counts[place][above] * chunks
        apart["prefill_tokens"] = tokens / chunks
        apart["prefill_requests"] = max(prompts["count"][place] / counts[place][above].sum(), 1.0)
        behind = prompts["cached"][place] + tokens * (1 - 1 / chunks) / 2
        apart["prefill_kv_tokens"] = behind * apart["prefill_requests"]
        row["count"] = 0.0
        found.append(apart)
    together = np.concatenate(found)
    return together[together["count"] > 0]


def _contexts(rows: NDArray[Any], record: ServerRecord) -> tuple[Floats, Floats]:
    """Return the mean of the decoding requests' contexts in each interval, and their variance.

    Where they are not known they follow from the lengths: a request decodes as long as its answer is, so that the mean
    position in an answer of o tokens is E[o^2] / 2 E[o], and the mean of its square E[o^3] / 3 E[o].
    """
    mean, variance = USUAL_PROMPT, 0.0
    if {"input_tokens", "output_tokens"} <= set(record.lengths):
        (inputs, of_input), (outputs, of_output) = (
            record.lengths[name].values() for name in ("input_tokens", "output_tokens")
        )
        first, second, third = (np.average(outputs**power, weights=of_output) for power in (1, 2, 3))
        position = second / first / 2
        prompt = np.average(inputs, weights=of_input)
        mean = prompt + position
        variance = np.average((inputs - prompt) ** 2, weights=of_input) + third / first / 3 - position**2
    elif np.isfinite(rows["context_tokens"]).any():
        mean = float(np.nanmean(rows["context_tokens"]))
    contexts = np.where(np.isfinite(rows["context_tokens"]), rows["context_tokens"], mean)
    # Deviations grow with the contexts.
    others = variance * (contexts / mean) ** 2
    return contexts, np.where(np.isfinite(rows["context_variance"]), rows["context_variance"], others)


def price_intervals(run: StepRun, record: ServerRecord, estimator_of: Callable[[Setup], Estimator]) -> PricedSteps:
    """Price intervals: each has a row, as if it were a step, with means over its steps.

    The host's time to launch steps is part of the device's here: means cannot tell which one bounds. Operators count as
    far as they show in the price.
    """
    setup = run.setup
    assert setup is not None
    _check_server(run, setup.engine.name, record)
    limit = setup.engine.max_num_batched_tokens
    assert limit is not None
    taken = steps_of(record, limit)
    decodes = taken.steps["decode_requests"]
    limits = {
        name: max(getattr(setup.engine, name) or 0, int((decodes + taken.steps[count]).max()))
        for name, count in (("max_num_batched_tokens", "prefill_tokens"), ("max_num_seqs", "prefill_requests"))
    }
    engine = msgspec.structs.replace(setup.engine, **limits)
    every = price_every_step(replace(run, steps=taken.steps, setup=replace(setup, engine=engine)), estimator_of)
    count = taken.measured_s.size

    def mean(values: Floats) -> Floats:
        return np.asarray(np.bincount(taken.interval, taken.share * values, count), np.float64)

    predicted_s, decode_share = mean(every.predicted_s), mean(every.decode_share)
    shown = shown_share(every.device_s, every.launch_s)
    prompts_s = mean(every.predicted_s * (1 - every.decode_share))
    is_mixed = prompts_s > MIXED * predicted_s
    priced = replace(
        every,
        kind=np.where(is_mixed, KINDS.index("mixed"), KINDS.index("decode")),
        measured_s=taken.measured_s,
        predicted_s=predicted_s,
        device_s=predicted_s,
        unhidden_s=0.0,
        launch_s=np.zeros(count),
        is_in_pieces=np.zeros(count, np.bool_),
        families_s={name: mean(seconds * shown) for name, seconds in every.families_s.items() if name != HOST},
        num_requests=mean(every.num_requests),
        context_variation=np.zeros(count),
        decode_share=decode_share,
        others_s=np.zeros(count),
    )
    return without_outliers(priced.taken(~_has_slow_gaps(priced, taken, every.predicted_s, record)))


def _check_server(run: StepRun, described: str, record: ServerRecord) -> None:
    """Raise InputError where another engine or model emitted a record than the one that is described."""
    if record.model:
        check_model(run.name, record.model, run.model)
    if record.engine not in ("", described) and described in DECLARED:
        said = f"{run.name} is of {record.engine}, and the engine of the described server is {described}"
        raise InputError(said, f"--engine {record.engine}, or the command of the server that emitted it")


def _has_slow_gaps(priced: PricedSteps, taken: IntervalSteps, row_s: Floats, record: ServerRecord) -> Bools:
    """Mark intervals in which gaps far longer than any of their steps, as of compilation, take a part of the time."""
    if record.gap_times is None:
        return np.zeros(priced.kind.size, np.bool_)
    longest_s = np.zeros(priced.kind.size)
    # A token waits for its own step, and for the steps of prompts that decode nothing.
    (np.add if record.prompts_apart else np.maximum).at(longest_s, taken.interval, row_s)
    longest_s *= np.median(priced.measured_s / priced.predicted_s)
    bounds, counts = record.gap_times[0], record.gap_times[1][taken.kept]
    low = np.concatenate([[0.0], bounds[:-1]])
    slow_s = (counts * np.where(low > OUTLIER * longest_s[:, None], low, 0.0)).sum(axis=1)
    return np.asarray(slow_s > MOST_SLOW * (counts.sum(axis=1) * priced.measured_s))
