"""Vision towers of multimodal models: their parameters, which count in memory; their time is not modelled."""

from collections.abc import Mapping
from typing import Any

from windtunnel.model.architectures import KNOWN

GATED = ("pixtral", "qwen2_5_vl")
"""Starts of a tower's `model_type` whose feed-forward has three matrices (`transformers/models`)."""
CHANNELS = 3


def tower_parameters(config: Mapping[str, Any]) -> int:
    """Count the parameters of a vision transformer and its projector; 0 where `config` leaves out one of its sizes.

    A layer has four projections of attention, a feed-forward of two or three matrices, their biases and two norms. The
    patches are embedded, and their positions where the number of patches is fixed. The projector is a matrix to the
    language model's width; where patches are merged first, there is one of the merged width before it.
    """
    tower: Mapping[str, Any] = next(
        (config[key] for key in KNOWN.towers["vision tower"] if isinstance(config.get(key), Mapping)), {}
    )
    width, inner = (
        _size(tower, "hidden_size", "vt_hidden_size"),
        _size(tower, "intermediate_size", "vt_intermediate_size"),
    )
    num_layers, patch = _size(tower, "num_hidden_layers", "depth", "vt_num_hidden_layers"), _size(tower, "patch_size")
    if 0 in (width, inner, num_layers, patch):
        return 0
    matrices = 3 if str(tower.get("model_type", "")).startswith(GATED) else 2
    layer = 4 * width * (width + 1) + matrices * width * inner + inner + width + 4 * width
    positions = (_size(tower, "image_size") // patch) ** 2
    embedded = (CHANNELS * patch**2 * _size(tower, "temporal_patch_size", default=1) + positions) * width
    kernel = tower.get("merge_kernel_size")
    side = kernel[0] if isinstance(kernel, list) and kernel and isinstance(kernel[0], int) else 1
    merged = width * _size(tower, "spatial_merge_size", default=side) ** 2
    text = config["text_config"] if isinstance(config.get("text_config"), Mapping) else config
    output = _size(tower, "out_hidden_size", default=_size(text, "hidden_size"))
    return num_layers * layer + embedded + merged * output + (merged**2 if merged > width else 0)


def _size(part: Mapping[str, Any], *keys: str, default: int = 0) -> int:
    """Return the first whole number under one of `keys`."""
    return next((part[key] for key in keys if isinstance(part.get(key), int)), default)
