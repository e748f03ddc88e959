"""A dense feed-forward: two matrices and an activation between them, or three with a gate (SwiGLU, GeGLU)."""

from collections.abc import Iterable, Iterator
from typing import ClassVar

from windtunnel.model.config_reader import ConfigReader, number_of
from windtunnel.model.operators import BF16_BYTES, Elementwise, Gemm, Launch, Size
from windtunnel.model.precision import ACTIVATION_BITS, Format
from windtunnel.model.quantization import Names
from windtunnel.model.shape import HIDDEN_STATES, FeedForward, FeedForwardParameters, Shard
from windtunnel.schema import Schema


class DenseFeedForward(Schema, FeedForward, tag="dense", tag_field="type"):
    """A feed-forward of `intermediate_size`; gated ones (SwiGLU, GeGLU) have three matrices, plain ones two."""

    layer_types: ClassVar[tuple[str, ...]] = ("mlp",)
    modules: ClassVar[tuple[Names, ...]] = (("mlp.down_proj", "mlp.fc2", "mlp.c_proj"),)
    intermediate_size: int
    gated: bool = True
    bias: bool = False

    @classmethod
    def layers(cls, reader: ConfigReader) -> Iterable[bool]:
        """Layers that no other kind has are dense."""
        return [True] * reader.num_layers

    @classmethod
    def read(cls, reader: ConfigReader) -> "DenseFeedForward":
        architecture = reader.architecture
        multiple = reader.count("expansion_ratio", default=architecture.width_multiple or 0, minimum=0)
        width = reader.count(
            "intermediate_size_mlp",
            "block_ff_dim",
            "dense_intermediate_size",
            "intermediate_size",
            "ffn_hidden_size",
            "ffn_dim",
            "n_inner",
            default=multiple * reader.count("hidden_size") or None,
        )
        # Qwen 1 publishes the sum of its gate and up projections' widths.
        if reader.model_type == "qwen":
            width //= 2
        if reader.flag("block_auto_adjust_ff_dim"):
            # Two thirds, for a gate's sake, times a factor, rounded up (`modeling_lfm2.py`, `Lfm2MLP`).
            key, multiple = "block_ffn_dim_multiplier", reader.count("block_multiple_of")
            factor = number_of(key, reader.raw.get(key), 1_000, reader.name)
            width = -(-int(factor * (2 * width // 3)) // multiple) * multiple
        return cls(intermediate_size=width, gated=architecture.gated, bias=reader.rule(architecture.feed_forward_bias))

    def parameters(self, hidden_size: int) -> FeedForwardParameters:
        return FeedForwardParameters(
            dense=matrix_parameters(hidden_size, self.intermediate_size, self.gated, self.bias)
        )

    def weight_bits(self, shard: Shard) -> float:
        return self.parameters(shard.model.hidden_size).dense * shard.bits("weights") / shard.tp

    def input_format(self, shard: Shard) -> Format:
        return shard.precision.weights

    def launches(self, shard: Shard, num_tokens: Size) -> Iterator[Launch]:
        yield from matrix_launches(shard, num_tokens, self.intermediate_size, self.gated)
        yield from shard.all_reduce("feed_forward_all_reduce", num_tokens)

    def peak_values(self, shard: Shard) -> float:
        """Hidden states, gate and up, and their product."""
        return (3 if self.gated else 2) * self.intermediate_size / shard.tp + HIDDEN_STATES * shard.model.hidden_size


def matrix_parameters(hidden_size: int, intermediate_size: int, gated: bool, bias: bool) -> int:
    """Count the parameters of two or three matrices, and their biases."""
    up = 2 * intermediate_size if gated else intermediate_size
    return hidden_size * (up + intermediate_size) + (up + hidden_size if bias else 0)


def matrix_launches(
    shard: Shard, num_tokens: Size, intermediate_size: int, gated: bool, prefix: str = ""
) -> Iterator[Launch]:
    """Yield the matrix products of a dense feed-forward or of shared experts, and the activation between them."""
    width, weights = shard.model.hidden_size, shard.precision.weights
    inner = -(-intermediate_size // shard.tp)
    up = 2 * inner if gated else inner
    yield Launch(f"{prefix}gate_up_proj" if gated else f"{prefix}up_proj", Gemm(num_tokens, up, width, weights))
    written = inner * ACTIVATION_BITS[weights] / 8
    yield Launch(f"{prefix}activation", Elementwise("activation", num_tokens, up * BF16_BYTES + written))
    yield Launch(f"{prefix}down_proj", Gemm(num_tokens, width, inner, weights))


KIND = DenseFeedForward
