"""A grid of settings: a table, and a page with a plot."""

from collections.abc import Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from windtunnel.errors import InputError, did_you_mean
from windtunnel.report.html import Section, figures, page, table
from windtunnel.report.plots import COLOURS, Axis, Series, figure
from windtunnel.report.search import FIGURE_TITLES, figure_text, limit_name
from windtunnel.report.tables import columns, title
from windtunnel.report.version import version
from windtunnel.search.evaluate import Evaluation
from windtunnel.search.limits import METRICS
from windtunnel.search.scores import OBJECTIVES
from windtunnel.search.space import Space, as_builtins, point_at, value_text
from windtunnel.spec.noun import encode
from windtunnel.units import format_seconds

SHOWN = (
    "ttft_p90",
    "tpot_p50",
    "tpot_p99",
    "e2e_p90",
    "requests_per_s",
    "output_tokens_per_s_per_device",
    "usd_per_hour",
)
BAR_WIDTH = 8
MORE = ("busy_fraction", "kv_peak_fraction", "num_preemptions", "queueing_mean", "queueing_p90", "queueing_p99")


def shown_figures(text: str | None) -> tuple[str, ...]:
    """The figures of `--show`, or those most asked for.

    Raises:
        InputError: one that there is not.
    """
    names = tuple(text.replace(",", " ").split()) if text else SHOWN
    known = [*OBJECTIVES, *MORE]
    for name in names:
        if name not in known:
            raise InputError(
                f"--show: there is no figure {name!r}", did_you_mean(name, known, f"known: {', '.join(known)}")
            )
    return names


def grid_report(space: Space, answers: dict[int, Evaluation], names: Sequence[str]) -> list[RenderableType]:
    """A line a point, with bars for the first figure."""
    settings = list(space.vary)
    first = [one.figures[names[0]] for one in answers.values() if names[0] in one.figures]
    heads = [*(name.rpartition(".")[2] for name in settings), *(_two_lines(figure_title(name)) for name in names), ""]
    rows: list[list[str | Text]] = []
    refused = []
    for index, one in answers.items():
        choice = [value_text(value) for value in point_at(space, index).choice.values()]
        if one.refused:
            refused.append(f"{point_at(space, index).title}: {one.refused}")
            continue
        remark = Text("█" * round(BAR_WIDTH * one.figures.get(names[0], 0.0) / max(first)), style="cyan")
        if not one.holds:
            remark.append(f" breaks {limit_name(one.limited_by)}", style="red")
        rows.append([*choice, *(cell(one, name) for name in names), remark])
    parts: list[RenderableType] = [title(f"{space.num_points:,} points of {space.scenario.get('model')}"), ""]
    if rows:
        parts.append(columns(heads, rows, left=len(settings), right=1))
    return [*parts, *([""] if refused else []), *refused]


def _two_lines(text: str) -> str:
    """A title broken where its last word or unit begins."""
    if text.endswith("/device"):
        return text.replace("/device", "\n/device")
    first, space, last = text.rpartition(" ")
    return f"{first}\n{last}" if space else text


def figure_title(name: str) -> str:
    """A figure's name over a column."""
    if name in FIGURE_TITLES:
        return FIGURE_TITLES[name]
    metric, _, statistic = name.partition("_")
    return f"{METRICS[metric]} {statistic}" if metric in METRICS else name.replace("_", " ")


def cell(one: Evaluation, name: str) -> str:
    """A figure with its unit."""
    if name.partition("_")[0] in METRICS:
        return format_seconds(one.figures[name]) if name in one.figures else ""
    return figure_text(one, name)


def grid_page(space: Space, answers: dict[int, Evaluation], names: Sequence[str]) -> str:
    """A page with the table and plots."""
    lead = f"{space.num_points:,} points."
    return page(f"What if: {space.scenario.get('model')}", lead, grid_sections(space, answers, names))


def grid_sections(space: Space, answers: dict[int, Evaluation], names: Sequence[str]) -> list[Section]:
    """A plot of every figure over the last setting with numbers, a line for the others, and the table."""
    settings = list(space.vary)
    points = [(point_at(space, index), one) for index, one in answers.items() if one.figures]
    numbers = [name for name in settings if all(_is_number(point.choice[name]) for point, _ in points)]
    drawn = []
    for figure_name in names:
        across = numbers[-1] if numbers else None
        lines: dict[str, list[tuple[float, float]]] = {}
        for position, (point, one) in enumerate(points):
            if figure_name not in one.figures:
                continue
            others = [
                f"{name.rpartition('.')[2]} {value_text(point.choice[name])}" for name in settings if name != across
            ]
            x = float(point.choice[across]) if across is not None else float(position)
            lines.setdefault(", ".join(others), []).append((x, one.figures[figure_name]))
        label = across.rpartition(".")[2] if across is not None else "point"
        series = [
            Series(
                name,
                [x for x, _ in sorted(line)],
                [y for _, y in sorted(line)],
                "line",
                colour=COLOURS[turn % len(COLOURS)],
            )
            for turn, (name, line) in enumerate(lines.items())
        ]
        dots = [Series("", one.x, one.y, "points", colour=one.colour) for one in series]
        unit = " (s)" if figure_name.partition("_")[0] in METRICS else ""
        axis = Axis(f"{figure_title(figure_name)}{unit}")
        drawn.append((figure([*series, *dots], Axis(label), axis), figure_title(figure_name)))
    heads = [*(name.rpartition(".")[2] for name in settings), *map(figure_title, names), ""]
    rows = [
        [
            *map(value_text, point_at(space, index).choice.values()),
            *(cell(one, name) for name in names),
            one.refused or ("" if one.holds else f"breaks {limit_name(one.limited_by)}"),
        ]
        for index, one in answers.items()
    ]
    return [Section("Over the settings", figures(drawn)), Section("Every point", table(heads, rows, len(settings)))]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def grid_document(space: Space, answers: dict[int, Evaluation]) -> dict[str, Any]:
    """The grid as JSON."""
    points = [{"choice": point_at(space, index).choice, **encode(one)} for index, one in answers.items()]
    return {"windtunnel": version(), "space": as_builtins(space), "points": points}
