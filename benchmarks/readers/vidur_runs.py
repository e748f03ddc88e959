"""Recorded runs of Vidur: the configuration, the requests and every batch; the look-up tables of each."""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyarrow import parquet

from windtunnel.errors import InputError
from windtunnel.formats.vidur.read import HOST_OPERATORS, VidurConfig, read_config, read_requests
from windtunnel.workload.generate.requests import RequestArrays

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class VidurBatches:
    """Every batch of a run in its first pipeline stage, in order of forming."""

    number: NDArray[np.int64]
    """[b] in order of forming; batches that a time limit caught in flight are missing."""
    start_s: Floats
    """[b]"""
    duration_s: Floats
    """[b] time in that stage."""
    batch: NDArray[np.int64]
    """[m] number of each part's batch; ascending."""
    request: NDArray[np.int64]
    """[m]"""
    tokens: NDArray[np.int64]
    """[m]"""


def read_batches(path: Path) -> VidurBatches:
    """Read a Parquet file with `stage`, `batch_id`, `start_us`, `duration_us`, `request_ids`, `num_tokens`.

    Raises:
        InputError: the file cannot be read, or a column is missing.
    """
    try:
        table = parquet.read_table(path)
        table = table.filter(pc.equal(table["stage"], 0)).sort_by("batch_id")
        lengths = pc.list_value_length(table["request_ids"]).to_numpy()
        number = table["batch_id"].to_numpy()
        return VidurBatches(
            number=number,
            start_s=table["start_us"].to_numpy() * 1e-6,
            duration_s=table["duration_us"].to_numpy() * 1e-6,
            batch=np.repeat(number, lengths),
            request=pc.list_flatten(table["request_ids"]).to_numpy(),
            tokens=pc.list_flatten(table["num_tokens"]).to_numpy(),
        )
    except KeyError as error:
        raise InputError(f"{path} has no column {error.args[0]!r}") from error
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error


@dataclass(frozen=True, slots=True, eq=False)
class VidurCase:
    """A recorded run."""

    config: VidurConfig
    requests: RequestArrays
    batches: VidurBatches


def read_case(folder: Path) -> VidurCase:
    """Read a run's folder: `config.json`, `requests.parquet` (request metrics) and `iterations.parquet` (batches).

    The first request finds everything idle: it arrives when the first batch starts.

    Raises:
        InputError: a file is missing, or not what its name says.
    """
    batches = read_batches(folder / "iterations.parquet")
    if batches.start_s.size == 0:
        raise InputError(f"{folder / 'iterations.parquet'} has no batches")
    requests = read_requests(folder / "requests.parquet", first_arrival_s=float(batches.start_s[0]))
    return VidurCase(read_config(folder / "config.json"), requests, batches)


def find_tables(folder: Path, config: VidurConfig) -> Path:
    """Find the look-up tables in `folder` that a run was made with, by their names and their contents.

    Names are `tables_MODEL_tpN[ppM][_NOTE...].npz`. A note names the network, which must be the run's, or the tables'
    scheduler; LightLLM's tables have blocks of a token, and no other scheduler's do.

    Raises:
        InputError: none has the run's model and tensor parallelism, its operators, and reaches its batches.
    """
    model = _plain(config.model_name.split("/")[-1])
    candidates = []
    for path in sorted(folder.glob("tables_*.npz")):
        parts = _TABLES_NAME.fullmatch(path.stem)
        if parts is None or not model.startswith(_plain(parts["model"])):
            continue
        notes, pp = parts["notes"].lower().split("_"), int(parts["pp"] or 1)
        networks = [note for note in notes if note in ("pairwise", "dgx")]
        if int(parts["tp"]) != config.tensor_parallel_size or ("lightllm" in notes) != (config.scheduler == "lightllm"):
            continue
        if all(note in config.network_device for note in networks) and _reach(path, config):
            pipelines = pp != config.num_pipeline_stages
            candidates.append((pipelines, config.scheduler not in notes, path.stat().st_size, path))
    if not candidates:
        raise InputError(
            f"{folder} has no look-up tables of {config.model_name} with tp {config.tensor_parallel_size}, "
            f"pp {config.num_pipeline_stages} for {config.scheduler}",
            "they are named tables_MODEL_tpN[ppM][_NOTE].npz",
        )
    return min(candidates)[-1]


_TABLES_NAME = re.compile(r"tables_(?P<model>[^_]+)_tp(?P<tp>\d+)(?:pp(?P<pp>\d+))?(?P<notes>(?:_.*)?)")


def _plain(model: str) -> str:
    """Return the same text for `Meta-Llama-3-8B` and `llama3-8b`."""
    return re.sub(r"[^a-z0-9]", "", model.lower()).removeprefix("meta")


def _reach(path: Path, config: VidurConfig) -> bool:
    """Whether these tables have the operators of a run and all batches of its predictor."""
    needed = ["all_reduce"] if config.tensor_parallel_size > 1 else []
    needed += ["send_recv"] if config.num_pipeline_stages > 1 else []
    needed += [] if config.skip_cpu_overhead_modeling else HOST_OPERATORS
    try:
        with np.load(path) as archive:
            return (
                all(name in archive for name in needed)
                and len(archive["attn_prefill_chunk"]) >= config.prediction_max_prefill_chunk_size
                and len(archive["attn_decode_bs"]) >= config.prediction_max_batch_size
            )
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{path} is not an archive of Vidur's prediction tables") from error
