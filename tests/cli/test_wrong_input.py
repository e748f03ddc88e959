"""Wrong scenarios: each ends with exit code 2, one sentence, a hint where one helps, and nothing written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

if TYPE_CHECKING:
    from cli.conftest import Command

GOOD = {
    "--model": "meta-llama/Llama-3.1-8B",
    "--device": "h100_sxm",
    "--input-tokens": "64",
    "--output-tokens": "8",
    "--concurrency": "4",
}
SCENARIO = {
    "model": "meta-llama/Llama-3.1-8B",
    "deployment": {"device": "h100_sxm"},
    "workload": {
        "arrivals": {"type": "poisson", "rate_per_s": 5.0},
        "input_tokens": 64,
        "output_tokens": 8,
        "num_requests": 10,
    },
}
LLAMA_70B = "meta-llama/Llama-3.1-70B"
CASES = {
    "unknown model": (
        {"--model": "meta-llama/Lama-3.1-8B"},
        "no model 'meta-llama/Lama-3.1-8B'",
        "meta-llama/Llama-3.1-8B",
    ),
    "unknown device": ({"--device": "h100sxm"}, "no device 'h100sxm'", "h100_sxm"),
    "unknown node": ({"--node": "dgx_h10"}, "no node 'dgx_h10'", "dgx_h100"),
    "unknown engine": ({"--engine": "vlm"}, "no engine 'vlm'", "did you mean vllm"),
    "engine too old": ({"--engine-version": "0.1.0"}, "0.1.0 is older than", ""),
    "no model": ({"--model": None}, "--model is missing", "catalog models"),
    "no device": ({"--device": None}, "--device is missing", "catalog devices"),
    "no load": ({"--concurrency": None}, "--rate, --concurrency or --trace is missing", ""),
    "no lengths": ({"--input-tokens": None}, "--input-tokens is missing", ""),
    "tp that splits a head": ({"--tp": "3"}, "tp = 3 does not divide the 32 attention heads", "possible: 1, 2, 4, 8"),
    "tp of zero": ({"--tp": "0"}, "tp is 0; at least 1 is needed", ""),
    "more stages than layers": ({"--pp": "64"}, "pp = 64, but meta-llama/Llama-3.1-8B has 32 layers", ""),
    "experts that are not there": ({"--ep": "2", "--tp": "2"}, "has no experts", "leave ep out"),
    "weights that do not fit": ({"--model": LLAMA_70B}, "does not fit NVIDIA H100", "more devices"),
    "request above the KV cache": (
        {"--device": "l4", "--output-tokens": "60000"},
        "request 0 of 60,064 tokens needs",
        "fp8",
    ),
    "request above the context": ({"--input-tokens": "200000"}, "accepts 131,072", "shorten"),
    "misspelt KV format": ({"--kv-cache-dtype": "fp88"}, "--kv-cache-dtype is 'fp88'", "did you mean fp8"),
    "unknown weight format": ({"--quant": "fp7"}, "--quant is 'fp7'", "fp8"),
    "memory share above one": ({"--gpu-memory-utilization": "1.5"}, "gpu_memory_utilization", ""),
    "zero requests": ({"--num-requests": "0"}, "num_requests is 0; from 1 to", ""),
    "zero concurrency": ({"--concurrency": "0"}, "concurrency is 0; from 1 to", ""),
    "negative rate": ({"--concurrency": None, "--rate": "-1"}, "rate_per_s is -1; more than 0 is needed", ""),
    "rate that is no number": ({"--concurrency": None, "--rate": "nan"}, "--rate is nan; a finite number", ""),
    "rate of zero under a cap": ({"--rate": "0"}, "rate_per_s is 0; more than 0 is needed", ""),
    "rate below all others": ({"--concurrency": None, "--rate": "-inf"}, "--rate is -inf; a finite number", ""),
    "prompt of nothing": ({"--input-tokens": "0"}, "input_tokens is 0; from 1 to", ""),
    "table that is none": ({"--set": "deployment=3"}, "$.deployment is 3; a table of keys", ""),
    "estimator of no profile": ({"--estimator": "forest"}, "--profile is missing", ""),
    "lengths that are none": ({"--input-tokens": "1k"}, "--input-tokens: '1k' is neither", "lognormal"),
    "lengths upside down": ({"--input-tokens": "9-5"}, "min_tokens is 9, above max_tokens", ""),
    "wrong unit": ({"--slo": "ttft=2parsec"}, "--slo ttft: '2parsec' has the unit 'parsec'; allowed: ns, us", ""),
    "unknown limit": ({"--slo": "tfft=2s"}, "no limit 'tfft'", "did you mean ttft"),
    "limit without a time": ({"--slo": "ttft"}, "--slo: 'ttft' is not of the form", "ttft=2s"),
    "setting without a value": ({"--set": "seed"}, "--set: 'seed' is not of the form path=value", "for instance"),
    "unknown setting": ({"--set": "workload.num_request=5"}, "unknown key $.workload.num_request", "num_requests"),
    "setting that is not YAML": ({"--set": "seed=[1"}, "the value of 'seed=[1' is not valid YAML", ""),
    "negative seed": ({"--seed": "-1"}, "seed", ""),
    "missing trace": ({"--concurrency": None, "--trace": "gone.csv"}, "no file gone.csv", ""),
    "unknown catalog trace": (
        {"--input-tokens": None, "--trace": "azure2023_cod"},
        "no trace 'azure2023_cod'",
        "azure2023_code",
    ),
    "missing scenario": ({"": "scenaro.yaml"}, "no file scenaro.yaml", ""),
}


def options(changes: dict[str, str | None]) -> list[str]:
    given = GOOD | changes
    return [word for name, value in given.items() if value is not None for word in (name, value) if word]


def refused(windtunnel: Command, arguments: list[str], message: str, hint: str) -> None:
    folder = Path.cwd()
    before = sorted(folder.rglob("*"))
    done = windtunnel("simulate", *arguments, "--out", "run")
    lines = done.stderr.splitlines()
    assert (done.code, done.stdout) == (2, ""), done.stderr
    assert lines[0].startswith("error: ")
    assert message in lines[0]
    assert len(lines) == 1 or (len(lines) == 2 and lines[1].startswith("hint: "))
    assert hint in "".join(lines[1:])
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(("changes", "message", "hint"), CASES.values(), ids=CASES)
def test_a_wrong_option_is_refused(
    windtunnel: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, str | None],
    message: str,
    hint: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    refused(windtunnel, options(changes), message, hint)


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("model: [", "scenario.yaml is not valid YAML at line", ""),
        ("- model", "scenario.yaml is not a scenario", "examples/"),
        ("", "scenario.yaml is not a scenario", "examples/"),
        ("\x00", "scenario.yaml is not valid YAML", ""),
    ],
    ids=["broken", "a list", "empty", "binary"],
)
def test_a_file_that_is_no_scenario_is_refused(
    windtunnel: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str, hint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("scenario.yaml").write_text(text)
    refused(windtunnel, ["scenario.yaml"], message, hint)


@pytest.mark.parametrize(
    ("path", "value", "message", "hint"),
    [
        ("workload.arrivals.rate_per_s", float("nan"), "$.workload.arrivals.rate_per_s is nan", ""),
        ("workload.arrivals.type", "poison", "$.workload.arrivals.type is 'poison'", "did you mean poisson"),
        ("deployment.paralelism", {"tp": 2}, "unknown key $.deployment.paralelism", "did you mean parallelism"),
        ("deployment.device", 100, "$.deployment.device is 100; text is needed", "put it in quotes"),
        ("deployment.engine", {"host": {"step_s": "2 miles"}}, "$.deployment.engine.host.step_s: '2 miles'", ""),
        ("workload", {"trace": {"path": "empty.csv"}}, "empty.csv is empty", ""),
        (
            "workload",
            {"trace": {"path": "short.csv"}},
            "short.csv has the columns of no known trace: windtunnel lacks output_tokens",
            "columns",
        ),
    ],
)
def test_a_wrong_value_in_a_file_is_named_by_its_path(
    windtunnel: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, value: Any, message: str, hint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.csv").write_text("")
    Path("short.csv").write_text("arrival_s,input_tokens\n0,10\n")
    scenario = yaml.safe_load(yaml.safe_dump(SCENARIO))
    *parents, last = path.split(".")
    table = scenario
    for name in parents:
        table = table[name]
    table[last] = value
    Path("scenario.yaml").write_text(yaml.safe_dump(scenario))
    refused(windtunnel, ["scenario.yaml"], message.replace("`", ""), hint)


def test_a_file_in_the_way_is_refused(windtunnel: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run").write_text("mine")
    refused(windtunnel, options({}), "run is a file", "")
