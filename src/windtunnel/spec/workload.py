"""Which requests arrive, when, how long they are and which belong together: from distributions, from files, or both.

    workload:                                          workload:
      arrivals: {type: poisson, rate_per_s: 6.5}         trace: {path: requests.csv}
      input_tokens: 1024                                 num_requests: 500
      output_tokens: {type: uniform, min_tokens: 819, max_tokens: 1024}
      num_requests: 1000

`arrivals`, `input_tokens` and `output_tokens` are three independent streams; each is taken from the trace where it is
left out. So a trace's lengths are replayed under another load by giving both `trace` and `arrivals`.

`sessions` makes each arrival the first turn of a conversation; `shared_prompts` puts a system prompt before it;
`tenants` divides the arrivals among customers with lengths, priorities and limits of their own; `clients` draws
everything from a published model of a service's clients.
"""

import math
from itertools import pairwise
from typing import Literal

from windtunnel.spec.noun import Noun
from windtunnel.spec.slo import Slo

MAX_TOKENS = 2**31 - 1
"""Of one request; distributions without a bound are clipped here."""
MAX_REQUESTS = 100_000_000
MIN_CV, MAX_CV = 0.001, 1000
MIN_RATE_PER_S, MAX_RATE_PER_S = 1e-9, 1e9
MAX_DISTINCT_TOKENS = 2**24
"""The widest range of a `Zipf`, which keeps one number for every length."""
MAX_TURNS = 10_000
"""Of one session; unbounded distributions of turns are clipped here."""


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
        _check_weights(self.weights, len(values))


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


class RatePoint(Noun):
    """The arrival rate at one time of a `RateCurve`."""

    at_s: float
    rate_per_s: float

    def __post_init__(self) -> None:
        _check_non_negative(at_s=self.at_s, rate_per_s=self.rate_per_s)
        if self.rate_per_s > MAX_RATE_PER_S:
            raise ValueError(f"rate_per_s must be at most {MAX_RATE_PER_S:g}, not {self.rate_per_s:g}")


class RateCurve(Noun, tag="curve", tag_field="type"):
    """Open loop whose rate runs in straight lines through `points`, again and again with a `period_s`.

    A process of unit rate is warped in time, so that scaling or reshaping the curve moves the same requests: the k-th
    arrives when the integral of the rate reaches the k-th unit time. Without a period the first and the last rate hold
    before and after the points; with one the line goes on from the last point to the first one of the next period.
    Source: time rescaling of a point process, Cinlar, Introduction to Stochastic Processes (1975), section 4.7.
    """

    points: tuple[RatePoint, ...]
    period_s: float | None = None
    cv: float = 1.0
    """Standard deviation over mean of the gaps of the unit process, which are gamma; 1 is Poisson."""
    scale: float = 1.0
    """Factor on every rate."""

    def __post_init__(self) -> None:
        _check_positive(period_s=self.period_s, scale=self.scale)
        if not MIN_CV <= self.cv <= MAX_CV:
            raise ValueError(f"cv must be from {MIN_CV} to {MAX_CV}, not {self.cv}")
        if not self.points:
            raise ValueError("points is empty")
        times_s = [point.at_s for point in self.points]
        if any(after <= before for before, after in pairwise(times_s)):
            raise ValueError("the points of a rate curve must be in order of at_s, no two at the same time")
        if self.period_s is not None and times_s[-1] >= self.period_s:
            raise ValueError(f"the point at {times_s[-1]:g} s is not within the period of {self.period_s:g} s")
        rates = [point.rate_per_s for point in self.points]
        if max(rates) == 0 or (self.period_s is None and rates[-1] == 0):
            raise ValueError("the rate stays at 0, so that the requests never end: raise the last point's rate_per_s")


class Recorded(Noun, tag="recorded", tag_field="type"):
    """The arrival times of a file, whatever the lengths' source is."""

    path: str
    """A requests file (see `Trace.path`)."""
    column: str | None = None
    """None means the column of times of a known layout."""
    unit: Literal["s", "ms", "us", "ns"] = "s"
    start_s: float = 0.0
    """Skip the arrivals before this time; it becomes 0 s."""
    time_scale: float = 1.0

    def __post_init__(self) -> None:
        _check_non_negative(start_s=self.start_s)
        _check_positive(time_scale=self.time_scale)


Arrivals = Poisson | Gamma | Static | Burst | ClosedLoop | RateCurve | Recorded


