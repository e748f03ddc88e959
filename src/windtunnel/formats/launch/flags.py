"""Server options that decide a setting, and the setting that each decides."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

KV_FORMATS = {
    "auto": None,
    "bfloat16": "bf16",
    "bf16": "bf16",
    "fp8": "fp8",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "fp8_ds_mla": "fp8",
}
# The checkpoint itself says which format compressed-tensors holds.
WEIGHT_FORMATS = {
    "compressed-tensors": None,
    "fp8": "fp8",
    "modelopt": "fp8",
    "modelopt_fp8": "fp8",
    "fbgemm_fp8": "fp8",
    "w8a8_fp8": "fp8",
    "awq": "int4",
    "awq_marlin": "int4",
    "gptq": "int4",
    "gptq_marlin": "int4",
    "w8a8_int8": "int8",
    "modelopt_fp4": "nvfp4",
    "mxfp4": "mxfp4",
}

Convert = Callable[[str], Any]


def whole(text: str) -> int:
    """Read `8192`, `8k` (8,000) or `8K` (8,192), as vLLM does."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmM]?)", text.replace(",", "").replace("_", ""))
    if match is None:
        raise ValueError("a whole number is needed")
    scale = {"": 1, "k": 1000, "K": 1024, "m": 10**6, "M": 2**20}[match[2]]
    return int(float(match[1]) * scale)


@dataclass(frozen=True)
class Words:
    """Words that an option takes, and our name of each."""

    known: Mapping[str, str | None]

    def __call__(self, text: str) -> str | None:
        if text not in self.known:
            raise ValueError(f"known: {', '.join(self.known)}")
        return self.known[text]

    def word_for(self, value: str) -> str | None:
        """Return the first word that means `value`, or None."""
        return next((word for word, meaning in self.known.items() if meaning == value), None)


def _one_of(*words: str) -> Words:
    return Words({word: word for word in words})


def sizes(text: str) -> list[int]:
    """Read `1 2 4`, `1,2,4` or `[1, 2, 4]`."""
    return [whole(part) for part in re.split(r"[\s,]+", text.strip("[] ")) if part]


ENGINE = "deployment.engine."
SPLIT = "deployment.parallelism."


@dataclass(frozen=True)
class Flag:
    """The setting that one option decides."""

    path: str
    """Path of the setting in a scenario; or a word in brackets that is resolved once all options are known."""
    convert: Convert = whole
    value: Any = None
    """Value of an option without an argument; None: it has one."""
    is_lenient: bool = False
    """Whether an unknown value is reported as not modelled instead of refused."""


def _on(path: str, value: Any = True) -> Flag:
    return Flag(path, whole, value)


SIXTEEN_BIT = Flag("[dtype]", _one_of("auto", "bfloat16", "float16", "half"), is_lenient=True)
"""Both 16-bit formats have the same rates and bytes; `float` is not modelled."""

_FLASHINFER = {"0": "flashinfer", "false": "flashinfer", "1": "trtllm", "true": "trtllm", "True": "trtllm"}
_ATTENTION = {
    "vllm": {"FLASH_ATTN": "flash_attention", "TRITON_ATTN": "triton"},
    "sglang": {
        "flashinfer": "flashinfer",
        "triton": "triton",
        "trtllm_mha": "trtllm",
        **dict.fromkeys(("fa3", "fa4"), "flash_attention"),
    },
}
_EXPERTS: dict[str, dict[str, str | None]] = {
    "sglang": {
        "auto": None,
        "triton": "triton",
        "deep_gemm": "deepgemm",
        "cutlass": "cutlass",
        "flashinfer_trtllm": "trtllm",
    },
    "trtllm": {"CUTLASS": "cutlass", "TRTLLM": "trtllm", "DEEPGEMM": "deepgemm", "AUTO": None},
}
"""Engine -> word of its option for attention or expert kernels -> our name."""

