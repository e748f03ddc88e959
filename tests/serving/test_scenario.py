import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.model.parallelism import Parallelism
from windtunnel.model.precision import Format, Precision
from windtunnel.schema import decode, encode, save, set_path, short_path
from windtunnel.serving.deployment import Deployment, EngineSettings, HostOverheads
from windtunnel.serving.scenario import (
    Scenario,
    Setup,
    Slo,
    check_formats,
    check_parallelism,
    load,
    pool_scenario,
    resolve,
    scenario_from,
)
from windtunnel.serving.setup.estimators import estimator_key, shard_of
from windtunnel.workload.arrivals import Burst, ClosedLoop, Gamma, Poisson
from windtunnel.workload.lengths import Uniform
from windtunnel.workload.schema import Trace, Workload

LLAMA, DEEPSEEK = "meta-llama/Llama-3.1-8B", "deepseek-ai/DeepSeek-V3"
WORKLOAD = Workload(arrivals=Poisson(rate_per_s=2), input_tokens=100, output_tokens=10, num_requests=5)


def scenario(model: str = LLAMA, device: str = "h100_sxm", node: str | None = None, **parallelism: int) -> Scenario:
    deployment = Deployment(device=device, node=node, parallelism=Parallelism(**parallelism))
    return Scenario(model=model, deployment=deployment, workload=WORKLOAD)


def refused(model: str = LLAMA, device: str = "h100_sxm", node: str | None = None, **parallelism: int) -> str:
    with pytest.raises(InputError) as caught:
        resolve(scenario(model, device, node, **parallelism))
    return caught.value.message


# Sampling


@pytest.mark.parametrize(
    ("workload", "text", "source"),
    [
        ({}, "greedy", "as benchmark clients ask"),
        ({"sampling": {}}, "temperature 0.6, top-p 0.9", "the model's generation config"),
        ({"sampling": {"temperature": 0.0}}, "greedy", "as benchmark clients ask"),
        ({"sampling": {"top_k": 5}}, "temperature 0.6, top-p 0.9, top-k 5", "as given"),
        ({"trace": {"path": "requests.csv"}}, "temperature 0.6, top-p 0.9", "the model's generation config"),
        ({"trace": {"path": "requests.csv"}, "sampling": {"temperature": 0.0}}, "greedy", "as given"),
    ],
)
def test_real_traffic_samples_as_the_model_says(workload: dict[str, Any], text: str, source: str) -> None:
    drawn = {} if "trace" in workload else {"input_tokens": 8, "output_tokens": 8}
    arrivals = {"type": "poisson", "rate_per_s": 1.0}
    raw = {"arrivals": arrivals, "num_requests": 5, **drawn, **workload}
    setup = resolve(scenario_from({"model": LLAMA, "deployment": {"device": "h100_sxm"}, "workload": raw}))
    assert setup.sampling.text == text
    assert setup.sampling_source.startswith(source)


def test_a_model_without_a_known_generation_config_is_sampled_greedily() -> None:
    raw = {"trace": {"path": "requests.csv"}}
    setup = resolve(scenario_from({"model": DEEPSEEK, "deployment": {"device": "h200_sxm"}, "workload": raw}))
    assert setup.sampling.is_greedy
    assert "not known" in setup.sampling_source


@pytest.mark.parametrize(
    ("engine", "device", "kernel"),
    [
        ({"version": "0.16.0"}, "h100_sxm", "sort"),
        ({"version": "0.17.0"}, "h100_sxm", "triton"),
        ({"version": "0.24.0"}, "h100_sxm", "flashinfer"),
        ({"version": "0.24.0", "sampler": "triton_split"}, "h100_sxm", "triton_split"),
        ({"version": "0.24.0"}, "mi300x", "sort"),
        ({"version": "0.17.0"}, "mi300x", "triton"),
        ({"name": "sglang"}, "h100_sxm", "flashinfer"),
        ({"name": "trtllm", "version": "1.1.0"}, "h100_sxm", "sort"),
        ({"name": "trtllm", "version": "1.2.0"}, "h100_sxm", "flashinfer"),
    ],
)
def test_engine_and_version_choose_the_sampling_kernel(engine: dict[str, str], device: str, kernel: str) -> None:
    deployment = Deployment(device=device, engine=EngineSettings(**engine))
    setup = resolve(Scenario(model=LLAMA, deployment=deployment, workload=WORKLOAD))
    assert shard_of(setup).sampler.kernel == kernel


