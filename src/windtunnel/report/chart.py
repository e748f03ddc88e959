"""Figures as data: series over two axes, or tracks of bars. `assets/figures.js` draws them with uPlot."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np


@dataclass(frozen=True)
class Axis:
    """One axis of a chart."""

    label: str
    unit: str = ""
    """`s`: seconds, shown in the unit that fits; `share`: fractions, shown in percent; `count`: whole numbers on the
    axis; else the label names it."""
    is_log: bool | None = False
    """None: where the largest value lies far beyond the median."""
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Series:
    """Points of one colour."""

    label: str
    """Name in the legend; empty: not listed."""
    x: Sequence[float]
    y: Sequence[float]
    style: str = "points"
    """`points`, `line`, `marked` (a line with a dot at every point), or `bars` from zero around each x."""
    tooltips: Sequence[str] = ()


@dataclass(frozen=True)
class Limit:
    """A line across a chart: an SLO's limit, or a capacity."""

    axis: str
    """`x` or `y`."""
    value: float
    label: str


@dataclass(frozen=True)
class Bar:
    """An interval of a track."""

    track: int
    """Index of the track, from 0 at the top."""
    begin: float
    end: float
    kind: str
    """Decides the colour; named in the legend."""
    title: str


@dataclass(frozen=True)
class Chart:
    """One figure; values that are not finite, or not positive on a logarithmic axis, are left out."""

    x: Axis
    y: Axis
    series: Sequence[Series] = ()
    limits: Sequence[Limit] = ()
    smoothed_by: str = ""
    """`median` or `mean`: lines are drawn as their running one, with a band from the 10th to the 90th percentile."""
    is_equality: bool = False
    """Whether both axes are the same, with lines where both values are equal and 20% apart."""
    tracks: Sequence[str] = ()
    """Labels of tracks from the top; with these, `bars` are drawn."""
    bars: Sequence[Bar] = field(default=())


def as_json(data: Any) -> str:
    """Return data of a chart as JSON: numbers with six digits, None for what is not finite, no markup characters."""
    text = msgspec.json.encode(_rounded(msgspec.to_builtins(data, enc_hook=lambda array: array.tolist()))).decode()
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    return [_rounded(part) for part in value] if isinstance(value, list | tuple) else value


def lines_across(points: Iterable[tuple[Mapping[str, Any], float]], across: str | None) -> list[Series]:
    """Return values over one setting, or over their order without it: a line for each combination of the others."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for place, (settings, value) in enumerate(points):
        label = ", ".join(f"{name} {setting}" for name, setting in settings.items() if name != across)
        lines.setdefault(label, []).append((float(place if across is None else settings[across]), value))
    ordered = {label: sorted(line) for label, line in lines.items()}
    return [Series(label, [x for x, _ in line], [y for _, y in line], "marked") for label, line in ordered.items()]


def equality_chart(points: Sequence[Series], x: str, y: str) -> Chart:
    """Plot predicted over measured seconds on equal logarithmic axes."""
    return Chart(Axis(x, "s", is_log=True), Axis(y, "s", is_log=True), points, is_equality=True)


def histogram(values: Sequence[float], edges: Sequence[float], x: Axis, y_label: str) -> Chart:
    """Plot how many `values` lie between neighbouring `edges`; the first and last bin count those outside too."""
    known = np.array([value for value in values if math.isfinite(value)])
    counts, _ = np.histogram(np.clip(known, edges[0], edges[-1]), edges)
    centres = (np.array(edges[:-1]) + np.array(edges[1:])) / 2
    return Chart(x, Axis(y_label, "count", low=0.0), [Series(y_label, centres.tolist(), counts.tolist(), "bars")])
