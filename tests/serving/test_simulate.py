from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serving.pool_of_one import run_pool
from windtunnel import catalog
from windtunnel.errors import InputError, WindtunnelError
from windtunnel.metrics.records import REQUEST_COLUMNS, STEP_COLUMNS, Table
from windtunnel.model.operators import Op
from windtunnel.pricing.estimator import COVERAGES, Coverage, Estimate
from windtunnel.schema import save
from windtunnel.serving.analysis.attribution import batch_of, provenance
from windtunnel.serving.prepared import check_requests, prepare
from windtunnel.serving.results import Result
from windtunnel.serving.run import Loop, LoopRun
from windtunnel.serving.scenario import Scenario, load, resolve
from windtunnel.serving.setup.estimators import shard_of
from windtunnel.serving.setup.fleet_plan import FleetPlan, start_fleet
from windtunnel.serving.setup.kernel_settings import kernel_settings
from windtunnel.serving.setup.memory import plan_memory
from windtunnel.serving.shorthand import scenario
from windtunnel.serving.simulate import simulate
from windtunnel.serving.state.fleet import Scaling
from windtunnel.serving.state.records import played_back
from windtunnel.workload.generate.requests import RequestArrays, generate

LLAMA, MOE = "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-30B-A3B"


class PlainRoofline:
    """A launch of a microsecond and the work at 500 TFLOP/s and 3 TB/s: cheap, and the same rates for every shape."""

    def estimate(self, op: Op) -> Estimate:
        seconds = 1e-6 + np.asarray(op.flops) / 5e14 + np.asarray(op.num_bytes) / 3e12
        return Estimate(seconds, Coverage.ROOFLINE, "plain", 0.0)


def made(**changes: Any) -> Scenario:
    options: dict[str, Any] = {
        "model": LLAMA,
        "device": "h100_sxm",
        "input_tokens": {"type": "uniform", "min_tokens": 100, "max_tokens": 400},
        "output_tokens": {"type": "uniform", "min_tokens": 1, "max_tokens": 60},
        "num_requests": 60,
    }
    if not {"concurrency", "rate_per_s", "trace"} & set(changes):
        options["rate_per_s"] = 50.0
    return scenario(**options | changes)


def served(**changes: Any) -> Result:
    return simulate(made(**changes), PlainRoofline())


def as_bytes(result: Result) -> bytes:
    tables = (result.requests, result.steps)
    return b"".join(np.ascontiguousarray(table[name]).tobytes() for table in tables for name in table.columns)


def refused(**changes: Any) -> str:
    with pytest.raises(InputError) as caught:
        served(**changes)
    return caught.value.message


# Determinism


