"""Embeddings and scores: requests that end with their prompt, and structured output's work of the host."""

from typing import Any

import msgspec
import numpy as np
import pytest

from serving.test_simulate import PlainRoofline
from windtunnel.errors import InputError
from windtunnel.metrics.limits import parse_limits
from windtunnel.model.launches.forward import StepBatch, attention_launches, head_launches
from windtunnel.report.serving.run import run_document, run_report
from windtunnel.schema import encode
from windtunnel.search.capacity.capacity import capacities
from windtunnel.search.space.space import space_from
from windtunnel.serving.explain import explain_step, step_batch
from windtunnel.serving.results import Result
from windtunnel.serving.scenario import Scenario, resolve, scenario_from
from windtunnel.serving.setup.estimators import shard_of
from windtunnel.serving.setup.step_prices import DeployedModel, lower_steps
from windtunnel.serving.simulate import simulate

pytestmark = pytest.mark.loops


def scenario_of(engine: dict[str, Any] | None = None, **load: Any) -> Scenario:
    workload = {"task": "embed", "arrivals": {"type": "poisson", "rate_per_s": 100}, "input_tokens": 200}
    settings = {"name": "vllm", "version": "0.24.0"} | (engine or {})
    return scenario_from(
        {
            "model": "Qwen/Qwen3-8B",
            "deployment": {"device": "h100_sxm", "engine": settings},
            "workload": workload | {"num_requests": 100} | load,
        }
    )


def run(scenario: Scenario) -> Result:
    return simulate(scenario, PlainRoofline())


def test_an_embedder_has_no_output_layer() -> None:
    embeds = resolve(scenario_of())
    generates = resolve(scenario_of(task="generate", output_tokens=1))
    assert [launch.name for launch in head_launches(shard_of(embeds), 4.0)] == ["pooler"]
    assert "lm_head" in [launch.name for launch in head_launches(shard_of(generates), 4.0)]
    assert generates.model.tie_word_embeddings is False
    memory = run(scenario_of()).memory
    other = run(scenario_of(task="generate", output_tokens=1)).memory
    head_bytes = 151_936 * 4096 * 2
    assert other.weight_bytes - memory.weight_bytes == pytest.approx(head_bytes, rel=0.01)
    assert memory.sampler_bytes == 0


def test_a_prompt_ends_with_its_prefill() -> None:
    result = run(scenario_of())
    table = result.requests
    assert result.summary.tpot_s is None
    assert (table["ttft_s"] == table["e2e_s"]).all()
    assert result.steps["decode_tokens"].sum() == 0
    assert result.steps["prefill_tokens"].sum() == 200 * 100
    text = "\n".join(run_report(result).lead) + run_report(result).verdict
    assert "embeddings" in text
    assert "sequences/s" in text


def test_a_query_waits_for_the_last_of_its_documents() -> None:
    result = run(scenario_of(task="rerank", documents=50, num_requests=6))
    latencies = result.requests["e2e_s"].reshape(6, 50)
    arrivals = result.requests["arrival_s"].reshape(6, 50)
    assert (arrivals == arrivals[:, :1]).all()
    assert result.summary.query_s is not None
    assert result.summary.query_s.mean == pytest.approx(latencies.max(axis=1).mean())
    assert result.summary.query_s.mean > result.summary.e2e_s.mean


def test_sglang_does_not_overlap_embeddings() -> None:
    assert resolve(scenario_of({"name": "sglang", "version": None})).engine.async_scheduling is False
    given = {"name": "sglang", "version": None, "async_scheduling": True}
    assert resolve(scenario_of(given)).engine.async_scheduling is True


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"output_tokens": 5}, "leave output_tokens out"),
        ({"documents": 3}, "only rerank has documents"),
        ({"task": "rerank", "documents": 0}, "documents is 0"),
        (
            {"engine": {"speculative": {"method": "ngram", "num_draft_tokens": 2, "acceptance_fraction": 0.5}}},
            "engine.speculative drafts output tokens",
        ),
        ({"engine": {"name": "trtllm", "version": None}}, "not modelled"),
    ],
)
def test_what_embeddings_do_not_have_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        run(scenario_of(**changes))


