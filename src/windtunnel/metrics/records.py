"""Records of a run, as columns with units: one row per request, one row per run of equal steps.

A simulation and a real engine fill the same tables, so that validation is a join.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.errors import MissingExtraError, did_you_mean

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

Floats = NDArray[np.float64]

REQUEST_COLUMNS: Mapping[str, str] = {
    "request": "position in the order of sending, from 0",
    "arrival_s": "when the client sent it",
    "scheduled_s": "when its first tokens were scheduled",
    "first_token_s": "when the engine had its first output token",
    "finish_s": "when the engine had its last output token",
    "input_tokens": "prompt",
    "output_tokens": "generated",
    "priority": "smaller goes first",
    "replica": "that served it",
    "num_preemptions": "times that it was preempted and computed again",
    "cached_tokens": "of the prompt, found in the KV cache or below it when it was first scheduled",
    "loaded_tokens": "of those, brought up from lower KV tiers",
    "queueing_s": "scheduled - arrival",
    "prefill_s": "first token - scheduled",
    "ttft_s": "time to first token at the client: first token - arrival, and the frontend's share",
    "tpot_s": "time per output token: (finish - first token) / (output tokens - 1); NaN for a single token",
    "e2e_s": "end to end at the client: finish - arrival, and the frontend's share",
    "is_warmup": "sent before the measurement; left out of the summary",
    "tenant": "position of its tenant's name in the summary, from 0; -1: none",
    "itl_max_s": "longest gap before one of its tokens; NaN for a single token, and where it was preempted or left out",
    "execution_s": "in steps that computed prompts before its first token, or decoded after it; NaN in a pipeline",
}
"""Column -> meaning. All times count from the start of the simulation."""

POOL_COLUMNS: Mapping[str, str] = {
    "prefill_replica": "that computed the prompt; `replica` decoded",
    "handed_s": "end of the prefill of a request that was handed off; NaN where one replica did all",
    "transfer_start_s": "when its KV began to be read; with overlap during the prefill",
    "transfer_end_s": "when all of it had been read",
}
"""Further columns of the request table of a deployment with pools."""

STEP_COLUMNS: Mapping[str, str] = {
    "start_s": "of the first step",
    "duration_s": "of all steps of the row together",
    "num_steps": "equal steps: the same requests decoded, durations within 1%",
    "replica": "that ran them",
    "decode_tokens": "of each step, one a decoding request",
    "prefill_tokens": "of each step",
    "num_prefills": "prompts with a chunk in the step",
    "num_sampled": "positions sampled in the first step",
    "context_tokens": "in the KV cache of the decoding requests, at the start",
    "prefill_pairs": "query-key pairs of the prefill chunks",
    "used_blocks": "KV blocks in use at the end",
    "num_running": "requests admitted",
    "num_waiting": "requests in the queue",
    "paused_tokens": "decode tokens of the first step whose predecessor is older than the step",
    "resumed_tokens": "tokens that end the prefill of a request preempted before",
    "load_s": "of the first step, waiting for KV blocks from lower tiers",
    "late_gap_s": "mean time since the predecessors of paused and resumed tokens",
}


@dataclass(frozen=True, eq=False)
class Table:
    """Named columns of equal length; `table["ttft_s"]` is a numpy array."""

    columns: Mapping[str, NDArray[Any]]
    meanings: Mapping[str, str]

    def __getitem__(self, name: str) -> NDArray[Any]:
        if name not in self.columns:
            raise KeyError(f"there is no column {name!r}; {did_you_mean(name, self.columns, 'see .meanings')}")
        return self.columns[name]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __repr__(self) -> str:
        return f"Table({len(self):,} rows: {', '.join(self.columns)})"

    def with_columns(self, columns: Mapping[str, NDArray[Any]], meanings: Mapping[str, str]) -> "Table":
        """Return the table with further columns."""
        return Table({**self.columns, **columns}, {**self.meanings, **meanings})

    def replaced(self, **columns: NDArray[Any]) -> "Table":
        """Return the table with other values in some of its columns."""
        return Table({**self.columns, **columns}, self.meanings)

    def where(self, rows: NDArray[np.bool_] | NDArray[np.int64]) -> "Table":
        """Return the rows that a mask or positions select."""
        return Table({name: column[rows] for name, column in self.columns.items()}, self.meanings)

    def to_arrow(self) -> "pa.Table":
        """Return a pyarrow table; the metadata of a field hold its meaning."""
        import pyarrow as pa

        fields = [
            pa.field(name, pa.from_numpy_dtype(column.dtype), metadata={"meaning": self.meanings[name]})
            for name, column in self.columns.items()
        ]
        return pa.table([pa.array(column) for column in self.columns.values()], schema=pa.schema(fields))

    def to_pandas(self) -> "pd.DataFrame":
        """Return a pandas data frame.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError:
            raise MissingExtraError("pandas", "pandas") from None
        return pd.DataFrame(dict(self.columns))

    def write_parquet(self, path: Path) -> None:
        """Write the table as a Parquet file."""
        import pyarrow.parquet as pq

        pq.write_table(self.to_arrow(), path)


def time_per_output_token_s(first_token_s: Floats, finish_s: Floats, output_tokens: NDArray[np.int64]) -> Floats:
    """Return (finish - first token) / (output tokens - 1) of each request; NaN for a single token."""
    gaps = output_tokens - 1
    tpot_s = np.full(gaps.size, np.nan)
    np.divide(finish_s - first_token_s, gaps, out=tpot_s, where=gaps > 0)
    return tpot_s


def request_table(
    engine: Mapping[str, NDArray[Any]],
    replica: NDArray[np.int64],
    frontend_s: NDArray[np.float64] | float,
    num_warmup: int,
    tenant: NDArray[np.int64] | None = None,
    cached_tokens: NDArray[np.int64] | None = None,
    loaded_tokens: NDArray[np.int64] | None = None,
) -> Table:
    """Return the request table of an engine's records, its last two columns NaN (see `metrics.tokens`).

    Args:
        engine: the seven columns from `arrival_s` to `priority`, and `num_preemptions`, in order of sending.
        replica: replica of each request.
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
