"""Capacity: the load that is found is the last of the grid that holds, wherever the search began."""

import itertools
import math
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import windtunnel as wt
from spaces_of_search import BASE, space
from windtunnel.errors import InputError
from windtunnel.metrics.limits import Slo, limit_of, limit_values, limits_from, limits_of, parse_limits, slo_fields
from windtunnel.report.numbers import number, percent
from windtunnel.report.search.capacity import _capacity_rows, capacity_document, verdict_of
from windtunnel.search.answers import scenario_of
from windtunnel.search.capacity.capacity import CHECKS, TOLERANCE, Capacities, _Search, capacities, capacity
from windtunnel.search.capacity.load import LEAST_STREAM, STEADY, at_load, lengthened, own_load, stream_of
from windtunnel.search.capacity.probe import MOST_GROWTH, STABILITY, Probe, growth, probe
from windtunnel.search.confidence import confidence_above, lower_bound, margin
from windtunnel.search.space.space import scenario_at
from windtunnel.search.store import Store
from windtunnel.search.study import search
from windtunnel.serving.priced_deployments import PricedDeployments
from windtunnel.serving.scenario import Scenario
from windtunnel.serving.simulate import simulate
from windtunnel.workload.arrivals import ClosedLoop
from windtunnel.workload.schema import Workload

LIMITS = parse_limits("ttft_p90=1s,tpot_p99=50ms")
CASES = list(product(["h100_sxm", "l40s"], [1, 2], [512, 8192], [16, 256], [0, 1]))[:20]


@pytest.mark.parametrize(
    "text",
    ["ttft_p90=1s,tpot_p99=50ms", "ttft_p90 <= 1s; tpot < 50ms", "p90_ttft<=1s,TPOT-p99:50ms", "ttft_p90≤1s tpot=50ms"],
)
def test_limits_are_read_as_people_write_them(text: str) -> None:
    assert parse_limits(text) == LIMITS
    assert slo_fields(text) == {"ttft_s": 1, "ttft_percentile": 90, "tpot_s": 0.05, "tpot_percentile": 99}
    assert list(limits_from(limit_values(text))) == list(LIMITS)


@pytest.mark.parametrize("text", ["ttft>1s", "ttft <", "1s<ttft", "p90=1s", "p90_foo=1s"])
def test_what_is_no_limit_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="slo"):
        parse_limits(text)


@pytest.mark.full
@pytest.mark.compiled
def test_capacity_is_within_a_percent_of_an_exhaustive_scan() -> None:
    """Twenty deployments; the scan walks up the loads in steps of half a percent until the first that fails."""
    priced, off = PricedDeployments(), []
    for device, tp, budget, seqs, seed in CASES:
        scenario = scenario_at(
            space(),
            {
                "deployment.device": device,
                "deployment.parallelism.tp": tp,
                "deployment.engine.max_num_batched_tokens": budget,
                "deployment.engine.max_num_seqs": seqs,
            },
        )
        stream = stream_of(scenario.workload, seed)
        server = priced.server(scenario, stream.unit)
        answer = capacity(server, stream, LIMITS)
        load = 0.8 * answer.load
        while probe(server, stream, load, LIMITS).passes:
            load *= 1.005
        off.append(answer.load / (load / 1.005) - 1)
    assert len(off) == 20
    # One scan's step and one of the grid apart at most.
    assert max(map(abs, off)) <= TOLERANCE + 0.005
    assert np.median(np.abs(off)) <= 0.01


@pytest.mark.compiled
def test_the_answer_does_not_depend_on_where_the_search_began() -> None:
    scenario = scenario_at(space(), {})
    stream = stream_of(scenario.workload, 0)
    server = PricedDeployments().server(scenario, stream.unit)
    loads = {capacity(server, stream, LIMITS, near=near).load for near in (None, 0.5, 3.0, 20.0, 300.0)}
    assert len(loads) == 1
    answer = capacity(server, stream, LIMITS)
    assert answer.passing is not None
    assert answer.beyond is not None
    assert answer.passing.passes
    assert not answer.beyond.passes
    assert answer.beyond.load / answer.passing.load == pytest.approx(1 + TOLERANCE)


