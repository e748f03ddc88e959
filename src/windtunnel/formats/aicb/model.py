"""The model as AICB's training generators see it: its parts on one rank of one stage, with their parameters.

It is not the model that it is named after. Embedding rows count four times, a gated feed-forward network has two
matrices, keys and values have as many heads as queries, every stage has the embedding and the head, and DeepSeek's
dense layers are as wide as its experts (mocked_model/training). The right counts are `windtunnel.model.parameters`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from windtunnel.errors import InputError
from windtunnel.formats.aicb.arguments import TrainingArguments


@dataclass(frozen=True)
class Weights:
    """Parameters without a matrix product: a layer norm (`fused`), or the embeddings of tokens and positions."""

    num_parameters: int
    name: str = "fused"


@dataclass(frozen=True)
class Linear:
    """A matrix: split by columns or by rows over tensor-parallel ranks, or full on each."""

    name: str
    split: str
    """`column`, `row` or `none`."""
    input_size: int
    output_size: int
    tp: int
    has_bias: bool

    @property
    def module(self) -> str:
        """AICB's class for it."""
        return "Linear" if self.split == "none" else f"Megatron{self.split.capitalize()}Linear"

    @property
    def input_share(self) -> int:
        return self.input_size // self.tp if self.split == "row" else self.input_size

    @property
    def output_share(self) -> int:
        return self.output_size // self.tp if self.split == "column" else self.output_size

    @property
    def num_parameters(self) -> int:
        return self.input_share * self.output_share + (self.output_share if self.has_bias else 0)


@dataclass(frozen=True)
class Parts:
    """Attention or a feed-forward network: matrices, norms and smaller networks in their order."""

    name: str
    parts: tuple["Linear | Weights | Parts", ...]

    @property
    def num_parameters(self) -> int:
        return sum(part.num_parameters for part in self.parts)

    @property
    def linears(self) -> Iterator[Linear]:
        for part in self.parts:
            if isinstance(part, Parts):
                yield from part.linears
            elif isinstance(part, Linear):
                yield part


EXPERTS = "mlp_moelayer"
"""Name of a network of the routed experts of a rank, and of its second part, the shared expert."""


@dataclass(frozen=True)
class AicbLayer:
    """A transformer layer."""

    attention: Parts
    norm: Weights
    feed_forward: Parts
    num_bare_parameters: int
    """The second norm's bias, which only the `.csv` generators count."""

    @property
    def num_parameters(self) -> int:
        modules = (self.attention, self.norm, self.feed_forward)
        return sum(module.num_parameters for module in modules) + self.num_bare_parameters


@dataclass(frozen=True)
class AicbModel:
    """One stage on one rank."""

    embedding: Weights
    layers: tuple[AicbLayer, ...]
    head: Linear

    @property
    def num_parameters(self) -> int:
        """All parameters: the `.csv` generators reduce and gather them."""
        in_layers = sum(layer.num_parameters for layer in self.layers)
        return self.embedding.num_parameters + in_layers + self.head.num_parameters


Module = Weights | Linear | Parts


def listed_modules(model: AicbModel, sequence_parallel: bool) -> Iterator[Module]:
    """Yield the modules that a `.txt` workload lists, in order.

    With sequence parallelism: every matrix, norm and group of experts, and shared experts twice, within the experts'
    parameters and as separate matrices. Without it: whole attentions and feed-forward networks, and no head.
    """
    yield model.embedding
    for layer in model.layers:
        norms = (layer.norm,) if sequence_parallel else ()
        shared = layer.feed_forward.parts[1:] if layer.feed_forward.name == EXPERTS else ()
        for module in (layer.attention, *norms, layer.feed_forward, *shared):
            if sequence_parallel and isinstance(module, Parts) and module.name != EXPERTS:
                yield from module.parts
            else:
                yield module
    if sequence_parallel:
        yield model.head


