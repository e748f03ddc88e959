"""Documents of verbs other than simulate and bench, as pages."""

import math
from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from windtunnel.dashboard.pages.search import study_sections
from windtunnel.dashboard.results import ResultEntry
from windtunnel.metrics.accuracy import Score
from windtunnel.pricing.table import read_parquet
from windtunnel.report.calibration.validation import LATENCIES, NAMES, score_cells
from windtunnel.report.documents import as_text
from windtunnel.report.lab.experiment import overview_section, steps_section, top_kernel_rows
from windtunnel.report.render.html import Section, cards, figures, table
from windtunnel.report.render.plots import Series, equality_figure
from windtunnel.report.render.tables import number, percent
from windtunnel.report.search.whatif import grid_sections, shown_figures
from windtunnel.report.training.page import training_sections
from windtunnel.schema import decode
from windtunnel.search.evaluation.figures import FIGURES
from windtunnel.search.evaluation.schema import Evaluation
from windtunnel.search.space.space import Space, space_from
from windtunnel.search.watch import study_of_points
from windtunnel.units import format_seconds

Document = Mapping[str, Any]


def document_sections(path: Path, entry: ResultEntry, document: Document) -> list[Section]:
    """Return the sections of a document, and the document itself.

    Args:
        path: the file, or the folder that the verb wrote.
        found: what it is.
        document: its content.

    Raises:
        InputError: files that belong to it are missing or broken.
    """
    show = _SHOWN.get(entry.kind)
    sections = [] if show is None else show(path, document)
    text = f"<details><summary>as JSON</summary><pre>{escape(as_text(document))}</pre></details>"
    return [*sections, Section("Document", text)]


def _training(_path: Path, document: Document) -> list[Section]:
    return training_sections(document)


def _search(path: Path, document: Document) -> list[Section]:
    space = space_from(dict(document["space"]))
    return study_sections(study_of_points(space, _written_points(path / "points.parquet", space)))


def _written_points(path: Path, space: Space) -> list[tuple[str | None, int, Evaluation]]:
    """Read every point of a search from its Parquet file."""
    points = []
    for row in read_parquet(path).to_pylist():
        figures_of = {name: row[name] for name in row if _is_figure(name) and math.isfinite(row[name])}
        plain = {name: row[name] for name in Evaluation.__struct_fields__ if name in row}
        workload = row["workload"] if space.workloads else None
        points.append((workload, row["point"], Evaluation(**plain, figures=figures_of)))
    return points


def _is_figure(name: str) -> bool:
    return name in FIGURES or name.partition("_")[0] in ("ttft", "tpot", "itl", "e2e", "queueing")


def _grid(_path: Path, document: Document) -> list[Section]:
    space = space_from(dict(document["space"]))
    answers = {}
    for index, point in enumerate(document["points"]):
        answers[index] = decode({name: value for name, value in point.items() if name != "choice"}, Evaluation)
    return grid_sections(space, answers, shown_figures(None))


def _validation(_path: Path, document: Document) -> list[Section]:
    scores = {name: score for name, score in document["scores"].items() if score}
    shown = [(f"{document['predicted']} of {document['runs']}", "runs predicted")]
    shown += [(f"{score['median']:.1%}", f"median error, {NAMES[name]}") for name, score in scores.items()]
    covered = document["interval_coverage"]
    shown += [(f"{share:.0%}", f"within 80% interval, {NAMES[name]}") for name, share in covered.items()]
    heads = ("", "runs", *(f"{NAMES[name]} {what}" for name in scores for what in ("median", "p90", "bias")))
    groups = []
    for group, members_by_label in document["by"].items():
        rows = [_score_row(label, members, list(scores)) for label, members in members_by_label.items()]
        groups += [Section(f"By {group}", table(heads, rows))] if len(rows) > 1 else []
    drawn = [_scatter(document["rows"], name) for name in scores if name in LATENCIES]
    return [Section("At a glance", cards(shown)), Section("Predicted against measured", figures(drawn)), *groups]


def _score_row(label: str, members: Document, metrics: list[str]) -> list[str]:
    known = [score for score in members.values() if score]
    cells = [label, str(max((score["runs"] for score in known), default=0))]
    for name in metrics:
        score = members.get(name)
        cells += score_cells(None if not score else Score(score["runs"], score["median"], score["p90"], score["bias"]))
    return cells


def _scatter(rows: list[Document], metric: str) -> tuple[str, str]:
    pairs = [
        (run["measured"][metric] * 1e3, run["predicted"][metric] * 1e3, run["id"])
        for run in rows
        if metric in run["measured"] and metric in run["predicted"]
    ]
    x, y, names = ([pair[position] for pair in pairs] for position in range(3))
    dots = Series("", x, y, tooltips=names)
    return equality_figure([dots], NAMES[metric], 440, 360), f"{NAMES[metric]}; dashed: errors of 20%"


def _lab(path: Path, document: Document) -> list[Section]:
    if document["status"] != "done":
        return []
    steps = steps_section(path) if (path / "steps.parquet").is_file() else []
    rows = top_kernel_rows(document)
    shown = [Section("Kernels", table(("kernel", "runs", "total", "share"), rows))] if rows else []
    return [overview_section(document), *steps, *shown]


def _capacity(_path: Path, document: Document) -> list[Section]:
    unit = "concurrent requests" if document["load"] == "concurrency" else "requests/s"
    shown = [(number(document["capacity"]), f"{unit} sustained")]
    if document["capacity_at_least"] is not None:
        shown.append((number(document["capacity_at_least"]), f"at least, {percent(document['confidence'])} confidence"))
    shown.append((str(document["limited_by"] or "all that is sent").replace("_", " "), "limited by"))
    rows = [
        [name.removesuffix("_s").upper(), *(format_seconds(percentiles[point]) for point in ("p50", "p90", "p99"))]
        for name, percentiles in document["latencies"].items()
    ]
    return [Section("Capacity", cards(shown) + table(("at that load", "p50", "p90", "p99"), rows))]


def _explained(_path: Path, document: Document) -> list[Section]:
    rows = [
        [
            operator["name"],
            f"{operator['count']:g}",
            format_seconds(operator["each_s"]),
            format_seconds(operator["total_s"]),
            percent(operator["total_s"] / document["device_s"]),
            operator["bound_by"],
            operator["coverage"],
        ]
        for operator in document["operators"]
    ]
    shown = cards([(format_seconds(document["step_s"]), "a step"), (document["bound_by"], "bound by")])
    return [Section("Step", shown + table(("operator", "runs", "each", "total", "share", "bound by", "found"), rows))]


_SHOWN: Mapping[str, Callable[[Path, Document], list[Section]]] = {
    "train": _training,
    "search": _search,
    "whatif": _grid,
    "validate": _validation,
    "lab": _lab,
    "capacity": _capacity,
    "explain": _explained,
}
