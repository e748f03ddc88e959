"""A run over time: what was sent, waiting, running and used in each of equal stretches."""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from windtunnel.engine.serving import power_model, shard_of
from windtunnel.engine.work import step_work
from windtunnel.errors import InputError
from windtunnel.metrics.records import Table

if TYPE_CHECKING:
    from windtunnel.engine.serving import Result

Floats = NDArray[np.float64]

NUM_STRETCHES = 200

SERIES_COLUMNS = {
    "time_s": "start of the stretch",
    "duration_s": "of the stretch",
    "sent_per_s": "requests sent",
    "finished_per_s": "requests answered",
    "prompt_tokens_per_s": "computed",
    "output_tokens_per_s": "sampled",
    "num_waiting": "sent and not yet scheduled, mean over time",
    "num_present": "sent and not yet answered, mean over time",
    "busy_fraction": "share of time with a step under way, mean over replicas and pipeline stages",
    "kv_fraction": "KV blocks in use by steps under way, mean over time and replicas",
    "mfu_fraction": "FLOPs over the devices' published peak",
    "mbu_fraction": "bytes over the devices' published bandwidth",
    "power_w": "of all devices; NaN where it is unknown",
}
"""Column -> meaning. Means are exact: quantities that change with events are integrated between them."""


def over_time(result: "Result", num_stretches: int = NUM_STRETCHES) -> Table:
    """The series of a run, from the first sending to the last token.

    Raises:
        InputError: fewer than one stretch.
    """
    if num_stretches < 1:
        raise InputError(f"num_stretches is {num_stretches}; at least 1 is needed")
    requests, steps = result.requests, result.steps
    arrival_s, finish_s = requests["arrival_s"], requests["finish_s"]
    edges = np.linspace(arrival_s.min(), finish_s.max(), num_stretches + 1)
    width_s = np.diff(edges)
    num_replicas, num_stages = result.scenario.deployment.replicas, result.setup.parallelism.pp
    ranks = result.setup.parallelism.attention_dp
    start_s, end_s = steps["start_s"], steps["start_s"] + steps["duration_s"]

    def mean_of(begin: Floats, end: Floats, value: Floats) -> Floats:
        return np.diff(integral(edges, begin, end, value)) / width_s

    def rate_of(amount: Floats) -> Floats:
        return mean_of(start_s, end_s, amount / steps["duration_s"])

    work = step_work(result.setup.device, shard_of(result.setup), steps)
    lanes = num_replicas * num_stages
    sampled = steps["num_sampled"] + (steps["num_steps"].astype(np.float64) - 1) * steps["decode_tokens"]
    busy_fraction = mean_of(start_s, end_s, np.ones(len(steps))) / lanes
    power = power_model(result.scenario, result.setup)
    num_devices = result.scenario.deployment.num_devices
    ones = np.ones(len(requests))
    columns = {
        "time_s": edges[:-1],
        "duration_s": width_s,
        "sent_per_s": np.histogram(arrival_s, edges)[0] / width_s,
        "finished_per_s": np.histogram(finish_s, edges)[0] / width_s,
        "prompt_tokens_per_s": rate_of(steps["prefill_tokens"] * steps["num_steps"].astype(np.float64)),
        "output_tokens_per_s": rate_of(sampled),
        "num_waiting": mean_of(arrival_s, requests["scheduled_s"], ones),
        "num_present": mean_of(arrival_s, finish_s, ones),
        "busy_fraction": busy_fraction,
        "kv_fraction": mean_of(start_s, end_s, steps["used_blocks"].astype(np.float64))
        / (result.memory.num_blocks * ranks * lanes),
        "mfu_fraction": rate_of(work.body_compute_s + work.head_compute_s) / lanes,
        "mbu_fraction": rate_of(work.body_memory_s + work.head_memory_s) / lanes,
        "power_w": np.full(num_stretches, np.nan) if power is None else power.over(busy_fraction) * num_devices,
    }
    return Table(columns, SERIES_COLUMNS)


def integral(time_s: Floats, begin: Floats, end: Floats, value: Floats) -> Floats:
    """Up to each of `time_s`, the integral of the sum of pieces that have a `value` between `begin` and `end`."""
    times = np.concatenate([begin, end])
    order = np.argsort(times, kind="stable")
    times = times[order]
    slope = np.cumsum(np.concatenate([value, -value])[order])
    sums = np.concatenate([[0.0], np.cumsum(slope[:-1] * np.diff(times))])
    return np.asarray(np.interp(time_s, times, sums))
