"""Write Vidur's files of a run: `request_metrics.csv` (`vidur/metrics/`) and `chrome_trace.json`.

Times of requests are the engine's, in seconds, without the frontend's share. Normalised columns divide by a request's
own prompt or output tokens, also after a restart.

Source: `Simulator._write_chrome_trace` (vidur/simulator.py) and `to_chrome_trace` of vidur/entities/batch_stage.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.files import write_bytes
from windtunnel.formats.timeline.file import Event, write_events
from windtunnel.metrics.records import Table
from windtunnel.metrics.tokens import rows_by_replica, with_token_times
from windtunnel.serving.scenario import Setup

if TYPE_CHECKING:
    from windtunnel.serving.run import LoopRun


def request_metrics(requests: Table, steps: Table, setup: Setup, num_replicas: int) -> dict[str, NDArray[Any]]:
    """Return the columns of `request_metrics.csv`: name -> values `[num_requests]`, in order of sending."""
    rows = rows_by_replica(requests, steps, num_replicas)
    device_steps = steps.replaced(duration_s=_device_s(steps, setup))
    model_execution_s = with_token_times(requests, device_steps, rows, setup.parallelism.pp)["execution_s"]
    return columns_of(requests, model_execution_s)


def columns_of(requests: Table, model_execution_s: NDArray[np.float64]) -> dict[str, NDArray[Any]]:
    """Return the columns from the request table and the time in steps without the host's share."""
    arrival_s, scheduled_s = requests["arrival_s"], requests["scheduled_s"]
    first_token_s, finish_s = requests["first_token_s"], requests["finish_s"]
    inputs, outputs, execution_s = requests["input_tokens"], requests["output_tokens"], requests["execution_s"]
    served_s = finish_s - scheduled_s
    return {
        "Request Id": requests["request"],
        "request_e2e_time": finish_s - arrival_s,
        "request_e2e_time_normalized": (finish_s - arrival_s) / outputs,
        "request_execution_time": execution_s,
        "request_execution_time_normalized": execution_s / outputs,
        "request_model_execution_time": model_execution_s,
        "request_model_execution_time_normalized": model_execution_s / outputs,
        "request_preemption_time": served_s - execution_s,
        "request_scheduling_delay": scheduled_s - arrival_s,
        "request_execution_plus_preemption_time": served_s,
        "request_execution_plus_preemption_time_normalized": served_s / outputs,
        "prefill_e2e_time": first_token_s - arrival_s,
        "prefill_time_execution_plus_preemption": first_token_s - scheduled_s,
        "prefill_time_execution_plus_preemption_normalized": (first_token_s - scheduled_s) / inputs,
        "decode_time_execution_plus_preemption_normalized": (finish_s - first_token_s) / outputs,
        "request_inter_arrival_delay": np.diff(arrival_s, prepend=np.nan),
        "request_num_tokens": inputs + outputs,
        "request_num_prefill_tokens": inputs,
        "request_num_decode_tokens": outputs,
        "request_pd_ratio": inputs / outputs,
        "request_num_restarts": requests["num_preemptions"],
    }


def _device_s(steps: Table, setup: Setup) -> NDArray[np.float64]:
    """Return durations without the host's work, where that is not hidden behind the device's."""
    host = setup.engine.host
    if setup.engine.async_scheduling:
        return np.asarray(steps["duration_s"])
    host_s = float(host.step_s or 0.0) + float(host.request_s or 0.0) * steps["num_running"]
    return np.asarray(np.maximum(steps["duration_s"] - host_s * steps["num_steps"], 0.0))


def write_request_metrics(path: Path, columns: dict[str, NDArray[Any]]) -> None:
    """Write the columns as CSV, completely or not at all; unknown values are empty cells, as in Vidur's file."""
    import pyarrow as pa
    from pyarrow import csv

    table = pa.table({name: pa.array(values, from_pandas=True) for name, values in columns.items()})
    content = pa.BufferOutputStream()
    csv.write_csv(table, content)
    write_bytes(path, content.getvalue().to_pybytes())


def chrome_events(run: LoopRun) -> Iterator[Event]:
    """Yield the bars of `chrome_trace.json`, in the order in which stages end; microseconds."""
    trail = run.trail
    assert trail is not None
    for position in np.argsort(trail.stage_s[:, :, 1].ravel(), kind="stable").tolist():
        batch, stage = divmod(position, trail.stage_s.shape[1])
        start_s, end_s = trail.stage_s[batch, stage].tolist()
        first, end = np.searchsorted(trail.members[:, 0], (batch, batch + 1))
        requests, tokens = (trail.members[first:end, column].tolist() for column in (1, 2))
        args = {"batch_id": batch, "batch_size": len(requests), "request_ids": requests, "num_tokens": tokens}
        yield {
            "name": str(requests),
            "ph": "X",
            "ts": start_s * 1e6,
            "dur": (end_s - start_s) * 1e6,
            "pid": int(run.steps["replica"][batch]),
            "tid": stage,
            "args": args,
        }


def write_chrome_trace(path: Path, events: Iterable[Event]) -> None:
    """Write `chrome_events` as Vidur's file; a file of that name is replaced."""
    write_events(path, b'{"traceEvents":[', events, b"]}\n")
