"""Dense matrix products from the tables of `aiconfigurator-core`'s layout: the kernels that the engine runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.model.precision import Format
from windtunnel.pricing.aiconfigurator.collection import (
    HICCUP,
    Collection,
    Rows,
    all_rows,
    at_same_points,
    first_rows,
    joined,
    main_kernel_only,
    no_slower_than,
    read_rows,
)
from windtunnel.pricing.aiconfigurator.conversions import QUANTISED_BYTES, conversions, fastest_conversion, lower_middle
from windtunnel.pricing.table import Floats, MeasurementTable

_GEMM_DTYPES: Mapping[Format, tuple[str, ...]] = {
    Format.BF16: ("bfloat16",),
    Format.FP8: ("fp8",),
    Format.FP8_BLOCK: ("fp8_block",),
    Format.INT8: ("sq",),
    Format.INT4: ("int4_wo",),
    Format.NVFP4: ("nvfp4",),
}


_GEMM_POINT = ("m", "n", "k")


def gemm_table(collection: Collection, op: Any) -> MeasurementTable | None:
    """Return GEMMs as the engine runs them: without hiccups, quantisation that it spares, and launches by the host."""
    choices = [{"gemm_dtype": name} for name in _GEMM_DTYPES.get(op.format, ())]
    candidates = (_with_quantisation(collection, rows) for rows in _all_gemm_rows(collection, choices))
    rows = next(candidates, None)
    if rows is None:
        return None
    label = collection.label("gemm", rows)
    bare = _bare_rows(collection, rows, choices) if op.format is Format.NVFP4 else None
    if bare is not None:
        rows = no_slower_than(rows, bare, _GEMM_POINT)
        label = f"{label}, no slower than {collection.label('gemm', bare).partition(',')[0]}"
    quantisation_s = _quantisation_s(collection, rows) if op.format is Format.FP8 else None
    if quantisation_s is not None:
        rows = _without_quantisation(rows, quantisation_s)
        label = f"{label}, less quantisation"
    if _launch_bound(rows):
        donor = next((other for other in candidates if not _launch_bound(other)), None)
        rows = _free_of_launches(rows, donor)
        name = collection.label("gemm", donor).partition(",")[0] if donor else "the roofline"
        label = f"{label}; where launches bound it, {name}"
    columns = rows.columns
    sites = {"n": columns["n"], "k": columns["k"]}
    seconds = rows.seconds
    return MeasurementTable(op.kind, sites, {"m": columns["m"]}, seconds, label, {"format": op.format.value})


def _all_gemm_rows(collection: Collection, choices: list[dict[str, str]]) -> Iterator[Rows]:
    for rows in all_rows(collection, "gemm", "gemm_perf", _GEMM_POINT, choices):
        rows = main_kernel_only(rows, _GEMM_POINT)
        yield rows.sound(sound_latency(rows))


_BARE_GEMMS_OF: Mapping[str, str] = {"trtllm": "sglang"}
"""Engine that timed GEMMs with quantisation -> the one that timed them alone.

