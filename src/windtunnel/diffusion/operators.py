"""Operators of a denoising step, of the text encoders and of the decoder, as one device of a job runs them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from windtunnel.diffusion.model import Blocks, Decoder, DiffusionModel, TextEncoder
from windtunnel.model import operators as ops
from windtunnel.model.operators import BF16_BYTES, FP32_BYTES

Part = Literal["products", "attention", "elementwise", "exchange", "text encoder", "decoder"]
"""Parts of a batch's time; a result adds `waiting` for the host and `saving` of images."""


@dataclass(frozen=True)
class FullAttention(ops.Op):
    """Softmax attention of every query to every key."""

    kind: ClassVar[str] = "full_attention"
    axes: ClassVar[tuple[str, ...]] = ("queries",)
    shown: ClassVar[str] = "{batch} x {queries} x {keys}, {num_heads} x {head_dim}"
    batch: float
    queries: float
    keys: float
    num_heads: float
    head_dim: int

    @property
    def flops(self) -> float:
        return 4.0 * self.batch * self.queries * self.keys * self.num_heads * self.head_dim

    @property
    def num_bytes(self) -> float:
        return 2 * BF16_BYTES * self.batch * (self.queries + self.keys) * self.num_heads * self.head_dim


@dataclass(frozen=True)
class Convolution(ops.Op):
    """A convolution of width 3 over `voxels` outputs, in two or three dimensions."""

    kind: ClassVar[str] = "convolution"
    axes: ClassVar[tuple[str, ...]] = ("voxels",)
    shown: ClassVar[str] = "{voxels} x {in_channels} x {out_channels}"
    voxels: float
    in_channels: int
    out_channels: int
    dimensions: int

    @property
    def flops(self) -> float:
        return 2.0 * float(3**self.dimensions) * self.voxels * self.in_channels * self.out_channels

    @property
    def num_bytes(self) -> float:
        return BF16_BYTES * self.voxels * (self.in_channels + self.out_channels)


@dataclass(frozen=True)
class Work:
    """An operator of a part, executed `count` times."""

    part: Part
    op: ops.Op
    count: float = 1.0

    @property
    def flops(self) -> float:
        return float(self.op.flops) * self.count


@dataclass(frozen=True)
class Share:
    """What one device computes of a forward pass."""

    rows: int
    """Images or videos of the pass, both passes of batched guidance counted."""
    image_tokens: int
    text_tokens: int
    ulysses: int = 1
    ring: int = 1

    @property
    def ranks(self) -> int:
        return self.ulysses * self.ring

    @property
    def own_image(self) -> float:
        """Image tokens of the device, over all rows."""
        return self.rows * self.image_tokens / self.ranks

    @property
    def own_text(self) -> float:
        """Text tokens of the device: xDiT splits them where the ranks divide them, and else repeats them."""
        return self.rows * self.text_tokens / (1 if self.text_tokens % self.ranks else self.ranks)


# Passes over an activation of bf16 that PyTorch's eager operators make (fp32 counts twice): estimates from
# the blocks of diffusers 0.35, in which a norm in fp32, for instance, is seven operators.
STREAM_PASSES = 24
"""A stream of a block: two norms with their scale and shift, two gates and two residuals."""
QK_NORM_PASSES = 34
"""RMS norms of queries and keys in fp32."""
ROTARY_PASSES = 48
"""Rotation of queries and keys in fp32: rotated copies, products with cosines and sines, their sum."""
FP32_NORM_PASSES = 12
"""More passes of a stream whose norms are in fp32."""
CONVOLUTION_PASSES = 8
"""SANA's feed-forward: transposes, a depthwise convolution of width 3, its activation and gate."""
LINEAR_PASSES = 30
"""Linear attention: rectified queries and keys, products with the state and their normalisation in fp32."""
EXCHANGE_PASSES = 12
"""Copies of queries, keys, values and outputs around attention."""
MERGE_PASSES = 8
"""Joining a ring round's outputs with the former ones, in fp32."""

