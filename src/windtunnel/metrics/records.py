"""Records of a run, as columns with units: one row per request, one row per run of equal steps.

A simulation and a real engine fill the same tables, so that validation is a join.
"""

from collections.abc import Iterator, KeysView, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from windtunnel.compiled.arrays import Floats, Ints
from windtunnel.errors import did_you_mean, import_extra
from windtunnel.notebook import Tabular
from windtunnel.schema import read_yaml

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

COLUMNS: Mapping[str, Mapping[str, str]] = read_yaml(Path(__file__).with_name("columns.yaml"))
"""Table -> column -> meaning."""
REQUEST_COLUMNS, POOL_COLUMNS, STEP_COLUMNS = (COLUMNS[table] for table in ("requests", "pools", "steps"))


@dataclass(frozen=True, eq=False)
class Table(Tabular):
    """Named columns of equal length; `table["ttft_s"]` is a numpy array."""

    columns: Mapping[str, NDArray[Any]]
    meanings: Mapping[str, str]

    def __getitem__(self, name: str) -> NDArray[Any]:
        if name not in self.columns:
            hint = did_you_mean(str(name), self.columns, "its columns have names, and .rows() returns its rows")
            raise KeyError(f"there is no column {name!r}; {hint}")
        return self.columns[name]

    def __array__(self, *_: Any, **__: Any) -> NDArray[Any]:
        """Refuse to be one array: pandas would take the names of the columns for the rows."""
        raise TypeError("a table is no single array; .to_pandas() or dict(table) has all columns")

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def keys(self) -> KeysView[str]:
        """Return the names of the columns: `dict(table)` is a dictionary of arrays."""
        return self.columns.keys()

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __repr__(self) -> str:
        return f"Table({len(self):,} rows: {', '.join(self.columns)})"

    def with_columns(self, columns: Mapping[str, NDArray[Any]], meanings: Mapping[str, str]) -> "Table":
        return Table({**self.columns, **columns}, {**self.meanings, **meanings})

    def replaced(self, **columns: NDArray[Any]) -> Self:
        """Return the table with other values in some of its columns, or further columns of no meaning."""
        return replace(self, columns={**self.columns, **columns})

    def where(self, rows: NDArray[Any]) -> Self:
        """Return the rows that a mask or positions select."""
        return replace(self, columns={name: column[rows] for name, column in self.columns.items()})

    def rows(self, limit: int | None = None) -> list[dict[str, Any]]:
        """Return the rows, or the first `limit`, as Python's numbers by column."""
        columns = [column[:limit].tolist() for column in self.columns.values()]
        return [dict(zip(self.columns, row, strict=True)) for row in zip(*columns, strict=True)]

    def to_arrow(self) -> "pa.Table":
        """Return a pyarrow table; the metadata of a field hold its meaning."""
        import pyarrow as pa

        fields = [
            pa.field(name, pa.from_numpy_dtype(column.dtype), metadata={"meaning": self.meanings[name]})
            for name, column in self.columns.items()
        ]
        return pa.table([pa.array(column) for column in self.columns.values()], schema=pa.schema(fields))

    def to_pandas(self) -> "pd.DataFrame":
        """Return a pandas data frame; MissingExtraError where pandas is not installed."""
        frame: pd.DataFrame = import_extra("pandas", "pandas").DataFrame(dict(self.columns))
        return frame

    def write_parquet(self, path: Path) -> None:
        import pyarrow.parquet as pq

        pq.write_table(self.to_arrow(), path)


def time_per_output_token_s(first_token_s: Floats, finish_s: Floats, output_tokens: Ints) -> Floats:
    """Return (finish - first token) / (output tokens - 1) of each request; NaN for a single token."""
    gaps = output_tokens - 1
    tpot_s = np.full(gaps.size, np.nan)
    np.divide(finish_s - first_token_s, gaps, out=tpot_s, where=gaps > 0)
    return tpot_s


def request_table(
    engine: Mapping[str, NDArray[Any]],
    replica: Ints,
    frontend_s: Floats | float,
    num_warmup: int,
    tenant: Ints | None = None,
    cached_tokens: Ints | None = None,
    loaded_tokens: Ints | None = None,
) -> Table:
    """Return the request table of an engine's records, its last two columns NaN (see `metrics.tokens`).

    Args:
        engine: the seven columns from `arrival_s` to `priority`, and `num_preemptions`, in order of sending.
        frontend_s: latency that the client sees on top of the engine's, for each request or for all.
        num_warmup: number of warm-up requests, which come first.
        tenant: position of each request's tenant; None: nobody has a name.
        cached_tokens, loaded_tokens: of each prompt; None without prefix caching, or lower tiers.
    """
    first_token_s, finish_s, arrival_s = engine["first_token_s"], engine["finish_s"], engine["arrival_s"]
    n = arrival_s.size
    columns: dict[str, NDArray[Any]] = {
        "request": np.arange(n),
        **{name: engine[name] for name in list(REQUEST_COLUMNS)[1:8]},
        "replica": replica,
        "num_preemptions": engine["num_preemptions"],
        "cached_tokens": np.zeros(n, np.int64) if cached_tokens is None else cached_tokens,
        "loaded_tokens": np.zeros(n, np.int64) if loaded_tokens is None else loaded_tokens,
        "queueing_s": engine["scheduled_s"] - arrival_s,
        "prefill_s": first_token_s - engine["scheduled_s"],
        "ttft_s": first_token_s - arrival_s + frontend_s,
        "tpot_s": time_per_output_token_s(first_token_s, finish_s, engine["output_tokens"]),
        "e2e_s": finish_s - arrival_s + frontend_s,
        "is_warmup": np.arange(n) < num_warmup,
        "tenant": np.full(n, -1) if tenant is None else tenant,
        "itl_max_s": np.full(n, np.nan),
        "execution_s": np.full(n, np.nan),
    }
    return Table(columns, REQUEST_COLUMNS)
