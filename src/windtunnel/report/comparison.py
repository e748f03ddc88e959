"""Serving runs side by side: which is faster and why, their figures, distributions, and differences of scenarios."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from os.path import commonpath
from pathlib import Path
from textwrap import fill
from typing import Any

from windtunnel.errors import InputError, listed
from windtunnel.metrics.records import Table as Records
from windtunnel.report.layout import Column, layouts_beside, table_of
from windtunnel.report.numbers import quantity, span_text, times
from windtunnel.report.render.json import version
from windtunnel.report.report import Cell, Figures, OnPage, OnTerminal, Report, Section, Table, Text
from windtunnel.report.results import ResultEntry, document_file, entry_of, read_document, records
from windtunnel.report.serving.curves import distributions
from windtunnel.schema import short_path, with_defaults
from windtunnel.serving.scenario import Scenario, changed_settings, follows
from windtunnel.units import format_seconds

MOST_RUNS = 8
"""One run per colour."""
LEAST_CHANGE = 0.005
"""Relative differences below this are not worth a word."""
MOST_REASONS = 4
LAYOUT = layouts_beside(__file__)
FIGURES: Mapping[str, str] = LAYOUT["figures"]


@dataclass(frozen=True, eq=False)
class ComparedRun:
    """A run with its document, and its requests where they are kept."""

    entry: ResultEntry
    document: Mapping[str, Any]
    requests: Records | None = None

    @property
    def name(self) -> str:
        return self.entry.name or "."


Runs = Sequence[ComparedRun]


def read_run(path: Path) -> ComparedRun:
    """Read a run from its folder or document, with its requests if it has them; InputError where it holds none."""
    file = document_file(path)
    if file is None:
        raise InputError(f"{path} holds no result", "give a folder that simulate or bench wrote with --out")
    document = read_document(file)
    kept = path / "requests.parquet"
    return ComparedRun(entry_of(document, str(path)), document, records(kept) if kept.is_file() else None)


def check_runs(runs: Runs) -> None:
    """Raise InputError unless there are two to `MOST_RUNS` serving runs, with figures that can be."""
    if not 2 <= len(runs) <= MOST_RUNS:
        raise InputError(f"{len(runs)} runs are given; 2 to {MOST_RUNS} can be compared")
    for run in runs:
        if run.entry.kind not in ("simulate", "bench"):
            raise InputError(f"{run.name} is of {run.entry.kind}; serving runs can be compared")
        wrong = next((name for name, value in run.entry.figures.items() if not 0 <= value < math.inf), None)
        if wrong is not None:
            raise InputError(
                f"{run.name}: {FIGURES.get(wrong, wrong)} is {run.entry.figures[wrong]:g}, which cannot be"
            )
        for name, span in run.entry.intervals.items():
            if not all(isinstance(end, int | float) and 0 <= end < math.inf for end in span):
                raise InputError(
                    f"{run.name}: the interval of {name} is {span[0]!r:.40} to {span[1]!r:.40}, which cannot be"
                )
        shares = run.document["summary"].get("time_fractions") or {}
        if not isinstance(shares, dict) or not all(isinstance(share, int | float) for share in shares.values()):
            raise InputError(f"{run.name}: time_fractions is {shares!r:.80}; a table of fractions is needed")


def comparison_report(runs: Runs, address: Callable[[str], str] = lambda _name: "") -> Report:
    """Return the report of a comparison with the first run; `address` links a run's name, where it has a page."""
    runs = _with_short_names(runs)
    differing = scenario_differences(runs)
    requests = {run.name: run.requests for run in runs if run.requests is not None}
    heads = ("", *(run.name for run in runs))
    usual = [with_defaults(run.document["scenario"], Scenario) for run in runs]
    rows = [
        [path, *(_setting_text(path, *each) for each in zip(values, usual, strict=True))]
        for path, values in differing.items()
    ]
    against, are_several = verdicts(runs), len(runs) > 2
    sections = [
        *([Section(f"Against {runs[0].name}", [Text(against)])] if are_several else []),
        Section("Distributions", [Figures(distributions(requests))]),
        Section(
            "Figures",
            [OnTerminal(lambda: [figures_table(runs)]), OnPage(lambda: [figures_table(runs, is_on_page=True)])],
            is_open=True,
        ),
        Section("Runs", [_runs_table(runs, address)]),
        Section("Differences of the scenarios", [Table(heads, rows, left=len(heads)) if rows else "There are none."]),
    ]
    return Report(
        f"Compared with {runs[0].name}", [], sections, verdict=_best_text(runs) if are_several else against[0]
    )


