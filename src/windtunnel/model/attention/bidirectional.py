"""Attention of encoders (BERT, XLM-RoBERTa, ModernBERT): every token sees all tokens, or those near it; no KV cache."""

from collections.abc import Iterator
from typing import Any, ClassVar, Self

import numpy as np

from windtunnel.model.attention.grouped_query import EncoderAttention, SharedHeads
from windtunnel.model.config_reader import ConfigReader
from windtunnel.model.operators import Launch, Size
from windtunnel.model.quantization import Names
from windtunnel.model.shape import Shard


class BidirectionalAttention(SharedHeads, tag="bidirectional", tag_field="type"):
    """Softmax attention of whole prompts in both directions; `local_tokens` around a token, or all of them."""

    modules: ClassVar[tuple[Names, ...]] = (
        ("attention.self.query", "attn.Wqkv", "attention.qkv_proj"),
        ("attention.output.dense", "attn.Wo", "attn.out_proj", "attention.o_proj"),
    )
    is_causal = False
    local_tokens: int | None = None
    """Tokens around a token, itself included, that it sees; None: all. `window_tokens` is for KV caches."""

    @classmethod
    def reads(cls, reader: ConfigReader, index: int) -> bool:
        return reader.architecture.encoder

    @classmethod
    def read(cls, reader: ConfigReader, index: int, layer_type: str, **others: Any) -> Self:
        """Return the attention of a layer; ModernBERT's first layer of each period sees everything (transformers
        `modernbert/modeling_modernbert.py`)."""
        every = reader.count("global_attn_every_n_layers", default=1)
        local = reader.count("local_attention", default=0, minimum=0) if index % every else 0
        return super().read(reader, index, layer_type, local_tokens=local or None, **others)

    @property
    def text(self) -> str:
        return f"encoder {self.local_tokens}" if self.local_tokens else "encoder"

    def projections(self, shard: Shard, num_tokens: Size) -> Iterator[Launch]:
        """Yield the projections; no key or value outlives the step."""
        for launch in super().projections(shard, num_tokens):
            if launch.name != "kv_cache_write":
                yield launch

    def decode_launches(self, shard: Shard, batch: Size, context_tokens: Size) -> Iterator[Launch]:
        """Yield nothing: an encoder does not decode."""
        yield from ()

    def prefill_launches(self, shard: Shard, batch: Size, num_tokens: Size) -> Iterator[Launch]:
        """Yield the core for whole prompts: n tokens have n^2 pairs, or n times the tokens around one, for which
        pieces of the prompt that see all of themselves have as many."""
        length = num_tokens if self.local_tokens is None else np.minimum(num_tokens, self.local_tokens)
        name = "encoder_attention" if self.local_tokens is None else "local_encoder_attention"
        pieces = batch * num_tokens / length
        yield Launch(name, EncoderAttention(pieces, length, self.num_heads // shard.tp, self.head_dim))

    def bytes_per_token(self, shard: Shard) -> float:
        return 0.0


KIND = BidirectionalAttention
