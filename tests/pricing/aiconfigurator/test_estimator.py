import math
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.metrics.power import clock_share
from windtunnel.model import operators as ops
from windtunnel.model.attention.gated_delta import GatedDelta
from windtunnel.model.attention.grouped_query import DecodeAttention, PrefillAttention
from windtunnel.model.attention.latent import LatentDecodeAttention, LatentPrefillAttention
from windtunnel.model.feed_forward.experts import Experts
from windtunnel.model.precision import Format, computed_as
from windtunnel.pricing.aiconfigurator.collection import KERNELS, KernelChoices
from windtunnel.pricing.aiconfigurator.estimator import PACKAGE, measured_estimator, measured_systems
from windtunnel.pricing.estimator import (
    OTHER_DEVICE_ERROR,
    STAND_IN_ERROR,
    Coverage,
    Estimate,
    RooflineEstimator,
    TableEstimator,
)
from windtunnel.pricing.roofline import Roofline
from windtunnel.units import version_key

H100 = catalog.device("h100_sxm")
installed = pytest.mark.skipif(find_spec(PACKAGE) is None, reason=f"{PACKAGE} has no wheel for this platform")


def write(folder: Path, place: str, table: str, columns: dict[str, Any], system: str = "h100_sxm") -> None:
    path = folder / "data" / system / place
    path.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path / f"{table}.parquet")


def gemm_columns(latency_ms: list[float], dtype: str = "bfloat16", kernel: str | list[str] = "torch") -> dict[str, Any]:
    rows = len(latency_ms)
    kernels = [kernel] * rows if isinstance(kernel, str) else kernel
    return {
        "framework": ["VLLM"] * rows,
        "kernel_source": kernels,
        "gemm_dtype": [dtype] * rows,
        "m": [2**row for row in range(rows)],
        "n": [64] * rows,
        "k": [128] * rows,
        "latency": latency_ms,
    }


def estimate(
    folder: Path | None, op: ops.Op, engine: str = "vllm", version: str = "0.24.0", **options: Any
) -> Estimate:
    return measured_estimator(H100, None, engine, version, folder, KernelChoices(**options)).estimate(op)


def test_milliseconds_become_seconds(tmp_path: Path) -> None:
    write(tmp_path, "gemm/vllm/0.24.0", "gemm_perf", gemm_columns([0.002, 0.003]))
    priced = estimate(tmp_path, ops.Gemm(np.array([1.0, 2.0]), 64, 128))
    np.testing.assert_allclose(priced.seconds, [2e-6, 3e-6])
    assert priced.coverage is Coverage.MEASURED
    assert priced.source == "h100_sxm/gemm/vllm/0.24.0 (torch)"


@pytest.mark.parametrize(
    ("chosen", "taken"),
    [("0.14.0", "0.14.0"), ("0.15.1", "0.14.0"), ("0.21.0", "0.24.0"), ("0.30.0", "0.24.0"), ("1.0.0", "0.24.0")],
)
def test_the_nearest_version_is_taken_and_named(tmp_path: Path, chosen: str, taken: str) -> None:
    for version, latency in (("0.14.0", 0.002), ("0.24.0", 0.001)):
        write(tmp_path, f"gemm/vllm/{version}", "gemm_perf", gemm_columns([latency]))
    priced = estimate(tmp_path, ops.Gemm(1.0, 64, 128), version=chosen)
    assert priced.seconds == pytest.approx({"0.14.0": 2e-6, "0.24.0": 1e-6}[taken])
    assert f"vllm/{taken}" in priced.source
    assert ("nearest to" in priced.source) == (chosen != taken)


def test_release_candidates_come_before_their_release() -> None:
    versions = ["1.3.0", "1.3.0rc9", "1.3.0rc20", "1.2.0", "1.3.0.post1"]
    assert version_key("nightly-5b8c30d") == version_key("main") > version_key("2.0.0")
    assert sorted(versions, key=version_key) == ["1.2.0", "1.3.0rc9", "1.3.0rc20", "1.3.0", "1.3.0.post1"]


def test_another_engine_stands_in_and_is_named(tmp_path: Path) -> None:
    for version, latency in (("0.5.9", 0.003), ("0.5.14", 0.002)):
        write(tmp_path, f"gemm/sglang/{version}", "gemm_perf", gemm_columns([latency]))
    priced = estimate(tmp_path, ops.Gemm(1.0, 64, 128))
    assert priced.seconds == pytest.approx(2e-6)
    assert priced.source == "h100_sxm/gemm/sglang/0.5.14 (torch), in place of vllm"


def test_a_declared_reuse_is_followed(tmp_path: Path) -> None:
    write(tmp_path, "gemm/vllm/0.24.0", "gemm_perf", gemm_columns([0.002]))
    write(tmp_path, "gemm/vllm/0.14.0", "gemm_perf", gemm_columns([0.009]))
    reuse = tmp_path / "data/h100_sxm/gemm/vllm/0.19.0"
    reuse.mkdir()
    (reuse / "reuse.yaml").write_text("schema_version: 1\nreuse:\n- table: gemm_perf\n  from_version: 0.24.0\n")
    priced = estimate(tmp_path, ops.Gemm(1.0, 64, 128), version="0.18.0")
    assert priced.seconds == pytest.approx(2e-6)
    assert "vllm/0.24.0" in priced.source


def test_the_kernel_measured_most_is_the_default(tmp_path: Path) -> None:
    columns = gemm_columns([0.001, 0.002, 0.003, 0.004, 0.0005], kernel=["usual"] * 4 + ["special"])
    columns["m"] = [1, 2, 4, 8, 4]
    write(tmp_path, "gemm/vllm/0.24.0", "gemm_perf", columns)
    assert estimate(tmp_path, ops.Gemm(4.0, 64, 128)).seconds == pytest.approx(3e-6)


def test_a_hiccup_of_the_collection_is_not_believed(tmp_path: Path) -> None:
    write(tmp_path, "gemm/vllm/0.24.0", "gemm_perf", gemm_columns([0.002, 0.002, 0.030, 0.003]))
    priced = estimate(tmp_path, ops.Gemm(4.0, 64, 128))
    assert 2e-6 <= float(priced.seconds) <= 3e-6
    assert priced.coverage is Coverage.INTERPOLATED


def test_a_gemm_that_waits_for_the_host_is_taken_from_an_engine_that_did_not(tmp_path: Path) -> None:
    """60 us of launch hide all but the largest GEMM; no step appears where one table gives way to the other."""
    work = [0.004 * 2**row for row in range(12)]
    write(tmp_path, "gemm/vllm/0.24.0", "gemm_perf", gemm_columns([max(0.060, ms) for ms in work], "fp8_block", "deep"))
    write(tmp_path, "gemm/sglang/0.5.14", "gemm_perf", gemm_columns([ms * 0.9 for ms in work], "fp8_block", "deep"))
    m = 2.0 ** np.arange(12)
    priced = estimate(tmp_path, ops.Gemm(m, 64, 128, Format.FP8_BLOCK))
    assert priced.source == (
        "h100_sxm/gemm/vllm/0.24.0 (deep); where launches bound it, h100_sxm/gemm/sglang/0.5.14 (deep)"
    )
    seconds = np.asarray(priced.seconds)
    np.testing.assert_allclose(seconds[:4], np.array(work[:4]) * 0.9e-3)
    np.testing.assert_allclose(seconds[-5:], np.array(work[-5:]) * 1e-3)
    assert np.all(np.diff(np.log2(seconds)) > 0.8)


def quantisation_columns(seconds_ms: float, rows: int = 12) -> dict[str, Any]:
    sizes = [2**row for row in range(rows)]
    return {"kernel_source": ["quantise"] * rows, "m": sizes, "k": [128] * rows, "latency": [seconds_ms] * rows}


def write_quantisation(folder: Path, engine: str, version: str, scale_ms: float, convert_ms: float) -> None:
    for table, took in (("computescale_perf", scale_ms), ("scale_matrix_perf", convert_ms)):
        write(folder, f"quantize/{engine}/{version}", table, quantisation_columns(took))


def test_quantisation_that_an_fp8_table_includes_is_taken_out(tmp_path: Path) -> None:
    """Floor of 12 us against bf16's 3 us, and 9 us of quantisation: what remains is at least half of bf16's time."""
    bf16 = [max(0.003, 0.0004 * 2**row) for row in range(12)]
    fp8 = [max(0.003, 0.00021 * 2**row) + 0.009 for row in range(12)]
    write(tmp_path, "gemm/trtllm/1.3.0", "gemm_perf", both(gemm_columns(bf16), gemm_columns(fp8, "fp8")))
    write_quantisation(tmp_path, "trtllm", "1.3.0", 0.007, 0.002)
    m = 2.0 ** np.arange(12)
    priced = estimate(tmp_path, ops.Gemm(m, 64, 128, Format.FP8), "trtllm", "1.3.0")
    np.testing.assert_allclose(priced.seconds, (np.array(fp8) - 0.009) * 1e-3)
    assert priced.source.endswith("less quantisation")
    write_quantisation(tmp_path, "trtllm", "1.3.0", 0.0085, 0.0025)
    priced = estimate(tmp_path, ops.Gemm(m, 64, 128, Format.FP8), "trtllm", "1.3.0")
    expected = np.maximum(np.array(fp8) - 0.011, np.array(bf16) / 2)
    np.testing.assert_allclose(priced.seconds, expected * 1e-3)


