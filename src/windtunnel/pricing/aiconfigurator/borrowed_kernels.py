"""Kernels that an engine runs and no table of its version times, from tables of other engines that run them too."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from windtunnel.errors import InputError
from windtunnel.pricing.aiconfigurator.collection import (
    HICCUP,
    KERNELS,
    Collection,
    Rows,
    all_rows,
    at_same_points,
    first_rows,
    main_kernel_only,
    point_of,
)
from windtunnel.pricing.table import Floats
from windtunnel.versions import version_key


def at_rate_of(backend: Rows, others: Rows) -> Rows:
    """Return rows of other kernels, no faster than `backend` was measured to be with as many tokens for each expert.

    Its rate is that of the nearest width of an expert on a rank. vLLM's Marlin experts were timed at other shapes than
    gpt-oss's. On H100 they reach 200 Tflop/s with 150 to 290 tokens an expert, and the Triton kernels, level with them
    up to 30, 320 to 410.
    """
    alone = backend.take(backend.columns["moe_ep_size"] == 1)
    if not len(alone):
        return others
    rate, per_expert, width = _flops(alone) / alone.seconds, _tokens_per_expert(alone), _expert_width(alone)
    known = np.unique(width)
    widths, load = _expert_width(others), _tokens_per_expert(others)
    least_s = np.zeros(len(others))
    for nearest in known.tolist():
        here = known[np.argmin(np.abs(np.log(widths[:, None] / known)), axis=1)] == nearest
        curve = np.flatnonzero(width == nearest)
        curve = curve[np.argsort(per_expert[curve])]
        reached = np.interp(np.log(load[here]), np.log(per_expert[curve]), rate[curve])
        least_s[here] = _flops(others)[here] / reached
    measured = others.columns["latency"]
    latency = np.where(load >= KERNELS.many_tokens_an_expert, np.maximum(measured, least_s * 1e3), measured)
    slowed = others.with_latency(latency)
    if not (latency > measured).any():
        return slowed
    names = [f"{name}, no faster than {backend.main_kernel}" for name in others.kernel_names.tolist()]
    return replace(slowed, kernel_names=np.array(names))


def _flops(rows: Rows) -> Floats:
    columns = rows.columns
    num_rows = columns["num_tokens"] * columns["topk"] / columns["moe_ep_size"]
    return 6 * num_rows * columns["hidden_size"] * _expert_width(rows)


def _tokens_per_expert(rows: Rows) -> Floats:
    return rows.columns["num_tokens"] * rows.columns["topk"] / rows.columns["num_experts"]


def _expert_width(rows: Rows) -> Floats:
    return rows.columns["inter_size"] / rows.columns["moe_tp_size"]


def attention_rows(
    collection: Collection, table: str, numbers: tuple[str, ...], choices: list[dict[str, str]]
) -> Rows | None:
    """Read an attention table's rows: of the engine's own kernels, or of the chosen backend's.

    A backend's kernels come with its library and not with the engine, so any engine's measurements of them serve.

    Raises:
        InputError: nobody measured that backend on this system.
    """
    if collection.attention_backend is None:
        return first_rows(collection, "attention", table, numbers, choices)
    names = KERNELS.attention_backends[collection.attention_backend]
    rows = None
    for rows in all_rows(collection, "attention", table, numbers, choices):
        chosen = rows.named(lambda kernel: kernel in names)
        if chosen.any():
            return main_kernel_only(rows.take(chosen), point_of(numbers))
    if rows is None:
        return None
    raise InputError(
        f"attention_backend {collection.attention_backend} was not measured on {collection.system.name}",
        "leave engine.attention_backend out for the kernels that the engine chooses",
    )


def before_fp8_tiles(collection: Collection, rows: Rows, numbers: tuple[str, ...]) -> Rows:
    """Return decode attention over an fp8 cache; on Hopper, before `fp8_tiles_since`, no faster than over bf16."""
    since = KERNELS.fp8_tiles_since.get(collection.engine)
    is_old = since is not None and version_key(collection.version) < version_key(since)
    if not is_old or not rows.named(lambda kernel: "fa3" in kernel).all():
        return rows
    words = {"kv_cache_dtype": "bfloat16", "attn_dtype": "bfloat16"}
    plain = first_rows(collection, "attention", "generation_attention_perf", numbers, [words])
    if plain is None:
        return rows
    same = at_same_points(rows, plain, plain.columns["latency"], point_of(numbers))
    latency = np.fmax(rows.columns["latency"], same)
    return rows.with_latency(latency)


def sound_latency(engine: str, rows: Rows, numbers: tuple[str, ...]) -> Floats:
    """Return the milliseconds of decode attention, no longer than the same batch over more keys takes, times `HICCUP`.

    Without `HICCUP` where the engine runs the kernel for more keys (`believed`).
    """
    keys = [rows.columns[name] for name in point_of(numbers) if name != "step"]
    order = np.lexsort((rows.columns["step"], *keys))
    sorted_keys = np.column_stack([key[order] for key in keys])
    starts = np.flatnonzero(np.any(sorted_keys[1:] != sorted_keys[:-1], axis=1)) + 1
    latency = rows.columns["latency"]
    least = np.empty_like(latency)
    for curve in np.split(order, starts):
        least[curve] = np.minimum.accumulate(latency[curve][::-1])[::-1]
    return np.where(latency > KERNELS.believed.get(engine, HICCUP) * least, least, latency)
