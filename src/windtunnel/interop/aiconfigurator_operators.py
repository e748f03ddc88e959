"""How each kind of operator is read from the tables of `aiconfigurator-core`'s layout.

Every reader returns a table in seconds and bytes, with what was chosen (version, kernel, other engine) in its source.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.estimate.estimator import TableModel
from windtunnel.estimate.table import Floats, MeasurementTable
from windtunnel.interop.aiconfigurator_files import (
    ENGINES,
    Collection,
    Place,
    Rows,
    at_same_points,
    fastest_kernel_only,
    first_rows,
    joined,
    main_kernel_only,
    read_rows,
    version_key,
)
from windtunnel.interop.aiconfigurator_kernels import (
    SAME_ALL_REDUCE,
    at_rate_of,
    attention_rows,
    before_fp8_tiles,
)
from windtunnel.interop.aiconfigurator_sparse import GemmPrices, sparse_table
from windtunnel.ops import op as ops
from windtunnel.spec.precision import Format

Reader = Callable[[], "MeasurementTable | None"]
Choice = tuple[Reader, tuple[str, ...]]
"""How to read a table, and the words that name it."""


def table_for(collection: Collection, op: ops.Op) -> MeasurementTable | None:
    """The table to price `op` from, or None where nobody measured its kind in its format on this system."""
    reader, words = _READERS[op.kind](collection, op)
    key = (op.kind, *words)
    if key not in collection.read:
        collection.read[key] = reader()
    return collection.read[key]


def _table(
    collection: Collection, family: str, op: ops.Op, rows: Rows, sites: Any, axes: Any, words: Any
) -> MeasurementTable:
    label = collection.label(family, rows)
    seconds = rows.seconds
    return MeasurementTable(op.kind, sites, axes, seconds, label, words)


_GEMM_DTYPES: Mapping[Format, tuple[str, ...]] = {
    Format.BF16: ("bfloat16",),
    Format.FP8: ("fp8",),
    Format.FP8_BLOCK: ("fp8_block",),
    Format.INT8: ("sq",),
    Format.INT4: ("int4_wo",),
    Format.NVFP4: ("nvfp4",),
}


_GEMM_POINT = ("m", "n", "k")


def _gemm(collection: Collection, op: Any) -> Choice:
    def read() -> MeasurementTable | None:
        choices = [{"gemm_dtype": name} for name in _GEMM_DTYPES.get(op.format, ())]
        found = (_with_quantisation(collection, rows) for rows in _all_gemm_rows(collection, choices))
        rows = next(found, None)
        if rows is None:
            return None
        label = collection.label("gemm", rows)
        bare = _bare_rows(collection, rows, choices) if op.format is Format.NVFP4 else None
        if bare is not None:
            rows = _no_slower_than(rows, bare)
            label = f"{label}, no slower than {collection.label('gemm', bare).partition(',')[0]}"
        quantisation_s = _quantisation_s(collection, rows) if op.format is Format.FP8 else None
        if quantisation_s is not None:
            rows = _without_quantisation(rows, quantisation_s)
            label = f"{label}, less quantisation"
        if _launch_bound(rows):
            donor = next((other for other in found if not _launch_bound(other)), None)
            rows = _free_of_launches(rows, donor)
            name = collection.label("gemm", donor).partition(",")[0] if donor else "the roofline"
            label = f"{label}; where launches bound it, {name}"
        columns = rows.columns
        sites = {"n": columns["n"], "k": columns["k"]}
        seconds = rows.seconds
        return MeasurementTable(op.kind, sites, {"m": columns["m"]}, seconds, label, {"format": op.format.value})

    return read, (op.format.value,)


def _all_gemm_rows(collection: Collection, choices: list[dict[str, str]]) -> Iterator[Rows]:
    for place in collection.places("gemm", "gemm_perf"):
        for words in choices:
            rows = read_rows(place, "gemm_perf", _GEMM_POINT, words)
            if rows is not None:
                yield _without_hiccups(main_kernel_only(rows, _GEMM_POINT))


_TIMED_WITH_QUANTISATION = "trtllm"
"""Its nvfp4 rows time the linear layer: on B200 they exceed SGLang's bare kernel by 3 us at 8,192 x 1,024 values and 7
to 9 us at 8,192 x 8,192, up to 256 rows, and are level with it or faster at 1,024. The engine fuses the quantisation
into the norm, activation or all-reduce before, and tunes over more kernels than the one that was timed."""
_BARE_ENGINE = "sglang"


def _bare_rows(collection: Collection, rows: Rows, choices: list[dict[str, str]]) -> Rows | None:
    """The GEMMs alone, for rows that time them with the quantisation of their input; None where nobody has them."""
    if rows.place.engine != _TIMED_WITH_QUANTISATION:
        return None
    found = next(_all_gemm_rows(replace(collection, engine=_BARE_ENGINE), choices), None)
    return found if found is not None and found.place.engine == _BARE_ENGINE else None


def _no_slower_than(rows: Rows, other: Rows) -> Rows:
    """`rows`, at points that `other` has too the faster of both."""
    latency = rows.columns["latency"]
    faster = np.fmin(latency, at_same_points(rows, other, other.columns["latency"], _GEMM_POINT))
    return Rows({**rows.columns, "latency": faster}, rows.kernel_codes, rows.kernel_names, rows.place)


_QUANTISES = 0.75
"""A kernel that takes this share of the quantisation longer than a bf16 GEMM, both at the smallest shapes, quantises
its input too. The share is 0.99 to 1.12 for TRT-LLM 1.3.0rc20 (floors of 11 to 14 us against 2 to 3 us), 0.91 to 1.48
for vLLM 0.24.0 and 0.23 to 0.58 for SGLang 0.5.14 on H100, H200, B200, B300, GB200, GB300, L40S and RTX Pro 6000."""


def _quantisation_s(collection: Collection, rows: Rows) -> Floats | None:
    """What the quantisation of the input takes in each row of an fp8 GEMM table; None where its kernel does none.

    The same collection timed the two parts alone, the scale's reduction and the conversion, over rows and columns.
    """
    own = replace(collection, engine=rows.place.engine, version=rows.place.version)
    total = np.zeros(len(rows))
    for table in ("computescale_perf", "scale_matrix_perf"):
        part = first_rows(own, "quantize", table, ("m", "k"), [{}])
        if part is None or part.place.engine != rows.place.engine:
            return None
        at, seconds = _lower_middle(part.columns["m"] * part.columns["k"], part.seconds)
        total += np.interp(np.log(rows.columns["m"] * rows.columns["k"]), np.log(at), seconds)
    plain = read_rows(rows.place, "gemm_perf", _GEMM_POINT, {"gemm_dtype": "bfloat16"})
    if plain is None:
        return None
    excess = _launch_floors_s(rows).min() - _launch_floors_s(plain).min()
    return total if excess >= _QUANTISES * np.median(total[_smallest(rows)]) else None


def _without_quantisation(rows: Rows, quantisation_s: Floats) -> Rows:
    """An fp8 GEMM alone, at least half of what bf16 takes at the same shape: rate and bytes differ by a factor of two.

    Checkpoints with static scales, the usual ones, spare the reduction, and engines fuse the conversion into the norm
    or activation before. What is left approaches the bound as it should: over bf16's time its median is 0.50 to 0.59
    for weights of 50 million values and more (TRT-LLM, H100, H200, B200; 0.58 to 0.88 before), and 4 us at the floor.
    """
    plain = read_rows(rows.place, "gemm_perf", _GEMM_POINT, {"gemm_dtype": "bfloat16"})
    assert plain is not None
    half = at_same_points(rows, plain, plain.columns["latency"] / 2, _GEMM_POINT)
    own = rows.columns["latency"]
    least = np.fmin(own, np.where(np.isfinite(half), half, own))
    latency = np.maximum(own - quantisation_s * 1e3, least)
    return Rows({**rows.columns, "latency": latency}, rows.kernel_codes, rows.kernel_names, rows.place)


_QUANTISED_BEFORE = "sglang_deepgemm_gemm_nt_f8f8bf16"
"""The kernel of SGLang's fp8_block tables, DeepGEMM's bare entry: its input was quantised before the clock started.

