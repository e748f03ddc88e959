"""A server measured at several loads: figures over the load, where it saturates, and the predictions beside them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from windtunnel.metrics.summary import queue_growth
from windtunnel.report.chart import Axis, Chart, Series
from windtunnel.report.comparison import ComparedRun
from windtunnel.report.layout import layouts_beside
from windtunnel.report.numbers import number, quantity
from windtunnel.report.render.json import version
from windtunnel.report.report import Cell, Figures, Report, Section, Table
from windtunnel.search.capacity.probe import MOST_GROWTH

LAYOUT = layouts_beside(__file__)
FIGURES: Mapping[str, str] = LAYOUT["figures"]
SATURATED = 0.95
"""Share of the largest output from which more clients are taken to add nothing."""


@dataclass(frozen=True, eq=False)
class Level:
    """One load, measured, and predicted where the deployment is described."""

    load: float
    measured: ComparedRun
    predicted: ComparedRun | None = None


@dataclass(frozen=True, eq=False)
class Sweep:
    """Loads of one server, ascending."""

    kind: str
    """`rate` in requests/s, or `concurrency`."""
    levels: Sequence[Level]

    @property
    def columns(self) -> tuple[list[float], list[ComparedRun], list[ComparedRun]]:
        """Return the loads, the measured and the predicted runs; the last are none or all."""
        predicted = [level.predicted for level in self.levels if level.predicted is not None]
        return [level.load for level in self.levels], [level.measured for level in self.levels], predicted


def saturation(kind: str, loads: Sequence[float], runs: Sequence[ComparedRun]) -> float | None:
    """Return the largest load that a server keeps up with; None where it keeps up with none, or with all.

    With a rate, the queue grows from the load on at which TTFT, fitted by a line, rises by more than `MOST_GROWTH` of
    the elapsed time, as in `windtunnel capacity`; nor does a server keep up with a load at which requests fail. With
    clients, the load is the first with `SATURATED` of the largest output.
    """
    if kind == "concurrency":
        outputs = [run.entry.figures["output_tokens_per_s"] for run in runs]
        first = next(place for place, output in enumerate(outputs) if output >= SATURATED * max(outputs))
        return loads[first] if first + 1 < len(loads) else None
    late = next((place for place, run in enumerate(runs) if _num_failed(run) or _grows(run)), None)
    return loads[late - 1] if late else None


def _num_failed(run: ComparedRun) -> int:
    return int(run.document.get("summary", {}).get("num_failed") or 0)


def _grows(run: ComparedRun) -> bool:
    assert run.requests is not None, "the records of every level are kept"
    requests = run.requests.where(~run.requests["is_warmup"] & np.isfinite(run.requests["ttft_s"]))
    return queue_growth(requests["arrival_s"], requests["ttft_s"]) > MOST_GROWTH


def sweep_report(sweep: Sweep) -> Report:
    """Return the report of a sweep: where the server saturates, a row a load, and curves over the load."""
    unit, measured = LAYOUT["units"][sweep.kind], sweep.levels[0].measured
    heads = [unit]
    for title in FIGURES.values():
        heads += [title, "predicted"] if sweep.columns[2] else [title]
    failed = [_num_failed(run) for run in sweep.columns[1]]
    rows = [[Cell(number(level.load), level.load), *_row(level)] for level in sweep.levels]
    if any(failed):
        heads.append("failed")
        rows = [[*row, Cell(f"{count:,}", count)] for row, count in zip(rows, failed, strict=True)]
    sections = [
        Section("", [Table(heads, rows, left=0)], "Measured at each load", is_open=True),
        Section("", [Figures([_curve(sweep, name, unit) for name in LAYOUT["drawn"]])], "Over the load"),
    ]
    title = f"{measured.document['model']} at {measured.document['endpoint']}"
    return Report(title, [], sections, verdict=_sentence(sweep))


def sweep_document(sweep: Sweep) -> dict[str, Any]:
    """Document a sweep."""
    loads, measured, predicted = sweep.columns
    return {
        "windtunnel": version(),
        "sweep": sweep.kind,
        "saturation": saturation(sweep.kind, loads, measured),
        "predicted_saturation": saturation(sweep.kind, loads, predicted) if predicted else None,
        "levels": [
            {
                "load": level.load,
                "num_failed": _num_failed(level.measured),
                "measured": dict(level.measured.entry.figures),
                "predicted": None if level.predicted is None else dict(level.predicted.entry.figures),
            }
            for level in sweep.levels
        ],
    }


def _sentence(sweep: Sweep) -> str:
    loads, measured, predicted = sweep.columns
    text = _saturation_text(sweep.kind, loads, measured)
    failed = [level.load for level in sweep.levels if _num_failed(level.measured)]
    if failed and sweep.kind == "concurrency":
        text += f" Requests failed at {', '.join(map(number, failed))}."
    if predicted:
        said = _saturation_text(sweep.kind, loads, predicted)
        text = f"{text} Predicted: {said[:1].lower()}{said[1:]}"
    held = [level.load for level in sweep.levels if level.measured.entry.figures.get("is_slo_held")]
    has_slo = any("is_slo_held" in run.entry.figures for run in measured)
    if has_slo:
        text += f" Holds the SLO up to {number(max(held))}." if held else " Breaks the SLO at every load."
    return text


def _saturation_text(kind: str, loads: Sequence[float], runs: Sequence[ComparedRun]) -> str:
    largest, unit = saturation(kind, loads, runs), LAYOUT["units"][kind]
    why = ["requests fail" if _num_failed(run) else "the queue grows" for run in runs]
    if kind == "concurrency":
        if largest is None:
            return f"Output still rises at {number(loads[-1])} {unit}."
        return f"Saturates at {number(largest)} {unit}: more add less than {1 - SATURATED:.0%} of output."
    if largest is not None:
        beyond = loads.index(largest) + 1
        return f"Keeps up with {number(largest)} {unit}; at {number(loads[beyond])} {why[beyond]}."
    if _num_failed(runs[0]) or _grows(runs[0]):
        return f"{why[0].capitalize()} at {number(loads[0])} {unit} already."
    return f"Keeps up with every load, to {number(loads[-1])} {unit}."


def _row(level: Level) -> Iterator[Cell]:
    for name in FIGURES:
        value = level.measured.entry.figures.get(name)
        yield Cell("" if value is None else quantity(name, value), value)
        if level.predicted is not None:
            other = level.predicted.entry.figures.get(name)
            off = f" ({other / value - 1:+z.1%})" if other is not None and value else ""
            yield Cell("" if other is None else f"{quantity(name, other)}{off}", other)


def _curve(sweep: Sweep, name: str, unit: str) -> tuple[Chart, str]:
    loads, measured, predicted = sweep.columns
    series = [
        Series(label, loads, [run.entry.figures.get(name, np.nan) for run in runs], "marked")
        for label, runs in (("measured", measured), ("predicted", predicted))
        if runs
    ]
    y = Axis(FIGURES[name], LAYOUT["drawn"][name], low=0.0)
    return Chart(Axis(unit, low=0.0), y, series), f"{FIGURES[name]} over the load"
