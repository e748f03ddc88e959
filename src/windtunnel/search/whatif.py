"""A small grid of settings, each run at the load that the scenario gives it."""

import re
from collections.abc import Sequence
from typing import Any

from windtunnel.errors import InputError
from windtunnel.schema import parse_yaml
from windtunnel.search.space.space import Space, space_from
from windtunnel.units import format_count

MOST_POINTS = 10_000

_NUMBER = r"(-?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"
_RANGE = re.compile(f"{_NUMBER}:{_NUMBER}(?::{_NUMBER})?$")


def axes_of(vary: Sequence[str]) -> dict[str, list[Any]]:
    """Parse `--vary` options, `PATH=1,2,4`, `PATH=FIRST:LAST:STEP` or `PATH=[...]` with YAML, into path -> values.

    Raises:
        InputError: another form.
    """
    return dict(_axis(text) for text in vary)


def grid_of(raw: dict[str, Any], vary: Sequence[str]) -> Space:
    """Return the space that `--vary` options make of a scenario, given as builtins.

    Raises:
        InputError: as `axes_of`; a path that leads nowhere, or more than `MOST_POINTS` points.
    """
    space = space_from({**raw, "vary": axes_of(vary), "load": "given"}, "--vary")
    if space.num_points > MOST_POINTS:
        raise InputError(
            f"--vary: {format_count(space.num_points, 'point')}; a grid has {MOST_POINTS:,} at most", "use a search"
        )
    return space


def _axis(text: str) -> tuple[str, list[Any]]:
    path, separator, value = text.partition("=")
    path = path.strip()
    if not separator or not path or not value.strip():
        raise InputError(f"--vary: {text!r} is not of the form path=values", "for instance tp=1,2,4 or rate=1:20:2")
    if match := _RANGE.match(value.strip()):
        return path, _steps(text, *match.groups())
    parsed = parse_yaml(value if value.lstrip().startswith("[") else f"[{value}]")
    return path, list(parsed)


def _steps(text: str, first: str, last: str, step: str | None) -> list[float]:
    low, high, by = float(first), float(last), float(step or 1)
    if by <= 0 or high < low:
        raise InputError(f"--vary: {text!r} has no values", "write first:last:step, step above 0")
    count = int((high - low) / by + 1e-9) + 1
    if count > MOST_POINTS:
        raise InputError(
            f"--vary: {text!r} has {format_count(count, 'value')}; a grid has {MOST_POINTS:,} points at most"
        )
    values = [low + by * index for index in range(count)]
    return [int(value) if value.is_integer() and "." not in first + (step or "") else value for value in values]
