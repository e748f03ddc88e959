"""Tokens of images and videos by each rule, against published examples; the arithmetic of an encoder."""

from typing import Any

import pytest

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.model.launches.encoder import encoder_launches
from windtunnel.model.parallelism import Parallelism
from windtunnel.model.precision import Precision
from windtunnel.model.shape import Shard
from windtunnel.model.towers import Patches, VisionTower, read_tower, tower_parameters

SIZES = {"hidden_size": 1280, "intermediate_size": 3420, "depth": 32, "num_heads": 16, "patch_size": 14}
TEXT = {"hidden_size": 3584}


def tower_of(model_type: str, vision: dict[str, Any], **outer: Any) -> VisionTower:
    tower = read_tower({"model_type": model_type, "vision_config": vision, "text_config": TEXT, **outer})
    assert tower is not None
    return tower


def qwen2_5_vl(**others: Any) -> VisionTower:
    merge = {"spatial_merge_size": 2, "temporal_patch_size": 2}
    return tower_of("qwen2_5_vl", {**SIZES, **merge, "model_type": "qwen2_5_vl", **others})


@pytest.mark.parametrize(
    ("size", "tokens"),
    [
        # 28 pixels a token (Qwen2-VL, arXiv:2409.12191, section 2.1), at most 12,845,056 pixels: beta = 3.348.
        ((224, 224), 64),
        ((1024, 768), 37 * 27),
        ((12_000, 12_000), 128 * 128),
        ((20, 20), 4),
    ],
)
def test_qwen2_vl_rounds_sides_to_tokens(size: tuple[int, int], tokens: int) -> None:
    assert qwen2_5_vl().image(*size) == Patches(1, 4 * tokens, tokens)


def test_an_override_of_the_pixels_scales_an_image_down() -> None:
    """1024 x 768 in at most 200,704 pixels (256 tokens): beta = sqrt(786432 / 200704) = 1.979, 13 x 18 tokens."""
    assert qwen2_5_vl().image(1024, 768, (None, 200_704)).tokens == 13 * 18


def test_qwen3_vl_has_32_pixels_a_token_and_sizes_frames_together() -> None:
    tower = catalog.model("Qwen3-VL-8B-Instruct").vision
    assert tower is not None
    assert tower.image(1024, 768).tokens == 32 * 24
    # 20 frames of 640 x 360 are 10 pairs of 20 x 11 tokens.
    assert tower.video(20, 640, 360) == Patches(10, 4 * 220, 2_200)
    # 768 frames of 1280 x 720 exceed 25,165,824 pixels: beta = sqrt(768 * 921600 / 25165824) = 5.303, 4 x 7 tokens.
    assert tower.video(768, 1280, 720).tokens == 384 * 4 * 7


def test_frames_of_qwen2_5_vl_are_resized_one_by_one() -> None:
    assert qwen2_5_vl().video(5, 224, 224) == Patches(3, 256, 3 * 64)


@pytest.mark.parametrize("size", [(100, 100), (1024, 768), (4000, 300)])
def test_gemma_3_makes_256_tokens_of_4096_patches(size: tuple[int, int]) -> None:
    tower = catalog.model("gemma-3-4b-it").vision
    assert tower is not None
    assert tower.image(*size) == Patches(1, 4_096, 256)


def test_gemma_4_fills_its_budget() -> None:
    """280 tokens of 48 pixels a side: 1024 x 768 becomes 14 x 19."""
    tower = catalog.model("gemma-4-31B-it").vision
    assert tower is not None
    assert tower.image(1024, 768).tokens == 14 * 19


LLAMA_4 = {
    "model_type": "llama4_vision_model",
    "hidden_size": 1408,
    "intermediate_size": 5632,
    "num_hidden_layers": 34,
    "image_size": 336,
    "patch_size": 14,
    "pixel_shuffle_ratio": 0.5,
}


