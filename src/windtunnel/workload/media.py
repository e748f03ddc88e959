"""Images and videos of requests: how many, how large, and the tokens that a model makes of them.

workload:
  images: {count: 1, width: 1024, height: 768}
  videos: {count: {type: empirical, values: [0, 1]}, seconds: 10, fps: 2, width: 640, height: 360}

Images of several sizes, of which some come again:

  images: {distinct: 200, alpha: 1, sizes: [{width: 1024, height: 768, weight: 3}, {width: 512, height: 512}]}
"""

import math
from functools import partial
from typing import Annotated, Literal

from windtunnel.errors import InputError
from windtunnel.model.shape import ModelSpec
from windtunnel.model.towers import OVERRIDE, Patches, VisionTower
from windtunnel.schema import AtLeastOne, NonNegative, Positive, Schema, check_between
from windtunnel.workload.lengths import MAX_DISTINCT_TOKENS, Tokens
from windtunnel.workload.sessions import Counts, check_count

MAX_SIDE, MAX_FRAMES = 100_000, 100_000
Side = Annotated[int, partial(check_between, 1, MAX_SIDE)]


class ImageSize(Schema):
    """One of several sizes of images."""

    width: Side
    """Pixels, before the model's processor resizes it."""
    height: Side
    weight: Positive = 1.0
    """Relative frequency of the size."""


class Images(Schema, kw_only=True):
    """Images in every request, of one size or several. In sessions each turn brings its own, which stay in context."""

    count: Counts = 1
    """Images of a request, or of the new text of a turn; 0 is allowed."""
    width: Side | None = None
    """Pixels, before the model's processor resizes it."""
    height: Side | None = None
    sizes: tuple[ImageSize, ...] = ()
    """Several sizes, in place of `width` and `height`."""
    distinct: Annotated[int, partial(check_between, 1, MAX_DISTINCT_TOKENS)] | None = None
    """Number of images that requests draw from, each of one size for ever; None: no image comes twice."""
    alpha: NonNegative = 0.0
    """The r-th of `distinct` images has a probability proportional to r^-alpha; 0: all are equally likely."""
    position: Literal["start", "end"] = "end"
    """Place of a request's images: before its text (but behind a shared prompt), or behind it. Only a prefix cache
    whose prompts begin with the same images finds them again."""
    min_pixels: AtLeastOne | None = None
    """Least pixels after resizing, where the server overrides the model's (`mm_processor_kwargs`)."""
    max_pixels: AtLeastOne | None = None
    """Most pixels after resizing."""
    tokens_per_image: Tokens | None = None
    """Tokens of an image; None: by the model's own rule."""

    def check(self) -> None:
        _check(self)
        if (self.width is None) != (self.height is None) or (self.width is None) != bool(self.sizes):
            raise ValueError("images need either width and height, or sizes")
        if self.sizes and self.tokens_per_image is not None:
            raise ValueError("tokens_per_image is one number, and sizes have several; leave one of them out")
        if self.alpha and self.distinct is None:
            raise ValueError("alpha says how popular each of the distinct images is; give distinct too")

    @property
    def every_size(self) -> tuple[ImageSize, ...]:
        """All sizes, also where there is one."""
        return self.sizes or (ImageSize(width=self.width or 1, height=self.height or 1),)

    def patches(self, tower: VisionTower) -> tuple[Patches, ...]:
        """Return the patches and tokens of one image of each size."""
        if self.tokens_per_image is not None:
            return (tower.given(self.tokens_per_image),)
        limits = (self.min_pixels, self.max_pixels)
        return tuple(tower.image(size.width, size.height, limits) for size in self.every_size)


class Videos(Schema, kw_only=True):
    """Videos of equal size and length in every request."""

    count: Counts = 1
    """Videos of a request; 0 is allowed."""
    width: Side
    """Pixels of a frame, before the model's processor resizes it."""
    height: Side
    frames: Annotated[int, partial(check_between, 1, MAX_FRAMES)] | None = None
    """Frames that the processor keeps; None: `seconds` times `fps`."""
    seconds: Positive | None = None
    fps: Positive = 2.0
    """Frames that the processor keeps of a second."""
    min_pixels: AtLeastOne | None = None
    """Least pixels after resizing, where the server overrides the model's (`mm_processor_kwargs`)."""
    max_pixels: AtLeastOne | None = None
    """Most pixels after resizing."""
    tokens_per_video: Tokens | None = None
    """Tokens of a video; None: by the model's own rule."""

    def check(self) -> None:
        _check(self)
        if (self.frames is None) == (self.seconds is None):
            raise ValueError("a video needs either frames or seconds")

    @property
    def num_frames(self) -> int:
        return self.frames or max(1, math.floor((self.seconds or 0.0) * self.fps))

    def patches(self, tower: VisionTower) -> tuple[Patches, ...]:
        """Return the patches and tokens of one video."""
        if self.tokens_per_video is not None:
            return (tower.given(self.tokens_per_video, math.ceil(self.num_frames / tower.temporal_patch_size)),)
        return (tower.video(self.num_frames, self.width, self.height, (self.min_pixels, self.max_pixels)),)


def _check(media: Images | Videos) -> None:
    check_count("count", media.count, 0)
    least, most = media.min_pixels, media.max_pixels
    if least is not None and most is not None and least > most:
        raise ValueError(f"min_pixels is {least}, above max_pixels, which is {most}")


def media_patches(model: ModelSpec, images: Images | None, videos: Videos | None) -> tuple[Patches, ...]:
    """Return the patches and tokens of an image of each size, then of a video; of what the workload lacks, none.

    Raises:
        InputError: the model has no vision tower, or nothing says how many tokens they are.
    """
    if model.vision is None and not any("vision" in part for part in model.left_out):
        raise InputError(
            f"the workload has images or videos, but {model.name} has no vision tower",
            "leave workload.images and workload.videos out, or name a model that reads images",
        )
    if model.vision is None:
        raise InputError(
            f"nothing says how large the vision tower of {model.name} is, nor how many tokens it makes of an image",
            "count their tokens as input_tokens, without workload.images; the encoder's time is then left out",
        )
    nothing = (Patches(1, 0, 0),)
    try:
        of_images, of_videos = (media.patches(model.vision) if media else nothing for media in (images, videos))
        return (*of_images, *of_videos)
    except InputError as error:
        raise InputError(f"{model.name}: {error.message}", error.hint or OVERRIDE) from None
