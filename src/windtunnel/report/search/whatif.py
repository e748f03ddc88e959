"""A grid of settings: its table, and a page with plots."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from windtunnel.errors import check_known
from windtunnel.metrics.limits import METRICS, limits_from
from windtunnel.notebook import Shown, Tabular
from windtunnel.report.chart import Axis, Chart, Limit, lines_across
from windtunnel.report.render.json import version
from windtunnel.report.report import Block, Cell, Facts, Figures, OnPage, Report, Row, Section, Table, Text
from windtunnel.report.search.figures import assumed_rows, figure_cell, figure_title, limit_name, two_lines, unit_of
from windtunnel.schema import encode, short_path
from windtunnel.search.answers import answer_columns
from windtunnel.search.capacity.load import burst_of
from windtunnel.search.evaluation.schema import Evaluation
from windtunnel.search.scores import OBJECTIVES
from windtunnel.search.space.space import Space, as_builtins, point_at, value_text
from windtunnel.units import format_count

if TYPE_CHECKING:
    import pyarrow as pa

_USUAL = "ttft_p90 tpot_p50 tpot_p99 e2e_p90 requests_per_s output_tokens_per_s_per_device usd_per_hour"
_OF_A_BATCH = "makespan_s e2e_p50 e2e_p90 output_tokens_per_s_per_device usd_per_hour usd_per_million_output_tokens"
_MORE = "busy_fraction kv_peak_fraction num_preemptions queueing_mean queueing_p90 queueing_p99"


@dataclass(frozen=True, eq=False, repr=False)
class Grid(Tabular, Shown):
    """Every combination of some settings' values, each simulated under its own load."""

    REPORT = "search.whatif:whole_report"

    space: Space
    answers: dict[int, Evaluation]
    """Position of a point -> whether it holds the limits, or why it was refused, and its figures in SI units."""

    def to_arrow(self) -> "pa.Table":
        """Return all points as a pyarrow table, a row each: its settings, its answer and its figures."""
        import pyarrow as pa

        columns = {"point": list(self.answers)} | answer_columns(self.space, list(self.answers.items()))
        for name, values in self.space.vary.items():
            if all(type(value) in (int, float) for value in values):
                columns[f"vary.{name}"] = [point_at(self.space, index).choice[name] for index in self.answers]
        return pa.table(columns)


def whole_report(grid: Grid) -> Report:
    """Return the report of a grid with the usual figures."""
    return grid_report(grid.space, grid.answers, shown_figures(None, grid.space))


def shown_figures(text: str | None, space: Space) -> tuple[str, ...]:
    """Return the figures of `--show`, or the limited and the usual ones; a batch that is sent at once has others.
    InputError for a figure that there is not."""
    arrivals = (space.scenario.get("workload") or {}).get("arrivals") or {}
    is_batch = arrivals.get("type") == "burst" and not arrivals.get("interval_s")
    names = (text or (_OF_A_BATCH if is_batch else _USUAL)).replace(",", " ").split()
    known = [*OBJECTIVES, *_MORE.split()]
    for name in names:
        check_known(name, known, f"--show: there is no figure {name!r}")
    if not text and space.comes_and_goes:
        names.insert(-1, "devices")  # as many as are held on average
    limited = [] if text else [limit.name for limit in limits_from(space.limits) if limit.name not in names]
    return (*limited, *names)


def grid_report(space: Space, answers: dict[int, Evaluation], names: Sequence[str]) -> Report:
    """Return the report of a grid: a line per point, with the limit that it breaks."""
    title = f"{format_count(space.num_points, 'point')} of {space.scenario.get('model')}"
    refused = reasons(space, {index: answer.refused for index, answer in answers.items() if answer.refused})
    worth = {at: answer.figures.get("requests_per_usd") for at, answer in answers.items() if answer.holds}
    best = max(filter(worth.get, worth), key=lambda at: worth[at] or 0.0, default=None)
    text, is_good = _headline(space, answers, best)
    sections = _sections(space, answers, names, best)
    sections += [Section("", [Text(refused)], "What cannot run")] if refused else []
    return Report(title, [Facts(assumed_rows(space))], sections, verdict=text, is_good=is_good)


def reasons(space: Space, reason_of: Mapping[int, str]) -> list[str]:
    """Return each reason with the points that have it: the first, and how many more."""
    points: dict[str, list[int]] = {}
    for index, reason in reason_of.items():
        points.setdefault(reason, []).append(index)
    return [
        f"{point_at(space, each[0]).title}{f' and {len(each) - 1} more' if len(each) > 1 else ''}: {reason}"
        for reason, each in points.items()
    ]


