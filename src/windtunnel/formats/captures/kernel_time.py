"""Sum up a capture's time: kernels, API calls, copies and ranges; gaps, launch latency and overlap.

The summaries count as those of `nsys stats` (2023.4) with the same names, so that both print the same sums.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.compiled.arrays import Floats
from windtunnel.formats.captures.capture import CLASSES, COLUMNS, COPY, GRAPH, KERNEL, MEMSET, OPERATOR, Capture
from windtunnel.metrics.records import Table

COMMUNICATION = CLASSES.index("communication")


def statistics(names: NDArray[Any], values: NDArray[Any]) -> Table:
    """Return sums, means and spreads of `values` by the equal `names` beside them, the largest sum first.

    Columns are `name`, `total`, `share` of the sum over all names, `count`, `mean`, `median`, `least`, `most` and
    `deviation`.
    """
    order = np.lexsort((values, names))
    ordered = values[order].astype(np.float64)
    different, first, count = np.unique(names[order], return_index=True, return_counts=True)
    total = np.add.reduceat(ordered, first)
    mean = total / count
    squares = np.add.reduceat((ordered - np.repeat(mean, count)) ** 2, first)
    variance = np.full(len(first), np.nan)
    np.divide(squares, count - 1, out=variance, where=count > 1)
    largest_first = np.lexsort((different, -total))
    whole = total[largest_first].sum()
    columns = {
        "name": different.astype(np.int64),
        "total": total,
        "share": total / whole if whole else np.zeros_like(total),
        "count": count,
        "mean": mean,
        "median": (ordered[first + (count - 1) // 2] + ordered[first + count // 2]) / 2,
        "least": ordered[first],
        "most": ordered[first + count - 1],
        "deviation": np.sqrt(variance),
    }
    return Table(columns, {}).where(largest_first)


_SUBJECTS: Mapping[str, tuple[str, tuple[int, ...] | None, str]] = {
    "kernels": ("kernels", (KERNEL, GRAPH, OPERATOR), "duration_s"),
    "api_calls": ("calls", None, "duration_s"),
    "copies": ("kernels", (COPY, MEMSET), "duration_s"),
    "copied": ("kernels", (COPY, MEMSET), "num_bytes"),
    "host_ranges": ("ranges", None, "duration_s"),
}
"""Subject -> table, activities of its rows where not all count, and the column that is summed up."""


def by_name(capture: Capture, subject: str) -> Table:
    """Sum up a subject by name: seconds of `kernels` (also of whole graphs and operators), `api_calls`, `copies` and
    memsets by direction and `host_ranges` (nested ones count in both), or the bytes `copied`.

    They are `cuda_gpu_kern_sum`, `cuda_api_sum`, `cuda_gpu_mem_time_sum`, `nvtx_sum` and `cuda_gpu_mem_size_sum`.
    """
    table, activities, column = _SUBJECTS[subject]
    rows: Table = getattr(capture, table) if activities is None else capture.kernels_of(*activities)
    return statistics(rows["name"], rows[column])


def class_time(capture: Capture) -> dict[str, float]:
    """Return class -> seconds of its kernels, copies and operators, the largest first."""
    by_class = statistics(capture.kernels["kernel_class"], capture.kernels["duration_s"])
    return {CLASSES[code]: float(total) for code, total in zip(by_class["name"], by_class["total"], strict=True)}


class LaunchTimes(NamedTuple):
    """Times of every kernel whose launch was recorded (`cuda_kern_exec_sum`)."""

    queue_s: Floats
    """From the end of the call to the start of the kernel; NaN where the kernel started within the call."""
    latency_s: Floats
    """From the start of the call to the start of the kernel."""


def launch_times(capture: Capture) -> LaunchTimes:
    """Return the times between launches and starts of kernels."""
    rows = capture.kernels.where((capture.kernels["activity"] == KERNEL) & (capture.kernels["call"] >= 0))
    latency_s = rows["start_s"] - capture.calls["start_s"][rows["call"]]
    queue_s = latency_s - capture.calls["duration_s"][rows["call"]]
    queue_s[queue_s < 0] = np.nan
    return LaunchTimes(queue_s, latency_s)


def range_time(capture: Capture) -> Table:
    """Project every range onto the device, by the calls that lie wholly within it on its thread (`nvtx_gpu_proj_sum`).

    There is a row for each instance with device work: `device_s` is from the first start to the last end of the kernels
    launched within, `busy_s` the sum over them.
    """
    kernels, calls, ranges = capture.kernels, capture.calls, capture.ranges
    launched = np.flatnonzero(kernels["call"] >= 0)
    by_call = kernels["call"][launched]
    call_start_s, call_s = calls["start_s"][by_call], calls["duration_s"][by_call]
    kernel_end_s = kernels["start_s"] + kernels["duration_s"]
    rows, spans_s, numbers, busy_s = [], [], [], []
    for thread in np.unique(ranges["thread"]):
        on_thread = np.flatnonzero(calls["thread"][by_call] == thread)
        on_thread = on_thread[np.argsort(call_start_s[on_thread], kind="stable")]
        starts_s = call_start_s[on_thread]
        ends_s = starts_s + call_s[on_thread]
        for row in np.flatnonzero(ranges["thread"] == thread):
            start_s = ranges["start_s"][row]
            end_s = start_s + ranges["duration_s"][row]
            low, high = np.searchsorted(starts_s, start_s, "left"), np.searchsorted(starts_s, end_s, "right")
            inside = launched[on_thread[low:high][ends_s[low:high] <= end_s]]
            if len(inside):
                rows.append(row)
                spans_s.append(kernel_end_s[inside].max() - kernels["start_s"][inside].min())
                numbers.append(len(inside))
                busy_s.append(kernels["duration_s"][inside].sum())
    chosen = np.array(rows, np.int64)
    columns = {
        **{name: ranges[name][chosen] for name in ("name", "is_nested")},
        "host_s": ranges["duration_s"][chosen],
        "device_s": np.array(spans_s),
        "num_kernels": np.array(numbers, np.int64),
        "busy_s": np.array(busy_s),
    }
    return Table(columns, {})


@dataclass(frozen=True)
class DeviceTime:
    """Use of one device, from the start of its first kernel to the end of its last."""

    span_s: float
    busy_s: float
    """Time in which at least one kernel or copy ran."""
    communication_s: float
    """Time in which at least one kernel of communication ran."""
    overlapped_s: float
    """Time in which communication ran beside computation."""
    gaps_s: Floats
    """Lengths of the intervals in which nothing ran, in order."""
    copy_s: float
    """Time in which at least one copy or memset ran."""

    @property
    def idle_s(self) -> float:
        return self.span_s - self.busy_s

    @property
    def overlap_fraction(self) -> float:
        """Share of the communication that computation hides; NaN without communication."""
        return self.overlapped_s / self.communication_s if self.communication_s else float("nan")


def device_time(capture: Capture) -> dict[int, DeviceTime]:
    """Return how each device spent the capture; empty for a capture that has durations only."""
    kernels = capture.kernels
    if not capture.is_timeline:
        return {}
    by_device = {}
    for device in np.unique(kernels["device"]):
        rows = kernels.where(kernels["device"] == device)
        is_copy = np.isin(rows["activity"], (COPY, MEMSET))
        is_communication = rows["kernel_class"] == COMMUNICATION
        busy, communication = _merged(rows), _merged(rows.where(is_communication))
        computing = _merged(rows.where(~is_communication & ~is_copy))
        shared_s = _length(communication) + _length(computing) - _length(_union(communication, computing))
        by_device[int(device)] = DeviceTime(
            span_s=float(busy[1][-1] - busy[0][0]),
            busy_s=_length(busy),
            communication_s=_length(communication),
            # Rounding leaves a little more or less than nothing where intervals only touch.
            overlapped_s=max(0.0, shared_s),
            gaps_s=busy[0][1:] - busy[1][:-1],
            copy_s=_length(_merged(rows.where(is_copy))),
        )
    return by_device


Intervals = tuple[Floats, Floats]
"""Starts and ends, disjoint and in order."""


def _merged(rows: Table) -> Intervals:
    return _union((rows["start_s"], rows["start_s"] + rows["duration_s"]), (np.empty(0), np.empty(0)))


def _union(left: Intervals, right: Intervals) -> Intervals:
    starts, ends = (np.concatenate(pair) for pair in zip(left, right, strict=True))
    if not len(starts):
        return starts, ends
    order = np.argsort(starts, kind="stable")
    starts, reached = starts[order], np.maximum.accumulate(ends[order])
    # Times are whole nanoseconds, so less than half of one between two is rounding.
    new = np.flatnonzero(np.append(True, starts[1:] > reached[:-1] + 0.5e-9))
    return starts[new], reached[np.append(new[1:], len(starts)) - 1]


def _length(intervals: Intervals) -> float:
    return float((intervals[1] - intervals[0]).sum())


def kernel_table(capture: Capture) -> Table:
    """Return one row for each name of a kernel, copy or operator, with the columns `names` of `columns.yaml`."""
    kernels = capture.kernels
    known = statistics(kernels["name"], kernels["duration_s"])
    order = np.argsort(kernels["name"], kind="stable")
    edges = np.searchsorted(kernels["name"][order], known["name"], "left")
    groups = [order[edge : edge + count] for edge, count in zip(edges, known["count"], strict=True)]
    streams = np.array([_commonest(kernels["stream"][rows]) for rows in groups], np.int64).reshape(-1, 2)
    return Table(
        {
            "name": known["name"],
            "kernel_class": np.array([kernels["kernel_class"][rows[0]] for rows in groups], np.int64),
            "count": known["count"],
            "total_s": known["total"],
            "share": known["share"],
            **{f"{name}_s": known[name] for name in ("mean", "median", "least", "most", "deviation")},
            "stream": streams[:, 0],
            "num_streams": streams[:, 1],
            **_grids(kernels, groups),
            "flops_per_s": _rates(kernels, "flops", groups),
            "bytes_per_s": _rates(kernels, "num_bytes", groups),
            **{
                name: np.array([_weighted(kernels[name][rows], kernels["duration_s"][rows]) for rows in groups])
                for name in ("occupancy_fraction", "compute_fraction", "memory_fraction")
            },
        },
        COLUMNS["names"],
    )


def _commonest(values: NDArray[Any]) -> tuple[int, int]:
    different, counts = np.unique(values, return_counts=True)
    return int(different[np.argmax(counts)]), len(different)


def _grids(kernels: Table, groups: list[NDArray[np.intp]]) -> dict[str, NDArray[Any]]:
    names = ("grid_x", "grid_y", "grid_z")
    shape = np.column_stack([kernels[name] for name in (*names, "block_x", "block_y", "block_z")])
    chosen, numbers = [], []
    for rows in groups:
        different, counts = np.unique(shape[rows], axis=0, return_counts=True)
        chosen.append(different[np.argmax(counts)])
        numbers.append(len(np.unique(different[:, :3], axis=0)))
    commonest = np.array(chosen, np.int64).reshape(-1, 6)
    blocks = commonest[:, 3:]
    threads = np.where((blocks >= 0).all(axis=1), blocks.prod(axis=1), -1)
    grids = {name: commonest[:, axis] for axis, name in enumerate(names)}
    return {**grids, "num_grids": np.array(numbers, np.int64), "block_threads": threads}


def _rates(kernels: Table, work: str, groups: list[NDArray[np.intp]]) -> Floats:
    rates = np.full(len(groups), np.nan)
    for group, rows in enumerate(groups):
        known = rows[np.isfinite(kernels[work][rows]) & (kernels["duration_s"][rows] > 0)]
        if len(known):
            rates[group] = kernels[work][known].sum() / kernels["duration_s"][known].sum()
    return rates


def _weighted(values: Floats, weights: Floats) -> float:
    known = np.isfinite(values)
    total = weights[known].sum()
    return float((values[known] * weights[known]).sum() / total) if total else float("nan")
