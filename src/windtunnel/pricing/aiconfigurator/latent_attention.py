"""Multi-head latent attention from the tables of `aiconfigurator-core`'s layout, as the engine runs it.

Engines were measured with the whole module of sparse attention (DeepSeek-V3.2, GLM-5): projections, indexer, choice of
keys, attention. What the module takes above its projections, priced from the GEMM table of the same format, is
`SparseLatentPrefill` and `SparseLatentDecode`; so a step of decodes alone costs what was measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import reduce
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.model import operators as ops
from windtunnel.model.attention.latent import LatentPrefillAttention, SparseLatent, SparseLatentDecode
from windtunnel.model.precision import BITS, Format
from windtunnel.pricing.aiconfigurator.collection import KERNELS, NEWEST, Collection, Place, Rows
from windtunnel.pricing.aiconfigurator.gemms import gemm_prices, projection_seconds
from windtunnel.pricing.roofline import Roofline
from windtunnel.pricing.table import Floats, MeasurementTable, grouped, site_names, table_of

_PREFILL_POINT, _DECODE_POINT = ("num_heads", "batch_size", "isl"), ("num_heads", "batch_size", "step")


def _latent_rows(collection: Collection, table: str, point: tuple[str, ...], op: Any, **words: str) -> Rows | None:
    kv = KERNELS.kv_dtypes.get(op.kv_format)
    return None if kv is None else collection.first_rows("mla", table, point, [{"kv_cache_dtype": kv, **words}])


def _module_rows(collection: Collection, core: Rows, table: str, point: tuple[str, ...], op: Any) -> Rows | None:
    """Read whole attention modules of the engine itself, with bf16 projections, where its core was not measured."""
    if core.place.engine == collection.engine:
        return None
    rows = _latent_rows(collection, table, point, op, gemm_type="bfloat16")
    return rows if rows is not None and rows.place.engine == collection.engine else None


def latent_prefill_table(collection: Collection, op: Any) -> MeasurementTable | None:
    """Return the core of latent prefill; where the engine has only module tables, the lesser of two upper bounds.

    One bound is the core of another engine that computes the same form. The other is the engine's module less its
    projections, priced from the GEMM table: right where the core is most of the module, and as unsure as the price of
    the projections where they are. Launches by the host bound short prompts, where the second bound is the greater.
    """
    rows = _latent_rows(collection, "context_mla_perf", _PREFILL_POINT, op)
    if rows is None:
        return None
    module, projections_s = _module_rows(collection, rows, "mla_context_module_perf", _PREFILL_POINT, op), None
    if module is not None:
        # Short prompts take decode's kernel, which absorbs one of the projections: vLLM 0.24.0 sends up to 512 tokens
        # there on Hopper, and single tokens elsewhere.
        module = module.where(module["kernel"] == module["kernel"][np.argmax(module["isl"])])
        heads, price = {"num_heads": module["num_heads"]}, gemm_prices(collection)
        projections_s = projection_seconds(module, heads, _projections, Format.BF16, price)
    label = collection.label("mla", rows)
    if (other := KERNELS.expanded_by.get(rows.place.engine)) is not None:
        newest = replace(collection.of(other), version=NEWEST)
        expanded = _latent_rows(newest, "context_mla_perf", _PREFILL_POINT, op)
        if expanded is not None and expanded.place.engine == other:
            rows, label = rows.no_slower_than(expanded, _PREFILL_POINT), f"{label}, no slower than {other}"
    seconds = rows.seconds
    if module is not None and projections_s is not None:
        left_s = module.seconds - projections_s
        bound = rows.at_same_points(module, left_s, _PREFILL_POINT) / rows.seconds
        # The weight against another engine's core, by inverse variances.
        variance = (KERNELS.projections_error / np.maximum(left_s / projections_s, 1e-6)) ** 2
        trust = np.asarray(KERNELS.core_error**2 / (KERNELS.core_error**2 + variance))
        weight = rows.at_same_points(module, trust, _PREFILL_POINT)
        lower = (bound > 0.0) & (bound < 1.0)
        seconds = rows.seconds * np.where(lower, bound, 1.0) ** np.where(lower, weight, 0.0)
        label = f"{label}, at most {collection.label('mla', module)} less its projections"
    widths, batch = KERNELS.latent_prefill_widths, rows["batch_size"]
    return table_of(op, seconds, label, **rows.columns, **widths, batch=batch, num_tokens=rows["isl"])


def _projections(site: Mapping[str, float]) -> Iterator[tuple[float, float]]:
    """Yield (n, k) of the projections of DeepSeek-V3's attention."""
    heads = site["num_heads"]
    yield from ((1536 + 576, 7168), (192 * heads, 1536), (256 * heads, 512), (7168, 128 * heads))


