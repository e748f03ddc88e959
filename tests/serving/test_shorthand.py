import math
from typing import Any

import pytest

from windtunnel.errors import InputError
from windtunnel.metrics.limits import Slo
from windtunnel.model.precision import Format
from windtunnel.serving.scenario import Scenario
from windtunnel.serving.shorthand import PATHS, Options, raw_scenario, scenario
from windtunnel.workload.arrivals import Burst, ClosedLoop, Poisson
from windtunnel.workload.lengths import Uniform
from windtunnel.workload.schema import Trace

LLAMA = "meta-llama/Llama-3.1-8B"
BASE: dict[str, Any] = {"model": LLAMA, "device": "h100_sxm", "input_tokens": 64, "output_tokens": 8}


def test_every_short_name_leads_to_a_field() -> None:
    values: dict[str, Any] = {
        "model": "deepseek-ai/DeepSeek-V3",
        "device": "h200_sxm",
        "node": "hgx_h200",
        "replicas": 2,
        "router": "least_kv",
        "tp": 4,
        "pp": 2,
        "ep": 4,
        "attention_dp": 2,
        "dcp": 2,
        "engine": "sglang",
        "task": "generate",
        "engine_version": "0.5.14",
        "calibration": "none",
        "profile": "profiles/h200",
        "estimator": "forest",
        "scheduler": "sglang",
        "max_num_seqs": 7,
        "max_num_batched_tokens": 512,
        "gpu_memory_utilization": 0.8,
        "enable_prefix_caching": False,
        "quant": "fp8",
        "kv_cache_dtype": "fp8",
        "input_tokens": 10,
        "output_tokens": 20,
        "num_requests": 30,
        "seed": 3,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "logprobs": 2,
        "structured_output": True,
        "client": "vllm",
    }
    assert set(values) == set(PATHS)
    made = scenario(rate_per_s=1, **values)
    for name, value in values.items():
        found: Any = made
        for step in PATHS[name].split("."):
            found = getattr(found, step)
        assert found == value, name


def test_a_rate_is_an_open_loop_and_a_concurrency_a_closed_one() -> None:
    assert scenario(**BASE, rate_per_s=2).workload.arrivals == Poisson(rate_per_s=2)
    assert scenario(**BASE, rate_per_s=2).workload.num_requests == 1000
    closed = scenario(**BASE, concurrency=8).workload
    assert (closed.arrivals, closed.num_requests) == (ClosedLoop(concurrency=8), 80)
    capped = scenario(**BASE, concurrency=8, rate_per_s=2).workload
    assert (capped.arrivals, capped.num_requests) == (ClosedLoop(concurrency=8, rate_per_s=2), 80)


def test_another_concurrency_keeps_the_loops_warm_up() -> None:
    raw = {"workload": {"arrivals": {"type": "closed_loop", "concurrency": 4, "num_warmup_requests": 9}}}
    assert raw_scenario(raw, {}, concurrency=8)["workload"]["arrivals"] == {
        "type": "closed_loop",
        "concurrency": 8,
        "num_warmup_requests": 9,
    }
    raw = {"workload": {"arrivals": {"type": "poisson", "rate_per_s": 4}}}
    arrivals = raw_scenario(raw, {}, concurrency=8)["workload"]["arrivals"]
    assert arrivals == {"type": "closed_loop", "concurrency": 8}


@pytest.mark.parametrize(
    ("rate", "rest"), [(None, {"rate_per_s": 4, "cv": 2}), (9, {"rate_per_s": 9, "cv": 2}), (math.inf, {})]
)
def test_another_concurrency_keeps_the_loops_rate_unless_one_is_given(
    rate: float | None, rest: dict[str, float]
) -> None:
    raw = {"workload": {"arrivals": {"type": "closed_loop", "concurrency": 4, "rate_per_s": 4, "cv": 2}}}
    arrivals = raw_scenario(raw, {}, rate_per_s=rate, concurrency=8)["workload"]["arrivals"]
    assert arrivals == {"type": "closed_loop", "concurrency": 8} | rest