STREAM_KERNELS, QK_NORM_KERNELS, ROTARY_KERNELS, ATTENTION_KERNELS = 26, 12, 18, 14
"""Kernels that a block launches for each stream, and for each attention."""
FP32_NORM_KERNELS, LINEAR_KERNELS, SPLIT_LINEAR_KERNELS = 8, 10, 25
"""Further kernels of a stream with norms in fp32, and of linear attention with its convolution, on one device and
divided."""
ULYSSES_KERNELS, RING_KERNELS = 24, 12
"""Kernel launches' worth of host work for the four exchanges of Ulysses, and for a round of the ring."""


def block_work(model: DiffusionModel, blocks: Blocks, share: Share) -> Iterator[Work]:
    """Yield the work of one block."""
    d, image, text = model.hidden_size, share.own_image, share.own_text
    streams = {"double": (image, text), "single": (image + text,)}.get(blocks.type, (image,))
    for tokens in streams:
        yield from _stream_work(model, tokens, share.rows)
    joint = blocks.type in ("double", "single")
    if blocks.type == "linear":
        yield from _linear_work(model, share)
    else:
        yield from _attention_work(model, share, share.text_tokens if joint else 0)
    if blocks.image_attention:
        yield Work("products", ops.Gemm(round(image), 4 * d, d))
        yield from _attention_work(model, share, 0)
    if not joint:
        context = model.context_size or d
        yield Work("products", ops.Gemm(round(image), d, d), 2)
        yield Work("products", ops.Gemm(share.rows * share.text_tokens, 2 * d, context))
        queries = image / share.rows
        op = FullAttention(share.rows, queries, share.text_tokens, model.num_heads, model.head_dim)
        yield Work("attention", op)
        passes = EXCHANGE_PASSES + QK_NORM_PASSES / 2 * model.qk_norm
        yield Work("elementwise", ops.Elementwise("cross-attention", image, d * BF16_BYTES * passes))
    if blocks.long_skip:
        yield Work("products", ops.Gemm(round(image), d, 2 * d))


def _stream_work(model: DiffusionModel, tokens: float, rows: int) -> Iterator[Work]:
    """Yield the products of a stream, its modulation, and its norms, gates and activations."""
    d, wide = model.hidden_size, model.feed_forward_size
    yield Work("products", ops.Gemm(round(tokens), 3 * d, d))
    yield Work("products", ops.Gemm(round(tokens), d, d))
    yield Work("products", ops.Gemm(round(tokens), (2 if model.gated else 1) * wide, d))
    yield Work("products", ops.Gemm(round(tokens), d, wide))
    if model.modulation:
        yield Work("products", ops.Gemm(rows, model.modulation * d, d))
    activation = wide * (4 if model.gated else 2)
    row = (d * (STREAM_PASSES + FP32_NORM_PASSES * model.fp32_norms) + activation) * BF16_BYTES
    yield Work("elementwise", ops.Elementwise("norms and activations", tokens, row))


def _linear_work(model: DiffusionModel, share: Share) -> Iterator[Work]:
    """Yield linear attention among image tokens, and the convolution of the feed-forward, which no degree divides."""
    d, image = model.hidden_size, share.own_image
    yield Work("elementwise", ops.Elementwise("linear attention", image, d * BF16_BYTES * LINEAR_PASSES))
    yield Work("attention", ops.Gemm(round(image), 2 * model.head_dim, d))
    row = 2 * model.feed_forward_size * BF16_BYTES * CONVOLUTION_PASSES
    yield Work("elementwise", ops.Elementwise("convolution", share.rows * share.image_tokens, row))


