"""What servers emit is read as intervals: metrics as text and as a range query, logs, and spans."""

import csv
import io
import json
import socket
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from live_twins import scenario_of, served
from windtunnel.errors import InputError
from windtunnel.formats.recognise import find_format
from windtunnel.formats.telemetry import prometheus
from windtunnel.formats.telemetry.prometheus import Scrape, parse_text, poll, read_scrapes, record_of, scrape_text
from windtunnel.formats.telemetry.record import Buckets, ServerRecord, request_intervals

LOG = (
    "(APIServer pid=9) INFO 05-19 10:13:{second:02d} [loggers.py:271] Engine 000: "
    "Avg prompt throughput: 512.0 tokens/s, "
    "Avg generation throughput: {rate} tokens/s, Running: {running} reqs, Waiting: 1 reqs, GPU KV cache usage: 50.0%, "
    "Prefix cache hit rate: 25.0%, External prefix cache hit rate: 1.0%"
)


def read(path: Path) -> ServerRecord:
    record: ServerRecord = find_format(path, "server telemetry").read(path)
    return record


@pytest.fixture(scope="module")
def scrapes() -> list[str]:
    return served(scenario_of({}, num_requests=120), every_s=0.5)[2]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_intervals_add_up_to_what_a_twin_counted(engine: str) -> None:
    _, metrics, texts = served(scenario_of({"engine": {"name": engine}}, num_requests=120), every_s=0.5)
    rows = record_of([scrape_text(text, np.nan) for text in texts]).intervals
    last = {name: value for name, _, value, _ in parse_text(texts[-1])}
    assert rows.size == len(texts) - 1
    np.testing.assert_allclose(rows["duration_s"], 0.5)
    assert rows["generation_tokens"].sum() == last[f"{engine}:generation_tokens_total"]
    assert rows["gaps"].sum() == last[f"{engine}:inter_token_latency_seconds_count"]
    assert rows["gaps_s"].sum() == pytest.approx(last[f"{engine}:inter_token_latency_seconds_sum"])
    assert rows["prompts"].sum() == last[f"{engine}:time_to_first_token_seconds_count"] > 50
    assert rows["running"].max() > 1
    assert metrics.labels  # one replica


@pytest.mark.full
def test_a_range_query_says_the_same_as_scrapes(scrapes: list[str], tmp_path: Path) -> None:
    series: dict[Any, list[Any]] = {}
    for number, text in enumerate(scrapes):
        (tmp_path / f"{number:03d}.prom").write_text(text)
        for name, labels, value, _ in parse_text(text):
            series.setdefault((name, *labels.items()), []).append([number * 0.5, str(value)])
    result = [
        {"metric": dict([("__name__", name), *labels]), "values": rows} for (name, *labels), rows in series.items()
    ]
    answer = tmp_path.parent / "range.json"
    answer.write_text(json.dumps({"status": "success", "data": {"resultType": "matrix", "result": result}}))
    export, dump, metrics = (tmp_path.parent / name for name in ("export.jsonl", "dump.txt", "dump.om"))
    lines = [
        {"metric": each["metric"], "values": [*(float(value) for _, value in points), None],
         "timestamps": [*(round(1000 * at) for at, _ in points), 0]}
        for part in (slice(9), slice(9, None)) for each in result for points in [each["values"][part]]
    ]  # fmt: skip
    export.write_text("\n".join(map(json.dumps, lines)))
    late_s = 1_700_000_000  # a moment of today
    samples = [(name, labels, at + late_s, value) for (name, *labels), points in series.items() for at, value in points]

    def listed(labels: list[Any]) -> str:
        return ", ".join(f'{key}="{label}"' for key, label in labels)

    dump.write_text("".join(
        f"{{{listed([('__name__', name), *labels])}}} {value} {at * 1000:.0f}\n" for name, labels, at, value in samples
    ))  # fmt: skip
    metrics.write_text("".join(f"{name}{{{listed(labels)}}} {value} {at:.3f}\n" for name, labels, at, value in samples))
    one = read_scrapes(tmp_path)
    for other in map(read, (answer, export, dump, metrics)):
        for name in one.intervals.dtype.names[1:]:
            np.testing.assert_allclose(one.intervals[name], other.intervals[name], rtol=1e-6, err_msg=name)
        assert one.lengths == other.lengths
        assert one.step_tokens is not None
        assert other.step_tokens is not None
        np.testing.assert_array_equal(one.step_tokens[1], other.step_tokens[1])


