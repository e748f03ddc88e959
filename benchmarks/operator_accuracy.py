"""How far estimates are from measured operators that were left out.

    python benchmarks/operator_accuracy.py            tables in Markdown
    python benchmarks/operator_accuracy.py --json     the same as JSON
    python benchmarks/operator_accuracy.py --fit      fit the roofline again and write src/windtunnel/catalog/roofline
    python benchmarks/operator_accuracy.py --page docs/reference/operator-accuracy.md      write that page's tables

Interpolation leaves out, in turn, one point inside a measured curve, alone and with both its neighbours, the last point
of a curve, a size along the axis (out of all shapes), and a whole shape (of a GEMM its n and its k everywhere), and
predicts it from the rest of the table. The roofline is fitted on all devices but one and predicts that one. Errors are
|predicted / measured - 1|.

Three things, none of which looks at a prediction, say how much of an error inside a curve the measurements bring. A
point that took longer or shorter than both its neighbours is out of reach of every rising curve through them. Between
neighbours whose measured times over the roofline differ, another kernel or protocol took over, and nothing says where.
And a second collection of the same kernels on the same silicon says how well the shape of a curve repeats.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from roofline_fit import NAMES, Sample, fit_family, fit_roofline, sample, without
from windtunnel import catalog
from windtunnel.model import operators as ops
from windtunnel.model.attention.block_sparse import BlockSparseDecode, BlockSparsePrefill
from windtunnel.model.attention.compressed import CompressedDecode, CompressedPrefill
from windtunnel.model.attention.gated_delta import GatedDelta
from windtunnel.model.attention.grouped_query import DecodeAttention, EncoderAttention, PrefillAttention
from windtunnel.model.attention.kimi_delta import KimiDelta
from windtunnel.model.attention.latent import (
    LatentDecodeAttention,
    LatentPrefillAttention,
    SparseLatentDecode,
    SparseLatentPrefill,
)
from windtunnel.model.attention.mamba2 import CausalConvolution
from windtunnel.model.feed_forward.experts import Experts, MegaMoe
from windtunnel.model.operators import HyperConnection
from windtunnel.model.precision import Format
from windtunnel.pricing.aiconfigurator.collection import Collection
from windtunnel.pricing.aiconfigurator.estimator import PACKAGE, systems_folder, table_for
from windtunnel.pricing.estimator import LEFT_OUT_FILE, LeftOut, TableModel
from windtunnel.pricing.roofline import KINDS, Roofline, RooflineFit, board, family
from windtunnel.pricing.table import Floats, MeasurementTable

CATALOG = Path(__file__).resolve().parents[1] / "src" / "windtunnel" / "catalog" / "roofline"

COLLECTIONS = (
    ("a100_sxm", "vllm", "0.14.0"),
    ("h100_sxm", "vllm", "0.24.0"),
    ("h100_sxm", "trtllm", "1.3.0rc20"),
    ("h200_sxm", "sglang", "0.5.14"),
    ("b200_sxm", "vllm", "0.24.0"),
    ("gb200", "trtllm", "1.3.0rc20"),
    ("l40s", "vllm", "0.24.0"),
)
"""What interpolation is tested on: every engine, and devices from 2020 to 2025."""

FITTED = ("a100_sxm", "h100_sxm", "h200_sxm", "b200_sxm", "b300_sxm", "gb200", "l40s", "rtx_pro_6000_server")
"""Devices that the roofline is fitted on. A100 was measured with SGLang on the same grid as the others with vLLM."""

ROWS_PER_DEVICE = 500

NEIGHBOURS_TOO = "inside, neighbours too"

MIN_POINTS = 10
MIN_CURVE = 4
POINTS_PER_SITE = 4

SAME_SILICON = {"h100_sxm": "h200_sxm", "h200_sxm": "h100_sxm", "b200_sxm": "gb200", "gb200": "b200_sxm"}
"""Systems with the same die; H200's memory is another, which bends no curve between neighbours by much."""

STEP = 1.2
"""Between neighbours whose times over the roofline differ by more, another kernel is taken to have its turn."""

MANY = 0.1
"""The error that one point in ten may exceed."""

Class = tuple[str, str]
"""Kind of operator, and its variant (a format, a collective, a phase)."""


