"""`windtunnel lab run` and `lab sweep`: real models, alone or under a profiler."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from windtunnel.cli.options import PATH, Verb, assignments, options_in
from windtunnel.cli.output import answer, remark
from windtunnel.errors import InputError, check_known

if TYPE_CHECKING:
    from windtunnel.lab.experiments.schema import Experiment


experiment_file = click.argument("experiment", required=False, type=PATH, metavar="[EXPERIMENT.yaml]")


class VerbOfVllm(Verb):
    """Options keep vLLM's names here: `--tensor-parallel-size` is a field of experiments."""

    def __init__(self, *names: Any, **settings: Any) -> None:
        super().__init__(*names, **settings)
        self.context_settings = {"token_normalize_func": lambda name: name.replace("_", "-")}


@click.command(cls=VerbOfVllm, short_help="Run a real model, alone or profiled.")
@experiment_file
@options_in("experiment", "lab_run")
def run(
    experiment: Path | None, out: Path, settings: tuple[str, ...], as_json: bool, resume: bool, **options: Any
) -> None:
    """Run a real model and record it: times, tokens, and under a profiler its kernels.

    The results, with a page for the browser, go to a folder of their own below --out.

    \b
    windtunnel lab run --model path/to/model --prompt-tokens 128 --batch-size 4
    windtunnel lab run experiment.yaml --mode torch
    """
    from windtunnel.lab.experiments.run import run_experiment
    from windtunnel.lab.experiments.schema import load_experiment
    from windtunnel.report.lab.experiment import experiment_report, write_experiment_page

    described = load_experiment(experiment, _changes(options, settings))
    outcome = run_experiment(described, out, resume)
    write_experiment_page(outcome.folder)
    remark(f"{'found' if outcome.was_there else 'wrote'} {outcome.folder}")
    folder = {"folder": str(outcome.folder)}
    answer(as_json, lambda summary: folder | summary, experiment_report, outcome.summary)


@click.command(cls=VerbOfVllm, short_help="Run a model at many settings; continue where it stopped.")
@experiment_file
@options_in("experiment", "lab_sweep")
def sweep(
    experiment: Path | None,
    out: Path,
    settings: tuple[str, ...],
    as_json: bool,
    parameter_sweep: str | None,
    preset: str | None,
    **options: Any,
) -> None:
    """Run an experiment at every combination of some fields' values; a second call goes on where the first stopped.

    \b
    windtunnel lab sweep --model path/to/model --parameter-sweep "batch_size:1,2,4;max_tokens:50,100"
    windtunnel lab sweep experiment.yaml --preset quick
    """
    from windtunnel.lab.experiments.run import run_sweep
    from windtunnel.lab.experiments.schema import load_sweep
    from windtunnel.report.lab.experiment import write_experiment_page
    from windtunnel.report.lab.sweep import sweep_document, sweep_report, write_sweep_page

    chosen = _swept(parameter_sweep, preset)
    experiments = load_sweep(experiment, _changes(options, settings), chosen)
    rows: list[tuple[Experiment, dict[str, Any]]] = []
    for number, outcome in enumerate(run_sweep(experiments, out)):
        status = "found" if outcome.was_there else "done" if outcome.is_done else "failed"
        detail = outcome.folder if outcome.is_done else outcome.summary["error"]
        remark(f"{number + 1} of {len(experiments)} {status}: {detail}")
        if outcome.is_done:
            write_experiment_page(outcome.folder)
        rows.append((experiments[number], {**outcome.summary, "folder": outcome.folder.name}))
    page = write_sweep_page(out, tuple(chosen), rows)
    remark(f"wrote {page}")
    answer(as_json, sweep_document, sweep_report, tuple(chosen), rows)
    if not any(summary["status"] == "done" for _, summary in rows):
        raise InputError(f"none of the {len(rows)} experiments ran: {rows[0][1]['error']}", rows[0][1].get("hint"))


def _swept(text: str | None, preset: str | None) -> dict[str, tuple[Any, ...]]:
    from windtunnel.lab.experiments.schema import PRESETS, parse_sweep

    if (text is None) == (preset is None):
        raise InputError(
            "give --parameter-sweep or --preset" + (", not both" if text else ""),
            f'for instance --parameter-sweep "batch_size:1,2,4"; presets: {", ".join(PRESETS)}',
        )
    if preset is None:
        return parse_sweep(text or "")
    check_known(preset, PRESETS, f"--preset: there is no preset {preset!r}")
    return dict(PRESETS[preset])


def _changes(options: dict[str, Any], settings: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None} | assignments(settings)
