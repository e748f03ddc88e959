"""Pages of searches and grids: the limits beside the best point, one figure for what differs, nothing said twice."""

import json
import re
from typing import Any

import pytest

from dashboard.conftest import SPACE as SEARCHED
from spaces_of_search import space
from windtunnel.report.render.html import page
from windtunnel.report.search.figures import assumed_rows
from windtunnel.report.search.recommendation import gain_text, nothing_text
from windtunnel.report.search.study import evidence_of, search_report
from windtunnel.report.search.whatif import grid_report, shown_figures
from windtunnel.search.answers import AS_IT_IS
from windtunnel.search.evaluation.schema import Evaluation
from windtunnel.search.space.space import CHANGE, Space, space_from
from windtunnel.search.store import Store
from windtunnel.search.study import SearchOutcome, search
from windtunnel.serving.engines.defaults import engine_defaults

SPACE: dict[str, Any] = {**SEARCHED, "vary": {"tp": [1], "max_num_seqs": [16, 256]}, "finalist_seeds": 1}


def charts(text: str) -> list[dict[str, Any]]:
    return [json.loads(data) for data in re.findall(r'<script type="application/json">(.*?)</script>', text, re.DOTALL)]


def page_of(space: Space) -> str:
    store = Store(None, print)
    return page(search_report(evidence_of(search(space, store), store, 5)))


@pytest.mark.full
@pytest.mark.compiled
def test_a_search_shows_what_the_best_point_takes_of_the_limits() -> None:
    text = page_of(space_from(SPACE))
    assert re.search(r"Best: .* \([\d,]+ requests/\$\)\.</p><p>Holds [\d.]+ requests/s for \$2\.95/h", text)
    assert re.search(r"<span>TTFT p90</span><small>[\d.]+% of the limit, 1.00 s</small>", text)
    (chart,) = charts(text)
    assert chart["limits"] == {"TTFT p90": 1.0}
    assert text.count("Points that meet the limits") == 1
    assert text.count("What each setting is worth") == 1
    assert "Answers" not in text


@pytest.mark.full
@pytest.mark.compiled
def test_a_ranking_of_changes_leaves_their_names_room() -> None:
    changes = {AS_IT_IS: {"max_num_seqs": 256}, "Set --max-num-seqs 16 (now 256)": {"max_num_seqs": 16}}
    heads = re.findall(r"<th[^>]*>([^<]*)</th>", page_of(space_from({**SPACE, "vary": {CHANGE: changes}})))
    ranking = heads[: heads.index("limit") + 1]
    assert "gain" in ranking
    assert "J/token" not in ranking
    assert "J/token" in re.findall(r"<th[^>]*>([^<]*)</th>", page_of(space_from(SPACE)))


@pytest.mark.full
@pytest.mark.compiled
def test_a_search_of_one_point_draws_nothing() -> None:
    text = page_of(space_from({**SPACE, "vary": {"tp": [1]}}))
    assert "Best: " in text
    assert "Every point that meets the limits" not in text
    assert charts(text) == []


@pytest.mark.compiled
def test_a_search_that_finds_nothing_names_the_limit_once() -> None:
    text = page_of(space_from({**SPACE, "limits": {"ttft_p90": "1us"}}))
    assert text.count("at all 2 points, TTFT p90 &lt;= 1.00 us is not met") == 1
    assert text.count("keeps the limits") == 1


@pytest.mark.full
@pytest.mark.compiled
def test_a_search_under_way_whose_points_all_cannot_run_says_so() -> None:
    study = search(space_from(SPACE), Store(None, print))
    (outcome,) = study.outcomes
    refused = SearchOutcome(**{**vars(outcome), "evaluations": {0: Evaluation(refused="too large")}, "ranking": []})
    assert nothing_text(study, refused).startswith("Nothing tried can run")


@pytest.mark.full
def test_a_search_of_jobs_shows_the_limits_of_jobs() -> None:
    job = {"model": "meta-llama/Llama-3.1-8B", "device": "h100_sxm", "num_devices": 8, "global_batch": 8}
    vary = {"parallelism.tp": [2, 4]}
    text = page_of(space_from({**job, "sequence_tokens": 2048, "vary": vary, "limits": {"step": "100s"}}))
    (chart,) = charts(text)
    assert chart["limits"] == {"step": 100.0}
    assert "step" in chart["figures"]
    # The unit of the table; bytes would be drawn as multiples of 10^9.
    (memory,) = {row[chart["figures"].index("memory, GiB")] for row in chart["values"][:1]}
    assert f">{memory:.1f} GiB</td>" in text


