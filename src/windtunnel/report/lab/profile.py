"""Answers of `windtunnel profile`, for people and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from windtunnel.pricing.regress import MethodScore
from windtunnel.pricing.table import MeasurementTable
from windtunnel.report.numbers import percent
from windtunnel.report.render.json import fields_of
from windtunnel.report.report import Column, Facts, Report, Table, table_of
from windtunnel.serving.deployment import HostOverheads
from windtunnel.units import format_seconds, format_si

if TYPE_CHECKING:
    from windtunnel.lab.profile.collectives import TimedCollective
    from windtunnel.lab.profile.run import ComputeProfile

CLOSED = 0.05
"""A step is closed where its operators add up to the whole forward within this fraction."""


@dataclass(frozen=True)
class OverheadRow:
    """Medians of the host's work in steps of one batch size."""

    num_requests: int
    num_steps: int
    schedule_s: float
    prepare_s: float
    process_s: float

    @property
    def total_s(self) -> float:
        return self.schedule_s + self.prepare_s + self.process_s


def tables_report(tables: Sequence[MeasurementTable]) -> Report:
    """Return the report of measured tables, a line each."""
    return Report("", [_measured(tables)])


def _measured(tables: Sequence[MeasurementTable]) -> Table:
    documents = tables_document(tables)["tables"]
    names = (" ".join([table.kind, *table.words.values()]) for table in tables)
    rows = [{"name": name, "spread_fraction": row["spread"], **row} for name, row in zip(names, documents, strict=True)]
    columns = {"operator": "name", "shapes": "num_shapes", "points": "num_points"}
    columns |= {"fastest": "fastest_s", "slowest": "slowest_s", "spread": "spread_fraction"}
    return table_of(rows, columns)


def spread_of(table: MeasurementTable) -> float | None:
    """Return the median over the rows of standard deviation over mean; None where they were not kept."""
    if not table.statistics:
        return None
    return float(np.nanmedian(table.statistics["std_s"] / table.statistics["mean_s"]))


def tables_document(tables: Sequence[MeasurementTable]) -> dict[str, Any]:
    """Document measured tables."""
    return {
        "tables": [
            {
                "kind": table.kind,
                **table.words,
                "num_shapes": len(table.rows_by_site),
                "num_points": len(table),
                "fastest_s": float(table.seconds.min()),
                "slowest_s": float(table.seconds.max()),
                "spread": spread_of(table),
                "source": table.source,
            }
            for table in tables
        ]
    }


def compute_report(profile: ComputeProfile) -> Report:
    """Return the report of a profile of operators: its tables, and how well they add up to whole forwards."""
    errors = profile.closure_errors
    closed = float(np.mean(np.abs(errors) <= CLOSED))
    sum_text = f"operators add up to {1 + np.median(errors):.1%} of the whole forward (median)"
    facts = [
        ("steps", f"{errors.size:,}"),
        ("closure", f"{sum_text}, {percent(closed)} of the steps within {percent(CLOSED)}"),
    ]
    if profile.pressure is not None:
        facts.append(("disturbance", f"another task waited for a CPU {percent(profile.pressure)} of the time"))
    return Report("", [_measured(profile.tables), Facts(facts)])


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
    columns: dict[str, Column] = {"collective": "op", "workers": "num_workers", "size": "size_bytes"}
    columns |= {"time": "statistics.median_s", "algorithm": "algorithm_bytes_per_s"}
    columns["bus"] = lambda row: format_si(row.bus_bytes_per_s, "B/s") if row.num_workers > 1 else ""
    return Report("", [table_of(timed, columns)])


def collectives_document(timed: Sequence[TimedCollective]) -> dict[str, Any]:
    """Document timed collectives."""
    names = ("algorithm_bytes_per_s", "bus_bytes_per_s")
    rows = [
        {
            **fields_of(row, "op", "num_workers", "size_bytes"),
            "median_s": row.statistics.median_s,
            **fields_of(row, *names),
        }
        for row in timed
    ]
    return {"collectives": rows}


def overheads_report(host: HostOverheads, rows: Sequence[OverheadRow]) -> Report:
    """Return the report of the host's time beside the forward, by batch, and the line through it."""
    columns: dict[str, Column] = {"requests": "num_requests", "steps": "num_steps"}
    columns |= {"schedule": "schedule_s", "prepare": "prepare_s", "process": "process_s", "in all": "total_s"}
    line = f"{format_seconds(host.step_s or 0.0)} a step and {format_seconds(host.request_s or 0.0)} a request"
    return Report("", [table_of(rows, columns, left=0), Facts([("host", line)])])


def overheads_document(host: HostOverheads, rows: Sequence[OverheadRow]) -> dict[str, Any]:
    """Document the host's overheads."""
    return {"host": {"step_s": host.step_s, "request_s": host.request_s}, "batches": [asdict(row) for row in rows]}


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
    return Report(what, [Table(headers, rows)])


def check_document(about: Mapping[str, str], checked: Checked) -> dict[str, Any]:
    """Document the estimators' errors."""
    return {
        "profile": dict(about),
        "tables": [
            {"table": " ".join(words), "num_points": len(table), "errors": [asdict(score) for score in scores]}
            for words, (table, scores) in checked.items()
        ],
    }
