"""Reconstruct a workload from what a server counted: arrivals, lengths, and shared beginnings."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from windtunnel.formats.telemetry.record import Buckets, ServerRecord

LEAST_INTERVALS = 10
"""Intervals below which nothing is said of how the load varies."""
CONSTANT = 0.05
"""Relative deviation of the requests under way below which a constant number of clients sends them."""
POISSON_CVS = (0.7, 1.4)
"""Coefficients of variation of the gaps between arrivals that are taken for Poisson's 1."""
LEAST_SHARED = 0.02
"""Share of prompt tokens from the prefix cache below which no beginnings are shared."""
LEAST_REQUESTS = 100


@dataclass(frozen=True)
class Load:
    """What a server was asked for."""

    rate_per_s: float
    gap_cv: float
    """Coefficient of variation of the gaps between arrivals; NaN: not known."""
    concurrency: float
    """Requests under way, in the mean."""
    is_closed: bool
    """Whether their number stays the same: each answer is followed by a request."""
    input_tokens: float
    """Mean; NaN: not known."""
    output_tokens: float
    shared: float
    """Share of the prompt tokens that the prefix cache had."""
    num_requests: int


def load_of(record: ServerRecord) -> Load:
    """Return the load of a record.

    Of independent gaps with the coefficient of variation c, counts over long intervals have a variance of c^2 times
    their mean (Cox and Lewis, The Statistical Analysis of Series of Events, 1966, section 4.3).
    """
    rows = record.intervals
    span_s = float((rows["start_s"] + rows["duration_s"]).max() - rows["start_s"].min())
    means = {name: known.mean for name, known in record.lengths.items()}
    if record.requests is not None:
        means = {name: float(record.requests[name].mean()) for name in ("input_tokens", "output_tokens")}
    prompt_tokens = float(rows["prompt_tokens"].sum())
    counts = rows["prompts"]
    if np.isnan(counts).any():
        counts = rows["prompt_tokens"] / means.get("input_tokens", np.nan)
    elif "input_tokens" not in means and counts.sum():
        means["input_tokens"] = prompt_tokens / float(counts.sum())
    if "output_tokens" not in means and np.nansum(counts):
        means["output_tokens"] = float(rows["generation_tokens"].sum() / counts.sum())
    under_way = rows["running"] + np.nan_to_num(rows["waiting"])
    cv = np.nan
    if counts.size >= LEAST_INTERVALS and counts.sum():
        expected = counts.sum() * rows["duration_s"] / rows["duration_s"].sum()
        cv = float(np.sqrt(np.mean((counts - expected) ** 2 / expected) * counts.size / (counts.size - 1)))
    middle = under_way[1:-1]
    is_closed = middle.size >= LEAST_INTERVALS and bool(
        middle.mean() >= 1 and middle.std() < CONSTANT * middle.mean() and not np.isnan(middle).any()
    )
    return Load(
        rate_per_s=float(counts.sum() / span_s),
        gap_cv=cv,
        concurrency=float(np.average(under_way, weights=rows["duration_s"])),
        is_closed=is_closed,
        input_tokens=means.get("input_tokens", np.nan),
        output_tokens=means.get("output_tokens", np.nan),
        shared=float(rows["cached_tokens"].sum() / prompt_tokens) if prompt_tokens else 0.0,
        num_requests=int(np.nan_to_num(counts.sum())),
    )


def workload_of(record: ServerRecord, load: Load) -> dict[str, Any] | None:
    """Return a workload, as a scenario file has it, of such requests; None where rate or lengths are not known."""
    if not load.rate_per_s > 0 or not set(record.lengths) >= {"input_tokens", "output_tokens"}:
        return None
    arrivals: dict[str, Any] = {"type": "poisson", "rate_per_s": _digits(load.rate_per_s)}
    if load.is_closed:
        arrivals = {"type": "closed_loop", "concurrency": max(round(load.concurrency), 1)}
    elif not np.isnan(load.gap_cv) and not POISSON_CVS[0] <= load.gap_cv <= POISSON_CVS[1]:
        arrivals = {**arrivals, "type": "gamma", "cv": _digits(max(load.gap_cv, 0.01))}
    shared = round(load.shared * load.input_tokens) if load.shared >= LEAST_SHARED else 0
    workload = {
        "arrivals": arrivals,
        "input_tokens": _lengths(record.lengths["input_tokens"], shared),
        "output_tokens": _lengths(record.lengths["output_tokens"], 0),
        "num_requests": max(load.num_requests, LEAST_REQUESTS),
    }
    return workload if not shared else {**workload, "shared_prompts": {"tokens": shared}}


def unknown_of(record: ServerRecord) -> list[str]:
    """Name what the record does not tell of the requests."""
    if record.requests is not None:
        return ["shared beginnings of prompts"]
    return ["which answers follow which prompts", "sessions and clients"]


def _lengths(histogram: Buckets, less: int) -> Mapping[str, Any]:
    """Return an empirical distribution of lengths, shortened by the tokens that all share."""
    values, weights = histogram.values()
    shortened = np.maximum(values - less, 1).astype(int)
    distinct, place = np.unique(shortened, return_inverse=True)
    counts = np.bincount(place, weights)
    return {"type": "empirical", "values": distinct.tolist(), "weights": [_digits(each) for each in counts]}


def _digits(value: float) -> float:
    return float(f"{value:.4g}")
