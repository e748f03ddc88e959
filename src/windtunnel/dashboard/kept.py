"""Answers kept in memory: pages of unchanged results, and the assets, are sent again without being made again."""

import hashlib
import mimetypes
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from importlib.resources import files

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from windtunnel.dashboard.results import Results
from windtunnel.errors import WindtunnelError

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
    """An application in front of the dashboard's that sends what it has kept, and passes other requests on.

    Args:
        results: what the answers depend on.
        check: raises for a host that may not ask.
        headers: of every answer.
    """

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
        """Answer a request."""
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
