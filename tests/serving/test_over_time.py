from typing import Any

import msgspec
import numpy as np
import pytest

import windtunnel as wt
from windtunnel.errors import InputError
from windtunnel.model.launches.forward import StepBatch, forward_launches
from windtunnel.schema import plain
from windtunnel.serving.analysis.device_use import step_work
from windtunnel.serving.over_time import integral, over_time
from windtunnel.serving.setup.estimators import shard_of

RUNS: dict[str, dict[str, Any]] = {
    "one": {"model": "meta-llama/Llama-3.1-8B", "rate_per_s": 3},
    "pipeline": {"model": "meta-llama/Llama-3.1-8B", "rate_per_s": 20, "pp": 2, "replicas": 2},
    "experts": {"model": "Qwen/Qwen3-30B-A3B", "concurrency": 32, "attention_dp": 2, "ep": 2},
}


@pytest.fixture(scope="module", params=RUNS.values(), ids=RUNS)
def result(request: pytest.FixtureRequest) -> wt.Result:
    common = {"device": "h100_sxm", "input_tokens": 700, "output_tokens": 50, "num_requests": 200}
    return wt.simulate(wt.scenario(**common, **request.param))


def test_means_over_time_are_those_of_the_summary(result: wt.Result) -> None:
    series, use = over_time(result, 37), result.summary.utilisation
    assert len(series) == 37
    share = series["duration_s"] / series["duration_s"].sum()
    for column, whole in (
        ("busy_fraction", use.busy_fraction),
        ("kv_fraction", use.kv_mean_fraction),
        ("num_present", use.mean_present),
    ):
        assert float((series[column] * share).sum()) == pytest.approx(whole, rel=1e-9), column
    requests = result.requests
    for column, whole in (
        ("sent_per_s", len(requests)),
        ("finished_per_s", len(requests)),
        ("output_tokens_per_s", requests["output_tokens"].sum()),
        ("prompt_tokens_per_s", requests["input_tokens"].sum()),
    ):
        assert float((series[column] * series["duration_s"]).sum()) == pytest.approx(whole, rel=1e-9), column
    stages, num_stages = result.summary.stages, result.setup.parallelism.pp
    assert plain(result.summary)["stages"] == [msgspec.structs.asdict(stage) for stage in stages]
    assert len(stages) == num_stages
    mfu = float((series["mfu_fraction"] * share).sum())
    assert mfu == pytest.approx(sum(stage.mfu_fraction for stage in stages) / num_stages, rel=1e-9)
    power = result.summary.power
    assert power is not None
    assert float((series["power_w"] * series["duration_s"]).sum()) == pytest.approx(power.energy_j, rel=1e-9)


def test_no_step_is_faster_than_the_published_peaks(result: wt.Result) -> None:
    work = step_work(result.setup.device, shard_of(result.setup), result.steps)
    ideal_s = np.maximum(work.body_compute_s + work.head_compute_s, work.body_memory_s + work.head_memory_s)
    assert np.all(ideal_s <= result.steps["duration_s"] * result.setup.parallelism.pp)
    assert all(0 < stage.busy_mfu_fraction < 1 and 0 < stage.busy_mbu_fraction < 1 for stage in result.summary.stages)


def test_flops_of_a_llama_step_are_twice_its_parameters_per_token() -> None:
    """Llama-3.1-8B: 6.98 G parameters in layers, 0.53 G in the head; attention adds 4 x 4096 x 32 FLOPs a pair."""
    scenario = wt.scenario(
        model="meta-llama/Llama-3.1-8B", device="h100_sxm", rate_per_s=1, input_tokens=512, output_tokens=1,
        num_requests=1,
    )  # fmt: skip
    result = wt.simulate(scenario)
    work = step_work(result.setup.device, shard_of(result.setup), result.steps)
    flops = (work.body_compute_s.sum() + work.head_compute_s.sum()) * result.setup.device.peak_flops_per_s["bf16"]
    expected = 2 * 6.9793e9 * 512 + 4 * 4096 * 32 * 512**2 / 2 + 2 * 128256 * 4096
    assert flops == pytest.approx(expected, rel=0.01)
    batch = StepBatch(prefill_tokens=512, prefill_pairs=512**2 / 2, sampled=1)
    launches = forward_launches(shard_of(result.setup), batch)
    assert flops == pytest.approx(sum(float(np.sum(it.op.flops)) * it.count for it in launches), rel=1e-6)


def test_an_integral_of_pieces() -> None:
    begin, end, value = np.array([0.0, 1.0, 4.0]), np.array([2.0, 3.0, 5.0]), np.array([1.0, 10.0, 2.0])
    found = integral(np.array([-1.0, 0.5, 1.5, 3.5, 4.5, 9.0]), begin, end, value)
    assert list(found) == pytest.approx([0, 0.5, 6.5, 22, 23, 24])


def test_no_stretch_is_refused(result: wt.Result) -> None:
    with pytest.raises(InputError, match="num_stretches is 0"):
        over_time(result, 0)


def test_pools_are_added_up() -> None:
    pools = [{"name": "prefill", "role": "prefill", "replicas": 1}, {"name": "decode", "role": "decode", "replicas": 2}]
    scenario = wt.scenario(
        model="meta-llama/Llama-3.1-8B", device="h100_sxm", rate_per_s=6, input_tokens=700, output_tokens=30,
        num_requests=60, settings={"deployment.pools": pools},
    )  # fmt: skip
    result = wt.simulate(scenario)
    series = over_time(result, 11)
    assert np.all((series["busy_fraction"] >= 0) & (series["busy_fraction"] <= 1 + 1e-9))
    busy_s = float((series["busy_fraction"] * series["duration_s"]).sum()) * 3
    assert busy_s == pytest.approx(float(result.steps["duration_s"].sum()), rel=1e-9)
    assert result.summary.power is not None
    energy_j = float((series["power_w"] * series["duration_s"]).sum())
    assert energy_j == pytest.approx(result.summary.power.energy_j, rel=0.01)


def test_attention_and_experts_apart_draw_as_much_over_time_as_in_all() -> None:
    ffn = {"tp": 1, "attention_dp": 2, "ffn": {"devices": 2, "microbatches": 2}}
    pools = [{"name": "prefill", "role": "prefill"}, {"name": "decode", "role": "decode", "parallelism": ffn}]
    scenario = wt.scenario(
        model="Qwen/Qwen3-30B-A3B", device="h100_sxm", rate_per_s=6, input_tokens=300, output_tokens=30,
        num_requests=30, settings={"deployment.pools": pools},
    )  # fmt: skip
    result = wt.simulate(scenario)
    series = over_time(result, 11)
    assert result.summary.power is not None
    energy_j = float((series["power_w"] * series["duration_s"]).sum())
    assert energy_j == pytest.approx(result.summary.power.energy_j, rel=1e-9)