def test_an_unknown_sampler_is_refused() -> None:
    with pytest.raises(InputError, match="sampler is 'quick', which is not known") as refusal:
        decode({"sampler": "quick"}, EngineSettings)
    assert refusal.value.hint == "known here: sort, triton, triton_split, flashinfer"


# Files

positive = st.floats(1e-3, 1e6)
few = st.integers(1, 8)
formats = st.sampled_from(Format)
overheads = st.builds(HostOverheads, step_s=st.none() | positive, request_s=st.none() | positive)
engines = st.builds(
    EngineSettings,
    name=st.sampled_from(["vllm", "sglang", "trtllm"]),
    version=st.none() | st.sampled_from(["0.19.0", "1.3.0rc5"]),
    max_num_seqs=st.none() | few,
    enable_chunked_prefill=st.none() | st.booleans(),
    gpu_memory_utilization=st.none() | st.floats(0.1, 1),
    cudagraph_sizes=st.none() | st.tuples(few, few),
    host=overheads,
)
parallelisms = st.builds(Parallelism, tp=few, pp=few, attention_dp=few)
workloads = st.one_of(
    st.builds(
        Workload,
        arrivals=st.builds(Poisson, rate_per_s=positive)
        | st.builds(Gamma, rate_per_s=positive, cv=st.floats(0.1, 10))
        | st.builds(ClosedLoop, concurrency=few, num_warmup_requests=st.integers(0, 5))
        | st.builds(Burst),
        input_tokens=few | st.builds(Uniform, min_tokens=few, max_tokens=st.integers(8, 20)),
        output_tokens=few,
        num_requests=few,
    ),
    st.builds(Workload, trace=st.builds(Trace, path=st.just("r.csv"), start_s=positive, time_scale=positive)),
)
precisions = st.builds(
    Precision, weights=formats, attention=st.none() | formats, experts=st.none() | formats, kv_cache=formats
)
scenarios = st.builds(
    Scenario,
    model=st.sampled_from([LLAMA, DEEPSEEK]),
    deployment=st.builds(
        Deployment, device=st.just("h100_sxm"), parallelism=parallelisms, replicas=few, engine=engines
    ),
    workload=workloads,
    precision=st.none() | precisions,
    slo=st.none() | st.builds(Slo, ttft_s=st.none() | positive, tpot_s=st.none() | positive),
    seed=st.integers(0, 2**31),
)


@pytest.mark.full
@given(scenarios)
def test_what_is_saved_loads_as_equal(tmp_path_factory: pytest.TempPathFactory, made: Scenario) -> None:
    path = tmp_path_factory.mktemp("s") / "scenario.yaml"
    save(made, path)
    assert load(path) == made
    assert decode(encode(made), Scenario) == made


def write(tmp_path: Path, **changes: Any) -> Path:
    path = tmp_path / "s.yaml"
    path.write_text(yaml.safe_dump(encode(scenario()) | changes))
    return path


def test_overrides_reach_any_depth(tmp_path: Path) -> None:
    path = write(tmp_path)
    made = load(path, {"workload.arrivals.rate_per_s": "390/min", "slo.ttft_s": "200ms", "deployment.replicas": 3})
    assert made.workload.arrivals == Poisson(rate_per_s=6.5)
    assert made.slo == Slo(ttft_s=0.2)
    assert made.deployment.replicas == 3


