from typing import Any

import pytest

import windtunnel as wt
from windtunnel.errors import InputError
from windtunnel.serving.long_run import simulate_long
from windtunnel.serving.scenario import scenario_from

RAW: dict[str, Any] = {
    "model": "meta-llama/Llama-3.1-8B",
    "deployment": {"device": "h100_sxm", "replicas": 3},
    "slo": {"ttft_s": 0.06},
    "workload": {
        "arrivals": {
            "type": "curve",
            "points": [{"at_s": 0, "rate_per_s": 10}, {"at_s": 30, "rate_per_s": 60}, {"at_s": 60, "rate_per_s": 5}],
        },
        "duration_s": 60,
        "tenants": [
            {"name": "chat", "share": 2, "input_tokens": 300, "output_tokens": 80, "slo": {"ttft_s": 0.05}},
            {
                "name": "code",
                "share": 1,
                "input_tokens": {"type": "lognormal", "median_tokens": 900, "sigma": 1, "max_tokens": 8000},
                "output_tokens": 20,
            },
        ],
    },
}


@pytest.mark.parametrize("num_threads", [1, 2])
def test_replicas_alone_are_what_they_are_together(num_threads: int) -> None:
    scenario = scenario_from(RAW)
    together = wt.simulate(scenario)
    long = simulate_long(scenario, num_threads=num_threads).summary
    short = together.summary
    assert long.checks.passed
    assert long.num_requests == short.num_requests
    assert long.num_steps == short.batches.num_steps
    assert long.busy_fraction == pytest.approx(short.utilisation.busy_fraction, rel=1e-9)
    for name in ("ttft_s", "tpot_s", "e2e_s", "queueing_s", "prefill_s", "itl_max_s"):
        for point in ("mean", "p50", "p99", "max"):
            expected = getattr(getattr(short, name), point)
            # A 32-bit float has 24 bits.
            assert getattr(getattr(long, name), point) == pytest.approx(expected, rel=1e-6), (name, point)
    assert long.goodput is not None
    assert short.goodput is not None
    assert long.goodput.fraction == pytest.approx(short.goodput.fraction, abs=1e-3)
    for name, tenant in short.tenants.items():
        assert tenant.goodput is not None
        assert long.tenants[name].fraction == pytest.approx(tenant.goodput.fraction, abs=1e-3)
    assert long.power is not None
    assert short.power is not None
    assert long.power.energy_j == pytest.approx(short.power.energy_j, rel=1e-9)


def test_replicas_without_a_request_draw_what_idle_ones_do() -> None:
    scenario = wt.scenario(
        model="llama-3.1-8b", device="h100_sxm", replicas=5, rate_per_s=1, input_tokens=300, output_tokens=30,
        num_requests=3, settings={"deployment.router": "round_robin"},
    )  # fmt: skip
    long, short = simulate_long(scenario).summary.power, wt.simulate(scenario).summary.power
    assert long is not None
    assert short is not None
    assert long.energy_j == pytest.approx(short.energy_j, rel=1e-9)


REFUSED = {
    "a router that looks": ({"deployment": {**RAW["deployment"], "router": "least_kv"}}, "the router least_kv looks"),
    "pools": (
        {
            "deployment": {
                "device": "h100_sxm",
                "pools": [{"name": "p", "role": "prefill"}, {"name": "d", "role": "decode"}],
            }
        },
        "pools hand requests over",
    ),
    "a scheduler that walks": (
        {"deployment": {**RAW["deployment"], "engine": {"scheduler": "orca"}}},
        "a long run cannot use the scheduler orca",
    ),
    "speculation": (
        {
            "deployment": {
                **RAW["deployment"],
                "engine": {"speculative": {"method": "ngram", "num_draft_tokens": 1, "acceptance_fraction": 0.5}},
            }
        },
        "a long run cannot decode speculatively",
    ),
    "a closed loop": (
        {
            "workload": {
                "arrivals": {"type": "closed_loop", "concurrency": 4},
                "input_tokens": 9,
                "output_tokens": 9,
                "num_requests": 9,
            }
        },
        "a closed loop joins all replicas",
    ),
    "sessions": (
        {
            "workload": {
                "arrivals": {"type": "poisson", "rate_per_s": 4},
                "input_tokens": 9,
                "output_tokens": 9,
                "num_requests": 9,
                "sessions": {"turns": 2},
            }
        },
        "sessions and shared prompts need all replicas at once",
    ),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_replicas_that_depend_on_each_other_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        simulate_long(scenario_from({**RAW, **changes}))
