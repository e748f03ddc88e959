"""The files of `aiconfigurator-core`'s layout: which one to read for an engine's version, and its rows.

`<system>/<family>/<engine>/<version>/<table>_perf.parquet`; latency is in milliseconds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.errors import InputError
from windtunnel.model import operators as ops
from windtunnel.model.precision import Format
from windtunnel.pricing.roofline import Roofline
from windtunnel.pricing.table import Floats, MeasurementTable, as_numpy, numeric_column, read_parquet, require_columns
from windtunnel.schema import read_yaml
from windtunnel.versions import is_unreleased

ENGINES = ("vllm", "sglang", "trtllm")
"""Engines with measured tables; where the one asked for lacks a table, the others are tried in this order."""

NEWEST = "99"
"""Above any engine's version."""

HICCUP = 1.75
"""What takes this many times as long as both less work and more is not believed: more cannot take so much less time."""

BALANCED = "balanced"
DISTRIBUTIONS = ("power_law_1.01", "power_law_1.2", BALANCED)
"""How tokens were spread over experts when a mixture of experts was measured, the default first.

Against `balanced`, vLLM 0.24.0 on H100 takes 0.88 (both power laws) of the time for 8 to 255 tokens, as fewer experts
are chosen, and for over 2,047 tokens on 8 expert-parallel ranks 1.41 (1.01) and 1.58 (1.2) times as long. Routers are
trained towards balance and real prompts pull them from it, so the milder measured skew is the default."""


KV_DTYPES: Mapping[Format, str] = {Format.BF16: "bfloat16", Format.FP8: "fp8"}
"""Format of a cache -> what tables call it."""

GemmPrices = Callable[[ops.Gemm], "Floats | None"]
"""Seconds of a GEMM at every one of its `m`; None where nobody measured its format."""


@dataclass(frozen=True)
class Place:
    """One folder of tables: an engine's version."""

    folder: Path
    engine: str
    version: str


@dataclass(frozen=True)
class Rows:
    """Rows of one Parquet file in one format: numeric columns, and the kernel of each row."""

    columns: Mapping[str, Floats]
    """`latency` (milliseconds) among them."""
    kernel_codes: NDArray[Any]
    kernel_names: NDArray[Any]
    place: Place

    def __len__(self) -> int:
        return len(self.kernel_codes)

    @property
    def seconds(self) -> Floats:
        return self.columns["latency"] * 1e-3

    @property
    def main_kernel(self) -> str:
        """The kernel of most rows."""
        return str(self.kernel_names[np.argmax(np.bincount(self.kernel_codes))])

    def named(self, matches: Callable[[str], bool]) -> NDArray[np.bool_]:
        """Which rows' kernels have a name that matches."""
        matching = np.array([matches(str(name)) for name in self.kernel_names], dtype=bool)
        found: NDArray[np.bool_] = matching[self.kernel_codes]
        return found

    def take(self, rows: NDArray[Any]) -> Rows:
        """Only `rows` (a mask or indices)."""
        columns = {name: column[rows] for name, column in self.columns.items()}
        return Rows(columns, self.kernel_codes[rows], self.kernel_names, self.place)


