import math
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from windtunnel.errors import InputError
from windtunnel.schema import decode, encode
from windtunnel.workload.arrivals import Burst, ClosedLoop, Gamma, Poisson
from windtunnel.workload.lengths import Empirical, Fixed, Zipf
from windtunnel.workload.schema import Trace, Workload

SHAPES = {
    "poisson, a bare integer and a distribution": """
        arrivals: {type: poisson, rate_per_s: 6.5}
        input_tokens: 1024
        output_tokens: {type: uniform, min_tokens: 819, max_tokens: 1024}
        num_requests: 1000
    """,
    "units": """
        arrivals: {type: gamma, rate_per_s: 390/min, cv: 2}
        input_tokens: {type: lognormal, median_tokens: 600, sigma: 1.2, max_tokens: 32768}
        output_tokens: {type: fixed, tokens: 1}
        duration_s: 10min
    """,
    "closed loop": """
        arrivals: {type: closed_loop, concurrency: 64, num_warmup_requests: 128}
        input_tokens: {type: normal, mean_tokens: 1000, std_tokens: 100}
        output_tokens: {type: empirical, values: [1, 2, 3], weights: [1, 1, 0.5]}
        num_requests: 640
    """,
    "bursts": """
        arrivals: {type: burst, num_per_burst: 8, interval_s: 2}
        input_tokens: {type: zipf, alpha: 1.1, min_tokens: 1, max_tokens: 4096}
        output_tokens: {type: empirical, path: lengths.csv, column: generated}
        duration_s: 60
    """,
    "a trace": "{trace: {path: requests.csv}}",
    "a trace with its own names, faster": """
        trace:
          path: requests.jsonl
          columns: {arrival: at, arrival_unit: ms, input_tokens: prompt, output_tokens: generated}
          start_s: 600
          time_scale: 0.5
        num_requests: 10
    """,
    "a day": """
        arrivals: {type: curve, period_s: 24h, cv: 1.5, points: [{at_s: 4h, rate_per_s: 2}, {at_s: 9h, rate_per_s: 9}]}
        total_tokens: {type: uniform, min_tokens: 1024, max_tokens: 4096}
        input_to_output_ratio: 20
        duration_s: 2d
    """,
    "agents": """
        arrivals: {type: recorded, path: times.csv, column: at, unit: ms}
        input_tokens: 100
        output_tokens: 50
        sessions:
          turns: {type: uniform, least: 1, most: 4}
          think_s: {type: lognormal, median_s: 20s, sigma: 1}
          followup_tokens: 30
          tool_calls:
            per_turn: {type: empirical, values: [0, 1, 5], weights: [5, 3, 1]}
            run_s: {type: uniform, min_s: 100ms, max_s: 5s}
            output_tokens: {type: lognormal, median_tokens: 500, sigma: 1}
          max_context_tokens: 32768
        shared_prompts: {tokens: 2000, count: 8, alpha: 1}
    """,
    "tenants": """
        arrivals: {type: poisson, rate_per_s: 5}
        duration_s: 1h
        tenants:
          - {name: chat, share: 3, trace: {path: a.csv, order: resampled}, slo: {ttft_s: 500ms}}
          - name: batch
            priority: 1
            arrivals: {type: burst, num_per_burst: 9, interval_s: 60}
            input_tokens: 9
            output_tokens: 9
    """,
    "tenants of a trace": """
        trace: {path: a.csv, columns: {tenant: customer, session: chat, hash_ids: blocks}}
        tenants: [{name: acme, slo: {e2e_s: 10s}}]
    """,
    "clients": """
        clients: {path: m-small.tar.xz, rate_per_s: 20, start_s: 1d, num_clients: 5, without_lengths: leave_out}
        num_requests: 1000
    """,
    "the lengths of a trace under another load": """
        trace: {path: requests.csv}
        arrivals: {type: static, rate_per_s: 3}
    """,
}


@pytest.mark.parametrize("text", SHAPES.values(), ids=SHAPES)
def test_every_documented_shape_decodes_and_survives_the_way_back(text: str) -> None:
    workload = decode(yaml.safe_load(text), Workload)
    assert decode(encode(workload), Workload) == workload


def test_what_is_read_is_what_was_written() -> None:
    workload = decode(yaml.safe_load(SHAPES["units"]), Workload)
    assert workload.arrivals == Gamma(rate_per_s=6.5, cv=2)
    assert workload.duration_s == 600
    assert workload.output_tokens == Fixed(tokens=1)
    assert encode(Workload(arrivals=Burst(), input_tokens=7, output_tokens=8, num_requests=9)) == {
        "arrivals": {"type": "burst"},
        "input_tokens": 7,
        "output_tokens": 8,
        "num_requests": 9,
    }


