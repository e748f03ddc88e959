"""Pages of the dashboard: what they show, the frame around it, and the state that outlives a request."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from starlette.datastructures import QueryParams

from windtunnel.dashboard.recommending import Recommendations
from windtunnel.dashboard.results import Results
from windtunnel.errors import InputError
from windtunnel.report.render.html import template
from windtunnel.report.report import Report
from windtunnel.search.study import Watched

PAGES = {
    "": "Runs",
    "compare": "Compare",
    "try": "Try",
    "recommend": "Recommend",
    "search": "Search",
    "catalog": "Catalog",
}
"""First part of a page's address -> its name in the menu."""

Query = QueryParams
"""Fields of an address or a form."""


@dataclass(frozen=True)
class Dashboard:
    """The results, the lock and the searches behind the pages."""

    results: Results
    running: threading.Lock = field(default_factory=threading.Lock)
    """Taken while something is simulated: one at a time is fastest for all."""
    watched: dict[str, Watched] = field(default_factory=dict)
    """Searches that were opened, by the digest of their space."""
    recommendations: Recommendations = field(default_factory=Recommendations)


def dashboard_of(folder: Path) -> Dashboard:
    """Return the dashboard of a folder of results; InputError where there is no such folder."""
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise InputError(f"{folder} {what}; a folder of results is needed", "windtunnel simulate ... --out FOLDER/NAME")
    return Dashboard(Results(folder))


@dataclass(frozen=True)
class View:
    """A page: its report, and the frame around it."""

    report: Report
    tabs: Mapping[str, str] = field(default_factory=dict)
    """Label -> address of pages that belong together."""
    here: str = ""
    """Label of this one among them."""
    filters: str = ""
    """What the field that filters the tables says; empty: there is none."""
    template: str = "view.html"
    values: Mapping[str, Any] = field(default_factory=dict)
    """What the template needs besides."""
    scripts: Sequence[str] = ()
    """Names in `assets/`."""
    is_live: bool = False
    """Whether the browser reloads the page while it is open."""

    def page(self, address: str, folder: Path) -> str:
        """Return the whole page, as its own path `address` shows it of the results in `folder`."""
        here = address.strip("/").partition("/")[0]
        here = here if here in PAGES else "try" if here in ("trial", "sweep", "save") else ""
        values = {"view": self, "pages": PAGES, "page": here, "folder": folder, "link": link, **self.values}
        return str(template(self.template).render(values))


@dataclass(frozen=True)
class Download:
    """A file to download."""

    name: str
    kind: str
    body: bytes


@dataclass(frozen=True)
class Moved:
    """Another address of the dashboard, to go to."""

    address: str


def link(*parts: str, **query: str) -> str:
    """Return an address within the dashboard: `link("run", "70b/tp4", page="2")` is `/run/70b/tp4?page=2`."""
    path = "/" + "/".join(quote(part, safe="/") for part in parts)
    return f"{path}?{urlencode(query)}" if query else path
