"""Figures as SVG text: points, lines and bars, with nothing to load, so that a page stays one file.

Text and axes take the page's colour (`currentColor`), so a figure reads on light and dark pages. Points carry their
label as a tooltip; the page's script shows the values of lines (`page.js`). What is computed here, in pixels, is
written as SVG by `templates/plots.svg`.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress, count, cycle, pairwise
from typing import Any, Self

import numpy as np

from windtunnel.report.render.templates import template

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#7f7f7f")
"""Okabe and Ito's palette, which colour-blind readers tell apart, without its black and yellow."""

WIDTH, HEIGHT = 560, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 14, 46
_LEGEND_LINE = 16


@dataclass(frozen=True)
class Axis:
    """One axis: its label with the unit, and its range where it is not the data's."""

    label: str
    is_log: bool = False
    low: float | None = None
    high: float | None = None
    is_count: bool = False
    """Whether only whole numbers are marked."""


@dataclass(frozen=True)
class Series:
    """Points of one colour."""

    label: str
    """Name in the legend; empty: not listed."""
    x: Sequence[float]
    y: Sequence[float]
    style: str = "points"
    """`points`, `line`, `bars` (from zero, as wide as the distance to the next), or `dashes`."""
    tooltips: Sequence[str] = field(default=())
    colour: str | None = None


def figure(series: Sequence[Series], x: Axis, y: Axis, width: int = WIDTH, height: int = HEIGHT) -> str:
    """Draw series over two axes, as SVG.

    Args:
        series: what to draw, in order; points that are not finite (or not positive on a logarithmic axis) are left out.
        x, y: the axes.
        width, height: in pixels of the page; the figure shrinks with its column.
    """
    kept = _coloured([_drawable(line, x, y) for line in series])
    legend = _legend([(line.label, str(line.colour)) for line in kept if line.label], width)
    top, bottom = _TOP + _LEGEND_LINE * len(legend), height - _BOTTOM
    across = _Scale.over(x, [value for line in kept for value in line.x], _LEFT, width - _RIGHT)
    up = _Scale.over(y, [value for line in kept for value in line.y], bottom, top)
    marks = [(line, [(across(a), up(b)) for a, b in zip(line.x, line.y, strict=True)]) for line in kept]
    return _drawn(
        "figure", width, height, across=across, up=up, x=x, y=y, legend=legend, top=top, marks=marks, pairwise=pairwise
    )


def _drawn(kind: str, width: int, height: int, **values: Any) -> str:
    """Return a drawing of this size from its macro in `templates/plots.svg`."""
    edges = {"left": _LEFT, "right": width - _RIGHT, "bottom": height - _BOTTOM}
    return str(template("plots.svg").render(edges | values, kind=kind, width=width, height=height))


def marked_lines(points: Iterable[tuple[str, float, float]], has_tooltips: bool = False) -> list[Series]:
    """Return one line per label through its points, each (label, x, y), with a marker at every point."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for label, x, y in points:
        lines.setdefault(label, []).append((x, y))
    series = []
    for (label, line), colour in zip(lines.items(), cycle(COLOURS)):
        across, up = zip(*sorted(line), strict=True)
        tooltips = [f"{value:.4g}" for value in up] if has_tooltips else ()
        series.append(Series(label, across, up, "line", colour=colour))
        series.append(Series("", across, up, tooltips=tooltips, colour=colour))
    return series


def equality_figure(points: Sequence[Series], x: str, y: str, **size: int) -> str:
    """Draw predicted over measured values, with lines at equality and at errors of 20%, on logarithmic axes."""
    values = [value for series in points for value in (*series.x, *series.y) if 0 < value < math.inf]
    ends = [min(values, default=1.0), max(values, default=10.0)]
    guides = [
        Series("", ends, [end * scale for end in ends], "line" if scale == 1 else "dashes", colour="currentColor")
        for scale in (1.0, 1.2, 1 / 1.2)
    ]
    return figure([*guides, *points], Axis(x, is_log=True), Axis(y, is_log=True), **size)


def histogram(
    label: str, values: Sequence[float], edges: Sequence[float], x: Axis, y_label: str = "count", **size: int
) -> str:
    """Draw how many `values` lie between neighbouring `edges`; the first and last bin count those outside too."""
    known = [min(max(value, edges[0]), edges[-1]) for value in values if math.isfinite(value)]
    counts, _ = np.histogram(known, edges)
    bars = Series(label, list(edges), [*counts.astype(float).tolist(), 0.0], "bars")
    return figure([bars], x, Axis(y_label, low=0.0, is_count=True), **size)


@dataclass(frozen=True)
class _Scale:
    """The map from data to pixels along one axis."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool
    is_count: bool = False

    @classmethod
    def over(cls, axis: Axis, values: list[float], start: float, end: float) -> Self:
        low = min(values, default=0.0) if axis.low is None else axis.low
        high = max(values, default=1.0) if axis.high is None else axis.high
        if axis.is_log:
            low, high = (low, high) if low > 0 else (1.0, 10.0)
            low, high = (low / 1.1 if axis.low is None else low), (high * 1.1 if axis.high is None else high)
        elif high > low:
            margin = 0.03 * (high - low)
            # What is never negative is not drawn as if it could be.
            lower = max(low - margin, 0.0) if low >= 0 else low - margin
            low, high = (lower if axis.low is None else low), (high + margin if axis.high is None else high)
        if high <= low:
            high = low * 2 if axis.is_log else low + 1.0
        return cls(low, high, start, end, axis.is_log, axis.is_count)

    def __call__(self, value: float) -> float:
        if self.is_log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + min(max(share, -0.05), 1.05) * (self.end - self.start)

    def __str__(self) -> str:
        """Return the scale as page.js reads it."""
        kind = "log" if self.is_log else "lin"
        return f"{self.low:.6g} {self.high:.6g} {self.start:.1f} {self.end:.1f} {kind}"

    def labelled(self) -> list[tuple[float, str]]:
        """Return (pixel, label) of about five round values, with as many digits as it takes to tell them apart."""
        ticks = self.ticks()
        labels = [[tick(value, digits) for value in ticks] for digits in range(4, 17)]
        apart = next((texts for texts in labels if len(set(texts)) == len(texts)), labels[-1])
        return [(self(value), text) for value, text in zip(ticks, apart, strict=True)]

    def ticks(self) -> list[float]:
        """Return about five round values within the range."""
        if self.is_log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            steps = (1, 2, 5) if self.high / self.low < 1e3 else (1,)
            values = [step * 10.0**decade for decade in decades for step in steps]
            return [value for value in values if self.low <= value <= self.high]
        raw = (self.high - self.low) / 5
        size = 10.0 ** math.floor(math.log10(raw))
        step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= raw)
        step = max(step, 1.0) if self.is_count else step
        first = math.ceil(self.low / step)
        return [index * step for index in range(first, math.floor(self.high / step + 1e-9) + 1)]


