"""A transformer as groups of layers, and the face of every kind of attention and feed-forward that a layer can have.

A kind is one module of `model/attention/` or `model/feed_forward/`, or of an installed package with an entry point in
`windtunnel.attention` or `windtunnel.feed_forward`. Its `KIND` is a schema that derives from `Attention` or
`FeedForward` and says everything about the kind; its tag is the module's or entry point's name.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any, ClassVar, Literal, Self

import numpy as np

from windtunnel.errors import InputError, check_number
from windtunnel.model.architectures import Architecture
from windtunnel.model.config_reader import ConfigReader
from windtunnel.model.exchange import ALL_GATHER
from windtunnel.model.operators import BF16_BYTES, Collective, Elementwise, Gemm, HyperConnection, Launch, Op, Size
from windtunnel.model.parallelism import Parallelism
from windtunnel.model.precision import ACTIVATION_BITS, Format, Precision
from windtunnel.model.quantization import Names
from windtunnel.model.sampling import GREEDY_SAMPLER, Sampler, Sampling, TokenFilter
from windtunnel.model.towers import VisionTower
from windtunnel.plugins import Registry
from windtunnel.schema import Schema, decode

HIDDEN_STATES = 4
"""Hidden states of a token that live at a layer's widest point: the layer's input, the residual, attention's output and
the normed input (measured 3.7 to 3.8: first pipeline stages of vLLM 0.19, and models of 32,000 tokens)."""

OUTPUT_PROJECTIONS = ("o_proj", "o_a_proj", "mamba_out_proj", "conv_out_proj")
"""Launches of the last projections of attention and recurrences, which a checkpoint may quantise alone."""


class LayerKind:
    """What attention and feed-forward have in common: how configs and checkpoints name them, and their operators."""

    __slots__ = ()
    registry: ClassVar[Registry]
    operators: ClassVar[tuple[type[Op], ...]] = ()
    """Operators of this kind alone, beside those of `model.operators`."""
    layer_types: ClassVar[tuple[str, ...]] = ()
    """Names of layers of this kind in a config's `layer_types` or `layers_block_type`."""
    model_types: ClassVar[Mapping[str, Architecture]] = {}
    """Further `model_type`s that a kind brings, with the facts that their configs leave out."""
    modules: ClassVar[tuple[Names, ...]] = ()
    """Names of the quantised modules of a layer in checkpoints, attention's output projection last; shared and routed
    experts aside."""

    @classmethod
    def from_builtins(cls, raw: Any) -> Any:
        """Decode a kind from builtins; its `type` says which. InputError where there is no such kind, or one of its
        fields is wrong."""
        if isinstance(raw, cls):
            return raw
        if not isinstance(raw, Mapping) or not isinstance(raw.get("type"), str):
            known = ", ".join(cls.registry.names())
            raise InputError(f"a {cls.registry.what} is {raw!r}; a table with a type is needed", f"types: {known}")
        return decode(dict(raw), cls.registry.get(raw["type"]).KIND, cls.registry.what)

    @classmethod
    def lacking(cls, name: str) -> InputError:
        """Return the error of a kind that leaves out what every kind defines."""
        hint = "windtunnel.model.shape documents what a kind defines"
        return InputError(f"the {cls.registry.what} {cls.__name__} defines no {name}", hint)


