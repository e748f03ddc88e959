from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel import catalog
from windtunnel.model.attention.gated_delta import GatedDeltaAttention
from windtunnel.model.attention.grouped_query import DecodeAttention
from windtunnel.model.attention.latent import SparseLatentDecode
from windtunnel.model.feed_forward.experts import Experts, ExpertsFeedForward
from windtunnel.model.launches.forward import (
    StepBatch,
    decode_launches,
    forward_launches,
    head_launches,
    prefill_launches,
    token_launches,
)
from windtunnel.model.operators import Collective, Gemm, Launch
from windtunnel.model.parallelism import Parallelism
from windtunnel.model.parameters import count_parameters
from windtunnel.model.precision import Format, Precision
from windtunnel.model.shape import ModelSpec, Shard

LLAMA, LLAMA_70B = "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-70B"
MIXTRAL, QWEN_MOE = "mistralai/Mixtral-8x7B-v0.1", "Qwen/Qwen3-30B-A3B"
DEEPSEEK, LITE, NEXT = "deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-V2-Lite", "Qwen/Qwen3-Next-80B-A3B-Instruct"
SHAPES = [LLAMA, LLAMA_70B, MIXTRAL, QWEN_MOE, DEEPSEEK, LITE, NEXT, "google/gemma-2-9b", "openai/gpt-oss-20b"]


def shard(name: str, precision: Precision | None = None, devices_per_node: int = 8, **parallelism: Any) -> Shard:
    model = catalog.model(name)
    return Shard(model, precision or Precision(), Parallelism(**parallelism), devices_per_node)


def flops(launches: Iterable[Launch], *kinds: str) -> float:
    return float(sum(x.op.flops * x.count for x in launches if x.op.kind in kinds))


def matrix_parameters(model: ModelSpec) -> float:
    """Entries of the matrices that one token meets between embedding and head, by the parameter count."""
    count = count_parameters(model)
    matrices = float(count.active - count.embedding - count.lm_head - count.norms)
    for group in model.layers:
        attention, feed_forward = group.attention, group.feed_forward
        others = 0.0  # vectors and short convolutions, which are no matrix products
        if isinstance(attention, GatedDeltaAttention):
            keys = 2 * attention.num_key_heads * attention.key_head_dim
            values = attention.num_value_heads * attention.value_head_dim
            others += (keys + values) * attention.conv_kernel_size + 2 * attention.num_value_heads
        if isinstance(feed_forward, ExpertsFeedForward):
            others += feed_forward.shared_gate * model.hidden_size + feed_forward.router_bias * feed_forward.num_experts
        matrices -= group.num_layers * others
    return matrices


@pytest.mark.parametrize("name", [LLAMA, LLAMA_70B, MIXTRAL, QWEN_MOE, DEEPSEEK, LITE, NEXT, "google/gemma-2-9b"])
def test_a_token_costs_two_operations_per_active_parameter(name: str) -> None:
    """Kaplan et al., arXiv:2001.08361, section 2.1: 2 N FLOPs, attention's core apart."""
    single = shard(name)
    launches = [*token_launches(single, 100), *prefill_launches(single, 1, 100)]
    assert flops(launches, "gemm", "experts") == pytest.approx(2 * 100 * matrix_parameters(single.model), rel=1e-12)


@pytest.mark.parametrize("name", [DEEPSEEK, LITE])
def test_absorbed_decode_costs_the_same_without_context(name: str) -> None:
    single = shard(name)
    launches = [*token_launches(single, 7), *decode_launches(single, 7, 0)]
    kinds = ("gemm", "experts", "latent_decode_attention")
    assert flops(launches, *kinds) == pytest.approx(2 * 7 * matrix_parameters(single.model), rel=1e-12)


@pytest.mark.parametrize(("name", "ways"), [(LLAMA, 8), (LLAMA_70B, 4), (NEXT, 2), ("google/gemma-2-9b", 8)])
def test_tensor_parallel_ranks_share_the_work(name: str, ways: int) -> None:
    """But for the router, which every rank computes whole."""
    single, many = shard(name), shard(name, tp=ways)
    alone, ranks = (
        [x for x in [*token_launches(s, 64), *prefill_launches(s, 2, 32)] if x.name != "router"] for s in (single, many)
    )
    kinds = ("gemm", "experts", "prefill_attention", "gated_delta")
    assert flops(ranks, *kinds) * ways == pytest.approx(flops(alone, *kinds))