On H100 and H200, where TRT-LLM's table times the linear layer, it exceeds SGLang's at up to 2,048 columns by 12, 31 to
36 and 109 to 139 us for 1,024, 4,096 and 16,384 rows, and quantising those takes 9 to 11, 30 to 41 and 113 to 155 us.
TRT-LLM's `deepgemm` on B200 and B300 agrees with SGLang's to 1 us and so times the bare kernel too; it is taken as it
is, as nothing measured says how TRT-LLM quantises there."""


def _with_quantisation(collection: Collection, rows: Rows) -> Rows:
    """Rows of the kernel that takes quantised input, with the launch that quantises it; other rows as they are.

    Scales of blocks of 128 values are dynamic, so that engines launch it before every such GEMM.
    """
    bare = rows.named(lambda name: name == _QUANTISED_BEFORE)
    found = _conversions(collection) if bare.any() else []
    if not found:
        return rows
    at, seconds = _fastest_conversion(found)
    num_bytes = rows.columns["m"] * rows.columns["k"] * _QUANTISED_BYTES
    launch_s = np.where(bare, np.interp(np.log(num_bytes), np.log(at), seconds), 0.0)
    latency = rows.columns["latency"] + launch_s * 1e3
    named = {_QUANTISED_BEFORE: f"{_QUANTISED_BEFORE} and quantisation"}
    names = np.array([named.get(name, name) for name in rows.kernel_names.tolist()])
    return Rows({**rows.columns, "latency": latency}, rows.kernel_codes, names, rows.place)


_HICCUP = 1.75


def _without_hiccups(rows: Rows) -> Rows:
    """A GEMM's rows but those that took 1.75 times as long as both the next smaller and the next larger m.

    More work cannot take so much less time; such rows are strewn over all shapes (2.1 % of vLLM 0.24.0's fp8 rows on
    B200 and 0.01 % on GB200, the same silicon; below 0.7 % elsewhere): hiccups of the collection and not kernels.
    """
    order = np.lexsort([rows.columns[name] for name in ("m", "k", "n")])
    n, k, took = (rows.columns[name][order] for name in ("n", "k", "latency"))
    if len(order) < 3:
        return rows
    inner = (n[2:] == n[:-2]) & (k[2:] == k[:-2])
    hiccup = inner & (took[1:-1] > _HICCUP * np.maximum(took[2:], took[:-2]))
    return rows.take(np.sort(np.delete(order, np.flatnonzero(hiccup) + 1)))


_LAUNCH_BOUND_S = 25e-6
"""A GEMM of no work takes 2 to 14 us on every device when it runs from a graph. Tables whose smallest GEMMs take longer
timed the host: vLLM 0.24.0's fp8_block, 61 us on H100 and 170 to 400 us on B200, GB300 and L40S, against 4 to 6 us with
the same DeepGEMM kernels in the tables of SGLang and TRT-LLM. Engines that decode from CUDA graphs do not pay that."""

_BOUND_BELOW, _FREE_ABOVE = 1.5, 4.0
"""In multiples of a kernel's floor: below, a time says nothing about the device; above, it is the device's (between
vLLM's and SGLang's tables the median ratio is 0.9 to 1.15 from four floors on, and 3 to 11 below two)."""


def _launch_floors_s(rows: Rows) -> Floats:
    """For every row, what its kernel takes when there is next to nothing to compute."""
    floor = np.zeros(len(rows.kernel_names))
    for code in np.unique(rows.kernel_codes):
        here = rows.take(rows.kernel_codes == code)
        floor[code] = np.median(here.seconds[_smallest(here)])
    return np.asarray(floor[rows.kernel_codes])


def _smallest(rows: Rows) -> NDArray[np.bool_]:
    """The twentieth of a GEMM table's rows with the least to compute."""
    work = rows.columns["m"] * rows.columns["n"] * rows.columns["k"]
    found: NDArray[np.bool_] = work <= np.quantile(work, 0.05)
    return found


