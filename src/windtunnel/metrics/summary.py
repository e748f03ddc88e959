"""The figures that users quote, from the records: latency percentiles, throughput, goodput, utilisation, money."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from windtunnel.metrics.checks import Checks
from windtunnel.metrics.fleet import FleetSummary, lost_steps
from windtunnel.metrics.power import PowerModel
from windtunnel.metrics.records import Table
from windtunnel.metrics.slo import Slo
from windtunnel.metrics.tokens import rows_by_replica
from windtunnel.schema import Schema

Floats = NDArray[np.float64]

PERCENTILES = (50, 90, 95, 99)
SECONDS_PER_HOUR = 3600.0
KV_BOUND_FRACTION = 0.95
"""A pool fuller than this while requests wait is what holds them up."""


class Distribution(Schema):
    """Mean, percentiles (linear between order statistics) and maximum of one quantity over requests, or over tokens."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


class Throughput(Schema):
    """Per second of the measured span: from the first request's sending to the last one's end."""

    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    """Prompt and output."""
    output_tokens_per_s_per_device: float
    total_tokens_per_s_per_device: float
    output_tokens_per_s_per_user: float | None
    """Mean over requests of 1 / TPOT; None where every request has one output token."""


class Goodput(Schema):
    """Requests that kept every limit of the SLO."""

    fraction: float
    requests_per_s: float


class Utilisation(Schema):
    """Means are over time."""

    busy_fraction: float
    """Share of the span in which a replica ran a step, mean over replicas."""
    mean_running: float
    """Requests admitted, per replica, while busy."""
    mean_waiting: float
    mean_present: float
    """Requests sent and not yet answered, over the whole deployment and span."""
    bubble_fraction: float
    """Of a replica's pipeline stages, the share without a step of their own while another has one; 0 without a
    pipeline."""
    kv_mean_fraction: float
    kv_peak_fraction: float
    num_preemptions: int


class Cost(Schema):
    """Money at the list price of every device for the whole span."""

    usd_per_hour: float
    usd_per_million_output_tokens: float
    usd_per_million_total_tokens: float


class PoolSummary(Schema):
    """One pool of a deployment with several."""

    name: str
    role: str
    num_replicas: int
    num_devices: int
    utilisation: Utilisation
    time_fractions: dict[str, float]
    stages: tuple["StageUse", ...]
    mean_w: float | None
    usd_per_hour: float | None


class StageUse(Schema):
    """One pipeline stage, mean over replicas: shares of its device's published peaks."""

    mfu_fraction: float
    """Model FLOPs utilisation, over the whole span."""
    mbu_fraction: float
    """Memory bandwidth utilisation, over the whole span."""
    busy_mfu_fraction: float
    """While a replica had a step under way."""
    busy_mbu_fraction: float


class Power(Schema):
    """Electric power of all devices, without their hosts."""

    mean_w: float
    energy_j: float
    """Over the span."""
    output_token_j: float
    """Energy over output tokens."""


class TenantSummary(Schema):
    """One tenant's requests."""

    num_requests: int
    ttft_s: Distribution
    tpot_s: Distribution | None
    e2e_s: Distribution
    output_tokens_per_s: float
    goodput: Goodput | None
    """By the tenant's own limits, or else the scenario's; None without either."""


class Batches(Schema):
    """Engine steps; distributions over steps, by the counts of each row's first one."""

    num_steps: int
    step_s: Distribution
    num_tokens: Distribution
    prefill_tokens: Distribution
    decode_tokens: Distribution
    num_requests: Distribution
    """Scheduled in the step: prompts and decoding requests."""


