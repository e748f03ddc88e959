"""Dense matrix products, also within modules, and conversions of inputs, from `aiconfigurator-core`'s layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.model import operators as ops
from windtunnel.model.precision import Format
from windtunnel.pricing.aiconfigurator.collection import ENGINES, HICCUP, KERNELS, Collection, Rows
from windtunnel.pricing.estimator import ANY, TableModel
from windtunnel.pricing.table import Floats, MeasurementTable, grouped, table_of

_GEMM_POINT = ("m", "n", "k")


def gemm_table(collection: Collection, op: Any) -> MeasurementTable | None:
    """Return GEMMs as the engine runs them: without hiccups, quantisation that it spares, and launches by the host."""
    choices = [{"gemm_dtype": name} for name in KERNELS.gemm_dtypes.get(op.format, ())]
    candidates = (_with_quantisation(collection, rows) for rows in _all_gemm_rows(collection, choices))
    rows = next(candidates, None)
    if rows is None:
        return None
    label = collection.label("gemm", rows)
    bare = _bare_rows(collection, rows, choices) if op.format is Format.NVFP4 else None
    if bare is not None:
        rows = rows.no_slower_than(bare, _GEMM_POINT)
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
    return table_of(op, rows.seconds, label, **rows.columns)


GemmPrices = Callable[[ops.Gemm], "Floats | None"]
"""Seconds of a GEMM at every one of its `m`; None where nobody measured its format."""


def gemm_prices(collection: Collection) -> GemmPrices:
    """Return the prices of GEMMs by the tables of a collection, each read on first use."""
    models: dict[Format, TableModel | None] = {}

    def price(gemm: ops.Gemm) -> Floats | None:
        if gemm.format not in models:
            table = collection.once(gemm, gemm_table)
            models[gemm.format] = None if table is None else TableModel(table, collection.roofline)
        model = models[gemm.format]
        return None if model is None else model.estimate(gemm)[0]

    return price


def projection_seconds(
    rows: Rows,
    sites: Mapping[str, Floats],
    shapes: Callable[[Mapping[str, float]], Iterable[tuple[float, float]]],
    weights: Format,
    price: GemmPrices,
) -> Floats | None:
    """Return the seconds of the projections of an attention module in each row; None where nobody measured their
    format.

    `sites` is dimension -> a number per row; by these, `shapes` gives (n, k) of each projection.
    """
    num_tokens, total = rows["batch_size"] * rows["isl"], np.zeros(len(rows))
    for here in grouped(list(sites.values())):
        for n, k in shapes({name: float(column[here[0]]) for name, column in sites.items()}):
            seconds = price(ops.Gemm(num_tokens[here], int(n), int(k), weights))
            if seconds is None:
                return None
            total[here] += seconds
    return total


def _all_gemm_rows(collection: Collection, choices: list[dict[str, str]]) -> Iterator[Rows]:
    for rows in collection.all_rows("gemm", "gemm_perf", _GEMM_POINT, choices):
        rows = rows.main_kernel_only(_GEMM_POINT)
        yield rows.sound(sound_latency(rows))


def _bare_rows(collection: Collection, rows: Rows, choices: list[dict[str, str]]) -> Rows | None:
    """Read the GEMMs alone, for rows that time them with quantisation of their input; None where nobody has them."""
    engine = KERNELS.bare_gemms_of.get(rows.place.engine)
    if engine is None:
        return None
    bare = next(_all_gemm_rows(collection.of(engine), choices), None)
    return bare if bare is not None and bare.place.engine == engine else None


def _quantisation_s(collection: Collection, rows: Rows) -> Floats | None:
    """Return the seconds of the input's quantisation in each row of an fp8 GEMM table; None where its kernel does none.

    The same collection timed the two parts alone, the scale's reduction and the conversion, over rows and columns.
    """
    same_version = collection.at(rows.place)
    total = np.zeros(len(rows))
    for table in ("computescale_perf", "scale_matrix_perf"):
        part = same_version.first_rows("quantize", table, ("m", "k"), [{}])
        if part is None or part.place.engine != rows.place.engine:
            return None
        num_values, seconds = lower_middle(part["m"] * part["k"], part.seconds)
        total += np.interp(np.log(rows["m"] * rows["k"]), np.log(num_values), seconds)
    plain = rows.place.read_rows("gemm_perf", _GEMM_POINT, {"gemm_dtype": "bfloat16"})
    if plain is None:
        return None
    excess = _launch_floors_s(rows).min() - _launch_floors_s(plain).min()
    return total if excess >= KERNELS.quantises * np.median(total[_smallest(rows)]) else None


def _without_quantisation(rows: Rows, quantisation_s: Floats) -> Rows:
    """Return an fp8 GEMM alone, at least half of bf16's time at the same shape: rate and bytes differ by two.

    Checkpoints with static scales, the usual ones, spare the reduction, and engines fuse the conversion into the norm
    or activation before. What is left approaches the bound as it should: over bf16's time its median is 0.50 to 0.59
    for weights of 50 million values and more (TRT-LLM, H100, H200, B200; 0.58 to 0.88 before), and 4 us at the floor.
    """
    plain = rows.place.read_rows("gemm_perf", _GEMM_POINT, {"gemm_dtype": "bfloat16"})
    assert plain is not None
    half = rows.at_same_points(plain, plain.latency / 2, _GEMM_POINT)
    least = np.fmin(rows.latency, half)
    return rows.replaced(latency=np.maximum(rows.latency - quantisation_s * 1e3, least))


def _with_quantisation(collection: Collection, rows: Rows) -> Rows:
    """Return the rows of the kernel that takes quantised input with the launch that quantises it; others unchanged.

    Scales of blocks of 128 values are dynamic, so that engines launch it before every such GEMM.
    """
    bare = rows.named(lambda name: name == KERNELS.quantised_before)
    by_engine = conversions(collection) if bare.any() else []
    if not by_engine:
        return rows
    sizes, seconds = fastest_conversion(by_engine)
    num_bytes = rows["m"] * rows["k"] * QUANTISED_BYTES
    launch_s = np.where(bare, np.interp(np.log(num_bytes), np.log(sizes), seconds), 0.0)
    named = {KERNELS.quantised_before: f"{KERNELS.quantised_before} and quantisation"}
    names = np.array([named.get(name, name) for name in rows.kernel_names.tolist()])
    return replace(rows.replaced(latency=rows.latency + launch_s * 1e3), kernel_names=names)


def sound_latency(rows: Rows) -> Floats:
    """Return the milliseconds of GEMMs: NaN where one took `HICCUP` times as long as at the next smaller and larger m.

    More work cannot take so much less time; such rows are strewn over all shapes (2.1 % of vLLM 0.24.0's fp8 rows on
    B200 and 0.01 % on GB200, the same silicon; below 0.7 % elsewhere): hiccups of the collection and not kernels.
    """
    latency = rows.latency.copy()
    if len(latency) < 3:
        return latency
    order = np.lexsort([rows[name] for name in ("m", "k", "n")])
    n, k, took = (rows[name][order] for name in ("n", "k", "latency"))
    inner = (n[2:] == n[:-2]) & (k[2:] == k[:-2])
    hiccup = inner & (took[1:-1] > HICCUP * np.maximum(took[2:], took[:-2]))
    latency[order[1:-1][hiccup]] = np.nan
    return latency


def _launch_floors_s(rows: Rows) -> Floats:
    """Return, for every row, the seconds of its kernel with next to nothing to compute."""
    floor = np.zeros(len(rows.kernel_names))
    for code in np.unique(rows["kernel"]):
        here = rows.where(rows["kernel"] == code)
        floor[code] = np.median(here.seconds[_smallest(here)])
    return np.asarray(floor[rows["kernel"]])


def _smallest(rows: Rows) -> NDArray[np.bool_]:
    """Return a mask of the twentieth of a GEMM table's rows with the least to compute."""
    work = rows["m"] * rows["n"] * rows["k"]
    return np.asarray(work <= np.quantile(work, 0.05))


