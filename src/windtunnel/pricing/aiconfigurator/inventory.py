"""Every measured table that is known: installed, fetched, or to be fetched; and the suspect rows of those at hand."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from windtunnel import catalog
from windtunnel.hardware import Device
from windtunnel.pricing.aiconfigurator import attention, collectives, experts, gemms
from windtunnel.pricing.aiconfigurator.collection import MOE_POINT, Place, Rows, Texts
from windtunnel.pricing.aiconfigurator.estimator import PACKAGE, systems_folder
from windtunnel.pricing.aiconfigurator.published import fetched_folders, is_newer, published
from windtunnel.pricing.table import Floats, grouped
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


Rule = Callable[[Device, Place, Rows, Texts], Floats]
"""Function that returns the milliseconds that pricing takes for each row, NaN for one that is left out."""


def _per_choice(rule: Callable[[Place, Rows], Floats]) -> Rule:
    """Apply a rule to the rows of each combination of words and kernel on its own, as pricing does."""

    def sound(_device: Device, place: Place, rows: Rows, texts: Texts) -> Floats:
        latency = rows.latency.copy()
        for here in grouped([rows.kernel_codes, *(codes for codes, _ in texts.values())]):
            latency[here] = rule(place, rows.take(here))
        return latency

    return sound


def _experts(device: Device, _place: Place, rows: Rows, texts: Texts) -> Floats:
    return np.where(experts.suspect_experts(device, rows, texts), np.nan, rows.latency)


STEEP, MORE_RANKS = 1.25, 2.0
_STEEP_REASON = (
    "grows faster than its bytes from the next smaller message and takes twice as long as on fewer ranks: the step of "
    "an engine to its next kernel, or a bad row"
)


def _is_steep(rows: Rows) -> NDArray[np.bool_]:
    """Return a mask of messages that grow by `STEEP` more than their bytes, and by `MORE_RANKS` on twice the ranks."""
    took = rows.latency
    halves = (rows.with_columns(**{name: rows[name] / 2}) for name in ("message_size", "num_gpus"))
    smaller, fewer = (half.at_same_points(rows, took, _COLLECTIVE) for half in halves)
    return np.asarray((took > 2 * STEEP * smaller) & (took > MORE_RANKS * fewer))


_COLLECTIVE = ("num_gpus", "message_size")
_DECODE = ("batch_size", "num_heads", "num_key_value_heads", "head_dim", "window_size", "step")
_HICCUP = "takes 1.75 times as long as both the next smaller and the next larger m"
_SLOW_SHAPE = "lies 2.5 times as far above the bound as this file's other shapes, and as this shape in another format"
_LONGER = "takes longer than the same batch over more keys"
_MESSAGES = "takes 1.4 times as long as a smaller and a larger message, or 1.75 times and so is a hiccup"
_COLLECTIVES = _per_choice(lambda _, rows: collectives.sound_latency(rows))
_CHECKS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...], Rule, str]] = {
    "gemm_perf": (("n", "k", "m"), ("gemm_dtype",), _per_choice(lambda _, rows: gemms.sound_latency(rows)), _HICCUP),
    "moe_perf": (MOE_POINT, ("moe_dtype", "distribution"), _experts, _SLOW_SHAPE),
    "generation_attention_perf": (
        *(_DECODE, ("attn_dtype", "kv_cache_dtype")),
        *(_per_choice(lambda place, rows: attention.sound_latency(place.engine, rows)), _LONGER),
    ),
    "custom_allreduce_perf": (_COLLECTIVE, (), _COLLECTIVES, _MESSAGES),
    "nccl_perf": (_COLLECTIVE, ("op_name", "nccl_dtype"), _COLLECTIVES, _MESSAGES),
}
"""Table -> its dimensions, the axis last; its words; the rule by which pricing judges its rows; and the reason."""


def suspects(table: KnownTable) -> Iterator[Suspects]:
    """Yield the suspect rows of a table at hand, a curve at a time; nothing of a table that has no rule."""
    if table.path is None or table.table not in _CHECKS or table.operator is None:
        return
    numbers, words, rule, reason = _CHECKS[table.table]
    place = Place(table.path.parent, table.engine, table.version)
    rows, texts = place.read_file(table.table, numbers, words)
    latency = rule(catalog.device(table.device), place, rows, texts)
    changed = latency != rows.latency
    yield from _curves(table, rows, texts, latency, changed, reason)
    if numbers == _COLLECTIVE:
        steep = _per_choice(lambda _, some: np.where(_is_steep(some), np.nan, some.latency))
        kept = np.isnan(steep(catalog.device(table.device), place, rows, texts)) & ~changed
        yield from _curves(table, rows, texts, rows.latency, kept, _STEEP_REASON)


def _curves(
    table: KnownTable, rows: Rows, texts: Texts, latency: Floats, is_suspect: NDArray[np.bool_], reason: str
) -> Iterator[Suspects]:
    """Yield the suspect rows of each curve, with the milliseconds that pricing takes."""
    *names, axis = _CHECKS[table.table][0]
    suspect = np.flatnonzero(is_suspect)
    columns = [*(rows[name] for name in names), *(codes for codes, _ in texts.values()), rows.kernel_codes]
    for curve in grouped([column[suspect] for column in columns]):
        here = suspect[curve]
        first, taken = here[0], latency[here] * 1e-3
        spoken = [labels[codes[first]] for codes, labels in texts.values()]
        yield Suspects(
            table,
            words=" ".join([*spoken, str(rows.kernel_names[rows.kernel_codes[first]])]),
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
