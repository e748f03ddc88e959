"""Pages of runs and of training steps: whole, of one file, and with the figures that the run came to."""

import re
from xml.etree import ElementTree as ET

import pytest

from windtunnel.report.render.html import page as page_of
from windtunnel.report.render.plots import Axis, Bar, tracks
from windtunnel.report.serving.run import run_report
from windtunnel.report.training import MOST_PASSES, training_report
from windtunnel.serving.scenario import scenario_from
from windtunnel.serving.simulate import simulate
from windtunnel.training.campaign import campaign
from windtunnel.training.job import load
from windtunnel.training.step import simulate_training
from windtunnel.units import format_seconds

SVG = "{http://www.w3.org/2000/svg}"


def svgs(page: str) -> list[ET.Element]:
    """Every drawing of a page; each must be well-formed by itself."""
    return [ET.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def loads_nothing(page: str) -> bool:
    """Whether a page refers to no file or address."""
    outside = re.findall(r"<link|<iframe|\ssrc=|@import|url\(", page)
    return not outside


def test_a_run_s_page_is_one_file_and_says_what_the_run_came_to() -> None:
    raw = {
        "model": "llama-3.1-8b",
        "deployment": {"device": "h100_sxm"},
        "workload": {
            "arrivals": {"type": "poisson", "rate_per_s": 4},
            "input_tokens": 500,
            "output_tokens": 20,
            "num_requests": 40,
        },
        "slo": {"ttft_s": 1.0},
    }
    result = simulate(scenario_from(raw))
    page = page_of(run_report(result))
    assert loads_nothing(page)
    assert format_seconds(result.summary.ttft_s.mean) in page
    assert "Poisson arrivals at 4/s" in page
    assert len(svgs(page)) == page.count("<figcaption>") >= 8


@pytest.mark.parametrize(("num_microbatches", "is_whole"), [(8, True), (128, False)])
def test_a_training_page_draws_every_pass_or_the_first_and_the_last(num_microbatches: int, is_whole: bool) -> None:
    job = {
        "model": "llama-3.1-8b",
        "device": "h100_sxm",
        "num_devices": 8,
        "parallelism": {"tp": 2, "pp": 4},
        "sequence_tokens": 4096,
        "global_batch": num_microbatches,
        "total_tokens": 1e12,
    }
    result = simulate_training(load(None, job))
    page = page_of(training_report(result, campaign(result), [], []))
    assert loads_nothing(page)
    assert format_seconds(result.step_s) in page
    assert "To 1,000 billion tokens" in page
    pipelines = [one for one in svgs(page) if "device 0" in "".join(one.itertext())]
    assert len(pipelines) == (1 if is_whole else 2)
    num_bars = sum(len(one.findall(f"{SVG}rect/{SVG}title")) for one in pipelines)
    colours = [
        {bar.findtext(f"{SVG}title", "").partition(" ")[0]: bar.attrib["fill"] for bar in one.findall(f"{SVG}rect")}
        for one in pipelines
    ]
    assert all(one["forward"] == colours[0]["forward"] != one["backward"] for one in colours)
    if is_whole:
        assert num_bars == 4 * 2 * num_microbatches
    else:
        assert num_bars == pytest.approx(4 * MOST_PASSES, rel=0.1)


def test_bars_lie_in_their_tracks_over_the_axis() -> None:
    drawn = ET.fromstring(
        tracks(["a", "b"], [Bar(0, 1.0, 2.0, "x", "one"), Bar(1, 3.0, 5.0, "y", "two")], Axis("s", low=1.0, high=5.0))
    )
    one, two = (bar for bar in drawn.iter(f"{SVG}rect") if bar.find(f"{SVG}title") is not None)
    assert float(two.attrib["width"]) == pytest.approx(2 * float(one.attrib["width"]), rel=0.01)
    assert float(two.attrib["y"]) > float(one.attrib["y"])
    assert float(two.attrib["x"]) == pytest.approx(float(one.attrib["x"]) + 2 * float(one.attrib["width"]), rel=0.01)
    assert one.attrib["fill"] != two.attrib["fill"]
