"""A real run: a summary on the terminal, and a page with its kernels, calls, steps and roofline."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import RenderableType

from windtunnel.errors import InputError
from windtunnel.files import write_text
from windtunnel.formats.captures import kernel_time
from windtunnel.formats.captures.capture import CLASSES, Capture, within
from windtunnel.formats.captures.kernel_names import short_name
from windtunnel.formats.captures.read import read_capture
from windtunnel.formats.captures.step_names import MEASURED
from windtunnel.hardware import Device
from windtunnel.lab.experiments.schema import CONFIG, STEPS, SUMMARY, TRACE
from windtunnel.metrics.records import Table
from windtunnel.pricing.table import read_parquet
from windtunnel.report.render.html import Section, cards, figures, page, paragraph, table
from windtunnel.report.render.plots import COLOURS, Axis, Series, bar_chart, figure, shortened
from windtunnel.report.render.tables import bars, columns, grid, number, percent, title
from windtunnel.schema import read_yaml
from windtunnel.units import format_bytes, format_count, format_seconds, format_si

MOST_BARS, MOST_ROWS, MOST_POINTS = 20, 200, 2000
PAGES = "visualization"


# ---------------------------------------------------------------------------------------------------------- terminal


def experiment_report(summary: Mapping[str, Any]) -> list[RenderableType]:
    """Return the tables of a finished run: model, latency and throughput, and under a profiler its kernels."""
    metrics = summary["metrics"]
    tokens = f"{metrics['input_tokens']:,} tokens in, {metrics['output_tokens']:,} out"
    parts: list[RenderableType] = [
        title(f"{summary['model']}, {summary['mode']}"),
        grid(
            [
                ("engine", f"{metrics['engine']} on {metrics['device']}, {metrics['dtype']}"),
                ("requests", f"{metrics['num_requests']:,} at once, {tokens}"),
                *_latency_rows(metrics),
                ("memory", f"{format_bytes(metrics['peak_memory_bytes'])} at most"),
            ]
        ),
    ]
    if summary.get("top_kernels"):
        parts += ["", title(f"Where the time goes, by {summary['tool']}"), bars(_shares(summary["seconds_by_class"]))]
        rows = [[short_name(name), *cells] for name, *cells in top_kernel_rows(summary)]
        parts += ["", columns(("kernel", "runs", "total", "share"), rows)]
    parts += [f"note: {note}" for note in summary.get("notes", ())]
    return parts


def top_kernel_rows(summary: Mapping[str, Any]) -> list[list[str]]:
    """Return name, runs, total time and share of the kernels that take longest."""
    return [
        [
            kernel["name"],
            f"{kernel['count']:,}",
            format_seconds(kernel["total_s"]),
            f"{kernel['time_percentage']:.1f}%",
        ]
        for kernel in summary.get("top_kernels") or []
    ]


def _latency_rows(metrics: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    profiled = ", slowed by the profiler" if metrics["is_profiled"] else ""
    yield "TTFT", f"{format_seconds(metrics['ttft_s'])}{profiled}"
    if metrics["tpot_s"] is not None:
        yield "TPOT", format_seconds(metrics["tpot_s"])
    yield "throughput", f"{number(metrics['output_tokens_per_s'])} output tokens/s"


def _shares(seconds: Mapping[str, float]) -> dict[str, float]:
    total_s = sum(seconds.values()) or 1.0
    return {name.replace("_", " "): part / total_s for name, part in seconds.items()}


def capture_report(capture: Capture) -> list[RenderableType]:
    """Return the tables of any profiler's file: kernels, calls, copies, the device's time, and notes."""
    parts: list[RenderableType] = [title(f"{capture.tool}: {len(capture.kernels):,} kernels and copies")]
    parts += [grid(_device_rows(capture))] if capture.is_timeline and len(capture.kernels) else []
    parts += ["", bars(_shares(kernel_time.class_time(capture))), ""]
    kernels = kernel_time.kernel_table(capture)
    rows = [_kernel_cells(capture, kernels, place) for place in range(min(len(kernels), MOST_BARS))]
    parts.append(columns(*_without_empty(_KERNEL_HEADERS, rows), left=2))
    for name, statistics in (("API call", kernel_time.call_time(capture)), ("copy", kernel_time.copy_time(capture))):
        if len(statistics):
            rows = _statistics_rows(capture, statistics, _FOR_PEOPLE)[:MOST_BARS]
            parts += ["", columns((name, "number", "total", "share", "median", "most"), rows)]
    return [*parts, *(f"note: {note}" for note in capture.notes)]


_KERNEL_HEADERS = ("kernel", "class", "runs", "total", "share", "median", "FLOP/s", "B/s", "occupancy")


def _without_empty(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """Return headers and rows without empty columns."""
    keep = [place for place in range(len(headers)) if place < 2 or any(row[place] for row in rows)]
    return [headers[place] for place in keep], [[row[place] for place in keep] for row in rows]


def _device_rows(capture: Capture) -> Iterator[tuple[str, str]]:
    for device, use in kernel_time.device_time(capture).items():
        name = f"{capture.devices[device]}, " if device in capture.devices else ""
        yield (
            f"device {device}" if device >= 0 else "processor",
            (
                f"{name}busy {format_seconds(use.busy_s)} of {format_seconds(use.span_s)} "
                f"({percent(use.busy_s / use.span_s) if use.span_s else '-'}), "
                f"{format_count(len(use.gaps_s), 'gap')}, the longest "
                f"{format_seconds(float(use.gaps_s.max(initial=0.0)))}"
            ),
        )
        if use.communication_s:
            yield (
                "communication",
                f"{format_seconds(use.communication_s)}, {percent(use.overlap_fraction)} beside computation",
            )
    launches = kernel_time.launch_times(capture)
    if len(launches.latency_s):
        yield "launch", f"{format_seconds(float(np.median(launches.latency_s)))} from call to kernel, median"


def _kernel_cells(capture: Capture, kernels: Table, place: int) -> list[str]:
    return [
        shortened(short_name(capture.names[kernels["name"][place]])),
        CLASSES[kernels["kernel_class"][place]].replace("_", " "),
        f"{kernels['count'][place]:,}",
        format_seconds(float(kernels["total_s"][place])),
        percent(float(kernels["share"][place])),
        format_seconds(float(kernels["median_s"][place])),
        _si(kernels["flops_per_s"][place], "FLOP/s"),
        _si(kernels["bytes_per_s"][place], "B/s"),
        percent(float(kernels["occupancy_fraction"][place]))
        if np.isfinite(kernels["occupancy_fraction"][place])
        else "",
    ]


def _si(value: float, unit: str) -> str:
    return format_si(float(value), unit) if np.isfinite(value) else ""


def _statistics_rows(
    capture: Capture, statistics: kernel_time.NameStatistics, formats: Sequence[Callable[[Any], str]]
) -> list[list[str]]:
    """Return a row per name, the first `MOST_ROWS`: count, total, share, median and longest in these formats."""
    columns_of = (statistics.count, statistics.total, statistics.share, statistics.median, statistics.most)
    names = [capture.names[code] for code in statistics.names[:MOST_ROWS]]
    cells = (map(shown, values[:MOST_ROWS].tolist()) for shown, values in zip(formats, columns_of, strict=True))
    return [list(row) for row in zip(names, *cells, strict=True)]


# -------------------------------------------------------------------------------------------------------------- page


def write_experiment_page(folder: Path, device: Device | None = None) -> Path:
    """Write the page of a finished run, and its figures, to `visualization` in its folder.

    Args:
        folder: of the run.
        device: whose roofline to draw the kernels under; None: none.

    Returns:
        The page's path.

    Raises:
        InputError: it is no folder of a finished run.
    """
    summary = finished_summary(folder)
    capture = capture_of(folder, str(summary["mode"]))
    drawn = capture_figures(capture) if capture else {}
    sections = [overview_section(summary), *steps_section(folder)]
    if capture is not None:
        sections += capture_sections(capture, drawn, device)
    config = read_yaml(folder / CONFIG)
    rows = [(key, json.dumps(value)) for key, value in config.items()]
    sections.append(Section("Experiment", table(("field", "value"), rows, left=2)))
    name = folder.resolve().name
    lead = f"{summary['metrics']['engine']} on {summary['metrics']['device']}, mode {summary['mode']}"
    for label, svg in drawn.items():
        write_text(folder / PAGES / f"{name}_{label}.svg", svg)
    target = folder / PAGES / f"{name}_report.html"
    write_text(target, page(name, lead, sections))
    return target


def finished_summary(folder: Path) -> dict[str, Any]:
    """Read the summary of a finished run.

    Raises:
        InputError: there is none, or the run failed.
    """
    path = folder / SUMMARY
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise InputError(f"{folder} holds no finished run of `windtunnel lab run`", f"{SUMMARY} is missing") from None
    if not isinstance(summary, dict) or summary.get("status") != "done":
        raise InputError(f"the run in {folder} did not finish", "see its experiment.log")
    return summary


def capture_of(folder: Path, mode: str) -> Capture | None:
    """Read the measured part of a run's profile; None for a run without a profiler."""
    if mode == "torch":
        return read_capture(folder / TRACE)
    databases = sorted(folder.glob("*_profile.sqlite"))
    return within(read_capture(databases[0]), MEASURED) if mode in ("nsys", "nsys_ncu") and databases else None


