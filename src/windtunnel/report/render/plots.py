"""Figures as SVG text: points, lines and bars, with nothing to load, so that a page stays one file.

Text and axes take the page's colour (`currentColor`), so a figure reads on light and dark pages. Points carry their
label as a tooltip; the page's script tells the values of lines (`page.js`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from itertools import count, cycle, pairwise

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#7f7f7f")
"""Okabe and Ito's palette, which colour-blind readers tell apart, without its black and yellow."""

WIDTH, HEIGHT = 560, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 14, 46
_LEGEND_LINE = 16
_FONT = 'font-family="system-ui, sans-serif" font-size="11"'
_MIDDLE = 'text-anchor="middle" fill="currentColor"'


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
    named = [line for line in kept if line.label]
    rows = _legend_rows(named, width)
    top = _TOP + _LEGEND_LINE * len(rows)
    across = _Scale.over(x, [value for line in kept for value in line.x], _LEFT, width - _RIGHT)
    up = _Scale.over(y, [value for line in kept for value in line.y], height - _BOTTOM, top)
    # What page.js tells values by.
    scales = f' data-label="{escape(x.label)}" data-across="{across}" data-up="{up}"'
    marks = (mark for line in kept for mark in _marks(line, str(line.colour), across, up))
    return _svg(width, height, [*_legend(rows), *_grid(across, up, x, y, width, height, top), *marks], scales)


def marked_lines(lines: Mapping[str, Sequence[tuple[float, float]]], has_tooltips: bool = False) -> list[Series]:
    """Return one line per label through its (x, y) points, with a marker at every point."""
    series = []
    for (label, points), colour in zip(lines.items(), cycle(COLOURS)):
        x, y = zip(*sorted(points), strict=True)
        tooltips = [f"{value:.4g}" for value in y] if has_tooltips else ()
        series.append(Series(label, x, y, "line", colour=colour))
        series.append(Series("", x, y, tooltips=tooltips, colour=colour))
    return series


def equality_figure(points: Sequence[Series], metric: str, width: int, height: int) -> str:
    """Draw predicted over measured values, with lines at equality and at errors of 20%, on logarithmic axes."""
    values = [value for series in points for value in (*series.x, *series.y) if value > 0]
    ends = [min(values, default=1.0), max(values, default=10.0)]
    guides = [
        Series("", ends, [end * scale for end in ends], "line" if scale == 1 else "dashes", colour="currentColor")
        for scale in (1.0, 1.2, 1 / 1.2)
    ]
    axes = (Axis(f"measured {metric} (ms)", is_log=True), Axis(f"predicted {metric} (ms)", is_log=True))
    return figure([*guides, *points], *axes, width=width, height=height)


def histogram(
    label: str, values: Sequence[float], edges: Sequence[float], x: Axis, y_label: str = "count", **size: int
) -> str:
    """Draw how many `values` lie between neighbouring `edges`; the first and last bin count those outside too."""
    counts = [0] * (len(edges) - 1)
    for value in values:
        if math.isfinite(value):
            index = sum(value >= edge for edge in edges) - 1
            counts[min(max(index, 0), len(counts) - 1)] += 1
    bars = Series(label, list(edges), [*map(float, counts), 0.0], "bars")
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
    def over(cls, axis: Axis, values: list[float], start: float, end: float) -> _Scale:
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
    tooltips = [tip for tip, kept in zip(series.tooltips, keep, strict=True) if kept] if series.tooltips else []
    points = [(a, b) for a, b, kept in zip(series.x, series.y, keep, strict=True) if kept]
    return Series(series.label, [a for a, _ in points], [b for _, b in points], series.style, tooltips, series.colour)


def _coloured(series: Sequence[Series]) -> list[Series]:
    """Give series without a colour the palette's in turn."""
    turns = count()
    return [line if line.colour else replace(line, colour=COLOURS[next(turns) % len(COLOURS)]) for line in series]