def test_a_bare_fp8_table_keeps_its_times(tmp_path: Path) -> None:
    """5 us against bf16's 3 us cannot include a quantisation of 9 us."""
    bf16, fp8 = [0.003] * 12, [0.005] * 12
    write(tmp_path, "gemm/sglang/0.5.14", "gemm_perf", both(gemm_columns(bf16), gemm_columns(fp8, "fp8")))
    write_quantisation(tmp_path, "sglang", "0.5.14", 0.001, 0.008)
    priced = estimate(tmp_path, ops.Gemm(4.0, 64, 128, Format.FP8), "sglang", "0.5.14")
    assert priced.seconds == pytest.approx(5e-6)
    assert priced.source == "h100_sxm/gemm/sglang/0.5.14 (torch)"


def test_block_scaled_gemms_are_charged_for_the_launch_that_quantises_their_input(tmp_path: Path) -> None:
    took = [0.004] * 12
    bare = "sglang_deepgemm_gemm_nt_f8f8bf16"
    write(tmp_path, "gemm/sglang/0.5.14", "gemm_perf", gemm_columns(took, "fp8_block", bare))
    write(tmp_path, "gemm/trtllm/1.3.0", "gemm_perf", gemm_columns(took, "fp8_block", "torch_flow"))
    write_quantisation(tmp_path, "vllm", "0.24.0", 0.001, 0.002)
    op = ops.Gemm(4.0, 64, 128, Format.FP8_BLOCK)
    priced = estimate(tmp_path, op, "sglang", "0.5.14")
    assert priced.seconds == pytest.approx(6e-6)
    assert "and quantisation" in priced.source
    assert estimate(tmp_path, op, "trtllm", "1.3.0").seconds == pytest.approx(4e-6)


def test_elementwise_time_is_the_fastest_engines(tmp_path: Path) -> None:
    write_quantisation(tmp_path, "sglang", "0.5.14", 0.001, 0.030)
    write_quantisation(tmp_path, "vllm", "0.24.0", 0.001, 0.002)
    priced = estimate(tmp_path, ops.Elementwise("norm", 64.0, 384.0), "sglang", "0.5.14")
    assert priced.seconds == pytest.approx(2e-6)
    assert priced.source == (
        "the fastest of h100_sxm/quantize/sglang/0.5.14 (quantise) or h100_sxm/quantize/vllm/0.24.0 (quantise)"
    )


def test_message_sizes_are_elements_and_the_faster_library_wins(tmp_path: Path) -> None:
    nccl = {
        "op_name": ["all_reduce"] * 3,
        "kernel_source": ["NCCL"] * 3,
        "nccl_dtype": ["half", "half", "int8"],
        "num_gpus": [8, 8, 8],
        "message_size": [512, 1024, 512],
        "latency": [0.010, 0.010, 0.5],
    }
    custom = {
        "kernel_source": ["vLLM_custom_graph", "vLLM_custom_eager", "vLLM_custom_graph"],
        "num_gpus": [8, 8, 8],
        "message_size": [512, 512, 1024],
        "latency": [0.004, 0.020, 0.015],
    }
    write(tmp_path, "comm/nccl/2.27", "nccl_perf", nccl)
    write(tmp_path, "comm/vllm/0.24.0", "custom_allreduce_perf", custom)
    sizes = np.array([1024.0, 2048.0])
    trtllm = estimate(tmp_path, ops.Collective("all_reduce", sizes, 8), "trtllm", "1.3.0rc20")
    np.testing.assert_allclose(trtllm.seconds, [4e-6, 10e-6])
    eager = estimate(tmp_path, ops.Collective("all_reduce", 1024.0, 8), cuda_graphs=False)
    assert eager.seconds == pytest.approx(10e-6)
    assert estimate(tmp_path, ops.Collective("all_gather", sizes, 8)).coverage is Coverage.ROOFLINE


def test_vllms_all_reduce_is_no_slower_than_the_same_kernel_in_sglangs_table(tmp_path: Path) -> None:
    for place, latency in (("vllm/0.14.0", [0.004, 0.044]), ("sglang/0.5.9", [0.005, 0.017])):
        columns = {"num_gpus": [8, 8], "message_size": [1024, 2**19], "latency": latency}
        write(
            tmp_path,
            f"comm/{place}",
            "custom_allreduce_perf",
            {**columns, "kernel_source": ["custom_all_reduce_graph"] * 2},
        )
    op = ops.Collective("all_reduce", np.array([2048.0, 2.0**20]), 8)
    np.testing.assert_allclose(estimate(tmp_path, op, version="0.10.2").seconds, [4e-6, 17e-6])
    np.testing.assert_allclose(estimate(tmp_path, op, "sglang", "0.5.9").seconds, [5e-6, 17e-6])


