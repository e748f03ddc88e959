"""Pages of runs and of training steps: whole, of one file, and with the figures that the run came to."""

import json
import re
from typing import Any

import msgspec
import pytest

from windtunnel.metrics.limits import Slo
from windtunnel.report.render.html import page as page_of
from windtunnel.report.serving.run import limit_cards, run_report, verdict
from windtunnel.report.training import training_report
from windtunnel.serving.scenario import scenario_from
from windtunnel.serving.simulate import simulate
from windtunnel.training.campaign import campaign
from windtunnel.training.job import load
from windtunnel.training.step import simulate_training
from windtunnel.units import format_seconds

SCENARIO: dict[str, Any] = {
    "model": "llama-3.1-8b",
    "deployment": {"device": "h100_sxm"},
    "workload": {
        "arrivals": {"type": "poisson", "rate_per_s": 4},
        "input_tokens": 500,
        "output_tokens": 20,
        "num_requests": 40,
    },
}


def charts(page: str) -> list[dict[str, Any]]:
    """The data of every figure of a page."""
    scripts = re.findall(r'<script type="application/json">(.*?)</script>', page, re.DOTALL)
    return [json.loads(text) for text in scripts]


def loads_nothing(page: str) -> bool:
    """Whether a page refers to no file or address."""
    outside = re.findall(r"<link|<iframe|\ssrc=|@import|url\(", page)
    return not outside


def test_a_run_s_page_is_one_file_and_says_what_the_run_came_to() -> None:
    raw = {**SCENARIO, "slo": {"ttft_s": 1.0}}
    result = simulate(scenario_from(raw))
    page = page_of(run_report(result))
    assert loads_nothing(page)
    assert page == page_of(run_report(simulate(scenario_from(raw))))  # the same seed gives the same bytes
    assert format_seconds(result.summary.ttft_s.mean) in page
    assert "Poisson arrivals at 4/s" in page
    assert "TTFT p99" in page
    captions = [chart["y"]["label"] for chart in charts(page)]
    assert captions.count("requests") == 4  # three distributions, and the requests in the system
    (limit,) = charts(page)[0]["limits"]
    assert (limit["axis"], limit["value"]) == ("x", 1.0)


def test_the_sentence_names_the_usual_ttft_beside_a_p99_of_the_first_wave() -> None:
    summary = simulate(scenario_from(SCENARIO)).summary
    usual = msgspec.structs.replace(summary.ttft_s, p50=2.0, p99=9.0)
    texts = [
        verdict(msgspec.structs.replace(summary, ttft_s=ttft_s), scenario_from(SCENARIO), None)[0]
        for ttft_s in (usual, msgspec.structs.replace(usual, p99=28.0))
    ]
    assert "with TTFT p99 9.00 s, TPOT p99" in texts[0]
    assert "with TTFT p99 28.0 s (p50 2.00 s), TPOT p99" in texts[1]


def test_a_tile_shows_the_percentile_of_its_limit() -> None:
    summary = simulate(scenario_from({**SCENARIO, "slo": None})).summary
    assert summary.tpot_s is not None
    slo = Slo(ttft_s=1.0, ttft_percentile=90, tpot_s=0.01, tpot_percentile=100, e2e_s=1.0, e2e_percentile=97)
    cards = limit_cards(summary, slo)
    values = [summary.ttft_s.p90, summary.tpot_s.max, summary.e2e_s.p99]
    assert [(card.label, card.value) for card in cards] == [
        ("TTFT p90", format_seconds(values[0])),
        ("TPOT max", format_seconds(values[1])),
        ("end to end p99", format_seconds(values[2])),
    ]
    assert [card.share for card in cards] == pytest.approx([values[0] / 1, values[1] / 0.01, values[2] / 1])
    assert [card.label for card in limit_cards(summary, None)] == ["TTFT p99", "TPOT p99"]


def test_the_page_of_embeddings_has_no_first_token_and_prices_prompts() -> None:
    workload = {name: value for name, value in SCENARIO["workload"].items() if name != "output_tokens"}
    scenario = scenario_from({**SCENARIO, "slo": None, "workload": {**workload, "task": "embed"}})
    page = page_of(run_report(simulate(scenario)))
    assert "TTFT" not in page.partition("<script>")[0]
    tiles = re.findall(r"<span>(.*?)</span>", page)
    assert tiles == ["end to end p99", "input tokens/s", "per million input tokens"]


@pytest.mark.full
@pytest.mark.parametrize(("most", "is_whole"), [(20_000, True), (100, False)])
def test_a_training_page_draws_every_pass_or_the_first(
    most: int, is_whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("windtunnel.report.training.MAX_PASSES", most)
    job = {
        "model": "llama-3.1-8b",
        "device": "h100_sxm",
        "num_devices": 8,
        "parallelism": {"tp": 2, "pp": 4},
        "sequence_tokens": 4096,
        "global_batch": 32,
        "total_tokens": 1e12,
    }
    result = simulate_training(load(None, job))
    page = page_of(training_report(result, campaign(result), [], []))
    assert loads_nothing(page)
    assert format_seconds(result.step_s) in page
    assert "To 1.00 trillion tokens" in page
    (pipeline,) = [chart for chart in charts(page) if chart["tracks"]]
    assert pipeline["tracks"] == [f"device {number}" for number in range(4)]
    assert len(pipeline["bars"]) == (4 * 2 * 32 if is_whole else 100)
    assert ("the first 100 of 256 passes" in page) != is_whole
    assert {bar["kind"] for bar in pipeline["bars"]} == {"forward", "backward"}
    assert all(bar["begin"] < bar["end"] for bar in pipeline["bars"])