def test_targets_that_are_scraped_at_other_moments_are_added_up() -> None:
    series: dict[Any, list[tuple[float, float]]] = {}
    for engine, late_s in (("0", 0.0), ("1", 4.0)):
        for name in ("vllm:num_requests_running", "vllm:prompt_tokens_total"):
            points = [(10.0 * at + late_s, 100.0 * at) for at in range(4) if (engine, at) != ("1", 3)]
            series[name, ("engine", engine)] = points
    series["process_start_time_seconds",] = [(float(at), 1.0) for at in range(40)]  # of an exporter beside them
    record = record_of(prometheus.scrapes_of(series))
    assert record.num_engines == 2
    assert record.intervals["start_s"].tolist() == [10.0, 20.0]
    assert record.intervals["prompt_tokens"].tolist() == [200, 200]


def test_a_restart_is_left_out(scrapes: list[str]) -> None:
    every = [scrape_text(text, np.nan) for text in scrapes[:8]]
    again = [scrape_text(text, np.nan) for text in scrapes[:4]]
    for late in again:
        late.time_s += 10
    assert record_of([*every, *again]).intervals.size == 7 + 3


def test_former_names_and_both_names_of_a_metric_count_once() -> None:
    lines = ['vllm:gpu_cache_usage_perc{engine="0"} 0.5', 'vllm:prompt_tokens_total{engine="0"} 10']
    lines += [f'vllm:{name}_seconds_{part}{{engine="0"}} 4' for part in ("sum", "count")
              for name in ("inter_token_latency", "time_per_output_token")]  # fmt: skip
    scrape = scrape_text("\n".join(lines), 1.0)
    assert scrape.values["kv_use"] == 0.5
    assert (scrape.values["itl.sum"], scrape.values["itl.count"]) == (4, 4)


@pytest.mark.parametrize("beginning", ["ray_vllm_", "ray_vllm:", "vllm_", ""])
def test_ray_and_nim_name_vllms_metrics_otherwise(scrapes: list[str], beginning: str, tmp_path: Path) -> None:
    texts = [text.replace("vllm:", beginning) for text in scrapes]
    for number, text in enumerate(texts):
        (tmp_path / f"{number:03}.prom").write_text(text)
    record, own = read_scrapes(tmp_path), record_of([scrape_text(text, np.nan) for text in scrapes])
    assert record.intervals.tobytes() == own.intervals.tobytes()
    assert record.lengths.keys() == own.lengths.keys()
    lines = "\n".join(line for line in texts[-1].splitlines() if not line.startswith("#"))
    (tmp_path / "lines").write_text(lines)
    assert find_format(tmp_path / "lines", "server telemetry").name == prometheus.TEXT


def grafana_table(scrapes: list[str]) -> str:
    """Return scrapes as Grafana saves them: "Series joined by time"."""
    lines = [[line.rsplit(" ", 1) for line in text.splitlines() if line and line[0] != "#"] for text in scrapes]
    columns = [name for name, _ in lines[-1]]
    text = io.StringIO()
    csv.writer(text, quoting=csv.QUOTE_ALL).writerow(["Time", *columns])
    for place, pairs in enumerate(lines):
        values = dict(pairs)
        csv.writer(text).writerow([1714564800000 + 500 * place, *(values.get(column, "") for column in columns)])
    return text.getvalue()


