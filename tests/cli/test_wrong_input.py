"""Wrong scenarios: each ends with exit code 2, one sentence, a hint where one helps, and nothing written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from windtunnel import catalog

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
BILLION = "a0: &a0 [1, 1]\n" + "".join(f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 10)}]\n" for i in range(40))
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
    "no load": ({"--concurrency": None}, "--rate, --concurrency or --trace is missing", "--concurrency 16"),
    "no lengths": ({"--input-tokens": None}, "--input-tokens is missing", "--input-tokens 1024"),
    "part of a name": ({"--model": "mistral-small-24b"}, "no model", "did you mean mistralai/Mistral-Small-24B"),
    "tp that splits a head": ({"--tp": "3"}, "--tp 3 does not divide the 32 attention heads", "possible: 1, 2, 4, 8"),
    "tp that is set": ({"--set": "engine.name=sglang", "--tp": "3"}, "--tp 3 does not divide", "possible: 1, 2"),
    "batches of other sizes": (
        {"--max-num-seqs": "256", "--max-num-batched-tokens": "64"},
        "--max-num-seqs is 256, more than --max-num-batched-tokens, which is 64",
        "a token for every running request",
    ),
    "ep beyond tp": ({"--ep": "4", "--tp": "2"}, "--ep 4 does not divide --tp x --attention-dp = 2", ""),
    "tp of zero": ({"--tp": "0"}, "tp is 0; at least 1 is needed", ""),
    "more stages than layers": ({"--pp": "64"}, "--pp 64, but meta-llama/Llama-3.1-8B has 32 layers", ""),
    "experts that are not there": ({"--ep": "2", "--tp": "2"}, "has no experts", "leave --ep out"),
    "weights that do not fit": ({"--model": LLAMA_70B}, "does not fit NVIDIA H100", "more devices"),
    "request above the KV cache": (
        {"--device": "l4", "--output-tokens": "60000"},
        "request 0 of 60,064 tokens needs",
        "fp8",
    ),
    "request above the context": ({"--input-tokens": "200000"}, "accepts 131,072", "shorten"),
    "misspelt KV format": ({"--kv-cache-dtype": "fp88"}, "--kv-cache-dtype is 'fp88'", "did you mean fp8"),
    "unknown weight format": ({"--quant": "fp7"}, "--quant is 'fp7'", "fp8"),
    "memory share above one": ({"--gpu-memory-utilization": "1.5"}, "--gpu-memory-utilization", ""),
    "zero requests": ({"--num-requests": "0"}, "--num-requests is 0; from 1 to", ""),
    "zero concurrency": ({"--concurrency": "0"}, "concurrency is 0; from 1 to", ""),
    "negative rate": ({"--concurrency": None, "--rate": "-1"}, "--rate is -1; more than 0 requests/s", "--rate 2"),
    "rate that is no number": (
        {"--concurrency": None, "--rate": "nan"},
        "--rate is nan; more than 0 requests/s",
        "0.5",
    ),
    "rate of zero under a cap": ({"--rate": "0"}, "--rate is 0; more than 0 requests/s", "0.5"),
    "rate below all others": (
        {"--concurrency": None, "--rate": "-inf"},
        "--rate is -inf; more than 0 requests/s",
        "0.5",
    ),
    "prompt of nothing": ({"--input-tokens": "0"}, "--input-tokens is 0; from 1 to", ""),
    "table that is none": ({"--set": "deployment=3"}, "$.deployment is 3; a table of keys", ""),
    "estimator of no profile": ({"--estimator": "forest"}, "--profile is missing", ""),
    "lengths that are none": ({"--input-tokens": "1x"}, "--input-tokens: '1x' is neither", "lognormal"),
    "lengths upside down": ({"--input-tokens": "9-5"}, "min_tokens is 9, above max_tokens", ""),
    "wrong unit": ({"--slo": "ttft=2parsec"}, "--slo ttft: '2parsec' has the unit 'parsec'; allowed: ns, us", ""),
    "unknown limit": ({"--slo": "tfft=2s"}, "no limit 'tfft'", "did you mean ttft"),
    "limit without a time": ({"--slo": "ttft"}, "--slo: 'ttft' is not of the form", "ttft_p90=2s"),
    "limit of tokens": ({"--slo": "itl_p99=20ms"}, "--slo: itl_p99 is not a limit that a request keeps", "ttft_p90=2s"),
    "two of one latency": ({"--slo": "ttft_p50=1s,ttft_p99=2s"}, "--slo: TTFT has two limits", "capacity keeps both"),
    "mean for requests": ({"--slo": "ttft_mean=1s"}, "--slo: ttft_mean is not a limit that a request keeps", ""),
    "percentile of nobody": ({"--slo": "ttft_p0=1s"}, "--slo ttft_p0: p0 is no percentile of a limit", "p90"),
    "setting without a value": ({"--set": "seed"}, "--set: 'seed' is not of the form path=value", "for instance"),
    "unknown setting": ({"--set": "workload.num_request=5"}, "unknown key $.workload.num_request", "num_requests"),
    "setting that is not YAML": ({"--set": "seed=[1"}, "the value of 'seed=[1' is not valid YAML", ""),
    "negative seed": ({"--seed": "-1"}, "--seed is -1; from 0", ""),
    "node of another device": ({"--node": "dgx_a100"}, "holds a100_sxm, not h100_sxm", "leave --node out"),
    "embeddings with outputs": ({"--task": "embed"}, "have no output; leave --output-tokens out", ""),
    "degrees for the weights": ({"--model": LLAMA_70B, "--tp": "1"}, "over --tp 1, --pp 1", "--tp x --pp of 2 or more"),
    "missing trace": ({"--concurrency": None, "--trace": "gone.csv"}, "no file gone.csv", ""),
    "unknown catalog trace": (
        {"--input-tokens": None, "--trace": "azure2023_cod"},
        "no trace 'azure2023_cod'",
        "azure2023_code",
    ),
    "model of a long name": ({"--model": "x" * 300}, f"there is no model '{'x' * 300}'", "catalog models"),
    "calibration of a long name": ({"--calibration": "x" * 300}, "x... is too long for the name of a file", "shorten"),
    "output of a long name": ({"--html": "x" * 300}, "x... is too long for the name of a file", "shorten"),
    "replicas without end": ({"--replicas": "10000000000"}, "replicas is 10000000000; from 1 to 100000", ""),
    "a number without end": ({"--replicas": "9" * 300}, "--replicas is 1e+300; at most 9.22e+18 is needed", ""),
    "missing scenario": ({"": "scenaro.yaml"}, "no file scenaro.yaml", ""),
    "model for a scenario": ({"": "qwen3-32b"}, "no file qwen3-32b", "--model Qwen/Qwen3-32B"),
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
        ("- model", "scenario.yaml is not a scenario", "windtunnel init serving"),
        ("", "scenario.yaml is not a scenario", "windtunnel init serving"),
        ("{device: l4, global_batch: 8}", "describes a training job, not a scenario", "windtunnel train"),
        ("{model: a, vary: {tp: [1]}}", "is a search space, not a scenario", "windtunnel search"),
        ("{summary: {}, scenario: {}}", "is a result, not a scenario", "scenario.yaml beside it"),
        ("\x00", "scenario.yaml is not valid YAML", ""),
        ("a: &a\n  b: *a", "not valid YAML at line 1: a value holds itself", "cut off"),
        ("[" * 50_000, "is not valid YAML at line 1: exceeded maximum nesting depth", "cut off"),
        (f"a: {'[' * 900}{']' * 900}", "nested too deeply", "cut off"),
        (f"a: &a {'[' * 60}{']' * 60}\nb: {'[' * 60}*a{']' * 60}", "at line 2: it is nested too deeply", "cut off"),
        (BILLION, "its anchors stand for more than 10,000,000 values", "cut off"),
        ("a: !!int x", "a value does not fit its tag", "cut off"),
        ("a: !!bool x", "a value does not fit its tag", "cut off"),
        ("a: !!timestamp x", "a value does not fit its tag", "cut off"),
        ("a: !!set [1]", "a value does not fit its tag", "cut off"),
        (f"a: {'9' * 5000}", "a value does not fit its tag", "cut off"),
    ],
    ids=[
        *(
            "broken",
            "a list",
            "empty",
            "a job",
            "a space",
            "a result",
            "binary",
            "in itself",
            "very deep",
            "deep",
            "deep by an alias",
            "billions",
        ),
        *("no int", "no bool", "no time", "no set", "too many digits"),
    ],
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
        ("deployment.replicas", "2026-13-45", "$.deployment.replicas is '2026-13-45'; a whole number is needed", ""),
        ("model", "a\0b", r"$.model is 'a\x00b', which has characters that no text has", ""),
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


@pytest.mark.parametrize("text", ["2026-13-45", "2026-01-31"])
def test_a_date_is_a_text(windtunnel: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("scenario.yaml").write_text(f"model: llama-3.1-8b\ndeployment: {{device: h100_sxm, replicas: {text}}}\n")
    refused(windtunnel, ["scenario.yaml"], f"$.deployment.replicas is '{text}'; a whole number is needed", "")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"vocab_size": 2**63}, "vocab_size is 9223372036854775808, which is not plausible; at most 1,000,000,000"),
        ({"hidden_size": 10**25}, "which is not plausible"),
        ("[" * 100_000, "config.json is not valid JSON"),
        ('{"a":' * 100_000, "config.json is not valid JSON"),
    ],
)
def test_an_absurd_model_is_refused(
    windtunnel: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: Any, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    published = catalog.model_config("meta-llama/Llama-3.1-8B")
    Path("config.json").write_text(config if isinstance(config, str) else json.dumps(published | config))
    for verb in ("simulate", "train"):
        done = windtunnel(verb, *(options({"--model": "./config.json"}) if verb == "simulate" else JOB))
        assert done.code == 2
        assert message in done.stderr


JOB = (
    *("--model", "./config.json", "--device", "h100_sxm", "--num-devices", "8"),
    *("--sequence-tokens", "2048", "--global-batch", "8"),
)


@pytest.mark.parametrize("batch", [10**8, 10**18])
def test_a_step_of_absurdly_many_microbatches_is_refused(windtunnel: Command, batch: int) -> None:
    job = ["llama-3.1-8b" if word == "./config.json" else word for word in JOB[:-1]]
    done = windtunnel("train", *job, str(batch))
    assert (done.code, done.stdout) == (2, "")
    assert f"a step of {batch // 8:,} microbatches on each rank is not simulated; at most 1,000,000" in done.stderr


@pytest.mark.parametrize("vary", ["0.5", "x", "[1]"])
@pytest.mark.parametrize("settings", [(), ("--set", "vary.tp=[1, 2]")])
def test_a_space_that_varies_no_table_is_refused(
    windtunnel: Command, tmp_path: Path, vary: str, settings: tuple[str, ...]
) -> None:
    job = {"model": "llama-3.1-8b", "device": "h100_sxm", "num_devices": 8, "sequence_tokens": 2048, "global_batch": 8}
    for raw in (SCENARIO, job):
        space = tmp_path / "space.yaml"
        space.write_text(f"{yaml.safe_dump(raw)}vary: {vary}\n")
        done = windtunnel("search", str(space), "--no-store", *settings)
        assert done.code == 2
        assert "$.vary is " in done.stderr
        assert "a table of keys and values is needed" in done.stderr


def test_an_option_of_one_letter_keeps_its_dash(windtunnel: Command) -> None:
    done = windtunnel("simulate", "--from-command", "vllm serve llama-3.1-8b -O3", "--device", "no_such", "--json")
    assert "not modelled: -O3\n" in done.stderr


@pytest.mark.parametrize("verb", ["simulate --trace", "validate --steps", "validate", "workload", "calibrate"])
@pytest.mark.parametrize("name", ["deep.jsonl", "deep.json"])
def test_a_deep_table_crashes_no_parser(windtunnel: Command, tmp_path: Path, verb: str, name: str) -> None:
    row = '{"arrival_s": 0, "input_tokens": 1, "output_tokens": 1, "x": ' + "[" * 50_000 + "]" * 50_000 + "}"
    path = tmp_path / name
    path.write_text(row + "\n" if name.endswith("l") else f"[{row}]")
    needed = ("--model", "llama-3.1-8b", "--device", "h100_sxm")
    done = windtunnel(*verb.split(), str(path), *(() if verb == "workload" else needed))
    assert done.code == 2
    assert "bug" not in done.stderr


VLLM = {"mean_ttft_ms": 100.0, "mean_tpot_ms": 9.0, "completed": 10, "output_throughput": 100.0}
AIPERF = {"time_to_first_token": {"avg": 100.0}, "request_throughput": {"avg": 3.0}}
RUNS = "model,device,input_tokens,output_tokens,concurrency,ttft_ms\nllama-3.1-8b,h100_sxm,64,8,4,20\n"
INFERENCEX = "hw,conc,model,framework,isl,osl,tput_per_gpu,Mean TTFT (s)\nh100,4,llama-3.1-8b,vllm,64,8,100,0.02\n"
GENAI_PERF = "Metric,avg,min\nTime To First Token (ms),9,8\n\nMetric,Value\nRequest Count (count),8\n"
TRACE = "arrival_s,input_tokens,output_tokens\n0,64,8\n"
KINETO = '{"schemaVersion": 1, "traceEvents": [{"ph": "i", "s": "g", "name": "x", "ts": 1, "pid": 1, "tid": 1}]}'
RENAMED = "it is a table of InferenceX's runs: `windtunnel validate` says which columns"
OTHERS = {
    "result.json": (json.dumps(VLLM), "validate result.json"),
    "profile.json": (json.dumps(AIPERF), "validate profile.json"),
    "runs.csv": (RUNS, "validate runs.csv"),
    "inferencex.csv": (INFERENCEX, RENAMED),
    "inferencex.json": (json.dumps([{"isl": 64, "osl": 8, "hw": "h100"}]), RENAMED),
    "genai_perf.csv": (GENAI_PERF, "it is GenAI-Perf's table: `windtunnel validate` reads the JSON file"),
    "requests.csv": (TRACE, "simulate --trace requests.csv"),
    "steps.json": (KINETO, "it is a Kineto trace: `windtunnel lab kernels steps.json` shows where its time goes"),
}
"""Name of a file -> its text, and the command that reads it, or words of the hint."""
MISPLACED = [
    ("simulate", "FILE"),
    ("train", "FILE"),
    ("workload", "FILE"),
    ("validate", "FILE"),
    ("simulate", "--trace"),
]


@pytest.mark.parametrize(
    ("verb", "where", "name"),
    [
        (verb, where, name)
        for verb, where in MISPLACED
        for name, (_, reader) in OTHERS.items()
        if reader != f"{verb} {name}".replace("simulate ", f"simulate {where} ")
        and (verb, name) != ("validate", "inferencex.csv")  # whose columns it names one by one
        and (verb, name) != ("workload", "steps.json")  # which reads it
    ],
)
def test_the_command_that_reads_a_file_is_named(
    windtunnel: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, where: str, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    text, reader = OTHERS[name]
    (tmp_path / name).write_text(text, encoding="utf-8")
    served = [f"{option}={GOOD[option]}" for option in ("--model", "--device")]
    given = [name] if where == "FILE" else [where, name]
    done = windtunnel(verb, *given, *(served if verb in ("simulate", "validate") else []))
    assert done.code == 2
    assert (reader if "`" in reader else f"`windtunnel {reader}` reads it") in done.stderr


def test_a_run_without_a_load_is_not_called_a_trace(windtunnel: Command, tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("model,device,input_tokens,output_tokens,ttft_ms\nllama-3.1-8b,h100_sxm,64,8,20\n")
    done = windtunnel("validate", str(path))
    assert "neither concurrency nor rate_per_s is given" in done.stderr
    assert "--trace" not in done.stderr


def test_columns_that_others_publish_are_read(windtunnel: Command, tmp_path: Path) -> None:
    (tmp_path / "runs.csv").write_text(INFERENCEX, encoding="utf-8")
    done = windtunnel("validate", str(tmp_path / "runs.csv"))
    assert done.stderr.startswith("error: runs.csv has a column 'tput_per_gpu', which is not known")
    known = INFERENCEX.replace("tput_per_gpu", "_tput_per_gpu").replace("h100,", "h100_sxm,")
    (tmp_path / "runs.csv").write_text(known, encoding="utf-8")
    done = windtunnel("validate", str(tmp_path / "runs.csv"))
    assert (done.code, done.stdout.splitlines()[0]) == (0, "1 of 1 run predicted")


def test_compare_names_the_command_that_compares_results_of_a_client(windtunnel: Command, tmp_path: Path) -> None:
    for name in ("old.json", "new.json"):
        (tmp_path / name).write_text(json.dumps(VLLM), encoding="utf-8")
    done = windtunnel("compare", str(tmp_path / "old.json"), str(tmp_path / "new.json"))
    assert done.code == 2
    assert f"`windtunnel gate --measured {tmp_path / 'old.json'} --baseline OTHER` compares two" in done.stderr


def test_diagnose_names_the_command_that_reads_metrics(windtunnel: Command, tmp_path: Path) -> None:
    (tmp_path / "metrics.txt").write_text("# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 1\n")
    served = ("--model", "llama-3.1-8b", "--device", "h100_sxm")
    file, folder = (windtunnel("diagnose", str(path), *served) for path in (tmp_path / "metrics.txt", tmp_path))
    assert f"`windtunnel observe {tmp_path / 'metrics.txt'}` reads it" in file.stderr
    assert f"saved metrics are read by windtunnel observe {tmp_path}" in folder.stderr
