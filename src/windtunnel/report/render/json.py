"""Results as JSON documents: SI numbers, units in the names, independent of machine and time; and who made them."""

import sys
from pathlib import Path


def version() -> str:
    """Return the version of the installed package; `unknown` where it is not installed."""
    for folder in sys.path:
        for path in Path(folder or ".").glob("windtunnel-*.dist-info"):
            return path.stem.partition("-")[2]
    from importlib.metadata import PackageNotFoundError  # late: it loads the parser of mails
    from importlib.metadata import version as installed_version

    try:
        return installed_version("windtunnel")
    except PackageNotFoundError:
        return "unknown"
