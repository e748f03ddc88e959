"""A sweep of real runs: its table, and a page with a curve of every figure over every swept field."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from windtunnel.files import write_text
from windtunnel.lab.experiments.schema import Experiment
from windtunnel.report.layout import filled, layouts_beside
from windtunnel.report.render.html import page
from windtunnel.report.render.plots import Axis, figure, marked_lines
from windtunnel.report.report import Cards, Figures, OnPage, OnTerminal, Report, Section, Table, Text
from windtunnel.units import format_count

Rows = Sequence[tuple[Experiment, Mapping[str, Any]]]
"""Each point with its summary."""

PAGE = "sweep_report.html"
LAYOUT = layouts_beside(__file__)


def sweep_document(fields: Sequence[str], rows: Rows) -> dict[str, Any]:
    """Document a sweep."""
    return {
        "fields": list(fields),
        "points": [{"values": {name: getattr(point, name) for name in fields}, **summary} for point, summary in rows],
    }


def sweep_report(fields: Sequence[str], rows: Rows) -> Report:
    """Return the report of a sweep: its points, and curves over the swept fields."""
    done = [(point, summary) for point, summary in rows if summary["status"] == "done"]
    failed = sorted({str(summary["error"]) for _, summary in rows if "error" in summary})
    heads = (*fields, *LAYOUT["columns"])
    points = [_cells(fields, *row) for row in rows]
    folders = [[*cells, str(summary.get("folder", ""))] for cells, (_, summary) in zip(points, rows, strict=True)]
    name = rows[0][0].label if rows else "sweep"
    sections = [
        Section("", [OnPage(lambda: [Cards([(str(len(rows)), "experiments"), (str(len(done)), "finished")])])]),
        Section("Curves", [OnPage(lambda: [Figures(_curves(fields, done))])]),
        Section("Experiments", [OnPage(lambda: [Table((*heads, "folder"), folders, left=0)])]),
        Section("What did not run", [OnPage(lambda: [Text(failed)] if failed else [])]),
    ]
    lead = [OnPage(lambda: [f"Sweep of {name} over {', '.join(fields)}."])]
    table = OnTerminal(lambda: [Table(heads, points, left=0)])
    return Report(f"{format_count(len(rows), 'experiment')}", [*lead, table], sections)


def _cells(fields: Sequence[str], point: Experiment, summary: Mapping[str, Any]) -> list[str]:
    values = [str(getattr(point, name)) for name in fields]
    return [*values, *(filled(template, summary) for template in LAYOUT["columns"].values())]


def write_sweep_page(results: Path, fields: Sequence[str], rows: Rows) -> Path:
    """Write the page of a sweep into the folder of its experiments.

    Returns:
        The page's path.
    """
    write_text(results / PAGE, page(sweep_report(fields, rows)))
    return results / PAGE


def _curves(fields: Sequence[str], rows: Rows) -> list[tuple[str, str]]:
    """Plot every figure over every field with several numeric values, a line for each combination of the others."""
    curves = []
    for field in fields:
        values = {getattr(point, field) for point, _ in rows}
        if len(values) > 1 and all(isinstance(value, int | float) for value in values):
            for metric, label, scale in LAYOUT["figures"]:
                points = [
                    (
                        ", ".join(f"{name} {getattr(point, name)}" for name in fields if name != field),
                        float(getattr(point, field)),
                        summary["metrics"][metric] * scale,
                    )
                    for point, summary in rows
                    if summary["metrics"][metric] is not None
                ]
                words = field.replace("_", " ")
                drawn = figure(marked_lines(points, has_tooltips=True), Axis(words), Axis(label, low=0.0))
                curves.append((drawn, f"{label} over {words}"))
    return curves
