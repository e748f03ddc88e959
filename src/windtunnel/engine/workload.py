"""From a workload to its requests: when each arrives and how many tokens it reads and writes."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.errors import InputError
from windtunnel.interop.requests_file import RecordedRequests, read_lengths, read_requests
from windtunnel.spec.workload import (
    MAX_REQUESTS,
    MAX_TOKENS,
    Arrivals,
    Burst,
    ClosedLoop,
    Empirical,
    Fixed,
    Gamma,
    Lengths,
    Lognormal,
    Normal,
    Poisson,
    Static,
    Trace,
    Uniform,
    Workload,
    Zipf,
)

STREAMS = ("arrivals", "input_tokens", "output_tokens")
"""Each has a generator of its own, spawned from the seed in this order; changing one leaves the others as they were."""

Seconds = NDArray[np.float64]
Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class PrefixArrays:
    """What prompts have in common: a forest of token segments. A root path spells the beginning of a prompt.

    Two prompts share what their paths share, and nothing else: siblings differ from their first token on. A shared
    system prompt is a root; a turn's path is its predecessor's, then the predecessor's output, then the new text; a
    trace with block hashes has a node for each distinct hash.
    """

    node_parent: Counts
    """[num_nodes] Comes before its children; -1: a root."""
    node_tokens: Counts
    """[num_nodes] Length of the segment, at least 1."""
    request_node: Counts
    """[num_requests] Whose root path is the part of the prompt that others may share; -1: nothing is. A prompt may be
    longer than its path: the rest is its own."""
    request_output_node: Counts
    """[num_requests] A child of `request_node` (or a root) that this request's unshared end of the prompt, if any, and
    its output become, so that a later turn can find them; no two requests have the same. -1: nobody asks for them."""


@dataclass(frozen=True, slots=True, eq=False)
class RequestArrays:
    """One row per request, in order of arrival; every array has shape [num_warmup + num_requests].

    Where turns follow one another, those with a predecessor arrive when that is done, wherever they stand.

    The first `num_warmup` rows are warm-up: copies of the first measured request, released at 0 s and all finished
    before the measured requests start, whose `arrival_s` count from that moment.
    """

    arrival_s: Seconds
    """Sorted. In an open loop when the request arrives; in a closed loop the earliest time that the client sends it."""
    input_tokens: Counts
    output_tokens: Counts
    priority: Counts
    """The smaller is served first."""
    concurrency: int = 0
    """Requests that the client keeps under way, or sessions where turns follow one another; 0 is an open loop."""
    num_warmup: int = 0
    previous: Counts | None = None
    """Row, further up, of the request whose completion lets this one be sent, or -1; None: all -1. At most one request
    waits for each."""
    think_s: Seconds | None = None
    """From the completion of `previous` to the sending; None: no time."""
    session: Counts | None = None
    """Number of the session, from 0, or -1; routers may keep a session on one replica. None: all -1."""
    prefixes: PrefixArrays | None = None
    """None: prompts have nothing in common."""

    @property
    def num_requests(self) -> int:
        """Without warm-up."""
        return len(self.arrival_s) - self.num_warmup


def generate(workload: Workload, seed: np.random.SeedSequence | int) -> RequestArrays:
    """The requests of `workload`, the same bytes for the same seed.

    A rate only stretches the times that a seed gives, and few requests are the first of many (common random numbers).

    Args:
        workload: distributions, a trace or both.
        seed: of the scenario; a `SeedSequence` is left as it was.

    Raises:
        InputError: a trace that cannot be read or is too short, or no request before `duration_s`.
    """
    rngs = _spawn(seed)
    recorded = _read_trace(workload, workload.trace) if workload.trace else None
    arrival_s = _arrival_times(workload, recorded, rngs["arrivals"])
    num_requests = len(arrival_s)
    requests = RequestArrays(
        arrival_s=arrival_s,
        input_tokens=_token_counts(workload, recorded, "input_tokens", num_requests, rngs),
        output_tokens=_token_counts(workload, recorded, "output_tokens", num_requests, rngs),
        priority=_priorities(recorded, num_requests),
    )
    return _behind_client(requests, workload.arrivals) if isinstance(workload.arrivals, ClosedLoop) else requests


def _spawn(seed: np.random.SeedSequence | int) -> dict[str, np.random.Generator]:
    """Generators as `SeedSequence.spawn` seeds them on its first call; spawn itself would change the caller's seed."""
    parent = seed if isinstance(seed, np.random.SeedSequence) else np.random.SeedSequence(seed)
    rngs = {}
    for index, stream in enumerate(STREAMS):
        key = (*parent.spawn_key, index)
        rngs[stream] = np.random.default_rng(
            np.random.SeedSequence(parent.entropy, spawn_key=key, pool_size=parent.pool_size)
        )
    return rngs


