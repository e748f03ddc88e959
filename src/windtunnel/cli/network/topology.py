"""`windtunnel topology`: generate, show and check networks of GPUs."""

from pathlib import Path
from typing import Any

import click

from windtunnel.cli.network.options import Failures
from windtunnel.cli.options import Verb, assignments, options_in, options_of
from windtunnel.cli.output import answer, check_replaceable, remark, write_page
from windtunnel.units import format_count


@click.group(no_args_is_help=False, context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Generate, show and check networks of GPUs."""


@command.command(cls=Verb)
@options_in("topology_generate")
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
    from windtunnel.network.named_fabrics import fabric_from
    from windtunnel.network.topology_file import write_topology
    from windtunnel.report.network.network import topology_report
    from windtunnel.report.render.terminal import show as show_report

    given = {name: value for name, value in parameters.items() if value is not None and value is not False}
    fabric = fabric_from({"type": kind or "two_tier", **given, **assignments(settings)}, "")
    needed = len(fabric.tier[fabric.tier == 1])
    if num_leaves is not None and num_leaves != needed:
        leaves = format_count(needed, "leaf", "leaves")
        remark(f"note: --num-leaves {num_leaves} does not fit; the GPUs need {leaves}")
    path = out or Path(fabric.name)
    check_replaceable(path, overwrite)
    write_topology(fabric, path)
    show_report(topology_report(fabric))
    remark(f"wrote {path}")


@command.command(cls=Verb, short_help="Show what a topology consists of.")
@click.argument("topology")
@options_of(Failures)
@options_in("topology_show")
def show(failures: Failures, topology: str, html: Path | None, as_json: bool) -> None:
    """Show what a topology consists of; TOPOLOGY is a file, a type with parameters, or a node of the catalog.

    \b
    windtunnel topology show spectrum_x:num_gpus=128,num_spines=8 --html fabric.html
    windtunnel topology show dgx_h100:num_servers=4
    """
    from windtunnel.report.network.network import topology_document, topology_report

    fabric = failures.fabric(topology)
    write_page(html, topology_report, fabric)
    answer(as_json, topology_document, topology_report, fabric)


@command.command(cls=Verb, short_help="Check that every GPU reaches every other.")
@click.argument("topology")
@options_of(Failures)
def check(failures: Failures, topology: str) -> None:
    """Check counts, links, units and that every GPU reaches every other, also after failures.

    \b
    windtunnel topology check Spectrum-X_128g_8gps_400Gbps_H100
    windtunnel topology check spectrum_x:num_gpus=128,num_spines=8 --fail-node 152
    """
    from windtunnel.network import fabric as fabrics

    fabric = failures.fabric(topology)
    fabrics.check(fabric)
    click.echo(
        f"{fabric.name}: {format_count(fabric.num_gpus, 'GPU')}, {format_count(fabric.num_links, 'link')}, "
        "every GPU reaches every other"
    )
