"""An explained step is the step that the simulator takes."""

import re

import msgspec
import pytest

import windtunnel as wt
from windtunnel.report.report import Facts
from windtunnel.report.serving.step import step_report
from windtunnel.serving.explain import Explanation, explain_step, step_batch
from windtunnel.serving.results import Result
from windtunnel.serving.setup.encoder import encoder_prices
from windtunnel.serving.setup.estimators import estimator_for, shard_of
from windtunnel.workload.media import Images

MODELS = ["meta-llama/Llama-3.1-8B", "openai/gpt-oss-20b", "Qwen/Qwen3-30B-A3B", "deepseek-ai/DeepSeek-V2-Lite"]


def simulated(model: str, **options: object) -> Result:
    return wt.simulate(wt.scenario(model=model, device="h100_sxm", **options))  # type: ignore[arg-type]


def explained(model: str, *counts: int) -> Explanation:
    scenario = wt.scenario(
        model=model, device="h100_sxm", concurrency=1, input_tokens=1, output_tokens=1, num_requests=1
    )
    return explain_step(wt.resolve(scenario), step_batch(*counts))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("concurrency", [3, 61])
def test_a_decode_step_takes_what_it_takes_in_a_simulation(model: str, concurrency: int) -> None:
    """Within 1%: the simulator interpolates attention between grid points, here it is priced where it is."""
    run = simulated(model, concurrency=concurrency, input_tokens=512, output_tokens=64, num_requests=concurrency)
    steps = run.steps
    row = next(
        row
        for row in range(len(steps))
        if steps["prefill_tokens"][row] == 0 and steps["decode_tokens"][row] == concurrency
    )
    context = steps["context_tokens"][row] / concurrency + 1
    step_s = steps["duration_s"][row] / steps["num_steps"][row]
    # A row may hold several steps; its mean lies within 1% of the first.
    assert explained(model, concurrency, int(context)).step_s == pytest.approx(step_s, rel=0.015)


@pytest.mark.full
@pytest.mark.parametrize(
    ("drafting", "num_drafting"),
    [({"method": "eagle"}, 3), ({"method": "ngram"}, 0), ({"method": "draft_model", "draft_model": MODELS[0]}, 3)],
)
def test_a_step_that_verifies_drafts_takes_what_it_takes_in_a_simulation(
    drafting: dict[str, str], num_drafting: int
) -> None:
    speculative = {**drafting, "num_draft_tokens": 3, "acceptance_fraction": 0.6}
    load = {"concurrency": 61, "input_tokens": 512, "output_tokens": 64, "num_requests": 61}
    settings = {"deployment.engine.speculative": speculative}
    scenario = wt.scenario(model=MODELS[0], device="h100_sxm", settings=settings, **load)  # type: ignore[arg-type]
    run = wt.simulate(scenario)
    steps = run.steps
    row = next(row for row in range(len(steps)) if steps["decode_tokens"][row] == 61 and not steps["num_prefills"][row])
    step = explain_step(wt.resolve(scenario), step_batch(61, int(steps["context_tokens"][row] / 61 + 1)))
    assert step.step_s == pytest.approx(steps["duration_s"][row] / steps["num_steps"][row], rel=0.015)
    assert step.num_computed_tokens == 248
    counts = {launch.name: launch.count for launch in step.launches}
    assert counts.get("draft_lm_head", 0) == num_drafting
    assert step.memory == run.memory
    report = step_report(step)
    said = "61 decoding requests of 516 tokens, each with 3 draft tokens to verify, padded to the CUDA graph of 248"
    assert said in str(report.lead[-1])
    facts = next(block for block in report.sections[0].blocks if isinstance(block, Facts))
    assert f"{61 * (1 + 0.6 + 0.6**2 + 0.6**3) / step.step_s:,.0f} tokens/s" in dict(facts.rows)["step"]


def test_verification_computes_every_query_and_reads_the_cache_once() -> None:
    """Few requests with many drafts over long contexts: arithmetic at the peak rate takes longer than the cache."""
    steps = []
    for num_draft_tokens in (1, 63):
        speculative = {"method": "ngram", "num_draft_tokens": num_draft_tokens, "acceptance_fraction": 0.1}
        scenario = wt.scenario(
            model=MODELS[3],
            device="h100_sxm",
            concurrency=1,
            input_tokens=1,
            output_tokens=1,
            settings={"deployment.engine.speculative": speculative},
        )
        launches = explain_step(wt.resolve(scenario), step_batch(16, 16000)).launches
        steps.append(next(launch for launch in launches if launch.name == "latent_attention_decode"))
    few, many = steps
    assert (many.flops, many.num_bytes) == (32 * few.flops, few.num_bytes)
    assert (many.bound_by, many.flops_over_peak) == ("compute", pytest.approx(1.0))
    assert many.total_s > 2 * few.total_s


def test_work_is_that_of_one_pipeline_stage() -> None:
    """Half of the layers with their weights and KV cache, read at the same rate as by one device."""
    works = []
    for stages in (1, 2):
        scenario = wt.scenario(
            model=MODELS[0],
            device="h100_sxm",
            concurrency=1,
            input_tokens=1,
            output_tokens=1,
            settings={"deployment.parallelism.pp": stages},
        )
        [section, *_] = step_report(explain_step(wt.resolve(scenario), step_batch(64, 2048))).sections
        facts = next(block for block in section.blocks if isinstance(block, Facts))
        works.append(dict(facts.rows)["work"])
    assert re.search(r"30\.\d GiB of memory .* on each device$", str(works[0]))
    assert re.search(r"15\.\d GiB of memory .* on each device, the mean of 2 pipeline stages$", str(works[1]))


