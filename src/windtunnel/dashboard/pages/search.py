"""Searches, running or finished, read from the stores of their answers."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from windtunnel.dashboard.pages.document import TOP
from windtunnel.dashboard.results import NotThereError
from windtunnel.dashboard.view import Dashboard, Query, View, link
from windtunnel.errors import InputError
from windtunnel.report.report import Block, Cell, Report, Section, Table
from windtunnel.report.search.figures import objective_text
from windtunnel.report.search.study import SearchEvidence, search_report
from windtunnel.report.search.study_files import point_document
from windtunnel.schema import short_path
from windtunnel.search.space.space import STRATEGIES, as_builtins
from windtunnel.search.store import default_path
from windtunnel.search.study import Kept, SearchOutcome, Study, Watched, kept_searches
from windtunnel.units import format_count

SHORT = 12
"""Digits of a search's digest in an address."""
RUNNING_S = 30.0
"""A store that was written in the last so many seconds belongs to a running search."""


def page(dashboard: Dashboard, _rest: str, query: Query) -> View:
    """Show all searches of all stores, or the one that the fields `store` and `search` name."""
    if "search" in query:
        kept, path = _kept(dashboard, query)
        study = _watched(dashboard, kept).study(path)
        state = _state(kept, path.stat().st_mtime)
        title = f"Search {kept.number}: {study.space.model}"
        progress = [progress_of(study, outcome, state) for outcome in study.outcomes]
        report = replace(search_report(SearchEvidence(study, TOP)), title=title)
        return View(report, template="search.html", values={"progress": progress, "stop": ""}, is_live=True)
    rows, problems = [], []
    for name, path in _stores(dashboard).items():
        try:
            rows += [_row(name, path, search) for search in kept_searches(path)]
        except InputError as error:
            problems.append((name or str(path), error.message))
    heads = ("search", "store", "model", "varied", "objective", "points", "state", "store written")
    table: Block = Table(heads, rows, left=5) if rows else "No store has a search: windtunnel search space.yaml."
    sections = [Section("Searches", [table])]
    if problems:
        sections.append(Section("Cannot be read", [Table(("file", "reason"), problems, left=2)]))
    return View(Report("Search", sections=sections), is_live=True)


def document(dashboard: Dashboard, _rest: str, query: Query) -> Any:
    """Document the list of searches, or one search with its answers so far."""
    if "search" not in query:
        outcome = {}
        for name, path in _stores(dashboard).items():
            try:
                outcome[name] = [{"search": search.name, "is_done": search.is_done} for search in kept_searches(path)]
            except InputError as error:
                outcome[name] = [{"error": error.message}]
        return {"stores": outcome}
    kept, path = _kept(dashboard, query)
    study = _watched(dashboard, kept).study(path)
    return {
        "space": as_builtins(study.space),
        "is_done": kept.is_done,
        "num_points": study.space.num_points,
        "workloads": [
            {
                "workload": outcome.workload,
                "num_answered": len(outcome.evaluations),
                "ranking": outcome.ranking[:TOP],
                "points": [point_document(study, outcome, index) for index in outcome.ranking[:TOP]],
                "refusals": {reason: len(points) for reason, points in outcome.refusals.items()},
            }
            for outcome in study.outcomes
        ],
    }


def _stores(dashboard: Dashboard) -> dict[str, Path]:
    """Name -> file of every store: the user's own, whose name is empty, and those below the folder."""
    user_store = {"": default_path()} if default_path().is_file() else {}
    return user_store | {name: dashboard.results.path(name) for name in dashboard.results.stores()}


def _row(name: str, path: Path, search: Kept) -> list[str | Cell]:
    space = search.space
    changed_s = path.stat().st_mtime
    return [
        Cell(f"{search.number}", float(search.number), href=link("search", store=name, search=search.name[:SHORT])),
        name or "the user's own",
        space.model,
        ", ".join(short_path(setting) for setting in space.vary),
        objective_text(space.objective),
        Cell(f"{space.num_points:,}", float(space.num_points)),
        _state(search, changed_s),
        Cell(time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(changed_s)), changed_s),
    ]


def _state(search: Kept, changed_s: float) -> str:
    return "done" if search.is_done else "running" if time.time() - changed_s < RUNNING_S else "interrupted"


def _kept(dashboard: Dashboard, query: Query) -> tuple[Kept, Path]:
    name, digest = query.get("store", ""), query.get("search", "")
    stores = _stores(dashboard)
    if name not in stores:
        raise NotThereError(f"there is no store {name!r}")
    matching = [search for search in kept_searches(stores[name]) if search.name.startswith(digest)]
    if len(matching) != 1:
        raise NotThereError(f"the store has no search {digest!r}")
    return matching[0], stores[name]


def _watched(dashboard: Dashboard, kept: Kept) -> Watched:
    with dashboard.running:
        if kept.name not in dashboard.watched:
            dashboard.watched[kept.name] = Watched(kept.space)
        return dashboard.watched[kept.name]


def progress_of(study: Study, outcome: SearchOutcome, state: str) -> tuple[str | None, int, int, str]:
    """Return the workload, its answered points of how many, and both in words."""
    answered, num_points = len(outcome.evaluations), study.space.num_points
    text = f"{state}: {answered:,} of {format_count(num_points, 'point')}"
    if not STRATEGIES.get(study.space.strategy).IS_EXHAUSTIVE:
        text += "; the strategy need not evaluate all"
    elif state == "done" and answered < num_points:
        text += "; the others were kept by another version of windtunnel, whose answers this one does not take over"
    return outcome.workload, answered, num_points, text