def test_a_capped_rate_has_two_loads() -> None:
    capped = {"workload.arrivals": {"type": "closed_loop", "concurrency": 3, "rate_per_s": 2}}
    with pytest.raises(InputError, match="a rate and a concurrency, and its load could be either"):
        capacities(scenario_at(space(), capped), parse_limits("tpot_p90=15ms"), num_seeds=1)


@pytest.mark.full
@pytest.mark.compiled
def test_a_closed_loops_capacity_is_a_number_of_clients() -> None:
    closed = {"workload.arrivals": {"type": "closed_loop", "concurrency": 3}}
    answer = capacities(scenario_at(space(), closed), parse_limits("tpot_p90=15ms"), num_seeds=1)
    clients = answer.streams[0].load
    assert answer.is_closed
    assert clients == int(clients)
    passing = simulate(
        scenario_at(space(), {"workload.arrivals": {"type": "closed_loop", "concurrency": int(clients)}})
    )
    more = simulate(
        scenario_at(space(), {"workload.arrivals": {"type": "closed_loop", "concurrency": int(clients) + 1}})
    )
    assert passing.summary.tpot_s is not None
    assert more.summary.tpot_s is not None
    assert passing.summary.tpot_s.p90 <= 0.015 < more.summary.tpot_s.p90


@pytest.mark.full
@pytest.mark.compiled
def test_a_long_closed_loop_is_not_given_up_for_requests_that_are_not_sent_yet() -> None:
    closed = {"workload.trace": None, "workload.input_tokens": 512, "workload.output_tokens": 16}
    closed |= {"workload.arrivals": {"type": "closed_loop", "concurrency": 8}, "workload.num_requests": 6000}
    answer = capacities(scenario_at(space(), closed), parse_limits("ttft_p99=1s"), num_seeds=1)
    assert answer.load > 8


@pytest.mark.compiled
def test_without_limits_the_queue_alone_decides() -> None:
    answer = capacities(scenario_at(space(), {}), (), num_seeds=1).streams[0]
    assert answer.beyond is not None
    assert answer.beyond.limited_by == STABILITY
    assert answer.passing is not None
    assert answer.passing.served is not None
    assert growth(answer.passing.served) <= MOST_GROWTH


@pytest.mark.compiled
def test_limits_below_what_an_idle_deployment_takes_are_held_at_no_load() -> None:
    answer = capacities(scenario_at(space(), {}), parse_limits("ttft_p50=1us"), num_seeds=1).streams[0]
    assert answer.load == 0
    assert answer.passing is None


@pytest.mark.compiled
def test_a_queue_grows_by_what_arrives_beyond_what_is_served() -> None:
    """The closed form: with arrivals at x times the service rate, delay grows by x - 1 a second."""
    scenario = scenario_at(
        space(),
        {
            "workload.input_tokens": 512,
            "workload.output_tokens": 1,
            "workload.arrivals": {"type": "static", "rate_per_s": 1.0},
            "workload.num_requests": 2000,
            "deployment.engine.max_num_seqs": 1,
        },
    )
    stream = stream_of(scenario.workload, 0)
    server = PricedDeployments().server(scenario, stream.unit)
    served = probe(server, stream, 1000.0, ()).served
    assert served is not None
    rate = served.arrival_s.size / float((served.arrival_s + served.e2e_s).max())
    twice = probe(server, stream, 2 * rate, ()).served
    assert twice is not None
    assert growth(twice) == pytest.approx(1.0, rel=0.02)


BUSY: dict[str, Any] = {
    "workload.trace": None,
    "workload.arrivals": {"type": "poisson", "rate_per_s": 1},
    "workload.input_tokens": 1024,
    "workload.output_tokens": 256,
    "workload.num_requests": 300,
    "deployment.device": "h100_sxm",
}


@pytest.mark.full
@pytest.mark.compiled
def test_a_drawn_stream_is_lengthened_until_it_shows_a_steady_load() -> None:
    """300 requests last less than an end-to-end time at the load that is taken in as a burst, nearly twice this one."""
    few = capacities(scenario_at(space(), BUSY), LIMITS, num_seeds=3)
    many = capacities(scenario_at(space(), BUSY | {"workload.num_requests": 20_000}), LIMITS, num_seeds=1)
    assert few.burst is None
    assert few.load == pytest.approx(many.load, rel=0.06)
    assert few.at_least is not None
    document = capacity_document(few)
    assert document["burst"] is None
    assert str(verdict_of(document)[0]).startswith("Sustains ")
    assert all(stream.passing and stream.passing.served for stream in few.streams)