def test_the_same_seed_gives_the_same_bytes_and_another_does_not() -> None:
    """Invariant 8."""
    first, again, other = served(seed=3), served(seed=3), served(seed=4)
    assert as_bytes(first) == as_bytes(again)
    assert first.summary == again.summary
    assert as_bytes(first) != as_bytes(other)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model": "deepseek-ai/DeepSeek-V2-Lite", "kv_cache_dtype": "fp8", "engine": "sglang"},
        {"model": "mistralai/Mistral-7B-v0.1", "input_tokens": 5000, "num_requests": 5},
        {"concurrency": 4, "settings": {"workload.arrivals.num_warmup_requests": 3}},
        {"model": "deepseek-ai/DeepSeek-V3", "quant": "bf16", "device": "b300_sxm", "tp": 8},
    ],
    ids=["plain", "formats", "windows", "closed loop", "bf16 of an fp8 checkpoint"],
)
def test_the_resolved_scenario_gives_the_same_run(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Invariant 9."""
    first = served(**changes)
    save(first.scenario, tmp_path / "scenario.yaml")
    again = simulate(load(tmp_path / "scenario.yaml"), PlainRoofline())
    assert again.scenario == first.scenario
    assert as_bytes(again) == as_bytes(first)
    assert again.memory.num_blocks == first.memory.num_blocks


def test_a_model_file_stays_named_in_the_resolved_scenario(tmp_path: Path) -> None:
    config = catalog.find("models", LLAMA).read_text()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(config)
    result = served(model=str(tmp_path / "mine"))
    assert result.setup.model.name == "mine"
    assert simulate(result.scenario, PlainRoofline()).summary == result.summary


# What happens to the requests


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
@pytest.mark.parametrize("load", [{"rate_per_s": 30.0}, {"concurrency": 8}], ids=["open", "closed"])
def test_every_engine_serves_every_request(engine: str, load: dict[str, Any]) -> None:
    result = served(engine=engine, **load)
    requests, steps = result.requests, result.steps
    assert list(requests.columns) == list(REQUEST_COLUMNS)
    assert list(steps.columns) == list(STEP_COLUMNS)
    assert len(requests) == result.summary.num_requests == 60
    assert np.isfinite(requests["finish_s"]).all()
    assert (requests["arrival_s"] <= requests["scheduled_s"]).all()
    assert (requests["scheduled_s"] < requests["first_token_s"]).all()
    assert (requests["first_token_s"] <= requests["finish_s"]).all()
    decoded = (steps["decode_tokens"] * steps["num_steps"]).sum() + steps["resumed_tokens"].sum()
    assert decoded == (requests["output_tokens"] - 1).sum()
    assert sum(result.summary.time_fractions.values()) == pytest.approx(1)
    assert min(result.summary.time_fractions.values()) >= 0


def test_the_frontend_is_part_of_the_clients_latency() -> None:
    quick = served(settings={"deployment.engine.host.first_token_s": 0.0})
    slow = served(settings={"deployment.engine.host.first_token_s": "50ms"})
    assert slow.summary.ttft_s.mean - quick.summary.ttft_s.mean == pytest.approx(0.05)
    assert slow.summary.tpot_s == quick.summary.tpot_s


def test_a_client_adds_its_own_time_and_thinks_before_it_sends_again() -> None:
    def run(**client: float) -> Result:
        times = {"first_token_s": 0.0, "stream_s": 0.0, "prompt_token_s": 0.0, **client}
        return served(concurrency=1, num_requests=3, settings={"workload.client": times})

    quick, slow, idle = run(), run(first_token_s=0.05), run(think_s=2.0)
    assert slow.summary.ttft_s.mean - quick.summary.ttft_s.mean == pytest.approx(0.05)
    assert slow.summary.e2e_s.mean - quick.summary.e2e_s.mean == pytest.approx(0.05)
    assert idle.summary.ttft_s.mean == pytest.approx(quick.summary.ttft_s.mean)
    assert np.diff(idle.requests["arrival_s"]) - np.diff(quick.requests["arrival_s"]) == pytest.approx(2.0)


def test_host_work_lengthens_steps_where_it_does_not_overlap() -> None:
    def tpot_s(step_s: float, overlaps: bool) -> float:
        host = {"step_s": step_s, "request_s": 0.0, "first_token_s": 0.0}
        engine = {"deployment.engine.host": host, "deployment.engine.async_scheduling": overlaps}
        found = served(concurrency=1, num_requests=3, output_tokens=50, settings=engine).summary.tpot_s
        assert found is not None
        return found.mean

    assert tpot_s(2e-3, False) - tpot_s(0.0, False) == pytest.approx(2e-3)
    assert tpot_s(2e-3, True) == pytest.approx(tpot_s(0.0, True))
    assert tpot_s(1.0, True) == pytest.approx(1.0)


def test_warm_up_requests_are_sent_and_not_counted() -> None:
    result = served(concurrency=4, settings={"workload.arrivals.num_warmup_requests": 10})
    assert (len(result.requests), result.summary.num_requests) == (70, 60)
    assert result.requests["is_warmup"].sum() == 10
    warm, rest = (result.requests.where(rows) for rows in (result.requests["is_warmup"], ~result.requests["is_warmup"]))
    assert rest["arrival_s"].min() >= warm["finish_s"].max()


def test_replicas_share_the_load() -> None:
    one, two = served(rate_per_s=500.0), served(rate_per_s=500.0, replicas=2)
    assert np.bincount(two.requests["replica"]).tolist() == [30, 30]
    assert two.summary.num_devices == 2 * one.summary.num_devices
    assert two.summary.ttft_s.mean < one.summary.ttft_s.mean
    assert two.summary.cost is not None
    assert one.summary.cost is not None
    assert two.summary.cost.usd_per_hour == pytest.approx(2 * one.summary.cost.usd_per_hour)


def test_attention_data_parallel_ranks_have_pools_of_their_own() -> None:
    result = served(model=MOE, attention_dp=4, ep=4, rate_per_s=500.0)
    assert result.summary.num_devices == 4
    assert set(result.requests["replica"].tolist()) == {0}
    assert result.steps["num_running"].max() > 4
    assert 0 < result.summary.utilisation.kv_peak_fraction <= 1
    assert sum(result.summary.time_fractions.values()) == pytest.approx(1)


def test_a_short_cache_preempts_and_says_so() -> None:
    short = {"deployment.engine.num_gpu_blocks": 60}
    result = served(rate_per_s=1000.0, input_tokens=100, output_tokens=100, settings=short)
    assert result.summary.utilisation.num_preemptions > 0
    assert result.summary.bound_by == "kv_capacity"
    assert result.summary.utilisation.kv_peak_fraction > 0.95
    assert served().summary.utilisation.num_preemptions == 0


def test_more_devices_are_faster_and_communicate() -> None:
    one, four = served(concurrency=8), served(concurrency=8, tp=4)
    assert four.summary.tpot_s is not None
    assert one.summary.tpot_s is not None
    assert four.summary.tpot_s.mean < one.summary.tpot_s.mean
    assert one.summary.time_fractions["communication"] == 0
    assert four.summary.time_fractions["communication"] > 0


def test_a_lone_request_passes_all_stages_of_a_pipeline_as_it_passes_one() -> None:
    """Half the layers on each of two devices: the same work, one send more; with many requests the stages overlap."""
    alone = {pp: served(concurrency=1, num_requests=4, output_tokens=50, pp=pp).summary.tpot_s for pp in (1, 2)}
    assert alone[1] is not None
    assert alone[2] is not None
    assert alone[1].mean < alone[2].mean < 1.02 * alone[1].mean
    many = {pp: served(concurrency=64, num_requests=640, output_tokens=50, pp=pp).summary for pp in (1, 2)}
    faster = many[2].throughput.output_tokens_per_s / many[1].throughput.output_tokens_per_s
    assert 1.0 < faster < 2.0
    assert many[2].num_devices == 2


def test_progress_ends_at_all() -> None:
    calls: list[tuple[int, int]] = []
    simulate(made(), PlainRoofline(), progress=lambda finished, total: calls.append((finished, total)))
    assert calls[-1] == (60, 60)


# Measured operators


def test_a_run_is_shown_in_a_line() -> None:
    shown = repr(served())
    assert shown.startswith(f"Result({LLAMA} on 1 x h100_sxm: 60 requests, mean TTFT ")
    assert len(shown) < 250


def test_a_run_says_what_its_times_come_from() -> None:
    result = simulate(made(concurrency=8))
    assert sum(result.coverage.values()) == pytest.approx(1)
    assert sum(result.sources.values()) == pytest.approx(1)
    assert set(result.coverage) <= set(COVERAGES)
    assert result.coverage.get(Coverage.ROOFLINE, 0.0) < 0.5
    assert any("h100" in source for source in result.sources)


def test_operators_shares_of_a_run_weigh_its_steps_by_their_time() -> None:
    """Half of the time in long steps with prompts, half in short ones without: the mean of what each kind spends."""
    setup = resolve(made())
    shard = shard_of(setup)
    columns: dict[str, list[float]] = {
        "duration_s": [0.1, *[0.01] * 10],
        "decode_tokens": [0, *[8] * 10],
        "context_tokens": [0, *[8_000] * 10],
        "prefill_tokens": [8_000, *[0] * 10],
        "prefill_pairs": [8_000 * 4_000.0, *[0] * 10],
        "num_sampled": [2, *[8] * 10],
    }
    steps = Table({name: np.array(values) for name, values in columns.items()}, {})

    def shares(rows: Table) -> dict[str, float]:
        return provenance(PlainRoofline(), shard, rows, 1)[2]

    prompts, decodes = (shares(steps.where(steps["decode_tokens"] == count)) for count in (0, 8))
    for name, share in shares(steps).items():
        assert share == pytest.approx((prompts.get(name, 0.0) + decodes.get(name, 0.0)) / 2)


def test_a_device_that_nobody_measured_is_priced_by_the_roofline() -> None:
    result = simulate(made(concurrency=8, device="h800_sxm"))
    if result.setup.device.measured_as is None:
        assert result.coverage == {Coverage.ROOFLINE: pytest.approx(1)}


def test_a_step_row_is_a_batch() -> None:
    result = served(concurrency=8, output_tokens=50)
    steps = result.steps
    row = int(np.argmax(steps["decode_tokens"] * (steps["prefill_tokens"] > 0)))
    batch = batch_of(steps, row)
    assert batch.decode_requests == steps["decode_tokens"][row]
    whole = steps["context_tokens"][row] + steps["decode_tokens"][row]
    assert batch.decode_context_tokens * batch.decode_requests == pytest.approx(whole)
    assert (batch.prefill_tokens, batch.prefill_pairs) == (steps["prefill_tokens"][row], steps["prefill_pairs"][row])


# What cannot be


def test_requests_that_cannot_be_served_are_refused() -> None:
    assert "request 0 has 9,000 input and 10 output tokens; " in refused(
        input_tokens=9000, output_tokens=10, settings={"deployment.engine.max_model_len": 8192}
    )
    assert "accepts 131,072 in all" in refused(input_tokens=131_072, output_tokens=1)
    with pytest.raises(InputError) as caught:
        served(input_tokens=131_072, output_tokens=1)
    assert "or set deployment.engine.max_model_len=131073" in str(caught.value.hint)
    assert "needs 63 blocks of KV cache; 60 of 16 tokens fit" in refused(
        input_tokens=990, output_tokens=10, settings={"deployment.engine.num_gpu_blocks": 60}
    )
    assert "does not fit" in refused(model="meta-llama/Llama-3.1-405B")


@pytest.mark.parametrize(("engine", "fits"), [("vllm", 2048), ("trtllm", 2000)])
def test_without_chunked_prefill_a_request_fits_one_step(engine: str, fits: int) -> None:
    """vLLM prefills a preempted request's outputs too, so that its last step holds 2,047 tokens."""
    settings = {"deployment.engine.enable_chunked_prefill": False}
    options = {"engine": engine, "input_tokens": 2000, "output_tokens": 49, "num_requests": 3, "settings": settings}
    assert "without chunked prefill a step takes" in refused(**options, max_num_batched_tokens=fits - 1)
    assert len(served(**options, max_num_batched_tokens=fits).requests) == 3


def test_a_preempted_request_without_chunked_prefill_ends() -> None:
    settings = {"deployment.engine.enable_chunked_prefill": False, "deployment.engine.num_gpu_blocks": 200}
    options = {"input_tokens": 512, "output_tokens": 128, "rate_per_s": 1000.0, "settings": settings}
    assert "639 if it is preempted" in refused(**options, max_num_batched_tokens=520)
    result = served(**options, max_num_batched_tokens=640)
    assert result.summary.utilisation.num_preemptions > 0


def test_check_requests_names_the_first_that_fails() -> None:
    setup = resolve(made())
    memory = plan_memory(shard_of(setup), setup.device, setup.engine, setup.max_model_len)
    good = RequestArrays(np.zeros(2), np.array([10, 20]), np.array([5, 5]), np.zeros(2, np.int64))
    check_requests(good, setup, memory)
    bad = RequestArrays(np.zeros(2), np.array([10, 200_000]), np.array([5, 5]), np.zeros(2, np.int64))
    with pytest.raises(InputError, match=r"^request 1 has 200,000 input"):
        check_requests(bad, setup, memory)


def test_recorded_durations_may_run_out() -> None:
    requests = RequestArrays(np.zeros(1), np.array([4]), np.array([9]), np.zeros(1, np.int64))
    setup = resolve(made())
    memory = plan_memory(shard_of(setup), setup.device, setup.engine, setup.max_model_len)
    settings = kernel_settings(setup, memory, 1, requests)
    cost = played_back(np.full(3, 0.1), 4)
    with pytest.raises(WindtunnelError, match="the 3 recorded steps end before"):
        run_pool(settings, cost, requests)


# KV blocks


def with_engine(given: dict[str, Any]) -> dict[str, Any]:
    return {"settings": {f"deployment.engine.{name}": value for name, value in given.items()}}


def short_of_blocks(**engine: Any) -> Result:
    return served(output_tokens=200, num_requests=40, **with_engine({"num_gpu_blocks": 120, **engine}))


def test_a_preempted_request_finds_what_is_left_of_its_own_blocks() -> None:
    """vLLM V1 keeps hashes of a preempted request's full blocks (`KVCacheManager.free`), whoever shares its prompt."""
    cached, computed = short_of_blocks(), short_of_blocks(enable_prefix_caching=False)
    assert cached.requests["num_preemptions"].sum() > 0
    assert computed.requests["num_preemptions"].sum() > 0
    first_s = {name: one.requests["first_token_s"].min() for name, one in (("cached", cached), ("computed", computed))}
    assert first_s["cached"] == first_s["computed"]  # nothing differs before the first preemption
    given = cached.requests["input_tokens"].sum()
    again = [one.steps["prefill_tokens"].sum() - given for one in (cached, computed)]
    assert 0 < again[0] < again[1]


def test_a_fleet_begins_again_for_the_run_in_which_preempted_requests_find_their_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scenario = made(num_requests=3)
    requests = generate(scenario.workload, scenario.seed)
    prepared = prepare(scenario, requests, estimator_of=lambda _: PlainRoofline())
    fleet = start_fleet(FleetPlan([Scaling(initial_replicas=1)]), [1], 3)
    runs = []

    class Preempting(Loop):
        def run(self, *_: Any) -> LoopRun:
            assert self.fleet is not None
            runs.append((self.pool.cache is not None, self.fleet.fleet))
            records = np.ones(3, [("num_preemptions", "i8")])
            return LoopRun(self.plans, records, Table({}, {}), 0.5, None, None)

    monkeypatch.setattr("windtunnel.serving.run.Loop", Preempting)
    assert prepared.serve(requests, fleet).engine_time_s == 1.0
    (is_cached, first), (is_cached_again, second) = runs
    assert (is_cached, is_cached_again) == (False, True)
    assert first is not second
    assert prepared.serve(requests, fleet, lambda *_: 0).engine_time_s == 0.5  # which would be asked twice


@pytest.mark.full
def test_windows_let_more_long_requests_run_at_a_time() -> None:
    """gpt-oss-20b, 4,000 tokens a request and windows of 128 in half of its layers."""
    running = {}
    for kept in ("full", "shared_pool"):
        result = served(
            model="openai/gpt-oss-20b",
            **with_engine({"window_kv": kept, "gpu_memory_utilization": 0.32, "max_cudagraph_capture_size": 512}),
            input_tokens=4000,
            output_tokens=50,
            num_requests=100,
            rate_per_s=1000.0,
        )
        running[kept] = result.steps["num_running"].max()
        assert result.requests["num_preemptions"].sum() == 0
        assert result.steps["used_blocks"].max() <= result.memory.num_blocks
    assert 1.6 * running["full"] < running["shared_pool"] < 100


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"given": {"name": "sglang", "window_kv": "shared_pool"}}, "sglang has no window_kv shared_pool"),
        ({"given": {"name": "vllm", "window_kv": "own_pool"}}, "vllm_v1 has no window_kv own_pool"),
        ({"given": {"scheduler": "sarathi", "window_kv": "shared_pool"}}, "sarathi has no window_kv shared_pool"),
        (
            {
                "model": "openai/gpt-oss-20b",
                "given": {"name": "sglang", "num_gpu_blocks": 500, "window_pool_ratio": 0.1},
            },
            "needs .* blocks of the pool for windows of 128 tokens; it has 50 of 1",
        ),
        (
            {"model": "mistralai/Mistral-7B-v0.1", "input_tokens": 5000, "shared": 100},
            "the prefix cache needs one group of layers that keep every token",
        ),
    ],
)
def test_windows_that_cannot_be_kept_so_are_refused(changes: dict[str, Any], message: str) -> None:
    options = with_engine(changes.pop("given", {}))
    if shared := changes.pop("shared", 0):
        options["settings"]["workload.shared_prompts"] = {"tokens": shared}
    with pytest.raises(InputError, match=message):
        served(**changes, **options)


def test_a_dense_model_runs_with_attention_data_parallelism() -> None:
    """It has no experts for the ranks to share."""
    result = served(**with_engine({}), num_requests=40, rate_per_s=20.0, attention_dp=2)
    assert np.isfinite(result.requests["finish_s"]).all()
    alone = served(**with_engine({}), num_requests=40, rate_per_s=20.0)
    assert result.summary.tpot_s.mean < alone.summary.tpot_s.mean
