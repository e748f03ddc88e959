import msgspec
import numpy as np
import pytest

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.hardware import Device, Link, Node
from windtunnel.model import operators as ops
from windtunnel.model.attention.gated_delta import GatedDelta
from windtunnel.model.attention.grouped_query import DecodeAttention, PrefillAttention
from windtunnel.model.attention.latent import LatentDecodeAttention, LatentPrefillAttention
from windtunnel.model.attention.mamba2 import CausalConvolution, StateSpaceScan
from windtunnel.model.feed_forward.experts import Experts
from windtunnel.model.precision import Format
from windtunnel.model.sampling import TokenFilter
from windtunnel.model.shape import operator_types
from windtunnel.pricing.roofline import (
    BORROWED_ERROR,
    COPY_SHARE,
    FORMS,
    Roofline,
    as_published,
    fit_for,
    fits,
    is_measured,
    machine,
    tiles_seconds,
)

BARE = Device(
    name="bare",
    title="A device of which little is known",
    vendor="nobody",
    architecture="unknown",
    memory_bytes=64 * 2**30,
    memory_bytes_per_s=2e12,
    peak_flops_per_s={"bf16": 400e12},
)
M = np.array([1.0, 7, 16, 64, 100, 256, 1000, 4096, 20000])

FAMILIES: list[ops.Op] = [
    ops.Gemm(M, 4096, 7168),
    ops.Gemm(M, 4096, 7168, Format.FP8),
    ops.Gemm(M, 1536, 7168, Format.INT4),
    ops.Gemm(M, 4096, 4096, Format.NVFP4),
    PrefillAttention(M / 64, 1000.0, 32, 8, 128),
    PrefillAttention(4.0, M, 32, 8, 128, 128, Format.FP8),
    DecodeAttention(M, 2000.0, 32, 8, 128),
    DecodeAttention(8.0, M, 5, 1, 128, 4096, Format.FP8),
    LatentPrefillAttention(M / 64, 1000.0, 16, 192, 128),
    LatentDecodeAttention(M, 2000.0, 128, 512, 64),
    GatedDelta(M, 1000.0, 4, 8, 128, 128, 4),
    GatedDelta(M, 1.0, 4, 8, 128, 128, 4, decode=True),
    Experts(M, 2048, 768, 128, 8),
    Experts(M, 7168, 2048, 256, 8, 1, 8, Format.FP8_BLOCK),
    Experts(M, 2880, 2880, 128, 4, 2, 1, Format.MXFP4),
    CausalConvolution(M, 1.0, 6144, 4, decode=True),
    CausalConvolution(1.0, M, 6144, 4),
    StateSpaceScan(M, 1.0, 64, 64, 8, 128, 128, 2.0**21, decode=True),
    StateSpaceScan(4.0, M, 64, 64, 8, 128, 128, 2.0**21),
    ops.Elementwise("norm", M, 8192.0),
    ops.Collective("all_reduce", M * 1000, 8),
    ops.Collective("send_recv", M * 1000, 2),
]


def identity(op: ops.Op) -> str:
    return f"{op.kind} {getattr(op, 'format', getattr(op, 'kv_format', getattr(op, 'op', '')))}"


@pytest.mark.parametrize(
    "device", [BARE, *map(catalog.device, ("h100_sxm", "mi300x", "rtx_4090", "h20", "tpu_v5e"))], ids=str
)
@pytest.mark.parametrize("op", FAMILIES, ids=identity)
def test_every_device_prices_every_operator(device: Device, op: ops.Op) -> None:
    """Positive, finite, not faster than the published peaks allow, and no cheaper where there is more to do."""
    seconds = np.asarray(Roofline(device).seconds(op))
    assert seconds.shape == M.shape
    assert np.all(np.isfinite(seconds) & (seconds > 0))
    assert np.all(np.diff(seconds) >= -1e-12)
    if not isinstance(op, ops.Collective):
        assert np.all(seconds >= op.flops / machine(device, op.compute_format).flops_per_s / 1.02)


