"""A deployment's capacity: its report and its document."""

import math
from collections.abc import Mapping
from typing import Any

from windtunnel.metrics.limits import METRICS, limits_from
from windtunnel.report.numbers import number, percent
from windtunnel.report.render.json import version
from windtunnel.report.report import Block, Card, Cards, Facts, OnPage, Report, Section, Table
from windtunnel.report.search.figures import burst_document, held_text, limit_text, load_unit
from windtunnel.report.serving.run import limit_card
from windtunnel.report.serving.setup import deployment_line, deployment_text, load_line, model_line
from windtunnel.schema import encode
from windtunnel.search.capacity.capacity import Capacities
from windtunnel.search.capacity.load import is_drawn
from windtunnel.search.capacity.probe import MOST_GROWTH, growth
from windtunnel.search.confidence import CONFIDENCE
from windtunnel.units import format_count, format_seconds

POINTS = (50, 90, 99)
ONE_STREAM = "; one stream of requests, so no confidence bound"


def capacity_report(capacities: Capacities) -> Report:
    """Return the report of a capacity: the load, what limits it, and the latencies at that load."""
    deployment, setup = capacities.scenario.deployment, capacities.setup
    replicas = deployment.fewest_replicas, deployment.most_replicas
    served = deployment_text(deployment) if deployment.pools else deployment_line(setup, *replicas)
    lead = [served, load_line(capacities.scenario, says_rate=False)]
    document = capacity_document(capacities)
    cards, *table = capacity_section(document).blocks
    blocks: list[Block] = [OnPage(lambda: [cards]), Facts(_capacity_rows(capacities)), *table]
    text, is_good = verdict_of(document)
    return Report(model_line(setup), lead, [Section("", blocks, is_open=True)], verdict=text, is_good=is_good)


def verdict_of(document: Mapping[str, Any]) -> tuple[str, bool | None]:
    """Say what is sustained and what breaks first above it, and whether anything is."""
    broken = (
        "" if document["limited_by"] is None else limit_text(document["limited_by"], limits_from(document["limits"]))
    )
    if not document["latencies"]:
        reached = document.get("reached_s")
        least = f"; when hardly anything is sent, it is {format_seconds(reached)}" if reached else ""
        return f"Sustains no load: {broken}{least}.", False
    unit = load_unit(document["scenario"]["workload"])
    load = f"{_load(document['load'] == 'concurrency', document['capacity'])} {unit}"
    load += f" ({number(document['requests_per_s'])} requests/s)" if unit == "sessions/s" else ""
    if document["burst"] is not None:
        return f"Holds {held_text(document['capacity'], [*document['burst'].values()], unit)}.", None
    if not broken:
        return f"Sustains {load}, as many as the workload has requests: --num-requests gives more.", True
    drift = document["drift"]
    return f"Sustains {load}; above it, {broken}.{'' if drift is None else f' It is {drift_text(drift)}.'}", True


def _capacity_rows(capacities: Capacities) -> list[tuple[str, str]]:
    first, unit = capacities.streams[0], load_unit(encode(capacities.scenario.workload))
    stable = "" if capacities.is_closed else f"; the queue grows by less than {percent(MOST_GROWTH)} of the time"
    limits = "; ".join(limit.title for limit in capacities.limits) or "none"
    beyond = "" if first.beyond is None else limit_text(first.beyond.limited_by, capacities.limits)
    if first.passing is None or first.passing.served is None:
        text = f"no load is sustained: {beyond}, even when hardly anything is sent"
        return [("capacity", text), ("limits", limits + stable)]
    bound = capacities.at_least
    sure = (
        f", at least {_load(capacities.is_closed, bound)} with {CONFIDENCE:.0%} confidence" if bound is not None else ""
    )
    sure = ", in a burst that is too short to tell" if capacities.burst else sure
    num_runs = sum(stream.num_runs for stream in capacities.streams)
    tried = f"{format_count(num_runs, 'run')} of up to {format_count(first.passing.served.arrival_s.size, 'request')}"
    streams = ", ".join(_load(capacities.is_closed, stream.load) for stream in capacities.streams)
    rests = _rest_text(capacities)
    apart = "" if capacities.is_closed else f", loads {percent(capacities.tolerance)} apart"
    return [
        ("capacity", f"{_load(capacities.is_closed, capacities.load)} {unit}{sure}"),
        ("limits", limits + stable),
        ("limited by", "all requests that the workload has" if first.beyond is None else f"above this load {beyond}"),
        ("streams", f"{streams}; {tried}{apart}{'' if len(capacities.streams) > 1 else ONE_STREAM}"),
        ("requests", rests),
    ]


