"""`windtunnel lab run` and `lab sweep`: real models, alone or under a profiler."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from windtunnel.cli.options import Verb, all_of, assignments, option
from windtunnel.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from windtunnel.lab.experiments.run import Outcome
    from windtunnel.lab.experiments.schema import Experiment

_WHAT, _OUTPUT = "Experiment", "Result"
PATH = click.Path(path_type=Path)

experiment_options = all_of(
    option("--model", section=_WHAT, metavar="NAME", help="A folder with config.json, or a name on huggingface.co."),
    option("--mode", section=_WHAT, metavar="NAME", help="inference_only, nsys, nsys_ncu or torch.  [inference_only]"),
    option("--engine", section=_WHAT, metavar="NAME", help="transformers or vllm.  [transformers]"),
    option("--prompt", section=_WHAT, metavar="TEXT", help="Of every request."),
    option("--prompt-tokens", section=_WHAT, type=int, metavar="N", help="So many random tokens in its place."),
    option("--max-tokens", section=_WHAT, type=int, metavar="N", help="Generated, by every request.  [100]"),
    option("--temperature", section=_WHAT, type=float, metavar="X", help="0: the likeliest token.  [0.7]"),
    option("--batch-size", section=_WHAT, type=int, metavar="N", help="Requests at once.  [1]"),
    option("--tensor-parallel-size", section=_WHAT, type=int, metavar="N", help="Devices (vllm).  [1]"),
    option("--device", section=_WHAT, metavar="NAME", help="cpu or cuda.  [cuda where there is one]"),
    option("--name", section=_WHAT, metavar="TEXT", help="Of its results.  [the model's]"),
    option("--seed", section=_WHAT, type=int, metavar="N", help="Of weights, prompts and sampling.  [0]"),
    option("--out", section=_OUTPUT, type=PATH, default="results", metavar="FOLDER", help="Of all results.  [results]"),
    option(
        "--set", "settings", section=_OUTPUT, multiple=True, metavar="PATH=VALUE", help="Any other field of the file."
    ),
    option("--json", "as_json", section=_OUTPUT, is_flag=True, help="Print JSON."),
)
experiment_file = click.argument("experiment", required=False, type=PATH, metavar="[EXPERIMENT.yaml]")


class VerbOfVllm(Verb):
    """Options keep vLLM's names here: `--tensor-parallel-size` is a field of experiments."""

    def __init__(self, *names: Any, **settings: Any) -> None:
        super().__init__(*names, **settings)
        self.context_settings = {"token_normalize_func": lambda name: name.replace("_", "-")}


@click.command(cls=VerbOfVllm, short_help="Run a real model, alone or profiled.")
@experiment_file
@experiment_options
@option("--resume", section=_OUTPUT, is_flag=True, help="Take a finished run of the same experiment that is there.")
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
    from windtunnel.report.documents import as_text
    from windtunnel.report.lab.experiment import experiment_report, write_experiment_page
    from windtunnel.report.render.tables import show

    wanted = load_experiment(experiment, _changes(options, settings))
    outcome = run_experiment(wanted, out, resume)
    write_experiment_page(outcome.folder)
    click.echo(f"{'found' if outcome.was_there else 'wrote'} {outcome.folder}", err=True)
    if as_json:
        click.echo(as_text({"folder": str(outcome.folder), **outcome.summary}))
    else:
        show(*experiment_report(outcome.summary))


@click.command(cls=VerbOfVllm, short_help="Run it at many settings; goes on where it stopped.")
@experiment_file
@experiment_options
@option(
    "--parameter-sweep",
    section="Sweep",
    metavar="TEXT",
    help='Fields and values: "batch_size:1,2;max_tokens:50,100".',
)
@option("--preset", section="Sweep", metavar="NAME", help="quick, comprehensive or scaling.")
def sweep(
    experiment: Path | None,
    out: Path,
    settings: tuple[str, ...],
    as_json: bool,
    parameter_sweep: str | None,
    preset: str | None,
    **options: Any,
) -> None:
    """Run an experiment at every combination of some fields' values; again, it goes on where it stopped.

    \b
    windtunnel lab sweep --model path/to/model --parameter-sweep "batch_size:1,2,4;max_tokens:50,100"
    windtunnel lab sweep experiment.yaml --preset quick
    """
    from windtunnel.lab.experiments.run import run_sweep
    from windtunnel.lab.experiments.schema import points
    from windtunnel.report.documents import as_text
    from windtunnel.report.lab.experiment import write_experiment_page
    from windtunnel.report.lab.sweep import sweep_document, sweep_report, write_sweep_page
    from windtunnel.report.render.tables import show

    chosen = _swept(parameter_sweep, preset)
    wanted = points(_raw(experiment, options, settings), chosen, str(experiment or ""))
    rows: list[tuple[Experiment, dict[str, Any]]] = []

    def told(number: int, outcome: "Outcome") -> None:
        what = "found" if outcome.was_there else "done" if outcome.is_done else "failed"
        said = outcome.folder if outcome.is_done else outcome.summary["error"]
        click.echo(f"{number + 1} of {len(wanted)} {what}: {said}", err=True)
        if outcome.is_done:
            write_experiment_page(outcome.folder)
        rows.append((wanted[number], {**outcome.summary, "folder": outcome.folder.name}))

    run_sweep(wanted, out, told)
    page = write_sweep_page(out, tuple(chosen), rows)
    click.echo(f"wrote {page}", err=True)
    if as_json:
        click.echo(as_text(sweep_document(tuple(chosen), rows)))
    else:
        show(*sweep_report(tuple(chosen), rows))
    if not any(summary["status"] == "done" for _, summary in rows):
        raise InputError(f"none of the {len(rows)} experiments ran: {rows[0][1]['error']}", rows[0][1].get("hint"))


def _swept(text: str | None, preset: str | None) -> dict[str, tuple[Any, ...]]:
    from windtunnel.lab.experiments.schema import PRESETS, parse_sweep

    if (text is None) == (preset is None):
        raise InputError(
            "give --parameter-sweep or --preset" + (", not both" if text else ""),
            f'for instance --parameter-sweep "batch_size:1,2,4"; presets: {", ".join(PRESETS)}',
        )
    if text is not None:
        return parse_sweep(text)
    assert preset is not None
    if preset not in PRESETS:
        hint = did_you_mean(preset, PRESETS, f"known: {', '.join(PRESETS)}")
        raise InputError(f"--preset: there is no preset {preset!r}", hint)
    return {field: tuple(values) for field, values in PRESETS[preset].items()}


def _changes(options: dict[str, Any], settings: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None} | assignments(settings)


def _raw(experiment: Path | None, options: dict[str, Any], settings: tuple[str, ...]) -> dict[str, Any]:
    """The experiment's file with the options over it, not decoded yet: the sweep's values come first."""
    from windtunnel.lab.experiments.schema import with_changes
    from windtunnel.schema import read_yaml

    raw = read_yaml(experiment) if experiment is not None else {}
    if not isinstance(raw, dict):
        raise InputError(f"{experiment} is not an experiment: keys and values are needed", "model: path/to/model")
    return with_changes(raw, _changes(options, settings))
