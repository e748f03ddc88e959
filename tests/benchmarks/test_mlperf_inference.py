"""Submissions to MLPerf Inference as scenarios: what was submitted, what others submitted, and what is refused."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from mlperf_inference import SETTINGS, Row, grows_without_end, recorded_settings, rows_of, scenario_of
from windtunnel.errors import InputError
from windtunnel.model.precision import Format

SERVER: Row = dict.fromkeys([*SETTINGS, "cfg_path"], "") | {
    "round": "v5.1",
    "model": "llama2-70b-99",
    "system": "H200-SXM-141GBx8_TRT",
    "accelerator": "NVIDIA H200-SXM-141GB",
    "accel_per_node": "8.0",
    "interconnect": "18x 4th Gen NVLink, 900GB/s",
    "framework": "TensorRT 10.11, CUDA 12.9",
    "scenario": "Server",
    "valid": "VALID",
    "weight_dtype": "fp8",
    "n_accel": "8.0",
    "tokens_per_s": "20000",
    "samples_per_s": "68",
    "scheduled_samples_per_s": "70.4",
    "mean_output_tokens_derived": "291.6",
    "lat_max_ms": "",
    "ttft_limit_ms": "450.0",
    "tpot_limit_ms": "40.0",
}
CONFIGURED = SERVER | {
    "cfg_path": "configs/llama2-70b",
    "cfg_tp": "1.0",
    "cfg_batch": "'llama2-70b': 512, #2048",
    "cfg_max_num_tokens": "256.0",
    "cfg_precision": "fp8",
    "cfg_chunked": "True",
    "cfg_sched": "max_util",
}


def test_a_row_is_one_replica_with_the_settings_that_were_submitted() -> None:
    scenario, origin = scenario_of(CONFIGURED, recorded_settings([CONFIGURED]), None)
    engine = scenario.deployment.engine
    assert origin == "recorded"
    assert (engine.max_num_seqs, engine.max_num_batched_tokens, engine.backend) == (512, 256, "tensorrt")
    assert (engine.scheduler, engine.enable_chunked_prefill) == ("trtllm_max_utilization", True)
    assert scenario.workload.arrivals.rate_per_s == pytest.approx(8.8)  # type: ignore[union-attr]
    assert scenario.workload.num_requests == 5280  # ten minutes


def test_a_row_without_settings_has_those_of_the_others_if_they_agree() -> None:
    other = CONFIGURED | {"cfg_batch": "'llama2-70b': 768"}
    assert scenario_of(SERVER, recorded_settings([CONFIGURED, SERVER]), None)[1] == "as others'"
    scenario, origin = scenario_of(SERVER, recorded_settings([CONFIGURED, other]), None)
    assert origin == "assumed"
    assert scenario.deployment.engine.max_num_seqs is None
    assert scenario.deployment.parallelism.tp == 1  # 70 GB and half as much again
    assert scenario_of(SERVER | {"accelerator": "NVIDIA L40S"}, {}, None)[0].deployment.parallelism.tp == 4


def test_formats_of_the_older_round_are_those_of_its_configurations() -> None:
    older = SERVER | {"round": "v4.1", "weight_dtype": "fp16"}
    scenario, _ = scenario_of(older, {}, None)
    assert (scenario.precision.weights, scenario.precision.kv_cache) == (Format.FP8, Format.FP8)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"valid": "INVALID"}, "was not valid"),
        ({"model": "mixtral-8x7b"}, "Mixtral"),
        ({"accelerator": "NVIDIA Jetson AGX Orin 64G"}, "is not in the catalog"),
        ({"framework": "deepsparse v1.5.2"}, "no engine is simulated for 'deepsparse v1.5.2'"),
        ({"weight_dtype": "UNSET"}, r"format of the weights is not recorded \(UNSET\)"),
        ({"scenario": "SingleStream"}, "SingleStream is not simulated"),
    ],
)
def test_what_is_not_known_is_refused_with_a_reason(change: dict[str, str], says: str) -> None:
    with pytest.raises(InputError, match=says):
        scenario_of(SERVER | change, {}, None)


def test_only_a_queue_that_keeps_growing_is_overloaded() -> None:
    arrival_s = [float(each) for each in range(400)]
    steady = {"arrival_s": arrival_s, "first_token_s": [each + 3.0 for each in arrival_s]}
    growing = {"arrival_s": arrival_s, "first_token_s": [1.02 * each for each in arrival_s]}
    assert [grows_without_end(arrays(each)) for each in (steady, growing)] == [False, True]


def arrays(columns: dict[str, list[float]]) -> dict[str, object]:
    return {name: np.array(column) for name, column in columns.items()}


def test_three_of_five_submissions_are_scenarios(reference: Path) -> None:
    """All that are left out are invalid, count no tokens, or have a reason of one sentence."""
    rows = rows_of(reference / "serving" / "mlperf_inference.csv")
    recorded, origins = recorded_settings(rows), Counter[str]()
    for row in rows:
        try:
            origins[scenario_of(row, recorded, None)[1]] += 1
        except InputError as error:
            origins[error.message] += 1
    assert origins["recorded"] >= 170
    assert origins["recorded"] + origins["as others'"] + origins["assumed"] >= 390
    assert origins["the run was not valid, or counts no tokens"] < 150


def test_links_and_power_limits_are_those_of_the_submitted_system() -> None:
    card = SERVER | {"accelerator": "NVIDIA H100-NVL-94GB"}
    four = SERVER | {"accelerator": "NVIDIA H100-SXM-80GB", "accel_per_node": "4.0", "n_accel": "4.0"}
    limited = CONFIGURED | {"system": "H200-SXM-141GBx8_TRT_MaxQ"}
    rows = (SERVER, card, card | {"interconnect": ""}, four, limited)
    deployments = [scenario_of(row, {}, None)[0].deployment for row in rows]
    assert [each.node for each in deployments] == [None, None, "pcie5", "hgx_h100_4", None]
    assert [each.power.limit_w for each in deployments] == [None, None, None, None, 500.0]