def test_a_table_of_grafana_says_the_same_as_scrapes(scrapes: list[str], tmp_path: Path) -> None:
    path, own = tmp_path / "table.csv", record_of([scrape_text(text, np.nan) for text in scrapes])
    path.write_text(grafana_table(scrapes))
    record = read(path)
    for name in record.intervals.dtype.names or ():
        if name != "start_s":
            np.testing.assert_allclose(record.intervals[name], own.intervals[name])
    path.write_text("sep=,\n" + grafana_table(scrapes).replace("1714564800000", "2026-05-01 12:00:00"))
    assert read(path).lengths.keys() == own.lengths.keys()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('"Time","P99"\n"2026-05-01 12:00:00","0.1"\n', "no metric of an engine itself: its columns are P99"),
        ('"Time","rate(vllm:prompt_tokens_total[1m])"\n1714564800000,1\n', "no metric of an engine itself"),
        ('"Time","vllm:prompt_tokens_total"\n"2026-05-01 12:00:00","1.2 K"\n', "misstates a time or value"),
        ('"Time","vllm:prompt_tokens_total"\n', "no metric of an engine itself"),
    ],
)
def test_a_table_of_grafana_with_derived_values_or_units_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "table.csv").write_text(text)
    with pytest.raises(InputError, match=message) as refusal:
        read(tmp_path / "table.csv")
    assert "Series joined by time" in str(refusal.value.hint)


def test_a_bare_name_beside_an_engines_is_of_something_else() -> None:
    scrape = scrape_text('prompt_tokens_total 7\nvllm:prompt_tokens_total{engine="0"} 10', 1.0)
    assert scrape.values["prompt_tokens"] == 10


def test_what_a_router_or_ray_repeats_of_an_engine_counts_once(scrapes: list[str]) -> None:
    names = ("num_requests_running", "gpu_prefix_cache_hits_total")
    router = "".join(f'vllm:{name}{{server="http://a:8000"}} 9\n' for name in names)
    own = record_of([scrape_text(text, np.nan) for text in scrapes])
    for front, again in ((router, ""), ("", "ray_vllm_")):
        ends = [text.partition("windtunnel:")[0].replace("vllm:", again) if again else "" for text in scrapes]
        record = record_of([scrape_text(front + text + end, np.nan) for text, end in zip(scrapes, ends, strict=True)])
        assert (record.num_engines, record.intervals.tobytes()) == (1, own.intervals.tobytes())


def test_an_exemplar_behind_a_value_is_not_taken_for_it() -> None:
    (sample,) = parse_text('vllm:x_bucket{le="1",id="a}b"} 3 12.5 # {trace_id="c"} 0.67 99.5')
    assert sample == ("vllm:x_bucket", {"le": "1", "id": "a}b"}, 3.0, 12.5)
    (sample,) = parse_text('vllm:x_bucket{le="1"} 3 # {trace_id="c"} 0.67')
    assert sample[2] == 3.0


def test_the_size_of_the_kv_cache_may_not_be_known_yet() -> None:
    known = 'vllm:cache_config_info{num_gpu_blocks="100",block_size="16"} 1'
    assert scrape_text(known, 0.0).capacity_tokens == 1600
    assert np.isnan(scrape_text(known.replace('"100"', '"None"'), 0.0).capacity_tokens)


def test_engines_are_counted_together() -> None:
    record = record_of([of_engines(0.0, *[0] * 4), of_engines(2.0, *[7] * 4)])
    assert record.num_engines == 4
    assert record.intervals["prompt_tokens"].tolist() == [28]


def test_a_replica_that_is_restarted_or_missing_among_others_is_left_out() -> None:
    counts = [(100, 100), (110, 110), (120,), (130, 130), (140, 140), (250, 50), (260, 60)]
    record = record_of([of_engines(float(place), *each) for place, each in enumerate(counts)])
    assert record.intervals["prompt_tokens"].tolist() == [20, 20, 20]
    assert record.notes == ["3 intervals left out: a server was restarted, came or went"]
    with pytest.raises(InputError, match="came or went between any two"):
        record_of([of_engines(0.0, 1), of_engines(1.0, 1, 1)])
    started = [scrape_text(f"process_start_time_seconds {s}\nvllm:prompt_tokens_total {10 * s}", s) for s in (1, 2)]
    with pytest.raises(InputError, match="restarted"):
        record_of(started)


def of_engines(time_s: float, *prompt_tokens: int) -> Scrape:
    """Return a scrape of engines that have computed so many prompt tokens."""
    lines = [
        f'vllm:num_requests_running{{engine="{engine}"}} 3\nvllm:prompt_tokens_total{{engine="{engine}"}} {tokens}'
        for engine, tokens in enumerate(prompt_tokens)
    ]
    return scrape_text("\n".join(lines), time_s)


