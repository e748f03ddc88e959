"""Random draws: a generator for each stream of a workload; lengths, counts and times from their distributions."""

import math

import numpy as np

from windtunnel.compiled.arrays import Floats, Ints
from windtunnel.workload import sessions as spec
from windtunnel.workload.lengths import MAX_TOKENS, Empirical, Fixed, Lengths, Lognormal, Normal, Uniform, Zipf
from windtunnel.workload.traces.requests import read_lengths

STREAMS = (
    *("arrivals", "input_tokens", "output_tokens", "turns", "think_times", "followup_tokens", "tool_calls"),
    *("tool_times", "tool_tokens", "prompts", "prompt_tokens", "tenants", "order"),
)
"""Streams of random numbers, each with its own generator, spawned from the seed in this order."""

Seconds = Floats
Counts = Ints


def spawn(parent: np.random.SeedSequence) -> dict[str, np.random.Generator]:
    """Return generators as `SeedSequence.spawn` seeds them on its first call, without changing the caller's seed."""
    return {stream: np.random.default_rng(child(parent, index)) for index, stream in enumerate(STREAMS)}


def child(parent: np.random.SeedSequence, index: int) -> np.random.SeedSequence:
    """Return the `index`-th seed that `parent` spawns."""
    return np.random.SeedSequence(parent.entropy, spawn_key=(*parent.spawn_key, index), pool_size=parent.pool_size)


def draw_lengths(lengths: Lengths, num_requests: int, rng: np.random.Generator, stream: str = "input_tokens") -> Ints:
    """Draw independent token counts, shape `[num_requests]`, each at least 1.

    `stream`, `input_tokens` or `output_tokens`, is the column that an `Empirical` file is read for by default.
    InputError where the file of an `Empirical` cannot be read.
    """
    match lengths:
        case int(tokens) | Fixed(tokens=tokens):
            return np.full(num_requests, tokens, np.int64)
        case Uniform():
            return rng.integers(lengths.min_tokens, lengths.max_tokens, num_requests, np.int64, endpoint=True)
        case Normal():
            normal = rng.standard_normal(num_requests) * lengths.std_tokens + lengths.mean_tokens
            return _rounded(normal, lengths.min_tokens, lengths.max_tokens)
        case Lognormal():
            log_tokens = rng.standard_normal(num_requests) * lengths.sigma + math.log(lengths.median_tokens)
            lognormal = np.exp(np.minimum(log_tokens, math.log(MAX_TOKENS)))
            return _rounded(lognormal, lengths.min_tokens, lengths.max_tokens)
        case Zipf():
            ranks = np.arange(1, lengths.max_tokens - lengths.min_tokens + 2, dtype=np.float64)
            return lengths.min_tokens + draw_indices(ranks**-lengths.alpha, num_requests, rng)
        case Empirical(path=path, values=values):
            column = np.array(values, np.int64) if path is None else read_lengths(path, lengths.column, stream)
            return _draw_values(column, lengths.weights, num_requests, rng)


def _rounded(tokens: Floats, min_tokens: int, max_tokens: int | None) -> Counts:
    return np.clip(np.rint(tokens), min_tokens, max_tokens or MAX_TOKENS).astype(np.int64)


def _draw_values(values: Counts, weights: tuple[float, ...] | None, size: int, rng: np.random.Generator) -> Counts:
    """Draw from given values with replacement; without weights all are equally likely."""
    if weights is None:
        return values[rng.integers(values.size, size=size)]
    return values[draw_indices(np.array(weights, np.float64), size, rng)]


def draw_indices(weights: Floats, num_requests: int, rng: np.random.Generator) -> Counts:
    """Draw indices with probabilities proportional to `weights`, by inversion: one uniform number each.

    Dividing by the last running sum makes it exactly 1, above every uniform number in [0, 1).
    """
    cumulative = np.cumsum(weights)
    return np.searchsorted(cumulative / cumulative[-1], rng.random(num_requests), side="right")


def client_lengths(
    input_tokens: Lengths | None, output_tokens: Lengths | None, num_requests: int, seed: int
) -> tuple[Counts, Counts]:
    """Draw the prompt and output tokens of a benchmark client's random data set, number for number.

    All prompts are drawn before all outputs, so that another number of requests has other outputs.

    Args:
        input_tokens, output_tokens: numbers, or uniform.
        seed: seed of NumPy's legacy generator, whose numbers no later NumPy changes.

    Source: https://github.com/kimbochen/bench_serving, `sample_random_requests` of `benchmark_serving.py`.
    """
    rng = np.random.RandomState(seed)

    def draw(lengths: Lengths | None) -> Counts:
        if isinstance(lengths, int):
            return rng.randint(lengths, lengths + 1, num_requests, np.int64)
        assert isinstance(lengths, Uniform), "Workload checks that lengths are numbers or uniform"
        return rng.randint(lengths.min_tokens, lengths.max_tokens + 1, num_requests, np.int64)

    return draw(input_tokens), draw(output_tokens)


def draw_counts(counts: spec.Counts, size: int, rng: np.random.Generator) -> Counts:
    """Draw independent counts, shape `[size]`."""
    match counts:
        case int():
            return np.full(size, counts, np.int64)
        case spec.Geometric(mean=mean, least=least):
            return np.minimum(least - 1 + rng.geometric(1 / (1 + mean - least), size), spec.MAX_TURNS)
        case spec.UniformCount(least=least, most=most):
            return rng.integers(least, most, size, np.int64, endpoint=True)
        case spec.EmpiricalCount(values=values, weights=weights):
            return _draw_values(np.array(values, np.int64), weights, size, rng)


def draw_durations(durations: spec.Durations, size: int, rng: np.random.Generator) -> Seconds:
    """Draw independent times in seconds, shape `[size]`."""
    match durations:
        case int() | float():
            return np.full(size, float(durations))
        case spec.Exponential(mean_s=mean_s):
            return rng.standard_exponential(size) * mean_s
        case spec.UniformSeconds(min_s=min_s, max_s=max_s):
            return rng.random(size) * (max_s - min_s) + min_s
        case _:
            return np.exp(rng.standard_normal(size) * durations.sigma) * durations.median_s
