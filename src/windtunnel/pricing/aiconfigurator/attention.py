"""Attention from the tables of `aiconfigurator-core`'s layout: of an engine's own kernels, or of a chosen backend's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from windtunnel.errors import InputError
from windtunnel.model.precision import Format
from windtunnel.pricing.aiconfigurator.collection import HICCUP, KERNELS, Collection, Rows
from windtunnel.pricing.table import Floats, MeasurementTable, grouped, table_of
from windtunnel.units import version_key

_HEADS = ("num_heads", "num_key_value_heads", "head_dim", "window_size")


def prefill_table(collection: Collection, op: Any) -> MeasurementTable | None:
    """Return attention of prompts."""
    rows = _rows(collection, op, "context_attention_perf", ("batch_size", "isl", *_HEADS))
    return None if rows is None else _table(collection, op, rows, num_tokens=rows["isl"])


def decode_table(collection: Collection, op: Any) -> MeasurementTable | None:
    """Return attention of one new token for each request; the context has that token too."""
    numbers = ("batch_size", "step", *_HEADS)
    rows = _rows(collection, op, "generation_attention_perf", numbers)
    if rows is None:
        return None
    if op.kv_format is Format.FP8:
        rows = _before_fp8_tiles(collection, rows, numbers)
    rows = rows.replaced(latency=sound_latency(collection.engine, rows))
    share = KERNELS.longest_share.get(rows.main_kernel, 0.0)
    return replace(_table(collection, op, rows, context_tokens=rows["step"] + 1), longest_share=share)


def _table(collection: Collection, op: Any, rows: Rows, **tokens: Floats) -> MeasurementTable:
    return table_of(
        op,
        rows.seconds,
        collection.label("attention", rows),
        **rows.columns,
        **tokens,
        num_kv_heads=rows["num_key_value_heads"],
        window_tokens=rows["window_size"],
        batch=rows["batch_size"],
    )


def _rows(collection: Collection, op: Any, table: str, numbers: tuple[str, ...]) -> Rows | None:
    """Read a table's rows: of the engine's own kernels, or of the chosen backend's; None where nobody measured them.

    A backend's kernels come with its library and not with the engine, so any engine's measurements of them serve.
    """
    kv = KERNELS.kv_dtypes.get(op.kv_format)
    if kv is None:
        return None
    choices = [{"kv_cache_dtype": kv, "attn_dtype": name} for name in ("bfloat16", kv)]
    if collection.attention_backend is None:
        rows = _of_shape(op, collection.all_rows("attention", table, numbers, choices))
        return None if rows is None else rows.main_kernel_only(numbers)
    names = KERNELS.attention_backends[collection.attention_backend]
    rows = None
    for rows in collection.all_rows("attention", table, numbers, choices):
        chosen = rows.named(names.__contains__)
        if chosen.any():
            return rows.where(chosen).main_kernel_only(numbers)
    if rows is None:
        return None
    raise InputError(
        f"attention_backend {collection.attention_backend} was not measured on {collection.system.name}",
        "leave engine.attention_backend out for the kernels that the engine chooses",
    )


def _of_shape(op: Any, found: Iterator[Rows]) -> Rows | None:
    """Return the first rows; of two formats of queries in one file, the first that has rows of the op's head dimension.

    SGLang's FA3 and `trtllm_mha` read an fp8 cache with fp8 queries, and its other kernels, which a few shapes take,
    with either.
    """
    first = next(found, None)
    other = None if first is None else next(found, None)
    if first is None or other is None or other.place != first.place:
        return first
    return other if op.head_dim in other["head_dim"] and op.head_dim not in first["head_dim"] else first


def _before_fp8_tiles(collection: Collection, rows: Rows, numbers: tuple[str, ...]) -> Rows:
    """Return decode attention over an fp8 cache; on Hopper, before `fp8_tiles_since`, no faster than over bf16."""
    since = KERNELS.fp8_tiles_since.get(collection.engine)
    is_old = since is not None and version_key(collection.version) < version_key(since)
    if not is_old or not rows.named(lambda kernel: "fa3" in kernel).all():
        return rows
    words = {"kv_cache_dtype": "bfloat16", "attn_dtype": "bfloat16"}
    plain = collection.first_rows("attention", "generation_attention_perf", numbers, [words])
    if plain is None:
        return rows
    return rows.replaced(latency=np.fmax(rows.latency, rows.at_same_points(plain, plain.latency, numbers)))


def sound_latency(engine: str, rows: Rows) -> Floats:
    """Return the milliseconds of decode attention, no longer than the same batch over more keys takes, times `HICCUP`.

    Without `HICCUP` where the engine runs the kernel for more keys (`believed`).
    """
    least = np.empty_like(rows.latency)
    for curve in grouped([rows[name] for name in ("batch_size", *_HEADS)], [rows["step"]]):
        least[curve] = np.minimum.accumulate(rows.latency[curve][::-1])[::-1]
    return np.where(rows.latency > KERNELS.believed.get(engine, HICCUP) * least, least, rows.latency)
