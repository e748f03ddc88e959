"""The tools that agents call, in this process and over a pipe."""

import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp")

from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client

import windtunnel as wt
from windtunnel.agents import server as module
from windtunnel.agents.server import server

LOAD = {"input_tokens": 64, "output_tokens": 8, "concurrency": 4, "num_requests": 20}
SERVER = {"device": "h100_sxm", "command": "vllm serve qwen2.5-0.5b --swap-space 4", "load": LOAD}

Ask = Callable[..., Any]


def call(source: Any, tool: str, arguments: dict[str, Any]) -> Any:
    async def ask() -> Any:
        async with Client(source) as client:
            return await client.call_tool(tool, arguments)

    return asyncio.run(ask())


def answer(tool: str, **arguments: Any) -> dict[str, Any]:
    result = call(server(), tool, arguments)
    assert not result.is_error, result.content
    document: dict[str, Any] = json.loads(result.content[0].text)
    return document


def test_every_tool_says_what_it_takes() -> None:
    async def tools() -> Any:
        async with Client(server()) as client:
            return (await client.list_tools()).tools

    listed = {tool.name: tool for tool in asyncio.run(tools())}
    assert sorted(listed) == ["catalog", "compare", "diagnose", "explain", "recommend", "simulate"]
    assert all(tool.description for tool in listed.values())
    assert "A device of the catalog" in str(listed["simulate"].input_schema)


@pytest.mark.full
def test_a_simulation_leads_with_a_verdict_and_labels_every_number() -> None:
    document = answer("simulate", **SERVER, slo="tpot_p99=20ms")
    assert document["holds_slo"] is True
    assert document["verdict"].startswith("Holds the SLO")
    assert "calibrated" in document["ttft"]["p99"]["known"]
    low, high = document["tpot"]["mean"]["interval_80"]
    assert low <= document["tpot"]["mean"]["value"] <= high
    assert "--swap-space" in " ".join(document["not_predicted"])


def test_operators_of_a_step_add_up_and_say_how_each_is_known() -> None:
    document = answer("explain", device="h100_sxm", deployment={"model": "qwen2.5-0.5b"}, batch=8)
    assert sum(operator["total"]["value"] for operator in document["operators"]) <= document["step"]["value"]
    kinds = {operator["total"]["known"] for operator in document["operators"]}
    assert kinds <= {"measured", "interpolated", "extrapolated"}
    assert kinds


def test_a_change_is_judged_on_the_same_requests() -> None:
    slower = SERVER["command"] + " --max-num-seqs 1"
    document = answer("compare", device="h100_sxm", load=LOAD, before_command=SERVER["command"], after_command=slower)
    assert document["passes"] is False
    assert document["after"]["e2e"]["p90"]["value"] > document["before"]["e2e"]["p90"]["value"]


TOO_LONG = SERVER["command"] + " --max-model-len 9999999 --not-of-vllm 3"


@pytest.mark.parametrize(
    ("tool", "arguments"), [("simulate", {"load": LOAD, "slo": "e2e_p99=1h"}), ("explain", {"batch": 4})]
)
def test_a_server_that_would_not_start_is_said_first(tool: str, arguments: dict[str, Any]) -> None:
    document = answer(tool, device="h100_sxm", command=TOO_LONG, **arguments)
    assert document["verdict"].startswith("vllm would not start: --max-model-len is 9,999,999")
    assert document["would_not_start"]
    assert not document.get("holds_slo")
    assert "unknown, ignored: --not-of-vllm" in document["not_predicted"]


@pytest.mark.full
def test_a_change_after_which_the_server_would_not_start_is_not_to_be_made() -> None:
    commands = {"before_command": SERVER["command"], "after_command": TOO_LONG}
    document = answer("compare", device="h100_sxm", load=LOAD, **commands)
    assert document["passes"] is False
    assert document["verdict"].startswith("Fails: vllm would not start")
    assert "unknown, ignored: --not-of-vllm" in document["remarks"]


