import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.metrics.limits import Slo
from windtunnel.metrics.records import REQUEST_COLUMNS, STEP_COLUMNS, Table, request_table
from windtunnel.metrics.summary import (
    DeploymentSize,
    DeviceTerms,
    ServiceLimits,
    Summary,
    distribution,
    goodput,
    itl_distribution,
    queue_growth,
    summarise,
    weighted_distribution,
)
from windtunnel.schema import plain

FRACTIONS = {"compute": 0.2, "memory": 0.5, "communication": 0.2, "host": 0.1}


def requests(num_warmup: int = 0, **changes: Any) -> Table:
    """Four requests of 2, 5, 1 and 11 output tokens in a span of ten seconds."""
    engine = {
        "arrival_s": np.array([0.0, 1.0, 2.0, 3.0]),
        "scheduled_s": np.array([0.0, 1.5, 2.0, 4.0]),
        "first_token_s": np.array([1.0, 2.0, 3.0, 5.0]),
        "finish_s": np.array([2.0, 4.0, 3.0, 10.0]),
        "input_tokens": np.array([100, 200, 300, 400]),
        "output_tokens": np.array([2, 5, 1, 11]),
        "priority": np.zeros(4, np.int64),
        "num_preemptions": np.array([0, 1, 0, 2]),
    }
    return request_table(engine | changes, np.zeros(4, np.int64), 0.0, num_warmup)


def steps(**columns: Any) -> Table:
    """Rows of equal steps; what is not named is zero."""
    n = len(next(iter(columns.values())))
    filled = {name: np.asarray(columns.get(name, np.zeros(n))) for name in STEP_COLUMNS}
    filled["num_steps"] = np.asarray(columns.get("num_steps", np.ones(n, np.int64)))
    return Table(filled, STEP_COLUMNS)


SOME_STEPS = steps(
    start_s=[0.0, 2.0, 5.0],
    duration_s=[2.0, 1.0, 3.0],
    num_steps=[4, 1, 3],
    decode_tokens=[2, 0, 1],
    num_running=[2, 3, 1],
    num_waiting=[0, 4, 1],
    used_blocks=[50, 100, 20],
)


SIZE = DeploymentSize(num_replicas=1, num_devices=4, num_blocks=200)


def summary(table: Table | None = None, rows: Table = SOME_STEPS, **changes: Any) -> Summary:
    arguments: dict[str, Any] = {"size": SIZE, "time_fractions": FRACTIONS}
    return summarise(requests() if table is None else table, rows, **arguments | changes)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60))
def test_percentiles_are_numpys(values: list[float]) -> None:
    figures = distribution(np.array(values))
    assert figures.mean == pytest.approx(np.mean(values))
    for q in (50, 90, 95, 99):
        assert getattr(figures, f"p{q}") == pytest.approx(np.percentile(values, q))
    assert figures.max == max(values)


rows_of_steps = st.lists(
    st.tuples(
        st.floats(1e-4, 1.0),  # a step's seconds
        st.integers(1, 5),  # steps
        st.integers(0, 6),  # decode tokens
        st.integers(0, 3),  # of the first step's, paused
        st.integers(0, 3),  # resumed tokens
        st.floats(1.0, 9.0),  # their gap
    ),
    min_size=1,
    max_size=12,
)


@pytest.mark.full
@given(rows_of_steps)
def test_inter_token_latencies_equal_a_walk_over_tokens(rows: list[tuple[float, int, int, int, int, float]]) -> None:
    step_s, num_steps, decodes, paused, resumed, late_s = (np.array(column) for column in zip(*rows, strict=True))
    paused = np.minimum(paused, decodes)
    table = steps(
        duration_s=step_s * num_steps,
        num_steps=num_steps,
        decode_tokens=decodes,
        paused_tokens=paused,
        resumed_tokens=resumed,
        late_gap_s=late_s,
    )
    gaps_s = np.concatenate([np.repeat(step_s, decodes * num_steps - paused), np.repeat(late_s, paused + resumed)])
    figures = itl_distribution(table)
    if not gaps_s.size:
        assert figures is None
        return
    assert figures is not None
    assert figures.mean == pytest.approx(gaps_s.mean())
    assert figures.max == pytest.approx(gaps_s.max())
    for q in (50, 90, 95, 99):
        exact = np.percentile(gaps_s, q, method="inverted_cdf")
        near = np.sort(gaps_s)[max(0, math.ceil(q / 100 * gaps_s.size - 1e-9) - 1)]
        assert getattr(figures, f"p{q}") == pytest.approx(exact) or getattr(figures, f"p{q}") == pytest.approx(near)


def test_throughput_counts_the_whole_span() -> None:
    figures = summary().throughput
    assert summary().span_s == 10
    assert figures.requests_per_s == 0.4
    assert figures.output_tokens_per_s == 1.9
    assert figures.total_tokens_per_s == 101.9
    assert figures.output_tokens_per_s_per_device == 1.9 / 4
    assert figures.total_tokens_per_s_per_device == 101.9 / 4
    assert figures.output_tokens_per_s_per_user == pytest.approx(np.mean([1 / 1.0, 1 / 0.5, 1 / 0.5]))


