"""The figure of all points that meet the limits of a search, and their frontier."""

from typing import Any

from windtunnel.metrics.limits import METRICS
from windtunnel.report.numbers import percent
from windtunnel.report.report import Block, Cell, OnPage, OnTerminal, Points, Table
from windtunnel.report.search import figures as naming
from windtunnel.schema import short_path
from windtunnel.search import answers
from windtunnel.search.scores import frontier_names, is_more_better
from windtunnel.search.space.space import value_text
from windtunnel.search.study import SearchOutcome, Study
from windtunnel.units import format_count

SHOWN_FRONTIER = 10
LEAST_MARGIN = 0.0005
"""Relative margins below this are not shown."""
MAX_DRAWN = 20_000
"""Most points of the interactive figure; of more, the best are drawn."""


def streams_text(outcome: SearchOutcome) -> str:
    """Name the streams that figures are means over."""
    return f"mean of {format_count(outcome.num_streams, 'stream')}" if outcome.num_streams > 1 else "one stream"


def all_points(study: Study, outcome: SearchOutcome, winner: int) -> list[Block]:
    """Return the figure of all points that meet the limits, and the frontier: the best of it on a terminal."""
    names = names_of_frontier(study, outcome)
    head = "frontier" if study.space.is_training else f"frontier, {streams_text(outcome)}"
    indices = answers.frontier(outcome, names)
    rows: list[list[str | Cell]] = [
        [study.point(index).title, *(_sure_cell(outcome, index, name) for name in names)] for index in indices
    ]
    heads = [head, *map(naming.figure_title, names)]
    more = [f"and {len(rows) - SHOWN_FRONTIER} more"] if len(rows) > SHOWN_FRONTIER else []
    remark = "The point in a circle is the best; the dashed line is the frontier of the two axes."
    if outcome.num_streams > 1:
        remark += (
            f" Filled dots are the {streams_text(outcome)} of requests, with the 90% confidence interval of the mean; "
            "hollow dots met the first stream alone, and the line leaves them out."
        )
    return [
        OnTerminal(lambda: [Table(heads, rows[:SHOWN_FRONTIER], notes=more)]),
        OnPage(lambda: [Points(_plotted(study, outcome) | {"best": winner}), remark, Table(heads, rows)]),
    ]


def names_of_frontier(study: Study, outcome: SearchOutcome) -> tuple[str, str]:
    """Return the two objectives of the frontier."""
    return frontier_names(study.space, [outcome.evaluations[index] for index in outcome.ranking])


def _sure_cell(outcome: SearchOutcome, index: int, name: str) -> Cell:
    """Return a figure with its margin, where that is known."""
    mean, off = outcome.mean(index), outcome.margin(index, name)
    text = naming.figure_text(mean, name)
    if off is not None and name in mean.figures and off >= LEAST_MARGIN * abs(mean.figures[name]):
        text = f"{text} ± {percent(off / abs(mean.figures[name]))}"
    return Cell(text, mean.figures.get(name))


def _plotted(study: Study, outcome: SearchOutcome) -> dict[str, Any]:
    """Return the data of a figure of all points; the reader chooses axes, colours and filters."""
    indices = outcome.ranking[:MAX_DRAWN]
    names = list(study.space.vary) or ["scenario"]
    points = [study.point(index).choice for index in indices]
    means = [outcome.mean(index).figures for index in indices]
    figures = sorted(
        {name for mean in means for name in mean}, key=lambda name: (name not in naming.FIGURE_TITLES, name)
    )
    x, y = reversed(names_of_frontier(study, outcome))
    axes = {name: _axis(name) for name in (*figures, x, y)}
    return {
        "figures": [axes[name][0] for name in figures],
        "more": [is_more_better(name) for name in figures],
        "names": [short_path(name) for name in names],
        "choices": [[value_text(choice.get(name, "")) for name in names] for choice in points],
        "values": [[mean[name] / axes[name][2] if name in mean else None for name in figures] for mean in means],
        "margins": [[outcome.margin(index, name) for name in figures] for index in indices],
        "units": [axes[name][1] for name in figures],
        "limits": naming.limits_by_title(study.space),
        "title": "Points that meet the limits",
        "x": axes[x][0],
        "y": axes[y][0],
    }


def _axis(name: str) -> tuple[str, str, float]:
    """Return the title of a figure's axis, its unit where the page writes it, and what the figure is divided by."""
    title = naming.figure_title(name)
    if name.endswith("_bytes"):
        return f"{title}, GiB", "", 2.0**30
    is_time = name.partition("_")[0] in METRICS or (name.endswith("_s") and not name.endswith("_per_s"))
    return title, "s" if is_time else "share" if name.endswith("_fraction") else "", 1.0
