"""`windtunnel compare`: results and scenarios side by side, with the reason of the largest difference."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from dashboard.conftest import write_bench_run
from windtunnel.report.comparison import ComparedRun, value_text, verdicts
from windtunnel.report.results import ResultEntry

if TYPE_CHECKING:
    from cli.conftest import Command

pytestmark = pytest.mark.compiled

SCENARIO: dict[str, Any] = {
    "model": "llama-3.1-8b",
    "deployment": {"device": "h100_sxm"},
    "workload": {
        "arrivals": {"type": "poisson", "rate_per_s": 8},
        "input_tokens": 512,
        "output_tokens": 32,
        "num_requests": 60,
    },
}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, tp in (("one", 1), ("two", 2)):
        scenario = SCENARIO | {"deployment": {"device": "h100_sxm", "parallelism": {"tp": tp}}}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(scenario))
    return tmp_path


@pytest.mark.full
def test_a_scenario_is_compared_as_its_result_is(windtunnel: Command, files: Path) -> None:
    (files / "one.json").write_text(windtunnel("simulate", "one.yaml", "--json").stdout)
    assert windtunnel("simulate", "one.yaml", "--out", "folder").code == 0
    compared = [
        json.loads(windtunnel("compare", first, "two.yaml", "--json").stdout)
        for first in ("one.json", "one.yaml", "folder")
    ]
    assert compared[0]["figures"] == compared[1]["figures"] == compared[2]["figures"]
    one, two = compared[0]["figures"]["tpot_s"]
    assert two < one
    sentence = compared[0]["verdicts"][0]
    assert sentence.startswith(f"two.yaml has {1 - two / one:.1%} lower TPOT, "), sentence
    assert " TP is 2 in place of 1 (the default). Memory takes " in sentence
    assert "num_gpu_blocks" not in sentence  # follows from TP
    assert compared[0]["differences"]["deployment.parallelism.tp"] == [None, 2]
    table = windtunnel("compare", "one.yaml", "two.yaml").stdout
    assert re.search(r"deployment\.parallelism\.tp +1 \(the default\) +2\n", table), table


@pytest.mark.full
def test_the_weightiest_settings_are_named_first(windtunnel: Command, files: Path) -> None:
    deployment = {"device": "b200_sxm", "parallelism": {"tp": 2}, "engine": {"max_num_seqs": 64}}
    other = SCENARIO | {"deployment": deployment, "precision": {"weights": "fp8"}}
    (files / "other.yaml").write_text(yaml.safe_dump({**other, "slo": {"ttft_s": "1us"}}))
    sentence = " ".join(windtunnel("compare", "one.yaml", "other.yaml").stdout.split())
    assert "times the cost, and breaks the SLO. Too close to call: TTFT mean" in sentence
    assert "interval of the other. The device is b200_sxm in place of h100_sxm, TP is 2 in" in sentence
    assert "place of 1 (the default), the format of the" in sentence
    assert "weights is fp8 in place of bf16 and max_num_seqs is 64 in place of 1024. Memory" in sentence
    assert "The same for all: origin simulated, model llama-3.1-8b, load " in sentence


def test_graphs_that_are_turned_off_are_named_before_what_follows(windtunnel: Command, files: Path) -> None:
    deployment = {"device": "h100_sxm", "engine": {"max_cudagraph_capture_size": 0}}
    (files / "eager.yaml").write_text(yaml.safe_dump(SCENARIO | {"deployment": deployment}))
    sentence = " ".join(windtunnel("compare", "one.yaml", "eager.yaml").stdout.split())
    assert "The largest batch of a CUDA graph is 0 (none: --enforce-eager of vLLM, --disable-cuda-graph" in sentence
    assert "num_gpu_blocks is" not in sentence


@pytest.mark.full
def test_what_is_printed_has_the_differences_and_the_page_the_distributions(windtunnel: Command, files: Path) -> None:
    done = windtunnel("compare", "one.yaml", "two.yaml", "one.yaml", "--html", "page.html")
    assert done.code == 0, done.stderr
    row = next(line.split() for line in done.stdout.splitlines() if line.startswith("TPOT mean"))
    assert row[-3] == "better"
    assert row[-4].startswith("-")
    assert "one.yaml performs as one.yaml does." in " ".join(done.stdout.split())
    page = (files / "page.html").read_text()
    assert "share of requests that took no longer" in page
    assert "deployment.parallelism.tp" in page


def test_long_names_and_settings_with_units_fit_a_narrow_terminal(
    windtunnel: Command, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    (files / "a_long_name_of_a_folder_with_one.yaml").write_text((files / "one.yaml").read_text())
    lines = windtunnel("compare", "one.yaml", "a_long_name_of_a_folder_with_one.yaml").stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert value_text("deployment.engine.reserved_bytes", 2**28) == "256 MiB"


def test_the_load_leads_what_follows_from_it(windtunnel: Command, files: Path) -> None:
    loads = {"closed": {"type": "closed_loop", "concurrency": 2}, "open": {"type": "poisson", "rate_per_s": 3.0}}
    for name, arrivals in loads.items():
        workload = SCENARIO["workload"] | {"arrivals": arrivals, "input_tokens": 8 if name == "open" else 64}
        (files / f"{name}.yaml").write_text(yaml.safe_dump(SCENARIO | {"workload": workload}))
    sentence = json.loads(windtunnel("compare", "closed.yaml", "open.yaml", "--json").stdout)["verdicts"][0]
    assert "The kind of arrivals is poisson in place of closed_loop" in sentence
    assert "input_tokens is 8 in place of 64" in sentence
    assert "max_model_len" not in sentence


def test_a_prediction_is_compared_with_a_measurement(windtunnel: Command, files: Path) -> None:
    write_bench_run(files / "real")
    done = windtunnel("compare", "real", "one.yaml", "--json")
    document = json.loads(done.stdout)
    assert document["kinds"] == ["bench", "simulate"]
    assert document["intervals"]["tpot_s"][1] is not None
    assert not any(path.startswith("deployment") for path in document["differences"])
    assert ". rate_per_s is 8 in place of 10" in document["verdicts"][0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("one.yaml",), "there is nothing to compare"),
        (("one.yaml", "nix"), "there is no nix"),
        (("one.yaml", "empty"), "empty holds no result"),
        (("one.yaml", "list.json"), "list.json holds no JSON object"),
        (("one.yaml", "step.json"), "step.json is of document; serving runs can be compared"),
        (("one.yaml", "torn.json"), "torn.json: $"),
        (("one.yaml", "bad.yaml"), "bad.yaml is not a scenario: it has none of model, deployment and workload"),
        (("one.yaml", "negative.json"), "negative.json: TTFT mean is -1, which cannot be"),
        (("one.yaml",) * 9, "9 runs are given; 2 to 8 can be compared"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    windtunnel: Command, files: Path, given: tuple[str, ...], message: str
) -> None:
    (files / "empty").mkdir()
    (files / "list.json").write_text("[1]")
    (files / "step.json").write_text('{"windtunnel": "1"}')
    (files / "torn.json").write_text('{"windtunnel": "1", "summary": {}, "scenario": []}')
    (files / "bad.yaml").write_text("modle: 1\n")
    (files / "negative.json").write_text(
        json.dumps({"windtunnel": "1", "summary": {"ttft_s": {"mean": -1}}, "scenario": SCENARIO})
    )
    done = windtunnel("compare", *given)
    assert (done.code, done.stdout, message in done.stderr) == (2, "", True), done.stderr


def test_runs_that_all_break_their_slo_are_said_to(windtunnel: Command, files: Path) -> None:
    for name in ("one", "two"):
        file = files / f"{name}.yaml"
        file.write_text(f"{file.read_text()}slo: {{ttft_s: 1us}}\n")
    first = windtunnel("compare", "one.yaml", "two.yaml").stdout
    assert re.search(r"two\.yaml has .*; both break the SLO\. TP is 2", " ".join(first.split())), first
    several = " ".join(windtunnel("compare", "one.yaml", "two.yaml", "one.yaml").stdout.split())
    assert re.search(r"\)\. one\.yaml, two\.yaml and one\.yaml break the SLO\. ", several), several


def test_of_several_runs_the_best_are_named_first_and_folders_that_all_share_left_out(
    windtunnel: Command, files: Path
) -> None:
    paths = [str(files / f"{name}.yaml") for name in ("one", "two", "one")]
    printed = " ".join(windtunnel("compare", *paths).stdout.split())
    assert printed.startswith("Compared with one.yaml two.yaml has the lowest TPOT mean ("), printed[:200]
    assert "one.yaml has the lowest $/M output tokens (" in printed
    assert printed.index("one.yaml has the lowest") < printed.index("Against one.yaml two.yaml has ")
    assert str(files) not in printed


def predicted(name: str, tpot_s: float, ttft_s: float, **deployment: Any) -> ComparedRun:
    """Return a run without requests: each prediction is between 20% less and 30% more in 80% of measurements."""
    figures = {"tpot_s": tpot_s, "ttft_s": ttft_s, "ttft_p99_s": 4.0}
    intervals = {figure: (0.8 * figures[figure], 1.3 * figures[figure]) for figure in ("tpot_s", "ttft_s")}
    scenario = SCENARIO | {"deployment": {"device": "h100_sxm", **deployment}}
    entry = ResultEntry(name, "simulate", 0.0, figures=figures, intervals=intervals)
    return ComparedRun(entry, {"scenario": scenario, "summary": {}})


def test_two_engines_are_too_close_to_call_within_the_error_of_their_predictions() -> None:
    runs = [predicted("a", 30e-3, 1.0), predicted("b", 31e-3, 2.0, engine={"name": "sglang"})]
    (sentence,) = verdicts(runs)
    assert sentence.startswith("b has 3.3% higher TPOT and 2 times the mean TTFT. Too close to call: TPOT mean, each ")
    assert "The engine is sglang in place of vllm" in sentence
    # The errors of one engine on one device cancel; a difference beyond the intervals can be told.
    (same,) = verdicts([runs[0], predicted("b", 31e-3, 2.0, parallelism={"tp": 2})])
    (far,) = verdicts([runs[0], predicted("b", 60e-3, 2.0, device="a100_sxm")])
    assert "Too close" not in same + far


def test_a_section_that_one_run_lacks_has_no_default() -> None:
    speculative = {"method": "ngram", "num_draft_tokens": 3, "acceptance_fraction": 0.7}
    drafts = predicted("b", 20e-3, 1.0, engine={"name": "vllm", "speculative": speculative})
    (sentence,) = verdicts([predicted("a", 30e-3, 1.0, engine={"name": "vllm"}), drafts])
    assert "The speculative method is ngram in place of none" in sentence
    assert "in place of the default" not in sentence
