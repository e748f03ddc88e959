"""A simulated serving run: latency, throughput, memory, cost, bounds, and how sure they are."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from windtunnel.metrics.client import ClientSummary
from windtunnel.metrics.records import Table as Records
from windtunnel.metrics.slo import Slo
from windtunnel.metrics.summary import Summary, queue_growth, to_builtins
from windtunnel.report.numbers import duration, number, percent, span_text
from windtunnel.report.render.json import fields_of
from windtunnel.report.report import (
    Bars,
    Block,
    Cards,
    Column,
    Facts,
    Figures,
    OnPage,
    Report,
    Section,
    Table,
    table_of,
)
from windtunnel.report.serving.curves import LATENCIES, curves_over_time, distributions
from windtunnel.report.serving.setup import (
    deployment_line,
    load_line,
    model_line,
    network_lines,
    provenance_rows,
    sampling_document,
    sampling_rows,
)
from windtunnel.report.version import version
from windtunnel.schema import decode, encode
from windtunnel.search.capacity.load import is_closed
from windtunnel.search.capacity.probe import MOST_GROWTH
from windtunnel.serving.over_time import over_time
from windtunnel.serving.results import Result
from windtunnel.serving.scenario import Scenario, Setup, pool_scenario
from windtunnel.serving.setup.memory import MemoryPlan
from windtunnel.units import format_bytes, format_count, format_seconds


def run_document(result: Result) -> dict[str, Any]:
    """Document a simulation: summary, scenario with every default filled in, memory, and where its times come from."""
    by_pool = {pool.name: memory_document(pool.memory) for pool in result.pools}
    return {
        "windtunnel": version(),
        "scenario": encode(result.scenario),
        "summary": to_builtins(result.summary),
        "sampling": sampling_document(result.setup),
        "memory": memory_document(result.memory),
        **({"memory_by_pool": by_pool} if by_pool else {}),
        "coverage": {coverage.value: share for coverage, share in result.coverage.items()},
        "sources": result.sources,
        "interval_80": {name: fields_of(interval, "low", "high") for name, interval in result.intervals.items()},
        "calibration": {
            "name": result.setup.calibration_name,
            "not_calibrated": result.setup.not_calibrated or None,
            "remarks": list(result.calibration_remarks),
            "learnt": dict(result.setup.learnt),
        },
        "operators": result.operators,
    }


def memory_document(memory: MemoryPlan) -> dict[str, Any]:
    """Document one device's memory."""
    return asdict(memory) | {"kv_tokens": memory.kv_tokens}


def run_report(result: Result) -> Report:
    """Return the report of a simulation."""
    lead = [*deployment_lines(result), load_line(result.scenario)]
    document = run_document(result)
    sections = run_sections(
        result.scenario, document, result.requests, lambda: over_time(result), calibration=_calibration_text(result)
    )
    return Report(model_line(result.setup), lead, sections, verdict=verdict(result.summary, result.scenario.slo))


def run_sections(
    scenario: Scenario,
    document: Mapping[str, Any],
    requests: Records | None,
    series: Callable[[], Records | None] = lambda: None,
    calibration: str = "",
) -> list[Section]:
    """Return the sections of a simulation's report.

    Args:
        scenario: resolved.
        document: of `run_document`.
        requests: one row a request; None: not kept.
        series: returns one row a stretch of time; None: not kept.
        calibration: what the calibration rests on; empty: as the document has it.
    """
    summary = decode(document["summary"], Summary)
    shares = dict(sorted(summary.time_fractions.items(), key=lambda item: -item[1]))
    return [
        _summary_section(scenario, document, requests, calibration),
        *distribution_sections(scenario, requests, series),
        Section(
            f"Where the time goes: bound by {summary.bound_by.replace('_', ' ')}",
            [
                Bars(shares, "by what bounds it", "share of busy time (%)"),
                OnPage(lambda: [Bars(document.get("operators", {}), "by operator", "share of the device's time (%)")]),
            ],
        ),
        Section(
            "Where the operator times come from", [Facts(provenance_rows(document["coverage"], document["sources"]))]
        ),
        *_failed_checks(summary),
    ]