VLLM: dict[str, Flag] = {
    "model": Flag("model", str),
    "tensor-parallel-size": Flag(SPLIT + "tp"),
    "pipeline-parallel-size": Flag(SPLIT + "pp"),
    "data-parallel-size": Flag("[data_parallel]"),
    "enable-expert-parallel": _on("[expert_parallel]"),
    "max-num-seqs": Flag(ENGINE + "max_num_seqs"),
    "max-num-batched-tokens": Flag(ENGINE + "max_num_batched_tokens"),
    "max-model-len": Flag(ENGINE + "max_model_len"),
    "gpu-memory-utilization": Flag(ENGINE + "gpu_memory_utilization", float),
    "block-size": Flag(ENGINE + "block_size"),
    "num-gpu-blocks-override": Flag(ENGINE + "num_gpu_blocks"),
    "disable-hybrid-kv-cache-manager": _on(ENGINE + "window_kv", "full"),
    "long-prefill-token-threshold": Flag(ENGINE + "long_prefill_token_threshold"),
    "scheduling-policy": Flag(ENGINE + "scheduling_policy", _one_of("fcfs", "priority")),
    "kv-cache-dtype": Flag("precision.kv_cache", Words(KV_FORMATS)),
    "quantization": Flag("precision.weights", Words(WEIGHT_FORMATS)),
    "enable-prefix-caching": _on(ENGINE + "enable_prefix_caching"),
    "no-enable-prefix-caching": _on(ENGINE + "enable_prefix_caching", False),
    "enable-chunked-prefill": _on(ENGINE + "enable_chunked_prefill"),
    "no-enable-chunked-prefill": _on(ENGINE + "enable_chunked_prefill", False),
    "async-scheduling": _on(ENGINE + "async_scheduling"),
    "no-async-scheduling": _on(ENGINE + "async_scheduling", False),
    "enforce-eager": _on(ENGINE + "max_cudagraph_capture_size", 0),
    "max-cudagraph-capture-size": Flag(ENGINE + "max_cudagraph_capture_size"),
    "cudagraph-capture-sizes": Flag(ENGINE + "cudagraph_sizes", sizes),
    "speculative-config": Flag("[speculative]", json.loads),
    "attention-backend": Flag(ENGINE + "attention_backend", Words(_ATTENTION["vllm"]), is_lenient=True),
    "attention-config.use-trtllm-attention": Flag(ENGINE + "attention_backend", Words(_FLASHINFER)),
    "no-attention-config.use-trtllm-attention": _on(ENGINE + "attention_backend", "flashinfer"),
    "dtype": SIXTEEN_BIT,
}
SGLANG: dict[str, Flag] = {
    "model-path": Flag("model", str),
    "tp-size": Flag("[sglang_tp]"),
    "pp-size": Flag(SPLIT + "pp"),
    "dp-size": Flag("[data_parallel]"),
    "ep-size": Flag(SPLIT + "ep"),
    "enable-dp-attention": _on("[attention_dp]"),
    "mem-fraction-static": Flag(ENGINE + "gpu_memory_utilization", float),
    "max-running-requests": Flag(ENGINE + "max_num_seqs"),
    "chunked-prefill-size": Flag("[chunked_prefill]", int),
    "max-prefill-tokens": Flag(ENGINE + "max_prefill_tokens"),
    "context-length": Flag(ENGINE + "max_model_len"),
    "page-size": Flag(ENGINE + "block_size"),
    "swa-full-tokens-ratio": Flag(ENGINE + "window_pool_ratio", float),
    "disable-hybrid-swa-memory": _on(ENGINE + "window_kv", "full"),
    "schedule-policy": Flag(ENGINE + "scheduling_policy", _one_of("fcfs", "lpm", "priority")),
    "schedule-conservativeness": Flag(ENGINE + "schedule_conservativeness", float),
    "scheduler-recv-interval": Flag(ENGINE + "receive_interval_steps"),
    "kv-cache-dtype": Flag("precision.kv_cache", Words(KV_FORMATS)),
    "quantization": Flag("precision.weights", Words(WEIGHT_FORMATS)),
    "disable-radix-cache": _on(ENGINE + "enable_prefix_caching", False),
    "disable-overlap-schedule": _on(ENGINE + "async_scheduling", False),
    "disable-cuda-graph": _on(ENGINE + "max_cudagraph_capture_size", 0),
    "cuda-graph-max-bs": Flag(ENGINE + "max_cudagraph_capture_size"),
    "enable-piecewise-cuda-graph": _on(ENGINE + "piecewise_cudagraphs"),
    "disable-piecewise-cuda-graph": _on(ENGINE + "piecewise_cudagraphs", False),
    "cuda-graph-bs": Flag(ENGINE + "cudagraph_sizes", sizes),
    "attention-backend": Flag(ENGINE + "attention_backend", Words(_ATTENTION["sglang"]), is_lenient=True),
    "moe-runner-backend": Flag(ENGINE + "moe_backend", Words(_EXPERTS["sglang"]), is_lenient=True),
    "dtype": SIXTEEN_BIT,
}
TRTLLM: dict[str, Flag] = {
    "model": Flag("model", str),
    "tp-size": Flag("[trtllm_tp]"),
    "pp-size": Flag(SPLIT + "pp"),
    "ep-size": Flag(SPLIT + "ep"),
    "max-batch-size": Flag(ENGINE + "max_num_seqs"),
    "max-num-tokens": Flag(ENGINE + "max_num_batched_tokens"),
    "max-seq-len": Flag(ENGINE + "max_model_len"),
    "kv-cache-free-gpu-memory-fraction": Flag(ENGINE + "gpu_memory_utilization", float),
    "tokens-per-block": Flag(ENGINE + "block_size"),
    "kv-cache-dtype": Flag("precision.kv_cache", Words(KV_FORMATS)),
    "max-attention-window": Flag("[windows]", sizes),
    "enable-attention-dp": _on("[attention_dp]"),
    "enable-chunked-prefill": _on(ENGINE + "enable_chunked_prefill"),
    "no-enable-chunked-prefill": _on(ENGINE + "enable_chunked_prefill", False),
    "enable-block-reuse": _on(ENGINE + "enable_prefix_caching"),
    "disable-block-reuse": _on(ENGINE + "enable_prefix_caching", False),
    "disable-overlap-scheduler": _on(ENGINE + "async_scheduling", False),
    "batch-wait-timeout-iters": Flag(ENGINE + "batch_wait_timeout_iters"),
    "batch-wait-max-tokens-ratio": Flag(ENGINE + "batch_wait_max_tokens_ratio", float),
    "attention-dp-config.enable-balance": _on("[balance]"),
    "attention-dp-config.timeout-iters": Flag("[balance_timeout]"),
    "attention-dp-config.batching-wait-iters": Flag("[balance_batching]"),
    "torch-compile-config.enable-piecewise-cuda-graph": _on(ENGINE + "piecewise_cudagraphs"),
    "cuda-graph-max-batch-size": Flag(ENGINE + "max_cudagraph_capture_size"),
    "cuda-graph-batch-sizes": Flag(ENGINE + "cudagraph_sizes", sizes),
    "no-cuda-graph-config": _on(ENGINE + "max_cudagraph_capture_size", 0),
    "moe-backend": Flag(ENGINE + "moe_backend", Words(_EXPERTS["trtllm"]), is_lenient=True),
}
FLAGS = {"vllm": VLLM, "sglang": SGLANG, "trtllm": TRTLLM}