@pytest.mark.parametrize("limit", ["ttft_p99", "tpot_p90", "itl_p99"])
def test_limits_on_tokens_are_refused_where_there_are_none(limit: str) -> None:
    scenario = scenario_of()
    words, raw = f"limit of {limit[:-4].upper()} says nothing here: task is 'embed'", encode(scenario)
    with pytest.raises(InputError, match=words):
        capacities(scenario, parse_limits({limit: "1s"}))
    with pytest.raises(InputError, match=words):
        space_from(raw | {"vary": {"tp": [1, 2]}, "limits": {limit: "1s"}})
    if not limit.startswith("itl"):
        with pytest.raises(InputError, match=words):
            scenario_from(raw | {"slo": {f"{limit[:4]}_s": 1.0}})


def test_masks_of_structured_output_take_the_host() -> None:
    """40 us for each running request and step, beside what the host needs anyway."""
    costs = []
    for structured in (False, True):
        sampling = {"structured_output": structured}
        setup = resolve(scenario_of(task="generate", output_tokens=8, sampling=sampling))
        deployed = DeployedModel(setup.device, shard_of(setup), setup.engine, 512)
        costs.append(lower_steps(PlainRoofline(), deployed).cost)
    assert costs[1].host_request_s - costs[0].host_request_s == pytest.approx(40e-6)
    assert (np.asarray(costs[1].sample_s) >= costs[0].sample_s).all()


def encoder_of(model: str = "BAAI/bge-m3", engine: dict[str, Any] | None = None, **load: Any) -> Scenario:
    described = scenario_of(engine, **load)
    return msgspec.structs.replace(described, model=model)


def test_an_encoder_keeps_nothing_and_computes_prompts_whole() -> None:
    result = run(encoder_of(input_tokens={"type": "uniform", "min_tokens": 10, "max_tokens": 8192}))
    assert result.setup.engine.enable_chunked_prefill is False
    assert result.setup.engine.enable_prefix_caching is False
    assert (result.memory.kv_cache_bytes, result.memory.kv_tokens) == (0, 0)
    assert result.steps["prefill_tokens"].sum() == result.requests["input_tokens"].sum()
    assert result.steps["decode_tokens"].sum() == 0
    page = str(run_document(result))
    assert "'kv_tokens': None" in page
    assert "KV cache" not in "\n".join(run_report(result).lead)


def test_a_longer_prompt_costs_an_encoder_its_square() -> None:
    def prefill_s(tokens: int) -> float:
        batch = StepBatch(prefill_tokens=tokens, prefill_pairs=tokens**2 / 2, sampled=1)
        shard = shard_of(resolve(encoder_of()))
        return sum(float(launch.op.flops) * launch.count for launch in attention_launches(shard, batch))

    assert prefill_s(4096) == pytest.approx(4 * prefill_s(2048))


@pytest.mark.parametrize("tokens", [512, 513])
def test_an_encoder_has_as_many_positions_as_its_table(tokens: int) -> None:
    described = encoder_of("BAAI/bge-large-en-v1.5", input_tokens=tokens, num_requests=2)
    if tokens == 512:
        assert run(described).requests["input_tokens"].tolist() == [512, 512]
    else:
        with pytest.raises(InputError, match=r"request 0 has 513 tokens; BAAI/bge-large-en-v1\.5 accepts 512"):
            run(described)


def test_an_encoder_makes_no_text() -> None:
    with pytest.raises(InputError, match="BAAI/bge-m3 is an encoder, which makes vectors and scores and no text"):
        run(encoder_of(task="generate", output_tokens=1))


def test_explain_shows_prompts_of_an_encoder_and_no_decoding() -> None:
    setup = resolve(encoder_of())
    names = [launch.name for launch in explain_step(setup, step_batch(0, 0, 512), PlainRoofline()).launches]
    assert "encoder_attention" in names
    assert "kv_cache_write" not in names
    with pytest.raises(InputError, match="is an encoder, which computes prompts and decodes nothing"):
        explain_step(setup, step_batch(4, 100, 0), PlainRoofline())
