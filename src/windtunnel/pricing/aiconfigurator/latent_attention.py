"""Cores of multi-head latent attention from the tables of `aiconfigurator-core`'s layout, as the engine runs them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from windtunnel.model.precision import Format
from windtunnel.pricing.aiconfigurator.collection import (
    ENGINES,
    KERNELS,
    NEWEST,
    Collection,
    GemmPrices,
    Rows,
    at_same_points,
    first_rows,
    projection_seconds,
)
from windtunnel.pricing.table import Floats, MeasurementTable


def _latent_rows(collection: Collection, table: str, tokens: str, op: Any) -> Rows | None:
    kv = KERNELS.kv_dtypes.get(op.kv_format)
    if kv is None:
        return None
    return first_rows(collection, "mla", table, ("batch_size", tokens, "num_heads"), [{"kv_cache_dtype": kv}])


def _module_rows(collection: Collection, table: str, tokens: str, op: Any) -> Rows | None:
    """Read whole attention modules of the engine itself, with bf16 projections."""
    words = {"kv_cache_dtype": KERNELS.kv_dtypes[op.kv_format], "gemm_type": "bfloat16"}
    rows = first_rows(collection, "mla", table, ("batch_size", tokens, "num_heads"), [words])
    return rows if rows is not None and rows.place.engine == collection.engine else None


def latent_prefill_table(collection: Collection, op: Any, price: GemmPrices) -> MeasurementTable | None:
    """Return the core of latent prefill; where the engine has only module tables, the lesser of two upper bounds.

    One bound is the core of another engine that computes the same form. The other is the engine's module less its
    projections, priced from the GEMM table: right where the core is most of the module, and as unsure as the price of
    the projections where they are. Launches by the host bound short prompts, where the second bound is the greater.
    """
    rows = _latent_rows(collection, "context_mla_perf", "isl", op)
    if rows is None:
        return None
    is_measured = rows.place.engine == collection.engine
    module = None if is_measured else _module_rows(collection, "mla_context_module_perf", "isl", op)
    module = None if module is None else _expanding(module)
    projections_s = None if module is None else projection_seconds(module, _projections, Format.BF16, price)
    label, seconds = collection.label("mla", rows), rows.seconds
    if module is not None and projections_s is not None:
        left_s = module.seconds - projections_s
        rows = _same_form(collection, op, rows, module, left_s)
        bound = at_same_points(rows, module, left_s, _PREFILL_POINT) / rows.seconds
        weight = at_same_points(rows, module, _weight(left_s / projections_s), _PREFILL_POINT)
        lower = (bound > 0.0) & (bound < 1.0)
        seconds = rows.seconds * np.where(lower, bound, 1.0) ** np.where(lower, weight, 0.0)
        label = f"{collection.label('mla', rows)}, at most {collection.label('mla', module)} less its projections"
    return _table(op, rows, seconds, label, KERNELS.latent_prefill_widths, {"num_tokens": rows.columns["isl"]})


def _table(
    op: Any, rows: Rows, seconds: Floats, label: str, widths: Mapping[str, float], tokens: Mapping[str, Floats]
) -> MeasurementTable:
    sites = {
        "num_heads": rows.columns["num_heads"],
        **{name: np.full(len(rows), width) for name, width in widths.items()},
    }
    axes = {"batch": rows.columns["batch_size"], **tokens}
    return MeasurementTable(op.kind, sites, axes, seconds, label, {"kv_format": op.kv_format.value})


_PREFILL_POINT = ("num_heads", "batch_size", "isl")


def _expanding(module: Rows) -> Rows:
    """Return the rows of the longest prompts' kernel: short prompts take decode's, which absorb one of the projections.

    vLLM 0.24.0 sends up to 512 tokens there on Hopper, and single tokens elsewhere.
    """
    longest = module.kernel_codes[np.argmax(module.columns["isl"])]
    return module.take(module.kernel_codes == longest)


def _same_form(collection: Collection, op: Any, rows: Rows, module: Rows, left_s: Floats) -> Rows:
    """Return the engine's core that is nearest to the module less its projections, where it has most to compute.

    SGLang's kernels on Hopper, Ada and RTX Pro 6000 compute the absorbed form, 3.4 times the arithmetic; vLLM expands
    keys and values as TRT-LLM does. From 16,384 tokens on what is left of vLLM's modules is 0.12 to 0.26 of SGLang's
    times there and 0.8 to 1.0 of TRT-LLM's; where SGLang's kernels expand too (Blackwell), 0.64 to 2.0 of either's.
    """
    cores = {rows.place.engine: rows}
    for engine in ENGINES:
        newest = _latent_rows(replace(collection.of(engine), version=NEWEST), "context_mla_perf", "isl", op)
        if newest is not None and newest.place.engine == engine:
            cores.setdefault(engine, newest)
    work = module.columns["num_heads"] * module.columns["batch_size"] * module.columns["isl"] ** 2
    largest = (work >= np.quantile(work, 0.9)) & (left_s > 0.0)

    def unlikeness(core: Rows) -> float:
        ratio = left_s[largest] / at_same_points(module.take(largest), core, core.seconds, _PREFILL_POINT)
        known = np.isfinite(ratio)
        return float(np.median(np.abs(np.log(ratio[known])))) if known.any() else np.inf

    return min(cores.values(), key=unlikeness)


def _weight(left_over_projections: Floats) -> Floats:
    """Return the weight of a module less its projections against another engine's core, by inverse variances."""
    relative_error = KERNELS.projections_error / np.maximum(left_over_projections, 1e-6)
    return np.asarray(KERNELS.core_error**2 / (KERNELS.core_error**2 + relative_error**2))


