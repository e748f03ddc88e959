"""A simulated serving run: latency, throughput, memory, cost, bounds, how sure they are; and its folder of files."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from operator import itemgetter
from pathlib import Path
from typing import Any

from windtunnel.errors import InputError
from windtunnel.files import check_writable_folder, new_files
from windtunnel.formats.launch.scripts import named_option
from windtunnel.metrics.client import ClientSummary
from windtunnel.metrics.limits import Slo
from windtunnel.metrics.records import Table as Records
from windtunnel.metrics.summary import SECONDS_PER_HOUR, Summary, queue_growth
from windtunnel.report.layout import cards_of, facts_of, filled, layouts_beside, rows_of, shown, table_of
from windtunnel.report.numbers import duration, number, percent, times, words
from windtunnel.report.render.json import version
from windtunnel.report.report import Bars, Block, Card, Cards, Facts, Figures, OnPage, Report, Section, Table
from windtunnel.report.serving import setup as setup_text
from windtunnel.report.serving.curves import LATENCIES, curves_over_time, distributions
from windtunnel.schema import decode, encode, fields_of, json_text, plain, save
from windtunnel.search.capacity.load import are_sent_at_once, burst_of, is_closed
from windtunnel.search.capacity.probe import MOST_GROWTH
from windtunnel.serving.over_time import over_time
from windtunnel.serving.results import Result
from windtunnel.serving.scenario import Scenario, pool_scenario, resolve
from windtunnel.serving.setup.memory import MemoryPlan
from windtunnel.units import format_count, format_seconds
from windtunnel.workload.arrivals import Gamma, Poisson, Static

LAYOUT = layouts_beside(__file__)
UNUSUAL_TTFT = 5
"""The sentence names the p50 of TTFT, too, where the p99 (of a first wave of clients) is so many times as long."""
FEWEST_OF_TREND = 20
"""Fewest requests whose queueing delays show a trend."""
RARE = ("query_s", "adapters")
"""Fields of a summary that documents of runs without queries, or without adapters, leave out."""
POOLED_LATENCIES = ("query_s", "e2e_s", "queueing_s", "prefill_s")
"""Latencies of requests without outputs."""


def run_document(result: Result) -> dict[str, Any]:
    """Document a simulation: summary, scenario with every default filled in, memory, and where its times come from."""
    by_pool, made = {pool.name: memory_document(pool.memory) for pool in result.pools}, result.setup.calibration
    made_setups = [pool.setup for pool in result.pools] or [result.setup]
    return {
        "windtunnel": version(),
        "scenario": encode(result.scenario),
        "summary": {name: part for name, part in plain(result.summary).items() if part is not None or name not in RARE},
        "sampling": setup_text.sampling_document(result.setup),
        "client": setup_text.client_document(result.setup),
        "memory": memory_document(result.memory),
        **({"memory_by_pool": by_pool} if by_pool else {}),
        "coverage": {coverage.value: share for coverage, share in result.coverage.items()},
        "sources": result.sources,
        "interval_80": {name: fields_of(interval, "low", "high") for name, interval in result.intervals.items()},
        "calibration": {
            "name": result.setup.calibration_name,
            **({} if made is None else fields_of(made.provenance, "num_runs", "num_configurations")),
            "not_calibrated": result.setup.not_calibrated or None,
            "remarks": list(result.calibration_remarks),
            "learnt": dict(result.setup.learnt),
        },
        "operators": result.operators,
        **({"trace": list(result.trace_remarks)} if result.trace_remarks else {}),
        **({"notes": notes} if (notes := setup_text.network_notes(*made_setups)) else {}),
    }


def memory_document(memory: MemoryPlan) -> dict[str, Any]:
    """Document one device's memory."""
    document = asdict(memory) | {"kv_tokens": memory.kv_tokens or None}
    return document if memory.adapter_bytes else {name: document[name] for name in document if name != "adapter_bytes"}


