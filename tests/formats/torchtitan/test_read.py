"""Job files of torchtitan are read as what torchtitan does with them."""

import tomllib
from pathlib import Path

import msgspec
import pytest

from windtunnel.errors import InputError
from windtunnel.formats.job_files import JobLaunch, read_any_job
from windtunnel.formats.recognise import find_format
from windtunnel.formats.torchtitan.read import Job, changed_keys
from windtunnel.training.job import BY_OPERATOR, Recompute, TrainingJob
from windtunnel.training.setup import resolve
from windtunnel.training.step import simulate_training

DENSE = """
[job]
description = "a run"
[model]
name = "llama3"
flavor = "8B"
converters = ["quantize.linear.float8"]
[training]
local_batch_size = 2
seq_len = 8192
steps = 100
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
enable_async_tensor_parallel = true
context_parallel_degree = 2
context_parallel_rotate_method = "alltoall"
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
[compile]
enable = true
[quantize.linear.float8]
enable_fsdp_float8_all_gather = true
filter_fqns = ["output"]
"""
EXPERTS = """
[model]
name = "deepseek_v3"
flavor = "16B"
[training]
batch_size = 8
global_batch_size = 64
seq_len = 4096
dtype = "bfloat16"
mixed_precision_reduce = "bfloat16"
[parallelism]
data_parallel_shard_degree = 4
expert_parallel_degree = 4
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "Interleaved1F1B"
[activation_checkpoint]
mode = "selective"
selective_ac_option = 2
"""


def read(folder: Path, text: str, num_devices: int | None = None, **overrides: object) -> tuple[TrainingJob, list[str]]:
    path = folder / "job.toml"
    path.write_text(text)
    kind = find_format(path, "training job")
    found = read_any_job(kind, path, JobLaunch("h100_sxm", num_devices, overrides))
    return found.job, list(found.ignored)


def test_a_dense_job_is_read(tmp_path: Path) -> None:
    job, unread = read(tmp_path, DENSE, 16)
    assert unread == ["quantize.linear.float8.filter_fqns"]
    assert (job.model, job.framework, job.num_devices) == ("meta-llama/Llama-3.1-8B", "fsdp2", 16)
    assert (job.sequence_tokens, job.micro_batch, job.global_batch) == (8192, 2, 2 * 4)
    assert job.total_tokens == 100 * 8 * 8192
    split = job.parallelism
    assert (split.tp, split.cp, split.cp_method, split.pp) == (2, 2, "ring", 1)
    # Of 16 devices, 2 x 2 are tensor and context parallel; two replicas leave 2 shards, over contexts too 4.
    assert (job.sharding.zero, job.sharding.group, job.sharding.reshard_after_forward) == (3, 4, True)
    assert (job.precision.compute, job.precision.parameter_gather) == ("fp8_current", "fp8")
    assert (job.precision.gradients, job.precision.gradient_reduce) == ("fp32", "fp32")
    assert job.recompute.granularity == "selective"
    assert job.recompute.modules == ("norms", "activation", "every_second_product")
    assert job.overlap.tensor_parallel is True
    assert (job.kernels.fused, job.kernels.cross_entropy) == (True, "separate")
    assert simulate_training(job).step_s > 0


def test_a_job_of_experts_with_a_pipeline_is_read(tmp_path: Path) -> None:
    job, unread = read(tmp_path, EXPERTS)
    assert unread == []
    assert (job.model, job.num_devices) == ("deepseek-ai/DeepSeek-V2-Lite", 8)
    assert (job.micro_batch, job.global_batch) == (1, 64)
    assert (job.schedule, job.parallelism.pp, job.parallelism.virtual_stages, job.parallelism.ep) == (
        "interleaved",
        2,
        2,
        4,
    )
    assert (job.recompute.granularity, job.recompute.num_layers) == ("full", 4)
    assert job.parallelism.layers_per_stage == (7, 7, 7, 6)  # 29 with embedding and head
    assert job.sharding.reshard_after_forward is False
    assert (job.precision.master_weights, job.precision.moments, job.precision.gradient_reduce) == (
        "bf16",
        "bf16",
        "bf16",
    )
    assert resolve(job).degrees.num_microbatches == 16


