"""Facts of each architecture that its code fixes and its `config.json` leaves out, from `architectures.yaml`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from windtunnel.model.precision import Format
from windtunnel.schema import Schema, decode, read_yaml

Rule = bool | str
"""A fact of an architecture: True or False, or the config key that decides it."""


class Architecture(Schema):
    """Facts that the code of a `model_type` fixes and its config.json leaves out; the defaults are Llama's."""

    qkv_bias: Rule = "attention_bias"
    output_bias: Rule = "attention_bias"
    feed_forward_bias: Rule = "mlp_bias"
    qk_norm: Rule = "use_qk_norm"
    output_gate: Rule = "attn_output_gate"
    router_bias: Rule = "use_routing_bias"
    fp32_router: bool = False
    """vLLM and SGLang load the router in fp32 (`minimax_m2.py`, `hunyuan_v3.py`; vllm-project/vllm 52668)."""
    sinks: bool = False
    rotary: Rule = True
    """Whether queries and keys are rotated by their position."""
    shared_gate: bool = False
    gated: bool = True
    num_norms: int = 2
    norm_bias: bool = False
    lm_head_bias: Rule = "lm_head_bias"
    tied: bool = False
    """Whether embeddings are tied, where the config does not say."""
    full_attention_every: int | None = None
    """Period of layers that attend to everything, the others to the sliding window; None: all layers slide."""
    module_names: dict[str, str] = {}
    """Names of a layer's modules in the kinds of layers -> those in checkpoints, where they are others."""
    block_names: dict[str, str] = {}
    """Other names of blocks in `layers_block_type` -> those of the kinds of layers (transformers 5)."""
    parallel_mamba: bool = False
    """Whether every layer has Mamba-2 beside its attention (Falcon-H1)."""
    index_from_hidden: bool = False
    """Whether queries of an indexer are projected from hidden states, normed for it (Mistral Large 4)."""
    gated_queries: bool = False
    """Whether a projection of compressed queries makes the gate of attention's output too (A.X-K2)."""
    lightning: bool = False
    """Whether linear attention is lightning attention (MiniMax-01)."""
    only: str = ""
    """Kind of all layers, by its name in `layer_types`, where they have no feed-forward (Mamba)."""
    paired: bool = False
    """Whether a layer of the config is two here: experts beside a dense part, and a dense part (LongCat-Flash)."""
    own_code: bool = False
    """Whether engines run code that is published beside the weights (vLLM 0.12 `tests/models/registry.py`), and so must
    be told to trust it."""
    searched: bool = False
    """Whether `block_configs` gives the sizes of every layer's parts."""
    shared_experts: int = 0
    """Number of shared experts where the config does not say."""
    width_multiple: int | None = None
    """Width of a feed-forward over the hidden size where the config gives none."""
    split_values: bool = False
    """Whether heads share the hidden size as the width of their values where the config gives none (MiniCPM3)."""
    kv_cache: Format | None = None
    """Format of cached keys and values that engines take whatever the checkpoint says."""
    position_rows: int | None = None
    """Rows that a table of learned positions has beyond the longest context; None: positions are not learned."""
    encoder: bool = False
    """Whether tokens see whole prompts, and the model makes no text."""
    text_classes: tuple[str, ...] = ()
    """Classes that write text although their name does not say so."""
    pooler: bool = False
    """Whether an encoder's checkpoint has a dense layer after its layers (BERT's pooler)."""
    prediction_layers: int | None = 0
    """Prediction layers (MTP) of checkpoints whose config does not say; None: not known."""
    unused_positions: int = 0
    """Positions of the config's longest context that no token takes."""


class Architectures(Schema):
    """The tables of `architectures.yaml`, which describes them."""

    architectures: dict[str, Architecture]
    aliases: dict[str, tuple[str, ...]]
    class_defaults: dict[str, dict[str, Any]]
    nested_defaults: dict[str, dict[str, Any]]
    per_layer: dict[str, str]
    unreadable: dict[str, str]
    deciding: str
    unreadable_types: dict[str, str]
    towers: dict[str, tuple[str, ...]]


_FILE = Path(__file__).with_suffix(".yaml")
KNOWN = decode(read_yaml(_FILE), Architectures, _FILE.name)


def language_model(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config.json that describes its language model: an object inside, or all of it."""
    nested = (config.get(key) for key in ("text_config", "llm_config", "language_config"))
    return next((part for part in nested if isinstance(part, Mapping)), config)


def quantization_of(config: Mapping[str, Any]) -> Any:
    """Return how a config.json says that the checkpoint is quantised; None where it does not.

    Keys and order are those of vLLM 0.24 `model_loader/weight_utils.py`, `get_quant_config`.
    """
    text, key = language_model(config), "quantization_config"
    found = (config.get(key), text.get(key), config.get("compression_config"), text.get("compression_config"))
    return next((value for value in found if value is not None), None)
