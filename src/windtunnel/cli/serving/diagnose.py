"""`windtunnel diagnose`: why a server is slow."""

from contextlib import suppress
from pathlib import Path

from windtunnel.calibration.steps.read import RUNS
from windtunnel.cli.options import launched, scenario_of
from windtunnel.cli.output import answer, counted, remark
from windtunnel.cli.verbs import Options
from windtunnel.errors import InputError
from windtunnel.formats.recognise import find_format
from windtunnel.production.observed import is_detailed, is_request_table, json_telemetry, read_requests
from windtunnel.units import format_count


def command(options: Options) -> None:
    """Compare recorded requests with their simulation, and name the causes of the difference."""
    if str(options.requests).startswith(("http:/", "https:/")):
        hint = "`windtunnel bench --endpoint URL --out FOLDER` records some; `windtunnel observe URL` reads metrics"
        raise InputError("diagnose takes recorded requests or steps, and no address of a server", hint)
    if _is_of_runs(options.requests):
        _answer_runs(options)
        return
    recorded = read_requests(options.requests)
    if recorded.num_failed:
        remark(f"note: {format_count(recorded.num_failed, 'request')} cancelled or not answered, which are left out")
    before = [read_requests(path) for path in options.before]
    launch = launched(options)
    if options.scenario is None:
        if options.model is None and "model" not in launch.raw:
            raise InputError("what served the requests is not known: --model is missing", "or give --from-command")
        # A scenario needs a load; the recorded requests replace it.
        options.rate, options.input_tokens, options.output_tokens = 1.0, "1", "1"
    scenario = scenario_of(options, base=launch.raw)

    from windtunnel.production.diagnose import diagnose
    from windtunnel.report.diagnosis import diagnosis_document, diagnosis_report

    with counted("trying", "causes") as progress:
        diagnosis = diagnose(scenario, recorded, before, progress)
    answer(options, diagnosis_document, diagnosis_report, diagnosis, launch=launch)


def _is_of_runs(path: Path) -> bool:
    """Whether a file holds measured runs or recorded steps, and not the requests of one run."""
    if path.is_dir():
        return (path / RUNS).is_file()
    _refuse_means(path)
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        return json_telemetry(path) is None and not is_request_table(path)
    return path.name.endswith((".csv", ".csv.gz")) and path.is_file() and not is_request_table(path)


def _refuse_means(path: Path) -> None:
    """Raise InputError for a benchmark client's result, which does not say when each request was sent."""
    client = None
    with suppress(InputError):
        client = find_format(path, "client result")
    if client is not None and client.is_certain and not is_detailed(path):
        hint = "newer versions of `vllm bench serve --save-detailed` (`start_times`), AIPerf's profile_export.jsonl and"
        hint += f" `windtunnel bench --out` record it; `windtunnel gate --measured {path}` takes means"
        raise InputError(f"{path} is a result of {client.name}, without the arrival of every request", hint)


def _answer_runs(options: Options) -> None:
    """Diagnose recorded steps, or series of measured runs."""
    from windtunnel.calibration.measured_runs import is_run_file, read_run_file
    from windtunnel.calibration.steps.read import read_step_runs
    from windtunnel.calibration.validate import predict_runs, with_odd_runs
    from windtunnel.production.slow_steps import diagnose_runs, diagnose_steps
    from windtunnel.report.slow_steps import steps_document, steps_report

    path = options.requests
    if options.before:
        raise InputError("--before is for requests", "leave it out")
    if path.suffix == ".jsonl" and path.is_file() and is_run_file(path):
        with counted("predicting", "runs") as progress:
            predictions = predict_runs(read_run_file(path), options.calibration, 1, progress)
        diagnosis = diagnose_runs(with_odd_runs(predictions))
    else:
        runs = read_step_runs(path, launched(options).raw, options.of("deployment"))
        with counted("pricing", "runs") as progress:
            diagnosis = diagnose_steps(runs, progress)
    answer(options, steps_document, steps_report, diagnosis)