def aicb_model(arguments: TrainingArguments) -> AicbModel:
    """Return the model that AICB builds from `arguments`. InputError where a width does not divide by tensor
    parallelism; AICB fails on it too."""
    hidden, tp = arguments.hidden_size, arguments.tensor_model_parallel_size
    vocabulary = arguments.padded_vocab_size
    word_rows = 4 * (vocabulary // tp)
    embedding = Weights(word_rows * hidden + arguments.seq_length * hidden, "embedding_layer")
    layers = _deepseek_layers(arguments) if arguments.frame == "DeepSeek" else _megatron_layers(arguments)
    return AicbModel(embedding, layers, _linear(arguments, "final_column", hidden, vocabulary))


def _megatron_layers(arguments: TrainingArguments) -> tuple[AicbLayer, ...]:
    hidden = arguments.hidden_size
    width = hidden // arguments.heads * arguments.heads
    attention = Parts(
        "attention_layer",
        (_linear(arguments, "attention_column", hidden, 3 * width), _linear(arguments, "attention_row", width, hidden)),
    )
    feed_forward = _experts(arguments, num_matrices=2) if arguments.moe_enable else _dense(arguments)
    return (AicbLayer(attention, Weights(2 * hidden), feed_forward, hidden),) * arguments.layers_per_stage


def _deepseek_layers(arguments: TrainingArguments) -> tuple[AicbLayer, ...]:
    hidden, heads = arguments.hidden_size, arguments.heads
    q_rank, kv_rank, rope = arguments.q_lora_rank, arguments.kv_lora_rank, arguments.qk_rope_dim
    nope, value = arguments.qk_nope_dim, arguments.v_head_dim
    attention = Parts(
        "attention_layer_mla",
        (
            _linear(arguments, "attention_linear_q_lora", hidden, q_rank),
            Weights(2 * q_rank),
            _linear(arguments, "attention_q_column", q_rank, heads * (nope + rope)),
            _linear(arguments, "attention_linear_kv_lora", hidden, kv_rank + rope),
            Weights(2 * kv_rank),
            _linear(arguments, "attention_kv_column", kv_rank, heads * (nope + value)),
            _linear(arguments, "attention_o_row", heads * value, hidden),
        ),
    )
    dense = AicbLayer(attention, Weights(2 * hidden), _dense(arguments), hidden)
    shared = [_dense(arguments)] if arguments.n_shared_expert > 0 else []
    sparse = AicbLayer(attention, Weights(2 * hidden), _experts(arguments, 3, *shared), hidden)
    num_dense = min(max(arguments.n_dense_layers, 0), arguments.layers_per_stage)
    return (dense,) * num_dense + (sparse,) * (arguments.layers_per_stage - num_dense)


def _dense(arguments: TrainingArguments) -> Parts:
    hidden, width = arguments.hidden_size, arguments.feed_forward_size
    return Parts(
        "mlp_layer", (_linear(arguments, "mlp_column", hidden, width), _linear(arguments, "mlp_row", width, hidden))
    )


def _experts(arguments: TrainingArguments, num_matrices: int, *shared: Parts) -> Parts:
    local_experts = arguments.num_experts // arguments.expert_model_parallel_size
    width = arguments.feed_forward_size * local_experts
    _check_divides(width, arguments.tensor_model_parallel_size, "the width of a rank's experts")
    share = width // arguments.tensor_model_parallel_size
    return Parts(EXPERTS, (Weights(num_matrices * arguments.hidden_size * share), *shared))


def _linear(arguments: TrainingArguments, name: str, input_size: int, output_size: int) -> Linear:
    tp = arguments.tensor_model_parallel_size
    split = name.rsplit("_", 1)[-1]
    if split == "column":
        _check_divides(output_size, tp, f"the output of {name}")
    elif split == "row":
        _check_divides(input_size, tp, f"the input of {name}")
    else:
        split = "none"
    return Linear(name, split, input_size, output_size, tp, arguments.add_bias_linear)


def _check_divides(width: int, tp: int, what: str) -> None:
    if width % tp:
        raise InputError(f"{what}, {width}, is not a multiple of --tensor_model_parallel_size {tp}")
