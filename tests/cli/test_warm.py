"""Compiling ahead of the first run."""

import time

import pytest
from click.testing import CliRunner

from windtunnel.cli import progress, warm
from windtunnel.cli.verbs import windtunnel
from windtunnel.compiled import jit
from windtunnel.serving.shorthand import scenario
from windtunnel.serving.simulate import simulate
from windtunnel.twin.start import twin_app


def test_it_names_every_form_and_runs_of_these_forms_compile_nothing_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    done = CliRunner().invoke(windtunnel, ["warm"])
    assert done.exit_code == 0, done.output
    total = len(warm.FORMS) + len(warm.SERVED)
    assert f"compiled {total} forms of the serving loop: vLLM, SGLang, TensorRT-LLM" in done.stderr
    told: list[str] = []
    monkeypatch.setattr(jit, "ON_COMPILE", [told.append])
    for settings in warm.FORMS.values():
        simulate(scenario(**warm.COMMON, settings=settings, concurrency=4, num_requests=9))
    for name in warm.SERVED:
        twin_app(scenario(**warm.COMMON, settings=warm.FORMS[name], rate_per_s=3), None, max_requests=9)
    assert told == []


def test_a_server_says_what_it_compiles(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with progress.compiling(2):
        for announce in jit.ON_COMPILE:
            announce("serve")
            announce("cancel")
    assert capsys.readouterr().err.splitlines() == [
        "compiling the serving loop, part 1 of 2, once",
        "compiling cancel, part 2 of 2, once",
        "compiled in 0 s; the next start finds it",
    ]
    assert jit.ON_COMPILE == []
    with progress.compiling(2):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with progress.compiling(1):
        jit.ON_COMPILE[0]("serve")
        time.sleep(1.2)
    assert "compiling the serving loop, part 1 of 1, once: 1 s so far" in capsys.readouterr().err
