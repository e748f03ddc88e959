"""Images in a workload: tokens of the prompt, and the encoder's time in the step that begins them."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from windtunnel.errors import InputError
from windtunnel.serving.prepared import prepare
from windtunnel.serving.results import Result
from windtunnel.serving.scenario import Scenario, resolve, scenario_from
from windtunnel.serving.simulate import simulate
from windtunnel.workload.generate.requests import generate

pytestmark = [pytest.mark.loops, pytest.mark.interpreted]

IMAGE = {"width": 1024, "height": 768}
TOKENS = 768
"""Of that image in Qwen3-VL: 32 x 24 squares of 32 pixels."""


def scenario_of(model: str = "Qwen3-VL-8B-Instruct", deployment: dict[str, Any] | None = None, **load: Any) -> Scenario:
    workload = {"arrivals": {"type": "static", "rate_per_s": 0.5}, "input_tokens": 100, "output_tokens": 20}
    engine = {"device": "h100_sxm", "engine": {"name": "vllm", "version": "0.24.0", "enable_prefix_caching": False}}
    return scenario_from(
        {"model": model, "deployment": engine | (deployment or {}), "workload": workload | {"num_requests": 3} | load}
    )


def encoder_s(result: Result) -> float:
    """Return the time of the encoder of all steps."""
    return result.summary.time_fractions.get("encoder", 0.0) * float(result.steps["duration_s"].sum())


def test_tokens_of_images_are_part_of_the_prompt() -> None:
    scenario = scenario_of(images={"count": 2, **IMAGE}, videos={"frames": 20, "width": 640, "height": 360})
    requests = generate(scenario.workload, scenario.seed)
    np.testing.assert_array_equal(requests.input_tokens, 100 + 2 * TOKENS + 2_200)


def test_a_first_token_is_later_by_the_encoders_time() -> None:
    """Requests alone: the text of equal length takes the same steps, the first of them without an encoder."""
    text = simulate(scenario_of(input_tokens=100 + TOKENS))
    image = simulate(scenario_of(images=IMAGE))
    later_s = image.requests["ttft_s"] - text.requests["ttft_s"]
    assert later_s[0] > 2e-3
    np.testing.assert_allclose(later_s, later_s[0], rtol=1e-9)
    assert encoder_s(image) == pytest.approx(3 * later_s[0])
    tpot_s = [(each.requests["e2e_s"] - each.requests["ttft_s"]).tolist() for each in (image, text)]
    assert tpot_s[0] == pytest.approx(tpot_s[1])


def test_no_images_change_nothing() -> None:
    """A count of 0 gives the results of text, to the bit."""
    text, none = simulate(scenario_of()), simulate(scenario_of(images={"count": 0, **IMAGE}))
    for name in ("arrival_s", "first_token_s", "finish_s"):
        np.testing.assert_array_equal(text.requests[name], none.requests[name])
    assert text.summary == none.summary


def test_a_fraction_of_requests_has_images() -> None:
    count = {"type": "empirical", "values": [0, 1], "weights": [3, 1]}
    scenario = scenario_of(images={"count": count, **IMAGE}, num_requests=4_000)
    requests = generate(scenario.workload, scenario.seed)
    assert requests.media is not None
    num_images = (requests.media[..., 0] == 0).sum(axis=1)
    assert num_images.mean() == pytest.approx(0.25, abs=0.03)
    np.testing.assert_array_equal(requests.input_tokens, 100 + TOKENS * num_images)
    assert scenario_of(num_requests=9).workload.media_tokens is None


def test_chunks_encode_the_images_that_they_begin() -> None:
    """Chunks of 512 tokens begin four images in different steps; together as long as four images one by one."""
    engine = {"name": "vllm", "version": "0.24.0", "max_num_batched_tokens": 512, "enable_prefix_caching": False}
    deployment = {"device": "h100_sxm", "engine": engine}
    four = simulate(scenario_of(deployment=deployment, images={"count": 4, **IMAGE}, num_requests=1))
    one = simulate(scenario_of(deployment=deployment, images=IMAGE, num_requests=1))
    assert encoder_s(four) == pytest.approx(4 * encoder_s(one))


def test_a_pool_that_decodes_encodes_nothing() -> None:
    pools = [{"name": "p", "role": "prefill", "replicas": 1}, {"name": "d", "role": "decode", "replicas": 1}]
    split = simulate(scenario_of(deployment={"pools": pools}, images=IMAGE))
    fractions = {pool.name: pool.time_fractions.get("encoder", 0.0) for pool in split.summary.pools}
    assert fractions["p"] > 0.02
    assert fractions["d"] == 0.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "Llama-3.1-8B"}, "Llama-3.1-8B has no vision tower"),
        ({"model": "moonshotai/Kimi-K3"}, "rule by which images become tokens is not known"),
        ({"sessions": {"turns": 2, "max_context_tokens": 9000}}, "counts text alone"),
        ({"images": {"width": 512}}, "either width and height, or sizes"),
        ({"images": {**IMAGE, "sizes": [{"width": 512, "height": 512}]}}, "either width and height, or sizes"),
        ({"images": {**IMAGE, "alpha": 1.0}}, "give distinct too"),
        ({"images": {"sizes": [{"width": 9, "height": 9}], "tokens_per_image": 4}}, "leave one of them out"),
        ({"images": {**IMAGE, "depth": 3}}, "depth"),
        ({"videos": {"width": 10, "height": 10}}, "either frames or seconds"),
        ({"images": {**IMAGE, "count": -1}}, "count is -1; from 0"),
        ({"videos": {"width": 64, "height": 64, "frames": 4, "count": -1}}, "count is -1; from 0"),
        ({"images": {**IMAGE, "max_pixels": 0}}, "max_pixels is 0; at least 1"),
        ({"images": {**IMAGE, "min_pixels": 9, "max_pixels": 8}}, "min_pixels is 9, above max_pixels, which is 8"),
    ],
)
def test_what_cannot_be_simulated_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        scenario_of(**{"images": IMAGE} | changes)


def test_given_tokens_stand_in_for_an_unknown_rule() -> None:
    scenario = scenario_of("moonshotai/Kimi-K3", images={**IMAGE, "tokens_per_image": 300})
    assert scenario.workload.media_tokens == (300, 0)


def test_schedulers_that_know_no_images_refuse_them() -> None:
    engine = {"name": "vllm", "version": "0.24.0", "scheduler": "orca"}
    with pytest.raises(InputError, match="has no vision tower in its steps"):
        simulate(scenario_of(deployment={"device": "h100_sxm", "engine": engine}, images=IMAGE))


def test_a_model_that_is_not_known_leaves_images_without_tokens() -> None:
    workload = msgspec.structs.replace(scenario_of(images=IMAGE).workload, media_tokens=None)
    with pytest.raises(InputError, match="become tokens by the rule of a model"):
        generate(workload, 0)


SIZES = [{"width": 1024, "height": 768, "weight": 3}, {"width": 512, "height": 512}]
"""768 and 256 tokens."""


def test_sizes_come_in_proportion_to_their_weights() -> None:
    requests = generate(scenario_of(images={"count": 2, "sizes": SIZES}, num_requests=4_000).workload, 0)
    assert requests.media is not None
    kinds = requests.media[..., 0]
    assert (kinds == 0).mean() == pytest.approx(0.75, abs=0.02)
    tokens = np.array([768, 256])[kinds]
    np.testing.assert_array_equal(requests.input_tokens, 100 + tokens.sum(axis=1))
    np.testing.assert_array_equal(requests.media[:, 0, 2], 100)
    np.testing.assert_array_equal(requests.media[:, 1, 2], 100 + tokens[:, 0])


def test_one_of_many_images_is_as_popular_as_alpha_says() -> None:
    requests = generate(scenario_of(images={"distinct": 3, "alpha": 1.0, **IMAGE}, num_requests=6_000).workload, 0)
    assert requests.media is not None
    shares = np.bincount(requests.media[:, 0, 1]) / 6_000
    np.testing.assert_allclose(shares, np.array([6, 3, 2]) / 11, atol=0.02)


def test_images_of_a_turn_stay_in_context() -> None:
    load = {"sessions": {"turns": 3}, "images": IMAGE, "num_requests": 3, "input_tokens": 100, "output_tokens": 20}
    requests = generate(scenario_of(**load).workload, 0)
    assert requests.media is not None
    assert requests.prefixes is not None
    np.testing.assert_array_equal(requests.input_tokens, [868, 2 * 868 + 20, 3 * 868 + 40])
    begins = [100, 868 + 20 + 100, 2 * (868 + 20) + 100]
    np.testing.assert_array_equal(requests.media[2, :, 2], begins)
    np.testing.assert_array_equal(requests.media[1, :, 2], [*begins[:2], -1])
    assert requests.prefixes.node_tokens[requests.prefixes.request_node].tolist() == [868] * 3


def test_prompts_that_begin_with_the_same_image_share_it() -> None:
    """Three requests, one image: the cache has its 768 tokens, in whole blocks, for the second and the third."""
    caching = {"name": "vllm", "version": "0.24.0", "enable_prefix_caching": True}
    deployment = {"device": "h100_sxm", "engine": caching}
    images = {"distinct": 1, "position": "start", **IMAGE}
    result = simulate(scenario_of(deployment=deployment, images=images))
    assert result.requests["cached_tokens"].tolist() == [0, 768, 768]
    behind = simulate(scenario_of(deployment=deployment, images={"distinct": 1, **IMAGE}))
    assert behind.requests["cached_tokens"].tolist() == [0, 0, 0]


def test_an_image_that_comes_again_is_encoded_once() -> None:
    one, other = (simulate(scenario_of(images={**IMAGE, "distinct": n})) for n in (1, 10**6))
    assert encoder_s(other) == pytest.approx(3 * encoder_s(one))


def test_a_small_encoder_cache_forgets_the_oldest_image() -> None:
    """Images a, b, c, a, b, c, ... in a cache for two of them: every one is encoded again."""
    engine = {"name": "vllm", "version": "0.24.0", "enable_prefix_caching": False}

    def encoded_s(tokens: int) -> float:
        deployment = {"device": "h100_sxm", "engine": {**engine, "encoder_cache_tokens": tokens}}
        scenario = scenario_of(deployment=deployment, images={**IMAGE, "distinct": 3}, num_requests=9)
        requests = generate(scenario.workload, 0)
        assert requests.media is not None
        requests.media[:, 0, 1] = np.arange(9) % 3
        return float(prepare(scenario, requests).serve(requests).encoded_s.sum())  # type: ignore[union-attr]

    assert encoded_s(2 * TOKENS) == pytest.approx(3 * encoded_s(3 * TOKENS))


def test_a_budget_of_embeddings_spreads_images_over_steps() -> None:
    """Four images at once: one call encodes them, or four steps one each."""
    engine = {"name": "vllm", "version": "0.24.0", "enable_prefix_caching": False}

    def steps(**limits: int) -> int:
        deployment = {"device": "h100_sxm", "engine": engine | limits}
        result = simulate(scenario_of(deployment=deployment, images={"count": 4, **IMAGE}, num_requests=1))
        return int((result.steps["prefill_tokens"] > 0).sum())

    assert steps() == 1
    assert steps(max_num_encoder_input_tokens=TOKENS) == 4


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"encoder_cache_tokens": 700}, "encoder_cache_tokens is 700, and an image or video of the workload has 768"),
        ({"max_num_encoder_input_tokens": 767}, "max_num_encoder_input_tokens is 767"),
        ({"name": "sglang", "version": "0.5.14", "encoder_cache_tokens": 4000}, "are vLLM's"),
    ],
)
def test_impossible_encoder_caches_are_refused(engine: dict[str, Any], message: str) -> None:
    base = {"name": "vllm", "version": "0.24.0"}
    with pytest.raises(InputError, match=message):
        simulate(scenario_of(deployment={"device": "h100_sxm", "engine": base | engine}, images=IMAGE))


SGLANG = {"name": "sglang", "version": "0.5.14", "enable_prefix_caching": False}
BYTES_PER_TOKEN = 4096 * 4 * 2
"""Of Qwen3-VL-8B: the width of its language model, once for each of four mergers, in bf16."""


def sglang_s(engine: dict[str, Any], numbers: list[int] | None = None, **load: Any) -> float:
    """Return the time of the encoder for requests with the images `numbers`, one each."""
    deployment = {"device": "h100_sxm", "engine": SGLANG | engine}
    images = {"images": {**IMAGE, "distinct": 3}} | load
    scenario = scenario_of(deployment=deployment, num_requests=len(numbers) if numbers else 3, **images)
    requests = generate(scenario.workload, 0)
    if numbers is not None:
        assert requests.media is not None
        requests.media[:, 0, 1] = numbers
    return float(prepare(scenario, requests).serve(requests).encoded_s.sum())  # type: ignore[union-attr]


def test_sglang_keeps_the_embeddings_that_it_used_last() -> None:
    """100 MiB by default are 3,200 tokens, four images; a cache of two keeps those used last, not those made last."""
    one_s = sglang_s({}, [0])
    assert sglang_s({}, [0, 1, 2, 3] * 3) == pytest.approx(4 * one_s)
    assert sglang_s({}, [0, 1, 2, 3, 4] * 3) == pytest.approx(15 * one_s)
    two = {"encoder_cache_bytes": 2 * TOKENS * BYTES_PER_TOKEN}
    assert sglang_s(two, [0, 1, 0, 2, 0, 1]) == pytest.approx(4 * one_s)
    less = {"encoder_cache_bytes": 2 * TOKENS * BYTES_PER_TOKEN - 1}
    assert sglang_s(less, [0, 1, 0, 0]) == pytest.approx(3 * one_s)
    assert sglang_s({"encoder_cache_bytes": 0}, [0, 0, 0]) == pytest.approx(3 * one_s)


def test_sglang_looked_all_images_of_a_request_up_together() -> None:
    """Two images a request, one of them in both: by themselves three are encoded, together four."""
    images = {"images": {"count": 2, "distinct": 3, **IMAGE}}

    def encoded_s(unit: str) -> float:
        deployment = {"device": "h100_sxm", "engine": SGLANG | {"encoder_cache_unit": unit}}
        scenario = scenario_of(deployment=deployment, num_requests=3, **images)
        requests = generate(scenario.workload, 0)
        assert requests.media is not None
        requests.media[..., 1] = [[0, 1], [1, 2], [0, 1]]
        return float(prepare(scenario, requests).serve(requests).encoded_s.sum())  # type: ignore[union-attr]

    pair_s, one_s = encoded_s("request") / 2, sglang_s({}, [0])
    assert one_s < pair_s
    assert encoded_s("image") == pytest.approx(pair_s + one_s)


def test_sglang_encoded_all_images_with_the_first_chunk() -> None:
    """Four images of 768 tokens in chunks of 512: looked up by themselves, a step encodes those that it begins."""

    def encoding_steps(unit: str) -> int:
        engine = SGLANG | {"encoder_cache_unit": unit, "max_num_batched_tokens": 512, "encoder_cache_bytes": 1 << 30}
        deployment = {"device": "h100_sxm", "engine": engine}
        images = {"count": 4, **IMAGE}
        image = simulate(scenario_of(deployment=deployment, images=images, num_requests=1))
        text = simulate(scenario_of(deployment=deployment, input_tokens=100 + 4 * TOKENS, num_requests=1))
        longer_s = image.steps["duration_s"] - text.steps["duration_s"]
        return int((longer_s > 1e-3).sum())

    assert encoding_steps("request") == 1
    assert encoding_steps("image") == 4


@pytest.mark.parametrize(("version", "unit"), [("0.5.9", "request"), ("0.5.10", "image"), ("0.5.14", "image")])
def test_sglang_looks_each_image_up_from_0_5_10_on(version: str, unit: str) -> None:
    engine = resolve(scenario_of(deployment={"device": "h100_sxm", "engine": SGLANG | {"version": version}})).engine
    assert (engine.encoder_cache_unit, engine.encoder_cache_bytes) == (unit, 100 << 20)


@pytest.mark.parametrize("setting", [{"encoder_cache_bytes": 1 << 20}, {"encoder_cache_unit": "image"}])
def test_a_cache_of_bytes_is_sglangs(setting: dict[str, Any]) -> None:
    engine = {"name": "vllm", "version": "0.24.0"} | setting
    with pytest.raises(InputError, match="encoder_cache_bytes and encoder_cache_unit are SGLang's"):
        simulate(scenario_of(deployment={"device": "h100_sxm", "engine": engine}, images=IMAGE))


def test_images_of_a_trace_are_simulated_as_drawn_ones(tmp_path: Path) -> None:
    """The same requests from a file give the same run to the bit: tokens, prices, encoder cache and prefix cache."""
    caching = {"name": "vllm", "version": "0.24.0", "enable_prefix_caching": True, "max_num_batched_tokens": 600}
    deployment = {"device": "h100_sxm", "engine": caching}
    images = {"count": 2, "sizes": SIZES, "distinct": 20, "position": "start"}
    drawn = scenario_of(deployment=deployment, images=images, num_requests=12)
    requests = generate(drawn.workload, drawn.seed)
    assert requests.media is not None
    path = tmp_path / "trace.jsonl"
    with path.open("w") as file:
        for arrival_s, row in zip(requests.arrival_s.tolist(), requests.media.tolist(), strict=True):
            sizes = [(SIZES[kind]["width"], SIZES[kind]["height"], f"image {number}") for kind, number, _ in row]
            request = {"arrival_s": arrival_s, "input_tokens": 100, "output_tokens": 20, "images": sizes}
            file.write(json.dumps(request) + "\n")
    recorded = {"trace": {"path": str(path)}, "images": {"position": "start"}}
    read = scenario_from({"model": "Qwen3-VL-8B-Instruct", "deployment": deployment, "workload": recorded})
    one, other = simulate(drawn), simulate(read)
    assert encoder_s(one) > 0
    for name in ("arrival_s", "first_token_s", "finish_s", "cached_tokens"):
        np.testing.assert_array_equal(one.requests[name], other.requests[name])
    assert encoder_s(one) == encoder_s(other)
    assert other.trace_remarks[0].startswith("12 of 12 requests have 24 images of 2 sizes; ")


def test_images_of_a_trace_need_an_engine_that_encodes(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"arrival_s": 0, "input_tokens": 9, "output_tokens": 2, "images": [[64, 64]]}\n')
    engine = {"name": "vllm", "version": "0.24.0", "scheduler": "orca"}
    deployment = {"device": "h100_sxm", "engine": engine}
    raw = {"model": "Qwen3-VL-8B-Instruct", "deployment": deployment, "workload": {"trace": {"path": str(path)}}}
    with pytest.raises(InputError, match="has no vision tower in its steps"):
        simulate(scenario_from(raw))