@pytest.mark.parametrize(
    ("size", "tiles", "tokens"),
    [
        # One tile: 144 tokens between <|image_start|>, <|image|> and <|image_end|>.
        ((336, 336), 1, 144 + 3),
        # 3 x 4 tiles and the whole image, with 12 separators.
        ((1344, 1008), 13, 13 * 144 + 12 + 3),
        # Docstring of `get_best_fit` in transformers: 300 x 200 takes 1 x 2 tiles only where they are larger than it.
        ((300, 200), 1, 144 + 3),
    ],
)
def test_llama_4_cuts_tiles(size: tuple[int, int], tiles: int, tokens: int) -> None:
    assert tower_of("llama4", LLAMA_4).image(*size) == Patches(tiles, 576, tokens)


@pytest.mark.parametrize(
    ("size", "tiles"),
    # 4:3 fits three rows of four; a small square none but one tile, a large one three rows of three; 16:9 two of four.
    [((640, 480), 13), ((448, 448), 1), ((1024, 1024), 10), ((1920, 1080), 9), ((4000, 400), 11)],
)
def test_internvl_takes_the_grid_nearest_to_the_ratio(size: tuple[int, int], tiles: int) -> None:
    vision = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "patch_size": 14}
    vision |= {"num_attention_heads": 16, "image_size": 448}
    config = {"model_type": "internvl_chat", "downsample_ratio": 0.5, "max_dynamic_patch": 12, "vision_config": vision}
    tower = read_tower({**config, "llm_config": TEXT})
    assert tower is not None
    assert tower.image(*size) == Patches(tiles, 1024, 256 * tiles)
    fixed = read_tower({**config, "llm_config": TEXT, "dynamic_image_size": False})
    assert fixed is not None
    assert fixed.image(*size).segments == 1


def test_pixtral_breaks_rows() -> None:
    """1024 x 1024 with patches of 16 has 64 rows of 64 tokens and a break (arXiv:2410.07073, section 2.2)."""
    vision = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "image_size": 1024}
    tower = tower_of("pixtral", vision | {"patch_size": 16, "model_type": "pixtral"})
    assert tower.image(1024, 1024) == Patches(1, 4_096, 64 * 65)
    assert tower.image(2048, 1024).tokens == 32 * 65
    small = tower_of("mistral3", vision | {"patch_size": 14, "image_size": 1540}, spatial_merge_size=2)
    assert small.image(280, 280) == Patches(1, 400, 10 * 11)


def test_moonvit_pads_to_tokens_and_scales_down() -> None:
    """73 x 54 patches are below 4,096; 28 pixels a token after padding: 37 x 28. Kimi-VL's 2000 x 2000 are scaled."""
    tower = catalog.model("Kimi-VL-A3B-Instruct").vision
    assert tower is not None
    assert tower.image(1024, 768).tokens == 37 * 28
    # 142 x 142 patches: scaled by sqrt(4096) / 142 to 901 pixels, 33 tokens a side.
    assert tower.image(2000, 2000).tokens == 33 * 33


def test_an_unknown_rule_and_videos_without_one_are_refused() -> None:
    unknown = tower_of("novel_vl", SIZES)
    with pytest.raises(InputError, match="rule by which images become tokens is not known"):
        unknown.image(100, 100)
    assert unknown.given(50) == Patches(1, 50, 50)
    with pytest.raises(InputError, match="how many tokens a video has"):
        tower_of("llama4", LLAMA_4).video(8, 100, 100)
    with pytest.raises(InputError, match="too narrow"):
        qwen2_5_vl().image(3000, 10)


MERGING = {"depth": 32, "num_heads": 16, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
INTERN_VIT = {"hidden_size": 3200, "intermediate_size": 12800, "num_hidden_layers": 45, "num_attention_heads": 25}
PAIRS = {"image_size": [448, 448], "patch_size": [14, 14]}


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        # Counted in transformers 5: `Qwen2VisionTransformerPretrainedModel`, `Qwen2_5_VisionTransformer...`, and
        # `InternVLVisionModel` without its projector, here of 4 x 3200 to 8192 and the square of the former.
        (
            {"model_type": "qwen2_vl", **TEXT, "vision_config": {**MERGING, "embed_dim": 1280, "mlp_ratio": 4, **TEXT}},
            675_759_104,
        ),
        (
            {
                "model_type": "qwen2_5_vl",
                "vision_config": {**MERGING, "hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584},
            },
            676_550_144,
        ),
        (
            {
                "model_type": "internvl",
                "downsample_ratio": 0.5,
                "text_config": {"hidden_size": 8192},
                "vision_config": {**INTERN_VIT, **PAIRS},
            },
            5_536_496_000 + 12800 * 8192 + 12800**2,
        ),
    ],
)
def test_parameters_of_published_towers(config: dict[str, Any], parameters: int) -> None:
    assert tower_parameters(config) == pytest.approx(parameters, rel=1e-4)


