"""`windtunnel simulate`: what it prints, what it writes, and that both are the same every time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest
import yaml

if TYPE_CHECKING:
    from cli.conftest import Command

FILES = {"requests.parquet", "steps.parquet", "series.parquet", "summary.json", "scenario.yaml"}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_it_prints_the_figures_that_users_ask_for(windtunnel: Command, small: tuple[str, ...]) -> None:
    done = windtunnel("simulate", *small, "--slo", "ttft=2s,tpot=50ms")
    assert (done.code, done.stderr) == (0, "")
    for words in ("TTFT", "TPOT", "ITL", "p99", "tokens/s", "goodput", "KV cache", "preemptions", "cost", "bound by"):
        assert words in done.stdout
    assert "h100_sxm/gemm/vllm/" in done.stdout


def test_it_says_whose_price_it_takes(windtunnel: Command, small: tuple[str, ...], tmp_path: Path) -> None:
    image = tmp_path / "image.yaml"
    image.write_text("{kind: diffusion, model: FLUX.1-dev, device: h100_sxm}")
    for key, command in (("deployment.price_usd_per_hour", small), ("price_usd_per_hour", (str(image),))):
        assert "at list price" in windtunnel("simulate", *command).stdout
        assert "at the given price" in windtunnel("simulate", *command, "--set", f"{key}=0.5").stdout


def test_it_says_when_requests_come_faster_than_they_are_served(windtunnel: Command) -> None:
    load = ("--input-tokens", "64", "--output-tokens", "8", "--num-requests", "3000", "--max-num-seqs", "8")
    for rate, is_overloaded in (("5", False), ("5000", True)):
        done = windtunnel("simulate", "--model", "llama-3.1-8b", "--device", "h100_sxm", *load, "--rate", rate)
        assert ("of queueing: latencies grow with" in done.stdout) == is_overloaded


@pytest.mark.full
def test_a_pipe_gets_lines_that_are_not_wrapped(windtunnel: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS")
    lines = windtunnel("catalog", "models").stdout.splitlines()
    assert any(line.startswith("deepseek-ai/DeepSeek-R1 ") and line.endswith("fp8_block") for line in lines)


@pytest.mark.parametrize("width", [80, 120])
def test_no_line_is_wider_than_the_terminal(
    windtunnel: Command, small: tuple[str, ...], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    lines = windtunnel("simulate", *small, "--slo", "e2e=2s").stdout.splitlines()
    assert max(map(len, lines)) <= width
    assert not any("…" in line for line in lines)


def test_json_has_the_summary_and_all_that_decided_it(windtunnel: Command, small: tuple[str, ...]) -> None:
    document = json.loads(windtunnel("simulate", *small, "--json", "--seed", "7").stdout)
    assert set(document) == {
        *("windtunnel", "scenario", "summary", "memory", "coverage", "sources", "operators"),
        *("interval_80", "calibration", "sampling", "client"),
    }
    assert document["summary"]["num_requests"] == 20
    assert document["scenario"]["seed"] == 7
    assert document["scenario"]["deployment"]["engine"]["max_num_batched_tokens"] == 8192
    assert sum(document["coverage"].values()) == pytest.approx(1)
    assert sum(document["sources"].values()) == pytest.approx(1)
    assert sum(document["summary"]["time_fractions"].values()) == pytest.approx(1)


@pytest.mark.full
def test_the_same_command_gives_the_same_bytes(windtunnel: Command, small: tuple[str, ...], tmp_path: Path) -> None:
    drawn = (*small, "--input-tokens", "16-512", "--rate", "50")
    drawn = tuple(word for word in drawn if word not in ("--concurrency", "4"))
    runs = [windtunnel("simulate", *drawn, "--json", "--out", str(tmp_path / name)) for name in ("one", "two")]
    assert runs[0].code == 0
    assert runs[0].stdout == runs[1].stdout
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    other = windtunnel("simulate", *drawn, "--json", "--seed", "1")
    assert other.stdout != runs[0].stdout


def test_out_holds_the_run(windtunnel: Command, small: tuple[str, ...], tmp_path: Path) -> None:
    out = tmp_path / "deep" / "run"
    printed = windtunnel("simulate", *small, "--json", "--out", str(out))
    assert {path.name for path in out.iterdir()} == FILES
    assert {path.name for path in out.parent.iterdir()} == {"run"}
    assert json.loads((out / "summary.json").read_text()) == json.loads(printed.stdout)
    requests, steps = (pq.read_table(out / f"{name}.parquet") for name in ("requests", "steps"))
    assert requests.num_rows == 20
    assert b"meaning" in requests.schema.field("ttft_s").metadata
    decoded = sum(
        a * b for a, b in zip(steps["decode_tokens"].to_pylist(), steps["num_steps"].to_pylist(), strict=True)
    )
    assert decoded == 20 * (8 - 1)


def test_the_resolved_scenario_gives_the_same_run(windtunnel: Command, small: tuple[str, ...], tmp_path: Path) -> None:
    first = windtunnel("simulate", *small, "--out", str(tmp_path / "run"))
    again = windtunnel("simulate", str(tmp_path / "run" / "scenario.yaml"))
    assert again.stdout == first.stdout


def test_sampling_lengthens_the_steps_and_is_named(windtunnel: Command, small: tuple[str, ...]) -> None:
    sampled = ("--engine-version", "0.16.0", "--temperature", "0.8", "--top-p", "0.95")
    greedy, slower = (
        json.loads(windtunnel("simulate", *small, *options, "--json").stdout) for options in (sampled[:2], sampled)
    )
    assert slower["summary"]["tpot_s"]["mean"] > 1.02 * greedy["summary"]["tpot_s"]["mean"]
    assert (
        slower["sampling"].items()
        >= {
            "temperature": 0.8,
            "top_p": 0.95,
            "text": "temperature 0.8, top-p 0.95",
            "source": "as given",
            "kernel": "sort",
        }.items()
    )
    assert slower["operators"]["token_filter"] > 0.02
    assert greedy["sampling"]["text"] == "greedy"
    wrong = windtunnel("simulate", *small, "--top-p", "1.5")
    assert wrong.code == 2
    assert "--top-p is 1.5; from 0 to 1 is needed" in wrong.stderr


def test_overwrite_replaces_a_former_run_and_nothing_else(
    windtunnel: Command, small: tuple[str, ...], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    windtunnel("simulate", *small, "--out", str(out))
    (out / "notes.txt").write_text("mine")
    before = contents(out)
    refused = windtunnel("simulate", *small, "--seed", "3", "--out", str(out))
    assert refused.code == 2
    assert contents(out) == before
    assert windtunnel("simulate", *small, "--output-tokens", "9", "--out", str(out), "--overwrite").code == 0
    assert (out / "notes.txt").read_text() == "mine"
    assert contents(out)["summary.json"] != before["summary.json"]


def test_options_win_over_the_file(windtunnel: Command, tmp_path: Path) -> None:
    scenario = {
        "model": "meta-llama/Llama-3.1-8B",
        "deployment": {"device": "h100_sxm"},
        "workload": {
            "arrivals": {"type": "poisson", "rate_per_s": 5.0},
            "input_tokens": 64,
            "output_tokens": 8,
            "num_requests": 10,
        },
    }
    (tmp_path / "scenario.yaml").write_text(yaml.safe_dump(scenario))
    options = ["--tp", "2", "--output-tokens", "4-6", "--set", "workload.arrivals.rate_per_s=6.5", "--json"]
    resolved = json.loads(windtunnel("simulate", str(tmp_path / "scenario.yaml"), *options).stdout)["scenario"]
    assert resolved["deployment"]["parallelism"]["tp"] == 2
    assert resolved["workload"]["arrivals"]["rate_per_s"] == 6.5
    assert resolved["workload"]["output_tokens"] == {"type": "uniform", "min_tokens": 4, "max_tokens": 6}
    assert resolved["workload"]["input_tokens"] == 64


def test_names_of_vllm_mean_the_same(windtunnel: Command) -> None:
    ours = ["--tp", "2", "--quant", "fp8", "--input-tokens", "64", "--output-tokens", "8", "--concurrency", "4"]
    theirs = ["-tp", "2", "--quantization", "fp8", "--random-input-len", "64", "--random-output-len=8"]
    theirs += ["--max_concurrency", "4", "--num-prompts", "40"]
    model = ["--model", "meta-llama/Llama-3.1-8B", "--device", "h100_sxm"]
    assert windtunnel("simulate", *model, *ours).stdout == windtunnel("simulate", *model, *theirs).stdout


def test_the_kv_format_leaves_the_published_weights_alone(windtunnel: Command, small: tuple[str, ...]) -> None:
    options = ["--model", "openai/gpt-oss-20b", "--kv-cache-dtype", "fp8", "--json"]
    precision = json.loads(windtunnel("simulate", *small, *options).stdout)["scenario"]["precision"]
    assert (precision["experts"], precision["kv_cache"]) == ("mxfp4", "fp8")


def test_a_trace_of_the_catalog_has_a_short_name(windtunnel: Command) -> None:
    load = ("simulate", "--model", "qwen3-8b", "--device", "h100_sxm", "--rate", "2", "--num-requests", "20")
    short, full = windtunnel(*load, "--traffic", "chat"), windtunnel(*load, "--trace", "azure2023_conv")
    assert "lengths of azure2023_conv" in short.stdout
    assert (short.code, short.stdout) == (0, full.stdout)


def test_a_trace_of_the_catalog_is_found_by_name(windtunnel: Command) -> None:
    options = ["--model", "meta-llama/Llama-3.1-8B", "--device", "h100_sxm", "--num-requests", "200", "--json"]
    document = json.loads(windtunnel("simulate", "--trace", "azure2023_code", *options, "--rate", "3").stdout)
    assert document["summary"]["num_requests"] == 200
    assert document["scenario"]["workload"]["trace"]["path"] == "azure2023_code"


def test_a_file_of_that_name_goes_before_the_catalog(
    windtunnel: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.csv").write_text("arrival_s,input_tokens,output_tokens\n0,10,2\n1,10,2\n")
    options = ["--model", "meta-llama/Llama-3.1-8B", "--device", "h100_sxm", "--json"]
    document = json.loads(windtunnel("simulate", "--trace", "mine.csv", *options).stdout)
    assert document["summary"]["num_requests"] == 2


def test_progress_stays_off_pipes(windtunnel: Command, small: tuple[str, ...]) -> None:
    assert windtunnel("simulate", *small).stderr == ""


def test_the_requests_under_vidurs_names(windtunnel: Command, small: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "request_metrics.csv"
    done = windtunnel("simulate", *small, "--vidur-metrics", str(path))
    assert (done.code, done.stderr) == (0, f"wrote {path}\n")
    lines = path.read_text().splitlines()
    assert lines[0].startswith('"Request Id","request_e2e_time"')
    assert len(lines) == 21
    again = windtunnel("simulate", *small, "--vidur-metrics", str(path))
    assert again.code == 2
    assert "exists already" in again.stderr


def test_tenants_have_a_line_each(windtunnel: Command, small: tuple[str, ...]) -> None:
    tenants = (
        "[{name: chat, share: 3, input_tokens: 64, output_tokens: 8, slo: {ttft_s: 1us}},"
        " {name: code, share: 1, input_tokens: 32, output_tokens: 4}]"
    )
    load = ("--rate", "5", "--num-requests", "40", "--set", f"workload.tenants={tenants}")
    done = windtunnel("simulate", *small[:4], *load)
    assert done.code == 0
    assert "2 tenants: chat, code" in done.stdout
    assert "goodput" in done.stdout
    document = json.loads(windtunnel("simulate", *small[:4], *load, "--json").stdout)
    found = document["summary"]["tenants"]
    assert found["chat"]["goodput"]["fraction"] == 0
    assert found["code"]["goodput"] is None
    assert found["chat"]["num_requests"] + found["code"]["num_requests"] == 40
    assert document["summary"]["checks"]["passed"] is True
    assert sum(document["operators"].values()) == pytest.approx(1)


def test_the_file_of_a_tenant_lies_beside_its_scenario(windtunnel: Command, tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("input_tokens,output_tokens\n10,2\n")
    (tmp_path / "scenario.yaml").write_text(
        "model: meta-llama/Llama-3.1-8B\ndeployment: {device: h100_sxm}\nworkload:\n"
        "  arrivals: {type: poisson, rate_per_s: 5}\n  num_requests: 10\n"
        "  tenants: [{name: a, share: 1, trace: {path: mine.csv, order: resampled}}]\n"
    )
    assert windtunnel("simulate", str(tmp_path / "scenario.yaml")).code == 0


def test_a_batch_is_told_by_its_last_token(windtunnel: Command) -> None:
    load = ("--input-tokens", "64", "--output-tokens", "8-64", "--num-requests", "40", "--rate", "inf")
    done = windtunnel("simulate", "--model", "llama-3.1-8b", "--device", "h100_sxm", *load, "--json")
    summary = json.loads(done.stdout)["summary"]
    done = windtunnel("simulate", "--model", "llama-3.1-8b", "--device", "h100_sxm", *load, "--slo", "ttft=1s")
    sentence = " ".join(done.stdout.split())
    assert f"Finishes 40 requests in {summary['span_s'] * 1e3:.0f} ms, half of them in " in sentence
    assert "output tokens/s. Holds the SLO: 100% of the requests" in sentence


def test_a_run_that_is_over_too_soon_for_its_rate_says_so(windtunnel: Command) -> None:
    """All 100 requests are there within 0.1 s, so that 60 replicas serve far less than the 1,000 requests/s."""
    load = ("--input-tokens", "64", "--output-tokens", "64", "--num-requests", "100", "--replicas", "60")
    command = ("simulate", "--model", "llama-3.1-8b", "--device", "h100_sxm", *load)
    sentence = " ".join(windtunnel(*command, "--rate", "1000").stdout.split())
    assert "Too short for this rate: all 100 requests arrive before the first ones are done; take " in sentence
    assert "Too short" not in windtunnel(*command, "--rate", "20").stdout


@pytest.mark.full
def test_it_says_which_setting_requests_wait_for(windtunnel: Command) -> None:
    """Not with prompts alone, of which a batch takes as many as its tokens allow, nor with all clients in a batch."""
    command = ("simulate", "--model", "llama-3.1-8b", "--device", "h100_sxm", "--num-requests", "200", "--rate", "200")
    closed = "--concurrency", "64", "--input-tokens", "1024", "--output-tokens", "256"

    def said(*given: str) -> str:
        return " ".join(windtunnel(*command, *given).stdout.split())

    short = ("--input-tokens", "64", "--output-tokens", "16")
    assert "Requests wait for one of the 4 running slots (max_num_seqs)." in said(*short, "--max-num-seqs", "4")
    assert "Requests wait" not in said(*short)
    assert "Requests wait" not in said("--input-tokens", "4000", "--output-tokens", "1")
    assert "Requests wait" not in " ".join(windtunnel(*command[:-4], *closed).stdout.split())
    lora = ("--set", "deployment.engine.lora.max_loras=2", "--set", "workload.adapters.count=20")
    assert "Requests wait for one of the 2 LoRA slots (max_loras)." in said(*short, *lora)
    whole = ("--engine", "trtllm", "--input-tokens", "8190", "--output-tokens", "32", "--rate", "20")
    wait = "Prompts of 8,190 tokens wait until at most 2 requests decode, as a step takes 8,192 tokens"
    assert wait in said(*whole)
    assert "raise max_num_batched_tokens (--max_num_tokens) or set enable_chunked_prefill." in said(*whole)
    assert "Prompts of" not in said(*whole, "--set", "deployment.engine.enable_chunked_prefill=true")
    assert "Prompts of" not in said(*whole, "--set", "deployment.engine.max_num_batched_tokens=8704")


@pytest.mark.parametrize(("limit", "waits"), [(16, True), (64, False)])
def test_the_running_slots_are_those_of_each_rank(windtunnel: Command, limit: int, waits: bool) -> None:
    """With 64 slots on each of two ranks, the prompts of 64 clients wait for tokens alone."""
    model = ("--model", "deepseek-v2-lite", "--device", "h100_sxm", "--attention-dp", "2")
    load = ("--concurrency", "64", "--input-tokens", "2000", "--output-tokens", "256", "--num-requests", "200")
    sentence = "Requests wait for one of the 16 running slots of each of the 2 ranks (max_num_seqs)."
    said = " ".join(windtunnel("simulate", *model, *load, "--max-num-seqs", str(limit)).stdout.split())
    assert ("Requests wait" in said, sentence in said) == (waits, waits)


def test_a_few_requests_show_no_overload(windtunnel: Command, tmp_path: Path) -> None:
    rows = "".join(f"2023-11-16 18:17:03.{milliseconds:03d},4000,8\n" for milliseconds in range(0, 40, 10))
    (tmp_path / "few.csv").write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}")
    trace = str(tmp_path / "few.csv")
    done = windtunnel("simulate", "--model", "llama-3.1-8b", "--device", "h100_sxm", "--trace", trace)
    assert done.code == 0
    assert "Overloaded" not in done.stdout


SCRIPT = """ISL=64
vllm serve llama-3.1-8b --max-num-seqs 64 &
for CONC in 2 4; do
  vllm bench serve --random-input-len $ISL --random-output-len 8 --num-prompts $((CONC * 5)) --max-concurrency $CONC
