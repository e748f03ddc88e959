"""How many requests a replica's API server streams beside a new one."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.serving.scenario import Setup


def streams(records: Any, replica: NDArray[np.integer], num_replicas: int) -> NDArray[np.float64]:
    """Other requests of its replica that have had their first token and not their last, at each one's first token."""
    found = np.empty(replica.size)
    for one in range(num_replicas):
        mine = np.flatnonzero(replica == one) if num_replicas > 1 else slice(None)
        first_s, finish_s = records["first_token_s"][mine], records["finish_s"][mine]
        begun = np.searchsorted(np.sort(first_s), first_s, side="right") - 1.0
        ended = np.searchsorted(np.sort(finish_s), first_s, side="right")
        found[mine] = np.maximum(begun - ended, 0.0)
    return found


def usual_streams(max_num_seqs: int, setup: Setup, num_replicas: int, concurrency: int) -> float:
    """Of a closed loop whose slots are all taken: what one replica streams beside a new request."""
    return max(min(concurrency / num_replicas, max_num_seqs * setup.parallelism.attention_dp) - 1.0, 0.0)
