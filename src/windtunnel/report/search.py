"""What searches found, on a terminal and as documents."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from rich.console import RenderableType

from windtunnel.engine.serving import Result
from windtunnel.report.tables import columns, grid, number, percent, title
from windtunnel.report.version import version
from windtunnel.search.answers import Fleet, best_by_objective, confidence, frontier, sensitivity
from windtunnel.search.confidence import CONFIDENCE, lower_bound
from windtunnel.search.evaluate import Evaluation
from windtunnel.search.limits import METRICS, Limit, limits_from
from windtunnel.search.optimize import Found, Study
from windtunnel.search.probe import LEAST_STREAM, STABILITY
from windtunnel.search.scores import LESS_IS_BETTER
from windtunnel.search.space import as_builtins
from windtunnel.spec.noun import encode
from windtunnel.units import format_seconds

FRONTIER = ("requests_per_usd", "output_tokens_per_s_per_user")
FRONTIER_WITHOUT_PRICES = ("output_tokens_per_s_per_device", "output_tokens_per_s_per_user")
SHOWN_REFUSALS, SHOWN_FRONTIER = 6, 10
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
}


@dataclass(frozen=True, eq=False)
class SearchReport:
    """A study with what was asked of it besides."""

    study: Study
    top: int
    why: list[list[tuple[int, Result]]]
    """For each workload: points with their runs in full."""
    misconfiguration: list[list[float]]
    """Empty for a single workload."""
    fleets: list[list[Fleet]]
    """For each workload; empty where no load was asked for."""
    load: float | None = None


def search_report(report: SearchReport) -> list[RenderableType]:
    """The answer first, then what it rests on."""
    study = report.study
    space = study.space
    parts: list[RenderableType] = [title(f"{space.num_points:,} points of {space.scenario.get('model', 'the space')}")]
    parts += [grid([("limits", _limits_text(space.limits)), ("objective", objective_text(space.objective))])]
    for at, found in enumerate(study.found):
        parts += _workload_parts(report, at, found)
    if report.misconfiguration:
        parts += _misconfiguration_parts(report)
    count = study.count
    parts += ["", grid([("took", _count_text(count.num_runs, count.num_requests, count.num_known, count.num_alike))])]
    return parts


def _workload_parts(report: SearchReport, at: int, found: Found) -> list[RenderableType]:
    space = report.study.space
    parts: list[RenderableType] = [""]
    if found.workload is not None:
        parts += [title(f"Workload {found.workload}")]
    refused = sum(len(points) for points in found.refusals.values())
    asked = len(found.evaluations)
    parts += [f"{asked:,} points asked: {refused:,} cannot be, {len(found.ranking):,} hold the limits"]
    if not found.ranking:
        return [*parts, *_refusal_parts(found), "No point holds the limits at any load."]
    points = [(str(rank), report.study.point(index).title) for rank, index in enumerate(found.ranking[: report.top], 1)]
    parts += [
        "",
        grid(points, RANK_WIDTH),
        "",
        top_table(report.study, found, report.top),
        *_burst_parts(report, found),
    ]
    parts += [*_sureness_parts(report.study, found), *_why_parts(report.why[at])]
    effects = sensitivity(space, found)
    if effects:
        worth = [(name.rpartition(".")[2], _effects_text(shares)) for name, shares in effects.items()]
        width = max(len(name) for name, _ in worth)
        heading = title("What each setting is worth: the best point with it, of the best of all")
        parts += ["", heading, grid(worth, width)]
    parts += _frontier_parts(report.study, found)
    if report.fleets and report.fleets[at]:
        parts += _fleet_parts(report, report.fleets[at])
    return [*parts, *_refusal_parts(found)]


def top_table(study: Study, found: Found, top: int) -> RenderableType:
    """The best points by their rank, a line each; beside their settings it would not fit a terminal."""
    metric = latency_names(study)
    heads = [
        "",
        load_title(study),
        "at least",
        *(FIGURE_TITLES[name] for name in figure_names(study)),
        *map(limit_name, metric),
        "limit",
    ]
    rows = []
    for rank, index in enumerate(found.ranking[:top], start=1):
        one = found.evaluations[index]
        runs = found.seeds.get(index, [one])
        bound, mean = lower_bound([run.load for run in runs]), mean_of(runs)
        rows.append(
            [
                str(rank),
                number(mean.load),
                "" if bound is None else number(max(bound, 0.0)),
                *(figure_text(mean, name) for name in figure_names(study)),
                *(format_seconds(mean.figures[name]) if name in mean.figures else "" for name in metric),
                limit_name(one.limited_by),
            ]
        )
    return columns(heads, rows)


def _burst_parts(report: SearchReport, found: Found) -> list[RenderableType]:
    """A warning where some of the best points' streams are over too soon."""
    lasting = [found.evaluations[index].figures.get("stream_over_e2e", LEAST_STREAM) for index in found.ranking]
    short = sum(times < LEAST_STREAM for times in lasting[: report.top])
    if not short or report.study.space.load == "given":
        return []
    return ["", f"{short} of these loads: {burst_text(min(lasting[: report.top]))}"]


