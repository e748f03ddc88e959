"""Which policies a run compiles."""

from collections.abc import Iterable

from windtunnel.serving.state.records import SGLANG


def in_use(schedulers: Iterable[int]) -> tuple[int | None, int | None]:
    """Whether any of these replicas forms its batches by `form_batch_vllm_v1`, and by `form_batch_sglang`: 1 or None.

    Numba leaves out what stands under `if x is not None` where x is None before it types it, so that a run compiles
    only the policies that it uses: SGLang's are a seventh of the loop.
    """
    are_sglang = [scheduler == SGLANG for scheduler in schedulers]
    return None if all(are_sglang) else 1, 1 if any(are_sglang) else None
