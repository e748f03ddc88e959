"""Sparse latent attention (DeepSeek-V3.2, GLM-5) from the tables of `aiconfigurator-core`'s layout.

Engines were measured with the whole attention module: projections, indexer, choice of keys, attention. What the module
takes above its projections, priced from the GEMM table of the same format, is `SparseLatentPrefill` and
`SparseLatentDecode`; so a step of decodes alone costs what was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from windtunnel.model import operators as ops
from windtunnel.model.attention.latent import LatentPrefillAttention, SparseLatent, SparseLatentDecode
from windtunnel.model.precision import Format
from windtunnel.pricing.aiconfigurator.collection import (
    KERNELS,
    Collection,
    GemmPrices,
    Place,
    Rows,
    fastest_kernel_only,
    projection_seconds,
    read_rows,
)
from windtunnel.pricing.roofline import Roofline
from windtunnel.pricing.table import Floats, MeasurementTable, site_names

_FORMATS: Mapping[str, Format] = {"bfloat16": Format.BF16, "fp8_block": Format.FP8_BLOCK}
"""Formats of the measured projections; the first that a file has."""

_POINT = ("num_heads", "batch_size", "isl", "step")


def sparse_table(
    collection: Collection, op: SparseLatent, kv_dtype: str, prices: Callable[[Place], GemmPrices]
) -> MeasurementTable | None:
    """Return the table of layers like `op`, with an indexer or without one, of the nearest version that has one; None
    without one."""
    decode = op.kind == SparseLatentDecode.kind
    file = "dsa_generation_module_perf" if decode else "dsa_context_module_perf"
    for place in collection.places("sparse_attention", file):
        parts = list(_parts(place, file, kv_dtype, op, prices(place), collection.roofline))
        if parts:
            return _joined(collection, op.kind, op.kv_format, decode, parts)
    return None


def _parts(
    place: Place, file: str, kv_dtype: str, op: SparseLatent, price: GemmPrices, roofline: Roofline
) -> Iterator[tuple[Rows, tuple[int, ...], Floats]]:
    """Yield, for each measured model, the rows, its widths, and seconds without the projections."""
    decode, position = op.kind == SparseLatentDecode.kind, KERNELS.sparse_widths.index("index_num_heads")
    models = (model for model in KERNELS.sparse_models if bool(model[1][position]) == bool(op.index_num_heads))
    for names, widths in models:
        for words in ({"model": name, "gemm_type": gemm} for gemm in _FORMATS for name in names):
            without = {} if op.index_num_heads else {"op_name": file.replace("_perf", "_skip_indexer")}
            rows = read_rows(place, file, _POINT, {**words, **without, "kv_cache_dtype": kv_dtype})
            if rows is None:
                continue
            rows = rows.take(_captured(rows) if decode else _unbound_by_launches(rows))
            projections = projection_seconds(rows, _projections(widths), _FORMATS[words["gemm_type"]], price)
            if not len(rows) or projections is None:
                continue
            left = np.maximum(rows.seconds - projections, KERNELS.sparse_least_share * rows.seconds)
            dense = rows.named(_is_dense)
            left[dense] = np.fmin(left[dense], _dense_seconds(rows.take(dense), widths, roofline))
            yield rows, widths, left
            break


def _is_dense(kernel: str) -> bool:
    """Whether a kernel attends to every key, as SGLang's for prompts of at most `top_k` tokens."""
    return "dense_mha" in kernel


def _unbound_by_launches(rows: Rows) -> NDArray[np.bool_]:
    """Return a mask of whole prompts that do not wait for launches, or that have another price."""
    prompts: NDArray[np.bool_] = rows.columns["step"] == 0
    slow: NDArray[np.bool_] = rows.seconds > KERNELS.sparse_launch_bound * rows.seconds[prompts].min(initial=np.inf)
    return prompts & (slow | rows.named(_is_dense))


