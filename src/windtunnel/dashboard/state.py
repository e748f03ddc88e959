"""The state of a dashboard that outlives a request."""

import threading
from dataclasses import dataclass, field
from pathlib import Path

from windtunnel.dashboard.results import Results
from windtunnel.errors import InputError
from windtunnel.search.watch import Watched


@dataclass(frozen=True)
class Dashboard:
    """The results, the lock and the searches behind the pages."""

    results: Results
    running: threading.Lock = field(default_factory=threading.Lock)
    """Taken while something is simulated: one at a time is fastest for all."""
    watched: dict[str, Watched] = field(default_factory=dict)
    """Searches that were opened, by the digest of their space."""


def dashboard_of(folder: Path) -> Dashboard:
    """Return the dashboard of a folder of results.

    Raises:
        InputError: there is no such folder.
    """
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise InputError(f"{folder} {what}; a folder of results is needed", "windtunnel simulate ... --out FOLDER/NAME")
    return Dashboard(Results(folder))
