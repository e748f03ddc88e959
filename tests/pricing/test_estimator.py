from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.model import operators as ops
from windtunnel.model.attention.grouped_query import PrefillAttention
from windtunnel.model.feed_forward.experts import Experts
from windtunnel.model.precision import Format
from windtunnel.pricing.estimator import (
    COVERAGES,
    Coverage,
    Estimate,
    RooflineEstimator,
    TableEstimator,
    canonical,
    users_estimator,
)
from windtunnel.pricing.roofline import Roofline
from windtunnel.pricing.table import Floats, MeasurementTable

ROOFLINE = Roofline(catalog.device("h100_sxm"))
M = [1.0, 16, 256, 4000]
SLOWER = 1.3
"""How much slower than the roofline everything in these tables is."""


def gemms(noise: float = 0.0) -> MeasurementTable:
    """GEMMs on a grid of n and k, `SLOWER` than the roofline."""
    m, n, k = (column.ravel() for column in np.meshgrid(M, [1024.0, 4096, 8192], [512.0, 2048, 8192], indexing="ij"))
    seconds = SLOWER * np.asarray(ROOFLINE.seconds(ops.Gemm(m, n, k)))  # type: ignore[arg-type]
    seconds *= np.exp(np.random.default_rng(0).normal(0, noise, len(m))) if noise else 1.0
    return MeasurementTable("gemm", {"n": n, "k": k}, {"m": m}, seconds, "gemms", {"format": "bf16"})


def attention() -> MeasurementTable:
    batch, tokens, heads = (
        column.ravel() for column in np.meshgrid([1.0, 4, 16], [128.0, 1024, 4096], [8.0, 32], indexing="ij")
    )
    sites = {
        "num_heads": heads,
        "num_kv_heads": heads / 8,
        "head_dim": np.full(len(heads), 128.0),
        "window_tokens": np.zeros(len(heads)),
    }
    op: Any = PrefillAttention(batch, tokens, heads, heads / 8, 128)  # type: ignore[arg-type]
    seconds = SLOWER * np.asarray(ROOFLINE.seconds(op))
    axes = {"batch": batch, "num_tokens": tokens}
    return MeasurementTable("prefill_attention", sites, axes, seconds, "attention", {"kv_format": "bf16"})


def estimator(table: MeasurementTable | None = None) -> TableEstimator:
    only = table or gemms()
    return TableEstimator(lambda op: only if op.kind == only.kind else None, ROOFLINE)


def expected(op: ops.Op) -> Floats:
    return SLOWER * np.asarray(ROOFLINE.seconds(op))


def test_a_measured_point_is_itself() -> None:
    noisy = gemms(noise=0.3)
    estimated = estimator(noisy).estimate(ops.Gemm(np.array(M), 4096, 2048))
    _, seconds = noisy.site_rows((4096.0, 2048.0))
    np.testing.assert_allclose(estimated.seconds, seconds)
    assert (estimated.coverage, estimated.source, estimated.relative_error) == (Coverage.MEASURED, "gemms", 0.0)


def test_a_window_of_another_kernels_rows_takes_no_longer_than_no_window() -> None:
    """Windows were measured with heads of 256 alone, by a kernel 40 times slower than the one for heads of 128."""
    table = attention()
    sites = {name: np.tile(values, 2) for name, values in table.sites.items()}
    half = len(table)
    sites["head_dim"][half:], sites["window_tokens"][half:] = 256.0, 1024.0
    axes = {name: np.tile(values, 2) for name, values in table.axes.items()}
    seconds = np.concatenate([table.seconds, 40 * table.seconds])
    both = estimator(MeasurementTable(table.kind, sites, axes, seconds, "attention", {"kv_format": "bf16"}))
    whole = PrefillAttention(1.0, 4096.0, 8, 1, 128)
    assert both.estimate(replace(whole, window_tokens=1024)).seconds <= both.estimate(whole).seconds


