"""LoRA adapters in a scenario: memory, price of a step, prefixes, refusals; runs without adapters stay as they are."""

from typing import Any

import numpy as np
import pytest

from serving.test_simulate import PlainRoofline
from windtunnel.errors import InputError
from windtunnel.formats.launch.read import read_launch_command
from windtunnel.formats.launch.scripts import write_launch_command
from windtunnel.model.launches.lora import lora_bytes, lora_launches
from windtunnel.model.parallelism import Parallelism
from windtunnel.model.shape import LoraShape, Shard
from windtunnel.serving.deployment import EngineSettings, Lora
from windtunnel.serving.prepared import prepare
from windtunnel.serving.results import Result
from windtunnel.serving.scenario import Scenario, resolve, scenario_from
from windtunnel.serving.setup.estimators import shard_of
from windtunnel.serving.simulate import simulate
from windtunnel.workload.generate.requests import generate

pytestmark = [pytest.mark.loops, pytest.mark.interpreted]

ADAPTERS = {"count": 20, "popularity": "zipf"}
LORA = {"rank": 16, "max_loras": 4, "max_cpu_loras": 8}
# Llama-3.1-8B: hidden 4,096, keys and values 1,024 each, feed-forward 14,336, 32 layers.
SCALING = {"type": "target", "metric": "outstanding", "target": 4, "max_replicas": 3}
BY_HAND = 32 * 16 * (3 * 4096 + 4096 + 2 * 1024 + 4096 + 4096 + 2 * 4096 + 2 * 14336 + 14336 + 4096)
"""Values of an adapter of rank 16 on q, k, v, o, gate, up and down."""


def scenario_of(
    engine: dict[str, Any] | None = None, deployment: dict[str, Any] | None = None, **load: Any
) -> Scenario:
    workload = {"arrivals": {"type": "poisson", "rate_per_s": 50}, "input_tokens": 64, "output_tokens": 8}
    settings = {"name": "vllm", "version": "0.24.0", "lora": LORA} | (engine or {})
    return scenario_from(
        {
            "model": "meta-llama/Llama-3.1-8B",
            "deployment": {"device": "h100_sxm", "engine": settings} | (deployment or {}),
            "workload": workload | {"num_requests": 60, "adapters": ADAPTERS} | load,
        }
    )


def shard_with(tp: int = 1, **lora: Any) -> Shard:
    model = resolve(scenario_of()).model
    return Shard(model, model.precision, Parallelism(tp=tp), lora=LoraShape(16, **lora))


def run(scenario: Scenario) -> Result:
    return simulate(scenario, PlainRoofline())


def test_an_adapter_has_the_bytes_that_one_counts_by_hand() -> None:
    assert lora_bytes(shard_with()) == 2 * BY_HAND == 83_886_080
    # Ranks share B of projections split by outputs and A of those split by inputs, and hold the others whole.
    shared = 32 * 16 * (6144 + 4096 + 2 * 14336 + 14336) / 4
    whole = 32 * 16 * (5 * 4096 + 2 * 4096 - 4096 + 4096 - 4096 + 4096)
    assert lora_bytes(shard_with(4)) == 2 * (shared + whole)
    assert lora_bytes(shard_with(4, fully_sharded=True)) == 2 * BY_HAND / 4


def test_slots_leave_less_memory_to_the_kv_cache() -> None:
    with_slots = run(scenario_of()).memory
    without = run(scenario_of({"lora": None}, adapters=None)).memory
    assert with_slots.adapter_bytes == 4 * 2 * BY_HAND
    taken = without.kv_cache_bytes - with_slots.kv_cache_bytes
    block_bytes = without.kv_cache_bytes / without.num_blocks
    assert abs(taken - with_slots.adapter_bytes) < block_bytes


def test_a_step_costs_what_its_products_cost_by_hand() -> None:
    """Three adapters, ten tokens of decoding requests: weights of three, hidden states and fp32 sums of ten."""
    launches = list(lora_launches(shard_with(), 10.0, 3.0))
    assert [launch.name for launch in launches[:2]] == ["qkv_proj_lora_shrink", "qkv_proj_lora_expand"]
    shrink, expand = launches[0].op, launches[1].op
    assert shrink.flops == 2 * 10 * 4096 * 48
    assert shrink.num_bytes == 3 * 4096 * 48 * 2 + 10 * (4096 * 2 + 48 * 4)
    assert expand.num_bytes == 3 * 16 * 6144 * 2 + 10 * (48 * 4 + 2 * 6144 * 2)
    assert sum(launch.count * launch.op.num_kernels for launch in launches) == 32 * 4 * 3
    scenario = scenario_of()
    prepared = prepare(scenario, generate(scenario.workload, 0), estimator_of=lambda _: PlainRoofline())
    plan = prepared.pools[0].plan.adapters
    assert plan is not None
    seconds = sum(launch.count * float(PlainRoofline().estimate(launch.op).seconds) for launch in launches)
    gaps_s = 32 * 4 * 3 * float(prepared.pools[0].setup.engine.host.kernel_gap_s or 0.0)
    assert np.interp(10.0, plan.token_nodes, plan.step_s[3]) == pytest.approx(seconds + gaps_s, rel=2e-3)
    assert (np.diff(plan.step_s[1:5], axis=0) >= 0).all()
    assert plan.limits.host_load_s == pytest.approx(2 * BY_HAND / 64e9, rel=0.02)


