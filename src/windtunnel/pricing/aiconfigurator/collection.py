"""Files of `aiconfigurator-core`'s layout: the file to read for an engine's version, and its rows.

`<system>/<family>/<engine>/<version>/<table>_perf.parquet`; latency is in milliseconds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from windtunnel import catalog
from windtunnel.disk_cache import home, keep, recall
from windtunnel.metrics.records import Table
from windtunnel.model import operators as ops
from windtunnel.model.precision import Format
from windtunnel.pricing.aiconfigurator.published import dated, is_newer
from windtunnel.pricing.roofline import Roofline
from windtunnel.pricing.table import Floats, MeasurementTable, as_numpy, numeric_column, read_parquet, require_columns
from windtunnel.schema import Schema, read_yaml
from windtunnel.units import version_key

ENGINES = ("vllm", "sglang", "trtllm")
"""Engines with measured tables; where the engine itself lacks a table, the others are tried in this order."""

NEWEST = "nightly"
"""A version above all released ones."""

ADDED_SINCE = ("window_size",)
"""Columns that older collections lack; they are then 0."""

MOE_POINT = ("hidden_size", "inter_size", "num_experts", "topk", "moe_tp_size", "moe_ep_size", "num_tokens")
"""Columns that tell the measured points of experts apart."""

HICCUP = 1.75
"""A row that takes this many times as long as both less work and more work is left out as a fault of measurement."""

BALANCED = "balanced"
POWER_LAW = "power_law_1.01"
TEXT = "text"
RANDOM = "random"
DISTRIBUTIONS = (TEXT, RANDOM, POWER_LAW, "power_law_1.2", BALANCED)
"""Spreads of tokens over experts, the default first: as measured but for `TEXT`, real text's, and `RANDOM`, that of
random token ids on several ranks and `POWER_LAW` on one (`routing.py`).

Against `balanced`, vLLM 0.24.0 on H100 takes 0.88 (both power laws) of the time for 8 to 255 tokens, as fewer experts
are chosen, and for over 2,047 tokens on 8 expert-parallel ranks 1.41 (1.01) and 1.58 (1.2) times as long. """


class MeasuredKernels(Schema, frozen=True):
    """Everything in `kernels.yaml`, which describes the fields and has their sources."""

    gemm_dtypes: dict[Format, tuple[str, ...]]
    moe_dtypes: dict[Format, tuple[str, ...]]
    moe_dtypes_fp4: dict[Format, tuple[str, ...]]
    shared_moe_dtypes: dict[Format, tuple[str, ...]]
    wide_stand_ins: dict[Format, Format]
    whole_over_slices: float
    kv_dtypes: dict[Format, str]
    moe_backends: dict[str, tuple[str, ...]]
    attention_backends: dict[str, tuple[str, ...]]
    longest_share: dict[str, float]
    same_silicon: dict[str, str]
    same_all_reduce: dict[str, tuple[str, str]]
    one_shot_below_bytes: dict[str, dict[int, float]]
    bare_gemms_of: dict[str, str]
    fp8_tiles_since: dict[str, str]
    flashinfer_across_ranks_since: dict[str, str]
    triton_kernels_since: dict[str, str]
    padded_experts: dict[str, tuple[str, str]]
    padded_below_tp: int
    block_rows: int
    padded_small_kernels: int
    padded_gap_us: dict[str, float]
    padded_beside_us: float
    padded_choice_us: float
    quantise_ps: dict[str, float]
    small_tiles: dict[str, tuple[str, str]]
    tile_rows: int
    tiles_of: tuple[tuple[str, str], tuple[str, str]]
    tiles_on: str
    devices_per_node: dict[str, int]
    overlapped_since: dict[str, str]
    held_by: dict[str, str]
    believed: dict[str, float]
    not_gated: tuple[int, ...]
    slower_than_bf16: float
    slower_than_newest: float
    skewed_at_one_token: float
    few_tokens: int
    slow_curve: float
    falls: float
    quantises: float
    launch_bound_s: float
    bound_below: float
    free_above: float
    quantised_before: str
    projections_error: float
    core_error: float
    expanded_by: dict[str, str]
    split_share: float
    sparse_models: tuple[tuple[tuple[str, ...], dict[str, int]], ...]
    sparse_launch_bound: float
    sparse_without_graphs: float
    sparse_least_share: float
    latent_prefill_widths: dict[str, float]
    latent_decode_widths: dict[str, float]
    many_tokens_an_expert: int


KERNELS = catalog.entry(Path(__file__).with_name("kernels.yaml"), MeasuredKernels)


@dataclass(frozen=True)
class Place:
    """One folder of tables: an engine's version."""

    folder: Path
    engine: str
    version: str
    wheel: str = ""
    """Wheel that it was fetched from, and its date; empty of the installed package."""

    def read_rows(self, table: str, numbers: tuple[str, ...], words: Mapping[str, str]) -> Rows | None:
        """Read the rows of a file that have `words`; None where it has none.

        They are kept in the user's cache folder: loading Parquet's reader and reading a whole file takes longer.
        """
        path = self.folder / f"{table}.parquet"
        facts = path.stat() if path.is_file() else None
        key = repr((str(path), facts and (facts.st_size, facts.st_mtime_ns), numbers, sorted(words.items())))
        kept = home() / "rows" / hashlib.sha256(key.encode()).hexdigest()[:32]
        content = recall(kept)
        if content is None:
            rows, texts = self.read_file(table, numbers, tuple(words))
            found = rows.with_words(texts, words)
            columns, codes, names = {}, b"", []
            if found is not None:
                columns = {name: column.tobytes() for name, column in found.columns.items() if name != "kernel"}
                codes, names = found["kernel"].astype("i4").tobytes(), found.kernel_names.tolist()
            keep(kept, msgspec.msgpack.encode((columns, codes, names)))
            return found
        columns, codes, names = msgspec.msgpack.decode(content)
        read = {name: np.frombuffer(column) for name, column in columns.items()}
        return Rows({**read, "kernel": np.frombuffer(codes, "i4")}, {}, np.array(names), self) if columns else None

    def read_file(self, table: str, numbers: tuple[str, ...], words: tuple[str, ...]) -> tuple[Rows, Texts]:
        path = self.folder / f"{table}.parquet"
        names = (*numbers, *words, "kernel_source", "latency")
        rows = read_parquet(path, list(names), [*words, "kernel_source"])
        lacking = {name for name in ADDED_SINCE if name not in rows.column_names}
        require_columns(path, rows.column_names, tuple(name for name in names if name not in lacking))
        columns = {
            name: np.zeros(rows.num_rows) if name in lacking else numeric_column(rows, name, path)
            for name in (*numbers, "latency")
        }
        columns["kernel"], labels = _codes(rows, "kernel_source")
        return Rows(columns, {}, np.array(labels), self), {name: _codes(rows, name) for name in words}


