"""The dashboard against attacks of OWASP's list that a local server can meet; after each it answers its own pages."""

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from dashboard.conftest import Ask, asker
from windtunnel.dashboard.server import DashboardServer
from windtunnel.dashboard.view import dashboard_of

SCRIPT = "<script>alert(1)</script>"
SECRET = "only for its owner"
CSRF = [
    {"Origin": "http://evil.example"},
    {"Origin": "null"},
    {"Origin": ""},
    {"Origin": "http://127.0.0.1:1"},
    {"Origin": "http://127.0.0.1.evil.example"},
    {"Origin": "https://127.0.0.1:{port}"},
    {"Origin": "http://evil.example", "Referer": "http://127.0.0.1:{port}/try"},
    {"Origin": "http://evil.example", "Content_Type": "text/plain"},
]
TRAVERSALS = [
    *("..", "../secret.json", "..%2fsecret.json", "%2e%2e/secret.json", "%2e%2e%2fsecret.json", "..%5csecret.json"),
    *("..%252fsecret.json", "....//secret.json", "runs/../../secret.json", "%00", "secret.json%00.json", "/etc/passwd"),
    *(
        "%2fetc%2fpasswd",
        "file:%2f%2f%2fetc%2fpasswd",
        "link.json",
        "~root",
        ".hidden.json",
        "%c0%ae%c0%ae/secret.json",
    ),
]
MALFORMED = [
    b"\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"GET / HTTP/1.1\r\nHost\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"x" * 200_000 + b"\r\n\r\n",
    b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -5\r\n\r\n",
    b"POST /trial HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    b"POST /trial HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"POST /trial HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"GET /\x00\xff HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"CONNECT evil.example:443 HTTP/1.1\r\nHost: evil.example\r\n\r\n",
]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A folder whose every name is a script, beside a secret that a link and dots lead to."""
    runs = tmp_path / "runs"
    runs.mkdir()
    (tmp_path / "secret.json").write_text(json.dumps({"windtunnel": "1", "secret": SECRET}))
    (runs / "link.json").symlink_to(tmp_path / "secret.json")
    (runs / ".hidden.json").write_text(json.dumps({"windtunnel": "1", "secret": SECRET}))
    deployment = {"device": SCRIPT, "engine": {"name": SCRIPT}}
    scenario = {"model": SCRIPT, "deployment": deployment, "workload": {"trace": {"path": SCRIPT}}}
    for name in ("run" + SCRIPT.replace("/", ""), "plain"):
        (runs / name).mkdir()
        document = {"windtunnel": SCRIPT, "scenario": scenario, "summary": {"bound_by": SCRIPT}, SCRIPT: SCRIPT}
        (runs / name / "summary.json").write_text(json.dumps(document))
    (runs / f"{SCRIPT.replace('/', '')}.json").write_text(json.dumps({"windtunnel": SCRIPT, "verb": SCRIPT}))
    return runs


@pytest.fixture
def server(results: Path) -> Iterator[DashboardServer]:
    with DashboardServer(dashboard_of(results)) as started:
        thread = threading.Thread(target=started.serve, daemon=True)
        thread.start()
        yield started
        started.stop()
        thread.join()


@pytest.fixture
def ask(server: DashboardServer) -> Ask:
    return asker(server)


def connection(server: DashboardServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=30)


@pytest.mark.parametrize("name", TRAVERSALS)
def test_no_path_leads_out_of_the_folder(ask: Ask, name: str) -> None:
    for page in (
        "run",
        "api/run",
        "requests",
        "api/timeline",
        "step",
        "assets",
        "catalog/models",
        "api/catalog/devices",
    ):
        answer = ask(f"/{page}/{name}")
        assert answer.status in (400, 404, 405), (page, answer.status)
        assert SECRET not in answer.text
        assert "root:" not in answer.text


def test_no_name_becomes_a_script(ask: Ask, results: Path) -> None:
    names = [path.name for path in results.iterdir() if not path.is_symlink() and not path.name.startswith(".")]
    pages = [
        "/",
        "/try",
        "/search",
        f"/recommend?model={quote(SCRIPT)}",
        f"/recommend/{quote(SCRIPT)}",
        *(f"/{page}/{quote(name)}" for name in names for page in ("run", "scenario", "step")),
    ]
    pages += [f"/{quote(SCRIPT)}", f"/compare?run={quote(names[0])}&run={quote(SCRIPT)}", f"/try?model={quote(SCRIPT)}"]
    pages += [f"/requests/plain?sort={quote(SCRIPT)}", f"/catalog/{quote(SCRIPT)}", f"/run/plain?{quote(SCRIPT)}=1"]
    for page in pages:
        answer = ask(page)
        assert answer.status in (200, 400, 404), page
        assert "<script>alert" not in answer.text, page
        assert "script-src 'self'" in answer.headers["Content-Security-Policy"]
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
    posted = ask("/trial", post={"text": f"model: '{SCRIPT}'", "device": SCRIPT, "arrivals": SCRIPT})
    assert (posted.status, "<script>alert" in posted.text) == (400, False)
    asked = ask("/recommendation", post={"model": SCRIPT, "devices": SCRIPT, "slo": SCRIPT})
    assert (asked.status, "<script>alert" in asked.text) == (400, False)


@pytest.mark.parametrize("headers", CSRF, ids=[str(number) for number in range(len(CSRF))])
@pytest.mark.parametrize(
    "page", ["/trial", "/sweep", "/save", "/recommendation", "/stop/1", "/api/trial", "/api/sweep"]
)
def test_no_other_site_posts(
    ask: Ask, server: DashboardServer, results: Path, headers: dict[str, str], page: str
) -> None:
    before = sorted(results.rglob("*"))
    sent = {name: value.format(port=server.port) for name, value in headers.items()}
    answer = ask(page, post={"model": "llama-3.1-8b", "device": "h100_sxm", "name": "x", "what": "scenario"}, **sent)
    assert answer.status == 403
    assert "may not post" in answer.text
    assert sorted(results.rglob("*")) == before


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.", "[::1", "a b"]
)
def test_no_other_host_is_answered(ask: Ask, host: str) -> None:
    for page in ("/", "/api/runs", "/run/plain", "/assets/page.css"):
        answer = ask(page, Host=host)
        assert answer.status in (400, 403)
        assert SECRET not in answer.text


def test_a_line_break_in_a_name_makes_no_header(ask: Ask) -> None:
    for page in ("trace", "run", "catalog/models"):
        answer = ask(f"/{page}/x%0d%0aSet-Cookie:%20a=b%0d%0a%0d%0a")
        assert answer.status in (400, 404)
        assert "Set-Cookie" not in answer.headers


@pytest.mark.parametrize("request_bytes", MALFORMED, ids=[str(number) for number in range(len(MALFORMED))])
def test_malformed_requests_end_their_connection_alone(ask: Ask, server: DashboardServer, request_bytes: bytes) -> None:
    with connection(server) as client, contextlib.suppress(ConnectionError):
        client.sendall(request_bytes)
        with contextlib.suppress(OSError):  # A server that has ended the connection leaves nothing to shut down.
            client.shutdown(socket.SHUT_WR)
        said = b"".join(iter(lambda: client.recv(65536), b""))
        assert said == b"" or said.split(b" ")[1][:1] in (b"4", b"5"), said[:80]
        assert b"Traceback" not in said
    assert ask("/").status == 200


def test_large_bodies_are_not_read(ask: Ask, server: DashboardServer) -> None:
    head = f"POST /trial HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nOrigin: http://127.0.0.1:{server.port}\r\n"
    for length in ("Content-Length: 99999999999", "Transfer-Encoding: chunked"):
        with connection(server) as client:
            client.sendall(f"{head}{length}\r\n\r\n".encode())
            assert client.recv(1000).startswith(b"HTTP/1.1 400")
    assert ask("/").status == 200


@pytest.mark.full
def test_slow_and_many_clients_keep_nobody_waiting(ask: Ask, server: DashboardServer) -> None:
    """Clients that send a header a byte at a time, or nothing, hold no thread."""
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(connection(server)) for _ in range(200)]
        for client in slow[:100]:
            client.sendall(b"GET / HTTP/1.1\r\nHost: 127.")
        assert [ask("/api/runs").status for _ in range(5)] == [200] * 5
        for client in slow[:100]:
            client.sendall(b"0")
        assert ask("/").status == 200
