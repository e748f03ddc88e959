"""Answers of searches, on a terminal and as documents."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from rich.console import RenderableType

from windtunnel.report.render.tables import columns, duration, grid, number, percent, title
from windtunnel.report.version import version
from windtunnel.schema import encode
from windtunnel.search.answers import FleetSize, Worth, best_by_objective, confidence, frontier, worths
from windtunnel.search.asker import Count
from windtunnel.search.capacity.limits import METRICS, Limit, limits_from
from windtunnel.search.capacity.probe import LEAST_STREAM, STABILITY
from windtunnel.search.confidence import CONFIDENCE, lower_bound
from windtunnel.search.evaluation.schema import Evaluation
from windtunnel.search.evaluation.training import MEMORY, job_limits
from windtunnel.search.finalists import frontier_names
from windtunnel.search.scores import is_more_better, objectives_of
from windtunnel.search.space.space import Space, as_builtins
from windtunnel.search.study import SearchOutcome, Study
from windtunnel.serving.results import Result
from windtunnel.training.step import TrainingResult
from windtunnel.units import format_bytes, format_count, format_seconds

SHOWN_REFUSALS, SHOWN_FRONTIER = 6, 10
LEAST_MARGIN = 0.0005
"""Relative margins below this are not shown."""
RANK_WIDTH = 3
FIGURE_TITLES = {
    "requests_per_usd": "requests/$",
    "requests_per_s": "requests/s",
    "output_tokens_per_s": "tokens/s",
    "output_tokens_per_s_per_device": "tokens/s/device",
    "output_tokens_per_s_per_user": "tokens/s/user",
    "usd_per_million_output_tokens": "$/M tokens",
    "usd_per_hour": "$/h",
    "output_token_j": "J/token",
    "mean_w": "W",
    "devices": "devices",
    "step_s": "step",
    "tokens_per_s": "tokens/s",
    "tokens_per_s_per_device": "tokens/s/device",
    "tokens_per_usd": "tokens/$",
    "token_j": "J/token",
    "mfu": "MFU",
    "memory_bytes": "memory",
    "run_s": "run",
    "run_usd": "run, $",
    "run_j": "run, J",
}


@dataclass(frozen=True, eq=False)
class SearchReport:
    """A study with the explanations to show."""

    study: Study
    top: int
    why: list[list[tuple[int, Result | TrainingResult]]]
    """For each workload: points with their runs in full."""
    misconfiguration: list[list[float]]
    """Empty for a single workload."""
    fleets: list[list[FleetSize]]
    """For each workload; empty without `--load`."""
    load: float | None = None


def search_report(report: SearchReport) -> list[RenderableType]:
    """Return the answer first, then its evidence."""
    study = report.study
    space = study.space
    parts: list[RenderableType] = [title(f"{format_count(space.num_points, 'point')} of {space.model or 'the space'}")]
    parts += [grid([("limits", limits_text(space)), ("objective", objective_text(space.objective))])]
    for place, outcome in enumerate(study.outcomes):
        parts += _workload_parts(report, place, outcome)
    if report.misconfiguration:
        parts += ["", title(MISCONFIGURATION), columns(*misconfiguration_rows(report))]
    count = study.count
    parts += ["", grid([("took", _count_text(count, space.is_training))])]
    return parts


def _workload_parts(report: SearchReport, place: int, outcome: SearchOutcome) -> list[RenderableType]:
    space = report.study.space
    parts: list[RenderableType] = [""]
    if outcome.workload is not None:
        parts += [title(f"Workload {outcome.workload}")]
    refused = sum(len(points) for points in outcome.refusals.values())
    evaluated = f"{format_count(len(outcome.evaluations), 'point')} evaluated"
    parts += [f"{evaluated}: {refused:,} cannot run, {len(outcome.ranking):,} meet the limits"]
    num_beyond = sum(evaluation.limited_by == MEMORY for evaluation in outcome.evaluations.values())
    parts += [f"{num_beyond:,} do not fit the devices' memory"] if num_beyond else []
    if not outcome.ranking:
        return [*parts, *_refusal_parts(outcome), nothing_holds_text(space)]
    best = enumerate(outcome.ranking[: report.top], start=1)
    points = [(str(rank), report.study.point(index).title) for rank, index in best]
    parts += [
        "",
        grid(points, RANK_WIDTH),
        "",
        (jobs_table if space.is_training else top_table)(report.study, outcome, report.top),
        *_burst_parts(report, outcome),
    ]
    sureness = sureness_texts(report.study, outcome)
    parts += [*([""] if sureness else []), *sureness, *_why_parts(report.why[place])]
    effects = worths(space, outcome)
    if effects:
        worth = [
            (name.rpartition(".")[2], ", ".join(f"{value} {worth_text(share)}" for value, share in shares.items()))
            for name, shares in effects.items()
        ]
        width = max(len(name) for name, _ in worth)
        parts += ["", title(worth_title(space, outcome)), grid(worth, width)]
    parts += _frontier_parts(report.study, outcome)
    if report.fleets and report.fleets[place]:
        parts += ["", columns(*fleet_rows(report, report.fleets[place]))]
    return [*parts, *_refusal_parts(outcome)]


def top_table(study: Study, outcome: SearchOutcome, top: int) -> RenderableType:
    """Return the table of the best points by rank; their settings are listed apart, to fit a terminal."""
    figures, latencies = figure_names(study), latency_names(study)
    titles = (*(FIGURE_TITLES[name] for name in figures), *map(limit_name, latencies))
    rows = []
    for rank, index in enumerate(outcome.ranking[:top], start=1):
        bound, mean = lower_bound([run.load for run in outcome.runs(index)]), outcome.mean(index)
        rows.append(
            [
                str(rank),
                number(mean.load),
                "" if bound is None else number(max(bound, 0.0)),
                *(figure_text(mean, name) for name in (*figures, *latencies)),
                limit_name(outcome.evaluations[index].limited_by),
            ]
        )
    return columns(("", load_title(study), "at least", *titles, "limit"), rows)


def jobs_table(study: Study, outcome: SearchOutcome, top: int) -> RenderableType:
    """Return the table of the best training jobs by rank."""
    names = [name for name in JOB_FIGURES if name in outcome.evaluations[outcome.ranking[0]].figures]
    objective = study.space.objective
    names += [objective] if objective not in names else []
    rows = [
        [str(rank), *(figure_text(outcome.evaluations[index], name) for name in names)]
        for rank, index in enumerate(outcome.ranking[:top], start=1)
    ]
    return columns(["", *map(figure_title, names)], rows)


JOB_FIGURES = (
    "devices",
    "step_s",
    "tokens_per_s_per_device",
    "mfu",
    "bubble_fraction",
    "exposed_fraction",
    "memory_bytes",
    "tokens_per_usd",
    "run_s",
    "run_usd",
)
"""Columns of the table of training jobs."""


def figure_title(name: str) -> str:
    """Return a figure's heading in a table: `requests/$`, `TTFT p90`."""
    metric, _, statistic = name.partition("_")
    if metric in METRICS:
        return f"{METRICS[metric]} {statistic}"
    return FIGURE_TITLES.get(name, name.removesuffix("_fraction").replace("_", " "))