class Exponential(Noun, tag="exponential", tag_field="type"):
    """A time without memory."""

    mean_s: float

    def __post_init__(self) -> None:
        _check_positive(mean_s=self.mean_s)


class UniformSeconds(Noun, tag="uniform", tag_field="type"):
    """Every time from `min_s` to `max_s` is equally likely."""

    min_s: float
    max_s: float

    def __post_init__(self) -> None:
        _check_non_negative(min_s=self.min_s, max_s=self.max_s)
        if self.min_s > self.max_s:
            raise ValueError(f"min_s is {self.min_s:g}, above max_s, which is {self.max_s:g}")


class LognormalSeconds(Noun, tag="lognormal", tag_field="type"):
    """exp(Normal(log(median_s), sigma))."""

    median_s: float
    sigma: float

    def __post_init__(self) -> None:
        _check_positive(median_s=self.median_s)
        _check_non_negative(sigma=self.sigma)


Durations = float | Exponential | UniformSeconds | LognormalSeconds


class Geometric(Noun, tag="geometric", tag_field="type"):
    """`least` and as many more as there are successes before the first failure, `mean` in all on average."""

    mean: float
    least: int = 1

    def __post_init__(self) -> None:
        _check_non_negative(least=self.least)
        if not self.least <= self.mean <= MAX_TURNS:
            raise ValueError(f"mean must be from least, which is {self.least}, to {MAX_TURNS}, not {self.mean:g}")


class UniformCount(Noun, tag="uniform", tag_field="type"):
    """Every integer from `least` to `most`, both included, is equally likely."""

    least: int
    most: int

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.most <= MAX_TURNS:
            raise ValueError(f"0 <= least <= most <= {MAX_TURNS} is needed, not {self.least} and {self.most}")


class EmpiricalCount(Noun, tag="empirical", tag_field="type"):
    """Drawn with replacement from given `values`."""

    values: tuple[int, ...]
    weights: tuple[float, ...] | None = None
    """Relative frequency of each value; None means equal."""

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("values is empty")
        if not all(0 <= value <= MAX_TURNS for value in self.values):
            raise ValueError(f"values must be from 0 to {MAX_TURNS}")
        _check_weights(self.weights, len(self.values))


Counts = int | Geometric | UniformCount | EmpiricalCount


class ToolCalls(Noun):
    """An agent's loop: within a turn the model calls tools and is asked again with what they returned."""

    per_turn: Counts
    """Calls of each turn; each makes one more request."""
    run_s: Durations
    """From the end of the request that calls a tool to the sending of the next one."""
    output_tokens: Lengths
    """What a tool returns, appended to the context."""

    def __post_init__(self) -> None:
        _check_counts(0, per_turn=self.per_turn)
        _check_durations(run_s=self.run_s)
        _check_lengths(output_tokens=self.output_tokens)


class Sessions(Noun):
    """Every arrival begins a conversation; its next request is sent `think_s` after the answer to the one before.

    A closed loop keeps so many sessions, not requests, under way.

    The prompt of each request is the whole conversation so far and the new text: `input_tokens` of the workload in the
    first turn, `followup_tokens` in later ones.
    """

    turns: Counts
    """Of a session, at least one."""
    think_s: Durations = 0.0
    """From the end of an answer to the sending of the next turn."""
    followup_tokens: Lengths | None = None
    """New text of the second and later turns; None means as in the first."""
    tool_calls: ToolCalls | None = None
    max_context_tokens: int | None = None
    """A session ends before the request whose prompt and output would be longer than this."""

    def __post_init__(self) -> None:
        _check_counts(1, turns=self.turns)
        _check_durations(think_s=self.think_s)
        _check_lengths(followup_tokens=self.followup_tokens)
        if self.max_context_tokens is not None:
            _check_tokens(max_context_tokens=self.max_context_tokens)


class SharedPrompts(Noun):
    """System prompts that many requests begin with; their tokens are added to `input_tokens`."""

    tokens: Lengths
    count: int = 1
    """Distinct prompts."""
    alpha: float = 0.0
    """The r-th prompt has a probability proportional to r^-alpha; 0: all are equally likely."""

    def __post_init__(self) -> None:
        _check_lengths(tokens=self.tokens)
        _check_non_negative(alpha=self.alpha)
        if not 1 <= self.count <= MAX_DISTINCT_TOKENS:
            raise ValueError(f"count must be from 1 to {MAX_DISTINCT_TOKENS}, not {self.count}")


