"""`windtunnel mcp`: answer agents over the Model Context Protocol, on stdin and stdout."""

from windtunnel.cli.verbs import Options
from windtunnel.errors import MissingExtraError


def command(_options: Options) -> None:
    """Serve tools until stdin ends."""
    try:
        from windtunnel.agents.server import server
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package not in ("mcp", "pydantic"):
            raise
        raise MissingExtraError(package, "agents") from None

    server().run("stdio")
