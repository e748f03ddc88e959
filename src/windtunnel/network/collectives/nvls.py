"""NVLink SHARP (NVLS) as flows: the NVSwitch reduces and multicasts."""

import numpy as np

from windtunnel.errors import InputError
from windtunnel.network.flows import Flows, Hop, Ids, flows_of, steps_of


def nvls(ranks: Ids, switch: int, size_bytes: int, num_chunks: int = 4) -> Flows:
    """Lay out an all-reduce in the NVSwitch: every GPU sends its chunk up, the switch sends the sum to all.

    A chunk follows the one before on the same pair.
    """
    n = len(ranks)
    each = size_bytes // num_chunks
    if each < 1:
        raise InputError(f"{size_bytes} bytes do not fill {num_chunks} chunks")
    gpus = np.asarray(ranks, np.int64)
    up = np.full(n, switch, np.int64)
    ptr = [0]
    parents: list[int] = []
    for chunk in range(num_chunks):
        first = chunk * 2 * n
        for k in range(2 * n):
            if k >= n:
                parents.extend(range(first, first + n))
            if chunk > 0:
                parents.append(first + k - 2 * n)
            ptr.append(len(parents))
    return flows_of(
        np.tile(np.concatenate([gpus, up]), num_chunks),
        np.tile(np.concatenate([up, gpus]), num_chunks),
        each,
        parents=(np.array(ptr), np.array(parents)),
        steps=steps_of(num_chunks, 2 * n),
        hop=Hop.NVLS,
    )