@dataclass(frozen=True, eq=False)
class Rows(Table):
    """Rows of one Parquet file in one format: among their columns `latency` (milliseconds) and `kernel`, a position."""

    kernel_names: NDArray[Any]
    place: Place

    @property
    def latency(self) -> Floats:
        """Milliseconds of each row."""
        return self["latency"]

    @property
    def seconds(self) -> Floats:
        return self.latency * 1e-3

    @property
    def main_kernel(self) -> str:
        """Kernel of most rows."""
        return str(self.kernel_names[np.argmax(np.bincount(self["kernel"]))])

    def named(self, matches: Callable[[str], bool]) -> NDArray[np.bool_]:
        """Return a mask of the rows whose kernel has a matching name."""
        matching = np.array([matches(str(name)) for name in self.kernel_names], dtype=bool)
        return np.asarray(matching[self["kernel"]])

    def sound(self, latency: Floats) -> Rows:
        """Return the rows with other latencies, without those that lose theirs (NaN)."""
        lost = np.isnan(latency) & ~np.isnan(self.latency)
        return self.replaced(latency=latency).where(~lost)

    def with_words(self, texts: Texts, words: Mapping[str, str]) -> Rows | None:
        """Return the rows that have `words`; None where there are none."""
        keep = np.ones(len(self), dtype=bool)
        for name, word in words.items():
            codes, labels = texts[name]
            keep &= codes == labels.index(word) if word in labels else False
        return self.where(keep) if keep.any() else None

    def main_kernel_only(self, point: tuple[str, ...]) -> Rows:
        """Keep, where several kernels were measured at one point, the kernel with the most rows in the file.

        A collection runs its engine's own dispatch over the whole grid and other kernels over parts of it (SGLang's
        `triton` attention beside `trtllm_mha`), so the most frequent one is the default.
        """
        counts = np.bincount(self["kernel"], minlength=len(self.kernel_names))
        return self._one_kernel_a_point(point, np.argsort(np.argsort(-counts, kind="stable"))[self["kernel"]])

    def fastest_kernel_only(self, point: tuple[str, ...]) -> Rows:
        """Keep, where several kernels were measured at one point, the fastest, which an autotuned engine runs."""
        return self._one_kernel_a_point(point, self.seconds)

    def _one_kernel_a_point(self, point: tuple[str, ...], rank: NDArray[Any]) -> Rows:
        """Return, at every point, all rows of the kernel whose row has the least `rank` there."""
        if len(np.unique(self["kernel"])) == 1:
            return self
        order = np.lexsort((rank, *(self[name] for name in point)))
        points = np.column_stack([self[name][order] for name in point])
        new_point = np.append(True, np.any(points[1:] != points[:-1], axis=1))
        if new_point.all():
            return self
        codes = self["kernel"][order]
        best = codes[np.maximum.accumulate(np.where(new_point, np.arange(len(order)), 0))]
        return self.where(np.sort(order[codes == best]))

    def joined(self, others: Rows) -> Rows:
        """Return the rows of both, with the place of the first."""
        others = others.replaced(kernel=others["kernel"] + len(self.kernel_names))
        columns = {name: np.concatenate([column, others[name]]) for name, column in self.columns.items()}
        return Rows(columns, {}, np.concatenate([self.kernel_names, others.kernel_names]), self.place)

    def at_same_points(self, other: Rows, values: Floats, point: tuple[str, ...]) -> Floats:
        """Return the value of `other` at each point of these rows, NaN where it has none."""
        if not len(other):
            return np.full(len(self), np.nan)
        keys = np.zeros(len(self) + len(other), dtype=np.int64)
        for name in point:
            _, codes = np.unique(np.concatenate([self[name], other[name]]), return_inverse=True)
            keys = keys * (int(codes.max()) + 1) + codes
        points, known = keys[: len(self)], keys[len(self) :]
        order = np.argsort(known, kind="stable")
        nearest = order[np.minimum(np.searchsorted(known, points, sorter=order), len(order) - 1)]
        return np.where(known[nearest] == points, values[nearest], np.nan)

    def no_slower_than(self, other: Rows, point: tuple[str, ...]) -> Rows:
        """Return the rows, at points that `other` has too with the faster of both."""
        return self.replaced(latency=np.fmin(self.latency, self.at_same_points(other, other.latency, point)))


