import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from windtunnel.errors import InputError
from windtunnel.schema import decode
from windtunnel.workload.arrivals import Arrivals, Burst, ClosedLoop, Gamma, Poisson, Static
from windtunnel.workload.generate.requests import RequestArrays, draw_lengths, generate
from windtunnel.workload.lengths import Empirical, Fixed, Lengths, Lognormal, Normal, Uniform, Zipf
from windtunnel.workload.schema import Trace, TraceColumns, Workload

NUM = 100_000
SKEWED = Lognormal(median_tokens=300, sigma=1.0, max_tokens=8192)


def workload(
    arrivals: Arrivals, *, num_requests: int | None = None, duration_s: float | None = None, lengths: Lengths = SKEWED
) -> Workload:
    return Workload(
        arrivals=arrivals, input_tokens=lengths, output_tokens=lengths, num_requests=num_requests, duration_s=duration_s
    )


def draw(lengths: Lengths, num_requests: int = NUM, seed: int = 1) -> NDArray[np.int64]:
    return draw_lengths(lengths, num_requests, np.random.default_rng(seed))


def assert_mean(samples: NDArray[Any], mean: float, std: float) -> None:
    """Within five standard errors: a wrong seed fails once in a million."""
    assert abs(samples.mean() - mean) < 5 * std / np.sqrt(len(samples))


# Lengths


@pytest.mark.parametrize("lengths", [77, Fixed(tokens=77)])
def test_fixed(lengths: Lengths) -> None:
    assert set(draw(lengths, 10)) == {77}


def test_uniform_reaches_both_ends_and_is_flat() -> None:
    tokens = draw(Uniform(min_tokens=819, max_tokens=1024))
    assert (tokens.min(), tokens.max()) == (819, 1024)
    num_values = 1024 - 819 + 1
    assert_mean(tokens, (819 + 1024) / 2, np.sqrt((num_values**2 - 1) / 12))


def test_normal_has_the_asked_moments() -> None:
    tokens = draw(Normal(mean_tokens=1000, std_tokens=100))
    assert_mean(tokens, 1000, 100)
    assert tokens.std() == pytest.approx(100, rel=0.02)


def test_lognormal_has_the_closed_form_mean_and_median() -> None:
    tokens = draw(Lognormal(median_tokens=1000, sigma=0.8))
    mean = 1000 * np.exp(0.8**2 / 2)
    assert_mean(tokens, mean, mean * np.sqrt(np.exp(0.8**2) - 1))
    assert np.mean(tokens <= 1000) == pytest.approx(0.5, abs=0.01)


def test_clipping_puts_the_tails_on_the_bounds() -> None:
    tokens = draw(Normal(mean_tokens=100, std_tokens=50, min_tokens=50, max_tokens=150))
    one_sigma_tail = 0.158655
    assert np.mean(tokens == 50) == pytest.approx(one_sigma_tail, abs=0.01)
    assert np.mean(tokens == 150) == pytest.approx(one_sigma_tail, abs=0.01)
    assert (tokens.min(), tokens.max()) == (50, 150)


def test_an_enormous_sigma_stays_within_what_a_request_can_have() -> None:
    tokens = draw(Lognormal(median_tokens=10, sigma=1e4))
    assert tokens.min() == 1
    assert tokens.max() == 2**31 - 1


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0, 2.5])
def test_zipf_frequencies_are_those_of_its_definition(alpha: float) -> None:
    tokens = draw(Zipf(alpha=alpha, min_tokens=100, max_tokens=109))
    expected = np.arange(1.0, 11.0) ** -alpha
    expected /= expected.sum()
    observed = np.bincount(tokens - 100, minlength=10) / NUM
    assert np.abs(observed - expected).max() < 5 * np.sqrt(0.25 / NUM)


def test_empirical_draws_values_by_weight() -> None:
    tokens = draw(Empirical(values=(5, 50, 500), weights=(1, 0, 3)))
    assert set(tokens) == {5, 500}
    assert np.mean(tokens == 500) == pytest.approx(0.75, abs=0.01)
    assert set(draw(Empirical(values=(5, 50)))) == {5, 50}