def _launch_bound(rows: Rows) -> bool:
    return bool(_launch_floors_s(rows).min() > _LAUNCH_BOUND_S)


def _free_of_launches(rows: Rows, donor: Rows | None) -> Rows:
    """Rows without the host's launch time: near the floor the donor's time at the same shape, far above it their own.

    In between the two are blended geometrically, so that no step appears. Rows near the floor that the donor lacks are
    dropped; shapes that only the donor has are added.
    """
    own = rows.columns["latency"]
    above = rows.seconds / (_BOUND_BELOW * _launch_floors_s(rows))
    weight = np.clip(np.log(above) / np.log(_FREE_ABOVE / _BOUND_BELOW), 0.0, 1.0)
    if donor is None:
        return rows.take(weight == 1.0)
    other = at_same_points(rows, donor, donor.columns["latency"], _GEMM_POINT)
    latency = np.where(weight == 1.0, own, np.minimum(own, other ** (1 - weight) * own**weight))
    known = np.isfinite(latency)
    freed = Rows({**rows.columns, "latency": latency}, rows.kernel_codes, rows.kernel_names, rows.place).take(known)
    lacking = np.isnan(at_same_points(donor, freed, freed.seconds, _GEMM_POINT))
    return joined(freed, donor.take(lacking))


_KV_DTYPES: Mapping[Format, str] = {Format.BF16: "bfloat16", Format.FP8: "fp8"}


def _attention(table: str, batch_axis: str, tokens: str, added: int) -> Callable[[Collection, Any], Choice]:
    """A reader of an attention table; its context is `tokens` + `added`."""

    def choose(collection: Collection, op: Any) -> Choice:
        def read() -> MeasurementTable | None:
            kv = _KV_DTYPES.get(op.kv_format)
            if kv is None:
                return None
            numbers = ("batch_size", tokens, "num_heads", "num_key_value_heads", "head_dim", "window_size?")
            choices = [{"kv_cache_dtype": kv, "attn_dtype": name} for name in ("bfloat16", kv)]
            rows = attention_rows(collection, table, numbers, choices)
            if rows is None:
                return None
            if op.kind == "decode_attention" and op.kv_format is Format.FP8:
                rows = before_fp8_tiles(collection, rows, numbers)
            columns = rows.columns
            sites = {
                "num_heads": columns["num_heads"],
                "num_kv_heads": columns["num_key_value_heads"],
                "head_dim": columns["head_dim"],
                "window_tokens": columns["window_size"],
            }
            axes = {"batch": columns["batch_size"], batch_axis: columns[tokens] + added}
            return _table(collection, "attention", op, rows, sites, axes, {"kv_format": op.kv_format.value})

        return read, (op.kv_format.value,)

    return choose


_MOE_DTYPES: Mapping[Format, tuple[str, ...]] = {
    Format.BF16: ("bfloat16",),
    Format.FP8: ("fp8",),
    Format.FP8_BLOCK: ("fp8_block",),
    Format.INT4: ("int4_wo",),
    Format.NVFP4: ("nvfp4",),
    Format.MXFP4: ("w4a16_mxfp4",),
}

_MOE_DTYPES_FP4: Mapping[Format, tuple[str, ...]] = {Format.MXFP4: ("w4a16_mxfp4", "w4a8_mxfp4_mxfp8")}
"""More on devices with an fp4 rate: their tensor cores take mxfp4 weights with mxfp8 activations, and engines offer it
beside bf16 activations (vLLM: `mxfp4_bf16` and `mxfp4_mxfp8` kernels; SGLang: both through FlashInfer). On B200, B300,
GB200 and GB300 the mxfp8 kernels are 3.2 (TRT-LLM 1.3.0rc20) and 1.2 (SGLang 0.5.14) times as fast as the bf16 ones of
the same file, medians over shapes; so the faster at each point is what a tuned deployment runs."""

