import csv
import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from windtunnel.errors import InputError
from windtunnel.workload.schema import Trace, TraceColumns
from windtunnel.workload.traces.layouts import LENGTHS, shipped
from windtunnel.workload.traces.requests import read_lengths, read_requests
from windtunnel.workload.traces.table_file import header_of


def read(
    path: Path, content: str | bytes | None = None, needed: Sequence[str] = ("arrival", *LENGTHS), **columns: Any
) -> Any:
    """The columns of `path`; Any, for which of them are there is what each test knows."""
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_requests(Trace(path=str(path), columns=TraceColumns(**columns)), needed)


# Real files: totals counted with `zcat FILE | awk -F, '{i += $2; o += $3} END {print NR - 1, i, o}'` and the like.


@pytest.mark.parametrize(
    ("name", "num_requests", "input_tokens", "output_tokens", "first_s", "last_s"),
    [
        ("azure2023_code.csv.gz", 8819, 18059974, 245896, 0, 3435.948056),
        ("azure2023_conv.csv.gz", 19366, 22361870, 4088665, 0, 3501.721937),
        ("mooncake_fast25_conversation.jsonl.gz", 12031, 144793823, 4122048, 0, 3536.999),
        ("llmservingsim_sharegpt_llama-3.1-8b_300_sps10.csv.gz", 300, 257239, 195753, 0.046926808, 29.183763200),
    ],
)
def test_published_traces(
    reference: Path, name: str, num_requests: int, input_tokens: int, output_tokens: int, first_s: float, last_s: float
) -> None:
    requests = read(reference / "traces" / name)
    assert requests.num_requests == len(requests.input_tokens) == num_requests
    assert requests.input_tokens.sum() == input_tokens
    assert requests.output_tokens.sum() == output_tokens
    assert requests.arrival_s[0] == pytest.approx(first_s, abs=1e-9)
    assert requests.arrival_s[-1] == pytest.approx(last_s, abs=1e-6)


def test_every_row_of_a_published_trace_against_a_plain_reader(reference: Path) -> None:
    path = reference / "traces" / "azure2023_code.csv.gz"
    with gzip.open(path, "rt") as file:
        rows = list(csv.DictReader(file))
    requests = read(path)
    assert requests.input_tokens.tolist() == [int(row["ContextTokens"]) for row in rows]
    assert requests.output_tokens.tolist() == [int(row["GeneratedTokens"]) for row in rows]
    minutes_s = [60 * float(row["TIMESTAMP"][14:16]) + float(row["TIMESTAMP"][17:]) for row in rows]
    since_first = (np.array(minutes_s) - minutes_s[0]) % 3600
    assert np.abs(requests.arrival_s - since_first).max() < 1e-9


@pytest.mark.parametrize(
    ("name", "num_requests", "input_tokens", "output_tokens"),
    [
        ("sharegpt_8k_lengths_llama2.csv.gz", 30731, 71911571, 13481988),
        ("vidur_arxiv_summarization_lengths.csv.gz", 28257, 73131321, 8234948),
    ],
)
def test_published_length_files_have_no_times(
    reference: Path, name: str, num_requests: int, input_tokens: int, output_tokens: int
) -> None:
    path = reference / "traces" / name
    requests = read(path, needed=LENGTHS)
    assert requests.arrival_s is None
    assert requests.num_requests == num_requests
    assert requests.input_tokens.sum() == input_tokens
    assert read_lengths(str(path), None, "output_tokens").sum() == output_tokens
    with pytest.raises(InputError, match="has no arrival times") as refused:
        read(path)
    assert str(refused.value.hint).startswith("give --rate or --concurrency, ")


# Every layout and format


@pytest.mark.parametrize("name", [name for name, layout in shipped().items() if layout.arrival])
def test_known_layouts_are_recognised_by_their_columns(tmp_path: Path, name: str) -> None:
    layout = shipped()[name]
    unit_s = {"s": 1.0, "ms": 1e-3, "ns": 1e-9}[layout.arrival_unit]
    path = tmp_path / "a.csv"
    marks = [name for name in layout.marks[-1:] if name != layout.arrival]
    header = ["extra", layout.output_tokens, layout.input_tokens, layout.arrival, *marks]
    rows = [["x", 1, 10, 0, "a"], ["y", 2, 20, round(3 / unit_s), "b"]]
    path.write_text("\n".join(",".join(map(str, row)) for row in [header, *(row[: len(header)] for row in rows)]))
    requests = read(path)
    assert requests.arrival_s.tolist() == pytest.approx([0, 3])
    assert requests.input_tokens.tolist() == [10, 20]
    assert requests.output_tokens.tolist() == [1, 2]


