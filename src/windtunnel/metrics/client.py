"""Records of a benchmark client: the columns of the request table that a client can know, and their summary."""

import numpy as np

from windtunnel.compiled.arrays import Floats, Ints
from windtunnel.metrics.limits import Slo
from windtunnel.metrics.records import COLUMNS, Table, time_per_output_token_s
from windtunnel.metrics.summary import Distribution, Goodput, distributions, goodput, known_distribution
from windtunnel.schema import Schema

_SHARED_COLUMNS = (
    *("request", "arrival_s", "first_token_s", "finish_s", "input_tokens", "output_tokens"),
    *("ttft_s", "tpot_s", "e2e_s", "is_warmup", "itl_max_s"),
)
CLIENT_COLUMNS = {**{name: COLUMNS["requests"][name] for name in _SHARED_COLUMNS}, **COLUMNS["client"]}


class ClientSummary(Schema):
    """A run as its client saw it, without the warm-up."""

    num_requests: int
    num_failed: int
    span_s: float
    """Time from the first sending to the last part of an answer."""
    ttft_s: Distribution
    tpot_s: Distribution | None
    """None where every request has one output token."""
    itl_s: Distribution | None
    """Gaps between the parts of an answer."""
    e2e_s: Distribution
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    mean_present: float
    """Requests sent and not yet answered, over the span."""
    goodput: Goodput | None = None
    cache_hit_fraction: float | None = None
    """Share of all prompt tokens that the server found in its prefix cache; None where it does not say."""


def client_tables(
    sent_s: Floats,
    late_s: Floats,
    input_tokens: Ints,
    output_tokens: Ints,
    part_times_s: list[Floats],
    num_warmup: int = 0,
    cached_tokens: Ints | None = None,
) -> tuple[Table, Table]:
    """Return the request table and the token table of a run.

    Args:
        input_tokens, output_tokens: as the server counted them.
        part_times_s: when each part of a request's answer came; empty where the request failed.
        num_warmup: the first so many requests are warm-up.
        cached_tokens: of each prompt, found in the server's prefix cache; None where the server does not say.
    """
    failed = np.array([times.size == 0 for times in part_times_s])
    first_s = np.array([times[0] if times.size else np.nan for times in part_times_s])
    finish_s = np.array([times[-1] if times.size else np.nan for times in part_times_s])
    longest_s = np.array([np.diff(times).max() if times.size > 1 else np.nan for times in part_times_s])
    columns = {
        "request": np.arange(sent_s.size),
        "arrival_s": sent_s,
        "first_token_s": first_s,
        "finish_s": finish_s,
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "ttft_s": first_s - sent_s,
        "tpot_s": time_per_output_token_s(first_s, finish_s, output_tokens),
        "e2e_s": finish_s - sent_s,
        "is_warmup": np.arange(sent_s.size) < num_warmup,
        "itl_max_s": longest_s,
        "sent_late_s": late_s,
        "failed": failed,
    }
    meanings = dict(CLIENT_COLUMNS)
    if cached_tokens is not None:
        columns["cached_tokens"], meanings["cached_tokens"] = cached_tokens, COLUMNS["requests"]["cached_tokens"]
    tokens = {
        "request": np.repeat(np.arange(sent_s.size), [times.size for times in part_times_s]),
        "time_s": np.concatenate(part_times_s) if part_times_s else np.zeros(0),
    }
    return Table(columns, meanings), Table(tokens, COLUMNS["tokens"])


def client_summary(requests: Table, tokens: Table, slo: Slo | None = None) -> ClientSummary:
    """Summarise a run of which at least one measured request was answered; `slo` decides goodput."""
    measured = requests.where(~requests["is_warmup"])
    answered = measured.where(~measured["failed"])
    span_s = float(answered["finish_s"].max() - measured["arrival_s"].min())
    output, prompt = float(answered["output_tokens"].sum()), float(answered["input_tokens"].sum())
    return ClientSummary(
        num_requests=len(answered),
        num_failed=int(measured["failed"].sum()),
        span_s=span_s,
        **distributions(answered, "ttft_s", "tpot_s", "e2e_s"),
        itl_s=known_distribution(gaps_of(requests, tokens)),
        requests_per_s=len(answered) / span_s,
        output_tokens_per_s=output / span_s,
        total_tokens_per_s=(output + prompt) / span_s,
        mean_present=float(answered["e2e_s"].sum()) / span_s,
        goodput=None if slo is None else goodput(answered, slo, span_s),
        cache_hit_fraction=float(answered["cached_tokens"].sum()) / prompt
        if "cached_tokens" in answered.columns
        else None,
    )


def gaps_of(requests: Table, tokens: Table) -> Floats:
    """Return the seconds between consecutive parts of the measured answers, all requests together."""
    request, time_s = tokens["request"], tokens["time_s"]
    within = (request[1:] == request[:-1]) & ~requests["is_warmup"][request[1:]]
    return np.asarray(np.diff(time_s)[within], np.float64)