def test_requests_and_loads_are_conserved() -> None:
    scenario = scenario_of(adapters={"count": 20, "popularity": "uniform", "base_fraction": 0.25})
    result, drawn = run(scenario), generate(scenario.workload, scenario.seed).adapter
    adapters = result.summary.adapters
    assert drawn is not None
    assert adapters is not None
    assert not np.isnan(result.requests["finish_s"]).any()
    assert adapters.num_adapters == np.unique(drawn[drawn >= 0]).size
    assert 0 < adapters.num_disk_loads <= adapters.num_loads <= (drawn >= 0).sum()
    assert adapters.slot_hit_fraction == pytest.approx(1 - adapters.num_loads / (drawn >= 0).sum())
    assert adapters.most_in_step <= 4
    added_fraction = adapters.load_fraction + adapters.product_fraction
    assert 0 < added_fraction < 1
    assert result.summary.time_fractions["adapters"] == pytest.approx(added_fraction)


def test_more_slots_pass_over_fewer_requests() -> None:
    few, many = (run(scenario_of({"lora": LORA | {"max_loras": n, "max_cpu_loras": 20}})) for n in (1, 20))
    assert many.summary.queueing_s.mean < few.summary.queueing_s.mean
    assert many.summary.adapters is not None
    assert many.summary.adapters.num_loads == 0, "all adapters are in slots from the beginning"


def test_prompts_of_two_adapters_share_nothing() -> None:
    shared = {"shared_prompts": {"tokens": 512, "count": 1}, "arrivals": {"type": "static", "rate_per_s": 1}}
    one, several = (
        run(scenario_of(adapters={"count": count, "popularity": "uniform"}, num_requests=40, **shared))
        for count in (1, 4)
    )
    drawn = generate(scenario_of(adapters={"count": 4, "popularity": "uniform"}, num_requests=40).workload, 0).adapter
    assert one.requests["cached_tokens"].tolist() == [0] + [512] * 39
    assert drawn is not None
    assert (several.requests["cached_tokens"] == 0).sum() == np.unique(drawn).size


def test_turns_of_a_session_keep_their_adapter() -> None:
    requests = generate(scenario_of(sessions={"turns": 3, "think_s": 0.1}, num_requests=60).workload, 0)
    assert requests.session is not None
    assert requests.adapter is not None
    for session in range(int(requests.session.max()) + 1):
        assert np.unique(requests.adapter[requests.session == session]).size == 1
    assert np.unique(requests.adapter).size > 1


def test_requests_to_the_base_model_take_as_long_as_without_adapters() -> None:
    engine = {"num_gpu_blocks": 2000, "host": {"launch_s": 0.0}}
    base = run(scenario_of(engine, adapters={"count": 3, "base_fraction": 1.0}))
    without = run(scenario_of({"lora": None, **engine}, adapters=None))
    assert without.summary.adapters is None
    np.testing.assert_array_equal(base.requests["finish_s"], without.requests["finish_s"])


PREFILL_AND_DECODE = {"pools": [{"name": "prefill", "role": "prefill"}, {"name": "decode", "role": "decode"}]}


def test_both_sides_of_a_handoff_load_the_adapter() -> None:
    """One slot on either side, requests that do not meet: each change of the adapter loads it twice."""
    alone = {"arrivals": {"type": "static", "rate_per_s": 1}, "adapters": {"count": 5, "popularity": "uniform"}}
    lora = {"rank": 16, "max_loras": 1, "max_cpu_loras": 5}
    scenario = scenario_of({"lora": lora}, PREFILL_AND_DECODE, num_requests=40, **alone)
    result, drawn = run(scenario), generate(scenario.workload, 0).adapter
    assert drawn is not None
    changes = np.count_nonzero(np.diff(drawn, prepend=0))
    adapters = result.summary.adapters
    assert adapters is not None
    assert (adapters.num_loads, adapters.num_disk_loads, adapters.most_in_step) == (2 * changes, 0, 1)
    assert adapters.slot_hit_fraction == pytest.approx(1 - changes / 40)
    plain = run(scenario_of({"lora": lora}, PREFILL_AND_DECODE, num_requests=40, **alone | {"adapters": None}))
    slower_s = result.requests["ttft_s"] - plain.requests["ttft_s"]
    load_s = 2 * BY_HAND / 64e9
    loads = np.diff(drawn, prepend=0) != 0
    assert (slower_s[loads].min() - slower_s[~loads].max()) == pytest.approx(load_s, rel=0.05)
    for pool in result.summary.pools:
        assert 0 < pool.time_fractions["adapters"] < 1
        assert sum(pool.time_fractions.values()) == pytest.approx(1)
    by_operator = result.operators["lora"]
    assert by_operator == pytest.approx(adapters.product_fraction)


