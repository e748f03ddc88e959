"""The functions at the top of the package answer as the verbs do, and a notebook shows their results."""

import json
import pickle
import re
import subprocess
import sys
from html.parser import HTMLParser
from inspect import signature
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import windtunnel as wt
from windtunnel.catalog import model_config
from windtunnel.errors import InputError
from windtunnel.metrics.limits import Slo
from windtunnel.notebook import Shown
from windtunnel.report.render.html import template
from windtunnel.report.report import Bars, Cards, Cell, Facts, OnPage, OnTerminal, Report, Section, Table
from windtunnel.schema import encode
from windtunnel.search.answers import scenario_of
from windtunnel.serving.scenario import Scenario
from windtunnel.serving.shorthand import JOB_PATHS, OF_LOAD, PATHS
from windtunnel.training.job import TrainingJob

REPOSITORY = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.full
SPACE = {
    "model": "llama-3.1-8b",
    "deployment": {"device": "h100_sxm"},
    "workload": {
        "arrivals": {"type": "poisson", "rate_per_s": 1},
        "input_tokens": 256,
        "output_tokens": 32,
        "num_requests": 40,
    },
    "limits": {"ttft_p90": "1s"},
    "vary": {"tp": [1, 2]},
    "finalist_seeds": 1,
}


JOB = {"model": "llama-3.1-8b", "device": "h100_sxm", "sequence_tokens": 4096, "global_batch": 16}


@pytest.fixture(scope="module")
def chat() -> Scenario:
    return wt.scenario(
        model="llama-3.1-8b", device="h100_sxm", rate_per_s=4, input_tokens=256, output_tokens=32, num_requests=40
    )


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test a store of answers of its own."""
    monkeypatch.setattr("windtunnel.api.default_path", lambda: tmp_path / "search.sqlite")


class Tags(HTMLParser):
    """Checks that tags are closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:  # noqa: ARG002
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def shown(result: Shown) -> str:
    """What a notebook shows of a result, which must be HTML that needs nothing and changes nothing beside it."""
    assert len(repr(result)) < 400
    html = result._repr_html_()
    tags = Tags()
    tags.feed(html)
    assert tags.open == []
    assert not re.search(r"<(script|style|link|iframe|img|svg)", html)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html))


def test_a_run_is_shown(chat: Scenario) -> None:
    text = shown(wt.simulate(chat))
    assert "Serves" in text
    assert "TPOT" in text


def test_a_step_is_explained(chat: Scenario) -> None:
    step = wt.explain(chat, batch=8, context=512)
    assert step.batch.decode_requests == 8
    assert "qkv_proj" in shown(step)
    assert wt.explain(chat, batch=0, prefill_tokens=128).batch.prefill_tokens == 128


def test_a_capacity_is_found(chat: Scenario) -> None:
    loads = wt.capacity(chat, "ttft_p90=500ms", num_streams=1)
    assert loads.load > 4
    assert [limit.name for limit in loads.limits] == ["ttft_p90"]
    assert "Sustains" in shown(loads)


def test_a_batch_of_images_is_predicted(tmp_path: Path) -> None:
    job = {"model": "FLUX.1-dev", "device": "h100_sxm", "batch": 4}
    file = tmp_path / "diffusion.yaml"
    file.write_text(json.dumps({"kind": "diffusion", **job}), encoding="utf-8")
    result = wt.diffusion(job, {"parallelism.ulysses": 2})
    assert result.output_s == pytest.approx(result.batch_s / 4)
    assert result.batch_s < wt.diffusion(file).batch_s == wt.diffusion(job).batch_s
    assert "An image takes" in shown(result)
    with pytest.raises(InputError, match="describes a diffusion job, not a scenario"):
        wt.simulate(file)
    with pytest.raises(InputError, match="generates images or videos"):
        wt.train(file)


