"""Which requests arrive, when, and how long they are: drawn from distributions, taken from a trace, or both.

    workload:                                          workload:
      arrivals: {type: poisson, rate_per_s: 6.5}         trace: {path: requests.csv}
      input_tokens: 1024                                 num_requests: 500
      output_tokens: {type: uniform, min_tokens: 819, max_tokens: 1024}
      num_requests: 1000

`arrivals`, `input_tokens` and `output_tokens` are three independent streams; each is taken from the trace where it is
left out. So a trace's lengths are replayed under another load by giving both `trace` and `arrivals`.
"""

import math
from typing import Literal

from windtunnel.spec.noun import Noun

MAX_TOKENS = 2**31 - 1
"""Of one request; distributions without a bound are clipped here."""
MAX_REQUESTS = 100_000_000
MIN_CV, MAX_CV = 0.001, 1000
MIN_RATE_PER_S, MAX_RATE_PER_S = 1e-9, 1e9
MAX_DISTINCT_TOKENS = 2**24
"""The widest range of a `Zipf`, which keeps one number for every length."""


class Fixed(Noun, tag="fixed", tag_field="type"):
    """Every request has the same length. A bare integer means the same."""

    tokens: int

    def __post_init__(self) -> None:
        _check_tokens(tokens=self.tokens)


class Uniform(Noun, tag="uniform", tag_field="type"):
    """Every integer from `min_tokens` to `max_tokens`, both included, is equally likely."""

    min_tokens: int
    max_tokens: int

    def __post_init__(self) -> None:
        _check_bounds(self.min_tokens, self.max_tokens)

    @classmethod
    def of_range_ratio(cls, tokens: int, range_ratio: float) -> "Uniform":
        """Lengths from int(range_ratio * tokens) to `tokens`, the random data set of InferenceX's benchmark client.

        Newer versions of `vllm bench serve` use the same word for tokens * (1 - ratio) to tokens * (1 + ratio).
        Source: https://github.com/kimbochen/bench_serving, `sample_random_requests`.
        """
        if not 0 <= range_ratio <= 1:
            raise ValueError(f"range_ratio must be from 0 to 1, not {range_ratio}")
        return cls(min_tokens=max(1, int(range_ratio * tokens)), max_tokens=tokens)


class Normal(Noun, tag="normal", tag_field="type"):
    """Normal, rounded, then clipped: what falls outside the bounds lies on them."""

    mean_tokens: float
    std_tokens: float
    min_tokens: int = 1
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        _check_positive(mean_tokens=self.mean_tokens)
        _check_non_negative(std_tokens=self.std_tokens)
        _check_bounds(self.min_tokens, self.max_tokens)


class Lognormal(Noun, tag="lognormal", tag_field="type"):
    """exp(Normal(log(median_tokens), sigma)), rounded, then clipped: what falls outside the bounds lies on them.

    Before clipping the mean is median * exp(sigma^2 / 2). A wanted mean m and standard deviation s give
    sigma = sqrt(log(1 + (s / m)^2)) and median = m / sqrt(1 + (s / m)^2).
    """

    median_tokens: float
    sigma: float
    """Standard deviation of the natural logarithm."""
    min_tokens: int = 1
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        _check_positive(median_tokens=self.median_tokens)
        _check_non_negative(sigma=self.sigma)
        _check_bounds(self.min_tokens, self.max_tokens)


class Zipf(Noun, tag="zipf", tag_field="type"):
    """The r-th shortest length has a probability proportional to r^-alpha: `min_tokens` (r = 1) is the likeliest.

    Bounded, so that any alpha >= 0 is allowed; 0 is uniform.
    """

    alpha: float
    min_tokens: int
    max_tokens: int

    def __post_init__(self) -> None:
        _check_non_negative(alpha=self.alpha)
        _check_bounds(self.min_tokens, self.max_tokens)
        if self.max_tokens - self.min_tokens >= MAX_DISTINCT_TOKENS:
            raise ValueError(f"max_tokens - min_tokens must be below {MAX_DISTINCT_TOKENS}")


