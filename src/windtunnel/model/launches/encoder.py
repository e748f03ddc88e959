"""The forward pass of a vision tower over the images or videos of one step, as operators of one tensor-parallel rank.

The engine computes it in bf16 at the beginning of a step, and splits it over tensor-parallel ranks as it splits the
language model (`mm_encoder_tp_mode` is `weights` by default in vLLM 0.24 `config/multimodal.py`).
"""

from collections.abc import Iterator

from windtunnel.model.attention.grouped_query import EncoderAttention
from windtunnel.model.operators import BF16_BYTES, Elementwise, Gemm, Launch
from windtunnel.model.shape import Shard
from windtunnel.model.towers import CHANNELS, Patches, VisionTower


def encoder_launches(shard: Shard, tower: VisionTower, patches: Patches, count: int) -> list[Launch]:
    """Return the launches that encode `count` images or videos of equal size in one call.

    Patches are embedded; a layer has attention and a feed-forward, with a norm and, over several ranks, an all-reduce
    each; mergers make tokens of the language model's width.
    """
    num_patches = count * patches.segments * patches.per_segment
    pixels = CHANNELS * tower.patch_size**2 * tower.temporal_patch_size
    return [
        Launch("patch_embedding", Gemm(num_patches, tower.hidden_size, pixels)),
        *_layers(shard, tower, num_patches),
        *_attention(shard, tower, patches, count),
        *_mergers(shard, tower, count * patches.tokens),
    ]


def _layers(shard: Shard, tower: VisionTower, num_patches: int) -> Iterator[Launch]:
    """Yield all but attention's core of every layer."""
    width, layers, tp = tower.hidden_size, tower.num_layers, _ranks(shard, tower)
    query, inner = width // tp, tower.intermediate_size // tp
    projected = 2 * inner if tower.gated else inner
    yield Launch("vision_norm", Elementwise("norm", num_patches, 4 * width * BF16_BYTES), 2 * layers)
    yield Launch("vision_qkv_proj", Gemm(num_patches, 3 * query, width), layers)
    yield Launch("vision_o_proj", Gemm(num_patches, width, query), layers)
    yield Launch("vision_up_proj", Gemm(num_patches, projected, width), layers)
    yield Launch("vision_activation", Elementwise("activation", num_patches, (projected + inner) * BF16_BYTES), layers)
    yield Launch("vision_down_proj", Gemm(num_patches, width, inner), layers)
    if tp > 1:
        message = shard.collective("all_reduce", num_patches * width * BF16_BYTES, tp)
        yield Launch("vision_all_reduce", message, 2 * layers)


def _attention(shard: Shard, tower: VisionTower, patches: Patches, count: int) -> Iterator[Launch]:
    """Yield attention's cores: over whole segments, and over windows within them (Qwen2.5-VL)."""
    heads = tower.num_heads // _ranks(shard, tower)
    head_dim = tower.hidden_size // tower.num_heads
    num_full = tower.num_full_layers if tower.window_patches else tower.num_layers
    segments = count * patches.segments
    if num_full:
        full = EncoderAttention(segments, patches.per_segment, heads, head_dim)
        yield Launch("vision_attention", full, num_full)
    if tower.window_patches:
        length = min(tower.window_patches, patches.per_segment)
        core = EncoderAttention(segments * patches.per_segment / length, length, heads, head_dim)
        yield Launch("vision_window_attention", core, tower.num_layers - num_full)


def _mergers(shard: Shard, tower: VisionTower, num_tokens: int) -> Iterator[Launch]:
    """Yield the projections to the language model: a square matrix of the merged width first where patches merge."""
    merged, tp = tower.hidden_size, _ranks(shard, tower)
    if tower.rule not in ("pooled", "budget"):
        merged *= tower.merge**2
    if merged > tower.hidden_size:
        yield Launch("vision_merger_in", Gemm(num_tokens, merged // tp, merged), tower.num_mergers)
    yield Launch("vision_merger_out", Gemm(num_tokens, tower.output_size, merged // tp), tower.num_mergers)


def _ranks(shard: Shard, tower: VisionTower) -> int:
    """Return the ranks that share a layer: 1, each computing all of it, where they do not divide the heads."""
    return shard.tp if tower.num_heads % shard.tp == 0 else 1