def nccl_columns(op: str, ranks: int, latency_us: dict[int, float], library: str = "NCCL") -> dict[str, Any]:
    """Message in bytes -> microseconds, as NCCL's files have them: elements of two bytes, milliseconds."""
    rows = len(latency_us)
    return {
        "op_name": [op] * rows,
        "kernel_source": [library] * rows,
        "nccl_dtype": ["half"] * rows,
        "num_gpus": [ranks] * rows,
        "message_size": [size // 2 for size in latency_us],
        "latency": [us / 1e3 for us in latency_us.values()],
    }


def test_hiccups_of_a_collective_are_not_believed_but_slower_starts_are(tmp_path: Path) -> None:
    """Two messages in a row took twice as long as a smaller and a larger one; the first may wait for the host."""
    times = {512: 16.0, 1024: 7.0, 2048: 7.5, 4096: 15.8, 8192: 17.0, 16384: 8.7, 32768: 12.0}
    write(tmp_path, "comm/nccl/2.27", "nccl_perf", nccl_columns("alltoall", 8, times))
    priced = estimate(tmp_path, ops.Collective("all_to_all", np.array([512.0, 2048, 4096, 8192, 16384]), 8))
    seconds = np.asarray(priced.seconds)
    np.testing.assert_allclose(seconds[[0, 1, 4]], [16e-6, 7.5e-6, 8.7e-6])
    assert np.all((seconds[2:4] > 7.5e-6) & (seconds[2:4] < 8.7e-6))
    assert priced.coverage is Coverage.INTERPOLATED


def test_a_device_with_other_rates_than_it_was_measured_with_is_scaled(tmp_path: Path) -> None:
    """Half of the memory's rate: a product bound by its weights takes nearly twice as long, and says so."""
    shapes = {"m": [1, 1, 2, 4], "n": [64, 8192, 8192, 8192], "k": [128, 8192, 8192, 8192]}
    columns = gemm_columns([0.002, 0.05, 0.05, 0.05]) | shapes
    write(tmp_path, "gemm/vllm/0.24.0", "gemm_perf", columns)
    slow = msgspec.structs.replace(H100, name="mine", memory_bytes_per_s=H100.memory_bytes_per_s / 2)
    same = msgspec.structs.replace(H100, name="mine", price_usd_per_hour=1.0)
    gemm = ops.Gemm(np.array([1.0, 2.0]), 8192, 8192)
    first = estimate(tmp_path, gemm)
    scaled, equal = (measured_estimator(d, None, "vllm", "0.24.0", tmp_path).estimate(gemm) for d in (slow, same))
    expected = Roofline(slow).seconds(gemm) / Roofline(H100).seconds(gemm)
    np.testing.assert_allclose(scaled.seconds, first.seconds * expected)
    assert np.all((expected > 1.7) & (expected < 2.0))
    assert (scaled.coverage, scaled.source) == (Coverage.SCALED, f"{first.source} at mine's rates")
    np.testing.assert_array_equal(equal.seconds, first.seconds)
    assert (equal.coverage, equal.source) == (Coverage.MEASURED, first.source)
    norm = ops.Elementwise("norm", 4096.0, 65536.0)
    without = measured_estimator(slow, None, "vllm", "0.24.0", tmp_path).estimate(norm)
    assert without.seconds == RooflineEstimator(Roofline(slow)).estimate(norm).seconds


def test_intels_collectives_are_read_where_no_graph_was_timed(tmp_path: Path) -> None:
    """oneCCL's files name their formats as NCCL's do, and vLLM's all-reduce was timed eagerly only."""
    device = catalog.device("b60")
    eager = {"num_gpus": [2], "message_size": [512], "latency": [0.040], "kernel_source": ["vLLM_custom_eager"]}
    folder = tmp_path / "data" / str(device.measured_as)
    for place, table, columns in (
        ("comm/oneccl/2021.17", "oneccl_perf", nccl_columns("all_reduce", 2, {1024: 25.0}, "oneCCL")),
        ("comm/vllm/0.20.0", "custom_allreduce_perf", eager),
    ):
        (folder / place).mkdir(parents=True)
        pq.write_table(pa.table(columns), folder / place / f"{table}.parquet")
    priced = measured_estimator(device, None, "vllm", "0.24.0", tmp_path).estimate(
        ops.Collective("all_reduce", 1024.0, 2)
    )
    assert priced.seconds == pytest.approx(25e-6)
    assert priced.source == f"{device.measured_as}/comm/oneccl/2021.17"


def test_vllms_all_reduce_changes_its_algorithm_where_its_source_says(tmp_path: Path) -> None:
    """Up to 256 KiB eight ranks read everything; at 255 KiB nothing is seen yet of the jump that comes with 256."""
    sizes = [2**15, 2**16, 2**17, 2**18]
    columns = {"num_gpus": [8] * 4, "message_size": sizes, "kernel_source": ["custom_all_reduce_graph"] * 4}
    for engine in ("vllm/0.24.0", "trtllm/1.3.0rc20"):
        write(tmp_path, f"comm/{engine}", "custom_allreduce_perf", {**columns, "latency": [0.009, 0.010, 0.026, 0.027]})
    op = ops.Collective("all_reduce", np.array([2.0**17, 255 * 1024.0, 2.0**18]), 8)
    first, before, after = np.asarray(estimate(tmp_path, op).seconds)
    assert (first, after) == (pytest.approx(10e-6), pytest.approx(26e-6))
    assert before < 15e-6
    assert np.asarray(estimate(tmp_path, op, "trtllm", "1.3.0rc20").seconds)[1] > 20e-6


def test_two_steps_of_an_all_reduce_may_take_longer_than_larger_messages_and_than_nccl(tmp_path: Path) -> None:
    """As on eight B200: two steps take 26 us from 256 KiB on, another kernel less from 1 MiB on, NCCL 18 everywhere.

    vLLM 0.11 calls its own kernel below the limits that it sets, whatever NCCL would take.
    """
    own = {2**17: 9.4, 2**18: 26.0, 2**19: 26.1, 2**20: 16.7, 2**21: 20.7}
    columns = nccl_columns("all_reduce", 8, own, "vLLM_custom_graph")
    write(tmp_path, "comm/vllm/0.19.0", "custom_allreduce_perf", columns)
    nccl = dict.fromkeys(own, 18.2) | {2**22: 27.0}
    write(tmp_path, "comm/nccl/2.27", "nccl_perf", nccl_columns("all_reduce", 8, nccl))
    sizes = np.array([float(size) for size in nccl])
    priced = estimate(tmp_path, ops.Collective("all_reduce", sizes, 8), version="0.11.1")
    np.testing.assert_allclose(priced.seconds, np.array([*own.values(), 27.0]) * 1e-6)


def test_links_that_failed_where_they_were_measured_are_those_of_another_table(tmp_path: Path) -> None:
    """As on eight L40S: over two cards the links reach half of their rate, over eight in one table alone."""
    largest = 2.0**30
    two_us, eight_us = 2.0 * largest / 450e3, 1.75 * largest / 450e3 * 20
    for place, eight in (("nccl/2.27", eight_us), ("vllm/0.24.0", eight_us), ("sglang/0.5.12", eight_us / 10)):
        columns = both(
            nccl_columns("all_reduce", 2, {2**20: 9.0, 2**30: two_us}, "custom_all_reduce_graph"),
            nccl_columns("all_reduce", 8, {2**20: eight / 1024, 2**30: eight}, "custom_all_reduce_graph"),
        )
        write(tmp_path, f"comm/{place}", "nccl_perf" if "nccl" in place else "custom_allreduce_perf", columns)
    op = ops.Collective("all_reduce", largest, 2)
    assert float(estimate(tmp_path, op).seconds) == pytest.approx(two_us * 1e-6)
    over_eight = estimate(tmp_path, replace(op, num_ranks=8))
    assert float(over_eight.seconds) == pytest.approx(eight_us / 10 * 1e-6)
    assert "sglang/0.5.12" in over_eight.source


def test_collectives_over_other_links_than_those_measured_are_priced_by_their_node(tmp_path: Path) -> None:
    """A table of NVLink says nothing of PCIe, nor of four devices that share out their links to each other."""
    write(tmp_path, "comm/nccl/2.27", "nccl_perf", nccl_columns("all_reduce", 2, {2**20: 9.0, 2**24: 70.0}))
    op = ops.Collective("all_reduce", 2.0**25, 2)
    priced = {
        name: measured_estimator(H100, catalog.node(name), "vllm", "0.24.0", tmp_path).estimate(op)
        for name in ("dgx_h100", "aws_p5", "hgx_h100_4", "pcie5", "pcie")
    }
    assert [each.coverage is Coverage.ROOFLINE for each in priced.values()] == [False, False, True, True, True]
    assert priced["dgx_h100"].seconds == priced["aws_p5"].seconds
    by_links = [float(each.seconds) for each in priced.values()][1:]
    assert by_links == sorted(by_links)
    assert by_links[-1] > 2.0**25 / 32e9


def test_a_card_with_less_power_for_the_same_chip_computes_at_a_lower_clock(tmp_path: Path) -> None:
    """H100 NVL has the multiprocessors of H100 SXM, 0.84 of its peaks and 0.57 of its power."""
    card, op = catalog.device("h100_nvl"), ops.Gemm(8192.0, 8192, 8192)
    columns = gemm_columns([0.75, 1.5, 3.0, 6.0]) | {"m": [4096, 8192, 16384, 32768], "n": [8192] * 4, "k": [8192] * 4}
    write(tmp_path, "gemm/vllm/0.24.0", "gemm_perf", columns)
    measured = estimate(tmp_path, op)
    priced = measured_estimator(card, None, "vllm", "0.24.0", tmp_path).estimate(op)
    share = clock_share(400 / 700, "hopper")
    assert float(priced.seconds) == pytest.approx(float(measured.seconds) / share, rel=0.03)
    assert (priced.coverage, priced.relative_error) == (Coverage.SCALED, OTHER_DEVICE_ERROR)
    unknown = msgspec.structs.replace(card, tdp_w=None)
    by_peaks = measured_estimator(unknown, None, "vllm", "0.24.0", tmp_path).estimate(op)
    assert float(by_peaks.seconds) == pytest.approx(float(measured.seconds) * 989 / 835.5, rel=0.03)
    training = measured_estimator(card, None, "vllm", "0.24.0", tmp_path, scales=False).estimate(op)
    assert float(training.seconds) == pytest.approx(float(by_peaks.seconds), rel=0.03)


def test_the_same_chip_with_fewer_links_is_priced_as_measured_and_its_collectives_by_its_links(tmp_path: Path) -> None:
    write(tmp_path, "gemm/vllm/0.24.0", "gemm_perf", gemm_columns([10.0, 20.0, 30.0, 40.0]))
    write(tmp_path, "comm/nccl/2.27", "nccl_perf", nccl_columns("all_reduce", 2, {2**20: 9.0, 2**24: 70.0}))
    fewer = measured_estimator(catalog.device("h800_sxm"), catalog.node("hgx_h800"), "vllm", "0.24.0", tmp_path)
    full = measured_estimator(H100, catalog.node("dgx_h100"), "vllm", "0.24.0", tmp_path)
    product, reduction = ops.Gemm(96.0, 4096, 4096), ops.Collective("all_reduce", 2.0**24, 2)
    assert fewer.estimate(product) == full.estimate(product)
    assert fewer.estimate(reduction).coverage is Coverage.ROOFLINE
    assert float(fewer.estimate(reduction).seconds) > 1.5 * float(full.estimate(reduction).seconds)


def test_a_fused_all_reduce_ends_where_its_engine_ends_it(tmp_path: Path) -> None:
    """The fused kernel is TensorRT-LLM's, faster at every size; above 256 KiB vLLM's own runs, and nothing between."""
    sizes = [2**15, 2**16, 2**17, 2**18]
    columns = {"num_gpus": [8] * 4, "message_size": sizes, "kernel_source": ["custom_all_reduce_graph"] * 4}
    for engine, latency in (("vllm/0.24.0", 0.020), ("trtllm/1.3.0rc20", 0.005)):
        write(tmp_path, f"comm/{engine}", "custom_allreduce_perf", {**columns, "latency": [latency] * 4})
    op = ops.Collective("all_reduce", np.array([2.0**16, 2.0**18, 2.0**18 + 2**16, 2.0**19]), 8)
    for limit, seconds in ((0.0, [20, 20, 20, 20]), (2.0**18, [5, 5, 20, 20]), (math.inf, [5, 5, 5, 5])):
        priced = estimate(tmp_path, op, fused_all_reduce_bytes=limit)
        np.testing.assert_allclose(priced.seconds, np.array(seconds) * 1e-6, rtol=1e-9)
    own = estimate(tmp_path, op, "trtllm", "1.3.0rc20", fused_all_reduce_bytes=2.0**16)
    np.testing.assert_allclose(own.seconds, 5e-6)


def test_decode_attention_sees_the_step_and_the_new_token(tmp_path: Path) -> None:
    columns = {
        "kernel_source": ["fa3"] * 2,
        "attn_dtype": ["bfloat16"] * 2,
        "kv_cache_dtype": ["bfloat16"] * 2,
        "batch_size": [4, 4],
        "step": [127, 1023],
        "num_heads": [8, 8],
        "num_key_value_heads": [1, 1],
        "head_dim": [128, 128],
        "latency": [0.010, 0.020],
    }
    write(tmp_path, "attention/vllm/0.24.0", "generation_attention_perf", columns)
    priced = estimate(tmp_path, DecodeAttention(4.0, np.array([128.0, 1024.0]), 8, 1, 128))
    np.testing.assert_allclose(priced.seconds, [10e-6, 20e-6])
    assert priced.coverage is Coverage.MEASURED


@pytest.mark.parametrize(
    ("version", "kernel", "seconds"),
    [("0.10.2", "fa3", [20e-6, 50e-6]), ("0.11.1", "fa3", [20e-6, 30e-6]), ("0.10.2", "trtllm", [20e-6, 30e-6])],
)
def test_before_tiles_for_it_decoding_over_an_fp8_cache_was_no_faster(
    tmp_path: Path, version: str, kernel: str, seconds: list[float]
) -> None:
    shape = {"batch_size": 4, "num_heads": 8, "num_key_value_heads": 1, "head_dim": 128}
    rows = {name: [value] * 4 for name, value in {**shape, "kernel_source": kernel}.items()}
    formats = ["bfloat16"] * 2 + ["fp8"] * 2
    columns = {**rows, "attn_dtype": formats, "kv_cache_dtype": formats, "step": [127, 1023] * 2}
    write(
        tmp_path,
        "attention/vllm/0.24.0",
        "generation_attention_perf",
        {**columns, "latency": [0.010, 0.050, 0.020, 0.030]},
    )
    op = DecodeAttention(4.0, np.array([128.0, 1024.0]), 8, 1, 128, kv_format=Format.FP8)
    np.testing.assert_allclose(estimate(tmp_path, op, version=version).seconds, seconds)


@pytest.mark.parametrize(
    ("engine", "seconds"), [("trtllm", [10e-6, 12e-6, 12e-6, 40e-6]), ("vllm", [10e-6, 20e-6, 12e-6, 40e-6])]
)
def test_trtllm_decodes_with_the_kernel_for_its_longest_sequences(
    tmp_path: Path, engine: str, seconds: list[float]
) -> None:
    """Of another batch, which is as slow at few keys as at many, nothing is taken."""
    keys = [127, 511, 1023, 4095]
    shape = {"num_heads": 16, "num_key_value_heads": 1, "head_dim": 128, "kernel_source": "any"}
    shape |= {"attn_dtype": "bfloat16", "kv_cache_dtype": "bfloat16"}
    rows = {name: [value] * 8 for name, value in shape.items()}
    latency = [0.010, 0.020, 0.012, 0.040, 0.004, 0.005, 0.005, 0.006]
    table = {**rows, "batch_size": [8] * 4 + [1] * 4, "step": keys * 2, "latency": latency}
    write(tmp_path, f"attention/{engine}/1.0.0", "generation_attention_perf", table)
    for batch, expected in ((8.0, seconds), (1.0, [4e-6, 5e-6, 5e-6, 6e-6])):
        op = DecodeAttention(batch, np.array([128.0, 512.0, 1024.0, 4096.0]), 16, 1, 128)
        np.testing.assert_allclose(estimate(tmp_path, op, engine, "1.0.0").seconds, expected)


def test_a_hiccup_of_decode_attention_is_not_believed_of_any_engine(tmp_path: Path) -> None:
    """22 us over 511 keys are 1.8 times as long as 12 us over 1,023."""
    shape = {"batch_size": 8, "num_heads": 16, "num_key_value_heads": 1, "head_dim": 128, "kernel_source": "any"}
    shape |= {"attn_dtype": "bfloat16", "kv_cache_dtype": "bfloat16"}
    rows = {name: [value] * 2 for name, value in shape.items()}
    table = {**rows, "step": [511, 1023], "latency": [0.022, 0.012]}
    write(tmp_path, "attention/vllm/0.24.0", "generation_attention_perf", table)
    op = DecodeAttention(8.0, np.array([512.0, 1024.0]), 16, 1, 128)
    np.testing.assert_allclose(estimate(tmp_path, op).seconds, [12e-6, 12e-6])


def test_attention_runs_on_the_backend_asked_for_whoever_measured_it(tmp_path: Path) -> None:
    shape = {"batch_size": [4, 4], "step": [127, 1023], "num_heads": [8, 8], "num_key_value_heads": [1, 1]}
    shape |= {"head_dim": [128, 128]}
    columns: dict[str, Any] = {**shape, "attn_dtype": ["bfloat16"] * 2, "kv_cache_dtype": ["bfloat16"] * 2}

    def measured(kernel: str, latency: list[float]) -> dict[str, Any]:
        return {**columns, "kernel_source": [kernel] * 2, "latency": latency}

    mine, others = measured("vllm_flashinfer_trtllmdecode", [0.010, 0.020]), measured("flashinfer", [0.030, 0.060])
    write(tmp_path, "attention/vllm/0.24.0", "generation_attention_perf", mine)
    write(tmp_path, "attention/sglang/0.5.14", "generation_attention_perf", others)
    op = DecodeAttention(4.0, np.array([128.0, 1024.0]), 8, 1, 128)
    for backend, seconds in ((None, [10e-6, 20e-6]), ("trtllm", [10e-6, 20e-6]), ("flashinfer", [30e-6, 60e-6])):
        np.testing.assert_allclose(estimate(tmp_path, op, attention_backend=backend).seconds, seconds)
    source = estimate(tmp_path, op, attention_backend="flashinfer").source
    assert "sglang/0.5.14 (flashinfer), in place of vllm" in source
    with pytest.raises(InputError, match="attention_backend triton was not measured on"):
        estimate(tmp_path, op, attention_backend="triton")


def moe_columns(dtype: str, latency: list[float], hidden: int = 2048) -> dict[str, Any]:
    rows = len(latency)
    shape = {
        "hidden_size": hidden,
        "inter_size": 768,
        "num_experts": 128,
        "topk": 8,
        "moe_tp_size": 1,
        "moe_ep_size": 1,
    }
    words = {"kernel_source": "triton", "moe_dtype": dtype, "distribution": "power_law_1.01"}
    columns = {name: [value] * rows for name, value in {**shape, **words}.items()}
    return {**columns, "num_tokens": [2**row for row in range(rows)], "latency": latency}


def both(each_op: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return {name: [*values, *other[name]] for name, values in each_op.items()}


def test_fp8_experts_that_are_slower_than_bf16_are_taken_from_elsewhere(tmp_path: Path) -> None:
    bf16, untuned = moe_columns("bfloat16", [0.04, 0.07]), moe_columns("fp8", [0.10, 0.20])
    write(tmp_path, "moe/vllm/0.24.0", "moe_perf", both(bf16, untuned))
    write(tmp_path, "moe/vllm/0.19.0", "moe_perf", both(bf16, moe_columns("fp8", [0.03, 0.05])))
    op = Experts(2.0, 2048, 768, 128, 8, format=Format.FP8)
    priced = estimate(tmp_path, op)
    assert priced.seconds == pytest.approx(50e-6)
    assert "vllm/0.19.0" in priced.source
    assert estimate(tmp_path, Experts(2.0, 2048, 768, 128, 8)).seconds == pytest.approx(70e-6)


EXPERTS = Experts(2.0, 2048, 768, 128, 8)


def named(columns: dict[str, Any], kernel: str) -> dict[str, Any]:
    return {**columns, "kernel_source": [kernel] * len(columns["latency"])}


@pytest.mark.parametrize(
    ("backend", "seconds", "kernel"),
    [(None, 70e-6, "min_latency"), ("trtllm", 70e-6, "min_latency"), ("cutlass", 90e-6, "cutlass")],
)
def test_experts_run_on_the_backend_asked_for_or_the_fastest(
    tmp_path: Path, backend: str | None, seconds: float, kernel: str
) -> None:
    slow = named(moe_columns("bfloat16", [0.03, 0.09, 0.2, 0.3]), "moe_torch_flow_cutlass")
    fast = named(moe_columns("bfloat16", [0.04, 0.07, 0.1, 0.2]), "moe_torch_flow_min_latency")
    write(tmp_path, "moe/trtllm/1.3.0", "moe_perf", both(slow, fast))
    priced = estimate(tmp_path, EXPERTS, "trtllm", "1.3.0", moe_backend=backend)
    assert priced.seconds == pytest.approx(seconds)
    assert kernel in priced.source
    first = estimate(tmp_path, Experts(1.0, 2048, 768, 128, 8), "trtllm", "1.3.0", moe_backend=backend)
    assert first.seconds == pytest.approx(40e-6 if backend == "trtllm" else 30e-6)


def test_kernels_of_a_library_that_the_engine_was_not_timed_with_are_taken_from_one_that_was(tmp_path: Path) -> None:
    write(tmp_path, "moe/trtllm/1.3.0", "moe_perf", named(moe_columns("bfloat16", [0.1, 0.2, 0.3]), "deepgemm"))
    shared = named(moe_columns("bfloat16", [0.04, 0.25]), "sglang_flashinfer_trtllm_moe")
    write(tmp_path, "moe/sglang/0.5.14", "moe_perf", shared)
    two, four = (Experts(float(tokens), 2048, 768, 128, 8) for tokens in (2, 4))
    priced = estimate(tmp_path, Experts(np.array([1.0, 2.0]), 2048, 768, 128, 8), "trtllm", "1.3.0")
    assert priced.seconds == pytest.approx([100e-6, 200e-6])
    chosen = [estimate(tmp_path, op, "trtllm", "1.3.0", moe_backend="trtllm") for op in (two, four)]
    assert chosen[0].seconds == pytest.approx(250e-6)
    assert chosen[1].seconds == pytest.approx(300e-6)
    assert chosen[0].source == "h100_sxm/moe/trtllm/1.3.0 (sglang_flashinfer_trtllm_moe of sglang 0.5.14)"
    assert estimate(tmp_path, two, "trtllm", "1.3.0", moe_backend="deepgemm").seconds == pytest.approx(200e-6)
    # A file that does not say which library it timed may have timed this one.
    write(tmp_path, "moe/trtllm/1.3.0", "moe_perf", named(moe_columns("bfloat16", [0.1, 0.2]), "moe_torch_flow"))
    assert estimate(tmp_path, two, "trtllm", "1.3.0", moe_backend="trtllm").seconds == pytest.approx(200e-6)


def test_a_shape_without_the_backends_kernel_takes_another_engines_and_others_keep_their_own(tmp_path: Path) -> None:
    own = named(moe_columns("bfloat16", [0.04, 0.07]), "moe_torch_flow_min_latency")
    foreign = named(moe_columns("bfloat16", [0.1, 0.2], hidden=4096), "moe_torch_flow_cutlass")
    write(tmp_path, "moe/trtllm/1.3.0", "moe_perf", both(own, foreign))
    shared = [
        named(moe_columns("bfloat16", [0.03, 0.05], hidden), "sglang_flashinfer_trtllm") for hidden in (2048, 4096)
    ]
    write(tmp_path, "moe/sglang/0.5.14", "moe_perf", both(*shared))
    there = Experts(2.0, 4096, 768, 128, 8)
    assert estimate(tmp_path, EXPERTS, "trtllm", "1.3.0", moe_backend="trtllm").seconds == pytest.approx(70e-6)
    taken = estimate(tmp_path, there, "trtllm", "1.3.0", moe_backend="trtllm")
    assert taken.seconds == pytest.approx(50e-6)
    assert "sglang_flashinfer_trtllm of sglang 0.5.14 at other shapes" in taken.source
    assert estimate(tmp_path, there, "trtllm", "1.3.0", moe_backend="cutlass").seconds == pytest.approx(200e-6)


def test_shapes_that_a_backend_was_not_measured_with_come_from_the_others(tmp_path: Path) -> None:
    each_op = named(moe_columns("bfloat16", [0.03, 0.09]), "vllm_marlin_experts")
    other = named(moe_columns("bfloat16", [0.02, 0.05], hidden=4096), "vllm_fused_moe")
    write(tmp_path, "moe/vllm/0.24.0", "moe_perf", both(each_op, other))
    for hidden, seconds in ((2048, 90e-6), (4096, 50e-6)):
        op = Experts(2.0, hidden, 768, 128, 8)
        assert estimate(tmp_path, op, moe_backend="triton").seconds == pytest.approx(seconds)


def test_a_backend_measured_at_other_shapes_limits_the_rate_of_those_that_stand_in(tmp_path: Path) -> None:
    """With 16 tokens an expert and more; below, all kernels take the time that reading weights takes."""
    tokens = [64, 256, 1024, 4096]
    slow = {**named(moe_columns("bfloat16", [0.1, 0.4, 1.6]), "vllm_marlin_experts"), "num_tokens": tokens[:3]}
    fast = {**named(moe_columns("bfloat16", [0.1, 0.2, 0.8, 3.2], hidden=4096), "vllm_triton"), "num_tokens": tokens}
    write(tmp_path, "moe/vllm/0.24.0", "moe_perf", both(slow, fast))
    op = Experts(np.array([64.0, 256.0, 1024.0]), 4096, 768, 128, 8)
    np.testing.assert_allclose(estimate(tmp_path, op).seconds, [0.1e-3, 0.2e-3, 0.8e-3])
    priced = estimate(tmp_path, op, moe_backend="marlin")
    np.testing.assert_allclose(priced.seconds, [0.1e-3, 0.8e-3, 3.2e-3])
    assert "vllm_triton, no faster than vllm_marlin_experts" in priced.source


@pytest.mark.parametrize(
    ("version", "options", "milliseconds"),
    [("0.11.2", {}, 0.09), ("0.12.0", {}, 0.05), ("0.11.2", {"moe_backend": "triton"}, 0.05)],
)
def test_hopper_computes_mxfp4_experts_with_marlin_before_vllm_holds_triton_kernels(
    tmp_path: Path, version: str, options: dict[str, str], milliseconds: float
) -> None:
    marlin = named(moe_columns("w4a16_mxfp4", [0.03, 0.09]), "vllm_marlin_experts")
    triton = named(moe_columns("w4a16_mxfp4", [0.02, 0.05]), "vllm_triton_oai")
    write(tmp_path, "moe/vllm/0.24.0", "moe_perf", both(marlin, triton))
    op = replace(EXPERTS, format=Format.MXFP4)
    priced = estimate(tmp_path, op, version=version, **options)
    assert priced.seconds == pytest.approx(milliseconds * 1e-3)


def test_an_older_kernel_that_the_engine_would_not_pick_is_left_out_and_named(tmp_path: Path) -> None:
    write(tmp_path, "moe/vllm/0.19.0", "moe_perf", named(moe_columns("bfloat16", [0.10, 0.20]), "old"))
    write(tmp_path, "moe/vllm/0.24.0", "moe_perf", named(moe_columns("bfloat16", [0.03, 0.05]), "new"))
    priced = estimate(tmp_path, EXPERTS, version="0.19.0")
    assert priced.seconds == pytest.approx(50e-6)
    assert priced.source == (
        "h100_sxm/moe/vllm/0.24.0 (new), nearest to 0.19.0; not vllm 0.19.0 (old), 3.7 times as slow as 0.24.0"
    )
    write(tmp_path, "moe/vllm/0.19.0", "moe_perf", named(moe_columns("bfloat16", [0.05, 0.08]), "old"))
    assert estimate(tmp_path, EXPERTS, version="0.19.0").seconds == pytest.approx(80e-6)


@pytest.mark.parametrize(
    ("one_token_ms", "version", "seconds"), [(0.044, "1.3.0rc10", 0.06e-3), (0.08, "1.3.0rc20", 0.05e-3)]
)
def test_skewed_experts_that_one_token_already_slows_are_left_out(
    tmp_path: Path, one_token_ms: float, version: str, seconds: float
) -> None:
    """One token meets as many experts however skewed they are: 1.1 times as long is believed, and 2 times is not."""
    balanced = {**moe_columns("bfloat16", [0.04, 0.06, 0.1]), "distribution": ["balanced"] * 3}
    skewed = moe_columns("bfloat16", [one_token_ms, 0.06, 0.1])
    write(tmp_path, "moe/trtllm/1.3.0rc10", "moe_perf", both(skewed, balanced))
    write(tmp_path, "moe/trtllm/1.3.0rc20", "moe_perf", moe_columns("bfloat16", [0.04, 0.05, 0.1]))
    priced = estimate(tmp_path, EXPERTS, "trtllm", "1.0.0rc3", expert_distribution="random")
    assert priced.seconds == pytest.approx(seconds)
    assert priced.source.startswith(f"h100_sxm/moe/trtllm/{version} (triton), nearest to 1.0.0rc3")
    assert ("not trtllm 1.3.0rc10 (triton), one token takes it 2.0 times" in priced.source) == (one_token_ms == 0.08)


def test_a_kernel_that_jumps_at_many_tokens_is_no_slower_than_the_newest_unless_asked_for(tmp_path: Path) -> None:
    """From 128 tokens on the older file takes twice as long, below 1.2 times: its median is not above the limit."""
    old = [0.06] * 7 + [0.16, 0.2, 0.3]
    write(tmp_path, "moe/vllm/0.19.0", "moe_perf", named(moe_columns("bfloat16", old), "vllm_fused_moe"))
    write(
        tmp_path, "moe/vllm/0.24.0", "moe_perf", named(moe_columns("bfloat16", [0.05] * 7 + [0.08, 0.1, 0.15]), "new")
    )
    few, many = (Experts(tokens, 2048, 768, 128, 8) for tokens in (64.0, 128.0))
    assert estimate(tmp_path, few, version="0.19.0").seconds == pytest.approx(50e-6)
    priced = estimate(tmp_path, many, version="0.19.0")
    assert priced.seconds == pytest.approx(80e-6)
    assert priced.source.endswith("; no slower than 0.24.0 (new)")
    chosen = [estimate(tmp_path, each_op, version="0.19.0", moe_backend="triton") for each_op in (few, many)]
    assert [each_op.seconds for each_op in chosen] == pytest.approx([60e-6, 160e-6])
    assert "0.24.0" not in chosen[1].source


@pytest.mark.parametrize(("version", "seconds"), [("0.16.0", [60e-6, 40e-6]), ("0.18.0", [60e-6, 30e-6])])
def test_block_scaled_experts_spread_over_ranks_are_flashinfers_on_hopper(
    tmp_path: Path, version: str, seconds: list[float]
) -> None:
    """vLLM from 0.17 on; whole experts on every rank stay Triton's, as do all of a server that asked for Triton's."""
    for place, kernel, latency in (
        ("0.19.0", "vllm_fused_moe", [0.06, 0.04]),
        ("0.24.0", "vllm_fp8moe_flashinfer_cutlass_flashinferexperts", [0.05, 0.03]),
    ):
        rows = named(moe_columns("fp8_block", latency), kernel)
        rows = {**rows, "moe_ep_size": [1, 8], "num_tokens": [64, 64]}
        write(tmp_path, f"moe/vllm/{place}", "moe_perf", rows)
    ops_of = [Experts(64.0, 2048, 768, 128, 8, 1, ep, Format.FP8_BLOCK) for ep in (1, 8)]
    assert [estimate(tmp_path, op, version=version).seconds for op in ops_of] == pytest.approx(seconds)
    chosen = estimate(tmp_path, ops_of[1], version="0.18.0", moe_backend="triton")
    assert chosen.seconds == pytest.approx(40e-6)


def test_mxfp4_takes_8_bit_activations_only_where_the_device_computes_in_4_bits(tmp_path: Path) -> None:
    files = both(moe_columns("w4a16_mxfp4", [0.03, 0.09]), moe_columns("w4a8_mxfp4_mxfp8", [0.02, 0.05]))
    write(tmp_path, "moe/trtllm/1.3.0", "moe_perf", files)
    (tmp_path / "data" / "b200_sxm").symlink_to(tmp_path / "data" / "h100_sxm")
    op = Experts(2.0, 2048, 768, 128, 8, format=Format.MXFP4)
    for device, seconds in ((H100, 90e-6), (catalog.device("b200_sxm"), 50e-6)):
        priced = measured_estimator(device, None, "trtllm", "1.3.0", tmp_path).estimate(op)
        assert priced.seconds == pytest.approx(seconds)


def test_another_engines_mxfp8_kernels_price_only_shapes_that_the_engine_has_not_timed_with_them(
    tmp_path: Path,
) -> None:
    """Two widths: of one vLLM timed its own mxfp8 kernel, of the other 16-bit activations alone."""
    b200 = tmp_path / "data" / "b200_sxm"
    (tmp_path / "data" / "h100_sxm").mkdir(parents=True)
    b200.symlink_to(tmp_path / "data" / "h100_sxm")
    own = both(moe_columns("w4a8_mxfp4_mxfp8", [0.03, 0.05]), moe_columns("w4a16_mxfp4", [0.09, 0.11], hidden=2880))
    other = both(
        moe_columns("w4a8_mxfp4_mxfp8", [0.02, 0.04]), moe_columns("w4a8_mxfp4_mxfp8", [0.06, 0.08], hidden=2880)
    )
    write(tmp_path, "moe/vllm/0.24.0", "moe_perf", own)
    write(tmp_path, "moe/trtllm/1.3.0", "moe_perf", other)
    priced = measured_estimator(catalog.device("b200_sxm"), None, "vllm", "0.24.0", tmp_path)
    for hidden, seconds in ((2048, 50e-6), (2880, 80e-6)):
        op = Experts(2.0, hidden, 768, 128, 8, format=Format.MXFP4)
        assert priced.estimate(op).seconds == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("device", "weights", "measured", "remark"),
    [
        ("h100_sxm", Format.NVFP4A16, "int4_wo", "whose int4 stands in for nvfp4a16"),
        ("h100_sxm", Format.NVFP4, "int4_wo", "whose int4 stands in for nvfp4a16; nvfp4 is dequantised, as nvfp4a16"),
        ("h100_sxm", Format.MXFP8, "int4_wo", "whose int4 stands in for w8a16; mxfp8 is dequantised, as w8a16"),
        ("b200_sxm", Format.MXFP8, "fp8_block", "whose fp8_block stands in for mxfp8"),
        ("b200_sxm", Format.MXFP4A4, "nvfp4", "whose nvfp4 stands in for mxfp4a4"),
    ],
)
def test_a_measured_format_of_the_same_arithmetic_stands_in(
    tmp_path: Path, device: str, weights: Format, measured: str, remark: str
) -> None:
    """Its time counts, times the ratio of the roofline's times, and the source says so."""
    write(tmp_path, "moe/vllm/0.24.0", "moe_perf", moe_columns(measured, [0.03, 0.09]))
    (tmp_path / "data" / "b200_sxm").symlink_to(tmp_path / "data" / "h100_sxm")
    priced = measured_estimator(catalog.device(device), None, "vllm", "0.24.0", tmp_path)
    roofline = Roofline(catalog.device(device))
    near = next(form for form, names in KERNELS.moe_dtypes.items() if measured in names)
    computed = computed_as(weights, roofline.device.peak_flops_per_s)
    op, stands_in, own = (Experts(2.0, 2048, 768, 128, 8, format=each) for each in (weights, near, computed))
    estimate_s = priced.estimate(op)
    ratio = float(roofline.seconds(own)) / float(roofline.seconds(stands_in))
    assert estimate_s.seconds == pytest.approx(90e-6 * ratio)
    assert estimate_s.source.endswith(remark)
    assert (estimate_s.coverage, estimate_s.relative_error) == (Coverage.SCALED, STAND_IN_ERROR)


def test_the_roofline_says_whose_coefficients_it_borrows(tmp_path: Path) -> None:
    write(tmp_path, "gemm/vllm/0.24.0", "gemm_perf", gemm_columns([0.01]))
    priced = estimate(tmp_path, ops.Gemm(8.0, 4096, 4096, Format.NVFP4))
    assert priced.coverage is Coverage.ROOFLINE
    assert priced.source.endswith("of bf16 in place of nvfp4a16; nvfp4 is dequantised, as nvfp4a16")
    assert priced.seconds == Roofline(H100).seconds(ops.Gemm(8.0, 4096, 4096, Format.NVFP4A16))


def test_a_partial_collection_is_completed_from_the_version_before(tmp_path: Path) -> None:
    write(tmp_path, "moe/vllm/0.24.0", "moe_perf", moe_columns("bfloat16", [0.1], hidden=4096))
    many = moe_columns("bfloat16", list(np.linspace(0.2, 0.9, 4000)))
    write(tmp_path, "moe/vllm/0.22.0", "moe_perf", {**many, "num_tokens": list(range(1, 4001))})
    new, old = (estimate(tmp_path, Experts(1.0, hidden, 768, 128, 8)) for hidden in (4096, 2048))
    assert (new.coverage, new.seconds) == (Coverage.MEASURED, pytest.approx(100e-6))
    assert (old.coverage, old.seconds) == (Coverage.MEASURED, pytest.approx(200e-6))


def gated_delta_columns(phase: str, kernels: list[str], latency: list[float]) -> dict[str, Any]:
    rows = len(kernels)
    sizes = {"batch_size": 2, "seq_len": 64, "num_k_heads": 4, "num_v_heads": 8, "head_k_dim": 128, "head_v_dim": 128}
    columns = {name: [value] * rows for name, value in {**sizes, "d_conv": 4}.items()}
    return {"phase": [phase] * rows, "kernel_source": kernels, "latency": latency, **columns}


def test_the_kernels_of_gated_delta_add_up(tmp_path: Path) -> None:
    columns = gated_delta_columns("context", ["conv", "conv", "conv", "rule"], [0.002, 0.003, 0.9, 0.020])
    write(tmp_path, "linear_attention/vllm/0.24.0", "gdn_perf", columns)
    priced = estimate(tmp_path, GatedDelta(2.0, 64.0, 4, 8, 128, 128, 4))
    assert priced.seconds == pytest.approx(23e-6)
    assert priced.coverage is Coverage.MEASURED


@pytest.mark.parametrize(
    ("device", "version", "kernel"),
    [
        ("h100_sxm", "0.16.0", "sglang"),
        ("h100_sxm", "0.17.0", "vllm"),
        ("b200_sxm", "0.20.1", "sglang"),
        ("b200_sxm", "0.22.0", "vllm"),
    ],
)
def test_prompts_through_gated_delta_take_the_kernel_that_the_version_had(
    tmp_path: Path, device: str, version: str, kernel: str
) -> None:
    """vLLM has FlashInfer's kernel since 0.17 on Hopper and since 0.22 on Blackwell; SGLang's table has Triton's."""
    op = GatedDelta(2.0, 64.0, 4, 8, 128, 128, 4)
    for engine, name, latency in (("vllm", "chunk_gated_delta_rule_flashinfer", 0.02), ("sglang", "chunk", 0.05)):
        columns = gated_delta_columns("context", [name], [latency])
        write(tmp_path, f"linear_attention/{engine}/0.24.0", "gdn_perf", columns, device)
    priced = measured_estimator(catalog.device(device), None, "vllm", version, tmp_path).estimate(op)
    assert f"/{kernel}/" in priced.source
    assert priced.seconds == pytest.approx({"vllm": 20e-6, "sglang": 50e-6}[kernel])


def test_latent_decode_grows_as_the_engines_own_module(tmp_path: Path) -> None:
    """vLLM measured whole modules: 100 us of projections and a core that grows twice as fast as SGLang's."""
    core = {
        "kernel_source": ["fa3"] * 3,
        "kv_cache_dtype": ["bfloat16"] * 3,
        "batch_size": [8] * 3,
        "num_heads": [16] * 3,
        "step": [1, 1023, 4095],
        "latency": [0.010, 0.020, 0.050],
    }
    module = {**core, "gemm_type": ["bfloat16"] * 3, "step": [2, 1024, 4096], "latency": [0.110, 0.130, 0.190]}
    write(tmp_path, "mla/sglang/0.5.14", "generation_mla_perf", core)
    write(tmp_path, "mla/vllm/0.24.0", "mla_generation_module_perf", module)
    op = LatentDecodeAttention(8.0, np.array([2.0, 1024, 4096]), 16, 512, 64)
    np.testing.assert_allclose(estimate(tmp_path, op).seconds, [10e-6, 30e-6, 90e-6])
    np.testing.assert_allclose(estimate(tmp_path, op, "sglang", "0.5.14").seconds, [10e-6, 20e-6, 50e-6])


def test_latent_decode_that_reads_a_context_in_one_piece_does_not_stand_in_for_another_engine(tmp_path: Path) -> None:
    """4,096 tokens of 1,152 bytes in 0.5 ms are 0.3% of the memory's rate."""
    columns = latent_columns([0.02, 0.1, 0.5]) | {"step": [63, 1023, 4095]}
    write(tmp_path, "mla/trtllm/1.0.0", "generation_mla_perf", columns)
    op = LatentDecodeAttention(1.0, np.array([64.0, 4096]), 16, 512, 64)
    np.testing.assert_allclose(estimate(tmp_path, op, "trtllm", "1.0.0").seconds, [20e-6, 500e-6])
    assert estimate(tmp_path, op).coverage is Coverage.ROOFLINE
    write(tmp_path, "mla/sglang/0.5.14", "generation_mla_perf", columns | {"latency": [0.01, 0.015, 0.02]})
    np.testing.assert_allclose(estimate(tmp_path, op).seconds, [10e-6, 20e-6])


def latent_columns(latency: list[float], kernel: str = "core", **words: list[str]) -> dict[str, Any]:
    """Prompts of 1,024, 8,192 and 32,768 tokens by 16 heads, in milliseconds."""
    return {
        "kernel_source": [kernel] * 3,
        "kv_cache_dtype": ["bfloat16"] * 3,
        "batch_size": [1] * 3,
        "num_heads": [16] * 3,
        "isl": [1024, 8192, 32768],
        "latency": latency,
        **words,
    }


def write_projections(folder: Path, per_token_us: float) -> None:
    """GEMMs of which latent attention's four projections take so long together, whatever their shape."""
    shapes = [(2112, 7168), (3072, 1536), (4096, 512), (7168, 2048)]
    tokens = [1024, 8192, 32768]
    points = [(m, n, k) for n, k in shapes for m in tokens]
    columns = dict(zip(("m", "n", "k"), map(list, zip(*points, strict=True)), strict=True))
    latency = [m * per_token_us / 4e3 for m, _, _ in points]
    rows = {"gemm_dtype": ["bfloat16"] * len(points), "kernel_source": ["torch"] * len(points), "latency": latency}
    write(folder, "gemm/vllm/0.24.0", "gemm_perf", {**columns, **rows})


def test_latent_prefill_is_taken_from_a_core_of_the_form_that_engines_serve(tmp_path: Path) -> None:
    """SGLang's file has the absorbed form, at four times the arithmetic; TRT-LLM's the one that all serve."""
    write(tmp_path, "mla/sglang/0.5.14", "context_mla_perf", latent_columns([0.06, 2.4, 32.0]))
    write(tmp_path, "mla/trtllm/1.3.0rc20", "context_mla_perf", latent_columns([0.05, 0.7, 9.0]))
    write_projections(tmp_path, 0.1)
    module = latent_columns([0.4, 0.8192 + 0.8, 3.2768 + 8.0], "FLASH_ATTN", gemm_type=["bfloat16"] * 3)
    write(tmp_path, "mla/vllm/0.24.0", "mla_context_module_perf", module)
    op = LatentPrefillAttention(1.0, np.array([1024.0, 8192, 32768]), 16, 192, 128)
    priced = estimate(tmp_path, op)
    seconds = np.asarray(priced.seconds)
    np.testing.assert_allclose(seconds[:2], [50e-6, 700e-6])
    assert 8.0e-3 < seconds[2] < 8.2e-3, "8 ms are left, 2.4 times the projections, so hardly in doubt"
    assert "(core), in place of vllm, no slower than trtllm, at most h100_sxm/mla/vllm/0.24.0" in priced.source
    served = estimate(tmp_path, op, "sglang", "0.5.14")
    np.testing.assert_allclose(served.seconds, [50e-6, 0.7e-3, 9e-3])
    assert served.source.endswith(", no slower than trtllm")


def test_little_that_is_left_of_a_latent_module_says_little_of_its_core(tmp_path: Path) -> None:
    """0.1 ms above projections of 3.3 ms are within what GEMMs are off by; so is nothing at all."""
    write(tmp_path, "mla/trtllm/1.3.0rc20", "context_mla_perf", latent_columns([0.05, 0.7, 1.0]))
    write_projections(tmp_path, 0.1)
    module = latent_columns([0.4, 0.80, 3.2768 + 0.1], "FLASH_ATTN", gemm_type=["bfloat16"] * 3)
    write(tmp_path, "mla/vllm/0.24.0", "mla_context_module_perf", module)
    op = LatentPrefillAttention(1.0, np.array([1024.0, 8192, 32768]), 16, 192, 128)
    seconds = np.asarray(estimate(tmp_path, op).seconds)
    np.testing.assert_allclose(seconds[:2], [50e-6, 700e-6])
    assert 0.95e-3 < seconds[2] < 1.0e-3


def test_short_prompts_that_go_through_decodes_kernel_say_nothing_of_prefill(tmp_path: Path) -> None:
    write(tmp_path, "mla/trtllm/1.3.0rc20", "context_mla_perf", latent_columns([0.5, 0.7, 9.0]))
    write_projections(tmp_path, 0.1)
    columns = latent_columns([0.1024 + 0.2, 0.8192 + 0.35, 3.2768 + 9.0], gemm_type=["bfloat16"] * 3)
    kernels = ["FLASH_ATTN_MLA", "FLASH_ATTN", "FLASH_ATTN"]
    write(tmp_path, "mla/vllm/0.24.0", "mla_context_module_perf", {**columns, "kernel_source": kernels})
    op = LatentPrefillAttention(1.0, np.array([1024.0, 8192]), 16, 192, 128)
    short, long = np.asarray(estimate(tmp_path, op).seconds)
    assert short == pytest.approx(0.5e-3)
    assert long < 0.6e-3


def test_bad_folders_files_and_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no measured operators"):
        measured_estimator(H100, None, "vllm", "0.24.0", tmp_path)
    write(tmp_path, "gemm/vllm/0.24.0", "gemm_perf", gemm_columns([0.002]))
    with pytest.raises(InputError, match="measured as b200_sxm, which the data does not have"):
        measured_estimator(catalog.device("b200_sxm"), None, "vllm", "0.24.0", tmp_path)
    with pytest.raises(InputError, match="expert distribution 'power_law' was not measured") as error:
        measured_estimator(H100, None, "vllm", "0.24.0", tmp_path, KernelChoices(expert_distribution="power_law"))
    assert "power_law_1.01" in str(error.value.hint)
    with pytest.raises(InputError, match="no backend of experts 'cutlas'") as error:
        measured_estimator(H100, None, "vllm", "0.24.0", tmp_path, KernelChoices(moe_backend="cutlas"))
    assert "cutlass" in str(error.value.hint)
    file = tmp_path / "data/h100_sxm/gemm/vllm/0.24.0/gemm_perf.parquet"
    file.write_bytes(b"PAR1 cut short")
    with pytest.raises(InputError, match="not a readable Parquet file"):
        estimate(tmp_path, ops.Gemm(1.0, 64, 128))
    columns = gemm_columns([0.002])
    del columns["k"]
    write(tmp_path, "gemm/vllm/0.24.0", "gemm_perf", columns)
    with pytest.raises(InputError, match="has no column k"):
        estimate(tmp_path, ops.Gemm(1.0, 64, 128))
    write(tmp_path, "gemm/vllm/0.24.0", "gemm_perf", gemm_columns([float("nan")]))
    with pytest.raises(InputError, match="a positive finite time is needed"):
        estimate(tmp_path, ops.Gemm(1.0, 64, 128))


def test_a_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(InputError, match="not installed") as error:
        measured_systems()
    assert "pip install" in str(error.value.hint)


def test_a_device_that_nobody_measured_gets_the_roofline() -> None:
    assert isinstance(measured_estimator(catalog.device("mi300x"), None, "vllm", "0.24.0"), RooflineEstimator)


M = np.array([1.0, 5, 17, 64, 200, 1000, 5000])
REAL: list[ops.Op] = [
    ops.Gemm(M, 4096, 7168),
    ops.Gemm(M, 4608, 3000, Format.FP8),
    ops.Gemm(M, 2112, 7168, Format.FP8_BLOCK),
    PrefillAttention(M / 200, 1024.0, 8, 1, 128),
    PrefillAttention(2.0, M, 5, 1, 128, 4096, Format.FP8),
    DecodeAttention(M, 2000.0, 7, 1, 128),
    DecodeAttention(64.0, M * 8, 8, 1, 64, 128, Format.FP8),
    LatentPrefillAttention(M / 200, 1024.0, 16, 192, 128),
    LatentDecodeAttention(M, 2000.0, 128, 512, 64, kv_format=Format.FP8),
    Experts(M, 2048, 768, 128, 8, 1, 4, Format.BF16),
    Experts(M, 7168, 2048, 256, 8, 1, 8, Format.FP8_BLOCK),
    Experts(M, 3000, 1000, 64, 6, 2, 1, Format.BF16),
    GatedDelta(M, 1.0, 4, 8, 128, 128, 4, decode=True),
    ops.Elementwise("norm", M, 8192.0),
    ops.Collective("all_reduce", M * 8192, 4),
    ops.Collective("all_gather", M * 8192, 16),
]


@installed
@pytest.mark.parametrize("op", REAL, ids=lambda op: f"{op.kind} {getattr(op, 'format', '')}")
@pytest.mark.parametrize(("system", "engine"), [("h100_sxm", "vllm"), ("b200_sxm", "sglang"), ("a100_sxm", "trtllm")])
def test_real_tables_price_everything(system: str, engine: str, op: ops.Op) -> None:
    device = catalog.device(system)
    priced = measured_estimator(device, catalog.default_node(device), engine, "0.24.0").estimate(op)
    seconds = np.asarray(priced.seconds)
    assert seconds.shape == M.shape
    assert np.all(np.isfinite(seconds))
    assert np.all((seconds > 1e-7) & (seconds < 1.0))
    assert system in priced.source or priced.coverage is Coverage.ROOFLINE


@installed
def test_the_shipped_tables_of_h100_are_read_right() -> None:
    """Spot checks against the rows themselves (aiconfigurator-core 0.12.0)."""
    estimator = measured_estimator(H100, None, "vllm", "0.24.0")
    assert isinstance(estimator, TableEstimator)
    gemm = estimator.estimate(ops.Gemm(16.0, 4096, 4096))
    assert gemm.coverage is Coverage.MEASURED
    assert gemm.seconds == pytest.approx(15.5e-6, abs=0.1e-6)
    latent = estimator.estimate(LatentDecodeAttention(64.0, 131072.0, 16, 512, 64))
    assert latent.seconds == pytest.approx(3.18e-3, rel=0.02)
    large = estimator.estimate(ops.Gemm(8192.0, 8192, 8192))
    assert 600e12 < 2 * 8192**3 / float(large.seconds) < 900e12


def test_a_message_slower_than_a_smaller_and_a_larger_one_takes_the_larger_ones_time(tmp_path: Path) -> None:
    """As vLLM's all-reduce of eight B200: two messages in a row take 1.5 times as long as four times the bytes."""
    times = {65536: 9.4, 131072: 25.8, 262144: 26.1, 524288: 17.2, 1048576: 20.7}
    write(tmp_path, "comm/nccl/2.27", "nccl_perf", nccl_columns("all_reduce", 8, times))
    priced = estimate(tmp_path, ops.Collective("all_reduce", np.array([float(size) for size in times]), 8))
    np.testing.assert_allclose(priced.seconds, np.array([9.4, 17.2, 17.2, 17.2, 20.7]) * 1e-6)


def experts_rows(dtype: str, distribution: str, latency_ms: dict[int, list[float]]) -> dict[str, list[Any]]:
    """Width of an expert -> milliseconds at 1, 2, 4, ... tokens."""
    points = [(width, 2**step, took) for width, curve in latency_ms.items() for step, took in enumerate(curve)]
    shape = {"hidden_size": 1024, "topk": 2, "num_experts": 8, "moe_tp_size": 1, "moe_ep_size": 1}
    return {
        "kernel_source": ["cutlass"] * len(points),
        "moe_dtype": [dtype] * len(points),
        "distribution": [distribution] * len(points),
        "inter_size": [width for width, _, _ in points],
        "num_tokens": [tokens for _, tokens, _ in points],
        "latency": [took for _, _, took in points],
        **{name: [value] * len(points) for name, value in shape.items()},
    }


@pytest.mark.parametrize(("everywhere", "kept"), [(False, False), (True, True)])
def test_a_shape_that_is_slow_in_one_format_alone_is_priced_by_its_neighbours(
    tmp_path: Path, everywhere: bool, kept: bool
) -> None:
    usual = [0.03, 0.03, 0.03, 0.04]
    slow = [5 * took for took in usual]
    curves = {512: usual, 1024: usual, 1536: usual, 2048: slow}
    other = curves if everywhere else {**curves, 2048: usual}
    columns = experts_rows("fp8", "power_law_1.01", curves)
    for name, values in experts_rows("fp8_block", "power_law_1.01", other).items():
        columns[name] += values
    write(tmp_path, "moe/trtllm/1.3.0", "moe_perf", columns)
    op = Experts(np.array([1.0, 8.0]), 1024, 2048, 8, 2, format=Format.FP8)
    priced = estimate(tmp_path, op, "trtllm", "1.3.0")
    assert (priced.coverage is Coverage.MEASURED) == kept
    assert (np.asarray(priced.seconds)[0] > 0.1e-3) == kept


def test_versions_of_one_engine_choose_no_table_of_another(tmp_path: Path) -> None:
    """vLLM 0.5.6 and SGLang 0.5.6 are unrelated: another engine's kernels are taken from its newest table."""
    for version, latency in (("0.5.6", 0.9), ("0.5.14", 0.002)):
        columns = {"m": [1, 64], "k": [128, 128], "latency": [latency, latency], "kernel_source": ["torch"] * 2}
        write(tmp_path, f"quantize/sglang/{version}", "scale_matrix_perf", columns)
    priced = estimate(tmp_path, ops.Elementwise("norm", 128 * 3.0, 1.0), "vllm", "0.5.6")
    assert priced.seconds == pytest.approx(2e-6)
    assert "sglang/0.5.14" in priced.source


def test_a_named_backend_does_not_hide_that_an_old_table_is_slow(tmp_path: Path) -> None:
    """The newest version names a slow marlin; without it the old table takes 10 times as long."""
    old = experts_rows("int4_wo", "power_law_1.01", {512: [0.3, 0.3]})
    new = experts_rows("int4_wo", "power_law_1.01", {512: [0.03, 0.03], 1024: [9.0, 9.0]})
    new["kernel_source"] = ["triton", "triton", "marlin", "marlin"]
    # Marlin's rate counts from 16 tokens an expert on.
    for columns in (old, new):
        columns["num_tokens"] = [64 * tokens for tokens in columns["num_tokens"]]
    write(tmp_path, "moe/vllm/0.19.0", "moe_perf", old)
    write(tmp_path, "moe/vllm/0.24.0", "moe_perf", new)
    op = Experts(64.0, 1024, 512, 8, 2, format=Format.INT4)
    source = estimate(tmp_path, op, "vllm", "0.19.0", moe_backend="marlin").source
    assert "moe/vllm/0.24.0" in source
    assert "not vllm 0.19.0" in source