BAILIAN = (
    '{"chat_id": 7, "parent_chat_id": -1, "timestamp": 0.5, "input_length": 33, "output_length": 4, "type": "text", '
    '"turn": 1, "hash_ids": [11, 12, 13]}\n'
    '{"chat_id": 8, "parent_chat_id": -1, "timestamp": 1, "input_length": 5, "output_length": 1, "type": "text", '
    '"turn": 1, "hash_ids": [14]}\n'
    '{"chat_id": 9, "parent_chat_id": 7, "timestamp": 61.25, "input_length": 40, "output_length": 2, "type": "text", '
    '"turn": 2, "hash_ids": [11, 12, 15]}\n'
)


def test_bailian_has_seconds_blocks_of_16_and_sessions_of_turns(tmp_path: Path) -> None:
    requests = read(tmp_path / "qwen_traceA_blksz_16.jsonl", BAILIAN)
    assert requests.arrival_s.tolist() == [0.5, 1, 61.25]
    assert requests.blocks.block_tokens == 16
    assert requests.session.tolist() == [0, 1, 0]


def test_mooncake_has_milliseconds_and_blocks_of_512_and_may_have_sessions(tmp_path: Path) -> None:
    row = '{"session_id": "a", "timestamp": 1500, "input_length": 600, "output_length": 4, "hash_ids": [0, 1]}\n'
    requests = read(tmp_path / "a.jsonl", row)
    assert requests.arrival_s.tolist() == [1.5]
    assert requests.blocks.block_tokens == 512
    assert requests.session.tolist() == [0]
    aliases = row.replace("input_length", "input_tokens").replace("output_length", "output_tokens")
    requests = read(tmp_path / "b.jsonl", aliases.replace("timestamp", "created_time"))
    assert (requests.arrival_s.tolist(), requests.blocks.block_tokens) == ([1.5], 512)


def test_a_layout_is_not_guessed_from_names_that_several_have(tmp_path: Path) -> None:
    content = "timestamp,input_length,output_length\n1500,600,4\n"
    for needed in (("arrival", *LENGTHS), LENGTHS):
        with pytest.raises(
            InputError, match="bailian lacks chat_id or parent_chat_id; mooncake lacks hash_ids or"
        ) as no:
            read(tmp_path / "a.csv", content, needed)
        assert "{arrival: timestamp, arrival_unit: UNIT, input_tokens: input_length, output" in str(no.value.hint)
    names = {"arrival": "timestamp", "input_tokens": "input_length", "output_tokens": "output_length"}
    assert read(tmp_path / "a.csv", None, **names, arrival_unit="ms").arrival_s.tolist() == [1.5]


def test_dynamo_records_are_sorted_and_events_of_tools_left_out(tmp_path: Path) -> None:
    def record(received_ms: int, hashes: list[int], kind: str = "request_end", block: int = 64) -> str:
        replay = {"trace_block_size": block, "input_length": 100, "input_sequence_hashes": hashes}
        request = {"request_received_ms": received_ms, "output_tokens": 3, "replay": replay}
        rest = {"request": request} if kind == "request_end" else {"tool": {"tool_class": "search"}}
        return json.dumps({"schema": "dynamo.request.trace.v1", "event_type": kind, **rest}) + "\n"

    start, long_hash = 1_780_000_000_000, 2**64 - 5
    late, tool, early = record(start + 1500, [long_hash, 3]), record(0, [], "tool_end"), record(start, [long_hash, 9])
    wrapped = "".join(json.dumps({"timestamp": 1, "event": json.loads(line)}) + "\n" for line in (tool, late, early))
    assert read(tmp_path / "dynamo-request-trace.0.jsonl", wrapped).arrival_s.tolist() == [0, 1.5]
    requests = read(tmp_path / "a.jsonl", late + tool + early)
    assert requests.arrival_s.tolist() == [0, 1.5]
    assert requests.input_tokens.tolist() == [100, 100]
    assert requests.blocks.block_tokens == 64
    first, same, second = requests.blocks.ids[[0, 2, 1]].tolist()
    assert (first, second) == (same, 9)
    with pytest.raises(InputError, match="has no requests"):
        read(
            tmp_path / "a.jsonl",
            tool.replace("tool_end", "tool_error") + late.replace("request_end", "request_payload"),
        )
    with pytest.raises(InputError, match=r"row 2: request\.replay\.trace_block_size is not that"):
        read(tmp_path / "a.jsonl", late + record(start, [1], block=128))