def test_a_collective_is_timed() -> None:
    run = wt.collective("all_reduce", "1GiB", device="h100_sxm", num_devices=64)
    assert run.bus_bytes_per_s == pytest.approx(run.algorithm_bytes_per_s * 2 * 63 / 64)
    assert "GB/s of bus bandwidth" in shown(run)
    assert wt.collective("all_reduce", 2**30, topology="dgx_h100:num_servers=8").seconds == run.seconds
    assert wt.collective("ncclAllReduce", "1GiB", device="h100_sxm", num_devices=64).seconds == run.seconds
    with pytest.raises(InputError, match="is not a whole number of bytes"):
        wt.collective("all_reduce", "1.5B", device="h100_sxm")
    assert wt.collective("all_reduce", 2**30, device="h100_sxm", num_devices=6).call.ranks.num_ranks == 6
    asks: dict[str, dict[str, Any]] = {
        "a device or a topology is needed": {},
        "num_devices is for device": {"topology": "dgx_h100", "num_devices": 4},
        "unknown collective algorithm": {"device": "h100_sxm", "algorithm": "star"},
        "num_devices is 0; at least 1 is needed": {"device": "h100_sxm", "num_devices": 0},
    }
    for sentence, options in asks.items():
        with pytest.raises(InputError, match=sentence):
            wt.collective("all_reduce", 1, **options)


def test_a_slow_server_is_diagnosed(chat: Scenario, tmp_path: Path) -> None:
    eager = {"deployment.engine.max_cudagraph_capture_size": 0, "workload.output_tokens": 64}
    wt.save(wt.simulate(chat, settings=eager), tmp_path / "slow")
    wt.save(wt.simulate(chat), tmp_path / "healthy")
    diagnosis = wt.diagnose(tmp_path / "slow", chat, before=tmp_path / "healthy")
    assert diagnosis.findings[0].name == "eager"
    assert "Slow: TPOT is" in shown(diagnosis)
    again = wt.diagnose(tmp_path / "healthy", model="llama-3.1-8b", device="h100_sxm")
    assert "Healthy" in shown(again)
    with pytest.raises(InputError, match="there is no option 'devic'"):
        wt.diagnose(tmp_path / "healthy", devic="h100_sxm")


def test_a_file_without_a_number_of_requests_has_the_usual_one(chat: Scenario, tmp_path: Path) -> None:
    raw = encode(chat)
    file = tmp_path / "chat.yaml"
    for arrivals, number in (
        ({"type": "poisson", "rate_per_s": 4}, 1000),
        ({"type": "closed_loop", "concurrency": 8}, 80),
    ):
        workload = {**raw["workload"], "arrivals": arrivals}
        workload.pop("num_requests")
        file.write_text(json.dumps({**raw, "workload": workload}))
        assert wt.load(file).workload.num_requests == wt.scenario(file).workload.num_requests == number


def test_a_space_is_searched(tmp_path: Path) -> None:
    evidence = wt.search(SPACE, top=1)
    assert len(evidence.study.outcomes[0].evaluations) == 2
    assert "2 points" in shown(evidence)
    file = tmp_path / "space.json"
    file.write_text(str(SPACE).replace("'", '"'))
    assert wt.search(file).study.outcomes[0].ranking == evidence.study.outcomes[0].ranking
    assert wt.search({**SPACE, "limits": "ttft_p90=1s"}, top=1).winner() == evidence.winner()
    wt.save(evidence, tmp_path / "searched")
    assert wt.load(tmp_path / "searched/scenario.yaml") == evidence.winner()
    points = evidence.to_arrow().to_pylist()
    assert [(each["point"], each["vary.tp"]) for each in points] == [(0, "1"), (1, "2")]
    assert points == pq.read_table(tmp_path / "searched/points.parquet").to_pylist()
    assert wt.search({**SPACE, "vary": {"tp": range(1, 3)}}, top=1).winner() == evidence.winner()
    assert evidence.winner().slo == Slo(ttft_s=1.0, ttft_percentile=90.0)
    with pytest.raises(InputError, match="is not empty"):
        wt.save(evidence, tmp_path / "searched")


def faster(device: str, file: Path) -> Path:
    """Write the device's file with twice the memory bandwidth, under the same name."""
    slow = wt.device(device)
    wt.save(msgspec.structs.replace(slow, memory_bytes_per_s=2 * slow.memory_bytes_per_s), file)
    return file


