"""What a new request waits for in front of the engine: the tokens of those that are being streamed."""

import numpy as np
import pytest

from windtunnel.pricing.estimator import RooflineEstimator
from windtunnel.pricing.roofline import Roofline
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
