"""Training jobs: strict decoding, framework defaults, and the relations between degrees, each violated in turn."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.model.config import model_from_config
from windtunnel.schema import decode, encode, save
from windtunnel.training.degrees import degrees
from windtunnel.training.job import TrainingJob, load
from windtunnel.training.setup import resolve

JOB: dict[str, Any] = {
    "model": "meta-llama/Llama-3.1-70B",
    "device": "h100_sxm",
    "num_devices": 64,
    "sequence_tokens": 8192,
    "global_batch": 128,
    "parallelism": {"tp": 4, "cp": 2, "pp": 4},
}


def small(**keys: Any) -> Any:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
    config = {"model_type": "llama", "vocab_size": 1000, "max_position_embeddings": 8192, **sizes, **keys}
    return encode(model_from_config(config, "small"))


def job(**changes: Any) -> TrainingJob:
    return decode({**JOB, **changes}, TrainingJob)


def test_a_job_survives_its_file(tmp_path: Path) -> None:
    save(job(), tmp_path / "job.yaml")
    assert load(tmp_path / "job.yaml") == job()


def test_a_scenario_is_no_job(tmp_path: Path) -> None:
    (tmp_path / "scenario.yaml").write_text("model: llama-3.1-8b\ndeployment: {device: h100_sxm}\n")
    with pytest.raises(InputError, match="describes a deployment, not a training job"):
        load(tmp_path / "scenario.yaml")


def test_overrides_reach_every_field(tmp_path: Path) -> None:
    save(job(), tmp_path / "job.yaml")
    changed = load(tmp_path / "job.yaml", {"overlap.tensor_parallel": True, "micro_batch": 2})
    assert (changed.overlap.tensor_parallel, changed.micro_batch) == (True, 2)


def test_an_override_takes_along_what_hangs_on_the_old_value() -> None:
    layers = [21, 21, 21, 17]
    chosen = {"granularity": "selective", "modules": ["norms"]}
    given = {**JOB, "recompute": chosen, "parallelism": {"tp": 4, "pp": 4, "layers_per_stage": layers}}
    full = load(given, {"recompute.granularity": "full", "parallelism.pp": 8})
    assert (full.recompute.modules, full.parallelism.layers_per_stage) == (None, None)
    same = load(given, {"recompute.granularity": "selective", "parallelism.pp": 4, "parallelism.virtual_stages": 1})
    assert (same.recompute.modules, same.parallelism.layers_per_stage) == (("norms",), tuple(layers))
    typed = load(given, {"recompute.modules": ["activation"], "recompute.granularity": "full"})
    assert typed.recompute.modules == ("activation",)  # which is refused, as what is typed


def test_frameworks_fill_what_a_job_leaves_open() -> None:
    megatron = resolve(job()).job
    assert (megatron.sharding.zero, megatron.schedule, megatron.precision.gradients) == (1, "1f1b", "fp32")
    deepspeed = resolve(job(framework="deepspeed", parallelism={"tp": 4})).job
    assert (deepspeed.sharding.zero, deepspeed.sharding.reduce_bucket_elements) == (3, 500_000_000)
    given = resolve(job(sharding={"zero": 0})).job
    assert given.sharding.zero == 0


def test_llama_3_405b_splits_as_its_paper_says() -> None:
    degrees = {"tp": 8, "pp": 16, "virtual_stages": 8}
    raw = {"model": "meta-llama/Llama-3.1-405B", "num_devices": 16384, "global_batch": 2048, "parallelism": degrees}
    assert resolve(job(**raw)).layers_per_chunk == (0, *[1] * 126, 0)


def test_embedding_and_head_count_as_a_layer_each_where_no_even_inside_is_left() -> None:
    split = {"pp": 4, "virtual_stages": 4, "ep": 16}
    raw = {"model": "deepseek-ai/DeepSeek-V3", "num_devices": 64, "parallelism": split}
    assert resolve(job(**raw)).layers_per_chunk == (2, *[4] * 14, 3)
    with pytest.raises(InputError, match=r"61 layers of .* do not split evenly"):
        resolve(job(**{**raw, "parallelism": {**split, "virtual_stages": 16}}))


@pytest.mark.parametrize(
    ("device", "compute", "hint"),
    [
        ("a100_sxm", "fp8", "fp32, fp16, bf16, int8"),
        ("h100_sxm", "mxfp8", "fp32, fp16, bf16, fp8, fp8_current, fp8_rowwise, fp8_block, int8"),
        ("h100_sxm", "nvfp4", "fp32, fp16, bf16, fp8, fp8_current, fp8_rowwise, fp8_block, int8"),
    ],
)
def test_a_format_needs_its_matrix_units(device: str, compute: str, hint: str) -> None:
    with pytest.raises(InputError, match=f"{device} has no matrix units for {compute}") as caught:
        resolve(job(device=device, precision={"compute": compute}))
    assert caught.value.hint == f"set precision.compute to one of {hint}"
    assert resolve(job(device="b200_sxm", precision={"compute": compute})).job.precision.compute == compute


def test_a_model_may_be_written_out() -> None:
    shape = encode(catalog.model("meta-llama/Llama-3.1-8B"))
    assert resolve(job(model=shape, parallelism={"tp": 4})).model == catalog.model("meta-llama/Llama-3.1-8B")


@given(
    tp=st.sampled_from([1, 2, 4, 8]),
    cp=st.integers(1, 4),
    pp=st.integers(1, 6),
    dp=st.integers(1, 6),
    micro_batch=st.integers(1, 3),
    num_microbatches=st.integers(1, 9),
)
def test_degrees_multiply_to_the_devices_and_the_batch(
    tp: int, cp: int, pp: int, dp: int, micro_batch: int, num_microbatches: int
) -> None:
    asked = job(
        num_devices=tp * cp * pp * dp,
        global_batch=dp * micro_batch * num_microbatches,
        micro_batch=micro_batch,
        parallelism={"tp": tp, "cp": cp, "pp": pp},
    )
    found = degrees(asked)
    assert found.tp * found.cp * found.pp * found.dp == asked.num_devices
    assert found.experts_tp * found.ep * found.experts_dp * found.pp == asked.num_devices
    assert found.dp * found.micro_batch * found.num_microbatches == asked.global_batch


@pytest.mark.parametrize(
    ("changes", "relation"),
    [
        ({"num_devices": 60}, "num_devices = tp x cp x pp x dp"),
        ({"parallelism": {"tp": 4, "pp": 4, "dp": 3}}, "num_devices = 64, but tp x cp x pp x dp"),
        ({"global_batch": 127}, "global_batch = dp x micro_batch x num_microbatches"),
        ({"num_microbatches": 5}, "num_microbatches = 5, but global_batch / (dp x micro_batch)"),
        ({"parallelism": {"tp": 4, "ep": 3}}, "num_devices / pp = experts_tp x ep x experts_dp"),
        ({"parallelism": {"tp": 4, "experts_dp": 3}}, "experts_dp = 3, but num_devices / (pp x experts_tp x ep)"),
        ({"sharding": {"group": 3}}, "dp x cp = shard group x replicas"),
    ],
)
def test_a_violated_relation_is_named(changes: dict[str, Any], relation: str) -> None:
    with pytest.raises(InputError) as error:
        degrees(job(**changes))
    assert relation in error.value.message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parallelism": {"tp": 3}, "num_devices": 63, "global_batch": 126}, "tp = 3 does not divide"),
        ({"parallelism": {"pp": 32}}, "do not split evenly"),
        ({"parallelism": {"pp": 2, "layers_per_stage": [40, 41]}}, "adds up to 81"),
        ({"parallelism": {"ep": 8}}, "has no experts"),
        ({"parallelism": {"pp": 4, "virtual_stages": 2}, "schedule": "1f1b"}, "has one chunk on each device"),
        ({"parallelism": {"virtual_stages": 2}}, "virtual stages need a pipeline: pp = 1"),
        ({"schedule": "interleaved", "global_batch": 12}, "multiples of pp"),
        ({"schedule": "dualpipe", "global_batch": 9, "parallelism": {"pp": 4, "tp": 8, "cp": 2}}, "even"),
        ({"sequence_tokens": 8190}, "does not split into"),
        ({"node": "dgx_a100"}, "holds a100"),
        (
            {"model": "MiniMaxAI/MiniMax-M3", "parallelism": {}},
            "block sparse attention (GQA, best 2048) has no backward",
        ),
        ({"model": "deepseek-ai/DeepSeek-V4-Flash", "parallelism": {}}, "compressed attention (SWA) has no backward"),
        ({"model": "moonshotai/Kimi-K3", "parallelism": {}}, "its residual has several streams or blocks"),
        ({"model": small(hidden_size_per_layer_input=16), "parallelism": {}}, "it has inputs of every layer"),
        ({"model": small(num_kv_shared_layers=2), "parallelism": {}}, "it has layers without keys of their own"),
        (
            {"model": "zai-org/GLM-5.2", "parallelism": {"cp": 2, "cp_method": "ring"}},
            "cp = 2 by ring, but the indexer of zai-org/GLM-5.2 chooses among all keys",
        ),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as error:
        resolve(job(**changes))
    assert words in error.value.message