class Summary(Schema):
    """A run in a few numbers. Times in seconds; warm-up requests left out of all but utilisation."""

    num_requests: int
    num_devices: int
    span_s: float
    ttft_s: Distribution
    tpot_s: Distribution | None
    """None where every request has one output token."""
    itl_s: Distribution | None
    """Inter-token latency: over tokens, not requests."""
    itl_max_s: Distribution | None
    """Longest gap before one of a request's tokens, over the requests whose gaps are known."""
    e2e_s: Distribution
    queueing_s: Distribution
    prefill_s: Distribution
    batches: Batches
    throughput: Throughput
    utilisation: Utilisation
    time_fractions: dict[str, float]
    """Share of busy time by what bounds it: compute, memory, communication, host."""
    bound_by: str
    """The largest of those, or `kv_capacity` where requests waited for KV blocks most of the busy time."""
    cache_hit_fraction: float | None = None
    """Share of all prompt tokens that were not computed again; None where nothing is cached."""
    cache_hit_fractions: dict[str, float] | None = None
    """The same by the memory that had them: `device`, and lower KV tiers by name."""
    goodput: Goodput | None = None
    """None without an SLO."""
    cost: Cost | None = None
    """None where the device's price is unknown."""
    transfer_s: Distribution | None = None
    """From the end of the prefill to the arrival of the KV where it is decoded; None where nothing is handed off."""
    pools: tuple[PoolSummary, ...] = ()
    """Empty where all replicas are alike."""
    stages: tuple[StageUse, ...] = ()
    """Pipeline stages in order; one where there is no pipeline."""
    power: Power | None = None
    """None where the device's power is unknown."""
    tenants: dict[str, TenantSummary] = {}
    """By name; empty where nobody has one."""
    checks: Checks | None = None
    """None where no steps were recorded."""
    fleet: FleetSummary | None = None
    """None where all replicas are there all the time. Money, power and shares are then of the replicas that hold their
    devices, on average."""


def queue_growth(arrival_s: NDArray[np.float64], queueing_s: NDArray[np.float64]) -> float:
    """Seconds of queueing delay that each second of arrivals adds: the slope of a line fitted through the requests."""
    at_s = arrival_s - arrival_s.mean()
    spread = float((at_s * at_s).sum())
    return float((at_s * queueing_s).sum()) / spread if spread > 0 else 0.0


def summarise(
    requests: Table,
    steps: Table,
    *,
    num_replicas: int,
    num_stages: int = 1,
    num_devices: int,
    num_blocks: int,
    time_fractions: Mapping[str, float],
    slo: Slo | None = None,
    price_usd_per_hour: float | None = None,
    tenants: Mapping[str, Slo | None] = {},
    checks: Checks | None = None,
    stages: Sequence[StageUse] = (),
    power_w: PowerModel | None = None,
    tier_tokens: Mapping[str, NDArray[np.int64]] | None = None,
    fleet: FleetSummary | None = None,
) -> Summary:
    """The summary of a finished run.

    Args:
        requests, steps: the records.
        num_replicas, num_devices: of the whole deployment.
        num_stages: pipeline stages of a replica; so many steps may be in flight at once.
        num_blocks: KV blocks of one replica.
        time_fractions: share of busy time by what bounds it.
        slo: limits that decide goodput.
        price_usd_per_hour: of one device.
        tenants: names in the order of the column `tenant`, and their own limits.
        checks: the run's self-check.
        stages: what each pipeline stage used of its device.
        power_w: of one device.
        tier_tokens: KV tier -> tokens of each prompt that were loaded from it; None where nothing is cached.
        fleet: None where all replicas are there all the time.
    """
    warmup = requests["is_warmup"]
    measured = requests.where(~warmup) if warmup.any() else requests
    span_s = float(measured["finish_s"].max() - measured["arrival_s"].min())
    mean_replicas = num_replicas if fleet is None else fleet.mean_replicas
    mean_devices = num_devices * mean_replicas / num_replicas
    throughput = _throughput(measured, span_s, mean_devices)
    utilisation = utilisation_of(requests, steps, num_replicas, num_stages, num_blocks, mean_replicas)
    ended = steps if fleet is None else steps.where(~lost_steps(steps))
    cost = None
    if price_usd_per_hour is not None:
        per_hour = price_usd_per_hour * mean_devices
        cost = Cost(
            usd_per_hour=per_hour,
            usd_per_million_output_tokens=per_hour / SECONDS_PER_HOUR / throughput.output_tokens_per_s * 1e6,
            usd_per_million_total_tokens=per_hour / SECONDS_PER_HOUR / throughput.total_tokens_per_s * 1e6,
        )
    hits = None if tier_tokens is None else _cache_hit_fractions(requests, tier_tokens)
    return Summary(
        num_requests=len(measured),
        num_devices=num_devices,
        span_s=span_s,
        ttft_s=distribution(measured["ttft_s"]),
        tpot_s=_known_distribution(measured["tpot_s"]),
        itl_s=itl_distribution(ended),
        itl_max_s=_known_distribution(measured["itl_max_s"]),
        e2e_s=distribution(measured["e2e_s"]),
        queueing_s=distribution(measured["queueing_s"]),
        prefill_s=distribution(measured["prefill_s"]),
        batches=batch_distributions(ended),
        throughput=throughput,
        goodput=goodput(measured, slo, span_s) if slo is not None else None,
        utilisation=utilisation,
        cost=cost,
        time_fractions=dict(time_fractions),
        bound_by=_bound_by(steps, num_blocks, time_fractions),
        tenants=_tenants(measured, tenants, slo, span_s),
        checks=checks,
        stages=tuple(stages),
        power=None if power_w is None else _power(power_w, utilisation, mean_devices, span_s, throughput),
        cache_hit_fraction=None if hits is None else sum(hits.values()),
        cache_hit_fractions=hits,
        fleet=fleet,
    )


