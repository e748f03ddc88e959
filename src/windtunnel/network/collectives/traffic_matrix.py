"""Read an all-to-all's traffic matrix: a CSV file, a row for each sender, a column for each receiver."""

import csv
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from windtunnel.errors import InputError
from windtunnel.files import read_text


def read_traffic(path: Path, num_ranks: int) -> NDArray[np.int64]:
    """Read (num_ranks, num_ranks) bytes from each rank to each other.

    Raises:
        InputError: the file cannot be read, has another shape, or a field is no number of bytes; names file and line.
    """
    rows = []
    for number, row in enumerate(csv.reader(read_text(path).splitlines()), start=1):
        if not row:
            continue
        if len(row) != num_ranks:
            raise InputError(f"{path}, line {number}: {len(row)} columns; {num_ranks} ranks need {num_ranks}")
        bad = next((field for field in row if not field.strip().isdecimal()), None)
        if bad is not None:
            raise InputError(f"{path}, line {number}: {bad!r} is not a whole number of bytes")
        rows.append([int(field) for field in row])
    if len(rows) != num_ranks:
        raise InputError(f"{path}: {len(rows)} rows; {num_ranks} ranks need {num_ranks}")
    return np.array(rows, np.int64)