def text_of(capacities: Capacities) -> str:
    return " ".join(" ".join(str(part) for part in row) for row in _capacity_rows(capacities))


LONG_TAILED = wt.scenario(
    model="llama-3.1-8b", device="h100_sxm", rate_per_s=1.0, input_tokens="512-4096", output_tokens="64-512"
)


def sized(num_requests: int) -> Scenario:
    workload = msgspec.structs.replace(LONG_TAILED.workload, num_requests=num_requests)
    return msgspec.structs.replace(LONG_TAILED, workload=workload)


@pytest.mark.full
@pytest.mark.compiled
def test_a_thousand_requests_give_the_capacity_of_many() -> None:
    """Ten requests decide a 99th percentile of 1,000, and queues near capacity have not filled: 5% too much."""
    limits = parse_limits("ttft_p99=1s,tpot_p99=50ms")
    few, many = (capacities(sized(number), limits) for number in (1000, 16_000))
    assert few.load == pytest.approx(many.load, rel=0.03)
    assert few.num_requests == many.num_requests == 16_000
    assert (few.drift, many.drift) == (None, None)
    assert few.steady.change is not None
    assert abs(few.steady.change) <= STEADY
    facts = text_of(few)
    assert "16,000 in each stream, enough for a steady load: it changed by" in facts


@pytest.mark.compiled
def test_a_median_is_steady_with_fewer_requests_than_a_tail() -> None:
    found = capacities(sized(1000), parse_limits("tpot_p50=20ms"))
    assert (found.num_requests, found.drift) == (4000, None)


@pytest.mark.full
@pytest.mark.compiled
def test_a_load_that_still_moves_at_the_longest_stream_says_which_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lengthened, "__defaults__", (4000,))
    found = capacities(sized(1000), parse_limits("ttft_mean=300ms"))
    assert found.num_requests == 4000
    assert found.drift is not None
    assert found.drift < -STEADY
    document = capacity_document(found)
    assert (document["requests_per_stream"], document["drift"]) == (4000, found.drift)
    text = f"not steady yet: it fell by {percent(-found.drift)} when the streams were last lengthened, so expect less"
    assert str(verdict_of(document)[0]).endswith(f"It is {text}.")


@pytest.mark.full
@pytest.mark.compiled
def test_a_recorded_stream_stays_as_it_is_and_is_said_to() -> None:
    replay = wt.scenario(model="llama-3.1-8b", device="h100_sxm", trace="azure2023_conv")
    replay = msgspec.structs.replace(replay, workload=msgspec.structs.replace(replay.workload, num_requests=1000))
    found = capacities(replay, parse_limits("ttft_p99=1s"))
    assert (found.num_requests, found.drift) == (1000, None)
    assert "1,000, as given: only drawn requests are made more" in text_of(found)


@pytest.mark.compiled
def test_lengths_of_a_trace_are_lengthened_as_far_as_it_goes() -> None:
    """The trace of code has 8,819 rows: 8,000 requests and not 16,000."""
    drawn = wt.scenario(model="qwen3-8b", device="a100_sxm", rate_per_s=1.0, trace="azure2023_code")
    drawn = msgspec.structs.replace(drawn, workload=msgspec.structs.replace(drawn.workload, num_requests=1000))
    assert capacities(drawn, parse_limits("ttft_p99=2s"), num_seeds=1).num_requests == 8000


@pytest.mark.full
@pytest.mark.compiled
def test_a_burst_that_cannot_be_lengthened_is_called_one() -> None:
    curve = {"type": "curve", "points": [{"at_s": 0, "rate_per_s": 50}]}
    found = capacities(scenario_at(space(), BUSY | {"workload.arrivals": curve}), LIMITS)
    assert found.at_least is None
    document = capacity_document(found)
    assert document["burst"]["num_requests"] == 300
    needed = document["burst"]["num_requests_needed"]
    load = number(document["capacity"])
    text = (
        f"at most {load} requests/s in a burst of 300 requests; give --num-requests {needed} to know what it sustains."
    )
    assert verdict_of(document) == (f"Holds {text}", None)
    assert document["capacity_at_least"] is None
    again = capacities(
        scenario_at(space(), BUSY | {"workload.arrivals": curve, "workload.num_requests": needed}), LIMITS
    )
    assert again.burst is None
    assert again.load < 0.8 * found.load


