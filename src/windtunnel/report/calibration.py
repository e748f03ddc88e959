"""A fitted calibration: its file, and what a user is told about it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import yaml
from rich.console import RenderableType

from windtunnel.interop.text_file import write_text
from windtunnel.report.tables import columns, grid, title
from windtunnel.spec.calibration import Calibration, LearntTransfer
from windtunnel.spec.noun import encode
from windtunnel.units import format_seconds

_METRICS = {"tpot": "TPOT", "ttft": "TTFT", "e2e": "E2E"}


def write_calibration(calibration: Calibration, path: Path) -> None:
    """Write `calibration` as YAML; loading it gives an equal one.

    Raises:
        WindtunnelError: the file cannot be written.
    """
    write_text(path, yaml.safe_dump(encode(calibration), sort_keys=False, width=120))


def calibration_report(
    made: Mapping[str, Calibration], num_runs: int, num_fitted: int, out: Path
) -> list[RenderableType]:
    """Errors before and after on runs left out, then what was fitted."""
    headers = ["profile", "runs", "configs"]
    headers += [f"{name}\n{what}" for name in _METRICS.values() for what in ("before", "after")]
    rows = []
    for name, one in made.items():
        record = one.provenance
        cells = [name, str(record.num_runs), str(record.num_configurations)]
        for metric in _METRICS:
            both = (record.median_error_before, record.median_error)
            cells += [f"{errors[metric]:.1%}" if metric in errors else "" for errors in both]
        rows.append(cells)
    parts: list[RenderableType] = [
        title(f"{num_fitted} of {num_runs} runs fitted"),
        "Median errors; after: of runs in configurations that the fit did not see.",
        "",
        columns(headers, rows),
    ]
    if alone := [name for name, one in made.items() if one.provenance.num_configurations == 1]:
        parts.append(f"{', '.join(alone)}: of one configuration, so that none was left out, and after is before.")
    for name, one in made.items():
        if one.transfer is not None:
            parts.append(f"{name}: {_transfer_line(one.transfer)}")
    if len(made) == 1:
        (one,) = made.values()
        host = {name: value for name in one.host.__struct_fields__ if (value := getattr(one.host, name)) is not None}
        parts += ["", title("Host"), grid([(name, format_seconds(float(value))) for name, value in host.items()], 28)]
        factors = [(name, f"x {value:.3f}") for name, value in one.factors.items()]
        parts += ["", title("Operators: measured over priced time"), grid(factors, 28)]
    return [*parts, "", f"written to {out}"]


def _transfer_line(learnt: LearntTransfer) -> str:
    record = learnt.record
    return (
        f"KV transfers take {format_seconds(learnt.latency_s)} and reach {learnt.link_efficiency:.0%} of the links "
        f"({record.num_runs} runs of separate pools in {record.num_configurations} configurations; TTFT of those left "
        f"out {record.median_error_before:.1%} off before, {record.median_error:.1%} after)"
    )
