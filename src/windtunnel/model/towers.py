"""Vision towers of multimodal models: parameters, and the patches and tokens of an image or a video."""

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from windtunnel.errors import InputError
from windtunnel.model.architectures import KNOWN, language_model
from windtunnel.model.config_reader import MOST
from windtunnel.schema import Schema

GATED = ("pixtral", "qwen2_5_vl", "qwen2_5_omni")
"""Starts of a tower's `model_type` whose feed-forward has three matrices (`transformers/models`)."""
CHANNELS = 3
OVERRIDE = "give tokens_per_image, or tokens_per_video, in the workload"
Rule = Literal["qwen", "pooled", "budget", "tiles", "closest", "pixtral", "moonvit", "other"]
Pixels = tuple[int | None, int | None]
"""Least and most pixels of a resized image or video; None: the model's."""


class Patches(NamedTuple):
    """Patches of an image or a video in the tower, and its tokens in the prompt."""

    segments: int
    """Tiles or pairs of frames, which attend to themselves alone."""
    per_segment: int
    tokens: int


class VisionTower(Schema):
    """Sizes of a vision transformer, and the rule by which an image becomes tokens."""

    rule: Rule
    hidden_size: int
    intermediate_size: int
    num_layers: int
    output_size: int
    """Hidden size of the language model."""
    num_heads: int = 16
    gated: bool = False
    patch_size: int = 14
    temporal_patch_size: int = 1
    """Frames of a video in one patch."""
    merge: int = 1
    """Side, in patches, of the square that becomes one token."""
    num_mergers: int = 1
    """Mergers of the last layer and of earlier ones (Qwen3-VL's DeepStack)."""
    image_size: int = 0
    """Pixels of a side: of every image (`pooled`), of a tile (`tiles`, `closest`), the longest one (`pixtral`)."""
    max_tokens: int = 0
    """Tokens of every image (`pooled`), most of them (`budget`)."""
    max_patches: int = 0
    """Most patches of an image, or most tiles (`tiles`, `closest`)."""
    max_side_patches: int = 0
    """Most patches of a side; 0: no limit."""
    image_pixels: tuple[int, int] = (0, 0)
    video_pixels: tuple[int, int] = (0, 0)
    """Least and most pixels of a video's frames together; (0, 0): each frame is resized as an image."""
    window_patches: int = 0
    """Patches of a window; 0: every layer attends to whole images."""
    num_full_layers: int = 0
    """With windows: layers that attend to whole images."""

    def image(self, width: int, height: int, pixels: Pixels = (None, None)) -> Patches:
        """Return the patches and tokens of an image of `width` x `height` pixels. InputError where its sides differ too
        much, or the rule is not known."""
        if self.rule == "other":
            raise InputError("the rule by which images become tokens is not known", OVERRIDE)
        if self.rule == "pooled":
            return Patches(1, (self.image_size // self.patch_size) ** 2, self.max_tokens)
        if self.rule == "tiles":
            return self._tiles(width, height)
        if self.rule == "closest":
            return self._closest_tiles(width, height)
        if self.rule == "qwen":
            rows, columns = self._smart_resize(width, height, 1, _limits(pixels, self.image_pixels))
        elif self.rule == "budget":
            rows, columns = self._within_budget(width, height)
        elif self.rule == "pixtral":
            rows, columns = self._within_longest(width, height)
            return Patches(1, rows * columns * self.merge**2, rows * (columns + 1))
        else:
            rows, columns = self._within_patches(width, height)
        return Patches(1, rows * columns * self.merge**2, rows * columns)

    def video(self, num_frames: int, width: int, height: int, pixels: Pixels = (None, None)) -> Patches:
        """Return the patches and tokens of `num_frames` frames of `width` x `height` pixels.

        Source: `smart_resize` of `video_processing_qwen3_vl.py` and `image_processing_qwen2_vl.py` in transformers 5.
        InputError where the rule of the model's videos is not known.
        """
        if self.rule != "qwen":
            raise InputError("nothing says how many tokens a video has in this model", OVERRIDE)
        together = num_frames if self.video_pixels != (0, 0) else 1
        limits = _limits(pixels, self.video_pixels if together > 1 else self.image_pixels)
        rows, columns = self._smart_resize(width, height, together, limits)
        segments = math.ceil(num_frames / self.temporal_patch_size)
        return Patches(segments, rows * columns * self.merge**2, segments * rows * columns)

    def given(self, tokens: int, segments: int = 1) -> Patches:
        """Return the patches behind a given number of tokens."""
        return Patches(segments, max(tokens * self.merge**2 // segments, 1), tokens)

    def _smart_resize(self, width: int, height: int, num_frames: int, limits: tuple[int, int]) -> tuple[int, int]:
        """Return rows and columns of tokens: sides rounded to whole tokens, scaled so that `num_frames` frames together
        lie within the limits."""
        if max(width, height) / min(width, height) > 200:
            raise InputError(f"an image of {width} x {height} is too narrow: one side is over 200 times the other")
        side, (least, most) = self.patch_size * self.merge, limits
        if num_frames > 1 and min(width, height) < side:
            scale = side / min(width, height)
            width, height = int(width * scale), int(height * scale)
        frames = round(num_frames / self.temporal_patch_size) * self.temporal_patch_size if num_frames > 1 else 1
        rows, columns = round(height / side), round(width / side)
        if frames * rows * columns * side**2 > most:
            beta = math.sqrt(num_frames * height * width / most)
            return max(1, math.floor(height / beta / side)), max(1, math.floor(width / beta / side))
        if frames * rows * columns * side**2 < least:
            beta = math.sqrt(least / (num_frames * height * width))
            return math.ceil(height * beta / side), math.ceil(width * beta / side)
        return rows, columns

    def _within_budget(self, width: int, height: int) -> tuple[int, int]:
        """Return rows and columns of tokens, scaled to fill the budget (`image_processing_gemma4.py`)."""
        side, longest = self.patch_size * self.merge, self.max_tokens
        factor = math.sqrt(self.max_tokens / (height * width)) * side
        rows, columns = math.floor(factor * height / side), math.floor(factor * width / side)
        return max(rows, 1), max(min(columns, longest // max(rows, 1)), 1)

    def _within_longest(self, width: int, height: int) -> tuple[int, int]:
        """Return rows and columns of tokens, the longer side no longer than `image_size` (`processing_pixtral.py`)."""
        ratio, side = max(width, height) / self.image_size, self.patch_size * self.merge
        if ratio > 1:
            width, height = math.floor(width / ratio), math.floor(height / ratio)
        return (height - 1) // side + 1, (width - 1) // side + 1

    def _within_patches(self, width: int, height: int) -> tuple[int, int]:
        """Return rows and columns of tokens: scaled down to at most `max_patches`, then padded to whole tokens.

        Source: `navit_resize` of `image_processing_kimi_k25.py` in transformers 5; `kimi_vl.py` in vLLM 0.24.
        """
        patch, side = self.patch_size, self.patch_size * self.merge
        scale = min(1.0, math.sqrt(self.max_patches / (max(1, height // patch) * max(1, width // patch))))
        if self.max_side_patches:
            longest = self.max_side_patches * patch
            scale = min(scale, longest / height, longest / width)
        height, width = max(1, int(height * scale)), max(1, int(width * scale))
        return math.ceil(height / side), math.ceil(width / side)

    def _tiles(self, width: int, height: int) -> Patches:
        """Return the tiles of an image, a small copy of the whole beside several, and their tokens with separators.

        The grid is the one that scales the image up least, or else down least; the smaller of equal ones.
        Source: `get_best_fit` of `image_processing_llama4.py` and `processing_llama4.py` in transformers 5.
        """
        counts = range(self.max_patches, 0, -1)
        grids = [(rows, tiles // rows) for tiles in counts for rows in range(1, tiles + 1) if tiles % rows == 0]
        scale = {grid: min(grid[0] * self.image_size / height, grid[1] * self.image_size / width) for grid in grids}
        up = [value for value in scale.values() if value >= 1]
        chosen = min(up) if up else max(scale.values())
        rows, columns = min((grid for grid in grids if scale[grid] == chosen), key=lambda grid: grid[0] * grid[1])
        per_tile = (self.image_size // self.patch_size) ** 2
        num_tiles = rows * columns + (rows * columns > 1)
        separators = rows * columns if rows * columns > 1 else 0
        return Patches(num_tiles, per_tile, num_tiles * (per_tile // self.merge**2) + separators + 3)

    def _closest_tiles(self, width: int, height: int) -> Patches:
        """Return the tiles of an image, a small copy of the whole beside several: the grid whose sides are most nearly
        in the image's ratio. Of equal ones the largest is taken of which the image fills more than half.

        Source: `dynamic_preprocess` in the model cards of InternVL 2 to 3.5.
        """
        best, most = (1, 1), self.max_patches
        counts = [(columns, rows) for columns in range(1, most + 1) for rows in range(1, most // columns + 1)]
        for columns, rows in sorted(counts, key=math.prod):
            off, least = (abs(width / height - grid[0] / grid[1]) for grid in ((columns, rows), best))
            fills = width * height > 0.5 * self.image_size**2 * columns * rows
            if off < least or (off == least and fills):
                best = columns, rows
        num_tiles = math.prod(best) + (math.prod(best) > 1)
        per_tile = (self.image_size // self.patch_size) ** 2
        return Patches(num_tiles, per_tile, num_tiles * (per_tile // self.merge**2))


def _limits(given: Pixels, known: tuple[int, int]) -> tuple[int, int]:
    least, most = (known[side] if given[side] is None else int(given[side] or 0) for side in (0, 1))
    return least, most


_QWEN2 = {"rule": "qwen", "image_pixels": (56 * 56, 12_845_056)}
_INTERNVL = {"rule": "closest", "max_patches": 12}
_QWEN3 = {"rule": "qwen", "image_pixels": (65_536, 16_777_216), "video_pixels": (4_096, 25_165_824)}
_RULES: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen2_5_omni_thinker"), _QWEN2),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_omni_moe_thinker", "qwen3_5", "qwen3_5_moe"), _QWEN3),
    "gemma3": {"rule": "pooled", "max_tokens": 256},
    "gemma4": {"rule": "budget", "max_tokens": 280},
    "llama4": {"rule": "tiles", "max_patches": 16},
    **dict.fromkeys(("internvl_chat", "internvl"), _INTERNVL),
    "pixtral": {"rule": "pixtral"},
    "mistral3": {"rule": "pixtral"},
    "kimi_vl": {"rule": "moonvit", "max_patches": 4_096},
    "kimi_k25": {"rule": "moonvit", "max_patches": 16_384, "max_side_patches": 512},
}
"""`model_type` -> the rule of its images and what only the published preprocessor_config.json says."""


def read_tower(config: Mapping[str, Any]) -> VisionTower | None:
    """Return the vision tower of a multimodal `config`; None where there is none, or its sizes are not known.

    Towers have 16 heads where the config does not say, as every published one of these architectures.
    """
    keys, text = KNOWN.towers["vision tower"], language_model(config)
    given: Mapping[str, Any] = next((config[key] for key in keys if isinstance(config.get(key), Mapping)), {})
    tower = {**KNOWN.class_defaults.get(str(given.get("model_type")), {}), **given}
    rule = _RULES.get(str(config.get("model_type")), {"rule": "other"})
    # Qwen2-VL calls the width `embed_dim` and the language model's `hidden_size`.
    width = _size(tower, "embed_dim", "hidden_size", "vt_hidden_size")
    ratio = tower.get("mlp_ratio")
    inner = int(width * ratio) if isinstance(ratio, int | float) and 0 < ratio <= MOST else 0
    inner = _size(tower, "intermediate_size", "vt_intermediate_size", default=inner)
    num_layers, patch = _size(tower, "num_hidden_layers", "depth", "vt_num_hidden_layers"), _size(tower, "patch_size")
    num_layers += _size(tower, "num_global_layers")  # Llama 3.2 Vision's, behind the others
    output = _size(tower, "out_hidden_size", default=_size(text, "hidden_size"))
    if 0 in (width, inner, num_layers, patch, output):
        return None
    earlier = tower.get("deepstack_visual_indexes")
    # Qwen3-Omni's config names blocks without windows, and its code has no windows.
    full = None if earlier else tower.get("fullatt_block_indexes")
    said = {"max_tokens": _size(config, "mm_tokens_per_image", default=_size(tower, "default_output_length"))}
    said["max_patches"] = _size(config, "max_dynamic_patch") if config.get("dynamic_image_size", True) else 1
    return VisionTower(
        hidden_size=width,
        intermediate_size=inner,
        num_layers=num_layers,
        output_size=output,
        num_heads=_size(tower, "num_heads", "num_attention_heads", "vt_num_attention_heads", default=16),
        gated=str(tower.get("model_type", config.get("model_type", ""))).startswith(GATED),
        patch_size=patch,
        temporal_patch_size=_size(tower, "temporal_patch_size", default=1),
        merge=_merge(config, tower),
        num_mergers=1 + (len(earlier) if isinstance(earlier, list) else 0),
        image_size=_size(tower, "image_size"),
        window_patches=(_size(tower, "window_size") // patch) ** 2 if isinstance(full, list) else 0,
        num_full_layers=len(full) if isinstance(full, list) else 0,
        **{**rule, **{name: value for name, value in said.items() if value}},
    )


def _merge(config: Mapping[str, Any], tower: Mapping[str, Any]) -> int:
    """Return the side, in patches, of the square that becomes one token."""
    kernel = tower.get("merge_kernel_size")
    if isinstance(kernel, list) and kernel and isinstance(kernel[0], int):
        return _size({"merge_kernel_size": kernel[0]}, "merge_kernel_size", default=1)
    ratio = tower.get("pixel_shuffle_ratio", config.get("downsample_ratio"))
    if isinstance(ratio, float) and 0.01 < ratio <= 1:
        return round(1 / ratio)
    if str(config.get("model_type")) == "gemma3":
        return 4  # 64 x 64 patches are averaged to 16 x 16 (`Gemma3MultiModalProjector`)
    return _size(
        tower, "spatial_merge_size", "pooling_kernel_size", default=_size(config, "spatial_merge_size", default=1)
    )


def tower_parameters(config: Mapping[str, Any]) -> int:
    """Count the parameters of a vision transformer and its projector; 0 where `config` leaves out one of its sizes.

    A layer has four projections of attention, a feed-forward of two or three matrices, their biases and two norms. The
    patches are embedded, and their positions where the number of patches is fixed. The projector is a matrix to the
    language model's width; where patches are merged first, there is one of the merged width before it.
    """
    tower = read_tower(config)
    if tower is None:
        return 0
    width, inner = tower.hidden_size, tower.intermediate_size
    layer = 4 * width * (width + 1) + (3 if tower.gated else 2) * width * inner + inner + width + 4 * width
    positions = (tower.image_size // tower.patch_size) ** 2
    embedded = (CHANNELS * tower.patch_size**2 * tower.temporal_patch_size + positions) * width
    merged = width * (tower.merge**2 if tower.rule in ("qwen", "moonvit", "closest", "other") else 1)
    projector = merged * tower.output_size + (merged**2 if merged > width else 0)
    return tower.num_layers * layer + embedded + projector


def _size(part: Mapping[str, Any], *keys: str, default: int = 0) -> int:
    """Return the first whole number under one of `keys`, or both numbers of an equal pair."""
    for key in keys:
        value = part.get(key)
        if isinstance(value, list) and value and value == value[:1] * len(value):
            value = value[0]
        if isinstance(value, int):
            least = min(default, 1)  # what has a usual value divides something
            if not least <= value <= MOST:
                raise InputError(f"{key} of the vision tower is {value}; {least} to {MOST:,} is needed")
            return value
    return default
