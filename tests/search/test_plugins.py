"""Strategies and routers of one's own in a search: one file each, found by name."""

from pathlib import Path

import pytest

from plugin_package import installed_plugin
from spaces_of_search import space
from windtunnel.errors import InputError
from windtunnel.search.answers import scenario_of
from windtunnel.search.store import Store
from windtunnel.search.study import search
from windtunnel.serving.simulate import simulate

pytestmark = pytest.mark.compiled

STRATEGY = """
from windtunnel.search.evaluation.schema import Question

IS_EXHAUSTIVE = False


def evaluate(asker, workload):
    return asker.ask(workload, [asker.space.num_points - 1], Question())
"""


ROUTER = """
def in_turn(request, replicas):
    return request.number % len(replicas.is_up)


def first_alone(request, replicas):
    return 0
"""


def store() -> Store:
    return Store(None, pytest.fail)


def test_a_strategy_is_one_file(tmp_path: Path) -> None:
    with installed_plugin(tmp_path, "windtunnel.strategies", "last_only", STRATEGY) as files:
        study = search(space({"tp": [1, 2]}, strategy="last_only", finalist_seeds=1), store())
    assert list(study.outcomes[0].evaluations) == [1]
    assert len(files) == 1
    with pytest.raises(InputError, match=r"\$\.strategy is 'last_only', which is not known"):
        space({"tp": [1, 2]}, strategy="last_only")


@pytest.mark.parametrize(
    ("returned", "problem"), [("None", "returned None from evaluate, not a dict"), ("{}", "evaluated no point")]
)
def test_a_strategy_that_evaluates_nothing_is_named(tmp_path: Path, returned: str, problem: str) -> None:
    source = f"IS_EXHAUSTIVE = True\ndef evaluate(asker, workload):\n    return {returned}\n"
    with (
        installed_plugin(tmp_path, "windtunnel.strategies", "idle", source),
        pytest.raises(InputError, match=rf"the search strategy 'idle'.* {problem}"),
    ):
        search(space({"tp": [1, 2]}, strategy="idle", finalist_seeds=1), store())


def loads_by_router(routers: list[str]) -> list[float]:
    """Capacity of two replicas behind each router, every other setting the same."""
    vary = {"deployment.replicas": [2], "deployment.router": routers}
    outcome = search(space(vary, finalist_seeds=1), store()).outcomes[0]
    assert not [answer.refused for answer in outcome.evaluations.values() if answer.refused]
    return [outcome.evaluations[point].load for point in range(len(routers))]


@pytest.mark.full
def test_a_search_asks_routers_of_ones_own(tmp_path: Path) -> None:
    """They were refused, as replicas that come and go are, which have no capacity of their own."""
    with installed_plugin(tmp_path, "windtunnel.routers", "in_turn", ROUTER, attribute="in_turn"):
        built_in, own, first = loads_by_router(["round_robin", "in_turn", "plugin_in_turn:first_alone"])
    assert own == built_in
    assert 0.3 * built_in < first < 0.6 * built_in


@pytest.mark.full
def test_a_search_tries_a_router_that_holds_requests_back() -> None:
    """A limit that no replica reaches changes nothing; a limit of one request lets replicas run without batches."""
    vary = {"deployment.replicas": [2], "deployment.router": ["deferred"], "deployment.router_limit": [1, 100_000]}
    outcome = search(space(vary, finalist_seeds=1), store()).outcomes[0]
    alone, unbounded = (outcome.evaluations[point].load for point in range(2))
    assert unbounded == loads_by_router(["least_outstanding"])[0]
    assert 0 < alone < 0.2 * unbounded


def test_replicas_that_come_and_go_have_no_capacity() -> None:
    faults = {"device_mtbf_s": "1000h", "mttr_s": "1h"}
    vary = {"deployment.faults": [faults], "deployment.start_s": ["1min"]}
    with pytest.raises(InputError, match="the greater the load, the sooner these requests are over"):
        search(space(vary), store())


@pytest.mark.full
def test_a_fleet_costs_the_replica_hours_that_it_holds_at_its_own_load() -> None:
    """They were refused; a point with autoscaling and a failure runs as it does alone, and costs what it holds."""
    scaling = {"type": "target", "metric": "outstanding", "target": 8, "min_replicas": 1, "max_replicas": 4}
    vary = {
        "deployment.autoscaling": [{**scaling, "interval_s": 1, "scale_down_after_s": after_s} for after_s in (2, 60)],
        "deployment.start_s": ["2s"],
        "deployment.faults": [{"scheduled": [{"at_s": "4s", "replica": 0, "repair_s": "2s"}]}],
    }
    study = search(space(vary, finalist_seeds=1, load="given"), store())
    outcome = study.outcomes[0]
    assert not outcome.refusals
    for index, answer in outcome.evaluations.items():
        alone = simulate(scenario_of(study, outcome, index)).summary
        assert alone.fleet is not None
        assert alone.cost is not None
        assert answer.figures["devices"] == pytest.approx(alone.fleet.mean_replicas)
        assert answer.figures["usd_per_hour"] == pytest.approx(alone.cost.usd_per_hour)
        assert answer.figures["ttft_p90"] == pytest.approx(alone.ttft_s.p90)
        assert 1 < answer.figures["devices"] < 4
