"""Number formats: bits of a weight, an activation or a cached key in memory, and the peak rate that computes it."""

from collections.abc import Container
from enum import StrEnum
from typing import NamedTuple

from windtunnel.schema import Schema


class Format(StrEnum):
    """A storage format of weights or KV cache. Names are those that engines and checkpoints use."""

    FP32 = "fp32"
    """Multiplied on CUDA cores, as PyTorch does unless told otherwise."""
    TF32 = "tf32"
    """fp32 in memory, multiplied on tensor cores with 10 bits of mantissa."""
    BF16 = "bf16"
    FP8 = "fp8"
    """e4m3, one scale per tensor or channel."""
    FP8_BLOCK = "fp8_block"
    """e4m3, one fp32 scale per 128x128 block (DeepSeek-V3)."""
    MXFP8 = "mxfp8"
    """e4m3, one e8m0 scale per 32 values (OCP microscaling); weights and activations."""
    INT8 = "int8"
    W8A16 = "w8a16"
    """Weights of 8 bits with a 16 bit scale per group of 128 (GPTQ, Marlin); computes in bf16."""
    INT4 = "int4"
    """Weight-only, bf16 scale per group of 128 (AWQ, GPTQ); computes in bf16."""
    INT4A8 = "int4a8"
    """Weights as int4, activations in fp8 (W4A8 of AWQ, W4AFP8)."""
    NVFP4 = "nvfp4"
    """e2m1, one e4m3 scale per 16 values; weights and activations."""
    NVFP4A16 = "nvfp4a16"
    """Weights as nvfp4, dequantised; computes in bf16 (W4A16_NVFP4 of ModelOpt)."""
    MXFP4 = "mxfp4"
    """e2m1, one e8m0 scale per 32 values (OCP microscaling); weights only, as gpt-oss ships."""
    MXFP4A4 = "mxfp4a4"
    """Weights and activations as mxfp4 (AMD Quark)."""

    @classmethod
    def _missing_(cls, value: object) -> "Format | None":
        return cls.INT4 if str(value).lower() == "awq" else None


class _Storage(NamedTuple):
    """Storage and arithmetic of one format of weights."""

    bits: float
    """Bits of one value, its share of the scales included."""
    activation_bits: float
    """Bits of one input activation of a GEMM with such weights."""
    rates: tuple[str, ...]
    """Names of the peak rates that may compute it, the fastest first; a device takes the first one that it has."""


_STORAGE: dict[Format, _Storage] = {
    Format.FP32: _Storage(32.0, 32.0, ("fp32", "bf16")),
    Format.TF32: _Storage(32.0, 32.0, ("tf32", "bf16")),
    Format.BF16: _Storage(16.0, 16.0, ("bf16",)),
    Format.FP8: _Storage(8.0, 8.0, ("fp8", "bf16")),
    Format.FP8_BLOCK: _Storage(8.0 + 32.0 / (128 * 128), 8.0 + 32.0 / 128, ("fp8", "bf16")),
    Format.MXFP8: _Storage(8.0 + 8.0 / 32, 8.0 + 8.0 / 32, ("fp8", "bf16")),
    Format.INT8: _Storage(8.0, 8.0, ("int8", "bf16")),
    Format.W8A16: _Storage(8.0 + 16.0 / 128, 16.0, ("bf16",)),
    Format.INT4: _Storage(4.0 + 16.0 / 128, 16.0, ("bf16",)),
    Format.INT4A8: _Storage(4.0 + 16.0 / 128, 8.0, ("fp8", "bf16")),
    Format.NVFP4: _Storage(4.0 + 8.0 / 16, 4.0 + 8.0 / 16, ("fp4", "bf16")),
    Format.NVFP4A16: _Storage(4.0 + 8.0 / 16, 16.0, ("bf16",)),
    Format.MXFP4: _Storage(4.0 + 8.0 / 32, 16.0, ("bf16",)),
    Format.MXFP4A4: _Storage(4.0 + 8.0 / 32, 4.0 + 8.0 / 32, ("fp4", "bf16")),
}
BITS = {name: storage.bits for name, storage in _STORAGE.items()}
ACTIVATION_BITS = {name: storage.activation_bits for name, storage in _STORAGE.items()}
COMPUTE = {name: storage.rates for name, storage in _STORAGE.items()}

_DEQUANTISED: dict[Format, tuple[str, Format]] = {
    Format.NVFP4: ("fp4", Format.NVFP4A16),
    Format.MXFP4A4: ("fp4", Format.MXFP4),
    Format.MXFP8: ("fp4", Format.W8A16),
    Format.INT4A8: ("fp8", Format.INT4),
    Format.FP8: ("fp8", Format.W8A16),
    Format.FP8_BLOCK: ("fp8", Format.W8A16),
}
"""Format -> the rate of the tensor cores that take it, and the format as which kernels compute it elsewhere.

Tensor cores with four bits also scale eight bits by blocks of 32, and earlier ones do not (vLLM 0.16
`select_mxfp8_linear_backend`: CUTLASS from compute capability 10.0 on, Marlin below; `marlin_utils_fp4.py`,
`marlin_utils_fp8.py`).
"""


def computed_as(weights: Format, rates: Container[str]) -> Format:
    """Return the format as which a device with such `rates` computes weights: itself, or one that is dequantised."""
    needed, dequantised = _DEQUANTISED.get(weights, ("", weights))
    return weights if needed in rates else dequantised


class Precision(Schema, omit_defaults=False):
    """The formats of one deployed model. `None` means: as `weights`.

    Written out whole: in a file, a format that is left out is the published checkpoint's.
    """

    weights: Format = Format.BF16
    """Linear layers of attention and dense feed-forward."""
    attention: Format | None = None
    """Projections of attention, where a checkpoint leaves them unquantised (gpt-oss, Kimi-K2.5)."""
    attention_output: Format | None = None
    """Output projection of attention, where a checkpoint quantises it alone (NVFP4 DeepSeek-V3.1); None: as the other
    projections."""
    experts: Format | None = None
    """Routed experts."""
    lm_head: Format = Format.BF16
    kv_cache: Format = Format.BF16
    recurrent_state: Format | None = None
    """States of Mamba-2, fp32 or bf16; None: what config.json says (`mamba_ssm_cache_dtype`), else bf16."""
    int4_bits: float = BITS[Format.INT4]
    """Bits of a stored weight in int4: 4, and its share of the scale and zero point of its group."""
    w8a16_bits: float = BITS[Format.W8A16]
    """Bits of a stored weight in w8a16, in the same way."""

    def bits(self, weights: Format) -> float:
        """Return the bits of one stored weight of a format, its share of the scales included."""
        by_group = {Format.INT4: self.int4_bits, Format.INT4A8: self.int4_bits, Format.W8A16: self.w8a16_bits}
        return by_group.get(weights, BITS[weights])

    @property
    def attention_format(self) -> Format:
        return self.attention or self.weights

    @property
    def attention_output_format(self) -> Format:
        return self.attention_output or self.attention_format

    @property
    def experts_format(self) -> Format:
        return self.experts or self.weights
