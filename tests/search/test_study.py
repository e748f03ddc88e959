"""Searches: the same answers wherever they run and however often they are broken off."""

import itertools
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import msgspec
import pytest

from spaces_of_search import BASE, VARY, quiet, space
from windtunnel.errors import InputError
from windtunnel.search import executors
from windtunnel.search.answers import best_by_objective, confidence, frontier, misconfiguration, scenario_of, worths
from windtunnel.search.asker import Asker
from windtunnel.search.evaluation.evaluate import Evaluator, Neighbours
from windtunnel.search.evaluation.schema import Evaluation, Question
from windtunnel.search.executors import Means, start_workers
from windtunnel.search.fleets import fleets
from windtunnel.search.scores import OBJECTIVES, score
from windtunnel.search.space.space import Point, Space, grid_of, load_space, point_at, space_from
from windtunnel.search.store import Store
from windtunnel.search.study import InterruptedSearchError, SearchOutcome, Study, _search_workload, search
from windtunnel.serving.simulate import simulate

pytestmark = pytest.mark.compiled


@pytest.fixture(scope="module")
def study() -> Study:
    return search(space(), quiet())


def answers(study: Study) -> object:
    outcome = study.outcomes[0]
    return outcome.evaluations, outcome.ranking, outcome.seeds


def found_of(study: Study) -> object:
    """The answers without what it took to find them, which depends on what was known before."""
    found = study.outcomes[0]
    bare = {index: msgspec.structs.replace(one, num_runs=0, num_requests=0) for index, one in found.evaluations.items()}
    return bare, found.ranking


@pytest.mark.full
def test_the_same_seed_gives_the_same_frontier(study: Study) -> None:
    again = search(space(), quiet())
    assert answers(again) == answers(study)
    objectives = ("requests_per_usd", "output_tokens_per_s_per_user")
    assert frontier(again.outcomes[0], objectives) == frontier(study.outcomes[0], objectives)
    assert answers(search(space(seed=1), quiet())) != answers(study)


@pytest.mark.full
@pytest.mark.parametrize(
    "means",
    [Means("threads", 2), pytest.param(Means("processes", 2), marks=pytest.mark.slow)],
    ids=lambda means: means.executor,
)
def test_where_a_search_runs_makes_no_difference(study: Study, means: Means) -> None:
    """Invariant 8."""
    assert answers(search(space(), quiet(), means)) == answers(study)


@pytest.mark.full
def test_a_search_whose_answers_are_known_starts_no_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = space({"tp": [1, 2]}, finalist_seeds=1)
    first = search(grid, quiet(tmp_path / "answers.sqlite"))
    monkeypatch.setattr(executors, "WorkerProcesses", lambda *_, **__: pytest.fail("processes began"))
    again = search(grid, quiet(tmp_path / "answers.sqlite"), Means("processes", 2))
    assert answers(again) == answers(first)
    assert again.count.num_runs == 0


def test_a_scenarios_limits_are_those_of_its_search_unless_it_has_others() -> None:
    base = {name: value for name, value in BASE.items() if name != "limits"}
    raw = {**base, "vary": {"tp": [1, 2]}, "slo": {"ttft_s": "500ms", "tpot_s": 0.03}}
    assert space_from(raw, "file").limits == {"ttft_p99": 0.5, "tpot_p99": 0.03}
    assert space_from({**raw, "limits": {"ttft_p90": "2s"}}, "file").limits == {"ttft_p90": "2s"}
    assert space_from({**raw, "limits": {}}, "file").limits == {}
    with pytest.raises(InputError, match="slo"):
        space_from({**raw, "slo": {"ttft_ms": 500}}, "file")


@pytest.mark.full
def test_every_latency_with_a_limit_is_among_the_figures() -> None:
    """Also of statistics that are not always kept."""
    limits = {"ttft_p90": "2s", "ttft_p95": "2s", "itl_p95": "500ms", "e2e_max": "300s"}
    outcome = search(space({"tp": [1, 2]}, limits=limits, finalist_seeds=1), quiet()).outcomes[0]
    for evaluation in outcome.evaluations.values():
        assert limits.keys() <= evaluation.figures.keys()
        assert evaluation.figures["ttft_p90"] <= evaluation.figures["ttft_p95"] <= evaluation.figures["ttft_p99"]
        assert evaluation.figures["e2e_max"] >= evaluation.figures["e2e_p99"]
        assert evaluation.figures["itl_p90"] <= evaluation.figures["itl_p95"] <= evaluation.figures["itl_p99"]


