from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from windtunnel.errors import InputError
from windtunnel.model.attention.grouped_query import DecodeAttention
from windtunnel.model.feed_forward.experts import Experts
from windtunnel.model.precision import Format
from windtunnel.pricing.table import MeasurementTable, read_parquet, read_tables, site_names, site_of, write_tables


def gemm_table(seconds: list[float], m: list[float], n: list[float] | None = None) -> MeasurementTable:
    n = n or [64.0] * len(m)
    sites = {"n": np.array(n), "k": np.full(len(m), 128.0)}
    return MeasurementTable("gemm", sites, {"m": np.array(m)}, np.array(seconds), "a test", {"format": "bf16"})


def test_a_site_is_every_number_that_is_not_an_axis() -> None:
    op = DecodeAttention(np.array([1.0, 2.0]), 100, 32, 8, 128, kv_format=Format.FP8)
    assert site_names(op.kind) == ("num_heads", "num_kv_heads", "head_dim", "window_tokens")
    assert site_of(op) == (32.0, 8.0, 128.0, 0.0)


def test_rows_of_a_site_are_sorted_and_repeats_become_their_median() -> None:
    table = gemm_table([9e-6, 1e-6, 2e-6, 4e-6], m=[8, 1, 1, 1])
    axes, seconds = table.site_rows((64.0, 128.0))
    assert axes["m"].tolist() == [1, 8]
    assert seconds.tolist() == [2e-6, 9e-6]


def test_sites_are_told_apart() -> None:
    table = gemm_table([1e-6, 2e-6, 3e-6], m=[1, 1, 2], n=[64, 32, 64])
    assert {site: len(rows) for site, rows in table.rows_by_site.items()} == {(32.0, 128.0): 1, (64.0, 128.0): 2}


@pytest.mark.parametrize("bad", [0.0, -1e-6, float("nan"), float("inf")])
def test_a_time_that_cannot_be_is_refused(bad: float) -> None:
    with pytest.raises(InputError, match="row 1 took"):
        gemm_table([1e-6, bad], m=[1, 2])


def test_a_short_column_is_refused() -> None:
    with pytest.raises(InputError, match="column m has 2 rows, seconds has 3"):
        MeasurementTable(
            "gemm", {"n": np.ones(3), "k": np.ones(3)}, {"m": np.ones(2)}, np.ones(3), "a test", {"format": "bf16"}
        )


def test_operator_gives_back_the_shape() -> None:
    table = MeasurementTable(
        "experts",
        {
            name: np.array([value])
            for name, value in zip(site_names("experts"), (4096, 1408, 64, 6, 2, 4, 0), strict=True)
        },
        {"num_tokens": np.array([8.0])},
        np.array([1e-5]),
        "a test",
        {"format": "fp8"},
    )
    (site,) = table.rows_by_site
    assert table.operator(site, {"num_tokens": 8}) == Experts(8, 4096, 1408, 64, 6, 2, 4, Format.FP8, gated=False)


def test_written_tables_read_back_equal(tmp_path: Path) -> None:
    path = tmp_path / "gemm.parquet"
    fp8 = MeasurementTable(
        "gemm",
        {"n": np.array([1.0]), "k": np.array([2.0])},
        {"m": np.array([3.0])},
        np.array([4e-6]),
        "b",
        {"format": "fp8"},
    )
    write_tables(path, [gemm_table([1e-6, 2e-6], m=[1, 2]), fp8], {"device": "h100_sxm", "engine": "vllm 0.24.0"})
    rows_of = {table.words["format"]: table for table in read_tables(path)}
    assert rows_of["bf16"].seconds.tolist() == [1e-6, 2e-6]
    assert rows_of["bf16"].source == "a test"
    assert rows_of["fp8"].axes["m"].tolist() == [3.0]
    assert pq.read_schema(path).metadata[b"windtunnel.device"] == b"h100_sxm"
    assert not list(tmp_path.glob("*.partial"))


def test_a_file_that_is_missing_broken_or_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no file"):
        read_tables(tmp_path / "none.parquet")
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"PAR1 and then nothing")
    with pytest.raises(InputError, match="not a readable Parquet file"):
        read_tables(broken)
    foreign = tmp_path / "foreign.parquet"
    pq.write_table(pa.table({"x": [1]}), foreign)
    with pytest.raises(InputError, match="not a measurement table"):
        read_tables(foreign)


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    path = tmp_path / "gemm.parquet"
    write_tables(path, [gemm_table([1e-6], m=[1])], {})
    rows = pq.read_table(path)
    pq.write_table(rows.drop_columns(["k"]), path)
    with pytest.raises(InputError, match="has no column k"):
        read_tables(path)
    pq.write_table(rows.set_column(rows.column_names.index("k"), "k", pa.array(["wide"])), path)
    with pytest.raises(InputError, match="column k is string; numbers are needed"):
        read_tables(path)


def test_a_file_without_a_wanted_column_is_refused_and_names_the_nearest(tmp_path: Path) -> None:
    path = tmp_path / "nccl_perf.parquet"
    pq.write_table(pa.table({"nccl_dtype": ["half"]}), path)
    with pytest.raises(InputError, match="has no column ncl_dtype") as error:
        read_parquet(path, ["ncl_dtype"], ["ncl_dtype"])
    assert "nccl_dtype" in str(error.value.hint)
