"""Every measured table that is known: installed, fetched, or to be fetched; and the suspect rows of those at hand."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel import catalog
from windtunnel.pricing.aiconfigurator import attention, collectives, experts, gemms
from windtunnel.pricing.aiconfigurator.collection import Place, Rows, Texts
from windtunnel.pricing.aiconfigurator.estimator import PACKAGE, systems_folder
from windtunnel.pricing.aiconfigurator.published import fetched_folders, is_newer, published
from windtunnel.pricing.table import Floats, grouped
from windtunnel.schema import Schema
from windtunnel.units import format_bytes

INSTALLED = "aiconfigurator-core"
UNFETCHED_FILE = catalog.shipped("published_tables.csv")
"""Tables of published wheels, as `benchmarks/published_tables.py` lists them."""


@dataclass(frozen=True)
class KnownTable:
    """One measured table: a file, or what a published wheel has."""

    engine: str
    version: str
    device: str
    family: str
    table: str
    num_rows: int
    source: str
    """Name to fetch it by, or the installed package."""
    source_version: str
    date: str | None
    """Date of the wheel's files, where it keeps one."""
    operator: str | None
    """Operator that pricing reads it for; None where nothing reads it."""
    at_hand: bool
    """Whether it is installed or fetched."""
    path: Path | None = None


def known_tables(systems: Path | None = None) -> Iterator[KnownTable]:
    """Yield every known table: the installed ones (or those of `systems`), then those of wheels, the newest first."""
    try:
        release = version(INSTALLED)
    except PackageNotFoundError:
        release = ""
    installed = systems or installed_systems()
    if installed is not None:
        yield from _tables_in(installed, INSTALLED, release, None)
    folders = fetched_folders()
    with UNFETCHED_FILE.open(encoding="utf-8") as file:
        listed = list(csv.DictReader(file))
    for name, wheel in published().wheels.items():
        if name in folders:
            yield from _tables_in(folders[name], name, wheel.version, wheel.date)
            continue
        for row in (row for row in listed if row["wheel"] == name):
            place = (row["engine"], row["version"], row["device"], row["family"], row["table"])
            operator = _operator(row["engine"], row["version"], row["table"], fetched=True)
            yield KnownTable(*place, int(row["num_rows"]), name, wheel.version, wheel.date, operator, at_hand=False)


def installed_systems() -> Path | None:
    """Return the folder of the installed package's tables; None where it has no wheel for this platform."""
    from importlib.util import find_spec

    return systems_folder() if find_spec(PACKAGE) is not None else None


def _tables_in(systems: Path, source: str, release: str, date: str | None) -> Iterator[KnownTable]:
    import pyarrow.parquet as pq

    for path in sorted(systems.glob("*/*/*/*/*_perf.parquet")):
        device, family, engine, measured, file = path.relative_to(systems).parts
        table = file.removesuffix(".parquet")
        operator = _operator(engine, measured, table, fetched=source != INSTALLED)
        num_rows = pq.read_metadata(path).num_rows
        place = (engine, measured, device, family, table)
        yield KnownTable(*place, num_rows, source, release, date, operator, at_hand=True, path=path)


def _operator(engine: str, measured: str, table: str, fetched: bool) -> str | None:
    """Return the operator that a table prices; fetched ones price versions from `newer` on."""
    return published().operators.get(table) if not fetched or is_newer(engine, measured, measured) else None


@dataclass(frozen=True)
class Suspects:
    """Suspect rows of one curve of a table."""

    table: KnownTable
    words: str
    shape: str
    points: str
    """Where along the curve they lie."""
    num_rows: int
    measured_s: float
    """Median of the rows."""
    taken_s: float | None
    """Median of what pricing takes; None where the rows are left out."""
    reason: str

    @property
    def done(self) -> str:
        """What pricing does with the rows."""
        if self.taken_s is None:
            return "left out"
        return "kept" if self.taken_s == self.measured_s else "repaired"


class Check(Schema, frozen=True):
    """How the rows of a table are checked."""

    numbers: tuple[str, ...]
    """Columns of its dimensions, the axis of its curves last."""
    words: tuple[str, ...]
    reason: str
    """Why a row is suspect that pricing does not take as it is."""
    kept_reason: str | None = None
    """Why a row is suspect that pricing keeps; None: there are none."""
    links_reason: str | None = None
    """Why all rows over so many ranks are suspect; None: they are no messages over links."""


_CHECKS = catalog.entry(Path(__file__).with_name("checks.yaml"), dict[str, Check])

STEEP, MORE_RANKS = 1.25, 2.0


