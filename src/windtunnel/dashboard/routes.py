"""Routes of the dashboard: every page, and below `/api` the same as a document."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from windtunnel.dashboard.frame import Query
from windtunnel.dashboard.pages import catalog as catalog_page
from windtunnel.dashboard.pages import compare as compare_page
from windtunnel.dashboard.pages import run as run_page
from windtunnel.dashboard.pages import runs as runs_page
from windtunnel.dashboard.pages import search as search_page
from windtunnel.dashboard.pages import step as step_page
from windtunnel.dashboard.pages import timeline
from windtunnel.dashboard.pages import try_scenario as try_page
from windtunnel.dashboard.results import NotThereError
from windtunnel.dashboard.state import Dashboard
from windtunnel.errors import InputError, did_you_mean

Show = Callable[[Dashboard, str, Query], Any]
"""Makes a `View`, a `Download` or a document from the rest of the path and the fields of the address or form."""


@dataclass(frozen=True)
class Route:
    """The page and the document of an address."""

    page: Show
    document: Show | None = None
    """Below `/api`; None: there is none."""
    takes_posts: bool = False
    """Whether it runs or writes something: it answers only a form's POST from a page of the dashboard."""


ROUTES: Mapping[str, Route] = {
    "": Route(runs_page.page),
    "runs": Route(runs_page.page, runs_page.document),
    "run": Route(run_page.overview, run_page.document),
    "requests": Route(run_page.requests, run_page.requests_document),
    "scenario": Route(run_page.scenario),
    "timeline": Route(timeline.page, timeline.document),
    "trace": Route(timeline.trace),
    "step": Route(step_page.page, step_page.document),
    "compare": Route(compare_page.page, compare_page.document),
    "catalog": Route(catalog_page.page, catalog_page.document),
    "search": Route(search_page.page, search_page.document),
    "try": Route(try_page.page),
    "trial": Route(try_page.trial, try_page.trial_document, takes_posts=True),
    "sweep": Route(try_page.sweep, try_page.sweep_data, takes_posts=True),
    "save": Route(try_page.save, takes_posts=True),
}
"""First part of an address -> its route."""


def answer(dashboard: Dashboard, path: str, query: Query, is_post: bool = False) -> Any:
    """Return the answer of an address: a `View`, a `Download`, or below `/api` a document.

    Raises:
        NotThereError: nothing is.
        InputError: the request cannot be answered.
    """
    route_path = path.strip("/").removeprefix("api/") if path.startswith("/api/") else path.strip("/")
    part, _, rest = route_path.partition("/")
    route = ROUTES.get(part)
    show = None if route is None else route.document if path.startswith("/api/") else route.page
    if route is None or show is None:
        raise NotThereError(f"there is no page {path!r}", did_you_mean(part, filter(None, ROUTES)))
    if is_post != route.takes_posts:
        raise InputError(f"{path} {'takes' if route.takes_posts else 'does not take'} what a form posts")
    return show(dashboard, rest, query)
