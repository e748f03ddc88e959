"""Read OpenTelemetry spans of requests.

They stand in OTLP's JSON encoding, a document or one a line, or in what the APIs of Tempo (`/api/traces`,
`/api/v2/traces`) and Jaeger (`/api/traces`, and the download of its user interface) answer.
"""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from windtunnel.errors import InputError
from windtunnel.formats.recognise import FileContent
from windtunnel.formats.telemetry.record import ServerRecord, record_of_requests

ATTRIBUTES = {
    "input_tokens": ("gen_ai.usage.prompt_tokens", "gen_ai.usage.input_tokens"),
    "output_tokens": ("gen_ai.usage.completion_tokens", "gen_ai.usage.output_tokens"),
    "ttft_s": ("gen_ai.latency.time_to_first_token", "gen_ai.server.time_to_first_token"),
    "e2e_s": ("gen_ai.latency.e2e", "gen_ai.server.request.duration"),
    "queue_s": ("gen_ai.latency.time_in_queue",),
}
"""Column -> attributes of a span (vllm/tracing.py, 0.5 to 0.24; OpenTelemetry's semantic conventions). Times are in
seconds."""


SERVERS = ("service.name", "gen_ai.response.model")
"""Attributes that differ where several servers, or a gateway before them, emitted the spans."""
MOST_LONGER, LEAST_SPAN_S = 100.0, 0.01
"""A request lasts no longer than its span, but for clocks; times in milliseconds are a thousand times as long."""


def has_spans(file: FileContent) -> bool:
    """Whether a file holds spans."""
    return file.is_json and any(
        isinstance(each, dict) and ("resourceSpans" in each or _holders(each)) for each in file.documents
    )


def read_spans(path: Path) -> ServerRecord:
    """Read the requests that spans describe; those without token counts or times are passed over. InputError for no
    such span, or another structure."""
    columns: dict[str, list[float]] = {name: [] for name in ("arrival_s", *ATTRIBUTES)}
    servers = set[str]()
    try:
        for arrival_s, lasted_s, attributes in chain.from_iterable(map(_spans, FileContent(path).documents)):
            values = {
                name: next((float(attributes[key]) for key in keys if attributes.get(key) is not None), None)
                for name, keys in ATTRIBUTES.items()
            }
            values["e2e_s"] = e2e_s = lasted_s if values["e2e_s"] is None else values["e2e_s"]
            if e2e_s > MOST_LONGER * max(lasted_s, LEAST_SPAN_S):
                said = f"a request of {e2e_s:g} s in a span of {lasted_s:.3g} s"
                raise InputError(f"{path} has {said}", "gen_ai.latency attributes are seconds; are these milliseconds?")
            values["queue_s"] = values["queue_s"] or 0.0
            if None in values.values() or not values["output_tokens"]:
                continue
            for name, value in {"arrival_s": arrival_s, **values}.items():
                columns[name].append(float(value or 0.0))
            servers.add(" ".join(str(attributes[name]) for name in SERVERS if attributes.get(name)))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{path}: a span lacks or misstates {error}") from None
    if not columns["arrival_s"]:
        raise InputError(f"{path} has no span of a request", "gen_ai.usage and gen_ai.latency attributes are needed")
    if len(servers) > 1:
        several = ", ".join(name or "one without a name" for name in sorted(servers))
        raise InputError(f"{path} has requests of several servers: {several}", "give the spans of one")
    return record_of_requests("OpenTelemetry spans", columns)


def _holders(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what holds spans: resources of OTLP, which Tempo wraps or calls batches, or traces of Jaeger."""
    trace = document.get("trace")
    given = trace if isinstance(trace, dict) else document
    listed = given.get("resourceSpans") or given.get("batches") or given.get("data") or ()
    return [each for each in listed if isinstance(each, dict) and {"scopeSpans", "spans"} & each.keys()]


def _spans(document: dict[str, Any]) -> Iterator[tuple[float, float, dict[str, Any]]]:
    """Yield beginning and duration in seconds, and attributes, of every span."""
    for holder in _holders(document):
        shared = _attributes(holder.get("resource") or {})
        for span in chain.from_iterable(scope.get("spans", ()) for scope in holder.get("scopeSpans") or [holder]):
            if "startTime" in span:
                process = (holder.get("processes") or {}).get(span.get("processID")) or {}
                tags = {tag["key"]: tag["value"] for tag in span.get("tags") or ()}
                tags["service.name"] = process.get("serviceName")
                yield span["startTime"] * 1e-6, span["duration"] * 1e-6, tags
                continue
            begin_ns, end_ns = int(span["startTimeUnixNano"]), int(span["endTimeUnixNano"])
            yield begin_ns * 1e-9, (end_ns - begin_ns) * 1e-9, {**shared, **_attributes(span)}


def _attributes(holder: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of a span or resource: a value stands below its type, 64-bit integers are texts in OTLP."""
    return {each["key"]: next(iter(each["value"].values()), None) for each in holder.get("attributes") or ()}
