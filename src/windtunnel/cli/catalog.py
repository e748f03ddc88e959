"""`windtunnel catalog`: models, devices and the rest that are known by name."""

import click

from windtunnel.cli.options import Verb
from windtunnel.cli.output import answer
from windtunnel.errors import InputError, check_known

KINDS = ("models", "devices", "nodes", "engines", "traces", "clients", "calibrations")


@click.command(cls=Verb)
@click.argument("kind", required=False, metavar="|".join(KINDS))
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(kind: str | None, name: str | None, as_json: bool) -> None:
    """List known models, devices, nodes, engines, traces, clients or calibrations; with a NAME, one in full.

    \b
    windtunnel catalog devices
    windtunnel catalog models llama-3.1-70b --json
    """
    hint = f"one of: {', '.join(KINDS)}"
    if kind is None:
        raise InputError("catalog needs to know what to list", hint)
    check_known(kind, KINDS, f"the catalog has no {kind!r}", hint)
    from windtunnel.report import catalog

    if name:
        answer(as_json, catalog.entry, catalog.entry_report, kind, name)
    else:
        answer(as_json, catalog.entries, catalog.list_report, kind)
