"""Measured runs of separate pools: the strings that describe them become pools of a scenario."""

from pathlib import Path

import pytest

from readers.silicon.pools import pool_records, pools_of, trtllm_version
from readers.silicon.rows import Row, rows
from readers.silicon.runs import read_measurements
from windtunnel.errors import InputError
from windtunnel.model.parallelism import Parallelism
from windtunnel.serving.deployment import EngineSettings, Pool

PREFILL = (
    "workers=2 tp=4 ep=4 dp_attn=True max_num_seqs=16 max_batched_tokens=16384 max_model_len=1064 mem_fraction=0.4 "
    "kv_dtype=fp8 prefix_cache=off overlap=off cuda_graph=off moe_backend=TRTLLM xfer=UCX nodes=1 gpn=4"
)
DECODE = (
    "workers=1 tp=8 ep=8 pp=1 dp_attn=False max_num_seqs=128 max_batched_tokens=128 mem_fraction=0.9 overlap=on "
    'cuda_graph=19 sizes 1..128 moe_backend=WIDEEP nvfp4=["cutlass", "cuda_core"] eplb=288 stream_interval=100'
)
IMAGE = "nvcr.io/nvidia/ai-dynamo/tensorrtllm-runtime:0.8.1.post2"


def server(prefill: str = PREFILL, decode: str = DECODE, image: str = IMAGE) -> Row:
    return Row({"prefill_pool": prefill, "decode_pool": decode, "engine_image": image}, "engine_settings.csv line 2")


def test_every_setting_that_a_scenario_knows_is_taken() -> None:
    common, (prefill, decode), assumed = pools_of("trtllm", server())
    assert (common, assumed) == (EngineSettings(name="trtllm", version="1.2.0rc6.post2"), "")
    assert prefill == Pool(
        name="prefill",
        role="prefill",
        parallelism=Parallelism(ep=4, attention_dp=4),
        replicas=2,
        engine=EngineSettings(
            name="trtllm",
            max_num_seqs=16,
            max_num_batched_tokens=16384,
            max_model_len=1064,
            gpu_memory_utilization=0.4,
            enable_prefix_caching=False,
            max_cudagraph_capture_size=0,
            async_scheduling=False,
            moe_backend="trtllm",
        ),
    )
    assert decode.parallelism == Parallelism(tp=8, ep=8)
    assert (decode.replicas, decode.engine.max_cudagraph_capture_size) == (1, 128)
    assert (decode.engine.async_scheduling, decode.engine.moe_backend) == (True, None)
    assert decode.engine.cudagraph_sizes == (1, 2, 4, *range(8, 129, 8))
    assert decode.engine.cudagraph_padding


@pytest.mark.parametrize(
    ("words", "largest", "sizes"),
    [
        ("4 sizes 1..4", 4, (1, 2, 3, 4)),
        ("6 sizes 1..32", 32, (1, 2, 4, 8, 16, 32)),
        ("7 sizes 1..32", 32, (1, 2, 4, 8, 16, 24, 32)),
        ("15 sizes 1..192", 192, None),
        ("max_batch_size 12", 12, None),
        ("powers of 2 up to 2048 + max batch", 2048, (*(1 << power for power in range(10)), 768, 1024, 1536, 2048)),
    ],
)
def test_captured_batches_are_those_of_a_usual_list_of_as_many(
    words: str, largest: int, sizes: tuple[int, ...] | None
) -> None:
    decode = f"workers=1 tp=2 max_num_seqs=1536 mem_fraction=0.9 cuda_graph={words} moe_backend=TRTLLM"
    _, (_, pool), _ = pools_of("trtllm", server(decode=decode))
    assert (pool.engine.max_cudagraph_capture_size, pool.engine.cudagraph_sizes) == (largest, sizes)


def test_servers_of_a_sweep_capture_what_its_script_lists() -> None:
    decode = "workers=1 tp=2 max_num_seqs=1536 mem_fraction=0.9"
    swept = server(decode=decode)
    swept = Row({**swept.values, "source": "dynamo performance_sweeps; selected"}, swept.where)
    _, (_, plain), _ = pools_of("trtllm", server(decode=decode))
    _, (_, pool), _ = pools_of("trtllm", swept)
    assert plain.engine.cudagraph_sizes is None
    assert pool.engine.cudagraph_sizes is not None
    assert pool.engine.cudagraph_sizes[-2:] == (1536, 2048)