def test_a_grid_of_settings_is_simulated(chat: Scenario, tmp_path: Path) -> None:
    """Each point has the figures of its own run: two devices may have one name, and two profiles one device."""
    file = faster("h100_sxm", tmp_path / "faster.yaml")
    grid = wt.whatif(chat, {"device": ["h100_sxm", str(file)], "rate_per_s": [2, 4]}, slo="tpot_p99=6ms")
    points = grid.to_arrow().to_pylist()
    runs = [wt.simulate(chat, device=each["vary.device"], rate_per_s=each["vary.rate"]).summary for each in points]
    assert [each["tpot_p50"] for each in points] == [run.tpot_s.p50 for run in runs if run.tpot_s]
    assert [each["holds"] for each in points] == [False, False, True, True]
    assert "2 of 4 points meet the limits" in shown(grid)
    alone = wt.whatif(
        model="llama-3.1-8b", device="h100_sxm", output_tokens=8, vary={"concurrency": [1, 2], "input_tokens": (64, 96)}
    )
    assert alone.to_arrow()["vary.concurrency"].to_pylist() == [1, 1, 2, 2]
    for vary, sentence in (
        ({}, "nothing varies"),
        ({"tp": 2}, "vary tp is 2; a list of values is needed"),
        ({"tpp": [1]}, "tpp is no path in a scenario"),
        ({"tp": [3]}, "tp = 3 does not divide the 32 attention heads"),
    ):
        with pytest.raises(InputError, match=sentence):
            wt.whatif(chat, vary)


def test_without_settings_that_vary_changes_are_ranked(chat: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"as it is": {}, "tp 2": {"deployment.parallelism.tp": 2}, "tp 4": {"deployment.parallelism.tp": 4}}
    monkeypatch.setattr("windtunnel.search.recommend._changes", lambda _setup: changes)
    evidence = wt.whatif(chat, slo="tpot_p99=1s")
    outcome = evidence.study.outcomes[0]
    per_device = [outcome.mean(index).figures["output_tokens_per_s_per_device"] for index in outcome.ranking]
    assert len(per_device) == 3
    assert per_device == sorted(per_device, reverse=True)
    assert "3 points" in shown(evidence)


def test_the_replicas_of_a_recommendation_have_at_most_so_many_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windtunnel.search.recommend.TOKEN_BUDGETS", (None,))
    options = {"input_tokens": 256, "output_tokens": 32, "num_requests": 40}
    for most in ({"max_devices": 1}, {"max_usd_per_hour": wt.device("l40s").price_usd_per_hour}):
        outcome = wt.recommend("llama-3.1-8b", ["l40s"], "ttft_p90=2s", **most, **options).study.outcomes[0]
        answers = outcome.evaluations.values()
        assert any(each.refused for each in answers)
        assert {each.figures["devices"] for each in answers if not each.refused} == {1}


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_a_recommendation_is_for_a_rate_above_0(rate: float) -> None:
    with pytest.raises(InputError, match="rate_per_s is "):
        wt.recommend("llama-3.1-8b", ["l40s"], "ttft_p90=1s", rate_per_s=rate, input_tokens=64, output_tokens=8)


def test_a_deployment_is_recommended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windtunnel.search.recommend.TOKEN_BUDGETS", (None,))
    options = {"input_tokens": 256, "output_tokens": 32, "num_requests": 40}
    evidence = wt.recommend("llama-3.1-8b", ["l40s"], "ttft_p90=1s", rate_per_s=5, **options)
    outcome = evidence.study.outcomes[0]
    assert scenario_of(evidence.study, outcome, outcome.ranking[0]).deployment.device == "l40s"
    assert "Serve it on" in shown(evidence)
    again = wt.recommend("llama-3.1-8b", "l40s", "ttft_p90=1s", rate_per_s=5, **options)
    assert again.winner() == evidence.winner()
    assert isinstance(evidence.winner(), Scenario)


