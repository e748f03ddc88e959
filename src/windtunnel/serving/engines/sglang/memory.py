"""SGLang's use of a device's memory."""

from windtunnel.errors import InputError
from windtunnel.hardware import Device
from windtunnel.model.parallelism import Parallelism
from windtunnel.serving.deployment import EngineSettings
from windtunnel.units import GIB, MIB, format_bytes

LEAST_STATIC_RESERVE = 10 * GIB
LARGE_STATIC_BYTES = 60 * GIB
PIECEWISE_SIZES = (
    *(*range(4, 33, 4), *range(48, 257, 16), *range(288, 513, 32), *range(576, 1025, 64), *range(1280, 4097, 256)),
    *range(4608, 2**18, 512),
)
"""Captured token counts of prefill, up to a chunk's (`_generate_piecewise_cuda_graph_tokens`, 0.5.9)."""
PIECEWISE_GRAPH_MIB = 8
"""Memory outside PyTorch that is reserved for each of them (`_handle_gpu_memory_settings`, as below)."""


def static_memory_fraction(engine: EngineSettings, device: Device, shape: Parallelism) -> float:
    """Return SGLang's default `mem_fraction_static`: memory less its reserves, as a share, to three digits.

    The reserves are for metadata, a chunk's activations, CUDA graphs, ranks and drafts.

    Source: SGLang `server_args.py`, `_handle_gpu_memory_settings` (pull request 10975, 0.5.3 to 0.5.14). Its
    reserve for multimodal models is left out, and so is that of piecewise graphs of latent attention.
    """
    assert engine.max_num_batched_tokens is not None
    assert engine.max_cudagraph_capture_size is not None
    groups, graphs = shape.attention_dp, engine.max_cudagraph_capture_size
    reserve = 512 + 1.5 * max(engine.max_num_batched_tokens * groups, 2048) + 2.0 * graphs
    reserve += shape.tp * groups * shape.pp / 8 * 1024
    if groups > 1:
        reserve += (4.5 if graphs > 300 else 3.0) * graphs * groups
    if engine.piecewise_cudagraphs and groups == shape.pp == 1:
        reserve += PIECEWISE_GRAPH_MIB * sum(size <= engine.max_num_batched_tokens for size in PIECEWISE_SIZES)
    reserve *= MIB
    if device.memory_bytes > LARGE_STATIC_BYTES:
        reserve = max(reserve, LEAST_STATIC_RESERVE)
    if engine.speculative is not None and engine.speculative.method != "ngram":
        reserve += (6 if engine.speculative.method == "draft_model" else 2) * GIB
    share = (device.memory_bytes - reserve) / device.memory_bytes
    if share <= 0:
        raise InputError(
            f"SGLang would keep {format_bytes(reserve)} of {device.title}'s {format_bytes(device.memory_bytes)} from "
            "weights and KV cache",
            "set engine.gpu_memory_utilization, or a smaller engine.max_num_batched_tokens",
        )
    return round(share, 3)
