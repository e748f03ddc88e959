"""SGLang's launches in a step with prefill: it runs a model's Python as written, and captures it in pieces.

SGLang neither compiles models nor fuses their operators by default; vLLM compiles them, and TensorRT-LLM's are written
with fused operators.
"""

import math

from windtunnel.model.forward import Shard
from windtunnel.model.shape import GatedDeltaAttention, LatentAttention
from windtunnel.serving.deployment import EngineSettings
from windtunnel.serving.engines.contract import Launches

KERNELS = {
    "qk_norm": 2,
    "attention_gate": 4,
    "qkvz_proj": 2,
    "ba_proj": 2,
    "gated_delta_prefill": 15,
    "latent_norm": 2,
    "latent_attention_prefill": 3,
}
"""Launch -> its kernels, where they are not one.

Queries and keys are normed apart; an output gate is two copies, a sigmoid and a product; Gated DeltaNet has four
projections, and its core compares prefix lengths and copies the convolution's input, queries, keys and values beside
`LAUNCHES_OF_GATED_DELTA` (SGLang 0.5.9 `models/qwen3_5.py`; in `layers/attention`, `linear/gdn_backend.py` and
`fla/utils.py`, `input_guard`); latent attention norms twice, copies rotated queries and puts keys together
(`models/deepseek_common/attention_forward_methods/forward_mha.py`).
"""

LATENT_PIECES_TOKENS = 2048
"""Tokens up to which latent attention is captured (0.5.10 `server_args.py`, `piecewise_cuda_graph_max_tokens`)."""


def most_tokens_in_pieces(shard: Shard, engine: EngineSettings, _largest: float) -> float:
    """Return the tokens up to which a step with prefill runs in piecewise graphs, whatever sizes decode has captured.

    SGLang captures up to a whole chunk, of latent attention 2,048 tokens, and nothing where it cannot: Gated DeltaNet
    (Qwen3-Next by its list, Qwen3.5 as a multimodal model), sparse attention, attention data parallelism, pipelines,
    drafts (SGLang 0.5.10 `server_args.py` and `docs/advanced_features/piecewise_cuda_graph.md`).
    """
    attentions = [group.attention for group in shard.model.layers]
    is_sparse = any(isinstance(kind, LatentAttention) and kind.indexer is not None for kind in attentions)
    is_hybrid = any(isinstance(kind, GatedDeltaAttention) for kind in attentions)
    is_split = shard.parallelism.attention_dp > 1 or shard.parallelism.pp > 1
    if is_sparse or is_hybrid or is_split or engine.speculative is not None:
        return 0.0
    is_latent = any(isinstance(kind, LatentAttention) for kind in attentions)
    return float(LATENT_PIECES_TOKENS) if is_latent else math.inf


LAUNCHES = Launches(
    kernels=KERNELS,
    # layers/quantization/fp8_utils.py (0.5.9)
    quantises_apart=True,
    # Their sum with the routed experts'.
    of_shared_experts=1,
    # A projection to one output, its sigmoid and the product (0.5.9 `models/qwen2_moe.py`).
    of_shared_gate=3,
    # Itself and the graph behind it (0.5.10 `compilation/compilation_config.py`, `split_ops`).
    of_collective_in_pieces=2,
    most_tokens_in_pieces=most_tokens_in_pieces,
)