@pytest.mark.full
def test_every_point_is_asked_and_refusals_say_why(study: Study) -> None:
    outcome = study.outcomes[0]
    assert sorted(outcome.evaluations) == list(range(18))
    assert outcome.refusals == {
        "tp = 3 does not divide the 32 attention heads of meta-llama/Llama-3.1-8B": list(range(12, 18))
    }
    assert sorted(outcome.ranking) == [index for index in range(12) if outcome.evaluations[index].holds]


@pytest.mark.full
def test_a_point_simulated_alone_gives_the_figures_of_the_search(study: Study) -> None:
    outcome = study.outcomes[0]
    for index in outcome.ranking[:3]:
        figures = outcome.evaluations[index].figures
        summary = simulate(scenario_of(study, outcome, index)).summary
        assert summary.tpot_s is not None
        assert summary.itl_s is not None
        assert summary.power is not None
        assert figures["ttft_p90"] == summary.ttft_s.p90
        assert figures["tpot_p99"] == summary.tpot_s.p99
        assert figures["itl_p99"] == summary.itl_s.p99
        assert figures["e2e_mean"] == pytest.approx(summary.e2e_s.mean)
        assert figures["kv_peak_fraction"] == summary.utilisation.kv_peak_fraction
        assert figures["mean_w"] == pytest.approx(summary.power.mean_w, rel=0.01)
        assert figures["output_tokens_per_s_per_user"] == pytest.approx(summary.throughput.output_tokens_per_s_per_user)
        assert summary.ttft_s.p90 <= 1.0
        assert summary.tpot_s.p99 <= 0.05


@pytest.mark.full
def test_what_is_taken_for_a_neighbours_run_is_what_a_run_gives() -> None:
    """The oracle of the shortcut: every point evaluated alone, without neighbours."""
    wide = {**VARY, "tp": [1], "gpu_memory_utilization": [0.5, 0.9], "max_num_seqs": [16, 128, 256, 512]}
    searched = space(wide)
    together, alone, neighbours = Evaluator(searched), Evaluator(searched), Neighbours()
    num_duplicates = 0
    for index in range(searched.num_points):
        evaluation = together.evaluate(index, None, Question(), neighbours)
        other = alone.evaluate(index, None, Question())
        num_duplicates += not evaluation.num_runs
        assert msgspec.structs.replace(evaluation, num_runs=0, num_requests=0) == msgspec.structs.replace(
            other, num_runs=0, num_requests=0
        )
    assert num_duplicates >= 4


@pytest.mark.full
def test_sglang_and_other_schedulers_and_pools_are_searched() -> None:
    pools = [{"name": "p", "role": "prefill"}, {"name": "d", "role": "decode"}]
    kinds = {
        "kind": {
            "sglang": {"engine": "sglang"},
            "trtllm": {"engine": "trtllm", "max_num_seqs": 64},
            "old": {"scheduler": "sarathi"},
            "split": {"deployment.pools": pools},
        }
    }
    outcome = search(space(kinds), quiet()).outcomes[0]
    assert [outcome.evaluations[index].refused for index in range(4)] == [""] * 4
    assert all(outcome.evaluations[index].load > 1 for index in range(4))
    assert outcome.evaluations[3].figures["devices"] == 2


@pytest.mark.full
def test_answers_are_found_again_across_searches(tmp_path: Path) -> None:
    path = tmp_path / "kept.sqlite"
    first = search(space(), quiet(path))
    again = search(space(), quiet(path))
    assert again.count.num_runs == 0
    assert answers(again) == answers(first)
    larger = search(space({**VARY, "max_num_seqs": [16, 64, 256, 512]}), quiet(path))
    assert larger.count.num_known >= 12
    assert search(space(limits={"ttft_p90": "0.5s"}), quiet(path)).count.num_known == 0


