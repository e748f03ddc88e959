"""A training job of a tool that is not read is refused by the tool's name, with what to do in its place."""

from pathlib import Path

import pytest

from windtunnel.errors import InputError
from windtunnel.formats.recognise import find_format


@pytest.mark.parametrize(
    ("name", "text", "is_what", "hint"),
    [
        ("a.sh", "python3 -m verl.trainer.main_ppo trainer.nnodes=1", "reinforcement", "windtunnel rl"),
        ("a.sh", "CONFIG_FILE=llama3_8b.toml ./run_train.sh --training.steps 5", "torchtitan", r"give the job file"),
        ("a.sh", "python3 -m MaxText.train base.yml ici_fsdp_parallelism=8", "MaxText", "--framework maxtext"),
        ("a.sh", "python -m maxtext.trainers.pre_train.train base.yml", "MaxText", "--framework maxtext"),
        ("a.py", "import nemo_run as run\nfrom nemo.collections import llm", "NeMo", "--vpp"),
        ("a.sh", "nemo llm pretrain --factory llama3_8b", "NeMo", "--vpp"),
        ("a.sh", "torchrun run_recipe.py --recipe llama32_1b_pretrain_config", "Megatron-Bridge", "--vpp"),
        ("a.yaml", "model:\n  tensor_model_parallel_size: 4\ntrainer: {}", "NeMo", "--vpp"),
        ("a.yaml", "compute_environment: LOCAL_MACHINE\nnum_processes: 8", "accelerate alone", "--config_file"),
        ("a.json", '{\n  "fp16": {},\n  "zero_optimization": {"stage": 3}}', "DeepSpeed alone", "beside it"),
        ("a.sh", "tune run --nproc_per_node 8 full_finetune_distributed", "torchtune", "fsdp2"),
    ],
)
def test_jobs_of_other_tools_are_refused_by_name(name: str, text: str, is_what: str, hint: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(InputError, match=rf"{is_what}.*which is not read") as refused:
        find_format(path, "training job")
    assert hint in str(refused.value.hint)


def test_a_script_that_writes_a_file_of_another_tool_is_read(tmp_path: Path) -> None:
    path = tmp_path / "pretrain.sh"
    file = 'cat <<EOT > ds.json\n{"zero_optimization": {"stage": 1}}\nEOT\n'
    path.write_text(f"{file}deepspeed pretrain_gpt.py --num-layers 2")
    assert find_format(path, "training job").name == "Megatron arguments"
