"""Which windtunnel made a result."""

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version


def version() -> str:
    """The version of the installed package; `unknown` where its files run without being installed."""
    try:
        return installed_version("windtunnel")
    except PackageNotFoundError:
        return "unknown"