def grid(vary: dict[str, list[int]]) -> str:
    space = space_from({**SPACE, "vary": vary, "limits": {"tpot_p99": "50ms"}})
    figures = {"ttft_p90": 0.1, "requests_per_s": 2.0, "usd_per_hour": 2.95, "requests_per_usd": 2440.0}
    answers = {}
    for index in range(space.num_points):
        more = {"ttft_p90": 0.1 + index, "requests_per_usd": 2440.0 + (index == 1)}
        answers[index] = Evaluation(holds=True, load=1.0, figures={**figures, **more})
    return page(grid_report(space, answers, ("ttft_p90", "usd_per_hour")))


def test_a_grid_is_drawn_over_the_setting_with_most_values() -> None:
    (chart,) = charts(grid({"max_num_seqs": [1, 4, 64, 256], "tp": [1, 2]}))
    assert (chart["x"]["label"], chart["x"]["is_log"]) == ("max_num_seqs", None)
    assert [series["label"] for series in chart["series"]] == ["tp 1", "tp 2"]
    (chart,) = charts(grid({"max_num_seqs": [8, 16], "tp": [1, 2]}))
    assert chart["x"]["label"] == "tp"


def test_a_grid_marks_its_best_point_and_leaves_out_figures_that_are_the_same_everywhere() -> None:
    text = grid({"max_num_seqs": [8, 16], "tp": [1, 2]})
    assert "the cheapest per request is max_num_seqs 8, tp 2" in text
    (row,) = re.findall(r'<tr class="first">(.*?)</tr>', text, re.DOTALL)
    assert re.findall(r">(\w+)</td>", row)[:2] == ["8", "2"]
    assert ">$/h</th>" in text
    assert len(charts(text)) == 1
    assert "requests_per_s" in shown_figures(None, space_from(SPACE))


def test_a_grid_shows_every_limited_figure_and_names_every_limit_that_breaks() -> None:
    space = space_from({**SPACE, "vary": {"rate": [1, 2]}, "limits": {"ttft_p95": "1s", "tpot_p90": "50ms"}})
    assert shown_figures(None, space)[:2] == ("ttft_p95", "tpot_p90")
    assert shown_figures("ttft_mean", space) == ("ttft_mean",)
    kept = Evaluation(holds=True, load=1.0, figures={"ttft_p95": 0.5, "tpot_p90": 0.02})
    broken = Evaluation(holds=False, load=2.0, limited_by="ttft_p95", figures={"ttft_p95": 2.0, "tpot_p90": 0.09})
    report = grid_report(space, {0: kept, 1: broken}, ("ttft_p95", "tpot_p90"))
    text = page(report)
    assert ">TTFT p95, TPOT p90</td>" in text
    assert {chart["x"]["label"] for chart in charts(text)} == {"rate (requests/s)"}


@pytest.mark.parametrize(
    ("usd", "says"),
    [
        ([1.0, 2.0, 1.0], "; the cheapest per request is tp 2."),
        ([2.0, 1.0, 2.0], "; the cheapest per request is tp 1, and 1 more cost the same."),
        ([2.0, 2.0, 2.0], "; all cost the same per request."),
    ],
)
def test_a_grid_says_which_points_cost_the_same(usd: list[float], says: str) -> None:
    space = space_from({**SPACE, "vary": {"tp": [1, 2, 4]}, "limits": {"tpot_p99": "50ms"}})
    answers = {
        index: Evaluation(holds=True, load=1.0, num_requests=9, figures={"requests_per_usd": worth, "ttft_p90": 1.0})
        for index, worth in enumerate(usd)
    }
    assert says in str(grid_report(space, answers, ("ttft_p90",)).verdict)


def test_a_loss_that_rounds_to_nothing_has_no_minus() -> None:
    assert [gain_text(share) for share in (-0.0004, 0.0, 0.125, -0.3)] == ["+0.0%", "+0.0%", "+12.5%", "-30.0%"]


def test_a_report_names_the_engine_and_the_load_that_its_points_share() -> None:
    rows = dict(assumed_rows(space()))
    assert rows == {"engine": f"vLLM {engine_defaults('vllm').default_version}", "load": rows["load"]}
    assert rows["load"].startswith("Poisson arrivals, ")
    assert "at 1/s" in dict(assumed_rows(space(load="given")))["load"]
    assert "at 1/s" not in dict(assumed_rows(space({"rate": [1, 2]}, load="given")))["load"]
    assert dict(assumed_rows(space({"input_tokens": [1, 2]}))).keys() == {"engine"}
    assert dict(assumed_rows(space({"engine": ["vllm", "sglang"]}))).keys() == {"load"}
    whole = {"a": {"deployment.engine.name": "vllm"}, "b": {"deployment.engine.name": "sglang"}}
    assert dict(assumed_rows(space({"deployment": whole}))).keys() == {"load"}
    assert assumed_rows(space({"tp": ["x"]})) == []