def test_offloading_is_read(tmp_path: Path) -> None:
    job, _ = read(tmp_path, DENSE.replace("steps = 100", "enable_cpu_offload = true"), 16)
    assert (job.sharding.zero, job.sharding.offload) == (3, "parameters")


def test_the_exchange_of_experts_is_read(tmp_path: Path) -> None:
    assert read(tmp_path, EXPERTS, 8)[0].parallelism.experts_exchange is None
    named = EXPERTS.replace("expert_parallel_degree", 'expert_parallel_comm_backend = "deepep"\nexpert_parallel_degree')
    job, unread = read(tmp_path, named, 8)
    assert job.parallelism.experts_exchange == "by_node"
    assert "parallelism.expert_parallel_comm_backend" not in unread


def test_recomputation_that_is_not_read_may_be_given(tmp_path: Path) -> None:
    budget = DENSE.replace('mode = "selective"', 'mode = "memory_budget"')
    with pytest.raises(InputError, match="mode is 'memory_budget'") as refused:
        read(tmp_path, budget, 16)
    assert "--recompute" in str(refused.value.hint)
    job, _ = read(tmp_path, budget, 16, **{"recompute.granularity": "full"})
    assert job.recompute.granularity == "full"


def test_options_go_over_the_file(tmp_path: Path) -> None:
    job, _ = read(tmp_path, EXPERTS, **{"parallelism.ep": 2, "recompute": {"granularity": "none"}})
    assert (job.parallelism.ep, job.recompute.granularity) == (2, "none")


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('flavor = "8B"', 'flavor = "9B"', "llama3 9B is not known"),
        ("[training]", "[training", "is no TOML"),
        ("tensor_parallel_degree = 2", "tensor_parallel_degree = 0", "tensor_parallel_degree is 0"),
        ("seq_len = 8192", 'seq_len = "8k"', "training.seq_len is '8k'"),
        ('mode = "selective"', 'mode = "some"', "activation_checkpoint.mode is 'some'"),
        ('converters = ["quantize.linear.float8"]', 'converters = ["int4"]', "model.converters has int4"),
        ('"alltoall"', '"ring"', "context_parallel_rotate_method is 'ring'"),
    ],
)
def test_what_is_not_known_is_refused(before: str, after: str, message: str, tmp_path: Path) -> None:
    assert before in DENSE
    with pytest.raises(InputError, match=message):
        read(tmp_path, DENSE.replace(before, after, 1) + "\n# [model] [training] flavor", 16)


def test_the_devices_must_be_known_and_fit(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="number of devices is not in the file"):
        read(tmp_path, DENSE)
    with pytest.raises(InputError, match="no multiple of the file's 8 ranks"):
        read(tmp_path, DENSE, 12)


def test_another_layout_is_written_as_keys_that_read_as_it(tmp_path: Path) -> None:
    """The keys that differ, put in place of the file's own, are read as the other layout."""
    job, _ = read(tmp_path, EXPERTS)
    split = msgspec.structs.replace(job.parallelism, pp=1, virtual_stages=1, layers_per_stage=None, ep=2)
    other = msgspec.structs.replace(
        job,
        parallelism=split,
        schedule=None,
        micro_batch=4,
        recompute=Recompute(granularity="selective", modules=BY_OPERATOR),
    )
    changed, dropped = changed_keys(resolve(job), resolve(other))
    assert dropped == []
    sections = tomllib.loads(EXPERTS)
    for line in changed:
        name, _, value = line.partition(" = ")
        section, key = name.split(".")
        sections[section][key] = tomllib.loads(f"x = {value}")["x"]
    sections["training"].pop("batch_size")
    sections["parallelism"]["data_parallel_shard_degree"] = 8
    fields = Job(sections, None).fields()
    assert fields["parallelism"] == {"tp": 1, "cp": 1, "cp_method": "all_gather", "pp": 1, "ep": 2, "experts_tp": 1}
    assert (fields["micro_batch"], fields["global_batch"], fields["num_devices"]) == (4, 64, 8)
    assert fields["recompute"] == {"granularity": "selective", "modules": list(BY_OPERATOR)}