def _headline(space: Space, answers: Mapping[int, Evaluation], best: int | None) -> tuple[str, bool | None]:
    """Say how many points of a grid hold its limits and which is best of these, and whether any does."""
    held = [index for index, answer in answers.items() if answer.holds and not answer.refused]
    text = f"{len(held)} of {format_count(len(answers), 'point')}"
    falls_behind = len(held) < sum(not answer.refused for answer in answers.values())
    meet = "meets" if len(held) == 1 else "meet"
    text += f" {meet} the limits" if space.limits else " can keep up with the load" if falls_behind else " can run"
    if best is not None:
        figures = {index: answers[index].figures.get("requests_per_usd") for index in held}
        equal = [index for index in held if figures[index] == figures[best]]
        others = f", and {len(equal) - 1} more cost the same" if len(equal) > 1 else ""
        is_one = len(equal) == len(held) > 1
        text += (
            "; all cost the same per request"
            if is_one
            else f"; the cheapest per request is {point_at(space, best).title}{others}"
        )
    spans = ((answers[index].num_requests, answers[index].figures.get("stream_over_e2e", math.inf)) for index in held)
    if bursts := [burst for span in spans if (burst := burst_of(*span)) is not None]:
        most = max(needed for _, needed in bursts)
        text += f". Over too soon to tell: {len(bursts)} of the {len(held)} (give --num-requests {most})"
    return f"{text}.", None if held else False


def _sections(space: Space, answers: dict[int, Evaluation], names: Sequence[str], best: int | None) -> list[Section]:
    """Return plots of figures that differ over a numeric setting, a line per value of the others, and the table."""
    settings = list(space.vary)
    heads = [*(short_path(name) for name in settings), *(two_lines(figure_title(name)) for name in names)]
    heads.append("breaks" if not all(answer.holds for answer in answers.values()) else "")
    rows: list[Row] = []
    for index, answer in answers.items():
        if not answer.refused:
            remark = "" if answer.holds else _broken(space, answer)
            choice = map(value_text, point_at(space, index).choice.values())
            rows.append([*choice, *(figure_cell(answer, name) for name in names), Cell(remark, tone="alert")])

    def drawn() -> list[Block]:
        values = {name: {answer.figures.get(name) for answer in answers.values()} for name in names}
        return [Figures([(_plot(space, answers, name), figure_title(name)) for name in names if len(values[name]) > 1])]

    shown = [index for index, answer in answers.items() if not answer.refused]
    winner = None if best is None else shown.index(best)
    table = [Table(heads, rows, left=len(settings), right=1, winner=winner)] if rows else []
    return [Section("Over the settings", [OnPage(drawn)]), Section("", table, "Every point", is_open=True)]


def _broken(space: Space, answer: Evaluation) -> str:
    """Name every limit that a point breaks, or what else limits it."""
    limits = limits_from(space.limits)
    broken = [limit.name for limit in limits if answer.figures.get(limit.name, 0.0) > limit.most_s]
    return ", ".join(map(limit_name, broken or [answer.limited_by]))


def _plot(space: Space, answers: dict[int, Evaluation], figure_name: str) -> Chart:
    """Plot a figure over the numeric setting with most values, or over the points in order where there is none."""
    known = {index: each.figures[figure_name] for index, each in answers.items() if figure_name in each.figures}
    numbers = [name for name, values in space.vary.items() if all(type(value) in (int, float) for value in values)]
    across = max(reversed(numbers), key=lambda name: len(space.vary[name]), default="")
    points = []
    for index, figure in known.items():
        choice = point_at(space, index).choice.items()
        points.append(
            ({short_path(name): value if name == across else value_text(value) for name, value in choice}, figure)
        )
    head = short_path(across)
    unit = f" ({unit_of(space)})" if head in ("rate", "rate_per_s") else ""
    limits = [Limit("y", limit.most_s, "limit") for limit in limits_from(space.limits) if limit.name == figure_name]
    y = Axis(figure_title(figure_name), "s" if figure_name.partition("_")[0] in METRICS else "")
    has_counts = all(isinstance(value, int) for value in space.vary.get(across, ()))
    x = Axis(f"{head}{unit}" or "point", "count" if has_counts else "", is_log=None)
    return Chart(x, y, lines_across(points, head or None), limits)


def grid_document(space: Space, answers: dict[int, Evaluation]) -> dict[str, Any]:
    """Document the grid; of a point that holds its limits nothing is said to limit it."""
    points = [{"choice": point_at(space, index).choice, **encode(evaluation)} for index, evaluation in answers.items()]
    for point in points:
        if point.get("holds"):
            point.pop("limited_by", None)
    return {"windtunnel": version(), "space": as_builtins(space), "points": points}