class Attention(LayerKind):
    """How a layer mixes tokens: attention, or a recurrence in its place."""

    __slots__ = ()
    registry = Registry("windtunnel.attention", "windtunnel.model.attention", "kind of attention", "KIND")
    is_recurrent: ClassVar[bool] = False
    """Whether it keeps a recurrent state of fixed size for a request."""
    is_causal: ClassVar[bool] = True
    """Whether a token sees no later one; encoders see whole prompts, and keep nothing of them."""

    @classmethod
    def reads(cls, reader: ConfigReader, index: int) -> bool:
        """Whether layer `index` is of this kind although the config gives it no name; the first kind that says so has
        it, in the order of their names."""
        return False

    @classmethod
    def read(cls, reader: ConfigReader, index: int, layer_type: str) -> Self:
        """Return layer `index`, which the config calls `layer_type`; every `model_type` is known. InputError where a
        key is missing or impossible."""
        raise cls.lacking("read")

    num_heads: int
    """A kind without it has a `widest_tp` of its own."""
    divided_by_tp: ClassVar[str] = "attention heads"
    """What tensor-parallel ranks share."""

    @property
    def widest_tp(self) -> int:
        """Number of what ranks share, which `tp` must divide."""
        if not hasattr(self, "num_heads"):
            raise self.lacking("widest_tp")
        return self.num_heads

    @property
    def shared_kv_heads(self) -> int | None:
        """Key/value heads that ranks share, or repeat where there are fewer; None where a rank needs all or none."""
        return None

    @property
    def divided_widths(self) -> tuple[int, int] | None:
        """Values of a head's query and output where ranks hold parts of a context; None where they cannot."""
        return None

    @property
    def window_tokens(self) -> int | None:
        """Sliding window; None keeps every token."""
        return None

    @property
    def tail_tokens(self) -> int | None:
        """Last tokens of a prompt that later layers and steps read, where engines may leave out the others."""
        return None

    @property
    def text(self) -> str:
        """Name for people, in lists of models."""
        raise self.lacking("text")

    @property
    def rotary_size(self) -> int:
        """Values of a head that are rotated by their position; 0: none."""
        return 0

    def absorbed_parameters(self, tp: int) -> int:
        """Count the parameters of one layer on one rank that engines keep a second time, in the model's own format."""
        return 0

    def num_parameters(self, hidden_size: int) -> int:
        """Count one layer's parameters, without its inner norms."""
        raise self.lacking("num_parameters")

    def norm_parameters(self) -> int:
        """Count one layer's inner norms: of queries and keys, of compressed vectors, of a recurrence's output."""
        return 0

    def repeated_parameters(self, hidden_size: int, tp: int) -> tuple[int, float]:
        """Return the parameters that several of `tp` ranks hold, and the number of copies in all."""
        return 0, 1.0

    def rank_parameters(self, hidden_size: int, tp: int) -> float:
        """Return the parameters of one layer on one rank, repeated ones included (vLLM `ReplicatedLinear`)."""
        repeated, copies = self.repeated_parameters(hidden_size, tp)
        return (self.num_parameters(hidden_size) - repeated + repeated * copies) / tp

    def projections(self, shard: "Shard", num_tokens: Size) -> Iterator[Launch]:
        """Yield what depends on the tokens of a step alone: all but the core."""
        raise self.lacking("projections")

    def decode_launches(self, shard: "Shard", batch: Size, context_tokens: Size) -> Iterator[Launch]:
        """Yield the core for `batch` decoding requests with `context_tokens` keys each, the new one included."""
        if len(self.operators) < 2:
            raise self.lacking("decode_launches")
        core: Any = self.operators[1]
        fields = self.core_fields(shard)
        yield Launch(f"{self.core_name}_decode", core(batch=batch, context_tokens=context_tokens, **fields))

    def prefill_launches(self, shard: "Shard", batch: Size, num_tokens: Size) -> Iterator[Launch]:
        """Yield the core of prefill chunks, `batch` and `num_tokens` as in `operators.PrefillBatch`."""
        core: Any = self.operators[0]
        fields = self.core_fields(shard)
        yield Launch(f"{self.core_name}_prefill", core(batch=batch, num_tokens=num_tokens, **fields))

    @property
    def core_name(self) -> str:
        """Name of the core in lists of launches, of a kind whose operators are one for prefill and one for decode."""
        raise self.lacking("core_name")

    def core_fields(self, shard: "Shard") -> dict[str, Any]:
        """Return the dimensions of that core on one rank, the same in prefill and decode."""
        raise self.lacking("core_fields")

    def bytes_per_token(self, shard: "Shard") -> float:
        """Return the bytes that one token keeps in one layer on one device; 0 of a recurrence and of an encoder."""
        if self.is_causal and not self.is_recurrent:
            raise self.lacking("bytes_per_token")
        return 0.0

    def state_bytes(self, shard: "Shard") -> float:
        """Return the bytes that a request keeps in one layer on one device whatever its length, windows aside; of a
        recurrence its state.
        """
        if self.is_recurrent:
            raise self.lacking("state_bytes")
        return 0.0

    def is_bounded(self, max_model_len: int) -> bool:
        """Whether the layer's cache stops growing before `max_model_len` tokens."""
        return self.is_recurrent or (self.window_tokens is not None and self.window_tokens < max_model_len)


