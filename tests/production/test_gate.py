"""Gates on predicted changes and on measured runs."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import windtunnel as wt
from windtunnel.calibration.measured_runs import Measurement
from windtunnel.calibration.validate import RunPrediction
from windtunnel.errors import InputError
from windtunnel.formats.clients.read import ClientResult
from windtunnel.metrics.limits import parse_limits
from windtunnel.metrics.uncertainty import Interval
from windtunnel.production.gate import (
    SURE,
    Gate,
    gate_change,
    gate_measured,
    gate_predicted,
    predicted_ratios,
    sampling_error,
)
from windtunnel.report.gate import gate_report, verdict
from windtunnel.report.report import Table
from windtunnel.serving.results import Result
from windtunnel.serving.scenario import changed_settings


def simulated(**options: Any) -> Result:
    known = {"model": "qwen2.5-0.5b", "device": "h100_sxm", "rate_per_s": 20.0, "num_requests": 60}
    return wt.simulate(wt.scenario(**{**known, "input_tokens": 256, "output_tokens": 32, **options}))


def client_result(name: str, **measured: float) -> ClientResult:
    return ClientResult(name, "vllm", 1024, 128, 100, 8, None, measured)


def failed(gate: Gate) -> list[str]:
    return [check.name for check in gate.checks if not check.holds]


def test_a_change_that_changes_nothing_passes_with_equal_figures() -> None:
    gate = gate_change(simulated(), simulated(tp=1), parse_limits("ttft_p90=1s"))
    assert gate.passes
    assert all(check.before == check.after for check in gate.checks)
    assert gate.remarks == ["changed: nothing"]


def test_a_default_that_is_written_out_changes_nothing() -> None:
    gate = gate_change(simulated(), simulated(engine="vllm"), parse_limits("ttft_p90=1s"))
    assert gate.remarks == ["changed: nothing"]
    names = [{"model": "llama-3.1-8b"}, {"model": "meta-llama/Llama-3.1-8B"}, {"model": "qwen3-8b"}]
    assert changed_settings(names[:2]) == {}
    assert changed_settings(names[1:]) == {"model": ["meta-llama/Llama-3.1-8B", "qwen3-8b"]}


def test_a_check_says_whether_it_is_of_the_slo() -> None:
    report = gate_report(gate_change(simulated(), simulated(), parse_limits("ttft_p90=1s")))
    assert isinstance(table := report.sections[0].blocks[0], Table)
    assert [row[0] for row in table.rows][:2] == ["TTFT p90 (SLO)", "TTFT p90"]


def test_a_change_that_makes_requests_wait_fails_and_names_the_setting() -> None:
    gate = gate_change(simulated(), simulated(max_num_seqs=1), ())
    assert "ttft_p90" in failed(gate)
    assert "engine.max_num_seqs" in gate.remarks[0]


def test_a_default_is_named_with_its_value_and_what_follows_is_named() -> None:
    remark = gate_change(simulated(), simulated(tp=2), ()).remarks[0]
    assert re.fullmatch(
        r"changed: parallelism\.tp 1 \(the default\) -> 2; what follows: engine\.num_gpu_blocks, .+", remark
    ), remark


def test_a_length_that_is_left_out_is_the_models_and_not_that_of_the_requests() -> None:
    given = {"deployment.engine.max_model_len": 4096}
    remark = gate_change(simulated(settings=given), simulated(), ()).remarks[0]
    assert remark == "changed: engine.max_model_len 4096 -> 32768"


@pytest.mark.full
def test_graphs_that_are_turned_off_follow_from_nothing() -> None:
    remark = gate_change(
        simulated(), simulated(settings={"deployment.engine.max_cudagraph_capture_size": 0}), ()
    ).remarks[0]
    assert re.match(r"changed: engine\.max_cudagraph_capture_size \d+ -> 0(;|$)", remark), remark


def test_a_server_that_would_not_start_fails_whatever_holds() -> None:
    gate = replace(gate_change(simulated(), simulated(), parse_limits("ttft_p90=1s")), not_starting=["it is too long"])
    assert not gate.passes
    assert verdict(gate) == "Fails: it is too long."
    assert gate_report(gate).is_good is False
    slow = replace(gate_change(simulated(), simulated(max_num_seqs=1), ()), not_starting=["it is too long"])
    assert re.match(r"Fails: it is too long\. Were it to start, \d checks would fail\.", verdict(slow))


def test_the_devices_of_all_pools_are_named() -> None:
    pools = [{"name": "p", "role": "prefill"}, {"name": "d", "role": "decode", "device": "h200_sxm"}]
    gate = gate_change(None, simulated(settings={"deployment.pools": pools}), parse_limits("ttft_p90=1s"))
    assert gate.title.startswith("qwen2.5-0.5b on h100_sxm and h200_sxm, vllm 0.")


def test_a_limit_is_of_the_changed_deployment_alone() -> None:
    before, after = simulated(max_num_seqs=1), simulated()
    limits = parse_limits("ttft_p90=100ms")
    assert gate_change(before, after, limits, {}).passes
    assert failed(gate_change(after, before, limits, {})) == ["ttft_p90"]


def test_a_figure_that_a_run_lacks_is_refused_where_it_was_asked_for() -> None:
    one_token = simulated(output_tokens=1)
    assert gate_change(one_token, one_token, ()).passes
    with pytest.raises(InputError, match="tpot_p90 is not known of both"):
        gate_change(one_token, one_token, (), {"tpot_p90": 0.1})


def test_nothing_to_check_is_refused() -> None:
    with pytest.raises(InputError, match="nothing to check"):
        gate_change(None, simulated(), ())


def test_three_repeats_show_a_regression_of_five_percent_and_one_does_not() -> None:
    def runs(*tpot: float) -> list[ClientResult]:
        return [client_result(f"run {number}", tpot=value) for number, value in enumerate(tpot)]

    assert failed(gate_measured(runs(0.0100, 0.01003, 0.00998), runs(0.0105, 0.01053, 0.01048))) == ["tpot"]
    single = gate_measured(runs(0.0100), runs(0.0105))
    assert single.passes
    assert "so few repeats show only changes above" in " ".join(single.remarks)


def test_throughput_that_falls_fails_and_one_that_rises_passes() -> None:
    def runs(scale: float) -> list[ClientResult]:
        return [client_result(str(number), throughput=scale * value) for number, value in enumerate((100, 100.2, 99.9))]

    assert failed(gate_measured(runs(1.0), runs(0.93))) == ["throughput"]
    assert gate_measured(runs(1.0), runs(1.07)).passes


def test_a_metric_that_one_side_lacks_is_named() -> None:
    gate = gate_measured([client_result("old", tpot=0.01, ttft=0.1)], [client_result("new", ttft=0.1)])
    assert gate.passes
    assert "tpot is not compared: one side lacks it" in gate.remarks


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"concurrency": 16}, "different loads: 16 at once and 8 at once"),
        ({"output_tokens": 256}, "output_tokens of new are 256"),
    ],
)
def test_runs_of_another_load_are_refused(change: dict[str, Any], match: str) -> None:
    old = client_result("old", tpot=0.01)
    with pytest.raises(InputError, match=match):
        gate_measured([old], [replace(old, id="new", **change)])


def test_another_model_client_or_engine_is_named() -> None:
    old = replace(client_result("old", tpot=0.01), model="a")
    gate = gate_measured([old], [replace(old, id="new", model="b", client="aiperf", engine="sglang")])
    assert [line for line in gate.remarks if "another" in line] == [
        "the client is another one: aiperf, and vllm before",
        "the model is another one: b, and a before",
    ]


def prediction(**predicted: float) -> RunPrediction:
    return RunPrediction(Measurement("run", None, "", dict(predicted), {}), "", predicted, {}, "vllm", {})


def test_a_measured_change_must_be_as_large_as_the_predicted_one() -> None:
    ratios = predicted_ratios([prediction(tpot=0.02, throughput=100.0)], [prediction(tpot=0.012, throughput=160.0)])
    assert ratios == pytest.approx({"tpot": 0.6, "throughput": 1.6})

    def runs(tpot: float, throughput: float) -> list[ClientResult]:
        scales = enumerate((1, 1.002, 0.999))
        return [client_result(str(i), tpot=tpot * x, throughput=throughput * x) for i, x in scales]

    before = runs(0.010, 200.0)
    gate = gate_measured(before, runs(0.0061, 315.0), None, ratios)
    assert gate.passes
    assert {check.rule for check in gate.checks} == {"expected"}
    assert [check.expected for check in gate.checks] == pytest.approx([0.006, 320.0])
    unchanged = gate_measured(before, runs(0.0101, 198.0), None, ratios)
    assert failed(unchanged) == ["tpot", "throughput"]
    assert (
        "TPOT mean is 10.1 ms; the change should make it 6.00 ms, from 10.0 ms, at most"
        in gate_report(unchanged).verdict
    )
    assert gate_measured(before, runs(0.0101, 198.0)).passes


def test_a_percentile_must_change_as_predicted() -> None:
    predicted = [replace(prediction(tpot=0.02), percentiles={"tpot_p99": p99_s}) for p99_s in (0.03, 0.015)]
    ratios = predicted_ratios(predicted[:1], predicted[1:])
    assert ratios == pytest.approx({"tpot": 1.0, "tpot_p99": 0.5})

    def runs(p99_s: float, name: str = "tpot_p99") -> list[ClientResult]:
        known = {"tpot_p50": 0.01, name: p99_s}
        return [replace(client_result(str(i), tpot=0.01), percentiles=known) for i in range(5)]

    assert gate_measured(runs(0.02), runs(0.0101), {"tpot_p99": 0.05}, ratios).passes
    gate = gate_measured(runs(0.02), runs(0.02), {"tpot_p99": 0.05}, ratios)
    assert failed(gate) == ["tpot_p99"]
    assert [check.expected for check in gate.checks] == pytest.approx([0.01])
    with pytest.raises(InputError, match="tpot_p75 is not compared: the prediction lacks it"):
        gate_measured(runs(0.02, "tpot_p75"), runs(0.02, "tpot_p75"), {"tpot_p75": 0.05}, ratios)


def test_a_run_is_outside_its_prediction_beyond_the_interval_of_99_percent() -> None:
    def gate(tpot: float) -> Gate:
        measurement = Measurement("run", None, "", {"tpot": tpot}, {})
        prediction = RunPrediction(measurement, "", {"tpot": 0.01}, {"tpot": Interval(0.009, 0.011)}, "vllm", {})
        return gate_predicted([prediction])

    most = 0.01 * (0.011 / 0.01) ** SURE
    assert 0.0115 < most < 0.0125
    assert gate(most * 0.999).passes
    assert failed(gate(most * 1.001)) == ["tpot"]


def test_more_failed_requests_than_chance_explains_fail() -> None:
    def gate(before: int, after: int) -> Gate:
        runs = [replace(client_result(f"r{each}", tpot=0.01), num_failed=each) for each in (before, after)]
        return gate_measured(runs[:1], runs[1:])

    assert len(gate(0, 0).checks) == 1
    assert failed(gate(0, 9)) == []
    assert failed(gate(0, 60)) == ["failed"]
    assert failed(gate(60, 60)) == failed(gate(60, 0)) == []
    assert verdict(gate(0, 60)) == "Fails: 37.50% of the requests failed, 0.00% before; at most 8.12% is chance."
    measurement = Measurement("run", None, "", {"tpot": 0.01}, {})
    prediction = RunPrediction(measurement, "", {"tpot": 0.01}, {"tpot": Interval(0.009, 0.011)}, "vllm", {})
    predicted = gate_predicted([prediction], [replace(client_result("run", tpot=0.01), num_failed=60)])
    assert "37.50% of the requests failed, 0.00% predicted" in verdict(predicted)


def test_a_value_just_above_its_limit_is_not_said_to_be_it() -> None:
    after = simulated()
    limit = replace(parse_limits("ttft_p90=1s")[0], most_s=float(np.quantile(after.requests["ttft_s"], 0.9)) * 0.99999)
    sentence = verdict(gate_change(None, after, [limit], {}))
    assert sentence.startswith("Fails: TTFT p90 is just above "), sentence


def test_percentiles_of_measured_runs_are_compared_where_they_are_asked_for() -> None:
    def runs(p99_s: float) -> list[ClientResult]:
        means = [(0.0400, p99_s), (0.0402, 1.02 * p99_s), (0.0399, 0.99 * p99_s)]
        known = [client_result(str(number), ttft=mean) for number, (mean, _) in enumerate(means)]
        return [
            replace(run, percentiles={"ttft_p50": 0.038, "ttft_p99": tail})
            for run, (_, tail) in zip(known, means, strict=True)
        ]

    assert gate_measured(runs(0.06), runs(0.12)).passes  # the means are equal
    gate = gate_measured(runs(0.06), runs(0.12), {"ttft_p99": 0.05})
    assert failed(gate) == ["ttft_p99"]
    assert verdict(gate).startswith("Fails: TTFT p99 is 2 times what it was, from 60.0 ms to 120 ms; at most ")
    assert gate_measured(runs(0.06), runs(0.063), {"ttft_p99": 0.05}).passes
    with pytest.raises(InputError, match="the runs do not tell tpot_p99"):
        gate_measured(runs(0.06), runs(0.06), {"tpot_p99": 0.05})


def test_the_noise_of_a_percentile_is_that_of_a_sample_of_its_requests() -> None:
    draws = np.exp(0.3 * np.random.default_rng(0).standard_normal((2000, 100)))
    values = {"ttft_p50": 1.0, "ttft_p90": float(np.exp(0.3 * 1.2816))}
    run = replace(client_result("run", ttft=1.046), percentiles=values)
    for name, share in (("ttft_p90", 90), ("ttft_p50", 50)):
        seen = np.log(np.percentile(draws, share, axis=1)).std()
        assert sampling_error(name, run) == pytest.approx(seen, rel=0.1)