def nothing_holds_text(space: Space) -> str:
    """Return the sentence for an empty ranking."""
    if space.is_training:
        return "No layout fits and meets the limits: use more devices, a smaller batch or shorter sequences."
    return "No point meets the limits at any load."


def worth_title(space: Space, outcome: SearchOutcome) -> str:
    """Return the title above the worth of each setting."""
    text = "What each setting is worth: the best point with it, of the best of all"
    return text if space.is_training else f"{text} ({streams_text(outcome)})"


def streams_text(outcome: SearchOutcome) -> str:
    """Name the streams that figures are means over."""
    return f"mean of {format_count(outcome.num_streams, 'stream')}" if outcome.num_streams > 1 else "one stream"


def _burst_parts(report: SearchReport, outcome: SearchOutcome) -> list[RenderableType]:
    """Warn where some of the best points' streams end too soon."""
    lasting = [outcome.evaluations[index].figures.get("stream_over_e2e", LEAST_STREAM) for index in outcome.ranking]
    short = sum(times < LEAST_STREAM for times in lasting[: report.top])
    if not short or report.study.space.load == "given" or report.study.space.is_training:
        return []
    return ["", f"{short} of these loads: {burst_text(min(lasting[: report.top]))}"]


def burst_text(times: float) -> str:
    """Explain why a stream that lasts only `times` mean end-to-end times is too short."""
    return (
        f"the requests arrive within {times:.1f} times the mean end-to-end time, and a deployment that takes in a "
        "burst may not sustain it; give a larger num_requests"
    )


