"""Compiling ahead of the first run, into the user's cache or for a wheel."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from windtunnel.cli import output, warm
from windtunnel.cli.verbs import windtunnel
from windtunnel.compiled import jit, shipped_name
from windtunnel.serving.shorthand import scenario
from windtunnel.twin.start import twin_app

pytestmark = pytest.mark.compiled


@pytest.mark.full
def test_it_names_every_form_and_runs_of_these_forms_compile_nothing_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    done = CliRunner().invoke(windtunnel, ["warm"])
    assert done.exit_code == 0, done.output
    assert f"compiled {len(warm.NAMES)} forms of the serving loop: vLLM, SGLang, TensorRT-LLM" in done.stderr
    told: list[str] = []
    monkeypatch.setattr(jit, "ON_COMPILE", [told.append])
    for name in warm.NAMES:
        warm.run(name)
    for settings in warm.SERVED.values():
        described = {"model": "llama-3.1-8b", **settings}
        twin_app(scenario(**warm.KNOWN["common"], settings=described, rate_per_s=3), None, max_requests=9)
    assert told == []


PROGRAM = """
import contextlib, sys
from pathlib import Path
from windtunnel import cli
from windtunnel.compiled import jit
jit.SHIPPED = Path(sys.argv[1])
jit.SHIP_TO += map(Path, sys.argv[2:])

def told(name):
    print("compiling", name, file=sys.__stdout__)
    if not jit.SHIP_TO:
        sys.exit()

jit.ON_COMPILE.append(told)
with contextlib.redirect_stdout(sys.stderr):
    cli.run(["train", "--model", "llama-3.1-8b", "--device", "h100_sxm", "--num-devices", "2", "--pp", "2",
        "--sequence-tokens", "1024", "--global-batch", "4"])
print("ran")
"""
"""A schedule of a pipeline, whose loop compiles in a tenth of the serving loop's time."""


@pytest.mark.full
def test_shipped_code_is_run_where_a_first_run_would_compile(tmp_path: Path) -> None:
    shipped, generic = tmp_path / "shipped", warm.ANY_PROCESSOR

    def run(name: str, *folders: Path, **more: str) -> list[str]:
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / name), **more}
        environment.pop("NUMBA_CACHE_DIR", None)
        command = [sys.executable, "-c", PROGRAM, *map(str, folders)]
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.split("\n")

    first = run("maker", tmp_path / "none", shipped, **generic)
    assert first == ["compiling replay", "ran", ""]
    kept = list((shipped / shipped_name()).iterdir())
    assert len(kept) == 1
    # Another user on another machine: nothing of its own is kept, and nothing is compiled.
    assert run("user", shipped) == ["ran", ""]
    # Damaged or foreign code is left alone.
    kept[0].write_bytes(kept[0].read_bytes()[:-9])
    assert run("user", shipped) == ["compiling replay", ""]


def test_a_users_function_is_never_taken_from_a_wheel() -> None:
    def policy(x: int) -> int:
        return x

    assert jit.Entry(policy)._shipped_path(()) is None


@pytest.mark.full
def test_a_server_says_what_it_compiles(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with output.compiling(2):
        for announce in jit.ON_COMPILE:
            announce("serve")
            announce("cancel")
    assert capsys.readouterr().err.splitlines() == [
        "compiling the serving loop, part 1 of 2, once",
        "compiling cancel, part 2 of 2, once",
        "compiled in 0 s; the next start finds it",
    ]
    assert jit.ON_COMPILE == []
    with output.compiling(2):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with output.compiling(1):
        jit.ON_COMPILE[0]("serve")
        time.sleep(1.2)
    assert "compiling the serving loop, part 1 of 1, once: 1 s so far" in capsys.readouterr().err
