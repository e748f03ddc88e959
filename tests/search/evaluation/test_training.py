"""Searches over training jobs: every layout by the same store, executors and strategies as deployments."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from spaces_of_search import quiet
from windtunnel.catalog import model as model_of
from windtunnel.errors import InputError
from windtunnel.formats.megatron.read import read_megatron_arguments
from windtunnel.report.render.terminal import show
from windtunnel.report.search.study import SearchEvidence, search_report
from windtunnel.report.search.study_files import study_document, write_study
from windtunnel.search.answers import frontier, job_of, why, worths
from windtunnel.search.evaluation.training import TrainingEvaluator
from windtunnel.search.executors import Means
from windtunnel.search.space.space import Space, as_builtins, space_from
from windtunnel.search.study import Study, search
from windtunnel.training import job as training
from windtunnel.training.setup import resolve
from windtunnel.training.step import simulate_training, simulate_with, training_prices

JOB: dict[str, Any] = {
    "model": "llama-3.1-8b",
    "device": "h100_sxm",
    "num_devices": 8,
    "sequence_tokens": 4096,
    "global_batch": 16,
}
VARY = {"tp": [1, 2, 4], "pp": [1, 2], "vpp": [1, 2], "micro_batch": [1, 2], "recompute": ["none", "full"]}


def jobs(vary: dict[str, Any] | None = None, **changed: Any) -> Space:
    return space_from({**JOB, "vary": vary or VARY, **changed})


@pytest.fixture(scope="module")
def study() -> Study:
    return search(jobs(), quiet())


@pytest.mark.full
def test_a_points_figures_are_those_of_the_job_simulated_alone(study: Study) -> None:
    outcome = study.outcomes[0]
    for index in (*outcome.ranking[:2], outcome.ranking[-1]):
        figures, alone = outcome.evaluations[index].figures, simulate_training(job_of(study, index))
        assert figures["step_s"] == alone.step_s
        assert figures["memory_bytes"] == alone.worst_memory.needed_bytes
        assert figures["mfu"] == alone.mfu
        assert figures["tokens_per_usd"] == pytest.approx(alone.tokens_per_s * 3600 / figures["usd_per_hour"])
        assert alone.fits


@pytest.mark.full
def test_points_of_other_models_share_no_layers() -> None:
    """Both models have the same widths, and layers of other operators."""
    outcome = search(jobs({"model": ["llama-3.1-8b", "qwen3-8b"]}), quiet()).outcomes[0]
    alone = [simulate_training(training.load({**JOB, "model": name})) for name in ("llama-3.1-8b", "qwen3-8b")]
    assert [outcome.evaluations[index].figures["step_s"] for index in (0, 1)] == [job.step_s for job in alone]


@pytest.mark.full
@pytest.mark.parametrize(
    ("framework", "stages"), [("megatron", [1, 0]), ("deepspeed", [3, 0, 1, 2]), ("fsdp2", [3, 0, 2])]
)
def test_layouts_vary_the_stages_of_zero_that_the_framework_has(framework: Any, stages: list[int]) -> None:
    """Points share what their layers do; each is still the same as its job alone."""
    space = jobs({"layouts": "all", "micro_batch": [1], "recompute": ["full"], "pp": [1, 2]}, framework=framework)
    assert space.vary["zero"] == stages
    found = search(space, quiet())
    for index, answer in found.outcomes[0].evaluations.items():
        if not answer.refused and index % 3 == 0:
            alone = simulate_training(job_of(found, index))
            assert answer.figures["step_s"] == alone.step_s
            assert answer.figures["memory_bytes"] == alone.worst_memory.needed_bytes
    with_pipelines = {
        found.point(index).choice["zero"] for index in found.outcomes[0].ranking if found.point(index).choice["pp"] == 2
    }
    assert with_pipelines <= ({0, 1} if framework == "deepspeed" else set(stages))


@pytest.mark.full
def test_what_a_job_says_of_zero_leaves_the_other_stages_open() -> None:
    said = {"precision": {"parameter_gather": "fp8"}, "overlap": {"parameter_gather": True}, "sharding": {"zero": 1}}
    vary = {"layouts": "all", "tp": [2], "pp": [1], "cp": [1], "micro_batch": [1], "recompute": ["full"]}
    found = search(jobs(vary, **said), quiet())
    assert {found.point(index).choice["zero"] for index in found.outcomes[0].ranking} == {0, 1}
    for index in found.outcomes[0].ranking:
        assert simulate_training(job_of(found, index)).step_s == found.outcomes[0].evaluations[index].figures["step_s"]


def test_a_pipeline_of_deepspeed_shards_no_gradients() -> None:
    job = training.load({**JOB, "framework": "deepspeed"}, {"parallelism.pp": 2})
    with pytest.raises(InputError, match="no pipeline with ZeRO-3: pp = 2"):
        resolve(job)


@pytest.mark.full
def test_the_ranking_is_every_layout_that_fits_the_fastest_first(study: Study) -> None:
    """The oracle: every combination of the degrees, each simulated on its own."""
    outcome, steps = study.outcomes[0], {}
    prices = training_prices(resolve(training.decode(JOB, training.TrainingJob)))
    for index, values in enumerate(itertools.product(*VARY.values())):
        raw = dict(zip(VARY, values, strict=True))
        settings = {"tp": raw["tp"], "pp": raw["pp"], "virtual_stages": raw["vpp"]}
        changed = {"parallelism": settings, "recompute": {"granularity": raw["recompute"]}}
        try:
            job = training.decode(JOB | changed | {"micro_batch": raw["micro_batch"]}, training.TrainingJob)
            result = simulate_with(resolve(job), prices)
        except InputError:
            assert outcome.evaluations[index].refused
            continue
        if raw["vpp"] > 1 and raw["pp"] == 1:
            assert "virtual stages need a pipeline" in outcome.evaluations[index].refused
        elif result.fits:
            steps[index] = result.step_s
        else:
            assert outcome.evaluations[index].limited_by == "memory"
    assert outcome.ranking == sorted(steps, key=lambda index: (steps[index], index))
    assert max(worth.share for worth in worths(study.space, outcome)["tp"].values()) == 1


@pytest.mark.full
@pytest.mark.parametrize("executor", ["threads", pytest.param("processes", marks=pytest.mark.slow)])
def test_where_it_runs_makes_no_difference(study: Study, executor: Any) -> None:
    elsewhere = search(jobs(), quiet(), Means(executor, 2))
    assert elsewhere.outcomes[0].evaluations == study.outcomes[0].evaluations
    assert elsewhere.outcomes[0].ranking == study.outcomes[0].ranking


@pytest.mark.full
def test_an_interrupted_search_goes_on_and_nothing_is_run_twice(study: Study, tmp_path: Path) -> None:
    def interrupt(*_: int) -> None:
        raise KeyboardInterrupt

    path, wide = tmp_path / "kept.sqlite", jobs({**VARY, "zero": [0, 1]})
    search(jobs(), quiet(path))
    with pytest.raises(KeyboardInterrupt):
        search(wide, quiet(path), Means(progress=interrupt))
    store = quiet(path)
    assert store.unfinished() is not None
    resumed = search(wide, store)
    # ZeRO 1 is the framework's default: those answers are the narrow space's.
    assert resumed.count.num_known >= 36
    again = search(wide, quiet(path))
    assert again.count.num_runs == 0
    assert again.outcomes[0].ranking == resumed.outcomes[0].ranking
    fastest = min(
        evaluation.figures["step_s"] for evaluation in study.outcomes[0].evaluations.values() if evaluation.holds
    )
    assert (
        min(evaluation.figures["step_s"] for evaluation in again.outcomes[0].evaluations.values() if evaluation.holds)
        <= fastest
    )


def test_every_layout_of_a_model_with_experts() -> None:
    asked = space_from(
        {**JOB, "model": "mixtral-8x7b", "sequence_tokens": 8192, "vary": {"layouts": "all", "micro_batch": [1]}}
    )
    assert asked.vary["ep"] == [1, 2, 4, 8]
    assert asked.vary["cp"] == [1, 2, 4, 8]
    assert asked.vary["micro_batch"] == [1]
    assert list(asked.vary["recompute"]) == ["none", "selective", "full"]
    assert space_from(as_builtins(asked)) == asked
    long = jobs({"layouts": "all"}, num_devices=256, sequence_tokens=1 << 18)
    assert long.vary["cp"] == [1, 2, 4, 8, 16, 32]  # parts of 8,192 tokens
    dense = jobs({"layouts": "all"}, parallelism={"dp": 4, "tp": 2})
    assert "ep" not in dense.vary
    assert dense.job["parallelism"] == {"tp": 2, "cp": 1, "ep": 1}


@pytest.mark.parametrize(
    ("pp", "vpp", "stages"),
    [
        (16, 1, (7, *[8] * 14, 7)),
        (4, 1, (31, 32, 32, 31)),
        (16, 8, (0, *[1] * 126, 0)),
        (16, 9, None),
        (8, 4, (3, *[4] * 30, 3)),
    ],
)
def test_layers_that_do_not_split_evenly_are_taken_from_both_ends(
    pp: int, vpp: int, stages: tuple[int, ...] | None
) -> None:
    """Llama 3 405B's 126 layers: arXiv:2407.21783, section 3.3.2 removes one from the first and the last stage."""
    from windtunnel.training.setup import with_uneven_stages

    split = {"pp": pp, "virtual_stages": vpp}
    job = training.decode({**JOB, "model": "llama-3.1-405b", "parallelism": split}, training.TrainingJob)
    split = with_uneven_stages(job, model_of("llama-3.1-405b")).parallelism.layers_per_stage
    assert split == stages
    assert split is None or sum(split) == 126


