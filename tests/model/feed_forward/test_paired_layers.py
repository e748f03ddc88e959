"""LongCat-Flash: two attentions and two dense parts in a layer, experts beside the first, some of which do nothing."""

from typing import Any

import pytest

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.model.config import model_from_config
from windtunnel.model.feed_forward.dense import DenseFeedForward
from windtunnel.model.feed_forward.experts import ExpertsFeedForward
from windtunnel.model.launches.forward import token_launches
from windtunnel.model.memory import kv_bytes_per_token
from windtunnel.model.operators import Gemm
from windtunnel.model.parallelism import Parallelism
from windtunnel.model.parameters import count_parameters
from windtunnel.model.precision import Format
from windtunnel.model.shape import ModelSpec, Shard
from windtunnel.schema import decode, encode

LONGCAT: dict[str, Any] = {
    "architectures": ["LongcatFlashForCausalLM"],
    "model_type": "longcat_flash",
    "expert_ffn_hidden_size": 2048,
    "ffn_hidden_size": 12288,
    "hidden_size": 6144,
    "kv_lora_rank": 512,
    "max_position_embeddings": 131072,
    "moe_topk": 12,
    "n_routed_experts": 512,
    "num_attention_heads": 64,
    "num_layers": 28,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 131072,
    "zero_expert_num": 256,
}
"""config.json of meituan-longcat/LongCat-Flash-Chat."""


def shard(**degrees: int) -> Shard:
    model = model_from_config(LONGCAT, "LongCat-Flash")
    return Shard(model, model.precision, Parallelism(**degrees))


def test_parameters_are_those_of_its_card() -> None:
    """560 billion, about 27 of them active. transformers 5.24 gives experts that do nothing a first matrix too, and
    the biases of routers are no parameters there."""
    count = count_parameters(shard().model)
    idle = 28 * 256 * 2 * 2048 * 6144
    assert count.total == 741_053_585_408 - idle + 28 * 768
    assert count.active == pytest.approx(27e9, rel=0.04)
    assert decode(encode(shard().model), ModelSpec) == shard().model


def test_a_layer_is_two_with_a_cache_each() -> None:
    kinds = [(type(group.feed_forward), group.num_layers) for group in shard().model.layers]
    assert sorted(kinds, key=str) == [(DenseFeedForward, 28), (ExpertsFeedForward, 28)]
    assert kv_bytes_per_token(shard(), 131072) == 56 * 576 * 2


def test_a_token_meets_the_mean_of_its_choice_that_computes() -> None:
    """12 of 768 are chosen, of which 512 compute; the router chooses among all."""
    launches = {launch.name: launch for launch in token_launches(shard(tp=8), 16)}
    assert (launches["experts"].op.experts_per_token, launches["experts"].op.num_experts) == (8, 512)
    assert launches["router"].op == Gemm(16, 768, 6144, Format.FP32)


@pytest.mark.parametrize("name", ["google/gemma-4-26B-A4B", "LongCat-Flash"])
def test_a_dense_part_beside_experts_takes_time_where_shared_experts_would_not(name: str) -> None:
    model = shard().model if name == "LongCat-Flash" else catalog.model(name)
    part = Shard(model, model.precision, Parallelism(), beside_tokens=256)
    adds = {launch.name: launch.adds for launch in token_launches(part, 16)}
    assert adds["shared_down_proj"] == 1.0


def test_more_experts_a_token_than_there_are_is_refused() -> None:
    with pytest.raises(InputError, match="each token uses 600 experts"):
        model_from_config(LONGCAT | {"moe_topk": 600}, "LongCat-Flash")