def limit_name(name: str) -> str:
    """Return the limit's name in a table: `TTFT p90`, or `queue`."""
    return "queue" if name == STABILITY else figure_title(name) if name.partition("_")[0] in METRICS else ""


def load_title(study: Study) -> str:
    """Return the unit of a load."""
    arrivals = study.space.scenario.get("workload", {}).get("arrivals")
    closed = isinstance(arrivals, dict) and arrivals.get("type") == "closed_loop"
    return "clients" if closed else "requests/s"


def figure_names(study: Study) -> list[str]:
    """Return the figures that a table shows: devices, money and the objective."""
    names = ["devices", "usd_per_hour"]
    objective = study.space.objective
    shown = objective if objective in FIGURE_TITLES else "requests_per_usd"
    return names if shown in names else [*names, shown]


def latency_names(study: Study) -> list[str]:
    """Return the latencies that have limits or are the objective."""
    limited = [limit.name for limit in limits_from(study.space.limits)]
    objective = study.space.objective
    return [*limited, *([objective] if objective.partition("_")[0] in METRICS and objective not in limited else [])]


def figure_text(evaluation: Evaluation, name: str) -> str:
    """Return a figure for a table; empty where it is unknown."""
    value = evaluation.figures.get(name)
    if value is None:
        return ""
    if name.partition("_")[0] in METRICS:
        return format_seconds(value)
    if name == "memory_bytes":
        return format_bytes(value)
    if name.endswith("_fraction") or name in ("mfu", "hfu"):
        return percent(value)
    if name in ("run_s", "step_s"):
        return duration(value) if name == "run_s" else format_seconds(value)
    if name in ("devices", "run_usd", "tokens_per_usd"):
        return f"{value:,.0f}"
    return f"{value:,.2f}" if "usd_per_" in name else number(value)


def objective_text(objective: str) -> str:
    """Return an objective in words: `most requests/$`."""
    direction = "most" if is_more_better(objective) else "least"
    return f"{direction} {FIGURE_TITLES.get(objective, objective.replace('_', ' '))}"


def limits_text(space: Space) -> str:
    """Return the limits of every point in words."""
    if space.is_training:
        limits = [f"{name} <= {duration(most_s)}" for name, most_s in job_limits(space.limits).items()]
        return "; ".join([*limits, "the job fits its devices"])
    return "; ".join([*(limit.title for limit in limits_from(space.limits)), "the queue does not grow"])


def worth_text(worth: Worth) -> str:
    """Return a share of the best, with its margin."""
    if not worth.share:
        return "none"
    is_sure = worth.margin is None or worth.margin < LEAST_MARGIN
    return percent(worth.share) if is_sure else f"{percent(worth.share)} ± {percent(worth.margin or 0.0)}"


def sureness_texts(study: Study, outcome: SearchOutcome) -> list[str]:
    """Return how sure the ranking of the best points is."""
    if study.space.is_training:
        best = outcome.evaluations[outcome.ranking[0]].figures
        low, high = format_seconds(best["step_low_s"]), format_seconds(best["step_high_s"])
        return [f"Of the first, 80% of measured steps are expected from {low} to {high}."]
    sure = confidence(outcome, study.space.objective)
    runs = outcome.num_streams
    if sure is None:
        return ["One stream of requests: nothing is said of chance (finalist_seeds: 5 would)."] if runs < 2 else []
    first, second = (study.point(index).title for index in outcome.ranking[:2])
    text = f"{first} beats {second} with {certainty(sure)} confidence" if sure > 0.5 else f"{second} may be as good"
    text = f"Of {runs} streams of requests, the same for all; bounds at {CONFIDENCE:.0%}. {text}."
    others = [confidence(outcome, study.space.objective, rank) for rank in range(1, outcome.num_finalists - 1)]
    known = [f"{rank} {certainty(share)}" for rank, share in enumerate(others, start=2) if share is not None]
    return [text, *([f"Confidence of the others that they beat the next: {', '.join(known)}."] if known else [])]


