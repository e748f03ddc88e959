"""Read OpenTelemetry spans of requests, in OTLP's JSON encoding: a document, or one a line."""

from collections.abc import Iterator
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


MOST_LONGER, LEAST_SPAN_S = 100.0, 0.01
"""A request lasts no longer than its span, but for clocks; times in milliseconds are a thousand times as long."""


def has_spans(file: FileContent) -> bool:
    """Whether a file holds spans."""
    return file.is_json and any(isinstance(each, dict) and "resourceSpans" in each for each in file.documents)


def read_spans(path: Path) -> ServerRecord:
    """Read the requests that spans describe; those without token counts or times are passed over.

    Raises:
        InputError: no such span, or another structure.
    """
    columns: dict[str, list[float]] = {name: [] for name in ("arrival_s", *ATTRIBUTES)}
    try:
        for span in _spans(FileContent(path).documents):
            attributes = {each["key"]: each["value"] for each in (span.get("attributes") or ())}
            # OTLP writes 64-bit integers as texts.
            numbers = {key: value.get("doubleValue", value.get("intValue")) for key, value in attributes.items()}
            given = {key: float(number) for key, number in numbers.items() if number is not None}
            values = {
                name: next((given[key] for key in keys if key in given), None) for name, keys in ATTRIBUTES.items()
            }
            arrival_s = int(span["startTimeUnixNano"]) * 1e-9
            lasted_s = (int(span["endTimeUnixNano"]) - int(span["startTimeUnixNano"])) * 1e-9
            values["e2e_s"] = e2e_s = lasted_s if values["e2e_s"] is None else values["e2e_s"]
            if e2e_s > MOST_LONGER * max(lasted_s, LEAST_SPAN_S):
                said = f"a request of {e2e_s:g} s in a span of {lasted_s:.3g} s"
                raise InputError(f"{path} has {said}", "gen_ai.latency attributes are seconds; are these milliseconds?")
            values["queue_s"] = values["queue_s"] or 0.0
            if None in values.values() or not values["output_tokens"]:
                continue
            for name, value in {"arrival_s": arrival_s, **values}.items():
                columns[name].append(float(value or 0.0))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{path}: a span lacks or misstates {error}") from None
    if not columns["arrival_s"]:
        raise InputError(f"{path} has no span of a request", "gen_ai.usage and gen_ai.latency attributes are needed")
    return record_of_requests("OpenTelemetry spans", columns)


def _spans(documents: list[Any]) -> Iterator[dict[str, Any]]:
    for document in documents:
        for resource in document.get("resourceSpans", ()):
            for scope in resource.get("scopeSpans", ()):
                yield from scope.get("spans", ())