def test_what_has_no_counterpart_is_named() -> None:
    assert [record.unmodelled for record in pool_records(server())] == [(), ("decode eplb=288", "decode WIDEEP")]


def test_sglangs_limits_are_of_all_ranks_together() -> None:
    text = "workers=1 tp=8 ep=8 dp=8 dp_attn=True max_num_seqs=256 max_batched_tokens=131072 mem_fraction=0.8 sched=10"
    common, (prefill, _), _ = pools_of("sglang", server(text, text, "lmsysorg/sglang:v0.5.8-cu130"))
    assert common.version == "0.5.8"
    assert (prefill.engine.max_num_seqs, prefill.engine.max_num_batched_tokens) == (32, 16384)
    assert prefill.engine.receive_interval_steps == 10


def test_vllms_groups_may_be_wide() -> None:
    text = "workers=1 tp=2 ep=on dp=4 max_num_seqs=64 mem_fraction=0.9 block=64 cuda_graph=512"
    _, (prefill, _), _ = pools_of("vllm", server(text, text, "vllm/vllm-openai:v0.18.0-cu130"))
    assert prefill.parallelism == Parallelism(tp=2, attention_dp=4, ep=8)
    assert (prefill.engine.max_num_seqs, prefill.engine.block_size) == (64, 64)
    assert prefill.engine.max_cudagraph_capture_size == 512


@pytest.mark.parametrize(
    ("image", "version", "assumed"),
    [
        (IMAGE, "1.2.0rc6.post2", ""),
        ("nvcr.io/nvidia/ai-dynamo/tensorrtllm-runtime:1.1.0-dev.2", "1.3.0rc9", ""),
        ("nvcr.io/nvidia/ai-dynamo/tensorrtllm-runtime:0.5.1-rc0.pre3", "1.1.0rc5", "the engine's version"),
        ("(not recorded) tensorrtllm-runtime", None, "the engine's version"),
        ("nvcr.io/nvidia/ai-dynamo/tensorrtllm-runtime:9.9.9", None, "the engine's version"),
    ],
)
def test_dynamos_images_hold_known_releases(image: str, version: str | None, assumed: str) -> None:
    assert trtllm_version(image) == (version, assumed)


@pytest.mark.parametrize(
    ("prefill", "reason"),
    [
        ("", "how many servers prefill and how was not recorded"),
        ("workers=10 tp=4 ep=4 dp=4 dp_attn=True", "the limits and memory of the prefill servers were not recorded"),
        ("workers=1 max_num_seqs=4 mem_fraction=0.9", "the width of the prefill servers was not recorded"),
        ("tp=4 ep=3 mem_fraction=0.9", "engine_settings.csv line 2: prefill_pool: ep = 3 does not divide"),
        ("tp=4 overlap=maybe mem_fraction=0.9", "engine_settings.csv line 2: prefill_pool has overlap=maybe"),
        ("tp=four mem_fraction=0.9", "engine_settings.csv line 2: prefill_pool: tp is 'four'"),
    ],
)
def test_pools_that_leave_open_what_was_run_are_refused(prefill: str, reason: str) -> None:
    with pytest.raises(InputError) as caught:
        pools_of("trtllm", server(prefill))
    assert caught.value.message.startswith(reason)


@pytest.mark.full
def test_nearly_every_row_of_separate_pools_is_a_scenario(reference: Path) -> None:
    """Refused are those of which no limit was recorded, and speculative ones that do not say how much they draft. The
    places where requests decode are those that others counted.
    """
    found = [one for one in read_measurements(reference / "silicon" / "dev.csv") if one.use == "bounds_only"]
    known = [one for one in found if one.scenario is not None and one.labels["mode"] == "disagg"]
    assert len(known) > 0.85 * len(found)
    slots = {
        row.text("id"): row.text("decode_slots")
        for row in rows(reference / "silicon" / "row_settings.csv")
        if row.text("true_mode") == "disagg"
    }
    for one in known:
        assert one.scenario is not None
        decode = one.scenario.deployment.pools[1]
        assert decode.parallelism is not None
        counted, limit = slots[one.id], decode.engine.max_num_seqs
        if counted and limit and not one.lacks_acceptance and one.labels["engine"] != "vllm":
            assert limit * decode.replicas * decode.parallelism.attention_dp == pytest.approx(float(counted), rel=0.01)
