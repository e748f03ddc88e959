"""Images and videos of requests: how many, how large, and the tokens that a model makes of them.

workload:
  images: {count: 1, width: 1024, height: 768}
  videos: {count: {type: empirical, values: [0, 1]}, seconds: 10, fps: 2, width: 640, height: 360}

Images of several sizes, of which some come again:

  images: {distinct: 200, alpha: 1, sizes: [{width: 1024, height: 768, weight: 3}, {width: 512, height: 512}]}

A trace may have those of each request; then `images` and `videos` only say how the model's processor sees them.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Literal

from windtunnel.errors import InputError
from windtunnel.model.shape import ModelSpec
from windtunnel.model.towers import OVERRIDE, Patches, VisionTower
from windtunnel.schema import AtLeastOne, NonNegative, Positive, Schema, check_between
from windtunnel.workload.lengths import MAX_DISTINCT_TOKENS, Tokens
from windtunnel.workload.sessions import Counts, check_count

MAX_SIDE, MAX_FRAMES = 100_000, 100_000
FPS = 2.0
"""Frames that a processor keeps of a second, where nothing else is said (Qwen's and vLLM's default)."""
NEEDS_SIZES = "images need either width and height, or sizes"
Side = Annotated[int, partial(check_between, 1, MAX_SIDE)]


class ImageSize(Schema):
    """One of several sizes of images."""

    width: Side
    """Pixels, before the model's processor resizes it."""
    height: Side
    weight: Positive = 1.0
    """Relative frequency of the size."""


class Images(Schema, kw_only=True):
    """Images in every request, of one size or several. In sessions each turn brings its own, which stay in context.

    Without a size, those that a trace has.
    """

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
        if (self.width is None) != (self.height is None) or (self.width is not None and self.sizes):
            raise ValueError(NEEDS_SIZES)
        if not self.is_drawn and (self.count != 1 or self.distinct is not None):
            raise ValueError(f"{NEEDS_SIZES}; without them a trace says how many images there are, and which")
        if self.sizes and self.tokens_per_image is not None:
            raise ValueError("tokens_per_image is one number, and sizes have several; leave one of them out")
        if self.alpha and self.distinct is None:
            raise ValueError("alpha says how popular each of the distinct images is; give distinct too")

    @property
    def is_drawn(self) -> bool:
        """Whether they are drawn; else a trace has them."""
        return self.width is not None or bool(self.sizes)

    @property
    def every_size(self) -> tuple[ImageSize, ...]:
        """All sizes, also where there is one."""
        return self.sizes or (ImageSize(width=self.width or 1, height=self.height or 1),)

    def patches(self, tower: VisionTower) -> tuple[Patches, ...]:
        """Return the patches and tokens of one image of each size."""
        return tuple(self.patches_of(tower, size.width, size.height) for size in self.every_size)

    def patches_of(self, tower: VisionTower, width: int, height: int) -> Patches:
        """Return the patches and tokens of an image of `width` x `height` pixels."""
        if self.tokens_per_image is not None:
            return tower.given(self.tokens_per_image)
        return tower.image(width, height, (self.min_pixels, self.max_pixels))


class Videos(Schema, kw_only=True):
    """Videos of equal size and length in every request. Without a size, those that a trace has."""

    count: Counts = 1
    """Videos of a request; 0 is allowed."""
    width: Side | None = None
    """Pixels of a frame, before the model's processor resizes it."""
    height: Side | None = None
    frames: Annotated[int, partial(check_between, 1, MAX_FRAMES)] | None = None
    """Frames that the processor keeps; None: `seconds` times `fps`."""
    seconds: Positive | None = None
    fps: Positive = FPS
    """Frames that the processor keeps of a second."""
    min_pixels: AtLeastOne | None = None
    """Least pixels after resizing, where the server overrides the model's (`mm_processor_kwargs`)."""
    max_pixels: AtLeastOne | None = None
    """Most pixels after resizing."""
    tokens_per_video: Tokens | None = None
    """Tokens of a video; None: by the model's own rule."""

    def check(self) -> None:
        _check(self)
        if (self.width is None) != (self.height is None):
            raise ValueError("a video needs width and height")
        if self.is_drawn and (self.frames is None) == (self.seconds is None):
            raise ValueError("a video needs either frames or seconds")
        if not self.is_drawn and (self.count != 1 or self.frames is not None or self.seconds is not None):
            raise ValueError("a video needs width and height; without them a trace says how many there are, and which")

    @property
    def is_drawn(self) -> bool:
        """Whether they are drawn; else a trace has them."""
        return self.width is not None

    @property
    def num_frames(self) -> int:
        return self.frames or frames_of(self.seconds or 0.0, self.fps)

    def patches(self, tower: VisionTower) -> tuple[Patches, ...]:
        """Return the patches and tokens of one video."""
        return (self.patches_of(tower, self.num_frames, self.width or 1, self.height or 1),)

    def patches_of(self, tower: VisionTower, num_frames: int, width: int, height: int) -> Patches:
        """Return the patches and tokens of a video of `num_frames` frames of `width` x `height` pixels."""
        if self.tokens_per_video is not None:
            return tower.given(self.tokens_per_video, math.ceil(num_frames / tower.temporal_patch_size))
        return tower.video(num_frames, width, height, (self.min_pixels, self.max_pixels))


