"""Diffusion jobs behind `windtunnel simulate` and `windtunnel search`: files with `kind: diffusion`."""

from pathlib import Path
from typing import Any

from windtunnel.cli.options import assignments
from windtunnel.cli.output import answer
from windtunnel.cli.verbs import Options
from windtunnel.errors import InputError
from windtunnel.schema import set_path
from windtunnel.serving.scenario import read_raw

KIND = "diffusion"
OPTIONS = {"top"}
"""Options of groups for served models that a diffusion job has too."""


def diffusion_file(path: Path | None) -> dict[str, Any] | None:
    """Return the keys of a file that describes a diffusion job; None for another file, or none."""
    try:
        raw = {} if path is None else read_raw(path)
    except InputError:
        return None  # the readers of scenarios and spaces say what is wrong
    kind = raw.get("kind", KIND)
    if kind != KIND and "apiVersion" not in raw:
        raise InputError(f"{path}: kind is {kind!r}", f"kind: {KIND}, or no kind for a served model or a training job")
    return raw if "kind" in raw and kind == KIND else None


def simulate_file(options: Options, raw: dict[str, Any], *groups: str) -> None:
    """Predict the job of a file and print it; `groups` of options are those of served models."""
    from windtunnel.diffusion.job import job_from, resolve
    from windtunnel.diffusion.simulate import simulate_diffusion
    from windtunnel.report.diffusion.batch import diffusion_document, diffusion_report

    _lay_over(options, raw, *groups)
    if "vary" in raw:
        raise InputError(f"{options.scenario} has a vary section", "give it to windtunnel search")
    result = simulate_diffusion(resolve(job_from(raw, str(options.scenario))))
    answer(options, diffusion_document, diffusion_report, result)


def search_file(options: Options, raw: dict[str, Any]) -> None:
    """Try the combinations of a file's `vary` section and print them."""
    from windtunnel.diffusion.search import search_diffusion
    from windtunnel.report.diffusion.batch import points_document, points_report

    _lay_over(options, raw, "search", "server_command", "search_means", "search_resume", "search_files")
    points = search_diffusion(raw, str(options.space))
    answer(options, points_document, points_report, points, options.top)


def _lay_over(options: Options, raw: dict[str, Any], *groups: str) -> None:
    """Set the values of `--set`; refuse options of served models."""
    given = [name for name, value in options.of(*groups).items() if value and name not in OPTIONS]
    if given:
        raise InputError(
            f"--{given[0].replace('_', '-')} is for served models; this file describes a diffusion job",
            "set keys of the job with --set, such as --set batch=4",
        )
    for path, value in assignments(options.settings or ()).items():
        set_path(raw, path, value)
