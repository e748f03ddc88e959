"""`windtunnel topology`: generate, show and check networks of GPUs."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from windtunnel.cli.options import WRITTEN_FILE, Verb, all_of, option
from windtunnel.errors import InputError
from windtunnel.units import format_count

if TYPE_CHECKING:
    from windtunnel.network.fabric import Fabric

_SIZE, _LINKS, _OUT = "Size", "Links", "Output"

parameter_options = all_of(
    option("--num-gpus", "-g", "num_gpus", section=_SIZE, type=int, metavar="N", help="GPUs in all."),
    option("--gpus-per-server", "-gps", "gpus_per_server", section=_SIZE, type=int, metavar="N", help="GPUs a server."),
    option("--gpu-type", "-gt", "gpu_type", section=_SIZE, metavar="NAME", help="H100, A100, ..."),
    option(
        "--scale-up-switches",
        "-nsps",
        "scale_up_switches_per_server",
        section=_SIZE,
        type=int,
        metavar="N",
        help="NVSwitches a server.",
    ),
    option("--gpus-per-leaf", "-npa", "gpus_per_leaf", section=_SIZE, type=int, metavar="N", help="NIC ports a leaf."),
    option(
        "--num-leaves", "-asn", "num_leaves", section=_SIZE, type=int, metavar="N", help="Leaves; must fit the GPUs."
    ),
    option("--num-spines", "-psn", "num_spines", section=_SIZE, type=int, metavar="N", help="Spine switches."),
    option(
        "--leaf-ports-up", "-app", "leaf_ports_up", section=_SIZE, type=int, metavar="N", help="Leaf ports to spines."
    ),
    option("--ro", "rail_optimised", section=_SIZE, is_flag=True, help="two_tier: rail-optimised."),
    option("--dt", "dual_tor", section=_SIZE, is_flag=True, help="two_tier, dcn_plus: two leaves a GPU."),
    option("--dp", "dual_plane", section=_SIZE, is_flag=True, help="two_tier, alibaba_hpn: two spine planes."),
    option("--nvlink", "-nvbw", "scale_up_bytes_per_s", section=_LINKS, metavar="RATE", help="NVLink, as 2880Gbps."),
    option("--nvlink-latency", "-nl", "scale_up_latency_s", section=_LINKS, metavar="TIME", help="As 25ns."),
    option("--nic", "-bw", "nic_bytes_per_s", section=_LINKS, metavar="RATE", help="One NIC port, as 400Gbps."),
    option("--latency", "-l", "latency_s", section=_LINKS, metavar="TIME", help="Of scale-out links, as 500ns."),
    option(
        "--leaf-spine", "-apbw", "leaf_spine_bytes_per_s", section=_LINKS, metavar="RATE", help="Leaf to spine link."
    ),
    option("--error-rate", "-er", "error_fraction", section=_LINKS, type=float, metavar="X", help="Packets lost."),
)


failure_options = all_of(
    option("--fail-link", "fail_links", section="Failures", multiple=True, metavar="A-B", help="Without this link."),
    option(
        "--fail-node",
        "fail_nodes",
        section="Failures",
        multiple=True,
        type=int,
        metavar="N",
        help="Without this switch.",
    ),
)


def fabric_named(topology: str, fail_links: tuple[str, ...], fail_nodes: tuple[int, ...]) -> "Fabric":
    """The fabric of `--topology` without what `failure_options` say has failed."""
    from windtunnel.network.fabric import without
    from windtunnel.network.named_fabrics import fabric_of

    return without(fabric_of(topology), tuple(_pair(text) for text in fail_links), fail_nodes)


@click.group(no_args_is_help=False, context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Generate, show and check networks of GPUs."""


