"""`windtunnel topology`: generate, show and check networks of GPUs."""

from pathlib import Path

import click

from windtunnel.cli.network.options import fabric_with_failures
from windtunnel.cli.options import assignments
from windtunnel.cli.output import answer, remark, write_page
from windtunnel.cli.verbs import Options
from windtunnel.files import check_replaceable, write_text
from windtunnel.network import fabric as fabrics
from windtunnel.network.topology import fabric_from
from windtunnel.network.topology_file import topology_text
from windtunnel.report.network.network import topology_document, topology_report
from windtunnel.report.render.terminal import show as show_report
from windtunnel.units import format_count

OF_COMMAND = ("kind", "settings", "num_leaves", "out", "overwrite")
"""Options of `generate` that are no fields of the type."""


def generate(options: Options) -> None:
    """Write a topology file, and show what it consists of."""
    given = {name: value for name, value in vars(options).items() if name not in OF_COMMAND}
    given = {name: value for name, value in given.items() if value is not None and value is not False}
    fabric = fabric_from({"type": options.kind or "two_tier", **given, **assignments(options.settings)}, "")
    needed = len(fabric.tier[fabric.tier == 1])
    if options.num_leaves is not None and options.num_leaves != needed:
        leaves = format_count(needed, "leaf", "leaves")
        remark(f"note: --num-leaves {options.num_leaves} does not fit; the GPUs need {leaves}")
    path = options.out or Path(fabric.name)
    check_replaceable(path, options.overwrite)
    write_text(path, topology_text(fabric))
    show_report(topology_report(fabric))
    remark(f"wrote {path}")


def show(options: Options) -> None:
    """Show what a topology consists of."""
    fabric = fabric_with_failures(options, options.topology)
    write_page(options.html, topology_report, fabric)
    answer(options.as_json, topology_document, topology_report, fabric)


def check(options: Options) -> None:
    """Check counts, links, units and that every GPU reaches every other, also after failures."""
    fabric = fabric_with_failures(options, options.topology)
    fabrics.check(fabric)
    click.echo(
        f"{fabric.name}: {format_count(fabric.num_gpus, 'GPU')}, {format_count(fabric.num_links, 'link')}, "
        "every GPU reaches every other"
    )
