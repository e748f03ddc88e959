"""Summary of a run from its records: latency percentiles, throughput, goodput, utilisation and cost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from windtunnel.compiled.arrays import Floats, Ints
from windtunnel.metrics.checks import Checks
from windtunnel.metrics.fleet import FleetSummary, lost_steps
from windtunnel.metrics.limits import Slo
from windtunnel.metrics.power import Power, PowerModel, PowerTerms, power_of
from windtunnel.metrics.records import Table
from windtunnel.metrics.tokens import rows_of_replicas
from windtunnel.schema import Schema

PERCENTILES = (50, 90, 95, 99)
SECONDS_PER_HOUR = 3600.0
KV_BOUND_FRACTION = 0.95
"""Share of KV blocks in use above which waiting requests are taken to wait for blocks."""


class Distribution(Schema):
    """Mean, percentiles (linear between order statistics) and maximum of one quantity over requests, or over tokens."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


class Throughput(Schema):
    """Rates over the measured span, from the sending of the first request to the end of the last."""

    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    """Prompt and output tokens."""
    output_tokens_per_s_per_device: float
    total_tokens_per_s_per_device: float
    output_tokens_per_s_per_user: float | None
    """Mean over requests of 1 / TPOT; None where every request has one output token."""


class Goodput(Schema):
    """Requests within every limit of the SLO."""

    fraction: float
    requests_per_s: float
    limit_fractions: dict[str, float] = {}
    """Latency (`ttft`, `tpot`, `e2e`) -> share of the requests within its limit."""
    is_held: bool | None = None
    """Whether each limit is kept by as many requests as its percentile asks for; None in results that do not say."""


class Utilisation(Schema):
    """Use of the replicas; means are over time."""

    busy_fraction: float = 0.0
    """Share of the span in which a replica ran a step, mean over replicas."""
    mean_running: float = 0.0
    """Requests admitted, per replica, while busy."""
    mean_waiting: float = 0.0
    mean_present: float = 0.0
    """Requests sent and not yet answered, over the whole deployment and span."""
    bubble_fraction: float = 0.0
    """Share of a replica's pipeline stages that idle while another stage runs a step; 0 without a pipeline."""
    kv_mean_fraction: float = 0.0
    kv_peak_fraction: float = 0.0
    num_preemptions: int = 0


class Cost(Schema):
    """Cost at the list price of every device for the whole span."""

    usd_per_hour: float
    usd_per_million_output_tokens: float
    usd_per_million_total_tokens: float


class SideUse(Schema):
    """One side of replicas whose attention and feed-forwards run on different devices."""

    name: str
    num_devices: int
    busy_fraction: float
    """Share of the span in which its devices compute, mean over replicas."""


class EncodedImages(Schema):
    """Images and videos of a pool of encoders."""

    num_sent: int
    """Embeddings sent, also of images that a cache had."""
    num_encoded: int
    sent_bytes: float


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
    images: EncodedImages | None = None
    """Of a pool of encoders; None for others."""
    sides: tuple[SideUse, ...] = ()
    """Attention and feed-forward devices, where they are not the same."""
    mean_devices: float | None = None
    """Devices that are held, averaged over the run, of `num_devices` at most; None in results that do not say."""


class StageUse(Schema):
    """One pipeline stage, mean over replicas: shares of its device's published peaks."""

    mfu_fraction: float
    """Model FLOPs utilisation, over the whole span."""
    mbu_fraction: float
    """Memory bandwidth utilisation, over the whole span."""
    busy_mfu_fraction: float
    """Model FLOPs utilisation while a replica had a step under way."""
    busy_mbu_fraction: float


class TenantSummary(Schema):
    """One tenant's requests."""

    num_requests: int
    ttft_s: Distribution
    tpot_s: Distribution | None
    e2e_s: Distribution
    output_tokens_per_s: float
    goodput: Goodput | None
    """Goodput by the tenant's limits, or else the scenario's; None without either."""


class AdapterSummary(Schema):
    """LoRA adapters of a run; steps are weighted equally."""

    num_adapters: int
    """Adapters that requests used."""
    mean_in_step: float
    """Mean number of adapters in a step."""
    most_in_step: int
    slot_hit_fraction: float
    """Share of the admitted requests with an adapter that found it in a slot."""
    num_loads: int
    """Adapters copied into a slot."""
    num_disk_loads: int
    """Of them, those read from disk first."""
    load_fraction: float
    """Share of busy time that steps waited for adapters."""
    product_fraction: float
    """Share of busy time of the adapters' own kernels."""