def test_polling_goes_on_when_scrapes_fail_and_keeps_what_it_has(
    monkeypatch: pytest.MonkeyPatch, scrapes: list[str]
) -> None:
    failure = InputError("http://a does not answer: timed out")

    def polled(*answers: Any, seconds: float = 0.2) -> ServerRecord:
        """Poll a server that answers so, and the last one again and again."""
        left = list(answers)

        def answer(_: str) -> str:
            given = left.pop(0) if len(left) > 1 else left[0]
            if isinstance(given, BaseException):
                raise given
            return str(given)

        monkeypatch.setattr(prometheus, "answer_of", answer)
        return poll("http://a", seconds, 0.01)

    record = polled(scrapes[0], failure, "<html>", scrapes[1], failure)
    assert record.intervals.size == 1
    assert "scrapes failed, the last one as http://a does not answer: timed out" in record.notes[0]
    record = polled(*scrapes[:3], KeyboardInterrupt(), seconds=60)
    assert record.intervals.size == 2
    assert record.notes == ["ended after 0 of 60 s"]
    with pytest.raises(KeyboardInterrupt):
        polled(scrapes[0], KeyboardInterrupt())
    with pytest.raises(InputError, match=r"only the first of .* scrapes was answered"):
        polled(scrapes[0], failure)
    with pytest.raises(InputError, match="timed out"):
        polled(failure)


def test_a_saved_scrape_that_has_failed_is_left_out(scrapes: list[str], tmp_path: Path) -> None:
    for number, text in enumerate([scrapes[0], "", scrapes[1], "<html>502</html>"]):
        (tmp_path / f"{number}.prom").write_text(text)
    (tmp_path / ".hidden").write_text("x")
    record = read_scrapes(tmp_path)
    assert record.intervals.size == 1
    assert record.notes == [f"2 of 4 files left out: {tmp_path}/1.prom is empty"]
    for number in (0, 2):
        (tmp_path / f"{number}.prom").unlink()
    with pytest.raises(InputError, match=r"1\.prom is empty"):
        read_scrapes(tmp_path)


def test_a_port_of_another_protocol_is_no_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet() -> None:
            with listener.accept()[0] as connection:
                connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

        answering = threading.Thread(target=greet)
        answering.start()
        with pytest.raises(InputError, match="does not answer"):
            prometheus.answer_of(f"http://127.0.0.1:{listener.getsockname()[1]}/metrics")
        answering.join()


