"""`windtunnel collective`: one collective on a fabric."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from windtunnel.cli.network.topology import fabric_named, failure_options
from windtunnel.cli.options import WRITTEN_FILE, Verb, option
from windtunnel.errors import InputError
from windtunnel.units import format_count

if TYPE_CHECKING:
    from windtunnel.network.fabric import Fabric
    from windtunnel.network.flows import Flows
    from windtunnel.network.settings import NetworkSettings

_WHAT, _HOW, _OUT = "What is sent, where", "How", "Output"


@click.command(cls=Verb)
@option("--op", section=_WHAT, metavar="NAME", help="all_reduce, all_gather, reduce_scatter, all_to_all, ...")
@option("--size", section=_WHAT, metavar="BYTES", help="As nccl-tests counts: 1GiB, 16MiB, 4194304.")
@option(
    "--traffic",
    section=_WHAT,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="CSV of an all-to-all's bytes, a row for each sender; instead of --size.",
)
@option("--topology", section=_WHAT, metavar="NAME", help="A file, a type with parameters, or a node of the catalog.")
@option("--ranks", section=_WHAT, metavar="N|A,B,...", help="How many GPUs, or their ids.  [all]")
@option("--backend", section=_HOW, metavar="NAME", help="analytic, flow or packet.  [analytic]")
@option("--algorithm", section=_HOW, metavar="NAME", help="ring, tree, nvls, pat, hierarchical, ...  [NCCL's choice]")
@option("--protocol", section=_HOW, metavar="NAME", help="simple, ll or ll128.  [NCCL's choice; of flows, simple]")
@option("--routing", section=_HOW, metavar="NAME", help="ecmp or spray.  [ecmp]")
@option("--compat", section=_HOW, metavar="NAME", help="simai: its rings, packets and ports.")
@option("--conf", section=_HOW, type=click.Path(path_type=Path), metavar="FILE", help="SimAI.conf; means compat simai.")
@option("--pxn", section=_HOW, is_flag=True, help="With --compat simai: NCCL's PXN.")
@option("--send-latency", section=_HOW, metavar="TIME", help="Before each flow.  [3us]")
@option("--cuda-graph", section=_HOW, is_flag=True, help="Analytic: without the host's launch.")
@option("--seed", section=_HOW, type=int, metavar="N", help="Of the switches' hashes.  [0]")
@failure_options
@option("--flows", section=_OUT, type=WRITTEN_FILE, metavar="FILE", help="Write the flows as CSV (SimCCL's).")
@option("--times", section=_OUT, type=WRITTEN_FILE, metavar="FILE", help="Write when each flow ran, as CSV.")
@option("--links", section=_OUT, type=WRITTEN_FILE, metavar="FILE", help="Write the use of every link as CSV.")
@option("--queues", section=_OUT, type=WRITTEN_FILE, metavar="FILE", help="Of packets: the 16 fullest queues.")
@option("--json", "as_json", section=_OUT, is_flag=True, help="Print JSON.")
def command(
    op: str | None,
    size: str | None,
    traffic: Path | None,
    topology: str | None,
    ranks: str | None,
    backend: str | None,
    algorithm: str | None,
    protocol: str | None,
    routing: str | None,
    compat: str | None,
    conf: Path | None,
    pxn: bool,
    send_latency: str | None,
    cuda_graph: bool,
    seed: int | None,
    fail_links: tuple[str, ...],
    fail_nodes: tuple[int, ...],
    flows: Path | None,
    times: Path | None,
    links: Path | None,
    queues: Path | None,
    as_json: bool,
) -> None:
    """Predict the time and bandwidth of one collective.

    \b
    windtunnel collective --op all_reduce --size 1GiB --topology dgx_h100
    windtunnel collective --op all_to_all --size 64MiB --topology nvl:num_gpus=144 --backend flow
    windtunnel collective --op all_reduce --size 4MiB --topology spectrum_x:num_gpus=16 \\
        --compat simai --backend flow --flows flows.csv
    """
    from windtunnel.formats.simai.report import write_flow_table
    from windtunnel.network.analytic.nccl import LAUNCH_S
    from windtunnel.network.collectives.run import chosen_gpus, flows_like, run_collective, run_traffic
    from windtunnel.network.collectives.traffic_matrix import read_traffic
    from windtunnel.report.documents import as_text
    from windtunnel.report.network.network import collective_document, collective_report
    from windtunnel.report.render.tables import show

    if op is None or topology is None or (size is None and traffic is None):
        missing = next(name for name, value in (("op", op), ("topology", topology), ("size", None)) if value is None)
        raise InputError(f"--{missing} is missing", "see `windtunnel collective --help`")
    fabric = fabric_named(topology, fail_links, fail_nodes)
    settings = network_settings(backend, compat, routing, send_latency, seed, conf)
    check_what_happened(settings, times, links, queues)
    wanted = chosen_ranks(ranks, fabric.num_gpus)
    if traffic is not None:
        given = {"--size": size, "--pxn": pxn, "--protocol": protocol, "--cuda-graph": cuda_graph, "--flows": flows}
        given |= {"--times": times, "--links": links, "--queues": queues}
        odd = [name for name, value in given.items() if value] + [f"--op {op}"] * (op.lower() != "all_to_all")
        if odd:
            raise InputError(f"--traffic is an all-to-all's; it does not go with {odd[0]}")
        matrix = read_traffic(traffic, len(chosen_gpus(fabric, wanted)))
        run = run_traffic(fabric, matrix, wanted, settings.backend, settings, algorithm or "auto")
    else:
        assert size is not None
        if cuda_graph and settings.backend != "analytic":
            raise InputError("--cuda-graph leaves out the host's launch, which only the analytic backend has")
        run = run_collective(
            fabric,
            op.lower(),
            _whole_bytes(size),
            wanted,
            settings.backend,
            settings,
            algorithm or "auto",
            pxn,
            0.0 if cuda_graph or settings.backend != "analytic" else LAUNCH_S,
            protocol or "auto",
        )
    if any((flows, times, links, queues)):
        table, chosen = flows_like(fabric, run, chosen_gpus(fabric, wanted), settings, pxn)
        if flows is not None:
            write_flow_table(table, run.op, run.size_bytes, chosen, flows)
            click.echo(f"{format_count(len(table), 'flow')} written to {flows}", err=True)
        if any((times, links, queues)):
            write_what_happened(fabric, table, settings, times, links, queues)
    if as_json:
        click.echo(as_text(collective_document(run)))
    else:
        show(*collective_report(run, fabric))


def _whole_bytes(size: str) -> int:
    from windtunnel.units import parse_quantity

    num_bytes = parse_quantity("size_bytes", size)
    if num_bytes != int(num_bytes):
        raise InputError(f"--size: {size!r} is not a whole number of bytes")
    return int(num_bytes)


def check_what_happened(
    settings: "NetworkSettings", times: Path | None, links: Path | None, queues: Path | None
) -> None:
    """Refuse files that the backend has nothing for.

    Raises:
        InputError: there are no flows, or no packets that queue.
    """
    if settings.backend == "analytic" and any((times, links, queues)):
        asked = "--times" if times else "--links" if links else "--queues"
        raise InputError(f"{asked} is for flows; the analytic backend has none", "give --backend flow")
    if settings.backend == "flow" and queues is not None:
        raise InputError("--queues is for packets; flows do not queue", "give --backend packet")


def write_what_happened(
    fabric: "Fabric",
    table: "Flows",
    settings: "NetworkSettings",
    times: Path | None,
    links: Path | None,
    queues: Path | None,
) -> None:
    """Run the flows once more, every one of them, and write what was asked for."""
    from windtunnel.network.packet.simulate import PacketTimes, trace_fullest_queues
    from windtunnel.network.run import run_flows
    from windtunnel.report.network.files import write_flow_times, write_link_use, write_queues

    found = run_flows(fabric, table, settings)
    if times is not None:
        write_flow_times(table, found, times)
    if links is not None:
        write_link_use(fabric, found, links)
    if queues is not None and isinstance(found, PacketTimes):
        write_queues(fabric, trace_fullest_queues(fabric, table, settings, found), queues)
    written = ", ".join(str(path) for path in (times, links, queues) if path is not None)
    click.echo(f"written to {written}", err=True)


def network_settings(
    backend: str | None,
    compat: str | None,
    routing: str | None,
    send_latency: str | None,
    seed: int | None,
    conf: Path | None = None,
) -> "NetworkSettings":
    """Options as `NetworkSettings`, over those of a SimAI.conf, over what `compat` sets."""
    from windtunnel.network.settings import settings_from

    given = {"backend": backend, "compat": compat, "routing": routing, "send_latency_s": send_latency, "seed": seed}
    given = {name: value for name, value in given.items() if value is not None}
    if given.get("backend", "analytic") == "analytic":
        unused = next((name for name in ("routing", "send_latency_s", "seed") if name in given), None)
        if unused is not None:
            option_name = unused.removesuffix("_s").replace("_", "-")
            raise InputError(f"--{option_name} is for flows; the analytic backend has none", "give --backend flow")
    if conf is not None:
        from windtunnel.formats.simai.conf import read_simai_conf
        from windtunnel.schema import encode

        given = {**encode(read_simai_conf(conf)), **given}
    return settings_from(given)


def chosen_ranks(text: str | None, num_gpus: int) -> int | list[int]:
    """`8` as a number of ranks, `0,8,16` as their ids."""
    if text is None:
        return num_gpus
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise InputError(f"--ranks: {text!r} is neither a number of GPUs nor their ids", "as 16, or 0,8,16,24")
    return int(text) if len(parts) == 1 else [int(part) for part in parts]
