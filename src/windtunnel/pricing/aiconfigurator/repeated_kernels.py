"""Kernels that an operator's table holds already, and that a step must not pay for again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from windtunnel.model import operators as ops
from windtunnel.pricing.estimator import Coverage, Estimate, Estimator, TableEstimator
from windtunnel.versions import version_key

HELD_BY = {"rope": "attention", "kv_cache_write": "attention", "top_k": "experts"}
"""Kernel -> the operator of TensorRT-LLM that does its work and was timed with it: AIConfigurator's collectors call
`attn.forward` with rope's parameters and a KV cache (`collect_attn.py`), and `moe.forward` with the router's logits
(`collect_moe.py`)."""

HELD_BY_ALL_REDUCE = "norm"
"""Kernel that a fused all-reduce does too (`AllReduceFusionOp.RESIDUAL_RMS_NORM`): its bytes still move, its launch is
gone."""

OVERLAPPED_SINCE: Mapping[str, str] = {"trtllm": "1.2.0rc1"}
"""Engine -> its version since which a kernel's launch and prologue overlap the end of the kernel before it
(programmatic dependent launch; `TRTLLM_ENABLE_PDL`, NVIDIA/TensorRT-LLM pull request 7977 of 2025-10-11 "add PDL
support for more kernels"; on without asking since 9695 of 2025-12-25).

Before, every kernel waits for the last block of the one before it, which no table of a kernel timed alone holds. What
is counted twice happens to be as long: TPOT of Llama-3.3-70B with 1.1.0rc2 is 2% short with it and 9% without it
(medians), and that of gpt-oss-120b with 1.2.0rc2 was 9 to 29% long with it and is 7 to 26% long without it."""


@dataclass(frozen=True)
class CountedOnce:
    """Another estimator's seconds, less kernels that tables of other operators hold."""

    estimator: Estimator
    norms_in_all_reduce: bool

    def estimate(self, op: ops.Op) -> Estimate:
        """Return the seconds of `op`: 0 for a kernel of `HELD_BY`, less the launch for a norm in an all-reduce."""
        estimate = self.estimator.estimate(op)
        if not isinstance(op, ops.Elementwise):
            return estimate
        if op.name in HELD_BY:
            nothing = np.asarray(estimate.seconds) * 0.0
            label = f"within {HELD_BY[op.name]}"
            return Estimate(nothing if np.ndim(nothing) else 0.0, Coverage.MEASURED, label, 0.0)
        if op.name == HELD_BY_ALL_REDUCE and self.norms_in_all_reduce:
            launch_s = np.asarray(self.estimator.estimate(ops.Elementwise(op.name, 1.0, 1.0)).seconds)
            seconds = np.maximum(np.asarray(estimate.seconds) - launch_s, 0.0)
            label = f"{estimate.source}, its launch within the all-reduce"
            return replace(estimate, seconds=seconds if np.ndim(seconds) else float(seconds), source=label)
        return estimate


def counted_once(estimator: Estimator, engine: str, version: str, norms_in_all_reduce: bool) -> Estimator:
    """Return `estimator` without what its tables hold twice, for engines whose kernels overlap (`OVERLAPPED_SINCE`).

    Args:
        estimator: of measured tables; one of a roofline alone holds nothing twice.
        engine: engine that serves.
        version: of the engine.
        norms_in_all_reduce: whether tensor parallelism reduces, with the norm in the same kernel.
    """
    since = OVERLAPPED_SINCE.get(engine)
    overlaps = since is not None and version_key(version) >= version_key(since)
    if not overlaps or not isinstance(estimator, TableEstimator):
        return estimator
    return CountedOnce(estimator, norms_in_all_reduce)
