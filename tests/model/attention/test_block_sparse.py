"""MiniMax-M3's block-sparse attention: counts as published, memory, launches, work, prices, refusals."""

from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.model.attention.block_sparse import BlockSparseAttention, BlockSparseDecode, BlockSparsePrefill
from windtunnel.model.attention.grouped_query import GroupedQueryAttention
from windtunnel.model.config import model_from_config
from windtunnel.model.launches.forward import decode_launches, prefill_launches, token_launches
from windtunnel.model.memory import kv_bytes_per_token
from windtunnel.model.operators import Gemm
from windtunnel.model.parallelism import Parallelism
from windtunnel.model.parameters import count_parameters
from windtunnel.model.precision import Format
from windtunnel.model.shape import ModelSpec, Shard
from windtunnel.pricing.aiconfigurator.estimator import measured_estimator, systems_folder
from windtunnel.pricing.estimator import Coverage, RooflineEstimator
from windtunnel.pricing.roofline import Roofline
from windtunnel.schema import decode, encode

M3 = "MiniMaxAI/MiniMax-M3"


def shard(**degrees: int) -> Shard:
    model = catalog.model(M3)
    return Shard(model, model.precision, Parallelism(**degrees))


def core(launches: Any) -> Any:
    return next(launch.op for launch in launches if launch.op.kind.startswith("block_sparse"))


def test_parameters_are_those_of_the_model_card() -> None:
    """ "~428B" with the vision tower; "~23B activated", which leaves both tables out."""
    count = count_parameters(catalog.model(M3))
    assert count.total == pytest.approx(428e9, rel=0.01)
    assert count.active - count.embedding - count.lm_head == pytest.approx(23e9, rel=0.03)


def test_a_layer_is_counted_by_hand() -> None:
    """vLLM 0.33 `MinimaxM3QKVParallelLinearWithIndexer`: [q | k | v | index_q | index_k]."""
    layer = next(part for _, part in catalog.model(M3).attentions if isinstance(part, BlockSparseAttention))
    assert layer.num_parameters(6144) == 6144 * 128 * (64 + 4 + 4 + 4 + 1) + 64 * 128 * 6144
    assert layer.norm_parameters() == 4 * 128
    alone = layer.rank_parameters(6144, 8)
    assert alone == 6144 * 128 * (8 + 1 + 1 + 1 + 1) + 8 * 128 * 6144


def test_the_first_layers_attend_to_everything() -> None:
    groups = [(group.num_layers, type(group.attention)) for group in catalog.model(M3).layers]
    assert groups == [(3, GroupedQueryAttention), (57, BlockSparseAttention)]


def test_a_token_keeps_keys_values_and_one_key_of_the_indexer() -> None:
    assert kv_bytes_per_token(shard(), 10**6) == 60 * 2 * 4 * 128 * 2 + 57 * 128 * 2
    assert kv_bytes_per_token(shard(tp=8), 10**6) == 60 * 2 * 128 * 2 + 57 * 128 * 2


def test_one_projection_computes_the_indexer_too() -> None:
    launches = {launch.name: launch for launch in token_launches(shard(tp=2), 64)}
    gemm = launches["qkv_index_proj"].op
    assert isinstance(gemm, Gemm)
    assert (gemm.n, gemm.k, launches["qkv_index_proj"].count) == (128 * (32 + 2 + 2 + 2 + 1), 6144, 57)
    assert launches["kv_cache_write"].count == 3  # measured as one with the core in the others


def test_a_query_meets_sixteen_blocks_and_scores_every_key() -> None:
    op = core(decode_launches(shard(), 2.0, 100_000.0))
    assert op.kept_pairs == 2 * 16 * 128
    assert op.flops == 2 * (2048 * 4 * 64 * 128 + 100_000 * 2 * 4 * 128)
    queries = 2 * 2 * 64 * 128 * 2
    assert op.num_bytes == queries + 2 * (2048 * 2 * 4 * 128 * 2 + 100_000 * 128 * 2)
    prompt = core(prefill_launches(shard(), 1.0, 4096.0))
    assert prompt.kept_pairs == 4096 * 2048 - 2048**2 / 2


