"""The documentation site builds without a warning, and its reference of the Python API has every public name."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import windtunnel

REPOSITORY = Path(__file__).resolve().parents[1]
API = REPOSITORY / "docs" / "reference" / "api.md"
LINK_OR_SOURCE = re.compile(r'(?:href|src)="([^"#?]+)[^"]*"')
FROM_ELSEWHERE = re.compile(
    r'<(?:script|img|iframe)[^>]+src="(?:https?:)?//|<link[^>]+rel="stylesheet"[^>]+href="(?:https?:)?//'
)
"""A script, picture or style that a page loads from another server."""


def test_the_reference_has_every_public_name() -> None:
    documented = re.findall(r"^::: windtunnel\.(?:\w+\.)*(\w+)$", API.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(windtunnel.__all__) - set(documented) == set()


@pytest.mark.slow
def test_the_site_builds_links_its_pages_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the dependency group `site` is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path],
        cwd=REPOSITORY,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {page.relative_to(tmp_path): page.read_text(encoding="utf-8") for page in sorted(tmp_path.rglob("*.html"))}
    assert len(pages) > 40
    broken = [
        f"{page}: {target}"
        for page, text in pages.items()
        if page.name != "404.html"
        for target in LINK_OR_SOURCE.findall(text)
        if ":" not in target and not (tmp_path / page.parent / target).exists()
    ]
    assert broken == []
    assert [page for page, text in pages.items() if FROM_ELSEWHERE.search(text)] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", sorted((REPOSITORY / "docs" / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem
)
def test_notebooks_show_what_their_cells_print(path: Path) -> None:
    pytest.importorskip("nbclient", reason="the dependency group `site` is not installed")
    command = [sys.executable, path.with_name("run.py"), "--check", path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, (
        f"{done.stderr}\nmake notebooks keeps new outputs; read the difference before you commit it"
    )