class ClientModel(Noun):
    """The clients of a real service, as ServeGen publishes them: rates and burstiness in windows, lengths by client.

    Each window of a client holds its recorded number of requests (a fraction of one by chance), spaced by gaps of the
    recorded distribution that fill the window; lengths are drawn from those recorded for that client and time.
    Source: Xiang et al., ServeGen: Workload Characterization and Generation of Large Language Model Serving in
    Production (NSDI 2026); data at https://github.com/alibaba/ServeGen.
    """

    path: str
    """A folder of `chunk-N-trace.csv` and `chunk-N-dataset.json`, or a tar archive of one."""
    rate_per_s: float | None = None
    """Mean rate of all clients together from `start_s` on; None keeps the recorded one."""
    start_s: float = 0.0
    """Time in the model that becomes 0 s."""
    num_clients: int | None = None
    """Only so many, the busiest ones; None means all."""
    without_lengths: Literal["refuse", "leave_out"] = "refuse"
    """Clients whose file of lengths is missing."""

    def __post_init__(self) -> None:
        _check_rate(self.rate_per_s)
        _check_non_negative(start_s=self.start_s)
        _check_count(num_clients=self.num_clients)


class TraceColumns(Noun):
    """The names of a requests file's columns, where they are not those of a known layout."""

    arrival: str | None = None
    arrival_unit: Literal["s", "ms", "us", "ns"] = "s"
    """Of `arrival`, where it holds numbers; dates and times need no unit."""
    input_tokens: str | None = None
    output_tokens: str | None = None
    priority: str | None = None
    """Integers; the smaller is served first."""
    tenant: str | None = None
    """Names; priority and limits of a tenant are those of the entry of `workload.tenants` with that name."""
    session: str | None = None
    """What belongs to one conversation, for routers that keep it on one replica; times stay as recorded."""
    hash_ids: str | None = None
    """Lists of the ids of a prompt's blocks, each id standing for the block and all before it."""


class Trace(Noun):
    """Recorded requests. Their times count from the file's zero, or from the first request where they are dates."""

    path: str
    """CSV, JSON Lines, JSON or Parquet with named columns (`.csv`, `.jsonl`, `.json`, `.parquet`, also `.gz`)."""
    columns: TraceColumns = TraceColumns()
    start_s: float = 0.0
    """Skip the requests before this time; it becomes 0 s."""
    time_scale: float = 1.0
    """Factor on every arrival time after `start_s`: 0.5 doubles the load."""
    input_scale: float = 1.0
    """Factor on every prompt length, rounded down to at least 1; with hash ids the prompts stay as they are."""
    output_scale: float = 1.0
    max_tokens: int | None = None
    """Longer requests are shortened to this many tokens in all."""
    shorten: Literal["both", "input"] = "both"
    """Which lengths `max_tokens` cuts: both in proportion, or the prompt first."""
    order: Literal["file", "shuffled", "resampled"] = "file"
    """Of the lengths, pairs kept: as in the file, in an order drawn at random, or rows drawn with replacement (as many
    as are needed). Other than `file` needs `arrivals`."""
    hash_block_tokens: int = 512
    """Tokens of a block of `hash_ids`; Mooncake's."""
    failed: Literal["refuse", "leave_out"] | None = None
    """Requests without output. None leaves them out where the trace's publisher says that they failed (BurstGPT)."""
    characters_per_token: float | None = None
    """Of files that hold conversations as text, as ShareGPT's: how long a token is taken to be."""

    def __post_init__(self) -> None:
        _check_non_negative(start_s=self.start_s)
        _check_positive(
            time_scale=self.time_scale,
            input_scale=self.input_scale,
            output_scale=self.output_scale,
            characters_per_token=self.characters_per_token,
        )
        _check_tokens(hash_block_tokens=self.hash_block_tokens)
        if self.max_tokens is not None and not 2 <= self.max_tokens <= MAX_TOKENS:
            raise ValueError(f"max_tokens must be from 2 to {MAX_TOKENS}, not {self.max_tokens}")


