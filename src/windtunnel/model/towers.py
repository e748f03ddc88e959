"""Vision towers of multimodal models: their parameters, which take memory; their time is not modelled."""

from collections.abc import Mapping
from math import prod
from typing import Any

from windtunnel.model.architectures import TOWERS

_SIZES: dict[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size", "vt_hidden_size"),
    "intermediate_size": ("intermediate_size", "vt_intermediate_size"),
    "num_layers": ("num_hidden_layers", "depth", "vt_num_hidden_layers"),
    "patch_size": ("patch_size",),
}
GATED = ("pixtral", "qwen2_5_vl")
"""Starts of a tower's `model_type` whose feed-forward has three matrices (`transformers/models`)."""
CHANNELS = 3


def tower_parameters(config: Mapping[str, Any]) -> int:
    """Count the parameters of a vision transformer and its projector; 0 where `config` leaves out one of its sizes.

    A layer has four projections of attention, a feed-forward of two or three matrices, and their biases and two norms;
    the patches are embedded, and their positions where the number of patches is fixed. The projector is one matrix to
    the language model's width for each patch, or two where patches are merged first.
    """
    tower: Mapping[str, Any] = next(
        (config[key] for key in TOWERS["vision tower"] if isinstance(config.get(key), Mapping)), {}
    )
    sizes = {name: next((tower[key] for key in keys if key in tower), None) for name, keys in _SIZES.items()}
    if not all(isinstance(size, int) for size in sizes.values()):
        return 0
    width, inner, num_layers, patch = (int(size) for size in sizes.values() if size is not None)
    matrices = 3 if str(tower.get("model_type", "")).startswith(GATED) else 2
    layer = 4 * width * (width + 1) + matrices * width * inner + inner + width + 4 * width
    positions = (tower["image_size"] // patch) ** 2 if isinstance(tower.get("image_size"), int) else 0
    embedded = CHANNELS * patch**2 * tower.get("temporal_patch_size", 1) * width + positions * width
    text = config.get("text_config") or config
    merged = width * prod(tower.get("merge_kernel_size", (tower.get("spatial_merge_size", 1),) * 2))
    output = tower.get("out_hidden_size", text.get("hidden_size", 0))
    projector = merged * output + (merged**2 if merged > width else 0)
    return int(num_layers * layer + embedded + projector)