def test_an_override_of_nothing_or_below_a_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"unknown key \$\.workload\.rate_per_s"):
        load(write(tmp_path), {"workload.rate_per_s": 1})
    with pytest.raises(InputError, match="seed is 7 and has no keys"):
        load(write(tmp_path, seed=7), {"seed.deeper": 1})


def test_an_empty_table_may_be_filled() -> None:
    raw: dict[str, Any] = {"slo": None}
    set_path(raw, "slo.ttft_s", 1)
    assert raw == {"slo": {"ttft_s": 1}}


def test_entries_of_lists_are_set_by_position() -> None:
    raw: dict[str, Any] = {"pools": [{"name": "p"}, {"name": "d"}], "layers": (4, 4)}
    set_path(raw, "pools.1.replicas", 4)
    set_path(raw, "layers.0", 3)
    assert raw == {"pools": [{"name": "p"}, {"name": "d", "replicas": 4}], "layers": [3, 4]}


@pytest.mark.parametrize(
    ("path", "message", "hint"),
    [
        ("deployment.pools.2.replicas", "deployment.pools is a list of 2, and '2' is none", "deployment.pools.0 to 1"),
        ("deployment.pools.-1.replicas", "'-1' is none of its positions", "count from 0"),
        ("deployment.pools.first", "'first' is none of its positions", "count from 0"),
        ("deployment.other.1.replicas", "there is no deployment.other yet", "deployment.other=[...]"),
        ("deployment.pools.0.name.x", "deployment.pools.0.name is 'p' and has no keys", None),
    ],
)
def test_a_path_past_a_list_is_refused(path: str, message: str, hint: str | None) -> None:
    raw: dict[str, Any] = {"deployment": {"pools": [{"name": "p"}, {"name": "d"}]}}
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        set_path(raw, path, 4)
    assert hint is None or hint in str(caught.value.hint)


def test_short_paths_keep_the_position_in_a_list() -> None:
    assert short_path("deployment.pools.1.replicas") == "pools.1.replicas"
    assert short_path("deployment.engine.max_num_seqs") == "max_num_seqs"
    assert short_path("tp") == "tp"


def test_a_file_that_is_no_scenario(tmp_path: Path) -> None:
    path = tmp_path / "list.yaml"
    path.write_text("- 1\n")
    with pytest.raises(InputError, match="is not a scenario: keys and values are needed"):
        load(path)


def test_a_trace_lies_beside_its_scenario(tmp_path: Path) -> None:
    (tmp_path / "r.csv").write_text("")
    path = write(tmp_path, workload={"trace": {"path": "r.csv"}})
    assert load(path).workload.trace == Trace(path=str(tmp_path / "r.csv"))
    elsewhere = write(tmp_path, workload={"trace": {"path": "other.csv"}})
    assert load(elsewhere).workload.trace == Trace(path="other.csv")


# Formats


def test_formats_that_a_file_leaves_out_are_the_published_ones(tmp_path: Path) -> None:
    """DeepSeek-V3 is published in fp8: to ask for an fp8 cache must not turn its weights into bf16."""
    path = write(tmp_path, model=DEEPSEEK, precision={"kv_cache": "fp8"})
    precision = load(path).precision
    assert precision is not None
    assert (precision.weights, precision.kv_cache) == (Format.FP8_BLOCK, Format.FP8)
    assert load(path, {"precision.weights": "bf16"}).precision == Precision(kv_cache=Format.FP8)


def test_formats_that_equal_the_default_are_written_too(tmp_path: Path) -> None:
    """Left out, bf16 weights would come back as the checkpoint's fp8."""
    made = msgspec.structs.replace(scenario(DEEPSEEK), precision=Precision())
    save(made, tmp_path / "s.yaml")
    assert load(tmp_path / "s.yaml").precision == Precision()


def test_a_scenario_without_formats_takes_the_checkpoints() -> None:
    assert resolve(scenario(DEEPSEEK, tp=8)).precision.weights == Format.FP8_BLOCK
    assert resolve(scenario()).precision == Precision()


# What goes together


