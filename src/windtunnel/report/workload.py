"""The contents of a workload or trace, for people and as a document."""

from typing import Any

from windtunnel.formats.collective_calls import Contents
from windtunnel.report.layout import filled, layouts_beside, rows_of, table_of
from windtunnel.report.report import Facts, Report, Section

LAYOUT = layouts_beside(__file__)


def contents_report(contents: Contents) -> Report:
    """Return the report of a workload: its facts, then its communication, the most bytes first."""
    facts = [*contents.facts, *rows_of(contents, LAYOUT["facts"])]
    tables, verdict = [], filled(LAYOUT["computing"], contents)
    if contents.modules_s:
        modules = ({"name": name, "mean_s": mean_s} for name, mean_s in contents.modules_s.items())
        tables.append(table_of(modules, LAYOUT["modules"]))
    if contents.calls:
        ordered = sorted(contents.calls, key=lambda call: -(call.size_bytes or 0) * call.num_calls)
        is_timed = any(call.duration_s is not None for call in ordered)
        columns = LAYOUT["calls"] | (LAYOUT["timed"] if is_timed else {})
        rows = [
            call._asdict() | {"together_bytes": call.size_bytes and call.size_bytes * call.num_calls}
            for call in ordered
        ]
        verdict = filled(LAYOUT["most"], rows[0])
        tables.append(table_of(rows, columns, left=2))
    return Report(contents.kind, [Facts(facts)], [Section("", tables, is_open=True)], verdict=verdict)


def contents_document(contents: Contents) -> dict[str, Any]:
    """Document a workload, in the file's order."""
    return {
        "kind": contents.kind,
        "facts": dict(contents.facts),
        "compute_s": contents.compute_s,
        "modules_s": dict(contents.modules_s) if contents.modules_s else None,
        "communication": [call._asdict() for call in contents.calls],
    }