def _rest_text(capacities: Capacities) -> str:
    """Say how many requests the answer rests on, and whether more of them would change it."""
    change, several = capacities.steady.change, len(capacities.streams) > 1
    each = f"{capacities.num_requests:,}{' in each stream' if several else ''}"
    if not is_drawn(capacities.scenario.workload):
        return f"{each}, as given: only drawn requests are made more, until the load is steady"
    if capacities.drift is not None:
        return f"{each}; {drift_text(capacities.drift)}"
    if change is None:
        return each if capacities.steady.is_steady else f"{each}; there are no more of them to see a steady load"
    return f"{each}, enough for a steady load: it changed by {change:+z.1%} when the streams were last lengthened"


def drift_text(change: float) -> str:
    """Say that a load is not steady yet, and which way it moves; `change` is relative."""
    way, more = ("fell", "less") if change < 0 else ("rose", "more")
    return f"not steady yet: it {way} by {percent(abs(change))} when the streams were last lengthened, so expect {more}"


def capacity_section(document: Mapping[str, Any]) -> Section:
    """Return the capacity of a document of `capacity_document`, and what it takes of the limits."""
    is_closed, at_least = document["load"] == "concurrency", document["capacity_at_least"]
    unit, sure = load_unit(document["scenario"]["workload"]), f"{document['confidence']:.0%} sure"
    note = "" if at_least is None else f"at least {_load(is_closed, at_least)}, {sure}"
    cards = [Card(_load(is_closed, document["capacity"]), f"{unit} sustained", note)]
    latencies = {name.removesuffix("_s"): percentiles for name, percentiles in document["latencies"].items()}
    for limit in limits_from(document["limits"]):
        if limit.statistic in latencies.get(limit.metric, {}):
            label = f"{METRICS[limit.metric]} {limit.statistic}"
            cards.append(limit_card(latencies[limit.metric][limit.statistic], limit.most_s, label))
    rows = [[METRICS[name], *map(format_seconds, values.values())] for name, values in latencies.items()]
    loads = document["by_stream"]
    stream = f"{'first stream, ' if len(loads) > 1 else ''}at {_load(is_closed, loads[0])} {unit}"
    table = Table((stream, *(f"p{point}" for point in POINTS)), rows)
    return Section("Capacity", [Cards(cards), *([table] if rows else [])])


def _load(is_closed: bool, load: float) -> str:
    return f"{math.floor(load + 1e-9):,}" if is_closed else number(load)


def capacity_document(capacities: Capacities) -> dict[str, Any]:
    """Document a capacity."""
    first = capacities.streams[0]
    served = None if first.passing is None else first.passing.served
    latencies = {} if served is None else served.percentiles(POINTS)
    if capacities.scenario.workload.is_pooling:
        latencies.pop("ttft", None)  # the vector or score ends the request
    return {
        "windtunnel": version(),
        "scenario": encode(capacities.scenario),
        "limits": {limit.name: limit.most_s for limit in capacities.limits},
        "load": "concurrency" if capacities.is_closed else "rate_per_s",
        "capacity": capacities.load,
        "requests_per_s": capacities.requests_per_s,
        "capacity_at_least": capacities.at_least,
        "confidence": CONFIDENCE,
        "by_stream": [stream.load for stream in capacities.streams],
        "limited_by": None if first.beyond is None else first.beyond.limited_by,
        "reached_s": first.reached_s(capacities.limits) or None,
        "latencies": {f"{name}_s": values for name, values in latencies.items()},
        "stream_over_e2e": None if served is None else served.stream_over_e2e,
        "burst": burst_document(capacities.burst),
        "requests_per_stream": capacities.num_requests,
        "drift": capacities.drift,
        "queue_growth": None if served is None else growth(served),
        "num_runs": sum(stream.num_runs for stream in capacities.streams),
    }
