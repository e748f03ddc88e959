"""Turn a run into time series: requests sent, waiting and running, and the use of devices, in equal stretches."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from windtunnel.compiled.arrays import Floats
from windtunnel.errors import InputError
from windtunnel.metrics.fleet import HOLDING, count_over_time
from windtunnel.metrics.records import COLUMNS, Table
from windtunnel.model.launches.forward import attention_side
from windtunnel.serving.analysis.device_use import power_model, step_draw_w, step_work
from windtunnel.serving.scenario import Setup
from windtunnel.serving.setup.estimators import shard_of
from windtunnel.serving.setup.memory import MemoryPlan

if TYPE_CHECKING:
    from windtunnel.serving.results import Result

NUM_STRETCHES = 200

SERIES_COLUMNS = COLUMNS["series"]
"""Column -> meaning. Means are exact: quantities that change with events are integrated between them."""


def over_time(result: "Result", num_stretches: int = NUM_STRETCHES) -> Table:
    """Return the series of a run, from the first sending to the last token; InputError for fewer than one stretch."""
    if num_stretches < 1:
        raise InputError(f"num_stretches is {num_stretches}; at least 1 is needed")
    requests, steps = result.requests, result.steps
    arrival_s, finish_s = requests["arrival_s"], requests["finish_s"]
    edges = np.linspace(arrival_s.min(), finish_s.max(), num_stretches + 1)
    width_s = np.diff(edges)
    start_s, end_s = steps["start_s"], steps["start_s"] + steps["duration_s"]

    def mean_of(begin: Floats, end: Floats, value: Floats) -> Floats:
        return np.diff(integral(edges, begin, end, value)) / width_s

    sampled = steps["num_sampled"] + (steps["num_steps"].astype(np.float64) - 1) * steps["decode_tokens"]
    prompt = steps["prefill_tokens"] * steps["num_steps"].astype(np.float64)
    ones = np.ones(len(requests))
    columns = {
        "time_s": edges[:-1],
        "duration_s": width_s,
        "sent_per_s": np.histogram(arrival_s, edges)[0] / width_s,
        "finished_per_s": np.histogram(finish_s, edges)[0] / width_s,
        "prompt_tokens_per_s": mean_of(start_s, end_s, prompt / steps["duration_s"]),
        "output_tokens_per_s": mean_of(start_s, end_s, sampled / steps["duration_s"]),
        "num_waiting": mean_of(arrival_s, requests["scheduled_s"], ones),
        "num_present": mean_of(arrival_s, finish_s, ones),
        **_device_columns(result, mean_of, edges),
    }
    return Table(columns, SERIES_COLUMNS)


def _device_columns(
    result: "Result", mean_of: Callable[[Floats, Floats, Floats], Floats], edges: Floats
) -> dict[str, Floats]:
    """Return the columns of device use, summed over the pools."""
    num_stretches = edges.size - 1
    busy, used, compute, memory, power = (np.zeros(num_stretches) for _ in range(5))
    num_slots = num_blocks = num_replicas = np.zeros(num_stretches)
    for setup, plan, first, replicas in _pools_of(result):
        steps = result.steps
        steps = steps.where((steps["replica"] >= first) & (steps["replica"] < first + replicas))
        present = np.full(num_stretches, float(replicas))
        if result.fleet is not None:
            phases = result.fleet.phases
            phases = phases.where((phases["replica"] >= first) & (phases["replica"] < first + replicas))
            starts_s, counts = count_over_time(phases, edges[0], edges[-1], HOLDING)
            present = np.maximum(mean_of(starts_s, np.append(starts_s[1:], edges[-1]), counts), 1e-9)
        num_replicas = num_replicas + present
        slots = present * setup.parallelism.pp
        num_slots = num_slots + slots
        num_blocks = num_blocks + plan.num_blocks * setup.parallelism.attention_dp * slots
        pool_busy, pool_w = np.zeros(num_stretches), np.zeros(num_stretches)
        if len(steps):
            span = steps["start_s"], steps["start_s"] + steps["duration_s"]
            work = step_work(setup.device, attention_side(shard_of(setup)), steps)
            pool_busy = mean_of(*span, np.ones(len(steps)))
            used += mean_of(*span, steps["used_blocks"].astype(np.float64))
            compute += mean_of(*span, (work.body_compute_s + work.head_compute_s) / steps["duration_s"])
            memory += mean_of(*span, (work.body_memory_s + work.head_memory_s) / steps["duration_s"])
            draw_w = step_draw_w(result.scenario.deployment, setup, work, steps["duration_s"])
            pool_w = np.full(num_stretches, np.nan) if draw_w is None else mean_of(*span, draw_w)
        busy += pool_busy
        model = power_model(result.scenario.deployment, setup)
        num_devices = present * setup.parallelism.num_devices
        idle = 1 - pool_busy / slots
        power += np.nan if model is None else model.at_meter(model.idle_w * idle + pool_w / slots) * num_devices
    return {
        "busy_fraction": np.minimum(busy / num_slots, 1.0),  # sums of parts of a span may exceed it in the last digit
        "kv_fraction": used / num_blocks,
        "mfu_fraction": compute / num_slots,
        "mbu_fraction": memory / num_slots,
        "power_w": power,
        "num_replicas": num_replicas,
    }


def _pools_of(result: "Result") -> Iterator[tuple[Setup, MemoryPlan, int, int]]:
    """Yield (setup, memory, first replica, number of replicas) of each pool; one where all replicas are equal."""
    deployment = result.scenario.deployment
    if not result.pools:
        yield result.setup, result.memory, 0, deployment.most_replicas
        return
    first = 0
    for pool, schema in zip(result.pools, deployment.pools, strict=True):
        if schema.role == "encode":
            continue
        yield pool.setup, pool.memory, first, schema.most_replicas
        first += schema.most_replicas


def integral(time_s: Floats, begin: Floats, end: Floats, value: Floats) -> Floats:
    """Integrate up to each of `time_s` the sum of pieces that have a `value` between `begin` and `end`."""
    times = np.concatenate([begin, end])
    order = np.argsort(times, kind="stable")
    times = times[order]
    slope = np.cumsum(np.concatenate([value, -value])[order])
    sums = np.concatenate([[0.0], np.cumsum(slope[:-1] * np.diff(times))])
    return np.asarray(np.interp(time_s, times, sums))
