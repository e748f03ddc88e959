"""Mixtures of experts from the tables of `aiconfigurator-core`'s layout: choice of version and kernel.

Older engine versions compute them with kernels that no table of these versions times.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.hardware import Device
from windtunnel.model import operators as ops
from windtunnel.model.exchange import DEEPEP_LOW_LATENCY, DEEPEP_NORMAL
from windtunnel.model.feed_forward.experts import Experts, MegaMoe
from windtunnel.model.precision import BITS, Format
from windtunnel.pricing.aiconfigurator.collection import (
    BALANCED,
    ENGINES,
    KERNELS,
    MOE_POINT,
    NEWEST,
    POWER_LAW,
    RANDOM,
    TEXT,
    Collection,
    Place,
    Rows,
    Texts,
)
from windtunnel.pricing.aiconfigurator.gemms import gemm_prices
from windtunnel.pricing.aiconfigurator.routing import GINI, GINI_OF_RANDOM, as_text, busiest_active, busiest_load
from windtunnel.pricing.choices import MOE_BACKENDS
from windtunnel.pricing.roofline import machine
from windtunnel.pricing.table import Floats, MeasurementTable, grouped, table_of
from windtunnel.units import version_key


def _with_shared_kernels(collection: Collection, rows: Rows, dtypes: tuple[str, ...]) -> tuple[Rows, str]:
    """Return `rows`, of shapes that they have not timed with kernels of `dtypes` no slower than another engine's, and a
    remark."""
    own = _experts_rows_of(collection, rows.place, dtypes)
    for other in _other_engines(collection, rows, dtypes):
        if own is not None:
            other = other.where(np.isnan(other.at_same_points(own, own.seconds, MOE_POINT[:-1])))
        if np.isfinite(rows.at_same_points(other, other.seconds, MOE_POINT)).any():
            remark = f"; mxfp8 kernels as in {other.place.engine} {other.place.version}"
            return rows.no_slower_than(other, MOE_POINT), remark
    return rows, ""


def _with_kernels_of_backend(collection: Collection, rows: Rows, dtypes: tuple[str, ...]) -> tuple[Rows, str]:
    """Return, with a remark, `rows` at another engine's times of the chosen backend, at the shapes that the engine's
    files time with others.

    This holds for TRTLLM-gen only, which FlashInfer ships to several engines. TensorRT-LLM's files for Blackwell time
    fp8_block experts with DeepGEMM alone. On B200 that takes 1.0 to 1.3 times as long up to 64 tokens and 0.6 times
    above 1,024, medians over shapes; eight-fold sharded experts of DeepSeek-R1 2.7 times at 4 tokens. They time nvfp4
    experts with both, but Kimi-K2's 384 with CUTLASS alone: on GB200 eight ranks' take 40 us with one token, and
    SGLang's of TRTLLM-gen half of that.
    """
    others = (backend for backend in MOE_BACKENDS if backend != "trtllm")
    foreign = np.logical_or.reduce([_is_of_backend(rows, backend) for backend in others])
    if collection.moe_backend != "trtllm" or not foreign.any():
        return rows, ""
    for other in _other_engines(collection, rows, dtypes):
        chosen = other.where(_is_of_backend(other, "trtllm"))
        if not len(chosen):
            continue
        latency = rows.at_same_points(chosen, chosen.latency, MOE_POINT)
        taken = foreign & np.isfinite(latency)
        if taken.any():
            name = f"{chosen.main_kernel} of {chosen.place.engine} {chosen.place.version}"
            merged = rows.replaced(
                latency=np.where(taken, latency, rows.latency),
                kernel=np.where(taken, len(rows.kernel_names), rows["kernel"]),
            )
            named = replace(merged, kernel_names=np.append(rows.kernel_names, name))
            return named, "" if foreign.all() else f"; {name} at other shapes"
    return rows, ""


def _other_engines(collection: Collection, rows: Rows, dtypes: tuple[str, ...]) -> Iterator[Rows]:
    """Yield the newest rows of each engine but that of `rows`."""
    for engine in ENGINES:
        if engine != rows.place.engine:
            newest = replace(collection.of(engine), version=NEWEST, moe_backend=None)
            other, _ = _experts_rows(newest, dtypes)
            if other is not None and other.place.engine == engine:
                yield other


def _is_of_backend(rows: Rows, backend: str) -> NDArray[np.bool_]:
    names = KERNELS.moe_backends.get(backend, (backend,))
    return rows.named(lambda kernel: any(name in kernel for name in names))


def _experts_rows(collection: Collection, dtypes: tuple[str, ...]) -> tuple[Rows | None, str]:
    """Return the rows of the nearest version that was measured sanely, and a remark on other versions.

    New models are measured in files of their own (TRT-LLM 1.3.0rc23 has a few shapes), and some formats in passing (one
    int4 shape in vLLM 0.22.0): a file of less than half the size of its engine's largest, and a format of less than
    half the newest version's rows, leave other shapes to the versions after it.
    """
    places = list(collection.places("moe", "moe_perf"))
    largest = {place.engine: 0 for place in places}
    for place in places:
        largest[place.engine] = max(largest[place.engine], _size(place))
    merged: Rows | None = None
    remark = ""
    for place in places:
        if merged is not None and place.engine != merged.place.engine:
            break
        rows = _experts_rows_of(collection, place, dtypes)
        if rows is None:
            continue
        newest = max(
            (other for other in places if other.engine == place.engine), key=lambda other: version_key(other.version)
        )
        later = rows if newest == place else _experts_rows_of(collection, newest, dtypes)
        slow = _too_slow(collection, *_without_backend(collection, dtypes, rows, later), dtypes)
        if slow:
            remark = remark or f"; not {place.engine} {place.version} ({rows.main_kernel}), {slow}"
            continue
        if collection.moe_backend is None and _is_slow_at_many_tokens(rows, later):
            assert later is not None
            rows = rows.no_slower_than(later, MOE_POINT)
            remark = remark or f"; no slower than {newest.version} ({later.main_kernel})"
        if later is not None and _takes_flashinfer_across_ranks(collection, place, dtypes):
            rows = _across_ranks_as(rows, later)
            if newest != place:
                remark = remark or f"; spread over ranks as in {newest.version} ({later.main_kernel})"
        merged = rows if merged is None else _completed(merged, rows)
        if _size(place) >= largest[place.engine] / 2 and (later is None or len(rows) >= len(later) / 2):
            break
    return merged, remark


def _size(place: Place) -> int:
    return (place.folder / "moe_perf.parquet").stat().st_size


def _experts_rows_of(collection: Collection, place: Place, dtypes: tuple[str, ...]) -> Rows | None:
    """Read one kernel at every point: of the chosen backend where the shape has it, else the fastest."""
    rows, texts = _sound_file(collection, place)
    words = ({"moe_dtype": dtype, "distribution": collection.expert_distribution} for dtype in dtypes)
    parts = [part for part in (rows.with_words(texts, each) for each in words) if part is not None]
    if not parts:
        return None
    every = reduce(Rows.joined, parts)
    fastest = every.fastest_kernel_only(MOE_POINT)
    if collection.moe_backend is None:
        return fastest
    is_chosen = _is_of_backend(every, collection.moe_backend)
    if not is_chosen.any():
        return fastest
    chosen = every.where(is_chosen).fastest_kernel_only(MOE_POINT)
    return _with_lacking_shapes(chosen, _at_rate_of(chosen, fastest))


def _at_rate_of(backend: Rows, others: Rows) -> Rows:
    """Return rows of other kernels, no faster than `backend` was measured to be with as many tokens for each expert.

    Its rate is that of the nearest width of an expert on a rank. vLLM's Marlin experts were timed at other shapes than
    gpt-oss's. On H100 they reach 200 Tflop/s with 150 to 290 tokens an expert, and the Triton kernels, level with them
    up to 30, 320 to 410.
    """
    alone = backend.where(backend["moe_ep_size"] == 1)
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
    latency = np.where(load >= KERNELS.many_tokens_an_expert, np.maximum(others.latency, least_s * 1e3), others.latency)
    slowed = others.replaced(latency=latency)
    if not (latency > others.latency).any():
        return slowed
    names = [f"{name}, no faster than {backend.main_kernel}" for name in others.kernel_names.tolist()]
    return replace(slowed, kernel_names=np.array(names))


def _flops(rows: Rows) -> Floats:
    num_rows = rows["num_tokens"] * rows["topk"] / rows["moe_ep_size"]
    return np.asarray(6 * num_rows * rows["hidden_size"] * _expert_width(rows))


def _tokens_per_expert(rows: Rows) -> Floats:
    return np.asarray(rows["num_tokens"] * rows["topk"] / rows["num_experts"])


def _expert_width(rows: Rows) -> Floats:
    return np.asarray(rows["inter_size"] / rows["moe_tp_size"])


def _sound_file(collection: Collection, place: Place) -> tuple[Rows, Texts]:
    """Read a file of experts without its suspect rows."""
    if place not in collection.files:
        rows, texts = place.read_file("moe_perf", MOE_POINT, ("moe_dtype", "distribution"))
        sound = ~suspect_experts(collection.roofline.device, rows, texts)
        kept = {name: (codes[sound], labels) for name, (codes, labels) in texts.items()}
        collection.files[place] = rows.where(sound), kept
    return collection.files[place]


_LAUNCHES_S = 20e-6
"""Time of the few launches around experts, which no bound of arithmetic and bytes holds."""

_SAMPLES = 7
"""Levels of the axis at which curves are compared with the bound: they are evenly spread over those of the file."""


def suspect_experts(device: Device, rows: Rows, texts: Texts) -> NDArray[np.bool_]:
    """Return a mask of the rows of `slow_curve`s in a file of experts; a curve runs along the tokens of one shape."""
    dtypes, names = texts["moe_dtype"]
    spreads, labels = texts["distribution"]
    formats = dtypes * len(labels) + spreads
    *shape_columns, num_tokens = (rows[name] for name in MOE_POINT)
    levels = np.unique(num_tokens)
    few = levels[np.linspace(0, len(levels) - 1, _SAMPLES).astype(np.intp)]
    sample = np.flatnonzero(np.isin(num_tokens, few))
    shapes = np.zeros(len(rows), dtype=np.int64)
    for column in (*shape_columns, rows["kernel"]):  # a number for each shape; int64 wraps around on purpose
        shapes = shapes * 1_000_003 + column.astype(np.int64)
    keys = shapes * (int(formats.max()) + 1) + formats
    curves, first, codes = np.unique(keys[sample], return_index=True, return_inverse=True)
    log_ratio = np.log(rows.seconds[sample] / _bound_s(device, rows.where(sample), dtypes[sample], names))
    excess = np.bincount(codes, log_ratio) / np.bincount(codes)
    of_format = formats[sample][first]
    for form in np.unique(of_format):
        excess[of_format == form] -= np.median(excess[of_format == form])
    _, shape = np.unique(shapes[sample][first], return_inverse=True)
    least = np.full(int(shape.max()) + 1, np.inf)
    np.minimum.at(least, shape, excess)
    slow = excess - np.maximum(least[shape], 0.0) > np.log(KERNELS.slow_curve)
    return np.isin(keys, curves[slow]) if slow.any() else np.zeros(len(rows), dtype=bool)


def _bound_s(device: Device, rows: Rows, dtypes: NDArray[np.intp], names: list[str]) -> Floats:
    """Return the least seconds of the rows' work on the device; `dtypes` are positions in `names`."""
    dtypes_of = KERNELS.moe_dtypes | KERNELS.moe_dtypes_fp4
    formats = {name: form for form, dtypes_of_form in dtypes_of.items() for name in dtypes_of_form}
    least = np.empty(len(rows))
    for code, name in enumerate(names):
        here = dtypes == code
        least[here] = _least_s(device, rows.where(here), formats.get(name, Format.BF16))  # bf16 where nothing reads it
    return least