class BatchSummary(Schema):
    """Engine steps: distributions over steps, with the counts of each row's first step."""

    num_steps: int
    step_s: Distribution
    num_tokens: Distribution
    prefill_tokens: Distribution
    decode_tokens: Distribution
    num_requests: Distribution
    """Prompts and decoding requests scheduled in the step."""


class Summary(Schema):
    """Summary of a run. Times are in seconds; warm-up requests count only in the utilisation."""

    num_requests: int
    num_devices: int
    span_s: float
    ttft_s: Distribution
    tpot_s: Distribution | None
    """None where every request has one output token."""
    itl_s: Distribution | None
    """Inter-token latency, over tokens and not requests."""
    itl_max_s: Distribution | None
    """Longest gap before one of a request's tokens, over the requests whose gaps are known."""
    e2e_s: Distribution
    queueing_s: Distribution
    prefill_s: Distribution
    batches: BatchSummary
    throughput: Throughput
    utilisation: Utilisation
    time_fractions: dict[str, float]
    """Share of busy time by what bounds it: compute, memory, communication, host."""
    bound_by: str
    """The largest of those, or `kv_capacity` where requests waited for KV blocks most of the busy time."""
    cache_hit_fraction: float | None = None
    """Share of all prompt tokens found in the KV cache or below it; None where nothing is cached."""
    cache_hit_fractions: dict[str, float] | None = None
    """`cache_hit_fraction` by memory: `device`, and lower KV tiers by name."""
    goodput: Goodput | None = None
    """None without an SLO."""
    cost: Cost | None = None
    """None where the price of a device is unknown."""
    transfer_s: Distribution | None = None
    """Time from the end of the prefill to the arrival of its KV at the decoding replica; None without handoffs."""
    pools: tuple[PoolSummary, ...] = ()
    """Empty where all replicas are equal."""
    stages: tuple[StageUse, ...] = ()
    """Pipeline stages in order; a single one without a pipeline. With `sides` of attention devices."""
    sides: tuple[SideUse, ...] = ()
    """Attention and feed-forward devices, where they are not the same."""
    power: Power | None = None
    """None where the power of a device is unknown."""
    tenants: dict[str, TenantSummary] = {}
    """Tenants by name; empty where the workload has none."""
    query_s: Distribution | None = None
    """From the sending of a reranking query to its last score; None where a request is one prompt."""
    adapters: AdapterSummary | None = None
    """None where no request has a LoRA adapter."""
    checks: Checks | None = None
    """None where no steps were recorded."""
    fleet: FleetSummary | None = None
    """None where all replicas run all the time; else cost, power and shares refer to the mean number of replicas that
    hold their devices."""


@dataclass(frozen=True)
class DeploymentSize:
    """Replicas, devices and KV blocks of a deployment."""

    num_replicas: int
    num_devices: int
    """Devices of all replicas together."""
    num_blocks: int
    """KV blocks of one replica."""
    num_stages: int = 1
    """Pipeline stages of a replica: so many steps may be in flight at once."""
    mean_devices: float | None = None
    """Mean number of devices that are held; None: all of `num_devices`, by the share of replicas that are."""


@dataclass(frozen=True)
class ServiceLimits:
    """Limits that decide goodput."""

    slo: Slo | None = None
    tenants: Mapping[str, Slo | None] = field(default_factory=dict)
    """Tenants' names in the order of the column `tenant`, with limits of their own or None."""


@dataclass(frozen=True)
class DeviceTerms:
    """Price and power of one device; None where unknown."""

    price_usd_per_hour: float | None = None
    power_w: PowerModel | None = None


def queue_growth(arrival_s: Floats, queueing_s: Floats) -> float:
    """Return the queueing delay that each second of arrivals adds, in s/s: the slope of a least-squares line."""
    offset_s = arrival_s - arrival_s.mean()
    spread = float((offset_s * offset_s).sum())
    return float((offset_s * queueing_s).sum()) / spread if spread > 0 else 0.0


