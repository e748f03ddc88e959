"""`windtunnel dashboard`: results of a folder in the browser, and scenarios tried there."""

import click

from windtunnel.cli.output import remark
from windtunnel.cli.verbs import Options
from windtunnel.errors import needing
from windtunnel.schema import json_text


def command(options: Options) -> None:
    """Serve the dashboard of a folder until Ctrl-C."""
    with needing("dashboard", "starlette", "uvicorn"):
        from windtunnel.dashboard.listening import HOST, is_loopback
        from windtunnel.dashboard.server import DashboardServer

    from windtunnel.dashboard.view import dashboard_of

    folder, host = options.folder, options.host
    with DashboardServer(dashboard_of(folder), host or HOST, options.port) as server:
        url = f"{server.url}/"

        def announce() -> None:
            if host is not None and not is_loopback(host):
                remark(f"warning: anyone who reaches {host} can read the results and run simulations here")
            document = {"url": url, "folder": str(folder.resolve())}
            click.echo(json_text(document) if options.json else f"{folder}: {url} (Ctrl-C ends it)")
            if options.opens:
                click.launch(url)

        try:
            server.serve(announce)
        except KeyboardInterrupt:
            remark("the dashboard has ended")
