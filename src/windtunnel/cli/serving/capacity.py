"""`windtunnel capacity`: find the greatest load that a deployment sustains."""

from pathlib import Path
from typing import Any

import click

from windtunnel.cli.options import Verb, options_in, scenario_file, scenario_of
from windtunnel.cli.output import answer
from windtunnel.cli.progress import status
from windtunnel.errors import InputError


@click.command(cls=Verb, epilog="The scenario's own rate does not matter; a trace keeps its lengths and pattern.")
@scenario_file
@options_in("capacity", "deployment", "load", "requests", "sampling", "general", "hub", "json")
def command(
    scenario: Path | None, slo: str | None, seeds: int, tolerance: float, as_json: bool, **options: Any
) -> None:
    """Find the greatest load that a deployment sustains within its limits.

    The queue must not grow, and the limits hold. Load is a rate, or with --concurrency a number of clients.

    \b
    windtunnel capacity scenario.yaml --slo ttft_p90=2s,tpot_p99=50ms
    windtunnel capacity --model llama-3.1-8b --device h100_sxm --input-tokens 1024 \\
        --output-tokens 256 --slo ttft_p99=1s,tpot_p99=20ms
    windtunnel capacity --model llama-3.1-8b --device h100_sxm --trace azure2023_conv --rate 1 \\
        --num-requests 2000 --slo ttft_p99=1s
    """
    from windtunnel.search.capacity.limits import limits_of, parse_limits

    if seeds < 1:
        raise InputError(f"--seeds is {seeds}; at least 1 is needed")
    if not 1e-4 <= tolerance <= 0.5:
        raise InputError(f"--tolerance is {tolerance}; 0.0001 to 0.5 is possible")
    if scenario is None and not any(options[name] for name in ("rate", "concurrency", "trace", "settings")):
        options["rate"] = 1.0
    deployment = scenario_of(scenario, options)
    limits = parse_limits(slo) if slo is not None else limits_of(deployment.slo)

    from windtunnel.report.search.capacity import capacity_document, capacity_report
    from windtunnel.search.capacity.capacity import capacities

    with status() as say:
        say("looking for the greatest load")
        loads = capacities(deployment, limits, seeds, tolerance, allow_download=options["hub"])
    answer(as_json, capacity_document, capacity_report, loads)
