"""Scenarios that are typed on a page: the same as on the command line, and no way to other files or programs."""

import json
from pathlib import Path
from typing import Any

import pytest

import windtunnel as wt
from dashboard.conftest import Ask
from windtunnel.dashboard.trial import FORM as FIELDS
from windtunnel.dashboard.trial import kept, sweep_document, swept, trial_of
from windtunnel.errors import InputError
from windtunnel.metrics.limits import Slo, limits_of
from windtunnel.report.serving.run import run_document
from windtunnel.schema import json_text
from windtunnel.search.capacity.capacity import capacities
from windtunnel.workload.arrivals import ClosedLoop, Poisson

FORM = {
    "model": "llama-3.1-8b",
    "device": "h100_sxm",
    "input_tokens": "64",
    "output_tokens": "8-16",
    "arrivals": "rate",
    "load": "50",
    "num_requests": "60",
    "ttft_s": "500ms",
}


def query(**changed: str) -> dict[str, str]:
    return {**FORM, **changed}


def wanted() -> wt.Scenario:
    lengths = {"type": "uniform", "min_tokens": 8, "max_tokens": 16}
    options: dict[str, Any] = {"input_tokens": 64, "output_tokens": lengths, "num_requests": 60}
    return wt.scenario(model="llama-3.1-8b", device="h100_sxm", rate_per_s=50.0, slo={"ttft_s": 0.5}, **options)


def test_a_form_is_a_scenario(tmp_path: Path) -> None:
    assert trial_of(query(), tmp_path).scenario == wanted()


def test_fields_go_over_a_pasted_scenario(tmp_path: Path) -> None:
    text = "model: llama-3.1-70b\ndeployment: {device: h100_sxm, parallelism: {tp: 4}}\nseed: 7\n"
    scenario = trial_of(query(text=text, model="", device="", tp="8"), tmp_path).scenario
    assert (scenario.model, scenario.deployment.parallelism.tp, scenario.seed) == ("llama-3.1-70b", 8, 7)


def test_a_servers_command_line_is_read_with_its_remarks(tmp_path: Path) -> None:
    trial = trial_of(query(text="vllm serve llama-3.1-8b -tp 2 --port 80 --warp 9", model=""), tmp_path)
    assert trial.scenario.deployment.parallelism.tp == 2
    assert any("--port" in remark for remark in trial.launch.remarks)
    assert any("--warp" in remark for remark in trial.launch.remarks)


def test_a_pasted_text_goes_over_fields_that_nobody_changed(tmp_path: Path) -> None:
    untouched = {**FIELDS["first"]}
    command = trial_of({**untouched, "text": "vllm serve qwen3-8b"}, tmp_path).scenario
    assert (command.model, command.deployment.device) == ("qwen3-8b", "h100_sxm")
    workload = "{arrivals: {type: closed_loop, concurrency: 4}, input_tokens: 9, output_tokens: 2, num_requests: 8}"
    text = f"model: qwen3-8b\ndeployment: {{device: l40s}}\nworkload: {workload}\nslo: {{ttft_s: 2s}}\n"
    pasted = trial_of({**untouched, "text": text}, tmp_path).scenario
    assert (pasted.deployment.device, pasted.workload.input_tokens) == ("l40s", 9)
    assert (pasted.slo, pasted.workload.arrivals) == (Slo(ttft_s=2.0), ClosedLoop(concurrency=4))
    changed = trial_of({**untouched, "text": text, "load": "12", "device": "h200_sxm"}, tmp_path).scenario
    assert (changed.deployment.device, changed.workload.arrivals) == ("h200_sxm", Poisson(rate_per_s=12.0))


@pytest.mark.full
def test_the_page_leads_with_a_server_that_would_not_start(ask: Ask) -> None:
    says = "--max-model-len is 200,000, and Qwen/Qwen3-8B takes 40,960 tokens; give 40960 at most"
    posted = {**FORM, "model": "", "text": "vllm serve Qwen/Qwen3-8B --max-model-len 200000"}
    for path in ("trial", "sweep"):
        assert '<div class="verdict bad"><p class="answer">vllm would not start: ' in ask(f"/{path}", post=posted).text
    document = ask("/api/trial", post=posted).document
    assert document["from_command"]["would_not_start"][0].startswith(f"vllm would not start: {says}")


