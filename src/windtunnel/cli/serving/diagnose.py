"""`windtunnel diagnose`: why a server is slow."""

from windtunnel.cli.options import launched, scenario_of
from windtunnel.cli.output import answer, write_page
from windtunnel.cli.progress import counted
from windtunnel.cli.verbs import Options
from windtunnel.errors import InputError
from windtunnel.production.observed import read_requests


def command(options: Options) -> None:
    """Compare recorded requests with their simulation, and name the causes of the difference."""
    recorded = read_requests(options.requests)
    before = None if options.before is None else read_requests(options.before)
    launch = launched(options)
    if options.scenario is None:
        _name_load(options, launch.raw)
    scenario = scenario_of(options, base=launch.raw)

    # Loading the engine takes most of a second; wrong input is answered before.
    from windtunnel.production.diagnose import diagnose
    from windtunnel.report.diagnosis import diagnosis_document, diagnosis_report

    with counted("trying", "causes") as progress:
        diagnosis = diagnose(scenario, recorded, before, progress)
    write_page(options.html, diagnosis_report, diagnosis, launch=launch)
    answer(options.as_json, diagnosis_document, diagnosis_report, diagnosis, launch=launch)


def _name_load(options: Options, server: dict[str, object]) -> None:
    """Give a scenario without a file the load that it needs: the recorded requests replace it."""
    if options.model is None and "model" not in server:
        raise InputError("what served the requests is not known: --model is missing", "or give --from-command")
    options.rate, options.input_tokens, options.output_tokens = 1.0, "1", "1"