def test_every_kind_but_the_scan_lightning_attention_and_exchanges_has_a_form_and_a_fit() -> None:
    measured = set(FORMS) | {"collective"}
    assert set(operator_types()) - measured == {"state_space_scan", "lightning_attention", "token_exchange", "mega_moe"}
    for kind in measured:
        for name, fit in fits(kind).items():
            assert 0 < fit.median_error < 0.5, (kind, name)
            assert all(value > 0 for value in fit.coefficients.values())


def test_a_format_that_nobody_measured_borrows_coefficients() -> None:
    int4, bf16 = (fit_for(ops.Gemm(1, 1, 1, weights)) for weights in (Format.INT4, Format.BF16))
    assert (int4.coefficients, int4.by_family) == (bf16.coefficients, bf16.by_family)
    assert int4.fitted_on == f"{bf16.fitted_on}, of bf16 in place of int4"
    assert int4.median_error == BORROWED_ERROR > bf16.median_error


def test_wave_quantisation_shows() -> None:
    """One row of tiles more than fills the device costs a wave: 133 tiles of 128 x 128 on 132 multiprocessors."""
    h100 = Roofline(catalog.device("h100_sxm"))
    exact, more = (float(h100.seconds(ops.Gemm(128.0 * tiles, 128 * 132, 8192))) for tiles in (4, 4.05))
    assert more > 1.1 * exact


def test_a_device_without_the_format_uses_the_next_rate() -> None:
    a100 = catalog.device("a100_sxm")
    assert machine(a100, Format.FP8).flops_per_s == a100.peak_flops_per_s["bf16"]


def test_a_device_without_any_rate_is_refused() -> None:
    broken = Device(
        **{name: getattr(BARE, name) for name in BARE.__struct_fields__} | {"peak_flops_per_s": {"int4": 1e12}}
    )
    with pytest.raises(InputError, match="no peak rate for bf16"):
        machine(broken, Format.BF16)


def node(**fields: object) -> Node:
    links = {"scale_up": Link(name="up", bytes_per_s=400e9, latency_s=1e-6)}
    return Node(**{"name": "n", "title": "n", "device": "bare", "num_devices": 8, **links, **fields})  # type: ignore[arg-type]


def test_nodes_in_between_cost_their_link() -> None:
    slow = node(scale_out=Link(name="out", bytes_per_s=25e9, latency_s=3e-6))
    fast = node(scale_out=Link(name="out", bytes_per_s=100e9, latency_s=3e-6))
    op = ops.Collective("all_reduce", 1e9, 16, span_nodes=2)
    inside = Roofline(BARE, slow).seconds(ops.Collective("all_reduce", 1e9, 8))
    assert Roofline(BARE, slow).seconds(op) > Roofline(BARE, fast).seconds(op) > inside
    with pytest.raises(InputError, match="needs a link between nodes"):
        Roofline(BARE, node()).seconds(op)


def test_ranks_beyond_an_nvlink_pair_go_through_the_host() -> None:
    pairs = node(scale_up_group_size=2, host=Link(name="pcie", bytes_per_s=32e9, latency_s=1e-6))
    two, four = (Roofline(BARE, pairs).seconds(ops.Collective("all_gather", 1e9, ranks)) for ranks in (2, 4))
    assert four > 10 * two


def test_fp32_is_multiplied_on_cuda_cores() -> None:
    """cuBLAS on GB200, 256 columns of 6,144 values (vllm-project/vllm, pull request 47973): microseconds by rows."""
    measured = {4: 20.2, 8: 16.7, 16: 22.3, 32: 63.2, 64: 63.3, 128: 69.3, 256: 77.8, 512: 96.8, 1024: 111.0}
    rows = np.array([*measured], np.float64)
    roofline = Roofline(catalog.device("gb200"))
    ratio = np.asarray(roofline.seconds(ops.Gemm(rows, 256, 6144, Format.FP32))) * 1e6 / np.array([*measured.values()])
    assert np.median(np.abs(ratio - 1)) < 0.16
    assert np.abs(ratio - 1).max() < 0.45
    # Tensor cores take a tenth of that for a long prompt.
    prompt = ops.Gemm(np.array([8192.0]), 256, 3072, Format.FP32)
    faster = ops.Gemm(np.array([8192.0]), 256, 3072, Format.TF32)
    assert roofline.seconds(prompt) > 8 * roofline.seconds(faster)


