"""The tables of all results below the folder."""

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from windtunnel.dashboard.results import MOST_RESULTS, ResultEntry
from windtunnel.dashboard.state import Dashboard
from windtunnel.dashboard.view import Query, View, link
from windtunnel.report.numbers import percent, quantity, span_text
from windtunnel.report.report import Cell, Section, Table

Columns = Sequence[tuple[str, str]]
"""Header and what stands below it: a figure, a field of the entry, or one of the cells below."""

_DEPLOYMENT: Columns = (("run", "name"), ("model", "model"), ("deployment", "deployment"))
_WRITTEN = ("written", "written")
TABLES: Sequence[tuple[str, tuple[str, ...], int, Columns]] = (
    (
        "Serving",
        ("simulate", "bench"),
        3,
        (
            ("run", "name"),
            ("model, deployment", "served"),
            ("load", "load"),
            ("TTFT mean", "ttft_s"),
            ("p99", "ttft_p99_s"),
            ("TPOT mean", "tpot_s"),
            ("p99", "tpot_p99_s"),
            ("output tokens/s", "output_tokens_per_s"),
            ("per device", "output_tokens_per_s_per_device"),
            ("$/M output", "usd_per_million_output_tokens"),
            ("goodput", "goodput_fraction"),
            ("bound by", "bound_by"),
            ("in tables", "covered"),
            ("calibration", "calibration"),
            _WRITTEN,
        ),
    ),
    (
        "Training",
        ("train",),
        4,
        (
            *_DEPLOYMENT,
            ("step", "load"),
            ("step time", "step_s"),
            ("MFU", "mfu"),
            ("tokens/s", "tokens_per_s"),
            ("per device", "tokens_per_s_per_device"),
            ("bubbles", "bubble_fraction"),
            ("in tables", "covered"),
            _WRITTEN,
        ),
    ),
    (
        "Searches",
        ("search", "whatif", "capacity"),
        5,
        (
            ("run", "name"),
            ("verb", "kind"),
            ("model", "model"),
            ("deployment", "deployment"),
            ("limits", "load"),
            ("points", "num_points"),
            ("capacity", "capacity"),
            ("limited by", "bound_by"),
            _WRITTEN,
        ),
    ),
    (
        "Validations",
        ("validate",),
        1,
        (
            ("run", "name"),
            ("runs", "num_runs"),
            ("predicted", "num_predicted"),
            ("TPOT median error", "tpot_median_error"),
            ("TTFT median error", "ttft_median_error"),
            ("E2E median error", "e2e_median_error"),
            ("throughput median error", "throughput_median_error"),
            _WRITTEN,
        ),
    ),
    (
        "Lab",
        ("lab",),
        4,
        (
            *_DEPLOYMENT,
            ("mode", "load"),
            ("TTFT", "ttft_s"),
            ("TPOT", "tpot_s"),
            ("output tokens/s", "output_tokens_per_s"),
            _WRITTEN,
        ),
    ),
    (
        "Other documents",
        ("explain", "document"),
        4,
        (("run", "name"), ("verb", "kind"), ("model", "model"), ("device", "deployment"), _WRITTEN),
    ),
    ("Cannot be read", ("broken",), 2, (("run", "broken"), ("reason", "problem"), _WRITTEN)),
)
"""Title, kinds of results, number of leading text columns, and the columns."""


def page(dashboard: Dashboard, _rest: str, _query: Query) -> View:
    """Show all results by kind, kept up to date."""
    entries = dashboard.results.entries()
    sections = []
    for title, kinds, left, columns in TABLES:
        rows = [[_cell(entry, name) for _, name in columns] for entry in entries if entry.kind in kinds]
        if rows:
            sections.append(Section(f"{title} ({len(rows):,})", [Table([head for head, _ in columns], rows, left)]))
    cut = [f"Only the first {MOST_RESULTS:,} results are shown."] if dashboard.results.is_cut else []
    return View("Runs", sections, cut, filters="filter: words of any column", template="runs.html", is_live=True)


def document(dashboard: Dashboard, _rest: str, _query: Query) -> Any:
    """Document all results."""
    return {
        "folder": str(dashboard.results.folder),
        "is_cut": dashboard.results.is_cut,
        "runs": [msgspec.to_builtins(entry) for entry in dashboard.results.entries()],
    }


def _cell(entry: ResultEntry, name: str) -> str | Cell:
    """Return an entry's cell; a figure has its interval, which holds 80% of measurements, where that is known."""
    match name:
        case "name":
            note = "measured" if entry.kind == "bench" else entry.problem
            return Cell(entry.name or ".", href=link("run", entry.name), note=note)
        case "broken":
            return entry.name or "."
        case "served":
            return Cell(entry.model.rpartition("/")[2], title=entry.model, note=entry.deployment)
        case "written":
            moment = time.localtime(entry.changed_s)
            return Cell(time.strftime("%Y-%m-%d", moment), entry.changed_s, note=time.strftime("%H:%M", moment))
        case "covered":
            return _covered(entry)
        case "calibration":
            return entry.calibration or ("none" if entry.kind == "simulate" else "")
    if hasattr(entry, name):
        return str(getattr(entry, name))
    value, interval = entry.figures.get(name), entry.intervals.get(name)
    if value is None:
        return ""
    span = "" if interval is None else span_text(*(quantity(name, bound) for bound in interval))
    return Cell(quantity(name, value), value, note=span)


def _covered(entry: ResultEntry) -> Cell:
    """Return the share of the device's time that is read from tables, not extrapolated."""
    if not entry.coverage:
        return Cell("")
    known = sum(entry.coverage.get(how, 0.0) for how in ("measured", "interpolated"))
    shares = ", ".join(f"{percent(part)} {how}" for how, part in entry.coverage.items())
    return Cell(percent(known), known, title=shares)
