"""`windtunnel gate`: its exit status, its reasons, and what it refuses."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from cli.conftest import Command

SERVER = "vllm serve qwen2.5-0.5b --tensor-parallel-size 1"
LOAD = (
    "--device",
    "h100_sxm",
    "--rate",
    "20",
    "--num-requests",
    "60",
    "--input-tokens",
    "256",
    "--output-tokens",
    "32",
)


def write_result(path: Path, tpot_ms: float) -> str:
    document = {
        "completed": 100,
        "total_input_tokens": 102_400,
        "total_output_tokens": 12_800,
        "max_concurrency": 8,
        "num_prompts": 100,
        "mean_tpot_ms": tpot_ms,
        "mean_ttft_ms": 50.0,
        "mean_e2el_ms": 50 + 127 * tpot_ms,
        "output_throughput": 8e3 / tpot_ms,
    }
    path.write_text(json.dumps(document), encoding="utf-8")
    return str(path)


def test_the_same_server_in_other_words_passes(windtunnel: Command) -> None:
    other = "docker run --gpus all vllm/vllm-openai --model qwen2.5-0.5b -tp 1"
    done = windtunnel("gate", "--from-command", other, "--before", SERVER, *LOAD, "--json")
    assert done.code == 0
    assert json.loads(done.stdout)["passes"]


def test_a_change_that_breaks_the_slo_fails_with_its_reason(windtunnel: Command) -> None:
    slower = f"docker run me/vllm-fork --model {SERVER.removeprefix('vllm serve ')} --max-num-seqs 1 --my-option"
    done = windtunnel("gate", "--from-command", slower, "--before", SERVER, *LOAD, "--slo", "ttft_p90=100ms")
    assert done.code == 1
    # The SLO leads, however much worse another figure is.
    assert re.search(r"Fails: TTFT p90 is [\d.]+ m?s, the SLO allows 100 ms; \d more fail", done.stdout)
    assert "failed: TTFT p90 is" in done.stderr
    lines = done.stdout.splitlines()
    assert re.fullmatch(r"qwen2.5-0.5b on h100_sxm, vllm [\d.]+", lines[0])
    assert "Poisson arrivals at 20/s, 256 tokens in, 32 tokens out; seed 0" in lines
    assert "engine.max_num_seqs (--max-num-seqs)" in done.stdout
    assert "the image me/vllm-fork is not known: vllm is assumed, by its name" in done.stdout
    assert "unknown, ignored: --my-option" in done.stdout


def test_a_change_after_which_the_server_would_not_start_fails(windtunnel: Command) -> None:
    sides = "vllm serve qwen3-8b --max-model-len 8192", "vllm serve qwen3-8b --max-model-len 200000"
    done = windtunnel("gate", "--from-command", sides[1], "--before", sides[0], *LOAD, "--json")
    assert done.code == 1
    document = json.loads(done.stdout)
    assert document["verdict"].startswith("Fails: vllm would not start: --max-model-len is 200,000, and Qwen/Qwen3-8B")
    assert not document["passes"]
    assert document["remarks"] == ["changed: engine.max_model_len (--max-model-len) 8192 -> 200000"]
    back = windtunnel("gate", "--from-command", sides[0], "--before", sides[1], *LOAD)
    assert back.code == 0
    assert "note: before the change, vllm would not start: " in back.stdout + back.stderr


@pytest.mark.full
def test_a_scenario_file_may_be_what_was_before(windtunnel: Command, tmp_path: Path) -> None:
    windtunnel("init", "serving", str(tmp_path / "old.yaml"))
    old = str(tmp_path / "old.yaml")
    assert windtunnel("gate", old, "--before", old).code == 0


def test_a_manifest_of_several_documents_may_be_what_was_before(windtunnel: Command, tmp_path: Path) -> None:
    pod = "kind: Pod\nspec: {containers: [{image: vllm/vllm-openai, args: [Qwen/Qwen3-0.6B]}]}"
    served = tmp_path / "served.yaml"
    served.write_text(f"kind: Service\n---\n{pod}\n")
    load = ["--device", "l40s", "--rate", "1", "--input-tokens", "64", "--output-tokens", "8", "--num-requests", "20"]
    assert windtunnel("gate", "--before", str(served), "--from-command", str(served), *load).code == 0
    for done in (windtunnel("gate", str(served), "--before", str(served)), windtunnel("simulate", str(served))):
        assert done.code == 2
        assert f"hint: it starts a server: --from-command {served}" in done.stderr


@pytest.mark.full
@pytest.mark.parametrize(("tpot_ms", "code"), [(10.0, 0), (10.6, 1)])
def test_measured_runs_are_compared_with_earlier_ones(
    windtunnel: Command, tmp_path: Path, tpot_ms: float, code: int
) -> None:
    old = [write_result(tmp_path / f"old{number}.json", 10 + number / 100) for number in range(3)]
    new = [write_result(tmp_path / f"new{number}.json", tpot_ms + number / 100) for number in range(3)]
    options = [word for path in new for word in ("--measured", path)] + [
        word for path in old for word in ("--baseline", path)
    ]
    done = windtunnel("gate", *options)
    assert done.code == code
    assert ("TPOT mean rises by 6.0%" in done.stdout) == (code == 1)


@pytest.mark.full
@pytest.mark.parametrize(("tpot_ms", "code"), [(5.5, 0), (10.0, 1)])
def test_a_measured_change_is_compared_with_the_predicted_one(
    windtunnel: Command, tmp_path: Path, tpot_ms: float, code: int
) -> None:
    sides = {"--baseline": 10.0, "--measured": tpot_ms}
    words = [
        word
        for option, value in sides.items()
        for number in range(3)
        for word in (option, write_result(tmp_path / f"{option}{number}.json", value + number / 100))
    ]
    servers = ("--before", "vllm serve qwen3-32b", "--from-command", "vllm serve qwen3-32b -tp 2")
    done = windtunnel("gate", *words, *servers, "--device", "h100_sxm", "--max-increase", "tpot=2%")
    assert done.code == code, done.stderr
    assert ("the change should make it" in done.stdout) == (code == 1)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--slo", "tpot_p99=5ms"), "--slo is checked on a predicted change; measured runs are compared with"),
        (("--rate", "8"), "the measured runs have their own load; --rate does not go with --measured"),
        (("--temperature", "1"), "the measured runs have their own load; --temperature does not go with --measured"),
    ],
)
def test_what_measured_runs_cannot_be_held_to_is_refused(
    windtunnel: Command, tmp_path: Path, option: tuple[str, ...], message: str
) -> None:
    runs = ("--measured", write_result(tmp_path / "a.json", 9.0), "--baseline", write_result(tmp_path / "b.json", 9.0))
    done = windtunnel("gate", *runs, *option)
    assert done.code == 2
    assert message in done.stderr


def test_a_gate_without_the_changed_deployment_is_refused(windtunnel: Command) -> None:
    done = windtunnel("gate", "--before", SERVER, *LOAD)
    assert done.code == 2
    assert "the changed deployment is missing\nhint: name a scenario file, or --from-command" in done.stderr


def test_options_that_are_not_known_are_in_the_document(windtunnel: Command) -> None:
    done = windtunnel("gate", "--from-command", f"{SERVER} --my-option", "--before", SERVER, *LOAD, "--json")
    assert json.loads(done.stdout)["remarks"][-1] == "unknown, ignored: --my-option"


@pytest.mark.full
def test_globs_and_repeated_options_name_the_same_files(windtunnel: Command, tmp_path: Path) -> None:
    old = [write_result(tmp_path / f"old{number}.json", 10 + number / 100) for number in range(3)]
    new = [write_result(tmp_path / f"new{number}.json", 10.6) for number in range(3)]
    repeated = [word for path in new for word in ("--measured", path)]
    repeated += [word for path in old for word in ("--baseline", path)]
    done = windtunnel("gate", "--measured", *new, "--baseline", *old)
    assert (done.code, done.stdout) == (1, windtunnel("gate", *repeated).stdout)


def test_runs_of_another_model_are_refused(windtunnel: Command, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_result(path, 10.0)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_id": "meta-llama/Llama-3.1-8B"}))
    done = windtunnel("gate", "--measured", str(path), "--from-command", SERVER, "--device", "h100_sxm")
    assert done.code == 2
    assert (
        "run.json has requests to meta-llama/Llama-3.1-8B, and Qwen/Qwen2.5-0.5B is said to have served" in done.stderr
    )


@pytest.mark.parametrize("option", ["--measured", "--baseline"])
def test_a_file_counts_once(windtunnel: Command, tmp_path: Path, option: str) -> None:
    path = write_result(tmp_path / "run.json", 10.0)
    done = windtunnel("gate", "--measured", path, option, str(tmp_path / "." / "run.json"))
    assert done.code == 2
    assert "run.json is given twice" in done.stderr


@pytest.mark.parametrize(
    ("file", "hint"),
    [
        ("requests.parquet", "measure with `bench --save-result FILE`"),
        ("a.jsonl", "/*.jsonl"),
        ("a.txt", "give a .csv"),
    ],
)
@pytest.mark.parametrize("verb", [("gate", "--measured"), ("validate",)])
def test_a_folder_of_runs_is_refused_with_what_to_do(
    windtunnel: Command, tmp_path: Path, verb: tuple[str, ...], file: str, hint: str
) -> None:
    (tmp_path / file).touch()
    done = windtunnel(*verb, str(tmp_path))
    assert done.code == 2
    assert "is a folder" in done.stderr
    assert hint in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "there is nothing to check"),
        (("--max-increase", "tpot_p90=5%", "--slo", "ttft=1s"), "--max-increase needs something to compare with"),
        (("--slo", "ttft=1s", "--before", SERVER, "--max-increase", "tpot"), "is not of the form name=share"),
        (("--slo", "ttft=1s", "--before", SERVER, "--max-increase", "tpot=-1%"), "0 or more is needed"),
        (("--before", SERVER, "--max-increase", "cost=10"), "cost=10 lets it rise by 1000%\nhint: cost=10%?"),
        (("--before", SERVER, "--max-increase", "costs=10%"), "there is no limit 'costs'\nhint: did you mean cost?"),
        (("--baseline", "old.json"), "--baseline is of measured runs"),
        (("--measured", "new.json", "--before", SERVER), "--measured with --before needs --baseline"),
    ],
)
def test_a_gate_without_a_question_is_refused(windtunnel: Command, arguments: tuple[str, ...], message: str) -> None:
    done = windtunnel("gate", "--from-command", SERVER, *LOAD, *arguments)
    assert done.code == 2
    assert message in done.stderr
