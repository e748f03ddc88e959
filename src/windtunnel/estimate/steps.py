"""Lower an estimator to the arrays that the serving loop looks durations up in, and price single steps for people."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from windtunnel.estimate.estimator import Estimate, Estimator
from windtunnel.estimate.roofline import compute_format, machine
from windtunnel.kernels.state import StepCost
from windtunnel.ops.forward import (
    GROUP_LAUNCHES,
    Shard,
    StepBatch,
    decode_launches,
    forward_launches,
    head_launches,
    prefill_launches,
    token_launches,
)
from windtunnel.ops.op import Launch, Op, Size
from windtunnel.spec.deployment import EngineSettings
from windtunnel.spec.hardware import Device

Floats = NDArray[np.float64]

NODES_PER_OCTAVE = 4
"""Of the attention grids: linear interpolation between nodes exceeds a quadratic by 0.75% at most."""


@dataclass(frozen=True)
class PricedLaunch:
    """A launch of one step with its price."""

    launch: Launch
    estimate: Estimate
    device_s: float
    """Of all its executions in the step."""


@dataclass(frozen=True)
class LoweredSteps:
    """A `StepCost` with what is needed to explain a run made with it."""

    cost: StepCost
    decode_communication_s: Floats
    """[max_num_seqs + 1] the part of `cost.decode_token_s` that is collectives."""
    mixed_token_s: Floats
    """[max tokens + 1] everything but attention and head of a step in which every rank has so many tokens."""
    mixed_communication_s: Floats
    """[max tokens + 1] the part of `mixed_token_s` that is collectives."""
    decode_compute_s: Floats
    """[max_num_seqs + 1] time of decode operators at which arithmetic, not memory, is the tighter bound."""
    mixed_compute_s: Floats


def graph_sizes(engine: EngineSettings) -> NDArray[np.int64]:
    """Decode batch sizes that have a CUDA graph, ascending; empty where graphs are off.

    vLLM captures 1, 2, 4, then multiples of 8 to 256 and of 16 beyond (`vllm/config/vllm.py`, 0.10 to 0.24); SGLang and
    TensorRT-LLM pad in much the same steps.
    """
    if engine.cudagraph_sizes is not None:
        return np.array(sorted(engine.cudagraph_sizes), np.int64)
    largest = engine.max_cudagraph_capture_size or 0
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, largest + 1, 16)]
    return np.array([size for size in sizes if size <= largest], np.int64)


def padded_sizes(sizes: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """`[most + 1]` the tokens that a decode step of n requests computes: n padded to the next captured size."""
    n = np.arange(most + 1)
    if not sizes.size:
        return n
    at = np.searchsorted(sizes, n)
    return np.where(at < sizes.size, sizes[np.minimum(at, sizes.size - 1)], n)


def lower_steps(
    estimator: Estimator,
    device: Device,
    shard: Shard,
    engine: EngineSettings,
    max_model_len: int,
    drafter: Shard | None = None,
) -> LoweredSteps:
    """Price every step that the engine can form.

    With speculative decoding a decode step is the verification of `num_draft_tokens` + 1 tokens for each request: dense
    operators at so many tokens, attention as the slower of reading the cache once and computing all queries at the
    device's peak; and the drafting before it, a pass of the drafter for every draft token.

    Args:
        estimator: prices operators.
        device: its peak rates tell which operators arithmetic bounds.
        shard: the deployed model.
        engine: resolved settings.
        max_model_len: tokens of the longest request; the grids end there.
        drafter: what drafts, with speculative decoding; None where that costs nothing.
    """
    queries = 1 if engine.speculative is None else engine.speculative.num_draft_tokens + 1
    assert engine.max_num_seqs is not None
    assert engine.max_num_batched_tokens is not None
    pricer = _Pricer(estimator, device)
    most_tokens = max(engine.max_num_batched_tokens, engine.max_prefill_tokens or 0) + queries * engine.max_num_seqs
    tokens = token_nodes(most_tokens)
    launches = token_launches(shard, tokens)
    whole, communication, compute = pricer.total(launches)
    every = np.arange(most_tokens + 1, dtype=np.float64)
    token_s, communication_s, compute_s = (
        np.interp(every, tokens, values) for values in (whole, communication, compute)
    )
    ranks = shard.parallelism.attention_dp
    group_token_s, rank_token_s = np.zeros(1), token_s
    if ranks > 1:
        group, _, _ = pricer.total(launch for launch in launches if launch.name in GROUP_LAUNCHES)
        group_token_s = np.interp(np.arange(ranks * most_tokens + 1) / ranks, tokens, group)
        rank_token_s = token_s - np.interp(every, tokens, group)

    padded = padded_sizes(graph_sizes(engine), queries * engine.max_num_seqs)
    sampled = token_nodes(max(int(padded.max()), 2))
    head, head_communication, head_compute = pricer.total(head_launches(shard, sampled))
    upto = np.arange(engine.max_num_seqs + 1)
    verified = padded[queries * upto]

    def at_padded(by_token: Floats, by_sample: Floats) -> Floats:
        return by_token[np.minimum(verified, most_tokens)] + np.interp(verified, sampled, by_sample)

    context_nodes = geometric_nodes(max_model_len)
    batches = batch_nodes(engine.max_num_seqs)
    decode_grid = _over_grid(
        pricer, batches, context_nodes, lambda batch, context: decode_launches(shard, batch, context)
    )
    draft_s = np.zeros(1)
    if queries > 1:
        decode_grid = np.maximum(decode_grid, queries * _ideal_compute_s(shard, device, batches, context_nodes))
        draft_s = np.zeros(upto.size)
    if drafter is not None:
        at = token_nodes(max(engine.max_num_seqs, 2))
        drafted = pricer.total(token_launches(drafter, at))[0] + pricer.total(head_launches(drafter, at))[0]
        draft_s = (queries - 1) * np.interp(upto, at, drafted) * (upto > 0)
        decode_grid += (queries - 1) * _over_grid(
            pricer, batches, context_nodes, lambda batch, context: decode_launches(drafter, batch, context)
        )
    decode_attention_s = np.stack(
        [np.interp(upto, batches, decode_grid[:, column]) for column in range(context_nodes.size)], axis=1
    )

    chunk_nodes = geometric_nodes(most_tokens)
    length_nodes = geometric_nodes(2 * max_model_len)
    prefill_grid = _over_grid(
        pricer,
        chunk_nodes,
        length_nodes,
        lambda chunk, length: prefill_launches(shard, chunk / length, length),
    )

    cost = StepCost(
        decode_token_s=at_padded(token_s, head) + draft_s,
        mixed_token_s=rank_token_s,
        sample_s=np.interp(np.arange(queries * engine.max_num_seqs + 1), sampled, head),
        context_nodes=context_nodes,
        decode_attention_s=np.ascontiguousarray(decode_attention_s),
        chunk_nodes=chunk_nodes,
        length_nodes=length_nodes,
        prefill_attention_s=np.ascontiguousarray(prefill_grid),
        host_step_s=float(engine.host.step_s or 0.0),
        host_request_s=float(engine.host.request_s or 0.0),
        host_overlaps=int(bool(engine.async_scheduling)),
        recorded_step_s=np.zeros(0),
        group_token_s=group_token_s,
        draft_s=draft_s,
    )
    return LoweredSteps(
        cost=cost,
        decode_communication_s=at_padded(communication_s, head_communication),
        mixed_token_s=token_s,
        mixed_communication_s=communication_s,
        decode_compute_s=at_padded(compute_s, head_compute),
        mixed_compute_s=compute_s,
    )


def recorded_steps(duration_s: Floats, engine: EngineSettings) -> StepCost:
    """A cost that plays back measured step durations, one a step, whatever the step holds."""
    assert engine.max_num_seqs is not None
    nodes = np.array([0.0, 1.0])
    nothing = np.zeros(engine.max_num_seqs + 1)
    grid = np.zeros((2, 2))
    rows = np.zeros((engine.max_num_seqs + 1, 2))
    durations = np.asarray(duration_s, np.float64)
    return StepCost(nothing, nothing, nothing, nodes, rows, nodes, nodes, grid, 0.0, 0.0, 0, durations)


def price_step(estimator: Estimator, shard: Shard, batch: StepBatch) -> list[PricedLaunch]:
    """Every launch of one step with its price, for people."""
    priced = []
    for launch in forward_launches(shard, batch):
        estimate = estimator.estimate(launch.op)
        priced.append(PricedLaunch(launch, estimate, float(np.asarray(estimate.seconds)) * launch.count))
    return priced


def token_nodes(most: int) -> Floats:
    """Token counts to price exactly: every one to 512, then each multiple of 64 and the next, where tiles are added.

    Measured against every count from 65 to 4,352 (Llama-3.1-8B, Qwen3-30B-A3B and DeepSeek-V2-Lite on H100): 90% of the
    look-ups within 0.2%; with eight nodes an octave, 3%.
    """
    tiles = np.arange(512, most + 1, 64)
    nodes = np.unique([*range(1, 513), *tiles, *(tiles + 1), most])
    return nodes[nodes <= most].astype(np.float64)


def batch_nodes(most: int) -> Floats:
    """Batch sizes to price decode attention at, which is smooth in them: every one to 64, then eight an octave."""
    nodes = np.unique([*range(1, 65), *np.round(64 * 2.0 ** (np.arange(200) / 8)), most])
    return nodes[nodes <= most].astype(np.float64)


def geometric_nodes(most: int) -> Floats:
    """`NODES_PER_OCTAVE` nodes an octave from 1 to `most` or just beyond."""
    octaves = np.log2(max(most, 2))
    return 2.0 ** (np.arange(int(np.ceil(octaves * NODES_PER_OCTAVE)) + 1) / NODES_PER_OCTAVE)


def is_compute_bound(op: Op, device: Device) -> NDArray[np.bool_]:
    """At which points of its axes `op` would take longer at the device's peak rate than at its memory bandwidth."""
    on = machine(device, compute_format(op))
    return np.asarray(op.flops / on.flops_per_s > op.num_bytes / on.bytes_per_s)