def _launch_bound(rows: Rows) -> bool:
    return bool(_launch_floors_s(rows).min() > KERNELS.launch_bound_s)


def _free_of_launches(rows: Rows, donor: Rows | None) -> Rows:
    """Return rows without the host's launch time: the donor's time near the floor, their own time far above it.

    In between the two are blended geometrically, so that no step appears. Rows near the floor that the donor lacks are
    dropped; shapes that only the donor has are added.
    """
    above = rows.seconds / (KERNELS.bound_below * _launch_floors_s(rows))
    weight = np.clip(np.log(above) / np.log(KERNELS.free_above / KERNELS.bound_below), 0.0, 1.0)
    if donor is None:
        return rows.where(weight == 1.0)
    other = rows.at_same_points(donor, donor.latency, _GEMM_POINT)
    blended = np.minimum(rows.latency, other ** (1 - weight) * rows.latency**weight)
    freed = rows.replaced(latency=np.where(weight == 1.0, rows.latency, blended))
    freed = freed.where(np.isfinite(freed.latency))
    lacking = np.isnan(donor.at_same_points(freed, freed.seconds, _GEMM_POINT))
    return freed.joined(donor.where(lacking))


QUANTISED_BYTES = 3.0
"""Static fp8 quantisation reads two bytes and writes one for every value."""


