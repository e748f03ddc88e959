"""Rows that real traces have: each is read, or left out and counted, or refused by its number."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import windtunnel as wt
from windtunnel.cli import run as windtunnel
from windtunnel.errors import InputError
from windtunnel.schema import decode
from windtunnel.workload.schema import Trace, TraceColumns, Workload
from windtunnel.workload.traces.requests import RecordedRequests, read_requests

BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
MOONCAKE = {"timestamp": 0, "input_length": 600, "output_length": 4, "hash_ids": [1, 2]}

Reader = Callable[..., RecordedRequests]


@pytest.fixture
def read(tmp_path: Path) -> Reader:
    def read(name: str, content: str | bytes, **options: Any) -> RecordedRequests:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return read_requests(Trace(path=str(path), **options))

    return read


def of_aiperf(second: int, error: str | None = None) -> str:
    """A row of AIPerf's `profile_export.jsonl`; one of a failed request has no metrics."""
    lengths = {"input_sequence_length": {"value": 100 + second}, "output_sequence_length": {"value": 20}}
    start = {"request_start_ns": (1_759_000_000 + second) * 10**9}
    return json.dumps({"metadata": start, "metrics": {} if error else lengths, "error": error}) + "\n"


def test_failed_requests_are_counted_whatever_their_prompt(read: Reader) -> None:
    recorded = read("a.csv", BURSTGPT + "5,ChatGPT,472,18,490,x\n45,ChatGPT,0,0,0,x\n118,GPT-4,417,276,693,x\n")
    assert recorded.input_tokens is not None
    assert recorded.input_tokens.tolist() == [472, 417]
    assert recorded.remarks == ("1 of 3 rows left out: Response tokens is 0",)


def test_both_names_of_llmservingsim_s_times(read: Reader) -> None:
    lines = '{"input_toks": 14, "output_toks": 3, "arrival_time_ns": 4059740, "input_tok_ids": [1, 2]}\n'
    for name, text in (("a.jsonl", lines), ("a.csv", "input_toks,output_toks,arrival_ns\n14,3,4059740\n")):
        recorded = read(name, text)
        assert recorded.arrival_s is not None
        assert recorded.arrival_s.tolist() == pytest.approx([4059740e-9])


def test_rows_that_are_no_requests_are_counted(read: Reader) -> None:
    recorded = read("a.jsonl", of_aiperf(2) + of_aiperf(0, "timeout") + of_aiperf(1))
    assert recorded.num_requests == 2
    assert recorded.remarks == ("1 of 3 rows left out: error is given",)


def test_conversations_without_an_answer_are_counted(tmp_path: Path) -> None:
    said = [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hi"}]
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"conversations": said}, {"conversations": said[:1]}]))
    recorded = read_requests(Trace(path=str(path), characters_per_token=4), ("input_tokens", "output_tokens"))
    assert recorded.remarks == ("1 of 2 rows left out: no prompt with an answer",)


def test_an_error_names_the_row_of_the_file(read: Reader) -> None:
    broken = of_aiperf(1).replace('"value": 20', '"value": -1')
    with pytest.raises(InputError, match=r"row 3: metrics.output_sequence_length.value is not positive: -1"):
        read("a.jsonl", of_aiperf(0, "timeout") + of_aiperf(2) + broken)


def test_a_result_says_what_became_of_the_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.csv"
    path.write_text(BURSTGPT + "5,ChatGPT,4000,18,4018,x\n45,ChatGPT,900,0,900,x\n118,GPT-4,417,276,693,x\n")
    command = f"simulate --model llama-3.1-8b --device h100_sxm --trace {path} --set workload.trace.max_tokens=2000"
    assert windtunnel(command.split()) == 0
    answer = capsys.readouterr().out
    assert "trace           1 of 3 rows left out: Response tokens is 0\n" in answer
    assert "trace           1 of 2 requests shortened to 2,000 tokens\n" in answer
    scenario = wt.scenario(model="llama-3.1-8b", device="h100_sxm", trace=str(path))
    assert wt.simulate(scenario).trace_remarks == ("1 of 3 rows left out: Response tokens is 0",)


def test_a_byte_order_mark_is_skipped(read: Reader) -> None:
    assert read("a.jsonl", "\ufeff" + json.dumps(MOONCAKE)).num_requests == 1
    assert read("a.json", "\ufeff" + json.dumps([MOONCAKE])).num_requests == 1
    assert read("a.csv", "\ufeff" + AZURE + "2023-11-16 18:15:46,3,4\n").num_requests == 1


def test_zstandard_is_unpacked(read: Reader) -> None:
    for name, text in (("a.jsonl.zst", json.dumps(MOONCAKE)), ("a.csv.zst", AZURE + "2023-11-16 18:15:46,3,4\n")):
        assert read(name, pa.compress(text.encode(), codec="zstd", asbytes=True)).num_requests == 1
    with pytest.raises(InputError, match=r"a\.csv\.zst"):
        read("a.csv.zst", b"\x28\xb5\x2f\xfdnothing")


def test_milliseconds_are_not_taken_for_seconds(read: Reader) -> None:
    """They made a minute of requests last for 17 hours."""
    content = AZURE + "1700158546680,374,44\n1700158547680,396,6\n"
    with pytest.raises(InputError, match="row 1: TIMESTAMP lies behind the year 2100 in its unit") as refused:
        read("a.csv", content)
    assert refused.value.hint == "say its unit: workload.trace.columns.arrival_unit: ms"
    names = TraceColumns(arrival="TIMESTAMP", arrival_unit="ms")
    recorded = read("a.csv", content, columns=names)
    assert recorded.arrival_s is not None
    assert recorded.arrival_s.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("content", "message", "hint"),
    [
        ("TIMESTAMP;ContextTokens\n", "separates its columns by ';'", "separate them by commas"),
        (AZURE + "11/16/2023 18:15,3,4\n", "is not a time: 11/16/2023 18:15", "ISO 8601"),
        (AZURE + "2023-11-16,,4\n", "row 1: ContextTokens is missing", "fill in ContextTokens, or remove the row"),
    ],
)
def test_an_error_says_what_to_do(read: Reader, content: str, message: str, hint: str) -> None:
    with pytest.raises(InputError, match=message) as refused:
        read("a.csv", content)
    assert hint in str(refused.value.hint)


@pytest.mark.parametrize(
    ("change", "given", "stream"),
    [
        ("max_tokens", {"output_tokens": 10}, "output_tokens"),
        ("input_scale", {"input_tokens": 10}, "input_tokens"),
        ("output_scale", {"total_tokens": 10, "input_to_output_ratio": 2}, "output_tokens"),
    ],
)
def test_a_change_of_lengths_that_are_given_is_refused(change: str, given: dict[str, Any], stream: str) -> None:
    """It had no effect, and nothing said so."""
    with pytest.raises(InputError, match=f"the trace's {change} cannot change {stream}"):
        decode({"trace": {"path": "azure2023_code", change: 2000}, **given}, Workload)


def test_prompts_alone_are_shortened(tmp_path: Path) -> None:
    """Requests without outputs kept their whole prompts."""
    path = tmp_path / "a.csv"
    path.write_text("arrival_s,input_tokens\n0,700\n1,20\n")
    recorded = read_requests(Trace(path=str(path), max_tokens=512), ("arrival", "input_tokens"))
    assert recorded.input_tokens is not None
    assert recorded.input_tokens.tolist() == [512, 20]
