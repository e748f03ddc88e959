"""DeepSeek-V4's compressed attention and hyper-connections: counts as published, memory, launches, prices, refusals."""

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.model.attention.compressed import CompressedAttention, CompressedDecode, CompressedPrefill
from windtunnel.model.config import model_from_config
from windtunnel.model.launches.forward import decode_launches, prefill_launches, token_launches
from windtunnel.model.memory import kv_bytes_per_token, state_bytes_per_request, weight_bytes
from windtunnel.model.operators import HyperConnection
from windtunnel.model.parallelism import Parallelism
from windtunnel.model.parameters import count_parameters
from windtunnel.model.precision import BITS, Format
from windtunnel.model.shape import ModelSpec, Shard
from windtunnel.pricing.aiconfigurator.estimator import measured_estimator, systems_folder
from windtunnel.pricing.estimator import Coverage, RooflineEstimator
from windtunnel.pricing.roofline import Roofline
from windtunnel.schema import decode, encode
from windtunnel.serving.deployment import EngineSettings
from windtunnel.serving.engines.defaults import with_defaults
from windtunnel.serving.engines.launches import unhidden_s

FLASH, PRO = "deepseek-ai/DeepSeek-V4-Flash", "deepseek-ai/DeepSeek-V4-Pro"


def shard(name: str = FLASH, **degrees: int) -> Shard:
    model = catalog.model(name)
    return Shard(model, model.precision, Parallelism(**degrees))


def core(launches: Any, ratio: int) -> Any:
    return next(launch.op for launch in launches if launch.op.compress_ratio == ratio)


@pytest.mark.parametrize(("name", "total", "active"), [(FLASH, 284e9, 13e9), (PRO, 1.6e12, 49e9)])
def test_parameters_are_those_of_the_model_card(name: str, total: float, active: float) -> None:
    """ "284B parameters (13B activated)" and "1.6T (49B activated)"; the cards leave the embedding's table out."""
    model = catalog.model(name)
    count = count_parameters(model)
    assert count.total == pytest.approx(total, rel=0.02)
    assert count.active - count.embedding == pytest.approx(active, rel=0.03)


def test_layers_follow_the_ratios_of_the_config() -> None:
    """Two layers with a window alone, then both kinds in turn; the draft layer's ratio is left over."""
    groups = {
        group.attention.compress_ratio: group.num_layers
        for group in catalog.model(FLASH).layers
        if isinstance(group.attention, CompressedAttention)
    }
    assert groups == {0: 2, 4: 21, 128: 20}
    assert catalog.model(FLASH).residual_streams == 4


def test_a_config_of_transformers_5_says_the_same() -> None:
    """`DeepseekV4Config` of transformers 5.24, built from the published keys and written again."""
    old = dict(catalog.model_config(FLASH))
    names = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    types = [names[ratio] for ratio in old.pop("compress_ratios")[:43]]
    quantised = old.pop("quantization_config") | {"expert_dtype": old.pop("expert_dtype")}
    stretched = old.pop("rope_scaling") | {"rope_type": "yarn", "rope_theta": 160000}
    new: dict[str, Any] = old | {
        "layer_types": types,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
        "mlp_layer_types": ["hash_moe"] * 3 + ["moe"] * 40,
        "quantization_config": quantised,
        "partial_rotary_factor": 0.125,
        "rope_parameters": {"compress": stretched, "main": {"rope_type": "default", "rope_theta": 10000}},
    }
    assert model_from_config(new, FLASH) == catalog.model(FLASH)
    assert model_from_config(new | {"compress_rates": None}, FLASH) == catalog.model(FLASH)
    with pytest.raises(InputError, match="0, 4 or 128 for each of the 43 layers"):
        model_from_config(new | {"compress_rates": {"compressed_sparse_attention": 8}}, FLASH)


def test_formats_are_those_of_the_checkpoint() -> None:
    precision = catalog.model(FLASH).precision
    assert (precision.weights, precision.experts, precision.kv_cache) == (Format.FP8_BLOCK, Format.MXFP4, Format.FP8)
    assert catalog.model("nvidia/DeepSeek-V4-Flash-NVFP4").precision.experts is Format.NVFP4