def _least_s(device: Device, rows: Rows, form: Format) -> Floats:
    shape: Any = [rows[column] for column in MOE_POINT]
    hidden_size, width, num_experts, topk, tp, ep, num_tokens = shape
    experts = Experts(num_tokens, hidden_size, width, num_experts, topk, tp, ep, form)
    on = machine(device, experts.format)
    return _LAUNCHES_S + np.maximum(experts.flops / on.flops_per_s, experts.num_bytes / on.bytes_per_s)


def _without_backend(
    collection: Collection, dtypes: tuple[str, ...], rows: Rows, newest: Rows | None
) -> tuple[Rows, Rows | None]:
    """Return two versions' rows of no backend in particular: one that is named slows down what it was not timed for."""
    if collection.moe_backend is None:
        return rows, newest
    every = [
        None if part is None else _experts_rows_of(replace(collection, moe_backend=None), part.place, dtypes)
        for part in (rows, newest)
    ]
    return every[0] or rows, every[1]


def _too_slow(collection: Collection, rows: Rows, newest: Rows | None, dtypes: tuple[str, ...]) -> str:
    """Return why rows are not what the engine serves; empty where they may be."""
    collection = replace(collection, moe_backend=None)
    plain = None if "bfloat16" in dtypes else _experts_rows_of(collection, rows.place, ("bfloat16",))
    ratio = _median_ratio(rows, plain)
    if ratio > KERNELS.slower_than_bf16:
        return f"{ratio:.1f} times as slow as its bf16"
    ratio = _median_ratio(rows, newest)
    if newest is not None and ratio > KERNELS.slower_than_newest:
        return f"{ratio:.1f} times as slow as {newest.place.version}"
    if collection.expert_distribution != BALANCED:
        balanced = _experts_rows_of(replace(collection, expert_distribution=BALANCED), rows.place, dtypes)
        ratio = _median_ratio(rows.where(rows["num_tokens"] == 1), balanced)
        if ratio > KERNELS.skewed_at_one_token:
            return f"one token takes it {ratio:.1f} times as long as with balanced experts"
    return ""


