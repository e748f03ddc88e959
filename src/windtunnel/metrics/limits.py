"""Limits on percentiles of latencies, over requests or over tokens."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from windtunnel.errors import InputError, did_you_mean
from windtunnel.schema import Positive, Schema, check_between
from windtunnel.units import format_seconds, parse_quantity

LEAST_PERCENTILE = 1
"""A limit that fewer of the requests must keep is none."""
Percentile = Annotated[float, partial(check_between, LEAST_PERCENTILE, 100)]


class Slo(Schema):
    """Limits that a request must keep to count as goodput, and the share of the requests that must; None: no limit."""

    ttft_s: Positive | None = None
    tpot_s: Positive | None = None
    e2e_s: Positive | None = None
    ttft_percentile: Percentile = 99.0
    """Percent of the requests that must keep the limit, as in `--slo ttft_p90=2s`."""
    tpot_percentile: Percentile = 99.0
    e2e_percentile: Percentile = 99.0

    @property
    def limits(self) -> dict[str, tuple[float, float]]:
        """Latency (`ttft`, `tpot`, `e2e`) -> its limit in seconds and the percentile that must keep it."""
        given = {
            "ttft": (self.ttft_s, self.ttft_percentile),
            "tpot": (self.tpot_s, self.tpot_percentile),
            "e2e": (self.e2e_s, self.e2e_percentile),
        }
        return {name: (limit_s, share) for name, (limit_s, share) in given.items() if limit_s is not None}


METRICS = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "end to end", "queueing": "queueing"}
"""Name -> title. All are over requests, except inter-token latency, which is over tokens."""
ITL_STATISTICS = ("mean", "p50", "p90", "p95", "p99", "max")
DEFAULT_STATISTIC = "p99"
_IMPROBABLE_S = {"ttft": 100.0, "tpot": 1.0, "itl": 1.0, "e2e": 1000.0, "queueing": 100.0}
"""Limits without a unit from these seconds on are taken for forgotten milliseconds."""

_STATISTIC = r"mean|max|p\d{1,2}(?:\.\d+)?"
_NAME = re.compile(rf"(?P<metric>[a-z0-9]+?)(?:_(?P<statistic>{_STATISTIC}))?$")
_AT_MOST = re.compile(r"\s*(?:<=|=<|≤|<|=|:)\s*")
_REVERSED = re.compile(rf"({_STATISTIC})[_ -]([a-z0-9]+)$")


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
    def is_of_requests(self) -> bool:
        """Whether an `Slo` can hold it: a request keeps or breaks it."""
        return f"{self.metric}_s" in Slo.__struct_fields__ and self.statistic != "mean"

    @property
    def quantile(self) -> float:
        """Share of the values that must be within the limit; 1 for the maximum, NaN for the mean."""
        return {"mean": math.nan, "max": 1.0}.get(self.statistic) or float(self.statistic[1:]) / 100


def limit_of(name: str, value: float | str) -> Limit:
    """Return the limit `name` (`ttft_p90`; `tpot` means its 99th percentile) of `value` (`2s`, or seconds). InputError
    where there is no such latency or statistic, or the value is no positive time."""
    match = _NAME.match(_REVERSED.sub(r"\2_\1", name.lower()).replace("-", "_"))
    if match is None or match["metric"] not in METRICS:
        known = [f"{metric}{end}" for metric in METRICS for end in ("", "_mean", "_p50", "_p90", "_p99", "_max")]
        hint = did_you_mean(name, known, f"name a latency and a statistic: {', '.join(METRICS)}; mean, p90, p99, max")
        raise InputError(f"there is no limit {name!r}", hint)
    statistic = match["statistic"] or DEFAULT_STATISTIC
    if statistic.startswith("p") and float(statistic[1:]) < LEAST_PERCENTILE:
        raise InputError(f"{name}: {statistic} is no percentile of a limit", "p1 to p99.9, for instance p90, or max")
    if match["metric"] == "itl" and statistic not in ITL_STATISTICS:
        raise InputError(f"{name}: the statistics of inter-token latency are {', '.join(ITL_STATISTICS)}")
    try:
        most_s = parse_quantity(f"{name}_s", str(value))
    except InputError as error:
        raise InputError(error.message.replace(f"{name}_s", name, 1), error.hint) from None
    if most_s <= 0:
        raise InputError(f"{name} is {value}; more than 0 is needed")
    has_no_unit = isinstance(value, str) and value.strip().replace(".", "").isdecimal()
    if has_no_unit and most_s >= _IMPROBABLE_S[match["metric"]]:
        raise InputError(f"{name} is {value}, which means {value} s", f"write the unit: {value}ms or {value}s")
    return Limit(match["metric"], statistic, most_s)


def named_values(
    text: str, hint: str = "for instance ttft_p90=2s,tpot_p99=50ms", option: str = "slo", kind: str = "time"
) -> dict[str, str]:
    """Parse `ttft_p90=2s,tpot_p99=50ms`, an option's value, into names and values; InputError for another form."""
    values = {}
    for part in text.replace(":", "=").replace(",", " ").split():
        name, separator, value = part.partition("=")
        if not separator or not value:
            raise InputError(f"{option}: {part!r} is not of the form name={kind}", hint)
        values[name] = value
    return values