def measured_module(device: str, kv_dtype: str = "bfloat16", **point: int) -> float:
    """Seconds of one decode module of vLLM with projections in bf16."""
    rows = pq.read_table(systems_folder() / f"{device}/msa/vllm/0.24.0/msa_generation_module_perf.parquet").to_pandas()
    for column, value in {"kv_cache_dtype": kv_dtype, "gemm_type": "bfloat16", **point}.items():
        rows = rows[rows[column] == value]
    return float(rows.latency.iloc[0]) * 1e-3


@pytest.mark.parametrize("tp", [1, 8])
@pytest.mark.parametrize("device", ["h100_sxm", "b200_sxm"])
def test_a_decode_costs_the_measured_module(device: str, tp: int) -> None:
    """Core and projections together cost what was measured."""
    on = shard(tp=tp)
    estimator = measured_estimator(catalog.device(device), None, "vllm", "0.24.0")
    priced = estimator.estimate(core(decode_launches(on, 128.0, 4096.0)))
    layer = on.model.attentions[1][1]
    projections = [estimator.estimate(launch.op).seconds for launch in layer.projections(on, 128.0)]
    measured_s = measured_module(device, num_heads=64 // tp, batch_size=128, step=4095)
    assert priced.coverage is Coverage.MEASURED
    assert priced.seconds + sum(projections) == pytest.approx(measured_s, rel=0.01)


def test_a_cache_in_fp8_has_measurements_of_its_own() -> None:
    estimator = measured_estimator(catalog.device("b200_sxm"), None, "vllm", "0.24.0")
    site = {"num_heads": 64, "num_kv_heads": 4, "head_dim": 128, "index_head_dim": 128, "top_k": 2048}
    wide, narrow = (
        estimator.estimate(BlockSparseDecode(batch=256.0, context_tokens=4096.0, **site, kv_format=kv))
        for kv in (Format.BF16, Format.FP8)
    )
    assert wide.coverage is narrow.coverage is Coverage.MEASURED
    point = {"num_heads": 64, "batch_size": 256, "step": 4095}
    difference = measured_module("b200_sxm", "fp8", **point) - measured_module("b200_sxm", **point)
    assert narrow.seconds - wide.seconds == pytest.approx(difference, rel=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sparse_attention_freq": [1, 1]}, "one entry for each of the 60 layers"),
        ({"sparse_num_index_heads": 8}, "8 heads of an indexer for 4 key/value heads"),
        ({"sparse_topk_blocks": None}, "has no sparse_topk_blocks"),
    ],
)
def test_what_cannot_be_read_is_refused(changes: dict[str, Any], message: str) -> None:
    config = catalog.model_config(M3)
    with pytest.raises(InputError, match=message):
        model_from_config(config | {"sparse_attention_config": config["sparse_attention_config"] | changes}, "tiny")
    with pytest.raises(InputError, match="sparse_attention_config is 7; an object is needed"):
        model_from_config(config | {"sparse_attention_config": 7}, "tiny")


def test_a_model_is_written_and_read() -> None:
    assert decode(encode(catalog.model(M3)), ModelSpec) == catalog.model(M3)


@pytest.mark.parametrize("operator", [BlockSparsePrefill, BlockSparseDecode])
@pytest.mark.parametrize("kv", [Format.BF16, Format.FP8, Format.INT8])
def test_devices_that_nobody_measured_have_a_price(operator: type[Any], kv: Format) -> None:
    lengths = {"num_tokens" if operator is BlockSparsePrefill else "context_tokens": 1024.0}
    op = operator(
        batch=1.0, **lengths, kv_format=kv, num_heads=64, num_kv_heads=4, head_dim=128, index_head_dim=128, top_k=2048
    )
    assert 1e-6 < float(np.asarray(RooflineEstimator(Roofline(catalog.device("mi300x"))).estimate(op).seconds)) < 1e-2
