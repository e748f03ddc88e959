"""A form for a scenario, simulated as it is changed or swept over its load; both can be saved."""

from collections.abc import Callable, Sequence
from html import escape
from itertools import pairwise
from typing import Any, TypeVar

from windtunnel import catalog
from windtunnel.dashboard import trial as trials
from windtunnel.dashboard.frame import Query, View, first, lines, link, problem
from windtunnel.dashboard.state import Dashboard
from windtunnel.errors import InputError
from windtunnel.model.precision import Format
from windtunnel.report.documents import run_document
from windtunnel.report.render.html import Section, cards, figures, table
from windtunnel.report.render.plots import Axis, Series, figure
from windtunnel.report.render.tables import number
from windtunnel.report.search.study import limit_name
from windtunnel.report.serving.curves import LATENCIES, SIZE, measured
from windtunnel.report.serving.page import distributions, summary_sections
from windtunnel.report.serving.setup import deployment_line, load_line, model_line
from windtunnel.serving.scenario import Scenario
from windtunnel.units import format_seconds

Answer = TypeVar("Answer")

GROUPS = {
    "Model and devices": ("model", "device", "tp", "pp", "ep", "attention_dp", "replicas", "quant", "kv_cache_dtype"),
    "Engine": (
        "engine",
        "engine_version",
        "max_num_seqs",
        "max_num_batched_tokens",
        "gpu_memory_utilization",
        "enable_prefix_caching",
        "calibration",
    ),
    "Requests": ("input_tokens", "output_tokens", "num_requests", "seed"),
}
FIRST = {
    "model": "llama-3.1-8b",
    "device": "h100_sxm",
    "input_tokens": "1024",
    "output_tokens": "256",
    "arrivals": "rate",
    "load": "8",
    "num_requests": "1000",
    "ttft_s": "500ms",
    "tpot_s": "50ms",
}
"""Values of an empty form."""
LISTS = {"model": "models", "device": "devices", "engine": "engines", "calibration": "calibrations"}
WIDE = ("model", "device", "calibration")


def page(dashboard: Dashboard, _rest: str, query: Query) -> View:
    """Show the form, filled in with the fields of the address, or with the scenario of the result `run`."""
    given = {name: first(query, name) for name in query}
    if "run" in given:
        path = dashboard.results.path(given["run"]) / "scenario.yaml"
        if not path.is_file():
            raise InputError(f"{given['run']} has no scenario.yaml")
        given = {"text": path.read_text(encoding="utf-8", errors="replace")}
    form = _form(given or FIRST)
    body = (
        f'<div class="split"><form id="trial" method="post" action="/trial">{form}</form><div id="result"></div></div>'
    )
    return View("Try a deployment", lead=body, scripts=("try.js",))


def trial(dashboard: Dashboard, _rest: str, query: Query) -> View:
    """Show the run of the typed scenario."""
    typed, result = _with(trials.simulated, dashboard, query)
    sections = summary_sections(result.scenario, run_document(result), result.requests)
    drawn = distributions(measured(result.requests), typed.scenario)
    sections.insert(1, Section("Distributions", figures(drawn)))
    deployments = result.scenario.deployment
    title = "" if deployments.pools else deployment_line(result.setup, deployments.replicas)
    return View(
        "Result", sections, lead=lines(model_line(result.setup), title, load_line(typed.scenario)) + _notes(typed)
    )


def trial_document(dashboard: Dashboard, _rest: str, query: Query) -> Any:
    """Return what `windtunnel simulate --json` prints of the typed scenario."""
    return run_document(_with(trials.simulated, dashboard, query)[1])


def sweep(dashboard: Dashboard, _rest: str, query: Query) -> View:
    """Show the typed scenario over its load."""
    typed, loads = _with(trials.swept, dashboard, query)
    return View("Over the load", [Section("Capacity", sweep_body(loads))], lead=_notes(typed))


def sweep_data(dashboard: Dashboard, _rest: str, query: Query) -> Any:
    """Document the typed scenario over its load."""
    return trials.sweep_document(_with(trials.swept, dashboard, query)[1])


