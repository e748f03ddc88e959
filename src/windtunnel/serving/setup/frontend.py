"""Times of API server and client: the requests streamed beside a new one, and requests as the client sees them."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.compiled.arrays import Floats, Ints
from windtunnel.metrics.records import Table, request_table
from windtunnel.serving.scenario import Setup
from windtunnel.workload.client import Client
from windtunnel.workload.generate.requests import RequestArrays

ENGINE_COLUMNS = (
    "arrival_s",
    "scheduled_s",
    "first_token_s",
    "finish_s",
    "input_tokens",
    "output_tokens",
    "priority",
    "num_preemptions",
)
"""Columns of the request table that the loop records."""


def streams(records: Any, replica: Ints, num_replicas: int) -> Floats:
    """Count the other requests of its replica that are between first and last token, at each request's first token."""
    counts = np.empty(replica.size)
    for index in range(num_replicas):
        rows = np.flatnonzero(replica == index) if num_replicas > 1 else slice(None)
        first_s, finish_s = records["first_token_s"][rows], records["finish_s"][rows]
        begun = np.searchsorted(np.sort(first_s), first_s, side="right") - 1.0
        ended = np.searchsorted(np.sort(finish_s), first_s, side="right")
        counts[rows] = np.maximum(begun - ended, 0.0)
    return counts


def client_delay_s(frontend: Client, requests: RequestArrays, records: Any, replica: Ints, num_replicas: int) -> Floats:
    """Return the seconds that pass before each first token beside the engine's; `frontend`: API server and client."""
    return np.asarray(frontend.ttft_s(requests.input_tokens, streams(records, replica, num_replicas)))


def client_table(
    setup: Setup,
    requests: RequestArrays,
    records: Any,
    replica: Ints,
    num_replicas: int,
    **columns: NDArray[Any] | None,
) -> Table:
    """Return the request table of a run as the client sees it; `columns` as of `metrics.records.request_table`."""
    engine_columns = {name: records[name].copy() for name in ENGINE_COLUMNS}
    delay_s = client_delay_s(setup.frontend, requests, engine_columns, replica, num_replicas)
    return request_table(engine_columns, replica, delay_s, requests.num_warmup, **columns)


def usual_frontend_s(setup: Setup, num_replicas: int, requests: RequestArrays) -> float:
    """Return the seconds between an answer and its slot's next request at the engine: think time, and the frontend's
    for a mean prompt in a closed loop whose slots are all taken.
    """
    assert setup.engine.max_num_seqs is not None
    busy = usual_streams(setup.engine.max_num_seqs, setup, num_replicas, requests.concurrency)
    return turnaround_s(setup.frontend, requests, busy)


def turnaround_s(frontend: Client, requests: RequestArrays, num_streams: float) -> float:
    """Return a closed loop's seconds between an answer and the next request; `frontend`: API server and client."""
    return float(frontend.ttft_s(requests.input_tokens.mean(), num_streams)) + (frontend.think_s or 0.0)


def usual_streams(max_num_seqs: int, setup: Setup, num_replicas: int, concurrency: int) -> float:
    """Return the requests that one replica streams beside a new one in a closed loop whose slots are all taken."""
    return max(min(concurrency / num_replicas, max_num_seqs * setup.parallelism.attention_dp) - 1.0, 0.0)
