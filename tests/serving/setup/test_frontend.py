"""What a new request waits for in front of the engine: the tokens of those that are being streamed."""

import numpy as np
import pytest

from windtunnel.pricing.estimator import RooflineEstimator
from windtunnel.pricing.roofline import Roofline
from windtunnel.serving.results import Result
from windtunnel.serving.scenario import resolve
from windtunnel.serving.setup.frontend import streams
from windtunnel.serving.shorthand import scenario
from windtunnel.serving.simulate import simulate


def test_streams_are_counted_replica_by_replica() -> None:
    records = {"first_token_s": np.array([1.0, 2.0, 2.5, 4.0, 2.2]), "finish_s": np.array([3.0, 9.0, 8.0, 5.0, 9.0])}
    replica = np.array([0, 0, 0, 0, 1])
    # The first sees nobody, the second the first, the third both; the first has ended when the fourth begins.
    assert streams(records, replica, 2).tolist() == [0.0, 1.0, 2.0, 2.0, 0.0]


def test_a_request_waits_for_a_token_of_every_other_stream() -> None:
    def ttft_s(stream_s: float) -> float:
        made = scenario(
            model="llama-3.1-8b",
            device="h100_sxm",
            input_tokens=128,
            output_tokens=64,
            concurrency=16,
            num_requests=64,
            calibration="none",
            settings={"deployment.engine.host.stream_s": stream_s},
        )
        setup = resolve(made)
        return simulate(made, RooflineEstimator(Roofline(setup.device, setup.node))).summary.ttft_s.mean

    assert ttft_s(1e-3) - ttft_s(0.0) == pytest.approx(15e-3, rel=0.25)


def served(client: str, model: str = "qwen3-8b", version: str = "0.11.0", **load: float) -> Result:
    made = scenario(
        model=model,
        device="h100_sxm",
        input_tokens=128,
        output_tokens=4,
        calibration="none",
        settings={"deployment.engine.version": version, "workload.client": client},
        **load,  # type: ignore[arg-type]
    )
    setup = resolve(made)
    return simulate(made, RooflineEstimator(Roofline(setup.device, setup.node)))


@pytest.mark.full
def test_chats_of_a_burst_wait_until_one_process_has_read_the_templates_of_all() -> None:
    """vLLM 0.11.0 parses a chat's template at each request, 10 ms; 0.11.1 does not, and gpt-oss has none."""

    def later_s(**change: str) -> float:
        prompts, chats = (
            served(client, concurrency=200, num_requests=200, **change).requests for client in ("vllm", "vllm-chat")
        )
        late_s = chats["ttft_s"] - prompts["ttft_s"]
        assert late_s == pytest.approx(late_s[0])
        assert chats["arrival_s"].max() == 0.0
        assert chats["finish_s"].max() - prompts["finish_s"].max() == pytest.approx(max(late_s[0] - 10e-3, 0.0))
        return float(late_s[0])

    assert later_s() == pytest.approx(200 * 10e-3)
    assert later_s(version="0.11.1") == 0.0
    assert later_s(model="gpt-oss-20b") == 0.0


def test_chats_of_a_closed_loop_wait_for_others_only_as_it_starts() -> None:
    prompts, chats = (served(client, concurrency=8, num_requests=64).requests for client in ("vllm", "vllm-chat"))
    late_s = chats["ttft_s"] - prompts["ttft_s"]
    assert late_s[:8] == pytest.approx(8 * 10e-3)
    assert np.median(late_s[8:]) == pytest.approx(10e-3, rel=0.5)


def test_chats_at_a_rate_wait_for_those_that_are_not_done() -> None:
    """100 a second are as many as one process reads; 50 rarely meet one another."""
    waits_s = []
    for rate_per_s in (50.0, 100.0):
        load = {"rate_per_s": rate_per_s, "num_requests": 300}
        prompts, chats = (served(client, **load).requests for client in ("vllm", "vllm-chat"))
        assert chats["arrival_s"] == pytest.approx(prompts["arrival_s"])
        waits_s.append(float(np.mean(chats["ttft_s"] - prompts["ttft_s"])) - 10e-3)
    assert 2e-3 < waits_s[0] < 10e-3 < 3 * waits_s[0] < waits_s[1]
