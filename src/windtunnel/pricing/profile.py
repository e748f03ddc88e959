"""Profiles: folders of measured operators (`windtunnel profile`), and the estimators that read them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from windtunnel.errors import InputError
from windtunnel.hardware import Device, Node
from windtunnel.model import operators as ops
from windtunnel.model.shape import operator_types
from windtunnel.pricing.estimator import Estimator, TableEstimator
from windtunnel.pricing.roofline import Roofline
from windtunnel.pricing.table import MeasurementTable, read_provenance, read_tables, text_names, write_tables

Fitted = Callable[[MeasurementTable, Roofline], MeasurementTable]
"""Function that replaces measured times by those of a regression (`pricing.regress.fitted`)."""


@dataclass(frozen=True)
class ProfileTables:
    """Measured tables by their kind and words."""

    by_words: Mapping[tuple[str, ...], MeasurementTable]

    def table_for(self, op: ops.Op) -> MeasurementTable | None:
        """Return the table of the kind and words of `op`, or None where the profile has none."""
        return self.by_words.get((op.kind, *(str(getattr(op, name)) for name in text_names(op.kind))))


def profile_files(folder: Path) -> list[Path]:
    """Return the files of a profile's tables, by kind.

    Raises:
        InputError: it is not a folder, or holds none.
    """
    files = [folder / f"{kind}.parquet" for kind in operator_types() if (folder / f"{kind}.parquet").is_file()]
    if not files:
        problem = "holds no measured operators" if folder.is_dir() else "is not a folder"
        raise InputError(
            f"the profile {folder} {problem}", "measure some with `windtunnel profile compute --model ... --out FOLDER`"
        )
    return files


def read_profile(folder: Path) -> list[MeasurementTable]:
    """Read all tables of a profile.

    Raises:
        InputError: there are none, or one cannot be read.
    """
    return [table for path in profile_files(folder) for table in read_tables(path)]


def profile_provenance(folder: Path) -> dict[str, str]:
    """Read the provenance of a profile's tables, which all have the same device.

    Raises:
        InputError: there are none, or they were measured on different devices.
    """
    records = [read_provenance(path) for path in profile_files(folder)]
    devices = sorted({str(record.get("device")) for record in records})
    if len(devices) > 1:
        raise InputError(f"the profile {folder} mixes {' and '.join(devices)}", "keep a folder for each device")
    return {key: value for record in reversed(records) for key, value in record.items()}


def write_profile(folder: Path, tables: list[MeasurementTable], provenance: Mapping[str, str]) -> list[Path]:
    """Write tables to a folder, one file a kind; files of other kinds stay.

    Returns:
        The files written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for kind in operator_types():
        of_kind = [table for table in tables if table.kind == kind]
        if of_kind:
            written.append(folder / f"{kind}.parquet")
            write_tables(written[-1], of_kind, provenance)
    return written


def profile_estimator(folder: Path, device: Device, node: Node | None, fitted: Fitted | None = None) -> Estimator:
    """Return the estimator that reads a profile and prices by the device's roofline what the profile lacks.

    Args:
        folder: the profile.
        device: the device that was measured.
        node: its links price collectives that the profile lacks.
        fitted: regression in place of measured times; None interpolates.

    Raises:
        InputError: there is no profile, or it is another device's.
    """
    measured_on = profile_provenance(folder).get("device")
    if measured_on != device.name:
        raise InputError(
            f"the profile {folder} was measured on {measured_on}, the deployment is on {device.name}",
            f"take --device {folder / 'device.yaml'}" if (folder / "device.yaml").is_file() else None,
        )
    roofline = Roofline(device, node)
    tables = tables_by_words(folder)
    if fitted is not None:
        tables = {words: fitted(table, roofline) for words, table in tables.items()}
    return TableEstimator(ProfileTables(tables), roofline)


def tables_by_words(folder: Path) -> dict[tuple[str, ...], MeasurementTable]:
    """Return the tables of a profile by kind and words.

    Raises:
        InputError: two sources measured the same kind and words.
    """
    tables: dict[tuple[str, ...], MeasurementTable] = {}
    for table in read_profile(folder):
        words = (table.kind, *(table.words[name] for name in text_names(table.kind)))
        if words in tables:
            raise InputError(
                f"the profile {folder} has {' '.join(words)} twice: from {tables[words].source} and {table.source}",
                "keep a folder for each",
            )
        tables[words] = table
    return tables
