"""A real run, a sweep of them, or any profiler's file: latency, throughput, kernels, calls, copies, steps, roofline."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from windtunnel.errors import InputError
from windtunnel.files import write_text
from windtunnel.formats.captures import kernel_time
from windtunnel.formats.captures.capture import CLASSES, Capture, read_capture, short_name, within
from windtunnel.formats.captures.step_operators import MEASURED
from windtunnel.hardware import Device
from windtunnel.lab.experiments.schema import CONFIG, STEPS, SUMMARY, TRACE, Experiment, read_summary
from windtunnel.metrics.records import Table as RecordTable
from windtunnel.pricing.table import read_parquet
from windtunnel.report import report as all_blocks
from windtunnel.report.chart import Axis, Chart, Series, lines_across
from windtunnel.report.layout import cards_of, facts_of, filled, layouts_beside, table_of
from windtunnel.report.numbers import percent, shares_of
from windtunnel.report.render.html import page
from windtunnel.report.report import Bars, Block, Figures, OnPage, OnTerminal, Report, Section, Table
from windtunnel.schema import read_yaml
from windtunnel.units import format_bytes, format_count, format_seconds, format_si

LAYOUT = layouts_beside(__file__)
MOST_BARS, MOST_ROWS, MOST_POINTS = 20, 200, 2000
PAGES, SWEEP_PAGE = "visualization", "sweep_report.html"

Rows = Sequence[tuple[Experiment, Mapping[str, Any]]]
"""Each point with its summary."""


def experiment_report(summary: Mapping[str, Any]) -> Report:
    """Return the report of a finished run: model, latency and throughput, and under a profiler its kernels."""
    metrics = summary["metrics"]
    slowed = ", slowed by the profiler" if metrics["is_profiled"] else ""
    facts = facts_of({**metrics, "slowed": slowed}, LAYOUT["facts"])
    sections = []
    if summary.get("top_kernels"):
        bars = Bars(shares_of(summary["seconds_by_class"]))
        sections = [Section(f"Where the time goes, by {summary['tool']}", [bars, top_kernel_table(summary)])]
    title, headline = f"{summary['model']}, {summary['mode']}", filled(LAYOUT["headline"], metrics)
    return Report(title, [facts], sections, summary.get("notes", ()), verdict=headline)


def top_kernel_table(summary: Mapping[str, Any]) -> Table:
    """Return name, runs, total time and share of the kernels that take longest."""
    kernels = [{**kernel, "short_name": short_name(kernel["name"])} for kernel in summary.get("top_kernels") or []]
    return table_of(kernels, LAYOUT["top_kernels"])


def write_experiment_page(folder: Path) -> Path:
    """Write the page of a finished run to `visualization` in its folder; return the page's path. InputError where it is
    no folder of a finished run."""
    summary = finished_summary(folder)
    capture = capture_of(folder, str(summary["mode"]))
    sections = overview_sections(summary, folder)
    if capture is not None:
        sections += [Section("Devices", _devices(capture)), *capture_sections(capture, None)]
    config = [(key, json.dumps(value)) for key, value in read_yaml(folder / CONFIG).items()]
    sections.append(Section("Experiment", [Table(("field", "value"), config, left=2)]))
    name = folder.resolve().name
    lead = f"{summary['metrics']['engine']} on {summary['metrics']['device']}, mode {summary['mode']}"
    target = folder / PAGES / f"{name}_report.html"
    notes = capture.notes if capture is not None else ()
    write_text(
        target, page(Report(name, [lead], sections, notes, verdict=filled(LAYOUT["headline"], summary["metrics"])))
    )
    return target


def finished_summary(folder: Path) -> dict[str, Any]:
    """Read the summary of a finished run; InputError where there is none, or the run failed."""
    summary = read_summary(folder)
    if summary is None:
        raise InputError(f"{folder} holds no finished run of `windtunnel lab run`", f"{SUMMARY} is missing")
    if summary.get("status") != "done":
        raise InputError(f"the run in {folder} did not finish", "see its experiment.log")
    return summary


def capture_of(folder: Path, mode: str) -> Capture | None:
    """Read the measured part of a run's profile; None for a run without a profiler."""
    if mode == "torch":
        return read_capture(folder / TRACE)
    databases = sorted(folder.glob("*_profile.sqlite"))
    return within(read_capture(databases[0]), MEASURED) if mode in ("nsys", "nsys_ncu") and databases else None