Texts = Mapping[str, tuple[NDArray[Any], list[str]]]
"""Column of words -> each row's word, as a number, and the words by number."""


@dataclass(frozen=True)
class KernelChoices:
    """Choices among an engine's measured kernels."""

    cuda_graphs: bool = True
    """Whether all-reduce kernels run from graphs, without the host's launch time."""
    expert_distribution: str = DISTRIBUTIONS[0]
    """One of `DISTRIBUTIONS`."""
    moe_backend: str | None = None
    """One of `MOE_BACKENDS`, the kernels that compute experts; None takes the fastest measured."""
    fused_all_reduce_bytes: float = 0.0
    """Message up to which FlashInfer's all-reduce, TensorRT-LLM's kernel, may be called where it is the fastest."""
    deepep: str | None = None
    """Kernels of DeepEP that bring tokens to the experts: `deepep_normal`, for prompts, or `deepep_low_latency`, whose
    buffers have equally many rows for each expert; None: others do."""
    num_redundant_experts: int | None = None
    """Further copies of experts that are placed on ranks by their load; None: experts are not placed by it."""
    attention_backend: str | None = None
    """One of `ATTENTION_BACKENDS`; None takes the kernels that the engine itself chose."""


ENGINE_CHOICES = KernelChoices()

Reader = Callable[["Collection", Any], "MeasurementTable | None"]
"""Function that reads the table of an operator's kind in its format; None where nobody measured it on the system."""


