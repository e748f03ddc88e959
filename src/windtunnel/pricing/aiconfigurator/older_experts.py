"""Experts as older engine versions compute them, with kernels that no table of these versions times."""

from __future__ import annotations

import numpy as np

from windtunnel.model import operators as ops
from windtunnel.model.feed_forward.experts import Experts
from windtunnel.model.precision import BITS, Format
from windtunnel.pricing.aiconfigurator.collection import (
    KERNELS,
    MOE_POINT,
    Collection,
    Place,
    Rows,
    at_same_points,
    read_rows,
)
from windtunnel.pricing.aiconfigurator.gemms import gemm_prices
from windtunnel.pricing.roofline import machine
from windtunnel.versions import version_key


def as_served(collection: Collection, op: Experts, rows: Rows) -> tuple[Rows, str]:
    """Return experts' rows with the times of the kernels that the collection's version runs, and a remark.

    Rows stay as they are where that version runs what was measured, or where a backend is named.

    Args:
        collection: its engine, version and device decide.
        op: experts of the rows' format.
        rows: as measured in the nearest version.
    """
    if collection.moe_backend is not None:
        return rows, ""
    if op.format is Format.FP8_BLOCK and _is_between(collection, KERNELS.padded_experts):
        return _in_padded_blocks(collection, rows)
    if op.format is Format.BF16 and _is_between(collection, KERNELS.small_tiles):
        return _in_small_tiles(collection, rows)
    return rows, ""


def _is_between(collection: Collection, versions: dict[str, tuple[str, str]]) -> bool:
    since, until = versions.get(collection.engine, ("0", "0"))
    return version_key(since) <= version_key(collection.version) < version_key(until)


def _in_padded_blocks(collection: Collection, rows: Rows) -> tuple[Rows, str]:
    """Return block-scaled experts in whole blocks of rows for each expert, DeepGEMM's contiguous layout.

    vLLM's buffer has a row for every choice of every token of the group and, for each expert of the rank, a block less
    one row (0.11.1 `compute_aligned_M` of `fused_moe/deep_gemm_utils.py`). Both GEMMs and the activation work on all of
    it, as blocks without tokens count as those of expert 0. Reading weights overlaps only in part with computing, as
    blocks change experts: the root of the sum of the squares. SGLang 0.5.10's table of these kernels, 128 of DeepSeek's
    experts on a rank (`wideep_context_moe`), agrees within 3% from 64 to 1,024 tokens on H100, 19% on H200 and 8% on
    B200. Small kernels count tokens, clear and write the experts' numbers, and transpose both inputs' scales.
    """
    device = collection.roofline.device
    if device.architecture not in KERNELS.padded_on or not device.scale_up_bytes_per_s:
        return rows, ""
    hidden, width, experts, topk, tp, ep, tokens = (rows[name] for name in MOE_POINT)
    local, width, block = experts / ep, width / tp, KERNELS.block_rows
    padded = np.ceil((tokens * topk + local * (block - 1)) / block) * block
    computing, price = np.zeros(len(rows)), gemm_prices(collection)
    for k, n in np.unique(np.column_stack([hidden, width]), axis=0).astype(int).tolist():
        here = (hidden == k) & (width == n)
        for columns, depth in ((2 * n, k), (k, n)):
            seconds = price(ops.Gemm(padded[here], columns, depth, Format.FP8_BLOCK))
            if seconds is None:
                return rows, ""
            computing[here] += seconds
    on = machine(device, Format.FP8_BLOCK)
    chosen = local * (1.0 - (1.0 - topk / experts) ** tokens)
    reading = chosen * 3 * hidden * width * BITS[Format.FP8_BLOCK] / 8 / on.bytes_per_s
    streamed = (6 * width * padded, 2 * hidden * tokens * topk, 2 * hidden * tokens * (topk + 1))
    small = (np.zeros(len(rows)),) * KERNELS.padded_small_kernels
    moving = sum(collection.roofline.seconds(ops.Elementwise("copy", size, 1.0)) for size in (*streamed, *small))
    latency = 1e3 * (np.hypot(computing, reading) + moving)
    latency = np.where(tp < KERNELS.padded_below_tp, latency, rows.latency)
    return rows.with_latency(latency), f"; as DeepGEMM's blocks of {block} rows for each expert"


def _in_small_tiles(collection: Collection, rows: Rows) -> tuple[Rows, str]:
    """Return bf16 experts of the Triton kernel, at the rate of its former default tiles.

    SGLang's kernel has the same two tiles for shapes that nobody tuned. What it loses against the tiles that vLLM
    has taken since is read off the two engines' tables of the reference system.
    """
    is_triton = rows.named(lambda name: any(part in name for part in KERNELS.moe_backends["triton"]))
    words = {"moe_dtype": "bfloat16", "distribution": collection.expert_distribution}
    former, since = (_reference_rows(collection, engine, version, words) for engine, version in KERNELS.tiles_of)
    if former is None or since is None:
        return rows, ""
    lost = at_same_points(former, since, since.seconds, MOE_POINT)
    factor = at_same_points(rows, former, former.seconds / lost, MOE_POINT)
    factor = np.where(is_triton & np.isfinite(factor), np.maximum(factor, 1.0), 1.0)
    return rows.with_latency(rows.latency * factor), "; in the default tiles of before"


def _reference_rows(collection: Collection, engine: str, version: str, words: dict[str, str]) -> Rows | None:
    folder = collection.system.parent / KERNELS.tiles_on / "moe" / engine / version
    if not (folder / "moe_perf.parquet").is_file():
        return None
    return read_rows(Place(folder, engine, version), "moe_perf", MOE_POINT, words)
