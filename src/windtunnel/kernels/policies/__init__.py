"""How an engine forms the next batch, and whom a router sends a request to: a file for each family of engines.

A policy fills the lists BATCH and BATCH_TOKENS of its lane with `batch_size` prefill chunks, takes the blocks that the
step needs, and returns how many requests decode in it. Without pipeline parallelism a rank has one lane.
"""

from collections.abc import Iterable

from windtunnel.kernels.state import SGLANG


def in_use(schedulers: Iterable[int]) -> tuple[int | None, int | None]:
    """Whether any of these replicas forms its batches by `form_batch_vllm_v1`, and by `form_batch_sglang`: 1 or None.

    Numba leaves out what stands under `if x is not None` where x is None before it types it, so that a run compiles
    only the policies that it uses: SGLang's are a seventh of the loop.
    """
    are_sglang = [scheduler == SGLANG for scheduler in schedulers]
    return None if all(are_sglang) else 1, 1 if any(are_sglang) else None