def certainty(share: float) -> str:
    """Return a confidence in words: a few streams never give 100%."""
    return percent(share) if share < 0.999 else "more than 99.9%"


def _why_parts(results: Sequence[tuple[int, Result | TrainingResult]]) -> list[RenderableType]:
    if not results:
        return []
    is_training = isinstance(results[0][1], TrainingResult)
    name = "Why: where the best steps go" if is_training else "Why: the best points at their load"
    return ["", title(name), columns(*why_rows(results), left=3)]


def why_rows(results: Sequence[tuple[int, Result | TrainingResult]]) -> tuple[list[str], list[list[str]]]:
    """Return the headings and rows of a table of what bounds the best points and where their time goes."""
    rows = []
    for rank, (_, result) in enumerate(results, start=1):
        if isinstance(result, TrainingResult):
            rows.append([str(rank), bound_text(result), step_text(result)])
            continue
        summary = result.summary
        shares = sorted(summary.time_fractions.items(), key=lambda item: -item[1])
        use = summary.utilisation
        rows.append(
            [
                str(rank),
                bound_text(result),
                ", ".join(f"{name} {percent(share)}" for name, share in shares if share >= 0.01),
                percent(use.busy_fraction),
                f"{use.mean_running:,.1f}",
                percent(use.kv_peak_fraction),
            ]
        )
    if results and isinstance(results[0][1], TrainingResult):
        return ["", "most", "a step goes to"], rows
    return ["", "bound by", "time goes to", "busy", "running", "KV at most"], rows


def bound_text(result: Result | TrainingResult) -> str:
    """Name what bounds a deployment, or takes most of a training step."""
    if isinstance(result, TrainingResult):
        return max(result.breakdown_s, key=lambda name: result.breakdown_s[name])
    return result.summary.bound_by.replace("_", " ")


def step_text(result: TrainingResult) -> str:
    """Return the parts of a training step that take 1% or more, the longest first."""
    shares = sorted(result.breakdown_s.items(), key=lambda part: -part[1])
    parts = [f"{name} {percent(seconds / result.step_s)}" for name, seconds in shares]
    return ", ".join(part for part, (_, seconds) in zip(parts, shares, strict=True) if seconds >= 0.01 * result.step_s)


def _frontier_parts(study: Study, outcome: SearchOutcome) -> list[RenderableType]:
    heads, rows = frontier_rows(study, outcome)
    more = [f"and {len(rows) - SHOWN_FRONTIER} more"] if len(rows) > SHOWN_FRONTIER else []
    return ["", columns(heads, rows[:SHOWN_FRONTIER]), *more]


def frontier_rows(study: Study, outcome: SearchOutcome) -> tuple[list[str], list[list[str]]]:
    """Return the headings and rows of the frontier's table."""
    names = names_of_frontier(study, outcome)
    heads = ["frontier" if study.space.is_training else f"frontier, {streams_text(outcome)}", *map(figure_title, names)]
    rows = [
        [study.point(index).title, *(sure_figure_text(outcome, index, name) for name in names)]
        for index in frontier(outcome, names)
    ]
    return heads, rows


def names_of_frontier(study: Study, outcome: SearchOutcome) -> tuple[str, str]:
    """Return the two objectives of the frontier."""
    return frontier_names(study.space, [outcome.evaluations[index] for index in outcome.ranking])


def sure_figure_text(outcome: SearchOutcome, index: int, name: str) -> str:
    """Return a figure with its margin, where that is known."""
    mean, off = outcome.mean(index), outcome.margin(index, name)
    text = figure_text(mean, name)
    if off is None or name not in mean.figures or off < LEAST_MARGIN * abs(mean.figures[name]):
        return text
    return f"{text} ± {percent(off / abs(mean.figures[name]))}"


def fleet_rows(report: SearchReport, fleets: Sequence[FleetSize]) -> tuple[list[str], list[list[str]]]:
    """Return the headings and rows of a table of the replicas that serve the requested load."""
    rows = [
        [
            report.study.point(fleet.index).title,
            *(f"{count:,}" for count in (fleet.copies, fleet.devices)),
            "unknown" if fleet.usd_per_hour is None else f"{fleet.usd_per_hour:,.2f}",
            percent(fleet.headroom_fraction),
        ]
        for fleet in fleets
    ]
    return [f"for {number(report.load or 0.0)} requests/s", "copies", "devices", "$/h", "left over"], rows


