"""`windtunnel network`: SimAI's job in one command."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from windtunnel.cli.network.topology import fabric_named, failure_options
from windtunnel.cli.options import WRITTEN_FILE, Verb, option
from windtunnel.errors import InputError

if TYPE_CHECKING:
    from windtunnel.network.fabric import Fabric
    from windtunnel.network.settings import NetworkSettings
    from windtunnel.training.iteration.layers import LayerWorkload
    from windtunnel.training.iteration.times import Iteration

_WHAT, _HOW, _SIMAI, _OUT = "What runs, where", "How", "With --compat simai --backend analytic", "Output"


@click.group(no_args_is_help=False, context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Run workloads on a network of GPUs."""


@command.command(cls=Verb)
@option(
    "--workload",
    "-w",
    "workloads",
    section=_WHAT,
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="FILE",
    help="SimAI's workload. Several share the network, each over and over.",
)
@option("--topology", "-n", section=_WHAT, metavar="NAME", help="A file, a type with parameters, or a node.")
@option(
    "--placement", section=_WHAT, metavar="NAME", help="Of several jobs: packed, or striped server by server.  [packed]"
)
@option("--iterations", section=_HOW, type=click.IntRange(min=1), metavar="N", help="Of each of several jobs.  [10]")
@option("--backend", section=_HOW, metavar="NAME", help="analytic, flow or packet.  [analytic]")
@option("--compat", section=_HOW, metavar="NAME", help="simai: as SimAI computes it.")
@option("--conf", section=_HOW, type=click.Path(path_type=Path), metavar="FILE", help="SimAI.conf; means compat simai.")
@option("--routing", section=_HOW, metavar="NAME", help="ecmp or spray.  [ecmp]")
@option("--send-latency", section=_HOW, metavar="TIME", help="Before each flow.  [3us]")
@option("--seed", section=_HOW, type=int, metavar="N", help="Of the switches' hashes.  [0]")
@option("--nvlink-busbw", "-nv", section=_SIMAI, type=float, metavar="GIB/S", help="Inside a server.  [360]")
@option("--nic-busbw", "-nic", section=_SIMAI, type=float, metavar="GIB/S", help="Of one NIC.  [48.5]")
@option("--nics-per-server", "-n_p_s", section=_SIMAI, type=int, metavar="N", help="[8]")
@option("--gpus-per-server", "-g_p_s", section=_SIMAI, type=int, metavar="N", help="[8]")
@option("--nic-type", "-nic_t", section=_SIMAI, metavar="NAME", help="cx6, cx7 or bf3, for --nic-busbw.")
@option("--gpu-type", "-g_type", section=_SIMAI, metavar="NAME", help="A100, H100, ..., for --nvlink-busbw.")
@option("--dp-overlap", "-dp_o", section=_SIMAI, type=float, metavar="X", help="[0]")
@option("--ep-overlap", "-ep_o", section=_SIMAI, type=float, metavar="X", help="[0]")
@option("--tp-overlap", "-tp_o", section=_SIMAI, type=float, metavar="X", help="[0]")
@option("--pp-overlap", "-pp_o", section=_SIMAI, type=float, metavar="X", help="[1]")
@failure_options
@option("--out", "-o", section=_OUT, type=WRITTEN_FILE, metavar="FILE", help="Write EndToEnd.csv.")
@option("--overwrite", section=_OUT, is_flag=True, help="Replace the file.")
@option("--json", "as_json", section=_OUT, is_flag=True, help="Print JSON.")
def run(
    workloads: tuple[Path, ...],
    topology: str | None,
    placement: str | None,
    iterations: int | None,
    backend: str | None,
    compat: str | None,
    conf: Path | None,
    routing: str | None,
    send_latency: str | None,
    seed: int | None,
    fail_links: tuple[str, ...],
    fail_nodes: tuple[int, ...],
    out: Path | None,
    overwrite: bool,
    as_json: bool,
    **analytical: Any,
) -> None:
    """Predict a training iteration from a SimAI workload file.

    \b
    windtunnel network run --workload microAllReduce.txt --topology dgx_h100 --backend flow
    windtunnel network run -w workload.txt --compat simai -nv 360 -nic 48.5 -n_p_s 8 -g_p_s 8
    windtunnel network run -w one.txt -w other.txt --topology dcn_plus:num_gpus=128 --placement striped
    """
    from windtunnel.cli.network.collective import network_settings
    from windtunnel.formats.simai.layers import read_layers
    from windtunnel.formats.simai.report import write_end_to_end
    from windtunnel.report.documents import as_text
    from windtunnel.report.network.network import iteration_document, iteration_report
    from windtunnel.report.render.tables import show
    from windtunnel.training.iteration.run import run_layers

    if not workloads:
        raise InputError("--workload is missing", "a workload file in SimAI's format")
    if len(workloads) == 1 and (placement or iterations):
        raise InputError("--placement and --iterations are for several jobs", "give --workload once for each")
    if out is not None and out.exists() and not overwrite:
        raise InputError(f"{out} exists already", "choose another --out, or replace it with --overwrite")
    settings = network_settings(backend, compat, routing, send_latency, seed, conf)
    is_analytical = settings.compat == "simai" and settings.backend == "analytic"
    given = [name for name, value in analytical.items() if value is not None]
    if given and not is_analytical:
        raise InputError(
            f"--{given[0].replace('_', '-')} is SimAI-Analytical's", "give --compat simai, and no --backend"
        )
    jobs = [read_layers(workload) for workload in workloads]
    if topology is not None and len(jobs) > 1:
        if out is not None:
            raise InputError("--out writes the report of one job", "leave it out; --json prints all of them")
        fabric = fabric_named(topology, fail_links, fail_nodes)
        _share(jobs, fabric, settings, placement or "packed", iterations or 10, as_json)
        return
    if is_analytical:
        if topology is not None or fail_links or fail_nodes:
            raise InputError("SimAI-Analytical knows no topology", "leave --topology out, or --compat simai")
        iteration = _analytical(jobs[0], **analytical)
    elif topology is None:
        raise InputError("--topology is missing", "a topology file, a type such as spectrum_x:num_gpus=128, or a node")
    else:
        iteration = run_layers(jobs[0], fabric_named(topology, fail_links, fail_nodes), settings)
    if out is not None:
        write_end_to_end(iteration, out)
        click.echo(f"written to {out}", err=True)
    if as_json:
        click.echo(as_text(iteration_document(iteration)))
    else:
        show(*iteration_report(iteration))