def test_weights_come_from_memory_though_a_loop_found_them_in_the_cache() -> None:
    """16 MiB of weights in 2 us are 8.4 TB/s; H100's memory has 3.35."""
    columns = {"n": np.full(2, 4096.0), "k": np.full(2, 2048.0)}
    seconds = np.array([2e-6, 900e-6])
    table = MeasurementTable("gemm", columns, {"m": np.array([1.0, 4096.0])}, seconds, "gemms", {"format": "bf16"})
    priced = estimator(table).estimate(ops.Gemm(np.array([1.0, 4096.0]), 4096, 2048))
    assert np.asarray(priced.seconds).tolist() == pytest.approx([4096 * 2048 * 2 / 3.35e12, 900e-6], rel=1e-3)
    assert (priced.coverage, priced.source) == (Coverage.SCALED, "gemms, no faster than memory")
    small = ops.Gemm(1.0, 2048, 512)
    card = Roofline(catalog.device("l4"))
    assert RooflineEstimator(card).estimate(small).seconds >= 2 * 2048 * 512 / card.device.memory_bytes_per_s


@pytest.mark.parametrize(
    ("op", "coverage"),
    [
        (ops.Gemm(100.0, 4096, 2048), Coverage.INTERPOLATED),
        (ops.Gemm(100.0, 5120, 3000), Coverage.INTERPOLATED),
        (ops.Gemm(100.0, 4096, 3000), Coverage.INTERPOLATED),
        (ops.Gemm(9999.0, 4096, 2048), Coverage.SCALED),
        (ops.Gemm(100.0, 16384, 2048), Coverage.SCALED),
        (ops.Gemm(9999.0, 5120, 3000), Coverage.SCALED),
    ],
)
def test_elsewhere_the_utilisation_of_what_was_measured_holds(op: ops.Gemm, coverage: Coverage) -> None:
    """Every table here is 1.3 times slower than the roofline, so every estimate is, give or take a cell's bounds."""
    estimated = estimator().estimate(op)
    assert estimated.coverage is coverage
    assert estimated.seconds == pytest.approx(
        float(expected(op)), rel=0.25 if coverage is Coverage.INTERPOLATED else 1e-6
    )
    assert 0 < estimated.relative_error < 0.2


def test_a_family_has_the_coverage_of_its_least_sure_point() -> None:
    assert estimator().estimate(ops.Gemm(np.array([1.0, 9999.0]), 4096, 2048)).coverage is Coverage.SCALED
    assert COVERAGES.index(Coverage.ROOFLINE) > COVERAGES.index(Coverage.SCALED) > COVERAGES.index(Coverage.MEASURED)


@pytest.mark.parametrize("n", [4096, 5120, 50000])
def test_arrays_give_what_numbers_give(n: int) -> None:
    m = np.array([[1.0, 3, 16], [100, 4096, 30000]])
    together = estimator(gemms(noise=0.1)).estimate(ops.Gemm(m, n, 2048)).seconds
    assert np.shape(together) == m.shape
    alone = [
        [estimator(gemms(noise=0.1)).estimate(ops.Gemm(float(priced), n, 2048)).seconds for priced in row] for row in m
    ]
    np.testing.assert_allclose(together, alone)
    assert isinstance(alone[0][0], float)


def test_axes_broadcast() -> None:
    op = PrefillAttention(np.array([[1.0], [2.0]]), np.array([128.0, 500, 9000]), 8, 1, 128)
    estimated = estimator(attention()).estimate(op)
    assert np.shape(estimated.seconds) == (2, 3)


def test_no_step_at_the_edges_of_the_grid() -> None:
    for op in (ops.Gemm(1.0, 4096, 2048), ops.Gemm(1.0, 5120, 3000)):
        inside, outside = (
            estimator(gemms(noise=0.2)).estimate(replace(op, m=4000.0 * factor)).seconds
            for factor in (1 - 1e-7, 1 + 1e-7)
        )
        assert outside == pytest.approx(inside, rel=1e-4)