def test_aiperf_records_are_sorted_by_the_time_of_sending(tmp_path: Path) -> None:
    def record(start_ns: int, prompt: int) -> str:
        metrics = {"input_sequence_length": {"value": prompt}, "output_sequence_length": {"value": 9, "unit": "tokens"}}
        return (
            json.dumps({"metadata": {"request_start_ns": start_ns, "conversation_id": "c"}, "metrics": metrics}) + "\n"
        )

    start = 1_780_000_000_000_000_000
    failed = json.dumps({"metadata": {"request_start_ns": start}, "metrics": {}, "error": {"code": 500}}) + "\n"
    rows = record(start + 2_500_000_000, 20) + record(start, 10) + failed
    requests = read(tmp_path / "profile_export.jsonl", rows)
    assert requests.arrival_s.tolist() == pytest.approx([0, 2.5])
    assert (requests.input_tokens.tolist(), requests.output_tokens.tolist()) == ([10, 20], [9, 9])


def test_lmsys_conversations_are_measured_in_characters(tmp_path: Path) -> None:
    said = [{"content": "a" * 40, "role": "user"}, {"content": "b" * 9, "role": "assistant"}]
    path = tmp_path / "lmsys.parquet"
    parquet.write_table(pa.table({"conversation_id": ["x"], "conversation": [said], "turn": [1]}), path)
    recorded = read_requests(Trace(path=str(path), characters_per_token=4), LENGTHS)
    assert recorded.input_tokens is not None
    assert recorded.output_tokens is not None
    assert (recorded.input_tokens.tolist(), recorded.output_tokens.tolist()) == ([10], [3])


def test_the_archive_of_servegen_is_not_a_trace(reference: Path, tmp_path: Path) -> None:
    for path in (reference / "traces/servegen_language_m-small.tar.xz", tmp_path):
        with pytest.raises(InputError) as refused:
            read(path)
        assert f"workload.clients: {{path: {path}}}" in str(refused.value.hint)


COLUMNS: dict[str, list[Any]] = {
    "arrival_s": [0.0, 0.25, 7.5],
    "input_tokens": [3, 2, 1],
    "output_tokens": [4, 5, 6],
    "priority": [1, -1, 0],
}


def as_csv() -> str:
    return "\n".join([",".join(COLUMNS), *(",".join(map(str, row)) for row in zip(*COLUMNS.values(), strict=True))])


def as_json_lines() -> str:
    return "\n".join(json.dumps(dict(zip(COLUMNS, row, strict=True))) for row in zip(*COLUMNS.values(), strict=True))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", as_csv()),
        ("a.csv", as_csv() + "\n\n"),
        ("a.csv", "\ufeff" + as_csv().replace("\n", "\r\n")),
        ("a.csv", as_csv().replace(",", " , ")),
        ("a.CSV.gz", gzip.compress(as_csv().encode(), mtime=0)),
        ("a.jsonl", as_json_lines()),
        ("a.jsonl", "\n" + as_json_lines().replace("\n", "\n\n") + "\n"),
        ("a.ndjson.gz", gzip.compress(as_json_lines().encode(), mtime=0)),
    ],
)
def test_formats_agree(tmp_path: Path, name: str, content: str | bytes) -> None:
    requests = read(tmp_path / name, content)
    assert requests.arrival_s.tolist() == COLUMNS["arrival_s"]
    assert requests.input_tokens.tolist() == COLUMNS["input_tokens"]
    assert requests.output_tokens.tolist() == COLUMNS["output_tokens"]
    assert requests.priority.tolist() == COLUMNS["priority"]