def run_report(result: Result) -> Report:
    """Return the report of a simulation."""
    lead = [*deployment_lines(result), setup_text.load_line(result.scenario)]
    document = run_document(result)
    sections = run_sections(result.scenario, document, result.requests, lambda: over_time(result))
    text, is_good = verdict(result.summary, result.scenario, result.requests)
    notes = document.get("notes", ())
    return Report(setup_text.model_line(result.setup), lead, sections, notes, verdict=text, is_good=is_good)


def run_sections(
    scenario: Scenario,
    document: Mapping[str, Any],
    requests: Records | None,
    series: Callable[[], Records | None] = lambda: None,
) -> list[Section]:
    """Return the sections of a simulation's report.

    Args:
        scenario: resolved.
        requests: one row a request; None: not kept.
        series: returns one row a stretch of time; None: not kept.
    """
    summary = decode(document["summary"], Summary)
    shares = dict(sorted(filter(itemgetter(1), summary.time_fractions.items()), key=lambda item: -item[1]))
    return [
        _summary_section(scenario, document, requests),
        *distribution_sections(scenario, requests, series),
        Section(
            f"Where the time goes: bound by {words(summary.bound_by)}",
            [
                Bars(shares, "Busy time by what bounds it"),
                OnPage(lambda: [Bars(document.get("operators", {}), "The device's time by operator")]),
            ],
        ),
        Section(
            "Where the operator times come from",
            [Facts(setup_text.provenance_rows(document["coverage"], document["sources"]))],
        ),
        *_failed_checks(summary),
    ]


def _summary_section(scenario: Scenario, document: Mapping[str, Any], requests: Records | None) -> Section:
    summary = decode(document["summary"], Summary)
    if scenario.workload.is_pooling:
        document = _without_outputs(document)
    tenants = [{"name": name, **tenant} for name, tenant in document["summary"].get("tenants", {}).items()]
    # Without intervals the calibration decides nothing.
    has_intervals = bool(document.get("interval_80"))
    sure = {"calibration_text": _calibration_text(document.get("calibration", {})) if has_intervals else None}
    limited = limit_cards(summary, scenario.slo, scenario.workload.is_pooling)
    blocks: list[Block] = [
        OnPage(lambda: [Cards([*limited, *cards_of(document, LAYOUT["cards"]).facts])]),
        latency_table(summary, POOLED_LATENCIES if scenario.workload.is_pooling else ()),
        *([table_of(tenants, LAYOUT["tenants"])] if tenants else []),
        facts_of({**document, **sure}, LAYOUT["sureness"]),
        Facts(
            [
                *setup_text.sampling_rows(document.get("sampling", {})),
                *setup_text.client_rows(document.get("client", {})),
                *(("trace", remark) for remark in document.get("trace", ())),
                *rows_of(_derived(scenario, summary, document, requests), LAYOUT["facts"]),
            ]
        ),
        *([table_of(summary.pools, LAYOUT["pools"])] if summary.pools else []),
        *([table_of(sides, LAYOUT["sides"])] if (sides := _sides(summary)) else []),
    ]
    return Section("", blocks, "Summary")


