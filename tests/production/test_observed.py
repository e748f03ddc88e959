"""Files of recorded requests."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import windtunnel as wt
from windtunnel.errors import InputError
from windtunnel.files import write_bytes
from windtunnel.production.observed import is_request_table, observed, read_record, read_requests
from windtunnel.workload.generate.requests import generate

COLUMNS = "arrival_s,input_tokens,output_tokens,ttft_s,e2e_s\n"


def detailed(path: Path, count: int = 30, failed: int = 2) -> Path:
    document = {
        "input_lens": [100 + index for index in range(count)],
        "output_lens": [3] * count,
        "start_times": [1000.0 + index for index in range(count)],
        "ttfts": [0.5] * count,
        "itls": [[0.1, 0.2]] * count,
        "errors": ["", *["refused"] * failed, *[""] * (count - failed - 1)],
    }
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def test_vllms_client_gives_every_request_but_those_that_failed(tmp_path: Path) -> None:
    run = read_requests(detailed(tmp_path / "result.json"))
    assert run.arrival_s.size == 28
    assert run.arrival_s[:2].tolist() == [0.0, 3.0]
    assert run.e2e_s[0] == pytest.approx(0.8)
    assert run.tpot_s[0] == pytest.approx(0.15)
    assert run.position[:2].tolist() == [0, 3]
    assert run.num_failed == 2


def test_spans_give_every_request_to_a_diagnosis_and_other_telemetry_does_not(tmp_path: Path) -> None:
    numbers = {"gen_ai.usage.prompt_tokens": 100, "gen_ai.usage.completion_tokens": 11}
    numbers |= {"gen_ai.latency.time_to_first_token": 0.5, "gen_ai.latency.e2e": 2.5}
    tags = [{"key": key, "value": value} for key, value in numbers.items()]
    spans = [{"startTime": 10**6 * second, "duration": 2_500_000, "tags": tags} for second in range(30)]
    path = tmp_path / "spans.json"
    path.write_text(json.dumps({"data": [{"spans": spans}]}), encoding="utf-8")
    run = read_requests(path)
    assert run.arrival_s[:2].tolist() == [0, 1]
    assert run.tpot_s == pytest.approx([0.2] * 30)
    lines = [{"metric": {"__name__": name}, "values": [1, 2], "timestamps": [1000, 2000]}
             for name in ("vllm:prompt_tokens_total", "vllm:inter_token_latency_seconds_sum")]  # fmt: skip
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    with pytest.raises(InputError, match="does not tell of each request"):
        read_requests(path)


def test_what_prompts_share_is_read_from_the_workload_beside_the_requests(tmp_path: Path) -> None:
    shared = {"workload.shared_prompts": {"tokens": 500, "count": 3}}
    options = {"model": "llama-3.1-8b", "device": "h100_sxm", "rate_per_s": 8.0, "num_requests": 40}
    scenario = wt.scenario(**options, input_tokens=20, output_tokens=4, seed=3, settings=shared)
    wt.save(wt.simulate(scenario), tmp_path / "run")
    prefixes, drawn = read_requests(tmp_path / "run").prefixes, generate(scenario.workload, scenario.seed).prefixes
    assert prefixes is not None
    assert drawn is not None
    assert prefixes.request_node.tolist() == drawn.request_node.tolist()
    assert len(set(prefixes.request_node.tolist())) == 3
    (tmp_path / "run" / "scenario.yaml").write_text("of: another tool\n", encoding="utf-8")
    assert read_requests(tmp_path / "run").prefixes is None
    (tmp_path / "run" / "scenario.yaml").unlink()
    assert read_requests(tmp_path / "run").prefixes is None


def test_a_simulated_folder_is_read_without_its_warm_up(tmp_path: Path) -> None:
    result = wt.simulate(
        wt.scenario(
            model="qwen2.5-0.5b",
            device="h100_sxm",
            concurrency=2,
            input_tokens=64,
            output_tokens=4,
            num_requests=30,
            settings={"workload.arrivals.num_warmup_requests": 5},
        )
    )
    result.requests.write_parquet(tmp_path / "requests.parquet")
    run = read_requests(tmp_path)
    assert run.arrival_s.size == 30
    np.testing.assert_allclose(np.sort(run.ttft_s), np.sort(result.requests["ttft_s"][5:]))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("requests.csv", "arrival_s,input_tokens\n1,2\n", "has no column output_tokens"),
        ("requests.csv", "arrival_ms,latency\n1,2\n", "no column input_tokens, output_tokens, ttft_s, e2e_s"),
        ("requests.csv", COLUMNS + "0,1,1,0.1,0.2\n", "has 1 answered request; 20 are needed"),
        ("requests.csv", COLUMNS + "0,1,2,0.3,0.2\n" * 30, "first token: request 1 has ttft_s 0.3 and e2e_s 0.2"),
        ("requests.csv", COLUMNS, "requests.csv has no rows"),
        ("requests.csv", COLUMNS + "0,1,1,fast,0.2\n" * 30, "ttft_s is not a number everywhere"),
        ("requests.csv", COLUMNS + "0,1,2,0.1,0.2\n" * 30 + "9,,2,0.1,0.2\n", "request 31 has no input_tokens"),
        ("requests.csv", COLUMNS + "0,1,2,0.1,0.2\n" * 30 + "9,1,,0.1,0.2\n", "request 31 has no output_tokens"),
        ("requests.csv", COLUMNS + "noon,1,1,0.1,0.2\n" * 30, "row 1: arrival_s is not a time: noon"),
        ("requests.csv", COLUMNS + "1.7e12,1,2,0.1,0.2\n" * 30, "the last request arrives at 1.7e\\+12 s"),
        ("result.json", "{}", "has no list of every request"),
        ("result.json", "[{}]", "has no list of every request: it is no JSON object"),
        ("requests.txt", "", "is of no known kind"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=message):
        read_requests(tmp_path / name)


def guidellm(num_saved: int = 30, num_runs: int = 1) -> dict[str, Any]:
    """Return guidellm's report of runs of 30 requests each, of which so many are saved."""
    rows = [
        {
            "request_start_time": 1.7e9 + place, "time_to_first_token_ms": 100.0, "request_latency": 0.3,
            "prompt_tokens": 9, "output_tokens": 2,
        }
        for place in range(num_saved)
    ]  # fmt: skip
    run = {"requests": {"successful": rows}, "metrics": {"request_totals": {"successful": 30}}}
    return {"benchmarks": [run] * num_runs}