def summarise(
    requests: Table,
    steps: Table,
    size: DeploymentSize,
    time_fractions: Mapping[str, float],
    limits: ServiceLimits = ServiceLimits(),
    device: DeviceTerms = DeviceTerms(),
    tier_tokens: Mapping[str, Ints] | None = None,
    fleet: FleetSummary | None = None,
) -> Summary:
    """Summarise a finished run, without its self-check and the use of its pipeline stages.

    Args:
        time_fractions: share of busy time by what bounds it.
        tier_tokens: KV tier -> tokens of each prompt that were loaded from it; None where nothing is cached.
        fleet: None where all replicas run all the time.
    """
    warmup = requests["is_warmup"]
    measured = requests.where(~warmup) if warmup.any() else requests
    span_s = span_of(measured)
    mean_replicas = size.num_replicas if fleet is None else fleet.mean_replicas
    mean_devices = size.mean_devices or size.num_devices * mean_replicas / size.num_replicas
    throughput = _throughput(measured, span_s, mean_devices)
    utilisation = utilisation_of(requests, steps, size, mean_replicas)
    ended = steps if fleet is None else steps.where(~lost_steps(steps))
    hits = None if tier_tokens is None else _cache_hit_fractions(requests, tier_tokens)
    mean_w = None if device.power_w is None else device.power_w.at(utilisation.busy_fraction) * mean_devices
    return Summary(
        num_requests=len(measured),
        num_devices=size.num_devices,
        span_s=span_s,
        **distributions(measured, "ttft_s", "tpot_s", "itl_max_s", "e2e_s", "queueing_s", "prefill_s"),
        itl_s=itl_distribution(ended),
        batches=_batch_summary(ended),
        throughput=throughput,
        goodput=None if limits.slo is None else goodput(measured, limits.slo, span_s),
        utilisation=utilisation,
        cost=_cost(device.price_usd_per_hour, mean_devices, throughput),
        time_fractions=dict(time_fractions),
        bound_by=_bound_by(steps, size.num_blocks, time_fractions),
        tenants=_tenants(measured, limits, span_s),
        power=_power(mean_w, span_s, throughput, PowerTerms() if device.power_w is None else device.power_w.terms),
        cache_hit_fraction=None if hits is None else sum(hits.values()),
        cache_hit_fractions=hits,
        fleet=fleet,
    )


def span_of(requests: Table) -> float:
    """Return the seconds from the first sending to the last token."""
    return float(requests["finish_s"].max() - requests["arrival_s"].min())


def with_pools(summary: Summary, requests: Table, pools: Sequence[PoolSummary], terms: PowerTerms) -> Summary:
    """Return the summary of a deployment with pools; its shares are means over replicas or over busy time."""
    replicas = [pool.num_replicas * (pool.mean_devices or pool.num_devices) / pool.num_devices for pool in pools]
    busy = [held * pool.utilisation.busy_fraction for held, pool in zip(replicas, pools, strict=True)]
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
    names = dict.fromkeys(name for pool in pools for name in pool.time_fractions)
    fractions = {
        name: float(np.average([pool.time_fractions.get(name, 0.0) for pool in pools], weights=busy)) for name in names
    }
    watts = [pool.mean_w for pool in pools if pool.mean_w is not None]
    mean_w = sum(watts) if len(watts) == len(pools) else None
    moved = requests.where(~requests["is_warmup"] & ~np.isnan(requests["handed_s"]))
    return msgspec.structs.replace(
        summary,
        utilisation=utilisation,
        time_fractions=fractions,
        bound_by=max(fractions, key=lambda name: fractions[name]),
        power=_power(mean_w, summary.span_s, summary.throughput, terms),
        transfer_s=distribution(moved["transfer_end_s"] - moved["handed_s"]) if len(moved) else None,
        pools=tuple(pools),
    )


def _cost(price_usd_per_hour: float | None, num_devices: float, throughput: Throughput) -> Cost | None:
    """Return the cost of all devices at one price, None where it is unknown."""
    if price_usd_per_hour is None:
        return None
    usd_per_hour = price_usd_per_hour * num_devices
    return Cost(
        usd_per_hour=usd_per_hour,
        usd_per_million_output_tokens=usd_per_hour / SECONDS_PER_HOUR / throughput.output_tokens_per_s * 1e6,
        usd_per_million_total_tokens=usd_per_hour / SECONDS_PER_HOUR / throughput.total_tokens_per_s * 1e6,
    )


def _power(mean_w: float | None, span_s: float, throughput: Throughput, terms: PowerTerms) -> Power | None:
    counts = (span_s * throughput.requests_per_s, span_s * throughput.output_tokens_per_s)
    return power_of(mean_w, span_s, *counts, terms)


