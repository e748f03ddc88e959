"""Numbers and shapes as people read them."""

import numpy as np
import pytest

from windtunnel.model.attention.grouped_query import DecodeAttention
from windtunnel.model.feed_forward.experts import Experts
from windtunnel.model.operators import Collective, Elementwise, Gemm, Op
from windtunnel.model.precision import Format, Precision
from windtunnel.report.numbers import duration, formats, number, percent, quantity, times, words
from windtunnel.report.serving.setup import arrivals_text, lengths_text
from windtunnel.workload.arrivals import ClosedLoop, Gamma, Poisson
from windtunnel.workload.lengths import Fixed, Lognormal, Uniform


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.03124, "0.0312"),
        (3.4, "3.40"),
        (55.94, "55.9"),
        (871.4, "871"),
        (999.6, "1,000"),
        (3486.2, "3,486"),
        (2e6, "2,000,000"),
    ],
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("usd", "text"), [(0.0, "0.00"), (0.004672, "0.0047"), (0.0374, "0.037"), (0.1, "0.10"), (1234.5, "1,234.50")]
)
def test_small_prices_keep_two_digits(usd: float, text: str) -> None:
    assert quantity("usd_per_million_tokens", usd) == text


@pytest.mark.parametrize(
    ("ratio", "text"), [(2.0, "2"), (11.72, "11.7"), (176.4, "176"), (1466.0, "1,470"), (4.4698e6, "4,470,000")]
)
def test_ratios_have_three_digits_and_no_powers_of_ten(ratio: float, text: str) -> None:
    assert times(ratio) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.5, "500 ms"), (188.04, "188 s"), (1631.2, "27.2 min"), (29100, "8.08 h"), (238.4 * 86400, "238 days")],
)
def test_spans_of_time(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [
        *((0, "0.0%"), (0.0004, "<0.1%"), (-0.0004, ">-0.1%"), (0.1234, "12.3%"), (0.9994, "99.9%")),
        *((0.9996, ">99.9%"), (0.99999, ">99.9%"), (1 - 1e-15, "100%"), (1, "100%"), (1.0004, "100%"), (2.5, "250%")),
    ],
)
def test_percentages_round_neither_to_nothing_nor_to_all(share: float, text: str) -> None:
    assert percent(share) == text


def test_a_share_below_its_limit_is_not_rounded_to_it() -> None:
    assert [percent(share, 0.99) for share in (0.9894, 0.9896, 0.99, 0.9996)] == [
        *("98.9%", "just below 99.0%", "99.0%", ">99.9%")
    ]


def test_formats_name_what_differs() -> None:
    assert formats(Precision(weights=Format.FP8)) == "fp8 weights, bf16 KV cache"
    mixed = Precision(experts=Format.MXFP4, kv_cache=Format.FP8)
    assert formats(mixed) == "bf16 weights, mxfp4 experts, fp8 KV cache"


@pytest.mark.parametrize(
    ("op", "text"),
    [
        (Gemm(64, 10240, 8192, Format.FP8), "64 x 10240 x 8192 fp8"),
        (Gemm(np.array(64.0), 10240, 8192), "64 x 10240 x 8192 bf16"),
        (DecodeAttention(64, 2048.0, 16, 2, 128), "64 x 2048, 16/2 x 128 bf16"),
        (Experts(32, 7168, 2048, 256, 8, tp=2, format=Format.FP8_BLOCK), "32 x 8 of 256, 7168 x 1024 fp8_block"),
        (Collective("all_reduce", 2.0**20, 4), "1.00 MiB over 4"),
        (Elementwise("norm", 64, 2048.0), "64 x 2.00 KiB"),
    ],
)
def test_shapes(op: Op, text: str) -> None:
    assert op.text == text


def test_loads_in_words() -> None:
    assert arrivals_text(ClosedLoop(concurrency=64)) == "64 concurrent requests"
    capped = ClosedLoop(concurrency=64, rate_per_s=3, cv=2)
    assert arrivals_text(capped) == "at most 64 concurrent requests, released at 3/s (cv 2)"
    assert arrivals_text(Poisson(rate_per_s=6.5)) == "Poisson arrivals at 6.5/s"
    assert arrivals_text(Gamma(rate_per_s=2.0, cv=3.0)) == "gamma arrivals (cv 3) at 2/s"
    assert lengths_text(1024) == "1,024 tokens"
    assert lengths_text(1) == lengths_text(Fixed(tokens=1)) == "1 token"
    assert lengths_text(Uniform(min_tokens=819, max_tokens=1024)) == "819 to 1,024 tokens"
    assert lengths_text(Lognormal(median_tokens=512.0, sigma=1.0)) == "lognormal (median 512) tokens"


def test_names_as_words() -> None:
    assert [words(name) for name in ("kv_capacity", "host", "time_fraction")] == [
        "KV capacity",
        "host",
        "time fraction",
    ]