def frames_of(seconds: float, fps: float) -> int:
    """Return the frames that the processor keeps of a video."""
    return max(1, math.floor(seconds * fps))


def _check(media: Images | Videos) -> None:
    check_count("count", media.count, 0)
    least, most = media.min_pixels, media.max_pixels
    if least is not None and most is not None and least > most:
        raise ValueError(f"min_pixels is {least}, above max_pixels, which is {most}")


class Vision(Schema):
    """The model that sees the images and videos of a trace."""

    model: str
    """Its name."""
    tower: VisionTower | None
    """None: it has none, or nothing says how large it is (`is_unknown`)."""
    is_unknown: bool = False
    """Whether parts of its vision tower are not described."""


def vision_of(model: ModelSpec) -> Vision:
    """Return what a model makes tokens of images with."""
    is_unknown = any("vision" in part for part in model.left_out)
    return Vision(model=model.name, tower=model.vision, is_unknown=is_unknown)


def tower_of(vision: Vision, where: str, without: str) -> VisionTower:
    """Return the tower of a model that gets images or videos. InputError where the model has no vision tower, or
    nothing says how large it is.

    Args:
        where: who has them, as the subject of a sentence.
        without: what to leave out or do for a run without them.
    """
    if vision.tower is None and not vision.is_unknown:
        raise InputError(
            f"{where} has images or videos, but {vision.model} has no vision tower",
            f"{without}, or name a model that reads images",
        )
    if vision.tower is None:
        raise InputError(
            f"nothing says how large the vision tower of {vision.model} is, nor how many tokens it makes of an image",
            "count their tokens as input_tokens, without workload.images; the encoder's time is then left out",
        )
    return vision.tower


def media_patches(model: ModelSpec, images: Images | None, videos: Videos | None) -> tuple[Patches, ...]:
    """Return the patches and tokens of an image of each size, then of a video; of what the workload lacks, none.
    InputError where the model has no vision tower, or nothing says how many tokens they are."""
    tower = tower_of(vision_of(model), "the workload", "leave workload.images and workload.videos out")
    nothing = (Patches(1, 0, 0),)
    try:
        of_images, of_videos = (media.patches(tower) if media else nothing for media in (images, videos))
        return (*of_images, *of_videos)
    except InputError as error:
        raise InputError(f"{model.name}: {error.message}", error.hint or OVERRIDE) from None


def recorded_patches(
    vision: Vision, images: Images | None, videos: Videos | None, sizes: Sequence[tuple[int, int, int]]
) -> list[Patches]:
    """Return the patches and tokens of images and videos that a trace has, as (frames or 0, width, height). InputError
    where the rule is not known, or does not take a size."""
    tower, of_images, of_videos = vision.tower, images or Images(), videos or Videos()
    assert tower is not None, "tower_of refuses a model without one"
    patches = []
    for frames, width, height in sizes:
        try:
            if frames:
                patches.append(of_videos.patches_of(tower, frames, width, height))
            else:
                patches.append(of_images.patches_of(tower, width, height))
        except InputError as error:
            hint = "give workload.images: {tokens_per_image: N}, or workload.videos: {tokens_per_video: N}"
            raise InputError(f"{vision.model}: {error.message}", hint) from None
    return patches
