"""`windtunnel vidur`: a recorded run from Vidur's own files, and what is said of files that are not."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from windtunnel.cli.verbs import windtunnel
from windtunnel.errors import InputError


@pytest.fixture
def arguments(reference: Path) -> list[str]:
    case = reference / "vidur" / "cases" / "d_llama2-7b_tp1_ft_fixed"
    tables = reference / "vidur" / "op_tables" / "tables_llama2-7b_tp1_orca.npz"
    return [str(case / "config.json"), "--tables", str(tables), "--requests", str(case / "requests.parquet")]


@pytest.mark.interpreted
def test_a_recorded_run_comes_out_as_recorded(arguments: list[str], tmp_path: Path) -> None:
    metrics = tmp_path / "request_metrics.csv"
    answer = CliRunner().invoke(
        windtunnel, ["vidur", *arguments, "--against", "--json", "--metrics", str(metrics)], catch_exceptions=False
    )
    document = json.loads(answer.output)
    assert document["num_finished"] == document["num_requests"] == 100
    assert document["num_batches"] == 14_200
    assert all(off["most_s"] < 1e-9 for off in document["against"].values())
    again = CliRunner().invoke(
        windtunnel,
        ["vidur", *arguments[:-1], str(metrics), "--against", "--html", str(tmp_path / "vidur.html")],
        catch_exceptions=False,
    )
    for lines in (again.output, (tmp_path / "vidur.html").read_text()):
        text = " ".join(lines.split())
        assert "100 of 100 requests finish; end to end p50 " in text
        assert "No time is more than 0 s from the recorded one." in text


@pytest.mark.parametrize(
    ("position", "file", "problem"),
    [
        (0, "requests.parquet", "is not a configuration that Vidur wrote"),
        (0, "nothing.json", "there is no file"),
        (2, "config.json", "is not an .npz archive"),
        (4, "iterations.parquet", "has no column request_inter_arrival_delay"),
    ],
)
def test_foreign_files_are_told_in_one_sentence(
    arguments: list[str], reference: Path, position: int, file: str, problem: str
) -> None:
    arguments[position] = str(reference / "vidur" / "cases" / "d_llama2-7b_tp1_ft_fixed" / file)
    with pytest.raises(InputError, match=problem):
        CliRunner().invoke(windtunnel, ["vidur", *arguments], catch_exceptions=False, standalone_mode=False)