@dataclass(frozen=True, kw_only=True)
class Collection(KernelChoices):
    """The files of one system as one version of one engine sees them."""

    system: Path
    engine: str
    version: str
    roofline: Roofline
    fetched: Mapping[str, Path] = field(default_factory=dict)
    """Wheel -> the folder of this system in it, of fetched tables; the engine's own alone are read."""
    read: dict[tuple[str, ...], MeasurementTable | None] = field(default_factory=dict)
    """Tables that were already read, by their reader, kind and words."""
    files: dict[Place, tuple[Rows, Texts]] = field(default_factory=dict)
    """Files of experts, kept while one table is made from them."""

    def once(self, op: ops.Op, reader: Reader) -> MeasurementTable | None:
        """Return the table that `reader` finds for `op`; it is read once for all operators that it prices."""
        chooses = getattr(op, "index_num_heads", 1) > 0
        key = (reader.__name__, op.kind, op.variant, str(getattr(op, "span_nodes", 1) > 1), str(chooses))
        if key not in self.read:
            self.read[key] = reader(self, op)
        return self.read[key]

    def at(self, place: Place) -> Collection:
        """Return the files as the engine and version that were measured at a place see them."""
        return replace(self, engine=place.engine, version=place.version, read={})

    def of(self, engine: str) -> Collection:
        """Return the files as another engine's newest version sees them: releases of two engines do not compare."""
        return self if engine == self.engine else replace(self, engine=engine, version=NEWEST, fetched={})

    def places(self, family: str, table: str) -> Iterator[Place]:
        """Yield the folders that hold `table`, the best first.

        The engine's versions come by distance from the collection's version, then other engines' newest first. A folder
        whose `reuse.yaml` declares the table keeps its place and is read from the version that it names.
        """
        for engine in dict.fromkeys((self.engine, *ENGINES)):
            versions = self._versions(family, engine, table)
            places = {version: Place(folder, engine, folder.name) for version, folder in versions.items()}
            if engine == self.engine:
                places = {**self._fetched(family, table), **places}
            newest_first = sorted(places, key=version_key, reverse=True)
            if engine == self.engine:
                newest_first.sort(key=lambda name: _distance(version_key(name), version_key(self.version)))
            yield from (places[version] for version in newest_first)

    def _fetched(self, family: str, table: str) -> dict[str, Place]:
        """Return version -> folder of the fetched tables that pricing takes, in the newest wheel that has it."""
        places: dict[str, Place] = {}
        for wheel, system in self.fetched.items():
            for folder in (path.parent for path in (system / family / self.engine).glob(f"*/{table}.parquet")):
                version = folder.name
                if is_newer(self.engine, version, self.version):
                    places.setdefault(version, Place(folder, self.engine, version, dated(wheel)))
        return places

    def _versions(self, family: str, engine: str, table: str) -> dict[str, Path]:
        """Return version -> folder that holds the table for it."""
        folders: dict[str, Path] = {}
        for folder in (self.system / family / engine).glob("*"):
            if (folder / f"{table}.parquet").is_file():
                folders[folder.name] = folder
            elif (folder / "reuse.yaml").is_file():
                for reuse in read_yaml(folder / "reuse.yaml").get("reuse", []):
                    donor = folder.parent / str(reuse.get("from_version"))
                    if reuse.get("table") == table and (donor / f"{table}.parquet").is_file():
                        folders[folder.name] = donor
        return folders

    def all_rows(
        self, family: str, table: str, numbers: tuple[str, ...], choices: Sequence[Mapping[str, str]]
    ) -> Iterator[Rows]:
        """Yield the rows of every place that has any of `choices` (words), the best place and choice first."""
        for place in self.places(family, table):
            for words in choices:
                rows = place.read_rows(table, numbers, words)
                if rows is not None:
                    yield rows

    def first_rows(
        self, family: str, table: str, numbers: tuple[str, ...], choices: Sequence[Mapping[str, str]]
    ) -> Rows | None:
        """Return the first of `all_rows`, with one kernel at every point."""
        rows = next(self.all_rows(family, table, numbers, choices), None)
        return None if rows is None else rows.main_kernel_only(numbers)

    def label(self, family: str, rows: Rows) -> str:
        """Return a table's name for people: its origin, main kernel, and difference from the collection's engine."""
        place = rows.place
        name = f"{self.system.name}/{family}/{place.engine}/{place.version} ({rows.main_kernel})"
        name = f"{name} from {place.wheel}" if place.wheel else name
        if place.engine != self.engine:
            return f"{name}, in place of {self.engine}"
        return name if self.version in (place.version, NEWEST) else f"{name}, nearest to {self.version}"


def _distance(version: tuple[int, ...], target: tuple[int, ...]) -> tuple[int, ...]:
    """Return a key that sorts versions by nearness: equal up to a later number, then a smaller step in that number.

    The newest of older versions and the oldest of newer ones is nearest; at equal steps the newer one is.
    """
    part = next((index for index, (a, b) in enumerate(zip(version, target, strict=True)) if a != b), len(version))
    if part == len(version):
        return (-part,)
    newer = version[part] > target[part]
    rest = version[part + 1 :] if newer else tuple(-number for number in version[part + 1 :])
    return (-part, abs(version[part] - target[part]), 0 if newer else 1, *rest)


def _codes(rows: Any, name: str) -> tuple[NDArray[Any], list[str]]:
    column = rows[name].unify_dictionaries().combine_chunks()
    return as_numpy(column.indices), column.dictionary.to_pylist()