def capture_page(capture: Capture, name: str, device: Device | None = None) -> str:
    """Return the page of any profiler's file."""
    return page(name, capture.tool, capture_sections(capture, capture_figures(capture), device))


def overview_section(summary: Mapping[str, Any]) -> Section:
    """Return the figures of a finished run."""
    metrics = summary["metrics"]
    facts = [
        (format_seconds(metrics["ttft_s"]), "TTFT"),
        *([(format_seconds(metrics["tpot_s"]), "TPOT")] if metrics["tpot_s"] is not None else []),
        (number(metrics["output_tokens_per_s"]), "output tokens/s"),
        (f"{metrics['num_requests']:,}", "requests at once"),
        (f"{metrics['input_tokens']:,} / {metrics['output_tokens']:,}", "tokens in / out"),
        (format_bytes(metrics["peak_memory_bytes"]), "most memory"),
        (format_seconds(metrics["load_s"]), "loading"),
    ]
    note = paragraph("A profiler was at work: these times are longer than without.") if metrics["is_profiled"] else ""
    return Section("Overview", cards(facts) + note)


def steps_section(folder: Path) -> list[Section]:
    """Plot every step of a finished run."""
    steps = read_parquet(folder / STEPS)
    start_s = np.array(steps["start_s"].to_pylist())
    took_ms = np.array(steps["duration_s"].to_pylist()) * 1e3
    is_prefill = np.array(steps["num_prefills"].to_pylist()) > 0
    series = [
        Series(label, start_s[mask].tolist(), took_ms[mask].tolist(), tooltips=[f"{ms:.3g} ms" for ms in took_ms[mask]])
        for label, mask in (("prompts", is_prefill), ("decode", ~is_prefill))
    ]
    svg = figure(series, Axis("start of the step (s)"), Axis("duration (ms)", low=0.0))
    return [Section("Steps", figures([(svg, "Every step of the run; the first computes the prompts.")]))]