_SHARED_KERNELS: Mapping[Format, tuple[str, ...]] = {Format.MXFP4: ("w4a8_mxfp4_mxfp8",)}
"""Formats whose fastest kernels (TRTLLM-gen, which FlashInfer gives to vLLM and SGLang too) not every engine's file
times for every shape: vLLM's files have them for other widths than gpt-oss's only."""


_NEWEST = "99"
"""Above any engine's version."""


def _with_shared_kernels(collection: Collection, rows: Rows, dtypes: tuple[str, ...]) -> tuple[Rows, str]:
    """`rows`, at points that another engine timed with a kernel of `dtypes` the faster of both; and a remark."""
    for engine in ENGINES:
        own = replace(collection, engine=engine, version=_NEWEST, moe_backend=None)
        found, _ = (None, "") if engine == rows.place.engine else _experts_rows(own, dtypes)
        if found is None or found.place.engine != engine:
            continue
        faster = at_same_points(rows, found, found.columns["latency"], _MOE_POINT)
        if np.isfinite(faster).any():
            latency = np.fmin(rows.columns["latency"], faster)
            merged = Rows({**rows.columns, "latency": latency}, rows.kernel_codes, rows.kernel_names, rows.place)
            return merged, f"; mxfp8 kernels as in {engine} {found.place.version}"
    return rows, ""


_MOE_BACKEND_KERNELS: Mapping[str, tuple[str, ...]] = {
    "trtllm": ("trtllm", "min_latency"),
    "triton": ("triton", "fused_moe"),
}
"""What kernels of a backend are called where it is not the backend's own name: TRT-LLM's tables call the TRTLLM-gen
kernels `min_latency`, vLLM's older ones its Triton kernel `fused_moe`."""


_NOT_GATED = (1856 * 1000 + 6, 2688 * 1000 + 22, 5120 * 1000 + 22)
"""Experts measured with two matrices and not three, as expert width x 1000 + experts per token: the shapes whose rows
TRT-LLM's tables call `nongated` (squared ReLU); other engines' tables do not tell."""


_MOE_POINT = ("hidden_size", "inter_size", "num_experts", "topk", "moe_tp_size", "moe_ep_size", "num_tokens")

_SLOWER_THAN_BF16 = 1.5
"""A narrower format whose median time is above this multiple of bf16's in the same file is not what the engine serves.

Of 68 pairs all are below 1.3 but vLLM 0.24.0's fp8 on H100 and H200 (2.2 and 2.6; 0.7 in vLLM 0.19.0 and in TRT-LLM,
whose times it exceeds six-fold) and vLLM 0.19.0's int4 on H200 and B200 (2.3 and 2.4; 0.7 to 0.8 in SGLang)."""

_SLOWER_THAN_NEWEST = 1.85
"""An older collection whose median time is above this multiple of its engine's newest one measured another kernel than
the engine picks. Of 34 pairs all are below 1.75 (Triton against TRTLLM-gen in vLLM on B200: a real step between its
versions) but vLLM 0.19.0's mxfp4 on H200 and B200 (2.0 and 11) and, again, its int4 (2.4)."""


def _experts_rows(collection: Collection, dtypes: tuple[str, ...]) -> tuple[Rows | None, str]:
    """The rows of the nearest version that was measured sanely, and a remark on those that were not.

    New models are measured in files of their own (TRT-LLM 1.3.0rc23 has a few shapes), and some formats in passing (one
    int4 shape in vLLM 0.22.0): a file of less than half the size of its engine's largest, and a format of less than
    half the newest version's rows, leave other shapes to the versions after it.
    """
    places = list(collection.places("moe", "moe_perf"))
    largest = {place.engine: 0 for place in places}
    for place in places:
        largest[place.engine] = max(largest[place.engine], _size(place))
    found: Rows | None = None
    remark = ""
    for place in places:
        if found is not None and place.engine != found.place.engine:
            break
        rows = _experts_rows_of(collection, place, dtypes)
        if rows is None:
            continue
        newest = max((other for other in places if other.engine == place.engine), key=_age)
        later = rows if newest == place else _experts_rows_of(collection, newest, dtypes)
        slow = _too_slow(collection, rows, later, dtypes)
        if slow:
            remark = remark or f"; not {place.engine} {place.version} ({rows.main_kernel}), {slow}"
            continue
        if _is_slow_at_many_tokens(rows, later):
            assert later is not None
            rows = _no_slower_at_many_tokens(rows, later)
            remark = remark or f"; above {_FEW_TOKENS} tokens no slower than {newest.version} ({later.main_kernel})"
        found = rows if found is None else _completed(found, rows)
        if _size(place) >= largest[place.engine] / 2 and (later is None or len(rows) >= len(later) / 2):
            break
    return found, remark


def _age(place: Place) -> tuple[int, ...]:
    return version_key(place.version)


def _size(place: Place) -> int:
    return (place.folder / "moe_perf.parquet").stat().st_size


