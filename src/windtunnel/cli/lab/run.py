"""`windtunnel lab run` and `lab sweep`: real models, alone or under a profiler."""

from typing import Any

from windtunnel.cli.options import assignments
from windtunnel.cli.output import answer, remark
from windtunnel.cli.verbs import Options
from windtunnel.errors import InputError, check_known
from windtunnel.files import write_text
from windtunnel.lab.experiments.run import run_experiment, run_sweep
from windtunnel.lab.experiments.schema import PRESETS, Experiment, load_experiment, load_sweep, parse_sweep
from windtunnel.report.lab import experiment as report
from windtunnel.report.render.html import page


def run(options: Options) -> None:
    """Run a real model and record it."""
    outcome = run_experiment(load_experiment(options.experiment, _changes(options)), options.out, options.resume)
    report.write_experiment_page(outcome.folder)
    remark(f"{'found' if outcome.was_there else 'wrote'} {outcome.folder}")
    folder = {"folder": str(outcome.folder)}
    answer(options, lambda summary: folder | summary, report.experiment_report, outcome.summary)


def sweep(options: Options) -> None:
    """Run an experiment at every combination of some fields' values."""
    chosen = _swept(options.parameter_sweep, options.preset)
    experiments = load_sweep(options.experiment, _changes(options), chosen)
    rows: list[tuple[Experiment, dict[str, Any]]] = []
    for number, outcome in enumerate(run_sweep(experiments, options.out)):
        status = "found" if outcome.was_there else "done" if outcome.is_done else "failed"
        detail = outcome.folder if outcome.is_done else outcome.summary["error"]
        remark(f"{number + 1} of {len(experiments)} {status}: {detail}")
        if outcome.is_done:
            report.write_experiment_page(outcome.folder)
        rows.append((experiments[number], {**outcome.summary, "folder": outcome.folder.name}))
    target = options.out / report.SWEEP_PAGE
    write_text(target, page(report.sweep_report(tuple(chosen), rows)))
    remark(f"wrote {target}")
    answer(options, report.sweep_document, report.sweep_report, tuple(chosen), rows)
    if not any(summary["status"] == "done" for _, summary in rows):
        raise InputError(f"none of the {len(rows)} experiments ran: {rows[0][1]['error']}", rows[0][1].get("hint"))


def _swept(text: str | None, preset: str | None) -> dict[str, tuple[Any, ...]]:
    if (text is None) == (preset is None):
        raise InputError(
            "give --parameter-sweep or --preset" + (", not both" if text else ""),
            f'for instance --parameter-sweep "batch_size:1,2,4"; presets: {", ".join(PRESETS)}',
        )
    if preset is None:
        return parse_sweep(text or "")
    check_known(preset, PRESETS, f"--preset: there is no preset {preset!r}")
    return dict(PRESETS[preset])


def _changes(options: Options) -> dict[str, Any]:
    return options.given("experiment") | assignments(options.settings)
