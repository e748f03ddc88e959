"""`windtunnel dashboard`: results of a folder in the browser, and scenarios tried there."""

import click

from windtunnel.cli.output import remark
from windtunnel.cli.verbs import Options
from windtunnel.errors import MissingExtraError
from windtunnel.report.render.json import as_text

EXTRA = ("starlette", "uvicorn")
"""Packages of the extra `dashboard`."""


def command(options: Options) -> None:
    """Serve the dashboard of a folder until Ctrl-C."""
    try:
        from windtunnel.dashboard.listening import is_loopback
        from windtunnel.dashboard.server import HOST, DashboardServer
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package not in EXTRA:
            raise
        raise MissingExtraError(package, "dashboard") from None

    from windtunnel.dashboard.view import dashboard_of

    folder, host = options.folder, options.host
    with DashboardServer(dashboard_of(folder), host or HOST, options.port) as server:

        def announce() -> None:
            if host is not None and not is_loopback(host):
                remark(f"warning: anyone who reaches {host} can read the results and run simulations here")
            document = {"url": server.url, "folder": str(folder.resolve())}
            click.echo(as_text(document) if options.as_json else f"{folder}: {server.url} (Ctrl-C ends it)")
            if options.opens:
                click.launch(server.url)

        try:
            server.serve(announce)
        except KeyboardInterrupt:
            remark("the dashboard has ended")
