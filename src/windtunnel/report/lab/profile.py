"""Answers of `windtunnel profile`, for people and as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from windtunnel.lab.profile.collectives import TimedCollective
from windtunnel.lab.profile.run import ComputeProfile
from windtunnel.pricing.regress import MethodScore
from windtunnel.pricing.table import MeasurementTable
from windtunnel.report.layout import facts_of, filled, layouts_beside, table_of
from windtunnel.report.report import Report, Table
from windtunnel.schema import fields_of
from windtunnel.serving.deployment import HostOverheads

CLOSED = 0.05
"""A step is closed where its operators add up to the whole forward within this fraction."""

LAYOUT = layouts_beside(__file__)
OVERHEADS = ("num_requests", "num_steps", "schedule_s", "prepare_s", "process_s")
"""Columns of the medians of the host's work in the steps of one batch size."""


def tables_report(tables: Sequence[MeasurementTable]) -> Report:
    """Return the report of measured tables, a line each."""
    rows = zip(tables, tables_document(tables)["tables"], strict=True)
    titled = [{"name": " ".join([table.kind, *table.words.values()]), **row} for table, row in rows]
    totals = {"num_tables": len(titled), "num_points": sum(map(len, tables))}
    return Report("", [table_of(titled, LAYOUT["tables"])], verdict=filled(LAYOUT["measured"], totals))


def tables_document(tables: Sequence[MeasurementTable]) -> dict[str, Any]:
    """Document measured tables; a spread is the median of standard deviation over mean, where these were kept."""
    kept = [table.statistics for table in tables]
    spreads = [float(np.nanmedian(each["std_s"] / each["mean_s"])) if each else None for each in kept]
    return {
        "tables": [
            {
                "kind": table.kind,
                **table.words,
                "num_shapes": len(table.rows_by_site),
                "num_points": len(table),
                "fastest_s": float(table.seconds.min()),
                "slowest_s": float(table.seconds.max()),
                "spread": spread,
                "source": table.source,
            }
            for table, spread in zip(tables, spreads, strict=True)
        ]
    }


def compute_report(profile: ComputeProfile) -> Report:
    """Return the report of a profile of operators: its tables, and how well they add up to whole forwards."""
    document = compute_document(profile)
    known = {**document, "sum": 1 + document["closure"]["median_error"], "limit": CLOSED}
    lead = [*tables_report(profile.tables).lead, facts_of(known, LAYOUT["compute"])]
    return Report("", lead, verdict=filled(LAYOUT["closure"], known))


def compute_document(profile: ComputeProfile) -> dict[str, Any]:
    """Document a profile of operators."""
    errors = profile.closure_errors
    return {
        **tables_document(profile.tables),
        "closure": {
            "num_steps": int(errors.size),
            "median_error": float(np.median(errors)),
            "largest_error": float(np.abs(errors).max()),
            "within_5_percent_fraction": float(np.mean(np.abs(errors) <= CLOSED)),
        },
        "cpu_pressure_fraction": profile.pressure,
    }


def collectives_report(timed: Sequence[TimedCollective]) -> Report:
    """Return the report of times and bandwidths, as nccl-tests prints them."""
    names = ("op", "num_workers", "size_bytes", "statistics", "algorithm_bytes_per_s")
    rows = [{**fields_of(row, *names), "bus": row.bus_bytes_per_s if row.num_workers > 1 else None} for row in timed]
    fastest = max(rows, key=lambda row: row["bus"] or 0.0)
    return Report("", [table_of(rows, LAYOUT["collectives"])], verdict=filled(LAYOUT["fastest"], fastest))


def collectives_document(timed: Sequence[TimedCollective]) -> dict[str, Any]:
    """Document timed collectives."""
    names = ("algorithm_bytes_per_s", "bus_bytes_per_s")
    times = ({"median_s": row.statistics.median_s, **fields_of(row, *names)} for row in timed)
    works = (fields_of(row, "op", "num_workers", "size_bytes") for row in timed)
    return {"collectives": [work | time for work, time in zip(works, times, strict=True)]}


def overheads_report(host: HostOverheads, medians: Sequence[Sequence[float]]) -> Report:
    """Return the report of the host's time beside the forward, by batch, and the line through it."""
    rows = ({**dict(zip(OVERHEADS, row, strict=True)), "total_s": sum(row[2:])} for row in medians)
    line = filled(LAYOUT["host"], {"step_s": host.step_s or 0.0, "request_s": host.request_s or 0.0})
    return Report("", [table_of(rows, LAYOUT["overheads"], left=0)], verdict=line)


def overheads_document(host: HostOverheads, medians: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Document the host's overheads."""
    batches = [dict(zip(OVERHEADS, row, strict=True)) for row in medians]
    return {"host": fields_of(host, "step_s", "request_s"), "batches": batches}


Checked = Mapping[tuple[str, ...], tuple[MeasurementTable, Sequence[MethodScore]]]
"""Kind and words of a table -> the table and its estimators' errors, the best first."""


def check_report(about: Mapping[str, str], checked: Checked) -> Report:
    """Return the report of every estimator's error on points left out."""
    methods = sorted({score.method for _, scores in checked.values() for score in scores})
    rows = []
    for words, (table, scores) in checked.items():
        errors = {score.method: f"{score.median_error:.1%}" for score in scores}
        cells = [errors[name] + ("*" if name == scores[0].method else " ") for name in methods]
        rows.append((" ".join(words), f"{len(table):,}", *cells))
    headers = ("operator", "points", *(name.replace("_", " ") for name in methods))
    what = f"median |error| on points left out of {about.get('device', 'the profile')}; * is what `auto` takes"
    best = {words: scores[0] for words, (_, scores) in checked.items()}
    worst = max(best, key=lambda words: best[words].median_error)
    verdict = f"The best estimators are at most {best[worst].median_error:.1%} off ({' '.join(worst)})."
    return Report(what, [Table(headers, rows)], verdict=verdict)


def check_document(about: Mapping[str, str], checked: Checked) -> dict[str, Any]:
    """Document the estimators' errors."""
    return {
        "profile": dict(about),
        "tables": [
            {"table": " ".join(words), "num_points": len(table), "errors": [asdict(score) for score in scores]}
            for words, (table, scores) in checked.items()
        ],
    }
