"""Write a capture: summaries as JSON, kernels and the comparison of two profilers as CSV, kernels as Parquet."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from windtunnel.compiled.arrays import Floats
from windtunnel.files import write_bytes
from windtunnel.formats.captures import kernel_time
from windtunnel.formats.captures.capture import CLASSES, Capture, short_name

TOP_KERNELS = 10


def capture_summary(capture: Capture) -> dict[str, Any]:
    """Return the top kernels with their share, the time by class, and the notes."""
    return {
        "tool": capture.tool,
        "notes": list(capture.notes),
        "top_kernels": [
            {
                "name": kernel["name"],
                "time_percentage": kernel["share"] * 100,
                **{name: kernel[name] for name in ("total_s", "count")},
            }
            for kernel in _statistics_document(capture, "kernels")[:TOP_KERNELS]
        ],
        "seconds_by_class": kernel_time.class_time(capture),
    }


def capture_document(capture: Capture) -> dict[str, Any]:
    """Return a capture's summaries as a JSON document."""
    queue = kernel_time.launch_times(capture)
    return {
        "summary": capture_summary(capture),
        "devices": {
            str(device): {
                "name": capture.devices.get(device, ""),
                **{f"{part}_s": getattr(times, f"{part}_s") for part in _DEVICE_PARTS},
                "num_gaps": len(times.gaps_s),
                "longest_gap_s": float(times.gaps_s.max(initial=0.0)),
            }
            for device, times in kernel_time.device_time(capture).items()
        },
        **{subject: _statistics_document(capture, subject) for subject in ("kernels", "api_calls", "copies", "copied")},
        "launch_latency_s": _spread(queue.latency_s),
        "queue_s": _spread(queue.queue_s),
        "host_ranges": _statistics_document(capture, "host_ranges"),
        "ranges": [
            {
                "name": capture.name_of(row["name"]),
                **{name: row[name] for name in ("host_s", "device_s", "num_kernels")},
            }
            for row in kernel_time.range_time(capture).rows()
        ],
    }


_DEVICE_PARTS = ("span", "busy", "idle", "copy", "communication", "overlapped")


def _spread(values: Floats) -> dict[str, float] | None:
    """Return mean, median and p99 of the finite values; None without any."""
    known = values[np.isfinite(values)]
    if not len(known):
        return None
    return {"mean": float(known.mean()), "median": float(np.median(known)), "p99": float(np.percentile(known, 99))}


def _statistics_document(capture: Capture, subject: str) -> list[dict[str, Any]]:
    unit, seconds = "bytes" if subject == "copied" else "s", ("total", "mean", "median", "least", "most")
    return [
        {"name": capture.names[row["name"]], "share": row["share"], "count": row["count"]}
        | {f"{name}_{unit}": row[name] for name in seconds}
        for row in kernel_time.by_name(capture, subject).rows()
    ]


def write_kernels(capture: Capture, path: Path) -> None:
    """Write the kernel table with its texts as Parquet; it appears completely or not at all."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    content = pa.BufferOutputStream()
    pq.write_table(capture.to_arrow(), content)
    write_bytes(path, content.getvalue().to_pybytes())


def kernel_rows(capture: Capture) -> tuple[list[str], list[list[Any]]]:
    """Return the kernel table as headers and rows, most time first."""
    table = kernel_time.kernel_table(capture)
    numbers = [name for name in table.columns if name not in ("name", "kernel_class")]
    rows = [[*_titles(capture, row), *_cells(row, numbers)] for row in table.rows()]
    return ["name", "class", *numbers], rows


def _titles(capture: Capture, row: Mapping[str, Any]) -> list[str]:
    return [capture.names[row["name"]], CLASSES[row["kernel_class"]]]


def _cells(row: Mapping[str, Any], columns: Iterable[str]) -> list[Any]:
    """Return values of a row; unknown values are empty cells."""
    return ["" if row[name] == -1 or not math.isfinite(row[name]) else row[name] for name in columns]


def kernel_comparison(timed: Capture, counted: Capture) -> tuple[list[str], list[list[Any]]]:
    """Return times (Nsight Systems) beside counters (Nsight Compute), one row for each kernel that both have."""
    counters = {short_name(counted.names[row["name"]]): row for row in kernel_time.kernel_table(counted).rows()}
    of_nsys = ("count", "total_s", "share", "mean_s")
    counts = ("flops_per_s", "bytes_per_s", "occupancy_fraction", "compute_fraction", "memory_fraction")
    headers = ["name", "class", *(f"nsys_{name}" for name in of_nsys), "ncu_count", "ncu_mean_s", *counts]
    rows = [
        [*_titles(timed, row), *_cells(row, of_nsys), *_cells(counters[name], ("count", "mean_s", *counts))]
        for row in kernel_time.kernel_table(timed).rows()
        if (name := short_name(timed.names[row["name"]])) in counters
    ]
    return headers, rows