FILTERS = ("sort", "segmented_sort", "triton", "triton_top_k", "triton_split", "flashinfer", "flashinfer_top_k")
PUBLISHED_MS = {
    ("sort", 56, 32768): 0.393,
    ("sort", 64, 131072): 1.005,
    ("segmented_sort", 512, 131072): 6.150,
    ("triton", 128, 131072): 0.528,
    ("triton", 512, 131072): 2.013,
    ("triton_top_k", 128, 131072): 0.354,
    ("flashinfer", 512, 131072): 0.372,
    ("flashinfer_top_k", 128, 131072): 0.267,
}
"""(Kernel, rows, vocabulary) -> milliseconds in vLLM's pull requests 33538 and 40376."""


@pytest.mark.parametrize("kernel", FILTERS)
def test_filtering_takes_longer_with_more_rows_and_a_larger_vocabulary(kernel: str) -> None:
    h100, rows = Roofline(catalog.device("h100_sxm")), np.array([1.0, 8.0, 64.0, 128.0, 1024.0])
    small, large = (np.asarray(h100.seconds(TokenFilter(kernel, rows, size))) for size in (32000, 262208))
    assert np.all(np.diff(small) >= 0)
    assert small[-1] > small[0]
    assert np.all(large > small)


@pytest.mark.parametrize(("point", "measured_ms"), PUBLISHED_MS.items(), ids=str)
def test_filters_take_their_published_times(point: tuple[str, int, int], measured_ms: float) -> None:
    seconds = Roofline(catalog.device("h200_sxm")).seconds(TokenFilter(*point))
    assert float(seconds) * 1e3 == pytest.approx(measured_ms, rel=0.15)


def test_the_best_tile_is_the_best_of_all_tiles_and_splits() -> None:
    """Plain Python, one tile and one split at a time; arrays of rows give the same bits as single ones."""
    on = machine(catalog.device("h100_sxm"), Format.BF16)
    c = {"compute_efficiency": 0.8, "tile_64": 0.7, "wave_smoothing": 0.4, "fill_depth": 300.0, "tile_us": 0.2}
    c |= {"cache_gb_per_s_per_sm": 30.0, "split_us": 2.0}
    rate, splits = on.flops_per_s_per_sm * 0.8, (1, 4, 16)
    efficiency = {(128, 64): 0.7, (64, 64): 0.7**2, (32, 64): 0.7**2 * 0.85, (16, 64): 0.7**2 * 0.7}

    def alone(m: int, n: int, k: int, tile: tuple[int, int], split: int) -> float:
        waves = np.ceil(m / tile[0]) * np.ceil(n / tile[1]) * split / on.num_sms
        full = 1.0 if waves <= 1 else 0.4 * waves + (1 - 0.4) * np.ceil(waves)
        step = 2.0 * tile[0] * tile[1] * (max(k / split, 32.0) + 300.0) / (rate * efficiency.get(tile, 1.0))
        sums = m * n * 4.0 * split * 2 / (on.num_sms * 30.0 * 1e9)
        return float(full * (step + 0.2 * 1e-6) + (2e-6 + sums if split > 1 else 0.0))

    tiles = [(256, 128), (128, 128), *efficiency]
    rows = np.array([1, 17, 100, 512, 9000])
    for n, k in ((128, 16384), (6144, 4096)):
        best = [min(alone(int(m), n, k, tile, split) for tile in tiles for split in splits) for m in rows]
        together = tiles_seconds(1.0, rows, n, k, on, c, splits)
        np.testing.assert_allclose(together, best, rtol=1e-12)
        assert [float(tiles_seconds(1.0, int(m), n, k, on, c, splits)) for m in rows] == list(together)


def test_no_product_is_faster_than_the_fastest_that_was_published() -> None:
    held = msgspec.structs.replace(BARE, product_flops_per_s={"bf16": 100e12})
    small, large = (ops.Gemm(float(size), size, size) for size in (64, 16384))
    free, bound = (float(Roofline(device).seconds(large)) for device in (BARE, held))
    least = float(large.flops) / 100e12
    assert free < 0.5 * least < least <= bound < 1.05 * least
    assert Roofline(held).seconds(small) == pytest.approx(Roofline(BARE).seconds(small))


