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


def template_wait_s(setup: Setup, requests: RequestArrays, num_replicas: int) -> Floats | None:
    """Return the seconds that each request waits, before its own, for the templates of others; None: nobody does.

    The event loop of the API server turns from one request to the next, so that requests that come at one time go on
    together, when the last one is done: of 984 cached prompts that vLLM 0.11 got at once, the answers began 5.5 s later
    in the median and 5.8 s in the 99th percentile (GPUStack's page of Qwen3-235B on H100). In a closed loop, requests
    that fill its slots come so, and again after warm-up; later ones find nobody before them.
    """
    each_s = (setup.engine.host.chat_s or 0.0) / num_replicas if setup.client.asks_for_chats else 0.0
    if each_s == 0.0 or requests.previous is not None:
        return None
    wait_s, most = np.zeros(requests.arrival_s.size), requests.concurrency or requests.arrival_s.size
    for begin, end in ((0, requests.num_warmup), (requests.num_warmup, wait_s.size)):
        sent_s = requests.arrival_s[begin : min(begin + most, end)]
        number = np.arange(sent_s.size)
        done_s = each_s * number + np.maximum.accumulate(sent_s - each_s * number)
        wait_s[begin : begin + sent_s.size] = done_s[np.searchsorted(sent_s, sent_s, side="right") - 1] - sent_s
    return wait_s


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