def _is_slow_at_many_tokens(rows: Rows, newest: Rows | None) -> bool:
    """Whether `slower_than_newest` holds beyond `few_tokens`.

    It holds for vLLM 0.19.0's and 0.22.0's fp8_block on B200 (1.90; 1.25 to 1.31 below): they were timed with Triton's
    kernel, and servers take FlashInfer's at every size unless they are told not to (vllm-project/vllm, pull request
    37056). MiniMax-M2.5 follows the one in 0.19, the other in 0.17 with FlashInfer's off. All others are at most 1.78.
    """
    many = rows.where(rows["num_tokens"] > KERNELS.few_tokens)
    return _median_ratio(many, newest) > KERNELS.slower_than_newest


def _takes_flashinfer_across_ranks(collection: Collection, place: Place, dtypes: tuple[str, ...]) -> bool:
    since = KERNELS.flashinfer_across_ranks_since.get(collection.engine)
    return (
        since is not None
        and collection.engine == place.engine
        and collection.moe_backend is None
        and collection.roofline.device.architecture == "hopper"
        and "fp8_block" in dtypes
        and version_key(collection.version) >= version_key(since)
    )


def _lacks_triton_kernels(collection: Collection, op: Experts) -> bool:
    since, device = KERNELS.triton_kernels_since.get(collection.engine, "0"), collection.roofline.device
    is_older = version_key(collection.version) < version_key(since)
    return is_older and op.format is Format.MXFP4 and device.architecture == "hopper" and collection.moe_backend is None