def _legend_rows(named: list[Series], width: int) -> list[list[tuple[float, str, str]]]:
    """Return (pixels from the left, colour, label) of every entry, wrapped at the figure's width."""
    rows: list[list[tuple[float, str, str]]] = []
    left = float(width)
    for line in named:
        needed = 26 + 6.2 * len(line.label)
        if left + needed > width - _RIGHT:
            rows.append([])
            left = float(_LEFT)
        rows[-1].append((left, str(line.colour), line.label))
        left += needed
    return rows


def _legend(rows: list[list[tuple[float, str, str]]]) -> Iterator[str]:
    for line, row in enumerate(rows):
        y = _TOP + _LEGEND_LINE * line
        for x, colour, label in row:
            yield f'<rect x="{x:.0f}" y="{y - 7}" width="9" height="9" rx="2" fill="{colour}"/>'
            yield f'<text x="{x + 14:.0f}" y="{y + 1}" fill="currentColor">{escape(label)}</text>'


def _grid(across: _Scale, up: _Scale, x: Axis, y: Axis, width: int, height: int, top: int) -> Iterator[str]:
    bottom, right = height - _BOTTOM, width - _RIGHT
    yield from _ticks_across(across, top, bottom)
    for value, text in _labelled(up.ticks()):
        pixel = up(value)
        yield f'<path d="M{_LEFT} {pixel:.1f}H{right}" stroke="currentColor" stroke-opacity=".12"/>'
        yield f'<text x="{_LEFT - 6}" y="{pixel + 4:.1f}" text-anchor="end" fill="currentColor">{text}</text>'
    yield f'<path d="M{_LEFT} {top}V{bottom}H{right}" fill="none" stroke="currentColor" stroke-opacity=".6"/>'
    middle = (top + bottom) / 2
    yield f'<text x="{(_LEFT + right) / 2}" y="{height - 10}" {_MIDDLE}>{escape(x.label)}</text>'
    yield f'<text transform="translate(14 {middle:.0f}) rotate(-90)" {_MIDDLE}>{escape(y.label)}</text>'


def _ticks_across(across: _Scale, top: int, bottom: int) -> Iterator[str]:
    """Draw a vertical line with its label at every tick of the horizontal axis."""
    for value, text in _labelled(across.ticks()):
        pixel = across(value)
        yield f'<path d="M{pixel:.1f} {top}V{bottom}" stroke="currentColor" stroke-opacity=".12"/>'
        yield f'<text x="{pixel:.1f}" y="{bottom + 15}" {_MIDDLE}>{text}</text>'


def _svg(width: int, height: int, parts: Iterable[str], data: str = "") -> str:
    """Return a drawing of this size from its parts."""
    size = f'viewBox="0 0 {width} {height}" width="{width}"'
    head = f'<svg {size} role="img" xmlns="http://www.w3.org/2000/svg" {_FONT}{data}>'
    return "\n".join([head, *parts, "</svg>"])


def _marks(series: Series, colour: str, across: _Scale, up: _Scale) -> Iterator[str]:
    pixels = [(across(a), up(b)) for a, b in zip(series.x, series.y, strict=True)]
    if series.style == "points":
        for index, (a, b) in enumerate(pixels):
            tip = f"<title>{escape(series.tooltips[index])}</title>" if series.tooltips else ""
            yield f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}" fill-opacity=".6">{tip}</circle>'
    elif series.style == "bars":
        floor = up(max(up.low, 0.0))
        for (a, b), (c, _) in pairwise(pixels):
            yield (
                f'<rect x="{a + 0.5:.1f}" y="{min(b, floor):.1f}" width="{max(c - a - 1, 0.5):.1f}" '
                f'height="{abs(floor - b):.1f}" fill="{colour}" fill-opacity=".75"/>'
            )
    elif pixels:
        path = "L".join(f"{a:.1f} {b:.1f}" for a, b in pixels)
        dashes = ' stroke-dasharray="5 4"' if series.style == "dashes" else ""
        label = f' data-label="{escape(series.label)}"' if series.label else ""
        yield f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.6"{dashes}{label}/>'


