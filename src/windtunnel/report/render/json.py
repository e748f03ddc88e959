"""Results as JSON documents: SI numbers, units in the names, independent of machine and time; and who made them."""

import sys
from operator import methodcaller
from pathlib import Path
from typing import Any

import msgspec


def as_text(document: Any) -> str:
    """Return a document as indented JSON; numbers of numpy are plain ones."""
    return msgspec.json.format(msgspec.json.encode(document, enc_hook=methodcaller("item")), indent=2).decode()


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
