"""Collectives from the tables of `aiconfigurator-core`'s layout: NCCL's, the engines' own, and the faster of them."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.hardware import Device, Node
from windtunnel.model.operators import Collective
from windtunnel.pricing.aiconfigurator.collection import HICCUP, KERNELS, Collection, Place, Rows
from windtunnel.pricing.roofline import scale_up_bytes_per_s
from windtunnel.pricing.table import Floats, MeasurementTable, grouped, merged, table_of
from windtunnel.units import version_key

_FUSED_BY = "trtllm"
"""Engine whose all-reduce FlashInfer has, which others call to fuse it with the norm behind it."""
NCCL_NAMES = {"all_to_all": "alltoall"}

LEAST_LINK_SHARE = 0.2
"""Share of the links' rate that the largest message must reach. In nine tables eight L40S reach 2 of 32 GB/s and four
reach 5, in a tenth 21 both: the cards of the nine's machine had no direct access to each other. All other tables but
one of four B60 reach at least 0.23."""
LINKED_S = 1e-3
"""Seconds from which on links, and not latencies, decide a message's time."""


def collective_table(collection: Collection, op: Any) -> MeasurementTable | None:
    """Return, at every size, the fastest collective that the engine may call inside a server."""
    if op.span_nodes > 1:
        return None
    own, nccl = _custom_all_reduce(collection, op), nccl_table(collection, op)
    # The engine's graphs hold its own all-reduce at the sizes that it takes, be NCCL faster or not.
    prefers_own = collection.cuda_graphs and collection.engine in KERNELS.one_shot_below_bytes
    tables = [_beyond(nccl, own) if prefers_own else nccl, own, _fused_all_reduce(collection, op)]
    if collection.engine in KERNELS.same_all_reduce:
        engine, version = KERNELS.same_all_reduce[collection.engine]
        tables.append(_custom_all_reduce(replace(collection.of(engine), version=version), op))
    parts = [part for part in tables if part is not None]
    if not parts:
        return None
    *others, last = [part.source for part in parts]
    label = f"the {'fastest' if len(parts) > 2 else 'faster'} of {', '.join(others)} and {last}" if others else last
    edge = collection.fused_all_reduce_bytes + 1.0  # from here on the fused kernel is none
    fastest = functools.reduce(functools.partial(_faster_of, op=op, edge=edge), parts)
    return replace(fastest, source=label, steps=_steps(collection, op))


def _beyond(nccl: MeasurementTable | None, own: MeasurementTable | None) -> MeasurementTable | None:
    """Return NCCL's messages of more bytes than any in `own` over as many ranks; None where there are none."""
    if nccl is None or own is None:
        return nccl
    largest = {site: own.site_rows(site)[0]["message_bytes"].max() for site in own.rows_by_site}
    kept = np.zeros(len(nccl.axes["message_bytes"]), dtype=bool)
    for site, rows in nccl.rows_by_site.items():
        kept[rows] = nccl.axes["message_bytes"][rows] > largest.get(site, 0.0)
    return nccl.take(kept) if kept.any() else None


def _steps(collection: Collection, op: Any) -> dict[tuple[float, ...], tuple[float, ...]]:
    """Return site -> message from which on the engine's all-reduce is another kernel."""
    linked = collection.roofline.device.scale_up_bytes_per_s is not None
    limits = KERNELS.one_shot_below_bytes.get(collection.engine)
    if op.op != "all_reduce" or limits is None or not linked:
        return {}
    if collection.fused_all_reduce_bytes > 0:
        return {(float(ranks), 1.0): (collection.fused_all_reduce_bytes + 1.0,) for ranks in range(2, 9)}
    return {(float(ranks), 1.0): (_one_shot_below(collection.engine, ranks),) for ranks in range(3, 9)}


def _one_shot_below(engine: str, ranks: int) -> float:
    """Return the message in bytes from which on the engine's all-reduce takes two steps; 0 where it never changes."""
    limits = KERNELS.one_shot_below_bytes.get(engine, {})
    return next((size for most, size in limits.items() if 2 < ranks <= most), 0.0)


def nccl_table(collection: Collection, op: Any) -> MeasurementTable | None:
    """Return the collective of `op` by NCCL alone (oneCCL on Intel's devices), of its newest measured version."""
    for library in ("nccl", "oneccl"):
        folders = [path for path in (collection.system / "comm" / library).glob("*") if path.is_dir()]
        for folder in sorted(folders, key=lambda path: version_key(path.name), reverse=True):
            place = Place(folder, library, folder.name)
            words = {"op_name": NCCL_NAMES.get(op.op, op.op), "nccl_dtype": "half"}
            if not (folder / f"{library}_perf.parquet").is_file():
                continue
            rows = place.read_rows(f"{library}_perf", ("num_gpus", "message_size"), words)
            if rows is not None:
                label = f"{collection.system.name}/comm/{library}/{folder.name}"
                linked = _linked(op.op, rows, collection)
                return _collective_table(op, linked, label) if len(linked) else None
    return None