def _with_short_names(runs: Runs) -> Runs:
    """Leave the folders that all have in common out of absolute names."""
    paths = [Path(run.name) for run in runs]
    if not all(path.is_absolute() for path in paths):
        return runs
    root = commonpath([path.parent for path in paths])
    names = [str(path.relative_to(root)) for path in paths]
    return [replace(run, entry=replace(run.entry, name=name)) for run, name in zip(runs, names, strict=True)]


def _best_text(runs: Runs) -> str:
    """Name the best of several runs in each figure of the verdict."""
    won: dict[str, list[str]] = {}
    for name in LAYOUT["verdict"]:
        known = {run.name: value for run in runs if (value := run.entry.figures.get(name)) is not None}
        if len(known) > 1:
            is_less = name in LAYOUT["less"]
            best = (min if is_less else max)(known, key=lambda run: known[run])
            text = f"the {'lowest' if is_less else 'highest'} {FIGURES[name]} ({quantity(name, known[best])})"
            won.setdefault(best, []).append(text)
    broken = [run.name for run in runs if run.entry.figures.get("is_slo_held") == 0]
    slo = f" {listed(broken)} {'breaks' if len(broken) == 1 else 'break'} the SLO." if broken else ""
    return "; ".join(f"{run} has {listed(texts)}" for run, texts in won.items()) + f".{slo}"


def comparison_document(runs: Runs) -> dict[str, Any]:
    """Document the comparison: each figure of every run, and every path in which scenarios differ."""
    return {
        "windtunnel": version(),
        "runs": [run.entry.name for run in runs],
        "kinds": [run.entry.kind for run in runs],
        "verdicts": verdicts(runs),
        "figures": {name: [run.entry.figures.get(name) for run in runs] for name in FIGURES},
        "intervals": {name: [run.entry.intervals.get(name) for run in runs] for name in FIGURES},
        "differences": scenario_differences(runs),
    }


def verdicts(runs: Runs) -> list[str]:
    """Return a sentence on each run against the first: what is better or worse, and why."""
    return [_verdict(runs[0], run) for run in runs[1:]]


def _verdict(base: ComparedRun, run: ComparedRun) -> str:
    changes = [_change(name, words, base, run) for name, words in LAYOUT["verdict"].items()]
    said = [change for change in changes if change]
    if not said:
        return f"{run.name} performs as {base.name} does."
    before, held = (each.entry.figures.get("is_slo_held") for each in (base, run))
    slo = (
        "" if held in (None, before) or (held and before is None) else f", and {'holds' if held else 'breaks'} the SLO"
    )
    text = f"{run.name} has {listed(said)}{'; both break the SLO' if held == before == 0 else slo}."
    reasons, usual = [], [with_defaults(each.document["scenario"], Scenario) for each in (base, run)]
    for path, values in _causes(base, run):
        section = f"{path.rpartition('.')[0]}."
        old, new = (
            _setting_text(path, *each) or ("the default" if any(key.startswith(section) for key in each[1]) else "none")
            for each in zip(values, usual, strict=True)
        )
        reasons.append(f"{LAYOUT['setting_names'].get(path, short_path(path))} is {new} in place of {old}")
    if len(reasons) > MOST_REASONS:
        reasons = [*reasons[: MOST_REASONS - 1], f"{len(reasons) - MOST_REASONS + 1} more settings differ"]
    because = re.sub("^ the ", " The ", f" {listed(reasons)}.") if reasons else ""
    parts = _parts_text(base, run)
    return f"{text}{_doubt(base, run)}{because}{f' {parts[0].upper()}{parts[1:]}.' if parts else ''}"


