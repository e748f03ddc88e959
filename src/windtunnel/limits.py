"""Limits of memory and time: what a run takes is estimated before it, and a larger one is refused in a sentence."""

import os
import resource
from pathlib import Path

from windtunnel.errors import InputError
from windtunnel.units import format_bytes, format_seconds, parse_quantity

MEMORY, TIME = "WINDTUNNEL_MEMORY_LIMIT", "WINDTUNNEL_TIME_LIMIT"
"""Environment variables of the limits, which worker processes inherit; `--memory-limit` and `--time-limit` set them."""
MOST_S = 86_400.0
"""Limit of a run's estimated time where none is given."""
COSTS = {
    "requests drawn": (60, 2e-7),
    "requests": (650, 5e-6),
    "requests in turn": (0, 5e-6),
    "tokens": (0, 2e-7),
    "trace rows": (150, 5e-7),
    "packets": (0, 3e-6),
    "measured runs": (20_000, 0.4),
    "flows": (3_500, 1e-4),
    "GPUs": (3_000, 5e-6),
    "tasks": (400, 1e-5),
    "points": (22_000, 1e-3),
}
"""Kind of things -> bytes and seconds that each takes on one core of 2.9 GHz, at least what `benchmarks/limits.py`
measures. It has no row for requests drawn, and 0.04 s for a point: a search need not simulate all of its space. Packets
cross six links.
"""


def check_size(**counts: float) -> None:
    """Raise InputError where so many things of the kinds in `COSTS`, `_` for a space, would exceed a limit of a run."""
    numbers = {name.replace("_", " "): count for name, count in counts.items()}
    needed_bytes, needed_s = (sum(count * COSTS[name][part] for name, count in numbers.items()) for part in (0, 1))
    many = " and ".join(f"{count:,.0f} {name}" for name, count in numbers.items())
    limit_bytes, limit_s = memory_limit_bytes(), time_limit_s()
    if needed_bytes > limit_bytes:
        limit = f"{format_bytes(limit_bytes)} {'is the limit' if os.environ.get(MEMORY) else 'are free'}"
        raise InputError(
            f"{many} take about {format_bytes(needed_bytes)} of memory; {limit}", "take fewer, or raise --memory-limit"
        )
    if needed_s > limit_s:
        raise InputError(
            f"{many} take about {format_seconds(needed_s)} to compute; {format_seconds(limit_s)} is the limit",
            "take fewer, or raise --time-limit",
        )


def set_limits(memory: str | None, time: str | None) -> None:
    """Set the limits of this process and those that it starts (None: as it is); InputError for no quantity above 0."""
    for variable, field, text in ((MEMORY, "memory_limit_bytes", memory), (TIME, "time_limit_s", time)):
        if text is not None:
            if not parse_quantity(field, text) > 0:
                raise InputError(f"{field} is {text!r}; more than 0 is needed")
            os.environ[variable] = text


def memory_limit_bytes() -> float:
    """Return the limit of a run's memory: the given one, or what the machine has free for this process."""
    if text := os.environ.get(MEMORY):
        return parse_quantity("memory_limit_bytes", text)
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    own = float(most) if most != resource.RLIM_INFINITY else float("inf")
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        free = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min(own, free)


def time_limit_s() -> float:
    """Return the limit of a run's estimated time."""
    text = os.environ.get(TIME)
    return parse_quantity("time_limit_s", text) if text else MOST_S