def _without_outputs(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document of a run whose requests have no outputs: rates and costs of prompts alone."""
    summary = dict(document["summary"])
    rates, cost, power = summary["throughput"], summary.get("cost"), summary.get("power")
    read_per_s = rates["total_tokens_per_s"] - rates["output_tokens_per_s"]
    each_per_s = rates["total_tokens_per_s_per_device"] - rates["output_tokens_per_s_per_device"]
    pooled = {"input_tokens_per_s": read_per_s, "input_tokens_per_s_per_device": each_per_s}
    summary["throughput"] = {"requests_per_s": rates["requests_per_s"], **pooled}
    if cost:
        per_million = cost["usd_per_hour"] / SECONDS_PER_HOUR / read_per_s * 1e6
        summary["cost"] = {"usd_per_hour": cost["usd_per_hour"], "usd_per_million_input_tokens": per_million}
    if power:
        summary["power"] = {name: value for name, value in power.items() if name != "output_token_j"}
    intervals = {name: span for name, span in document.get("interval_80", {}).items() if name == "e2e"}
    return {**document, "summary": summary, "sampling": {}, "interval_80": intervals}


def _derived(
    scenario: Scenario, summary: Summary, document: Mapping[str, Any], requests: Records | None
) -> dict[str, Any]:
    """Return a document's summary and memory, with what the facts of a run need besides."""
    stages, first = summary.stages, pool_scenario(scenario, scenario.deployment.groups[0]).deployment
    ranks = first.parallelism.attention_dp
    cached = summary.cache_hit_fractions or {}
    prices = {scenario.deployment.price_usd_per_hour, *(pool.price_usd_per_hour for pool in scenario.deployment.pools)}
    below = [f", {percent(share)} in the {name}'s" for name, share in cached.items() if name != "device"]
    return {
        **document["summary"],
        "memory": document["memory"],
        "price": "list price" if prices == {None} else "the given price",
        "limits": _limits(scenario.slo) if scenario.slo is not None else None,
        "queue_growth": None
        if requests is None or _burst(scenario, requests, summary)
        else _overload(scenario, requests, summary),
        "pool": scenario.deployment.groups[0].name or None,
        "num_ranks": ranks if ranks > 1 else None,
        "cached_fractions": cached,
        "cached_below": "".join(below),
        "mfu": " and ".join(percent(stage.mfu_fraction) for stage in stages) or None,
        "mbu": " and ".join(percent(stage.mbu_fraction) for stage in stages),
        "bubble_fraction": summary.utilisation.bubble_fraction if len(stages) > 1 else None,
    }


def distribution_sections(
    scenario: Scenario, requests: Records | None, series: Callable[[], Records | None]
) -> list[Section]:
    """Return the figures of a page: each latency's distribution over the requests, and curves over time."""

    def shares() -> list[Block]:
        return [] if requests is None else [Figures(distributions({"requests": requests}, scenario.slo))]

    def curves() -> list[Block]:
        known = series()
        return [] if known is None else [Figures(curves_over_time(known)), LAYOUT["smoothing"]]

    return [Section("Distributions", [OnPage(shares)]), Section("Over time", [OnPage(curves)])]


def verdict(summary: Summary, scenario: Scenario, requests: Records | None) -> tuple[str, bool | None]:
    """Say whether a run holds its SLO and by how much, whether its queue grows, and what bounds it.

    Returns:
        The sentences; and whether the run holds the SLO: None without one, or False where the queue grows.
    """
    known = scenario.slo is not None and summary.goodput is not None
    parts = [_batch_text(summary)] if are_sent_at_once(scenario.workload) else []
    if known:
        parts.append(_slo_text(summary, scenario.slo))
    elif not parts:
        parts.append(_latency_text(summary, scenario.workload.is_pooling))
    burst = None if requests is None else _burst(scenario, requests, summary)
    growth = None if requests is None else _overload(scenario, requests, summary)
    if growth is not None:
        parts.append(f"Overloaded: each second of arrivals adds {format_seconds(growth)} of queueing.")
    elif burst:
        needed = f"take {burst[1]:,} requests (--num-requests) to see a steady state"
        parts.append(
            f"Too short for this rate: all {burst[0]:,} requests arrive before the first ones are done; {needed}."
        )
    is_held = summary.goodput.is_held if known and summary.goodput else None
    text = " ".join([*parts, f"Bound by {words(summary.bound_by)}.", *_waits_texts(summary, scenario)])
    return text, is_held if growth is None else False


def _waits_texts(summary: Summary, scenario: Scenario) -> list[str]:
    """Say which limit of the engine requests wait for, where batches are full of it and the KV cache is not."""
    batches, adapters = summary.batches, summary.adapters
    if summary.utilisation.mean_waiting < 1 or summary.bound_by == "kv_capacity" or summary.pools:
        return []
    if adapters is not None and adapters.num_adapters > adapters.most_in_step < adapters.mean_in_step / 0.9:
        return [f"Requests wait for one of the {adapters.most_in_step} LoRA slots (max_loras)."]
    running, prompt = batches.num_requests, batches.prefill_tokens.max
    with suppress(InputError):  # a written run whose files are gone
        setup = resolve(scenario)
        engine, ranks = setup.engine, setup.parallelism.attention_dp
        # Prompts alone wait for tokens, not for slots; the batch is that of all ranks, the limit that of each.
        is_full = running.p50 == running.max == ranks * (engine.max_num_seqs or 0)
        if is_full and running.max < 2 * batches.decode_tokens.p50:
            of_each = f" of each of the {ranks} ranks" if ranks > 1 else ""
            return [f"Requests wait for one of the {engine.max_num_seqs} running slots{of_each} (max_num_seqs)."]
        budget = engine.max_num_batched_tokens
        room = 0 if budget is None else budget - prompt
        if not engine.enable_chunked_prefill and budget is not None and room + 1 >= running.max > 0.9 * room:
            free = f"at most {format_count(int(room), 'request')} decode" if room > 1 else "hardly any request decodes"
            why = f"as a step takes {budget:,} tokens and no prompt is split"
            names = (named_option(engine, name) for name in ("max_num_batched_tokens", "enable_chunked_prefill"))
            advice = f"raise {' or set '.join(names)}"
            return [f"Prompts of {prompt:,.0f} tokens wait until {free}, {why}: {advice}."]
    return []


def _batch_text(summary: Summary) -> str:
    """Say how long a batch of requests that are sent at once takes to the last token, and when most are finished."""
    done = f"half of them in {duration(summary.e2e_s.p50)} and 90% in {duration(summary.e2e_s.p90)}"
    rate = f"{number(summary.throughput.output_tokens_per_s)} output tokens/s"
    return f"Finishes {format_count(summary.num_requests, 'request')} in {duration(summary.span_s)}, {done}; {rate}."


def _latency_text(summary: Summary, is_pooling: bool) -> str:
    """Return the rate of a run without an SLO, and the latencies that nearly all requests have."""
    seconds = format_seconds((summary.query_s or summary.e2e_s).p99)
    if is_pooling:
        return f"Serves {number(summary.throughput.requests_per_s)} sequences/s with latency p99 {seconds}."
    tpot = "" if summary.tpot_s is None else f", TPOT p99 {format_seconds(summary.tpot_s.p99)}"
    rate, ttft = number(summary.throughput.requests_per_s), summary.ttft_s
    usual = f" (p50 {format_seconds(ttft.p50)})" if ttft.p99 > UNUSUAL_TTFT * ttft.p50 > 0 else ""
    return f"Serves {rate} requests/s with TTFT p99 {format_seconds(ttft.p99)}{usual}{tpot}."


LEAST_TIMES = 1.005
"""Multiple of a limit that three digits tell from 1."""


def _slo_text(summary: Summary, slo: Slo | None) -> str:
    """Name the limit that is missed most, at the percentile that must keep it; else the one nearest to its limit."""
    assert summary.goodput is not None
    assert slo is not None
    holds, asked = summary.goodput.is_held, max((part for _, part in slo.limits.values()), default=100.0) / 100
    met = f"{percent(summary.goodput.fraction, asked)} of the requests meet {_limits(slo)}"
    # A percentile that summaries lack is judged by the lowest known one above the limit.
    for statistic in () if holds else ("", "p50", "p90", "p95", "p99"):
        label, share = max(_shares_of_limits(summary, slo, statistic).items(), key=itemgetter(1), default=("", 0.0))
        if share > 1:
            factor = f"{times(share)} times" if share >= LEAST_TIMES else "just above"
            return f"Breaks the SLO: {met}; {label} is {factor} its limit."
    label, share = max(_shares_of_limits(summary, slo).items(), key=itemgetter(1), default=("", 0.0))
    nearest = f"; {label} is {percent(share)} of its limit" if label else ""
    return f"{'Holds' if holds else 'Breaks'} the SLO: {met}{nearest}."


def limit_cards(summary: Summary | ClientSummary, slo: Slo | None, is_pooling: bool = False) -> list[Card]:
    """Return latencies at the percentiles of their limits, with shares of these.

    Without limits they are TTFT and TPOT, or where requests have no outputs the end-to-end time.
    """
    usual = {"e2e": (0.0, 99.0)} if is_pooling else {"ttft": (0.0, 99.0), "tpot": (0.0, 99.0)}
    limits = slo.limits if slo is not None else {}
    cards = []
    for name, (limit_s, percentile) in (limits or usual).items():
        latency = getattr(summary, f"{name}_s")
        if latency is not None:
            at = _statistic(percentile)
            at = at if hasattr(latency, at) else "p99"
            cards.append(limit_card(getattr(latency, at), limit_s, f"{LAYOUT['latencies'][f'{name}_s']} {at}"))
    return cards


def limit_card(value_s: float, limit_s: float, label: str) -> Card:
    """Return a latency with the share of its limit that it takes; a limit of 0 is none."""
    if not limit_s:
        return Card(format_seconds(value_s), label)
    share = value_s / limit_s
    part = f"{times(share)} times" if share >= 2 else f"{percent(share)} of"
    return Card(format_seconds(value_s), label, f"{part} the limit, {format_seconds(limit_s)}", share)


def _statistic(percentile: float) -> str:
    return f"p{percentile:g}" if percentile < 100 else "max"


def _shares_of_limits(summary: Summary, slo: Slo, statistic: str = "") -> dict[str, float]:
    """Latency and statistic -> its value over the limit; without a statistic, at the percentile that must keep it."""
    shares = {}
    for name, (limit_s, percentile) in slo.limits.items():
        latency = getattr(summary, f"{name}_s")
        at = statistic or _statistic(percentile)
        if latency is not None and hasattr(latency, at):
            shares[f"{LATENCIES[name]} {at}"] = getattr(latency, at) / limit_s
    return shares


def _calibration_text(calibration: Mapping[str, Any]) -> str:
    """Name the calibration of a document of `run_document`, its extent and the settings that it decided; or none."""
    learnt = calibration.get("learnt", {}).items()
    settings = [f"{name} {shown(name, value)}, as its runs speak for it" for name, value in learnt]
    return "; ".join([filled(LAYOUT["calibration"], calibration), *settings, *calibration.get("remarks", [])])


def _sides(summary: Summary) -> list[dict[str, Any]]:
    """Return a row for each side of replicas whose attention and feed-forwards run on different devices."""
    pools = [(pool.name, pool.sides) for pool in summary.pools] or [("all", summary.sides)]
    names = ("name", "num_devices", "busy_fraction")
    return [{"pool": name, **fields_of(side, *names)} for name, sides in pools for side in sides]


def deployment_lines(result: Result) -> list[str]:
    """Return devices, engine and network in a line, or in a line per pool."""
    deployment = result.scenario.deployment
    if not result.pools:
        line = setup_text.deployment_line(result.setup, deployment.fewest_replicas, deployment.most_replicas)
        return [line, *setup_text.network_lines(result.setup.network)]
    pools = zip(deployment.pools, result.pools, strict=True)
    lines = [
        f"{pool.name}: {setup_text.deployment_line(made.setup, pool.fewest_replicas, pool.most_replicas)}"
        for pool, made in pools
    ]
    return [*lines, *setup_text.network_lines(deployment.network)]


def _failed_checks(summary: Summary) -> list[Section]:
    """Warn where the run contradicts itself."""
    checks = summary.checks
    if checks is None or checks.passed:
        return []
    return [Section("This run contradicts itself; please report it", [filled(LAYOUT["checks"], checks)])]


def latency_table(summary: Summary | ClientSummary, names: Sequence[str] = ()) -> Table:
    """Return a row for each latency of a run, or of the ones that a client saw; `names`: of those alone."""
    known = {name: label for name, label in LAYOUT["latencies"].items() if not names or name in names}
    latencies = ((label, getattr(summary, name, None)) for name, label in known.items())
    rows = [
        [label, *(format_seconds(getattr(seconds, name)) for name in LAYOUT["statistics"])]
        for label, seconds in latencies
        if seconds is not None
    ]
    return Table(["latency", *LAYOUT["statistics"]], rows)


def _overload(scenario: Scenario, requests: Records, summary: Summary) -> float | None:
    """Return the growth of the queue where requests of an open loop come faster than they are served, else None."""
    measured = requests.where(~requests["is_warmup"])
    if is_closed(scenario.workload) or len(measured) < FEWEST_OF_TREND or _burst(scenario, requests, summary):
        return None
    growth = queue_growth(measured["arrival_s"], measured["queueing_s"])
    return growth if growth > MOST_GROWTH else None


def _burst(scenario: Scenario, requests: Records, summary: Summary) -> tuple[int, int] | None:
    """Return the requests of an open loop with drawn arrivals that all arrive within a mean end-to-end time, mostly
    running and not queueing, and how many would show a steady load; else None."""
    arrival_s = requests["arrival_s"][~requests["is_warmup"]]
    if not isinstance(scenario.workload.arrivals, Poisson | Gamma | Static) or len(arrival_s) < FEWEST_OF_TREND:
        return None
    times = float(arrival_s.max() - arrival_s.min()) / summary.e2e_s.mean
    is_queueing = summary.queueing_s.p99 > summary.e2e_s.mean / 2
    return burst_of(len(arrival_s), times) if times < 1 and not is_queueing else None


def _limits(slo: Slo) -> str:
    known = ((LATENCIES[name], limit_s) for name, (limit_s, _) in slo.limits.items())
    return ", ".join(
        f"{name} {limit_s:g} s" if limit_s >= 1 else f"{name} {limit_s * 1e3:g} ms" for name, limit_s in known
    )


def check_folder(folder: Path | None, overwrite: bool) -> None:
    """Raise InputError where no run can be written to `folder`: a file, not empty and no `overwrite`, or forbidden.

    None is where nothing is to be written.
    """
    if folder is None:
        return
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file; a run is written to a folder", "choose another name")
    check_writable_folder(folder, folder)
    if not overwrite and folder.is_dir() and any(folder.iterdir()):
        raise InputError(
            f"{folder} is not empty", "choose another folder, or replace a former run with --overwrite (overwrite=True)"
        )


def write_run(result: Result, folder: Path, further: Mapping[str, Any] = {}) -> None:
    """Write the records, the summary and the resolved scenario of a run to `folder`, making it where it is missing.

    The summary has the `further` keys of the document that the command prints. A fleet that changes adds the phases of
    its replicas, and which request was where. InputError where the folder cannot be written to.
    """
    with new_files(folder) as draft:
        result.requests.write_parquet(draft / "requests.parquet")
        result.steps.write_parquet(draft / "steps.parquet")
        over_time(result).write_parquet(draft / "series.parquet")
        (draft / "summary.json").write_text(json_text({**run_document(result), **further}) + "\n", encoding="utf-8")
        save(result.scenario, draft / "scenario.yaml")
        if result.fleet is not None:
            result.fleet.phases.write_parquet(draft / "replicas.parquet")
            result.fleet.stays.write_parquet(draft / "stays.parquet")
