"""Gated short convolutions in place of attention, as in LFM2: a state of a few hidden vectors per request.

A layer projects its input to two gates and a value; the gated value passes a causal convolution over each channel's
last tokens, then the other gate and the output's projection (`modeling_lfm2.py` of transformers 5.24,
`Lfm2ShortConv`; vLLM 0.18 `layers/mamba/short_conv.py`).
"""

from collections.abc import Iterator
from typing import ClassVar

from windtunnel.model.attention.mamba2 import CausalConvolution
from windtunnel.model.config_reader import ConfigReader
from windtunnel.model.operators import BF16_BYTES, Launch, Size
from windtunnel.model.quantization import Names
from windtunnel.model.shape import Recurrence, Shard
from windtunnel.schema import Schema


class ShortConvolution(Schema, Recurrence, tag="short_convolution", tag_field="type"):
    """A gated convolution of `kernel_size` tokens over `num_channels` channels."""

    layer_types: ClassVar[tuple[str, ...]] = ("conv",)
    modules: ClassVar[tuple[Names, ...]] = (("conv.in_proj",), ("conv.out_proj",))
    text = "convolution"
    divided_by_tp = "channels"
    num_channels: int
    kernel_size: int
    bias: bool = False
    """Whether both projections and the convolution have one."""

    @classmethod
    def reads(cls, reader: ConfigReader, index: int) -> bool:
        """Whether it is none of the layers that a config without names lists as attention."""
        is_listed = reader.raw.get("full_attn_idxs") is not None and not reader.layer_type(index)
        return is_listed and index not in reader.numbers("full_attn_idxs")

    @classmethod
    def read(cls, reader: ConfigReader, index: int, layer_type: str) -> "ShortConvolution":
        """Return the convolution of a layer, which has a channel for each hidden value."""
        channels, size = reader.count("hidden_size"), reader.count("conv_L_cache", minimum=2)
        return cls(num_channels=channels, kernel_size=size, bias=reader.flag("conv_bias"))

    @property
    def widest_tp(self) -> int:
        return self.num_channels

    def num_parameters(self, hidden_size: int) -> int:
        biases = 4 * self.num_channels + hidden_size if self.bias else 0
        return self.num_channels * (4 * hidden_size + self.kernel_size) + biases

    def projections(self, shard: Shard, num_tokens: Size) -> Iterator[Launch]:
        width, channels = shard.model.hidden_size, self.num_channels // shard.tp
        yield shard.attention_gemm("conv_in_proj", num_tokens, 3 * channels, width)
        yield shard.elementwise("conv_input_gate", num_tokens, 3 * channels * BF16_BYTES)
        yield shard.elementwise("conv_output_gate", num_tokens, 3 * channels * BF16_BYTES)
        yield shard.attention_gemm("conv_out_proj", num_tokens, width, channels)

    def core_launches(self, shard: Shard, batch: Size, num_tokens: Size, phase: str) -> Iterator[Launch]:
        channels, decodes = self.num_channels // shard.tp, phase == "decode"
        core = CausalConvolution(batch, num_tokens, channels, self.kernel_size, decodes)
        yield Launch(f"short_convolution_{phase}", core)

    def state_bytes(self, shard: Shard) -> float:
        """The inputs that the convolution looks back on (vLLM 0.18 `mamba_utils.py`, `short_conv_state_shape`)."""
        return (self.kernel_size - 1) * self.num_channels / shard.tp * BF16_BYTES


KIND = ShortConvolution
