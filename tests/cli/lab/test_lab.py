"""`windtunnel lab`: help and wrong input; what it runs is tested in tests/lab."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

import nsys_report

if TYPE_CHECKING:
    from cli.conftest import Command

CONFIG = {
    "model_type": "llama",
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 16384,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
}
"""The model of the recorded engine."""

JOB = {
    "model": "llama-3.1-8b",
    "device": "h100_sxm",
    "sequence_tokens": 4096,
    "global_batch": 64,
    "parallelism": {"tp": 4, "dp": 8},
}


def test_without_a_command_it_helps(windtunnel: Command) -> None:
    done = windtunnel("lab")
    assert done.code == 0
    assert "replay" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("lab", "replya"), "windtunnel lab has no command 'replya'"),
        (("lab", "replay", "none.yaml"), "there is no file none.yaml"),
        (("lab", "replay", "{job}", "--largest-message", "3banana"), "--largest-message: '3banana' has the unit"),
        (("lab", "run"), "no model is given"),
        (("lab", "run", "none.yaml"), "there is no file none.yaml"),
        (("lab", "run", "--model", "m", "--mode", "nvprof"), "error: --mode is 'nvprof', which is not known"),
        (("lab", "run", "--model", "./none"), "there is no model ./none"),
        (("lab", "run", "{job}"), "$.device is 'h100_sxm', which is not known"),
        (("lab", "run", "--model", "m", "--batch-sise", "2"), "there is no option --batch-sise"),
        (("lab", "sweep", "--model", "m"), "give --parameter-sweep or --preset"),
        (("lab", "sweep", "--model", "m", "--preset", "quik"), "there is no preset 'quik'"),
        (("lab", "sweep", "--model", "m", "--parameter-sweep", "batch:1"), "there is no field 'batch'"),
        (("lab", "kernels", "none.sqlite"), "there is no file none.sqlite"),
        (("lab", "kernels", "{job}"), "is no capture that is known"),
        (("lab", "kernels", "{job}", "--device", "h100_sxm"), "--device is for the roofline of a page"),
        (("lab", "scrub", "{job}"), "is not an SQLite file"),
        (
            ("lab", "to-table", "{job}", "--model", "llama-3.1-8b", "--device-name", "x", "--out", "p"),
            "is no capture that is known",
        ),
        (("lab", "compare", "none", "{job}"), "none holds no requests.parquet"),
    ],
)
def test_wrong_input(windtunnel: Command, tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(JOB))
    done = windtunnel(*(argument.format(job=path) for argument in arguments))
    assert done.code == 2
    assert message in done.stderr
    assert done.stdout == ""


@pytest.mark.full
def test_a_job_with_too_many_ranks(windtunnel: Command, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed; a replay runs on its gloo")
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(JOB))
    done = windtunnel("lab", "replay", str(path))
    assert done.code == 2
    assert "the job has 32 ranks; a replay takes at most 16" in done.stderr


def test_a_trace_of_the_cpu_has_operators_and_no_kernels(windtunnel: Command, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    event = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 10, "dur": 20}
    trace.write_text(json.dumps({"schemaVersion": 1, "traceEvents": [event]}))
    lines = windtunnel("lab", "kernels", str(trace)).stdout.splitlines()
    assert lines[0] == "torch.profiler: 1 operator of the CPU"
    assert lines[1] == "Most of the processor's time is gemm: 100%."


def test_a_profile_of_nsys_is_shown_and_written_in_every_form(windtunnel: Command, tmp_path: Path) -> None:
    capture = tmp_path / "s.sqlite"
    nsys_report.write_report(capture)
    outputs = [tmp_path / name for name in ("k.html", "k.parquet", "k.csv")]
    options = ("--html", str(outputs[0]), "--parquet", str(outputs[1]), "--csv", str(outputs[2]))
    done = windtunnel("lab", "kernels", str(capture), *options, "--device", "h100_sxm")
    assert done.code == 0
    assert re.search(r"flash_fwd_splitkv_kernel +attention +6", done.stdout)
    assert "FLOP/s" not in done.stdout
    assert "NVIDIA H100" in done.stdout
    assert all(path.stat().st_size for path in outputs)
    assert all(b"hf_secret" not in path.read_bytes() for path in outputs)
    document = json.loads(windtunnel("lab", "kernels", str(capture), "--json").stdout)
    assert document["summary"]["seconds_by_class"]["gemm"] == pytest.approx(516005e-9)
    assert document["devices"]["0"]["num_gaps"] == 11
    assert windtunnel("lab", "scrub", str(capture)).code == 0
    assert b"hf_secret" not in capture.read_bytes()


@pytest.mark.full
def test_a_real_profile_becomes_measured_operators(windtunnel: Command, tmp_path: Path, reference: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    trace = str(reference / "profiler" / "vllm_cpu_kineto.json.gz")
    options = ("--model", str(config), "--device-name", "my_cpu", "--out", str(tmp_path / "profiles"))
    done = windtunnel("lab", "to-table", trace, *options)
    assert done.code == 0
    assert "of 21 steps; 1.1% of the time belongs to no operator" in done.stdout
    assert sorted(path.stem for path in (tmp_path / "profiles").iterdir()) == [
        "decode_attention",
        "elementwise",
        "gemm",
        "prefill_attention",
    ]