TensorRT-LLM's nvfp4 rows time the linear layer: on B200 they exceed SGLang's bare kernel by 3 us at 8,192 x 1,024 and
7 to 9 us at 8,192 x 8,192, up to 256 rows, and are level with it or faster at 1,024. The engine fuses the quantisation
into the norm, activation or all-reduce before, and tunes over more kernels than the one that was timed."""


def _bare_rows(collection: Collection, rows: Rows, choices: list[dict[str, str]]) -> Rows | None:
    """Read the GEMMs alone, for rows that time them with quantisation of their input; None where nobody has them."""
    engine = _BARE_GEMMS_OF.get(rows.place.engine)
    if engine is None:
        return None
    bare = next(_all_gemm_rows(collection.of(engine), choices), None)
    return bare if bare is not None and bare.place.engine == engine else None


_QUANTISES = 0.75
"""A kernel that takes this share of the quantisation longer than a bf16 GEMM, both at the smallest shapes, quantises
its input too. The share is 0.99 to 1.12 for TRT-LLM 1.3.0rc20 (floors of 11 to 14 us against 2 to 3 us), 0.91 to 1.48
for vLLM 0.24.0 and 0.23 to 0.58 for SGLang 0.5.14 on H100, H200, B200, B300, GB200, GB300, L40S and RTX Pro 6000."""


def _quantisation_s(collection: Collection, rows: Rows) -> Floats | None:
    """Return the seconds of the input's quantisation in each row of an fp8 GEMM table; None where its kernel does none.

    The same collection timed the two parts alone, the scale's reduction and the conversion, over rows and columns.
    """
    same_version = replace(collection, engine=rows.place.engine, version=rows.place.version)
    total = np.zeros(len(rows))
    for table in ("computescale_perf", "scale_matrix_perf"):
        part = first_rows(same_version, "quantize", table, ("m", "k"), [{}])
        if part is None or part.place.engine != rows.place.engine:
            return None
        num_values, seconds = lower_middle(part.columns["m"] * part.columns["k"], part.seconds)
        total += np.interp(np.log(rows.columns["m"] * rows.columns["k"]), np.log(num_values), seconds)
    plain = read_rows(rows.place, "gemm_perf", _GEMM_POINT, {"gemm_dtype": "bfloat16"})
    if plain is None:
        return None
    excess = _launch_floors_s(rows).min() - _launch_floors_s(plain).min()
    return total if excess >= _QUANTISES * np.median(total[_smallest(rows)]) else None


def _without_quantisation(rows: Rows, quantisation_s: Floats) -> Rows:
    """Return an fp8 GEMM alone, at least half of bf16's time at the same shape: rate and bytes differ by two.

    Checkpoints with static scales, the usual ones, spare the reduction, and engines fuse the conversion into the norm
    or activation before. What is left approaches the bound as it should: over bf16's time its median is 0.50 to 0.59
    for weights of 50 million values and more (TRT-LLM, H100, H200, B200; 0.58 to 0.88 before), and 4 us at the floor.
    """
    plain = read_rows(rows.place, "gemm_perf", _GEMM_POINT, {"gemm_dtype": "bfloat16"})
    assert plain is not None
    half = at_same_points(rows, plain, plain.columns["latency"] / 2, _GEMM_POINT)
    latency = rows.columns["latency"]
    least = np.fmin(latency, np.where(np.isfinite(half), half, latency))
    return rows.with_latency(np.maximum(latency - quantisation_s * 1e3, least))


_QUANTISED_BEFORE = "sglang_deepgemm_gemm_nt_f8f8bf16"
"""The kernel of SGLang's fp8_block tables, DeepGEMM's bare entry: its input was quantised before the clock started.