def capture_figures(capture: Capture) -> dict[str, str]:
    """Draw time by kernel, by class and by API call, as far as the capture has them: name -> SVG."""
    kernels = kernel_time.kernel_table(capture)
    drawn = {}
    if len(kernels):
        top = range(min(len(kernels), MOST_BARS))
        labels = [short_name(capture.names[kernels["name"][place]]) for place in top]
        milliseconds = [float(kernels["total_s"][place]) * 1e3 for place in top]
        colours = [_class_colour(int(kernels["kernel_class"][place])) for place in top]
        drawn["kernel_time"] = bar_chart(labels, milliseconds, Axis("time (ms)"), colours)
        by_class = kernel_time.class_time(capture)
        drawn["classes"] = bar_chart(
            [name.replace("_", " ") for name in by_class],
            [seconds * 1e3 for seconds in by_class.values()],
            Axis("time (ms)"),
            [_class_colour(CLASSES.index(name)) for name in by_class],
        )
    calls = kernel_time.call_time(capture)
    if len(calls):
        labels = [capture.names[code] for code in calls.names[:MOST_BARS]]
        drawn["cuda_api"] = bar_chart(labels, (calls.total[:MOST_BARS] * 1e3).tolist(), Axis("time (ms)"))
    return drawn


def _class_colour(code: int) -> str:
    """Return a colour for the classes that matter most, grey for the others."""
    named = ("gemm", "attention", "experts", "norm", "activation", "communication", "rope")
    return COLOURS[named.index(CLASSES[code])] if CLASSES[code] in named else COLOURS[-1]