def _summary_section(
    scenario: Scenario, document: Mapping[str, Any], requests: Records | None, calibration: str
) -> Section:
    summary = decode(document["summary"], Summary)
    memory = MemoryPlan(**{name: value for name, value in document["memory"].items() if name != "kv_tokens"})
    rows = throughput_rows(summary, scenario.slo)
    rows += [] if requests is None else overload_rows(scenario, requests)
    rows += resource_rows(scenario, summary, memory)
    blocks: list[Block] = [
        OnPage(lambda: [Cards(headline(summary, document))]),
        Table(LATENCY_HEADS, latency_rows(summary)),
        *([Table(TENANT_HEADS, tenant_rows(summary))] if summary.tenants else []),
        Facts(sureness_rows(document, calibration or _documented_calibration(document))),
        Facts([*sampling_rows(document.get("sampling", {})), *rows]),
        *([table_of(summary.pools, POOL_COLUMNS)] if summary.pools else []),
    ]
    return Section("", blocks, "Summary")


def distribution_sections(
    scenario: Scenario, requests: Records | None, series: Callable[[], Records | None]
) -> list[Section]:
    """Return the figures of a page: each latency's distribution over the requests, and curves over time."""

    def shares() -> list[Block]:
        return [] if requests is None else [Figures(distributions({"requests": requests}, scenario.slo))]

    def curves() -> list[Block]:
        known = series()
        return [] if known is None else [Figures(curves_over_time(known))]

    return [Section("Distributions", [OnPage(shares)]), Section("Over time", [OnPage(curves)])]


def verdict(summary: Summary, slo: Slo | None) -> str:
    """Say whether a run meets its SLO, and what bounds it."""
    bound = f"Bound by {summary.bound_by.replace('_', ' ')}."
    if summary.goodput is None or slo is None:
        return bound
    return f"{percent(summary.goodput.fraction)} of the requests meet the SLO ({_limits(slo)}). {bound}"


