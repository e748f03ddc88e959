"""Fine-tuning jobs are read as what the Trainer, LLaMA-Factory and Axolotl do with them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from windtunnel.errors import InputError
from windtunnel.formats.job_files import JobLaunch, read_any_job
from windtunnel.formats.recognise import find_format
from windtunnel.schema import parse_yaml
from windtunnel.training.job import Lora, TrainingJob
from windtunnel.training.setup import resolve
from windtunnel.training.step import simulate_training

COMMAND = """#!/bin/bash
BATCH=4
torchrun --nproc_per_node 8 --nnodes=2 --master_port 29500 sft.py \\
    --model_name_or_path meta-llama/Llama-3.1-8B --per_device_train_batch_size $BATCH --max-seq-length 4096 \\
    --gradient_accumulation_steps 2 --bf16 True --gradient_checkpointing --max_steps 10 --learning_rate 1e-5 \\
    --fsdp "full_shard auto_wrap" --optim adamw_torch_fused --neftune_noise_alpha 5
"""
FACTORY = """
model_name_or_path: meta-llama/Llama-3.1-8B-Instruct
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 16
lora_target: q_proj,v_proj
template: llama3
cutoff_len: 1024
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
bf16: true
"""
AXOLOTL = """
base_model: meta-llama/Llama-3.2-1B
plugins:
  - axolotl.integrations.liger.LigerPlugin
liger_rms_norm: true
liger_fused_linear_cross_entropy: true
datasets:
  - path: some/data
    type: alpaca
sequence_len: 8192
sample_packing: true
micro_batch_size: 2
gradient_accumulation_steps: 3
optimizer: adamw_bnb_8bit
bf16: auto
flash_attention: true
gradient_checkpointing: true
adapter:
wandb_project:
"""
ZERO = {
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": False,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": 1e5,
        "stage3_max_live_parameters": 1e9,
        "zero_quantized_weights": True,
    },
}


def read(
    folder: Path, text: str, num_devices: int | None = None, name: str = "job.yaml", **overrides: object
) -> tuple[TrainingJob, list[str]]:
    path = folder / name
    path.write_text(text)
    kind = find_format(path, "training job")
    found = read_any_job(kind, path, JobLaunch("h100_sxm", num_devices, overrides))
    return found.job, list(found.ignored)


def read_command(folder: Path, text: str, num_devices: int | None = None) -> tuple[TrainingJob, list[str]]:
    return read(folder, text, num_devices, "job.sh")


def test_a_command_with_fsdp_is_read(tmp_path: Path) -> None:
    job, unread = read_command(tmp_path, COMMAND)
    assert unread == ["lengths of examples (sequences are packed or padded to 4,096 tokens)", "--neftune_noise_alpha"]
    assert (job.model, job.framework, job.num_devices) == ("meta-llama/Llama-3.1-8B", "fsdp2", 16)
    assert (job.sequence_tokens, job.micro_batch, job.global_batch) == (4096, 4, 4 * 2 * 16)
    assert job.total_tokens == 10 * 128 * 4096
    assert (job.sharding.zero, job.sharding.group, job.sharding.reshard_after_forward) == (3, None, True)
    # accelerate: fp32 weights, sharded; gathered and reduced in bf16.
    precision = job.precision
    assert (precision.compute, precision.gradients, precision.gradient_reduce) == ("bf16", "fp32", "bf16")
    assert (job.recompute.granularity, job.lora, job.optimizer) == ("full", None, "adam")
    assert (job.kernels.fused, job.kernels.cross_entropy) == (False, None)
    assert resolve(job).degrees.num_microbatches == 2


def test_the_defaults_are_those_of_the_trainer(tmp_path: Path) -> None:
    job, _ = read_command(tmp_path, "python train.py --model_name_or_path gpt-oss-20b --max_length 512", 2)
    assert (job.micro_batch, job.global_batch, job.sharding.zero, job.total_tokens) == (8, 16, 0, None)
    assert (job.precision.compute, job.precision.gradient_reduce, job.recompute.granularity) == ("fp32", "fp32", "none")
    # TRL's own: 1,024 tokens, bf16, checkpointing.
    job, _ = read_command(tmp_path, "trl sft --model_name_or_path gpt-oss-20b", 2)
    assert (job.sequence_tokens, job.precision.compute, job.recompute.granularity) == (1024, "bf16", "full")


@pytest.mark.parametrize(
    ("options", "zero", "reshards"),
    [
        ("--fsdp full_shard", 3, True),
        ("--fsdp 'shard_grad_op auto_wrap'", 2, True),
        ("--fsdp no_shard", 0, True),
        ("--fsdp full_shard --fsdp_config fsdp.json", 3, False),
    ],
)
def test_strategies_of_fsdp(options: str, zero: int, reshards: bool, tmp_path: Path) -> None:
    (tmp_path / "fsdp.json").write_text('{"fsdp_reshard_after_forward": false, "fsdp_version": 2}')
    text = COMMAND.replace('--fsdp "full_shard auto_wrap"', options)
    job, _ = read_command(tmp_path, text)
    assert (job.sharding.zero, job.sharding.reshard_after_forward) == (zero, reshards)
    resolve(job)


def test_replicas_of_a_node_each(tmp_path: Path) -> None:
    job, _ = read_command(tmp_path, COMMAND.replace("full_shard", "hybrid_shard"))
    assert (job.sharding.zero, job.sharding.group) == (3, 8)
    assert resolve(job).degrees.replicas == 2


@pytest.mark.parametrize(
    ("launcher", "num_devices"),
    [
        ("accelerate launch --num_processes 4 --num_machines 2", 4),
        ("deepspeed --num_gpus 4 --num_nodes 2", 8),
        ("deepspeed --include localhost:0,1,5", 3),
        ("CUDA_VISIBLE_DEVICES=0,1 python", 2),
        ("NPROC_PER_NODE=4 NNODES=2 python", 8),
        ("torchrun --nproc-per-node=4", 4),
    ],
)
def test_devices_of_launchers(launcher: str, num_devices: int, tmp_path: Path) -> None:
    options = "--model_name_or_path llama-3.1-8b --max_length 512 --bf16"
    assert read_command(tmp_path, f"{launcher} train.py {options}")[0].num_devices == num_devices
    assert read_command(tmp_path, f"{launcher} train.py {options}", 1)[0].num_devices == 1


def test_a_file_of_accelerate_is_read(tmp_path: Path) -> None:
    content = """