@pytest.mark.parametrize(
    ("changed", "message", "hint"),
    [
        ({"model": "lama-3.1-8b"}, "no model 'lama-3.1-8b'", "did you mean"),
        ({"device": "h100_smx"}, "h100_smx", "did you mean"),
        ({"tp": "x"}, "TP is 'x'; a whole number is needed", ""),
        ({"tp": "3"}, "does not divide", "possible"),
        ({"model": ""}, "model is missing", "type it"),
        ({"device": ""}, "device is missing", "type it"),
        ({"load": "0"}, "load: '0' is not a number above 0", ""),
        ({"load": "nan"}, "load: 'nan'", ""),
        ({"arrivals": "weekly"}, "no arrivals 'weekly'", ""),
        ({"input_tokens": "1x"}, "input tokens: '1x'", "lognormal"),
        ({"ttft_s": "5 parsecs"}, "TTFT", ""),
        ({"num_requests": "2000000"}, "2,000,000 requests are too many", "terminal"),
        ({"arrivals": "concurrency", "load": "1e7"}, "concurrent requests are too many", "terminal"),
        ({"text": "- 1"}, "the text is no scenario", "vllm serve"),
        ({"text": "{"}, "neither YAML, line", "vllm serve"),
        ({"text": "vllm serve"}, "model", ""),
        ({"text": "moodel: x"}, "moodel", "model"),
    ],
)
def test_what_is_wrong_is_said_in_the_forms_words(ask: Ask, changed: dict[str, str], message: str, hint: str) -> None:
    answer = ask("/api/trial", post={**FORM, **changed})
    assert answer.status == 400
    assert message in answer.document["error"]
    assert hint in (answer.document["hint"] or "")


@pytest.mark.parametrize("path", ["{secret}", "../secret.csv", "~/secret.csv"])
def test_no_scenario_reads_files_outside(tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "runs").mkdir()
    secret = tmp_path / "secret.csv"
    secret.write_text("arrival_s,input_tokens,output_tokens\n0,1,1\n")
    text = json.dumps({"workload": {"trace": {"path": path.format(secret=secret)}}})
    empty = dict.fromkeys(("input_tokens", "output_tokens", "arrivals", "load"), "")
    with pytest.raises(InputError, match="lies outside runs"):
        trial_of(query(text=text, **empty), (tmp_path / "runs").resolve())


@pytest.mark.parametrize(
    "text",
    [
        "model: /etc/no_such_file.json",
        "model: ~root/no_such_file.json",
        "deployment: {device: no_such_file.yaml}",
        "deployment: {profile: {folder: tests}}",
        "vllm serve llama-3.1-8b --config /etc/hostname",
        "vllm serve llama-3.1-8b --config=/etc/no_such_file.yaml",
        "vllm serve llama-3.1-8b --config '/e'tc/hostname",
    ],
)
def test_no_answer_tells_what_files_there_are(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(request.config.rootpath)
    with pytest.raises(InputError, match=r"lies outside|there is no no_such_file\.yaml in") as raised:
        trial_of(query(text=text), tmp_path.resolve())
    assert "did you mean" not in (raised.value.hint or "")


def test_a_folder_may_be_called_like_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "vllm").mkdir()
    (tmp_path / "runs").mkdir()
    settings = query(text="deployment: {engine: {name: vllm}}")
    assert trial_of(settings, (tmp_path / "runs").resolve()).scenario.deployment.engine.name == "vllm"


def test_no_model_is_read_from_outside(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "secret.json").write_text('{"password": 1}')
    with pytest.raises(InputError, match="lies outside runs") as raised:
        trial_of(query(model=str(tmp_path / "secret.json"), quant="fp8"), (tmp_path / "runs").resolve())
    assert "password" not in raised.value.message