POISSON = {"type": "poisson", "rate_per_s": 1}
WHOLE: dict[str, Any] = {"arrivals": POISSON, "input_tokens": 10, "output_tokens": 10, "num_requests": 10}
WHOLE_OF_TENANTS: dict[str, Any] = {"arrivals": POISSON, "num_requests": 10}
TENANT: dict[str, Any] = {"name": "a", "share": 1, "input_tokens": 10, "output_tokens": 10}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "negative rate": (WHOLE | {"arrivals": {"type": "poisson", "rate_per_s": -2}}, r"rate_per_s.*-2.*\$\.arrivals"),
    "zero rate": (WHOLE | {"arrivals": {"type": "static", "rate_per_s": 0}}, "rate_per_s is 0; more than 0"),
    "NaN rate": (WHOLE | {"arrivals": {"type": "poisson", "rate_per_s": math.nan}}, r"\$\.arrivals\.rate_per_s is nan"),
    "rate that overflows": (WHOLE | {"arrivals": {"type": "poisson", "rate_per_s": 1e-320}}, "from 1e-09 to"),
    "wrong unit": (WHOLE | {"arrivals": {"type": "poisson", "rate_per_s": "5 ms"}}, "unit 'ms'"),
    "cv of zero": (WHOLE | {"arrivals": {"type": "gamma", "rate_per_s": 1, "cv": 0}}, "cv is 0; from 0.001"),
    "half a burst": (WHOLE | {"arrivals": {"type": "burst", "num_per_burst": 4}}, "must be given together"),
    "no slots": (WHOLE | {"arrivals": {"type": "closed_loop", "concurrency": 0}}, "concurrency is 0; from 1"),
    "unknown arrivals": (WHOLE | {"arrivals": {"type": "poison", "rate_per_s": 1}}, "'poison'"),
    "unknown key": (WHOLE | {"arrivals": {"type": "poisson", "rate_per_m": 1}}, r"unknown key \$\.arrivals\.rate_per_"),
    "no tokens": (WHOLE | {"input_tokens": 0}, "input_tokens is 0; from 1"),
    "too many tokens": (WHOLE | {"output_tokens": 2**40}, "output_tokens is 1099511627776; from 1 to"),
    "bounds crossed": (
        WHOLE | {"input_tokens": {"type": "uniform", "min_tokens": 9, "max_tokens": 8}},
        r"min_tokens is 9, above max_tokens, which is 8 at \$\.input_tokens",
    ),
    "negative sigma": (WHOLE | {"input_tokens": {"type": "lognormal", "median_tokens": 9, "sigma": -1}}, "sigma"),
    "zipf too wide": (
        WHOLE | {"input_tokens": {"type": "zipf", "alpha": 1, "min_tokens": 1, "max_tokens": 2**30}},
        "must be below",
    ),
    "empirical of nothing": (WHOLE | {"input_tokens": {"type": "empirical"}}, "either values or path"),
    "weights too few": (
        WHOLE | {"input_tokens": {"type": "empirical", "values": [1, 2], "weights": [1]}},
        "2 values but 1 weights",
    ),
    "weights of zero": (
        WHOLE | {"input_tokens": {"type": "empirical", "values": [1, 2], "weights": [0, 0]}},
        "sum of weights",
    ),
    "no requests": (WHOLE | {"num_requests": 0}, "num_requests is 0; from 1"),
    "no end": ({key: WHOLE[key] for key in ("arrivals", "input_tokens", "output_tokens")}, "num_requests is missing"),
    "no lengths": ({"arrivals": POISSON, "num_requests": 3}, "input_tokens is missing; give input_tokens or a trace"),
    "closed loop by time": (
        {"arrivals": {"type": "closed_loop", "concurrency": 4}, "input_tokens": 1, "output_tokens": 1, "duration_s": 9},
        "duration_s cannot end a closed loop",
    ),
    "gaps without a rate": (
        WHOLE | {"arrivals": {"type": "closed_loop", "concurrency": 4, "cv": 2}},
        "cv is 2.0, but without rate_per_s",
    ),
    "trace without use": (WHOLE | {"trace": {"path": "a.csv"}}, "the trace is not used"),
    "scale without use": (
        {"arrivals": POISSON, "trace": {"path": "a.csv", "time_scale": 2}},
        "time_scale have no effect",
    ),
    "scale of zero": ({"trace": {"path": "a.csv", "time_scale": 0}}, "time_scale is 0.*; more than 0"),
    "a curve that ends at zero": (
        WHOLE | {"arrivals": {"type": "curve", "points": [{"at_s": 0, "rate_per_s": 1}, {"at_s": 9, "rate_per_s": 0}]}},
        "the rate stays at 0, so that the requests never end",
    ),
    "a rate that is hardly above zero": (
        WHOLE
        | {"arrivals": {"type": "curve", "points": [{"at_s": 0, "rate_per_s": 1e-300}, {"at_s": 9, "rate_per_s": 1}]}},
        "a rate of 1e-300 a second is plainly 0: give 0, or at least 1e-09",
    ),
    "points out of order": (
        WHOLE | {"arrivals": {"type": "curve", "points": [{"at_s": 9, "rate_per_s": 1}, {"at_s": 9, "rate_per_s": 2}]}},
        "in order of at_s, no two at the same time",
    ),
    "a point after the period": (
        WHOLE | {"arrivals": {"type": "curve", "period_s": 5, "points": [{"at_s": 9, "rate_per_s": 1}]}},
        "the point at 9 s is not within the period of 5 s",
    ),
    "a curve of nothing": (WHOLE | {"arrivals": {"type": "curve", "points": []}}, "points is empty"),
    "half a split": (WHOLE | {"total_tokens": 100}, "total_tokens and input_to_output_ratio must be given together"),
    "lengths twice": (
        WHOLE | {"total_tokens": 100, "input_to_output_ratio": 2},
        "total_tokens stands in place of input_tokens and output_tokens",
    ),
    "sessions of a trace": (
        {"arrivals": POISSON, "trace": {"path": "a.csv"}, "sessions": {"turns": 2}},
        "sessions draw the lengths of every turn",
    ),
    "no turns": (WHOLE | {"sessions": {"turns": 0}}, "turns is .*; from 1 to"),
    "turns from zero": (
        WHOLE | {"sessions": {"turns": {"type": "geometric", "mean": 2, "least": 0}}},
        "turns is .*; from 1 to",
    ),
    "a mean below the least": (
        WHOLE | {"sessions": {"turns": {"type": "geometric", "mean": 0.5}}},
        "mean is .*; from 1 to",
    ),
    "negative think time": (
        WHOLE | {"sessions": {"turns": 2, "think_s": -1}},
        "think_s is .*; at least 0",
    ),
    "think time without a unit": (WHOLE | {"sessions": {"turns": 2, "think_s": "5 apples"}}, "has the unit 'apples'"),
    "no prompts": (WHOLE | {"shared_prompts": {"tokens": 10, "count": 0}}, "count is 0; from 1"),
    "a tenant with two sources": (
        WHOLE_OF_TENANTS | {"tenants": [{**TENANT, "arrivals": POISSON}]},
        "tenant 'a' has both a share and arrivals",
    ),
    "a tenant without a source": (
        WHOLE_OF_TENANTS | {"tenants": [TENANT, {"name": "b", "input_tokens": 1, "output_tokens": 1}]},
        "tenant 'b' has neither a share nor arrivals",
    ),
    "two tenants of one name": (WHOLE_OF_TENANTS | {"tenants": [TENANT, TENANT]}, "two tenants are called 'a'"),
    "a share of nothing": (
        {"num_requests": 9, "tenants": [TENANT]},
        "tenant 'a' has a share, but the workload has no arrivals to share",
    ),
    "lengths beside tenants": (
        WHOLE_OF_TENANTS | {"input_tokens": 5, "tenants": [TENANT]},
        "with tenants, input_tokens belongs to each of them",
    ),
    "arrivals that nobody shares": (
        WHOLE_OF_TENANTS | {"tenants": [{"name": "a", "arrivals": POISSON, "input_tokens": 1, "output_tokens": 1}]},
        "no tenant has a share of the workload's arrivals",
    ),
    "a label without a trace": (WHOLE | {"tenants": [{"name": "a"}]}, "tenant 'a' has neither a share nor arrivals"),
    "a replay in another order": ({"trace": {"path": "a.csv", "order": "shuffled"}}, "cannot keep its times"),
    "clients and arrivals": (WHOLE | {"clients": {"path": "x"}}, "clients give times and lengths; arrivals cannot"),
    "shortened to nothing": ({"trace": {"path": "a.csv", "max_tokens": 1}}, "max_tokens is 1; from 2"),
    "text for a number": (WHOLE | {"num_requests": "many"}, r"\$\.num_requests is 'many'; a whole number is needed"),
}  # fmt: skip


@pytest.mark.parametrize(("raw", "message"), BAD.values(), ids=BAD)
def test_what_cannot_be_is_refused_in_one_sentence(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as refused:
        decode(raw, Workload)
    assert "\n" not in refused.value.message


def test_hints_name_what_is_near() -> None:
    with pytest.raises(InputError) as refused:
        decode(WHOLE | {"arrivals": {"type": "poison", "rate_per_s": 1}}, Workload)
    assert refused.value.hint == "did you mean poisson?"


@pytest.mark.parametrize(
    "make",
    [
        lambda: Poisson(rate_per_s=math.inf),
        lambda: ClosedLoop(concurrency=1, num_warmup_requests=-1),
        lambda: Zipf(alpha=math.nan, min_tokens=1, max_tokens=2),
        lambda: Empirical(values=(0,)),
        lambda: Trace(path="a.csv", start_s=-1),
    ],
)
def test_structs_made_in_python_are_checked_too(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="needed"):
        make()
