"""Which address shows what: every page, and below `/api` the same as a document."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from windtunnel.errors import did_you_mean
from windtunnel.web import run_page, runs_page
from windtunnel.web.dashboard import Dashboard
from windtunnel.web.frame import Query
from windtunnel.web.results import NotThereError

Show = Callable[[Dashboard, str, Query], Any]
"""Given the rest of the path and the fields of the address or form: a `View`, a `Download` or a document."""


@dataclass(frozen=True)
class Route:
    """What an address shows to whom."""

    page: Show
    document: Show | None = None
    """Below `/api`; None: there is none."""
    takes_posts: bool = False


ROUTES: Mapping[str, Route] = {
    "": Route(runs_page.page),
    "runs": Route(runs_page.page, runs_page.document),
    "run": Route(run_page.overview, run_page.document),
    "requests": Route(run_page.requests, run_page.requests_document),
    "scenario": Route(run_page.scenario),
}
"""First part of an address -> what is there."""


def answer(dashboard: Dashboard, path: str, query: Query, is_post: bool = False) -> Any:
    """What is at an address: a `View`, a `Download`, or below `/api` a document.

    Raises:
        NotThereError: nothing is.
        InputError: what was asked for cannot be.
    """
    asked = path.strip("/").removeprefix("api/") if path.startswith("/api/") else path.strip("/")
    part, _, rest = asked.partition("/")
    route = ROUTES.get(part)
    show = None if route is None else route.document if path.startswith("/api/") else route.page
    if route is None or show is None or (is_post and not route.takes_posts):
        raise NotThereError(f"there is no page {path!r}", did_you_mean(part, filter(None, ROUTES)))
    return show(dashboard, rest, query)
