"""The contents of a workload or trace, for people and as a document."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from windtunnel.report.render.tables import columns, grid, title
from windtunnel.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

    from windtunnel.formats.collective_calls import Contents


def contents_report(contents: Contents) -> list[RenderableType]:
    """Return the facts of a workload, then its communication, the most bytes first."""
    facts = list(contents.facts)
    if contents.compute_s is not None:
        facts.append(("computation", format_seconds(contents.compute_s)))
    parts: list[RenderableType] = [title(contents.kind), grid(facts)]
    if contents.modules_s:
        rows = [(name, format_seconds(seconds)) for name, seconds in contents.modules_s.items()]
        parts += ["", columns(("module", "mean time"), rows)]
    if contents.calls:
        ordered = sorted(contents.calls, key=lambda call: -(call.size_bytes or 0) * call.num_calls)
        rows_of_calls = [
            (
                call.operation,
                call.group or "-",
                f"{call.group_size:,}" if call.group_size else "-",
                format_bytes(call.size_bytes) if call.size_bytes is not None else "-",
                f"{call.num_calls:,}",
                format_bytes(call.size_bytes * call.num_calls) if call.size_bytes is not None else "-",
                *([format_seconds(call.duration_s)] if call.duration_s is not None else []),
            )
            for call in ordered
        ]
        width = max(map(len, rows_of_calls))
        headers = ("collective", "group", "ranks", "each", "calls", "together", "time")[:width]
        parts += ["", columns(headers, [(*row, *["-"] * (width - len(row))) for row in rows_of_calls], left=2)]
    return parts


def contents_document(contents: Contents) -> dict[str, Any]:
    """Document a workload, in the file's order."""
    return {
        "kind": contents.kind,
        "facts": dict(contents.facts),
        "compute_s": contents.compute_s,
        "modules_s": dict(contents.modules_s) if contents.modules_s else None,
        "communication": [call._asdict() for call in contents.calls],
    }
