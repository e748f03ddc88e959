"""A Model Context Protocol server: agents ask what the command line answers, and every number says how it is known.

Numbers are objects `{"value", "unit", "known"}`, with `interval_80` where there is one. `known` is, from the surest to
the least: `measured` (on that device, of that shape), `interpolated` (between measured shapes), `extrapolated` (beyond
them, or a roofline), each `calibrated` where the simulator's own error was fitted to measured runs.
"""

import asyncio
import inspect
import time
from collections.abc import Mapping
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import Field, ValidationError

from windtunnel import api, catalog
from windtunnel.errors import InputError, check_known
from windtunnel.formats.launch.read import read_launch_command
from windtunnel.formats.launch.scripts import start_remark
from windtunnel.metrics.limits import parse_limits
from windtunnel.metrics.summary import Distribution
from windtunnel.production.diagnose import diagnose as explain_latencies
from windtunnel.production.gate import gate_change, with_servers
from windtunnel.production.observed import read_requests
from windtunnel.report.diagnosis import diagnosis_document
from windtunnel.report.gate import gate_document
from windtunnel.report.render.json import version
from windtunnel.report.search.study import search_report
from windtunnel.report.serving.run import verdict
from windtunnel.report.serving.step import headline_of, step_document
from windtunnel.serving.engines.command_line import Reading
from windtunnel.serving.results import Result
from windtunnel.serving.scenario import Scenario, scenario_from
from windtunnel.serving.shorthand import raw_scenario
from windtunnel.serving.simulate import simulate as simulate_scenario

Command = Annotated[
    str | None, Field(description="How the server is started: `vllm serve ...`, docker run, a Kubernetes manifest.")
]
Device = Annotated[str, Field(description="A device of the catalog, such as h100_sxm; `catalog` lists them.")]
Deployment = Annotated[
    dict[str, Any] | None,
    Field(description="Settings by short name, over the command: model, tp, pp, ep, quant, engine, max_num_seqs, ..."),
]
Load = Annotated[
    dict[str, Any],
    Field(description="input_tokens, output_tokens, num_requests, and rate_per_s (Poisson) or concurrency (clients)."),
]
SloText = Annotated[str | None, Field(description="Limits of the requests: ttft_p90=2s,tpot_p99=50ms.")]

KNOWN = {"measured": "measured", "interpolated": "interpolated", "scaled": "extrapolated", "roofline": "extrapolated"}
"""How an operator's time is found -> how an answer calls it."""
KINDS = ("models", "devices", "nodes", "engines", "traces", "calibrations")
MOST_OPERATORS = 20
INSTRUCTIONS = (
    "Windtunnel predicts latency, throughput and cost of served language models. Ask `catalog` for names, `recommend` "
    "for what to serve on, `simulate` for one deployment, `explain` for where a step's time goes, `compare` for what a "
    "change does, `diagnose` for why a server is slow. Quote intervals and the `known` of a number."
)


SHAPES = {"dict_type": "an object", "list_type": "a list", "string_type": "a text"}
"""pydantic's name of an error -> what is needed; of other errors, a whole number."""
COMMANDS = {"before": "before_command", "after": "after_command", "deployment": "command"}
"""Argument -> that for a command."""


PROGRESS_S = 2.0
"""Seconds between notifications of progress: agents give up a call of which they hear nothing, some after a minute."""


async def _tell(context: Context[Any, Any], name: str) -> None:
    """Notify whoever asked for it that a tool is still at work, with the seconds so far."""
    started_s = time.monotonic()
    while True:
        await asyncio.sleep(PROGRESS_S)
        passed_s = time.monotonic() - started_s
        await context.report_progress(passed_s, message=f"{name}: {passed_s:.0f} s so far")


class _Server(MCPServer):
    async def call_tool(self, name: str, arguments: dict[str, Any], context: Context[Any, Any] | None = None) -> Any:
        """Call a tool; unknown arguments and those of a wrong shape are answered with a sentence and a hint."""
        known = next((list(inspect.signature(tool).parameters) for tool in TOOLS if _name(tool) == name), None)
        unknown = next((each for each in arguments if known is not None and each not in known), None)
        if unknown is not None:
            into = "; settings such as tp go into deployment" if "deployment" in (known or ()) else ""
            raise ToolError(f"{name} has no argument {unknown} (known: {', '.join(known or ())}{into})")
        settings = arguments.get("deployment")
        if "device" in (known or ()) and "device" not in arguments and isinstance(settings, dict):
            arguments = {**{name: settings[name] for name in settings if name == "device"}, **arguments}
        telling = None if context is None else asyncio.create_task(_tell(context, name))
        try:
            return await super().call_tool(name, arguments, context)
        except ToolError as error:
            if not isinstance(error.__cause__, ValidationError):
                raise
            raise ToolError("; ".join(_shape_text(wrong) for wrong in map(dict, error.__cause__.errors()))) from None
        finally:
            if telling is not None:
                telling.cancel()