def test_resolving_fills_in_names_and_defaults() -> None:
    setup = resolve(scenario(tp=4))
    assert isinstance(setup, Setup)
    assert setup.node.name == "dgx_h100"
    assert setup.max_model_len == 131072
    assert setup.engine.version is not None
    assert setup.engine.max_num_seqs == 1024


@pytest.mark.parametrize("tp", [3, 5, 7, 64])
def test_tp_divides_the_heads(tp: int) -> None:
    assert refused(tp=tp) == f"tp = {tp} does not divide the 32 attention heads of {LLAMA}"


@pytest.mark.parametrize(
    ("model", "what"),
    [
        ("deepseek-ai/DeepSeek-V4.1-Flash", "8 groups of attention heads"),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", "16 key heads"),
    ],
)
def test_what_tp_does_not_divide_is_named(model: str, what: str) -> None:
    assert refused(model, tp=3) == f"tp = 3 does not divide the {what} of {model}"


def test_the_hint_names_the_possible_tp() -> None:
    with pytest.raises(InputError) as caught:
        resolve(scenario(tp=3))
    assert caught.value.hint == "possible: 1, 2, 4, 8, 16"


def test_key_value_heads_spread_evenly_or_are_repeated_alike() -> None:
    """vLLM `ModelConfig.get_num_kv_heads`: ten heads lie on five ranks, on ten or on twenty, not on four."""
    assert "tp = 4 neither divides the 10 key/value heads" in refused("microsoft/phi-4", tp=4)
    resolve(scenario("microsoft/phi-4", tp=5))
    resolve(scenario("Qwen/Qwen3-30B-A3B", tp=8))  # four heads, each on two ranks


def test_experts_and_ep() -> None:
    assert refused(ep=2, tp=2) == f"ep = 2, but {LLAMA} has no experts"
    assert "ep = 16 does not divide the 8 experts" in refused("mistralai/Mixtral-8x7B-v0.1", tp=16, ep=16)
    with pytest.raises(ValueError, match="ep = 3 does not divide tp x attention_dp = 8"):
        Parallelism(tp=8, ep=3)


def test_more_devices_than_there_are() -> None:
    assert "pp = 33, but" in refused(pp=33)
    alone = msgspec.structs.replace(catalog.node("dgx_h100"), scale_out=None)
    check_parallelism(catalog.model(LLAMA), Parallelism(tp=8), alone)
    with pytest.raises(InputError, match="one replica needs 16 devices; dgx_h100 has 8 and no link to others"):
        check_parallelism(catalog.model(LLAMA), Parallelism(tp=8, pp=2), alone)


def test_a_node_of_another_device_is_refused() -> None:
    assert refused(node="dgx_a100") == "NVIDIA DGX A100 holds a100_sxm, not h100_sxm"
    assert resolve(scenario(node="pcie")).node.name == "pcie"


def test_a_format_that_the_device_cannot_compute() -> None:
    device = msgspec.structs.replace(catalog.device("a100_sxm"), peak_flops_per_s={"fp32": 19.5e12})
    with pytest.raises(InputError, match="no published rate for bf16") as caught:
        check_formats(Precision(), device)
    assert caught.value.hint is not None
    assert "fp32" in caught.value.hint
    check_formats(Precision(weights=Format.FP32, lm_head=Format.FP32), device)
    check_formats(Precision(weights=Format.NVFP4), catalog.device("a100_sxm"))  # dequantised, computed in bf16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**53 + 1}, "from 0 to 9007199254740992 is needed"),
        ({"slo": {"ttft_s": 0}}, "ttft_s is 0"),
        ({"slo": {"ttft_s": "-5ms"}}, "ttft_s is -0.005"),
        ({"deployment": {"device": "h100_sxm", "replicas": 0}}, "replicas is 0"),
        ({"deployment": {"device": "h100_sxm", "parallelism": {"tp": 0}}}, "tp is 0"),
        ({"deployment": {"device": "h100_sxm", "price_usd_per_hour": -1}}, "price_usd_per_hour is -1"),
        ({"deployment": {"device": "h100_sxm", "engine": {"max_num_seqs": 0}}}, "max_num_seqs is 0"),
        ({"deployment": {"device": "h100_sxm", "engine": {"reserved_bytes": -1}}}, "reserved_bytes is -1"),
        ({"deployment": {"device": "h100_sxm", "engine": {"cudagraph_sizes": [8, 0]}}}, "cudagraph_sizes is 0"),
        ({"deployment": {"device": "h100_sxm", "engine": {"piecewise_sizes": [-3]}}}, "piecewise_sizes is -3"),
        ({"deployment": {"device": "h100_sxm", "engine": {"gpu_memory_utilization": 1.5}}}, "gpu_memory_utilization"),
        (
            {"deployment": {"device": "h100_sxm", "engine": {"scheduling_policy": "lifo"}}},
            "known here: fcfs, priority, shortest, deadline, fair_share, lpm",
        ),
        ({"deployment": {"device": "h100_sxm", "engine": {"host": {"step_s": -1e-3}}}}, "step_s is -0.001"),
    ],
)
def test_impossible_values_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        scenario_from(encode(scenario()) | change)