def limit_values(text: str, option: str = "slo") -> dict[str, str]:
    """Parse the limits of an option into names and values; `ttft_p90 <= 2s; tpot < 50ms` is understood too."""
    return named_values(_AT_MOST.sub("=", text).replace(";", ","), option=option)


def share_of(text: str) -> float:
    """Return the share that `5%` or `0.05` is; NaN for what is no number."""
    try:
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        return math.nan


def parse_limits(given: str | Mapping[str, float | str]) -> tuple[Limit, ...]:
    """Read `ttft_p90=2s,tpot_p99=50ms`, or a table of the same names and values, as limits. InputError for another
    form, or what `limit_of` raises."""
    values = limit_values(given) if isinstance(given, str) else given
    try:
        return limits_from(values)
    except InputError as error:
        colon = "" if error.message.startswith(tuple(METRICS)) else ":"
        raise InputError(f"slo{colon} {error.message}", error.hint) from None


def limits_from(values: Mapping[str, float | str]) -> tuple[Limit, ...]:
    """Return `{ttft_p90: 2s}` as limits."""
    return tuple(limit_of(name, value) for name, value in values.items())


def check_limited(task: str, metrics: Iterable[str]) -> None:
    """Raise InputError for a limit on tokens where requests end with their prompt."""
    for metric in metrics if task != "generate" else ():
        if metric in ("ttft", "tpot", "itl"):
            said = f"a limit of {METRICS[metric]} says nothing here: task is {task!r}, whose requests have no output"
            raise InputError(said, "limit the whole latency, for instance e2e_p99=200ms")


def limits_of(slo: Slo | None) -> tuple[Limit, ...]:
    """Return a scenario's limits."""
    known = () if slo is None else slo.limits.items()
    return tuple(Limit(name, f"p{share:g}" if share < 100 else "max", most_s) for name, (most_s, share) in known)


def slo_fields(given: str | Mapping[str, float | str]) -> dict[str, Any]:
    """Read `ttft_p90=2s,tpot=50ms`, or a table of such names and of fields of an `Slo`, as fields of an `Slo`.
    InputError for what `parse_limits` raises, a limit that is not one of requests, or two on one latency."""
    named = limit_values(given) if isinstance(given, str) else given
    fields = {} if isinstance(given, str) else {name: value for name, value in named.items() if not _is_limit(name)}
    limits = parse_limits({name: value for name, value in named.items() if name not in fields})
    for limit in limits:
        if not limit.is_of_requests:
            hint = "ttft, tpot or e2e, with a percentile: ttft_p90=2s; windtunnel capacity keeps the others"
            raise InputError(f"slo: {limit.name} is not a limit that a request keeps or breaks", hint)
        if [each.metric for each in limits].count(limit.metric) > 1:
            raise InputError(f"slo: {METRICS[limit.metric]} has two limits", "windtunnel capacity keeps both")
    return fields | _fields(limits)


def _is_limit(name: str) -> bool:
    match = _NAME.match(name)
    return match is not None and match["metric"] in METRICS


def slo_of(limits: Iterable[Limit]) -> Slo | None:
    """Return the limits that a request keeps or breaks, of two on one latency that of more requests; None: no limit."""
    fields = _fields(sorted((limit for limit in limits if limit.is_of_requests), key=lambda limit: limit.quantile))
    return Slo(**fields) if fields else None


def _fields(limits: Iterable[Limit]) -> dict[str, float]:
    known = [(limit.metric, limit.most_s, round(100 * limit.quantile, 9)) for limit in limits]
    return {f"{name}_s": most_s for name, most_s, _ in known} | {f"{name}_percentile": at for name, _, at in known}
