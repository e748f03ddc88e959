"""What a search asks more of, and what it gives up: means over streams, marks, budgets in unknown money."""

import math
from typing import Any

import pytest

from spaces_of_search import space
from windtunnel.errors import InputError
from windtunnel.search.answers import frontier, worths
from windtunnel.search.asker import spread_points
from windtunnel.search.evaluation.evaluate import Evaluator
from windtunnel.search.evaluation.figures import Takes, check_budget, load_worth
from windtunnel.search.evaluation.schema import Evaluation, Question
from windtunnel.search.scores import best_by_value, undominated
from windtunnel.search.space.space import Budget, Space
from windtunnel.search.strategies.tpe import _one_setting_away
from windtunnel.search.study import SearchOutcome


def one(cost: float, speed: float) -> Evaluation:
    """An answer with two figures that are better when greater."""
    figures = {"requests_per_usd": cost, "output_tokens_per_s_per_user": speed}
    return Evaluation(load=cost, figures=figures, holds=True)


def test_the_frontier_is_of_means_over_all_streams() -> None:
    """Point 1 was lucky with the first stream; over two, point 0 beats it in both figures."""
    first = {0: one(10, 5), 1: one(11, 5), 2: one(4, 9)}
    seeds = {0: [first[0], one(12, 5)], 1: [first[1], one(5, 3)], 2: [first[2], one(4, 9)]}
    outcome = SearchOutcome(None, first, seeds, [1, 0, 2], 3)
    names = ("requests_per_usd", "output_tokens_per_s_per_user")
    assert frontier(SearchOutcome(None, first, {}, [1, 0, 2]), names) == [1, 2]
    assert frontier(outcome, names) == [0, 2]
    assert outcome.mean(0).load == 11
    assert outcome.margin(0, "requests_per_usd") == pytest.approx(6.313752 * math.sqrt(2) / math.sqrt(2), rel=1e-4)
    assert outcome.margin(1, "no such figure") is None
    assert not SearchOutcome(None, first, {0: [first[0], Evaluation()]}, [1, 0, 2], 1).mean(0).holds


def test_a_setting_is_worth_the_mean_of_its_shares() -> None:
    searched = space({"tp": [1, 2]})
    first = {0: one(10, 1), 1: one(6, 1)}
    outcome = SearchOutcome(None, first, {0: [first[0], one(10, 1)], 1: [first[1], one(8, 1)]}, [0, 1], 2)
    worth = worths(searched, outcome)["tp"]
    assert worth["1"].share == 1
    assert worth["2"].share == pytest.approx(0.7)
    assert worth["2"].margin == pytest.approx(6.313752 * 0.1, rel=1e-4)


def test_values_that_no_point_was_asked_for_are_not_called_worthless() -> None:
    assert best_by_value(space({"tp": [1, 2, 4]}), {0: 3.0, 2: 5.0}) == {"tp": {"1": 0, "4": 2}}


def test_equal_points_and_points_without_a_figure_are_on_no_frontier_twice() -> None:
    assert undominated({0: (1.0, 2.0), 1: (1.0, 2.0), 2: (2.0, -math.inf), 3: (0.5, 3.0)}) == [0, 3]


@pytest.mark.parametrize(
    ("objective", "score"),
    [
        ("requests_per_s", 8.0),
        ("requests_per_usd", 8.0 * 3600 / 4.0),
        ("output_tokens_per_s", 8.0 * 100),
        ("output_tokens_per_s_per_device", 8.0 * 100 / 2),
        ("usd_per_million_output_tokens", -4.0 / 3600 / 800 * 1e6),
    ],
)
def test_the_load_that_a_score_takes(objective: str, score: float) -> None:
    """Eight requests a second of a hundred tokens on two devices for four dollars an hour, backwards."""
    takes = Takes(devices=2, usd_per_hour=4.0, busy_w=None)
    assert load_worth(objective, score, takes, 100.0) == pytest.approx(8.0)
    assert load_worth("ttft_p90", score, takes, 100.0) is None


@pytest.mark.compiled
def test_a_point_that_is_not_worth_its_while_is_given_up_after_one_run() -> None:
    evaluator, complete = Evaluator(space()), Evaluator(space()).evaluate(0, None, Question())
    score = complete.figures["requests_per_usd"]
    beaten = evaluator.evaluate(0, None, Question(worth=1.2 * score))
    assert (beaten.num_runs, beaten.holds, beaten.figures) == (1, False, {})
    assert beaten.beaten_by > 0
    worthy = evaluator.evaluate(0, None, Question(worth=0.8 * score))
    assert worthy.load == pytest.approx(complete.load, rel=1e-9)
    assert worthy.beaten_by == 0


def test_what_nobody_prices_is_within_no_budget() -> None:
    takes = Takes(devices=1, usd_per_hour=None, busy_w=None)
    for budget in ({"usd_per_hour": 5.0}, {"power_w": 700.0}):
        with pytest.raises(InputError, match="is not known, and the budget is in"):
            check_budget(takes, Budget(**budget))
    check_budget(takes, Budget(devices=1))


def test_points_are_spread_and_have_neighbours() -> None:
    spread = spread_points(1000, 10)
    gaps = [after - before for before, after in zip(spread, [*spread[1:], 1000 + spread[0]], strict=True)]
    assert max(gaps) <= 2 * 1000 / 10
    assert spread_points(5, 9) == [0, 1, 2, 3, 4]
    sizes: dict[str, Any] = {"a": 3, "b": 2}
    assert set(_one_setting_away(3, sizes)) == {2, 1, 5}


@pytest.mark.parametrize(
    ("scenario", "vary", "comes_and_goes"),
    [
        ({"workload": {"trace": {"path": "faults.csv"}}, "model": "autoscaling"}, {}, False),
        ({"deployment": {"autoscaling": None}}, {"deployment.replicas": [1, 2]}, False),
        ({"deployment": {"pools": [{"name": "p", "faults": {"mtbf_s": 60}}]}}, {}, True),
        ({}, {"deployment.autoscaling.target": [20, 80]}, True),
        ({}, {"change": {"scaled": {"deployment": {"autoscaling": {"target": 8}}}}}, True),
    ],
    ids=["words", "none", "pool", "path", "alternative"],
)
def test_replicas_come_and_go_where_a_setting_says_so(scenario: Any, vary: Any, comes_and_goes: bool) -> None:
    assert Space(scenario=scenario, vary=vary).comes_and_goes is comes_and_goes
