"""Tables of runs and benchmark clients' files become scenarios with what was measured beside."""

import json
from pathlib import Path
from typing import Any

import pytest

from windtunnel.calibration.measured_runs import read_client_files, read_table
from windtunnel.calibration.run_files import read_measurements
from windtunnel.calibration.validate import RunPrediction
from windtunnel.errors import InputError
from windtunnel.formats.clients.read import ClientResult, read_client_results
from windtunnel.formats.launch.read import read_launch_command
from windtunnel.model.parallelism import Parallelism
from windtunnel.report.calibration.validation import validation_report
from windtunnel.serving.scenario import resolve
from windtunnel.workload.arrivals import Arrivals, ClosedLoop, Gamma, Poisson, Static
from windtunnel.workload.lengths import Uniform

BASE: dict[str, Any] = {"model": "llama-3.1-8b", "deployment": {"device": "h100_sxm"}}

VLLM = {
    "date": "20260101-000000",
    "model_id": "meta-llama/Llama-3.1-8B",
    "num_prompts": 100,
    "request_rate": "inf",
    "max_concurrency": 10,
    "duration": 20.0,
    "completed": 100,
    "total_input_tokens": 100_000,
    "total_output_tokens": 20_000,
    "output_throughput": 1000.0,
    "mean_ttft_ms": 50.0,
    "mean_tpot_ms": 8.0,
    "mean_e2el_ms": 1642.0,
}
SGLANG = {
    **{name: value for name, value in VLLM.items() if name != "mean_e2el_ms"},
    "backend": "sglang",
    "request_rate": 4.0,
    "max_concurrency": None,
    "random_range_ratio": 0.5,
    "mean_e2e_latency_ms": 1642.0,
}
AIPERF = {
    "request_throughput": {"unit": "requests/sec", "avg": 5.0},
    "request_count": {"unit": "requests", "avg": 100},
    "time_to_first_token": {"unit": "ms", "avg": 50.0, "p50": 45.0},
    "inter_token_latency": {"unit": "ms", "avg": 8.0},
    "request_latency": {"unit": "ms", "avg": 1642.0},
    "output_token_throughput": {"unit": "tokens/sec", "avg": 1000.0},
    "input_sequence_length": {"unit": "tokens", "avg": 1000.0},
    "output_sequence_length": {"unit": "tokens", "avg": 200.0},
    "input_config": {"loadgen": {"concurrency": 10}},
}


def _mean(value: float) -> dict[str, Any]:
    return {"successful": {"mean": value}}


GUIDELLM = {
    "benchmarks": [
        {
            "args": {"strategy": {"type_": "concurrent", "streams": 10}},
            "request_totals": {"successful": 100},
            "metrics": {
                "time_to_first_token_ms": _mean(50.0),
                "inter_token_latency_ms": _mean(8.0),
                "request_latency": _mean(1.642),
                "output_tokens_per_second": _mean(1000.0),
                "prompt_token_count": _mean(1000.0),
                "output_token_count": _mean(200.0),
            },
        }
    ]
}


INFERENCE_PERF: dict[str, Any] = {
    "load_summary": {"count": 100, "requested_rate": 1.0, "achieved_rate": 0.9, "concurrency": 10},
    "successes": {
        "count": 100,
        "latency": {
            "request_latency": {"mean": 1.642},
            "normalized_time_per_output_token": {"mean": 0.00821},
            "time_per_output_token": {"mean": 0.008},
            "time_to_first_token": {"mean": 0.05},
        },
        "throughput": {"output_tokens_per_sec": 1000.0},
        "prompt_len": {"mean": 1000.0},
        "output_len": {"mean": 200.0},
    },
    "failures": {"count": 3},
}


# Keys of a file of ray-project/llmperf (benchmarks/results/yi) and of sgl-project/genai-bench.
LLMPERF: dict[str, Any] = {
    "version": "2023-08-31",
    "model": "Yi-1.5-34B-Chat",
    "stddev_input_tokens": 0,
    "stddev_output_tokens": 0,
    "num_concurrent_requests": 10,
    "results_inter_token_latency_s_mean": 1.642 / 200,
    "results_ttft_s_mean": 0.05,
    "results_end_to_end_latency_s_mean": 1.642,
    "results_number_input_tokens_mean": 1000.0,
    "results_number_output_tokens_mean": 200.0,
    "results_number_errors": 3,
    "results_mean_output_throughput_token_per_s": 1000.0,
    "results_num_completed_requests": 100,
}
GENAI_BENCH: dict[str, Any] = {
    "aggregated_metrics": {
        "scenario": "N(1000,50)/(200,10)",
        "num_concurrency": 10,
        "iteration_type": "num_concurrency",
        "mean_output_throughput_tokens_per_s": 1000.0,
        "num_error_requests": 3,
        "num_completed_requests": 100,
        "stats": {
            "ttft": {"mean": 0.05},
            "tpot": {"mean": 0.008},
            "e2e_latency": {"mean": 1.642},
            "num_input_tokens": {"min": 900, "max": 1100, "mean": 1000.0},
            "num_output_tokens": {"min": 180, "max": 220, "mean": 200.0},
        },
    },
    "individual_request_metrics": [],
}


