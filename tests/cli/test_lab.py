"""`windtunnel lab`: help and wrong input; what it runs is tested in tests/lab."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

if TYPE_CHECKING:
    from cli.conftest import Command

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
    ],
)
def test_wrong_input(windtunnel: Command, tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(JOB))
    done = windtunnel(*(argument.format(job=path) for argument in arguments))
    assert done.code == 2
    assert message in done.stderr
    assert done.stdout == ""


def test_a_job_with_too_many_ranks(windtunnel: Command, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed; a replay runs on its gloo")
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(JOB))
    done = windtunnel("lab", "replay", str(path))
    assert done.code == 2
    assert "the job has 32 ranks; a replay takes at most 16" in done.stderr
