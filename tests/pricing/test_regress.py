"""Regressions over tables: what holds for all of them, and what each is good for."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.pricing.choices import REGRESSIONS, estimators
from windtunnel.pricing.regress import cache_folder, cached, fitted, monotone, pooled, predict, scores
from windtunnel.pricing.roofline import Roofline
from windtunnel.pricing.table import MeasurementTable

ROOFLINE = Roofline(catalog.device("h100_sxm"), catalog.node("dgx_h100"))
FITS = [name for name in estimators() if name not in ("interpolation", "auto")]
PLAIN = ["interpolation", "monotone"]


def gemm_table(noise: float, seed: int = 0) -> MeasurementTable:
    """Two shapes of a device that takes 40% longer than its roofline, with noise."""
    rng = np.random.default_rng(seed)
    m = np.tile(np.unique(np.geomspace(1, 4096, 60).round()), 2)
    half = m.size // 2
    sites = {"n": np.repeat([4096.0, 8192.0], half), "k": np.repeat([4096.0, 4096.0], half)}
    table = MeasurementTable("gemm", sites, {"m": m}, np.ones(m.size), "test", {"format": "bf16"})
    seconds = np.empty(m.size)
    for site, rows in table.rows_by_site.items():
        seconds[rows] = 1.4 * np.asarray(ROOFLINE.seconds(table.operator(site, {"m": m[rows]})))
    return replace(table, seconds=seconds * np.exp(noise * rng.standard_normal(m.size)))


def decode_table() -> MeasurementTable:
    batch, context = (grid.ravel() for grid in np.meshgrid([1.0, 4, 16, 64], [64.0, 256, 1024, 4096]))
    sites = {"num_heads": 32.0, "num_kv_heads": 8.0, "head_dim": 128.0, "window_tokens": 0.0}
    columns = {name: np.full(batch.size, value) for name, value in sites.items()}
    seconds = 5e-6 + batch * context * 3e-9
    axes = {"batch": batch, "context_tokens": context}
    return MeasurementTable("decode_attention", columns, axes, seconds, "test", {"kv_format": "bf16"})


@pytest.fixture(autouse=True)
def _needs_sklearn(request: pytest.FixtureRequest) -> None:
    method = request.node.callspec.params.get("method", "") if hasattr(request.node, "callspec") else ""
    if method in ("forest", "roofline_residual"):
        pytest.importorskip("sklearn", reason="scikit-learn is not installed; trees come from it")


@pytest.mark.parametrize("method", FITS)
def test_fits_are_positive_and_finite_and_rise_where_they_say_so(method: str) -> None:
    for table in (gemm_table(0.15), decode_table()):
        regressed = fitted(table, ROOFLINE, method)
        assert np.isfinite(regressed.seconds).all()
        assert (regressed.seconds > 0).all()
        assert regressed.is_fitted
        for rows in regressed.rows_by_site.values() if method == "monotone" or REGRESSIONS.get(method).RISES else ():
            for name, other in zip(regressed.axes, reversed(list(regressed.axes)), strict=True):
                for level in np.unique(regressed.axes[other][rows]) if name != other else [None]:
                    line = rows if level is None else rows[regressed.axes[other][rows] == level]
                    line = line[np.argsort(regressed.axes[name][line])]
                    assert (np.diff(regressed.seconds[line]) >= -1e-15).all()


@pytest.mark.parametrize("method", ["interpolation", *FITS])
def test_every_method_beats_the_plain_roofline_on_points_left_out(method: str) -> None:
    table = gemm_table(0.03)
    hidden = np.arange(len(table)) % 4 == 1
    shown, left_out = table.take(~hidden), table.take(hidden)
    guess = predict(fitted(shown, ROOFLINE, method), ROOFLINE, left_out)
    error = np.median(np.abs(guess / left_out.seconds - 1))
    assert error < 0.12  # the roofline is 29% off by construction
    site = (16384.0, 4096.0)  # a shape that nobody measured
    op = table.operator(site, {"m": np.array([64.0, 1000.0])})
    target_points = 1.4 * np.asarray(ROOFLINE.seconds(op))
    positions = MeasurementTable(
        "gemm",
        {"n": np.full(2, site[0]), "k": np.full(2, site[1])},
        {"m": np.array([64.0, 1000.0])},
        target_points,
        "test",
        {"format": "bf16"},
    )
    far = predict(fitted(table, ROOFLINE, method), ROOFLINE, positions)
    assert (np.abs(far / target_points - 1) < 0.28).all()


@pytest.mark.full
def test_a_fit_is_evaluated_where_coordinates_of_measured_points_meet() -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is not installed; trees come from it")
    table = decode_table()
    hidden = np.zeros(len(table), dtype=bool)
    hidden[[5, 6, 9]] = True
    assert len(fitted(table.take(~hidden), ROOFLINE, "forest")) == len(table)


def test_smoothing_helps_where_there_is_noise() -> None:
    """Pooled neighbours are nearer to the truth than the noisy points themselves."""
    noisy, truth = gemm_table(0.2), gemm_table(0.0)
    before = np.median(np.abs(noisy.seconds / truth.seconds - 1))
    after = np.median(np.abs(monotone(noisy).seconds / truth.seconds - 1))
    assert after < 0.75 * before


def test_scores_are_in_order_and_auto_takes_the_first() -> None:
    table = gemm_table(0.05)
    regressed = scores(table, ROOFLINE, PLAIN)
    assert [score.median_error for score in regressed] == sorted(score.median_error for score in regressed)
    assert {score.method for score in regressed} == set(PLAIN)


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=30))
def test_pooling_is_the_nearest_rising_sequence(values: list[float]) -> None:
    regressed = pooled(np.array(values))
    assert (np.diff(regressed) >= -1e-12).all()
    assert regressed.mean() == pytest.approx(np.mean(values), abs=1e-9)
    if all(a <= b for a, b in itertools.pairwise(values)):
        np.testing.assert_allclose(regressed, values)


@pytest.mark.full
def test_fits_are_kept_by_their_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vidur's cache asks for the predictor's settings alone: it goes on using times that have been replaced."""
    pytest.importorskip("sklearn", reason="scikit-learn is not installed; trees come from it")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    table = gemm_table(0.1)
    first = cached(table, ROOFLINE, "forest")
    assert len(list(cache_folder().iterdir())) == 1
    np.testing.assert_array_equal(cached(table, ROOFLINE, "forest").seconds, first.seconds)
    tenfold = cached(replace(table, seconds=10 * table.seconds), ROOFLINE, "forest")
    np.testing.assert_allclose(tenfold.seconds, 10 * first.seconds, rtol=1e-6)
    cached(table, ROOFLINE, "monotone")
    assert len(list(cache_folder().iterdir())) == 3


def test_an_unknown_estimator_is_refused() -> None:
    with pytest.raises(InputError, match="there is no estimator 'forrest'"):
        fitted(gemm_table(0.0), ROOFLINE, "forrest")
