"""`windtunnel capacity`: find the greatest load that a deployment sustains."""

from windtunnel.cli.options import launched, scenario_of, with_read_load
from windtunnel.cli.output import answer, status
from windtunnel.cli.verbs import Options
from windtunnel.errors import InputError
from windtunnel.metrics.limits import limits_of, parse_limits


def command(options: Options) -> None:
    """Find the greatest load that a deployment sustains within its limits."""
    if not 1e-4 <= options.tolerance <= 0.5:
        raise InputError(f"--tolerance is {options.tolerance}; 0.0001 to 0.5 is possible")
    arrives = any(
        text.startswith(("workload.arrivals", "workload.trace", "workload.clients")) for text in options.settings
    )
    launch = launched(options)
    server = with_read_load(options, launch, is_sized=True)
    arrives = arrives or "arrivals" in server.get("workload", {})
    if options.scenario is None and not any((options.rate, options.concurrency, options.trace, arrives)):
        options.rate = 1.0
    deployment = scenario_of(options, base=server)
    limits = parse_limits(options.slo) if options.slo is not None else limits_of(deployment.slo)

    from windtunnel.report.search.capacity import capacity_document, capacity_report
    from windtunnel.search.capacity.capacity import capacities

    with status() as say:
        say("looking for the greatest load")
        loads = capacities(deployment, limits, options.seeds, options.tolerance, allow_download=options.hub)
    answer(options, capacity_document, capacity_report, loads, launch=launch)
