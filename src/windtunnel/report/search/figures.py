"""Names and texts of the figures, limits and objectives of searches; the figure of all points, and their frontier."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from windtunnel.errors import InputError
from windtunnel.metrics.limits import METRICS, Limit, limits_from
from windtunnel.report.layout import layouts_beside, shown
from windtunnel.report.numbers import duration, number, percent
from windtunnel.report.report import Block, Cell, OnPage, OnTerminal, Points, Table
from windtunnel.report.serving.setup import workload_text
from windtunnel.schema import dotted, short_path
from windtunnel.search import answers
from windtunnel.search.capacity.probe import STABILITY
from windtunnel.search.evaluation.schema import Evaluation
from windtunnel.search.evaluation.training import job_limits
from windtunnel.search.scores import frontier_names, is_more_better
from windtunnel.search.space.space import Space, point_at, scenario_at, value_text
from windtunnel.search.study import SearchOutcome, Study
from windtunnel.serving.engines.defaults import engine_defaults
from windtunnel.serving.scenario import Scenario, pool_scenario
from windtunnel.serving.shorthand import JOB_PATHS
from windtunnel.units import format_count

LAYOUT = layouts_beside(__file__)
FIGURE_TITLES: Mapping[str, str] = LAYOUT["titles"]


def figure_title(name: str) -> str:
    """Return a figure's heading in a table: `requests/$`, `TTFT p90`."""
    metric, _, statistic = name.partition("_")
    if metric in METRICS:
        return f"{METRICS[metric]} {statistic}"
    return FIGURE_TITLES.get(name, name.removesuffix("_fraction").replace("_", " "))


def two_lines(title: str) -> str:
    """Break a heading where its longer line is shortest, or else before its unit, for a narrow table."""
    words = title.split(" ")
    if len(words) > 1:
        pairs = [(" ".join(words[:index]), " ".join(words[index:])) for index in range(1, len(words))]
        return "\n".join(min(pairs, key=lambda pair: max(map(len, pair))))
    first, slash, last = title.rpartition("/")
    return f"{first}\n/{last}" if slash and len(title) > 8 else title


def figure_text(evaluation: Evaluation, name: str) -> str:
    """Return a figure for a table; empty where it is unknown."""
    value = evaluation.figures.get(name)
    if value is None:
        return ""
    if name == "devices":  # a mean where replicas come and go
        return f"{value:,.2f}".removesuffix(".00")
    return shown(name, value, "time" if name.partition("_")[0] in METRICS else LAYOUT["formats"].get(name, ""))


def figure_cell(evaluation: Evaluation, name: str) -> Cell:
    """Return a figure with its unit, sorted by its value."""
    return Cell(figure_text(evaluation, name), evaluation.figures.get(name))


def limit_name(name: str) -> str:
    """Return the limit's name in a table: `TTFT p90`, or `queue`."""
    return "queue" if name == STABILITY else figure_title(name) if name.partition("_")[0] in METRICS else ""


def limit_text(name: str, limits: Sequence[Limit]) -> str:
    """Say what happens above a load that a limit bounds."""
    if name == STABILITY:
        return "requests wait longer and longer"
    return next((f"{limit.title} is not met" for limit in limits if limit.name == name), "")


def burst_document(burst: Sequence[int] | None) -> dict[str, int] | None:
    """Document a burst."""
    return None if burst is None else {"num_requests": burst[0], "num_requests_needed": burst[1]}


def load_unit(workload: Mapping[str, Any]) -> str:
    """Return the unit of the load of a workload, given as builtins: clients, or the requests or sessions a second."""
    arrivals = workload.get("arrivals")
    kind = str(arrivals.get("type")).lower() if isinstance(arrivals, dict) else ""
    if kind == "closed_loop":
        return "clients"
    is_of_sessions = workload.get("sessions") and kind in ("poisson", "gamma", "static")
    return "sessions/s" if is_of_sessions else "requests/s"


def unit_of(space: Space) -> str:
    """Return the unit of the load of a space's points."""
    return load_unit(space.scenario.get("workload") or {})


def held_text(load: float, burst: Sequence[int] | None, unit: str) -> str:
    """Say that a load is held, or only in a burst (`search.capacity.load.burst_of`)."""
    if burst is None:
        return f"{number(load)} {unit}"
    most = f"at most {number(load)} {unit} in a burst of {burst[0]:,} requests"
    return f"{most}; give --num-requests {burst[1]} to know what it sustains"


def objective_text(objective: str) -> str:
    """Return an objective in words: `most requests/$`."""
    direction = "most" if is_more_better(objective) else "least"
    return f"{direction} {FIGURE_TITLES.get(objective, objective.replace('_', ' '))}"


def limits_by_title(space: Space) -> Mapping[str, float]:
    """Return the title of a limited figure -> its limit in seconds."""
    if space.is_training:
        return job_limits(space.limits)
    return {figure_title(limit.name): limit.most_s for limit in limits_from(space.limits)}