def test_empirical_reads_the_column_of_its_own_stream(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens,mine\n10,1,7\n20,2,8\n")
    both = Empirical(path=str(path))
    made = generate(Workload(arrivals=Burst(), input_tokens=both, output_tokens=both, num_requests=100), seed=0)
    assert set(made.input_tokens) == {10, 20}
    assert set(made.output_tokens) == {1, 2}
    assert set(draw(Empirical(path=str(path), column="mine"), 100)) == {7, 8}


# Arrivals


@pytest.mark.parametrize(("arrivals", "cv"), [(Poisson(rate_per_s=8), 1), (Gamma(rate_per_s=8, cv=2.5), 2.5)])
def test_gaps_are_unbiased(arrivals: Arrivals, cv: float) -> None:
    arrival_s = generate(workload(arrivals, num_requests=NUM), seed=3).arrival_s
    gaps_s = np.diff(arrival_s, prepend=0.0)
    assert gaps_s.min() >= 0
    assert_mean(gaps_s, 1 / 8, cv / 8)
    assert gaps_s.std() * 8 == pytest.approx(cv, rel=0.05)


def test_poisson_gaps_are_not_cut_off() -> None:
    """P(gap > 3 mean gaps) = exp(-3); some generators clip there, which raises the rate by 5%."""
    gaps_s = np.diff(generate(workload(Poisson(rate_per_s=1), num_requests=NUM), seed=4).arrival_s)
    assert np.mean(gaps_s > 3) == pytest.approx(np.exp(-3), abs=0.004)


def test_a_poisson_count_before_a_fixed_time_has_its_mean_as_variance() -> None:
    made = [generate(workload(Poisson(rate_per_s=20), duration_s=5, lengths=1), seed).arrival_s for seed in range(400)]
    counts = np.array([len(arrival_s) for arrival_s in made])
    assert all(arrival_s[-1] < 5 for arrival_s in made)
    assert abs(counts.mean() - 100) < 5 * 10 / np.sqrt(400)
    assert counts.var() == pytest.approx(100, rel=0.35)


def test_a_duration_keeps_every_request_before_it() -> None:
    """Of a very bursty process too, whose count is far from its mean."""
    arrivals = Gamma(rate_per_s=10, cv=30)
    by_count = generate(workload(arrivals, num_requests=50_000), seed=5).arrival_s
    by_time = generate(workload(arrivals, duration_s=100), seed=5).arrival_s
    assert np.array_equal(by_time, by_count[by_count < 100])


def test_static_and_bursts_are_on_their_grid() -> None:
    assert generate(workload(Static(rate_per_s=4), num_requests=4), 0).arrival_s.tolist() == [0, 0.25, 0.5, 0.75]
    assert generate(workload(Static(rate_per_s=4), duration_s=0.75), 0).arrival_s.tolist() == [0, 0.25, 0.5]
    bursts = Burst(num_per_burst=2, interval_s=10)
    assert generate(workload(bursts, num_requests=5), 0).arrival_s.tolist() == [0, 0, 10, 10, 20]
    assert generate(workload(bursts, duration_s=20), 0).arrival_s.tolist() == [0, 0, 10, 10]
    assert generate(workload(Burst(), num_requests=3), 0).arrival_s.tolist() == [0, 0, 0]


def test_a_closed_loop_releases_everything_at_once_behind_its_warmup() -> None:
    made = generate(workload(ClosedLoop(concurrency=4, num_warmup_requests=3), num_requests=10), seed=0)
    assert (made.concurrency, made.num_warmup, made.num_requests) == (4, 3, 10)
    for column in (made.arrival_s, made.input_tokens, made.output_tokens, made.priority):
        assert len(column) == 13
        assert (column[:3] == column[3]).all()
    assert not made.arrival_s.any()


def test_warmup_leaves_the_measured_requests_as_they_were() -> None:
    cold = generate(workload(ClosedLoop(concurrency=4, rate_per_s=2), num_requests=10), seed=0)
    warm = generate(workload(ClosedLoop(concurrency=4, rate_per_s=2, num_warmup_requests=3), num_requests=10), seed=0)
    assert np.array_equal(warm.arrival_s[3:], cold.arrival_s)
    assert np.array_equal(warm.input_tokens[3:], cold.input_tokens)
    assert not warm.arrival_s[:3].any()
    assert np.array_equal(cold.arrival_s, generate(workload(Poisson(rate_per_s=2), num_requests=10), 0).arrival_s)


@pytest.mark.parametrize(("cv", "alone"), [(0, Static(rate_per_s=2)), (3, Gamma(rate_per_s=2, cv=3))])
def test_a_closed_loop_releases_as_an_open_one_of_its_rate_does(cv: float, alone: Arrivals) -> None:
    """Until its time is up, too: `--request-rate` with `--burstiness` and `--max-concurrency`."""
    capped = generate(workload(ClosedLoop(concurrency=4, rate_per_s=2, cv=cv), duration_s=30), seed=0)
    assert np.array_equal(capped.arrival_s, generate(workload(alone, duration_s=30), seed=0).arrival_s)
    assert capped.concurrency == 4


def test_an_open_loop_has_no_concurrency() -> None:
    made = generate(workload(Poisson(rate_per_s=1), num_requests=5), seed=0)
    assert (made.concurrency, made.num_warmup) == (0, 0)
    assert not made.priority.any()


# Randomness


ANY_ARRIVALS = st.sampled_from([
    Poisson(rate_per_s=3),
    Gamma(rate_per_s=3, cv=0.5),
    Static(rate_per_s=3),
    Burst(num_per_burst=3, interval_s=1),
    ClosedLoop(concurrency=2, num_warmup_requests=2),
])  # fmt: skip
ANY_LENGTHS = st.sampled_from([
    12,
    SKEWED,
    Uniform(min_tokens=1, max_tokens=100),
    Normal(mean_tokens=5, std_tokens=100),
    Zipf(alpha=1.2, min_tokens=1, max_tokens=50),
    Empirical(values=(1, 2, 3), weights=(1, 2, 3)),
])  # fmt: skip


def as_bytes(made: RequestArrays) -> list[bytes]:
    columns = (made.arrival_s, made.input_tokens, made.output_tokens, made.priority)
    return [column.tobytes() for column in columns]


@given(arrivals=ANY_ARRIVALS, lengths=ANY_LENGTHS, seed=st.integers(0, 2**64), num=st.integers(1, 200))
@settings(max_examples=60, deadline=None)
def test_requests_are_valid_repeatable_and_the_first_of_more(
    arrivals: Arrivals, lengths: Lengths, seed: int, num: int
) -> None:
    made = generate(workload(arrivals, num_requests=num, lengths=lengths), seed)
    assert made.num_requests == num
    assert [column.dtype for column in (made.arrival_s, made.input_tokens)] == [np.float64, np.int64]
    assert (np.diff(made.arrival_s[made.num_warmup :]) >= 0).all()
    assert made.arrival_s.min() >= 0
    assert min(made.input_tokens.min(), made.output_tokens.min()) >= 1
    assert as_bytes(made) == as_bytes(generate(workload(arrivals, num_requests=num, lengths=lengths), seed))
    more = generate(workload(arrivals, num_requests=num + 50, lengths=lengths), seed)
    assert np.array_equal(more.arrival_s[: len(made.arrival_s)], made.arrival_s)
    assert np.array_equal(more.output_tokens[: len(made.arrival_s)], made.output_tokens)


def test_a_seed_sequence_is_left_as_it_was_and_means_the_same_as_its_integer() -> None:
    seed = np.random.SeedSequence(7)
    poisson = workload(Poisson(rate_per_s=1), num_requests=20)
    first = generate(poisson, seed)
    assert as_bytes(first) == as_bytes(generate(poisson, seed)) == as_bytes(generate(poisson, 7))
    assert seed.n_children_spawned == 0
    assert as_bytes(first) != as_bytes(generate(poisson, 8))
    assert as_bytes(first) != as_bytes(generate(poisson, seed.spawn(1)[0]))


def test_streams_do_not_depend_on_each_other() -> None:
    base = generate(workload(Poisson(rate_per_s=1), num_requests=50), seed=7)
    other_load = generate(workload(Gamma(rate_per_s=1, cv=2), num_requests=50), seed=7)
    other_input = generate(
        Workload(arrivals=Poisson(rate_per_s=1), input_tokens=9, output_tokens=SKEWED, num_requests=50), seed=7
    )
    assert np.array_equal(base.input_tokens, other_load.input_tokens)
    assert np.array_equal(base.output_tokens, other_input.output_tokens)
    assert np.array_equal(base.arrival_s, other_input.arrival_s)
    assert not np.array_equal(base.input_tokens, base.output_tokens)
    assert abs(np.corrcoef(draw(SKEWED, NUM, 1), draw(SKEWED, NUM, 2))[0, 1]) < 5 / np.sqrt(NUM)


def test_a_rate_only_stretches_the_times() -> None:
    slow = generate(workload(Poisson(rate_per_s=1), num_requests=50), seed=7)
    fast = generate(workload(Poisson(rate_per_s=4), num_requests=50), seed=7)
    assert np.array_equal(slow.arrival_s, fast.arrival_s * 4)
    assert np.array_equal(slow.input_tokens, fast.input_tokens)


# Traces


@pytest.fixture
def trace_path(tmp_path: Path) -> str:
    path = tmp_path / "requests.csv"
    rows = ["0.5,10,1,0", "2,20,2,5", "2,30,3,-1", "8,40,4,0"]
    path.write_text("\n".join(["arrival_s,input_tokens,output_tokens,priority", *rows]))
    return str(path)


def test_a_trace_is_replayed_as_it_is(trace_path: str) -> None:
    made = generate(Workload(trace=Trace(path=trace_path)), seed=0)
    assert made.arrival_s.tolist() == [0.5, 2, 2, 8]
    assert made.input_tokens.tolist() == [10, 20, 30, 40]
    assert made.output_tokens.tolist() == [1, 2, 3, 4]
    assert made.priority.tolist() == [0, 5, -1, 0]


def test_what_was_generated_comes_back_from_a_file(tmp_path: Path) -> None:
    made = generate(workload(Poisson(rate_per_s=3), num_requests=500), seed=1)
    path = tmp_path / "requests.jsonl"
    columns = zip(made.arrival_s.tolist(), made.input_tokens.tolist(), made.output_tokens.tolist(), strict=True)
    names = ("arrival_s", "input_tokens", "output_tokens")
    path.write_text("\n".join(json.dumps(dict(zip(names, row, strict=True))) for row in columns))
    assert as_bytes(generate(Workload(trace=Trace(path=str(path))), seed=2)) == as_bytes(made)


def test_a_window_of_a_trace(trace_path: str) -> None:
    trace = Trace(path=trace_path, start_s=2, time_scale=0.5)
    made = generate(Workload(trace=trace), seed=0)
    assert made.arrival_s.tolist() == [0, 0, 3]
    assert made.input_tokens.tolist() == [20, 30, 40]
    assert made.priority.tolist() == [5, -1, 0]
    assert generate(Workload(trace=trace, duration_s=3), seed=0).input_tokens.tolist() == [20, 30]
    assert generate(Workload(trace=trace, num_requests=1), seed=0).output_tokens.tolist() == [2]


def test_the_lengths_of_a_trace_under_another_load(trace_path: str) -> None:
    made = generate(Workload(trace=Trace(path=trace_path), arrivals=ClosedLoop(concurrency=2)), seed=0)
    assert made.concurrency == 2
    assert made.arrival_s.tolist() == [0, 0, 0, 0]
    assert made.input_tokens.tolist() == [10, 20, 30, 40]
    few = generate(Workload(trace=Trace(path=trace_path), arrivals=Static(rate_per_s=1), duration_s=2), seed=0)
    assert few.input_tokens.tolist() == [10, 20]
    all_rows = generate(Workload(trace=Trace(path=trace_path), arrivals=Poisson(rate_per_s=9), duration_s=99), seed=0)
    assert all_rows.num_requests == 4


def test_the_times_of_a_trace_with_other_lengths(tmp_path: Path) -> None:
    path = tmp_path / "times.csv"
    path.write_text("at\n1000\n3000\n")
    trace = Trace(path=str(path), columns=TraceColumns(arrival="at", arrival_unit="ms"))
    made = generate(Workload(trace=trace, input_tokens=5, output_tokens=6), seed=0)
    assert made.arrival_s.tolist() == [1, 3]
    assert made.input_tokens.tolist() == [5, 5]


def test_drawn_prompts_do_not_drop_what_a_trace_says_that_prompts_share(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    path.write_text('{"timestamp": 1000, "input_length": 600, "output_length": 4, "hash_ids": [0, 1]}\n')
    with pytest.raises(InputError, match="says by hash_ids what its prompts share") as error:
        generate(Workload(trace=Trace(path=str(path)), input_tokens=5), seed=0)
    assert "input_scale" in str(error.value.hint)
    times = decode({"type": "recorded", "path": str(path)}, Arrivals)
    assert generate(Workload(arrivals=times, input_tokens=5, output_tokens=6), seed=0).arrival_s.tolist() == [1]


def test_a_trace_that_is_too_short_is_refused(trace_path: str) -> None:
    with pytest.raises(InputError, match=r"(?m)asks for 5 requests, but .*requests.csv has 4$") as refused:
        generate(Workload(trace=Trace(path=trace_path), num_requests=5), seed=0)
    assert "--set workload.trace.order=resampled) with arrivals (--rate)" in str(refused.value.hint)
    with pytest.raises(InputError, match=r"(?m)has 3 from 2 s on$"):
        generate(Workload(trace=Trace(path=trace_path, start_s=2), num_requests=4), seed=0)


def test_a_workload_without_a_request_is_refused(trace_path: str) -> None:
    with pytest.raises(InputError, match=r"no request of the workload arrives within duration_s, 0.001 s"):
        generate(workload(Poisson(rate_per_s=1), duration_s=0.001), seed=0)
    with pytest.raises(InputError, match=r"no request of the workload arrives after the trace's start_s"):
        generate(Workload(trace=Trace(path=trace_path, start_s=100)), seed=0)


def test_a_workload_beyond_memory_is_refused() -> None:
    with pytest.raises(InputError, match=r"about 1e\+12 requests"):
        generate(workload(Poisson(rate_per_s=1e6), duration_s=1e6), seed=0)


def test_a_resampled_trace_has_as_many_pairs_as_there_are_arrivals(tmp_path: Path) -> None:
    path = tmp_path / "pairs.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens\n10,1\n20,2\n40,4\n")
    raw = {"arrivals": {"type": "poisson", "rate_per_s": 10}, "trace": {"path": str(path), "order": "resampled"}}
    for end in ({"num_requests": 3000}, {"duration_s": 300}):
        requests = generate(decode({**raw, **end}, Workload), seed=0)
        assert requests.num_requests == pytest.approx(3000, rel=0.1)
        assert np.array_equal(requests.input_tokens, 10 * requests.output_tokens)
        assert np.bincount(requests.output_tokens)[[1, 2, 4]] == pytest.approx([1000] * 3, rel=0.15)
    shuffled = {**raw, "trace": {"path": str(path), "order": "shuffled"}}
    assert set(generate(decode(shuffled, Workload), seed=0).input_tokens) == {10, 20, 40}
    with pytest.raises(InputError, match=r"asks for 4 requests, but .* has 3") as refused:
        generate(decode({**shuffled, "num_requests": 4}, Workload), seed=0)
    assert str(refused.value.hint).endswith("(--set workload.trace.order=resampled)")


def test_total_lengths_are_split_in_a_ratio() -> None:
    raw = {
        "arrivals": {"type": "poisson", "rate_per_s": 1},
        "total_tokens": {"type": "uniform", "min_tokens": 1024, "max_tokens": 4096},
        "input_to_output_ratio": 20,
        "num_requests": 1000,
    }
    requests = generate(decode(raw, Workload), seed=0)
    total = requests.input_tokens + requests.output_tokens
    assert 1024 <= total.min() < 1100
    assert 4000 < total.max() <= 4096
    assert np.array_equal(requests.output_tokens, np.ceil(total / 21))


def test_a_benchmark_client_draws_its_own_lengths() -> None:
    """As the client does it: NumPy's global generator, seeded, all prompts and then all outputs."""
    made = Workload(
        arrivals=ClosedLoop(concurrency=4, num_warmup_requests=2),
        input_tokens=Uniform(min_tokens=819, max_tokens=1024),
        output_tokens=Uniform(min_tokens=6553, max_tokens=8192),
        num_requests=40,
        lengths_seed=0,
    )
    generated = generate(made, 7)
    np.random.seed(0)  # noqa: NPY002
    prompts = np.random.randint(int(1024 * 0.8), 1024 + 1, size=40)  # noqa: NPY002
    outputs = np.random.randint(int(8192 * 0.8), 8192 + 1, size=40)  # noqa: NPY002
    assert generated.input_tokens.tolist() == [prompts[0]] * 2 + prompts.tolist()
    assert generated.output_tokens.tolist() == [outputs[0]] * 2 + outputs.tolist()
    assert generated.input_tokens.tolist() == generate(made, 8).input_tokens.tolist()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"lengths_seed": -1}, "from 0 to"),
        ({"input_tokens": {"type": "zipf", "alpha": 1, "min_tokens": 1, "max_tokens": 9}}, "numbers or uniform"),
        ({"sessions": {"turns": 2}}, "nothing else"),
    ],
)
def test_lengths_that_no_benchmark_client_draws_are_refused(change: dict[str, Any], why: str) -> None:
    given = {
        "arrivals": {"type": "closed_loop", "concurrency": 4},
        "input_tokens": 100,
        "output_tokens": {"type": "uniform", "min_tokens": 8, "max_tokens": 10},
        "num_requests": 8,
        "lengths_seed": 0,
    }
    decode(given, Workload, "workload")
    with pytest.raises(InputError, match=why):
        decode({**given, **change}, Workload, "workload")