def test_latent_down_projections_and_lone_heads_are_repeated() -> None:
    single, many = shard(DEEPSEEK), shard(DEEPSEEK, tp=8)
    down = 2 * 7168 * (1536 + 512 + 64) * 61  # arXiv:2412.19437, section 4.2
    dense = ("qkv_proj", "q_kv_a_proj", "q_b_proj", "o_proj")
    alone, ranks = (flops([x for x in token_launches(s, 1) if x.name in dense], "gemm") for s in (single, many))
    assert ranks * 8 == pytest.approx(alone + 7 * down)
    # Qwen3-30B-A3B has four key/value heads of 128: on eight ranks each has a whole one.
    (qkv,) = [x.op for x in token_launches(shard(QWEN_MOE, tp=8), 1) if x.name == "qkv_proj"]
    assert isinstance(qkv, Gemm)
    assert qkv.n == 32 * 128 // 8 + 2 * 128
    (core,) = [x.op for x in decode_launches(shard(QWEN_MOE, tp=8), 1, 10)]
    assert isinstance(core, DecodeAttention)
    assert core.num_kv_heads == 1


@pytest.mark.parametrize(
    ("parallelism", "tokens_per_rank"),
    [({"tp": 8}, 64), ({"tp": 8, "ep": 8}, 64), ({"tp": 4, "attention_dp": 2, "ep": 2}, 32), ({"attention_dp": 8}, 8)],
)
def test_the_experts_of_all_ranks_compute_every_token(parallelism: dict[str, Any], tokens_per_rank: int) -> None:
    many = shard(QWEN_MOE, **parallelism)
    experts = [x for x in token_launches(many, tokens_per_rank) if isinstance(x.op, Experts)]
    total = 2 * 64 * 8 * 3 * 2048 * 768 * 48
    assert flops(experts, "experts") * 8 == pytest.approx(total)


