"""`windtunnel compare`: results of serving runs, or scenarios, side by side."""

from pathlib import Path

from windtunnel.cli.output import answer, counted
from windtunnel.cli.verbs import Options
from windtunnel.errors import InputError
from windtunnel.report.comparison import ComparedRun, check_runs, comparison_document, comparison_report, read_run
from windtunnel.report.results import entry_of

SCENARIOS = (".yaml", ".yml")


def command(options: Options) -> None:
    """Read or simulate what is to be compared, and print it side by side."""
    if len(options.results) < 2:
        raise InputError("there is nothing to compare", "name two results or scenarios: windtunnel compare A B")
    runs = [_run(path, options.hub) for path in options.results]
    check_runs(runs)
    answer(options, comparison_document, comparison_report, runs)


def _run(path: Path, hub: bool) -> ComparedRun:
    """Return a run as it was written, or the simulation of a scenario."""
    if not path.exists():
        raise InputError(f"there is no {path}", "give a folder of --out, a file with --json output, or a scenario")
    if path.suffix not in SCENARIOS:
        return read_run(path)
    # Loading the engine takes most of a second; results that exist need none.
    from windtunnel.report.serving.run import run_document
    from windtunnel.serving.scenario import load
    from windtunnel.serving.simulate import simulate

    with counted(f"simulating {path.name}", "requests") as callback:
        result = simulate(load(path), progress=callback, allow_download=hub)
    document = run_document(result)
    return ComparedRun(entry_of(document, str(path)), document, result.requests)