def _with(run: Callable[[Scenario], Answer], dashboard: Dashboard, query: Query) -> tuple[trials.Trial, Answer]:
    """Return the typed scenario and what `run` makes of it; one at a time."""
    typed = trials.trial_of(query, dashboard.results.folder)
    with dashboard.running:
        return typed, run(typed.scenario)


def save(dashboard: Dashboard, _rest: str, query: Query) -> View:
    """Save the typed scenario, or its run, below the folder."""
    with dashboard.running:
        name = trials.kept(query, dashboard.results.folder)
    where = link("run", name) if first(query, "what") == "run" else ""
    shown = f'<a href="{where}">{escape(name)}</a>' if where else escape(name)
    return View("Saved", lead=f"<p>Written: {shown}</p>")


def _notes(typed: trials.Trial) -> str:
    return "".join(problem(remark, None) for remark in typed.remarks)


# ---------------------------------------------------------------------------------------------------------------- sweep


def sweep_body(swept_load: trials.Sweep) -> str:
    """Return the capacity, curves of latency and output over the load with the limits, and the same as a table."""
    points = [trials.point_of(probe) for probe in swept_load.probes]
    capacities = swept_load.capacities
    unit = "concurrent requests" if capacities.is_closed else "requests/s"
    sustained = capacities.streams[0]
    limited = "all that is sent" if sustained.beyond is None else limit_name(sustained.beyond.limited_by)
    shown = [(number(capacities.load), f"{unit} sustained"), (limited, "limited by")]
    limits = {limit.metric: limit.most_s for limit in capacities.limits}
    drawn = [
        _over_load(points, f"load ({unit})", name, limits.get(name), capacities.load)
        for name in LATENCIES
        if f"{name}_p99_s" in points[0]
    ]
    loads, outputs = ([point[name] for point in points] for name in ("load", "output_tokens_per_s"))
    rates = Series("output", loads, outputs, "line")
    output = figure([rates], Axis(f"load ({unit})"), Axis("output tokens/s", low=0.0), **SIZE)
    heads = (unit, "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99", "E2E p99", "output tokens/s", "limits")
    keys = ("ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s", "e2e_p99_s")
    rows = [
        [
            number(point["load"]),
            *(format_seconds(point[key]) if key in point else "" for key in keys),
            number(point["output_tokens_per_s"]),
            "met" if point["holds"] else f"{limit_name(point['limited_by'])} not met",
        ]
        for point in points
    ]
    return cards(shown) + figures([*drawn, (output, "Output over the load")]) + table(heads, rows, left=0)


def _over_load(
    points: Sequence[dict[str, Any]], across: str, name: str, limit_s: float | None, capacity: float
) -> tuple[str, str]:
    scale, unit = (1.0, "s") if points[0][f"{name}_p99_s"] >= 1 else (1e3, "ms")
    highest = max(point[f"{name}_p99_s"] for point in points) * scale
    if limit_s is not None:
        # Beyond the capacity a queue grows without bound: what matters is where the limit is crossed.
        highest = min(highest, 2.5 * limit_s * scale)
    series = []
    for statistic in ("p50", "p99"):
        curve = [(point["load"], point[f"{name}_{statistic}_s"] * scale) for point in points]
        shown = _below(curve, highest)
        series.append(Series(statistic, [load for load, _ in shown], [value for _, value in shown], "line"))
    if limit_s is not None:
        ends = [points[0]["load"], points[-1]["load"]]
        series.append(Series("limit", ends, [limit_s * scale] * 2, "dashes", colour="#b3261e"))
    if capacity > 0:
        series.append(Series("capacity", [capacity] * 2, [0.0, highest], "dashes", colour="currentColor"))
    drawn = figure(series, Axis(across), Axis(f"{LATENCIES[name]} ({unit})", low=0.0, high=highest), **SIZE)
    return drawn, f"{LATENCIES[name]} over the load"