@pytest.mark.full
def test_an_interrupted_search_goes_on_to_the_same_answers(study: Study, tmp_path: Path) -> None:
    path, seen = tmp_path / "kept.sqlite", []

    def interrupt(done: int, _: int) -> None:
        seen.append(done)
        if done > 6:
            raise KeyboardInterrupt

    with pytest.raises(InterruptedSearchError) as interrupted:
        search(space(), quiet(path), Means(progress=interrupt))
    (partial,) = interrupted.value.study.outcomes
    assert 6 < len(partial.evaluations) < space().num_points == 18
    assert partial.ranking
    store = quiet(path)
    unfinished = store.unfinished()
    assert unfinished is not None
    assert msgspec.json.decode(unfinished, type=Space) == space()
    ((began_at, seconds),) = store.runs_of(unfinished)
    assert began_at.startswith("20")
    assert seconds > 0
    resumed = search(space(), store)
    assert 0 < resumed.count.num_known < 12
    assert answers(resumed) == answers(study)
    assert store.unfinished() is None
    assert next(each for each, _ in store.runs_of(unfinished)) == began_at
    assert len(store.runs_of(unfinished)) == 2


@pytest.mark.full
def test_a_damaged_entry_is_run_again_with_a_message(study: Study, tmp_path: Path) -> None:
    path = tmp_path / "kept.sqlite"
    search(space(), quiet(path))
    with sqlite3.connect(path) as connection:
        connection.execute(
            "update evaluations set answer = x'00ff' where rowid in (select rowid from evaluations limit 3)"
        )
    connection.close()
    said: list[str] = []
    again = search(space(), Store(path, said.append))
    assert len(said) >= 1
    assert "damaged" in said[0]
    assert found_of(again) == found_of(study)
    assert again.count.num_runs > 0


@pytest.mark.full
def test_a_damaged_file_and_a_full_disk_are_survived_with_a_message(study: Study, tmp_path: Path) -> None:
    path = tmp_path / "broken.sqlite"
    path.write_bytes(b"this is no database, but it is long enough to look at" * 100)
    said: list[str] = []
    assert answers(search(space(), Store(path, said.append))) == answers(study)
    assert len(said) == 1
    assert "cannot be used" in said[0]
    assert path.read_bytes().startswith(b"this is no database")

    said.clear()
    store = Store(tmp_path / "full.sqlite", said.append)
    assert store.connection is not None
    store.connection.execute("pragma max_page_count = 6")
    assert answers(search(space(), store)) == answers(study)
    assert said == [said[0]]
    assert "full" in said[0]


@pytest.mark.slow
def test_a_killed_process_loses_nothing(study: Study) -> None:
    import multiprocessing

    killed = []

    def kill(*_: int) -> None:
        if not killed:
            victim = multiprocessing.active_children()[0]
            killed.append(victim.pid)
            victim.kill()

    assert answers(search(space(), quiet(), Means("processes", 2, progress=kill))) == answers(study)
    assert killed


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_ray_gives_the_same_answers_when_a_worker_is_killed(study: Study) -> None:
    """Two nodes of one processor each; the first worker that is seen dies in the middle of its chunk."""
    ray = pytest.importorskip("ray")
    psutil = pytest.importorskip("psutil")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    killed, counted = [], []

    def kill(done: int, _: int) -> None:
        counted.append(done)
        if not killed:
            ours = psutil.Process().children(recursive=True)
            victim = next((one for one in ours if one.name().startswith("ray::_run")), None)
            if victim is not None:
                killed.append(victim.pid)
                victim.kill()

    try:
        assert len(ray.nodes()) == 2
        found = search(space(finalists=1), quiet(), Means("ray", progress=kill))
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert killed
    assert answers(found)[0] == answers(study)[0]  # type: ignore[index]
    assert found.count.num_runs == search(space(finalists=1), quiet()).count.num_runs


