"""A grid of settings: its table, and a page with plots."""

from collections.abc import Mapping, Sequence
from typing import Any

from windtunnel.errors import check_known
from windtunnel.metrics.limits import METRICS, limits_from
from windtunnel.report.chart import Axis, Chart, Limit, marked_lines
from windtunnel.report.render.json import version
from windtunnel.report.report import Block, Cell, Figures, OnPage, Report, Row, Section, Table, Text
from windtunnel.report.search.figures import figure_cell, figure_title, limit_name, two_lines
from windtunnel.schema import encode, short_path
from windtunnel.search.evaluation.schema import Evaluation
from windtunnel.search.scores import OBJECTIVES
from windtunnel.search.space.space import Space, as_builtins, point_at, value_text
from windtunnel.units import format_count

_USUAL = "ttft_p90 tpot_p50 tpot_p99 e2e_p90 requests_per_s output_tokens_per_s_per_device usd_per_hour"
_OF_A_BATCH = "makespan_s e2e_p50 e2e_p90 output_tokens_per_s_per_device usd_per_hour usd_per_million_output_tokens"
_MORE = "busy_fraction kv_peak_fraction num_preemptions queueing_mean queueing_p90 queueing_p99"


def shown_figures(text: str | None, space: Space) -> tuple[str, ...]:
    """Return the figures of `--show`, or the usual ones; those of a batch where all requests are sent at once.

    Raises:
        InputError: one that there is not.
    """
    arrivals = (space.scenario.get("workload") or {}).get("arrivals") or {}
    is_batch = arrivals.get("type") == "burst" and not arrivals.get("interval_s")
    names = tuple((text or (_OF_A_BATCH if is_batch else _USUAL)).replace(",", " ").split())
    known = [*OBJECTIVES, *_MORE.split()]
    for name in names:
        check_known(name, known, f"--show: there is no figure {name!r}")
    return names


def grid_report(space: Space, answers: dict[int, Evaluation], names: Sequence[str]) -> Report:
    """Return the report of a grid: a line per point, with the limit that it breaks."""
    title = f"{format_count(space.num_points, 'point')} of {space.scenario.get('model')}"
    refused = [
        f"{point_at(space, index).title}: {answer.refused}" for index, answer in answers.items() if answer.refused
    ]
    text, is_good = _headline(space, answers)
    sections = _sections(space, answers, names)
    sections += [Section("", [Text(refused)], "What cannot run")] if refused else []
    return Report(title, [], sections, headline=text, is_good=is_good)


def _headline(space: Space, answers: Mapping[int, Evaluation]) -> tuple[str, bool | None]:
    """Say how many points of a grid hold its limits and which is best of these, and whether any does."""
    held = [index for index, answer in answers.items() if answer.holds and not answer.refused]
    text = f"{len(held)} of {format_count(len(answers), 'point')}"
    text += " meet the limits" if space.limits else " can run"
    known = [index for index in held if "requests_per_usd" in answers[index].figures]
    if known:
        best = max(known, key=lambda index: answers[index].figures["requests_per_usd"])
        text += f"; the cheapest per request is {point_at(space, best).title}"
    return f"{text}.", None if held else False


def _sections(space: Space, answers: dict[int, Evaluation], names: Sequence[str]) -> list[Section]:
    """Return a plot of every figure over the last numeric setting, a line per value of the others, and the table."""
    settings = list(space.vary)
    heads = [*(short_path(name) for name in settings), *(two_lines(figure_title(name)) for name in names)]
    heads.append("breaks" if not all(answer.holds for answer in answers.values()) else "")
    rows: list[Row] = []
    for index, answer in answers.items():
        if not answer.refused:
            remark = "" if answer.holds else limit_name(answer.limited_by)
            choice = map(value_text, point_at(space, index).choice.values())
            rows.append([*choice, *(figure_cell(answer, name) for name in names), Cell(remark, tone="alert")])

    def drawn() -> list[Block]:
        return [Figures([(_plot(space, answers, name), figure_title(name)) for name in names])]

    table = [Table(heads, rows, left=len(settings), right=1)] if rows else []
    return [Section("Over the settings", [OnPage(drawn)]), Section("", table, "Every point", is_open=True)]


def _plot(space: Space, answers: dict[int, Evaluation], figure_name: str) -> Chart:
    """Plot a figure over the last numeric setting, or over the points in their order where there is none."""
    known = {index: evaluation for index, evaluation in answers.items() if figure_name in evaluation.figures}
    points = [(point_at(space, index), evaluation.figures[figure_name]) for index, evaluation in known.items()]
    numbers = [name for name in space.vary if all(_is_number(point.choice[name]) for point, _ in points)]
    across = numbers[-1] if numbers else None
    drawn = []
    for position, (point, value) in enumerate(points):
        others = (f"{short_path(name)} {value_text(point.choice[name])}" for name in space.vary if name != across)
        x = float(position) if across is None else float(point.choice[across])
        drawn.append((", ".join(others), x, value))
    label = "point" if across is None else short_path(across)
    limits = [Limit("y", limit.most_s, "limit") for limit in limits_from(space.limits) if limit.name == figure_name]
    y = Axis(figure_title(figure_name), "s" if figure_name.partition("_")[0] in METRICS else "")
    return Chart(Axis(label), y, marked_lines(drawn), limits)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def grid_document(space: Space, answers: dict[int, Evaluation]) -> dict[str, Any]:
    """Document the grid."""
    points = [{"choice": point_at(space, index).choice, **encode(evaluation)} for index, evaluation in answers.items()]
    return {"windtunnel": version(), "space": as_builtins(space), "points": points}