def _behind_client(requests: RequestArrays, client: ClosedLoop) -> RequestArrays:
    """`requests` of a client with `concurrency` slots, its warm-up put in front."""

    def warmed(column: NDArray[Any], warmup: Any) -> NDArray[Any]:
        return np.concatenate([np.full(client.num_warmup_requests, warmup, column.dtype), column])

    return RequestArrays(
        arrival_s=warmed(requests.arrival_s, 0.0),
        input_tokens=warmed(requests.input_tokens, requests.input_tokens[0]),
        output_tokens=warmed(requests.output_tokens, requests.output_tokens[0]),
        priority=warmed(requests.priority, requests.priority[0]),
        concurrency=client.concurrency,
        num_warmup=client.num_warmup_requests,
    )


def _read_trace(workload: Workload, trace: Trace) -> RecordedRequests:
    """The columns that `workload` leaves to its trace; where that is the times too, from `start_s` on and scaled."""
    given = (workload.arrivals, workload.input_tokens, workload.output_tokens)
    streams = ("arrival", "input_tokens", "output_tokens")
    recorded = read_requests(trace, [stream for stream, noun in zip(streams, given, strict=True) if noun is None])
    if recorded.arrival_s is not None:
        recorded = _from_start(recorded, recorded.arrival_s, trace)
    if workload.num_requests is not None and workload.num_requests > recorded.num_requests:
        found = f"{recorded.num_requests}{f' from {trace.start_s:g} s on' if trace.start_s else ''}"
        raise InputError(f"the workload asks for {workload.num_requests} requests, but {trace.path} has {found}")
    return recorded


def _from_start(recorded: RecordedRequests, arrival_s: Seconds, trace: Trace) -> RecordedRequests:
    first = np.searchsorted(arrival_s, trace.start_s)

    def rest(column: Counts | None) -> Counts | None:
        return None if column is None else column[first:]

    return replace(
        recorded,
        arrival_s=(arrival_s[first:] - trace.start_s) * trace.time_scale,
        input_tokens=rest(recorded.input_tokens),
        output_tokens=rest(recorded.output_tokens),
        priority=rest(recorded.priority),
    )


def _priorities(recorded: RecordedRequests | None, num_requests: int) -> Counts:
    if recorded is None or recorded.priority is None:
        return np.zeros(num_requests, np.int64)
    return recorded.priority[:num_requests]


def _arrival_times(workload: Workload, recorded: RecordedRequests | None, rng: np.random.Generator) -> Seconds:
    """The sorted arrival times of all requests."""
    limit = workload.num_requests or (recorded.num_requests if recorded else None)
    if workload.arrivals is not None:
        arrival_s = _draw_times(workload.arrivals, limit, workload.duration_s, rng)
    else:
        assert recorded is not None, "Workload checks that there is a trace"
        assert recorded.arrival_s is not None, "_read_trace asks for what is left out"
        arrival_s = recorded.arrival_s[:limit]
    if workload.duration_s is not None:
        arrival_s = arrival_s[: np.searchsorted(arrival_s, workload.duration_s)]
    if not len(arrival_s):
        when = f"within duration_s, {workload.duration_s:g} s" if workload.duration_s else "after the trace's start_s"
        raise InputError(f"no request of the workload arrives {when}")
    return arrival_s