HOLE = (256.0, 4096.0, 2048.0)


def stepped(bump: float, without_hole: bool) -> MeasurementTable:
    """GEMMs that all cost `bump` more at m = 256, one of them not measured there."""
    table = gemms()
    seconds = table.seconds * np.where(table.axes["m"] == HOLE[0], bump, 1.0)
    family = MeasurementTable(table.kind, table.sites, table.axes, seconds, table.source, table.words)
    points = [table.axes["m"] == HOLE[0], table.sites["n"] == HOLE[1], table.sites["k"] == HOLE[2]]
    return family.take(~np.logical_and.reduce(points)) if without_hole else family


def test_a_missing_point_bends_as_the_same_point_of_similar_shapes() -> None:
    m, n, k = HOLE
    op = ops.Gemm(m, int(n), int(k))
    measured, filled = (estimator(stepped(2.0, hole)).estimate(op) for hole in (False, True))
    assert measured.coverage is Coverage.MEASURED
    assert filled.coverage is Coverage.INTERPOLATED
    assert filled.relative_error > 0
    assert filled.seconds == pytest.approx(measured.seconds, rel=0.15)
    straight = estimator(stepped(1.0, True)).estimate(op)
    assert filled.seconds == pytest.approx(2.0 * straight.seconds, rel=1e-6)


def test_no_step_at_a_point_that_was_filled_in() -> None:
    table = estimator(stepped(2.0, True))
    near = np.asarray(table.estimate(ops.Gemm(HOLE[0] * np.array([1 - 1e-7, 1.0]), 4096, 2048)).seconds)
    assert near[0] == pytest.approx(near[1], rel=1e-4)


def test_two_similar_shapes_are_too_few_to_fill_a_hole() -> None:
    table = stepped(2.0, True)
    few = table.take(table.sites["k"] == HOLE[2])
    assert estimator(few).estimate(ops.Gemm(256.0, 4096, 2048)).seconds < 0.75 * 2 * expected(ops.Gemm(256, 4096, 2048))


def test_heads_are_as_good_as_requests_when_shapes_speak_for_another() -> None:
    """What these tables took over the roofline depends on batch x heads only, with a jump that the roofline lacks."""
    table = attention()
    over = np.where(table.axes["batch"] * table.sites["num_heads"] > 100, 2.0, 1.0)
    jumps = MeasurementTable(table.kind, table.sites, table.axes, table.seconds * over, table.source, table.words)
    for batch, times in ((2.0, 1.0), (8.0, 2.0)):
        op = PrefillAttention(batch, 1024.0, 16, 2, 128)
        assert estimator(jumps).estimate(op).seconds == pytest.approx(float(times * expected(op)), rel=1e-6)


def test_a_fraction_of_a_prompt_costs_less_than_the_prompt_and_more_than_a_launch() -> None:
    """A chunk with cached context is a batch below one (`PrefillAttention`)."""
    batch = np.array([0.01, 0.1, 0.5, 0.99, 1.0])
    seconds = np.asarray(estimator(attention()).estimate(PrefillAttention(batch, 4096.0, 32, 4, 128)).seconds)
    assert np.all(np.diff(seconds) >= 0)
    assert seconds[0] > 1e-6
    assert seconds[1] < 0.5 * seconds[-1]
    assert seconds[3] == pytest.approx(seconds[4], rel=0.03)


def test_other_head_counts_take_the_nearest_shapes() -> None:
    op = PrefillAttention(4.0, 1024.0, 12, 2, 128)
    estimated = estimator(attention()).estimate(op)
    assert estimated.coverage is Coverage.SCALED
    assert estimated.seconds == pytest.approx(float(expected(op)), rel=1e-6)


