"""Files of measured runs: what is written is read back, and what is wrong is named with its line."""

import json
from pathlib import Path

import pytest

from readers.silicon.runs import read_measurements
from windtunnel.calibration.measured_runs import Measurement, is_run_file, read_run_file, read_table, write_run_file
from windtunnel.errors import InputError
from windtunnel.serving.shorthand import scenario

SERVED = scenario(
    model="meta-llama/Llama-3.1-8B", device="h100_sxm", concurrency=8, input_tokens=512, output_tokens=128
)
RUNS = [
    Measurement("one", SERVED, "", {"ttft": 0.2, "tpot": 0.01}, {"engine": "vllm"}, unknown=("max_num_seqs",)),
    Measurement("two", None, "nobody knows what was run", {"throughput": 80.5}, {}, "secondary", "p50", 0.3),
    Measurement("three", SERVED, "", {"e2e": 3.0}, {"device": "h100_sxm"}, lacks_acceptance=True),
]


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    """Invariant 30."""
    path = tmp_path / "runs.jsonl"
    write_run_file(RUNS, path)
    assert is_run_file(path)
    assert read_run_file(path) == RUNS


@pytest.mark.full
def test_every_published_row_is_read_back(reference: Path, tmp_path: Path) -> None:
    runs = read_measurements(reference / "silicon" / "dev.csv")
    write_run_file(runs, tmp_path / "runs.jsonl")
    assert read_run_file(tmp_path / "runs.jsonl") == runs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"measured": {"tpot_ms": 8.0}}, "runs.jsonl line 2: .*tpot_ms"),
        ({"statistic": "p99"}, "runs.jsonl line 2: .*statistic"),
        ({"scenario": None}, "runs.jsonl line 2: .*a reason why it is refused"),
        ({"scenario": {"model": "m", "deployment": {"divice": "h100_sxm"}}}, "runs.jsonl line 2: .*divice"),
        ({"id": "one"}, "several runs of id 'one'"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / "runs.jsonl"
    write_run_file([RUNS[0], RUNS[2]], path)
    first, second = path.read_text().splitlines()
    path.write_text(f"{first}\n{json.dumps(json.loads(second) | change)}\n")
    with pytest.raises(InputError, match=message):
        read_run_file(path)


def test_a_file_that_is_cut_off_is_named(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    write_run_file(RUNS, path)
    path.write_text(path.read_text()[:-20])
    with pytest.raises(InputError, match=r"runs\.jsonl line 3 is not valid JSON"):
        read_run_file(path)


def test_a_published_table_is_to_be_converted(tmp_path: Path) -> None:
    path = tmp_path / "dev.csv"
    path.write_text("id,silicon_ttft_ms\nx,1\n")
    with pytest.raises(InputError, match="a table of published runs") as caught:
        read_table(path)
    assert caught.value.hint == "convert it first: python benchmarks/measured_runs.py dev.csv --out runs.jsonl"