class _Pricer:
    """Sums launches by what bounds them."""

    def __init__(self, estimator: Estimator, device: Device) -> None:
        self.estimator = estimator
        self.device = device

    def total(self, launches: Iterable[Launch]) -> tuple[Floats, Floats, Floats]:
        """(all seconds, those of collectives, those of compute-bound operators) at every point of the axes."""
        whole: Size = 0.0
        communication: Size = 0.0
        compute: Size = 0.0
        for launch in launches:
            seconds = np.asarray(self.estimator.estimate(launch.op).seconds, np.float64) * launch.count
            whole = whole + seconds
            if launch.op.kind == "collective":
                communication = communication + seconds
            else:
                compute = compute + seconds * is_compute_bound(launch.op, self.device)
        return np.asarray(whole), np.asarray(communication) + 0.0 * whole, np.asarray(compute) + 0.0 * whole


def _over_grid(
    pricer: _Pricer, first: Floats, second: Floats, launches: Callable[[Floats, Floats], list[Launch]]
) -> Floats:
    """Seconds over the grid first x second."""
    a, b = np.meshgrid(first, second, indexing="ij")
    whole, _, _ = pricer.total(launches(a.ravel(), b.ravel()))
    return np.broadcast_to(whole, a.size).reshape(a.shape)


def _ideal_compute_s(shard: Shard, device: Device, batches: Floats, context: Floats) -> Floats:
    """Decode attention's arithmetic alone, at the device's peak, over the grid batches x context."""
    a, b = np.meshgrid(batches, context, indexing="ij")
    total: Size = 0.0
    for launch in decode_launches(shard, a.ravel(), b.ravel()):
        total = total + launch.count * launch.op.flops / machine(device, compute_format(launch.op)).flops_per_s
    return np.broadcast_to(np.asarray(total), a.size).reshape(a.shape)
