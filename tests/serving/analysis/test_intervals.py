"""Where 80% of measurements are expected."""

import math

import msgspec
import pytest

from windtunnel.metrics.uncertainty import EXPERTS_SCALE, HALF_WIDTH, OPERATOR_ERROR, UNMEASURED
from windtunnel.serving.analysis.intervals import (
    disaggregated_spreads,
    headline,
    published_spreads,
    uncalibrated_spreads,
)
from windtunnel.serving.deployment import Pool
from windtunnel.serving.results import Result
from windtunnel.serving.shorthand import scenario
from windtunnel.serving.simulate import simulate


def served(model: str = "meta-llama/Llama-3.1-8B", **load: float) -> Result:
    whole = {"model": model, "device": "h100_sxm", "input_tokens": 200, "output_tokens": 40}
    return simulate(scenario(**whole | load, settings={"deployment.calibration": "none"}))  # type: ignore[arg-type]


def spread_of(metric: str) -> float:
    """The highest of four in five measured values over the lowest, of vLLM's runs without calibration."""
    spread = uncalibrated_spreads()["vllm"]["recorded"][metric]
    return spread.p90 / spread.p10


def test_an_open_loop_gives_what_arrives() -> None:
    """Far below capacity the last of 400 requests ends at most one latency later than predicted."""
    run = served(rate_per_s=2, num_requests=400)
    central, found = headline(run.summary), run.intervals
    assert found["throughput"].low < central["throughput"] < found["throughput"].high
    assert found["throughput"].high / found["throughput"].low < 1.01
    assert 1.0 <= found["e2e"].high / found["e2e"].low / spread_of("e2e") < 1.05


def test_an_overloaded_open_loop_gives_what_the_devices_do() -> None:
    run = served(rate_per_s=1e6, num_requests=400)
    found = run.intervals
    assert found["throughput"].high / found["throughput"].low == pytest.approx(
        found["e2e"].high / found["e2e"].low, rel=1e-3
    )


def test_a_closed_loop_has_the_spread_of_measured_ones() -> None:
    found = served(concurrency=8, num_requests=80).intervals
    assert 1.0 <= found["throughput"].high / found["throughput"].low / spread_of("throughput") < 1.05


def test_errors_of_mixtures_of_experts_are_larger() -> None:
    found = served("Qwen/Qwen3-30B-A3B", concurrency=8, num_requests=80).intervals["throughput"]
    scale = math.log(found.high / found.low) / math.log(spread_of("throughput"))
    assert EXPERTS_SCALE <= scale < 1.05 * EXPERTS_SCALE


def test_experts_on_silicon_that_nobody_measured_are_less_sure() -> None:
    """At least by what nobody's table says of them; dense models there are as sure as anywhere by the roofline."""

    def factor(model: str, device: str) -> float:
        whole = scenario(model=model, device=device, input_tokens=200, output_tokens=40, concurrency=8, num_requests=80)
        found = simulate(whole).intervals["tpot"]
        return math.log(found.high / found.low)

    experts, dense = "Qwen/Qwen3-30B-A3B", "meta-llama/Llama-3.1-8B"
    least = 2 * HALF_WIDTH * (OPERATOR_ERROR[UNMEASURED] - OPERATOR_ERROR["roofline"])
    assert factor(experts, "mi300x") > factor(experts, "h20") + 0.6 * least
    assert factor(dense, "mi300x") < factor(experts, "mi300x") - 0.6 * least


def test_settings_that_were_assumed_widen_what_was_measured_of_such_runs() -> None:
    whole = scenario(
        model="meta-llama/Llama-3.1-8B",
        device="h100_sxm",
        input_tokens=200,
        output_tokens=40,
        concurrency=8,
        num_requests=80,
    )
    deployment = msgspec.structs.replace(whole.deployment, settings_assumed=True)
    known, assumed = simulate(whole), simulate(msgspec.structs.replace(whole, deployment=deployment))
    assert headline(known.summary) == headline(assumed.summary)
    for name, one in known.intervals.items():
        other = assumed.intervals[name]
        assert other.high / other.low > 1.3 * one.high / one.low