def _draw_times(arrivals: Arrivals, limit: int | None, duration_s: float | None, rng: np.random.Generator) -> Seconds:
    """The arrival times of `limit` requests, or of fewer but all that are before `duration_s`.

    One of the two limits is given; a closed loop and a single burst have `limit` (`Workload` checks both).
    """
    match arrivals:
        case Static(rate_per_s=rate_per_s):
            return np.arange(_enough(limit, duration_s, rate_per_s)) / rate_per_s
        case Burst(num_per_burst=int(num_per_burst), interval_s=interval_s) if interval_s is not None:
            enough = _enough(limit, duration_s, num_per_burst / interval_s, num_per_burst)
            return np.asarray(np.arange(enough) // num_per_burst * interval_s, np.float64)
        case Poisson(rate_per_s=rate_per_s) | ClosedLoop(rate_per_s=rate_per_s) if rate_per_s is not None:
            return _renewals(rng.standard_exponential, rate_per_s, limit, duration_s)
        case Gamma(rate_per_s=rate_per_s, cv=cv):
            shape = 1 / cv**2
            return _renewals(lambda size: rng.standard_gamma(shape, size) / shape, rate_per_s, limit, duration_s)
        case _:
            assert limit is not None, "Workload checks that requests released at once are counted"
            return np.zeros(limit)


def _renewals(
    draw_gaps: Callable[[int], Seconds], rate_per_s: float, limit: int | None, duration_s: float | None
) -> Seconds:
    """Running sums of independent gaps; `draw_gaps` gives gaps of mean 1, which the rate only scales.

    Gaps are drawn until they pass the end: the count before a fixed time is then unbiased, whatever the first guess.
    """
    enough = _enough(limit, duration_s, rate_per_s)
    gaps = draw_gaps(enough)
    while duration_s is not None and (limit is None or len(gaps) < limit) and gaps.sum() < duration_s * rate_per_s:
        gaps = np.concatenate([gaps, draw_gaps(max(1024, enough // 8))])
    return np.cumsum(gaps[:limit]) / rate_per_s


def _enough(limit: int | None, duration_s: float | None, rate_per_s: float, num_per_burst: int = 1) -> int:
    """How many requests reach `limit`, or on average `duration_s`."""
    if duration_s is None:
        assert limit is not None, "Workload checks that it ends"
        return limit
    expected = duration_s * rate_per_s + num_per_burst + 1
    if limit is None and expected > MAX_REQUESTS:
        raise InputError(f"the workload has about {expected:.3g} requests, but at most {MAX_REQUESTS} can be simulated")
    return math.ceil(expected) if limit is None else math.ceil(min(limit, expected))


def _token_counts(
    workload: Workload,
    recorded: RecordedRequests | None,
    stream: str,
    num_requests: int,
    rngs: dict[str, np.random.Generator],
) -> Counts:
    lengths: Lengths | None = getattr(workload, stream)
    if lengths is not None:
        return draw_lengths(lengths, num_requests, rngs[stream], stream)
    column: Counts = getattr(recorded, stream)
    return column[:num_requests]


def draw_lengths(
    lengths: Lengths, num_requests: int, rng: np.random.Generator, stream: str = "input_tokens"
) -> NDArray[np.int64]:
    """Independent token counts, shape [num_requests], each at least 1.

    Args:
        lengths: the distribution.
        num_requests: how many to draw.
        rng: where the randomness comes from.
        stream: `input_tokens` or `output_tokens`: the column that an `Empirical` file is read for by default.

    Raises:
        InputError: the file of an `Empirical` cannot be read.
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
            return lengths.min_tokens + _draw_indices(ranks**-lengths.alpha, num_requests, rng)
        case Empirical():
            return _draw_empirical(lengths, num_requests, rng, stream)


def _rounded(tokens: NDArray[np.float64], min_tokens: int, max_tokens: int | None) -> Counts:
    return np.clip(np.rint(tokens), min_tokens, max_tokens or MAX_TOKENS).astype(np.int64)


def _draw_empirical(lengths: Empirical, num_requests: int, rng: np.random.Generator, stream: str) -> Counts:
    if lengths.path is not None:
        values = read_lengths(lengths.path, lengths.column, stream)
    else:
        values = np.array(lengths.values, np.int64)
    if lengths.weights is None:
        return values[rng.integers(len(values), size=num_requests)]
    return values[_draw_indices(np.array(lengths.weights, np.float64), num_requests, rng)]


def _draw_indices(weights: NDArray[np.float64], num_requests: int, rng: np.random.Generator) -> Counts:
    """Indices with probabilities proportional to `weights`, by inversion: one uniform number each.

    Dividing by the last running sum makes it exactly 1, above every uniform number in [0, 1).
    """
    cumulative = np.cumsum(weights)
    return np.searchsorted(cumulative / cumulative[-1], rng.random(num_requests), side="right")