def _experts_rows_of(collection: Collection, place: Place, dtypes: tuple[str, ...]) -> Rows | None:
    """One kernel at every point: of the backend that was asked for where the shape has it, else the fastest."""
    found: Rows | None = None
    for dtype in dtypes:
        words = {"moe_dtype": dtype, "distribution": collection.expert_distribution}
        rows = read_rows(place, "moe_perf", _MOE_POINT, words)
        if rows is not None:
            found = rows if found is None else joined(found, rows)
    if found is None or collection.moe_backend is None:
        return None if found is None else fastest_kernel_only(found, _MOE_POINT)
    names = _MOE_BACKEND_KERNELS.get(collection.moe_backend, (collection.moe_backend,))
    asked = found.named(lambda kernel: any(name in kernel for name in names))
    fastest = fastest_kernel_only(found, _MOE_POINT)
    if not asked.any():
        return fastest
    own = fastest_kernel_only(found.take(asked), _MOE_POINT)
    return _with_lacking_shapes(own, at_rate_of(own, fastest))


def _too_slow(collection: Collection, rows: Rows, newest: Rows | None, dtypes: tuple[str, ...]) -> str:
    """Why rows are not what the engine serves; empty where they may be."""
    plain = None if "bfloat16" in dtypes else _experts_rows_of(collection, rows.place, ("bfloat16",))
    ratio = _median_ratio(rows, plain)
    if ratio > _SLOWER_THAN_BF16:
        return f"{ratio:.1f} times as slow as its bf16"
    ratio = _median_ratio(rows, newest)
    if newest is not None and ratio > _SLOWER_THAN_NEWEST:
        return f"{ratio:.1f} times as slow as {newest.place.version}"
    return ""


_FEW_TOKENS = 64
"""Up to here vLLM's Triton kernel of experts works on blocks of 16 tokens and beyond on blocks of 64, where it was not
tuned (0.19 `get_default_config` of fused_moe.py): its time jumps by 1.4 to 1.8 between 64 and 80 tokens on B200."""


def _is_slow_at_many_tokens(rows: Rows, newest: Rows | None) -> bool:
    """Whether `_SLOWER_THAN_NEWEST` holds beyond `_FEW_TOKENS`, where engines have other kernels to call.

    So it does of vLLM 0.19.0's and 0.22.0's fp8_block on B200 (1.90; 1.25 to 1.31 below); all others are at most 1.78.
    """
    many = rows.take(rows.columns["num_tokens"] > _FEW_TOKENS)
    return _median_ratio(many, newest) > _SLOWER_THAN_NEWEST


def _no_slower_at_many_tokens(rows: Rows, newest: Rows) -> Rows:
    latency = rows.columns["latency"]
    faster = np.fmin(latency, at_same_points(rows, newest, newest.columns["latency"], _MOE_POINT))
    latency = np.where(rows.columns["num_tokens"] > _FEW_TOKENS, faster, latency)
    return Rows({**rows.columns, "latency": latency}, rows.kernel_codes, rows.kernel_names, rows.place)


def _median_ratio(rows: Rows, other: Rows | None) -> float:
    """How many times as long `rows` take at the points that both have; 0 where there are none."""
    if other is None:
        return 0.0
    ratio = rows.seconds / at_same_points(rows, other, other.seconds, _MOE_POINT)
    known = np.isfinite(ratio)
    return float(np.median(ratio[known])) if known.any() else 0.0


def _with_lacking_shapes(rows: Rows, others: Rows) -> Rows:
    """`rows` with the shapes that only `others` has."""
    lacking = np.isnan(at_same_points(others, rows, np.ones(len(rows)), _MOE_POINT[:-1]))
    return joined(rows, others.take(lacking))


def _completed(rows: Rows, others: Rows) -> Rows:
    """`rows` with the shapes that only `others`, of another version, has."""
    place = replace(rows.place, version=f"{rows.place.version} and {others.place.version}")
    return replace(_with_lacking_shapes(rows, others), place=place)


def _experts(collection: Collection, op: Any) -> Choice:
    def read() -> MeasurementTable | None:
        dtypes = _MOE_DTYPES.get(op.format, ())
        if "fp4" in collection.roofline.device.peak_flops_per_s:
            dtypes = _MOE_DTYPES_FP4.get(op.format, dtypes)
        rows, remark = _experts_rows(collection, dtypes)
        if rows is None:
            return None
        if op.format in _SHARED_KERNELS and "fp4" in collection.roofline.device.peak_flops_per_s:
            rows, shared = _with_shared_kernels(collection, rows, _SHARED_KERNELS[op.format])
            remark += shared
        columns = rows.columns
        sites = {
            "hidden_size": columns["hidden_size"],
            "intermediate_size": columns["inter_size"],
            "num_experts": columns["num_experts"],
            "experts_per_token": columns["topk"],
            "tp": columns["moe_tp_size"],
            "ep": columns["moe_ep_size"],
            "gated": np.where(np.isin(columns["inter_size"] * 1000 + columns["topk"], _NOT_GATED), 0.0, 1.0),
        }
        words = {"format": op.format.value}
        axes = {"num_tokens": columns["num_tokens"]}
        return MeasurementTable(op.kind, sites, axes, rows.seconds, collection.label("moe", rows) + remark, words)

    return read, (op.format.value,)