class Empirical(Noun, tag="empirical", tag_field="type"):
    """Drawn with replacement from given `values` or from a column of the file at `path`.

    Input and output lengths are drawn independently; `Workload.trace` keeps the pairs of a file together.
    """

    values: tuple[int, ...] | None = None
    weights: tuple[float, ...] | None = None
    """Relative frequency of each value; None means equal."""
    path: str | None = None
    """A requests file (see `Trace.path`)."""
    column: str | None = None
    """None means the file's own column of input or output lengths, whichever is being drawn."""

    def __post_init__(self) -> None:
        if (self.values is None) == (self.path is None):
            raise ValueError("an empirical distribution needs either values or path")
        if self.path is not None and self.weights is not None:
            raise ValueError("weights belong to values, not to path")
        if self.values is not None:
            self._check_values(self.values)

    def _check_values(self, values: tuple[int, ...]) -> None:
        if self.column is not None:
            raise ValueError("column belongs to path, not to values")
        if not values:
            raise ValueError("values is empty")
        for value in values:
            _check_tokens(values=value)
        if self.weights is None:
            return
        if len(self.weights) != len(values):
            raise ValueError(f"there are {len(values)} values but {len(self.weights)} weights")
        for weight in self.weights:
            _check_non_negative(weights=weight)
        _check_positive(**{"the sum of weights": math.fsum(self.weights)})


Lengths = int | Fixed | Uniform | Normal | Lognormal | Zipf | Empirical


class Poisson(Noun, tag="poisson", tag_field="type"):
    """Open loop with independent exponential gaps, the first one before the first request.

    `vllm bench serve --request-rate` draws the same, then stretches all times so that the last is num_requests / rate.
    """

    rate_per_s: float

    def __post_init__(self) -> None:
        _check_rate(self.rate_per_s)


class Gamma(Noun, tag="gamma", tag_field="type"):
    """Open loop with independent gamma gaps: burstier than Poisson where cv > 1, smoother where cv < 1."""

    rate_per_s: float
    cv: float
    """Standard deviation of the gaps over their mean, 0.001 to 1000. vLLM's `--burstiness` is 1 / cv^2."""

    def __post_init__(self) -> None:
        _check_rate(self.rate_per_s)
        if not MIN_CV <= self.cv <= MAX_CV:
            raise ValueError(f"cv must be from {MIN_CV} to {MAX_CV}, not {self.cv}")


class Static(Noun, tag="static", tag_field="type"):
    """Open loop with equal gaps, the first request at 0 s."""

    rate_per_s: float

    def __post_init__(self) -> None:
        _check_rate(self.rate_per_s)


class Burst(Noun, tag="burst", tag_field="type"):
    """Open loop with groups of simultaneous requests, the first at 0 s. As it stands: all requests at once."""

    num_per_burst: int | None = None
    interval_s: float | None = None

    def __post_init__(self) -> None:
        if (self.num_per_burst is None) != (self.interval_s is None):
            raise ValueError("num_per_burst and interval_s must be given together")
        _check_count(num_per_burst=self.num_per_burst)
        _check_positive(interval_s=self.interval_s)


class ClosedLoop(Noun, tag="closed_loop", tag_field="type"):
    """A benchmark client with `concurrency` requests under way: it sends the next one when one completes.

    As `vllm bench serve --max-concurrency` does: a request is sent once it is released and one of the slots is free.
    Warm-up requests are not among `num_requests`; they are copies of the first one, pass through as many slots, and the
    measured requests are released when the last of them has finished.
    Source: https://github.com/vllm-project/vllm, `vllm/benchmarks/serve.py`, `benchmark`, at commit 009e6d4a.
    """

    concurrency: int
    num_warmup_requests: int = 0
    rate_per_s: float | None = None
    """Release rate (Poisson); None releases every request at 0 s."""

    def __post_init__(self) -> None:
        _check_count(concurrency=self.concurrency)
        _check_rate(self.rate_per_s)
        if not 0 <= self.num_warmup_requests <= MAX_REQUESTS:
            raise ValueError(f"num_warmup_requests must be from 0 to {MAX_REQUESTS}, not {self.num_warmup_requests}")


Arrivals = Poisson | Gamma | Static | Burst | ClosedLoop


class TraceColumns(Noun):
    """The names of a requests file's columns, where they are not those of a known layout."""

    arrival: str | None = None
    arrival_unit: Literal["s", "ms", "us", "ns"] = "s"
    """Of `arrival`, where it holds numbers; dates and times need no unit."""
    input_tokens: str | None = None
    output_tokens: str | None = None
    priority: str | None = None
    """Integers; the smaller is served first."""


