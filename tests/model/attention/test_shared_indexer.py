"""Layers that attend to the keys that an earlier layer chose (GLM-5.2): counts, memory, work, prices, refusals."""

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.model.attention.latent import LatentAttention, SparseLatentDecode
from windtunnel.model.config import model_from_config
from windtunnel.model.launches.forward import decode_launches
from windtunnel.model.memory import kv_bytes_per_token
from windtunnel.model.parallelism import Parallelism
from windtunnel.model.parameters import count_parameters
from windtunnel.model.shape import ModelSpec, Shard
from windtunnel.pricing.aiconfigurator.estimator import measured_estimator, systems_folder
from windtunnel.pricing.estimator import Coverage, RooflineEstimator
from windtunnel.pricing.roofline import Roofline
from windtunnel.schema import decode, encode

GLM = "zai-org/GLM-5.2"


def shard(name: str = GLM, **degrees: int) -> Shard:
    model = catalog.model(name)
    return Shard(model, model.precision, Parallelism(**degrees))


def cores(on: Shard, batch: float, context_tokens: float) -> dict[bool, Any]:
    """The cores of decode, by whether they have an indexer."""
    launches = decode_launches(on, batch, context_tokens)
    assert sum(launch.count for launch in launches) == 78
    return {launch.op.index_num_heads > 0: launch.op for launch in launches}


def test_parameters_are_those_of_the_model_card() -> None:
    """GLM-5's card: 744B, of which 40B are active; GLM-5.2 leaves 57 of 78 indexers out."""
    count = count_parameters(catalog.model(GLM))
    assert count.total == pytest.approx(744e9, rel=0.01)
    assert count.active - count.embedding == pytest.approx(40e9, rel=0.01)
    indexer = 2048 * 32 * 128 + 6144 * (128 + 32) + 2 * 128
    assert count_parameters(catalog.model("zai-org/GLM-5")).total - count.total == 57 * indexer


def test_layers_follow_the_types_of_the_config() -> None:
    shared = [part.indexer.is_shared for _, part in catalog.model(GLM).attentions if isinstance(part, LatentAttention)]
    assert shared == [False, True, False]  # dense full, sparse shared, sparse full
    assert [group.num_layers for group in catalog.model(GLM).layers] == [3, 57, 18]


def test_shared_layers_cache_no_keys_of_an_indexer() -> None:
    assert kv_bytes_per_token(shard(), 10**6) == 78 * 576 * 2 + 21 * (128 + 4)


def test_shared_layers_score_nothing() -> None:
    by_kind = cores(shard(), 4.0, 100_000.0)
    scores = 4 * 100_000 * 32 * 128
    weights = 4 * 2 * (2048 * 32 * 128 + 6144 * (128 + 32))
    assert by_kind[True].flops - by_kind[False].flops == pytest.approx(scores + weights)
    assert by_kind[False].kept_pairs == by_kind[True].kept_pairs == 4 * 2048
    keys = 4 * 100_000 * (128 + 4)
    assert by_kind[True].num_bytes - by_kind[False].num_bytes == pytest.approx(keys + weights / 4)


@pytest.mark.parametrize(("device", "measured_model"), [("b200_sxm", GLM), ("b300_sxm", "nvidia/GLM-5.2-NVFP4")])
@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_shared_layers_cost_their_own_measured_modules(engine: str, device: str, measured_model: str) -> None:
    """SGLang alone was measured without an indexer; its rows stand in for other engines, and the source says so."""
    on, version = shard(tp=8), {"sglang": "0.5.14", "vllm": "0.24.0"}[engine]
    estimator = measured_estimator(catalog.device(device), None, engine, version)
    own = measured_estimator(catalog.device(device), None, "sglang", "0.5.14")
    op = cores(on, 16.0, 8193.0)[False]
    priced = estimator.estimate(op)
    assert priced.coverage is Coverage.MEASURED
    assert "skip_indexer" in priced.source
    assert (", in place of vllm" in priced.source) == (engine == "vllm")
    layer = on.model.attentions[1][1]
    projections = [own.estimate(launch.op).seconds for launch in layer.projections(on, 16.0)]
    file = f"{device}/sparse_attention/sglang/0.5.14/dsa_generation_module_perf.parquet"
    rows = pq.read_table(systems_folder() / file).to_pandas()
    rows = rows[rows.op_name == "dsa_generation_module_skip_indexer"]
    wanted = {"model": measured_model, "kv_cache_dtype": "bfloat16", "num_heads": 8, "batch_size": 16, "step": 8192}
    for column, value in wanted.items():
        rows = rows[rows[column] == value]
    assert priced.seconds + sum(projections) == pytest.approx(float(rows.latency.iloc[0]) * 1e-3, rel=0.02)


