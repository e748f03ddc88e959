"""Estimator corrected by measured runs: every class of operators times its factor.

Classes are `gemm`, `experts`, `prefill_attention`, `decode_attention`, `collective` and `other`. A GEMM and the experts
have two regimes, `memory` where reading weights bounds them (small batches, decode) and `compute` where arithmetic does
(prefill), and go smoothly from one to the other; and they may have a factor of their own for a format:
`gemm.nvfp4.memory` is a factor on top of `gemm.memory`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from windtunnel.hardware import Device
from windtunnel.model import operators as ops
from windtunnel.pricing.estimator import Estimate, Estimator
from windtunnel.pricing.roofline import KINDS, machine

CLASSES: Mapping[str, str] = KINDS["classes"]
"""Kind of operator -> its class; kinds that are not named are `other`."""

ARITHMETIC = ("gemm.compute", "experts.compute", "prefill_attention")
"""Factors of what arithmetic bounds, which a lower clock slows."""


def shares(op: ops.Op, device: Device) -> dict[str, NDArray[np.float64]]:
    """Return name of a factor -> share of `op`'s time that it applies to, at every point of its axes; they sum to 1.

    The compute regime's share is t_c / (t_c + t_m) of the times that arithmetic and memory alone would take at the
    device's peak.
    """
    name = CLASSES.get(op.kind, "other")
    if name not in ("gemm", "experts"):
        return {name: np.asarray(1.0)}
    on = machine(device, op.compute_format)
    compute_s, memory_s = np.asarray(op.flops) / on.flops_per_s, np.asarray(op.num_bytes) / on.bytes_per_s
    compute = np.asarray(compute_s / (compute_s + memory_s), np.float64)
    label = f"{name}.{op.compute_format.value}"
    return {f"{label}.memory": 1.0 - compute, f"{label}.compute": compute}


def factor(factors: Mapping[str, float], name: str) -> float:
    """Return the factor of a share: that of its class and regime, times that of its format."""
    kind, _, rest = name.partition(".")
    if not rest:
        return factors.get(kind, 1.0)
    regime = rest.rpartition(".")[2]
    return factors.get(f"{kind}.{regime}", 1.0) * factors.get(name, 1.0)


@dataclass(frozen=True)
class CalibratedEstimator:
    """Another estimator's seconds times the factors of a calibration."""

    estimator: Estimator
    device: Device
    factors: Mapping[str, float]

    def estimate(self, op: ops.Op) -> Estimate:
        """Return the seconds of `op`; coverage and source are those of the estimator beneath."""
        estimate = self.estimator.estimate(op)
        total = sum(share * factor(self.factors, name) for name, share in shares(op, self.device).items())
        seconds = np.asarray(estimate.seconds) * total
        return replace(estimate, seconds=seconds if np.ndim(estimate.seconds) else float(seconds))
