"""Count the requests whose tokens a replica's API server streams beside a new one."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.serving.scenario import Setup


def streams(records: Any, replica: NDArray[np.integer], num_replicas: int) -> NDArray[np.float64]:
    """Count the other requests of its replica that are between first and last token, at each request's first token."""
    counts = np.empty(replica.size)
    for index in range(num_replicas):
        rows = np.flatnonzero(replica == index) if num_replicas > 1 else slice(None)
        first_s, finish_s = records["first_token_s"][rows], records["finish_s"][rows]
        begun = np.searchsorted(np.sort(first_s), first_s, side="right") - 1.0
        ended = np.searchsorted(np.sort(finish_s), first_s, side="right")
        counts[rows] = np.maximum(begun - ended, 0.0)
    return counts


def usual_streams(max_num_seqs: int, setup: Setup, num_replicas: int, concurrency: int) -> float:
    """Return the requests that one replica streams beside a new one in a closed loop whose slots are all taken."""
    return max(min(concurrency / num_replicas, max_num_seqs * setup.parallelism.attention_dp) - 1.0, 0.0)
