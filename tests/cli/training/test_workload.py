"""`windtunnel workload`: every format in, jobs out, and wrong input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from windtunnel.formats.simai.workload import read_workload
from windtunnel.training.job import load

if TYPE_CHECKING:
    from cli.conftest import Command

JOB = {
    "model": "llama-3.1-8b",
    "device": "h100_sxm",
    "sequence_tokens": 4096,
    "global_batch": 4,
    "parallelism": {"tp": 2, "pp": 2, "dp": 1},
}
AICB = (
    "python -m workload_generator.SimAI_training_workload_generator --frame=Megatron --gpu_type=A100 "
    "--model_name=gpt_small --world_size=8 --tensor_model_parallel_size=2 --global_batch=8 --num_layers=4 "
    "--hidden_size=1024 --num_attention_heads=16 --seq_length=1024 --use-distributed-optimizer"
)
MEGATRON = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 4 --hidden-size 1024 --num-attention-heads 16 "
    "--seq-length 1024 --micro-batch-size 1 --global-batch-size 8 --tensor-model-parallel-size 2 --bf16 "
    "--vocab-size 32000 --lr 1e-4"
)


@pytest.fixture
def job(tmp_path: Path) -> str:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(JOB))
    return str(path)


@pytest.fixture
def aicb(tmp_path: Path) -> str:
    path = tmp_path / "command.txt"
    path.write_text(AICB)
    return str(path)


@pytest.fixture
def megatron(tmp_path: Path) -> str:
    path = tmp_path / "pretrain.sh"
    path.write_text(f"#!/bin/bash\n{MEGATRON}\n")
    return str(path)


def test_a_jobs_communication(windtunnel: Command, job: str) -> None:
    done = windtunnel("workload", job)
    assert done.code == 0, done.stderr
    assert "training job" in done.stdout
    assert "ranks           4: tp 2, cp 1, pp 2, dp 1, ep 1" in done.stdout
    document = json.loads(windtunnel("workload", job, "--stage", "1", "--json").stdout)
    sends = [call for call in document["communication"] if call["operation"] == "send"]
    assert sends == [
        {
            "operation": "send",
            "group": "pp",
            "group_size": 2,
            "size_bytes": 16777216,
            "num_calls": 4,
            "duration_s": None,
        }
    ]


def test_every_recorded_format_is_recognised(windtunnel: Command, reference: Path) -> None:
    folder = reference / "aicb"
    files = {
        "SimAI workload": min(folder.glob("*/*.txt.gz")),
        "AICB list": min(folder.glob("*/*_workload.csv.gz")),
        "AIOB times": folder / "aiob_Example.txt",
        "Chakra trace": folder / "chakra" / "et_repro.et",
        "Kineto trace": folder / "chakra" / "kineto.json",
    }
    for kind, file in files.items():
        done = windtunnel("workload", str(file))
        assert done.code == 0, done.stderr
        assert done.stdout.startswith(f"{kind}\n")
        assert json.loads(windtunnel("workload", str(file), "--json").stdout)["kind"] == kind


def test_a_recorded_command_gives_aicbs_file_under_its_name(windtunnel: Command, aicb: str, tmp_path: Path) -> None:
    out = tmp_path / "results"
    done = windtunnel("workload", aicb, "--compat", "aicb", "--out", f"{out}/")
    assert done.code == 0, done.stderr
    (file,) = out.iterdir()
    assert (
        file.name
        == "A100-gpt_small-world_size8-tp2-pp1-ep1-gbs8-mbs1-seq1024-MOE-False-GEMM-False-flash_attn-False.txt"
    )
    assert windtunnel("workload", aicb, "--compat", "aicb").stdout == file.read_text()
    again = windtunnel("workload", aicb, "--compat", "aicb", "--out", str(out))
    assert again.code == 2
    assert "exists already" in again.stderr


def test_what_aicb_does_silently_is_told(windtunnel: Command, tmp_path: Path) -> None:
    path = tmp_path / "command.txt"
    path.write_text(AICB.replace("--global_batch=8", "--global_batch=6"))
    done = windtunnel("workload", str(path), "--compat", "aicb")
    assert done.code == 0
    assert "note: --global_batch 6 is not a multiple of dp x micro_batch = 4" in done.stderr
    right = windtunnel("workload", str(path), "--write", "simai")
    assert right.code == 2
    assert "global_batch = dp x micro_batch x num_microbatches does not hold" in right.stderr


@pytest.mark.full
def test_jobs_are_written_for_other_simulators(windtunnel: Command, job: str, tmp_path: Path) -> None:
    for target, suffix in (("simai", "txt"), ("aicb", "csv")):
        out = tmp_path / f"w.{suffix}"
        done = windtunnel("workload", job, "--write", target, "--out", str(out))
        assert done.code == 0, done.stderr
        assert windtunnel("workload", str(out)).code == 0
    assert read_workload(tmp_path / "w.txt").header.num_microbatches == 4
    done = windtunnel("workload", job, "--write", "chakra", "--out", str(tmp_path / "et" / "job"))
    assert done.code == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "et").iterdir()) == [
        *(f"job.{rank}.et" for rank in range(4)),
        "job.groups.json",
    ]
    shown = windtunnel("workload", str(tmp_path / "et" / "job.3.et"))
    assert shown.stdout.startswith("Chakra trace\n")
    of_job, of_trace = (
        {
            (call["operation"], call["size_bytes"], call["group_size"])
            for call in json.loads(done.stdout)["communication"]
        }
        for done in (windtunnel("workload", file, "--json") for file in (job, str(tmp_path / "et" / "job.3.et")))
    )
    gathered = {call for call in of_job if call[0] == "all_gather"}
    assert gathered
    assert gathered <= of_trace  # gathered tensors, though the trace has shares
    assert windtunnel("workload", job, "--write", "chakra", "--out", str(tmp_path / "et" / "job")).code == 2
    some = windtunnel("workload", job, "--write", "chakra", "--out", str(tmp_path / "some" / "job"), "--ranks", "1-2")
    assert some.code == 0, some.stderr
    assert len(list((tmp_path / "some").glob("*.et"))) == 2


def test_arguments_become_jobs(windtunnel: Command, aicb: str, megatron: str, tmp_path: Path) -> None:
    for file, options in ((aicb, ()), (megatron, ("--device", "h100_sxm"))):
        out = tmp_path / "new.yaml"
        done = windtunnel("workload", file, *options, "--write", "job", "--out", str(out), "--overwrite")
        assert done.code == 0, done.stderr
        found = load(out)
        assert (found.num_devices, found.parallelism.tp, found.global_batch) == (8, 2, 8)
        assert windtunnel("workload", str(out)).code == 0
    assert "not read: --lr" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("none.yaml",), "there is no file none.yaml"),
        (("{aicb}", "--write", "simai", "--device", "h100"), "there is no device"),
        (("{megatron}",), "--device is missing: Megatron's arguments do not name one"),
        (("{job}", "--stage", "2", "--write", "simai"), "there is no device 2"),
        (("{job}", "--stage", "-1"), "there is no device -1"),
        (("{job}", "--write", "simai", "--set", "parallelism.cp=2"), "no group for context parallelism"),
        (("{job}", "--compat", "aicb"), "--compat aicb is for AICB's commands"),
        (("{job}", "--write", "chakra"), "Chakra traces are one file a rank"),
        (("{job}", "--write", "chakra", "--out", "t/x", "--ranks", "3-1"), "--ranks is '3-1'; it is one rank or two"),
        (("{job}", "--write", "chakra", "--out", "t/x", "--ranks", "2-4"), "ranks 0 to 3; there is no rank 4"),
        (
            ("{job}", "--write", "chakra", "--out", "t/x", "--set", "parallelism.dp=512", "--set", "global_batch=512"),
            "the job has 2,048 ranks, and as many traces",
        ),
        (("{job}", "--set", "parallelism.tp=3"), "tp = 3 does not divide"),
        (("{job}", "--write", "simay"), "simay"),
        (("{text}",), "is no workload or trace that is known: it begins with 'what'"),
        (("{list}",), "is not a training job"),
        (("{binary}",), "is no workload or trace that is known"),
        (("{observer}",), "is no workload or trace that is known"),
        (("{simai}", "--write", "aicb"), "only jobs and their arguments are written in other formats"),
        (("{simai}",), "line 3 has 2 columns"),
    ],
)
def test_wrong_input(
    windtunnel: Command, job: str, aicb: str, megatron: str, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    files = {
        "text": b"what is this",
        "list": b"- sequence_tokens",
        "binary": b"\x89PNG\r\n\x1a\n\xff",
        "simai": b"MICRO\n1\na b\n",
        "observer": b'{"schema": "1.1.1-chakra.0.0.4", "pid": 8455, "nodes": []}',
    }
    paths = {name: str(tmp_path / name) for name in files} | {"job": job, "aicb": aicb, "megatron": megatron}
    for name, content in files.items():
        Path(paths[name]).write_bytes(content)
    done = windtunnel("workload", *(argument.format(**paths) for argument in arguments))
    assert done.code == 2, done.stderr
    assert message in done.stderr
    assert done.stdout == ""
    assert done.stderr.count("\n") <= 2


@pytest.mark.parametrize(
    ("command", "model"),
    [
        ("sh scripts/megatron_gpt.sh --nproc_per_node 8 -m 7 --world_size 8 --tensor_model_parallel_size 2", "gpt_7B"),
        ("bash ./megatron_workload_with_aiob.sh -m 22 --world_size 64", "gpt_22B"),
        ("WORLD_SIZE=2 sh scripts/deepspeed_llama.sh --zero_stage 2 -m 13", "llama_13b"),
    ],
)
def test_aicbs_scripts_are_read_as_jobs(windtunnel: Command, tmp_path: Path, command: str, model: str) -> None:
    path = tmp_path / "command.txt"
    path.write_text(command)
    done = windtunnel("workload", str(path), "--device", "h100_sxm", "--json")
    assert done.code == 0, done.stderr
    assert model in done.stdout


def test_a_script_without_a_world_makes_no_batch(windtunnel: Command, tmp_path: Path) -> None:
    path = tmp_path / "command.txt"
    path.write_text("sh scripts/megatron_gpt.sh --nproc_per_node 8 -m 7 --tensor_model_parallel_size 2")
    done = windtunnel("workload", str(path), "--device", "h100_sxm")
    assert done.code == 2
    assert "AICB's global batch is 0" in done.stderr


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("sh scripts/megatron_gpt.sh -m 7 --nproc_per_node 8", "without --workload_only"),
        ("sh scripts/deepspeed_llama.sh -m 7", "asks the machine it runs on for its GPUs"),
        ("sh scripts/deepspeed_llama.sh --reduce_bucket_size=1000 -m 7", "drops everything after it"),
        ("sh scripts/deepspeed_llama.sh -m 70", "the script has no model '70'"),
    ],
)
def test_aicbs_scripts_write_what_they_write_without_a_gpu(
    windtunnel: Command, tmp_path: Path, command: str, message: str
) -> None:
    path = tmp_path / "command.txt"
    path.write_text(command)
    done = windtunnel("workload", str(path), "--compat", "aicb")
    assert done.code == 2
    assert message in done.stderr


def test_context_parallelism_that_aicb_ignores_is_in_the_job(windtunnel: Command, tmp_path: Path) -> None:
    path = tmp_path / "command.txt"
    path.write_text(f"{AICB} --context-parallel-size=2")
    done = windtunnel("workload", str(path))
    assert done.code == 0, done.stderr
    assert "cp 2" in done.stdout
    plain = tmp_path / "plain.txt"
    plain.write_text(AICB)
    files = [windtunnel("workload", str(each), "--compat", "aicb").stdout for each in (path, plain)]
    assert files[0] == files[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--write", "simai", "--times", "times.txt"), "--times goes with --compat"),
        (("--write", "simai", "--json"), "--json shows a file, and --write and --compat do not show it"),
        (("--write", "job", "--ranks", "0-3"), "--ranks goes with --write chakra"),
        (("--write", "job", "--stage", "1"), "--stage is for what is shown, and for --write simai or aicb"),
        (("--ranks", "0-3"), "--ranks goes with --write chakra"),
        (("--out", "x.txt"), "--out goes with --write"),
        (("--write", "simai", "--overwrite"), "--overwrite goes with --out"),
        (("--times", "times.txt"), "--times goes with --compat"),
    ],
)
def test_no_option_is_ignored(windtunnel: Command, job: str, arguments: tuple[str, ...], message: str) -> None:
    done = windtunnel("workload", job, *arguments)
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr == f"error: {message}\nhint: leave it out\n"


def test_options_of_a_job_are_no_options_of_a_workload(windtunnel: Command, job: str, tmp_path: Path) -> None:
    written = tmp_path / "workload.txt"
    assert windtunnel("workload", job, "--write", "simai", "--out", str(written)).code == 0
    for option in (("--device", "a100_sxm"), ("--num-devices", "4"), ("--stage", "1"), ("--set", "seed=1")):
        done = windtunnel("workload", str(written), *option)
        assert done.code == 2
        assert f"{option[0]} is for training jobs" in done.stderr


def test_the_device_of_a_job_may_be_another(windtunnel: Command, job: str, aicb: str) -> None:
    done = windtunnel("workload", job, "--write", "job", "--device", "a100_sxm")
    assert yaml.safe_load(done.stdout)["device"] == "a100_sxm"
    other = windtunnel("workload", aicb, "--num-devices", "16")
    assert other.code == 2
    assert "--num-devices is 16; the command runs on 8" in other.stderr
