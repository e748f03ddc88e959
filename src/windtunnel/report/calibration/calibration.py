"""A fitted calibration: its file, and its report."""

import math
from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

from windtunnel.files import write_text
from windtunnel.report.layout import filled, layouts_beside, table_of
from windtunnel.report.report import Facts, Report, Section
from windtunnel.schema import encode, fields_of, yaml_text
from windtunnel.serving.calibration import Calibration, Inferred, Provenance, Reserve
from windtunnel.units import format_bytes, format_count, format_seconds

LAYOUT = layouts_beside(__file__)
_METRICS = {"tpot": "TPOT", "ttft": "TTFT", "e2e": "E2E"}


def write_calibration(calibration: Calibration, path: Path) -> None:
    """Write `calibration` as YAML that loads as an equal one; InputError where the file cannot be written."""
    write_text(path, yaml_text(calibration))


def calibration_report(made: Mapping[str, Calibration], num_runs: int, num_fitted: int, out: Path) -> Report:
    """Return the report of a fit: the errors on left-out runs before and after, then the fitted values."""
    rows = [{"name": name, **encode(calibration.provenance)} for name, calibration in made.items()]
    alone = [name for name, calibration in made.items() if calibration.provenance.num_configurations == 1]
    notes = [filled(LAYOUT["alone"], row) for row in rows if row["name"] in alone]
    largest = max(rows, key=itemgetter("num_runs"))
    is_alone = largest["name"] in alone
    verdict = filled(LAYOUT["alone"], largest) if is_alone else filled(LAYOUT["verdict"], largest)
    notes = [note for note in notes if note != verdict]
    notes += [f"{name}: {worse}" for name, calibration in made.items() if (worse := _worse(calibration.provenance))]
    transfers = [{"name": name, **encode(each.transfer)} for name, each in made.items() if each.transfer is not None]
    notes += [filled(LAYOUT["transfer"], transfer) for transfer in transfers]
    fitted = f"{num_fitted} of {format_count(num_runs, 'run')} fitted" if num_runs else "Only transfers fitted"
    lead = "Median errors; before: nothing fitted; after: of runs in configurations that the fit did not see."
    sections = [
        Section("", [table_of(rows, LAYOUT["profiles"], notes=notes)]),
        *(_fitted_values(*made.values()) if len(made) == 1 else []),
        *_inferred_settings(made),
        Section("", [f"written to {out}"]),
    ]
    return Report(fitted, [lead], sections, verdict=verdict)


def _fitted_values(calibration: Calibration) -> list[Section]:
    fields = fields_of(calibration.host, *calibration.host.__struct_fields__)
    host = [(name, format_seconds(float(value))) for name, value in fields.items() if value is not None]
    factors = [(name, f"x {value:.3f}") for name, value in calibration.factors.items()]
    return [Section("Host", [Facts(host, 28)]), Section("Operators: measured over priced time", [Facts(factors, 28)])]


def _inferred_settings(made: Mapping[str, Calibration]) -> list[Section]:
    settings = [row for calibration in made.values() for row in _settings(calibration)]
    is_alone = any(row["num_configurations"] == 1 for row in settings)
    note = "Where configs is 1, the errors are on the same runs that the value was inferred from."
    rows = [row for place, row in enumerate(settings) if row not in settings[:place]]
    table = table_of(rows, LAYOUT["inferred"], notes=[note] if is_alone else [])
    return [Section("Settings that nobody recorded", [table])] if rows else []


def _settings(calibration: Calibration) -> list[dict[str, Any]]:
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
    return [{"what": what, "where": where, **encode(entry)} for what, entry, where in learnt]


def _worse(record: Provenance) -> str:
    """Name the metrics whose errors on left-out runs grew; empty where there is none."""
    before, after = record.median_error_before, record.median_error
    names = [name for metric, name in _METRICS.items() if after.get(metric, 0.0) > before.get(metric, math.inf)]
    return f"{' and '.join(names)} no better for it on configurations left out; more of them may help" if names else ""
