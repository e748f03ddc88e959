"""A search as one self-contained page, and as a folder of files."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from windtunnel.files import new_files
from windtunnel.formats.launch.scripts import helm_chart, kubernetes_manifests, launch_script
from windtunnel.formats.megatron.write import megatron_script
from windtunnel.report.documents import as_text
from windtunnel.report.render.html import Cell, Section, cards, page, paragraph, table
from windtunnel.report.render.tables import number
from windtunnel.report.search import study as words
from windtunnel.search.answers import frontier, job_of, scenario_of, worths
from windtunnel.search.capacity.limits import METRICS, limits_from
from windtunnel.search.evaluation.schema import Evaluation
from windtunnel.search.finalists import label_of
from windtunnel.search.scores import is_more_better
from windtunnel.search.space.space import Space, value_text
from windtunnel.search.study import SearchOutcome, Study
from windtunnel.serving.engines.defaults import engine_defaults
from windtunnel.serving.scenario import Scenario, pool_scenario, save
from windtunnel.training.job import TrainingJob
from windtunnel.training.job import save as save_job
from windtunnel.training.setup import resolve as resolve_job
from windtunnel.training.step import TrainingResult
from windtunnel.units import format_count

MOST_DRAWN = 20_000
"""Most points of the interactive figure; of more, the best are drawn."""
DRAWN_FIGURES = (
    "requests_per_usd",
    "output_tokens_per_s_per_user",
    "output_tokens_per_s_per_device",
    "usd_per_million_output_tokens",
    "usd_per_hour",
    "devices",
    "output_token_j",
    "ttft_p50",
    "ttft_p90",
    "ttft_p99",
    "tpot_p50",
    "tpot_p99",
    "itl_p99",
    "e2e_p90",
    "busy_fraction",
    "kv_peak_fraction",
    "step_s",
    "tokens_per_s_per_device",
    "tokens_per_usd",
    "mfu",
    "bubble_fraction",
    "exposed_fraction",
    "memory_fraction",
    "run_s",
    "run_usd",
    "token_j",
)

PLOT = Path(__file__).with_name("plot.js")
"""Script that draws every point of a search."""
SHOWN_FIGURES = (
    "requests_per_usd",
    "devices",
    "usd_per_hour",
    "output_tokens_per_s_per_user",
    "ttft_p90",
    "tpot_p99",
    "output_token_j",
)
"""Columns of the best points' table."""


def search_page(report: words.SearchReport) -> str:
    """Return the page of a search."""
    study = report.study
    space = study.space
    sections = []
    for place, outcome in enumerate(study.outcomes):
        sections += found_sections(study, outcome, _best(report, place, outcome))
    if report.misconfiguration:
        sections.append(Section(words.MISCONFIGURATION, table(*words.misconfiguration_rows(report))))
    return page(f"Search: {space.model}", space_line(space), sections, PLOT.read_text(encoding="utf-8"))


def space_line(space: Space) -> str:
    """Return the number of points, the limits and the objective in a line."""
    points = format_count(space.num_points, "point")
    return f"{points}. Limits: {words.limits_text(space)}. Sought: {words.objective_text(space.objective)}."


def found_sections(study: Study, outcome: SearchOutcome, best: str) -> list[Section]:
    """Return the sections of one workload: `best`, the HTML of its best points, all points, settings, refusals."""
    sections = [Section(_named(outcome, "The best points"), best)]
    if outcome.ranking:
        sections.append(Section(_named(outcome, "Every point that meets the limits"), _plot(study, outcome)))
        sections.append(Section(_named(outcome, "What each setting is worth"), _effects(study, outcome)))
    rows = [(reason, f"{len(points):,}") for reason, points in outcome.refusals.items()]
    if rows:
        sections.append(Section(_named(outcome, "What cannot run"), table(("reason", "points"), rows[:200])))
    return sections


def _named(outcome: SearchOutcome, heading: str) -> str:
    return heading if outcome.workload is None else f"{outcome.workload}: {heading[:1].lower()}{heading[1:]}"