def _dense_seconds(rows: Rows, widths: tuple[int, ...], roofline: Roofline) -> Floats:
    """Return the roofline's seconds of expanded attention to all keys, whose measured prompts wait for launches."""
    kv_lora_rank, rope, nope, v_head_dim, *_ = widths
    batch, length, num_heads = (rows.columns[name] for name in ("batch_size", "isl", "num_heads"))
    total = np.zeros(len(rows))
    for heads in np.unique(num_heads).astype(int).tolist():
        here = num_heads == heads
        core = LatentPrefillAttention(batch[here], length[here], heads, nope + rope, v_head_dim)
        expand = ops.Gemm(batch[here] * length[here], heads * (nope + v_head_dim), kv_lora_rank)
        total[here] = np.asarray(roofline.seconds(core)) + np.asarray(roofline.seconds(expand))
    return total


def _captured(rows: Rows) -> NDArray[np.bool_]:
    """Return a mask of rows that ran from CUDA graphs: those before the first jump along the batch."""
    columns = rows.columns
    keep = np.ones(len(rows), dtype=bool)
    curves = np.column_stack([columns["num_heads"], columns["step"]])
    for curve in np.unique(curves, axis=0):
        here = np.flatnonzero(np.all(curves == curve, axis=1))
        here = here[np.argsort(columns["batch_size"][here], kind="stable")]
        jumps = np.flatnonzero(rows.seconds[here][1:] > KERNELS.sparse_without_graphs * rows.seconds[here][:-1])
        if len(jumps):
            keep[here[jumps[0] + 1 :]] = False
    return keep


def _projections(widths: tuple[int, ...]) -> Callable[[int], Iterator[tuple[int, int]]]:
    """Return (n, k) of the projections by heads: down-projections as one, the queries' up-projection, the output."""
    kv_lora_rank, rope, nope, v_head_dim, hidden_size, q_lora_rank, *_ = widths

    def shapes(heads: int) -> Iterator[tuple[int, int]]:
        yield q_lora_rank + kv_lora_rank + rope, hidden_size
        yield heads * (nope + rope), q_lora_rank
        yield hidden_size, heads * v_head_dim

    return shapes


def _joined(
    collection: Collection,
    kind: str,
    kv_format: Format,
    decode: bool,
    parts: list[tuple[Rows, tuple[int, ...], Floats]],
) -> MeasurementTable:
    columns: dict[str, list[Floats]] = {name: [] for name in (*_POINT, *KERNELS.sparse_widths, "seconds")}
    for rows, widths, seconds in parts:
        kept = fastest_kernel_only(replace(rows, columns={**rows.columns, "left": seconds}), _POINT)
        for name in _POINT:
            columns[name].append(kept.columns[name])
        for name, width in zip(KERNELS.sparse_widths, widths, strict=True):
            columns[name].append(np.full(len(kept), float(width)))
        columns["seconds"].append(kept.columns["left"])
    merged = {name: np.concatenate(values) for name, values in columns.items()}
    tokens = {"context_tokens": merged["step"] + 1} if decode else {"num_tokens": merged["isl"]}
    label = f"{collection.label('sparse_attention', parts[0][0])} less its projections"
    dense = any(rows.named(_is_dense).any() for rows, *_ in parts)
    if dense:
        label += (
            f"; prompts of at most {int(merged['top_k'][0]):,} tokens no slower than the roofline's dense attention"
        )
    sites = {name: merged[name] for name in site_names(kind)}
    axes = {"batch": merged["batch_size"], **tokens}
    table = MeasurementTable(kind, sites, axes, merged["seconds"], label, {"kv_format": kv_format.value})
    # Longer prompts than `top_k`, a site's last dimension, are no longer dense: SGLang's on H200 take 20 times as long
    # at twice the length.
    steps = {site: (float(np.nextafter(site[-1], np.inf)),) for site in table.rows_by_site if dense}
    return replace(table, steps=steps)
