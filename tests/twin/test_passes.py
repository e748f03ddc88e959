"""Forward-pass metrics that a twin writes are read back with the prices that its steps had."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from live_twins import scenario_of
from windtunnel.calibration.steps.price import price_run
from windtunnel.calibration.steps.read import StepRun, read_steps
from windtunnel.errors import InputError
from windtunnel.serving.priced_deployments import PricedDeployments
from windtunnel.serving.scenario import resolve
from windtunnel.twin.clock import TwinClock
from windtunnel.twin.engine import Twin
from windtunnel.twin.live import prepare_live
from windtunnel.twin.start import ForwardPasses
from windtunnel.workload.generate.requests import generate


def recorded(path: Path, replicas: int = 1, **engine: Any) -> Twin:
    scenario = scenario_of({"replicas": replicas, "calibration": "none", "engine": engine}, num_requests=80)
    twin = Twin(prepare_live(scenario, max_requests=256), TwinClock(None), 256)
    passes, requests = ForwardPasses(twin, path), generate(scenario.workload, 0)

    async def send() -> None:
        for i, arrival_s in enumerate(requests.arrival_s.tolist()):
            twin.run_to(arrival_s)
            twin.clock.reached_s = arrival_s
            lengths = int(requests.input_tokens[i]), int(requests.output_tokens[i])
            twin.submit(lengths, lambda *_: None, range(i << 20, (i << 20) + sum(lengths)))
        twin.close()
        twin.run_to(1e9)

    asyncio.run(send())
    assert path.read_bytes().count(b"\n") == sum(passes._counters)  # before the end too
    passes.close()
    return twin


def test_the_steps_have_the_prices_of_the_twin(tmp_path: Path) -> None:
    twin = recorded(tmp_path / "steps.jsonl")
    steps = read_steps(tmp_path / "steps.jsonl")
    requests = generate(twin.deployment.scenario.workload, 0)
    assert steps["prefill_tokens"].sum() == requests.input_tokens.sum()
    assert steps["decode_requests"].sum() == (requests.output_tokens - 1).sum()
    setup = resolve(twin.deployment.scenario)
    priced = price_run(StepRun("twin", "m", steps, setup), PricedDeployments().estimator)
    assert priced.measured_s.size > 300
    assert np.median(np.abs(priced.errors)) < 0.002
    assert np.percentile(np.abs(priced.errors), 90) < 0.02


def test_every_replica_counts_its_own_steps(tmp_path: Path) -> None:
    recorded(tmp_path / "steps.jsonl", replicas=2)
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    for worker in ("0", "1"):
        counters = [line["counter_id"] for line in lines if line["worker_id"] == worker]
        assert counters == list(range(1, len(counters) + 1))
        assert len(counters) > 100


@pytest.mark.full
def test_a_request_whose_drafts_are_verified_counts_once(tmp_path: Path) -> None:
    speculative = {"method": "ngram", "num_draft_tokens": 3, "acceptance_fraction": 0.5}
    twin = recorded(tmp_path / "steps.jsonl", speculative=speculative)
    requests, steps = generate(twin.deployment.scenario.workload, 0), read_steps(tmp_path / "steps.jsonl")
    gained = 1 + 0.5 + 0.25 + 0.125
    assert steps["decode_requests"].sum() == pytest.approx((requests.output_tokens - 1).sum() / gained, rel=0.05)


def test_only_a_table_of_lines_is_written(tmp_path: Path) -> None:
    twin = Twin(prepare_live(scenario_of({}), max_requests=4), TwinClock(None), 4)
    with pytest.raises(InputError, match=r"must end in \.jsonl|--forward-passes is"):
        ForwardPasses(twin, tmp_path / "steps.csv")
    with pytest.raises(InputError, match="cannot be written"):
        ForwardPasses(twin, tmp_path / "nowhere" / "steps.jsonl")