_LATENT_PREFILL_WIDTHS = {"qk_head_dim": 192.0, "v_head_dim": 128.0}
_LATENT_DECODE_WIDTHS = {"kv_lora_rank": 512.0, "rope_head_dim": 64.0, "qk_nope_head_dim": 128.0, "v_head_dim": 128.0}
"""Latent attention was measured at DeepSeek-V3's widths only."""


def _latent_rows(collection: Collection, table: str, tokens: str, op: Any) -> Rows | None:
    kv = _KV_DTYPES.get(op.kv_format)
    if kv is None:
        return None
    return first_rows(collection, "mla", table, ("batch_size", tokens, "num_heads"), [{"kv_cache_dtype": kv}])


def _module_rows(collection: Collection, table: str, tokens: str, op: Any) -> Rows | None:
    """Whole attention modules (projections included) that the engine itself was measured with, in bf16 projections."""
    words = {"kv_cache_dtype": _KV_DTYPES[op.kv_format], "gemm_type": "bfloat16"}
    rows = first_rows(collection, "mla", table, ("batch_size", tokens, "num_heads"), [words])
    return rows if rows is not None and rows.place.engine == collection.engine else None


def _latent_prefill(collection: Collection, op: Any) -> Choice:
    """The core of latent prefill; where the engine has only module tables, the lesser of two upper bounds.

    One is another engine's core. The other is the engine's module less its projections, priced from the GEMM table:
    right for long prompts, while short ones are bound by the host's launches. SGLang's core on Hopper computes the
    absorbed form, 3.4 times as long as what vLLM's module leaves at 16,384 tokens and 16 heads.
    """

    def read() -> MeasurementTable | None:
        rows = _latent_rows(collection, "context_mla_perf", "isl", op)
        if rows is None:
            return None
        label, seconds = collection.label("mla", rows), rows.seconds
        own = rows.place.engine == collection.engine
        module = None if own else _module_rows(collection, "mla_context_module_perf", "isl", op)
        if module is not None:
            left = module.seconds - _projection_seconds(collection, module)
            known = at_same_points(rows, module, left, ("num_heads", "batch_size", "isl"))
            seconds = np.where(known > 0.05 * seconds, np.fmin(seconds, known), seconds)
            label = f"{label}, at most {collection.label('mla', module)} less its projections"
        columns = rows.columns
        widths = {name: np.full(len(rows), value) for name, value in _LATENT_PREFILL_WIDTHS.items()}
        sites = {"num_heads": columns["num_heads"], **widths}
        axes = {"batch": columns["batch_size"], "num_tokens": columns["isl"]}
        return MeasurementTable(op.kind, sites, axes, seconds, label, {"kv_format": op.kv_format.value})

    return read, (op.kv_format.value,)


def _projection_seconds(collection: Collection, module: Rows) -> Floats:
    """What the projections of DeepSeek-V3's attention take at the module's tokens and heads, by the bf16 GEMM table."""
    table = table_for(collection, ops.Gemm(1, 1, 1))
    if table is None:
        return np.full(len(module), np.inf)
    model = TableModel(table, collection.roofline)
    total = np.zeros(len(module))
    num_tokens, num_heads = module.columns["batch_size"] * module.columns["isl"], module.columns["num_heads"]
    for heads in np.unique(num_heads).astype(int).tolist():
        here = num_heads == heads
        for n, k in ((1536 + 576, 7168), (192 * heads, 1536), (256 * heads, 512), (7168, 128 * heads)):
            total[here] += model.estimate(ops.Gemm(num_tokens[here], n, k))[0]
    return total


def _latent_decode(collection: Collection, op: Any) -> Choice:
    """The core of latent decode with the two absorbing products; where the engine has only modules, from their growth.

    A module's projections do not depend on the context, so its core is another engine's core at the shortest context
    plus what the module's time grows by. With TRT-LLM's cores this agrees within 5 % on H100, H200, B200 and GB200;
    SGLang's fp8 cores on Hopper are 3 to 9 times slower than what vLLM's modules grow by.
    """

    def read() -> MeasurementTable | None:
        rows = _latent_rows(collection, "generation_mla_perf", "step", op)
        if rows is None:
            return None
        columns, label = dict(rows.columns), collection.label("mla", rows)
        columns["step"] = columns["step"] + 1
        rows = Rows(columns, rows.kernel_codes, rows.kernel_names, rows.place)
        seconds = rows.seconds
        own = rows.place.engine == collection.engine
        module = None if own else _module_rows(collection, "mla_generation_module_perf", "step", op)
        if module is not None:
            seconds = _grown(rows, module)
            label = f"{label}, growing as {collection.label('mla', module)}"
        seconds = seconds + _absorb_seconds(collection, columns["num_heads"], columns["batch_size"])
        widths = {name: np.full(len(rows), value) for name, value in _LATENT_DECODE_WIDTHS.items()}
        sites = {"num_heads": columns["num_heads"], **widths}
        axes = {"batch": columns["batch_size"], "context_tokens": columns["step"]}
        return MeasurementTable(op.kind, sites, axes, seconds, label, {"kv_format": op.kv_format.value})

    return read, (op.kv_format.value,)


