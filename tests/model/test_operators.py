from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.model.attention.gated_delta import GatedDelta
from windtunnel.model.attention.grouped_query import DecodeAttention, PrefillAttention
from windtunnel.model.attention.latent import LatentDecodeAttention, LatentPrefillAttention
from windtunnel.model.feed_forward.experts import Experts
from windtunnel.model.operators import Collective, Elementwise, Gemm, axis_values
from windtunnel.model.precision import Format

PREFILL: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}


def test_a_gemm_reads_its_weights_once() -> None:
    op = Gemm(3, 8, 16)
    assert op.flops == 2 * 3 * 8 * 16
    assert op.num_bytes == 2 * (8 * 16 + 3 * 16 + 3 * 8)
    assert Gemm(0, 256, 256, Format.FP8_BLOCK).num_bytes == 256 * 256 + 4 * 4  # four blocks, a scale each
    assert Gemm(1, 1, 256, Format.NVFP4).num_bytes == pytest.approx(2 * 256 * 4.5 / 8 + 2)


@pytest.mark.full
@given(st.integers(1, 4000), st.integers(1, 4000))
def test_window_pairs_equal_a_walk_over_the_queries(num_tokens: int, window: int) -> None:
    """Each query sees itself and up to window - 1 keys before it; half a key per query is the closed form's error."""
    summed = sum(min(position + 1, window) for position in range(num_tokens))
    counted = float(np.asarray(PrefillAttention(1, num_tokens, **PREFILL, window_tokens=window).num_pairs))
    assert abs(counted - summed) <= 0.5 * num_tokens


@given(st.lists(st.integers(1, 500), min_size=1, max_size=8))
def test_chunks_have_the_pairs_of_the_whole_prompt(chunks: list[int]) -> None:
    """The two sums that stand for a batch of chunks: C tokens and W pairs."""
    done, pairs = 0, 0.0
    for chunk in chunks:
        pairs += chunk * (done + chunk / 2)
        done += chunk
    length = 2 * pairs / done
    prompt, split = PrefillAttention(1, done, **PREFILL), PrefillAttention(done / length, length, **PREFILL)
    assert split.num_pairs == pytest.approx(prompt.num_pairs)
    assert split.flops == pytest.approx(prompt.flops)
    assert split.num_bytes == pytest.approx(prompt.num_bytes)


def test_a_prompt_costs_what_its_decode_steps_cost_in_arithmetic() -> None:
    steps = DecodeAttention(1, np.arange(1.0, 1001.0), **PREFILL).flops
    assert np.sum(steps) == pytest.approx(PrefillAttention(1, 1000, **PREFILL).flops, rel=2e-3)


def test_decode_reads_the_cache_in_its_format_and_no_further_than_the_window() -> None:
    bf16 = DecodeAttention(4, 10_000, **PREFILL).num_bytes
    fp8 = DecodeAttention(4, 10_000, **PREFILL, kv_format=Format.FP8).num_bytes
    cache = 4 * 10_000 * 2 * 8 * 128
    assert bf16 - fp8 == cache
    near = DecodeAttention(4, 10_000, **PREFILL, window_tokens=128)
    assert near.flops == DecodeAttention(4, 128, **PREFILL).flops
    assert DecodeAttention(4, 100, **PREFILL, window_tokens=128).seen_tokens == 100


def test_latent_decode_reads_576_values_a_token() -> None:
    """DeepSeek-V3: 512 compressed values and 64 rotated ones, whatever the number of heads."""
    op = LatentDecodeAttention(1, 1000, num_heads=128, kv_lora_rank=512, rope_head_dim=64)
    longer = LatentDecodeAttention(1, 1001, num_heads=128, kv_lora_rank=512, rope_head_dim=64)
    assert longer.num_bytes - op.num_bytes == 576 * 2
    # A query meets 576 values of a key and adds up 512 of them.
    assert longer.flops - op.flops == 2 * 128 * (576 + 512)


def test_latent_prefill_is_attention_with_heads_of_two_widths() -> None:
    op = LatentPrefillAttention(2, 100, num_heads=16, qk_head_dim=192, v_head_dim=128)
    assert op.flops == 2 * 2 * (100**2 / 2) * 16 * (192 + 128)


