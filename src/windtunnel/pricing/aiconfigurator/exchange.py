"""Exchange of tokens from the tables of `aiconfigurator-core`'s layout: DeepEP's kernels and those over NVLink.

Times of a dispatch or combine are of all kernels of it. Each file has its own columns and units.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from windtunnel.model.exchange import DEEPEP_LOW_LATENCY, DEEPEP_NORMAL
from windtunnel.pricing.aiconfigurator.collection import KERNELS, Collection, Place
from windtunnel.pricing.table import Floats, MeasurementTable, merged, numeric_column, read_parquet, table_of

DEVICES_PER_NODE = 8
"""Of a measured system that `KERNELS.devices_per_node` does not name."""
NORMAL_SMS = 20
"""Multiprocessors of normal kernels (DeepEP `Buffer.num_sms`)."""


@dataclass(frozen=True)
class _Layout:
    """Columns of a file, and the words of the rows that are read."""

    table: str
    columns: tuple[str, str, str, str]
    """Tokens of a rank, experts, experts a token, nodes or ranks."""
    times: Mapping[str, tuple[str, ...]]
    """`dispatch` or `combine` -> columns that add up to its time."""
    unit_s: float
    words: Mapping[str, str]
    multiprocessors: Mapping[str, str]
    """`dispatch` or `combine` -> the column of its multiprocessors; empty where all rows have the same."""
    is_of_ranks: bool = False


_SGLANG = ("num_token", "num_experts", "num_topk", "node_num")
_LOW_LATENCY = _Layout(
    "wideep_deepep_ll_perf", _SGLANG, {phase: (f"{phase}_avg_t_us",) for phase in ("dispatch", "combine")}, 1e-6, {}, {}
)
_NORMAL = _Layout(
    "wideep_deepep_normal_perf",
    _SGLANG,
    {phase: (f"{phase}_transmit_us", f"{phase}_notify_us") for phase in ("dispatch", "combine")},
    1e-6,
    {},
    {phase: f"{phase}_sms" for phase in ("dispatch", "combine")},
)
_OWN_NORMAL = {"vllm": ("deepep_ht", "default"), "trtllm": ("trtllm_deepep_ht", "bfloat16")}
"""Engine -> its normal kernels in `moe_a2a_perf`, and what they send."""
_ANY_PHASE = {"dispatch": ("latency",), "combine": ("latency",)}


def _layouts(collection: Collection, op: Any) -> Iterator[tuple[_Layout, tuple[str, ...]]]:
    """Yield the files that may price `op`, the best first, and the engines whose files of that name count.

    Low-latency kernels run in CUDA graphs, so that SGLang's times of the kernels alone hold for every engine. Others'
    times of normal kernels have the host in them, which waits for the number of tokens that arrive: prompts wait too.
    """
    if op.name == DEEPEP_LOW_LATENCY:
        yield _LOW_LATENCY, ("sglang",)
    elif op.name == DEEPEP_NORMAL:
        kernels, dtype = _OWN_NORMAL.get(collection.engine, (None, ""))
        if kernels is not None:
            columns = ("num_tokens", "num_experts", "topk", "ep_size")
            words = {"comm_backend": kernels, "phase": op.op, "comm_dtype": dtype}
            yield _Layout("moe_a2a_perf", columns, _ANY_PHASE, 1e-6, words, {}, is_of_ranks=True), (collection.engine,)
        yield _NORMAL, ("sglang",)
    else:
        yield from ((layout, ("trtllm",)) for layout in _nvlink_layouts(op))


def _nvlink_layouts(op: Any) -> Iterator[_Layout]:
    """Yield what was measured over NVLink; one-sided dispatches, of nvfp4 alone, take others from two-sided ones."""
    columns = ("num_tokens", "num_experts", "topk", "moe_ep_size")
    kernels = "NVLinkOneSided" if op.name == "nvlink_one_sided" else "NVLinkTwoSided"
    sent = {"nvfp4": "nvfp4", "fp8": "fp8"}.get(str(op.format), "bfloat16") if op.op == "dispatch" else "nvfp4"
    for kernel in dict.fromkeys((kernels, "NVLinkTwoSided")):
        words = {"kernel_source": kernel, "op_name": f"alltoall_{op.op}", "moe_dtype": sent}
        yield _Layout("trtllm_alltoall_perf", columns, _ANY_PHASE, 1e-3, words, {}, is_of_ranks=True)


def exchange_table(collection: Collection, op: Any) -> MeasurementTable | None:
    """Return the dispatches or combines of a rank's tokens by the kernels of `op`; None where nobody measured them.

    Two-sided dispatches include the kernels that prepare them.
    """
    for layout, engines in _layouts(collection, op):
        tables: list[MeasurementTable] = []
        for place in collection.places("comm", layout.table):
            if place.engine not in engines:
                continue
            table = _read(collection, place, layout, op)
            if table is not None:
                known = {site for other in tables for site in other.rows_by_site}
                lacking = [rows for site, rows in table.rows_by_site.items() if site not in known]
                tables += [table.take(np.concatenate(lacking))] if lacking else []
        if tables:
            (joined,) = merged(tables)
            return joined
    return None


def _read(collection: Collection, place: Place, layout: _Layout, op: Any) -> MeasurementTable | None:
    """Return one file's rows of a layout; None where it has none."""
    path = place.folder / f"{layout.table}.parquet"
    rows = read_parquet(path)
    keep = np.ones(rows.num_rows, dtype=bool)
    for name, word in layout.words.items():
        keep &= np.array(rows[name].to_pylist()) == word
    if layout.multiprocessors:
        keep &= numeric_column(rows, layout.multiprocessors[op.op], path) == NORMAL_SMS
    if not keep.any():
        return None
    tokens, experts, top_k, ranks, hidden = (
        numeric_column(rows, name, path)[keep] for name in (*layout.columns, "hidden_size")
    )
    took = sum(numeric_column(rows, name, path)[keep] for name in layout.times[op.op]) * layout.unit_s
    per_node = KERNELS.devices_per_node.get(collection.system.name, DEVICES_PER_NODE)
    if not layout.is_of_ranks:
        ranks = ranks * per_node
    if (op.name, op.op) == ("nvlink_two_sided", "dispatch"):
        took = took + _preparing_s(rows, layout, path, ranks, tokens)
    inside = ranks if layout.table == "trtllm_alltoall_perf" else np.minimum(ranks, per_node)
    main = layout.words.get("kernel_source", op.name)
    return table_of(
        op,
        np.asarray(took),
        f"{collection.system.name}/comm/{place.engine}/{place.version} ({main})",
        num_tokens=tokens,
        hidden_size=hidden,
        num_experts=experts,
        experts_per_token=top_k,
        num_ranks=ranks,
        ranks_per_node=inside,
    )


def _preparing_s(rows: Any, layout: _Layout, path: Any, ranks: Floats, tokens: Floats) -> Floats:
    """Return the seconds to prepare each two-sided dispatch: of the same ranks and tokens."""
    prepares = np.array(rows["op_name"].to_pylist()) == "alltoall_prepare"
    prepares &= np.array(rows["moe_dtype"].to_pylist()) == layout.words["moe_dtype"]
    columns = (layout.columns[3], layout.columns[0], "latency")
    known = np.column_stack([numeric_column(rows, name, path)[prepares] for name in columns])
    times = {(row[0], row[1]): row[2] for row in known.tolist()}
    return np.array([times.get(key, 0.0) for key in zip(ranks.tolist(), tokens.tolist(), strict=True)]) * 1e-3