def latent_decode_table(collection: Collection, op: Any) -> MeasurementTable | None:
    """Return the core of latent decode with its two absorbing products; without core tables, from growth of modules.

    A module's projections do not depend on the context, so its core is another engine's core at the shortest context
    plus what the module's time grows by. With TRT-LLM's cores this agrees within 5 % on H100, H200, B200 and GB200;
    SGLang's fp8 cores on Hopper are 3 to 9 times slower than what vLLM's modules grow by. None where the only core is
    another engine's that does not split contexts.
    """
    rows = _latent_rows(collection, "generation_mla_perf", _DECODE_POINT, op)
    if rows is None:
        return None
    label = collection.label("mla", rows)
    rows = rows.replaced(step=rows["step"] + 1)
    seconds = rows.seconds
    module = _module_rows(collection, rows, "mla_generation_module_perf", _DECODE_POINT, op)
    if module is None and rows.place.engine != collection.engine and not _splits_context(rows, op, collection.roofline):
        return None
    if module is not None:
        seconds = _grown(rows, module)
        label = f"{label}, growing as {collection.label('mla', module)}"
    seconds = seconds + _absorb_seconds(collection, rows["num_heads"], rows["batch_size"])
    widths, batch = KERNELS.latent_decode_widths, rows["batch_size"]
    return table_of(op, seconds, label, **rows.columns, **widths, batch=batch, context_tokens=rows["step"])


def _splits_context(rows: Rows, op: Any, roofline: Roofline) -> bool:
    """Whether a request's longest context is read by more than one block of threads (`split_share`)."""
    longest = np.lexsort([rows["step"], -rows["batch_size"]])[-1]
    read = rows["step"][longest] * (op.kv_lora_rank + op.rope_head_dim) * BITS[op.kv_format] / 8
    return bool(read > KERNELS.split_share * rows.seconds[longest] * roofline.device.memory_bytes_per_s)


def _grown(core: Rows, module: Rows) -> Floats:
    """Return the core's seconds at the shortest context, then growing as the module does, where that is known."""
    seconds = core.seconds
    same = core.at_same_points(module, module.seconds, _DECODE_POINT)
    first = np.empty(len(core), dtype=int)
    for curve in grouped([core["num_heads"], core["batch_size"]], [core["step"]]):
        first[curve] = curve[0]
    grown = seconds[first] + same - same[first]
    return np.where(grown > 0.5 * seconds[first], grown, seconds)


def _absorb_seconds(collection: Collection, num_heads: Floats, batch: Floats) -> Floats:
    """Return the seconds of the two per-head products that absorb the up-projections; 0 where nobody measured them."""
    total = np.zeros(len(batch))
    for name in ("mla_gen_pre", "mla_gen_post"):
        words = {"op_name": name, "bmm_dtype": "bfloat16"}
        rows = collection.first_rows("mla_bmm", "mla_bmm_perf", ("num_tokens", "num_heads"), [words])
        if rows is None:
            return np.zeros(len(batch))
        measured_heads = np.unique(rows["num_heads"])
        for heads in np.unique(num_heads):
            nearest = measured_heads[np.argmin(np.abs(np.log(measured_heads / heads)))]
            here = rows.where(rows["num_heads"] == nearest)
            order = np.argsort(here["num_tokens"])
            num_tokens, seconds = here["num_tokens"][order], here.seconds[order]
            chosen = num_heads == heads
            total[chosen] += np.exp(np.interp(np.log(batch[chosen]), np.log(num_tokens), np.log(seconds)))
    return total


_FORMATS: Mapping[str, Format] = {"bfloat16": Format.BF16, "fp8_block": Format.FP8_BLOCK}
"""Formats of the measured projections; the first that a file has."""

_MODULE_POINT = ("num_heads", "batch_size", "isl", "step")


def sparse_table(collection: Collection, op: SparseLatent) -> MeasurementTable | None:
    """Return the table of layers like `op`, with an indexer or without one, of the nearest version that has one; None
    without one."""
    decode = op.kind == SparseLatentDecode.kind
    file = "dsa_generation_module_perf" if decode else "dsa_context_module_perf"
    for place in collection.places("sparse_attention", file) if op.kv_format in KERNELS.kv_dtypes else ():
        parts = list(_parts(collection, place, file, {"kv_cache_dtype": KERNELS.kv_dtypes[op.kv_format]}, op))
        if parts:
            return _joined(collection, op, decode, parts)
    return None


