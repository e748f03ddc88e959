"""Parameter counts of a model, part by part as its checkpoint stores them."""

from dataclasses import dataclass

from windtunnel.model.operators import site_parameters
from windtunnel.model.shape import FeedForwardParameters, LayerGroup, ModelSpec


@dataclass(frozen=True)
class ParameterCount:
    """Numbers of parameters over all layers. Multi-token-prediction layers, vision towers and tables of n-grams are not
    counted."""

    embedding: int
    """Token table, position table where positions are learned, and the table of layers' own inputs."""
    lm_head: int
    """Output layer, without its matrix where embeddings are tied; an encoder's pooler or score."""
    attention: int
    """Projections and their biases, sinks, short convolutions and decay rates; not the norms."""
    feed_forward: FeedForwardParameters
    norms: int
    """Norms, and the weights of hyper-connections, of layers' own inputs and of what they look up."""

    @property
    def total(self) -> int:
        return self.embedding + self.lm_head + self.attention + self.feed_forward.total + self.norms

    @property
    def active(self) -> int:
        """Parameters that one token meets; the embedding table counts whole, as in most model cards."""
        return self.total - self.feed_forward.inactive


def count_parameters(model: ModelSpec) -> ParameterCount:
    """Count the parameters of `model`, exactly as far as `ModelSpec` describes it.

    Sources: the modelling files under `transformers/models`, and those that the kinds of layers name.
    """
    hidden_size = model.hidden_size
    embedding = model.vocab_size * hidden_size
    inputs = model.layer_inputs.parameters(hidden_size, model.num_layers) if model.layer_inputs else (0, 0, 0)
    norm = hidden_size * (2 if model.norm_bias else 1)
    inner_norms = sum(num_layers * attention.norm_parameters() for num_layers, attention in model.attentions)
    feed_forwards = (part.parameters(hidden_size) * num_layers for num_layers, part in model.feed_forwards)
    return ParameterCount(
        embedding=embedding + model.learned_positions * hidden_size + inputs[0],
        lm_head=(0 if model.tie_word_embeddings else embedding)
        + (model.vocab_size if model.lm_head_bias else 0)
        + model.head_parameters,
        attention=sum(num_layers * part.num_parameters(hidden_size) for num_layers, part in model.attentions),
        feed_forward=sum(feed_forwards, FeedForwardParameters()),
        norms=norm
        + _mixing_parameters(model)
        + 2 * model.norm_gate_rank * hidden_size * sum(_gated_norms(group) for group in model.layers)
        + sum(inputs[1:])
        + (model.ngram_tables.parameters(model) if model.ngram_tables else 0)
        + sum(group.num_layers * group.num_norms * norm for group in model.layers)
        + inner_norms,
    )


def _gated_norms(group: LayerGroup) -> int:
    """Count the norms before attention and before experts."""
    has_experts = group.feed_forward is not None and group.feed_forward.num_experts > 0
    return group.num_layers * ((group.attention is not None) + has_experts)


def _mixing_parameters(model: ModelSpec) -> int:
    """Count the parameters of hyper-connections: at both places of a layer, and of the streams' sum at the end."""
    width, streams = model.hidden_size, model.residual_streams
    if streams == 1:
        return 0
    return 2 * model.num_layers * site_parameters(width, streams) + streams * (streams * width + 1) + 1
