"""What no answer may say, whatever was asked: numbers that cannot be, found by the names and units of their fields."""

import json
import math
from collections.abc import Iterator
from typing import Any

NEVER_NEGATIVE = ("_bytes", "_tokens", "_flops", "_per_s", "_per_hour", "_w", "_j", "_kwh", "_per_device")
SIGNED = ("error", "offset", "slack", "change", "drift", "rise", "bias", "residual", "launch_latency")
"""Words in the path of numbers that have a sign; a launch's latency in a trace is a difference of two clocks."""
SHARES = ("_fraction", "_share", "mfu", "mbu")
SLACK = 1 + 1e-6


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no JSON")


def read(text: str) -> Any:
    """The document of a text, strictly: NaN and infinity are no JSON."""
    return json.loads(text, parse_constant=_no_number)


def nonsense(document: Any, asked: tuple[str, ...] = ("scenario", "job", "job_file", "config")) -> Iterator[str]:
    """Name every impossible number of a document; parts that repeat what was asked are left out."""
    yield from _of_value(document, (), asked)
    if isinstance(document, dict):
        yield from _of_step(document)
        yield from _of_summary(document.get("summary"))


def _of_value(value: Any, path: tuple[str, ...], asked: tuple[str, ...]) -> Iterator[str]:
    if isinstance(value, dict):
        for key, part in value.items():
            if not (not path and key in asked):
                yield from _of_value(part, (*path, str(key)), asked)
    elif isinstance(value, list):
        for part in value:
            yield from _of_value(part, path, asked)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        where = ".".join(path)
        if not math.isfinite(value):
            yield f"{where} is {value}"
        elif not any(word in where for word in SIGNED):
            yield from _of_number(value, path, where)


def _of_number(value: float, path: tuple[str, ...], where: str) -> Iterator[str]:
    names = [name for name in path if not name.isdigit()]
    unit = next((name for name in reversed(names) if name.endswith(("_s", *NEVER_NEGATIVE, *SHARES))), "")
    if value < 0 and (unit or (names and names[-1].startswith("num_"))):
        yield f"{where} is {value}, below 0"
    if unit.endswith(SHARES) and value > SLACK:
        yield f"{where} is {value}, above 1"


def _of_step(document: dict[str, Any]) -> Iterator[str]:
    """A step's operators: no rate above the device's, and parts that sum to the whole."""
    operators = document.get("operators")
    if not isinstance(operators, list) or "device_s" not in document:
        return
    for operator in operators:
        for rate in ("compute_fraction", "memory_fraction", "flops_fraction", "bandwidth_fraction"):
            if (operator.get(rate) or 0.0) > SLACK:
                yield f"{operator.get('name')} has {rate} {operator[rate]}"
    parts_s = sum(document.get("seconds_by_kind", {}).values())
    if not math.isclose(parts_s, document["device_s"], rel_tol=1e-6, abs_tol=1e-12):
        yield f"the parts of a step take {parts_s} s, the whole {document['device_s']} s"


def _of_summary(summary: Any) -> Iterator[str]:
    """Percentiles rise, and nothing in a span is longer than it."""
    if not isinstance(summary, dict):
        return
    for name, each in summary.items():
        if isinstance(each, dict) and {"mean", "p50", "p90", "p99", "max"} <= set(each):
            values = [each[key] for key in ("p50", "p90", "p99", "max")]
            if values != sorted(values):
                yield f"{name} has percentiles that fall: {values}"
            if each["mean"] > each["max"] * SLACK:
                yield f"{name} has a mean above its maximum"
    # The span is the engine's; the client's time before the first token comes on top of it.
    e2e, ttft = summary.get("e2e_s"), summary.get("ttft_s")
    if isinstance(e2e, dict) and isinstance(ttft, dict) and e2e["max"] - ttft["max"] > summary["span_s"] * SLACK:
        yield f"a request takes {e2e['max']} s in a span of {summary['span_s']} s"
    if (checks := summary.get("checks")) and not checks.get("passed", True):
        yield f"the run's own checks failed: {checks}"
