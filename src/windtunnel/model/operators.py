"""Operators that kinds of layers share: shapes that know their arithmetic and bytes.

Every dimension may be a number or a numpy array; arrays broadcast, so one `Op` can stand for a family of shapes (a
GEMM at every token count) and an estimator prices the family in one call. An `Op` is one execution on one rank;
`Launch.count` says how often a step runs it. Operators of one kind of layer alone stand in the file of that kind
(`model/attention/`, `model/feed_forward/`).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any, ClassVar

import numpy as np

from windtunnel.compiled.arrays import Floats
from windtunnel.model.precision import ACTIVATION_BITS, BITS, Format
from windtunnel.units import format_bytes

Size = int | float | Floats
"""A dimension: one number, or an array of them."""

BF16_BYTES = 2.0
FP32_BYTES = 4.0

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")


@dataclass(frozen=True)
class Op(ABC):
    """An operator: a frozen dataclass of dimensions.

    What pricing needs to know of it is said here, so that a new kind of layer brings operators of its own. Without a
    closed form and a table of measurements it is priced by a plain roofline, and estimates say so.
    """

    kind: ClassVar[str]
    """Name of the kind of operator, in files and tables."""
    axes: ClassVar[tuple[str, ...]]
    """Dimensions along which measurements are interpolated; the others identify a measured curve."""
    shares_batch: ClassVar[str | None] = None
    """Dimension that acts like the batch: kernels see only the product of both. With other shapes left out, the median
    error falls from 2.8 % to 2.4 % (decode), 4.7 % to 3.5 % (latent prefill), 2.7 % to 1.8 % (Gated DeltaNet); of
    latent decode, whose heads share the one cache, it rises from 3.2 % to 4.6 %."""
    is_communication: ClassVar[bool] = False
    """Whether it moves data between ranks."""
    shown: ClassVar[str] = ""
    """Dimensions for people, as a format string over the operator's fields and properties."""

    @staticmethod
    def projections(site: Mapping[str, float]) -> Iterator[tuple[float, float]]:  # noqa: ARG004
        """Yield (n, k) of the products that were measured with it and that a step launches apart, by its dimensions."""
        yield from ()

    @property
    @abstractmethod
    def flops(self) -> Size:
        """Arithmetic of one execution."""

    @property
    @abstractmethod
    def num_bytes(self) -> Size:
        """Bytes that one execution moves."""

    @property
    def held_bytes(self) -> Size:
        """Bytes of weights, keys and values, or states that one execution at least reads: those of one layer."""
        return self.num_bytes if getattr(self, "decode", isinstance(self, DecodeBatch)) else 0.0

    @property
    def text(self) -> str:
        """Dimensions for people: m x n x k of a GEMM, batch x context and heads of attention, ..."""
        return _SizeFormatter().format(self.shown, self)

    @property
    def num_kernels(self) -> int:
        """Kernels of one execution."""
        return 1

    @property
    def compute_format(self) -> Format:
        """Format whose peak rate computes it: that of its weights."""
        return getattr(self, "format", Format.BF16)

    @property
    def variant(self) -> str:
        """Name of its coefficients and tables within its kind: its number format, its collective, or its phase where it
        has a flag `decode`."""
        if hasattr(self, "decode"):
            return "decode" if self.decode else "prefill"
        return str(next((getattr(self, name) for name in ("format", "kv_format", "op") if hasattr(self, name)), "any"))


class _SizeFormatter(Formatter):
    """A formatter of one object's fields: dimensions as `size_text` shows them, `{message_bytes:bytes}` in bytes."""

    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ARG002
        return getattr(args[0], str(key))

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec == "bytes":
            return format_bytes(float(np.asarray(value)))
        return format(value, format_spec) if format_spec or isinstance(value, str) else size_text(value)


def size_text(size: Size) -> str:
    """Return a dimension for people."""
    value = float(np.asarray(size))
    return f"{value:.0f}" if value >= 100 or value.is_integer() else f"{value:.3g}"


@dataclass(frozen=True)
class Gemm(Op):
    """`[m, k] x [k, n]` with weights in `format`; bf16 output."""

    kind: ClassVar[str] = "gemm"
    axes: ClassVar[tuple[str, ...]] = ("m",)
    shown: ClassVar[str] = "{m} x {n} x {k} {format}"
    m: Size
    n: int
    k: int
    format: Format = Format.BF16

    @property
    def flops(self) -> Size:
        return 2.0 * self.m * self.n * self.k

    @property
    def held_bytes(self) -> Size:
        return self.n * self.k * BITS[self.format] / 8

    @property
    def num_bytes(self) -> Size:
        return self.held_bytes + self.m * self.k * ACTIVATION_BITS[self.format] / 8 + self.m * self.n * BF16_BYTES


def prefill_context_tokens(batch: Size, num_tokens: Size) -> Size:
    """Return the keys that prefill chunks see in all, with `batch` and `num_tokens` as in `PrefillBatch`.

    Whole prompts see their own tokens. A batch b below one is a chunk of c tokens after p cached ones: its length is
    s = 2 p + c and b = c / s, so p + c = s (1 + b) / 2.
    """
    return num_tokens * np.where(np.asarray(batch) < 1, (1 + batch) / 2, batch)