def with_pools(summary: Summary, requests: Table, pools: Sequence[PoolSummary]) -> Summary:
    """The summary of a deployment with pools: shares are means over replicas or busy time, and a part a pool."""
    replicas = [pool.num_replicas for pool in pools]
    busy = [pool.num_replicas * pool.utilisation.busy_fraction for pool in pools]
    means = {
        name: float(np.average([getattr(pool.utilisation, name) for pool in pools], weights=weights))
        for name, weights in (
            ("busy_fraction", replicas),
            ("mean_running", busy),
            ("mean_waiting", busy),
            ("bubble_fraction", busy),
            ("kv_mean_fraction", replicas),
        )
    }
    utilisation = Utilisation(
        mean_present=summary.utilisation.mean_present,
        kv_peak_fraction=max(pool.utilisation.kv_peak_fraction for pool in pools),
        num_preemptions=summary.utilisation.num_preemptions,
        **means,
    )
    names = next(pool.time_fractions for pool in pools if pool.time_fractions)
    fractions = {
        name: float(np.average([pool.time_fractions.get(name, 0.0) for pool in pools], weights=busy)) for name in names
    }
    moved = requests.where(~requests["is_warmup"] & ~np.isnan(requests["handed_s"]))
    return msgspec.structs.replace(
        summary,
        utilisation=utilisation,
        time_fractions=fractions,
        bound_by=max(fractions, key=lambda name: fractions[name]),
        power=_power_of(summary, [pool.mean_w for pool in pools]),
        transfer_s=distribution(moved["transfer_end_s"] - moved["handed_s"]) if len(moved) else None,
        pools=tuple(pools),
    )


def _power(
    model: PowerModel, utilisation: Utilisation, num_devices: float, span_s: float, throughput: Throughput
) -> Power:
    mean_w = model.at(utilisation.busy_fraction) * num_devices
    return Power(mean_w=mean_w, energy_j=mean_w * span_s, output_token_j=mean_w / throughput.output_tokens_per_s)


def _power_of(summary: Summary, mean_w: Sequence[float | None]) -> Power | None:
    known = [watts for watts in mean_w if watts is not None]
    if len(known) < len(mean_w):
        return None
    whole_w = sum(known)
    per_token_j = whole_w / summary.throughput.output_tokens_per_s
    return Power(mean_w=whole_w, energy_j=whole_w * summary.span_s, output_token_j=per_token_j)


def _tenants(
    requests: Table, tenants: Mapping[str, Slo | None], slo: Slo | None, span_s: float
) -> dict[str, TenantSummary]:
    found = {}
    for index, (name, own) in enumerate(tenants.items()):
        mine = requests.where(requests["tenant"] == index)
        limits = own or slo
        if len(mine):
            found[name] = TenantSummary(
                num_requests=len(mine),
                ttft_s=distribution(mine["ttft_s"]),
                tpot_s=_known_distribution(mine["tpot_s"]),
                e2e_s=distribution(mine["e2e_s"]),
                output_tokens_per_s=float(mine["output_tokens"].sum()) / span_s,
                goodput=None if limits is None else goodput(mine, limits, span_s),
            )
    return found


