"""SGLang's piecewise CUDA graphs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from windtunnel.model.attention.latent import LatentAttention
from windtunnel.serving.deployment import EngineSettings
from windtunnel.versions import version_key

if TYPE_CHECKING:
    from windtunnel.model.shape import Shard

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
