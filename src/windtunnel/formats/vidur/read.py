"""Read the `config.json` of a Vidur run, its look-up tables and its requests.

Its profiling data too, in our vocabulary. Layout (`data/profiling`): `compute/<device>/<organisation>/<model>/mlp.csv`
and `attention.csv`, `network/<network device>/all_reduce.csv` and `send_recv.csv`, `cpu_overheads/...`. All times are
milliseconds, sizes bytes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from windtunnel.compiled.arrays import Floats, Ints
from windtunnel.errors import InputError
from windtunnel.files import decode_json
from windtunnel.model.attention.grouped_query import GroupedQueryAttention
from windtunnel.model.feed_forward.dense import DenseFeedForward
from windtunnel.model.launches.forward import decode_launches, prefill_launches, token_launches
from windtunnel.model.operators import Collective
from windtunnel.model.parallelism import Parallelism
from windtunnel.model.shape import LayerGroup, ModelSpec, Shard
from windtunnel.pricing.table import MeasurementTable, Points, require_columns, tables_from
from windtunnel.schema import read_yaml
from windtunnel.units import GIB
from windtunnel.workload.generate.requests import RequestArrays
from windtunnel.workload.traces.table_file import header_of, read_columns

_CONFIG: Mapping[str, Any] = read_yaml(Path(__file__).with_name("config.yaml"))
_PLACES: Mapping[str, str] = {
    **{f"{section}.{name}".strip("."): name for section, names in _CONFIG["sections"].items() for name in names},
    **_CONFIG["renamed"],
}
"""Place in a `config.json`, keys joined by dots -> field of `VidurConfig`."""


class VidurConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A run's `config.json` under Vidur's names; other keys are ignored."""

    model_name: str
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    embedding_dim: int
    mlp_hidden_dim: int
    use_gated_mlp: bool = True
    total_memory_gb: float
    """Memory of one GPU."""
    network_device: str = ""
    memory_margin_fraction: float = 0.1
    num_pipeline_stages: int = 1
    tensor_parallel_size: int = 1
    num_replicas: int = 1
    router: str
    """Name of the global scheduler."""
    scheduler: str
    """Name of the replica scheduler; fields of other schedulers keep their defaults."""
    batch_size_cap: int = 128
    block_size: int = 16
    watermark_blocks_fraction: float = 0.01
    num_blocks: float | None = None
    max_tokens_in_batch: int = 4096
    chunk_size: int = 512
    max_waiting_iters: int = 10
    seed: int = 42
    generator_seed: int | None = None
    """Seed of the request generator; None: `seed`."""
    gap_generator: str | None = None
    length_generator: str | None = None
    max_tokens: int | None = None
    """Tokens of the longest sequence."""
    num_requests: int | None = None
    duration: float | None = None
    kv_cache_prediction_granularity: int = 64
    prediction_max_prefill_chunk_size: int = 4096
    prediction_max_batch_size: int = 128
    attention_decode_batching_overhead_fraction: float = 0.1
    attention_prefill_batching_overhead_fraction: float = 0.1
    nccl_cpu_launch_overhead_ms: float = 0.02
    nccl_cpu_skew_overhead_per_device_ms: float = 0.0
    skip_cpu_overhead_modeling: bool = True
    time_limit: float = 0


def read_config(path: Path) -> VidurConfig:
    """Read a `config.json` that Vidur wrote; InputError where there is no such file, or it is not one of Vidur's."""
    raw, values = decode_json(path, dict[str, Any], "a configuration that Vidur wrote"), {}
    for place, name in _PLACES.items():
        value: Any = raw
        for key in place.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        if value is not None:
            values[name] = value
    try:
        return msgspec.convert(values, VidurConfig)
    except msgspec.ValidationError as error:
        raise InputError(f"{path} is not a configuration that Vidur wrote: {error}") from None


@dataclass(frozen=True, slots=True)
class VidurMemory:
    """Vidur's memory plan of a replica."""

    max_batch_size: int
    """Number of requests of the longest length that fit."""
    num_blocks: int
    blocks_per_request: int
    """Blocks of a request of the longest length."""