def test_a_token_keeps_the_bytes_of_vllm() -> None:
    """vLLM 0.24 `MLAAttentionSpec.real_page_size_bytes`: 584 bytes a compressed token, 132 of the indexer's key."""
    assert kv_bytes_per_token(shard(), 10**6) == pytest.approx(21 * (584 + 132) / 4 + 20 * 584 / 128)
    window = 43 * 128 * 584  # of every layer
    pending = 21 * (8 * 2 * 2 * (512 + 128) * 4) + 20 * (128 * 2 * 512 * 4)  # `CompressorStateCache`
    assert state_bytes_per_request(shard(), 10**6) == window + pending


def test_ranks_repeat_compressors_and_indexer() -> None:
    """vLLM 0.24 `DeepseekCompressor`, `DeepseekV4Indexer` and `fused_wqa_wkv` are not split."""
    whole = 43 * 4096 * (1024 + 512)
    whole += 21 * (4 * 640 * 4096 + 2 * 4 * 640 + 1024 * 64 * 128 + 4096 * 64)
    whole += 20 * (2 * 512 * 4096 + 128 * 512)
    whole *= BITS[Format.FP8_BLOCK] / 8
    router = 43 * (4096 * 256 + 256) * 2  # bf16, on every rank too
    assert weight_bytes(shard(tp=2)) * 2 - weight_bytes(shard()) == pytest.approx(whole + router, rel=1e-9)


def test_a_part_of_a_layer_mixes_streams_before_and_spreads_them_after() -> None:
    names = [launch.name for launch in token_launches(shard(), 8)]
    assert names.count("hyper_pre") == names.count("hyper_post") == 6  # three groups of layers, two parts
    assert not {"input_norm", "post_attention_norm"} & set(names)
    assert sum(launch.count for launch in token_launches(shard(), 8) if launch.name == "hyper_pre") == 86


def test_work_follows_window_ratio_and_choice() -> None:
    sparse = core(decode_launches(shard(), 1.0, 100_000.0), 4)
    heavy = core(decode_launches(shard(), 1.0, 100_000.0), 128)
    assert sparse.kept_pairs == 128 + 512
    assert sparse.scored_pairs == 25_000
    assert heavy.kept_pairs == 128 + 100_000 / 128
    assert heavy.scored_pairs == 0
    prompt = core(prefill_launches(shard(), 1.0, 4096.0), 4)
    queries = np.arange(1, 4097)
    by_query = np.minimum(queries, 128) + np.minimum(queries / 4, 512)
    assert prompt.kept_pairs == pytest.approx(by_query.sum(), rel=1e-3)


def measured_module(phase: str, ratio: str, **point: float) -> float:
    """Seconds of one measured module of vLLM on B300."""
    file = f"b300_sxm/sparse_attention/vllm/0.24.0/dsv4_{ratio}_{phase}_module_perf.parquet"
    rows = pq.read_table(systems_folder() / file).to_pandas()
    for column, value in {"model": "sgl-project/DeepSeek-V4-Flash-FP8", **point}.items():
        rows = rows[rows[column] == value]
    return float(rows.latency.iloc[0]) * 1e-3


@pytest.mark.parametrize(("ratio", "name"), [(4, "csa"), (128, "hca")])
@pytest.mark.parametrize("tp", [1, 4])
def test_a_decode_costs_the_measured_module(ratio: int, name: str, tp: int) -> None:
    """The core is the module less its projections, so that both together cost what was measured."""
    on = shard(tp=tp)
    estimator = measured_estimator(catalog.device("b300_sxm"), None, "vllm", "0.24.0")
    decode_core = core(decode_launches(on, 128.0, 2049.0), ratio)
    priced = estimator.estimate(decode_core)
    projections = [estimator.estimate(launch.op).seconds for launch in on.model.attentions[0][1].projections(on, 128.0)]
    assert len(projections) == 4
    assert priced.coverage is Coverage.MEASURED
    measured_s = measured_module("generation", name, tp_size=tp, batch_size=128, step=2048)
    assert priced.seconds + sum(projections) == pytest.approx(measured_s, rel=0.02)


def test_a_chunk_behind_cached_tokens_costs_its_own_measurement() -> None:
    on = shard()
    estimator = measured_estimator(catalog.device("b300_sxm"), None, "vllm", "0.24.0")
    chunk, cached = 4096.0, 4096.0
    length = chunk + 2 * cached
    behind = estimator.estimate(core(prefill_launches(on, chunk / length, length), 4))
    alone = estimator.estimate(core(prefill_launches(on, 1.0, chunk), 4))
    assert behind.coverage is Coverage.MEASURED
    difference = measured_module("context", "csa", tp_size=1, batch_size=1, isl=4096, step=4096)
    difference -= measured_module("context", "csa", tp_size=1, batch_size=1, isl=4096, step=0)
    assert behind.seconds - alone.seconds == pytest.approx(difference, rel=1e-6)


