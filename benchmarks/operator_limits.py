"""How much of an interpolation's error the measurements themselves bring: for `operator_accuracy.py`.

Three things, none of which looks at the prediction. A point that took longer or shorter than both its neighbours is out
of reach of every rising curve through them. Between neighbours whose measured times over the roofline differ, another
kernel or protocol took over, and nothing says where. And a second collection of the same kernels on the same silicon
says how well the shape of a curve repeats.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from windtunnel.estimate.roofline import Roofline
from windtunnel.estimate.table import Floats, MeasurementTable

SAME_SILICON = {"h100_sxm": "h200_sxm", "h200_sxm": "h100_sxm", "b200_sxm": "gb200", "gb200": "b200_sxm"}
"""Systems with the same die; H200's memory is another, which bends no curve between neighbours by much."""

STEP = 1.2
"""Between neighbours whose times over the roofline differ by more than this factor another kernel takes over."""

MANY = 0.1
"""The error that one point in ten may exceed."""


@dataclass(frozen=True)
class Surroundings:
    """What the two measured neighbours along the last axis say of a point inside a curve."""

    out_of_reach: float
    """The least error of a prediction that lies between the neighbours."""
    across_step: bool


@dataclass(frozen=True)
class LeftOutPoint:
    """A point that was left out inside a curve, with the error of its prediction."""

    kind: str
    table: str
    error: float
    around: Surroundings


@dataclass(frozen=True)
class Repeat:
    """A table's curves beside those of a second collection."""

    kind: str
    table: str
    differences: Floats


def surroundings(table: MeasurementTable, roofline: Roofline, site: tuple[float, ...], row: int) -> Surroundings:
    """Of the point at `row` of a site, which has a neighbour on both sides."""
    axes, seconds = table.site_rows(site)
    beside = [row - 1, row + 1]
    ends = seconds[beside]
    at = {name: column[beside] for name, column in axes.items()}
    over_roofline = ends / np.asarray(roofline.seconds(table.operator(site, at)))
    nearest = np.clip(seconds[row], ends.min(), ends.max())
    across_step = over_roofline.max() > STEP * over_roofline.min()
    return Surroundings(abs(float(nearest / seconds[row]) - 1), bool(across_step))


def repeat_differences(
    table: MeasurementTable, twin: MeasurementTable, num_sites: int, rng: np.random.Generator
) -> Floats:
    """How far points are off the line between their neighbours in one collection and not in the other.

    A point and both neighbours carry the noise of each collection once, so the difference over the square root of two
    is what a prediction from the neighbours would be off if it knew the curve and only the measurements scattered.
    """
    shared = [site for site in table.rows_by_site if site in twin.rows_by_site]
    found: list[float] = []
    for index in rng.permutation(len(shared))[:num_sites]:
        own = dict(_bends(table, shared[index]))
        found += [own[points] - bend for points, bend in _bends(twin, shared[index]) if points in own]
    return np.expm1(np.abs(np.array(found)) / np.sqrt(2.0))


def _bends(table: MeasurementTable, site: tuple[float, ...]) -> Iterator[tuple[tuple[float, ...], float]]:
    """Every three neighbours of a site, and how far the middle's log seconds are off the line between the others'."""
    axes, seconds = table.site_rows(site)
    points, log_seconds = np.column_stack(list(axes.values())), np.log(seconds)
    log_at = np.log(points[:, -1])
    for row in range(1, len(seconds) - 1):
        if np.all(points[row - 1, :-1] == points[row + 1, :-1]):
            part = (log_at[row] - log_at[row - 1]) / (log_at[row + 1] - log_at[row - 1])
            line = log_seconds[row - 1] * (1 - part) + log_seconds[row + 1] * part
            yield tuple(points[row - 1 : row + 2].ravel().tolist()), float(log_seconds[row] - line)


def limits_markdown(points: list[LeftOutPoint]) -> str:
    """Points left out inside curves: all, what is out of reach, and where a kernel changes."""
    lines = [
        "## What the errors inside curves are made of",
        "",
        "| operators | points | median | p90 | p90 out of reach | across a step | median | p90 | elsewhere, p90 |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for kind in sorted({point.kind for point in points}):
        here = [point for point in points if point.kind == kind]
        errors = np.array([point.error for point in here])
        reach = np.array([point.around.out_of_reach for point in here])
        step = np.array([point.around.across_step for point in here])
        cells = (*_quantiles(errors), f"{np.quantile(reach, 0.9):.1%}", f"{step.mean():.0%}", *_quantiles(errors[step]))
        lines.append(f"| {kind} | {len(here):,} | {' | '.join(cells)} | {_quantiles(errors[~step])[1]} |")
    return "\n".join(lines)


def repeats_markdown(points: list[LeftOutPoint], repeats: list[Repeat]) -> str:
    """The same errors on tables with a second collection, beside what that differs by."""
    lines = [
        "## Beside a second collection of the same kernels",
        "",
        "| operators | table | points | median | p90 | a second collection: points | median | p90 |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for kind in sorted({repeat.kind for repeat in repeats}):
        of_kind = [repeat for repeat in repeats if repeat.kind == kind]
        rows = [("all", of_kind), *((one.table, [one]) for one in of_kind)]
        for name, those in rows:
            tables = {one.table for one in those}
            errors = np.array([point.error for point in points if point.kind == kind and point.table in tables])
            differences = np.concatenate([one.differences for one in those])
            if name != "all" and (not len(errors) or np.quantile(errors, 0.9) <= MANY):
                continue
            cells = (f"{len(errors):,}", *_quantiles(errors), f"{len(differences):,}", *_quantiles(differences))
            lines.append(f"| {kind} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _quantiles(errors: Floats) -> tuple[str, str]:
    if not len(errors):
        return "-", "-"
    return f"{np.median(errors):.1%}", f"{np.quantile(errors, 0.9):.1%}"
