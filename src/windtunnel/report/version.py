"""The version of windtunnel that made a result."""

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version


def version() -> str:
    """Return the version of the installed package; `unknown` where it is not installed."""
    try:
        return installed_version("windtunnel")
    except PackageNotFoundError:
        return "unknown"