def test_parquet_of_narrow_and_floating_counts(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    columns = COLUMNS | {"input_tokens": np.array([3, 2, 1], np.uint16), "output_tokens": np.array([4.0, 5.0, 6.0])}
    parquet.write_table(pa.table(columns), path)
    requests = read(path)
    assert requests.input_tokens.dtype == requests.output_tokens.dtype == np.int64
    assert requests.input_tokens.tolist() == [3, 2, 1]
    assert requests.output_tokens.tolist() == [4, 5, 6]


def test_columns_may_be_named(tmp_path: Path) -> None:
    content = "when,prompt,input_tokens,gen\n1500,7,99,8\n"
    requests = read(
        tmp_path / "a.csv", content, arrival="when", arrival_unit="ms", input_tokens="prompt", output_tokens="gen"
    )
    assert requests.arrival_s.tolist() == [1.5]
    assert requests.input_tokens.tolist() == [7]
    assert requests.output_tokens.tolist() == [8]


def test_a_name_may_stand_beside_known_ones(tmp_path: Path) -> None:
    requests = read(tmp_path / "a.csv", "arrival_s,prompt,output_tokens\n1.5,7,8\n", input_tokens="prompt")
    assert (requests.arrival_s[0], requests.input_tokens[0], requests.output_tokens[0]) == (1.5, 7, 8)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("2023-11-16 18:17:03.9799600", "2023-11-16 18:17:05.4799600"),
        ("2024-05-10 23:59:59+00:00", "2024-05-11 00:00:00.500000+00:00"),
        ("2024-05-10T00:00:00Z", "2024-05-10T00:00:01.500Z"),
        ("1700000000", "1700000001.5"),
    ],
)
@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_dates_count_from_the_first_request(tmp_path: Path, suffix: str, first: str, second: str) -> None:
    if suffix == ".csv":
        content = f"arrival_s,input_tokens,output_tokens\n{first},1,1\n{second},1,1\n"
    else:
        values = [float(value) if value[4] != "-" else value for value in (first, second)]
        rows = [{"arrival_s": value, "input_tokens": 1, "output_tokens": 1} for value in values]
        content = "\n".join(map(json.dumps, rows))
    assert read(tmp_path / f"a{suffix}", content).arrival_s.tolist() == pytest.approx([0, 1.5], abs=1e-6)


def test_only_what_is_needed_is_read_and_checked(tmp_path: Path) -> None:
    requests = read(tmp_path / "a.csv", "arrival_s,input_tokens,output_tokens\n9,1,x\n3,2,y\n", needed=["input_tokens"])
    assert requests.input_tokens.tolist() == [1, 2]
    assert requests.arrival_s is None
    assert requests.output_tokens is None


# Bad files: one sentence that names the file and the row