def test_a_pool_runs_the_deployments_engine() -> None:
    raw = {
        "model": "llama-3.1-8b",
        "deployment": {
            "device": "h100_sxm",
            "engine": {"name": "sglang", "max_num_seqs": 32},
            "pools": [{"name": "p", "role": "prefill"}, {"name": "d", "role": "decode", "engine": {"max_num_seqs": 8}}],
        },
        "workload": {"arrivals": {"type": "burst"}, "input_tokens": 8, "output_tokens": 8, "num_requests": 1},
    }
    scenario = decode(raw, Scenario)
    engines = [pool_scenario(scenario, pool).deployment.engine for pool in scenario.deployment.pools]
    assert [(engine.name, engine.max_num_seqs) for engine in engines] == [("sglang", 32), ("sglang", 8)]


def of_engines(shared: dict[str, Any], *engines: dict[str, Any], **deployment: Any) -> list[Setup]:
    """The setups of pools with these engines in a deployment with that one."""
    roles = ("prefill", "decode", "decode")
    pools = [{"name": f"p{i}", "role": roles[i], "engine": engine} for i, engine in enumerate(engines)]
    given = {"device": "h100_sxm", "engine": shared, "pools": pools, **deployment}
    raw = {**encode(scenario()), "deployment": given}
    found = decode(raw, Scenario)
    return [resolve(pool_scenario(found, pool)) for pool in found.deployment.pools]


def test_a_setting_of_the_deployments_engine_is_not_a_pools_with_another() -> None:
    shared = {"name": "vllm", "version": "0.19.0", "long_prefill_token_threshold": 512, "max_num_seqs": 64}
    own, other = of_engines(shared, {}, {"name": "sglang"})
    assert (own.engine.long_prefill_token_threshold, own.engine.version) == (512, "0.19.0")
    assert (other.engine.scheduler, other.engine.max_num_seqs) == ("sglang", 64)
    assert other.engine.long_prefill_token_threshold == 0
    assert other.engine.version != "0.19.0"


def test_a_calibration_of_the_deployments_engine_is_not_a_pools_with_another() -> None:
    own, other = of_engines({"name": "vllm"}, {}, {"name": "sglang"}, calibration="vllm-h100_sxm")
    assert own.calibration_name == "vllm-h100_sxm"
    assert other.calibration is None or other.calibration.engine == "sglang"


def test_a_setting_that_a_pool_says_itself_and_does_not_read_is_refused() -> None:
    with pytest.raises(InputError, match="long_prefill_token_threshold = 512 changes nothing"):
        of_engines({"name": "vllm"}, {}, {"name": "sglang", "long_prefill_token_threshold": 512})


def test_a_setting_that_no_pools_engine_reads_is_refused() -> None:
    with pytest.raises(InputError, match="long_prefill_token_threshold = 512 changes nothing"):
        of_engines({"name": "vllm", "long_prefill_token_threshold": 512}, {"name": "sglang"}, {"name": "sglang"})


