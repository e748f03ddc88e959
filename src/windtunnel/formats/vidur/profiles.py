"""Vidur's profiling data: its CSV files read, and their operators in our vocabulary.

Layout (`data/profiling`): `compute/<device>/<organisation>/<model>/mlp.csv` and `attention.csv`, `network/<network
device>/all_reduce.csv` and `send_recv.csv`, `cpu_overheads/...`. All times are milliseconds, sizes bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.compiled.arrays import Floats
from windtunnel.errors import InputError
from windtunnel.formats.vidur.read import COLUMNS
from windtunnel.model.attention.grouped_query import GroupedQueryAttention
from windtunnel.model.feed_forward.dense import DenseFeedForward
from windtunnel.model.launches.forward import decode_launches, prefill_launches, token_launches
from windtunnel.model.operators import Collective
from windtunnel.model.parallelism import Parallelism
from windtunnel.model.shape import LayerGroup, ModelSpec, Shard
from windtunnel.pricing.table import MeasurementTable, Points, require_columns, tables_from
from windtunnel.workload.traces.table_file import read_columns

MS = 1e-3

TOKEN_OPERATORS: Mapping[str, Sequence[str]] = COLUMNS["token_operators"]
"""Operator of `mlp.csv` -> our launch."""


@dataclass(frozen=True)
class VidurFile:
    """The columns of one CSV file."""

    columns: Mapping[str, NDArray[Any]]

    def numbers(self, name: str) -> Floats:
        """Return a column as floats; NaN where it is empty."""
        return np.asarray(self.columns[name], np.float64)

    def seconds(self, operator: str) -> Floats:
        """Return the median times of an operator; NaN where unmeasured or 0, which is below the clock's 1 us."""
        milliseconds = self.numbers(f"time_stats.{operator}.median")
        return np.where(milliseconds > 0, milliseconds, np.nan) * MS


def operator_tables(path: Path, name: str = "vidur") -> list[MeasurementTable]:
    """Return the operators of `mlp.csv`, `attention.csv`, `all_reduce.csv` or `send_recv.csv` as measured tables.

    `name` is the name of the device, for the tables' source.

    Raises:
        InputError: the file cannot be read, or is none of these.
    """
    file = VidurFile(read_columns(path))
    if _has(file, "mlp_up_proj"):
        kind, rows = "mlp", _token_rows(file)
    elif "is_prefill" in file.columns:
        kind, rows = "attention", _attention_rows(file)
    elif "collective" in file.columns:
        kind, rows = "collective", _collective_rows(file)
    else:
        raise InputError(f"{path} is none of Vidur's profiles", "mlp.csv, attention.csv, all_reduce.csv, send_recv.csv")
    require_columns(path, list(file.columns), COLUMNS["needed"][kind])
    return tables_from(rows, f"{name}, Vidur's {path.name}")


def _token_rows(file: VidurFile) -> Iterator[Points]:
    """Yield operators that depend on the tokens of a step alone."""
    for shard, rows in _shards(file, "n_head"):
        tokens = file.numbers("num_tokens")[rows]
        launches = {launch.name: launch.op for launch in token_launches(shard, tokens)}
        added_s = file.seconds("add")[rows] if _has(file, "add") else np.zeros(len(rows))
        for theirs, ours in TOKEN_OPERATORS.items():
            if _has(file, theirs):
                op = next(launches[name] for name in ours if name in launches)
                is_norm = theirs.endswith("layernorm")
                seconds = file.seconds(theirs)[rows] + (np.nan_to_num(added_s) if is_norm else 0.0)
                yield op, seconds, {} if is_norm else _statistics(file, theirs, rows)


def _attention_rows(file: VidurFile) -> Iterator[Points]:
    """Yield attention cores and, where they were measured, the writes to the KV cache."""
    is_prefill = file.columns["is_prefill"].astype(bool)
    for shard, rows in _shards(file, "n_q_head"):
        batch, chunk, cached = (
            file.numbers(name)[rows] for name in ("batch_size", "prefill_chunk_size", "kv_cache_size")
        )
        prefill = is_prefill[rows]
        length = 2 * cached[prefill] + chunk[prefill]
        (prefilled,) = prefill_launches(shard, chunk[prefill] * batch[prefill] / length, length)
        # Vidur's kv_cache_size leaves out the token that is being computed.
        (decoded,) = decode_launches(shard, batch[~prefill], cached[~prefill] + 1)
        parts = [("attn_prefill", prefilled.op, rows[prefill]), ("attn_decode", decoded.op, rows[~prefill])]
        if _has(file, "attn_kv_cache_save"):
            tokens = np.where(prefill, batch * chunk, batch)
            launches = {launch.name: launch.op for launch in token_launches(shard, tokens)}
            parts.append(("attn_kv_cache_save", launches["kv_cache_write"], rows))
        for theirs, op, measured in parts:
            if measured.size and _has(file, theirs):
                yield op, file.seconds(theirs)[measured], _statistics(file, theirs, measured)


def _collective_rows(file: VidurFile) -> Iterator[Points]:
    kinds = file.columns["collective"].astype(str)
    workers, per_node = file.numbers("num_workers"), file.numbers("devices_per_node")
    for kind, ranks, local in sorted({*zip(kinds.tolist(), workers.tolist(), per_node.tolist(), strict=True)}):
        rows = np.flatnonzero((kinds == kind) & (workers == ranks) & (per_node == local))
        op = Collective(kind, file.numbers("size")[rows], int(ranks), int(-(-ranks // local)))
        yield op, file.seconds(kind)[rows], _statistics(file, kind, rows)


def _shards(file: VidurFile, heads_column: str) -> Iterator[tuple[Shard, NDArray[np.intp]]]:
    """Yield each model shape and split of a file with its rows."""
    names = ("n_embd", heads_column, "n_kv_head", "num_tensor_parallel_workers", "n_expanded_embd", "vocab_size")
    known = [name for name in names if name in file.columns]
    shapes = np.column_stack([file.numbers(name) for name in known])
    gated = bool(file.columns.get("use_gated_mlp", (True,))[0])
    norms = 1 if _has(file, "mlp_act") and not _has(file, "post_attention_layernorm") else 2
    for shape in np.unique(shapes, axis=0):
        sizes = dict(zip(known, map(int, shape), strict=True))
        heads, width = sizes[heads_column], sizes["n_embd"]
        attention = GroupedQueryAttention(num_heads=heads, num_kv_heads=sizes["n_kv_head"], head_dim=width // heads)
        feed_forward = DenseFeedForward(intermediate_size=sizes.get("n_expanded_embd", 4 * width), gated=gated)
        group = LayerGroup(num_layers=1, attention=attention, feed_forward=feed_forward, num_norms=norms)
        model = ModelSpec(
            name="vidur",
            hidden_size=width,
            vocab_size=sizes.get("vocab_size", 32000),
            max_context_tokens=1 << 20,
            layers=(group,),
        )
        shard = Shard(model, model.precision, Parallelism(tp=sizes["num_tensor_parallel_workers"]))
        yield shard, np.flatnonzero(np.all(shapes == shape, axis=1))


def _has(file: VidurFile, operator: str) -> bool:
    return f"time_stats.{operator}.median" in file.columns


def _statistics(file: VidurFile, operator: str, rows: NDArray[np.intp]) -> dict[str, Floats]:
    kinds = ("mean", "min", "max", "std")
    statistics = {f"{kind}_s": file.numbers(f"time_stats.{operator}.{kind}")[rows] * MS for kind in kinds}
    return statistics | dict.fromkeys(("num_samples", "num_outliers"), np.full(len(rows), np.nan))