@pytest.mark.full
def test_a_recorded_run_is_diagnosed(tmp_path: Path) -> None:
    options = {"model": "qwen2.5-0.5b", "device": "h100_sxm", "max_cudagraph_capture_size": 0}
    settings = {"deployment.engine.max_cudagraph_capture_size": options.pop("max_cudagraph_capture_size")}
    load = {"rate_per_s": 20.0, "input_tokens": 128, "output_tokens": 32, "num_requests": 40}
    wt.simulate(wt.scenario(**options, **load, settings=settings)).requests.write_parquet(tmp_path / "requests.parquet")
    document = answer("diagnose", requests=str(tmp_path), device="h100_sxm", command=SERVER["command"])
    assert document["is_slow"]
    assert document["causes"][0]["cause"] == "eager"


def test_the_catalog_lists_names() -> None:
    assert "h100_sxm" in answer("catalog", kind="devices")["devices"]


@pytest.mark.parametrize(
    ("tool", "arguments", "message"),
    [
        ("simulate", {**SERVER, "device": "h1000"}, "did you mean h100"),
        ("simulate", {"deployment": {"model": "qwen2.5-0.5b", "device": "h1000"}, "load": LOAD}, "did you mean h100"),
        ("catalog", {"kind": "planets"}, "the catalog has no 'planets'"),
        ("simulate", {**SERVER, "load": {**LOAD, "rate_per_second": 3}}, "rate_per_second"),
        ("simulate", {"device": "h100_sxm"}, "load is missing"),
        (
            "simulate",
            {**SERVER, "tp": 4},
            "simulate has no argument tp (known: device, load, command, deployment, slo; ",
        ),
        ("catalog", {"kind": "devices", "name": "h100"}, "catalog has no argument name (known: kind)"),
        ("simulate", {"device": "h100_sxm", "load": LOAD}, "no model is given (give `command`, or `deployment`"),
        (
            "compare",
            {"device": "h100_sxm", "load": LOAD, "before_command": SERVER["command"]},
            "no model is given (give `after_command`, or `after` with a model",
        ),
        (
            "simulate",
            {"load": LOAD, "slo": {"ttft_p99": "1ms"}},
            "device is missing; slo is an object; a text is needed",
        ),
        ("simulate", {**SERVER, "deployment": "tp=2"}, "deployment is a text (a command goes into command)"),
        ("compare", {"device": "a", "load": LOAD, "before": "vllm serve x"}, "a command goes into before_command"),
        ("explain", {"device": "h100_sxm", "batch": "many"}, "batch is a text; a whole number is needed"),
        ("recommend", {"model": 5, "devices": [7], "slo": "", "load": []}, "devices.0 is 7; a text is needed"),
    ],
)
def test_wrong_input_is_answered_with_its_sentence(tool: str, arguments: dict[str, Any], message: str) -> None:
    result = call(server(), tool, arguments)
    assert result.is_error
    assert message in result.content[0].text
    assert "pydantic" not in result.content[0].text


@pytest.mark.full
def test_the_command_serves_over_its_pipe() -> None:
    parameters = StdioServerParameters(command=sys.executable, args=["-m", "windtunnel", "mcp"], env=dict(os.environ))
    result = call(stdio_client(parameters), "catalog", {"kind": "engines"})
    assert "vllm" in json.loads(result.content[0].text)["engines"]


def test_a_long_answer_says_that_it_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PROGRESS_S", 0.01)
    told: list[tuple[float, str | None]] = []

    async def hear(progress: float, _total: float | None, message: str | None) -> None:
        told.append((progress, message))

    async def ask() -> Any:
        async with Client(server()) as client:
            return await client.call_tool("simulate", SERVER, progress_callback=hear)

    assert not asyncio.run(ask()).is_error
    assert [progress for progress, _ in told] == sorted({progress for progress, _ in told})
    assert told[0][1] == "simulate: 0 s so far"