OTHER_NAMES: dict[str, dict[str, str]] = {
    "vllm": {
        "tp": "tensor-parallel-size",
        "pp": "pipeline-parallel-size",
        "dp": "data-parallel-size",
        "ep": "enable-expert-parallel",
        "q": "quantization",
        "cuda-graph-sizes": "cudagraph-capture-sizes",
    },
    "sglang": {
        "model": "model-path",
        "tp": "tp-size",
        "tensor-parallel-size": "tp-size",
        "pp": "pp-size",
        "pipeline-parallel-size": "pp-size",
        "dp": "dp-size",
        "data-parallel-size": "dp-size",
        "ep": "ep-size",
        "expert-parallel-size": "ep-size",
        "cuda-graph-bs-decode": "cuda-graph-bs",
        "cuda-graph-max-bs-decode": "cuda-graph-max-bs",
    },
    "trtllm": {
        "tensor-parallel-size": "tp-size",
        "pipeline-parallel-size": "pp-size",
        "moe-expert-parallel-size": "ep-size",
        "free-gpu-memory-fraction": "kv-cache-free-gpu-memory-fraction",
        "kv-cache-config.free-gpu-memory-fraction": "kv-cache-free-gpu-memory-fraction",
        "kv-cache-config.dtype": "kv-cache-dtype",
        "kv-cache-config.enable-block-reuse": "enable-block-reuse",
        "kv-cache-config.tokens-per-block": "tokens-per-block",
        "kv-cache-config.max-attention-window": "max-attention-window",
        "moe-config.backend": "moe-backend",
        "cuda-graph-config.max-batch-size": "cuda-graph-max-batch-size",
        "cuda-graph-config.batch-sizes": "cuda-graph-batch-sizes",
    },
}
"""Engine -> other name of an option, or its path in the engine's YAML -> its name in `FLAGS`."""

IN_FILE_ONLY = (
    *("tokens-per-block", "enable-chunked-prefill", "no-enable-chunked-prefill", "enable-block-reuse"),
    *("disable-block-reuse", "disable-overlap-scheduler", "batch-wait-timeout-iters", "batch-wait-max-tokens-ratio"),
    *("torch-compile-config.enable-piecewise-cuda-graph", "cuda-graph-max-batch-size", "cuda-graph-batch-sizes"),
    *("no-cuda-graph-config", "moe-backend"),
)
"""Options that trtllm-serve takes from its YAML file and not from its command line."""
SPECULATIVE = "speculative-config"
"""vLLM's option that holds JSON, or a field of it in each of `speculative-config.method`, ..."""

CONFIG_FILES = {"vllm": ("config",), "sglang": ("config",), "trtllm": ("extra-llm-api-options", "config")}
"""Options that name a YAML file of further options."""
