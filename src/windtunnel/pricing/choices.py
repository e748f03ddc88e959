"""Names of the kernel backends and estimators that a deployment may choose."""

ATTENTION_BACKENDS = ("trtllm", "flashinfer", "flash_attention", "triton")

MOE_BACKENDS = ("cutlass", "trtllm", "deepgemm", "triton", "marlin", "flashinfer")
"""Families of kernels that compute experts, by the names that engines' flags use; `flashinfer` is any that it wraps."""

ESTIMATORS = (
    "interpolation",
    "auto",
    "monotone",
    "polynomial",
    "forest",
    "boosting",
    "roofline_residual",
)
"""Known values of `Profile.estimator`."""