def test_completing_128_tokens_is_as_slow_as_recorded() -> None:
    """Recorded decode steps of one request (vLLM 0.20.1, TP 4, B300) that complete 128 tokens take 14.2 ms and not 7.8;
    23% of the steps of 32 requests are 6.1 ms longer."""
    on = replace(shard(tp=1, attention_dp=4, ep=4), compresses_in_one_block=True)
    by_name = {launch.name: launch for launch in decode_launches(on, 8.0, 4096.0)}
    launch = by_name["compression"]
    assert launch.adds == pytest.approx(0.222, abs=0.001)
    each = measured_estimator(catalog.device("b300_sxm"), None, "vllm", "0.20.1").estimate(launch.op)
    assert float(np.asarray(each.seconds)) * launch.count == pytest.approx(6.2e-3, rel=0.03)
    prompt = {launch.name: launch for launch in prefill_launches(on, 2.0, 64.0)}["compression"]
    assert (prompt.count, prompt.adds) == (20, 0.5)
    assert all(launch.name != "compression" for launch in decode_launches(shard(), 8.0, 4096.0))


def test_the_compressions_kernel_is_counted_with_its_core() -> None:
    plain, device = shard(tp=1, attention_dp=64, ep=64), catalog.device("b300_sxm")
    engine = with_defaults(EngineSettings(name="vllm", version="0.20.1"), device, shape=plain.parallelism)
    assert engine.host.kernel_gap_s
    compressing = replace(plain, compresses_in_one_block=True)
    assert unhidden_s(compressing, engine, 1) == pytest.approx(unhidden_s(plain, engine, 1), rel=1e-12)


def test_hyper_connections_are_measured_at_two_places_of_a_layer() -> None:
    estimator = measured_estimator(catalog.device("b300_sxm"), None, "vllm", "0.24.0")
    rows = pq.read_table(systems_folder() / "b300_sxm/mhc/vllm/0.24.0/mhc_module_perf.parquet").to_pandas()
    row = rows[(rows.op_name == "post") & (rows.hidden_size == 4096) & (rows.num_tokens == 4096)].iloc[0]
    priced = estimator.estimate(HyperConnection("post", 4096, 4096, 4))
    assert priced.coverage is Coverage.MEASURED
    assert priced.seconds == pytest.approx(row.latency * 1e-3 / row.num_sites)


def test_a_cache_in_bf16_was_never_measured() -> None:
    on = shard()
    plain = replace(on, precision=decode({**encode(on.precision), "kv_cache": "bf16"}, type(on.precision)))
    priced = measured_estimator(catalog.device("b300_sxm"), None, "vllm", "0.24.0").estimate(
        core(decode_launches(plain, 8.0, 512.0), 4)
    )
    assert priced.coverage is Coverage.ROOFLINE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compress_ratios": [4, 128]}, "for each of the 43 layers is needed"),
        ({"compress_ratios": [8] * 43}, "0, 4 or 128"),
        ({"o_groups": 7}, "num_attention_heads 64 is not a multiple of o_groups 7"),
        ({"index_topk": None}, "has no index_topk"),
    ],
)
def test_what_cannot_be_read_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        model_from_config(catalog.model_config(FLASH) | changes, "tiny")


def test_a_model_is_written_and_read() -> None:
    assert decode(encode(catalog.model(PRO)), ModelSpec) == catalog.model(PRO)


@pytest.mark.parametrize("operator", [CompressedPrefill, CompressedDecode])
@pytest.mark.parametrize("device", ["h200_sxm", "mi300x"])
def test_devices_that_nobody_measured_have_a_price(operator: type[Any], device: str) -> None:
    op = operator(
        batch=1.0,
        **{"num_tokens" if operator is CompressedPrefill else "context_tokens": 1024.0},
        num_heads=64,
        head_dim=512,
        hidden_size=4096,
        q_lora_rank=1024,
        o_lora_rank=1024,
        num_groups=8,
        window_tokens=128,
        index_num_heads=64,
        index_head_dim=128,
        top_k=512,
        compress_ratio=4,
    )
    assert 1e-6 < float(np.asarray(RooflineEstimator(Roofline(catalog.device(device))).estimate(op).seconds)) < 1e-2
