"""Images and videos of requests: how many, how large, and the tokens that a model makes of them.

workload:
  images: {count: 1, width: 1024, height: 768}
  videos: {count: {type: empirical, values: [0, 1]}, seconds: 10, fps: 2, width: 640, height: 360}
"""

import math
from functools import partial
from typing import Annotated

from windtunnel.errors import InputError
from windtunnel.model.shape import ModelSpec
from windtunnel.model.towers import OVERRIDE, Patches, VisionTower
from windtunnel.schema import AtLeastOne, Positive, Schema, check_between
from windtunnel.workload.lengths import Tokens
from windtunnel.workload.sessions import Counts, check_count

MAX_SIDE, MAX_FRAMES = 100_000, 100_000
Side = Annotated[int, partial(check_between, 1, MAX_SIDE)]


class Images(Schema, kw_only=True):
    """Images of equal size in every request."""

    count: Counts = 1
    """Images of a request; 0 is allowed."""
    width: Side
    """Pixels, before the model's processor resizes it."""
    height: Side
    min_pixels: AtLeastOne | None = None
    """Least pixels after resizing, where the server overrides the model's (`mm_processor_kwargs`)."""
    max_pixels: AtLeastOne | None = None
    """Most pixels after resizing."""
    tokens_per_image: Tokens | None = None
    """Tokens of an image; None: by the model's own rule."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self)

    def patches(self, tower: VisionTower) -> Patches:
        """Return the patches and tokens of one image."""
        if self.tokens_per_image is not None:
            return tower.given(self.tokens_per_image)
        return tower.image(self.width, self.height, (self.min_pixels, self.max_pixels))


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

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self)
        if (self.frames is None) == (self.seconds is None):
            raise ValueError("a video needs either frames or seconds")

    @property
    def num_frames(self) -> int:
        return self.frames or max(1, math.floor((self.seconds or 0.0) * self.fps))

    def patches(self, tower: VisionTower) -> Patches:
        """Return the patches and tokens of one video."""
        if self.tokens_per_video is not None:
            return tower.given(self.tokens_per_video, math.ceil(self.num_frames / tower.temporal_patch_size))
        return tower.video(self.num_frames, self.width, self.height, (self.min_pixels, self.max_pixels))


def _check(media: Images | Videos) -> None:
    check_count("count", media.count, 0)
    least, most = media.min_pixels, media.max_pixels
    if least is not None and most is not None and least > most:
        raise ValueError(f"min_pixels is {least}, above max_pixels, which is {most}")


def media_patches(model: ModelSpec, images: Images | None, videos: Videos | None) -> tuple[Patches, Patches]:
    """Return the patches and tokens of an image and of a video; of what the workload does not have, none.

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
    nothing = Patches(1, 0, 0)
    try:
        return tuple(media.patches(model.vision) if media else nothing for media in (images, videos))  # type: ignore[return-value]
    except InputError as error:
        raise InputError(f"{model.name}: {error.message}", error.hint or OVERRIDE) from None