def overview_sections(summary: Mapping[str, Any], folder: Path) -> list[Section]:
    """Return the figures of a finished run, and its steps where its folder has them."""
    metrics = summary["metrics"]
    slow = ["A profiler was at work: these times are longer than without."] if metrics["is_profiled"] else []
    steps = [Section("Steps", [OnPage(lambda: [_step_figure(folder)])])] if (folder / STEPS).is_file() else []
    return [Section("Overview", [cards_of(metrics, LAYOUT["cards"]), *slow]), *steps]


def _step_figure(folder: Path) -> Figures:
    """Plot every step of a finished run."""
    steps = read_parquet(folder / STEPS)
    start_s = np.array(steps["start_s"].to_pylist())
    took_s = np.array(steps["duration_s"].to_pylist())
    is_prefill = np.array(steps["num_prefills"].to_pylist()) > 0
    series = [
        Series(label, start_s[mask].tolist(), took_s[mask].tolist())
        for label, mask in (("prompts", is_prefill), ("decode", ~is_prefill))
    ]
    chart = Chart(Axis("start of the step", "s"), Axis("duration", "s", low=0.0), series)
    return Figures([(chart, "Every step of the run; the first computes the prompts")])


def capture_report(capture: Capture, name: str = "", device: Device | None = None) -> Report:
    """Return the report of any profiler's file: kernels, calls, copies, the device's time, and notes.

    Args:
        name: of the file, on a page.
        device: whose roofline a page draws the kernels under; None: none.
    """
    count = len(capture.kernels)
    is_traced = not count or bool((capture.kernels["device"] >= 0).any())
    rows = f"{count:,} kernels and copies" if is_traced else f"{format_count(count, 'operator')} of the CPU"
    lead = [OnPage(lambda: [name]), *_devices(capture)]
    shares = shares_of(kernel_time.class_time(capture))
    most = max(shares.items(), key=lambda item: item[1], default=None)
    owner = "device" if is_traced else "processor"
    headline = f"Most of the {owner}'s time is {most[0]}: {percent(most[1])}." if most else ""
    title = f"{capture.tool}: {rows}"
    return Report(title, lead, capture_sections(capture, device), capture.notes, verdict=headline)


def capture_sections(capture: Capture, device: Device | None) -> list[Section]:
    """Return a capture's sections: time, kernels, calls, copies, ranges and roofline, as far as it has them."""
    by_class = kernel_time.class_time(capture)
    bars = Bars(shares_of(by_class), LAYOUT["captions"]["classes"], sum(by_class.values()))
    times: list[Block] = [bars, OnPage(lambda: list(_kernel_bars(capture)))]
    statistics = {
        ("API call", "API calls"): kernel_time.by_name(capture, "api_calls"),
        ("copy", "Copies"): kernel_time.by_name(capture, "copies"),
    }
    return [
        Section("", times, "Where the time goes"),
        Section("Roofline", [OnPage(lambda: _roofline(capture, device))]),
        _in_both(lambda limit: _kernel_table(capture, limit), "Kernels"),
        *(
            _in_both(partial(_statistics_table, capture, values, name), heading)
            for (name, heading), values in statistics.items()
            if len(values)
        ),
        *_ranges(capture),
    ]


def _in_both(table: Callable[[int], Table], heading: str) -> Section:
    """Return a section of the first rows of a table on a terminal, and of many more on a page."""
    return Section("", [OnTerminal(lambda: [table(MOST_BARS)]), OnPage(lambda: [table(MOST_ROWS)])], heading)


def _devices(capture: Capture) -> list[Block]:
    """Return how busy each device was, where the capture has times."""
    return [all_blocks.Facts(list(_device_rows(capture)))] if capture.is_timeline and len(capture.kernels) else []


def _device_rows(capture: Capture) -> Iterator[tuple[str, str]]:
    for device, use in kernel_time.device_time(capture).items():
        name = f"{capture.devices[device]}, " if device in capture.devices else ""
        share = percent(use.busy_s / use.span_s) if use.span_s else "-"
        busy = f"{name}busy {format_seconds(use.busy_s)} of {format_seconds(use.span_s)} ({share})"
        longest = format_seconds(float(use.gaps_s.max(initial=0.0)))
        gaps = f"{format_count(len(use.gaps_s), 'gap')}, the longest {longest}"
        yield f"device {device}" if device >= 0 else "processor", f"{busy}, {gaps}"
        if use.communication_s:
            hidden = percent(use.overlap_fraction)
            yield "communication", f"{format_seconds(use.communication_s)}, {hidden} beside computation"
    launches = kernel_time.launch_times(capture)
    if len(launches.latency_s):
        yield "launch", f"{format_seconds(float(np.median(launches.latency_s)))} from call to kernel, median"


