"""`windtunnel dashboard`: results of a folder in the browser, and scenarios tried there."""

from pathlib import Path

import click

from windtunnel.cli.options import PATH, Verb, options_in
from windtunnel.cli.output import remark
from windtunnel.errors import MissingExtraError

EXTRA = ("starlette", "uvicorn")
"""Packages of the extra `dashboard`."""


@click.command(cls=Verb, epilog="See docs/guides/dashboard.md.")
@click.argument("folder", default=".", type=PATH, metavar="[FOLDER]")
@options_in("dashboard", "json")
def command(folder: Path, port: int, host: str | None, opens: bool, as_json: bool) -> None:
    """Show the results in FOLDER in the browser, compare them and try scenarios.

    It runs on this machine, loads nothing from elsewhere, and ends with Ctrl-C.

    \b
    windtunnel dashboard runs
    windtunnel dashboard runs --port 8080 --open
    """
    try:
        from windtunnel.dashboard.server import HOST, DashboardServer
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package not in EXTRA:
            raise
        raise MissingExtraError(package, "dashboard") from None

    from windtunnel.dashboard.state import dashboard_of

    with DashboardServer(dashboard_of(folder), host or HOST, port) as server:

        def announce() -> None:
            _announce(server.url, folder, host, as_json)
            if opens:
                click.launch(server.url)

        try:
            server.serve(announce)
        except KeyboardInterrupt:
            remark("the dashboard has ended")


def _announce(url: str, folder: Path, host: str | None, as_json: bool) -> None:
    """Say where it is, and to whom."""
    from windtunnel.dashboard.server import is_loopback

    if host is not None and not is_loopback(host):
        remark(f"warning: anyone who reaches {host} can read the results and run simulations here")
    if as_json:
        from windtunnel.report.render.json import as_text

        click.echo(as_text({"url": url, "folder": str(folder.resolve())}))
    else:
        click.echo(f"{folder}: {url} (Ctrl-C ends it)")
