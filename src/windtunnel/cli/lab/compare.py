"""`windtunnel lab compare`: a real run and its simulation."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from windtunnel.cli.options import PATH, Verb, options_in
from windtunnel.cli.output import answer, write_page
from windtunnel.errors import InputError

if TYPE_CHECKING:
    from windtunnel.serving.scenario import Scenario


@click.command(cls=Verb, short_help="Compare a real run with its simulation.")
@click.argument("run", type=PATH, metavar="RUN")
@click.argument("simulation", type=PATH, metavar="SIMULATION")
@options_in("lab_compare")
def compare(run: Path, simulation: Path, html: Path | None, as_json: bool) -> None:
    """Compare a real run with its simulation: request by request, and operator by operator where it was profiled.

    RUN is a folder of `windtunnel lab run`, or any with a requests.parquet of the same columns. SIMULATION is a folder
    that `windtunnel simulate --out` wrote, or a scenario, which is then simulated.

    \b
    windtunnel lab compare results/tiny_torch_20260101_120000 scenario.yaml --html comparison.html
    """
    from windtunnel.lab.experiments.schema import REQUESTS
    from windtunnel.report.lab import comparison
    from windtunnel.serving.scenario import load, resolve

    if not (run / REQUESTS).is_file():
        raise InputError(f"{run} holds no {REQUESTS}", "give a folder of `windtunnel lab run`")
    if simulation.is_dir():
        scenario = load(simulation / "scenario.yaml")
        if not (simulation / "steps.parquet").is_file():
            raise InputError(f"{simulation} holds no simulated run", "give a folder of `windtunnel simulate --out`")
        simulated = comparison.request_columns(simulation / REQUESTS)
    else:
        scenario = load(simulation)
        simulated = _simulated(scenario)
    compared = comparison.compare_run(run, simulated, resolve(scenario))
    write_page(html, comparison.comparison_report, compared)
    answer(as_json, lambda shown: shown.document, comparison.comparison_report, compared)


def _simulated(scenario: "Scenario") -> dict[str, Any]:
    from windtunnel.report.lab.comparison import METRICS
    from windtunnel.serving.simulate import simulate

    requests = simulate(scenario).requests
    keep = ~requests["is_warmup"]
    names = ("arrival_s", "input_tokens", "output_tokens", *METRICS)
    return {name: requests[name][keep].astype(float) for name in names}
