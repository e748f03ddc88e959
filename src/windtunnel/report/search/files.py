"""A search as a folder of files: every point, the document, the page, and each workload's winner to run."""

from pathlib import Path
from typing import Any

import numpy as np

from windtunnel.files import new_files
from windtunnel.formats.launch.scripts import helm_chart, kubernetes_manifests, launch_script
from windtunnel.formats.megatron.write import megatron_script
from windtunnel.report.render.html import page
from windtunnel.report.render.json import as_text
from windtunnel.report.search.study import SearchEvidence, engine_versions, search_report, study_document
from windtunnel.search.answers import job_of, scenario_of
from windtunnel.search.scores import label_of
from windtunnel.search.study import Study
from windtunnel.serving.scenario import Scenario, save
from windtunnel.training.job import TrainingJob
from windtunnel.training.job import save as save_job
from windtunnel.training.setup import resolve as resolve_job


def write_study(evidence: SearchEvidence, folder: Path) -> None:
    """Write a study to `folder`: every point as Parquet, the document, the page, and each workload's winner to run.

    Raises:
        InputError: the folder cannot be written to.
    """
    study = evidence.study
    with new_files(folder) as draft:
        _write_points(study, draft / "points.parquet")
        (draft / "search.json").write_text(as_text(study_document(evidence)) + "\n", encoding="utf-8")
        (draft / "search.html").write_text(page(search_report(evidence)), encoding="utf-8")
        for outcome in study.outcomes:
            if outcome.ranking and study.space.is_training:
                _write_job(job_of(study, outcome.ranking[0]), draft)
            elif outcome.ranking:
                _write_winner(scenario_of(study, outcome, outcome.ranking[0]), draft, outcome.workload)


def _write_winner(scenario: Scenario, folder: Path, workload: str | None) -> None:
    prefix = "" if workload is None else f"{workload}-"
    versions = engine_versions(scenario)
    save(scenario, folder / f"{prefix}scenario.yaml")
    (folder / f"{prefix}launch.sh").write_text(launch_script(scenario, versions), encoding="utf-8")
    (folder / f"{prefix}kubernetes.yaml").write_text(kubernetes_manifests(scenario, versions), encoding="utf-8")
    for path, text in helm_chart(scenario, versions).items():
        file = folder / f"{prefix}chart" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")


def _write_job(job: TrainingJob, folder: Path) -> None:
    save_job(job, folder / "job.yaml")
    if job.framework == "megatron":
        (folder / "launch.sh").write_text(megatron_script(resolve_job(job)), encoding="utf-8")


def _write_points(study: Study, path: Path) -> None:
    """Write one row per point and workload: its choice, its answer, its figures."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    answers = [
        (outcome, index, evaluation) for outcome in study.outcomes for index, evaluation in outcome.evaluations.items()
    ]
    columns: dict[str, Any] = {
        "workload": [outcome.workload for outcome, _, _ in answers],
        "point": [index for _, index, _ in answers],
    }
    choices = [study.point(index).choice for _, index, _ in answers]
    for name in study.space.vary:
        columns[f"vary.{name}"] = [label_of(choice[name]) for choice in choices]
    for field in ("holds", "load", "limited_by", "refused", "num_runs", "num_requests"):
        columns[field] = [getattr(evaluation, field) for _, _, evaluation in answers]
    for name in sorted({name for _, _, evaluation in answers for name in evaluation.figures}):
        columns[name] = np.array([evaluation.figures.get(name, np.nan) for _, _, evaluation in answers])
    pq.write_table(pa.table(columns), path)
