"""Kernels that an operator's table holds already, and that a step must not pay for again."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from windtunnel.model import operators as ops
from windtunnel.pricing.aiconfigurator.collection import KERNELS
from windtunnel.pricing.estimator import Coverage, Estimate, Estimator, TableEstimator
from windtunnel.versions import version_key

HELD_BY_ALL_REDUCE = "norm"
"""Kernel that a fused all-reduce does too (`AllReduceFusionOp.RESIDUAL_RMS_NORM`): its bytes still move, its launch is
gone."""


@dataclass(frozen=True)
class CountedOnce:
    """Another estimator's seconds, less kernels that tables of other operators hold."""

    estimator: Estimator
    norms_in_all_reduce: bool

    def estimate(self, op: ops.Op) -> Estimate:
        """Return the seconds of `op`: 0 for a kernel of `held_by`, less the launch for a norm in an all-reduce."""
        estimate = self.estimator.estimate(op)
        if not isinstance(op, ops.Elementwise):
            return estimate
        if op.name in KERNELS.held_by:
            nothing = np.asarray(estimate.seconds) * 0.0
            label = f"within {KERNELS.held_by[op.name]}"
            return Estimate(nothing if np.ndim(nothing) else 0.0, Coverage.MEASURED, label, 0.0)
        if op.name == HELD_BY_ALL_REDUCE and self.norms_in_all_reduce:
            launch_s = np.asarray(self.estimator.estimate(ops.Elementwise(op.name, 1.0, 1.0)).seconds)
            seconds = np.maximum(np.asarray(estimate.seconds) - launch_s, 0.0)
            label = f"{estimate.source}, its launch within the all-reduce"
            return replace(estimate, seconds=seconds if np.ndim(seconds) else float(seconds), source=label)
        return estimate


def counted_once(estimator: Estimator, engine: str, version: str, norms_in_all_reduce: bool) -> Estimator:
    """Return `estimator` without what its tables hold twice, for engines whose kernels overlap (`overlapped_since`).

    Args:
        estimator: of measured tables; one of a roofline alone holds nothing twice.
        engine: engine that serves.
        version: of the engine.
        norms_in_all_reduce: whether tensor parallelism reduces, with the norm in the same kernel.
    """
    since = KERNELS.overlapped_since.get(engine)
    overlaps = since is not None and version_key(version) >= version_key(since)
    if not overlaps or not isinstance(estimator, TableEstimator):
        return estimator
    return CountedOnce(estimator, norms_in_all_reduce)
