"""Requests that belong together: turns of a conversation, tool calls of an agent, shared system prompts."""

from windtunnel.schema import Schema, check_between, check_non_negative, check_positive, check_weights
from windtunnel.workload.lengths import MAX_DISTINCT_TOKENS, Lengths, check_lengths, check_tokens

MAX_TURNS = 10_000
"""Most turns of a session; unbounded distributions are clipped here."""


class Exponential(Schema, tag="exponential", tag_field="type"):
    """Exponential distribution of times."""

    mean_s: float

    def __post_init__(self) -> None:
        check_positive(mean_s=self.mean_s)


class UniformSeconds(Schema, tag="uniform", tag_field="type"):
    """Uniform over the times from `min_s` to `max_s`."""

    min_s: float
    max_s: float

    def __post_init__(self) -> None:
        check_non_negative(min_s=self.min_s, max_s=self.max_s)
        if self.min_s > self.max_s:
            raise ValueError(f"min_s is {self.min_s:g}, above max_s, which is {self.max_s:g}")


class LognormalSeconds(Schema, tag="lognormal", tag_field="type"):
    """exp(Normal(log(median_s), sigma))."""

    median_s: float
    sigma: float

    def __post_init__(self) -> None:
        check_positive(median_s=self.median_s)
        check_non_negative(sigma=self.sigma)


Durations = float | Exponential | UniformSeconds | LognormalSeconds


class Geometric(Schema, tag="geometric", tag_field="type"):
    """`least` plus a geometric number of successes before the first failure; the mean of the sum is `mean`."""

    mean: float
    least: int = 1

    def __post_init__(self) -> None:
        check_non_negative(least=self.least)
        check_between(self.least, MAX_TURNS, mean=self.mean)


class UniformCount(Schema, tag="uniform", tag_field="type"):
    """Uniform over the integers from `least` to `most`, both included."""

    least: int
    most: int

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.most <= MAX_TURNS:
            raise ValueError(f"0 <= least <= most <= {MAX_TURNS} is needed, not {self.least} and {self.most}")


class EmpiricalCount(Schema, tag="empirical", tag_field="type"):
    """Counts drawn with replacement from given `values`."""

    values: tuple[int, ...]
    weights: tuple[float, ...] | None = None
    """Relative frequency of each value; None means equal."""

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("values is empty")
        for value in self.values:
            check_between(0, MAX_TURNS, values=value)
        check_weights(self.weights, len(self.values))


Counts = int | Geometric | UniformCount | EmpiricalCount


class ToolCalls(Schema):
    """An agent's loop: within a turn the model calls tools and gets another request with their answers."""

    per_turn: Counts
    """Calls of each turn; each makes one more request."""
    run_s: Durations
    """Time from the end of the request that calls a tool to the sending of the next request."""
    output_tokens: Lengths
    """Length of a tool's answer, which is appended to the context."""

    def __post_init__(self) -> None:
        _check_counts(0, per_turn=self.per_turn)
        _check_durations(run_s=self.run_s)
        check_lengths(output_tokens=self.output_tokens)


class Sessions(Schema):
    """Conversations: each arrival begins one, and each later turn is sent `think_s` after the previous answer.

    The concurrency of a closed loop is the number of sessions, not requests, under way.

    The prompt of each request is the whole conversation so far and the new text: `input_tokens` of the workload in the
    first turn, `followup_tokens` in later ones.
    """

    turns: Counts
    """Turns of a session, at least one."""
    think_s: Durations = 0.0
    """Time from the end of an answer to the sending of the next turn."""
    followup_tokens: Lengths | None = None
    """Length of the new text of the second and later turns; None means as in the first."""
    tool_calls: ToolCalls | None = None
    max_context_tokens: int | None = None
    """A session ends before the request whose prompt and output would be longer than this."""

    def __post_init__(self) -> None:
        _check_counts(1, turns=self.turns)
        _check_durations(think_s=self.think_s)
        check_lengths(followup_tokens=self.followup_tokens)
        check_tokens(max_context_tokens=self.max_context_tokens)


class SharedPrompts(Schema):
    """System prompts that many requests begin with; their tokens are added to `input_tokens`."""

    tokens: Lengths
    count: int = 1
    """Distinct prompts."""
    alpha: float = 0.0
    """The r-th prompt has a probability proportional to r^-alpha; 0: all are equally likely."""

    def __post_init__(self) -> None:
        check_lengths(tokens=self.tokens)
        check_non_negative(alpha=self.alpha)
        check_between(1, MAX_DISTINCT_TOKENS, count=self.count)


def _check_counts(least: int, **counts: Counts) -> None:
    for name, count in counts.items():
        if isinstance(count, int):
            lowest = count
        else:
            lowest = min(count.values) if isinstance(count, EmpiricalCount) else count.least
        check_between(least, MAX_TURNS, **{name: lowest})


def _check_durations(**durations: Durations) -> None:
    for name, seconds in durations.items():
        if isinstance(seconds, int | float):
            check_non_negative(**{name: seconds})
