import numpy as np
import pytest

from windtunnel import catalog
from windtunnel.model import operators as ops
from windtunnel.pricing.aiconfigurator.estimator import CountedOnce, counted_once
from windtunnel.pricing.estimator import Coverage, Estimate, RooflineEstimator, TableEstimator
from windtunnel.pricing.roofline import Roofline

H100 = catalog.device("h100_sxm")


class ByBytes:
    """A kernel takes 2 us and a nanosecond a byte."""

    def estimate(self, op: ops.Op) -> Estimate:
        seconds = 2e-6 + 1e-9 * np.asarray(op.num_bytes, np.float64)
        return Estimate(seconds if np.ndim(seconds) else float(seconds), Coverage.INTERPOLATED, "by bytes", 0.1)


@pytest.mark.parametrize("name", ["rope", "kv_cache_write", "top_k"])
def test_what_attention_and_experts_were_timed_with_costs_nothing_more(name: str) -> None:
    counted = CountedOnce(ByBytes(), fused_norm_tokens=0.0).estimate(ops.Elementwise(name, np.array([1.0, 8.0]), 1e3))
    np.testing.assert_array_equal(counted.seconds, [0.0, 0.0])
    assert counted.source.startswith("within ")


def test_a_norm_in_an_all_reduce_costs_what_its_bytes_do() -> None:
    op = ops.Elementwise("norm", np.array([1.0, 8.0]), 1001.0)
    fused = CountedOnce(ByBytes(), fused_norm_tokens=8.0).estimate(op)
    np.testing.assert_allclose(fused.seconds, [1e-6, 8.007e-6])
    few = CountedOnce(ByBytes(), fused_norm_tokens=7.5).estimate(op)
    np.testing.assert_allclose(few.seconds, [1e-6, 10.008e-6])
    assert fused.source == "by bytes, its launch within the all-reduce"
    alone = CountedOnce(ByBytes(), fused_norm_tokens=0.0).estimate(op)
    np.testing.assert_allclose(alone.seconds, [3.001e-6, 10.008e-6])


@pytest.mark.parametrize("op", [ops.Elementwise("qk_norm", 4.0, 10.0), ops.Gemm(4.0, 64, 128)])
def test_everything_else_costs_what_it_did(op: ops.Op) -> None:
    assert CountedOnce(ByBytes(), fused_norm_tokens=8.0).estimate(op) == ByBytes().estimate(op)


@pytest.mark.parametrize(
    ("engine", "version", "counts_once"),
    [
        ("trtllm", "1.1.0rc2.post2", False),
        ("trtllm", "1.2.0rc0.post1", False),
        ("trtllm", "1.2.0rc1", True),
        ("trtllm", "1.3.0rc20", True),
        ("vllm", "1.2.0", False),
    ],
)
def test_only_kernels_that_overlap_are_counted_once(engine: str, version: str, counts_once: bool) -> None:
    tables = TableEstimator(lambda _: None, Roofline(H100, None))
    assert isinstance(counted_once(tables, engine, version, fused_norm_tokens=0.0), CountedOnce) == counts_once


def test_an_engine_whose_kernels_wait_counts_fused_norms_once_and_all_else_as_it_was_timed() -> None:
    counted = counted_once(
        TableEstimator(lambda _: None, Roofline(H100, None)), "vllm", "0.20.1", fused_norm_tokens=9.0
    )
    assert isinstance(counted, CountedOnce)
    rope = ops.Elementwise("rope", 4.0, 1e3)
    assert counted.estimate(rope) == counted.estimator.estimate(rope)
    norm = ops.Elementwise("norm", 4.0, 1e3)
    assert 0 <= counted.estimate(norm).seconds < 0.5 * counted.estimator.estimate(norm).seconds


def test_a_roofline_holds_nothing_twice() -> None:
    estimator = RooflineEstimator(Roofline(H100))
    assert counted_once(estimator, "trtllm", "1.3.0", fused_norm_tokens=8.0) is estimator
