"""Read results of load tests of web servers, Locust's and k6's: they know requests, and neither tokens nor loads."""

import csv
import io
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from windtunnel.errors import InputError
from windtunnel.formats.clients.read import MS, ClientResult, has, latencies, of_documents
from windtunnel.formats.recognise import FileContent, FileFormat

_K6_POINT = re.compile(rb'\s*\{(?:"metric":"\w+",)?"type":"(?:Metric|Point)","(?:data|metric)":')


def _result(name: str, client: str, times_ms: Mapping[str, Any], count: float, failed: float) -> ClientResult:
    known = latencies("avg", 0.0, e2e=(times_ms, MS))
    return ClientResult(name, client, 0, 0, int(count - failed), None, None, num_failed=int(failed), **known)


def _is_k6(document: dict[str, Any]) -> bool:
    return "http_req_duration" in (document.get("metrics") or ())


def _k6(name: str, document: dict[str, Any]) -> Iterator[ClientResult]:
    """Read k6's summary: `--summary-export`, or the data of `handleSummary`.

    Source: https://grafana.com/docs/k6/latest/results-output/end-of-test.
    """
    metrics = {key: each.get("values", each) for key, each in document["metrics"].items()}
    times_ms, failures = metrics["http_req_duration"], metrics.get("http_req_failed", {})
    percentiles = {f"p{key[2:-1]}": value for key, value in times_ms.items() if key.startswith("p(")}
    count = metrics["http_reqs"]["count"]
    failed = round(count * failures.get("rate", failures.get("value", 0.0)))
    yield _result(name, "k6", {**times_ms, **percentiles, "median": times_ms.get("med")}, count, failed)


def _k6_points(path: Path) -> list[ClientResult]:
    """Read the points of k6's `--out json=FILE`, a line each.

    Source: https://grafana.com/docs/k6/latest/results-output/real-time/json.
    """
    values: dict[str, list[float]] = {"http_req_duration": [], "http_req_failed": []}
    for number, line in enumerate(FileContent(path).text.splitlines(), 1):
        try:
            point = json.loads(line)
            if point["type"] == "Point" and point["metric"] in values:
                values[point["metric"]].append(float(point["data"]["value"]))
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{path} line {number} lacks or misstates {error}", "is it cut off or edited?") from None
    times_ms, failed = values.values()
    if not times_ms:
        raise InputError(f"{path} has no http_req_duration", "it is of requests that a script sends with k6/http")
    known = {f"p{part}": float(np.percentile(times_ms, part)) for part in (50, 90, 95, 99)}
    return [_result(path.stem, "k6", known | {"avg": float(np.mean(times_ms))}, len(times_ms), sum(failed))]


def _locust(path: Path) -> list[ClientResult]:
    """Read Locust's `..._stats.csv`, a row for each endpoint and one for all; InputError where several were asked.

    Source: https://docs.locust.io/en/stable/retrieving-stats.html.
    """
    rows = [row for row in csv.DictReader(io.StringIO(FileContent(path).text)) if row["Type"]]
    if len(rows) != 1:
        names = ", ".join(f"{row['Type']} {row['Name']}" for row in rows) or "none"
        raise InputError(f"{path} has the requests to {len(rows)} endpoints: {names}", "leave one row in the file")
    try:
        told = {key: value for key, value in rows[0].items() if key not in ("Type", "Name") and value != "N/A"}
        numbers = {key: float(value) for key, value in told.items()}
        times_ms = {f"p{key[:-1]}": value for key, value in numbers.items() if key.endswith("%")}
        times_ms["avg"] = numbers["Average Response Time"]
        return [_result(path.stem, "locust", times_ms, numbers["Request Count"], numbers["Failure Count"])]
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path} lacks or misstates {error}", "is it cut off or edited?") from None


FORMATS = (
    FileFormat("Locust", "client result", lambda file: file.start.startswith(b"Type,Name,Request Count,"), _locust),
    FileFormat("k6", "client result", has(_is_k6), of_documents(_k6)),
    FileFormat("k6 (--out json)", "client result", lambda file: bool(_K6_POINT.match(file.start)), _k6_points),
)