@pytest.mark.compiled
def test_a_stream_that_is_over_too_soon_is_told_from_one_that_lasts() -> None:
    scenario = scenario_at(space(), {})
    stream = stream_of(scenario.workload, 0)
    server = PricedDeployments().server(scenario, stream.unit)
    slow, fast = (probe(server, stream, load, ()).served for load in (1.0, 1000.0))
    assert slow is not None
    assert fast is not None
    assert slow.stream_over_e2e > 100
    assert fast.stream_over_e2e < LEAST_STREAM


def test_a_load_only_stretches_the_requests_of_a_seed() -> None:
    scenario = scenario_at(space(), {})
    stream = stream_of(scenario.workload, 3)
    requests = stream_of(at_load(scenario.workload, 7.5, 1.0), 3).at(7.5)
    assert np.array_equal(stream.at(7.5).arrival_s, requests.arrival_s)
    assert np.array_equal(stream.at(7.5).input_tokens, stream.at(0.1).input_tokens)


@pytest.mark.parametrize(
    "arrivals",
    [
        {"type": "gamma", "rate_per_s": 4.0, "cv": 2.0},
        {"type": "static", "rate_per_s": 4.0},
        {"type": "burst", "num_per_burst": 5, "interval_s": 1.25},
        {"type": "curve", "points": [{"at_s": 0, "rate_per_s": 3.0}, {"at_s": 60, "rate_per_s": 5.0}]},
    ],
)
def test_any_open_loop_can_be_sent_twice_as_fast(arrivals: dict[str, object]) -> None:
    workload = scenario_at(space(), {"workload.arrivals": arrivals}).workload
    usual = own_load(workload)
    assert usual == pytest.approx(4.0, rel=0.3)
    assert own_load(at_load(workload, 2 * usual, usual)) == pytest.approx(2 * usual, rel=0.1)


def test_a_closed_loops_load_is_its_clients() -> None:
    loop = Workload(arrivals=ClosedLoop(concurrency=5), input_tokens=10, output_tokens=10, num_requests=50)
    assert own_load(loop) == 5
    assert at_load(loop, 7, 5).arrivals == ClosedLoop(concurrency=7)


def test_students_distribution_is_the_tables() -> None:
    """Quantiles of Student's t at 95%, as printed in tables (Abramowitz and Stegun, table 26.10)."""
    for dof, value in ((1, 6.314), (2, 2.920), (4, 2.132), (9, 1.833), (30, 1.697)):
        values = [float(each) for each in range(dof + 1)]
        assert margin(values) == pytest.approx(value * np.std(values, ddof=1) / math.sqrt(dof + 1), rel=2e-4)
    assert confidence_above([1.0, 2.0, 3.0, 4.0], [2.0, 1.0, 4.0, 3.0]) == 0.5
    above, below = (confidence_above(*pair) for pair in itertools.permutations(([1.0, 5.0, 3.0], [0.0, 2.0, 4.0])))
    assert above is not None
    assert below == pytest.approx(1 - above)


def test_bounds_and_comparisons() -> None:
    assert lower_bound([1.0]) is None
    assert lower_bound([2.0, 2.0]) == 2.0
    # Mean 2, deviation 1 of three: 2 - 2.920 / sqrt(3).
    assert lower_bound([1.0, 2.0, 3.0]) == pytest.approx(2 - 2.920 / math.sqrt(3), abs=1e-3)
    assert confidence_above([2.0, 3.0, 4.0], [1.0, 2.0, 3.0]) == 1.0
    assert confidence_above([1.0, 3.0], [3.0, 1.0]) == 0.5
    assert confidence_above([1.0, 1.0], [1.0, 1.0]) == 0.5