@pytest.mark.parametrize(
    ("document", "client"),
    [
        (VLLM, "vllm"),
        (LLMPERF | {"stddev_input_tokens": 50}, "llmperf"),
        (GENAI_BENCH, "genai-bench"),
        (SGLANG, "sglang"),
        (AIPERF, "aiperf"),
        (GUIDELLM, "guidellm"),
        (INFERENCE_PERF, "inference-perf"),
    ],
)
def test_every_client_gives_the_same_run(tmp_path: Path, document: dict[str, Any], client: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    (result,) = read_client_results(path)
    assert result.client == client
    assert result.measured == pytest.approx({"tpot": 0.008, "ttft": 0.05, "e2e": 1.642, "throughput": 1000.0})
    assert (result.input_tokens, result.output_tokens, result.num_requests) == (1000, 200, 100)
    (run,) = read_client_files(path, BASE | {"model": result.model} if result.model else BASE)
    assert run.scenario is not None
    workload = run.scenario.workload
    if client == "sglang":
        assert workload.arrivals == Poisson(rate_per_s=4.0)
        assert workload.input_tokens == Uniform(min_tokens=667, max_tokens=1333)
    else:
        assert workload.arrivals == ClosedLoop(concurrency=10)
        assert workload.input_tokens == Uniform(min_tokens=900, max_tokens=1100)


STATISTICS = {"p50": 1.0, "p99": 2.0, "minimum": 0.5}
TRTLLM: dict[str, Any] = {
    "engine": {"model": "llama-3.1-8b", "backend": "Pytorch"},
    "request_info": {"num_requests": 100, "avg_input_length": 1000.0, "avg_output_length": 200.0},
    "performance": {
        "system_output_throughput_tok_s": 1000.0,
        "request_latency_percentiles_ms": {**STATISTICS, "average": 1642.0},
    },
    "streaming_metrics": {
        "ttft_percentiles": {**STATISTICS, "average": 50.0},
        "tpot_percentiles": {**STATISTICS, "average": 8.0},
    },
}
LOCUST = (
    "Type,Name,Request Count,Failure Count,Median Response Time,Average Response Time,50%,99%,99.9%\n"
    "POST,/v1/chat/completions,103,3,1500,1642.0,1500,2600,N/A\n,Aggregated,103,3,1500,1642.0,1500,2600,N/A\n"
)
TIMES = {"avg": 1642.0, "med": 1500.0, "p(99)": 2600.0}
K6 = {"http_req_duration": TIMES, "http_reqs": {"count": 103}, "http_req_failed": {"value": 3 / 103}}
K6_DATA = {"metrics": {key: {"type": "x", "values": value} for key, value in K6.items()}}


def test_a_client_that_records_no_load_can_only_be_compared(tmp_path: Path) -> None:
    (result,) = results_of(tmp_path, TRTLLM)
    assert result.measured == pytest.approx({"tpot": 0.008, "ttft": 0.05, "e2e": 1.642, "throughput": 1000.0})
    assert result.percentiles["tpot_p99"] == pytest.approx(0.002)
    assert (result.engine, result.input_tokens, result.num_requests) == ("trtllm", 1000, 100)
    with pytest.raises(InputError, match="trtllm-bench does not record the load") as refused:
        read_client_files(tmp_path / "result.json", BASE)
    assert "gate --measured" in str(refused.value.hint)
    whole = {name: values for name, values in TRTLLM.items() if name != "streaming_metrics"}  # without --streaming
    assert results_of(tmp_path, whole)[0].measured.keys() == {"e2e", "throughput"}


@pytest.mark.parametrize(
    ("text", "client"), [(LOCUST, "locust"), (json.dumps({"metrics": K6}), "k6"), (json.dumps(K6_DATA), "k6")]
)
def test_load_tests_of_web_servers_know_the_end_to_end_time(tmp_path: Path, text: str, client: str) -> None:
    path = tmp_path / "run_stats.csv"
    path.write_text(text, encoding="utf-8")
    (result,) = read_client_results(path)
    assert (result.client, result.num_requests, result.num_failed) == (client, 100, 3)
    assert result.measured == pytest.approx({"e2e": 1.642})
    assert result.percentiles == pytest.approx({"e2e_p50": 1.5, "e2e_p99": 2.6})


def k6_point(metric: str, value: float) -> str:
    data = {"time": "2026-05-01T12:00:00.1+02:00", "value": value, "tags": {"status": "200"}}
    return json.dumps({"metric": metric, "type": "Point", "data": data}, separators=(",", ":"))


def test_k6s_points_have_the_statistics_of_its_summary(tmp_path: Path) -> None:
    path = tmp_path / "points.ndjson"
    head = '{"type":"Metric","data":{"name":"http_req_duration","type":"trend"},"metric":"http_req_duration"}'
    points = [
        k6_point(*each) for ms in range(1, 101) for each in (("http_req_duration", ms), ("http_req_failed", ms == 9))
    ]
    path.write_text("\n".join([head, k6_point("http_reqs", 1), *points]), encoding="utf-8")
    (result,) = read_client_results(path)
    assert (result.client, result.num_requests, result.num_failed) == ("k6", 99, 1)
    assert (result.measured["e2e"], result.percentiles["e2e_p90"]) == pytest.approx((0.0505, 0.0901))
    with pytest.raises(InputError, match="k6 does not record the load"):
        read_measurements([path], {"model": "llama-3.1-8b", "device": "h100_sxm"})
    for text, message in ((head, "has no http_req_duration"), (f"{points[0]}\n{points[1][:40]}", "line 2 lacks")):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(InputError, match=message):
            read_client_results(path)


def test_a_table_of_locust_is_no_table_of_runs(tmp_path: Path) -> None:
    path = tmp_path / "run_stats.csv"
    path.write_text(LOCUST, encoding="utf-8")
    with pytest.raises(InputError, match="locust does not record the load"):
        read_measurements([path], {"model": "llama-3.1-8b", "device": "h100_sxm"})


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (",Aggregated", "GET,/health,9,0,1,1,1,1,1\n,Aggregated", "to 2 endpoints: POST /v1/chat/completions, GET"),
        ("1642.0", "fast", "lacks or misstates could not convert"),
        (",1500,1642.0,1500,2600,N/A\n,Agg", "\n,Agg", "lacks or misstates"),
    ],
)
def test_a_table_of_locust_that_is_edited_or_of_several_endpoints_is_refused(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    path = tmp_path / "run_stats.csv"
    path.write_text(LOCUST.replace(old, new), encoding="utf-8")
    with pytest.raises(InputError, match=message):
        read_client_results(path)


def results_of(tmp_path: Path, document: dict[str, Any]) -> list[ClientResult]:
    path = tmp_path / "result.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    return read_client_results(path)


def test_a_client_that_was_told_of_an_engine_tells_it(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps(SGLANG), encoding="utf-8")
    unnamed = {"model": "llama-3.1-8b", "deployment": {"device": "h100_sxm"}}
    named = {**unnamed, "deployment": {"device": "h100_sxm", "engine": {"name": "vllm"}}}
    engines = [run.scenario.deployment.engine for base in (unnamed, named) for run in read_client_files(path, base)
               if run.scenario]  # fmt: skip
    assert [engine.name for engine in engines] == ["sglang", "vllm"]


def test_requests_that_failed_are_told_of(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps(VLLM | {"completed": 90}), encoding="utf-8")
    (run,) = read_client_files(path, {"model": "llama-3.1-8b", "deployment": {"device": "h100_sxm"}})
    report = validation_report([RunPrediction(run, "", {}, {}, "none", {})])
    assert "of result, 10 requests failed and are not simulated" in report.lead


def test_the_engine_of_one_result_is_not_that_of_the_next(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text("\n".join(json.dumps(SGLANG | {"backend": name}) for name in ("sglang", "vllm")), encoding="utf-8")
    runs = read_client_files(path, {"model": "llama-3.1-8b", "deployment": {"device": "h100_sxm"}})
    assert [run.scenario.deployment.engine.name for run in runs if run.scenario] == ["sglang", "vllm"]


TAIL = {"median": 45.0, "p99": 90.0}
SECONDS = {"median": 0.045, "p99": 0.09}


def _changed(document: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of a document with another value at a path of keys and places."""
    copied = json.loads(json.dumps(document))
    *way, last = (int(key) if key.isdecimal() else key for key in path.split("/"))
    within = copied
    for key in way:
        within = within[key]
    within[last] = value
    return dict(copied)


@pytest.mark.parametrize(
    "document",
    [
        VLLM | {f"{name}_ttft_ms": value for name, value in TAIL.items()},
        SGLANG | {f"{name}_ttft_ms": value for name, value in TAIL.items()},
        _changed(AIPERF, "time_to_first_token", {"unit": "ms", "avg": 50.0, "p50": 45.0, "p99": 90.0}),
        _changed(AIPERF, "time_to_first_token", {"unit": "sec", "avg": 0.05, "p50": 0.045, "p99": 0.09}),
        _changed(
            GUIDELLM,
            "benchmarks/0/metrics/time_to_first_token_ms/successful",
            {"mean": 50.0, "percentiles": {"p50": 45.0, "p99": 90.0, "p999": 95.0}},
        ),
        _changed(INFERENCE_PERF, "successes/latency/time_to_first_token", {"mean": 0.05, **SECONDS, "max": 1.0}),
        LLMPERF | {"results_ttft_s_quantiles_p50": 0.045, "results_ttft_s_quantiles_p99": 0.09},
        _changed(GENAI_BENCH, "aggregated_metrics/stats/ttft", {"mean": 0.05, "p50": 0.045, "p99": 0.09, "stddev": 1}),
    ],
)
def test_percentiles_are_those_that_the_client_wrote(tmp_path: Path, document: dict[str, Any]) -> None:
    (result,) = results_of(tmp_path, document)
    assert result.measured["ttft"] == pytest.approx(0.05)
    assert result.percentiles == pytest.approx({"ttft_p50": 0.045, "ttft_p99": 0.09})


def test_a_unit_of_time_that_is_not_known_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="misstates a unit of time, which is 'ticks'"):
        results_of(tmp_path, _changed(AIPERF, "time_to_first_token/unit", "ticks"))


def test_inference_perf_says_its_load_stage_by_stage(tmp_path: Path) -> None:
    load = INFERENCE_PERF["load_summary"]
    (result,) = results_of(tmp_path, INFERENCE_PERF | {"load_summary": load | {"concurrency": None}})
    assert (result.concurrency, result.rate_per_s, result.gap_cv) == (None, 1.0, 0.0)
    with pytest.raises(InputError, match="summary of all its stages"):
        results_of(tmp_path, INFERENCE_PERF | {"load_summary": {"count": 100}})


def test_genai_bench_says_a_rate(tmp_path: Path) -> None:
    rate = {"iteration_type": "request_rate", "request_rate": 4.0, "num_concurrency": 1000}
    whole = GENAI_BENCH["aggregated_metrics"] | rate
    (result,) = results_of(tmp_path, GENAI_BENCH | {"aggregated_metrics": whole})
    assert (result.concurrency, result.rate_per_s, result.range_ratio) == (None, 4.0, None)


def test_equal_lengths_are_recognised(tmp_path: Path) -> None:
    equal = {
        "num_input_tokens": {"min": 9, "max": 9, "mean": 9.0},
        "num_output_tokens": {"min": 5, "max": 5, "mean": 5.0},
    }
    whole = GENAI_BENCH["aggregated_metrics"]
    documents = LLMPERF, GENAI_BENCH | {"aggregated_metrics": whole | {"stats": whole["stats"] | equal}}
    assert [results_of(tmp_path, document)[0].range_ratio for document in documents] == [1.0, 1.0]


def test_requests_that_failed_are_counted(tmp_path: Path) -> None:
    errored = {"benchmarks": [GUIDELLM["benchmarks"][0] | {"request_totals": {"successful": 100, "errored": 3}}]}
    documents = VLLM | {"failed": 3}, VLLM | {"num_prompts": 103}, AIPERF | {"error_request_count": {"avg": 3.0}}
    for document in (*documents, errored, INFERENCE_PERF, LLMPERF, GENAI_BENCH):
        assert [result.num_failed for result in results_of(tmp_path, document)] == [3]
    assert results_of(tmp_path, SGLANG)[0].num_failed == 0


def test_json_that_is_cut_off_is_said_to_be(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps(VLLM)[:-40], encoding="utf-8")
    with pytest.raises(InputError, match="it is broken JSON that begins with"):
        read_client_results(path)


def test_json_lines_hold_several_runs(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text(f"{json.dumps(SGLANG)}\n{json.dumps(SGLANG)}\n", encoding="utf-8")
    assert [run.id for run in read_client_files(path, BASE)] == ["runs", "runs:2"]


@pytest.mark.parametrize("text", ['{"a": 1}', "[1, 2]", "not json", '{"mean_ttft_ms": 5}', "{}"])
def test_other_documents_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=r"other\.json"):
        read_client_results(path)


HEADER = "id,model,device,engine,tp,input_tokens,output_tokens,range_ratio,concurrency,ttft_ms,tpot_ms,_note"
ROW = "one,llama-3.1-8b,h100_sxm,sglang,2,1024,256,0.8,16,50,8,mine"


def table_of(folder: Path, header: str = HEADER, row: str = ROW) -> Path:
    path = folder / "runs.csv"
    path.write_text(f"{header}\n{row}\n", encoding="utf-8")
    return path


def test_a_row_says_what_was_run_and_measured(tmp_path: Path) -> None:
    (run,) = read_table(table_of(tmp_path))
    assert run.scenario is not None
    assert run.scenario.deployment.parallelism.tp == 2
    assert run.scenario.workload.input_tokens == Uniform(min_tokens=819, max_tokens=1024)
    assert run.scenario.workload.num_requests == 160
    assert run.measured == pytest.approx({"ttft": 0.05, "tpot": 0.008})
    assert run.labels["engine"] == "sglang"


def test_runs_of_a_deployment_at_other_loads_are_one_configuration(tmp_path: Path) -> None:
    both = [read_table(table_of(tmp_path, row=ROW.replace(",16,", f",{load},")))[0] for load in (16, 64)]
    assert both[0].configuration == both[1].configuration
    other = read_table(table_of(tmp_path, row=ROW.replace("sglang,2", "sglang,4")))[0]
    assert other.configuration != both[0].configuration


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("one,", "one,x,", "another number of values"),
        (",16,50", ",,50", "neither concurrency nor rate_per_s"),
        (",50,8", ",-1,8", "ttft_ms is '-1'"),
        (",50,8", ",,", "nothing was measured"),
        ("llama-3.1-8b", "", "model is empty"),
    ],
)
def test_a_malformed_row_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_table(table_of(tmp_path, row=ROW.replace(old, new, 1)))


def test_an_unknown_column_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="concurency") as caught:
        read_table(table_of(tmp_path, header=HEADER.replace("concurrency", "concurency")))
    assert "concurrency" in (caught.value.hint or "")


def arrivals_of(folder: Path, document: dict[str, Any]) -> Arrivals | None:
    path = folder / "result.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    (run,) = read_client_files(path, BASE)
    assert run.scenario is not None
    return run.scenario.workload.arrivals


@pytest.mark.parametrize("backend", [{"backend": "openai-chat"}, {"endpoint_type": "openai-chat", "backend": "vllm"}])
def test_a_client_that_asked_for_chats_is_one_whose_server_reads_templates(
    tmp_path: Path, backend: dict[str, str]
) -> None:
    (tmp_path / "run.json").write_text(json.dumps(VLLM | backend))
    (run,) = read_client_files(tmp_path / "run.json", BASE)
    assert run.scenario is not None
    assert resolve(run.scenario).client.asks_for_chats


def test_a_client_without_rate_and_limit_sends_everything_at_once(tmp_path: Path) -> None:
    """The default of `vllm priced serve`: `--request-rate inf` and no `--max-concurrency`."""
    assert arrivals_of(tmp_path, VLLM | {"max_concurrency": None, "completed": 90}) == ClosedLoop(concurrency=100)
    throughput = {"args": {"strategy": {"type_": "throughput"}}}
    assert arrivals_of(tmp_path, {"benchmarks": [GUIDELLM["benchmarks"][0] | throughput]}) == ClosedLoop(
        concurrency=100
    )


@pytest.mark.parametrize(
    ("document", "arrivals"),
    [
        (VLLM | {"max_concurrency": None, "request_rate": 4, "burstiness": 0.25}, Gamma(rate_per_s=4, cv=2)),
        (
            VLLM | {"max_concurrency": 8, "request_rate": 4, "burstiness": 0.25},
            ClosedLoop(concurrency=8, rate_per_s=4, cv=2),
        ),
        (AIPERF | {"input_config": {"request_rate": 4.0}}, Static(rate_per_s=4)),
        (AIPERF | {"input_config": {"loadgen": {"request_rate": 4.0}}}, Poisson(rate_per_s=4)),
        (
            AIPERF
            | {"input_config": {"loadgen": {"request_rate": 4.0, "arrival_pattern": "gamma", "arrival_smoothness": 4}}},
            Gamma(rate_per_s=4, cv=0.5),
        ),
        (
            {"benchmarks": [GUIDELLM["benchmarks"][0] | {"args": {"strategy": {"type_": "constant", "rate": 4}}}]},
            Static(rate_per_s=4),
        ),
    ],
    ids=[
        "vLLM's burstiness",
        "vLLM's burstiness under a cap",
        "perf_analyzer's rate",
        "AIPerf's rate",
        "AIPerf's smoothness",
        "guidellm's constant rate",
    ],
)
def test_gaps_between_arrivals_are_the_clients(tmp_path: Path, document: dict[str, Any], arrivals: Arrivals) -> None:
    assert arrivals_of(tmp_path, document) == arrivals


def test_a_run_of_failed_requests_alone_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "failed.json"
    path.write_text(json.dumps(VLLM | {"completed": 0}), encoding="utf-8")
    with pytest.raises(InputError, match="holds no finished run"):
        read_client_files(path, BASE)


def phase(**settings: Any) -> dict[str, Any]:
    """AIPerf's result since it configures a run by phases."""
    warmup = {"name": "warmup", "type": "concurrency", "concurrency": 2, "requests": 4}
    return AIPERF | {"input_config": {"phases": [warmup, {"name": "profiling", "kind": "profiling", **settings}]}}


@pytest.mark.parametrize(
    ("document", "arrivals"),
    [
        (phase(type="concurrency", concurrency=10, requests=100), ClosedLoop(concurrency=10)),
        (phase(type="concurrency"), ClosedLoop(concurrency=1)),
        (phase(type="poisson", rate=4.0), Poisson(rate_per_s=4)),
        (phase(type="poisson", rate=4.0, concurrency=8), ClosedLoop(concurrency=8, rate_per_s=4)),
        (phase(type="gamma", rate=4.0, smoothness=4), Gamma(rate_per_s=4, cv=0.5)),
        (phase(type="constant", rate=4.0), Static(rate_per_s=4)),
    ],
)
def test_aiperfs_phases_say_how_requests_were_sent(
    tmp_path: Path, document: dict[str, Any], arrivals: Arrivals
) -> None:
    assert arrivals_of(tmp_path, document) == arrivals


@pytest.mark.parametrize("settings", [{"type": "fixed_schedule"}, {"type": "poisson", "rate_series": {"points": []}}])
def test_a_load_that_changes_is_not_taken_for_a_constant_one(tmp_path: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="no constant concurrency or rate"):
        arrivals_of(tmp_path, phase(**settings))


def measured_of(folder: Path, document: dict[str, Any]) -> set[str]:
    path = folder / "result.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    (result,) = read_client_results(path)
    return set(result.measured)


def test_what_a_client_could_not_measure_is_left_out(tmp_path: Path) -> None:
    """Answers of one token have no time per token after it."""
    others = {"ttft", "e2e", "throughput"}
    assert measured_of(tmp_path, VLLM | {"mean_tpot_ms": 0.0}) == others
    assert measured_of(tmp_path, VLLM | {"mean_tpot_ms": float("nan")}) == others
    assert measured_of(tmp_path, {key: value for key, value in AIPERF.items() if "inter" not in key}) == others
    metrics = GUIDELLM["benchmarks"][0]["metrics"] | {"inter_token_latency_ms": {"successful": None}}
    assert measured_of(tmp_path, {"benchmarks": [GUIDELLM["benchmarks"][0] | {"metrics": metrics}]}) == others


def test_a_negative_latency_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="misstates ttft, which is below zero"):
        measured_of(tmp_path, VLLM | {"mean_ttft_ms": -5.0})


def test_a_range_is_only_of_random_lengths(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps(SGLANG | {"dataset_name": "sharegpt", "random_range_ratio": 0.0}), encoding="utf-8")
    assert read_client_results(path)[0].range_ratio is None
    path.write_text(json.dumps(SGLANG | {"dataset_name": "random-ids"}), encoding="utf-8")
    assert read_client_results(path)[0].range_ratio == 0.5


def test_a_row_may_describe_two_pools(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(
        "model,device,engine,prefill_replicas,prefill_tp,prefill_max_num_batched_tokens,decode_tp,decode_ep,"
        "decode_attention_dp,decode_max_num_seqs,input_tokens,output_tokens,concurrency,ttft_ms\n"
        "Qwen/Qwen3-30B-A3B,h100_sxm,vllm,2,1,4096,1,4,4,64,1000,100,8,80\n"
        "llama-3.1-8b,h100_sxm,trtllm,,1,,2,,,,1000,100,8,80\n"
    )
    one, other = read_table(path)
    assert one.scenario is not None
    prefill, decode = one.scenario.deployment.pools
    assert (prefill.role, prefill.replicas, prefill.parallelism) == ("prefill", 2, Parallelism())
    assert prefill.engine.max_num_batched_tokens == 4096
    assert (decode.role, decode.replicas, decode.parallelism) == ("decode", 1, Parallelism(ep=4, attention_dp=4))
    assert decode.engine.max_num_seqs == 64
    assert one.scenario.deployment.transfer.first_token == "decode"
    assert (one.labels["mode"], one.labels["parallelism"]) == ("disagg", "P 2x tp1 D 1x tp1 ep4 dp4")
    assert other.scenario is not None
    assert other.scenario.deployment.transfer.first_token == "prefill"
    assert (other.labels["mode"], other.labels["parallelism"]) == ("disagg", "P 1x tp1 D 1x tp2")


@pytest.mark.parametrize(
    ("columns", "values", "message"),
    [
        ("prefill_tp", "2", "runs.csv row 1: prefill_tp is given and nothing of the servers that decode"),
        ("decode_replicas", "2", "runs.csv row 1: decode_replicas is given and nothing of the servers that prefill"),
        ("tp,prefill_tp,decode_tp", "2,1,1", "runs.csv row 1: tp and prefill_tp exclude each other"),
        ("prefill_tp,decode_tp", "1,wide", "runs.csv row 1: decode_tp is 'wide'; a number above zero is needed"),
    ],
)
def test_pools_that_are_half_described_are_errors(tmp_path: Path, columns: str, values: str, message: str) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(
        f"model,device,{columns},input_tokens,output_tokens,concurrency,ttft_ms\n"
        f"llama-3.1-8b,h100_sxm,{values},1000,100,8,80\n"
    )
    with pytest.raises(InputError) as caught:
        read_table(path)
    assert caught.value.message.startswith(message)


def test_a_broken_parquet_file_says_what_is_wrong_with_it(tmp_path: Path) -> None:
    path = tmp_path / "runs.parquet"
    path.write_text("no table of runs", encoding="utf-8")
    with pytest.raises(InputError, match="readable Parquet file: Parquet magic bytes not found in footer"):
        read_table(path)


COMMANDS = "id,device,command,input_tokens,output_tokens,concurrency,max_num_seqs,tpot_ms"


def test_a_row_s_command_says_what_served_it(tmp_path: Path) -> None:
    rows = "a,h100_sxm,vllm serve llama-3.1-8b -tp 2 --max-num-seqs 64,1024,256,16,,8\n"
    rows += 'b,h200_sxm,"sglang serve --model-path qwen3-8b --tp 4",1024,256,16,32,8'
    one, other = read_table(table_of(tmp_path, COMMANDS, rows))
    assert one.scenario is not None
    assert one.scenario.model == "llama-3.1-8b"
    assert one.scenario.deployment.parallelism.tp == 2
    assert one.scenario.deployment.engine.max_num_seqs == 64
    assert other.scenario is not None
    assert other.scenario.deployment.engine.name == "sglang"
    assert other.scenario.deployment.engine.max_num_seqs == 32
    with pytest.raises(InputError, match="row 1: device is empty"):
        read_table(table_of(tmp_path, COMMANDS, rows.replace("h100_sxm", "")))


def test_one_command_may_stand_for_all_files(tmp_path: Path) -> None:
    table = table_of(tmp_path, "id,input_tokens,output_tokens,concurrency,tpot_ms", "a,1024,256,16,8")
    result = tmp_path / "result.json"
    result.write_text(json.dumps(VLLM), encoding="utf-8")
    server = read_launch_command("vllm serve llama-3.1-8b -tp 2 --max-num-seqs 64").raw
    for run in read_measurements([table, result], {"device": "h100_sxm", "tp": 4}, server):
        assert run.scenario is not None
        assert run.scenario.model == "llama-3.1-8b"
        assert run.scenario.deployment.device == "h100_sxm"
        assert run.scenario.deployment.parallelism.tp == 4
        assert run.scenario.deployment.engine.max_num_seqs == 64
    with pytest.raises(InputError, match="no column 'model'"):
        read_measurements([table], {"device": "h100_sxm"})
    training = tmp_path / "training.csv"
    training.write_text("model,accelerator,n_gpus,gbs\nllama-3.1-8b,h100_sxm,8,8\n")
    with pytest.raises(InputError, match=r"training\.csv holds training runs, which --from-command cannot describe"):
        read_measurements([training], {}, server)


def test_what_is_said_twice_or_of_another_model_is_refused(tmp_path: Path) -> None:
    table = table_of(
        tmp_path, "model,device,tp,input_tokens,output_tokens,concurrency,tpot_ms", "qwen3-8b,l4,1,9,9,1,8"
    )
    with pytest.raises(InputError, match=r"has a column 'tp', and --tp is given too"):
        read_measurements([table], {"tp": 2})
    (run,) = read_measurements([table], {"engine": "sglang"})
    assert run.scenario is not None
    assert run.scenario.deployment.engine.name == "sglang"
    server = read_launch_command("vllm serve qwen3-8b").raw
    commands = table_of(tmp_path, COMMANDS, "a,h100_sxm,vllm serve llama-3.1-8b,1024,256,16,,8")
    with pytest.raises(InputError, match=r"has a column 'command', and --from-command is given too"):
        read_measurements([commands], {}, server)
    commands = table_of(
        tmp_path, "command,input_tokens,output_tokens,concurrency,tpot_ms", "vllm serve qwen3-8b,9,9,1,8"
    )
    (run,) = read_measurements([commands], {"device": "l4"})
    assert run.scenario is not None
    assert (run.scenario.model, run.scenario.deployment.device) == ("qwen3-8b", "l4")
    training = tmp_path / "training.csv"
    training.write_text("model,accelerator,n_gpus,gbs\nllama-3.1-8b,h100_sxm,8,8\n")
    with pytest.raises(InputError, match=r"training\.csv holds training runs, which --tp cannot describe"):
        read_measurements([training], {"tp": 8})
    result = tmp_path / "result.json"
    result.write_text(json.dumps(VLLM), encoding="utf-8")
    with pytest.raises(
        InputError, match=r"requests to meta-llama/Llama-3.1-8B, and Qwen/Qwen3-8B is said to have served"
    ):
        read_measurements([result], {"device": "h100_sxm"}, server)
    result.write_text(json.dumps(VLLM | {"model_id": "meta-llama/Llama-3.1-8B-Instruct"}), encoding="utf-8")
    (run,) = read_measurements([result], {"device": "h100_sxm", "model": "llama-3.1-8b"})  # of the same shape
    assert run.scenario is not None
    result.write_text(json.dumps(VLLM | {"model_id": "prod"}), encoding="utf-8")
    with pytest.raises(InputError, match=r"served it \('prod' is the server's name for it\): --model is missing"):
        read_measurements([result], {"device": "h100_sxm"})


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("echo hello", "runs.csv row 1: command: 'echo hello' starts no server that is known"),
        ("vllm serve llama-3.1-8b --kv-cash-dtype fp8", "runs.csv row 1: command: --kv-cash-dtype is not known"),
    ],
)
def test_a_command_that_cannot_be_read_names_its_row(command: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        read_table(table_of(tmp_path, COMMANDS, f"a,h100_sxm,{command},1024,256,16,,8"))


def test_columns_are_read_as_people_name_them(tmp_path: Path) -> None:
    head = "Model,GPU,Framework,Tensor Parallel,Input Length,Output Length,Concurrency,Mean TTFT (s),Mean TPOT (ms)"
    path = tmp_path / "own.csv"
    path.write_text(f"{head}\nllama-3.1-8b,h100_sxm,vllm,2,1024,256,16,0.06,9.5\n")
    (run,) = read_measurements([path], {})
    assert run.scenario is not None
    assert (run.scenario.deployment.parallelism.tp, run.labels["engine"]) == (2, "vllm")
    assert run.measured == {"ttft": pytest.approx(0.06), "tpot": pytest.approx(0.0095)}
    path.write_text(
        f"{head.replace('Mean TPOT (ms)', 'power_kw')}\nllama-3.1-8b,h100_sxm,vllm,2,1024,256,16,0.06,1.3\n"
    )
    assert read_measurements([path], {})[0].measured["power"] == pytest.approx(1300)
    own = "num_prompts,Output token throughput (tok/s),Maximum request concurrency"  # of `vllm bench serve`
    path.write_text(f"Model,GPU,ISL,OSL,{own}\nllama-3.1-8b,h100_sxm,1024,256,160,1500,16\n")
    (run,) = read_measurements([path], {})
    assert run.scenario is not None
    assert (run.scenario.workload.num_requests, run.measured) == (160, {"throughput": 1500.0})
    path.write_text(
        f"{head}\nllama-3.1-8b,h100_sxm,vllm,2,1024,256,16,0.06,9.5\n".replace("Mean TTFT (s)", "Mean TTFT")
    )
    with pytest.raises(InputError, match="column 'Mean TTFT'") as error:  # seconds or milliseconds?
        read_measurements([path], {})
    assert error.value.hint is not None
    assert "rename Mean TTFT -> ttft_ms (_ms: milliseconds)" in error.value.hint
    path.write_text(path.read_text().replace("Mean TTFT", "TTFT_s"))
    with pytest.raises(InputError, match="column 'device', and --device is given too"):
        read_measurements([path], {"device": "h100_sxm"})
