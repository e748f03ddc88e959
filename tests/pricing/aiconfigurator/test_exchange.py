"""Dispatch and combine of tokens: measured tables, points left out, slots of redundant experts."""

from typing import Any

import numpy as np
import pytest

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.model.exchange import TokenExchange, low_latency_buffer_bytes, normal_buffer_bytes
from windtunnel.model.launches.forward import token_launches
from windtunnel.model.precision import Format
from windtunnel.pricing.aiconfigurator.estimator import measured_estimator
from windtunnel.pricing.aiconfigurator.routing import GINI, busiest_load, placed_excess
from windtunnel.pricing.estimator import Coverage, TableEstimator, TableModel
from windtunnel.schema import decode
from windtunnel.serving.scenario import Scenario, resolve
from windtunnel.serving.setup.estimators import shard_of
from windtunnel.serving.setup.memory import plan_memory

DEVICE = catalog.device("h100_sxm")


def _exchange(phase: str, kernels: str, num_tokens: float = 32.0, num_ranks: int = 8) -> TokenExchange:
    form = Format.FP8 if phase == "dispatch" else Format.BF16
    return TokenExchange(phase, kernels, num_tokens, 7168, 256, 8, num_ranks, min(num_ranks, 8), form)


def _estimator() -> TableEstimator:
    estimator = measured_estimator(DEVICE, catalog.default_node(DEVICE), "sglang", "0.5.12")
    assert isinstance(estimator, TableEstimator)
    return estimator


@pytest.mark.full
@pytest.mark.parametrize("kernels", ["deepep_low_latency", "deepep_normal"])
@pytest.mark.parametrize("phase", ["dispatch", "combine"])
def test_points_left_out_are_within_five_percent(phase: str, kernels: str) -> None:
    estimator = _estimator()
    table = estimator.table_for(_exchange(phase, kernels))
    assert table is not None
    errors = []
    for site, rows in table.rows_by_site.items():
        axes, seconds = table.site_rows(site)
        for index in range(1, len(seconds) - 1):
            point = axes["num_tokens"][index : index + 1]
            is_left_out = np.isin(np.arange(len(table)), rows) & (table.axes["num_tokens"] == point)
            model = TableModel(table.take(~is_left_out), estimator.roofline)
            predicted, _, _ = model.estimate(table.operator(site, {"num_tokens": point}))
            errors.append(abs(predicted[0] / seconds[index] - 1))
    assert np.median(errors) < 0.02
    assert np.percentile(errors, 90) < 0.05


def test_a_measured_point_is_the_table_s_time() -> None:
    estimate = _estimator().estimate(_exchange("dispatch", "deepep_low_latency"))
    assert estimate.coverage is Coverage.MEASURED
    assert estimate.seconds == pytest.approx(18.0e-6, rel=0.01)  # dispatch_avg_t_us of h100_sxm, SGLang 0.5.12


def test_more_nodes_take_longer() -> None:
    times = [
        _estimator().estimate(_exchange("combine", "deepep_low_latency", num_ranks=n)).seconds for n in (8, 16, 64)
    ]
    assert times == sorted(times)


def test_a_token_goes_once_to_each_rank_that_needs_it() -> None:
    one_sided, low_latency = (
        _exchange("dispatch", "nvlink_one_sided", 1.0),
        _exchange("dispatch", "deepep_low_latency", 1.0),
    )
    assert low_latency.copies == pytest.approx((0.0, 8 * 7 / 8))
    assert one_sided.copies == pytest.approx((0.0, 8 * (1 - (7 / 8) ** 8) * 7 / 8))


def test_redundant_experts_even_out_ranks() -> None:
    assert placed_excess(256, 32, 32) < 0.02
    assert placed_excess(8, 0, 8) > 0.4  # one expert a rank: nothing to place


@pytest.mark.parametrize(("ranks", "counted"), [(32, 1.109), (36, 1.115)])
def test_the_busiest_rank_of_placed_experts_has_the_load_that_was_counted(ranks: int, counted: float) -> None:
    """DeepSeek-R1 with 288 copies, 1,024 choices on each rank on average (TensorRT-LLM, part 1, table 1)."""
    sites = np.array([1024.0 * ranks / 8]), np.array([256.0]), np.array([8.0]), np.array([float(ranks)])
    assert busiest_load(*sites, 32) == pytest.approx(counted, abs=0.001)