@dataclass(frozen=True)
class Batch(Op):
    """Requests that attend together; the second axis says how long they are."""

    batch: Size

    @property
    @abstractmethod
    def num_queries(self) -> Size:
        """Tokens that are computed."""

    @abstractmethod
    def pairs_within(self, window_tokens: int) -> Size:
        """Return the pairs of a query and one of the last `window_tokens` tokens that it sees; 0: of all."""

    def read_within(self, window_tokens: int) -> Size:
        """Return the cached tokens that are read from memory where each query meets `window_tokens` tokens."""
        return self.pairs_within(window_tokens)

    @property
    def batch_text(self) -> str:
        return f"{size_text(self.batch)} x {size_text(getattr(self, self.axes[1]))}"


@dataclass(frozen=True)
class PrefillBatch(Batch):
    """A batch of `batch` prompts of `num_tokens` tokens each, without earlier context.

    A batch of chunks that differ, or that have context already cached, is expressed by the two sums that decide its
    cost: with C tokens and W query-key pairs in all, `num_tokens = 2 W / C` and `batch = C / num_tokens` (both may be
    fractions). Equal prompts are then exact, and a chunk of c tokens after p cached ones has W = c (p + c / 2).
    """

    axes: ClassVar[tuple[str, ...]] = ("batch", "num_tokens")
    num_tokens: Size

    @property
    def context_tokens(self) -> Size:
        """Keys that all chunks see together."""
        return prefill_context_tokens(self.batch, self.num_tokens)

    @property
    def num_queries(self) -> Size:
        return self.batch * self.num_tokens

    def read_within(self, window_tokens: int) -> Size:  # noqa: ARG002
        """Return every token once: neighbouring queries meet mostly the same ones, which stay in the cache."""
        return self.context_tokens

    def pairs_within(self, window_tokens: int) -> Size:
        """Return the query-key pairs: s^2 / 2, or s w - w^2 / 2 in a window of w < s."""
        seen = np.minimum(self.num_tokens, window_tokens) if window_tokens else self.num_tokens
        return self.batch * (self.num_tokens * seen - seen * seen / 2)


@dataclass(frozen=True)
class DecodeBatch(Batch):
    """One query token for each of `batch` requests that have `context_tokens` keys and values cached (their mean)."""

    axes: ClassVar[tuple[str, ...]] = ("batch", "context_tokens")
    context_tokens: Size

    @property
    def num_queries(self) -> Size:
        return self.batch

    def pairs_within(self, window_tokens: int) -> Size:
        seen = np.minimum(self.context_tokens, window_tokens) if window_tokens else self.context_tokens
        return self.batch * seen


@dataclass(frozen=True)
class Elementwise(Op):
    """A kernel that only moves data: a norm, rope, an activation, a cache write, an embedding lookup, sampling."""

    kind: ClassVar[str] = "elementwise"
    axes: ClassVar[tuple[str, ...]] = ("rows",)
    shown: ClassVar[str] = "{rows} x {bytes_per_row:bytes}"
    name: str
    rows: Size
    bytes_per_row: float

    @property
    def flops(self) -> Size:
        return 0.0 * self.rows

    @property
    def num_bytes(self) -> Size:
        return self.rows * self.bytes_per_row


@dataclass(frozen=True)
class Collective(Op):
    """A collective over `num_ranks`; `message_bytes` as nccl-tests defines a collective's size.

    all_reduce: the buffer; all_gather and reduce_scatter: the whole (gathered) buffer; all_to_all: one rank's send
    buffer; send_recv: the message. `span_nodes` is the number of nodes that hold the ranks.
    """

    kind: ClassVar[str] = "collective"
    axes: ClassVar[tuple[str, ...]] = ("message_bytes",)
    is_communication: ClassVar[bool] = True
    shown: ClassVar[str] = "{message_bytes:bytes} over {num_ranks}"
    op: str
    message_bytes: Size
    num_ranks: int
    span_nodes: int = 1

    def __post_init__(self) -> None:
        if self.op not in COLLECTIVES:
            raise ValueError(f"there is no collective {self.op!r}; known: {', '.join(COLLECTIVES)}")

    @property
    def flops(self) -> Size:
        return 0.0 * self.message_bytes

    @property
    def num_bytes(self) -> Size:
        """Bytes that one rank sends over the link (the bus-bandwidth convention of nccl-tests)."""
        share = (self.num_ranks - 1) / self.num_ranks
        return self.message_bytes * {"all_reduce": 2 * share, "send_recv": 1.0}.get(self.op, share)


@dataclass(frozen=True)
class HyperConnection(Op):
    """One mixing of the `num_streams` streams of a residual into a hidden state (`pre`), or its spreading over them
    (`post`).

    A layer mixes before attention and before the feed-forward, and spreads after each. Weights of the mixing are
    computed from the streams themselves, constrained to a manifold (arXiv:2512.24880; vLLM 0.24 `layers/mhc.py`,
    `kernels/mhc/tilelang.py`).
    """

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


@dataclass(frozen=True)
class Launch:
    """An operator at its place in a step: the name that people know, and how many times the step runs it."""

    name: str
    op: Op
    count: float = 1.0
    adds: Size = 1.0
    """Share of the operator's time that lengthens the step: 0 where it runs beside something that takes longer."""


def axis_values(op: Op) -> Mapping[str, Size]:
    """Return the dimensions of `op` along which measurements are interpolated."""
    return {name: getattr(op, name) for name in op.axes}