def _best(report: words.SearchReport, place: int, outcome: SearchOutcome) -> str:
    study = report.study
    if not outcome.ranking:
        return paragraph(words.nothing_holds_text(study.space))
    if study.space.is_training:
        return _best_jobs(report, outcome)
    index, result = report.why[place][0]
    best = outcome.mean(index)
    facts = [
        (number(best.load), "requests/s sustained"),
        *((words.figure_text(best, name), words.FIGURE_TITLES[name]) for name in ("requests_per_usd", "usd_per_hour")),
        (words.bound_text(result), "bounds the best point"),
    ]
    remark = words.limit_text(best.limited_by, limits_from(study.space.limits))
    remark = f"Of the first: {remark}. Figures are means over the streams of requests that a point met."
    scenario = scenario_of(study, outcome, index)
    fleets = report.fleets[place] if report.fleets else []
    return "".join(
        [
            cards([fact for fact in facts if fact[0]]),
            f"<pre>{escape(launch_script(scenario, _versions(scenario)))}</pre>",
            paragraph(remark),
            best_table(study, outcome, report.top),
            *map(paragraph, words.sureness_texts(study, outcome)),
            table(*words.why_rows(report.why[place]), left=3),
            table(*words.fleet_rows(report, fleets)) if fleets else "",
        ]
    )


def best_table(study: Study, outcome: SearchOutcome, top: int) -> str:
    """Return the table of the best points with their figures."""
    heads = ("point", "load", *map(words.figure_title, SHOWN_FIGURES), "limited by")
    rows: list[tuple[str | Cell, ...]] = []
    for index in outcome.ranking[:top]:
        mean = outcome.mean(index)
        cells = (figure_cell(mean, name) for name in SHOWN_FIGURES)
        rows.append((study.point(index).title, number(mean.load), *cells, words.limit_name(mean.limited_by)))
    return table(heads, rows)


def figure_cell(evaluation: Evaluation, name: str) -> Cell:
    """Return a figure with its unit, sorted by its value."""
    return Cell(words.figure_text(evaluation, name), evaluation.figures.get(name))


def _best_jobs(report: words.SearchReport, outcome: SearchOutcome) -> str:
    study = report.study
    names = [name for name in words.JOB_FIGURES if name in outcome.evaluations[outcome.ranking[0]].figures]
    rows: list[tuple[str | Cell, ...]] = [
        (study.point(index).title, *(figure_cell(outcome.evaluations[index], name) for name in names))
        for index in outcome.ranking[: report.top]
    ]
    best = outcome.evaluations[outcome.ranking[0]]
    shown = ("step_s", "tokens_per_s_per_device", "mfu", "memory_fraction")
    facts = [(words.figure_text(best, name), words.figure_title(name)) for name in shown]
    why = [
        (str(rank), words.step_text(result))
        for rank, (_, result) in enumerate(report.why[0], start=1)
        if isinstance(result, TrainingResult)
    ]
    points = table(("point", *map(words.figure_title, names)), rows)
    return cards(facts) + points + table(("rank", "a step goes to"), why, left=2)


def _plot(study: Study, outcome: SearchOutcome) -> str:
    """Return a figure of every point that meets the limits; the reader chooses axes, colours and filters."""
    indices = outcome.ranking[:MOST_DRAWN]
    figures = [name for name in DRAWN_FIGURES if any(name in outcome.evaluations[index].figures for index in indices)]
    names = list(study.space.vary) or ["scenario"]
    points = [study.point(index).choice for index in indices]
    means = [outcome.mean(index).figures for index in indices]
    x, y = reversed(words.names_of_frontier(study, outcome))
    data = {
        "figures": [plot_title(name) for name in figures],
        "more": [is_more_better(name) for name in figures],
        "names": [name.rpartition(".")[2] for name in names],
        "choices": [[value_text(choice.get(name, "")) for name in names] for choice in points],
        "values": [[_rounded(mean.get(name)) for name in figures] for mean in means],
        "margins": [[_rounded(outcome.margin(index, name)) for name in figures] for index in indices],
        "x": plot_title(x),
        "y": plot_title(y),
    }
    remark = f"The large dot is the best point; the dashed line is the frontier of the two axes. {_streams(outcome)}"
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return (
        '<div class="search"><p><label>across <select class="across"></select></label> '
        '<label>up <select class="up"></select></label> <label>colour <select class="colour"></select></label></p>'
        '<p class="filters"></p><canvas class="plot"></canvas>'
        '<p class="legend"></p><p class="lead tip">point at a dot</p>'
        f'<script type="application/json" class="points">{text}</script></div>'
        + paragraph(remark.strip())
        + _frontier(study, outcome)
    )


def _streams(outcome: SearchOutcome) -> str:
    """Explain the dots of the figure; empty for a single stream of requests."""
    if outcome.num_streams < 2:
        return ""
    return (
        f"Filled dots are the {words.streams_text(outcome)} of requests, with the 90% confidence interval of the mean; "
        "rings met the first stream alone, and the line leaves them out."
    )


