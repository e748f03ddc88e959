"""Tables of recorded steps: formats, names of columns, and wrong files."""

import csv
import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow.csv
import pyarrow.parquet
import pytest

from windtunnel.calibration.steps.read import read_step_runs, read_steps
from windtunnel.errors import InputError

TABLE = """\
run,counter_id,sum_prefill_tokens,num_prefill_requests,num_decode_requests,sum_decode_kv_tokens,latency_ms
a,1,128,1,0,0,12.5
a,2,0,0,4,4096,5
"""
DEVICE = {"device": "h100_sxm"}


def write(path: Path, text: str) -> Path:
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def test_every_format_gives_the_same_steps(tmp_path: Path) -> None:
    table = read_steps(write(tmp_path / "steps.csv", TABLE))
    assert table["wall_s"].tolist() == [0.0125, 0.005]
    assert table["prefill_kv_tokens"].tolist() == [0, 0]
    packed = write(tmp_path / "steps.csv.gz", TABLE)
    pyarrow.parquet.write_table(pyarrow.csv.read_csv(tmp_path / "steps.csv"), tmp_path / "steps.parquet")
    for path in (packed, tmp_path / "steps.parquet"):
        assert (read_steps(path) == table).all()


def test_nested_keys_of_an_engine_are_flattened(tmp_path: Path) -> None:
    step = {
        "worker_id": "w",
        "dp_rank": 0,
        "counter_id": 7,
        "wall_time": 0.012,
        "scheduled_requests": {
            "num_prefill_requests": 1,
            "sum_prefill_tokens": 128,
            "var_prefill_length": 2.5,
            "sum_prefill_kv_tokens": 64,
            "num_decode_requests": 3,
            "sum_decode_kv_tokens": 300,
            "var_decode_kv_tokens": 4.0,
        },
        "queued_requests": {"num_prefill_requests": 9, "sum_prefill_tokens": 900},
    }
    (row,) = read_steps(write(tmp_path / "steps.jsonl", json.dumps(step)))
    assert (row["wall_s"], row["prefill_tokens"], row["prefill_requests"]) == (0.012, 128, 1)
    assert (row["decode_kv_variance"], row["prefill_variance"], row["worker"]) == (4.0, 2.5, "w")
    counts = {"numContextRequests": 1, "numCtxTokens": 128, "numCtxKvTokens": 64, "numGenRequests": 3}
    iteration = {"iter": 7, "iterLatencyMS": 12.0, "attentionDpRank": 0, "kvCacheStats": {"usedNumBlocks": 9}}
    lines = json.dumps({**iteration, "inflightBatchingStats": {**counts, "numGenKvTokens": 300}})
    (other,) = read_steps(write(tmp_path / "iterations.jsonl", lines))  # of TensorRT-LLM
    for name in ("counter", "wall_s", "prefill_tokens", "prefill_requests", "prefill_kv_tokens", "decode_requests"):
        assert other[name] == row[name]
    assert other["decode_kv_tokens"] == row["decode_kv_tokens"] == 300
    with pytest.raises(InputError, match="no column for tokens of these requests in the KV cache"):
        read_steps(write(tmp_path / "former.jsonl", json.dumps({**iteration, "inflightBatchingStats": counts})))


def test_a_table_of_something_else_is_said_to_be_neither(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"grafana\.csv has no column for steps, nor for requests") as refused:
        read_steps(write(tmp_path / "grafana.csv", "Time,P50\n2026-01-01,15\n"))
    assert "its columns are Time, P50" in str(refused.value.hint)


def test_an_empty_cell_is_not_a_number(tmp_path: Path) -> None:
    assert np.isnan(read_steps(write(tmp_path / "steps.csv", TABLE.replace(",5\n", ",\n")))["wall_s"][1])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("steps.csv", TABLE.replace("latency_ms", "speed"), "no column for wall time of the step"),
        ("steps.csv", TABLE.replace("counter_id", "wall_time"), "two columns of one meaning: wall_time, latency_ms"),
        ("steps.csv", TABLE.replace("12.5", "fast"), "latency_ms is not a number everywhere"),
        (
            "steps.csv",
            TABLE.replace(",128,", ",1e9,"),
            "1,000,000,000 is too many for prompt tokens computed in the step",
        ),
        ("steps.csv", TABLE.partition("\n")[0] + "\n", "has no rows"),
        ("steps.csv", "", "is empty"),
        ("steps.parquet", TABLE, "is not a valid Parquet file"),
        ("steps.jsonl", "{", "row 1 is not a JSON object"),
        ("steps.csv.gz", None, "no column for"),
        ("steps.txt", TABLE, "is no table of steps"),
    ],
)
def test_wrong_tables_are_refused(tmp_path: Path, name: str, text: str | None, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"noise") if text is None else path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_steps(path)


def test_a_folder_describes_its_runs(tmp_path: Path) -> None:
    write(tmp_path / "steps.csv", TABLE + "b,1,0,0,4,4096,5\na,3,9000,1,0,0,900\n")
    write(
        tmp_path / "runs.csv",
        "run,engine_args,vllm_version,max_num_batched_tokens_recorded,fuse_allreduce_rms\n"
        "a,--model qwen3-32b --tensor-parallel-size 4,0.20.1,2048,True\n"
        "b,--model nobody/knows --tensor-parallel-size 4,0.20.1,2048,True\n",
    )
    known, unknown = read_step_runs(tmp_path, {}, DEVICE)
    assert known.setup is not None
    assert (known.setup.parallelism.tp, known.setup.engine.version, known.setup.engine.fused_all_reduce) == (
        4,
        "0.20.1",
        True,
    )
    assert known.setup.engine.max_num_batched_tokens == 9000
    assert unknown.setup is None
    assert "nobody/knows" in unknown.refused


def test_recorded_arguments_hold_json_without_the_quotes_of_a_shell(tmp_path: Path) -> None:
    write(tmp_path / "steps.csv", TABLE)
    arguments = (
        '--model qwen3-32b --compilation-config {"cudagraph_mode":"FULL","pass_config":{"fuse_norm_quant":true}} '
        '--attention-config {"use_trtllm_attention":false} --tensor-parallel-size 4'
    )
    with (tmp_path / "runs.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("run", "engine_args", "vllm_version"), ("a", arguments, "0.20.1")])
    (run,) = read_step_runs(tmp_path, {}, DEVICE)
    assert run.setup is not None, run.refused
    assert (run.setup.engine.attention_backend, run.setup.parallelism.tp) == ("flashinfer", 4)


@pytest.mark.parametrize(
    ("options", "runs", "message"),
    [
        ({}, "run,engine_args\na,--model qwen3-32b\n", "--device is missing"),
        (DEVICE, "run,engine_args\nb,--model qwen3-32b\n", "does not describe the run 'a'"),
        (DEVICE, "run,model\na,qwen3-32b\n", "no column 'engine_args'"),
        (DEVICE, None, "there is no file"),
    ],
)
def test_wrong_folders_are_refused(tmp_path: Path, options: dict[str, str], runs: str | None, message: str) -> None:
    write(tmp_path / "steps.csv", TABLE)
    if runs is not None:
        write(tmp_path / "runs.csv", runs)
    with pytest.raises(InputError, match=message):
        read_step_runs(tmp_path, {}, options)
