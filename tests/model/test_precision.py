import math

import pytest

from windtunnel.model.precision import ACTIVATION_BITS, BITS, COMPUTE, Format, Precision, computed_as


def test_every_format_is_described() -> None:
    assert set(BITS) == set(ACTIVATION_BITS) == set(COMPUTE) == set(Format)


@pytest.mark.parametrize(
    ("stored", "bytes_of_a_block", "values"),
    [
        # One 128 x 128 block of DeepSeek-V3: a byte a value and an fp32 scale (arXiv:2412.19437, section 3.3.2).
        (Format.FP8_BLOCK, 128 * 128 + 4, 128 * 128),
        # 16 values of 4 bits and an e4m3 scale (NVIDIA, "Introducing NVFP4"); 32 and an e8m0 one (OCP MX 1.0, table 1).
        (Format.NVFP4, 16 / 2 + 1, 16),
        (Format.MXFP4, 32 / 2 + 1, 32),
        (Format.NVFP4A16, 16 / 2 + 1, 16),
        (Format.MXFP4A4, 32 / 2 + 1, 32),
        (Format.MXFP8, 32 + 1, 32),
        (Format.W8A16, 128 + 2, 128),
        (Format.INT4, 128 / 2 + 2, 128),
        (Format.BF16, 2, 1),
    ],
)
def test_scales_are_counted(stored: Format, bytes_of_a_block: float, values: int) -> None:
    assert math.isclose(BITS[stored], bytes_of_a_block * 8 / values)


def test_weight_only_formats_have_bf16_activations_and_rates() -> None:
    for name in (Format.INT4, Format.MXFP4, Format.NVFP4A16, Format.W8A16):
        assert ACTIVATION_BITS[name] == 16
        assert COMPUTE[name] == ("bf16",)


@pytest.mark.parametrize(
    ("weights", "on_hopper"),
    [
        (Format.NVFP4, Format.NVFP4A16),
        (Format.MXFP4A4, Format.MXFP4),
        (Format.MXFP8, Format.W8A16),
        (Format.FP8_BLOCK, Format.FP8_BLOCK),
        (Format.INT4A8, Format.INT4A8),
    ],
)
def test_tensor_cores_without_four_bits_dequantise(weights: Format, on_hopper: Format) -> None:
    assert computed_as(weights, {"bf16", "fp8"}) is on_hopper
    assert computed_as(weights, {"bf16", "fp8", "fp4"}) is weights
    assert COMPUTE[computed_as(Format.INT4A8, {"bf16"})] == ("bf16",)
    assert computed_as(Format.FP8, {"bf16"}) is computed_as(Format.FP8_BLOCK, {"bf16"}) is Format.W8A16


def test_int4_weights_have_the_scales_of_their_checkpoint() -> None:
    precision = Precision(int4_bits=4.5)
    assert [precision.bits(each) for each in (Format.INT4, Format.INT4A8, Format.MXFP8)] == [4.5, 4.5, 8.25]


def test_formats_that_are_left_out_follow_the_weights() -> None:
    precision = Precision(weights=Format.NVFP4, attention=Format.BF16)
    assert (precision.attention_format, precision.experts_format) == (Format.BF16, Format.NVFP4)
    assert precision.attention_output_format == Format.BF16
    assert (precision.lm_head, precision.kv_cache) == (Format.BF16, Format.BF16)


def test_awq_is_a_format_and_what_may_be_several_is_none() -> None:
    assert Format("AWQ") is Format("awq") is Format.INT4
    for several in ("gptq", "w4a16", "w8a8"):  # of 2 to 8 bits; int4 or nvfp4; int8 or fp8
        with pytest.raises(ValueError, match=several):
            Format(several)