def _kernel_table(capture: Capture, limit: int) -> Table:
    """Return the kernels that take longest; a page has more of them, with their whole names and more columns."""
    kernels, is_on_page = kernel_time.kernel_table(capture), limit > MOST_BARS
    rows = []
    for row in kernels.rows(limit):
        name = capture.names[row["name"]]
        label = short_name(name)
        label = label if len(label) <= 36 else f"{label[:22]}…{label[-13:]}"
        stream, block = (None if row[column] < 0 else str(row[column]) for column in ("stream", "block_threads"))
        rows.append(
            row
            | {"title": name if is_on_page else label, "share_fraction": row["share"]}
            | {"class": CLASSES[row["kernel_class"]].replace("_", " "), "grid": _grid(row), "block": block}
            | {"stream": "several" if row["num_streams"] > 1 else stream}
        )
    columns = LAYOUT["kernels"] | (LAYOUT["kernels_on_page"] if is_on_page else {})
    table = table_of(rows, columns, left=2)
    kept = [place for place in range(len(columns)) if place < 2 or any(str(cells[place]) for cells in table.rows)]
    heads = [table.headers[place] for place in kept]
    return replace(table, headers=heads, rows=[[cells[place] for place in kept] for cells in table.rows])


def _grid(kernel: Mapping[str, Any]) -> str:
    """Return the commonest grid of a kernel, and the number of others."""
    sizes, others = [int(kernel[f"grid_{axis}"]) for axis in "xyz"], int(kernel["num_grids"]) - 1
    return "" if min(sizes) < 0 else " x ".join(map(str, sizes)) + (f", {others} more" if others else "")


def _statistics_table(capture: Capture, statistics: RecordTable, name: str, limit: int) -> Table:
    """Return a row per name, the first `limit`: count, total, share, median and longest."""
    rows = [
        {name: capture.names[row["name"]], "count": row["count"], "share_fraction": row["share"]}
        | {f"{each}_s": row[each] for each in ("total", "median", "most")}
        for row in statistics.rows(limit)
    ]
    moved = []
    if name == "copy" and limit > MOST_BARS:
        copied = kernel_time.by_name(capture, "copied")
        pairs = zip(copied["name"], copied["total"].tolist(), strict=True)
        moved = [f"Moved: {', '.join(f'{capture.names[code]} {format_bytes(total)}' for code, total in pairs)}."]
    return table_of(rows, {name: name, **LAYOUT["statistics"]}, notes=moved)


def _kernel_bars(capture: Capture) -> Iterator[Bars]:
    """Yield time by kernel and by API call, as far as the capture has them."""
    kernels, calls = kernel_time.kernel_table(capture), kernel_time.by_name(capture, "api_calls")
    for caption, names, seconds in (
        ("kernel_time", [short_name(capture.names[code]) for code in kernels["name"]], kernels["total_s"]),
        ("cuda_api", [capture.names[code] for code in calls["name"]], calls["total"]),
    ):
        shares = dict(zip(names, (seconds / (seconds.sum() or 1.0)).tolist(), strict=True))
        yield Bars(shares, LAYOUT["captions"][caption], float(seconds.sum()))


def _ranges(capture: Capture) -> list[Section]:
    """Return the ranges of a page: with the kernels that they launched, or as the host ran them."""

    def blocks() -> list[Block]:
        ranges = kernel_time.range_time(capture)
        if not len(ranges):
            hosts = kernel_time.by_name(capture, "host_ranges")
            return [_statistics_table(capture, hosts, "range on the host", MOST_ROWS)] if len(hosts) else []
        rows = [{**row, "title": capture.name_of(row["name"])} for row in ranges.rows(MOST_ROWS)]
        return [table_of(rows, LAYOUT["ranges"])]

    return [Section("Ranges", [OnPage(blocks)])]


