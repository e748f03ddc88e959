"""Client models of ServeGen: rate and burstiness of each client of a service in windows, and its lengths.

`chunk-N-trace.csv` has a row for each window: time in seconds, requests per second, coefficient of variation of the
gaps, the family of their distribution (Gamma, Weibull or none) and its two parameters, shape and scale.
`chunk-N-dataset.json` has frequencies of input and output lengths by the time from which they hold. Source:
https://github.com/alibaba/ServeGen, README and `servegen/clientpool.py`.
"""

import csv
import io
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from windtunnel.compiled.arrays import Bools, Floats, Ints
from windtunnel.errors import InputError, missing_file

_CHUNK = re.compile(r"chunk-(\d+)-(trace\.csv|dataset\.json)$")
LENGTHS = ("input_tokens", "output_tokens")


@dataclass(frozen=True, slots=True, eq=False)
class LengthTable:
    """Token counts and their relative frequencies, both `[num_values]`."""

    tokens: Ints
    weights: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Client:
    """One client; arrays of shape `[num_windows]`."""

    number: int
    start_s: Floats
    rate_per_s: Floats
    shape: Floats
    """Shape of the distribution of the gaps; 1 is exponential in both families."""
    is_weibull: Bools
    lengths_start_s: Floats
    """`[num_periods]` Start of each period of lengths; periods without lengths are left out."""
    lengths: tuple[tuple[LengthTable, LengthTable], ...]
    """`[num_periods]` Lengths of inputs and outputs; empty where the file is missing."""


def read_clients(path: Path) -> list[Client]:
    """Read the clients of a model, by number; InputError for a missing or broken file, with what is wrong in it."""
    texts = _texts(path)
    numbers = sorted({number for number, _ in texts})
    if not numbers:
        raise InputError(f"{path} has no clients: no files chunk-N-trace.csv and chunk-N-dataset.json")
    return [_client(path, number, texts) for number in numbers]


def _texts(path: Path) -> dict[tuple[int, str], str]:
    """Return (number, kind of file) -> content, from a folder or a tar archive."""
    if path.is_dir():
        files = [file for file in sorted(path.rglob("chunk-*")) if _CHUNK.search(file.name)]
        return {_key(file.name): file.read_text(encoding="utf-8") for file in files}
    import tarfile

    try:
        with tarfile.open(path) as archive:
            members = [member for member in archive if member.isfile() and _CHUNK.search(member.name)]
            files_of = ((member.name, archive.extractfile(member)) for member in members)
            return {_key(name): file.read().decode("utf-8") for name, file in files_of if file is not None}
    except FileNotFoundError:
        raise missing_file(path) from None
    except (tarfile.TarError, EOFError, OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not a folder or a tar archive of client models: {error}") from None


def _key(name: str) -> tuple[int, str]:
    match = _CHUNK.search(name)
    assert match is not None
    return int(match[1]), match[2]


def _client(path: Path, number: int, texts: dict[tuple[int, str], str]) -> Client:
    where = f"{path}: client {number}"
    if (number, "trace.csv") not in texts:
        raise InputError(f"{where} has no chunk-{number}-trace.csv")
    rows = [row for row in csv.reader(io.StringIO(texts[number, "trace.csv"])) if row]
    try:
        start_s = np.array([float(row[0]) for row in rows])
        rate_per_s = np.array([float(row[1]) for row in rows])
        family = [row[3] for row in rows]
        shape = np.array([float(row[4]) if row[3] else 1.0 for row in rows])
        lengths = _lengths(json.loads(texts.get((number, "dataset.json"), "{}")))
    except (ValueError, IndexError, AttributeError, TypeError, KeyError) as error:
        raise InputError(f"{where} is not as ServeGen writes it: {error}") from None
    if unknown := set(family) - {"", "Gamma", "Weibull"}:
        raise InputError(f"{where} has gaps of the family {min(unknown)!r}; known: Gamma, Weibull")
    if np.any(np.diff(start_s) <= 0) or start_s.size < 2 or np.any(rate_per_s < 0) or np.any(shape <= 0):
        raise InputError(f"{where}: windows must be in order, rates not negative and shapes positive")
    return Client(
        number,
        start_s,
        rate_per_s,
        shape,
        np.array([name == "Weibull" for name in family]),
        np.array(sorted(lengths), np.float64),
        tuple(lengths[start] for start in sorted(lengths)),
    )


def _lengths(periods: dict[str, Any]) -> dict[float, tuple[LengthTable, LengthTable]]:
    by_start = {}
    for start, tables in periods.items():
        both = [_table(tables[name]) for name in LENGTHS]
        if all(table.tokens.size for table in both):
            by_start[float(start)] = (both[0], both[1])
    return by_start


def _table(text: Any) -> LengthTable:
    """Read a Python dictionary written out, such as `{9: 0.25, 163: 0.75}`."""
    entries = [entry.split(":") for entry in str(text).strip("{} \n").split(",") if entry.strip()]
    tokens = np.array([int(key) for key, _ in entries], np.int64)
    weights = np.array([float(value) for _, value in entries])
    good = (tokens >= 1) & (weights > 0)
    return LengthTable(tokens[good], weights[good])
