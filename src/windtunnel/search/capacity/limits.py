"""Limits on percentiles of latencies, over requests or over tokens."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from windtunnel.errors import InputError, did_you_mean
from windtunnel.metrics.slo import Slo
from windtunnel.units import format_seconds, parse_quantity

METRICS = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "end to end", "queueing": "queueing"}
"""Name -> title. All are over requests, except inter-token latency, which is over tokens."""
ITL_STATISTICS = ("mean", "p50", "p90", "p95", "p99", "max")
DEFAULT_STATISTIC = "p99"

_NAME = re.compile(r"(?P<metric>[a-z0-9]+?)(?:_(?P<statistic>mean|max|p\d{1,2}(?:\.\d+)?))?$")


@dataclass(frozen=True)
class Limit:
    """A latency that must not exceed `most_s`."""

    metric: str
    """A key of `METRICS`."""
    statistic: str
    """`mean`, `max`, or a percentile such as `p99` or `p99.9`."""
    most_s: float

    @property
    def name(self) -> str:
        """`ttft_p90`."""
        return f"{self.metric}_{self.statistic}"

    @property
    def title(self) -> str:
        """`TTFT p90 <= 2 s`."""
        return f"{METRICS[self.metric]} {self.statistic} <= {format_seconds(self.most_s)}"

    @property
    def quantile(self) -> float:
        """Share of the values that must be within the limit; 1 for the maximum, NaN for the mean."""
        if self.statistic == "mean":
            return math.nan
        return 1.0 if self.statistic == "max" else float(self.statistic[1:]) / 100


def limit_of(name: str, value: float | str) -> Limit:
    """Return the limit `name` (`ttft_p90`; `tpot` means its 99th percentile) of `value` (`2s`, or seconds).

    Raises:
        InputError: there is no such latency or statistic, or the value is no positive time.
    """
    match = _NAME.match(name)
    if match is None or match["metric"] not in METRICS:
        known = [f"{metric}_{statistic}" for metric in METRICS for statistic in ("mean", "p50", "p90", "p99", "max")]
        hint = did_you_mean(name, known, f"name a latency and a statistic: {', '.join(METRICS)}; mean, p90, p99, max")
        raise InputError(f"there is no limit {name!r}", hint)
    statistic = match["statistic"] or DEFAULT_STATISTIC
    if match["metric"] == "itl" and statistic not in ITL_STATISTICS:
        raise InputError(f"{name}: the statistics of inter-token latency are {', '.join(ITL_STATISTICS)}")
    try:
        most_s = parse_quantity(f"{name}_s", str(value))
    except InputError as error:
        raise InputError(error.message.replace(f"{name}_s", name, 1), error.hint) from None
    if most_s <= 0:
        raise InputError(f"{name} is {value}; more than 0 is needed")
    return Limit(match["metric"], statistic, most_s)


def named_values(text: str, hint: str = "for instance ttft_p90=2s,tpot_p99=50ms") -> dict[str, str]:
    """Parse `ttft_p90=2s,tpot_p99=50ms` into names and values.

    Raises:
        InputError: another form.
    """
    values = {}
    for part in text.replace(",", " ").split():
        name, separator, value = part.partition("=")
        if not separator or not value:
            raise InputError(f"--slo: {part!r} is not of the form name=time", hint)
        values[name] = value
    return values


def parse_limits(text: str) -> tuple[Limit, ...]:
    """Parse `ttft_p90=2s,tpot_p99=50ms` into limits.

    Raises:
        InputError: another form, or what `limit_of` raises.
    """
    return limits_from(named_values(text))


def limits_from(values: Mapping[str, float | str]) -> tuple[Limit, ...]:
    """Return `{ttft_p90: 2s}` as limits."""
    return tuple(limit_of(name, value) for name, value in values.items())


def limits_of(slo: Slo | None) -> tuple[Limit, ...]:
    """Return a scenario's limits, which 99% of requests must keep."""
    if slo is None:
        return ()
    given = {name.removesuffix("_s"): getattr(slo, name) for name in slo.__struct_fields__}
    return tuple(Limit(name, DEFAULT_STATISTIC, value) for name, value in given.items() if value is not None)
