"""The dashboard's HTTP server: answers on one address of this machine, to pages of its own only.

Everything that a page needs is shipped with the package, and the content security policy lets a browser load nothing
else. Against other sites in the same browser: a request must name this machine as its host (DNS rebinding), and what
changes anything must come from a page of the dashboard (its `Origin`).
"""

import hashlib
import ipaddress
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

from windtunnel.dashboard.frame import Download, View, framed, problem
from windtunnel.dashboard.results import NotThereError
from windtunnel.dashboard.routes import answer
from windtunnel.dashboard.state import Dashboard
from windtunnel.errors import InputError, WindtunnelError
from windtunnel.report.documents import as_text
from windtunnel.report.render.html import SCRIPT, STYLE
from windtunnel.report.search.page import PLOT

HOST = "127.0.0.1"
MOST_POSTED_BYTES = 1 << 20
IDLE_S = 30.0
"""Seconds after which an idle connection is closed."""

ASSETS = Path(__file__).with_name("assets")
SHARED_ASSETS = {file.name: file for file in (STYLE, SCRIPT, PLOT)}
"""Files that pages of reports share."""
KINDS = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    # Not `no-referrer`: the Origin of a form would be `null` then.
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True)
class Answer:
    """A response."""

    status: HTTPStatus
    kind: str
    body: bytes
    filename: str = ""
    """Name of a downloaded file."""


class DashboardServer(ThreadingHTTPServer):
    """A server of one dashboard.

    Args:
        dashboard: what it shows.
        host: the interface to listen on.
        port: 0 takes a free one.

    Raises:
        InputError: the port is taken, or there is no such interface.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, dashboard: Dashboard, host: str = HOST, port: int = 0) -> None:
        self.dashboard = dashboard
        self.host = host
        if ":" in host:
            self.address_family = socket.AF_INET6
        try:
            super().__init__((host, port), DashboardHandler)
        except OSError as error:
            hint = "leave --port out for a free one" if port else "leave --host out for this machine alone"
            raise InputError(
                f"{host}:{port} cannot be listened on: {(error.strerror or str(error)).lower()}", hint
            ) from None
        except OverflowError:
            raise InputError(f"--port is {port}; 0 to 65535 is possible") from None

    @property
    def url(self) -> str:
        """Return the address of the dashboard."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.server_address[1]}/"

    def server_bind(self) -> None:
        # http.server's own looks its host's name up, which takes seconds where DNS does not answer.
        if self.allow_reuse_address:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = self.host, self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):  # a browser that went away
            super().handle_error(request, client_address)


class DashboardHandler(BaseHTTPRequestHandler):
    """The answers on one connection."""

    protocol_version = "HTTP/1.1"
    timeout = IDLE_S
    server: DashboardServer
    server_version: ClassVar[str] = "windtunnel"  # type: ignore[misc]
    sys_version: ClassVar[str] = ""  # type: ignore[misc]

    def do_GET(self) -> None:
        self._answer(self._got)

    def do_HEAD(self) -> None:
        self._answer(self._got)

    def do_POST(self) -> None:
        self._answer(self._posted)

    def log_message(self, *_: Any) -> None:
        """Print nothing: a failure is told in the answer."""

    def _answer(self, respond: Callable[[], Answer]) -> None:
        try:
            check_host(self.headers.get("Host"), self.server.host)
            response = respond()
        except Exception as error:  # noqa: BLE001 a request that fails must not end the connection without an answer
            response = self._failed(error)
        self._send(response)

    def _target(self) -> tuple[str, str]:
        """Return the requested path, and its query."""
        path, _, query = self.path.partition("?")
        return unquote(path), query

    def _got(self) -> Answer:
        path, query = self._target()
        if path.startswith("/assets/"):
            return _asset(path.removeprefix("/assets/"))
        return self._shown(path, answer(self.server.dashboard, path, parse_qs(query, keep_blank_values=True)))

    def _posted(self) -> Answer:
        # The body is read first: what is left of it would be taken for the connection's next request.
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MOST_POSTED_BYTES:
            self.close_connection = True
            raise InputError(f"a request of up to {MOST_POSTED_BYTES:,} bytes, its length given, is needed")
        text = self.rfile.read(int(length)).decode("utf-8", "replace")
        check_origin(self.headers.get("Origin"), self.headers.get("Host"))
        path, query = self._target()
        fields = parse_qs(query) | parse_qs(text, keep_blank_values=True)
        return self._shown(path, answer(self.server.dashboard, path, fields, is_post=True))

    def _shown(self, path: str, shown: Any) -> Answer:
        if isinstance(shown, Download):
            return Answer(HTTPStatus.OK, shown.kind, shown.body, shown.name)
        if isinstance(shown, View):
            return self._page(path, shown, HTTPStatus.OK)
        return _json(shown, HTTPStatus.OK)

    def _page(self, path: str, view: View, status: HTTPStatus) -> Answer:
        text = framed(view, path, self.server.dashboard.results.folder)
        return Answer(status, "text/html; charset=utf-8", text.encode("utf-8", "replace"))

    def _failed(self, error: Exception) -> Answer:
        """Return one sentence on what is wrong, as a page or a document, whichever was requested."""
        status = HTTPStatus.INTERNAL_SERVER_ERROR
        message, hint = f"sorry, this is a bug in windtunnel ({type(error).__name__}: {error})", None
        if isinstance(error, WindtunnelError):
            message, hint = error.message, error.hint
        if isinstance(error, RefusedError):
            status = HTTPStatus.FORBIDDEN
        elif isinstance(error, NotThereError):
            status = HTTPStatus.NOT_FOUND
        elif isinstance(error, InputError):
            status = HTTPStatus.BAD_REQUEST
        elif isinstance(error, MemoryError):
            message, hint = "this machine's memory does not hold that many requests", "take fewer"
        elif not isinstance(error, WindtunnelError):
            traceback.print_exception(error, file=sys.stderr)
        path, _ = self._target()
        if path.startswith("/api/"):
            return _json({"error": message, "hint": hint}, status)
        title = {404: "Not there", 500: "Failed"}.get(status, "That cannot be")
        return self._page(path, View(title, lead=problem(message, hint)), status)

    def _send(self, response: Answer) -> None:
        tag = f'"{hashlib.sha256(response.body).hexdigest()[:24]}"'
        is_known = response.status == HTTPStatus.OK and self.headers.get("If-None-Match") == tag
        self.send_response(HTTPStatus.NOT_MODIFIED if is_known else response.status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("ETag", tag)
        if response.filename:
            self.send_header("Content-Disposition", f'attachment; filename="{response.filename}"')
        if not is_known:
            self.send_header("Content-Type", response.kind)
            self.send_header("Content-Length", str(len(response.body)))
        self.end_headers()
        if not is_known and self.command != "HEAD":
            self.wfile.write(response.body)


class RefusedError(InputError):
    """A request from another host or site."""


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an interface."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


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


def _asset(name: str) -> Answer:
    known = SHARED_ASSETS | {file.name: file for file in ASSETS.iterdir()}
    if name not in known:
        raise NotThereError(f"there is no file {name!r}")
    kind = KINDS[known[name].suffix]
    return Answer(HTTPStatus.OK, f"{kind}; charset=utf-8", known[name].read_bytes())


def _json(document: Any, status: HTTPStatus) -> Answer:
    return Answer(status, "application/json", f"{as_text(document)}\n".encode())
