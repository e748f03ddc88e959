"""`windtunnel validate` and `calibrate` on a small table of runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

if TYPE_CHECKING:
    from cli.conftest import Command

RUNS = """\
id,model,device,tp,max_num_seqs,max_num_batched_tokens,input_tokens,output_tokens,range_ratio,concurrency,num_requests,ttft_ms,tpot_ms
one,qwen2.5-0.5b,h100_sxm,1,16,1024,256,32,0.8,1,4,20,3
two,qwen2.5-0.5b,h100_sxm,1,16,1024,256,32,0.8,8,32,30,4
bad,qwen2.5-0.5b,h100_sxm,3,16,1024,256,32,0.8,8,32,30,4
"""


@pytest.fixture
def runs(tmp_path: Path) -> str:
    path = tmp_path / "runs.csv"
    path.write_text(RUNS, encoding="utf-8")
    return str(path)


@pytest.mark.full
def test_errors_are_shown_with_what_was_refused(windtunnel: Command, runs: str) -> None:
    done = windtunnel("validate", runs)
    assert done.code == 0
    assert "2 of 3 runs predicted" in done.stdout
    values = [line.split()[:3] for line in done.stdout.partition("Measured and predicted")[2].splitlines()]
    assert ["one", "TPOT", "3.00"] in values
    assert ["TTFT", "30.0", "ms"] in values
    assert "tp = 3" in " ".join(done.stdout.split())


def test_json_holds_every_run_with_its_interval(windtunnel: Command, runs: str) -> None:
    document = json.loads(windtunnel("validate", runs, "--json").stdout)
    one, _, bad = document["rows"]
    assert one["error"]["tpot"] == pytest.approx(one["predicted"]["tpot"] / 0.003 - 1)
    low, high = one["interval"]["tpot"]
    assert low < one["predicted"]["tpot"] < high
    assert "tp = 3" in bad["refused"]


def test_measured_power_tells_whether_a_slow_runs_devices_waited(windtunnel: Command, tmp_path: Path) -> None:
    """Ten times as slow: an idle H100 draws little more than 105 W meanwhile, one that computes at least 179."""
    header, one, *_ = RUNS.splitlines()
    rows = [
        f"{name},{one.partition(',')[2]}0,{power}" for name, power in (("waits", 120), ("computes", 250), ("none", ""))
    ]
    (tmp_path / "runs.csv").write_text("\n".join([f"{header},power_w", *rows]), encoding="utf-8")
    waits, computes, none = json.loads(windtunnel("validate", str(tmp_path / "runs.csv"), "--json").stdout)["rows"]
    assert waits["reason"].startswith("its devices drew 120 W, and steps this slow would draw ")
    assert "waited" not in computes["reason"] + none["reason"]
    assert computes["error"]["power"] == pytest.approx(waits["predicted"]["power"] / 250 - 1)
    assert "power" not in none["predicted"]


@pytest.mark.full
@pytest.mark.parametrize(("limit", "code"), [("tpot=10000%", 0), ("0.001%", 1), ("ttft=1e-9", 1)])
def test_the_exit_status_keeps_an_error_budget(windtunnel: Command, runs: str, limit: str, code: int) -> None:
    done = windtunnel("validate", runs, "--max-error", limit)
    assert done.code == code
    assert ("is above" in done.stderr) == (code == 1)


@pytest.mark.parametrize(
    "arguments",
    [
        ["missing.csv"],
        [],
        ["{runs}", "--max-error", "tpt=5%"],
        ["{runs}", "--max-error", "many"],
        ["{runs}", "--use", "secondary"],
        ["{runs}", "--calibration", "nobody"],
        ["{runs}", "--calibration", "{folder}/cut.yaml"],
        ["{runs}", "--calibration", "{folder}/missing.yaml"],
        ["{runs}", "--only", "nobody"],
        ["{runs}", "--only", ""],
        ["{runs}", "{runs}"],
        ["{folder}"],
        ["{folder}/noise.csv"],
        ["{folder}/semicolons.csv"],
        ["{folder}/noise.parquet"],
        ["{folder}/empty.json"],
    ],
)
def test_wrong_input_is_refused(windtunnel: Command, runs: str, tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "cut.yaml").write_text("engine: vllm\nprovenance:\n  fitted_on: run\n  mode")
    (tmp_path / "semicolons.csv").write_text(RUNS.replace(",", ";"))
    (tmp_path / "empty.json").write_text("{}")
    for name in ("noise.csv", "noise.parquet"):
        (tmp_path / name).write_bytes(b"\xff\xfe\x93")
    page = tmp_path / "page.html"
    given = [argument.format(runs=runs, folder=tmp_path) for argument in arguments]
    done = windtunnel("validate", *given, "--html", str(page))
    error, hint = done.stderr.splitlines()
    assert (done.code, done.stdout) == (2, "")
    assert error.startswith("error: ")
    assert hint.startswith("hint: ")
    assert not page.exists()


def test_a_page_is_one_file(windtunnel: Command, runs: str, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert windtunnel("validate", runs, "--html", str(page)).code == 0
    text = page.read_text(encoding="utf-8")
    assert text.count('<div class="chart">') >= 4
    assert "tp = 3" in text


@pytest.mark.full
def test_a_profile_is_fitted_and_used(windtunnel: Command, runs: str, tmp_path: Path) -> None:
    profile = tmp_path / "profile.yaml"
    done = windtunnel("calibrate", runs, "--out", str(profile))
    assert done.code == 0
    assert "2 of 3 runs fitted" in done.stdout
    before = json.loads(windtunnel("validate", runs, "--calibration", "none", "--json").stdout)
    after = json.loads(windtunnel("validate", runs, "--calibration", str(profile), "--json").stdout)
    assert after["rows"][0]["calibration"] == str(profile)
    assert after["scores"]["tpot"]["median"] < before["scores"]["tpot"]["median"]


@pytest.mark.full
def test_outputs_of_one_token_have_no_tpot_and_teach_what_ttft_does(windtunnel: Command, tmp_path: Path) -> None:
    lines = [line.rpartition(",")[0] for line in RUNS.splitlines()]
    path, out = tmp_path / "runs.csv", tmp_path / "profile.yaml"
    path.write_text("\n".join(lines).replace(",256,32,", ",256,1,"), encoding="utf-8")
    assert windtunnel("calibrate", str(path), "--out", str(out)).code == 0
    profile = yaml.safe_load(out.read_text())
    assert set(profile["provenance"]["median_error"]) == {"ttft"}
    assert profile["host"]["first_token_s"] != pytest.approx(8e-3, rel=1e-6)


def test_runs_without_ttft_and_tpot_teach_nothing(windtunnel: Command, tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    lines = [line.rpartition(",")[0] for line in RUNS.splitlines()]
    path.write_text("\n".join(lines).replace("ttft_ms", "e2e_ms"), encoding="utf-8")
    done = windtunnel("calibrate", str(path), "--out", str(tmp_path / "profile.yaml"))
    assert done.code == 2
    assert "TTFT or TPOT" in done.stderr
    assert not (tmp_path / "profile.yaml").exists()


@pytest.mark.full
def test_one_file_does_not_hold_two_devices(windtunnel: Command, tmp_path: Path) -> None:
    header, *_ = RUNS.splitlines()
    lines = [
        f"{device}{tp},qwen2.5-0.5b,{device},{tp},16,1024,256,32,0.8,4,16,{measured}"
        for device, slow in (("h100_sxm", 1), ("a100_sxm", 2))
        for tp in (1, 2)
        for measured in ("40,6" if tp == slow else "18,1.5",)
    ]
    path, out = tmp_path / "runs.csv", tmp_path / "profile.yaml"
    path.write_text("\n".join([header, *lines]), encoding="utf-8")
    done = windtunnel("calibrate", str(path), "--out", str(out))
    assert done.code == 2
    assert "vllm-a100_sxm, vllm-h100_sxm" in done.stderr
    assert not out.exists()


@pytest.mark.full
def test_a_limit_that_nobody_knows_is_inferred_kept_and_used(windtunnel: Command, tmp_path: Path) -> None:
    runs, profile = tmp_path / "runs.csv", tmp_path / "profile.yaml"
    header = (
        "model,device,tp,max_num_seqs,input_tokens,output_tokens,range_ratio,concurrency,num_requests,ttft_ms,tpot_ms"
    )
    rows = [header]
    for tp in (1, 2):
        for concurrency in (8, 32, 64):
            made = f"{tp},16,64,64,1,{concurrency},{2 * concurrency}"
            load = ("--concurrency", str(concurrency), "--num-requests", str(2 * concurrency), "--calibration", "none")
            shape = ("--model", "qwen2.5-0.5b", "--device", "h100_sxm", "--tp", str(tp), "--max-num-seqs", "16")
            ran = windtunnel("simulate", *shape, "--input-tokens", "64", "--output-tokens", "64", *load, "--json")
            found = json.loads(ran.stdout)["summary"]
            times = (found["ttft_s"]["mean"] * 1e3, found["tpot_s"]["mean"] * 1e3)
            rows.append(f"qwen2.5-0.5b,h100_sxm,{made.replace('16', '?', 1)},{times[0]},{times[1]}")
    runs.write_text("\n".join(rows) + "\n", encoding="utf-8")
    done = windtunnel("calibrate", str(runs), "--out", str(profile))
    assert "max_num_seqs 16" in done.stdout
    after = json.loads(windtunnel("validate", str(runs), "--calibration", str(profile), "--json").stdout)
    before = json.loads(windtunnel("validate", str(runs), "--calibration", "none", "--json").stdout)
    assert abs(after["rows"][2]["error"]["ttft"]) < 0.1 < abs(before["rows"][2]["error"]["ttft"])


POOLS = """\
id,model,device,prefill_tp,decode_tp,decode_replicas,input_tokens,output_tokens,range_ratio,concurrency,num_requests,ttft_ms,tpot_ms
apart,qwen2.5-0.5b,h100_sxm,1,1,2,256,32,1,1,4,20,3
wide,qwen2.5-0.5b,h100_sxm,1,2,,256,32,1,1,4,20,3
"""


@pytest.fixture
def pools(tmp_path: Path) -> str:
    path = tmp_path / "pools.csv"
    path.write_text(POOLS, encoding="utf-8")
    return str(path)


@pytest.mark.full
def test_runs_of_separate_pools_are_predicted_and_told_apart(windtunnel: Command, runs: str, pools: str) -> None:
    done = windtunnel("validate", runs, pools)
    assert done.code == 0
    assert "4 of 5 runs predicted" in done.stdout
    assert [line.split()[:2] for line in done.stdout.splitlines() if "agg " in line] == [["agg", "2"], ["disagg", "2"]]
    document = json.loads(windtunnel("validate", runs, pools, "--json").stdout)
    assert document["by"]["mode"]["disagg"]["ttft"]["runs"] == 2
    assert document["rows"][3]["parallelism"] == "P 1x tp1 D 2x tp1"


@pytest.mark.full
def test_runs_of_separate_pools_take_no_part_in_the_fit_of_others(
    windtunnel: Command, runs: str, pools: str, tmp_path: Path
) -> None:
    alone, both = tmp_path / "alone.yaml", tmp_path / "both.yaml"
    assert windtunnel("calibrate", runs, "--source", "runs", "--out", str(alone)).code == 0
    done = windtunnel("calibrate", runs, pools, "--source", "runs", "--out", str(both))
    assert done.code == 0
    assert "2 of 3 runs fitted" in done.stdout
    fitted = yaml.safe_load(both.read_text())
    learnt = fitted.pop("transfer")
    assert fitted == yaml.safe_load(alone.read_text())
    assert learnt["record"]["num_runs"] == 2
    assert "KV transfers take" in done.stdout


def test_pools_of_one_configuration_teach_nothing(windtunnel: Command, pools: str, tmp_path: Path) -> None:
    done = windtunnel("calibrate", pools, "--only", "wide", "--out", str(tmp_path / "profile.yaml"))
    assert done.code == 2
    assert "say nothing about their transfers" in done.stderr
    assert not (tmp_path / "profile.yaml").exists()


def test_a_profile_needs_somewhere_to_go(windtunnel: Command, runs: str) -> None:
    assert windtunnel("calibrate", runs).code == 2


def changed(folder: Path, old: str, new: str) -> str:
    """The table with `new` for every `old`."""
    path = folder / "changed.csv"
    path.write_text(RUNS.replace(old, new), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("two,", "one,", "changed.csv has several runs of id 'one'"),
        ("id,model", "id,id", "changed.csv has two columns 'id'"),
        ("ttft_ms", "ttft", "changed.csv has a column 'ttft', which is not known"),
        (",20,3", ",nan,3", "row 1: ttft_ms is 'nan'"),
        (",20,3", ",-20,3", "row 1: ttft_ms is '-20'"),
        (",0.8,1,", ",1.5,1,", "row 1: range_ratio is '1.5'; from 0 to 1 is needed"),
        (",0.8,1,", ",0.8,1.5,", "row 1: concurrency is '1.5'; a whole number is needed"),
        ("qwen2.5-0.5b", "qwen9", "no run could be predicted: there is no model 'qwen9' in the catalog"),
    ],
)
def test_a_wrong_table_is_refused_in_one_sentence(
    windtunnel: Command, tmp_path: Path, old: str, new: str, message: str
) -> None:
    done = windtunnel("validate", changed(tmp_path, old, new))
    assert done.code == 2
    assert done.stderr.startswith("error: ")
    assert message in " ".join(done.stderr.split())


def test_a_byte_order_mark_is_no_part_of_the_first_column(windtunnel: Command, tmp_path: Path) -> None:
    assert windtunnel("validate", changed(tmp_path, "id,model", "\ufeffid,model"), "--only", "one").code == 0


@pytest.mark.parametrize(
    "options",
    [
        ("--max-error", "tpot=nan"),
        ("--max-error", "inf"),
        ("--use", "nonsense"),
        ("--only", "nobody"),
        ("--processes", "0"),
        ("--html", "{runs}/page.html"),
        ("--html", "{folder}"),
        ("--calibration", "sglang-b200_sxm"),
    ],
)
def test_a_wrong_option_is_refused(windtunnel: Command, runs: str, tmp_path: Path, options: tuple[str, str]) -> None:
    done = windtunnel("validate", runs, *(option.format(runs=runs, folder=tmp_path) for option in options))
    assert done.code == 2
    assert done.stderr.startswith("error: ")


def test_a_place_that_cannot_be_written_is_known_before_the_fit(windtunnel: Command, runs: str) -> None:
    done = windtunnel("calibrate", runs, "--out", f"{runs}/profile.yaml")
    assert done.code == 2
    assert "cannot be written" in done.stderr


@pytest.mark.parametrize("place", ["/proc/page.html", "{runs}/page.html", "{folder}"])
@pytest.mark.parametrize("verb", ["simulate", "validate", "search", "whatif"])
def test_a_page_that_cannot_be_written_is_known_before_the_work(
    windtunnel: Command, runs: str, tmp_path: Path, verb: str, place: str
) -> None:
    done = windtunnel(verb, runs, "--html", place.format(runs=runs, folder=tmp_path))
    assert (done.code, done.stdout) == (2, "")
    assert "cannot be written" in done.stderr or "is a folder" in done.stderr
    assert "\nhint: " in done.stderr


@pytest.mark.full
def test_a_use_leaves_runs_out(windtunnel: Command, tmp_path: Path) -> None:
    text = RUNS.replace("tpot_ms\n", "tpot_ms,use\n").replace(",20,3\n", ",20,3,\n").replace(",30,4\n", ",30,4,odd\n")
    path = tmp_path / "uses.csv"
    path.write_text(text, encoding="utf-8")
    document = json.loads(windtunnel("validate", str(path), "--json").stdout)
    assert [row["id"] for row in document["rows"]] == ["one"]
    assert document["left_out"] == {"odd": 2}
    document = json.loads(windtunnel("validate", str(path), "--use", "odd", "--json").stdout)
    assert [row["id"] for row in document["rows"]] == ["two", "bad"]
    assert "left out by their use: 2 odd" in windtunnel("validate", str(path)).stdout


def test_one_configuration_says_that_none_was_left_out(windtunnel: Command, runs: str, tmp_path: Path) -> None:
    profile = tmp_path / "profile.yaml"
    said = " ".join(windtunnel("calibrate", runs, "--only", "one", "--out", str(profile)).stdout.split())
    assert "one configuration only, so that none was left out" in said
    # The error on the runs that were fitted is what `validate` finds with the calibration.
    check = json.loads(windtunnel("validate", runs, "--only", "one", "--calibration", str(profile), "--json").stdout)
    off = {name: f"{check['scores'][name]['median']:.1%}" for name in ("tpot", "ttft")}
    assert f"TPOT is {off['tpot']} off (before" in said
    assert f"TTFT is {off['ttft']} off (before" in said


def test_a_clients_file_names_its_model_and_another_file_is_refused_first(windtunnel: Command, tmp_path: Path) -> None:
    result = {
        "model_id": "meta-llama/Llama-3.1-8B-Instruct", "num_prompts": 20, "completed": 20, "request_rate": 4.0,
        "total_input_tokens": 2000, "total_output_tokens": 400, "output_throughput": 80.0,
        "mean_ttft_ms": 30.0, "mean_tpot_ms": 7.0,
    }  # fmt: skip
    (tmp_path / "result.json").write_text(json.dumps(result))
    done = windtunnel("validate", str(tmp_path / "result.json"), "--device", "h100_sxm")
    assert done.code == 0, done.stderr
    assert "1 of 1 run predicted" in done.stdout
    (tmp_path / "other.json").write_text('{"a": 1}')
    refused = windtunnel("validate", str(tmp_path / "other.json"))
    assert (refused.code, "is no client result that is known" in refused.stderr) == (2, True)