def capture_sections(capture: Capture, drawn: Mapping[str, str], device: Device | None) -> list[Section]:
    """Return a capture's sections: time, kernels, calls, copies, ranges and roofline, as far as it has them."""
    notes = "".join(paragraph(f"Note: {note}.") for note in capture.notes)
    sections = [Section("Where the time goes", notes + _device_table(capture) + _drawn(drawn))]
    sections += _roofline(capture, device)
    sections.append(Section("Kernels", _kernel_page_table(capture)))
    for name, statistics in (("API calls", kernel_time.call_time(capture)), ("Copies", kernel_time.copy_time(capture))):
        if len(statistics):
            moved = _moved(capture) if name == "Copies" else ""
            rows = _statistics_rows(capture, statistics, _FOR_SORTING)
            sections.append(Section(name, moved + table(("name", *_STATISTICS_HEADS), rows)))
    return sections + _ranges(capture)


def _kernel_page_table(capture: Capture) -> str:
    """Return the kernel table in fixed units, so that its columns sort."""
    kernels = kernel_time.kernel_table(capture)
    headers = ("kernel", "class", "runs", "total (ms)", "share (%)", "median (us)", "stream", "grid", "block")
    rates = ("TFLOP/s", "GB/s", "occupancy (%)", "compute (% of peak)", "memory (% of peak)")
    scales = {"flops_per_s": 1e-12, "bytes_per_s": 1e-9}
    scales |= dict.fromkeys(("occupancy_fraction", "compute_fraction", "memory_fraction"), 100.0)
    rows = [
        [
            capture.names[kernels["name"][place]],
            CLASSES[kernels["kernel_class"][place]].replace("_", " "),
            str(kernels["count"][place]),
            _scaled(kernels["total_s"][place], 1e3),
            _scaled(kernels["share"][place], 100.0),
            _scaled(kernels["median_s"][place], 1e6),
            "several" if kernels["num_streams"][place] > 1 else _whole(kernels["stream"][place]),
            _grid(kernels, place),
            _whole(kernels["block_threads"][place]),
            *(_scaled(kernels[name][place], scale) for name, scale in scales.items()),
        ]
        for place in range(min(len(kernels), MOST_ROWS))
    ]
    return table(*_without_empty((*headers, *rates), rows), left=2)


def _grid(kernels: Table, place: int) -> str:
    """Return the commonest grid, and the number of others."""
    sizes = [int(kernels[f"grid_{axis}"][place]) for axis in "xyz"]
    others = int(kernels["num_grids"][place]) - 1
    return "" if min(sizes) < 0 else " x ".join(map(str, sizes)) + (f", {others} more" if others else "")


def _scaled(value: float, scale: float) -> str:
    return f"{value * scale:.4g}" if np.isfinite(value) else ""


def _scaled_by(scale: float) -> Callable[[float], str]:
    return lambda value: _scaled(value, scale)


