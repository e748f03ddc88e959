"""`windtunnel validate --steps` on a small table of recorded steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from cli.conftest import Command

HEADER = "run,counter_id,sum_prefill_tokens,num_prefill_requests,num_decode_requests,sum_decode_kv_tokens,latency_ms\n"
STEPS = HEADER + "".join(
    f"a,{number},0,0,8,{8 * (1000 + number)},2.5\na,{number}.5,256,1,8,{8 * (1000 + number)},9\n"
    for number in range(30)
)
DEPLOYMENT = ("--model", "qwen2.5-0.5b", "--device", "h100_sxm")


@pytest.fixture
def table(tmp_path: Path) -> str:
    path = tmp_path / "steps.csv"
    path.write_text(STEPS)
    return str(path)


def test_the_answer_comes_first(windtunnel: Command, table: str, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = windtunnel("validate", "--steps", table, *DEPLOYMENT, "--html", str(page))
    assert done.code == 0
    title, verdict = done.stdout.splitlines()[:2]
    assert title == "60 recorded steps priced, of 1 run"
    assert verdict.startswith("Median error: decode steps ")
    assert "after the first 5%" in done.stdout
    assert "learnt up to TP 2" not in done.stdout
    assert "Predicted against measured" in page.read_text()


def test_json_holds_scores_groups_and_parts(windtunnel: Command, table: str) -> None:
    command = "vllm serve qwen2.5-0.5b --max-num-seqs 16"
    done = windtunnel("validate", "--steps", table, "--from-command", command, "--device", "h100_sxm", "--json")
    document = json.loads(done.stdout)
    assert document["steps"] == 60
    assert {group["kind"] for group in document["groups"]} == {"decode", "mixed"}
    medians = [group["nothing_fitted"]["median"] for group in document["groups"]]
    assert medians == sorted(medians, reverse=True)
    assert document["scores"]["nothing_fitted"]["decode"]["num_runs"] == 30
    assert set(document["residual_shares"]) == {"a"}


@pytest.mark.full
def test_a_folder_gives_each_run_its_server(windtunnel: Command, table: str) -> None:
    folder = Path(table).parent
    Path(table).write_text(STEPS + "b,1,0,0,8,8000,2.5\n")
    (folder / "runs.csv").write_text(
        "run,engine_args,vllm_version\na,--model qwen2.5-0.5b,0.20.1\nb,--model nobody/knows,0.20.1\n"
    )
    done = windtunnel("validate", "--steps", str(folder), "--device", "h100_sxm", "--json")
    document = json.loads(done.stdout)
    assert (document["runs"], document["steps"]) == (2, 60)
    assert list(document["refused"].values()) == [["b"]]
    only = windtunnel("validate", "--steps", str(folder), "--device", "h100_sxm", "--only", "b")
    assert only.code == 2
    assert "no run's steps could be priced: there is no model 'nobody/knows'" in only.stderr


@pytest.mark.parametrize(("limit", "code"), [("decode=10000%", 0), ("decode=0.001%", 1)])
def test_the_exit_status_keeps_an_error_budget(windtunnel: Command, table: str, limit: str, code: int) -> None:
    done = windtunnel("validate", "--steps", table, *DEPLOYMENT, "--max-error", limit)
    assert done.code == code
    assert ("decode: median error" in done.stderr) == (code == 1)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--steps", "missing.csv", *DEPLOYMENT],
        ["--steps", "{table}", "--device", "h100_sxm"],
        ["--steps", "{table}", "--model", "qwen2.5-0.5b"],
        ["--steps", "{table}", "--model", "nobody", "--device", "h100_sxm"],
        ["--steps", "{table}", *DEPLOYMENT, "--pp", "2"],
        ["--steps", "{table}", *DEPLOYMENT, "--max-error", "tpot=5%"],
        ["--steps", "{table}", *DEPLOYMENT, "--use", "primary"],
        ["--steps", "{table}", *DEPLOYMENT, "--only", "b"],
        ["--steps", "{table}", *DEPLOYMENT, "{table}"],
        ["--steps", "{folder}", "--device", "h100_sxm"],
        ["--steps", "{folder}", "--device", "h100_sxm", "--from-command", "vllm serve qwen3-8b"],
        ["{table}", "--from-command", "vllm serve qwen3-8b"],
    ],
)
def test_wrong_input_is_refused(windtunnel: Command, table: str, arguments: list[str]) -> None:
    folder = str(Path(table).parent)
    done = windtunnel("validate", *(text.format(table=table, folder=folder) for text in arguments))
    assert done.code == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
