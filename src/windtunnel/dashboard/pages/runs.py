"""The tables of all results below the folder."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from windtunnel.dashboard.frame import Query, View, lines, link
from windtunnel.dashboard.results import MOST_RESULTS, ResultEntry
from windtunnel.dashboard.state import Dashboard
from windtunnel.report.render.html import Cell, Section, table
from windtunnel.report.render.tables import number, percent, span_text
from windtunnel.units import format_seconds

FILTER = (
    '<p class="tools"><input type="search" id="filter" placeholder="filter: words of any column" '
    'aria-label="filter the tables" autocomplete="off"> <span id="count"></span> '
    '<a id="compare" class="button" href="/compare">compare</a></p>'
)

NOTHING = (
    "<p>There is no result below this folder yet. <code>windtunnel simulate ... --out FOLDER</code> writes one, and "
    'this page shows it as it appears. Or <a href="/try">try a deployment</a>.</p>'
)


def page(dashboard: Dashboard, _rest: str, _query: Query) -> View:
    """Show all results by kind, kept up to date."""
    entries = dashboard.results.entries()
    sections = []
    for title, kinds, columns in TABLES:
        chosen = [entry for entry in entries if entry.kind in kinds]
        if chosen:
            heads = [head for head, _ in columns]
            rows = [[cell(entry) for _, cell in columns] for entry in chosen]
            grid = table(heads, rows, left=_TEXTS[title])
            body = f"<div data-compares>{grid}</div>" if title == "Serving" else grid
            sections.append(Section(f"{title} ({len(chosen):,})", body))
    if not sections:
        sections.append(Section("Nothing yet", NOTHING))
    cut = f"Only the first {MOST_RESULTS:,} results are shown." if dashboard.results.is_cut else ""
    return View("Runs", sections, lead=FILTER + (lines(cut) if cut else ""), is_live=True)


def document(dashboard: Dashboard, _rest: str, _query: Query) -> Any:
    """Document all results."""
    return {
        "folder": str(dashboard.results.folder),
        "is_cut": dashboard.results.is_cut,
        "runs": [msgspec.to_builtins(entry) for entry in dashboard.results.entries()],
    }


# ---------------------------------------------------------------------------------------------------------------- cells

Shown = Callable[[ResultEntry], "str | Cell"]


def _name(entry: ResultEntry) -> Cell:
    note = "measured" if entry.kind == "bench" else entry.problem
    return Cell(entry.name or ".", href=link("run", entry.name), note=note)


def _model(entry: ResultEntry) -> Cell:
    return Cell(entry.model.rpartition("/")[2], title=entry.model, note=entry.deployment)


def _figure(name: str, shown: Callable[[float], str]) -> Shown:
    """Return the column of a figure, with the interval that holds 80% of measurements where it is known."""

    def cell(entry: ResultEntry) -> Cell:
        value, interval = entry.figures.get(name), entry.intervals.get(name)
        if value is None:
            return Cell("")
        return Cell(shown(value), value, note="" if interval is None else span_text(*map(shown, interval)))

    return cell


def _seconds(name: str) -> Shown:
    return _figure(name, format_seconds)


def _rate(name: str) -> Shown:
    return _figure(name, number)


def _count(name: str) -> Shown:
    return _figure(name, "{:,.0f}".format)


def _share(name: str) -> Shown:
    return _figure(name, percent)


def _written(entry: ResultEntry) -> Cell:
    moment = time.localtime(entry.changed_s)
    return Cell(time.strftime("%Y-%m-%d", moment), entry.changed_s, note=time.strftime("%H:%M", moment))


def _covered(entry: ResultEntry) -> Cell:
    """Return the share of the device's time that is read from tables, not extrapolated."""
    if not entry.coverage:
        return Cell("")
    known = sum(entry.coverage.get(how, 0.0) for how in ("measured", "interpolated"))
    shares = ", ".join(f"{percent(part)} {how}" for how, part in entry.coverage.items())
    return Cell(percent(known), known, title=shares)


_NAME: tuple[str, Shown] = ("run", _name)
_WRITTEN: tuple[str, Shown] = ("written", _written)
_COVERED: tuple[str, Shown] = ("in tables", _covered)


def _text(field: str) -> Shown:
    return lambda entry: str(getattr(entry, field))


TABLES: Sequence[tuple[str, tuple[str, ...], Sequence[tuple[str, Shown]]]] = (
    (
        "Serving",
        ("simulate", "bench"),
        (
            _NAME,
            ("model, deployment", _model),
            ("load", _text("load")),
            ("TTFT mean", _seconds("ttft_s")),
            ("p99", _seconds("ttft_p99_s")),
            ("TPOT mean", _seconds("tpot_s")),
            ("p99", _seconds("tpot_p99_s")),
            ("output tokens/s", _rate("output_tokens_per_s")),
            ("per device", _rate("output_tokens_per_s_per_device")),
            ("$/M output", _figure("usd_per_million_output_tokens", "{:,.2f}".format)),
            ("goodput", _share("goodput_fraction")),
            ("bound by", _text("bound_by")),
            _COVERED,
            ("calibration", lambda entry: entry.calibration or ("none" if entry.kind == "simulate" else "")),
            _WRITTEN,
        ),
    ),
    (
        "Training",
        ("train",),
        (
            _NAME,
            ("model", _text("model")),
            ("deployment", _text("deployment")),
            ("step", _text("load")),
            ("step time", _seconds("step_s")),
            ("MFU", _share("mfu")),
            ("tokens/s", _rate("tokens_per_s")),
            ("per device", _rate("tokens_per_s_per_device")),
            ("bubbles", _share("bubble_fraction")),
            _COVERED,
            _WRITTEN,
        ),
    ),
    (
        "Searches",
        ("search", "whatif", "capacity"),
        (
            _NAME,
            ("verb", _text("kind")),
            ("model", _text("model")),
            ("deployment", _text("deployment")),
            ("limits", _text("load")),
            ("points", _count("num_points")),
            ("capacity", _rate("capacity")),
            ("limited by", _text("bound_by")),
            _WRITTEN,
        ),
    ),
    (
        "Validations",
        ("validate",),
        (
            _NAME,
            ("runs", _count("num_runs")),
            ("predicted", _count("num_predicted")),
            *(
                (f"{title} median error", _share(f"{name}_median_error"))
                for name, title in (("tpot", "TPOT"), ("ttft", "TTFT"), ("e2e", "E2E"), ("throughput", "throughput"))
            ),
            _WRITTEN,
        ),
    ),
    (
        "Lab",
        ("lab",),
        (
            _NAME,
            ("model", _text("model")),
            ("on", _text("deployment")),
            ("mode", _text("load")),
            ("TTFT", _seconds("ttft_s")),
            ("TPOT", _seconds("tpot_s")),
            ("output tokens/s", _rate("output_tokens_per_s")),
            _WRITTEN,
        ),
    ),
    (
        "Other documents",
        ("explain", "document"),
        (_NAME, ("verb", _text("kind")), ("model", _text("model")), ("device", _text("deployment")), _WRITTEN),
    ),
    ("Cannot be read", ("broken",), (("run", lambda entry: entry.name or "."), ("reason", _text("problem")), _WRITTEN)),
)
"""Title, kinds of results, and (header, cell) of each column."""
_TEXTS: Mapping[str, int] = {
    "Serving": 3,
    "Training": 4,
    "Searches": 5,
    "Validations": 1,
    "Lab": 4,
    "Other documents": 4,
    "Cannot be read": 2,
}
"""Title -> columns of text that the table begins with."""
