"""Where a capture's time goes: kernels, API calls, copies and ranges summed up; gaps, launch latency and overlap.

The summaries count as those of `nsys stats` (2023.4) with the same names, so that both print the same sums.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.formats.captures.capture import CLASSES, COPY, GRAPH, KERNEL, MEMSET, OPERATOR, Capture
from windtunnel.metrics.records import Table

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

COMMUNICATION = CLASSES.index("communication")

STATISTICS: Mapping[str, str] = {
    "total": "sum over the rows of that name",
    "share": "of the sum over all names",
    "count": "rows",
    "mean": "",
    "median": "",
    "least": "",
    "most": "",
    "deviation": "sample standard deviation; NaN of a single row",
}

KERNEL_TABLE_COLUMNS: Mapping[str, str] = {
    "name": "position in the capture's names",
    "kernel_class": "position in CLASSES",
    "count": "times that it ran",
    "total_s": "all of them",
    "share": "of all rows",
    "mean_s": "of one",
    "median_s": "of one",
    "least_s": "of one",
    "most_s": "of one",
    "deviation_s": "sample standard deviation; NaN of a single one",
    "stream": "in which most of them ran",
    "num_streams": "different",
    "grid_x": "blocks, of the commonest grid",
    "grid_y": "",
    "grid_z": "",
    "num_grids": "different",
    "block_threads": "threads of a block of the commonest grid",
    "flops_per_s": "achieved, over the rows whose work is known; NaN: of none",
    "bytes_per_s": "achieved, over the rows whose bytes are known; NaN: of none",
    "occupancy_fraction": "mean, weighted with time",
    "compute_fraction": "of peak, weighted with time",
    "memory_fraction": "of peak, weighted with time",
}
"""One row a name, the most time first."""


@dataclass(frozen=True)
class Statistics:
    """Values by name, the largest sum first."""

    names: Ints
    total: Floats
    count: Ints
    mean: Floats
    median: Floats
    least: Floats
    most: Floats
    deviation: Floats

    @property
    def share(self) -> Floats:
        """Of the sum over all names."""
        whole = self.total.sum()
        return self.total / whole if whole else np.zeros_like(self.total)

    def __len__(self) -> int:
        return len(self.names)


def statistics(names: NDArray[Any], values: NDArray[Any]) -> Statistics:
    """Sums, means and spreads of `values` by the equal `names` beside them."""
    order = np.lexsort((values, names))
    by_name, ordered = names[order], values[order].astype(np.float64)
    first = np.flatnonzero(np.append(True, by_name[1:] != by_name[:-1])) if len(order) else np.empty(0, np.intp)
    count = np.diff(np.append(first, len(order)))
    total = np.add.reduceat(ordered, first) if len(order) else np.empty(0)
    mean = total / np.maximum(count, 1)
    squares = np.add.reduceat((ordered - np.repeat(mean, count)) ** 2, first) if len(order) else np.empty(0)
    deviation = np.full(len(first), np.nan)
    np.divide(squares, count - 1, out=deviation, where=count > 1)
    last = first + count - 1
    found = Statistics(
        names=by_name[first].astype(np.int64),
        total=total,
        count=count,
        mean=mean,
        median=(ordered[first + (count - 1) // 2] + ordered[first + count // 2]) / 2 if len(order) else np.empty(0),
        least=ordered[first] if len(order) else np.empty(0),
        most=ordered[last] if len(order) else np.empty(0),
        deviation=np.sqrt(deviation),
    )
    rank = np.lexsort((found.names, -found.total))
    return Statistics(**{name: column[rank] for name, column in vars(found).items()})


def kernel_time(capture: Capture) -> Statistics:
    """Seconds of kernels by name (`cuda_gpu_kern_sum`); of whole graphs and of operators too, where there are such."""
    rows = capture.kernels_of(KERNEL, GRAPH, OPERATOR)
    return statistics(rows["name"], rows["duration_s"])


def class_time(capture: Capture) -> dict[str, float]:
    """Class -> seconds of its kernels, copies and operators, the largest first."""
    found = statistics(capture.kernels["kernel_class"], capture.kernels["duration_s"])
    return {CLASSES[code]: float(total) for code, total in zip(found.names, found.total, strict=True)}


def call_time(capture: Capture) -> Statistics:
    """Seconds of API calls by name (`cuda_api_sum`)."""
    return statistics(capture.calls["name"], capture.calls["duration_s"])


def copy_time(capture: Capture) -> Statistics:
    """Seconds of copies and memsets by direction (`cuda_gpu_mem_time_sum`)."""
    rows = capture.kernels_of(COPY, MEMSET)
    return statistics(rows["name"], rows["duration_s"])


def copy_bytes(capture: Capture) -> Statistics:
    """Bytes of copies and memsets by direction (`cuda_gpu_mem_size_sum`)."""
    rows = capture.kernels_of(COPY, MEMSET)
    return statistics(rows["name"], rows["num_bytes"])


def host_range_time(capture: Capture) -> Statistics:
    """Seconds of ranges on the host by name (`nvtx_sum`); ranges within ranges count in both."""
    return statistics(capture.ranges["name"], capture.ranges["duration_s"])


@dataclass(frozen=True)
class LaunchTimes:
    """Of every kernel whose launch was recorded (`cuda_kern_exec_sum`)."""

    names: Ints
    call_names: Ints
    call_s: Floats
    """The API call."""
    queue_s: Floats
    """From the end of the call to the start of the kernel; NaN where the kernel started within the call."""
    kernel_s: Floats
    latency_s: Floats
    """From the start of the call to the start of the kernel."""


def launch_times(capture: Capture) -> LaunchTimes:
    """What lay between the launches and the starts of the kernels."""
    rows = capture.kernels_of(KERNEL)
    rows = rows.where(rows["call"] >= 0)
    calls = capture.calls
    start_s, call_s = calls["start_s"][rows["call"]], calls["duration_s"][rows["call"]]
    latency_s = rows["start_s"] - start_s
    queue_s = latency_s - call_s
    queue_s[queue_s < 0] = np.nan
    return LaunchTimes(rows["name"], calls["name"][rows["call"]], call_s, queue_s, rows["duration_s"].copy(), latency_s)


@dataclass(frozen=True)
class RangeTime:
    """A named range's time on host and device (`nvtx_gpu_proj_sum`): one entry an instance with device work."""

    names: Ints
    is_nested: Ints
    host_s: Floats
    device_s: Floats
    """From the first start to the last end of what was launched within."""
    num_kernels: Ints
    busy_s: Floats
    """Sum over what was launched within."""


