"""Whether a change passes: the sentence, and every figure before and after."""

from typing import Any

from windtunnel.metrics.limits import METRICS
from windtunnel.production.gate import COST, FAILED, THROUGHPUT, Check, Gate
from windtunnel.report.numbers import times
from windtunnel.report.render.json import version
from windtunnel.report.report import Cell, Report, Section, Table
from windtunnel.report.serving.setup import load_line
from windtunnel.schema import fields_of
from windtunnel.units import format_count, format_seconds

UNITS = {COST: "/M tokens", THROUGHPUT: " output tokens/s"}


def gate_report(gate: Gate) -> Report:
    """Return the report of a gate."""
    heads = ("check", "result", "before", "after", "change", "allowed")
    table = Table(heads, [_row(check) for check in gate.checks], left=1)
    sections = [Section("", [table], "Every check", is_open=True)]
    lead = [] if gate.after is None else [load_line(gate.after.scenario)]
    return Report(gate.title, lead, sections, gate.remarks, verdict=verdict(gate), is_good=gate.passes)


def verdict(gate: Gate) -> str:
    """Say whether a change passes, and of the checks that it fails which is worst: one of the SLO first."""
    failed = [check for check in gate.checks if not check.holds]
    if gate.not_starting:
        others = f". Were it to start, {format_count(len(failed), 'check')} would fail" if failed else ""
        return f"Fails: {'; '.join(gate.not_starting)}{others}."
    if not failed:
        return f"Passes: {len(gate.checks)} of {len(gate.checks)} checks hold."
    worst = max(failed, key=lambda check: (check.rule == "slo", abs(check.after / (check.most or 1.0) - 1)))
    others = f"; {len(failed) - 1} more fail{'s' if len(failed) == 2 else ''}" if len(failed) > 1 else ""
    return f"Fails: {reason(worst)}{others}."


def reason(check: Check) -> str:
    """Say in words what a check found."""
    name, after, most = title(check.name), text(check, check.after), text(check, check.most)
    bound = "at least" if check.name == THROUGHPUT else "at most"
    if after == most:
        after = f"just {'below' if check.name == THROUGHPUT else 'above'} {after}"
    if check.rule == "slo":
        broke = check.before is not None and check.before > check.most
        return f"{name} is {after}, the SLO allows {most}{'; it broke before the change too' if broke else ''}"
    assert check.before is not None
    if check.name == FAILED:
        known = "predicted" if check.rule == "band" else "before"
        return f"{after} of the requests failed, {text(check, check.before)} {known}; {bound} {most} is chance"
    assert check.change is not None
    if check.rule == "band":
        return f"{name} is {after}; predicted are {text(check, check.before)}, {bound} {most}"
    if check.expected is not None:
        old, predicted = text(check, check.before), text(check, check.expected)
        return f"{name} is {after}; the change should make it {predicted}, from {old}, {bound} {most}"
    moves = f"{'falls' if check.change < 0 else 'rises'} by {abs(check.change):.1%}"
    moves = f"is {times(check.change + 1)} times what it was" if check.change >= 1 else moves
    return f"{name} {moves}, from {text(check, check.before)} to {after}; {bound} {most} passes"


def title(name: str) -> str:
    """Return the name of a figure in words."""
    if name in (COST, THROUGHPUT, FAILED):
        return {COST: "cost", THROUGHPUT: "throughput", FAILED: "failed requests"}[name]
    metric, _, statistic = name.partition("_")
    return f"{METRICS[metric]} {statistic or 'mean'}"


def text(check: Check, value: float) -> str:
    """Return a value of a check's figure with its unit."""
    return f"{_number(check, value)}{UNITS.get(check.name, '')}"


def _number(check: Check, value: float) -> str:
    texts = {COST: f"${value:,.3g}", THROUGHPUT: f"{value:,.4g}", FAILED: f"{value:.2%}"}
    return texts.get(check.name) or format_seconds(value)


def _row(check: Check) -> list[str | Cell]:
    before = "" if check.before is None else _number(check, check.before)
    change = (
        "" if check.change is None else f"×{times(check.change + 1)}" if check.change >= 1 else f"{check.change:+z.1%}"
    )
    result = Cell("holds" if check.holds else "fails", tone="" if check.holds else "alert")
    name = f"{title(check.name)}{UNITS.get(check.name, '')}{' (SLO)' if check.rule == 'slo' else ''}"
    return [name, result, before, _number(check, check.after), change, _number(check, check.most)]


def gate_document(gate: Gate) -> dict[str, Any]:
    """Document a gate."""
    names = ("name", "rule", "before", "expected", "after", "change", "most", "least_change", "holds")
    return {
        "windtunnel": version(),
        "passes": gate.passes,
        "verdict": verdict(gate),
        "checks": [
            {**fields_of(check, *names), "reason": None if check.holds else reason(check)} for check in gate.checks
        ],
        "remarks": list(gate.remarks),
    }
