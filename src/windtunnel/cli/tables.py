"""`windtunnel tables`: measured tables that price operators: list, fetch and check them."""

from typing import Any

import click

from windtunnel.cli.options import Verb, options_in
from windtunnel.cli.output import answer, remark
from windtunnel.errors import check_known


@click.group(no_args_is_help=False, context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """List, fetch and check the measured tables that price operators."""


@command.command(name="list", cls=Verb)
@options_in("tables", "json")
def list_tables(as_json: bool, **filters: Any) -> None:
    """List every measured table that is known: installed, fetched, or to be fetched.

    \b
    windtunnel tables list --device h200_sxm --engine vllm --kind experts
    """
    from windtunnel.report import tables

    answer(as_json, tables.list_document, tables.list_report, tables.chosen(**filters))


@command.command(cls=Verb, short_help="Fetch tables of other versions out of published wheels.")
@click.argument("names", nargs=-1, metavar="[NAME]...")
def fetch(names: tuple[str, ...]) -> None:
    """Fetch the tables and model configs of published wheels into the user's cache; NAMEs are sources of `list`.

    Without a NAME, the newest wheel. pip downloads a wheel with its own settings; nothing is installed.

    \b
    windtunnel tables fetch
    windtunnel tables fetch aiconfigurator-0.8 aiconfigurator-0.10
    """
    from windtunnel.cli.progress import status
    from windtunnel.pricing.aiconfigurator.inventory import installed_systems
    from windtunnel.pricing.aiconfigurator.published import fetch as fetch_wheel
    from windtunnel.pricing.aiconfigurator.published import published

    known = list(published().wheels)
    for name in names:
        check_known(name, known, f"there is no source {name!r}", f"one of: {', '.join(known)}")
    for name in names or known[:1]:
        with status() as say:
            folder = fetch_wheel(name, installed_systems(), say)
        num_tables, num_configs = (len(list(folder.rglob(pattern))) for pattern in ("*_perf.parquet", "models/*.json"))
        remark(f"{name}: {num_tables:,} tables and {num_configs:,} model configs in {folder}")


@command.command(cls=Verb, short_help="List rows that no engine would show again.")
@options_in("tables", "tables_check", "json")
def check(as_json: bool, by_table: bool, **filters: Any) -> None:
    """List suspect rows of the tables at hand, with the reason and what pricing takes instead.

    \b
    windtunnel tables check --device h100_sxm --engine trtllm --kind experts
    windtunnel tables check --by-table
    """
    from windtunnel.report import tables

    found = tables.suspect_rows(tables.chosen(**filters))
    answer(as_json, tables.check_document, tables.counts_report if by_table else tables.check_report, found)