class Recurrence(Attention):
    """A recurrence in place of attention, with a state of fixed size for a request."""

    __slots__ = ()
    is_recurrent = True

    def decode_launches(self, shard: "Shard", batch: Size, context_tokens: Size) -> Iterator[Launch]:
        """Yield the core for one token of each request, at every context."""
        return self.core_launches(shard, batch, 1.0 + 0.0 * context_tokens, "decode")

    def prefill_launches(self, shard: "Shard", batch: Size, num_tokens: Size) -> Iterator[Launch]:
        """Yield the core of prefill chunks, whose cost does not depend on earlier context: a batch below one is one
        chunk of `batch x num_tokens` tokens."""
        return self.core_launches(shard, np.maximum(batch, 1.0), num_tokens * np.minimum(batch, 1.0), "prefill")

    def core_launches(self, shard: "Shard", batch: Size, num_tokens: Size, phase: str) -> Iterator[Launch]:
        """Yield the core for `batch` chunks of `num_tokens` tokens, in the phase `decode` or `prefill`."""
        raise self.lacking("core_launches")


@dataclass(frozen=True)
class FeedForwardParameters:
    """Numbers of parameters of one layer's feed-forward."""

    dense: int = 0
    routed: int = 0
    shared: int = 0
    router: int = 0
    """The router, its bias, the gate of shared experts, and projections to and from experts' latent width."""
    inactive: int = 0
    """Parameters of `routed` that a token does not use."""

    def __add__(self, other: "FeedForwardParameters") -> "FeedForwardParameters":
        return FeedForwardParameters(
            *(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True))
        )

    def __mul__(self, num_layers: int) -> "FeedForwardParameters":
        return FeedForwardParameters(*(count * num_layers for count in astuple(self)))

    @property
    def total(self) -> int:
        return self.dense + self.routed + self.shared + self.router


class FeedForward(LayerKind):
    """What a layer computes for each token alone: a dense network, or a choice of experts."""

    __slots__ = ()
    registry = Registry("windtunnel.feed_forward", "windtunnel.model.feed_forward", "kind of feed-forward", "KIND")
    shared_modules: ClassVar[tuple[Names, ...]] = ()
    """Names of the quantised modules of shared experts in checkpoints, where a layer has some."""
    routed_modules: ClassVar[tuple[Names, ...]] = ()
    """Names of the quantised modules of routed experts in checkpoints."""

    @classmethod
    def layers(cls, reader: ConfigReader) -> Iterable[bool]:
        """Return whether each layer of a config without names for its blocks has this kind."""
        raise cls.lacking("layers")

    @classmethod
    def read(cls, reader: ConfigReader) -> Self:
        """Return the feed-forward that a config describes; its `model_type` is known. InputError where a key is missing
        or impossible."""
        raise cls.lacking("read")

    @property
    def expert_modules(self) -> tuple[Names, ...]:
        """Return those of `routed_modules` that this layer may have."""
        return self.routed_modules

    @property
    def num_experts(self) -> int:
        """Routed experts; 0 where there are none."""
        return 0

    def parameters(self, hidden_size: int) -> FeedForwardParameters:
        """Count one layer's parameters."""
        raise self.lacking("parameters")

    def weight_bits(self, shard: "Shard") -> float:
        """Return the bits of one layer's weights on one device."""
        raise self.lacking("weight_bits")

    def input_format(self, shard: "Shard") -> Format:
        """Return the format in which the norm before it writes its input."""
        return Format.BF16

    def launches(self, shard: "Shard", num_tokens: Size) -> Iterator[Launch]:
        """Yield the launches of one layer, in their order."""
        raise self.lacking("launches")

    def peak_values(self, shard: "Shard") -> float:
        """Return the values that one token holds at the layer's widest point, on one device."""
        raise self.lacking("peak_values")

    def workspace_values(self, shard: "Shard") -> float:
        """Return the values of one token in buffers that some engines keep between layers and steps."""
        return 0.0


