"""Mamba-1 (arXiv:2312.00752) as in Jamba and Falcon-Mamba: each channel is a head with a state and a step of its own.

A layer projects its input to x and a gate; x passes a short causal convolution; steps of low rank, B and C are products
of it; the scan and the output's projection follow (`modeling_jamba.py`, `modeling_mamba.py` and
`modeling_falcon_mamba.py` of transformers 5.24; vLLM 0.18 `layers/mamba/mamba_mixer.py`).
"""

from collections.abc import Iterator
from typing import ClassVar

from windtunnel.model.attention.mamba2 import Mamba2
from windtunnel.model.config_reader import ConfigReader
from windtunnel.model.operators import BF16_BYTES, Launch, Op, Size
from windtunnel.model.shape import Shard


class Mamba1(Mamba2, tag="mamba1", tag_field="type", kw_only=True):
    """A Mamba-1 layer: `num_heads` channels, each with `state_size` values of state."""

    operators: ClassVar[tuple[type[Op], ...]] = ()
    layer_types: ClassVar[tuple[str, ...]] = ("mamba1",)
    text = "Mamba-1"
    rank: int
    """Rank of the step sizes."""

    @classmethod
    def reads(cls, reader: ConfigReader, index: int) -> bool:
        """Whether it is none of the layers with attention, of which there is one in each period (Jamba)."""
        period, offset = (reader.count(f"attn_layer_{key}", default=0, minimum=0) for key in ("period", "offset"))
        return period > 0 and index % period != offset

    @classmethod
    def read(cls, reader: ConfigReader, index: int, layer_type: str) -> "Mamba1":
        """Return the recurrence of a layer; beside feed-forwards (Jamba) it norms steps, B and C with weights, and
        `intermediate_size` is not its own."""
        hidden_size, given = reader.count("hidden_size"), reader.first("time_step_rank")[1] not in (None, "auto")
        inner_size, is_alone = reader.count("mamba_expand", "expand") * hidden_size, bool(reader.architecture.only)
        return cls(
            num_heads=reader.count("intermediate_size", default=inner_size) if is_alone else inner_size,
            head_dim=1,
            num_groups=1,
            state_size=reader.count("ssm_state_size"),
            rank=reader.count("time_step_rank") if given else -(-hidden_size // 16),
            conv_kernel_size=reader.count("conv_kernel"),
            chunk_size=0,  # the scan's kernel takes token after token
            conv_bias=reader.flag("use_conv_bias", default=True),
            bias=reader.flag("mamba_proj_bias"),
            norm=not is_alone,
        )

    @property
    def num_steps(self) -> int:
        """Values that the steps of low rank, B and C have together."""
        return self.rank + 2 * self.state_size

    def num_parameters(self, hidden_size: int) -> int:
        """Projections of inputs and outputs, of steps, B and C and back from steps; of each channel the convolution,
        decays, skip and step bias."""
        channel = self.conv_kernel_size + self.conv_bias + self.state_size + 2 + 2 * self.bias
        return self.inner_size * (3 * hidden_size + self.num_steps + self.rank + channel) + self.bias * hidden_size

    def norm_parameters(self) -> int:
        return self.num_steps if self.norm else 0

    def repeated_parameters(self, hidden_size: int, tp: int) -> tuple[int, float]:
        return 0, 1.0

    def rank_channels(self, tp: int) -> int:
        return self.inner_size // tp

    def projections(self, shard: Shard, num_tokens: Size) -> Iterator[Launch]:
        """Yield four products; steps, B and C are summed over ranks."""
        width, inner = shard.model.hidden_size, self.inner_size // shard.tp
        yield shard.attention_gemm("mamba_in_proj", num_tokens, 2 * inner, width)
        yield shard.attention_gemm("mamba_x_proj", num_tokens, self.num_steps, inner)
        if shard.tp > 1:
            message = num_tokens * self.num_steps * BF16_BYTES
            yield Launch("mamba_x_all_reduce", shard.collective("all_reduce", message, shard.tp))
        yield shard.attention_gemm("mamba_dt_proj", num_tokens, inner, self.rank)
        yield shard.attention_gemm("mamba_out_proj", num_tokens, width, inner)


KIND = Mamba1