def _shape_text(wrong: Mapping[str, Any]) -> str:
    """Say in what an argument is wrong, from pydantic's error."""
    name, value = ".".join(map(str, wrong["loc"])), wrong["input"]
    if wrong["type"] == "missing":
        return f"{name} is missing"
    if isinstance(value, str) and name in COMMANDS:
        return f"{name} is a text (a command goes into {COMMANDS[name]})"
    kind = {str: "a text", dict: "an object", list: "a list"}.get(value.__class__, repr(value))
    return f"{name} is {kind}; {SHAPES.get(wrong['type'], 'a whole number')} is needed"


def server() -> MCPServer:
    """Return the server with its tools."""
    made = _Server("windtunnel", instructions=INSTRUCTIONS, version=version())
    for tool in TOOLS:
        made.tool(name=_name(tool))(_refusing(tool))
    return made


def _name(tool: Any) -> str:
    return "catalog" if tool is names else str(tool.__name__)


def _refusing(tool: Any) -> Any:
    """Return a tool that answers wrong input with its sentence and hint."""

    @wraps(tool)
    def answer(**arguments: Any) -> dict[str, Any]:
        try:
            return dict(tool(**arguments))
        except InputError as error:
            raise ToolError(f"{error.message}{f' ({error.hint})' if error.hint else ''}") from None

    return answer


def simulate(
    device: Device, load: Load, command: Command = None, deployment: Deployment = None, slo: SloText = None
) -> dict[str, Any]:
    """Predict latency, throughput and cost of one deployment under a load, and whether it holds its SLO."""
    scenario, server = _described(device, load, command, deployment, slo)
    result = simulate_scenario(scenario)
    sentence, holds = verdict(result.summary, result.scenario, result.requests)
    holds = holds and not server.not_starting
    return _of_server(server, {"verdict": sentence, "holds_slo": holds, **_figures(result)})


def recommend(
    model: Annotated[str, Field(description="A model of the catalog, or a config.json.")],
    devices: Annotated[list[str], Field(description="Devices to choose from.")],
    slo: Annotated[str, Field(description="Limits that the requests must keep: ttft_p90=2s,tpot_p99=50ms.")],
    load: Annotated[dict[str, Any], Field(description="input_tokens, output_tokens; rate_per_s sizes the fleet.")],
) -> dict[str, Any]:
    """Say what to serve a model on, and what it costs: searches formats, parallelism and settings on each device."""
    options = {name: value for name, value in load.items() if name != "rate_per_s"}
    evidence = api.recommend(model, devices, slo, load.get("rate_per_s"), **options)
    report, outcome = search_report(evidence), evidence.study.outcomes[0]
    best = [
        {"deployment": evidence.study.point(index).title, "figures": dict(outcome.mean(index).figures)}
        for index in outcome.ranking[:5]
    ]
    return {
        "verdict": report.verdict,
        "best": best,
        "known": "extrapolated from simulations; `simulate` gives intervals",
    }


def explain(
    device: Device,
    batch: Annotated[int, Field(description="Requests that decode one token.")] = 64,
    context: Annotated[int, Field(description="Tokens that each of them attends to.")] = 2048,
    prefill_tokens: Annotated[int, Field(description="Prompt tokens computed in the step.")] = 0,
    command: Command = None,
    deployment: Deployment = None,
) -> dict[str, Any]:
    """Show where the time of one forward step goes, operator by operator, and what bounds it."""
    load = {"input_tokens": 1, "output_tokens": 1, "concurrency": 1}
    scenario, server = _described(device, load, command, deployment, None)
    document = step_document(api.explain(scenario, batch, context, prefill_tokens))
    operators = sorted(document["operators"], key=lambda operator: -operator["total_s"])
    answer = {
        "verdict": headline_of(document),
        "step": _number(document["step_s"], "s", _shares(document["seconds_by_coverage"])),
        "operators": [
            {
                "name": operator["name"],
                "count": operator["count"],
                "total": _number(operator["total_s"], "s", {KNOWN[operator["coverage"]]: 1.0}),
                "bound_by": operator["bound_by"],
                "source": operator["source"],
            }
            for operator in operators[:MOST_OPERATORS]
        ],
        "host": _number(document["host_s"], "s", {"extrapolated": 1.0}),
    }
    return _of_server(server, answer)


def compare(
    device: Device,
    load: Load,
    before_command: Command = None,
    before: Deployment = None,
    after_command: Command = None,
    after: Deployment = None,
    slo: SloText = None,
) -> dict[str, Any]:
    """Say what a change of a deployment does to latency and cost under the same requests, and whether to make it."""
    was, old_server = _described(device, load, before_command, before, slo, ("before_command", "before"))
    becomes, server = _described(device, load, after_command, after, slo, ("after_command", "after"))
    old, new = simulate_scenario(was), simulate_scenario(becomes)
    gate = with_servers(gate_change(old, new, parse_limits(slo) if slo else ()), server, old_server)
    return {**gate_document(gate), "before": _figures(old), "after": _figures(new)}