def _parts(
    collection: Collection, place: Place, file: str, words: Mapping[str, str], op: SparseLatent
) -> Iterator[Rows]:
    """Yield the rows of each measured model, with columns for its widths and `left_s`, the seconds without the
    projections."""
    decode, price = op.kind == SparseLatentDecode.kind, gemm_prices(collection.at(place))
    without = {} if op.index_num_heads else {"op_name": file.replace("_perf", "_skip_indexer")}
    for names, widths in KERNELS.sparse_models:
        if bool(widths["index_num_heads"]) != bool(op.index_num_heads):
            continue
        for gemm, name in product(_FORMATS, names):
            rows = place.read_rows(file, _MODULE_POINT, {"model": name, "gemm_type": gemm, **without, **words})
            if rows is None:
                continue
            rows = rows.where(_captured(rows) if decode else _unbound_by_launches(rows))
            rows = rows.replaced(**{width: np.full(len(rows), float(size)) for width, size in widths.items()})
            sites = {name: rows[name] for name in ("num_heads", *widths)}
            projections = projection_seconds(rows, sites, _sparse_projections, _FORMATS[gemm], price)
            if not len(rows) or projections is None:
                continue
            left = np.maximum(rows.seconds - projections, KERNELS.sparse_least_share * rows.seconds)
            dense = rows.named(_is_dense)
            left[dense] = np.fmin(left[dense], _dense_seconds(rows.where(dense), collection.roofline))
            yield rows.replaced(left_s=left)
            break


def _is_dense(kernel: str) -> bool:
    """Whether a kernel attends to every key, as SGLang's for prompts of at most `top_k` tokens."""
    return "dense_mha" in kernel


def _unbound_by_launches(rows: Rows) -> NDArray[np.bool_]:
    """Return a mask of whole prompts that do not wait for launches, or that have another price."""
    prompts: NDArray[np.bool_] = rows["step"] == 0
    slow: NDArray[np.bool_] = rows.seconds > KERNELS.sparse_launch_bound * rows.seconds[prompts].min(initial=np.inf)
    return prompts & (slow | rows.named(_is_dense))


def _dense_seconds(rows: Rows, roofline: Roofline) -> Floats:
    """Return the roofline's seconds of expanded attention to all keys, whose measured prompts wait for launches."""
    total = np.zeros(len(rows))
    for here in grouped([rows["num_heads"]]):
        heads, kv_lora_rank, rope, nope, v_head_dim = (int(rows[name][here[0]]) for name in _EXPANDED)
        batch, length = rows["batch_size"][here], rows["isl"][here]
        core = LatentPrefillAttention(batch, length, heads, nope + rope, v_head_dim)
        expand = ops.Gemm(batch * length, heads * (nope + v_head_dim), kv_lora_rank)
        total[here] = np.asarray(roofline.seconds(core)) + np.asarray(roofline.seconds(expand))
    return total


_EXPANDED = ("num_heads", "kv_lora_rank", "rope_head_dim", "qk_nope_head_dim", "v_head_dim")


def _captured(rows: Rows) -> NDArray[np.bool_]:
    """Return a mask of rows that ran from CUDA graphs: those before the first jump along the batch."""
    keep = np.ones(len(rows), dtype=bool)
    for curve in grouped([rows["num_heads"], rows["step"]], [rows["batch_size"]]):
        jumps = np.flatnonzero(rows.seconds[curve][1:] > KERNELS.sparse_without_graphs * rows.seconds[curve][:-1])
        if len(jumps):
            keep[curve[jumps[0] + 1 :]] = False
    return keep


def _sparse_projections(site: Mapping[str, float]) -> Iterator[tuple[float, float]]:
    """Yield (n, k) of the projections: down-projections as one, the queries' up-projection, the output."""
    heads, hidden_size, query = site["num_heads"], site["hidden_size"], site["q_lora_rank"]
    yield query + site["kv_lora_rank"] + site["rope_head_dim"], hidden_size
    yield heads * (site["qk_nope_head_dim"] + site["rope_head_dim"]), query
    yield hidden_size, heads * site["v_head_dim"]


def _joined(collection: Collection, op: SparseLatent, decode: bool, parts: list[Rows]) -> MeasurementTable:
    label = f"{collection.label('sparse_attention', parts[0])} less its projections"
    rows = reduce(Rows.joined, (part.fastest_kernel_only(_MODULE_POINT) for part in parts))
    dense = any(part.named(_is_dense).any() for part in parts)
    if dense:
        longest = f"{int(rows['top_k'][0]):,} tokens"
        label += f"; prompts of at most {longest} no slower than the roofline's dense attention"
    tokens = {"context_tokens": rows["step"] + 1} if decode else {"num_tokens": rows["isl"]}
    tokens |= {"batch": rows["batch_size"], "index_pool": np.ones(len(rows))}  # none was measured with pools
    table = table_of(op, rows["left_s"], label, **rows.columns, **tokens)
    # Longer prompts than `top_k` are no longer dense: SGLang's on H200 take 20 times as long at twice the length.
    top_k = site_names(op.kind).index("top_k")
    steps = {site: (float(np.nextafter(site[top_k], np.inf)),) for site in table.rows_by_site if dense}
    return replace(table, steps=steps)