def burst_text(times: float) -> str:
    """What is wrong with a stream that lasts so few mean times from end to end."""
    return (
        f"the requests arrive within {times:.1f} times the mean end-to-end time, and a deployment that takes in a "
        "burst may not sustain it; give a larger num_requests"
    )


def limit_name(name: str) -> str:
    """What limits a load, in a table: `TTFT p90`, or `queue`."""
    metric, _, statistic = name.partition("_")
    return "queue" if name == STABILITY else f"{METRICS[metric]} {statistic}" if metric in METRICS else ""


def mean_of(runs: Sequence[Evaluation]) -> Evaluation:
    """An evaluation with the mean figures of several streams of requests."""
    shared = [name for name in runs[0].figures if all(name in run.figures for run in runs)]
    figures = {name: sum(run.figures[name] for run in runs) / len(runs) for name in shared}
    return msgspec.structs.replace(runs[0], figures=figures, load=sum(run.load for run in runs) / len(runs))


def load_title(study: Study) -> str:
    """What a load is called."""
    arrivals = study.space.scenario.get("workload", {}).get("arrivals")
    closed = isinstance(arrivals, dict) and arrivals.get("type") == "closed_loop"
    return "clients" if closed else "requests/s"


def figure_names(study: Study) -> list[str]:
    """The figures that a table shows: money, devices, and what is sought."""
    names = ["devices", "usd_per_hour", "requests_per_usd"]
    objective = study.space.objective
    return names if objective in names or objective not in FIGURE_TITLES else [*names, objective]


def latency_names(study: Study) -> list[str]:
    """The latencies that have limits, or that are sought."""
    asked = [limit.name for limit in limits_from(study.space.limits)]
    objective = study.space.objective
    return [*asked, *([objective] if objective.partition("_")[0] in METRICS and objective not in asked else [])]


def figure_text(one: Evaluation, name: str) -> str:
    """A figure in a table; empty where it is unknown."""
    value = one.figures.get(name)
    if value is None:
        return ""
    return f"{value:,.0f}" if name == "devices" else f"{value:,.2f}" if "usd_per_" in name else number(value)


def objective_text(objective: str) -> str:
    """`most requests per $`."""
    most = "least" if objective in LESS_IS_BETTER else "most"
    return f"{most} {FIGURE_TITLES.get(objective, objective.replace('_', ' '))}"


def _limits_text(limits: dict[str, float | str]) -> str:
    held = [limit.title for limit in limits_from(limits)]
    return "; ".join([*held, "the queue does not grow"])


def _effects_text(shares: dict[str, float]) -> str:
    return ", ".join(f"{value} {percent(share) if share else 'none'}" for value, share in shares.items())


def _sureness_parts(study: Study, found: Found) -> list[RenderableType]:
    sure = confidence(found, study.space.objective)
    runs = len(found.seeds.get(found.ranking[0], []))
    if sure is None:
        return ["", "One stream of requests: nothing is said of chance (finalist_seeds: 5 would)."] if runs < 2 else []
    first, second = (study.point(index).title for index in found.ranking[:2])
    text = f"{first} beats {second} with {percent(sure)} confidence" if sure > 0.5 else f"{second} may be as good"
    return ["", f"Of {runs} streams of requests, the same for all; bounds at {percent(CONFIDENCE)}. {text}."]


def _why_parts(results: Sequence[tuple[int, Result]]) -> list[RenderableType]:
    rows = []
    for rank, (_, result) in enumerate(results, start=1):
        summary = result.summary
        shares = sorted(summary.time_fractions.items(), key=lambda item: -item[1])
        use = summary.utilisation
        rows.append(
            [
                str(rank),
                summary.bound_by.replace("_", " "),
                ", ".join(f"{name} {percent(share)}" for name, share in shares if share >= 0.01),
                percent(use.busy_fraction),
                f"{use.mean_running:,.1f}",
                percent(use.kv_peak_fraction),
            ]
        )
    if not rows:
        return []
    heads = ("", "bound by", "time goes to", "busy", "running", "KV at most")
    return ["", title("Why: the best points at their load"), columns(heads, rows, left=3)]


