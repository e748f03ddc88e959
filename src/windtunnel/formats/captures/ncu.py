"""Read Nsight Compute's counters, as `ncu --import report.ncu-rep --csv` writes them: `--page raw` or `--page details`.

The raw page has a row of names, a row of units and a row for each launch; the details page has a row for each launch
and metric.
Units are scaled by column (`usecond`, `Mbyte`), and a counter that was not collected is empty or `n/a`. Tested with
the sample reports of Nsight Compute 2024.1 and its own export of them.
"""

import csv
import math
import re
from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np

from windtunnel.errors import InputError
from windtunnel.files import read_text
from windtunnel.formats.captures.capture import KERNEL, Capture, Names, capture_table, kernel_class, shape_columns
from windtunnel.formats.recognise import FileContent
from windtunnel.schema import read_yaml

NO_TIMELINE = "Nsight Compute repeats kernels to count: durations are known, starts, gaps and copies are not"
REPORT_HINT = "export it first: ncu --import FILE --csv --page raw --print-units base > counters.csv"

_NAMES: Mapping[str, Any] = read_yaml(Path(__file__).with_name("ncu.yaml"))
_FIXED, _DURATION = _NAMES["fixed"], _NAMES["duration"]
_UNIT = re.compile(r"(?P<scale>[numKMGT]?)(?:second|byte|cycle|inst|hz)$")
_FLOPS_A_CYCLE = "smsp__sass_thread_inst_executed_op_{}_pred_on.sum.per_cycle_elapsed"
_CYCLES_PER_S = "smsp__cycles_elapsed.avg.per_second"


def read_ncu(path: Path) -> Capture:
    """Read the counters in an exported CSV. InputError for no such file, a report that was not exported, no such CSV,
    or a kernel without a duration."""
    if path.suffix == ".ncu-rep":
        hint = REPORT_HINT.replace("FILE", path.name)
        raise InputError(f"{path} is a report that only its own tool opens", hint)
    launches = _launches(read_text(path), path)
    names = Names()
    fixed, metrics = zip(*launches, strict=True)
    duration_s = np.array([_first(counters, _DURATION) for counters in metrics])
    is_timed = np.isfinite(duration_s) & (duration_s > 0)
    if not is_timed.all():
        raise InputError(f"{path}: kernel {np.argmin(is_timed)} has no {_DURATION[0]}", "collect it: ncu --set full")
    columns: dict[str, Any] = {
        "name": names.codes([launch["Kernel Name"] for launch in fixed]),
        "activity": KERNEL,
        "kernel_class": [kernel_class(launch["Kernel Name"]) for launch in fixed],
        "duration_s": duration_s,
        "device": [_whole(launch["Device"]) for launch in fixed],
        "stream": [_whole(launch["Stream"]) for launch in fixed],
        "registers": [_whole(str(_first(counters, _NAMES["registers"]))) for counters in metrics],
        **{column: [_first(counters, names) for counters in metrics] for column, names in _NAMES["counters"].items()},
        "flops": [_flops(counters) for counters in metrics],
        "num_bytes": [_bytes(counters) for counters in metrics],
    }
    for field, shape in (("Grid Size", "grid"), ("Block Size", "block")):
        columns |= shape_columns(shape, ([int(part) for part in re.findall(r"\d+", launch[field])] for launch in fixed))
    kernels = capture_table("kernels", len(fixed), columns)
    return Capture("ncu", tuple(names), kernels, capture_table("calls"), capture_table("ranges"), {}, (NO_TIMELINE,))


def is_ncu(file: FileContent) -> bool:
    """Whether a file begins as such a CSV, or is a report that was not exported."""
    return _header_start(file.start.decode("utf-8", "replace")) is not None or file.path.suffix == ".ncu-rep"


def _header_start(text: str) -> int | None:
    """Return where the header begins: `ncu` that profiles prints lines of its own (`==PROF==`) around it."""
    header = re.search(r'^"?ID"?,"?Process ID"?,', text, re.MULTILINE)
    return header.start() if header else None


Launch = tuple[dict[str, str], dict[str, float]]
"""Fixed columns of a launch, and its metrics in SI units."""


