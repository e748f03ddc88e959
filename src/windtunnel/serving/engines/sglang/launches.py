"""SGLang's piecewise CUDA graphs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from windtunnel.model.attention.latent import LatentAttention
from windtunnel.serving.deployment import EngineSettings

if TYPE_CHECKING:
    from windtunnel.model.shape import Shard

LATENT_PIECES_TOKENS = 2048
"""Tokens up to which latent attention is captured (0.5.10 `server_args.py`, `piecewise_cuda_graph_max_tokens`)."""


def most_tokens_in_pieces(shard: Shard, engine: EngineSettings, _largest: float) -> float:
    """Return the tokens up to which a step with prefill runs in piecewise graphs, whatever sizes decode has captured.

    SGLang captures up to a whole chunk, of latent attention 2,048 tokens, and nothing where it cannot: Gated DeltaNet
    (Qwen3-Next by its list, Qwen3.5 as a multimodal model), sparse attention, attention data parallelism, pipelines,
    drafts (SGLang 0.5.10 `server_args.py` and `docs/advanced_features/piecewise_cuda_graph.md`).
    """
    attentions = [attention for _, attention in shard.model.attentions]
    is_sparse = any(isinstance(kind, LatentAttention) and kind.indexer is not None for kind in attentions)
    is_hybrid = any(kind.is_recurrent for kind in attentions)
    is_split = shard.parallelism.attention_dp > 1 or shard.parallelism.pp > 1
    if is_sparse or is_hybrid or is_split or engine.speculative is not None:
        return 0.0
    is_latent = any(isinstance(kind, LatentAttention) for kind in attentions)
    return float(LATENT_PIECES_TOKENS) if is_latent else math.inf