def test_a_format_that_nobody_published_has_the_mean_share_of_the_others() -> None:
    device = msgspec.structs.replace(
        BARE,
        peak_flops_per_s={"bf16": 400e12, "fp8": 800e12, "fp4": 1600e12},
        product_flops_per_s={"bf16": 200e12, "fp8": 480e12},
    )
    names = (Format.BF16, Format.FP8, Format.FP8_BLOCK, Format.NVFP4)
    rates = [as_published(device, machine(device, name), name).product_flops_per_s for name in names]
    assert rates == pytest.approx([200e12, 480e12, 480e12, 0.55 * 1600e12])


def test_a_format_may_have_a_fastest_product_of_its_own() -> None:
    device = msgspec.structs.replace(
        BARE,
        peak_flops_per_s={"bf16": 400e12, "fp8": 800e12},
        product_flops_per_s={"bf16": 200e12, "fp8": 480e12, "fp8_block": 300e12},
    )
    large = [ops.Gemm(16384.0, 16384, 16384, form) for form in (Format.FP8, Format.FP8_BLOCK)]
    per_tensor, by_block = (float(op.flops / Roofline(device).seconds(op)) for op in large)
    assert by_block < 300e12 < per_tensor < 480e12


def test_block_scaled_products_may_go_through_k_in_one_piece() -> None:
    device = catalog.device("mi325x")
    serial, split = (Roofline(device, serial_products=is_serial) for is_serial in (True, False))
    measured = {(4608, 7168): 122e-6, (7168, 2304): 39e-6, (7168, 2048): 34e-6}  # SemiAnalysisAI/InferenceX, issue 863
    for (n, k), seconds in measured.items():
        op = ops.Gemm(64.0, n, k, Format.FP8_BLOCK)
        assert serial.seconds(op) == pytest.approx(seconds, rel=0.05)
        assert float(split.seconds(op)) < 0.5 * seconds
    for other in (ops.Gemm(64.0, 4608, 7168, Format.FP8), ops.Gemm(65536.0, 4608, 7168, Format.FP8_BLOCK)):
        assert serial.seconds(other) == split.seconds(other)


def test_gaudi_reads_the_weights_of_all_experts() -> None:
    one, many = (Experts(tokens, 5120, 1536, 160, 8, tp=8) for tokens in (1.0, 64.0))
    gaudi, other = (Roofline(catalog.device(name)) for name in ("gaudi3", "mi300x"))
    assert float(gaudi.seconds(one)) > 0.95 * float(gaudi.seconds(many))
    assert float(other.seconds(one)) < 0.3 * float(other.seconds(many))
    assert gaudi.seconds(one) > one.num_experts * 3 * 5120 * 1536 * 2 / 8 / gaudi.device.memory_bytes_per_s


def test_memory_is_as_much_slower_as_a_copy_of_it() -> None:
    device = msgspec.structs.replace(BARE, copy_bytes_per_s=0.5 * COPY_SHARE * BARE.memory_bytes_per_s)
    op = ops.Elementwise("norm", 1e6, 8192.0)
    fast, slow = (float(Roofline(each).seconds(op)) for each in (BARE, device))
    assert slow == pytest.approx(2 * fast, rel=0.01)


def test_published_rates_lie_below_the_peaks() -> None:
    found = [device for device in map(catalog.device, catalog.names("devices")) if device.product_flops_per_s]
    assert {"mi300x", "mi325x", "mi355x"} <= {device.name for device in found}
    for device in found:
        for name, rate in device.product_flops_per_s.items():
            assert 0.3 < rate / device.peak_flops_per_s[name.removesuffix("_block")] < 1
        assert device.copy_bytes_per_s is None or 0.7 < device.copy_bytes_per_s / device.memory_bytes_per_s < 1
        assert not is_measured(device)


def test_a_device_is_measured_where_one_of_its_architecture_was() -> None:
    names = ("h100_sxm", "h20", "a10", "mi300x", "gaudi3", "tpu_v7")
    assert [is_measured(catalog.device(name)) for name in names] == [True, True, True, False, False, False]