def _projections(heads: int) -> Iterator[tuple[int, int]]:
    """Yield (n, k) of the projections of DeepSeek-V3's attention."""
    yield from ((1536 + 576, 7168), (192 * heads, 1536), (256 * heads, 512), (7168, 128 * heads))


def latent_decode_table(collection: Collection, op: Any) -> MeasurementTable | None:
    """Return the core of latent decode with its two absorbing products; without core tables, from growth of modules.

    A module's projections do not depend on the context, so its core is another engine's core at the shortest context
    plus what the module's time grows by. With TRT-LLM's cores this agrees within 5 % on H100, H200, B200 and GB200;
    SGLang's fp8 cores on Hopper are 3 to 9 times slower than what vLLM's modules grow by.
    """
    rows = _latent_rows(collection, "generation_mla_perf", "step", op)
    if rows is None:
        return None
    label = collection.label("mla", rows)
    columns = {**rows.columns, "step": rows.columns["step"] + 1}
    rows = replace(rows, columns=columns)
    seconds = rows.seconds
    is_measured = rows.place.engine == collection.engine
    module = None if is_measured else _module_rows(collection, "mla_generation_module_perf", "step", op)
    if module is not None:
        seconds = _grown(rows, module)
        label = f"{label}, growing as {collection.label('mla', module)}"
    seconds = seconds + _absorb_seconds(collection, columns["num_heads"], columns["batch_size"])
    return _table(op, rows, seconds, label, KERNELS.latent_decode_widths, {"context_tokens": columns["step"]})


def _grown(core: Rows, module: Rows) -> Floats:
    """Return the core's seconds at the shortest context, then growing as the module does, where that is known."""
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
    """Return the seconds of the two per-head products that absorb the up-projections; 0 where nobody measured them."""
    total = np.zeros(len(batch))
    for name in ("mla_gen_pre", "mla_gen_post"):
        words = {"op_name": name, "bmm_dtype": "bfloat16"}
        rows = first_rows(collection, "mla_bmm", "mla_bmm_perf", ("num_tokens", "num_heads"), [words])
        if rows is None:
            return np.zeros(len(batch))
        columns = rows.columns
        measured_heads = np.unique(columns["num_heads"])
        for heads in np.unique(num_heads):
            nearest = measured_heads[np.argmin(np.abs(np.log(measured_heads / heads)))]
            here = columns["num_heads"] == nearest
            order = np.argsort(columns["num_tokens"][here])
            num_tokens, seconds = columns["num_tokens"][here][order], rows.seconds[here][order]
            chosen = num_heads == heads
            total[chosen] += np.exp(np.interp(np.log(batch[chosen]), np.log(num_tokens), np.log(seconds)))
    return total
