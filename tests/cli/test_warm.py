"""Compiling ahead of the first run."""

import pytest
from click.testing import CliRunner

from windtunnel.cli import warm
from windtunnel.cli.verbs import windtunnel
from windtunnel.compiled import jit


def test_it_names_every_form_and_runs_of_these_forms_compile_nothing_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    done = CliRunner().invoke(windtunnel, ["warm"])
    assert done.exit_code == 0, done.output
    assert f"compiled {len(warm.FORMS)} forms of the serving loop: vLLM, SGLang, TensorRT-LLM" in done.stderr
    told: list[str] = []
    monkeypatch.setattr(jit, "ON_COMPILE", [told.append])
    for settings in warm.FORMS.values():
        warm.simulate(warm.scenario(**warm.COMMON, settings=settings, concurrency=4, num_requests=9))
    assert told == []