distributed_type: DEEPSPEED
mixed_precision: bf16
num_processes: 8
num_machines: 1
deepspeed_config: {zero_stage: 2, offload_optimizer_device: none, zero3_init_flag: false}
"""
    (tmp_path / "zero.yaml").write_text(content)
    command = (
        "accelerate launch --config_file some/zero.yaml train.py --model_name_or_path llama-3.1-8b --max_length 512"
    )
    job, unread = read_command(tmp_path, command)
    assert unread[1:] == []
    assert (job.framework, job.sharding.zero, job.num_devices, job.precision.compute) == ("deepspeed", 2, 8, "bf16")
    assert job.overlap.gradient_reduce is False
    assert job.overlap.parameter_gather is None


def test_a_file_of_deepspeed_is_read(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "z3.json").write_text(json.dumps(ZERO))
    job, unread = read(tmp_path, f"{FACTORY}deepspeed: conf/z3.json\n", 8)
    assert unread[1:] == ["deepspeed.zero_optimization.zero_quantized_weights"]
    assert (job.framework, job.sharding.zero) == ("deepspeed", 3)
    # transformers: hidden size squared, nine tenths of it; the model's hidden size is 4,096.
    assert (job.sharding.reduce_bucket_elements, job.sharding.prefetch_bucket_elements) == (4096**2, int(0.9 * 4096**2))
    assert (job.sharding.persistence_threshold_elements, job.sharding.max_live_elements) == (100_000, 10**9)
    assert (job.overlap.gradient_reduce, job.overlap.parameter_gather) == (False, False)
    resolve(job)


def test_a_model_that_is_not_in_the_catalog_can_still_be_downloaded(tmp_path: Path) -> None:
    (tmp_path / "z3.json").write_text(json.dumps(ZERO))
    job, unread = read(tmp_path, f"{FACTORY.replace('meta-llama/', 'some/')}deepspeed: z3.json\n", 8)
    assert (job.model, job.sharding.reduce_bucket_elements) == ("some/Llama-3.1-8B-Instruct", None)
    assert "what follows from the size of a model that is not in the catalog" in unread


def test_activations_that_wait_in_the_hosts_memory(tmp_path: Path) -> None:
    job, _ = read(tmp_path, AXOLOTL.replace("checkpointing: true", "checkpointing: offload"), 1)
    assert (job.recompute.granularity, job.recompute.offload_layers) == ("full", 16)
    job, _ = read(tmp_path, AXOLOTL + "fsdp: full_shard\nfsdp_config: {fsdp_activation_checkpointing: true}\n", 2)
    assert (job.recompute.granularity, job.recompute.offload_layers) == ("full", 0)


def test_lora_of_llama_factory_is_read(tmp_path: Path) -> None:
    job, unread = read(tmp_path, FACTORY, 8)
    assert unread == ["lengths of examples (sequences are packed or padded to 1,024 tokens)"]
    assert job.lora == Lora(rank=16, target_modules=("q_proj", "v_proj"))
    # DDP; LLaMA-Factory recomputes unless it is told not to.
    assert (job.framework, job.sharding.zero, job.recompute.granularity) == ("fsdp2", 0, "full")
    assert (job.micro_batch, job.global_batch) == (2, 2 * 4 * 8)
    assert (job.precision.gradients, job.precision.master_weights) == ("fp32", None)
    assert read(tmp_path, json.dumps(parse_yaml(FACTORY)), 8)[0] == job
    job, _ = read(tmp_path, FACTORY.replace("q_proj,v_proj", "all") + "disable_gradient_checkpointing: true\n", 8)
    assert job.lora == Lora(rank=16)
    assert job.recompute.granularity == "none"


def test_a_job_of_axolotl_is_read(tmp_path: Path) -> None:
    job, unread = read(tmp_path, AXOLOTL, 4)
    assert unread[1:] == []
    assert (job.model, job.sequence_tokens, job.global_batch, job.lora) == ("meta-llama/Llama-3.2-1B", 8192, 24, None)
    # Axolotl loads bf16 weights, which DDP updates as they are; the optimizer's moments take 8 bit.
    precision = job.precision
    assert (precision.gradients, precision.gradient_reduce, precision.master_weights) == ("bf16", "bf16", "bf16")
    assert precision.moments == "int8"
    assert (job.kernels.fused, job.kernels.cross_entropy, job.kernels.attention) == (True, "chunked", "flash2")
    assert job.recompute.granularity == "full"
    assert simulate_training(job).fits


def test_parallelism_of_axolotl(tmp_path: Path) -> None:
    text = f"{AXOLOTL}tensor_parallel_size: 2\ncontext_parallel_size: 2\nfsdp_version: 2\n"
    text += "fsdp_config:\n  offload_params: false\n  reshard_after_forward: true\n"
    job, unread = read(tmp_path, text, 8)
    assert unread[1:] == []
    split = job.parallelism
    # With packing, keys are gathered (varlen_llama3); else they go round a ring.
    assert (split.tp, split.sequence_parallel, split.cp, split.cp_method) == (2, False, 2, "all_gather")
    assert (job.global_batch, job.sharding.zero, job.sharding.reshard_after_forward) == (2 * 3 * 2, 3, True)
    assert resolve(job).degrees.dp == 2
    job, _ = read(tmp_path, text.replace("sample_packing: true", "sample_packing: false"), 8)
    assert job.parallelism.cp_method == "ring"
    with pytest.raises(InputError, match="6 devices are no multiple of 2 x 2 ranks"):
        read(tmp_path, text, 6)


def test_a_command_names_files_and_changes_them(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(FACTORY)
    job, _ = read_command(tmp_path, "NPROC_PER_NODE=2 llamafactory-cli train job.yaml cutoff_len=2048 lora_target=all")
    assert (job.sequence_tokens, job.num_devices, job.lora) == (2048, 2, Lora(rank=16))
    job, _ = read_command(tmp_path, "trl sft --config job.yaml --num_processes 4 --max_steps -1")
    assert (job.num_devices, job.global_batch, job.total_tokens) == (4, 2 * 4 * 4, None)


@pytest.mark.parametrize(
    "command",
    [
        "accelerate launch --num_processes 2 \\\n  --mixed_precision bf16 src/train.py \\\n  job.yaml",
        "accelerate launch --num_processes=2 src/open_r1/sft.py --config job.yaml",
        "torchrun --nproc_per_node 2 src/train.py job.yaml",
    ],
)
def test_a_script_may_take_all_its_arguments_from_a_file(command: str, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(FACTORY)
    job, _ = read_command(tmp_path, f"#!/bin/bash\n# see --help\n{command}\n")
    assert (job.model, job.num_devices) == ("meta-llama/Llama-3.1-8B-Instruct", 2)
    assert job.lora is not None
    assert job.lora.rank == 16


def test_tables_may_be_written_out_as_json(tmp_path: Path) -> None:
    said = '--block_size 4096 --fsdp_config \'{"activation_checkpointing": true, "fsdp_reshard_after_forward": false}\''
    text = COMMAND.replace("--max-seq-length 4096", said).replace("--gradient_checkpointing ", "")
    job, _ = read_command(tmp_path, text)
    assert (job.sequence_tokens, job.recompute.granularity, job.sharding.reshard_after_forward) == (4096, "full", False)
    with pytest.raises(InputError, match="is not valid JSON"):
        read_command(tmp_path, text.replace("false}", "false"))


def test_experts_of_axolotl_are_spread(tmp_path: Path) -> None:
    axolotl = "base_model: Qwen/Qwen3-30B-A3B\nfsdp_config: {fsdp_version: 2}\nexpert_parallel_size: 2\n"
    job, unread = read(tmp_path, axolotl, 4)
    assert (resolve(job).degrees.ep, resolve(job).degrees.experts_dp) == (2, 2)
    assert not any("expert" in name for name in unread)


def test_a_command_of_swift_is_read(tmp_path: Path) -> None:
    command = "swift sft --model Qwen/Qwen3-8B --train_type lora --max_length 2048 --gradient_accumulation_steps 16"
    job, unread = read_command(tmp_path, f"{command} --deepspeed zero3 --attn_impl flash_attn", 8)
    assert unread[1:] == []
    assert (job.micro_batch, job.lora) == (1, Lora(rank=8, dropout=True))
    assert (job.framework, job.sharding.zero, job.overlap.parameter_gather) == ("deepspeed", 3, True)
    assert (job.kernels.attention, job.precision.compute) == ("flash2", "bf16")


def test_kernels_that_the_options_name(tmp_path: Path) -> None:
    def kernels(options: str) -> Any:
        return read_command(tmp_path, COMMAND.replace("--bf16 True", f"--bf16 {options}"))[0].kernels

    assert (kernels("--torch_compile").fused, kernels("--torch_compile").cross_entropy) == (True, "separate")
    assert (kernels("--use_liger_kernel").fused, kernels("--use_liger_kernel").cross_entropy) == (True, "chunked")
    assert kernels("--attn_implementation flash_attention_3").attention == "flash"
    assert kernels("--attn_implementation eager").attention == "unfused"
    assert kernels("--attn_implementation sdpa").attention is None


def test_fp8_and_muon_of_llama_factory(tmp_path: Path) -> None:
    text = FACTORY.replace("finetuning_type: lora", "finetuning_type: full\nfsdp: full_shard auto_wrap\nuse_muon: true")
    job, unread = read(tmp_path, f"{text}fp8: true\nfp8_enable_fsdp_float8_all_gather: true\n", 8)
    assert unread[1:] == ["lora_rank", "lora_target"]
    assert (job.precision.compute, job.precision.parameter_gather, job.optimizer) == ("fp8_current", "fp8", "muon")
    assert resolve(job).degrees.dp == 8


def test_plugins_of_axolotl_that_change_the_loss(tmp_path: Path) -> None:
    text = AXOLOTL.replace("liger_rms_norm: true\nliger_fused_linear_cross_entropy: true\n", "")
    assert read(tmp_path, text, 1)[0].kernels.cross_entropy is None
    job, _ = read(tmp_path, text.replace("liger.LigerPlugin", "cut_cross_entropy.CutCrossEntropyPlugin"), 1)
    assert (job.kernels.cross_entropy, job.kernels.fused) == ("chunked", False)


def test_a_copy_of_a_model_is_that_of_the_catalog(tmp_path: Path) -> None:
    job, unread = read(tmp_path, AXOLOTL.replace("meta-llama/", "/data/models/"), 1)
    assert job.model == "meta-llama/Llama-3.2-1B"
    assert unread[0] == "/data/models (the model is read as meta-llama/Llama-3.2-1B)"
    job, unread = read(tmp_path, AXOLOTL.replace("meta-llama/", "NousResearch/"), 1)
    assert job.model == "meta-llama/Llama-3.2-1B"
    assert unread[0] == "NousResearch (the model is read as meta-llama/Llama-3.2-1B)"
    job, _ = read(tmp_path, AXOLOTL.replace("meta-llama/", "some/"), 1)
    with pytest.raises(InputError, match="there is no model 'some/Llama"):
        resolve(job)
    assert read(tmp_path, AXOLOTL.replace("meta-llama/", "some/"), 1, model="qwen3-8b")[0].model == "qwen3-8b"


def test_frozen_weights_in_fp32_are_said(tmp_path: Path) -> None:
    command = "trl sft --model_name_or_path llama-3.1-8b --use_peft"
    _, unread = read_command(tmp_path, command, 1)
    assert "frozen weights in fp32 (taken as bf16)" in unread
    job, unread = read_command(tmp_path, f"{command} --dtype bfloat16", 1)
    assert unread[1:] == ["--lora_target_modules is not given (PEFT's default is taken: q_proj and v_proj)"]
    assert job.lora == Lora(rank=16, target_modules=("q_proj", "v_proj"), dropout=True)


@pytest.mark.parametrize(
    ("said", "targets"),
    [
        ("[q_proj, self_attn.o_proj]", ("q_proj", "o_proj")),
        ("[w1, w2, w3]", ("gate_proj", "down_proj", "up_proj")),
        ("[c_attn, c_proj, w1, w2]", ("qkv_proj", "o_proj", "down_proj", "gate_proj")),
        ("all-linear", None),
    ],
)
def test_modules_with_adapters_are_read(said: str, targets: tuple[str, ...] | None, tmp_path: Path) -> None:
    text = AXOLOTL.replace("adapter:", f"adapter: lora\nlora_r: 8\nlora_target_modules: {said}")
    job, _ = read(tmp_path, text, 1)
    assert job.lora is not None
    assert job.lora.target_modules == targets


def test_modules_that_are_not_known_are_refused_unless_they_are_typed(tmp_path: Path) -> None:
    text = AXOLOTL.replace("adapter:", "adapter: lora\nlora_r: 8\nlora_target_modules: '.*[qv]_proj'")
    with pytest.raises(InputError, match="lora_target_modules is '"):
        read(tmp_path, text, 1)
    job, _ = read(tmp_path, text, 1, **{"lora.target_modules": ["q_proj"]})
    assert job.lora == Lora(rank=8, target_modules=("q_proj",))


@pytest.mark.parametrize(
    "said", ["adapter: qlora", "adapter: lora\nload_in_4bit: true", "adapter: lora\nquantization_bit: 4"]
)
def test_frozen_weights_of_4_bits_are_taken(said: str, tmp_path: Path) -> None:
    job, unread = read(tmp_path, AXOLOTL.replace("adapter:", f"{said}\nlora_r: 8\nlora_target_linear: true"), 1)
    assert (job.precision.frozen_weights, job.lora) == ("nf4", Lora(rank=8))
    assert (
        unread
        == read(tmp_path, AXOLOTL.replace("adapter:", "adapter: lora\nlora_r: 8\nlora_target_linear: true"), 1)[1]
    )


def test_weights_of_8_bits_are_read(tmp_path: Path) -> None:
    text = AXOLOTL.replace("adapter:", "adapter: lora\nload_in_8bit: true\nlora_r: 8\nlora_target_linear: true")
    job, unread = read(tmp_path, text, 1)
    assert (job.precision.frozen_weights, job.lora) == ("int8", Lora(rank=8))
    assert "load_in_8bit" not in unread
    job, _ = read(tmp_path, FACTORY + "quantization_bit: 8\n", 8)
    assert job.precision.frozen_weights == "int8"


@pytest.mark.parametrize(
    ("stage", "offloaded", "read_as"),
    [
        (2, {"offload_optimizer": {"device": "cpu", "pin_memory": True}}, "optimizer"),
        (2, {"cpu_offload": True}, "optimizer"),
        (3, {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}, "parameters"),
        (3, {"offload_optimizer": {"device": "none"}}, "none"),
    ],
)
def test_what_deepspeed_offloads_is_read(tmp_path: Path, stage: int, offloaded: Any, read_as: str) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": stage, **offloaded}}))
    job, unread = read(tmp_path, FACTORY + "deepspeed: ds.json\n", 8)
    assert (job.sharding.zero, job.sharding.offload) == (stage, read_as)
    assert unread[1:] == []


@pytest.mark.parametrize(
    ("offloaded", "message"),
    [
        ({"offload_param": {"device": "cpu"}}, "offload_param.device without offload_optimizer is not modelled"),
        ({"offload_optimizer": {"device": "cpu", "ratio": 0.35}}, "offload_optimizer.ratio = 0.35 is not modelled"),
        ({"offload_optimizer": {"device": "cpu", "super_offload": True}}, "super_offload = true is not modelled"),
    ],
)
def test_what_deepspeed_offloads_otherwise_is_refused(tmp_path: Path, offloaded: Any, message: str) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3, **offloaded}}))
    with pytest.raises(InputError, match=message):
        read(tmp_path, FACTORY + "deepspeed: ds.json\n", 8)


def test_what_fsdp_offloads_is_read(tmp_path: Path) -> None:
    text = FACTORY + "fsdp: full_shard auto_wrap\nfsdp_config.offload_params: true\n"
    assert read(tmp_path, text, 8)[0].sharding.offload == "parameters"


def test_pages_of_the_optimizer_are_said_to_stay(tmp_path: Path) -> None:
    job, unread = read(tmp_path, FACTORY + "optim: paged_adamw_8bit\n", 8)
    assert job.precision.moments == "int8"
    assert "pages of the optimizer's state (taken to stay on the devices)" in unread
    assert read(tmp_path, FACTORY + "optim: lion_8bit\n", 8)[0].optimizer == "lion"


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("stage: sft", "stage: dpo", "stage is 'dpo', which is not read"),
        ("finetuning_type: lora", "finetuning_type: freeze", "finetuning_type is 'freeze'"),
        ("bf16: true", "bf16: perhaps", "bf16 is 'perhaps'; it is true or false"),
        ("cutoff_len: 1024", "cutoff_len: 1k", "cutoff_len is '1k'; a whole number is needed"),
        ("cutoff_len: 1024", "cutoff_len: 1e30", "cutoff_len|sequence_tokens"),
        ("cutoff_len: 1024", "cutoff_len: 10.5", "cutoff_len is 10.5; a whole number is needed"),
        ("cutoff_len: 1024", "optim: galore_adamw", "optim is 'galore_adamw', which is not read"),
        ("cutoff_len: 1024", "flash_attn: slow", "flash_attn is 'slow'"),
        ("cutoff_len: 1024", "quantization_bit: 3", "quantization_bit = 3 is not modelled"),
        ("cutoff_len: 1024", "use_galore: true", "use_galore = true is not modelled"),
        ("cutoff_len: 1024", "fsdp: full_shard offload", "fsdp is 'offload', which is not read"),
        ("cutoff_len: 1024", "deepspeed: absent.json", "names absent.json, which is not there"),
        (
            "cutoff_len: 1024",
            "deepspeed: {zero_optimization: {stage: 3, offload_optimizer: {device: nvme}}}",
            "offload_optimizer.device = nvme is not modelled",
        ),
        ("cutoff_len: 1024", "torch_dtype: int4", "torch_dtype is 'int4'"),
        ("per_device_train_batch_size: 2", "per_device_train_batch_size: 0", "batch_size is 0; at least 1"),
        ("model_name_or_path: meta-llama/Llama-3.1-8B-Instruct", "model_name_or_path:", "names no model"),
        ("stage: sft", "stage: [", "is not valid YAML"),
    ],
)
def test_wrong_values_are_refused(before: str, after: str, message: str, tmp_path: Path) -> None:
    assert before in FACTORY
    with pytest.raises(InputError, match=message):
        read(tmp_path, FACTORY.replace(before, after), 8)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("BATCH=4", "", "per_device_train_batch_size is '.BATCH'; a whole number is needed"),
        ("--nproc_per_node 8", "", "number of devices is not in"),
        ("--nproc_per_node 8", "--nproc_per_node gpu", "number of devices is not in"),
        ("--nproc_per_node 8", "--nproc_per_node eight", "nproc_per_node is 'eight'"),
        ("--max-seq-length 4096", "", "length of sequences is not in"),
        ("sft.py", "dpo.py", "stage is 'dpo'"),
        ("sft.py", "grpo.py", "stage = grpo is not modelled"),
        ("--bf16 True", "--bf16 'True", "No closing quotation"),
        ("#!/bin/bash", "trl sft --model_name_or_path llama-3.1-8b", "has 2 commands that train"),
        ("--bf16 True", "--quant_method hqq", "--quant_method = hqq is not modelled"),
    ],
)
def test_wrong_commands_are_refused(before: str, after: str, message: str, tmp_path: Path) -> None:
    assert before in COMMAND
    with pytest.raises(InputError, match=message):
        read_command(tmp_path, COMMAND.replace(before, after))


@pytest.mark.full
def test_what_fits_and_what_does_not(tmp_path: Path) -> None:
    adapters, _ = read(tmp_path, FACTORY.replace("cutoff_len: 1024", "cutoff_len: 2048"), 1)
    result = simulate_training(adapters)
    assert result.fits
    # 16 GB of frozen weights, and little beside them.
    assert 16e9 < max(stage.total_bytes for stage in result.memory) < 40e9
    (tmp_path / "z3.json").write_text(json.dumps(ZERO))
    text = FACTORY.replace("finetuning_type: lora", "finetuning_type: full\ndeepspeed: z3.json")
    whole, _ = read(tmp_path, text.replace("Llama-3.1-8B", "Llama-3.1-70B"), 8)
    result = simulate_training(whole)
    # 16 bytes of state for each parameter, over eight devices: 141 GB.
    assert not result.fits
    assert max(stage.state_bytes for stage in result.memory) > 130e9


@pytest.mark.parametrize(
    ("of_file", "message"),
    [
        (
            '"train_micro_batch_size_per_gpu": 2',
            "deepspeed.train_micro_batch_size_per_gpu is 2, and the arguments make it 1",
        ),
        ('"gradient_accumulation_steps": 4', "deepspeed.gradient_accumulation_steps is 4, and the arguments make it 2"),
        ('"train_batch_size": 64', "deepspeed.train_batch_size is 64, and the arguments make it 16"),
        ('"fp16": {"enabled": true}', "deepspeed.fp16.enabled is True, and the arguments make it False"),
    ],
)
def test_a_file_of_deepspeed_that_contradicts_the_arguments_is_refused(
    of_file: str, message: str, tmp_path: Path
) -> None:
    command = "deepspeed --num_gpus 8 train.py --model_name_or_path llama-3.1-8b --deepspeed ds.json --max_length 4096"
    command += " --per_device_train_batch_size 1 --gradient_accumulation_steps 2 --bf16"
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimization": {"stage": 2}, "train_batch_size": "auto", "bf16": {"enabled": true}}')
    assert read_command(tmp_path, command)[0].sharding.zero == 2
    file.write_text(f'{{"zero_optimization": {{"stage": 2}}, {of_file}}}')
    with pytest.raises(InputError, match=re.escape(message)):
        read_command(tmp_path, command)