@dataclass(frozen=True)
class Collection:
    """The files of one system as one version of one engine sees them."""

    system: Path
    engine: str
    version: str
    roofline: Roofline
    cuda_graphs: bool = True
    expert_distribution: str = DISTRIBUTIONS[0]
    moe_backend: str | None = None
    fused_all_reduce: bool = False
    attention_backend: str | None = None
    read: dict[tuple[str, ...], MeasurementTable | None] = field(default_factory=dict)
    """Tables that were read already, by kind and words."""

    def places(self, family: str, table: str) -> Iterator[Place]:
        """Folders that hold `table`, the best first.

        The engine's own versions by distance from the one asked for, then the other engines' newest first. A folder
        whose `reuse.yaml` declares the table stands where it is and is read from the version that it names.
        """
        for engine in dict.fromkeys((self.engine, *ENGINES)):
            versions = self._versions(family, engine, table)
            newest_first = sorted(versions, key=version_key, reverse=True)
            if engine == self.engine:
                newest_first.sort(key=lambda name: _distance(version_key(name), version_key(self.version)))
            for version in newest_first:
                yield Place(versions[version], engine, versions[version].name)

    def _versions(self, family: str, engine: str, table: str) -> dict[str, Path]:
        """Version -> the folder that holds the table for it."""
        found: dict[str, Path] = {}
        for folder in (self.system / family / engine).glob("*"):
            if (folder / f"{table}.parquet").is_file():
                found[folder.name] = folder
            elif (folder / "reuse.yaml").is_file():
                for reuse in read_yaml(folder / "reuse.yaml").get("reuse", []):
                    donor = folder.parent / str(reuse.get("from_version"))
                    if reuse.get("table") == table and (donor / f"{table}.parquet").is_file():
                        found[folder.name] = donor
        return found

    def label(self, family: str, rows: Rows) -> str:
        """The table's name for people: where it is from, its main kernel, and how it differs from what was asked."""
        place = rows.place
        name = f"{self.system.name}/{family}/{place.engine}/{place.version} ({rows.main_kernel})"
        if place.engine != self.engine:
            return f"{name}, in place of {self.engine}"
        return name if place.version == self.version else f"{name}, nearest to {self.version}"


_VERSION = re.compile(r"^v?(?P<numbers>\d+(?:\.\d+)*)(?:\.?(?P<stage>dev|rc|post)(?P<number>\d+))?")
_STAGES = {"dev": -2, "rc": -1, None: 0, "post": 1}


def version_key(version: str) -> tuple[int, ...]:
    """A version as five numbers that sort as versions do: `1.3.0rc20` -> (1, 3, 0, -1, 20), before `1.3.0`.

    A build between releases (`nightly-...`, `main`) is above all of them.

    Raises:
        InputError: it is neither.
    """
    match = _VERSION.match(NEWEST if is_unreleased(version) else version)
    if match is None:
        raise InputError(f"{version!r} is not a version", "for example 0.24.0, 1.3.0rc20 or nightly")
    numbers = [int(number) for number in match["numbers"].split(".")][:3]
    return (*numbers, *([0] * (3 - len(numbers))), _STAGES[match["stage"]], int(match["number"] or 0))


def _distance(one: tuple[int, ...], asked: tuple[int, ...]) -> tuple[int, ...]:
    """Sorts versions by nearness: alike up to a later number, then a smaller step in the number where they part.

    Of older versions the newest and of newer ones the oldest is nearer; of an older and a newer one as far, the newer.
    """
    part = next((index for index, (a, b) in enumerate(zip(one, asked, strict=True)) if a != b), len(one))
    if part == len(one):
        return (-part,)
    newer = one[part] > asked[part]
    rest = one[part + 1 :] if newer else tuple(-number for number in one[part + 1 :])
    return (-part, abs(one[part] - asked[part]), 0 if newer else 1, *rest)


def read_rows(place: Place, table: str, numbers: tuple[str, ...], words: Mapping[str, str]) -> Rows | None:
    """The rows of a file that carry `words`, or None where it has none.

    Columns of `numbers` that end in `?` may be missing (older collections) and are then 0.
    """
    path = place.folder / f"{table}.parquet"
    names = tuple(name.removesuffix("?") for name in numbers)
    rows = read_parquet(path, [*names, *words, "kernel_source", "latency"], [*words, "kernel_source"])
    needed = tuple(name for name in numbers if not name.endswith("?"))
    require_columns(path, rows.column_names, (*needed, *words, "kernel_source", "latency"))
    keep = np.ones(rows.num_rows, dtype=bool)
    for name, word in words.items():
        codes, labels = _codes(rows, name)
        keep &= codes == labels.index(word) if word in labels else False
    if not keep.any():
        return None
    columns = {
        name: numeric_column(rows, name, path)[keep] if name in rows.column_names else np.zeros(int(keep.sum()))
        for name in (*names, "latency")
    }
    codes, labels = _codes(rows, "kernel_source")
    return Rows(columns, codes[keep], np.array(labels), place)


