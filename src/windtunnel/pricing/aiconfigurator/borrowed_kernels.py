"""Kernels that an engine runs and no table of its version times, from tables of other engines that run them too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from windtunnel.errors import InputError
from windtunnel.pricing.aiconfigurator.collection import (
    HICCUP,
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

SAME_ALL_REDUCE: Mapping[str, tuple[str, str]] = {"vllm": ("sglang", "0.5.9")}
"""Engine -> another one and version whose all-reduce is the same source (`custom_all_reduce.cuh`).

On eight H100 the two tables agree within 4% up to 4 MiB. vLLM 0.14.0's on eight H200, the same links, takes 1.3 to 2.7
times as long from 256 KiB to 4 MiB, which its other versions do not show: the faster of both stands."""


MANY_TOKENS_AN_EXPERT = 16
"""Tokens per expert from which on arithmetic bounds an expert, and not the reading of its weights."""


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
    latency = np.where(load >= MANY_TOKENS_AN_EXPERT, np.maximum(measured, least_s * 1e3), measured)
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


_ATTENTION_KERNELS: Mapping[str, tuple[str, ...]] = {
    "trtllm": ("trtllm_mha", "vllm_flashinfer_trtllmdecode", "torch_flow"),
    "flashinfer": ("flashinfer", "vllm_flashinfer_fidecode", "torch_flow_flashinfer"),
    "flash_attention": (
        *("flash_attention", "fa3"),
        *("vllm_flash_attn", "vllm_flash_attn_fa2", "vllm_flash_attn_fa3", "vllm_flash_attn_fa4"),
    ),
    "triton": ("triton", "vllm_triton_attn"),
}
"""Backend -> its kernels, as the collectors of the three engines call them."""


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
    names = _ATTENTION_KERNELS[collection.attention_backend]
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


FP8_TILES_SINCE: Mapping[str, str] = {"vllm": "0.11.1"}
"""Engine -> its version with tiles of FlashAttention 3 that suit decoding in fp8 (vllm-project/flash-attention, pull
requests 91 and 96, the latter opened on 2025-09-29): "with the current mainline config, FP8 decoding is not faster at
all than BF16". Attention was measured in 0.24 only."""


def before_fp8_tiles(collection: Collection, rows: Rows, numbers: tuple[str, ...]) -> Rows:
    """Return decode attention over an fp8 cache; on Hopper, before `FP8_TILES_SINCE`, no faster than over bf16."""
    since = FP8_TILES_SINCE.get(collection.engine)
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


BELIEVED: Mapping[str, float] = {"trtllm": 1.0}
"""Engine -> the largest ratio to a longer context's time that is believed, where it is not `HICCUP`.

TensorRT-LLM captures the graph of a decode step with one sequence of the greatest length (1.0 `model_engine.py`,
`_get_cuda_graph_warmup_request`: "one dummy request with the maximum possible sequence length"), so that attention's
kernel is the one for long contexts whatever is decoded then. Timed alone it is chosen by the length at hand: eight
sequences with 16 query heads and one of keys take 11.6, 25.6 and 12.8 us at 255, 511 and 1,023 keys on H100."""


def sound_latency(engine: str, rows: Rows, numbers: tuple[str, ...]) -> Floats:
    """Return the milliseconds of decode attention, no longer than the same batch over more keys takes, times `HICCUP`.

    Without `HICCUP` where the engine runs the kernel for more keys (`BELIEVED`).
    """
    keys = [rows.columns[name] for name in point_of(numbers) if name != "step"]
    order = np.lexsort((rows.columns["step"], *keys))
    sorted_keys = np.column_stack([key[order] for key in keys])
    starts = np.flatnonzero(np.any(sorted_keys[1:] != sorted_keys[:-1], axis=1)) + 1
    latency = rows.columns["latency"]
    least = np.empty_like(latency)
    for curve in np.split(order, starts):
        least[curve] = np.minimum.accumulate(latency[curve][::-1])[::-1]
    return np.where(latency > BELIEVED.get(engine, HICCUP) * least, least, latency)
