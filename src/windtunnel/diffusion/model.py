"""Diffusion pipelines as counts: a denoising transformer, its text encoders and the decoder of its latents."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Literal

from windtunnel import catalog
from windtunnel.errors import InputError, did_you_mean
from windtunnel.schema import AtLeastOne, Schema, Whole, check_between, decode, read_yaml

HINT = "see docs/guides/diffusion.md"


class Blocks(Schema):
    """Equal blocks of a transformer."""

    type: Literal["double", "single", "cross", "linear"]
    """`double`: image and text have weights of their own and attend together (MMDiT; Esser et al., arXiv:2403.03206).
    `single`: one set of weights for both. `cross`: image tokens attend to each other, then to the text. `linear`: as
    `cross`, with linear attention among image tokens (SANA, arXiv:2410.10629)."""
    number: AtLeastOne
    image_attention: bool = False
    """Image tokens also attend among themselves in a second attention (Stable Diffusion 3.5 medium)."""
    long_skip: bool = False
    """A product of twice the width joins in an earlier block's output (Hunyuan-DiT)."""


class TextEncoder(Schema):
    """A text encoder: only its size matters, as it runs once."""

    parameters: AtLeastOne
    layers: AtLeastOne
    hidden_size: AtLeastOne
    tokens: AtLeastOne
    """Tokens of a prompt, padded."""


class Decoder(Schema):
    """The convolutional decoder of a variational autoencoder: stages from the latents' resolution to the pixels'."""

    channels: tuple[AtLeastOne, ...]
    """Channels of each stage; each but the last doubles height and width at its end."""
    resnets: AtLeastOne
    """Residual blocks of a stage, of two convolutions of width 3 each."""
    temporal_scale: AtLeastOne = 1
    """Frames of a latent frame; the first frame stands alone. Above 1, convolutions have three dimensions."""

    def check(self) -> None:
        check_between(1, 10, **{"the number of channels": len(self.channels)})

    @property
    def spatial_scale(self) -> int:
        return int(2 ** (len(self.channels) - 1))


class DiffusionModel(Schema, kw_only=True):
    """A pipeline from text to images or videos."""

    name: str
    hidden_size: AtLeastOne
    head_dim: AtLeastOne
    feed_forward_size: AtLeastOne
    gated: bool = False
    """The feed-forward has a gate: three products in place of two."""
    blocks: tuple[Blocks, ...]
    modulation: Whole = 6
    """Vectors of `hidden_size` that a block's own product computes from the time step, for each stream; 0: shared."""
    qk_norm: bool = False
    """Queries and keys have RMS norms, which eager PyTorch computes in fp32."""
    rotary: bool = False
    fp32_norms: bool = False
    """Layer norms and residuals are in fp32."""
    text_tokens: AtLeastOne
    context_size: AtLeastOne | None = None
    """Width of text that cross-attention meets; None: `hidden_size`."""
    patch_size: AtLeastOne = 2
    temporal_patch_size: AtLeastOne = 1
    guidance: Literal["none", "batched", "sequential"] = "batched"
    """Classifier-free guidance: both passes in one batch, or one after the other; `none`: distilled, one pass."""
    text_encoders: tuple[TextEncoder, ...]
    decoder: Decoder
    height: AtLeastOne
    width: AtLeastOne
    frames: AtLeastOne = 1
    steps: AtLeastOne
    """With height, width and frames: what the publisher recommends."""
    sources: dict[str, str] = {}

    def check(self) -> None:
        if self.hidden_size % self.head_dim:
            raise ValueError(f"hidden_size is {self.hidden_size}, which head_dim {self.head_dim} does not divide")
        if not self.blocks:
            raise ValueError("blocks is empty; at least one group is needed")

    @property
    def num_heads(self) -> int:
        return self.hidden_size // self.head_dim

    def latent_tokens(self, height: int, width: int, frames: int) -> int:
        """Return the tokens of an image or video of that size; InputError where its sides are not whole patches."""
        side = self.decoder.spatial_scale * self.patch_size
        for name, pixels in (("height", height), ("width", width)):
            if pixels % side:
                raise InputError(
                    f"{name} is {pixels}; {self.name} makes multiples of {side} pixels",
                    f"take {max(round(pixels / side), 1) * side}",
                )
        if frames > 1 and self.decoder.temporal_scale == 1:
            raise InputError(f"{self.name} makes images, not {frames} frames", "leave frames out")
        latent_frames = -(-(frames - 1) // self.decoder.temporal_scale) + 1
        return -(-latent_frames // self.temporal_patch_size) * (height // side) * (width // side)

    @property
    def transformer_parameters(self) -> int:
        """Weights of the blocks; embeddings and the last layer are below 1% and left out."""
        return sum(blocks.number * self._block_parameters(blocks) for blocks in self.blocks)

    def _block_parameters(self, blocks: Blocks) -> int:
        d, context = self.hidden_size, self.context_size or self.hidden_size
        streams = 2 if blocks.type == "double" else 1
        feed_forward = (3 if self.gated else 2) * d * self.feed_forward_size
        weights = streams * (4 * d * d + feed_forward + self.modulation * d * d)
        if blocks.type in ("cross", "linear"):
            weights += 2 * d * d + 2 * d * context
        weights += 4 * d * d if blocks.image_attention else 0
        return weights + (2 * d * d if blocks.long_skip else 0)


@cache
def shipped() -> Mapping[str, DiffusionModel]:
    """Return the models of the catalog by name."""
    path = catalog.shipped("diffusion.yaml")
    return {name: decode({"name": name, **raw}, DiffusionModel, path.name) for name, raw in read_yaml(path).items()}


def diffusion_model(name: str | Mapping[str, Any]) -> DiffusionModel:
    """Return the model called `name`, with or without organisation, or that its keys describe; or InputError."""
    if isinstance(name, Mapping):
        return decode({"name": "the model written out", **name}, DiffusionModel, "model: ")
    known = shipped()
    names = {spelling.lower(): model for full, model in known.items() for spelling in (full, full.rpartition("/")[2])}
    if name.lower() not in names:
        raise InputError(
            f"there is no diffusion model {name!r} in the catalog",
            did_you_mean(name, list(known), f"known: {', '.join(known)}; or write its keys out, {HINT}"),
        )
    return names[name.lower()]
