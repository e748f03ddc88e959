"""Kimi delta attention, and the latent attention beside it: counts as published, memory, launches, prices, refusals."""

from typing import Any

import pyarrow.parquet as pq
import pytest

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.model.attention.kimi_delta import KimiDelta, KimiDeltaAttention
from windtunnel.model.attention.latent import LatentAttention
from windtunnel.model.config import model_from_config
from windtunnel.model.feed_forward.experts import ExpertsFeedForward
from windtunnel.model.launches.forward import decode_launches, prefill_launches, token_launches
from windtunnel.model.memory import kv_bytes_per_token, recurrent_state_bytes
from windtunnel.model.operators import Collective, Elementwise, Gemm
from windtunnel.model.parallelism import Parallelism
from windtunnel.model.parameters import count_parameters
from windtunnel.model.precision import Format
from windtunnel.model.shape import ModelSpec, Shard
from windtunnel.pricing.aiconfigurator.estimator import measured_estimator, systems_folder
from windtunnel.pricing.estimator import Coverage, RooflineEstimator
from windtunnel.pricing.roofline import Roofline
from windtunnel.schema import decode, encode

K3, LINEAR = "moonshotai/Kimi-K3", "moonshotai/Kimi-Linear-48B-A3B-Instruct"


def shard(name: str = K3, **degrees: int) -> Shard:
    model = catalog.model(name)
    return Shard(model, model.precision, Parallelism(**degrees))


def part(name: str, kind: type[Any]) -> Any:
    return next(attention for _, attention in catalog.model(name).attentions if isinstance(attention, kind))


def core(launches: Any) -> KimiDelta:
    return next(launch.op for launch in launches if isinstance(launch.op, KimiDelta))


def test_parameters_are_those_of_the_model_card() -> None:
    """ "48B total, 3B activated" (arXiv:2510.26692), which leave the tables out."""
    count = count_parameters(catalog.model(LINEAR))
    assert count.total - count.embedding - count.lm_head == pytest.approx(48e9, rel=0.01)
    assert count.active - count.embedding == pytest.approx(3e9, rel=0.04)


def test_layers_are_counted_by_hand() -> None:
    """vLLM 0.33 `in_proj_qkvgfab`, `f_b_proj`, `conv1d`, `dt_bias`, `A_log`; `KimiK3MergedQKVGateLinear`."""
    width = 96 * 128
    delta = 7168 * (4 * width + 128 + 96) + 128 * width + width * 7168 + 3 * width * 4 + width + 96
    assert part(K3, KimiDeltaAttention).num_parameters(7168) == delta
    latent = 7168 * (1536 + 576 + width) + 1536 * 96 * 192 + 512 * 96 * 256 + width * 7168
    assert part(K3, LatentAttention).num_parameters(7168) == latent
    small = 32 * 128
    low_rank = 2304 * (3 * small + 2 * 128 + 32) + 2 * 128 * small + small * 2304 + 3 * small * 4 + small + 32
    assert part(LINEAR, KimiDeltaAttention).num_parameters(2304) == low_rank
    experts = next(f for _, f in catalog.model(K3).feed_forwards if isinstance(f, ExpertsFeedForward))
    assert experts.parameters(7168).routed == 896 * 3 * 3584 * 3072
    assert experts.parameters(7168).shared == 3 * 7168 * 2 * 3072
    assert experts.parameters(7168).router == 7168 * 896 + 896 + 2 * 7168 * 3584 + 3584


def test_layers_follow_the_lists_of_the_config() -> None:
    groups = [(group.num_layers, type(group.attention)) for group in catalog.model(K3).layers]
    assert groups == [(1, KimiDeltaAttention), (68, KimiDeltaAttention), (24, LatentAttention)]
    assert catalog.model(K3).precision.experts is Format.MXFP4
    assert catalog.model(K3).precision.weights is Format.BF16


def test_state_is_that_of_vllm() -> None:
    """vLLM 0.33 `MambaStateShapeCalculator.kda_state_shape`: [heads, dim, dim] and [kernel - 1, 3 widths]."""
    assert recurrent_state_bytes(shard(tp=8)) == 69 * (12 * 128 * 128 * 4 + 3 * 12 * 128 * 3 * 2)
    assert kv_bytes_per_token(shard(tp=8), 10**6) == 24 * 576 * 2


