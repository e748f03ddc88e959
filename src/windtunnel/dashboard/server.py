"""The dashboard's server: every page, below `/api` the same as a document, and who may ask for them.

Everything that a page needs is shipped with the package, and the content security policy lets a browser load nothing
else. Against other sites in the same browser: a request must name this machine as its host (DNS rebinding), and what
changes anything must come from a page of the dashboard (its `Origin`).
"""

import asyncio
import hashlib
import ipaddress
import mimetypes
import socket
import sys
import threading
import traceback
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from windtunnel.dashboard.listening import HOST, LocalServer
from windtunnel.dashboard.pages import catalog, compare, recommend, run, runs, search, step, timeline, try_scenario
from windtunnel.dashboard.results import NotThereError, Results
from windtunnel.dashboard.view import Dashboard, Download, Moved, Query, View
from windtunnel.errors import InputError, WindtunnelError, did_you_mean
from windtunnel.report.layout import layouts_beside
from windtunnel.report.report import Report
from windtunnel.schema import json_text

KEPT_PAGES = ("", "runs", "run", "requests", "scenario", "step", "compare", "catalog")
"""First parts of the addresses whose answers depend on the address and the files of the results alone."""
ASSETS = ("windtunnel.report", "windtunnel.dashboard")
"""Packages with a folder `assets`; names of the first win."""
MOST_BYTES = 32 << 20
MOST_ANSWER_BYTES = 2 << 20
MOST_HOSTS = 64

Key = tuple[str, bytes]
"""Path and query of an address."""


def tag_of(body: bytes) -> str:
    """Return the ETag of a body."""
    return f'"{hashlib.sha256(body).hexdigest()[:24]}"'


class KeptAnswers:
    """In front of the dashboard's application: sends what it keeps to hosts that `check` lets ask, passes others on."""

    app: ASGIApp
    """Makes the answers, and gives them to `keep`."""

    def __init__(self, results: Results, check: Callable[[str | None], None], headers: Mapping[str, str]) -> None:
        self._results, self._check = results, check
        self._headers = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        self._hosts: set[bytes] = set()
        self._lock = threading.Lock()
        self._answers: OrderedDict[Key, tuple[int, Response]] = OrderedDict()
        self._num_bytes = 0
        self._assets: dict[Key, Response] = {}
        for package in reversed(ASSETS):
            for file in (files(package) / "assets").iterdir():
                if file.is_file():
                    kind, body = mimetypes.guess_type(file.name)[0] or "application/octet-stream", file.read_bytes()
                    self._assets[f"/assets/{file.name}", b""] = Response(body, 200, {"ETag": tag_of(body)}, kind)

    def keep(self, key: Key, version: int, response: Response) -> None:
        """Keep the answer made from a version of the results; the oldest ones go where memory ends."""
        if response.status_code != 200 or len(response.body) > MOST_ANSWER_BYTES:
            return
        with self._lock:
            self._drop(key)
            self._answers[key] = version, response
            self._num_bytes += len(response.body)
            while self._num_bytes > MOST_BYTES:
                self._drop(next(iter(self._answers)))

    def _drop(self, key: Key) -> None:
        kept = self._answers.pop(key, None)
        self._num_bytes -= len(kept[1].body) if kept else 0

    def _kept(self, key: Key) -> Response | None:
        if key in self._assets:
            return self._assets[key]
        with self._lock:
            kept = self._answers.get(key)
        return kept[1] if kept and kept[0] == self._results.version() else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kept = None
        if scope["type"] == "http" and scope["method"] == "GET":
            given = dict(scope["headers"])
            if b"range" not in given and self._may_ask(given.get(b"host", b"")):
                kept = self._kept((scope["path"], scope["query_string"]))
        if kept is None:
            await self.app(scope, receive, send)
            return
        has_it = given.get(b"if-none-match") == kept.headers["etag"].encode()
        names = (b"etag",) if has_it else (b"content-type", b"content-length", b"etag", b"content-disposition")
        headers = [(name, value) for name, value in kept.raw_headers if name in names] + self._headers
        await send({"type": "http.response.start", "status": 304 if has_it else 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if has_it else kept.body})

    def _may_ask(self, host: bytes) -> bool:
        if host not in self._hosts:
            try:
                self._check(host.decode("latin-1"))
            except WindtunnelError:
                return False
            if len(self._hosts) < MOST_HOSTS:
                self._hosts.add(host)
        return True


