import numpy as np
import pytest

from roofline_fit import NAMES, Sample, fit_family, fit_roofline, sample
from windtunnel import catalog
from windtunnel.model import operators as ops
from windtunnel.model.attention.grouped_query import DecodeAttention
from windtunnel.pricing.roofline import Roofline, fits
from windtunnel.pricing.table import MeasurementTable

H100 = Roofline(catalog.device("h100_sxm"))
TRUE = {"launch_us": 4.0, "memory_efficiency": 0.7, "cache_fraction": 0.3, "cache_gb_per_s_per_sm": 30.0}


def made_up(noise: float = 0.0) -> Sample:
    op = ops.Elementwise("any", np.geomspace(1e3, 1e10, 200), 1.0)
    errors = np.random.default_rng(0).normal(0, noise, 200)
    return Sample(H100, (op,), (np.asarray(H100.seconds_with(op, TRUE)) * np.exp(errors),))


def test_coefficients_that_made_the_data_are_found() -> None:
    assert fit_roofline("elementwise", [made_up()]) == pytest.approx(TRUE, rel=0.02)


def test_a_tenth_of_the_rows_ten_times_slower_does_not_move_the_fit() -> None:
    one = made_up(noise=0.02)
    seconds = one.seconds[0].copy()
    seconds[::10] *= 10
    found = fit_roofline("elementwise", [Sample(H100, one.operators, (seconds,))])
    assert found["launch_us"] == pytest.approx(4.0, rel=0.2)
    assert found["memory_efficiency"] == pytest.approx(0.7, rel=0.2)


def test_a_family_is_refitted_from_the_shared_coefficients() -> None:
    start = TRUE | {"launch_us": 8.0, "memory_efficiency": 0.5}
    assert fit_family([made_up()], start) == pytest.approx(TRUE, rel=0.05)


def test_what_the_rows_of_a_family_do_not_show_stays_shared() -> None:
    start = TRUE | {"launch_us": 8.0, "memory_efficiency": 0.5}
    op = ops.Elementwise("any", np.array([1e3, 2e3]), 1.0)
    small = Sample(H100, (op,), (np.asarray(H100.seconds_with(op, TRUE)),))
    found = fit_family([small], start)
    assert found["memory_efficiency"] == pytest.approx(0.5, rel=0.01)
    assert found["launch_us"] == pytest.approx(4.0, rel=0.05)


def test_shipped_fits_have_the_coefficients_of_their_form() -> None:
    for kind, names in NAMES.items():
        for fit in fits(kind).values():
            for coefficients in (fit.coefficients, *fit.by_family.values()):
                assert set(coefficients) == set(names), kind


def test_a_sample_keeps_what_forms_branch_on_as_numbers() -> None:
    sites = {
        "num_heads": np.array([8.0, 8, 16, 16]),
        "num_kv_heads": np.array([1.0, 1, 2, 2]),
        "head_dim": np.full(4, 128.0),
        "window_tokens": np.array([0.0, 128, 0, 128]),
    }
    axes = {"batch": np.ones(4), "context_tokens": np.array([10.0, 20, 30, 40])}
    table = MeasurementTable("decode_attention", sites, axes, np.arange(1, 5) * 1e-6, "a test", {"kv_format": "bf16"})
    found = sample(table, H100, 100, np.random.default_rng(0))
    assert sorted(op.window_tokens for op in found.operators if isinstance(op, DecodeAttention)) == [0, 128]
    assert sorted(np.concatenate(found.seconds)) == pytest.approx([1e-6, 2e-6, 3e-6, 4e-6])
    assert len(found.log_errors(fits("decode_attention")["bf16"].coefficients)) == 4


def test_a_sample_tells_layers_with_an_indexer_from_those_without() -> None:
    widths = {"kv_lora_rank": 512, "rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    widths |= {"hidden_size": 6144, "q_lora_rank": 2048, "index_head_dim": 128, "top_k": 2048, "num_heads": 8}
    sites = {name: np.full(4, float(width)) for name, width in widths.items()}
    sites["index_num_heads"] = np.array([32.0, 0, 32, 0])
    axes = {"batch": np.ones(4), "context_tokens": np.array([10.0, 20, 30, 40])}
    words = {"kv_format": "bf16"}
    table = MeasurementTable("sparse_latent_decode", sites, axes, np.arange(1, 5) * 1e-6, "a test", words)
    found = sample(table, H100, 100, np.random.default_rng(0))
    assert len(found.log_errors(fits("sparse_latent_decode")["bf16"].coefficients)) == 4
