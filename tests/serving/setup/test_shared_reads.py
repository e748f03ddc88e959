"""Decode attention over KV that requests share: where the L2 cache's rate is known, and where it counts."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from windtunnel import catalog
from windtunnel.model.parallelism import Parallelism
from windtunnel.model.precision import Precision
from windtunnel.model.shape import Shard
from windtunnel.schema import encode
from windtunnel.serving.prepared import prepare
from windtunnel.serving.scenario import Scenario, scenario_from
from windtunnel.serving.setup.step_prices import repeated_share
from windtunnel.serving.simulate import simulate
from windtunnel.workload.generate.requests import generate

ENGINE = {"name": "vllm", "version": "0.24.0"}


def scenario(deployment: dict[str, Any]) -> Scenario:
    workload = {
        "arrivals": {"type": "closed_loop", "concurrency": 16},
        "shared_prompts": {"tokens": 4096, "count": 2},
        "num_requests": 32,
        "input_tokens": 100,
        "output_tokens": 20,
    }
    raw = {"model": "llama-3.1-8b", "deployment": {"device": "h100_sxm", **deployment}, "workload": workload}
    return scenario_from(raw, "", None)


def test_reading_again_takes_what_memory_takes_over_the_cache() -> None:
    h100, shard = catalog.device("h100_sxm"), Shard(catalog.model("llama-3.1-8b"), Precision(), Parallelism())
    assert repeated_share(h100, shard) == pytest.approx(0.87 * 3350 / 5400)
    assert repeated_share(msgspec.structs.replace(h100, l2_bytes_per_s=1e12), shard) == 1.0
    assert repeated_share(catalog.device("b200_sxm"), shard) == 1.0


@pytest.mark.parametrize("model", ["deepseek-v3", "gpt-oss-20b"])
def test_latent_attention_and_windows_take_nothing_off(model: str) -> None:
    shard = Shard(catalog.model(model), Precision(), Parallelism())
    assert repeated_share(catalog.device("h100_sxm"), shard) == 1.0


def test_pools_that_hand_kv_over_take_nothing_off() -> None:
    assert all(share < 0.6 for share in shares_of(scenario({"engine": ENGINE})))
    pools = [{"name": role, "role": role, "engine": ENGINE} for role in ("prefill", "decode")]
    assert shares_of(scenario({"pools": pools})) == [1.0, 1.0]


def shares_of(scenario: Scenario) -> list[float]:
    prepared = prepare(scenario, generate(scenario.workload, scenario.seed))
    return [pool.plan.cost.repeated_share for pool in prepared.pools]


@pytest.mark.full
@pytest.mark.compiled
def test_steps_of_requests_that_share_a_beginning_are_shorter(tmp_path: Path) -> None:
    device = encode(catalog.device("h100_sxm"))
    del device["l2_bytes_per_s"]
    (tmp_path / "h100.yaml").write_text(json.dumps(device))  # which is YAML too
    known, unknown = (
        float(np.nanmean(simulate(scenario({"engine": ENGINE, "device": name})).requests["tpot_s"]))
        for name in ("h100_sxm", str(tmp_path / "h100.yaml"))
    )
    assert known < 0.9 * unknown
