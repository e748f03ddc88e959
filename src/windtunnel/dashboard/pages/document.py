"""Documents of verbs other than simulate and bench, as sections of a page."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from windtunnel.metrics.limits import METRICS
from windtunnel.pricing.table import read_parquet
from windtunnel.report import training
from windtunnel.report.calibration import validation
from windtunnel.report.diffusion import batch
from windtunnel.report.lab.experiment import LAYOUT, overview_sections, top_kernel_table
from windtunnel.report.layout import filled
from windtunnel.report.report import Code, Report, Section
from windtunnel.report.results import ResultEntry
from windtunnel.report.search import capacity
from windtunnel.report.search.study import SearchEvidence, search_report
from windtunnel.report.search.whatif import grid_report, shown_figures
from windtunnel.report.serving import step
from windtunnel.schema import decode, json_text
from windtunnel.search.asker import Count
from windtunnel.search.evaluation.figures import FIGURES
from windtunnel.search.evaluation.schema import Evaluation
from windtunnel.search.space.space import Space, space_from, workload_names
from windtunnel.search.study import Study, outcome_of

Document = Mapping[str, Any]
TOP = 20
"""Best points of a search that its page shows."""


def document_report(path: Path, entry: ResultEntry, document: Document) -> Report:
    """Return the report of a document: its answer, its sections, and the document itself. InputError where files that
    belong to it are missing or broken.

    Args:
        path: the file, or the folder that the verb wrote.
    """
    whole = Section("Document", [Code(json_text(document), "as JSON")])
    report = _REPORTS[entry.kind](path, document) if entry.kind in _REPORTS else Report("")
    return replace(report, sections=[*report.sections, whole])


def _search(path: Path, document: Document) -> Report:
    space = space_from(dict(document["space"]))
    outcomes = [
        outcome_of(space, workload, {index: runs[0] for index, runs in points.items()}, points)
        for workload, points in _written_answers(path / "points.parquet", space).items()
    ]
    report = search_report(SearchEvidence(Study(space, outcomes, Count()), TOP))
    return replace(report, verdict=document.get("recommendation") or report.verdict)


def _written_answers(path: Path, space: Space) -> dict[str | None, dict[int, list[Evaluation]]]:
    """Read every point of a search from its Parquet file: workload -> position -> answers, one for each stream."""
    answers: dict[str | None, dict[int, list[Evaluation]]] = {name: {} for name in workload_names(space)}
    for row in read_parquet(path).to_pylist():
        names = (name for name in row if name in FIGURES or name.partition("_")[0] in METRICS)
        figures_of = {name: row[name] for name in names if math.isfinite(row[name])}
        plain = {name: row[name] for name in Evaluation.__struct_fields__ if name in row}
        workload = row["workload"] if space.workloads else None
        answers[workload].setdefault(row["point"], []).append(Evaluation(**plain, figures=figures_of))
    return answers


def _grid(_path: Path, document: Document) -> Report:
    space = space_from(dict(document["space"]))
    answers = {}
    for index, point in enumerate(document["points"]):
        answers[index] = decode({name: value for name, value in point.items() if name != "choice"}, Evaluation)
    return grid_report(space, answers, shown_figures(None, space))


def _lab(path: Path, document: Document) -> Report:
    if document["status"] != "done":
        return _answer([], f"The run {document['status']}.", is_good=False)
    kernels = [Section("Kernels", [top_kernel_table(document)])] if document.get("top_kernels") else []
    sections = [*overview_sections(document, path), *kernels]
    return _answer(sections, filled(LAYOUT["headline"], document["metrics"]))


def _answer(sections: Sequence[Section], verdict: str, is_good: bool | None = None) -> Report:
    return Report("", sections=sections, verdict=verdict, is_good=is_good)


_REPORTS: Mapping[str, Callable[[Path, Document], Report]] = {
    "train": lambda _, doc: _answer(training.training_sections(doc), training.verdict_of(doc), doc["fits"]),
    "diffusion": lambda _, doc: _answer(batch.batch_sections(doc), batch.verdict_of(doc), doc["fits"]),
    "search": _search,
    "whatif": _grid,
    "validate": lambda _, doc: _answer(validation.validation_sections(doc), validation.verdict_of(doc)),
    "lab": _lab,
    "capacity": lambda _, doc: _answer([capacity.capacity_section(doc)], *capacity.verdict_of(doc)),
    "explain": lambda _, doc: _answer(
        [Section("Operators", [step.time_table(doc["operators"])], is_open=True)], step.headline_of(doc)
    ),
}