def probes() -> Iterator[tuple[Class, ops.Op]]:
    """Every class of operators, with an operator that names its table."""
    for weights in (Format.BF16, Format.FP8, Format.FP8_BLOCK, Format.NVFP4):
        yield ("gemm", weights.value), ops.Gemm(1, 1, 1, weights)
    for weights in (Format.BF16, Format.FP8, Format.FP8_BLOCK, Format.NVFP4, Format.INT4, Format.MXFP4):
        yield ("experts", weights.value), Experts(1, 1, 1, 1, 1, format=weights)
    yield ("mega_moe", "mxfp4"), MegaMoe(1, 1, 1, 1, 1, format=Format.MXFP4)
    for kv in (Format.BF16, Format.FP8):
        yield ("prefill_attention", kv.value), PrefillAttention(1, 1, 1, 1, 1, kv_format=kv)
        yield ("decode_attention", kv.value), DecodeAttention(1, 1, 1, 1, 1, kv_format=kv)
        yield ("latent_prefill_attention", kv.value), LatentPrefillAttention(1, 1, 1, 1, 1, kv_format=kv)
        yield ("latent_decode_attention", kv.value), LatentDecodeAttention(1, 1, 1, 1, 1, kv_format=kv)
        latent = (1, 1, 1, 512, 64, 128, 128, 7168, 1536, 64, 128, 2048, kv)
        yield ("sparse_latent_prefill", kv.value), SparseLatentPrefill(*latent)
        yield ("sparse_latent_decode", kv.value), SparseLatentDecode(*latent)
        yield ("block_sparse_prefill", kv.value), BlockSparsePrefill(1, 1, 1, 1, 128, 128, 2048, kv)
        yield ("block_sparse_decode", kv.value), BlockSparseDecode(1, 1, 1, 1, 128, 128, 2048, kv)
    yield ("encoder_attention", "any"), EncoderAttention(1, 1, 1, 1)
    compressed = (1, 1, 1, 512, 4096, 1024, 1024, 1, 128, 64, 128, 512, 4, Format.FP8)
    yield ("compressed_prefill", "fp8"), CompressedPrefill(*compressed)
    yield ("compressed_decode", "fp8"), CompressedDecode(*compressed)
    for part in ("pre", "post"):
        yield ("hyper_connection", part), HyperConnection(part, 1, 1, 1)
    for decode in (False, True):
        yield ("gated_delta", "decode" if decode else "prefill"), GatedDelta(1, 1, 1, 1, 1, 1, 1, decode)
        yield ("kimi_delta", "decode" if decode else "prefill"), KimiDelta(1, 1, 1, 1, 1, 1, 1, decode)
        yield ("causal_convolution", "decode" if decode else "prefill"), CausalConvolution(1, 1, 1, 1, decode)
    yield ("elementwise", "any"), ops.Elementwise("any", 1, 1)
    for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        yield ("collective", name), ops.Collective(name, 1, 2)


@dataclass(frozen=True)
class Score:
    """Errors of one class of operators."""

    operators: str
    left_out: str
    num_points: int
    median: float
    p90: float


def score(operators: str, left_out: str, errors: list[float]) -> Score:
    found = np.array(errors)
    return Score(operators, left_out, len(found), float(np.median(found)), float(np.quantile(found, 0.9)))


def roofline_of(system: str) -> Roofline:
    device = catalog.device(system)
    return Roofline(device, catalog.default_node(device))


# --------------------------------------------------------------------------------------------- what errors are made of


@dataclass(frozen=True)
class Surroundings:
    """What the two measured neighbours along the last axis say of a point inside a curve."""

    out_of_reach: float
    """The least error of a prediction that lies between the neighbours."""
    across_step: bool


@dataclass(frozen=True)
class LeftOutPoint:
    """A point that was left out inside a curve, with the error of its prediction."""

    kind: str
    table: str
    error: float
    around: Surroundings


@dataclass(frozen=True)
class Repeat:
    """A table's curves beside those of a second collection."""

    kind: str
    table: str
    differences: Floats


def surroundings(table: MeasurementTable, roofline: Roofline, site: tuple[float, ...], row: int) -> Surroundings:
    """Of the point at `row` of a site, which has a neighbour on both sides."""
    axes, seconds = table.site_rows(site)
    beside = [row - 1, row + 1]
    ends = seconds[beside]
    at = {name: column[beside] for name, column in axes.items()}
    over_roofline = ends / np.asarray(roofline.seconds(table.operator(site, at)))
    nearest = np.clip(seconds[row], ends.min(), ends.max())
    across_step = over_roofline.max() > STEP * over_roofline.min()
    return Surroundings(abs(float(nearest / seconds[row]) - 1), bool(across_step))