_STATISTICS_HEADS = ("number", "total (ms)", "share (%)", "median (us)", "most (us)")
_FOR_SORTING = (str, _scaled_by(1e3), _scaled_by(100.0), _scaled_by(1e6), _scaled_by(1e6))
_FOR_PEOPLE = ("{:,}".format, format_seconds, percent, format_seconds, format_seconds)
"""Formats of count, total, share, median and longest."""


def _whole(value: int) -> str:
    return "" if value < 0 else str(value)


def _drawn(drawn: Mapping[str, str]) -> str:
    captions = {
        "classes": "By what kernels are for.",
        "kernel_time": "The kernels that take most of it.",
        "cuda_api": "Calls of the API, on the host.",
    }
    return figures([(drawn[name], caption) for name, caption in captions.items() if name in drawn])


def _device_table(capture: Capture) -> str:
    rows = [
        (
            capture.devices.get(device, f"device {device}" if device >= 0 else "processor"),
            format_seconds(use.span_s),
            percent(use.busy_s / use.span_s) if use.span_s else "",
            f"{len(use.gaps_s):,}",
            format_seconds(float(use.gaps_s.max(initial=0.0))),
            format_seconds(use.communication_s),
            percent(use.overlap_fraction) if use.communication_s else "",
        )
        for device, use in kernel_time.device_time(capture).items()
    ]
    headers = ("device", "span", "busy", "gaps", "longest gap", "communication", "beside computation")
    return table(headers, rows) if rows else ""


def _moved(capture: Capture) -> str:
    moved = kernel_time.copy_bytes(capture)
    pairs = zip(moved.names, moved.total.tolist(), strict=True)
    parts = (f"{capture.names[code]} {format_bytes(total)}" for code, total in pairs)
    return paragraph(f"Moved: {', '.join(parts)}.")


def _ranges(capture: Capture) -> list[Section]:
    ranges = kernel_time.range_time(capture)
    if not len(ranges.names):
        hosts = kernel_time.host_range_time(capture)
        shown = table(("range", *_STATISTICS_HEADS), _statistics_rows(capture, hosts, _FOR_SORTING))
        return [Section("Ranges, on the host", shown)] if len(hosts) else []
    spans = (ranges.host_s, ranges.device_s, ranges.busy_s)
    rows = [
        [capture.name_of(name), *(_scaled(span[place], 1e3) for span in spans), str(ranges.num_kernels[place])]
        for place, name in enumerate(ranges.names[:MOST_ROWS])
    ]
    heads = ("range", "host (ms)", "device, first to last (ms)", "kernels' sum (ms)", "kernels")
    return [Section("Ranges", table(heads, rows))]


def _roofline(capture: Capture, device: Device | None) -> list[Section]:
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
        points = (intensity[mine].tolist(), (rate[mine] / 1e9).tolist())
        series.append(Series(CLASSES[code], *points, tooltips=tips, colour=_class_colour(int(code))))
    series += _roofs(device, intensity) if device else []
    svg = figure(series, Axis("FLOP a byte", is_log=True), Axis("GFLOP/s", is_log=True))
    caption = "Kernels whose work is known by their shapes or counters" + (
        f", below the peaks of {device.title}." if device else "."
    )
    return [Section("Roofline", figures([(svg, caption)]))]


def _roofs(device: Device, intensity: np.ndarray[Any, np.dtype[np.float64]]) -> list[Series]:
    ridges = {name: peak / device.memory_bytes_per_s for name, peak in device.peak_flops_per_s.items()}
    low, high = float(intensity.min()) / 2, max(float(intensity.max()), *ridges.values()) * 2
    roofs = []
    for name, peak in device.peak_flops_per_s.items():
        intensities = sorted({low, max(ridges[name], low), high})
        rates = [min(peak, value * device.memory_bytes_per_s) / 1e9 for value in intensities]
        roofs.append(Series(f"peak {name}", intensities, rates, "line"))
    return roofs
