"""Classify kernels and operators by name, and shorten their names for people.

The patterns match the names that PyTorch, its inductor, cuBLAS, CUTLASS, FlashAttention, FlashInfer, NCCL, vLLM and
SGLang give their kernels and operators.
"""

import re
from collections.abc import Mapping
from functools import cache

from windtunnel.formats.captures.capture import CLASSES

# The first class with a pattern that is found decides, so special patterns stand before general ones: a kernel of
# FlashAttention has `cutlass` in its template arguments, and a fused norm `add`.
_PATTERNS: Mapping[str, tuple[str, ...]] = {
    "communication": (
        *("nccl", "rccl", "all_?reduce", "_?all_?gather", "reduce_?scatter", "all_?to_?all", "cross_device_reduce"),
        *("one_?shot_", "two_?shot_", "multimem", "nvshmem", "deep_?ep", "gloo:", "c10d::", "symm_mem", "sendrecv"),
    ),
    "kv_cache": (
        *("reshape_and_cache", "concat_and_cache", "kv_?cache_update", "append_?paged", "cache_kernel", "copy_blocks"),
        *("store_kv", "set_kv_buffer", "update_kv"),
    ),
    "attention": (
        *("attn", "attention", "flash", "fmha", r"\bmha", "_mha", "mla_", "paged_?kv", "batchprefill", "batchdecode"),
        *("merge_?states", "splitkv", "gated_delta", "causal_conv1d", "selective_scan"),
    ),
    "rope": ("rotary", "rope"),
    "norm": (
        *("rms_?norm", "layer_?norm", "group_?norm", "batch_?norm", "l2norm", "norm_kernel"),
        *("(?:pow|mean).*rsqrt", "rsqrt.*(?:pow|mean)"),
    ),
    "experts": ("moe", "expert", "topk_?gating", "grouped_topk", "group_gemm", "grouped_gemm", "permute_tokens"),
    "quantization": ("quant_fp8", "fp8_quant", "per_token_.*quant", "scaled_fp8", "(?<!de)quantize", "quant_kernel"),
    "gemm": (
        *("gemm", "gemv", "cublas", "cutlass", "nvjet", "xmma", "marlin", "machete", "splitk", "onednn_mm", "dnnl"),
        *("mkldnn_linear", "triton_mm", "triton_tem", "wgmma", "hmma", "_mm_kernel", "matmul", "linear_kernel"),
        r"\baten::(?:_scaled_)?(?:mm|addmm|bmm|baddbmm|linear|addmv|mv|dot)\b",
    ),
    "activation": ("silu", "gelu", "relu", "swish", "act_and_mul", "swiglu", "sigmoid", "glu_"),
    "embedding": ("embedding", "vocab"),
    "sampling": (
        *("arg_?max", "multinomial", "top_?k", "top_?p", "sort", "sampl", "gumbel", "greedy", "log_?softmax"),
        "exponential_",
    ),
    "copy": (
        *("memcpy", "direct_copy", "copy_kernel", "catarray", "transpose", "permute"),
        "aten::(?:copy_|_to_copy|to|contiguous|clone|cat)$",
    ),
    "elementwise": (
        *("elementwise", "vectorized", "unrolled", "triton_poi", "triton_red", "triton_per", "reduce_kernel"),
        *("softmax", "fill", "index", "scatter", "gather", "where", "cumsum", "scan", "arange", "masked"),
        "aten::(?:add|sub|mul|div|neg|pow|mean|sum|rsqrt|cos|sin|eq|ne|lt|le|gt|ge|all|any|max|min|exp|zero|ones|full)",
    ),
}
_COMPILED = tuple(
    (CLASSES.index(name), re.compile("|".join(patterns), re.IGNORECASE)) for name, patterns in _PATTERNS.items()
)
_OTHER = CLASSES.index("other")


@cache
def kernel_class(name: str) -> int:
    """Return the position in CLASSES of a kernel's or operator's purpose, by its name; `other` where it is unclear."""
    return next((code for code, pattern in _COMPILED if pattern.search(name)), _OTHER)


@cache
def short_name(name: str) -> str:
    """Return a kernel's name without its return type, template arguments, namespace and parameters.

    `void at::native::elementwise_kernel<128, 4, ...>(int, ...)` -> `elementwise_kernel`.
    """
    if name.startswith("["):
        return name
    text = name.replace("(anonymous namespace)::", "")
    depth, kept = 0, list[str]()
    for letter in text:
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0 and kept:
            break
        if depth == 0 and letter != ">":
            kept.append(letter)
    plain = "".join(kept).strip().split(" ")[-1]
    return plain.rsplit("::", 1)[-1] or name


_VERSION = re.compile(r"_v\d{4,5}$")


def call_name(name: str) -> str:
    """Return a function's name without CUPTI's version: `cudaLaunchKernel_v7000` -> `cudaLaunchKernel`."""
    return _VERSION.sub("", name)
