"""A transformer as a few counts: which layers it has and how wide they are. No arithmetic beyond counts."""

from windtunnel.model.precision import Precision
from windtunnel.schema import Schema


class GroupedQueryAttention(Schema, tag="grouped_query", tag_field="type"):
    """Softmax attention with `num_kv_heads` shared key/value heads (multi-head where they equal `num_heads`)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window_tokens: int | None = None
    """Sliding window; None attends to everything."""
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    qk_norm_over_heads: bool = False
    """The norm is over all heads together, so that tensor-parallel ranks add up its squares (MiniMax-M2)."""
    output_gate: bool = False
    """A gate as wide as the query is computed beside it (Qwen3.5)."""
    sinks: bool = False
    """One learned sink logit per head (gpt-oss)."""

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


class Indexer(Schema):
    """Choice of the keys that a query attends to: small heads score every earlier token and the best `top_k` are kept
    (DeepSeek-V3.2, arXiv:2512.02556, section 2.1). Its keys are cached in fp8 beside the compressed vectors."""

    num_heads: int
    head_dim: int
    top_k: int


class LatentAttention(Schema, tag="latent", tag_field="type"):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): one compressed KV vector per token."""

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    indexer: Indexer | None = None
    """None: every query attends to all keys."""


class GatedDeltaAttention(Schema, tag="gated_delta", tag_field="type"):
    """Gated DeltaNet linear attention (arXiv:2412.06464) as in Qwen3-Next and Qwen3.5: a fixed state per request."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel_size: int


Attention = GroupedQueryAttention | LatentAttention | GatedDeltaAttention


class DenseFeedForward(Schema, tag="dense", tag_field="type"):
    """A feed-forward of `intermediate_size`; gated ones (SwiGLU, GeGLU) have three matrices, plain ones two."""

    intermediate_size: int
    gated: bool = True
    bias: bool = False


class ExpertsFeedForward(Schema, tag="experts", tag_field="type"):
    """A mixture of experts: a router, `num_experts` routed experts of which each token uses some, and shared ones."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    """Width of one routed expert."""
    shared_intermediate_size: int = 0
    """Width of all shared experts together."""
    shared_gate: bool = False
    """A sigmoid gate of one output scales the shared expert (Qwen2-MoE, Qwen3.5)."""
    gated: bool = True
    bias: bool = False
    router_bias: bool = False
    fp32_router: bool = False
    """Engines keep the router's weights in fp32 and multiply in fp32 (MiniMax-M2)."""


FeedForward = DenseFeedForward | ExpertsFeedForward


class LayerGroup(Schema):
    """`num_layers` layers of one shape; they need not be neighbours."""

    num_layers: int
    attention: Attention
    feed_forward: FeedForward
    num_norms: int = 2
    """Norms over the hidden size in each layer (Gemma 2 and 3 have four; parallel blocks one)."""


class ModelSpec(Schema):
    """A decoder-only transformer."""

    name: str
    hidden_size: int
    vocab_size: int
    max_context_tokens: int
    layers: tuple[LayerGroup, ...]
    tie_word_embeddings: bool = False
    norm_bias: bool = False
    """LayerNorm with a bias (Phi, StarCoder) and not RMSNorm."""
    lm_head_bias: bool = False
    learned_positions: int = 0
    """Rows of a table of learned positions (GPT-2, OPT); 0 where positions are rotated or biased."""
    architecture: str = ""
    """`model_type` of its config.json where layers have a sliding window: engines keep windows of some types only."""
    precision: Precision = Precision()
    """Formats of the published checkpoint, read from its quantisation config."""

    @property
    def num_layers(self) -> int:
        return sum(group.num_layers for group in self.layers)