def _tenants(requests: Table, limits: ServiceLimits, span_s: float) -> dict[str, TenantSummary]:
    """Summarise each tenant that sent requests."""
    summaries = {}
    for index, (name, slo) in enumerate(limits.tenants.items()):
        rows = requests.where(requests["tenant"] == index)
        in_force = slo or limits.slo
        if len(rows):
            summaries[name] = TenantSummary(
                num_requests=len(rows),
                **distributions(rows, "ttft_s", "tpot_s", "e2e_s"),
                output_tokens_per_s=float(rows["output_tokens"].sum()) / span_s,
                goodput=None if in_force is None else goodput(rows, in_force, span_s),
            )
    return summaries


def _batch_summary(steps: Table) -> BatchSummary:
    """Return the distributions over the steps of all rows."""
    weights = steps["num_steps"].astype(np.float64)
    prefill, decode = steps["prefill_tokens"], steps["decode_tokens"]
    return BatchSummary(
        num_steps=int(weights.sum()),
        step_s=weighted_distribution(steps["duration_s"] / weights, weights),
        num_tokens=weighted_distribution(prefill + decode, weights),
        prefill_tokens=weighted_distribution(prefill, weights),
        decode_tokens=weighted_distribution(decode, weights),
        num_requests=weighted_distribution(steps["num_prefills"] + decode, weights),
    )


def distributions(table: Table, *names: str) -> dict[str, Any]:
    """Return the distributions of columns by name, None for one without a known value."""
    return {name: known_distribution(table[name]) for name in names}


def known_distribution(values: Floats | NDArray[np.float32]) -> Distribution | None:
    """Return the distribution of the values that are not NaN; None where there are none."""
    known = values[~np.isnan(values)]
    return distribution(known) if known.size else None


def distribution(values: Floats | NDArray[np.float32]) -> Distribution:
    """Return the distribution of `[n]` values, n > 0."""
    points = np.percentile(values, PERCENTILES)
    return Distribution(
        mean=float(values.mean(dtype=np.float64)),
        **{f"p{q}": float(point) for q, point in zip(PERCENTILES, points, strict=True)},
        max=float(values.max()),
    )


def itl_distribution(steps: Table) -> Distribution | None:
    """Return the inter-token latency over all decoded tokens, from the step rows; None where nothing was decoded.

    A decode token's gap is its step's duration, except for tokens of requests that were paused or preempted.
    """
    regular = steps["decode_tokens"].astype(np.float64) * steps["num_steps"] - steps["paused_tokens"]
    late = (steps["paused_tokens"] + steps["resumed_tokens"]).astype(np.float64)
    late_rows = np.flatnonzero(late)
    values = np.concatenate([steps["duration_s"] / steps["num_steps"], steps["late_gap_s"][late_rows]])
    weights = np.concatenate([regular, late[late_rows]])
    return weighted_distribution(values, weights) if np.any(weights > 0) else None


def weighted_distribution(values: NDArray[Any], weights: Floats) -> Distribution:
    """Return the distribution of `[n]` values, each counted as often as its weight says, n > 0.

    A percentile is the least value at or below which that share of the weight lies.
    """
    if values.dtype.kind in "iu" and values.max() < MOST_COUNTED:
        weights = np.asarray(np.bincount(values, weights), np.float64)
        values = np.arange(weights.size)
    # Bins rise with the values: the bits of floats >= 0, read as integers, are in the same order. Only the bins that
    # hold a percentile are then sorted: 28 million steps take two seconds instead of ten.
    of_bin = np.ascontiguousarray(values, np.float64).view(np.int64) >> BIN_SHIFT
    lowest = int(of_bin[of_bin > 0].min(initial=1 << 62))
    of_bin = np.maximum(of_bin - (lowest - 1), 0)
    sums = np.cumsum(np.asarray(np.bincount(of_bin, weights), np.float64))
    points = [_weighted_point(values, weights, of_bin, sums, q / 100) for q in PERCENTILES]
    return Distribution(
        mean=float(np.average(values, weights=weights)),
        **{f"p{q}": point for q, point in zip(PERCENTILES, points, strict=True)},
        max=float(values[weights > 0].max()),
    )


MOST_COUNTED = 1 << 22
"""Integers below this are counted one by one."""
BIN_SHIFT = 42
"""Bits of a float cut off, which leaves ten of its 52 bits of mantissa: bins of 0.1%."""


