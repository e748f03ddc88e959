"""Requests that belong together: turns of a conversation, tool calls of an agent, shared system prompts."""

from functools import partial
from typing import Annotated

from windtunnel.schema import NonNegative, Positive, Schema, check_between, check_non_negative
from windtunnel.workload.lengths import MAX_DISTINCT_TOKENS, Lengths, Tokens, check_values

MAX_TURNS = 10_000
"""Most turns of a session; unbounded distributions are clipped here."""


class Exponential(Schema, tag="exponential", tag_field="type"):
    """Exponential distribution of times."""

    mean_s: Positive


class UniformSeconds(Schema, tag="uniform", tag_field="type"):
    """Uniform over the times from `min_s` to `max_s`."""

    min_s: NonNegative
    max_s: NonNegative

    def check(self) -> None:
        if self.min_s > self.max_s:
            raise ValueError(f"min_s is {self.min_s:g}, above max_s, which is {self.max_s:g}")


class LognormalSeconds(Schema, tag="lognormal", tag_field="type"):
    """exp(Normal(log(median_s), sigma))."""

    median_s: Positive
    sigma: NonNegative


Durations = NonNegative | Exponential | UniformSeconds | LognormalSeconds


class Geometric(Schema, tag="geometric", tag_field="type"):
    """`least` plus a geometric number of successes before the first failure; the mean of the sum is `mean`."""

    mean: float
    least: Annotated[int, check_non_negative] = 1

    def check(self) -> None:
        check_between(self.least, MAX_TURNS, mean=self.mean)


class UniformCount(Schema, tag="uniform", tag_field="type"):
    """Uniform over the integers from `least` to `most`, both included."""

    least: int
    most: int

    def check(self) -> None:
        if not 0 <= self.least <= self.most <= MAX_TURNS:
            raise ValueError(f"0 <= least <= most <= {MAX_TURNS} is needed, not {self.least} and {self.most}")


class EmpiricalCount(Schema, tag="empirical", tag_field="type"):
    """Counts drawn with replacement from given `values`."""

    values: tuple[int, ...]
    weights: tuple[float, ...] | None = None
    """Relative frequency of each value; None means equal."""

    def check(self) -> None:
        check_values(0, MAX_TURNS, self.values, self.weights)


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
        check_count("per_turn", self.per_turn, 0)
        super().__post_init__()


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
    max_context_tokens: Tokens | None = None
    """A session ends before the request whose prompt and output would be longer than this."""

    def __post_init__(self) -> None:
        check_count("turns", self.turns, 1)
        super().__post_init__()


class SharedPrompts(Schema):
    """System prompts that many requests begin with; their tokens are added to `input_tokens`."""

    tokens: Lengths
    count: Annotated[int, partial(check_between, 1, MAX_DISTINCT_TOKENS)] = 1
    """Distinct prompts."""
    alpha: NonNegative = 0.0
    """The r-th prompt has a probability proportional to r^-alpha; 0: all are equally likely."""


def check_count(name: str, count: Counts, least: int) -> None:
    """Raise ValueError unless every count that may be drawn is from `least` to `MAX_TURNS`."""
    if isinstance(count, int):
        lowest = count
    else:
        lowest = min(count.values) if isinstance(count, EmpiricalCount) else count.least
    check_between(least, MAX_TURNS, **{name: lowest})