def _grown(core: Rows, module: Rows) -> Floats:
    """Seconds of the core: its own at the shortest context, then growing as the module does, where that is known."""
    seconds = core.seconds
    point = ("num_heads", "batch_size", "step")
    same = at_same_points(core, module, module.seconds, point)
    order = np.lexsort([core.columns[name] for name in reversed(point)])
    curve = np.column_stack([core.columns[name][order] for name in point[:2]])
    new = np.append(True, np.any(curve[1:] != curve[:-1], axis=1))
    first = np.empty(len(order), dtype=int)
    first[order] = order[np.maximum.accumulate(np.where(new, np.arange(len(order)), 0))]
    grown = seconds[first] + same - same[first]
    return np.where(grown > 0.5 * seconds[first], grown, seconds)


def _absorb_seconds(collection: Collection, num_heads: Floats, batch: Floats) -> Floats:
    """The two per-head products that absorb the up-projections; 0 where nobody measured them."""
    total = np.zeros(len(batch))
    for name in ("mla_gen_pre", "mla_gen_post"):
        rows = first_rows(
            collection,
            "mla_bmm",
            "mla_bmm_perf",
            ("num_tokens", "num_heads"),
            [{"op_name": name, "bmm_dtype": "bfloat16"}],
        )
        if rows is None:
            return np.zeros(len(batch))
        columns = rows.columns
        measured_heads = np.unique(columns["num_heads"])
        for heads in np.unique(num_heads):
            nearest = measured_heads[np.argmin(np.abs(np.log(measured_heads / heads)))]
            here = columns["num_heads"] == nearest
            order = np.argsort(columns["num_tokens"][here])
            at, took = columns["num_tokens"][here][order], rows.seconds[here][order]
            wanted = num_heads == heads
            total[wanted] += np.exp(np.interp(np.log(batch[wanted]), np.log(at), np.log(took)))
    return total


def _sparse_latent(collection: Collection, op: Any) -> Choice:
    def prices(place: Place) -> GemmPrices:
        """The GEMM tables of the engine and version that was measured."""
        own = replace(collection, engine=place.engine, version=place.version, read={})
        models: dict[Format, TableModel | None] = {}

        def price(gemm: ops.Gemm) -> Floats | None:
            if gemm.format not in models:
                table = table_for(own, gemm)
                models[gemm.format] = None if table is None else TableModel(table, collection.roofline)
            model = models[gemm.format]
            return None if model is None else model.estimate(gemm)[0]

        return price

    def read() -> MeasurementTable | None:
        kv = _KV_DTYPES.get(op.kv_format)
        return None if kv is None else sparse_table(collection, op.kind, kv, op.kv_format, prices)

    return read, (op.kv_format.value,)