def plan_memory(config: VidurConfig) -> VidurMemory:
    """Plan KV blocks as Vidur does (`vidur/scheduler/utils/memory_planner.py`, `vidur/utils/param_counter.py`).

    Only attention and MLP have weights. A request takes the keys of all layers even where stages share them; the factor
    of the number of stages makes up for it. The blocks hold a whole number of requests of the longest length.
    InputError where the degrees do not divide the model, or nothing fits.
    """
    tp, pp, longest = config.tensor_parallel_size, config.num_pipeline_stages, config.max_tokens or 4096
    if config.num_q_heads % tp or config.embedding_dim % tp or config.num_layers % pp:
        raise InputError(
            f"{config.model_name} with {config.num_q_heads} heads and {config.num_layers} layers is not divisible by "
            f"tensor_parallel_size {tp} and num_pipeline_stages {pp}"
        )
    head_dim = config.embedding_dim // config.num_q_heads
    heads, kv_heads = config.num_q_heads // tp, -(-config.num_kv_heads // tp)
    attention = config.embedding_dim * head_dim * (2 * heads + 2 * kv_heads)
    mlp = (3 if config.use_gated_mlp else 2) * config.embedding_dim * config.mlp_hidden_dim // tp
    weights_bytes = 2 * (attention + mlp) * (config.num_layers // pp)
    request_bytes = 4 * head_dim * kv_heads * longest * config.num_layers
    memory_bytes = config.total_memory_gb * GIB * (1 - config.memory_margin_fraction)
    max_batch = int((memory_bytes - weights_bytes) // request_bytes)
    if max_batch < 1:
        raise InputError(
            f"no request of {longest:,} tokens fits beside the weights of {config.model_name} "
            f"in {config.total_memory_gb:g} GiB",
            "raise tensor_parallel_size or num_pipeline_stages",
        )
    per_request = longest // config.block_size
    num_blocks = int(config.num_blocks or per_request * max_batch * pp)
    return VidurMemory(min(max_batch, config.batch_size_cap), num_blocks, per_request)


COLUMNS: Mapping[str, Any] = read_yaml(Path(__file__).with_name("columns.yaml"))
"""Columns of Vidur's profiling data and look-up tables, by subject."""
TOKEN_OPERATORS: Sequence[str] = COLUMNS["layer_operators"]
OPTIONAL_OPERATORS: Sequence[str] = COLUMNS["optional_operators"]
HOST_OPERATORS: Sequence[str] = COLUMNS["host_operators"]


@dataclass(frozen=True, slots=True, eq=False)
class OperatorTables:
    """Times of a layer's operators by shape, in seconds, as Vidur's predictor looks them up.

    All arrays start at 0 tokens, requests or cached tokens, which cost nothing.
    """

    token_s: dict[str, Floats]
    """Operator -> [tokens + 1]; with `all_reduce`, `send_recv` and `attn_kv_cache_save` where they are known."""
    prefill_s: Floats
    """[cached tokens / granularity + 1, chunk + 1]"""
    decode_s: Floats
    """[requests + 1, cached tokens / granularity + 1]"""
    host_s: dict[str, Floats]
    """Operator -> [requests + 1], by batch size; empty where it was not measured."""


def read_tables(path: Path, granularity: int = 64) -> OperatorTables:
    """Read Vidur's prediction tables from an `.npz` of arrays in milliseconds.

    Arrays: `NAME` with its tokens (or batch sizes) in `NAME__x`; `attn_prefill` [kv, chunk] and `attn_decode` [batch,
    kv] with their axes in `attn_prefill_kv`, `attn_prefill_chunk`, `attn_decode_bs`, `attn_decode_kv`; `granularity` is
    the number of tokens between two entries of the kv axes. InputError where the file is not such an archive, an array
    is missing, or an axis has gaps.
    """
    try:
        with np.load(path) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (OSError, ValueError) as error:
        what = error.strerror if isinstance(error, OSError) and error.strerror else "it is not an .npz archive"
        raise InputError(f"{path} cannot be read: {what}", "Vidur's prediction tables are needed") from error

    by_tokens = (*TOKEN_OPERATORS, "attn_kv_cache_save", "all_reduce", "send_recv")
    steps = dict.fromkeys(("attn_prefill_kv", "attn_decode_kv"), granularity)
    steps |= dict.fromkeys(("attn_prefill_chunk", "attn_decode_bs"), 1)
    steps |= {f"{name}__x": 1 for name in (*by_tokens, *HOST_OPERATORS) if name in arrays}
    needed = [name for name in (*TOKEN_OPERATORS, "attn_kv_cache_save") if name not in OPTIONAL_OPERATORS]
    missing = [name for name in (*needed, "attn_prefill", "attn_decode", *steps) if name not in arrays]
    if missing:
        raise InputError(f"{path} has no {', '.join(missing)}", "it should hold Vidur's prediction tables")
    for name, step in steps.items():
        first = 0 if step > 1 else 1
        if not np.array_equal(arrays[name], first + step * np.arange(len(arrays[name]))):
            raise InputError(f"{path}: the axis {name} does not go from {first} in steps of {step}")
    return OperatorTables(
        token_s={name: np.pad(arrays[name] * 1e-3, (1, 0)) for name in by_tokens if name in arrays},
        prefill_s=np.pad(arrays["attn_prefill"] * 1e-3, ((0, 0), (1, 0))),
        decode_s=np.pad(arrays["attn_decode"] * 1e-3, ((1, 0), (0, 0))),
        host_s={name: np.pad(arrays[name] * 1e-3, (1, 0)) for name in HOST_OPERATORS if name in arrays},
    )


def request_metrics(path: Path, names: Sequence[str]) -> list[NDArray[Any]]:
    """Read columns of `request_metrics.csv`, or Parquet of these names; InputError where none, or one is missing."""
    header = header_of(path)
    missing = [name for name in names if name not in header]
    if missing:
        raise InputError(f"{path} has no column {missing[0]}", "Vidur's request_metrics.csv has it")
    columns = read_columns(path, [name for name in header if name in (*names, "Request Id")])
    order = np.argsort(columns["Request Id"], kind="stable") if "Request Id" in columns else slice(None)
    return [columns[name][order] for name in names]


def read_requests(path: Path, first_arrival_s: float = 0.0) -> RequestArrays:
    """Read the requests of `request_metrics.csv` (or the same columns as Parquet).

    Vidur writes the time between arrivals, so the first one's is not in the file. Lengths are those at arrival, also of
    restarted requests. InputError where the file cannot be read, or a column is missing.
    """
    names = ("request_inter_arrival_delay", "request_num_prefill_tokens", "request_num_decode_tokens")
    gaps_s, prefill_tokens, decode_tokens = request_metrics(path, names)
    gaps_s = gaps_s.astype(np.float64)
    gaps_s[:1] = first_arrival_s
    tokens = prefill_tokens.astype(np.int64), decode_tokens.astype(np.int64)
    return RequestArrays(np.cumsum(gaps_s), *tokens, np.zeros(gaps_s.size, np.int64))


def random_replicas(config: VidurConfig, num_requests: int) -> Ints:
    """Draw the replicas of `num_requests` arrivals as Vidur's `random` global scheduler does.

    Python's generator has already drawn the requests: a Poisson gap and a uniform length take one draw each, also for
    requests that a time limit kept from arriving, or that a duration cut off after they were drawn.
    """
    generator = random.Random(config.seed if config.generator_seed is None else config.generator_seed)
    draws = (config.gap_generator == "poisson") + (config.length_generator == "uniform")
    num_drawn = num_requests + 1 if config.duration is not None else config.num_requests or num_requests
    for _ in range(draws * num_drawn):
        generator.random()
    return np.array([generator.randint(1, config.num_replicas) - 1 for _ in range(num_requests)], np.int64)


MS = 1e-3

MEASURED_TOKEN_OPERATORS: Mapping[str, Sequence[str]] = COLUMNS["token_operators"]
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

    `name` is the name of the device, for the tables' source. InputError where the file cannot be read, or is none of
    these.
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
        for theirs, ours in MEASURED_TOKEN_OPERATORS.items():
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
