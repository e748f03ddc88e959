"""Measured tables on a terminal and as JSON: which are known, and their suspect rows."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from windtunnel.errors import InputError
from windtunnel.pricing.aiconfigurator.inventory import KnownTable, Suspects, known_tables, suspects
from windtunnel.report.layout import layouts_beside, table_of
from windtunnel.report.report import Report, Section
from windtunnel.units import format_count

LAYOUT = layouts_beside(__file__)


def chosen(
    device: str | None = None, engine: str | None = None, version: str | None = None, kind: str | None = None
) -> list[KnownTable]:
    """Return the known tables that fit every filter (`kind`: operator, family or table); InputError where none do."""
    wanted = {"device": device, "engine": engine, "version": version}
    every = list(known_tables())
    found = [
        table
        for table in every
        if all(value is None or getattr(table, name) == value.lower() for name, value in wanted.items())
        and (kind is None or kind in (table.operator, table.family, table.table, table.table.removesuffix("_perf")))
    ]
    if not found:
        devices, engines = (
            ", ".join(sorted({getattr(table, name) for table in every})) for name in ("device", "engine")
        )
        raise InputError("no known table fits these filters", f"devices: {devices}; engines: {engines}")
    return found


def list_document(tables: Sequence[KnownTable]) -> list[dict[str, Any]]:
    """Return the tables as JSON types."""
    return [{**asdict(table), "path": None if table.path is None else str(table.path)} for table in tables]


def list_report(tables: Sequence[KnownTable]) -> Report:
    """Return the tables as a list, below a count."""
    at_hand, read = sum(table.at_hand for table in tables), sum(bool(table.operator) for table in tables)
    headline = f"{format_count(len(tables), 'table')}: {at_hand:,} at hand, {read:,} that pricing reads"
    return Report("", [_listed("list", tables)], verdict=headline)


def suspect_rows(tables: Iterable[KnownTable]) -> list[Suspects]:
    """Return the suspect rows of those tables that are at hand."""
    return [curve for table in tables for curve in suspects(table)]


def check_document(found: Sequence[Suspects]) -> list[dict[str, Any]]:
    """Return suspect rows as JSON types."""
    return [{**asdict(curve), "done": curve.done, "table": list_document([curve.table])[0]} for curve in found]


def check_report(found: Sequence[Suspects]) -> Report:
    """Return every suspect curve under the reason."""
    reasons = dict.fromkeys(curve.reason for curve in found)
    by_reason = {reason: [curve for curve in found if curve.reason == reason] for reason in reasons}
    sections = [Section(reason, [_listed("check", curves)], reason) for reason, curves in by_reason.items()]
    return Report("", [], sections, verdict=_headline(found))


def counts_report(found: Sequence[Suspects]) -> Report:
    """Return the number of suspect rows of each table."""
    return Report("", [_listed("counts", suspect_counts(found))], verdict=_headline(found))


def suspect_counts(found: Sequence[Suspects]) -> list[dict[str, Any]]:
    """Return each table with the number of its rows that pricing leaves out, repairs and keeps."""
    counts: dict[KnownTable, dict[str, Any]] = {}
    for curve in found:
        count = counts.setdefault(curve.table, {**asdict(curve.table), "left out": 0, "repaired": 0, "kept": 0})
        count[curve.done] += curve.num_rows
    return list(counts.values())


def _headline(found: Sequence[Suspects]) -> str:
    num_rows, num_tables = sum(curve.num_rows for curve in found), len({curve.table for curve in found})
    return f"{format_count(num_rows, 'suspect row')} in {format_count(num_tables, 'table')}"


def _listed(layout: str, things: Iterable[Any]) -> Any:
    return table_of(things, LAYOUT[layout]["columns"], left=LAYOUT[layout]["left"])