def _gated_delta(collection: Collection, op: Any) -> Choice:
    phase = "generation" if op.decode else "context"

    def read() -> MeasurementTable | None:
        numbers = ("batch_size", "seq_len", "num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "d_conv")
        for place in collection.places("linear_attention", "gdn_perf"):
            rows = read_rows(place, "gdn_perf", numbers, {"phase": phase})
            if rows is not None:
                return _summed_kernels(collection, op, rows, numbers)
        return None

    return read, (phase,)


def _summed_kernels(collection: Collection, op: ops.Op, rows: Rows, point: tuple[str, ...]) -> MeasurementTable:
    """One row a point: the sum over kernels (convolution and delta rule), each the median of its repeats."""
    points = np.column_stack([rows.columns[name] for name in point])
    unique, codes = np.unique(points, axis=0, return_inverse=True)
    total = np.zeros(len(unique))
    complete = np.ones(len(unique), dtype=bool)
    for kernel in np.unique(rows.kernel_codes):
        here = rows.kernel_codes == kernel
        order = np.lexsort((rows.seconds[here], codes.ravel()[here]))
        code, took = codes.ravel()[here][order], rows.seconds[here][order]
        present, starts, counts = np.unique(code, return_index=True, return_counts=True)
        total[present] += took[starts + counts // 2]
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
    label = collection.label("linear_attention", rows)
    return MeasurementTable(op.kind, sites, axes, total[complete], label, {})


_QUANTISED_BYTES = 3.0
"""Static fp8 quantisation reads two bytes and writes one for every value."""


def _elementwise(collection: Collection, op: Any) -> Choice:
    """Static fp8 quantisation, at every size by the engine whose kernel is fastest: the device's memory decides.

    SGLang 0.5.14 timed a kernel that takes 7 to 13 times as long as vLLM's and TRT-LLM's, which lie within 1.5 of each
    other (764 us against 60 and 90 us for 16,384 x 8,192 values on B200); that says nothing of norms and activations.
    """

    def read() -> MeasurementTable | None:
        found = _conversions(collection)
        if not found:
            return None
        at, seconds = _fastest_conversion(found)
        label = " or ".join(collection.label("quantize", rows).partition(",")[0] for rows, _, _ in found)
        label = label if len(found) == 1 else f"the fastest of {label}"
        sites = {"bytes_per_row": np.ones(len(at))}
        return MeasurementTable(op.kind, sites, {"rows": at}, seconds, label, {"name": "any"})

    return read, ("any",)


def _conversions(collection: Collection) -> list[tuple[Rows, Floats, Floats]]:
    """Every engine's static fp8 quantisation on this system: its rows, bytes moved and seconds."""
    found = []
    for engine in dict.fromkeys((collection.engine, *ENGINES)):
        rows = first_rows(replace(collection, engine=engine), "quantize", "scale_matrix_perf", ("m", "k"), [{}])
        if rows is not None and rows.place.engine == engine:
            num_bytes = rows.columns["m"] * rows.columns["k"] * _QUANTISED_BYTES
            found.append((rows, *_lower_middle(num_bytes, rows.seconds)))
    return found


def _fastest_conversion(found: list[tuple[Rows, Floats, Floats]]) -> tuple[Floats, Floats]:
    """Bytes and the least seconds of any engine, at the sizes of the first."""
    at = found[0][1]
    curves = [np.interp(np.log(at), np.log(sizes), seconds) for _, sizes, seconds in found]
    return at, np.asarray(np.min(curves, axis=0), dtype=np.float64)


def _lower_middle(num_bytes: Floats, seconds: Floats) -> tuple[Floats, Floats]:
    """Seconds against bytes: the median over shapes in every half octave, made non-decreasing."""
    octave = np.round(np.log2(num_bytes) * 2) / 2
    at = np.unique(octave)
    middle = np.array([np.median(seconds[octave == value]) for value in at])
    return 2.0**at, np.maximum.accumulate(middle)


_NCCL_NAMES = {"all_to_all": "alltoall"}


def _collective(collection: Collection, op: Any) -> Choice:
    def read() -> MeasurementTable | None:
        engines = dict.fromkeys((collection.engine, *(("trtllm",) if collection.fused_all_reduce else ())))
        seen = [collection if engine == collection.engine else replace(collection, engine=engine) for engine in engines]
        if collection.engine in SAME_ALL_REDUCE:
            engine, version = SAME_ALL_REDUCE[collection.engine]
            seen.append(replace(collection, engine=engine, version=version))
        tables = [nccl_table(collection, op), *(_custom_all_reduce(one, op) for one in seen)]
        parts = [part for part in tables if part is not None]
        if not parts or op.span_nodes > 1:
            return None
        *others, last = [part.source for part in parts]
        label = f"the {'fastest' if len(parts) > 2 else 'faster'} of {', '.join(others)} and {last}" if others else last
        return replace(functools.reduce(_faster_of, parts), source=label)

    return read, (op.op, str(op.span_nodes > 1))


def nccl_table(collection: Collection, op: Any) -> MeasurementTable | None:
    """What NCCL alone (oneCCL on Intel's devices) took for the collective of `op`, by its newest measured version."""
    for library in ("nccl", "oneccl"):
        found = [path for path in (collection.system / "comm" / library).glob("*") if path.is_dir()]
        folders = sorted(found, key=lambda path: version_key(path.name))
        for folder in reversed(folders):
            place = Place(folder, library, folder.name)
            words = {"op_name": _NCCL_NAMES.get(op.op, op.op), f"{library}_dtype": "half"}
            if not (folder / f"{library}_perf.parquet").is_file():
                continue
            rows = read_rows(place, f"{library}_perf", ("num_gpus", "message_size"), words)
            if rows is not None:
                label = f"{collection.system.name}/comm/{library}/{folder.name}"
                return _collective_table(op, rows, label)
    return None


def _custom_all_reduce(collection: Collection, op: Any) -> MeasurementTable | None:
    """The engine's own all-reduce kernels; from graphs where the collection tells graphs from eager launches."""
    if op.op != "all_reduce":
        return None
    suffix = "graph" if collection.cuda_graphs else "eager"
    for place in collection.places("comm", "custom_allreduce_perf"):
        rows = read_rows(place, "custom_allreduce_perf", ("num_gpus", "message_size"), {})
        if rows is None:
            continue
        either = rows.named(lambda name: name.endswith(("_graph", "_eager")))
        kept = rows.take(~either | rows.named(lambda name: name.endswith(suffix)))
        return _collective_table(op, kept, collection.label("comm", kept))
    return None


def _collective_table(op: Any, rows: Rows, label: str) -> MeasurementTable:
    columns = rows.columns
    sites = {"num_ranks": columns["num_gpus"], "span_nodes": np.ones(len(rows))}
    axes = {"message_bytes": columns["message_size"] * 2.0}
    return MeasurementTable(op.kind, sites, axes, rows.seconds, label, {"op": op.op})


def _faster_of(one: MeasurementTable, other: MeasurementTable) -> MeasurementTable:
    """At every measured size the faster of two libraries, named as the first: engines choose by size which to call."""
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
    sites = {"num_ranks": rank, "span_nodes": np.ones(len(rank))}
    axes_of = {"message_bytes": np.concatenate(sizes)}
    return MeasurementTable(one.kind, sites, axes_of, np.concatenate(seconds), one.source, one.words)


_READERS: Mapping[str, Callable[[Collection, Any], Choice]] = {
    "gemm": _gemm,
    "prefill_attention": _attention("context_attention_perf", "num_tokens", "isl", 0),
    "decode_attention": _attention("generation_attention_perf", "context_tokens", "step", 1),
    "latent_prefill_attention": _latent_prefill,
    "latent_decode_attention": _latent_decode,
    "sparse_latent_prefill": _sparse_latent,
    "sparse_latent_decode": _sparse_latent,
    "gated_delta": _gated_delta,
    "experts": _experts,
    "elementwise": _elementwise,
    "collective": _collective,
}
