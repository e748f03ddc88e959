"""A run's folder: all files or none."""

from pathlib import Path

import pytest

import windtunnel as wt
from windtunnel.errors import WindtunnelError
from windtunnel.metrics.records import Table
from windtunnel.report.serving.run import check_folder, write_run
from windtunnel.serving.results import Result


@pytest.fixture(scope="module")
def result() -> Result:
    model = "meta-llama/Llama-3.1-8B"
    load = {"concurrency": 2, "input_tokens": 16, "output_tokens": 4, "num_requests": 8}
    return wt.simulate(wt.scenario(model=model, device="h100_sxm", **load))  # type: ignore[arg-type]


def test_the_scenario_in_the_folder_is_the_resolved_one(result: Result, tmp_path: Path) -> None:
    write_run(result, tmp_path / "run")
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        *("requests.parquet", "steps.parquet", "series.parquet", "summary.json", "scenario.yaml")
    }
    assert wt.load(tmp_path / "run" / "scenario.yaml") == result.scenario


def test_a_failure_half_way_leaves_nothing(result: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 31."""

    def full_disk(_table: Table, _path: Path) -> None:
        raise OSError(28, "No space left on device")

    written = Table.write_parquet
    calls = []

    def second_fails(table: Table, path: Path) -> None:
        calls.append(path)
        (full_disk if len(calls) == 2 else written)(table, path)

    monkeypatch.setattr(Table, "write_parquet", second_fails)
    with pytest.raises(WindtunnelError, match="No space left"):
        write_run(result, tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_an_error(result: Result, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WindtunnelError, match="cannot be written"):
        write_run(result, tmp_path / "file" / "run")


def test_an_empty_folder_is_free(tmp_path: Path) -> None:
    check_folder(tmp_path, overwrite=False)
    check_folder(tmp_path / "new", overwrite=False)
