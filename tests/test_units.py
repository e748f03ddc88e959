import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.errors import InputError
from windtunnel.units import (
    UNITS_BY_SUFFIX,
    format_bytes,
    format_count,
    format_seconds,
    format_si,
    parse_quantity,
    units_for,
    whole,
)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("memory_bytes", "80GiB", 80 * 2**30),
        ("memory_bytes", "80 GB", 80e9),
        ("memory_bytes", "1024", 1024),
        ("bytes_per_s", "400Gbps", 50e9),
        ("memory_bytes_per_s", "3.35TB/s", 3.35e12),
        ("peak_flops_per_s", "989TFLOPS", 989e12),
        ("peak_flops_per_s", "1.979 PFLOP/s", 1.979e15),
        ("latency_s", "25us", 25e-6),
        ("ttft_s", "2e-1 s", 0.2),
        ("duration_s", "1.5h", 5400),
        ("rate_per_s", "30/min", 0.5),
        ("clock_per_s", "1980MHz", 1.98e9),
        ("price_usd_per_hour", "2.5USD/h", 2.5),
        ("tdp_w", "0.7kW", 700),
    ],
)
def test_quantities_become_si(name: str, text: str, expected: float) -> None:
    assert parse_quantity(name, text) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("text", ["80GHz", "GiB", "8 0GiB", "nan", "inf", "1e999", "", "5 parsec", "80gib"])
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="memory_bytes"):
        parse_quantity("memory_bytes", text)


def test_the_dimension_follows_the_name() -> None:
    assert units_for("num_seqs") is None
    assert units_for("max_num_seqs") is None  # ends in "seqs", not in "_s"
    assert units_for("bytes_per_s") is UNITS_BY_SUFFIX["_bytes_per_s"]
    assert units_for("price_usd_per_hour") is UNITS_BY_SUFFIX["_usd_per_hour"]
    with pytest.raises(InputError, match="'Gbps'; allowed: ns"):
        parse_quantity("latency_s", "4Gbps")


def test_every_unit_of_a_dimension_is_read() -> None:
    for suffix, units in UNITS_BY_SUFFIX.items():
        for unit, scale in units.items():
            assert parse_quantity(f"x{suffix}", f"2{unit}") == 2 * scale


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (format_seconds(0), "0 s"),
        (format_seconds(12.345), "12.3 s"),
        (format_seconds(0.0123), "12.3 ms"),
        (format_seconds(9.996e-3), "10.0 ms"),
        (format_seconds(0.9996), "1.00 s"),
        (format_seconds(0.99949), "999 ms"),
        (format_seconds(9.996e-4), "1.00 ms"),
        (format_seconds(1.5e-9), "1.50 ns"),
        (format_seconds(-0.25), "-250 ms"),
        (format_bytes(0), "0 B"),
        (format_bytes(1023), "1023 B"),
        (format_bytes(80 * 2**30), "80.0 GiB"),
        (format_si(1.98e15, "FLOP/s"), "1.98 PFLOP/s"),
        (format_si(0, "B"), "0 B"),
        (format_seconds(math.nan), "nan ns"),
    ],
)
def test_people_read_three_digits(shown: str, expected: str) -> None:
    assert shown == expected


@given(st.floats(1e-9, 1e9))
def test_what_is_shown_reads_back(seconds: float) -> None:
    assert parse_quantity("x_s", format_seconds(seconds)) == pytest.approx(seconds, rel=6e-3)


@pytest.mark.parametrize(
    ("count", "words", "expected"),
    [
        (1, ("run",), "1 run"),
        (0, ("run",), "0 runs"),
        (1024, ("run",), "1,024 runs"),
        (2, ("process", "processes"), "2 processes"),
    ],
)
def test_one_thing_is_not_many(count: int, words: tuple[str, ...], expected: str) -> None:
    assert format_count(count, *words) == expected


@pytest.mark.parametrize(("text", "hint"), [("1G", "write GB or GiB"), ("128M", "write MB or MiB"), ("1x", "")])
def test_a_unit_that_is_cut_short_is_completed(text: str, hint: str) -> None:
    with pytest.raises(InputError) as raised:
        parse_quantity("size_bytes", text)
    assert (raised.value.hint or "") == hint


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8192", 8192),
        ("8k", 8000),
        ("8K", 8192),
        ("1.5k", 1500),
        ("2m", 2 * 10**6),
        ("20G", 20 * 2**30),
        ("8g", 8 * 10**9),
        ("1_0", 10),
        ("15T", 15 * 10**12),
        ("0.5b", 5 * 10**8),
    ],
)
def test_counts_are_read_as_vllm_reads_them(text: str, expected: int) -> None:
    assert whole(text) == expected
    assert whole(str(2**53 + 1)) == 2**53 + 1


@pytest.mark.parametrize("text", ["8.5", "k", "8 k", "-8k", "8x", ""])
def test_what_is_no_count_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"whole number|invalid literal"):
        whole(text)
