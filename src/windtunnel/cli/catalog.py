"""`windtunnel catalog`: models, devices and the rest that are known by name."""

from windtunnel.catalog import KINDS
from windtunnel.catalog.add import add_model
from windtunnel.cli.output import answer, remark_left_out
from windtunnel.cli.verbs import Options
from windtunnel.errors import InputError, check_known
from windtunnel.report import catalog


def command(options: Options) -> None:
    """List the entries of a kind, or show one; add a model."""
    kind, hint = options.kind, f"one of: {', '.join(KINDS)}; or add"
    if kind == "add":
        if options.name is None:
            raise InputError("catalog add needs a model", "a config.json, its folder, or a name of huggingface.co")
        added = add_model(options.name, options.like, options.called)
        remark_left_out(added.model)
        answer(options, catalog.added_document, catalog.added_report, added)
        return
    if options.like or options.called:
        raise InputError("--like and --as are of a model that is added", "windtunnel catalog add CONFIG --like MODEL")
    if kind is None:
        raise InputError("catalog needs to know what to list", hint)
    check_known(kind, KINDS, f"the catalog has no {kind!r}", hint)
    if options.name:
        answer(options, catalog.entry, catalog.entry_report, kind, options.name)
    else:
        answer(options, catalog.entries, catalog.list_report, kind)
