"""Intervals of time of a running server, and the lengths of its requests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.compiled.arrays import Floats
from windtunnel.errors import InputError

INTERVAL = np.dtype([
    (name, np.float64)
    for name in (
        "start_s", "duration_s", "prompts", "prompt_tokens", "cached_tokens", "generation_tokens", "gaps", "gaps_s",
        "steps", "running", "waiting", "context_tokens", "context_variance",
    )
])  # fmt: skip
"""What a server did in an interval, all of its engines together. `prompts` had their first token in it, with
`prompt_tokens` in all, `cached_tokens` of them from the prefix cache. `gaps` are pairs of output tokens of a request
behind one another, `gaps_s` the sum of their times: over a step, that of all requests that decode. `running` and
`waiting` requests are means; `context_tokens` are those of a running request in the KV cache, and `context_variance` is
that of the requests running together. NaN: not known."""
NUM_PERIODS, LEAST_PERIOD_S = 60, 1.0
PARTS = 4
"""Values that stand for a bucket."""


@dataclass(frozen=True)
class Buckets:
    """A histogram of lengths."""

    bounds: tuple[float, ...]
    """Upper bounds, rising, the last one infinite."""
    counts: tuple[float, ...]
    """Of values up to each bound and above the one before."""
    mean: float

    def values(self) -> tuple[Floats, Floats]:
        """Return lengths and their weights, with the histogram's mean: `PARTS` of each bucket, all on the same power of
        the way from its lower to its upper bound, in logarithms.
        """
        used = [place for place, count in enumerate(self.counts) if count > 0]
        lows = np.array([max(self.bounds[place - 1] + 1, 1.0) if place else 1.0 for place in used])
        highs = np.array([self.bounds[place] for place in used])
        highs = np.where(np.isfinite(highs), highs, 2 * lows)
        weights = np.repeat([self.counts[place] / PARTS for place in used], PARTS)
        parts = np.tile((np.arange(PARTS) + 0.5) / PARTS, len(used))

        def at(power: float) -> Floats:
            steps = np.repeat(np.log(np.maximum(highs / lows, 1.0)), PARTS) * parts**power
            return np.asarray(np.repeat(lows, PARTS) * np.exp(steps))

        least, most = 1e-3, 1e3
        for _ in range(60):
            middle = np.sqrt(least * most)
            least, most = (middle, most) if np.average(at(middle), weights=weights) > self.mean else (least, middle)
        return np.round(at(least)), weights


@dataclass(frozen=True, eq=False)
class ServerRecord:
    """What a server emitted."""

    source: str
    intervals: NDArray[Any]
    """Records of `INTERVAL`, in order."""
    num_engines: int = 1
    """Replicas, or attention data-parallel ranks, whose counts are together."""
    step_tokens: tuple[Floats, Floats] | None = None
    """Upper bounds of the tokens of a step, and the steps of each interval up to each and above the one before:
    [bounds], [intervals, bounds]."""
    gap_times: tuple[Floats, Floats] | None = None
    """Upper bounds of the time of a gap in seconds, and the gaps of each interval, in the same way."""
    lengths: Mapping[str, Buckets] = field(default_factory=dict)
    """`input_tokens` and `output_tokens` -> histogram over all requests that ended."""
    requests: Mapping[str, NDArray[Any]] | None = None
    """Columns of the requests, where each is known: see `request_intervals`."""
    prompts_apart: bool = False
    """Whether steps with prompts decode nothing (SGLang's without `--enable-mixed-chunk`)."""
    is_estimated: bool = False
    """Whether times between tokens are not measured, but follow from throughput and running requests."""
    notes: Sequence[str] = ()
    """What was left out."""
    engine: str = ""
    """Engine that emitted it, and the model as the server calls it; empty: not known."""
    model: str = ""


def request_intervals(columns: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    """Return intervals of equal lengths, as if the requests had been counted while they ran.

    Args:
        columns: [requests] `arrival_s`, `input_tokens`, `output_tokens`, `ttft_s`, `e2e_s`, and where they are known
            `queue_s` and `cached_tokens`.
    """
    first_s = columns["arrival_s"] + columns["ttft_s"]
    end_s, outputs = columns["arrival_s"] + columns["e2e_s"], columns["output_tokens"]
    begin_s, until_s = float(columns["arrival_s"].min()), float(end_s.max())
    count = int(np.clip((until_s - begin_s) / LEAST_PERIOD_S, 1, NUM_PERIODS))
    edges = np.linspace(begin_s, until_s, count + 1)
    rows = np.zeros(count, INTERVAL)
    rows["start_s"], rows["duration_s"], rows["steps"] = edges[:-1], np.diff(edges), np.nan
    decode_s = np.maximum(end_s - first_s, 1e-9)
    queue_s = columns.get("queue_s", np.zeros(first_s.size))
    for row, low, high in zip(rows, edges[:-1], edges[1:], strict=True):
        overlap_s = np.clip(np.minimum(end_s, high) - np.maximum(first_s, low), 0, None)
        is_first = (first_s >= low) & (first_s < high)
        middle = (np.clip(low, first_s, end_s) + np.clip(high, first_s, end_s)) / 2
        context = columns["input_tokens"] + outputs * (middle - first_s) / decode_s
        row["gaps"] = (overlap_s / decode_s * np.maximum(outputs - 1, 0)).sum()
        row["gaps_s"] = overlap_s[outputs > 1].sum()
        row["prompts"], row["prompt_tokens"] = is_first.sum(), columns["input_tokens"][is_first].sum()
        row["cached_tokens"] = columns.get("cached_tokens", np.zeros(first_s.size))[is_first].sum()
        row["generation_tokens"] = row["gaps"] + row["prompts"]
        row["running"] = overlap_s.sum() / row["duration_s"]
        waited_s = np.minimum(columns["arrival_s"] + queue_s, high) - np.maximum(columns["arrival_s"], low)
        row["waiting"] = np.clip(waited_s, 0, None).sum() / row["duration_s"]
        row["context_tokens"] = row["context_variance"] = np.nan
        if overlap_s.any():
            row["context_tokens"] = mean = np.average(context, weights=overlap_s)
            row["context_variance"] = np.average((context - mean) ** 2, weights=overlap_s)
    return rows


def record_of_requests(source: str, columns: Mapping[str, Sequence[float]]) -> ServerRecord:
    """Return the record of requests that are each known; InputError where there are none, or their times cannot be."""
    arrays = {name: np.asarray(values, np.float64) for name, values in columns.items()}
    if not arrays["arrival_s"].size:
        raise InputError(f"{source}: no request has token counts and times")
    order = np.argsort(arrays["arrival_s"], kind="stable")
    arrays = {name: values[order] for name, values in arrays.items()}
    arrays["arrival_s"] = arrays["arrival_s"] - arrays["arrival_s"][0]
    if (arrays["e2e_s"] < arrays["ttft_s"]).any() or not (arrays["ttft_s"] > 0).all():
        raise InputError(f"{source}: a request ends before its first token")
    return ServerRecord(source, request_intervals(arrays), requests=arrays)
