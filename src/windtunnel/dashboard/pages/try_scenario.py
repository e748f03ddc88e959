"""A form for a scenario, simulated as it is changed or swept over its load; both can be saved."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from windtunnel import catalog
from windtunnel.dashboard import trial as trials
from windtunnel.dashboard.view import Dashboard, Query, View, link
from windtunnel.errors import InputError
from windtunnel.model.precision import Format
from windtunnel.report.chart import Axis, Chart, Limit, Series
from windtunnel.report.layout import table_of
from windtunnel.report.report import Figures, Report, Section, noted
from windtunnel.report.search.capacity import capacity_document, capacity_section, verdict_of
from windtunnel.report.search.figures import limit_name, load_unit
from windtunnel.report.serving.curves import LATENCIES
from windtunnel.report.serving.run import run_document, run_sections, verdict
from windtunnel.report.serving.setup import deployment_line, load_line, model_line
from windtunnel.schema import encode
from windtunnel.serving.scenario import Scenario

Answer = TypeVar("Answer")


def page(dashboard: Dashboard, _rest: str, query: Query) -> View:
    """Show the form, filled in with the fields of the address, or with the scenario of the result `run`."""
    given = dict(query)
    if "run" in given:
        path = dashboard.results.path(given["run"]) / "scenario.yaml"
        if not path.is_file():
            raise InputError(f"{given['run']} has no scenario.yaml")
        given = {"text": path.read_text(encoding="utf-8", errors="replace")}
    lists = {kind: catalog.names(kind) for kind in ("models", "devices", "engines", "calibrations")}
    values = {
        "given": given or trials.FORM["first"],
        "form": trials.FORM,
        "choices": {**lists, "formats": [str(each) for each in Format]},
    }
    return View(Report("Try a deployment"), template="try.html", values=values, scripts=("try.js",))


def trial(dashboard: Dashboard, _rest: str, query: Query) -> View:
    """Show the run of the typed scenario."""
    typed, result = _with(trials.simulated, dashboard, query)
    sections = run_sections(result.scenario, run_document(result), result.requests)
    deployment = result.scenario.deployment
    title = "" if deployment.pools else deployment_line(result.setup, deployment.replicas)
    lead = [model_line(result.setup), title, load_line(typed.scenario)]
    text, is_good = verdict(result.summary, result.scenario, result.requests)
    return View(noted(Report("Result", lead, sections, verdict=text, is_good=is_good), typed.launch))


def trial_document(dashboard: Dashboard, _rest: str, query: Query) -> Any:
    """Return what `windtunnel simulate --json` prints of the typed scenario."""
    typed, result = _with(trials.simulated, dashboard, query)
    return {**run_document(result), **typed.launch.document}


def sweep(dashboard: Dashboard, _rest: str, query: Query) -> View:
    """Show the typed scenario over its load."""
    typed, loads = _with(trials.swept, dashboard, query)
    text, is_good = verdict_of(capacity_document(loads.capacities))
    section = _sweep_section(loads)
    return View(noted(Report("Over the load", sections=[section], verdict=text, is_good=is_good), typed.launch))


def sweep_data(dashboard: Dashboard, _rest: str, query: Query) -> Any:
    """Document the typed scenario over its load."""
    typed, loads = _with(trials.swept, dashboard, query)
    return {**trials.sweep_document(loads), **typed.launch.document}


def _with(run: Callable[[Scenario], Answer], dashboard: Dashboard, query: Query) -> tuple[trials.Trial, Answer]:
    """Return the typed scenario and what `run` makes of it; one at a time."""
    typed = trials.trial_of(query, dashboard.results.folder)
    with dashboard.running:
        return typed, run(typed.scenario)


def save(dashboard: Dashboard, _rest: str, query: Query) -> View:
    """Save the typed scenario, or its run, below the folder."""
    with dashboard.running:
        name = trials.kept(query, dashboard.results.folder)
    address = link("run", name) if query.get("what") == "run" else ""
    return View(Report("Saved"), template="saved.html", values={"name": name, "address": address})


def _sweep_section(swept_load: trials.Sweep) -> Section:
    """Return the capacity, curves of latency and output over the load with the limits, and the same as a table."""
    points = [trials.point_of(probe) for probe in swept_load.probes]
    capacities = swept_load.capacities
    unit = "concurrent requests" if capacities.is_closed else load_unit(encode(capacities.scenario.workload))
    limits = {limit.metric: limit.most_s for limit in capacities.limits}
    drawn = [
        _over_load(points, f"load ({unit})", name, limits.get(name), capacities.load)
        for name in LATENCIES
        if f"{name}_p99_s" in points[0]
    ]
    loads, outputs = ([point[name] for point in points] for name in ("load", "output_tokens_per_s"))
    rates = Series("output", loads, outputs, "line")
    output = Chart(Axis(f"load ({unit})"), Axis("output tokens/s", low=0.0), [rates])
    rows = [
        {**point, "limits": "met" if point["holds"] else f"{limit_name(point['limited_by'])} not met"}
        for point in points
    ]
    columns = {unit: "{load:number}", **trials.FORM["loads"], "limits": "limits"}
    capacity = capacity_section(capacity_document(capacities))
    figures = Figures([*drawn, (output, "Output over the load")])
    return Section("Capacity", [*capacity.blocks, figures, table_of(rows, columns, left=0)])


def _over_load(
    points: Sequence[dict[str, Any]], across: str, name: str, limit_s: float | None, capacity: float
) -> tuple[Chart, str]:
    loads = [point["load"] for point in points]
    series = [Series(each, loads, [point[f"{name}_{each}_s"] for point in points], "line") for each in ("p50", "p99")]
    limits = [Limit("y", limit_s, "limit")] if limit_s is not None else []
    limits += [Limit("x", capacity, "capacity")] if capacity > 0 else []
    # Beyond the capacity a queue grows without bound: what matters is where the limit is crossed.
    highest = max(series[1].y) if limit_s is None else min(max(series[1].y), 2.5 * limit_s)
    y = Axis(LATENCIES[name], "s", low=0.0, high=highest)
    return Chart(Axis(across), y, series, limits), f"{LATENCIES[name]} over the load"