def test_a_recommendation_counts_given_prices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("windtunnel.search.recommend.TOKEN_BUDGETS", (None,))
    given = ("llama-3.1-8b", ["l40s", "h100_sxm"], "ttft_p90=1s")
    options = {"max_devices": 1, "input_tokens": 256, "output_tokens": 32, "num_requests": 40}
    file = tmp_path / "prices.yaml"
    file.write_text("l40s: 9\nh100_sxm: 0.25\n")
    for prices in ({"l40s": 9, "h100_sxm": 0.25}, "l40s=9,h100_sxm=0.25", file):
        evidence = wt.recommend(*given, rate_per_s=5, prices=prices, **options)
        winner = evidence.winner()
        assert isinstance(winner, Scenario)
        assert (winner.deployment.device, winner.deployment.price_usd_per_hour) == ("h100_sxm", 0.25)
        assert "$0.25/h" in repr(evidence)
    with pytest.raises(InputError, match="there is no option 'device'"):
        wt.recommend(*given, device="l40s", **options)
    for wrong in ({"b200_sxm": 1}, {"l40s": "free"}):
        with pytest.raises(InputError, match=r"b200_sxm, which is not among|l40s=free"):
            wt.recommend(*given, prices=wrong, **options)  # type: ignore[arg-type]


def test_a_recommendation_takes_the_load_as_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windtunnel.search.recommend.TOKEN_BUDGETS", (None,))
    given, seen = ("llama-3.1-8b", ["l40s"], "ttft_p90=1s"), []
    monkeypatch.setattr("windtunnel.api._search", lambda space, *_, **__: seen.append(space.scenario["workload"]))
    lengths: Any = {"input_tokens": 256, "output_tokens": 32}
    wt.recommend(*given, rate_per_s=40, **lengths)
    wt.recommend(*given, **lengths)
    wt.recommend(*given, concurrency=8, **lengths)
    wt.recommend(*given, trace="azure2023_code")
    assert seen[0] == seen[1]  # answers for one rate serve another
    assert seen[2]["arrivals"] == {"type": "closed_loop", "concurrency": 8}
    assert "arrivals" not in seen[3] or seen[3]["arrivals"]["type"] != "poisson"


def test_rows_of_points_are_read_by_other_libraries(chat: Scenario) -> None:
    grid = wt.whatif(chat, {"tp": [1, 2]})
    assert list(grid.to_pandas()["vary.tp"]) == [1, 2]
    reader = pa.RecordBatchReader.from_stream(grid)
    assert reader.read_all().equals(grid.to_arrow())


@pytest.mark.parametrize("name", ["simulate", "scenario", "whatif", "capacity", "recommend", "explain", "diagnose"])
def test_the_options_of_a_function_have_types(name: str) -> None:
    function = getattr(wt, name)
    assert "windtunnel." not in str(signature(function))  # `help` shows names as they are imported
    (options,) = get_args(get_type_hints(function)["options"])
    chosen = {"recommend": {"model", "device", "devices"}}.get(name, set())
    known = {*options.__annotations__, *signature(function).parameters} - {"options", "prices"}
    assert known >= {*PATHS, *OF_LOAD} - chosen
    assert all(each in str(wt.scenario.__doc__) for each in PATHS)


def test_the_options_of_a_training_job_have_types() -> None:
    (options,) = get_args(get_type_hints(wt.train)["options"])
    assert set(options.__annotations__) == {*JOB_PATHS, *TrainingJob.__struct_fields__}
    (options,) = get_args(get_type_hints(wt.validate)["deployment"])
    assert {*options.__annotations__, "calibration"} == {*PATHS}


def test_a_dictionary_is_a_field_of_a_training_job() -> None:
    job = wt.train(num_devices=16, recompute={"granularity": "selective", "modules": ["norms"]}, **JOB).setup.job
    assert job.recompute.modules == ("norms",)


def test_a_training_step_is_predicted(tmp_path: Path) -> None:
    step = wt.train(num_devices=16, tp=2, **JOB)
    assert step.fits
    assert "A step takes" in shown(step)
    file = tmp_path / "job.yaml"
    file.write_text("".join(f"{name}: {value}\n" for name, value in JOB.items()))
    assert wt.train(file, num_devices=16, tp=2).step_s == step.step_s == wt.train(step.setup.job).step_s
    assert pickle.loads(pickle.dumps(step)) == step != wt.train(num_devices=16, tp=4, **JOB)
    unfit = wt.train(num_devices=1, **JOB)
    assert "fit" in shown(unfit)
    assert "does not fit; step" in repr(unfit)
    assert "fit" not in repr(step)