def _refusal_parts(outcome: SearchOutcome) -> list[RenderableType]:
    counts: dict[str, list[int]] = {}
    for reason, points in outcome.refusals.items():
        counts.setdefault(_kind_of(reason), []).extend(points)
    if not counts:
        return []
    ordered = sorted(counts.items(), key=lambda item: -len(item[1]))
    rows = [[reason, f"{len(points):,}"] for reason, points in ordered[:SHOWN_REFUSALS]]
    more = [f"and {len(ordered) - SHOWN_REFUSALS} more reasons"] if len(ordered) > SHOWN_REFUSALS else []
    return ["", columns(("cannot run", "points"), rows), *more]


def _kind_of(reason: str) -> str:
    """Return a reason without the numbers that differ from point to point."""
    return re.sub(r"(?<=[ $])\d[\d,.]*(?: [KMGT]iB)?", "…", reason.partition(": weights")[0])


MISCONFIGURATION = "What the best point of one workload is worth under another"


def misconfiguration_rows(report: SearchReport) -> tuple[list[str], list[list[str]]]:
    """Return the headings and rows of a table of each workload's best point under the others."""
    names = [str(outcome.workload) for outcome in report.study.outcomes]
    rows = [[name, *map(percent, shares)] for name, shares in zip(names, report.misconfiguration, strict=True)]
    return ["best for", *(f"under {name}" for name in names)], rows


def _count_text(count: Count, is_training: bool) -> str:
    known = f"; {format_count(count.num_known, 'answer was', 'answers were')} known" if count.num_known else ""
    if is_training:
        return f"{format_count(count.num_runs, 'step')} simulated{known}"
    skipped = ""
    if count.num_duplicates:
        points = format_count(count.num_duplicates, "point")
        skipped = f"; {points} skipped: identical results to a neighbouring configuration"
    runs, requests = format_count(count.num_runs, "run"), format_count(count.num_requests, "request")
    return f"{runs} of {requests} in all{skipped}{known}"


def study_document(report: SearchReport) -> dict[str, Any]:
    """Document a study: the space, the ranking, and what follows from it."""
    study = report.study
    return {
        "windtunnel": version(),
        "space": as_builtins(study.space),
        "workloads": [
            {
                "workload": outcome.workload,
                "ranking": outcome.ranking[: report.top],
                "confidence_beats_next": [
                    confidence(outcome, study.space.objective, rank)
                    for rank in range(min(outcome.num_finalists, report.top))
                ],
                "points": [point_document(study, outcome, index) for index in outcome.ranking[: report.top]],
                "best_by_objective": best_by_objective(outcome, objectives_of(study.space)),
                "frontier": frontier(outcome, names_of_frontier(study, outcome)),
                "sensitivity": {
                    name: {value: msgspec.to_builtins(worth) for value, worth in by_value.items()}
                    for name, by_value in worths(study.space, outcome).items()
                },
                "bound_by": {str(index): bound_text(result) for index, result in why},
                "refusals": {reason: len(points) for reason, points in outcome.refusals.items()},
                "fleets": [msgspec.to_builtins(fleet) for fleet in (report.fleets[place] if report.fleets else [])],
            }
            for place, (outcome, why) in enumerate(zip(study.outcomes, report.why, strict=True))
        ],
        "misconfiguration": report.misconfiguration,
        "num_runs": study.count.num_runs,
        "num_requests": study.count.num_requests,
    }


def point_document(study: Study, outcome: SearchOutcome, index: int) -> dict[str, Any]:
    """Document one point's answer."""
    loads = [run.load for run in outcome.runs(index)]
    return {
        "index": index,
        "choice": study.point(index).choice,
        "loads": loads,
        "load_at_least": lower_bound(loads),
        **encode(outcome.evaluations[index]),
    }


def limit_text(name: str, limits: Sequence[Limit]) -> str:
    """Return what limits a load, for people."""
    if name == STABILITY:
        return "above this load requests wait longer and longer"
    return next((f"above this load {limit.title} is not met" for limit in limits if limit.name == name), "")