def headline(summary: Summary, document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the headline figures as (value, label) pairs."""
    intervals = document.get("interval_80", {})
    shown = [(format_seconds(summary.ttft_s.mean), f"TTFT mean{_span(intervals.get('ttft'), format_seconds)}")]
    if summary.tpot_s is not None:
        shown.append((format_seconds(summary.tpot_s.mean), f"TPOT mean{_span(intervals.get('tpot'), format_seconds)}"))
    rate = summary.throughput
    shown.append((number(rate.output_tokens_per_s), f"output tokens/s{_span(intervals.get('throughput'), number)}"))
    shown.append((number(rate.output_tokens_per_s_per_device), "output tokens/s per device"))
    if summary.cost is not None:
        shown.append((f"${summary.cost.usd_per_million_output_tokens:,.2f}", "per million output tokens"))
    if summary.goodput is not None:
        shown.append((percent(summary.goodput.fraction), "goodput"))
    return [*shown, (summary.bound_by.replace("_", " "), "bound by")]


def _span(interval: Mapping[str, float] | None, shown: Callable[[float], str]) -> str:
    return "" if interval is None else f", 80% {span_text(shown(interval['low']), shown(interval['high']))}"


def sureness_rows(document: Mapping[str, Any], calibration: str) -> list[tuple[str, str]]:
    """Return the 80% intervals of the means, and the calibration behind them."""
    intervals = document.get("interval_80", {})
    if not intervals:
        return [("80% interval", "not known for separate pools")]

    def text(metric: str, shown: Callable[[float], str]) -> str:
        return f"{shown(intervals[metric]['low'])} to {shown(intervals[metric]['high'])}"

    means = [f"{title} {text(name, format_seconds)}" for name, title in LATENCIES.items() if name in intervals]
    means.append(f"output {text('throughput', number)} tokens/s")
    return [("80% interval", ", ".join(means)), ("calibration", calibration)]


def _calibration_text(result: Result) -> str:
    """Name the calibration of a run, its extent and the settings that it decided; or why there is none."""
    if result.setup.calibration is None:
        return f"none: {result.setup.not_calibrated}"
    record = result.setup.calibration.provenance
    runs = format_count(record.num_runs, "run")
    basis = f"{result.setup.calibration_name}, {runs} in {format_count(record.num_configurations, 'configuration')}"
    return "; ".join([basis, *_learnt(result.setup), *result.calibration_remarks])


def _documented_calibration(document: Mapping[str, Any]) -> str:
    """Name the calibration of a document of `run_document`, or why there is none."""
    calibration = document.get("calibration", {})
    name, reason = calibration.get("name"), calibration.get("not_calibrated")
    text = str(name) if name else f"none: {reason}" if reason else "none"
    return "; ".join([text, *calibration.get("remarks", [])])


def _learnt(setup: Setup) -> list[str]:
    """Return the engine settings that the calibration decided, as they were not given."""
    sizes = {
        name: format_bytes(value) if name.endswith("_bytes") else f"{value:,}" for name, value in setup.learnt.items()
    }
    return [f"{name} {value}, as its runs speak for it" for name, value in sizes.items()]


def deployment_lines(result: Result) -> list[str]:
    """Return devices, engine and network in a line, or in a line per pool."""
    deployment = result.scenario.deployment
    if not result.pools:
        line = deployment_line(result.setup, deployment.fewest_replicas, deployment.most_replicas)
        return [line, *network_lines(result.setup.network)]
    pools = zip(deployment.pools, result.pools, strict=True)
    lines = [f"{pool.name}: {deployment_line(made.setup, pool.replicas)}" for pool, made in pools]
    return [*lines, *network_lines(deployment.network)]


POOL_COLUMNS: Mapping[str, Column] = {
    "pool": "name",
    "role": "role",
    "devices": "num_devices",
    "busy": "utilisation.busy_fraction",
    "running": "utilisation.mean_running",
    "waiting": "utilisation.mean_waiting",
    "KV used": "utilisation.kv_mean_fraction",
    "at most": "utilisation.kv_peak_fraction",
    "$/h": lambda pool: "unknown" if pool.usd_per_hour is None else f"{pool.usd_per_hour:,.2f}",
}


def _fleet_rows(summary: Summary) -> list[tuple[str, str]]:
    """Return the rows of a fleet that changes; none where it does not."""
    fleet = summary.fleet
    if fleet is None:
        return []
    outage = f"; no replica took requests for {duration(fleet.outage_s)}" if fleet.outage_s else ""
    twice = (
        f", {format_count(fleet.num_discarded_tokens, 'token')} streamed twice" if fleet.num_discarded_tokens else ""
    )
    rows = {
        "replicas": (
            f"{fleet.mean_replicas:,.2f} on average, {fleet.max_replicas:,} at most: "
            f"{number(fleet.replica_hours)} replica hours, {number(fleet.serving_hours)} of them serving"
        ),
        "faults": (
            f"{format_count(fleet.num_failures, 'failure')}, {format_count(fleet.num_starts, 'start')}; "
            f"{percent(fleet.availability_fraction)} available{outage}"
        ),
        "retries": (
            f"{format_count(fleet.num_retried_requests, 'request was', 'requests were')} sent again, "
            f"{format_count(fleet.num_retries, 'time')} in all; {duration(fleet.lost_step_s)} of steps lost{twice}"
        ),
    }
    return list(rows.items())


def _device_rows(summary: Summary) -> list[tuple[str, str]]:
    """Return the use and the power of the devices."""
    rows, power = {}, summary.power
    if summary.stages:
        mfu = " and ".join(percent(stage.mfu_fraction) for stage in summary.stages)
        mbu = " and ".join(percent(stage.mbu_fraction) for stage in summary.stages)
        bubbles = f"; {percent(summary.utilisation.bubble_fraction)} bubbles" if len(summary.stages) > 1 else ""
        rows["device"] = f"MFU {mfu}, MBU {mbu} of the published peaks over the whole span{bubbles}"
    if power is not None:
        rows["power"] = (
            f"{number(power.mean_w / 1e3)} kW on average, {number(power.energy_j / 3.6e6)} kWh, "
            f"{number(power.output_token_j)} J per output token"
        )
    return list(rows.items())


TENANT_HEADS = ("tenant", "requests", "TTFT p50", "TTFT p99", "TPOT p99", "E2E p99", "goodput")


def tenant_rows(summary: Summary) -> list[list[str]]:
    """Return a row per tenant."""
    return [
        [
            name,
            f"{tenant.num_requests:,}",
            format_seconds(tenant.ttft_s.p50),
            format_seconds(tenant.ttft_s.p99),
            format_seconds(tenant.tpot_s.p99) if tenant.tpot_s else "",
            format_seconds(tenant.e2e_s.p99),
            percent(tenant.goodput.fraction) if tenant.goodput else "",
        ]
        for name, tenant in summary.tenants.items()
    ]


def _failed_checks(summary: Summary) -> list[Section]:
    """Warn where the run contradicts itself."""
    checks = summary.checks
    if checks is None or checks.passed:
        return []
    text = (
        f"{checks.num_out_of_order} requests out of order, {checks.num_missing_tokens} tokens missing, "
        f"Little's law off by {checks.littles_law_error_fraction:.2g}, "
        f"idle with work {checks.idle_with_work_fraction:.2g} of busy time"
    )
    return [Section("This run contradicts itself; please report it", [text])]


LATENCY_HEADS = ("latency", "mean", "p50", "p90", "p95", "p99", "max")
_LATENCIES = {
    "ttft_s": "TTFT",
    "tpot_s": "TPOT",
    "itl_s": "ITL",
    "e2e_s": "end to end",
    "queueing_s": "queueing",
    "prefill_s": "prefill",
    "transfer_s": "KV transfer",
}


def latency_rows(summary: Summary | ClientSummary) -> list[list[str]]:
    """Return a row for each latency of a run, or of the ones that a client saw."""
    statistics = ("mean", "p50", "p90", "p95", "p99", "max")
    latencies = ((label, getattr(summary, name, None)) for name, label in _LATENCIES.items())
    return [
        [label, *(format_seconds(getattr(seconds, name)) for name in statistics)]
        for label, seconds in latencies
        if seconds is not None
    ]


def throughput_rows(summary: Summary, slo: Slo | None) -> list[tuple[str, str]]:
    """Return throughput rows, and goodput where the run has an SLO."""
    rate = summary.throughput
    out, both = rate.output_tokens_per_s_per_device, rate.total_tokens_per_s_per_device
    user = rate.output_tokens_per_s_per_user
    per_user = f", {number(user)} per user" if user is not None else ""
    rows = [
        ("requests", f"{number(rate.requests_per_s)}/s; {summary.num_requests:,} in {duration(summary.span_s)}"),
        ("output", f"{number(rate.output_tokens_per_s)} tokens/s; {number(out)} per device{per_user}"),
        ("in and out", f"{number(rate.total_tokens_per_s)} tokens/s; {number(both)} per device"),
    ]
    if summary.goodput is not None and slo is not None:
        good = summary.goodput
        rows.append(("goodput", f"{number(good.requests_per_s)}/s; {percent(good.fraction)} within {_limits(slo)}"))
    return rows


def overload_rows(scenario: Scenario, requests: Records) -> list[tuple[str, str]]:
    """Return a warning where requests of an open loop come faster than they are served."""
    if is_closed(scenario.workload):
        return []
    measured = requests.where(~requests["is_warmup"])
    growth = queue_growth(measured["arrival_s"], measured["queueing_s"])
    if growth <= MOST_GROWTH:
        return []
    longer = f"each second of arrivals adds {format_seconds(growth)} of queueing"
    return [("overload", f"{longer}: latencies grow with the number of requests; see `windtunnel capacity`")]


def _limits(slo: Slo) -> str:
    named = (("TTFT", slo.ttft_s), ("TPOT", slo.tpot_s), ("end to end", slo.e2e_s))
    return ", ".join(f"{name} {_limit(limit)}" for name, limit in named if limit is not None)


def _limit(limit_s: float) -> str:
    return f"{limit_s:g} s" if limit_s >= 1 else f"{limit_s * 1e3:g} ms"


def resource_rows(scenario: Scenario, summary: Summary, memory: MemoryPlan) -> list[tuple[str, str]]:
    """Return batch, memory, KV cache, devices, power and money; `memory` is one device's, of the first pool."""
    use, deployment = summary.utilisation, scenario.deployment
    first = pool_scenario(scenario, deployment.pools[0]).deployment if deployment.pools else deployment
    ranks = first.parallelism.attention_dp
    pool = f"{format_count(memory.kv_tokens, 'token')}" + (f" on each of {ranks} ranks" if ranks > 1 else "")
    where = "each device" if not deployment.pools else f"each device of {deployment.pools[0].name}"
    rows = {
        "batch": (
            f"{use.mean_running:,.1f} running, {use.mean_waiting:,.1f} waiting on average; "
            f"busy {percent(use.busy_fraction)}; {format_count(use.num_preemptions, 'preemption')}"
        ),
        "memory": (
            f"{format_bytes(memory.weight_bytes)} weights, {format_bytes(memory.kv_cache_bytes)} KV cache "
            f"of {format_bytes(memory.device_bytes)} on {where}"
        ),
        "KV cache": f"{pool}; {percent(use.kv_mean_fraction)} used on average, {percent(use.kv_peak_fraction)} at most",
    }
    if summary.cache_hit_fractions is not None:
        device, *tiers = summary.cache_hit_fractions.items()
        below = "".join(f", {percent(share)} in the {name}'s" for name, share in tiers)
        rows["prefix cache"] = f"{percent(device[1])} of all prompt tokens were in it{below}"
    cost = "unknown: the device has no list price (--set deployment.price_usd_per_hour=...)"
    if summary.cost is not None:
        cost = (
            f"${summary.cost.usd_per_million_output_tokens:,.2f} per million output tokens, "
            f"${summary.cost.usd_per_million_total_tokens:,.2f} in and out; "
            f"${summary.cost.usd_per_hour:,.2f}/h at list price"
        )
    return [*rows.items(), *_device_rows(summary), *_fleet_rows(summary), ("cost", cost)]