def test_a_delta_state_is_read_and_written_whatever_the_tokens() -> None:
    shape: dict[str, Any] = {
        "num_key_heads": 16,
        "num_value_heads": 32,
        "key_head_dim": 128,
        "value_head_dim": 128,
        "conv_kernel_size": 4,
    }
    assert GatedDelta(1, 1, **shape).state_bytes == 32 * 128 * 128 * 4
    single, two = GatedDelta(1, 1, **shape), GatedDelta(1, 2, **shape)
    assert single.num_bytes - (two.num_bytes - single.num_bytes) == 2 * single.state_bytes
    assert two.flops == 2 * single.flops


def experts(num_tokens: float, tp: int = 1, ep: int = 1) -> Experts:
    return Experts(num_tokens, 4096, 1536, num_experts=128, experts_per_token=8, tp=tp, ep=ep)


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (8, 1), (1, 8), (2, 4)])
def test_ranks_share_the_experts_work(tp: int, ep: int) -> None:
    assert experts(64, tp, ep).flops * tp * ep == pytest.approx(2 * 64 * 8 * 3 * 4096 * 1536)
    assert experts(64, tp, ep).active_experts * ep == pytest.approx(experts(64).active_experts)


def test_active_experts_equal_random_routing() -> None:
    rng = np.random.default_rng(0)
    figures = [len({int(e) for _ in range(20) for e in rng.choice(128, 8, replace=False)}) for _ in range(200)]
    assert experts(20).active_experts == pytest.approx(np.mean(figures), rel=0.01)
    assert experts(1).active_experts == pytest.approx(8)
    assert experts(1e6).active_experts == pytest.approx(128)


@pytest.mark.parametrize(
    ("name", "sent"),
    [
        ("all_reduce", 2 * 7 / 8),
        ("all_gather", 7 / 8),
        ("reduce_scatter", 7 / 8),
        ("all_to_all", 7 / 8),
        ("send_recv", 1.0),
    ],
)
def test_bytes_on_the_link(name: str, sent: float) -> None:
    """nccl-tests, doc/PERFORMANCE.md: bus bandwidth over algorithm bandwidth."""
    assert Collective(name, 1024, 8).num_bytes == 1024 * sent


def test_an_operator_is_interpolated_along_its_axes() -> None:
    assert list(axis_values(Gemm(np.arange(3.0), 8, 16, Format.FP8))) == ["m"]


@pytest.mark.parametrize(
    "op",
    [
        Gemm(np.array([1.0, 7, 64]), 128, 256, Format.FP8_BLOCK),
        PrefillAttention(np.array([1.0, 2, 3]), np.array([9.0, 300, 77]), **PREFILL, window_tokens=100),
        DecodeAttention(np.array([1.0, 2, 3]), np.array([9.0, 300, 77]), **PREFILL, window_tokens=100),
        LatentPrefillAttention(np.array([1.0, 2, 3]), np.array([9.0, 300, 77]), 16, 192, 128),
        LatentDecodeAttention(np.array([1.0, 2, 3]), np.array([9.0, 300, 77]), 16, 512, 64),
        GatedDelta(np.array([1.0, 2, 3]), np.array([9.0, 300, 77]), 16, 32, 128, 128, 4),
        Experts(np.array([1.0, 7, 64]), 4096, 1536, 128, 8),
        Elementwise("x", np.array([1.0, 7, 64]), 12.0),
        Collective("all_reduce", np.array([1.0, 7, 64]), 4),
    ],
    ids=lambda op: op.kind,
)
def test_a_family_equals_its_members(op: Gemm) -> None:
    flops, num_bytes = np.asarray(op.flops), np.asarray(op.num_bytes)
    for i in range(3):
        single = type(op)(**{**vars(op), **{axis: float(values[i]) for axis, values in axis_values(op).items()}})  # type: ignore[index]
        assert single.flops == pytest.approx(flops[i])
        assert single.num_bytes == pytest.approx(num_bytes[i])


def test_a_collective_that_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no collective 'all_redcue'; known: all_reduce"):
        Collective("all_redcue", 1024.0, 8)
