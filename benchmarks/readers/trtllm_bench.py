"""The limits that `trtllm-bench` gives TensorRT-LLM where its command names none."""

from __future__ import annotations

import math
from typing import Any

from windtunnel.model.attention.grouped_query import GroupedQueryAttention
from windtunnel.model.parameters import count_parameters
from windtunnel.model.precision import Format
from windtunnel.serving.scenario import Setup

PACKED_SHARE = 0.5 + 1 / 16
"""Numbers stored for each weight of NVFP4: it counts a byte of two weights, and the scale of sixteen, as one
parameter, as Hugging Face does (397 of 671 billion for nvidia/DeepSeek-R1-FP4)."""
BYTES_OF_WEIGHTS = {Format.BF16: 2.0, Format.FP8: 1.0, Format.FP8_BLOCK: 1.0, Format.NVFP4: 0.5 * PACKED_SHARE}
MEMORY_SHARE = 0.95
"""Of the memory beside the weights, for the KV cache."""

DOCUMENTED_GRAPHS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512, 1024, 2048, 4096, 8192)
"""Batches with a CUDA graph, padded to, that every command of the page of TensorRT-LLM's throughput names."""


def documented(model: str, device: str) -> dict[str, Any]:
    """Return the engine settings that the page's commands give for a model.

    It names CUTLASS for the experts of DeepSeek-R1 and gpt-oss, and Triton for those of gpt-oss on Hopper. For Qwen3
    and Llama 4 it names none, which is CUTLASS too (`MoeConfig.backend`, tensorrt_llm/llmapi/llm_args.py 1.0 and 1.1).
    """
    settings = {"cudagraph_sizes": DOCUMENTED_GRAPHS, "cudagraph_padding": True, "moe_backend": "cutlass"}
    if "gpt-oss" in model and device in ("H100", "H200"):
        settings["moe_backend"] = "triton"
    if "DeepSeek-R1" in model:  # attention_dp_config
        settings |= {"attention_dp_timeout_iters": 60, "attention_dp_batching_wait_iters": 0}
    return settings


def limits(setup: Setup, input_tokens: int, output_tokens: int) -> dict[str, int]:
    """Return `max_num_seqs` and `max_num_batched_tokens` for requests of these lengths.

    As many requests as it takes the KV cache to hold, and the tokens of a step at which as many finish as start,
    both rounded up in its steps (TensorRT-LLM 1.1, tensorrt_llm/bench/build/tuning.py); without chunked prefill at
    least a whole prompt beside all of them (bench/benchmark/utils/general.py). Formats that it does not know have the
    engine's defaults, as gpt-oss has.
    """
    sizes, model = setup.precision, setup.model
    weights = sizes.experts_format if sizes.experts_format in BYTES_OF_WEIGHTS else sizes.weights
    defaults = {"max_num_seqs": 2048, "max_num_batched_tokens": max(8192, input_tokens + 2048)}
    if sizes.experts_format not in BYTES_OF_WEIGHTS or weights not in BYTES_OF_WEIGHTS:
        return defaults
    devices, pp, (_, attention) = setup.parallelism.num_devices, setup.parallelism.pp, model.attentions[0]
    if isinstance(attention, GroupedQueryAttention):
        kv_heads, head_dim = attention.num_kv_heads, attention.head_dim
    else:  # it reads config.json as if each head kept keys and values of its own
        kv_heads, head_dim = attention.num_heads, model.hidden_size // attention.num_heads
    bytes_per_token = 2 * model.num_layers * max(devices // pp, kv_heads) * head_dim
    bytes_per_token *= 1 if sizes.kv_cache in (Format.FP8, Format.FP8_BLOCK) else 2
    free_bytes = setup.device.memory_bytes * devices - count_parameters(model).total * BYTES_OF_WEIGHTS[weights]
    in_cache = MEMORY_SHARE * free_bytes / (bytes_per_token * (input_tokens + output_tokens))
    requests = min(in_cache, 4096.0) / pp
    tokens = min(requests * (1 + input_tokens / output_tokens), 32768.0)
    step = 32 if requests < 256 else 128 if requests < 1024 else 256
    max_num_seqs = max(64, step * math.ceil(requests / step))
    step = 256 if tokens < 4096 else 512 if tokens < 8192 else 1024
    max_num_tokens = max(2048, step * math.ceil(tokens / step), input_tokens + max_num_seqs)
    return {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_tokens}
