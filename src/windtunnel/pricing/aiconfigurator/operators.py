"""Readers of each kind of operator from the tables of `aiconfigurator-core`'s layout.

Every reader returns a table in seconds and bytes; its source names the chosen version, kernel and other engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from windtunnel.model import operators as ops
from windtunnel.model.precision import Format
from windtunnel.pricing.aiconfigurator.borrowed_kernels import attention_rows, before_fp8_tiles, sound_latency
from windtunnel.pricing.aiconfigurator.collection import KERNELS, Collection, GemmPrices, Place
from windtunnel.pricing.aiconfigurator.collectives import collective_table
from windtunnel.pricing.aiconfigurator.described import described_table
from windtunnel.pricing.aiconfigurator.experts import experts_table
from windtunnel.pricing.aiconfigurator.gemms import elementwise_table, gemm_table
from windtunnel.pricing.aiconfigurator.latent_attention import latent_decode_table, latent_prefill_table
from windtunnel.pricing.aiconfigurator.sparse_attention import sparse_table
from windtunnel.pricing.estimator import TableModel
from windtunnel.pricing.table import Floats, MeasurementTable

Reader = Callable[[Collection, Any], "MeasurementTable | None"]


def table_for(collection: Collection, op: ops.Op) -> MeasurementTable | None:
    """Return the table that prices `op`, or None where nobody measured its kind in its format on this system."""
    chooses = getattr(op, "index_num_heads", 1) > 0
    key = (op.kind, op.variant, str(getattr(op, "span_nodes", 1) > 1), str(chooses))
    if key not in collection.read:
        collection.read[key] = _READERS.get(op.kind, _described)(collection, op)
    return collection.read[key]


def _gemm_prices(collection: Collection) -> GemmPrices:
    """Return the prices of GEMMs by the tables of a collection, each read on first use."""
    models: dict[Format, TableModel | None] = {}

    def price(gemm: ops.Gemm) -> Floats | None:
        if gemm.format not in models:
            table = table_for(collection, gemm)
            models[gemm.format] = None if table is None else TableModel(table, collection.roofline)
        model = models[gemm.format]
        return None if model is None else model.estimate(gemm)[0]

    return price


def _attention(table: str, batch_axis: str, tokens: str, added: int) -> Reader:
    """Return a reader of an attention table; its context is `tokens` + `added`."""

    def read(collection: Collection, op: Any) -> MeasurementTable | None:
        kv = KERNELS.kv_dtypes.get(op.kv_format)
        if kv is None:
            return None
        numbers = ("batch_size", tokens, "num_heads", "num_key_value_heads", "head_dim", "window_size?")
        choices = [{"kv_cache_dtype": kv, "attn_dtype": name} for name in ("bfloat16", kv)]
        rows = attention_rows(collection, table, numbers, choices)
        if rows is None:
            return None
        if op.kind == "decode_attention" and op.kv_format is Format.FP8:
            rows = before_fp8_tiles(collection, rows, numbers)
        if op.kind == "decode_attention":
            rows = rows.with_latency(sound_latency(collection.engine, rows, numbers))
        columns = rows.columns
        sites = {
            "num_heads": columns["num_heads"],
            "num_kv_heads": columns["num_key_value_heads"],
            "head_dim": columns["head_dim"],
            "window_tokens": columns["window_size"],
        }
        axes = {"batch": columns["batch_size"], batch_axis: columns[tokens] + added}
        label = collection.label("attention", rows)
        share = KERNELS.longest_share.get(rows.main_kernel, 0.0) if op.kind == "decode_attention" else 0.0
        words = {"kv_format": op.kv_format.value}
        return MeasurementTable(op.kind, sites, axes, rows.seconds, label, words, longest_share=share)

    return read


def _experts(collection: Collection, op: Any) -> MeasurementTable | None:
    return experts_table(collection, op, _gemm_prices(collection))


def _latent_prefill(collection: Collection, op: Any) -> MeasurementTable | None:
    return latent_prefill_table(collection, op, _gemm_prices(collection))


def _prices_at(collection: Collection) -> Callable[[Place], GemmPrices]:
    """Return the GEMM prices of the engine and version that were measured at a place."""
    return lambda place: _gemm_prices(replace(collection, engine=place.engine, version=place.version, read={}))


def _sparse_latent(collection: Collection, op: Any) -> MeasurementTable | None:
    kv = KERNELS.kv_dtypes.get(op.kv_format)
    return None if kv is None else sparse_table(collection, op, kv, _prices_at(collection))


def _described(collection: Collection, op: ops.Op) -> MeasurementTable | None:
    return described_table(collection, op, _prices_at(collection))


_READERS: Mapping[str, Reader] = {
    "gemm": gemm_table,
    "prefill_attention": _attention("context_attention_perf", "num_tokens", "isl", 0),
    "decode_attention": _attention("generation_attention_perf", "context_tokens", "step", 1),
    "latent_prefill_attention": _latent_prefill,
    "latent_decode_attention": latent_decode_table,
    "sparse_latent_prefill": _sparse_latent,
    "sparse_latent_decode": _sparse_latent,
    "experts": _experts,
    "elementwise": elementwise_table,
    "collective": collective_table,
}