def test_only_sampled_positions_meet_the_head() -> None:
    launches = {x.name: x.op for x in head_launches(shard(LLAMA, tp=4), 3)}
    assert launches["lm_head"].flops == 2 * 3 * 4096 * (128256 / 4)
    assert launches["logits_all_gather"] == Collective("all_gather", 3 * 128256 * 2, 4)
    assert "logits_all_gather" not in {x.name for x in head_launches(shard(LLAMA), 3)}
    odd = {x.name: x.op for x in head_launches(shard("microsoft/phi-2", tp=32), 1)}["lm_head"]
    assert isinstance(odd, Gemm)
    assert odd.n == -(-51200 // 32)


def collectives(launches: Iterable[Launch]) -> dict[str, tuple[Collective, float]]:
    return {x.name: (x.op, x.count) for x in launches if isinstance(x.op, Collective)}


def test_one_device_sends_nothing() -> None:
    for name in SHAPES:
        assert not collectives(forward_launches(shard(name), StepBatch(4, 100, 50, 1250, 5)))


def test_a_dense_layer_reduces_twice() -> None:
    """Megatron-LM, arXiv:1909.08053, section 3: one all-reduce behind attention and one behind the feed-forward."""
    launched = collectives(token_launches(shard(LLAMA_70B, tp=8), 100))
    reduce = Collective("all_reduce", 100 * 8192 * 2, 8)
    assert launched == {
        "embedding_all_reduce": (reduce, 1),
        "attention_all_reduce": (reduce, 80),
        "feed_forward_all_reduce": (reduce, 80),
    }


@pytest.mark.parametrize("ep", [1, 4])
def test_experts_reduce_once_however_they_are_spread(ep: int) -> None:
    launched = collectives(token_launches(shard(QWEN_MOE, tp=4, ep=ep), 100))
    reduce = Collective("all_reduce", 100 * 2048 * 2, 4)
    assert launched == {
        "embedding_all_reduce": (reduce, 1),
        "attention_all_reduce": (reduce, 48),
        "experts_all_reduce": (reduce, 48),
    }


def test_attention_data_parallelism_gathers_and_scatters_all_tokens() -> None:
    launched = collectives(token_launches(shard(DEEPSEEK, attention_dp=8, ep=8), 10))
    assert launched == {
        "dispatch_all_gather": (Collective("all_gather", 8 * 10 * 7168 * 2, 8), 58),
        "combine_reduce_scatter": (Collective("reduce_scatter", 8 * 10 * 7168 * 2, 8), 58),
    }


def test_ranks_gather_tokens_in_the_format_that_the_engine_quantises_before() -> None:
    fp4 = replace(shard(DEEPSEEK, attention_dp=8, ep=8), precision=Precision(experts=Format.NVFP4))
    quantised = collectives(token_launches(replace(fp4, gathers_quantised=(Format.NVFP4,)), 10))
    other = collectives(token_launches(replace(fp4, gathers_quantised=(Format.FP8_BLOCK,)), 10))
    assert quantised["dispatch_all_gather"][0].message_bytes == 8 * 10 * 7168 * 4.5 / 8
    assert other["dispatch_all_gather"][0].message_bytes == 8 * 10 * 7168 * 2
    assert quantised["combine_reduce_scatter"] == other["combine_reduce_scatter"]


def test_ranks_beyond_a_node_span_nodes() -> None:
    ops = [op for op, _ in collectives(token_launches(shard(LLAMA_70B, tp=16), 1)).values()]
    assert {op.span_nodes for op in ops} == {2}
    ops = [op for op, _ in collectives(token_launches(shard(LLAMA_70B, tp=16, devices_per_node=72), 1)).values()]
    assert {op.span_nodes for op in ops} == {1}


@pytest.mark.parametrize(
    ("tp", "pp", "sends"), [(4, 2, {1: 1}), (8, 2, {2: 1}), (4, 4, {1: 2, 2: 1}), (16, 2, {2: 1}), (8, 1, {})]
)
def test_pipeline_stages_send_within_and_between_nodes(tp: int, pp: int, sends: dict[int, int]) -> None:
    launches = token_launches(shard(LLAMA_70B, tp=tp, pp=pp), 10)
    launched = {x.op.span_nodes: x.count for x in launches if isinstance(x.op, Collective) and x.op.op == "send_recv"}
    assert launched == sends


def test_the_cache_is_written_as_wide_as_it_is_kept() -> None:
    writes = {x.name: x for x in token_launches(shard(LLAMA_70B, Precision(kv_cache=Format.FP8)), 1)}["kv_cache_write"]
    read, written = 2 * 8 * 128 * 2, 2 * 8 * 128
    assert writes.op.num_bytes == read + written
    latent = [x for x in token_launches(shard(DEEPSEEK), 1) if x.name == "kv_cache_write"]
    assert {x.op.num_bytes for x in latent} == {2 * 576 * 2}
    assert sum(x.count for x in latent) == 61


def test_formats_reach_their_operators() -> None:
    precision = Precision(weights=Format.FP8, attention=Format.BF16, experts=Format.NVFP4, lm_head=Format.INT8)
    launches = [*token_launches(shard(DEEPSEEK, precision), 1), *prefill_launches(shard(DEEPSEEK, precision), 1, 8)]
    launched = {x.name: x.op.format for x in launches if isinstance(x.op, Gemm | Experts)}
    assert launched == {
        "q_kv_a_proj": Format.BF16,
        "q_b_proj": Format.BF16,
        "o_proj": Format.BF16,
        "gate_up_proj": Format.FP8,
        "down_proj": Format.FP8,
        "router": Format.BF16,
        "experts": Format.NVFP4,
        "shared_gate_up_proj": Format.FP8,
        "shared_down_proj": Format.FP8,
        "kv_b_proj": Format.BF16,
    }
    assert head_launches(shard(LLAMA, precision), 1)[0].op == Gemm(1, 128256, 4096, Format.INT8)


def test_windows_reach_only_their_layers() -> None:
    launches = decode_launches(shard("openai/gpt-oss-20b"), 1, 1000)
    launched = {x.op.window_tokens: x.count for x in launches if isinstance(x.op, DecodeAttention)}
    assert launched == {128: 12, 0: 12}


@pytest.mark.full
@given(st.sampled_from(SHAPES), st.lists(st.tuples(st.integers(1, 300), st.integers(1, 5000)), min_size=1, max_size=3))
def test_arrays_price_what_numbers_price(name: str, points: list[tuple[int, int]]) -> None:
    single = shard(name, tp=2)
    first, second = (np.array(values, float) for values in zip(*points, strict=True))
    for make in (decode_launches, prefill_launches, lambda s, a, _: [*token_launches(s, a), *head_launches(s, a)]):
        family = make(single, first, second)
        for i, (a, b) in enumerate(points):
            for together, alone in zip(family, make(single, a, b), strict=True):
                assert (together.name, together.count) == (alone.name, alone.count)
                assert np.broadcast_to(together.op.flops, first.shape)[i] == pytest.approx(alone.op.flops)
                assert np.broadcast_to(together.op.num_bytes, first.shape)[i] == pytest.approx(alone.op.num_bytes)


def test_a_step_is_the_sum_of_its_parts() -> None:
    single = shard(MIXTRAL, tp=2)
    batch = StepBatch(decode_requests=8, decode_context_tokens=500, prefill_tokens=300, prefill_pairs=45_000, sampled=9)
    parts = [
        *token_launches(single, 308),
        *prefill_launches(single, 1, 300),
        *decode_launches(single, 8, 500),
        *head_launches(single, 9),
    ]
    assert [x.name for x in forward_launches(single, batch)] == [x.name for x in parts]
    kinds = {x.op.kind for x in parts}
    assert flops(forward_launches(single, batch), *kinds) == pytest.approx(flops(parts, *kinds))


def test_sparse_attention_absorbs_in_prefill_too() -> None:
    """One core for indexer, choice and attention, with norms, rotation and cache write as it was measured."""
    sparse = shard("deepseek-ai/DeepSeek-V3.2", tp=8)
    names = [launch.name for launch in token_launches(sparse, 16)]
    assert names.count("q_b_proj") == 2
    assert "kv_cache_write" not in names
    assert [launch.name for launch in prefill_launches(sparse, 1, 16)] == ["sparse_latent_attention_prefill"] * 2
    decode = decode_launches(sparse, 4, 100.0)[0].op
    assert isinstance(decode, SparseLatentDecode)
    assert (decode.num_heads, decode.index_num_heads, decode.top_k) == (16, 64, 2048)


def test_a_norm_over_all_heads_is_summed_over_tensor_parallel_ranks() -> None:
    """MiniMax-M2: squares of query and key in fp32, a sum in every one of 62 layers; Qwen3 norms each head."""

    def sums(name: str, tp: int) -> list[Launch]:
        return [x for x in token_launches(shard(name, tp=tp), 16) if x.name == "qk_norm_all_reduce"]

    (launched,) = sums("MiniMaxAI/MiniMax-M2.5", 4)
    assert isinstance(launched.op, Collective)
    assert (launched.count, launched.op.message_bytes, launched.op.num_ranks) == (62, 16 * 8, 4)
    assert not sums("MiniMaxAI/MiniMax-M2.5", 1)
    assert not sums(QWEN_MOE, 4)


@pytest.mark.parametrize(("tf32", "computed"), [(False, Format.FP32), (True, Format.TF32)])
def test_a_router_in_fp32_converts_its_input_and_multiplies_as_the_engine_says(tf32: bool, computed: Format) -> None:
    """MiniMax-M2's router is fp32 in vLLM and SGLang: 2 bytes of a hidden value become 4; Qwen3's is bf16."""
    total = replace(shard("MiniMaxAI/MiniMax-M2.5", tp=4), tf32=tf32)
    launches = {launch.name: launch for launch in token_launches(total, 16)}
    assert launches["router"] == Launch("router", Gemm(16, 256, 3072, computed), 62)
    assert launches["router_input"].op.num_bytes == 16 * 3072 * 6
    plain = {launch.name: launch for launch in token_launches(replace(shard(QWEN_MOE), tf32=tf32), 16)}
    assert isinstance(plain["router"].op, Gemm)
    assert plain["router"].op.format is Format.BF16
    assert "router_input" not in plain


def test_shared_experts_beside_the_routed_ones_add_nothing_up_to_the_limit() -> None:
    single = shard(DEEPSEEK, tp=8)
    beside = replace(single, beside_tokens=256)
    for launch in token_launches(beside, np.array([1.0, 256.0, 257.0])):
        alone = np.broadcast_to(launch.adds, 3)
        assert alone.tolist() == ([0.0, 0.0, 1.0] if launch.name.startswith("shared_") else [1.0, 1.0, 1.0])
    assert all(np.all(np.asarray(launch.adds) == 1.0) for launch in token_launches(single, 1))
    assert flops(token_launches(beside, 1)) == flops(token_launches(single, 1))


@pytest.mark.parametrize("name", [NEXT, "nvidia/Nemotron-H-56B-Base-8K"])
def test_a_recurrent_chunk_costs_its_own_tokens_whatever_lies_before_it(name: str) -> None:
    """Chunks of 512 tokens after 0 and after 3,584 cached tokens: to `PrefillBatch` 1 x 512 and 1/15 x 7,680."""
    kinds = ("gated_delta", "causal_convolution", "state_space_scan")
    alone, behind = (
        [launch.op for launch in prefill_launches(shard(name), 512 / length, float(length)) if launch.op.kind in kinds]
        for length in (512, 2 * 3584 + 512)
    )
    assert alone
    assert [op.flops for op in behind] == pytest.approx([op.flops for op in alone])
    assert [op.num_bytes for op in behind] == pytest.approx([op.num_bytes for op in alone])
    assert [op.num_tokens for op in behind] == pytest.approx([512.0] * len(alone))
