"""Block-sparse attention (MiniMax-M3): an indexer chooses blocks of keys for each query and key/value head.

One key of the indexer is cached for each token, and one of its queries scores it for each key/value head; the blocks of
the best scores are attended to (vLLM 0.33 `models/minimax_m3/nvidia/model.py`, `common/indexer.py`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from windtunnel.errors import InputError
from windtunnel.model.attention.grouped_query import SharedHeads
from windtunnel.model.config_reader import ConfigReader
from windtunnel.model.operators import BF16_BYTES, Batch, DecodeBatch, Launch, Op, PrefillBatch, Size
from windtunnel.model.precision import BITS, Format
from windtunnel.model.shape import Shard


@dataclass(frozen=True)
class BlockSparseCore(Batch):
    """What one rank's block-sparse attention takes above its projections: norms and rotation, scores and choice of
    blocks, attention to `top_k` tokens of the chosen ones.
    """

    shown: ClassVar[str] = "{batch_text}, {num_heads}/{num_kv_heads} x {head_dim} of the best {top_k} {kv_format}"
    num_heads: int
    num_kv_heads: int
    head_dim: int
    index_head_dim: int
    top_k: int
    kv_format: Format = Format.BF16

    @staticmethod
    def projections(site: Mapping[str, float]) -> Iterator[tuple[float, float]]:
        """Yield (n, k) of the projections of one rank: queries, keys, values, the indexer's; the output."""
        query, index = site["num_heads"] * site["head_dim"], (site["num_kv_heads"] + 1) * site["index_head_dim"]
        yield query + 2 * site["num_kv_heads"] * site["head_dim"] + index, site["hidden_size"]
        yield site["hidden_size"], query

    @property
    def kept_pairs(self) -> Size:
        """Query-key pairs that attention computes."""
        return self.pairs_within(self.top_k)

    @property
    def flops_per_kept_pair(self) -> float:
        return 4.0 * self.num_heads * self.head_dim

    @property
    def flops(self) -> Size:
        scores = 2.0 * self.pairs_within(0) * self.num_kv_heads * self.index_head_dim
        return self.kept_pairs * self.flops_per_kept_pair + scores

    @property
    def num_bytes(self) -> Size:
        """Queries and outputs, keys and values of the chosen tokens, and every key of the indexer."""
        queries = self.num_queries * 2 * self.num_heads * self.head_dim * BF16_BYTES
        key_and_value = 2 * self.num_kv_heads * self.head_dim * BITS[self.kv_format] / 8
        scored = self.read_within(0) * self.index_head_dim * BF16_BYTES
        return queries + self.read_within(self.top_k) * key_and_value + scored


@dataclass(frozen=True)
class BlockSparsePrefill(BlockSparseCore, PrefillBatch):
    """Block-sparse attention in prefill."""

    kind: ClassVar[str] = "block_sparse_prefill"


@dataclass(frozen=True)
class BlockSparseDecode(BlockSparseCore, DecodeBatch):
    """Block-sparse attention in decode."""

    kind: ClassVar[str] = "block_sparse_decode"


class BlockSparseAttention(SharedHeads, tag="block_sparse", tag_field="type", kw_only=True):
    """Softmax attention with shared key/value heads, each of which attends to blocks that an indexer chooses."""

    operators: ClassVar[tuple[type[Op], ...]] = (BlockSparsePrefill, BlockSparseDecode)
    core_name = "block_sparse_attention"
    index_head_dim: int
    top_k: int
    """Tokens of the chosen blocks."""

    @classmethod
    def reads(cls, reader: ConfigReader, index: int) -> bool:
        if not reader.raw.get("sparse_attention_config"):
            return False
        sparse = reader.inner("sparse_attention_config")
        return bool(sparse.per_layer("sparse_attention_freq", sparse.numbers("sparse_attention_freq"))[index])

    @classmethod
    def read(cls, reader: ConfigReader, index: int, layer_type: str, **others: Any) -> "BlockSparseAttention":
        sparse = reader.inner("sparse_attention_config")
        num_heads, num_kv_heads = sparse.count("sparse_num_index_heads"), reader.count("num_key_value_heads")
        if num_heads != num_kv_heads:
            raise InputError(f"{reader.name}: {num_heads} heads of an indexer for {num_kv_heads} key/value heads")
        top_k = sparse.count("sparse_topk_blocks") * sparse.count("sparse_block_size")
        chosen = {"index_head_dim": sparse.count("sparse_index_dim"), "top_k": top_k}
        return super().read(reader, index, layer_type, **chosen)

    @property
    def text(self) -> str:
        return f"GQA, best {self.top_k}"

    def num_parameters(self, hidden_size: int) -> int:
        return super().num_parameters(hidden_size) + hidden_size * (self.num_kv_heads + 1) * self.index_head_dim

    def norm_parameters(self) -> int:
        return super().norm_parameters() + 2 * self.index_head_dim

    def repeated_parameters(self, hidden_size: int, tp: int) -> tuple[int, float]:
        """Every rank keeps the indexer's key, and at least one key/value head with its query of the indexer."""
        heads, copies = super().repeated_parameters(hidden_size, tp)
        heads, key = heads + hidden_size * self.num_kv_heads * self.index_head_dim, hidden_size * self.index_head_dim
        return heads + key, (heads * copies + key * tp) / (heads + key)

    def projections(self, shard: Shard, num_tokens: Size) -> Iterator[Launch]:
        """Norms, rotation and the cache's write were measured as one with the core."""
        names, site = ("qkv_index_proj", "o_proj"), self.core_fields(shard) | {"hidden_size": shard.model.hidden_size}
        for name, (outputs, inputs) in zip(names, BlockSparseCore.projections(site), strict=True):
            yield shard.attention_gemm(name, num_tokens, int(outputs), int(inputs))

    def core_fields(self, shard: Shard) -> dict[str, Any]:
        heads = super().core_fields(shard) | {"index_head_dim": self.index_head_dim, "top_k": self.top_k}
        return {name: value for name, value in heads.items() if name != "window_tokens"}

    def bytes_per_token(self, shard: Shard) -> float:
        """Keys and values, and the indexer's key in bf16, which every rank caches."""
        return super().bytes_per_token(shard) + self.index_head_dim * BF16_BYTES


KIND = BlockSparseAttention
