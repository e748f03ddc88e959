from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from windtunnel.metrics.records import REQUEST_COLUMNS, STEP_COLUMNS, Table, request_table


def table(frontend_s: float = 0.0, num_warmup: int = 0) -> Table:
    engine = {
        "arrival_s": np.array([0.0, 1.0, 2.0]),
        "scheduled_s": np.array([0.5, 1.0, 2.25]),
        "first_token_s": np.array([1.0, 2.0, 3.0]),
        "finish_s": np.array([3.0, 2.0, 6.0]),
        "input_tokens": np.array([10, 20, 30]),
        "output_tokens": np.array([5, 1, 7]),
        "priority": np.array([0, 0, 1]),
        "num_preemptions": np.array([0, 0, 2]),
    }
    return request_table(engine, np.array([0, 1, 0]), frontend_s, num_warmup)


def test_latencies_are_differences_of_times() -> None:
    records = table()
    assert list(records.columns) == list(REQUEST_COLUMNS)
    assert records["queueing_s"].tolist() == [0.5, 0, 0.25]
    assert records["prefill_s"].tolist() == [0.5, 1, 0.75]
    assert records["ttft_s"].tolist() == [1, 1, 1]
    assert records["e2e_s"].tolist() == [3, 1, 4]
    np.testing.assert_array_equal(records["tpot_s"], [2 / 4, np.nan, 3 / 6])
    assert records["replica"].tolist() == [0, 1, 0]


def test_the_frontend_is_seen_by_the_client_alone() -> None:
    plain, records = table(), table(frontend_s=0.25)
    for name in ("ttft_s", "e2e_s"):
        np.testing.assert_allclose(records[name], plain[name] + 0.25)
    for name in ("tpot_s", "queueing_s", "prefill_s", "first_token_s", "finish_s"):
        np.testing.assert_array_equal(records[name], plain[name])


def test_the_first_requests_are_warm_up() -> None:
    records = table(num_warmup=2)
    assert records["is_warmup"].tolist() == [True, True, False]
    rest = records.where(~records["is_warmup"])
    assert (len(records), len(rest), rest["request"].tolist()) == (3, 1, [2])


def test_every_column_travels_with_its_meaning(tmp_path: Path) -> None:
    records = table()
    records.write_parquet(tmp_path / "requests.parquet")
    back = pq.read_table(tmp_path / "requests.parquet")
    assert back.column_names == list(REQUEST_COLUMNS)
    assert back.schema.field("ttft_s").metadata[b"meaning"] == REQUEST_COLUMNS["ttft_s"].encode()
    for name in REQUEST_COLUMNS:
        np.testing.assert_array_equal(back[name].to_numpy(), records[name])


def test_a_data_frame_has_the_same_columns() -> None:
    pd = pytest.importorskip("pandas")
    frame = table().to_pandas()
    assert isinstance(frame, pd.DataFrame)
    assert list(frame.columns) == list(REQUEST_COLUMNS)
    assert frame["input_tokens"].sum() == 60


def test_a_table_is_shown_by_its_shape_and_names_columns_that_are_near() -> None:
    records = table()
    assert repr(records).startswith("Table(3 rows: request, arrival_s, ")
    with pytest.raises(KeyError, match="no column 'ttft'; did you mean ttft_s"):
        records["ttft"]


def test_a_table_is_read_as_arrow_and_is_no_single_array() -> None:
    latencies = Table({"ttft_s": np.array([0.5, 0.25])}, {"ttft_s": "time to first token"})
    assert pa.table(latencies).to_pydict() == {"ttft_s": [0.5, 0.25]}
    with pytest.raises(KeyError, match="there is no column 0; its columns have names"):
        latencies[0]  # type: ignore[index]
    for wrong in (np.asarray, pytest.importorskip("pandas").DataFrame):
        with pytest.raises(TypeError, match=r"\.to_pandas\(\) or dict\(table\) has all columns"):
            wrong(latencies)


def test_units_are_in_the_names() -> None:
    for name in {**REQUEST_COLUMNS, **STEP_COLUMNS}:
        assert not {"latency", "time", "size", "bandwidth"} & set(name.split("_")), name
