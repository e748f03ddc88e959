"""A deployment's capacity: its report and its document."""

from typing import Any

import numpy as np
from rich.console import RenderableType

from windtunnel.report.render.tables import columns, grid, number, percent, title
from windtunnel.report.search.study import burst_text, limit_text
from windtunnel.report.serving.setup import deployment_line, load_line, model_line
from windtunnel.report.version import version
from windtunnel.schema import encode
from windtunnel.search.capacity.capacity import Capacities
from windtunnel.search.capacity.limits import METRICS
from windtunnel.search.capacity.probe import LEAST_STREAM, MOST_GROWTH, Served, growth
from windtunnel.search.confidence import CONFIDENCE
from windtunnel.units import format_count, format_seconds

POINTS = (50, 90, 99)


def capacity_report(capacities: Capacities) -> list[RenderableType]:
    """Return the capacity, what limits it, and the latencies at that load."""
    unit = "clients" if capacities.is_closed else "requests/s"
    limits = "; ".join(limit.title for limit in capacities.limits) or "none"
    stable = "" if capacities.is_closed else f"; the queue grows by less than {percent(MOST_GROWTH)} of the time"
    deployment = capacities.scenario.deployment
    served = [f"{pool.name}: {pool.replicas} x {pool.role}" for pool in deployment.pools]
    parts: list[RenderableType] = [
        title(model_line(capacities.setup)),
        "; ".join(served) if served else deployment_line(capacities.setup, deployment.replicas),
        load_line(capacities.scenario, says_rate=False),
        "",
    ]
    first = capacities.streams[0]
    if first.passing is None or first.passing.served is None:
        limited = limit_text(first.beyond.limited_by, capacities.limits) if first.beyond is not None else ""
        text = f"no load is sustained: {limited.removeprefix('above this load ')}, even when hardly anything is sent"
        return [*parts, grid([("capacity", text), ("limits", limits + stable)])]
    bound = capacities.at_least
    sure = f", at least {_load(capacities, bound)} with {percent(CONFIDENCE)} confidence" if bound is not None else ""
    num_runs = sum(stream.num_runs for stream in capacities.streams)
    tried = f"{format_count(num_runs, 'run')} of {format_count(first.passing.served.arrival_s.size, 'request')}"
    beyond = "all requests that the workload has"
    if first.beyond is not None:
        beyond = limit_text(first.beyond.limited_by, capacities.limits)
    streams = ", ".join(_load(capacities, stream.load) for stream in capacities.streams)
    apart = "" if capacities.is_closed else f", loads {percent(capacities.tolerance)} apart"
    rows = [
        ("capacity", f"{_load(capacities, capacities.load)} {unit}{sure}"),
        ("limits", limits + stable),
        ("limited by", beyond),
        ("streams", f"{streams}; {tried}{apart}"),
    ]
    latencies = _latencies(first.passing.served)
    lines = [[METRICS[name], *map(format_seconds, values.values())] for name, values in latencies.items()]
    table = columns((f"at {_load(capacities, first.load)} {unit}", *(f"p{point}" for point in POINTS)), lines)
    times = first.passing.served.stream_over_e2e
    short = [] if capacities.is_closed or times >= LEAST_STREAM else ["", f"Too short to tell: {burst_text(times)}."]
    return [*parts, grid(rows), "", table, *short]


def _latencies(served: Served) -> dict[str, dict[str, float]]:
    """Return the percentiles of each latency that the requests have, in seconds."""
    known = {name: served.values(name) for name in ("ttft", "tpot", "e2e", "queueing")}
    return {
        name: {f"p{point}": float(np.percentile(values, point)) for point in POINTS}
        for name, values in known.items()
        if values.size
    }


def _load(capacities: Capacities, load: float) -> str:
    return f"{load:,.4g}" if capacities.is_closed else number(load)


def capacity_document(capacities: Capacities) -> dict[str, Any]:
    """Document a capacity."""
    first = capacities.streams[0]
    served = None if first.passing is None else first.passing.served
    latencies = {} if served is None else _latencies(served)
    return {
        "windtunnel": version(),
        "scenario": encode(capacities.scenario),
        "limits": {limit.name: limit.most_s for limit in capacities.limits},
        "load": "concurrency" if capacities.is_closed else "rate_per_s",
        "capacity": capacities.load,
        "capacity_at_least": capacities.at_least,
        "confidence": CONFIDENCE,
        "by_stream": [stream.load for stream in capacities.streams],
        "limited_by": None if first.beyond is None else first.beyond.limited_by,
        "latencies": {f"{name}_s": values for name, values in latencies.items()},
        "stream_over_e2e": None if served is None else served.stream_over_e2e,
        "queue_growth": None if served is None else growth(served),
        "num_runs": sum(stream.num_runs for stream in capacities.streams),
    }
