"""`windtunnel lab compare`: a real run and its simulation."""

from windtunnel.cli.output import answer
from windtunnel.cli.verbs import Options
from windtunnel.errors import InputError
from windtunnel.lab.experiments.schema import REQUESTS
from windtunnel.report.lab.comparison import METRICS, compare_run, comparison_report, request_columns
from windtunnel.serving.scenario import load, resolve
from windtunnel.serving.simulate import simulate


def command(options: Options) -> None:
    """Compare a real run with its simulation."""
    run, simulation = options.run, options.simulation
    if not (run / REQUESTS).is_file():
        raise InputError(f"{run} holds no {REQUESTS}", "give a folder of `windtunnel lab run`")
    if simulation.is_dir():
        scenario = load(simulation / "scenario.yaml")
        if not (simulation / "steps.parquet").is_file():
            raise InputError(f"{simulation} holds no simulated run", "give a folder of `windtunnel simulate --out`")
        simulated = request_columns(simulation / REQUESTS)
    else:
        scenario = load(simulation)
        requests = simulate(scenario).requests
        keep, names = ~requests["is_warmup"], ("arrival_s", "input_tokens", "output_tokens", *METRICS)
        simulated = {name: requests[name][keep].astype(float) for name in names}
    compared = compare_run(run, simulated, resolve(scenario))
    answer(options, lambda shown: shown.document, comparison_report, compared)