def _below(curve: Sequence[tuple[float, float]], highest: float) -> list[tuple[float, float]]:
    """Return the curve up to its first crossing of `highest`."""
    shown = [curve[0]]
    for (x0, y0), (x1, y1) in pairwise(curve):
        if y1 > highest:
            share = (highest - y0) / (y1 - y0) if y1 > y0 else 0.0
            return [*shown, (x0 + share * (x1 - x0), highest)]
        shown.append((x1, y1))
    return shown


# ----------------------------------------------------------------------------------------------------------------- form


def _form(given: dict[str, str]) -> str:
    groups = "".join(
        _fieldset(title, "".join(_field(name, given) for name in names)) for title, names in GROUPS.items()
    )
    limits = "".join(_input(name, label, given, 'size="6" placeholder="none"') for name, label in trials.LIMITS.items())
    return "".join(
        [
            _pasted(given.get("text", "")),
            groups,
            _fieldset("Load", _load(given)),
            _fieldset("Limits, as 500ms", limits),
            BUTTONS,
            _fieldset("Keep", KEEP),
            *(_listed(kind, catalog.names(kind)) for kind in LISTS.values()),
            _listed("formats", [precision.value for precision in Format]),
        ]
    )


BUTTONS = '<p class="tools"><button>simulate</button><button formaction="/sweep" id="sweep">sweep the load</button></p>'
KEEP = (
    '<label>name <input name="name" size="20" placeholder="tried/8b-rate8"></label> '
    '<button formaction="/save" name="what" value="scenario">save scenario</button>'
    '<button formaction="/save" name="what" value="run">save run</button>'
)
EXAMPLE = "vllm serve meta-llama/Llama-3.1-8B -tp 2 --max-num-seqs 64"


def _fieldset(title: str, body: str) -> str:
    return f"<fieldset><legend>{escape(title)}</legend>{body}</fieldset>"


def _listed(name: str, values: Sequence[str]) -> str:
    return f'<datalist id="{name}">{"".join(f"<option>{escape(value)}</option>" for value in values)}</datalist>'


def _input(name: str, label: str, given: dict[str, str], more: str) -> str:
    value = escape(given.get(name, ""))
    return f'<label>{escape(label)} <input name="{name}" value="{value}" {more} autocomplete="off"></label> '


def _select(name: str, label: str, options: dict[str, str], chosen: str) -> str:
    shown = "".join(
        f'<option value="{value}"{" selected" if value == chosen else ""}>{escape(text)}</option>'
        for value, text in options.items()
    )
    return f'<label>{escape(label)} <select name="{name}">{shown}</select></label> '


def _pasted(text: str) -> str:
    return (
        f"<details{' open' if text else ''}><summary>Paste a scenario, or a line such as vllm serve ...</summary>"
        f'<textarea name="text" rows="14" spellcheck="false" aria-label="scenario" placeholder="{EXAMPLE}">'
        f"{escape(text)}</textarea><p>Fields that are filled in go over it.</p></details>"
    )


def _load(given: dict[str, str]) -> str:
    kinds = {"": "as in the text", "rate": "requests/s", "concurrency": "concurrent requests"}
    chosen = given.get("arrivals", "" if given.get("text") else "rate")
    slider = '<input type="range" id="slider" min="-1" max="3.7" step="0.01" aria-label="load, logarithmic">'
    return (
        _input("load", "load", given, 'size="7" inputmode="decimal"') + _select("arrivals", "", kinds, chosen) + slider
    )


def _field(name: str, given: dict[str, str]) -> str:
    if name == "enable_prefix_caching":
        options = {"": "the engine's", "true": "on", "false": "off"}
        return _select(name, trials.LABELS[name], options, given.get(name, ""))
    known = LISTS.get(name, "formats" if name in ("quant", "kv_cache_dtype") else "")
    listed = f'list="{known}"' if known else ""
    size = 24 if name in WIDE else 9 if known or name.endswith("tokens") or "_" in name else 5
    return _input(name, trials.LABELS[name], given, f'size="{size}" {listed}')