done
"""


@pytest.fixture
def script(tmp_path: Path) -> tuple[str, ...]:
    file = tmp_path / "serve.sh"
    file.write_text(SCRIPT)
    return ("--from-command", str(file), "--device", "h100_sxm")


@pytest.mark.parametrize(
    ("options", "said", "expected"),
    [
        (
            (),
            "prompts of 64 tokens, outputs of 8 tokens, concurrency 4, 20 requests; the largest of its",
            {"input_tokens": 64, "num_requests": 20, "arrivals": {"type": "closed_loop", "concurrency": 4}},
        ),
        (
            ("--concurrency", "2"),
            "prompts of 64 tokens, outputs of 8 tokens, 10 requests",
            {"num_requests": 10, "arrivals": {"type": "closed_loop", "concurrency": 2}},
        ),
        (
            ("--rate", "3", "--input-tokens", "32", "--num-requests", "7"),
            "outputs of 8 tokens",
            {"input_tokens": 32, "num_requests": 7, "arrivals": {"type": "poisson", "rate_per_s": 3.0}},
        ),
        (
            ("--set", "workload.output_tokens=4", "--num-requests", "7"),
            "prompts of 64 tokens, concurrency 4; the largest",
            {"output_tokens": 4, "num_requests": 7},
        ),
    ],
)
def test_the_load_of_the_client_beside_the_server_is_taken_where_no_option_says_another(
    windtunnel: Command, script: tuple[str, ...], options: tuple[str, ...], said: str, expected: dict[str, object]
) -> None:
    done = windtunnel("simulate", *script, *options)
    assert (done.code, done.stderr) == (0, "")
    assert f"load of vllm bench serve: {said}" in " ".join(done.stdout.split())
    document = json.loads(windtunnel("simulate", *script, *options, "--json").stdout)
    assert expected.items() <= document["scenario"]["workload"].items()
    assert document["scenario"]["workload"]["client"] == "vllm"
    assert document["from_command"]["load"][0].startswith(f"load of vllm bench serve: {said}")


def test_a_trace_or_a_scenario_keeps_its_load(windtunnel: Command, script: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "scenario.yaml"
    file.write_text("workload: {input_tokens: 9, output_tokens: 2, num_requests: 3, arrivals: {type: burst}}")
    for load in ((str(file),), ("--trace", "azure2023_conv", "--num-requests", "5")):
        done = windtunnel("simulate", *load, *script)
        assert done.code == 0
        assert "load of vllm" not in done.stdout


def test_a_load_that_is_not_read_is_said_before_it_is_missed(windtunnel: Command) -> None:
    text = "vllm serve llama-3.1-8b & vllm bench serve --dataset-name sharegpt"
    done = windtunnel("simulate", "--from-command", text, "--device", "h100_sxm")
    assert done.code == 2
    assert "the data set of vllm bench serve is not read (sharegpt)" in done.stderr
    assert "--input-tokens is missing" in done.stderr


@pytest.mark.full
def test_every_verb_with_a_load_takes_it(windtunnel: Command, script: tuple[str, ...], tmp_path: Path) -> None:
    slo, closed = ("--slo", "tpot_p99=50ms"), "prompts of 64 tokens, outputs of 8 tokens, a closed loop"
    capped = "vllm serve llama-3.1-8b & vllm bench serve --max-concurrency 4 --request-rate 9"
    space = tmp_path / "space.yaml"
    space.write_text("vary: {max_num_seqs: [4, 64]}\nlimits: {tpot_p99: 50ms}")
    devices = (*script[:2], "--devices", "h100_sxm", "--no-store")
    for verb, said in (
        (("capacity", *script, *slo), closed),
        (
            ("capacity", "--from-command", capped, *script[2:], *slo),
            "prompts of 1,024 tokens, outputs of 128 tokens, a closed",
        ),
        (("recommend", *devices, *slo, "--top", "1"), closed),
        (("whatif", *script, *slo), closed),
        (("search", str(space), *script[:2], "--set", "deployment.device=h100_sxm", "--no-store"), closed),
        (("whatif", *script, "--vary", "concurrency=2,4"), "prompts of 64 tokens, outputs of 8 tokens, 20 requests"),
        (("gate", *script, "--before", "vllm serve llama-3.1-8b --max-num-seqs 64"), "concurrency 4, 20 requests"),
    ):
        done = windtunnel(*verb)
        assert done.code == 0, (verb, done.stderr)
        assert said in " ".join((done.stdout + done.stderr).split()), verb


def test_concurrencies_are_compared_over_the_requests_of_the_largest(windtunnel: Command) -> None:
    load = ("--model", "llama-3.1-8b", "--device", "h100_sxm", "--input-tokens", "64", "--output-tokens", "8")
    done = windtunnel("whatif", *load, "--vary", "concurrency=2,16", "--json")
    assert json.loads(done.stdout)["space"]["workload"]["num_requests"] == 160


@pytest.mark.full
def test_a_server_of_embeddings_is_sized_without_outputs(windtunnel: Command) -> None:
    server = ("--from-command", "vllm serve Qwen/Qwen3-Embedding-8B --task embed", "--devices", "h100_sxm")
    done = windtunnel("recommend", *server, "--slo", "e2e_p99=1s", "--input-tokens", "64", "--top", "1", "--no-store")
    assert (done.code, done.stderr) == (0, "")


@pytest.mark.parametrize("deployment", ["", "deployment: {}", "deployment: {device: }"])
def test_a_file_without_a_device_is_told_the_option_that_gives_one(
    windtunnel: Command, tmp_path: Path, deployment: str
) -> None:
    path = tmp_path / "scenario.yaml"
    workload = "{arrivals: {type: poisson, rate_per_s: 4}, input_tokens: 64, output_tokens: 8, num_requests: 20}"
    path.write_text(f"model: llama-3.1-8b\nworkload: {workload}\n{deployment}\n")
    done = windtunnel("simulate", str(path))
    assert (done.code, done.stdout) == (2, "")
    assert "hint: --device h100_sxm, or in the file deployment: {device: h100_sxm}" in done.stderr
    assert windtunnel("simulate", str(path), "--device", "h100_sxm").code == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--device", "h100_sxm,l40s"), "--device is one device, and h100_sxm,l40s are several\nhint: to compare them"),
        (("--device", "h100_sxm", "--concurrency", "0"), "--concurrency is 0; from 1 to"),
        (("--device", "h100_sxm", "--tp", "0"), "--tp is 0; at least 1 is needed\n"),
        (("--device", "h100_sxm", "--gpu-memory-utilization", "3"), "--gpu-memory-utilization is 3; "),
    ],
)
def test_a_wrong_value_is_named_by_its_option(windtunnel: Command, options: tuple[str, ...], message: str) -> None:
    load = ("--rate", "4", "--input-tokens", "64", "--output-tokens", "8", "--num-requests", "20")
    done = windtunnel("simulate", "--model", "llama-3.1-8b", *load, *options)
    assert (done.code, done.stdout) == (2, "")
    assert f"error: {message}" in done.stderr


@pytest.mark.parametrize("load", [(), ("--rate", "4", "--input-tokens", "64", "--output-tokens", "8")])
def test_a_diffusion_model_is_told_its_job(windtunnel: Command, load: tuple[str, ...]) -> None:
    done = windtunnel("simulate", "--model", "flux.1-dev", "--device", "h100_sxm", *load)
    assert (done.code, done.stdout) == (2, "")
    assert "FLUX.1-dev makes images or videos" in done.stderr
    assert "hint: windtunnel init diffusion" in done.stderr
    assert "makes images" in windtunnel("catalog", "models", "FLUX.1-dev").stderr