def test_experts_are_placed_by_their_load_without_copies_too() -> None:
    """Eight experts a rank can be balanced among themselves; what chance leaves stays."""
    sites = np.array([512.0]), np.array([256.0]), np.array([8.0]), np.array([32.0])
    by_chance, copied, placed, as_they_are = (
        busiest_load(*sites, each, gini) for each, gini in ((None, 0.0), (32, GINI), (0, GINI), (None, GINI))
    )
    assert by_chance < copied < placed < as_they_are
    assert placed_excess(256, 32, 32) < placed_excess(256, 0, 32) < 0.1


def test_low_latency_buffers_have_the_bytes_that_one_counts_by_hand() -> None:
    """128 tokens, DeepSeek-V3's 256 experts and 7,168 channels: a combined token has 14,336 + 224 bytes."""
    assert low_latency_buffer_bytes(128, 7168, 256) == 2 * (2 * 128 * 256 * 14_560 + 1024)
    # Few channels: the head of a dispatched token counts more than the pairs of a combined one.
    assert low_latency_buffer_bytes(1, 256, 32) == 2 * (32 * (512 + 8) + 32 * (512 + 16) + 128)


def test_normal_buffers_have_the_bytes_that_one_counts_by_hand() -> None:
    """Ten channels; a token of 7,168 channels has 14,336 + 2,048 + 8 bytes; nodes are counted twice, beside 1 MiB."""
    assert normal_buffer_bytes(7168, 8) == 10 * 8 * (256 * 16_392 + 20)
    between = 10 * 4 * 2 * (128 * 16_408 + 72) + 2**20
    assert normal_buffer_bytes(7168, 32) == 10 * 8 * (288 * 16_392 + 44) + between


def with_backend(raw: dict[str, Any], backend: str) -> dict[str, Any]:
    return raw["deployment"] | {"engine": raw["deployment"]["engine"] | {"all2all_backend": backend}}


def test_slots_of_redundant_experts_are_divided_by_the_ranks() -> None:
    raw: dict[str, Any] = {
        "model": "deepseek-ai/DeepSeek-R1",
        "deployment": {"device": "gb200", "parallelism": {"attention_dp": 24, "ep": 24}, "engine": {"name": "sglang"}},
        "workload": {
            "arrivals": {"type": "closed_loop", "concurrency": 24},
            "input_tokens": 8,
            "output_tokens": 8,
            "num_requests": 24,
        },
    }
    with pytest.raises(InputError, match="ep = 24 does not divide the 256 experts"):
        resolve(decode(raw, Scenario))
    raw["deployment"]["engine"] |= {"num_redundant_experts": 32, "all2all_backend": "deepep_low_latency"}
    shard = shard_of(resolve(decode(raw, Scenario)))
    planned = {
        backend: plan_memory(shard_of(setup), setup.device, setup.engine, 4096).reserved_bytes
        for backend in ("deepep_low_latency", "deepep_normal", "deepep_auto", "all_gather")
        for setup in [resolve(decode(raw | {"deployment": with_backend(raw, backend)}, Scenario))]
    }
    assert planned["deepep_low_latency"] - planned["all_gather"] == low_latency_buffer_bytes(128, 7168, 256 + 32)
    assert planned["deepep_normal"] - planned["all_gather"] == normal_buffer_bytes(7168, 24)
    assert planned["deepep_auto"] - planned["deepep_normal"] == low_latency_buffer_bytes(128, 7168, 256 + 32)
    raw["deployment"]["engine"] |= {"name": "vllm", "enable_eplb": True}
    setup = resolve(decode(raw | {"deployment": with_backend(raw, "deepep_normal")}, Scenario))
    without = resolve(decode(raw | {"deployment": with_backend(raw, "all_gather")}, Scenario))
    plans = [plan_memory(shard_of(one), one.device, one.engine, 4096).reserved_bytes for one in (setup, without)]
    assert plans[0] - plans[1] == 2**30  # the ranks share one NVLink domain
    launches = {launch.name: launch.op for launch in token_launches(shard, 16)}
    assert isinstance(launches["dispatch"], TokenExchange)
    assert launches["dispatch"].num_ranks == 24
    assert "dispatch_all_gather" not in launches
    assert "combine" in launches
    raw["deployment"]["engine"]["all2all_backend"] = "all_gather"
    few = shard_of(resolve(decode(raw, Scenario)))
    assert "dispatch_all_gather" in {launch.name for launch in token_launches(few, 16)}
