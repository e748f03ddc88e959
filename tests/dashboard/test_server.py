"""The server answers its own pages and nobody else's, and every mistake in a sentence."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from dashboard.conftest import Ask
from windtunnel.catalog import model_config
from windtunnel.cli.dashboard import command
from windtunnel.cli.verbs import Options
from windtunnel.dashboard.listening import listening_socket
from windtunnel.dashboard.server import DashboardServer, RefusedError, check_host, check_origin
from windtunnel.dashboard.view import dashboard_of
from windtunnel.errors import InputError, MissingExtraError


def test_pages_load_nothing_from_elsewhere(ask: Ask) -> None:
    page = ask("/run/served/slow")
    assert page.status == 200
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]
    assert "unsafe" not in page.headers["Content-Security-Policy"]
    assert "http" not in page.text.replace("http://www.w3.org/2000/svg", "")
    # What the policy would block, a page must not have.
    assert "<style" not in page.text
    assert " style=" not in page.text
    assert "<script>" not in page.text


def test_every_file_that_a_page_names_is_shipped(ask: Ask) -> None:
    pages = ("/", "/run/found", "/timeline/served/slow", "/try")
    names = {name for page in pages for name in re.findall(r'="(/assets/[^"]+)"', ask(page).text)}
    assert len(names) == 10
    assert all(ask(name).status == 200 for name in names)
    assert ask("/assets/../server.py").status == 404
    assert ask("/assets/%2e%2e/server.py").status == 404


def test_what_did_not_change_is_not_sent_again(ask: Ask) -> None:
    tag = ask("/").headers["ETag"]
    again = ask("/", If_None_Match=tag)
    assert (again.status, again.text) == (304, "")
    assert ask("/", If_None_Match='"other"').status == 200


@pytest.mark.parametrize("path", ["/nope", "/run/none", "/run/..%2f..%2fetc", "/catalog/planets", "/api/save"])
def test_what_is_not_there(ask: Ask, path: str) -> None:
    assert ask(path).status == 404


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/run/torn", "not JSON"),
        ("/requests/served/slow?page=9", "there are 1 to 2"),
        ("/requests/served/slow?sort=speed", "no column"),
        ("/compare?run=served/slow&run=capacity.json", "serving runs can be compared"),
        ("/step/served/slow?batch=-1", "not a number"),
        ("/step/served/slow?batch=0", "the step is empty"),
        ("/timeline/real", "no steps.parquet"),
        ("/requests/grid.json", "no requests.parquet"),
        ("/api/timeline/served/slow?from=x", "a number is needed"),
    ],
)
def test_a_wrong_address_gets_one_sentence(ask: Ask, path: str, said: str) -> None:
    answer = ask(path)
    assert answer.status == 400
    assert said in answer.text
    assert "Traceback" not in answer.text


@pytest.mark.parametrize("kind", ["models", "devices", "nodes", "engines", "traces", "calibrations"])
@pytest.mark.parametrize("page", ["catalog", "api/catalog"])
def test_a_name_in_an_address_is_no_path(ask: Ask, tmp_path: Path, kind: str, page: str) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(model_config("meta-llama/Llama-3.1-8B") | {"secret": 1}))
    there = [ask(f"/{page}/{kind}/{quote(name, safe='')}") for name in (str(config), str(tmp_path), f"./{config}")]
    gone = ask(f"/{page}/{kind}/{quote(str(tmp_path / 'confi.json'), safe='')}")
    for answer in (*there, gone):
        assert answer.status == 400
        assert "in the catalog" in answer.text
        assert "config.json?" not in answer.text


def test_a_result_that_is_nested_too_deeply_is_broken(serve: Callable[[Path], Ask], tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text('{"windtunnel": "1", "a": ' + "[" * 100_000)
    ask = serve(tmp_path)
    assert ask("/").status == ask("/api/runs").status == 200
    assert ask("/run/deep.json").status == 400


@pytest.mark.parametrize("text", ["a: " + "[" * 100_000, "a: &a [*a]", "{" * 900, "a: !!int x"])
def test_no_text_on_the_form_ends_the_server(ask: Ask, text: str) -> None:
    answer = ask("/api/trial", post={"text": text})
    assert answer.status == 400
    assert "the text is neither YAML" in answer.document["error"]
    assert ask("/").status == 200


@pytest.mark.parametrize("host", ["localhost:1234", "127.0.0.1:80", "[::1]:80", "192.168.1.5:8000"])
def test_this_machine_may_be_named_by_address(host: str) -> None:
    check_host(host, "127.0.0.1")


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "localhost.evil.example", "127.0.0.1.nip.io", "[", "", None]
)
def test_another_name_that_leads_here_is_refused(host: str | None) -> None:
    with pytest.raises(RefusedError):
        check_host(host, "127.0.0.1")


def test_dns_rebinding_meets_403(ask: Ask) -> None:
    assert ask("/api/runs", Host="evil.example").status == 403


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://localhost:1", None])
def test_only_its_own_pages_may_post(origin: str | None) -> None:
    with pytest.raises(RefusedError):
        check_origin(origin, "127.0.0.1:8000")


def test_a_post_from_elsewhere_writes_nothing(ask: Ask, folder: Path) -> None:
    fields = {"model": "llama-3.1-8b", "device": "h100_sxm", "name": "stolen", "what": "scenario"}
    assert ask("/save", post=fields, Origin="http://evil.example").status == 403
    assert not (folder / "stolen.yaml").exists()


def test_a_body_without_a_length_or_too_long_is_refused(ask: Ask) -> None:
    assert ask("/trial", post={}, Content_Length="99999999").status == 400


@pytest.mark.parametrize(
    ("path", "method"), [("/trial", "GET"), ("/api/trial", "GET"), ("/", "POST"), ("/trial", "DELETE")]
)
def test_another_method_is_refused(ask: Ask, path: str, method: str) -> None:
    answer = ask(path, post={} if method == "POST" else None, method=method)
    assert answer.status == 405
    assert f"does not answer {method}" in answer.text


def test_many_ask_at_once(ask: Ask) -> None:
    statuses = []
    threads = [threading.Thread(target=lambda: statuses.append(ask("/").status)) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == [200] * 16


def test_small_answers_are_sent_at_once() -> None:
    """asyncio sets TCP_NODELAY only where the socket names its protocol; without it a read took up to 44 ms."""
    with listening_socket("127.0.0.1", 0, 1) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.proto == socket.IPPROTO_TCP


def test_a_port_that_is_taken_is_said(folder: Path) -> None:
    with (
        DashboardServer(dashboard_of(folder)) as first,
        pytest.raises(InputError, match="cannot be listened on") as taken,
    ):
        DashboardServer(dashboard_of(folder), port=first.port)
    assert taken.value.hint == "give --port 0 for a free one"
    with pytest.raises(InputError, match="cannot be listened on") as elsewhere:
        DashboardServer(dashboard_of(folder), "999.1.1.1", port=8000)
    assert elsewhere.value.hint == "leave --host out for this machine alone"
    with pytest.raises(InputError, match="0 to 65535"):
        DashboardServer(dashboard_of(folder), port=70000)


@pytest.mark.parametrize("package", ["starlette", "uvicorn"])
def test_a_missing_extra_is_named(package: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = ("windtunnel.dashboard.listening", "windtunnel.dashboard.server")
    for name in [name for name in sys.modules if name in modules or name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=f"{package} is not installed") as raised:
        command(Options(folder=folder, port=0, host=None, opens=False, json=False))
    assert raised.value.hint == "pip install 'windtunnel[dashboard]'"


def test_a_folder_that_is_none_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        dashboard_of(tmp_path / "runs")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file"):
        dashboard_of(tmp_path / "file")


@pytest.fixture
def heeded_interrupts() -> Iterator[None]:
    """Children heed SIGINT, also where a script runs the tests in the background, which ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.full
@pytest.mark.skipif(os.name != "posix", reason="SIGINT")
@pytest.mark.usefixtures("heeded_interrupts")
def test_ctrl_c_ends_it_cleanly(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "windtunnel", "dashboard", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert "http://127.0.0.1:" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 0
    assert said == "the dashboard has ended\n"