class LayerGroup(Schema):
    """`num_layers` layers of one shape; they need not be neighbours. A layer may lack one of its two parts."""

    num_layers: int
    attention: Attention | None = None
    feed_forward: FeedForward | None = None
    num_norms: int = 2
    """Norms over the hidden size in each layer (Gemma 2 and 3 have four; parallel blocks and single parts one)."""

    def check(self) -> None:
        if self.attention is None and self.feed_forward is None:
            raise ValueError("a layer has neither attention nor a feed-forward; at least one of them is needed")
        for part, kind in ((self.attention, Attention), (self.feed_forward, FeedForward)):
            if not isinstance(part, kind | None):
                raise ValueError(f"{part!r:.60} is no {kind.registry.what}")


class LayerInputs(Schema):
    """Inputs of its own that each layer has, from a table and a projection of the embeddings (Gemma 3n; Gemma 4's E2B
    and E4B; vLLM 0.24 `gemma4.py`); in Gemma 3n several hidden states of a token, and a residual of low rank."""

    size: int
    """Values that a layer gets for a token."""
    vocab_size: int
    num_states: int = 1
    """Hidden states of a token, of which a layer computes one and predicts the others (AltUp, arXiv:2301.13310)."""
    laurel_rank: int = 0
    """Rank of the residual beside attention (LAuReL, arXiv:2411.07501); 0: none."""

    def parameters(self, hidden_size: int, num_layers: int) -> tuple[int, int, int]:
        """Count the table, its projection, which ranks split, and all else: matrices, norms, coefficients of states."""
        states, rank, columns = self.num_states, self.laurel_rank, self.size * num_layers
        layer = hidden_size * (2 * self.size + 1 + (2 * rank + 1 if rank else 0))
        layer += (states + 2) * hidden_size + states**2 * (states + 1) if states > 1 else 0
        whole = num_layers * layer + 2 * (states - 1) * hidden_size**2 + self.size
        return self.vocab_size * columns, columns * hidden_size, whole

    def step_launches(self, shard: "Shard", num_tokens: Size) -> Iterator[Launch]:
        """Yield what a step computes once: the inputs of all layers, and the other hidden states of a token."""
        width, columns, form = shard.model.hidden_size, self.size * shard.model.num_layers, shard.precision.weights
        yield Launch("layer_inputs_proj", Gemm(num_tokens, columns // shard.tp, width, form))
        if shard.tp > 1:
            gathered = num_tokens * columns * BF16_BYTES
            yield Launch("layer_inputs_all_gather", shard.collective("all_gather", gathered, shard.tp))
        yield shard.elementwise("layer_inputs", num_tokens, 3 * columns * BF16_BYTES)
        if self.num_states > 1:
            yield Launch("altup_proj", Gemm(num_tokens, width, width, form), 2 * (self.num_states - 1))

    def layer_launches(self, shard: "Shard", num_tokens: Size) -> Iterator[Launch]:
        """Yield what one layer computes of it, whole on every rank."""
        width, form = shard.model.hidden_size, shard.precision.weights
        if self.num_states > 1:
            moved = 2 * self.num_states * width * BF16_BYTES
            yield shard.elementwise("altup_predict", num_tokens, moved)
            yield shard.elementwise("altup_correct", num_tokens, 1.5 * moved)
        for name, size in (("laurel", self.laurel_rank), ("layer_input", self.size)):
            if size:
                yield Launch(f"{name}_down_proj", Gemm(num_tokens, size, width, form))
                yield Launch(f"{name}_up_proj", Gemm(num_tokens, width, size, form))
                yield shard.norm(f"{name}_norm", num_tokens, form)
        yield shard.elementwise("layer_input_gate", num_tokens, 3 * self.size * BF16_BYTES)


class NgramTables(Schema):
    """Tables of n-grams that some layers look up and add to the streams of the residual (Engram of DeepSeek-V4.1;
    vLLM 0.33 `models/deepseek_v41/common/engram.py`, SGLang `layers/engram.py`)."""

    num_layers: int
    num_rows: int
    """Rows of the tables of all layers, in fp8 with a scale of one byte for 32 values."""
    num_columns: int
    """Rows of a layer's table that a token looks up: one for each head of each length of n-grams."""
    width: int
    """Values of a row."""

    def _projected(self, model: "ModelSpec") -> tuple[int, int]:
        """Return the (outputs, inputs) of a layer's projection: a key for each stream, and a value."""
        return model.hidden_size * (model.residual_streams + 1), self.num_columns * self.width

    def parameters(self, model: "ModelSpec") -> int:
        """Count all parameters but the tables': projections, and norms of keys and queries of each stream."""
        outputs, inputs = self._projected(model)
        return self.num_layers * (outputs * inputs + 2 * model.residual_streams * model.hidden_size)

    @property
    def row_bytes(self) -> float:
        return self.width + self.width / 32

    def launches(self, shard: "Shard", num_tokens: Size) -> Iterator[Launch]:
        """Yield what the layers compute of it: each rank looks up its rows, their sum is projected on every rank and
        gated into the streams."""
        outputs, inputs = self._projected(shard.model)
        streams = shard.model.residual_streams * shard.model.hidden_size * BF16_BYTES
        ranks = shard.num_group_ranks
        looked_up = self.num_columns * (self.row_bytes / ranks + self.width * BF16_BYTES)
        yield replace(shard.elementwise("ngram_lookup", num_tokens, looked_up), count=self.num_layers)
        if ranks > 1:
            message = num_tokens * shard.parallelism.attention_dp * inputs * BF16_BYTES
            yield Launch("ngram_all_reduce", shard.collective("all_reduce", message, ranks), self.num_layers)
        yield Launch("ngram_proj", Gemm(num_tokens, outputs, inputs, shard.precision.weights), self.num_layers)
        gated = outputs * BF16_BYTES + 2 * streams
        yield replace(shard.elementwise("ngram_gate", num_tokens, gated), count=self.num_layers)


class ModelSpec(Schema):
    """A decoder-only transformer, or an encoder."""

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
    """Rows of tables of learned positions (GPT-2, OPT) and of kinds of tokens (BERT); 0 where there are none."""
    head: Literal["pooler", "score"] | None = None
    """What an encoder's checkpoint has after its layers: BERT's pooler, which engines do not load, or the dense layer
    and the score of a reranker."""
    architecture: str = ""
    """`model_type` of its config.json: engines keep windows, and fuse all-reduces, of some types only."""
    precision: Precision = Precision()
    """Formats of the published checkpoint, read from its quantisation config."""
    mixed_bits: tuple[tuple[str, float], ...] = ()
    """Parts of layers, as in `quantization.PARTS`, and mean bits of their weights, where layers differ in format."""
    named_after: str = ""
    """Model of the catalog that it is by its name alone, which says its formats too; empty: it is known itself."""
    unknown_type: str = ""
    """Its own `model_type`, which is not known, where it was read as one of `architecture` by request; else empty."""
    left_out: tuple[str, ...] = ()
    """Parts of the published model that are not modelled: a vision tower, an audio tower."""
    tower_parameters: int = 0
    """Parameters of a vision tower in memory; 0 where there is none or its config lacks its sizes."""
    vision: VisionTower | None = None
    """Vision tower, for workloads with images or videos; None: none, or its sizes are not known."""
    prediction_layers: int | None = None
    """Layers that draft later tokens (MTP) in the checkpoint; None: not known."""
    residual_streams: int = 1
    """Streams of the residual; several are mixed by hyper-connections."""
    earlier_blocks: float = 0.0
    """Hidden states of earlier blocks of layers that the norm before a part of a layer adds, on average (Kimi-K3)."""
    norm_gate_rank: int = 0
    """Rank of the gates behind the norms of attention and of experts (A.X-K2); 0: none."""
    layer_inputs: LayerInputs | None = None
    """Inputs of its own that each layer has; None: none."""
    ngram_tables: NgramTables | None = None
    """Tables of n-grams that some layers look up; None: none."""
    rotary_values: int = 0
    """Cosines and sines of every position that an engine keeps in tables."""
    is_pooled: bool = False
    """Whether it is deployed without its output layer: the hidden state of a prompt is pooled, and nothing sampled."""
    generation: Sampling | None = None
    """Sampling parameters of its published generation_config.json; None: it has none, or they are not known."""

    def check(self) -> None:
        for _, attention in self.attentions:
            what = f"the kind of attention {type(attention).__name__}"
            check_number(attention.widest_tp, f"{what}: widest_tp", 1)
            check_number(attention.num_parameters(self.hidden_size), f"{what}: num_parameters")

    @property
    def num_layers(self) -> int:
        return sum(group.num_layers for group in self.layers)

    @property
    def attentions(self) -> tuple[tuple[int, Attention], ...]:
        """Number of layers and their attention, for each group that has one."""
        return tuple((group.num_layers, group.attention) for group in self.layers if group.attention is not None)

    @property
    def feed_forwards(self) -> tuple[tuple[int, FeedForward], ...]:
        """Number of layers and their feed-forward, for each group that has one."""
        return tuple((g.num_layers, g.feed_forward) for g in self.layers if g.feed_forward is not None)

    @property
    def is_encoder(self) -> bool:
        """Whether it makes vectors and scores, and no text."""
        return any(not attention.is_causal for _, attention in self.attentions)

    @property
    def is_recurrent(self) -> bool:
        """Whether a layer of it keeps a recurrent state."""
        return any(attention.is_recurrent for _, attention in self.attentions)

    @property
    def head_parameters(self) -> int:
        """Parameters of `head`: a square matrix with a bias, and a score's weights."""
        scores = self.hidden_size + 1 if self.head == "score" else 0
        return self.hidden_size * (self.hidden_size + 1) + scores if self.head else 0

    @property
    def has_experts(self) -> bool:
        return any(feed_forward.num_experts for _, feed_forward in self.feed_forwards)


@dataclass(frozen=True)
class LoraShape:
    """LoRA adapters of a deployed model: all have one rank."""

    rank: int
    target_modules: tuple[str, ...] | None = None
    """Projections with adapters; None: all that can have them."""
    fully_sharded: bool = False
    """Whether tensor-parallel ranks share both matrices of an adapter."""


@dataclass(frozen=True)
class Shard:
    """A model as it is deployed: what the operators of a step are computed from."""

    model: ModelSpec
    precision: Precision
    parallelism: Parallelism
    devices_per_node: int = 8
    tf32: bool = False
    """Whether tensor cores multiply what is left in fp32."""
    scaled_sparse_kv: bool = False
    """Whether an fp8 KV cache of sparse latent attention has scales, and the rotated key in bf16."""
    compresses_in_one_block: bool = False
    """Whether one block of threads compresses the tokens of a heavily compressed one."""
    prefills_tails: bool = False
    """Whether layers of which only a prompt's last tokens are read later compute these alone in prefill."""
    ngrams_on_host: bool = False
    """Whether tables of n-grams are in the host's memory."""
    all2all_backend: str = ALL_GATHER
    """Kernels that exchange tokens between ranks with different experts, one of `model.exchange.EXCHANGES`."""
    gathers_quantised: tuple[Format, ...] = ()
    """Formats of experts for which ranks quantise their tokens before they gather those of all ranks."""
    redundant_experts: int = 0
    """Further copies of routed experts."""
    routes_shared_expert: bool = False
    """Whether the engine computes a shared expert as one more routed one where it can."""
    beside_tokens: int = 0
    """Most tokens at which shared experts run on a stream of their own beside the routed experts."""
    sampler: Sampler = GREEDY_SAMPLER
    lora: LoraShape | None = None
    """None: served without adapters."""

    @property
    def tp(self) -> int:
        return self.parallelism.tp

    @property
    def num_group_ranks(self) -> int:
        """Ranks that share the experts."""
        return self.parallelism.tp * self.parallelism.attention_dp

    @property
    def stage_fraction(self) -> float:
        """Share of the layers that the fullest pipeline stage holds."""
        return -(-self.model.num_layers // self.parallelism.pp) / self.model.num_layers

    def bits(self, part: str) -> float:
        """Return the mean bits of a stored weight of a part of the layers, one of `quantization.PARTS`."""
        weights, published = (getattr(each, part) for each in (self.precision, self.model.precision))
        mixed = dict(self.model.mixed_bits) if weights == published else {}
        return mixed.get(part, self.precision.bits(weights))

    def span_nodes(self, num_ranks: int) -> int:
        """Return the number of nodes that hold `num_ranks` neighbouring ranks."""
        return -(-num_ranks // self.devices_per_node)

    def collective(self, op: str, message_bytes: Size, num_ranks: int) -> Collective:
        """Return a collective over `num_ranks` neighbouring ranks."""
        return Collective(op, message_bytes, num_ranks, self.span_nodes(num_ranks))

    def all_reduce(self, name: str, num_tokens: Size) -> Iterator[Launch]:
        """Yield the sum of hidden states over tensor-parallel ranks, where there are several."""
        if self.tp > 1:
            message = num_tokens * self.model.hidden_size * BF16_BYTES
            yield Launch(name, self.collective("all_reduce", message, self.tp))

    def norm(self, name: str, num_tokens: Size, output: Format, count: int = 1) -> Launch:
        """Return residual add and norm in one kernel: it reads two streams, writes residual and normed activation."""
        streams = 3 + self.model.earlier_blocks
        num_bytes = self.model.hidden_size * (streams * BF16_BYTES + ACTIVATION_BITS[output] / 8)
        return Launch(name, Elementwise("norm", num_tokens, num_bytes), count)

    def norm_gate(self, num_tokens: Size) -> Iterator[Launch]:
        """Yield what multiplies a normed activation by a gate that it makes itself, through two small matrices."""
        width, rank = self.model.hidden_size, self.model.norm_gate_rank
        if rank:
            yield Launch("norm_gate_down", Gemm(num_tokens, rank, width))
            yield Launch("norm_gate_up", Gemm(num_tokens, width, rank))
            yield self.elementwise("norm_gate", num_tokens, 3 * width * BF16_BYTES)

    def elementwise(self, name: str, num_tokens: Size, bytes_per_token: float) -> Launch:
        """Return a kernel that only moves data, some bytes for each token."""
        return Launch(name, Elementwise(name, num_tokens, bytes_per_token))

    def mix(self, part: str, num_tokens: Size) -> Iterator[Launch]:
        """Yield what several streams of the residual add before (`pre`) or after (`post`) a part of a layer."""
        streams = self.model.residual_streams
        if streams > 1:
            yield Launch(f"hyper_{part}", HyperConnection(part, num_tokens, self.model.hidden_size, streams))

    def attention_gemm(self, name: str, num_tokens: Size, num_outputs: int, num_inputs: int) -> Launch:
        """Return a projection of attention, in the format of its weights."""
        is_output = name in OUTPUT_PROJECTIONS
        weights = self.precision.attention_output_format if is_output else self.precision.attention_format
        return Launch(name, Gemm(num_tokens, num_outputs, num_inputs, weights))


def attention_kinds() -> tuple[type[Attention], ...]:
    """Return every kind of attention, the shipped ones first."""
    return _kinds(Attention)


def feed_forward_kinds() -> tuple[type[FeedForward], ...]:
    """Return every kind of feed-forward, the shipped ones first."""
    return _kinds(FeedForward)


def operator_types() -> dict[str, type[Op]]:
    """Return the class of every kind of operator, by the kind's name."""
    types: list[type[Op]] = [Gemm, Elementwise, Collective, TokenFilter, HyperConnection]
    for kind in (*attention_kinds(), *feed_forward_kinds()):
        types += kind.operators
    return {operator.kind: operator for operator in types}


def _kinds(face: type[Any]) -> tuple[Any, ...]:
    return tuple(module.KIND for module in face.registry.every(face).values())
