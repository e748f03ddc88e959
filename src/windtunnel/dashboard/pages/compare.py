"""Serving runs side by side: their figures, distributions, and the differences of their scenarios."""

from collections.abc import Mapping, Sequence
from typing import Any

from windtunnel.dashboard.results import ResultEntry, records
from windtunnel.dashboard.view import Dashboard, Query, View, link
from windtunnel.errors import InputError
from windtunnel.report.layout import Column, layouts_beside, table_of
from windtunnel.report.numbers import quantity, span_text
from windtunnel.report.report import Cell, Figures, Report, Section, Table
from windtunnel.report.serving.curves import distributions
from windtunnel.schema import differences

Runs = Sequence[tuple[ResultEntry, Mapping[str, Any]]]
MOST_RUNS = 8
"""One run per colour."""
LAYOUT = layouts_beside(__file__)
FIGURES: Mapping[str, str] = LAYOUT["figures"]


def page(dashboard: Dashboard, _rest: str, query: Query) -> View:
    """Compare the runs of the fields `run` with the first of them; with fewer than two, offer all to choose from."""
    names = query.getlist("run")
    known = [entry.name for entry in dashboard.results.entries() if entry.kind in ("simulate", "bench")]
    runs = _runs(dashboard, names) if len(names) >= 2 else []
    sections = _sections(dashboard, runs) if runs else []
    text = " ".join(_against(runs[0][0], entry) for entry, _ in runs[1:])
    report = Report("Compare", sections=sections, headline=text)
    return View(report, template="compare.html", values={"known": known, "chosen": names})


def _against(base: ResultEntry, entry: ResultEntry) -> str:
    """Return a sentence on the differences of a run from the first."""
    texts = {FIGURES[name]: difference(name, entry, base)[0] for name in LAYOUT["headline"]}
    known = ", ".join(f"{title} {text}" for title, text in texts.items() if text)
    return f"{entry.name or '.'} against {base.name or '.'}: {known or 'the same'}."


def difference(name: str, entry: ResultEntry, base: ResultEntry) -> tuple[str, str]:
    """Return the difference of a figure from the first run's in words, and `better`, `worse` or neither."""
    first, value = base.figures.get(name), entry.figures.get(name)
    if not first or value is None or value == first or entry is base:
        return "", ""
    sign = -1 if name in LAYOUT["less"] else 1 if name in LAYOUT["more"] else 0
    tone = "" if not sign else "better" if sign * (value - first) > 0 else "worse"
    ratio = value / first
    return f"{f'×{ratio:.3g}' if ratio >= 2 else f'{ratio - 1:+.1%}'} {tone}".rstrip(), tone


def _sections(dashboard: Dashboard, runs: Runs) -> list[Section]:
    differing, paths = _differences(runs), {entry.name: dashboard.results.path(entry.name) for entry, _ in runs}
    requests = {name or ".": records(path / "requests.parquet") for name, path in paths.items() if path.is_dir()}
    heads = ("", *(entry.name or "." for entry, _ in runs))
    rows = [[path, *map(_value_text, values)] for path, values in differing.items()]
    return [
        Section("Distributions", [Figures(distributions(requests))]),
        Section("Figures", [figures_table(runs)], is_open=True),
        Section("Runs", [_runs_table(runs)]),
        Section("Differences of the scenarios", [Table(heads, rows) if rows else "There are none."]),
    ]


def document(dashboard: Dashboard, _rest: str, query: Query) -> dict[str, Any]:
    """Document the comparison: each figure of every run, and every path in which scenarios differ."""
    runs = _runs(dashboard, query.getlist("run"))
    return {
        "runs": [entry.name for entry, _ in runs],
        "kinds": [entry.kind for entry, _ in runs],
        "figures": {name: [entry.figures.get(name) for entry, _ in runs] for name in FIGURES},
        "intervals": {name: [entry.intervals.get(name) for entry, _ in runs] for name in FIGURES},
        "differences": _differences(runs),
    }


def _runs(dashboard: Dashboard, names: Sequence[str]) -> Runs:
    if not 2 <= len(names) <= MOST_RUNS:
        raise InputError(f"{len(names)} runs are given; 2 to {MOST_RUNS} can be compared")
    runs = [dashboard.results.read(name) for name in names]
    for entry, _ in runs:
        if entry.kind not in ("simulate", "bench"):
            raise InputError(f"{entry.name} is of {entry.kind}; serving runs can be compared")
    return runs


def _runs_table(runs: Runs) -> Table:
    columns: Mapping[str, Column] = {
        "run": lambda entry: Cell(entry.name or ".", href=link("run", entry.name)),
        "origin": lambda entry: "measured" if entry.kind == "bench" else "simulated",
        "model": "model",
        "deployment": "deployment",
        "load": "load",
        "calibration": lambda entry: entry.calibration or ("none" if entry.kind == "simulate" else ""),
    }
    return table_of((entry for entry, _ in runs), columns, left=len(columns))


def figures_table(runs: Runs) -> Table:
    """Return a table with a line per figure: the first run's, then each other's with its difference.

    Beside a measured run, a simulated figure says whether the measured one lies in its 80% interval.
    """
    base = runs[0][0]
    rows: list[list[str | Cell]] = []
    for name, title in FIGURES.items():
        if any(name in entry.figures for entry, _ in runs):
            rows.append([title, *(_figure(name, entry, base) for entry, _ in runs)])
    heads = ("", *(entry.name or "." for entry, _ in runs))
    note = f"Percentages are differences from {base.name or 'the first'}; intervals hold 80% of measurements."
    return Table(heads, rows, notes=[note])


def _figure(name: str, entry: ResultEntry, base: ResultEntry) -> Cell:
    value, first = entry.figures.get(name), base.figures.get(name)
    if value is None:
        return Cell("")
    text, tone = difference(name, entry, base)
    notes = [text] if text else []
    if name in entry.intervals:
        low, high = entry.intervals[name]
        notes.append(span_text(quantity(name, low), quantity(name, high)))
        if base.kind == "bench" and entry is not base and first is not None:
            notes.append("measured within" if low <= first <= high else "measured outside")
    return Cell(quantity(name, value), value, note=", ".join(notes), tone=tone)


def _differences(runs: Runs) -> dict[str, list[Any]]:
    """Return the differences of the scenarios; a client knows only the workload, so only that is compared with it."""
    scenarios = [document["scenario"] for _, document in runs]
    if any(entry.kind == "bench" for entry, _ in runs):
        known = ("workload", "slo", "seed")
        scenarios = [{name: scenario[name] for name in known if name in scenario} for scenario in scenarios]
    return differences(scenarios)


def _value_text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)