On H100 and H200, where TRT-LLM's table times the linear layer, it exceeds SGLang's at up to 2,048 columns by 12, 31 to
36 and 109 to 139 us for 1,024, 4,096 and 16,384 rows, and quantising those takes 9 to 11, 30 to 41 and 113 to 155 us.
TRT-LLM's `deepgemm` on B200 and B300 agrees with SGLang's to 1 us and so times the bare kernel too; it is taken as it
is, as nothing measured says how TRT-LLM quantises there."""


def _with_quantisation(collection: Collection, rows: Rows) -> Rows:
    """Return the rows of the kernel that takes quantised input with the launch that quantises it; others unchanged.

    Scales of blocks of 128 values are dynamic, so that engines launch it before every such GEMM.
    """
    bare = rows.named(lambda name: name == _QUANTISED_BEFORE)
    by_engine = conversions(collection) if bare.any() else []
    if not by_engine:
        return rows
    sizes, seconds = fastest_conversion(by_engine)
    num_bytes = rows.columns["m"] * rows.columns["k"] * QUANTISED_BYTES
    launch_s = np.where(bare, np.interp(np.log(num_bytes), np.log(sizes), seconds), 0.0)
    latency = rows.columns["latency"] + launch_s * 1e3
    named = {_QUANTISED_BEFORE: f"{_QUANTISED_BEFORE} and quantisation"}
    names = np.array([named.get(name, name) for name in rows.kernel_names.tolist()])
    return replace(rows.with_latency(latency), kernel_names=names)


def sound_latency(rows: Rows) -> Floats:
    """Return the milliseconds of GEMMs: NaN where one took `HICCUP` times as long as at the next smaller and larger m.

    More work cannot take so much less time; such rows are strewn over all shapes (2.1 % of vLLM 0.24.0's fp8 rows on
    B200 and 0.01 % on GB200, the same silicon; below 0.7 % elsewhere): hiccups of the collection and not kernels.
    """
    latency = rows.columns["latency"].copy()
    if len(latency) < 3:
        return latency
    order = np.lexsort([rows.columns[name] for name in ("m", "k", "n")])
    n, k, took = (rows.columns[name][order] for name in ("n", "k", "latency"))
    inner = (n[2:] == n[:-2]) & (k[2:] == k[:-2])
    hiccup = inner & (took[1:-1] > HICCUP * np.maximum(took[2:], took[:-2]))
    latency[order[1:-1][hiccup]] = np.nan
    return latency


_LAUNCH_BOUND_S = 25e-6
"""A GEMM of no work takes 2 to 14 us on every device when it runs from a graph. Tables whose smallest GEMMs take longer
timed the host: vLLM 0.24.0's fp8_block, 61 us on H100 and 170 to 400 us on B200, GB300 and L40S, against 4 to 6 us with
the same DeepGEMM kernels in the tables of SGLang and TRT-LLM. Engines that decode from CUDA graphs do not pay that."""

_BOUND_BELOW, _FREE_ABOVE = 1.5, 4.0
"""Multiples of a kernel's floor: below the first a time says nothing about the device, above the second it is the
device's (between vLLM's and SGLang's tables the median ratio is 0.9 to 1.15 from four floors on, 3 to 11 below two)."""


def _launch_floors_s(rows: Rows) -> Floats:
    """Return, for every row, the seconds of its kernel with next to nothing to compute."""
    floor = np.zeros(len(rows.kernel_names))
    for code in np.unique(rows.kernel_codes):
        here = rows.take(rows.kernel_codes == code)
        floor[code] = np.median(here.seconds[_smallest(here)])
    return np.asarray(floor[rows.kernel_codes])


def _smallest(rows: Rows) -> NDArray[np.bool_]:
    """Return a mask of the twentieth of a GEMM table's rows with the least to compute."""
    work = rows.columns["m"] * rows.columns["n"] * rows.columns["k"]
    return np.asarray(work <= np.quantile(work, 0.05))


def _launch_bound(rows: Rows) -> bool:
    return bool(_launch_floors_s(rows).min() > _LAUNCH_BOUND_S)


def _free_of_launches(rows: Rows, donor: Rows | None) -> Rows:
    """Return rows without the host's launch time: the donor's time near the floor, their own time far above it.

    In between the two are blended geometrically, so that no step appears. Rows near the floor that the donor lacks are
    dropped; shapes that only the donor has are added.
    """
    latency = rows.columns["latency"]
    above = rows.seconds / (_BOUND_BELOW * _launch_floors_s(rows))
    weight = np.clip(np.log(above) / np.log(_FREE_ABOVE / _BOUND_BELOW), 0.0, 1.0)
    if donor is None:
        return rows.take(weight == 1.0)
    other = at_same_points(rows, donor, donor.columns["latency"], _GEMM_POINT)
    blended = np.minimum(latency, other ** (1 - weight) * latency**weight)
    freed = rows.with_latency(np.where(weight == 1.0, latency, blended))
    freed = freed.take(np.isfinite(freed.columns["latency"]))
    lacking = np.isnan(at_same_points(donor, freed, freed.seconds, _GEMM_POINT))
    return joined(freed, donor.take(lacking))
