"""Attribute a run's time to what bounds it, and the times of its operators to their sources."""

from collections import Counter
from functools import cache
from typing import Any

import numpy as np

from windtunnel.compiled.arrays import Floats
from windtunnel.metrics.records import Table
from windtunnel.model.launches.forward import StepBatch
from windtunnel.model.shape import Shard
from windtunnel.pricing.estimator import COVERAGES, Coverage, Estimator
from windtunnel.serving.setup.step_prices import LoweredSteps, Pricing, price_step
from windtunnel.serving.state import records as state

NUM_SAMPLED_STEPS = 16


def time_fractions(
    lowered: LoweredSteps, steps: Table, settings: state.KernelSettings, encoded_s: float = 0.0, adapters_s: float = 0.0
) -> dict[str, float]:
    """Return the share of busy time by what bounds it; with several ranks per replica from their mean batch.

    `encoded_s` of that time are the vision towers', which a step's prompts would else be taken to compute; `adapters_s`
    are LoRA adapters', their products and loads.

    The operators' shares are scaled so that a step's parts add up to its duration; attention counts as memory in decode
    and as compute in prefill.
    """
    cost = lowered.cost
    ranks = settings.ranks_per_replica
    decodes = -(-steps["decode_tokens"] // ranks)
    tokens = -(-(steps["decode_tokens"] + steps["prefill_tokens"]) // ranks)
    prefills = steps["prefill_tokens"] > 0
    step_s = steps["duration_s"] / steps["num_steps"]

    def by_kind(decode: Floats, mixed: Floats) -> Floats:
        return np.asarray(np.where(prefills, mixed[tokens], decode[decodes]))

    unhidden_s = lowered.unhidden_s[np.minimum(-(-steps["num_sampled"] // ranks), lowered.unhidden_s.size - 1)]
    host_s = cost.host_step_s + cost.host_request_s * steps["num_running"] / ranks
    token_s = by_kind(cost.decode_token_s, lowered.mixed_token_s)
    communication_s = by_kind(lowered.decode_communication_s, lowered.mixed_communication_s)
    compute_s = by_kind(lowered.decode_compute_s, lowered.mixed_compute_s)
    device_s = np.maximum(step_s - unhidden_s - (0.0 if cost.host_overlaps else host_s), 0.0)
    waits_for_host = host_s >= step_s if cost.host_overlaps else np.zeros(step_s.size, bool)
    mixed_launch_s = cost.launch_s[np.minimum(tokens, cost.launch_s.size - 1)]
    decode_launch_s = cost.decode_launch_s[np.minimum(decodes, cost.decode_launch_s.size - 1)]
    launch_s = np.where(prefills, mixed_launch_s, decode_launch_s)
    waits_for_host = waits_for_host | ((launch_s > 0) & (launch_s >= device_s))
    load_s = steps["load_s"]
    device_s = device_s - load_s
    attention_s = np.maximum(device_s - token_s, 0.0)
    compute_s = compute_s + np.where(prefills, attention_s * _prefill_share(steps), 0.0)
    parts = {
        "compute": np.minimum(compute_s, device_s - communication_s),
        "communication": communication_s,
        "host": np.where(waits_for_host, step_s, step_s - device_s - load_s),
        "kv_loading": load_s,
    }
    parts = {name: np.where(waits_for_host & (name != "host"), 0.0, part) for name, part in parts.items()}
    total_s = float(steps["duration_s"].sum())
    sums = {name: float((part * steps["num_steps"]).sum() / total_s) for name, part in parts.items()}
    if encoded_s:
        sums["encoder"] = encoded_s / total_s
        sums["compute"] = max(sums["compute"] - sums["encoder"], 0.0)
    if adapters_s:
        sums["adapters"] = adapters_s / total_s
        sums["compute"] = min(sums["compute"], max(1.0 - sum(sums.values()) + sums["compute"], 0.0))
    sums["memory"] = max(1.0 - sum(sums.values()), 0.0)
    rare = (name for name in ("kv_loading", "encoder", "adapters") if sums.get(name))
    names = ("compute", "memory", "communication", "host", *rare)
    return {name: sums[name] for name in names}


def _prefill_share(steps: Table) -> Floats:
    """Return the prompts' share of the query-key pairs of every step."""
    pairs = steps["prefill_pairs"]
    all_pairs = pairs + steps["context_tokens"]
    return np.asarray(np.divide(pairs, all_pairs, out=np.zeros_like(pairs), where=all_pairs > 0))


def provenance(
    estimator: Estimator, shard: Shard, steps: Table, num_ranks: int
) -> tuple[dict[Coverage, float], dict[str, float], dict[str, float]]:
    """Return shares of device time by coverage, by table and by operator.

    `NUM_SAMPLED_STEPS` steps, spread evenly over the run's busy time, are priced operator by operator; each stands for
    an equal part of that time.
    """
    ends = np.cumsum(steps["duration_s"])
    moments = (np.arange(NUM_SAMPLED_STEPS) + 0.5) / NUM_SAMPLED_STEPS * ends[-1]
    rows, counts = np.unique(np.searchsorted(ends, moments), return_counts=True)
    remembering = Pricing(cache(estimator.estimate))  # sampled steps differ in contexts, and seldom in sizes
    totals: Any = Counter(), Counter(), Counter()
    for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
        launches = price_step(remembering, shard, batch_of(steps, row, num_ranks))
        step_s = sum(launch.total_s for launch in launches)
        for launch in launches:
            share = launch.total_s / step_s * count / NUM_SAMPLED_STEPS
            for total, name in zip(totals, (launch.coverage, launch.source, launch.name), strict=True):
                total[name] += share
    by_coverage, sources, operators = totals
    coverages = {coverage: by_coverage[coverage] for coverage in COVERAGES if coverage in by_coverage}
    return coverages, dict(sources.most_common()), dict(operators.most_common())


def batch_of(steps: Table, row: int, num_ranks: int = 1) -> StepBatch:
    """Return the first step of a row as a batch of one rank; the mean of several ranks that step together."""
    decodes = -(-int(steps["decode_tokens"][row]) // num_ranks)
    context = float(steps["context_tokens"][row]) / num_ranks
    return StepBatch(
        decode_requests=decodes,
        decode_context_tokens=context / decodes + 1 if decodes else 0.0,
        prefill_tokens=-(-int(steps["prefill_tokens"][row]) // num_ranks),
        prefill_pairs=float(steps["prefill_pairs"][row]) / num_ranks,
        sampled=max(-(-int(steps["num_sampled"][row]) // num_ranks), 1),
    )