def test_limits_and_settings() -> None:
    made = scenario(
        **BASE,
        rate_per_s=1,
        slo={"ttft_s": 0.5},
        settings={"deployment.engine.block_size": 32, "workload.num_requests": 9},
    )
    assert made.slo == Slo(ttft_s=0.5)
    assert made.deployment.engine.block_size == 32
    assert made.workload.num_requests == 9


def test_a_trace_brings_everything() -> None:
    made = scenario(model=BASE["model"], device="h100_sxm", trace="r.csv")
    assert made.workload.trace == Trace(path="r.csv")
    assert made.workload.num_requests is None


def test_an_unknown_option_names_its_neighbour() -> None:
    with pytest.raises(InputError, match="there is no option 'concurency'") as caught:
        scenario(**BASE, concurency=8)
    assert caught.value.hint == "did you mean concurrency?"


def formats(made: Scenario) -> tuple[Format, Format, Format | None]:
    assert made.precision is not None
    return made.precision.weights, made.precision.kv_cache, made.precision.attention


def test_a_cache_format_leaves_the_weights_as_published() -> None:
    """`nvidia/DeepSeek-R1-FP4` has nvfp4 weights, bf16 attention and an fp8 cache."""
    fp4 = BASE | {"model": "nvidia/DeepSeek-R1-FP4", "rate_per_s": 1}
    assert scenario(**fp4).precision is None
    assert formats(scenario(**fp4, kv_cache_dtype="bf16")) == (Format.NVFP4, Format.BF16, Format.BF16)
    assert formats(scenario(**fp4, quant="bf16")) == (Format.BF16, Format.FP8, None)


def test_an_endless_rate_is_as_fast_as_the_clients_let() -> None:
    assert scenario(**BASE, rate_per_s=math.inf, concurrency=8).workload.arrivals == ClosedLoop(concurrency=8)
    assert scenario(**BASE, rate_per_s=math.inf).workload.arrivals == Burst()
    with pytest.raises(InputError, match="-inf"):
        scenario(**BASE, rate_per_s=-math.inf)


def test_the_typed_options_are_the_short_names() -> None:
    assert set(Options.__annotations__) == set(PATHS)


def test_lengths_may_be_texts() -> None:
    shared = {"model": "llama-3.1-8b", "device": "h100_sxm", "concurrency": 2, "max_num_batched_tokens": "8K"}
    described = scenario(input_tokens="1k-2k", output_tokens="1K", **shared)  # type: ignore[arg-type]
    assert described.workload.input_tokens == Uniform(min_tokens=1000, max_tokens=2000)
    assert described.workload.output_tokens == 1024
    assert described.deployment.engine.max_num_batched_tokens == 8192
    with pytest.raises(InputError, match=r"\$\.workload\.input_tokens: 'many' is neither a number"):
        scenario(input_tokens="many", output_tokens=8, **shared)  # type: ignore[arg-type]


def test_the_name_of_a_column_is_no_count() -> None:
    columns = {"workload.trace.columns": {"input_tokens": "column_k", "output_tokens": "8k_tokens"}}
    described = scenario(model="llama-3.1-8b", device="h100_sxm", trace="requests.csv", settings=columns)
    assert described.workload.trace is not None
    assert described.workload.trace.columns.input_tokens == "column_k"


def test_limits_have_the_names_of_the_command_line_too() -> None:
    expected = Slo(ttft_s=0.5, ttft_percentile=90, tpot_s=0.05)
    for slo in ("ttft_p90=500ms,tpot=50ms", {"ttft_p90": 0.5, "tpot": "50ms"}, {"ttft_p90": 0.5, "tpot_s": 0.05}):
        assert scenario(**BASE, concurrency=1, slo=slo).slo == expected
    with pytest.raises(InputError, match=r"unknown key \$\.slo\.tfft_s"):
        scenario(**BASE, concurrency=1, slo={"tfft_s": 0.5})
