"""Checks of a noun's numbers; each raises ValueError, to which decoding adds the path."""

import math

MAX_SEED = 2**53
"""A number of JSON holds it exactly, and what is added to it for further streams fits in 64 bits."""


def check_positive(**values: float | None) -> None:
    """Every value that is given is finite and above 0."""
    for name, value in values.items():
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be a positive number, not {value}")


def check_non_negative(**values: float) -> None:
    """Every value is finite and at least 0."""
    for name, value in values.items():
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} must be a number of at least 0, not {value}")


def check_weights(weights: tuple[float, ...] | None, num_values: int) -> None:
    """There is a weight for every value, none is negative, and they do not sum to 0."""
    if weights is None:
        return
    if len(weights) != num_values:
        raise ValueError(f"there are {num_values} values but {len(weights)} weights")
    for weight in weights:
        check_non_negative(weights=weight)
    check_positive(**{"the sum of weights": math.fsum(weights)})


def check_seed(seed: int) -> None:
    """A seed is from 0 to `MAX_SEED`."""
    if seed < 0:
        raise ValueError(f"seed is {seed}; at least 0 is needed")
    if seed > MAX_SEED:
        raise ValueError(f"seed is {seed}; at most {MAX_SEED} is possible")