def _attention_work(model: DiffusionModel, share: Share, text_tokens: int) -> Iterator[Work]:
    """Yield attention among `text_tokens` and all image tokens, as rounds of a ring over heads that Ulysses divides."""
    d, heads = model.hidden_size, model.num_heads / share.ulysses
    tokens = share.own_image + (share.own_text if text_tokens else 0)
    passes = EXCHANGE_PASSES + QK_NORM_PASSES * model.qk_norm + ROTARY_PASSES * model.rotary
    yield Work("elementwise", ops.Elementwise("queries and keys", tokens, d * passes * BF16_BYTES))
    round_tokens = (share.image_tokens + text_tokens) / share.ring
    op = FullAttention(share.rows, round_tokens, round_tokens, heads, model.head_dim)
    yield Work("attention", op, share.ring)
    if share.ulysses > 1:
        yield Work("exchange", ops.Collective("all_to_all", tokens * d * BF16_BYTES, share.ulysses), 4)
    if share.ring > 1:
        width = d / share.ulysses
        rows = share.rows * round_tokens
        merged = ops.Elementwise("merged rounds", rows, width * MERGE_PASSES * FP32_BYTES)
        yield Work("elementwise", merged, share.ring)
        keys_values = ops.Collective("send_recv", 2 * rows * width * BF16_BYTES, share.ring)
        yield Work("exchange", keys_values, share.ring - 1)


def block_kernels(model: DiffusionModel, blocks: Blocks, share: Share) -> int:
    """Return the kernels that the host launches for one block."""
    streams, is_split = 2 if blocks.type == "double" else 1, share.ranks > 1
    norms = QK_NORM_KERNELS * model.qk_norm
    exchange = ULYSSES_KERNELS * (share.ulysses > 1) + (RING_KERNELS * share.ring if share.ring > 1 else 0)
    each = ATTENTION_KERNELS + norms + ROTARY_KERNELS * model.rotary + exchange
    kernels = (STREAM_KERNELS + FP32_NORM_KERNELS * model.fp32_norms) * streams + 3 * blocks.long_skip
    kernels += each * (2 if blocks.image_attention else 1)
    if blocks.type in ("cross", "linear"):
        kernels += ATTENTION_KERNELS + norms
    if blocks.type == "linear":
        kernels += LINEAR_KERNELS + SPLIT_LINEAR_KERNELS * is_split
    return kernels


def encoder_work(encoder: TextEncoder, prompts: int) -> Iterator[Work]:
    """Yield the products of a text encoder over some prompts; its attention to few tokens is left out."""
    columns = encoder.parameters // (encoder.layers * encoder.hidden_size)
    op = ops.Gemm(prompts * encoder.tokens, max(columns, 1), encoder.hidden_size)
    yield Work("text encoder", op, encoder.layers)


DECODER_PASSES = 12
"""Passes over a residual block's activations for two group norms, two activations and the residual."""


def decoder_work(decoder: Decoder, height: int, width: int, frames: int) -> Iterator[Work]:
    """Yield the convolutions of decoding one image or video (Rombach et al., arXiv:2112.10752, appendix D.1.1).

    Time doubles with height and width in the first stages, until `temporal_scale` is reached.
    """
    dimensions, temporal = (2, 1) if decoder.temporal_scale == 1 else (3, decoder.temporal_scale)
    former = decoder.channels[0]
    for stage, channels in enumerate(decoder.channels):
        side = 2 ** (len(decoder.channels) - 1 - stage)
        per_frame = height // side * (width // side)
        time = max(temporal // 2**stage, 1)
        voxels = float((-(-(frames - 1) // time) + 1) * per_frame)
        yield Work("decoder", Convolution(voxels, former, channels, dimensions))
        yield Work("decoder", Convolution(voxels, channels, channels, dimensions), 2 * decoder.resnets - 1)
        row = channels * BF16_BYTES * DECODER_PASSES
        yield Work("decoder", ops.Elementwise("norms", voxels, row), decoder.resnets)
        if side > 1:
            yield Work("decoder", Convolution(4 * voxels, channels, channels, 2))
        former = channels
