"""Names of the kernel backends and estimators that a deployment may choose."""

from windtunnel.plugins import Registry

ATTENTION_BACKENDS = ("trtllm", "flashinfer", "flash_attention", "triton")

MOE_BACKENDS = ("cutlass", "trtllm", "deepgemm", "triton", "marlin", "flashinfer")
"""Families of kernels that compute experts, by the names that engines' flags use; `flashinfer` is any that it wraps."""

BUILT_IN = ("interpolation", "auto", "monotone")
"""Estimators that fit nothing: tables as they are, the best by cross-validation, and tables that never fall."""

REGRESSIONS = Registry(
    "windtunnel.estimators", "windtunnel.pricing.estimators", "estimator", "fit", "RISES", taken=BUILT_IN
)
"""Regressions that replace the times of a profile; the docstring of their folder states what one says."""


def estimators() -> tuple[str, ...]:
    """Return the known values of `Profile.estimator`."""
    return (*BUILT_IN, *REGRESSIONS.names())