def test_gates_are_projected_beside_queries_and_nothing_is_rotated() -> None:
    every = token_launches(shard(tp=8), 64)
    launches = {launch.name: launch for launch in every}
    assert "rope" not in launches
    down, latent = launches["qkv_gates_proj"].op, launches["q_kv_a_proj"].op
    assert isinstance(down, Gemm)
    assert isinstance(latent, Gemm)
    assert down.n == 4 * 12 * 128 + 128 + 12
    assert latent.n == 1536 + 576 + 12 * 128
    assert launches["attention_gate"].count == 24
    assert sum(launch.count for launch in every if launch.name == "gates_b_proj") == 69


def test_outputs_that_are_normed_are_summed_at_both_widths() -> None:
    """vLLM 0.33 `LatentMoERunner`: partial sums of routed and shared experts in one all-reduce."""
    summed = next(launch.op for launch in token_launches(shard(tp=8), 64) if launch.name == "experts_all_reduce")
    assert isinstance(summed, Collective)
    assert summed.message_bytes == 64 * (7168 + 3584) * 2


def test_norms_read_the_blocks_before_them() -> None:
    """93 layers in blocks of 12: none before the first layer, then 1 to 8."""
    model = catalog.model(K3)
    assert model.earlier_blocks == (12 * (1 + 2 + 3 + 4 + 5 + 6 + 7) + 8 * 8) / 93
    norm = next(launch.op for launch in token_launches(shard(), 1) if launch.name == "input_norm")
    assert isinstance(norm, Elementwise)
    assert norm.bytes_per_row == pytest.approx(7168 * 2 * (4 + model.earlier_blocks))
    assert catalog.model(LINEAR).earlier_blocks == 0


def seconds_of(device: str, engine: str, *kernels: str, **point: int) -> float:
    """Sum of measured kernels with 12 heads."""
    rows = pq.read_table(systems_folder() / device / "kda" / engine / "kda_perf.parquet").to_pandas()
    rows = rows[rows.kernel_source.isin(kernels) & (rows.num_k_heads == 12) & (rows.phase != "verify")]
    for column, value in point.items():
        rows = rows[rows[column] == value]
    assert len(rows) == len(kernels)
    return float(rows.latency.sum()) * 1e-3


@pytest.mark.parametrize("batch", [1, 64, 1024])
def test_a_decode_takes_the_faster_of_fused_and_separate_kernels(batch: int) -> None:
    estimator = measured_estimator(catalog.device("b200_sxm"), None, "vllm", "0.24.0")
    priced = estimator.estimate(core(decode_launches(shard(tp=8), float(batch), 5000.0)))
    place = ("b200_sxm", "vllm/0.1.dev19262")
    fused = seconds_of(*place, "fused_kda_decode", batch_size=batch)
    apart = seconds_of(*place, "causal_conv1d_update", "fused_recurrent_kda_packed_decode", batch_size=batch)
    assert priced.coverage is Coverage.MEASURED
    assert priced.seconds == pytest.approx(min(fused, apart))


def test_a_prompt_costs_the_measured_chunks_and_a_convolution() -> None:
    launches = prefill_launches(shard(tp=8), 1.0, 8192.0)
    assert [launch.name for launch in launches][:2] == ["kimi_convolution_prefill", "kimi_delta_prefill"]
    estimator = measured_estimator(catalog.device("gb300"), None, "vllm", "0.27.0")
    priced = estimator.estimate(core(launches))
    measured = seconds_of("gb300", "vllm/0.27.0", "flashkda_fwd", batch_size=1, seq_len=8192)
    assert priced.coverage is Coverage.MEASURED
    assert priced.seconds == pytest.approx(measured)


def test_rates_of_channels_are_read_beside_the_rest() -> None:
    op = core(decode_launches(shard(tp=8), 8.0, 100.0))
    values = 12 * 128
    assert op.num_bytes == 8 * (2 * values * 128 * 4 + 2 * 4 * values * 2 + values * 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_attn_config": {"kda_layers": [1]}}, "has no num_heads"),
        ({"linear_attn_config": {"kda_layers": "all"}}, "a list of whole numbers is needed"),
        ({"linear_attn_config": 3}, "linear_attn_config is 3; an object is needed"),
    ],
)
def test_what_cannot_be_read_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        model_from_config(catalog.model_config(LINEAR) | changes, "tiny")