def test_a_log_gives_the_time_between_tokens_by_what_runs(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    lines = [LOG.format(second=second, rate=400.0, running=running) for second, running in ((1, 6), (11, 8), (21, 8))]
    path.write_text("\n".join(["INFO GPU KV cache size: 80,000 tokens", *lines]))
    record = read(path)
    assert record.is_estimated
    assert record.intervals["duration_s"].tolist() == [10, 10]
    assert (record.intervals["gaps_s"] / record.intervals["gaps"]).tolist() == pytest.approx([7 / 400, 8 / 400])
    assert record.intervals["context_tokens"].tolist() == pytest.approx([40_000 / 7, 5_000])
    assert record.intervals["cached_tokens"].tolist() == [1280, 1280]


SGLANG = {
    "Decode": "[2026-03-04 05:06:{at:02d} TP0] Decode batch{sign} #running-req: {running}, #token: {tokens}, token "
    "usage: 0.01, cuda graph: True, gen throughput (token/s): {rate}, #queue-req: 2, ",
    "Prefill": "[2026-03-04 05:06:{at:02d} TP0] Prefill batch{sign} #new-seq: 2, #new-token: 900, #cached-token: 100, "
    "token usage: 0.01, #running-req: {running}, #queue-req: 0, ",
}


def sglang_log(*lines: tuple[str, int, int, float], sign: str = ".", head: str = "") -> str:
    """A log of (kind, second, running requests, throughput)."""
    texts = [
        SGLANG[kind].format(at=at, running=running, tokens=500 * running, rate=rate, sign=sign)
        for kind, at, running, rate in lines
    ]
    return "\n".join([head, *texts])


@pytest.mark.parametrize("sign", [".", ",", " [81],"])  # of SGLang 0.4, 0.5, and with SGLANG_LOG_FORWARD_ITERS
def test_sglangs_log_gives_intervals_of_forty_decode_steps(tmp_path: Path, sign: str) -> None:
    path = tmp_path / "sglang.log"
    lines = [("Decode", 1, 6, 5.0), ("Prefill", 1, 6, 0), ("Prefill", 1, 7, 0), ("Decode", 2, 8, 700.0)]
    path.write_text(sglang_log(*lines, ("Decode", 3, 8, 800.0), sign=sign), encoding="utf-8")
    record = read(path)
    rows = record.intervals
    assert record.source == "SGLang log"
    assert record.prompts_apart
    assert rows["duration_s"].tolist() == pytest.approx([40 * 7 / 700, 40 * 8 / 800])
    assert (rows["gaps_s"] / rows["gaps"]).tolist() == pytest.approx([7 / 700, 8 / 800])
    assert rows["gaps"].tolist() == pytest.approx([40 * 7, 40 * 8])
    assert rows["prompts"].tolist() == [4, 0]
    assert rows["prompt_tokens"].tolist() == [2000, 0]
    assert rows["cached_tokens"].tolist() == [200, 0]
    assert rows["context_tokens"].tolist() == pytest.approx([500, 500])


def in_other_words(lines: list[str], form: str) -> list[str]:
    """Return lines of a log as Dynamo, and as a JSON formatter, write them."""
    made = []
    for number, line in enumerate(lines):
        message = line[line.index("batch") - 7 :] if "batch" in line else line[line.index("Engine") :]
        at = f"2026-03-04T05:06:{10 * number:02d}.500000Z"
        dynamo = f"{at}  INFO loggers.log: {message}"
        made.append(dynamo if form == "dynamo" else json.dumps({"message": message, "time": at, "level": "INFO"}))
    return made


@pytest.mark.parametrize("form", ["dynamo", "json"])
def test_logs_that_others_wrap_say_the_same(tmp_path: Path, form: str) -> None:
    vllm = [LOG.format(second=1, rate=400.0, running=8)] * 3
    sglang = sglang_log(*[("Decode", 1, 8, 800.0)] * 3).split("\n")[1:]
    for lines, gap_s in ((vllm, 8 / 400), (sglang, 8 / 800)):
        path = tmp_path / "server.log"
        path.write_text("\n".join(in_other_words(lines, form)), encoding="utf-8")
        rows = read(path).intervals
        assert (rows["gaps_s"] / rows["gaps"]).tolist() == pytest.approx([gap_s] * 2)


def test_a_line_of_all_engines_is_of_so_many(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    lines = [LOG.format(second=second, rate=1600.0, running=32) for second in (1, 11)]
    text = "\n".join(["GPU KV cache size: 80,000 tokens", *lines])
    path.write_text(text.replace("Engine 000: ", "4 Engines Aggregated: "), encoding="utf-8")
    record = read(path)
    assert record.num_engines == 4
    assert record.intervals["context_tokens"].tolist() == [40_000 / 8]


@pytest.mark.parametrize("mark", ["[pod/vllm-{}/main] ", "vllm-{}  | "])
def test_servers_in_one_log_are_read_apart(tmp_path: Path, mark: str) -> None:
    path = tmp_path / "servers.log"
    lines = [(number, 10 * at + 4 * number) for at in range(3) for number in (0, 1)]
    vllm = [mark.format(number) + LOG.format(second=at, rate=400.0 + 400 * number, running=8) for number, at in lines]
    sglang = [mark.format(number) + sglang_log(("Decode", at, 8, 400.0 + 400 * number)).strip() for number, at in lines]
    path.write_text("\n".join(vllm), encoding="utf-8")
    rows = read(path).intervals
    assert rows["duration_s"].tolist() == [10] * 4
    assert (rows["gaps_s"] / rows["gaps"]).tolist() == pytest.approx([8 / 400, 8 / 800] * 2)
    path.write_text("\n".join(sglang), encoding="utf-8")
    starts_s = read(path).intervals["start_s"]
    assert (starts_s - starts_s[0]).tolist() == [0, 4, 10, 14]


def test_former_vllms_log_calls_waiting_requests_pending(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    line = (
        "INFO 02-03 04:05:{:02d} [metrics.py:486] Avg prompt throughput: 4000.0 tokens/s, Avg generation throughput: "
        "800.0 tokens/s, Running: 12 reqs, Swapped: 0 reqs, Pending: 3 reqs, GPU KV cache usage: 6.6%, CPU KV cache "
        "usage: 0.0%."
    )
    path.write_text("\n".join(map(line.format, (1, 6, 11))), encoding="utf-8")
    rows = read(path).intervals
    assert rows["duration_s"].tolist() == [5, 5]
    assert rows["waiting"].tolist() == [3, 3]


def test_a_server_that_speculates_is_refused(tmp_path: Path, scrapes: list[str]) -> None:
    drafts = "SpecDecoding metrics: Mean acceptance length: 2.51, Accepted: 500 tokens, Drafted: {} tokens"
    path = tmp_path / "server.log"
    text = "\n".join(LOG.format(second=second, rate=400.0, running=8) for second in (1, 11))
    path.write_text(f"{text}\n{drafts.format(0)}", encoding="utf-8")
    assert read(path).intervals.size == 1
    path.write_text(f"{text}\n{drafts.format(900)}", encoding="utf-8")
    with pytest.raises(InputError, match="speculates"):
        read(path)
    with pytest.raises(InputError, match="speculates"):
        record_of([scrape_text(f"{each}\nvllm:spec_decode_num_drafts_total 9", np.nan) for each in scrapes[:2]])


def test_sglangs_log_tells_nothing_of_tokens_where_the_server_was_idle(tmp_path: Path) -> None:
    path = tmp_path / "sglang.log"
    lines = [("Decode", 1, 1, 80.0), ("Prefill", 20, 0, 0), ("Decode", 21, 1, 2.0), ("Decode", 22, 1, 80.0)]
    # A byte of another encoding, as a request may bring it into the log.
    head = "server_args=ServerArgs(decode_log_interval=20) "
    path.write_bytes(sglang_log(*lines, head=head).encode() + b"\xe9")
    rows = read(path).intervals
    assert rows["gaps"].tolist() == [0, 20]
    assert rows["duration_s"].tolist() == pytest.approx([20, 20 / 80])
    assert rows["prompts"].sum() == 2


def test_logs_of_ranks_are_read_apart_and_in_order_of_time(tmp_path: Path) -> None:
    path = tmp_path / "sglang.log"
    text = sglang_log(*(("Decode", at, 4, 400.0) for at in (1, 2, 3)))
    path.write_text(text + text.replace("TP0", "DP1 TP4"), encoding="utf-8")
    starts_s = read(path).intervals["start_s"]
    assert (starts_s - starts_s[0]).tolist() == [0, 0, 1, 1]


def span(number: int, **more: Any) -> dict[str, Any]:
    values = {"gen_ai.usage.prompt_tokens": {"intValue": "100"}, "gen_ai.usage.completion_tokens": {"intValue": "11"}}
    values |= {"gen_ai.latency.time_to_first_token": {"doubleValue": 0.5}, "gen_ai.latency.e2e": {"doubleValue": 2.5}}
    begin_ns = 1_700_000_000_000_000_000 + number * 100_000_000
    attributes = [{"key": key, "value": value} for key, value in {**values, **more}.items()]
    return {"startTimeUnixNano": str(begin_ns), "endTimeUnixNano": str(begin_ns + 10**9), "attributes": attributes}


def test_spans_give_every_request(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    lines = [{"resourceSpans": [{"scopeSpans": [{"spans": [span(number), {**span(0), "attributes": []}]}]}]}
             for number in range(40)]  # fmt: skip
    path.write_text("\n".join(map(json.dumps, lines)))
    record = read(path)
    assert record.requests is not None
    assert record.requests["arrival_s"][:2].tolist() == pytest.approx([0, 0.1], abs=1e-6)
    assert record.intervals["gaps"].sum() == pytest.approx(40 * 10)
    assert record.intervals["gaps_s"].sum() / record.intervals["gaps"].sum() == pytest.approx(0.2)


def test_spans_of_tempo_and_jaeger_say_the_same(tmp_path: Path) -> None:
    spans = [span(number) for number in range(20)]
    resources = [{"scopeSpans": [{"spans": spans}]}]
    jaeger = [
        {"startTime": int(each["startTimeUnixNano"]) // 1000, "duration": 1_000_000,
         "tags": [{"key": tag["key"], "value": float(*tag["value"].values())} for tag in each["attributes"]]}
        for each in spans
    ]  # fmt: skip
    kinds = {"resourceSpans": resources}, {"batches": resources}, {"trace": {"resourceSpans": resources}}
    read_columns = []
    for number, document in enumerate([*kinds, {"data": [{"traceID": "a", "spans": jaeger}]}]):
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps(document), encoding="utf-8")
        columns = read(path).requests
        assert columns is not None
        read_columns.append({name: values.tolist() for name, values in columns.items()})
        assert columns["arrival_s"][:2].tolist() == pytest.approx([0, 0.1], abs=1e-5)
        assert columns["output_tokens"].tolist() == [11] * 20
    assert all(each["ttft_s"] == read_columns[0]["ttft_s"] for each in read_columns)


def test_logs_tell_their_engine_and_model(tmp_path: Path) -> None:
    path, lines = tmp_path / "server.log", [LOG.format(second=second, rate=300, running=8) for second in (10, 20, 30)]
    path.write_text("\n".join(["INFO 05-19 10:12:00 [core.py:58] with config: model='Qwen/Qwen3-8B',", *lines]))
    assert (read(path).engine, read(path).model) == ("vllm", "Qwen/Qwen3-8B")


@pytest.mark.parametrize("kind", ["services", "models"])
def test_spans_of_two_servers_are_refused(kind: str, tmp_path: Path) -> None:
    path, resources = tmp_path / "spans.json", []
    for name in ("llama", "qwen"):
        told = {"key": "service.name", "value": {"stringValue": name if kind == "services" else "vllm"}}
        one = span(0, **({} if kind == "services" else {"gen_ai.response.model": {"stringValue": name}}))
        resources.append({"resource": {"attributes": [told]}, "scopeSpans": [{"spans": [one] * 20}]})
    path.write_text(json.dumps({"resourceSpans": resources}), encoding="utf-8")
    with pytest.raises(InputError, match=r"requests of several servers: (vllm )?llama, (vllm )?qwen"):
        read(path)


def test_spans_in_milliseconds_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "spans.json"
    late = span(0, **{"gen_ai.latency.e2e": {"doubleValue": 2500.0}})
    path.write_text(json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [late]}]}]}), encoding="utf-8")
    with pytest.raises(InputError, match="has a request of 2500 s in a span of 1 s") as refused:
        read(path)
    assert refused.value.hint == "gen_ai.latency attributes are seconds; are these milliseconds?"