def batch_distributions(steps: Table) -> Batches:
    """Distributions over the steps of all rows."""
    weights = steps["num_steps"].astype(np.float64)
    prefill, decode = steps["prefill_tokens"], steps["decode_tokens"]
    return Batches(
        num_steps=int(weights.sum()),
        step_s=weighted_distribution(steps["duration_s"] / weights, weights),
        num_tokens=weighted_distribution(prefill + decode, weights),
        prefill_tokens=weighted_distribution(prefill, weights),
        decode_tokens=weighted_distribution(decode, weights),
        num_requests=weighted_distribution(steps["num_prefills"] + decode, weights),
    )


def _known_distribution(values: Floats) -> Distribution | None:
    """Of the values that are not NaN; None where there are none."""
    known = values[~np.isnan(values)]
    return distribution(known) if known.size else None


def distribution(values: Floats | NDArray[np.float32]) -> Distribution:
    """The distribution of `[n]` values, n > 0."""
    points = np.percentile(values, PERCENTILES)
    return Distribution(
        mean=float(values.mean(dtype=np.float64)),
        **{f"p{q}": float(point) for q, point in zip(PERCENTILES, points, strict=True)},
        max=float(values.max()),
    )


def itl_distribution(steps: Table) -> Distribution | None:
    """Inter-token latency over all decoded tokens, from the step rows, None where nothing was decoded.

    A decode token's gap is its step's duration, but for tokens of requests that were paused or preempted.
    """
    regular = steps["decode_tokens"].astype(np.float64) * steps["num_steps"] - steps["paused_tokens"]
    late = (steps["paused_tokens"] + steps["resumed_tokens"]).astype(np.float64)
    some = np.flatnonzero(late)
    values = np.concatenate([steps["duration_s"] / steps["num_steps"], steps["late_gap_s"][some]])
    weights = np.concatenate([regular, late[some]])
    return weighted_distribution(values, weights) if np.any(weights > 0) else None


def weighted_distribution(values: NDArray[Any], weights: Floats) -> Distribution:
    """The distribution of `[n]` values of which each counts as often as its weight says, n > 0.

    Percentiles are the least value at or below which that share of the weight lies.
    """
    if values.dtype.kind in "iu" and values.max() < MOST_COUNTED:
        weights = np.asarray(np.bincount(values, weights), np.float64)
        values = np.arange(weights.size)
    counts, of_bin = _bins(values, weights)
    sums = np.cumsum(counts)
    points = [_weighted_point(values, weights, of_bin, sums, q / 100) for q in PERCENTILES]
    return Distribution(
        mean=float(np.average(values, weights=weights)),
        **{f"p{q}": point for q, point in zip(PERCENTILES, points, strict=True)},
        max=float(values[weights > 0].max()),
    )


MOST_COUNTED = 1 << 22
"""Integers below this are counted one by one."""
BIN_SHIFT = 42
"""Leaves ten of a float's 52 bits of mantissa: bins of 0.1%."""


def _bins(values: NDArray[Any], weights: Floats) -> tuple[Floats, NDArray[np.int64]]:
    """The weight in each of many bins, and the bin of each value, which is not negative; bins rise with the values.

    The bits of such floats, read as integers, are in the same order. Only the bins that hold a percentile are then
    sorted: 28 million steps take two seconds and not ten.
    """
    of_bin = np.ascontiguousarray(values, np.float64).view(np.int64) >> BIN_SHIFT
    lowest = int(of_bin[of_bin > 0].min(initial=1 << 62))
    of_bin = np.maximum(of_bin - (lowest - 1), 0)
    return np.asarray(np.bincount(of_bin, weights), np.float64), of_bin


def _weighted_point(
    values: NDArray[Any], weights: Floats, of_bin: NDArray[np.int64], sums: Floats, share: float
) -> float:
    wanted = share * sums[-1]
    at = min(int(np.searchsorted(sums, wanted)), sums.size - 1)
    inside = np.flatnonzero(of_bin == at)
    inside = inside[np.argsort(values[inside], kind="stable")]
    before = sums[at - 1] if at else 0.0
    cumulative = before + np.cumsum(weights[inside])
    return float(values[inside[min(int(np.searchsorted(cumulative, wanted)), inside.size - 1)]])


