"""The document and the folder of files of a search."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from windtunnel.files import new_files
from windtunnel.formats.launch.scripts import helm_chart, kubernetes_manifests, launch_script
from windtunnel.formats.megatron.write import megatron_script
from windtunnel.report.render.html import page
from windtunnel.report.render.json import version
from windtunnel.report.search import study as report
from windtunnel.report.search.figures import burst_document, engine_versions, names_of_frontier
from windtunnel.report.search.study import SearchEvidence, Why, search_report
from windtunnel.schema import encode, fields_of, json_text, save
from windtunnel.search import answers
from windtunnel.search.scores import objectives_of
from windtunnel.search.space.space import as_builtins
from windtunnel.search.study import SearchOutcome, Study
from windtunnel.serving.engines.command_line import Unmodelled
from windtunnel.serving.scenario import Scenario
from windtunnel.training.job import TrainingJob
from windtunnel.training.setup import resolve as resolve_job


def study_document(evidence: SearchEvidence) -> dict[str, Any]:
    """Document a study: the space, the ranking, and what follows from it."""
    study = evidence.study
    whys: list[Why] = evidence.why or [[] for _ in study.outcomes]
    return {
        "windtunnel": version(),
        "space": as_builtins(study.space),
        "workloads": [
            {
                "workload": outcome.workload,
                "ranking": outcome.ranking[: evidence.top],
                "confidence_beats_next": [
                    answers.confidence(outcome, study.space.objective, rank)
                    for rank in range(min(outcome.num_finalists, evidence.top))
                ],
                "points": [point_document(study, outcome, index) for index in outcome.ranking[: evidence.top]],
                "best_by_objective": answers.best_by_objective(outcome, objectives_of(study.space)),
                "frontier": answers.frontier(outcome, names_of_frontier(study, outcome)),
                "sensitivity": {
                    name: {value: msgspec.to_builtins(worth) for value, worth in by_value.items()}
                    for name, by_value in answers.worths(study.space, outcome).items()
                },
                "bound_by": {str(index): report.bound_text(result) for index, result in why},
                "refusals": {reason: len(points) for reason, points in outcome.refusals.items()},
                "fleets": [msgspec.to_builtins(fleet) for fleet in (evidence.fleets[place] if evidence.fleets else [])],
            }
            for place, (outcome, why) in enumerate(zip(study.outcomes, whys, strict=True))
        ],
        **({"recommendation": report.recommendation_text(evidence)} if evidence.recommends else {}),
        **({"prices": [price.text for price in evidence.prices]} if evidence.prices else {}),
        "misconfiguration": evidence.misconfiguration,
        **fields_of(study.count, "num_runs", "num_requests"),
        **evidence.launch.document,
    }


def point_document(study: Study, outcome: SearchOutcome, index: int) -> dict[str, Any]:
    """Document one point's answer."""
    loads = [run.load for run in outcome.runs(index)]
    return {
        "index": index,
        "choice": study.point(index).choice,
        "loads": loads,
        "load_at_least": outcome.at_least(index),
        "burst": burst_document(outcome.burst(index)),
        **encode(outcome.evaluations[index]),
    }


def write_study(evidence: SearchEvidence, folder: Path) -> None:
    """Write a study to `folder`: every point as Parquet, the document, the page, and each workload's winner to run.
    InputError where the folder cannot be written to."""
    import pyarrow.parquet as pq

    study = evidence.study
    with new_files(folder) as draft:
        pq.write_table(evidence.to_arrow(), draft / "points.parquet")
        (draft / "search.json").write_text(json_text(study_document(evidence)) + "\n", encoding="utf-8")
        (draft / "search.html").write_text(page(search_report(evidence)), encoding="utf-8")
        for place, outcome in enumerate(study.outcomes):
            match evidence.winner(place):
                case TrainingJob() as job:
                    save(job, draft / "job.yaml")
                    if job.framework == "megatron":
                        (draft / "launch.sh").write_text(megatron_script(resolve_job(job)), encoding="utf-8")
                case Scenario() as scenario:
                    _write_winner(scenario, evidence.launch.others, draft, outcome.workload)


def _write_winner(scenario: Scenario, others: Mapping[str, Unmodelled], folder: Path, workload: str | None) -> None:
    prefix = "" if workload is None else f"{workload}-"
    versions = engine_versions(scenario)
    save(scenario, folder / f"{prefix}scenario.yaml")
    (folder / f"{prefix}launch.sh").write_text(launch_script(scenario, versions, others), encoding="utf-8")
    (folder / f"{prefix}kubernetes.yaml").write_text(kubernetes_manifests(scenario, versions, others), encoding="utf-8")
    for path, text in helm_chart(scenario, versions, others).items():
        file = folder / f"{prefix}chart" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
