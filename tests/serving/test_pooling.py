"""Embeddings and scores: requests that end with their prompt, and structured output's work of the host."""

from typing import Any

import numpy as np
import pytest

from serving.test_simulate import PlainRoofline
from windtunnel.errors import InputError
from windtunnel.model.launches.forward import head_launches
from windtunnel.report.serving.run import run_report
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
