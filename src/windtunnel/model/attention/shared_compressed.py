"""Compressed attention whose layers share what few of them compress (DeepSeek-V4.1, arXiv:2609.19969).

A layer has a sliding window of its own, and where its ratio is not 0 attends to the `top_k` compressed tokens beside it
that an indexer chose. Few layers compress (`kv_source_layer_ids`) and few have an indexer (`index_source_layer_ids`);
the others read what the last of these before them wrote. An indexer scores every compressed token: to look only at the
candidates of a first one is an option (vLLM 0.33 `models/deepseek_v41/attention.py`, `indexer_sparse_logits`).
"""

from windtunnel.errors import InputError
from windtunnel.model.attention.compressed import CHOSEN_RATIO, CompressedAttention
from windtunnel.model.config_reader import ConfigReader
from windtunnel.model.operators import BF16_BYTES, FP32_BYTES
from windtunnel.model.precision import Format
from windtunnel.model.shape import Shard

_SCALED = 32
"""Values of a cached key that share a scale of one byte: 528 bytes a key on Blackwell. Hopper's kernels keep the 584 of
DeepSeek-V4 (same file, `_use_v41_mxfp8_kv_record`)."""


class SharedCompressedAttention(CompressedAttention, tag="shared_compressed", tag_field="type"):
    """Compressed attention; `compress_ratio` is that of the compressed tokens which the layer reads."""

    indexes: bool = False
    """Whether it has an indexer, which chooses for layers after it too."""
    is_tail: bool = False
    """Whether nothing after the last compressor reads more than its windows of it."""

    @classmethod
    def reads(cls, reader: ConfigReader, index: int) -> bool:
        return reader.raw.get("kv_source_layer_ids") is not None

    @classmethod
    def read(cls, reader: ConfigReader, index: int, layer_type: str) -> "SharedCompressedAttention":
        """Return the attention of layer `index`; the ratios of draft layers follow those of the layers."""
        ratios = reader.numbers("compress_ratios")
        compressing, choosing = (reader.numbers(f"{name}_source_layer_ids") for name in ("kv", "index"))
        if len(ratios) < reader.num_layers or not compressing or not CHOSEN_RATIO >= max(ratios) >= min(ratios) >= 0:
            raise InputError(
                f"{reader.name}: compress_ratios is {ratios!r} and kv_source_layer_ids {compressing!r}; a ratio for "
                f"each of the {reader.num_layers} layers, 0 to {CHOSEN_RATIO}, and a layer that compresses are needed"
            )
        before = [layer for layer in compressing if layer <= index]
        if ratios[index] and (not before or ratios[before[-1]] != ratios[index]):
            raise InputError(
                f"{reader.name}: layer {index} reads one of {ratios[index]} tokens, and kv_source_layer_ids "
                f"{compressing!r} has no layer before it that keeps them"
            )
        return cls(
            **cls.sizes(reader),
            compress_ratio=ratios[index],
            compresses=index in compressing,
            indexes=index in choosing,
            is_tail=index >= max(compressing),
        )

    @property
    def chooses(self) -> bool:
        return self.indexes

    @property
    def text(self) -> str:
        return "CSA2" if self.compress_ratio else "SWA"

    @property
    def tail_tokens(self) -> int | None:
        return self.sliding_window if self.is_tail else None

    def whole_parameters(self, hidden_size: int) -> int:
        """Count a compressor, whose weights and places there are only where tokens are joined, and the indexer's keys,
        which come of compressed tokens, and queries."""
        count, joined = 0, self.compress_ratio > 1
        if self.compresses:
            places = self.compress_ratio * joined
            count = self.head_dim * (hidden_size * (1 + joined) + places + self.index_head_dim)
        if self.indexes:
            count += (self.q_lora_rank * self.index_head_dim + hidden_size) * self.index_num_heads
        return count

    def norm_parameters(self) -> int:
        return self.q_lora_rank + self.head_dim + self.compresses * (self.head_dim + self.index_head_dim)

    def _key_bytes(self, shard: Shard) -> float:
        """Return the bytes of a cached key: in fp8 and bf16, and compressed ones in NVFP4 too (same file,
        `compressed_bytes_per_token`)."""
        match shard.precision.kv_cache:
            case Format.BF16:
                return self.head_dim * BF16_BYTES
            case Format.NVFP4:
                return self.head_dim / 2 + self.head_dim / 16
            case _:
                return self.head_dim + self.head_dim / _SCALED

    def bytes_per_token(self, shard: Shard) -> float:
        """Return the bytes of a token's part of a compressed key and of its indexer's, in MXFP4 beside keys in NVFP4;
        none where another layer keeps them, and a key where the layer has its window alone."""
        if not self.compress_ratio:
            return self._window_key_bytes(shard)
        indexed = self.index_head_dim + FP32_BYTES
        if shard.precision.kv_cache is Format.NVFP4:
            indexed = self.index_head_dim / 2 + self.index_head_dim / 32
        return (self._key_bytes(shard) + indexed) / self.compress_ratio if self.compresses else 0.0

    def state_bytes(self, shard: Shard) -> float:
        """Return the bytes of the window, and of values and weights in fp32 of tokens that are still to be joined."""
        if not self.compress_ratio:
            return 0.0
        joined = self.compresses and self.compress_ratio > 1
        pending = self.compress_ratio * 2 * self.head_dim * FP32_BYTES if joined else 0.0
        return self.sliding_window * self._window_key_bytes(shard) + pending

    def _window_key_bytes(self, shard: Shard) -> float:
        is_fp4 = shard.precision.kv_cache is Format.NVFP4
        return self.head_dim + self.head_dim / _SCALED if is_fp4 else self._key_bytes(shard)


KIND = SharedCompressedAttention