def diagnose(
    requests: Annotated[str, Field(description="Recorded requests: a run's folder, .parquet, .csv, .jsonl or .json.")],
    device: Device,
    command: Command = None,
    deployment: Deployment = None,
    before: Annotated[list[str] | None, Field(description="Earlier, healthy runs of the same deployment.")] = None,
) -> dict[str, Any]:
    """Say why a server is slow, from its recorded requests, and what to change."""
    load = {"input_tokens": 1, "output_tokens": 1, "rate_per_s": 1.0}
    scenario, server = _described(device, load, command, deployment, None)
    earlier = [read_requests(Path(run)) for run in before or ()]
    diagnosis = explain_latencies(scenario, read_requests(Path(requests)), earlier)
    return _of_server(server, diagnosis_document(diagnosis))


def names(kind: Annotated[str, Field(description="models, devices, nodes, engines, traces or calibrations.")]) -> Any:
    """List what the catalog has of a kind."""
    check_known(kind, KINDS, f"the catalog has no {kind!r}")
    return {kind: list(catalog.names(kind))}


TOOLS = (simulate, recommend, explain, compare, diagnose, names)


def _described(
    device: str,
    load: Mapping[str, Any],
    command: str | None,
    deployment: Mapping[str, Any] | None,
    slo: str | None,
    names: tuple[str, str] = ("command", "deployment"),
) -> tuple[Scenario, Reading]:
    """Return the scenario of a tool's arguments, and the server that its command starts; `names` are the arguments'."""
    server = Reading() if command is None else read_launch_command(command)
    options = {"device": device, **(deployment or {}), **load}
    if "model" not in {*server.raw, *options}:
        hint = f'give `{names[0]}`, or `{names[1]}` with a model: {{"model": "llama-3.1-8b"}}'
        raise InputError("no model is given", hint)
    rate, clients, trace = (options.pop(name, None) for name in ("rate_per_s", "concurrency", "trace"))
    scenario = scenario_from(raw_scenario(server.raw, options, rate, clients, trace, slo))
    if server.taken and (sentence := start_remark(scenario, server)):
        server.not_starting.append(sentence)
    return scenario, server


def _of_server(server: Reading, answer: dict[str, Any]) -> dict[str, Any]:
    """Return an answer that says first why the server would not start, and which of its options are not predicted."""
    verdict = " ".join([*(f"{sentence}." for sentence in server.not_starting), answer["verdict"]])
    stops = {"would_not_start": server.not_starting} if server.not_starting else {}
    return {**answer, "verdict": verdict, **stops, **({"not_predicted": server.remarks} if server.remarks else {})}


def _figures(result: Result) -> dict[str, Any]:
    """Return the figures of a simulation, each with its unit, its interval and how it is known."""
    summary, shares = result.summary, _shares({how.value: share for how, share in result.coverage.items()})
    if result.setup.calibration_name:
        shares = {"calibrated": 1.0, **shares}
    figures: dict[str, Any] = {}
    for name in ("ttft", "tpot", "e2e"):
        values: Distribution | None = getattr(summary, f"{name}_s")
        if values is not None:
            figures[name] = {at: _number(getattr(values, at), "s", shares) for at in ("mean", "p50", "p90", "p99")}
            if name in result.intervals:
                figures[name]["mean"]["interval_80"] = [result.intervals[name].low, result.intervals[name].high]
    rate = summary.throughput
    figures["throughput"] = _number(rate.output_tokens_per_s, "output tokens/s", shares)
    if "throughput" in result.intervals:
        interval = result.intervals["throughput"]
        figures["throughput"]["interval_80"] = [interval.low, interval.high]
    figures["requests"] = _number(rate.requests_per_s, "requests/s", shares)
    if summary.cost is not None:
        figures["cost"] = _number(summary.cost.usd_per_million_output_tokens, "USD/M output tokens", shares)
    figures["devices"] = summary.num_devices
    figures["calibration"] = result.setup.calibration_name or f"none: {result.setup.not_calibrated}"
    figures["tables"] = dict(result.sources)
    return figures


def _shares(coverage: Mapping[str, float]) -> dict[str, float]:
    """Return how a time is known -> share, of seconds or shares by coverage."""
    total = sum(coverage.values()) or 1.0
    shares: dict[str, float] = {}
    for how, value in coverage.items():
        shares[KNOWN[how]] = shares.get(KNOWN[how], 0.0) + value / total
    return shares


def _number(value: float, unit: str, shares: Mapping[str, float]) -> dict[str, Any]:
    """Return a number with its unit and how it is known: `calibrated, 92% interpolated, 8% measured`."""
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    parts = [how if share >= 1 else f"{min(round(100 * share), 99)}% {how}" for how, share in ordered]
    return {"value": value, "unit": unit, "known": ", ".join(part for part in parts if not part.startswith("0% "))}