@pytest.mark.full
def test_strategies_that_ask_fewer_points_find_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = {
        "tp": [1, 2, 4],
        "max_num_batched_tokens": [512, 1024, 2048, 4096, 8192],
        "max_num_seqs": [16, 32, 64, 128, 256],
    }
    exhaustive = search(space(wide, finalist_seeds=1), quiet())
    best = max(score(evaluation, "requests_per_usd") for evaluation in exhaustive.outcomes[0].evaluations.values())
    halved = search(space(wide, strategy="halving", finalist_seeds=1), quiet())
    assert (
        max(score(evaluation, "requests_per_usd") for evaluation in halved.outcomes[0].evaluations.values())
        >= 0.99 * best
    )
    assert halved.count.num_requests < exhaustive.count.num_requests
    monkeypatch.setattr("windtunnel.search.strategies.prune.NUM_WHOLE", 1)
    pruned = search(space(wide, strategy="prune", finalist_seeds=1), quiet())
    (outcome,), (whole,) = pruned.outcomes, exhaustive.outcomes
    assert outcome.evaluations.keys() == whole.evaluations.keys()
    assert outcome.ranking[0] == whole.ranking[0]
    assert outcome.evaluations[outcome.ranking[0]].load == whole.evaluations[whole.ranking[0]].load
    assert pruned.count.num_runs < 0.8 * exhaustive.count.num_runs
    pytest.importorskip("optuna")
    tried = search(space(wide, strategy="tpe", finalist_seeds=1), quiet())
    assert len(tried.outcomes[0].evaluations) <= 40
    assert (
        max(score(evaluation, "requests_per_usd") for evaluation in tried.outcomes[0].evaluations.values())
        >= 0.97 * best
    )
    assert answers(search(space(wide, strategy="tpe", finalist_seeds=1), quiet())) == answers(tried)


@pytest.mark.full
def test_what_follows_from_a_study(study: Study) -> None:
    searched, outcome = space(), study.outcomes[0]
    objectives = ("requests_per_usd", "output_tokens_per_s_per_user")
    kept = frontier(outcome, objectives)
    for evaluation, other in itertools.permutations(kept, 2):
        assert any(
            score(outcome.evaluations[evaluation], name) > score(outcome.evaluations[other], name)
            for name in objectives
        )
    for index in outcome.ranking:
        assert any(
            all(
                score(outcome.evaluations[evaluation], name) >= score(outcome.evaluations[index], name)
                for name in objectives
            )
            for evaluation in kept
        )
    effects = worths(searched, outcome)
    assert effects["tp"]["3"].share == 0
    assert all(max(worth.share for worth in row.values()) == 1 for row in effects.values())
    best = best_by_objective(outcome, OBJECTIVES)
    assert best["requests_per_usd"] in outcome.ranking
    assert outcome.evaluations[best["ttft_p90"]].figures["ttft_p90"] == min(
        outcome.evaluations[index].figures["ttft_p90"] for index in outcome.ranking
    )
    sure = confidence(outcome, "requests_per_usd")
    assert sure is None or 0 <= sure <= 1
    for fleet in fleets(outcome, 100.0, 3):
        load = fmean(evaluation.load for evaluation in outcome.runs(fleet.index))
        assert (fleet.copies - 1) * load < 100 <= fleet.copies * load * (1 + 1e-6)


def test_points_beside_the_finalists_are_in_the_order_of_all_streams() -> None:
    """The second point is good under the first stream alone, and its mean is in the table."""
    scores = {0: [10, 10.1, 9.9], 1: [9, 5, 5], 2: [8, 8, 8], 3: [1, 1, 1]}
    searched = space({"tp": [1, 2], "max_num_seqs": [16, 32]}, finalists=1, finalist_seeds=3)

    class Fake:
        space = searched

        def check_some(self, *_: object) -> None: ...

        def ask(self, _: None, points: Sequence[int], question: Question, *__: object) -> dict[int, Evaluation]:
            known = {index: float(scores[index][question.seed]) for index in points}
            return {
                index: Evaluation(
                    load=load, figures={"requests_per_usd": load, "output_tokens_per_s_per_user": 1.0}, holds=True
                )
                for index, load in known.items()
            }

    assert _search_workload(Fake(), None).ranking == [0, 2, 1, 3]  # type: ignore[arg-type]


