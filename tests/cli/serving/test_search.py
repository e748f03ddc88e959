"""`windtunnel capacity`, `search`, `whatif` and `simulate --from-command` as people run them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest
import yaml

from windtunnel import catalog
from windtunnel.cli.options import setting_name
from windtunnel.metrics.limits import limits_from
from windtunnel.search.space.space import scenario_at, space_from
from windtunnel.search.study import InterruptedSearchError, Study, search

if TYPE_CHECKING:
    from cli.conftest import Command

pytestmark = pytest.mark.compiled

SCENARIO = """
model: meta-llama/Llama-3.1-8B
deployment: {device: h100_sxm}
workload:
  arrivals: {type: poisson, rate_per_s: 4}
  input_tokens: {type: uniform, min_tokens: 200, max_tokens: 1800}
  output_tokens: {type: uniform, min_tokens: 20, max_tokens: 200}
  num_requests: 150
"""
SPACE = f"""{SCENARIO}
vary: {{tp: [1, 3], max_num_seqs: [16, 64, 256]}}
limits: {{ttft_p90: 1s, tpot_p99: 50ms}}
finalist_seeds: 2
"""


@pytest.fixture
def space(tmp_path: Path) -> str:
    path = tmp_path / "space.yaml"
    path.write_text(SPACE)
    return str(path)


@pytest.fixture
def scenario(tmp_path: Path) -> str:
    path = tmp_path / "scenario.yaml"
    path.write_text(SCENARIO)
    return str(path)


def test_one_device_is_several_of_one(windtunnel: Command) -> None:
    """`--device`, as other commands call it, is read as `--devices`; a command that has both keeps them apart."""
    load = ("--device", "nothing", "--input-tokens", "64", "--output-tokens", "8")
    searched = windtunnel("recommend", "llama-3.1-8b", *load, "--slo", "tpot_p99=50ms")
    simulated = windtunnel("simulate", "--model", "llama-3.1-8b", *load, "--rate", "1")
    for done in (searched, simulated):
        assert done.code == 2
        assert "there is no device 'nothing'" in done.stderr


@pytest.mark.full
def test_capacity_says_what_limits_it(windtunnel: Command, scenario: str) -> None:
    done = windtunnel("capacity", scenario, "--slo", "ttft_p90=1s,tpot_p99=50ms", "--seeds", "2", "--json")
    found = json.loads(done.stdout)
    assert done.code == 0
    assert len(found["by_stream"]) == 2
    assert found["capacity_at_least"] <= found["capacity"]
    assert found["limited_by"] in ("ttft_p90", "tpot_p99", "queueing grows")
    assert found["latencies"]["ttft_s"]["p90"] <= 1
    shown = windtunnel("capacity", scenario, "--slo", "ttft_p90=1us", "--seeds", "1")
    assert "no load is sustained: TTFT p90 <= 1.00 us is not met" in shown.stdout
    assert re.search(r"Sustains no load: .*; when hardly anything is sent, it is \d+\.\d ms\.", shown.stdout)


@pytest.mark.full
def test_a_capacity_needs_no_load_to_begin_with(windtunnel: Command) -> None:
    load = ("--input-tokens", "64", "--output-tokens", "8", "--num-requests", "60", "--seeds", "1")
    done = windtunnel("capacity", "--model", "llama-3.1-8b", "--device", "h100_sxm", *load, "--slo", "ttft=1s")
    assert done.code == 0, done.stderr
    assert "Poisson arrivals, 64 tokens in, 8 tokens out; seed 0" in done.stdout
    assert "\nat " in done.stdout
    several = windtunnel(
        "capacity", "--model", "llama-3.1-8b", "--device", "h100_sxm", *load[:-1], "2", "--slo", "ttft=1s"
    )
    assert "\nfirst stream, at " in several.stdout


def test_a_capacity_that_nothing_limits_says_how_to_try_more(windtunnel: Command) -> None:
    load = ("--input-tokens", "64", "--output-tokens", "8", "--concurrency", "2", "--num-requests", "20")
    done = windtunnel("capacity", "--model", "llama-3.1-8b", "--device", "h100_sxm", *load, "--slo", "ttft=99h")
    assert "Sustains 32,768 clients, as many as the workload has requests: --num-requests gives more." in done.stdout


@pytest.mark.full
def test_decode_context_parallelism_has_a_short_name(windtunnel: Command) -> None:
    on = ("--model", "deepseek-v3", "--device", "b200_sxm", "--quant", "nvfp4", "--tp", "8")
    given, named = (
        json.loads(windtunnel("simulate", *on, *LOAD, "--rate", "4", *dcp, "--json").stdout)
        for dcp in (("--decode-context-parallel-size", "2"), ("--dcp", "2"))
    )
    assert given == named
    assert given["scenario"]["deployment"]["parallelism"]["dcp"] == 2
    varied = windtunnel("whatif", *on, *LOAD, "--rate", "4", "--vary", "dcp=1,2", "--json")
    assert varied.code == 0, varied.stderr


def test_whatif_says_which_loads_are_over_too_soon(windtunnel: Command) -> None:
    """60 requests at 100/s come within 0.6 s, and one takes 0.9 s."""
    load = ("--input-tokens", "64", "--output-tokens", "128", "--num-requests", "60", "--vary", "rate=2,100")
    done = windtunnel("whatif", "--model", "llama-3.1-8b", "--device", "h100_sxm", *load, "--slo", "ttft=9s")
    assert "Over too soon to tell: 1 of the 2 (give --num-requests " in " ".join(done.stdout.split())


@pytest.mark.parametrize("load", ["0", "-1", "nan", "inf"])
def test_a_load_to_size_for_is_a_number_above_0(windtunnel: Command, space: str, load: str) -> None:
    traffic = ("--slo", "ttft_p90=1s", "--input-tokens", "64", "--output-tokens", "8")
    commands = {"--load": ("search", space), "--rate": ("recommend", "llama-3.1-8b", "--devices", "l40s", *traffic)}
    for option, command in commands.items():
        done = windtunnel(*command, option, load)
        assert (done.code, done.stdout) == (2, "")
        assert f"error: {option}" in done.stderr
        assert "hint: " in done.stderr


@pytest.mark.full
def test_a_search_writes_what_it_found(windtunnel: Command, space: str, tmp_path: Path) -> None:
    out = tmp_path / "found"
    done = windtunnel("search", space, "--no-store", "--out", str(out), "--load", "50", "--top", "2")
    assert done.code == 0, done.stderr
    assert "6 points evaluated: 3 cannot run" in done.stdout
    assert "for 50.0 requests/s" in done.stdout
    points = pq.read_table(out / "points.parquet").to_pydict()
    first = [row for row, stream in enumerate(points["stream"]) if stream == 0]
    assert [points["point"][row] for row in first] == list(range(6))
    assert [bool(points["refused"][row]) for row in first] == [False] * 3 + [True] * 3
    page = (out / "search.html").read_text()
    assert "src=" not in page
    assert '<div class="chart">' in page
    document = json.loads((out / "search.json").read_text())
    ranking = document["workloads"][0]["ranking"]
    assert ranking
    words = (out / "launch.sh").read_text().splitlines()[-1].split()
    assert words[:3] == ["vllm", "serve", "meta-llama/Llama-3.1-8B"]
    seqs = document["workloads"][0]["points"][0]["choice"]["max_num_seqs"]
    assert words[words.index("--max-num-seqs") + 1] == str(seqs)
    kinds = [one["kind"] for one in yaml.safe_load_all((out / "kubernetes.yaml").read_text())]
    assert kinds == ["Deployment", "PersistentVolumeClaim", "Service", "HorizontalPodAutoscaler"]
    again = windtunnel("simulate", str(out / "scenario.yaml"), "--json")
    summary = json.loads(again.stdout)["summary"]
    assert summary["ttft_s"]["p90"] == document["workloads"][0]["points"][0]["figures"]["ttft_p90"]
    assert json.loads(again.stdout)["scenario"]["slo"].items() >= {"ttft_s": 1.0, "ttft_percentile": 90.0}.items()
    assert summary["goodput"]["is_held"]


@pytest.mark.full
def test_a_narrow_terminal_shows_every_setting_whole(
    windtunnel: Command, space: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = windtunnel("search", space, "--no-store").stdout
    assert max(map(len, shown.splitlines())) <= 80
    for max_num_seqs in (16, 64, 256):
        assert f"tp 1, max_num_seqs {max_num_seqs}\n" in shown
    # The headings are broken into two lines.
    assert any(re.fullmatch(r" +/s  least .* p90 +p99 +limit", line) for line in shown.splitlines())


def test_a_grid_marks_what_breaks_limits(
    windtunnel: Command, scenario: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    page = tmp_path / "grid.html"
    done = windtunnel(
        "whatif", scenario, "--vary", "deployment.parallelism.tp=1,2,3", "--vary", "workload.rate=1:21:20",
        "--slo", "tpot_p99=10ms", "--html", str(page),
    )  # fmt: skip
    assert done.code == 0
    heads, *rows = [line for line in done.stdout.splitlines() if re.match(r"tp +rate|\d +\d", line)]
    assert heads.endswith("breaks")
    assert [row.endswith("TPOT p99") for row in rows].count(True) >= 1
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "tp 3, rate 1 and 1 more: tp = 3 does not divide the 32 attention heads" in done.stdout
    assert '<div class="chart">' in page.read_text()
    done = windtunnel("whatif", scenario, "--vary", "rate=1,21", "--slo", "tpot_p99=10ms", "--json")
    points = json.loads(done.stdout)["points"]
    assert [point.get("limited_by") for point in points] == [None, "tpot_p99"], points
    done = windtunnel("whatif", scenario, "--vary", "rate=1,21", "--slo", "tpot_p99=10ms")
    assert "1 of 2 points meets the limits" in done.stdout


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("tensor-parallel-size", "tp"),
        ("max-num-seqs", "max_num_seqs"),
        ("request-rate", "rate"),
        ("isl", "input_tokens"),
        ("device", "device"),
        ("engine.max-num-seqs", "deployment.engine.max_num_seqs"),
        ("block-size", "deployment.engine.block_size"),
        ("page-size", "deployment.engine.block_size"),
        ("engine.mem_fraction_static", "deployment.engine.gpu_memory_utilization"),
        ("parallelism.tp", "deployment.parallelism.tp"),
        ("workload.arrivals.rate_per_s", "workload.arrivals.rate_per_s"),
        ("tpp", "tpp"),
    ],
)
def test_a_setting_has_the_names_of_options(typed: str, meant: str) -> None:
    assert setting_name(typed) == meant


def test_a_grid_takes_other_names_of_settings(windtunnel: Command, scenario: str) -> None:
    settings = ("--set", "engine.block_size=32", "--set", "num-prompts=20", "--set", "pp=1")
    done = windtunnel("whatif", scenario, *settings, "--vary", "tensor-parallel-size=1,3", "--tp", "1", "--json")
    document = json.loads(done.stdout)
    assert [point["choice"] for point in document["points"]] == [{"tp": 1}, {"tp": 3}]
    assert document["points"][1]["refused"].startswith("--tp 3 does not divide the 32 attention heads")
    assert document["space"]["deployment"]["engine"]["block_size"] == 32
    assert document["space"]["workload"]["num_requests"] == 20


@pytest.mark.full
@pytest.mark.parametrize("file", [False, True])
def test_experts_of_a_command_are_spread_over_the_devices_that_each_point_has(
    windtunnel: Command, tmp_path: Path, file: bool
) -> None:
    server = ("--from-command", "vllm serve openai/gpt-oss-120b -tp 4 --enable-expert-parallel")
    workload = {"input_tokens": 64, "output_tokens": 8, "num_requests": 10, "arrivals": {"type": "burst"}}
    raw = {"deployment": {"device": "h200_sxm"}, "workload": workload}
    (tmp_path / "space.yaml").write_text(yaml.safe_dump({**raw, "load": "given", "vary": {"tp": [1, 2, 4]}}))
    (tmp_path / "scenario.yaml").write_text(yaml.safe_dump(raw))
    points = ("search", str(tmp_path / "space.yaml"), "--no-store")
    grid = ("whatif", str(tmp_path / "scenario.yaml"), "--vary", "tp=1,2,4")
    done = windtunnel(*(points if file else grid), *server, "--json")
    assert done.code == 0, done.stderr
    assert "does not divide" not in done.stdout
    space = space_from({**raw, "model": "openai/gpt-oss-120b", "vary": {"tp": [1, 2]}})
    space.scenario["deployment"]["parallelism"] = {"tp": 4, "ep": "all"}
    assert scenario_at(space, {"deployment.parallelism.tp": 2}).deployment.parallelism.ep == 2


LONG = "vllm serve qwen3-8b --max-model-len 200000"
LONG_SAYS = (
    "vllm would not start: --max-model-len is 200,000, and Qwen/Qwen3-8B takes 40,960 tokens; give 40960 at most"
)


@pytest.mark.full
def test_an_answer_leads_with_a_server_that_would_not_start(windtunnel: Command, tmp_path: Path) -> None:
    load = ("--device", "h100_sxm", "--input-tokens", "64", "--output-tokens", "8", "--num-requests", "20")
    page = tmp_path / "page.html"
    done = windtunnel("simulate", "--from-command", LONG, *load, "--rate", "1", "--html", str(page))
    assert done.stdout.splitlines()[1].startswith(LONG_SAYS)
    assert 'would not start: <span class="flag">--max-model-len</span> is 200,000' in page.read_text()
    done = windtunnel("capacity", "--from-command", LONG, *load, "--slo", "ttft_p90=1s", "--json")
    assert json.loads(done.stdout)["from_command"]["would_not_start"][0].startswith(LONG_SAYS)
    assert f"note: {LONG_SAYS}" in done.stderr


@pytest.mark.full
def test_a_scenario_without_a_command_is_checked_too(windtunnel: Command, tmp_path: Path) -> None:
    says = "vllm would not start: max_model_len is 200,000, and Qwen/Qwen3-8B takes 40,960 tokens; give 40960 at most"
    workload = {"arrivals": {"type": "poisson", "rate_per_s": 1}, "input_tokens": 64, "output_tokens": 8}
    deployment = {"device": "h100_sxm", "engine": {"name": "vllm", "max_model_len": 200_000}}
    raw = {"model": "qwen3-8b", "deployment": deployment, "workload": workload | {"num_requests": 20}}
    file, space = tmp_path / "scenario.yaml", tmp_path / "space.yaml"
    file.write_text(yaml.safe_dump(raw))
    assert windtunnel("simulate", str(file)).stdout.splitlines()[1].startswith(says)
    document = json.loads(windtunnel("capacity", str(file), "--slo", "ttft_p90=1s", "--json").stdout)
    assert document["would_not_start"][0].startswith(says)
    own = windtunnel("simulate", str(file), "--set", "deployment.engine.max_model_len=null", "--json")
    assert "would_not_start" not in json.loads(own.stdout)
    engine = {"deployment.engine.max_model_len": [200_000, 4096]}
    space.write_text(yaml.safe_dump(raw | {"load": "given", "vary": engine}))
    done = " ".join(windtunnel("search", str(space), "--no-store").stdout.split())
    assert "Best: max_model_len 4096" in done
    assert done.index(says) > done.index("cannot run")
    grid = windtunnel("whatif", str(file), "--vary", "max_model_len=200000,4096").stdout
    assert "1 of 2 points can run" in grid


def test_an_unknown_setting_names_the_option_once(windtunnel: Command) -> None:
    load = ("--device", "h100_sxm", "--input-tokens", "64", "--output-tokens", "8", "--rate", "1")
    done = windtunnel("whatif", "--model", "qwen3-8b", *load, "--vary", "foo=1,2")
    assert done.stderr.startswith("error: --vary: foo is no path"), done.stderr


def test_points_whose_server_would_not_start_cannot_run(windtunnel: Command) -> None:
    load = ("--device", "h100_sxm", "--input-tokens", "64", "--output-tokens", "8", "--num-requests", "20")
    grid = ("whatif", "--from-command", LONG, *load, "--rate", "1", "--vary", "max_model_len=200000,8192")
    done = windtunnel(*grid)
    assert "1 of 2 points can run; the cheapest per request is max_model_len 8192." in done.stdout
    assert f"max_model_len 200000: {LONG_SAYS}" in " ".join(done.stdout.split())
    points = json.loads(windtunnel(*grid, "--json").stdout)["points"]
    assert [point.get("refused", "").startswith(LONG_SAYS) for point in points] == [True, False]


def test_a_search_says_which_points_start_with_a_shorter_length_alone(windtunnel: Command, tmp_path: Path) -> None:
    workload = {"input_tokens": 64, "output_tokens": 8, "num_requests": 10, "arrivals": {"type": "burst"}}
    raw = {"deployment": {"device": "a10"}, "workload": workload, "load": "given", "vary": {"max_num_seqs": [8, 16]}}
    (tmp_path / "space.yaml").write_text(yaml.safe_dump(raw))
    search = ("search", str(tmp_path / "space.yaml"), "--no-store", "--from-command")
    done = windtunnel(*search, "vllm serve meta-llama/Llama-3.1-8B")
    for limit in (8, 16):
        assert f"max_num_seqs {limit}: vllm would not start: a request of 131,072" in " ".join(done.stdout.split())
    assert "Best: max_num_seqs" in done.stdout  # its written command gives a length that fits
    done = windtunnel(*search, "vllm serve meta-llama/Llama-3.1-8B --max-model-len 100000")
    assert "Best: " not in done.stdout
    assert "2 points evaluated: 2 cannot run" in done.stdout


@pytest.mark.full
def test_an_interrupted_search_names_options_too(windtunnel: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any) -> Study:
        raise InterruptedSearchError(search(*arguments))

    monkeypatch.setattr("windtunnel.cli.serving.search.search", interrupted)
    lengths = ("--input-tokens", "64", "--output-tokens", "8", "--num-requests", "20", "--no-store")
    server = "vllm serve openai/gpt-oss-120b -tp 8 --enable-expert-parallel --enable-eplb"
    limits = ("--slo", "ttft_p90=1s", "--devices", "h200_sxm")
    done = windtunnel("recommend", "--from-command", server, *limits, *lengths)
    assert done.code == 130
    text = " ".join(done.stdout.split())
    assert "cannot run" in text
    assert "--enable-expert-parallel" in text.partition("cannot run points")[2]


def test_what_varies_in_a_grid_need_not_be_given_besides(windtunnel: Command) -> None:
    varied = ("--vary", "device=h100_sxm,l40s", "--vary", "rate=1,2", "--vary", "input_tokens=32,64")
    done = windtunnel("whatif", "--model", "llama-3.1-8b", *varied, "--output-tokens", "8", "--num-requests", "20")
    assert done.code == 0, done.stderr
    assert "8 points of llama-3.1-8b" in done.stdout


def test_a_pasted_command_is_simulated_and_what_is_left_out_is_named(windtunnel: Command) -> None:
    load = (
        "--device",
        "h100_sxm",
        "--rate",
        "4",
        "--input-tokens",
        "64",
        "--output-tokens",
        "8",
        "--num-requests",
        "20",
    )
    command = "vllm serve llama-3.1-8b -tp 2 --max-num-seqs 64 --port 8000 --cpu-offload-gb 4 --bogus 3"
    done = windtunnel("simulate", "--from-command", command, *load, "--json")
    assert done.code == 0
    scenario = json.loads(done.stdout)["scenario"]
    assert scenario["deployment"]["parallelism"] == {"tp": 2}
    assert scenario["deployment"]["engine"]["max_num_seqs"] == 64
    assert done.stderr.splitlines() == [
        "unknown, ignored: --bogus",
        "not modelled: --cpu-offload-gb (every step waits for weights over the host's link)",
        "without effect on time: --port",
    ]


LOAD = ("--input-tokens", "64", "--output-tokens", "8", "--num-requests", "20")
ON = ("--device", "h100_sxm", *LOAD)
ON_ONE = ("--devices", "rtx_4090", "--max-devices", "1", *LOAD)
"""Points of a device without tables of measurements are priced in a tenth of the time."""


@pytest.mark.parametrize(
    "verb",
    [
        ("simulate", *ON, "--rate", "4", "--html", "PAGE"),
        ("capacity", *ON, "--slo", "ttft_p90=1s", "--seeds", "1"),
        ("whatif", *ON, "--vary", "rate=1,2", "--html", "PAGE"),
        ("explain", "--device", "h100_sxm", "--batch", "8"),
        ("search", "SPACE", "--no-store", "--html", "PAGE"),
        ("recommend", *ON_ONE, "--slo", "ttft_p90=1s", "--no-store", "--html", "PAGE"),
    ],
    ids=lambda verb: verb[0],
)
def test_every_verb_names_what_it_leaves_out(
    windtunnel: Command, space: str, verb: tuple[str, ...], tmp_path: Path
) -> None:
    manifest, page = tmp_path / "deployment.yaml", tmp_path / "page.html"
    image = "image: vllm/vllm-openai:v0.11.0"
    manifest.write_text(
        f"kind: Pod\nspec: {{containers: [{{{image}, args: [--model, llama-3.1-8b, --bogus, 3, --port, 1]}}]}}\n"
    )
    files = {"SPACE": space, "PAGE": str(page)}
    given = [files.get(word, word) for word in (*verb, "--from-command", str(manifest))]
    shown, documented = windtunnel(*given), windtunnel(*given, "--json")
    assert shown.code == documented.code == 0, shown.stderr + documented.stderr
    lines = ["unknown, ignored: --bogus", "without effect on time: --port"]
    assert [line for line in shown.stdout.splitlines() if line in lines] == lines
    assert json.loads(documented.stdout)["from_command"]["unknown"] == ["--bogus"]
    assert documented.stderr.splitlines()[:2] == lines
    if page.exists():
        assert "unknown, ignored: --bogus" in page.read_text()


@pytest.mark.parametrize("verb", ["simulate", "capacity", "whatif", "explain", "search", "recommend"])
def test_several_servers_are_refused(windtunnel: Command, space: str, verb: str, tmp_path: Path) -> None:
    (tmp_path / "compose.yaml").write_text(
        "services:\n  a: {image: vllm/vllm-openai, command: m}\n  b: {image: vllm/vllm-openai, command: --model m}\n"
        "  c: {image: vllm/vllm-openai, command: --model m --max-num-seqs 8}\n"
    )
    needed = {"search": (space,), "recommend": ("--devices", "h100_sxm", "--slo", "ttft_p90=1s")}.get(verb, ())
    done = windtunnel(verb, *needed, "--from-command", str(tmp_path / "compose.yaml"))
    assert (done.code, done.stdout) == (2, "")
    assert "compose.yaml starts 2 servers: b, c\nhint: keep the one to predict" in done.stderr


@pytest.mark.full
@pytest.mark.parametrize("slo", ["ttft_p90=500ms,tpot_p99=50ms", "ttft_p90:0.5,tpot=50ms"])
def test_limits_are_spelt_the_same_in_every_verb(windtunnel: Command, space: str, scenario: str, slo: str) -> None:
    def documented(*command: str) -> dict[str, Any]:
        done = windtunnel(*command, "--slo", slo, "--json")
        assert done.code == 0, done.stderr
        return json.loads(done.stdout)

    limits = {"ttft_p90": 0.5, "tpot_p99": 0.05}
    ran = documented("simulate", scenario)
    assert ran["scenario"]["slo"] == {"ttft_s": 0.5, "tpot_s": 0.05, "ttft_percentile": 90.0, "tpot_percentile": 99.0}
    assert ran["summary"]["goodput"]["limit_fractions"].keys() == {"ttft", "tpot"}
    assert documented("capacity", scenario, "--seeds", "1")["limits"] == limits
    assert documented("whatif", scenario, "--vary", "tp=1")["space"]["limits"] == limits
    recommended = documented("recommend", "llama-3.1-8b", *ON_ONE, "--no-store")
    assert recommended["space"]["limits"] == limits
    searched = documented("search", space, "--no-store")["space"]["limits"]
    assert {limit.name: limit.most_s for limit in limits_from(searched)} == limits


@pytest.mark.full
def test_a_scenario_says_the_share_that_must_keep_a_limit(windtunnel: Command, scenario: str) -> None:
    """At one load TTFT p50 is within the limit and p99 is not."""
    load = ("--set", "workload.arrivals.rate_per_s=20", "--set", "slo.ttft_s=100ms")
    for percentile, words in (("50", "Holds the SLO"), ("99", "Breaks the SLO"), ("99.9", "Breaks the SLO")):
        done = windtunnel("simulate", scenario, *load, "--set", f"slo.ttft_percentile={percentile}")
        assert words in done.stdout
        limit = windtunnel(
            "capacity", scenario, *load, "--set", f"slo.ttft_percentile={percentile}", "--seeds", "1", "--json"
        )
        assert json.loads(limit.stdout)["limits"] == {f"ttft_p{percentile}": 0.1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("capacity", "SCENARIO", "--slo", "ttft_q9=3s"), "there is no limit 'ttft_q9'"),
        (("capacity", "SCENARIO", "--slo", "ttft_p90=3m"), "ttft_p90: '3m' has the unit 'm'"),
        (("capacity", "SCENARIO", "--seeds", "0"), "--seeds is 0"),
        (("whatif",), "--vary is missing"),
        (("whatif", "SCENARIO", "--vary", "tpp=1,2"), "no path in a scenario"),
        (("whatif", "SCENARIO", "--vary", "tp=x"), "a whole number is needed"),
        (("whatif", "SCENARIO", "--vary", "tp=1", "--show", "speed"), "there is no figure 'speed'"),
        (("search", "SCENARIO", "--no-store"), "nothing varies"),
        (("search", "SPACE", "--no-store", "--executor", "rayy"), "--executor: there is no 'rayy'"),
        (("search", "SPACE", "--no-store", "--top", "0"), "--top is 0"),
        (("search", "SPACE", "--no-store", "--strategy", "foo"), "--strategy is 'foo'"),
        (("search", "SPACE", "--no-store", "--address", "auto", "--executor", "here"), "--address is a Ray cluster's"),
        (("search",), "there is no space to search"),
        (
            ("recommend", "qwen3-8b", "--devices", "l4", "--slo", "ttft=1s", "--rate", "inf"),
            "--rate inf sends all at once",
        ),
        (("simulate", "--from-command", "ls -l", "--device", "h100_sxm"), "starts no server that is known"),
    ],
)
def test_wrong_input_is_answered(
    windtunnel: Command, scenario: str, space: str, arguments: tuple[str, ...], message: str
) -> None:
    done = windtunnel(*({"SCENARIO": scenario, "SPACE": space}.get(word, word) for word in arguments))
    assert done.code == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


RECOMMEND = ("recommend", "llama-3.1-8b", "--input-tokens", "512", "--output-tokens", "64", "--num-requests", "100")


@pytest.mark.full
def test_a_recommendation_leads_with_its_sentence(windtunnel: Command, tmp_path: Path) -> None:
    given = (*RECOMMEND, "--devices", "h100_sxm,l40s", "--slo", "ttft_p90=1s", "--max-devices", "1", "--no-store")
    done = windtunnel(*given, "--rate", "300", "--out", str(tmp_path / "found"))
    assert done.code == 0
    assert done.stdout.splitlines()[1].startswith("Serve it on ")
    sentence = " ".join(done.stdout.split())
    said = r"holds \d+ requests/s, at least \d+ with 95% confidence\. Simulated behind one router, \d replicas? do"
    assert re.search(said, sentence)
    listed = re.findall(r"^\d+ +(\w+ TP 1.*), max_num_batched_tokens", done.stdout, re.MULTILINE)
    assert len(listed) == len(set(listed))  # one line for each deployment
    assert {name.split()[0] for name in listed} == {"h100_sxm", "l40s"}
    assert "What each setting is worth" not in done.stdout
    document = json.loads((tmp_path / "found" / "search.json").read_text())
    assert document["recommendation"] in " ".join(done.stdout.split())
    scenario = yaml.safe_load((tmp_path / "found" / "scenario.yaml").read_text())
    fleet = document["workloads"][0]["fleets"][0]
    assert scenario["deployment"]["replicas"] == fleet["copies"] > 1
    assert scenario["workload"]["num_requests"] == fleet["num_requests"] > 100
    assert scenario["workload"]["arrivals"]["rate_per_s"] == 300
    assert "Holds the SLO: " in windtunnel("simulate", str(tmp_path / "found" / "scenario.yaml")).stdout


@pytest.mark.full
def test_a_model_of_a_file_is_recommended_for(windtunnel: Command, tmp_path: Path) -> None:
    config = tmp_path / "new" / "config.json"
    config.parent.mkdir()
    config.write_text(json.dumps(catalog.model_config("Qwen/Qwen2.5-0.5B")))
    load = ("--rate", "2", "--input-tokens", "100", "--output-tokens", "10", "--num-requests", "20")
    options = ("--devices", "l40s", "--slo", "ttft_p90=1s", "--max-devices", "1", "--no-store", *load)
    done = windtunnel("recommend", str(config), *options, "--out", str(tmp_path / "found"))
    assert done.code == 0, done.stderr
    assert "Serve it on 1 x NVIDIA L40S" in done.stdout
    scenario = yaml.safe_load((tmp_path / "found" / "scenario.yaml").read_text())
    assert scenario["model"] == str(config)


@pytest.mark.full
def test_the_answers_of_one_rate_serve_another(windtunnel: Command, tmp_path: Path) -> None:
    given = (*RECOMMEND, "--devices", "l40s", "--slo", "ttft_p90=1s", "--max-devices", "1")
    for rate, took in ((3, " runs of "), (4, "0 runs of 0 requests in all; ")):
        done = windtunnel(*given, "--rate", str(rate), "--store", str(tmp_path / "answers"))
        assert f"took            {took}" in done.stdout or (rate == 3 and took in done.stdout), done.stdout


def test_capacity_needs_no_load_beside_another_setting(windtunnel: Command) -> None:
    lengths = ["--input-tokens", "64", "--output-tokens", "8", "--num-requests", "20"]
    given = ["--model", "Qwen/Qwen3-0.6B", "--device", "l40s", "--slo", "ttft_p90=5s", *lengths]
    done = windtunnel("capacity", *given, "--set", "workload.sampling.temperature=0.7")
    assert done.code == 0, done.stderr
    assert done.stdout.splitlines()[1].startswith("Sustains ")


@pytest.mark.full
@pytest.mark.parametrize("has_images", [False, True])
def test_a_recommendation_says_once_what_is_left_out(windtunnel: Command, has_images: bool) -> None:
    """The vision tower is not left out where requests have images."""
    images = ["--set", "workload.images.width=512", "--set", "workload.images.height=512"] if has_images else []
    lengths = ["--input-tokens", "64", "--output-tokens", "8", "--num-requests", "20"]
    where = ["--devices", "rtx_4090", "--max-devices", "1", "--slo", "ttft_p90=5s", "--no-store"]
    done = windtunnel("recommend", "qwen/qwen2.5-vl-3b-instruct", *where, *lengths, *images)
    assert done.code == 0
    assert done.stderr.count("is predicted without its vision tower") == (not has_images)


@pytest.mark.full
def test_a_recommendation_takes_prices_of_a_file_and_of_an_api(windtunnel: Command, tmp_path: Path) -> None:
    prices = tmp_path / "prices.yaml"
    prices.write_text("l40s: {cloud: {on_demand_usd_per_hour: 5, spot_usd_per_hour: 0.5}}\nh100_sxm: 9\n")
    given = ("--slo", "ttft_p90=1s", "--devices", "l40s", "--max-devices", "1", "--no-store", "--api-price", "0.2/2")
    done = windtunnel(*RECOMMEND, *given, "--prices", str(prices), "--price-term", "spot", "--json")
    document = json.loads(done.stdout)
    assert document["prices"] == ["l40s: $0.50/h spot, cloud"]
    figures = document["workloads"][0]["points"][0]["figures"]
    assert figures["usd_per_hour"] == 0.5
    # 512 x 0.2 + 64 x 2 = 230.4 USD for a million requests; half a dollar an hour pays 0.603 of them a second.
    assert "From 0.603 requests/s on, a replica of l40s" in document["recommendation"]
    refused = windtunnel(*RECOMMEND, *given, "--prices", str(prices), "--price-term", "reserved")
    assert (refused.code, "l40s has no price reserved" in refused.stderr) == (2, True)


@pytest.mark.full
def test_a_recommendation_is_for_the_named_engine(windtunnel: Command, tmp_path: Path) -> None:
    given = ("--devices", "rtx_4090", "--slo", "ttft_p90=1s", "--max-devices", "1", "--no-store", "--engine", "sglang")
    assert windtunnel(*RECOMMEND, *given, "--out", str(tmp_path / "found")).code == 0
    assert "sglang.launch_server" in (tmp_path / "found" / "launch.sh").read_text()


@pytest.mark.full
def test_what_cannot_run_is_said_in_options_of_the_command(windtunnel: Command) -> None:
    server = "vllm serve openai/gpt-oss-120b -tp 2 --enable-expert-parallel --enable-eplb"
    load = ("--device", "h200_sxm", "--input-tokens", "64", "--output-tokens", "8", "--num-requests", "20")
    done = windtunnel("whatif", "--from-command", server, *load, "--rate", "1", "--vary", "ep=1,2")
    assert done.code == 0, done.stderr
    assert "engine.enable_eplb (--enable-eplb) places experts" in " ".join(done.stdout.split())
    assert "parallelism.ep (--enable-expert-parallel) is 1" in " ".join(done.stdout.split())


@pytest.mark.full
def test_a_server_command_is_told_what_to_change(windtunnel: Command) -> None:
    lengths = ("--input-tokens", "512", "--output-tokens", "64", "--num-requests", "100", "--no-store")
    given = ("--devices", "h100_sxm", "--slo", "ttft_p90=1s,tpot_p99=30ms", *lengths)
    own = f"{SERVER} --served-model-name chat --port 9000"
    done = windtunnel("recommend", "--from-command", own, *given, "--rate", "2")
    assert "\nChanged command: Se" in done.stdout
    assert "--served-model-name chat --port 9000" in done.stdout.partition("Changed command: ")[2]
    assert done.code == 0
    assert done.stdout.startswith("Set --")
    listed, _, below = done.stdout.partition(" made no difference: ")
    named, _, rest = below.partition("\n\n")
    idle = " ".join(named.split()).removesuffix(".").split("; ")
    assert listed.endswith(f"\n{len(idle)} changes")
    assert not any(change in listed or change in rest for change in idle)
    assert "as it is" in listed
    assert "for 2.00 requests/s" in listed  # replicas for the load come first
    refused = windtunnel("recommend", "llama-3.1-8b", "--from-command", SERVER, *given)
    assert refused.code == 2
    assert (
        "--from-command serves meta-llama/Llama-3.1-8B, and MODEL is llama-3.1-8b\nhint: leave MODEL out"
        in refused.stderr
    )


@pytest.mark.parametrize("servers", ["server", "pools"])
def test_changes_to_a_command_are_for_one_device(windtunnel: Command, tmp_path: Path, servers: str) -> None:
    command = SERVER
    if servers == "pools":
        role = """{image: vllm/vllm-openai, command: '--model llama-3.1-8b --kv-transfer-config.kv_role kv_%s'}"""
        (tmp_path / "pools.yaml").write_text(f"services:\n  p: {role % 'producer'}\n  d: {role % 'consumer'}\n")
        command = str(tmp_path / "pools.yaml")
    load = ("--slo", "ttft=1s", "--input-tokens", "512", "--output-tokens", "64")
    done = windtunnel("recommend", "--from-command", command, "--devices", "h100_sxm,l40s", *load)
    assert (done.code, done.stdout) == (2, "")
    assert f"the {servers} of --from-command" in done.stderr
    assert (
        "one device, and --devices names 2: h100_sxm, l40s\nhint: for changes to the command: --devices h100_sxm"
        in (done.stderr)
    )


@pytest.mark.full
def test_changes_to_a_manifest_are_for_the_device_that_it_names(windtunnel: Command, tmp_path: Path) -> None:
    command = "[vllm, serve, llama-3.1-8b, --max-num-seqs, '1']"
    spec = "nodeSelector: {nvidia.com/gpu.product: NVIDIA-L40S}, "
    pod = f"spec: {{NODES containers: [{{name: a, image: vllm/vllm-openai, command: {command}}}]}}"
    for name, nodes in (("named", spec), ("unnamed", "")):
        text = f"{{apiVersion: v1, kind: Pod, metadata: {{name: a}}, {pod.replace('NODES ', nodes)}}}"
        (tmp_path / f"{name}.yaml").write_text(text)
    load = ("--slo", "ttft=1s", "--input-tokens", "64", "--output-tokens", "8", "--num-requests", "20", "--no-store")
    done = windtunnel("recommend", "--from-command", str(tmp_path / "named.yaml"), *load, "--json")
    assert done.code == 0, done.stderr
    assert json.loads(done.stdout)["space"]["deployment"]["device"] == "l40s"
    refused = windtunnel("recommend", "--from-command", str(tmp_path / "unnamed.yaml"), *load)
    assert (refused.code, "error: --devices is missing\nhint: for instance" in refused.stderr) == (2, True)


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        ("vllm serve --port 1", "hint: as in vllm serve Qwen/Qwen3-8B"),
        ("vllm serve mine/other", "or a model like it, by --model"),
    ],
)
def test_a_command_without_a_known_model_says_what_to_do(windtunnel: Command, command: str, hint: str) -> None:
    done = windtunnel("simulate", "--from-command", command, *ON, "--rate", "4")
    assert (done.code, done.stdout) == (2, "")
    assert hint in done.stderr


def test_a_refused_setting_of_a_command_is_named_by_its_option(windtunnel: Command) -> None:
    mega = "vllm serve llama-3.1-8b --moe-backend deep_gemm_mega_moe"
    done = windtunnel("simulate", "--from-command", mega, *ON, "--rate", "4")
    assert done.code == 2
    assert "hint: leave engine.all2all_backend (--moe-backend) out" in done.stderr


@pytest.mark.full
def test_changes_of_a_command_line_are_ranked(
    windtunnel: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first line is what to type."""
    monkeypatch.setenv("COLUMNS", "80")
    limits = "ttft_p90=1s,tpot_p99=50ms"
    given = ("whatif", "--from-command", "vllm serve llama-3.1-8b --max-num-seqs 1", *ON, "--slo", limits)
    done = windtunnel(*given, "--html", str(tmp_path / "page.html"))
    assert done.code == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    first = done.stdout.splitlines()[0]
    assert first.startswith(("Set --max-num-seqs 4 (now 1): +", "Serve nvidia/"))
    assert "% capacity, " in " ".join(done.stdout.split())
    assert "gain" in done.stdout
    assert "Set --max-num-seqs 2 (now 1)" in (tmp_path / "page.html").read_text()
    documented = json.loads(windtunnel(*given, "--json").stdout)
    assert documented["recommendation"].startswith(first)  # a narrow terminal wraps it


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--slo", "ttft_p90=1s"), "--devices is missing"),
        (("--devices", "h100_sxm"), "--slo is missing"),
        (("--devices", "h100", "--slo", "ttft_p90=1s"), "h100"),
        (("--devices", "h100_sxm", "--slo", "ttft_p90=fast"), "fast"),
        (("--devices", "h100_sxm", "--slo", "ttft_p90=1s", "--executor", "cloud"), "there is no 'cloud'"),
        (("--devices", "mi325x", "--slo", "ttft_p90=1s"), "mi325x has no list price"),
        (("--devices", "gb200", "--slo", "ttft_p90=1s", "--prices", "gb200=cheap"), "--prices"),
        (("--devices", "gb200", "--slo", "ttft_p90=1s", "--prices", "missing.yaml"), "missing.yaml"),
        (("--devices", "h200_sxm", "--slo", "ttft_p90=1s", "--provider", "lambda"), "lambda: no price of h200_sxm"),
        (("--devices", "h100_sxm", "--slo", "ttft_p90=1s", "--provider", "lamda"), "lamda"),
        (("--devices", "h100_sxm", "--slo", "ttft_p90=1s", "--provider", "aws/mars"), "aws has no prices of 'mars'"),
        (
            ("--devices", "h100_sxm", "--slo", "ttft_p90=1s", "--prices", "h100_sxm=2", "--provider", "aws"),
            "--provider",
        ),
        (
            ("--devices", "h200_sxm", "--slo", "ttft_p90=1s", "--prices", "h200_sxm=2", "--price-term", "spot"),
            "leave it",
        ),
        (("--devices", "l40s", "--slo", "ttft_p90=1s", "--price-term", "reserved"), "l40s has no price reserved"),
    ],
)
def test_a_recommendation_needs_devices_and_limits(windtunnel: Command, options: tuple[str, ...], message: str) -> None:
    done = windtunnel(*RECOMMEND, *options)
    assert done.code == 2
    assert message in done.stderr
    assert done.stdout == ""


