"""Count the host's launches in a step with prefill, and the CUDA graphs of a decode step."""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

import msgspec
import numpy as np

from windtunnel.compiled.arrays import Floats, Ints
from windtunnel.errors import InputError
from windtunnel.model.feed_forward.experts import Experts, ExpertsFeedForward
from windtunnel.model.launches.forward import decode_launches, head_launches, prefill_launches, token_launches
from windtunnel.model.launches.lora import lora_launches
from windtunnel.model.operators import Gemm, Launch
from windtunnel.model.precision import Format
from windtunnel.model.shape import Shard
from windtunnel.serving.deployment import EngineSettings
from windtunnel.serving.engines.contract import Launches, behaviour_of, engine_of
from windtunnel.serving.engines.defaults import kernels_of

LAUNCHES_OF_EXPERTS = 8
"""Kernels of experts, launched one by one: tokens sorted by expert, quantised, the first product, activation,
quantised again, the second product, and the sum over experts (vLLM 0.19 `fused_experts_impl`)."""

LAUNCHES_OF_FUSED_EXPERTS = 2
"""Kernels of experts where one call launches all but the quantisation (TensorRT-LLM 1.2 `torch.ops.trtllm.fused_moe`
and `fp4_block_scale_moe_runner`, FlashInfer 0.5 `cutlass_fused_moe` and `trtllm_fp4_block_scale_moe`)."""

FUSED_EXPERTS = ("trtllm", "cutlass", "flashinfer")
"""Backends that launch experts in one call. TensorRT-LLM takes them by default, others for experts of four bits."""

LAUNCHES_AN_ATTENTION = 3
"""Launches for each attention of a step in pieces: the graph before it, the write of keys and values, and the kernel
(vLLM 0.18 `vllm/compilation/piecewise_backend.py`, `vllm/attention/layer.py`). One of more kernels, as a recurrence is,
launches all of them behind its graph."""


def graph_sizes(engine: EngineSettings) -> Ints:
    """Return the decode batch sizes that have a CUDA graph, ascending; empty where graphs are off. InputError for what
    `captured_sizes` of the user's own engine returns in place of them."""
    if engine.cudagraph_sizes is not None:
        return np.array(sorted(engine.cudagraph_sizes), np.int64)
    sizes = engine_of(engine.name).captured_sizes(engine) if engine.max_cudagraph_capture_size else ()
    try:
        return np.array(sorted(msgspec.convert(sizes, list[Annotated[int, msgspec.Meta(ge=1)]])), np.int64)
    except msgspec.ValidationError:
        told = f"captured_sizes of the engine {engine.name!r} returned {sizes!r:.60}"
        raise InputError(told, "return the batch sizes that have a graph, each at least 1") from None


def decode_tokens(engine: EngineSettings, limit: int, queries: int = 1) -> Ints:
    """Return `[limit + 1]` tokens of a decode step of n requests, `queries` each, padded to the next captured size."""
    tokens, sizes = queries * np.arange(limit + 1), _captured_tokens(engine, queries)
    if not sizes.size or engine.cudagraph_padding is False:
        return tokens
    index = np.searchsorted(sizes, tokens)
    return np.where(index < sizes.size, sizes[np.minimum(index, sizes.size - 1)], tokens)


def _captured_tokens(engine: EngineSettings, queries: int) -> Ints:
    """Return the tokens of the decode steps that have a CUDA graph, ascending."""
    sizes = graph_sizes(engine)
    return sizes * queries if behaviour_of(engine.name).launches.graphs_count_requests else sizes


def num_launches(shard: Shard, engine: EngineSettings, num_tokens: Any, decode_queries: int = 0) -> Floats:
    """Count the host's launches in a step of `num_tokens` tokens (a number or an array), before padding.

    That is every kernel; in piecewise graphs, up to the largest captured size, attention and the graphs between; in a
    step that only decodes and has a graph of its own, none but the graph. `decode_queries` are the tokens of each
    request in a step that only decodes; 0: a step with prefill.
    """
    behaviour = behaviour_of(engine.name).launches
    attention = (decode_launches if decode_queries else prefill_launches)(shard, 1.0, 1.0)
    head = head_launches(shard, 1.0)
    added = () if shard.lora is None else tuple(lora_launches(shard, 1.0, 1.0))
    tokens = token_launches(shard, 1.0)
    launches = (*tokens, *added, *attention, *head)
    of_launch = partial(_kernels_of, shard=shard, engine=engine, behaviour=behaviour, counted=kernels_of(engine))
    kernels = sum(launch.count * of_launch(launch) for launch in launches) + _unlisted_kernels(shard, behaviour)
    pieces = sum(launch.count for launch in head)
    for launch in attention:
        pieces += launch.count * max(LAUNCHES_AN_ATTENTION, 1 + of_launch(launch))
    outside = [launch for launch in tokens if launch.name in behaviour.outside_pieces]
    pieces += sum(launch.count * of_launch(launch) for launch in outside)
    collectives = sum(launch.count for launch in launches if launch.op.is_communication)
    pieces += behaviour.of_collective_in_pieces * collectives
    if decode_queries:
        captured = _captured_tokens(engine, decode_queries)
        is_padded = engine.cudagraph_padding is not False and captured.size
        in_graph = np.asarray(num_tokens) <= captured[-1] if is_padded else np.isin(num_tokens, captured)
        left = 0 if has_full_graphs(shard, engine) else min(pieces, kernels) if engine.piecewise_cudagraphs else kernels
        launched = np.where(in_graph, float(left), float(kernels))
        return launched * num_batches(engine, num_tokens, engine.overlap_decode_tokens)
    drafts = engine.speculative.num_draft_tokens if engine.speculative and engine.speculative.method != "ngram" else 0
    sizes = graph_sizes(engine)
    in_pieces = engine.piecewise_cudagraphs and sizes.size
    largest = engine_of(engine.name).most_tokens_in_pieces(shard, engine, float(sizes[-1])) if in_pieces else 0.0
    launched = np.where(np.asarray(num_tokens) <= largest, float(min(pieces, kernels)), float(kernels))
    launched = launched + behaviour.of_draft * drafts
    return launched * num_batches(engine, num_tokens, engine.overlap_prefill_tokens)


