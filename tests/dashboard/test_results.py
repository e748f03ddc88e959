"""Whatever lies in a folder of results is named: by its verb, or with the reason why it cannot be read."""

import json
import os
from pathlib import Path

import pytest

from windtunnel.dashboard.results import NotThereError, Results
from windtunnel.errors import InputError
from windtunnel.report.results import ResultEntry


def by_name(folder: Path) -> dict[str, ResultEntry]:
    return {entry.name: entry for entry in Results(folder).entries()}


def test_every_verb_is_known_by_its_document(folder: Path) -> None:
    kinds = {name: entry.kind for name, entry in by_name(folder).items()}
    assert kinds == {
        "served/slow": "simulate",
        "served/fast": "simulate",
        "real": "bench",
        "found": "search",
        "capacity.json": "capacity",
        "grid.json": "whatif",
        "step.json": "explain",
        "images.json": "diffusion",
        "step_of_training.json": "train",
        "torn": "broken",
        "half": "broken",
    }


def test_the_figures_are_those_of_the_document(folder: Path) -> None:
    entry = by_name(folder)["served/slow"]
    document = json.loads((folder / "served" / "slow" / "summary.json").read_text())
    assert entry.figures["ttft_s"] == document["summary"]["ttft_s"]["mean"]
    assert entry.figures["output_tokens_per_s"] == document["summary"]["throughput"]["output_tokens_per_s"]
    assert entry.intervals["tpot_s"] == tuple(document["interval_80"]["tpot"].values())
    assert entry.coverage == document["coverage"]
    assert entry.deployment.startswith("2 replicas of 1 x h100_sxm")


def test_what_is_broken_says_why(folder: Path) -> None:
    found = by_name(folder)
    assert "not JSON" in found["torn"].problem
    assert "requests.parquet: still being written, or broken off" in found["half"].problem


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1]", "no JSON object"),
        ('{"a": 1}', "is not a result of windtunnel"),
        ('{"windtunnel": "1", "summary": {}, "scenario": {}}', "model"),
        ('{"windtunnel": "1", "summary": 3, "scenario": {"model": "m"}}', "deployment"),
        ('{"windtunnel": "1", "job": {}, "step_s": 1}', "not whole"),
        ('{"windtunnel": ' + "[" * 200_000, "nested too deeply"),
        ('{"status": "failed", "mode": "nsys"}', ""),
    ],
)
def test_no_document_stops_the_list(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "summary.json").write_text(text)
    (entry,) = Results(tmp_path).entries()
    assert said in entry.problem
    assert entry.kind == ("broken" if said else "lab")


def test_a_result_that_changes_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "a" / "summary.json"
    file.parent.mkdir()
    results = Results(tmp_path)
    assert results.entries() == []
    file.write_text("{")
    assert results.entries()[0].kind == "broken"
    file.write_text('{"status": "done", "mode": "torch"}')
    os.utime(file, (1, 1))
    assert [(entry.kind, entry.changed_s) for entry in results.entries()] == [("lab", 1.0)]
    file.unlink()
    assert results.entries() == []


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes")
def test_no_pipe_is_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.json")
    os.mkfifo(tmp_path / "summary.json")
    assert Results(tmp_path).entries() == []


def test_hidden_folders_and_foreign_json_are_left_out(tmp_path: Path) -> None:
    for name in (".draft/summary.json", "data.json", "timeline.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"displayTimeUnit": "ms", "windtunnel": 1}')
    assert Results(tmp_path).entries() == []


def test_the_folder_itself_may_be_a_run(folder: Path) -> None:
    (entry,) = Results(folder / "served" / "slow").entries()
    assert (entry.name, entry.kind) == ("", "simulate")
    assert Results(folder / "served" / "slow").read("")[1]["summary"]["num_requests"] == 130


@pytest.mark.parametrize(
    "name", ["..", "../x", "/etc/passwd", "served/../../x", ".git", "a\0b", "served//slow", "..\\x", "none"]
)
def test_no_name_leads_out(folder: Path, name: str) -> None:
    with pytest.raises(NotThereError):
        Results(folder).path(name)


def test_no_link_leads_out(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "secret").mkdir()
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "secret" / "summary.json").write_text('{"status": "done", "mode": "torch"}')
    (tmp_path / "runs" / "run").mkdir()
    (tmp_path / "runs" / "run" / "summary.json").symlink_to(tmp_path / "secret" / "summary.json")
    results = Results(tmp_path / "runs")
    with pytest.raises(NotThereError):
        results.path("link")
    with pytest.raises(InputError):
        results.read("run")
    assert results.entries() == []


def test_a_broken_result_is_not_shown_as_one(folder: Path) -> None:
    with pytest.raises(InputError, match="torn cannot be shown"):
        Results(folder).read("torn")
    with pytest.raises(InputError, match=r"summary\.json is missing"):
        Results(folder).read("half")
