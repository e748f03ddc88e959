"""`windtunnel simulate` and `windtunnel search` on files of kind diffusion."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from cli.conftest import Command

JOB = "kind: diffusion\nmodel: FLUX.1-dev\ndevice: h100_sxm\nbatch: 2\n"
SPACE = f"{JOB}vary: {{parallelism.ulysses: [1, 2, 5], batch: [1, 4]}}\n"


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


@pytest.fixture
def space(tmp_path: Path) -> Path:
    path = tmp_path / "space.yaml"
    path.write_text(SPACE)
    return path


def test_a_job_answers_first_and_then_explains(windtunnel: Command, job: Path) -> None:
    done = windtunnel("simulate", str(job))
    assert done.code == 0
    lines = done.stdout.splitlines()
    assert lines[0] == "black-forest-labs/FLUX.1-dev, 1024 x 1024, 50 steps, batch 2"
    assert lines[1].startswith("An image takes ")
    assert "Where the batch goes" in done.stdout
    assert "Memory of a device" in done.stdout


def test_json_has_every_part_and_the_resolved_job(windtunnel: Command, job: Path) -> None:
    document = json.loads(windtunnel("simulate", str(job), "--json", "--set", "steps=10").stdout)
    assert document["job"]["steps"] == 10
    assert document["job"]["height"] == 1024
    assert sum(document["parts_s"].values()) == pytest.approx(document["batch_s"])
    assert document["output_j"] == pytest.approx(document["energy_j"] / 2)


def test_a_misspelt_kind_is_named(windtunnel: Command, job: Path) -> None:
    job.write_text(JOB.replace("diffusion", "difusion"))
    for verb in ("simulate", "search"):
        done = windtunnel(verb, str(job))
        assert (done.code, done.stdout) == (2, "")
        assert "kind is 'difusion'" in done.stderr


def test_a_job_that_does_not_fit_shows_no_time(windtunnel: Command, job: Path) -> None:
    done = windtunnel("simulate", str(job), "--set", "device=rtx_4090")
    assert done.stdout.splitlines()[1].startswith("Does not fit: a device needs ")
    assert "Memory of a device" in done.stdout
    assert " J each" not in done.stdout
    assert "Where the batch goes" not in done.stdout


def test_a_device_without_measured_runs_is_said(windtunnel: Command, job: Path) -> None:
    words = "No diffusion model was measured on such a device"
    assert words in windtunnel("simulate", str(job), "--set", "device=a100_sxm").stdout
    assert words not in windtunnel("simulate", str(job)).stdout


def test_a_page_is_written(windtunnel: Command, job: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert windtunnel("simulate", str(job), "--html", str(page)).code == 0
    assert "An image takes" in page.read_text()


def test_a_search_shows_the_cheapest_first(windtunnel: Command, space: Path) -> None:
    done = windtunnel("search", str(space), "--top", "3")
    assert done.code == 0
    assert done.stdout.splitlines()[1].startswith("Cheapest, at $0.0100 each: ulysses 1, batch 4. An image takes ")
    assert "2 points refused" in done.stdout
    document = json.loads(windtunnel("search", str(space), "--json", "--top", "3").stdout)
    costs = [point["output_usd"] for point in document["points"]]
    assert len(costs) == 3
    assert costs == sorted(costs)


def test_the_page_of_a_search_marks_the_cheapest_and_says_whether_it_keeps_the_limit(
    windtunnel: Command, space: Path, tmp_path: Path
) -> None:
    for limit, verdict in (("100s", '<div class="verdict good">'), ("1ms", '<div class="verdict bad">')):
        page = tmp_path / f"{limit}.html"
        windtunnel("search", str(space), "--set", f"limit_s={limit}", "--html", str(page))
        text = page.read_text(encoding="utf-8")
        assert verdict in text
        assert text.count('<tr class="first">') == (limit == "100s")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("simulate", "JOB", "--tp", "2"), "--tp is for served models; this file describes a diffusion job"),
        (("simulate", "JOB", "--set", "parallelism.ulysses=7"), "ulysses is 7, which does not divide the 24 heads"),
        (("simulate", "JOB", "--set", "model=FLUX.1-def"), "there is no diffusion model 'FLUX.1-def'"),
        (("simulate", "SPACE"), "has a vary section"),
        (("search", "JOB"), "vary of a diffusion job is a table of lists"),
        (("search", "SPACE", "--slo", "ttft_p90=1s"), "--slo is for served models"),
    ],
)
def test_wrong_input_exits_with_2(
    windtunnel: Command, job: Path, space: Path, arguments: tuple[str, ...], message: str
) -> None:
    files = {"JOB": str(job), "SPACE": str(space)}
    done = windtunnel(*(files.get(argument, argument) for argument in arguments))
    assert done.code == 2
    assert message in done.stderr
    assert "hint:" in done.stderr
    assert done.stdout == ""