def _weighted_point(values: NDArray[Any], weights: Floats, of_bin: Ints, sums: Floats, share: float) -> float:
    """Return the least value at or below which `share` of the weight lies; `sums` are cumulative over the bins."""
    target = share * sums[-1]
    index = min(int(np.searchsorted(sums, target)), sums.size - 1)
    inside = np.flatnonzero(of_bin == index)
    inside = inside[np.argsort(values[inside], kind="stable")]
    before = sums[index - 1] if index else 0.0
    cumulative = before + np.cumsum(weights[inside])
    return float(values[inside[min(int(np.searchsorted(cumulative, target)), inside.size - 1)]])


def goodput(requests: Table, slo: Slo, span_s: float) -> Goodput:
    """Return the requests within every limit of `slo`; a request of one token has no TPOT and keeps that limit."""
    within = {name: ~(requests[f"{name}_s"] > limit_s) for name, (limit_s, _) in slo.limits.items()}
    good = np.all([np.ones(len(requests), bool), *within.values()], axis=0)
    shares = {name: float(kept.mean()) for name, kept in within.items()}
    is_held = all(shares[name] >= percentile / 100 for name, (_, percentile) in slo.limits.items())
    return Goodput(
        fraction=float(good.mean()), requests_per_s=float(good.sum() / span_s), limit_fractions=shares, is_held=is_held
    )


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
    requests: Table, steps: Table, size: DeploymentSize, mean_replicas: float | None = None
) -> Utilisation:
    """Return the use of replicas, from the steps that they ran.

    `mean_replicas` is the mean number of replicas that ran; None means all, all the time.
    """
    span_s = span_of(requests)
    capacity_s = span_s * (mean_replicas or size.num_replicas) * size.num_stages
    busy_s = steps["duration_s"]
    total_s = float(busy_s.sum())
    return Utilisation(
        busy_fraction=min(total_s / capacity_s, 1.0),
        mean_running=float((steps["num_running"] * busy_s).sum() / total_s),
        mean_waiting=float((steps["num_waiting"] * busy_s).sum() / total_s),
        mean_present=float((requests["finish_s"] - requests["arrival_s"]).sum()) / span_s,
        bubble_fraction=_bubble_fraction(steps, size),
        kv_mean_fraction=float((steps["used_blocks"] * busy_s).sum() / capacity_s / size.num_blocks),
        kv_peak_fraction=float(steps["used_blocks"].max() / size.num_blocks),
        num_preemptions=int(requests["num_preemptions"].sum()),
    )


def _cache_hit_fractions(requests: Table, tier_tokens: Mapping[str, Ints]) -> dict[str, float]:
    """Return the share of measured prompt tokens that each memory held."""
    measured = ~requests["is_warmup"]
    all_tokens = requests["input_tokens"][measured].sum()
    device = requests["cached_tokens"] - requests["loaded_tokens"]
    return {
        name: float(tokens[measured].sum() / all_tokens) for name, tokens in {"device": device, **tier_tokens}.items()
    }


def _bubble_fraction(steps: Table, size: DeploymentSize) -> float:
    """Return the share of stages without a step while another stage of their replica has one."""
    if size.num_stages == 1:
        return 0.0
    active_s = 0.0
    for rows in rows_of_replicas(steps["replica"], size.num_replicas):
        starts_s = steps["start_s"][rows]
        ends_s = np.maximum.accumulate(starts_s + steps["duration_s"][rows])
        active_s += float((ends_s - np.maximum(starts_s, np.append(-np.inf, ends_s[:-1]))).sum())
    return max(1.0 - float(steps["duration_s"].sum()) / (size.num_stages * active_s), 0.0)


def _bound_by(steps: Table, num_blocks: int, time_fractions: Mapping[str, float]) -> str:
    """Return the largest time fraction, or `kv_capacity` where requests waited for blocks most of the time."""
    running = np.maximum(steps["num_running"], 1)  # few long requests leave room that one more does not fit into
    full = np.minimum(KV_BOUND_FRACTION, running / (running + 1)) * num_blocks
    starved = (steps["used_blocks"] > full) & (steps["num_waiting"] > 0)
    if float(steps["duration_s"][starved].sum()) > 0.5 * float(steps["duration_s"].sum()):
        return "kv_capacity"
    return max(time_fractions, key=lambda name: time_fractions[name])
