"""Factors apply to the operators that they name, in the regime that they name, and to nothing else."""

import numpy as np
import pytest

from windtunnel import catalog
from windtunnel.model import operators as ops
from windtunnel.model.precision import Format
from windtunnel.pricing.calibrated import CalibratedEstimator, factor, shares
from windtunnel.pricing.estimator import Coverage, Estimate

H100 = catalog.device("h100_sxm")


class OneSecond:
    def estimate(self, op: ops.Op) -> Estimate:
        shape = np.broadcast(*(np.asarray(value) for value in ops.axis_values(op).values())).shape
        return Estimate(np.ones(shape) if shape else 1.0, Coverage.MEASURED, "one", 0.0)


def test_shares_sum_to_one_and_prefill_is_bound_by_arithmetic() -> None:
    tokens = np.array([1.0, 64.0, 8192.0])
    parts = shares(ops.Gemm(tokens, 8192, 8192, Format.FP8), H100)
    assert sum(parts.values()) == pytest.approx(np.ones(3))
    compute = parts["gemm.fp8.compute"]
    assert compute[0] < 0.01
    assert compute[2] > 0.8


def test_a_format_multiplies_its_class() -> None:
    factors = {"gemm.memory": 1.1, "gemm.nvfp4.memory": 1.2, "collective": 2.0}
    assert factor(factors, "gemm.nvfp4.memory") == pytest.approx(1.32)
    assert factor(factors, "gemm.bf16.memory") == pytest.approx(1.1)
    assert factor(factors, "gemm.bf16.compute") == 1.0
    assert factor(factors, "collective") == 2.0


def test_an_estimate_is_scaled_between_its_regimes() -> None:
    calibrated = CalibratedEstimator(OneSecond(), H100, {"gemm.memory": 2.0, "gemm.compute": 4.0})
    small, large = ops.Gemm(1.0, 8192, 8192), ops.Gemm(65536.0, 8192, 8192)
    assert calibrated.estimate(small).seconds == pytest.approx(2.0, rel=0.01)
    assert calibrated.estimate(large).seconds == pytest.approx(4.0, rel=0.05)
    assert calibrated.estimate(ops.Elementwise("norm", 4.0, 8.0)).seconds == 1.0