BACKLOG = 64
MAX_POSTED_BYTES = 1 << 20
HEADERS: Mapping[str, str] = layouts_beside(__file__)
"""Headers of every answer."""

Keep = Callable[[Key, int, Response], None]
Show = Callable[[Dashboard, str, Query], Any]
"""Makes a `View`, a `Download`, a `Moved` or a document from the rest of the path and the fields given."""


@dataclass(frozen=True)
class Page:
    """The page and the document of an address."""

    page: Show
    document: Show | None = None
    """Below `/api`; None: there is none."""
    method: str = "GET"
    """POST: it runs or writes something, and answers only a form of the dashboard."""


PAGES: Mapping[str, Page] = {
    "": Page(runs.page),
    "runs": Page(runs.page, runs.document),
    "run": Page(run.overview, run.document),
    "requests": Page(run.requests, run.requests_document),
    "scenario": Page(run.scenario),
    "timeline": Page(timeline.page, timeline.document),
    "trace": Page(timeline.trace),
    "step": Page(step.page, step.document),
    "compare": Page(compare.page, compare.document),
    "catalog": Page(catalog.page, catalog.document),
    "search": Page(search.page, search.document),
    "try": Page(try_scenario.page),
    "trial": Page(try_scenario.trial, try_scenario.trial_document, "POST"),
    "sweep": Page(try_scenario.sweep, try_scenario.sweep_data, "POST"),
    "save": Page(try_scenario.save, method="POST"),
    "recommend": Page(recommend.page, recommend.document),
    "recommendation": Page(recommend.start, method="POST"),
    "stop": Page(recommend.stop, method="POST"),
}
"""First part of an address -> its page."""


class RefusedError(InputError):
    """A request from another host or site."""


def dashboard_app(dashboard: Dashboard, host: str) -> KeptAnswers:
    """Return the application of a dashboard that listens on `host`."""
    kept = KeptAnswers(dashboard.results, lambda name: check_host(name, host), HEADERS)
    routes: list[BaseRoute] = [Mount("/assets", StaticFiles(packages=[(package, "assets") for package in ASSETS]))]
    for name, page in PAGES.items():
        for address, show in ((f"/{name}", page.page), (f"/api/{name}", page.document)):
            if show is not None:
                endpoint = _endpoint(dashboard, show, kept.keep if name in KEPT_PAGES else None)
                paths = address, f"{address}/{{rest:path}}"
                routes += [Route(path, endpoint, methods=[page.method]) for path in paths]

    async def guard(request: Request, call_next: RequestResponseEndpoint) -> Response:
        try:
            check_host(request.headers.get("host"), host)
            if request.method == "POST":
                check_origin(request.headers.get("origin"), request.headers.get("host"))
            response = await call_next(request)
        except Exception as error:  # noqa: BLE001 a request that fails must not end the connection without an answer
            response = _failed(request, dashboard, error)
        response.headers.update(HEADERS)
        return response

    guarded = Middleware(BaseHTTPMiddleware, dispatch=guard)
    absent = {HTTPException: lambda request, error: _failed(request, dashboard, error)}
    kept.app = Starlette(routes=routes, middleware=[guarded], exception_handlers=absent)
    return kept


def _endpoint(dashboard: Dashboard, show: Show, keep: Keep | None) -> Callable[[Request], Awaitable[Response]]:
    def made(request: Request, query: Query) -> Response:
        version = dashboard.results.version() if keep else 0
        rest = request.path_params.get("rest", "").strip("/")
        response = _response(request, dashboard, show(dashboard, rest, query))
        if keep:
            keep((request.url.path, request.scope["query_string"]), version, response)
        return response

    async def answer(request: Request) -> Response:
        posted = await _posted(request) if request.method == "POST" else []
        query = Query([*request.query_params.multi_items(), *posted])
        return await _in_thread(lambda: made(request, query))

    return answer