def _doubt(base: ComparedRun, run: ComparedRun) -> str:
    """Name the differences that are too close to call: those of two engines or devices, whose errors do not cancel."""
    if not scenario_differences([base, run]).keys() & set(LAYOUT["own_errors"]):
        return ""
    sides, close = (base.entry, run.entry), []
    for name, words in LAYOUT["verdict"].items():
        spans = [side.intervals[name] for side in sides if name in side.intervals]
        within = [low <= side.figures.get(name, math.nan) <= high for side in sides for low, high in spans]
        if len(spans) == len(sides) and all(within) and _change(name, words, base, run):
            close.append(FIGURES[name])
    return f" Too close to call: {listed(close)}, each within the 80% interval of the other." if close else ""


def _change(name: str, words: Sequence[str], base: ComparedRun, run: ComparedRun) -> str:
    """Return how a figure differs, in words; empty where it is unknown or about the same."""
    first, value = base.entry.figures.get(name), run.entry.figures.get(name)
    if not first or not value or abs(value / first - 1) < LEAST_CHANGE:
        return ""
    ratio = value / first
    less, more, factor = words
    return factor.format(times(ratio)) if ratio >= 2 else (less if ratio < 1 else more).format(f"{abs(ratio - 1):.1%}")


def _causes(base: ComparedRun, run: ComparedRun) -> list[tuple[str, list[Any]]]:
    """Return the settings that differ, the weightiest first; those that follow from others only where no other does."""
    differing = scenario_differences([base, run])
    causes = {path: values for path, values in differing.items() if not follows(path, values)}
    weighty = {path: causes[path] for path in LAYOUT["setting_names"] if path in causes}
    return list((weighty | causes or differing).items())


def _parts_text(base: ComparedRun, run: ComparedRun) -> str:
    """Say which part of a token's time changed most: TPOT, dealt out by what bounds the busy time of both runs."""
    by_run = []
    for each in (base, run):
        shares = each.document["summary"].get("time_fractions")
        if not shares or "tpot_s" not in each.entry.figures:
            return ""
        by_run.append({name: share * each.entry.figures["tpot_s"] for name, share in shares.items()})
    before, after = by_run
    part = max({**before, **after}, key=lambda name: abs(after.get(name, 0.0) - before.get(name, 0.0)))
    old, new = (format_seconds(time.get(part, 0.0)) for time in by_run)
    return f"{part.replace('_', ' ')} takes {new} of a token's time in place of {old}" if old != new else ""


def difference(name: str, run: ComparedRun, base: ComparedRun) -> tuple[str, str]:
    """Return the difference of a figure from the first run's in words, and `better`, `worse` or neither."""
    first, value = base.entry.figures.get(name), run.entry.figures.get(name)
    if not first or value is None or value == first or run is base:
        return "", ""
    sign = -1 if name in LAYOUT["less"] else 1 if name in LAYOUT["more"] else 0
    tone = "" if not sign else "better" if sign * (value - first) > 0 else "worse"
    ratio = value / first
    return f"{f'×{times(ratio)}' if ratio >= 2 else f'{ratio - 1:+z.1%}'} {tone}".rstrip(), tone


def _runs_table(runs: Runs, address: Callable[[str], str]) -> Table:
    columns: Mapping[str, Column] = {
        "run": lambda entry: Cell(entry.name or ".", href=address(entry.name)),
        "origin": lambda entry: "measured" if entry.kind == "bench" else "simulated",
        "model": "model",
        "deployment": "deployment",
        "load": "load",
        "calibration": lambda entry: entry.calibration or ("none" if entry.kind == "simulate" else ""),
    }
    table = table_of((run.entry for run in runs), columns, left=len(columns))
    kept = [index for index, texts in enumerate(zip(*table.rows, strict=True)) if not index or len(set(texts)) > 1]
    first = dict(enumerate(zip(table.headers, table.rows[0], strict=True)))
    same = [f"{head} {text}" for index, (head, text) in first.items() if text and index not in kept]
    notes = [f"The same for all: {', '.join(same)}."] if same else []
    heads, *rows = ([row[index] for index in kept] for row in (table.headers, *table.rows))
    return Table(list(map(str, heads)), rows, left=len(kept), notes=notes)


