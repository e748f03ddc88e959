"""`windtunnel network`: SimAI's job in one command."""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from windtunnel.cli.network.options import Failures, NetworkOptions
from windtunnel.cli.options import Verb, options_in, options_of
from windtunnel.cli.output import answer, check_replaceable, remark
from windtunnel.errors import InputError

if TYPE_CHECKING:
    from windtunnel.network.settings import NetworkSettings
    from windtunnel.training.iteration.layers import Iteration, LayerWorkload


class SimaiAnalytical(NamedTuple):
    """Options of SimAI-Analytical."""

    nvlink_busbw: float | None
    nic_busbw: float | None
    nics_per_server: int | None
    gpus_per_server: int | None
    nic_type: str | None
    gpu_type: str | None
    dp_overlap: float | None
    ep_overlap: float | None
    tp_overlap: float | None
    pp_overlap: float | None

    def iteration(self, job: "LayerWorkload") -> "Iteration":
        """Predict an iteration as SimAI-Analytical does."""
        from windtunnel.formats.simai.analytical import hardware_from, overlap_from, run_simai_analytical

        options = self._asdict()
        return run_simai_analytical(job, hardware_from(options), overlap_from(options))


class NetworkRun(NamedTuple):
    """Options of `windtunnel network run`."""

    workloads: tuple[Path, ...]
    topology: str | None
    placement: str | None
    iterations: int | None
    network: NetworkOptions
    simai: SimaiAnalytical
    failures: Failures
    out: Path | None
    overwrite: bool


@click.group(no_args_is_help=False, context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Run workloads on a network of GPUs."""


@command.command(cls=Verb)
@options_of(NetworkRun)
@options_in("json")
def run(options: NetworkRun, as_json: bool) -> None:
    """Predict a training iteration from a SimAI workload file.

    \b
    windtunnel network run --workload microAllReduce.txt --topology dgx_h100 --backend flow
    windtunnel network run -w workload.txt --compat simai -nv 360 -nic 48.5 -n_p_s 8 -g_p_s 8
    windtunnel network run -w one.txt -w other.txt --topology dcn_plus:num_gpus=128 --placement striped
    """
    from windtunnel.formats.simai.layers import read_layers
    from windtunnel.formats.simai.report import write_end_to_end
    from windtunnel.report.network.network import iteration_document, iteration_report

    if not options.workloads:
        raise InputError("--workload is missing", "a workload file in SimAI's format")
    if len(options.workloads) == 1 and (options.placement or options.iterations):
        raise InputError("--placement and --iterations are for several jobs", "give --workload once for each")
    check_replaceable(options.out, options.overwrite)
    settings = options.network.settings()
    is_analytical = settings.compat == "simai" and settings.backend == "analytic"
    given = [name for name, value in options.simai._asdict().items() if value is not None]
    if given and not is_analytical:
        raise InputError(
            f"--{given[0].replace('_', '-')} is SimAI-Analytical's", "give --compat simai, and no --backend"
        )
    jobs = [read_layers(workload) for workload in options.workloads]
    if options.topology is not None and len(jobs) > 1:
        _share(options, options.topology, jobs, settings, as_json)
        return
    if not is_analytical:
        iteration = _on_topology(options, jobs[0], settings)
    elif options.topology is not None or any(options.failures):
        raise InputError("SimAI-Analytical knows no topology", "leave --topology out, or --compat simai")
    else:
        iteration = options.simai.iteration(jobs[0])
    if options.out is not None:
        write_end_to_end(iteration, options.out)
        remark(f"wrote {options.out}")
    answer(as_json, iteration_document, iteration_report, iteration)


def _on_topology(options: NetworkRun, job: "LayerWorkload", settings: "NetworkSettings") -> "Iteration":
    """Predict an iteration on a topology."""
    from windtunnel.training.iteration.run import run_layers

    if options.topology is None:
        raise InputError("--topology is missing", "a topology file, a type such as spectrum_x:num_gpus=128, or a node")
    return run_layers(job, options.failures.fabric(options.topology), settings)


def _share(
    options: NetworkRun, topology: str, jobs: "list[LayerWorkload]", settings: "NetworkSettings", as_json: bool
) -> None:
    """Run several jobs on one network and print what each loses to the others."""
    from windtunnel.report.network.network import shared_document, shared_report
    from windtunnel.training.iteration.shared_fabric import place_jobs, run_jobs

    if options.out is not None:
        raise InputError("--out writes the report of one job", "leave it out; --json prints all of them")
    fabric, placement = options.failures.fabric(topology), options.placement or "packed"
    jobs_run = run_jobs(place_jobs(jobs, fabric, placement), fabric, settings, options.iterations or 10)
    answer(as_json, shared_document, shared_report, jobs_run, fabric, placement)
