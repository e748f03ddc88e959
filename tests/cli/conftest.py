"""The command line in this process: `windtunnel("simulate", ...)` returns what it printed and its exit code."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from windtunnel import cli


@dataclass(frozen=True)
class Done:
    code: int
    stdout: str
    stderr: str


Command = Callable[..., Done]

SMALL = (
    *("--model", "meta-llama/Llama-3.1-8B", "--device", "h100_sxm"),
    *("--input-tokens", "64", "--output-tokens", "8", "--concurrency", "4", "--num-requests", "20"),
)
"""A simulation of milliseconds."""


@pytest.fixture
def windtunnel(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("NO_COLOR", "1")

    def run(*arguments: str) -> Done:
        code = cli.run(arguments)
        captured = capsys.readouterr()
        return Done(code, captured.out, captured.err)

    return run


@pytest.fixture
def small() -> tuple[str, ...]:
    return SMALL
