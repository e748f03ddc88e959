"""A fitted calibration: its file, and its report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import yaml

from windtunnel.files import write_text
from windtunnel.report.render.json import fields_of
from windtunnel.report.report import Facts, Report, Section, Table
from windtunnel.schema import encode
from windtunnel.serving.calibration import Calibration, Inferred, LearntTransfer, Provenance, Reserve
from windtunnel.units import format_bytes, format_count, format_seconds

_METRICS = {"tpot": "TPOT", "ttft": "TTFT", "e2e": "E2E"}


def write_calibration(calibration: Calibration, path: Path) -> None:
    """Write `calibration` as YAML; loading it gives an equal one.

    Raises:
        InputError: the file cannot be written.
    """
    write_text(path, yaml.safe_dump(encode(calibration), sort_keys=False, width=120))


def calibration_report(made: Mapping[str, Calibration], num_runs: int, num_fitted: int, out: Path) -> Report:
    """Return the report of a fit: the errors on left-out runs before and after, then the fitted values."""
    headers = ["profile", "runs", "configs"]
    headers += [f"{name}\n{what}" for name in _METRICS.values() for what in ("before", "after")]
    rows = []
    for name, calibration in made.items():
        record = calibration.provenance
        rows.append([name, str(record.num_runs), str(record.num_configurations), *_error_cells(record, _METRICS)])
    alone = [name for name, calibration in made.items() if calibration.provenance.num_configurations == 1]
    notes = [f"{', '.join(alone)}: one configuration only, so that none was left out: after equals before."]
    notes = notes if alone else []
    notes += [f"{name}: {worse}" for name, calibration in made.items() if (worse := _worse(calibration.provenance))]
    for name, calibration in made.items():
        if calibration.transfer is not None:
            notes.append(f"{name}: {_transfer_line(calibration.transfer)}")
    fitted = f"{num_fitted} of {format_count(num_runs, 'run')} fitted" if num_runs else "Only transfers fitted"
    lead = "Median errors; before: nothing fitted; after: of runs in configurations that the fit did not see."
    sections = [
        Section("", [Table(headers, rows, notes=notes)]),
        *(_fitted_values(*made.values()) if len(made) == 1 else []),
        *_inferred_settings(made),
        Section("", [f"written to {out}"]),
    ]
    return Report(fitted, [lead], sections)


def _fitted_values(calibration: Calibration) -> list[Section]:
    fields = fields_of(calibration.host, *calibration.host.__struct_fields__)
    host = [(name, format_seconds(float(value))) for name, value in fields.items() if value is not None]
    factors = [(name, f"x {value:.3f}") for name, value in calibration.factors.items()]
    return [
        Section("Host", [Facts(host, 28)]),
        Section("Operators: measured over priced time", [Facts(factors, 28)]),
    ]


def _inferred_settings(made: Mapping[str, Calibration]) -> list[Section]:
    lines = list(dict.fromkeys(line for calibration in made.values() for line in _settings(calibration)))
    headers = ["inferred", "of", "runs", "configs"]
    headers += [f"{_METRICS[name]}\n{what}" for name in ("tpot", "ttft") for what in ("default", "inferred")]
    is_alone = any(entry.num_configurations == 1 for calibration in made.values() for entry in _learnt(calibration))
    note = "Where configs is 1, the errors are on the same runs that the value was inferred from."
    table = Table(headers, lines, notes=[note] if is_alone else [])
    return [Section("Settings that nobody recorded", [table])] if lines else []


def _learnt(calibration: Calibration) -> tuple[Inferred | Reserve, ...]:
    return calibration.inferred if calibration.reserve is None else (*calibration.inferred, calibration.reserve)


def _settings(calibration: Calibration) -> list[tuple[str, ...]]:
    """Return each inferred setting, its runs, and the median errors on left-out runs with the default and with it."""
    learnt: list[tuple[str, Inferred | Reserve, str]] = [
        (f"{name} {value:,}", entry, f"{entry.model}, {calibration.engine} {entry.version}, {entry.device}")
        for entry in calibration.inferred
        for name, value in entry.settings.items()
    ]
    if calibration.reserve is not None:
        where = f"{calibration.engine}, {calibration.device or 'any device'}"
        reserved = format_bytes(calibration.reserve.reserved_bytes)
        learnt.append((f"reserved_bytes {reserved}", calibration.reserve, where))
    return [
        (
            what,
            where,
            str(entry.num_runs),
            str(entry.num_configurations),
            *_error_cells(entry, ("tpot", "ttft")),
        )
        for what, entry, where in learnt
    ]


def _error_cells(record: Provenance | Inferred | Reserve, metrics: Iterable[str]) -> list[str]:
    """Return the median errors of each metric, before and after; empty where unknown."""
    both = (record.median_error_before, record.median_error)
    return [f"{errors[metric]:.1%}" if metric in errors else "" for metric in metrics for errors in both]


def _worse(record: Provenance) -> str:
    """Name the metrics whose errors on left-out runs grew; empty where there is none."""
    before, after = record.median_error_before, record.median_error
    names = [name for metric, name in _METRICS.items() if after.get(metric, 0.0) > before.get(metric, math.inf)]
    return f"{' and '.join(names)} no better for it on configurations left out; more of them may help" if names else ""


def _transfer_line(learnt: LearntTransfer) -> str:
    record = learnt.record
    return (
        f"KV transfers take {format_seconds(learnt.latency_s)} and reach {learnt.link_efficiency:.0%} of the links "
        f"({record.num_runs} runs of separate pools in {record.num_configurations} configurations; TTFT of those left "
        f"out {record.median_error_before:.1%} off before, {record.median_error:.1%} after)"
    )