def repeat_differences(
    table: MeasurementTable, twin: MeasurementTable, num_sites: int, rng: np.random.Generator
) -> Floats:
    """How far points are off the line between their neighbours in one collection and not in the other.

    A point and both neighbours carry the noise of each collection once, so the difference over the square root of two
    is what a prediction from the neighbours would be off if it knew the curve and only the measurements scattered.
    """
    shared = [site for site in table.rows_by_site if site in twin.rows_by_site]
    found: list[float] = []
    for index in rng.permutation(len(shared))[:num_sites]:
        own = dict(_bends(table, shared[index]))
        found += [own[points] - bend for points, bend in _bends(twin, shared[index]) if points in own]
    errors: Floats = np.expm1(np.abs(np.array(found)) / np.sqrt(2.0))
    return errors


def _bends(table: MeasurementTable, site: tuple[float, ...]) -> Iterator[tuple[tuple[float, ...], float]]:
    """Every three neighbours of a site, and how far the middle's log seconds are off the line between the others'."""
    axes, seconds = table.site_rows(site)
    points, log_seconds = np.column_stack(list(axes.values())), np.log(seconds)
    log_at = np.log(points[:, -1])
    for row in range(1, len(seconds) - 1):
        if np.all(points[row - 1, :-1] == points[row + 1, :-1]):
            part = (log_at[row] - log_at[row - 1]) / (log_at[row + 1] - log_at[row - 1])
            line = log_seconds[row - 1] * (1 - part) + log_seconds[row + 1] * part
            yield tuple(points[row - 1 : row + 2].ravel().tolist()), float(log_seconds[row] - line)


# ------------------------------------------------------------------------------------------------------- interpolation


def left_out_points(
    table: MeasurementTable, roofline: Roofline, num_sites: int, rng: np.random.Generator, beside: int = 0
) -> Iterator[tuple[str, float, Surroundings | None]]:
    """(`inside` or `last`, error, what is around it) of single points: each round takes one out of each drawn site.

    Of a small table every point is left out. With it go `beside` neighbours on either side, where others are beyond.
    """
    sites = list(table.rows_by_site)
    drawn = [sites[index] for index in rng.permutation(len(sites))[:num_sites]]
    order = {site: rng.permutation(len(table.site_rows(site)[1])) for site in drawn}
    small = len(table) <= num_sites * POINTS_PER_SITE
    for turn in range(max(map(len, order.values())) if small else POINTS_PER_SITE):
        keep = np.ones(len(table), dtype=bool)
        wanted = []
        for site in (site for site in drawn if turn < len(order[site])):
            row = int(order[site][turn])
            where = _place(_points(table, site), row, beside)
            if where:
                for near in range(row - beside, row + beside + 1):
                    keep[_rows_at(table, site, near)] = False
                wanted.append((site, where, row))
        model = TableModel(table.take(keep), roofline)
        for site, where, row in wanted:
            axes, seconds = table.site_rows(site)
            at = {name: column[[row]] for name, column in axes.items()}
            found, *_ = model.estimate(table.operator(site, at))
            around = surroundings(table, roofline, site, row) if where == LeftOut.INSIDE.value else None
            yield where, abs(float(found[0]) / seconds[row] - 1), around


def _points(table: MeasurementTable, site: tuple[float, ...]) -> Floats:
    axes, _ = table.site_rows(site)
    return np.column_stack(list(axes.values()))


def _rows_at(table: MeasurementTable, site: tuple[float, ...], row: int) -> NDArray[np.intp]:
    """The table's rows of one point of a site, repeats included."""
    axes, _ = table.site_rows(site)
    rows = table.rows_by_site[site]
    return rows[np.logical_and.reduce([table.axes[name][rows] == column[row] for name, column in axes.items()])]


def _place(points: Floats, row: int, beside: int = 0) -> str | None:
    """Where a point is on its curve: `inside`, `last`, or None where it is the first or one of less than four.

    With `beside` neighbours left out too, only points that still have others on either side have a place.
    """
    curve = points[np.all(points[:, :-1] == points[row, :-1], axis=1), -1]
    below, above = int(np.sum(curve < points[row, -1])), int(np.sum(curve > points[row, -1]))
    if len(curve) < MIN_CURVE or below == 0:
        return None
    if above == 0:
        return None if beside else LeftOut.LAST.value
    return LeftOut.INSIDE.value if min(below, above) > beside else None


