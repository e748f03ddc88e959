"""Hyper-connections (arXiv:2512.24880, constrained to a manifold): a residual of several streams.

Before attention and before the feed-forward a layer mixes its streams into one hidden state; after each it spreads the
result over them. Weights of the mixing are computed from the streams themselves (vLLM 0.24 `layers/mhc.py`,
`kernels/mhc/tilelang.py`).
"""

from dataclasses import dataclass
from typing import ClassVar

from windtunnel.model.operators import BF16_BYTES, FP32_BYTES, Op, Size


@dataclass(frozen=True)
class HyperConnection(Op):
    """One mixing of `num_streams` streams into a hidden state (`pre`), or its spreading over them (`post`)."""

    kind: ClassVar[str] = "hyper_connection"
    axes: ClassVar[tuple[str, ...]] = ("num_tokens",)
    shown: ClassVar[str] = "{num_tokens} x {num_streams} x {hidden_size}"
    op: str
    num_tokens: Size
    hidden_size: int
    num_streams: int

    @property
    def flops(self) -> Size:
        mixed = self.num_streams * self.hidden_size
        if self.op == "post":
            return 2.0 * self.num_tokens * (self.num_streams + 1) * mixed
        return 2.0 * self.num_tokens * (mixing_weights(self.num_streams) + 1) * mixed

    @property
    def num_bytes(self) -> Size:
        """Streams and hidden state, read or written; streams are written anew afterwards."""
        streams = self.num_streams * self.hidden_size * BF16_BYTES
        if self.op == "post":
            return self.num_tokens * (2 * streams + self.hidden_size * BF16_BYTES)
        weights = site_parameters(self.hidden_size, self.num_streams) * FP32_BYTES
        return weights + self.num_tokens * (streams + self.hidden_size * BF16_BYTES)


def mixing_weights(num_streams: int) -> int:
    """Return the weights of one mixing and spreading: of streams to the hidden state and back, and among streams."""
    return (2 + num_streams) * num_streams


def site_parameters(hidden_size: int, num_streams: int) -> int:
    """Count the parameters at one place of a layer."""
    return mixing_weights(num_streams) * (num_streams * hidden_size + 1) + 3