def elementwise_table(collection: Collection, op: Any) -> MeasurementTable | None:
    """Return static fp8 quantisation, at every size by the engine with the fastest kernel: memory bounds it.

    SGLang 0.5.14 timed a kernel that takes 7 to 13 times as long as vLLM's and TRT-LLM's, which lie within 1.5 of each
    other (764 us against 60 and 90 us for 16,384 x 8,192 values on B200); that says nothing of norms and activations.
    """
    by_engine = conversions(collection)
    if not by_engine:
        return None
    num_bytes, seconds = fastest_conversion(by_engine)
    label = " or ".join(collection.label("quantize", rows).partition(",")[0] for rows, _, _ in by_engine)
    label = label if len(by_engine) == 1 else f"the fastest of {label}"
    return table_of(replace(op, name=ANY), seconds, label, rows=num_bytes, bytes_per_row=1.0)


def conversions(collection: Collection) -> list[tuple[Rows, Floats, Floats]]:
    """Return each engine's static fp8 quantisation on this system: rows, bytes moved and seconds."""
    by_engine = []
    for engine in dict.fromkeys((collection.engine, *ENGINES)):
        rows = collection.of(engine).first_rows("quantize", "scale_matrix_perf", ("m", "k"), [{}])
        if rows is not None and rows.place.engine == engine:
            num_bytes = rows["m"] * rows["k"] * QUANTISED_BYTES
            by_engine.append((rows, *lower_middle(num_bytes, rows.seconds)))
    return by_engine


def fastest_conversion(by_engine: list[tuple[Rows, Floats, Floats]]) -> tuple[Floats, Floats]:
    """Return bytes and the least seconds of any engine, at the sizes of the first."""
    num_bytes = by_engine[0][1]
    curves = [np.interp(np.log(num_bytes), np.log(sizes), seconds) for _, sizes, seconds in by_engine]
    return num_bytes, np.asarray(np.min(curves, axis=0), dtype=np.float64)


def lower_middle(num_bytes: Floats, seconds: Floats) -> tuple[Floats, Floats]:
    """Return bytes and seconds: the median over shapes in every half octave, made non-decreasing."""
    octave = np.round(np.log2(num_bytes) * 2) / 2
    octaves = np.unique(octave)
    middle = np.array([np.median(seconds[octave == value]) for value in octaves])
    return 2.0**octaves, np.maximum.accumulate(middle)
