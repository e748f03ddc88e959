"""`windtunnel mcp`: answer agents over the Model Context Protocol, on stdin and stdout."""

from windtunnel.cli.verbs import Options
from windtunnel.errors import needing


def command(_options: Options) -> None:
    """Serve tools until stdin ends."""
    with needing("agents", "mcp", "pydantic"):
        from windtunnel.agents.server import server

    server().run("stdio")
