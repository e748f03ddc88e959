"""The tables of a simulation's result."""

from collections.abc import Sequence

from rich.console import RenderableType

from windtunnel.metrics.client import ClientSummary
from windtunnel.metrics.records import Table
from windtunnel.metrics.slo import Slo
from windtunnel.metrics.summary import Summary, queue_growth
from windtunnel.report.render.tables import bars, columns, duration, grid, number, percent, title
from windtunnel.report.serving.setup import deployment_line, load_line, model_line, network_lines, provenance_rows
from windtunnel.search.capacity.load import is_closed
from windtunnel.search.capacity.probe import MOST_GROWTH
from windtunnel.serving.results import Result
from windtunnel.serving.scenario import Scenario, Setup, pool_scenario
from windtunnel.serving.setup.memory import MemoryPlan
from windtunnel.units import format_bytes, format_count, format_seconds


def run_report(result: Result) -> list[RenderableType]:
    """Return latency, throughput, memory, cost, bounds, and how sure they are."""
    summary = result.summary
    shares = sorted(summary.time_fractions.items(), key=lambda item: -item[1])
    coverage = {how.value: share for how, share in result.coverage.items()}
    return [
        title(model_line(result.setup)),
        *deployment_lines(result),
        load_line(result.scenario),
        "",
        columns(LATENCY_HEADS, latency_rows(summary)),
        *_table_of(TENANT_HEADS, tenant_rows(summary)),
        "",
        grid(sureness_rows(result)),
        "",
        grid(
            [
                *throughput_rows(summary, result.scenario.slo),
                *overload_rows(result.scenario, result.requests),
                *resource_rows(result.scenario, summary, result.memory),
            ]
        ),
        *_table_of(POOL_HEADS, pool_rows(summary)),
        "",
        title(f"Where the time goes: bound by {summary.bound_by.replace('_', ' ')}"),
        bars(dict(shares)),
        "",
        title("Where the operator times come from"),
        grid(provenance_rows(coverage, result.sources)),
        *_failed_checks(summary),
    ]


def sureness_rows(result: Result) -> list[tuple[str, str]]:
    """Return the 80% intervals of the means, and the calibration behind them."""
    intervals, name = result.intervals, result.setup.calibration_name
    if not intervals:
        return [("80% interval", "not known for separate pools")]
    shown = [
        f"{label} {format_seconds(intervals[metric].low)} to {format_seconds(intervals[metric].high)}"
        for metric, label in (("ttft", "TTFT"), ("tpot", "TPOT"), ("e2e", "end to end"))
        if metric in intervals
    ]
    rate = intervals["throughput"]
    shown.append(f"output {number(rate.low)} to {number(rate.high)} tokens/s")
    calibration = result.setup.calibration
    if calibration is None:
        basis = f"none: {result.setup.not_calibrated}"
    else:
        record = calibration.provenance
        runs = format_count(record.num_runs, "run")
        basis = f"{name}, {runs} in {format_count(record.num_configurations, 'configuration')}"
        basis = "; ".join([basis, *_learnt(result.setup), *result.calibration_remarks])
    return [("80% interval", ", ".join(shown)), ("calibration", basis)]


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


def _table_of(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[RenderableType]:
    """Return a table below an empty line; nothing where it has no rows."""
    return ["", columns(heads, rows)] if rows else []


POOL_HEADS = ("pool", "role", "devices", "busy", "running", "waiting", "KV used", "at most", "$/h")


def pool_rows(summary: Summary) -> list[list[str]]:
    """Return a row per pool; none where all replicas are equal."""
    return [
        [
            pool.name,
            pool.role,
            f"{pool.num_devices:,}",
            percent(pool.utilisation.busy_fraction),
            f"{pool.utilisation.mean_running:,.1f}",
            f"{pool.utilisation.mean_waiting:,.1f}",
            percent(pool.utilisation.kv_mean_fraction),
            percent(pool.utilisation.kv_peak_fraction),
            "unknown" if pool.usd_per_hour is None else f"{pool.usd_per_hour:,.2f}",
        ]
        for pool in summary.pools
    ]


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


def _failed_checks(summary: Summary) -> list[RenderableType]:
    """Warn where the run contradicts itself."""
    checks = summary.checks
    if checks is None or checks.passed:
        return []
    text = (
        f"{checks.num_out_of_order} requests out of order, {checks.num_missing_tokens} tokens missing, "
        f"Little's law off by {checks.littles_law_error_fraction:.2g}, "
        f"idle with work {checks.idle_with_work_fraction:.2g} of busy time"
    )
    return ["", title("This run contradicts itself; please report it"), text]


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


def overload_rows(scenario: Scenario, requests: Table) -> list[tuple[str, str]]:
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
