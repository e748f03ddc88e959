from pathlib import Path

import numpy as np
import pyarrow.csv
import pyarrow.parquet
import pytest

import windtunnel as wt
from recorded import entries
from windtunnel.formats.vidur.write import columns_of, request_metrics, write_request_metrics
from windtunnel.metrics.records import Table


@pytest.mark.parametrize("case", entries("vidur/cases/*/config.json")[:2])
def test_every_column_is_vidurs_own(reference: Path, case: str) -> None:
    """Vidur's recorded times as our records give back all of its columns, but where a request was restarted."""
    recorded = pyarrow.parquet.read_table(reference / "vidur" / "cases" / case / "requests.parquet").to_pandas()
    recorded = recorded[recorded.request_num_restarts == 0]
    arrival_s = recorded.request_inter_arrival_delay.fillna(0).cumsum().to_numpy() + 1.0
    requests = Table(
        {
            "request": recorded["Request Id"].to_numpy(),
            "arrival_s": arrival_s,
            "scheduled_s": arrival_s + recorded.request_scheduling_delay.to_numpy(),
            "first_token_s": arrival_s + recorded.prefill_e2e_time.to_numpy(),
            "finish_s": arrival_s + recorded.request_e2e_time.to_numpy(),
            "input_tokens": recorded.request_num_prefill_tokens.to_numpy(),
            "output_tokens": recorded.request_num_decode_tokens.to_numpy(),
            "execution_s": recorded.request_execution_time.to_numpy(),
            "num_preemptions": recorded.request_num_restarts.to_numpy(),
        },
        {},
    )
    ours = columns_of(requests, recorded.request_model_execution_time.to_numpy())
    assert list(ours) == list(recorded.columns)
    for name, values in ours.items():
        assert np.allclose(values, recorded[name].to_numpy(), rtol=1e-6, atol=1e-9, equal_nan=True), name


def test_a_run_is_written_and_read_again(tmp_path: Path) -> None:
    result = wt.simulate(
        wt.scenario(
            model="meta-llama/Llama-3.1-8B",
            device="h100_sxm",
            input_tokens=500,
            output_tokens=20,
            rate_per_s=5,
            num_requests=50,
            settings={
                "deployment.engine.async_scheduling": False,
                "deployment.engine.host": {"step_s": 0.002, "request_s": 0},
            },
        )
    )
    path = tmp_path / "out/request_metrics.csv"
    write_request_metrics(path, request_metrics(result.requests, result.steps, result.setup, 1))
    table = pyarrow.csv.read_csv(path)
    assert table["request_inter_arrival_delay"].null_count == 1
    assert np.allclose(table["prefill_e2e_time"], result.requests["first_token_s"] - result.requests["arrival_s"])
    assert np.allclose(table["request_preemption_time"], 0, atol=1e-9)
    # 20 tokens take a step each; prompts are computed in one step.
    host_s = np.asarray(table["request_execution_time"]) - np.asarray(table["request_model_execution_time"])
    assert np.allclose(host_s, 20 * 0.002)