class Trace(Noun):
    """Recorded requests. Their times count from the file's zero, or from the first request where they are dates."""

    path: str
    """CSV, JSON Lines or Parquet with named columns (`.csv`, `.jsonl`, `.parquet`, also `.gz`)."""
    columns: TraceColumns = TraceColumns()
    start_s: float = 0.0
    """Skip the requests before this time; it becomes 0 s."""
    time_scale: float = 1.0
    """Factor on every arrival time after `start_s`: 0.5 doubles the load."""

    def __post_init__(self) -> None:
        _check_non_negative(start_s=self.start_s)
        _check_positive(time_scale=self.time_scale)


class Workload(Noun):
    """The requests of one run. Streams that are left out come from `trace`.

    It ends with `num_requests`, at `duration_s` (arrivals only; requests under way finish) or with the trace,
    whichever is first.
    """

    arrivals: Arrivals | None = None
    input_tokens: Lengths | None = None
    """Prompt tokens of each request."""
    output_tokens: Lengths | None = None
    """Tokens that each request generates."""
    num_requests: int | None = None
    duration_s: float | None = None
    trace: Trace | None = None

    def __post_init__(self) -> None:
        for stream in ("input_tokens", "output_tokens"):
            if isinstance(tokens := getattr(self, stream), int):
                _check_tokens(**{stream: tokens})
        _check_count(num_requests=self.num_requests)
        _check_positive(duration_s=self.duration_s)
        self._check_sources()
        self._check_end()

    def _check_sources(self) -> None:
        streams = ("arrivals", "input_tokens", "output_tokens")
        missing = [stream for stream in streams if getattr(self, stream) is None]
        if self.trace is None and missing:
            raise ValueError(f"{missing[0]} is missing; give {missing[0]} or a trace")
        if self.trace is not None and not missing:
            raise ValueError("the trace is not used: arrivals, input_tokens and output_tokens are all given")
        if self.trace is not None and self.arrivals and (self.trace.start_s != 0 or self.trace.time_scale != 1):
            raise ValueError("the trace's start_s and time_scale have no effect where arrivals are given")

    def _check_end(self) -> None:
        ends_by_time = isinstance(self.arrivals, Poisson | Gamma | Static) or (
            isinstance(self.arrivals, Burst) and self.arrivals.interval_s is not None
        )
        if self.duration_s is not None and self.arrivals is not None and not ends_by_time:
            raise ValueError("duration_s cannot end a closed loop or a single burst; give num_requests")
        if self.num_requests is None and self.duration_s is None and self.trace is None:
            raise ValueError("num_requests is missing; give num_requests or duration_s")


def _check_positive(**values: float | None) -> None:
    for name, value in values.items():
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be a positive number, not {value}")


def _check_non_negative(**values: float) -> None:
    for name, value in values.items():
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} must be a number of at least 0, not {value}")


def _check_rate(rate_per_s: float | None) -> None:
    _check_positive(rate_per_s=rate_per_s)
    if rate_per_s is not None and not MIN_RATE_PER_S <= rate_per_s <= MAX_RATE_PER_S:
        raise ValueError(f"rate_per_s must be from {MIN_RATE_PER_S:g} to {MAX_RATE_PER_S:g}, not {rate_per_s:g}")


def _check_count(**values: int | None) -> None:
    for name, value in values.items():
        if value is not None and not 1 <= value <= MAX_REQUESTS:
            raise ValueError(f"{name} must be from 1 to {MAX_REQUESTS}, not {value}")


def _check_tokens(**values: int) -> None:
    for name, value in values.items():
        if not 1 <= value <= MAX_TOKENS:
            raise ValueError(f"{name} must be from 1 to {MAX_TOKENS}, not {value}")


def _check_bounds(min_tokens: int, max_tokens: int | None) -> None:
    _check_tokens(min_tokens=min_tokens)
    if max_tokens is None:
        return
    _check_tokens(max_tokens=max_tokens)
    if min_tokens > max_tokens:
        raise ValueError(f"min_tokens is {min_tokens}, above max_tokens, which is {max_tokens}")