def tick(value: float, digits: int = 4) -> str:
    """Return a tick's label: `0.5`, `20`, `5k`, `2M`."""
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.{digits}g}{suffix}"
    return f"{value:.{digits}g}"


def _labelled(ticks: Sequence[float]) -> list[tuple[float, str]]:
    """Return ticks with their labels, which have as many digits as it takes to tell them apart."""
    labels = [[tick(value, digits) for value in ticks] for digits in range(4, 17)]
    apart = next((texts for texts in labels if len(set(texts)) == len(texts)), labels[-1])
    return list(zip(ticks, apart, strict=True))


def bar_chart(
    labels: Sequence[str], values: Sequence[float], axis: Axis, colours: Sequence[str] = (), width: int = WIDTH
) -> str:
    """Draw horizontal bars from zero, the first on top, each with its label before it and its value behind."""
    line, left, end = 20, round(0.42 * width), width - 60
    height = line * len(labels) + _BOTTOM
    across = _Scale.over(Axis(axis.label, low=0.0), list(values), left, end)
    parts = list(_ticks_across(across, 4, height - _BOTTOM))
    for place, (label, value) in enumerate(zip(labels, values, strict=True)):
        y = 4 + line * place
        colour = colours[place] if colours else COLOURS[0]
        parts.append(f"<g><title>{escape(label)}: {value:.4g}</title>")
        parts.append(
            f'<text x="{left - 6}" y="{y + 13}" text-anchor="end" fill="currentColor">{escape(shortened(label))}</text>'
        )
        wide = max(across(value) - left, 0.5)
        parts.append(f'<rect x="{left}" y="{y + 3}" width="{wide:.1f}" height="{line - 6}" fill="{colour}"/>')
        shown = tick(float(f"{value:.3g}")) if value >= 1e-4 or value == 0 else f"{value:.7f}".rstrip("0").rstrip(".")
        parts.append(f'<text x="{left + wide + 5:.1f}" y="{y + 13}" fill="currentColor">{shown}</text></g>')
    parts.append(f'<text x="{(left + end) / 2}" y="{height - 10}" {_MIDDLE}>{escape(axis.label)}</text>')
    return _svg(width, height, parts)


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
    kinds = list(dict.fromkeys([*kinds, *(bar.kind for bar in bars)]))
    legend = _legend_rows([Series(kind, (), (), colour=COLOURS[place]) for place, kind in enumerate(kinds)], width)
    left, end, top = 90, width - 12, _TOP + _LEGEND_LINE * len(legend)
    height = top + line * len(labels) + _BOTTOM
    across = _Scale.over(axis, [moment for bar in bars for moment in (bar.begin, bar.end)], left, end)
    parts = list(_legend(legend))
    every = max(1, -(-12 // line))
    for place, label in enumerate(labels):
        if place % every == 0:
            y = top + line * place + line / 2 + 4
            parts.append(
                f'<text x="{left - 6}" y="{y:.1f}" text-anchor="end" fill="currentColor">{escape(label)}</text>'
            )
    parts += _ticks_across(across, top, height - _BOTTOM)
    for bar in bars:
        x, y = across(bar.begin), top + line * bar.track + 1
        shape = f'x="{x:.1f}" y="{y}" width="{max(across(bar.end) - x, 0.3):.1f}" height="{line - 2}"'
        colour = COLOURS[kinds.index(bar.kind)]
        parts.append(
            f'<rect {shape} fill="{colour}" stroke="Canvas" stroke-width=".4"><title>{escape(bar.title)}</title></rect>'
        )
    parts.append(f'<text x="{(left + end) / 2}" y="{height - 10}" {_MIDDLE}>{escape(axis.label)}</text>')
    return _svg(width, height, parts)


def shortened(label: str) -> str:
    """Return a label of 36 characters at most: the middle of a longer one is left out."""
    return label if len(label) <= 36 else f"{label[:22]}…{label[-13:]}"