@pytest.mark.parametrize("model", MODELS)
def test_a_prefill_step_takes_what_it_takes_in_a_simulation(model: str) -> None:
    run = simulated(model, concurrency=1, input_tokens=2048, output_tokens=2, num_requests=1)
    assert run.steps["prefill_tokens"][0] == 2048
    step = explained(model, 0, 0, 2048)
    assert step.step_s == pytest.approx(run.steps["duration_s"][0], rel=0.02)


@pytest.mark.parametrize("version", ["0.11.1", "0.18.0", "0.24.0"])
def test_a_sampled_decode_step_takes_what_it_takes_in_a_simulation(version: str) -> None:
    options = {"model": MODELS[0], "device": "h100_sxm", "engine_version": version, "temperature": 0.8, "top_p": 0.95}
    scenario = wt.scenario(**options, concurrency=61, input_tokens=512, output_tokens=64, num_requests=61)
    steps = wt.simulate(scenario).steps
    row = next(row for row in range(len(steps)) if steps["decode_tokens"][row] == 61 and not steps["num_prefills"][row])
    context = int(steps["context_tokens"][row] / 61 + 1)
    explanation = explain_step(wt.resolve(scenario), step_batch(61, context))
    assert explanation.step_s == pytest.approx(steps["duration_s"][row] / steps["num_steps"][row], rel=0.015)
    by_family = explanation.seconds_by(lambda launch: launch.family)
    names = {launch.name for launch in explanation.launches if launch.family == "sampling"}
    assert names == {"token_filter", "sample"}
    assert 0.01 < by_family["sampling"] / explanation.device_s < 0.2


def test_only_decode_steps_are_padded() -> None:
    assert explained(MODELS[0], 61, 512).num_computed_tokens == 64
    assert explained(MODELS[0], 61, 512, 100).num_computed_tokens == 161


def test_a_chunk_after_cached_tokens_sees_them() -> None:
    batch = step_batch(prefill_tokens=100, prefill_context_tokens=400)
    assert batch.prefill_pairs == 100 * 400 + 100 * 100 / 2
    assert (batch.num_tokens, batch.sampled) == (100, 1)


def test_layers_that_share_an_operator_share_a_row() -> None:
    """gpt-oss alternates windowed and full attention; the rest of its layers is the same."""
    launches = explained("openai/gpt-oss-20b", 8, 1024).launches
    places = [(launch.name, launch.op) for launch in launches]
    assert len(set(places)) == len(places)
    counts = {launch.name: launch.count for launch in launches}
    assert counts["qkv_proj"] == 24
    assert counts["attention_decode"] == counts["window_attention_decode"] == 12


def test_nothing_beats_the_device_by_much() -> None:
    """Achieved rates beyond the peaks would mean that work is counted wrong; small operands may come from the cache."""
    for launch in explained(MODELS[0], 64, 4096, 4096).launches:
        assert launch.flops_over_peak <= 1.05, launch.name
        assert launch.bytes_over_peak <= 1.2, launch.name


def test_the_encoder_of_an_image_is_explained() -> None:
    """Beside the step, whose own figures it does not change; its operators and the host add up as in the simulator."""
    load = {"concurrency": 1, "input_tokens": 1, "output_tokens": 1, "num_requests": 1}
    scenario = wt.scenario(model="Qwen3-VL-8B-Instruct", device="h100_sxm", **load)  # type: ignore[arg-type]
    workload = msgspec.structs.replace(scenario.workload, images=Images(width=1024, height=768))
    setup, batch = wt.resolve(scenario), step_batch(4, 100)
    text, image = explain_step(setup, batch), explain_step(setup, batch, workload=workload)
    assert (text.encoder, text.step_s) == ((), image.step_s)
    assert {"vision_attention", "vision_qkv_proj", "vision_merger_out"} <= {launch.name for launch in image.encoder}
    prices = encoder_prices(estimator_for(setup), shard_of(setup), setup.engine, workload)
    assert image.encoder_s == prices[0, 1] > sum(launch.each_s for launch in image.encoder)
    assert prices[1].sum() == 0.0


@pytest.mark.parametrize(("device", "most"), [("h100_sxm", 1.05), ("b200_sxm", 1.4)])
def test_prompts_over_an_fp8_cache_take_kernels_that_were_measured_for_their_heads(device: str, most: float) -> None:
    """SGLang's FA3 reads an fp8 cache with fp8 queries; with bf16 queries only heads of 256 and 512 were measured."""
    seconds = []
    for kv_cache in ("bf16", "fp8"):
        scenario = wt.scenario(
            model="Qwen/Qwen3-8B",
            device=device,
            engine="sglang",
            kv_cache_dtype=kv_cache,
            concurrency=1,
            input_tokens=1,
            output_tokens=1,
        )
        launches = explain_step(wt.resolve(scenario), step_batch(prefill_tokens=4000)).launches
        seconds += [launch.each_s for launch in launches if launch.name == "attention_prefill"]
    assert seconds[1] < most * seconds[0]
