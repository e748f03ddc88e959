"""Recorded runs of Vidur: the configuration, the requests and every batch."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyarrow import parquet

from windtunnel.errors import InputError
from windtunnel.formats.vidur.read import VidurConfig, read_config, read_requests
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