def _is_steep(rows: Rows) -> NDArray[np.bool_]:
    """Return a mask of messages that grow by `STEEP` more than their bytes, and by `MORE_RANKS` on twice the ranks."""
    took, point = rows.latency, ("message_size", "num_gpus")
    halves = (rows.replaced(**{name: rows[name] / 2}) for name in point)
    smaller, fewer = (half.at_same_points(rows, took, point) for half in halves)
    return np.asarray((took > 2 * STEEP * smaller) & (took > MORE_RANKS * fewer))


def _per_choice(rule: Callable[[Rows], NDArray[Any]], rows: Rows, texts: Texts) -> Floats:
    """Apply a rule to the rows of each combination of words and kernel on its own, as pricing does."""
    values = np.zeros(len(rows))
    for here in grouped([rows["kernel"], *(codes for codes, _ in texts.values())]):
        values[here] = rule(rows.where(here))
    return values


def _taken(table: KnownTable, rows: Rows, texts: Texts) -> Floats:
    """Return the milliseconds that pricing takes for each row, NaN for one that is left out."""
    match table.table:
        case "moe_perf":
            suspect = experts.suspect_experts(catalog.device(table.device), rows, texts)
            return np.where(suspect, np.nan, rows.latency)
        case "gemm_perf":
            return _per_choice(gemms.sound_latency, rows, texts)
        case "generation_attention_perf":
            return _per_choice(partial(attention.sound_latency, table.engine), rows, texts)
    return _per_choice(collectives.sound_latency, rows, texts)


def _failed_links(table: KnownTable, rows: Rows, texts: Texts) -> NDArray[np.bool_]:
    """Return a mask of the rows over ranks whose links failed, for each collective and kernel on its own."""
    device = catalog.device(table.device)
    codes, labels = texts.get("op_name", (np.zeros(len(rows), dtype=int), ["all_reduce"]))
    names = {name: op for op, name in collectives.NCCL_NAMES.items()}
    failed = np.zeros(len(rows), dtype=bool)
    for here in grouped([rows["kernel"], *(each for each, _ in texts.values())]):
        op = names.get(labels[codes[here[0]]], labels[codes[here[0]]])
        failed[here] = collectives.failed_links(op, rows.where(here), device, catalog.default_node(device))
    return failed


def suspects(table: KnownTable) -> Iterator[Suspects]:
    """Yield the suspect rows of a table at hand, a curve at a time; nothing of a table that has no rule."""
    if table.path is None or table.table not in _CHECKS or table.operator is None:
        return
    check, place = _CHECKS[table.table], Place(table.path.parent, table.engine, table.version)
    rows, texts = place.read_file(table.table, check.numbers, check.words)
    latency, failed = _taken(table, rows, texts), np.zeros(len(rows), dtype=bool)
    if check.links_reason is not None:
        failed = _failed_links(table, rows, texts)
        yield from _curves(table, rows, texts, np.full(len(rows), np.nan), failed, check.links_reason)
    changed = (latency != rows.latency) & ~failed
    yield from _curves(table, rows, texts, latency, changed, check.reason)
    if check.kept_reason is not None:
        kept = (_per_choice(_is_steep, rows, texts) > 0) & ~changed & ~failed
        yield from _curves(table, rows, texts, rows.latency, kept, check.kept_reason)


def _curves(
    table: KnownTable, rows: Rows, texts: Texts, latency: Floats, is_suspect: NDArray[np.bool_], reason: str
) -> Iterator[Suspects]:
    """Yield the suspect rows of each curve, with the milliseconds that pricing takes."""
    *names, axis = _CHECKS[table.table].numbers
    suspect = np.flatnonzero(is_suspect)
    columns = [*(rows[name] for name in names), *(codes for codes, _ in texts.values()), rows["kernel"]]
    for curve in grouped([column[suspect] for column in columns]):
        here = suspect[curve]
        first, taken = here[0], latency[here] * 1e-3
        spoken = [labels[codes[first]] for codes, labels in texts.values()]
        yield Suspects(
            table,
            words=" ".join([*spoken, str(rows.kernel_names[rows["kernel"][first]])]),
            shape=" ".join(f"{name} {rows[name][first]:g}" for name in names),
            points=_points(axis, rows[axis][here]),
            num_rows=len(here),
            measured_s=float(np.median(rows.seconds[here])),
            taken_s=None if np.isnan(taken).any() else float(np.median(taken)),
            reason=reason,
        )


def _points(axis: str, values: NDArray[np.float64]) -> str:
    """Return the points of a curve for people: all of a few, else the first and the last."""
    if axis == "message_size":
        shown = [format_bytes(2 * value) for value in np.sort(values).tolist()]
    else:
        shown = [f"{value:g}" for value in np.sort(values)]
    return f"{axis} " + (", ".join(shown) if len(shown) <= 4 else f"{shown[0]} to {shown[-1]}")