SERVER = "vllm serve meta-llama/Llama-3.1-8B -tp 2 --max-num-seqs 32"
SAME = ("--model", "meta-llama/Llama-3.1-8B", "--tp", "2", "--max-num-seqs", "32")


@pytest.mark.full
@pytest.mark.parametrize(
    "command",
    [
        ("capacity", "--input-tokens", "512", "--output-tokens", "64", "--slo", "ttft_p90=1s", "--seeds", "1"),
        ("whatif", "--input-tokens", "512", "--output-tokens", "64", "--vary", "rate=1,2"),
        ("explain", "--batch", "8"),
    ],
)
def test_a_server_command_describes_the_deployment(windtunnel: Command, command: tuple[str, ...]) -> None:
    given, named = (
        windtunnel(*command, *deployment, "--device", "h100_sxm", "--json")
        for deployment in (("--from-command", SERVER), SAME)
    )
    assert given.code == named.code == 0
    documents = [json.loads(done.stdout) for done in (given, named)]
    for document in documents:
        for part in ("scenario", "space", "engine", "from_command"):  # a command line names its engine
            document.pop(part, None)
    assert documents[0] == documents[1]


def test_a_scenario_is_no_model_to_recommend(windtunnel: Command, scenario: str) -> None:
    done = windtunnel("recommend", scenario, "--devices", "h100_sxm", "--slo", "ttft_p90=1s")
    assert done.code == 2
    assert f"hint: windtunnel whatif {scenario} --vary device=A,B compares devices" in done.stderr
