"""Sparse latent attention (DeepSeek-V3.2, GLM-5) from the tables of `aiconfigurator-core`'s layout.

Engines were measured with the whole attention module: projections, indexer, choice of keys, attention. What the module
takes above its projections, priced from the GEMM table of the same format, is `SparseLatentPrefill` and
`SparseLatentDecode`; so a step of decodes alone costs what was measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import reduce
from itertools import product

import numpy as np
from numpy.typing import NDArray

from windtunnel.model import operators as ops
from windtunnel.model.attention.latent import LatentPrefillAttention, SparseLatent, SparseLatentDecode
from windtunnel.model.precision import Format
from windtunnel.pricing.aiconfigurator.collection import (
    KERNELS,
    Collection,
    Place,
    Rows,
    fastest_kernel_only,
    joined,
    read_rows,
)
from windtunnel.pricing.aiconfigurator.gemms import gemm_prices, projection_seconds
from windtunnel.pricing.roofline import Roofline
from windtunnel.pricing.table import Floats, MeasurementTable, grouped, table_of

_FORMATS: Mapping[str, Format] = {"bfloat16": Format.BF16, "fp8_block": Format.FP8_BLOCK}
"""Formats of the measured projections; the first that a file has."""

_POINT = ("num_heads", "batch_size", "isl", "step")


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
            rows = read_rows(place, file, _POINT, {"model": name, "gemm_type": gemm, **without, **words})
            if rows is None:
                continue
            rows = rows.take(_captured(rows) if decode else _unbound_by_launches(rows))
            rows = rows.with_columns(**{width: np.full(len(rows), float(size)) for width, size in widths.items()})
            sites = {name: rows[name] for name in ("num_heads", *widths)}
            projections = projection_seconds(rows, sites, _projections, _FORMATS[gemm], price)
            if not len(rows) or projections is None:
                continue
            left = np.maximum(rows.seconds - projections, KERNELS.sparse_least_share * rows.seconds)
            dense = rows.named(_is_dense)
            left[dense] = np.fmin(left[dense], _dense_seconds(rows.take(dense), collection.roofline))
            yield rows.with_columns(left_s=left)
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


def _projections(site: Mapping[str, float]) -> Iterator[tuple[float, float]]:
    """Yield (n, k) of the projections: down-projections as one, the queries' up-projection, the output."""
    heads, hidden_size, query = site["num_heads"], site["hidden_size"], site["q_lora_rank"]
    yield query + site["kv_lora_rank"] + site["rope_head_dim"], hidden_size
    yield heads * (site["qk_nope_head_dim"] + site["rope_head_dim"]), query
    yield hidden_size, heads * site["v_head_dim"]


def _joined(collection: Collection, op: SparseLatent, decode: bool, parts: list[Rows]) -> MeasurementTable:
    label = f"{collection.label('sparse_attention', parts[0])} less its projections"
    rows = reduce(joined, (fastest_kernel_only(part, _POINT) for part in parts))
    dense = any(part.named(_is_dense).any() for part in parts)
    if dense:
        longest = f"{int(rows['top_k'][0]):,} tokens"
        label += f"; prompts of at most {longest} no slower than the roofline's dense attention"
    tokens = {"context_tokens": rows["step"] + 1} if decode else {"num_tokens": rows["isl"]}
    table = table_of(op, rows["left_s"], label, **rows.columns, **tokens, batch=rows["batch_size"])
    # Longer prompts than `top_k`, a site's last dimension, are no longer dense: SGLang's on H200 take 20 times as long
    # at twice the length.
    steps = {site: (float(np.nextafter(site[-1], np.inf)),) for site in table.rows_by_site if dense}
    return replace(table, steps=steps)
