"""Decode context parallelism: tensor-parallel ranks that would hold equal keys and values hold parts of each context.

The queries of such ranks are gathered, so that each rank has those of all their heads for its part of the context; the
partial outputs are scattered back, weighted by the sums of their exponentials. A prompt's chunk gathers the keys and
values before it (vLLM 0.11 `docs/serving/context_parallel_deployment.md`, `attention/ops/common.py` `cp_lse_ag_out_rs`,
`v1/attention/backends/mla/common.py` `_context_parallel_compute_prefill_context`).
"""

from collections.abc import Iterator
from dataclasses import replace

import msgspec
import numpy as np

from windtunnel.model.operators import BF16_BYTES, FP32_BYTES, Launch, Size, prefill_context_tokens
from windtunnel.model.shape import Attention, Shard


def decode_launches(kind: Attention, shard: Shard, batch: Size, context_tokens: Size) -> Iterator[Launch]:
    """Yield one layer's attention over a rank's part of the contexts, between exchanges with the ranks that hold the
    other parts.

    Latent attention is measured with the projections that it absorbs, which count here for the heads of all ranks.
    """
    assert kind.divided_widths is not None
    ranks, (query, output) = shard.parallelism.dcp, kind.divided_widths
    of_group = msgspec.structs.replace(shard.parallelism, tp=shard.tp // ranks, ep=1, dcp=1)
    vectors = batch * (kind.widest_tp // of_group.tp)
    yield Launch("query_all_gather", shard.collective("all_gather", vectors * query * BF16_BYTES, ranks))
    parts = np.maximum(np.asarray(context_tokens) / ranks, 1.0)
    yield from kind.decode_launches(replace(shard, parallelism=of_group), batch, parts)
    yield Launch("sums_all_gather", shard.collective("all_gather", vectors * ranks * FP32_BYTES, ranks))
    yield Launch("output_reduce_scatter", shard.collective("reduce_scatter", vectors * output * BF16_BYTES, ranks))


def prefill_launches(kind: Attention, shard: Shard, batch: Size, num_tokens: Size) -> Iterator[Launch]:
    """Yield one layer's attention of prompts' chunks, and first the keys and values that are cached before them."""
    cached = np.asarray(prefill_context_tokens(batch, num_tokens) - batch * num_tokens)
    message = np.maximum(cached, 1.0) * kind.bytes_per_token(shard) * shard.parallelism.dcp
    gather = shard.collective("all_gather", message, shard.parallelism.dcp)
    yield Launch("context_all_gather", gather, adds=np.where(cached > 0.5, 1.0, 0.0))
    yield from kind.prefill_launches(shard, batch, num_tokens)