HEADER = "arrival_s,input_tokens,output_tokens\n"
ROW = '{"arrival_s": 1, "input_tokens": 2, "output_tokens": 3}\n'
BAD = {
    "empty file": ("a.csv", "", r"a\.csv is empty"),
    "no rows": ("a.csv", HEADER, r"a\.csv has no requests"),
    "no objects": ("a.json", "[]", r"a\.json has no requests"),
    "missing column": ("a.csv", "arrival_s,input_tokens\n1,2\n", "trace: windtunnel lacks output_tokens; it has arr"),
    "times of unknown unit": ("a.csv", "timestamp,input_tokens,output_tokens\n1,2,3\n", "has no arrival times"),
    "unknown columns": ("a.csv", "x,y\n1,2\n", "of no known trace \\(azure, .*x, y"),
    "texts without times": ("a.json", '[{"conversations": []}]', "has no arrival times: its publisher .* gives none"),
    "repeated column": ("a.csv", "input_tokens," + HEADER + "1,2,3,4\n", "more than one column 'input_tokens'"),
    "ragged row": ("a.csv", HEADER + "1,2,3\n2,3\n", r"a\.csv row 2 has 2 values, but there are 3 columns"),
    "ragged row that is not text": ("a.csv", HEADER.encode() + b"1,2,3\n\n2,\xff\n", r"a\.csv row 2 has 2 values"),
    "NaN time": ("a.csv", HEADER + "0,1,1\nnan,1,1\n", "row 2: arrival_s is missing or not a number"),
    "infinite time": ("a.csv", HEADER + "0.5,1,1\ninf,1,1\n", "row 2: arrival_s is not a time: inf"),
    "empty value": ("a.csv", HEADER + "0,1,1\n1,,1\n", "row 2: input_tokens is missing"),
    "negative time": ("a.csv", HEADER + "-1,1,1\n", "row 1: arrival_s is negative: -1"),
    "unsorted times": ("a.csv", HEADER + "0,1,1\n5,1,1\n4,1,1\n", "row 3: arrival_s is before that of row 2"),
    "text time": ("a.csv", HEADER + "0,1,1\nsoon,1,1\n", "row 2: arrival_s is not a time: soon"),
    "times as text": (
        "a.jsonl",
        '{"arrival_s": "0", "input_tokens": 1, "output_tokens": 1}',
        "row 1: arrival_s is text, not a number: 0",
    ),
    "mixed times": ("a.csv", HEADER + "2024-05-10 00:00:00,1,1\n7.5,1,1\n", "row 2: arrival_s is not a date"),
    "fraction of a token": ("a.csv", HEADER + "0,1.5,1\n", "row 1: input_tokens is not a whole number: 1.5"),
    "no output": ("a.csv", HEADER + "0,1,1\n1,1,0\n", "row 2: output_tokens is not positive: 0"),
    "text count": ("a.csv", HEADER + "0,1,1\n1,many,1\n", "row 2: input_tokens is not a number: many"),
    "too many tokens": ("a.csv", HEADER + "0,99999999999,1\n", "row 1: input_tokens is above"),
    "overflowing count": ("a.csv", HEADER + "0,1,99999999999999999999\n", "row 1: output_tokens is out of range"),
    "fractional priority": ("a.csv", "priority," + HEADER + "0.5,0,1,1\n", "row 1: priority is not a whole number"),
    "not text": ("a.csv", b"\xff\xfe\x00\x01", "does not begin with a line of column names"),
    "truncated JSON": ("a.jsonl", ROW + ROW[:20], r"a\.jsonl row 2 is not valid JSON: the file ends within it"),
    "broken JSON": ("a.jsonl", ROW + "{]\n" + ROW, r"a\.jsonl row 2 is not valid JSON"),
    "JSON of lists": ("a.jsonl", "[1, 2, 3]\n", r"a\.jsonl row 1 is not a JSON object"),
    "JSON without a key": ("a.jsonl", ROW + '{"arrival_s": 2, "input_tokens": 2}\n', "row 2: output_tokens is missing"),
    "JSON of text": ("a.jsonl", ROW + ROW.replace("2", '"x"'), "row 2: input_tokens is not a number: x"),
    "JSON of lists inside": ("a.jsonl", ROW + ROW.replace("2", "[2]"), "row 2: input_tokens is not a number: \\[2\\]"),
    "JSON NaN": ("a.jsonl", ROW + ROW.replace("1", "NaN", 1), "row 2 is not valid JSON"),
    "JSON beyond 64 bits": ("a.jsonl", ROW + ROW.replace("2", "9" * 30), "row 2: input_tokens is out of range"),
    "truncated gzip": ("a.csv.gz", gzip.compress(as_csv().encode())[:-9], "is a broken gzip file"),
    "not Parquet": ("a.parquet", "PAR1", "is not a valid Parquet file"),
    "unknown ending": ("a.xlsx", "x", "not a kind of requests file that can be read"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "content", "message"), BAD.values(), ids=BAD)
def test_bad_files_are_refused_in_one_sentence(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    with pytest.raises(InputError, match=message) as refused:
        read(tmp_path / name, content)
    assert str(tmp_path / name) in refused.value.message
    assert "\n" not in refused.value.message


@pytest.mark.parametrize(("name", "hint"), [("a.csv", "a line of column names"), ("a.jsonl.gz", "one object a line")])
def test_an_empty_file_is_told_what_its_kind_needs(tmp_path: Path, name: str, hint: str) -> None:
    (tmp_path / name).write_text("\n")
    with pytest.raises(InputError, match="is empty") as refused:
        header_of(tmp_path / name)
    assert str(refused.value.hint).startswith(hint)


def test_hints_name_what_is_near(tmp_path: Path) -> None:
    with pytest.raises(InputError) as refused:
        read(tmp_path / "a.csv", "arrival_s,input_tokens,output_token\n1,2,3\n")
    assert refused.value.hint == "did you mean output_token?"
    with pytest.raises(InputError, match="no column 'promt'") as refused:
        read(tmp_path / "a.csv", "prompt,gen\n1,2\n", input_tokens="promt")
    assert refused.value.hint == "did you mean prompt?"
    with pytest.raises(InputError, match="there is no file") as refused:
        read(tmp_path / "b.csv")
    assert refused.value.hint == "did you mean a.csv?"
    with pytest.raises(InputError, match="is a folder; a file is needed"):
        read(tmp_path.rename(tmp_path.with_suffix(".csv")))


LATE_CHANGES = {
    "floats after integers": ("0.5", "7", None),
    "a fraction of a second after none": ("2024-05-12 00:00:03.000250+00:00", "7", None),
    "a word after numbers": ("9", "many", "row 900002: ContextTokens is not a number: many"),
    "an empty value": ("9", "", "row 900002: ContextTokens is missing or not a number"),
    "a value too many": ("9", "7,7", "row 900002 has 4 values, but there are 3 columns"),
    "earlier than before": ("0", "7", None),
}


@pytest.mark.full
@pytest.mark.parametrize(("time", "tokens", "message"), LATE_CHANGES.values(), ids=LATE_CHANGES)
def test_what_changes_far_into_a_file_is_read_or_refused(
    tmp_path: Path, time: str, tokens: str, message: str | None
) -> None:
    """Types are guessed from the first 16 MiB; 900,000 rows are more."""
    path = tmp_path / "long.csv"
    first = "2024-05-12 00:00:00+00:00" if "-" in time else "0"
    row = f"{first},{'0' * (1 if '-' in time else 15)}12,3\n"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + row * 900_001 + f"{time},{tokens},3\n{time},7,3\n")
    assert path.stat().st_size > 1 << 24
    if message is None:
        recorded = read_requests(Trace(path=str(path)))
        assert recorded.arrival_s is not None
        assert recorded.num_requests == 900_003
        assert recorded.arrival_s[-1] == pytest.approx({"0.5": 0.5, "0": 0.0}.get(time, 3.00025))
    else:
        with pytest.raises(InputError, match=message):
            read_requests(Trace(path=str(path)))


