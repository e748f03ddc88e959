"""The contents of a workload or trace, for people and as a document."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from windtunnel.report.report import Facts, Report, Section, Table
from windtunnel.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from windtunnel.formats.collective_calls import CollectiveCall, Contents


def contents_report(contents: Contents) -> Report:
    """Return the report of a workload: its facts, then its communication, the most bytes first."""
    facts = list(contents.facts)
    if contents.compute_s is not None:
        facts.append(("computation", format_seconds(contents.compute_s)))
    tables = []
    if contents.modules_s:
        rows = [(name, format_seconds(seconds)) for name, seconds in contents.modules_s.items()]
        tables.append(Table(("module", "mean time"), rows))
    if contents.calls:
        ordered = sorted(contents.calls, key=lambda call: -(call.size_bytes or 0) * call.num_calls)
        is_timed = any(call.duration_s is not None for call in ordered)
        heads = ("collective", "group", "ranks", "each", "calls", "together", *(["time"] if is_timed else []))
        tables.append(Table(heads, [_call_cells(call)[: len(heads)] for call in ordered], left=2))
    return Report(contents.kind, [Facts(facts)], [Section("", tables)])


def _call_cells(call: CollectiveCall) -> tuple[str, ...]:
    def shown(value: float | None, text: Callable[[float], str]) -> str:
        return "-" if value is None else text(value)

    return (
        call.operation,
        call.group or "-",
        f"{call.group_size:,}" if call.group_size else "-",
        shown(call.size_bytes, format_bytes),
        f"{call.num_calls:,}",
        shown(None if call.size_bytes is None else call.size_bytes * call.num_calls, format_bytes),
        shown(call.duration_s, format_seconds),
    )


def contents_document(contents: Contents) -> dict[str, Any]:
    """Document a workload, in the file's order."""
    return {
        "kind": contents.kind,
        "facts": dict(contents.facts),
        "compute_s": contents.compute_s,
        "modules_s": dict(contents.modules_s) if contents.modules_s else None,
        "communication": [call._asdict() for call in contents.calls],
    }
