"""A pool of encoders before the pools that serve tokens."""

from typing import Any

import numpy as np
import pytest

from windtunnel.errors import InputError
from windtunnel.serving.prepared import prepare
from windtunnel.serving.scenario import Scenario, scenario_from
from windtunnel.serving.simulate import simulate
from windtunnel.workload.generate.requests import generate

pytestmark = [pytest.mark.loops, pytest.mark.interpreted]

IMAGE = {"width": 1024, "height": 768}
TOKENS = 768
EMBEDDING_BYTES = 4096 * 4 * 2
"""Qwen3-VL-8B: hidden size 4,096, of the last layer and three earlier ones, in bf16."""
ENGINE = {"name": "vllm", "version": "0.24.0", "enable_prefix_caching": False}


def scenario_of(encoders: int = 2, pools: Any = None, load: Any = None, **deployment: Any) -> Scenario:
    workload = {"arrivals": {"type": "poisson", "rate_per_s": 40}, "input_tokens": 100, "output_tokens": 20}
    count = {"type": "empirical", "values": [0, 1, 3]}
    serving = pools or [{"name": "serve", "role": "both", "replicas": 2}]
    encode = [{"name": "encode", "role": "encode", "replicas": encoders}] if encoders else []
    return scenario_from(
        {
            "model": "Qwen3-VL-8B-Instruct",
            "deployment": {"device": "h100_sxm", "engine": ENGINE, "pools": encode + serving} | deployment,
            "workload": workload | {"num_requests": 60, "images": {"count": count, **IMAGE}} | (load or {}),
        }
    )


def expected_ready_s(scenario: Scenario) -> np.ndarray:
    """The encoders' queue, image by image: a replica takes what has come, within the budget, in its order."""
    requests = generate(scenario.workload, scenario.seed)
    pool = prepare(scenario, requests).encoder
    assert pool is not None
    assert requests.media is not None
    images = [(i, number) for i, row in enumerate(requests.media) for kind, number, _ in row if kind >= 0]
    ready_s = requests.arrival_s.tolist()
    for replica in range(pool.pool.replicas):
        mine, free_s, link_s = images[replica :: pool.pool.replicas], 0.0, 0.0
        kept: list[int] = []
        while mine:
            start_s = max(free_s, requests.arrival_s[mine[0][0]])
            batch, new = [], []
            for i, number in mine:
                if requests.arrival_s[i] > start_s:
                    break
                known = number in kept or number in [each for _, each in batch]
                if not known and batch and (len(new) + 1) * TOKENS > pool.budget_tokens:
                    break
                batch.append((i, number))
                new += [] if known else [number]
            mine = mine[len(batch) :]
            free_s = start_s + pool.step_s([0] * len(new), len(batch))
            for i, number in batch:
                kept = [each for each in kept if each != number] + [number]
                kept = kept[-(pool.cache_tokens // TOKENS) :] if pool.cache_tokens else []
                link_s = max(link_s, free_s) + TOKENS * EMBEDDING_BYTES / pool.link_bytes_per_s
                ready_s[i] = max(ready_s[i], link_s + pool.latency_s)
    return np.array(ready_s)


@pytest.mark.parametrize("distinct", [None, 7])
@pytest.mark.parametrize("limits", [{}, {"max_num_encoder_input_tokens": 2 * TOKENS, "encoder_cache_tokens": 3000}])
def test_embeddings_come_when_a_plain_queue_says(distinct: int | None, limits: dict[str, int]) -> None:
    images = {"count": {"type": "empirical", "values": [0, 1, 3]}, "distinct": distinct, **IMAGE}
    scenario = scenario_of(engine=ENGINE | limits, load={"images": images})
    requests = generate(scenario.workload, scenario.seed)
    encoder = prepare(scenario, requests).encoder
    assert encoder is not None
    run = encoder.run(requests)
    np.testing.assert_allclose(run.ready_s, expected_ready_s(scenario), rtol=1e-12)
    assert requests.media is not None
    num_images = int((requests.media[..., 0] >= 0).sum())
    assert (run.num_sent, run.sent_bytes) == (num_images, num_images * TOKENS * EMBEDDING_BYTES)
    if distinct is None:
        assert run.num_encoded == num_images
    else:
        assert 0 < run.num_encoded < num_images


def test_requests_are_served_when_their_embeddings_have_come() -> None:
    scenario = scenario_of()
    requests = generate(scenario.workload, scenario.seed)
    result = simulate(scenario)
    ready_s = expected_ready_s(scenario)
    np.testing.assert_array_equal(result.requests["arrival_s"], requests.arrival_s)
    assert (result.requests["scheduled_s"] >= ready_s).all()
    assert (ready_s > requests.arrival_s).sum() == (requests.media[:, 0, 0] == 0).sum()  # type: ignore[index]
    assert int(result.steps["prefill_tokens"].sum()) == requests.input_tokens.sum()
    encode, serve = result.summary.pools
    assert encode.images is not None
    assert (encode.num_devices, serve.num_devices, result.summary.num_devices) == (2, 2, 4)
    assert 0 < encode.utilisation.busy_fraction < 1
    assert "encoder" not in serve.time_fractions
    assert result.summary.cost is not None
    assert result.summary.cost.usd_per_hour == pytest.approx(2 * (serve.usd_per_hour or 0.0))


def test_a_single_request_waits_for_encoder_link_and_prefill() -> None:
    """TTFT with encoders is that of the text of equal length, and the encoder's step and the link's time more."""
    alone = {"num_requests": 1, "images": IMAGE}
    scenario = scenario_of(load=alone)
    text = scenario_of(encoders=0, load={"num_requests": 1, "images": None, "input_tokens": 100 + TOKENS})
    delay_s = simulate(scenario).requests["ttft_s"][0] - simulate(text).requests["ttft_s"][0]
    encoder = prepare(scenario, generate(scenario.workload, 0)).encoder
    assert encoder is not None
    sent_s = TOKENS * EMBEDDING_BYTES / encoder.link_bytes_per_s
    assert delay_s == pytest.approx(encoder.step_s([0], 1) + sent_s + encoder.latency_s)


def test_prefill_and_decode_pools_come_behind_encoders() -> None:
    pools = [{"name": "p", "role": "prefill"}, {"name": "d", "role": "decode"}]
    result = simulate(scenario_of(pools=pools))
    assert [pool.name for pool in result.summary.pools] == ["encode", "p", "d"]
    assert np.isfinite(result.requests["finish_s"]).all()
    assert result.scenario.deployment.pools[0].role == "encode"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"load": {"images": None}}, "encodes images, and the workload has none"),
        ({"load": {"arrivals": {"type": "closed_loop", "concurrency": 4}}}, "before the answers are known"),
        ({"load": {"sessions": {"turns": 2}}}, "before the answers are known"),
        ({"pools": [{"name": "other", "role": "encode"}]}, "no pool serves tokens"),
        (
            {"pools": [{"name": "other", "role": "encode"}, {"name": "serve", "role": "both"}]},
            "two pools have role encode",
        ),
        ({"faults": {"device_mtbf_s": "10h", "mttr_s": 60}, "start_s": 9}, "encoders that fail"),
    ],
)
def test_what_encoders_cannot_do_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        simulate(scenario_of(**changes))
