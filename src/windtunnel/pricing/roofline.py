"""Calibrated roofline: seconds of any operator from a device's published figures.

The plain roofline, max(FLOPs / peak, bytes / bandwidth) (Williams, Waterman and Patterson, CACM 2009), is a lower bound
that small operators miss by a factor of ten. Here every class of operator has a short closed form that also counts
launches, tiles rounded up, waves of tiles over the multiprocessors, a depth that fills the pipeline, and bytes that the
last-level cache serves. Its coefficients are dimensionless or microseconds, fitted on measured
tables of all devices and then moved towards each family's own (`catalog/roofline/*.yaml`, with its provenance and its
error on devices that the fit never saw).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.hardware import Device, Node, meets_all
from windtunnel.model import operators as ops
from windtunnel.model.attention.block_sparse import BlockSparseCore
from windtunnel.model.attention.compressed import CompressedCore, Compression
from windtunnel.model.attention.gated_delta import GatedDelta
from windtunnel.model.attention.grouped_query import DecodeAttention, PrefillAttention
from windtunnel.model.attention.latent import LatentDecodeAttention, LatentPrefillAttention, SparseLatent
from windtunnel.model.attention.mamba2 import CausalConvolution
from windtunnel.model.exchange import TokenExchange
from windtunnel.model.feed_forward.experts import Experts, MegaMoe
from windtunnel.model.precision import ACTIVATION_BITS, BITS, COMPUTE, Format, computed_as
from windtunnel.model.sampling import TokenFilter
from windtunnel.pricing.exchange import PCIE_BYTES_PER_S, exchange_seconds, fused_seconds
from windtunnel.schema import read_yaml

Coefficients = Mapping[str, float]
Size = ops.Size

US = 1e-6

UNKNOWN_NUM_SMS = 128
"""Multiprocessors of a device that does not publish them: datacentre parts of 2020-2025 have 108 to 160."""
UNKNOWN_L2_BYTES = 50e6

_FOLDER = catalog.shipped("roofline")

KINDS: Mapping[str, Mapping[str, Any]] = read_yaml(Path(__file__).with_name("kinds.yaml"))
"""Facts on kinds of operators, by subject."""


@dataclass(frozen=True)
class Machine:
    """Figures of one device in the closed forms, for one compute format."""

    flops_per_s: float
    bytes_per_s: float
    num_sms: int
    l2_bytes: float
    product_flops_per_s: float = math.inf
    """Rate that no matrix product exceeds."""

    @property
    def flops_per_s_per_sm(self) -> float:
        return self.flops_per_s / self.num_sms


def machine(device: Device, weights: Format) -> Machine:
    """Return the device as it computes with weights of a format: at the fastest of the format's rates that it has.
    InputError where the device publishes none of them."""
    rates = device.peak_flops_per_s
    for name in (*COMPUTE[computed_as(weights, rates)], "bf16", "fp16", "fp32"):
        if name in rates:
            return Machine(
                rates[name],
                device.memory_bytes_per_s,
                device.num_sms or UNKNOWN_NUM_SMS,
                float(device.l2_bytes or UNKNOWN_L2_BYTES),
            )
    raise InputError(f"{device.name} has no peak rate for {weights}", f"it has {', '.join(rates) or 'none'}")


COPY_SHARE = 0.866
"""Share of the peak that a copy of memory takes on H100, whose tables fitted the closed forms: 2.90 of 3.35 TB/s
(Azure/AI-benchmarking-guide, ND H100 v5)."""


def as_published(device: Device, on: Machine, weights: Format) -> Machine:
    """Return `on` with what was published of the device beside its peaks.

    No product is faster than the fastest one of its format or peak; a peak that nobody published has the mean share of
    the others. The closed forms' shares of the memory's peak are as much smaller as a copy's share of it.
    """
    peaks, published = device.peak_flops_per_s, device.product_flops_per_s
    if published:
        shares = {peaks[name]: rate / peaks[name] for name, rate in published.items() if name in peaks}
        share = shares.get(on.flops_per_s, sum(shares.values()) / len(shares))
        on = replace(on, product_flops_per_s=published.get(weights.value, share * on.flops_per_s))
    if device.copy_bytes_per_s:
        on = replace(on, bytes_per_s=device.copy_bytes_per_s / COPY_SHARE)
    return on


def memory_seconds(num_bytes: Size, on: Machine, c: Coefficients) -> Size:
    """Return the seconds to move `num_bytes`: from the last-level cache where they fit in part of it, else from memory.

    Measuring loops repeat an operator, so that small operands stay in the cache, in `cache_fraction` of it.
    """
    fits = 1.0 / (1.0 + (num_bytes / (c["cache_fraction"] * on.l2_bytes)) ** 3)
    memory_rate = on.bytes_per_s * c["memory_efficiency"]
    cache_rate = max(on.num_sms * c["cache_gb_per_s_per_sm"] * 1e9, memory_rate)
    return num_bytes * ((1.0 - fits) / memory_rate + fits / cache_rate)


def soft_max(a: Size, b: Size, power: float) -> Size:
    """Return the time of work that overlaps: the larger of two times, rounded off where they are nearly equal."""
    return (a**power + b**power) ** (1.0 / power)


_TILES = ((256, 128), (128, 128), (128, 64), (64, 64), (32, 64), (16, 64))
_SHORT_TILE_EFFICIENCY = {32: 0.85, 16: 0.7}
"""Rows of a short tile -> its rate against one of 64 rows. Assumed: every measured device is bound by memory where such
tiles matter, but parts of little arithmetic and fast memory (H20) would else wait for 64 padded rows."""

_SPLITS = (1, 2, 4, 8, 16)


def tiles_seconds(
    groups: Size, m: Size, n: Size, k: Size, on: Machine, c: Coefficients, splits: tuple[int, ...] = (1,)
) -> Size:
    """Return the compute seconds of `groups` products `[m, k] x [k, n]`: the best of some tiles and `splits` of k.

    A wave is one tile on every multiprocessor; `wave_smoothing` is the part of a last, partly filled wave that
    persistent kernels save. `fill_depth` is the depth of k that a tile spends filling its pipeline.
    """
    rate = on.flops_per_s_per_sm * c["compute_efficiency"]
    efficiency = {(128, 64): c["tile_64"], (64, 64): c["tile_64"] ** 2}
    efficiency |= {(rows, 64): efficiency[64, 64] * part for rows, part in _SHORT_TILE_EFFICIENCY.items()}
    num_axes = max(map(np.ndim, (groups, m, n, k)))

    def along(axis: int, values: Sequence[float]) -> Size:
        """Spread tiles (axis 0) or splits (axis 1) over the shape of the products: few array operations price all."""
        return np.array(values, float).reshape((-1, 1)[axis], (1, -1)[axis], *(1,) * num_axes)

    rows, columns = (along(0, sizes) for sizes in zip(*_TILES, strict=True))
    tile_rate = along(0, [rate * efficiency.get(tile, 1.0) for tile in _TILES])
    split = along(1, splits)
    waves = groups * np.ceil(m / rows) * np.ceil(n / columns) * split / on.num_sms
    full = np.where(waves <= 1, 1.0, c["wave_smoothing"] * waves + (1 - c["wave_smoothing"]) * np.ceil(waves))
    step = 2.0 * rows * columns * (np.maximum(k / split, 32.0) + c["fill_depth"]) / tile_rate
    seconds = full * (step + c["tile_us"] * US)
    if len(splits) > 1:
        partial_sums = groups * m * n * 4.0 * split * 2 / (on.num_sms * c["cache_gb_per_s_per_sm"] * 1e9)
        seconds = seconds + (split > 1) * c["split_us"] * US + (split > 1) * partial_sums
    best: Size = np.maximum(seconds.min(axis=(0, 1)), 2.0 * groups * m * n * k / on.product_flops_per_s)
    return best


def gemm_seconds(op: ops.Gemm, on: Machine, c: Coefficients) -> Size:
    """Return the seconds of a dense matrix product; another kernel first quantises 8 and 4 bit activations."""
    if op.format is Format.FP32:
        return c["launch_us"] * US + soft_max(_simt_seconds(op, on), memory_seconds(op.num_bytes, on, c), c["overlap"])
    compute = tiles_seconds(1.0, op.m, op.n, op.k, on, c, _SPLITS)
    seconds = c["launch_us"] * US + soft_max(compute, memory_seconds(op.num_bytes, on, c), c["overlap"])
    if ACTIVATION_BITS[op.format] < 16:
        read_and_write = op.m * op.k * (16 + ACTIVATION_BITS[op.format]) / 8
        seconds = seconds + c["quantise_us"] * US + memory_seconds(read_and_write, on, c) * c["quantise_passes"]
    return seconds


_SIMT_TILE = 64
_SIMT_EFFICIENCY = 0.9
_SIMT_HALVED_ROWS = 128


def _simt_seconds(op: ops.Gemm, on: Machine) -> Size:
    """Return the seconds of a product in fp32 on CUDA cores.

    Tiles are 64 x 64 (16 or 32 rows for as few), one on a multiprocessor at a time; k is split in two up to 128 rows.

    cuBLAS calls CUTLASS' `simt_sgemm_64x64_8x5` for it on B200 (vllm-project/vllm, pull request 41332). Its times on
    GB200 for 256 columns of 6,144 (pull request 47973): 17 to 22 us for 4 to 16 rows (here 16), 63 to 69 for 32 to 128
    (57), and 78, 97 and 111 for 256, 512 and 1,024 (112).
    """
    rows = np.select([np.asarray(op.m) <= 16, np.asarray(op.m) <= 32], [16.0, 32.0], float(_SIMT_TILE))
    splits = np.where((np.asarray(op.m) <= _SIMT_HALVED_ROWS) & (rows != 32.0), 2.0, 1.0)
    tiles = np.ceil(op.m / rows) * np.ceil(op.n / _SIMT_TILE) * splits
    step = 2.0 * rows * _SIMT_TILE * op.k / splits / (on.flops_per_s_per_sm * _SIMT_EFFICIENCY)
    return np.asarray(np.ceil(tiles / on.num_sms) * step)


def experts_seconds(op: Experts, on: Machine, c: Coefficients) -> Size:
    """Return the seconds of the chosen experts' products, gate/up then down, with routing and activation around them.

    Skewed routing chooses fewer experts than random routing (`spread`) and loads the busiest of `ep` ranks with
    ep^`imbalance` times the mean. Buffers for all tokens' pairs are moved whatever the rank's share (vLLM's fused_moe).
    """
    width = op.intermediate_size / op.tp
    miss = 1.0 - op.experts_per_token / op.num_experts
    local = op.num_experts / op.ep
    active = np.maximum(local * (1.0 - miss ** (op.num_tokens * c["spread"])), np.minimum(local, 1.0))
    pairs = op.pairs_per_rank * op.ep ** c["imbalance"]
    rows = pairs / active
    up = tiles_seconds(active, rows, (op.num_matrices - 1) * width, op.hidden_size, on, c)
    down = tiles_seconds(active, rows, op.hidden_size, width, on, c)
    weight_bytes = active * op.num_matrices * op.hidden_size * width * BITS[op.format] / 8
    memory = memory_seconds(weight_bytes + pairs * 2 * (op.hidden_size + width) * 2.0, on, c)
    all_pairs_bytes = op.num_tokens * op.experts_per_token * (op.hidden_size + op.num_matrices * width) * 2.0
    moved = c["moving_passes"] * memory_seconds(all_pairs_bytes, on, c)
    return c["launch_us"] * US + soft_max(up + down, memory, c["overlap"]) + moved


def prefill_seconds(op: PrefillAttention | LatentPrefillAttention, on: Machine, c: Coefficients) -> Size:
    """Return the seconds of flash attention: query tiles of `tile_rows` over the multiprocessors.

    The longest tile bounds a small batch. Query heads that share a key head share its tiles; latent attention expands
    keys and values for every head. Rows are not rounded up to whole tiles: prompts of one batch differ, so that the
    steps average out. The longest tile computes, and waits `step_us` for every 64 keys, one after the other; `balance`
    says how far the other tiles' work overlaps it, `hiding` how far work hides the launch (at 1 they add up, below 1
    they hold each other up).
    """
    if isinstance(op, LatentPrefillAttention):
        head_dim, heads_per_tile, window_tokens = (op.qk_head_dim + op.v_head_dim) / 2, 1.0, 0
    else:
        head_dim, heads_per_tile, window_tokens = op.head_dim, op.num_heads / op.num_kv_heads, op.window_tokens
    rate = on.flops_per_s_per_sm * c["compute_efficiency"] * head_dim / (head_dim + c["half_head_dim"])
    tile_rows = c["tile_rows"]
    rows = soft_max(op.num_tokens * heads_per_tile, tile_rows, 2.0) / heads_per_tile
    seen = np.minimum(rows, window_tokens + tile_rows) if window_tokens else rows
    pairs = op.batch * (rows * seen - seen * seen / 2 + rows * c["fill_depth"])
    tiles = op.batch * op.num_heads * rows / tile_rows
    evenly = 4.0 * pairs * op.num_heads * head_dim / (rate * on.num_sms) + tiles / on.num_sms * c["tile_us"] * US
    longest = 4.0 * np.minimum(op.batch, 1.0) * tile_rows * (seen + c["fill_depth"]) * head_dim / rate
    compute = soft_max(evenly, longest + seen / 64.0 * c["step_us"] * US, c["balance"])
    work = soft_max(compute, memory_seconds(op.num_bytes, on, c), c["overlap"])
    return soft_max(c["launch_us"] * US, work, c["hiding"])


def decode_seconds(op: DecodeAttention | LatentDecodeAttention, on: Machine, c: Coefficients) -> Size:
    """Return the seconds of split attention of one new token for each request.

    Blocks of requests, key heads and splits read the cache once; long contexts combine splits. In latent attention all
    heads meet one compressed key and value for each token. `hiding` says how far work hides the launch.
    """
    width: float
    if isinstance(op, LatentDecodeAttention):
        num_kv_heads, seen_tokens, width = 1, op.context_tokens, op.kv_lora_rank + op.rope_head_dim / 2
    else:
        num_kv_heads, seen_tokens, width = op.num_kv_heads, op.seen_tokens, op.head_dim
    blocks = op.batch * num_kv_heads
    per_block = c["block_us"] * US * np.maximum(blocks / on.num_sms, 1.0)
    combine = c["chain_us"] * US * np.log2(1.0 + seen_tokens / 64.0)
    padded_flops = 4.0 * blocks * np.maximum(op.num_heads / num_kv_heads, c["tile_rows"]) * seen_tokens * width
    compute = padded_flops / (on.flops_per_s * c["compute_efficiency"])
    streamed = soft_max(memory_seconds(op.num_bytes, on, c), compute, c["overlap"])
    work = combine + soft_max(streamed, per_block, c["overlap"])
    return soft_max(c["launch_us"] * US, work, c["hiding"])


def sparse_latent_seconds(op: SparseLatent | CompressedCore | BlockSparseCore, on: Machine, c: Coefficients) -> Size:
    """Return the seconds of a chain of small kernels, of the choice of keys for each query (`query_us`), and of the
    products, whose tiles of attention have at least `tile_rows` heads."""
    padding = np.maximum(c["tile_rows"] / op.num_heads, 1.0) - 1.0
    flops = op.flops + padding * op.kept_pairs * op.flops_per_kept_pair
    compute = flops / (on.flops_per_s * c["compute_efficiency"])
    chosen = c["query_us"] * US * op.num_queries
    work = chosen + soft_max(compute, memory_seconds(op.num_bytes, on, c), c["overlap"])
    return c["chain_of_kernels_us"] * US + work


def gated_delta_seconds(op: GatedDelta, on: Machine, c: Coefficients) -> Size:
    """Return the seconds of convolution and delta rule: chunks of one sequence wait for each other."""
    chunks = np.maximum(np.ceil(op.num_tokens / 64.0), 1.0)
    waves = np.maximum(op.batch * op.num_value_heads / on.num_sms, 1.0)
    chain = chunks * c["chunk_us"] * US * (1 + c["wave_cost"] * (waves - 1))
    return c["launch_us"] * US + soft_max(memory_seconds(op.num_bytes, on, c) * c["passes"], chain, c["overlap"])


def convolution_seconds(op: CausalConvolution, on: Machine, c: Coefficients) -> Size:
    """Return the seconds of a short convolution: a block of threads for each channel of each sequence, or its bytes.

    In decode a block has a thread for each of 64 channels (`causal_conv1d_update.cu` of Dao-AILab/causal-conv1d 1.5).
    """
    blocks = op.batch * op.num_channels / (64.0 if op.decode else 1.0)
    waves = blocks / on.num_sms * c["block_us"] * US
    return c["launch_us"] * US + soft_max(memory_seconds(op.num_bytes, on, c), waves, c["overlap"])


def elementwise_seconds(op: ops.Elementwise | ops.HyperConnection, on: Machine, c: Coefficients) -> Size:
    """Return the seconds of a kernel that streams its bytes."""
    return c["launch_us"] * US + memory_seconds(op.num_bytes, on, c)


def token_filter_seconds(op: TokenFilter, on: Machine, c: Coefficients) -> Size:
    """Return the seconds of a filter by top-k and top-p.

    A row's block of threads waits `latency_ns` for each token of the vocabulary once, and `wave_us` and `wave_ns` in
    every wave of rows over the multiprocessors; `logit_bytes` are moved for each logit.
    """
    waves = np.maximum(op.rows / on.num_sms, 1.0)
    once_us = c["launch_us"] + op.vocabulary * c.get("latency_ns", 0.0) * 1e-3
    waves_us = waves * (c.get("wave_us", 0.0) + op.vocabulary * c.get("wave_ns", 0.0) * 1e-3)
    num_bytes = op.rows * op.vocabulary * c.get("logit_bytes", 0.0)
    return (once_us + waves_us) * US + num_bytes / (on.bytes_per_s * c.get("memory_efficiency", 1.0))


def compression_seconds(op: Compression, _on: Machine, c: Coefficients) -> Size:
    """Return the seconds of a block of threads that reads its tokens in turn, whatever else runs beside it."""
    return c["launch_us"] * US + op.num_tokens * c["latency_ns"] * 1e-9 + 0.0 * op.rows


Closed = Callable[[Any, Machine, Coefficients], Size]

FORMS: dict[str, Closed] = {
    "gemm": gemm_seconds,
    "experts": experts_seconds,
    "prefill_attention": prefill_seconds,
    "encoder_attention": lambda op, on, c: prefill_seconds(op.as_prompts, on, c),
    "latent_prefill_attention": prefill_seconds,
    "decode_attention": decode_seconds,
    "latent_decode_attention": decode_seconds,
    "sparse_latent_prefill": sparse_latent_seconds,
    "sparse_latent_decode": sparse_latent_seconds,
    "compressed_prefill": sparse_latent_seconds,
    "compressed_decode": sparse_latent_seconds,
    "block_sparse_prefill": sparse_latent_seconds,
    "block_sparse_decode": sparse_latent_seconds,
    "gated_delta": gated_delta_seconds,
    "kimi_delta": gated_delta_seconds,
    "causal_convolution": convolution_seconds,
    "elementwise": elementwise_seconds,
    "hyper_connection": elementwise_seconds,
    "token_filter": token_filter_seconds,
    "compression": compression_seconds,
}
"""Kind of operator -> its closed form; collectives depend on links, see `collective_seconds`."""

UNFITTED_ERROR = 0.6
"""Relative error of `unfitted_seconds`. On kinds that were measured on seven devices, its median is 0.49 (Mamba-2's
convolution in decode), 0.51 (Gated DeltaNet in prefill) and 0.80 (the convolution in prefill)."""

BORROWED_ERROR = 0.25
"""Relative error of a roofline with another format's coefficients: the median on TensorRT-LLM's products of int4 and
int8 weights on A100, with the coefficients of bf16 and fp8, is 0.25 and 0.26."""


def has_closed_form(op: ops.Op) -> bool:
    """Whether the kind of `op` has a closed form with coefficients fitted to measurements."""
    return op.kind in FORMS or isinstance(op, ops.Collective)


def unfitted_seconds(op: ops.Op, on: Machine, c: Coefficients) -> Size:
    """Return the seconds of a kind without a closed form: its launches, then the longer of arithmetic at the peak rate
    and bytes as elementwise kernels stream them.
    """
    work = np.maximum(op.flops / on.flops_per_s, memory_seconds(op.num_bytes, on, c))
    return op.num_kernels * c["launch_us"] * US + work


def family(device: Device) -> str:
    """Return the family of devices with the same kernels: an architecture, with or without a scale-up network.

    Parts of one name may be different silicon (Blackwell's sm_100 and sm_120).
    """
    return f"{device.architecture} {board(device)}"


def is_measured(device: Device) -> bool:
    """Whether operators of a device of the same architecture were measured, whose kernels the closed forms know."""
    families = {name for fit in fits(ops.Gemm.kind).values() for name in fit.by_family}
    return any(name.startswith(f"{device.architecture} ") for name in families)


def board(device: Device) -> str:
    """Say whether a device has a scale-up network; others have higher clocks and smaller memory systems."""
    return "with scale-up" if device.scale_up_bytes_per_s else "without scale-up"


@dataclass(frozen=True)
class RooflineFit:
    """Coefficients of one class of operators, and their error."""

    coefficients: Coefficients
    by_family: Mapping[str, Coefficients]
    """Coefficients by `family` or, for families that nobody measured, by `board`."""

    def on(self, device: Device) -> Coefficients:
        of_family = self.by_family.get(family(device)) or self.by_family.get(board(device), {})
        return {**self.coefficients, **of_family}

    median_error: float
    """Median |predicted / measured - 1| on devices that the fit did not see."""
    fitted_on: str


@cache
def fits(kind: str) -> Mapping[str, RooflineFit]:
    """Return the shipped fits of a kind: variant -> fit; InputError where the shipped file is missing or broken."""
    raw = read_yaml(_FOLDER / f"{KINDS['borrowed_fits'].get(kind, kind)}.yaml")
    return {
        name: RooflineFit(
            fit["coefficients"], fit.get("by_family", {}), float(fit["median_error_unseen"]), str(fit["fitted_on"])
        )
        for name, fit in raw["variants"].items()
    }


def fit_for(op: ops.Op) -> RooflineFit:
    """Return the shipped fit of the class of `op`."""
    known = fits(op.kind if has_closed_form(op) else ops.Elementwise.kind)
    name = op.variant
    while name not in known:
        name = KINDS["nearest_variants"].get(name, next(iter(known)))
    fit = known[name]
    if name == op.variant or getattr(op, "format", Format.FP32) in (Format.FP32, Format.TF32):
        return fit  # fp32 shares bf16's launches and memory, and has arithmetic of its own (`_simt_seconds`)
    error = max(fit.median_error, BORROWED_ERROR)
    return replace(fit, fitted_on=f"{fit.fitted_on}, of {name} in place of {op.variant}", median_error=error)


def collective_seconds(op: ops.Collective, device: Device, node: Node | None, c: Coefficients) -> Size:
    """Return the alpha-beta form of a collective: steps that wait for each other, then bytes over its links.

    Within a node the link is `node.scale_up`; across nodes the bytes that leave a device also pass `node.scale_out`
    (hierarchical algorithm: inside, then between equal ranks of all nodes), which adds its own seconds. InputError
    where it spans nodes, and the node has no link to others.
    """
    inside = op.num_ranks // max(op.span_nodes, 1)
    up_rate = scale_up_bytes_per_s(inside, device, node)
    seconds: Size = 0.0
    if inside > 1:
        local = replace(op, num_ranks=inside, span_nodes=1)
        start = c["launch_us"] * US + c["step_us"] * US * (inside - 1)
        # 0 to 1 as a message grows past 10 us of the link's rate, where libraries switch to bulk protocols.
        ramp = local.num_bytes / (local.num_bytes + up_rate * 10 * US)
        seconds = start + local.num_bytes / (up_rate * c["link_efficiency"]) + c["ramp_us"] * US * ramp
    if op.span_nodes > 1:
        out = node.scale_out if node else None
        if out is None:
            name = node.name if node else device.name
            raise InputError(f"{op.op} over {op.span_nodes} nodes needs a link between nodes, which {name} lacks")
        shared = 1 if op.op in ("all_to_all", "send_recv") else inside
        across = replace(op, message_bytes=op.message_bytes / shared, num_ranks=op.span_nodes, span_nodes=1)
        start = c["launch_us"] * US + out.latency_s * np.log2(op.span_nodes) * 2
        seconds = seconds + start + across.num_bytes / (out.bytes_per_s * c["link_efficiency"])
    return seconds


def scale_up_bytes_per_s(num_ranks: int, device: Device, node: Node | None) -> float:
    """Return the rate between `num_ranks` devices of a node: through the host where their NVLink groups are smaller, by
    the links to each other where each has one to every other.
    """
    if node is None:
        return device.scale_up_bytes_per_s or PCIE_BYTES_PER_S
    share = (num_ranks - 1) / (node.num_devices - 1) if meets_all(node) else 1.0
    return node.link_among(num_ranks).bytes_per_s * share


def has_own_links(op: ops.Collective, device: Device, node: Node | None) -> bool:
    """Return whether the ranks inside a node meet over the device's own links (NVLink, xGMI) and not over PCIe."""
    if node is None or device.scale_up_bytes_per_s is None:
        return True
    link = node.link_among(op.num_ranks // max(op.span_nodes, 1))
    return link is node.scale_up and link.bytes_per_s > device.scale_up_bytes_per_s / 2


CPU = "cpu"
"""Architecture of a processor: the closed forms, whose tiles and waves are those of GPUs, do not hold for it."""

CPU_CALL_US = 10.0
"""Time of one call from eager torch; the smallest operators that were measured on an AMD EPYC took 20 to 60 us."""

CPU_MEDIAN_ERROR = 0.7
"""Median error of `plain_seconds` on an AMD EPYC with one thread: 10% on matrix products of vLLM and 46% on torch's;
attention and elementwise operators take two to four times as long."""


def plain_seconds(op: ops.Op, on: Machine) -> Size:
    """Return arithmetic at the peak rate, then bytes at the memory's rate, and a call: no tiles, no waves.

    Two roofs that do not overlap (Williams, Waterman and Patterson, CACM 2009, figure 1, without its bound).
    """
    return CPU_CALL_US * US + op.flops / on.flops_per_s + op.num_bytes / on.bytes_per_s


SERIAL_STEP_US = 2.17
"""Time of one step of 128 of k in AITER's Triton kernel for block-scaled products with its default configuration on
CDNA3 (tiles of 128 x 128, k in one piece): 122 us for k of 7,168, 39 for 2,304 and 34 for 2,048 with 64 rows on MI325X
(SemiAnalysisAI/InferenceX, issue 863); 117 to 129 us for 7,168 with 64 to 256 rows (ROCm/aiter, pull request 1232)."""


@dataclass(frozen=True)
class Roofline:
    """Seconds of any operator on a device from published figures and the shipped coefficients."""

    device: Device
    node: Node | None = None
    serial_products: bool = False
    """Whether block-scaled products go through k in one piece, a step after the other."""

    def seconds(self, op: ops.Op) -> Size:
        """Return the seconds of `op`; arrays along its axes give an array."""
        if isinstance(op, TokenExchange):
            return exchange_seconds(op, self.device, self.node)
        if isinstance(op, MegaMoe):
            on = self._machine(op)
            return fused_seconds(op, on.flops_per_s, on.bytes_per_s, self.device, self.node)
        if self.device.architecture == CPU and not isinstance(op, ops.Collective):
            return plain_seconds(op, machine(self.device, op.compute_format))
        if isinstance(op, ops.Collective) and not has_own_links(op, self.device, self.node):
            return self.seconds_with(
                op, fit_for(op).on(msgspec.structs.replace(self.device, scale_up_bytes_per_s=None))
            )
        coefficients = fit_for(op).on(self.device)
        if isinstance(op, Experts) and self.device.architecture in KINDS["reads_all_experts"]:
            coefficients = {**coefficients, "spread": 1e9}  # as many tokens choose every expert
        seconds = self.seconds_with(op, coefficients)
        if self.serial_products and isinstance(op, ops.Gemm) and op.format is Format.FP8_BLOCK:
            seconds = np.maximum(seconds, SERIAL_STEP_US * US * np.ceil(op.k / 128))
        return seconds

    def seconds_with(self, op: ops.Op, coefficients: Coefficients) -> Size:
        """Return the seconds of `op` with coefficients other than the shipped ones."""
        if isinstance(op, ops.Collective):
            return collective_seconds(op, self.device, self.node, coefficients)
        form = FORMS.get(op.kind, unfitted_seconds)
        return form(op, self._machine(op), coefficients)

    def _machine(self, op: ops.Op) -> Machine:
        return as_published(self.device, machine(self.device, op.compute_format), op.compute_format)