class Requests(Noun):
    """Where a stream of requests comes from. Streams that are left out come from `trace`."""

    arrivals: Arrivals | None = None
    input_tokens: Lengths | None = None
    """Prompt tokens of each request; with `sessions` or `shared_prompts` those of its new text."""
    output_tokens: Lengths | None = None
    """Tokens that each request generates."""
    total_tokens: Lengths | None = None
    """Both together, in place of them: outputs are ceil(total / (1 + input_to_output_ratio)), prompts the rest."""
    input_to_output_ratio: float | None = None
    trace: Trace | None = None
    sessions: Sessions | None = None
    shared_prompts: SharedPrompts | None = None

    def _check_streams(self) -> None:
        lengths = {name: getattr(self, name) for name in ("input_tokens", "output_tokens", "total_tokens")}
        _check_lengths(**lengths)
        _check_positive(input_to_output_ratio=self.input_to_output_ratio)
        if (self.total_tokens is None) != (self.input_to_output_ratio is None):
            raise ValueError("total_tokens and input_to_output_ratio must be given together")
        if self.total_tokens is not None and (self.input_tokens is not None or self.output_tokens is not None):
            raise ValueError("total_tokens stands in place of input_tokens and output_tokens; give one or the other")
        if self.sessions is not None and (self.trace is not None or self.total_tokens is not None):
            raise ValueError(
                "sessions draw the lengths of every turn: give input_tokens and output_tokens, and for the times of a "
                "file arrivals: {type: recorded, path: FILE}"
            )

    def _check_lengths_given(self, *others: str) -> None:
        """Every stream is given, or there is a trace for it; `others` are further streams that a trace may give."""
        streams = [*others, "input_tokens", "output_tokens"]
        given = {"input_tokens", "output_tokens"} if self.total_tokens is not None else set()
        missing = [stream for stream in streams if getattr(self, stream) is None and stream not in given]
        if self.trace is None and missing:
            raise ValueError(f"{missing[0]} is missing; give {missing[0]} or a trace")
        if self.trace is not None and not missing:
            raise ValueError(f"the trace is not used: {', '.join(streams[:-1])} and {streams[-1]} are all given")
        if self.trace is not None and self.arrivals and (self.trace.start_s != 0 or self.trace.time_scale != 1):
            raise ValueError("the trace's start_s and time_scale have no effect where arrivals are given")
        if self.trace is not None and self.arrivals is None and "arrivals" in others and self.trace.order != "file":
            raise ValueError(f"a trace that is {self.trace.order} cannot keep its times; give arrivals")

    @property
    def _ends_by_time(self) -> bool:
        return not (
            isinstance(self.arrivals, ClosedLoop)
            or (isinstance(self.arrivals, Burst) and self.arrivals.interval_s is None)
        )


class Tenant(Requests, kw_only=True):
    """A customer of the service: part of the requests, with lengths, priority and limits of its own.

    It takes a `share` of the workload's arrivals, or has `arrivals` of its own. In a workload whose trace names tenants
    it has neither, and no lengths: the requests of that name are its.
    """

    name: str
    share: float | None = None
    """Relative to the other tenants' shares."""
    priority: int = 0
    """The smaller is served first."""
    slo: Slo | None = None
    """None takes the scenario's."""

    def __post_init__(self) -> None:
        self._check_streams()
        _check_positive(share=self.share)
        if self.share is not None and self.arrivals is not None:
            raise ValueError(f"tenant {self.name!r} has both a share and arrivals; give one or the other")
        if isinstance(self.arrivals, ClosedLoop):
            raise ValueError(f"tenant {self.name!r} cannot be a closed loop; only the whole workload can")

    @property
    def is_label(self) -> bool:
        """Only a name with priority and limits, for requests that a trace holds."""
        sources = (self.share, self.arrivals, self.input_tokens, self.output_tokens, self.total_tokens, self.trace)
        return all(source is None for source in sources)


MAX_LEGACY_SEED = 2**32
"""Of NumPy's `RandomState`."""


