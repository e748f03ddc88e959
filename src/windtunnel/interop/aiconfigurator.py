"""Measured operators from the data files of `aiconfigurator-core` (PyPI, Apache-2.0) or a folder of the same layout.

Layout: `systems/data/<system>/<family>/<engine>/<version>/<table>_perf.parquet`. Files give latency in milliseconds and message sizes
in elements; here everything is seconds and bytes. Only data files are read; the package's code is never imported.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.errors import InputError, did_you_mean
from windtunnel.estimate.estimator import Estimator, RooflineEstimator, TableEstimator, TableModel
from windtunnel.estimate.roofline import Roofline
from windtunnel.estimate.table import Floats, MeasurementTable, as_numpy, numeric_column, read_parquet, require_columns
from windtunnel.ops import op as ops
from windtunnel.spec.hardware import Device, Node
from windtunnel.spec.noun import read_yaml
from windtunnel.spec.precision import Format

PACKAGE = "aiconfigurator_core"
ENGINES = ("vllm", "sglang", "trtllm")
"""Engines with measured tables; where the one asked for lacks a table, the others are tried in this order."""

DISTRIBUTIONS = ("power_law_1.01", "power_law_1.2", "balanced")
"""How tokens were spread over experts when a mixture of experts was measured, the default first.

Against `balanced`, vLLM 0.24.0 on H100 takes 0.88 (both power laws) of the time for 8 to 255 tokens, as fewer experts are chosen, and for
over 2,047 tokens on 8 expert-parallel ranks 1.41 (1.01) and 1.58 (1.2) times as long. Routers are trained towards balance and real
prompts pull them from it, so the milder measured skew is the default."""

_MS = 1e-3


def systems_folder(data_dir: Path | None = None) -> Path:
    """The folder that holds `<system>/<family>/...`: of the installed package, or below `data_dir`.

    Raises:
        InputError: the package is not installed, or `data_dir` does not hold such a folder.
    """
    if data_dir is None:
        found = importlib.util.find_spec(PACKAGE)
        if found is None or not found.submodule_search_locations:
            raise InputError(
                "the measured operators are not installed (package aiconfigurator-core)",
                "pip install aiconfigurator-core, or give a folder of the same layout as data_dir",
            )
        data_dir = Path(next(iter(found.submodule_search_locations)))
    for folder in (data_dir, data_dir / "data", data_dir / "systems" / "data"):
        if any(folder.glob("*/*/*/*/*_perf.parquet")):
            return folder
    raise InputError(
        f"{data_dir} holds no measured operators",
        "expected <system>/<family>/<engine>/<version>/<table>_perf.parquet, as in aiconfigurator-core's systems/data",
    )


def measured_systems(data_dir: Path | None = None) -> list[str]:
    """The systems that have measured tables."""
    return sorted({path.parents[3].name for path in systems_folder(data_dir).glob("*/*/*/*/*_perf.parquet")})


def measured_estimator(
    device: Device,
    node: Node | None,
    engine: str,
    version: str,
    data_dir: Path | None = None,
    *,
    cuda_graphs: bool = True,
    expert_distribution: str = DISTRIBUTIONS[0],
) -> Estimator:
    """The estimator that reads tables measured on `device` and falls back to the calibrated roofline.

    Args:
        device: priced as `device.measured_as`; without it every operator is priced by the roofline.
        node: its links price collectives that nobody measured.
        engine: whose kernels; the nearest measured version is taken, and every estimate's source says which.
        version: of the engine.
        data_dir: a folder of the package's layout, in place of the installed package.
        cuda_graphs: whether all-reduce kernels run from graphs (without the host's launch time).
        expert_distribution: one of `DISTRIBUTIONS`.

    Raises:
        InputError: no data, or a system or distribution that the data does not have.
    """
    roofline = Roofline(device, node)
    if device.measured_as is None:
        return RooflineEstimator(roofline)
    if expert_distribution not in DISTRIBUTIONS:
        hint = did_you_mean(expert_distribution, DISTRIBUTIONS, f"known: {', '.join(DISTRIBUTIONS)}")
        raise InputError(f"expert distribution {expert_distribution!r} was not measured", hint)
    folder = systems_folder(data_dir) / device.measured_as
    if not folder.is_dir():
        known = measured_systems(data_dir)
        raise InputError(
            f"{device.name} is measured as {device.measured_as}, which the data does not have",
            did_you_mean(device.measured_as, known, f"it has {', '.join(known)}"),
        )
    return TableEstimator(Tables(folder, engine, version, roofline, cuda_graphs, expert_distribution), roofline)


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
    kernel_codes: NDArray[Any]
    kernel_names: NDArray[Any]
    place: Place

    def __len__(self) -> int:
        return len(self.kernel_codes)

    @property
    def main_kernel(self) -> str:
        """The kernel of most rows."""
        return str(self.kernel_names[np.argmax(np.bincount(self.kernel_codes))])

    def launch_floor_by_row_s(self) -> Floats:
        """For a GEMM's rows: what its kernel takes when there is next to nothing to compute."""
        work = self.columns["m"] * self.columns["n"] * self.columns["k"]
        floor = np.zeros(len(self.kernel_names))
        for code in np.unique(self.kernel_codes):
            here = self.kernel_codes == code
            smallest = work[here] <= np.quantile(work[here], 0.05)
            floor[code] = np.median(self.columns["latency"][here][smallest]) * _MS
        return floor[self.kernel_codes]

    def launch_floor_s(self) -> float:
        """The least of the kernels' floors."""
        return float(self.launch_floor_by_row_s().min())

    def named(self, matches: Callable[[str], bool]) -> NDArray[np.bool_]:
        """Which rows' kernels have a name that matches."""
        return np.array([matches(str(name)) for name in self.kernel_names])[self.kernel_codes]

    def take(self, rows: NDArray[Any]) -> Rows:
        """Only `rows` (a mask or indices)."""
        columns = {name: column[rows] for name, column in self.columns.items()}
        return Rows(columns, self.kernel_codes[rows], self.kernel_names, self.place)


@dataclass(frozen=True)
class Tables:
    """The tables of one system as one engine version sees them, each read on first use."""

    system: Path
    engine: str
    version: str
    roofline: Roofline
    cuda_graphs: bool = True
    expert_distribution: str = DISTRIBUTIONS[0]
    _read: dict[tuple[str, ...], MeasurementTable | None] = field(default_factory=dict)

    def table_for(self, op: ops.Op) -> MeasurementTable | None:
        """The table to price `op` from, or None where nobody measured its kind in its format on this system."""
        reader, words = _READERS[op.kind](self, op)
        key = (op.kind, *words)
        if key not in self._read:
            self._read[key] = reader()
        return self._read[key]

    def places(self, family: str, table: str) -> Iterator[Place]:
        """Folders that hold `table`, the best first.

        The engine's own versions by distance from the one asked for, then the other engines' newest first. A folder whose
        `reuse.yaml` declares the table stands where it is and is read from the version that it names.
        """
        for engine in dict.fromkeys((self.engine, *ENGINES)):
            versions = self._versions(family, engine, table)
            newest_first = sorted(versions, key=_version_key, reverse=True)
            if engine == self.engine:
                newest_first.sort(key=lambda name: _distance(_version_key(name), _version_key(self.version)))
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
            return f"{name}, as {self.engine} has none"
        return name if place.version == self.version else f"{name}, nearest to {self.version}"


def _version_key(version: str) -> tuple[int, ...]:
    """Numbers of a version, a release candidate before its release: `1.3.0rc20` -> (1, 3, 0, -1, 20)."""
    text = re.sub(r"rc(\d+)", r".-1.\1", version)
    text = re.sub(r"post(\d+)", r".1.\1", text)
    return tuple(int(number) for number in re.findall(r"-?\d+", text))


def _distance(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    """How far apart two versions are, the leading number first."""
    length = max(len(one), len(other))
    padded = [(*version, *([0] * (length - len(version)))) for version in (one, other)]
    return tuple(abs(a - b) for a, b in zip(*padded, strict=True))


Reader = Callable[[], "MeasurementTable | None"]
Choice = tuple[Reader, tuple[str, ...]]
"""How to read a table, and the words that name it."""


def _read_rows(place: Place, table: str, numbers: tuple[str, ...], words: Mapping[str, str]) -> Rows | None:
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


def _main_kernel_only(rows: Rows, point: tuple[str, ...]) -> Rows:
    """Where several kernels were measured at one point, the rows of the kernel with the most rows in the file.

    A collection runs its engine's own dispatch over the whole grid and other kernels over parts of it (TRT-LLM's
    `min_latency` MoE, SGLang's `triton` attention beside `trtllm_mha`), so the most frequent one is the default.
    """
    counts = np.bincount(rows.kernel_codes, minlength=len(rows.kernel_names))
    if np.count_nonzero(counts) == 1:
        return rows
    rank = np.argsort(np.argsort(-counts, kind="stable"))[rows.kernel_codes]
    order = np.lexsort((rank, *(rows.columns[name] for name in point)))
    points = np.column_stack([rows.columns[name][order] for name in point])
    new_point = np.append(True, np.any(points[1:] != points[:-1], axis=1))
    if new_point.all():
        return rows
    best = rank[order][np.maximum.accumulate(np.where(new_point, np.arange(len(order)), 0))]
    return rows.take(np.sort(order[rank[order] == best]))


def _first_rows(
    tables: Tables, family: str, table: str, numbers: tuple[str, ...], choices: list[dict[str, str]]
) -> Rows | None:
    """The rows of the best place that has any of `choices` (words), the first choice of a place first."""
    point = tuple(name.removesuffix("?") for name in numbers)
    for place in tables.places(family, table):
        for words in choices:
            rows = _read_rows(place, table, numbers, words)
            if rows is not None:
                return _main_kernel_only(rows, point)
    return None


def _table(tables: Tables, family: str, op: ops.Op, rows: Rows, sites: Any, axes: Any, words: Any) -> MeasurementTable:
    label = tables.label(family, rows)
    seconds = rows.columns["latency"] * _MS
    return MeasurementTable(op.kind, sites, axes, seconds, label, words)


_GEMM_DTYPES: Mapping[Format, tuple[str, ...]] = {
    Format.BF16: ("bfloat16",),
    Format.FP8: ("fp8",),
    Format.FP8_BLOCK: ("fp8_block",),
    Format.INT8: ("sq",),
    Format.INT4: ("int4_wo",),
    Format.NVFP4: ("nvfp4",),
}


def _gemm(tables: Tables, op: Any) -> Choice:
    def read() -> MeasurementTable | None:
        found = _all_gemm_rows(tables, [{"gemm_dtype": name} for name in _GEMM_DTYPES.get(op.format, ())])
        rows = next(found, None)
        if rows is None:
            return None
        label = tables.label("gemm", rows)
        if rows.launch_floor_s() > _LAUNCH_BOUND_S:
            donor = next((other for other in found if other.launch_floor_s() < _LAUNCH_BOUND_S), None)
            rows = _free_of_launches(rows, donor)
            name = tables.label("gemm", donor).partition(",")[0] if donor else "the roofline"
            label = f"{label}; where launches bound it, {name}"
        columns = rows.columns
        sites = {"n": columns["n"], "k": columns["k"]}
        seconds = columns["latency"] * _MS
        return MeasurementTable(op.kind, sites, {"m": columns["m"]}, seconds, label, {"format": op.format.value})

    return read, (op.format.value,)


def _all_gemm_rows(tables: Tables, choices: list[dict[str, str]]) -> Iterator[Rows]:
    for place in tables.places("gemm", "gemm_perf"):
        for words in choices:
            rows = _read_rows(place, "gemm_perf", ("m", "n", "k"), words)
            if rows is not None:
                yield _without_hiccups(_main_kernel_only(rows, ("m", "n", "k")))


_HICCUP = 1.75


def _without_hiccups(rows: Rows) -> Rows:
    """A GEMM's rows but those that took 1.75 times as long as both the next smaller and the next larger m.

    More work cannot take so much less time; such rows are strewn over all shapes (2.1 % of vLLM 0.24.0's fp8 rows on B200 and 0.01 %
    on GB200, the same silicon; below 0.7 % elsewhere), so they are hiccups of the collection and not kernels.
    """
    order = np.lexsort([rows.columns[name] for name in ("m", "k", "n")])
    n, k, took = (rows.columns[name][order] for name in ("n", "k", "latency"))
    if len(order) < 3:
        return rows
    inner = (n[2:] == n[:-2]) & (k[2:] == k[:-2])
    hiccup = inner & (took[1:-1] > _HICCUP * np.maximum(took[2:], took[:-2]))
    return rows.take(np.sort(np.delete(order, np.flatnonzero(hiccup) + 1)))


_LAUNCH_BOUND_S = 25e-6
"""A GEMM of no work takes 2 to 14 us on every device when it runs from a graph. Tables whose smallest GEMMs take longer timed
the host: vLLM 0.24.0's fp8_block, 61 us on H100 and 170 to 400 us on B200, GB300 and L40S against 4 to 6 us with the
same DeepGEMM kernels in SGLang's and TRT-LLM's tables. Engines that decode from CUDA graphs do not pay that."""

_BOUND_BELOW, _FREE_ABOVE = 1.5, 4.0
"""In multiples of a kernel's floor: below, a time says nothing about the device; above, it is the device's (where both
engines' tables were compared, their ratio is within 0.9 and 1.15 from four floors on, and 3 to 11 below two)."""


def _free_of_launches(rows: Rows, donor: Rows | None) -> Rows:
    """Rows with the host's launch time taken out: near the floor the donor's time at the same shape, far above it their own.

    In between the two are blended geometrically, so that no step appears. Rows near the floor that the donor lacks are dropped;
    shapes that only the donor has are added.
    """
    floor = rows.launch_floor_by_row_s() / _MS
    own = rows.columns["latency"]
    weight = np.clip(np.log(own / (_BOUND_BELOW * floor)) / np.log(_FREE_ABOVE / _BOUND_BELOW), 0.0, 1.0)
    if donor is None:
        return rows.take(weight == 1.0)
    keys, donor_keys = _shape_keys(rows), _shape_keys(donor)
    order = np.argsort(donor_keys)
    at = order[np.minimum(np.searchsorted(donor_keys, keys, sorter=order), len(order) - 1)]
    other = np.where(donor_keys[at] == keys, donor.columns["latency"][at], np.nan)
    latency = np.where(weight == 1.0, own, np.minimum(own, other ** (1 - weight) * own**weight))
    known = np.isfinite(latency)
    added = ~np.isin(donor_keys, keys[known])
    columns = {
        name: np.concatenate([(latency if name == "latency" else column)[known], donor.columns[name][added]])
        for name, column in rows.columns.items()
    }
    codes = np.concatenate([rows.kernel_codes[known], donor.kernel_codes[added] + len(rows.kernel_names)])
    return Rows(columns, codes, np.concatenate([rows.kernel_names, donor.kernel_names]), rows.place)


def _shape_keys(rows: Rows) -> NDArray[np.int64]:
    """One number for each (m, n, k); all are below 2^20."""
    m, n, k = (rows.columns[name].astype(np.int64) for name in ("m", "n", "k"))
    keys: NDArray[np.int64] = (m << 40) | (n << 20) | k
    return keys


_KV_DTYPES: Mapping[Format, str] = {Format.BF16: "bfloat16", Format.FP8: "fp8"}


def _attention(table: str, batch_axis: str, tokens: str, added: int) -> Callable[[Tables, Any], Choice]:
    """A reader of an attention table; its context is `tokens` + `added`."""

    def choose(tables: Tables, op: Any) -> Choice:
        def read() -> MeasurementTable | None:
            kv = _KV_DTYPES.get(op.kv_format)
            if kv is None:
                return None
            numbers = ("batch_size", tokens, "num_heads", "num_key_value_heads", "head_dim", "window_size?")
            choices = [{"kv_cache_dtype": kv, "attn_dtype": name} for name in ("bfloat16", kv)]
            rows = _first_rows(tables, "attention", table, numbers, choices)
            if rows is None:
                return None
            columns = rows.columns
            sites = {
                "num_heads": columns["num_heads"],
                "num_kv_heads": columns["num_key_value_heads"],
                "head_dim": columns["head_dim"],
                "window_tokens": columns["window_size"],
            }
            axes = {"batch": columns["batch_size"], batch_axis: columns[tokens] + added}
            return _table(tables, "attention", op, rows, sites, axes, {"kv_format": op.kv_format.value})

        return read, (op.kv_format.value,)

    return choose


_MOE_DTYPES: Mapping[Format, tuple[str, ...]] = {
    Format.BF16: ("bfloat16",),
    Format.FP8: ("fp8",),
    Format.FP8_BLOCK: ("fp8_block",),
    Format.INT4: ("int4_wo",),
    Format.NVFP4: ("nvfp4",),
    Format.MXFP4: ("w4a16_mxfp4", "w4a8_mxfp4_mxfp8"),
}


_NOT_GATED = (1856 * 1000 + 6, 2688 * 1000 + 22, 5120 * 1000 + 22)
"""Experts measured with two matrices and not three, as expert width x 1000 + experts per token: the shapes of Nemotron-H, whose
rows TRT-LLM's tables call `nongated`; other engines' tables do not tell."""


def _experts(tables: Tables, op: Any) -> Choice:
    def read() -> MeasurementTable | None:
        choices = [
            {"moe_dtype": name, "distribution": tables.expert_distribution} for name in _MOE_DTYPES.get(op.format, ())
        ]
        numbers = ("num_tokens", "hidden_size", "inter_size", "num_experts", "topk", "moe_tp_size", "moe_ep_size")
        rows = _first_rows(tables, "moe", "moe_perf", numbers, choices)
        if rows is None:
            return None
        columns = rows.columns
        sites = {
            "hidden_size": columns["hidden_size"],
            "intermediate_size": columns["inter_size"],
            "num_experts": columns["num_experts"],
            "experts_per_token": columns["topk"],
            "tp": columns["moe_tp_size"],
            "ep": columns["moe_ep_size"],
            "gated": ~np.isin(columns["inter_size"] * 1000 + columns["topk"], _NOT_GATED),
        }
        words = {"format": op.format.value}
        return _table(tables, "moe", op, rows, sites, {"num_tokens": columns["num_tokens"]}, words)

    return read, (op.format.value,)


_LATENT_PREFILL_WIDTHS = {"qk_head_dim": 192.0, "v_head_dim": 128.0}
_LATENT_DECODE_WIDTHS = {"kv_lora_rank": 512.0, "rope_head_dim": 64.0, "qk_nope_head_dim": 128.0, "v_head_dim": 128.0}
"""Latent attention was measured at DeepSeek-V3's widths only."""


def _latent_rows(tables: Tables, table: str, tokens: str, op: Any) -> Rows | None:
    kv = _KV_DTYPES.get(op.kv_format)
    if kv is None:
        return None
    return _first_rows(tables, "mla", table, ("batch_size", tokens, "num_heads"), [{"kv_cache_dtype": kv}])


def _module_rows(tables: Tables, table: str, tokens: str, op: Any) -> Rows | None:
    """Whole attention modules (projections included) that the engine itself was measured with, in bf16 projections."""
    words = {"kv_cache_dtype": _KV_DTYPES[op.kv_format], "gemm_type": "bfloat16"}
    rows = _first_rows(tables, "mla", table, ("batch_size", tokens, "num_heads"), [words])
    return rows if rows is not None and rows.place.engine == tables.engine else None


def _latent_prefill(tables: Tables, op: Any) -> Choice:
    """The core of latent prefill; where the engine has only module tables, the lesser of two upper bounds.

    One is another engine's core. The other is the engine's module less its projections, priced from the GEMM table: right for long
    prompts, while short ones are bound by the host's launches. SGLang's core on Hopper computes the absorbed form, 3.8
    times as long as what vLLM's module leaves at 16,384 tokens.
    """

    def read() -> MeasurementTable | None:
        rows = _latent_rows(tables, "context_mla_perf", "isl", op)
        if rows is None:
            return None
        label, seconds = tables.label("mla", rows), rows.columns["latency"] * _MS
        module = _module_rows(tables, "mla_context_module_perf", "isl", op) if rows.place.engine != tables.engine else None
        if module is not None:
            left = module.columns["latency"] * _MS - _projection_seconds(tables, module)
            known = _at_same_points(rows, module, left, ("num_heads", "batch_size", "isl"))
            seconds = np.where(known > 0.05 * seconds, np.fmin(seconds, known), seconds)
            label = f"{label}, at most {tables.label('mla', module)} less its projections"
        columns = rows.columns
        widths = {name: np.full(len(rows), value) for name, value in _LATENT_PREFILL_WIDTHS.items()}
        sites = {"num_heads": columns["num_heads"], **widths}
        axes = {"batch": columns["batch_size"], "num_tokens": columns["isl"]}
        return MeasurementTable(op.kind, sites, axes, seconds, label, {"kv_format": op.kv_format.value})

    return read, (op.kv_format.value,)


def _projection_seconds(tables: Tables, module: Rows) -> Floats:
    """What the projections of DeepSeek-V3's attention take at the module's token counts and heads, by the bf16 GEMM table."""
    table = tables.table_for(ops.Gemm(1, 1, 1))
    if table is None:
        return np.full(len(module), np.inf)
    model = TableModel(table, tables.roofline)
    total = np.zeros(len(module))
    num_tokens, num_heads = module.columns["batch_size"] * module.columns["isl"], module.columns["num_heads"]
    for heads in np.unique(num_heads).astype(int).tolist():
        here = num_heads == heads
        for n, k in ((1536 + 576, 7168), (192 * heads, 1536), (256 * heads, 512), (7168, 128 * heads)):
            total[here] += model.estimate(ops.Gemm(num_tokens[here], n, k))[0]
    return total


def _latent_decode(tables: Tables, op: Any) -> Choice:
    """The core of latent decode with the two absorbing products; of an engine with module tables only, from their growth.

    A module's projections do not depend on the context, so its core is another engine's core at the shortest context plus what the
    module's time grows by. With TRT-LLM's cores this agrees within 5 % on H100, H200, B200 and GB200; SGLang's fp8
    cores on Hopper are 3 to 9 times slower than what vLLM's modules grow by.
    """

    def read() -> MeasurementTable | None:
        rows = _latent_rows(tables, "generation_mla_perf", "step", op)
        if rows is None:
            return None
        columns, label = dict(rows.columns), tables.label("mla", rows)
        columns["step"] = columns["step"] + 1
        rows = Rows(columns, rows.kernel_codes, rows.kernel_names, rows.place)
        seconds = columns["latency"] * _MS
        own = rows.place.engine == tables.engine
        module = None if own else _module_rows(tables, "mla_generation_module_perf", "step", op)
        if module is not None:
            seconds = _grown(rows, module)
            label = f"{label}, growing as {tables.label('mla', module)}"
        seconds = seconds + _absorb_seconds(tables, columns["num_heads"], columns["batch_size"])
        widths = {name: np.full(len(rows), value) for name, value in _LATENT_DECODE_WIDTHS.items()}
        sites = {"num_heads": columns["num_heads"], **widths}
        axes = {"batch": columns["batch_size"], "context_tokens": columns["step"]}
        return MeasurementTable(op.kind, sites, axes, seconds, label, {"kv_format": op.kv_format.value})

    return read, (op.kv_format.value,)


def _grown(core: Rows, module: Rows) -> Floats:
    """Seconds of the core: its own at the shortest context, then growing as the module does; its own where that is unknown."""
    seconds = core.columns["latency"] * _MS
    point = ("num_heads", "batch_size", "step")
    same = _at_same_points(core, module, module.columns["latency"] * _MS, point)
    order = np.lexsort([core.columns[name] for name in reversed(point)])
    curve = np.column_stack([core.columns[name][order] for name in point[:2]])
    new = np.append(True, np.any(curve[1:] != curve[:-1], axis=1))
    first = np.empty(len(order), dtype=int)
    first[order] = order[np.maximum.accumulate(np.where(new, np.arange(len(order)), 0))]
    grown = seconds[first] + same - same[first]
    return np.where(grown > 0.5 * seconds[first], grown, seconds)


def _at_same_points(rows: Rows, other: Rows, values: Floats, point: tuple[str, ...]) -> Floats:
    """The value of `other` at each point of `rows`, NaN where it has none."""
    found = dict(zip(zip(*(other.columns[name].tolist() for name in point), strict=True), values.tolist(), strict=True))
    keys = zip(*(rows.columns[name].tolist() for name in point), strict=True)
    return np.array([found.get(key, np.nan) for key in keys])


def _absorb_seconds(tables: Tables, num_heads: Floats, batch: Floats) -> Floats:
    """The two per-head products that absorb the up-projections, at the measured (heads, tokens); 0 where nobody measured."""
    total = np.zeros(len(batch))
    for name in ("mla_gen_pre", "mla_gen_post"):
        rows = _first_rows(
            tables, "mla_bmm", "mla_bmm_perf", ("num_tokens", "num_heads"), [{"op_name": name, "bmm_dtype": "bfloat16"}]
        )
        if rows is None:
            return np.zeros(len(batch))
        columns = rows.columns
        measured_heads = np.unique(columns["num_heads"])
        for heads in np.unique(num_heads):
            nearest = measured_heads[np.argmin(np.abs(np.log(measured_heads / heads)))]
            here = columns["num_heads"] == nearest
            order = np.argsort(columns["num_tokens"][here])
            at, took = columns["num_tokens"][here][order], columns["latency"][here][order]
            wanted = num_heads == heads
            total[wanted] += np.exp(np.interp(np.log(batch[wanted]), np.log(at), np.log(took))) * _MS
    return total


def _gated_delta(tables: Tables, op: Any) -> Choice:
    phase = "generation" if op.decode else "context"

    def read() -> MeasurementTable | None:
        numbers = ("batch_size", "seq_len", "num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "d_conv")
        for place in tables.places("linear_attention", "gdn_perf"):
            rows = _read_rows(place, "gdn_perf", numbers, {"phase": phase})
            if rows is not None:
                return _summed_kernels(tables, op, rows, numbers)
        return None

    return read, (phase,)


def _summed_kernels(tables: Tables, op: ops.Op, rows: Rows, point: tuple[str, ...]) -> MeasurementTable:
    """One row a point: the sum over kernels (convolution and delta rule), each the median of its repeats."""
    points = np.column_stack([rows.columns[name] for name in point])
    unique, codes = np.unique(points, axis=0, return_inverse=True)
    total = np.zeros(len(unique))
    complete = np.ones(len(unique), dtype=bool)
    for kernel in np.unique(rows.kernel_codes):
        here = rows.kernel_codes == kernel
        order = np.lexsort((rows.columns["latency"][here], codes.ravel()[here]))
        code, took = codes.ravel()[here][order], rows.columns["latency"][here][order]
        present, starts, counts = np.unique(code, return_index=True, return_counts=True)
        total[present] += took[starts + counts // 2] * _MS
        complete &= np.isin(np.arange(len(unique)), present)
    column = dict(zip(point, unique[complete].T, strict=True))
    sites = {
        "num_key_heads": column["num_k_heads"],
        "num_value_heads": column["num_v_heads"],
        "key_head_dim": column["head_k_dim"],
        "value_head_dim": column["head_v_dim"],
        "conv_kernel_size": column["d_conv"],
        "hidden_size": np.zeros(int(complete.sum())),
        "decode": np.full(int(complete.sum()), float(getattr(op, "decode", False))),
    }
    axes = {"batch": column["batch_size"], "num_tokens": column["seq_len"]}
    label = tables.label("linear_attention", rows)
    return MeasurementTable(op.kind, sites, axes, total[complete], label, {})


_QUANTISED_BYTES = 3.0
"""Static fp8 quantisation reads two bytes and writes one for every value."""


def _elementwise(tables: Tables, op: Any) -> Choice:
    def read() -> MeasurementTable | None:
        rows = _first_rows(tables, "quantize", "scale_matrix_perf", ("m", "k"), [{}])
        if rows is None:
            return None
        num_bytes = rows.columns["m"] * rows.columns["k"] * _QUANTISED_BYTES
        at, seconds = _lower_middle(num_bytes, rows.columns["latency"] * _MS)
        label = tables.label("quantize", rows)
        return MeasurementTable(
            op.kind, {"bytes_per_row": np.ones(len(at))}, {"rows": at}, seconds, label, {"name": "any"}
        )

    return read, ("any",)


def _lower_middle(num_bytes: Floats, seconds: Floats) -> tuple[Floats, Floats]:
    """Seconds against bytes: the median over shapes in every half octave, made non-decreasing."""
    octave = np.round(np.log2(num_bytes) * 2) / 2
    at = np.unique(octave)
    middle = np.array([np.median(seconds[octave == value]) for value in at])
    return 2.0**at, np.maximum.accumulate(middle)


_NCCL_NAMES = {"all_to_all": "alltoall"}


def _collective(tables: Tables, op: Any) -> Choice:
    def read() -> MeasurementTable | None:
        parts = [part for part in (_nccl(tables, op), _custom_all_reduce(tables, op)) if part is not None]
        if not parts or op.span_nodes > 1:
            return None
        return parts[0] if len(parts) == 1 else _faster_of(parts[0], parts[1])

    return read, (op.op, str(op.span_nodes > 1))


def _nccl(tables: Tables, op: Any) -> MeasurementTable | None:
    for library in ("nccl", "oneccl"):
        folders = sorted((tables.system / "comm" / library).glob("*"), key=lambda path: _version_key(path.name))
        for folder in reversed(folders):
            place = Place(folder, library, folder.name)
            words = {"op_name": _NCCL_NAMES.get(op.op, op.op), f"{library}_dtype": "half"}
            if not (folder / f"{library}_perf.parquet").is_file():
                continue
            rows = _read_rows(place, f"{library}_perf", ("num_gpus", "message_size"), words)
            if rows is not None:
                label = f"{tables.system.name}/comm/{library}/{folder.name}"
                return _collective_table(op, rows, label)
    return None


def _custom_all_reduce(tables: Tables, op: Any) -> MeasurementTable | None:
    """The engine's own all-reduce kernels; from graphs where the collection tells graphs from eager launches."""
    if op.op != "all_reduce":
        return None
    suffix = "graph" if tables.cuda_graphs else "eager"
    for place in tables.places("comm", "custom_allreduce_perf"):
        rows = _read_rows(place, "custom_allreduce_perf", ("num_gpus", "message_size"), {})
        if rows is None:
            continue
        either = rows.named(lambda name: name.endswith(("_graph", "_eager")))
        kept = rows.take(~either | rows.named(lambda name: name.endswith(suffix)))
        return _collective_table(op, kept, tables.label("comm", kept))
    return None


def _collective_table(op: Any, rows: Rows, label: str) -> MeasurementTable:
    columns = rows.columns
    sites = {"num_ranks": columns["num_gpus"], "span_nodes": np.ones(len(rows))}
    axes = {"message_bytes": columns["message_size"] * 2.0}
    return MeasurementTable(op.kind, sites, axes, columns["latency"] * _MS, label, {"op": op.op})


def _faster_of(one: MeasurementTable, other: MeasurementTable) -> MeasurementTable:
    """At every measured size the faster of two libraries: engines choose by size which to call."""
    ranks, sizes, seconds = [], [], []
    for site in sorted(set(one.rows_by_site) | set(other.rows_by_site)):
        curves = [table.site_rows(site) for table in (one, other) if site in table.rows_by_site]
        at = np.unique(np.concatenate([axes["message_bytes"] for axes, _ in curves]))
        best = np.full(len(at), np.inf)
        for axes, took in curves:
            grid = np.log(axes["message_bytes"])
            best = np.minimum(best, np.exp(np.interp(np.log(at), grid, np.log(took), left=np.inf, right=np.inf)))
        ranks.append(np.full(len(at), site[0]))
        sizes.append(at)
        seconds.append(best)
    rank = np.concatenate(ranks)
    label = f"the faster of {one.source} and {other.source}"
    sites = {"num_ranks": rank, "span_nodes": np.ones(len(rank))}
    axes_of = {"message_bytes": np.concatenate(sizes)}
    return MeasurementTable(one.kind, sites, axes_of, np.concatenate(seconds), label, one.words)


_READERS: Mapping[str, Callable[[Tables, Any], Choice]] = {
    "gemm": _gemm,
    "prefill_attention": _attention("context_attention_perf", "num_tokens", "isl", 0),
    "decode_attention": _attention("generation_attention_perf", "context_tokens", "step", 1),
    "latent_prefill_attention": _latent_prefill,
    "latent_decode_attention": _latent_decode,
    "gated_delta": _gated_delta,
    "experts": _experts,
    "elementwise": _elementwise,
    "collective": _collective,
}