def test_a_model_is_written_and_read() -> None:
    assert decode(encode(catalog.model(K3)), ModelSpec) == catalog.model(K3)


@pytest.mark.parametrize("decoding", [False, True])
def test_devices_that_nobody_measured_have_a_price(decoding: bool) -> None:
    op = KimiDelta(8.0, 1.0 if decoding else 512.0, 12, 12, 128, 128, 4, decode=decoding)
    assert 1e-6 < float(RooflineEstimator(Roofline(catalog.device("mi300x"))).estimate(op).seconds) < 1e-2


def newer(config: dict[str, Any]) -> ModelSpec:
    config = {"vocab_size": 154880, "max_position_embeddings": 1048576, "num_hidden_layers": 45} | config
    return model_from_config(config | {"kv_lora_rank": 512, "num_experts_per_tok": 8, "n_shared_experts": 1}, "newer")


def test_groups_end_with_a_layer_that_attends_to_everything() -> None:
    """Ling 3: both gates of the delta rule are one matrix, and latent attention has a gate of one value a head. The
    count is that of transformers 5.24, with the biases of 40 routers that are no parameters there."""
    config = {"model_type": "bailing_hybrid", "hidden_size": 2560, "intermediate_size": 6144, "vocab_size": 157184}
    config |= {"num_hidden_layers": 42, "num_attention_heads": 32, "num_experts": 512, "moe_intermediate_size": 768}
    config |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "head_dim": 128}
    config |= {"short_conv_kernel_size": 4, "layer_group_size": 6, "kda_lower_bound": -5.0, "first_k_dense_replace": 2}
    ling = newer(config)
    assert count_parameters(ling).total == 124_414_191_072 + 40 * 512
    assert sum(num for num, kind in ling.attentions if isinstance(kind, LatentAttention)) == 7
    names = {launch.name: launch for launch in token_launches(Shard(ling, ling.precision, Parallelism(tp=2)), 4.0)}
    assert "gates_b_proj" not in names
    assert names["qkv_gates_proj"].op.n == (5 * 4096 + 32) / 2
    assert names["attention_gate"].op.num_bytes == 4 * (2 * 16 * 128 + 16) * 2


def test_an_indexer_may_pool_its_keys() -> None:
    """GLM-5.3-Flash: the delta rule, and sparse latent attention without rotation whose indexer pools four keys into
    one. The count is that of transformers 5.24, within a millionth: nothing weighs the sum of its streams."""
    config = {
        "model_type": "glm5_next_text",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 64,
    }
    config |= {"layer_types": (["linear_attention"] * 3 + ["deepseek_sparse_attention"]) * 11 + ["linear_attention"]}
    config |= {"linear_attn_config": {"num_heads": 64, "head_dim": 128, "short_conv_kernel_size": 4, "kda_layers": [0]}}
    config |= {"n_routed_experts": 288, "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "hc_mult": 4}
    config |= {"q_lora_rank": 1536, "qk_nope_head_dim": 256, "qk_rope_head_dim": 0, "v_head_dim": 256, "head_dim": 0}
    config |= {"index_topk": 2048, "index_head_dim": 128, "index_n_heads": 32, "mla_use_nope": True}
    glm = newer(config | {"index_kpool": 16})
    assert count_parameters(glm).total == pytest.approx(313_326_816_766, rel=1e-6)
    assert [num for num, kind in glm.attentions if isinstance(kind, LatentAttention)] == [11]
    pooled, plain = (Shard(each, each.precision, Parallelism()) for each in (glm, newer(config)))
    assert kv_bytes_per_token(pooled, 10**6) == 11 * (512 * 2 + 132 / 16)
    cores: list[Any] = [
        launch.op
        for each in (pooled, plain)
        for launch in decode_launches(each, 4.0, 100_000.0)
        if launch.name == "sparse_latent_attention_decode"
    ]
    scores, gates = 4 * 100_000 * 32 * 128, 4 * 2 * 4096 * 128
    assert cores[1].flops - cores[0].flops == pytest.approx(scores * 15 / 16 - gates)
    estimator = measured_estimator(catalog.device("b200_sxm"), None, "vllm", "0.24.0")
    assert 0 < estimator.estimate(cores[0]).seconds < estimator.estimate(cores[1]).seconds
