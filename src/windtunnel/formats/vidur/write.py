"""Write Vidur's `request_metrics.csv` of a run (`vidur/metrics/`).

Times of requests are the engine's, in seconds, without the frontend's share. Normalised columns divide by a request's
own prompt or output tokens, also after a restart.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.compiled.arrays import Floats
from windtunnel.files import write_bytes
from windtunnel.metrics.records import Table
from windtunnel.metrics.tokens import rows_by_replica, with_token_times
from windtunnel.serving.scenario import Setup


def request_metrics(requests: Table, steps: Table, setup: Setup, num_replicas: int) -> dict[str, NDArray[Any]]:
    """Return the columns of `request_metrics.csv`: name -> values `[num_requests]`, in order of sending."""
    rows = rows_by_replica(requests, steps, num_replicas)
    device_steps = steps.replaced(duration_s=_device_s(steps, setup))
    model_execution_s = with_token_times(requests, device_steps, rows, setup.parallelism.pp)["execution_s"]
    return columns_of(requests, model_execution_s)


def columns_of(requests: Table, model_execution_s: Floats) -> dict[str, NDArray[Any]]:
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


def _device_s(steps: Table, setup: Setup) -> Floats:
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