def _custom_all_reduce(collection: Collection, op: Any) -> MeasurementTable | None:
    """Return the engine's all-reduce kernels; from graphs where the collection tells graphs from eager launches.

    Ranks whose links fail in its table are those of the first table whose links do not.
    """
    if op.op != "all_reduce":
        return None
    suffix = "graph" if collection.cuda_graphs else "eager"
    found: list[MeasurementTable] = []
    missing: set[float] | None = None
    for rows in collection.all_rows("comm", "custom_allreduce_perf", ("num_gpus", "message_size"), [{}]):
        either = rows.named(lambda name: name.endswith(("_graph", "_eager")))
        kept = rows.where(~either | rows.named(lambda name: name.endswith(suffix)))
        if not len(kept):
            continue
        missing = set(kept["num_gpus"].tolist()) if missing is None else missing
        linked = _linked(op.op, kept, collection)
        linked = linked.where(np.isin(linked["num_gpus"], list(missing)))
        if len(linked):
            found.append(_collective_table(op, linked, collection.label("comm", linked)))
            missing -= set(linked["num_gpus"].tolist())
        if not missing:
            break
    return merged(found)[0] if found else None


def _linked(op: str, rows: Rows, collection: Collection) -> Rows:
    return rows.where(~failed_links(op, rows, collection.roofline.device, collection.roofline.node))


def failed_links(op: str, rows: Rows, device: Device, node: Node | None) -> NDArray[np.bool_]:
    """Return a mask of the rows over ranks whose largest message reaches less than `LEAST_LINK_SHARE` of the links."""
    failed = np.zeros(len(rows), dtype=bool)
    for curve in grouped([rows["num_gpus"]], [rows["message_size"]]):
        sizes, ranks = rows["message_size"][curve], int(rows["num_gpus"][curve[0]])
        sent = float(Collective(op, 2.0 * sizes[-1], ranks).num_bytes)
        linked_s, took_s = (
            sent / scale_up_bytes_per_s(ranks, device, node),
            rows.seconds[curve][sizes == sizes[-1]].min(),
        )
        failed[curve] = LINKED_S <= linked_s <= LEAST_LINK_SHARE * took_s
    return failed


def _fused_all_reduce(collection: Collection, op: Any) -> MeasurementTable | None:
    """Return TensorRT-LLM's all-reduce, which FlashInfer offers to other engines, up to the size that they fuse."""
    limit, source = collection.fused_all_reduce_bytes, collection.of(_FUSED_BY)
    if limit <= 0 or source.engine == collection.engine:
        return None
    table = _custom_all_reduce(source, op)
    if table is None:
        return None
    small = table.axes["message_bytes"] <= limit
    return table.take(small) if small.any() else None


def sound_latency(rows: Rows) -> Floats:
    """Return the milliseconds of messages: NaN for a hiccup, and the larger message's for what `falls`.

    What falls was slower than a smaller message of the same algorithm too. On eight B200 two steps of the engines' own
    all-reduce take 26 us at 256 and 512 KiB, in the tables of four versions of two engines, though one step takes 9 us
    at 128 KiB and vLLM's kernel for 1 MiB 17.

    A hiccup took `HICCUP` times as long as the next smaller message and as some larger one. Of all files that are read
    15 rows did: an all-to-all of eight H100 takes 7.5 us at 8 KiB and 8.7 us at 64 KiB, but 16 and 17 us at 16 and 32
    KiB.
    """
    latency = rows.latency.copy()
    for curve in grouped([rows["num_gpus"]], [rows["message_size"]]):
        took = rows.latency[curve]
        least_later = np.minimum.accumulate(took[::-1])[::-1]
        limit = _one_shot_below(rows.place.engine, int(rows["num_gpus"][curve[0]]))
        first = int(np.searchsorted(rows["message_size"][curve] * 2.0, limit))
        least_before = np.concatenate([np.minimum.accumulate(part) for part in (took[:first], took[first:])])
        kept = np.where(took > KERNELS.falls * np.maximum(least_before, least_later), least_later, took)
        smaller = 0
        for row in range(1, len(curve) - 1):
            if took[row] > HICCUP * max(took[smaller], least_later[row + 1]):
                kept[row] = np.nan
            else:
                smaller = row
        latency[curve] = kept
    return latency


def _collective_table(op: Any, rows: Rows, label: str) -> MeasurementTable:
    rows = rows.sound(sound_latency(rows))
    num_bytes = rows["message_size"] * 2.0
    return table_of(op, rows.seconds, label, num_ranks=rows["num_gpus"], span_nodes=1.0, message_bytes=num_bytes)


def _faster_of(left: MeasurementTable, right: MeasurementTable, op: Any, edge: float) -> MeasurementTable:
    """Return, at every measured size, the faster of two libraries: engines choose the library by size.

    `edge`: a further size to look at, where one of them ends; it counts where the other was measured on both sides.
    """
    ranks, sizes, seconds = [], [], []
    for site in sorted(set(left.rows_by_site) | set(right.rows_by_site)):
        curves = [table.site_rows(site) for table in (left, right) if site in table.rows_by_site]
        measured = np.concatenate([axes["message_bytes"] for axes, _ in curves])
        is_inside = measured.min() < edge < measured.max()
        messages = np.unique(np.append(measured, edge if is_inside else measured[:1]))
        best = np.full(len(messages), np.inf)
        for axes, took in curves:
            grid = np.log(axes["message_bytes"])
            best = np.minimum(best, np.exp(np.interp(np.log(messages), grid, np.log(took), left=np.inf, right=np.inf)))
        messages, best = messages[np.isfinite(best)], best[np.isfinite(best)]
        ranks.append(np.full(len(messages), site[0]))
        sizes.append(messages)
        seconds.append(best)
    num_ranks, num_bytes, took = (np.concatenate(parts) for parts in (ranks, sizes, seconds))
    return table_of(op, took, left.source, num_ranks=num_ranks, span_nodes=1.0, message_bytes=num_bytes)