@command.command(cls=Verb)
@option("--type", "-topo", "kind", section=_SIZE, metavar="NAME", help="spectrum_x, alibaba_hpn, dcn_plus, nvl, ...")
@parameter_options
@option("--set", "settings", section=_SIZE, multiple=True, metavar="NAME=VALUE", help="Any other field of the type.")
@option("--out", "-o", "out", section=_OUT, type=WRITTEN_FILE, metavar="FILE", help="[its name, here]")
@option("--overwrite", section=_OUT, is_flag=True, help="Replace the file.")
def generate(
    kind: str | None,
    settings: tuple[str, ...],
    out: Path | None,
    overwrite: bool,
    num_leaves: int | None,
    **parameters: Any,
) -> None:
    """Write a topology file in SimAI's format. SimAI's own flags are understood.

    \b
    windtunnel topology generate --type spectrum_x --num-gpus 128 --num-spines 8
    windtunnel topology generate -topo AlibabaHPN --dp -g 64 -psn 16
    windtunnel topology generate --type fat_tree --set radix=64 --set oversubscription=2
    """
    from windtunnel.cli.options import assignments
    from windtunnel.network.named_fabrics import fabric_from
    from windtunnel.network.topology_file import write_topology
    from windtunnel.report.network.network import topology_report
    from windtunnel.report.render.tables import show as show_tables

    given = {name: value for name, value in parameters.items() if value is not None and value is not False}
    fabric = fabric_from({"type": kind or "two_tier", **given, **assignments(settings)}, "")
    found = len(fabric.tier[fabric.tier == 1])
    if num_leaves is not None and num_leaves != found:
        click.echo(
            f"note: --num-leaves {num_leaves} does not fit; the GPUs need {format_count(found, 'leaf', 'leaves')}",
            err=True,
        )
    path = out or Path(fabric.name)
    if path.exists() and not overwrite:
        raise InputError(f"{path} exists already", "choose another --out, or replace it with --overwrite")
    write_topology(fabric, path)
    show_tables(*topology_report(fabric))
    click.echo(f"written to {path}", err=True)


@command.command(cls=Verb, short_help="Show what a topology consists of.")
@click.argument("topology")
@failure_options
@option("--html", section=_OUT, type=WRITTEN_FILE, metavar="FILE", help="Write a drawing.")
@option("--json", "as_json", section=_OUT, is_flag=True, help="Print JSON.")
def show(
    topology: str, fail_links: tuple[str, ...], fail_nodes: tuple[int, ...], html: Path | None, as_json: bool
) -> None:
    """Show what a topology consists of; TOPOLOGY is a file, a type with parameters, or a node of the catalog.

    \b
    windtunnel topology show spectrum_x:num_gpus=128,num_spines=8 --html fabric.html
    windtunnel topology show dgx_h100:num_servers=4
    """
    from windtunnel.report.documents import as_text
    from windtunnel.report.network.drawing import write_drawing
    from windtunnel.report.network.network import topology_document, topology_report
    from windtunnel.report.render.tables import show as show_tables

    fabric = fabric_named(topology, fail_links, fail_nodes)
    if html is not None:
        write_drawing(fabric, html)
        click.echo(f"written to {html}", err=True)
    if as_json:
        click.echo(as_text(topology_document(fabric)))
    else:
        show_tables(*topology_report(fabric))


@command.command(cls=Verb, short_help="Check that every GPU reaches every other.")
@click.argument("topology")
@failure_options
def check(topology: str, fail_links: tuple[str, ...], fail_nodes: tuple[int, ...]) -> None:
    """Check counts, links, units and that every GPU reaches every other, also after failures.

    \b
    windtunnel topology check Spectrum-X_128g_8gps_400Gbps_H100
    windtunnel topology check spectrum_x:num_gpus=128,num_spines=8 --fail-node 152
    """
    from windtunnel.network import fabric as fabrics

    fabric = fabric_named(topology, fail_links, fail_nodes)
    fabrics.check(fabric)
    click.echo(
        f"{fabric.name}: {format_count(fabric.num_gpus, 'GPU')}, {format_count(fabric.num_links, 'link')}, "
        "every GPU reaches every other"
    )


def _pair(text: str) -> tuple[int, int]:
    one, dash, other = text.partition("-")
    if not (dash and one.isdecimal() and other.isdecimal()):
        raise InputError(f"--fail-link: {text!r} is not two node ids, as 0-128")
    return int(one), int(other)