@pytest.mark.full
def test_only_the_rows_that_are_wanted_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    row = '{"arrival_s": 1, "input_tokens": 2, "output_tokens": 3}\n'
    path.write_text(row * 400_000 + "not a row\n")
    assert read_requests(Trace(path=str(path)), limit=10).num_requests == 10
    with pytest.raises(InputError, match="row 400001 is not valid JSON"):
        read_requests(Trace(path=str(path)))


def test_lengths_are_scaled_and_shortened(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens\n100,50\n3000,1000\n10,6000\n1,1\n")

    def lengths(**options: Any) -> list[tuple[int, int]]:
        recorded = read_requests(Trace(path=str(path), **options), ("input_tokens", "output_tokens"))
        assert recorded.input_tokens is not None
        assert recorded.output_tokens is not None
        return list(zip(recorded.input_tokens.tolist(), recorded.output_tokens.tolist(), strict=True))

    assert lengths(input_scale=0.5, output_scale=2) == [(50, 100), (1500, 2000), (5, 12000), (1, 2)]
    assert lengths(max_tokens=2000) == [(100, 50), (1500, 500), (3, 1997), (1, 1)]
    assert lengths(max_tokens=2000, shorten="input") == [(100, 50), (1000, 1000), (1, 1999), (1, 1)]


def test_sharegpt_conversations_are_measured_in_characters(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    said = [{"from": "human", "value": "a" * 40}, {"from": "gpt", "value": "b" * 9}, {"from": "human", "value": "c"}]
    path.write_text(json.dumps([{"id": 1, "conversations": said}, {"id": 2, "conversations": said[:1]}]))
    needed = ("input_tokens", "output_tokens")
    recorded = read_requests(Trace(path=str(path), characters_per_token=4), needed)
    assert recorded.input_tokens is not None
    assert recorded.output_tokens is not None
    assert (list(recorded.input_tokens), list(recorded.output_tokens)) == ([10], [3])
    with pytest.raises(InputError, match="holds texts, not lengths") as refused:
        read_requests(Trace(path=str(path)), needed)
    assert "characters_per_token" in str(refused.value.hint)
    path.write_text('[{"conversations": [{"value": 3}, {}]}]')
    with pytest.raises(InputError, match="row 1: a part of conversations has no text"):
        read_requests(Trace(path=str(path), characters_per_token=4), needed)


def test_a_json_list_of_objects(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(
        '[{"arrival_s": 1, "input_tokens": 2, "output_tokens": 3},\n'
        ' {"arrival_s": 2, "input_tokens": 4, "output_tokens": 5}]'
    )
    recorded = read_requests(Trace(path=str(path)))
    assert recorded.input_tokens is not None
    assert list(recorded.input_tokens) == [2, 4]
    path.write_text('{"arrival_s": 1}')
    with pytest.raises(InputError, match="is not a JSON list of objects"):
        read_requests(Trace(path=str(path)))