def _across_ranks_as(rows: Rows, other: Rows) -> Rows:
    """Return `rows`, where experts are spread over ranks with the times of FlashInfer's CUTLASS kernels in `other`."""
    known = other.where(other.named(lambda kernel: "flashinfer_cutlass" in kernel))
    latency = rows.at_same_points(known, known.latency, MOE_POINT)
    taken = (rows["moe_ep_size"] > 1) & np.isfinite(latency)
    return rows.replaced(latency=np.where(taken, latency, rows.latency))


def _median_ratio(rows: Rows, other: Rows | None) -> float:
    """Return the median ratio of seconds to those of `other` at common points; 0 where there are none."""
    if other is None:
        return 0.0
    ratio = rows.seconds / rows.at_same_points(other, other.seconds, MOE_POINT)
    known = np.isfinite(ratio)
    return float(np.median(ratio[known])) if known.any() else 0.0


def _with_lacking_shapes(rows: Rows, others: Rows) -> Rows:
    lacking = np.isnan(others.at_same_points(rows, np.ones(len(rows)), MOE_POINT[:-1]))
    return rows.joined(others.where(lacking))


def _completed(rows: Rows, others: Rows) -> Rows:
    """Return `rows` with the shapes that only `others`, of another version, has."""
    place = replace(rows.place, version=f"{rows.place.version} and {others.place.version}")
    return replace(_with_lacking_shapes(rows, others), place=place)