def test_intervals_of_requests_know_who_ran_when() -> None:
    columns = {"arrival_s": [0.0, 0.0], "input_tokens": [100, 300], "output_tokens": [11, 21]}
    columns |= {"ttft_s": [1.0, 1.0], "e2e_s": [2.0, 3.0]}
    rows = request_intervals({name: np.array(values, float) for name, values in columns.items()})
    assert rows["gaps"].tolist() == pytest.approx([0, 20, 10])
    assert rows["running"].tolist() == pytest.approx([0, 2, 1])
    assert rows["prompts"].tolist() == [0, 2, 0]
    assert rows["context_tokens"][1:].tolist() == pytest.approx([(105.5 + 305.25) / 2, 315.75])
    assert rows["context_variance"][1] == pytest.approx(((305.25 - 105.5) / 2) ** 2)


def test_lengths_of_a_histogram_have_its_mean_and_stay_in_their_buckets() -> None:
    histogram = Buckets((10.0, 100.0, 1000.0, np.inf), (0.0, 30.0, 10.0, 0.0), 130.0)
    values, weights = histogram.values()
    assert np.average(values, weights=weights) == pytest.approx(130, rel=0.01)
    assert weights[values <= 100].sum() == 30
    assert values.min() > 10
    assert values.max() <= 1000
    equal, _ = Buckets((1000.0, 2000.0), (0.0, 5.0), 1024.0).values()
    assert np.average(equal) == pytest.approx(1024, rel=0.01)


