"""Layers that attend to keys and values of an earlier layer: what they keep, compute and weigh; values of one layer."""

from typing import Any

import pytest

from windtunnel.errors import InputError
from windtunnel.model.attention.grouped_query import GroupedQueryAttention
from windtunnel.model.config import model_from_config
from windtunnel.model.feed_forward.dense import DenseFeedForward
from windtunnel.model.launches.forward import decode_launches, token_launches
from windtunnel.model.memory import kv_bytes_per_token, weight_bytes
from windtunnel.model.operators import Gemm, Launch
from windtunnel.model.parallelism import Parallelism
from windtunnel.model.parameters import count_parameters
from windtunnel.model.shape import ModelSpec, Shard

HUNYUAN: dict[str, Any] = {
    "model_type": "hunyuan", "hidden_size": 6400, "intermediate_size": 18304, "num_hidden_layers": 64,
    "num_attention_heads": 80, "num_key_value_heads": 8, "num_experts": 16, "moe_topk": 1, "num_shared_expert": 1,
    "use_qk_norm": True, "vocab_size": 129024, "max_position_embeddings": 131072, "tie_word_embeddings": True,
    "use_cla": True, "cla_share_factor": 2,
}  # fmt: skip
"""Hunyuan-Large (arXiv:2411.02265, table 1)."""
GEMMA: dict[str, Any] = {
    "model_type": "gemma4_text", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 1000,
    "max_position_embeddings": 4096, "sliding_window": 64, "num_kv_shared_layers": 4,
    "hidden_size_per_layer_input": 16, "layer_types": ["sliding_attention", "full_attention"] * 4,
}  # fmt: skip


def shard(config: dict[str, Any], tp: int = 1) -> Shard:
    model = model_from_config(config, "tiny")
    return Shard(model, model.precision, Parallelism(tp=tp))


def total(launches: list[Launch], name: str) -> float:
    return sum(launch.count for launch in launches if launch.name == name)


def test_hunyuan_large_is_as_its_report_says() -> None:
    """389 G parameters, 52 G of them active, and half of its layers have keys and values."""
    large = shard(HUNYUAN)
    count = count_parameters(large.model)
    assert count.total == pytest.approx(389e9, rel=0.005)
    assert count.active == pytest.approx(52e9, rel=0.02)
    assert kv_bytes_per_token(large, 131072) == 32 * 2 * 8 * 80 * 2
    assert kv_bytes_per_token(shard(HUNYUAN | {"use_cla": False}), 131072) == 64 * 2 * 8 * 80 * 2


def test_layers_without_keys_attend_and_write_none() -> None:
    small = shard(GEMMA)
    tokens = token_launches(small, 1.0)
    assert total(tokens, "kv_cache_write") == 4
    assert total(tokens, "o_proj") == 8
    assert {op.n for name, op in ((launch.name, launch.op) for launch in tokens) if name == "qkv_proj"} == {384, 256}  # type: ignore[union-attr]
    assert total(decode_launches(small, 1.0, 1024.0), "attention_decode") == 4
    assert kv_bytes_per_token(small, 4096) == 2 * 2 * 2 * 32 * 2


def test_inputs_of_layers_are_whole_on_every_rank_and_their_table_is_split() -> None:
    def step(tp: int) -> tuple[float, float]:
        launches = token_launches(shard(GEMMA, tp), 1.0)
        gemms = {launch.name: launch.op for launch in launches if isinstance(launch.op, Gemm)}
        return gemms["layer_inputs_proj"].n, gemms["layer_input_down_proj"].n

    assert (step(1), step(2)) == ((128, 16), (64, 16))
    assert total(token_launches(shard(GEMMA), 1.0), "layer_input_up_proj") == 8
    assert total(token_launches(shard(GEMMA, 2), 1.0), "layer_inputs_all_gather") == 1
    weights = [weight_bytes(shard(GEMMA, tp)) / 2 for tp in (1, 2)]
    assert weights[0] == pytest.approx(count_parameters(shard(GEMMA).model).total, rel=0.01)
    without = [weight_bytes(shard(GEMMA | {"hidden_size_per_layer_input": 0}, tp)) / 2 for tp in (1, 2)]
    table, split, whole = 1000 * 128, 128 * 256, 8 * (2 * 16 + 1) * 256 + 16
    assert weights[0] - without[0] == table + split + whole
    assert weights[1] - without[1] == (table + split) / 2 + whole


def widths(model: ModelSpec) -> list[tuple[int, int, int]]:
    parts = [(group.num_layers, group.attention, group.feed_forward) for group in model.layers]
    assert all(
        isinstance(part, GroupedQueryAttention) and isinstance(other, DenseFeedForward) for _, part, other in parts
    )
    return [(num, part.num_heads, other.intermediate_size) for num, part, other in parts]  # type: ignore[union-attr]


def test_a_layer_may_have_values_of_its_own() -> None:
    config = GEMMA | {"num_kv_shared_layers": 0, "layer_types": ["full_attention"] * 8}
    lists = {"intermediate_size": [512] * 6 + [1024] * 2, "num_attention_heads_per_layer": [4] * 4 + [8] * 4}
    expected = [(4, 4, 512), (2, 8, 512), (2, 8, 1024)]
    assert widths(model_from_config(config | lists, "lists")) == expected
    by_number = {str(index): {"num_attention_heads": 4} for index in range(4)}
    by_number |= {f"{index:02}": {"intermediate_size": 1024} for index in (6, 7)}
    assert widths(model_from_config(config | {"per_layer_config": by_number}, "numbers")) == expected
    types = config | {"layer_types": ["sliding_attention"] * 4 + ["full_attention"] * 4}
    by_type = {"sliding_attention": {"num_attention_heads": 4}}
    assert widths(model_from_config(types | {"per_layer_config": by_type}, "types")) == [(4, 4, 512), (4, 8, 512)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"intermediate_size": [512, 1024]}, "intermediate_size must have one entry for each of the 8 layers"),
        ({"per_layer_config": {"5": 512}}, "5 is 512; an object is needed"),
        ({"per_layer_config": [1]}, "per_layer_config is \\[1\\]; an object is needed"),
        ({"use_cla": True}, "has no cla_share_factor"),
    ],
)
def test_what_says_nothing_of_a_layer_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        model_from_config(GEMMA | changes, "tiny")


def test_latent_attention_to_keys_of_another_layer_is_refused() -> None:
    latent = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    for other in ({"use_cla": True, "cla_share_factor": 2}, {"num_kv_shared_layers": 2}):
        config = {key: GEMMA[key] for key in GEMMA if key not in ("num_kv_shared_layers", "layer_types")}
        with pytest.raises(InputError, match="this key is not known and may shape attention"):
            model_from_config(config | latent | other | {"model_type": "deepseek_v3"}, "tiny")