def test_an_operator_that_was_priced_is_not_looked_up_again() -> None:
    asked: list[ops.Op] = []

    def source(op: ops.Op) -> MeasurementTable:
        asked.append(op)
        return gemms()

    tables = TableEstimator(source, ROOFLINE)
    first, again = (tables.estimate(ops.Gemm(np.array([100.0, 300.0]), 4096, 2048)) for _ in range(2))
    assert len(asked) == 1
    assert again is first
    with pytest.raises(ValueError, match="read-only"):
        first.seconds[0] = 0.0  # type: ignore[index]
    others = [ops.Gemm(np.array(each), 4096, 2048) for each in ([100.0, 301.0], [[100.0, 300.0]], 100.0)]
    priced = [tables.estimate(op) for op in (*others, ops.Gemm(np.array([100.0, 300.0]), 4096, 4096))]
    assert len(asked) == 5
    assert [np.shape(estimate.seconds) for estimate in priced] == [(2,), (1, 2), (), (2,)]


def test_without_a_table_the_roofline_answers_and_says_so() -> None:
    op = Experts(64.0, 4096, 14336, 8, 2, format=Format.FP8)
    estimated = estimator().estimate(op)
    assert estimated.coverage is Coverage.ROOFLINE
    assert estimated.source.startswith("roofline fitted on ")
    assert estimated.seconds == pytest.approx(float(np.asarray(ROOFLINE.seconds(op))))
    assert estimated == RooflineEstimator(Roofline(ROOFLINE.device)).estimate(op)


@pytest.mark.parametrize("size", [0.0, -1.0, float("nan"), float("inf")])
def test_an_operator_without_a_size_is_refused(size: float) -> None:
    for priced in (estimator(), RooflineEstimator(Roofline(ROOFLINE.device))):
        with pytest.raises(InputError, match=r"gemm: m is .*; an operator needs a positive finite size"):
            priced.estimate(ops.Gemm(np.array([4.0, size]), 64, 64))


def test_elementwise_kernels_are_told_apart_by_their_bytes_only() -> None:
    norm, rope = ops.Elementwise("norm", 10.0, 8.0), ops.Elementwise("rope", 80.0, 1.0)
    ones = np.ones(1)
    of_all, of_norms = (
        MeasurementTable("elementwise", {"bytes_per_row": ones}, {"rows": ones}, ones, "test", {"name": name})
        for name in ("any", "norm")
    )
    assert canonical(norm, of_all) == canonical(rope, of_all)
    assert canonical(norm, of_norms) == norm


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (None, "returned None for gemm, not an Estimate"),
        (Estimate(np.ones(2), Coverage.MEASURED, "mine", 0.1), r"seconds of shape \(2,\) for gemm of shape \(3,\)"),
        (Estimate(float("nan"), Coverage.MEASURED, "mine", 0.1), "below 0 or no number"),
        (Estimate(-1.0, Coverage.MEASURED, "mine", 0.1), "below 0 or no number"),
    ],
)
def test_the_answers_of_a_users_estimator_are_checked(answer: Any, problem: str) -> None:
    class Mine:
        def estimate(self, op: ops.Op) -> Estimate:  # noqa: ARG002
            return answer  # type: ignore[no-any-return]

    op = ops.Gemm(m=np.array([1.0, 2.0, 3.0]), n=64, k=64, format=Format.BF16)
    with pytest.raises(InputError, match=rf"the estimator Mine returned .*{problem}|the estimator Mine {problem}"):
        users_estimator(Mine()).estimate(op)


def test_one_number_of_a_users_estimator_holds_for_all_points() -> None:
    class Mine:
        def estimate(self, op: ops.Op) -> Estimate:  # noqa: ARG002
            return Estimate(1e-6, Coverage.MEASURED, "mine", 0.1)

    op = ops.Gemm(m=np.array([1.0, 2.0, 3.0]), n=64, k=64, format=Format.BF16)
    assert np.asarray(users_estimator(Mine()).estimate(op).seconds).tolist() == [1e-6] * 3
    shipped = RooflineEstimator(Roofline(catalog.device("h100_sxm")))
    assert users_estimator(shipped) is shipped
