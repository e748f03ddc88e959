"""Write a capture: summaries as JSON, kernels and the comparison of two profilers as CSV, kernels as Parquet."""

import csv
import json
from collections.abc import Iterable, Sequence
from io import StringIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.formats.captures.capture import CLASSES, Capture
from windtunnel.formats.captures.kernel_names import short_name
from windtunnel.formats.captures.kernel_time import (
    Statistics,
    call_time,
    class_time,
    copy_bytes,
    copy_time,
    device_time,
    host_range_time,
    kernel_table,
    kernel_time,
    launch_times,
    range_time,
)
from windtunnel.metrics.records import Table


def capture_summary(capture: Capture, num_kernels: int = 10) -> dict[str, Any]:
    """The top kernels with their share, the classes, and what the capture does not show."""
    found = kernel_time(capture)
    return {
        "tool": capture.tool,
        "notes": list(capture.notes),
        "top_kernels": [
            {
                "name": capture.names[found.names[place]],
                "time_percentage": float(found.share[place] * 100),
                "total_s": float(found.total[place]),
                "count": int(found.count[place]),
            }
            for place in range(min(num_kernels, len(found)))
        ],
        "seconds_by_class": class_time(capture),
    }


def capture_document(capture: Capture) -> dict[str, Any]:
    """A capture's summaries as a JSON document."""
    queue = launch_times(capture)
    ranges = range_time(capture)
    return {
        "summary": capture_summary(capture),
        "devices": {
            str(device): {
                "name": capture.devices.get(device, ""),
                "span_s": found.span_s,
                "busy_s": found.busy_s,
                "idle_s": found.idle_s,
                "copy_s": found.copy_s,
                "communication_s": found.communication_s,
                "overlapped_s": found.overlapped_s,
                "num_gaps": len(found.gaps_s),
                "longest_gap_s": float(found.gaps_s.max(initial=0.0)),
            }
            for device, found in device_time(capture).items()
        },
        "kernels": _statistics_document(capture, kernel_time(capture), "s"),
        "api_calls": _statistics_document(capture, call_time(capture), "s"),
        "copies": _statistics_document(capture, copy_time(capture), "s"),
        "copied": _statistics_document(capture, copy_bytes(capture), "bytes"),
        "launch_latency_s": _middle(queue.latency_s),
        "queue_s": _middle(queue.queue_s),
        "host_ranges": _statistics_document(capture, host_range_time(capture), "s"),
        "ranges": [
            {"name": capture.name_of(name), "host_s": float(host_s), "device_s": float(device_s), "num_kernels": int(n)}
            for name, host_s, device_s, n in zip(
                ranges.names, ranges.host_s, ranges.device_s, ranges.num_kernels, strict=True
            )
        ],
    }


def _middle(values: NDArray[np.float64]) -> dict[str, float] | None:
    known = values[np.isfinite(values)]
    if not len(known):
        return None
    return {"mean": float(known.mean()), "median": float(np.median(known)), "p99": float(np.percentile(known, 99))}


def _statistics_document(capture: Capture, found: Statistics, unit: str) -> list[dict[str, Any]]:
    return [
        {
            "name": capture.names[found.names[place]],
            "share": float(found.share[place]),
            "count": int(found.count[place]),
            **{
                f"{name}_{unit}": float(getattr(found, name)[place])
                for name in ("total", "mean", "median", "least", "most")
            },
        }
        for place in range(len(found))
    ]


def kernel_rows(capture: Capture) -> tuple[list[str], list[list[Any]]]:
    """The kernel table as headers and rows, most time first."""
    table = kernel_table(capture)
    headers = ["name", "class", *[name for name in table.columns if name not in ("name", "kernel_class")]]
    return headers, [_kernel_row(capture, table, place) for place in range(len(table))]


def _kernel_row(capture: Capture, table: Table, place: int) -> list[Any]:
    cells = [_cell(column[place]) for name, column in table.columns.items() if name not in ("name", "kernel_class")]
    return [capture.names[table["name"][place]], CLASSES[table["kernel_class"][place]], *cells]


def _cell(value: Any) -> Any:
    """What is unknown is an empty cell."""
    number = value.item()
    return "" if number == -1 or not np.isfinite(number) else number


def kernel_comparison(timed: Capture, counted: Capture) -> tuple[list[str], list[list[Any]]]:
    """Kernels as they ran (Nsight Systems) beside their counters (Nsight Compute), one row a kernel that both have."""
    counters = kernel_table(counted)
    by_name = {short_name(counted.names[code]): place for place, code in enumerate(counters["name"])}
    times = kernel_table(timed)
    headers = ["name", "class", "nsys_count", "nsys_total_s", "nsys_share", "nsys_mean_s", "ncu_count", "ncu_mean_s"]
    counts = ("flops_per_s", "bytes_per_s", "occupancy_fraction", "compute_fraction", "memory_fraction")
    rows = []
    for place, code in enumerate(times["name"]):
        name = short_name(timed.names[code])
        if name in by_name:
            beside = by_name[name]
            of_nsys = [_cell(times[column][place]) for column in ("count", "total_s", "share", "mean_s")]
            of_ncu = [_cell(counters[column][beside]) for column in ("count", "mean_s", *counts)]
            rows.append([timed.names[code], CLASSES[times["kernel_class"][place]], *of_nsys, *of_ncu])
    return [*headers, *counts], rows


def as_csv(headers: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Rows as CSV text."""
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(headers)
    writer.writerows(rows)
    return text.getvalue()


def as_json(document: Any) -> str:
    """A document as indented JSON; what is not finite is null, which other readers understand."""
    return json.dumps(_finite(document), indent=2) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value