class Workload(Requests):
    """The requests of one run.

    It ends with `num_requests`, at `duration_s` (arrivals only; requests under way finish, sessions end) or with the
    trace, whichever is first.
    """

    num_requests: int | None = None
    duration_s: float | None = None
    tenants: tuple[Tenant, ...] = ()
    clients: ClientModel | None = None
    lengths_seed: int | None = None
    """Draws lengths as a benchmark client does: NumPy's `RandomState` of this seed, all prompts before all outputs, so
    that they are the very lengths of its run (and depend on `num_requests`). None: from the scenario's seed.
    Source: https://github.com/kimbochen/bench_serving, `benchmark_serving.py`, whose own default is 0."""

    def __post_init__(self) -> None:
        self._check_streams()
        self._check_lengths_seed()
        _check_count(num_requests=self.num_requests)
        _check_positive(duration_s=self.duration_s)
        if self.clients is not None:
            self._check_clients()
        elif self.tenants and not all(tenant.is_label for tenant in self.tenants):
            self._check_tenants()
        else:
            self._check_lengths_given("arrivals")
            if self.tenants and self.trace is None:
                raise ValueError(f"tenant {self.tenants[0].name!r} has neither a share nor arrivals; give one")
        names = [tenant.name for tenant in self.tenants]
        if repeated := [name for index, name in enumerate(names) if name in names[:index]]:
            raise ValueError(f"two tenants are called {repeated[0]!r}")
        self._check_end()

    def _check_lengths_seed(self) -> None:
        if self.lengths_seed is None:
            return
        if not 0 <= self.lengths_seed < MAX_LEGACY_SEED:
            raise ValueError(f"lengths_seed must be from 0 to {MAX_LEGACY_SEED - 1}, not {self.lengths_seed}")
        drawn = isinstance(self.input_tokens, int | Uniform) and isinstance(self.output_tokens, int | Uniform)
        if not drawn or self.tenants or self.sessions is not None or self.shared_prompts is not None:
            raise ValueError("lengths_seed needs input_tokens and output_tokens, numbers or uniform, and nothing else")

    def _check_clients(self) -> None:
        others = ("arrivals", "input_tokens", "output_tokens", "total_tokens", "trace", "sessions", "tenants")
        for name in others:
            if getattr(self, name):
                raise ValueError(f"clients give times and lengths; {name} cannot be given too")

    def _check_tenants(self) -> None:
        for name in ("input_tokens", "output_tokens", "total_tokens", "trace", "sessions", "shared_prompts"):
            if getattr(self, name) is not None:
                raise ValueError(f"with tenants, {name} belongs to each of them")
        for tenant in self.tenants:
            if tenant.share is None and tenant.arrivals is None and tenant.trace is None:
                raise ValueError(f"tenant {tenant.name!r} has neither a share nor arrivals; give one")
            if tenant.share is not None and self.arrivals is None:
                raise ValueError(f"tenant {tenant.name!r} has a share, but the workload has no arrivals to share")
            tenant._check_lengths_given(*(["arrivals"] if tenant.share is None else []))
            if tenant.share is not None and tenant.trace and (tenant.trace.start_s or tenant.trace.time_scale != 1):
                raise ValueError("the trace's start_s and time_scale have no effect where arrivals are given")
        if self.arrivals is not None and all(tenant.share is None for tenant in self.tenants):
            raise ValueError("no tenant has a share of the workload's arrivals; give shares, or leave arrivals out")

    def _check_end(self) -> None:
        if self.duration_s is not None and self.arrivals is not None and not self._ends_by_time:
            raise ValueError("duration_s cannot end a closed loop or a single burst; give num_requests")
        if self.num_requests is not None or self.duration_s is not None or self.trace is not None:
            return
        sources = [self.arrivals, *(tenant.arrivals for tenant in self.tenants)]
        if not all(source is None or isinstance(source, Recorded) for source in sources) or self.clients is not None:
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


def _check_weights(weights: tuple[float, ...] | None, num_values: int) -> None:
    if weights is None:
        return
    if len(weights) != num_values:
        raise ValueError(f"there are {num_values} values but {len(weights)} weights")
    for weight in weights:
        _check_non_negative(weights=weight)
    _check_positive(**{"the sum of weights": math.fsum(weights)})


def _check_lengths(**lengths: Lengths | None) -> None:
    for name, tokens in lengths.items():
        if isinstance(tokens, int):
            _check_tokens(**{name: tokens})


def _check_counts(least: int, **counts: Counts) -> None:
    for name, count in counts.items():
        if isinstance(count, int):
            lowest = count
        else:
            lowest = min(count.values) if isinstance(count, EmpiricalCount) else count.least
        if not least <= lowest <= MAX_TURNS:
            raise ValueError(f"{name} must be from {least} to {MAX_TURNS}, not {lowest}")


def _check_durations(**durations: Durations) -> None:
    for name, seconds in durations.items():
        if isinstance(seconds, int | float):
            _check_non_negative(**{name: seconds})
