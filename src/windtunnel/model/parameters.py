"""Parameter counts of a model, part by part as its checkpoint stores them."""

from dataclasses import dataclass

from windtunnel.model.shape import (
    Attention,
    DenseFeedForward,
    ExpertsFeedForward,
    FeedForward,
    GatedDeltaAttention,
    LatentAttention,
    ModelSpec,
)


@dataclass(frozen=True)
class ParameterCount:
    """Numbers of parameters over all layers. Multi-token-prediction layers and vision towers are not counted."""

    embedding: int
    """Token table, and position table where positions are learned."""
    lm_head: int
    """Output layer, without its matrix where embeddings are tied."""
    attention: int
    """Projections and their biases, sinks, short convolutions and decay rates; not the norms."""
    dense_feed_forward: int
    routed_experts: int
    shared_experts: int
    router: int
    """Routers, their biases and the gates of shared experts."""
    norms: int
    inactive_experts: int
    """Parameters of `routed_experts` that a token does not use."""

    @property
    def total(self) -> int:
        """All parameters."""
        feed_forward = self.dense_feed_forward + self.routed_experts + self.shared_experts + self.router
        return self.embedding + self.lm_head + self.attention + feed_forward + self.norms

    @property
    def active(self) -> int:
        """Parameters that one token meets; the embedding table counts whole, as in most model cards."""
        return self.total - self.inactive_experts


def count_parameters(model: ModelSpec) -> ParameterCount:
    """Count the parameters of `model`, exactly as far as `ModelSpec` describes it.

    Sources: the modelling files under `transformers/models`; for latent attention arXiv:2405.04434, section 2.1; for
    Gated DeltaNet `transformers/models/qwen3_next`.
    """
    hidden_size = model.hidden_size
    embedding = model.vocab_size * hidden_size
    norm = hidden_size * (2 if model.norm_bias else 1)
    experts = [
        (group.num_layers, part) for group in model.layers if isinstance(part := group.feed_forward, ExpertsFeedForward)
    ]
    dense = [
        (group.num_layers, part) for group in model.layers if isinstance(part := group.feed_forward, DenseFeedForward)
    ]
    return ParameterCount(
        embedding=embedding + model.learned_positions * hidden_size,
        lm_head=(0 if model.tie_word_embeddings else embedding) + (model.vocab_size if model.lm_head_bias else 0),
        attention=sum(group.num_layers * attention_parameters(group.attention, hidden_size) for group in model.layers),
        dense_feed_forward=sum(num * matrix_parameters(part, hidden_size) for num, part in dense),
        routed_experts=sum(num * part.num_experts * matrix_parameters(part, hidden_size) for num, part in experts),
        shared_experts=sum(num * shared_expert_parameters(part, hidden_size) for num, part in experts),
        router=sum(num * router_parameters(part, hidden_size) for num, part in experts),
        norms=norm
        + sum(
            group.num_layers * (group.num_norms * norm + inner_norm_parameters(group.attention))
            for group in model.layers
        ),
        inactive_experts=sum(
            num * (part.num_experts - part.experts_per_token) * matrix_parameters(part, hidden_size)
            for num, part in experts
        ),
    )


def attention_parameters(attention: Attention, hidden_size: int) -> int:
    """Count one attention layer's parameters, without its inner norms."""
    if isinstance(attention, LatentAttention):
        return _latent_parameters(attention, hidden_size)
    if isinstance(attention, GatedDeltaAttention):
        return _gated_delta_parameters(attention, hidden_size)
    query, kv = attention.query_size, attention.kv_size
    qkv = query * (2 if attention.output_gate else 1) + 2 * kv
    biases = (qkv if attention.qkv_bias else 0) + (hidden_size if attention.output_bias else 0)
    return hidden_size * (qkv + query) + biases + (attention.num_heads if attention.sinks else 0)


def _latent_parameters(attention: LatentAttention, hidden_size: int) -> int:
    heads, kv_rank = attention.num_heads, attention.kv_lora_rank
    query = heads * (attention.qk_nope_head_dim + attention.qk_rope_head_dim)
    query_rank = attention.q_lora_rank
    query_projection = hidden_size * query if query_rank is None else query_rank * (hidden_size + query)
    down = hidden_size * (kv_rank + attention.qk_rope_head_dim)
    up = kv_rank * heads * (attention.qk_nope_head_dim + attention.v_head_dim)
    core = query_projection + down + up + heads * attention.v_head_dim * hidden_size
    return core + indexer_parameters(attention, hidden_size)


def indexer_parameters(attention: LatentAttention, hidden_size: int) -> int:
    """Count the parameters of one layer's indexer, without its norm; every rank holds the whole indexer."""
    indexer = attention.indexer
    if indexer is None:
        return 0
    queries = (attention.q_lora_rank or 0) * indexer.num_heads * indexer.head_dim
    return queries + hidden_size * (indexer.head_dim + indexer.num_heads)


def _gated_delta_parameters(attention: GatedDeltaAttention, hidden_size: int) -> int:
    key = attention.num_key_heads * attention.key_head_dim
    value = attention.num_value_heads * attention.value_head_dim
    projections = hidden_size * (2 * key + 2 * value + 2 * attention.num_value_heads) + value * hidden_size
    convolution = (2 * key + value) * attention.conv_kernel_size
    decay = 2 * attention.num_value_heads
    return projections + convolution + decay


def inner_norm_parameters(attention: Attention) -> int:
    """Count one attention layer's inner norms: of queries and keys, compressed vectors, or a delta layer's output."""
    if isinstance(attention, LatentAttention):
        index_norm = 2 * attention.indexer.head_dim if attention.indexer else 0
        return (attention.q_lora_rank or 0) + attention.kv_lora_rank + index_norm
    if isinstance(attention, GatedDeltaAttention):
        return attention.value_head_dim
    if attention.qk_norm_over_heads:
        return attention.query_size + attention.kv_size
    return 2 * attention.head_dim if attention.qk_norm else 0


def matrix_parameters(feed_forward: FeedForward, hidden_size: int) -> int:
    """Count the parameters of a dense feed-forward, or of one routed expert."""
    return _matrices(feed_forward, hidden_size, feed_forward.intermediate_size)


def shared_expert_parameters(feed_forward: ExpertsFeedForward, hidden_size: int) -> int:
    """Count the parameters of one layer's shared experts together."""
    width = feed_forward.shared_intermediate_size
    return _matrices(feed_forward, hidden_size, width) if width else 0


def router_parameters(feed_forward: ExpertsFeedForward, hidden_size: int) -> int:
    """Count the parameters of one layer's router, its bias and the shared experts' gate."""
    bias = feed_forward.num_experts if feed_forward.router_bias else 0
    return hidden_size * feed_forward.num_experts + bias + (hidden_size if feed_forward.shared_gate else 0)


def _matrices(feed_forward: FeedForward, hidden_size: int, width: int) -> int:
    up = 2 * width if feed_forward.gated else width
    return hidden_size * (up + width) + (up + hidden_size if feed_forward.bias else 0)
