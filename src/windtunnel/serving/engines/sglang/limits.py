"""SGLang's own limits on its settings, its use of a device's memory, and its piecewise CUDA graphs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec

from windtunnel.errors import InputError
from windtunnel.hardware import Device
from windtunnel.model.attention.latent import LatentAttention
from windtunnel.model.parallelism import Parallelism
from windtunnel.serving.deployment import EngineSettings
from windtunnel.units import GIB, MIB, format_bytes, version_key

if TYPE_CHECKING:
    from windtunnel.model.shape import Shard

SPLIT_CONSERVATIVENESS = 0.3


def split_over_ranks(settings: dict[str, Any], attention_dp: int) -> None:
    """Divide the limits over the attention data-parallel ranks; admission is bolder with several.

    Source: `server_args.py` (`chunked_prefill_size // dp_size`, `schedule_conservativeness * 0.3`) and
    `model_executor/model_runner.py` (`max_running_requests // dp_size`), 0.5.
    """
    if attention_dp > 1:
        for name in ("max_num_batched_tokens", "max_num_seqs"):
            settings[name] = max(settings[name] // attention_dp, 1)
        settings["schedule_conservativeness"] *= SPLIT_CONSERVATIVENESS


def graphs_for_requests(given: EngineSettings, resolved: EngineSettings) -> EngineSettings:
    """Limit the default graphs to the running requests that were asked for (0.5.22, `arg_groups/memory_hook.py`)."""
    largest, limit = resolved.max_cudagraph_capture_size, given.max_num_seqs
    is_old = version_key(str(resolved.version)) < version_key("0.5.22")
    if is_old or limit is None or largest is None or given.max_cudagraph_capture_size is not None:
        return resolved
    return msgspec.structs.replace(resolved, max_cudagraph_capture_size=min(largest, limit))


def captured_sizes(engine: EngineSettings) -> list[int]:
    """Return the decode batches that have a CUDA graph, finer where requests verify drafts; the largest is one.

    Source: `server_args.py`, `_generate_cuda_graph_batch_sizes` (0.5), and `get_batch_sizes_to_capture`, which adds the
    most requests that can run.
    """
    largest = engine.max_cudagraph_capture_size or 0
    if engine.cudagraph_padding is False:
        return list(range(1, largest + 1))
    sizes = (1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), *range(512, largest + 1, 32))
    if engine.speculative is not None:
        sizes = (*range(1, 9), *range(10, 33, 2), *range(40, 65, 4), *range(72, 257, 8), *range(272, largest + 1, 16))
    return sorted({*(size for size in sizes if size <= largest), largest})


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


LATENT_PIECES_TOKENS = 2048
"""Tokens up to which latent attention is captured (0.5.10 `server_args.py`, `piecewise_cuda_graph_max_tokens`)."""
LATENT_BREAKABLE_TOKENS = {"0.5.15": 0, "0.5.18": 2048, "0.5.23": 8192}
"""Version -> the same of breakable graphs (`server_args.py`, `arg_groups/memory_hook.py`)."""


def most_tokens_in_pieces(shard: Shard, engine: EngineSettings, _largest: float) -> float:
    """Return the tokens up to which a step with prefill runs in piecewise graphs, whatever sizes decode has captured.

    SGLang captures up to a whole chunk, of latent attention 2,048 tokens, and nothing where it cannot: Gated DeltaNet
    (Qwen3-Next by its list, Qwen3.5 as a multimodal model), sparse attention, attention data parallelism, pipelines,
    drafts (SGLang 0.5.10 `server_args.py` and `docs/advanced_features/piecewise_cuda_graph.md`). From 0.5.15 on its
    graphs are breakable ones, which have another list.
    """
    attentions = [attention for _, attention in shard.model.attentions]
    is_latent = any(isinstance(kind, LatentAttention) for kind in attentions)
    version = version_key(str(engine.version))
    if version >= version_key(next(iter(LATENT_BREAKABLE_TOKENS))):
        largest = [size for since, size in LATENT_BREAKABLE_TOKENS.items() if version >= version_key(since)][-1]
        return 0.0 if _breaks(shard, version) else float(largest) if is_latent else math.inf
    is_sparse = any(isinstance(kind, LatentAttention) and kind.indexer is not None for kind in attentions)
    is_hybrid = any(kind.is_recurrent for kind in attentions)
    is_split = shard.parallelism.attention_dp > 1 or shard.parallelism.pp > 1
    if is_sparse or is_hybrid or is_split or engine.speculative is not None:
        return 0.0
    return float(LATENT_PIECES_TOKENS) if is_latent else math.inf


def _breaks(shard: Shard, version: tuple[int, ...]) -> bool:
    """Whether breakable graphs are off: pipelines, towers, and to 0.5.16 attention data parallelism.

    Source: `_disable_breakable_cudagraph_if_incompatible` (`server_args.py`, from 0.5.19 `arg_groups/
    cuda_graph_hook.py`). Some multimodal models have them from 0.5.17 on; Kimi's delta attention, DeepSeek-V4 and
    TensorRT-LLM's latent attention of DeepSeek-V3 have none, which are not told apart here.
    """
    is_early = version < version_key("0.5.17")
    split = shard.parallelism
    return split.pp > 1 or bool(shard.model.left_out) or (is_early and split.attention_dp > 1)
