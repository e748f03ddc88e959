"""File formats of installed packages, one file each, and files that no format or several claim."""

import json
from pathlib import Path

import pytest

from plugin_package import installed_plugin
from windtunnel.calibration.measured_runs import read_client_files
from windtunnel.cli import run
from windtunnel.errors import InputError
from windtunnel.formats.recognise import find_format

GROUP = "windtunnel.formats"

CLIENT = """
from windtunnel.formats.clients.read import ClientResult, has, of_documents
from windtunnel.formats.recognise import FileFormat


def runs(name, document):
    measured = {"ttft": document["first_ms"] * 1e-3, "tpot": document["next_ms"] * 1e-3}
    return [ClientResult(name, "storm", 1000.0, 200.0, 100, document["users"], None, measured)]


FORMATS = (
    FileFormat("storm", "client result", has(lambda document: "first_ms" in document), of_documents(runs)),
)
"""
RESULT = {"first_ms": 50.0, "next_ms": 8.0, "users": 10}
LIST = """
from windtunnel.formats.collective_calls import CollectiveCall, Contents
from windtunnel.formats.recognise import FileFormat


def contents(path):
    calls = [line.split() for line in path.read_text().splitlines()[1:]]
    return Contents("ring list", (), tuple(CollectiveCall(name, "tp", 8, int(size)) for name, size in calls))


FORMATS = (FileFormat("ring list", "workload or trace", lambda file: file.first_word == "#rings", contents),)
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "file.json"
    path.write_text(text)
    return path


def test_validate_predicts_the_run_of_an_installed_client(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, json.dumps(RESULT))
    arguments = ("validate", str(path), "--model", "llama-3.1-8b", "--device", "h100_sxm", "--json")
    assert run(arguments) == 2
    refusal = capsys.readouterr().err
    assert "is no client result that is known" in refusal
    assert "known: vLLM's `bench serve`" in refusal
    with installed_plugin(tmp_path, GROUP, "storm", CLIENT) as files:
        assert run(arguments) == 0
        assert len(files) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["predicted"] == 1
    assert set(document["scores"]) == {"tpot", "ttft"}


def test_several_documents_are_runs_of_their_own(tmp_path: Path) -> None:
    path = written(tmp_path, f"{json.dumps(RESULT)}\n\n{json.dumps(RESULT | {'users': 20})}\n")
    base = {"model": "llama-3.1-8b", "deployment": {"device": "h100_sxm"}}
    with installed_plugin(tmp_path, GROUP, "storm", CLIENT):
        assert [measured.id for measured in read_client_files(path, base)] == ["file", "file:2"]
        written(tmp_path, json.dumps({"first_ms": 50.0, "users": 10}))
        with pytest.raises(InputError, match="file lacks 'next_ms'"):
            read_client_files(path, base)


@pytest.mark.parametrize(
    ("good", "wrong", "problem"),
    [
        ("of_documents(runs))", "lambda path: [{}])", "the reader of storm returned [{}], which is no list of"),
        ('"ttft":', '"tftt":', "file.json: storm has no metric 'tftt'"),
        ('document["first_ms"] * 1e-3', "float('nan')", "file misstates ttft, which is nan"),
        ('document["users"]', "'ten'", "file misstates concurrency, which is 'ten'"),
    ],
)
def test_a_reader_that_returns_something_else_is_named(tmp_path: Path, good: str, wrong: str, problem: str) -> None:
    path = written(tmp_path, json.dumps(RESULT))
    assert good in CLIENT
    with installed_plugin(tmp_path, GROUP, "storm", CLIENT.replace(good, wrong)), pytest.raises(InputError) as refused:
        read_client_files(path, {"model": "llama-3.1-8b", "deployment": {"device": "h100_sxm"}})
    assert problem in str(refused.value)


def test_workload_shows_a_list_of_an_installed_tool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, "#rings\nall_reduce 4096\nall_gather 8192\nall_reduce 4096\n")
    with installed_plugin(tmp_path, GROUP, "rings", LIST) as files:
        assert run(("workload", str(path), "--json")) == 0
        assert len(files) == 1
    sizes = [call["size_bytes"] for call in json.loads(capsys.readouterr().out)["communication"]]
    assert sizes == [4096, 8192, 4096]


def test_a_file_that_two_tools_claim_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, json.dumps(RESULT | {"mean_ttft_ms": 50.0}))
    with (
        installed_plugin(tmp_path, GROUP, "storm", CLIENT),
        pytest.raises(InputError, match=r"may be of several formats: .*`bench_serving` and storm"),
    ):
        find_format(path, "client result")


def test_a_certain_format_comes_before_one_that_only_looks_like_it(tmp_path: Path) -> None:
    """A YAML or JSON file is taken for a training job, unless a tool knows it."""
    path = written(tmp_path, json.dumps({"sequence_tokens": 4096}))
    assert find_format(path, "workload or trace", "training job").name == "training job"
    path.write_text(json.dumps({"sequence_tokens": 4096, "traceEvents": []}))
    assert find_format(path, "workload or trace", "training job").name == "Kineto trace"


def test_an_empty_file_is_of_no_format(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"file\.json is empty"):
        find_format(written(tmp_path, " \n"), "capture")