def figures_table(runs: Runs, is_on_page: bool = False) -> Table:
    """Return a table with a line per figure: the first run's, then each other's with its difference.

    Beside a measured run, a simulated figure says whether the measured one lies in its 80% interval; on a terminal,
    this and the differences have columns of their own.
    """
    base, heads = runs[0], ["", *(run.name for run in runs)]
    names = [name for name in FIGURES if any(name in run.entry.figures for run in runs)]
    rows: list[list[str | Cell]] = []
    if is_on_page:
        rows += [[FIGURES[name], *(_figure(name, run, base) for run in runs)] for name in names]
        note = f"Percentages are differences from {base.name}; intervals hold 80% of measurements."
        return Table(heads, rows, notes=[note])
    last, short = ["80% interval"] * (base.entry.kind == "bench"), {run.name: fill(run.name, 16) for run in runs}
    others = [(run, ["", "difference", *(last if run.entry.intervals else ())]) for run in runs[1:]]
    for name in names:
        rows.append([FIGURES[name], _figure(name, base, base)])
        for run, columns in others:
            parts = _figure(name, run, base), difference(name, run, base)[0], _interval_text(name, run, base)
            rows[-1] += parts[: len(columns)]
    heads = ["", short[base.name], *(head or short[run.name] for run, columns in others for head in columns)]
    return Table(heads, rows)


def _interval_text(name: str, run: ComparedRun, base: ComparedRun) -> str:
    """Return a predicted figure's interval, and whether it holds the measured one; empty where there is none."""
    if name not in run.entry.intervals:
        return ""
    (low, high), first = run.entry.intervals[name], base.entry.figures.get(name)
    told = span_text(quantity(name, low), quantity(name, high))
    is_judged = base.entry.kind == "bench" and run is not base and first is not None
    return f"{told}, measured {'within' if low <= first <= high else 'outside'}" if is_judged else told


def _figure(name: str, run: ComparedRun, base: ComparedRun) -> Cell:
    value = run.entry.figures.get(name)
    if value is None:
        return Cell("")
    text, tone = difference(name, run, base)
    note = ", ".join(filter(None, (text, _interval_text(name, run, base))))
    return Cell(quantity(name, value), value, note=note, tone=tone)


def scenario_differences(runs: Runs) -> dict[str, list[Any]]:
    """Return the differences of the scenarios; a client knows only the workload, so only that is compared with it.

    Of the sampling it knows what it has sent; the server fills the rest.
    """
    scenarios = [run.document["scenario"] for run in runs]
    clients = [at for at, run in enumerate(runs) if run.entry.kind == "bench"]
    if clients:
        known = ("workload", "slo", "seed")
        scenarios = [{name: scenario[name] for name in known if name in scenario} for scenario in scenarios]
    # A table that one leaves empty says nothing: its keys are named where the other has some.
    return {
        path: values
        for path, values in changed_settings(scenarios).items()
        if any(each or each == 0 for each in values)
        and not (path.startswith("workload.sampling") and any(values[at] is None for at in clients))
    }


def _setting_text(path: str, value: Any, usual: Mapping[str, Any]) -> str:
    """Return a setting for a table; one that is not given as its default among `usual`, and empty where it has none."""
    known = usual.get(path) if value is None else None
    return value_text(path, value) if known is None else f"{value_text(path, known)} (the default)"


def value_text(path: str, value: Any) -> str:
    """Return a setting for a table, with the unit of its path; empty where it is missing."""
    name = path.rpartition(".")[2]
    if name == "max_cudagraph_capture_size" and value == 0:
        return "0 (none: --enforce-eager of vLLM, --disable-cuda-graph of SGLang)"
    if isinstance(value, bool | None):
        return "" if value is None else str(value).lower()
    if isinstance(value, int | float) and name.endswith(("_bytes", "_s")) and not name.endswith("_per_s"):
        return quantity(name, float(value))
    return f"{value:g}" if isinstance(value, float) else str(value)