def _as_served(collection: Collection, op: Experts, rows: Rows) -> tuple[Rows, str]:
    """Return experts' rows with the times of the kernels that the collection's version runs, and a remark.

    Rows stay as they are where that version runs what was measured, or where a backend is named.
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


def _gini(collection: Collection) -> float:
    return GINI_OF_RANDOM if collection.expert_distribution == RANDOM else GINI


def _in_padded_blocks(collection: Collection, rows: Rows) -> tuple[Rows, str]:
    """Return block-scaled experts in whole blocks of rows for each expert, DeepGEMM's contiguous layout.

    vLLM's buffer has a row for every choice of every token of the group and, for each expert of the rank, a block less
    one row (0.11.1 `compute_aligned_M` of `fused_moe/deep_gemm_utils.py`). Both GEMMs and the activation work on all of
    it, as blocks without tokens count as those of expert 0. Reading weights overlaps only in part with computing, as
    blocks change experts: the root of the sum of the squares. Small kernels count tokens, clear and write the experts'
    numbers, and transpose both inputs' scales. SGLang 0.5.10's table of these kernels (`wideep_context_moe`, 16 to 128
    of DeepSeek's experts on a rank), which has some of its host's time in it, takes 8% less to 19% more.
    """
    device = collection.roofline.device
    if device.architecture not in KERNELS.padded_gap_us or not device.scale_up_bytes_per_s:
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
        # Tables' products quantise all rows of their input; the first one's is quantised before blocks pad it.
        computing[here] -= 1e-12 * KERNELS.quantise_ps[device.architecture] * k * (padded - tokens)[here]
    on = machine(device, Format.FP8_BLOCK)
    expert_bytes = 3 * hidden * width * BITS[Format.FP8_BLOCK] / 8
    reading = busiest_active(tokens, experts, topk, ep, _gini(collection)) * expert_bytes / on.bytes_per_s
    streamed = (6 * width * padded, 2 * hidden * tokens * topk, 2 * hidden * tokens * (topk + 1))
    small = (np.zeros(len(rows)),) * KERNELS.padded_small_kernels
    moving = sum(collection.roofline.seconds(ops.Elementwise("copy", size, 1.0)) for size in (*streamed, *small))
    num_kernels = 4 + len(streamed) + len(small)  # both products quantise their input first
    gaps_us = (num_kernels - 1) * KERNELS.padded_gap_us[device.architecture]
    waiting_us = gaps_us + KERNELS.padded_beside_us + KERNELS.padded_choice_us * topk / ep
    latency = 1e3 * (np.hypot(computing, reading) + moving) + 1e-3 * waiting_us
    latency = np.where(tp < KERNELS.padded_below_tp, latency, rows.latency)
    return rows.replaced(latency=latency), f"; as DeepGEMM's blocks of {block} rows for each expert"


def _in_small_tiles(collection: Collection, rows: Rows) -> tuple[Rows, str]:
    """Return bf16 experts of the Triton kernel, at the rate of its former default tiles.

    SGLang's kernel has the same two tiles for shapes that nobody tuned. What it loses against the tiles that vLLM has
    taken since is read off the two engines' tables of the reference system, where a tile holds all rows of an expert.
    SGLang's experts of several ranks seem to hold every choice of every token on the rank (on H100 a rank with 16 of
    128 experts takes 320, 336, 352, 546 and 845 us with 32 to 512 tokens): where those fill more than a tile, what one
    rank with all experts loses counts.
    """
    is_triton = rows.named(lambda name: any(part in name for part in KERNELS.moe_backends["triton"]))
    words = {"moe_dtype": "bfloat16", "distribution": POWER_LAW}
    former, since = (_reference_rows(collection, engine, version, words) for engine, version in KERNELS.tiles_of)
    if former is None or since is None:
        return rows, ""
    lost = former.seconds / former.at_same_points(since, since.seconds, MOE_POINT)
    rows_an_expert = former["num_tokens"] * former["topk"] * former["moe_ep_size"] / former["num_experts"]
    is_sound = (former["moe_ep_size"] == 1) | (rows_an_expert <= KERNELS.tile_rows)
    kept = former.where(is_sound & np.isfinite(lost)).replaced(latency=lost[is_sound & np.isfinite(lost)])
    one_rank = rows.replaced(moe_ep_size=np.ones(len(rows)))
    alone = np.where(rows["moe_tp_size"] == 1, _along_tokens(one_rank, kept), 1.0)
    factor = np.where(is_triton, np.maximum(np.maximum(_along_tokens(rows, kept), alone), 1.0), 1.0)
    return rows.replaced(latency=rows.latency * factor), "; in the default tiles of before"


def _along_tokens(rows: Rows, known: Rows) -> Floats:
    """Return what `known` has in place of latencies at each of `rows`, along the tokens of its shape; 1 without one."""
    values = np.ones(len(rows))
    by_shape = {_shape_at(known, here[0]): here for here in grouped([known[name] for name in MOE_POINT[:-1]])}
    for here in grouped([rows[name] for name in MOE_POINT[:-1]]):
        curve = by_shape.get(_shape_at(rows, here[0]))
        if curve is not None:
            curve = curve[np.argsort(known["num_tokens"][curve])]
            values[here] = np.interp(rows["num_tokens"][here], known["num_tokens"][curve], known.latency[curve])
    return values


def _shape_at(rows: Rows, place: Any) -> tuple[float, ...]:
    return tuple(float(rows[name][place]) for name in MOE_POINT[:-1])


def _reference_rows(collection: Collection, engine: str, version: str, words: dict[str, str]) -> Rows | None:
    folder = collection.system.parent / KERNELS.tiles_on / "moe" / engine / version
    if not (folder / "moe_perf.parquet").is_file():
        return None
    return Place(folder, engine, version).read_rows("moe_perf", MOE_POINT, words)


def _measured_rows(collection: Collection, op: Experts) -> tuple[Rows | None, str]:
    """Return the rows of the nearest version that was measured sanely, of the kernels that it runs, and a remark."""
    dtypes = KERNELS.moe_dtypes.get(op.format, ())
    if "fp4" in collection.roofline.device.peak_flops_per_s:
        dtypes = KERNELS.moe_dtypes_fp4.get(op.format, dtypes)
    rows, remark = _experts_rows(collection, dtypes)
    if rows is None:
        return None, remark
    if op.format in KERNELS.shared_moe_dtypes and "fp4" in collection.roofline.device.peak_flops_per_s:
        rows, shared = _with_shared_kernels(collection, rows, KERNELS.shared_moe_dtypes[op.format])
        remark += shared
    rows, shared = _with_kernels_of_backend(collection, rows, dtypes)
    return rows, remark + shared


def _rows_with_chance(collection: Collection, op: Experts) -> tuple[Rows | None, str]:
    """Return `_measured_rows` as real text or random tokens choose experts; the latter by a power law on one rank."""
    rows, remark = _measured_rows(replace(collection, expert_distribution=POWER_LAW), op)
    even, _ = _measured_rows(replace(collection, expert_distribution=BALANCED), op)
    if rows is None or even is None:
        return rows, remark
    rows, even = without_stubs(rows, even), without_stubs(even, rows)
    even = even.replaced(latency=as_sharded(even))
    redundant = collection.num_redundant_experts
    if collection.expert_distribution == TEXT:
        return _with_lacking_shapes(as_text(even, rows, redundant), rows), remark
    spread = as_text(even.where(even["moe_ep_size"] > 1), rows, redundant, GINI_OF_RANDOM)
    return _with_lacking_shapes(rows.where(rows["moe_ep_size"] == 1).joined(spread), rows), remark


def without_stubs(rows: Rows, others: Rows) -> Rows:
    """Return `rows` without shapes that `others` has more than twice as many points of: their measurement broke off.

    vLLM 0.24's file for GB200 has one token alone, evenly spread, of Nemotron 3 Nano's experts in four slices.
    """
    names = MOE_POINT[:-1]
    sizes = {_shape_at(others, here[0]): len(here) for here in grouped([others[name] for name in names])}
    kept = np.ones(len(rows), dtype=bool)
    for here in grouped([rows[name] for name in names]):
        kept[here] = 2 * len(here) >= sizes.get(_shape_at(rows, here[0]), 0)
    return rows.where(kept)


def as_sharded(even: Rows) -> Floats:
    """Return the latencies of whole experts that have few tokens each, where slices of them on as many ranks take far
    less, as those of the slices.

    Evenly spread tokens make every rank read as many bytes both ways, and whole experts have the longer products. Files
    of TensorRT-LLM 1.3, SGLang 0.5.14 and vLLM 0.24 give DeepSeek's 256 experts on eight B200 or GB200 36 to 50 us
    with one to four tokens whole and 20 to 28 us in slices; vLLM 0.19, and all of them for Kimi-K2's 384, are level.
    """
    tp, ep, tokens = (even[name] for name in ("moe_tp_size", "moe_ep_size", "num_tokens"))
    slices = even.replaced(moe_tp_size=tp * ep, moe_ep_size=np.ones(len(even)))
    took = slices.at_same_points(even, even.latency, MOE_POINT)
    choices = tokens * even["topk"]
    is_few = (choices >= ep) & (choices <= even["num_experts"])
    is_slow = is_few & (even.latency > KERNELS.whole_over_slices * took)
    return np.where(is_slow, took, even.latency)


_WIDE_TABLES = {DEEPEP_LOW_LATENCY: "wideep_generation_moe_perf", DEEPEP_NORMAL: "wideep_context_moe_perf"}


def _deepep_rows(collection: Collection, op: Experts) -> Rows | None:
    """Return experts behind DeepEP's kernels: DeepGEMM's masked layout for low-latency ones, its contiguous layout for
    normal ones (SGLang 0.5 `layers/moe/ep_moe/layer.py`). Even loads are timed; the busiest rank computes as many
    tokens as an even load of more has."""
    words = {"moe_dtype": str(op.format), "distribution": "uniform"}
    if collection.deepep is None:
        return None
    rows = collection.first_rows("moe", _WIDE_TABLES[collection.deepep], MOE_POINT, [words])
    if rows is None:
        other = KERNELS.wide_stand_ins.get(op.format)
        near = None if other is None else _deepep_rows(collection, replace(op, format=other))
        if other is None or near is None:
            return None
        least = (_least_s(collection.roofline.device, near, form) for form in (op.format, other))
        names = np.array([f"{name}, whose {other} stands in for {op.format}" for name in near.kernel_names])
        return replace(near.replaced(latency=near.latency * np.divide(*least)), kernel_names=names)
    *_, num_experts, topk, _, ep, tokens = (rows[name] for name in MOE_POINT)
    load = busiest_load(tokens, num_experts, topk, ep, collection.num_redundant_experts, _gini(collection))
    return rows.replaced(num_tokens=tokens / load)


DEVICES_PER_SERVER = 8
"""Of a server that shares its devices with `KERNELS.same_silicon`."""


def experts_table(collection: Collection, op: Any) -> MeasurementTable | None:
    """Return mixtures of experts, one kernel at every point, of the nearest version that was measured sanely."""
    backend = "marlin" if _lacks_triton_kernels(collection, op) else collection.moe_backend
    collection = replace(collection, files={}, moe_backend=backend)
    wide = _deepep_rows(collection, op)
    if wide is not None:
        return _table_of(op, wide, collection.label("moe", wide))
    read = _rows_with_chance if collection.expert_distribution in (TEXT, RANDOM) else _measured_rows
    rows, remark = read(collection, op)
    if rows is None:
        return None
    rows, older = _as_served(collection, op, rows)
    return _table_of(op, rows, collection.label("moe", rows) + remark + older)


def mega_moe_table(collection: Collection, op: MegaMoe) -> MeasurementTable | None:
    """Return the kernel of DeepGEMM that exchanges tokens and computes experts.

    Evenly spread tokens were timed. Real text's follow from them by the law of `as_text`, in prompts too: with a power
    law in their place, 32 ranks take three times as long, which no placement of experts leaves.
    """
    if op.format is not Format.MXFP4:
        return None
    words = {"moe_dtype": "w4a8_mxfp4_mxfp8", "distribution": BALANCED}
    systems = (collection.system.name, KERNELS.same_silicon.get(collection.system.name))
    found: list[Rows] = []
    labels: list[str] = []
    for name in (name for name in systems if name is not None):
        system = replace(collection, system=collection.system.with_name(name))
        rows = system.first_rows("moe", "dsv4_megamoe_module_perf", MOE_POINT, [words])
        if rows is not None:
            is_near = rows["moe_ep_size"] <= (DEVICES_PER_SERVER if systems[1] else math.inf)
            found.append(rows.where(is_near))
            labels.append(system.label("moe", rows))
    if not found:
        return None
    rows = reduce(Rows.joined, found)
    rows = rows.replaced(num_tokens=rows["num_tokens"] * rows["moe_ep_size"])  # files have those of one rank
    unknown = rows.where(np.zeros(len(rows), dtype=bool))
    if collection.expert_distribution != BALANCED:
        rows = as_text(rows, unknown, collection.num_redundant_experts, _gini(collection))
    return _table_of(op, rows, " and ".join(labels), ranks_per_node=rows["moe_ep_size"])


def _table_of(op: Experts, rows: Rows, label: str, **further: Floats) -> MeasurementTable:
    is_gated = ~np.isin(rows["inter_size"] * 1000 + rows["topk"], KERNELS.not_gated)
    return table_of(
        op,
        rows.seconds,
        label,
        **rows.columns,
        intermediate_size=rows["inter_size"],
        experts_per_token=rows["topk"],
        tp=rows["moe_tp_size"],
        ep=rows["moe_ep_size"],
        gated=is_gated.astype(np.float64),
        **further,
    )
