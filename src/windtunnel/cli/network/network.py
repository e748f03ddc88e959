"""`windtunnel network run`: SimAI's job in one command."""

from windtunnel.cli.network.options import fabric_with_failures, network_settings
from windtunnel.cli.output import answer, remark
from windtunnel.cli.verbs import Options
from windtunnel.errors import InputError
from windtunnel.files import check_replaceable, write_text
from windtunnel.formats.simai.analytical import read_layers, run_simai_analytical, simai_servers
from windtunnel.formats.simai.report import end_to_end_csv
from windtunnel.network.settings import NetworkSettings
from windtunnel.report.network.network import (
    iteration_document,
    iteration_report,
    shared_document,
    shared_report,
)
from windtunnel.training.iteration.layers import Iteration, LayerWorkload, run_layers
from windtunnel.training.iteration.shared_fabric import place_jobs, run_jobs


def command(options: Options) -> None:
    """Predict a training iteration from a SimAI workload file, or those of several jobs on one network."""
    if not options.workloads:
        raise InputError("--workload is missing", "a workload file in SimAI's format")
    if len(options.workloads) == 1 and (options.placement or options.iterations):
        raise InputError("--placement and --iterations are for several jobs", "give --workload once for each")
    check_replaceable(options.out, options.overwrite)
    settings = network_settings(options)
    is_analytical = settings.compat == "simai" and settings.backend == "analytic"
    analytical = options.of("simai_analytical")
    given = [name for name, value in analytical.items() if value is not None]
    if given and not is_analytical:
        raise InputError(
            f"--{given[0].replace('_', '-')} is SimAI-Analytical's", "give --compat simai, and no --backend"
        )
    jobs = [read_layers(workload) for workload in options.workloads]
    if options.topology is not None and len(jobs) > 1:
        _share(options, jobs, settings)
        return
    if not is_analytical:
        iteration = _on_topology(options, jobs[0], settings)
    elif options.topology is not None or options.fail_links or options.fail_nodes:
        raise InputError("SimAI-Analytical knows no topology", "leave --topology out, or --compat simai")
    else:
        iteration = run_simai_analytical(jobs[0], *simai_servers(analytical))
    if options.out is not None:
        write_text(options.out, end_to_end_csv(iteration, options.out.stem.removesuffix("EndToEnd")))
        remark(f"wrote {options.out}")
    answer(options.as_json, iteration_document, iteration_report, iteration)


def _on_topology(options: Options, job: LayerWorkload, settings: NetworkSettings) -> Iteration:
    """Predict an iteration on a topology."""
    if options.topology is None:
        raise InputError("--topology is missing", "a topology file, a type such as spectrum_x:num_gpus=128, or a node")
    return run_layers(job, fabric_with_failures(options, options.topology), settings)


def _share(options: Options, jobs: list[LayerWorkload], settings: NetworkSettings) -> None:
    """Run several jobs on one network and print what each loses to the others."""
    if options.out is not None:
        raise InputError("--out writes the report of one job", "leave it out; --json prints all of them")
    fabric, placement = fabric_with_failures(options, options.topology), options.placement or "packed"
    jobs_run = run_jobs(place_jobs(jobs, fabric, placement), fabric, settings, options.iterations or 10)
    answer(options.as_json, shared_document, shared_report, jobs_run, fabric, placement)