def _launches(text: str, path: Path) -> list[Launch]:
    start = _header_start(text)
    if start is None:
        raise InputError(
            f"{path} is no CSV of Nsight Compute: it has no line that begins with ID, Process ID", REPORT_HINT
        )
    header, *body = [row for row in csv.reader(StringIO(text[start:])) if row and not row[0].startswith("==")]
    missing = [name for name in _FIXED if name not in header]
    if missing:
        raise InputError(f"{path} has no column {missing[0]}", REPORT_HINT)
    num_fixed = 1 + max(header.index(name) for name in _FIXED)
    if not body or any(len(row) < num_fixed for row in body):
        raise InputError(f"{path} is cut off: {'a row is not whole' if body else 'it holds no kernel'}")
    launches = _of_details(header, body) if "Metric Name" in header else _of_raw(header, body, path)
    if not launches:
        raise InputError(f"{path} is cut off: it holds no kernel")
    return launches


def _of_raw(header: list[str], body: list[list[str]], path: Path) -> list[Launch]:
    short = next((row for row in body if len(row) != len(header)), None)
    if short is not None:
        raise InputError(f"{path} is cut off: a row has {len(short)} of {len(header)} columns")
    has_units = not body[0][0].strip()
    units = body[0] if has_units else [""] * len(header)
    launches = []
    for row in body[has_units:]:
        fixed = {name: row[header.index(name)] for name in _FIXED}
        cells = zip(header, row, units, strict=True)
        launches.append((fixed, {name: _number(value, unit) for name, value, unit in cells if name not in _FIXED}))
    return launches


def _of_details(header: list[str], body: list[list[str]]) -> list[Launch]:
    launches: dict[str, Launch] = {}
    for row in body:
        # Rows of rules are shorter or have no metric.
        cells = dict(zip(header, row, strict=False))
        metrics = launches.setdefault(cells["ID"], ({name: cells[name] for name in _FIXED}, {}))[1]
        if cells.get("Metric Name"):
            value = _number(cells.get("Metric Value", ""), cells.get("Metric Unit", ""))
            # `Memory Throughput` stands in two sections: first as a share of peak, then in bytes a second.
            metrics.setdefault(cells["Metric Name"], value)
    return list(launches.values())


def _number(text: str, unit: str) -> float:
    """Return a value in SI units; NaN where it is missing or no number."""
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return math.nan
    above, _, below = unit.partition("/")
    return value * _scale(above) / _scale(below)


def _scale(unit: str) -> float:
    """Return the factor of a unit to SI; 1 for units without one, such as `register` and `thread`."""
    match = _UNIT.match(unit)
    scale: float = _NAMES["scales"][match["scale"]] if match else _NAMES["words"].get(unit, 1.0)
    return scale


def _first(metrics: Mapping[str, float], names: Sequence[str]) -> float:
    return next((metrics[name] for name in names if math.isfinite(metrics.get(name, math.nan))), math.nan)


def _bytes(metrics: Mapping[str, float]) -> float:
    """Return the bytes moved to and from DRAM."""
    moved = metrics.get("dram__bytes_read.sum", math.nan) + metrics.get("dram__bytes_write.sum", math.nan)
    if math.isfinite(moved):
        return moved
    rate = metrics.get("dram__bytes.sum.per_second", math.nan)
    return metrics.get("dram__bytes.sum", rate * _first(metrics, _DURATION))


def _flops(metrics: Mapping[str, float]) -> float:
    """Return floating point operations of the scalar units, as the roofline charts of `--set full` count them.

    NaN where the tensor cores worked too: the counters of their operations are not in that set.
    """
    tensor = [value for name, value in metrics.items() if name.startswith("sm__inst_executed_pipe_tensor")]
    if any(value > 0 for value in tensor):
        return math.nan
    a_cycle = sum(
        weight * metrics.get(_FLOPS_A_CYCLE.format(kind + op), 0.0 if kind == "h" else math.nan)
        for kind in "fdh"
        for op, weight in (("add", 1), ("mul", 1), ("fma", 2))
    )
    return a_cycle * metrics.get(_CYCLES_PER_S, math.nan) * _first(metrics, _DURATION)


def _whole(text: str) -> int:
    try:
        return int(float(text))
    except ValueError:
        return -1