def plot_title(name: str) -> str:
    """Return a figure's name on an axis."""
    is_time = name.partition("_")[0] in METRICS or (name.endswith("_s") and not name.endswith("_per_s"))
    return f"{words.figure_title(name)} [s]" if is_time else words.figure_title(name)


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def _frontier(study: Study, outcome: SearchOutcome) -> str:
    names = words.names_of_frontier(study, outcome)
    heads, rows = words.frontier_rows(study, outcome)
    cells: list[tuple[str | Cell, ...]] = [
        (title, *(Cell(text, outcome.mean(index).figures.get(name)) for text, name in zip(texts, names, strict=True)))
        for index, (title, *texts) in zip(frontier(outcome, names), rows, strict=True)
    ]
    return table(heads, cells)


def _effects(study: Study, outcome: SearchOutcome) -> str:
    """Return the table of the worth of each value of each setting."""
    rows = []
    for name, shares in worths(study.space, outcome).items():
        for value, worth in shares.items():
            text = words.worth_text(worth) if worth.share else "none meets the limits"
            rows.append((name.rpartition(".")[2], value, Cell(text, worth.share, bar=worth.share)))
    lead = paragraph(f"{words.worth_title(study.space, outcome)}.")
    return lead + table(("setting", "value", "worth"), rows, left=2)


def write_study(report: words.SearchReport, folder: Path) -> None:
    """Write a study to `folder`: every point as Parquet, the document, the page, and each workload's winner to run.

    Raises:
        InputError: the folder cannot be written to.
    """
    study = report.study
    with new_files(folder) as draft:
        _write_points(study, draft / "points.parquet")
        (draft / "search.json").write_text(as_text(words.study_document(report)) + "\n", encoding="utf-8")
        (draft / "search.html").write_text(search_page(report), encoding="utf-8")
        for outcome in study.outcomes:
            if outcome.ranking and study.space.is_training:
                _write_job(job_of(study, outcome.ranking[0]), draft)
            elif outcome.ranking:
                _write_winner(scenario_of(study, outcome, outcome.ranking[0]), draft, outcome.workload)


def _write_winner(scenario: Scenario, folder: Path, workload: str | None) -> None:
    prefix = "" if workload is None else f"{workload}-"
    versions = _versions(scenario)
    save(scenario, folder / f"{prefix}scenario.yaml")
    (folder / f"{prefix}launch.sh").write_text(launch_script(scenario, versions), encoding="utf-8")
    (folder / f"{prefix}kubernetes.yaml").write_text(kubernetes_manifests(scenario, versions), encoding="utf-8")
    for path, text in helm_chart(scenario, versions).items():
        file = folder / f"{prefix}chart" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")


def _versions(scenario: Scenario) -> dict[str, str]:
    """Return engine -> simulated version."""
    parts = [pool_scenario(scenario, pool).deployment for pool in scenario.deployment.pools] or [scenario.deployment]
    engines = [part.engine for part in parts]
    return {engine.name: engine.version or engine_defaults(engine.name).default_version for engine in engines}


def _write_job(job: TrainingJob, folder: Path) -> None:
    save_job(job, folder / "job.yaml")
    if job.framework == "megatron":
        (folder / "launch.sh").write_text(megatron_script(resolve_job(job)), encoding="utf-8")


def _write_points(study: Study, path: Path) -> None:
    """Write one row per point and workload: its choice, its answer, its figures."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    answers = [
        (outcome, index, evaluation) for outcome in study.outcomes for index, evaluation in outcome.evaluations.items()
    ]
    columns: dict[str, Any] = {
        "workload": [outcome.workload for outcome, _, _ in answers],
        "point": [index for _, index, _ in answers],
    }
    choices = [study.point(index).choice for _, index, _ in answers]
    for name in study.space.vary:
        columns[f"vary.{name}"] = [label_of(choice[name]) for choice in choices]
    for field in ("holds", "load", "limited_by", "refused", "num_runs", "num_requests"):
        columns[field] = [getattr(evaluation, field) for _, _, evaluation in answers]
    for name in sorted({name for _, _, evaluation in answers for name in evaluation.figures}):
        columns[name] = np.array([evaluation.figures.get(name, np.nan) for _, _, evaluation in answers])
    pq.write_table(pa.table(columns), path)