def test_of_equal_prices_the_better_point_comes_first() -> None:
    """The mean of three streams is not above the price of each, by which a point of one stream would come first."""
    one, other = (Evaluation(load=load, figures={"usd_per_hour": 2.95, "devices": 1.0}, holds=True) for load in (9, 4))
    outcome = SearchOutcome(None, {0: one, 1: other}, {0: [one] * 3}, [0, 1])
    assert [(fleet.index, fleet.usd_per_hour) for fleet in fleets(outcome, 3.0, 2)] == [(0, 2.95), (1, 2.95)]


def test_what_is_sure_of_a_load_is_counted_by_the_lower_bound() -> None:
    """A point that met one stream has no bound, and is sure of nothing."""
    figures = {"usd_per_hour": 1.0, "devices": 1.0}
    runs = [Evaluation(load=load, figures=figures, holds=True) for load in (9.0, 10.0, 11.0)]
    outcome = SearchOutcome(None, {0: runs[0], 1: runs[2]}, {0: runs}, [0, 1])
    assert [fleet.index for fleet in fleets(outcome, 10.0, 2)] == [0, 1]
    assert [(fleet.index, fleet.copies) for fleet in fleets(outcome, 10.0, 2, is_sure=True)] == [(0, 2)]


@pytest.mark.full
def test_several_workloads_have_a_matrix_of_what_the_others_best_is_worth() -> None:
    short = {**BASE["workload"], "input_tokens": 100, "output_tokens": 300, "num_requests": 100}
    long = {**BASE["workload"], "input_tokens": 3000, "output_tokens": 5, "num_requests": 100}
    two = search(space({"max_num_batched_tokens": [512, 8192]}, workloads={"short": short, "long": long}), quiet())
    matrix = misconfiguration(two, quiet())
    assert [matrix[0][0], matrix[1][1]] == [1.0, 1.0]
    assert all(0 <= share <= 1 for row in matrix for share in row)


@pytest.mark.full
def test_budgets_refuse() -> None:
    outcome = search(space(budget={"devices": 1}), quiet()).outcomes[0]
    assert all(outcome.evaluations[index].refused == "2 devices; the budget is 1" for index in range(6, 12))
    with pytest.raises(InputError, match=r"the budget is \$1\.00"):
        search(space(budget={"usd_per_hour": 1}), quiet())


def test_points_are_counted_with_the_last_name_fastest() -> None:
    asked = space({"tp": [1, 2], "split": {"whole": {}, "two": {"replicas": 2, "pp": 2}}})
    assert [point_at(asked, index).choice for index in range(4)] == [
        {"tp": tp, "split": split} for tp in (1, 2) for split in ("whole", "two")
    ]
    assert point_at(asked, 3) == Point(
        3,
        {"tp": 2, "split": "two"},
        {"deployment.replicas": 2, "deployment.parallelism.pp": 2, "deployment.parallelism.tp": 2},
    )