def test_warm_up_is_left_out_of_all_but_utilisation() -> None:
    figures = summary(requests(num_warmup=2))
    assert figures.num_requests == 2
    assert figures.span_s == 8
    assert figures.ttft_s.mean == 1.5
    assert figures.throughput.output_tokens_per_s == 12 / 8
    assert figures.utilisation == summary().utilisation


def test_a_single_token_has_no_time_per_token() -> None:
    figures = summary()
    assert figures.tpot_s is not None
    assert figures.tpot_s.mean == pytest.approx(np.mean([1.0, 0.5, 0.5]))
    alone = summary(requests(output_tokens=np.ones(4, np.int64)))
    assert alone.tpot_s is None


def test_goodput_keeps_every_limit() -> None:
    table = requests()  # TTFT 1, 1, 1, 2; TPOT 1, 0.5, -, 0.5; E2E 2, 3, 1, 7
    assert goodput(table, Slo(ttft_s=1.0), 10).fraction == 0.75
    assert goodput(table, Slo(tpot_s=0.5), 10).fraction == 0.75  # the single token keeps it
    assert goodput(table, Slo(ttft_s=1.0, tpot_s=0.5, e2e_s=2.0), 10).fraction == 0.25
    assert goodput(table, Slo(e2e_s=2.0), 10).requests_per_s == 0.2
    assert goodput(table, Slo(), 10).fraction == 1
    assert goodput(table, Slo(ttft_s=1.0, e2e_s=2.0), 10).limit_fractions == {"ttft": 0.75, "e2e": 0.5}
    assert summary().goodput is None
    assert summary(limits=ServiceLimits(Slo(ttft_s=1.0))).goodput == goodput(table, Slo(ttft_s=1.0), 10)


def test_money_is_the_price_of_all_devices_for_the_span() -> None:
    assert summary().cost is None
    cost = summary(device=DeviceTerms(price_usd_per_hour=3.6)).cost
    assert cost is not None
    assert cost.usd_per_hour == pytest.approx(14.4)
    dollars = 14.4 / 3600 * 10
    assert cost.usd_per_million_output_tokens == pytest.approx(dollars / 19 * 1e6)
    assert cost.usd_per_million_total_tokens == pytest.approx(dollars / 1019 * 1e6)


def test_utilisation_is_a_mean_over_time() -> None:
    figures = summary(size=replace(SIZE, num_replicas=2)).utilisation
    assert figures.busy_fraction == 6 / 20
    assert figures.mean_running == (2 * 2 + 3 * 1 + 1 * 3) / 6
    assert figures.mean_waiting == (0 + 4 * 1 + 1 * 3) / 6
    assert figures.kv_peak_fraction == 0.5
    assert figures.kv_mean_fraction == pytest.approx((50 * 2 + 100 + 20 * 3) / 20 / 200)
    assert figures.num_preemptions == 3


def test_what_bound_the_run() -> None:
    assert summary().bound_by == "memory"
    assert summary(time_fractions={"compute": 0.9, "memory": 0.1}).bound_by == "compute"
    waiting = steps(duration_s=[1.0, 3.0], used_blocks=[10, 99], num_waiting=[0, 1], num_running=[1, 1])
    assert summary(rows=waiting, size=replace(SIZE, num_blocks=100)).bound_by == "kv_capacity"
    assert summary(rows=waiting).bound_by == "memory"
    # Of two requests that take 70 of 100 blocks each has 35, and a third one does not fit; beside seven it does.
    for running, bound in ((2, "kv_capacity"), (7, "memory")):
        rows = steps(duration_s=[4.0], used_blocks=[70], num_waiting=[1], num_running=[running])
        assert summary(rows=rows, size=replace(SIZE, num_blocks=100)).bound_by == bound


def test_a_summary_as_json_has_every_field() -> None:
    figures = plain(summary())
    assert set(figures) == set(Summary.__struct_fields__)
    assert figures["ttft_s"]["p50"] == 1.0
    assert figures["goodput"] is None
    assert figures["time_fractions"] == FRACTIONS


def test_the_columns_are_those_of_the_records() -> None:
    assert set(requests().columns) == set(REQUEST_COLUMNS)


@pytest.mark.parametrize("size", [1, 2, 50, 5000])
def test_a_weighted_distribution_is_that_of_the_repeated_values(size: int) -> None:
    rng = np.random.default_rng(size)
    for values in (rng.lognormal(0, 5, size), rng.integers(0, 40, size), np.zeros(size), rng.choice([0.1, 0.3], size)):
        weights = rng.integers(1, 6, size).astype(float)
        figures = weighted_distribution(values, weights)
        repeated = np.sort(np.repeat(values, weights.astype(int)))
        assert figures.mean == pytest.approx(repeated.mean(), abs=1e-12)
        assert figures.max == repeated[-1]
        for q in (50, 90, 95, 99):
            assert getattr(figures, f"p{q}") == repeated[max(int(np.ceil(q / 100 * repeated.size)) - 1, 0)]


def test_a_queue_grows_by_the_slope_of_its_delays() -> None:
    arrival_s = np.arange(10.0)
    assert queue_growth(arrival_s, 0.25 * arrival_s + 3) == pytest.approx(0.25)
    assert queue_growth(np.zeros(10), arrival_s) == 0