def left_out_levels(
    table: MeasurementTable, roofline: Roofline, num_sites: int, rng: np.random.Generator
) -> Iterator[float]:
    """Errors of points whose coordinate along the last axis was taken out of the whole table."""
    along = list(table.axes)[-1]
    sites = list(table.rows_by_site)
    for level in rng.permutation(np.unique(table.axes[along]))[:POINTS_PER_SITE]:
        model = TableModel(table.take(table.axes[along] != level), roofline)
        for index in rng.permutation(len(sites))[:num_sites]:
            axes, seconds = table.site_rows(sites[index])
            points = np.column_stack(list(axes.values()))
            rows = [
                row
                for row in np.flatnonzero(axes[along] == level).tolist()
                if _place(points, row) == LeftOut.INSIDE.value
            ]
            if rows:
                row = int(rng.choice(rows))
                at = {name: column[[row]] for name, column in axes.items()}
                found, *_ = model.estimate(table.operator(sites[index], at))
                yield abs(float(found[0]) / seconds[row] - 1)


def left_out_sites(
    table: MeasurementTable, roofline: Roofline, num_sites: int, rng: np.random.Generator
) -> Iterator[float]:
    """Errors of points of whole sites left out of the table."""
    sites = list(table.rows_by_site)
    if len(sites) < 4:
        return
    for index in rng.permutation(len(sites))[:num_sites]:
        site = sites[index]
        axes, seconds = table.site_rows(site)
        rest = table.take(~_touching(table, site))
        if not len(rest):
            continue
        rows = rng.permutation(len(seconds))[:12]
        at = {name: column[rows] for name, column in axes.items()}
        found, *_ = TableModel(rest, roofline).estimate(table.operator(site, at))
        yield from np.abs(found / seconds[rows] - 1).tolist()


def _touching(table: MeasurementTable, site: tuple[float, ...]) -> NDArray[np.bool_]:
    """Rows that may not be seen when `site` is left out: its own, and for a GEMM all of its n and all of its k."""
    equal = [column == value for column, value in zip(table.sites.values(), site, strict=True)]
    found: NDArray[np.bool_] = np.logical_or.reduce(equal) if table.kind == "gemm" else np.logical_and.reduce(equal)
    return found


def collection_of(system: str, engine: str, version: str) -> Collection:
    """The files of a system as an engine sees them; its tables may be borrowed from others."""
    folder = systems_folder() / system
    return Collection(system=folder, engine=engine, version=version, roofline=roofline_of(system))


def tables_of(system: str, engine: str, version: str) -> Iterator[tuple[Class, MeasurementTable]]:
    """The tables of an engine on a system that hold measurements of its own."""
    collection = collection_of(system, engine, version)
    for (kind, variant), probe in probes():
        table = table_for(collection, probe)
        # Elementwise tables are medians over shapes already: nothing of them can be left out.
        if table is None or kind == "elementwise" or (f"/{engine}/" not in table.source and kind != "collective"):
            continue
        yield (kind, variant), table