@pytest.mark.full
def test_limits_budgets_and_more_devices() -> None:
    space = jobs({"num_devices": [8, 16], "tp": [1, 2]}, total_tokens=1e10, budget={"devices": 8})
    outcome = search(space, quiet()).outcomes[0]
    assert [outcome.evaluations[index].refused for index in (2, 3)] == ["16 devices; the budget is 8"] * 2
    run_s = {index: outcome.evaluations[index].figures["run_s"] for index in (0, 1)}
    between = sum(run_s.values()) / 2
    limited = search(jobs(space.vary, total_tokens=1e10, limits={"run": f"{between} s"}, objective="run_usd"), quiet())
    slower = max(run_s, key=lambda index: run_s[index])
    assert limited.outcomes[0].evaluations[slower].limited_by == "run"
    assert slower not in limited.outcomes[0].ranking
    assert len(frontier(limited.outcomes[0], ("tokens_per_s_per_device", "step_s"))) >= 1


@pytest.mark.full
def test_fewer_points_find_the_best(study: Study) -> None:
    pytest.importorskip("optuna")
    best = study.outcomes[0].evaluations[study.outcomes[0].ranking[0]].figures["step_s"]
    tried = search(jobs(strategy="tpe"), quiet()).outcomes[0]
    assert tried.evaluations[tried.ranking[0]].figures["step_s"] <= 1.01 * best
    with pytest.raises(InputError, match="halving needs them"):
        search(jobs(strategy="halving"), quiet())