def _roofline(capture: Capture, device: Device | None) -> list[Block]:
    """Plot achieved rate over arithmetic intensity for kernels whose work is known, below the device's peaks."""
    rows = capture.kernels
    known = np.flatnonzero(
        np.isfinite(rows["flops"]) & (rows["flops"] > 0) & (rows["num_bytes"] > 0) & (rows["duration_s"] > 0)
    )
    if not len(known):
        return []
    known = known[np.argsort(-rows["duration_s"][known], kind="stable")][:MOST_POINTS]
    intensity = rows["flops"][known] / rows["num_bytes"][known]
    rate = rows["flops"][known] / rows["duration_s"][known]
    series = []
    for code in np.unique(rows["kernel_class"][known]):
        mine = rows["kernel_class"][known] == code
        names = [short_name(capture.names[name]) for name in rows["name"][known][mine]]
        tips = [f"{name}: {format_si(value, 'FLOP/s')}" for name, value in zip(names, rate[mine].tolist(), strict=True)]
        series.append(Series(CLASSES[code], intensity[mine].tolist(), rate[mine].tolist(), tooltips=tips))
    series += _roofs(device, intensity) if device else []
    chart = Chart(Axis("FLOP a byte", is_log=True), Axis("FLOP/s", is_log=True), series)
    below = f", below the peaks of {device.title}" if device else ""
    return [Figures([(chart, f"Kernels whose work is known by their shapes or counters{below}")])]


def _roofs(device: Device, intensity: np.ndarray[Any, np.dtype[np.float64]]) -> Iterator[Series]:
    ridges = {name: peak / device.memory_bytes_per_s for name, peak in device.peak_flops_per_s.items()}
    low, high = float(intensity.min()) / 2, max(float(intensity.max()), *ridges.values()) * 2
    for name, peak in device.peak_flops_per_s.items():
        intensities = sorted({low, max(ridges[name], low), high})
        rates = [min(peak, value * device.memory_bytes_per_s) for value in intensities]
        yield Series(f"peak {name}", intensities, rates, "line")


def sweep_document(fields: Sequence[str], rows: Rows) -> dict[str, Any]:
    """Document a sweep."""
    return {
        "fields": list(fields),
        "points": [{"values": {name: getattr(point, name) for name in fields}, **summary} for point, summary in rows],
    }


def sweep_report(fields: Sequence[str], rows: Rows) -> Report:
    """Return the report of a sweep: its points, and curves over the swept fields."""
    done = [(point, summary) for point, summary in rows if summary["status"] == "done"]
    failed = sorted({str(summary["error"]) for _, summary in rows if "error" in summary})
    heads = (*fields, *LAYOUT["sweep"]["columns"], "folder")
    points = [_cells(fields, *row) for row in rows]
    name = rows[0][0].label if rows else "sweep"
    sections = [
        Section("Curves", [OnPage(lambda: [Figures(_curves(fields, done))])]),
        Section("", [Table(heads, points, left=0)], "Experiments"),
        Section("What did not run", [OnPage(lambda: [all_blocks.Text(failed)] if failed else [])]),
    ]
    verdict = f"{len(done)} finished: {name} over {', '.join(fields)}."
    return Report(f"{format_count(len(rows), 'experiment')}", [], sections, verdict=verdict)


def _cells(fields: Sequence[str], point: Experiment, summary: Mapping[str, Any]) -> list[str]:
    values = [str(getattr(point, name)) for name in fields]
    figures = (filled(template, summary) for template in LAYOUT["sweep"]["columns"].values())
    return [*values, *figures, str(summary.get("folder", ""))]


def _curves(fields: Sequence[str], rows: Rows) -> list[tuple[Chart, str]]:
    """Plot every figure over every field with several numeric values, a line for each combination of the others."""
    curves = []
    for field in fields:
        values = {getattr(point, field) for point, _ in rows}
        if len(values) > 1 and all(isinstance(value, int | float) for value in values):
            for metric, label, unit in LAYOUT["sweep"]["figures"]:
                points = [
                    ({name: getattr(point, name) for name in fields}, summary["metrics"][metric])
                    for point, summary in rows
                    if summary["metrics"][metric] is not None
                ]
                words = field.replace("_", " ")
                chart = Chart(Axis(words), Axis(label, unit, low=0.0), lines_across(points, field))
                curves.append((chart, f"{label} over {words}"))
    return curves