def goodput(requests: Table, slo: Slo, span_s: float) -> Goodput:
    """Requests within every limit of `slo`; a request of one token has no TPOT and keeps that limit."""
    good = np.ones(len(requests), bool)
    for name, limit in (("ttft_s", slo.ttft_s), ("tpot_s", slo.tpot_s), ("e2e_s", slo.e2e_s)):
        if limit is not None:
            good &= ~(requests[name] > limit)
    return Goodput(fraction=float(good.mean()), requests_per_s=float(good.sum() / span_s))


def _throughput(requests: Table, span_s: float, num_devices: float) -> Throughput:
    output = float(requests["output_tokens"].sum())
    total = output + float(requests["input_tokens"].sum())
    tpot_s = requests["tpot_s"]
    users = 1.0 / tpot_s[tpot_s > 0]
    return Throughput(
        requests_per_s=len(requests) / span_s,
        output_tokens_per_s=output / span_s,
        total_tokens_per_s=total / span_s,
        output_tokens_per_s_per_device=output / span_s / num_devices,
        total_tokens_per_s_per_device=total / span_s / num_devices,
        output_tokens_per_s_per_user=float(users.mean()) if users.size else None,
    )


def utilisation_of(
    requests: Table,
    steps: Table,
    num_replicas: int,
    num_stages: int,
    num_blocks: int,
    mean_replicas: float | None = None,
) -> Utilisation:
    """Of replicas with `num_blocks` KV blocks each, from the steps that they ran; `mean_replicas` were there on
    average, if not all were all the time.
    """
    span_s = float(requests["finish_s"].max()) - float(requests["arrival_s"].min())
    whole_s = span_s * (mean_replicas or num_replicas) * num_stages
    busy_s = steps["duration_s"]
    total_s = float(busy_s.sum())
    return Utilisation(
        busy_fraction=min(total_s / whole_s, 1.0),
        mean_running=float((steps["num_running"] * busy_s).sum() / total_s),
        mean_waiting=float((steps["num_waiting"] * busy_s).sum() / total_s),
        mean_present=float((requests["finish_s"] - requests["arrival_s"]).sum()) / span_s,
        bubble_fraction=_bubble_fraction(requests, steps, num_replicas, num_stages),
        kv_mean_fraction=float((steps["used_blocks"] * busy_s).sum() / whole_s / num_blocks),
        kv_peak_fraction=float(steps["used_blocks"].max() / num_blocks),
        num_preemptions=int(requests["num_preemptions"].sum()),
    )


def _cache_hit_fractions(requests: Table, tier_tokens: Mapping[str, NDArray[np.int64]]) -> dict[str, float]:
    measured = ~requests["is_warmup"]
    all_tokens = requests["input_tokens"][measured].sum()
    device = requests["cached_tokens"] - requests["loaded_tokens"]
    return {
        name: float(tokens[measured].sum() / all_tokens) for name, tokens in {"device": device, **tier_tokens}.items()
    }


def _bubble_fraction(requests: Table, steps: Table, num_replicas: int, num_stages: int) -> float:
    if num_stages == 1:
        return 0.0
    active_s = 0.0
    for own, _ in rows_by_replica(requests, steps, num_replicas):
        starts_s = steps["start_s"][own]
        ends_s = np.maximum.accumulate(starts_s + steps["duration_s"][own])
        active_s += float((ends_s - np.maximum(starts_s, np.append(-np.inf, ends_s[:-1]))).sum())
    return max(1.0 - float(steps["duration_s"].sum()) / (num_stages * active_s), 0.0)


def _bound_by(steps: Table, num_blocks: int, time_fractions: Mapping[str, float]) -> str:
    starved = (steps["used_blocks"] > KV_BOUND_FRACTION * num_blocks) & (steps["num_waiting"] > 0)
    if float(steps["duration_s"][starved].sum()) > 0.5 * float(steps["duration_s"].sum()):
        return "kv_capacity"
    return max(time_fractions, key=lambda name: time_fractions[name])


def to_builtins(summary: Summary) -> dict[str, Any]:
    """The summary as JSON types, every field present."""
    return {name: _builtin(getattr(summary, name)) for name in summary.__struct_fields__}


def _builtin(value: Any) -> Any:
    if isinstance(value, Schema):
        return {name: _builtin(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, tuple):
        return [_builtin(entry) for entry in value]
    if isinstance(value, dict):
        return {name: _builtin(entry) for name, entry in value.items()}
    return value