def matrix(points: list[tuple[float, str]]) -> dict[str, Any]:
    """Return the answer to a range query, of one series."""
    series = {"metric": {"__name__": "vllm:prompt_tokens_total"}, "values": points}
    return {"status": "success", "data": {"resultType": "matrix", "result": [series]}}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.prom", "# a list\nother_total 1\n", "is no server telemetry that is known"),
        ("a.prom", "# HELP my_request_count x\nmy_request_count 1\n", "are of no engine that is known"),
        ("a.prom", "tgi_request_count 1\n", "of Hugging Face's TGI"),
        ("a.prom", 'dynamo_frontend_inflight_requests{model="m"} 1\n', "are Dynamo's own, and they do not say"),
        ("a.prom", 'inference_pool_average_queue_size{name="p"} 1\n', "of the endpoint picker of llm-d"),
        ("a.prom", 'vllm:num_requests_running{server="a"} 1\nvllm:avg_itl{server="a"} 1\n', "of the router of vLLM's"),
        ("a.prom", "litellm_llm_api_time_to_first_token_metric_count 5\n", "of LiteLLM's proxy"),
        ("a.prom", "# TYPE x gauge\nray_serve_num_http_requests_total 5\n", "none of them is an engine's"),
        ("a.prom", "trtllm_time_per_output_token_seconds_count 5\n", "neither running requests nor times between"),
        ("a.prom", 'DCGM_FI_DEV_SM_CLOCK{gpu="0"} 1980\n', "they do not count tokens"),
        ("a.prom", 'vllm:num_requests_running{engine="0"} 1\n', "no time passes"),
        ("a.prom", 'vllm:num_requests_running{engine="0"} 1\n' * 2, r"a\.prom holds several scrapes"),
        ("a.json", json.dumps(matrix([(1.0, "2")])), "no time passes between"),
        ("a.log", LOG.format(second=1, rate=1, running=1), "fewer than two lines"),
        ("a.log", sglang_log(("Decode", 1, 6, 5.0)), "fewer than two lines on decoding"),
        ("a.log", sglang_log(("Prefill", 1, 6, 0), ("Prefill", 2, 6, 0)), "fewer than two lines on decoding"),
        ("a.log", sglang_log(("Decode", 1, 6, 5.0)).replace("cuda", "accept len: 2.1, cuda"), "that speculates"),
        ("a.log", sglang_log(*[("Decode", 1, 6, 5.0)] * 2).replace("#token", "#other"), "lacks or misstates '#token'"),
        ("a.json", '{"data": {"resultType": "matrix", "result": [{"metric": {}}]}}', "lacks or misstates '__name__'"),
        ("a.json", '{"data": {"resultType": "matrix", "result": []}}', "has no series"),
        ("a.json", '{"resourceSpans": [{"scopeSpans": [{"spans": [{}]}]}]}', "lacks or misstates"),
        ("a.json", '{"resourceSpans": []}', "has no span of a request"),
    ],
)
def test_other_content_is_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=message):
        read(tmp_path / name)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (
            {"status": "error", "errorType": "bad_data", "error": "parse error"},
            "is an error of Prometheus: parse error",
        ),
        ({"status": "success", "data": {"resultType": "vector", "result": []}}, "holds a vector and no range"),
    ],
)
def test_other_answers_of_prometheus_are_refused(tmp_path: Path, document: dict[str, Any], message: str) -> None:
    path = tmp_path / "answer.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(InputError, match=message):
        read(path)


def test_two_models_are_refused() -> None:
    lines = [f'vllm:prompt_tokens_total{{model_name="{model}"}} 1' for model in ("a", "b")]
    with pytest.raises(InputError, match="metrics of two models: a and b"):
        scrape_text("\n".join(lines), 0.0)