def range_time(capture: Capture) -> RangeTime:
    """Every range projected onto the device: by the calls that lie wholly within it on its thread."""
    kernels, calls, ranges = capture.kernels, capture.calls, capture.ranges
    launched = np.flatnonzero(kernels["call"] >= 0)
    by_call = kernels["call"][launched]
    call_start_s, call_s = calls["start_s"][by_call], calls["duration_s"][by_call]
    kernel_end_s = kernels["start_s"] + kernels["duration_s"]
    rows: list[int] = []
    sums: list[tuple[float, int, float]] = []
    for thread in np.unique(ranges["thread"]):
        here = np.flatnonzero(calls["thread"][by_call] == thread)
        here = here[np.argsort(call_start_s[here], kind="stable")]
        starts, ends = call_start_s[here], call_start_s[here] + call_s[here]
        for row in np.flatnonzero(ranges["thread"] == thread):
            start_s = ranges["start_s"][row]
            end_s = start_s + ranges["duration_s"][row]
            low, high = np.searchsorted(starts, start_s, "left"), np.searchsorted(starts, end_s, "right")
            inside = launched[here[low:high][ends[low:high] <= end_s]]
            if len(inside):
                span_s = float(kernel_end_s[inside].max() - kernels["start_s"][inside].min())
                rows.append(int(row))
                sums.append((span_s, len(inside), float(kernels["duration_s"][inside].sum())))
    at = np.array(rows, np.int64)
    return RangeTime(
        names=ranges["name"][at],
        is_nested=ranges["is_nested"][at],
        host_s=ranges["duration_s"][at],
        device_s=np.array([span for span, _, _ in sums]),
        num_kernels=np.array([number for _, number, _ in sums], np.int64),
        busy_s=np.array([busy for _, _, busy in sums]),
    )


@dataclass(frozen=True)
class DeviceTime:
    """How one device spent the capture, from its first kernel to the end of its last."""

    span_s: float
    busy_s: float
    """At least one kernel or copy ran."""
    communication_s: float
    """At least one kernel of communication ran."""
    overlapped_s: float
    """Communication ran beside computation."""
    gaps_s: Floats
    """The times in which nothing ran, in order."""
    copy_s: float
    """At least one copy or memset ran."""

    @property
    def idle_s(self) -> float:
        return self.span_s - self.busy_s

    @property
    def overlap_fraction(self) -> float:
        """Share of the communication that computation hides; NaN without communication."""
        return self.overlapped_s / self.communication_s if self.communication_s else float("nan")


