"""Where 80% of measurements are expected."""

import pytest

from windtunnel.engine.intervals import headline
from windtunnel.engine.run import simulate
from windtunnel.engine.serving import Result
from windtunnel.spec.shorthand import scenario


def served(**load: float) -> Result:
    whole = {"model": "meta-llama/Llama-3.1-8B", "device": "h100_sxm", "input_tokens": 200, "output_tokens": 40}
    return simulate(scenario(**whole, **load))  # type: ignore[arg-type]


def test_an_open_loop_gives_what_arrives() -> None:
    """Far below capacity the last of 400 requests ends at most one latency later than predicted."""
    run = served(rate_per_s=2, num_requests=400)
    central, found = headline(run.summary), run.intervals
    assert found["throughput"].low < central["throughput"] < found["throughput"].high
    assert found["throughput"].high / found["throughput"].low < 1.01
    assert found["e2e"].high / found["e2e"].low > 1.3


def test_an_overloaded_open_loop_gives_what_the_devices_do() -> None:
    run = served(rate_per_s=1e6, num_requests=400)
    found = run.intervals
    assert found["throughput"].high / found["throughput"].low == pytest.approx(
        found["e2e"].high / found["e2e"].low, rel=1e-3
    )


def test_a_closed_loop_has_the_spread_of_measured_ones() -> None:
    found = served(concurrency=8, num_requests=80).intervals
    assert found["throughput"].high / found["throughput"].low > 1.3