def test_a_file_below_the_folder_may_be_named(tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text("arrival_s,input_tokens,output_tokens\n0,1,1\n")
    empty = dict.fromkeys(("input_tokens", "output_tokens", "arrivals", "load"), "")
    text = json.dumps({"workload": {"trace": {"path": "own.csv"}}})
    scenario = trial_of(query(text=text, **empty), tmp_path.resolve()).scenario
    assert scenario.workload.trace is not None
    assert scenario.workload.trace.path == str(tmp_path / "own.csv")


@pytest.mark.parametrize("setting", ["engine: {scheduler: 'os:system'}", "router: 'os:system'"])
def test_no_program_is_named(tmp_path: Path, setting: str) -> None:
    with pytest.raises(InputError, match="of one's own does not run here"):
        trial_of(query(text=f"deployment: {{{setting}}}"), tmp_path)


@pytest.mark.full
def test_the_answer_is_that_of_simulate(ask: Ask) -> None:
    assert ask("/api/trial", post=FORM).document == json.loads(json_text(run_document(wt.simulate(wanted()))))
    assert "80% interval" in ask("/trial", post=FORM).text


def test_a_run_that_takes_too_long_is_ended(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windtunnel.dashboard.trial.MOST_S", -1.0)
    answer = ask("/api/trial", post={**FORM, "num_requests": "3000"})
    assert answer.status == 400
    assert "requests are simulated" in answer.document["error"]


@pytest.mark.full
def test_a_sweep_ends_at_the_capacity() -> None:
    found = sweep_document(swept(wanted()))
    assert found["capacity"] == capacities(wanted(), limits_of(wanted().slo), 1).load
    loads = [one["load"] for one in found["loads"]]
    assert loads == sorted(loads)
    # Sixty requests are few: a load beyond one that fails may pass again.
    assert all(one["holds"] for one in found["loads"] if one["load"] <= 0.9 * found["capacity"])
    assert next(one["holds"] for one in found["loads"] if one["load"] == found["capacity"])
    assert found["loads"][-1]["load"] > found["capacity"]


@pytest.mark.full
def test_a_sweep_of_clients_has_whole_loads(ask: Ask) -> None:
    found = ask("/api/sweep", post={**FORM, "arrivals": "concurrency", "load": "4", "num_requests": "40"}).document
    assert found["load"] == "concurrency"
    assert all(one["load"] == round(one["load"]) for one in found["loads"])
    assert max(one["load"] for one in found["loads"]) > 40


@pytest.mark.full
def test_a_sweep_is_shown(ask: Ask) -> None:
    page = ask("/sweep", post=FORM)
    assert page.status == 200
    assert "requests/s sustained" in page.text


def test_a_scenario_is_kept_as_it_was_typed(tmp_path: Path) -> None:
    assert kept(query(name="tried/one", what="scenario"), tmp_path) == "tried/one.yaml"
    assert wt.load(tmp_path / "tried" / "one.yaml") == wanted()
    with pytest.raises(InputError, match="exists"):
        kept(query(name="tried/one", what="scenario"), tmp_path)


def test_a_run_is_kept_where_the_page_of_runs_finds_it(serve: Any, tmp_path: Path) -> None:
    ask = serve(tmp_path)
    assert ask("/save", post={**FORM, "name": "tried/run", "what": "run"}).status == 200
    (one,) = ask("/api/runs").document["runs"]
    assert (one["name"], one["kind"]) == ("tried/run", "simulate")
    assert "not empty" in ask("/save", post={**FORM, "name": "tried/run", "what": "run"}).text


@pytest.mark.parametrize("name", ["", "../x", "/x", ".hidden", "a//b", "a/../../b", "a b", "a\nb"])
def test_nothing_is_kept_elsewhere(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="is no name"):
        kept(query(name=name, what="scenario"), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_form_is_filled_in_from_a_run(ask: Ask) -> None:
    page = ask("/try?run=served/slow").text
    assert "rate_per_s: 20.0" in page
    assert ask("/try").text.count("<option>") > 100
