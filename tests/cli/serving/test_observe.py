"""`windtunnel observe`: the files that it writes, and what it refuses."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from cli.conftest import Command

SERVER = "vllm serve qwen2.5-0.5b"


@pytest.fixture
def steps(tmp_path: Path) -> str:
    path = tmp_path / "steps.csv"
    rows = [f"{number},0,0,{number % 50 + 1},{(number % 50 + 1) * 300},{6 + number % 7 / 10}" for number in range(400)]
    header = "counter,prefill_tokens,prefill_requests,decode_requests,decode_kv_tokens,wall_time_ms"
    path.write_text("\n".join([header, *rows]), encoding="utf-8")
    return str(path)


def test_what_is_learnt_is_written_and_simulated(windtunnel: Command, steps: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    load = ("--rate", "20", "--num-requests", "40", "--input-tokens", "64", "--output-tokens", "16")
    assert windtunnel("simulate", "--from-command", SERVER, "--device", "h100_sxm", *load, "--out", str(run)).code == 0
    out = tmp_path / "learnt"
    arguments = (steps, "--from-command", SERVER, "--device", "h100_sxm", "--requests", str(run), "--out", str(out))
    done = windtunnel("observe", *arguments, "--json")
    assert done.code == 0, done.stderr
    assert json.loads(done.stdout)["after"]["decode"]["median"] < 0.2
    assert sorted(path.name for path in out.iterdir()) == ["calibration.yaml", "requests.csv", "scenario.yaml"]
    simulated = json.loads(windtunnel("simulate", str(out / "scenario.yaml"), "--json").stdout)
    assert simulated["summary"]["num_requests"] == 40
    assert simulated["calibration"]["name"] == str(out / "calibration.yaml")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--learn", "2"), "--learn is 2; a share between 0 and 1 is needed"),
        (("--requests", "run.json"), "--requests is for the scenario that --out writes"),
        (("--only", "another"), "--only: no run's id contains 'another'"),
    ],
)
def test_wrong_options_are_refused(windtunnel: Command, steps: str, arguments: tuple[str, ...], message: str) -> None:
    done = windtunnel("observe", steps, "--from-command", SERVER, "--device", "h100_sxm", *arguments)
    assert done.code == 2
    assert message in done.stderr
