"""Documents of verbs other than simulate and bench, as sections of a page."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from windtunnel.dashboard.results import ResultEntry
from windtunnel.pricing.table import read_parquet
from windtunnel.report import training
from windtunnel.report.calibration import validation
from windtunnel.report.calibration.validation import validation_sections
from windtunnel.report.lab import experiment
from windtunnel.report.lab.experiment import overview_sections, top_kernel_table
from windtunnel.report.render.json import as_text
from windtunnel.report.report import Card, Cards, Code, Report, Section
from windtunnel.report.search import capacity, whatif
from windtunnel.report.search.capacity import capacity_section
from windtunnel.report.search.study import SearchEvidence, search_sections, verdict_of
from windtunnel.report.search.whatif import grid_sections, shown_figures
from windtunnel.report.serving import step
from windtunnel.report.serving.step import time_table
from windtunnel.report.training import training_sections
from windtunnel.schema import decode
from windtunnel.search.capacity.limits import METRICS
from windtunnel.search.evaluation.figures import FIGURES
from windtunnel.search.evaluation.schema import Evaluation
from windtunnel.search.space.space import Space, space_from
from windtunnel.search.watch import study_of_points
from windtunnel.units import format_seconds

Document = Mapping[str, Any]
Answer = tuple[Sequence[Section], str, bool | None]
"""Sections, the verdict, and whether it is a yes."""
TOP = 20
"""Best points of a search that its page shows."""


def document_report(path: Path, entry: ResultEntry, document: Document) -> Report:
    """Return the report of a document: its answer, its sections, and the document itself.

    Args:
        path: the file, or the folder that the verb wrote.
        entry: what it is.
        document: its content.

    Raises:
        InputError: files that belong to it are missing or broken.
    """
    whole = Section("Document", [Code(as_text(document), "as JSON")])
    if entry.kind not in _REPORTS:
        return Report("", sections=[whole])
    sections, text, is_good = _REPORTS[entry.kind](path, document)
    return Report("", sections=[*sections, whole], verdict=text, is_good=is_good)


def _search(path: Path, document: Document) -> Answer:
    space = space_from(dict(document["space"]))
    study = study_of_points(space, _written_points(path / "points.parquet", space))
    evidence = SearchEvidence(study, TOP)
    return search_sections(evidence), verdict_of(evidence), any(outcome.ranking for outcome in study.outcomes)


def _written_points(path: Path, space: Space) -> list[tuple[str | None, int, Evaluation]]:
    """Read every point of a search from its Parquet file."""
    points = []
    for row in read_parquet(path).to_pylist():
        names = (name for name in row if name in FIGURES or name.partition("_")[0] in METRICS)
        figures_of = {name: row[name] for name in names if math.isfinite(row[name])}
        plain = {name: row[name] for name in Evaluation.__struct_fields__ if name in row}
        workload = row["workload"] if space.workloads else None
        points.append((workload, row["point"], Evaluation(**plain, figures=figures_of)))
    return points


def _grid(_path: Path, document: Document) -> Answer:
    space = space_from(dict(document["space"]))
    answers = {}
    for index, point in enumerate(document["points"]):
        answers[index] = decode({name: value for name, value in point.items() if name != "choice"}, Evaluation)
    return grid_sections(space, answers, shown_figures(None)), *whatif.headline_of(space, answers)


def _lab(path: Path, document: Document) -> Answer:
    if document["status"] != "done":
        return [], f"The run {document['status']}.", False
    kernels = [Section("Kernels", [top_kernel_table(document)])] if document.get("top_kernels") else []
    return [*overview_sections(document, path), *kernels], experiment.headline_of(document["metrics"]), None


def _explained(_path: Path, document: Document) -> Answer:
    cards = Cards([Card(format_seconds(document["step_s"]), "a step"), Card(document["bound_by"], "bound by")])
    return [Section("Step", [cards, time_table(document)], is_open=True)], step.headline_of(document), None


_REPORTS: Mapping[str, Callable[[Path, Document], Answer]] = {
    "train": lambda _path, document: (training_sections(document), training.verdict_of(document), document["fits"]),
    "search": _search,
    "whatif": _grid,
    "validate": lambda _path, document: (validation_sections(document), validation.verdict_of(document), None),
    "lab": _lab,
    "capacity": lambda _path, document: ([capacity_section(document)], *capacity.verdict_of(document)),
    "explain": _explained,
}