def test_the_content_of_a_topology_is_part_of_the_key(tmp_path: Path) -> None:
    file = tmp_path / "net.yaml"

    def key() -> str:
        return TrainingEvaluator(jobs(network={"topology": str(file)})).key(0)

    file.write_text("{type: node, node: dgx_h100, num_servers: 1}")
    first = key()
    assert key() == first
    file.write_text("{type: node, node: dgx_h100, num_servers: 2}")
    assert key() != first


@pytest.mark.full
def test_the_winner_is_written_as_something_to_run(study: Study, tmp_path: Path, capsys: Any) -> None:
    outcome = study.outcomes[0]
    report = SearchEvidence(study, 3, [why(study, outcome, outcome.ranking[:2])], [], [])
    write_study(report, tmp_path / "found")
    best = outcome.evaluations[outcome.ranking[0]].figures
    assert simulate_training(training.load(tmp_path / "found" / "job.yaml")).step_s == best["step_s"]
    read = read_megatron_arguments((tmp_path / "found" / "launch.sh").read_text(), "h100_sxm")
    assert simulate_training(read.job).step_s == best["step_s"]
    page = (tmp_path / "found" / "search.html").read_text()
    points = json.loads(re.findall(r'application/json">(.*?)</script>', page)[0])
    assert points["choices"][0][:2] == [str(value) for value in study.point(outcome.ranking[0]).choice.values()][:2]
    assert points["values"][0][points["figures"].index("step")] == pytest.approx(best["step_s"], rel=1e-4)
    document = json.loads((tmp_path / "found" / "search.json").read_text())
    assert document["workloads"][0]["points"][0]["figures"]["step_s"] == best["step_s"]
    show(search_report(report))
    shown = capsys.readouterr().out
    assert "do not fit the devices' memory" in shown
    assert "a step goes to" in shown
    assert study_document(report)["workloads"][0]["ranking"] == outcome.ranking[:3]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"vary": {"layouts": "some"}}, "it is all"),
        ({"vary": {"max_num_seqs": [1]}}, "no path in a training job"),
        ({"workloads": {"a": {}}}, "is for deployments"),
        ({"vary": {"layouts": "all"}, "num_devices": None}, "needs num_devices"),
        ({"deployment": {"device": "h100_sxm"}}, "unknown key \\$.deployment"),
        ({"limits": {"ttft_p90": "1s"}}, "there is no limit 'ttft_p90' of a training job"),
        ({"limits": {"step": "-1s"}}, "more than 0"),
        ({"objective": "requests_per_usd"}, "there is no objective"),
        ({"limits": {"run": "30d"}}, "a limit on the run needs total_tokens"),
    ],
)
def test_wrong_spaces_are_named(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        search(space_from({**JOB, "vary": {"tp": [1]}, **changed}), quiet())
