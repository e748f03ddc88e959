"""`windtunnel catalog`: models, devices and the rest that are known by name."""

from windtunnel.catalog import KINDS
from windtunnel.cli.output import answer
from windtunnel.cli.verbs import Options
from windtunnel.errors import InputError, check_known
from windtunnel.report import catalog


def command(options: Options) -> None:
    """List the entries of a kind, or show one."""
    kind, hint = options.kind, f"one of: {', '.join(KINDS)}"
    if kind is None:
        raise InputError("catalog needs to know what to list", hint)
    check_known(kind, KINDS, f"the catalog has no {kind!r}", hint)
    if options.name:
        answer(options, catalog.entry, catalog.entry_report, kind, options.name)
    else:
        answer(options, catalog.entries, catalog.list_report, kind)
