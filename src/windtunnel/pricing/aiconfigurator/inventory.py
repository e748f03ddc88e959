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
from windtunnel.pricing.aiconfigurator import borrowed_kernels, collectives, experts, gemms
from windtunnel.pricing.aiconfigurator.collection import Place, Rows, Texts, read_file
from windtunnel.pricing.aiconfigurator.estimator import PACKAGE, systems_folder
from windtunnel.pricing.aiconfigurator.published import fetched_folders, is_newer, published
from windtunnel.pricing.table import Floats

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
    installed = systems or _installed_systems()
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


def _installed_systems() -> Path | None:
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
    """Return the operator that a table prices; fetched ones price versions from `newer` on, and what `older` names."""
    operator = published().operators.get(table)
    taken = is_newer(engine, measured, measured) or any(
        older.engine == engine and table in published().families[older.family] for older in published().older
    )
    return operator if taken or not fetched else None


@dataclass(frozen=True)
class Suspects:
    """Suspect rows of one curve of a table."""

    table: KnownTable
    words: str
    shape: str
    num_rows: int
    measured_s: float
    """Median of the rows."""
    taken_s: float | None
    """Median of what pricing takes instead; None where the rows are left out."""
    reason: str


Rule = Callable[[Device, Place, Rows, Texts], Floats]
"""Function that returns the milliseconds that pricing takes for each row, NaN for one that is left out."""


def _per_choice(rule: Callable[[Place, Rows], Floats]) -> Rule:
    """Apply a rule to the rows of each combination of words and kernel on its own, as pricing does."""

    def sound(_device: Device, place: Place, rows: Rows, texts: Texts) -> Floats:
        latency = rows.columns["latency"].copy()
        codes = np.column_stack([rows.kernel_codes, *(codes for codes, _ in texts.values())])
        for choice in np.unique(codes, axis=0):
            here = np.flatnonzero(np.all(codes == choice, axis=1))
            latency[here] = rule(place, rows.take(here))
        return latency

    return sound


def _experts(device: Device, _place: Place, rows: Rows, texts: Texts) -> Floats:
    return np.where(experts.suspect_experts(device, rows, texts), np.nan, rows.columns["latency"])


_DECODE = ("batch_size", "num_heads", "num_key_value_heads", "head_dim", "window_size?", "step")
_MESSAGES = "takes 1.4 times as long as a smaller and a larger message, or 1.75 times and so is a hiccup"
_CHECKS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...], Rule, str]] = {
    "gemm_perf": (
        ("n", "k", "m"),
        ("gemm_dtype",),
        _per_choice(lambda _, rows: gemms.sound_latency(rows)),
        "takes 1.75 times as long as both the next smaller and the next larger m",
    ),
    "moe_perf": (
        experts.MOE_POINT,
        ("moe_dtype", "distribution"),
        _experts,
        "lies 2.5 times as far above the roofline as this file's other shapes, and as this shape in another format",
    ),
    "generation_attention_perf": (
        _DECODE,
        ("attn_dtype", "kv_cache_dtype"),
        _per_choice(lambda place, rows: borrowed_kernels.sound_latency(place.engine, rows, _DECODE)),
        "takes longer than the same batch over more keys",
    ),
    "custom_allreduce_perf": (
        ("num_gpus", "message_size"),
        (),
        _per_choice(lambda _, rows: collectives.sound_latency(rows)),
        _MESSAGES,
    ),
    "nccl_perf": (
        ("num_gpus", "message_size"),
        ("op_name", "nccl_dtype"),
        _per_choice(lambda _, rows: collectives.sound_latency(rows)),
        _MESSAGES,
    ),
}
"""Table -> its dimensions, the axis last; its words; the rule by which pricing judges its rows; and the reason."""


def suspects(table: KnownTable) -> Iterator[Suspects]:
    """Yield the suspect rows of a table at hand, a curve at a time; nothing of a table that has no rule."""
    if table.path is None or table.table not in _CHECKS or table.operator is None:
        return
    numbers, words, rule, reason = _CHECKS[table.table]
    place = Place(table.path.parent, table.engine, table.version)
    rows, texts = read_file(place, table.table, numbers, words)
    latency = rule(catalog.device(table.device), place, rows, texts)
    found = rows.take(~(latency == rows.columns["latency"]))
    if not len(found):
        return
    taken = latency[~(latency == rows.columns["latency"])]
    codes = {name: codes[~(latency == rows.columns["latency"])] for name, (codes, _) in texts.items()}
    names = [name.removesuffix("?") for name in numbers[:-1]]
    keys = np.column_stack([*(found.columns[name] for name in names), *codes.values(), found.kernel_codes])
    for key in np.unique(keys, axis=0):
        here = np.all(keys == key, axis=1)
        yield _described(
            table, found.take(here), taken[here], names, words, {n: c[here] for n, c in codes.items()}, texts, reason
        )