def test_the_quick_way_to_a_setup_is_the_long_one() -> None:
    """Knobs laid over a family's setup give what resolving the whole scenario gives."""
    from windtunnel.search.space.space import scenario_at
    from windtunnel.serving.scenario import resolve

    asked = space({"engine": ["vllm", "sglang"], "max_num_seqs": [None, 7], "enable_prefix_caching": [None, False]})
    evaluator = Evaluator(asked)
    for index in range(asked.num_points):
        point = point_at(asked, index)
        given = {path: value for path, value in point.settings.items() if value is not None}
        assert evaluator.deployed(point).setup == resolve(scenario_at(asked, given))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({**BASE}, "nothing varies"),
        ({**BASE, "vary": {"tpp": [1]}}, "no path in a scenario"),
        ({**BASE, "vary": {"tp": []}}, "nothing varies|has no values"),
        ({**BASE, "vary": VARY, "objectiv": "x"}, "unknown key \\$.objectiv"),
        ({**BASE, "vary": VARY, "limits": {"ttft_x": 1}}, "there is no limit"),
        ({**BASE, "vary": VARY, "finalists": 0}, "at least 1"),
    ],
)
def test_wrong_spaces_are_named(raw: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        space_from(raw)


def test_wrong_searches_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no objective"):
        search(space(objective="qps"), quiet())
    with pytest.raises(InputError, match=r"every point is refused: .*unknown key \$\.engine\.bogus"):
        search(space({"deployment.engine.bogus": [1]}), store := quiet(tmp_path / "answers.sqlite"))
    assert store.unfinished() is None  # there is nothing to go on with
    with pytest.raises(InputError, match=r"every point is refused: .* 1 more") as caught:
        search(space({"model": ["meta-llama/Llama-3.1-405B", "meta-llama/Llama-3.1-70B"]}), quiet())
    assert "use more devices" in str(caught.value.hint)
    with pytest.raises(InputError, match="there is no file"):
        load_space(tmp_path / "missing.yaml")


def test_a_long_run_that_cannot_hold_its_limits_is_given_up_and_a_given_load_is_not() -> None:
    """Six thousand requests at ten times what one device takes: capacity is the same with and without patience."""
    from windtunnel.metrics.limits import parse_limits
    from windtunnel.search.capacity.load import stream_of
    from windtunnel.search.capacity.probe import probe
    from windtunnel.search.space.space import scenario_at
    from windtunnel.serving.priced_deployments import PricedDeployments

    scenario = scenario_at(space(), {"workload.num_requests": 6000, "workload.arrivals.rate_per_s": 500.0})
    stream, limits = stream_of(scenario.workload, 0), parse_limits("ttft_p90=1s")
    server = PricedDeployments().server(scenario, stream.unit)
    hasty, patient = (probe(server, stream, 500.0, limits, is_patient) for is_patient in (False, True))
    assert hasty.served is None
    assert patient.served is not None
    assert not hasty.passes
    assert not patient.passes
    light = probe(server, stream, 5.0, limits)
    assert light.passes
    assert light.served is not None
    given = Evaluator(space({"tp": [1]}, load="given", workload={**BASE["workload"], "num_requests": 6000}))
    assert given.evaluate(0, None, Question()).holds


def test_a_grid_is_run_at_the_given_loads() -> None:
    grid = grid_of(BASE, ["tp=1,2", "workload.rate=2:6:4"])
    assert grid.vary == {"tp": [1, 2], "workload.rate": [2, 6]}
    with start_workers(grid) as run_chunks:
        outcome = Asker(grid, quiet(), run_chunks).ask(None, range(4), Question())
    assert [round(evaluation.figures["requests_per_s"]) for evaluation in outcome.values()] == [2, 6, 2, 6]
    assert outcome[0].figures["tpot_mean"] > outcome[2].figures["tpot_mean"]
    assert grid_of(BASE, ["rate=1e0:2.5e+0:5e-1"]).vary == {"rate": [1, 1.5, 2, 2.5]}
    for text in ("tp", "tp=", "rate=5:1:1", "rate=1:1e9:1e-3"):
        with pytest.raises(InputError):
            grid_of(BASE, [text])


@pytest.mark.full
def test_a_batch_sent_at_once_is_run_at_the_given_load_and_has_a_makespan() -> None:
    output_tokens = {"type": "uniform", "min_tokens": 20, "max_tokens": 400}
    workload = {"arrivals": {"type": "burst"}, "input_tokens": 64, "output_tokens": output_tokens, "num_requests": 60}
    raw = {**BASE, "workload": workload, "vary": {"replicas": [1, 4]}, "finalist_seeds": 1}
    study = search(space_from({**raw, "load": "given", "objective": "makespan_s"}), quiet())
    outcome = study.outcomes[0]
    assert outcome.ranking == [1, 0]
    for index in outcome.ranking:
        evaluation = outcome.evaluations[index]
        requests = simulate(scenario_of(study, outcome, index)).requests
        assert evaluation.figures["makespan_s"] == pytest.approx(float(requests["e2e_s"].max()))
        assert evaluation.load == pytest.approx(60 / evaluation.figures["makespan_s"])
    with pytest.raises(InputError, match="there is no rate to change"):
        search(space_from(raw), quiet())