@pytest.mark.full
def test_a_client_that_no_fitted_run_had_has_the_spread_of_published_runs() -> None:
    """One that is named; the client that stands where none is named has the intervals of fitted runs, but for TTFT."""

    def widths(client: str, calibration: str | None = None) -> dict[str, float]:
        whole = scenario(
            model="nvidia/Llama-3.3-70B-Instruct-FP8",
            device="h200_sxm",
            input_tokens=200,
            output_tokens=40,
            concurrency=8,
            num_requests=80,
            calibration=calibration,
            settings={"workload.client": client, "deployment.engine.version": "0.18.0"},
        )
        return {name: span.high / span.low for name, span in simulate(whole).intervals.items()}

    fitted, unnamed, other = widths("inferencex"), widths("python"), widths("guidellm")
    assert unnamed["tpot"] == pytest.approx(fitted["tpot"], rel=0.01)
    uncalibrated, others = widths("inferencex", "none"), widths("guidellm", "none")
    for metric, spread in published_spreads().items():
        assert 0.99 < other[metric] / (spread.p90 / spread.p10) < 1.1
        assert min(other[metric] / fitted[metric], others[metric] / uncalibrated[metric]) > 1.02


def test_separate_pools_have_the_spread_of_measured_ones() -> None:
    whole = scenario(
        model="meta-llama/Llama-3.1-8B", device="h100_sxm", input_tokens=200, output_tokens=40, concurrency=8
    )
    pools = tuple(Pool(name=role, role=role) for role in ("prefill", "decode"))
    apart = simulate(
        msgspec.structs.replace(whole, deployment=msgspec.structs.replace(whole.deployment, pools=pools))
    ).intervals
    for metric, spread in disaggregated_spreads()["vllm"].items():
        assert 1.0 <= apart[metric].high / apart[metric].low / (spread.p90 / spread.p10) < 1.05


def factors(run: Result) -> dict[str, tuple[float, float]]:
    """Ends of each metric's interval over its prediction."""
    central = headline(run.summary)
    return {name: (span.low / central[name], span.high / central[name]) for name, span in run.intervals.items()}


@pytest.mark.parametrize(
    "load", [{"concurrency": 1000, "num_requests": 2000, "output_tokens": 2}, {"concurrency": 1, "num_requests": 20}]
)
def test_no_request_ends_before_its_first_token(load: dict[str, int]) -> None:
    """Long queues and long prompts before two tokens: nearly all of the end-to-end time is TTFT."""
    found = served(**{"input_tokens": 2048, "output_tokens": 2, **load}).intervals
    assert found["ttft"].low <= found["e2e"].low
    assert found["ttft"].high <= found["e2e"].high


def test_queueing_is_as_unsure_as_ttft_and_leaves_throughput_alone() -> None:
    """The end-to-end time of requests that nearly always queue has TTFT's spread, and no metric a narrower one."""
    found = factors(served(concurrency=1000, num_requests=2000, input_tokens=2048, output_tokens=2))
    usual = factors(served(concurrency=8, num_requests=80))
    assert found["e2e"] == pytest.approx(found["ttft"], rel=0.03)
    assert found["throughput"] == pytest.approx(usual["throughput"], rel=0.02)
    assert found["ttft"] == pytest.approx(usual["ttft"], rel=0.02)


def test_a_request_that_is_mostly_prefill_is_as_sure_as_its_ttft() -> None:
    """Without queueing the end-to-end time takes TTFT's spread, and throughput that of the end-to-end time."""
    found = factors(served(concurrency=1, num_requests=20, input_tokens=2048, output_tokens=1))
    assert found["e2e"] == pytest.approx(found["ttft"], rel=1e-6)
    usual = factors(served(concurrency=1, num_requests=20, input_tokens=200, output_tokens=200))
    wider = [found["e2e"][end] / usual["e2e"][end] for end in (0, 1)]
    assert found["throughput"] == pytest.approx(
        (usual["throughput"][0] / wider[1], usual["throughput"][1] / wider[0]), rel=0.01
    )
