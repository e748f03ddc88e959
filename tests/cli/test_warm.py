"""Compiling ahead of the first run."""

from click.testing import CliRunner

from windtunnel.cli import warm
from windtunnel.cli.verbs import windtunnel
from windtunnel.compiled import jit


def test_it_runs_every_form_and_names_it() -> None:
    done = CliRunner().invoke(windtunnel, ["warm"])
    assert done.exit_code == 0, done.output
    assert f"compiled {len(warm.FORMS)} forms of the serving loop: vLLM, SGLang, TensorRT-LLM" in done.stderr


def test_a_run_after_it_compiles_nothing() -> None:
    told: list[str] = []
    jit.ON_COMPILE.append(told.append)
    try:
        for settings in warm.FORMS.values():
            warm.simulate(warm.scenario(**warm.COMMON, settings=settings, concurrency=4, num_requests=9))
    finally:
        jit.ON_COMPILE.remove(told.append)
    assert told == []