def interpolation(num_sites: int, seed: int) -> tuple[list[Score], list[LeftOutPoint]]:
    """Errors by kind and by what was left out, and all points that were left out inside."""
    errors: dict[tuple[str, str], list[float]] = {}
    inside: list[LeftOutPoint] = []
    for system, engine, version in COLLECTIONS:
        rng = np.random.default_rng(seed)
        roofline = roofline_of(system)
        for (kind, variant), table in tables_of(system, engine, version):
            name = f"{system} {engine} {variant}"
            for where, error, around in left_out_points(table, roofline, num_sites, rng):
                errors.setdefault((kind, where), []).append(error)
                if around is not None:
                    inside.append(LeftOutPoint(kind, name, error, around))
            for _, error, _ in left_out_points(table, roofline, num_sites, np.random.default_rng(seed), beside=1):
                errors.setdefault((kind, NEIGHBOURS_TOO), []).append(error)
            levels = left_out_levels(table, roofline, num_sites, rng)
            errors.setdefault((kind, LeftOut.LEVEL.value), []).extend(levels)
            whole = left_out_sites(table, roofline, max(num_sites // 4, 2), rng)
            errors.setdefault((kind, "shape"), []).extend(whole)
    return [score(kind, where, found) for (kind, where), found in sorted(errors.items()) if found], inside


def repeats(num_sites: int, seed: int) -> list[Repeat]:
    """What a second collection of the same engine and version on the same silicon says of every table that has one."""
    found = []
    for system, engine, version in COLLECTIONS:
        if system not in SAME_SILICON:
            continue
        rng = np.random.default_rng(seed)
        twins = dict(tables_of(SAME_SILICON[system], engine, version))
        for (kind, variant), table in tables_of(system, engine, version):
            if (kind, variant) in twins:
                differences = repeat_differences(table, twins[kind, variant], num_sites, rng)
                found.append(Repeat(kind, f"{system} {engine} {variant}", differences))
    return found


# ------------------------------------------------------------------------------------------------------------ roofline


def samples_of(probe: ops.Op, rng: np.random.Generator) -> dict[str, Sample]:
    """Device -> rows of its table of the class."""
    found = {}
    for system in FITTED:
        engine, version = ("sglang", "0.5.10") if system == "a100_sxm" else ("vllm", "0.24.0")
        table = table_for(collection_of(system, engine, version), probe)
        if table is not None and len(table) >= 20:
            found[system] = sample(table, roofline_of(system), ROWS_PER_DEVICE, rng)
    return found


def roofline(seed: int, write: bool, only: str | None = None) -> list[Score]:
    """Errors of every device when the fit saw the others; with `write`, fits on all of them for the catalog."""
    scores: list[Score] = []
    files: dict[Any, Any] = {}
    of_kind: dict[Any, Any] = {}
    for (kind, variant), probe in probes():
        is_asked = only in (None, kind) and kind in NAMES and kind not in KINDS["borrowed_fits"]
        found = samples_of(probe, np.random.default_rng(seed)) if is_asked else {}
        if len(found) < 2:
            continue
        start = fit_roofline(kind, list(found.values()))
        unseen: dict[str, list[float]] = {}
        for device, one in found.items():
            others = without(found, device)
            shared = fit_roofline(kind, others, start)
            fit = RooflineFit(shared, families(others, shared), 0.0, "")
            unseen[device] = np.abs(np.expm1(one.log_errors(fit.on(one.roofline.device)))).tolist()
        everywhere = [error for errors in unseen.values() for error in errors]
        scores.append(score(f"{kind} {variant}", "device", everywhere))
        of_kind.setdefault(kind, []).extend(everywhere)
        files.setdefault(kind, {})[variant] = {
            "fitted_on": f"{', '.join(found)} ({PACKAGE} 0.12.0)",
            "median_error_unseen": round(float(np.median(everywhere)), 3),
            "median_error_unseen_by_device": {name: round(float(np.median(e)), 3) for name, e in unseen.items()},
            "coefficients": rounded(start),
            "by_family": {name: rounded(own) for name, own in families(list(found.values()), start).items()},
        }
    if write:
        for kind, variants in files.items():
            write_fit(kind, variants)
    return [score(f"{kind}, all", "device", errors) for kind, errors in of_kind.items()] + scores


def families(samples: list[Sample], shared: dict[str, float]) -> dict[str, dict[str, float]]:
    """Family of devices, or kind of board -> the coefficients that are its own."""
    members: dict[str, list[Sample]] = {}
    for one in samples:
        members.setdefault(family(one.roofline.device), []).append(one)
        members.setdefault(board(one.roofline.device), []).append(one)
    return {name: fit_family(rows, shared) for name, rows in members.items()}


def rounded(coefficients: dict[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.4g}") for name, value in coefficients.items()}


def write_left_out(scores: list[Score], elementwise: float) -> None:
    """What estimates cite as their expected error; where too few points were left out, the kind's largest.

    Elementwise kernels are priced by another kernel of as many bytes: the roofline's error stands for theirs.
    """
    medians: dict[str, dict[str, float]] = {"elementwise": {LeftOut.INSIDE.value: round(elementwise, 3)}}
    for one in scores:
        if one.num_points >= MIN_POINTS and one.left_out in tuple(LeftOut):
            medians.setdefault(one.operators, {})[one.left_out] = round(one.median, 3)
    for found in medians.values():
        for where in LeftOut:
            found.setdefault(where.value, max(found.values()))
    header = (
        "# Median |predicted / measured - 1| of points that were left out of measured tables. Written by\n"
        "#   python benchmarks/operator_accuracy.py --fit\n"
    )
    LEFT_OUT_FILE.write_text(header + yaml.safe_dump({"median_error": medians}, sort_keys=True))


def write_fit(kind: str, variants: dict[str, object]) -> None:
    header = (
        f"# Coefficients of the closed form of {kind} (windtunnel/estimate/roofline.py). Written by\n"
        "#   python benchmarks/operator_accuracy.py --fit\n"
        "# from the measured tables of aiconfigurator-core (Apache-2.0, NVIDIA). median_error_unseen: median of\n"
        "# |predicted / measured - 1| on each device when it was left out of the fit.\n"
    )
    (CATALOG / f"{kind}.yaml").write_text(
        header + yaml.safe_dump({"variants": variants}, sort_keys=False, width=120, default_flow_style=None)
    )


# --------------------------------------------------------------------------------------------------------------- report


def markdown(title: str, scores: list[Score]) -> str:
    lines = [f"## {title}", "", "| operators | left out | points | median error | p90 |", "|---|---|---:|---:|---:|"]
    lines += [f"| {s.operators} | {s.left_out} | {s.num_points:,} | {s.median:.1%} | {s.p90:.1%} |" for s in scores]
    return "\n".join(lines)


def limits_markdown(points: list[LeftOutPoint]) -> str:
    """Points left out inside curves: all, what is out of reach, and where a kernel changes."""
    lines = [
        "## What the errors inside curves are made of",
        "",
        "| operators | points | median | p90 | p90 out of reach | across a step | median | p90 | elsewhere, p90 |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for kind in sorted({point.kind for point in points}):
        here = [point for point in points if point.kind == kind]
        errors = np.array([point.error for point in here])
        reach = np.array([point.around.out_of_reach for point in here])
        step = np.array([point.around.across_step for point in here])
        cells = (*_quantiles(errors), f"{np.quantile(reach, 0.9):.1%}", f"{step.mean():.0%}", *_quantiles(errors[step]))
        lines.append(f"| {kind} | {len(here):,} | {' | '.join(cells)} | {_quantiles(errors[~step])[1]} |")
    return "\n".join(lines)


def repeats_markdown(points: list[LeftOutPoint], repeats: list[Repeat]) -> str:
    """The same errors on tables with a second collection, beside what that differs by."""
    lines = [
        "## Beside a second collection of the same kernels",
        "",
        "| operators | table | points | median | p90 | a second collection: points | median | p90 |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for kind in sorted({repeat.kind for repeat in repeats}):
        of_kind = [repeat for repeat in repeats if repeat.kind == kind]
        rows = [("all", of_kind), *((one.table, [one]) for one in of_kind)]
        for name, those in rows:
            tables = {one.table for one in those}
            errors = np.array([point.error for point in points if point.kind == kind and point.table in tables])
            differences = np.concatenate([one.differences for one in those])
            if name != "all" and (not len(errors) or np.quantile(errors, 0.9) <= MANY):
                continue
            cells = (f"{len(errors):,}", *_quantiles(errors), f"{len(differences):,}", *_quantiles(differences))
            lines.append(f"| {kind} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _quantiles(errors: Floats) -> tuple[str, str]:
    if not len(errors):
        return "-", "-"
    return f"{np.median(errors):.1%}", f"{np.quantile(errors, 0.9):.1%}"


PAGE_MARK = "<!-- written by benchmarks/operator_accuracy.py -->"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--fit", action="store_true", help="write the fitted roofline into the catalog")
    parser.add_argument("--page", type=Path, help="write the tables into this page, below its mark")
    parser.add_argument("--sites", type=int, default=48, help="shapes drawn from each table")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", help="fit only this kind of operator")
    parser.add_argument("--only", choices=("interpolation", "roofline"))
    options = parser.parse_args()
    start = time.perf_counter()
    found: dict[str, list[Score]] = {}
    limits: list[str] = []
    if options.only != "interpolation":
        found["Roofline, on devices that the fit did not see"] = roofline(options.seed, options.fit, options.kind)
    if options.only != "roofline":
        scores, inside = interpolation(options.sites, options.seed)
        found["Interpolation in measured tables"] = scores
        limits = [limits_markdown(inside), repeats_markdown(inside, repeats(options.sites, options.seed))]
        if options.fit and options.only is None:
            by_name = {one.operators: one.median for one in found["Roofline, on devices that the fit did not see"]}
            write_left_out(scores, by_name["elementwise any"])
    if options.json:
        print(json.dumps({title: [asdict(one) for one in scores] for title, scores in found.items()}, indent=2))
        return
    parts = [markdown(title, scores) for title, scores in reversed(found.items())]
    text = "\n\n".join([*parts[:1], *limits, *parts[1:]]) + "\n"
    if options.page:
        head, _, _ = options.page.read_text(encoding="utf-8").partition(PAGE_MARK)
        options.page.write_text(f"{head}{PAGE_MARK}\n\n{text}", encoding="utf-8")
    else:
        print(text)
    print(f"{time.perf_counter() - start:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