def _analytical(
    job: "LayerWorkload",
    nvlink_busbw: float | None,
    nic_busbw: float | None,
    nics_per_server: int | None,
    gpus_per_server: int | None,
    nic_type: str | None,
    gpu_type: str | None,
    dp_overlap: float | None,
    ep_overlap: float | None,
    tp_overlap: float | None,
    pp_overlap: float | None,
) -> "Iteration":
    """An iteration as SimAI-Analytical has it, with its flags."""
    from windtunnel.formats.simai.analytical import hardware_from, overlap_from, run_simai_analytical

    hardware = hardware_from(nvlink_busbw, nic_busbw, nics_per_server, gpus_per_server, nic_type, gpu_type)
    return run_simai_analytical(job, hardware, overlap_from(dp_overlap, ep_overlap, tp_overlap, pp_overlap))


def _share(
    jobs: "list[LayerWorkload]",
    fabric: "Fabric",
    settings: "NetworkSettings",
    placement: str,
    iterations: int,
    as_json: bool,
) -> None:
    """Run several jobs on one network and print what each loses to the others."""
    from windtunnel.report.documents import as_text
    from windtunnel.report.network.network import shared_document, shared_report
    from windtunnel.report.render.tables import show
    from windtunnel.training.iteration.shared_fabric import place_jobs, run_jobs

    found = run_jobs(place_jobs(jobs, fabric, placement), fabric, settings, iterations)
    if as_json:
        click.echo(as_text(shared_document(found, fabric, placement)))
    else:
        show(*shared_report(found, fabric, placement))