def test_a_choice_costs_more_than_none() -> None:
    for estimator in (
        measured_estimator(catalog.device("h200_sxm"), None, "sglang", "0.5.14"),
        RooflineEstimator(Roofline(catalog.device("mi300x"))),
    ):
        by_kind = cores(shard(tp=8), 64.0, 32_768.0)
        assert estimator.estimate(by_kind[False]).seconds < estimator.estimate(by_kind[True]).seconds


@pytest.mark.parametrize(
    ("types", "message"),
    [
        (["shared"] * 78, "begins with 'shared'"),
        (["full"], "one entry for each of the 78 layers"),
        (["full", *["other"] * 77], "has 'other', which cannot be modelled"),
    ],
)
def test_what_cannot_be_read_is_refused(types: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        model_from_config(catalog.model_config(GLM) | {"indexer_types": types}, "tiny")


def test_a_model_is_written_and_read() -> None:
    assert decode(encode(catalog.model(GLM)), ModelSpec) == catalog.model(GLM)


def test_layers_may_share_compressed_vectors_and_leave_out_the_rotated_part() -> None:
    """Mistral Large 4: an indexer projects hidden states; each fourth layer has no rotated part, and layers may read
    the vectors of an earlier one. The count is that of transformers 5.24, a few norms aside."""
    config: dict[str, Any] = {
        "model_type": "mistral_large4_text", "vocab_size": 204800, "hidden_size": 6144, "intermediate_size": 24576,
        "moe_intermediate_size": 6144, "num_hidden_layers": 72, "num_attention_heads": 64, "n_shared_experts": 1,
        "n_routed_experts": 128, "num_experts_per_tok": 4, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "qk_nope_head_dim": 64, "max_position_embeddings": 1048576, "index_topk": 2048,
        "index_head_dim": 128, "index_n_heads": 32, "first_k_dense_replace": 1,
        "no_rope_layers": [1, 1, 1, 0] * 18,
    }  # fmt: skip
    model = model_from_config(config, "large")
    assert count_parameters(model).total == pytest.approx(1_050_118_202_912, rel=1e-7)
    kinds = [part for _, part in model.attentions if isinstance(part, LatentAttention)]
    assert {(part.qk_nope_head_dim, part.qk_rope_head_dim) for part in kinds} == {(64, 64), (128, 0)}
    core = decode_launches(Shard(model, model.precision, Parallelism()), 1.0, 5000.0)[0].op
    assert isinstance(core, SparseLatentDecode)
    assert core.q_lora_rank == 6144
    sharing = model_from_config(config | {"kv_source_layers": [0, 0, 2, 2, *range(4, 72)]}, "sharing")
    own, shared = (Shard(each, each.precision, Parallelism()) for each in (model, sharing))
    assert kv_bytes_per_token(own, 10**6) - kv_bytes_per_token(shared, 10**6) == (512 + 64 + 512) * 2
    saved = count_parameters(model).total - count_parameters(sharing).total
    assert saved == 6144 * (512 + 64 + 512) + 2 * 512
    with pytest.raises(InputError, match="kv_source_layers must have one entry for each of the 72 layers"):
        model_from_config(config | {"kv_source_layers": [0]}, "short")


def test_pooled_keys_of_an_indexer_have_weights_for_the_pool_in_arrays_too() -> None:
    """Tables give a number for each row: where keys are pooled, each has a weight of its own beside."""
    one = cores(shard(), 4.0, 512.0)[True]
    pooled = replace(one, index_pool=2)
    assert pooled.num_weights - one.num_weights == one.hidden_size * one.index_head_dim
    both = replace(one, index_pool=np.array([1, 2]))
    np.testing.assert_array_equal(both.num_weights, [one.num_weights, pooled.num_weights])