def limits_text(space: Space) -> str:
    """Return the limits of every point in words."""
    limits = [f"{title} <= {duration(most_s)}" for title, most_s in limits_by_title(space).items()]
    if unit_of(space) != "clients":
        limits.append("the job fits its devices" if space.is_training else "the queue does not grow")
    return "; ".join(limits) or "none"


def assumed_rows(space: Space) -> list[tuple[str, str]]:
    """Return the engine and the load that all points of a space of deployments share, as (label, text)."""
    choices = [values.values() if isinstance(values, dict) else [[name]] for name, values in space.vary.items()]
    varied = [space.short_paths.get(path, path) for choice in choices for paths in choice for path in paths]
    rows = list[tuple[str, str]]()
    with suppress(InputError):  # of a point that is refused nothing is known
        scenario = scenario_at(space, point_at(space, 0).settings, next(iter(space.workloads), None))
        versions = [f"{engine_defaults(name).title} {each}" for name, each in engine_versions(scenario).items()]
        if not any(path.startswith(("deployment.engine.name", "deployment.engine.version")) for path in varied):
            rows.append(("engine", ", ".join(versions)))
        of_load = [path for path in varied if path.startswith("workload.")]
        if not space.workloads and all(path.startswith(("workload.arrivals.", "workload.num_")) for path in of_load):
            rows.append(("load", workload_text(scenario.workload, says_rate=space.load == "given" and not of_load)))
    return rows


def engine_versions(scenario: Scenario) -> dict[str, str]:
    """Return engine -> simulated version."""
    engines = [pool_scenario(scenario, pool).deployment.engine for pool in scenario.deployment.groups]
    return {engine.name: engine.version or engine_defaults(engine.name).default_version for engine in engines}


def varied_text(space: Space) -> str:
    """Return the settings that the points of a space differ in, each with its values."""
    values = {short_path(name): map(value_text, _in_order(each)) for name, each in space.vary.items() if len(each) > 1}
    return "; ".join(f"{name} {', '.join(texts)}" for name, texts in values.items())


def _in_order(values: Iterable[Any]) -> list[Any]:
    """Return the values of a setting, numbers from the lowest."""
    listed = list(values)
    return sorted(listed) if all(isinstance(value, int | float) for value in listed) else listed


def shared_text(space: Space) -> str:
    """Return the settings that all points of a space of training jobs share; those of its hardware and of defaults
    that a search could change are among them.
    """
    varied = {space.short_paths.get(name, name) for name, values in space.vary.items() if len(values) > 1}
    shared = SHARED_DEFAULTS | dotted(
        {name: value for name, value in space.job.items() if name not in _SHOWN_ELSEWHERE}
    )
    single = {name: next(iter(values)) for name, values in space.vary.items() if len(values) == 1}
    shared |= {space.short_paths.get(name, name): value for name, value in single.items()}
    names = {path: name for name, path in JOB_PATHS.items()}
    held = {names.get(path, path): value for path, value in shared.items() if path not in varied and value is not None}
    texts = (
        f"{value:,.0f}" if type(value) is float and value.is_integer() else value_text(value) for value in held.values()
    )
    return "; ".join(f"{name} {text}" for name, text in zip(held, texts, strict=True))


SHARED_DEFAULTS = {
    "framework": "megatron",
    "precision.compute": "bf16",
    "optimizer": "adam",
    "precision.moments": "fp32",
    "sharding.offload": "none",
}
"""Defaults of a training job that a reader would otherwise have to know."""
_SHOWN_ELSEWHERE = ("model", "network", "faults", "price_usd_per_hour")


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
    heads = [head, *map(figure_title, names)]
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
    text = figure_text(mean, name)
    if off is not None and name in mean.figures and off >= LEAST_MARGIN * abs(mean.figures[name]):
        text = f"{text} ± {percent(off / abs(mean.figures[name]))}"
    return Cell(text, mean.figures.get(name))


def _plotted(study: Study, outcome: SearchOutcome) -> dict[str, Any]:
    """Return the data of a figure of all points; the reader chooses axes, colours and filters."""
    indices = outcome.ranking[:MAX_DRAWN]
    names = list(study.space.vary) or ["scenario"]
    points = [study.point(index).choice for index in indices]
    means = [outcome.mean(index).figures for index in indices]
    figures = sorted({name for mean in means for name in mean}, key=lambda name: (name not in FIGURE_TITLES, name))
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
        "limits": limits_by_title(study.space),
        "title": "Points that meet the limits",
        "x": axes[x][0],
        "y": axes[y][0],
    }


def _axis(name: str) -> tuple[str, str, float]:
    """Return the title of a figure's axis, its unit where the page writes it, and what the figure is divided by."""
    title = figure_title(name)
    if name.endswith("_bytes"):
        return f"{title}, GiB", "", 2.0**30
    is_time = name.partition("_")[0] in METRICS or (name.endswith("_s") and not name.endswith("_per_s"))
    return title, "s" if is_time else "share" if name.endswith("_fraction") else "", 1.0
