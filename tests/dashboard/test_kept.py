"""Kept answers are those that would be made, of this version of the files, for hosts that may ask."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from windtunnel.dashboard import results, server
from windtunnel.dashboard.server import dashboard_app
from windtunnel.dashboard.view import dashboard_of

CAPACITY = {"windtunnel": "0.1.0", "verb": "capacity", "capacity": {"requests_per_s": 3.0}, "scenario": {"model": "x"}}


@pytest.fixture
def made() -> list[str]:
    """Addresses whose answers were made and not kept."""
    return []


@pytest.fixture
def client(tmp_path: Path, made: list[str]) -> Iterator[TestClient]:
    (tmp_path / "first.json").write_text(json.dumps(CAPACITY))
    app = dashboard_app(dashboard_of(tmp_path), "127.0.0.1")
    inner = app.app

    async def counted(scope: Any, receive: Any, send: Any) -> None:
        made.extend([scope["path"]] if scope["type"] == "http" else [])
        await inner(scope, receive, send)

    app.app = counted
    with TestClient(app, base_url="http://127.0.0.1:8000") as client:
        yield client


def test_a_page_is_made_again_when_a_file_came_went_or_was_written_to(
    client: TestClient, made: list[str], tmp_path: Path
) -> None:
    first = client.get("/")
    again = client.get("/")
    assert made == ["/"]
    assert (again.text, again.headers) == (first.text, first.headers)
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "second.json").write_text(json.dumps(CAPACITY))
    assert "deep/second.json" in client.get("/").text
    (tmp_path / "deep" / "second.json").write_text(json.dumps(CAPACITY | {"windtunnel": "9.9.9"})[:-1])
    assert "deep/second.json" in (broken := client.get("/").text)
    assert broken != again.text
    (tmp_path / "deep" / "second.json").unlink()
    assert "second.json" not in client.get("/").text
    assert made == ["/"] * 4


def test_an_answer_is_kept_for_its_own_address(client: TestClient, made: list[str]) -> None:
    pages = ("/catalog/devices/h100_sxm", "/catalog/devices/l4", "/catalog/devices/l4?x=1", "/api/catalog/devices")
    texts = [client.get(page).text for page in pages]
    assert [client.get(page).text for page in pages] == texts
    assert len(made) == len(pages)


def test_a_wrong_host_gets_nothing_that_was_kept(client: TestClient) -> None:
    for path in ("/", "/assets/page.css"):
        assert client.get(path).status_code == 200
        assert client.get(path, headers={"Host": "evil.example"}).status_code == 403


@pytest.mark.parametrize("path", ["/", "/assets/page.css"])
def test_a_browser_that_has_an_answer_gets_none(client: TestClient, path: str) -> None:
    whole = client.get(path)
    again = client.get(path, headers={"If-None-Match": whole.headers["ETag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["Content-Security-Policy"] == whole.headers["Content-Security-Policy"]


def test_nothing_is_kept_of_a_folder_of_very_many_files(
    client: TestClient, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "MOST_STAMPS", 1)
    assert client.get("/").text == client.get("/").text == client.get("/").text
    assert made == ["/"] * 3


def test_errors_forms_and_searches_are_not_kept(client: TestClient, made: list[str]) -> None:
    for path in ("/run/missing", "/search", "/recommend"):
        assert client.get(path).text == client.get(path).text
    assert len(made) == 6


def test_memory_of_kept_answers_is_bounded(
    client: TestClient, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    length = len(client.get("/catalog/devices/l4").content)
    monkeypatch.setattr(server, "MOST_BYTES", 2 * length + 400)
    for number in range(6):
        client.get(f"/catalog/devices/l4?x={number}")
    assert client.app._num_bytes <= 2 * length + 400  # type: ignore[attr-defined]
    assert len(client.app._answers) == 2  # type: ignore[attr-defined]
    client.get("/catalog/devices/l4?x=0")
    assert len(made) == 8