def _drawable(series: Series, x: Axis, y: Axis) -> Series:
    keep = [
        math.isfinite(a) and math.isfinite(b) and (a > 0 or not x.is_log) and (b > 0 or not y.is_log)
        for a, b in zip(series.x, series.y, strict=True)
    ]
    x_kept, y_kept = list(compress(series.x, keep)), list(compress(series.y, keep))
    return replace(series, x=x_kept, y=y_kept, tooltips=list(compress(series.tooltips, keep)))


def _coloured(series: Sequence[Series]) -> list[Series]:
    """Give series without a colour the palette's in turn."""
    turns = count()
    return [line if line.colour else replace(line, colour=COLOURS[next(turns) % len(COLOURS)]) for line in series]


def _legend(named: Iterable[tuple[str, str]], width: int) -> list[list[tuple[float, str, str]]]:
    """Return rows of (pixels from the left, colour, label), wrapped at the width, of (label, colour) pairs."""
    rows: list[list[tuple[float, str, str]]] = []
    left = float(width)
    for label, colour in named:
        needed = 26 + 6.2 * len(label)
        if left + needed > width - _RIGHT:
            rows.append([])
            left = float(_LEFT)
        rows[-1].append((left, colour, label))
        left += needed
    return rows


def tick(value: float, digits: int = 4) -> str:
    """Return a tick's label: `0.5`, `20`, `5k`, `2M`."""
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.{digits}g}{suffix}"
    return f"{value:.{digits}g}"


def bar_chart(
    labels: Sequence[str], values: Sequence[float], axis: Axis, colours: Sequence[str] = (), width: int = WIDTH
) -> str:
    """Draw horizontal bars from zero, the first on top, each with its label before it and its value behind."""
    left, right, height = round(0.42 * width), width - 60, 20 * len(labels) + _BOTTOM
    across = _Scale.over(Axis(axis.label, low=0.0), list(values), left, right)
    shown = [
        tick(float(f"{value:.3g}")) if value >= 1e-4 or value == 0 else f"{value:.7f}".rstrip("0").rstrip(".")
        for value in values
    ]
    wide = [max(across(value) - left, 0.5) for value in values]
    names = [(shortened(label), f"{label}: {value:.4g}") for label, value in zip(labels, values, strict=True)]
    bars = list(zip(names, wide, shown, colours or COLOURS[:1] * len(labels), strict=True))
    return _drawn("bars", width, height, across=across, x=axis, bars=bars, left=left, right=right, top=4)


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
    """Tooltip."""


def tracks(labels: Sequence[str], bars: Sequence[Bar], axis: Axis, width: int = 1100, kinds: Sequence[str] = ()) -> str:
    """Draw tracks over a common time axis, with a bar for each interval.

    Args:
        labels: of the tracks.
        bars: of any order; those of one track should not overlap.
        axis: of time, from the first begin or `axis.low`.
        width: in pixels of the page.
        kinds: in the order of their colours, the same in several drawings; empty: as the bars come.
    """
    line = max(6, min(22, 640 // max(len(labels), 1)))
    colours = dict(zip(dict.fromkeys([*kinds, *(bar.kind for bar in bars)]), COLOURS, strict=False))
    legend = _legend(colours.items(), width)
    left, top = 90, _TOP + _LEGEND_LINE * len(legend)
    across = _Scale.over(axis, [moment for bar in bars for moment in (bar.begin, bar.end)], left, width - _RIGHT)
    # Labels that would overlap are left out.
    named = [(place, label) for place, label in enumerate(labels) if place % max(1, -(-12 // line)) == 0]
    values: dict[str, Any] = {"labels": named, "bars": bars, "colours": colours, "line": line, "left": left, "top": top}
    height = top + line * len(labels) + _BOTTOM
    return _drawn("tracks", width, height, **values, across=across, x=axis, legend=legend)


def shortened(label: str) -> str:
    """Return a label of 36 characters at most: the middle of a longer one is left out."""
    return label if len(label) <= 36 else f"{label[:22]}…{label[-13:]}"
