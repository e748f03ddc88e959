"""Why a server is slow: the sentence, the causes with their shares and what to change, and what was ruled out."""

from collections.abc import Mapping
from typing import Any

from windtunnel.production.causes import TEXTS
from windtunnel.production.diagnose import Diagnosis, Finding
from windtunnel.report.layout import filled
from windtunnel.report.numbers import percent
from windtunnel.report.render.json import version
from windtunnel.report.report import Bars, Block, Facts, OnPage, Report, Section, Table
from windtunnel.schema import fields_of
from windtunnel.units import format_seconds

TITLES = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "end to end"}
SMALLER = "smaller faults show beside an earlier healthy run"
MOST_SHARE = 0.995
LEAST_KNOWN = 0.25
"""Share of the time lost below which no cause leads the answer: mending it would leave the server slow."""
CLEAR_GAP = 0.15
"""Gap of the end-to-end time, as a share, from which a server is not called healthy, alarm or none; another latency's
may be larger as its prediction is less sure."""


def title(finding: Finding) -> str:
    """Return a cause in words."""
    return str(TEXTS[finding.name]["title"])


def evidence(finding: Finding) -> str:
    """Say what of the recorded latencies speaks for a cause."""
    key = "evidence_recorded" if finding.change.finds_as_recorded else "evidence"
    known = {"severity": finding.severity, "times": None if f"{finding.severity:.2g}" == "1" else finding.severity}
    return filled(str(TEXTS[finding.name][key]), {**known, "version": finding.change.version})


def change_of(finding: Finding, engine: str) -> str:
    """Say what to change against a cause, in the words of the engine."""
    change = TEXTS[finding.name]["change"]
    return str(change.get(engine, next(iter(change.values()))) if isinstance(change, Mapping) else change)


def verdict(diagnosis: Diagnosis) -> str:
    """Say whether the server is slower than it should be, by how much, why, and what to change."""
    if not diagnosis.late:
        name = unclear(diagnosis)
        gap = diagnosis.gaps[name or "e2e"]
        text = f"{abs(gap):.0%} {'slower' if gap > 0 else 'faster'} than predicted"
        if name and gap > 0:
            wide = f"the prediction is sure only within {diagnosis.widths[name]:.0%}"
            return f"Unclear: {TITLES[name]} is {text}, and {wide}. An earlier healthy run tells more: --before."
        if name:
            return f"Unclear: {TITLES[name]} is {text}. Do the model, the device and the flags describe this server?"
        return f"Healthy: {TITLES['e2e']} {'as fast as predicted' if abs(gap) < 0.005 else text}{_failed(diagnosis)}."
    name = diagnosis.late[0]
    recorded, healthy = (format_seconds(means[name]) for means in (diagnosis.recorded_s, diagnosis.healthy_s))
    slow = f"Slow: {TITLES[name]} is {recorded} on average and should be {healthy}"
    if not diagnosis.findings:
        return f"{slow}; no known cause explains it."
    first = diagnosis.findings[0]
    if (known := sum(max(each.shares[name], 0.0) for each in diagnosis.findings)) < LEAST_KNOWN:
        return f"{slow}; the causes that are known explain {percent(known)} of it, {title(first)} the most."
    after, share = format_seconds(first.without_s[name]), first.shares[name]
    part = "Cause" if share > MOST_SHARE else f"Cause of {percent(max(share, 0.0))} of it"
    engine = diagnosis.healthy.setup.engine.name
    change = change_of(first, engine)
    answer = f"{slow}. {part}: {title(first)}. {change[0].upper()}{change[1:]}; then {TITLES[name]} is {after}."
    equal = [each for each in diagnosis.others if len(diagnosis.findings) == 1 and each.gain > first.gain - 1]
    return answer + "".join(f" Just as likely: {title(each)}; {change_of(each, engine)}." for each in equal)


def _failed(diagnosis: Diagnosis) -> str:
    return f"; {diagnosis.num_failed:,} further requests failed" if diagnosis.num_failed else ""


def unclear(diagnosis: Diagnosis) -> str | None:
    """Return the latency for which a server without an alarm is not called healthy: the end-to-end time, or another one
    that is slow; None where there is none.
    """
    if abs(diagnosis.gaps["e2e"]) > CLEAR_GAP:
        return "e2e"
    share = CLEAR_GAP / diagnosis.widths["e2e"]
    return next((name for name, gap in diagnosis.gaps.items() if gap > share * diagnosis.widths[name]), None)