async def _posted(request: Request) -> list[tuple[str, str]]:
    """Read the fields of a form; one that is too long, or does not say how long it is, is not read."""
    length = request.headers.get("content-length", "")
    if not length.isdecimal() or int(length) > MAX_POSTED_BYTES:
        raise InputError(f"a request of up to {MAX_POSTED_BYTES:,} bytes, its length given, is needed")
    return parse_qsl((await request.body()).decode("utf-8", "replace"), keep_blank_values=True)


async def _in_thread(work: Callable[[], Response]) -> Response:
    """Run `work` beside the other requests, in a thread that a simulation under way cannot hold Ctrl-C up with."""
    future: Future[Response] = Future()

    def run_work() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 the request's answer tells it
            future.set_exception(error)

    threading.Thread(target=run_work, daemon=True).start()
    return await asyncio.wrap_future(future)


def _response(request: Request, dashboard: Dashboard, shown: Any, status: int = 200) -> Response:
    """Return a page, a file or a document, unless the browser has it already."""
    headers = {}
    if isinstance(shown, Moved):
        return Response(status_code=303, headers={"Location": shown.address})
    if isinstance(shown, Download):
        kind, body = shown.kind, shown.body
        headers["Content-Disposition"] = f'attachment; filename="{shown.name}"'
    elif isinstance(shown, View):
        kind = "text/html; charset=utf-8"
        body = shown.page(request.url.path, dashboard.results.folder).encode("utf-8", "replace")
    else:
        kind, body = "application/json", f"{json_text(shown)}\n".encode()
    headers["ETag"] = tag_of(body)
    if status == 200 and request.headers.get("if-none-match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    return Response(body, status, headers, kind)


def _failed(request: Request, dashboard: Dashboard, error: Exception) -> Response:
    """Return one sentence on what is wrong, as a page or a document, whichever was requested."""
    path, status = request.url.path, 500
    message, hint = f"sorry, this is a bug in windtunnel ({type(error).__name__}: {error})", None
    if isinstance(error, HTTPException):
        status, names = error.status_code, path.removeprefix("/api").strip("/").partition("/")
        message, hint = f"there is no page {path!r}", did_you_mean(names[0], filter(None, PAGES))
        if status == 405:
            message, hint = f"{path} does not answer {request.method}", "pages that run something answer their form"
    elif isinstance(error, WindtunnelError):
        message, hint = error.message, error.hint
        known = {RefusedError: 403, NotThereError: 404, InputError: 400}
        status = next((code for kind, code in known.items() if isinstance(error, kind)), 500)
    elif isinstance(error, MemoryError):
        message, hint = "this machine's memory does not hold that", "fewer requests, replicas or devices take less"
    elif isinstance(error, RecursionError):
        status, message = 400, "something in it is nested too deeply"
    else:
        traceback.print_exception(error, file=sys.stderr)
    if path.startswith("/api/"):
        return _response(request, dashboard, {"error": message, "hint": hint}, status)
    title = {403: "Refused", 404: "Not found", 500: "Failed"}.get(status, "Not possible")
    report = Report(title, [hint or ""], verdict=message, is_good=False)
    return _response(request, dashboard, View(report), status)


def check_host(host: str | None, own_host: str) -> None:
    """Raise RefusedError unless a request names this machine: by an IP address, as localhost, or as it was told.

    A page of another site whose name was made to lead here (DNS rebinding) sends that name; it cannot send an address.
    """
    try:
        name = (urlsplit(f"//{host or ''}").hostname or "").lower()
    except ValueError:
        name = ""
    if name in ("localhost", own_host.lower(), socket.gethostname().lower()):
        return
    try:
        ipaddress.ip_address(name)
    except ValueError:
        raise RefusedError(
            f"this dashboard is not at {name or 'no name'}", "open the address that it printed"
        ) from None


def check_origin(origin: str | None, host: str | None) -> None:
    """Raise RefusedError unless what is posted comes from a page of the dashboard itself."""
    if not host or origin != f"http://{host}":
        raise RefusedError(f"a page of {origin or 'nowhere'} may not post to this dashboard")


class DashboardServer(LocalServer):
    """A server of one dashboard."""

    def __init__(self, dashboard: Dashboard, host: str = HOST, port: int = 0) -> None:
        super().__init__(dashboard_app(dashboard, host), host, port, backlog=BACKLOG, http="h11", loop="asyncio")