def test_a_scheduler_of_no_engine_is_every_pools() -> None:
    shared = {"name": "vllm", "scheduler": "sarathi", "watermark_fraction": 0.02}
    engines = [setup.engine for setup in of_engines(shared, {}, {"name": "sglang"})]
    assert [(engine.scheduler, engine.watermark_fraction) for engine in engines] == [("sarathi", 0.02)] * 2


# A model written out

VARIANT: dict[str, Any] = {
    "name": "variant",
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "quantization_config": {"quant_method": "fp8"},
}


def written(model: Any, **fields: Any) -> dict[str, Any]:
    return {"model": model, "deployment": {"device": "h100_sxm"}, "workload": encode(WORKLOAD), **fields}


def test_a_model_may_be_the_keys_of_a_config() -> None:
    inline = scenario_from(written(VARIANT))
    setup = resolve(inline)
    assert (inline.model_name, setup.model.num_layers, setup.precision.weights) == ("variant", 16, Format.FP8)
    assert inline == Scenario(model=VARIANT, deployment=Deployment(device="h100_sxm"), workload=WORKLOAD)  # type: ignore[arg-type]


def test_a_model_may_be_a_spec(tmp_path: Path) -> None:
    model = msgspec.structs.replace(catalog.model(LLAMA), name="shallow", layers=catalog.model(LLAMA).layers[:1])
    inline = scenario(model)  # type: ignore[arg-type]
    assert resolve(inline).model == model
    save(inline, tmp_path / "inline.yaml")
    assert load(tmp_path / "inline.yaml") == inline


def test_formats_that_a_scenario_leaves_out_are_those_of_the_model_written_out(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(written(VARIANT, precision={"kv_cache": "fp8"})))
    assert resolve(load(tmp_path / "s.yaml")).precision == Precision(weights=Format.FP8, kv_cache=Format.FP8)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"model_type": "llama"}, "the model written out: config.json .* has no hidden_size"),
        (VARIANT | {"model_type": "variant_9"}, "variant: model_type 'variant_9' is not known"),
        ({"name": "x", "layers": []}, r"model: \$\.hidden_size, \$\.vocab_size, \$\.max_context_tokens are missing"),
        (7, r"\$\.model is 7; text or a table of keys and values is needed"),
    ],
)
def test_a_model_that_cannot_be_read_is_refused(model: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        scenario_from(written(model))


@pytest.mark.parametrize(
    ("workload", "random_tokens"),
    [
        ({}, False),
        ({"client": "inferencex"}, True),
        ({"client": "vllm", "random_tokens": False}, False),
        ({"client": "sglang", "random_tokens": True}, True),
    ],
)
def test_prompts_are_text_unless_the_client_or_the_workload_says_random(
    workload: dict[str, Any], random_tokens: bool
) -> None:
    setup, text = (
        resolve(msgspec.structs.replace(scenario(), workload=msgspec.structs.replace(WORKLOAD, **given)))
        for given in (workload, {})
    )
    assert setup.random_tokens == random_tokens
    assert (estimator_key(setup) != estimator_key(text)) == random_tokens


def test_a_deployment_whose_pools_all_name_a_device_needs_none() -> None:
    def deployed(**decode_pool: str) -> Deployment:
        pools = [{"name": "p", "role": "prefill", "device": "h100_sxm"}, {"name": "d", "role": "decode", **decode_pool}]
        workload = {"arrivals": {"type": "poisson", "rate_per_s": 1}, "num_requests": 1}
        workload |= {"input_tokens": 8, "output_tokens": 8}
        return scenario_from({"model": "llama-3.1-8b", "deployment": {"pools": pools}, "workload": workload}).deployment

    assert deployed(device="h200_sxm").device == "h100_sxm"
    with pytest.raises(InputError, match=r"\$\.deployment\.device is missing"):
        deployed()