def has_full_graphs(shard: Shard, engine: EngineSettings) -> bool:
    """Whether a graph holds a whole decode step, where there are graphs."""
    in_pieces = behaviour_of(engine.name).launches.chunked_attention_in_pieces
    is_asked = engine.full_cudagraphs is not False or not engine.piecewise_cudagraphs
    return is_asked and not (in_pieces and has_chunks(shard))


def has_chunks(shard: Shard) -> bool:
    """Whether a layer attends within chunks of the context."""
    return any(getattr(attention, "is_chunked", False) for _, attention in shard.model.attentions)


def num_batches(engine: EngineSettings, num_tokens: Any, least_tokens: int | None) -> Ints:
    """Return into how many batches a step is split: two from `least_tokens` on, where the engine overlaps them."""
    return np.where(np.asarray(num_tokens) >= (least_tokens or 1), 2 if engine.two_batch_overlap else 1, 1)


def unhidden_s(shard: Shard, engine: EngineSettings, num_sampled: Any) -> Any:
    """Return the seconds of a step that neither operators nor overlapped work of the host hold: `num_sampled` requests
    (a number or an array), and the gaps between kernels."""
    host = engine.host
    gaps_s = float(host.kernel_gap_s or 0.0) * _num_gaps(shard, engine)
    gaps_s += behaviour_of(engine.name).launches.chunked_attention_s * has_chunks(shard)
    return float(host.unhidden_step_s or 0.0) + gaps_s + float(host.unhidden_request_s or 0.0) * num_sampled


def _num_gaps(shard: Shard, engine: EngineSettings) -> float:
    """Count the kernels of a decode step that wait for the one before; experts, timed as a whole, are one.

    A fused all-reduce computes the norm behind it, and starts before the kernel before it ends (programmatic dependent
    launch: `launch_with_pdl` in vLLM 0.20 `allreduce_rms_fusion.py` and SGLang 0.5.10 `flashinfer_comm_fusion.py`).
    """
    kernels = kernels_of(engine)
    launches = (*token_launches(shard, 1.0), *decode_launches(shard, 1.0, 1.0), *head_launches(shard, 1.0))
    fused = ("norm", "all_reduce") if engine.fused_all_reduce and shard.tp > 1 else ()
    waiting = (launch for launch in launches if getattr(launch.op, "name", getattr(launch.op, "op", "")) not in fused)
    return sum(launch.count * float(launch.adds) * kernels.get(launch.name, 1) for launch in waiting)


def _kernels_of(
    launch: Launch, shard: Shard, engine: EngineSettings, behaviour: Launches, counted: Mapping[str, int]
) -> int:
    """Count the kernels of one execution of `launch`, where the host launches all of them; `counted` are the engine's
    own counts (`kernels_of`).
    """
    kernels = counted.get(launch.name)
    if isinstance(launch.op, Experts):
        formats = (Format.NVFP4,) if engine.moe_backend is None else (Format.NVFP4, Format.FP8_BLOCK)
        is_called = engine.moe_backend is None or engine.moe_backend in FUSED_EXPERTS
        if launch.op.format in formats and behaviour.of_flashinfer_experts and is_called:
            return behaviour.of_flashinfer_experts
        apart = 0 if _has_fused_experts(shard, engine, behaviour) else LAUNCHES_OF_EXPERTS - LAUNCHES_OF_FUSED_EXPERTS
        return (kernels or LAUNCHES_OF_FUSED_EXPERTS) + apart
    kernels = launch.op.num_kernels if kernels is None else kernels
    is_quantised = isinstance(launch.op, Gemm) and launch.op.format in behaviour.quantises_apart
    return 2 * kernels if is_quantised else kernels


def _has_fused_experts(shard: Shard, engine: EngineSettings, behaviour: Launches) -> bool:
    """Whether one call launches almost all kernels of experts."""
    if engine.moe_backend is not None:
        return engine.moe_backend in FUSED_EXPERTS
    return behaviour.fuses_experts or shard.precision.experts_format in (Format.NVFP4, Format.MXFP4)


def _unlisted_kernels(shard: Shard, behaviour: Launches) -> int:
    """Count the kernels that no operator stands for, since they take hardly any device time."""
    count = 0
    for num_layers, experts in shard.model.feed_forwards:
        if isinstance(experts, ExpertsFeedForward) and experts.shared_intermediate_size:
            count += num_layers * behaviour.of_shared_gate * bool(experts.shared_gate)
    return count
