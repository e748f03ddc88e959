"""Profiles: folders of measured operators (`windtunnel profile`), and the estimators that read them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from windtunnel.errors import InputError
from windtunnel.hardware import Device, Node
from windtunnel.model import operators as ops
from windtunnel.model.shape import operator_types
from windtunnel.pricing.estimator import Estimator, TableEstimator
from windtunnel.pricing.regress import cached
from windtunnel.pricing.roofline import Roofline
from windtunnel.pricing.table import MeasurementTable, read_provenance, read_tables, words_of, write_tables


def profile_files(folder: Path) -> list[Path]:
    """Return the files of a profile's tables, by kind; InputError where it is not a folder, or holds none."""
    files = [folder / f"{kind}.parquet" for kind in operator_types() if (folder / f"{kind}.parquet").is_file()]
    if not files:
        problem = "holds no measured operators" if folder.is_dir() else "is not a folder"
        raise InputError(
            f"the profile {folder} {problem}", "measure some with `windtunnel profile compute --model ... --out FOLDER`"
        )
    return files


def profile_provenance(folder: Path) -> dict[str, str]:
    """Read the provenance of a profile's tables; InputError where there is none, or they are of several devices."""
    records = [read_provenance(path) for path in profile_files(folder)]
    devices = sorted({str(record.get("device")) for record in records})
    if len(devices) > 1:
        raise InputError(f"the profile {folder} mixes {' and '.join(devices)}", "keep a folder for each device")
    return {key: value for record in reversed(records) for key, value in record.items()}


def write_profile(folder: Path, tables: list[MeasurementTable], provenance: Mapping[str, str]) -> list[Path]:
    """Write tables to a folder, one file a kind; files of other kinds stay. Returns the files written."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for kind in operator_types():
        of_kind = [table for table in tables if table.kind == kind]
        if of_kind:
            written.append(folder / f"{kind}.parquet")
            write_tables(written[-1], of_kind, provenance)
    return written


def profile_estimator(folder: Path, device: Device, node: Node | None, estimator: str = "interpolation") -> Estimator:
    """Return the estimator that reads a profile and prices by the device's roofline what the profile lacks.

    Links of `node` price collectives that the profile lacks. `estimator` is one of `choices.estimators()`; a regression
    takes the place of measured times, its fit kept on disk. InputError where there is no profile, or it is another
    device's.
    """
    measured_on = profile_provenance(folder).get("device")
    if measured_on != device.name:
        raise InputError(
            f"the profile {folder} was measured on {measured_on}, the deployment is on {device.name}",
            f"take --device {folder / 'device.yaml'}" if (folder / "device.yaml").is_file() else None,
        )
    roofline = Roofline(device, node)
    tables = tables_by_words(folder)
    if estimator != "interpolation":
        tables = {words: cached(table, roofline, estimator) for words, table in tables.items()}
    return TableEstimator(partial(table_in, tables), roofline)


def table_in(tables: Mapping[tuple[str, ...], MeasurementTable], op: ops.Op) -> MeasurementTable | None:
    """Return the table of the kind and words of `op`, or None where `tables` has none."""
    return tables.get((op.kind, *words_of(op).values()))


def tables_by_words(folder: Path) -> dict[tuple[str, ...], MeasurementTable]:
    """Return the tables of a profile by kind and words. InputError where there are none, one cannot be read, or two
    sources measured the same kind and words."""
    tables: dict[tuple[str, ...], MeasurementTable] = {}
    for table in (table for path in profile_files(folder) for table in read_tables(path)):
        if table.key in tables:
            sources = f"{tables[table.key].source} and {table.source}"
            raise InputError(
                f"the profile {folder} has {' '.join(table.key)} twice: from {sources}", "keep a folder for each"
            )
        tables[table.key] = table
    return tables
