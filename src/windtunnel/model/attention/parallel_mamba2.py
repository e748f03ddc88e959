"""Mamba-2 beside attention in one layer, as in Falcon-H1: both read the normed input, and their outputs add up.

Each part is as it is alone (`modeling_falcon_h1.py` of transformers 5.24, `FalconH1DecoderLayer`; vLLM 0.18
`falcon_h1.py`, `FalconH1ParallelHybrid`).
"""

from collections.abc import Iterator
from math import gcd
from typing import Any, ClassVar

from windtunnel.model.attention.grouped_query import DecodeAttention, PrefillAttention, SharedHeads
from windtunnel.model.attention.mamba2 import Mamba2
from windtunnel.model.config_reader import ConfigReader
from windtunnel.model.operators import BF16_BYTES, Launch, Op, Size
from windtunnel.model.quantization import Names
from windtunnel.model.shape import Shard


class ParallelMamba2(SharedHeads, tag="parallel_mamba2", tag_field="type", kw_only=True):
    """Softmax attention with shared key/value heads, and a recurrence beside it."""

    operators: ClassVar[tuple[type[Op], ...]] = (PrefillAttention, DecodeAttention)
    modules: ClassVar[tuple[Names, ...]] = (*Mamba2.modules, *SharedHeads.modules)
    divided_by_tp = "equal shares of attention and Mamba-2 heads"
    is_recurrent = True
    recurrence: Mamba2

    @classmethod
    def reads(cls, reader: ConfigReader, index: int) -> bool:
        return reader.architecture.parallel_mamba

    @classmethod
    def read(cls, reader: ConfigReader, index: int, layer_type: str, **others: Any) -> "ParallelMamba2":
        return super().read(reader, index, "full_attention", recurrence=Mamba2.read(reader, index, "mamba"))

    @property
    def widest_tp(self) -> int:
        return gcd(self.num_heads, self.recurrence.widest_tp)

    @property
    def text(self) -> str:
        return f"{super().text} beside {self.recurrence.text}"

    def num_parameters(self, hidden_size: int) -> int:
        return super().num_parameters(hidden_size) + self.recurrence.num_parameters(hidden_size)

    def norm_parameters(self) -> int:
        return super().norm_parameters() + self.recurrence.norm_parameters()

    def repeated_parameters(self, hidden_size: int, tp: int) -> tuple[int, float]:
        heads, copies = super().repeated_parameters(hidden_size, tp)
        groups, others = self.recurrence.repeated_parameters(hidden_size, tp)
        return heads + groups, (heads * copies + groups * others) / (heads + groups)

    def projections(self, shard: Shard, num_tokens: Size) -> Iterator[Launch]:
        """Yield those of both; the recurrence's outputs are summed over ranks apart, then both are added."""
        yield from self.recurrence.projections(shard, num_tokens)
        yield from shard.all_reduce("mamba_all_reduce", num_tokens)
        yield from super().projections(shard, num_tokens)
        yield shard.elementwise("mixers_sum", num_tokens, 3 * shard.model.hidden_size * BF16_BYTES)

    def decode_launches(self, shard: Shard, batch: Size, context_tokens: Size) -> Iterator[Launch]:
        yield from self.recurrence.decode_launches(shard, batch, context_tokens)
        yield from super().decode_launches(shard, batch, context_tokens)

    def prefill_launches(self, shard: Shard, batch: Size, num_tokens: Size) -> Iterator[Launch]:
        yield from self.recurrence.prefill_launches(shard, batch, num_tokens)
        yield from super().prefill_launches(shard, batch, num_tokens)

    def state_bytes(self, shard: Shard) -> float:
        return self.recurrence.state_bytes(shard)

    def is_bounded(self, max_model_len: int) -> bool:
        return self.window_tokens is not None and self.window_tokens < max_model_len


KIND = ParallelMamba2
