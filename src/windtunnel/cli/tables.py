"""`windtunnel tables`: measured tables that price operators: list, fetch and check them."""

from windtunnel.cli.output import answer, remark, status
from windtunnel.cli.verbs import Options
from windtunnel.errors import check_known
from windtunnel.pricing.aiconfigurator import published
from windtunnel.pricing.aiconfigurator.inventory import installed_systems
from windtunnel.report import tables


def list_tables(options: Options) -> None:
    """List the known tables that fit the filters."""
    answer(options, tables.list_document, tables.list_report, tables.chosen(**options.of("tables")))


def fetch(options: Options) -> None:
    """Fetch wheels by name, or the newest one."""
    known = list(published.published().wheels)
    for name in options.names:
        check_known(name, known, f"there is no source {name!r}", f"one of: {', '.join(known)}")
    for name in options.names or known[:1]:
        with status() as say:
            folder = published.fetch(name, installed_systems(), say)
        num_tables, num_configs = (len(list(folder.rglob(pattern))) for pattern in ("*_perf.parquet", "models/*.json"))
        remark(f"{name}: {num_tables:,} tables and {num_configs:,} model configs in {folder}")


def check(options: Options) -> None:
    """List the suspect rows of tables that fit the filters."""
    found = tables.suspect_rows(tables.chosen(**options.of("tables")))
    report = tables.counts_report if options.by_table else tables.check_report
    answer(options, tables.check_document, report, found)