def test_measured_runs_are_validated(tmp_path: Path) -> None:
    table = tmp_path / "runs.csv"
    table.write_text(
        "id,model,device,engine,engine_version,tp,input_tokens,output_tokens,concurrency,num_requests,ttft_ms,tpot_ms\n"
        "a4,llama-3.1-8b,h100_sxm,vllm,0.19.0,1,256,32,4,40,40,6.9\n"
    )
    runs = wt.validate(table)
    assert [run.measurement.id for run in runs] == ["a4"]
    assert "a4" in shown(runs)
    with pytest.raises(InputError, match="there is no file"):
        wt.validate(tmp_path / "none.csv")


@pytest.mark.parametrize("first", ["import windtunnel.search.study, windtunnel.model.config", ""])
def test_packages_with_a_functions_name_can_be_called(first: str) -> None:
    """Importing a subpackage binds its name in the package, over the function of that name."""
    program = f"""
import windtunnel as wt
{first}
assert wt.model("llama-3.1-8b").num_layers == 32
try:
    wt.search({{"model": "llama-3.1-8b"}})
except wt.InputError as error:
    assert "nothing varies" in str(error)
assert wt.model("llama-3.1-8b").num_layers == 32
import inspect
import windtunnel.search.study as study
assert (inspect.getdoc(wt.search) or "").startswith("Find the best deployments")
assert list(inspect.signature(wt.search).parameters) == ["space", "workers", "top"]
assert study.search is not wt.search and wt.model.config.__name__ == "windtunnel.model.config"
"""
    environment = {"PYTHONPATH": str(REPOSITORY / "src"), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_block_of_a_terminal_is_shown_and_escaped() -> None:
    blocks = [
        "a < b",
        Facts([("label", "<fact>")]),
        Table(["name", "two\nlines"], [["x", Cell("1", note="unseen")]], notes=["below"]),
        Bars({"memory": 0.75}),
        OnTerminal(lambda: ["only here"]),
        OnPage(lambda: ["not here"]),
        Cards([("1", "not here")]),
    ]
    report = Report("A & B", ["lead"], [Section("", blocks), Section("empty", [OnPage(list)])], ["note"])
    html = template("notebook.html").render(report=report)
    for text in ("A &amp; B", "lead", "a &lt; b", "&lt;fact&gt;", "two lines", "below", "75.0%", "only here", "note"):
        assert text in html
    for text in ("not here", "unseen", "empty"):
        assert text not in html


def test_numbers_of_numpy_and_paths_are_taken(tmp_path: Path) -> None:
    """Sweeps come from numpy and pandas, files from pathlib; numbers decide what plain ones do."""
    (tmp_path / "config.json").write_text(json.dumps(model_config("llama-3.1-8b")))
    given = {"tp": np.int64(2), "input_tokens": np.int32(64), "rate_per_s": np.float32(2.5), "seed": np.uint8(3)}
    scenario = wt.scenario(model=tmp_path, device="h100_sxm", quant="fp8", output_tokens=8, num_requests=5, **given)
    plain = {"tp": 2, "input_tokens": 64, "rate_per_s": 2.5, "seed": 3}
    other = wt.scenario(model=str(tmp_path), device="h100_sxm", quant="fp8", output_tokens=8, num_requests=5, **plain)
    assert scenario == other
    assert wt.model(tmp_path).num_layers == 32
    slots = wt.scenario(model=tmp_path, device="h100_sxm", concurrency=np.int64(4), input_tokens=9, output_tokens=9)
    assert slots.workload.num_requests == 40
    space = {**SPACE, "vary": {"tp": np.array([1, 2])}}
    assert len(wt.search(space, top=1).study.outcomes[0].evaluations) == 2
    assert wt.train(JOB, num_devices=np.int64(16), tp=np.int64(2)).step_s == wt.train(JOB, num_devices=16, tp=2).step_s


def test_a_scenario_may_be_a_file_or_its_keys(chat: Scenario, tmp_path: Path) -> None:
    wt.save(chat, tmp_path / "scenario.yaml")
    result = wt.simulate(chat)
    for described in (tmp_path / "scenario.yaml", str(tmp_path / "scenario.yaml"), encode(chat)):
        assert wt.simulate(described).summary == result.summary
    (tmp_path / "other.json").write_text('{"mean_ttft_ms": 1}')
    with pytest.raises(InputError, match="is not a scenario: it has none of model, deployment and workload"):
        wt.load(tmp_path / "other.json")


def test_a_step_needs_no_workload(chat: Scenario) -> None:
    step = wt.explain(model="llama-3.1-8b", device="h100_sxm", batch=8, context=512)
    assert step.step_s == wt.explain(chat, batch=8, context=512).step_s
    assert wt.explain(chat, batch=8, context=512, tp=2).step_s < step.step_s


def test_a_run_and_a_capacity_need_no_scenario_where_options_say_it() -> None:
    options: dict[str, Any] = {"model": "qwen2.5-0.5b", "device": "l40s", "input_tokens": 64, "output_tokens": 8}
    run = wt.simulate(**options, concurrency=2, num_requests=4)
    again = wt.simulate(wt.scenario(**options, concurrency=2, num_requests=4))
    assert run.summary == again.summary
    assert wt.capacity(**options, num_requests=20, slo="ttft_p90=1s", num_streams=1).load > 0
    with pytest.raises(InputError, match="no scenario is given"):
        wt.capacity(slo="ttft_p90=1s")


def test_limits_have_one_spelling(chat: Scenario) -> None:
    limited = wt.scenario(
        model="llama-3.1-8b", device="h100_sxm", concurrency=2, input_tokens=9, output_tokens=9, slo="ttft_p90=500ms"
    )
    assert limited.slo == Slo(ttft_s=0.5, ttft_percentile=90)
    texts = wt.capacity(chat, "ttft_p90=500ms", num_streams=1), wt.capacity(chat, {"ttft_p90": 0.5}, num_streams=1)
    assert texts[0].load == texts[1].load


def test_a_result_is_saved_as_its_command_does(chat: Scenario, tmp_path: Path) -> None:
    result = wt.simulate(chat)
    wt.save(result, tmp_path / "run")
    assert wt.simulate(tmp_path / "run/scenario.yaml").summary == result.summary
    assert (tmp_path / "run/requests.parquet").is_file()
    with pytest.raises(InputError, match="is not empty"):
        wt.save(result, tmp_path / "run")
    wt.save(wt.simulate(chat, tp=2), tmp_path / "run", overwrite=True)
    assert wt.load(tmp_path / "run/scenario.yaml").deployment.parallelism.tp == 2
    with pytest.raises(InputError, match="Capacities cannot be saved"):
        wt.save(wt.capacity(chat, num_streams=1), tmp_path / "loads.yaml")


def test_records_are_read_as_a_dictionary(chat: Scenario) -> None:
    requests = wt.simulate(chat).requests
    assert list(requests) == list(dict(requests)) == list(requests.to_pandas())
    assert "ttft_s" in requests
    assert len(repr(chat)) < 500


def test_options_change_a_scenario_that_is_given(chat: Scenario, tmp_path: Path) -> None:
    """As on the command line, where they stand beside its file."""
    changed = wt.scenario(chat, tp=2, rate_per_s=8, settings={"workload.output_tokens": 16}, slo={"ttft_p90": "1s"})
    assert (changed.deployment.parallelism.tp, changed.workload.output_tokens) == (2, 16)
    assert changed.slo == Slo(ttft_s=1.0, ttft_percentile=90)
    assert changed.workload.num_requests == chat.workload.num_requests
    assert chat.deployment.parallelism.tp == 1
    keys, file = encode(chat), tmp_path / "scenario.yaml"
    wt.save(chat, file)
    for described in (chat, keys, file, str(file)):
        assert wt.scenario(described, tp=2) == wt.scenario(chat, tp=2)
        assert wt.simulate(described, tp=2).summary == wt.simulate(wt.scenario(chat, tp=2)).summary
    assert keys == encode(chat)
    assert wt.capacity(chat, "ttft_p90=500ms", 1, tp=2).scenario.deployment.parallelism.tp == 2
    own = wt.scenario(chat, model=wt.model("qwen2.5-0.5b"))
    assert wt.scenario(own, tp=2).model == own.model


def test_names_of_routers_and_estimators_are_options_too(chat: Scenario) -> None:
    result = wt.simulate(chat, replicas=2, router="least_outstanding")
    assert result.scenario.deployment.router == "least_outstanding"
    assert result.summary == wt.simulate(wt.scenario(chat, replicas=2, router="least_outstanding")).summary
    with pytest.raises(InputError, match="folder is missing"):
        wt.simulate(chat, estimator="forest")


def test_a_misspelt_option_is_answered_with_the_names_of_its_function(chat: Scenario) -> None:
    hints = {"batch": lambda: wt.explain(chat, bach=8), "policy": lambda: wt.simulate(chat, polcy=print)}
    hints |= {"num_streams": lambda: wt.capacity(chat, num_steams=1), "tp": lambda: wt.train(tpp=2, **JOB)}
    for name, ask in hints.items():
        with pytest.raises(InputError, match="there is no option") as refused:
            ask()
        assert name in str(refused.value.hint).partition("did you mean")[2]


def test_names_of_other_tools_are_answered_with_the_options_here(chat: Scenario) -> None:
    hints = {"input_tokens": lambda: wt.simulate(chat, isl=8), "num_devices": lambda: wt.train(num_gpus=2, **JOB)}
    hints |= {"max_num_seqs": lambda: wt.capacity(chat, max_num_seq=8)}
    hints |= {"size_bytes": lambda: wt.collective("all_reduce", size="1GiB")}  # type: ignore[call-arg]
    for name, ask in hints.items():
        with pytest.raises(InputError) as refused:
            ask()
        assert f"did you mean {name}" in str(refused.value.hint)


def test_an_argument_of_a_wrong_type_is_refused_by_every_function() -> None:
    for name in wt.__all__:
        function = getattr(wt, name)
        if isinstance(function, type):
            continue
        hints = {
            key: hint
            for key, hint in get_type_hints(function).items()
            if key not in ("return", "options", "deployment")
        }
        needed = [each.name for each in signature(function).parameters.values() if each.default is each.empty]
        for argument in (key for key, hint in hints.items() if hint is not Any):
            given = {key: None for key in needed if key in hints} | {argument: object()}
            with pytest.raises(InputError, match=rf"{'|'.join(given)} of {name} is .* is needed"):
                function(**given)


def test_a_wrong_argument_is_answered_in_words(chat: Scenario) -> None:
    asks = {
        "scenario of simulate is 3; a Scenario, a dictionary, a path or text is needed": lambda: wt.simulate(3),
        "slo of capacity is a list; text or a dictionary is needed": lambda: wt.capacity(chat, ["tpot_p99=50ms"]),
        "num_streams of capacity is '3'; a whole number is needed": lambda: wt.capacity(chat, num_streams="3"),
        "policy of simulate is 5; a function is needed": lambda: wt.simulate(chat, policy=5),
        "estimator of simulate is 5; an Estimator or text is needed": lambda: wt.simulate(chat, estimator=5),
        "devices is empty": lambda: wt.recommend("llama-3.1-8b", [], "ttft_p90=1s"),
        r"deployment\.device is Device; text is needed": lambda: wt.scenario(chat, device=wt.device("l40s")),
        "^the space: nothing varies": lambda: wt.search({}),
        "^rate_per_s, concurrency or trace is missing": lambda: wt.simulate(model="llama-3.1-8b", device="h100_sxm"),
        "^slo: there is no limit 'tfft'": lambda: wt.simulate(chat, slo="tfft=2s"),
        "^slo tpot is 5, which means 5 s": lambda: wt.capacity(chat, "tpot=5,ttft=5"),
    }
    for sentence, ask in asks.items():
        with pytest.raises(InputError, match=sentence) as refused:
            ask()
        assert refused.value.hint
    assert wt.explain(chat, batch=np.int64(8), context=np.float32(512)).batch.decode_requests == 8


def test_a_place_that_cannot_be_written_is_refused(chat: Scenario, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be written: No such file or directory"):
        wt.save(chat, tmp_path / "none" / "scenario.yaml")


def test_a_training_job_may_be_of_a_model_written_out_and_of_another_tool(tmp_path: Path) -> None:
    config = model_config("qwen2.5-0.5b")
    step = wt.train(**{**JOB, "model": {**config, "name": "mine"}}, num_devices=8, settings={"parallelism.tp": 2})
    assert repr(step).startswith("TrainingResult(mine on 8 x h100_sxm: ")
    assert wt.train(step.setup.job, recompute="full").step_s > step.step_s
    script = tmp_path / "pretrain.sh"
    script.write_text(
        "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 4 --hidden-size 1024 --num-attention-heads 16"
        " --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 16"
        " --bf16 --vocab-size 32000 --odd 1"
    )
    with pytest.warns(UserWarning, match="odd"):
        assert wt.train(script, device="h100_sxm").setup.degrees.num_devices == 8


def test_a_model_that_was_saved_is_read_by_its_file(tmp_path: Path) -> None:
    model = msgspec.structs.replace(wt.model("qwen2.5-0.5b"), vocab_size=1024)
    wt.save(model, tmp_path / "mine.yaml")
    assert wt.model(tmp_path / "mine.yaml") == model
    with pytest.raises(InputError, match=r"there is no file .*none\.yaml"):
        wt.model(tmp_path / "none.yaml")


def test_what_is_saved_as_json_is_json(chat: Scenario, tmp_path: Path) -> None:
    device = wt.device("h100_sxm")
    for thing, load in ((chat, wt.load), (device, wt.device), (wt.model("qwen2.5-0.5b"), wt.model)):
        wt.save(thing, tmp_path / "saved.json")
        assert json.loads((tmp_path / "saved.json").read_text()).keys() == encode(thing).keys()
        assert load(tmp_path / "saved.json") == thing
    endless = msgspec.structs.replace(device, memory_bytes_per_s=float("inf"))
    with pytest.raises(InputError, match="JSON has no infinite numbers"):
        wt.save(endless, tmp_path / "endless.json")


def test_the_package_says_its_version() -> None:
    assert re.match(r"\d+\.\d+", wt.__version__)


def test_a_figure_of_one_result_alone_is_not_the_best(chat: Scenario) -> None:
    runs = [wt.simulate(chat, output_tokens=tokens) for tokens in (1, 1, 32)]
    assert "lowest TTFT p99" in repr(wt.compare(runs))
    assert "TPOT" not in repr(wt.compare(runs)).partition(". ")[0]


def test_results_are_compared(chat: Scenario, tmp_path: Path) -> None:
    small, large = wt.simulate(chat), wt.simulate(chat, tp=2)
    compared = wt.compare({"one": small, "two": large})
    assert "two has" in repr(compared)
    assert "deployment.parallelism.tp" in shown(compared)
    wt.save(small, tmp_path / "small")
    assert [run.name for run in wt.compare([tmp_path / "small", large])] == [str(tmp_path / "small"), "run 2"]
    with pytest.raises(InputError, match="1 runs are given; 2 to 8 can be compared"):
        wt.compare([small])
    with pytest.raises(InputError, match="run is no result but a Scenario"):
        wt.compare({"run": chat, "other": small})


def test_functions_and_estimators_of_the_users_own_are_answered(chat: Scenario) -> None:
    class Nothing:
        def estimate(self, op: object) -> None: ...

    for ask in (
        lambda: wt.simulate(chat, estimator=Nothing()),
        lambda: wt.explain_step(wt.resolve(chat), wt.step_batch(1, 64, 0), estimator=Nothing()),
        lambda: wt.simulate_training(wt.train(num_devices=8, tp=2, **JOB).setup.job, estimator=Nothing()),
    ):
        with pytest.raises(InputError, match="the estimator Nothing returned None for "):
            ask()
    with pytest.raises(InputError, match="router is function") as refused:
        wt.capacity(chat, router=shown)
    assert "router=..." in str(refused.value.hint)


def test_arguments_beyond_those_in_order_are_refused() -> None:
    run = wt.simulate(wt.scenario(model="qwen3-0.6b", device="t4", concurrency=1, input_tokens=8, output_tokens=2))
    with pytest.raises(InputError, match=r"compare takes runs by position; 2 are given") as refused:
        wt.compare(run, run)  # type: ignore[call-arg, arg-type]
    assert refused.value.hint == "in a list: compare([...])"
    with pytest.raises(InputError, match="collective takes op, size_bytes by position; 3 are given") as refused:
        wt.collective("all_reduce", "1MiB", "dgx_h100")  # type: ignore[misc]
    assert "by name: device, num_devices, topology" in str(refused.value.hint)
