"""Read tables of recorded steps: CSV, Parquet and JSON lines, with the column names of several recorders."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.errors import InputError, did_you_mean, missing_file
from windtunnel.files import check_depth
from windtunnel.schema import Schema, decode, read_yaml

if TYPE_CHECKING:
    import pyarrow as pa

StepTable = NDArray[Any]
"""Record array of recorded steps, a field for each of `COLUMNS`; numbers are floats, NaN where a cell is empty."""

SUFFIXES = (".csv", ".csv.gz", ".parquet", ".jsonl", ".jsonl.gz")


class StepColumn(Schema):
    """A column of a table of recorded steps (`columns.yaml`)."""

    name: str
    meaning: str
    names: dict[str, float]
    """Name in a file -> factor of its unit."""
    needed: bool = False
    is_text: bool = False


def _columns() -> dict[str, StepColumn]:
    path = Path(__file__).with_name("columns.yaml")
    return {column.name: column for column in decode(read_yaml(path), list[StepColumn], path.name)}


COLUMNS = _columns()


def is_step_table(path: Path) -> bool:
    """Whether a file's name is that of a table."""
    return path.name.endswith(SUFFIXES)


def read_steps(path: Path) -> StepTable:
    """Read a table of recorded steps, a row for each step and rank.

    Raises:
        InputError: the file is missing or no table; a column is missing, given twice, or holds a text for a number.
    """
    table = _flat(_table(path))
    if not table.num_rows:
        raise InputError(f"{path.name} has no steps", "a row a step is needed")
    fields = {column.name: _field(path, table, column) for column in COLUMNS.values()}
    steps = np.empty(table.num_rows, [(name, values.dtype) for name, values in fields.items()])
    for name, values in fields.items():
        steps[name] = values
    return steps


def _table(path: Path) -> pa.Table:
    import pyarrow as pa
    import pyarrow.csv as pc
    import pyarrow.json as pj
    import pyarrow.parquet as pq

    if not path.exists():
        raise missing_file(path)
    if not is_step_table(path):
        raise InputError(f"{path.name} is no table of steps", f"its name must end in {', '.join(SUFFIXES)}")
    try:
        if path.suffix == ".parquet":
            return pq.read_table(path)
        if ".jsonl" in path.suffixes:
            check_depth(path)
            with pa.input_stream(str(path)) as stream:
                return pj.read_json(stream)
        return pc.read_csv(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is not a readable table: {str(error).splitlines()[0]}", "is it cut off?") from None


def _flat(table: pa.Table) -> pa.Table:
    """Return the table with a column for every nested key, its path joined by dots."""
    import pyarrow as pa

    while any(pa.types.is_struct(kind) for kind in table.schema.types):
        table = table.flatten()
    return table


def _field(path: Path, table: pa.Table, column: StepColumn) -> NDArray[Any]:
    """Return a column's values in our unit; zeros, or empty texts, where the table lacks it."""
    import pyarrow as pa

    given = [name for name in column.names if name in table.column_names]
    if len(given) > 1:
        raise InputError(f"{path.name} has two columns of one meaning: {', '.join(given)}", "keep one of them")
    if not given:
        if column.needed:
            names = list(column.names)
            hint = did_you_mean(names[0], table.column_names, f"its columns are {', '.join(table.column_names)}")
            raise InputError(f"{path.name} has no column for {column.meaning}: {' or '.join(names)}", hint)
        return np.full(table.num_rows, "") if column.is_text else np.zeros(table.num_rows)
    values = table.column(given[0])
    if column.is_text:
        return np.array(["" if value is None else str(value) for value in values.to_pylist()])
    try:
        numbers = values.cast(pa.float64())
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{path.name}: {given[0]} is not a number everywhere: {reason}", column.meaning) from None
    return np.asarray(numbers.to_numpy(), np.float64) * column.names[given[0]]