def device_time(capture: Capture) -> dict[int, DeviceTime]:
    """Device -> how it spent the capture. Empty of a capture that holds durations only."""
    kernels = capture.kernels
    if not capture.is_timeline:
        return {}
    found = {}
    for device in np.unique(kernels["device"]):
        rows = kernels.where(kernels["device"] == device)
        is_copy = np.isin(rows["activity"], (COPY, MEMSET))
        is_communication = rows["kernel_class"] == COMMUNICATION
        busy, communication = _merged(rows), _merged(rows.where(is_communication))
        computing = _merged(rows.where(~is_communication & ~is_copy))
        found[int(device)] = DeviceTime(
            span_s=float(busy[1][-1] - busy[0][0]),
            busy_s=_length(busy),
            communication_s=_length(communication),
            overlapped_s=_length(communication) + _length(computing) - _length(_union(communication, computing)),
            gaps_s=busy[0][1:] - busy[1][:-1],
            copy_s=_length(_merged(rows.where(is_copy))),
        )
    return found


Intervals = tuple[Floats, Floats]
"""Starts and ends, disjoint and in order."""


def _merged(rows: Table) -> Intervals:
    return _union((rows["start_s"], rows["start_s"] + rows["duration_s"]), (np.empty(0), np.empty(0)))


def _union(one: Intervals, other: Intervals) -> Intervals:
    starts, ends = np.concatenate([one[0], other[0]]), np.concatenate([one[1], other[1]])
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
    """One row a kernel, copy or operator by name: class, times, stream, grid, achieved rates, occupancy.

    Columns are those of `KERNEL_TABLE_COLUMNS`.
    """
    kernels = capture.kernels
    found = statistics(kernels["name"], kernels["duration_s"])
    order = np.argsort(kernels["name"], kind="stable")
    edges = np.searchsorted(kernels["name"][order], found.names, "left")
    groups = [order[edge : edge + count] for edge, count in zip(edges, found.count, strict=True)]
    columns: dict[str, NDArray[Any]] = {
        "name": found.names,
        "kernel_class": _each(kernels["kernel_class"], groups, lambda column: int(column[0]), np.int64),
        "count": found.count,
        "total_s": found.total,
        "share": found.share,
        "mean_s": found.mean,
        "median_s": found.median,
        "least_s": found.least,
        "most_s": found.most,
        "deviation_s": found.deviation,
        "stream": _each(kernels["stream"], groups, lambda column: _commonest(column)[0], np.int64),
        "num_streams": _each(kernels["stream"], groups, lambda column: _commonest(column)[1], np.int64),
        **_grids(kernels, groups),
        "flops_per_s": _rates(kernels, "flops", groups),
        "bytes_per_s": _rates(kernels, "num_bytes", groups),
    }
    for name in ("occupancy_fraction", "compute_fraction", "memory_fraction"):
        columns[name] = np.array([_weighted(kernels[name][rows], kernels["duration_s"][rows]) for rows in groups])
    return Table(columns, KERNEL_TABLE_COLUMNS)


def _each(column: NDArray[Any], groups: list[NDArray[np.intp]], of: Any, kind: Any) -> NDArray[Any]:
    return np.array([of(column[rows]) for rows in groups], kind)


def _commonest(values: NDArray[Any]) -> tuple[int, int]:
    """The commonest value, and how many there are."""
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
    of = np.array(chosen, np.int64).reshape(-1, 6)
    threads = np.where((of[:, 3:] >= 0).all(axis=1), of[:, 3:].prod(axis=1), -1)
    grids = {name: of[:, place] for place, name in enumerate(names)}
    return {**grids, "num_grids": np.array(numbers, np.int64), "block_threads": threads}


def _rates(kernels: Table, work: str, groups: list[NDArray[np.intp]]) -> Floats:
    rates = np.full(len(groups), np.nan)
    for place, rows in enumerate(groups):
        known = rows[np.isfinite(kernels[work][rows]) & (kernels["duration_s"][rows] > 0)]
        if len(known):
            rates[place] = kernels[work][known].sum() / kernels["duration_s"][known].sum()
    return rates


def _weighted(values: Floats, weights: Floats) -> float:
    known = np.isfinite(values)
    whole = weights[known].sum()
    return float((values[known] * weights[known]).sum() / whole) if whole else float("nan")
