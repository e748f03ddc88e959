"""A run's folder of files: all of them or none."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from windtunnel.errors import InputError
from windtunnel.files import check_writable_folder, new_files
from windtunnel.report.render.json import as_text
from windtunnel.report.serving.run import run_document
from windtunnel.serving.over_time import over_time
from windtunnel.serving.scenario import save

if TYPE_CHECKING:
    from windtunnel.serving.results import Result


def check_folder(folder: Path, overwrite: bool) -> None:
    """Raise InputError where no run can be written to `folder`: a file, not empty and no `overwrite`, or forbidden."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file; a run is written to a folder", "choose another name")
    check_writable_folder(folder, folder)
    if not overwrite and folder.is_dir() and any(folder.iterdir()):
        raise InputError(f"{folder} is not empty", "choose another folder, or replace a former run with --overwrite")


def write_run(result: Result, folder: Path) -> None:
    """Write the records, the summary and the resolved scenario of a run to `folder`, making it where it is missing.

    A fleet that changes adds the phases of its replicas, and which request was where.

    Raises:
        InputError: the folder cannot be written to.
    """
    with new_files(folder) as draft:
        result.requests.write_parquet(draft / "requests.parquet")
        result.steps.write_parquet(draft / "steps.parquet")
        over_time(result).write_parquet(draft / "series.parquet")
        (draft / "summary.json").write_text(as_text(run_document(result)) + "\n", encoding="utf-8")
        save(result.scenario, draft / "scenario.yaml")
        if result.fleet is not None:
            result.fleet.phases.write_parquet(draft / "replicas.parquet")
            result.fleet.stays.write_parquet(draft / "stays.parquet")