def diagnosis_report(diagnosis: Diagnosis) -> Report:
    """Return the report of a diagnosis."""
    setup, late = diagnosis.healthy.setup, diagnosis.late
    is_good = None if not late and unclear(diagnosis) else not late
    head = f"{setup.model.name} on {setup.device.name}, {setup.engine.name} {setup.engine.version}"
    blocks: list[Block] = [_latencies(diagnosis)]
    if diagnosis.findings:
        shares = {title(finding): max(finding.shares[late[0]], 0.0) for finding in diagnosis.findings}
        blocks.append(OnPage(lambda: [Bars(shares, "Share of the time lost")]))
    sections = [Section("", blocks, "Recorded and predicted", is_open=True)]
    if diagnosis.findings:
        engine = setup.engine.name
        reasons = [(title(each), f"{evidence(each)}; {change_of(each, engine)}") for each in diagnosis.findings]
        width = max(len(name) for name, _ in reasons) + 2
        sections.append(Section("Causes", [_causes(diagnosis), Facts(reasons, width)], is_open=True))
    if diagnosis.others:
        heading = (
            "What else would explain it, or a part"
            if diagnosis.findings
            else "What would explain the differences, if any"
        )
        others = [[title(finding), evidence(finding)] for finding in diagnosis.others]
        sections.append(Section(heading, [Table(("cause", "evidence"), others, right=1)]))
    return Report(head, [], sections, _notes(diagnosis), verdict=verdict(diagnosis), is_good=is_good)


def _latencies(diagnosis: Diagnosis) -> Table:
    rows = [
        [
            TITLES[name],
            format_seconds(recorded_s),
            format_seconds(diagnosis.healthy_s[name]),
            f"{diagnosis.gaps[name]:+z.1%}",
            f"±{diagnosis.widths[name]:.0%}",
        ]
        for name, recorded_s in diagnosis.recorded_s.items()
    ]
    return Table(("mean", "recorded", "predicted", "gap", "99% interval"), rows)


def _causes(diagnosis: Diagnosis) -> Table:
    name, lost = diagnosis.late[0], diagnosis.lost_usd_per_hour
    rows = []
    for finding in diagnosis.findings:
        money = "" if lost is None else f"${max(lost * finding.shares['e2e'], 0.0):,.2f}/h"
        gain = f"{TITLES[name]} {format_seconds(finding.without_s[name])}"
        rows.append([title(finding), percent(max(finding.shares[name], 0.0)), money, gain])
    return Table(("cause", "share", "costs", "without it"), rows)


def _notes(diagnosis: Diagnosis) -> list[str]:
    calibration = diagnosis.healthy.setup.calibration_name or "none"
    notes = [f"{diagnosis.num_requests:,} requests{_failed(diagnosis)}; calibration: {calibration}"]
    if diagnosis.hits is not None:
        found, expected = (percent(hits) for hits in diagnosis.hits)
        notes.append(f"{found} of the prompt tokens were in the prefix cache, as the server says; predicted {expected}")
    if diagnosis.num_before > 1:
        unsure = percent(diagnosis.widths["e2e"])
        notes.append(f"{diagnosis.num_before} earlier healthy runs tell the end-to-end time of another within {unsure}")
    elif not diagnosis.late:
        more = "a second earlier healthy run tells how much they differ" if diagnosis.num_before else SMALLER
        notes.append(f"{more}: --before")
    if provision := _provision(diagnosis):
        notes.append(provision)
    if diagnosis.late_s > 0.1 * diagnosis.recorded_s["ttft"]:
        notes.append(f"the client sent {format_seconds(diagnosis.late_s)} late on average: it cannot keep up")
    return notes


def _provision(diagnosis: Diagnosis) -> str:
    """Say whether the deployment as described has too few replicas for its requests, or more than it needs."""
    if diagnosis.is_underprovisioned:
        wait = f"even a healthy server lets requests wait for {diagnosis.waiting:.0%} of their time"
        return f"under-provisioned: {wait}; add replicas, or lower the load"
    if (enough := diagnosis.enough_replicas) is not None:
        every = diagnosis.healthy.scenario.deployment.replicas
        return f"over-provisioned: {enough} of {every} replicas would serve these requests as fast, within 5%"
    return ""


def diagnosis_document(diagnosis: Diagnosis) -> dict[str, Any]:
    """Document a diagnosis."""
    engine = diagnosis.healthy.setup.engine.name

    def documented(finding: Finding) -> dict[str, Any]:
        return {
            "cause": finding.name,
            "title": title(finding),
            "severity": finding.severity,
            "evidence": evidence(finding),
            "change": change_of(finding, engine),
            "shares": dict(finding.shares),
            "without_s": dict(finding.without_s),
            "log_likelihood": finding.gain,
        }

    return {
        "windtunnel": version(),
        "verdict": verdict(diagnosis),
        "provision": _provision(diagnosis),
        "is_slow": bool(diagnosis.late),
        "num_failed": diagnosis.num_failed,
        "late": list(diagnosis.late),
        "recorded_s": dict(diagnosis.recorded_s),
        "predicted_s": dict(diagnosis.healthy_s),
        "sure_within": dict(diagnosis.widths),
        "causes": [documented(finding) for finding in diagnosis.findings],
        "others": [documented(finding) for finding in diagnosis.others],
        **fields_of(diagnosis, "lost_usd_per_hour", "num_requests"),
        "cache_hits": None
        if diagnosis.hits is None
        else dict(zip(("recorded", "predicted"), diagnosis.hits, strict=True)),
    }