def _codes(rows: Any, name: str) -> tuple[NDArray[Any], list[str]]:
    column = rows[name].unify_dictionaries().combine_chunks()
    return as_numpy(column.indices), column.dictionary.to_pylist()


def main_kernel_only(rows: Rows, point: tuple[str, ...]) -> Rows:
    """Where several kernels were measured at one point, the rows of the kernel with the most rows in the file.

    A collection runs its engine's own dispatch over the whole grid and other kernels over parts of it (SGLang's
    `triton` attention beside `trtllm_mha`), so the most frequent one is the default.
    """
    counts = np.bincount(rows.kernel_codes, minlength=len(rows.kernel_names))
    return _one_kernel_a_point(rows, point, np.argsort(np.argsort(-counts, kind="stable"))[rows.kernel_codes])


def fastest_kernel_only(rows: Rows, point: tuple[str, ...]) -> Rows:
    """Where several kernels were measured at one point, the rows of the fastest: what an autotuned engine runs."""
    return _one_kernel_a_point(rows, point, rows.seconds)


def _one_kernel_a_point(rows: Rows, point: tuple[str, ...], rank: NDArray[Any]) -> Rows:
    """At every point all rows of the kernel whose row there has the least `rank`."""
    if len(np.unique(rows.kernel_codes)) == 1:
        return rows
    order = np.lexsort((rank, *(rows.columns[name] for name in point)))
    points = np.column_stack([rows.columns[name][order] for name in point])
    new_point = np.append(True, np.any(points[1:] != points[:-1], axis=1))
    if new_point.all():
        return rows
    codes = rows.kernel_codes[order]
    best = codes[np.maximum.accumulate(np.where(new_point, np.arange(len(order)), 0))]
    return rows.take(np.sort(order[codes == best]))


def joined(rows: Rows, others: Rows) -> Rows:
    """All of both; named after the place of the first."""
    columns = {name: np.concatenate([column, others.columns[name]]) for name, column in rows.columns.items()}
    codes = np.concatenate([rows.kernel_codes, others.kernel_codes + len(rows.kernel_names)])
    return Rows(columns, codes, np.concatenate([rows.kernel_names, others.kernel_names]), rows.place)


def first_rows(
    collection: Collection, family: str, table: str, numbers: tuple[str, ...], choices: list[dict[str, str]]
) -> Rows | None:
    """The rows of the best place that has any of `choices` (words), the first choice of a place first."""
    point = tuple(name.removesuffix("?") for name in numbers)
    for place in collection.places(family, table):
        for words in choices:
            rows = read_rows(place, table, numbers, words)
            if rows is not None:
                return main_kernel_only(rows, point)
    return None


def at_same_points(rows: Rows, other: Rows, values: Floats, point: tuple[str, ...]) -> Floats:
    """The value of `other` at each point of `rows`, NaN where it has none."""
    if not len(other):
        return np.full(len(rows), np.nan)
    keys = np.zeros(len(rows) + len(other), dtype=np.int64)
    for name in point:
        _, codes = np.unique(np.concatenate([rows.columns[name], other.columns[name]]), return_inverse=True)
        keys = keys * (int(codes.max()) + 1) + codes
    wanted, known = keys[: len(rows)], keys[len(rows) :]
    order = np.argsort(known, kind="stable")
    at = order[np.minimum(np.searchsorted(known, wanted, sorter=order), len(order) - 1)]
    return np.where(known[at] == wanted, values[at], np.nan)