def test_limits_are_read() -> None:
    limits = parse_limits("ttft_p90=2s, tpot=50ms e2e_mean=1min")
    assert [limit.name for limit in limits] == ["ttft_p90", "tpot_p99", "e2e_mean"]
    assert [limit.most_s for limit in limits] == [2.0, 0.05, 60.0]
    assert limit_of("itl_p99", 0.2).title == "ITL p99 <= 200 ms"
    assert [limit.name for limit in limits_of(Slo(ttft_s=2.0))] == ["ttft_p99"]
    assert limits_of(None) == ()


def test_a_limit_that_lacks_its_unit_is_refused_where_it_cannot_be_in_seconds() -> None:
    for text in ("ttft=500", "tpot_p99=50", "e2e=5000"):
        with pytest.raises(InputError, match=r"which means \d+ s") as raised:
            parse_limits(text)
        assert str(raised.value.hint) == f"write the unit: {text.partition('=')[2]}ms or {text.partition('=')[2]}s"
    assert [limit.most_s for limit in parse_limits("ttft=2,tpot=0.05,e2e=120,ttft_p50=500s")] == [2, 0.05, 120, 500]


def test_a_load_that_fails_below_others_that_pass_ends_the_capacity() -> None:
    """Loads from 60 to 66 fail and those up to 81 pass, as where ten requests decide a 99th percentile."""

    def probe_at(load: float) -> Probe:
        passes = load < 60 or 66 < load < 81
        return Probe(load, -0.1 if passes else 0.1, "tpot_p99", None)

    hasty, careful = (_Search(probe_at, 0.005, False, checks) for checks in (0, CHECKS))
    assert hasty.run(75.0, 0.1, math.inf).load == pytest.approx(81, rel=0.006)
    answer = careful.run(75.0, 0.1, math.inf)
    assert 59.6 < answer.load < 60
    assert answer.beyond is not None
    assert not answer.beyond.passes


@pytest.mark.full
def test_a_replay_has_one_stream(tmp_path: Path) -> None:
    """Three equal streams would look like certainty."""
    (tmp_path / "trace.csv").write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0,30,3\n0.5,40,2\n1,20,4\n")
    served = {"model": "qwen2.5-0.5b", "device": "h100_sxm"}
    replay = wt.scenario(**served, settings={"workload.trace.path": str(tmp_path / "trace.csv")})
    drawn = wt.scenario(**served, rate_per_s=2.0, input_tokens=30, output_tokens=3, num_requests=3)
    assert [len(wt.capacity(each, "ttft_p90=500ms").streams) for each in (replay, drawn)] == [1, 3]


@pytest.mark.full
@pytest.mark.compiled
@pytest.mark.parametrize("load", ["capacity", "given"])
def test_rates_of_a_workload_of_sessions_count_requests(load: str) -> None:
    """An arrival begins a session of four requests; the search's figures are those of the same run simulated."""
    vary = {"deployment.device": ["h100_sxm", "h200_sxm"]}
    workload = BASE["workload"] | {"sessions": {"turns": 4, "think_s": 1.0}}
    searched = space(vary, load=load, objective="requests_per_usd", workload=workload)
    study = search(searched, Store(None, print))
    index = study.outcomes[0].ranking[0]
    answer = study.outcomes[0].evaluations[index]
    assert answer.figures["requests_per_s"] == pytest.approx(4 * answer.load)
    again = simulate(scenario_of(study, study.outcomes[0], index)).summary
    assert answer.figures["usd_per_million_output_tokens"] == pytest.approx(
        again.cost.usd_per_million_output_tokens, rel=0.3
    )


@pytest.mark.full
@pytest.mark.compiled
def test_a_capacity_in_sessions_is_called_one() -> None:
    sessions = {"workload.sessions": {"turns": 4, "think_s": 1.0}}
    found = capacities(scenario_at(space(), sessions), LIMITS, num_seeds=1)
    document = capacity_document(found)
    assert document["requests_per_s"] == pytest.approx(4 * document["capacity"])
    both = f"{number(document['capacity'])} sessions/s ({number(document['requests_per_s'])} requests/s)"
    assert verdict_of(document)[0].startswith(f"Sustains {both}; above it, ")
    assert "requests/s" not in dict(_capacity_rows(found))["capacity"]