def _frontier_parts(study: Study, found: Found) -> list[RenderableType]:
    names = frontier_names(found)
    kept = frontier(found, names)
    rows = [
        [study.point(index).title, *(figure_text(found.evaluations[index], name) for name in names)] for index in kept
    ]
    heads = ("frontier, first stream", *(FIGURE_TITLES[name] for name in names))
    more = [f"and {len(kept) - SHOWN_FRONTIER} more"] if len(kept) > SHOWN_FRONTIER else []
    return ["", columns(heads, rows[:SHOWN_FRONTIER]), *more]


def frontier_names(found: Found) -> tuple[str, str]:
    """The two objectives of the frontier that is shown."""
    priced = any("requests_per_usd" in found.evaluations[index].figures for index in found.ranking)
    return FRONTIER if priced else FRONTIER_WITHOUT_PRICES


def _fleet_parts(report: SearchReport, fleets: Sequence[Fleet]) -> list[RenderableType]:
    rows = [
        [
            report.study.point(fleet.index).title,
            f"{fleet.copies:,}",
            f"{fleet.devices:,}",
            "unknown" if fleet.usd_per_hour is None else f"{fleet.usd_per_hour:,.2f}",
            percent(fleet.headroom_fraction),
        ]
        for fleet in fleets
    ]
    heads = (f"for {number(report.load or 0.0)} requests/s", "copies", "devices", "$/h", "left over")
    return ["", columns(heads, rows)]


def _refusal_parts(found: Found) -> list[RenderableType]:
    counts: dict[str, list[int]] = {}
    for reason, points in found.refusals.items():
        counts.setdefault(_kind_of(reason), []).extend(points)
    if not counts:
        return []
    ordered = sorted(counts.items(), key=lambda item: -len(item[1]))
    rows = [[reason, f"{len(points):,}"] for reason, points in ordered[:SHOWN_REFUSALS]]
    more = [f"and {len(ordered) - SHOWN_REFUSALS} more reasons"] if len(ordered) > SHOWN_REFUSALS else []
    return ["", columns(("cannot be", "points"), rows), *more]


def _kind_of(reason: str) -> str:
    """A reason without the figures that differ from point to point."""
    return re.sub(r"(?<=[ $])\d[\d,.]*(?: [KMGT]iB)?", "…", reason.partition(": weights")[0])


def _misconfiguration_parts(report: SearchReport) -> list[RenderableType]:
    names = [str(found.workload) for found in report.study.found]
    rows = [[name, *map(percent, shares)] for name, shares in zip(names, report.misconfiguration, strict=True)]
    heads = ("best for", *(f"under {name}" for name in names))
    return ["", title("What the best point of one workload is worth under another"), columns(heads, rows)]


def _count_text(num_runs: int, num_requests: int, num_known: int, num_alike: int) -> str:
    known = f"; {num_known:,} answers were known" if num_known else ""
    alike = f"; {num_alike:,} points found to serve as a neighbour does" if num_alike else ""
    return f"{num_runs:,} runs of {num_requests:,} requests in all{alike}{known}"


def study_document(report: SearchReport) -> dict[str, Any]:
    """A study as JSON: the space, every point that was asked, the ranking and what follows from it."""
    study = report.study
    return {
        "windtunnel": version(),
        "space": as_builtins(study.space),
        "workloads": [
            {
                "workload": found.workload,
                "ranking": found.ranking[: report.top],
                "confidence_first_beats_second": confidence(found, study.space.objective),
                "points": [point_document(study, found, index) for index in found.ranking[: report.top]],
                "best_by_objective": best_by_objective(found),
                "frontier": frontier(found, frontier_names(found)),
                "sensitivity": sensitivity(study.space, found),
                "bound_by": {str(index): result.summary.bound_by for index, result in why},
                "refusals": {reason: len(points) for reason, points in found.refusals.items()},
                "fleets": [msgspec.to_builtins(fleet) for fleet in (report.fleets[at] if report.fleets else [])],
            }
            for at, (found, why) in enumerate(zip(study.found, report.why, strict=True))
        ],
        "misconfiguration": report.misconfiguration,
        "num_runs": study.count.num_runs,
        "num_requests": study.count.num_requests,
    }


def point_document(study: Study, found: Found, index: int) -> dict[str, Any]:
    """One point's answer."""
    runs = found.seeds.get(index, [found.evaluations[index]])
    loads = [run.load for run in runs]
    return {
        "index": index,
        "choice": study.point(index).choice,
        "loads": loads,
        "load_at_least": lower_bound(loads),
        **encode(found.evaluations[index]),
    }


def limit_text(name: str, limits: Sequence[Limit]) -> str:
    """What limits a load, for people."""
    if name == STABILITY:
        return "beyond it requests wait longer and longer"
    return next((f"beyond it {limit.title} is broken" for limit in limits if limit.name == name), "")
