"""Lengths of prompts and answers in tokens: a number, a distribution or a column of a file."""

from functools import partial
from typing import Annotated

from windtunnel.schema import NonNegative, Positive, Schema, check_between, check_weights

MAX_TOKENS = 2**31 - 1
"""Longest prompt or answer; distributions without a bound are clipped here."""
MAX_DISTINCT_TOKENS = 2**24
"""The widest range of a `Zipf`, which keeps one number for every length."""

check_tokens = partial(check_between, 1, MAX_TOKENS)
"""Raise ValueError unless each length that is given is from 1 to `MAX_TOKENS`."""
Tokens = Annotated[int, check_tokens]


class Fixed(Schema, tag="fixed", tag_field="type"):
    """One length for every request, the same as a bare integer."""

    tokens: Tokens


class Bounded(Schema):
    """A distribution from `min_tokens` to `max_tokens`, which may be None."""

    def check(self) -> None:
        """Raise ValueError where the bounds are out of order."""
        least, largest = (getattr(self, name) for name in ("min_tokens", "max_tokens"))
        if largest is not None and least > largest:
            raise ValueError(f"min_tokens is {least}, above max_tokens, which is {largest}")


class Uniform(Bounded, tag="uniform", tag_field="type"):
    """Uniform over the integers from `min_tokens` to `max_tokens`, both included."""

    min_tokens: Tokens
    max_tokens: Tokens


class Normal(Bounded, tag="normal", tag_field="type"):
    """Normal, rounded, then clipped: lengths beyond a bound are set to it."""

    mean_tokens: Positive
    std_tokens: NonNegative
    min_tokens: Tokens = 1
    max_tokens: Tokens | None = None


class Lognormal(Bounded, tag="lognormal", tag_field="type"):
    """exp(Normal(log(median_tokens), sigma)), rounded, then clipped: lengths beyond a bound are set to it.

    Before clipping the mean is median * exp(sigma^2 / 2). A mean m and standard deviation s need
    sigma = sqrt(log(1 + (s / m)^2)) and median = m / sqrt(1 + (s / m)^2).
    """

    median_tokens: Positive
    sigma: NonNegative
    """Standard deviation of the natural logarithm."""
    min_tokens: Tokens = 1
    max_tokens: Tokens | None = None


class Zipf(Bounded, tag="zipf", tag_field="type"):
    """The r-th shortest length has a probability proportional to r^-alpha: `min_tokens` (r = 1) is the likeliest.

    Bounded, so that any alpha >= 0 is allowed; 0 is uniform.
    """

    alpha: NonNegative
    min_tokens: Tokens
    max_tokens: Tokens

    def check(self) -> None:
        super().check()
        if self.max_tokens - self.min_tokens >= MAX_DISTINCT_TOKENS:
            raise ValueError(f"max_tokens - min_tokens must be below {MAX_DISTINCT_TOKENS}")


class Empirical(Schema, tag="empirical", tag_field="type"):
    """Lengths drawn with replacement from given `values` or from a column of the file at `path`.

    Input and output lengths are drawn independently; `Workload.trace` keeps the pairs of a file together.
    """

    values: tuple[int, ...] | None = None
    weights: tuple[float, ...] | None = None
    """Relative frequency of each value; None means equal."""
    path: str | None = None
    """A requests file (see `Trace.path`)."""
    column: str | None = None
    """Column of the file; None takes its column of input or output lengths, depending on which are drawn."""

    def check(self) -> None:
        if (self.values is None) == (self.path is None):
            raise ValueError("an empirical distribution needs either values or path")
        if self.path is not None and self.weights is not None:
            raise ValueError("weights belong to values, not to path")
        if self.values is not None:
            if self.column is not None:
                raise ValueError("column belongs to path, not to values")
            check_values(1, MAX_TOKENS, self.values, self.weights)


def check_values(least: int, largest: int, values: tuple[int, ...], weights: tuple[float, ...] | None) -> None:
    """Raise ValueError unless there are values, all from `least` to `largest`, and the weights are theirs."""
    if not values:
        raise ValueError("values is empty")
    for value in values:
        check_between(least, largest, values=value)
    check_weights(weights, len(values))


Lengths = Tokens | Fixed | Uniform | Normal | Lognormal | Zipf | Empirical