def test_guidellms_requests_are_read_where_all_of_one_load_are_there(tmp_path: Path) -> None:
    path = tmp_path / "benchmarks.json"
    path.write_text(json.dumps(guidellm()), encoding="utf-8")
    assert read_record(path) is not None
    run = read_requests(path)
    assert run.arrival_s.tolist() == list(range(30))
    np.testing.assert_allclose(run.ttft_s, 0.1)
    np.testing.assert_allclose(run.e2e_s, 0.3)
    for report, message in ((guidellm(20), "has 20 of 30 requests"), (guidellm(30, 2), "requests of 2 loads")):
        path.write_text(json.dumps(report), encoding="utf-8")
        with pytest.raises(InputError, match=message):
            read_requests(path)


@pytest.mark.parametrize("name", ["requests.csv", "requests.csv.gz"])
def test_a_table_may_have_milliseconds_and_be_gzipped(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    write_bytes(path, ("\ufeff" + COLUMNS.replace("_s", "_ms") + "4,1,2,100,300\r\n" * 30).encode())
    assert is_request_table(path)
    assert read_record(path) is not None
    run = read_requests(path)
    np.testing.assert_allclose(run.ttft_s, 0.1)
    np.testing.assert_allclose(run.e2e_s, 0.3)


def test_arrivals_may_be_dates(tmp_path: Path) -> None:
    path = tmp_path / "requests.csv"
    rows = [f"2026-03-04T05:06:{second:02d}.500Z,9,2,0.1,0.3" for second in range(30)]
    path.write_text("\n".join([COLUMNS.strip(), *rows]), encoding="utf-8")
    assert read_requests(path).arrival_s.tolist() == list(range(30))


def test_requests_may_be_lines_and_aiperfs(tmp_path: Path) -> None:
    path = tmp_path / "profile_export.jsonl"
    names = COLUMNS.strip().split(",")
    own = [dict(zip(names, (second, 9, 2, 0.1, 0.3), strict=True)) for second in range(30)]
    aiperf = [
        {
            "metadata": {
                "request_start_ns": 1_700_000_000_000_000_000 + row["arrival_s"] * 10**9,
                "benchmark_phase": "profiling" if number else "warmup",
                "was_cancelled": number == 29,
            },
            "metrics": {
                name: {"value": value, "unit": unit}
                for name, value, unit in (
                    ("input_sequence_length", row["input_tokens"], "tokens"),
                    ("output_sequence_length", row["output_tokens"], "tokens"),
                    ("time_to_first_token", 1000 * row["ttft_s"], "ms"),
                    ("request_latency", 1000 * row["e2e_s"], "ms"),
                )
            },
            "error": None,
        }
        for number, row in enumerate(own)
    ]
    failed = {"metadata": aiperf[3]["metadata"], "metrics": {}, "error": {"code": 503}}
    for lines, count, num_failed in ((own, 30, 0), ([*aiperf, failed], 28, 2)):
        path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
        assert is_request_table(path)
        assert read_record(path) is not None
        run = read_requests(path)
        assert run.arrival_s.tolist() == pytest.approx(list(range(count)), abs=1e-5)
        np.testing.assert_allclose(run.e2e_s, 0.3)
        assert run.input_tokens.tolist() == [9] * count
        assert run.num_failed == num_failed


def test_requests_under_other_names_are_no_steps(tmp_path: Path) -> None:
    path = tmp_path / "requests.csv"
    path.write_text(COLUMNS.upper() + "4,1,2,0.1,0.3\n" * 30, encoding="utf-8")
    assert is_request_table(path)
    with pytest.raises(InputError, match="has no column arrival_s"):
        read_requests(path)


def test_requests_without_an_answer_do_not_count() -> None:
    count = 40
    columns = {
        "arrival_s": np.arange(count, dtype=float),
        "input_tokens": np.full(count, 10),
        "output_tokens": np.full(count, 1),
        "ttft_s": np.where(np.arange(count) < 10, np.nan, 0.1),
        "e2e_s": np.full(count, 0.1),
    }
    run = observed(columns)
    assert run.arrival_s.size == 30
    assert run.num_failed == 10
    assert observed({**columns, "is_warmup": np.arange(count) < 4}).num_failed == 6
    assert np.isnan(run.tpot_s).all()
