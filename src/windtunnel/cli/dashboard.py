"""`windtunnel dashboard`: results of a folder in the browser, and scenarios tried there."""

from pathlib import Path

import click

from windtunnel.cli.options import Verb, option

_WHERE = "Where it is served"


@click.command(cls=Verb, epilog="See docs/guides/dashboard.md.")
@click.argument("folder", default=".", type=click.Path(path_type=Path), metavar="[FOLDER]")
@option("--port", section=_WHERE, type=int, default=0, metavar="N", help="Of the address.  [a free one]")
@option("--host", section=_WHERE, metavar="ADDRESS", help="An interface that others reach too.  [127.0.0.1]")
@option("--open", "opens", section=_WHERE, is_flag=True, help="Open it in the browser.")
@option("--json", "as_json", section="General", is_flag=True, help="Print the address as JSON.")
def command(folder: Path, port: int, host: str | None, opens: bool, as_json: bool) -> None:
    """Show the results in FOLDER in the browser, compare them and try scenarios.

    It runs on this machine, loads nothing from elsewhere, and ends with Ctrl-C.

    \b
    windtunnel dashboard runs
    windtunnel dashboard runs --port 8080 --open
    """
    from windtunnel.dashboard.server import HOST, Server
    from windtunnel.dashboard.state import dashboard_of

    with Server(dashboard_of(folder), host or HOST, port) as server:
        try:
            _announce(server.url, folder, host, as_json)
            if opens:
                click.launch(server.url)
            server.serve_forever()
        except KeyboardInterrupt:
            click.echo("the dashboard has ended", err=True)


def _announce(url: str, folder: Path, host: str | None, as_json: bool) -> None:
    """Say where it is, and to whom."""
    from windtunnel.dashboard.server import is_loopback
    from windtunnel.report.documents import as_text

    if host is not None and not is_loopback(host):
        click.echo(f"warning: whoever reaches {host} can read the results and run simulations here", err=True)
    click.echo(
        as_text({"url": url, "folder": str(folder.resolve())}) if as_json else f"{folder}: {url} (Ctrl-C ends it)"
    )