def test_every_place_of_a_language_model_gives_the_tower_its_width() -> None:
    """InternVL's own format calls it `llm_config`; tokens are 2 x 2 patches."""
    vision = {"vision_config": {**INTERN_VIT, **PAIRS}, "downsample_ratio": 0.5}
    for key in ("text_config", "llm_config", "language_config"):
        tower = read_tower({key: {"hidden_size": 8192}, **vision})
        assert tower is not None
        assert tower.output_size == 8192
        assert tower.given(256) == Patches(1, 1024, 256)


@pytest.mark.parametrize(
    "change", [{"depth": 10**12}, {"hidden_size": -1}, {"patch_size": [14, 10**12]}, {"mlp_ratio": float("nan")}]
)
def test_sizes_that_cannot_be_are_refused_or_not_read(change: dict[str, Any]) -> None:
    config = {"text_config": TEXT, "vision_config": {**MERGING, "hidden_size": 1280, "mlp_ratio": 4, **change}}
    if isinstance(next(iter(change.values())), int):
        with pytest.raises(InputError, match=r"of the vision tower is -?1[0-9]*; 0 to 1,000,000,000 is needed"):
            read_tower(config)
    else:
        assert read_tower(config) is None


def test_the_arithmetic_of_an_encoder() -> None:
    """A layer has 4 w^2 + 2 w f weights, 3 w^2 + w^2 and two matrices here; each pair of patches 4 w operations."""
    model = catalog.model("Qwen3-VL-8B-Instruct")
    assert model.vision is not None
    shard = Shard(model=model, precision=Precision(), parallelism=Parallelism(), devices_per_node=8)
    patches, tokens, width, inner, layers = 3_072, 768, 1_152, 4_304, 27
    launches = encoder_launches(shard, model.vision, model.vision.image(1024, 768), 2)
    total = sum(float(launch.op.flops) * launch.count for launch in launches)
    layer = 2 * patches * (4 * width**2 + 2 * width * inner) + 4 * patches**2 * width
    embedding = 2 * patches * width * 3 * 16 * 16 * 2
    mergers = 4 * 2 * tokens * ((4 * width) ** 2 + 4 * width * 4_096)
    assert total == pytest.approx(2 * (layers * layer + embedding + mergers))


def test_windows_bound_the_pairs_of_qwen2_5_vl() -> None:
    """Of 32 layers 4 see all 256 patches; in the others each sees the 64 of its window of 112 x 112 pixels."""
    model = catalog.model("Qwen3-VL-8B-Instruct")
    shard = Shard(model=model, precision=Precision(), parallelism=Parallelism(), devices_per_node=8)
    tower = qwen2_5_vl(window_size=112, fullatt_block_indexes=[7, 15, 23, 31])
    launches = encoder_launches(shard, tower, tower.image(224, 224), 1)
    flops = {launch.name: float(launch.op.flops) * launch.count for launch in launches}
    assert flops["vision_attention"] == pytest.approx(4 * 4 * 256**2 * 1_280)
    assert flops["vision_window_attention"] == pytest.approx(28 * 4 * 256 * 64 * 1_280)
    assert tower.gated


def test_tensor_parallel_ranks_share_a_layer() -> None:
    model = catalog.model("Qwen3-VL-8B-Instruct")
    assert model.vision is not None
    shard = Shard(model=model, precision=Precision(), parallelism=Parallelism(tp=4), devices_per_node=8)
    launches = {launch.name: launch for launch in encoder_launches(shard, model.vision, Patches(1, 1_024, 256), 1)}
    assert launches["vision_attention"].op.num_heads == 4  # type: ignore[attr-defined]
    assert launches["vision_all_reduce"].count == 2 * 27
    assert launches["vision_all_reduce"].op.message_bytes == 1_024 * 1_152 * 2  # type: ignore[attr-defined]