def test_pools_of_one_role_have_slots_of_their_own() -> None:
    """The pool with more slots lets requests wait less; prices and memory are each pool's."""
    few, many = LORA | {"max_loras": 1}, LORA | {"max_loras": 8}
    pools = [{"name": "few", "engine": {"lora": few}}, {"name": "many", "engine": {"lora": many}}]
    result = run(scenario_of(deployment={"pools": pools}, num_requests=200))
    replica, queueing_s = result.requests["replica"], result.requests["scheduled_s"] - result.requests["arrival_s"]
    assert queueing_s[replica == 1].mean() < queueing_s[replica == 0].mean()
    assert [pool.memory.adapter_bytes for pool in result.pools] == [2 * BY_HAND, 16 * BY_HAND]
    assert result.summary.adapters is not None
    assert 1 < result.summary.adapters.most_in_step <= 8


def test_affinity_sends_requests_where_their_adapter_is() -> None:
    """Eight adapters, two slots on each of four replicas: once each has its place, few are loaded again."""
    load = {"num_requests": 400, "adapters": {"count": 8, "popularity": "uniform"}}
    lora = {"rank": 16, "max_loras": 2, "max_cpu_loras": 8}
    results = {
        router: run(scenario_of({"lora": lora}, {"replicas": 4, "router": router}, **load))
        for router in ("least_outstanding", "adapter_affinity")
    }
    blind, affine = (result.summary.adapters for result in results.values())
    assert blind is not None
    assert affine is not None
    assert affine.num_loads < 0.1 * blind.num_loads
    counts = np.bincount(results["adapter_affinity"].requests["replica"], minlength=4)
    assert counts.min() > 0.7 * counts.mean(), "the load stays even"


def test_affinity_without_adapters_is_refused() -> None:
    for deployment in (
        {"replicas": 2, "router": "adapter_affinity"},
        PREFILL_AND_DECODE | {"transfer": {"router": "adapter_affinity"}},
    ):
        with pytest.raises(InputError, match="no request has one"):
            run(scenario_of({"lora": None}, deployment, adapters=None))


def test_sglang_decodes_as_many_adapters_as_it_has_slots_for() -> None:
    adapters = {"count": 4, "popularity": "uniform", "base_fraction": 0.2}
    engine = {"name": "sglang", "version": None, "lora": LORA | {"max_loras": 5}}
    result = run(scenario_of(engine, PREFILL_AND_DECODE, adapters=adapters))
    assert result.summary.adapters is not None
    assert 1 < result.summary.adapters.most_in_step <= 4
    with pytest.raises(InputError, match="requests use 4 LoRA adapters"):
        run(scenario_of(engine | {"lora": LORA | {"max_loras": 4}}, PREFILL_AND_DECODE, adapters=adapters))


def lora_in(command: str) -> Any:
    return read_launch_command(command).raw["deployment"]["engine"]["lora"]


def test_command_lines_say_adapters() -> None:
    vllm = "vllm serve meta-llama/Llama-3.1-8B --enable-lora"
    assert lora_in(vllm) == {}
    options = "--max-loras 8 --max-lora-rank 32 --max-cpu-loras 64 --fully-sharded-loras"
    assert lora_in(f"{vllm} {options}") == {"max_loras": 8, "rank": 32, "max_cpu_loras": 64, "fully_sharded": True}
    sglang = "python -m sglang.launch_server --model-path meta-llama/Llama-3.1-8B --enable-lora"
    assert lora_in(f"{sglang} --max-loras-per-batch 4 --max-lora-rank 8") == {"max_loras": 4, "rank": 8}
    for name, slots in (("vllm", "--max-loras 4"), ("sglang", "--max-loras-per-batch 4")):
        settings = EngineSettings(name=name, lora=Lora(rank=8, max_loras=4, max_cpu_loras=9))
        words = " ".join(write_launch_command("meta-llama/Llama-3.1-8B", Parallelism(), settings))
        assert f"--enable-lora --max-lora-rank 8 {slots}" in words
        assert lora_in(words) == {"rank": 8, "max_loras": 4, "max_cpu_loras": 9}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"engine": {"lora": None}}, "without them"),
        ({"engine": {"lora": {"rank": 17}}}, "rank is 17"),
        ({"engine": {"lora": {"target_modules": ["lm_head"]}}}, "no projection lm_head"),
        ({"deployment": {"parallelism": {"pp": 2}}}, "parallelism.pp"),
        (
            {"deployment": {"pools": [{"name": "a"}, {"name": "b", "autoscaling": SCALING}]}},
            "pool a: LoRA adapters do not go with autoscaling",
        ),
        (
            {"engine": {"name": "sglang", "version": None}, "deployment": PREFILL_AND_DECODE},
            "pool decode: requests use 20 LoRA adapters, and sglang decodes",
        ),
        ({"engine": {"scheduler": "sarathi"}}, "the scheduler sarathi"),
        ({"engine": {"name": "trtllm", "version": None}}, "not modelled"),
    ],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        run(scenario_of(**changes))


def test_the_shard_has_adapters_only_where_the_server_has() -> None:
    assert shard_of(resolve(scenario_of())).lora == LoraShape(16)
    assert shard_of(resolve(scenario_of({"lora": None}, adapters=None))).lora is None
